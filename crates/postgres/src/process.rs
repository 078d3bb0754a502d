//! This process, and its effects on others of this server.

use pgrx::pg_sys;

use crate::plain;

/// This process's database.
#[must_use]
pub fn my_database() -> u32 {
    plain::MyDatabaseId().to_u32()
}

/// Address of this process's latch.
#[must_use]
pub fn my_latch() -> usize {
    plain::MyLatch().addr()
}

/// This process's id.
#[must_use]
pub fn my_pid() -> i32 {
    plain::MyProcPid()
}

/// Has the current query end with an error at the next check for interrupts. May be called in a
/// signal handler.
pub fn cancel_query() {
    plain::set_QueryCancelPending(1);
    plain::set_InterruptPending(1);
}

/// Wake the process whose latch lies at `address`; 0 does nothing.
pub fn set_latch(address: usize) {
    if address != 0 {
        // SAFETY: latches lie in PGPROC, which PostgreSQL never frees or moves while the server
        // runs, at the same address in every process. If the latch belongs to another process by
        // now, that one only gets a needless wake-up.
        unsafe { pg_sys::SetLatch(std::ptr::with_exposed_provenance_mut(address)) };
    }
}

/// Whether a process of this server has this id.
#[must_use]
pub fn exists(pid: i32) -> bool {
    pid > 0 && !plain::BackendPidGetProc(pid).is_null()
}

/// Processes that hold a lock which `pid` waits for.
#[must_use]
pub fn blocking_pids(pid: i32) -> Vec<i32> {
    // SAFETY: pgrx calls the SQL function behind its guard; the argument is an int4.
    unsafe {
        pgrx::direct_function_call::<Vec<i32>>(
            pg_sys::pg_blocking_pids,
            &[Some(pg_sys::Datum::from(pid))],
        )
    }
    .unwrap_or_default()
}

/// Runs `action` as this process ends, before it lets go of shared memory. The action that was
/// given last runs first.
pub fn before_exit(action: impl Fn() + 'static) {
    let action: Box<Box<dyn Fn()>> = Box::new(Box::new(action));
    let address = std::ptr::from_ref(Box::leak(action)).expose_provenance();
    // SAFETY: the callback belongs to this library, which is never unloaded; it takes the address
    // of a closure that lives as long as the process.
    unsafe { pg_sys::before_shmem_exit(Some(at_exit), pg_sys::Datum::from(address)) };
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_exit(_code: i32, action: pg_sys::Datum) {
    // SAFETY: `before_exit` has leaked a closure at this address.
    let action = unsafe { &*std::ptr::with_exposed_provenance::<Box<dyn Fn()>>(action.value()) };
    action();
}
