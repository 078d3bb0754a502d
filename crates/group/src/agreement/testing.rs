//! Looks into an agreement, and broken rules, for tests.

use std::collections::BTreeMap;

use super::Agreement;
use crate::mutation::Mutation;

impl Agreement {
    /// Elections without the vote before the vote.
    pub(crate) fn without_pre_vote(&mut self) {
        self.raw.raft.pre_vote = false;
    }

    /// Lets the time of an election pass.
    pub(crate) fn hears_no_leader(&mut self) {
        if !self.leads() {
            self.raw.raft.election_elapsed = usize::from(self.settings.election_ticks);
        }
    }

    /// All volatile state that decides what the member does next.
    pub(crate) fn picture(&self) -> String {
        let raft = &self.raw.raft;
        let mut progress: Vec<_> = raft.prs().iter().collect();
        progress.sort_by_key(|(id, _)| **id);
        let votes: BTreeMap<_, _> = raft.prs().votes().iter().collect();
        format!(
            "{:?} {:?} {} {} {} {:?} {:?} {progress:?} {votes:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            self.stopped,
            raft.state,
            raft.term,
            raft.vote,
            raft.leader_id,
            (
                raft.raft_log.committed,
                raft.raft_log.applied(),
                raft.raft_log.last_index()
            ),
            (
                raft.pending_conf_index,
                raft.lead_transferee,
                raft.election_elapsed
            ),
            raft.prs().conf(),
            self.proposals.pending.keys(),
            self.proposals.offered,
            self.confirming,
            self.known,
            self.leases,
        )
    }

    pub(crate) fn break_rule(&mut self, mutation: Option<Mutation>) {
        self.mutation = mutation;
        self.leases.mutation = mutation;
        if mutation == Some(Mutation::TrustUnproven) {
            self.confirming = None;
        }
    }
}
