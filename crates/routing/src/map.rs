//! Which nodes have a shard's rows.
//!
//! Shards belong to **node sets**. All nodes of a set have the same shards, so exactly one set
//! answers for a shard, and a query over several sets sees each row once.
//!
//! Example of what goes wrong without sets: each shard is on two neighbours of a ring. A query asks
//! node C for shard 2. C also has shard 1, which node B was asked for: its rows come twice.
//!
//! Shard s starts at set s mod M of M sets. The shards of a tenant are one run, so a tenant with
//! spread L is on L sets at once, or on all. With blocks of shards it would stay on one or two.
//!
//! A move of a shard from set F to set T has these states:
//! 1. [`Phase::Copying`]: T gets the rows; F answers and takes writes.
//! 2. [`Phase::Switched`]: T answers and takes writes. F still takes writes of nodes that have not
//!    applied the switch; both replicate to each other.
//! 3. Finished: F deletes its rows. Before that, all transactions and plans that began before the
//!    switch have ended on all nodes, which the caller sees to.

use thiserror::Error;

use crate::rules::{Invalid, Run, Shard, Shards};
use braid_codec::{Malformed, Reader, Writer};

/// The largest number of node sets.
pub const SETS_LIMIT: usize = 1_024;
/// The largest number of nodes of one set.
pub const NODES_LIMIT: usize = 64;

/// A node: its number in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// A node set: its number, never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetId(pub u32);

/// A set and its nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSet {
    /// The set.
    pub id: SetId,
    /// Its nodes; one at least.
    pub nodes: Vec<NodeId>,
}

/// How far a move is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The new set gets the rows.
    Copying,
    /// The new set answers; the old one still has its rows.
    Switched,
}

/// A move of a shard from its home to another set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The new set.
    pub to: SetId,
    /// How far it is.
    pub phase: Phase,
}

/// Why a shard can't be moved like that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MoveError {
    /// The table has no such shard.
    #[error("shard {0} does not exist")]
    NoShard(Shard),
    /// The table has no such set.
    #[error("node set {} does not exist", .0.0)]
    NoSet(SetId),
    /// The set has the shard already.
    #[error("node set {} has shard {shard} already", set.0)]
    AtHome {
        /// The shard.
        shard: Shard,
        /// Its set.
        set: SetId,
    },
    /// The shard is being moved.
    #[error("shard {0} is being moved already")]
    Moving(Shard),
    /// The shard is not being moved, or its move is in another phase.
    #[error("move of shard {0} is not in this phase")]
    OtherPhase(Shard),
}

impl MoveError {
    /// The hint for the user: a sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Moving(_) => "Wait until the move has ended, or end it.",
            _ => "Look at the table's shards in braid.shards.",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Home {
    set: SetId,
    moving: Option<Move>,
}

/// Where a shard is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route<'a> {
    /// The shard.
    pub shard: Shard,
    /// The set that answers for it and takes its writes.
    pub set: SetId,
    /// The set's nodes.
    pub nodes: &'a [NodeId],
}

/// A set to ask, and for which shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueryRoute<'a> {
    /// The set.
    pub set: SetId,
    /// Its nodes, any of which answers.
    pub nodes: &'a [NodeId],
    /// The shards that it answers for. While shards move, the set can have rows of other shards
    /// too; the query leaves these out.
    pub shards: Vec<Shard>,
}

/// The sets of a table and the home of each shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardMap {
    shards: Shards,
    sets: Vec<NodeSet>,
    homes: Vec<Home>,
}

impl ShardMap {
    /// Distributes the shards over the sets evenly: the numbers of two sets differ by one at most.
    ///
    /// # Errors
    /// [`Invalid::Sets`] if there is no set, a set has no node, a number or a node comes twice, or
    /// there are too many.
    pub fn distribute(shards: Shards, sets: Vec<NodeSet>) -> Result<Self, Invalid> {
        check(&sets)?;
        let homes = sets
            .iter()
            .cycle()
            .zip(shards.all())
            .map(|(set, _)| Home {
                set: set.id,
                moving: None,
            })
            .collect();
        Ok(Self {
            shards,
            sets,
            homes,
        })
    }

    /// The number of shards.
    #[must_use]
    pub const fn shards(&self) -> Shards {
        self.shards
    }

    /// All sets.
    #[must_use]
    pub fn sets(&self) -> &[NodeSet] {
        &self.sets
    }

    /// The nodes of a set; none if there is no such set.
    #[must_use]
    pub fn nodes(&self, set: SetId) -> &[NodeId] {
        self.sets
            .iter()
            .find(|candidate| candidate.id == set)
            .map_or(&[], |set| set.nodes.as_slice())
    }

