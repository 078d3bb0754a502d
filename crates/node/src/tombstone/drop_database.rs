//! DROP DATABASE: the collector's slot would forbid it, while it is in use. So the collector ends first, as the other workers do with
//! WITH (FORCE); where the database is not dropped after all, the manager starts it again.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use braid_postgres::{error, latch, worker};
use pgrx::pg_sys;

use crate::registry;

/// How long the collector is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

static PREVIOUS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Hook = unsafe extern "C-unwind" fn(
    pg_sys::ObjectAccessType::Type,
    pg_sys::Oid,
    pg_sys::Oid,
    c_int,
    *mut c_void,
);

/// Listen. Called while the postmaster loads its libraries.
pub fn install() {
    // SAFETY: a plain function pointer that is set in the postmaster before it has children.
    unsafe {
        if let Some(previous) = pg_sys::object_access_hook {
            PREVIOUS.store(previous as *mut c_void, Ordering::Relaxed);
        }
        pg_sys::object_access_hook = Some(on_access);
    }
}

/// Something is created, altered, dropped or used. Other libraries' hook comes first and without a guard, so that its errors pass as they
/// are: they leave this function by a long jump, and it has nothing with a destructor.
unsafe extern "C-unwind" fn on_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    part: c_int,
    argument: *mut c_void,
) {
    let previous = PREVIOUS.load(Ordering::Relaxed);
    // SAFETY: the pointer was a hook that another library had installed, stored by `install`.
    unsafe {
        if !previous.is_null() {
            std::mem::transmute::<*mut c_void, Hook>(previous)(
                access, class, object, part, argument,
            );
        }
        if access == pg_sys::ObjectAccessType::OAT_DROP && class == pg_sys::DatabaseRelationId {
            before_drop(object);
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn before_drop(database: pg_sys::Oid) {
    error::pass_on(|| end_collector(database.to_u32()));
}

/// Have a database's collector end, and let go of its slot.
fn end_collector(database: u32) {
    let Some(entry) = registry::find_manager(database) else {
        return;
    };
    let pid = entry.collector_pid.load(Ordering::SeqCst);
    if pid <= 0 {
        return;
    }
    worker::terminate_pid(pid);
    let deadline = Instant::now() + PATIENCE;
    // It leaves the list of processes after it has let go of its slot.
    // SAFETY: a look-up in shared memory.
    while !unsafe { pg_sys::BackendPidGetProc(pid) }.is_null() && Instant::now() < deadline {
        latch::wait(Some(PAUSE));
    }
}
