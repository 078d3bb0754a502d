//! Messages that are too large for the connection's send buffer, sent in chunks. Run by the
//! walsender.
//!
//! PostgreSQL puts a message into its send buffer as a whole; the buffer grows as needed and never
//! shrinks. Beyond [`LARGE_BYTES`] only the header that `WalSndPrepareWrite` has made takes the
//! usual path: `WalSndWriteData` passes it to the connection's functions, which are ours
//! ([`super::turn`]). They take it for the beginning of the current message. They report that
//! something is still to be sent until the socket has the last byte, and write chunk after chunk
//! when PostgreSQL flushes. So all waiting is PostgreSQL's own (`ProcessPendingWrites` of
//! src/backend/replication/walsender.c, 15 to 18): it reads from the client, checks its timeouts
//! and handles interrupts as it does while its buffer empties. A client that stops reading is ended
//! by `wal_sender_timeout`.
//!
//! Invariants:
//! - The contents of PostgreSQL's buffer are sent first; while there is a current message, nothing
//!   is added to the buffer. Messages of other code that does not wait (keepalives, the end of the
//!   stream) are sent afterwards.
//! - Once the first byte may have left, the message is completed or the connection ends: an error
//!   becomes a fatal one ([`or_end`]). No other message to the client is sent meanwhile, not even
//!   by a signal handler: the client would take it for a part of the message.
//! - A chunk stays unchanged until all of it was written: TLS and GSS must be given the bytes again
//!   that they could not take.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::decoding::Context;
use braid_postgres::error::{self, PgError};
use braid_postgres::ffi::{self, Client, Written};
use braid_postgres::plain;
use pgrx::PgSqlErrorCode;

use super::message_file::MessageFile;
use super::report;

/// A message of at least this many bytes is sent in chunks.
pub(super) const LARGE_BYTES: usize = 1 << 20;
/// Number of bytes that are written at once.
const PIECE_BYTES: usize = 128 << 10;
/// After this many bytes the walsender reads from its client, however fast the client reads.
const TURN_BYTES: usize = 1 << 20;
/// Length of the walsender's header of a message: 'w', two positions, a time, each of 8 bytes in
/// network order (`WalSndPrepareWrite` of src/backend/replication/walsender.c, 15 to 18).
const HEADER_BYTES: usize = 25;
/// The most that a message can have: as much as PostgreSQL's own buffers (`MaxAllocSize` of
/// src/include/utils/memutils.h).
const MOST_BYTES: usize = 0x3fff_ffff - HEADER_BYTES - 1;

