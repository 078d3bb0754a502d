//! Nodes whose rows have a second unique key. If a row version loses to another row on one node, it
//! is deleted on all nodes, because the node that finds the conflict announces the deletion
//! (`crates/apply/src/eviction.rs`). Delivered in any order, all nodes end with the same rows, no
//! two with the same code, and the newest write of all is among them.

use std::collections::{BTreeMap, BTreeSet};

use braid_bgworker::conflict::{
    Action, Kind, Local, Version, decide_delete, decide_in_the_way, decide_insert, decide_update,
};

use crate::random::{Budget, Random};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

type Stamp = (i64, usize);

fn version(stamp: Stamp) -> Version<'static> {
    Version {
        timestamp: stamp.0,
        origin: NAMES[stamp.1],
    }
}

#[derive(Debug, Clone, Copy)]
enum Write {
    Insert(u64),
    Update(u64),
    Delete,
    /// An announced deletion: versions decide about it, whichever node sends it.
    Dead,
}

#[derive(Debug, Clone, Copy)]
struct Change {
    key: u64,
    write: Write,
    stamp: Stamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Deleted(Stamp),
    Present(Stamp, u64),
}

#[derive(Debug, Default)]
struct Node {
    me: usize,
    cells: BTreeMap<u64, Cell>,
    log: Vec<Change>,
    newest: i64,
}

impl Node {
    fn rows(&self) -> BTreeMap<u64, u64> {
        let row = |(key, cell): (&u64, &Cell)| match cell {
            Cell::Present(_, code) => Some((*key, *code)),
            Cell::Deleted(_) => None,
        };
        self.cells.iter().filter_map(row).collect()
    }

    fn row(&self, key: u64) -> Option<u64> {
        self.rows().get(&key).copied()
    }

    /// Commits a transaction of this node's own, which respects the unique key.
    fn write(&mut self, key: u64, write: Write, stamp: Stamp) {
        let cell = match write {
            Write::Insert(code) | Write::Update(code) => Cell::Present(stamp, code),
            Write::Delete | Write::Dead => Cell::Deleted(stamp),
        };
        self.cells.insert(key, cell);
        self.newest = self.newest.max(stamp.0);
        self.log.push(Change { key, write, stamp });
    }

    fn bury(&mut self, key: u64, stamp: Stamp) {
        let is_newer = match self.cells.get(&key) {
            Some(Cell::Deleted(known) | Cell::Present(known, _)) => {
                version(stamp) > version(*known)
            }
            None => true,
        };
        if is_newer {
            self.cells.insert(key, Cell::Deleted(stamp));
        }
    }

    /// Deletes the row with this key, which has lost in this version, and announces that.
    fn displace(&mut self, key: u64, lost: Stamp) {
        let stamp = (lost.0 + 1, self.me);
        self.bury(key, stamp);
        self.newest = self.newest.max(stamp.0);
        self.log.push(Change {
            key,
            write: Write::Dead,
            stamp,
        });
    }

    fn receive(&mut self, change: Change, tells: bool) {
        let Change { key, write, stamp } = change;
        self.newest = self.newest.max(stamp.0);
        let local = match self.cells.get(&key) {
            None => Local::Missing,
            Some(Cell::Deleted(stamp)) => Local::Deleted(version(*stamp)),
            Some(Cell::Present(stamp, _)) => Local::Present(version(*stamp)),
        };
        let exists = matches!(local, Local::Present(_));
        let incoming = version(stamp);
        let (decision, code) = match write {
            Write::Insert(code) => (decide_insert(local, incoming, true), code),
            Write::Update(code) => (decide_update(local, incoming, true), code),
            Write::Delete | Write::Dead => {
                let from_origin = matches!(write, Write::Delete);
                if exists && decide_delete(local, incoming, from_origin).action == Action::Apply {
                    self.cells.insert(key, Cell::Deleted(stamp));
                } else if !exists {
                    self.bury(key, stamp);
                }
                return;
            }
        };
        if decision.action != Action::Apply {
            return;
        }
        let in_the_way: Vec<(u64, Stamp)> = self
            .cells
            .iter()
            .filter_map(|(other, cell)| match cell {
                Cell::Present(stamp, taken) if *taken == code && *other != key => {
                    Some((*other, *stamp))
                }
                _ => None,
            })
            .collect();
        let loses = in_the_way.iter().any(|(_, there)| {
            let there = Local::Present(version(*there));
            decide_in_the_way(Kind::InsertExists, there, incoming).action == Action::Keep
        });
        if loses {
            if tells {
                self.displace(key, stamp);
            } else {
                self.cells.remove(&key);
            }
            return;
        }
        for (other, lost) in in_the_way {
            if tells {
                self.displace(other, lost);
            } else {
                self.cells.remove(&other);
            }
        }
        self.cells.insert(key, Cell::Present(stamp, code));
    }
}

