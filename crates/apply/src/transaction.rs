//! The local transaction of an attempt: its begin, its commit as a transaction of the source, its
//! end. Run by the processes that apply changes.

use std::ffi::CStr;
use std::rc::Rc;

use braid_bgworker::conflict::{self, Version};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::Begin;
use braid_node::registry::SubscriptionEntry;
use braid_node::{clock, crash, origin};
use braid_postgres::error::PgError;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::{memory, snapshot, transaction};

use super::attempt::{Attempt, Piece};
use super::change::version;
use super::doing::Step;
use super::{Session, version};

/// The source's transaction that is being applied.
#[derive(Debug, Clone)]
pub(super) struct Current {
    pub(super) commit_lsn: u64,
    pub(super) timestamp: i64,
    pub(super) xid: u32,
    pub(super) origin: Rc<str>,
    /// The sender is the origin, so the sender's order is the order of versions.
    pub(super) from_origin: bool,
    /// The sender announces the deletion of a losing row (`eviction`). Versions decide about it,
    /// and no rule.
    pub(super) is_displacement_notice: bool,
    /// The version is not known yet: the transaction is to be prepared, and `timestamp` is that of
    /// PREPARE; or it is in progress at the provider. The version will have a later time.
    pub(super) unsettled: bool,
    /// The transaction is in progress at the provider. It commits after `commit_lsn`, and not
    /// before `timestamp`. A change that needs more than that to be decided is not applied now.
    pub(super) runs: bool,
}

impl Session {
    /// Makes the transaction of `begin` the current one: the changes that follow belong to it.
    pub fn show(&mut self, begin: &Begin<'_>) {
        let from_origin = begin.origin.is_empty();
        let current = Current {
            commit_lsn: begin.commit_lsn,
            timestamp: begin.commit_timestamp,
            xid: begin.xid,
            origin: if from_origin {
                Rc::clone(&self.provider)
            } else {
                Rc::from(begin.origin)
            },
            from_origin,
            is_displacement_notice: begin.origin == &*self.provider,
            unsettled: false,
            runs: false,
        };
        let attempt = self.attempt();
        attempt.added.clear();
        attempt.forget_told();
        attempt.current = Some(current);
        self.show_versions();
    }

    /// Says that the current transaction is to be prepared.
    pub fn expect_prepare(&mut self) {
        self.hints.waits_for_commit = None;
        if let Some(current) = self.attempt().current.as_mut() {
            current.unsettled = true;
        }
    }

    /// Says that the current transaction is in progress at the provider: it commits after position
    /// `read`, and not before `newest` (Unix microseconds).
    pub fn runs(&mut self, read: u64, newest: i64) {
        self.hints.waits_for_commit = None;
        if let Some(current) = self.attempt().current.as_mut() {
            current.unsettled = true;
            current.runs = true;
            current.commit_lsn = current.commit_lsn.max(read);
            current.timestamp = current.timestamp.max(newest);
        }
    }

    /// Says that the current transaction, which was applied while it was in progress, has committed
    /// at the provider, at this position and time (Unix microseconds).
    ///
    /// # Errors
    /// 40001 if that time is before the one that the transaction was applied with.
    pub fn has_committed(&mut self, commit_lsn: u64, timestamp: i64) -> Result<(), PgError> {
        self.flush()?;
        let attempt = self.attempt();
        let Some(current) = attempt.current.as_mut() else {
            return Err(PgError::new(
                SqlState::InternalError,
                "no transaction is open",
            ));
        };
        if timestamp < current.timestamp {
            return Err(self
                .hints
                .wait_for_commit("The provider's clock has gone back."));
        }
        current.commit_lsn = commit_lsn;
        current.timestamp = timestamp;
        current.unsettled = false;
        current.runs = false;
        attempt.removals.set_timestamp(timestamp);
        Ok(())
    }

    /// Makes rows with the current transaction's version that came by this stream count as its own:
    /// a change in the stream behind them is later.
    pub(super) fn show_versions(&self) {
        match (&self.same_stream, self.current()) {
            (Some(origins), Some(current)) => version::own(current.timestamp, origins),
            _ => version::own_nothing(),
        }
    }

