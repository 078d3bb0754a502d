//! The applier process: claims transactions from the group's ring, applies them, and commits them
//! in the provider's order. If the subscription allows it, it commits each as soon as its
//! dependencies are committed.
//!
//! States of the current transaction, all in this process until the last: claimed -> (waits for its
//! dependencies) -> applied, not committed -> (waits for its turn, if commits follow the provider's
//! order) -> committed. If commits may overtake each other and transactions are not joined, an
//! applier does not wait for dependencies. It enqueues the transaction in the ring instead, and any
//! applier claims it once its dependencies are committed (`Applier::puts_aside`). Then an applier
//! with a current transaction only waits inside PostgreSQL, such as for a lock. Meanwhile the
//! others go on with transactions that do not depend on that one. A transaction that fails while
//! earlier ones are not committed is rolled back and applied again at its turn. No other
//! transaction of the subscription can affect it then, so only then is an error final.
//!
//! Deadlocks: an applier that waits for its turn may hold a lock that an earlier transaction waits
//! for. PostgreSQL's deadlock detector does not see the wait for the turn. So the waiting applier
//! checks whether it blocks an earlier transaction, and rolls back if so. The chain of waits may
//! lead through appliers of other subscriptions that also wait for their turn.

mod ahead;
mod batch;
pub(crate) mod here;
mod in_hand;
mod origins;
mod park;
mod piece;
mod post;
mod prepared;
mod records;
pub(crate) mod running;
mod start;
mod taking;
mod versioned;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_apply::{Session, StatementInHand, is_in_the_way};
use braid_bgworker::applied::{Applied, Committing};
use braid_bgworker::policy::{self, Policy};
use braid_bgworker::reason::Reason;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::taking::Mode;
use braid_gir::{Begin, lsn_text};
use braid_node::applied::AppliedRow;
use braid_node::group::{Group, LogPlace};
use braid_node::origin;
use braid_node::registry::{self, ApplierEntry, SubscriptionEntry};
use braid_node::subscription::{self, Subscription};
use braid_node::{crash, split, versions};
use braid_postgres::error::{self, PgError};
use braid_postgres::wait::Wait;
use braid_postgres::{latch, process, timestamp, transaction};
use braid_ring::{ApplierState, Awaited, FailureReport, FrameRead, Ring, Run, Transaction};

use ahead::Ahead;
use in_hand::{Attempt, InHand};
use origins::Origins;
use park::{Aside, Parking};
use post::{Post, Trouble, next_frame, set_latches};
use prepared::{Settled, Step};

pub(crate) use start::Arguments;
pub use start::{main, prepare_settings};
pub(crate) use taking::{grain, joins};

/// Attempts at a transaction that violates a constraint each time. Failures that may pass by
/// themselves, such as a node that can't be asked, do not count.
const CONFLICT_ATTEMPTS: u32 = 3;

/// After so many attempts at its turn the views show why a transaction is tried again. These take a
/// quarter of a second and more.
const SHOWN_AFTER: u32 = 6;

/// How long rows wait for a column or a table that a statement may bring by another way.
const STATEMENT_PATIENCE: Duration = Duration::from_secs(30);

/// Whether the current transaction can be applied now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    Yes,
    /// The transaction was enqueued, and is no longer the current one.
    Aside,
    /// The process is asked to end.
    Stop,
}

struct Applier {
    post: Post,
    group: Group,
    mode: Mode,
    consolidate: bool,
    log: LogPlace,
    subscription: Subscription,
    session: Option<Session>,
    local_node: String,
    origins: Origins,
    entry: &'static SubscriptionEntry,
    assembled: Vec<u8>,
    in_hand: InHand,
    /// Commits may overtake each other.
    relaxed: bool,
    ahead: Ahead,
    /// The last transaction of which was said that it goes on, and where: each attempt begins with
    /// that.
    gone_on: (u64, u64),
    parking: Parking,
}

/// Reports an error to the leader that this process can't handle.
fn fail(ring: Ring, error: &PgError, lsn: u64) {
    report(ring, error, lsn, false);
}

