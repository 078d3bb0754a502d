//! Messages in the making, for formats that are text. The parts of one message are gathered, and
//! cut if they would be more than a message can hold. Many small messages are sent in few writes.
//!
//! A walsender flushes with each message that a plugin writes, which for small ones is most of the
//! work. So these are only put into the connection's send buffer ([`Outgoing::queue`]), as the same
//! protocol messages that a write makes of them. `paced` decides when they are flushed; the next
//! write of a large one flushes them too.
//!
//! A message that a walsender gathers beyond [`GATHERED_BYTES`] lies in a temporary file
//! (`message_file`) until it is complete, and is sent from the file in chunks (`bulk`): memory does
//! not grow with a message. An SQL function returns a message as one value, so for it the message
//! is gathered in the context's buffer.

use braid_postgres::decoding::Context;
use braid_postgres::ffi::Client;
use braid_postgres::plain;

use super::bulk::{self, Body};
use super::delivery::write_message;
use super::message_file::MessageFile;
use super::paced::Pacing;

/// How much is kept in the buffer before it goes to the context's own.
const MOVED_BYTES: usize = 64 << 10;
/// How much is kept in the buffer before it goes to a file.
const GATHERED_BYTES: usize = 1 << 20;
/// How much memory the context's buffer keeps after a message.
const KEPT_BYTES: i32 = 1 << 20;

/// When the send buffer has this many unsent bytes, a message is written the usual way, which keeps
/// the client's pace.
const QUEUED_BYTES: usize = 32 << 10;

/// Where a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Nothing was prepared yet.
    Unknown,
    /// An SQL function.
    Function,
    /// A walsender's client.
    Client {
        client: Client,
        /// Large messages can be sent in chunks.
        in_pieces: bool,
    },
}

/// The current message. All methods that take a context run in a callback that may write.
#[derive(Debug)]
pub(super) struct Outgoing {
    buffer: Vec<u8>,
    reader: Reader,
    /// Bytes that are in the send buffer only.
    queued: usize,
    /// A protocol message in the making.
    message: Vec<u8>,
    pub(super) pacing: Pacing,
    /// How much of `buffer` consists of whole pieces.
    whole: usize,
    /// How much `buffer` may have before it is moved.
    room: usize,
    /// Bytes of the message that are in the context's buffer already.
    moved: usize,
    /// Where the beginning of the message is instead, if it is large.
    file: Option<MessageFile>,
    /// Beyond so many bytes a message is sent and another one begun.
    limit: usize,
}

impl Outgoing {
    /// Nothing yet.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            reader: Reader::Unknown,
            queued: 0,
            message: Vec::new(),
            pacing: Pacing::default(),
            whole: 0,
            room: MOVED_BYTES,
            moved: 0,
            file: None,
            limit,
        }
    }

    /// The buffer to which pieces are appended.
    #[inline]
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Bytes of the message that are not in the buffer any more.
    #[inline]
    fn elsewhere(&self) -> usize {
        self.moved + self.file.as_ref().map_or(0, MessageFile::len)
    }

    /// Ends a piece that more will follow.
    #[inline]
    pub(super) fn keep(&mut self, ctx: Context<'_>) {
        if self.elsewhere() + self.buffer.len() > self.limit {
            self.cut(ctx);
        } else if self.buffer.len() >= self.room {
            self.make_room(ctx);
        }
        self.whole = self.buffer.len();
    }

    /// Sends the pieces before the last one; the last one starts the next message.
    #[cold]
    fn cut(&mut self, ctx: Context<'_>) {
        self.pacing.release();
        if self.elsewhere() + self.whole > 0 {
            self.write(ctx, self.whole);
        }
    }

    /// Moves the gathered bytes out of the buffer.
    #[cold]
    fn make_room(&mut self, ctx: Context<'_>) {
        self.learn(ctx);
        if self.buffer.len() >= self.room {
            self.move_out(ctx, self.buffer.len());
        }
    }

    /// Move bytes into the file or into the context's buffer.
    fn move_out(&mut self, ctx: Context<'_>, len: usize) {
        let bytes = self.buffer.get(..len).unwrap_or_default();
        if let Reader::Client {
            in_pieces: true, ..
        } = self.reader
        {
            self.file
                .get_or_insert_with(MessageFile::create)
                .append(bytes);
        } else {
            if self.moved == 0 {
                ctx.prepare_write(true);
            }
            ctx.append(bytes);
            self.moved += len;
        }
        self.take(len);
    }

    /// Forget the first bytes of the buffer, and the memory of many.
    fn take(&mut self, len: usize) {
        self.buffer.drain(..len);
        if self.buffer.capacity() > 2 * self.room {
            self.buffer.shrink_to(self.room);
        }
    }

    /// Sends the bytes that were moved out and the first ones of the buffer as one message.
    #[cold]
    fn write(&mut self, ctx: Context<'_>, len: usize) {
        self.learn(ctx);
        if self.elsewhere() == 0 {
            write_message(ctx, self.buffer.get(..len).unwrap_or_default(), true);
            self.take(len);
        } else {
            self.move_out(ctx, len);
            if let Some(file) = &self.file {
                ctx.prepare_write(true);
                bulk::write(ctx, Body::File(file), true);
                self.file = None;
            } else {
                ctx.write(true);
                self.moved = 0;
            }
        }
        // Nothing in the context's buffer is needed after it was written.
        ctx.shrink(KEPT_BYTES);
    }

    /// The message is whole, and a small one may wait for others to be sent.
    #[inline]
    pub(super) fn queue(&mut self, ctx: Context<'_>) {
        let queued = self.queued + self.buffer.len();
        let is_small = queued <= QUEUED_BYTES && self.elsewhere() == 0;
        let Reader::Client { client, .. } = self.reader else {
            return self.send(ctx);
        };
        if !is_small {
            return self.send(ctx);
        }
        let position = ctx.write_location().to_be_bytes();
        let now = plain::GetCurrentTimestamp().to_be_bytes();
        self.message.clear();
        self.message.push(b'w');
        for field in [position, position, now] {
            self.message.extend_from_slice(&field);
        }
        self.message.extend_from_slice(&self.buffer);
        client.put_message_noblock(b'd', &self.message);
        self.pacing.hold();
        self.queued += self.buffer.len();
        self.buffer.clear();
        self.whole = 0;
    }

    /// Finds out from a message that was just prepared which kind of reader there is.
    fn learn(&mut self, ctx: Context<'_>) {
        if self.reader != Reader::Unknown {
            return;
        }
        // Nothing is in the context's buffer before this is known.
        ctx.prepare_write(true);
        self.reader = match Client::of_process() {
            Some(client) if bulk::is_for_client(ctx) => {
                let in_pieces = bulk::is_possible(ctx);
                if in_pieces {
                    self.room = GATHERED_BYTES;
                }
                Reader::Client { client, in_pieces }
            }
            _ => Reader::Function,
        };
    }

    /// The message is whole: send it.
    #[inline]
    pub(super) fn send(&mut self, ctx: Context<'_>) {
        self.queued = 0;
        self.pacing.release();
        if self.elsewhere() + self.buffer.len() > self.limit {
            self.cut(ctx);
        }
        self.write(ctx, self.buffer.len());
        self.whole = 0;
    }
}
