//! Rows of a small table or catalog, read as they are stored: without SPI, so by anybody, also
//! while WAL is decoded or a transaction is about to end.

use std::ffi::{CStr, CString};
use std::ops::ControlFlow;

use braid_bgworker::sqlstate::SqlState;
use pgrx::{FromDatum, IntoDatum, pg_sys};

use crate::compat;
use crate::error::PgError;
use crate::lock::LockMode;
use crate::plain;
use crate::pointee;
use crate::relation::{Described, Relation, RelationRef};
use crate::scan_key;
use crate::snapshot;
use crate::tuple_desc::TupleDesc;
use crate::value::{self, Value};

// src/include/utils/fmgroids.h, 15 to 18.
const INT8_EQUAL: u32 = 467;
const INT4_EQUAL: u32 = 65;
const OID_EQUAL: u32 = 184;
/// BTEqualStrategyNumber of src/include/access/stratnum.h.
const EQUAL: u16 = 3;

/// The rows that are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sees {
    /// Rows that are committed by now, and the transaction's own.
    Committed,
    /// Also rows that running transactions wrote.
    Running,
    /// All rows that are still stored, also deleted ones.
    Any,
    /// Rows that the active snapshot shows.
    Active,
    /// Rows as the catalogs show theirs: while WAL is decoded, as of the moment in it.
    Catalog,
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
        let position = usize::try_from(column.saturating_sub(1)).unwrap_or(0);
        // As ScanKeyInit of src/backend/access/common/scankey.c, 15 to 19, makes it.
        let how = (EQUAL, equal.into(), pg_sys::C_COLLATION_OID);
        scan_key::new(position, 0, how, value)
    }

    /// Whether the table's column is stored as the value is.
    fn fits(self, shape: TupleDesc<'_>) -> bool {
        let (column, length) = match self {
            Self::Bigint(column, _) => (column, 8),
            Self::Integer(column, _) | Self::Oid(column, _) => (column, 4),
        };
        usize::try_from(column)
            .ok()
            .and_then(|number| shape.get(number.checked_sub(1)?))
            .is_some_and(|found| found.is_by_value() && found.length() == length)
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

/// A value that is to be stored.
#[derive(Debug, Clone, Copy)]
pub enum Cell<'a> {
    /// Null, of any type.
    Null,
    /// A bigint.
    Bigint(i64),
    /// An integer.
    Integer(i32),
    /// An oid.
    Oid(pg_sys::Oid),
    /// A boolean.
    Boolean(bool),
    /// A text in the server's encoding.
    Text(&'a CStr),
    /// A bytea.
    Bytes(&'a [u8]),
    /// An array of smallints.
    Smallints(&'a [i16]),
    /// An array of oids.
    Oids(&'a [pg_sys::Oid]),
    /// An array of positions in WAL.
    Lsns(&'a [u64]),
}

impl Cell<'_> {
    fn type_id(self) -> pg_sys::Oid {
        match self {
            Self::Null => pg_sys::InvalidOid,
            Self::Bigint(_) => pg_sys::INT8OID,
            Self::Integer(_) => pg_sys::INT4OID,
            Self::Oid(_) => pg_sys::OIDOID,
            Self::Boolean(_) => pg_sys::BOOLOID,
            Self::Text(_) => pg_sys::TEXTOID,
            Self::Bytes(_) => pg_sys::BYTEAOID,
            Self::Smallints(_) => pg_sys::INT2ARRAYOID,
            Self::Oids(_) => pg_sys::OIDARRAYOID,
            Self::Lsns(_) => pg_sys::PG_LSNARRAYOID,
        }
    }

    fn into_datum(self) -> Option<pg_sys::Datum> {
        match self {
            Self::Null => None,
            Self::Bigint(value) => Some(value.into()),
            Self::Integer(value) => Some(value.into()),
            Self::Oid(value) => Some(value.into()),
            Self::Boolean(value) => Some(value.into()),
            Self::Text(value) => Some(value::text(value.to_bytes()).datum()),
            Self::Bytes(value) => value.into_datum(),
            Self::Smallints(value) => value.into_datum(),
            Self::Oids(value) => value.to_vec().into_datum(),
            Self::Lsns(value) => Some(lsn_array(value)),
        }
    }
}

fn lsn_array(lsns: &[u64]) -> pg_sys::Datum {
    let each = lsns
        .iter()
        .map(|lsn| pg_sys::Datum::from(lsn.cast_signed()));
    let mut each: Vec<pg_sys::Datum> = each.collect();
    // SAFETY: pg_lsn is an 8-byte value that is passed by value and aligned as a double.
    let array = unsafe {
        pg_sys::construct_array(
            each.as_mut_ptr(),
            i32::try_from(each.len()).unwrap_or(0),
            pg_sys::PG_LSNOID,
            8,
            true,
            b'd'.cast_signed(),
        )
    };
    pg_sys::Datum::from(array)
}

/// A stored row of `N` columns. By-reference values are valid while it is looked at.
#[derive(Debug)]
pub struct Row<'a, const N: usize> {
    /// The columns' values; undefined for a null.
    pub values: [pg_sys::Datum; N],
    /// The columns that are null.
    pub nulls: [bool; N],
    stored: Stored<'a>,
}

impl<const N: usize> Row<'_, N> {
    /// The transaction that wrote it, as it is stored.
    #[must_use]
    pub fn writer(&self) -> pg_sys::TransactionId {
        let header = pointee::header(self.stored.tuple);
        header.map_or(pg_sys::InvalidTransactionId, pointee::writer)
    }

    /// Where it is: block, and number in it.
    #[must_use]
    pub fn place(&self) -> (u32, u16) {
        crate::heap_page::place_of(self.stored.tuple.t_self)
    }

    /// Nobody has deleted it.
    #[must_use]
    pub fn is_live(&self) -> bool {
        let header = pointee::header(self.stored.tuple);
        header.is_some_and(|header| u32::from(header.t_infomask) & pg_sys::HEAP_XMAX_INVALID != 0)
    }

    fn of_type(&self, column: usize, wanted: pg_sys::Oid) -> Option<pg_sys::Datum> {
        let value = *self.values.get(column)?;
        let is_null = *self.nulls.get(column)?;
        let is_of_type = self.stored.shape.get(column)?.type_id() == wanted;
        (!is_null && is_of_type).then_some(value)
    }

    /// Returns `read` of the bytea in a column, from 0; `None` for null, and for another type.
    pub fn with_bytes<T>(&self, column: usize, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let value = self.of_type(column, pg_sys::BYTEAOID)?;
        // SAFETY: the value is a bytea of a row that exists. Its copy, if there is one, is freed
        // when nothing refers to it any more: a transaction may read rows of any number of batches.
        unsafe {
            let packed = pg_sys::pg_detoast_datum_packed(value.cast_mut_ptr());
            let made = read(pgrx::varlena_to_byte_slice(packed));
            if packed.cast_const() != value.cast_mut_ptr::<pg_sys::varlena>().cast_const() {
                pg_sys::pfree(packed.cast());
            }
            Some(made)
        }
    }

    /// The array of smallints in a column, from 0; `None` for null, and for another type.
    #[must_use]
    pub fn smallints(&self, column: usize) -> Option<Vec<i16>> {
        let value = self.of_type(column, pg_sys::INT2ARRAYOID)?;
        // SAFETY: the value is such an array, of a row that exists.
        unsafe { Vec::<i16>::from_datum(value, false) }
    }

    /// The value in a column, from 0; `None` for null. Its type is the column's.
    #[must_use]
    pub fn value(&self, column: usize) -> Option<pg_sys::Datum> {
        let value = *self.values.get(column)?;
        (!*self.nulls.get(column)?).then_some(value)
    }

    /// As [`Row::value`], with the column.
    #[must_use]
    pub fn cell(&self, column: usize) -> Option<Value<'_>> {
        let value = self.value(column)?;
        // SAFETY: the value is one of the column, in a row that exists.
        Some(unsafe { Value::new(self.stored.shape.get(column)?, value) })
    }

    /// The name in a column, from 0, in the server's encoding; `None` for null, and for another
    /// type.
    #[must_use]
    pub fn name(&self, column: usize) -> Option<&CStr> {
        let value = self.of_type(column, pg_sys::NAMEOID)?;
        // SAFETY: a name ends with a zero byte; the row exists as long as `self`.
        Some(unsafe { CStr::from_ptr(value.cast_mut_ptr()) })
    }

    /// The value in a column, from 0, as its type writes it; `None` for null. In the server's
    /// encoding.
    #[must_use]
    pub fn output(&self, column: usize) -> Option<CString> {
        Some(self.cell(column)?.output())
    }

    /// The text in a column, from 0, in UTF-8; `None` for null, and for another type.
    #[must_use]
    pub fn text(&self, column: usize) -> Option<String> {
        self.cell(column)?.text()
    }
}

/// A tuple that a scan stands on.
#[derive(Debug, Clone, Copy)]
struct Stored<'a> {
    tuple: &'a pg_sys::HeapTupleData,
    shape: TupleDesc<'a>,
}

