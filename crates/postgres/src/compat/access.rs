//! The hook after the executor's checks of rights, whose signature differs between majors; and the
//! planner's entry, which does too.

use std::ffi::CStr;
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::access_check;

static PREVIOUS: OnceLock<pg_sys::ExecutorCheckPerms_hook_type> = OnceLock::new();

fn previous() -> pg_sys::ExecutorCheckPerms_hook_type {
    PREVIOUS.get().copied().flatten()
}

/// Has the executor call [`access_check::allows`] after its own checks, and after those of the
/// previous hook. While the postmaster loads its libraries.
pub(crate) fn install_access_check() {
    // SAFETY: the variable is set in the postmaster, which has one thread and no children yet, to a
    // function of this library, which is never unloaded.
    unsafe {
        if PREVIOUS.set(pg_sys::ExecutorCheckPerms_hook).is_ok() {
            pg_sys::ExecutorCheckPerms_hook = Some(check);
        }
    }
}

#[cfg(feature = "pg15")]
unsafe extern "C-unwind" fn check(range: *mut pg_sys::List, reports: bool) -> bool {
    // SAFETY: the previous hook gets PostgreSQL's arguments, and so does ours.
    unsafe {
        let allowed = previous().is_none_or(|previous| previous(range, reports));
        allowed && access_check::allows(range, reports)
    }
}

#[cfg(not(feature = "pg15"))]
unsafe extern "C-unwind" fn check(
    range: *mut pg_sys::List,
    rights: *mut pg_sys::List,
    reports: bool,
) -> bool {
    // SAFETY: the previous hook gets PostgreSQL's arguments, and so does ours.
    unsafe {
        let allowed = previous().is_none_or(|previous| previous(range, rights, reports));
        allowed && access_check::allows(range, reports)
    }
}

/// PostgreSQL's `pg_plan_query`, without parameters.
///
/// # Safety
/// A query that was analyzed and rewritten, in a transaction with an active snapshot.
pub(crate) unsafe fn plan_query(
    query: *mut pg_sys::Query,
    text: &CStr,
) -> *mut pg_sys::PlannedStmt {
    let none = std::ptr::null_mut();
    // SAFETY: as the caller says.
    unsafe {
        #[cfg(not(feature = "pg19"))]
        let planned = pg_sys::pg_plan_query(query, text.as_ptr(), 0, none);
        #[cfg(feature = "pg19")]
        let planned = pg_sys::pg_plan_query(query, text.as_ptr(), 0, none, std::ptr::null_mut());
        planned
    }
}
