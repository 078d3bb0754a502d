//! Local tables that changes go to, by the stream's relation and the table's OID. Run by the
//! processes that apply changes.
//!
//! Plain tables stay set up between transactions, suspended (`table`), at most [`KEPT_TABLES`] of
//! them.

use braid_bgworker::sqlstate::SqlState;
use braid_node::crash;
use braid_node::registry::{self, TableEntry};
use braid_node::versions::tables;
use braid_postgres::error::{PeerLock, PgError};
use braid_postgres::relation::RelationRef;
use pgrx::pg_sys;

use super::constraint::Unchecked;
use super::counts::Counts;
use super::number_map::NumberMap;
use super::relation::{self, LocalRelation, RemoteRelation};
use super::route::{Effect, Route};
use super::table::{self, OpenTable};
use super::transaction::Current;
use super::{Session, generation, unlogged};

/// Number of tables that are kept set up between transactions.
const KEPT_TABLES: usize = 256;

/// Number of the stream's relation, and OID of the local table.
pub(super) type Key = (u32, u32);

/// A local table: its plan, its state, its counts.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) plan: LocalRelation,
    pub(super) generation: u64,
    /// Open, or suspended.
    pub(super) table: Option<OpenTable>,
    /// OIDs of its indexes, as long as `table` is set.
    pub(super) indexes: Vec<pg_sys::Oid>,
    pub(super) counters: Option<&'static TableEntry>,
    /// Counts of the current transaction.
    pub(super) counts: Counts,
    /// Whether the columns that the plan leaves out are recorded.
    pub(super) missing_noted: bool,
}

impl Target {
    fn new(plan: LocalRelation, generation: u64) -> Self {
        Self {
            plan,
            generation,
            table: None,
            indexes: Vec::new(),
            counters: None,
            counts: Counts::default(),
            missing_noted: false,
        }
    }

    /// Takes over the counts of the current transaction for the table under its former shape.
    fn succeed(&mut self, before: &Self) {
        self.counts = before.counts;
        self.missing_noted = before.missing_noted
            && before.plan.width == self.plan.width
            && before.plan.missing == self.plan.missing;
        self.counters = before.counters;
    }

    pub(super) fn is_open(&self) -> bool {
        self.table
            .as_ref()
            .is_some_and(|table| !table.is_suspended())
    }

    /// Returns the open table and its plan.
    pub(super) fn opened(&mut self) -> Result<(&mut LocalRelation, &mut OpenTable), PgError> {
        match &mut self.table {
            Some(table) => Ok((&mut self.plan, table)),
            None => Err(not_open()),
        }
    }

    /// Frees the table of a transaction that was rolled back; a suspended one stays.
    fn roll_back(&mut self) {
        self.counts = Counts::default();
        self.missing_noted = false;
        if let Some(table) = self.table.take_if(|table| !table.is_suspended()) {
            table.discard();
        }
    }
}

/// Whether a table is versioned: whether a transaction may write it is checked each time anew.
fn is_versioned(key: Key) -> bool {
    tables::number_of(pg_sys::Oid::from(key.1)).is_some()
}

/// Resumes a suspended table, whose locks this transaction holds, unless something was invalidated.
/// Returns whether it did.
fn resume_locked(table: &mut OpenTable, generation: u64) -> bool {
    let is_current = generation::is_current(generation);
    if is_current {
        // SAFETY: both callers hold the locks, and no invalidation has come since it was set up.
        unsafe { table.resume() };
    }
    is_current
}

fn not_open() -> PgError {
    PgError::new(SqlState::InternalError, "table is not open")
}

/// State of a table before a change uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// This transaction has it open.
    Open,
    /// Suspended before, open now.
    Resumed,
    /// Not set up.
    Closed,
}

/// Tables that a session has set up.
#[derive(Debug, Default)]
pub(super) struct Tables {
    targets: NumberMap<Key, Target>,
    /// Number of suspended tables.
    kept: usize,
}