struct Group {
    nodes: Vec<Node>,
    /// For (writer, reader): how many of the writer's changes the reader has read.
    read: BTreeMap<(usize, usize), usize>,
    tells: bool,
    /// Commits are at most a microsecond apart, like an announced deletion's version and that of
    /// the row that lost.
    dense: bool,
    clock: i64,
    /// The newest write of all nodes.
    last: Option<Change>,
}

impl Group {
    fn new(count: usize, tells: bool, dense: bool) -> Self {
        let node = |me| Node {
            me,
            ..Node::default()
        };
        Self {
            nodes: (0..count).map(node).collect(),
            read: BTreeMap::new(),
            tells,
            dense,
            clock: 0,
            last: None,
        }
    }

    fn write(&mut self, random: &mut Random, keys: u64, codes: u64) {
        let node = random.index(self.nodes.len());
        let (key, code) = (random.below(keys), random.below(codes));
        self.clock += if self.dense {
            random.below(3).cast_signed()
        } else {
            10
        };
        let there = &mut self.nodes[node];
        // No commit is older than what it may have read.
        self.clock = self.clock.max(there.newest + 1);
        let stamp = (self.clock, node);
        let taken = there.rows().values().any(|other| *other == code);
        let write = match there.row(key) {
            Some(_) if random.index(4) == 0 => Write::Delete,
            Some(same) if same == code || !taken => Write::Update(code),
            None if !taken => Write::Insert(code),
            _ => return,
        };
        there.write(key, write, stamp);
        if self
            .last
            .is_none_or(|last| version(stamp) > version(last.stamp))
        {
            self.last = Some(Change { key, write, stamp });
        }
    }

    fn deliver(&mut self, from: usize, to: usize) -> bool {
        let position = self.read.entry((from, to)).or_default();
        let Some(change) = self.nodes[from].log.get(*position).copied() else {
            return false;
        };
        *position += 1;
        self.nodes[to].receive(change, self.tells);
        true
    }

    fn deliver_some(&mut self, random: &mut Random) -> bool {
        let count = self.nodes.len();
        let start = random.index(count * count);
        (0..count * count).any(|next| {
            let (from, to) = (
                (start + next) % (count * count) / count,
                (start + next) % count,
            );
            from != to && self.deliver(from, to)
        })
    }

    fn settle(&mut self, random: &mut Random) {
        let mut left = 1_000_000;
        while self.deliver_some(random) {
            left -= 1;
            assert!(left > 0, "nodes tell each other for ever");
        }
    }
}

/// Runs a history over a few keys and codes, with delayed links. Returns whether all nodes are
/// equal in the end.
fn run(random: &mut Random, round: usize, tells: bool) -> bool {
    let count = 2 + random.index(3);
    let (keys, codes) = (2 + random.below(5), 1 + random.below(4));
    let dense = random.below(2) == 0;
    let mut group = Group::new(count, tells, dense);
    for _ in 0..20 + random.index(60) {
        group.write(random, keys, codes);
        for _ in 0..random.index(4) {
            let (from, to) = (random.index(count), random.index(count));
            if from != to {
                group.deliver(from, to);
            }
        }
        if random.index(20) == 0 {
            group.settle(random);
        }
    }
    group.settle(random);
    let rows = group.nodes[0].rows();
    for node in &group.nodes {
        let codes: BTreeSet<u64> = node.rows().values().copied().collect();
        assert_eq!(
            codes.len(),
            node.rows().len(),
            "round {round}: a code twice"
        );
    }
    let equal = group.nodes.iter().all(|node| node.rows() == rows);
    if equal && tells && !dense {
        // No node can have announced that the newest write of all has lost.
        match group.last {
            Some(Change {
                key,
                write: Write::Insert(code) | Write::Update(code),
                ..
            }) => assert_eq!(
                rows.get(&key),
                Some(&code),
                "round {round}: the last write is lost"
            ),
            Some(Change { key, .. }) => {
                assert_eq!(
                    rows.get(&key),
                    None,
                    "round {round}: the last deletion is lost"
                );
            }
            None => {}
        }
    }
    equal
}

#[test]
fn i2_a_row_that_loses_is_dead_everywhere() {
    let mut random = Random::new("i2_a_row_that_loses_is_dead_everywhere");
    let mut budget = Budget::new();
    while let Some(round) = budget.round(3000) {
        assert!(run(&mut random, round, true), "round {round}: nodes differ");
    }
}

#[test]
fn without_telling_nodes_end_apart() {
    let mut random = Random::new("without_telling_nodes_end_apart");
    assert!(
        (0..200).any(|round| !run(&mut random, round, false)),
        "then there would be no need for it"
    );
}
