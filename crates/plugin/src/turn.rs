//! Several WAL records in one turn of a walsender's loop. Run by the walsender.
//!
//! PostgreSQL's loop reads one record, then asks the socket for a word from the client, flushes,
//! and looks at its timeouts (`WalSndLoop` of src/backend/replication/walsender.c, 15 to 18). For
//! small transactions the question to the socket alone is a third to a half of all that a walsender
//! does. While there is much WAL to read, some more records are read and decoded where the loop
//! asks whether anything is still to be sent, just before it reads one by itself. So the client is
//! heard, and timeouts are looked at, [`TURN`] later at most.
//!
//! Invariants:
//! - Only the loop itself has records read in this way, never code that runs inside of reading or
//!   decoding one. All calls that can lead to it from inside (a page of WAL that is waited for, a
//!   message that is written, progress that is reported) are wrapped, and mark the process as
//!   [`BUSY`]. After an error the mark stays, until the next stream starts.
//! - Only up to the flushed position, less [`MARGIN`]: waiting for WAL, reporting that all is sent,
//!   and the end of the server are the loop's. So it always has a record to read by itself, by
//!   which it learns how far decoding is.
//! - Not while the socket takes no more, and not once the stream was ended on this side.
//!
//! The functions through which a backend talks to its client (`PqCommMethods`) are made to be
//! replaced. Ours do what PostgreSQL's do, with two exceptions: a stream whose flushes wait
//! ([`super::paced`]) leaves out some, and a large message is sent by [`super::bulk`]. They are
//! restored when the stream's state goes, also after an error.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};
use std::time::{Duration, Instant};

use braid_postgres::decoding::Context;
use braid_postgres::ffi::{self, Client};
use braid_postgres::wal;
use pgrx::pg_sys;

use super::bulk;
use super::paced::flushes_wait;
use super::page_read::{PageRead, page_reader};
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

/// The functions that a stream has replaced.
#[derive(Debug, Default)]
pub(super) struct Turn {
    pages: PageRead,
    write: pg_sys::LogicalOutputPluginWriterWrite,
    update_progress: pg_sys::LogicalOutputPluginWriterUpdateProgress,
}

