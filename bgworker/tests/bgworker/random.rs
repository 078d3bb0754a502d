//! Numbers that a seed determines.

/// A generator (splitmix64).
pub struct Random(u64);

impl Random {
    /// Seeded by `BRAID_TEST_SEED`, else by the clock. Prints the seed: cargo shows it when the test fails.
    pub fn new(test: &str) -> Self {
        let seed = std::env::var("BRAID_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap();
            u64::from(now.subsec_nanos()) ^ now.as_secs()
        });
        println!("{test}: BRAID_TEST_SEED={seed}");
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap()
    }

    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
