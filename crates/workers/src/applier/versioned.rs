//! Versioned transactions of other nodes, as appliers apply them.
//!
//! 1. The transaction begins with its record of versions. Before a local transaction is opened for
//!    it, the applier waits until all versions that it had seen are visible on this node
//!    (`braid_node::versions::follow`).
//! 2. It writes the same record: this node needs it after a crash.
//! 3. Before its commit it waits until it may become visible; the callbacks of the transaction do
//!    so, as for a session.
//!    so, as for a session.
//!
//! A circle of waits is impossible. While the applier waits in 1 it holds nothing, and its stream
//! has nothing open: a versioned transaction follows all before it, and all after it follow it. The
//! transactions for which it waits were visible at its own node before it began there. So the
//! stream that brings them has nothing before them that waits for this stream's later transactions.

use braid_bgworker::sqlstate::SqlState;
use braid_node::versions::{self, note};
use braid_postgres::error::PgError;
use braid_versions::{Bytes, Note};

use super::Applier;
use super::post::Trouble;
use super::records::out_of_order;

impl Applier {
    /// Waits until all versions are visible that the transaction had seen, if it is a versioned
    /// one. Right before a transaction is opened.
    pub(super) fn follow_versions(&mut self) -> Result<(), PgError> {
        let Some(shipped) = &self.in_hand.attempt.versions else {
            return Ok(());
        };
        let Note::Versions(record) = read(shipped)? else {
            return Ok(());
        };
        if self.in_hand.attempt.pieces.is_some() || self.in_hand.attempt.is_rest {
            return Err(PgError::new(
                SqlState::FeatureNotSupported,
                "a versioned transaction cannot be applied in chunks",
            )
            .with_hint("Set split_transactions_above => 0 with braid.alter_subscription."));
        }
        let post = self.post;
        post.show(braid_ring::ApplierState::WaitingForDependency);
        let followed = versions::follow(shipped, &record, || !post.ring.stop_requested());
        post.show(braid_ring::ApplierState::Applying);
        followed
    }

    /// The note itself comes.
    pub(super) fn take_versions(&mut self, content: &[u8]) -> Result<(), Trouble> {
        // It is the first record, or nobody has waited for it.
        if self.in_hand.attempt.versions.take().as_deref() != Some(content) {
            return Err(out_of_order().into());
        }
        note::write(content)?;
        versions::find_tables();
        Ok(())
    }
}

fn read(shipped: &[u8]) -> Result<Note, PgError> {
    Note::decode(shipped)
        .map_err(|error| PgError::new(SqlState::ProtocolViolation, error.to_string()))
}
