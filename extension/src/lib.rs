//! The extension's library: the functions that PostgreSQL loads and calls.

#![allow(unsafe_code)]

mod functions;
mod gir_functions;
mod output_plugin;
mod workers;

pgrx::pg_module_magic!();

/// Called by PostgreSQL once when the library is loaded.
#[allow(non_snake_case)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    braid_node::settings::register();
    braid_node::secrecy::hide_connection_strings();
    // The servers that pg_upgrade starts are to carry the catalog over, and nothing else may run in
    // them.
    if braid_workers::upgrade::is_under_way() {
        return;
    }
    if braid_postgres::plain::process_shared_preload_libraries_in_progress() {
        braid_node::registry::install();
        braid_workers::supervisor::register();
        braid_node::watch::install(braid_apply::table_is_rewritten);
        // An error in a function of ours would include a backtrace if RUST_BACKTRACE is set for
        // another purpose. The backtrace of a panic stays.
        if std::env::var_os("RUST_LIB_BACKTRACE").is_none() {
            // SAFETY: while the postmaster loads its libraries, with one thread.
            unsafe { std::env::set_var("RUST_LIB_BACKTRACE", "0") };
        }
    }
}
