//! The extension's library: what PostgreSQL loads and calls.

#[allow(unsafe_code, reason = "what pg_extern expands to")]
mod functions;

use pgrx::pg_sys;

pgrx::pg_module_magic!();

/// Called by PostgreSQL once when the library is loaded.
#[allow(non_snake_case)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    let _ = pg_sys::PG_VERSION_NUM;
    braid_pg::secrecy::hide_connection_strings();
}
