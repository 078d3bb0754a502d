//! Proposals of this member, and what a leader appends to the log.

use raft::eraftpb::{Message, MessageType};

use super::Agreement;
use crate::command::{Command, Proposal, ProposalId};
use crate::envelope::Body;
use crate::error::Error;
use crate::lease::Monotonic;
use crate::message;
use crate::outcome::Refusal;

impl Agreement {
    /// Proposes an entry. Its answer comes with
    /// [`Effects::answered`](crate::Effects::answered), after any time, or never if no majority
    /// comes together; the proposal is offered again until then, and takes effect at most once.
    ///
    /// # Errors
    /// [`Error::Refused`] if a member's Braid does not know the kind; [`Error::TooManyProposals`];
    /// [`Error::Malformed`] for values out of their limits; [`Error::Stopped`].
    pub fn propose(&mut self, mut command: Command, now: Monotonic) -> Result<ProposalId, Error> {
        if let Some(stopped) = &self.stopped {
            return Err(Error::Stopped(stopped.clone()));
        }
        self.now = self.now.max(now);
        if self.proposals.is_full() {
            return Err(Error::TooManyProposals);
        }
        let needs = command.since();
        if let Some(member) = self
            .state
            .as_ref()
            .and_then(|state| state.lacking(needs).next())
        {
            return Err(Error::Refused(Refusal::KindTooNew {
                needs,
                lacking: member.about.name.clone(),
            }));
        }
        if let Command::RenewLease {
            name,
            token,
            acting,
        } = &mut command
        {
            *acting = self
                .leases
                .granted(name, self.now)
                .is_some_and(|held| held == (*token, true));
        }
        let proposal = self.proposals.next(command);
        let bytes = proposal.encode()?;
        let id = proposal.id;
        self.leases.asks(id, &proposal.command, self.now);
        self.proposals.add(proposal, bytes);
        if self.outstanding.is_none() && self.confirming.is_none() {
            self.offer_one(id)?;
        }
        Ok(id)
    }

    /// Does not wait for an answer any more. The proposal may take effect nevertheless.
    pub fn withdraw(&mut self, id: ProposalId) {
        self.proposals.withdraw(id);
        self.leases.forget(id);
    }

    pub(crate) fn offer_all(&mut self) -> Result<(), Error> {
        for id in self.proposals.unanswered() {
            self.offer_one(id)?;
        }
        Ok(())
    }

    /// Appends an own proposal where this member leads, else sends it to the leader.
    pub(super) fn offer_one(&mut self, id: ProposalId) -> Result<(), Error> {
        let Some(pending) = self.proposals.pending.get(&id) else {
            return Ok(());
        };
        let bytes = pending.bytes.clone();
        match self.leader() {
            Some(leader) if leader != self.me => self.outbox.push((leader, Body::Propose(bytes))),
            Some(_) => {
                let proposal = pending.proposal.clone();
                self.offer(&proposal, bytes)?;
            }
            None => {}
        }
        Ok(())
    }

    /// Appends a proposal to the log, if this member leads and it can be appended now. Its proposer
    /// repeats it otherwise.
    pub(super) fn offer(&mut self, proposal: &Proposal, bytes: Vec<u8>) -> Result<(), Error> {
        let Some(state) = self.state.as_ref().filter(|_| self.leads()) else {
            return Ok(());
        };
        let offered = self.proposals.is_offered(proposal.id, self.raw.raft.term);
        if offered || state.answer(proposal.id).is_some() {
            return Ok(());
        }
        let reconfigures = proposal.command.reconfigures();
        if reconfigures && !self.can_reconfigure(&proposal.command)? {
            return Ok(());
        }
        let id = proposal.id;
        let mut message = Message::default();
        message.set_msg_type(MessageType::MsgPropose);
        message.from = self.me.get();
        message.set_entries(vec![message::entry(bytes, reconfigures)].into());
        if self.guard(|raw| raw.step(message).is_ok())? {
            self.proposals.offered.insert(id);
        }
        Ok(())
    }

    /// After a snapshot the entries with the answers are not seen.
    pub(super) fn answer_from_state(&mut self) {
        let Some(state) = &self.state else { return };
        for id in self.proposals.unanswered() {
            if let Some(outcome) = state.answer(id) {
                self.proposals.answer(id, outcome);
                self.leases.forget(id);
            }
        }
    }
}
