//! Numbers that a seed determines, and the time budget of a test that uses them.

use std::time::{Duration, Instant};

/// Time budget of a randomized test: `BRAID_TEST_SECONDS`, a second and a half by default, and at
/// least some rounds.
pub struct Budget {
    until: Instant,
    rounds: usize,
}

impl Budget {
    pub fn new() -> Self {
        let seconds = std::env::var("BRAID_TEST_SECONDS")
            .ok()
            .and_then(|seconds| seconds.parse().ok())
            .unwrap_or(1.5);
        Self {
            until: Instant::now() + Duration::from_secs_f64(seconds),
            rounds: 0,
        }
    }

    /// Returns the number of the next round, while there is time, and in any case up to `least`.
    pub fn round(&mut self, least: usize) -> Option<usize> {
        self.rounds += 1;
        (self.rounds <= least || Instant::now() < self.until).then_some(self.rounds - 1)
    }
}

pub use braid_testing::Random;
