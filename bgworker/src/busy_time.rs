//! How busy an applier is: the time that it has spent on transactions, and its share of the last
//! seconds. In shared memory: the applier adds to it, the leader samples it now and then, and any
//! session reads it.
//!
//! Times are microseconds, on any clock.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Shortest time between two samples.
const BETWEEN_LOOKS: i64 = 10_000_000;

/// Time that an applier has spent on transactions.
#[repr(C)]
#[derive(Debug, Default)]
pub struct BusyTime {
    /// Total of the finished transactions; the current one is not included.
    micros: AtomicU64,
    /// When the last two samples were taken, the earlier one first.
    looked_at: [AtomicI64; 2],
    /// Total at each sample.
    seen: [AtomicU64; 2],
}

impl BusyTime {
    /// Starts the clock of a new applier.
    pub fn start(&self, now: i64) {
        self.reset();
        for at in &self.looked_at {
            at.store(now, Ordering::Relaxed);
        }
    }

    /// Clears everything: no applier uses it.
    pub fn reset(&self) {
        self.micros.store(0, Ordering::Relaxed);
        for (at, seen) in self.looked_at.iter().zip(&self.seen) {
            at.store(0, Ordering::Relaxed);
            seen.store(0, Ordering::Relaxed);
        }
    }

    /// Adds the time of a finished transaction.
    pub fn add(&self, micros: u64) {
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Returns the total, with the current transaction, which began at `since`.
    fn so_far(&self, now: i64, since: Option<i64>) -> u64 {
        let in_hand = since.map_or(0, |since| now.saturating_sub(since));
        let done = self.micros.load(Ordering::Relaxed);
        done.saturating_add(u64::try_from(in_hand).unwrap_or(0))
    }

    /// Takes a sample, unless the last one is less than ten seconds old. `since`: when the current
    /// transaction began.
    pub fn look(&self, now: i64, since: Option<i64>) {
        let ([earlier, later], [earlier_seen, later_seen]) = (&self.looked_at, &self.seen);
        let at = later.load(Ordering::Relaxed);
        if now.saturating_sub(at) < BETWEEN_LOOKS {
            return;
        }
        earlier_seen.store(later_seen.load(Ordering::Relaxed), Ordering::Relaxed);
        earlier.store(at, Ordering::Relaxed);
        later_seen.store(self.so_far(now, since), Ordering::Relaxed);
        later.store(now, Ordering::Relaxed);
    }

    /// Returns the busy share (0 to 1) of the time since the earlier sample, or since the start.
    /// With a sample each second, the time is ten to twenty seconds. `None` before any time has
    /// passed.
    #[must_use]
    pub fn share(&self, now: i64, since: Option<i64>) -> Option<f64> {
        let ([at, _], [seen, _]) = (&self.looked_at, &self.seen);
        let time = now.saturating_sub(at.load(Ordering::Relaxed));
        let seen = seen.load(Ordering::Relaxed);
        let busy = self.so_far(now, since).saturating_sub(seen);
        #[expect(clippy::cast_precision_loss, reason = "a share for people")]
        (time > 0).then(|| (busy as f64 / time as f64).clamp(0.0, 1.0))
    }
}