    /// The set of a node.
    #[must_use]
    pub fn set_of(&self, node: NodeId) -> Option<SetId> {
        self.sets
            .iter()
            .find(|set| set.nodes.contains(&node))
            .map(|set| set.id)
    }

    /// The move of a shard, if it is being moved.
    #[must_use]
    pub fn moving(&self, shard: Shard) -> Option<Move> {
        self.home(shard).and_then(|home| home.moving)
    }

    /// Where a shard is; `None` if the table has no such shard.
    #[must_use]
    pub fn route(&self, shard: Shard) -> Option<Route<'_>> {
        let set = self.home(shard)?.answering();
        Some(Route {
            shard,
            set,
            nodes: self.nodes(set),
        })
    }

    /// The sets to ask for these shards, each once, with the shards that it answers for.
    #[must_use]
    pub fn route_query(&self, shards: Run) -> Vec<QueryRoute<'_>> {
        let mut routes: Vec<QueryRoute<'_>> = Vec::new();
        for shard in shards.iter() {
            let Some(route) = self.route(shard) else {
                continue;
            };
            match routes.iter_mut().find(|known| known.set == route.set) {
                Some(known) => known.shards.push(shard),
                None => routes.push(QueryRoute {
                    set: route.set,
                    nodes: route.nodes,
                    shards: vec![shard],
                }),
            }
        }
        routes.sort_by_key(|route| route.set);
        routes
    }

    /// The sets that get the changes of a shard's rows: the home, and the new set while the shard
    /// moves.
    pub fn holders(&self, shard: Shard) -> impl Iterator<Item = SetId> {
        let home = self.home(shard);
        let to = home.and_then(|home| home.moving).map(|moving| moving.to);
        home.map(|home| home.set).into_iter().chain(to)
    }

    /// Whether a set takes writes of a shard's rows.
    #[must_use]
    pub fn takes_writes(&self, set: SetId, shard: Shard) -> bool {
        self.home(shard).is_some_and(|home| {
            home.answering() == set || (home.set == set && home.moving.is_some())
        })
    }

    /// Begins to move a shard to another set.
    ///
    /// # Errors
    /// [`MoveError`]; then nothing has changed.
    pub fn begin_move(&mut self, shard: Shard, to: SetId) -> Result<(), MoveError> {
        let known = self.sets.iter().any(|set| set.id == to);
        let home = self.home_mut(shard)?;
        if home.moving.is_some() {
            return Err(MoveError::Moving(shard));
        }
        if !known {
            return Err(MoveError::NoSet(to));
        }
        if home.set == to {
            return Err(MoveError::AtHome { shard, set: to });
        }
        home.moving = Some(Move {
            to,
            phase: Phase::Copying,
        });
        Ok(())
    }

    /// Lets the new set answer, once it has all rows.
    ///
    /// # Errors
    /// [`MoveError::OtherPhase`] if the shard is not being copied.
    pub fn switch(&mut self, shard: Shard) -> Result<(), MoveError> {
        match &mut self.home_mut(shard)?.moving {
            Some(moving) if moving.phase == Phase::Copying => {
                moving.phase = Phase::Switched;
                Ok(())
            }
            _ => Err(MoveError::OtherPhase(shard)),
        }
    }

    /// Ends a move that has switched: the old set has nothing to do with the shard any more.
    ///
    /// # Errors
    /// [`MoveError::OtherPhase`] if the move has not switched.
    pub fn finish_move(&mut self, shard: Shard) -> Result<(), MoveError> {
        let home = self.home_mut(shard)?;
        match home.moving {
            Some(moving) if moving.phase == Phase::Switched => {
                *home = Home {
                    set: moving.to,
                    moving: None,
                };
                Ok(())
            }
            _ => Err(MoveError::OtherPhase(shard)),
        }
    }

    /// Gives up a move that has not switched: the new set deletes what it has got.
    ///
    /// # Errors
    /// [`MoveError::OtherPhase`] if the shard is not being copied.
    pub fn cancel_move(&mut self, shard: Shard) -> Result<(), MoveError> {
        let home = self.home_mut(shard)?;
        match home.moving {
            Some(moving) if moving.phase == Phase::Copying => {
                home.moving = None;
                Ok(())
            }
            _ => Err(MoveError::OtherPhase(shard)),
        }
    }

    /// Writes sets and homes; the reader knows the number of shards.
    /// Whether a shard is being moved.
    #[must_use]
    pub fn has_moves(&self) -> bool {
        self.homes.iter().any(|home| home.moving.is_some())
    }

    /// The set from which a shard is moved, or that has it.
    #[must_use]
    pub fn source(&self, shard: Shard) -> Option<SetId> {
        self.home(shard).map(|home| home.set)
    }

    /// Adds a set without shards.
    ///
    /// # Errors
    /// [`Invalid::Sets`]; then nothing has changed.
    pub fn add_set(&mut self, set: NodeSet) -> Result<(), Invalid> {
        let mut sets = self.sets.clone();
        sets.push(set);
        check(&sets)?;
        self.sets = sets;
        Ok(())
    }

    /// Whether this node has shards that no other node has.
    #[must_use]
    pub fn is_only_home(&self, node: NodeId) -> bool {
        let alone = self.set_of(node).filter(|set| self.nodes(*set).len() == 1);
        alone.is_some_and(|set| self.homes.iter().any(|home| home.answering() == set))
    }

    pub(crate) fn write(&self, w: &mut Writer) {
        write_sets(&self.sets, w);
        for home in &self.homes {
            w.u32(home.set.0);
            match home.moving {
                None => w.u8(0),
                Some(Move { to, phase }) => w
                    .u8(match phase {
                        Phase::Copying => 1,
                        Phase::Switched => 2,
                    })
                    .u32(to.0),
            };
        }
    }

    pub(crate) fn read(shards: Shards, r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let sets = read_sets(r)?;
        let invalid = |_| Malformed::Invalid("node set");
        check(&sets).map_err(invalid)?;
        let set = |r: &mut Reader<'_>| {
            let id = SetId(r.u32()?);
            if sets.iter().any(|set| set.id == id) {
                Ok(id)
            } else {
                Err(Malformed::Invalid("node set"))
            }
        };
        let mut homes = Vec::new();
        for _ in shards.all() {
            let home = set(r)?;
            let phase = match r.u8()? {
                0 => None,
                1 => Some(Phase::Copying),
                2 => Some(Phase::Switched),
                other => return Err(r.unknown(other)),
            };
            let moving = match phase {
                None => None,
                Some(phase) => Some(Move { to: set(r)?, phase }),
            };
            if moving.is_some_and(|moving| moving.to == home) {
                return Err(Malformed::Invalid("move"));
            }
            homes.push(Home { set: home, moving });
        }
        Ok(Self {
            shards,
            sets,
            homes,
        })
    }

    fn home(&self, shard: Shard) -> Option<&Home> {
        self.homes.get(usize::try_from(shard.0).ok()?)
    }

    fn home_mut(&mut self, shard: Shard) -> Result<&mut Home, MoveError> {
        usize::try_from(shard.0)
            .ok()
            .and_then(|at| self.homes.get_mut(at))
            .ok_or(MoveError::NoShard(shard))
    }
}

