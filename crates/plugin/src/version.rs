//! The version of a transaction that is about to be decoded, where that is not the time of its commit (`braid_node::local_version`).
//!
//! It stands in a row that the transaction wrote as the last thing that it did. The table can't be asked under a historic snapshot: a table
//! of a user's is where it was then, and what has rewritten it since (VACUUM FULL, REINDEX) has removed its files. So the row is
//! taken from the changes that the reorder buffer has in hand. Only where they are not all in memory any more, or the table
//! was rewritten while the transaction ran, the historic snapshot is put aside, with all that is cached under it. So it is for a transaction that was
//! prepared: its row was written by another one, which committed just before COMMIT PREPARED.

use std::mem::offset_of;

use braid_node::local_version;
use braid_postgres::names::find_table;
use braid_postgres::{compat, xid};
use pgrx::pg_sys;

use super::format::Context;
use super::stream::{in_transaction, no_origin};

/// Of a transaction that has committed, microseconds since 1970-01-01 UTC; `None` where the time of its commit is its version.
///
/// # Safety
/// In a begin callback, under the transaction's historic snapshot.
pub unsafe fn of(ctx: Context, txn: &pg_sys::ReorderBufferTXN) -> Option<i64> {
    if has_none(txn) {
        return None;
    }
    let complete = txn.txn_flags & pg_sys::RBTXN_IS_SERIALIZED == 0;
    // SAFETY: as the caller says.
    unsafe {
        match in_memory(txn) {
            Found::Version(version) => Some(version),
            Found::Nothing if complete && !was_prepared(ctx) => None,
            Found::Nothing | Found::Likely => outside_of_history(|| local_version::of(txn.xid)),
        }
    }
}

/// As [`of`], but asks the table in any case.
///
/// # Safety
/// In a callback, in no transaction or in one, with or without a historic snapshot.
pub(super) unsafe fn written_down(txn: &pg_sys::ReorderBufferTXN) -> Option<i64> {
    if has_none(txn) {
        return None;
    }
    // SAFETY: as the caller says.
    unsafe {
        if pg_sys::HistoricSnapshotActive() {
            return outside_of_history(|| local_version::of(txn.xid));
        }
        // What is cached is from history all the same.
        pg_sys::InvalidateSystemCaches();
        let version = in_transaction(|| local_version::of(txn.xid));
        pg_sys::InvalidateSystemCaches();
        version
    }
}

/// Whether it is certain, without a look, that the time of its commit is its version.
fn has_none(txn: &pg_sys::ReorderBufferTXN) -> bool {
    txn.origin_id != no_origin() || local_version::has_none(txn.xid)
}

/// Whether what is decoded is COMMIT PREPARED: what says its version was written by another transaction, just before.
///
/// # Safety
/// A record of a transaction's end is being decoded.
unsafe fn was_prepared(ctx: Context) -> bool {
    // SAFETY: as the caller says.
    let info = unsafe { (*(*(*ctx).reader).record).header.xl_info };
    u32::from(info) & pg_sys::XLOG_XACT_OPMASK == pg_sys::XLOG_XACT_COMMIT_PREPARED
}

enum Found {
    Nothing,
    /// Something that looks like the row, of a table that was in another file.
    Likely,
    Version(i64),
}

/// # Safety
/// As for [`of`].
unsafe fn in_memory(txn: &pg_sys::ReorderBufferTXN) -> Found {
    let xid = i64::try_from(xid::full(txn.xid)).unwrap_or(i64::MAX);
    let mut found = Found::Nothing;
    // SAFETY: the list is the transaction's, goes in a circle, and each of its nodes is in a change; it stays as it is meanwhile.
    unsafe {
        let head = &raw const txn.changes.head;
        let mut node = (*head).prev.cast_const();
        while !node.is_null() && node != head {
            let change = node
                .byte_sub(offset_of!(pg_sys::ReorderBufferChange, node))
                .cast::<pg_sys::ReorderBufferChange>();
            node = (*node).prev;
            if (*change).action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT {
                continue;
            }
            let tuples = &(*change).data.tp;
            let Some(version) = version_in(compat::change_tuple(tuples.newtuple), xid) else {
                continue;
            };
            if file_of_table() == Some(compat::change_file(tuples)) {
                return Found::Version(version);
            }
            found = Found::Likely;
        }
    }
    found
}

/// What stands in a tuple of two bigints beside the transaction's id.
///
/// # Safety
/// The tuple is null or valid.
unsafe fn version_in(tuple: pg_sys::HeapTuple, xid: i64) -> Option<i64> {
    const COLUMNS: u16 = 2;
    const BYTES: usize = 16;
    if tuple.is_null() {
        return None;
    }
    // SAFETY: as the caller says; the header says where the values start.
    unsafe {
        let header = (*tuple).t_data;
        let start = usize::from((*header).t_hoff);
        let len = usize::try_from((*tuple).t_len).ok()?;
        let has_nulls = u32::from((*header).t_infomask) & pg_sys::HEAP_HASNULL != 0;
        let columns = u32::from((*header).t_infomask2) & pg_sys::HEAP_NATTS_MASK;
        if has_nulls || columns != u32::from(COLUMNS) || len != start + BYTES {
            return None;
        }
        let values = header.cast::<u8>().cast_const().add(start).cast::<i64>();
        (values.read_unaligned() == xid).then(|| values.add(1).read_unaligned())
    }
}

/// Where the table was, as the historic snapshot has it.
fn file_of_table() -> Option<u32> {
    let table = find_table("braid", "local_version").ok()??;
    // SAFETY: in a transaction; the relation is closed again.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(table);
        if relation.is_null() {
            return None;
        }
        let file = compat::relation_file(relation);
        pg_sys::RelationClose(relation);
        Some(file)
    }
}

/// Do something under what is true now.
///
/// # Safety
/// In a transaction with a historic snapshot. No snapshot of a transaction is taken by `work`.
unsafe fn outside_of_history<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: as the caller says. What catalogs were seen to say is forgotten with either snapshot, as the reorder buffer does it. An error
    // ends the decoding, which tears the historic snapshot down by itself.
    unsafe {
        // Not GetTransactionSnapshot, which asserts that the transaction has no other: a SQL function's has.
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
