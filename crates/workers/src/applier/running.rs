//! A transaction that is applied while it is in progress at the provider
//! (`braid_bgworker::running`). A process of its own applies it, until an applier that has reached
//! its place in the provider's order gives it its turn.
//!
//! Each of its subtransactions is a local savepoint. If the subtransaction is rolled back at the
//! provider, the process rolls back to the savepoint (`apply/savepoint.rs`). If subtransactions are
//! nested deeper than [`SAVEPOINTS`], a rollback of one rolls back the whole transaction.
//!
//! It blocks nobody: it rolls back as soon as another process waits for its locks, and waits only
//! briefly for other processes' locks. So neither a local session nor another stream ever waits for
//! the end of a transaction at the provider.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_apply::{Item, Savepoint, Session};
use braid_bgworker::reason::Reason;
use braid_bgworker::running::{PATIENCE, Running, State, Supply};
use braid_bgworker::sqlstate::SqlState;
use braid_decoder::REPLACED_PREFIX;
use braid_gir::{Begin, Reader, Record, Tag};
use braid_node::registry::SubscriptionEntry;
use braid_node::subscription;
use braid_postgres::error::{self, PgError};
use braid_postgres::spool::{Frame, Frames};
use braid_postgres::wait::Wait;
use braid_postgres::{latch, lock, process, transaction, worker};
use braid_ring::{ApplierState, Run, Transaction};
use pgrx::pg_sys;

use super::in_hand::InHand;
use super::post::Trouble;
use super::{Applier, fail};

/// How long it waits for locks of other processes.
const LOCK_TIMEOUT: &str = "200ms";
/// How often it looks whether somebody waits for a row that it has written, and for a table.
const LOOK: Duration = Duration::from_millis(20);
const LOOK_AT_TABLES: Duration = Duration::from_secs(1);
/// Savepoints at a time: everybody's snapshots have room for 64 subtransactions of a process
/// (PGPROC_MAX_CACHED_SUBXIDS of src/include/storage/proc.h, 15 to 18).
const SAVEPOINTS: usize = 48;

/// Why it is not applied now.
enum Stopped {
    /// The leader wants no more of it, or it is time to end.
    Asked,
    /// An error, or the transaction would block others or wait for them.
    Because(PgError),
}

impl From<PgError> for Stopped {
    fn from(error: PgError) -> Self {
        Self::Because(error)
    }
}

impl From<braid_gir::Error> for Stopped {
    fn from(error: braid_gir::Error) -> Self {
        Self::Because(error.into())
    }
}

/// The transaction, as far as it was applied.
struct Progress {
    frames: Frames,
    supply: Supply,
    looked: Instant,
    looked_at_tables: Instant,
    /// When something came last.
    fed: Instant,
    begun: bool,
    /// Savepoints of its subtransactions, the outermost first.
    savepoints: Vec<Part>,
    /// Ids under which rows were written before the last savepoint; others wait for these one by
    /// one.
    written_as: Vec<pg_sys::TransactionId>,
}

/// A subtransaction.
struct Part {
    /// The subtransaction's id at the provider.
    xid: u32,
    savepoint: Savepoint,
    /// Number of ids before it.
    written_as: usize,
}

impl Progress {
    /// A subtransaction begins.
    fn begin_part(&mut self, xid: u32, session: &mut Session) -> Result<(), Stopped> {
        if self.savepoints.len() >= SAVEPOINTS {
            return Ok(());
        }
        session.flush()?;
        let id = transaction::current_id();
        if id != pg_sys::InvalidTransactionId && self.written_as.last() != Some(&id) {
            self.written_as.push(id);
        }
        self.savepoints.push(Part {
            xid,
            written_as: self.written_as.len(),
            savepoint: session.savepoint()?,
        });
        Ok(())
    }

    /// A subtransaction was rolled back.
    fn roll_back_part(&mut self, xid: u32, session: &mut Session) -> Result<(), Stopped> {
        let Some(at) = self.savepoints.iter().position(|part| part.xid == xid) else {
            return Err(given_up("It has rolled back to a savepoint."));
        };
        while self.savepoints.len() > at
            && let Some(part) = self.savepoints.pop()
        {
            session.roll_back_to(part.savepoint)?;
            self.written_as.truncate(part.written_as);
        }
        Ok(())
    }

    /// All of it is applied and nothing is open.
    fn join_parts(&mut self) {
        while let Some(part) = self.savepoints.pop() {
            let id = transaction::current_id();
            if id != pg_sys::InvalidTransactionId {
                self.written_as.push(id);
            }
            Session::release(part.savepoint);
        }
    }
}

