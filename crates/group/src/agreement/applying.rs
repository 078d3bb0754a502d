//! Entries that are agreed: their effect on the state, leases and proposals.

use raft::eraftpb::{Entry, EntryType};

use super::Agreement;
use crate::command::Proposal;
use crate::error::{Error, Stopped};
use crate::message;
use crate::outcome::Outcome;

/// An entry that has taken effect, or was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// The entry's index.
    pub index: u64,
    /// The entry's term.
    pub term: u64,
    /// The entry.
    pub proposal: Proposal,
    /// Its value, or why it was refused.
    pub outcome: Outcome,
}

impl Agreement {
    pub(super) fn apply(&mut self, entry: &Entry) -> Result<Option<Applied>, Error> {
        let (index, term) = (entry.index, entry.term);
        let Some(mut state) = self.state.take() else {
            return Err(self.fail("an entry came before the group's state".into()));
        };
        let content = message::content(entry);
        if content.is_empty() {
            state.pass(index, term);
            self.state = Some(state);
            return Ok(None);
        }
        let proposal = match Proposal::decode(content) {
            Ok(proposal) => proposal,
            Err(source) => {
                self.state = Some(state);
                self.stopped = Some(Stopped::Failed(source.to_string()));
                return Err(Error::UnknownEntry { index, source });
            }
        };
        #[cfg(test)]
        if let Some(mutation) = self.mutation {
            state.break_rule(mutation, &proposal);
        }
        let repeated = state.answer(proposal.id).is_some();
        let outcome = state.apply(index, term, &proposal);
        let reconfigures = entry.get_entry_type() == EntryType::EntryConfChange;
        let result = self.reconfigure(&state, reconfigures);
        let took_effect = outcome.is_ok() && !repeated;
        self.leases.applied(
            self.me,
            proposal.id,
            &proposal.command,
            took_effect,
            &state,
            self.now,
        );
        self.state = Some(state);
        result?;
        self.proposals.applied(proposal.id, &outcome);
        self.check_removed();
        Ok(Some(Applied {
            index,
            term,
            proposal,
            outcome,
        }))
    }
}
