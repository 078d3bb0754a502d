//! A look at all rows of a table, one after the other, through its access method. Run by processes
//! that find or count rows without an index.

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::error::PgError;
use crate::relation::RelationRef;
use crate::slot::Slot;
use crate::snapshot;

/// A scan of a table, which puts its rows into a slot. It ends when dropped. If the process
/// unwinds, the rollback ends it.
#[derive(Debug)]
pub struct SequentialScan<'a> {
    relation: RelationRef<'a>,
    slot: Slot,
    scan: pg_sys::TableScanDesc,
    /// Registered; null if the scan sees unfinished transactions.
    snapshot: pg_sys::Snapshot,
    /// The scan's snapshot points to this one if it sees unfinished transactions.
    dirty: Box<pg_sys::SnapshotData>,
}

impl<'a> SequentialScan<'a> {
    /// Scans the rows that are committed by now, and those that the current transaction has
    /// written.
    ///
    /// # Errors
    /// 0A000 if the table can't be scanned, or not into this slot.
    pub fn of_latest(relation: RelationRef<'a>, slot: &Slot) -> Result<Self, PgError> {
        // SAFETY: in a transaction, as a relation is open. `drop` gives the snapshot back, or the
        // rollback.
        let latest = unsafe { pg_sys::RegisterSnapshot(snapshot::of_now()) };
        Self::begin(relation, slot, latest)
    }

    /// Scans the rows that are committed by now, and those that any running transaction has written
    /// or deleted: [`SequentialScan::unfinished`] says which.
    ///
    /// # Errors
    /// Those of [`SequentialScan::of_latest`].
    pub fn of_unfinished(relation: RelationRef<'a>, slot: &Slot) -> Result<Self, PgError> {
        Self::begin(relation, slot, std::ptr::null_mut())
    }

    /// `table_beginscan` of src/include/access/tableam.h, 15 to 18.
    fn begin(
        relation: RelationRef<'a>,
        slot: &Slot,
        snapshot: pg_sys::Snapshot,
    ) -> Result<Self, PgError> {
        let flags = pg_sys::ScanOptions::SO_TYPE_SEQSCAN
            | pg_sys::ScanOptions::SO_ALLOW_STRAT
            | pg_sys::ScanOptions::SO_ALLOW_SYNC
            | pg_sys::ScanOptions::SO_ALLOW_PAGEMODE;
        let mut dirty: Box<pg_sys::SnapshotData> = Box::default();
        dirty.snapshot_type = pg_sys::SnapshotType::SNAPSHOT_DIRTY;
        let sees = if snapshot.is_null() {
            &raw mut *dirty
        } else {
            snapshot
        };
        let table = relation.as_ptr();
        // SAFETY: the relation is open, and has an access method if it has storage. The snapshot
        // outlives the scan. The function is behind pgrx's guard.
        let scan = unsafe {
            let begin = relation
                .has_storage()
                .then(|| (*(*table).rd_tableam).scan_begin);
            match begin.flatten().filter(|_| slot.is_for(relation)) {
                Some(begin) => pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    let none = std::ptr::null_mut();
                    begin(table, sees, 0, none, std::ptr::null_mut(), flags)
                }),
                None => {
                    return Err(PgError::new(
                        SqlState::FeatureNotSupported,
                        "table access method cannot scan",
                    ));
                }
            }
        };
        Ok(Self {
            relation,
            slot: slot.clone(),
            scan,
            snapshot,
            dirty,
        })
    }

    /// Puts the next row into the slot; false at the end.
    #[inline]
    pub fn advance(&mut self) -> bool {
        let (table, scan, slot) = (self.relation.as_ptr(), self.scan, self.slot.as_ptr());
        // SAFETY: the scan is one of the table, and the slot is of its kind.
        unsafe {
            (*(*table).rd_tableam).scan_getnextslot.is_some_and(|next| {
                pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    next(scan, pg_sys::ScanDirection::ForwardScanDirection, slot)
                })
            })
        }
    }

    /// Deletes the row that was found last, which no other session may be about to change. A scan
    /// that sees unfinished transactions deletes nothing.
    pub fn delete(&mut self) {
        if self.snapshot.is_null() || self.slot.is_empty() {
            return;
        }
        let mut tid = self.slot.tid();
        let (table, snapshot) = (self.relation.as_ptr(), self.snapshot);
        // SAFETY: the row is one of the table, and was seen by the snapshot. If another session
        // changes it, that is an error.
        unsafe { pg_sys::simple_table_tuple_delete(table, &raw mut tid, snapshot) };
    }

    /// The transaction that still runs and has written or deleted the row that was found last;
    /// invalid if there is none.
    #[must_use]
    pub fn unfinished(&self) -> pg_sys::TransactionId {
        [self.dirty.xmin, self.dirty.xmax]
            .into_iter()
            .find(|xid| *xid != pg_sys::InvalidTransactionId)
            .unwrap_or(pg_sys::InvalidTransactionId)
    }
}

impl Drop for SequentialScan<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let (table, scan) = (self.relation.as_ptr(), self.scan);
        // SAFETY: begun by `begin`, and ended once; so was the snapshot registered.
        unsafe {
            if let Some(end) = (*(*table).rd_tableam).scan_end {
                pg_sys::ffi::pg_guard_ffi_boundary(|| end(scan));
            }
            if !self.snapshot.is_null() {
                pg_sys::UnregisterSnapshot(self.snapshot);
            }
        }
    }
}
