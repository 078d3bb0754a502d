//! Making the manager look at the catalog when the transaction that changed it commits, and not before.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use braid_postgres::process;
use pgrx::pg_sys;

use crate::registry;

static WANTED: AtomicBool = AtomicBool::new(false);
static REGISTERED: AtomicBool = AtomicBool::new(false);

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_end_of_transaction(
    event: pg_sys::XactEvent::Type,
    _arg: *mut c_void,
) {
    match event {
        pg_sys::XactEvent::XACT_EVENT_COMMIT if WANTED.swap(false, Ordering::Relaxed) => {
            registry::poke(process::my_database());
        }
        pg_sys::XactEvent::XACT_EVENT_ABORT | pg_sys::XactEvent::XACT_EVENT_PREPARE => {
            WANTED.store(false, Ordering::Relaxed);
        }
        _ => {}
    }
}

/// When the current transaction commits, wake this database's manager; when it rolls back, do nothing.
pub fn manager_at_commit() {
    WANTED.store(true, Ordering::Relaxed);
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the callback is a function of this library, which is never unloaded.
        unsafe {
            pg_sys::RegisterXactCallback(Some(at_end_of_transaction), std::ptr::null_mut());
        }
    }
}
