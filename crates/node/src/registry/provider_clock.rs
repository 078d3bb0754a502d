//! How far a subscription's provider's clock is from this node's, as its leader has measured it
//! last.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering, fence};

use braid_postgres::timestamp::now;

/// In shared memory. Written by the leader; stays when that ends. All zeros: not measured.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ProviderClock {
    /// Odd while the three below are written.
    version: AtomicU32,
    offset: AtomicI64,
    error: AtomicI64,
    measured_at: AtomicI64,
    /// When it was said last that the clocks are apart, in microseconds of the monotonic clock; 0:
    /// they are not. The leader's own, kept for the next one.
    pub warned_at: AtomicI64,
}

/// A measurement of the provider's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredClock {
    /// Microseconds by which the provider's clock is ahead of this node's.
    pub offset: i64,
    /// Microseconds by which that can be off.
    pub error: i64,
    /// When (TimestampTz).
    pub at: i64,
}

impl ProviderClock {
    /// Stores a measurement that was made now.
    pub fn show(&self, offset: i64, error: i64) {
        self.version.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::Release);
        self.offset.store(offset, Ordering::Relaxed);
        self.error.store(error, Ordering::Relaxed);
        self.measured_at.store(now(), Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Returns the last measurement; `None` if there is none, or if it is overwritten again and
    /// again.
    #[must_use]
    pub fn get(&self) -> Option<MeasuredClock> {
        for _ in 0..100 {
            let before = self.version.load(Ordering::Acquire);
            let measured = MeasuredClock {
                offset: self.offset.load(Ordering::Relaxed),
                error: self.error.load(Ordering::Relaxed),
                at: self.measured_at.load(Ordering::Relaxed),
            };
            // Nothing that was read moves behind this.
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before {
                return Some(measured).filter(|measured| measured.at != 0);
            }
            std::hint::spin_loop();
        }
        None
    }

    pub(super) fn reset(&self) {
        let Self {
            version,
            offset,
            error,
            measured_at,
            warned_at,
        } = self;
        for time in [offset, error, measured_at, warned_at] {
            time.store(0, Ordering::Relaxed);
        }
        // A leader that was killed may have left it odd.
        version.store(0, Ordering::Release);
    }
}
