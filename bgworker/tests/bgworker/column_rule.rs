//! Nodes write the same row and deliver their changes in random order: columns with rules end equal
//! on all nodes, and sums contain everything that was added.

use braid_bgworker::column_rule::{Came, ColumnRule, Here, Values, is_again, merge, takes, writes};
use braid_bgworker::conflict::{
    Action, Local, Version, decide_delete, decide_insert, decide_update,
};

use crate::random::{Budget, Random};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

type Stamp = (i64, usize);

/// Columns of 64-bit integers.
struct Integers;

impl Values for Integers {
    type Value = i64;
    type Error = std::num::TryFromIntError;

    fn sum(
        &mut self,
        base: Option<i64>,
        new: Option<i64>,
        old: Option<i64>,
    ) -> Result<(i64, bool), Self::Error> {
        let of = |value: Option<i64>| i128::from(value.unwrap_or(0));
        let sum = of(base) + of(new) - of(old);
        Ok((i64::try_from(sum)?, sum == 0))
    }

    fn is_same(&mut self, one: i64, other: i64) -> bool {
        one == other
    }

    fn is_after(&mut self, one: i64, other: i64) -> bool {
        one > other
    }
}

/// A sum, a largest value, a smallest one, and a value without a rule.
type Cells = [Option<i64>; 4];
const RULES: [ColumnRule; 4] = [
    ColumnRule::Delta,
    ColumnRule::Max,
    ColumnRule::Min,
    ColumnRule::LastUpdateWins,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    cells: Cells,
    /// `None`: the row was there from the start.
    stamp: Option<Stamp>,
    marked: bool,
}

#[derive(Debug, Clone, Copy)]
enum Change {
    Insert(Cells),
    Update(Cells, Cells),
    Delete,
}

#[derive(Debug, Clone, Default)]
struct Node {
    row: Option<Row>,
    tombstone: Option<Stamp>,
    log: Vec<(Change, Stamp)>,
    read: Vec<usize>,
    clock: i64,
}

fn version((timestamp, origin): Stamp) -> Version<'static> {
    Version {
        timestamp,
        origin: NAMES[origin],
    }
}

impl Node {
    fn local(&self) -> Local<'static> {
        match (self.row, self.tombstone) {
            (Some(Row { stamp: None, .. }), _) => Local::Unversioned,
            (
                Some(Row {
                    stamp: Some(stamp),
                    marked,
                    ..
                }),
                _,
            ) if marked => Local::Merged(version(stamp)),
            (
                Some(Row {
                    stamp: Some(stamp), ..
                }),
                _,
            ) => Local::Present(version(stamp)),
            (None, Some(stamp)) => Local::Deleted(version(stamp)),
            (None, None) => Local::Missing,
        }
    }

    /// Applies a change like the appliers.
    fn receive(&mut self, change: Change, stamp: Stamp) {
        let (local, remote) = (self.local(), version(stamp));
        let (decision, cells) = match change {
            Change::Insert(cells) => (decide_insert(local, remote, true), cells),
            Change::Update(_, cells) => (decide_update(local, remote, true), cells),
            Change::Delete => {
                if decide_delete(local, remote, true).action == Action::Apply {
                    self.row = None;
                }
                if self.row.is_none() {
                    self.tombstone = self.tombstone.max(Some(stamp));
                }
                return;
            }
        };
        let wins = decision.action == Action::Apply;
        if self.row.is_none() && !wins {
            return;
        }
        // The change was for a deleted row.
        let outlived = !wins
            && self
                .tombstone
                .is_some_and(|deleted| version(deleted) > remote);
        if is_again(decision, local, remote) || outlived {
            return;
        }
        let mut merged = [None; 4];
        for (position, rule) in RULES.into_iter().enumerate() {
            let here = match (self.row, self.tombstone) {
                (
                    Some(Row {
                        cells, stamp: None, ..
                    }),
                    _,
                ) => Here::Unversioned(cells[position]),
                (Some(row), _) => Here::Row(row.cells[position]),
                (None, Some(_)) => Here::Deleted,
                (None, None) => Here::Nothing,
            };
            let came = match change {
                Change::Update(old, new) => Came::Update {
                    new: new[position],
                    old: old[position],
                },
                _ => Came::Insert(cells[position]),
            };
            merged[position] = merge(&mut Integers, rule, here, came, wins).unwrap();
        }
        let before = self.row;
        self.row = match before {
            Some(row) if !wins => Some(Row {
                cells: merged,
                marked: row.marked || merged != row.cells,
                ..row
            }),
            _ => Some(Row {
                cells: merged,
                stamp: Some(stamp),
                marked: false,
            }),
        };
    }

    /// Commits a change of a session of the node `at`, at a time that is not before anything that
    /// the node has seen.
    fn write(&mut self, at: usize, change: Change, time: i64) -> Stamp {
        let seen = self
            .row
            .and_then(|row| row.stamp)
            .map_or(0, |stamp| stamp.0);
        self.clock = time.max(self.clock + 1).max(seen + 1);
        let stamp = (self.clock, at);
        match change {
            Change::Insert(cells) | Change::Update(_, cells) => {
                self.row = Some(Row {
                    cells,
                    stamp: Some(stamp),
                    marked: false,
                });
            }
            Change::Delete => {
                self.row = None;
                self.tombstone = self.tombstone.max(Some(stamp));
            }
        }
        self.log.push((change, stamp));
        stamp
    }
}

