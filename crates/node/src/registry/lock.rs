//! The registry's lock: a light-weight lock of PostgreSQL's, for data that is more than one word.

use pgrx::pg_sys;

/// Holds the registry's lock while `work` runs.
pub(crate) fn locked<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the tranche was requested in `request`; an error between the two calls would release
    // the lock at abort.
    unsafe {
        let lock = &raw mut (*pg_sys::GetNamedLWLockTranche(c"braid".as_ptr())).lock;
        pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let value = work();
        pg_sys::LWLockRelease(lock);
        value
    }
}
