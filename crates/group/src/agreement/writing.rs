//! Work to be written, and what may be said and shown once it is.

use raft::eraftpb::{Entry, Message, MessageType};
use raft::{Ready, SnapshotStatus};

use super::{Agreement, Applied, snapshot_of};
use crate::command::ProposalId;
use crate::envelope::{Body, Envelope};
use crate::error::{Error, Stopped};
use crate::member::MemberId;
use crate::message;
use crate::outcome::Outcome;
use crate::state::State;
use crate::stored::{Core, Record, Work};

/// Effects of work that is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effects {
    /// Messages to other members. Any may be lost, repeated or overtaken.
    pub send: Vec<(MemberId, Vec<u8>)>,
    /// Entries in the order of the log. After a restart those since the snapshot come again.
    pub applied: Vec<Applied>,
    /// Answers to this member's own proposals.
    pub answered: Vec<(ProposalId, Outcome)>,
    /// Whether the state was replaced by a snapshot, so that entries are missing in `applied`.
    pub replaced: bool,
}

#[derive(Debug)]
pub(super) struct Outstanding {
    number: u64,
    ready: Option<Ready>,
    messages: Vec<Message>,
    committed: Vec<Entry>,
    replaced: bool,
}

impl Agreement {
    /// Returns the work to be written before anything goes on; none if there is nothing to do.
    ///
    /// # Errors
    /// [`Error::Outstanding`] if the last work was not written yet; [`Error::Failed`].
    pub fn work(&mut self) -> Result<Option<Work>, Error> {
        if self.outstanding.is_some() {
            return Err(Error::Outstanding);
        }
        if let Some(Stopped::Failed(why)) = &self.stopped {
            return Err(Error::Failed(why.clone()));
        }
        // A member that takes no part has only to note that, and to say why.
        let takes_part = self.stopped.is_none();
        let ready = takes_part && self.raw.has_ready();
        let idle = !ready
            && !self.core_changed
            && self.known_changed.is_empty()
            && self.outbox.is_empty()
            && self.proposals.answered.is_empty()
            && !self.snapshot_due;
        if idle {
            return Ok(None);
        }
        self.work_number += 1;
        let mut work = Work {
            number: self.work_number,
            ..Work::default()
        };
        let mut outstanding = Outstanding {
            number: self.work_number,
            ready: None,
            messages: Vec::new(),
            committed: Vec::new(),
            replaced: false,
        };
        if ready {
            self.take_ready(&mut work, &mut outstanding)?;
        }
        if !outstanding.replaced {
            self.compact(&mut work);
        }
        if self.core_changed {
            self.core_changed = false;
            let core = Core {
                boot: self.boot,
                hard: self.hard.clone(),
                refused: match &self.stopped {
                    Some(Stopped::Refused(why)) => Some(*why),
                    _ => None,
                },
            };
            work.core = Some(core.encode());
        }
        for member in std::mem::take(&mut self.known_changed) {
            if let Some(known) = self.known.get(&member) {
                work.known.push((member, known.encode()));
            }
        }
        work.flush |= !work.known.is_empty() || self.work_number == 1 || self.stopped.is_some();
        self.outstanding = Some(outstanding);
        Ok(Some(work))
    }

    fn take_ready(&mut self, work: &mut Work, outstanding: &mut Outstanding) -> Result<(), Error> {
        let mut ready = self.guard(|raw| raw.ready())?;
        work.flush = ready.must_sync();
        if !ready.snapshot().is_empty() {
            let snapshot = ready.snapshot().clone();
            let state = State::decode(snapshot.get_data())?;
            let metadata = snapshot.get_metadata();
            work.snapshot = Some(Record {
                index: metadata.index,
                term: metadata.term,
                bytes: snapshot.get_data().to_vec(),
            });
            work.delete_from = Some(0);
            self.snapshot_due = false;
            self.raw.mut_store().replace(snapshot);
            self.leases.meet_all(self.me, &state, self.now);
            self.state = Some(state);
            outstanding.replaced = true;
        }
        if let Some(first) = ready.entries().first() {
            if work.delete_from.is_none() {
                work.delete_from = Some(first.index);
            }
            self.raw.mut_store().append(ready.entries());
            work.entries = ready
                .entries()
                .iter()
                .map(|entry| Record {
                    index: entry.index,
                    term: entry.term,
                    bytes: message::encode_entry(entry),
                })
                .collect();
        }
        if let Some(hard) = ready.hs() {
            self.hard = hard.clone();
            self.core_changed = true;
        }
        outstanding.messages = ready.take_messages();
        outstanding.messages.extend(ready.take_persisted_messages());
        outstanding.committed = ready.take_committed_entries();
        outstanding.ready = Some(ready);
        Ok(())
    }

