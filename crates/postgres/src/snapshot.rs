//! Active snapshots, for a call in a transaction or for a longer time.
//!
//! If the work fails, the snapshot stays for the rollback, which removes it.

use pgrx::pg_sys;

use crate::plain;

/// Runs `work` under a snapshot of all that is committed now.
///
/// # Errors
/// Those of `work`; the caller rolls back.
pub fn latest<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    // SAFETY: in a transaction. `pop` takes this snapshot away, as `work` leaves the stack as it
    // found it.
    unsafe { pg_sys::PushActiveSnapshot(of_now()) };
    let value = work()?;
    pop();
    Ok(value)
}

/// A snapshot of all that is committed now, to be registered or pushed at once. While a query of
/// the session runs in parallel, PostgreSQL only takes a snapshot for catalogs: it is as new.
///
/// # Safety
/// In a transaction. Before anything else takes a snapshot, it is registered or pushed.
pub(crate) unsafe fn of_now() -> pg_sys::Snapshot {
    if plain::IsInParallelMode() {
        // No catalog has the OID 0, so the snapshot is taken anew.
        plain::GetCatalogSnapshot(pg_sys::InvalidOid)
    } else {
        plain::GetLatestSnapshot()
    }
}

/// Runs `work` under the transaction's snapshot, which in read committed is taken now.
///
/// # Errors
/// Those of `work`; the caller rolls back.
pub fn of_transaction<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    push();
    // `work` leaves the stack as it found it.
    let value = work()?;
    pop();
    Ok(value)
}

/// Makes the transaction's snapshot, which in read committed is taken now, the active one. In a
/// transaction.
pub fn push() {
    // SAFETY: PostgreSQL copies the snapshot, and keeps the copy until it is popped or rolled back.
    unsafe { pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot()) };
}

/// Has the snapshot before the active one be the active one again; does nothing if there is none.
pub fn pop() {
    if plain::ActiveSnapshotSet() {
        // SAFETY: there is one. Other users of it hold a reference of their own.
        unsafe { pg_sys::PopActiveSnapshot() };
    }
}

/// Makes the transaction's writes so far visible to its later statements, and to the active
/// snapshot. In a transaction that has one.
pub fn show_own() {
    // SAFETY: in a transaction with an active snapshot of its own.
    unsafe {
        pg_sys::CommandCounterIncrement();
        pg_sys::UpdateActiveSnapshotCommandId();
    }
}
