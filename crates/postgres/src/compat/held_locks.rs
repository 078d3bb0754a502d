//! The lightweight locks that a process holds. Up to 18 PostgreSQL lists them. 19 only answers
//! whether a given lock is held, and releases all.

use pgrx::pg_sys;

/// Whether locks that were taken before an error can be distinguished from those taken after. If
/// not, an error with a lock held ends the process.
pub const LISTS_LOCKS: bool = cfg!(not(feature = "pg19"));

/// The lightweight locks that are held where a unit of work begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldLocks(u32);

#[cfg(not(feature = "pg19"))]
mod listed {
    use std::ffi::c_void;

    use pgrx::pg_sys;

    /// The locks of this process, in the order in which it took them.
    #[derive(Clone, Copy)]
    pub(super) struct Locks {
        pub(super) count: u32,
        pub(super) last: *mut pg_sys::LWLock,
    }

    unsafe extern "C-unwind" {
        // src/include/storage/lwlock.h, 15 to 18.
        fn ForEachLWLockHeldByMe(
            callback: Option<
                unsafe extern "C-unwind" fn(
                    *mut pg_sys::LWLock,
                    pg_sys::LWLockMode::Type,
                    *mut c_void,
                ),
            >,
            context: *mut c_void,
        );
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

    pub(super) fn locks() -> Locks {
        let mut locks = Locks {
            count: 0,
            last: std::ptr::null_mut(),
        };
        // SAFETY: reads a list of the process; the callback raises nothing.
        unsafe { ForEachLWLockHeldByMe(Some(count), (&raw mut locks).cast()) };
        locks
    }
}

#[cfg(not(feature = "pg19"))]
impl HeldLocks {
    /// Counts the locks that this process holds.
    pub(crate) fn now() -> Self {
        Self(listed::locks().count)
    }

    /// Releases the locks that were taken since. Returns false if other locks are held than before.
    ///
    /// # Safety
    /// After an error, with interrupts held. No code relies on the data that the locks protect.
    pub(crate) unsafe fn release_later(self) -> bool {
        loop {
            let locks = listed::locks();
            if locks.count <= self.0 {
                break;
            }
            // SAFETY: a lock of the list is held, and released once. Its release resumes
            // interrupts, so they are held once more before.
            unsafe {
                pg_sys::InterruptHoldoffCount += 1;
                pg_sys::LWLockRelease(locks.last);
            }
        }
        listed::locks().count == self.0
    }
}

#[cfg(feature = "pg19")]
impl HeldLocks {
    /// Returns whether this process holds any lock, wherever it lies.
    pub(crate) fn now() -> Self {
        // LWLockAnyHeldByMe of src/backend/storage/lmgr/lwlock.c, 19, looks for locks in a range of
        // addresses. A count of -1 becomes the highest size_t, so the range is all there is.
        // SAFETY: compares addresses with a list of the process.
        let any = unsafe { pg_sys::LWLockAnyHeldByMe(std::ptr::null_mut(), -1, 1) };
        Self(u32::from(any))
    }

    /// Releases all locks if none was held before. If one was, the later ones can't be
    /// distinguished from it: then it releases none, and returns false.
    ///
    /// # Safety
    /// After an error, with interrupts held. No code relies on the data that the locks protect.
    pub(crate) unsafe fn release_later(self) -> bool {
        if self.0 == 0 {
            // SAFETY: PostgreSQL's own error handlers do the same.
            unsafe { pg_sys::LWLockReleaseAll() };
        }
        self.0 == 0
    }
}
