//! What a process holds that no transaction and no resource owner would let go of after an error:
//! lightweight locks, a wait on a condition variable, a wait for a buffer.
//!
//! PostgreSQL's own workers let go of it in their error handlers
//! (src/backend/postmaster/bgwriter.c, 15 to 18). An aborted transaction or subtransaction does as
//! well; but an error outside of one, or one that is caught without an abort, left locks that
//! nobody released, and the server stood still.

use std::ffi::c_void;

use pgrx::pg_sys;

use super::PgError;
use crate::ffi::raw;

/// What is held where a unit of work begins. Its caller keeps that, also after an error.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    locks: u32,
    interrupts: u32,
    cancels: u32,
}

/// The lightweight locks of this process, in the order in which it took them.
#[derive(Clone, Copy)]
struct Locks {
    count: u32,
    last: *mut pg_sys::LWLock,
}

unsafe extern "C-unwind" fn count(
    lock: *mut pg_sys::LWLock,
    _mode: pg_sys::LWLockMode::Type,
    locks: *mut c_void,
) {
    // SAFETY: `locks` passes its own value.
    unsafe {
        let locks = locks.cast::<Locks>();
        (*locks).count += 1;
        (*locks).last = lock;
    }
}

fn locks() -> Locks {
    let mut locks = Locks {
        count: 0,
        last: std::ptr::null_mut(),
    };
    // SAFETY: reads a list of the process; the callback raises nothing.
    unsafe { raw::ForEachLWLockHeldByMe(Some(count), (&raw mut locks).cast()) };
    locks
}

impl Held {
    pub(super) fn now() -> Self {
        // SAFETY: reads of variables of the process.
        unsafe {
            Self {
                locks: locks().count,
                interrupts: pg_sys::InterruptHoldoffCount,
                cancels: pg_sys::QueryCancelHoldoffCount,
            }
        }
    }

    /// After an error: let go of whatever was taken since.
    pub(super) fn let_go(self) {
        // SAFETY: as PostgreSQL's own error handlers do it. A lock of the list is held, and
        // released once. Interrupts are not served here: releasing a lock resumes them, so they are
        // held once more before.
        unsafe {
            pg_sys::InterruptHoldoffCount = pg_sys::InterruptHoldoffCount.max(1);
            loop {
                let locks = locks();
                if locks.count <= self.locks {
                    break;
                }
                pg_sys::InterruptHoldoffCount += 1;
                pg_sys::LWLockRelease(locks.last);
            }
            pg_sys::ConditionVariableCancelSleep();
            pg_sys::UnlockBuffers();
            if !pg_sys::my_wait_event_info.is_null() {
                pg_sys::my_wait_event_info.write_volatile(0);
            }
            // An error that PostgreSQL raised has set them to zero, one of Rust left them as they
            // were.
            pg_sys::InterruptHoldoffCount = self.interrupts;
            pg_sys::QueryCancelHoldoffCount = self.cancels;
        }
        if locks().count != self.locks {
            PgError::new("XX000", "lightweight locks differ after an error").end_process();
        }
    }
}
