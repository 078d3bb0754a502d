//! Removals in tables without a key, in which rows are found by all of their values
//! (`braid_bgworker::keyless`). Run by the appliers.
//!
//! A removal that finds no row is a row of `braid.tombstone`, under the hash of all values of the
//! change. It is purged as other tombstones are. Unlike them, it counts once: an incoming row that
//! meets it is not written, and uses it up.
//!
//! A removal that has taken a row is a row of `braid.taken_row`. If a later removal finds no row,
//! these records tell which row it takes over, and which removal is left without one (`hand_on`).
//! The collector writes records of removals by sessions, so an applier waits for it first.
//!
//! Two streams may bring a row and its removal at the same time. The removal writes its record, and
//! then looks for the row once more. The insert looks afterwards for records that other
//! transactions are writing. At least one of them sees the other. The same holds for two
//! transactions that change the records of identical rows (`check_alone`).

mod added;
mod hand_on;

use braid_bgworker::conflict::{Action, Decision, Version, decide_insert};
use braid_bgworker::keyless;
use braid_bgworker::sqlstate::SqlState;
use braid_node::registry;
use braid_node::taken_row::Author;
use braid_node::tombstone::{Seen, waiting};
use braid_postgres::error::PgError;

use crate::change::version;
use crate::deletion::{Deletions, session_origin};
use crate::key_hash::{RowHash, key_hash, row_hash_by};
use crate::lookup::{Found, Purpose};
use crate::row_context::RowContext;
use crate::table::{OpenTable, RowValues};
use crate::target::{Key, Tables};
use crate::version::{OriginNames, Stamp, known};
use crate::write::Written;
use crate::{Current, Session};
use hand_on::{Alike, named};

pub(crate) use added::Added;

pub(crate) use hand_on::{Live, at_the_same_time};

/// A removal that has found no row, and is meant for an incoming one.
pub(crate) struct Meant {
    hash: u64,
    removal: Author,
    /// The records about identical rows.
    alike: Alike,
}

/// An incoming row, and the removal that keeps it away.
pub(crate) struct Met {
    meant: Meant,
    /// The decision about the row: it is not written.
    pub(crate) decision: Decision,
}

impl Met {
    /// Returns the removal as the deletion of the incoming row.
    pub(crate) fn found(&self) -> Found {
        found(self.meant.removal)
    }
}

fn found((timestamp, origin): Author) -> Found {
    Found::Missing(Some(known(timestamp, origin)))
}

/// Outcome of a removal that has found no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Without {
    /// Recorded, or another one in its place, for a row that may come later.
    Remembered,
    /// An identical row was deleted for it.
    Served,
    /// A row has come, or has changed, meanwhile. Nothing was done.
    Changed,
}

impl Tables {
    /// Whether the table has no key, so that removals are recorded by all values.
    pub(crate) fn is_keyless(&self, key: Key) -> bool {
        self.get(key)
            .is_some_and(|target| target.plan.key.is_none())
            && registry::remembers_deletions()
    }

    /// Returns the hash of all values of the change. Returns `None` if the table has a key, or a
    /// value is not in the change.
    fn row_hash(&self, key: Key, values: &RowValues) -> Option<u64> {
        let target = self.get(key)?;
        let table = target.table.as_ref()?;
        if target.plan.key.is_some() {
            return None;
        }
        let mut hash = RowHash::new(target.plan.row_hash);
        for column in &target.plan.columns {
            hash.feed(column.name_hash, table.cell(values, column.local)?);
        }
        Some(hash.finish())
    }

    /// Whether a row with these values may be among those that were added to a table without a key.
    pub(crate) fn may_be_among(&self, added: &Added, key: Key, values: &RowValues) -> bool {
        added.any
            && self.is_keyless(key)
            && self
                .row_hash(key, values)
                .is_some_and(|hash| added.may_have(hash))
    }

    /// Whether a removal may be meant for a row that is to be inserted.
    pub(crate) fn may_meet_removal(&self, key: Key, values: &RowValues, timestamp: i64) -> bool {
        self.may_be_removed(key, values, timestamp).is_some()
    }

    /// As [`Tables::may_meet_removal`]; returns the hash of the row.
    fn may_be_removed(&self, key: Key, values: &RowValues, since: i64) -> Option<u64> {
        if !registry::may_have_tombstone_since(since) {
            return None;
        }
        self.row_hash(key, values)
            .filter(|hash| registry::may_have_tombstone(*hash, since))
    }
}