impl Stored<'_> {
    /// Takes it apart; both arrays have a place for each column.
    fn deform(self, values: &mut [pg_sys::Datum], nulls: &mut [bool]) {
        let width = self.shape.len();
        if values.len() < width || nulls.len() < width {
            return;
        }
        // SAFETY: the tuple is one of the shape, and there is a place for each column.
        unsafe {
            pg_sys::heap_deform_tuple(
                std::ptr::from_ref(self.tuple).cast_mut(),
                self.shape.as_ptr(),
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
        }
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

fn unsuited(problem: &str) -> PgError {
    PgError::new(SqlState::InternalError, problem)
}

/// Passes the rows of a table to `look`, or those that an index finds, until it breaks. In a
/// transaction.
///
/// Raises XX000 if the table does not have `N` columns, dropped ones included.
pub fn each<const N: usize>(
    table: pg_sys::Oid,
    by: Option<By>,
    sees: Sees,
    look: impl FnMut(&Row<'_, N>) -> ControlFlow<()>,
) {
    let index = by.map_or(pg_sys::InvalidOid, |by| by.index);
    let by = by.map(|by| Is::Bigint(1, by.value));
    find(table, index, by.as_slice(), sees, look);
}

/// As [`each`], of the rows that an index finds by several columns.
///
/// Raises XX000 if the index is not one of the table's, or a column is not of the value's type.
pub fn find<const N: usize>(
    table: pg_sys::Oid,
    index: pg_sys::Oid,
    by: &[Is],
    sees: Sees,
    mut look: impl FnMut(&Row<'_, N>) -> ControlFlow<()>,
) {
    scan(table, index, by, sees, |stored| {
        if stored.shape.len() != N {
            unsuited("table has another number of columns than this version expects").raise();
        }
        let mut row = Row {
            values: [pg_sys::Datum::null(); N],
            nulls: [true; N],
            stored,
        };
        stored.deform(&mut row.values, &mut row.nulls);
        look(&row)
    });
}

/// Whether a table has a row, or the index finds one. The index may be invalid if `by` is empty. In
/// a transaction.
///
/// Raises as [`find`].
#[must_use]
pub fn has_any(table: pg_sys::Oid, index: pg_sys::Oid, by: &[Is], sees: Sees) -> bool {
    let mut found = false;
    scan(table, index, by, sees, |_| {
        found = true;
        ControlFlow::Break(())
    });
    found
}

/// Passes the tuples of a table to `look`, or those that an index finds, until it breaks.
fn scan(
    table: pg_sys::Oid,
    index: pg_sys::Oid,
    by: &[Is],
    sees: Sees,
    mut look: impl FnMut(Stored<'_>) -> ControlFlow<()>,
) {
    let mut keys: Vec<pg_sys::ScanKeyData> = by.iter().map(|is| is.key()).collect();
    let count = i32::try_from(keys.len()).unwrap_or(0);
    let relation = open(table, LockMode::AccessShare);
    let shape = relation.view().descriptor();
    if !by.iter().all(|is| is.fits(shape)) {
        unsuited("a column of a table has another type than this version expects").raise();
    }
    // SAFETY: the scan ends before the table is closed; each tuple is read before the next one.
    // PostgreSQL copies the keys, whose values are of the columns' types.
    unsafe {
        let latest = match sees {
            Sees::Committed => pg_sys::RegisterSnapshot(snapshot::of_now()),
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
            Sees::Active if pg_sys::ActiveSnapshotSet() => pg_sys::GetActiveSnapshot(),
            Sees::Active => unsuited("rows are read without a snapshot").raise(),
            Sees::Catalog => std::ptr::null_mut(),
        };
        let scan = pg_sys::systable_beginscan(
            relation.as_ptr(),
            index,
            index != pg_sys::InvalidOid,
            snapshot,
            count,
            keys.as_mut_ptr(),
        );
        let used = (*scan).irel;
        if !used.is_null() && (*(*used).rd_index).indrelid != table {
            unsuited("an index is not one of the table that is read").raise();
        }
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            let Some(tuple) = tuple.as_ref() else { break };
            if look(Stored { tuple, shape }).is_break() {
                break;
            }
        }
        pg_sys::systable_endscan(scan);
        if !latest.is_null() {
            pg_sys::UnregisterSnapshot(latest);
        }
    }
    relation.close(LockMode::AccessShare);
}

/// An index that the statement at hand creates, which the caches do not show yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIndex {
    /// The index's table.
    pub table: pg_sys::Oid,
    /// The index is unique, or belongs to an exclusion constraint.
    pub is_unique: bool,
    /// The index belongs to an exclusion constraint, covers only some rows, or has expressions.
    pub is_special: bool,
    /// Numbers of its key columns in the table, 0 for an expression.
    pub columns: Vec<i16>,
}

/// Whether a relation that the statement at hand creates is an index. In a transaction.
#[must_use]
pub fn is_new_index(relation: pg_sys::Oid) -> bool {
    // Only this process has it in its cache of relations; the catalogs do not show it yet.
    let found = Described::find(relation);
    found.is_some_and(|found| found.view().kind() == pg_sys::RELKIND_INDEX)
}

/// The index with an OID, as it is stored; `None` if there is none. In a transaction.
#[must_use]
pub fn new_index(index: pg_sys::Oid) -> Option<NewIndex> {
    let mut found = None;
    let by = [Is::Oid(1, index)];
    let key = pg_sys::Oid::from(pg_sys::IndexRelidIndexId);
    scan(pg_sys::IndexRelationId, key, &by, Sees::Running, |stored| {
        let tuple = std::ptr::from_ref(stored.tuple).cast_mut();
        let columns = [
            pg_sys::Anum_pg_index_indexprs,
            pg_sys::Anum_pg_index_indpred,
        ];
        // SAFETY: a row of pg_index, whose columns have these numbers, and whose fixed part is
        // this.
        let (form, has_part) = unsafe {
            let is_there = |column: &u32| {
                !pg_sys::heap_attisnull(tuple, column.cast_signed(), std::ptr::null_mut())
            };
            (
                &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_index>(),
                columns.iter().any(is_there),
            )
        };
        found = Some(NewIndex {
            table: form.indrelid,
            is_unique: form.indisunique || form.indisexclusion,
            is_special: form.indisexclusion || has_part,
            columns: pointee::key_columns(form).to_vec(),
        });
        ControlFlow::Break(())
    });
    found
}

/// The table that a new foreign key refers to; `None` if the constraint is of another kind. In a
/// transaction.
#[must_use]
pub fn new_foreign_key(constraint: pg_sys::Oid) -> Option<pg_sys::Oid> {
    let mut found = None;
    let by = [Is::Oid(1, constraint)];
    let key = pg_sys::Oid::from(pg_sys::ConstraintOidIndexId);
    scan(
        pg_sys::ConstraintRelationId,
        key,
        &by,
        Sees::Running,
        |stored| {
            let tuple = std::ptr::from_ref(stored.tuple).cast_mut();
            // SAFETY: a row of pg_constraint, whose fixed part is this.
            let form =
                unsafe { &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_constraint>() };
            if form.contype.cast_unsigned() == b'f' {
                found = Some(form.confrelid);
            }
            ControlFlow::Break(())
        },
    );
    found
}

/// Opens a table of this database, in a transaction.
fn open(table: pg_sys::Oid, mode: LockMode) -> Relation {
    if !plain::IsTransactionState() {
        unsuited("a table is read outside of a transaction").raise();
    }
    let relation = Relation::open(table, mode);
    if !relation.view().has_storage() {
        unsuited("what is to be read is not a table").raise();
    }
    relation
}

/// Put rows into a table. In a transaction.
///
/// Raises XX000 if the table's columns are not `N`, or of other types than the values.
pub fn insert<'a, const N: usize>(table: pg_sys::Oid, rows: impl Iterator<Item = [Cell<'a>; N]>) {
    let relation = open(table, LockMode::RowExclusive);
    // SAFETY: the table is open, and the indexes are closed before it is.
    unsafe {
        let indexes = pg_sys::CatalogOpenIndexes(relation.as_ptr());
        for row in rows {
            let tuple = form(relation.view(), row);
            pg_sys::CatalogTupleInsertWithInfo(relation.as_ptr(), tuple, indexes);
            pg_sys::heap_freetuple(tuple);
        }
        pg_sys::CatalogCloseIndexes(indexes);
    }
}

/// Put a row into a table so that logical decoding does not see it. In a transaction.
///
/// Raises as [`insert`].
pub fn insert_undecoded<const N: usize>(table: pg_sys::Oid, row: [Cell<'_>; N]) {
    let relation = open(table, LockMode::RowExclusive);
    let raw = relation.as_ptr();
    // SAFETY: the tuple is made for the table's descriptor; indexes are open while they are written
    // to, and a slot holds the tuple meanwhile, as in CatalogTupleInsert
    // (src/backend/catalog/indexing.c, 15 to 18).
    unsafe {
        let tuple = form(relation.view(), row);
        pg_sys::heap_insert(
            raw,
            tuple,
            pg_sys::GetCurrentCommandId(true),
            compat::INSERT_NO_LOGICAL,
            std::ptr::null_mut(),
        );
        let slot =
            pg_sys::MakeSingleTupleTableSlot((*raw).rd_att, &raw const pg_sys::TTSOpsHeapTuple);
        pg_sys::ExecStoreHeapTuple(tuple, slot, false);
        let indexes = pg_sys::CatalogOpenIndexes(raw);
        for place in 0..usize::try_from((*indexes).ri_NumIndices).unwrap_or(0) {
            let index = *(*indexes).ri_IndexRelationDescs.add(place);
            let info = *(*indexes).ri_IndexRelationInfo.add(place);
            let mut keys = [pg_sys::Datum::null(); pg_sys::INDEX_MAX_KEYS as usize];
            let mut is_null = [true; pg_sys::INDEX_MAX_KEYS as usize];
            pg_sys::FormIndexDatum(
                info,
                slot,
                std::ptr::null_mut(),
                keys.as_mut_ptr(),
                is_null.as_mut_ptr(),
            );
            pg_sys::index_insert(
                index,
                keys.as_mut_ptr(),
                is_null.as_mut_ptr(),
                &raw mut (*tuple).t_self,
                raw,
                pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES,
                false,
                info,
            );
        }
        pg_sys::CatalogCloseIndexes(indexes);
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        pg_sys::heap_freetuple(tuple);
    }
}

/// Put a row into a table without indexes, and take it out again: only WAL has it then. In a
/// transaction.
///
/// Raises as [`insert`].
pub fn pass_through<const N: usize>(table: pg_sys::Oid, row: [Cell<'_>; N]) {
    let relation = open(table, LockMode::RowExclusive);
    // SAFETY: the table is open; the tuple is the one that was just inserted, so it has its place.
    unsafe {
        let tuple = form(relation.view(), row);
        pg_sys::simple_heap_insert(relation.as_ptr(), tuple);
        pg_sys::CommandCounterIncrement();
        pg_sys::simple_heap_delete(relation.as_ptr(), &raw mut (*tuple).t_self);
        pg_sys::heap_freetuple(tuple);
    }
}

/// A tuple of a relation with these values, in the current memory context.
///
/// Raises as [`insert`].
pub(crate) fn form<const N: usize>(
    relation: RelationRef<'_>,
    row: [Cell<'_>; N],
) -> pg_sys::HeapTuple {
    let shape = relation.descriptor();
    let fits = |(position, cell): (usize, &Cell<'_>)| {
        matches!(cell, Cell::Null)
            || shape
                .get(position)
                .is_some_and(|found| found.type_id() == cell.type_id())
    };
    if shape.len() != N || !row.iter().enumerate().all(fits) {
        unsuited("table has other columns than this version expects").raise();
    }
    let cells = row.map(Cell::into_datum);
    let mut values = cells.map(|cell| cell.unwrap_or_else(pg_sys::Datum::null));
    let mut nulls = cells.map(|cell| cell.is_none());
    // SAFETY: as many values as columns, of their types.
    unsafe { pg_sys::heap_form_tuple(shape.as_ptr(), values.as_mut_ptr(), nulls.as_mut_ptr()) }
}
