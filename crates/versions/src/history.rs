//! What must be true of a [`World`] at every moment, and at its end.
//!
//! The transactions that count are the writers that are visible somewhere and not given up, and
//! the readers that were acknowledged. Their *direct serialization graph* has an edge from T to U
//! if U overwrites T's write, if U reads it, or if U overwrites what T has read. One-copy
//! serializability means that it has no cycle. With an edge from each transaction to those that
//! began after its acknowledgement, it means strict serializability.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::{State, Transaction, World};
use crate::{Access, Cut, Record, Scope, TableNumber, Version};

/// The writers that count, by table, in the order of their numbers.
type Order = BTreeMap<TableNumber, BTreeMap<Version, usize>>;

/// The transactions and rows that one node shows.
pub(crate) struct Shown<'a> {
    pub visible: &'a BTreeSet<usize>,
    pub rows: &'a BTreeMap<TableNumber, usize>,
    /// A node that has diverged is not judged.
    pub diverged: bool,
}

/// The facts that are judged.
pub(crate) struct Facts<'a> {
    pub transactions: &'a [Transaction],
    pub nodes: Vec<Shown<'a>>,
    pub agreed: &'a [Cut],
}

/// Whether one of these cuts refuses a record's writes. Not the crate's own judgement.
pub(crate) fn is_given_up(record: &Record, cuts: &[Cut]) -> bool {
    cuts.iter().filter(|cut| cut.term > record.term).any(|cut| {
        record.writes().any(|(table, own)| match &cut.scope {
            Scope::Everyone { ends } => ends.get(&table).is_none_or(|end| end.committed < own),
            Scope::Node { node, boot, void } => {
                record.id.node == *node && record.id.boot <= *boot && void.contains(&(table, own))
            }
        })
    })
}

impl World {
    /// Checks all that must be true at every moment.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let nodes = self.nodes.iter().map(|node| Shown {
            visible: &node.visible,
            rows: &node.rows,
            diverged: node.local.is_diverged(),
        });
        Facts {
            transactions: &self.transactions,
            nodes: nodes.collect(),
            agreed: &self.agreed,
        }
        .check()
    }
}

impl Facts<'_> {
    fn given_up(&self, at: usize, cuts: &[Cut]) -> bool {
        let record = self.transactions[at].record.as_ref();
        record.is_some_and(|record| is_given_up(record, cuts))
    }

    /// Checks all that must be true at every moment.
    pub(crate) fn check(&self) -> Result<(), String> {
        let counts: BTreeSet<usize> = self
            .nodes
            .iter()
            .flat_map(|node| node.visible.iter().copied())
            .filter(|at| !self.given_up(*at, self.agreed))
            .collect();
        let mut order = Order::new();
        for at in &counts {
            let record = self.transactions[*at].record.as_ref().unwrap();
            for (table, own) in record.writes() {
                let other = order.entry(table).or_default().insert(own, *at);
                if let Some(other) = other {
                    return Err(format!("{other} and {at} have one number: {own:?}"));
                }
            }
        }
        for (at, transaction) in self.transactions.iter().enumerate() {
            if transaction.acknowledged && self.given_up(at, self.agreed) {
                return Err(format!("{at} was acknowledged and is given up"));
            }
            let counted = counts.contains(&at);
            let reads = transaction.read.values().flatten();
            if counted || transaction.acknowledged {
                let mut lost = reads.filter(|read| !counts.contains(*read));
                if let Some(read) = lost.next() {
                    return Err(format!("{at} has read {read}, which is given up"));
                }
            }
            if counted {
                self.check_update(at, &order)?;
            }
        }
        self.check_nodes(&counts)?;
        self.check_graph(&counts, &order)
    }

    /// A writer has read the write right before its own.
    fn check_update(&self, at: usize, order: &Order) -> Result<(), String> {
        let transaction = &self.transactions[at];
        for (table, own) in transaction.record.as_ref().unwrap().writes() {
            let before = order[&table].range(..own).next_back().map(|(_, at)| *at);
            if transaction.read[&table] != before {
                let read = transaction.read[&table];
                return Err(format!(
                    "{at} read {read:?} and follows {before:?}: lost update"
                ));
            }
        }
        Ok(())
    }

    /// Each node's tables hold a prefix: with a transaction all that it has read, and the last
    /// writer by number.
    fn check_nodes(&self, counts: &BTreeSet<usize>) -> Result<(), String> {
        for (number, node) in self.nodes.iter().enumerate() {
            if node.diverged {
                continue;
            }
            for at in node.visible.iter().filter(|at| counts.contains(at)) {
                let mut read = self.transactions[*at].read.values().flatten();
                if let Some(read) = read.find(|read| !node.visible.contains(read)) {
                    return Err(format!("node {number} shows {at} without {read}"));
                }
            }
            for (table, shown) in node.rows {
                let own = |at: &usize| {
                    let record = self.transactions[*at].record.as_ref()?;
                    record.tables.get(table)?.own
                };
                let mut later = node.visible.iter().filter(|at| own(at) > own(shown));
                if let Some(later) = later.next() {
                    return Err(format!("node {number} shows {shown} over {later}"));
                }
            }
        }
        Ok(())
    }

    fn check_graph(&self, counts: &BTreeSet<usize>, order: &Order) -> Result<(), String> {
        let mut edges: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut add = |from: usize, to: usize| {
            if from != to {
                edges.entry(from).or_default().insert(to);
            }
        };
        let part = |at: usize| counts.contains(&at) || self.transactions[at].acknowledged;
        for at in (0..self.transactions.len()).filter(|at| part(*at)) {
            let transaction = &self.transactions[at];
            for (table, read) in &transaction.read {
                let writers = order.get(table);
                let mut after = Version(0);
                if let Some(read) = read {
                    add(*read, at);
                    let record = self.transactions[*read].record.as_ref();
                    after = record.and_then(|r| r.tables[table].own).unwrap_or_default();
                }
                let next = |writers: &BTreeMap<Version, usize>| {
                    let later = writers.range(after..).find(|(v, _)| **v > after);
                    later.map(|(_, at)| *at)
                };
                if let Some(next) = writers.and_then(next) {
                    add(at, next);
                }
            }
            for earlier in transaction.after.iter().filter(|earlier| part(**earlier)) {
                add(*earlier, at);
            }
        }
        match cycle(&edges) {
            Some(cycle) => Err(format!("cycle {cycle:?}")),
            None => Ok(()),
        }
    }
}

