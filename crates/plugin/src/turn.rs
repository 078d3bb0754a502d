//! Several WAL records in one turn of a walsender's loop. Run by the walsender.
//!
//! PostgreSQL's loop reads one record, then asks the socket for a word from the client, flushes, and looks at its timeouts
//! (`WalSndLoop` of src/backend/replication/walsender.c, 15 to 18). For small transactions the question to the socket alone is a third to a
//! half of all that a walsender does. While there is much WAL to read, some more records are read and decoded where the loop asks whether
//! anything is still to be sent, just before it reads one by itself. So the client is heard, and timeouts are looked at, [`TURN`] later at most.
//!
//! Invariants:
//! - Only the loop itself has records read in this way, never what runs inside of reading or decoding one: whatever can lead there from
//!   inside (a page of WAL that is waited for, a message that is written, progress that is reported) is wrapped, and marks the process as [`BUSY`].
//!   After an error the mark stays, until the next stream starts.
//! - Up to what is flushed, less [`MARGIN`]: what waits for WAL, what says that all is sent, and what ends with the server is the
//!   loop's. So it always has a record to read by itself, by which it learns how far it has come.
//! - Not while the socket takes no more, and not once the stream was ended on this side.
//!
//! The functions through which a backend talks to its client (`PqCommMethods`) are there to be replaced; ours do what PostgreSQL's do, and
//! those of a stream whose flushes wait ([`super::paced`]) leave out some, and while a large message is sent ([`super::bulk`]) they see to that. They are put back when the stream's state goes, also after an error.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};
use std::time::{Duration, Instant};

use braid_postgres::ffi;
use pgrx::pg_sys;

use super::bulk;
use super::format::Context;
use super::paced::flushes_wait;
use super::page_read::readable_end;
use crate::callbacks::turn;

/// How long records are read without a look at the socket.
const TURN: Duration = Duration::from_millis(1);
/// After how many records the clock is read.
const RECORDS: usize = 16;
/// How much WAL is left to the loop.
const MARGIN: u64 = 64 << 10;

/// The context of the stream whose records are read; null where that is left to the loop.
static CONTEXT: AtomicPtr<pg_sys::LogicalDecodingContext> = AtomicPtr::new(std::ptr::null_mut());
/// A record is being read or decoded.
static BUSY: AtomicBool = AtomicBool::new(false);

/// What a stream has replaced.
#[derive(Debug, Default)]
pub(super) struct Turn {
    page_read: pg_sys::XLogPageReadCB,
    write: pg_sys::LogicalOutputPluginWriterWrite,
    update_progress: pg_sys::LogicalOutputPluginWriterUpdateProgress,
    on: bool,
}

impl Turn {
    /// Put our functions in place, if this is a walsender's stream.
    ///
    /// # Safety
    /// `ctx` is valid, and this is its own; in the startup callback.
    pub(super) unsafe fn enter(&mut self, ctx: Context) {
        // SAFETY: as the caller says; the reader was made before the plugin was started, and is the context's own.
        unsafe {
            if self.on || !pg_sys::am_walsender || (*ctx).reader.is_null() {
                return;
            }
            self.write = (*ctx).write.replace(write);
            self.update_progress = (*ctx).update_progress;
            if self.update_progress.is_some() {
                (*ctx).update_progress = Some(update_progress);
            }
            self.page_read = (*(*ctx).reader).routine.page_read.replace(read_page);
            // The process has a client, as it is a walsender; the functions are of this library, which is never unloaded.
            ffi::replace_methods(ffi::Methods {
                flush,
                flush_if_writable,
                is_send_pending,
                put_message,
                put_message_noblock,
            });
        }
        BUSY.store(false, Relaxed);
        CONTEXT.store(ctx, Relaxed);
        self.on = true;
    }
}

impl Drop for Turn {
    /// Unlike what other guards do, also after an error: this only assigns variables, and a connection must not be left with our
    /// functions.
    fn drop(&mut self) {
        if self.on {
            CONTEXT.store(std::ptr::null_mut(), Relaxed);
            ffi::restore_methods();
        }
    }
}

/// Do what belongs to reading or decoding a record.
fn busy<T>(work: impl FnOnce() -> T) -> T {
    let before = BUSY.swap(true, Relaxed);
    let done = work();
    BUSY.store(before, Relaxed);
    done
}

