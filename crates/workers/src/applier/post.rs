//! An applier's place in the group: its state for views, its waits, and the processes that it
//! wakes.
//!
//! A process that waits for its turn with an open transaction may block an earlier transaction, or
//! a statement that an earlier transaction waits for. Then the wait ends (`Trouble::InTheWay`).

use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_node::registry::{self, ApplierEntry, SubscriptionEntry};
use braid_postgres::error::PgError;
use braid_postgres::process::blocking_pids;
use braid_postgres::wait::Wait;
use braid_postgres::{latch, process, transaction, worker};
use braid_ring::{ApplierState, Awaited, FrameRead, Ring, Transaction, Wakes};

/// Number of looks at a counter before the process sleeps: about the time that another process
/// needs for a small transaction.
const SPINS: u32 = 400;
/// How long a process waits for its turn before it checks whether it blocks an earlier transaction.
const DEADLOCK_CHECK: Duration = Duration::from_millis(20);
/// Statistics are reported after about this many transactions of the stream.
const STATISTICS_EVERY: u64 = 64;
/// Why a transaction could not be applied now.
pub(super) enum Trouble {
    /// An error.
    Error(PgError),
    /// This process blocks an earlier transaction.
    InTheWay,
}

impl From<PgError> for Trouble {
    fn from(error: PgError) -> Self {
        Self::Error(error)
    }
}

impl From<braid_gir::Error> for Trouble {
    fn from(error: braid_gir::Error) -> Self {
        Self::Error(error.into())
    }
}

/// Wakes processes.
pub(super) fn set_latches(wakes: &Wakes) {
    for latch in wakes.iter() {
        process::set_latch(latch);
    }
}

/// Reads the next frame of a transaction in the ring, as [`Transaction::next_frame`] does.
pub(super) fn next_frame<'a>(
    transaction: &mut Transaction,
    assembled: &'a mut Vec<u8>,
) -> Result<FrameRead<'a>, PgError> {
    transaction
        .next_frame(assembled, set_latches)
        .map_err(|error| PgError::new(SqlState::InternalError, error.to_string()))
}

/// The place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Post {
    pub(super) ring: Ring,
    /// Number of the applier, from 0.
    pub(super) number: usize,
    /// The entry of this applier that views show.
    pub(super) own: &'static ApplierEntry,
    /// The subscription's entry.
    pub(super) entry: &'static SubscriptionEntry,
}

impl Post {
    pub(super) fn show(&self, state: ApplierState) {
        self.ring.set_state(self.number, state);
        self.own.state.store(state.as_u32(), Ordering::Relaxed);
    }

    pub(super) fn show_in_hand(&self, transaction: &Transaction) {
        self.own
            .commit_lsn
            .store(transaction.commit_lsn(), Ordering::Relaxed);
    }

    /// Serve interrupts and the configuration. False when it is time to end.
    pub(super) fn housekeeping(&self) -> bool {
        pgrx::check_for_interrupts!();
        worker::reload_settings();
        !self.ring.stop_requested()
    }

    /// Wait until `sequence` is committed. False when it is time to end.
    pub(super) fn wait_for(&self, sequence: u64, state: ApplierState) -> bool {
        for _ in 0..SPINS {
            if self.ring.committed() >= sequence {
                return true;
            }
            std::hint::spin_loop();
        }
        self.show(state);
        while self.ring.committed() < sequence {
            if !self.housekeeping() {
                return false;
            }
            self.ring
                .applier_will_wait(self.number, Awaited::Commit(sequence));
            if self.ring.committed() < sequence {
                let wait = match state {
                    ApplierState::WaitingForTurn => Wait::Turn,
                    _ => Wait::Dependency,
                };
                latch::wait_as(wait, Duration::from_secs(1));
            }
            self.ring.applier_awake(self.number);
        }
        true
    }

