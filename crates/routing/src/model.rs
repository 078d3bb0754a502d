//! Every schedule of a few steps over the real state and window, by a model checker.
//!
//! Three nodes share a log. A node with the whole log may append to it; an entry that two of three
//! nodes have is committed; a node that wins an election cuts the log to what it has. Each node
//! applies committed entries as late as it likes. Clocks show the true time or the skew more, and
//! another one each time. All nodes write and read. Nodes are alike, so states that differ in
//! their order are one.
//!
//! Checked in each state:
//! - No row was placed by a node that lacks a rule with a time before the row's creation: each row
//!   is where the committed log places it.
//! - No read misses a committed row: each node, at each reading of its clock, with each bound.
//!
//! Each case also runs with one guard removed, and the checker finds a schedule that shows it.
//! `BRAID_ROUTING_STEPS` is how many entries are appended at most, instead of few.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model, Property};

use crate::{
    Admission, Entry, Expressions, Key, NodeId, NodeSet, ReadBound, RecordHash, RoutedTable,
    Routing, SetId, Shard, Shards, Spread, TableName, Tenant, TenantHash, Time, Window,
};

// A rule counts a tick after the `Close` before it, and a row that follows it is a tick later. So a
// slack or skew of one tick would show nothing.
const AHEAD: i64 = 6;
const SLACK: i64 = 2;
const SKEW: i64 = 2;
/// True time ends here. A `Close` that all nodes have is `AHEAD` of time 0.
const END: i64 = 4;

