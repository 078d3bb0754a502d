//! The applier process: takes transactions from the group's ring, applies them, commits them in the provider's order, or, where the
//! subscription allows it, as soon as what they depend on is committed.
//!
//! States of a transaction in hand, all in this process until the last:
//! taken -> (waits for what it depends on) -> applied, not committed -> (waits for its turn, if there are turns) -> committed.
//! Where commits may overtake each other and transactions are not joined, none waits here: what can't be applied yet is put aside, in the
//! ring, where whoever comes takes it once it can be (`Applier::puts_aside`). So the only thing that an applier waits for with a transaction in hand
//! is what PostgreSQL makes it wait for, a lock, say; and then the others go on with whatever does not depend on that one.
//! A transaction that fails while others are ahead is rolled back and applied again when it is its turn: then only its own
//! merits count, and only then is an error taken for one.
//!
//! Deadlocks: an applier that waits for its turn may hold a lock that one ahead of it waits for. PostgreSQL's deadlock detector
//! does not see the wait for the turn, so the waiting one looks: if it stands in the way, it rolls back. The way may lead through
//! appliers of other subscriptions, which wait for their turn behind others of theirs.

mod batch;
pub(crate) mod here;
mod park;
mod piece;
mod prepared;
pub(crate) mod running;

use braid_bgworker::subscription_option::ApplyMode;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use braid_apply::{Identity, Item, Session, is_in_the_way, is_rule};
use braid_bgworker::applied::{Applied, Committing};
use braid_bgworker::policy::{self, Policy};
use braid_decoder::REPLACED_PREFIX;
use braid_gir::{Begin, Change, Reader, Record, StreamHeader, Tag, Truncate, lsn_text};
use braid_node::applied::AppliedRow;
use braid_node::group::{Group, LogPlace};
use braid_node::origin::{self, OriginId};
use braid_node::registry::{self, ApplierEntry, SubscriptionEntry};
use braid_node::subscription::{self, Subscription};
use braid_node::{crash, split};
use braid_postgres::error::{self, PgError};
use braid_postgres::process::blocking_pids;
use braid_postgres::wait::{self, Wait};
use braid_postgres::{latch, process, timestamp, worker};
use braid_ring::{ApplierState, FailureReport, FrameRead, Grain, Ring, Run, Transaction, Wakes};
use pgrx::pg_sys;

use park::{Aside, Parking};
use piece::{Part, Pieces};
use prepared::{Settled, Step};

/// Looks at a counter this often before it sleeps: about the time that a small transaction takes elsewhere.
const SPINS: u32 = 400;
/// Small transactions are taken many at a time: to hand each to another process mostly costs more than to apply it. Larger ones are
/// taken one by one, so that they are applied side by side. Where the leader has found that all appliers are faster than one, so are small ones.
const GRAIN: Grain = Grain { run: 128, small: 2 };
/// What is joined into one transaction in batch mode: what is small beside the cost of a commit, and not so much that readers
/// wait for it, or locks are held, for longer than some milliseconds.
const BATCH: Grain = Grain {
    run: 1024,
    small: 128,
};

/// The same where all appliers together are faster than one: the more changes two batches have, the sooner they have a key in common, and
/// one waits for the whole of the other. A quarter of them still saves nearly all that a commit costs.
const SHARED_BATCH: Grain = Grain {
    run: 256,
    small: 128,
};

/// What is joined where changes of a row are made one, and one applier has it: the more are joined, the fewer are left to be applied. The leader's
/// list of transactions is to hold twice as many, as below.
const CONSOLIDATE: Grain = Grain {
    run: 4096,
    small: 128,
};

/// What is regrouped in aggregate mode: the more, the longer the runs of a table. The leader's list of transactions is to hold
/// twice as many, so that it goes on meanwhile.
const AGGREGATE: Grain = Grain {
    run: 2048,
    small: 1024,
};

/// How transactions become local ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// One by one.
    Single,
    /// Small ones are joined.
    Batch,
    /// As that, and many changes of a row become one: the more are joined, the more of them.
    Consolidate,
    /// As that, and their changes are regrouped by table.
    Aggregate,
}

impl Mode {
    fn of(subscription: &Subscription) -> Self {
        match subscription.options.apply_mode {
            ApplyMode::Batch if subscription.options.consolidate => Self::Consolidate,
            ApplyMode::Batch => Self::Batch,
            ApplyMode::Aggregate => Self::Aggregate,
            ApplyMode::Parallel | ApplyMode::Serial => Self::Single,
        }
    }

    /// What is taken at once. `singly`: one by one, or what comes near it in this mode. `relaxed`: commits may overtake each other. Then what is
    /// taken together with one that waits for a lock would wait for nothing.
    fn grain(self, relaxed: bool, singly: bool) -> Grain {
        match self {
            Self::Single if singly || relaxed => Grain::ONE,
            Self::Single => GRAIN,
            Self::Batch | Self::Consolidate if singly => SHARED_BATCH,
            Self::Batch => BATCH,
            Self::Consolidate => CONSOLIDATE,
            Self::Aggregate => AGGREGATE,
        }
    }
}

/// Whether transactions are committed together: the more, the less each costs.
#[must_use]
pub(crate) fn joins(subscription: &Subscription) -> bool {
    Mode::of(subscription) != Mode::Single
}