fn group(count: usize, row: Option<Row>) -> Vec<Node> {
    let node = Node {
        row,
        read: vec![0; count],
        ..Node::default()
    };
    vec![node; count]
}

/// Delivers the next change of `from` to `at`. Returns false if there is none.
fn deliver(nodes: &mut [Node], at: usize, from: usize) -> bool {
    if at == from {
        return false;
    }
    let Some((change, stamp)) = nodes[from].log.get(nodes[at].read[from]).copied() else {
        return false;
    };
    nodes[at].read[from] += 1;
    nodes[at].receive(change, stamp);
    true
}

fn deliver_all(random: &mut Random, nodes: &mut [Node]) {
    let count = nodes.len();
    for _ in 0..8 * count {
        let (at, from) = (random.index(count), random.index(count));
        deliver(nodes, at, from);
    }
    for at in 0..count {
        for from in 0..count {
            while deliver(nodes, at, from) {}
        }
    }
}

fn number(random: &mut Random, nulls: bool) -> Option<i64> {
    (!nulls || !random.one_in(4)).then(|| i64::try_from(random.below(9)).unwrap() - 4)
}

/// Checks that nodes agree. After a column was set to null, whether it is null may depend on the
/// order; its sum never does.
fn agree(nodes: &[Node], exactly: bool, round: usize) {
    let what = |node: &Node| {
        node.row.map(|row| {
            let [sum, largest, smallest, word] = row.cells;
            let sum = if exactly { sum } else { Some(sum.unwrap_or(0)) };
            ([sum, largest, smallest, word], row.stamp)
        })
    };
    for node in nodes {
        assert_eq!(what(node), what(&nodes[0]), "round {round}: {nodes:#?}");
    }
}

fn next(random: &mut Random, row: Option<Row>, nulls: bool) -> Change {
    let cells: Cells = std::array::from_fn(|_| number(random, nulls));
    let Some(row) = row else {
        return Change::Insert(cells);
    };
    let [sum, largest, smallest, _] = row.cells;
    let [added, higher, lower, word] = cells;
    let sum = match (sum, added) {
        // An update of another column.
        _ if random.one_in(4) => sum,
        (sum, Some(added)) => Some(sum.unwrap_or(0) + added),
        (_, None) => None,
    };
    let or = |one: Option<i64>, other: Option<i64>, best: fn(i64, i64) -> i64| match (one, other) {
        (Some(one), Some(other)) => Some(best(one, other)),
        _ => one.or(other),
    };
    Change::Update(
        row.cells,
        [
            sum,
            or(largest, higher, i64::max),
            or(smallest, lower, i64::min),
            word,
        ],
    )
}

fn what_is_added(log: &[(Change, Stamp)]) -> i64 {
    log.iter()
        .map(|(change, _)| match change {
            Change::Insert(new) => new[0].unwrap_or(0),
            Change::Update(old, new) => new[0].unwrap_or(0) - old[0].unwrap_or(0),
            Change::Delete => 0,
        })
        .sum()
}

/// Increments count in any order of arrival of inserts and updates.
#[test]
fn every_increment_counts_on_every_node() {
    let mut random = Random::new("every_increment_counts_on_every_node");
    let mut budget = Budget::new();
    while let Some(round) = budget.round(2000) {
        let count = 2 + random.index(3);
        let nulls = random.one_in(2);
        // In half of the rounds the row is there from the start; in the others all nodes may insert
        // it.
        let start = random.one_in(2).then(|| Row {
            cells: std::array::from_fn(|_| number(&mut random, nulls)),
            stamp: None,
            marked: false,
        });
        let mut nodes = group(count, start);
        let steps = 3 + random.index(30);
        for _ in 0..steps {
            let at = random.index(count);
            if random.one_in(2) {
                let change = next(&mut random, nodes[at].row, nulls);
                let time = i64::try_from(random.below(40)).unwrap();
                nodes[at].write(at, change, time);
            } else {
                let from = random.index(count);
                deliver(&mut nodes, at, from);
            }
        }
        deliver_all(&mut random, &mut nodes);
        agree(&nodes, !nulls, round);
        let added: i64 = nodes.iter().map(|node| what_is_added(&node.log)).sum();
        let begun = start.and_then(|row| row.cells[0]).unwrap_or(0);
        let wanted = nodes
            .iter()
            .any(|node| !node.log.is_empty())
            .then_some(begun + added);
        if let (Some(wanted), Some(row)) = (wanted, nodes[0].row) {
            assert_eq!(
                row.cells[0].unwrap_or(0),
                wanted,
                "round {round}: {nodes:#?}"
            );
        }
        if let Some(row) = nodes[0].row {
            let written = nodes
                .iter()
                .flat_map(|node| &node.log)
                .filter_map(|(change, _)| match change {
                    Change::Insert(cells) | Change::Update(_, cells) => Some(*cells),
                    Change::Delete => None,
                })
                .chain(start.map(|row| row.cells));
            let largest = written.clone().filter_map(|cells| cells[1]).max();
            let smallest = written.filter_map(|cells| cells[2]).min();
            assert_eq!(
                (row.cells[1], row.cells[2]),
                (largest, smallest),
                "round {round}"
            );
        }
    }
}

