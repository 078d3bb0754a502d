//! The graph of dependencies, and algorithms over it: components and shortest cycles.
//!
//! Nodes are transactions and *relays*. A relay stands between many sources and many targets, so
//! that edges stay as few as the history is long. A path from a transaction through relays to the
//! next transaction is one step: its kind and key are those of its first edge.
#![expect(
    clippy::indexing_slicing,
    reason = "node and edge numbers are indexes that this module made"
)]

use std::collections::{HashMap, VecDeque};

/// A set of kinds of edges.
pub(crate) type Kinds = u8;
/// Write to write.
pub(crate) const WW: Kinds = 1;
/// Write to read.
pub(crate) const WR: Kinds = 2;
/// Read to write.
pub(crate) const RW: Kinds = 4;
/// The order of a process.
pub(crate) const PROCESS: Kinds = 8;
/// Real time.
pub(crate) const REALTIME: Kinds = 16;
/// From a relay on, whatever led there.
pub(crate) const RELAY: Kinds = 32;
/// All kinds.
pub(crate) const ALL: Kinds = 63;

/// The key of an edge that has none.
pub(crate) const NO_KEY: u32 = u32::MAX;

const UNSEEN: u32 = u32::MAX;

/// An edge, without its source.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Edge {
    pub to: u32,
    pub key: u32,
    pub kind: Kinds,
}

/// Collects edges. The transactions are the first nodes.
pub(crate) struct Builder {
    transactions: u32,
    nodes: u32,
    edges: Vec<(u32, Edge)>,
}

impl Builder {
    pub fn new(transactions: u32) -> Self {
        Self {
            transactions,
            nodes: transactions,
            edges: Vec::new(),
        }
    }

    /// Adds an edge, unless it leads back to its source.
    pub fn link(&mut self, from: u32, to: u32, kind: Kinds, key: u32) {
        if from != to {
            self.edges.push((from, Edge { to, key, kind }));
        }
    }

    /// Adds a relay.
    pub fn relay(&mut self) -> u32 {
        let node = self.nodes;
        self.nodes += 1;
        node
    }

    pub fn build(self) -> Graph {
        Graph::new((0..self.nodes).collect(), self.transactions, &self.edges)
    }
}

/// A set of transactions that others lead to, each to all but itself.
///
/// Two chains of relays, forwards and backwards, make two edges of what would be one to each.
pub(crate) struct Fan {
    targets: Vec<u32>,
    places: HashMap<u32, usize>,
    /// `forward[i]` leads to the targets from `i` on.
    forward: Vec<u32>,
    /// `backward[i]` leads to the targets up to `i`. Empty until needed.
    backward: Vec<u32>,
}

impl Fan {
    /// Makes a fan to `targets`, which are different.
    pub fn new(graph: &mut Builder, targets: Vec<u32>) -> Self {
        let places = targets.iter().enumerate().map(|(i, t)| (*t, i)).collect();
        let forward = chain(graph, targets.iter().rev());
        Self {
            places,
            forward: forward.into_iter().rev().collect(),
            backward: Vec::new(),
            targets,
        }
    }

    /// Adds the edges from a transaction to all targets but itself.
    pub fn link(&mut self, graph: &mut Builder, from: u32, kind: Kinds, key: u32) {
        let Some(place) = self.places.get(&from).copied() else {
            if let Some(first) = self.forward.first() {
                graph.link(from, *first, kind, key);
            }
            return;
        };
        if let Some(after) = self.forward.get(place + 1) {
            graph.link(from, *after, kind, key);
        }
        if place > 0 {
            if self.backward.is_empty() {
                self.backward = chain(graph, self.targets.iter());
            }
            graph.link(from, self.backward[place - 1], kind, key);
        }
    }
}

/// Makes a relay for each target, which leads to the target and to the relay before.
fn chain<'t>(graph: &mut Builder, targets: impl Iterator<Item = &'t u32>) -> Vec<u32> {
    let mut relays: Vec<u32> = Vec::new();
    for target in targets {
        let relay = graph.relay();
        graph.link(relay, *target, RELAY, NO_KEY);
        if let Some(last) = relays.last() {
            graph.link(relay, *last, RELAY, NO_KEY);
        }
        relays.push(relay);
    }
    relays
}

/// An edge of a path, with its source.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hop {
    pub from: u32,
    pub edge: Edge,
}

