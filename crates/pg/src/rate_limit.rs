//! The limits on how fast a subscription is read (braid.set_rate_limit), as the processes keep them that read: the leader, and the
//! workers that copy tables. They share two buckets in the registry, so that the limits hold for all of them together.
//!
//! What is not read stays in the socket, and holds the provider's walsender back. The manager writes the limits there as it sees them
//! in the catalog, when the transaction that set them has committed.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use braid_bgworker::rate::{Bucket, Price};

use crate::latch;
use crate::registry::{self, SubscriptionEntry};
use crate::wait::Wait;

/// Nobody sleeps longer than this before looking whether the limits are still the same.
const LOOK: Duration = Duration::from_millis(100);
/// What was held back this long ago is held back now, for people.
const RECENT_MICROS: i64 = 1_000_000;

/// Nanoseconds of a clock that all processes of a server share and that never steps back.
pub(crate) fn clock() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to `time`; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}

/// One limit of a subscription, in shared memory. All zeros: none.
#[repr(C)]
#[derive(Debug, Default)]
struct Limit {
    /// 0: none.
    per_second: AtomicU64,
    bucket: Bucket,
}

impl Limit {
    fn set(&self, per_second: u64) {
        if self.per_second.swap(per_second, Ordering::Relaxed) != per_second {
            self.bucket.settle(clock());
        }
    }

    fn get(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.per_second.load(Ordering::Relaxed))
    }
}

/// A subscription's limits, in shared memory.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RateLimit {
    rows: Limit,
    bytes: Limit,
    /// When they held something back last (TimestampTz).
    held_at: AtomicI64,
}

impl RateLimit {
    /// Set both, in units per second; 0 for none. Debts made under another limit are forgotten.
    pub fn set(&self, rows: u64, bytes: u64) {
        self.rows.set(rows);
        self.bytes.set(bytes);
    }

    /// Whether something is being held back.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        (self.rows.get().is_some() || self.bytes.get().is_some())
            && registry::now().saturating_sub(self.held_at.load(Ordering::Relaxed)) < RECENT_MICROS
    }
}

/// One process's part in keeping a subscription's limits.
#[derive(Debug)]
pub struct Limiter {
    entry: Option<&'static SubscriptionEntry>,
    rows: Option<Price>,
    bytes: Option<Price>,
}

impl Limiter {
    /// Of a subscription of this database.
    #[must_use]
    pub fn new(subscription: u32) -> Self {
        Self {
            entry: registry::subscription(subscription),
            rows: None,
            bytes: None,
        }
    }

    /// How long nothing may be read; `None`: now.
    #[must_use]
    pub fn pause(&self) -> Option<Duration> {
        let limit = &self.entry?.rate_limit;
        let mut pause = 0;
        for limit in [&limit.rows, &limit.bytes] {
            if limit.get().is_some() {
                pause = limit.bucket.ready_in(clock()).max(pause);
            }
        }
        (pause > 0).then(|| Duration::from_nanos(pause))
    }

    /// Note down what was read.
    pub fn take(&mut self, rows: u64, bytes: u64) {
        let Some(entry) = self.entry else { return };
        let limit = &entry.rate_limit;
        for (limit, price, units) in [
            (&limit.rows, &mut self.rows, rows),
            (&limit.bytes, &mut self.bytes, bytes),
        ] {
            let Some(per_second) = limit.get() else {
                continue;
            };
            if price
                .as_ref()
                .is_none_or(|price| price.per_second() != per_second)
            {
                *price = Some(Price::new(per_second));
            }
            if let Some(price) = price {
                limit.bucket.take(clock(), price.of(units));
            }
        }
    }

    /// Wait out a pause, or a part of it: until the latch is set, or it is time to look again.
    pub fn wait(&self, pause: Duration) {
        if let Some(entry) = self.entry {
            entry
                .rate_limit
                .held_at
                .store(registry::now(), Ordering::Relaxed);
        }
        latch::wait_as(Wait::RateLimit, pause.min(LOOK));
    }
}
