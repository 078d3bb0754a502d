//! This process, and what it does to others of this server.

use pgrx::pg_sys;

/// This process's database.
#[must_use]
pub fn my_database() -> u32 {
    // SAFETY: reads a process-local variable.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// Address of this process's latch.
#[must_use]
pub fn my_latch() -> usize {
    // SAFETY: reads a process-local variable.
    unsafe { pg_sys::MyLatch }.addr()
}

/// This process's id.
#[must_use]
pub fn my_pid() -> i32 {
    // SAFETY: reads a process-local variable.
    unsafe { pg_sys::MyProcPid }
}

/// Wake the process whose latch lies at `address`; 0 does nothing.
pub fn set_latch(address: usize) {
    if address != 0 {
        // SAFETY: latches lie in PGPROC, which PostgreSQL never frees or moves while the server runs, at the same address in
        // every process. One that was handed on to another process only gets a needless wake-up.
        unsafe { pg_sys::SetLatch(std::ptr::with_exposed_provenance_mut(address)) };
    }
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