/// Reports an error to the leader. `comes_again`: the transaction is applied in another way once it
/// is received again.
fn report(ring: Ring, error: &PgError, lsn: u64, comes_again: bool) {
    ring.failure().report(&FailureReport {
        lsn,
        sqlstate: error.sqlstate.code(),
        comes_again,
        reason: error.reason.map_or(0, Reason::code),
        message: error.message.clone(),
        detail: error.detail.clone().unwrap_or_default(),
        hint: error.hint.clone().unwrap_or_default(),
        context: error.context().unwrap_or_default().to_owned(),
    });
    process::set_latch(ring.leader().1);
}

/// After a crash of the server, records the current transaction for the case of another one.
fn note_in_hand(transaction: &Transaction) {
    if crash::is_cautious() {
        let commit_lsn = transaction.commit_lsn();
        let open = transaction.is_open();
        crash::take(
            commit_lsn,
            if open {
                commit_lsn
            } else {
                transaction.end_lsn()
            },
        );
    }
}

/// Adds a hint to an error, if PostgreSQL gives none, and what the applier was doing.
fn explained(error: PgError, doing: &str) -> PgError {
    error
        .with_hint_of_cause("Then run braid.enable_subscription.")
        .with_context(doing)
}

/// Why the leader is to ask for a large transaction again.
fn come_again() -> PgError {
    PgError::new(
        SqlState::SerializationFailure,
        "conflicting rows of a large transaction were deleted",
    )
}

impl Applier {
    fn new(
        number: usize,
        group: Group,
        subscription: Subscription,
        local_node: String,
        entry: &'static SubscriptionEntry,
        own: &'static ApplierEntry,
    ) -> Self {
        let ring = group.ring;
        let provider = (subscription.id, subscription.provider.as_str());
        Self {
            post: Post {
                ring,
                number,
                own,
                entry,
            },
            mode: taking::mode(&subscription),
            consolidate: subscription.options.consolidate,
            relaxed: ring.is_relaxed(),
            ahead: Ahead::new(Applied::default(), AppliedRow::new(subscription.id, number)),
            origins: Origins::new(provider, number, entry),
            group,
            log: LogPlace::default(),
            subscription,
            session: None,
            local_node,
            entry,
            assembled: Vec::new(),
            in_hand: InHand::default(),
            gone_on: (0, 0),
            parking: Parking::default(),
        }
    }

    fn run(&mut self) {
        loop {
            let Some(run) = self.next() else {
                return;
            };
            let started = Instant::now();
            self.post
                .own
                .taken_at
                .store(timestamp::now(), Ordering::Relaxed);
            let done = self.apply_run(run);
            self.post.own.taken_at.store(0, Ordering::Relaxed);
            let busy = u64::try_from(started.elapsed().as_micros()).unwrap_or(0);
            self.post.own.busy.add(busy);
            if !done {
                return;
            }
        }
    }

    /// Apply the transactions that were taken. False when it is time to end.
    fn apply_run(&mut self, run: Run) -> bool {
        if self.mode == Mode::Single || crash::is_cautious() {
            self.apply_singly(run)
        } else {
            self.apply_batch(run)
        }
    }

    /// Apply transactions one by one. False when it is time to end.
    fn apply_singly(&mut self, run: Run) -> bool {
        for sequence in run.first..=run.last {
            let next = if sequence < run.last { sequence + 1 } else { 0 };
            let transaction = self.post.ring.transaction(sequence);
            if !self.apply_until_done(transaction, next) || (next != 0 && !self.post.housekeeping())
            {
                return false;
            }
        }
        true
    }

    /// Whether this group enqueues transactions in wait lists, instead of waiting for their
    /// dependencies. A batch waits, and ends before a transaction that would have to wait.
    fn puts_aside(&self) -> bool {
        self.relaxed && self.mode == Mode::Single
    }

    fn claim(&self) -> Option<Run> {
        if self.puts_aside() {
            let sequence = self.post.ring.take(self.post.number)?;
            return Some(Run {
                first: sequence,
                last: sequence,
            });
        }
        let grain = self.mode.grain(self.relaxed, self.post.ring.is_singly());
        self.post.ring.claim_run(self.post.number, grain)
    }

