//! TRUNCATE by the current transaction.
//!
//! A truncate deletes each row that is older than it. If no row of the tables is newer, they are
//! truncated; otherwise the older rows are deleted one by one. In both cases a tombstone for the
//! whole table is stored, so that older changes that come later are not applied (`deletion.rs`). If
//! rows are deleted one by one, the truncate is passed on to the nodes behind this one
//! (`unfound.rs`), because WAL has only the rows that were here. If deletions are not remembered,
//! tables are truncated without reading their rows.

use std::collections::HashSet;
use std::rc::Rc;

use braid_bgworker::conflict::{Action, Decision, decide_delete, decide_truncated};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::Truncate;
use braid_node::registry;
use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::lock::LockMode;
use braid_postgres::relation::{self as postgres, Relation};
use braid_postgres::sequential_scan::SequentialScan;
use braid_postgres::syscache::{self, ClassRow};
use braid_postgres::{memory, snapshot, transaction};
use pgrx::pg_sys;

use super::doing::Step;
use super::lookup::Found;
use super::relation::{self, RemoteRelation};
use super::removal::wait_for_sessions;
use super::route::Effect;
use super::row_context::RowContext;
use super::table::OpenTable;
use super::target::Key;
use super::version::{Stamp, is_copied, stamp_of, tells_none};
use super::{Current, Session};

/// A table that is to be truncated, locked and open.
pub(super) struct Emptied {
    pub(super) key: Key,
    pub(super) relation: Relation,
    /// Whether its rows have versions that can be read.
    pub(super) is_heap: bool,
}

/// A transaction all of whose rows are deleted, so that its other rows need no decision.
type Gone = Option<pg_sys::TransactionId>;