impl Turn {
    /// Put our functions in place, if this is a walsender's stream. In the startup callback of
    /// `ctx`, whose own the result is.
    pub(super) fn enter(ctx: Context<'_>) -> Option<Self> {
        let mut turn = Self::default();
        if !turn.pages.install(ctx, read_page) {
            return None;
        }
        let ctx = ctx.as_ptr();
        // SAFETY: the context is valid. The process has a client, as it is a walsender; the
        // functions are of this library, which is never unloaded.
        unsafe {
            turn.write = (*ctx).write.replace(write);
            turn.update_progress = (*ctx).update_progress;
            if turn.update_progress.is_some() {
                (*ctx).update_progress = Some(update_progress);
            }
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
        Some(turn)
    }
}

impl Drop for Turn {
    /// Unlike in other guards, this also runs after an error: it only assigns variables, and a
    /// connection must not be left with our functions.
    fn drop(&mut self) {
        CONTEXT.store(std::ptr::null_mut(), Relaxed);
        ffi::restore_methods();
    }
}

/// Runs work that belongs to reading or decoding a record.
fn busy<T>(work: impl FnOnce() -> T) -> T {
    let before = BUSY.swap(true, Relaxed);
    let done = work();
    BUSY.store(before, Relaxed);
    done
}

/// Declares functions that stand in the place of PostgreSQL's own: if the body returns `None`, the
/// original function runs.
macro_rules! in_place {
    ($(
        $(#[doc = $doc:literal])*
        fn $name:ident($($argument:ident: $type:ty),*) $(-> $returned:ty)? = $original:ident,
            $work:expr;
    )*) => {$(
        $(#[doc = $doc])*
        unsafe extern "C-unwind" fn $name($($argument: $type),*) $(-> $returned)? {
            if let Some(done) = $work {
                return done;
            }
            // SAFETY: called by PostgreSQL in place of the original, which is called as it would
            // have been.
            unsafe { ffi::$original($($argument),*) }
        }
    )*};
}

in_place! {
    fn flush_if_writable() -> c_int = original_flush_if_writable, {
        if bulk::is_under_way() {
            Some(push())
        } else {
            flushes_wait().then_some(0)
        }
    };

    /// Nothing is flushed that would be taken for a part of a message.
    fn flush() -> c_int = original_flush, bulk::is_begun().then_some(0);

    /// Nothing is sent that would be taken for a part of a message. PostgreSQL's function for
    /// messages that are put without waiting calls this one too.
    fn put_message(kind: c_char, body: *const c_char, length: usize) -> c_int = original_putmessage,
        bulk::is_begun().then_some(0);

    fn put_message_noblock(kind: c_char, body: *const c_char, length: usize) =
        original_putmessage_noblock, {
        // CopyDone: nothing may follow it.
        if kind.cast_unsigned() == b'c' {
            CONTEXT.store(std::ptr::null_mut(), Relaxed);
        }
        let body = if body.is_null() {
            &[]
        } else {
            // SAFETY: PostgreSQL gives so many bytes.
            unsafe { std::slice::from_raw_parts(body.cast(), length) }
        };
        bulk::takes(kind.cast_unsigned(), body).then_some(())
    };
}

#[pgrx::pg_guard]
extern "C-unwind" fn push() -> c_int {
    bulk::push()
}

#[pgrx::pg_guard]
extern "C-unwind" fn is_send_pending() -> bool {
    if !is_pending() {
        read_on();
    }
    is_pending()
}

/// Whether the loop is to wait until the socket takes more.
fn is_pending() -> bool {
    bulk::is_under_way()
        || (!flushes_wait() && Client::of_process().is_some_and(Client::is_send_pending))
}

/// Whether another record leaves [`MARGIN`] before `end`, the end of the readable WAL. A record
/// that is larger than the margin is waited for, if its end is missing: the original page read does
/// that, and does the loop's work meanwhile.
fn leaves_enough(ctx: Context<'_>, end: pg_sys::XLogRecPtr) -> bool {
    let come = ctx.reader().map_or(0, |reader| reader.EndRecPtr);
    // 0: the reader has no start position yet.
    come != 0 && come.saturating_add(MARGIN) < end
}

/// Reads and decodes records for some time, up to near the end of the readable WAL.
fn read_on() {
    let raw = CONTEXT.load(Relaxed);
    if raw.is_null() || BUSY.load(Relaxed) {
        return;
    }
    // SAFETY: the context of a stream that has not ended. No record of it is being read or decoded,
    // and its reader has a start position, as more is left than enough. The loop does the same, at
    // a place where it does it too.
    unsafe {
        let ctx = Context::from_ptr(raw);
        let end = wal::readable_end();
        if leaves_enough(ctx, end) {
            busy(|| read_records(ctx, end));
        }
    }
}

/// Read and decode records for some time, up to near `end`.
///
/// # Safety
/// The context's reader has a start position, and no record of it is being read or decoded.
unsafe fn read_records(ctx: Context<'_>, end: pg_sys::XLogRecPtr) {
    let began = Instant::now();
    // SAFETY: the caller guarantees the reader's state. PostgreSQL's loop makes the same calls at
    // the same place.
    unsafe {
        let reader = (*ctx.as_ptr()).reader;
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
                ffi::logical_decoding_process_record(ctx.as_ptr(), reader);
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

page_reader!(read_page, |ctx, wanted| busy(|| {
    turn(ctx).map_or(-1, |turn| turn.pages.read(wanted))
}));

/// Declares functions through which the context writes. Each one stands in the place of one that
/// the stream has replaced, which is called as part of decoding a record.
macro_rules! writers {
    ($(fn $name:ident = $how:path;)*) => {$(
        #[pgrx::pg_guard]
        unsafe extern "C-unwind" fn $name(
            ctx: *mut pg_sys::LogicalDecodingContext,
            location: pg_sys::XLogRecPtr,
            xid: pg_sys::TransactionId,
            flag: bool,
        ) {
            // SAFETY: called by PostgreSQL in place of the original, which is called as it would
            // have been.
            unsafe {
                if let Some(original) = turn(Context::from_ptr(ctx)).and_then(|turn| turn.$name) {
                    let call = || {
                        pg_sys::ffi::pg_guard_ffi_boundary(|| original(ctx, location, xid, flag));
                    };
                    busy(|| $how(call));
                }
            }
        }
    )*};
}

writers! {
    fn write = bulk::or_end;
    fn update_progress = at_once;
}

fn at_once(work: impl FnOnce()) {
    work();
}