thread_local! {
    /// The current message; `None` if there is none.
    static IN_HAND: RefCell<Option<Bulk>> = const { RefCell::new(None) };
}
/// The message's header was put: the message is not complete until all of it was written.
static UNDER_WAY: AtomicBool = AtomicBool::new(false);
/// A part of the message may have left.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The contents of a message behind its header.
#[derive(Debug, Clone, Copy)]
pub(super) enum Body<'b> {
    Bytes(&'b [u8]),
    File(&'b MessageFile),
}

/// A message's contents without a lifetime, which [`write()`] guarantees.
#[derive(Debug, Clone, Copy)]
enum Source {
    Bytes(*const [u8]),
    File(*const MessageFile),
}

/// The current message.
#[derive(Debug)]
struct Bulk {
    client: Client,
    source: Source,
    length: usize,
    /// Where in the source the next chunk begins.
    at: usize,
    piece: Vec<u8>,
    /// How much of the chunk was written.
    written: usize,
    /// Messages that follow it.
    after: Vec<(u8, Vec<u8>)>,
    done: bool,
    /// The client is gone.
    lost: bool,
}

/// Forgets the current message, also while an error unwinds.
struct InHand;

impl Drop for InHand {
    /// Unlike in other guards, this also runs after an error: it only assigns variables.
    fn drop(&mut self) {
        take_message();
        forget();
    }
}

/// No message is under way.
fn forget() {
    UNDER_WAY.store(false, Relaxed);
    BEGUN.store(false, Relaxed);
}

/// Runs `work` on the current message. Returns `None` if there is none, if all of it was written,
/// or if it is in use.
fn with_message<T>(work: impl FnOnce(&mut Bulk) -> T) -> Option<T> {
    IN_HAND.with(|place| {
        let mut bulk = place.try_borrow_mut().ok()?;
        bulk.as_mut().filter(|bulk| !bulk.done).map(work)
    })
}

/// Removes the current message.
fn take_message() -> Option<Bulk> {
    IN_HAND.with(|place| place.try_borrow_mut().ok()?.take())
}

/// Whether the prepared message is read by a walsender's client, and not by an SQL function. An SQL
/// function's buffer is empty at this point.
pub(super) fn is_for_client(ctx: Context<'_>) -> bool {
    let written = ctx.written();
    written.len() == HEADER_BYTES && written.starts_with(b"w")
}

/// Whether the prepared message can be sent in chunks. Not if another extension has put functions
/// of its own between PostgreSQL and the connection: it must see all messages.
pub(super) fn is_possible(ctx: Context<'_>) -> bool {
    ffi::has_replaced_postgres_methods() && is_for_client(ctx)
}

/// Send the message that was prepared, with this body; `last` as it was prepared. It has left when
/// this returns. In a callback that may write, where [`is_possible`].
pub(super) fn write(ctx: Context<'_>, body: Body<'_>, last: bool) {
    let (source, length) = match body {
        Body::Bytes(bytes) => (Source::Bytes(std::ptr::from_ref(bytes)), bytes.len()),
        Body::File(file) => (Source::File(std::ptr::from_ref(file)), file.len()),
    };
    if length > MOST_BYTES {
        report::fail(
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            "row is too large to be replicated".to_owned(),
            None,
        );
    }
    let Some(client) = Client::of_process() else {
        PgError::new(SqlState::InternalError, "a message in pieces has no client").raise();
    };
    let bulk = Bulk {
        client,
        source,
        length,
        at: 0,
        piece: Vec::with_capacity(PIECE_BYTES),
        written: 0,
        after: Vec::new(),
        done: false,
        lost: false,
    };
    let in_hand = InHand;
    IN_HAND.set(Some(bulk));
    ctx.write(last);
    let done = take_message().is_some_and(|bulk| bulk.done);
    drop(in_hand);
    if !done {
        PgError::new(
            SqlState::InternalError,
            "a message to the client was not sent as a whole",
        )
        .end_process();
    }
}

/// Runs `work`, which may write the current message. If there is one, an error in `work` ends the
/// process once a part of the message may have left.
pub(super) fn or_end(work: impl FnOnce()) {
    if with_message(|_| ()).is_none() {
        work();
    } else if let Err(error) = error::catch(work) {
        if BEGUN.load(Relaxed) {
            error.end_process();
        }
        error.raise();
    }
}

/// Whether the current message is incomplete: then [`push`] flushes.
#[inline]
pub(super) fn is_under_way() -> bool {
    UNDER_WAY.load(Relaxed)
}

/// Whether a part of a message may have left and the rest has not: then no other message may be
/// sent to the client. May be called in a signal handler.
#[inline]
pub(super) fn is_begun() -> bool {
    BEGUN.load(Relaxed)
}

/// Takes the arguments of `pq_putmessage_noblock` if they are the header of the current message, or
/// have to follow that message. Returns false if they have nothing to do with it.
pub(super) fn takes(kind: u8, body: &[u8]) -> bool {
    with_message(|bulk| bulk.takes(kind, body)).unwrap_or(false)
}

/// Writes as much as the socket takes. Returns the result of `pq_flush_if_writable`.
pub(super) fn push() -> c_int {
    with_message(Bulk::push).unwrap_or(0)
}

/// `EOF` of stdio.h.
const END: c_int = -1;

impl Bulk {
    fn takes(&mut self, kind: u8, body: &[u8]) -> bool {
        if UNDER_WAY.load(Relaxed) {
            self.after.push((kind, body.to_vec()));
            return true;
        }
        if kind != b'd' || body.len() != HEADER_BYTES {
            return false;
        }
        let whole = u32::try_from(4 + HEADER_BYTES + self.length).unwrap_or(u32::MAX);
        self.piece.push(kind);
        self.piece.extend_from_slice(&whole.to_be_bytes());
        self.piece.extend_from_slice(body);
        UNDER_WAY.store(true, Relaxed);
        true
    }

    fn push(&mut self) -> c_int {
        if self.lost {
            return END;
        }
        let mut turn = 0;
        while turn < TURN_BYTES {
            if self.client.is_send_pending() {
                if !self.client.flush_if_writable() {
                    self.lost = true;
                    return END;
                }
                if self.client.is_send_pending() {
                    return 0;
                }
            }
            if !self.fill() {
                return self.finish();
            }
            BEGUN.store(true, Relaxed);
            let rest = self.piece.get(self.written..).unwrap_or_default();
            match self.client.write(rest) {
                Written::Bytes(count) => {
                    self.written += count;
                    turn += count;
                }
                Written::Later => return 0,
                Written::Lost(code) => {
                    self.lost = true;
                    client_is_gone(code);
                    return END;
                }
            }
        }
        0
    }

    /// Fills the chunk, unless it has unwritten bytes. Returns false if nothing is left.
    fn fill(&mut self) -> bool {
        let is_first = self.at == 0 && self.written == 0;
        if self.written < self.piece.len() && !(is_first && self.piece.len() < PIECE_BYTES) {
            return true;
        }
        if !is_first {
            self.piece.clear();
            self.written = 0;
        }
        let room = PIECE_BYTES.saturating_sub(self.piece.len());
        let more = room.min(self.length - self.at);
        // SAFETY: the caller that has made this value keeps the bytes of the source.
        unsafe {
            match self.source {
                Source::Bytes(bytes) => {
                    let bytes = &*bytes;
                    let rest = bytes.get(self.at..self.at + more).unwrap_or_default();
                    self.piece.extend_from_slice(rest);
                }
                Source::File(file) => {
                    let from = self.piece.len();
                    self.piece.resize(from + more, 0);
                    (*file).read(self.at, self.piece.get_mut(from..).unwrap_or_default());
                }
            }
        }
        self.at += more;
        !self.piece.is_empty()
    }

    /// All of it was written: the waiting messages are next.
    fn finish(&mut self) -> c_int {
        self.done = true;
        forget();
        for (kind, body) in self.after.drain(..) {
            self.client.put_message_noblock(kind, &body);
        }
        if self.client.flush_if_writable() {
            0
        } else {
            END
        }
    }
}

/// Handles a lost client as PostgreSQL does (`internal_flush_buffer` of src/backend/libpq/pqcomm.c,
/// 15 to 18).
#[cold]
fn client_is_gone(code: i32) {
    let reason = std::io::Error::from_raw_os_error(code);
    PgError::new(
        SqlState::ConnectionFailure,
        format!("could not send data to client: {reason}"),
    )
    .log_to_server();
    plain::set_ClientConnectionLost(1);
    plain::set_InterruptPending(1);
}
