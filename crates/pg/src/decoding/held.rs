//! Transactions that are held back to be sent together, and when they are let go. Run by the walsender.
//!
//! A write to the socket for each small transaction is half of what a walsender does for it. So a stream that asks for it
//! (`join_transactions`) gets several in one message. None waits longer for it than it takes to read on in WAL that is there:
//! before the walsender waits for more WAL it reads a page, through the function that its WAL reader was given. Ours stands in
//! front of that one, and lets go of what is held when the page is not there yet.
//!
//! Keepalives name the position up to which WAL was read, not up to which it was sent. So the position up to which all was
//! sent goes into the stream itself, as a message with the prefix `braid.position`; a reader of a joined stream may take
//! only that, and a commit, for a position that it has passed.

use std::ffi::{c_char, c_int};
use std::time::{Duration, Instant};

use pgrx::pg_sys;

use super::plugin::state;
use super::report::or_raise;
use super::stream::{Sink, Stream};

/// The longest that a transaction is held while there is WAL to read.
const HELD_FOR: Duration = Duration::from_millis(5);
/// Before a transaction with more changes than this is gone through, what is held is let go.
const LONG_TRANSACTION: u64 = 200;

/// What a joined stream needs beyond its buffer.
#[derive(Debug, Default)]
pub struct Held {
    /// The function that reads a page of WAL, as the WAL reader was given it.
    page_read: pg_sys::XLogPageReadCB,
    since: Option<Instant>,
}

/// Set a stream up to join transactions, if that was asked for. Only a walsender's output can wait: the SQL functions end when
/// there is no more WAL.
///
/// # Safety
/// `ctx` is the valid context of `stream`, which is its private state.
pub unsafe fn join_if_wanted(ctx: *mut pg_sys::LogicalDecodingContext, stream: &mut Stream) {
    // SAFETY: as the caller says; the reader was made before the plugin was started, and is the context's own.
    unsafe {
        if !stream.options.join_transactions || !pg_sys::am_walsender || (*ctx).reader.is_null() {
            return;
        }
        let routine = &mut (*(*ctx).reader).routine;
        stream.held.page_read = routine.page_read;
        routine.page_read = Some(read_page);
        stream.outbox.join_transactions();
    }
}

/// Let go of what is held before a transaction that takes long to go through.
///
/// # Safety
/// In a callback of `ctx` that may write.
pub unsafe fn release_before(
    ctx: *mut pg_sys::LogicalDecodingContext,
    stream: &mut Stream,
    next: &pg_sys::ReorderBufferTXN,
) {
    if next.nentries > LONG_TRANSACTION && stream.outbox.holds() {
        let delivery = &mut *stream.delivery;
        or_raise(stream.outbox.release(None, &mut Sink { ctx, delivery }));
    }
}

/// Whether the server has WAL up to `position` for a walsender to read.
pub(super) fn is_there(position: pg_sys::XLogRecPtr) -> bool {
    // SAFETY: reads of shared memory.
    let end = unsafe {
        if pg_sys::RecoveryInProgress() {
            pg_sys::GetXLogReplayRecPtr(std::ptr::null_mut())
        } else {
            pg_sys::GetFlushRecPtr(std::ptr::null_mut())
        }
    };
    position <= end
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
    // callbacks; the original function is called as it would have been.
    unsafe {
        let ctx = (*reader)
            .private_data
            .cast::<pg_sys::LogicalDecodingContext>();
        let Some(stream) = state(ctx).and_then(|format| format.joined()) else {
            return -1;
        };
        let decoded = (*reader).EndRecPtr;
        if stream.outbox.would_release(decoded) {
            let end = page.saturating_add(u64::try_from(wanted).unwrap_or(0));
            let waits = !is_there(end);
            let overdue = stream.outbox.holds() && stream.held.is_overdue();
            if waits || overdue {
                stream.held.since = None;
                // Only callbacks may write; this stands in for one. The position is what the message will carry.
                (*ctx).accept_writes = true;
                (*ctx).write_xid = pg_sys::InvalidTransactionId;
                (*ctx).write_location = decoded;
                let delivery = &mut *stream.delivery;
                let sent = stream
                    .outbox
                    .release(waits.then_some(decoded), &mut Sink { ctx, delivery });
                (*ctx).accept_writes = false;
                or_raise(sent);
            }
        }
        match stream.held.page_read {
            Some(original) => pg_sys::ffi::pg_guard_ffi_boundary(|| {
                original(reader, page, wanted, record, buffer)
            }),
            None => -1,
        }
    }
}

impl Held {
    /// Whether something is held for too long; to be asked only while something is.
    fn is_overdue(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now).elapsed() > HELD_FOR
    }
}
