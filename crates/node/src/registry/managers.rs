//! The entry of a database's manager: state that its other processes read, and the latch by which
//! it is woken.

use std::cell::Cell;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use braid_postgres::process::{my_database, set_latch};

use super::lock::locked;
use super::memory::shared;
use super::wake_supervisor;
use crate::routing::RoutingEntry;

/// Databases of one server that can have the extension.
pub const MAX_DATABASES: usize = 128;
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
    /// The newest commit timestamp (TimestampTz) that was applied in the database, or that a
    /// transaction of its own had.
    pub newest: AtomicI64,
    /// Commits that waited for the clock to be past it.
    pub clock_waits: AtomicU64,
    /// Microseconds that they waited.
    pub clock_wait_micros: AtomicU64,
    /// Commits for which the wait would have been too long.
    pub clock_exceeded: AtomicU64,
    /// The last warning of that (TimestampTz).
    pub clock_warned_at: AtomicI64,
    /// Whether `newest` includes versions from before the server started.
    pub remembers_newest: AtomicBool,
    /// The part of `newest` that is stored, as far as it is ahead of the clock (TimestampTz).
    pub newest_written: AtomicI64,
    /// Whether transactions of this node have versions of their own: `crate::local_version`.
    pub local_versions: AtomicU32,
    /// The first of these transactions, by its full id; the largest number where there is none.
    pub local_versions_from: AtomicU64,
    /// The last of them.
    pub local_versions_to: AtomicU64,
    /// Transactions of which commit timestamps are kept (`crate::kept_commit`): the first one, by
    /// its full id.
    pub kept_commits_from: AtomicU64,
    /// The transaction after the last one; the largest number while that is not known yet.
    pub kept_commits_to: AtomicU64,
    /// No change arrives any more that is older than this, microseconds since 1970-01-01 UTC; 0:
    /// not known. Set by the manager.
    pub arrived_before: AtomicI64,
    /// Whether deletions are to be remembered: other nodes may send older changes of the rows. Set
    /// by the manager.
    pub remembers_deletions: AtomicBool,
    /// Whether `Shared::tombstones` knows of all of the database's. Set by the manager, once.
    pub(super) knows_tombstones: AtomicBool,
    /// The newest of them, microseconds since 1970-01-01 UTC.
    pub(super) newest_tombstone: AtomicI64,
    /// Process id of the collector of local deletions; 0: none.
    pub collector_pid: AtomicI32,
    /// Address of its latch; 0: none.
    pub collector_latch: AtomicUsize,
    /// Tables may have come, or gone, since it has looked. Set by the manager.
    pub collector_list_is_old: AtomicBool,
    /// Local WAL up to this position has no deletion that is not collected.
    pub collected_lsn: AtomicU64,
    /// Deletions by all transactions before this one are collected; 0: nobody knows yet.
    pub collected_before: AtomicU32,
    /// Process id of the database's group worker; 0: none.
    pub group_pid: AtomicI32,
    /// Address of its latch; 0: none.
    pub group_latch: AtomicUsize,
    /// Handle of the segment that has its mailbox (`crate::mailbox`); 0: none.
    pub group_mailbox: AtomicU32,
    /// Process id of the database's sequences process; 0: none.
    pub sequences_pid: AtomicI32,
    /// Address of its latch; 0: none.
    pub sequences_latch: AtomicUsize,
    /// Sequences are to be checked now: set by every function that changes something concerning
    /// them.
    pub sequences_poked: AtomicBool,
    /// The last tick of each layout of `crate::snowflake` that was used; 0: nobody knows yet.
    pub ticks: [AtomicU64; 2],
    /// Up to which tick each may be used, as it is written down.
    pub tick_limits: [AtomicU64; 2],
    /// Whether the database is a member of a group: [`NO_MEMBER`], [`MEMBER`], [`READ_ONLY`], or 0
    /// if nobody has looked yet. Set by the manager, the group worker, and the functions that make
    /// it one.
    pub membership: AtomicU32,
    /// The first transaction of the node's life, by its full id: origins in older commits may stand
    /// for other nodes than these origins do now. 0: all commits are of its life. Set by the
    /// manager.
    pub first_xid: AtomicU64,
    /// Grows whenever a member of the group can be reached again. Then subscriptions that wait for
    /// their next attempt are tried at once.
    pub members_reached: AtomicU64,
    /// Where rows of routed tables live: `crate::routing`.
    pub routing: RoutingEntry,
    /// Whether tables are versioned: `crate::versions::tables`.
    pub versioned: AtomicU32,
    /// How often that has changed.
    pub versioned_changes: AtomicU64,
    /// Process id of the database's versions process; 0: none.
    pub versions_pid: AtomicI32,
    /// Address of its latch; 0: none.
    pub versions_latch: AtomicUsize,
    /// A number of its start, which no other start has.
    pub versions_start: AtomicU64,
    /// Handle of the segment that has its mailbox (`crate::versions::mailbox`); 0: none.
    pub versions_mailbox: AtomicU32,
    /// Numbers of nodes of the group that it has not heard of for a while; 0: none.
    pub versions_missing: [AtomicU32; 8],
    /// Whether the group has no sequencer of versions.
    pub versions_lack: AtomicBool,
}

