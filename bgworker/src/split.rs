//! One transaction of the source in several local commits (`split_transactions_above`). Run by the
//! applier that applies it.
//!
//! Each chunk but the last is committed at the position where the source's commit record starts. So
//! a restart from there is sent the whole transaction again. Each chunk's commit also records how
//! many changes are committed, and the restart skips that number (I1). All sent changes count, even
//! those that this node then leaves out: the set of these may have changed in the meantime.
//!
//! The number alone is not safe: the transaction could arrive with other changes than before, after
//! a change of publications or filters. So a digest of the changes' contents is recorded with it,
//! and must be equal again.

/// Number and digest of the changes from the start of a transaction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of changes.
    pub changes: u64,
    /// Digest of their contents.
    pub digest: u64,
}

impl Progress {
    /// Adds a change whose content has this hash. The function must not be changed: a later version
    /// reads recorded digests.
    fn add(&mut self, content: u64) {
        self.changes += 1;
        self.digest = (self.digest ^ content)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
            .wrapping_add(self.changes);
    }
}

/// Error: the transaction differs from the one whose first chunks were committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the first {committed} changes of a transaction, which are committed here, came otherwise than before"
)]
pub struct Differs {
    /// Changes in committed chunks.
    pub committed: u64,
}

/// A transaction that is applied in chunks, from its first change on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Most changes in a chunk.
    most: u64,
    committed: Progress,
    seen: Progress,
}

impl Split {
    /// Starts a transaction of which `committed` is not applied again. After that follow chunks of
    /// at most `most` changes; 0: the rest in one.
    #[must_use]
    pub fn new(most: u64, committed: Progress) -> Self {
        Self {
            most: if most == 0 { u64::MAX } else { most },
            committed,
            seen: Progress::default(),
        }
    }

    /// Returns whether the current chunk must be committed before another change is taken.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.seen.changes.saturating_sub(self.committed.changes) >= self.most
    }

    /// Takes the next change, whose content has this hash. Returns true if it is to be applied,
    /// false if it is already committed.
    ///
    /// # Errors
    /// [`Differs`] if the committed changes arrive with another content.
    pub fn take(&mut self, content: u64) -> Result<bool, Differs> {
        self.seen.add(content);
        if self.seen.changes == self.committed.changes && self.seen != self.committed {
            return Err(self.differs());
        }
        Ok(self.seen.changes > self.committed.changes)
    }

    /// Returns the progress after a commit of everything taken so far.
    #[must_use]
    pub fn seen(&self) -> Progress {
        self.seen
    }

    /// Returns the progress in committed chunks.
    #[must_use]
    pub fn committed(&self) -> Progress {
        self.committed
    }

    /// Records that a chunk was committed, together with [`Split::seen`].
    pub fn commit(&mut self) {
        self.committed = self.seen;
    }

    /// Ends the transaction, whose last chunk may then be committed.
    ///
    /// # Errors
    /// [`Differs`] if it has fewer changes than are committed.
    pub fn finish(&self) -> Result<(), Differs> {
        if self.seen.changes < self.committed.changes {
            return Err(self.differs());
        }
        Ok(())
    }

    fn differs(&self) -> Differs {
        Differs {
            committed: self.committed.changes,
        }
    }
}