/// Waits until removals by sessions of this node from tables without a key are recorded, as far as
/// they were visible when the wait began.
pub(crate) fn wait_for_sessions() -> Result<(), PgError> {
    if waiting::wait_past(braid_postgres::catalog::flush_all()) {
        return Ok(());
    }
    Err(waiting::not_yet(
        "what sessions of this node have taken out of a table without a key is not known yet",
    ))
}

impl OriginNames {
    fn meant(&mut self, removals: &[Author], current: &Current) -> Option<Author> {
        let names: Vec<String> = removals
            .iter()
            .map(|(_, origin)| self.node(*origin).to_owned())
            .collect();
        let versions: Vec<Version<'_>> = removals
            .iter()
            .zip(&names)
            .map(|(removal, name)| named((*removal, name)))
            .collect();
        let place = keyless::removal_of(&versions, version(current), current.from_origin)?;
        removals.get(place).copied()
    }
}

/// The parts of a session that record removals of rows without a key, and look up those of other
/// transactions.
pub(crate) struct Removals<'s> {
    deletions: Deletions<'s>,
}

impl Removals<'_> {
    /// Notes that the current transaction has added a row.
    pub(crate) fn note_added(&mut self, key: Key, values: &RowValues) {
        let Deletions {
            tables, attempt, ..
        } = &mut self.deletions;
        if tables.is_keyless(key)
            && let Some(hash) = tables.row_hash(key, values)
        {
            attempt.added.note(hash);
        }
    }

    /// Records that the current transaction removes the row in the local slot, which was found. An
    /// older removal that was meant for it may come later.
    pub(crate) fn remember_taken(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
    ) -> Result<(), PgError> {
        let Found::Row(stamp) = found else {
            return Ok(());
        };
        let tables = self.deletions.tables;
        if !tables.is_keyless(key) || !tables.plan(key)?.rules.go_by_versions() {
            return Ok(());
        }
        let (plan, table) = tables.opened_at(key)?;
        let hash = row_hash_by(plan, &table.local_slot());
        let row = self.author(key, current, stamp)?;
        let removal = (current.timestamp, session_origin());
        self.deletions.attempt.note_taken(key, hash, row, removal);
        self.deletions.hold_back()
    }

    /// Returns the writer of the row in the local slot, which is deleted; `None`: it is older than
    /// all.
    pub(crate) fn author(
        &mut self,
        key: Key,
        current: &Current,
        stamp: Stamp,
    ) -> Result<Option<Author>, PgError> {
        if !matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
            return Ok(stamp.known());
        }
        let (plan, table) = self.deletions.tables.opened_at(key)?;
        let hash = key_hash(plan, &table.local_slot());
        let timestamp = self.deletions.attempt.written.take_alike(hash);
        Ok(Some((
            timestamp.unwrap_or(current.timestamp),
            session_origin(),
        )))
    }

    /// Returns the removal that is meant for an incoming row. Returns `None` if the row is older
    /// than a truncate, and is not written for that reason.
    fn meant_for(
        &mut self,
        key: Key,
        current: &Current,
        row: &RowValues,
    ) -> Result<Option<Meant>, PgError> {
        let since = if current.runs { 1 } else { current.timestamp };
        let tables = self.deletions.tables;
        if !tables.is_keyless(key) {
            return Ok(None);
        }
        let Some(hash) = tables.may_be_removed(key, row, since) else {
            return Ok(None);
        };
        if self.deletions.is_truncated_since(key, current)? {
            return Ok(None);
        }
        self.deletions.store()?;
        let alike = Alike::read(hash, Seen::Committed)?;
        if current.runs && !alike.removals.is_empty() {
            let reason = "It brings a row that was to be taken out before.";
            return Err(self.deletions.hints.wait_for_commit(reason));
        }
        let removal = self.deletions.origins.meant(&alike.removals, current);
        Ok(removal.map(|removal| Meant {
            hash,
            removal,
            alike,
        }))
    }

    /// Records that a removal has kept an incoming row away, and is used up by that.
    pub(crate) fn stay_away(
        &mut self,
        key: Key,
        current: &Current,
        met: Met,
    ) -> Result<(), PgError> {
        let Meant {
            hash,
            removal,
            mut alike,
        } = met.meant;
        self.spend(key, hash, removal)?;
        alike.forget(removal);
        let row = Some((current.timestamp, session_origin()));
        let attempt = &mut self.deletions.attempt;
        attempt.write_taken(key, hash, &mut alike, row, removal);
        self.check_alone(key, hash, &alike)
    }

    /// Checks a row without a key that was just inserted. If another stream has removed it at the
    /// same time, fails with 40001: the transaction is applied again.
    pub(crate) fn check_not_removed(
        &mut self,
        key: Key,
        current: &Current,
        row: &RowValues,
    ) -> Result<(), PgError> {
        let tables = self.deletions.tables;
        let Some(hash) = tables.may_be_removed(key, row, current.timestamp) else {
            return Ok(());
        };
        let all = Alike::read(hash, Seen::All)?.removals;
        let rules = tables.plan(key)?.rules;
        match self.deletions.origins.meant(&all, current) {
            Some(_) if rules.go_by_versions() => Err(PgError::new(
                SqlState::SerializationFailure,
                "row was removed by another subscription's transaction at the same time",
            )),
            _ => Ok(()),
        }
    }
}