    /// Put a transaction aside that is not to be applied before it is its turn, if that is not now.
    /// `careful`: it has ended in a unique violation.
    fn put_aside_until_turn(&self, transaction: &Transaction, careful: bool) -> bool {
        self.puts_aside()
            && !transaction.is_open()
            && self
                .post
                .ring
                .put_aside_until_turn(self.post.number, transaction.sequence, careful)
    }

    fn next(&mut self) -> Option<Run> {
        if !self.tend_parked() {
            return None;
        }
        if let Some(run) = self.claim() {
            return self.post.housekeeping().then_some(run);
        }
        if !self.post.ring.takers().contains(&self.post.number) {
            set_latches(&self.post.ring.left_behind());
        }
        let mut idle = true;
        loop {
            if !self.post.housekeeping() {
                return None;
            }
            if self.post.number >= self.post.ring.active_appliers() {
                // The number of appliers was lowered. This process has no current transaction and
                // can't claim another one. But it may have been woken for a transaction that is
                // still there.
                set_latches(&self.post.ring.left_behind());
                return None;
            }
            if !self.tend_parked() {
                return None;
            }
            self.post
                .ring
                .applier_will_wait(self.post.number, Awaited::Transaction);
            if let Some(run) = self.claim() {
                self.post.ring.applier_awake(self.post.number);
                if self.puts_aside() {
                    // Several wake-ups may have hit this process. It does not return for the others
                    // while the claimed transaction waits for a lock.
                    set_latches(&self.post.ring.offer());
                }
                return Some(run);
            }
            // Perhaps the only transactions left are those in wait lists.
            let waits = self.puts_aside() && self.post.ring.waiting_aside() > 0;
            self.post.show(if waits {
                ApplierState::WaitingForDependency
            } else {
                ApplierState::Idle
            });
            if idle {
                // Once for each pause, not for each transaction.
                idle = false;
                transaction::report_statistics(true);
            }
            let wait = if waits { Wait::Dependency } else { Wait::Work };
            let rest = self.rest_before_parked(Duration::from_secs(10));
            latch::wait_as(wait, rest);
            self.post.ring.applier_awake(self.post.number);
            if let Some(session) = self.session.as_mut() {
                session.rest();
            }
        }
    }

    /// Wait for all that a transaction depends on. False when it is time to end.
    fn wait_for_dependencies(&self, transaction: &Transaction) -> bool {
        if !self.relaxed {
            return self
                .post
                .wait_for(transaction.depends_on, ApplierState::WaitingForDependency);
        }
        let sequence = transaction.sequence;
        let (through, single) = transaction.needs(sequence);
        self.post
            .wait_for(through, ApplierState::WaitingForDependency)
            && single
                .into_iter()
                .take_while(|edge| *edge != 0)
                .all(|edge| self.post.wait_for_one(edge))
            && self.wait_for_room(sequence) == Ready::Yes
    }

    /// Waits for all dependencies of a transaction. With wait lists, a claimed transaction has its
    /// dependencies committed. Then the wait is short: until the process that has committed the
    /// last one has recorded it in the ring.
    fn make_ready(&self, transaction: &Transaction) -> Ready {
        let sequence = transaction.sequence;
        let can_go_on = |go_on| if go_on { Ready::Yes } else { Ready::Stop };
        if !self.puts_aside() {
            return can_go_on(self.wait_for_dependencies(transaction));
        }
        // A skipped transaction is passed at its turn.
        if transaction.is_skipped() && self.put_aside_until_turn(transaction, false) {
            return Ready::Aside;
        }
        let (through, single) = transaction.needs(sequence);
        let go_on = self
            .post
            .wait_for(through, ApplierState::WaitingForDependency)
            && single
                .into_iter()
                .take_while(|edge| *edge != 0)
                .all(|edge| self.post.wait_for_one(edge));
        if go_on {
            self.wait_for_room(sequence)
        } else {
            Ready::Stop
        }
    }

    /// Wait for all that comes before a transaction that has failed.
    fn come_to_turn(&self, transaction: &Transaction) -> Ready {
        if self.put_aside_until_turn(transaction, self.in_hand.check_other_keys) {
            Ready::Aside
        } else if self
            .post
            .wait_for(transaction.sequence - 1, ApplierState::WaitingForDependency)
        {
            Ready::Yes
        } else {
            Ready::Stop
        }
    }

