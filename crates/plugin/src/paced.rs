//! Flushes that wait for more to flush. Run by the walsender, for formats whose messages have to stay apart.
//!
//! A walsender tries to flush after each WAL record, so each small transaction costs a write to the socket, which is more work
//! than all else that is done for it. While there is WAL to read, what was put into the send buffer is left there: the buffer
//! stays in order, keepalives included, so that no position is named before what lies ahead of it. It is flushed
//!
//! - before the walsender waits for WAL, when it has been held for too long, and before a long transaction ([`super::page_read`]);
//! - whenever something is written in the usual way (`outgoing`), as it is from some size on.
//!
//! The walsender's flushes go through functions of ours ([`super::turn`]), which do nothing while flushes wait; a blocking flush (errors, the
//! end of the stream) never does.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use braid_postgres::ffi;
use pgrx::pg_sys;

use super::format::Context;
use super::page_read::{PageRead, Wanted, is_long};
use crate::callbacks::state;

/// Flushes wait.
static WAITING: AtomicBool = AtomicBool::new(false);

/// Whether what is in the send buffer is to stay there for now.
#[inline]
pub(super) fn flushes_wait() -> bool {
    WAITING.load(Relaxed)
}

/// What a paced stream needs beyond its buffer.
#[derive(Debug, Default)]
pub struct Pacing {
    pages: PageRead,
    /// Flushes can wait.
    on: bool,
}

impl Pacing {
    /// Flushes can wait from here on. Only a walsender has any.
    ///
    /// # Safety
    /// `ctx` is valid, and this is its format's; in the startup callback.
    pub(super) unsafe fn enter(&mut self, ctx: Context) {
        // SAFETY: as the caller says.
        if self.on || !unsafe { self.pages.install(ctx, read_page) } {
            return;
        }
        WAITING.store(false, Relaxed);
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
        self.pages.let_go();
    }

    /// Let go of what is held before a transaction that takes long to go through.
    pub(super) fn release_before(&mut self, next: &pg_sys::ReorderBufferTXN) {
        if is_long(next) && WAITING.load(Relaxed) {
            self.release();
            // SAFETY: this process has a client.
            unsafe { ffi::pq_flush_if_writable() };
        }
    }
}

impl Drop for Pacing {
    /// Unlike what other guards do, also after an error: this only assigns a variable, and no connection must be left with flushes that
    /// wait.
    fn drop(&mut self) {
        if self.on {
            WAITING.store(false, Relaxed);
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn read_page(
    reader: *mut pg_sys::XLogReaderState,
    page: pg_sys::XLogRecPtr,
    length: c_int,
    record: pg_sys::XLogRecPtr,
    buffer: *mut c_char,
) -> c_int {
    let wanted = Wanted {
        reader,
        page,
        length,
        record,
        buffer,
    };
    // SAFETY: called by the WAL reader of a decoding context, whose private data is that context, outside of the plugin's
    // callbacks; the original function is called as it would have been, and flushes itself before it waits.
    unsafe {
        let ctx = (*reader).private_data.cast();
        let Some(pacing) = state(ctx).and_then(|format| format.paced()) else {
            return -1;
        };
        if WAITING.load(Relaxed) && (!wanted.is_there() || pacing.pages.is_overdue()) {
            pacing.release();
        }
        pacing.pages.read(wanted)
    }
}
