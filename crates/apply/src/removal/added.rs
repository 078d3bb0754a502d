//! Rows of tables without a key that a transaction has added itself. Run by the appliers.

/// Number of 64-bit words of the filter.
const ADDED_WORDS: usize = 1024;

/// Filter for rows of tables without a key that the current transaction has added, by their hashes.
/// The filter may also contain other rows.
#[derive(Debug, Default)]
pub(crate) struct Added {
    bits: Vec<u64>,
    pub(super) any: bool,
}

impl Added {
    /// Empties the filter, when a transaction begins.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.any) {
            self.bits.fill(0);
        }
    }

    pub(super) fn note(&mut self, hash: u64) {
        self.bits.resize(ADDED_WORDS, 0);
        if let Some(word) = self.bits.get_mut(Self::word(hash)) {
            *word |= 1 << (hash % 64);
            self.any = true;
        }
    }

    pub(super) fn may_have(&self, hash: u64) -> bool {
        let word = self.bits.get(Self::word(hash)).copied();
        self.any && word.unwrap_or(0) & 1 << (hash % 64) != 0
    }

    fn word(hash: u64) -> usize {
        usize::try_from((hash >> 32) % ADDED_WORDS as u64).unwrap_or(0)
    }
}