/// What an applier takes at once of a subscription.
#[must_use]
pub(crate) fn grain(subscription: &Subscription, singly: bool) -> Grain {
    Mode::of(subscription).grain(subscription.options.is_relaxed(), singly)
}
/// How long a wait for the turn goes on before this process asks whether it is in the way.
const DEADLOCK_CHECK: Duration = Duration::from_millis(20);
/// Statistics are reported after about this many transactions of the stream.
const STATISTICS_EVERY: u64 = 64;
/// Attempts at a transaction that violates a constraint each time: those that fail for something that passes by itself, another node that can't be
/// asked, say, do not count.
const CONFLICT_ATTEMPTS: u32 = 3;

/// What the leader starts an applier with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arguments {
    /// Subscription.
    pub subscription_id: u32,
    /// Number of the applier, from 0.
    pub number: usize,
    /// The group's shared memory.
    pub handle: u32,
    /// It applies the transaction that runs at the provider, and no other.
    pub running: bool,
}

impl Arguments {
    /// For `bgw_extra`.
    #[must_use]
    pub fn pack(self) -> worker::Extra {
        worker::Extra::pack(&[
            u64::from(self.subscription_id),
            self.number as u64,
            u64::from(self.handle),
            u64::from(self.running),
        ])
    }

    fn unpack(extra: worker::Extra) -> Self {
        let small = |index| u32::try_from(extra.word(index)).unwrap_or(0);
        Self {
            subscription_id: small(0),
            number: usize::try_from(extra.word(1)).unwrap_or(0),
            handle: small(2),
            running: small(3) == 1,
        }
    }
}

/// Why a transaction could not be applied now.
enum Trouble {
    /// An error.
    Error(PgError),
    /// This process is in the way of one that is ahead.
    InTheWay,
}

impl From<PgError> for Trouble {
    fn from(error: PgError) -> Self {
        Self::Error(error)
    }
}

impl From<braid_gir::Error> for Trouble {
    fn from(error: braid_gir::Error) -> Self {
        Self::Error(error.into())
    }
}

/// Whether a transaction in hand can be applied now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    Yes,
    /// It is no longer in hand.
    Aside,
    /// It is time to end.
    Stop,
}

struct Applier {
    number: usize,
    group: Group,
    ring: Ring,
    mode: Mode,
    consolidate: bool,
    log: LogPlace,
    subscription: Subscription,
    session: Option<Session>,
    local_node: String,
    origins: HashMap<String, OriginId>,
    /// All of the subscription's for nodes; as of a version of the tables' states.
    all_origins: (u32, HashMap<String, Rc<[OriginId]>>),
    entry: &'static SubscriptionEntry,
    own: &'static ApplierEntry,
    assembled: Vec<u8>,
    /// What is applied next ended in a unique violation before, or can't be applied twice.
    careful: bool,
    /// The next attempt may insert in bulk.
    bulk: bool,
    /// Commits may overtake each other.
    relaxed: bool,
    applied: Applied,
    applied_row: AppliedRow,
    /// The transaction in hand, if it may be committed in pieces.
    pieces: Option<Pieces>,
    /// The last transaction of which was said that it goes on, and where: each attempt begins with that.
    gone_on: (u64, u64),
    parking: Parking,
    /// What the transaction in hand is, if it is prepared, or was.
    step: Option<Step>,
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = u32::try_from(argument.value()).unwrap_or(0);
    let arguments = Arguments::unpack(worker::Extra::mine());
    worker::connect(database);
    let Some(entry) = registry::subscription(arguments.subscription_id) else {
        return;
    };
    let Some(own) = entry.appliers.get(arguments.number) else {
        return;
    };
    let group = match Group::attach(arguments.handle) {
        Ok(group) => group,
        Err(error) => {
            error.log("applier");
            return;
        }
    };
    if arguments.number == 0 {
        entry
            .first_applier_latch
            .store(process::my_latch(), Ordering::Release);
    }
    enter(own);
    group
        .ring
        .register_applier(arguments.number, process::my_pid(), process::my_latch());
    prepare_settings();
    let ring = group.ring;
    // With the fence in the leader's `wait_for_old_appliers`: a leader that came after the one which started this process waits
    // for it, or is seen here.
    fence(Ordering::SeqCst);
    if entry.leader_pid.load(Ordering::Acquire) != ring.leader().0 {
        return;
    }
    let relaxed = ring.is_relaxed();
    let applied_row = AppliedRow::new(arguments.subscription_id, arguments.number);
    let started = error::transaction(|| {
        let subscription = subscription::load(arguments.subscription_id)?
            .ok_or_else(|| PgError::new("42704", "subscription is gone"))?;
        let local_node = subscription::local_node()?
            .ok_or_else(|| PgError::new("55000", "this database has no node"))?;
        let applied = if relaxed {
            applied_row.read(ring.mark().1)?
        } else {
            Applied::default()
        };
        Ok((subscription, local_node, applied))
    });
    let (subscription, local_node, applied) = match started {
        Ok(started) => started,
        Err(error) => {
            fail(ring, &error, 0);
            return;
        }
    };
    // The leader waits for what the subscription asks for, once for many commits, before it confirms them; only one after the
    // other each commit waits for itself.
    worker::set(
        "synchronous_commit",
        if subscription.options.apply_mode == ApplyMode::Serial {
            subscription.options.synchronous_commit.name()
        } else {
            "off"
        },
    );
    worker::report_activity(&format!(
        "applying changes of subscription {}",
        subscription.name
    ));
    crash::enter(arguments.subscription_id, Some(arguments.number));
    let mut applier = Applier::new(
        arguments.number,
        group,
        subscription,
        local_node,
        entry,
        own,
    );
    applier.applied = applied;
    if arguments.running {
        applier.apply_running();
    } else {
        applier.run();
    }
}

