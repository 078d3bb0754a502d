//! Stores the deletions of this transaction, and looks up the deletion of a row whose dead version
//! is gone (`braid_node::tombstone`). Run by the appliers.

use braid_bgworker::conflict::Version;
use braid_bgworker::sqlstate::SqlState;
use braid_node::origin::{self, OriginId};
use braid_node::registry;
use braid_node::tombstone::{self, Seen, Tombstone};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::memory::{self, Scratch};
use braid_postgres::slot::Slot;

use super::attempt::{Attempt, RetryHints};
use super::change::version;
use super::held_removals::Room;
use super::key_hash::{
    KeyHashes, key_hash_of_values, key_hashes_as, key_hashes_of_values, known_by, known_by_values,
    table_hash,
};
use super::lookup::{Found, Purpose};
use super::relation::RemoteRelation;
use super::rights::Rights;
use super::table::{OpenTable, RowValues};
use super::target::{Key, Tables};
use super::version::{OriginNames, Stamp, known};
use super::{Current, Session, Target};

type Deletion = Option<(i64, ReplOriginId)>;

impl Tables {
    /// Whether deletions of a table's rows are to be remembered.
    pub(super) fn remembers(&self, key: Key) -> bool {
        let has_key = |target: &Target| target.plan.key.is_some();
        self.get(key).is_some_and(has_key) && registry::remembers_deletions()
    }

    /// Returns the hashes of the row with these values.
    pub(super) fn key_hashes(&self, key: Key, values: &RowValues) -> Option<KeyHashes> {
        let target = self.get(key)?;
        let table = target.table.as_ref()?;
        key_hashes_of_values(target.plan.oid.to_u32(), &target.plan, |column| {
            table.cell(values, column).flatten()
        })
    }

    /// Returns the hash that a batch's record has for the row with these values.
    pub(super) fn stored_key_hash(&self, key: Key, values: &RowValues) -> Option<u64> {
        let target = self.get(key)?;
        let table = target.table.as_ref()?;
        key_hash_of_values(&target.plan, |column| table.cell(values, column).flatten())
    }

    /// Returns the hashes under which deletions of a row may be stored: local ones, and those that
    /// a copy has brought from the provider.
    pub(super) fn hashes(&self, key: Key, values: &RowValues) -> Vec<u64> {
        let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = self.get(key)
        else {
            return Vec::new();
        };
        let cell = |column| table.cell(values, column).flatten();
        let known_by = |seed| known_by_values(seed, plan, &cell);
        let from = plan.copied_from.iter();
        let copied = from.flat_map(|from| from.hashes(known_by));
        let here = known_by(plan.oid.to_u32());
        here.flat_map(KeyHashes::each).chain(copied).collect()
    }

    /// As [`Tables::hashes`], for truncates of the table.
    fn table_hashes(&self, key: Key) -> Vec<u64> {
        let from = self.get(key).map(|target| &target.plan.copied_from);
        let copied = from.into_iter().flatten().map(|from| from.table_hash());
        std::iter::once(table_hash(key.1)).chain(copied).collect()
    }

    /// Whether one of these rows, which are to be inserted, may have a tombstone, given the times
    /// of their transactions.
    pub(super) fn may_meet_tombstone<'a>(
        &self,
        key: Key,
        mut rows: impl Iterator<Item = (&'a RowValues, i64)>,
    ) -> bool {
        let tables = self.table_hashes(key);
        rows.any(|(values, timestamp)| {
            let may = |hash| registry::may_have_tombstone(hash, timestamp);
            registry::may_have_tombstone_since(timestamp)
                && (tables.iter().copied().any(may)
                    || self.hashes(key, values).into_iter().any(may))
        })
    }
}

impl OriginNames {
    /// Returns the newest deletion of the row with this hash. Its memory is freed with the current
    /// transaction.
    fn newest_deletion(&mut self, hash: u64, seen: Seen) -> Result<Deletion, PgError> {
        let newest = memory::in_transaction(|| tombstone::find_each(hash, seen));
        let newest = newest?.into_iter();
        Ok(newest.fold(None, |newest, deletion| self.newer(newest, Some(deletion))))
    }

    /// Returns the newer of two deletions.
    fn newer(&mut self, one: Deletion, other: Deletion) -> Deletion {
        let (Some((at, origin)), Some((other_at, other_origin))) = (one, other) else {
            return one.or(other);
        };
        let order = at.cmp(&other_at).then_with(|| {
            let name = self.node(origin).to_owned();
            name.as_bytes().cmp(self.node(other_origin).as_bytes())
        });
        if order.is_lt() { other } else { one }
    }
}

