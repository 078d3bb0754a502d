//! Catalogs under a transaction that still runs, and may be rolled back while its changes are
//! decoded.
//!
//! For each catalog row that it reads, PostgreSQL checks whether the transaction of the change
//! (`CheckXidAlive`) is still alive. If not, it ends the segment with an error (40000) that the
//! reorder buffer recognizes. But that check can't see one catalog scan inside another, as the type
//! cache makes them when it looks for an operator class: it takes the outer one for a forbidden
//! read of a table, which is an error (GetDefaultOpClass in 15). So such calls go unwatched: their
//! results about a transaction that is rolled back only affect changes that are rolled back, and
//! cached ones are invalidated with it. An error in such a call counts as a rollback too
//! ([`watch`]).

use std::panic::AssertUnwindSafe;

use braid_postgres::plain;
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};

use super::report;

/// While this lives, PostgreSQL does not watch over the transaction whose change is decoded.
pub(super) struct Unwatched {
    xid: pg_sys::TransactionId,
}

impl Unwatched {
    pub(super) fn enter() -> Self {
        Self {
            xid: watch_over(pg_sys::InvalidTransactionId),
        }
    }
}

/// Has PostgreSQL watch over another transaction, or over none. Returns the one before.
fn watch_over(xid: pg_sys::TransactionId) -> pg_sys::TransactionId {
    let before = plain::CheckXidAlive();
    plain::set_CheckXidAlive(xid);
    before
}

impl Drop for Unwatched {
    /// Unlike in other guards, this also runs after an error: it only assigns a variable.
    fn drop(&mut self) {
        watch_over(self.xid);
    }
}

/// Run `f` for a change of `xid`, which may run. Where it fails and `xid` was rolled back
/// meanwhile, the error says that instead, which the reorder buffer expects.
pub(super) fn watch<T>(xid: u32, f: impl FnOnce() -> T) -> T {
    PgTryBuilder::new(AssertUnwindSafe(f))
        .catch_others(move |cause| {
            if was_rolled_back(pg_sys::TransactionId::from(xid)) {
                report::fail(
                    PgSqlErrorCode::ERRCODE_TRANSACTION_ROLLBACK,
                    "transaction aborted while it was decoded".to_owned(),
                    None,
                );
            }
            cause.rethrow()
        })
        .execute()
}

/// As `HandleConcurrentAbort` of src/backend/access/index/genam.c, 15 to 18, finds out.
fn was_rolled_back(xid: pg_sys::TransactionId) -> bool {
    !plain::TransactionIdIsInProgress(xid) && !plain::TransactionIdDidCommit(xid)
}
