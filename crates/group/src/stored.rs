//! A member's storage, and the work that writes it: opaque bytes with an index and a term.
//!
//! | what | rows | changes |
//! |---|---|---|
//! | core | one | replaced: start, term, vote, commit, and why the member stopped |
//! | snapshot | one | replaced |
//! | entry | one for each index | deleted from an index on, then appended; deleted up to a snapshot |
//! | known | one for each other member | replaced |
//!
//! One [`Work`] is written in one transaction. [`Stored::write`] is the same in memory, for tests
//! and as the definition.

use raft::eraftpb::HardState;

use crate::agreement::snapshot_of;
use crate::boot::{Boot, Distrust};
use crate::error::Error;
use crate::member::{GroupId, MemberId, NewMember};
use crate::message;
use crate::mirror::Mirror;
use crate::state::State;
use braid_codec::{Malformed, Reader, Writer};

/// An entry or a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// Its index in the log.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// All that a member has stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The group.
    pub group: GroupId,
    /// The member.
    pub me: MemberId,
    /// Start, term, vote and commit; none before the first start.
    pub core: Option<Vec<u8>>,
    /// The newest snapshot; none until the log has come.
    pub snapshot: Option<Record>,
    /// The entries after the snapshot, by index.
    pub entries: Vec<Record>,
    /// Memory of each other member.
    pub known: Vec<(MemberId, Vec<u8>)>,
}

/// Writes to be done in one transaction, in the order of the fields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Work {
    /// The number for [`crate::Agreement::persisted`].
    pub number: u64,
    /// Whether it must be on disk before `persisted`. Otherwise it may be lost in a crash.
    pub flush: bool,
    /// Replaces the core.
    pub core: Option<Vec<u8>>,
    /// Replaces the snapshot.
    pub snapshot: Option<Record>,
    /// Entries up to this index are deleted.
    pub delete_through: Option<u64>,
    /// Entries from this index on are deleted.
    pub delete_from: Option<u64>,
    /// Entries to be appended.
    pub entries: Vec<Record>,
    /// Replaces what is known of these members.
    pub known: Vec<(MemberId, Vec<u8>)>,
}

impl Work {
    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.core.is_none()
            && self.snapshot.is_none()
            && self.delete_through.is_none()
            && self.delete_from.is_none()
            && self.entries.is_empty()
            && self.known.is_empty()
    }
}

impl Stored {
    /// Returns the storage of the first member of a new group before its first start.
    ///
    /// # Errors
    /// If a name is empty or too long.
    pub fn create(id: GroupId, name: &str, first: NewMember) -> Result<Self, Malformed> {
        let state = State::create(id, name, first)?;
        let mut hard = HardState::default();
        (hard.term, hard.commit) = (state.term(), state.index());
        let core = Core {
            hard,
            ..Core::default()
        };
        Ok(Self {
            group: id,
            me: MemberId::FIRST,
            core: Some(core.encode()),
            snapshot: Some(Record {
                index: state.index(),
                term: state.term(),
                bytes: state.encode(),
            }),
            entries: Vec::new(),
            known: Vec::new(),
        })
    }

    /// Returns the storage of a new member before its first start, with the number that the group
    /// gave it.
    #[must_use]
    pub const fn join(group: GroupId, me: MemberId) -> Self {
        Self {
            group,
            me,
            core: None,
            snapshot: None,
            entries: Vec::new(),
            known: Vec::new(),
        }
    }

    /// Carries out work in memory.
    pub fn write(&mut self, work: &Work) {
        if let Some(core) = &work.core {
            self.core = Some(core.clone());
        }
        if let Some(snapshot) = &work.snapshot {
            self.snapshot = Some(snapshot.clone());
        }
        if let Some(through) = work.delete_through {
            self.entries.retain(|entry| entry.index > through);
        }
        if let Some(from) = work.delete_from {
            self.entries.retain(|entry| entry.index < from);
        }
        self.entries.extend(work.entries.iter().cloned());
        for (member, bytes) in &work.known {
            self.known.retain(|known| known.0 != *member);
            self.known.push((*member, bytes.clone()));
        }
    }

    /// The state at the snapshot, and the log.
    pub(crate) fn open(&self, core: &Core) -> Result<(Option<State>, Mirror), Error> {
        let mut hard = core.hard.clone();
        let state = self
            .snapshot
            .as_ref()
            .map(|record| State::decode(&record.bytes))
            .transpose()?;
        if let (Some(state), Some(record)) = (&state, &self.snapshot)
            && ((state.index(), state.term()) != (record.index, record.term)
                || state.id() != self.group)
        {
            return Err(Error::Damaged("the snapshot is another one's"));
        }
        let snapshot = state.as_ref().map(snapshot_of).unwrap_or_default();
        let (mut last, mut term) = (snapshot.get_metadata().index, snapshot.get_metadata().term);
        let mut entries = Vec::new();
        for record in self
            .entries
            .iter()
            .filter(|record| record.index > snapshot.get_metadata().index)
        {
            let entry = message::decode_entry(&record.bytes)?;
            if (entry.index, entry.term) != (record.index, record.term)
                || entry.index != last + 1
                || entry.term < term
            {
                return Err(Error::Damaged("an entry is missing"));
            }
            (last, term) = (entry.index, entry.term);
            entries.push(entry);
        }
        hard.commit = hard.commit.max(snapshot.get_metadata().index);
        if hard.commit > last || hard.term < term {
            return Err(Error::Damaged("the end of the log is missing"));
        }
        Ok((state, Mirror::new(hard, snapshot, entries)))
    }
}

/// The one row of a member's own: its start and the algorithm's hard state.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Core {
    pub(crate) boot: Boot,
    pub(crate) hard: HardState,
    pub(crate) refused: Option<Distrust>,
}

impl Core {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(1);
        self.boot.write(&mut w);
        w.u64(self.hard.term)
            .u64(self.hard.vote)
            .u64(self.hard.commit);
        w.bool(self.refused.is_some());
        if let Some(why) = self.refused {
            why.write(&mut w);
        }
        w.done()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(bytes, "state of this member", 1)?;
        let boot = Boot::read(&mut r)?;
        let mut hard = HardState::default();
        (hard.term, hard.vote, hard.commit) = (r.u64()?, r.u64()?, r.u64()?);
        let refused = if r.bool()? {
            Some(Distrust::read(&mut r)?)
        } else {
            None
        };
        r.end()?;
        if boot.counter >= message::NUMBER_LIMIT || hard.term >= message::NUMBER_LIMIT {
            return Err(Malformed::Invalid("state of this member"));
        }
        Ok(Self {
            boot,
            hard,
            refused,
        })
    }
}
