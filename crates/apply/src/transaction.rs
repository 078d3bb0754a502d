//! The local transaction of an attempt: its begin, its commit as a transaction of the source, its
//! end. Run by whoever applies changes.

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

/// The transaction in hand.
#[derive(Debug, Clone)]
pub(super) struct Current {
    pub(super) commit_lsn: u64,
    pub(super) timestamp: i64,
    pub(super) xid: u32,
    pub(super) origin: Rc<str>,
    /// The sender is the origin: its order is the order of versions.
    pub(super) from_origin: bool,
    /// The sender gives notice of a row that has lost to another one (`eviction`): a deletion,
    /// which versions judge and no rule.
    pub(super) is_displacement_notice: bool,
    /// It is to be prepared: the time is that of PREPARE, and its version will have a later one. Or
    /// it runs.
    pub(super) unsettled: bool,
    /// It runs at the provider: it commits after this position, and at this time or later. What
    /// more than that would have to be known for is not applied now.
    pub(super) runs: bool,
}

impl Session {
    /// What follows belongs to the transaction of `begin`.
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

    /// The transaction that was begun is to be prepared.
    pub fn expect_prepare(&mut self) {
        self.hints.waits_for_commit = None;
        if let Some(current) = self.attempt().current.as_mut() {
            current.unsettled = true;
        }
    }

    /// The transaction that was begun runs at the provider: it commits after `read`, and not before
    /// `newest` (Unix microseconds).
    pub fn runs(&mut self, read: u64, newest: i64) {
        self.hints.waits_for_commit = None;
        if let Some(current) = self.attempt().current.as_mut() {
            current.unsettled = true;
            current.runs = true;
            current.commit_lsn = current.commit_lsn.max(read);
            current.timestamp = current.timestamp.max(newest);
        }
    }

    /// The transaction that was applied while it ran has committed there, at this position and time
    /// (Unix microseconds).
    ///
    /// # Errors
    /// 40001 when that is before what is here and was taken for older.
    pub fn has_committed(&mut self, commit_lsn: u64, timestamp: i64) -> Result<(), PgError> {
        self.flush()?;
        let attempt = self.attempt();
        let Some(current) = attempt.current.as_mut() else {
            return Err(PgError::new(
                SqlState::InternalError,
                "no transaction is in hand",
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

    /// What is here under the version of the transaction in hand, and came by this stream, is its
    /// own: a change that comes after it is later.
    pub(super) fn show_versions(&self) {
        match (&self.same_stream, self.current()) {
            (Some(origins), Some(current)) => version::own(current.timestamp, origins),
            _ => version::own_nothing(),
        }
    }

    /// Whether the transaction in hand began under this version of the tables' states.
    #[must_use]
    pub fn is_as_of(&self, tables_version: u32) -> bool {
        self.tables_version == tables_version
    }

    /// Open a transaction for what follows `begin`, and for more that is to be committed with it as
    /// one.
    pub fn begin_batch(&mut self, begin: &Begin<'_>, tables_version: u32) {
        self.begin(begin, tables_version);
        let attempt = self.attempt();
        attempt.newest = begin.commit_timestamp;
        attempt.written.begin();
    }

    /// What follows `begin` joins the open batch. False, and nothing has happened, when it can't:
    /// it has another origin, or a version that is not the newer one for being later.
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

    /// What triggers and expressions see is what is committed now, as in a transaction of its own.
    pub(super) fn refresh_snapshot(&mut self) {
        // The active snapshot is the one that `begin` pushed.
        snapshot::pop();
        snapshot::push();
    }

    /// All of the batch is applied: write down what its commit does not say. It is committed next.
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

    /// Open a transaction for what follows `begin`.
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

    /// Commit what there is of the transaction in hand as a piece of it, at `position`, and count
    /// it. [`Session::go_on`] opens the next. Returns the end of the local commit record.
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

    /// Open the next piece of the transaction in hand.
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

    /// Begin an attempt. One that was not ended is dropped.
    pub(super) fn begin_attempt(&mut self) {
        self.drop_attempt();
        self.attempt = Some(Attempt::with(&mut self.buffers));
    }

    /// Open a local transaction for the attempt in hand, which begins here if there is none.
    pub(super) fn start(&mut self) {
        if self.attempt.is_none() {
            self.begin_attempt();
        }
        transaction::start();
        snapshot::push();
        self.enter_change();
    }

    /// Commit what was done as a change of this node.
    pub(super) fn commit_as_own(&mut self) -> Result<(), PgError> {
        self.close_tables();
        self.store_tally()?;
        clock::before_own_commit();
        self.end();
        Ok(())
    }

    /// Commit the local transaction, with whatever origin is set. Returns the end of the local
    /// commit record; 0 when nothing was written.
    pub(super) fn end(&mut self) -> u64 {
        let end = transaction::commit();
        self.forget_change();
        self.end_attempt();
        end
    }

    /// The attempt in hand is committed, or prepared: only its counts stay.
    pub(super) fn end_attempt(&mut self) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let mut ended = attempt.end(&mut self.buffers);
        // Tables of a commit before that nobody has counted are counted with this one's.
        let uncounted = &mut self.uncounted;
        std::mem::swap(&mut uncounted.tables, &mut ended.tables);
        uncounted.tables.append(&mut ended.tables);
        uncounted.truncated.append(&mut ended.truncated);
        uncounted.counts = ended.counts;
        self.buffers.open = ended.tables;
    }

    /// Drop an attempt that was rolled back, with what it has counted.
    pub(super) fn drop_attempt(&mut self) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let mut tables = attempt.end(&mut self.buffers).tables;
        self.tables.roll_back(tables.drain(..));
        self.buffers.open = tables;
    }

    /// Write down the conflicts of the attempt in hand.
    pub(super) fn store_tally(&mut self) -> Result<(), PgError> {
        match &mut self.attempt {
            Some(attempt) => attempt.tally.store(&self.identity.subscription),
            None => Ok(()),
        }
    }

    /// Commit with the origin's position and this timestamp (Unix microseconds). Returns the end of
    /// the local commit record; 0 when nothing was written.
    pub(super) fn commit_at(&mut self, end_lsn: u64, timestamp: i64) -> u64 {
        let timestamp = timestamp.saturating_sub(EPOCH_DIFFERENCE);
        clock::seen(timestamp);
        origin::stands_for(end_lsn, timestamp);
        self.end()
    }

    /// All of the transaction is there: write what was held back, and let go of what was opened,
    /// before it waits for its turn.
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
        // Those of a batch are written down with its versions.
        let attempt = self.attempt();
        if attempt.written.has_merged() && !attempt.written.is_making() {
            attempt.written.store(attempt.timestamp())?;
        }
        self.deletions().store()?;
        self.note_missing()?;
        self.store_tally()
    }

    /// Commit as the source's transaction that ends at `end_lsn`. Returns the end of the local
    /// commit record; 0 when nothing was written.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn commit(&mut self, end_lsn: u64) -> Result<u64, PgError> {
        self.finish()?;
        let timestamp = self.timestamp();
        Ok(self.commit_at(end_lsn, timestamp))
    }

    /// Prepare, under the name `gid`, as the source's transaction whose PREPARE ends at `end_lsn`.
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

    /// The transaction was rolled back: the attempt at it is over.
    pub fn forget_transaction(&mut self) {
        self.drop_attempt();
        self.bulk.reset();
        memory::Context::of_process().enter();
        self.forget_change();
    }
}
