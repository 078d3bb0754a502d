//! Cuts: which writes of the past count, agreed by the group when a sequencer or a node is lost.
//!
//! Nobody can know whether a node that is cut off has committed. The others decide instead:
//!
//! 1. Members promise to hold back the writes in question ([`crate::Local::promise`]) and report
//!    what they have.
//! 2. From their reports the sequencer makes a [`Cut`]: the writes that one of them has count, the
//!    others are void. To decide over everyone's writes a majority has to report. To decide over
//!    one node's, all other members have to ([`crate::Sequencer::fence`]).
//! 3. The group agrees on the cut as an entry of its log. All nodes learn all cuts in this order.
//! 4. From then on each node refuses the writes that are void. A node that has such a write has
//!    diverged and gives it up.
//!
//! A write that a majority had reached is in every such set of reports, so it counts. Only such
//! writes are acknowledged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::grant::Refusal;
use crate::number::{Boot, NodeNumber, TableNumber, Term, Version};
use crate::record::Record;
use crate::vector::{End, Ends, Reports, furthest, is_majority};

/// How many cuts a node remembers. Records from before older ones are refused.
pub const CUTS_LIMIT: usize = 64;

/// A decision of the group about writes of earlier terms.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cut {
    /// The term that begins.
    pub term: Term,
    /// The term before. A node that has not learned the cut of that term must do so first.
    pub follows: Term,
    /// Whose writes it decides.
    pub scope: Scope,
}

/// Whose writes a cut decides.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scope {
    /// All nodes': a new sequencer begins. Writes above `committed` are void, and counters begin
    /// after `settled`.
    Everyone {
        /// What a majority has, by table.
        ends: Ends,
    },
    /// One node's: it was fenced. Other nodes' grants stay.
    Node {
        /// The node.
        node: NodeNumber,
        /// Its last start that is fenced.
        boot: Boot,
        /// Its writes that are void.
        void: BTreeSet<(TableNumber, Version)>,
    },
}

impl Cut {
    /// Makes the cut with which a new sequencer begins.
    ///
    /// `follows` is the last agreed term, `members` the number of members, and `earlier_over`
    /// whether the leases of all earlier sequencers are over.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotActing`] while an earlier lease may run, [`Refusal::NoMajority`] if too few
    /// members have reported under the last term.
    pub fn new_sequencer(
        follows: Term,
        members: usize,
        reports: &Reports,
        earlier_over: bool,
    ) -> Result<Self, Refusal> {
        if !earlier_over {
            return Err(Refusal::NotActing);
        }
        let reports = of_term(follows, members, reports)?;
        Ok(Self {
            term: Term(follows.0.saturating_add(1)),
            follows,
            scope: Scope::Everyone {
                ends: furthest(&reports),
            },
        })
    }
}

/// The reports that were made under this term: only their numbers mean the same writes.
pub(crate) fn of_term(term: Term, members: usize, reports: &Reports) -> Result<Reports, Refusal> {
    let mut reports = reports.clone();
    reports.retain(|_, report| report.term == term);
    if is_majority(reports.len(), members) {
        Ok(reports)
    } else {
        Err(Refusal::NoMajority)
    }
}

/// The cuts that a node has learned.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Cuts {
    kept: VecDeque<Cut>,
    /// Records of terms before this one can't be judged any more.
    forgotten: Term,
}

impl Cuts {
    pub(crate) fn add(&mut self, cut: Cut) {
        if self.kept.len() >= CUTS_LIMIT
            && let Some(oldest) = self.kept.pop_front()
        {
            self.forgotten = oldest.term;
        }
        self.kept.push_back(cut);
    }

    /// Cuts up to this term are not known.
    pub(crate) fn forget_before(&mut self, term: Term) {
        self.forgotten = self.forgotten.max(term);
    }

    /// Whether a record's writes are void.
    pub(crate) fn refuse(&self, record: &Record) -> bool {
        record.term < self.forgotten || self.voids(record)
    }

    /// Whether a cut that is kept makes a record's writes void.
    pub(crate) fn voids(&self, record: &Record) -> bool {
        self.kept.iter().any(|cut| voids(cut, record))
    }
}

fn voids(cut: &Cut, record: &Record) -> bool {
    if record.term >= cut.term {
        return false;
    }
    match &cut.scope {
        Scope::Everyone { ends } => record
            .writes()
            .any(|(table, own)| own > end_of(ends, table).committed),
        Scope::Node { node, boot, void } => {
            record.id.node == *node
                && record.id.boot <= *boot
                && record.writes().any(|write| void.contains(&write))
        }
    }
}

pub(crate) fn end_of(ends: &BTreeMap<TableNumber, End>, table: TableNumber) -> End {
    ends.get(&table).copied().unwrap_or_default()
}
