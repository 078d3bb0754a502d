//! Where the rows of a table were last found or written, by the hash of their keys: what is changed
//! often is found again without its index, and without a walk through the versions that other
//! transactions have left behind. Run by the appliers.
//!
//! An entry is a hint. Whoever follows one checks that a row with that very key is alive there, and
//! looks in the index if not: so entries are neither removed nor corrected when a transaction is
//! rolled back or the row goes elsewhere.

use braid_postgres::heap_page::Place;
use pgrx::pg_sys;

/// How many keys are remembered of a table; of two that share an entry, the one seen last.
const ENTRIES: usize = 1024;

/// Look-ups before anything is remembered: tables of which little changes need no memory for it.
const PATIENCE: u32 = 64;

/// Where a row may be.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hint {
    /// In the table.
    pub place: Place,
    /// The buffer that its block was in; 0: not known.
    pub buffer: pg_sys::Buffer,
}

/// The places.
#[derive(Debug, Default)]
pub struct Places {
    entries: Vec<(u64, Hint)>,
    seen: u32,
}

impl Places {
    /// Where the row under the key with this hash may be.
    #[must_use]
    pub fn get(&self, hash: u64) -> Option<Hint> {
        let (of, hint) = self.entries.get(index(hash))?;
        (*of == hash && hint.place.1 != 0).then_some(*hint)
    }

    /// That row is here now.
    pub fn note(&mut self, hash: u64, mut hint: Hint) {
        if self.entries.is_empty() {
            self.seen += 1;
            if self.seen < PATIENCE {
                return;
            }
            self.entries = vec![(0, Hint::default()); ENTRIES];
        }
        if let Some((of, entry)) = self.entries.get_mut(index(hash)) {
            // Who has written a row does not know the buffer. Mostly the new version is on the same
            // page as the one before.
            if hint.buffer == 0 && entry.place.0 == hint.place.0 {
                hint.buffer = entry.buffer;
            }
            (*of, *entry) = (hash, hint);
        }
    }
}

fn index(hash: u64) -> usize {
    usize::try_from(hash % ENTRIES as u64).unwrap_or(0)
}
