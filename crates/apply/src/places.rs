//! Cache of the places where rows of a table were last found or written, by the hash of their keys.
//! A row that changes often is found without its index, and without a walk through the dead
//! versions that other transactions have left. Run by the appliers.
//!
//! An entry is a hint. Its user checks that a row with that very key is alive at the place, and
//! looks in the index otherwise. So entries need not be removed or corrected when a transaction is
//! rolled back or the row moves.

use braid_postgres::heap_page::Place;
use pgrx::pg_sys;

/// Number of entries per table; of two keys that share an entry, the last one stays.
const ENTRIES: usize = 1024;

/// Look-ups before anything is stored: a table with few changes needs no memory for its cache.
const PATIENCE: u32 = 64;

/// Possible place of a row.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hint {
    /// Place in the table.
    pub place: Place,
    /// The buffer that had its block; 0: not known.
    pub buffer: pg_sys::Buffer,
}

/// The cache of one table.
#[derive(Debug, Default)]
pub struct Places {
    entries: Vec<(u64, Hint)>,
    seen: u32,
}

impl Places {
    /// Returns the possible place of the row whose key has this hash.
    #[must_use]
    pub fn get(&self, hash: u64) -> Option<Hint> {
        let (of, hint) = self.entries.get(index(hash))?;
        (*of == hash && hint.place.1 != 0).then_some(*hint)
    }

    /// Stores the place of the row whose key has this hash.
    pub fn note(&mut self, hash: u64, mut hint: Hint) {
        if self.entries.is_empty() {
            self.seen += 1;
            if self.seen < PATIENCE {
                return;
            }
            self.entries = vec![(0, Hint::default()); ENTRIES];
        }
        if let Some((of, entry)) = self.entries.get_mut(index(hash)) {
            // The writer of a row does not know the buffer. The new version is mostly on the same
            // page as the old one.
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
