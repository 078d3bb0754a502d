//! Parked transactions (`on_error => 'park'`): how one is parked, how those behind it are found,
//! and how they are retried. `braid_bgworker::parked` has the rule, `braid_node::parked` the stored
//! records.
//!
//! If part of a transaction was committed in chunks, only the rest is parked. The same commit
//! removes the record of how far the chunks went.
//!
//! A transaction is parked in one commit that stores its records and moves the subscription's
//! position past it: it is either applied or parked, whatever is killed (I1). It is parked when it
//! is its turn, with all before it committed, in relaxed order too.
//!
//! A transaction with dependencies waits until they are committed, or parked. Only then does it
//! look at the parked ones. `parked_version` grows before the ring marks a transaction as done. So
//! every process sees each parked transaction that it has to follow.
//!
//! *Commits that wait for this subscription.* Example: paris is tokyo's synchronous standby. At
//! tokyo T locks table `doc`, updates a row that paris has changed meanwhile, and commits.
//!
//! 1. T's commit record is written. T keeps its locks until paris confirms T (`SyncRepWaitForLSN`).
//! 2. The applier at paris gets T. T has left a large value alone that paris lacks, so the applier
//!    asks tokyo for it.
//! 3. The question waits for T's lock on `doc`. T waits for paris, and paris for the question.
//!
//! So when it is T's turn and the question has ended with 55P03, the applier parks T (`Why::Lock`),
//! though T could be applied later. T is durable at paris then, and is confirmed. Tokyo's commit
//! returns, the lock is released, and applier 0 applies T. The lock may also be held by a commit
//! behind T: that one is received, applied or parked, and confirmed once T is parked. If no commit
//! at tokyo waits for paris, T is tried again without being parked.
//!
//! Rejected: to read the row at tokyo without the lock, as its file may be replaced at any moment;
//! to write T with the value that paris has, as a session at paris could update that row before the
//! answer comes; and to confirm T from memory, as T would be lost in a crash.
//!
//! Applier 0 retries parked transactions, one at a time, between the transactions that it claims
//! from the ring. It retries those requested by `braid.retry_parked`, and those that have no error
//! of their own and whose predecessors are no longer parked. Any other transaction that touches the
//! same keys is parked behind them, so nothing of the stream can overtake them.

mod content;
mod retry;

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::parked::Touch;
use braid_bgworker::policy::{self, Policy};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Reader, Record, lsn_text};
use braid_node::group::LogPlace;
use braid_node::origin;
use braid_node::parked::{self, Known, Why};
use braid_node::registry::BY_LOCK;
use braid_postgres::error::{self, PeerLock, PgError};
use braid_postgres::wait::Wait;
use braid_postgres::{latch, process, transaction};
use braid_ring::{ApplierState, FrameRead, Run, Transaction};

use content::Content;

use super::post::next_frame;
use super::records::out_of_order;
use super::{Applier, SHOWN_AFTER, fail};

/// The SQLSTATE if there is no room for another parked transaction.
const FULL: SqlState = SqlState::ConfigurationLimitExceeded;
/// How long to wait for room while the set of parked transactions does not change.
const PATIENCE: Duration = Duration::from_secs(10);

/// The parked transactions, as this applier knows them.
#[derive(Debug, Default)]
pub(super) struct Parking {
    known: Known,
    /// The `parked_version` to which `known` belongs.
    version: Option<u32>,
    /// Applier 0: the `parked_version`, and the number of the request, that it has handled last.
    tended: Option<(u32, u64)>,
    /// Applier 0: the next attempt at each parked transaction that waits for a lock at another
    /// node.
    by_lock: HashMap<i64, NextAttempt>,
    /// How long to wait for room: the state for which it was measured, and the end of the wait.
    patience: Option<((usize, usize), Instant)>,
}

/// The next attempt at a transaction that waits for a lock.
#[derive(Debug, Clone, Copy)]
struct NextAttempt {
    at: Instant,
    /// Attempts before it.
    attempts: u32,
}

/// Pauses between attempts at a transaction that waits for a lock at another node, in milliseconds:
/// the first and the longest. An attempt itself waits for a quarter of `braid.querier_timeout`.
const LOCK_PAUSE: (u64, u64) = (200, 10_000);

impl Parking {
    /// Notes that a transaction waits for a lock still.
    fn put_off(&mut self, id: i64) {
        let attempts = self.by_lock.get(&id).map_or(0, |next| next.attempts) + 1;
        let pause = policy::backoff_ms(attempts, LOCK_PAUSE.0, LOCK_PAUSE.1);
        let at = Instant::now() + Duration::from_millis(pause);
        self.by_lock.insert(id, NextAttempt { at, attempts });
    }