unsafe extern "C-unwind" fn flush_if_writable() -> c_int {
    if bulk::is_under_way() {
        // SAFETY: as just asked.
        return unsafe { push() };
    }
    if flushes_wait() {
        return 0;
    }
    // SAFETY: called by PostgreSQL in place of the original, which is called as it would have been.
    unsafe { ffi::original_flush_if_writable() }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn push() -> c_int {
    // SAFETY: as the caller says.
    unsafe { bulk::push() }
}

/// Nothing is flushed that would be taken for a part of a message.
unsafe extern "C-unwind" fn flush() -> c_int {
    if bulk::is_begun() {
        return 0;
    }
    // SAFETY: called by PostgreSQL in place of the original, which is called as it would have been.
    unsafe { ffi::original_flush() }
}

/// As above. The original one for what is put without waiting comes here too.
unsafe extern "C-unwind" fn put_message(kind: c_char, body: *const c_char, length: usize) -> c_int {
    if bulk::is_begun() {
        return 0;
    }
    // SAFETY: called by PostgreSQL in place of the original, which is called as it would have been.
    unsafe { ffi::original_putmessage(kind, body, length) }
}

unsafe extern "C-unwind" fn put_message_noblock(kind: c_char, body: *const c_char, length: usize) {
    // CopyDone: nothing may follow it.
    if kind.cast_unsigned() == b'c' {
        CONTEXT.store(std::ptr::null_mut(), Relaxed);
    }
    // SAFETY: called by PostgreSQL in place of the original, which is called as it would have been.
    unsafe {
        if !bulk::takes(kind, body, length) {
            ffi::original_putmessage_noblock(kind, body, length);
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn is_send_pending() -> bool {
    // SAFETY: called by PostgreSQL in place of the original, which is called as it would have been.
    unsafe {
        if is_pending() {
            return true;
        }
        let ctx = CONTEXT.load(Relaxed);
        if ctx.is_null() || BUSY.load(Relaxed) {
            return false;
        }
        let end = readable_end();
        if leaves_enough(ctx, end) {
            busy(|| read_on(ctx, end));
        }
        is_pending()
    }
}

/// Whether the loop is to wait until the socket takes more.
unsafe fn is_pending() -> bool {
    // SAFETY: as the caller of PostgreSQL's function says.
    bulk::is_under_way() || (!flushes_wait() && unsafe { ffi::original_is_send_pending() })
}

/// Whether another record leaves [`MARGIN`] before `end`, the end of what there is to read. (One that is larger than that is waited for
/// here, if its end is not there: that is the original page read's, which does what the loop does meanwhile.)
///
/// # Safety
/// `ctx` is valid.
unsafe fn leaves_enough(ctx: Context, end: pg_sys::XLogRecPtr) -> bool {
    // SAFETY: as the caller says.
    let come = unsafe { (*(*ctx).reader).EndRecPtr };
    // 0: the reader was not told yet where to begin.
    come != 0 && come.saturating_add(MARGIN) < end
}

/// Read and decode records for some time, up to near `end`.
///
/// # Safety
/// `ctx` is valid, of a stream whose reader was told where to begin, and no record of it is being read or decoded.
unsafe fn read_on(ctx: Context, end: pg_sys::XLogRecPtr) {
    let began = Instant::now();
    // SAFETY: as the caller says: this is what the loop does, at a place where it does it too.
    unsafe {
        let reader = (*ctx).reader;
        loop {
            for _ in 0..RECORDS {
                let mut message = std::ptr::null_mut();
                let record = pg_sys::XLogReadRecord(reader, &raw mut message);
                if !message.is_null() {
                    let message = CStr::from_ptr(message).to_string_lossy().into_owned();
                    pgrx::error!("could not read WAL to be sent: {message}");
                }
                if record.is_null() {
                    return;
                }
                ffi::logical_decoding_process_record(ctx, reader);
                if pg_sys::InterruptPending != 0
                    || is_pending()
                    || CONTEXT.load(Relaxed).is_null()
                    || !leaves_enough(ctx, end)
                {
                    return;
                }
            }
            if began.elapsed() >= TURN {
                return;
            }
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
    // SAFETY: called by the WAL reader of a decoding context, whose private data is that context; the original function is called as it
    // would have been.
    unsafe {
        let ctx = (*reader).private_data.cast();
        let Some(original) = turn(ctx).and_then(|turn| turn.page_read) else {
            return -1;
        };
        busy(|| {
            pg_sys::ffi::pg_guard_ffi_boundary(|| original(reader, page, length, record, buffer))
        })
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn write(
    ctx: Context,
    location: pg_sys::XLogRecPtr,
    xid: pg_sys::TransactionId,
    last: bool,
) {
    // SAFETY: called by `OutputPluginWrite` in place of the original, which is called as it would have been.
    unsafe {
        if let Some(original) = turn(ctx).and_then(|turn| turn.write) {
            busy(|| {
                bulk::or_end(|| {
                    pg_sys::ffi::pg_guard_ffi_boundary(|| original(ctx, location, xid, last));
                });
            });
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn update_progress(
    ctx: Context,
    location: pg_sys::XLogRecPtr,
    xid: pg_sys::TransactionId,
    skipped: bool,
) {
    // SAFETY: called by PostgreSQL in place of the original, which is called as it would have been.
    unsafe {
        if let Some(original) = turn(ctx).and_then(|turn| turn.update_progress) {
            busy(|| pg_sys::ffi::pg_guard_ffi_boundary(|| original(ctx, location, xid, skipped)));
        }
    }
}
