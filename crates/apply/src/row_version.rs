//! Version of a row in a slot: its writer, its end, and its lock. Run by the appliers.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::relation::RelationRef;
use braid_postgres::slot::Slot;
use braid_postgres::transaction;
use pgrx::pg_sys;

use super::version::{Stamp, stamp_of, stamp_of_transaction};

/// Locks the row version in `slot` for a change. Returns its version; `None` if the row has changed
/// meanwhile.
///
/// # Errors
/// Whatever PostgreSQL raises while it waits.
pub fn lock_row(table: RelationRef<'_>, slot: &Slot) -> Result<Option<Stamp>, PgError> {
    let mut failure = pg_sys::TM_FailureData::default();
    let mut tid = slot.tid();
    let (table, raw) = (table.as_ptr(), slot.as_ptr());
    // SAFETY: the slot is one of the open table's; the snapshot stays active for the call. The
    // table access method's function is called behind pgrx's guard, so that its errors unwind.
    let result = unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetLatestSnapshot());
        let Some(tuple_lock) = (*(*table).rd_tableam).tuple_lock else {
            return Err(PgError::new(
                SqlState::FeatureNotSupported,
                "table access method cannot lock rows",
            ));
        };
        let snapshot = pg_sys::GetActiveSnapshot();
        let command = pg_sys::GetCurrentCommandId(false);
        let result = pg_sys::ffi::pg_guard_ffi_boundary(|| {
            tuple_lock(
                table,
                &raw mut tid,
                snapshot,
                raw,
                command,
                pg_sys::LockTupleMode::LockTupleExclusive,
                pg_sys::LockWaitPolicy::LockWaitBlock,
                0,
                &raw mut failure,
            )
        });
        pg_sys::PopActiveSnapshot();
        result
    };
    match result {
        pg_sys::TM_Result::TM_Ok => Ok(Some(stamp_of(slot.writer()))),
        pg_sys::TM_Result::TM_Updated | pg_sys::TM_Result::TM_Deleted => Ok(None),
        other => Err(PgError::new(
            SqlState::InternalError,
            format!("unexpected result {other} of locking a row"),
        )),
    }
}

/// End of a row version.
pub(super) enum EndOfVersion {
    /// Not ended, or not known yet: there may be a newer version of the row elsewhere.
    Open,
    /// Replaced by a newer version of the row, elsewhere, perhaps under another key.
    Replaced(pg_sys::TransactionId, Stamp),
    /// Deleted; [`Stamp::Own`] if this transaction deleted it.
    Deleted(pg_sys::TransactionId, Stamp),
    /// Written by a transaction that was rolled back.
    Aborted,
}

/// Returns how the version in `slot`, which no present snapshot sees, ended.
///
/// The header's fields are read as HeapTupleSatisfiesVisibility does; xmax does not change any more
/// once its transaction has committed.
pub(super) fn end_of(slot: &Slot) -> EndOfVersion {
    let Some(header) = slot.header() else {
        return EndOfVersion::Open;
    };
    if header.infomask & (pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_LOCK_ONLY) != 0 {
        // Not deleted: its writer was rolled back, or the version came after the scan.
        let xmin = header.xmin;
        let frozen = pg_sys::HEAP_XMIN_COMMITTED | pg_sys::HEAP_XMIN_INVALID;
        let gone = header.infomask & frozen != frozen
            && xmin.into_inner() >= pg_sys::FirstNormalTransactionId.into_inner()
            && !transaction::is_own(xmin)
            && !transaction::is_running(xmin)
            && !transaction::has_committed(xmin);
        return if gone {
            EndOfVersion::Aborted
        } else {
            EndOfVersion::Open
        };
    }
    let xmax = header.xmax;
    let ended = if same_place(header.ctid, slot.tid()) {
        EndOfVersion::Deleted
    } else {
        EndOfVersion::Replaced
    };
    if transaction::is_own(xmax) {
        return ended(xmax, Stamp::Own);
    }
    // The order matters: the commit log has a commit before snapshots see it. In the other order,
    // rows that were committed with it could be missed.
    if !transaction::is_running(xmax) && transaction::has_committed(xmax) {
        ended(xmax, stamp_of_transaction(xmax))
    } else {
        EndOfVersion::Open
    }
}

pub(super) fn same_place(one: pg_sys::ItemPointerData, other: pg_sys::ItemPointerData) -> bool {
    one.ip_posid == other.ip_posid
        && one.ip_blkid.bi_hi == other.ip_blkid.bi_hi
        && one.ip_blkid.bi_lo == other.ip_blkid.bi_lo
}
