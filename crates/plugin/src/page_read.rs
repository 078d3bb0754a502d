//! Where what is held back is let go: a function in front of the one with which the walsender's WAL reader reads a page. Run by the
//! walsender.
//!
//! Before a walsender waits for more WAL it reads a page that is not there yet. So nothing that is held waits longer than it takes to
//! read on in WAL that is there, and not longer than `HELD_FOR`, which is checked with each page.

use std::ffi::{c_char, c_int};
use std::time::{Duration, Instant};

use pgrx::pg_sys;

use super::format::Context;

/// The longest that something is held while there is WAL to read.
const HELD_FOR: Duration = Duration::from_millis(5);
/// Before a transaction with more changes than this is gone through, what is held is let go.
const LONG_TRANSACTION: u64 = 200;

/// The original function, and since when something is held.
#[derive(Debug, Default)]
pub(super) struct PageRead {
    /// As the WAL reader was given it.
    original: pg_sys::XLogPageReadCB,
    since: Option<Instant>,
}

/// What a page is read with: the arguments of `XLogPageReadCB` of src/include/access/xlogreader.h, 18.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) reader: *mut pg_sys::XLogReaderState,
    pub(super) page: pg_sys::XLogRecPtr,
    pub(super) length: c_int,
    pub(super) record: pg_sys::XLogRecPtr,
    pub(super) buffer: *mut c_char,
}

impl PageRead {
    /// Put `ours` in front. False where that is not possible: only a walsender's output can wait, the SQL functions end when there is
    /// no more WAL.
    ///
    /// # Safety
    /// `ctx` is valid, in the startup callback.
    pub(super) unsafe fn install(
        &mut self,
        ctx: Context,
        ours: unsafe extern "C-unwind" fn(
            *mut pg_sys::XLogReaderState,
            pg_sys::XLogRecPtr,
            c_int,
            pg_sys::XLogRecPtr,
            *mut c_char,
        ) -> c_int,
    ) -> bool {
        // SAFETY: as the caller says; the reader was made before the plugin was started, and is the context's own.
        unsafe {
            if !pg_sys::am_walsender || (*ctx).reader.is_null() {
                return false;
            }
            let routine = &mut (*(*ctx).reader).routine;
            self.original = routine.page_read;
            routine.page_read = Some(ours);
        }
        true
    }

    /// Read the page as the original function does.
    ///
    /// # Safety
    /// With the arguments that PostgreSQL gave.
    pub(super) unsafe fn read(&self, wanted: Wanted) -> c_int {
        match self.original {
            // SAFETY: as the caller says.
            Some(original) => unsafe {
                pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    original(
                        wanted.reader,
                        wanted.page,
                        wanted.length,
                        wanted.record,
                        wanted.buffer,
                    )
                })
            },
            None => -1,
        }
    }

    /// Whether something is held for too long; to be asked only while something is.
    pub(super) fn is_overdue(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now).elapsed() > HELD_FOR
    }

    /// Nothing is held any more.
    #[inline]
    pub(super) fn let_go(&mut self) {
        self.since = None;
    }
}

impl Wanted {
    /// Whether the server has the WAL that is wanted, for a walsender to read.
    pub(super) fn is_there(&self) -> bool {
        is_there(self.page, self.length)
    }
}

/// Whether the server has this page of WAL up to `length` bytes, for decoding to read.
pub fn is_there(page: pg_sys::XLogRecPtr, length: c_int) -> bool {
    page.saturating_add(u64::try_from(length).unwrap_or(0)) <= readable_end()
}

/// Up to where the server has WAL for decoding to read.
pub(super) fn readable_end() -> pg_sys::XLogRecPtr {
    // SAFETY: reads of shared memory.
    unsafe {
        if pg_sys::RecoveryInProgress() {
            pg_sys::GetXLogReplayRecPtr(std::ptr::null_mut())
        } else {
            pg_sys::GetFlushRecPtr(std::ptr::null_mut())
        }
    }
}

/// Whether what is held is to be let go before this transaction, which takes long to go through.
pub(super) fn is_long(next: &pg_sys::ReorderBufferTXN) -> bool {
    next.nentries > LONG_TRANSACTION
}
