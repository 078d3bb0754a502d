//! User with whose rights the current transaction works: the process's own, or the owner of a
//! table. Run by the appliers.
//!
//! Not for: switching the user (`user`).

use braid_postgres::error::PgError;
use braid_postgres::memory::Scratch;
use pgrx::pg_sys;

use super::Session;
use super::target::Key;
use super::target::Tables;
use super::user::UserSwitch;

/// The parts of a session that switch the current transaction's user.
pub(super) struct Rights<'s> {
    pub(super) user: &'s mut UserSwitch,
    pub(super) tables: &'s Tables,
    /// User to apply as; `None`: each table's owner.
    pub(super) run_as: Option<u32>,
    pub(super) change_context: &'s Scratch,
}

impl Rights<'_> {
    /// Switches to the rights of the table's owner, or of the user whom the subscription names.
    pub(super) fn take_owners(&mut self, key: Key) {
        let owner = match (self.run_as, self.tables.get(key)) {
            (Some(user), _) => pg_sys::Oid::from(user),
            (None, Some(target)) => target.plan.owner,
            (None, None) => return,
        };
        self.user.work_as(owner);
    }

    /// Runs `work` as this process, not as the owner of the table.
    pub(super) fn with_own<T>(
        &mut self,
        key: Key,
        work: impl FnOnce() -> Result<T, PgError>,
    ) -> Result<T, PgError> {
        self.user.restore();
        let done = work();
        self.take_owners(key);
        // SPI leaves the memory context in which it was called as the current one. This makes sure.
        self.change_context.context().enter();
        done
    }
}

impl Session {
    /// Returns access to the current transaction's user.
    pub(super) fn rights(&mut self) -> Rights<'_> {
        Rights {
            user: &mut self.attempt.get_or_insert_default().user,
            tables: &self.tables,
            run_as: self.identity.run_as,
            change_context: &self.change_context,
        }
    }

    /// Switches to the rights of the table's owner, or of the user whom the subscription names.
    pub(super) fn work_as_owner_of(&mut self, key: Key) {
        self.rights().take_owners(key);
    }
}