/// A graph with its edges sorted by source.
pub(crate) struct Graph {
    /// The node of the whole graph that each node stands for.
    pub origin: Vec<u32>,
    transactions: u32,
    starts: Vec<u32>,
    edges: Vec<Edge>,
}

impl Graph {
    fn new(origin: Vec<u32>, transactions: u32, edges: &[(u32, Edge)]) -> Self {
        let mut starts = vec![0_u32; origin.len() + 1];
        for (from, _) in edges {
            starts[*from as usize + 1] += 1;
        }
        for node in 0..origin.len() {
            starts[node + 1] += starts[node];
        }
        let mut next = starts.clone();
        let empty = Edge {
            to: 0,
            key: NO_KEY,
            kind: 0,
        };
        let mut sorted = vec![empty; edges.len()];
        for (from, edge) in edges {
            let place = &mut next[*from as usize];
            sorted[*place as usize] = *edge;
            *place += 1;
        }
        Self {
            origin,
            transactions,
            starts,
            edges: sorted,
        }
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.origin.len()
    }

    /// Whether a node is a transaction, not a relay.
    pub fn is_transaction(&self, node: u32) -> bool {
        self.origin[node as usize] < self.transactions
    }

    /// Returns the edges that leave a node.
    pub fn edges(&self, node: u32) -> &[Edge] {
        let node = node as usize;
        &self.edges[self.starts[node] as usize..self.starts[node + 1] as usize]
    }

    /// Returns the nodes of the graph.
    pub fn nodes(&self) -> impl Iterator<Item = u32> + use<> {
        // The builder numbers nodes with 32 bits.
        0..u32::try_from(self.origin.len()).unwrap_or(u32::MAX)
    }

    /// Returns the part of the graph that `nodes` and the edges among them make.
    pub fn part(&self, nodes: &[u32], kinds: Kinds) -> Self {
        let local: HashMap<u32, u32> = nodes.iter().copied().zip(0..).collect();
        let mut edges = Vec::new();
        for (from, node) in (0..).zip(nodes) {
            for edge in self.edges(*node) {
                if edge.kind & kinds != 0
                    && let Some(to) = local.get(&edge.to)
                {
                    edges.push((from, Edge { to: *to, ..*edge }));
                }
            }
        }
        let origin = nodes.iter().map(|n| self.origin[*n as usize]).collect();
        Self::new(origin, self.transactions, &edges)
    }

    /// Returns the graph in which each node says whether an anti-dependency led to it.
    ///
    /// Such a node has no anti-dependency that leaves it, so no cycle has two in a row.
    pub fn alternating(&self) -> Self {
        let mut edges = Vec::with_capacity(self.edges.len() * 2);
        for from in self.nodes() {
            for edge in self.edges(from) {
                let to = |state: u32| Edge {
                    to: edge.to * 2 + state,
                    ..*edge
                };
                match edge.kind {
                    RW => edges.push((from * 2, to(1))),
                    RELAY => edges.extend([(from * 2, to(0)), (from * 2 + 1, to(1))]),
                    _ => edges.extend([(from * 2, to(0)), (from * 2 + 1, to(0))]),
                }
            }
        }
        let origin = self.origin.iter().flat_map(|node| [*node, *node]).collect();
        Self::new(origin, self.transactions, &edges)
    }

    /// Returns the strongly connected components of more than one node (Tarjan's algorithm).
    pub fn components(&self, kinds: Kinds) -> Vec<Vec<u32>> {
        let mut found = Vec::new();
        let mut order = vec![UNSEEN; self.len()];
        let mut low = vec![0_u32; self.len()];
        let mut on_stack = vec![false; self.len()];
        let mut stack = Vec::new();
        let mut calls: Vec<(u32, u32)> = Vec::new();
        let mut count = 0;
        for root in self.nodes() {
            if order[root as usize] != UNSEEN {
                continue;
            }
            calls.push((root, self.starts[root as usize]));
            while let Some((node, next)) = calls.last_mut() {
                let v = *node as usize;
                if order[v] == UNSEEN {
                    order[v] = count;
                    low[v] = count;
                    count += 1;
                    stack.push(*node);
                    on_stack[v] = true;
                }
                if *next < self.starts[v + 1] {
                    let edge = self.edges[*next as usize];
                    *next += 1;
                    let w = edge.to as usize;
                    if edge.kind & kinds == 0 {
                    } else if order[w] == UNSEEN {
                        calls.push((edge.to, self.starts[w]));
                    } else if on_stack[w] {
                        low[v] = low[v].min(order[w]);
                    }
                    continue;
                }
                if low[v] == order[v] {
                    let mut component = Vec::new();
                    while let Some(w) = stack.pop() {
                        on_stack[w as usize] = false;
                        component.push(w);
                        if w as usize == v {
                            break;
                        }
                    }
                    if component.len() > 1 {
                        found.push(component);
                    }
                }
                calls.pop();
                if let Some((caller, _)) = calls.last() {
                    low[*caller as usize] = low[*caller as usize].min(low[v]);
                }
            }
        }
        found
    }
}

