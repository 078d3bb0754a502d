//! Nodes whose conflicts are resolved by a function end with equal rows and versions, in any order
//! of arrival.

use braid_bgworker::conflict::{Action, Kind, Local, Version, decide_insert, decide_update};
use braid_bgworker::merge::{Answer, MergeAction, sees, settle};
use braid_bgworker::resolution::{Function, Level, Resolution, Rule, Rules};

use crate::random::{Budget, Random};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

type Stamp = (i64, usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    value: u64,
    stamp: Stamp,
    marked: bool,
}

/// A change in a stream, with the row before it as its writer saw it, if there was one.
#[derive(Debug, Clone, Copy)]
struct Change {
    before: Option<u64>,
    after: u64,
    stamp: Stamp,
}

fn version(stamp: Stamp) -> Version<'static> {
    Version {
        timestamp: stamp.0,
        origin: NAMES[stamp.1],
    }
}

/// A merge function: of the local row, the remote row, and the row before the change.
type Merge = fn(u64, u64, Option<u64>) -> u64;

fn rules() -> Rules {
    Rules::new(&[Rule {
        level: Level::Table,
        kind: None,
        resolution: Resolution::Function,
        function: Some(Function {
            oid: 1,
            replicates: false,
        }),
    }])
}

/// Applies a change like the appliers. `whole`: WAL has the whole row before it.
fn receive(row: Option<Row>, change: Change, merge: Merge, whole: bool) -> Option<Row> {
    let remote = version(change.stamp);
    let local = match row {
        None => Local::Missing,
        Some(row) if row.marked => Local::Merged(version(row.stamp)),
        Some(row) => Local::Present(version(row.stamp)),
    };
    let decided = match change.before {
        None => decide_insert(local, remote, true),
        Some(_) => decide_update(local, remote, true),
    };
    let mut decision = rules().resolve(decided, local, remote).unwrap();
    if let (true, Some(before), Some(row)) = (whole, change.before, row) {
        let same = row.value == before;
        decision = sees(decision, Kind::UpdateOriginDiffers, local, remote, same);
    }
    let plain = Row {
        value: change.after,
        stamp: change.stamp,
        marked: false,
    };
    match (decision.action, row) {
        (Action::Keep, _) => row,
        (Action::Apply, _) | (_, None) => Some(plain),
        (_, Some(here)) => {
            let value = merge(here.value, change.after, change.before.filter(|_| whole));
            let answer = match (value == here.value, value == change.after) {
                (true, true) => Answer::Both,
                (true, false) => Answer::Local,
                (false, true) => Answer::Remote,
                (false, false) => Answer::Merged,
            };
            let settled = settle(answer, local, remote);
            match settled.merge_action {
                MergeAction::Nothing => row,
                MergeAction::Delete => None,
                MergeAction::Write => Some(Row {
                    value,
                    stamp: if settled.keeps_version {
                        here.stamp
                    } else {
                        change.stamp
                    },
                    marked: settled.marked,
                }),
            }
        }
    }
}

struct Node {
    row: Option<Row>,
    /// The node's own changes, in the order of its commits.
    log: Vec<Change>,
    /// Number of changes read from each node.
    read: Vec<usize>,
    clock: i64,
}

/// Whether the last node is there from the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    There,
    /// The node joins by copying another one's row.
    Joins,
}

