//! Finds the local row of a change, by its key or by all of its values, and its version. Run by the
//! appliers.

use std::collections::BTreeSet;

use braid_bgworker::conflict::Version;
use braid_bgworker::keyless;
use braid_bgworker::sqlstate::SqlState;
use braid_node::registry;
use braid_postgres::error::PgError;
use braid_postgres::heap_page::Place;
use braid_postgres::relation::RelationRef;
use braid_postgres::slot::Slot;
use braid_postgres::syscache::IndexRow;
use braid_postgres::tuple_desc::Attribute;
use pgrx::pg_sys;

use super::decision::version;
use crate::batch::{KnownVersions, WrittenVersions};
use crate::copied::Told;
use crate::key_hash::key_hash;
use crate::lookup::{Found, Purpose};
use crate::relation::{LocalRelation, RemoteRelation};
use crate::table::{OpenTable, RowValues};
use crate::target::{Key, Tables};
use crate::version::{OriginNames, Stamp};
use crate::{Current, Session, Target, copied};

/// Data that tell the versions of rows of a table, while rows are looked up.
struct RowVersions<'s> {
    plan: &'s LocalRelation,
    known: &'s mut KnownVersions,
    written: &'s WrittenVersions,
    origins: &'s mut OriginNames,
    current: Option<&'s Current>,
}

impl RowVersions<'_> {
    /// Returns the version of the row in a slot, given `stamp`, the version of its transaction.
    fn of(
        &mut self,
        xid: pg_sys::TransactionId,
        slot: &Slot,
        stamp: Stamp,
    ) -> Result<Stamp, PgError> {
        let plan = self.plan;
        let stamp = match copied::told(plan, xid, slot, stamp)? {
            Told::ByTransaction(stamp) => stamp,
            Told::Apart(stamp) => return Ok(stamp),
        };
        if let Stamp::Known(_, origin) = stamp {
            // A change straight from the origin that wrote the row is newer, whatever the row's
            // time. Not if the row was merged with something that the origin had not seen. In
            // tables without a key, the time of a removed row is stored, so it is needed.
            let trusted = !plan.rules.may_have_merged_rows()
                && (plan.key.is_some() || !registry::remembers_deletions())
                && self.current.is_some_and(|current| {
                    current.from_origin && self.origins.node(origin) == &*current.origin
                });
            if origin == 0 || trusted {
                return Ok(stamp);
            }
        }
        let hash = || key_hash(plan, slot);
        self.known.refine(self.written, xid, stamp, hash)
    }

    /// Whether the current transaction may remove a row of this version from a table without a key.
    /// If other rules than versions decide, or the transaction has no version yet, any identical
    /// row will do.
    fn takes(&mut self, stamp: Stamp) -> bool {
        let Some(current) = self.current else {
            return true;
        };
        let (Stamp::Known(timestamp, origin) | Stamp::Merged(timestamp, origin)) = stamp else {
            return true;
        };
        if current.unsettled || !self.plan.rules.go_by_versions() {
            return true;
        }
        let row = Version {
            timestamp,
            origin: self.origins.node(origin),
        };
        keyless::takes(row, version(current), current.from_origin)
    }
}

impl Tables {
    /// Returns the place of the row that was found last.
    pub(super) fn found_at(&self, key: Key) -> Option<Place> {
        let target = self.get(key)?;
        target.table.as_ref().map(OpenTable::found_at)
    }
}

impl Session {
    /// Whether a row that is found in the table must be locked before it is written.
    pub(super) fn needs_lock(&self, key: Key) -> bool {
        self.hints.check_other_keys
            || self
                .tables
                .get(key)
                .and_then(|target| target.table.as_ref())
                .is_none_or(|table| !(table.is_plain() && table.has_key()))
    }

