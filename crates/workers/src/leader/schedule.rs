//! Counts the results of scheduling for the view braid.dependency_stats: per transaction a few
//! numbers of the leader's own, which are added to the shared ones from time to time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use braid_bgworker::dependency::{Statistics, Width};
use braid_node::registry::ScheduleCounters;

/// While there is always something to do, the shared numbers are this old at most.
const INTERVAL: Duration = Duration::from_millis(100);

/// Why a transaction has a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Barrier {
    /// A TRUNCATE.
    Truncate = 1,
    /// The provider has no key for a change.
    Unkeyed = 2,
    /// A unique index of this node is not covered by the provider's keys.
    Index = 4,
    /// A trigger fires on this node.
    Trigger = 8,
}

/// The counts, and the part of them that is published.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Bits of [`Barrier`] of the current transaction.
    in_hand: u8,
    published: Statistics,
    /// Nothing was in flight when it was published.
    at_rest: bool,
    at: Instant,
}

impl Schedule {
    pub(super) fn new() -> Self {
        Self {
            in_hand: 0,
            published: Statistics::default(),
            at_rest: false,
            at: Instant::now(),
        }
    }

    /// The current transaction has a barrier.
    pub(super) fn saw(&mut self, barrier: Barrier) {
        self.in_hand |= barrier as u8;
    }

    /// The current transaction will not be applied.
    pub(super) fn abandoned(&mut self) {
        self.in_hand = 0;
    }

    /// The current transaction has entered the graph.
    pub(super) fn entered(&mut self, counters: &ScheduleCounters) {
        let reasons = std::mem::take(&mut self.in_hand);
        if reasons == 0 {
            return;
        }
        for (barrier, counter) in [
            (Barrier::Truncate, &counters.barriers_truncate),
            (Barrier::Unkeyed, &counters.barriers_unkeyed),
            (Barrier::Index, &counters.barriers_index),
            (Barrier::Trigger, &counters.barriers_trigger),
        ] {
            if reasons & barrier as u8 != 0 {
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Whether it is time to publish new counts.
    pub(super) fn is_due(&self) -> bool {
        self.at.elapsed() >= INTERVAL
    }

    /// Adds new counts to the shared numbers: those of the tracker up to `now`, and the number in
    /// flight, `width`.
    pub(super) fn publish(
        &mut self,
        now: Statistics,
        width: impl FnOnce() -> Width,
        counters: &ScheduleCounters,
    ) {
        let before = self.published;
        if now == before && self.at_rest {
            return;
        }
        let add = |counter: &AtomicU64, now: u64, before: u64| {
            if now != before {
                counter.fetch_add(now.saturating_sub(before), Ordering::Relaxed);
            }
        };
        add(&counters.scheduled, now.transactions, before.transactions);
        add(&counters.dependent, now.dependent, before.dependent);
        add(&counters.edges, now.edges, before.edges);
        add(&counters.keys, now.keys, before.keys);
        add(&counters.keys_forgotten, now.forgotten, before.forgotten);
        add(
            &counters.all_barriers,
            now.barriers_for_all,
            before.barriers_for_all,
        );
        add(
            &counters.table_barriers,
            now.barriers - now.barriers_for_all,
            before.barriers - before.barriers_for_all,
        );
        add(&counters.barriers_size, now.too_large, before.too_large);
        let width = width();
        let wide = width.side_by_side();
        counters.in_flight.store(width.in_flight, Ordering::Relaxed);
        counters.width.store(wide, Ordering::Relaxed);
        if wide > 0 {
            counters.width_max.fetch_max(wide, Ordering::Relaxed);
            counters.width_sum.fetch_add(wide, Ordering::Relaxed);
            counters.width_looks.fetch_add(1, Ordering::Relaxed);
        }
        self.published = now;
        self.at_rest = width.in_flight == 0;
        self.at = Instant::now();
    }
}
