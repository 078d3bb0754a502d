//! Transactions that are held back to be sent together, and when they are let go. Run by the
//! walsender.
//!
//! A write to the socket for each small transaction is half of what a walsender does for it. So a
//! stream that asks for it (`join_transactions`) gets several in one message. When they are let go
//! is [`super::page_read`]'s.
//!
//! Keepalives name the position up to which WAL was read, not up to which it was sent. So the
//! position up to which all was sent goes into the stream itself, as a message with the prefix
//! `braid.position`. A reader of a joined stream may only take that, and a commit, for a position
//! that it has passed.

use braid_postgres::decoding::{Context, Transaction};
use braid_postgres::wal;

use super::delivery::Sink;
use super::page_read::{PageRead, before, is_long, page_reader};
use super::report::or_raise;
use super::stream::GirStream;

/// The state of a joined stream, beside its buffer.
#[derive(Debug, Default)]
pub struct Held {
    pages: PageRead,
    /// The end of WAL when it was last asked for.
    known_end: u64,
}

/// Set a stream up to join transactions, if that was asked for. Only a walsender's output can wait:
/// the SQL functions end when there is no more WAL. `stream` is that of `ctx`.
pub fn join_if_wanted(ctx: Context<'_>, stream: &mut GirStream) {
    if stream.options.join_transactions && stream.held.pages.install(ctx, read_page) {
        stream.outbox.join_transactions();
    }
}

/// Releases the held messages before a transaction that takes long to process. In a callback of
/// `ctx` that may write.
pub fn release_before(ctx: Context<'_>, stream: &mut GirStream, next: Transaction<'_>) {
    if is_long(next) && stream.outbox.holds() {
        let delivery = &mut *stream.delivery;
        or_raise(stream.outbox.release(None, &mut Sink { ctx, delivery }));
    }
}

/// Releases the held messages if the transaction whose commit record ends at `end` is the last in
/// WAL. The walsender would release them too, but only after it has cleaned up behind the
/// transaction and looked at its socket. In the commit callback of `ctx`.
#[inline]
pub fn release_at_end(ctx: Context<'_>, stream: &mut GirStream, end: u64) {
    if end < stream.held.known_end || !stream.outbox.holds() {
        return;
    }
    stream.held.known_end = wal::readable_end();
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

page_reader!(read_page, |ctx, wanted| before(
    ctx,
    wanted,
    |format, wanted| {
        let stream = format.joined()?;
        let decoded = ctx.reader().map_or(0, |reader| reader.EndRecPtr);
        if stream.outbox.would_release(decoded) {
            let waits = !wanted.is_there();
            let overdue = stream.outbox.holds() && stream.held.pages.is_overdue();
            if waits || overdue {
                stream.held.pages.let_go();
                let delivery = &mut *stream.delivery;
                let outbox = &mut stream.outbox;
                // Only callbacks may write; this stands in for one. The message will carry this
                // position.
                let sent = ctx.writing_at(decoded, || {
                    outbox.release(waits.then_some(decoded), &mut Sink { ctx, delivery })
                });
                or_raise(sent);
            }
        }
        Some(stream.held.pages)
    }
));
