//! Prepared transactions of this server.

use std::ffi::CStr;

use crate::error::{self, PgError};
use crate::ffi;
use crate::{memory, plain, session_origin, transaction};

/// Returns whether a transaction is prepared on this server under this name, with this end and time
/// of its PREPARE at the origin. Runs in a transaction of its own.
///
/// # Errors
/// Those of PostgreSQL.
pub fn is_prepared(gid: &CStr, end_lsn: u64, timestamp: i64) -> Result<bool, PgError> {
    // SAFETY: in a transaction; PostgreSQL reads the name, and the file of the transaction's state.
    error::transaction(|| Ok(unsafe { ffi::lookup_gxact(gid.as_ptr(), end_lsn, timestamp) }))
}

/// COMMIT PREPARED, or ROLLBACK PREPARED, which moves the origin of this process to `end_lsn`. Run
/// in a transaction that does nothing else.
pub fn finish(gid: &CStr, commit: bool, end_lsn: u64) {
    // The record that is written next has the position, ahead of the transaction's own commit.
    session_origin::set_position(end_lsn);
    end(gid, commit);
}

/// ROLLBACK PREPARED, which moves no origin. Run in a transaction that does nothing else, in a
/// process without an origin.
pub fn roll_back(gid: &CStr) {
    end(gid, false);
}

fn end(gid: &CStr, commit: bool) {
    // SAFETY: PostgreSQL raises an error for a name that does not exist, or if another session is
    // using it.
    unsafe { ffi::finish_prepared_transaction(gid.as_ptr(), commit) };
}

/// Prepares a transaction that has done nothing. `mark` runs in it, before its PREPARE.
///
/// # Errors
/// Those of PostgreSQL; everything is rolled back then.
pub fn prepare_nothing(gid: &CStr, mark: impl FnOnce()) -> Result<(), PgError> {
    error::catch(|| {
        // The calls are those of BEGIN and PREPARE TRANSACTION as a client sends them. They leave
        // no transaction, so the process's memory context is the current one.
        transaction::start();
        plain::BeginTransactionBlock();
        plain::CommitTransactionCommand();
        mark();
        plain::PrepareTransactionBlock(gid);
        plain::CommitTransactionCommand();
        memory::Context::of_process().enter();
    })
    .inspect_err(|_| error::abort())
}