/// A row is deleted and inserted anew by one node. Others add to the old row before that, and to
/// the new one once they have it.
#[test]
fn what_was_added_to_a_deleted_row_is_not_in_the_next_one() {
    let mut random = Random::new("what_was_added_to_a_deleted_row_is_not_in_the_next_one");
    let mut budget = Budget::new();
    while let Some(round) = budget.round(2000) {
        let count = 2 + random.index(3);
        let start = Row {
            cells: std::array::from_fn(|_| number(&mut random, false)),
            stamp: None,
            marked: false,
        };
        let mut nodes = group(count, Some(start));
        for _ in 0..random.index(12) {
            let at = random.index(count);
            let change = next(&mut random, nodes[at].row, false);
            let time = i64::try_from(random.below(40)).unwrap();
            nodes[at].write(at, change, time);
            let from = random.index(count);
            deliver(&mut nodes, at, from);
        }
        // Newer than everything that was added to the row.
        let at = random.index(count);
        nodes[at].write(at, Change::Delete, 1000);
        let cells = std::array::from_fn(|_| number(&mut random, false));
        nodes[at].write(at, Change::Insert(cells), 1001);
        let logged: Vec<usize> = nodes.iter().map(|node| node.log.len()).collect();
        let inserted = logged[at];
        for _ in 0..random.index(12) {
            let who = random.index(count);
            if who == at || nodes[who].read[at] >= inserted {
                let change = next(&mut random, nodes[who].row, false);
                let time = 1002 + i64::try_from(random.below(40)).unwrap();
                nodes[who].write(who, change, time);
            }
            let from = random.index(count);
            deliver(&mut nodes, who, from);
        }
        let added: i64 = nodes
            .iter()
            .zip(&logged)
            .map(|(node, before)| what_is_added(&node.log[*before..]))
            .sum();
        deliver_all(&mut random, &mut nodes);
        // If a change of the new row overtakes the deletion, it adds to the old row, if that still
        // exists.
        let overtaken = count > 2;
        if overtaken {
            continue;
        }
        agree(&nodes, true, round);
        assert_eq!(
            nodes[0].row.and_then(|row| row.cells[0]),
            Some(cells[0].unwrap_or(0) + added),
            "round {round}: {nodes:#?}"
        );
    }
}

/// Record of one write of a row: its writer, and the columns that it wrote.
type Write = (Stamp, [bool; 4]);

/// A node whose columns are all registers of their own.
#[derive(Debug, Clone, Default)]
struct Registers {
    row: Option<(Cells, Option<Stamp>)>,
    /// Writes that appliers have recorded, or that were read from WAL.
    known: Vec<Write>,
    /// Writes of the node's sessions that were not read from WAL yet.
    unread: Vec<Write>,
    log: Vec<(Change, Stamp)>,
    read: Vec<usize>,
    clock: i64,
}

fn written(change: Change) -> [bool; 4] {
    std::array::from_fn(|position| {
        let came = match change {
            Change::Insert(new) => Came::Insert(new[position]),
            Change::Update(old, new) => Came::Update {
                new: new[position],
                old: old[position],
            },
            Change::Delete => return false,
        };
        writes(&mut Integers, came)
    })
}

