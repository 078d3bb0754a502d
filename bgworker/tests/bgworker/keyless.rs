//! Nodes add and remove rows of a table without a key, and deliver their changes in random order:
//! in the end all nodes have equal rows, each equally often.

use std::collections::BTreeMap;

use braid_bgworker::conflict::Version;
use braid_bgworker::keyless::{Taken, handed_on, hands_up_to, removal_of, takes};

use crate::random::{Budget, Random};

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

type Stamp = (i64, usize);

fn version((timestamp, origin): Stamp) -> Version<'static> {
    Version {
        timestamp,
        origin: NAMES[origin],
    }
}

#[derive(Debug, Clone, Copy)]
enum Change {
    Insert(u32),
    Update(u32, u32),
    Delete(u32),
    /// Deletes all older rows.
    Truncate,
}

#[derive(Debug, Default)]
struct Node {
    rows: Vec<(u32, Stamp)>,
    removals: Vec<(u32, Stamp)>,
    /// Row, its version, version of the removal.
    taken: Vec<(u32, Stamp, Stamp)>,
    /// The newest truncate.
    truncated: Option<Stamp>,
    log: Vec<(Change, Stamp)>,
    read: Vec<usize>,
    clock: i64,
}

impl Node {
    /// Applies a change like the appliers.
    fn receive(&mut self, change: Change, stamp: Stamp, with: Rules) {
        match change {
            Change::Insert(row) => self.add(row, stamp, with),
            Change::Delete(row) => self.take(row, stamp, with),
            Change::Update(old, new) => {
                self.take(old, stamp, with);
                self.add(new, stamp, with);
            }
            Change::Truncate => self.truncate(stamp, with),
        }
        self.clock = self.clock.max(stamp.0);
    }

    fn truncate(&mut self, stamp: Stamp, with: Rules) {
        let before = |one: Stamp, other: Stamp| version(one) < version(other);
        if self.truncated.is_some_and(|known| before(stamp, known)) {
            return;
        }
        self.truncated = Some(stamp);
        self.rows.retain(|(_, written)| !before(*written, stamp));
        if !with.frees {
            return;
        }
        let (freed, taken) = std::mem::take(&mut self.taken)
            .into_iter()
            .partition(|(_, written, removal)| before(*written, stamp) && before(stamp, *removal));
        self.taken = taken;
        for (row, _, removal) in freed {
            self.find_another(row, removal, with);
        }
    }

    fn add(&mut self, row: u32, stamp: Stamp, with: Rules) {
        if self
            .truncated
            .is_some_and(|at| version(stamp) < version(at))
        {
            return;
        }
        let alike: Vec<usize> = (0..self.removals.len())
            .filter(|place| self.removals[*place].0 == row)
            .collect();
        let versions: Vec<_> = alike
            .iter()
            .map(|place| version(self.removals[*place].1))
            .collect();
        match removal_of(&versions, version(stamp), true).filter(|_| with.remembers) {
            Some(chosen) => {
                let (_, removal) = self.removals.remove(alike[chosen]);
                self.taken.push((row, stamp, removal));
            }
            None => self.rows.push((row, stamp)),
        }
    }

    fn take(&mut self, row: u32, stamp: Stamp, with: Rules) {
        let found = self.rows.iter().position(|(here, written)| {
            *here == row && (!with.looks || takes(version(*written), version(stamp), true))
        });
        if let Some(place) = found {
            let (_, written) = self.rows.remove(place);
            self.taken.push((row, written, stamp));
        } else {
            self.find_another(row, stamp, with);
        }
    }

    /// Handles a removal without a row: no row in the table was meant for it, or it lost its row to
    /// another removal.
    fn find_another(&mut self, row: u32, stamp: Stamp, with: Rules) {
        let alike: Vec<usize> = (0..self.taken.len())
            .filter(|place| with.hands_on && self.taken[*place].0 == row)
            .collect();
        let taken: Vec<_> = alike
            .iter()
            .map(|place| Taken {
                row: Some(version(self.taken[*place].1)),
                removal: version(self.taken[*place].2),
            })
            .collect();
        let mut hands = handed_on(&taken, version(stamp));
        let last = hands
            .last()
            .map_or(stamp, |place| self.taken[alike[*place]].2);
        let found = self
            .rows
            .iter()
            .position(|(here, written)| *here == row && version(*written) < version(last));
        if let Some(place) = found {
            let (_, written) = self.rows.remove(place);
            hands.truncate(hands_up_to(&taken, &hands, Some(version(written))));
            let last = hands
                .last()
                .map_or(stamp, |place| self.taken[alike[*place]].2);
            self.taken.push((row, written, last));
        } else {
            self.removals.push((row, last));
        }
        let mut to = stamp;
        for place in hands {
            to = std::mem::replace(&mut self.taken[alike[place]].2, to);
        }
    }

    fn count(&self) -> BTreeMap<u32, usize> {
        let mut count = BTreeMap::new();
        for (row, _) in &self.rows {
            *count.entry(*row).or_default() += 1;
        }
        count
    }
}

#[derive(Debug, Clone, Copy)]
struct Rules {
    /// Removals that have found no row are remembered.
    remembers: bool,
    /// A change removes only rows that are older than it.
    looks: bool,
    /// An older removal gets the row that a newer one has taken.
    hands_on: bool,
    /// If a truncate arrives late, newer removals lose the rows that they have taken from before
    /// it.
    frees: bool,
}
const ALL: Rules = Rules {
    remembers: true,
    looks: true,
    hands_on: true,
    frees: true,
};

