//! The limits on how fast a subscription is read, in shared memory. Set by the manager; the
//! processes that read keep them (`crate::rate_limit`).

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use braid_bgworker::rate::Bucket;
use braid_postgres::timestamp::{monotonic_nanoseconds, now};

/// How long a limit that held something back is shown as holding it.
const RECENT_MICROS: i64 = 1_000_000;

/// One limit of a subscription, in shared memory. All zeros: none.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Limit {
    /// 0: none.
    pub(crate) per_second: AtomicU64,
    pub(crate) bucket: Bucket,
}

impl Limit {
    fn set(&self, per_second: u64) {
        if self.per_second.swap(per_second, Ordering::Relaxed) != per_second {
            self.bucket.settle(monotonic_nanoseconds());
        }
    }

    pub(crate) fn get(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.per_second.load(Ordering::Relaxed))
    }
}

/// A subscription's limits, in shared memory.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RateLimit {
    pub(crate) rows: Limit,
    pub(crate) bytes: Limit,
    /// When they held something back last (TimestampTz).
    pub(crate) held_at: AtomicI64,
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
            && now().saturating_sub(self.held_at.load(Ordering::Relaxed)) < RECENT_MICROS
    }
}
