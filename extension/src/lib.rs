//! The extension's library: what PostgreSQL loads and calls.

use pgrx::pg_sys;

mod gir_functions;
mod output_plugin;

pgrx::pg_module_magic!();

/// Called by PostgreSQL once when the library is loaded.
#[allow(non_snake_case)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    let _ = pg_sys::PG_VERSION_NUM;
}
