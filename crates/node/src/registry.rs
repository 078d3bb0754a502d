//! What all of this server's Braid processes know of each other: fixed shared memory, laid out when the server starts.
//!
//! Written by the workers, read by the monitoring functions in any backend. Everything is an atomic; a light-weight lock
//! keeps the parts of a subscription's last failure together. Positions are in the provider's WAL unless a name says local.
//!
//! An entry's life: the manager takes it when it first sees a subscription (under the lock, `subscription_id` set last), the leader
//! fills it, and the manager gives it back when the subscription is gone. Counters live as long as the entry. Readers hold no lock:
//! whoever shows an entry's numbers reads `generation` before and after them, and leaves them out if it has moved.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

use braid_bgworker::busy_time::BusyTime;
use braid_postgres::error::PgError;
use braid_postgres::process::{my_database, my_latch, my_pid, set_latch};
use braid_postgres::timestamp::now;
use braid_ring::{ApplierState, MAX_APPLIERS};
use pgrx::pg_sys;

use crate::settings;

mod decisions;
mod last_failure;
mod lock;
mod provider_clock;
mod rate_limit;
mod schedule;
mod table_counters;
mod text;

use decisions::Decisions;
pub use decisions::RecordedDecision;
use last_failure::LastFailure;
pub use last_failure::RecordedFailure;
use lock::locked;
pub use provider_clock::{MeasuredClock, ProviderClock};
pub use rate_limit::RateLimit;
pub use schedule::ScheduleCounters;
pub use table_counters::{TableEntry, own_table, table, tables};

/// Databases of one server that can have the extension.
pub const MAX_DATABASES: usize = 128;
/// Replication slots whose readers are known; one that finds no place is never known.
const READERS: usize = 4096;
/// Groups of keys of which the newest deletion is kept; by the hash of table and key, and by the database.
pub(crate) const TOMBSTONE_GROUPS: usize = 1 << 16;
const MAGIC: u64 = 0x6272_6169_6472_6708;

/// A database's manager.
#[repr(C)]
#[derive(Debug)]
pub struct ManagerEntry {
    /// OID of the database; 0: free.
    pub database: AtomicU32,
    /// Process id of its manager; 0: none.
    pub pid: AtomicI32,
    /// Address of the manager's latch.
    pub latch: AtomicUsize,
    /// Set by a backend that wants a manager to look.
    pub poked: AtomicU32,
    /// The newest commit timestamp (TimestampTz) that was applied in the database, or that a transaction of its own had.
    pub newest: AtomicI64,
    /// Commits that waited for the clock to be past it.
    pub clock_waits: AtomicU64,
    /// Microseconds that they waited.
    pub clock_wait_micros: AtomicU64,
    /// Commits for which the wait would have been too long.
    pub clock_exceeded: AtomicU64,
    /// The last warning of that (TimestampTz).
    pub clock_warned_at: AtomicI64,
    /// Whether `newest` has what was there before the server started.
    pub remembers_newest: AtomicBool,
    /// What of `newest` is written down, as far as it is ahead of the clock (TimestampTz).
    pub newest_written: AtomicI64,
    /// Whether transactions of this node have versions of their own: `crate::local_version`.
    pub local_versions: AtomicU32,
    /// The first of these transactions, by its full id; the largest number where there is none.
    pub local_versions_from: AtomicU64,
    /// The last of them.
    pub local_versions_to: AtomicU64,
    /// Transactions of which commit timestamps are kept (`crate::kept_commit`): the first one, by its full id.
    pub kept_commits_from: AtomicU64,
    /// And the one after the last; the largest number where that is not known yet.
    pub kept_commits_to: AtomicU64,
    /// Whether deletions are to be remembered: other nodes may send older changes of the rows. Set by the manager.
    pub remembers_deletions: AtomicBool,
    /// Whether `Shared::tombstones` knows of all of the database's. Set by the manager, once.
    knows_tombstones: AtomicBool,
    /// The newest of them, microseconds since 1970-01-01 UTC.
    newest_tombstone: AtomicI64,
    /// Process id of the collector of local deletions; 0: none.
    pub collector_pid: AtomicI32,
    /// Address of its latch; 0: none.
    pub collector_latch: AtomicUsize,
    /// Tables may have come, or gone, since it has looked. Set by the manager.
    pub collector_list_is_old: AtomicBool,
    /// Local WAL up to here has no deletion that is not collected.
    pub collected_lsn: AtomicU64,
    /// Deletions by all transactions before this one are collected; 0: nobody knows yet.
    pub collected_before: AtomicU32,
}