    /// Waits until the commit of the run that starts with `first` can be recorded.
    fn wait_for_room(&self, first: u64) -> Ready {
        loop {
            let (mark, position) = self.post.ring.mark();
            // With nothing outstanding before it there is nothing to note, and nobody but this
            // process to wait for.
            if mark + 1 >= first || !self.ahead.is_full(first, position, self.post.ring) {
                return Ready::Yes;
            }
            if self.puts_aside() && self.post.ring.is_ready(mark + 1) {
                // All others may wait like this one: it takes that one first.
                self.post.ring.give_back(self.post.number, first);
                set_latches(&self.post.ring.offer());
                return Ready::Aside;
            }
            if !self.post.wait_for(mark + 1, ApplierState::WaitingForTurn) {
                return Ready::Stop;
            }
        }
    }

    /// Commits the applied part of `run`, whose last transaction ends at `end_lsn`: in the
    /// provider's order at its turn, else now. Returns the end of the commit record.
    fn commit(&mut self, run: Run, end_lsn: u64) -> Result<u64, Trouble> {
        let mut position = end_lsn;
        let mut applied = None;
        if self.relaxed {
            let begin_lsn = self.post.ring.transaction(run.first).commit_lsn();
            let committing = Committing {
                first: run.first,
                last: run.last,
                range: (begin_lsn, end_lsn),
            };
            let note = self.ahead.note(committing, self.post.ring)?;
            position = note.position;
            applied = Some(note.applied);
        } else {
            self.post.wait_for_turn(run.first)?;
        }
        let Some(session) = self.session.as_mut() else {
            return Err(PgError::new(SqlState::InternalError, "nothing to commit").into());
        };
        let local_end = session.commit(position)?;
        if let Some(applied) = applied {
            self.ahead.committed(applied);
        }
        Ok(local_end)
    }

    /// Applies the current transaction, with as many attempts as it takes. `next` is the next
    /// claimed transaction, 0 for none. Returns false when the process is asked to end.
    fn apply_until_done(&mut self, transaction: Transaction, next: u64) -> bool {
        let sequence = transaction.sequence;
        note_in_hand(&transaction);
        let go_on = self.apply_noted(transaction, next);
        if self.post.awaits_statement() {
            self.entry.awaits_statement.store(0, Ordering::Release);
        }
        self.go_on();
        crash::done(sequence);
        go_on
    }

    /// Has the views forget why the current transaction was retried.
    fn go_on(&mut self) {
        if std::mem::take(&mut self.in_hand.is_held_up) {
            self.entry.go_on();
        }
    }

    fn apply_noted(&mut self, mut transaction: Transaction, next: u64) -> bool {
        self.post.show_in_hand(&transaction);
        let sequence = transaction.sequence;
        let mut at_turn = 0;
        let mut violations = 0;
        let mut awaits = None;
        let mut first = !transaction.is_tried();
        self.in_hand = InHand::of(&transaction);
        loop {
            let ready = if first {
                self.make_ready(&transaction)
            } else {
                self.come_to_turn(&transaction)
            };
            match ready {
                Ready::Yes => {}
                Ready::Aside => return true,
                Ready::Stop => return false,
            }
            if transaction.is_elsewhere() {
                return self.have_committed(&transaction, next);
            }
            let alone = self.post.ring.committed() + 1 >= sequence;
            match self.set_aside(&mut transaction, next) {
                Aside::No => {}
                Aside::Done(go_on) => return go_on,
                Aside::Again => {
                    first = false;
                    continue;
                }
            }
            if !first {
                transaction.rewind();
            }
            self.post.show(ApplierState::Applying);
            self.begin_attempt(&transaction, first);
            let outcome = match error::catch(|| self.apply(&mut transaction)) {
                Ok(outcome) => outcome,
                Err(error) => Err(Trouble::Error(error)),
            };
            let pieces = self.in_hand.attempt.pieces.take();
            let trouble = match outcome {
                Ok(local_end) => {
                    self.post.has_committed(sequence, local_end, next);
                    return true;
                }
                Err(trouble) => trouble,
            };
            let doing = self.doing(transaction.end_lsn());
            let statement = self.roll_back();
            first = false;
            let Trouble::Error(error) = trouble else {
                continue;
            };
            let mut error = explained(error, &doing);
            if let Some(pieces) = pieces {
                pieces.explain(&mut error);
            }
            match self.wait_for_its_commit(&transaction, &error, alone) {
                Settled::No => {}
                Settled::AtItsTurn => continue,
                Settled::Left(outcome) => {
                    fail(self.post.ring, &outcome, transaction.commit_lsn());
                    return false;
                }
            }
            self.in_hand.check_other_keys |= is_in_the_way(error.sqlstate);
            if self.post.ring.stop_requested() {
                return false;
            }
            // An earlier transaction may still move the blocking row.
            let way_made = alone && self.evict(&mut error);
            if transaction.is_open() {
                let error = if way_made { come_again() } else { error };
                self.fail_open(&transaction, error, statement.as_deref());
                return false;
            }
            if !alone || way_made {
                continue;
            }
            at_turn += 1;
            let awaited = self.awaits_statement(&error, &mut awaits);
            let again = self.is_tried_again(&error, &mut violations) || awaited;
            if !again {
                self.note_failed_statement(statement.as_deref(), &error);
            }
            if !again && self.parks(&error) {
                self.go_on();
                let why = self.why_parked(&error, at_turn);
                if let Some(done) = self.park(&transaction, next, why) {
                    return done;
                }
                at_turn = 0;
                violations = 0;
                continue;
            }
            if !again {
                fail(self.post.ring, &error, transaction.end_lsn());
                return false;
            }
            self.pause(&error, at_turn, transaction.end_lsn());
        }
    }

