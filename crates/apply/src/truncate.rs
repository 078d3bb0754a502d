//! TRUNCATE of the transaction in hand.
//!
//! A truncate deletes each row with its own version. Where nothing in the tables is newer, they are truncated; else what is older is deleted
//! row by row. Either way a tombstone for the table as a whole is written, so that what is older and comes later stays away
//! (`deletion.rs`), and for the nodes behind this one the truncate is passed on (`unfound.rs`): row by row, WAL has only what was here. Where deletions are not remembered, tables are truncated without a look at their rows.

use std::collections::HashSet;
use std::rc::Rc;

use braid_bgworker::conflict::{Action, Decision, decide_delete, decide_truncated};
use braid_gir::Truncate;
use braid_node::registry;
use braid_postgres::error::PgError;
use braid_postgres::{compat, ffi};
use pgrx::pg_sys;

use super::change::Key;
use super::doing::Step;
use super::lookup::{Found, writer};
use super::relation::{self, RemoteRelation};
use super::row_context::RowContext;
use super::table::OpenTable;
use super::version::{Stamp, is_copied, stamp_of};
use super::{Current, Session, scan};

/// A table that is to be truncated, locked and open.
pub(super) struct Emptied {
    pub(super) key: Key,
    pub(super) relation: pg_sys::Relation,
    /// It has rows whose versions can be read.
    pub(super) is_heap: bool,
}

/// What rows of one transaction can be passed over with.
type Gone = Option<pg_sys::TransactionId>;

fn whole_lock() -> i32 {
    i32::try_from(pg_sys::AccessExclusiveLock).unwrap_or(8)
}