impl Home {
    fn answering(&self) -> SetId {
        match self.moving {
            Some(moving) if moving.phase == Phase::Switched => moving.to,
            _ => self.set,
        }
    }
}

fn check(sets: &[NodeSet]) -> Result<(), Invalid> {
    if sets.is_empty() {
        return Err(Invalid::Sets("no set"));
    }
    if sets.len() > SETS_LIMIT {
        return Err(Invalid::Sets("too many sets"));
    }
    if sets.iter().any(|set| set.nodes.is_empty()) {
        return Err(Invalid::Sets("a set without a node"));
    }
    if sets.iter().any(|set| set.nodes.len() > NODES_LIMIT) {
        return Err(Invalid::Sets("too many nodes in a set"));
    }
    let mut ids: Vec<SetId> = sets.iter().map(|set| set.id).collect();
    ids.sort_unstable();
    ids.dedup();
    if ids.len() != sets.len() {
        return Err(Invalid::Sets("a set comes twice"));
    }
    let mut nodes: Vec<NodeId> = sets.iter().flat_map(|set| set.nodes.clone()).collect();
    let count = nodes.len();
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.len() != count {
        return Err(Invalid::Sets("a node comes twice"));
    }
    Ok(())
}

pub(crate) fn write_sets(sets: &[NodeSet], w: &mut Writer) {
    w.count(sets.len());
    for set in sets {
        w.u32(set.id.0).count(set.nodes.len());
        for node in &set.nodes {
            w.u64(node.0);
        }
    }
}

pub(crate) fn read_sets(r: &mut Reader<'_>) -> Result<Vec<NodeSet>, Malformed> {
    let mut sets = Vec::new();
    for _ in 0..r.count(SETS_LIMIT)? {
        let id = SetId(r.u32()?);
        let nodes = (0..r.count(NODES_LIMIT)?)
            .map(|_| r.u64().map(NodeId))
            .collect::<Result<_, _>>()?;
        sets.push(NodeSet { id, nodes });
    }
    Ok(sets)
}