    /// Rolls an attempt back that has failed. Returns the statement that it was running.
    fn roll_back(&mut self) -> Option<Box<StatementInHand>> {
        let statement = self.session.as_mut().and_then(Session::failed_statement);
        error::abort();
        versions::forget();
        if let Some(session) = self.session.as_mut() {
            session.forget_transaction();
        }
        self.post.own.retries.fetch_add(1, Ordering::Relaxed);
        self.entry.retries.fetch_add(1, Ordering::Relaxed);
        statement
    }

    /// After a failure, a transaction is applied row by row: another session may have inserted a
    /// row that did not exist when it was looked up.
    fn begin_attempt(&mut self, transaction: &Transaction, first: bool) {
        let tried = self.entry.anew.row_by_row.load(Ordering::Relaxed);
        let bulk = first && tried != transaction.commit_lsn();
        self.in_hand.attempt = Attempt::new(bulk);
        // An open transaction that is not applied in bulk has failed before.
        self.in_hand.check_other_keys |= transaction.is_open() && !bulk;
    }

    /// The line of an error's CONTEXT that says what the applier was doing.
    fn doing(&self, end_lsn: u64) -> String {
        self.session.as_ref().map_or_else(
            || {
                format!(
                    "processing remote data for subscription \"{}\"",
                    self.subscription.name
                )
            },
            |session| session.doing(end_lsn),
        )
    }

    /// Whether a transaction that has failed at its turn is tried again, after so many violations
    /// of a constraint.
    fn is_tried_again(&self, error: &PgError, violations: &mut u32) -> bool {
        match policy::for_apply(error.sqlstate) {
            _ if self.subscription.options.disable_on_error || self.parks_by_lock(error) => false,
            Policy::Retry => true,
            Policy::Conflict => {
                *violations += 1;
                *violations < CONFLICT_ATTEMPTS
            }
            Policy::Reconnect | Policy::Stop => false,
        }
    }

    /// Whether a failed transaction may wait for a statement: rows of one node can arrive before
    /// another node's statement under which they were written. `since`: when it first failed like
    /// this. While it waits, the subscription's entry shows that to later transactions.
    fn awaits_statement(&self, error: &PgError, since: &mut Option<Instant>) -> bool {
        let awaits = self.subscription.options.replicate_ddl
            && matches!(
                error.sqlstate,
                SqlState::UndefinedColumn | SqlState::UndefinedTable
            )
            && since.get_or_insert_with(Instant::now).elapsed() < STATEMENT_PATIENCE;
        let told = &self.entry.awaits_statement;
        told.store(u32::from(awaits), Ordering::Release);
        awaits
    }

