//! The applier's current transaction, or batch. A value is made when it is claimed, and replaced as
//! a whole by the next one. The part that lives for one attempt is replaced in the same way.

use braid_ring::Transaction;

use super::piece::Pieces;
use super::prepared::Step;

/// The current transaction, over all attempts at it.
#[derive(Default)]
pub(super) struct InHand {
    /// An attempt has ended in a unique violation, or there can be one only: each row is looked up
    /// by all of its unique keys.
    pub(super) check_other_keys: bool,
    /// Each of its changes is checked against parked transactions.
    pub(super) guarding: bool,
    /// The parked transaction that it has turned out to have to follow; 0: none.
    pub(super) held_by: i64,
    /// The views show why it is tried again.
    pub(super) is_held_up: bool,
    pub(super) attempt: Attempt,
}

/// One attempt.
#[derive(Default)]
pub(super) struct Attempt {
    /// Rows may be inserted in bulk, and changes joined.
    pub(super) bulk: bool,
    /// The chunks in which it is committed, if that is allowed.
    pub(super) pieces: Option<Pieces>,
    /// The step at its end, if it is prepared, or was.
    pub(super) step: Option<Step>,
    /// The transaction is the rest of one whose first chunks are committed.
    pub(super) is_rest: bool,
    /// The note of versions that it begins with.
    pub(super) versions: Option<Vec<u8>>,
}

impl InHand {
    /// Of a transaction that was taken from the ring.
    pub(super) fn of(transaction: &Transaction) -> Self {
        Self {
            check_other_keys: transaction.is_careful(),
            ..Self::default()
        }
    }

    /// The state of a transaction that has one attempt in this way, and is applied in another way
    /// if that fails.
    pub(super) fn once() -> Self {
        Self {
            attempt: Attempt::new(true),
            ..Self::default()
        }
    }
}

impl Attempt {
    pub(super) fn new(bulk: bool) -> Self {
        Self {
            bulk,
            ..Self::default()
        }
    }
}
