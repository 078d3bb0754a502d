//! A transaction that is committed in chunks (`split_transactions_above`). `braid_bgworker::split`
//! says where a chunk ends and which changes are skipped after a restart.
//!
//! When its first change is applied, all earlier transactions are committed. No later transaction
//! is applied before it has ended: it is a barrier for everything. So its chunks commit in the
//! source's order. They carry the position where its commit record starts. This position is true:
//! every transaction that ends before it is committed, and the provider sends the split transaction
//! again to a leader that starts there.

use std::sync::atomic::Ordering;

use braid_apply::content_of_statement;
use braid_bgworker::split::{Differs, Split};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Begin, Change, Truncate, lsn_text};
use braid_node::split;
use braid_postgres::error::{self, PgError};
use braid_postgres::transaction;

use super::Applier;
use super::post::Trouble;

/// The current transaction, in chunks.
pub(super) struct Pieces {
    sequence: u64,
    commit_lsn: u64,
    split: Split,
}

impl Pieces {
    /// Changes that are committed.
    fn committed(&self) -> u64 {
        self.split.committed().changes
    }

    /// Whether the next change belongs to another one.
    pub(super) fn is_full(&self) -> bool {
        self.split.is_full()
    }

    /// Adds to an error that a part of the transaction is committed.
    pub(super) fn explain(&self, error: &mut PgError) {
        if self.committed() > 0 {
            let part = format!(
                "The first {} changes of the transaction are committed here.",
                self.committed()
            );
            error.detail = Some(match error.detail.take() {
                Some(detail) => format!("{detail} {part}"),
                None => part,
            });
        }
    }
}

/// A change, or a record that counts as one.
pub(super) enum Part<'a> {
    Change(&'a Change<'a>),
    Truncate(&'a Truncate<'a>),
    Statement(&'a [u8]),
}

pub(super) fn differs(error: Differs) -> PgError {
    PgError::new(SqlState::ObjectNotInPrerequisiteState, error.to_string())
        .with_detail("The provider's publications, their tables, columns or filters, were changed meanwhile.")
        .with_hint(
            "Undo the change at the provider and run braid.enable_subscription, or leave the rest of this transaction out with \
             braid.skip_transaction and copy its tables with braid.resync_table.",
        )
}

impl Applier {
    /// Reads how much of the transaction that begins is committed already. Outside of a
    /// transaction.
    pub(super) fn resume(&mut self, sequence: u64, begin: &Begin<'_>) -> Result<(), PgError> {
        let id = self.subscription.id;
        let committed = error::transaction(|| split::read(id, begin.commit_lsn))?;
        let here = (begin.commit_lsn, committed.changes);
        if committed.changes > 0 && self.gone_on != here {
            self.gone_on = here;
            pgrx::log!(
                "subscription \"{}\" goes on with the transaction that commits at {} after {} changes",
                self.subscription.name,
                lsn_text(begin.commit_lsn),
                committed.changes
            );
        }
        self.in_hand.attempt.pieces = Some(Pieces {
            sequence,
            commit_lsn: begin.commit_lsn,
            split: Split::new(
                u64::from(self.subscription.options.split_transactions_above),
                committed,
            ),
        });
        Ok(())
    }

    /// Whether a change of the current transaction is to be applied; false if it is committed
    /// already. Commits the current chunk first if it is full.
    pub(super) fn take(&mut self, part: &Part<'_>) -> Result<bool, Trouble> {
        if self
            .in_hand
            .attempt
            .pieces
            .as_ref()
            .is_some_and(Pieces::is_full)
        {
            self.commit_piece()?;
        }
        let (Some(pieces), Some(session)) =
            (self.in_hand.attempt.pieces.as_mut(), self.session.as_ref())
        else {
            return Ok(true);
        };
        let content = match part {
            Part::Change(change) => session.content(change)?,
            Part::Truncate(truncate) => session.content_of_truncate(truncate)?,
            Part::Statement(content) => content_of_statement(content),
        };
        Ok(pieces.split.take(content).map_err(differs)?)
    }

    fn commit_piece(&mut self) -> Result<(), Trouble> {
        let entry = self.entry;
        let (Some(pieces), Some(session)) =
            (self.in_hand.attempt.pieces.as_mut(), self.session.as_mut())
        else {
            return Ok(());
        };
        pgrx::check_for_interrupts!();
        if self.post.ring.stop_requested() {
            return Err(PgError::new(SqlState::AdminShutdown, "subscription is stopping").into());
        }
        if self.post.ring.committed() + 1 < pieces.sequence {
            return Err(PgError::new(
                SqlState::InternalError,
                "a chunk of a transaction is not due yet",
            )
            .into());
        }
        session.finish()?;
        let counts = session.counts();
        if !split::write(&self.subscription, pieces.commit_lsn, pieces.split.seen())? {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "the subscription was changed while a transaction was committed in chunks",
            )
            .into());
        }
        session.commit_piece(pieces.commit_lsn, entry)?;
        pieces.split.commit();
        entry.schedule.pieces.fetch_add(1, Ordering::Relaxed);
        self.post
            .own
            .changes
            .fetch_add(counts.changes(), Ordering::Relaxed);
        // Autovacuum uses these counters, and has work to do between the chunks.
        // SAFETY: outside of a transaction.
        transaction::report_statistics(false);
        session.go_on(self.entry.tables_version.load(Ordering::Acquire));
        Ok(())
    }

    /// All of the current transaction is applied; its commit comes next.
    pub(super) fn finish_pieces(&self) -> Result<(), PgError> {
        let Some(pieces) = &self.in_hand.attempt.pieces else {
            return Ok(());
        };
        pieces.split.finish().map_err(differs)?;
        if pieces.committed() > 0 {
            split::finish(self.subscription.id)?;
        }
        Ok(())
    }
}
