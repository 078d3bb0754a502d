//! Prepared transactions: applied like others, and prepared on this node at their turn, under a
//! name of this subscription's. Later any applier commits them or rolls them back.
//!
//! All three steps carry the position of the provider's step, as a commit does, and so do their WAL
//! records. So a step that is durable on this node is never sent again (I1). The rows have the
//! version of COMMIT PREPARED: its time, and the node.

use std::ffi::{CStr, CString};
use std::time::Duration;

use braid_apply::is_in_the_way;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Prepared, Reader, Record, RollbackPrepared, Tag, lsn_text};
use braid_node::{clock, origin, prepared, subscription, tombstone};
use braid_postgres::error::{self, PgError};
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::wait::Wait;
use braid_postgres::{latch, two_phase};
use braid_ring::{ApplierState, FrameRead, Transaction};

use super::Applier;
use super::post::{Trouble, next_frame};

/// The kind of the current transaction, if it is not an ordinary one.
pub(super) enum Step {
    /// The transaction ends in PREPARE TRANSACTION.
    Prepare(ToPrepare),
    /// The transaction is prepared on this node already.
    IsPrepared,
    /// The end of a prepared transaction: COMMIT PREPARED.
    Commit(Finish),
    /// ROLLBACK PREPARED, with the end of the PREPARE at the provider and its time (Unix
    /// microseconds).
    Rollback(Finish, u64, i64),
}

/// The consequence of a failure of a transaction that was to be prepared.
pub(super) enum Settled {
    /// The failure has nothing to do with its PREPARE.
    No,
    /// The transaction is tried again at its turn.
    AtItsTurn,
    /// The transaction is not prepared, and arrives whole after its commit. Or the record of that
    /// failed.
    Left(PgError),
}

/// A transaction that is to be prepared.
pub(super) struct ToPrepare {
    gid: CString,
    /// The transaction's id at the provider.
    xid: u32,
    /// Where its PREPARE ends at the provider.
    end_lsn: u64,
    /// Unix microseconds.
    timestamp: i64,
}

pub(super) struct Finish {
    gid: CString,
    end_lsn: u64,
    timestamp: i64,
}

/// Whether a transaction is prepared on this node: its name, where its PREPARE ends at the
/// provider, and when that was (Unix microseconds).
fn is_here(gid: &CStr, end_lsn: u64, timestamp: i64) -> Result<bool, PgError> {
    two_phase::is_prepared(gid, end_lsn, timestamp.saturating_sub(EPOCH_DIFFERENCE))
}

impl Applier {
    fn gid(&self, xid: u32) -> CString {
        prepared::gid(self.subscription.id, xid)
    }

    /// Begins a transaction that is to be prepared. Outside of a transaction. Returns false if it
    /// is prepared already.
    pub(super) fn begin_prepared(&mut self, prepared: &Prepared<'_>) -> Result<bool, PgError> {
        let gid = self.gid(prepared.begin.xid);
        let there = is_here(&gid, prepared.end_lsn, prepared.begin.commit_timestamp)?;
        self.in_hand.attempt.step = Some(if there {
            Step::IsPrepared
        } else {
            Step::Prepare(ToPrepare {
                gid,
                xid: prepared.begin.xid,
                end_lsn: prepared.end_lsn,
                timestamp: prepared.begin.commit_timestamp,
            })
        });
        Ok(!there)
    }

    /// Take note of how a prepared transaction ends.
    pub(super) fn end_prepared(
        &mut self,
        prepared: &Prepared<'_>,
        rollback: Option<&RollbackPrepared<'_>>,
    ) -> Result<(), PgError> {
        self.origins.use_that_of(&prepared.begin)?;
        let finish = Finish {
            gid: self.gid(prepared.begin.xid),
            end_lsn: prepared.end_lsn,
            timestamp: prepared.begin.commit_timestamp,
        };
        self.in_hand.attempt.step = Some(match rollback {
            None => Step::Commit(finish),
            Some(rollback) => {
                Step::Rollback(finish, rollback.prepare_end_lsn, rollback.prepare_timestamp)
            }
        });
        Ok(())
    }

