//! Applying inside a transaction that somebody else opened and will end: what `braid.ingest` does.
//! Run by any session.
//!
//! Several source transactions may be applied: they count as a batch whose versions the caller
//! stores when it is known which timestamp the local commit will have.

use braid_gir::Begin;
use braid_postgres::error::PgError;
use braid_postgres::{snapshot, transaction};

use super::{Session, generation};

pub use super::batch::Versions;

impl Session {
    /// Begin to apply what follows `begin` in the open transaction.
    pub fn attach(&mut self, begin: &Begin<'_>) {
        // What this transaction itself did to tables is not announced to it by now in every case.
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

    /// End what [`Session::attach`] began: everything is closed, the transaction stays open. Gives
    /// the versions of the rows that were written.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn detach(&mut self) -> Result<Versions, PgError> {
        self.finish()?;
        let versions = self.attempt().written.take();
        self.end_attempt();
        // The one that `attach`, or a join after it, pushed.
        snapshot::pop();
        transaction::next_command();
        Ok(versions)
    }

    /// Frees what the session holds, its memory included. To be called when it is detached, or when
    /// the transaction that it was attached to was rolled back.
    pub fn discard(mut self) {
        self.drop_attempt();
        self.tables.discard();
    }
}