/// A guard that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    /// A node creates rows beyond its last `Close`.
    CreateUnclosed,
    /// A rule counts though its time is closed.
    AcceptClosedRule,
    /// A node applies entries that no majority has.
    ApplyUncommitted,
    /// A read compares its bare clock with the last `Close`.
    TrustClock,
    /// A read leaves the skew out.
    ForgetSkew,
    /// A read leaves the slack out.
    ForgetSlack,
    /// A node creates rows that are dated as far ahead as the window.
    DateAhead,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Item {
    Close(i64),
    /// A rule from this time on; each doubles the spread.
    Rule(i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Node {
    has: usize,
    applied: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Row {
    created: i64,
    shard: Shard,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    now: i64,
    log: Vec<Item>,
    /// Sorted.
    nodes: [Node; 3],
    row: Option<Row>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Tick,
    /// A node appends an entry.
    Append(usize, Item),
    /// A node gets the next entry.
    Get(usize),
    /// A node applies the next entry.
    Apply(usize),
    /// A node wins an election.
    Elect(usize),
    Write(usize, Row),
}

struct Case {
    broken: Option<Broken>,
    /// How long the log is at most.
    entries: usize,
    window: Window,
    tenant: TenantHash,
    /// Tables by the log that made them.
    tables: Mutex<HashMap<Vec<Item>, Arc<RoutedTable>>>,
}

fn name() -> TableName {
    TableName::new(b"t").unwrap()
}

fn tenant() -> Tenant {
    Tenant::new(&Key::Integer(42)).unwrap()
}

fn rule(time: i64, spread: u32) -> Entry {
    Entry::Rule {
        table: name(),
        time: Time(time),
        spread: Spread::new(spread).unwrap(),
        tenants: vec![tenant()],
    }
}

/// The record that each larger spread places elsewhere.
const RECORD: RecordHash = RecordHash(7);

impl Case {
    fn new(broken: Option<Broken>, entries: usize) -> Self {
        Self {
            broken,
            entries,
            window: Window::new(AHEAD, 1, SLACK, SKEW).unwrap(),
            tenant: tenant().tenant_hash(),
            tables: Mutex::default(),
        }
    }

    /// The table at a node that has applied this much of the log.
    fn table(&self, log: &[Item]) -> Arc<RoutedTable> {
        let mut tables = self.tables.lock().unwrap();
        if let Some(table) = tables.get(log) {
            return table.clone();
        }
        let mut routing = Routing::new();
        let sets = vec![NodeSet {
            id: SetId(0),
            nodes: vec![NodeId(1)],
        }];
        let route = Entry::Route {
            table: name(),
            expressions: Expressions::of_orders(),
            shards: Shards::new(8).unwrap(),
            sets,
        };
        routing.apply(&route).unwrap();
        let open = Entry::Open { table: name() };
        let lenient = self.broken == Some(Broken::AcceptClosedRule);
        if !lenient {
            routing.apply(&open).unwrap();
        }
        let mut spread = 1;
        for item in log {
            let entry = match item {
                Item::Close(time) => Entry::Close { time: Time(*time) },
                Item::Rule(time) => {
                    spread *= 2;
                    rule(*time, spread)
                }
            };
            let _ = routing.apply(&entry);
        }
        if lenient {
            // A table that is not open takes rules of any time.
            routing.apply(&open).unwrap();
        }
        let table = Arc::new(routing.table(&name()).unwrap().clone());
        tables.insert(log.to_vec(), table.clone());
        table
    }

    fn placement(&self, table: &RoutedTable, created: i64) -> Shard {
        table.placement(self.tenant, RECORD, Time(created))
    }

    fn may_create(&self, table: &RoutedTable, created: i64, now: i64) -> bool {
        let window = match self.broken {
            Some(Broken::CreateUnclosed) => return created <= now + SLACK,
            Some(Broken::DateAhead) => Window::new(3 * AHEAD, 1, AHEAD, SKEW).unwrap(),
            _ => self.window,
        };
        table.may_create(&window, Time(created), Time(now)) == Admission::Now
    }

    fn read_bound(&self, table: &RoutedTable, upto: Option<i64>, now: i64) -> ReadBound {
        let (slack, skew) = match self.broken {
            Some(Broken::TrustClock) => (0, 0),
            Some(Broken::ForgetSkew) => (SLACK, 0),
            Some(Broken::ForgetSlack) => (0, SKEW),
            _ => (SLACK, SKEW),
        };
        let window = Window::new(AHEAD, 1, slack, skew).unwrap();
        table.read_bound(&window, upto.map(Time), Time(now))
    }

    /// Whether each read of each node finds the row.
    fn is_found(&self, world: &World) -> bool {
        let Some(row) = world.row else { return true };
        world.nodes.iter().all(|node| {
            let table = self.table(&world.log[..node.applied]);
            // Later bounds ask more.
            let bounds = [Some(row.created), Some(row.created + 1), None];
            bounds.into_iter().all(|upto| {
                world.clocks().into_iter().all(|now| {
                    let bound = self.read_bound(&table, upto, now);
                    table.candidates(self.tenant, bound).contains(row.shard)
                })
            })
        })
    }

    fn is_placed_finally(&self, world: &World) -> bool {
        let table = self.table(&world.log[..world.committed()]);
        world
            .row
            .is_none_or(|row| row.shard == self.placement(&table, row.created))
    }
}

impl World {
    /// How much of the log a majority has: nodes are sorted.
    fn committed(&self) -> usize {
        self.nodes[1].has
    }

    /// What clocks can show.
    fn clocks(&self) -> [i64; 2] {
        [self.now, self.now + SKEW]
    }

    fn writes(&self, case: &Case, at: usize, actions: &mut Vec<Action>) {
        let table = case.table(&self.log[..self.nodes[at].applied]);
        for created in 0..=END + SKEW + AHEAD {
            let admitted = |now| case.may_create(&table, created, now);
            if self.clocks().into_iter().any(admitted) {
                let shard = case.placement(&table, created);
                actions.push(Action::Write(at, Row { created, shard }));
            }
        }
    }
}

impl Model for Case {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let node = Node { has: 1, applied: 1 };
        vec![World {
            now: 0,
            log: vec![Item::Close(AHEAD)],
            nodes: [node; 3],
            row: None,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.now < END {
            actions.push(Action::Tick);
        }
        for (at, node) in world.nodes.iter().enumerate() {
            if node.has < world.log.len() {
                actions.push(Action::Get(at));
                if world
                    .nodes
                    .iter()
                    .filter(|other| other.has <= node.has)
                    .count()
                    >= 2
                {
                    actions.push(Action::Elect(at));
                }
            } else if world.log.len() < self.entries {
                for now in world.clocks() {
                    actions.push(Action::Append(at, Item::Close(now + AHEAD)));
                }
                let table = self.table(&world.log[..node.applied]);
                let rule = Item::Rule(table.next_rule_time().0);
                actions.push(Action::Append(at, rule));
            }
            let most = if self.broken == Some(Broken::ApplyUncommitted) {
                node.has
            } else {
                node.has.min(world.committed())
            };
            if node.applied < most {
                actions.push(Action::Apply(at));
            }
            if world.row.is_none() {
                world.writes(self, at, actions);
            }
        }
    }

    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut world = last.clone();
        match action {
            Action::Tick => world.now += 1,
            Action::Append(at, item) => {
                world.log.push(item);
                world.nodes[at].has += 1;
            }
            Action::Get(at) => world.nodes[at].has += 1,
            Action::Apply(at) => world.nodes[at].applied += 1,
            Action::Elect(at) => {
                let len = world.nodes[at].has;
                world.log.truncate(len);
                for node in &mut world.nodes {
                    node.has = node.has.min(len);
                    node.applied = node.applied.min(len);
                }
            }
            Action::Write(_, row) => world.row = Some(row),
        }
        world.nodes.sort();
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("rows are placed finally", Self::is_placed_finally),
            Property::always("reads find all rows", Self::is_found),
            Property::sometimes("a row follows a rule", |case: &Self, world: &World| {
                let old = case.placement(&case.table(&[]), 0);
                world.row.is_some_and(|row| row.shard != old)
            }),
            Property::sometimes("a read asks few shards for it", |case, world: &World| {
                let old = case.placement(&case.table(&[]), 0);
                let table = case.table(&world.log[..world.nodes[0].applied]);
                let bound = case.read_bound(&table, None, world.now);
                bound == ReadBound::Known && world.row.is_some_and(|row| row.shard != old)
            }),
            Property::sometimes("a late node asks everywhere", |case, world: &World| {
                let table = case.table(&world.log[..world.nodes[0].applied]);
                case.read_bound(&table, None, world.now) == ReadBound::Everywhere
                    && world.row.is_some()
            }),
        ]
    }
}

fn entries() -> usize {
    std::env::var("BRAID_ROUTING_STEPS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(3)
}

#[test]
fn no_row_is_misplaced_and_no_read_misses_one() {
    let began = Instant::now();
    let checker = Case::new(None, entries()).checker().spawn_bfs().join();
    println!(
        "{} states, depth {}, {:?}",
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed()
    );
    checker.assert_properties();
}

/// With the guard removed the checker finds a schedule that breaks this property.
fn finds(broken: Broken, property: &'static str) {
    let began = Instant::now();
    let checker = Case::new(Some(broken), entries())
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let found = checker.discovery(property);
    println!(
        "{broken:?}: {} states, {:?}",
        checker.unique_state_count(),
        began.elapsed()
    );
    let path = found.unwrap_or_else(|| panic!("{broken:?} is not found"));
    println!("{:?}", path.into_actions());
}

#[test]
fn a_node_that_creates_rows_beyond_its_close_is_found() {
    finds(Broken::CreateUnclosed, "rows are placed finally");
}

#[test]
fn a_rule_whose_time_is_closed_is_found() {
    finds(Broken::AcceptClosedRule, "rows are placed finally");
}

#[test]
fn a_node_that_applies_what_no_majority_has_is_found() {
    finds(Broken::ApplyUncommitted, "rows are placed finally");
}

#[test]
fn a_read_that_trusts_its_clock_is_found() {
    finds(Broken::TrustClock, "reads find all rows");
}

#[test]
fn a_read_that_forgets_the_skew_is_found() {
    finds(Broken::ForgetSkew, "reads find all rows");
}

#[test]
fn a_read_that_forgets_the_slack_is_found() {
    finds(Broken::ForgetSlack, "reads find all rows");
}

#[test]
fn rows_that_are_dated_far_ahead_are_found() {
    finds(Broken::DateAhead, "reads find all rows");
}
