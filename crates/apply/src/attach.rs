//! Applying inside a transaction that somebody else opened and will end: what `braid.ingest` does. Run by any session.
//!
//! Several source transactions may be applied: they count as a batch whose versions the caller stores when it is known which
//! timestamp the local commit will have.

use std::sync::atomic::Ordering;

use braid_gir::Begin;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

use super::{GENERATION, Session};

pub use super::batch::Versions;

impl Session {
    /// Begin to apply what follows `begin` in the open transaction.
    pub fn attach(&mut self, begin: &Begin<'_>) {
        // What this transaction itself did to tables is not announced to it by now in every case.
        GENERATION.fetch_add(1, Ordering::Relaxed);
        self.begin_attempt();
        self.show(begin);
        let attempt = self.attempt();
        attempt.newest = begin.commit_timestamp;
        attempt.written.begin();
        // SAFETY: in a transaction; the snapshot is popped in `detach`, or by the abort.
        unsafe {
            pg_sys::CommandCounterIncrement();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            pg_sys::MemoryContextSwitchTo(self.change_context);
        }
    }

    /// End what [`Session::attach`] began: everything is closed, the transaction stays open. Gives the versions of the rows that were
    /// written.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn detach(&mut self) -> Result<Versions, PgError> {
        self.finish()?;
        let versions = self.attempt().written.take();
        self.end_attempt();
        // SAFETY: the snapshot is the one that `attach`, or a join after it, pushed.
        unsafe {
            pg_sys::PopActiveSnapshot();
            pg_sys::CommandCounterIncrement();
        }
        Ok(versions)
    }

    /// Free what the session holds. To be called when it is detached, or when what it was attached to was rolled back.
    pub fn discard(mut self) {
        self.drop_attempt();
        for (_, target) in self.targets.drain() {
            if let Some(table) = target.table {
                table.discard();
            }
        }
        self.bulk.discard();
        // SAFETY: nothing refers to it any more, and it is not the current one: both callers are in a context of their own.
        unsafe { pg_sys::MemoryContextDelete(self.change_context) };
    }
}