    /// All of the transaction `sequence` has come, and is applied if there was something to apply.
    /// Returns up to where local WAL is to be flushed.
    pub(super) fn take_step(
        &mut self,
        step: &Step,
        sequence: u64,
        end_lsn: u64,
    ) -> Result<u64, Trouble> {
        match step {
            Step::Prepare(to_prepare) => {
                self.post.wait_for_turn(sequence)?;
                if let Some(session) = self.session.as_mut() {
                    session.prepare_transaction(&to_prepare.gid, end_lsn)?;
                }
            }
            Step::IsPrepared => {}
            Step::Commit(finish) => {
                self.post.wait_for_turn(sequence)?;
                // Before it becomes visible.
                clock::seen(finish.timestamp.saturating_sub(EPOCH_DIFFERENCE));
                tombstone::prepared_commits(finish.timestamp);
                finish.run(true)?;
            }
            Step::Rollback(finish, prepare_end_lsn, prepare_timestamp) => {
                self.post.wait_for_turn(sequence)?;
                // Transactions that were prepared before the subscription asked for prepared
                // transactions were not sent.
                if is_here(&finish.gid, *prepare_end_lsn, *prepare_timestamp)? {
                    finish.run(false)?;
                }
            }
        }
        Ok(prepared::flushed())
    }
}

impl Applier {
    /// Why the transaction that was rolled back, which was to be prepared, is to come again when it
    /// has committed; `None` if it is no such one.
    fn reason_to_wait(
        &mut self,
        error: &PgError,
        is_parked: bool,
    ) -> Option<(ToPrepare, &'static str)> {
        let reason = self.session.as_mut()?.take_reason_to_wait();
        let Some(Step::Prepare(to_prepare)) = self.in_hand.attempt.step.take() else {
            return None;
        };
        let reason = match reason {
            Some(reason) => reason,
            // The blocking row would have to be deleted before it is known whether this transaction
            // commits.
            None if is_in_the_way(error.sqlstate) => "It meets another row under a unique key.",
            // The transaction itself may hold the lock until it has committed.
            None if error.peer_lock.is_some() => {
                "It waits for a table that is locked at the provider, or that is still to be copied."
            }
            // The transaction is parked at its commit, and so are those that depend on it.
            None if is_parked => "It cannot be applied.",
            None => return None,
        };
        Some((to_prepare, reason))
    }

    /// Decides what follows if the transaction that was rolled back with this error can't be
    /// prepared.
    pub(super) fn wait_for_its_commit(
        &mut self,
        transaction: &Transaction,
        error: &PgError,
        alone: bool,
    ) -> Settled {
        let at_its_turn = alone || transaction.is_open();
        let is_parked = self.parks(error);
        match self.reason_to_wait(error, is_parked) {
            None => Settled::No,
            // An earlier transaction may still change the rows that this one conflicts with.
            Some(_) if !at_its_turn => Settled::AtItsTurn,
            Some((left, reason)) => Settled::Left(
                self.leave_unprepared(&left, reason)
                    .unwrap_or_else(|error| error),
            ),
        }
    }

    /// Handles a transaction that is to be prepared but has to follow a parked one. It arrives
    /// whole after its commit, and is parked then. Returns the error for the leader. Returns `None`
    /// if it is no such transaction, or if the process is asked to end. Outside of a transaction.
    pub(super) fn leave_held(&mut self, sequence: u64) -> Result<Option<PgError>, PgError> {
        if !self.subscription.options.two_phase {
            return Ok(None);
        }
        let mut found = None;
        self.each_frame(sequence, |frame| {
            let mut reader = Reader::new(frame);
            while let Some((tag, body)) = reader.next_raw()? {
                if tag == Tag::BeginPrepared
                    && let Record::BeginPrepared(prepared) = Record::read(tag, body)?
                {
                    let begin = prepared.begin;
                    found = Some((begin.xid, prepared.end_lsn, begin.commit_timestamp));
                }
            }
            Ok(())
        })?;
        let Some((xid, end_lsn, timestamp)) = found else {
            return Ok(None);
        };
        if !self
            .post
            .wait_for(sequence - 1, ApplierState::WaitingForTurn)
        {
            return Err(PgError::new(
                SqlState::AdminShutdown,
                "subscription is stopping",
            ));
        }
        self.origins.use_that_of_provider()?;
        let left = ToPrepare {
            gid: self.gid(xid),
            xid,
            end_lsn,
            timestamp,
        };
        self.leave_unprepared(&left, "It has to follow a parked one.")
            .map(Some)
    }

