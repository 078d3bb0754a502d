//! Nodes that write, exchange their changes in any order and apply the conflict rules end with the state of one
//! last-writer-wins register per key.
//!
//! Tombstones are perfect here: a node remembers the newest deletion of each key, also of one that it never had, and passes
//! on such a deletion as any other. Without the latter a star differs for good: its ends delete a row at 4 and at 5; the
//! centre, which gets the older one first, finds nothing to delete at 5, so the other end never learns of 5 and keeps a
//! row that it inserts before it.

use std::collections::BTreeMap;

use braid_bgworker::conflict::{
    Action, Decision, Local, Version, decide_delete, decide_insert, decide_new_key,
    decide_truncated, decide_update,
};

use crate::random::Random;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// Keys that are written at most.
const KEYS: u64 = 4;

type Stamp = (i64, usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Insert,
    Update,
    Delete,
    /// Of all keys.
    Truncate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Change {
    kind: Kind,
    key: u64,
    value: u64,
    stamp: Stamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Deleted(Stamp),
    Present(Stamp, u64),
}

fn version(stamp: Stamp) -> Version<'static> {
    Version {
        timestamp: stamp.0,
        origin: NAMES[stamp.1],
    }
}

#[derive(Debug, Default, Clone)]
struct Node {
    cells: BTreeMap<u64, Cell>,
    /// What this node wrote, its own and others', in commit order.
    log: Vec<Change>,
    newest: Stamp,
    /// The newest truncate.
    truncated: Option<Stamp>,
}

impl Node {
    fn rows(&self) -> BTreeMap<u64, u64> {
        let row = |(key, cell): (&u64, &Cell)| match cell {
            Cell::Present(_, value) => Some((*key, *value)),
            Cell::Deleted(_) => None,
        };
        self.cells.iter().filter_map(row).collect()
    }

    fn write(&mut self, change: Change) {
        match change.kind {
            Kind::Insert | Kind::Update => {
                let cell = Cell::Present(change.stamp, change.value);
                self.cells.insert(change.key, cell);
            }
            Kind::Delete => {
                self.cells.insert(change.key, Cell::Deleted(change.stamp));
            }
            Kind::Truncate => {
                self.cells
                    .retain(|_, cell| matches!(cell, Cell::Deleted(_)));
                self.truncated = Some(change.stamp);
            }
        }
        self.newest = self.newest.max(change.stamp);
        self.log.push(change);
    }

    fn has(&self, key: u64) -> bool {
        matches!(self.cells.get(&key), Some(Cell::Present(..)))
    }

    fn decide(&self, change: Change, from_origin: bool) -> Decision {
        // A row that is not here was deleted, or truncated, or neither: what was later counts.
        let deleted = match self.cells.get(&change.key) {
            Some(Cell::Deleted(stamp)) => Some(*stamp).max(self.truncated),
            _ => self.truncated,
        };
        let local = match (self.cells.get(&change.key), deleted) {
            (Some(Cell::Present(stamp, _)), _) => Local::Present(version(*stamp)),
            (_, Some(stamp)) => Local::Deleted(version(stamp)),
            (_, None) => Local::Missing,
        };
        match change.kind {
            Kind::Insert => decide_insert(local, version(change.stamp), from_origin),
            Kind::Update => decide_update(local, version(change.stamp), from_origin),
            Kind::Delete | Kind::Truncate => {
                decide_delete(local, version(change.stamp), from_origin)
            }
        }
    }

    fn receive(&mut self, change: Change, from_origin: bool) {
        self.newest = self.newest.max(change.stamp);
        if change.kind == Kind::Truncate {
            let stays = |cell: &Cell| match cell {
                Cell::Deleted(_) => true,
                Cell::Present(stamp, _) => {
                    let (local, remote) = (Local::Present(version(*stamp)), version(change.stamp));
                    let decision = decide_delete(local, remote, from_origin);
                    decide_truncated(decision, local, remote).action == Action::Keep
                }
            };
            self.cells.retain(|_, cell| stays(cell));
            self.truncated = self.truncated.max(Some(change.stamp));
            return;
        }
        let exists = self.has(change.key);
        match (self.decide(change, from_origin).action, change.kind) {
            (Action::Keep, Kind::Delete) if !exists => {
                // Nothing to delete, but to remember, and to pass on: see the module's comment.
                let known = self.cells.get(&change.key);
                if !matches!(known, Some(Cell::Deleted(known)) if *known >= change.stamp) {
                    self.write(change);
                }
            }
            (Action::Keep | Action::Ask | Action::Merge | Action::Remove, _) => {}
            (Action::Apply, Kind::Delete) => self.write(change),
            // What is written shows in the log as what it did here.
            (Action::Apply, _) => {
                self.write(Change {
                    kind: if exists { Kind::Update } else { Kind::Insert },
                    ..change
                });
            }
        }
    }
}

