//! The version of a transaction that is about to be decoded, where that is not the time of its
//! commit (`braid_node::local_version`).
//!
//! A row that the transaction wrote last has the version. The table can't be read under a historic
//! snapshot: a user table is where it was then, and a rewrite since (VACUUM FULL, REINDEX) has
//! removed its files. So the row is taken from the changes in the reorder buffer. In three cases
//! the historic snapshot is replaced for a moment, with all that is cached under it: if the changes
//! are not all in memory any more, if the table was rewritten while the transaction ran, and if the
//! transaction was prepared. In the last case another transaction wrote the row, and committed just
//! before COMMIT PREPARED.

use braid_node::local_version;
use braid_postgres::decoding::{Context, Transaction, Tuple};
use braid_postgres::names::find_table;
use braid_postgres::relation::Described;
use braid_postgres::{plain, xid};
use pgrx::pg_sys;

use super::origin_names::no_origin;
use super::transaction::in_transaction;

/// Of a transaction that has committed, microseconds since 1970-01-01 UTC; `None` where the time of
/// its commit is its version. In a begin callback, under the transaction's historic snapshot.
#[must_use]
pub fn of(ctx: Context<'_>, txn: Transaction<'_>) -> Option<i64> {
    if has_none(txn) {
        return None;
    }
    let complete = txn.txn_flags & pg_sys::RBTXN_IS_SERIALIZED == 0;
    match in_memory(txn) {
        Found::Version(version) => Some(version),
        Found::Nothing if complete && !was_prepared(ctx) => None,
        Found::Nothing | Found::Likely => outside_of_history(|| local_version::of(txn.xid)),
    }
}

/// As [`of`], but asks the table in any case. In a callback, in no transaction or in one, with or
/// without a historic snapshot.
pub(super) fn written_down(txn: Transaction<'_>) -> Option<i64> {
    if has_none(txn) {
        return None;
    }
    if plain::HistoricSnapshotActive() {
        return outside_of_history(|| local_version::of(txn.xid));
    }
    // The caches are from history nevertheless.
    plain::InvalidateSystemCaches();
    let version = in_transaction(|| local_version::of(txn.xid));
    plain::InvalidateSystemCaches();
    version
}

/// Whether it is certain, without a look, that the time of its commit is its version.
fn has_none(txn: Transaction<'_>) -> bool {
    txn.origin_id != no_origin() || local_version::has_none(txn.xid)
}

/// Whether the record is COMMIT PREPARED: then another transaction, just before, wrote the row with
/// its version. A record of a transaction's end is being decoded.
fn was_prepared(ctx: Context<'_>) -> bool {
    let info = ctx.record().map_or(0, |record| record.header.xl_info);
    u32::from(info) & pg_sys::XLOG_XACT_OPMASK == pg_sys::XLOG_XACT_COMMIT_PREPARED
}

enum Found {
    Nothing,
    /// Something that looks like the row, of a table that was in another file.
    Likely,
    Version(i64),
}

fn in_memory(txn: Transaction<'_>) -> Found {
    let xid = i64::try_from(xid::full(txn.xid)).unwrap_or(i64::MAX);
    let mut found = Found::Nothing;
    for change in txn.changes_backwards() {
        if change.action() != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT {
            continue;
        }
        let Some(version) = change.after().and_then(|row| version_in(row, xid)) else {
            continue;
        };
        if file_of_table().is_some_and(|file| change.file() == Some(file)) {
            return Found::Version(version);
        }
        found = Found::Likely;
    }
    found
}

/// The other value of a tuple of two bigints, of which one is the transaction's id.
fn version_in(tuple: Tuple<'_>, xid: i64) -> Option<i64> {
    const COLUMNS: u16 = 2;
    let header = tuple.header();
    let has_nulls = u32::from(header.t_infomask) & pg_sys::HEAP_HASNULL != 0;
    let columns = u32::from(header.t_infomask2) & pg_sys::HEAP_NATTS_MASK;
    if has_nulls || columns != u32::from(COLUMNS) {
        return None;
    }
    // The header says where the values start.
    let values = tuple.bytes().get(usize::from(header.t_hoff)..)?;
    let ([id, version], []) = values.as_chunks::<8>() else {
        return None;
    };
    (i64::from_ne_bytes(*id) == xid).then(|| i64::from_ne_bytes(*version))
}

/// Where the table was, as the historic snapshot has it.
fn file_of_table() -> Option<u32> {
    let table = find_table("braid", "local_version").ok()??;
    Some(Described::find(table)?.view().file())
}

/// Runs `work` under the catalogs as they are now. In a transaction with a historic snapshot.
/// `work` takes no snapshot of a transaction.
fn outside_of_history<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: with a historic snapshot, which is restored. The caches are emptied with either
    // snapshot, as the reorder buffer does it. An error ends the decoding, which tears the historic
    // snapshot down by itself.
    unsafe {
        // Not GetTransactionSnapshot, which asserts that the transaction has no other: a SQL
        // function's has.
        let snapshot = pg_sys::GetCatalogSnapshot(pg_sys::InvalidOid);
        let combos = pg_sys::HistoricSnapshotGetTupleCids();
        pg_sys::TeardownHistoricSnapshot(false);
        pg_sys::InvalidateSystemCaches();
        let made = work();
        pg_sys::InvalidateCatalogSnapshot();
        pg_sys::SetupHistoricSnapshot(snapshot, combos);
        pg_sys::InvalidateSystemCaches();
        made
    }
}