impl Tables {
    pub(super) fn get(&self, key: Key) -> Option<&Target> {
        self.targets.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Target> {
        self.targets.get_mut(&key)
    }

    /// Returns a table of this session.
    pub(super) fn target(&mut self, key: Key) -> Result<&mut Target, PgError> {
        self.targets.get_mut(&key).ok_or_else(not_open)
    }

    /// Returns an open table with its plan.
    pub(super) fn opened(
        &mut self,
        key: Key,
    ) -> Result<(&mut LocalRelation, &mut OpenTable), PgError> {
        self.target(key)?.opened()
    }

    /// As [`Tables::opened`], for reading.
    pub(super) fn opened_at(&self, key: Key) -> Result<(&LocalRelation, &OpenTable), PgError> {
        match self.targets.get(&key) {
            Some(Target {
                plan,
                table: Some(table),
                ..
            }) => Ok((plan, table)),
            _ => Err(not_open()),
        }
    }

    /// Returns the plan of a table of this session.
    pub(super) fn plan(&self, key: Key) -> Result<&LocalRelation, PgError> {
        let target = self.targets.get(&key).ok_or_else(not_open)?;
        Ok(&target.plan)
    }

    /// Returns an open table.
    pub(super) fn open(&mut self, key: Key) -> Result<&mut OpenTable, PgError> {
        self.opened(key).map(|(_, table)| table)
    }

    /// Opens a suspended table, if nothing was invalidated since.
    fn resume(&mut self, key: Key) -> Standing {
        let Some(target) = self.targets.get_mut(&key) else {
            return Standing::Closed;
        };
        if target.is_open() {
            return Standing::Open;
        }
        let Some(table) = target.table.as_mut() else {
            return Standing::Closed;
        };
        // Taking the locks processes invalidations that have come meanwhile.
        let is_current = generation::is_current(target.generation) && !is_versioned(key);
        let resumed = is_current && {
            OpenTable::lock(pg_sys::Oid::from(key.1), &target.indexes);
            resume_locked(table, target.generation)
        };
        self.kept = self.kept.saturating_sub(1);
        if resumed {
            return Standing::Resumed;
        }
        if let Some(table) = target.table.take() {
            table.discard();
        }
        Standing::Closed
    }

    /// Opens a suspended plain table, if its locks are free. Returns `None` if it stays closed.
    pub(super) fn resume_if_free(&mut self, key: Key) -> Option<Standing> {
        let target = self.targets.get_mut(&key)?;
        if target.is_open() {
            return Some(Standing::Open);
        }
        let table = target.table.as_mut()?;
        // Locks stay until the end of the transaction, even if the table is not resumed.
        if !generation::is_current(target.generation)
            || is_versioned(key)
            || !OpenTable::lock_if_free(pg_sys::Oid::from(key.1), &target.indexes)
            || !resume_locked(table, target.generation)
        {
            return None;
        }
        self.kept = self.kept.saturating_sub(1);
        Some(Standing::Resumed)
    }

    /// Stores a table under a new plan.
    fn insert(&mut self, key: Key, target: Target) {
        if let (Some(before), Some(now)) =
            (self.targets.insert(key, target), self.targets.get_mut(&key))
        {
            now.succeed(&before);
        }
    }

    /// Suspends or closes the tables that a transaction has opened. Rows of closed tables that are
    /// still to be checked go to `unchecked`.
    pub(super) fn close(&mut self, open: &[Key], unchecked: &mut Vec<(Key, Unchecked)>) {
        for key in open {
            let Some(target) = self.targets.get_mut(key) else {
                continue;
            };
            if let Some(table) = target.table.as_mut().filter(|table| !table.is_suspended()) {
                if table.is_plain() {
                    table.suspend();
                    self.kept += 1;
                } else if let Some(table) = target.table.take() {
                    unchecked.extend(table.unchecked.iter().map(|row| (*key, *row)));
                    table.close();
                }
            }
        }
        if self.kept > KEPT_TABLES {
            self.forget_kept();
        }
    }

    /// Frees all suspended tables.
    fn forget_kept(&mut self) {
        for target in self.targets.values_mut() {
            if let Some(table) = target.table.take_if(|table| table.is_suspended()) {
                table.discard();
            }
        }
        self.kept = 0;
    }

    /// Frees the tables that a transaction, which was rolled back, had opened.
    pub(super) fn roll_back(&mut self, open: impl Iterator<Item = Key>) {
        for key in open {
            if let Some(target) = self.targets.get_mut(&key) {
                target.roll_back();
            }
        }
    }

    /// Frees all tables.
    pub(super) fn discard(self) {
        for table in self.targets.into_values().filter_map(|target| target.table) {
            table.discard();
        }
    }
}

/// Returns the error for a transaction that is parked until a table is copied.
pub(super) fn to_be_copied(table: &str) -> PgError {
    let mut error = PgError::new(
        SqlState::LockNotAvailable,
        format!("table \"{table}\" is still to be copied"),
    )
    .with_detail(
        "The copy waits for a transaction at the provider, whose commit may wait for this subscription.",
    )
    .with_hint("The transaction is applied by itself once the table is copied.");
    error.peer_lock = Some(PeerLock::ByCommit);
    error
}

impl Session {
    /// Whether changes of the current transaction with this effect are applied to the table.
    ///
    /// # Errors
    /// 40001 if only its commit tells: it is applied then. 55P03 if the table is still to be
    /// copied, and the transaction is to be parked until then.
    pub(super) fn takes(
        &mut self,
        route: &Route,
        remote: &RemoteRelation,
        current: &Current,
        effect: Effect,
    ) -> Result<bool, PgError> {
        if route.waits_for_copy() && (self.is_parked || self.parks_for_copies()) {
            return Err(to_be_copied(&remote.qualified_name()));
        }
        route.decides(current, effect).ok_or_else(|| {
            self.hints
                .wait_for_commit("Its commit says whether it is in a copy.")
        })
    }

