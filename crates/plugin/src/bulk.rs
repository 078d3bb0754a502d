//! Messages that are too large for the connection's send buffer, sent in pieces. Run by the
//! walsender.
//!
//! PostgreSQL puts a message into its send buffer as a whole; the buffer grows as it must and never
//! shrinks. Beyond [`LARGE_BYTES`] only the header that `WalSndPrepareWrite` has made goes the
//! usual way: `WalSndWriteData` hands it to the connection's functions, which are ours
//! ([`super::turn`]). They take it for the beginning of the message in hand, say that something is
//! still to be sent until the last byte is with the socket, and write piece after piece where
//! PostgreSQL flushes. So all waiting is PostgreSQL's own (`ProcessPendingWrites` of
//! src/backend/replication/walsender.c, 15 to 18): it hears the client, looks at its timeouts and
//! handles interrupts as it does while its buffer empties, and a client that stops reading is ended
//! by `wal_sender_timeout`.
//!
//! Invariants:
//! - What is in PostgreSQL's buffer goes first; while a message is in hand nothing is put there.
//!   What others want to send without waiting (keepalives, the end of the stream) comes after it.
//! - Once the first byte may have left, the message is completed or the connection ends: an error
//!   becomes a fatal one ([`or_end`]), and nothing that is told to the client meanwhile is sent,
//!   not even by a signal handler, as it would be taken for a part of the message.
//! - A piece stays as it is until all of it was written: TLS and GSS want what they could not take
//!   once more.

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

/// From how many bytes on a message is sent in pieces.
pub(super) const LARGE_BYTES: usize = 1 << 20;
/// What is written at once.
const PIECE_BYTES: usize = 128 << 10;
/// After so many bytes the walsender hears its client, however fast that reads.
const TURN_BYTES: usize = 1 << 20;
/// What a walsender puts before a message: 'w', two positions, a time, each of 8 bytes in network
/// order (`WalSndPrepareWrite` of src/backend/replication/walsender.c, 15 to 18).
const HEADER_BYTES: usize = 25;
/// The most that a message can have: as much as PostgreSQL's own buffers (`MaxAllocSize` of
/// src/include/utils/memutils.h).
const MOST_BYTES: usize = 0x3fff_ffff - HEADER_BYTES - 1;

thread_local! {
    /// The message in hand; `None` where there is none.
    static IN_HAND: RefCell<Option<Bulk>> = const { RefCell::new(None) };
}
/// Its header was put: it is not complete until all of it was written.
static UNDER_WAY: AtomicBool = AtomicBool::new(false);
/// Some of it may have left.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// What a message has behind its header.
#[derive(Debug, Clone, Copy)]
pub(super) enum Body<'b> {
    Bytes(&'b [u8]),
    File(&'b MessageFile),
}

/// The same without its lifetime, which [`write()`] sees to.
#[derive(Debug, Clone, Copy)]
enum Source {
    Bytes(*const [u8]),
    File(*const MessageFile),
}

/// A message in hand.
#[derive(Debug)]
struct Bulk {
    client: Client,
    source: Source,
    length: usize,
    /// Where in the source the next piece begins.
    at: usize,
    piece: Vec<u8>,
    /// How much of the piece was written.
    written: usize,
    /// What comes after it.
    after: Vec<(u8, Vec<u8>)>,
    done: bool,
    /// The client is gone.
    lost: bool,
}

/// Forgets the message in hand, also while an error unwinds.
struct InHand;

impl Drop for InHand {
    /// Unlike what other guards do, also after an error: this only assigns variables.
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

/// Runs `work` on the message in hand; `None` if there is none, if all of it was written, or if it
/// is being worked on.
fn with_message<T>(work: impl FnOnce(&mut Bulk) -> T) -> Option<T> {
    IN_HAND.with(|place| {
        let mut bulk = place.try_borrow_mut().ok()?;
        bulk.as_mut().filter(|bulk| !bulk.done).map(work)
    })
}

/// Takes the message in hand away.
fn take_message() -> Option<Bulk> {
    IN_HAND.with(|place| place.try_borrow_mut().ok()?.take())
}

/// Whether it is a walsender's client that reads what was just prepared, and not an SQL function.
/// An SQL function's buffer is empty at this point.
pub(super) fn is_for_client(ctx: Context<'_>) -> bool {
    let written = ctx.written();
    written.len() == HEADER_BYTES && written.starts_with(b"w")
}

/// Whether what was just prepared can be sent in pieces. Not where another extension has put
/// functions of its own between PostgreSQL and the connection: it is to see all messages.
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

/// Do what writes the message in hand, if there is one: an error in it ends the process once a part
/// of the message may have left.
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

/// Whether a message is in hand that is not complete: it is [`push`] that flushes.
#[inline]
pub(super) fn is_under_way() -> bool {
    UNDER_WAY.load(Relaxed)
}

/// Whether a part of a message may have left and the rest has not: nothing else may be told to the
/// client. May be asked in a signal handler.
#[inline]
pub(super) fn is_begun() -> bool {
    BEGUN.load(Relaxed)
}

/// Take what is to be put into the send buffer, the arguments of `pq_putmessage_noblock`, where it
/// is the header of the message in hand or has to come after that. False where it has nothing to do
/// with it.
pub(super) fn takes(kind: u8, body: &[u8]) -> bool {
    with_message(|bulk| bulk.takes(kind, body)).unwrap_or(false)
}

/// Write what the socket takes. Returns what `pq_flush_if_writable` returns.
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

    /// Have something to write in the piece. False where nothing is left.
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
        // SAFETY: who has made this keeps what the source points to.
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

    /// All of it was written: what had to wait is next.
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

/// What PostgreSQL does then (`internal_flush_buffer` of src/backend/libpq/pqcomm.c, 15 to 18).
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
