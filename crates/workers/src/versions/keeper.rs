//! The work of the versions process: moves slots on by the rules of `braid_versions`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;

use braid_bgworker::sqlstate::SqlState;
use braid_node::versions::Slot;
use braid_node::versions::memory::{self, Shown, Waited, mark, problem, state};
use braid_postgres::error::PgError;
use braid_postgres::process;
use braid_versions::{
    Access, Answer, Boot, Bytes, Commit, Cut, Edge, Error, Local, NodeNumber, Note, Record, Report,
    Reports, Sequencer, Start, TableNumber, Term, Verdict, Version,
};

use super::shared::Shared;

/// The only node with data. Its number in the group is of no account then.
const ALONE: NodeNumber = NodeNumber(1);

/// How far a slot's transaction has come, as this process knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It has asked, or waits.
    Asked,
    /// It was told that it may take its snapshot.
    Ready,
    /// It has its snapshot.
    Running,
    /// Its writes are marked as coming.
    Committing,
    /// It only waits for this write.
    Reading(TableNumber, Version),
    /// An applier waits for what its transaction had seen, or applies it.
    Following,
    /// The writes of that are marked as coming.
    Applying,
    /// It can't go on.
    Refused,
}

#[derive(Debug)]
struct Known {
    number: u64,
    stage: Stage,
    /// The record of the transaction that an applier applies.
    record: Option<Record>,
    waits: Vec<Waited>,
    /// Tables whose release was passed on.
    released: BTreeSet<u32>,
}

/// The process's memory.
pub(super) struct Keeper {
    start: u64,
    pub(super) local: Local,
    /// If this process gives versions to the group.
    pub(super) sequencer: Option<Sequencer>,
    /// In a group of several nodes with data.
    pub(super) shared: Option<Shared>,
    /// By the address of the slot.
    known: HashMap<usize, Known>,
    /// The processes whose transactions have writes that have not ended.
    holders: BTreeMap<(TableNumber, Version), i32>,
    /// Transactions of an earlier start may still commit.
    is_waiting_for_earlier: bool,
}

fn key(slot: &Slot) -> usize {
    std::ptr::from_ref(slot).addr()
}

pub(super) fn complain(what: &str, error: Error) {
    PgError::new(SqlState::InternalError, format!("{what}: {error}")).log("braid versions");
}

/// An error of the rules that ends the process.
pub(super) fn internal(error: &Error) -> PgError {
    PgError::new(SqlState::InternalError, error.to_string())
}

impl Keeper {
    /// Of the only node with data: begins with a sequencer without numbers. `None` if the rules
    /// refuse it.
    pub(super) fn alone(start: u64) -> Option<Self> {
        let report = Report {
            term: Term(0),
            ends: BTreeMap::new(),
        };
        let reports = Reports::from([(ALONE, report)]);
        let cut = Cut::new_sequencer(Term(0), 1, &reports, true).ok()?;
        let sequencer = Sequencer::begin(&cut)?;
        let mut local = Local::new(ALONE, Boot(1));
        local.learn(&cut).ok()?;
        Some(Self::with(start, local, Some(sequencer), None))
    }

    /// Of one of several nodes with data.
    pub(super) fn shared(start: u64, shared: Shared) -> Self {
        let local = Local::new(shared.agreed.me, shared.boot);
        Self::with(start, local, None, Some(shared))
    }

    fn with(
        start: u64,
        local: Local,
        sequencer: Option<Sequencer>,
        shared: Option<Shared>,
    ) -> Self {
        Self {
            start,
            local,
            sequencer,
            shared,
            known: HashMap::new(),
            holders: BTreeMap::new(),
            is_waiting_for_earlier: true,
        }
    }

    /// Does all that can be done now. False if the process has to start anew.
    pub(super) fn work(&mut self) -> Result<bool, PgError> {
        if self.is_waiting_for_earlier {
            self.is_waiting_for_earlier = self.settle_earlier();
            if !self.is_waiting_for_earlier {
                self.begin_shared()?;
            }
        }
        if !self.is_waiting_for_earlier {
            if !self.follow_group()? {
                return Ok(false);
            }
            self.receive()?;
        }
        loop {
            let mut changed = false;
            for slot in memory::own_slots() {
                changed |= self.step(slot);
            }
            changed |= self.exchange()?;
            if !changed {
                break;
            }
        }
        if !self.is_waiting_for_earlier {
            self.tick()?;
        }
        self.tend_links();
        self.show();
        Ok(true)
    }

