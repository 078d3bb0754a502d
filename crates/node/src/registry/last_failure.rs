//! The last failure of a subscription's workers, whole, for the views: a failure that may pass is
//! stored nowhere else.
//!
//! Written by the leader and the manager, read by any backend; both hold the registry's lock, so
//! that a failure is read as it was written. Texts are cut to 512 bytes.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::timestamp::now;
use braid_ring::with_last_line;

use super::lock::locked;
use super::text::Text;

/// Bytes of a context.
const CONTEXT: usize = 512;

/// Where it is kept.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LastFailure {
    /// TimestampTz; 0: there is none.
    at: AtomicI64,
    /// End of the transaction that failed; 0 for none.
    lsn: AtomicU64,
    sqlstate: Text,
    message: Text,
    detail: Text,
    hint: Text,
    context: Text,
}

/// A failure as it was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedFailure {
    /// The error.
    pub error: PgError,
    /// End of the transaction that failed, in the provider's WAL; 0 for none.
    pub lsn: u64,
    /// When (TimestampTz).
    pub at: i64,
}

impl LastFailure {
    pub(super) fn record(&self, error: &PgError, lsn: u64) {
        locked(|| {
            self.sqlstate.store(&error.sqlstate.to_string());
            self.message.store(&error.message);
            self.detail.store(error.detail.as_deref().unwrap_or(""));
            self.hint.store(error.hint.as_deref().unwrap_or(""));
            let context = error.context().unwrap_or("");
            self.context.store(&with_last_line(context, CONTEXT));
            self.lsn.store(lsn, Ordering::Relaxed);
            self.at.store(now(), Ordering::Relaxed);
        });
    }

    /// Forgets the failure. The owner of the whole entry may call it without the lock.
    pub(super) fn clear(&self) {
        self.at.store(0, Ordering::Relaxed);
    }

    pub(super) fn is_there(&self) -> bool {
        self.at.load(Ordering::Relaxed) != 0
    }

    pub(super) fn get(&self) -> Option<RecordedFailure> {
        locked(|| {
            let at = self.at.load(Ordering::Relaxed);
            let context = self.context.load();
            let with_context = |error: PgError| match &context {
                Some(context) => error.with_context(context),
                None => error,
            };
            (at != 0).then(|| RecordedFailure {
                error: with_context(PgError {
                    detail: self.detail.load(),
                    hint: self.hint.load(),
                    ..PgError::new(
                        SqlState::parse(&self.sqlstate.load().unwrap_or_default()),
                        self.message.load().unwrap_or_default(),
                    )
                }),
                lsn: self.lsn.load(Ordering::Relaxed),
                at,
            })
        })
    }
}
