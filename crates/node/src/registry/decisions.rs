//! The last decisions on how many appliers a subscription has, for the views.
//!
//! Written by the leader, read by any backend; both hold the registry's lock, so that a decision is
//! read as it was written.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use braid_postgres::timestamp::now;

use super::lock::locked;
use super::text::Text;

/// Decisions that are kept of each subscription.
const KEPT: usize = 32;

#[repr(C)]
#[derive(Debug)]
struct Slot {
    /// TimestampTz.
    at: AtomicI64,
    from: AtomicU32,
    to: AtomicU32,
    /// Bits of an f64.
    utilisation: AtomicU64,
    /// Bits of an f64.
    rows_per_second: AtomicU64,
    reason: Text,
}

/// Where they are kept: the n-th in slot n modulo [`KEPT`].
#[repr(C)]
#[derive(Debug)]
pub(super) struct Decisions {
    /// Made so far.
    count: AtomicU64,
    slots: [Slot; KEPT],
}

/// A decision as it was made.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedDecision {
    /// When (TimestampTz).
    pub at: i64,
    /// Appliers before.
    pub from: u32,
    /// Appliers after.
    pub to: u32,
    /// Share of time in which the former appliers had a current transaction.
    pub utilisation: f64,
    /// Rows per second.
    pub rows_per_second: f64,
    /// In words.
    pub reason: String,
}

impl Decisions {
    pub(super) fn record(&self, decision: &RecordedDecision) {
        locked(|| {
            let number = self.count.load(Ordering::Relaxed);
            let at = usize::try_from(number).unwrap_or(0) % KEPT;
            let Some(slot) = self.slots.get(at) else {
                return;
            };
            slot.at.store(now(), Ordering::Relaxed);
            slot.from.store(decision.from, Ordering::Relaxed);
            slot.to.store(decision.to, Ordering::Relaxed);
            let bits = |number: f64| number.to_bits();
            slot.utilisation
                .store(bits(decision.utilisation), Ordering::Relaxed);
            slot.rows_per_second
                .store(bits(decision.rows_per_second), Ordering::Relaxed);
            slot.reason.store(&decision.reason);
            self.count.store(number + 1, Ordering::Relaxed);
        });
    }

    /// Forgets all decisions. The owner of the whole entry may call it without the lock.
    pub(super) fn clear(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    /// Oldest first.
    pub(super) fn get(&self) -> Vec<RecordedDecision> {
        locked(|| {
            let count = self.count.load(Ordering::Relaxed);
            let first = count.saturating_sub(KEPT as u64);
            (first..count)
                .filter_map(|number| {
                    let slot = self.slots.get(usize::try_from(number).ok()? % KEPT)?;
                    let float = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Relaxed));
                    Some(RecordedDecision {
                        at: slot.at.load(Ordering::Relaxed),
                        from: slot.from.load(Ordering::Relaxed),
                        to: slot.to.load(Ordering::Relaxed),
                        utilisation: float(&slot.utilisation),
                        rows_per_second: float(&slot.rows_per_second),
                        reason: slot.reason.load().unwrap_or_default(),
                    })
                })
                .collect()
        })
    }
}
