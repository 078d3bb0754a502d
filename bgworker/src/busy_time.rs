//! How busy an applier is: the time that it has spent with something in hand, and what share of the
//! last seconds that is. In memory that processes share: the applier adds to it, the leader looks
//! now and then, and any session reads.
//!
//! Times are microseconds, on any clock.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// After a look, for how long there is no other.
const BETWEEN_LOOKS: i64 = 10_000_000;

/// Time with something in hand.
#[repr(C)]
#[derive(Debug, Default)]
pub struct BusyTime {
    /// In all, without what is in hand.
    micros: AtomicU64,
    /// Two looks at it, the earlier one first.
    looked_at: [AtomicI64; 2],
    /// What it was at each.
    seen: [AtomicU64; 2],
}

impl BusyTime {
    /// Who is busy starts.
    pub fn start(&self, now: i64) {
        self.reset();
        for at in &self.looked_at {
            at.store(now, Ordering::Relaxed);
        }
    }

    /// Nobody is.
    pub fn reset(&self) {
        self.micros.store(0, Ordering::Relaxed);
        for (at, seen) in self.looked_at.iter().zip(&self.seen) {
            at.store(0, Ordering::Relaxed);
            seen.store(0, Ordering::Relaxed);
        }
    }

    /// What was in hand is done, after so long.
    pub fn add(&self, micros: u64) {
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// With what is in hand since `since`.
    fn so_far(&self, now: i64, since: Option<i64>) -> u64 {
        let in_hand = since.map_or(0, |since| now.saturating_sub(since));
        let done = self.micros.load(Ordering::Relaxed);
        done.saturating_add(u64::try_from(in_hand).unwrap_or(0))
    }

    /// See how much it is, unless that was done less than ten seconds ago. `since`: when what is in
    /// hand was taken.
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

    /// Its share of the time since the earlier look, which is ten to twenty seconds where somebody
    /// looks once a second, or since the start: 0 to 1. `None` before there is any time.
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
