//! Shared code of the pure crates' tests: random numbers that a seed repeats. For tests alone; no
//! part of the product.
#![forbid(unsafe_code)]

use std::time::{SystemTime, UNIX_EPOCH};

/// A generator of numbers that a seed determines (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Returns a generator with the seed in `BRAID_TEST_SEED`, or else one from the clock. Prints
    /// the seed: cargo shows it if the test fails.
    #[must_use]
    pub fn new(test: &str) -> Self {
        let seed = std::env::var("BRAID_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default();
            u64::from(now.subsec_nanos()) ^ now.as_secs()
        });
        println!("{test}: BRAID_TEST_SEED={seed}");
        Self(seed)
    }

    /// Returns a generator with a fixed seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number, of all 64 bits.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns an index into a list of length `len`, which is at least 1.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }

    /// Returns true one time in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Returns `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}