/// Who sends what to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Topology {
    /// A full mesh; what was first committed at the sender (`origin => 'none'`).
    Mesh,
    /// All to all, and everything that the receiver is not the origin of (`origin => 'any'`).
    ForwardingMesh,
    /// Through the first node.
    Star,
    /// Each to its neighbours.
    Chain,
}

#[derive(Debug)]
struct Link {
    from: usize,
    to: usize,
    position: usize,
}

struct Group {
    nodes: Vec<Node>,
    links: Vec<Link>,
    forwards: bool,
    /// All writes, as they were made.
    history: Vec<Change>,
    deliveries: u64,
}

impl Group {
    fn new(nodes: usize, topology: Topology) -> Self {
        let connected = |from: usize, to: usize| match topology {
            Topology::Mesh | Topology::ForwardingMesh => true,
            Topology::Star => from == 0 || to == 0,
            Topology::Chain => from.abs_diff(to) == 1,
        };
        let mut links = Vec::new();
        for from in 0..nodes {
            for to in (0..nodes).filter(|to| *to != from && connected(from, *to)) {
                links.push(Link {
                    from,
                    to,
                    position: 0,
                });
            }
        }
        Self {
            nodes: vec![Node::default(); nodes],
            links,
            forwards: topology != Topology::Mesh,
            history: Vec::new(),
            deliveries: 0,
        }
    }

    fn write(&mut self, node: usize, kind: Kind, key: u64, timestamp: i64) {
        let value = self.history.len() as u64;
        let change = Change {
            kind,
            key,
            value,
            stamp: (timestamp, node),
        };
        self.history.push(change);
        self.nodes[node].write(change);
    }

    /// Deliver the next change of a link. False when there is none.
    fn deliver(&mut self, link: usize) -> bool {
        let Link {
            from,
            to,
            ref mut position,
        } = self.links[link];
        let Some(change) = self.nodes[from].log.get(*position).copied() else {
            return false;
        };
        *position += 1;
        self.deliveries += 1;
        let own = change.stamp.1 == from;
        if own || (self.forwards && change.stamp.1 != to) {
            self.nodes[to].receive(change, own);
        }
        true
    }

    fn deliver_all(&mut self, random: &mut Random) {
        let before = self.deliveries;
        let bound = 200 * (self.history.len() as u64 + 10);
        loop {
            let start = random.index(self.links.len());
            let count = self.links.len();
            if !(0..count).any(|next| self.deliver((start + next) % count)) {
                return;
            }
            assert!(
                self.deliveries - before < bound,
                "i8: changes go round and round"
            );
        }
    }

    /// The state of one last-writer-wins register per key; what one node wrote at the same time counts in its order.
    fn model(&self) -> BTreeMap<u64, u64> {
        let mut winners: BTreeMap<u64, Change> = BTreeMap::new();
        let mut written = Vec::new();
        for change in &self.history {
            if change.kind == Kind::Truncate {
                written.extend((0..KEYS).map(|key| Change { key, ..*change }));
            } else {
                written.push(*change);
            }
        }
        for change in &written {
            let winner = winners.entry(change.key).or_insert(*change);
            if version(change.stamp) >= version(winner.stamp) {
                *winner = *change;
            }
        }
        winners.retain(|_, change| !matches!(change.kind, Kind::Delete | Kind::Truncate));
        winners
            .into_iter()
            .map(|(key, change)| (key, change.value))
            .collect()
    }
}

fn converges(test: &str, topology: Topology) {
    converges_with(test, topology, false, false);
}