    /// Has `braid.ddl_log` show a statement that can't be run on this node. Outside of a
    /// transaction.
    fn note_failed_statement(&self, statement: Option<&StatementInHand>, error: &PgError) {
        let Some(statement) = statement else { return };
        if !matches!(
            policy::for_apply(error.sqlstate),
            Policy::Stop | Policy::Conflict
        ) {
            return;
        }
        let noted = error::transaction(|| {
            statement.note_failed(&self.subscription.name, error);
            Ok(())
        });
        if let Err(failure) = noted {
            failure.log("could not write down that a statement has failed");
        }
    }

    /// Before a transaction is tried again at its turn, for the `at_turn`th time. Has the views
    /// show the error, if the attempts go on for a while.
    fn pause(&mut self, error: &PgError, at_turn: u32, end_lsn: u64) {
        if error.peer_lock.is_some() || at_turn >= SHOWN_AFTER {
            self.entry.hold_up(error, end_lsn);
            self.in_hand.is_held_up = true;
        }
        if at_turn == 1 || at_turn.is_multiple_of(10) {
            let name = &self.subscription.name;
            error.log(&format!(
                "subscription \"{name}\" tries a transaction again"
            ));
        }
        let pause = policy::backoff_ms(at_turn, 5, 1000);
        latch::wait_as(Wait::Retry, Duration::from_millis(pause));
    }

    /// An open transaction has failed. Its bytes are gone: the leader has to ask for them again.
    fn fail_open(
        &self,
        transaction: &Transaction,
        error: PgError,
        statement: Option<&StatementInHand>,
    ) {
        self.note_failed_statement(statement, &error);
        let lsn = transaction.commit_lsn();
        let mut comes_again = false;
        if self.in_hand.attempt.bulk && policy::for_apply(error.sqlstate) == Policy::Conflict {
            self.entry.anew.row_by_row.store(lsn, Ordering::Relaxed);
            error.log(&format!(
                "subscription \"{}\" receives a large transaction again, to apply it row by row",
                self.subscription.name
            ));
            comes_again = true;
        } else if self.parks(&error) {
            self.park_when_it_comes(transaction, &error);
            comes_again = true;
        }
        report(self.post.ring, &error, lsn, comes_again);
    }

    /// Deletes the rows that block the transaction that was just rolled back with `error`. Returns
    /// false if no row blocks it, or if the deletion failed. If that failure is permanent, it
    /// replaces `error`.
    fn evict(&mut self, error: &mut PgError) -> bool {
        let Some(session) = self.session.as_mut() else {
            return false;
        };
        match session.evict() {
            Ok(false) => false,
            Ok(true) => {
                session.publish_counts(self.entry);
                true
            }
            Err(failure) => {
                error::abort();
                session.forget_transaction();
                // Deletions of losing rows may still have to be announced to the other nodes.
                registry::wake_manager(process::my_database());
                failure.log(&format!(
                    "subscription \"{}\" could not make way for a transaction",
                    self.subscription.name
                ));
                if policy::for_apply(failure.sqlstate) == Policy::Stop {
                    *error = failure;
                }
                false
            }
        }
    }

