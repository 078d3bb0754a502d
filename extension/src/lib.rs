//! The extension's library: what PostgreSQL loads and calls.
#![allow(unsafe_code)]

mod workers;

mod gir_functions;
mod output_plugin;

pgrx::pg_module_magic!();

/// Called by PostgreSQL once when the library is loaded.
#[allow(non_snake_case)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    braid_pg::settings::register();
    // SAFETY: reads a variable of the process.
    if unsafe { pgrx::pg_sys::process_shared_preload_libraries_in_progress } {
        braid_pg::registry::install();
        braid_pg::supervisor::register();
    }
}
