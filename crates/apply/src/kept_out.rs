//! Incoming rows of the current transaction that lose to local rows, and whose deletion is not
//! announced yet (`eviction`), by the hashes of their keys. Run by the appliers.
//!
//! Each write asks whether its row was kept out before. Searching a list for that would cost the
//! square of the number of rows.

use std::collections::HashMap;

use super::eviction::Eviction;

/// Rows that are kept out, in the order of their conflicts.
#[derive(Debug, Default)]
pub(super) struct KeptOut {
    /// `None` in place of a row that was written after all.
    evictions: Vec<Option<Eviction>>,
    /// Positions in `evictions`, by the hash of the row's key.
    by_hash: HashMap<u64, Vec<usize>>,
}

impl KeptOut {
    pub(super) fn push(&mut self, hash: u64, eviction: Eviction) {
        self.by_hash
            .entry(hash)
            .or_default()
            .push(self.evictions.len());
        self.evictions.push(Some(eviction));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// Notes that the row with this hash was written: it is no longer kept out.
    pub(super) fn let_in(&mut self, hash: u64) {
        for place in self.by_hash.remove(&hash).into_iter().flatten() {
            if let Some(eviction) = self.evictions.get_mut(place) {
                *eviction = None;
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.evictions.clear();
        self.by_hash.clear();
    }

    /// Takes all rows that are still kept out.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Eviction> {
        self.by_hash.clear();
        std::mem::take(&mut self.evictions).into_iter().flatten()
    }
}
