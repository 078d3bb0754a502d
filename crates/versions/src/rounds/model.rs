//! Every interleaving of a few transactions and rounds on three nodes with two tables, by a model
//! checker over the real rules. A state is a [`Group`]; its actions are all that can happen.
//!
//! A message that was sent stays, and may arrive at every later moment, or never. So each
//! interleaving with lost, late, repeated and reordered messages is among them. Time does not pass:
//! everything that the clock asks for may happen at every moment, and two nodes are candidates.
//!
//! In each state it is judged whether the history so far is strictly serializable. One start at
//! most grants in a term. No transaction commits after the cut that ends its term, or takes its
//! snapshot too late. No transactions wait in a circle. From each state the group goes on without
//! faults: then all transactions end, each node gets grants, and no further sequencer begins.
//!
//! Each case also runs with rules broken, and the checker finds a schedule that shows it. It begins
//! with the first steps of such a schedule. `BRAID_VERSIONS_STATES` is how many states each case
//! visits at most.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model, Property};

use super::world::{ALWAYS, Budget, Group, Step};
use crate::Access::{self, Read, Write};
use crate::broken::Broken;

type Script = &'static [(usize, &'static [(u32, Access)])];

/// A fault-free beginning, by what it leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beginning {
    /// Nothing is agreed.
    Empty,
    /// The first node gives versions.
    First,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    beginning: Beginning,
    script: Script,
    budget: Budget,
    broken: Option<Broken>,
    /// The first steps.
    first: &'static [Move],
    /// One of so many states goes on without faults.
    every: u64,
}

/// A part of a beginning.
#[derive(Debug, Clone, Copy)]
enum Move {
    Do(Step),
    /// All messages from a node to another one arrive.
    Bring(usize, usize),
}

const NO_FAULT: Budget = Budget {
    rounds: 0,
    crashes: 0,
    isolations: 0,
    removals: 0,
    aborts: 0,
};

impl Model for Case {
    type State = Group;
    type Action = Step;

    fn init_states(&self) -> Vec<Group> {
        let mut group = Group::new(3, ALWAYS, NO_FAULT);
        if self.beginning == Beginning::First {
            group.begin();
        }
        group.break_rule(self.broken);
        group.keeps_messages = true;
        group.candidates = Some(&[0, 1]);
        group.budget = self.budget;
        for (node, declared) in self.script {
            group.add(*node, declared);
        }
        for first in self.first {
            match first {
                Bring(from, to) => group.bring(*from, *to),
                Do(step) => {
                    let steps = group.steps();
                    assert!(steps.contains(step), "{step:?} of {steps:?}");
                    group.step(*step);
                }
            }
        }
        vec![group]
    }

    fn actions(&self, group: &Group, actions: &mut Vec<Step>) {
        actions.extend(group.steps());
    }

    fn next_state(&self, group: &Group, step: Step) -> Option<Group> {
        let mut next = group.clone();
        next.step(step);
        (next != *group && next.budget.rounds <= group.budget.rounds).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("rules", |_, group: &Group| group.check().is_ok()),
            Property::always("goes on", |case: &Self, group: &Group| {
                let left_out = case.every > 1 && !fingerprint(group).is_multiple_of(case.every);
                left_out || group.recovers(true, 0).is_ok()
            }),
            Property::sometimes("all are done", |_, group: &Group| {
                group.transactions.iter().all(|t| t.acknowledged)
            }),
        ]
    }
}

fn fingerprint(group: &Group) -> u64 {
    let mut hasher = DefaultHasher::new();
    group.hash(&mut hasher);
    hasher.finish()
}

/// How many states are visited at most, if somebody has asked for a number.
fn limit() -> Option<usize> {
    let asked = std::env::var("BRAID_VERSIONS_STATES").ok();
    asked.and_then(|text| text.parse().ok())
}

fn check(case: Case, states: usize, depth: usize) -> Option<String> {
    let began = Instant::now();
    let case = match limit() {
        Some(_) => Case { every: 1, ..case },
        None => case,
    };
    let (states, depth) = match limit() {
        Some(limit) if case.first.is_empty() => (limit, 1_000),
        _ => (states, depth),
    };
    let checker = case
        .checker()
        .target_state_count(states)
        .target_max_depth(depth)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let failed = ["rules", "goes on"].into_iter().find_map(|property| {
        let path = checker.discovery(property)?;
        let last = path.last_state().clone();
        let error = last.check().and_then(|()| last.recovers(true, 0));
        Some(format!(
            "{} after {:?}",
            error.unwrap_err(),
            path.into_actions()
        ))
    });
    println!(
        "{} from step {}, {:?}: {} states, depth {}, {:?}, {failed:?}",
        case.name,
        case.first.len(),
        case.broken,
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed()
    );
    failed
}