    /// Go past a transaction that can't be prepared, and note down that it is to come whole.
    fn leave_unprepared(&self, left: &ToPrepare, reason: &str) -> Result<PgError, PgError> {
        error::transaction(|| {
            origin::stands_for(
                left.end_lsn,
                left.timestamp.saturating_sub(EPOCH_DIFFERENCE),
            );
            prepared::note(self.subscription.id, left.xid, left.end_lsn, reason)
        })?;
        let subscription = &self.subscription.name;
        pgrx::log!(
            "subscription \"{subscription}\" applies transaction {} of the provider once it has committed, instead of preparing it: {reason}",
            left.xid
        );
        // The leader starts anew, and asks for it.
        Ok(prepared::to_be_sent_whole(reason))
    }

    /// Returns the kind of a transaction that is to be skipped, if it is prepared, or was.
    fn skipped_step(&mut self, transaction: &mut Transaction) -> Result<Option<Step>, PgError> {
        let mut assembled = Vec::new();
        loop {
            let frame = match next_frame(transaction, &mut assembled)? {
                FrameRead::Frame(frame) => frame,
                FrameRead::Assembled => &assembled,
                FrameRead::End | FrameRead::Pending => return Ok(self.in_hand.attempt.step.take()),
            };
            let mut reader = Reader::new(frame);
            while let Some(record) = reader.next_record()? {
                match record {
                    Record::BeginPrepared(prepared) => {
                        self.origins.use_that_of(&prepared.begin)?;
                        self.begin_prepared(&prepared)?;
                    }
                    Record::CommitPrepared(prepared) => self.end_prepared(&prepared, None)?,
                    Record::RollbackPrepared(rollback) => {
                        self.end_prepared(&rollback.prepared, Some(&rollback))?;
                    }
                    _ => {}
                }
            }
        }
    }

    /// Skips a prepared transaction, or its end, as requested: an empty transaction is prepared in
    /// its place, and a transaction that is prepared on this node is rolled back. Returns `None` if
    /// it is neither, or if nothing else needs to be done.
    pub(super) fn pass_prepared(
        &mut self,
        transaction: &mut Transaction,
    ) -> Result<Option<u64>, PgError> {
        let Some(step) = self.skipped_step(transaction)? else {
            return Ok(None);
        };
        while self.post.ring.committed() + 1 < transaction.sequence {
            pgrx::check_for_interrupts!();
            latch::wait_as(Wait::Turn, Duration::from_millis(5));
        }
        let id = i64::from(self.subscription.id);
        // Not in the transaction that is prepared: the change would be visible only after that
        // commits. If the process is killed in between, the request is still there.
        let forget_request = || {
            error::transaction(|| {
                subscription::execute(
                    "update braid.subscription set skip_lsn = null where subscription_id = $1",
                    &[id.into()],
                )
            })
        };
        match &step {
            Step::IsPrepared => return Ok(None),
            Step::Prepare(to_prepare) => {
                forget_request()?;
                prepare_nothing(to_prepare)?;
            }
            Step::Commit(finish) | Step::Rollback(finish, ..) => match finish.run(false) {
                Ok(()) => forget_request()?,
                Err(error) if error.sqlstate == SqlState::UndefinedObject => return Ok(None),
                Err(error) => return Err(error),
            },
        }
        pgrx::log!(
            "subscription \"{}\" has skipped the transaction that ends at {}",
            self.subscription.name,
            lsn_text(transaction.end_lsn())
        );
        Ok(Some(prepared::flushed()))
    }
}

/// Prepare an empty transaction in the place of one that is left out.
fn prepare_nothing(left: &ToPrepare) -> Result<(), PgError> {
    two_phase::prepare_nothing(&left.gid, || {
        origin::stands_for(
            left.end_lsn,
            left.timestamp.saturating_sub(EPOCH_DIFFERENCE),
        );
    })
}

impl Finish {
    fn run(&self, commit: bool) -> Result<(), PgError> {
        error::transaction(|| {
            // For the exit of a process that is asked to end before it has written the record.
            origin::stands_for(self.end_lsn, self.timestamp.saturating_sub(EPOCH_DIFFERENCE));
            two_phase::finish(&self.gid, commit, self.end_lsn);
            Ok(())
        })
        .map_err(|error| {
            if error.sqlstate != SqlState::UndefinedObject {
                return error;
            }
            error
                .with_detail("The provider has committed a transaction that is not, or not any more, prepared here.")
                .with_hint(
                    "If somebody has committed or rolled it back here by hand, go past it with braid.skip_transaction; where it was rolled back, \
                     copy its tables anew with braid.resync_table.",
                )
        })
    }
}
