//! A part of the current transaction that can be undone by itself, as PL/pgSQL runs a block with
//! exceptions.

use pgrx::pg_sys;

use crate::error::{self, PgError};
use crate::plain;

/// A subtransaction that has begun. It has to be ended, also after an error.
#[derive(Debug)]
pub struct Subtransaction {
    context: pg_sys::MemoryContext,
    owner: pg_sys::ResourceOwner,
}

impl Subtransaction {
    /// Begin one, in a transaction.
    #[must_use]
    pub fn begin() -> Self {
        // SAFETY: in a transaction; the caller's memory context stays the current one.
        unsafe {
            let context = pg_sys::CurrentMemoryContext;
            let owner = pg_sys::CurrentResourceOwner;
            pg_sys::CommandCounterIncrement();
            pg_sys::BeginInternalSubTransaction(std::ptr::null());
            pg_sys::MemoryContextSwitchTo(context);
            Self { context, owner }
        }
    }

    /// Whether it has written.
    #[must_use]
    pub fn has_written(&self) -> bool {
        plain::GetCurrentTransactionIdIfAny() != pg_sys::InvalidTransactionId
    }

    /// Ends it; `keep` its writes, or undo them.
    pub fn end(self, keep: bool) {
        // SAFETY: it is ended once, whatever was opened in it; the caller's memory context and
        // resource owner are put back.
        unsafe {
            pg_sys::MemoryContextSwitchTo(self.context);
            if keep {
                pg_sys::ReleaseCurrentSubTransaction();
            } else {
                pg_sys::RollbackAndReleaseCurrentSubTransaction();
            }
            pg_sys::MemoryContextSwitchTo(self.context);
            pg_sys::CurrentResourceOwner = self.owner;
        }
    }
}

/// Runs `work` in a subtransaction. Beside its value, `work` returns whether its writes stay; after
/// an error they do not.
///
/// # Errors
/// Its own.
pub fn attempt<T>(work: impl FnOnce() -> Result<(T, bool), PgError>) -> Result<T, PgError> {
    let subtransaction = Subtransaction::begin();
    match error::catch(work).flatten() {
        Ok((made, keep)) => {
            subtransaction.end(keep);
            Ok(made)
        }
        Err(error) => {
            subtransaction.end(false);
            Err(error)
        }
    }
}
