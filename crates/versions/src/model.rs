//! Every schedule of a few transactions on three nodes with two tables, by a model checker over the
//! real rules. A state is a [`World`]; its actions are all that can happen.
//!
//! Each case also runs with rules broken, and the checker finds a schedule that shows it.
//! `BRAID_VERSIONS_STATES` is how many states each case visits at most.

use stateright::{Checker, HasDiscoveries, Model, Property};

use crate::Access::{self, Read, Write};
use crate::broken::Broken;
use crate::cluster::{Action, Budget, Style, World};

type Script = &'static [(usize, &'static [(u32, Access)])];

#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    /// Node and declaration of each transaction.
    script: Script,
    budget: Budget,
    broken: Option<Broken>,
    /// The first steps.
    first: &'static [Action],
}

impl Model for Case {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let style = Style {
            joined: self.budget.losses == 0,
            ..Style::default()
        };
        let mut world = World::new(3, style, self.budget, self.broken);
        for (node, declared) in self.script {
            world.add(*node, declared);
        }
        for action in self.first {
            world.step(*action);
        }
        vec![world]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        actions.extend(world.actions());
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        world.step(action);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("rules", |_, world: &World| world.check().is_ok()),
            Property::always("all end", |_, world: &World| {
                !world.actions().is_empty() || world.check_end().is_ok()
            }),
            Property::sometimes("all are acknowledged", |_, world: &World| {
                world.transactions.iter().all(|t| t.acknowledged)
            }),
        ]
    }
}

const NO_FAULT: Budget = Budget {
    crashes: 0,
    isolations: 0,
    opens: 0,
    fences: 0,
    aborts: 0,
    losses: 0,
    repeats: 0,
};

/// A writer that others depend on, a reader that writes, a reader; one may roll back.
const CHAIN: Case = Case {
    name: "chain",
    script: &[
        (0, &[(1, Write)]),
        (1, &[(1, Read), (2, Write)]),
        (2, &[(1, Read), (2, Read)]),
    ],
    budget: Budget {
        aborts: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
};

/// A reader that waits for one table while the other one goes on.
const OVERTAKEN: Case = Case {
    name: "overtaken",
    script: &[
        (2, &[(2, Write)]),
        (0, &[(1, Read), (2, Read)]),
        (1, &[(2, Write)]),
        (0, &[(1, Write)]),
    ],
    budget: NO_FAULT,
    broken: None,
    first: &[],
};

/// Two writers of one table; a node crashes, an answer is lost.
const CRASH: Case = Case {
    name: "crash",
    script: &[(1, &[(1, Write), (2, Write)]), (2, &[(1, Write)])],
    budget: Budget {
        crashes: 1,
        losses: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
};

/// A node is cut off, and another one begins as sequencer.
const PARTITION: Case = Case {
    name: "partition",
    script: &[(0, &[(1, Write)]), (1, &[(1, Write), (2, Write)])],
    budget: Budget {
        isolations: 1,
        opens: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
};

/// A node is cut off and fenced.
const FENCE: Case = Case {
    name: "fence",
    script: &[(1, &[(1, Write), (2, Write)]), (2, &[(1, Write)])],
    budget: Budget {
        isolations: 1,
        fences: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
};

/// A crash and a partition.
const BOTH: Case = Case {
    name: "crash and partition",
    script: &[(1, &[(1, Write)]), (2, &[(1, Read), (2, Write)])],
    budget: Budget {
        crashes: 1,
        isolations: 1,
        ..NO_FAULT
    },
    broken: None,
    first: &[],
};

fn limit(default: usize) -> usize {
    let asked = std::env::var("BRAID_VERSIONS_STATES").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn check(case: Case) -> Option<String> {
    let began = std::time::Instant::now();
    let checker = case
        .checker()
        .target_state_count(limit(3_000))
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let failed = ["rules", "all end"].into_iter().find_map(|property| {
        let path = checker.discovery(property)?;
        let last = path.last_state().clone();
        let error = last.check().and_then(|()| last.check_end()).unwrap_err();
        Some(format!("{error} after {:?}", path.into_actions()))
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

fn holds(case: Case) {
    assert_eq!(check(case), None, "{}", case.name);
}

/// Begins with some steps. From there on the rules hold, and with one broken the checker finds a
/// schedule that shows it.
fn finds(case: Case, broken: &[Broken], first: &'static [Action]) {
    let case = Case { first, ..case };
    holds(case);
    for broken in broken.iter().copied() {
        let broken = Some(broken);
        let failed = check(Case { broken, ..case });
        assert!(failed.is_some(), "{}: {broken:?} is not found", case.name);
    }
}

use Action::{Applied, Apply, Begin, Exchange, Isolate, Mark, Publish, Start};

#[test]
fn a_chain_of_transactions() {
    holds(CHAIN);
    let first = &[
        Begin(0),
        Begin(1),
        Start(0),
        Mark(0),
        Apply(1, 0, 0),
        Applied(1, 0),
    ];
    finds(CHAIN, &[Broken::ApplyWithoutSeen], first);
    finds(CHAIN, &[Broken::VoidsUntold], &[Begin(1), Begin(0)]);
}

/// The reader begins before the last two writers. One of these is acknowledged before the other
/// one begins, so nobody may see only the other one.
#[test]
fn a_reader_that_is_overtaken() {
    holds(OVERTAKEN);
    let first = &[
        Begin(0),
        Begin(1),
        Start(0),
        Mark(0),
        Publish(0),
        Apply(1, 2, 0),
        Applied(1, 0),
        Begin(2),
        Start(2),
        Mark(2),
        Publish(2),
        Apply(2, 1, 0),
        Applied(2, 0),
        Begin(3),
        Start(3),
        Mark(3),
        Apply(1, 0, 0),
        Applied(1, 0),
        Apply(2, 0, 0),
        Applied(2, 0),
    ];
    let broken = [Broken::LaterIsSound, Broken::SeenFromReached];
    finds(OVERTAKEN, &broken, first);
}

#[test]
fn a_crash() {
    holds(CRASH);
    let first = &[Begin(0), Begin(1), Exchange(2, true)];
    finds(CRASH, &[Broken::RepeatsCount], first);
}

#[test]
fn a_partition() {
    holds(PARTITION);
    let first = &[
        Begin(0),
        Start(0),
        Mark(0),
        Publish(0),
        Apply(1, 0, 0),
        Applied(1, 0),
    ];
    finds(PARTITION, &[Broken::CountersTooLow], first);
    let first = &[Begin(0), Start(0), Mark(0)];
    let broken = [Broken::OldTermAccepted, Broken::AcknowledgeAlone];
    finds(PARTITION, &broken, first);
}

#[test]
fn a_fenced_node() {
    holds(FENCE);
    let first = &[Begin(0), Begin(1), Start(0), Mark(0), Isolate(1)];
    finds(FENCE, &[Broken::VoidWithoutFencing], first);
}

#[test]
fn a_crash_and_a_partition() {
    holds(BOTH);
}
