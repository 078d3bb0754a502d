//! The work of the versions process: moves slots on by the rules of `braid_versions`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;

use braid_bgworker::sqlstate::SqlState;
use braid_node::versions::Slot;
use braid_node::versions::memory::{self, Shown, Waited, mark, problem, state};
use braid_postgres::error::PgError;
use braid_postgres::process;
use braid_versions::{
    Access, Boot, Commit, Cut, Edge, Error, Local, NodeNumber, Report, Reports, Sequencer, Start,
    TableNumber, Term, Version,
};

/// The only node with data. Its number in the group is of no account here.
const ME: NodeNumber = NodeNumber(1);

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
    /// It can't go on.
    Refused,
}

#[derive(Debug)]
struct Known {
    number: u64,
    stage: Stage,
    waits: Vec<Waited>,
    /// Tables whose release was passed on.
    released: BTreeSet<u32>,
}

/// The process's memory.
pub(super) struct Keeper {
    start: u64,
    local: Local,
    sequencer: Sequencer,
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

fn complain(what: &str, error: Error) {
    PgError::new(SqlState::InternalError, format!("{what}: {error}")).log("braid versions");
}

impl Keeper {
    /// Begins with a sequencer without numbers. `None` if the rules refuse it.
    pub(super) fn new(start: u64) -> Option<Self> {
        let report = Report {
            term: Term(0),
            ends: BTreeMap::new(),
        };
        let reports = Reports::from([(ME, report)]);
        let cut = Cut::new_sequencer(Term(0), 1, &reports, true).ok()?;
        let sequencer = Sequencer::begin(&cut)?;
        let mut local = Local::new(ME, Boot(1));
        local.learn(&cut).ok()?;
        Some(Self {
            start,
            local,
            sequencer,
            known: HashMap::new(),
            holders: BTreeMap::new(),
            is_waiting_for_earlier: true,
        })
    }

    /// Does all that can be done now.
    pub(super) fn work(&mut self) {
        if self.is_waiting_for_earlier {
            self.is_waiting_for_earlier = self.settle_earlier();
        }
        loop {
            let mut changed = false;
            for slot in memory::own_slots() {
                changed |= self.step(slot);
            }
            changed |= self.exchange();
            if !changed {
                break;
            }
        }
        self.show();
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

    fn note(&mut self, slot: &Slot, number: u64, stage: Stage) {
        let known = Known {
            number,
            stage,
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
            Ok(Start::Ready) => self.make_ready(slot, Stage::Ready),
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
            if table & mark::RELEASED == 0
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

    fn try_commit(&mut self, slot: &'static Slot, number: u64) -> bool {
        let stage = self.known.get(&key(slot)).map(|known| known.stage);
        match stage {
            Some(Stage::Running) => {}
            Some(Stage::Committing) => return false,
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
        self.set_stage(slot, Stage::Refused);
        refuse(slot, from, problem::INTERNAL)
    }

    /// The session's transaction has ended.
    fn end(&mut self, slot: &'static Slot, state: u32) -> bool {
        if let Some(known) = self.known.remove(&key(slot)) {
            let number = known.number;
            let ended = match known.stage {
                Stage::Reading(..) => Ok(()),
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
    fn exchange(&mut self) -> bool {
        let mut changed = false;
        while let Some(batch) = self.local.batch() {
            let answer = self.sequencer.receive(&batch, true);
            let is_progress = !answer.grants.is_empty() || !answer.confirmed.is_empty();
            for grant in &answer.grants {
                let pid = self.pid_of(grant.id.number);
                for (table, granted) in &grant.tables {
                    if let Some(own) = granted.own {
                        self.holders.insert((*table, own), pid);
                    }
                }
            }
            for (number, refusal) in self.local.answer(&answer) {
                changed |= self.refused(number, &refusal.to_string());
            }
            changed |= is_progress;
            if !is_progress {
                break;
            }
        }
        if changed {
            let ends = self.sequencer.ends();
            self.holders.retain(|(table, version), _| {
                ends.get(table).is_none_or(|end| *version > end.settled)
            });
            if !self.local.announced(self.sequencer.term(), &ends) {
                pgrx::log!("braid versions: the sequencer's term is not known");
            }
        }
        changed
    }

    fn slot_of(&self, number: u64) -> Option<&'static Slot> {
        memory::own_slots().find(|slot| {
            let known = self.known.get(&key(slot));
            known.is_some_and(|known| {
                known.number == number && !matches!(known.stage, Stage::Reading(..))
            })
        })
    }

    fn pid_of(&self, number: u64) -> i32 {
        self.slot_of(number)
            .map_or(0, |slot| slot.pid.load(Ordering::Acquire))
    }

    fn refused(&mut self, number: u64, why: &str) -> bool {
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
        let shown: Vec<Shown> = self
            .sequencer
            .ends()
            .into_iter()
            .map(|(table, end)| Shown {
                number: table.0,
                assigned: self.sequencer.counter(table).0.0,
                reached: end.settled.0,
            })
            .collect();
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