    /// Ends what an earlier process has begun. True as long as some of it may still commit.
    fn settle_earlier(&mut self) -> bool {
        let mut is_left = false;
        for slot in memory::own_slots() {
            let is_earlier = slot.start.load(Ordering::SeqCst) != self.start;
            match slot.state() {
                state::WAITING => {
                    // It has no number that counts: it asks anew.
                    let _ = slot.advance(state::WAITING, state::ASKED);
                }
                from @ (state::READY | state::COMMIT_ASKED) if is_earlier => {
                    refuse(slot, from, problem::STARTED_ANEW);
                }
                state::MAY_COMMIT if is_earlier => is_left = true,
                _ => {}
            }
        }
        is_left
    }

    /// Moves a slot on. True if something has changed.
    fn step(&mut self, slot: &'static Slot) -> bool {
        let state = slot.state();
        match state {
            state::COMMITTED | state::ENDED => return self.end(slot, state),
            state::ASKED if self.is_waiting_for_earlier => return false,
            state::ASKED => return self.ask(slot),
            _ => {}
        }
        let Some(known) = self.known.get(&key(slot)) else {
            // Of an earlier process.
            if state == state::COMMIT_ASKED {
                return refuse(slot, state, problem::STARTED_ANEW);
            }
            return false;
        };
        let (number, stage) = (known.number, known.stage);
        match state {
            state::WAITING => self.try_start(slot, number, stage),
            state::RUNNING => self.note_running(slot, number, stage),
            state::COMMIT_ASKED => {
                self.note_running(slot, number, stage) | self.try_commit(slot, number)
            }
            _ => false,
        }
    }

    fn ask(&mut self, slot: &'static Slot) -> bool {
        if slot.applies.load(Ordering::Acquire) != 0 {
            return self.ask_to_apply(slot);
        }
        let tables: Vec<u32> = slot
            .tables()
            .map(|cell| cell.load(Ordering::Acquire))
            .collect();
        if slot.reads_current.load(Ordering::Acquire) != 0 {
            let table = TableNumber(tables.first().map_or(0, |table| table & mark::NUMBER));
            let stage = Stage::Reading(table, self.local.read_current(table));
            self.note(slot, 0, stage);
            return slot.advance(state::ASKED, state::WAITING);
        }
        let declared = tables.iter().map(|table| {
            let access = if table & mark::WRITES == 0 {
                Access::Read
            } else {
                Access::Write
            };
            (TableNumber(table & mark::NUMBER), access)
        });
        let owner = u64::try_from(slot.pid.load(Ordering::Acquire)).unwrap_or(0);
        let time = |micros: i64| u64::try_from(micros).unwrap_or(0);
        let since = time(slot.since.load(Ordering::Acquire));
        let deadline = time(slot.deadline.load(Ordering::Acquire));
        match self.local.ask(owner, declared.collect(), since, deadline) {
            Ok(number) => {
                self.note(slot, number, Stage::Asked);
                slot.advance(state::ASKED, state::WAITING)
            }
            Err(Error::TooMany) => refuse(slot, state::ASKED, problem::TOO_MANY),
            Err(error) => {
                complain("a request was refused", error);
                refuse(slot, state::ASKED, problem::INTERNAL)
            }
        }
    }

    fn ask_to_apply(&mut self, slot: &'static Slot) -> bool {
        let record = match Note::decode(&slot.note()) {
            Ok(Note::Versions(record)) if self.shared.is_some() => record,
            _ => return refuse(slot, state::ASKED, problem::INTERNAL),
        };
        self.note(slot, 0, Stage::Following);
        if let Some(known) = self.known.get_mut(&key(slot)) {
            known.record = Some(record);
        }
        slot.advance(state::ASKED, state::WAITING)
    }

    fn record_of(&self, slot: &Slot) -> Option<Record> {
        self.known.get(&key(slot))?.record.clone()
    }

