//! Rows of `braid.unfound`: what found nothing at this node, and is passed on (`apply/unfound.rs`).

use pgrx::datum::FromDatum;
use pgrx::pg_sys;

use super::displacement::tuple_of;

/// The columns of `braid.unfound`.
const COLUMNS: usize = 3;

/// What is passed on.
pub(super) enum Unfound {
    /// A row of a table was deleted. At least its key is there; header and bytes are in the memory in which it was read.
    Deletion(pg_sys::Oid, pg_sys::HeapTupleData),
    /// Tables were truncated.
    Truncate {
        relations: Vec<pg_sys::Oid>,
        restart_identity: bool,
    },
}

/// Read a row of it. `None` when it is not one of ours after all. What is allocated is in the current memory context.
///
/// # Safety
/// The tuple is a row of the relation, which is valid.
pub(super) unsafe fn read(relation: pg_sys::Relation, tuple: pg_sys::HeapTuple) -> Option<Unfound> {
    // SAFETY: as the caller says; the arrays are as long as there are columns, whose types are those of the table.
    unsafe {
        let descriptor = (*relation).rd_att;
        if usize::try_from((*descriptor).natts) != Ok(COLUMNS) {
            return None;
        }
        let mut values = [pg_sys::Datum::null(); COLUMNS];
        let mut nulls = [true; COLUMNS];
        pg_sys::heap_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
        let [relations, row, restart_identity] = values;
        let relations = Vec::<pg_sys::Oid>::from_datum(relations, *nulls.first()?)?;
        if *nulls.get(1)? {
            return Some(Unfound::Truncate {
                relations,
                restart_identity: restart_identity.value() != 0,
            });
        }
        Some(Unfound::Deletion(*relations.first()?, tuple_of(row)?))
    }
}
