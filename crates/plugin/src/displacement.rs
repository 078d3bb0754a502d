//! Rows of `braid.displacement`: deletions that this node tells the others of (`apply/eviction.rs`), with versions of their own.

use braid_postgres::encoding;
use pgrx::pg_sys;

/// The columns of `braid.displacement`.
const COLUMNS: usize = 4;

/// A deletion that was told of.
pub(super) struct Displacement {
    /// The table.
    pub(super) relation: pg_sys::Oid,
    /// The deletion's version: microseconds since 1970-01-01 UTC, and the node.
    pub(super) timestamp: i64,
    pub(super) origin: String,
    /// The row; at least its key is there. Its header and bytes are in the memory in which it was read.
    pub(super) row: pg_sys::HeapTupleData,
}

/// Read a row of it. `None` when it is not one of ours after all. What is allocated is in the current memory context.
///
/// # Safety
/// The tuple is a row of the relation, which is valid.
pub(super) unsafe fn read(
    relation: pg_sys::Relation,
    tuple: pg_sys::HeapTuple,
) -> Option<Displacement> {
    // SAFETY: as the caller says; the arrays are as long as there are columns, of which the types are checked.
    unsafe {
        let descriptor = (*relation).rd_att;
        if usize::try_from((*descriptor).natts) != Ok(COLUMNS) {
            return None;
        }
        let mut values = [pg_sys::Datum::null(); COLUMNS];
        let mut nulls = [true; COLUMNS];
        pg_sys::heap_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
        let [relation, timestamp, origin, row] = values;
        if nulls.iter().any(|null| *null) {
            return None;
        }
        let origin = pg_sys::text_to_cstring(origin.cast_mut_ptr());
        Some(Displacement {
            relation: pg_sys::Oid::from(u32::try_from(relation.value() & 0xFFFF_FFFF).ok()?),
            timestamp: (timestamp.value() as u64).cast_signed(),
            origin: encoding::from_server(origin),
            row: tuple_of(row)?,
        })
    }
}

/// The heap tuple in a bytea; `None` if it is too short for one.
///
/// # Safety
/// The value is one of that type, and the rest of it what was written there.
pub(super) unsafe fn tuple_of(bytes: pg_sys::Datum) -> Option<pg_sys::HeapTupleData> {
    // SAFETY: as the caller says. The copy is aligned as all memory is that PostgreSQL allocates.
    unsafe {
        let bytes = pgrx::varlena_to_byte_slice(pg_sys::pg_detoast_datum(bytes.cast_mut_ptr()));
        if bytes.len() < size_of::<pg_sys::HeapTupleHeaderData>() {
            return None;
        }
        let header = pg_sys::palloc(bytes.len()).cast::<u8>();
        header.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        Some(pg_sys::HeapTupleData {
            t_len: u32::try_from(bytes.len()).ok()?,
            t_self: pg_sys::ItemPointerData::default(),
            t_tableOid: pg_sys::InvalidOid,
            t_data: header.cast(),
        })
    }
}