    /// Whether an applier may begin. True if something has changed.
    fn try_to_apply(&mut self, slot: &'static Slot) -> bool {
        let Some(record) = self.record_of(slot) else {
            return refuse(slot, state::WAITING, problem::INTERNAL);
        };
        match self.local.may_apply(&record) {
            Verdict::Apply => self.make_ready(slot, Stage::Following),
            Verdict::Wait(edges) => {
                self.show_waits(slot, &edges);
                false
            }
            Verdict::Later => false,
            verdict @ (Verdict::Already | Verdict::Refused | Verdict::Contradiction) => {
                pgrx::log!("braid versions: {record:?} cannot be applied: {verdict:?}");
                refuse(slot, state::WAITING, problem::GIVEN_UP)
            }
        }
    }

    /// Whether an applier may commit. True if something has changed.
    fn try_to_show(&mut self, slot: &'static Slot) -> bool {
        let Some(record) = self.record_of(slot) else {
            return refuse(slot, state::COMMIT_ASKED, problem::INTERNAL);
        };
        match self.local.may_apply(&record) {
            Verdict::Apply => {}
            Verdict::Wait(_) | Verdict::Later => return false,
            verdict => {
                pgrx::log!("braid versions: {record:?} cannot be committed: {verdict:?}");
                return refuse(slot, state::COMMIT_ASKED, problem::GIVEN_UP);
            }
        }
        if let Err(error) = self.local.apply(&record) {
            return self.fail(slot, state::COMMIT_ASKED, "an applier's commit", error);
        }
        self.set_stage(slot, Stage::Applying);
        if slot.advance(state::COMMIT_ASKED, state::MAY_COMMIT) {
            slot.wake_session();
        }
        true
    }

    fn note(&mut self, slot: &Slot, number: u64, stage: Stage) {
        let known = Known {
            number,
            stage,
            record: None,
            waits: Vec::new(),
            released: BTreeSet::new(),
        };
        self.known.insert(key(slot), known);
    }

    fn set_stage(&mut self, slot: &Slot, stage: Stage) {
        if let Some(known) = self.known.get_mut(&key(slot)) {
            known.stage = stage;
        }
    }

    fn try_start(&mut self, slot: &'static Slot, number: u64, stage: Stage) -> bool {
        if stage == Stage::Following {
            return self.try_to_apply(slot);
        }
        if let Stage::Reading(table, version) = stage {
            if self.local.has_reached(table, version) {
                return self.make_ready(slot, stage);
            }
            let edge = Edge {
                table,
                version,
                holder: None,
            };
            self.show_waits(slot, &[edge]);
            return false;
        }
        match self.local.start(number) {
            Ok(Start::Ready) => {
                if self.shared.is_some() && !self.put_note(slot, number) {
                    self.local.abort(number);
                    self.set_stage(slot, Stage::Refused);
                    return refuse(slot, state::WAITING, problem::TOO_LONG);
                }
                self.make_ready(slot, Stage::Ready)
            }
            Ok(Start::Wait(edges)) => {
                self.show_waits(slot, &edges);
                false
            }
            // A later write of a table is visible, and the transaction only reads: it gets the
            // versions of now.
            Ok(Start::Overtaken | Start::OldTerm) => match self.local.ask_again(number) {
                Ok(number) => {
                    self.note(slot, number, Stage::Asked);
                    true
                }
                Err(error) => self.fail(slot, state::WAITING, "a request", error),
            },
            Err(error) => self.fail(slot, state::WAITING, "a wait", error),
        }
    }

    /// Has the session find what it is to write first. False if that is too long.
    fn put_note(&self, slot: &Slot, number: u64) -> bool {
        match self.local.shipped(number) {
            Ok(Some(record)) => slot.set_note(&Note::Versions(record).encode()),
            Ok(None) => slot.set_note(&[]),
            Err(_) => false,
        }
    }

    fn make_ready(&mut self, slot: &'static Slot, stage: Stage) -> bool {
        slot.start.store(self.start, Ordering::SeqCst);
        if !slot.advance(state::WAITING, state::READY) {
            return false;
        }
        self.set_stage(slot, stage);
        slot.wake_session();
        true
    }

