//! Prepared transactions: applied as others are, and prepared here when it is their turn, under a name of this subscription's; later
//! committed or rolled back, by whichever applier.
//!
//! All three carry the position of what they stand for, as a commit does, and so do their WAL records: a step that is durable here is never sent
//! again (I1). The version of what is written is that of COMMIT PREPARED: its time, and the node.

use std::ffi::{CStr, CString};

use braid_gir::{Prepared, RollbackPrepared};
use pgrx::pg_sys;

use super::{Applier, Trouble};
use crate::apply::EPOCH_DIFFERENCE;
use crate::error::{self, PgError};
use crate::{clock, ffi, prepared};

/// What the transaction in hand is, if it is not an ordinary one.
pub(super) enum Step {
    /// It ends in PREPARE TRANSACTION.
    Prepare(CString),
    /// It is prepared here already.
    IsPrepared,
    /// What was prepared is committed.
    Commit(Finish),
    /// What was prepared, up to this position, at this time (Unix microseconds), is rolled back.
    Rollback(Finish, u64, i64),
}

pub(super) struct Finish {
    gid: CString,
    end_lsn: u64,
    timestamp: i64,
}

/// Up to where WAL is flushed, which each of the steps does up to its own record.
fn flushed() -> u64 {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::GetFlushRecPtr(std::ptr::null_mut()) }
}

/// Whether it is here: its name, where its PREPARE ends at the provider, and when that was (Unix microseconds).
fn is_here(gid: &CStr, end_lsn: u64, timestamp: i64) -> Result<bool, PgError> {
    error::transaction(|| {
        // SAFETY: in a transaction.
        Ok(unsafe { ffi::lookup_gxact(gid, end_lsn, timestamp.saturating_sub(EPOCH_DIFFERENCE)) })
    })
}

impl Applier {
    fn gid(&self, xid: u32) -> CString {
        prepared::gid(self.subscription.id, xid)
    }

    /// A transaction begins that is to be prepared. Outside of a transaction. False if it is here.
    pub(super) fn begin_prepared(&mut self, prepared: &Prepared<'_>) -> Result<bool, PgError> {
        let gid = self.gid(prepared.begin.xid);
        let there = is_here(&gid, prepared.end_lsn, prepared.begin.commit_timestamp)?;
        self.step = Some(if there {
            Step::IsPrepared
        } else {
            Step::Prepare(gid)
        });
        Ok(!there)
    }

    /// Take note of how a prepared transaction ends.
    pub(super) fn end_prepared(
        &mut self,
        prepared: &Prepared<'_>,
        rollback: Option<&RollbackPrepared<'_>>,
    ) -> Result<(), PgError> {
        self.use_origin_of(&prepared.begin)?;
        let finish = Finish {
            gid: self.gid(prepared.begin.xid),
            end_lsn: prepared.end_lsn,
            timestamp: prepared.begin.commit_timestamp,
        };
        self.step = Some(match rollback {
            None => Step::Commit(finish),
            Some(rollback) => {
                Step::Rollback(finish, rollback.prepare_end_lsn, rollback.prepare_timestamp)
            }
        });
        Ok(())
    }

    /// All of the transaction `sequence` has come, and is applied if there was something to apply. Returns up to where local WAL is to
    /// be flushed.
    pub(super) fn take_step(
        &mut self,
        step: &Step,
        sequence: u64,
        end_lsn: u64,
    ) -> Result<u64, Trouble> {
        match step {
            Step::Prepare(gid) => {
                self.wait_for_turn(sequence)?;
                if let Some(session) = self.session.as_mut() {
                    session.prepare_transaction(gid, end_lsn)?;
                }
            }
            Step::IsPrepared => {}
            Step::Commit(finish) => {
                self.wait_for_turn(sequence)?;
                // Before it becomes visible.
                clock::seen(finish.timestamp.saturating_sub(EPOCH_DIFFERENCE));
                finish.run(true)?;
            }
            Step::Rollback(finish, prepare_end_lsn, prepare_timestamp) => {
                self.wait_for_turn(sequence)?;
                // What was prepared before this subscription was told of such transactions was not sent.
                if is_here(&finish.gid, *prepare_end_lsn, *prepare_timestamp)? {
                    finish.run(false)?;
                }
            }
        }
        Ok(flushed())
    }
}

impl Finish {
    fn run(&self, commit: bool) -> Result<(), PgError> {
        error::transaction(|| {
            // SAFETY: in a transaction that does nothing else. The values are read by the record that is written.
            unsafe {
                pg_sys::replorigin_session_origin_lsn = self.end_lsn;
                pg_sys::replorigin_session_origin_timestamp =
                    self.timestamp.saturating_sub(EPOCH_DIFFERENCE);
                ffi::finish_prepared_transaction(&self.gid, commit);
            }
            Ok(())
        })
        .map_err(|error| {
            if error.sqlstate != "42704" {
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
