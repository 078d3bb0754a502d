//! Removals of an attempt that are not written down yet: deletions of rows, and rows taken out of
//! tables without a key. Run by the appliers.

use braid_node::taken_row::{self, TakenRow};
use braid_node::tombstone::{self, Tombstone};
use braid_postgres::error::PgError;
use braid_postgres::memory;

/// Removals of a transaction that are held back until it ends.
const HELD: usize = 1000;
/// Removals of a transaction that runs at the provider: what is written down has a time, so they
/// are held back as long as it runs.
const HELD_WHILE_IT_RUNS: usize = 1_000_000;

/// Removals that are held back.
#[derive(Debug, Default)]
pub(super) struct HeldRemovals {
    tombstones: Vec<Tombstone>,
    taken: Vec<TakenRow>,
    /// How often they were written down.
    stored: u64,
}

/// State to go back to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    tombstones: usize,
    taken: usize,
    stored: u64,
}

/// Room for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    Enough,
    /// They are to be written down first.
    ToBeStored,
    /// They are too many, and can't be written down as the transaction has no time yet.
    Exceeded,
}

impl HeldRemovals {
    /// A row is gone.
    pub(super) fn delete(&mut self, tombstone: Tombstone) {
        self.tombstones.push(tombstone);
    }

    /// A row was taken out of a table without a key.
    pub(super) fn take(&mut self, taken: TakenRow) {
        self.taken.push(taken);
    }

    /// The room that is left.
    pub(super) fn room(&self, runs: bool) -> Room {
        let held = self.tombstones.len() + self.taken.len();
        match (runs, held) {
            (true, HELD_WHILE_IT_RUNS..) => Room::Exceeded,
            (false, HELD..) => Room::ToBeStored,
            _ => Room::Enough,
        }
    }

    /// The transaction has committed at the provider, at this time.
    pub(super) fn set_timestamp(&mut self, timestamp: i64) {
        for tombstone in &mut self.tombstones {
            tombstone.timestamp = timestamp;
        }
        for taken in &mut self.taken {
            taken.removal.0 = timestamp;
        }
    }

    /// Write them down. With the time of the commit if that is not known yet.
    pub(super) fn store(&mut self, is_unsettled: bool) -> Result<(), PgError> {
        if self.tombstones.is_empty() && self.taken.is_empty() {
            return Ok(());
        }
        self.stored += 1;
        if is_unsettled {
            self.set_timestamp(tombstone::AT_COMMIT);
        }
        let stored = memory::in_transaction(|| {
            tombstone::store(&self.tombstones).and_then(|()| taken_row::store(&self.taken))
        });
        self.tombstones.clear();
        self.taken.clear();
        stored
    }

    /// The state of now.
    pub(super) fn mark(&self) -> Mark {
        Mark {
            tombstones: self.tombstones.len(),
            taken: self.taken.len(),
            stored: self.stored,
        }
    }

    /// Whether what was held back then still is.
    pub(super) fn reaches(&self, mark: Mark) -> bool {
        mark.tombstones + mark.taken == 0 || mark.stored == self.stored
    }

    /// Forget what came after.
    pub(super) fn roll_back_to(&mut self, mark: Mark) {
        self.tombstones.truncate(mark.tombstones);
        self.taken.truncate(mark.taken);
    }

    /// Nothing, with the memory of these.
    pub(super) fn emptied(mut self) -> Self {
        self.tombstones.clear();
        self.taken.clear();
        self.stored = 0;
        self
    }
}