/// The parts of a session that store the current transaction's deletions, and look up those of
/// others.
pub(super) struct Deletions<'s> {
    pub(super) tables: &'s Tables,
    pub(super) attempt: &'s mut Attempt,
    pub(super) origins: &'s mut OriginNames,
    pub(super) hints: &'s mut RetryHints,
    /// Origins under which this stream has brought rows.
    same_stream: Option<&'s [OriginId]>,
    /// User to apply as; `None`: each table's owner.
    run_as: Option<u32>,
    change_context: &'s Scratch,
}

impl Deletions<'_> {
    /// Returns the rights with which the work is done.
    pub(super) fn rights(&mut self) -> Rights<'_> {
        Rights {
            user: &mut self.attempt.user,
            tables: self.tables,
            run_as: self.run_as,
            change_context: self.change_context,
        }
    }

    /// Stores that the row in a slot was just deleted by a transaction of this time.
    pub(super) fn remember(
        &mut self,
        key: Key,
        timestamp: i64,
        slot: impl Fn(&OpenTable) -> Slot,
    ) -> Result<(), PgError> {
        self.remember_as(key, (timestamp, session_origin()), slot)
    }

    /// Stores that the row in a slot was just deleted, with this version.
    pub(super) fn remember_as(
        &mut self,
        key: Key,
        version: (i64, ReplOriginId),
        slot: impl Fn(&OpenTable) -> Slot,
    ) -> Result<(), PgError> {
        self.keep_deleted(key, &slot)?;
        if !self.tables.remembers(key) {
            return Ok(());
        }
        let hashes = match self.tables.get(key) {
            Some(Target {
                plan,
                table: Some(table),
                ..
            }) => key_hashes_as(plan.oid.to_u32(), plan, &slot(table)),
            _ => return Ok(()),
        };
        self.record_tombstones(key, hashes, version)
    }

    /// Checks the row in a slot, which was just inserted because none was found. If another stream
    /// has deleted it at the same time, with a newer version, fails with 40001: the transaction is
    /// applied again.
    pub(super) fn check_not_deleted(
        &mut self,
        key: Key,
        current: &Current,
        slot: &Slot,
    ) -> Result<(), PgError> {
        if !registry::may_have_tombstone_since(current.timestamp) {
            return Ok(());
        }
        let Some(Target { plan, .. }) = self.tables.get(key) else {
            return Ok(());
        };
        if plan.key.is_none() {
            return Ok(());
        }
        let hashes = known_by(plan.oid.to_u32(), plan, slot);
        let mut newest = None;
        for hash in hashes.flat_map(KeyHashes::each) {
            if registry::may_have_tombstone(hash, current.timestamp) {
                let deletion = self.origins.newest_deletion(hash, Seen::All)?;
                newest = self.origins.newer(newest, deletion);
            }
        }
        let Some((timestamp, origin)) = newest else {
            return Ok(());
        };
        let alone = self.origins.alone;
        if alone.is_some_and(|alone| alone.has_evicted(timestamp, origin)) {
            return Ok(());
        }
        let deleted = Version {
            timestamp,
            origin: self.origins.node(origin),
        };
        if deleted.origin == &*current.origin || deleted < version(current) {
            return Ok(());
        }
        Err(PgError::new(
            SqlState::SerializationFailure,
            "row was deleted by another subscription's transaction at the same time",
        ))
    }

    /// Stores that a transaction of this time has left no row with the key of these values.
    pub(super) fn remember_absence(
        &mut self,
        key: Key,
        timestamp: i64,
        values: &RowValues,
    ) -> Result<(), PgError> {
        if !self.tables.remembers(key) {
            return Ok(());
        }
        match self.tables.key_hashes(key, values) {
            Some(hashes) => self.record_tombstones(key, hashes, (timestamp, session_origin())),
            None => Ok(()),
        }
    }

    /// Stores that the current transaction has truncated a table: older rows that come later are
    /// not written.
    pub(super) fn remember_truncation(&mut self, key: Key, timestamp: i64) -> Result<(), PgError> {
        if !registry::remembers_deletions() {
            return Ok(());
        }
        self.record_tombstone(key, table_hash(key.1), (timestamp, session_origin()))
    }

    /// Whether another transaction that is newer than the current one has truncated a table, or the
    /// current one itself has, when it came over another subscription.
    pub(super) fn is_truncated_since(
        &mut self,
        key: Key,
        current: &Current,
    ) -> Result<bool, PgError> {
        let hash = table_hash(key.1);
        if !registry::may_have_tombstone(hash, current.timestamp) {
            return Ok(false);
        }
        let Some((timestamp, origin)) = self.origins.newest_deletion(hash, Seen::Committed)? else {
            return Ok(false);
        };
        // Rows may have been added after a truncate of the current transaction, or of its earlier
        // chunks.
        let same_stream = self
            .same_stream
            .is_some_and(|own| own.iter().any(|own| own.0 == origin));
        if timestamp == current.timestamp && (origin == session_origin() || same_stream) {
            return Ok(false);
        }
        let truncated = Version {
            timestamp,
            origin: self.origins.node(origin),
        };
        Ok(truncated >= version(current))
    }

    /// Stores that the row with these hashes was deleted.
    pub(super) fn record_tombstones(
        &mut self,
        key: Key,
        hashes: KeyHashes,
        version: (i64, ReplOriginId),
    ) -> Result<(), PgError> {
        hashes
            .each()
            .try_for_each(|hash| self.record_tombstone(key, hash, version))
    }

    pub(super) fn record_tombstone(
        &mut self,
        key: Key,
        hash: u64,
        (timestamp, origin): (i64, ReplOriginId),
    ) -> Result<(), PgError> {
        self.attempt.removals.delete(Tombstone {
            hash,
            relation: key.1,
            timestamp,
            origin,
        });
        self.hold_back()
    }

    /// Returns the newest known deletion of a row that was not found: that of a tombstone, if it is
    /// newer than `found`, that of the dead row versions. For an insert, only deletions count that
    /// could decide about it.
    pub(super) fn recall(
        &mut self,
        key: Key,
        values: &RowValues,
        found: Option<Stamp>,
        is_insert: bool,
    ) -> Result<Found, PgError> {
        let missing = Found::Missing(found);
        let timestamp = self.attempt.timestamp();
        if is_insert && !registry::may_have_tombstone_since(timestamp) {
            return Ok(missing);
        }
        // For other changes, any deletion counts.
        let since = if is_insert { timestamp } else { 1 };
        let mut newest = None;
        let hashes = self.tables.hashes(key, values).into_iter();
        for hash in hashes
            .chain(self.tables.table_hashes(key))
            .filter(|hash| registry::may_have_tombstone(*hash, since))
        {
            let deletion = self.origins.newest_deletion(hash, Seen::Committed)?;
            newest = self.origins.newer(newest, deletion);
        }
        Ok(match (newest, found) {
            (None, _) => missing,
            // This very transaction's deletion, here or over another subscription. Its later
            // changes are applied.
            (Some((at, origin)), _) if at == timestamp && origin == session_origin() => missing,
            (Some((timestamp, _)), Some(dead))
                if dead.timestamp().is_some_and(|dead| dead > timestamp) =>
            {
                missing
            }
            (Some((timestamp, origin)), _) => Found::Missing(Some(known(timestamp, origin))),
        })
    }

    /// Stores the deletions that are held back, if there are too many of them.
    pub(super) fn hold_back(&mut self) -> Result<(), PgError> {
        match self.attempt.removals.room(self.attempt.runs()) {
            Room::Enough => Ok(()),
            Room::ToBeStored => self.store(),
            Room::Exceeded => Err(self.hints.wait_for_commit("It deletes very many rows.")),
        }
    }

    /// Stores the deletions that are held back.
    pub(super) fn store(&mut self) -> Result<(), PgError> {
        self.attempt.store_removals()
    }
}