    /// Has no attempt made at a transaction now that can't be tried.
    fn put_off_if_due(&mut self, id: i64) {
        if self.by_lock.contains_key(&id) && !self.is_put_off(id) {
            self.put_off(id);
        }
    }

    /// Time until the next attempt at one that waits for a lock; `None` if there is none to be
    /// made.
    fn until_next(&self) -> Option<Duration> {
        let next = self.by_lock.values().map(|next| next.at).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Whether an attempt at this one is not due yet, as it waits for a lock.
    fn is_put_off(&self, id: i64) -> bool {
        let next = self.by_lock.get(&id);
        next.is_some_and(|next| next.at > Instant::now())
    }
}

impl Applier {
    /// How long applier 0 may sleep before it has to look at parked transactions; `most` at most.
    pub(super) fn rest_before_parked(&self, most: Duration) -> Duration {
        self.parking
            .until_next()
            .map_or(most, |until| until.min(most))
    }

    /// Parks a transaction before it is applied, if it has to follow a parked one. `next` is the
    /// next claimed transaction, 0 for none. All its dependencies are committed, or parked. Outside
    /// of a transaction.
    pub(super) fn set_aside(&mut self, transaction: &mut Transaction, next: u64) -> Aside {
        let holder = match error::catch(|| self.holder(transaction)) {
            Ok(holder) => holder,
            Err(error) => Err(error),
        };
        let done = match holder {
            // The transaction is parked at its turn.
            Ok(Some(_))
                if self.put_aside_until_turn(transaction, self.in_hand.check_other_keys) =>
            {
                Some(true)
            }
            Ok(Some(holder)) => match self.follow_parked(transaction, next, holder) {
                None => return Aside::Again,
                done => done,
            },
            Ok(None) => self.park_open(transaction, next),
            Err(error) => {
                error::abort();
                if !self.post.ring.stop_requested() {
                    fail(self.post.ring, &error, transaction.end_lsn());
                }
                Some(false)
            }
        };
        done.map_or(Aside::No, Aside::Done)
    }

    /// As [`Applier::park`], of a transaction that has to follow a parked one.
    fn follow_parked(&mut self, transaction: &Transaction, next: u64, holder: i64) -> Option<bool> {
        let left = match error::catch(|| self.leave_held(transaction.sequence)) {
            Ok(left) => left,
            Err(error) => Err(error),
        };
        let said = match left {
            Ok(None) => return self.park(transaction, next, Why::Waits(holder)),
            Ok(Some(again)) => again,
            Err(error) => {
                error::abort();
                error
            }
        };
        if !self.post.ring.stop_requested() {
            fail(self.post.ring, &said, transaction.commit_lsn());
        }
        Some(false)
    }

    /// Reads the parked transactions, if they have changed. Outside of a transaction.
    fn look_at_parked(&mut self) -> Result<(), PgError> {
        let version = self.entry.parked_version.load(Ordering::Acquire);
        if self.parking.version == Some(version) {
            return Ok(());
        }
        let id = self.subscription.id;
        let known = &mut self.parking.known;
        error::transaction(|| known.read(id))?;
        self.parking.version = Some(version);
        Ok(())
    }

    /// Whether anything is parked. Outside of a transaction.
    pub(super) fn has_parked(&mut self) -> Result<bool, PgError> {
        self.look_at_parked()?;
        Ok(!self.parking.known.parked.is_empty())
    }

    /// Whether the known set of parked transactions is out of date.
    pub(super) fn is_parking_stale(&self) -> bool {
        self.parking.version != Some(self.entry.parked_version.load(Ordering::Acquire))
    }

    /// Give each frame of a transaction in the ring to `each`. Not for one that is open.
    pub(super) fn each_frame(
        &self,
        sequence: u64,
        mut each: impl FnMut(&[u8]) -> Result<(), PgError>,
    ) -> Result<(), PgError> {
        let mut transaction = self.post.ring.transaction(sequence);
        let mut assembled = Vec::new();
        loop {
            match next_frame(&mut transaction, &mut assembled)? {
                FrameRead::Frame(frame) => each(frame)?,
                FrameRead::Assembled => each(&assembled)?,
                FrameRead::End => return Ok(()),
                FrameRead::Pending => {
                    return Err(PgError::new(
                        SqlState::InternalError,
                        "a transaction is not complete",
                    ));
                }
            }
        }
    }