impl Applier {
    /// The main loop of the process that applies an in-progress transaction.
    pub(super) fn apply_running(&mut self) {
        let running = self.group.running();
        if running.state() != State::Started && running.state() != State::Whole {
            return;
        }
        worker::set("lock_timeout", LOCK_TIMEOUT);
        let outcome = match error::catch(|| self.follow(running)) {
            Ok(outcome) => outcome,
            Err(error) => Err(Stopped::Because(error)),
        };
        if let Err(stopped) = outcome {
            error::abort();
            let reason = self.session.as_mut().and_then(|session| {
                session.forget_transaction();
                session.take_reason_to_wait()
            });
            let was_wanted = running.give_up();
            process::set_latch(running.waiter());
            process::set_latch(self.entry.leader_latch.load(Ordering::Acquire));
            if was_wanted && let Stopped::Because(error) = stopped {
                self.post.own.retries.fetch_add(1, Ordering::Relaxed);
                self.entry.retries.fetch_add(1, Ordering::Relaxed);
                let reason = reason.unwrap_or(&error.message);
                say_given_up(self.entry, &self.subscription.name, running.xid(), reason);
            }
        }
        self.post.show(ApplierState::Idle);
    }

    fn follow(&mut self, running: &Running) -> Result<(), Stopped> {
        let now = Instant::now();
        let frames = Frames::open(&running.path())?;
        // After this it does not matter whether the leader still has the file.
        running.register(process::my_latch());
        let mut progress = Progress {
            frames,
            supply: Supply::default(),
            looked: now,
            looked_at_tables: now,
            fed: now,
            begun: false,
            savepoints: Vec::new(),
            written_as: Vec::new(),
        };
        loop {
            // Before the supply: a complete transaction gets no more.
            let state = running.state();
            self.check(running, &mut progress)?;
            if let Some(supply) = running.supplied() {
                if supply.length > progress.supply.length {
                    progress.fed = Instant::now();
                }
                progress.supply = supply;
            }
            if progress.frames.place() < progress.supply.length {
                self.apply_supply(running, &mut progress)?;
            } else if matches!(state, State::Whole | State::Turn) {
                return self.end_running(running, &mut progress);
            } else {
                self.post.show(ApplierState::Idle);
                latch::wait_as(Wait::Rest, LOOK);
            }
        }
    }

    /// Checks whether to go on: another process may wait for these locks, or the transaction may
    /// have been given up.
    fn check(&self, running: &Running, progress: &mut Progress) -> Result<(), Stopped> {
        pgrx::check_for_interrupts!();
        if self.post.ring.stop_requested() {
            return Err(Stopped::Asked);
        }
        match running.state() {
            State::Started | State::Whole => {}
            // From now on, other processes wait as for any transaction that is being applied.
            State::Turn => return Ok(()),
            State::Free | State::Committed | State::GivenUp => return Err(Stopped::Asked),
        }
        if !progress.begun || progress.looked.elapsed() < LOOK {
            return Ok(());
        }
        progress.looked = Instant::now();
        if progress.fed.elapsed() > PATIENCE && running.state() == State::Started {
            return Err(given_up("Nothing more has come of it for a minute."));
        }
        if is_waited_for(&progress.written_as) {
            return Err(given_up(
                "Another session waits for a row that it has written.",
            ));
        }
        if progress.looked_at_tables.elapsed() >= LOOK_AT_TABLES {
            progress.looked_at_tables = Instant::now();
            if is_any_lock_waited_for()? {
                return Err(given_up(
                    "Another session waits for a table that it has written.",
                ));
            }
        }
        Ok(())
    }

    /// Applies the supplied frames.
    fn apply_supply(&mut self, running: &Running, progress: &mut Progress) -> Result<(), Stopped> {
        let Supply {
            length,
            after,
            read,
            newest,
        } = progress.supply;
        // The rows must be in the state that earlier transactions have left.
        while self.post.ring.committed() < after {
            self.post.show(ApplierState::WaitingForDependency);
            latch::wait_as(Wait::Dependency, Duration::from_millis(1));
            self.check(running, progress)?;
        }
        if !progress.begun {
            let begin = Begin {
                xid: running.xid(),
                commit_lsn: read,
                commit_timestamp: newest,
                origin: "",
                origin_lsn: 0,
            };
            self.in_hand = InHand::once();
            self.begin(&begin, false)?;
            progress.begun = true;
        }
        if let Some(session) = self.session.as_mut() {
            session.runs(read, newest);
        }
        self.post.show(ApplierState::Applying);
        let mut applied = 0_usize;
        loop {
            let records = match progress.frames.next(length)? {
                None => return Ok(()),
                Some(Frame::Records(records)) => records,
                Some(Frame::Begins(xid)) => {
                    if let Some(session) = self.session.as_mut() {
                        progress.begin_part(xid, session)?;
                    }
                    continue;
                }
                Some(Frame::RolledBack(xid)) => {
                    if let Some(session) = self.session.as_mut() {
                        progress.roll_back_part(xid, session)?;
                    }
                    continue;
                }
            };
            let mut reader = Reader::new(records);
            let mut gathered = Vec::new();
            while let Some((tag, body)) = reader.next_raw()? {
                if matches!(tag, Tag::Schema) {
                    continue;
                }
                let change = match Record::read(tag, body)? {
                    Record::Change(change) => change,
                    // For the history of conflicts. If the transaction has a conflict, it is
                    // applied after its commit.
                    Record::Message(message) if message.prefix == REPLACED_PREFIX => continue,
                    _ => return Err(given_up("It is more than changes of rows.")),
                };
                self.know(change.header.schema.0)?;
                applied += 1;
                if self.consolidate {
                    gathered.push(Item::Change(0, change, None));
                } else if let Some(session) = self.session.as_mut() {
                    session.change(&change)?;
                }
            }
            if let Some(session) = self.session.as_mut().filter(|_| !gathered.is_empty()) {
                session.consolidate(&gathered)?;
            }
            if applied >= 1000 {
                applied = 0;
                self.check(running, progress)?;
            }
        }
    }

