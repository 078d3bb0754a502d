//! The mailbox of a database's group worker: how sessions reach it.
//!
//! The worker creates a segment of shared memory when it starts and stores its handle in its
//! manager's entry. Sessions that other members have opened put messages in
//! (`braid.group_receive`). Sessions of users ask questions and wait for the answer. The worker
//! also shows its view of the group in the segment.
//!
//! All bytes are read and written under the registry's lock, each for the time of one copy. A
//! question moves as follows.
//!
//! | state | set by | next |
//! |---|---|---|
//! | free | the session that got its answer, or the worker after an abandoned one | asked |
//! | asked | the session | taken, or free if the session gives up |
//! | taken | the worker | answered, or abandoned if the session gives up |
//! | answered | the worker | free |
//! | abandoned | the session | free |
//!
//! A session that ends without giving up leaves its question behind; its own next question, or the
//! worker, frees it. Messages may be lost: a full mailbox takes no more.

use std::cell::Cell;
use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::timestamp::now;
use braid_postgres::{latch, process};

use crate::group;
use crate::mail::Mail;
use crate::registry::{self, ManagerEntry, locked};

/// Bytes for messages that wait.
const MAIL: usize = 1 << 20;
/// The longest message that the mailbox takes, in bytes: a longer one goes by a table.
pub const MESSAGE_LIMIT: usize = MAIL / 4;
/// Questions at a time.
const QUESTIONS: usize = 16;
/// The longest question, and the longest answer, in bytes.
const QUESTION: usize = 68 * 1024;
/// Bytes of the worker's view.
const VIEW: usize = 64 * 1024;

/// An answer that nobody fetches is kept so long, in microseconds.
const KEPT: i64 = 60_000_000;

/// A group worker that is being started is waited for this long.
const STARTS: Duration = Duration::from_secs(5);

const FREE: u32 = 0;
const ASKED: u32 = 1;
const TAKEN: u32 = 2;
const ANSWERED: u32 = 3;
const ABANDONED: u32 = 4;

/// All atomics, so that zeroed memory is a valid one.
#[repr(C)]
struct Layout {
    /// Messages of other members.
    mail: Mail<MAIL>,
    /// Whether longer messages wait in `braid.group_letter`.
    has_letters: AtomicU32,
    view_length: AtomicU32,
    questions: [Question; QUESTIONS],
    view: [AtomicU8; VIEW],
}

#[repr(C)]
struct Question {
    state: AtomicU32,
    /// The session's process, and the address of its latch.
    pid: AtomicI32,
    latch: AtomicUsize,
    /// Another one for each question.
    number: AtomicU64,
    length: AtomicU32,
    /// When it was answered (TimestampTz).
    answered_at: AtomicI64,
    bytes: [AtomicU8; QUESTION],
}

fn put(place: &[AtomicU8], bytes: &[u8]) {
    for (cell, byte) in place.iter().zip(bytes) {
        cell.store(*byte, Ordering::Relaxed);
    }
}

fn get(place: &[AtomicU8], length: usize) -> Vec<u8> {
    let bytes = place.iter().take(length);
    bytes.map(|cell| cell.load(Ordering::Relaxed)).collect()
}

fn length_of(counter: &AtomicU32) -> usize {
    usize::try_from(counter.load(Ordering::Relaxed)).unwrap_or(0)
}

/// A question that the worker has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    place: usize,
    number: u64,
}

/// One process's view of a mailbox.
#[derive(Clone, Copy)]
pub struct Mailbox {
    layout: &'static Layout,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mailbox")
    }
}

impl Mailbox {
    /// Creates the mailbox of this process, the group worker, and says so in the manager's entry.
    ///
    /// # Errors
    /// 53200 and the like from PostgreSQL.
    pub fn create(entry: &ManagerEntry) -> Result<Self, PgError> {
        let (mapping, handle) = group::create(size_of::<Layout>())?;
        // SAFETY: the segment is fresh, page-aligned, large enough, and mapped until this process
        // ends; zeroes are a valid Layout, and nobody else knows the handle yet.
        let layout = unsafe {
            mapping.base.as_ptr().write_bytes(0, size_of::<Layout>());
            mapping.base.cast::<Layout>().as_ref()
        };
        entry.group_mailbox.store(handle, Ordering::Release);
        Ok(Self { layout })
    }

    fn attach(handle: u32) -> Result<Self, PgError> {
        let mapping = group::attach(handle, size_of::<Layout>())?;
        // SAFETY: the worker laid it out before it gave the handle away; mapped until this process
        // ends; atomics only.
        let layout = unsafe { mapping.base.cast::<Layout>().as_ref() };
        Ok(Self { layout })
    }