    /// The session has its snapshot. Passes on what it has released.
    fn note_running(&mut self, slot: &'static Slot, number: u64, stage: Stage) -> bool {
        let mut changed = false;
        if stage == Stage::Ready {
            match self.local.started(number) {
                Ok(Start::Ready) => self.set_stage(slot, Stage::Running),
                Ok(other) => {
                    let words = format!("a snapshot was taken at the wrong moment: {other:?}");
                    PgError::new(SqlState::InternalError, words).log("braid versions");
                    self.set_stage(slot, Stage::Refused);
                }
                Err(error) => {
                    complain("a snapshot", error);
                    self.set_stage(slot, Stage::Refused);
                }
            }
            changed = true;
        }
        for cell in slot.tables() {
            let table = cell.load(Ordering::Acquire);
            let number_of_table = table & mark::NUMBER;
            let Some(known) = self.known.get_mut(&key(slot)) else {
                break;
            };
            // What is shipped says already that the transaction writes it: released at its end.
            if table & mark::RELEASED == 0
                || self.shared.is_some()
                || known.stage != Stage::Running
                || !known.released.insert(number_of_table)
            {
                continue;
            }
            let used = table & mark::USED != 0;
            let released = self
                .local
                .release(number, TableNumber(number_of_table), used, false);
            if let Err(error) = released {
                complain("an early release", error);
            }
            changed = true;
        }
        changed
    }

    /// Leaves no transaction between *ready* and *running*, before the next term begins.
    ///
    /// Example of what goes wrong without it: R reads tables a and b, and is ready. Before it takes
    /// its snapshot, a sequencer of the next term gives T a number of a. R's numbers count no more,
    /// so T need not wait for R's snapshot, and commits. R sees T. On another node a reader sees a
    /// later write of b and not T.
    pub(super) fn settle_ready(&mut self) {
        for slot in memory::own_slots() {
            let Some(known) = self.known.get(&key(slot)) else {
                continue;
            };
            if known.stage != Stage::Ready {
                continue;
            }
            let number = known.number;
            if refuse(slot, state::READY, problem::STARTED_ANEW) {
                self.set_stage(slot, Stage::Refused);
                self.local.abort(number);
            } else {
                // Its snapshot is taken. If it has ended already, that is found out next.
                self.note_running(slot, number, Stage::Ready);
            }
        }
    }

    fn try_commit(&mut self, slot: &'static Slot, number: u64) -> bool {
        let stage = self.known.get(&key(slot)).map(|known| known.stage);
        match stage {
            Some(Stage::Running) => {}
            Some(Stage::Following) => return self.try_to_show(slot),
            Some(Stage::Committing | Stage::Applying) => return false,
            _ => return refuse(slot, state::COMMIT_ASKED, problem::INTERNAL),
        }
        match self.local.commit(number) {
            Ok(Commit::Record(_)) => self.set_stage(slot, Stage::Committing),
            Ok(Commit::ReadOnly) => {}
            Ok(Commit::Wait) => return false,
            Err(Error::OldTerm) => {
                return refuse(slot, state::COMMIT_ASKED, problem::STARTED_ANEW);
            }
            Err(error) => return self.fail(slot, state::COMMIT_ASKED, "a commit", error),
        }
        // If the session has given up, its end takes the mark back.
        if slot.advance(state::COMMIT_ASKED, state::MAY_COMMIT) {
            slot.wake_session();
        }
        true
    }

    fn fail(&mut self, slot: &'static Slot, from: u32, what: &str, error: Error) -> bool {
        complain(what, error);
        let problem = if error == Error::Diverged {
            problem::DIVERGED
        } else {
            problem::INTERNAL
        };
        self.set_stage(slot, Stage::Refused);
        refuse(slot, from, problem)
    }

    /// The session's transaction has ended.
    fn end(&mut self, slot: &'static Slot, state: u32) -> bool {
        if let Some(known) = self.known.remove(&key(slot)) {
            let number = known.number;
            let ended = match known.stage {
                Stage::Reading(..) | Stage::Following => Ok(()),
                Stage::Applying => {
                    if let Some(record) = &known.record {
                        if state == state::COMMITTED {
                            self.local.applied(record);
                        } else {
                            self.local.apply_failed(record);
                        }
                    }
                    Ok(())
                }
                Stage::Committing if state == state::COMMITTED => self.local.committed(number),
                Stage::Committing => self.local.withdraw(number),
                _ => {
                    self.local.abort(number);
                    Ok(())
                }
            };
            if let Err(error) = ended {
                complain("the end of a transaction", error);
            }
        }
        slot.advance(state, state::FREE)
    }

