//! Wishes of a replication slot's reader: one word for each slot, in shared memory. Written by the
//! walsender, read by appliers.
//!
//! Not for: which slots there are.

/// The changes that a slot's reader wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// Not known yet.
    Unknown,
    /// The reader is a node that also wants changes of other origins.
    All,
    /// The reader wants only changes of this node, or is not a node.
    Rest,
}

/// Returns the word for a slot: the reader in the lowest two bits, a hash of the slot's name in the
/// others, as PostgreSQL reuses the places of slots.
#[must_use]
pub fn word(name: &[u8], reader: Reader) -> u32 {
    // FNV-1a.
    let hash = name.iter().fold(0x811C_9DC5_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    let reader = match reader {
        Reader::Unknown => return 0,
        Reader::All => 1,
        Reader::Rest => 2,
    };
    hash & !3 | reader
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_used_again_says_nothing_of_the_slot_before() {
        assert_eq!(word(b"one", Reader::Unknown), 0);
        assert_ne!(word(b"one", Reader::Rest), word(b"one", Reader::All));
        assert_ne!(word(b"one", Reader::Rest), word(b"other", Reader::Rest));
    }
}