    /// All is applied, and the transaction has committed at the provider: commit it when it is its
    /// turn.
    fn end_running(&mut self, running: &Running, progress: &mut Progress) -> Result<(), Stopped> {
        let ending = running.ending();
        let Some(session) = self.session.as_mut().filter(|_| progress.begun) else {
            return Err(given_up("Nothing came of it."));
        };
        session.has_committed(ending.commit_lsn, ending.timestamp)?;
        session.finish()?;
        progress.join_parts();
        let counts = session.counts();
        self.post
            .own
            .commit_lsn
            .store(ending.commit_lsn, Ordering::Relaxed);
        self.post.show(ApplierState::WaitingForTurn);
        while running.state() != State::Turn {
            latch::wait_as(Wait::Turn, LOOK);
            self.check(running, progress)?;
        }
        let run = Run {
            first: ending.sequence,
            last: ending.sequence,
        };
        let local_end = match self.commit(run, ending.end_lsn) {
            Ok(local_end) => local_end,
            Err(Trouble::Error(error)) => return Err(error.into()),
            Err(Trouble::InTheWay) => return Err(given_up("It is in the way.")),
        };
        self.count_committed(1, counts.changes());
        self.entry
            .schedule
            .applied_while_running
            .fetch_add(1, Ordering::Relaxed);
        running.commit(local_end);
        process::set_latch(running.waiter());
        Ok(())
    }

    /// Has the process that applies the transaction commit it, when an applier has reached it. All
    /// earlier transactions are committed. `next` is the next claimed transaction, 0 for none.
    /// Returns false when the process is asked to end.
    pub(super) fn have_committed(&mut self, transaction: &Transaction, next: u64) -> bool {
        let running = self.group.running();
        self.post.show(ApplierState::WaitingForDependency);
        match error::catch(|| self.has_parked()) {
            Ok(Ok(false)) => {
                running.take_turn(process::my_latch());
                process::set_latch(running.process());
            }
            // The ordinary way of applying finds out which parked transaction it may have to
            // follow, and reports errors.
            Ok(Ok(true)) => {
                running.give_up();
            }
            Ok(Err(_)) | Err(_) => {
                error::abort();
                running.give_up();
            }
        }
        loop {
            match running.state() {
                State::Committed => {
                    self.post
                        .has_committed(transaction.sequence, running.local_end(), next);
                    return true;
                }
                State::Whole | State::Turn if running.ending().sequence == transaction.sequence => {
                }
                State::Whole | State::Turn | State::Free | State::Started | State::GivenUp => {
                    self.entry
                        .anew
                        .not_running
                        .store(running.xid(), Ordering::Relaxed);
                    let error = PgError::new(
                        SqlState::SerializationFailure,
                        "a transaction that was applied while it ran is asked for again",
                    )
                    .for_reason(Reason::RunningGivenUp);
                    fail(self.post.ring, &error, transaction.end_lsn());
                    return false;
                }
            }
            if !self.post.housekeeping() {
                return false;
            }
            latch::wait_as(Wait::Turn, Duration::from_millis(100));
        }
    }
}

fn given_up(reason: &'static str) -> Stopped {
    Stopped::Because(PgError::new(SqlState::SerializationFailure, reason))
}

/// Whether anybody waits for the end of this process's transaction: for a row that it has written,
/// under one of these ids or the current one.
fn is_waited_for(written_as: &[pg_sys::TransactionId]) -> bool {
    [transaction::top_id(), transaction::current_id()]
        .iter()
        .chain(written_as)
        .any(|xid| lock::is_transaction_waited_for(*xid))
}

/// Whether anybody waits for any lock that this process holds.
fn is_any_lock_waited_for() -> Result<bool, PgError> {
    let found = subscription::rows(
        "select 1 from pg_catalog.pg_locks l where not l.granted and l.pid <> pg_catalog.pg_backend_pid() \
         and pg_catalog.pg_backend_pid() = any (pg_catalog.pg_blocking_pids(l.pid)) limit 1",
        &[],
    )?;
    Ok(!found.is_empty())
}

/// A running transaction is to be applied once it has committed.
pub(crate) fn say_given_up(entry: &SubscriptionEntry, subscription: &str, xid: u32, reason: &str) {
    entry
        .schedule
        .given_up_while_running
        .fetch_add(1, Ordering::Relaxed);
    pgrx::log!(
        "subscription \"{subscription}\" applies transaction {xid} of the provider once it has committed: {reason}"
    );
}
