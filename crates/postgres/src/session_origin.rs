//! The replication origin under which this process writes and commits: variables that PostgreSQL
//! reads as it writes WAL.

use pgrx::pg_sys;

use crate::compat;
use crate::encoding::from_server;
use crate::plain;

/// Returns the origin; 0 for none.
#[must_use]
pub fn get() -> u16 {
    compat::session_origin()
}

/// Returns the name of an origin, in UTF-8; `None` if the catalog does not have it. In a
/// transaction.
#[must_use]
pub fn name_of(origin: u16) -> Option<String> {
    let mut name = std::ptr::null_mut();
    // SAFETY: a look-up in a catalog, which gives a string in the current memory context.
    unsafe {
        (pg_sys::replorigin_by_oid(origin, true, &raw mut name) && !name.is_null())
            .then(|| from_server(name))
    }
}

/// Sets the origin of this process's writes from now on. Its position moves only if the origin is
/// set up for this process.
pub fn set(origin: u16) {
    // PostgreSQL looks an origin up by this number when a commit moves it, and ignores one that is
    // not set up for the process.
    compat::set_session_origin(origin);
}

/// Sets when the provider committed the transaction for which the current one stands
/// (`TimestampTz`).
pub fn set_timestamp(timestamp: i64) {
    // Read as the transaction commits.
    compat::set_session_origin_timestamp(timestamp);
}

/// Sets up to where the next commit, or step of a prepared transaction, moves the origin.
pub fn set_position(lsn: u64) {
    // Read as the record is written.
    compat::set_session_origin_lsn(lsn);
}

/// Writes under no origin any more, and lets go of the one that is set up for this process, unless
/// it is `unowned`, which needs no set-up.
pub fn leave(unowned: u16) {
    let origin = get();
    set(0);
    if origin != 0 && origin != unowned {
        plain::replorigin_session_reset();
    }
    set_position(0);
    set_timestamp(0);
}
