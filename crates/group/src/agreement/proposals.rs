//! Proposals of a member that have no answer yet, and those that it has appended as the leader.
//!
//! Not for: whether and where a proposal is offered (`proposing`).

use std::collections::{BTreeMap, BTreeSet};

use crate::command::{Command, Proposal, ProposalId};
use crate::member::MemberId;
use crate::outcome::Outcome;

/// How many proposals of a member can be under way.
pub const PROPOSALS_LIMIT: usize = 32;

/// A proposal without an answer.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) bytes: Vec<u8>,
    pub(super) proposal: Proposal,
}

/// A member's proposals since its start.
#[derive(Debug)]
pub(super) struct Proposals {
    last: ProposalId,
    pub(super) pending: BTreeMap<ProposalId, Pending>,
    /// Answers that were not given out yet.
    pub(super) answered: Vec<(ProposalId, Outcome)>,
    /// Proposals that this leader has appended in this term.
    pub(super) offered: BTreeSet<ProposalId>,
    offered_term: u64,
}

impl Proposals {
    /// None yet, at the member's start with this number.
    pub(super) const fn new(member: MemberId, boot: u64) -> Self {
        Self {
            last: ProposalId {
                member,
                boot,
                counter: 0,
            },
            pending: BTreeMap::new(),
            answered: Vec::new(),
            offered: BTreeSet::new(),
            offered_term: 0,
        }
    }

    /// Whether no other can be under way.
    pub(super) fn is_full(&self) -> bool {
        self.pending.len() >= PROPOSALS_LIMIT
    }

    /// Makes the next proposal. Its number counts once it is added.
    pub(super) const fn next(&self, command: Command) -> Proposal {
        let id = ProposalId {
            counter: self.last.counter + 1,
            ..self.last
        };
        Proposal { id, command }
    }

    /// Adds the next proposal, with its bytes.
    pub(super) fn add(&mut self, proposal: Proposal, bytes: Vec<u8>) {
        self.last = proposal.id;
        self.pending
            .insert(proposal.id, Pending { bytes, proposal });
    }

    /// Forgets a proposal that nobody waits for.
    pub(super) fn withdraw(&mut self, id: ProposalId) {
        self.pending.remove(&id);
    }

    /// The proposals without an answer.
    pub(super) fn unanswered(&self) -> Vec<ProposalId> {
        self.pending.keys().copied().collect()
    }

    /// Whether this leader has appended the proposal in this term.
    pub(super) fn is_offered(&mut self, id: ProposalId, term: u64) -> bool {
        if self.offered_term != term {
            self.offered_term = term;
            self.offered.clear();
        }
        self.offered.contains(&id)
    }

    /// Notes the outcome of an entry, for whoever proposed it here.
    pub(super) fn applied(&mut self, id: ProposalId, outcome: &Outcome) {
        self.offered.remove(&id);
        self.answer(id, outcome);
    }

    /// Answers a proposal of this member that waits for it.
    pub(super) fn answer(&mut self, id: ProposalId, outcome: &Outcome) {
        if self.pending.remove(&id).is_some() {
            self.answered.push((id, outcome.clone()));
        }
    }
}