/// `steps`: clocks are set, forth and back, while it runs. `truncates`: all rows are deleted at once, now and then.
fn converges_with(test: &str, topology: Topology, steps: bool, truncates: bool) {
    let mut random = Random::new(test);
    for round in 0..4000 {
        let count = 2 + random.index(3);
        let mut group = Group::new(count, topology);
        let keys = 1 + random.below(KEYS);
        let mut skew: Vec<i64> = (0..count).map(|_| random.below(4).cast_signed()).collect();
        let mut time = 1;
        for _ in 0..random.below(40) {
            time += i64::from(random.one_in(3));
            if steps && random.one_in(4) {
                let node = random.index(count);
                skew[node] = random.below(20).cast_signed() - 10;
            }
            match random.below(4) {
                0 | 1 => {
                    let node = random.index(count);
                    let key = random.below(keys);
                    let mut timestamp = time + skew[node];
                    // I4: a commit waits until its version is newer than what its node has seen; only what the node itself
                    // committed in the same microsecond may have the same.
                    let newest = group.nodes[node].newest;
                    let mine = newest.1 == node && !group.forwards;
                    while (timestamp, node) < newest || ((timestamp, node) == newest && !mine) {
                        timestamp += 1;
                    }
                    let kind = match (group.nodes[node].has(key), random.below(2)) {
                        _ if truncates && random.one_in(6) => Kind::Truncate,
                        (false, _) => Kind::Insert,
                        (true, 0) => Kind::Update,
                        (true, _) => Kind::Delete,
                    };
                    group.write(node, kind, key, timestamp);
                }
                2 => {
                    let link = random.index(group.links.len());
                    group.deliver(link);
                }
                _ if random.one_in(4) => {
                    // A restart: what was received is sent again.
                    let link = random.index(group.links.len());
                    let position = &mut group.links[link].position;
                    *position -= random.index(*position + 1);
                }
                _ => {}
            }
        }
        group.deliver_all(&mut random);
        let model = group.model();
        for (node, state) in group.nodes.iter().enumerate() {
            assert_eq!(
                state.rows(),
                model,
                "round {round}: node {} of {count} differs from the model after {:#?}",
                NAMES[node],
                group.history
            );
        }
    }
}

#[test]
fn i2_a_mesh_converges_to_one_register_per_key() {
    converges(
        "i2_a_mesh_converges_to_one_register_per_key",
        Topology::Mesh,
    );
}

/// A truncate deletes each row with its own version, and is remembered for all keys. (A node that forwards passes on only what it did
/// itself, so in other topologies what a truncate had not found is not told.)
#[test]
fn i2_a_mesh_that_truncates_converges() {
    let test = "i2_a_mesh_that_truncates_converges";
    converges_with(test, Topology::Mesh, false, true);
    converges_with(test, Topology::Mesh, true, true);
}

#[test]
fn i2_i8_a_mesh_that_forwards_converges_and_comes_to_rest() {
    converges(
        "i2_i8_a_mesh_that_forwards_converges_and_comes_to_rest",
        Topology::ForwardingMesh,
    );
}

#[test]
fn i2_a_star_converges() {
    converges("i2_a_star_converges", Topology::Star);
}

#[test]
fn i2_a_chain_converges() {
    converges("i2_a_chain_converges", Topology::Chain);
}

/// A clock that is set back changes who wins, but nodes agree: commits wait until it is past what their node itself has committed, too.
#[test]
fn i4_clocks_may_step_back() {
    for topology in [
        Topology::Mesh,
        Topology::ForwardingMesh,
        Topology::Star,
        Topology::Chain,
    ] {
        converges_with("i4_clocks_may_step_back", topology, true, false);
    }
}

/// Why a node's own commits count as seen. It writes a row at 10 and, with its clock set back, again at 5; another writes it at 7. Who has
/// the 10 in between keeps it against the 7 and then takes the 5, which follows it; who gets the 7 last takes that.
#[test]
fn i4_covers_a_nodes_own_commits() {
    let mut group = Group::new(3, Topology::Mesh);
    group.write(0, Kind::Insert, 0, 10);
    group.write(0, Kind::Update, 0, 5);
    group.write(1, Kind::Insert, 0, 7);
    // Node c gets both of a's, then b's; node b has its own and gets both of a's.
    group.deliver_all(&mut Random::new("i4_covers_a_nodes_own_commits"));
    let rows: Vec<_> = group.nodes.iter().map(Node::rows).collect();
    assert_ne!(rows[0], rows[1], "rules alone do not make up for it");
}