impl World {
    /// Checks what must be true when nothing can happen any more.
    pub(crate) fn check_end(&self) -> Result<(), String> {
        for (at, transaction) in self.transactions.iter().enumerate() {
            let ended = transaction.acknowledged
                || transaction.state == State::Lost
                || self.given_up(at, &self.agreed);
            if !ended {
                let waits = self.nodes[transaction.node].local.waiting();
                let state = &transaction.state;
                return Err(format!("{at} waits for ever: {state:?} {waits:?}"));
            }
        }
        let visible = |node: &crate::cluster::Node| node.visible.clone();
        let first = visible(&self.nodes[0]);
        for (number, node) in self.nodes.iter().enumerate() {
            if node.local.is_diverged() || visible(node) != first {
                let shown = visible(node);
                let diverged = node.local.is_diverged();
                let verdicts: Vec<_> = first
                    .symmetric_difference(&shown)
                    .map(|at| {
                        let record = self.transactions[*at].record.as_ref();
                        let given_up = self.given_up(*at, &self.agreed);
                        let verdict = record.map(|record| node.local.may_apply(record));
                        (at, given_up, self.transactions[*at].node, record, verdict)
                    })
                    .collect();
                return Err(format!(
                    "node {number} differs from node 0: {diverged}, {verdicts:?}"
                ));
            }
        }
        Ok(())
    }

    /// How many transactions were acknowledged: writers, readers.
    pub(crate) fn acknowledged(&self) -> (usize, usize) {
        let known = || self.transactions.iter().filter(|t| t.acknowledged);
        let writes = known().filter(|t| t.declared.values().any(|a| *a == Access::Write));
        let writers = writes.count();
        (writers, known().count() - writers)
    }
}

/// A cycle of the graph, if it has one.
pub(crate) fn cycle(edges: &BTreeMap<usize, BTreeSet<usize>>) -> Option<Vec<usize>> {
    let mut done = BTreeSet::new();
    edges
        .keys()
        .find_map(|from| follow(*from, edges, &mut Vec::new(), &mut done))
}

fn follow(
    at: usize,
    edges: &BTreeMap<usize, BTreeSet<usize>>,
    path: &mut Vec<usize>,
    done: &mut BTreeSet<usize>,
) -> Option<Vec<usize>> {
    if let Some(begin) = path.iter().position(|known| *known == at) {
        return Some(path[begin..].to_vec());
    }
    if done.contains(&at) {
        return None;
    }
    path.push(at);
    let next = edges.get(&at).into_iter().flatten();
    let found = next.copied().find_map(|to| follow(to, edges, path, done));
    path.pop();
    done.insert(at);
    found
}

#[test]
fn a_cycle_is_found() {
    let graph = |edges: &[(usize, usize)]| {
        let mut graph: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for (from, to) in edges {
            graph.entry(*from).or_default().insert(*to);
        }
        cycle(&graph).map(|cycle| cycle.into_iter().collect::<BTreeSet<_>>())
    };
    assert_eq!(graph(&[(1, 2), (2, 3), (1, 3), (4, 1)]), None);
    assert_eq!(
        graph(&[(1, 2), (2, 3), (3, 4), (4, 2)]),
        Some(BTreeSet::from([2, 3, 4]))
    );
}
