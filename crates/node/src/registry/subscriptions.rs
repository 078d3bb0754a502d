//! The entry of a subscription: state that its processes share with each other and with the views.
//!
//! The manager takes a subscription's entry and gives it back (the registry's head).

use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

use braid_postgres::error::PgError;
use braid_postgres::process::my_database;
use braid_postgres::timestamp::now;
use braid_ring::{ApplierState, MAX_APPLIERS};

use super::appliers::ApplierEntry;
use super::decisions::{Decisions, RecordedDecision};
use super::last_failure::{LastFailure, RecordedFailure};
use super::lock::locked;
use super::memory::{Shared, shared};
use super::provider_clock::ProviderClock;
use super::rate_limit::RateLimit;
use super::schedule::ScheduleCounters;
use super::table_counters::{self, TableEntry};

/// The activity of a subscription's workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Activity {
    /// No worker runs. Set by the manager.
    Stopped = 0,
    /// The leader runs and is connecting. Set by the leader.
    Starting = 1,
    /// Tables are being copied. Set by the leader.
    Copying = 2,
    /// Applying a backlog. Set by the leader.
    CatchingUp = 3,
    /// Applying as it comes. Set by the leader.
    Streaming = 4,
    /// The workers have ended after a failure and will be started again. Set by the manager.
    Retrying = 5,
    /// The next transaction was committed too far ahead of this node's clock. Set by the leader.
    Paused = 6,
}

impl Activity {
    fn from_u32(raw: u32) -> Self {
        match raw {
            1 => Self::Starting,
            2 => Self::Copying,
            3 => Self::CatchingUp,
            4 => Self::Streaming,
            5 => Self::Retrying,
            6 => Self::Paused,
            _ => Self::Stopped,
        }
    }

    /// The activity's name in the views.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Copying => "copying",
            Self::CatchingUp => "catching up",
            Self::Streaming => "streaming",
            Self::Retrying => "retrying",
            Self::Paused => "paused",
        }
    }
}

/// A request to apply parked transactions. Made by a session that holds the subscription's advisory
/// lock for it, served by applier 0.
#[repr(C)]
#[derive(Debug)]
pub struct RetryRequest {
    /// Requests so far. Raised by the session, last.
    pub asked: AtomicU64,
    /// The parked transaction of the last one; 0: all.
    pub id: AtomicI64,
    /// Requests that are served. Raised by the applier, last.
    pub done: AtomicU64,
    /// Transactions that the last one has applied.
    pub applied: AtomicU64,
}

impl RetryRequest {
    fn reset(&self) {
        for counter in [&self.asked, &self.done, &self.applied] {
            counter.store(0, Ordering::Relaxed);
        }
        self.id.store(0, Ordering::Relaxed);
    }
}

/// Rates, as bits of an f64.
#[derive(Debug)]
pub struct PerSecond {
    /// Transactions.
    pub transactions: AtomicU64,
    /// Rows.
    pub rows: AtomicU64,
}

impl PerSecond {
    fn reset(&self) {
        for rate in [&self.transactions, &self.rows] {
            rate.store(0, Ordering::Relaxed);
        }
    }
}

/// Instead of the number of a parked transaction that is to be followed: the transaction waits for
/// a lock at another node.
pub const BY_LOCK: i64 = -1;

/// A transaction that could not be read again: it is parked when it comes.
#[derive(Debug)]
struct ToPark {
    /// Where it commits, and its error.
    failure: LastFailure,
    /// The parked transaction that it has to follow; 0: it failed by itself; [`BY_LOCK`].
    after: AtomicI64,
}

impl ToPark {
    fn clear(&self) {
        self.failure.clear();
        self.after.store(0, Ordering::Relaxed);
    }
}

