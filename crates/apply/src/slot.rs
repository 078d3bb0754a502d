//! Slots in the memory of the current change, and the snapshot that sees every version of a row.
//! Run by processes that find rows.

use braid_postgres::relation::RelationRef;
use braid_postgres::slot::Slot;
use pgrx::pg_sys;

/// Returns a snapshot that sees every row version.
pub(super) fn any_snapshot() -> pg_sys::Snapshot {
    &raw mut pg_sys::SnapshotAnyData
}

/// Returns a new slot for a row of a table, in the memory of the current change.
pub(super) fn slot_of(table: RelationRef<'_>) -> Slot {
    // SAFETY: what a change finds goes before its memory does.
    unsafe { Slot::of(table) }
}