/// `ManagerEntry::membership` of a database in no group.
pub const NO_MEMBER: u32 = 1;
/// `ManagerEntry::membership` of a member.
pub const MEMBER: u32 = 2;
/// `ManagerEntry::membership` of a member that takes no writes of users.
pub const READ_ONLY: u32 = 3;

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
        free.arrived_before.store(0, Ordering::SeqCst);
        free.remembers_deletions.store(false, Ordering::SeqCst);
        free.knows_tombstones.store(false, Ordering::SeqCst);
        free.newest_tombstone.store(0, Ordering::SeqCst);
        free.collector_pid.store(0, Ordering::SeqCst);
        free.collector_latch.store(0, Ordering::SeqCst);
        free.collector_list_is_old.store(false, Ordering::SeqCst);
        free.collected_lsn.store(0, Ordering::SeqCst);
        free.collected_before.store(0, Ordering::SeqCst);
        free.group_pid.store(0, Ordering::SeqCst);
        free.group_latch.store(0, Ordering::SeqCst);
        free.group_mailbox.store(0, Ordering::SeqCst);
        free.sequences_pid.store(0, Ordering::SeqCst);
        free.sequences_latch.store(0, Ordering::SeqCst);
        free.sequences_poked.store(false, Ordering::SeqCst);
        for tick in free.ticks.iter().chain(&free.tick_limits) {
            tick.store(0, Ordering::SeqCst);
        }
        free.membership.store(0, Ordering::SeqCst);
        free.first_xid.store(0, Ordering::SeqCst);
        free.members_reached.store(0, Ordering::SeqCst);
        free.routing.clear();
        free.versioned.store(0, Ordering::SeqCst);
        free.versioned_changes.fetch_add(1, Ordering::SeqCst);
        free.versions_pid.store(0, Ordering::SeqCst);
        free.versions_latch.store(0, Ordering::SeqCst);
        free.versions_mailbox.store(0, Ordering::SeqCst);
        for missing in &free.versions_missing {
            missing.store(0, Ordering::SeqCst);
        }
        free.versions_lack.store(false, Ordering::SeqCst);
        free.database.store(database, Ordering::Release);
        managers_changed();
        Some(free)
    })
}

/// The entry of a database's manager, taken if it has none yet. `None` when there is no room or no
/// shared memory.
#[must_use]
pub fn manager(database: u32) -> Option<&'static ManagerEntry> {
    shared()?;
    find_manager(database).or_else(|| locked(|| find_or_take_manager(database)))
}

/// Whether this process's database is known to be in no group. False also if nobody has looked
/// since the server started.
#[must_use]
pub fn is_no_member() -> bool {
    my_manager().is_some_and(|entry| entry.membership.load(Ordering::Acquire) == NO_MEMBER)
}

/// Releases the entry of a database without a manager, unless one is requested.
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
    /// The result of [`my_manager`], and its generation.
    static MY_MANAGER: Cell<(u64, Option<&'static ManagerEntry>)> = const { Cell::new((u64::MAX, None)) };
}

/// The entry of this process's database, looked up only when entries have changed. `None` when it
/// has none.
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

/// Make the manager of this database, or the supervisor if it has none, look at the catalog.
pub(crate) fn poke(database: u32) {
    if shared().is_none() {
        return;
    }
    // Under the lock, so that the entry is not released in between.
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

/// Make the sequences process of this database look at all sequences, if there is one.
pub fn wake_sequences(database: u32) {
    if let Some(entry) = find_manager(database).filter(|_| database != 0) {
        entry.sequences_poked.store(true, Ordering::SeqCst);
        set_latch(entry.sequences_latch.load(Ordering::Acquire));
    }
}