/// One subscription.
#[repr(C)]
#[derive(Debug)]
pub struct SubscriptionEntry {
    /// The subscription's id in the catalog; 0: free.
    pub subscription_id: AtomicU32,
    /// OID of its database.
    pub database: AtomicU32,
    /// Grows whenever the entry is claimed or released.
    generation: AtomicU32,
    activity: AtomicU32,
    /// Process id of the leader; 0: none.
    pub leader_pid: AtomicI32,
    /// Address of the leader's latch; 0: none.
    pub leader_latch: AtomicUsize,
    /// Whether the leader may confirm to the provider: 1. Set before it reads what it must hold
    /// back for others.
    pub confirms: AtomicU32,
    /// [`braid_postgres::wait::Wait`] that the leader sleeps in.
    pub leader_wait: AtomicU32,
    /// The position up to which changes are received.
    pub received_lsn: AtomicU64,
    /// The position up to which changes are applied.
    pub applied_lsn: AtomicU64,
    /// The position up to which changes are durable on this node.
    pub flushed_lsn: AtomicU64,
    /// The provider's end of WAL as it last said.
    pub provider_lsn: AtomicU64,
    /// When that was its end (TimestampTz); 0: never.
    pub provider_lsn_at: AtomicI64,
    /// Last message from the provider (TimestampTz).
    pub last_message_at: AtomicI64,
    /// Commit time at the origin of the last applied transaction (TimestampTz).
    pub last_commit_at: AtomicI64,
    /// Everything that the provider had committed by this time is applied (TimestampTz); 0 when
    /// that is not known.
    pub caught_up_at: AtomicI64,
    /// Leader started (TimestampTz).
    pub started_at: AtomicI64,
    /// Counters since (TimestampTz).
    pub stats_since: AtomicI64,
    /// Transactions applied.
    pub transactions: AtomicU64,
    /// Rows inserted.
    pub inserts: AtomicU64,
    /// Rows updated.
    pub updates: AtomicU64,
    /// Rows deleted.
    pub deletes: AtomicU64,
    /// Tables truncated.
    pub truncates: AtomicU64,
    /// Bytes received.
    pub bytes: AtomicU64,
    /// Number of conflicts.
    pub conflicts: AtomicU64,
    /// Questions about rows that were put to other nodes.
    pub questions: AtomicU64,
    /// Values of columns that came in answer to them.
    pub fetched: AtomicU64,
    /// Attempts that were rolled back and tried again.
    pub retries: AtomicU64,
    /// Changes in handling for transactions that are received again.
    pub anew: Anew,
    /// The transaction whose turn it is waits for a statement of another node: 1. Later
    /// transactions must hold no locks then, as the statement may need them.
    pub awaits_statement: AtomicU32,
    /// Grows with each transaction that is parked, or is not any more: appliers look again.
    pub parked_version: AtomicU32,
    /// The request of braid.retry_parked.
    pub retry: RetryRequest,
    /// Address of the latch of applier 0; 0: none. Set by that.
    pub first_applier_latch: AtomicUsize,
    to_park: ToPark,
    /// Why the transaction whose turn it is does not go on, while it is tried again and again.
    held_up: LastFailure,
    /// Why the copy of a table does not go on, which waits for a transaction at the provider.
    copy_held_up: LastFailure,
    /// Such a transaction may wait for this subscription: 1. Transactions that change tables which
    /// are still to be copied are parked then. Set by copy workers; cleared by the leader when it
    /// starts, and when all tables are copied and nothing is in flight.
    parks_for_copies: AtomicU32,
    /// Over the last seconds.
    pub per_second: PerSecond,
    /// Failures in a row of its workers.
    pub failures: AtomicU32,
    /// The leader has ended to start anew, without a failure: 1.
    pub at_once: AtomicU32,
    /// Grows whenever the state of one of its tables moves, so that appliers look again.
    pub tables_version: AtomicU32,
    /// Grows whenever the manager has seen a change of the catalog, so that the leader looks at its
    /// tables again.
    pub catalog_version: AtomicU32,
    /// Grows with each change of its options, as that commits.
    altered: AtomicU32,
    /// The value of `altered` when the manager looked at the catalog last: its leader has the
    /// options of that look, or is asked to end.
    heeded: AtomicU32,
    /// Leaders started so far, so that a wait can tell a fresh one.
    pub starts: AtomicU32,
    failure: LastFailure,
    decisions: Decisions,
    /// The counts of scheduling.
    pub schedule: ScheduleCounters,
    /// How fast it may be read.
    pub rate_limit: RateLimit,
    /// How far the provider's clock is from this node's.
    pub clock: ProviderClock,
    /// Counters of its tables that found no room.
    pub(super) other_tables: TableEntry,
    /// Appliers by number.
    pub appliers: [ApplierEntry; MAX_APPLIERS],
}

