//! Flushes that wait for more to flush. Run by the walsender, for formats whose messages have to stay apart.
//!
//! A walsender tries to flush after each WAL record, so each small transaction costs a write to the socket, which is more work
//! than all else that is done for it. While there is WAL to read, what was put into the send buffer is left there: the buffer
//! stays in order, keepalives included, so that no position is named before what lies ahead of it. It is flushed
//!
//! - before the walsender waits for WAL: it then reads a page that is not there yet, and our function stands in front of the one
//!   that its WAL reader was given;
//! - when it has been held for [`HELD_FOR`], which is looked at with each page;
//! - before a long transaction, and whenever something is written in the usual way (`outgoing`), as it is from some size on.
//!
//! The walsender's flushes go through a table of functions (`PqCommMethods` of src/include/libpq/libpq.h), which is there to be replaced. Ours has two
//! functions of its own, which do nothing while flushes wait; a blocking flush (errors, the end of the stream) never does.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pgrx::pg_sys;

use super::format::Context;
use super::held::is_there;
use super::plugin::state;
use crate::ffi;

/// The longest that flushes wait while there is WAL to read.
const HELD_FOR: Duration = Duration::from_millis(5);
/// Before a transaction with more changes than this is gone through, what is held is flushed.
const LONG_TRANSACTION: u64 = 200;

/// Flushes wait.
static WAITING: AtomicBool = AtomicBool::new(false);

/// What a paced stream has to put back.
#[derive(Debug, Default)]
pub(super) struct Pacing {
    /// The function that reads a page of WAL, as the WAL reader was given it.
    page_read: pg_sys::XLogPageReadCB,
    since: Option<Instant>,
    /// Our functions are in place.
    on: bool,
}

impl Pacing {
    /// Put our functions in place. Only a walsender has flushes to wait.
    ///
    /// # Safety
    /// `ctx` is valid, and this is its format's; in the startup callback.
    pub(super) unsafe fn enter(&mut self, ctx: Context) {
        // SAFETY: as the caller says; the reader was made before the plugin was started, and is the context's own.
        unsafe {
            if self.on || !pg_sys::am_walsender || (*ctx).reader.is_null() {
                return;
            }
            let routine = &mut (*(*ctx).reader).routine;
            self.page_read = routine.page_read;
            routine.page_read = Some(read_page);
        }
        WAITING.store(false, Relaxed);
        // SAFETY: this process has a client; the functions are of this library, which is never unloaded.
        unsafe { ffi::replace_flush(flush_if_writable, is_send_pending) };
        self.on = true;
    }

    /// Something was put into the send buffer: it may stay there for now.
    #[inline]
    pub(super) fn hold(&self) {
        if self.on {
            WAITING.store(true, Relaxed);
        }
    }

    /// The next flush is one.
    #[inline]
    pub(super) fn release(&mut self) {
        WAITING.store(false, Relaxed);
        self.since = None;
    }

    /// Let go of what is held before a transaction that takes long to go through.
    pub(super) fn release_before(&mut self, next: &pg_sys::ReorderBufferTXN) {
        if next.nentries > LONG_TRANSACTION && WAITING.load(Relaxed) {
            self.release();
            // SAFETY: this process has a client.
            unsafe { ffi::pq_flush_if_writable() };
        }
    }

    fn is_overdue(&mut self) -> bool {
        WAITING.load(Relaxed) && self.since.get_or_insert_with(Instant::now).elapsed() > HELD_FOR
    }
}

impl Drop for Pacing {
    /// Unlike what other guards do, also after an error: this only assigns variables, and a connection must not be left with our
    /// functions.
    fn drop(&mut self) {
        if self.on {
            WAITING.store(false, Relaxed);
            ffi::restore_flush();
        }
    }
}

unsafe extern "C-unwind" fn flush_if_writable() -> c_int {
    if WAITING.load(Relaxed) {
        return 0;
    }
    // SAFETY: called by PostgreSQL in place of the original, which is called as it would have been.
    unsafe { ffi::original_flush_if_writable() }
}

unsafe extern "C-unwind" fn is_send_pending() -> bool {
    if WAITING.load(Relaxed) {
        return false;
    }
    // SAFETY: see above.
    unsafe { ffi::original_is_send_pending() }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn read_page(
    reader: *mut pg_sys::XLogReaderState,
    page: pg_sys::XLogRecPtr,
    wanted: c_int,
    record: pg_sys::XLogRecPtr,
    buffer: *mut c_char,
) -> c_int {
    // SAFETY: called by the WAL reader of a decoding context, whose private data is that context, outside of the plugin's
    // callbacks; the original function is called as it would have been, and flushes itself before it waits.
    unsafe {
        let ctx = (*reader).private_data.cast();
        let Some(pacing) = state(ctx).and_then(|format| format.paced()) else {
            return -1;
        };
        let end = page.saturating_add(u64::try_from(wanted).unwrap_or(0));
        if WAITING.load(Relaxed) && (!is_there(end) || pacing.is_overdue()) {
            pacing.release();
        }
        match pacing.page_read {
            Some(original) => pg_sys::ffi::pg_guard_ffi_boundary(|| {
                original(reader, page, wanted, record, buffer)
            }),
            None => -1,
        }
    }
}