/// The rows that nodes write.
#[derive(Debug, Clone, Copy)]
enum Rows {
    /// Each row differs from all earlier ones, like rows that contain a time. All nodes change
    /// them.
    Distinct,
    /// A few rows, many times each. All nodes add them; only one node removes each.
    Alike,
    /// A few rows, many times each. All nodes add and remove them.
    Same,
    /// As `Same`, and all nodes truncate the table now and then.
    Truncated,
}

/// Writes and delivers at random, until everything is delivered.
fn run(random: &mut Random, written: Rows, with: Rules) -> Vec<Node> {
    let nodes = 2 + random.index(4);
    let mut all: Vec<Node> = (0..nodes)
        .map(|_| Node {
            read: vec![0; nodes],
            ..Node::default()
        })
        .collect();
    let mut last = 0;
    for _ in 0..10 + random.index(40) {
        let at = random.index(nodes);
        if random.one_in(2) {
            last += 1;
            let new = match written {
                Rows::Distinct => last,
                Rows::Alike => u32::try_from(random.below(6)).unwrap(),
                Rows::Same | Rows::Truncated => u32::try_from(random.below(3)).unwrap(),
            };
            write(random, &mut all, at, written, new);
        } else {
            deliver(&mut all, random.index(nodes), at, with);
        }
    }
    for _ in 0..8 * nodes {
        deliver(&mut all, random.index(nodes), random.index(nodes), with);
    }
    for from in 0..nodes {
        for to in 0..nodes {
            while deliver(&mut all, from, to, with) {}
        }
    }
    all
}

/// Makes a write of the node's own, newer than everything that the node has seen.
fn write(random: &mut Random, all: &mut [Node], at: usize, written: Rows, new: u32) {
    let nodes = all.len();
    let node = &mut all[at];
    node.clock += 1 + i64::try_from(random.below(5)).unwrap();
    let stamp = (node.clock, at);
    if matches!(written, Rows::Truncated) && random.one_in(8) {
        node.rows.clear();
        node.truncated = Some(stamp);
        node.log.push((Change::Truncate, stamp));
        return;
    }
    let own = |row: u32| !matches!(written, Rows::Alike) || row as usize % nodes == at;
    let mine: Vec<usize> = (0..node.rows.len())
        .filter(|place| own(node.rows[*place].0))
        .collect();
    let old = (!mine.is_empty() && !random.one_in(3))
        .then(|| node.rows.remove(mine[random.index(mine.len())]));
    if let Some((row, written)) = old {
        node.taken.push((row, written, stamp));
    }
    let change = match old.map(|(row, _)| row) {
        None => Change::Insert(new),
        Some(old) if random.one_in(3) => Change::Delete(old),
        Some(old) => Change::Update(old, new),
    };
    if !matches!(change, Change::Delete(_)) {
        node.rows.push((new, stamp));
    }
    node.log.push((change, stamp));
}

/// Delivers the next change of `from` to `to`. Returns false if there is none.
fn deliver(all: &mut [Node], from: usize, to: usize, with: Rules) -> bool {
    let next = all[to].read[from];
    if from == to || next == all[from].log.len() {
        return false;
    }
    let (change, stamp) = all[from].log[next];
    all[to].read[from] += 1;
    all[to].receive(change, stamp, with);
    true
}

fn differ(nodes: &[Node]) -> bool {
    nodes.iter().any(|node| node.count() != nodes[0].count())
}

#[test]
fn keyless_tables_end_the_same_on_all_nodes() {
    let mut random = Random::new("keyless_tables_end_the_same_on_all_nodes");
    let mut budget = Budget::new();
    while let Some(round) = budget.round(2000) {
        for written in [Rows::Distinct, Rows::Alike, Rows::Same, Rows::Truncated] {
            let nodes = run(&mut random, written, ALL);
            assert!(!differ(&nodes), "round {round}, {written:?}: {nodes:#?}");
        }
    }
}

/// The test above would notice each missing rule.
#[test]
fn keyless_tables_need_what_is_remembered() {
    let mut random = Random::new("keyless_tables_need_what_is_remembered");
    let mut differs = |written, with| (0..500).any(|_| differ(&run(&mut random, written, with)));
    let forgets = Rules {
        remembers: false,
        ..ALL
    };
    assert!(differs(Rows::Distinct, forgets));
    assert!(differs(Rows::Alike, forgets));
    let keeps = Rules {
        hands_on: false,
        ..ALL
    };
    assert!(differs(Rows::Same, keeps));
    let holds = Rules {
        frees: false,
        ..ALL
    };
    assert!(differs(Rows::Truncated, holds));
}

/// One node removes a row and adds it again, while another one changes the earlier row.
#[test]
fn keyless_rows_that_are_newer_than_a_change_stay() {
    for (looks, agree) in [(true, true), (false, false)] {
        let with = Rules { looks, ..ALL };
        let mut nodes: [Node; 2] = std::array::from_fn(|_| Node {
            rows: vec![(7, (1, 0))],
            ..Node::default()
        });
        nodes[0].rows = vec![(7, (4, 0))];
        nodes[1].rows = vec![(8, (2, 1))];
        nodes[0].receive(Change::Update(7, 8), (2, 1), with);
        nodes[1].receive(Change::Delete(7), (3, 0), with);
        nodes[1].receive(Change::Insert(7), (4, 0), with);
        assert_eq!(!differ(&nodes), agree, "{nodes:#?}");
    }
}