/// Transactions that have failed in one way, and are applied in another when they come again.
#[repr(C)]
#[derive(Debug)]
pub struct Anew {
    /// Commit position of one that failed while its rows were inserted in bulk and could not be
    /// read again: it is applied row by row; 0: none.
    pub row_by_row: AtomicU64,
    /// One, by its id at the provider, that was applied while it ran and given up when it had
    /// committed; 0: none.
    pub not_running: AtomicU32,
    /// 1: they are sent once they have committed, as one did not fit into temporary files.
    pub whole: AtomicU32,
}

impl Anew {
    fn reset(&self) {
        self.row_by_row.store(0, Ordering::Relaxed);
        self.not_running.store(0, Ordering::Relaxed);
        self.whole.store(0, Ordering::Relaxed);
    }
}

/// All entries of subscriptions.
#[must_use]
pub fn subscriptions() -> &'static [SubscriptionEntry] {
    let Some(shared) = shared() else {
        return &[];
    };
    let count = usize::try_from(shared.subscriptions.load(Ordering::Relaxed)).unwrap_or(0);
    // SAFETY: `startup` made room for `count` entries behind the fixed part; atomics only.
    unsafe {
        let first = std::ptr::from_ref(shared)
            .cast::<u8>()
            .add(size_of::<Shared>().next_multiple_of(64))
            .cast::<SubscriptionEntry>();
        std::slice::from_raw_parts(first, count)
    }
}

/// Whether this process's database has subscriptions, as far as its manager has seen them.
#[must_use]
pub fn has_subscriptions() -> bool {
    let database = my_database();
    subscriptions().iter().any(|entry| {
        entry.subscription_id.load(Ordering::Acquire) != 0
            && entry.database.load(Ordering::Acquire) == database
    })
}

/// If this process is an applier that waits for its turn, the other appliers of its subscription:
/// some of them are ahead of it.
#[must_use]
pub fn waited_for_by(pid: i32) -> Vec<i32> {
    let of = |entry: &SubscriptionEntry| {
        let mut appliers = entry.appliers.iter();
        let asked = appliers.find(|applier| applier.pid.load(Ordering::Acquire) == pid)?;
        let mut others = Vec::new();
        if asked.state() == ApplierState::WaitingForTurn {
            others = entry.applier_pids();
            others.retain(|other| *other != pid);
        }
        Some(others)
    };
    subscriptions().iter().find_map(of).unwrap_or_default()
}

/// The entry of a subscription of this database.
#[must_use]
pub fn subscription(id: u32) -> Option<&'static SubscriptionEntry> {
    let database = my_database();
    subscriptions().iter().find(|entry| {
        entry.subscription_id.load(Ordering::Acquire) == id
            && entry.database.load(Ordering::Relaxed) == database
    })
}

/// The entry of a subscription of this database, taken if it has none. `None` when there is no
/// room.
#[must_use]
pub fn take_subscription(id: u32) -> Option<&'static SubscriptionEntry> {
    if let Some(entry) = subscription(id) {
        return Some(entry);
    }
    locked(|| {
        let free = || {
            subscriptions()
                .iter()
                .find(|entry| entry.subscription_id.load(Ordering::Acquire) == 0)
        };
        // Somebody may have taken it while this process waited for the lock.
        if let Some(entry) = subscription(id) {
            return Some(entry);
        }
        let entry = free()?;
        entry.reset();
        entry.database.store(my_database(), Ordering::Relaxed);
        entry.stats_since.store(now(), Ordering::Relaxed);
        entry.subscription_id.store(id, Ordering::Release);
        Some(entry)
    })
}

/// Releases a subscription's entry, with its tables' counters. Does nothing while one of its
/// processes still runs, which would write into the next owner's entry.
pub fn release_subscription(entry: &SubscriptionEntry) {
    let runs = |pid: &AtomicI32| pid.load(Ordering::Acquire) != 0;
    if runs(&entry.leader_pid) || entry.appliers.iter().any(|applier| runs(&applier.pid)) {
        return;
    }
    locked(|| {
        let id = entry.subscription_id.load(Ordering::Acquire);
        let database = entry.database.load(Ordering::Acquire);
        if let Some(shared) = shared() {
            table_counters::release(shared, database, id);
        }
        entry.other_tables.reset();
        entry.subscription_id.store(0, Ordering::Release);
        entry.generation.fetch_add(1, Ordering::AcqRel);
    });
}