impl Session {
    /// Truncates the tables that the provider truncated, with their partitions. Leaves out tables
    /// that are not part of the subscription, or were copied from a later state. The provider has
    /// resolved CASCADE.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn truncate(&mut self, truncate: &Truncate<'_>) -> Result<(), PgError> {
        self.flush()?;
        let first = truncate.schemas().next().map(|schema| schema.0);
        self.does(Step::Truncate, first);
        let Some(current) = self.current().cloned() else {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                "truncate outside of a transaction from the provider",
            ));
        };
        // Open tables hold scans and slots; TRUNCATE requires that nothing else uses the table.
        self.close_tables();
        let remembers = registry::remembers_deletions();
        let mut has_waited = false;
        let (roots, tables) = loop {
            let (mut roots, mut routes) = (Vec::new(), Vec::new());
            for schema in truncate.schemas() {
                let remote = self.remote(schema.0)?;
                let route = self.route(schema.0, &remote)?;
                if self.takes(&route, &remote, &current, Effect::Remove)? {
                    roots.push((schema.0, route.oid.to_u32()));
                    routes.push(route);
                }
            }
            if roots.is_empty() {
                return Ok(());
            }
            // Before the locks: the collector reads rows, and would have to wait for this
            // transaction.
            if remembers && !has_waited && says_whole_rows(&roots) {
                wait_for_sessions()?;
                has_waited = true;
            }
            let tables = lock_below(&roots)?;
            // While waiting for the locks, a table may have been copied.
            if routes.iter().all(|route| route.is_current()) {
                break (roots, tables);
            }
        };
        if remembers && self.has_truncated(&tables, &current)? {
            self.work_as_self();
            return Ok(());
        }
        if remembers && self.has_conflicts(&tables, &current)? {
            self.empty_by_row(&tables, &current)?;
            let tables: Vec<_> = tables.iter().map(|table| table.key.1.into()).collect();
            self.pass_on_truncate(&tables, truncate.restart_identity)?;
        } else {
            self.close_tables();
            self.empty_whole(&tables, truncate.restart_identity)?;
        }
        for table in &tables {
            self.deletions()
                .remember_truncation(table.key, current.timestamp)?;
        }
        if remembers {
            self.free_removals(&tables, &current)?;
        }
        self.close_tables();
        drop(tables);
        self.work_as_self();
        self.attempt().counts.truncates += roots.len() as u64;
        // If nothing else was done to a table, this schema may not have it yet.
        self.attempt()
            .truncated
            .extend(roots.iter().map(|(_, relation)| *relation));
        Ok(())
    }

    /// Whether all of the tables were truncated by a newer transaction, or by this very one when it
    /// came over another subscription: no older row is here. To truncate again would send the
    /// truncate on again, and in circles if nodes forward to each other. A truncate straight from
    /// its origin comes once, and in order.
    fn has_truncated(&mut self, tables: &[Emptied], current: &Current) -> Result<bool, PgError> {
        if current.from_origin {
            return Ok(false);
        }
        for table in tables {
            if !self.deletions().is_truncated_since(table.key, current)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Truncates tables with all their rows.
    fn empty_whole(&mut self, tables: &[Emptied], restart_identity: bool) -> Result<(), PgError> {
        if let Some(user) = self.identity.run_as {
            self.work_as(pg_sys::Oid::from(user));
        }
        let relations: Vec<&Relation> = tables.iter().map(|table| &table.relation).collect();
        // From version 16 on, PostgreSQL itself switches to each owner. Before, a trigger would run
        // with this process's rights.
        if self.identity.run_as.is_none()
            && let Some(first) = relations.first().map(|first| first.owner())
        {
            let has_triggers = relations.iter().any(|table| table.view().has_triggers());
            if relations.iter().all(|table| table.owner() == first) {
                self.work_as(first);
            } else if has_triggers && compat::TRUNCATES_AS_CALLER {
                return Err(PgError::new(
                    SqlState::FeatureNotSupported,
                    "cannot truncate tables of several owners, some with triggers, in one command",
                )
                .with_hint(
                    "Give the tables one owner, or let the subscription apply as its owner with run_as_owner.",
                ));
            }
        }
        let emptied: HashSet<u32> = tables.iter().map(|table| table.key.1).collect();
        self.attempt()
            .unchecked
            .retain(|((_, oid), _)| !emptied.contains(oid));
        postgres::truncate(&relations, restart_identity, self.identity.run_as.is_none());
        snapshot::show_own();
        Ok(())
    }

    /// Whether a row of the tables stays, or a conflict has to be recorded.
    fn has_conflicts(&mut self, tables: &[Emptied], current: &Current) -> Result<bool, PgError> {
        let mut found = false;
        for table in tables.iter().filter(|table| table.is_heap) {
            let remote = self.open_emptied(table)?;
            let context = RowContext {
                key: table.key,
                remote: &remote,
                current,
            };
            self.each_row(table, context, &mut |_, fate| {
                found = !matches!(fate, Fate::Goes(None));
                Ok(!found)
            })?;
            if found {
                break;
            }
        }
        Ok(found)
    }

    /// Deletes the rows that do not stay, in all of the tables: with a foreign key, a table can't
    /// be truncated without those that refer to it. Sequences are not restarted, because rows with
    /// their numbers may have stayed.
    fn empty_by_row(&mut self, tables: &[Emptied], current: &Current) -> Result<(), PgError> {
        for before in [true, false] {
            for table in tables {
                self.open_emptied(table)?;
                self.work_as_owner_of(table.key);
                self.tables.open(table.key)?.fire_truncate(before);
            }
            if !before {
                break;
            }
            for table in tables {
                let remote = self.open_emptied(table)?;
                if table.is_heap {
                    let context = RowContext {
                        key: table.key,
                        remote: &remote,
                        current,
                    };
                    self.delete_older(table, context)?;
                }
            }
        }
        Ok(())
    }

    fn delete_older(&mut self, table: &Emptied, context: RowContext<'_>) -> Result<(), PgError> {
        let RowContext { key, current, .. } = context;
        let mut deleted = false;
        self.each_row(table, context, &mut |session, fate| {
            let slot = session.tables.open(key)?.local_slot();
            if let Fate::Goes(Some((found, decision))) | Fate::Stays((found, decision)) = fate
                && decision.conflict.is_some()
            {
                let rows = session.tables.rows(key, true, None)?;
                session.record(context, found, decision, &rows)?;
            }
            if matches!(fate, Fate::Goes(_)) {
                // The table is locked: no other session can change it.
                deleted |= table.relation.view().delete_at(slot.tid());
                session.note_gone(key, current);
                session
                    .deletions()
                    .keep_deleted(key, OpenTable::local_slot)?;
            }
            Ok(true)
        })?;
        if deleted {
            snapshot::show_own();
        }
        Ok(())
    }

    /// Sets up a table for applying.
    pub(super) fn open_emptied(&mut self, table: &Emptied) -> Result<Rc<RemoteRelation>, PgError> {
        let (schema, oid) = table.key;
        let remote = self.remote(schema)?;
        self.work_as_self();
        self.open_table(schema, &remote, pg_sys::Oid::from(oid))?;
        self.work_as_self();
        self.begin_change();
        Ok(remote)
    }

    /// Calls `look` with each row of an open table, in the local slot, and its fate, until `look`
    /// returns false.
    fn each_row(
        &mut self,
        table: &Emptied,
        context: RowContext<'_>,
        look: &mut dyn FnMut(&mut Self, Fate) -> Result<bool, PgError>,
    ) -> Result<(), PgError> {
        let slot = self.tables.open(context.key)?.local_slot();
        transaction::next_command();
        let relation = table.relation.view();
        let mut rows = memory::in_top_transaction(|| SequentialScan::of_latest(relation, &slot))?;
        let mut gone = None;
        let mut result = Ok(true);
        while matches!(result, Ok(true)) && rows.advance() {
            pgrx::check_for_interrupts!();
            result = self
                .fate(context, &mut gone)
                .and_then(|fate| look(self, fate));
            self.forget_change();
        }
        slot.clear();
        result.map(|_| ())
    }

    /// Decides about the row in the local slot of an open table. `gone` is a transaction all of
    /// whose rows are deleted.
    fn fate(&mut self, context: RowContext<'_>, gone: &mut Gone) -> Result<Fate, PgError> {
        let RowContext { key, current, .. } = context;
        let slot = self.tables.open(key)?.local_slot();
        let xid = slot.writer();
        if *gone == Some(xid) {
            return Ok(Fate::Goes(None));
        }
        let stamp = stamp_of(xid);
        let plan = &self.tables.target(key)?.plan;
        // A row of a batch is no newer than the batch's commit; a merged or copied row may be.
        let is_common = !plan.rules.may_have_merged_rows()
            && match stamp {
                Stamp::Unversioned => {
                    !tells_none(xid) || is_copied(xid) && plan.copied_from.is_empty()
                }
                Stamp::Known(timestamp, origin) => origin == 0 || timestamp < current.timestamp,
                Stamp::Own | Stamp::Merged(..) | Stamp::OwnMerged(..) => false,
            };
        if is_common {
            let (_, decision) = self.decide_about(context, stamp)?;
            if decision.action == Action::Apply && decision.conflict.is_none() {
                *gone = Some(xid);
                return Ok(Fate::Goes(None));
            }
        }
        let stamp = match stamp {
            Stamp::Known(_, 0) => stamp,
            _ => self.refined(key, &slot, stamp)?,
        };
        let decided = self.decide_about(context, stamp)?;
        Ok(match (decided.1.action, decided.1.conflict) {
            (Action::Keep, _) => Fate::Stays(decided),
            (_, Some(_)) => Fate::Goes(Some(decided)),
            (_, None) => Fate::Goes(None),
        })
    }

    fn decide_about(
        &mut self,
        context: RowContext<'_>,
        stamp: Stamp,
    ) -> Result<(Found, Decision), PgError> {
        let found = Found::Row(stamp);
        let decision = self.decide(context, found, decide_delete)?;
        let decision = decide_truncated(decision, self.origins.local(found), context.version());
        Ok((found, decision))
    }
}

/// Decision about a row.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// Deleted; with the decision, if it is a conflict.
    Goes(Option<(Found, Decision)>),
    /// Kept: it is newer, or a rule keeps it.
    Stays((Found, Decision)),
}

