//! Transactions that are held back to be sent together, and when they are let go. Run by the walsender.
//!
//! A write to the socket for each small transaction is half of what a walsender does for it. So a stream that asks for it
//! (`join_transactions`) gets several in one message. When they are let go is [`super::page_read`]'s.
//!
//! Keepalives name the position up to which WAL was read, not up to which it was sent. So the position up to which all was
//! sent goes into the stream itself, as a message with the prefix `braid.position`; a reader of a joined stream may take
//! only that, and a commit, for a position that it has passed.

use std::ffi::{c_char, c_int};

use pgrx::pg_sys;

use super::page_read::{PageRead, Wanted, is_long, readable_end};
use super::report::or_raise;
use super::stream::{Sink, Stream};
use crate::callbacks::state;

/// What a joined stream needs beyond its buffer.
#[derive(Debug, Default)]
pub struct Held {
    pages: PageRead,
    /// Up to here there was WAL when it was last asked.
    known_end: u64,
}

/// Set a stream up to join transactions, if that was asked for. Only a walsender's output can wait: the SQL functions end when
/// there is no more WAL.
///
/// # Safety
/// `ctx` is the valid context of `stream`, which is its private state.
pub unsafe fn join_if_wanted(ctx: *mut pg_sys::LogicalDecodingContext, stream: &mut Stream) {
    // SAFETY: as the caller says.
    if stream.options.join_transactions && unsafe { stream.held.pages.install(ctx, read_page) } {
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
    if is_long(next) && stream.outbox.holds() {
        let delivery = &mut *stream.delivery;
        or_raise(stream.outbox.release(None, &mut Sink { ctx, delivery }));
    }
}

/// Let go of what is held if the transaction that has just been put there, and whose commit record ends at `end`, is the last that there
/// is WAL of: the walsender would do so too, but only once it has cleaned up behind the transaction and looked at its socket.
///
/// # Safety
/// In the commit callback of `ctx`.
#[inline]
pub unsafe fn release_at_end(
    ctx: *mut pg_sys::LogicalDecodingContext,
    stream: &mut Stream,
    end: u64,
) {
    if end < stream.held.known_end || !stream.outbox.holds() {
        return;
    }
    stream.held.known_end = readable_end();
    if end >= stream.held.known_end {
        stream.held.pages.let_go();
        let delivery = &mut *stream.delivery;
        or_raise(
            stream
                .outbox
                .release(Some(end), &mut Sink { ctx, delivery }),
        );
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
            let waits = !wanted.is_there();
            let overdue = stream.outbox.holds() && stream.held.pages.is_overdue();
            if waits || overdue {
                stream.held.pages.let_go();
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
        stream.held.pages.read(wanted)
    }
}