/// A search for short paths, which may look at so many edges in all.
pub(crate) struct Search<'g> {
    graph: &'g Graph,
    pub budget: usize,
    round: u32,
    rounds: Vec<u32>,
    distance: Vec<u32>,
    parent: Vec<(u32, u32)>,
}

impl<'g> Search<'g> {
    pub fn new(graph: &'g Graph, budget: usize) -> Self {
        Self {
            graph,
            budget,
            round: 0,
            rounds: vec![0; graph.len()],
            distance: vec![0; graph.len()],
            parent: vec![(0, 0); graph.len()],
        }
    }

    /// Returns the path with fewest steps from `from` to `to`, and how many these are.
    ///
    /// `None` if there is no path of fewer than `limit` steps, or the budget is spent. With the
    /// same node twice it is a cycle.
    pub fn path(
        &mut self,
        from: u32,
        to: u32,
        kinds: Kinds,
        limit: u32,
    ) -> Option<(u32, Vec<Hop>)> {
        self.round += 1;
        let mut best: Option<(u32, u32, u32)> = None;
        let mut bound = limit;
        self.rounds[from as usize] = self.round;
        self.distance[from as usize] = 0;
        let mut queue = VecDeque::from([(from, 0)]);
        while let Some((node, distance)) = queue.pop_front() {
            if distance >= bound || self.budget == 0 {
                break;
            }
            if distance > self.distance[node as usize] {
                continue;
            }
            // Relays cost nothing.
            let step = u32::from(self.graph.is_transaction(node));
            let first = self.graph.starts[node as usize];
            for (number, edge) in (first..).zip(self.graph.edges(node)) {
                self.budget = self.budget.saturating_sub(1);
                let reached = distance + step;
                if edge.kind & kinds == 0 || reached >= bound {
                    continue;
                }
                if edge.to == to {
                    best = Some((reached, node, number));
                    bound = reached;
                    continue;
                }
                let w = edge.to as usize;
                if self.rounds[w] == self.round && self.distance[w] <= reached {
                    continue;
                }
                self.rounds[w] = self.round;
                self.distance[w] = reached;
                self.parent[w] = (node, number);
                if step == 0 {
                    queue.push_front((edge.to, reached));
                } else {
                    queue.push_back((edge.to, reached));
                }
            }
        }
        let (steps, mut node, mut number) = best?;
        let mut path = Vec::new();
        loop {
            path.push(Hop {
                from: node,
                edge: self.graph.edges[number as usize],
            });
            if node == from {
                break;
            }
            (node, number) = self.parent[node as usize];
        }
        path.reverse();
        Some((steps, path))
    }
}

/// Returns a shortest cycle of edges of these kinds, if there is one. In large graphs it is a
/// short one: the search ends when it has looked at `budget` edges and found any.
pub(crate) fn shortest_cycle(graph: &Graph, kinds: Kinds, budget: usize) -> Option<Vec<Hop>> {
    let mut best: Option<(u32, Vec<Hop>)> = None;
    for component in graph.components(kinds) {
        let part = graph.part(&component, kinds);
        let mut search = Search::new(&part, budget);
        for node in part.nodes().filter(|node| part.is_transaction(*node)) {
            let limit = best.as_ref().map_or(u32::MAX, |(steps, _)| *steps);
            if limit <= 2 {
                break;
            }
            if best.is_none() {
                // The first cycle is found whatever it costs.
                search.budget = search.budget.max(usize::MAX / 2);
            }
            let found = search.path(node, node, kinds, limit);
            if best.is_none() {
                search.budget = budget;
            }
            if let Some((steps, path)) = found {
                let globally = |hop: &Hop| Hop {
                    from: component[hop.from as usize],
                    edge: Edge {
                        to: component[hop.edge.to as usize],
                        ..hop.edge
                    },
                };
                best = Some((steps, path.iter().map(globally).collect()));
            }
            if search.budget == 0 {
                break;
            }
        }
    }
    best.map(|(_, path)| path)
}
