//! Tables of the extension whose changes tell the other nodes something.

use std::ffi::CStr;

use braid_postgres::encoding;
use pgrx::pg_sys;

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OwnTable {
    /// `braid.displacement`: deletions of its rows are those of rows of other tables.
    Displacement,
    /// `braid.rule_change`: its rows are messages to the nodes that receive from this one.
    RuleChange,
    /// `braid.unfound`: its rows are deletions of rows, and truncates, that found nothing here.
    Unfound,
}

impl OwnTable {
    /// Which of them a relation is.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot; the relation is valid.
    pub(super) unsafe fn of(relation: pg_sys::Relation) -> Option<Self> {
        // SAFETY: as the caller says.
        unsafe {
            let form = &*(*relation).rd_rel;
            let name = CStr::from_ptr(form.relname.data.as_ptr());
            let table = if name == c"displacement" {
                Self::Displacement
            } else if name == c"rule_change" {
                Self::RuleChange
            } else if name == c"unfound" {
                Self::Unfound
            } else {
                return None;
            };
            is_own(relation).then_some(table)
        }
    }
}

/// Whether a relation belongs to the extension. A user may have a schema of this name where the extension is not created.
///
/// # Safety
/// In a transaction with a historic snapshot; the relation is valid.
pub(super) unsafe fn is_own(relation: pg_sys::Relation) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        (*(*relation).rd_rel).relnamespace == pg_sys::get_namespace_oid(c"braid".as_ptr(), true)
            && pg_sys::getExtensionOfObject(pg_sys::RelationRelationId, (*relation).rd_id)
                != pg_sys::InvalidOid
    }
}

/// The text of a row of `braid.rule_change`, its only column. `None` when it is not one of ours after all. What is allocated is in the current memory
/// context.
///
/// # Safety
/// The tuple is a row of the relation, which is valid.
pub(super) unsafe fn message(
    relation: pg_sys::Relation,
    tuple: pg_sys::HeapTuple,
) -> Option<String> {
    // SAFETY: as the caller says; the arrays have room for the one column, of type text.
    unsafe {
        let descriptor = (*relation).rd_att;
        if (*descriptor).natts != 1 {
            return None;
        }
        let (mut value, mut null) = (pg_sys::Datum::null(), true);
        pg_sys::heap_deform_tuple(tuple, descriptor, &raw mut value, &raw mut null);
        if null {
            return None;
        }
        let text = pg_sys::text_to_cstring(value.cast_mut_ptr());
        Some(encoding::from_server(text))
    }
}
