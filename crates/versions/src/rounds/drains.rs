//! Drains of tables: the steps of one node, as the group's log asks for them.
//!
//! A node has drained a table once nothing on its way to the node was written before the table's
//! phase. Nodes A, B and C have data, and `stock` begins to be versioned.
//!
//! 1. The group agrees that nobody writes `stock` any more.
//! 2. A locks `stock`, which ends all that write it. Then A writes a note into its stream.
//! 3. B and C do the same.
//! 4. Once A has the notes of B and C, it has all that they wrote to `stock` before. A proposes
//!    that it has drained `stock`.
//! 5. The last proposal of this kind moves the table on.
//!
//! Example of what goes wrong otherwise: B's write of `stock` is on its way to A. T1 on A reads
//! `stock` without it, as the first versioned transaction.
//!
//! Not for: the phases of tables, which the group's log has.

use std::collections::BTreeSet;

use super::Moment;
use crate::broken::Broken;
use crate::number::{NodeNumber, TableNumber};

/// Between two attempts, in microseconds.
const EVERY: u64 = 500_000;

/// The next step of a node that drains a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextDrain {
    /// Lock the table, and write the note.
    Note,
    /// Wait for other nodes' notes.
    Wait,
    /// Propose that this node has drained the table.
    Propose,
}

/// The drains of one process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Drains {
    tried: Option<Moment>,
    /// Tables whose proposal was agreed, and whether they end.
    done: BTreeSet<(TableNumber, bool)>,
    pub(crate) broken: Option<Broken>,
}

impl Drains {
    /// The tables to go on with now, of those that begin or end (true) to be versioned.
    pub fn due(
        &mut self,
        moving: impl Iterator<Item = (TableNumber, bool)>,
        now: Moment,
    ) -> Vec<(TableNumber, bool)> {
        if !now.is_due(self.tried, EVERY) {
            return Vec::new();
        }
        self.tried = Some(now);
        moving.filter(|of| !self.done.contains(of)).collect()
    }

    /// The next step with one table. `notes` are the nodes whose notes this node has.
    #[must_use]
    pub fn next(
        &self,
        me: NodeNumber,
        nodes: &BTreeSet<NodeNumber>,
        notes: &BTreeSet<NodeNumber>,
    ) -> NextDrain {
        if !notes.contains(&me) {
            NextDrain::Note
        } else if nodes.is_subset(notes) || self.broken == Some(Broken::DrainsAlone) {
            NextDrain::Propose
        } else {
            NextDrain::Wait
        }
    }

    /// Notes that the group has agreed on this node's proposal.
    pub fn agreed(&mut self, table: TableNumber, ends: bool) {
        self.done.insert((table, ends));
    }
}

/// Every interleaving of three nodes that drain a table, with one write on each.
#[cfg(test)]
mod tests {
    use stateright::{Checker, Model, Property};

    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Entry {
        Write,
        Note,
    }

    #[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
    struct Node {
        drains: Drains,
        stream: Vec<Entry>,
        /// How many entries of each other node's stream it has applied.
        taken: [usize; 3],
        notes: BTreeSet<NodeNumber>,
        proposed: bool,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Step {
        Write(usize),
        Go(usize),
        Apply(usize, usize),
    }

    struct Case(Option<Broken>);

    const ALL: [NodeNumber; 3] = [NodeNumber(0), NodeNumber(1), NodeNumber(2)];

    fn counts(nodes: &[Node]) -> bool {
        nodes.iter().all(|node| node.proposed)
    }

    /// Whether a node has all that other nodes have written.
    fn has_all(nodes: &[Node], at: usize) -> bool {
        let mut origins = (0..nodes.len()).filter(|origin| *origin != at);
        origins.all(|origin| {
            let mut left = nodes[origin].stream.iter().skip(nodes[at].taken[origin]);
            !left.any(|entry| *entry == Entry::Write)
        })
    }

    impl Model for Case {
        type State = Vec<Node>;
        type Action = Step;

        fn init_states(&self) -> Vec<Vec<Node>> {
            let mut node = Node::default();
            node.drains.broken = self.0;
            vec![vec![node; 3]]
        }

        fn actions(&self, nodes: &Vec<Node>, steps: &mut Vec<Step>) {
            for at in 0..nodes.len() {
                // The lock ends all that write it.
                if nodes[at].stream.is_empty() {
                    steps.push(Step::Write(at));
                }
                steps.push(Step::Go(at));
                steps.extend((0..nodes.len()).map(|origin| Step::Apply(at, origin)));
            }
        }

        fn next_state(&self, nodes: &Vec<Node>, step: Step) -> Option<Vec<Node>> {
            let mut nodes = nodes.clone();
            match step {
                Step::Write(at) => nodes[at].stream.push(Entry::Write),
                Step::Go(at) => {
                    let node = &mut nodes[at];
                    match node.drains.next(ALL[at], &BTreeSet::from(ALL), &node.notes) {
                        NextDrain::Note => {
                            node.stream.push(Entry::Note);
                            node.notes.insert(ALL[at]);
                        }
                        NextDrain::Propose if !node.proposed => node.proposed = true,
                        _ => return None,
                    }
                }
                Step::Apply(at, origin) => {
                    let place = nodes[at].taken[origin];
                    let entry = nodes[origin].stream.get(place).copied();
                    let entry = entry.filter(|_| at != origin)?;
                    nodes[at].taken[origin] += 1;
                    if entry == Entry::Note {
                        nodes[at].notes.insert(ALL[origin]);
                    }
                }
            }
            Some(nodes)
        }

        fn properties(&self) -> Vec<Property<Self>> {
            vec![
                Property::always("all have all", |_, nodes: &Vec<Node>| {
                    !counts(nodes) || (0..nodes.len()).all(|at| has_all(nodes, at))
                }),
                Property::sometimes("the table counts", |_, nodes: &Vec<Node>| counts(nodes)),
            ]
        }
    }

    #[test]
    fn a_table_counts_once_all_have_all_that_was_written_before() {
        let checker = Case(None).checker().spawn_bfs().join();
        println!("drains: {} states", checker.unique_state_count());
        checker.assert_properties();
        let broken = Case(Some(Broken::DrainsAlone)).checker().spawn_bfs().join();
        assert!(broken.discovery("all have all").is_some());
    }

    #[test]
    fn tables_that_were_drained_are_not_tried_again() {
        let mut drains = Drains::default();
        let (stock, accounts) = ((TableNumber(1), false), (TableNumber(2), true));
        let due = |drains: &mut Drains, now| drains.due([stock, accounts].into_iter(), now);
        assert_eq!(due(&mut drains, Moment(0)), [stock, accounts]);
        assert_eq!(due(&mut drains, Moment(EVERY - 1)), []);
        drains.agreed(stock.0, stock.1);
        assert_eq!(due(&mut drains, Moment(EVERY)), [accounts]);
        // A clock that went back does not stop anything.
        assert_eq!(due(&mut drains, Moment(0)), [accounts]);
    }
}
