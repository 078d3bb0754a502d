//! Nodes with the conflict rules, and the links between them.
//!
//! Tombstones are perfect in this model: a node remembers the newest deletion of each key, even of
//! a key that it never had. It forwards such a deletion like any other, and a truncate with all
//! keys that it has not found. Without that ([`Group::forgets_unfound`]) a star differs for good.
//! Its ends delete a row at 4 and at 5. The centre gets the older one first and finds nothing to
//! delete at 5. So the other end never learns of 5, and keeps a row that it inserted before 5.

use std::collections::BTreeMap;

use braid_bgworker::conflict::{
    Action, Decision, Local, Version, decide_delete, decide_insert, decide_truncated, decide_update,
};

use crate::random::Random;

/// Node names. If timestamps are equal, the later in this list wins.
pub const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
/// Most keys that are written.
pub const KEYS: u64 = 4;

/// Commit timestamp and node.
pub type Stamp = (i64, usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Insert,
    Update,
    Delete,
    /// A truncate of all keys.
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
    /// Changes that this node wrote, its own and others', in commit order.
    log: Vec<Change>,
    pub newest: Stamp,
    /// The newest truncate.
    truncated: Option<Stamp>,
    /// Only changes that find a row are forwarded.
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
        // A missing row was deleted, truncated, or never there: the later of deletion and truncate
        // counts.
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
                // Nothing to delete, but the deletion is remembered and forwarded: see the module's
                // comment.
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
            // The log has a written change with its local effect.
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
        // Arriving by another way, the truncate is already applied, or a newer one is. To apply it
        // would forward it again, endlessly.
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

/// Senders and receivers in a group, and the changes that are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// A full mesh; each node sends what was first committed there (`origin => 'none'`).
    Mesh,
    /// A full mesh; each node sends everything but the receiver's own changes (`origin => 'any'`).
    ForwardingMesh,
    /// All changes go through the first node.
    Star,
    /// Each node sends to its neighbours.
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

    /// Makes nodes forward only changes that find a row.
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

    /// Delivers the next change of a link. Returns false if there is none.
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

    /// Delivers until no link has anything left, in an order that `random` determines.
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

    /// Returns the state of one last-writer-wins register per key. Changes of one node at the same
    /// time count in its order.
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
