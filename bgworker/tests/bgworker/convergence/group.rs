//! Nodes with the conflict rules, and the links between them.
//!
//! Tombstones are perfect here: a node remembers the newest deletion of each key, also of one that
//! it never had, and passes on such a deletion as any other, and a truncate with all that it has
//! not found. Without that ([`Group::forgets_unfound`]) a star differs for good: its ends delete a
//! row at 4 and at 5; the centre, which gets the older one first, finds nothing to delete at 5, so
//! the other end never learns of 5 and keeps a row that it inserts before it.

use std::collections::BTreeMap;

use braid_bgworker::conflict::{
    Action, Decision, Local, Version, decide_delete, decide_insert, decide_truncated, decide_update,
};

use crate::random::Random;

/// A node that is later in this list wins at the same time.
pub const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
/// Keys that are written at most.
pub const KEYS: u64 = 4;

/// Commit timestamp and node.
pub type Stamp = (i64, usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Insert,
    Update,
    Delete,
    /// Of all keys.
    Truncate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    pub kind: Kind,
    pub key: u64,
    pub value: u64,
    pub stamp: Stamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cell {
    Deleted(Stamp),
    Present(Stamp, u64),
}

pub fn version(stamp: Stamp) -> Version<'static> {
    Version {
        timestamp: stamp.0,
        origin: NAMES[stamp.1],
    }
}

#[derive(Debug, Default, Clone)]
pub struct Node {
    pub cells: BTreeMap<u64, Cell>,
    /// What this node wrote, its own and others', in commit order.
    log: Vec<Change>,
    pub newest: Stamp,
    /// The newest truncate.
    truncated: Option<Stamp>,
    /// Only what it finds is passed on.
    forgets_unfound: bool,
}

impl Node {
    pub fn rows(&self) -> BTreeMap<u64, u64> {
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

    pub fn has(&self, key: u64) -> bool {
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

    pub fn receive(&mut self, change: Change, from_origin: bool) {
        self.newest = self.newest.max(change.stamp);
        if change.kind == Kind::Truncate {
            self.receive_truncate(change, from_origin);
            return;
        }
        let exists = self.has(change.key);
        match (self.decide(change, from_origin).action, change.kind) {
            (Action::Keep, Kind::Delete) if !exists => {
                // Nothing to delete, but to remember, and to pass on: see the module's comment.
                let known = self.cells.get(&change.key);
                if !matches!(known, Some(Cell::Deleted(known)) if *known >= change.stamp) {
                    self.write(change);
                    if self.forgets_unfound {
                        self.log.pop();
                    }
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

impl Node {
    fn receive_truncate(&mut self, change: Change, from_origin: bool) {
        // By another way: it is here already, or a newer one is. To carry it out would send it on
        // again, and around for ever.
        if !from_origin && !self.forgets_unfound && self.truncated >= Some(change.stamp) {
            return;
        }
        let goes = |cell: &Cell| match cell {
            Cell::Deleted(_) => false,
            Cell::Present(stamp, _) => {
                let (local, remote) = (Local::Present(version(*stamp)), version(change.stamp));
                let decision = decide_delete(local, remote, from_origin);
                decide_truncated(decision, local, remote).action == Action::Apply
            }
        };
        let here = |cell: &Cell| matches!(cell, Cell::Present(..));
        let whole = !self.cells.values().any(|cell| here(cell) && !goes(cell));
        let gone = self.cells.iter().filter(|(_, cell)| goes(cell));
        let gone: Vec<u64> = gone.map(|(key, _)| *key).collect();
        if !whole {
            // Row by row.
            self.log.extend(gone.iter().map(|key| Change {
                kind: Kind::Delete,
                key: *key,
                ..change
            }));
        }
        if whole || !self.forgets_unfound {
            self.log.push(change);
        }
        self.cells.retain(|key, _| !gone.contains(key));
        self.truncated = self.truncated.max(Some(change.stamp));
    }
}

/// Who sends what to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
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
pub struct Link {
    pub from: usize,
    pub to: usize,
    /// Changes of the sender's log that were sent.
    pub position: usize,
}

pub struct Group {
    pub nodes: Vec<Node>,
    pub links: Vec<Link>,
    pub forwards: bool,
    /// All writes, as they were made.
    pub history: Vec<Change>,
    pub deliveries: u64,
}

impl Group {
    pub fn new(nodes: usize, topology: Topology) -> Self {
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

    /// Nodes pass on only what they find, as a write or a deletion of a row that was there.
    pub fn forgets_unfound(&mut self) {
        for node in &mut self.nodes {
            node.forgets_unfound = true;
        }
    }

    pub fn write(&mut self, node: usize, kind: Kind, key: u64, timestamp: i64) {
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
    pub fn deliver(&mut self, link: usize) -> bool {
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

    /// Deliver until no link has anything, in an order that the numbers determine.
    pub fn deliver_all(&mut self, random: &mut Random) -> Result<(), String> {
        let before = self.deliveries;
        let bound = 200 * (self.history.len() as u64 + 10);
        loop {
            let start = random.index(self.links.len());
            let count = self.links.len();
            if !(0..count).any(|next| self.deliver((start + next) % count)) {
                return Ok(());
            }
            if self.deliveries - before >= bound {
                return Err("i8: changes go round and round".to_owned());
            }
        }
    }

    /// The state of one last-writer-wins register per key; what one node wrote at the same time
    /// counts in its order.
    pub fn model(&self) -> BTreeMap<u64, u64> {
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