/// What a subscription's workers are doing.
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
    /// What comes next was committed too far ahead of this node's clock. Set by the leader.
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

    /// Its name in the views.
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

/// One applier, for the views.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ApplierEntry {
    /// Process id; 0: absent.
    pub pid: AtomicI32,
    /// [`ApplierState::as_u32`] of what it is doing.
    pub state: AtomicU32,
    /// [`braid_postgres::wait::Wait`] that it sleeps in.
    pub wait: AtomicU32,
    /// Commit of the transaction in hand, at the provider; the first of a batch's.
    pub commit_lsn: AtomicU64,
    /// When it or what came with it was taken (TimestampTz); 0 when nothing is in hand.
    pub taken_at: AtomicI64,
    /// Transactions committed.
    pub transactions: AtomicU64,
    /// Changes applied.
    pub changes: AtomicU64,
    /// Attempts that were rolled back and tried again.
    pub retries: AtomicU64,
    /// Time with a transaction in hand.
    pub busy: BusyTime,
}

impl ApplierEntry {
    /// It starts.
    pub fn start(&self) {
        self.taken_at.store(0, Ordering::Relaxed);
        self.busy.start(now());
    }

    /// Since when it has something in hand (TimestampTz).
    fn in_hand_since(&self) -> Option<i64> {
        Some(self.taken_at.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    /// See how busy it is. To be called about once a second.
    pub fn look(&self) {
        self.busy.look(now(), self.in_hand_since());
    }

    /// Share of the last ten to twenty seconds with a transaction in hand, 0 to 1.
    #[must_use]
    pub fn busy_share(&self) -> Option<f64> {
        self.busy.share(now(), self.in_hand_since())
    }

    /// What it is doing.
    #[must_use]
    pub fn state(&self) -> ApplierState {
        ApplierState::from_u32(self.state.load(Ordering::Relaxed))
    }

    fn reset(&self) {
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

/// A request to apply what is parked. Made by a session that holds the subscription's advisory lock for it, served by applier 0.
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

/// A transaction that could not be read again: it is parked when it comes.
#[derive(Debug)]
struct ToPark {
    /// Where it commits, and its error.
    failure: LastFailure,
    /// The parked transaction that it has to follow; 0: it failed by itself.
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
    /// Its id in the catalog; 0: free.
    pub subscription_id: AtomicU32,
    /// OID of its database.
    pub database: AtomicU32,
    /// Grows whenever the entry is taken or given back.
    generation: AtomicU32,
    activity: AtomicU32,
    /// Process id of the leader; 0: none.
    pub leader_pid: AtomicI32,
    /// Address of the leader's latch; 0: none.
    pub leader_latch: AtomicUsize,
    /// [`braid_postgres::wait::Wait`] that the leader sleeps in.
    pub leader_wait: AtomicU32,
    /// Received up to here.
    pub received_lsn: AtomicU64,
    /// Applied up to here.
    pub applied_lsn: AtomicU64,
    /// Durable here up to here.
    pub flushed_lsn: AtomicU64,
    /// The provider's end of WAL as it last said.
    pub provider_lsn: AtomicU64,
    /// When that was its end (TimestampTz); 0: never.
    pub provider_lsn_at: AtomicI64,
    /// Last message from the provider (TimestampTz).
    pub last_message_at: AtomicI64,
    /// Commit time at the origin of the last applied transaction (TimestampTz).
    pub last_commit_at: AtomicI64,
    /// Everything that the provider had committed by this time is applied (TimestampTz); 0 when that is not known.
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
    /// Conflicts met.
    pub conflicts: AtomicU64,
    /// Questions about rows that were put to other nodes.
    pub questions: AtomicU64,
    /// Values of columns that came in answer to them.
    pub fetched: AtomicU64,
    /// Attempts that were rolled back and tried again.
    pub retries: AtomicU64,
    /// What is to be done otherwise when it comes again.
    pub anew: Anew,
    /// Grows with each transaction that is parked, or is not any more: appliers look again.
    pub parked_version: AtomicU32,
    /// What braid.retry_parked asks for.
    pub retry: RetryRequest,
    /// Address of the latch of applier 0; 0: none. Set by that.
    pub first_applier_latch: AtomicUsize,
    to_park: ToPark,
    /// Over the last seconds.
    pub per_second: PerSecond,
    /// Failures in a row of its workers.
    pub failures: AtomicU32,
    /// Its leader has ended to start anew, without a failure: 1.
    pub at_once: AtomicU32,
    /// Grows whenever the state of one of its tables moves, so that appliers look again.
    pub tables_version: AtomicU32,
    /// Grows whenever the manager has seen a change of the catalog, so that the leader looks at its tables again.
    pub catalog_version: AtomicU32,
    /// Leaders started so far, so that a wait can tell a fresh one.
    pub starts: AtomicU32,
    failure: LastFailure,
    decisions: Decisions,
    /// What came of scheduling.
    pub schedule: ScheduleCounters,
    /// How fast it may be read.
    pub rate_limit: RateLimit,
    /// How far the provider's clock is from this node's.
    pub clock: ProviderClock,
    /// Counters of its tables that found no room.
    other_tables: TableEntry,
    /// Appliers by number.
    pub appliers: [ApplierEntry; MAX_APPLIERS],
}

/// Transactions that have failed in one way, and are applied in another when they come again.
#[repr(C)]
#[derive(Debug)]
pub struct Anew {
    /// Commit position of one that failed while its rows were inserted in bulk and could not be read again: it is applied row
    /// by row; 0: none.
    pub row_by_row: AtomicU64,
    /// One, by its id at the provider, that was applied while it ran and given up when it had committed; 0: none.
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

#[repr(C)]
struct Shared {
    magic: AtomicU64,
    supervisor_latch: AtomicUsize,
    supervisor_pid: AtomicI32,
    subscriptions: AtomicU32,
    /// Tables whose counters are kept, over all subscriptions.
    max_tables: AtomicU32,
    /// Those that have an entry.
    tables_taken: AtomicU32,
    /// When this memory was set up: another time after each crash.
    life: AtomicI64,
    /// Batches that were committed since the server was started.
    batches: AtomicU64,
    /// Grows whenever a database gets a manager's entry or loses it.
    manager_generation: AtomicU64,
    /// Time of the newest deletion in each group of keys, microseconds since 1970-01-01 UTC; 0: none.
    tombstones: [AtomicI64; TOMBSTONE_GROUPS],
    /// What the readers of slots want, by the slot's place: `crate::readers`.
    readers: [AtomicU32; READERS],
    managers: [ManagerEntry; MAX_DATABASES],
    // SubscriptionEntry × subscriptions follows, then what `table_counters` has.
}

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
static LOADED: AtomicBool = AtomicBool::new(false);
static PREVIOUS_REQUEST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static PREVIOUS_STARTUP: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Hook = unsafe extern "C-unwind" fn();

fn shared_bytes() -> usize {
    size_of::<Shared>().next_multiple_of(64)
        + settings::max_subscriptions() * size_of::<SubscriptionEntry>()
        + table_counters::bytes()
}

/// Calls another library's hook without a guard: an error of it passes by a long jump, as it is.
fn call_previous(hook: &AtomicPtr<c_void>) {
    let previous = hook.load(Ordering::Relaxed);
    if !previous.is_null() {
        // SAFETY: the pointer was a hook that another library had installed, stored by `install`.
        unsafe { std::mem::transmute::<*mut c_void, Hook>(previous)() };
    }
}

unsafe extern "C-unwind" fn request() {
    call_previous(&PREVIOUS_REQUEST);
    // SAFETY: PostgreSQL calls this hook.
    unsafe { request_ours() };
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn request_ours() {
    // SAFETY: called by PostgreSQL at the one moment when shared memory may be requested.
    unsafe {
        pg_sys::RequestAddinShmemSpace(shared_bytes());
        pg_sys::RequestNamedLWLockTranche(c"braid".as_ptr(), 1);
    }
}

unsafe extern "C-unwind" fn startup() {
    call_previous(&PREVIOUS_STARTUP);
    // SAFETY: PostgreSQL calls this hook.
    unsafe { set_up_ours() };
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn set_up_ours() {
    // SAFETY: called by PostgreSQL when shared memory is set up. The lock is AddinShmemInitLock, number 21 of the main
    // array in 15 to 18 (src/include/storage/lwlocknames.h).
    unsafe {
        let lock = &raw mut (*pg_sys::MainLWLockArray.add(21)).lock;
        pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let mut found = false;
        let bytes = shared_bytes();
        let raw = pg_sys::ShmemInitStruct(c"braid registry".as_ptr(), bytes, &raw mut found);
        if !found {
            raw.cast::<u8>().write_bytes(0, bytes);
            let shared = &*raw.cast::<Shared>();
            let subscriptions = u32::try_from(settings::max_subscriptions()).unwrap_or(1);
            shared.subscriptions.store(subscriptions, Ordering::Relaxed);
            let tables = u32::try_from(settings::max_table_counters()).unwrap_or(0);
            shared.max_tables.store(tables, Ordering::Relaxed);
            shared.life.store(now(), Ordering::Relaxed);
            shared.magic.store(MAGIC, Ordering::Release);
        }
        SHARED.store(raw.cast(), Ordering::Release);
        pg_sys::LWLockRelease(lock);
    }
}

/// Ask for the shared memory. Called while the postmaster loads its libraries.
pub fn install() {
    LOADED.store(true, Ordering::Relaxed);
    // SAFETY: the hooks are plain function pointers that are set in the postmaster before it has children.
    unsafe {
        if let Some(previous) = pg_sys::shmem_request_hook {
            PREVIOUS_REQUEST.store(previous as *mut c_void, Ordering::Relaxed);
        }
        pg_sys::shmem_request_hook = Some(request);
        if let Some(previous) = pg_sys::shmem_startup_hook {
            PREVIOUS_STARTUP.store(previous as *mut c_void, Ordering::Relaxed);
        }
        pg_sys::shmem_startup_hook = Some(startup);
    }
}

/// Whether the library was loaded by `shared_preload_libraries`.
#[must_use]
pub fn is_preloaded() -> bool {
    LOADED.load(Ordering::Relaxed)
}

fn shared() -> Option<&'static Shared> {
    let raw = SHARED.load(Ordering::Acquire);
    // SAFETY: set by `startup` to memory that lives as long as the server; children inherit the mapping. Atomics only.
    (!raw.is_null()).then(|| unsafe { &*raw })
}

/// What is known of the readers of slots.
#[must_use]
pub(crate) fn readers() -> Option<&'static [AtomicU32]> {
    shared().map(|shared| shared.readers.as_slice())
}

/// A number of its own for each time that shared memory was set up: when the server was started,
/// and after each crash.
#[must_use]
pub fn life() -> u64 {
    shared().map_or(0, |shared| {
        shared.life.load(Ordering::Relaxed).cast_unsigned()
    })
}

/// Say where the supervisor is.
pub fn register_supervisor() {
    if let Some(shared) = shared() {
        shared.supervisor_latch.store(my_latch(), Ordering::Release);
        shared.supervisor_pid.store(my_pid(), Ordering::Release);
    }
}

/// Wake the supervisor.
pub fn wake_supervisor() {
    if let Some(shared) = shared() {
        set_latch(shared.supervisor_latch.load(Ordering::Acquire));
    }
}

/// The entry of a database's manager, if it has one.
#[must_use]
pub fn find_manager(database: u32) -> Option<&'static ManagerEntry> {
    shared()?
        .managers
        .iter()
        .find(|entry| entry.database.load(Ordering::Acquire) == database)
}

/// As [`manager`], by the holder of the lock.
fn find_or_take_manager(database: u32) -> Option<&'static ManagerEntry> {
    find_manager(database).or_else(|| {
        let free = find_manager(0)?;
        free.poked.store(0, Ordering::SeqCst);
        free.pid.store(0, Ordering::SeqCst);
        free.latch.store(0, Ordering::SeqCst);
        free.newest.store(0, Ordering::Relaxed);
        free.clock_waits.store(0, Ordering::Relaxed);
        free.clock_wait_micros.store(0, Ordering::Relaxed);
        free.clock_exceeded.store(0, Ordering::Relaxed);
        free.clock_warned_at.store(0, Ordering::Relaxed);
        free.remembers_newest.store(false, Ordering::SeqCst);
        free.newest_written.store(0, Ordering::SeqCst);
        free.local_versions.store(0, Ordering::SeqCst);
        free.local_versions_from.store(u64::MAX, Ordering::SeqCst);
        free.local_versions_to.store(0, Ordering::SeqCst);
        free.kept_commits_from.store(0, Ordering::SeqCst);
        free.kept_commits_to.store(u64::MAX, Ordering::SeqCst);
        free.remembers_deletions.store(false, Ordering::SeqCst);
        free.knows_tombstones.store(false, Ordering::SeqCst);
        free.newest_tombstone.store(0, Ordering::SeqCst);
        free.collector_pid.store(0, Ordering::SeqCst);
        free.collector_latch.store(0, Ordering::SeqCst);
        free.collector_list_is_old.store(false, Ordering::SeqCst);
        free.collected_lsn.store(0, Ordering::SeqCst);
        free.collected_before.store(0, Ordering::SeqCst);
        free.database.store(database, Ordering::Release);
        managers_changed();
        Some(free)
    })
}

/// The entry of a database's manager, taken if it has none yet. `None` when there is no room or no shared memory.
#[must_use]
pub fn manager(database: u32) -> Option<&'static ManagerEntry> {
    shared()?;
    find_manager(database).or_else(|| locked(|| find_or_take_manager(database)))
}

/// Give back the entry of a database without a manager, unless somebody wants one.
pub fn release_manager(database: u32) {
    locked(|| {
        if let Some(entry) = find_manager(database)
            && entry.pid.load(Ordering::SeqCst) <= 0
        {
            entry.pid.store(0, Ordering::SeqCst);
            if entry.poked.load(Ordering::SeqCst) == 0 {
                entry.database.store(0, Ordering::Release);
                managers_changed();
            }
        }
    });
}

fn managers_changed() {
    if let Some(shared) = shared() {
        shared.manager_generation.fetch_add(1, Ordering::AcqRel);
    }
}

thread_local! {
    /// What [`my_manager`] found, and as of which generation.
    static MY_MANAGER: Cell<(u64, Option<&'static ManagerEntry>)> = const { Cell::new((u64::MAX, None)) };
}

/// The entry of this process's database, looked up only when entries have changed. `None` when it has none.
#[must_use]
pub fn my_manager() -> Option<&'static ManagerEntry> {
    let generation = shared()?.manager_generation.load(Ordering::Acquire);
    let (known, entry) = MY_MANAGER.get();
    if known == generation {
        return entry;
    }
    let database = my_database();
    let entry = (database != 0).then(|| find_manager(database)).flatten();
    MY_MANAGER.set((generation, entry));
    entry
}

/// Background workers that run now for the other databases of this server: managers, leaders and appliers.
#[must_use]
pub fn workers_elsewhere() -> usize {
    let here = my_database();
    let elsewhere = |database: &AtomicU32| ![0, here].contains(&database.load(Ordering::Acquire));
    let runs = |pid: &AtomicI32| usize::from(pid.load(Ordering::Acquire) > 0);
    let managers = shared().map_or(&[][..], |shared| &shared.managers);
    let managers = managers.iter().filter(|entry| elsewhere(&entry.database));
    let groups = subscriptions().iter().filter(|entry| {
        entry.subscription_id.load(Ordering::Acquire) != 0 && elsewhere(&entry.database)
    });
    managers
        .map(|entry| runs(&entry.pid) + runs(&entry.collector_pid))
        .sum::<usize>()
        + groups
            .map(|entry| {
                let appliers = entry.appliers.iter().map(|applier| runs(&applier.pid));
                runs(&entry.leader_pid) + appliers.sum::<usize>()
            })
            .sum::<usize>()
}

/// Give back the entries of databases that are gone, and of their subscriptions.
pub fn release_databases(existing: &[u32]) {
    let Some(shared) = shared() else { return };
    let gone = |database: u32| database != 0 && !existing.contains(&database);
    for entry in &shared.managers {
        let database = entry.database.load(Ordering::Acquire);
        if gone(database) {
            entry.poked.store(0, Ordering::SeqCst);
            release_manager(database);
        }
    }
    for entry in subscriptions() {
        let database = entry.database.load(Ordering::Acquire);
        if entry.subscription_id.load(Ordering::Acquire) != 0
            && gone(database)
            && find_manager(database).is_none()
        {
            release_subscription(entry);
        }
    }
}

/// Make the manager of this database, or the supervisor if it has none, look at the catalog.
pub(crate) fn poke(database: u32) {
    if shared().is_none() {
        return;
    }
    // Under the lock, so that the entry is not given back between.
    let running = locked(|| {
        let entry = find_or_take_manager(database)?;
        entry.poked.store(1, Ordering::SeqCst);
        (entry.pid.load(Ordering::SeqCst) > 0).then(|| entry.latch.load(Ordering::Acquire))
    });
    match running {
        Some(latch) => set_latch(latch),
        None => wake_supervisor(),
    }
}

/// Make the manager of this database look at the catalog, if there is one.
pub fn wake_manager(database: u32) {
    if let Some(entry) = find_manager(database).filter(|_| database != 0) {
        entry.poked.store(1, Ordering::SeqCst);
        set_latch(entry.latch.load(Ordering::Acquire));
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

/// If this process is an applier that waits for its turn, the other appliers of its subscription: some of them are ahead of it.
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

/// The entry of a subscription of this database, taken if it has none. `None` when there is no room.
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

/// Give a subscription's entry back, with its tables' counters. Does nothing while one of its processes still runs, which would write
/// into what is somebody else's by then.
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

    /// Read the entry with `read`. `None` when it was given back, or became another subscription's, meanwhile.
    #[must_use]
    pub fn consistent<T>(&self, read: impl FnOnce(&Self) -> T) -> Option<T> {
        let before = self.generation.load(Ordering::Acquire);
        let value = read(self);
        // Nothing that was read moves behind this.
        fence(Ordering::Acquire);
        (self.generation.load(Ordering::Relaxed) == before).then_some(value)
    }

    /// Everything as it is in fresh memory, but for the generation. By the holder of the lock, who has found it free; readers may be
    /// looking at it, so each field is stored on its own.
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
            parked_version,
            retry,
            first_applier_latch,
            to_park,
            per_second,
            failures,
            at_once,
            tables_version,
            catalog_version,
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
            leader_wait,
            failures,
            at_once,
            tables_version,
            parked_version,
            catalog_version,
            starts,
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

    /// The transaction that commits at `commit_lsn` is to be parked when it comes again: it failed, or has to follow parked transaction `after`.
    pub fn park_next(&self, error: &PgError, after: i64, commit_lsn: u64) {
        self.to_park.after.store(after, Ordering::Relaxed);
        self.to_park.failure.record(error, commit_lsn);
    }

    /// Why the transaction that commits at `commit_lsn` is to be parked, if it is: its error, and the one that it has to follow.
    #[must_use]
    pub fn is_to_park(&self, commit_lsn: u64) -> Option<(PgError, i64)> {
        if !self.to_park.failure.is_there() {
            return None;
        }
        let found = self.to_park.failure.get()?;
        let after = self.to_park.after.load(Ordering::Relaxed);
        (found.lsn == commit_lsn).then_some((found.error, after))
    }

    /// What its workers are doing.
    #[must_use]
    pub fn activity(&self) -> Activity {
        Activity::from_u32(self.activity.load(Ordering::Acquire))
    }

    /// Say what its workers are doing.
    pub fn set_activity(&self, activity: Activity) {
        self.activity.store(activity as u32, Ordering::Release);
    }

    /// A failure has ended its workers, or kept them from starting: keep it, whole. `lsn` is the end of the transaction that failed, 0
    /// for none.
    pub fn set_failure(&self, error: &PgError, lsn: u64) {
        self.failure.record(error, lsn);
        self.failures.fetch_add(1, Ordering::AcqRel);
    }

    /// What was wrong is over: forget it.
    pub fn clear_failure(&self) {
        self.failure.clear();
        self.failures.store(0, Ordering::Release);
    }

    /// Whether there is a last failure.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failure.is_there()
    }

    /// It was decided how many appliers there are to be. `at` is now, whatever it says.
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

/// Batches that appliers of this server have committed since it was started.
#[must_use]
pub fn batches() -> u64 {
    shared().map_or(0, |shared| shared.batches.load(Ordering::Acquire))
}

/// An applier is about to commit a batch.
pub fn count_batch() {
    if let Some(shared) = shared() {
        shared.batches.fetch_add(1, Ordering::AcqRel);
    }
}

fn tombstone_group(hash: u64) -> Option<&'static AtomicI64> {
    // Databases differ by this, since the same table may have the same OID in several.
    let mixed = hash ^ u64::from(my_database()).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let group = usize::try_from(mixed % TOMBSTONE_GROUPS as u64).unwrap_or(0);
    shared()?.tombstones.get(group)
}

/// A row with this hash was deleted at this time, in microseconds since 1970-01-01 UTC.
pub(crate) fn raise_tombstone(hash: u64, timestamp: i64) {
    if let Some(group) = tombstone_group(hash) {
        group.fetch_max(timestamp, Ordering::AcqRel);
    }
    if let Some(entry) = my_manager() {
        entry
            .newest_tombstone
            .fetch_max(timestamp, Ordering::AcqRel);
    }
}

/// Any rows were deleted at this time.
pub(crate) fn raise_all_tombstones(timestamp: i64) {
    for group in shared().iter().flat_map(|shared| &shared.tombstones) {
        group.fetch_max(timestamp, Ordering::AcqRel);
    }
    if let Some(entry) = my_manager() {
        entry
            .newest_tombstone
            .fetch_max(timestamp, Ordering::AcqRel);
    }
}

/// Whether any deletion that is remembered may be as new as this, in microseconds since 1970-01-01 UTC.
#[must_use]
pub fn may_have_tombstone_since(timestamp: i64) -> bool {
    my_manager().is_none_or(|entry| {
        !entry.knows_tombstones.load(Ordering::Acquire)
            || entry.newest_tombstone.load(Ordering::Acquire) >= timestamp
    })
}

/// The same of those of this row's group of keys.
#[must_use]
pub fn may_have_tombstone(hash: u64, timestamp: i64) -> bool {
    may_have_tombstone_since(timestamp)
        && match (my_manager(), tombstone_group(hash)) {
            (Some(entry), Some(group)) => {
                !entry.knows_tombstones.load(Ordering::Acquire)
                    || group.load(Ordering::Acquire) >= timestamp
            }
            _ => true,
        }
}

/// All tombstones of this database are known to shared memory from here on.
pub(crate) fn tombstones_are_known() {
    if let Some(entry) = my_manager() {
        entry.knows_tombstones.store(true, Ordering::Release);
    }
}

/// Whether deletions of this database are to be remembered.
#[must_use]
pub fn remembers_deletions() -> bool {
    my_manager().is_some_and(|entry| entry.remembers_deletions.load(Ordering::Acquire))
}

/// Whether what this transaction has deleted here is collected, as far as that is known.
#[must_use]
pub fn is_collected(xid: pg_sys::TransactionId) -> bool {
    my_manager().is_some_and(|entry| {
        let before = entry.collected_before.load(Ordering::Acquire);
        // SAFETY: compares two numbers.
        before != 0
            && unsafe {
                pg_sys::TransactionIdPrecedes(xid, pg_sys::TransactionId::from_inner(before))
            }
    })
}

/// How far the collector of this database has come in local WAL, and whether it runs. It is asked to go on at once.
#[must_use]
pub fn ask_collector() -> (u64, bool) {
    my_manager().map_or((0, false), |entry| {
        set_latch(entry.collector_latch.load(Ordering::Acquire));
        let lsn = entry.collected_lsn.load(Ordering::Acquire);
        (
            lsn,
            lsn != 0 && entry.collector_pid.load(Ordering::Acquire) > 0,
        )
    })
}
