//! Rows of a small table or catalog, read as they are stored: without SPI, so by anybody, also while WAL is decoded or a transaction is
//! about to end.

use std::ops::ControlFlow;

use pgrx::pg_sys;

// src/include/utils/fmgroids.h, 15 to 18.
const INT8_EQUAL: u32 = 467;
const INT4_EQUAL: u32 = 65;
const OID_EQUAL: u32 = 184;
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
    /// What the active snapshot shows.
    Active,
}

/// A column of an index, by its number in the table, and the value that it is to have.
#[derive(Debug, Clone, Copy)]
pub enum Is {
    /// A bigint.
    Bigint(i16, i64),
    /// An integer.
    Integer(i16, u32),
    /// An oid, or one of the types that are stored as one.
    Oid(i16, pg_sys::Oid),
}

impl Is {
    fn key(self) -> pg_sys::ScanKeyData {
        let (column, equal, value) = match self {
            Self::Bigint(column, value) => (column, INT8_EQUAL, pg_sys::Datum::from(value)),
            Self::Integer(column, value) => {
                (column, INT4_EQUAL, pg_sys::Datum::from(value.cast_signed()))
            }
            Self::Oid(column, value) => (column, OID_EQUAL, pg_sys::Datum::from(value)),
        };
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: fills the key in; the functions are PostgreSQL's own.
        unsafe { pg_sys::ScanKeyInit(&raw mut key, column, EQUAL, equal.into(), value) };
        key
    }
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
    let index = by.map_or(pg_sys::InvalidOid, |by| by.index);
    let by = by.map(|by| Is::Bigint(1, by.value));
    // SAFETY: as the caller says.
    unsafe {
        scan(table, index, by.as_slice(), sees, |tuple, descriptor| {
            let mut row = Row {
                values: [pg_sys::Datum::null(); N],
                nulls: [true; N],
                tuple,
            };
            let (values, nulls) = (row.values.as_mut_ptr(), row.nulls.as_mut_ptr());
            pg_sys::heap_deform_tuple(tuple, descriptor, values, nulls);
            look(&row)
        });
    }
}

/// Look at the rows that an index finds, until told to stop. A row has a value for each column, dropped ones included;
/// `None` is null. By-reference values are valid while the row is looked at.
///
/// # Safety
/// In a transaction. The index is one of the table's, and begins with the columns of `by`, which have these types.
pub unsafe fn find(
    table: pg_sys::Oid,
    index: pg_sys::Oid,
    by: &[Is],
    sees: Sees,
    mut look: impl FnMut(&[Option<pg_sys::Datum>]) -> ControlFlow<()>,
) {
    // SAFETY: as the caller says; there is a place for each column.
    unsafe {
        scan(table, index, by, sees, |tuple, descriptor| {
            let width = usize::try_from((*descriptor).natts).unwrap_or(0);
            let mut values = vec![pg_sys::Datum::null(); width];
            let mut nulls = vec![true; width];
            pg_sys::heap_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
            let row: Vec<_> = values
                .into_iter()
                .zip(nulls)
                .map(|(value, null)| (!null).then_some(value))
                .collect();
            look(&row)
        });
    }
}

/// Whether a table has a row, or the index finds one.
///
/// # Safety
/// As [`find`]; the index may be invalid if `by` is empty.
pub unsafe fn has_any(table: pg_sys::Oid, index: pg_sys::Oid, by: &[Is], sees: Sees) -> bool {
    let mut found = false;
    // SAFETY: as the caller says.
    unsafe {
        scan(table, index, by, sees, |_, _| {
            found = true;
            ControlFlow::Break(())
        });
    }
    found
}

/// Look at tuples of a table, or at those that an index finds, until told to stop.
///
/// # Safety
/// As [`find`].
unsafe fn scan(
    table: pg_sys::Oid,
    index: pg_sys::Oid,
    by: &[Is],
    sees: Sees,
    mut look: impl FnMut(pg_sys::HeapTuple, pg_sys::TupleDesc) -> ControlFlow<()>,
) {
    let lock = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
    let mut keys: Vec<pg_sys::ScanKeyData> = by.iter().map(|is| is.key()).collect();
    let count = i32::try_from(keys.len()).unwrap_or(0);
    // SAFETY: the scan ends before the table is closed; each tuple is read before the next one. PostgreSQL copies the keys.
    unsafe {
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
            Sees::Active => pg_sys::GetActiveSnapshot(),
        };
        let scan = pg_sys::systable_beginscan(
            relation,
            index,
            index != pg_sys::InvalidOid,
            snapshot,
            count,
            keys.as_mut_ptr(),
        );
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() || look(tuple, (*relation).rd_att).is_break() {
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
