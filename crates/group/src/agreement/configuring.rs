//! Changes of who receives the log and who votes: one at a time.

use raft::eraftpb::{ConfChangeSingle, ConfChangeType, ConfChangeV2};

use super::Agreement;
use crate::command::Command;
use crate::error::Error;
use crate::mutation::Mutation;
use crate::state::State;

/// A joining member may lack so many entries when it gets its vote.
const CAUGHT_UP: u64 = 16;

impl Agreement {
    /// Whether an entry that changes who receives the log or votes can be appended: one at a time,
    /// and none before this leader has committed an entry of its own term.
    pub(super) fn can_reconfigure(&mut self, command: &Command) -> Result<bool, Error> {
        if self.is_broken(Mutation::ReconfigureAnyTime) {
            self.raw.raft.pending_conf_index = 0;
            return Ok(true);
        }
        let raft = &self.raw.raft;
        let log = &raft.raft_log;
        let settled = log.term(log.committed).is_ok_and(|term| term == raft.term);
        if raft.has_pending_conf() || !settled {
            return Ok(false);
        }
        match command {
            Command::Activate { member } => Ok(raft
                .prs()
                .get(member.get())
                .is_none_or(|progress| progress.matched + CAUGHT_UP >= log.last_index())),
            Command::RemoveMember { member } if *member == self.me => self.hand_over(),
            _ => Ok(true),
        }
    }

    /// Before a leader is removed it has another voter lead; true if there is none.
    fn hand_over(&mut self) -> Result<bool, Error> {
        let raft = &self.raw.raft;
        let voters = raft.prs().conf().to_conf_state().voters;
        let best = voters
            .iter()
            .filter(|voter| **voter != self.me.get())
            .filter_map(|voter| Some((raft.prs().get(*voter)?, *voter)))
            .max_by_key(|(progress, _)| (progress.recent_active, progress.matched));
        let Some((_, to)) = best else {
            return Ok(true);
        };
        if raft.lead_transferee.is_none() {
            self.guard(|raw| raw.transfer_leader(to))?;
        }
        Ok(false)
    }

    /// Makes the algorithm's configuration the state's, by one change at most.
    pub(super) fn reconfigure(&mut self, state: &State, may_change: bool) -> Result<(), Error> {
        let (voters, learners) = state.configuration();
        let current = self.raw.raft.prs().conf().to_conf_state();
        let has = |list: &[u64], id: &u64| list.contains(id);
        let mut changes = Vec::new();
        for id in &voters {
            if !has(&current.voters, id) {
                changes.push((*id, ConfChangeType::AddNode));
            }
        }
        for id in &learners {
            if !has(&current.learners, id) {
                changes.push((*id, ConfChangeType::AddLearnerNode));
            }
        }
        for id in current.voters.iter().chain(&current.learners) {
            if !has(&voters, id) && !has(&learners, id) {
                changes.push((*id, ConfChangeType::RemoveNode));
            }
        }
        let [(id, kind)] = changes.as_slice() else {
            if changes.is_empty() {
                return Ok(());
            }
            return Err(self.fail("the configuration differs from the group's state".into()));
        };
        if !may_change {
            return Err(self.fail("an ordinary entry changed the configuration".into()));
        }
        let mut single = ConfChangeSingle {
            node_id: *id,
            ..ConfChangeSingle::default()
        };
        single.set_change_type(*kind);
        let mut change = ConfChangeV2::default();
        change.set_changes(vec![single].into());
        match self.guard(|raw| raw.apply_conf_change(&change).is_ok())? {
            true => {
                self.snapshot_due = true;
                Ok(())
            }
            false => Err(self.fail("the configuration cannot be changed like the state".into())),
        }
    }
}
