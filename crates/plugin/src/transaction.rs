//! Transactions around what a callback of logical decoding asks where there may be none.

use std::ffi::CStr;

use braid_postgres::{encoding, transaction};
use pgrx::pg_sys;

/// A name as UTF-8, where there may be no transaction: for a conversion there has to be one. In a
/// callback of the decoding context.
pub(super) fn name_outside(name: &CStr) -> String {
    if name.to_bytes().is_ascii() || encoding::is_utf8() {
        return encoding::utf8(name);
    }
    in_transaction(|| encoding::utf8(name))
}

/// Do something in a transaction: the one there is, or one that is left by aborting it as the
/// reorder buffer does, for it writes nothing. In a callback of the decoding context.
pub(super) fn in_transaction<T>(work: impl FnOnce() -> T) -> T {
    if transaction::is_open() {
        return work();
    }
    // SAFETY: outside of a transaction, in a process that has a database. Context and owner are the
    // callback's own again.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::StartTransactionCommand();
        let made = work();
        pg_sys::AbortCurrentTransaction();
        pg_sys::CurrentMemoryContext = context;
        pg_sys::CurrentResourceOwner = owner;
        made
    }
}
