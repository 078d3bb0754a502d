//! Versions of this node's own transactions that are not the times of their commits. Written by
//! sessions whose clock is further behind than they may wait (`clock.rs`), read by whoever wants a
//! row's version, and by the output plugin.
//!
//! The commit record tells the time by the clock, which PostgreSQL lets nobody change. So a row of
//! `braid.local_version`, written by the transaction itself as the last thing that it does, tells
//! the version by its transaction id; one more for each subtransaction that has written rows, which
//! have its id. For one that was prepared, which nothing can be added to, another transaction
//! writes it just before COMMIT PREPARED (`clock.rs`); where that is not carried out then, the next
//! attempt writes one more, and the newest counts. The plugin sends that as the time of the commit
//! (`plugin/version.rs`); what is subscribed elsewhere never sees the other one.
//!
//! As there are none usually, shared memory says whether there may be any:
//!
//! | state | |
//! |---|---|
//! | `UNKNOWN` | since the server was started: who asks, the manager at the latest, looks at the table |
//! | `NONE` | there were none when somebody looked |
//! | `SOME` | there were some, or set by who writes one, before that; never taken back while the server runs. Beside it stands from which to which transaction they are, so that all is as cheap as before once the clock is right |
//!
//! Who has looked takes the place of `UNKNOWN` only, so `NONE` can't hide one that was written
//! meanwhile. Who asks for the version of a transaction does so after its commit, hence after
//! `SOME`.
//!
//! Rows under id 0 say up to where changes were applied here, where that is ahead of the clock: it
//! is to be known again after a restart.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::names::find_table;
use braid_postgres::table_scan::{self, By, Sees, int8};
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::transaction;
use braid_postgres::xid::{committed_parts, full, still_known};
use pgrx::pg_sys;

use crate::kept_commit;
use crate::registry::{self, ManagerEntry};

const UNKNOWN: u32 = 0;
const NONE: u32 = 1;
const SOME: u32 = 2;
/// Columns of `braid.local_version`.
const COLUMNS: usize = 2;
/// What is known of so many transactions is remembered by a process.
const REMEMBERED: usize = 4096;
/// Microseconds by which more is written down than was seen, so that it is not written with each
/// change.
const AHEAD: i64 = 1_000_000;

thread_local! {
    static KNOWN: RefCell<HashMap<u64, Option<i64>>> = RefCell::default();
    /// What the transaction in hand has marked; 0: nothing.
    static MARKED: Cell<i64> = const { Cell::new(0) };
}

fn table() -> Option<pg_sys::Oid> {
    find_table("braid", "local_version").ok().flatten()
}

/// Whether it is known that this transaction has no version of its own. Without a look at the
/// table.
#[must_use]
pub fn has_none(xid: pg_sys::TransactionId) -> bool {
    registry::my_manager().is_some_and(|entry| match entry.local_versions.load(Ordering::SeqCst) {
        NONE => true,
        SOME => is_outside(entry, full(xid)),
        _ => false,
    })
}

fn is_outside(entry: &ManagerEntry, full: u64) -> bool {
    full < entry.local_versions_from.load(Ordering::SeqCst)
        || full > entry.local_versions_to.load(Ordering::SeqCst)
}

/// A transaction has a version of its own, or is about to.
fn include(entry: &ManagerEntry, full: u64) {
    entry.local_versions_from.fetch_min(full, Ordering::SeqCst);
    entry.local_versions_to.fetch_max(full, Ordering::SeqCst);
}

/// Whether any transaction may have one. Asks the table where nobody knows. In a transaction
/// without a historic snapshot.
pub fn may_be() -> bool {
    let entry = registry::my_manager();
    match entry.map(|entry| entry.local_versions.load(Ordering::SeqCst)) {
        Some(NONE) => return false,
        Some(SOME) => return true,
        _ => {}
    }
    let mut found = false;
    if let Some(table) = table() {
        table_scan::each::<COLUMNS>(table, None, Sees::Running, |row| {
            let [xid, _] = row.values;
            if let Ok(full @ 1..) = u64::try_from(int8(xid)) {
                found = true;
                if let Some(entry) = entry {
                    include(entry, full);
                }
            }
            ControlFlow::Continue(())
        });
    }
    if let Some(entry) = entry {
        let known = if found { SOME } else { NONE };
        let versions = &entry.local_versions;
        let _ = versions.compare_exchange(UNKNOWN, known, Ordering::SeqCst, Ordering::SeqCst);
    }
    found
}

/// The version of a transaction of this node that has committed, microseconds since 1970-01-01 UTC,
/// if that is not its commit timestamp. In a transaction without a historic snapshot.
#[must_use]
pub fn of(xid: pg_sys::TransactionId) -> Option<i64> {
    if !may_be() || has_none(xid) {
        return None;
    }
    let full = full(xid);
    if let Some(known) = KNOWN.with_borrow(|known| known.get(&full).copied()) {
        return known;
    }
    let version = written_for(full);
    KNOWN.with_borrow_mut(|known| {
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(full, version);
    });
    version
}