impl SubscriptionEntry {
    /// Rows written so far.
    #[must_use]
    pub fn rows(&self) -> u64 {
        [&self.inserts, &self.updates, &self.deletes]
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum()
    }

    /// Ids of the applier processes that there are, also of those that an earlier leader started.
    #[must_use]
    pub fn applier_pids(&self) -> Vec<i32> {
        let pids = self
            .appliers
            .iter()
            .map(|applier| applier.pid.load(Ordering::Acquire));
        pids.filter(|pid| *pid != 0).collect()
    }

    /// Reads the entry with `read`. Returns `None` if it was released, or claimed for another
    /// subscription, meanwhile.
    #[must_use]
    pub fn consistent<T>(&self, read: impl FnOnce(&Self) -> T) -> Option<T> {
        let before = self.generation.load(Ordering::Acquire);
        let value = read(self);
        // Nothing that was read moves behind this.
        fence(Ordering::Acquire);
        (self.generation.load(Ordering::Relaxed) == before).then_some(value)
    }

    /// The subscription's options have changed. The manager is woken separately.
    pub(crate) fn alter(&self) {
        self.altered.fetch_add(1, Ordering::AcqRel);
    }

    /// How often its options have changed.
    #[must_use]
    pub fn alterations(&self) -> u32 {
        self.altered.load(Ordering::Acquire)
    }

    /// The manager has acted on so many changes of its options.
    pub fn heed(&self, alterations: u32) {
        self.heeded.store(alterations, Ordering::Release);
    }

    /// Whether its leader may have options from before a change that has committed.
    #[must_use]
    pub fn is_to_heed(&self) -> bool {
        self.alterations() != self.heeded.load(Ordering::Acquire)
    }

    /// Resets everything to the state of fresh memory, but for the generation. By the holder of the
    /// lock, who has found it free; readers may be looking at it, so each field is stored on its
    /// own.
    #[expect(clippy::too_many_lines, reason = "a line or two for each field")]
    fn reset(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        // A reader that sees one of the stores below also sees the new generation.
        fence(Ordering::Release);
        // Named one by one, so that a field that is added is not forgotten.
        let Self {
            subscription_id: _,
            generation: _,
            database,
            activity,
            leader_pid,
            leader_latch,
            confirms,
            leader_wait,
            received_lsn,
            applied_lsn,
            flushed_lsn,
            provider_lsn,
            provider_lsn_at,
            last_message_at,
            last_commit_at,
            caught_up_at,
            started_at,
            stats_since,
            transactions,
            inserts,
            updates,
            deletes,
            truncates,
            bytes,
            conflicts,
            questions,
            fetched,
            retries,
            anew,
            awaits_statement,
            parked_version,
            retry,
            first_applier_latch,
            to_park,
            held_up,
            copy_held_up,
            parks_for_copies,
            per_second,
            failures,
            at_once,
            tables_version,
            catalog_version,
            altered,
            heeded,
            starts,
            failure,
            decisions,
            schedule,
            rate_limit,
            clock,
            other_tables,
            appliers,
        } = self;
        other_tables.reset();
        for small in [
            database,
            activity,
            confirms,
            leader_wait,
            failures,
            at_once,
            tables_version,
            awaits_statement,
            parked_version,
            catalog_version,
            altered,
            heeded,
            starts,
            parks_for_copies,
        ] {
            small.store(0, Ordering::Relaxed);
        }
        for large in [
            received_lsn,
            applied_lsn,
            flushed_lsn,
            provider_lsn,
            transactions,
            inserts,
            updates,
            deletes,
            truncates,
            bytes,
            conflicts,
            questions,
            fetched,
            retries,
        ] {
            large.store(0, Ordering::Relaxed);
        }
        for time in [
            provider_lsn_at,
            last_message_at,
            last_commit_at,
            caught_up_at,
            started_at,
            stats_since,
        ] {
            time.store(0, Ordering::Relaxed);
        }
        per_second.reset();
        anew.reset();
        retry.reset();
        to_park.clear();
        held_up.clear();
        copy_held_up.clear();
        first_applier_latch.store(0, Ordering::Relaxed);
        leader_pid.store(0, Ordering::Relaxed);
        leader_latch.store(0, Ordering::Relaxed);
        failure.clear();
        decisions.clear();
        schedule.reset();
        rate_limit.set(0, 0);
        clock.reset();
        appliers.iter().for_each(ApplierEntry::reset);
    }

