//! Rows of a small table or catalog, read as they are stored: without SPI, so by anybody, also while WAL is decoded or a transaction is
//! about to end.

use std::ops::ControlFlow;

use pgrx::pg_sys;

/// F_INT8EQ of src/include/utils/fmgroids.h.
const INT8_EQUAL: u32 = 467;
/// BTEqualStrategyNumber of src/include/access/stratnum.h.
const EQUAL: u16 = 3;

/// Which rows are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sees {
    /// What is committed by now, and the transaction's own.
    Committed,
    /// What transactions wrote that still run, too.
    Running,
    /// Whatever is still stored, also what was deleted.
    Any,
}

/// An index whose first column is a bigint, and the value that is looked for.
#[derive(Debug, Clone, Copy)]
pub struct By {
    /// The index.
    pub index: pg_sys::Oid,
    /// The value.
    pub value: i64,
}

/// A stored row of `N` columns. By-reference values are valid while it is looked at.
#[derive(Debug)]
pub struct Row<const N: usize> {
    /// What stands in the columns; where there is null, anything.
    pub values: [pg_sys::Datum; N],
    /// Which are null.
    pub nulls: [bool; N],
    tuple: pg_sys::HeapTuple,
}

impl<const N: usize> Row<N> {
    /// The transaction that wrote it, as it is stored.
    #[must_use]
    pub fn writer(&self) -> pg_sys::TransactionId {
        // SAFETY: a row is made by `each` only, of a tuple that is there while the row is looked at.
        unsafe { (*(*self.tuple).t_data).t_choice.t_heap.t_xmin }
    }

    /// Where it is: block, and number in it.
    #[must_use]
    pub fn place(&self) -> (u32, u16) {
        // SAFETY: as in `writer`.
        unsafe {
            let place = (*self.tuple).t_self;
            let block = pgrx::itemptr::item_pointer_get_block_number_no_check(place);
            (block, place.ip_posid)
        }
    }

    /// Nobody has deleted it.
    #[must_use]
    pub fn is_live(&self) -> bool {
        // SAFETY: as in `writer`.
        let infomask = u32::from(unsafe { (*(*self.tuple).t_data).t_infomask });
        infomask & pg_sys::HEAP_XMAX_INVALID != 0
    }
}

/// A bigint.
#[must_use]
pub fn int8(value: pg_sys::Datum) -> i64 {
    (value.value() as u64).cast_signed()
}

/// The lower 32 bits: an oid or integer.
#[must_use]
pub fn low(value: pg_sys::Datum) -> u32 {
    u32::try_from(value.value() & 0xFFFF_FFFF).unwrap_or(0)
}

/// Look at the rows of a table, or at those that an index finds, until told to stop.
///
/// # Safety
/// In a transaction; the table has `N` columns, dropped ones included, and the index is one of its indexes.
pub unsafe fn each<const N: usize>(
    table: pg_sys::Oid,
    by: Option<By>,
    sees: Sees,
    mut look: impl FnMut(&Row<N>) -> ControlFlow<()>,
) {
    let lock = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
    let count = i32::from(by.is_some());
    let mut key = pg_sys::ScanKeyData::default();
    // SAFETY: the scan ends before the table is closed; each tuple is read before the next one.
    unsafe {
        if let Some(by) = by {
            let equal = pg_sys::Oid::from(INT8_EQUAL);
            let value = pg_sys::Datum::from(by.value);
            pg_sys::ScanKeyInit(&raw mut key, 1, EQUAL, equal, value);
        }
        let relation = pg_sys::table_open(table, lock);
        let latest = match sees {
            Sees::Committed => pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot()),
            _ => std::ptr::null_mut(),
        };
        let mut dirty = pg_sys::SnapshotData {
            snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY,
            ..Default::default()
        };
        let snapshot = match sees {
            Sees::Committed => latest,
            Sees::Running => &raw mut dirty,
            Sees::Any => &raw mut pg_sys::SnapshotAnyData,
        };
        let index = by.map_or(pg_sys::InvalidOid, |by| by.index);
        let scan = pg_sys::systable_beginscan(
            relation,
            index,
            by.is_some(),
            snapshot,
            count,
            &raw mut key,
        );
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            let mut row = Row {
                values: [pg_sys::Datum::null(); N],
                nulls: [true; N],
                tuple,
            };
            let (values, nulls) = (row.values.as_mut_ptr(), row.nulls.as_mut_ptr());
            pg_sys::heap_deform_tuple(tuple, (*relation).rd_att, values, nulls);
            if look(&row).is_break() {
                break;
            }
        }
        pg_sys::systable_endscan(scan);
        if !latest.is_null() {
            pg_sys::UnregisterSnapshot(latest);
        }
        pg_sys::table_close(relation, lock);
    }
}

/// Put rows into a table, each with which of its values are null.
///
/// # Safety
/// In a transaction; the values have the types of the table's `N` columns.
pub unsafe fn insert<const N: usize>(
    table: pg_sys::Oid,
    rows: impl Iterator<Item = ([pg_sys::Datum; N], [bool; N])>,
) {
    let lock = |mode: u32| i32::try_from(mode).unwrap_or(1);
    // SAFETY: as the caller says.
    unsafe {
        let relation = pg_sys::table_open(table, lock(pg_sys::RowExclusiveLock));
        let indexes = pg_sys::CatalogOpenIndexes(relation);
        for (mut values, mut nulls) in rows {
            let tuple = pg_sys::heap_form_tuple(
                (*relation).rd_att,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            pg_sys::CatalogTupleInsertWithInfo(relation, tuple, indexes);
            pg_sys::heap_freetuple(tuple);
        }
        pg_sys::CatalogCloseIndexes(indexes);
        pg_sys::table_close(relation, lock(pg_sys::NoLock));
    }
}

/// What `read` makes of a bytea, of which nothing stays in memory: a transaction may meet rows of any number of batches.
///
/// # Safety
/// The value is a bytea that is there.
pub unsafe fn with_bytes<T>(value: pg_sys::Datum, read: impl FnOnce(&[u8]) -> T) -> T {
    // SAFETY: as the caller says; the copy, if there is one, is freed when nothing refers to it any more.
    unsafe {
        let packed = pg_sys::pg_detoast_datum_packed(value.cast_mut_ptr());
        let made = read(pgrx::varlena_to_byte_slice(packed));
        if packed.cast_const() != value.cast_mut_ptr::<pg_sys::varlena>().cast_const() {
            pg_sys::pfree(packed.cast());
        }
        made
    }
}
