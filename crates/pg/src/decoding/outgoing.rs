//! Messages in the making, for formats that are text: what belongs to one message is gathered, and cut where it would be more
//! than a message can hold; what are many messages leaves in few writes.
//!
//! A walsender flushes with each message that a plugin writes, which for small ones is most of the work. So these are only put
//! into the connection's send buffer ([`Outgoing::queue`]), as the same protocol messages that a write makes of them. When they
//! are flushed is `paced`'s to say; the next write of a large one flushes them too.

use pgrx::pg_sys;

use super::format::Context;
use super::paced::Pacing;
use super::stream::write_message;
use crate::ffi;

/// How much is kept in the buffer before it goes to the context's own.
const GATHERED_BYTES: usize = 64 << 10;
/// How much memory the context's buffer keeps after a message.
const KEPT_BYTES: i32 = 1 << 20;

/// After how many bytes that are only in the send buffer a message is written the usual way, so that the client's pace is
/// kept.
const QUEUED_BYTES: usize = 32 << 10;
/// What a walsender puts before a message: 'w', two positions, a time, each of 8 bytes in network order
/// (`WalSndPrepareWrite` of src/backend/replication/walsender.c, 15 to 18).
const HEADER_BYTES: usize = 25;

/// The message in hand.
#[derive(Debug)]
pub(super) struct Outgoing {
    buffer: Vec<u8>,
    /// A walsender writes, and not an SQL function. Known once it has prepared a message.
    to_client: Option<bool>,
    /// Bytes that are in the send buffer only.
    queued: usize,
    /// A protocol message in the making.
    message: Vec<u8>,
    pub(super) pacing: Pacing,
    /// How much of `buffer` is whole pieces.
    whole: usize,
    /// Bytes of the message that are in the context's buffer already.
    moved: usize,
    /// Beyond so many bytes a message is sent and another one begun.
    limit: usize,
}

impl Outgoing {
    /// Nothing yet.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            to_client: None,
            queued: 0,
            message: Vec::new(),
            pacing: Pacing::default(),
            whole: 0,
            moved: 0,
            limit,
        }
    }

    /// Where pieces are appended.
    #[inline]
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// A piece is whole, and more will follow.
    ///
    /// # Safety
    /// `ctx` is valid, in a callback that may write.
    #[inline]
    pub(super) unsafe fn keep(&mut self, ctx: Context) {
        if self.moved + self.buffer.len() > self.limit {
            // SAFETY: as the caller says.
            unsafe { self.cut(ctx) };
        } else if self.buffer.len() >= GATHERED_BYTES {
            // SAFETY: as the caller says.
            unsafe { self.move_out(ctx, self.buffer.len()) };
        }
        self.whole = self.buffer.len();
    }

    /// Send what was whole before the last piece; that one starts the next message.
    #[cold]
    unsafe fn cut(&mut self, ctx: Context) {
        self.pacing.release();
        // SAFETY: as the caller says.
        unsafe {
            if self.moved + self.whole > 0 {
                self.move_out(ctx, self.whole);
                self.write(ctx);
            }
        }
    }

    /// Move bytes into the context's buffer.
    #[cold]
    unsafe fn move_out(&mut self, ctx: Context, len: usize) {
        // SAFETY: as the caller says; the output buffer is the context's.
        unsafe {
            if self.moved == 0 {
                pg_sys::OutputPluginPrepareWrite(ctx, true);
                self.learn(ctx);
            }
            let bytes = self.buffer.get(..len).unwrap_or_default();
            let count = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
            pg_sys::appendBinaryStringInfo((*ctx).out, bytes.as_ptr().cast(), count);
        }
        self.moved += len;
        self.buffer.drain(..len);
    }

    #[cold]
    unsafe fn write(&mut self, ctx: Context) {
        // SAFETY: as the caller says. The context's buffer is its own, and nothing in it is needed after it was written.
        unsafe {
            pg_sys::OutputPluginWrite(ctx, true);
            let out = &mut *(*ctx).out;
            if out.maxlen > KEPT_BYTES {
                pg_sys::resetStringInfo(out);
                let kept = pg_sys::Size::try_from(KEPT_BYTES).unwrap_or_default();
                out.data = pg_sys::repalloc(out.data.cast(), kept).cast();
                out.maxlen = KEPT_BYTES;
            }
        }
        self.moved = 0;
    }

    /// The message is whole, and a small one may wait for others to be sent.
    ///
    /// # Safety
    /// `ctx` is valid, in a callback that may write.
    #[inline]
    pub(super) unsafe fn queue(&mut self, ctx: Context) {
        // SAFETY: as the caller says.
        unsafe {
            let queued = self.queued + self.buffer.len();
            if self.to_client != Some(true) || self.moved > 0 || queued > QUEUED_BYTES {
                self.send(ctx);
                return;
            }
            let position = (*ctx).write_location.to_be_bytes();
            let now = pg_sys::GetCurrentTimestamp().to_be_bytes();
            self.message.clear();
            self.message.push(b'w');
            for field in [position, position, now] {
                self.message.extend_from_slice(&field);
            }
            self.message.extend_from_slice(&self.buffer);
            ffi::pq_putmessage_noblock(b'd', &self.message);
        }
        self.pacing.hold();
        self.queued += self.buffer.len();
        self.buffer.clear();
        self.whole = 0;
    }

    /// What a message that was just prepared looks like tells who writes it.
    unsafe fn learn(&mut self, ctx: Context) {
        // SAFETY: as the caller of all methods says; an SQL function's buffer is empty at this point.
        unsafe {
            let out = &*(*ctx).out;
            let header = usize::try_from(out.len) == Ok(HEADER_BYTES);
            self.to_client = Some(header && (*out.data).cast_unsigned() == b'w');
        }
    }

    /// The message is whole: send it.
    ///
    /// # Safety
    /// `ctx` is valid, in a callback that may write.
    #[inline]
    pub(super) unsafe fn send(&mut self, ctx: Context) {
        // SAFETY: as the caller says.
        unsafe {
            self.queued = 0;
            self.pacing.release();
            if self.to_client.is_none() && self.moved == 0 {
                pg_sys::OutputPluginPrepareWrite(ctx, true);
                self.learn(ctx);
            }
            if self.moved == 0 && self.buffer.len() <= self.limit {
                write_message(ctx, &self.buffer, true);
                self.buffer.clear();
                if self.buffer.capacity() > 2 * GATHERED_BYTES {
                    self.buffer.shrink_to(GATHERED_BYTES);
                }
            } else {
                if self.moved + self.buffer.len() > self.limit {
                    self.cut(ctx);
                }
                self.move_out(ctx, self.buffer.len());
                self.write(ctx);
            }
        }
        self.whole = 0;
    }
}