    /// The transaction whose turn it is has failed with an error that may pass, and is tried again.
    /// `lsn` is its end at the provider.
    pub fn hold_up(&self, error: &PgError, lsn: u64) {
        self.held_up.record(error, lsn);
    }

    /// The transaction whose turn it is was committed, or this process ends.
    pub fn go_on(&self) {
        if self.held_up.is_there() {
            self.held_up.clear();
        }
    }

    /// The failure of the transaction whose turn it is, if it is retried again and again.
    #[must_use]
    pub fn held_up(&self) -> Option<RecordedFailure> {
        self.held_up.get()
    }

    /// The copy of a table waits for a transaction at the provider. `by_commit`: commits at the
    /// provider wait for this subscription, or may do so.
    pub fn hold_up_copy(&self, error: &PgError, by_commit: bool) {
        self.copy_held_up.record(error, 0);
        if by_commit {
            self.parks_for_copies.store(1, Ordering::Release);
        }
    }

    /// No copy is known to wait for a transaction at the provider.
    pub fn copy_goes_on(&self) {
        if self.copy_held_up.is_there() {
            self.copy_held_up.clear();
        }
    }

    /// All tables are copied, or nothing is known of copies yet.
    pub fn no_copy_waits(&self) {
        self.copy_goes_on();
        self.parks_for_copies.store(0, Ordering::Release);
    }

    /// The provider's transaction that the copy of a table waits for, if one does.
    #[must_use]
    pub fn copy_held_up(&self) -> Option<RecordedFailure> {
        self.copy_held_up.get()
    }

    /// Whether transactions that change tables which are still to be copied are parked.
    #[must_use]
    pub fn parks_for_copies(&self) -> bool {
        self.parks_for_copies.load(Ordering::Acquire) != 0
    }

    /// The transaction that commits at `commit_lsn` is to be parked when it comes again: it failed,
    /// has to follow parked transaction `after`, or waits for a lock ([`BY_LOCK`]).
    pub fn park_next(&self, error: &PgError, after: i64, commit_lsn: u64) {
        self.to_park.after.store(after, Ordering::Relaxed);
        self.to_park.failure.record(error, commit_lsn);
    }

    /// Why the transaction that commits at `commit_lsn` is to be parked, if it is: its error, and
    /// the one that it has to follow.
    #[must_use]
    pub fn is_to_park(&self, commit_lsn: u64) -> Option<(PgError, i64)> {
        if !self.to_park.failure.is_there() {
            return None;
        }
        let found = self.to_park.failure.get()?;
        let after = self.to_park.after.load(Ordering::Relaxed);
        (found.lsn == commit_lsn).then_some((found.error, after))
    }

    /// Returns the activity of the subscription's workers.
    #[must_use]
    pub fn activity(&self) -> Activity {
        Activity::from_u32(self.activity.load(Ordering::Acquire))
    }

    /// Sets the activity of the subscription's workers.
    pub fn set_activity(&self, activity: Activity) {
        self.activity.store(activity as u32, Ordering::Release);
    }

    /// A failure has ended its workers, or kept them from starting: keep it, whole. `lsn` is the
    /// end of the transaction that failed, 0 for none.
    pub fn set_failure(&self, error: &PgError, lsn: u64) {
        self.failure.record(error, lsn);
        self.failures.fetch_add(1, Ordering::AcqRel);
    }

    /// Forgets the failure, which is over.
    pub fn clear_failure(&self) {
        self.failure.clear();
        self.failures.store(0, Ordering::Release);
    }

    /// Whether there is a last failure.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failure.is_there()
    }

    /// Records a decision about the number of appliers.
    pub fn record_decision(&self, decision: &RecordedDecision) {
        self.decisions.record(decision);
    }

    /// The last decisions, oldest first.
    #[must_use]
    pub fn decisions(&self) -> Vec<RecordedDecision> {
        self.decisions.get()
    }

    /// The last failure.
    #[must_use]
    pub fn failure(&self) -> Option<RecordedFailure> {
        self.failure.get()
    }
}