/// Whether changes of any of these tables, or of their partitions, carry whole rows. In a
/// transaction. A table that was dropped meanwhile has no row of pg_class.
fn says_whole_rows(roots: &[Key]) -> bool {
    roots.iter().any(|(_, root)| {
        emptied_with(pg_sys::Oid::from(*root), LockMode::None)
            .into_iter()
            .any(|oid| {
                ClassRow::find(oid).is_some_and(|row| row.relreplident.cast_unsigned() == b'f')
            })
    })
}

/// Returns the tables that a truncate of this one empties, itself first, then its partitions. The
/// provider names the children of an ordinary table itself. In a transaction.
fn emptied_with(root: pg_sys::Oid, mode: LockMode) -> Vec<pg_sys::Oid> {
    if mode != LockMode::None {
        mode.on_relation(root);
    }
    if syscache::relation_kind(root) != b'p' {
        return vec![root];
    }
    syscache::with_inheritors(root, mode)
}

/// Locks and opens these tables and their partitions.
///
/// # Errors
/// 42809 if one of them is a foreign table; 42P01 if one was dropped. In a transaction.
fn lock_below(roots: &[Key]) -> Result<Vec<Emptied>, PgError> {
    let mode = LockMode::AccessExclusive;
    let mut tables: Vec<Emptied> = Vec::new();
    let mut seen = HashSet::new();
    memory::in_top_transaction(|| {
        for (schema, root) in roots {
            for oid in emptied_with(pg_sys::Oid::from(*root), mode) {
                if !seen.insert(oid) {
                    continue;
                }
                let relation = Relation::try_open(oid, mode).ok_or_else(relation::dropped)?;
                let view = relation.view();
                relation::check_kind(view)?;
                tables.push(Emptied {
                    key: (*schema, oid.to_u32()),
                    is_heap: view.kind() == b'r' && view.is_heap(),
                    relation,
                });
            }
        }
        Ok(tables)
    })
}
