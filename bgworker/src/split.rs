//! One transaction of the source in several commits here (`split_transactions_above`). Run by the
//! applier that has it in hand.
//!
//! Each piece but the last is committed at the position where the source's commit record starts, so
//! whoever goes on from there is sent all of the transaction again. What of it is in committed
//! pieces is written down in the same commits as a number of changes, and passed over by that
//! number (I1). All changes count that are sent, also those that are then left out here: which are
//! may have changed meanwhile.
//!
//! The number alone would pass over something else if the transaction came with other changes than
//! before: with other publications, or other filters. So a digest of what they hold goes with it,
//! and must be the same again.

/// How much of a transaction there is in pieces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Changes from its start.
    pub changes: u64,
    /// What they hold.
    pub digest: u64,
}

impl Progress {
    /// With one more change, whose content has this hash. It must stay as it is: what was written
    /// down may be read by a later version.
    fn add(&mut self, content: u64) {
        self.changes += 1;
        self.digest = (self.digest ^ content)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
            .wrapping_add(self.changes);
    }
}

/// The transaction came otherwise than when its first pieces were committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the first {committed} changes of a transaction, which are committed here, came otherwise than before"
)]
pub struct Differs {
    /// Changes in committed pieces.
    pub committed: u64,
}

/// A transaction that is taken apart, from its first change on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Changes in a piece at most.
    most: u64,
    committed: Progress,
    seen: Progress,
}

impl Split {
    /// Of `committed` nothing is applied again; after that come pieces of at most `most` changes;
    /// 0: the rest in one.
    #[must_use]
    pub fn new(most: u64, committed: Progress) -> Self {
        Self {
            most: if most == 0 { u64::MAX } else { most },
            committed,
            seen: Progress::default(),
        }
    }

    /// Whether what was applied since the last piece is to be committed before another change is
    /// taken.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.seen.changes.saturating_sub(self.committed.changes) >= self.most
    }

    /// The next change, whose content has this hash. True when it is to be applied, false when it
    /// is here already.
    ///
    /// # Errors
    /// [`Differs`].
    pub fn take(&mut self, content: u64) -> Result<bool, Differs> {
        self.seen.add(content);
        if self.seen.changes == self.committed.changes && self.seen != self.committed {
            return Err(self.differs());
        }
        Ok(self.seen.changes > self.committed.changes)
    }

    /// What is applied now, if it is committed.
    #[must_use]
    pub fn seen(&self) -> Progress {
        self.seen
    }

    /// What is committed in pieces.
    #[must_use]
    pub fn committed(&self) -> Progress {
        self.committed
    }

    /// A piece was committed, with [`Split::seen`] written down.
    pub fn commit(&mut self) {
        self.committed = self.seen;
    }

    /// The transaction is complete. Its last piece may be committed.
    ///
    /// # Errors
    /// [`Differs`] when it has fewer changes than are committed.
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