/// What is written down for a transaction, whether it has committed or is prepared, microseconds
/// since 1970-01-01 UTC. In a transaction without a historic snapshot.
#[must_use]
pub(crate) fn written_for(full: u64) -> Option<i64> {
    let mut version: Option<i64> = None;
    let (table, index) = (table()?, find_table("braid", "local_version_xid").ok()??);
    let by = By {
        index,
        value: i64::try_from(full).unwrap_or(i64::MAX),
    };
    // WAL may be decoded before the transaction has ended for others: its row is to be seen
    // nevertheless.
    table_scan::each::<COLUMNS>(table, Some(by), Sees::Running, |row| {
        let [_, timestamp] = row.values;
        version = version.max(Some(int8(timestamp)));
        ControlFlow::Continue(())
    });
    version
}

/// When the transaction was committed by this node's clock or, if it has one, its version
/// (TimestampTz). `None` where that is not known any more. In a transaction.
#[must_use]
pub fn commit_timestamp(xid: pg_sys::TransactionId) -> Option<i64> {
    let (timestamp, origin) = commit_data(xid)?;
    let own = || of(xid).map(|version| version.saturating_sub(EPOCH_DIFFERENCE));
    Some((origin == 0).then(own).flatten().unwrap_or(timestamp))
}

/// Commit timestamp (TimestampTz) and origin of a transaction, also where PostgreSQL has forgotten
/// them, but Braid has not. `None` where nothing is known. In a transaction without a historic
/// snapshot.
#[must_use]
pub fn commit_data(xid: pg_sys::TransactionId) -> Option<(i64, ReplOriginId)> {
    still_known(xid).or_else(|| kept_commit::of(xid))
}

/// The transaction in hand, which is about to commit, is to have this version (TimestampTz).
/// Returns whether it has: not where the extension is dropped.
pub(crate) fn assign(timestamp: i64) -> bool {
    let whole = transaction::assign_top_full_id();
    // Rows have the ids of the subtransactions that have written them.
    for part in committed_parts() {
        assign_to(full(part), timestamp);
    }
    assign_to(whole, timestamp)
}

/// The transaction in hand gets this version (microseconds since 1970-01-01 UTC) whatever the time
/// of its commit. To be called as the last thing that it does, at its top level. Returns whether it
/// has the version: not where the extension is dropped.
///
/// The time must not be much older than the commit: versions are told by the commit alone once
/// nothing older than this version can come.
#[must_use]
pub fn commit_as(timestamp: i64) -> bool {
    assign(timestamp.saturating_sub(EPOCH_DIFFERENCE))
}

/// As [`assign`] for another transaction, which is prepared: counts once the one in hand has
/// committed.
pub(crate) fn assign_to(full: u64, timestamp: i64) -> bool {
    let Some(table) = table() else {
        return false;
    };
    // What there was before is to be known, then.
    may_be();
    if let Some(entry) = registry::my_manager() {
        include(entry, full);
        entry.local_versions.store(SOME, Ordering::SeqCst);
    }
    write(table, i64::try_from(full).unwrap_or(i64::MAX), timestamp);
    true
}

/// What has come here reaches up to this time (TimestampTz), which is to be known after a restart.
/// In the transaction that brings it.
pub fn mark(timestamp: i64) {
    let Some(entry) = registry::my_manager() else {
        return;
    };
    let written = entry.newest_written.load(Ordering::Acquire);
    if timestamp <= written {
        return;
    }
    let Some(table) = table() else {
        return;
    };
    let timestamp = timestamp.saturating_add(AHEAD);
    write(table, 0, timestamp);
    MARKED.set(timestamp);
}

/// The transaction in hand has ended. What it has marked is there for others only now, and only if
/// it has committed.
pub fn ended(committed: bool) {
    let marked = MARKED.replace(0);
    if marked != 0
        && committed
        && let Some(entry) = registry::my_manager()
    {
        entry.newest_written.fetch_max(marked, Ordering::AcqRel);
    }
}

fn write(table: pg_sys::Oid, xid: i64, timestamp: i64) {
    let row: [table_scan::Cell<'_>; COLUMNS] = [
        table_scan::Cell::Bigint(xid),
        table_scan::Cell::Bigint(timestamp.saturating_add(EPOCH_DIFFERENCE)),
    ];
    table_scan::insert(table, std::iter::once(row));
}

/// The newest that is written down here (TimestampTz). In a transaction.
///
/// # Errors
/// 42P01 where the extension is not there.
pub fn newest() -> Result<Option<i64>, PgError> {
    let table = table().ok_or_else(|| {
        PgError::new(
            SqlState::UndefinedTable,
            "braid.local_version does not exist",
        )
    })?;
    let mut newest: Option<i64> = None;
    table_scan::each::<COLUMNS>(table, None, Sees::Committed, |row| {
        pgrx::check_for_interrupts!();
        let [_, timestamp] = row.values;
        newest = newest.max(Some(int8(timestamp)));
        ControlFlow::Continue(())
    });
    Ok(newest.map(|newest| newest.saturating_sub(EPOCH_DIFFERENCE)))
}