impl Session {
    /// Returns access to removals of rows without a key.
    pub(crate) fn removals(&mut self) -> Removals<'_> {
        Removals {
            deletions: self.deletions(),
        }
    }

    /// Handles a removal whose row is not in the table: records it, looks for the row again, and
    /// then finds the row that it takes over.
    pub(crate) fn remove_without_row(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
    ) -> Result<Without, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        if !self.tables.is_keyless(key) {
            return Ok(Without::Remembered);
        }
        let Some(hash) = self.tables.row_hash(key, old) else {
            return Ok(Without::Remembered);
        };
        let removal = (current.timestamp, session_origin());
        let mut deletions = self.deletions();
        deletions.record_tombstone(key, hash, removal)?;
        deletions.store()?;
        if matches!(
            self.find_here(key, remote, old, (Purpose::Delete, true))?,
            Found::Row(_)
        ) {
            self.removals().spend(key, hash, removal)?;
            return Ok(Without::Changed);
        }
        if !self.tables.target(key)?.plan.rules.go_by_versions() {
            return Ok(Without::Remembered);
        }
        wait_for_sessions()?;
        let chain = self.removals().chain(key, hash, removal, true)?;
        let Some(chain) = chain else {
            return Ok(Without::Remembered);
        };
        let live = self.take_older(context, old, chain.last())?;
        self.removals().hand_on(chain, live)
    }

    /// Deletes a row with these values that is older than the given removal, which may be another
    /// transaction's.
    fn take_older(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
        (timestamp, origin): Author,
    ) -> Result<Live, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let as_of = Current {
            timestamp,
            origin: self.origins.node(origin).into(),
            from_origin: false,
            ..current.clone()
        };
        let now = self.attempt().current.replace(as_of);
        let found = self.find_here(key, remote, old, (Purpose::Delete, true));
        self.attempt().current = now;
        let Found::Row(stamp) = found? else {
            return Ok(Live::Nothing);
        };
        if self.tables.open(key)?.delete()? == Written::Changed {
            return Ok(Live::Changed);
        }
        self.deletions().keep_deleted(key, OpenTable::local_slot)?;
        self.count(key, |counts| counts.deletes += 1);
        Ok(Live::Gone(self.removals().author(key, current, stamp)?))
    }

    /// Returns the removal that is meant for an incoming row, if the row is not written for that
    /// reason. A rule of the table may decide otherwise.
    pub(crate) fn removal_of(
        &mut self,
        context: RowContext<'_>,
        row: &RowValues,
    ) -> Result<Option<Met>, PgError> {
        let RowContext { key, current, .. } = context;
        let Some(meant) = self.removals().meant_for(key, current, row)? else {
            return Ok(None);
        };
        let found = found(meant.removal);
        let mut decision = self.decide(context, found, decide_insert)?;
        if decision.action == Action::Ask {
            let local = self.origins.local(found);
            decision = decide_insert(local, context.version(), current.from_origin);
        }
        Ok((decision.action == Action::Keep).then_some(Met { meant, decision }))
    }
}
