//! Savepoints of the current transaction: subtransactions of one that is in progress at the
//! provider can be rolled back by themselves. Run by the process that applies it.
//!
//! A savepoint is a local subtransaction inside of the one before it. It stays open, because the
//! stream does not tell when the provider's subtransaction ends, only when it is rolled back. The
//! session's state outside of PostgreSQL's transaction is restored with it. Most of that can't have
//! changed: a transaction that conflicts, calls a function, changes a key or merges is given up
//! (`Current::runs`). The rest:
//!
//! | state | at a savepoint | at a rollback to it |
//! |---|---|---|
//! | rows to be written together | written | dropped |
//! | open tables, the user | closed (references belong to a subtransaction) | likewise |
//! | deletions, rows under deferrable constraints | counted | cut; given up if stored |
//! | counts, of the transaction and each table | copied | restored |
//! | versions of merged rows | given up if there are any | likewise |

use braid_postgres::error::PgError;
use braid_postgres::subtransaction::Subtransaction;

use super::held_removals::Mark;
use super::{Counts, Session};

/// State at a savepoint.
#[derive(Debug)]
pub struct Savepoint {
    subtransaction: Subtransaction,
    removals: Mark,
    unchecked: usize,
    counts: Counts,
    of_tables: Vec<((u32, u32), Counts)>,
}

impl Session {
    /// Sets a savepoint in the current transaction.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn savepoint(&mut self) -> Result<Savepoint, PgError> {
        self.flush()?;
        self.let_go()?;
        let Self {
            tables, attempt, ..
        } = self;
        let attempt = attempt.get_or_insert_default();
        let counts = |key: &(u32, u32)| tables.get(*key).map(|target| (*key, target.counts));
        Ok(Savepoint {
            removals: attempt.removals.mark(),
            unchecked: attempt.unchecked.len(),
            counts: attempt.counts,
            of_tables: attempt.open.iter().filter_map(counts).collect(),
            subtransaction: Subtransaction::begin(),
        })
    }

    /// Rolls back to a savepoint, and the savepoints inside of it first.
    ///
    /// # Errors
    /// 40001 if that is not possible.
    pub fn roll_back_to(&mut self, savepoint: Savepoint) -> Result<(), PgError> {
        self.drop_held();
        self.let_go()?;
        if !self.attempt().removals.reaches(savepoint.removals) {
            return Err(self
                .hints
                .wait_for_commit("It has rolled back to a savepoint."));
        }
        savepoint.subtransaction.end(false);
        let Self {
            tables, attempt, ..
        } = self;
        let attempt = attempt.get_or_insert_default();
        attempt.removals.roll_back_to(savepoint.removals);
        attempt.unchecked.truncate(savepoint.unchecked);
        attempt.counts = savepoint.counts;
        for key in &attempt.open {
            if let Some(target) = tables.get_mut(*key) {
                target.counts = Counts::default();
            }
        }
        for (key, counts) in savepoint.of_tables {
            if let Some(target) = tables.get_mut(key) {
                target.counts = counts;
            }
        }
        Ok(())
    }

    /// Keeps the changes since a savepoint, and ends its subtransaction. No table is open.
    pub fn release(savepoint: Savepoint) {
        savepoint.subtransaction.end(true);
    }

    /// Closes what belongs to the current subtransaction.
    fn let_go(&mut self) -> Result<(), PgError> {
        if self.attempt().written.has_merged() {
            return Err(self
                .hints
                .wait_for_commit("It has a savepoint and merges rows."));
        }
        self.close_tables();
        // The list has a table as often as it was opened.
        let open = &mut self.attempt().open;
        open.sort_unstable();
        open.dedup();
        Ok(())
    }
}