    /// Apply and commit a transaction. Returns the end of the local commit record.
    fn apply(&mut self, transaction: &mut Transaction) -> Result<u64, Trouble> {
        if transaction.is_skipped() {
            if let Some(local_end) = self.pass_prepared(transaction)? {
                return Ok(local_end);
            }
            return Ok(self.pass(transaction)?);
        }
        let split = transaction.is_split().then_some(transaction.sequence);
        let mut end_lsn = None;
        let mut begun = false;
        let mut assembled = std::mem::take(&mut self.assembled);
        while !matches!(self.in_hand.attempt.step, Some(Step::IsPrepared)) {
            match next_frame(transaction, &mut assembled)? {
                FrameRead::Frame(frame) => self.frame(frame, split, &mut begun, &mut end_lsn)?,
                FrameRead::Assembled => {
                    self.frame(&assembled, split, &mut begun, &mut end_lsn)?;
                }
                FrameRead::Pending => {
                    self.post.wait_for_rest()?;
                }
                FrameRead::End => break,
            }
        }
        assembled.clear();
        assembled.shrink_to(1 << 20);
        self.assembled = assembled;
        let Some(end_lsn) = end_lsn else {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                "transaction without a commit from the provider",
            )
            .into());
        };
        if transaction.is_skipped() {
            // The skipped transaction is known by its end, which was not known when it began.
            error::abort();
            if let Some(session) = self.session.as_mut() {
                session.forget_transaction();
            }
            return Ok(self.pass(transaction)?);
        }
        let entry = self.entry;
        let step = self.in_hand.attempt.step.take();
        if let Some(step @ (Step::IsPrepared | Step::Commit(_) | Step::Rollback(..))) = &step {
            let local_end = self.take_step(step, transaction.sequence, end_lsn)?;
            entry.transactions.fetch_add(1, Ordering::Relaxed);
            self.post.own.transactions.fetch_add(1, Ordering::Relaxed);
            return Ok(local_end);
        }
        let Some(session) = self.session.as_mut() else {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                "transaction without a begin from the provider",
            )
            .into());
        };
        session.finish()?;
        let counts = session.counts();
        self.finish_pieces()?;
        let run = Run {
            first: transaction.sequence,
            last: transaction.sequence,
        };
        let local_end = match &step {
            Some(step) => self.take_step(step, transaction.sequence, end_lsn)?,
            None => self.commit(run, end_lsn)?,
        };
        self.count_committed(1, counts.changes());
        Ok(local_end)
    }

    /// Publishes the session's counts after a commit of `transactions` source transactions as one.
    fn count_committed(&mut self, transactions: u64, changes: u64) {
        if let Some(session) = self.session.as_mut() {
            session.publish_counts(self.entry);
        }
        // Publishing counted one.
        self.entry
            .transactions
            .fetch_add(transactions.saturating_sub(1), Ordering::Relaxed);
        self.post
            .own
            .transactions
            .fetch_add(transactions, Ordering::Relaxed);
        self.post.own.changes.fetch_add(changes, Ordering::Relaxed);
    }

    /// Stamp commits with the origin that stands for the transaction's node, and open the
    /// transaction, or a batch.
    fn begin(&mut self, begin: &Begin<'_>, batch: bool) -> Result<(), PgError> {
        if self.session.is_none() {
            self.read_log()?;
        }
        self.origins.use_that_of(begin)?;
        let tables_version = self.entry.tables_version.load(Ordering::Acquire);
        // Changes that come straight from their origin are known to be later than the local changes
        // of that origin.
        let known = begin.origin.is_empty()
            && self.in_hand.attempt.pieces.is_none()
            && !self.in_hand.attempt.is_rest;
        let same_stream = if known {
            None
        } else {
            Some(self.origins.all_of(begin, tables_version)?)
        };
        let check_other_keys = self.in_hand.check_other_keys;
        self.follow_versions()?;
        let Some(session) = self.session.as_mut() else {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                "stream without a header from the provider",
            ));
        };
        session.look_for_rows_in_the_way(check_other_keys && !batch);
        session.allow_bulk(self.in_hand.attempt.bulk);
        session.know_stream_by(same_stream);
        if batch {
            session.begin_batch(begin, tables_version);
        } else {
            session.begin(begin, tables_version);
        }
        Ok(())
    }

    /// Go past a transaction without applying it, and take note of that in the same commit.
    fn pass(&mut self, transaction: &Transaction) -> Result<u64, PgError> {
        self.origins.use_that_of_provider()?;
        let end_lsn = transaction.end_lsn();
        let id = i64::from(self.subscription.id);
        while self.post.ring.committed() + 1 < transaction.sequence {
            pgrx::check_for_interrupts!();
            latch::wait_as(Wait::Turn, Duration::from_millis(5));
        }
        let committed = error::transaction(|| {
            origin::stands_for(end_lsn, 0);
            subscription::execute(
                "update braid.subscription set skip_lsn = null where subscription_id = $1",
                &[id.into()],
            )?;
            split::leave(self.subscription.id, transaction.commit_lsn())
        })?;
        pgrx::log!(
            "subscription \"{}\" has skipped {} that ends at {}",
            self.subscription.name,
            committed.map_or_else(
                || "the transaction".to_owned(),
                |changes| format!("all but the first {changes} changes of the transaction")
            ),
            lsn_text(end_lsn)
        );
        Ok(transaction::last_commit_end())
    }
}
