//! Messages from other members: who is believed, and what each body comes to.

use raft::eraftpb::{MessageType, Snapshot};

use super::{Agreement, Heard};
use crate::boot::{Distrust, Meeting};
use crate::command::Proposal;
use crate::envelope::{Body, Envelope};
use crate::error::{Error, Stopped};
use crate::lease::Monotonic;
use crate::member::MemberState;
use crate::message;
use crate::mutation::Mutation;
use crate::state::State;
use braid_codec::Malformed;

impl Agreement {
    /// Takes a message from another member.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::NotOurs`] and [`Error::Distrusted`] for messages that change
    /// nothing. Then the sender is at fault, and the agreement goes on. [`Error::is_final`] tells
    /// the others.
    pub fn receive(&mut self, bytes: &[u8], now: Monotonic) -> Result<(), Error> {
        self.ready_for_more()?;
        self.now = self.now.max(now);
        let envelope = Envelope::decode(bytes)?;
        if envelope.group != self.group || envelope.to != self.me || envelope.from == self.me {
            return Err(Error::NotOurs);
        }
        if envelope.term >= message::NUMBER_LIMIT || envelope.boot.counter >= message::NUMBER_LIMIT
        {
            return Err(Malformed::Invalid("message of the group").into());
        }
        self.judge(&envelope)?;
        let heard = Heard {
            at: self.now,
            applied: envelope.applied,
        };
        self.heard.insert(envelope.from, heard);
        let mut promised = None;
        let result = match &envelope.body {
            Body::Raft(bytes) => self.receive_raft(bytes, &envelope, &mut promised),
            Body::Propose(bytes) => self.receive_proposal(bytes, &envelope),
            Body::Ping { asks } => {
                if *asks {
                    let voters = self
                        .state
                        .as_ref()
                        .map_or(Vec::new(), |state| state.configuration().0);
                    let boot = envelope.boot;
                    self.outbox
                        .push((envelope.from, Body::Welcome { boot, voters }));
                }
                Ok(())
            }
            Body::Welcome { boot, voters } => {
                self.welcomed(*boot, envelope.from, envelope.applied, voters);
                Ok(())
            }
            Body::Refused { boot, why } => {
                if *boot == self.boot {
                    self.stop(Stopped::Refused(*why));
                }
                Ok(())
            }
        };
        if let Some(known) = self.known.get_mut(&envelope.from)
            && known.note(envelope.term, promised)
        {
            // Flushed before anything that follows from the promise is said or shown.
            self.known_changed.insert(envelope.from);
        }
        result
    }

    /// Compares the sender with what is known of it, and notes a new boot.
    fn judge(&mut self, envelope: &Envelope) -> Result<(), Error> {
        let from = envelope.from;
        if let Some(state) = &self.state {
            match state.member(from) {
                Some(member) if member.state == MemberState::Removed => {
                    return Err(self.distrust(envelope, Distrust::Removed));
                }
                None if !state.is_ahead(from) => return Err(Error::NotOurs),
                _ => {}
            }
        }
        let known = self.known.entry(from).or_default();
        let judged = known.judge(envelope.boot, envelope.start);
        match judged {
            Ok(Meeting::Again) => Ok(()),
            Ok(Meeting::New) => {
                known.boot = envelope.boot;
                self.known_changed.insert(from);
                Ok(())
            }
            Err(_) if self.is_broken(Mutation::BelieveAnyBoot) => Ok(()),
            Err(why) => Err(self.distrust(envelope, why)),
        }
    }

    fn distrust(&mut self, envelope: &Envelope, why: Distrust) -> Error {
        let boot = envelope.boot;
        // Two members that don't believe each other don't argue.
        if !matches!(envelope.body, Body::Refused { .. }) {
            self.outbox
                .push((envelope.from, Body::Refused { boot, why }));
        }
        Error::Distrusted {
            member: envelope.from,
            name: self.state.as_ref().map_or_else(
                || format!("member {}", envelope.from),
                |state| state.name_of(envelope.from),
            ),
            why,
        }
    }

    pub(super) fn receive_raft(
        &mut self,
        bytes: &[u8],
        envelope: &Envelope,
        promised: &mut Option<u64>,
    ) -> Result<(), Error> {
        let (from, term) = (envelope.from, envelope.term);
        let message = message::decode(bytes, from.get(), self.me.get())?;
        if self.confirming.is_some() {
            return Ok(());
        }
        let last = self.raw.raft.raft_log.last_index();
        message::check(&message, self.raw.raft.term, last)?;
        if message.get_msg_type() == MessageType::MsgHeartbeat && message.commit > last {
            // The leader says that only of entries that this member acknowledged: they are lost
            // here.
            let why = Distrust::LostEntries {
                known: message.commit,
                has: last,
            };
            self.stop(Stopped::Refused(why));
            return Err(Error::Stopped(Stopped::Refused(why)));
        }
        match message.get_msg_type() {
            MessageType::MsgSnapshot => self.check_snapshot(message.get_snapshot())?,
            MessageType::MsgTimeoutNow if self.leader() != Some(from) => return Ok(()),
            MessageType::MsgAppendResponse if !message.reject && message.term == term => {
                *promised = Some(message.index);
            }
            MessageType::MsgAppend if message.term == term => {
                *promised = Some(message.index + message.entries.len() as u64);
            }
            _ => {}
        }
        // The library's errors here are messages that it ignores.
        self.guard(|raw| raw.step(message).ok())?;
        Ok(())
    }

    fn check_snapshot(&self, snapshot: &Snapshot) -> Result<(), Error> {
        let metadata = snapshot.get_metadata();
        let state = State::decode(snapshot.get_data())?;
        let (voters, learners) = state.configuration();
        let said = metadata.get_conf_state();
        let fits = state.id() == self.group
            && (state.index(), state.term()) == (metadata.index, metadata.term)
            && (&voters, &learners) == (&said.voters, &said.learners)
            && !voters.is_empty();
        if fits {
            Ok(())
        } else {
            Err(Malformed::Invalid("snapshot of the group").into())
        }
    }

    fn receive_proposal(&mut self, bytes: &[u8], envelope: &Envelope) -> Result<(), Error> {
        let proposal = Proposal::decode(bytes)?;
        if (proposal.id.member, proposal.id.boot) != (envelope.from, envelope.boot.counter) {
            return Err(Malformed::Invalid("proposal").into());
        }
        if self.confirming.is_none() {
            self.offer(&proposal, bytes.to_vec())?;
        }
        Ok(())
    }
}
