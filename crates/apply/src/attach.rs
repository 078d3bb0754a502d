//! Applies changes inside a transaction that the caller has opened and will end: used by
//! `braid.ingest`. Run by any session.
//!
//! Several source transactions may be applied. They count as a batch; the caller stores its
//! versions when the timestamp of the local commit is known.

use braid_gir::Begin;
use braid_postgres::error::PgError;
use braid_postgres::{snapshot, transaction};

use super::{Session, generation};

pub use super::batch::Versions;

impl Session {
    /// Begins to apply the transaction of `begin` in the open local transaction.
    pub fn attach(&mut self, begin: &Begin<'_>) {
        // Invalidations for what this transaction itself did to tables may not have been processed
        // yet.
        generation::begin();
        self.begin_attempt();
        self.show(begin);
        let attempt = self.attempt();
        attempt.newest = begin.commit_timestamp;
        attempt.written.begin();
        transaction::next_command();
        // Popped in `detach`, or by the abort.
        snapshot::push();
        self.enter_change();
    }

    /// Ends what [`Session::attach`] began: everything is closed, the transaction stays open.
    /// Returns the versions of the rows that were written.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn detach(&mut self) -> Result<Versions, PgError> {
        self.finish()?;
        let versions = self.attempt().written.take();
        self.end_attempt();
        // The snapshot that `attach`, or a join after it, pushed.
        snapshot::pop();
        transaction::next_command();
        Ok(versions)
    }

    /// Frees the session and its memory. Called when it is detached, or when its transaction was
    /// rolled back.
    pub fn discard(mut self) {
        self.drop_attempt();
        self.tables.discard();
    }
}
