//! Order of keys in a unique index. Keys that are looked up and inserted in this order are a walk
//! along the index. Run by the appliers.

use std::cmp::Ordering;

use pgrx::pg_sys;

use super::relation::Key;
use super::table::RowValues;

/// `integer_ops` of src/include/catalog/pg_opfamily.dat, 15 to 18.
const INTEGER_FAMILY: u32 = 1976;
// src/include/access/stratnum.h
const AT_MOST: i16 = 2;
const AT_LEAST: i16 = 4;
/// BTORDER_PROC of src/include/access/nbtree.h.
const ORDER: u16 = 1;

#[derive(Debug)]
enum Compare {
    Int2,
    Int4,
    Int8,
    /// The operator class's own function, and the collation. It belongs to the open index.
    Function(*mut pg_sys::FmgrInfo, pg_sys::Oid),
}

/// Compares keys as an open index does.
#[derive(Debug)]
pub struct KeyOrder {
    /// Position of each key column in the row, and its comparison.
    columns: Vec<(usize, Compare)>,
}

impl KeyOrder {
    /// Returns the order of the B-tree `index`, whose columns are those of `key`.
    ///
    /// # Safety
    /// `index` is open, and stays so while this is used.
    pub unsafe fn new(index: pg_sys::Relation, key: &Key) -> Self {
        let columns = key.columns.iter().enumerate().map(|(number, column)| {
            let place = usize::try_from(column.attribute - 1).unwrap_or(usize::MAX);
            // SAFETY: the index has as many key columns as the key, with an operator family and an
            // input type for each.
            let compare = unsafe {
                let family = *(*index).rd_opfamily.add(number);
                match *(*index).rd_opcintype.add(number) {
                    pg_sys::INT2OID if family.to_u32() == INTEGER_FAMILY => Compare::Int2,
                    pg_sys::INT4OID if family.to_u32() == INTEGER_FAMILY => Compare::Int4,
                    pg_sys::INT8OID if family.to_u32() == INTEGER_FAMILY => Compare::Int8,
                    _ => {
                        let attribute = i16::try_from(number + 1).unwrap_or(1);
                        let function = pg_sys::index_getprocinfo(index, attribute, ORDER);
                        Compare::Function(function, column.collation)
                    }
                }
            };
            (place, compare)
        });
        Self {
            columns: columns.collect(),
        }
    }

    /// Compares two rows' keys. Null comes first; nulls are equal.
    fn compare(&self, one: &RowValues, other: &RowValues) -> Ordering {
        for (place, compare) in &self.columns {
            let of = |row: &RowValues| row.get(*place).copied().flatten().flatten();
            let order = match (of(one), of(other)) {
                (Some(one), Some(other)) => compare.compare(one, other),
                (one, other) => one.is_some().cmp(&other.is_some()),
            };
            if order != Ordering::Equal {
                return order;
            }
        }
        Ordering::Equal
    }

    /// Sorts the numbers of rows by their keys. Returns false if two rows have the same key.
    pub fn sort<'a>(&self, numbers: &mut [u32], row: impl Fn(u32) -> &'a RowValues) -> bool {
        let ordered = |numbers: &[u32]| {
            let mut most = Ordering::Less;
            for pair in numbers.windows(2) {
                if let [one, other] = pair {
                    most = most.max(self.compare(row(*one), row(*other)));
                }
            }
            most
        };
        // Keys often come in order.
        if ordered(numbers) == Ordering::Greater {
            numbers.sort_unstable_by(|one, other| self.compare(row(*one), row(*other)));
        }
        ordered(numbers) == Ordering::Less
    }
}

impl Compare {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "a Datum holds the integer in its lower bits"
    )]
    fn compare(&self, one: pg_sys::Datum, other: pg_sys::Datum) -> Ordering {
        match self {
            Self::Int2 => (one.value() as i16).cmp(&(other.value() as i16)),
            Self::Int4 => (one.value() as i32).cmp(&(other.value() as i32)),
            Self::Int8 => (one.value() as i64).cmp(&(other.value() as i64)),
            Self::Function(function, collation) => {
                // SAFETY: the function is the index's comparison of two values of its type.
                let order = unsafe { pg_sys::FunctionCall2Coll(*function, *collation, one, other) };
                (order.value() as i32).cmp(&0)
            }
        }
    }
}

/// Whether an index has no entry, of live rows or dead ones, whose first column is from `low` to
/// `high`.
///
/// # Safety
/// `table` and its B-tree `index` are open; the values are of the index's type.
pub unsafe fn is_empty_between(
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    collation: pg_sys::Oid,
    (low, high): (pg_sys::Datum, pg_sys::Datum),
) -> bool {
    // SAFETY: as the caller says; the scan ends here.
    unsafe {
        let (family, kind) = (*(*index).rd_opfamily, *(*index).rd_opcintype);
        let mut keys = [pg_sys::ScanKeyData::default(); 2];
        for (place, (strategy, bound)) in keys.iter_mut().zip([(AT_LEAST, low), (AT_MOST, high)]) {
            let operator = pg_sys::get_opfamily_member(family, kind, kind, strategy);
            if operator == pg_sys::InvalidOid {
                return false;
            }
            pg_sys::ScanKeyEntryInitialize(
                place,
                0,
                1,
                strategy.cast_unsigned(),
                pg_sys::InvalidOid,
                collation,
                pg_sys::get_opcode(operator),
                bound,
            );
        }
        let scan = braid_postgres::compat::index_beginscan(table, index, super::any_snapshot(), 2);
        // An entry that is marked as dead counts: it tells of a deletion.
        (*scan).ignore_killed_tuples = false;
        pg_sys::index_rescan(scan, keys.as_mut_ptr(), 2, std::ptr::null_mut(), 0);
        let found = pg_sys::index_getnext_tid(scan, pg_sys::ScanDirection::ForwardScanDirection);
        let is_empty = found.is_null();
        pg_sys::index_endscan(scan);
        is_empty
    }
}