/// The group has no sequencer, and two nodes want to be it.
const CANDIDATES: Case = Case {
    name: "two candidates",
    beginning: Beginning::Empty,
    script: &[(0, &[(1, Write)])],
    budget: Budget {
        rounds: 2,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
    every: 16,
};

/// The sequencer's process starts anew, with a writer on each of two nodes.
const CRASH: Case = Case {
    name: "crash",
    beginning: Beginning::First,
    script: &[(0, &[(1, Write)]), (1, &[(1, Read), (2, Write)])],
    budget: Budget {
        rounds: 2,
        crashes: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
    every: 16,
};

/// A node is cut off, and another one crashes.
const PARTITION: Case = Case {
    name: "crash and partition",
    beginning: Beginning::First,
    script: &[(0, &[(1, Write)]), (1, &[(1, Write), (2, Write)])],
    budget: Budget {
        rounds: 2,
        crashes: 1,
        isolations: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
    every: 16,
};

/// A node is removed.
const REMOVAL: Case = Case {
    name: "removal",
    beginning: Beginning::First,
    script: &[(2, &[(1, Write)]), (0, &[(1, Write)])],
    budget: Budget {
        rounds: 2,
        removals: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
    every: 16,
};

/// A reader on the node that has given versions, and a writer on the next one.
const STALE: Case = Case {
    name: "stale read",
    script: &[(1, &[(1, Write)]), (0, &[(1, Read)])],
    ..REMOVAL
};

fn holds(case: Case) {
    assert_eq!(check(case, 1_200, 40), None, "{}", case.name);
}

/// Begins with some steps. From there on the rules hold in all schedules of `depth - 2` steps, and
/// with one broken the checker finds one that shows it.
fn finds(case: Case, broken: Broken, depth: usize, first: &'static [Move]) {
    let case = Case { first, ..case };
    assert_eq!(check(case, 4_000, depth), None, "{}", case.name);
    let broken = Some(broken);
    let failed = check(Case { broken, ..case }, 4_000, depth);
    assert!(failed.is_some(), "{}: {broken:?} is not found", case.name);
}

/// As [`finds`], for a rule without which the group does not go on.
fn finds_stop(case: Case, broken: Broken, depth: usize, first: &'static [Move]) {
    finds(Case { every: 1, ..case }, broken, depth, first);
}

use Move::{Bring, Do};
use Step::{Agree, Begin, Crash, Learn, Mark, Publish, Ready, Remove, Show, Start, Turn};

#[test]
fn two_candidates() {
    holds(CANDIDATES);
    finds_stop(CANDIDATES, Broken::PromiseOutlivesCut, 5, &[]);
}

/// Both candidates have all reports.
#[test]
fn two_cuts_of_one_term() {
    let first = &[
        Do(Turn(0)),
        Do(Turn(1)),
        Do(Turn(2)),
        Bring(0, 1),
        Bring(1, 0),
        Bring(2, 0),
        Bring(2, 1),
        Do(Turn(0)),
        Do(Turn(1)),
        Bring(0, 1),
        Bring(1, 0),
        Bring(0, 2),
        Bring(1, 2),
        Do(Turn(2)),
        Do(Turn(0)),
        Do(Turn(1)),
        Bring(0, 1),
        Bring(1, 0),
        Bring(2, 0),
        Bring(2, 1),
        Do(Turn(0)),
        Do(Turn(1)),
        Do(Agree(0)),
        Do(Learn(0)),
    ];
    finds(CANDIDATES, Broken::TwoCuts, 4, first);
}

#[test]
fn a_crash() {
    holds(CRASH);
    finds_stop(CRASH, Broken::AskOnce, 4, &[Do(Begin(1))]);
    let first = &[
        Do(Begin(0)),
        Do(Turn(0)),
        Do(Ready(0)),
        Do(Start(0)),
        Do(Mark(0)),
        Do(Show(0)),
        Do(Publish(0)),
        Do(Crash(0, false)),
        Do(Begin(1)),
    ];
    finds(CRASH, Broken::BeginsWithStored, 5, first);
}

/// A writer of node 1 runs when the sequencer's process starts anew.
#[test]
fn a_crash_and_a_partition() {
    holds(PARTITION);
    let of_majority = &[
        Do(Begin(1)),
        Do(Turn(1)),
        Bring(1, 0),
        Bring(0, 1),
        Do(Ready(1)),
        Do(Start(1)),
        Do(Crash(0, false)),
        Do(Turn(1)),
        Do(Turn(2)),
        Bring(1, 0),
        Bring(2, 0),
        Do(Turn(0)),
        Bring(0, 2),
        Do(Turn(2)),
        Bring(2, 0),
        Do(Turn(0)),
    ];
    finds(PARTITION, Broken::MajorityReports, 5, of_majority);
    let of_all = &[
        Do(Begin(1)),
        Do(Turn(1)),
        Bring(1, 0),
        Bring(0, 1),
        Do(Ready(1)),
        Do(Start(1)),
        Do(Crash(0, false)),
        Do(Turn(1)),
        Do(Turn(2)),
        Bring(1, 0),
        Bring(2, 0),
        Do(Turn(0)),
        Bring(0, 2),
        Bring(0, 1),
        Do(Turn(2)),
        Do(Turn(1)),
        Bring(2, 0),
        Bring(1, 0),
        Do(Turn(0)),
        Do(Agree(0)),
    ];
    finds(PARTITION, Broken::PromiseHoldsNothing, 4, of_all);
    finds(PARTITION, Broken::OldGrantCommits, 5, of_all);
    let of_busy = &[
        Do(Begin(1)),
        Do(Turn(1)),
        Bring(1, 0),
        Bring(0, 1),
        Do(Ready(1)),
        Do(Start(1)),
        Do(Mark(1)),
        Do(Crash(0, false)),
        Do(Turn(1)),
        Do(Turn(2)),
        Bring(1, 0),
        Bring(2, 0),
        Do(Turn(0)),
        Bring(0, 2),
        Bring(0, 1),
        Do(Turn(2)),
        Do(Turn(1)),
        Bring(2, 0),
        Bring(1, 0),
        Do(Turn(0)),
    ];
    finds(PARTITION, Broken::ReportsWhileBusy, 4, of_busy);
}

#[test]
fn a_removal() {
    holds(REMOVAL);
    // Node 2 has committed a write that nobody else has, and all have reported.
    let first = &[
        Do(Begin(0)),
        Do(Turn(2)),
        Bring(2, 0),
        Bring(0, 2),
        Do(Ready(0)),
        Do(Start(0)),
        Do(Mark(0)),
        Do(Show(0)),
        Do(Publish(0)),
        Do(Crash(0, false)),
        Do(Turn(1)),
        Do(Turn(2)),
        Bring(1, 0),
        Bring(2, 0),
        Do(Turn(0)),
        Bring(0, 2),
        Bring(0, 1),
        Do(Turn(2)),
        Do(Turn(1)),
        Bring(2, 0),
        Bring(1, 0),
        Do(Turn(0)),
        Do(Remove(2)),
    ];
    let budget = Budget {
        crashes: 1,
        ..REMOVAL.budget
    };
    let case = Case { budget, ..REMOVAL };
    finds_stop(case, Broken::RemovedCounts, 3, first);
    finds_stop(case, Broken::RemovedWaits, 3, first);
    let first = &[
        Do(Remove(2)),
        Do(Learn(1)),
        Do(Turn(1)),
        Bring(1, 0),
        Do(Turn(0)),
        Bring(0, 1),
        Do(Turn(1)),
        Do(Agree(0)),
        Do(Learn(1)),
        Do(Begin(0)),
        Do(Turn(1)),
        Do(Ready(0)),
        Do(Start(0)),
        Do(Mark(0)),
        Do(Show(0)),
        Do(Publish(0)),
    ];
    finds(STALE, Broken::PromiseKeepsSequencer, 7, first);
    // The reader may take its snapshot when the cut comes.
    let first = &[
        Do(Begin(1)),
        Do(Turn(0)),
        Do(Ready(1)),
        Do(Remove(2)),
        Do(Learn(0)),
        Do(Turn(0)),
        Bring(0, 1),
        Do(Turn(1)),
        Bring(1, 0),
        Do(Turn(0)),
        Do(Agree(0)),
    ];
    finds(STALE, Broken::ReadyOutlivesCut, 5, first);
}
