//! How far tables have come, by table, and what a majority of nodes has.

use std::collections::BTreeMap;

use crate::number::{NodeNumber, TableNumber, Term, Version};

/// Versions by table; a table that is not in it is at version 0.
pub type Vector = BTreeMap<TableNumber, Version>;

/// What is decided of one table: all writes up to `settled` are committed or void, and the last
/// committed one of these is `committed`. So the numbers after `committed` up to `settled` are
/// void.
///
/// One such pair announces any number of void writes. It is repeated until all nodes have it; it
/// only grows, so a repeat or an old one does no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct End {
    /// The last committed write up to `settled`.
    pub committed: Version,
    /// No number up to this one is outstanding.
    pub settled: Version,
}

/// [`End`]s by table.
pub type Ends = BTreeMap<TableNumber, End>;

/// What a member has when it has promised to hold back what a cut may refuse.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Report {
    /// The last term that the member knows.
    pub term: Term,
    /// The last committed write here and the last settled number here, by table.
    pub ends: Ends,
}

/// Reports by member.
pub type Reports = BTreeMap<NodeNumber, Report>;

/// Whether `count` of `members` is more than half.
#[must_use]
pub const fn is_majority(count: usize, members: usize) -> bool {
    count > members / 2
}

/// The furthest of all reports, by table.
pub(crate) fn furthest(reports: &Reports) -> Ends {
    let mut ends = Ends::new();
    for report in reports.values() {
        for (table, reported) in &report.ends {
            let end: &mut End = ends.entry(*table).or_default();
            end.committed = end.committed.max(reported.committed);
            end.settled = end.settled.max(reported.settled);
        }
    }
    ends
}

/// What the members of a group have confirmed to one node: for `durability => 'majority'`.
///
/// A transaction is acknowledged to its client once a majority has reached all that it wrote, or,
/// if it wrote nothing, all that it saw. Otherwise a later cut could give up a write that a client
/// has seen. If the node diverges meanwhile, see [`crate::Learned::Diverged`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Confirmations {
    by: BTreeMap<NodeNumber, (Term, Vector)>,
}

impl Confirmations {
    /// Notes what a member has reached, and the term that it knew then.
    pub fn note(&mut self, member: NodeNumber, term: Term, reached: Vector) {
        let known = self.by.entry(member).or_default();
        if term > known.0 {
            *known = (term, reached);
        } else if term == known.0 {
            for (table, version) in reached {
                let at = known.1.entry(table).or_default();
                *at = version.max(*at);
            }
        }
    }

    /// Whether a majority of `members` has reached `vector`, by confirmations of this term. Those
    /// of another term speak of other writes under the same numbers.
    #[must_use]
    pub fn cover(&self, term: Term, vector: &Vector, members: usize) -> bool {
        let reached = |has: &Vector| {
            let at = |table| has.get(table).copied().unwrap_or_default();
            vector.iter().all(|(table, version)| at(table) >= *version)
        };
        let confirmed = self
            .by
            .values()
            .filter(|(known, has)| *known == term && reached(has))
            .count();
        is_majority(confirmed, members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_of_one_term_confirms() {
        let vector = |version| Vector::from([(TableNumber(1), Version(version))]);
        let mut confirmations = Confirmations::default();
        confirmations.note(NodeNumber(1), Term(1), vector(5));
        confirmations.note(NodeNumber(2), Term(2), vector(5));
        confirmations.note(NodeNumber(3), Term(1), vector(4));
        assert!(!confirmations.cover(Term(1), &vector(5), 3));
        assert!(confirmations.cover(Term(1), &vector(4), 3));
        // An old confirmation that arrives late takes nothing back.
        confirmations.note(NodeNumber(3), Term(1), vector(5));
        confirmations.note(NodeNumber(3), Term(1), vector(2));
        assert!(confirmations.cover(Term(1), &vector(5), 3));
        assert!(!is_majority(2, 4) && is_majority(3, 4));
    }
}
