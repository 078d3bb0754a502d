//! Transactions that are prepared at the provider, and their ends.
//!
//! A transaction that is prepared takes its turn as any other, and ends on this node with PREPARE
//! TRANSACTION instead of a commit. Its end is a turn of its own, and a barrier for all. A
//! transaction that needs a row which it has locked was committed at the provider after its end, so
//! it follows in the stream; but its keys are not remembered that long. It holds nothing back
//! meanwhile: positions move past it, since it is as durable as a committed one.

use braid_gir::{Prepared, Record, Writer};

use super::reception::Reception;
use super::{End, out_of_order};

impl Reception {
    /// A transaction begins that is prepared.
    pub(super) fn begin_prepared(&mut self, prepared: &Prepared<'_>) -> Result<(), End> {
        if !self.subscription.options.two_phase {
            return Err(out_of_order());
        }
        self.begin(&prepared.begin)?;
        let mut outline = Writer::new();
        outline.begin_prepared(prepared)?;
        outline.prepare(&prepared.commit())?;
        if let Some(in_hand) = self.in_hand.as_mut() {
            in_hand.two_phase = Some(outline.frame().to_vec());
            // Known from the start, unlike of others.
            in_hand.skip |=
                self.subscription.skip_lsn != 0 && self.subscription.skip_lsn == prepared.end_lsn;
        }
        Ok(())
    }

    /// Stores of a prepared transaction that is to be skipped that it is prepared, or finished: its
    /// later end must find it.
    pub(super) fn store_outline(&mut self) -> Result<(), End> {
        let Some(in_hand) = self.in_hand.as_mut() else {
            return Ok(());
        };
        if !in_hand.skip || in_hand.discard {
            return Ok(());
        }
        let Some(outline) = in_hand.two_phase.clone() else {
            return Ok(());
        };
        in_hand.skip = false;
        self.store(&outline)?;
        if let Some(in_hand) = self.in_hand.as_mut() {
            in_hand.skip = true;
        }
        Ok(())
    }

    /// Commits or rolls back a prepared transaction, as `record` says. `bytes` are the record's.
    pub(super) fn finish_prepared(&mut self, record: &Record<'_>, bytes: &[u8]) -> Result<(), End> {
        let prepared = match record {
            Record::CommitPrepared(prepared) => prepared,
            Record::RollbackPrepared(rollback) => &rollback.prepared,
            _ => return Err(out_of_order()),
        };
        self.expect_between()?;
        // Segments that came once more after a restart.
        self.give_up_running(prepared.begin.xid, None);
        self.segments.forget(prepared.begin.xid);
        self.begin_prepared(prepared)?;
        if let Some(in_hand) = self.in_hand.as_mut() {
            in_hand.two_phase = Some(bytes.to_vec());
            if !in_hand.discard {
                self.scheduling.barrier_for_all();
            }
        }
        self.store(bytes)?;
        self.commit(&prepared.commit())
    }
}
