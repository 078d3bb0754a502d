//! The 64-bit hash of a key: a folded 128-bit product per eight bytes, in the manner of wyhash.
//!
//! Fast for the few bytes of a key, and good in all 64 bits. The hash is no defence against
//! deliberate collisions: equal hashes of different keys only make two transactions wait for each
//! other.

/// Odd constants with as many ones as zeros, from wyhash.
const SECRET: [u64; 3] = [
    0xa076_1d64_78bd_642f,
    0xe703_7ed1_a0b4_28db,
    0x8ebc_6af0_9c88_c6e3,
];

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the halves of a product")]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// A hash in progress. The order of the input matters, and so do the borders between its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyHasher {
    state: u64,
}

impl KeyHasher {
    /// Starts with `seed`.
    #[inline]
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            state: seed ^ SECRET[0],
        }
    }

    /// Adds one word.
    #[inline]
    pub fn word(&mut self, word: u64) {
        self.state = fold(self.state ^ SECRET[1], word ^ SECRET[2]).rotate_left(23) ^ word;
    }

    /// Adds a byte string and its length.
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        let mut last = [0_u8; 8];
        for (to, from) in last.iter_mut().zip(rest) {
            *to = *from;
        }
        if !rest.is_empty() {
            self.word(u64::from_le_bytes(last));
        }
        // The length distinguishes "a" + "bc" from "ab" + "c", and the last word's padding from
        // zero bytes.
        self.word(bytes.len() as u64);
    }

    /// Returns the hash.
    #[inline]
    #[must_use]
    pub fn finish(self) -> u64 {
        fold(
            fold(self.state ^ SECRET[0], SECRET[1]) ^ SECRET[2],
            self.state ^ SECRET[1],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn of(parts: &[&[u8]]) -> u64 {
        let mut hasher = KeyHasher::new(1);
        for part in parts {
            hasher.bytes(part);
        }
        hasher.finish()
    }

    #[test]
    fn borders_and_padding_matter() {
        assert_ne!(of(&[b"a", b"bc"]), of(&[b"ab", b"c"]));
        assert_ne!(of(&[b"a"]), of(&[b"a\0"]));
        assert_ne!(of(&[b""]), of(&[]));
        assert_ne!(of(&[b"12345678"]), of(&[b"12345678", b""]));
    }

    #[test]
    fn small_integers_spread() {
        let mut seen = HashSet::new();
        let mut low = HashSet::new();
        for seed in 0..8 {
            for word in 0..20_000_u64 {
                let mut hasher = KeyHasher::new(seed);
                hasher.word(word);
                let hash = hasher.finish();
                assert!(seen.insert(hash), "collision at seed {seed}, word {word}");
                low.insert(hash & 0xffff);
            }
        }
        // If the low bits are random, 160,000 balls in 65,536 bins leave about 8.7 % of the bins
        // empty.
        assert!(
            low.len() > 58_000 && low.len() < 61_500,
            "{} bins used",
            low.len()
        );
    }

    #[test]
    fn one_bit_changes_half() {
        for bit in 0..64 {
            let (mut a, mut b) = (KeyHasher::new(7), KeyHasher::new(7));
            a.word(0x0123_4567_89ab_cdef);
            b.word(0x0123_4567_89ab_cdef ^ (1 << bit));
            let differ = (a.finish() ^ b.finish()).count_ones();
            assert!(
                (12..=52).contains(&differ),
                "bit {bit} changes {differ} bits"
            );
        }
    }
}