    /// Whether transactions that change tables which are still to be copied are parked. If not,
    /// such changes are left out: the leader hands out only transactions that are older than the
    /// copy.
    pub(super) fn parks_for_copies(&self) -> bool {
        registry::subscription(self.identity.subscription_id)
            .is_some_and(registry::SubscriptionEntry::parks_for_copies)
    }

    /// Opens a table under the current plan, unless it is open. If it had to be set up, this
    /// process works as its owner afterwards.
    pub(super) fn open_table(
        &mut self,
        schema: u32,
        remote: &RemoteRelation,
        oid: pg_sys::Oid,
    ) -> Result<Key, PgError> {
        let key = (schema, oid.to_u32());
        crash::change(key.1);
        match self.tables.resume(key) {
            Standing::Open => return Ok(key),
            Standing::Resumed => {
                self.attempt().open.push(key);
                return Ok(key);
            }
            Standing::Closed => {}
        }
        // SAFETY: opened in this transaction, which has not ended; the lock makes the shape stable
        // until it does.
        unsafe {
            let relation = pg_sys::try_relation_open(oid, table::write_lock().as_raw());
            let view = RelationRef::from_ptr(relation).ok_or_else(relation::dropped)?;
            // After the lock: a change of the table that committed before the lock is known by now.
            let generation = generation::now();
            let stale = self
                .tables
                .get(key)
                .is_none_or(|target| target.generation != generation);
            if stale {
                // Rules are read with the process's own rights.
                self.work_as_self();
                self.window.close(oid)?;
                let plan = LocalRelation::new(
                    remote,
                    view,
                    self.identity.charset,
                    self.identity.ignores_missing,
                    self.identity.subscription_id,
                )?;
                if view.persistence() == b'u' && self.reported_unlogged.insert(oid.to_u32()) {
                    unlogged(&remote.qualified_name()).warn();
                }
                self.tables.insert(key, Target::new(plan, generation));
            }
            if let Some(target) = self.tables.get_mut(key) {
                let user = &mut self.attempt.get_or_insert_default().user;
                let as_owner = user.as_owner(view, self.identity.run_as);
                let table = OpenTable::open(&as_owner, &target.plan)?;
                let plain = table.is_plain();
                target.indexes = table.index_oids();
                // Opening the indexes may have processed an invalidation. Then the plan is good for
                // this transaction only: its generation is not the current one at the next use.
                target.table = Some(table);
                let attempt = self.attempt();
                attempt.open.push(key);
                if !plain && !attempt.has_rules {
                    attempt.has_rules = true;
                    if attempt.written.is_making() {
                        self.refresh_snapshot();
                    }
                }
            }
        }
        Ok(key)
    }

    /// Suspends or closes the tables that the transaction has opened, before it commits or waits
    /// for its turn.
    pub(super) fn close_tables(&mut self) {
        self.work_as_self();
        if let Some(attempt) = &mut self.attempt {
            self.tables.close(&attempt.open, &mut attempt.unchecked);
        }
    }
}