    /// Carries requests and releases to the sequencer, and its answers back. True if there were
    /// any.
    fn exchange(&mut self) -> Result<bool, PgError> {
        if self.shared.is_some() {
            return self.exchange_shared();
        }
        let mut changed = false;
        while let Some(batch) = self.local.batch() {
            let Some(sequencer) = &mut self.sequencer else {
                break;
            };
            let answer = sequencer.receive(&batch, true);
            let is_progress = !answer.grants.is_empty() || !answer.confirmed.is_empty();
            self.note_holders(&answer);
            for (number, refusal) in self.local.answer(&answer) {
                changed |= self.refused(number, &refusal.to_string());
            }
            changed |= is_progress;
            if !is_progress {
                break;
            }
        }
        if changed && let Some(sequencer) = &self.sequencer {
            let ends = sequencer.ends();
            self.holders.retain(|(table, version), _| {
                ends.get(table).is_none_or(|end| *version > end.settled)
            });
            if !self.local.announced(sequencer.term(), &ends) {
                pgrx::log!("braid versions: the sequencer's term is not known");
            }
        }
        Ok(changed)
    }

    /// Notes which processes have the numbers of an answer.
    pub(super) fn note_holders(&mut self, answer: &Answer) {
        for grant in &answer.grants {
            let pid = self.pid_of(grant.id.number);
            for (table, granted) in &grant.tables {
                if let Some(own) = granted.own {
                    self.holders.insert((*table, own), pid);
                }
            }
        }
        let local = &self.local;
        self.holders
            .retain(|(table, version), _| !local.has_reached(*table, *version));
    }

    fn slot_of(&self, number: u64) -> Option<&'static Slot> {
        memory::own_slots().find(|slot| {
            let known = self.known.get(&key(slot));
            known.is_some_and(|known| known.number == number && known.number != 0)
        })
    }

    fn pid_of(&self, number: u64) -> i32 {
        self.slot_of(number)
            .map_or(0, |slot| slot.pid.load(Ordering::Acquire))
    }

    pub(super) fn refused(&mut self, number: u64, why: &str) -> bool {
        pgrx::log!("braid versions: a request was refused: {why}");
        self.local.abort(number);
        let Some(slot) = self.slot_of(number) else {
            return true;
        };
        self.set_stage(slot, Stage::Refused);
        refuse(slot, state::WAITING, problem::TOO_MANY)
    }

    fn show_waits(&mut self, slot: &'static Slot, edges: &[Edge]) {
        let waits: Vec<Waited> = edges
            .iter()
            .take(memory::WAITS)
            .map(|edge| Waited {
                table: edge.table.0,
                version: edge.version.0,
                holder: self
                    .holders
                    .get(&(edge.table, edge.version))
                    .copied()
                    .unwrap_or(0),
                node: edge
                    .holder
                    .filter(|node| *node != self.local.identity().0)
                    .map_or(0, |node| node.0),
            })
            .collect();
        if let Some(known) = self.known.get_mut(&key(slot))
            && known.waits != waits
        {
            slot.show_waits(&waits);
            known.waits = waits;
        }
    }

    fn show(&self) {
        let shown: Vec<Shown> = match &self.sequencer {
            Some(sequencer) if self.shared.is_none() => sequencer
                .ends()
                .into_iter()
                .map(|(table, end)| Shown {
                    number: table.0,
                    assigned: sequencer.counter(table).0.0,
                    reached: end.settled.0,
                })
                .collect(),
            // The last number that this node has heard of.
            _ => self
                .local
                .progress()
                .map(|(table, known, reached)| Shown {
                    number: table.0,
                    assigned: known.0.max(reached.0),
                    reached: reached.0,
                })
                .collect(),
        };
        memory::show(process::my_database(), &shown);
    }
}

/// Says that a transaction can't go on.
fn refuse(slot: &'static Slot, from: u32, problem: u32) -> bool {
    slot.problem.store(problem, Ordering::SeqCst);
    let refused = slot.advance(from, state::REFUSED);
    if refused {
        slot.wake_session();
    }
    refused
}
