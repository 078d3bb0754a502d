//! The applier's record of transactions that it commits before earlier ones
//! (`braid_bgworker::applied`). Used if commits may overtake each other.

use braid_bgworker::applied::{Applied, Committing, Note};
use braid_node::applied::AppliedRow;
use braid_postgres::error::PgError;
use braid_ring::Ring;

/// The applier's notes.
pub(super) struct Ahead {
    applied: Applied,
    row: AppliedRow,
}

impl Ahead {
    /// As they were left by earlier processes.
    pub(super) fn new(applied: Applied, row: AppliedRow) -> Self {
        Self { applied, row }
    }

    /// Whether there is no room to note one that starts with `first`.
    pub(super) fn is_full(&self, first: u64, position: u64, ring: Ring) -> bool {
        self.applied
            .is_full(first, position, |sequence| ring.is_done(sequence))
    }

    /// Records the transactions that are about to be committed, in their own transaction. Returns
    /// the position for its origin, and the record that counts once it has committed.
    pub(super) fn note(&mut self, committing: Committing, ring: Ring) -> Result<Note, PgError> {
        let note = self
            .applied
            .note(committing, ring.mark(), |sequence| ring.is_done(sequence));
        if note.is_needed {
            // Also if the transaction itself has written nothing: later ones may be committed
            // already.
            self.row.write(&note.applied)?;
        }
        Ok(note)
    }

    /// Records that the transaction described by `applied` is committed.
    pub(super) fn committed(&mut self, applied: Applied) {
        self.applied = applied;
    }
}