impl Registers {
    /// Applies a change like the appliers: the recorded writes are used only if the row's version
    /// does not decide.
    fn receive(&mut self, change: Change, stamp: Stamp, from_origin: bool) {
        let (Change::Insert(new) | Change::Update(_, new)) = change else {
            return;
        };
        let remote = version(stamp);
        let Some((cells, seen)) = self.row else {
            self.known.push((stamp, written(change)));
            self.row = Some((new, Some(stamp)));
            return;
        };
        let local = seen.map_or(Local::Unversioned, |seen| Local::Present(version(seen)));
        let decision = match change {
            Change::Insert(_) => decide_insert(local, remote, from_origin),
            _ => decide_update(local, remote, from_origin),
        };
        let is_newer = decision.action == Action::Apply;
        if !is_newer {
            self.known.append(&mut self.unread);
        }
        let wrote = written(change);
        let took: [bool; 4] = std::array::from_fn(|position| {
            let of = self.known.iter().filter(|(_, columns)| columns[position]);
            let newest = of.map(|(stamp, _)| version(*stamp)).max();
            wrote[position] && (is_newer || takes(newest, remote))
        });
        let cells = std::array::from_fn(|position| {
            let came = Came::Insert(new[position]);
            let here = Here::Row(cells[position]);
            merge(
                &mut Integers,
                ColumnRule::LastUpdateWins,
                here,
                came,
                took[position],
            )
            .unwrap()
        });
        self.known.push((stamp, took));
        self.row = Some((cells, if is_newer { Some(stamp) } else { seen }));
    }

    fn write(&mut self, at: usize, change: Change, time: i64) {
        let seen = self
            .row
            .and_then(|(_, stamp)| stamp)
            .map_or(0, |seen| seen.0);
        self.clock = time.max(self.clock + 1).max(seen + 1);
        let stamp = (self.clock, at);
        if let Change::Insert(cells) | Change::Update(_, cells) = change {
            self.row = Some((cells, Some(stamp)));
        }
        self.unread.push((stamp, written(change)));
        self.log.push((change, stamp));
    }
}

/// Each column has the value of the newest change that wrote it, on every node. That holds for any
/// order of arrival, any time of reading local changes from WAL, and for repeated changes.
#[test]
fn each_column_has_its_newest_value_on_every_node() {
    let mut random = Random::new("each_column_has_its_newest_value_on_every_node");
    let mut budget = Budget::new();
    while let Some(round) = budget.round(2000) {
        let count = 2 + random.index(3);
        let nulls = random.one_in(2);
        let start = random
            .one_in(2)
            .then(|| std::array::from_fn(|_| number(&mut random, nulls)));
        let node = Registers {
            row: start.map(|cells| (cells, None)),
            read: vec![0; count],
            ..Registers::default()
        };
        let mut nodes = vec![node; count];
        let deliver = |nodes: &mut [Registers], at: usize, from: usize, again: usize| {
            let next = nodes[at].read[from];
            if at == from || next >= nodes[from].log.len() {
                return false;
            }
            // Changes that arrive again come by another way.
            for number in next.saturating_sub(again)..=next {
                let (change, stamp) = nodes[from].log[number];
                nodes[at].receive(change, stamp, number == next);
            }
            nodes[at].read[from] += 1;
            true
        };
        for _ in 0..3 + random.index(30) {
            let at = random.index(count);
            match random.index(5) {
                0 | 1 => {
                    let cells: Cells = std::array::from_fn(|_| number(&mut random, nulls));
                    let change = match nodes[at].row {
                        None => Change::Insert(cells),
                        Some((old, _)) => Change::Update(
                            old,
                            std::array::from_fn(|position| {
                                if random.one_in(2) {
                                    cells[position]
                                } else {
                                    old[position]
                                }
                            }),
                        ),
                    };
                    let time = i64::try_from(random.below(40)).unwrap();
                    nodes[at].write(at, change, time);
                }
                2 => {
                    let mut read = std::mem::take(&mut nodes[at].unread);
                    nodes[at].known.append(&mut read);
                }
                _ => {
                    let (from, again) = (random.index(count), random.index(3));
                    deliver(&mut nodes, at, from, again);
                }
            }
        }
        for at in 0..count {
            for from in 0..count {
                while deliver(&mut nodes, at, from, random.index(2)) {}
            }
        }
        let mut wanted = start.map(|cells: Cells| cells.map(|cell| (None, cell)));
        for (change, stamp) in nodes.iter().flat_map(|node| &node.log) {
            let (Change::Insert(cells) | Change::Update(_, cells)) = *change else {
                continue;
            };
            let newest = wanted.get_or_insert([(None, None); 4]);
            for (position, wrote) in written(*change).into_iter().enumerate() {
                let place = &mut newest[position];
                if wrote && place.0.is_none_or(|other| version(other) < version(*stamp)) {
                    *place = (Some(*stamp), cells[position]);
                }
            }
        }
        for node in &nodes {
            assert_eq!(
                node.row.map(|(cells, _)| cells),
                wanted.map(|cells| cells.map(|(_, cell)| cell)),
                "round {round}: {nodes:#?}"
            );
            assert_eq!(
                node.row.map(|row| row.1),
                nodes[0].row.map(|row| row.1),
                "round {round}"
            );
        }
    }
}
