//! What is remembered of who reads a replication slot: in one word for each slot, in shared memory.
//! Written by the walsender, asked by appliers.
//!
//! Not for: which slots there are.

/// What a slot's reader wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// It has not said yet.
    Unknown,
    /// It is a node that wants what others wrote, too.
    All,
    /// What was written here, or it is no node.
    Rest,
}

/// What is kept of one: the reader in the lowest bits, and of whose slot it is in the others, as
/// places are used again.
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
