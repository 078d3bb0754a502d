//! Routed tables are known by their guard: a CHECK constraint `braid_routing` that is a call of
//! `braid.is_here` for the table itself. Run by sessions, in a transaction.
//!
//! A copy of a table, made by LIKE, has a guard that calls for the other table: it is not routed.
//!
//! Not for: what a guard decides.

use std::ffi::CStr;

use braid_postgres::check_constraint::CheckCall;
use pgrx::pg_sys;

/// The name of a guard.
pub const GUARD: &CStr = c"braid_routing";
/// The schema of the function that a guard calls.
const SCHEMA: &CStr = c"braid";
/// The function.
const FUNCTION: &CStr = c"is_here";

/// The guard of a table, if it is routed. In a transaction.
#[must_use]
pub fn guard_of(table: pg_sys::Oid) -> Option<CheckCall> {
    CheckCall::of_table(table, GUARD).filter(is_guard)
}

/// Whether a table is routed. In a transaction.
#[must_use]
pub fn is_routed(table: pg_sys::Oid) -> bool {
    guard_of(table).is_some()
}

fn is_guard(call: &CheckCall) -> bool {
    *call.schema == *SCHEMA && *call.function == *FUNCTION && call.relation == Some(call.table)
}
