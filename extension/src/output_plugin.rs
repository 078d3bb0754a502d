//! The symbol by which PostgreSQL finds the output plugin `braid`. Everything behind it is in
//! `braid_plugin`.

use std::ffi::c_void;

/// Called by PostgreSQL when a slot of this plugin is used; fills in the table of callbacks.
#[unsafe(no_mangle)]
#[expect(unsafe_code, reason = "the name by which PostgreSQL looks it up")]
#[pgrx::pg_guard]
pub unsafe extern "C-unwind" fn _PG_output_plugin_init(callbacks: *mut c_void) {
    // SAFETY: PostgreSQL passes a valid table.
    unsafe { braid_plugin::install(callbacks) };
}