    /// Finds the row that `values` identify for a purpose, and locks it if that is asked for. For
    /// an insert, a deletion that is older than it need not be known.
    pub(crate) fn find(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        values: &RowValues,
        how: (Purpose, bool),
    ) -> Result<Found, PgError> {
        match self.find_here(key, remote, values, how)? {
            Found::Missing(stamp) => {
                self.check_left_for_now(key, values)?;
                self.deletions()
                    .recall(key, values, stamp, matches!(how, (Purpose::Insert, _)))
            }
            found @ Found::Row(_) => Ok(found),
        }
    }

    pub(crate) fn find_here(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        values: &RowValues,
        how: (Purpose, bool),
    ) -> Result<Found, PgError> {
        // No other session has seen a row that this transaction adds to a table without a key and
        // removes again.
        let added = self.attempt.as_ref().map(|attempt| &attempt.added);
        let mut prefers_own =
            added.is_some_and(|added| self.tables.may_be_among(added, key, values));
        let Self {
            tables,
            known_versions,
            origins,
            attempt,
            ..
        } = self;
        let attempt = attempt.get_or_insert_default();
        let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = tables.get_mut(key)
        else {
            return Err(PgError::new(SqlState::InternalError, "table is not open"));
        };
        let mut versions = RowVersions {
            plan,
            known: known_versions,
            written: &attempt.written,
            origins,
            current: attempt.current.as_ref(),
        };
        if let Some(index) = &plan.key
            && table.has_key()
        {
            return table.find(values, index, how, &mut |xid, slot, stamp| {
                versions.of(xid, slot, stamp)
            });
        }
        if remote.identity == braid_gir::ReplicaIdentity::Full {
            // Rows that are newer than the change, and were written by others.
            let mut passed_over = Vec::new();
            let mut older = None;
            loop {
                let found = table.find_by_scan(values, &passed_over)?;
                let Found::Row(stamp) = found else {
                    let Some(place) = older.take() else {
                        return Ok(found);
                    };
                    // The row is locked, and so still there.
                    prefers_own = false;
                    passed_over.retain(|passed| *passed != place);
                    continue;
                };
                let slot = table.local_slot();
                let stamp = versions.of(slot.writer(), &slot, stamp)?;
                if plan.key.is_some() || versions.takes(stamp) {
                    if !prefers_own || matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
                        return Ok(Found::Row(stamp));
                    }
                    older.get_or_insert(table.found_at());
                }
                passed_over.push(table.found_at());
            }
        }
        let hint = if has_generated_key(table.relation(), remote) {
            "A key of the table has a generated column, which the provider does not send. At the provider, run ALTER TABLE ... REPLICA IDENTITY \
             USING INDEX with a unique index of ordinary columns, which the table here has too. Then run braid.resync_table and \
             braid.enable_subscription."
        } else {
            "Create the primary key or unique index that the provider's table has."
        };
        Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "table \"{}\" has no unique index here on the provider's replica identity",
                remote.qualified_name()
            ),
        )
        .with_hint(hint))
    }
}

/// Returns whether a key of the table is the provider's replica identity, but for generated
/// columns, which the provider does not send.
fn has_generated_key(relation: RelationRef<'_>, remote: &RemoteRelation) -> bool {
    let shape = relation.descriptor();
    let column = |number: &i16| shape.get(usize::try_from(*number).ok()?.checked_sub(1)?);
    let sent = remote.columns.iter().filter(|column| column.identity);
    let sent: BTreeSet<&str> = sent.map(|column| column.name.as_str()).collect();
    [relation.primary_key_index(), relation.replica_index()]
        .into_iter()
        .filter_map(IndexRow::find)
        .any(|index| {
            let columns: Vec<Attribute<'_>> =
                index.key_columns().iter().filter_map(column).collect();
            let ordinary = columns.iter().filter(|column| !column.is_generated());
            let ordinary: BTreeSet<String> = ordinary.map(|column| column.name()).collect();
            ordinary.len() < columns.len()
                && ordinary.iter().map(String::as_str).eq(sent.iter().copied())
        })
}
