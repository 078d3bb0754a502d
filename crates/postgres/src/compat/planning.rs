//! The planner's hooks, and conditions of relations that are planned.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::conflict_target;
use crate::ffi::raw;
use crate::partition_planning::on_relation;

#[cfg(not(feature = "pg19"))]
static PREVIOUS: OnceLock<pg_sys::get_relation_info_hook_type> = OnceLock::new();
#[cfg(feature = "pg19")]
static PREVIOUS: OnceLock<pg_sys::build_simple_rel_hook_type> = OnceLock::new();

/// Has the planner call `on_relation` for each relation of a query, once it knows the relation's
/// catalog entries. While the postmaster loads its libraries.
pub(crate) fn install_relation_hook() {
    // SAFETY: the variable is set in the postmaster, which has one thread and no children yet, to a
    // function of this library, which is never unloaded.
    unsafe {
        #[cfg(not(feature = "pg19"))]
        if PREVIOUS.set(pg_sys::get_relation_info_hook).is_ok() {
            pg_sys::get_relation_info_hook = Some(relation_info);
        }
        #[cfg(feature = "pg19")]
        if PREVIOUS.set(pg_sys::build_simple_rel_hook).is_ok() {
            pg_sys::build_simple_rel_hook = Some(simple_rel);
        }
    }
}

#[cfg(not(feature = "pg19"))]
unsafe extern "C-unwind" fn relation_info(
    root: *mut pg_sys::PlannerInfo,
    table: pg_sys::Oid,
    is_parent: bool,
    relation: *mut pg_sys::RelOptInfo,
) {
    // SAFETY: the previous hook gets PostgreSQL's arguments, and so does ours.
    unsafe {
        if let Some(previous) = PREVIOUS.get().copied().flatten() {
            previous(root, table, is_parent, relation);
        }
        on_relation(root, relation);
    }
}

#[cfg(feature = "pg19")]
unsafe extern "C-unwind" fn simple_rel(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    entry: *mut pg_sys::RangeTblEntry,
) {
    // SAFETY: the previous hook gets PostgreSQL's arguments, and so does ours.
    unsafe {
        if let Some(previous) = PREVIOUS.get().copied().flatten() {
            previous(root, relation, entry);
        }
        on_relation(root, relation);
    }
}

/// `make_simple_restrictinfo` (src/include/optimizer/restrictinfo.h).
///
/// # Safety
/// The planner's state, and a condition over one relation.
pub(crate) unsafe fn simple_restriction(
    root: *mut pg_sys::PlannerInfo,
    condition: *mut pg_sys::Expr,
) -> *mut pg_sys::RestrictInfo {
    let none = std::ptr::null_mut();
    // SAFETY: as the caller says.
    unsafe {
        #[cfg(feature = "pg15")]
        let info =
            pg_sys::make_restrictinfo(root, condition, true, false, false, 0, none, none, none);
        #[cfg(not(feature = "pg15"))]
        let info = pg_sys::make_restrictinfo(
            root, condition, true, false, false, false, 0, none, none, none,
        );
        info
    }
}

static PLANNER: OnceLock<pg_sys::planner_hook_type> = OnceLock::new();

/// Has the planner call [`conflict_target::before`] for each query. While the postmaster loads its
/// libraries.
pub(crate) fn install_planner_hook() {
    // SAFETY: the variable is set in the postmaster, which has one thread and no children yet, to a
    // function of this library, which is never unloaded.
    unsafe {
        if PLANNER.set(pg_sys::planner_hook).is_ok() {
            pg_sys::planner_hook = Some(plan);
        }
    }
}

#[cfg(not(feature = "pg19"))]
unsafe extern "C-unwind" fn plan(
    query: *mut pg_sys::Query,
    text: *const c_char,
    options: c_int,
    parameters: pg_sys::ParamListInfo,
) -> *mut pg_sys::PlannedStmt {
    // SAFETY: the next hook, or PostgreSQL's own function, gets PostgreSQL's arguments. There are
    // pointers and numbers only on the stack.
    unsafe {
        conflict_target::before(query);
        match PLANNER.get().copied().flatten() {
            Some(next) => next(query, text, options, parameters),
            None => raw::standard_planner(query, text, options, parameters),
        }
    }
}

#[cfg(feature = "pg19")]
unsafe extern "C-unwind" fn plan(
    query: *mut pg_sys::Query,
    text: *const c_char,
    options: c_int,
    parameters: pg_sys::ParamListInfo,
    explain: *mut pg_sys::ExplainState,
) -> *mut pg_sys::PlannedStmt {
    // SAFETY: as of the older versions.
    unsafe {
        conflict_target::before(query);
        match PLANNER.get().copied().flatten() {
            Some(next) => next(query, text, options, parameters, explain),
            None => raw::standard_planner(query, text, options, parameters, explain),
        }
    }
}

/// Makes the rights that a statement needs for a table those that it needs for another one. Up to
/// 15 they are in the entry itself.
///
/// # Safety
/// An entry of a query's range table.
pub(crate) unsafe fn change_rights(
    query: *mut pg_sys::Query,
    entry: *mut pg_sys::RangeTblEntry,
    table: pg_sys::Oid,
) {
    #[cfg(feature = "pg15")]
    let _ = (query, entry, table);
    // SAFETY: as the caller says; the number is that of an entry of the query's list, or 0.
    #[cfg(not(feature = "pg15"))]
    unsafe {
        if (*entry).perminfoindex > 0 {
            let rights = pg_sys::getRTEPermissionInfo((*query).rteperminfos, entry);
            (*rights).relid = table;
        }
    }
}