    /// Returns the content of a transaction in the ring, and the keys and tables that it touches.
    /// Outside of a transaction.
    fn content(&mut self, sequence: u64) -> Result<(Content, Touch), PgError> {
        let mut content = Content::default();
        self.each_frame(sequence, |frame| content.frame(frame))?;
        for schema in content.changes.keys() {
            self.know(*schema)?;
        }
        let mut touch = Touch::default();
        for name in &content.tables {
            touch.change(name, true, []);
        }
        if !content.changes.is_empty() {
            let wide = self.post.ring.transaction(sequence).is_wide();
            let session = self.session.as_mut().ok_or_else(out_of_order)?;
            error::transaction(|| {
                for (schema, (barrier, hashes)) in &content.changes {
                    let barrier = *barrier || wide;
                    session.touch(&mut touch, *schema, barrier, hashes.iter().copied())?;
                }
                Ok(())
            })?;
        }
        Ok((content, touch.finish()))
    }

    /// The parked transaction that this one has to follow. All that it depends on is committed, or
    /// parked. Outside of a transaction.
    fn holder(&mut self, transaction: &Transaction) -> Result<Option<i64>, PgError> {
        self.look_at_parked()?;
        self.in_hand.guarding = false;
        self.in_hand.held_by = 0;
        if self.parking.known.parked.is_empty() || transaction.is_skipped() {
            return Ok(None);
        }
        if transaction.is_open() || transaction.is_split() {
            self.in_hand.guarding = true;
            return Ok(None);
        }
        let (_, touch) = self.content(transaction.sequence)?;
        Ok(self.parking.known.parked.holder(&touch, i64::MAX))
    }

    /// The part of a run before the first transaction that has to follow a parked one; `None` when
    /// its first has to. Outside of a transaction.
    pub(super) fn before_held(&mut self, run: Run) -> Result<Option<Run>, PgError> {
        for sequence in run.first..=run.last {
            let transaction = self.post.ring.transaction(sequence);
            if transaction.is_open() || transaction.is_split() {
                // Open and split transactions are claimed alone.
                break;
            }
            if self.holder(&transaction)?.is_some() {
                return Ok((sequence > run.first).then(|| Run {
                    first: run.first,
                    last: sequence - 1,
                }));
            }
            if self.parking.known.parked.is_empty() {
                break;
            }
        }
        Ok(Some(run))
    }

    /// Checks that one change need not follow a parked transaction. Used if the transaction is not
    /// checked as a whole.
    pub(super) fn guard(
        &mut self,
        schema: u32,
        barrier: bool,
        hashes: impl IntoIterator<Item = u64>,
    ) -> Result<(), PgError> {
        let mut touch = Touch::default();
        let session = self.session.as_mut().ok_or_else(out_of_order)?;
        session.touch(&mut touch, schema, barrier, hashes)?;
        self.hold(touch)
    }

    /// Checks that a statement, which touches these tables, has nothing to wait for.
    pub(super) fn guard_tables(&mut self, tables: &[String]) -> Result<(), PgError> {
        let mut touch = Touch::default();
        for name in tables {
            touch.change(name, true, []);
        }
        self.hold(touch)
    }