    /// Whether the current transaction began under this version of the tables' states.
    #[must_use]
    pub fn is_as_of(&self, tables_version: u32) -> bool {
        self.tables_version == tables_version
    }

    /// Opens a local transaction for the transaction of `begin`, and for others that are to be
    /// committed with it as one.
    pub fn begin_batch(&mut self, begin: &Begin<'_>, tables_version: u32) {
        self.begin(begin, tables_version);
        let attempt = self.attempt();
        attempt.newest = begin.commit_timestamp;
        attempt.written.begin();
    }

    /// Adds the transaction of `begin` to the open batch. Returns false, and does nothing, if it
    /// can't: it has another origin, or comes later with a version that is not newer.
    pub fn join(&mut self, begin: &Begin<'_>) -> bool {
        let from_origin = begin.origin.is_empty();
        let next = Version {
            timestamp: begin.commit_timestamp,
            origin: if from_origin {
                &self.provider
            } else {
                begin.origin
            },
        };
        let joins = self.current().is_some_and(|current| {
            conflict::joins((version(current), current.from_origin), (next, from_origin))
        });
        if !joins {
            return false;
        }
        self.show(begin);
        let attempt = self.attempt();
        attempt.newest = attempt.newest.max(begin.commit_timestamp);
        if attempt.has_rules {
            self.refresh_snapshot();
        }
        true
    }

    /// Takes a new snapshot, so that triggers and expressions see what is committed now, as in a
    /// transaction of its own.
    pub(super) fn refresh_snapshot(&mut self) {
        // The active snapshot is the one that `begin` pushed.
        snapshot::pop();
        snapshot::push();
    }