    /// Takes a snapshot of the state once enough entries have been applied.
    fn compact(&mut self, work: &mut Work) {
        let Some(state) = &self.state else { return };
        let last = self.raw.store().snapshot.get_metadata().index;
        if state.index() < last + self.settings.snapshot_entries.max(1) && !self.snapshot_due {
            return;
        }
        self.snapshot_due = false;
        let snapshot = snapshot_of(state);
        let record = Record {
            index: state.index(),
            term: state.term(),
            bytes: snapshot.get_data().to_vec(),
        };
        // The stored commit may lie before the snapshot otherwise.
        self.core_changed = true;
        self.hard.commit = self.hard.commit.max(record.index);
        work.delete_through = Some(record.index);
        work.snapshot = Some(record);
        self.raw.mut_store().compact(snapshot);
    }

    /// Goes on once the work of this number is written (and flushed, where it says so).
    ///
    /// # Errors
    /// [`Error::Outstanding`] if it is not the last work's number; [`Error::Failed`] and
    /// [`Error::UnknownEntry`] if the agreement can't go on.
    pub fn persisted(&mut self, number: u64) -> Result<Effects, Error> {
        let outstanding = match self.outstanding.take() {
            Some(outstanding) if outstanding.number == number => outstanding,
            other => {
                self.outstanding = other;
                return Err(Error::Outstanding);
            }
        };
        let mut effects = Effects {
            replaced: outstanding.replaced,
            ..Effects::default()
        };
        let mut messages = outstanding.messages;
        let mut committed = outstanding.committed;
        if let Some(ready) = outstanding.ready {
            let mut light = self.guard(|raw| raw.advance_append(ready))?;
            if let Some(commit) = light.commit_index() {
                self.hard.commit = commit;
            }
            messages.extend(light.take_messages());
            committed.extend(light.take_committed_entries());
        }
        if outstanding.replaced {
            self.answer_from_state();
            self.check_removed();
        }
        for entry in &committed {
            if let Some(applied) = self.apply(entry)? {
                effects.applied.push(applied);
            }
        }
        // Also after a snapshot, without any entry: the library would look for those before it.
        let applied = self.state.as_ref().map_or(0, State::index);
        if outstanding.replaced || !committed.is_empty() {
            self.guard(|raw| raw.advance_apply_to(applied))?;
        }
        for message in messages {
            self.post(&message)?;
        }
        effects.send = self.take_outbox();
        effects.answered = std::mem::take(&mut self.proposals.answered);
        Ok(effects)
    }

    /// Puts one of the algorithm's messages into the outbox.
    fn post(&mut self, message: &Message) -> Result<(), Error> {
        if let (Some(to), Some(bytes)) = (MemberId::new(message.to), message::encode(message)) {
            self.outbox.push((to, Body::Raft(bytes)));
            // A snapshot that is lost on the way is found out by the entries after it being
            // refused.
            if message.get_msg_type() == MessageType::MsgSnapshot {
                self.guard(|raw| raw.report_snapshot(to.get(), SnapshotStatus::Finish))?;
            }
        }
        Ok(())
    }

    fn take_outbox(&mut self) -> Vec<(MemberId, Vec<u8>)> {
        let applied = self.state.as_ref().map_or(0, State::index);
        let outbox = std::mem::take(&mut self.outbox);
        let seal = |(to, body): (MemberId, Body)| {
            let envelope = Envelope {
                group: self.group,
                from: self.me,
                to,
                boot: self.boot,
                start: self.start,
                term: self.hard.term,
                applied,
                body,
            };
            (to, envelope.encode())
        };
        outbox.into_iter().map(seal).collect()
    }
}