    /// Takes all messages out. For the worker.
    #[must_use]
    pub fn take_mail(&self) -> Vec<Vec<u8>> {
        self.layout.mail.take()
    }

    /// Whether longer messages wait in the table. Says so once. For the worker.
    #[must_use]
    pub fn take_letters(&self) -> bool {
        self.layout.has_letters.swap(0, Ordering::AcqRel) != 0
    }

    /// Takes the questions that were asked. For the worker.
    #[must_use]
    pub fn take_questions(&self) -> Vec<(Ticket, Vec<u8>)> {
        let is_asked = |question: &Question| question.state.load(Ordering::Relaxed) == ASKED;
        if !self.layout.questions.iter().any(is_asked) {
            return Vec::new();
        }
        locked(|| {
            let mut taken = Vec::new();
            for (place, question) in self.layout.questions.iter().enumerate() {
                if is_asked(question) {
                    question.state.store(TAKEN, Ordering::Relaxed);
                    let number = question.number.load(Ordering::Relaxed);
                    let bytes = get(&question.bytes, length_of(&question.length));
                    taken.push((Ticket { place, number }, bytes));
                }
            }
            taken
        })
    }

    /// Answers a question. For the worker.
    pub fn answer(&self, ticket: Ticket, answer: &[u8]) {
        let Some(question) = self.layout.questions.get(ticket.place) else {
            return;
        };
        let latch = locked(|| {
            if question.number.load(Ordering::Relaxed) != ticket.number {
                return 0;
            }
            if question.state.load(Ordering::Relaxed) != TAKEN {
                question.state.store(FREE, Ordering::Relaxed);
                return 0;
            }
            let length = answer.len().min(QUESTION);
            put(&question.bytes, answer);
            let length = u32::try_from(length).unwrap_or(0);
            question.length.store(length, Ordering::Relaxed);
            question.answered_at.store(now(), Ordering::Relaxed);
            question.state.store(ANSWERED, Ordering::Relaxed);
            question.latch.load(Ordering::Relaxed)
        });
        process::set_latch(latch);
    }

    /// Frees the questions of sessions that have ended. For the worker, from time to time.
    pub fn sweep(&self) {
        locked(|| {
            for question in &self.layout.questions {
                let state = question.state.load(Ordering::Relaxed);
                let is_gone = !process::exists(question.pid.load(Ordering::Relaxed));
                // A session fetches its answer at once, or was cancelled.
                let is_late = state == ANSWERED
                    && now() - question.answered_at.load(Ordering::Relaxed) > KEPT;
                if state != FREE && (is_gone || is_late) {
                    question.state.store(FREE, Ordering::Relaxed);
                }
            }
        });
    }

    /// Shows the worker's view to sessions. A longer one than 64 kB is cut.
    pub fn show(&self, view: &[u8]) {
        locked(|| {
            put(&self.layout.view, view);
            let length = u32::try_from(view.len().min(VIEW)).unwrap_or(0);
            self.layout.view_length.store(length, Ordering::Relaxed);
        });
    }

    /// Puts a question into a free place. `None` if there is none.
    fn ask(&self, question: &[u8]) -> Option<Ticket> {
        let me = process::my_pid();
        locked(|| {
            for left in &self.layout.questions {
                if left.pid.load(Ordering::Relaxed) == me {
                    give_up(left);
                }
            }
            let questions = self.layout.questions.iter().enumerate();
            let (place, free) = questions
                .into_iter()
                .find(|(_, place)| place.state.load(Ordering::Relaxed) == FREE)?;
            free.pid.store(me, Ordering::Relaxed);
            free.latch.store(process::my_latch(), Ordering::Relaxed);
            let number = free.number.load(Ordering::Relaxed) + 1;
            free.number.store(number, Ordering::Relaxed);
            put(&free.bytes, question);
            let length = u32::try_from(question.len()).unwrap_or(0);
            free.length.store(length, Ordering::Relaxed);
            free.state.store(ASKED, Ordering::Relaxed);
            Some(Ticket { place, number })
        })
    }

    /// The answer, if it has come.
    fn answer_of(&self, ticket: Ticket) -> Option<Vec<u8>> {
        let question = self.layout.questions.get(ticket.place)?;
        if question.state.load(Ordering::Relaxed) != ANSWERED {
            return None;
        }
        locked(|| {
            if question.number.load(Ordering::Relaxed) != ticket.number {
                return None;
            }
            let answer = get(&question.bytes, length_of(&question.length));
            question.state.store(FREE, Ordering::Relaxed);
            Some(answer)
        })
    }