/// Merging is by the row's version alone: for each pair of versions and each kind of change there is one winner, whichever
/// comes first.
#[test]
fn i2_merging_commutes_and_is_idempotent() {
    let stamps = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)];
    let kinds = [Kind::Insert, Kind::Update, Kind::Delete];
    for first in stamps {
        for second in stamps.into_iter().filter(|second| *second != first) {
            for one in kinds {
                for two in kinds {
                    let one = Change {
                        kind: one,
                        key: 0,
                        value: 1,
                        stamp: first,
                    };
                    let two = Change {
                        kind: two,
                        key: 0,
                        value: 2,
                        stamp: second,
                    };
                    let state = |changes: &[Change]| {
                        let mut node = Node::default();
                        for change in changes {
                            node.receive(*change, false);
                        }
                        node.cells
                    };
                    let merged = state(&[one, two]);
                    assert_eq!(merged, state(&[two, one]), "{one:?} {two:?}");
                    assert_eq!(merged, state(&[one, two, two]), "{one:?} {two:?}");
                    assert_eq!(merged, state(&[one, two, one]), "{one:?} {two:?}");
                }
            }
        }
    }
}

/// With one writer nobody conflicts: its stream's order is the order of its versions, even when its clock steps back.
#[test]
fn i2_a_single_writers_clock_may_step_back() {
    let mut random = Random::new("i2_a_single_writers_clock_may_step_back");
    for _ in 0..1000 {
        let mut group = Group::new(3, Topology::Mesh);
        for _ in 0..random.below(20) {
            let key = random.below(2);
            let kind = match (group.nodes[0].has(key), random.below(2)) {
                (false, _) => Kind::Insert,
                (true, 0) => Kind::Update,
                (true, _) => Kind::Delete,
            };
            let timestamp = random.below(5).cast_signed();
            group.write(0, kind, key, timestamp);
            let link = random.index(group.links.len());
            group.deliver(link);
        }
        group.deliver_all(&mut random);
        assert_eq!(group.nodes[1].rows(), group.nodes[0].rows());
        assert_eq!(group.nodes[2].rows(), group.nodes[0].rows());
    }
}

/// Why I4 is an invariant, and why a deletion counts as seen: a writer whose clock is behind what its node has seen makes
/// nodes differ for good, whatever the rules.
#[test]
fn i4_is_what_convergence_rests_on() {
    let mut group = Group::new(2, Topology::Mesh);
    group.write(0, Kind::Insert, 0, 1);
    group.deliver_all(&mut Random::new("i4_is_what_convergence_rests_on"));
    group.write(0, Kind::Delete, 0, 10);
    group.deliver_all(&mut Random::new("i4_is_what_convergence_rests_on"));
    // Node b has seen the deletion of time 10; its clock says 8.
    group.write(1, Kind::Insert, 0, 8);
    group.deliver_all(&mut Random::new("i4_is_what_convergence_rests_on"));
    assert!(group.nodes[1].has(0) && !group.nodes[0].has(0));
}

/// I3: the version that counts is that of the row's origin, so it makes no difference by which way a change comes.
#[test]
fn i3_the_rows_origin_decides_and_not_the_sender() {
    for local in [(1, 0), (1, 1), (2, 2)] {
        for remote in [(1, 0), (1, 1), (2, 2), (3, 0)] {
            let (here, incoming) = (Local::Present(version(local)), version(remote));
            for forwarded in [false, true] {
                let applied = Action::Apply == decide_insert(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
                let applied = Action::Apply == decide_new_key(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
                // From its origin, a change of the same origin follows in its stream's order.
                if local.1 == remote.1 && !forwarded {
                    continue;
                }
                let applied = Action::Apply == decide_update(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
                let applied = Action::Apply == decide_delete(here, incoming, !forwarded).action;
                assert_eq!(applied, incoming > version(local));
            }
        }
    }
}
