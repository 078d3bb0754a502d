//! Counters and states of an applier, for the views. Written by the applier, but for `reset`.

use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};

use braid_bgworker::busy_time::BusyTime;
use braid_postgres::timestamp::now;
use braid_ring::ApplierState;

/// One applier, for the views.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ApplierEntry {
    /// Process id; 0: absent.
    pub pid: AtomicI32,
    /// The applier's state, as [`ApplierState::as_u32`].
    pub state: AtomicU32,
    /// [`braid_postgres::wait::Wait`] that it sleeps in.
    pub wait: AtomicU32,
    /// Commit of the current transaction, at the provider; in a batch, of the first.
    pub commit_lsn: AtomicU64,
    /// When the current transaction, or its run, was claimed (TimestampTz); 0 if there is none.
    pub taken_at: AtomicI64,
    /// Transactions committed.
    pub transactions: AtomicU64,
    /// Changes applied.
    pub changes: AtomicU64,
    /// Attempts that were rolled back and tried again.
    pub retries: AtomicU64,
    /// Time with a current transaction.
    pub busy: BusyTime,
}

impl ApplierEntry {
    /// Sets the entry up for an applier that starts.
    pub fn start(&self) {
        self.taken_at.store(0, Ordering::Relaxed);
        self.busy.start(now());
    }

    /// Since when the applier has a current transaction (TimestampTz).
    fn in_hand_since(&self) -> Option<i64> {
        Some(self.taken_at.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    /// See how busy it is. To be called about once a second.
    pub fn look(&self) {
        self.busy.look(now(), self.in_hand_since());
    }

    /// Share of the last ten to twenty seconds with a current transaction, 0 to 1.
    #[must_use]
    pub fn busy_share(&self) -> Option<f64> {
        self.busy.share(now(), self.in_hand_since())
    }

    /// The applier's state.
    #[must_use]
    pub fn state(&self) -> ApplierState {
        ApplierState::from_u32(self.state.load(Ordering::Relaxed))
    }

    pub(super) fn reset(&self) {
        let Self {
            pid,
            state,
            wait,
            commit_lsn,
            taken_at,
            transactions,
            changes,
            retries,
            busy,
        } = self;
        busy.reset();
        for counter in [commit_lsn, transactions, changes, retries] {
            counter.store(0, Ordering::Relaxed);
        }
        pid.store(0, Ordering::Relaxed);
        state.store(0, Ordering::Relaxed);
        wait.store(0, Ordering::Relaxed);
        taken_at.store(0, Ordering::Relaxed);
    }
}