    fn withdraw(&self, ticket: Ticket) {
        if let Some(question) = self.layout.questions.get(ticket.place) {
            locked(|| {
                if question.number.load(Ordering::Relaxed) == ticket.number {
                    give_up(question);
                }
            });
        }
    }
}

/// The session of a question does not wait for it any more. By the holder of the lock.
fn give_up(question: &Question) {
    let next = match question.state.load(Ordering::Relaxed) {
        TAKEN | ABANDONED => ABANDONED,
        _ => FREE,
    };
    question.state.store(next, Ordering::Relaxed);
}

thread_local! {
    /// The mailbox that this session knows, by its handle.
    static KNOWN: Cell<Option<(u32, Mailbox)>> = const { Cell::new(None) };
}

/// The mailbox of this database's group worker, with the entry of its manager.
fn find() -> Result<(&'static ManagerEntry, u32, Mailbox), PgError> {
    let absent = || {
        PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "the group worker of this database does not run",
        )
        .with_hint("It starts within seconds. If it does not, look into the server's log.")
    };
    let entry = registry::my_manager().ok_or_else(absent)?;
    let handle = entry.group_mailbox.load(Ordering::Acquire);
    if handle == 0 {
        return Err(absent());
    }
    if let Some((known, mailbox)) = KNOWN.get()
        && known == handle
    {
        return Ok((entry, handle, mailbox));
    }
    let mailbox = Mailbox::attach(handle).map_err(|_| absent())?;
    KNOWN.set(Some((handle, mailbox)));
    Ok((entry, handle, mailbox))
}

/// As [`find`]; waits a moment for a worker that is being started, as after `braid.create_group`.
fn find_soon(deadline: Instant) -> Result<(&'static ManagerEntry, u32, Mailbox), PgError> {
    let deadline = deadline.min(Instant::now() + STARTS);
    loop {
        match find() {
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => drop(latch::wait(Some(Duration::from_millis(50)))),
            found => return found,
        }
    }
}

/// Puts a message of another member into the mailbox of this database's group worker. False if
/// there was no room.
///
/// # Errors
/// 55000 if no group worker runs.
pub fn deliver(message: &[u8]) -> Result<bool, PgError> {
    let (entry, _, mailbox) = find()?;
    let delivered = message.len() <= MESSAGE_LIMIT && mailbox.layout.mail.post(message);
    process::set_latch(entry.group_latch.load(Ordering::Acquire));
    Ok(delivered)
}

/// Says that a longer message waits in `braid.group_letter`. After its commit.
///
/// # Errors
/// 55000 if no group worker runs.
pub fn announce_letter() -> Result<(), PgError> {
    let (entry, _, mailbox) = find()?;
    mailbox.layout.has_letters.store(1, Ordering::Release);
    process::set_latch(entry.group_latch.load(Ordering::Acquire));
    Ok(())
}

/// The view that the group worker shows.
///
/// # Errors
/// 55000 if no group worker runs.
pub fn view() -> Result<Vec<u8>, PgError> {
    let (_, _, mailbox) = find()?;
    let layout = mailbox.layout;
    Ok(locked(|| get(&layout.view, length_of(&layout.view_length))))
}

/// Asks the group worker, and waits for its answer.
///
/// # Errors
/// 55000 if no group worker runs or it ends meanwhile; 53000 if too many ask at once; 57014 past
/// the time.
pub fn ask(question: &[u8], timeout: Duration) -> Result<Vec<u8>, PgError> {
    let deadline = Instant::now() + timeout;
    if question.len() > QUESTION {
        return Err(PgError::new(
            SqlState::InvalidParameterValue,
            "the request to the group is too long",
        ));
    }
    let (entry, handle, mailbox) = find_soon(deadline)?;
    let ticket = mailbox.ask(question).ok_or_else(|| {
        PgError::new(
            SqlState::InsufficientResources,
            "too many sessions ask the group at once",
        )
        .with_hint("Try again.")
    })?;
    process::set_latch(entry.group_latch.load(Ordering::Acquire));
    loop {
        if let Some(answer) = mailbox.answer_of(ticket) {
            return Ok(answer);
        }
        if entry.group_mailbox.load(Ordering::Acquire) != handle {
            return Err(PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "the group worker of this database has ended meanwhile",
            )
            .with_detail("The request may have been agreed all the same.")
            .with_hint("Look at braid.group_nodes before trying again."));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            mailbox.withdraw(ticket);
            return Err(PgError::new(
                SqlState::QueryCanceled,
                "timeout expired while waiting for the group's agreement",
            ));
        }
        latch::wait(Some(left.min(Duration::from_secs(1))));
    }
}