impl Session {
    /// Truncate what the provider truncated, partitions included. Tables that are not part of the subscription, or are
    /// copied from a later state, are left out; CASCADE was resolved at the provider.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn truncate(&mut self, truncate: &Truncate<'_>) -> Result<(), PgError> {
        self.flush()?;
        let first = truncate.schemas().next().map(|schema| schema.0);
        self.does(Step::Truncate, first);
        let Some(current) = self.current().cloned() else {
            return Err(PgError::new(
                "08P01",
                "truncate outside of a transaction from the provider",
            ));
        };
        // Open tables hold scans and slots; TRUNCATE wants to be alone with the table.
        self.close_tables();
        let remembers = registry::remembers_deletions();
        let mut has_waited = false;
        let (roots, tables) = loop {
            let (mut roots, mut routes) = (Vec::new(), Vec::new());
            for schema in truncate.schemas() {
                let remote = self.remote(schema.0)?;
                let route = self.route(schema.0, &remote)?;
                if self.takes(&route, &current, false)? {
                    roots.push((schema.0, route.oid.to_u32()));
                    routes.push(route);
                }
            }
            if roots.is_empty() {
                return Ok(());
            }
            // Before the collector, who looks at rows, has to wait for this transaction.
            // SAFETY: in a transaction.
            if remembers && !has_waited && unsafe { says_whole_rows(&roots) } {
                self.wait_for_sessions()?;
                has_waited = true;
            }
            // SAFETY: in a transaction.
            let tables = unsafe { lock_below(&roots)? };
            // Taking the locks may have shown that a table was copied meanwhile.
            if routes.iter().all(|route| self.is_current(route)) {
                break (roots, tables);
            }
            close(&tables);
        };
        if remembers && self.has_truncated(&tables, &current)? {
            close(&tables);
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
            self.remember_truncation(table.key, current.timestamp)?;
        }
        if remembers {
            self.free_removals(&tables, &current)?;
        }
        self.close_tables();
        close(&tables);
        self.work_as_self();
        self.attempt().counts.truncates += roots.len() as u64;
        // A table that nothing else has been done to need not be known by this schema yet.
        self.attempt()
            .truncated
            .extend(roots.iter().map(|(_, relation)| *relation));
        Ok(())
    }

    /// Whether all of the tables were truncated by this very transaction, which came by another way, or a newer one: nothing older is here. To
    /// carry it out again would send it on again, and around for ever where nodes forward to each other. Straight from its origin it comes
    /// once, and by its order.
    fn has_truncated(&mut self, tables: &[Emptied], current: &Current) -> Result<bool, PgError> {
        if current.from_origin {
            return Ok(false);
        }
        for table in tables {
            if !self.is_truncated_since(table.key, current)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Truncate tables with all that is in them.
    fn empty_whole(&mut self, tables: &[Emptied], restart_identity: bool) -> Result<(), PgError> {
        if let Some(user) = self.identity.run_as {
            self.work_as(pg_sys::Oid::from(user));
        }
        // SAFETY: in a transaction; relations are open with the lock that ExecuteTruncateGuts wants, the lists live in the
        // transaction's context.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
            let mut relations = std::ptr::null_mut();
            let mut relation_oids = std::ptr::null_mut();
            let mut logged = std::ptr::null_mut();
            let mut owners: Vec<pg_sys::Oid> = Vec::new();
            let mut has_triggers = false;
            for Emptied { relation, .. } in tables {
                let form = (**relation).rd_rel;
                let oid = (**relation).rd_id;
                owners.push((*form).relowner);
                has_triggers |= !(**relation).trigdesc.is_null();
                relations = pg_sys::lappend(relations, (*relation).cast());
                relation_oids = pg_sys::lappend_oid(relation_oids, oid);
                if (*form).relpersistence.cast_unsigned() == b'p' {
                    logged = pg_sys::lappend_oid(logged, oid);
                }
            }
            // From 16 on PostgreSQL itself goes from owner to owner; before, a trigger would run with this process's rights.
            if self.identity.run_as.is_none()
                && let Some(first) = owners.first()
            {
                if owners.iter().all(|owner| owner == first) {
                    self.work_as(*first);
                } else if has_triggers && compat::TRUNCATES_AS_CALLER {
                    return Err(PgError::new(
                        "0A000",
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
            compat::execute_truncate(
                relations,
                relation_oids,
                logged,
                restart_identity,
                self.identity.run_as.is_none(),
            );
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::CommandCounterIncrement();
            pg_sys::UpdateActiveSnapshotCommandId();
        }
        Ok(())
    }

    /// Whether any row of the tables stays, or is to be recorded.
    fn has_conflicts(&mut self, tables: &[Emptied], current: &Current) -> Result<bool, PgError> {
        let mut found = false;
        for table in tables.iter().filter(|table| table.is_heap) {
            let remote = self.open_emptied(table)?;
            let context = RowContext {
                key: table.key,
                remote: &remote,
                current,
            };
            self.each_row(context, &mut |_, fate| {
                found = !matches!(fate, Fate::Goes(None));
                Ok(!found)
            })?;
            if found {
                break;
            }
        }
        Ok(found)
    }

    /// Delete what does not stay, in all of the tables: a foreign key does not let one be truncated without those that refer to it. Their
    /// sequences go on, as rows with their numbers may have stayed.
    fn empty_by_row(&mut self, tables: &[Emptied], current: &Current) -> Result<(), PgError> {
        for before in [true, false] {
            for table in tables {
                self.open_emptied(table)?;
                self.work_as_owner_of(table.key);
                self.open(table.key)?.fire_truncate(before);
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
        self.each_row(context, &mut |session, fate| {
            let slot = session.open(key)?.local_slot();
            if let Fate::Goes(Some((found, decision))) | Fate::Stays((found, decision)) = fate
                && decision.conflict.is_some()
            {
                let rows = session.rows(key, true, None)?;
                session.record(context, found, decision, rows)?;
            }
            if matches!(fate, Fate::Goes(_)) {
                deleted = true;
                // SAFETY: the slot holds a row of the table, which nobody else can change.
                unsafe {
                    let mut place = (*slot).tts_tid;
                    pg_sys::simple_heap_delete(table.relation, &raw mut place);
                }
                session.note_gone(key, current);
                session.keep_deleted(key, OpenTable::local_slot)?;
            }
            Ok(true)
        })?;
        if deleted {
            // SAFETY: what was deleted is gone for what follows in this transaction.
            unsafe {
                pg_sys::CommandCounterIncrement();
                pg_sys::UpdateActiveSnapshotCommandId();
            }
        }
        Ok(())
    }

    /// Set a table up for applying.
    pub(super) fn open_emptied(&mut self, table: &Emptied) -> Result<Rc<RemoteRelation>, PgError> {
        let (schema, oid) = table.key;
        let remote = self.remote(schema)?;
        self.work_as_self();
        self.open_table(schema, &remote, pg_sys::Oid::from(oid))?;
        // SAFETY: the context lives as long as the process; what was in it belongs to the change before.
        unsafe {
            pg_sys::MemoryContextSwitchTo(self.change_context);
            pg_sys::MemoryContextReset(self.change_context);
        }
        Ok(remote)
    }

    /// Look at each row of an open table, in its local slot, and at what becomes of it; until `look` says no.
    fn each_row(
        &mut self,
        context: RowContext<'_>,
        look: &mut dyn FnMut(&mut Self, Fate) -> Result<bool, PgError>,
    ) -> Result<(), PgError> {
        let RowContext { key, .. } = context;
        let table = self.open(key)?;
        let (relation, slot) = (table.relation(), table.local_slot());
        // SAFETY: the table is open and locked against everybody; the slot is of its kind. The scan ends before its snapshot, and lives in
        // the transaction's context.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
            pg_sys::CommandCounterIncrement();
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let rows = scan::begin(relation, snapshot)?;
            pg_sys::MemoryContextSwitchTo(before);
            let mut gone = None;
            let mut result = Ok(true);
            while matches!(result, Ok(true)) && scan::next(relation, rows, slot) {
                pgrx::check_for_interrupts!();
                result = self
                    .fate(context, &mut gone)
                    .and_then(|fate| look(self, fate));
                pg_sys::MemoryContextReset(self.change_context);
            }
            super::clear_slot(slot);
            scan::end(relation, rows);
            pg_sys::UnregisterSnapshot(snapshot);
            result.map(|_| ())
        }
    }

    /// What becomes of the row in the local slot of an open table. `gone` is a transaction whose rows all go.
    fn fate(&mut self, context: RowContext<'_>, gone: &mut Gone) -> Result<Fate, PgError> {
        let RowContext { key, current, .. } = context;
        let slot = self.open(key)?.local_slot();
        // SAFETY: the slot holds a row of a heap.
        let xid = unsafe { writer(slot) };
        if *gone == Some(xid) {
            return Ok(Fate::Goes(None));
        }
        let stamp = stamp_of(xid);
        let plan = &self.target(key)?.plan;
        // Rows of a batch are no newer than its commit says; one that was merged, or copied, may be.
        let is_common = !plan.rules.may_have_merged_rows()
            && match stamp {
                Stamp::Unversioned => plan.copied_from.is_empty() || !is_copied(xid),
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
            _ => self.refined(key, slot, stamp)?,
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
        let decision = decide_truncated(decision, self.local(found), context.version());
        Ok((found, decision))
    }
}

/// Close what was opened by `lock_below`.
fn close(tables: &[Emptied]) {
    for table in tables {
        // SAFETY: opened once, and closed once; the lock stays until commit.
        unsafe {
            pg_sys::relation_close(table.relation, i32::try_from(pg_sys::NoLock).unwrap_or(0));
        }
    }
}

/// What becomes of a row.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// It is deleted; how that was decided, if it is a conflict.
    Goes(Option<(Found, Decision)>),
    /// It is newer, or a rule has it stay.
    Stays((Found, Decision)),
}

/// Whether changes of any of these tables, or of their partitions, say whole rows.
///
/// # Safety
/// In a transaction.
unsafe fn says_whole_rows(roots: &[Key]) -> bool {
    // SAFETY: as the caller says; a table that is gone by now has no row of pg_class.
    unsafe {
        let lock = i32::try_from(pg_sys::NoLock).unwrap_or(0);
        roots.iter().any(|(_, root)| {
            emptied_with(pg_sys::Oid::from(*root), lock)
                .into_iter()
                .any(|oid| {
                    let cache = pg_sys::SysCacheIdentifier::RELOID.cast_signed();
                    let tuple = pg_sys::SearchSysCache1(cache, oid.into());
                    if tuple.is_null() {
                        return false;
                    }
                    let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_class>();
                    let says = (*form).relreplident.cast_unsigned() == b'f';
                    pg_sys::ReleaseSysCache(tuple);
                    says
                })
        })
    }
}

/// The tables that a truncate of this one empties, itself first: its partitions too. An ordinary table's children are named by the provider.
///
/// # Safety
/// In a transaction.
unsafe fn emptied_with(root: pg_sys::Oid, lock: i32) -> Vec<pg_sys::Oid> {
    // SAFETY: as the caller says; a lock by OID needs no table. The list is only read.
    unsafe {
        if lock != 0 {
            pg_sys::LockRelationOid(root, lock);
        }
        if pg_sys::get_rel_relkind(root).cast_unsigned() != b'p' {
            return vec![root];
        }
        let below = ffi::find_all_inheritors(root, lock);
        (0..compat::list_length(below))
            .map(|position| compat::list_oid(below, position))
            .collect()
    }
}

/// Lock and open these tables and their partitions.
///
/// # Errors
/// 42809 when one of them is a foreign table; 42P01 when one is gone.
///
/// # Safety
/// In a transaction. Opened tables are closed in it, unless it is rolled back.
unsafe fn lock_below(roots: &[Key]) -> Result<Vec<Emptied>, PgError> {
    let lock = whole_lock();
    let mut tables: Vec<Emptied> = Vec::new();
    let mut seen = HashSet::new();
    // SAFETY: as the caller says; the lists live in the transaction's context.
    unsafe {
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
        for (schema, root) in roots {
            for oid in emptied_with(pg_sys::Oid::from(*root), lock) {
                if !seen.insert(oid) {
                    continue;
                }
                let relation = pg_sys::try_relation_open(oid, lock);
                if relation.is_null() {
                    return Err(relation::dropped());
                }
                let form = (*relation).rd_rel;
                relation::check_kind(relation)?;
                tables.push(Emptied {
                    key: (*schema, oid.to_u32()),
                    relation,
                    is_heap: (*form).relkind.cast_unsigned() == b'r'
                        && (*form).relam == pg_sys::HEAP_TABLE_AM_OID,
                });
            }
        }
        pg_sys::MemoryContextSwitchTo(before);
    }
    Ok(tables)
}
