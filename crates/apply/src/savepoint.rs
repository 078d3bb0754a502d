//! Parts of the transaction in hand that can be rolled back by themselves: subtransactions of one
//! that runs at the provider. Run by the process that applies it.
//!
//! A savepoint is a local subtransaction, inside of the one before it, and stays open: nobody says
//! when the provider's has ended, only when it is rolled back. What the session keeps outside of
//! PostgreSQL's transaction is put back with it. Most of that can't have changed: whatever meets a
//! conflict, asks a function, moves a key or merges gives up (`Current::runs`). What is left:
//!
//! | kept | at a savepoint | when it is rolled back to |
//! |---|---|---|
//! | rows to be written together | written | forgotten |
//! | open tables, the user | let go of, as references belong to a subtransaction | let go of |
//! | deletions, rows under deferrable constraints | counted | cut off there; gives up when deletions were written down since |
//! | counts, of the transaction and each table | copied | put back |
//! | versions of merged rows | none, or gives up | as well |

use braid_postgres::error::PgError;
use braid_postgres::subtransaction::Subtransaction;

use super::held_removals::Mark;
use super::{Counts, Session};

/// A place to go back to.
#[derive(Debug)]
pub struct Savepoint {
    subtransaction: Subtransaction,
    removals: Mark,
    unchecked: usize,
    counts: Counts,
    of_tables: Vec<((u32, u32), Counts)>,
}

impl Session {
    /// A place to go back to in the transaction in hand.
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

    /// Undo what came after a savepoint, those inside of it first.
    ///
    /// # Errors
    /// 40001 when that can't be done.
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

    /// What came after a savepoint stays, whatever it is. Nothing is open.
    pub fn release(savepoint: Savepoint) {
        savepoint.subtransaction.end(true);
    }

    /// Let go of what belongs to the current subtransaction.
    fn let_go(&mut self) -> Result<(), PgError> {
        if self.attempt().written.has_merged() {
            return Err(self
                .hints
                .wait_for_commit("It has a savepoint and merges rows."));
        }
        self.close_tables();
        // Each is in it as often as it was opened.
        let open = &mut self.attempt().open;
        open.sort_unstable();
        open.dedup();
        Ok(())
    }
}