    /// Ends a batch of which everything is applied: stores the versions that its commit does not
    /// carry. The caller commits next.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn finish_batch(&mut self) -> Result<(), PgError> {
        self.finish()?;
        let attempt = self.attempt();
        attempt.written.store(attempt.newest)?;
        if let Some(current) = attempt.current.as_mut() {
            current.timestamp = attempt.newest;
        }
        Ok(())
    }

    /// Opens a local transaction for the transaction of `begin`.
    pub fn begin(&mut self, begin: &Begin<'_>, tables_version: u32) {
        if tables_version != self.tables_version {
            self.routes.clear();
            self.tables_version = tables_version;
        }
        self.hints.forget_preparations();
        self.begin_attempt();
        self.show(begin);
        crash::begin(begin.xid, begin.commit_lsn);
        self.does(Step::Begin, None);
        self.start();
    }

    /// Commits the changes of the current transaction so far as a chunk of it, at `position`, and
    /// counts them. [`Session::go_on`] opens the next chunk. Returns the end of the local commit
    /// record.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn commit_piece(
        &mut self,
        position: u64,
        entry: &SubscriptionEntry,
    ) -> Result<u64, PgError> {
        self.finish()?;
        let attempt = self.attempt();
        let piece = Piece {
            current: attempt.current.clone(),
            added: std::mem::take(&mut attempt.added),
        };
        let local_end = self.commit(position)?;
        self.publish_changes(entry);
        self.piece = Some(piece);
        Ok(local_end)
    }

    /// Opens the next chunk of the current transaction.
    pub fn go_on(&mut self, tables_version: u32) {
        if tables_version != self.tables_version {
            self.routes.clear();
            self.tables_version = tables_version;
        }
        self.begin_attempt();
        if let Some(piece) = self.piece.take() {
            let attempt = self.attempt();
            attempt.current = piece.current;
            attempt.added = piece.added;
        }
        self.start();
    }

    /// Begins an attempt. Drops an attempt that was not ended.
    pub(super) fn begin_attempt(&mut self) {
        self.drop_attempt();
        self.attempt = Some(Attempt::with(&mut self.buffers));
    }

    /// Opens a local transaction for the current attempt, which begins here if there is none.
    pub(super) fn start(&mut self) {
        if self.attempt.is_none() {
            self.begin_attempt();
        }
        transaction::start();
        snapshot::push();
        self.enter_change();
    }

    /// Commits the writes as a transaction of this node.
    pub(super) fn commit_as_own(&mut self) -> Result<(), PgError> {
        self.close_tables();
        self.store_tally()?;
        clock::before_own_commit();
        self.end();
        Ok(())
    }

    /// Commits the local transaction, with the origin that is set. Returns the end of the local
    /// commit record; 0 if nothing was written.
    pub(super) fn end(&mut self) -> u64 {
        let end = transaction::commit();
        self.forget_change();
        self.end_attempt();
        end
    }

    /// Ends the current attempt, which is committed or prepared. Only its counts stay.
    pub(super) fn end_attempt(&mut self) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let mut ended = attempt.end(&mut self.buffers);
        // If nobody has counted the tables of the last commit yet, they are counted with these.
        let uncounted = &mut self.uncounted;
        std::mem::swap(&mut uncounted.tables, &mut ended.tables);
        uncounted.tables.append(&mut ended.tables);
        uncounted.truncated.append(&mut ended.truncated);
        uncounted.counts = ended.counts;
        self.buffers.open = ended.tables;
    }

    /// Drops an attempt that was rolled back, with its counts.
    pub(super) fn drop_attempt(&mut self) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let mut tables = attempt.end(&mut self.buffers).tables;
        self.tables.roll_back(tables.drain(..));
        self.buffers.open = tables;
    }

    /// Stores the conflicts of the current attempt.
    pub(super) fn store_tally(&mut self) -> Result<(), PgError> {
        match &mut self.attempt {
            Some(attempt) => attempt.tally.store(&self.identity.subscription),
            None => Ok(()),
        }
    }

    /// Commits with the origin's position and this timestamp (Unix microseconds). Returns the end
    /// of the local commit record; 0 if nothing was written.
    pub(super) fn commit_at(&mut self, end_lsn: u64, timestamp: i64) -> u64 {
        let timestamp = timestamp.saturating_sub(EPOCH_DIFFERENCE);
        clock::seen(timestamp);
        origin::stands_for(end_lsn, timestamp);
        self.end()
    }

    /// Writes held-back rows and removals, checks deferred constraints, and closes tables. Called
    /// when the whole transaction is applied, before it waits for its turn.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn finish(&mut self) -> Result<(), PgError> {
        self.flush()?;
        self.does(Step::Commit, None);
        self.check_deferred()?;
        self.check_leaving()?;
        self.check_kept_out()?;
        self.close_tables();
        // Versions of a batch are stored by [`Session::finish_batch`].
        let attempt = self.attempt();
        if attempt.written.has_merged() && !attempt.written.is_making() {
            attempt.written.store(attempt.timestamp())?;
        }
        self.deletions().store()?;
        self.note_missing()?;
        self.store_tally()
    }

    /// Commits as the source's transaction that ends at `end_lsn`. Returns the end of the local
    /// commit record; 0 if nothing was written.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn commit(&mut self, end_lsn: u64) -> Result<u64, PgError> {
        self.finish()?;
        let timestamp = self.timestamp();
        Ok(self.commit_at(end_lsn, timestamp))
    }

    /// Prepares, under the name `gid`, as the source's transaction whose PREPARE ends at `end_lsn`.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn prepare_transaction(&mut self, gid: &CStr, end_lsn: u64) -> Result<(), PgError> {
        self.finish()?;
        let timestamp = self.timestamp();
        origin::stands_for(end_lsn, timestamp.saturating_sub(EPOCH_DIFFERENCE));
        transaction::prepare(gid);
        self.forget_change();
        self.end_attempt();
        Ok(())
    }

    /// Ends the attempt at a transaction that was rolled back.
    pub fn forget_transaction(&mut self) {
        self.drop_attempt();
        self.bulk.reset();
        memory::Context::of_process().enter();
        self.forget_change();
    }
}
