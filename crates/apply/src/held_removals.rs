//! Deletions of an attempt that are not stored yet: deleted rows, and rows removed from tables
//! without a key. Run by the appliers.

use braid_node::taken_row::{self, TakenRow};
use braid_node::tombstone::{self, Tombstone};
use braid_postgres::error::PgError;
use braid_postgres::memory;

/// Largest number of deletions that are held back until the transaction ends.
const HELD: usize = 1000;
/// As [`HELD`], for a transaction in progress at the provider. Stored deletions have a time, so its
/// deletions are held back until the time is known.
const HELD_WHILE_IT_RUNS: usize = 1_000_000;

/// Deletions that are held back.
#[derive(Debug, Default)]
pub(super) struct HeldRemovals {
    tombstones: Vec<Tombstone>,
    taken: Vec<TakenRow>,
    /// How often deletions were stored.
    stored: u64,
}

/// State at a savepoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    tombstones: usize,
    taken: usize,
    stored: u64,
}

/// Room for more deletions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    Enough,
    /// None before the deletions are stored.
    ToBeStored,
    /// None, and the deletions can't be stored, because the transaction has no time yet.
    Exceeded,
}

impl HeldRemovals {
    /// Adds a deleted row.
    pub(super) fn delete(&mut self, tombstone: Tombstone) {
        self.tombstones.push(tombstone);
    }

    /// Adds a row that was removed from a table without a key.
    pub(super) fn take(&mut self, taken: TakenRow) {
        self.taken.push(taken);
    }

    /// Returns the room that is left.
    pub(super) fn room(&self, runs: bool) -> Room {
        let held = self.tombstones.len() + self.taken.len();
        match (runs, held) {
            (true, HELD_WHILE_IT_RUNS..) => Room::Exceeded,
            (false, HELD..) => Room::ToBeStored,
            _ => Room::Enough,
        }
    }

    /// Sets the time, when the transaction has committed at the provider.
    pub(super) fn set_timestamp(&mut self, timestamp: i64) {
        for tombstone in &mut self.tombstones {
            tombstone.timestamp = timestamp;
        }
        for taken in &mut self.taken {
            taken.removal.0 = timestamp;
        }
    }

    /// Stores the deletions; if the time is not known yet, with a marker for the time of the
    /// commit.
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

    /// Returns the present state.
    pub(super) fn mark(&self) -> Mark {
        Mark {
            tombstones: self.tombstones.len(),
            taken: self.taken.len(),
            stored: self.stored,
        }
    }

    /// Whether the deletions that were held back at a savepoint still are.
    pub(super) fn reaches(&self, mark: Mark) -> bool {
        mark.tombstones + mark.taken == 0 || mark.stored == self.stored
    }

    /// Forgets the deletions after a savepoint.
    pub(super) fn roll_back_to(&mut self, mark: Mark) {
        self.tombstones.truncate(mark.tombstones);
        self.taken.truncate(mark.taken);
    }

    /// Returns an empty one that uses the memory of this one.
    pub(super) fn emptied(mut self) -> Self {
        self.tombstones.clear();
        self.taken.clear();
        self.stored = 0;
        self
    }
}
