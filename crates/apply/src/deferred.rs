//! Deferrable constraints, checked when a transaction is applied. Run by the appliers.
//!
//! A transaction may violate such a constraint until it ends: two rows swap their keys. So each
//! write only notes a row that conflicts with another one (`OpenTable::note_unchecked`). Noted rows
//! that are still there at the end, and still conflict, are handled as any unique conflict
//! (`in_the_way`): first the transaction is applied again, row by row, then one of the two rows
//! loses.
//!
//! A note takes 8 bytes per row, and 24 bytes at the end. If a transaction is committed in chunks,
//! each chunk ends with a check.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::slot::Slot;
use pgrx::pg_sys;

use super::Session;
use super::constraint::{Checked, Unchecked};
use super::in_the_way::Way;
use super::lookup::LockedRows;
use super::relation::RemoteRelation;
use super::row_context::RowContext;
use super::table::OpenTable;
use super::target::Key;

impl Session {
    /// Checks deferrable constraints, when all of the transaction is written.
    pub(super) fn check_deferred(&mut self) -> Result<(), PgError> {
        let Self {
            tables, attempt, ..
        } = self;
        let Some(attempt) = attempt else {
            return Ok(());
        };
        let mut unchecked = std::mem::take(&mut attempt.unchecked);
        for key in &attempt.open {
            let table = tables.get_mut(*key).and_then(|one| one.table.as_mut());
            if let Some(table) = table {
                unchecked.extend(table.unchecked.drain(..).map(|row| (*key, row)));
            }
        }
        unchecked
            .into_iter()
            .try_for_each(|(key, row)| self.check_row(key, row))
    }

    fn check_row(&mut self, key: Key, row: Unchecked) -> Result<(), PgError> {
        let remote = self.remote(key.0)?;
        self.open_table(key.0, &remote, pg_sys::Oid::from(key.1))?;
        self.work_as_owner_of(key);
        let table = self.tables.open(key)?;
        let Some(slot) = table.written_at(row.tid) else {
            return Ok(());
        };
        let rows = table.in_the_way(Some(row.tid), Checked::AtTheEnd)?;
        if rows.is_empty() {
            Ok(())
        } else if self.hints.check_other_keys {
            self.settle_at_the_end(key, &remote, (&slot, row), &rows)
        } else {
            Err(violated(&remote))
        }
    }

    /// Resolves the conflict of a row that was written, and is in the new slot too, with its
    /// blocking rows.
    fn settle_at_the_end(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        (slot, row): (&Slot, Unchecked),
        rows: &LockedRows,
    ) -> Result<(), PgError> {
        let Some(current) = self.current().cloned() else {
            return Err(violated(remote));
        };
        let context = RowContext {
            key,
            remote,
            current: &current,
        };
        match self.settle(context, row.exists, rows)? {
            // The row that would have to stay was replaced, and can't be restored.
            Way::Stay if row.exists => return Err(violated(remote)),
            Way::Clear => return Err(violated(remote)),
            Way::ForNow => return Ok(()),
            Way::Leave | Way::Stay => {}
        }
        self.tables.open(key)?.delete_row(slot)?;
        if row.exists {
            self.note_version(key, &current, OpenTable::new_slot);
            self.deletions()
                .remember(key, current.timestamp, OpenTable::new_slot)?;
        }
        self.count(key, |counts| counts.deletes += 1);
        Ok(())
    }
}

fn violated(remote: &RemoteRelation) -> PgError {
    PgError::new(
        SqlState::UniqueViolation,
        format!(
            "transaction leaves rows in table \"{}\" that a deferrable constraint keeps apart",
            remote.qualified_name()
        ),
    )
}