/// Show this process in its entry, until it ends.
fn enter(own: &'static ApplierEntry) {
    own.pid.store(process::my_pid(), Ordering::Release);
    own.start();
    own.wait.store(0, Ordering::Relaxed);
    wait::show_in(&own.wait);
    // SAFETY: the callback only touches shared memory, which outlives the process.
    unsafe {
        pg_sys::before_shmem_exit(
            Some(on_exit),
            pg_sys::Datum::from(std::ptr::from_ref(own).addr()),
        );
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: i32, argument: pg_sys::Datum) {
    // SAFETY: the argument is the address of this applier's entry in the registry.
    let own = unsafe { &*std::ptr::with_exposed_provenance::<ApplierEntry>(argument.value()) };
    if own.pid.load(Ordering::Acquire) == process::my_pid() {
        own.state.store(0, Ordering::Relaxed);
        own.pid.store(0, Ordering::Release);
    }
}

/// Settings that make what arrives independent of this server's and the roles' own: as PostgreSQL's apply worker has them.
pub fn prepare_settings() {
    for (name, value) in [
        ("session_replication_role", "replica"),
        ("search_path", ""),
        ("datestyle", "ISO"),
        ("intervalstyle", "postgres"),
        ("lc_monetary", "C"),
        ("xmloption", "content"),
        ("default_transaction_isolation", "read committed"),
        ("default_transaction_read_only", "off"),
        ("statement_timeout", "0"),
        ("idle_in_transaction_session_timeout", "0"),
    ] {
        worker::set(name, value);
    }
}

fn set_latches(wakes: &Wakes) {
    for latch in wakes.iter() {
        process::set_latch(latch);
    }
}

/// Tell the leader of an error that this process can't deal with.
fn fail(ring: Ring, error: &PgError, lsn: u64) {
    ring.failure().report(&FailureReport {
        lsn,
        sqlstate: error.sqlstate.clone(),
        message: error.message.clone(),
        detail: error.detail.clone().unwrap_or_default(),
        hint: error.hint.clone().unwrap_or_default(),
        context: error.context().unwrap_or_default().to_owned(),
    });
    process::set_latch(ring.leader().1);
}

/// Notes what is taken in hand, after a crash.
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

/// An error with what to do about it, where PostgreSQL does not say so, and what was being done.
fn explained(error: PgError, doing: &str) -> PgError {
    error
        .with_hint_of_cause("Then run braid.enable_subscription.")
        .with_context(doing)
}

/// Why the leader is to ask for a large transaction again.
fn come_again() -> PgError {
    PgError::new("40001", "rows in the way of a large transaction have left")
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
        Self {
            number,
            mode: Mode::of(&subscription),
            consolidate: subscription.options.consolidate,
            relaxed: ring.is_relaxed(),
            applied: Applied::default(),
            applied_row: AppliedRow::new(subscription.id, number),
            ring,
            group,
            log: LogPlace::default(),
            subscription,
            session: None,
            local_node,
            origins: HashMap::new(),
            all_origins: (0, HashMap::new()),
            entry,
            own,
            assembled: Vec::new(),
            careful: false,
            bulk: true,
            pieces: None,
            gone_on: (0, 0),
            parking: Parking::default(),
            step: None,
        }
    }

    fn run(&mut self) {
        loop {
            let Some(run) = self.next() else {
                return;
            };
            let started = Instant::now();
            self.own.taken_at.store(timestamp::now(), Ordering::Relaxed);
            let done = self.apply_run(run);
            self.own.taken_at.store(0, Ordering::Relaxed);
            let busy = u64::try_from(started.elapsed().as_micros()).unwrap_or(0);
            self.own.busy.add(busy);
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
            let transaction = self.ring.transaction(sequence);
            if !self.apply_until_done(transaction, next) || (next != 0 && !self.housekeeping()) {
                return false;
            }
        }
        true
    }

    fn show(&self, state: ApplierState) {
        self.ring.set_state(self.number, state);
        self.own.state.store(state.as_u32(), Ordering::Relaxed);
    }

    fn show_in_hand(&self, transaction: &Transaction) {
        self.own
            .commit_lsn
            .store(transaction.commit_lsn(), Ordering::Relaxed);
    }

    /// Serve interrupts and the configuration. False when it is time to end.
    fn housekeeping(&self) -> bool {
        pgrx::check_for_interrupts!();
        worker::reload_settings();
        !self.ring.stop_requested()
    }

    /// Whether this group puts transactions aside instead of waiting for what they depend on. A batch waits, and breaks off before what would
    /// have to.
    fn puts_aside(&self) -> bool {
        self.relaxed && self.mode == Mode::Single
    }

    fn claim(&self) -> Option<Run> {
        if self.puts_aside() {
            let sequence = self.ring.take(self.number)?;
            return Some(Run {
                first: sequence,
                last: sequence,
            });
        }
        let grain = self.mode.grain(self.relaxed, self.ring.is_singly());
        self.ring.claim_run(self.number, grain)
    }

    /// Put a transaction aside that is not to be applied before it is its turn, if that is not now. `careful`: it has ended in a unique
    /// violation.
    fn put_aside_until_turn(&self, transaction: &Transaction, careful: bool) -> bool {
        self.puts_aside()
            && !transaction.is_open()
            && self
                .ring
                .put_aside_until_turn(self.number, transaction.sequence, careful)
    }

    fn next(&mut self) -> Option<Run> {
        if !self.tend_parked() {
            return None;
        }
        if let Some(run) = self.claim() {
            return self.housekeeping().then_some(run);
        }
        if !self.ring.takers().contains(&self.number) {
            set_latches(&self.ring.left_behind());
        }
        let mut idle = true;
        loop {
            if !self.housekeeping() {
                return None;
            }
            if self.number >= self.ring.active_appliers() {
                // There are to be fewer. Nothing is in hand, and nothing can be taken any more. It may have been woken for something.
                set_latches(&self.ring.left_behind());
                return None;
            }
            if !self.tend_parked() {
                return None;
            }
            self.ring.applier_will_wait(self.number, u64::MAX - 1);
            if let Some(run) = self.claim() {
                self.ring.applier_awake(self.number);
                if self.puts_aside() {
                    // It may have been woken for more than that, and does not come back if that one waits for a lock.
                    set_latches(&self.ring.offer());
                }
                return Some(run);
            }
            // What waits for others may be all that there is.
            let waits = self.puts_aside() && self.ring.waiting_aside() > 0;
            self.show(if waits {
                ApplierState::WaitingForDependency
            } else {
                ApplierState::Idle
            });
            if idle {
                // Once for each pause, not for each transaction.
                idle = false;
                // SAFETY: outside of a transaction.
                unsafe { pg_sys::pgstat_report_stat(true) };
            }
            let wait = if waits { Wait::Dependency } else { Wait::Work };
            latch::wait_as(wait, Duration::from_secs(10));
            self.ring.applier_awake(self.number);
            if let Some(session) = self.session.as_mut() {
                session.rest();
            }
        }
    }

    /// Wait until `sequence` is committed. False when it is time to end.
    fn wait_for(&self, sequence: u64, state: ApplierState) -> bool {
        for _ in 0..SPINS {
            if self.ring.committed() >= sequence {
                return true;
            }
            std::hint::spin_loop();
        }
        self.show(state);
        while self.ring.committed() < sequence {
            if !self.housekeeping() {
                return false;
            }
            self.ring.applier_will_wait(self.number, sequence);
            if self.ring.committed() < sequence {
                let wait = match state {
                    ApplierState::WaitingForTurn => Wait::Turn,
                    _ => Wait::Dependency,
                };
                latch::wait_as(wait, Duration::from_secs(1));
            }
            self.ring.applier_awake(self.number);
        }
        true
    }

    /// Wait until this very transaction is committed. False when it is time to end.
    fn wait_for_one(&self, sequence: u64) -> bool {
        for _ in 0..SPINS {
            if self.ring.is_done(sequence) {
                return true;
            }
            std::hint::spin_loop();
        }
        self.show(ApplierState::WaitingForDependency);
        while !self.ring.is_done(sequence) {
            if !self.housekeeping() {
                return false;
            }
            self.ring.applier_will_wait_for(self.number, sequence);
            if !self.ring.is_done(sequence) {
                latch::wait_as(Wait::Dependency, Duration::from_secs(1));
            }
            self.ring.applier_awake(self.number);
        }
        true
    }

    /// Wait for all that a transaction depends on. False when it is time to end.
    fn wait_for_dependencies(&self, transaction: &Transaction) -> bool {
        if !self.relaxed {
            return self.wait_for(transaction.depends_on, ApplierState::WaitingForDependency);
        }
        let sequence = transaction.sequence;
        let (through, single) = transaction.needs(sequence);
        self.wait_for(through, ApplierState::WaitingForDependency)
            && single
                .into_iter()
                .take_while(|edge| *edge != 0)
                .all(|edge| self.wait_for_one(edge))
            && self.wait_for_room(sequence) == Ready::Yes
    }

    /// Wait for all that a transaction depends on. Where transactions are put aside, what was taken has nothing to wait for, but for a moment:
    /// until who has committed the last of that has said so.
    fn make_ready(&self, transaction: &Transaction) -> Ready {
        let sequence = transaction.sequence;
        let can_go_on = |go_on| if go_on { Ready::Yes } else { Ready::Stop };
        if !self.puts_aside() {
            return can_go_on(self.wait_for_dependencies(transaction));
        }
        // It is passed at its turn.
        if transaction.is_skipped() && self.put_aside_until_turn(transaction, false) {
            return Ready::Aside;
        }
        let (through, single) = transaction.needs(sequence);
        let go_on = self.wait_for(through, ApplierState::WaitingForDependency)
            && single
                .into_iter()
                .take_while(|edge| *edge != 0)
                .all(|edge| self.wait_for_one(edge));
        if go_on {
            self.wait_for_room(sequence)
        } else {
            Ready::Stop
        }
    }

    /// Wait for all that comes before a transaction that has failed.
    fn come_to_turn(&self, transaction: &Transaction) -> Ready {
        if self.put_aside_until_turn(transaction, self.careful) {
            Ready::Aside
        } else if self.wait_for(transaction.sequence - 1, ApplierState::WaitingForDependency) {
            Ready::Yes
        } else {
            Ready::Stop
        }
    }

    /// Wait until the commit of what starts with `first` can be noted.
    fn wait_for_room(&self, first: u64) -> Ready {
        loop {
            let (mark, position) = self.ring.mark();
            // With nothing outstanding before it there is nothing to note, and nobody but this process to wait for.
            if mark + 1 >= first
                || !self
                    .applied
                    .is_full(first, position, |sequence| self.ring.is_done(sequence))
            {
                return Ready::Yes;
            }
            if self.puts_aside() && self.ring.is_ready(mark + 1) {
                // All others may wait like this one: it takes that one first.
                self.ring.give_back(self.number, first);
                set_latches(&self.ring.offer());
                return Ready::Aside;
            }
            if !self.wait_for(mark + 1, ApplierState::WaitingForTurn) {
                return Ready::Stop;
            }
        }
    }

    /// Commit what is applied of `run`, whose last transaction ends at `end_lsn`: in the provider's order when it is its turn, else
    /// now. Returns the end of the commit record.
    fn commit(&mut self, run: Run, end_lsn: u64) -> Result<u64, Trouble> {
        let mut position = end_lsn;
        let mut applied = None;
        if self.relaxed {
            let begin_lsn = self.ring.transaction(run.first).commit_lsn();
            let committing = Committing {
                first: run.first,
                last: run.last,
                range: (begin_lsn, end_lsn),
            };
            let note = self.applied.note(committing, self.ring.mark(), |sequence| {
                self.ring.is_done(sequence)
            });
            if note.is_needed {
                // Also when the transaction itself has written nothing: what comes after it may be committed already.
                self.applied_row.write(&note.applied)?;
            }
            position = note.position;
            applied = Some(note.applied);
        } else {
            self.wait_for_turn(run.first)?;
        }
        let Some(session) = self.session.as_mut() else {
            return Err(PgError::new("XX000", "nothing to commit").into());
        };
        let local_end = session.commit(position)?;
        if let Some(applied) = applied {
            self.applied = applied;
        }
        Ok(local_end)
    }

    /// Wait for the turn with an open transaction.
    fn wait_for_turn(&self, sequence: u64) -> Result<(), Trouble> {
        self.wait_in_transaction(sequence - 1, sequence)
    }

    /// Wait until `until` is committed, with an open transaction that starts with `mine`.
    fn wait_in_transaction(&self, until: u64, mine: u64) -> Result<(), Trouble> {
        for _ in 0..SPINS {
            if self.ring.committed() >= until {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.show(ApplierState::WaitingForTurn);
        while self.ring.committed() < until {
            pgrx::check_for_interrupts!();
            if self.ring.stop_requested() {
                return Err(PgError::new("57P01", "subscription is stopping").into());
            }
            self.ring.applier_will_wait(self.number, until);
            let mut woken = true;
            if self.ring.committed() < until {
                woken = latch::wait_as(Wait::Turn, DEADLOCK_CHECK);
            }
            self.ring.applier_awake(self.number);
            if !woken && self.is_in_the_way(mine) {
                return Err(Trouble::InTheWay);
            }
        }
        Ok(())
    }

    /// Whether one that is ahead waits, directly or through others, for a lock that this process holds. An applier that waits for its
    /// turn waits for those ahead of it.
    fn is_in_the_way(&self, sequence: u64) -> bool {
        let me = process::my_pid();
        let mut seen: Vec<i32> = Vec::new();
        let mut next: Vec<i32> = self.ring.ahead_of(sequence).collect();
        while let Some(pid) = next.pop() {
            if pid == 0 || seen.contains(&pid) || seen.len() > 200 {
                continue;
            }
            seen.push(pid);
            let blockers = blocking_pids(pid);
            if blockers.contains(&me) {
                return true;
            }
            next.extend(blockers);
            next.extend(registry::waited_for_by(pid));
        }
        false
    }

    /// Apply a transaction, as often as it takes; `next` is the next in hand, 0 for none. False when it is time to end.
    fn apply_until_done(&mut self, transaction: Transaction, next: u64) -> bool {
        let sequence = transaction.sequence;
        note_in_hand(&transaction);
        let go_on = self.apply_noted(transaction, next);
        crash::done(sequence);
        go_on
    }

    fn apply_noted(&mut self, mut transaction: Transaction, next: u64) -> bool {
        self.show_in_hand(&transaction);
        let sequence = transaction.sequence;
        let mut at_turn = 0;
        let mut violations = 0;
        let mut first = !transaction.is_tried();
        self.careful = transaction.is_careful();
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
            let alone = self.ring.committed() + 1 >= sequence;
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
            self.show(ApplierState::Applying);
            // What fails is applied again row by row: another session may have inserted a row that was not there when it was
            // looked for.
            let lsn = transaction.commit_lsn();
            self.bulk = first && self.entry.anew.row_by_row.load(Ordering::Relaxed) != lsn;
            // One that can't be applied twice here has failed before.
            self.careful |= transaction.is_open() && !self.bulk;
            let outcome = match error::catch(|| self.apply(&mut transaction)) {
                Ok(outcome) => outcome,
                Err(error) => Err(Trouble::Error(error)),
            };
            let pieces = self.pieces.take();
            let trouble = match outcome {
                Ok(local_end) => {
                    self.has_committed(sequence, local_end, next);
                    return true;
                }
                Err(trouble) => trouble,
            };
            let doing = self.doing(transaction.end_lsn());
            error::abort();
            if let Some(session) = self.session.as_mut() {
                session.forget_transaction();
            }
            self.own.retries.fetch_add(1, Ordering::Relaxed);
            self.entry.retries.fetch_add(1, Ordering::Relaxed);
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
                    fail(self.ring, &outcome, transaction.commit_lsn());
                    return false;
                }
            }
            self.careful |= is_in_the_way(&error.sqlstate);
            if self.ring.stop_requested() {
                return false;
            }
            // Whatever is ahead may still move what is in the way.
            let way_made = alone && self.evict(&mut error);
            if transaction.is_open() {
                self.fail_open(&transaction, if way_made { come_again() } else { error });
                return false;
            }
            if !alone || way_made {
                continue;
            }
            at_turn += 1;
            let again = self.is_tried_again(&error, &mut violations);
            if !again && self.parks(&error) {
                let why = self.why_parked(&error, at_turn);
                if let Some(done) = self.park(&transaction, next, why) {
                    return done;
                }
                at_turn = 0;
                violations = 0;
                continue;
            }
            if !again {
                fail(self.ring, &error, transaction.end_lsn());
                return false;
            }
            self.pause(&error, at_turn);
        }
    }

    /// What was being done, as a line of an error's CONTEXT.
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

    /// Whether what has failed at its turn is tried again, after so many violations of a constraint.
    fn is_tried_again(&self, error: &PgError, violations: &mut u32) -> bool {
        match policy::for_apply(&error.sqlstate) {
            _ if self.subscription.options.disable_on_error => false,
            Policy::Retry => true,
            Policy::Conflict => {
                *violations += 1;
                *violations < CONFLICT_ATTEMPTS
            }
            Policy::Reconnect | Policy::Stop => false,
        }
    }

    /// Before a transaction is tried again at its turn, for the `at_turn`th time.
    fn pause(&self, error: &PgError, at_turn: u32) {
        if at_turn == 1 || at_turn.is_multiple_of(10) {
            let name = &self.subscription.name;
            error.log(&format!(
                "subscription \"{name}\" tries a transaction again"
            ));
        }
        let pause = policy::backoff_ms(at_turn, 5, 1000);
        latch::wait_as(Wait::Retry, Duration::from_millis(pause));
    }

    /// Tell the leader and the others.
    fn has_committed(&self, sequence: u64, local_end: u64, next: u64) {
        let wakes = self.ring.commit(self.number, sequence, local_end, next);
        set_latches(&wakes);
        if sequence.is_multiple_of(STATISTICS_EVERY) {
            // Autovacuum goes by these counters. PostgreSQL itself sends them no more than once a second.
            // SAFETY: outside of a transaction.
            unsafe { pg_sys::pgstat_report_stat(false) };
        }
    }

    /// An open transaction has failed. Its bytes are gone: the leader has to ask for them again.
    fn fail_open(&self, transaction: &Transaction, mut error: PgError) {
        let lsn = transaction.commit_lsn();
        if self.bulk && policy::for_apply(&error.sqlstate) == Policy::Conflict {
            self.entry.anew.row_by_row.store(lsn, Ordering::Relaxed);
            error.log(&format!(
                "subscription \"{}\" receives a large transaction again, to apply it row by row",
                self.subscription.name
            ));
            "40001".clone_into(&mut error.sqlstate);
        } else if self.parks(&error) {
            self.park_when_it_comes(transaction, &error);
            "40001".clone_into(&mut error.sqlstate);
        }
        fail(self.ring, &error, lsn);
    }

    /// Make way for the transaction that was just rolled back with `error`. False when there was nothing in its way, or it could not
    /// be made; then the error is that, if it does not pass by itself.
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
                // Rows may have left of which the others are yet to be told.
                registry::wake_manager(process::my_database());
                failure.log(&format!(
                    "subscription \"{}\" could not make way for a transaction",
                    self.subscription.name
                ));
                if policy::for_apply(&failure.sqlstate) == Policy::Stop {
                    *error = failure;
                }
                false
            }
        }
    }

    /// Apply and commit a transaction. Returns the end of the local commit record.
    fn apply(&mut self, transaction: &mut Transaction) -> Result<u64, Trouble> {
        self.pieces = None;
        self.step = None;
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
        while !matches!(self.step, Some(Step::IsPrepared)) {
            match transaction
                .next_frame(&mut assembled, set_latches)
                .map_err(|error| PgError::new("XX000", error.to_string()))?
            {
                FrameRead::Frame(frame) => self.frame(frame, split, &mut begun, &mut end_lsn)?,
                FrameRead::Assembled => {
                    self.frame(&assembled, split, &mut begun, &mut end_lsn)?;
                }
                FrameRead::Pending => {
                    if self.ring.stop_requested() {
                        return Err(PgError::new("57P01", "subscription is stopping").into());
                    }
                    self.ring.applier_will_wait(self.number, u64::MAX - 2);
                    latch::wait_as(Wait::Rest, Duration::from_millis(100));
                    self.ring.applier_awake(self.number);
                }
                FrameRead::End => break,
            }
        }
        assembled.clear();
        assembled.shrink_to(1 << 20);
        self.assembled = assembled;
        let Some(end_lsn) = end_lsn else {
            return Err(
                PgError::new("08P01", "transaction without a commit from the provider").into(),
            );
        };
        if transaction.is_skipped() {
            // That it ends where the one does that is to be skipped was not known before.
            error::abort();
            if let Some(session) = self.session.as_mut() {
                session.forget_transaction();
            }
            return Ok(self.pass(transaction)?);
        }
        let entry = self.entry;
        let step = self.step.take();
        if let Some(step @ (Step::IsPrepared | Step::Commit(_) | Step::Rollback(..))) = &step {
            let local_end = self.take_step(step, transaction.sequence, end_lsn)?;
            entry.transactions.fetch_add(1, Ordering::Relaxed);
            self.own.transactions.fetch_add(1, Ordering::Relaxed);
            return Ok(local_end);
        }
        let Some(session) = self.session.as_mut() else {
            return Err(
                PgError::new("08P01", "transaction without a begin from the provider").into(),
            );
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

    /// What the session has counted is committed: so many transactions, as one.
    fn count_committed(&mut self, transactions: u64, changes: u64) {
        if let Some(session) = self.session.as_mut() {
            session.publish_counts(self.entry);
        }
        // Publishing counted one.
        self.entry
            .transactions
            .fetch_add(transactions.saturating_sub(1), Ordering::Relaxed);
        self.own
            .transactions
            .fetch_add(transactions, Ordering::Relaxed);
        self.own.changes.fetch_add(changes, Ordering::Relaxed);
    }

    fn frame(
        &mut self,
        frame: &[u8],
        split: Option<u64>,
        begun: &mut bool,
        end_lsn: &mut Option<u64>,
    ) -> Result<(), Trouble> {
        self.records(frame, begun, end_lsn, |applier, begin| {
            if let Some(sequence) = split {
                applier.resume(sequence, begin)?;
            }
            applier.begin(begin, false)?;
            Ok(true)
        })
    }

    /// Apply the records of a frame. `begin` does what a Begin asks for; false from it ends it there.
    fn records(
        &mut self,
        frame: &[u8],
        begun: &mut bool,
        end_lsn: &mut Option<u64>,
        mut start: impl FnMut(&mut Self, &Begin<'_>) -> Result<bool, Trouble>,
    ) -> Result<(), Trouble> {
        let mut reader = Reader::new(frame);
        let mut gathered = Vec::new();
        let mut replaced = None;
        while let Some((tag, body)) = reader.next_raw()? {
            // Schemas come through the log.
            if matches!(tag, Tag::Schema | Tag::StreamHeader) {
                continue;
            }
            match Record::read(tag, body)? {
                Record::Begin(begin) if !*begun => {
                    if !start(self, &begin)? {
                        return Ok(());
                    }
                    *begun = true;
                }
                Record::BeginPrepared(prepared) if !*begun => {
                    if !self.begin_prepared(&prepared)? {
                        *end_lsn = Some(prepared.end_lsn);
                        return Ok(());
                    }
                    if !start(self, &prepared.begin)? {
                        return Ok(());
                    }
                    if let Some(session) = self.session.as_mut() {
                        session.expect_prepare();
                    }
                    *begun = true;
                }
                Record::Commit(commit) | Record::Prepare(commit) if *begun => {
                    *end_lsn = Some(commit.end_lsn);
                }
                Record::CommitPrepared(prepared) if !*begun => {
                    self.end_prepared(&prepared, None)?;
                    *end_lsn = Some(prepared.end_lsn);
                }
                Record::RollbackPrepared(rollback) if !*begun => {
                    self.end_prepared(&rollback.prepared, Some(&rollback))?;
                    *end_lsn = Some(rollback.prepared.end_lsn);
                }
                Record::Change(change) if *begun => {
                    self.take_change(change, replaced.take(), &mut gathered)?;
                }
                Record::Truncate(truncate) if *begun => {
                    self.apply_consolidated(&mut gathered)?;
                    self.take_truncate(&truncate)?;
                }
                Record::Message(message) if *begun => {
                    if is_rule(&message) {
                        self.apply_consolidated(&mut gathered)?;
                        if let Some(session) = self.session.as_mut() {
                            session.take_rule(message.content)?;
                        }
                    } else if message.prefix == REPLACED_PREFIX {
                        replaced = Some(message.content);
                    }
                }
                _ => {
                    return Err(PgError::new(
                        "08P01",
                        "records from the provider are out of order",
                    )
                    .into());
                }
            }
        }
        self.apply_consolidated(&mut gathered)
    }

    /// Takes a change of the transaction in hand: applies it, or gathers it first if many changes of
    /// a row are to become one. `replaced` is the version that the change has replaced, if sent.
    fn take_change<'a>(
        &mut self,
        change: Change<'a>,
        replaced: Option<&'a [u8]>,
        gathered: &mut Vec<Item<'a>>,
    ) -> Result<(), Trouble> {
        self.know(change.header.schema.0)?;
        if let Some(pieces) = &self.pieces {
            if pieces.is_full() {
                self.apply_consolidated(gathered)?;
            }
            if !self.take(&Part::Change(&change))? {
                return Ok(());
            }
        }
        if self.is_guarding() {
            let header = &change.header;
            self.guard(header.schema.0, header.barrier, header.writeset.hashes())?;
        }
        // What has failed once is applied as it came.
        if self.consolidate && self.bulk && !self.careful {
            gathered.push(Item::Change(0, change, replaced));
        } else if let Some(session) = self.session.as_mut() {
            session.replaces(replaced);
            session.change(&change)?;
        }
        Ok(())
    }

    fn take_truncate(&mut self, truncate: &Truncate<'_>) -> Result<(), Trouble> {
        for schema in truncate.schemas() {
            self.know(schema.0)?;
        }
        if self.pieces.is_some() && !self.take(&Part::Truncate(truncate))? {
            return Ok(());
        }
        if self.is_guarding() {
            for schema in truncate.schemas() {
                self.guard(schema.0, true, [])?;
            }
        }
        if let Some(session) = self.session.as_mut() {
            session.truncate(truncate)?;
        }
        Ok(())
    }

    /// Apply what was gathered of the transaction in hand.
    fn apply_consolidated(&mut self, gathered: &mut Vec<Item<'_>>) -> Result<(), Trouble> {
        if let Some(session) = self.session.as_mut().filter(|_| !gathered.is_empty()) {
            session.consolidate(gathered)?;
        }
        gathered.clear();
        Ok(())
    }

    /// Read the schema log on if a schema is not known yet.
    fn know(&mut self, schema: u32) -> Result<(), PgError> {
        if self
            .session
            .as_ref()
            .is_some_and(|session| session.knows(schema))
        {
            return Ok(());
        }
        self.read_log()
    }

    fn read_log(&mut self) -> Result<(), PgError> {
        let Self {
            group,
            log,
            session,
            subscription,
            local_node,
            ..
        } = self;
        group.read_log(log, |entry| {
            let mut reader = Reader::new(entry);
            while let Some(record) = reader.next_record()? {
                match record {
                    Record::StreamHeader(header) => {
                        *session = Some(new_session(subscription, local_node, &header)?);
                    }
                    Record::Schema(schema) => {
                        if let Some(session) = session.as_mut() {
                            session.learn(&schema);
                        }
                    }
                    _ => {}
                }
            }
            Ok(())
        })
    }

    /// Stamp commits with the origin that stands for the transaction's node, and open the transaction, or a batch.
    fn begin(&mut self, begin: &Begin<'_>, batch: bool) -> Result<(), PgError> {
        if self.session.is_none() {
            self.read_log()?;
        }
        self.use_origin_of(begin)?;
        let tables_version = self.entry.tables_version.load(Ordering::Acquire);
        // Straight from their origin, changes are known to be later than what is here of it.
        let known = begin.origin.is_empty() && self.pieces.is_none() && !self.is_rest();
        let same_stream = if known {
            None
        } else {
            Some(self.origins_of(begin, tables_version)?)
        };
        let careful = self.careful;
        let Some(session) = self.session.as_mut() else {
            return Err(PgError::new(
                "08P01",
                "stream without a header from the provider",
            ));
        };
        session.look_for_rows_in_the_way(careful && !batch);
        session.allow_bulk(self.bulk);
        session.know_stream_by(same_stream);
        if batch {
            session.begin_batch(begin, tables_version);
        } else {
            session.begin(begin, tables_version);
        }
        Ok(())
    }

    /// Stamp what is committed next with the origin that stands for the node of `begin`.
    fn use_origin_of(&mut self, begin: &Begin<'_>) -> Result<(), PgError> {
        let node = if begin.origin.is_empty() {
            self.subscription.provider.as_str()
        } else {
            begin.origin
        };
        if let Some(origin) = self.origins.get(node) {
            origin::use_for_commits(*origin)?;
        } else {
            let node = node.to_owned();
            let origin = self.find_origin(&node)?;
            self.origins.insert(node, origin);
            origin::use_for_commits(origin)?;
        }
        Ok(())
    }

    /// This applier's origin for a node; made when it is the first change of that node.
    fn find_origin(&self, node: &str) -> Result<OriginId, PgError> {
        let (id, number) = (self.subscription.id, self.number);
        let found = error::transaction(|| {
            origin::ensure(id, node, number + 1)?;
            origin::at_place(id, node, number)?
                .ok_or_else(|| PgError::new("XX000", "no replication origin"))
        })?;
        // For the others' `all_origins`.
        self.entry.tables_version.fetch_add(1, Ordering::AcqRel);
        Ok(found)
    }

    /// The origins of rows that the stream has brought before, of the node of `begin`. Outside of a transaction.
    fn origins_of(
        &mut self,
        begin: &Begin<'_>,
        tables_version: u32,
    ) -> Result<Rc<[OriginId]>, PgError> {
        let node = if begin.origin.is_empty() {
            self.subscription.provider.as_str()
        } else {
            begin.origin
        };
        let (as_of, known) = &mut self.all_origins;
        if *as_of != tables_version {
            known.clear();
            *as_of = tables_version;
        }
        if let Some(origins) = known.get(node) {
            return Ok(Rc::clone(origins));
        }
        let id = self.subscription.id;
        let origins: Rc<[OriginId]> = Rc::from(error::transaction(|| origin::all_of(id, node))?);
        known.insert(node.to_owned(), Rc::clone(&origins));
        Ok(origins)
    }

    /// Go past a transaction without applying it, and take note of that in the same commit.
    fn pass(&mut self, transaction: &Transaction) -> Result<u64, PgError> {
        self.stamp_as_provider()?;
        let end_lsn = transaction.end_lsn();
        let id = i64::from(self.subscription.id);
        while self.ring.committed() + 1 < transaction.sequence {
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
        // SAFETY: set by the commit above.
        Ok(unsafe { pg_sys::XactLastCommitEnd })
    }
}

fn new_session(
    subscription: &Subscription,
    local_node: &str,
    header: &StreamHeader<'_>,
) -> Result<Session, PgError> {
    let name = std::ffi::CString::new(header.charset)
        .map_err(|_| PgError::new("08P01", "charset of the stream has a zero byte"))?;
    // SAFETY: a look-up by name, through the SQL function that all versions have, which takes a NameData;
    // outside of a transaction. What is found becomes client_encoding, for the types' receive functions.
    let charset = unsafe {
        let mut padded = pg_sys::NameData::default();
        for (place, byte) in padded.data.iter_mut().take(63).zip(name.as_bytes()) {
            *place = byte.cast_signed();
        }
        let charset = pgrx::direct_function_call::<i32>(
            pg_sys::PG_char_to_encoding,
            &[Some(pg_sys::Datum::from(&raw mut padded))],
        )
        .unwrap_or(-1);
        if charset < 0 {
            return Err(PgError::new(
                "08P01",
                format!(
                    "charset \"{}\" of the stream is not known here",
                    header.charset
                ),
            ));
        }
        charset
    };
    // Outside of a transaction the conversion could not be looked up.
    error::transaction(|| {
        // SAFETY: `charset` is an encoding; both keep what they need for the life of the process.
        let set = unsafe {
            pg_sys::PrepareClientEncoding(charset) >= 0 && pg_sys::SetClientEncoding(charset) >= 0
        };
        if set {
            return Ok(());
        }
        Err(PgError::new(
            "0A000",
            format!(
                "no conversion from the provider's encoding \"{}\"",
                header.charset
            ),
        ))
    })?;
    Ok(Session::new(Identity {
        subscription_id: subscription.id,
        subscription: subscription.name.clone(),
        run_as: subscription
            .options
            .run_as_owner
            .then_some(subscription.owner),
        local_node: local_node.to_owned(),
        provider: subscription.provider.clone(),
        charset,
        ignores_missing: subscription.options.ignores_missing(),
    }))
}
