//! Rows of the transaction in hand that are not written because of others, as far as the other
//! nodes are not told of that (`eviction`), by the hashes of their keys. Run by the appliers.
//!
//! Each write asks whether its row was kept out before: looking through all of them would cost the
//! square of their number.

use std::collections::HashMap;

use super::eviction::Eviction;

/// Rows that are kept out, in the order in which they were met.
#[derive(Debug, Default)]
pub(super) struct KeptOut {
    /// Emptied where the row was written after all.
    evictions: Vec<Option<Eviction>>,
    /// Places in it, by the hash of the row's key.
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

    /// The row with this hash was written: what its transaction did to it before is not the end of
    /// it.
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

    /// Takes all that are still kept out.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Eviction> {
        self.by_hash.clear();
        std::mem::take(&mut self.evictions).into_iter().flatten()
    }
}