    /// Waits a moment for more of an open transaction.
    ///
    /// # Errors
    /// 57P01 when it is time to end.
    pub(super) fn wait_for_rest(&self) -> Result<(), PgError> {
        if self.ring.stop_requested() {
            return Err(PgError::new(
                SqlState::AdminShutdown,
                "subscription is stopping",
            ));
        }
        self.ring.applier_will_wait(self.number, Awaited::Rest);
        latch::wait_as(Wait::Rest, Duration::from_millis(100));
        self.ring.applier_awake(self.number);
        Ok(())
    }

    /// Wait until this very transaction is committed. False when it is time to end.
    pub(super) fn wait_for_one(&self, sequence: u64) -> bool {
        for _ in 0..SPINS {
            if self.ring.is_done(sequence) {
                return true;
            }
            std::hint::spin_loop();
        }
        self.show(ApplierState::WaitingForDependency);
        while !self.ring.is_done(sequence) {
            if !self.housekeeping() {
                return false;
            }
            self.ring.applier_will_wait_for(self.number, sequence);
            if !self.ring.is_done(sequence) {
                latch::wait_as(Wait::Dependency, Duration::from_secs(1));
            }
            self.ring.applier_awake(self.number);
        }
        true
    }

    /// Wait for the turn with an open transaction.
    pub(super) fn wait_for_turn(&self, sequence: u64) -> Result<(), Trouble> {
        self.wait_in_transaction(sequence - 1, sequence)
    }

    /// Wait until `until` is committed, with an open transaction that starts with `mine`.
    pub(super) fn wait_in_transaction(&self, until: u64, mine: u64) -> Result<(), Trouble> {
        for _ in 0..SPINS {
            if self.ring.committed() >= until {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.show(ApplierState::WaitingForTurn);
        while self.ring.committed() < until {
            pgrx::check_for_interrupts!();
            if self.ring.stop_requested() {
                return Err(
                    PgError::new(SqlState::AdminShutdown, "subscription is stopping").into(),
                );
            }
            self.ring
                .applier_will_wait(self.number, Awaited::Commit(until));
            let mut woken = true;
            if self.ring.committed() < until {
                woken = latch::wait_as(Wait::Turn, DEADLOCK_CHECK);
            }
            self.ring.applier_awake(self.number);
            if !woken && (self.awaits_statement() || self.is_in_the_way(mine)) {
                return Err(Trouble::InTheWay);
            }
        }
        Ok(())
    }

    /// Whether the transaction whose turn it is waits for a statement of another node. That comes
    /// by another subscription, and may need a table that this process has written to.
    pub(super) fn awaits_statement(&self) -> bool {
        self.entry.awaits_statement.load(Ordering::Acquire) != 0
    }

    /// Whether one that is ahead waits, directly or through others, for a lock that this process
    /// holds. An applier that waits for its turn waits for those ahead of it.
    fn is_in_the_way(&self, sequence: u64) -> bool {
        let me = process::my_pid();
        let mut seen: Vec<i32> = Vec::new();
        let mut next: Vec<i32> = self.ring.ahead_of(sequence).collect();
        while let Some(pid) = next.pop() {
            if pid == 0 || seen.contains(&pid) || seen.len() > 200 {
                continue;
            }
            seen.push(pid);
            let blockers = blocking_pids(pid);
            if blockers.contains(&me) {
                return true;
            }
            next.extend(blockers);
            next.extend(registry::waited_for_by(pid));
        }
        false
    }

    /// Reports a commit to the leader and the other appliers.
    pub(super) fn has_committed(&self, sequence: u64, local_end: u64, next: u64) {
        let wakes = self.ring.commit(self.number, sequence, local_end, next);
        set_latches(&wakes);
        if sequence.is_multiple_of(STATISTICS_EVERY) {
            // Autovacuum goes by these counters. PostgreSQL itself sends them no more than once a
            // second.
            transaction::report_statistics(false);
        }
    }
}
