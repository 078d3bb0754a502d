//! Applying as the table's owner: the rights, and the limits, of PostgreSQL's own `run_as_owner =
//! false`.

use braid_postgres::acting_role::ActingRole;
use braid_postgres::catalog;
use braid_postgres::plain;
use braid_postgres::setting::Level;
use pgrx::pg_sys;

/// What the user whom this process works as may do with a table: whether it has this right
/// (ACL_INSERT and so on), and whether row-level security applies to it. In a transaction; the
/// table exists.
pub fn rights(table: pg_sys::Oid, right: u32) -> (bool, bool) {
    let policies = plain::check_enable_rls(table, pg_sys::InvalidOid, true);
    (
        may(catalog::current_role(), table, right),
        u32::try_from(policies).ok() == Some(pg_sys::CheckEnableRlsResult::RLS_ENABLED),
    )
}

/// Whether a role has this right (ACL_INSERT and so on) on a table. In a transaction; the table
/// exists.
pub fn may(role: pg_sys::Oid, table: pg_sys::Oid, right: u32) -> bool {
    let found = plain::pg_class_aclcheck(table, role, pg_sys::AclMode::from(right));
    found == pg_sys::AclResult::ACLCHECK_OK
}

/// The user that this process works as, and how to go back. Switching is cheap, and stays until
/// somebody else is needed: a transaction's changes usually have one owner.
#[derive(Debug, Default)]
pub struct UserSwitch {
    saved: Option<Saved>,
}

#[derive(Debug)]
struct Saved {
    before: ActingRole,
    settings: Level,
    current: pg_sys::Oid,
}

impl UserSwitch {
    /// Work as `user` from here on. To be called in a transaction, whose abort restores it too.
    pub fn work_as(&mut self, user: pg_sys::Oid) {
        self.work_as_limited(user, pg_sys::SECURITY_RESTRICTED_OPERATION);
    }

    /// Work as `user` from here on, who refreshes a materialized view. PostgreSQL runs the view's
    /// query as its owner, with limits of its own; what it does around that needs a temporary table.
    pub fn work_as_caller_of_refresh(&mut self, user: pg_sys::Oid) {
        self.restore();
        self.work_as_limited(user, pg_sys::SECURITY_LOCAL_USERID_CHANGE);
    }

    fn work_as_limited(&mut self, user: pg_sys::Oid, limits: u32) {
        match &self.saved {
            Some(saved) if saved.current == user => return,
            Some(_) => self.restore(),
            None => {}
        }
        let before = ActingRole::now();
        if before.role == user {
            return;
        }
        // A superuser may do everything anyway. Nobody else may reach this process's rights,
        // through a trigger that leaves something behind.
        let limits = if plain::superuser_arg(user) {
            0
        } else {
            limits
        };
        before.other(user, limits).take();
        self.saved = Some(Saved {
            before,
            settings: Level::begin(),
            current: user,
        });
    }

    /// Work as this process's own user again.
    pub fn restore(&mut self) {
        if let Some(saved) = self.saved.take() {
            // Settings that a trigger changed go back too.
            saved.settings.end(false);
            saved.before.take();
        }
    }
}
