//! Versions of this node's own transactions that are not the times of their commits. Written by
//! sessions whose clock is further behind than they may wait (`clock.rs`). Read by all processes
//! that need a row's version, and by the output plugin.
//!
//! The commit record has the time by the clock, which an extension can't change. So the transaction
//! itself writes a row of `braid.local_version` as its last action: its transaction id and the
//! version. It writes one more for each subtransaction that has written rows, which have its id.
//! Nothing can be added to a prepared transaction, so another one writes the row just before COMMIT
//! PREPARED (`clock.rs`). If that fails, the next attempt writes one more, and the newest counts.
//! The plugin sends the version as the time of the commit (`plugin/version.rs`); subscribers never
//! see the other time.
//!
//! Usually there are none. So shared memory says whether there may be any:
//!
//! | state | |
//! |---|---|
//! | `UNKNOWN` | since the server was started; the first reader reads the table (or the manager) |
//! | `NONE` | there were none when the table was read |
//! | `SOME` | there were some, or a writer is about to write one; stays while the server runs |
//!
//! With `SOME`, shared memory also has the first and the last of these transactions. So all is as
//! cheap as before once the clock is right.
//!
//! A reader only replaces `UNKNOWN`, so `NONE` can't hide a version that was written meanwhile. A
//! process reads the version of a transaction after its commit, hence after `SOME`.
//!
//! Rows under id 0 have the time up to which changes were applied on this node, if it is ahead of
//! the clock: it is needed again after a restart.

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
/// A process remembers the versions of at most this many transactions.
const REMEMBERED: usize = 4096;
/// Microseconds by which the stored time exceeds the seen one, so that it is not written with each
/// change.
const AHEAD: i64 = 1_000_000;

thread_local! {
    static KNOWN: RefCell<HashMap<u64, Option<i64>>> = RefCell::default();
    /// The time that the current transaction has marked; 0: none.
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

/// The stored version of a transaction, whether it has committed or is prepared, microseconds since
/// 1970-01-01 UTC. In a transaction without a historic snapshot.
#[must_use]
pub(crate) fn written_for(full: u64) -> Option<i64> {
    let mut version: Option<i64> = None;
    let (table, index) = (table()?, find_table("braid", "local_version_xid").ok()??);
    let by = By {
        index,
        value: i64::try_from(full).unwrap_or(i64::MAX),
    };
    // WAL may be decoded before the transaction has ended for others: its row must be visible
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

/// Gives the current transaction, which is about to commit, this version (TimestampTz). Returns
/// whether it has it: not if the extension is being dropped.
pub(crate) fn assign(timestamp: i64) -> bool {
    let whole = transaction::assign_top_full_id();
    // Rows have the ids of the subtransactions that have written them.
    for part in committed_parts() {
        assign_to(full(part), timestamp);
    }
    assign_to(whole, timestamp)
}

/// Gives the current transaction this version (microseconds since 1970-01-01 UTC), whatever the
/// time of its commit. To be called as its last action, at its top level. Returns whether it has
/// the version: not if the extension is being dropped.
///
/// The time must not be much older than the commit: once no change can arrive that is older than
/// this version, only the commit's own time counts.
#[must_use]
pub fn commit_as(timestamp: i64) -> bool {
    assign(timestamp.saturating_sub(EPOCH_DIFFERENCE))
}

/// Gives another transaction, which is prepared, this version: it counts once the current one has
/// committed.
pub(crate) fn assign_to(full: u64, timestamp: i64) -> bool {
    let Some(table) = table() else {
        return false;
    };
    // Then earlier versions must be known.
    may_be();
    if let Some(entry) = registry::my_manager() {
        include(entry, full);
        entry.local_versions.store(SOME, Ordering::SeqCst);
    }
    write(table, i64::try_from(full).unwrap_or(i64::MAX), timestamp);
    true
}

/// Records that applied changes reach up to this time (TimestampTz), which is needed after a
/// restart. In the transaction that applies them.
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

/// The current transaction has ended. Only now, and only if it has committed, its marked time is
/// visible to others.
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

/// The newest time that is stored on this node (TimestampTz). In a transaction.
///
/// # Errors
/// 42P01 if the extension is missing.
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