/// Writes and delivers at random, then delivers the rest. Returns each node's final state, and how
/// much was added.
fn run(
    random: &mut Random,
    merge: Merge,
    whole: bool,
    write: fn(&mut Random, u64) -> u64,
    inserts: bool,
    last: Last,
) -> (Vec<Option<Row>>, u64) {
    let count = 2 + random.index(3);
    let mut joins = (last == Last::Joins).then_some(count - 1);
    let shared = !inserts || random.one_in(2);
    let start = Row {
        value: 0,
        stamp: (0, 0),
        marked: false,
    };
    let mut nodes: Vec<Node> = (0..count)
        .map(|_| Node {
            row: shared.then_some(start),
            log: Vec::new(),
            read: vec![0; count],
            clock: 0,
        })
        .collect();
    let mut added = 0_u64;
    let steps = 5 + random.index(40);
    for step in 0..steps {
        let at = random.index(count);
        if joins == Some(at) {
            if random.one_in(4) {
                join(&mut nodes, at, random);
                joins = None;
            }
        } else if random.one_in(2) {
            let before = nodes[at].row.map(|row| row.value);
            let after = write(random, before.unwrap_or(0));
            // Additions of a union are not counted.
            added = added.wrapping_add(after.wrapping_sub(before.unwrap_or(0)));
            // A node's clock is not behind anything that it has read, and may be ahead of the
            // others' clocks.
            let seen = nodes[at].row.map_or(0, |row| row.stamp.0);
            let clock = nodes[at].clock.max(seen) + 1 + i64::try_from(random.below(3)).unwrap();
            let stamp = (clock, at);
            nodes[at].clock = clock;
            nodes[at].row = Some(Row {
                value: after,
                stamp,
                marked: false,
            });
            nodes[at].log.push(Change {
                before,
                after,
                stamp,
            });
        } else {
            deliver(&mut nodes, at, (at + 1 + step) % count, merge, whole);
        }
    }
    if let Some(at) = joins {
        join(&mut nodes, at, random);
    }
    for at in 0..count {
        for from in 0..count {
            while deliver(&mut nodes, at, from, merge, whole) {}
        }
    }
    (nodes.iter().map(|node| node.row).collect(), added)
}

/// Delivers the next change of `from` to `at`. Returns false if there is none.
fn deliver(nodes: &mut [Node], at: usize, from: usize, merge: Merge, whole: bool) -> bool {
    if at == from {
        return false;
    }
    let Some(change) = nodes[from].log.get(nodes[at].read[from]).copied() else {
        return false;
    };
    nodes[at].read[from] += 1;
    nodes[at].row = receive(nodes[at].row, change, merge, whole);
    true
}

/// Joins a node, which copies another one's row, with version and merge marker. From then on it
/// gets that node's changes. It gets the third nodes' changes from an earlier position than the
/// copied node had reached, so the copy already contains the first of them.
fn join(nodes: &mut [Node], at: usize, random: &mut Random) {
    let from = random.index(nodes.len() - 1);
    nodes[at].row = nodes[from].row;
    for by in (0..nodes.len()).filter(|by| *by != at) {
        nodes[at].read[by] = if by == from {
            nodes[from].log.len()
        } else {
            random.index(nodes[from].read[by] + 1)
        };
    }
}

fn agree(name: &str, rows: &[Option<Row>], round: usize) {
    let what = |row: &Option<Row>| row.map(|row| (row.value, row.stamp));
    for row in rows {
        assert_eq!(what(row), what(&rows[0]), "{name}, round {round}: {rows:?}");
    }
}

/// Nodes write and merge values that only grow; the last node joins as given.
fn unite(name: &'static str, last: Last) {
    let mut random = Random::new(name);
    let mut budget = Budget::new();
    while let Some(round) = budget.round(2000) {
        for whole in [false, true] {
            let (rows, _) = run(
                &mut random,
                |local, remote, _| local | remote,
                whole,
                |random, value| value | 1 << random.below(60),
                true,
                last,
            );
            agree(name, &rows, round);
        }
    }
}

/// A join of a semilattice, with writes that only add, needs nothing but the keys in WAL.
#[test]
fn what_either_has_is_on_all_nodes() {
    unite("what_either_has_is_on_all_nodes", Last::There);
}

/// A node that joins by a copy knows that the copied row was merged.
#[test]
fn a_copied_row_is_merged_on() {
    unite("a_copied_row_is_merged_on", Last::Joins);
}

/// With the row before each change, each increment counts once, on all nodes.
#[test]
fn increments_add_up_on_all_nodes() {
    let mut random = Random::new("increments_add_up_on_all_nodes");
    let mut budget = Budget::new();
    while let Some(round) = budget.round(2000) {
        let (rows, added) = run(
            &mut random,
            |local, remote, before| local + remote - before.unwrap_or(0),
            true,
            |random, value| value + 1 + random.below(5),
            false,
            Last::There,
        );
        agree("delta", &rows, round);
        assert_eq!(rows[0].map_or(0, |row| row.value), added, "round {round}");
    }
}