    fn hold(&mut self, touch: Touch) -> Result<(), PgError> {
        let Some(holder) = self.parking.known.parked.holder(&touch.finish(), i64::MAX) else {
            return Ok(());
        };
        self.in_hand.held_by = holder;
        Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "a part of a transaction has to follow a parked one",
        )
        .with_detail(format!(
            "It changes what parked transaction {holder} changes too."
        )))
    }

    /// Whether a transaction that has failed with `error` at its turn is parked, as the provider
    /// may keep the lock that it needs until this subscription is past it.
    pub(super) fn parks_by_lock(&self, error: &PgError) -> bool {
        error.peer_lock == Some(PeerLock::ByCommit)
            && self.in_hand.held_by == 0
            && self.session.is_some()
    }

    /// Whether a transaction that has failed with `error` for good is parked.
    pub(super) fn parks(&self, error: &PgError) -> bool {
        if self.parks_by_lock(error) {
            return true;
        }
        let subscription = &self.subscription;
        (subscription.options.parks()
            || self.in_hand.held_by != 0
            || (error.by_function && subscription.options.parks_functions()))
            && self.session.is_some()
            && matches!(
                policy::for_apply(error.sqlstate),
                Policy::Stop | Policy::Conflict
            )
    }

    /// Why the current transaction is parked. It has failed with `error` after so many attempts.
    pub(super) fn why_parked<'a>(&self, error: &'a PgError, attempts: u32) -> Why<'a> {
        match self.in_hand.held_by {
            0 if self.parks_by_lock(error) => Why::Lock(error),
            0 => Why::Error(error, attempts),
            holder => Why::Waits(holder),
        }
    }

    /// An open transaction that has failed with `error` is to be parked when it comes again: its
    /// first bytes are gone.
    pub(super) fn park_when_it_comes(&self, transaction: &Transaction, error: &PgError) {
        let lsn = transaction.commit_lsn();
        let after = match self.why_parked(error, 1) {
            Why::Error(..) => 0,
            Why::Waits(holder) => holder,
            Why::Lock(_) => BY_LOCK,
        };
        self.entry.park_next(error, after, lsn);
        error.log(&format!(
            "subscription \"{}\" receives a large transaction again, to park it",
            self.subscription.name
        ));
    }

    /// Park an open transaction that has failed before, if it is one. `None` if it is not; false
    /// when it is time to end.
    fn park_open(&mut self, transaction: &mut Transaction, next: u64) -> Option<bool> {
        if !transaction.is_open() {
            return None;
        }
        let (error, after) = self.entry.is_to_park(transaction.commit_lsn())?;
        let why = match after {
            0 => Why::Error(&error, 1),
            BY_LOCK => Why::Lock(&error),
            holder => Why::Waits(holder),
        };
        let sequence = transaction.sequence;
        if !self
            .post
            .wait_for(sequence - 1, ApplierState::WaitingForTurn)
        {
            return Some(false);
        }
        self.post.show(ApplierState::Applying);
        let mut failure = match error::catch(|| self.store_as_it_comes(transaction, why)) {
            Ok(Ok((id, local_end))) => {
                self.parked(transaction, next, why, id, local_end);
                return Some(true);
            }
            Ok(Err(failure)) | Err(failure) => failure,
        };
        error::abort();
        if !self.post.ring.stop_requested() {
            if policy::for_apply(failure.sqlstate) == Policy::Stop {
                // Somebody will do something about it: then it is to be applied.
                self.entry.park_next(&failure, 0, 0);
            }
            if is_lock_without_room(&failure, why) {
                // The lock may be released as well: it is applied when it comes again.
                failure.sqlstate = SqlState::SerializationFailure;
            }
            fail(self.post.ring, &failure, transaction.commit_lsn());
        }
        Some(false)
    }

    /// Parks a transaction. `next` is the next claimed transaction, 0 for none. Returns `None` if
    /// the transaction has to be checked again, and false when the process is asked to end.
    pub(super) fn park(
        &mut self,
        transaction: &Transaction,
        next: u64,
        why: Why<'_>,
    ) -> Option<bool> {
        let sequence = transaction.sequence;
        if !self
            .post
            .wait_for(sequence - 1, ApplierState::WaitingForTurn)
        {
            return Some(false);
        }
        self.post.show(ApplierState::Applying);
        let mut attempt = 0;
        let (id, local_end) = loop {
            let error = match error::catch(|| self.store(sequence, why)) {
                Ok(Ok(stored)) => break stored,
                Ok(Err(error)) | Err(error) => error,
            };
            error::abort();
            if self.post.ring.stop_requested() {
                return Some(false);
            }
            if error.sqlstate == FULL && self.makes_room() {
                return (!self.post.housekeeping()).then_some(false);
            }
            if is_lock_without_room(&error, why) {
                // The lock may be released as well.
                self.pause(&error, SHOWN_AFTER, transaction.end_lsn());
                return (!self.post.housekeeping()).then_some(false);
            }
            if policy::for_apply(error.sqlstate) != Policy::Retry {
                fail(self.post.ring, &error, transaction.end_lsn());
                return Some(false);
            }
            attempt += 1;
            latch::wait_as(
                Wait::Retry,
                Duration::from_millis(policy::backoff_ms(attempt, 5, 1000)),
            );
        };
        self.parked(transaction, next, why, id, local_end);
        Some(true)
    }

    /// Whether a parked transaction is due for a retry, so that there may be room for another one
    /// soon.
    fn makes_room(&mut self) -> bool {
        self.parking.version = None;
        if self.look_at_parked().is_err() || !self.parking.known.has_due() {
            return false;
        }
        // Applier 0 may have taken a transaction that has to follow this one, and can't try
        // anything: once all start anew it can.
        let known = &self.parking.known;
        let now = (known.parked.ids().count(), known.waiting.len());
        match self.parking.patience {
            Some((before, until)) if before == now => {
                if Instant::now() > until {
                    return false;
                }
            }
            _ => self.parking.patience = Some((now, Instant::now() + PATIENCE)),
        }
        if self.post.number == 0 {
            self.tend_parked()
        } else {
            process::set_latch(self.entry.first_applier_latch.load(Ordering::Acquire));
            latch::wait_as(Wait::Retry, Duration::from_millis(50));
            true
        }
    }

    /// A transaction is parked as number `id`: wakes the processes that wait for it, and logs it.
    fn parked(&self, transaction: &Transaction, next: u64, why: Why<'_>, id: i64, local_end: u64) {
        let sequence = transaction.sequence;
        // Before any transaction goes on that depends on it.
        self.entry.parked_version.fetch_add(1, Ordering::AcqRel);
        self.post.has_committed(sequence, local_end, next);
        process::set_latch(self.entry.first_applier_latch.load(Ordering::Acquire));
        let name = &self.subscription.name;
        let end = lsn_text(transaction.end_lsn());
        match why {
            Why::Error(error, _) => {
                let mut said = error.clone();
                said.message = format!(
                    "subscription \"{name}\" has parked the transaction that ends at {end} as number {id}: {}",
                    error.message
                );
                said.hint = Some(
                    "Remove the cause and run braid.retry_parked, or give it up with braid.skip_parked. What depends on it is parked too."
                        .to_owned(),
                );
                said.warn();
            }
            Why::Lock(error) => {
                let mut said = error.clone();
                said.message = format!(
                    "subscription \"{name}\" has parked the transaction that ends at {end} as number {id}: {}",
                    error.message
                );
                said.hint = Some(
                    "A commit at the provider may wait until this subscription is past it. The transaction is applied by itself once that \
                     commit is over, and its locks are released."
                        .to_owned(),
                );
                said.warn();
            }
            Why::Waits(holder) => pgrx::log!(
                "subscription \"{name}\" has parked the transaction that ends at {end} as number {id}: it has to follow number {holder}"
            ),
        }
    }

    /// Store a transaction, and go past it, in one commit. Its number, and the end of the commit
    /// record.
    fn store(&mut self, sequence: u64, why: Why<'_>) -> Result<(i64, u64), PgError> {
        let mut transaction = self.post.ring.transaction(sequence);
        if transaction.is_split() {
            return self.store_as_it_comes(&mut transaction, why);
        }
        let (mut content, touch) = self.content(sequence)?;
        if content.note.origin.is_empty() {
            content.note.origin.clone_from(&self.subscription.provider);
        }
        let preamble = self.preamble(content.changes.keys().copied())?;
        self.origins.use_that_of_provider()?;
        let end_lsn = content.note.end_lsn;
        let id = error::transaction(|| {
            origin::stands_for(end_lsn, 0);
            let id = parked::next_id()?;
            parked::insert(&self.subscription, id, &content.note, &touch, why)?;
            let mut part = 0;
            parked::add(id, &mut part, &preamble)?;
            self.each_frame(sequence, |frame| parked::add(id, &mut part, frame))?;
            Ok(id)
        })?;
        Ok((id, transaction::last_commit_end()))
    }

    /// The stream's header, and these schemas, as records.
    fn preamble(&mut self, schemas: impl Iterator<Item = u32>) -> Result<Vec<u8>, PgError> {
        let wanted: Vec<u32> = schemas.collect();
        let mut records = Vec::new();
        self.group.read_log(&mut LogPlace::default(), |entry| {
            let mut reader = Reader::new(entry);
            while let Some(record) = reader.next_record()? {
                let keep = match record {
                    Record::StreamHeader(_) => true,
                    Record::Schema(schema) => wanted.contains(&schema.number.0),
                    _ => false,
                };
                if keep {
                    records.extend_from_slice(entry);
                }
            }
            Ok(())
        })?;
        Ok(records)
    }
}

/// Whether there was no room to park a transaction that waits for a lock.
fn is_lock_without_room(error: &PgError, why: Why<'_>) -> bool {
    error.sqlstate == FULL && matches!(why, Why::Lock(_))
}

/// The result of [`Applier::set_aside`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aside {
    /// The transaction is to be applied.
    No,
    /// The transaction is parked; false when the process is asked to end.
    Done(bool),
    /// The transaction has to be checked again.
    Again,
}
