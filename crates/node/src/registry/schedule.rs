//! Counts of how a subscription's transactions were scheduled, for the view braid.dependency_stats.
//!
//! The leader counts for itself and adds new counts from time to time; the appliers add once for
//! each batch. Relaxed atomics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a subscription's schedule. They live as long as its entry, but for those that say
/// "now".
#[repr(C)]
#[derive(Debug, Default)]
pub struct ScheduleCounters {
    /// Transactions that entered the dependency graph.
    pub scheduled: AtomicU64,
    /// Scheduled transactions that had to wait for another.
    pub dependent: AtomicU64,
    /// Edges to single transactions, and one for all that a barrier or forgotten keys stand for.
    pub edges: AtomicU64,
    /// Keys entered.
    pub keys: AtomicU64,
    /// Keys forgotten while their transactions were in flight.
    pub keys_forgotten: AtomicU64,
    /// Transactions with a barrier on tables only.
    pub table_barriers: AtomicU64,
    /// Transactions with a barrier for everything.
    pub all_barriers: AtomicU64,
    /// Transactions with a barrier since they truncate.
    pub barriers_truncate: AtomicU64,
    /// Transactions with a barrier since the provider has no key for a change.
    pub barriers_unkeyed: AtomicU64,
    /// Transactions with a barrier since a unique index of this node is not covered by the
    /// provider's keys.
    pub barriers_index: AtomicU64,
    /// Transactions with a barrier since a trigger fires on this node.
    pub barriers_trigger: AtomicU64,
    /// Transactions with a barrier since they have too many keys or tables, or do not fit into the
    /// apply buffer.
    pub barriers_size: AtomicU64,
    /// Transactions that did not fit into the apply buffer and were applied as they came.
    pub large: AtomicU64,
    /// Now: transactions in flight.
    pub in_flight: AtomicU64,
    /// Now: how many of them could run side by side.
    pub width: AtomicU64,
    /// The largest of these.
    pub width_max: AtomicU64,
    /// Their sum over all looks that found something in flight.
    pub width_sum: AtomicU64,
    /// Number of these looks.
    pub width_looks: AtomicU64,
    /// Local commits of more than one transaction.
    pub batches: AtomicU64,
    /// Transactions in these.
    pub batched: AtomicU64,
    /// The most in one.
    pub batch_max: AtomicU64,
    /// Changes that were not written, as a later one of the same row was written in their place.
    pub consolidated: AtomicU64,
    /// Rows that were looked for while their batch waited for others.
    pub sought_ahead: AtomicU64,
    /// Local commits of a part of a transaction, but for the last of each.
    pub pieces: AtomicU64,
    /// Transactions that were applied while they ran at the provider.
    pub applied_while_running: AtomicU64,
    /// Small transactions that the leader has applied.
    pub applied_by_leader: AtomicU64,
    /// Such that were given up, and applied once they had committed.
    pub given_up_while_running: AtomicU64,
    /// Now: appliers that take transactions.
    pub taking: AtomicU64,
    /// 1 while transactions are not joined although the apply mode would join them, as a node may
    /// read changes of others from this one.
    pub not_joined: AtomicU64,
    /// Rows and transactions per second with one of them and with all, as tried last: bits of an
    /// f64, 0 before.
    pub rate_one: AtomicU64,
    /// See `rate_one`.
    pub rate_all: AtomicU64,
}

impl ScheduleCounters {
    pub(super) fn reset(&self) {
        let Self {
            scheduled,
            dependent,
            edges,
            keys,
            keys_forgotten,
            table_barriers,
            all_barriers,
            barriers_truncate,
            barriers_unkeyed,
            barriers_index,
            barriers_trigger,
            barriers_size,
            large,
            in_flight,
            width,
            width_max,
            width_sum,
            width_looks,
            batches,
            batched,
            batch_max,
            consolidated,
            sought_ahead,
            pieces,
            applied_while_running,
            applied_by_leader,
            given_up_while_running,
            taking,
            not_joined,
            rate_one,
            rate_all,
        } = self;
        for counter in [
            scheduled,
            dependent,
            edges,
            keys,
            keys_forgotten,
            table_barriers,
            all_barriers,
            barriers_truncate,
            barriers_unkeyed,
            barriers_index,
            barriers_trigger,
            barriers_size,
            large,
            in_flight,
            width,
            width_max,
            width_sum,
            width_looks,
            batches,
            batched,
            batch_max,
            consolidated,
            sought_ahead,
            pieces,
            applied_while_running,
            applied_by_leader,
            given_up_while_running,
            taking,
            not_joined,
            rate_one,
            rate_all,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    /// As how many local transactions so many were committed, counted from anywhere. A batch is
    /// counted before its transactions are among these, so the number falls by less than a batch
    /// for a moment, and is never ahead by more than one.
    pub fn commits_of(&self, transactions: u64) -> u64 {
        let batched = self.batched.load(Ordering::Relaxed);
        let batches = self.batches.load(Ordering::Relaxed);
        transactions.wrapping_sub(batched).wrapping_add(batches)
    }

    /// A batch of so many transactions was committed.
    pub fn count_batch(&self, transactions: u64) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.batched.fetch_add(transactions, Ordering::Relaxed);
        self.batch_max.fetch_max(transactions, Ordering::Relaxed);
    }
}
