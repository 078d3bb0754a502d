//! The durable log in memory, as the algorithm reads it.
//!
//! It holds what is stored or will be before anything that depends on it leaves the member: the
//! newest snapshot, the entries after it (and some before it, so that a member a little behind need
//! not get the whole snapshot), term, vote and commit. Not for: writing any of it; the server side
//! does that with what [`crate::Work`] says.

use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use raft::{Error, GetEntriesContext, RaftState, Result, Storage, StorageError};

/// How many entries before the snapshot stay in memory.
const TRAIL: u64 = 200;

/// The mirror.
#[derive(Debug, Default)]
pub(crate) struct Mirror {
    pub(crate) hard: HardState,
    /// Empty (index 0) in a member that has not got the log yet.
    pub(crate) snapshot: Snapshot,
    /// The entry before the first one in `entries`: its index and term.
    before: (u64, u64),
    entries: Vec<Entry>,
}

impl Mirror {
    pub(crate) fn new(hard: HardState, snapshot: Snapshot, entries: Vec<Entry>) -> Self {
        let before = (snapshot.get_metadata().index, snapshot.get_metadata().term);
        Self {
            hard,
            snapshot,
            before,
            entries,
        }
    }

    pub(crate) fn last(&self) -> u64 {
        self.entries
            .last()
            .map_or(self.before.0, |entry| entry.index)
    }

    fn at(&self, index: u64) -> Option<usize> {
        usize::try_from(index.checked_sub(self.before.0 + 1)?).ok()
    }

    /// Appends entries, in place of those from their first index on.
    pub(crate) fn append(&mut self, entries: &[Entry]) {
        if let Some(first) = entries.first() {
            if let Some(at) = self.at(first.index) {
                self.entries.truncate(at);
            }
            self.entries.extend_from_slice(entries);
        }
    }

    /// Replaces everything by a snapshot that was received.
    pub(crate) fn replace(&mut self, snapshot: Snapshot) {
        self.before = (snapshot.get_metadata().index, snapshot.get_metadata().term);
        self.entries.clear();
        self.snapshot = snapshot;
    }

    /// Takes a snapshot of the member's own, and forgets entries far before it.
    pub(crate) fn compact(&mut self, snapshot: Snapshot) {
        let keep_after = snapshot.get_metadata().index.saturating_sub(TRAIL);
        self.snapshot = snapshot;
        if let Some(count) = self.at(keep_after + 1).filter(|count| *count > 0)
            && let Some(last) = self.entries.get(count - 1)
        {
            self.before = (last.index, last.term);
            self.entries.drain(..count);
        }
    }
}

impl Storage for Mirror {
    fn initial_state(&self) -> Result<RaftState> {
        let configuration: ConfState = self.snapshot.get_metadata().get_conf_state().clone();
        Ok(RaftState::new(self.hard.clone(), configuration))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> Result<Vec<Entry>> {
        let low = self.at(low).ok_or(Error::Store(StorageError::Compacted))?;
        let high = self.at(high).ok_or(Error::Store(StorageError::Compacted))?;
        let entries = self.entries.get(low..high);
        let mut entries = entries
            .ok_or(Error::Store(StorageError::Unavailable))?
            .to_vec();
        raft::util::limit_size(&mut entries, max_size.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> Result<u64> {
        if index == self.before.0 {
            return Ok(self.before.1);
        }
        let at = self
            .at(index)
            .ok_or(Error::Store(StorageError::Compacted))?;
        let entry = self.entries.get(at);
        Ok(entry.ok_or(Error::Store(StorageError::Unavailable))?.term)
    }

    fn first_index(&self) -> Result<u64> {
        Ok(self.before.0 + 1)
    }

    fn last_index(&self) -> Result<u64> {
        Ok(self.last())
    }

    fn snapshot(&self, request_index: u64, _to: u64) -> Result<Snapshot> {
        if self.snapshot.get_metadata().index < request_index {
            return Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable));
        }
        Ok(self.snapshot.clone())
    }
}