impl Session {
    /// Returns access to deletions, for the current transaction.
    pub(super) fn deletions(&mut self) -> Deletions<'_> {
        Deletions {
            tables: &self.tables,
            attempt: self.attempt.get_or_insert_default(),
            origins: &mut self.origins,
            hints: &mut self.hints,
            same_stream: self.same_stream.as_deref(),
            run_as: self.identity.run_as,
            change_context: &self.change_context,
        }
    }

    /// Stores the deletion of a row that was not found, and looks for the row again. Returns true
    /// if it has come meanwhile.
    ///
    /// Another stream's applier may be about to insert an older state of the row, and no row lock
    /// keeps the two apart. So each first writes its own record or row, and then looks for the
    /// other's ([`Deletions::check_not_deleted`]). At least one of them sees the other.
    pub(super) fn has_come(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        timestamp: i64,
        values: &RowValues,
    ) -> Result<bool, PgError> {
        if !self.tables.remembers(key) {
            return Ok(false);
        }
        let mut deletions = self.deletions();
        deletions.remember_absence(key, timestamp, values)?;
        deletions.store()?;
        let found = self.find_here(key, remote, values, (Purpose::Change, true))?;
        Ok(matches!(found, Found::Row(_)))
    }
}

/// Returns the origin with which this process commits.
pub(super) fn session_origin() -> ReplOriginId {
    origin::stamp().0
}
