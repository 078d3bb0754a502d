//! What a process holds that no transaction and no resource owner would let go of after an error:
//! lightweight locks, a wait on a condition variable, a wait for a buffer.
//!
//! PostgreSQL's own workers let go of it in their error handlers
//! (src/backend/postmaster/bgwriter.c, 15 to 18). An aborted transaction or subtransaction does as
//! well; but an error outside of one, or one that is caught without an abort, left locks that
//! nobody released, and the server stood still.

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use super::PgError;
use crate::compat::HeldLocks;
use crate::plain;

/// What is held where a unit of work begins. Its caller keeps that, also after an error.
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
        // SAFETY: as PostgreSQL's own error handlers do it. Interrupts are not served here.
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
