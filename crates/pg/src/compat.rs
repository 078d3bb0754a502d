//! What differs between the major versions that are supported. The only place with `cfg(feature = "pgNN")`.

use pgrx::pg_sys;

/// Attribute `index` (from 0) of a tuple descriptor: the macro of src/include/access/tupdesc.h up to 17, the function of 18.
///
/// # Safety
/// `descriptor` is valid and has more than `index` attributes.
#[allow(non_snake_case)]
pub(crate) unsafe fn TupleDescAttr(
    descriptor: pg_sys::TupleDesc,
    index: usize,
) -> *mut pg_sys::FormData_pg_attribute {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: the attributes follow the descriptor, and there are more than `index`.
    unsafe {
        (*descriptor).attrs.as_mut_ptr().add(index)
    }
    #[cfg(feature = "pg18")]
    // SAFETY: the attributes follow the array of compact ones (src/include/access/tupdesc.h, 18), and there are more than `index`.
    unsafe {
        let natts = usize::try_from((*descriptor).natts).unwrap_or_default();
        (*descriptor)
            .compact_attrs
            .as_mut_ptr()
            .add(natts)
            .cast::<pg_sys::FormData_pg_attribute>()
            .add(index)
    }
}

/// A row of a decoded change: up to 16 it is wrapped in a `ReorderBufferTupleBuf`.
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub(crate) type ChangeTuple = *mut pg_sys::ReorderBufferTupleBuf;
/// A row of a decoded change.
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub(crate) type ChangeTuple = pg_sys::HeapTuple;

/// The tuple of a decoded change; null stays null.
///
/// # Safety
/// `tuple` is null or valid.
pub(crate) unsafe fn change_tuple(tuple: ChangeTuple) -> pg_sys::HeapTuple {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    {
        if tuple.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: not null, so valid as the caller says.
        unsafe { &raw mut (*tuple).tuple }
    }
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    tuple
}

/// Whether a publication sends stored generated columns (`publish_generated_columns = stored`, since 18).
///
/// # Safety
/// `publication` is valid.
pub(crate) unsafe fn publishes_generated(publication: *const pg_sys::Publication) -> bool {
    #[cfg(feature = "pg18")]
    // SAFETY: valid as the caller says.
    unsafe {
        (*publication).pubgencols_type == pg_sys::PublishGencolsType::PUBLISH_GENCOLS_STORED
    }
    #[cfg(not(feature = "pg18"))]
    {
        let _ = publication;
        false
    }
}

/// Replace virtual generated columns in an expression by what they are generated from (since 18).
///
/// # Safety
/// `node` is an expression over `relation`, in the current memory context.
pub(crate) unsafe fn expand_generated_columns(
    node: *mut pg_sys::Node,
    relation: pg_sys::Relation,
) -> *mut pg_sys::Node {
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::expand_generated_columns_in_expr(node, relation, 1)
    }
    #[cfg(not(feature = "pg18"))]
    {
        let _ = relation;
        node
    }
}

/// Whether the reorder buffer itself reports progress within a large transaction of which nothing is sent (since 16).
pub(crate) const REPORTS_PROGRESS: bool = cfg!(not(feature = "pg15"));
