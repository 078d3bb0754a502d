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

/// `index_beginscan`: 18 added instrumentation.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn index_beginscan(
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: i32,
) -> pg_sys::IndexScanDesc {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::index_beginscan(table, index, snapshot, keys, 0)
    }
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::index_beginscan(table, index, snapshot, std::ptr::null_mut(), keys, 0)
    }
}

/// `EvalPlanQualInit`: 16 added the result relations.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn eval_plan_qual_init(
    state: *mut pg_sys::EPQState,
    estate: *mut pg_sys::EState,
) {
    #[cfg(feature = "pg15")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::EvalPlanQualInit(
            state,
            estate,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            -1,
        );
    }
    #[cfg(not(feature = "pg15"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::EvalPlanQualInit(
            state,
            estate,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            -1,
            std::ptr::null_mut(),
        );
    }
}

/// `ExecInitRangeTable` for one relation: 16 added permission infos, 18 the unpruned relations.
///
/// # Safety
/// `entry` is a range table entry in the executor state's memory context, which is the current one.
pub(crate) unsafe fn init_range_table(
    estate: *mut pg_sys::EState,
    entry: *mut pg_sys::RangeTblEntry,
) {
    // SAFETY: as the caller says; the lists are allocated in the current context.
    unsafe {
        #[cfg(feature = "pg15")]
        {
            let list = pg_sys::lappend(std::ptr::null_mut(), entry.cast());
            pg_sys::ExecInitRangeTable(estate, list);
        }
        #[cfg(not(feature = "pg15"))]
        {
            let mut permissions: *mut pg_sys::List = std::ptr::null_mut();
            pg_sys::addRTEPermissionInfo(&raw mut permissions, entry);
            let list = pg_sys::lappend(std::ptr::null_mut(), entry.cast());
            #[cfg(not(feature = "pg18"))]
            pg_sys::ExecInitRangeTable(estate, list, permissions);
            #[cfg(feature = "pg18")]
            pg_sys::ExecInitRangeTable(estate, list, permissions, pg_sys::bms_make_singleton(1));
        }
    }
}

/// `ExecuteTruncateGuts`: 16 added running as the table's owner.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn execute_truncate(
    relations: *mut pg_sys::List,
    oids: *mut pg_sys::List,
    logged: *mut pg_sys::List,
    restart_identity: bool,
) {
    let behavior = pg_sys::DropBehavior::DROP_RESTRICT;
    #[cfg(feature = "pg15")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ExecuteTruncateGuts(relations, oids, logged, behavior, restart_identity);
    }
    #[cfg(not(feature = "pg15"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ExecuteTruncateGuts(relations, oids, logged, behavior, restart_identity, true);
    }
}

/// `replorigin_session_setup`: 16 added the process that holds the origin already.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn replorigin_session_setup(origin: pg_sys::RepOriginId) {
    #[cfg(feature = "pg15")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::replorigin_session_setup(origin);
    }
    #[cfg(not(feature = "pg15"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::replorigin_session_setup(origin, 0);
    }
}

/// The number that a List of OIDs has at `position`.
///
/// # Safety
/// `list` is null or a List of OIDs with more than `position` elements.
pub(crate) unsafe fn list_oid(list: *const pg_sys::List, position: usize) -> pg_sys::Oid {
    // SAFETY: as the caller says.
    unsafe { (*(*list).elements.add(position)).oid_value }
}

/// Elements of a List.
///
/// # Safety
/// `list` is null or a List.
pub(crate) unsafe fn list_length(list: *const pg_sys::List) -> usize {
    if list.is_null() {
        return 0;
    }
    // SAFETY: as the caller says.
    usize::try_from(unsafe { (*list).length }).unwrap_or(0)
}

/// `pqsignal`: a macro for `pqsignal_be` since 18.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn pqsignal(signal: i32, handler: pg_sys::pqsigfunc) {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::pqsignal(signal, handler);
    }
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::pqsignal_be(signal, handler);
    }
}

/// Whether `ExecuteTruncateGuts` runs triggers as the calling user instead of as each table's owner.
pub(crate) const TRUNCATES_AS_CALLER: bool = cfg!(feature = "pg15");
