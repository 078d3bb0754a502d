//! Objects that a process holds after an error, and that no transaction and no resource owner
//! releases: lightweight locks, a wait on a condition variable, a wait for a buffer.
//!
//! PostgreSQL's own workers release them in their error handlers
//! (src/backend/postmaster/bgwriter.c, 15 to 18). So does an aborted transaction or subtransaction.
//! But after an error outside of one, or one that is caught without an abort, locks would stay that
//! nobody releases, and the server would stand still.

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use super::PgError;
use crate::compat::HeldLocks;
use crate::plain;

/// The objects held where a unit of work begins. Its caller keeps them, also after an error.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    locks: HeldLocks,
    interrupts: u32,
    cancels: u32,
}

impl Held {
    pub(super) fn now() -> Self {
        Self {
            locks: HeldLocks::now(),
            interrupts: plain::InterruptHoldoffCount(),
            cancels: plain::QueryCancelHoldoffCount(),
        }
    }

    /// After an error: let go of whatever was taken since.
    pub(super) fn let_go(self) {
        // SAFETY: PostgreSQL's own error handlers do the same. No interrupts are served in this
        // block.
        let is_as_before = unsafe {
            pg_sys::InterruptHoldoffCount = pg_sys::InterruptHoldoffCount.max(1);
            let is_as_before = self.locks.release_later();
            pg_sys::ConditionVariableCancelSleep();
            pg_sys::UnlockBuffers();
            if !pg_sys::my_wait_event_info.is_null() {
                pg_sys::my_wait_event_info.write_volatile(0);
            }
            // An error that PostgreSQL raised has set them to zero, one of Rust left them as they
            // were.
            pg_sys::InterruptHoldoffCount = self.interrupts;
            pg_sys::QueryCancelHoldoffCount = self.cancels;
            is_as_before
        };
        if !is_as_before {
            PgError::new(
                SqlState::InternalError,
                "lightweight locks differ after an error",
            )
            .end_process();
        }
    }
}
