//! Tables without a key, in which rows are found by all of their values (`braid_bgworker::keyless`): what was to be taken out and was not here is
//! remembered for the row that it was meant for. Run by the appliers.
//!
//! Such a removal is a row of `braid.tombstone` under the hash of all values that came, and goes like others do when nothing older can come
//! any more. Unlike theirs each counts once: a row that meets one does not come, and takes it away.
//!
//! Two streams may bring a row and its removal at the same time. Who removes writes that down, and then looks for the row once more; who
//! inserts looks at what others are writing down afterwards: one of them sees the other.

use braid_bgworker::conflict::{Action, Decision, Version, decide_insert};
use braid_bgworker::keyless;
use pgrx::pg_sys;

use super::change::{Key, version};
use super::deletion::session_origin;
use super::key_hash::RowHash;
use super::lookup::Found;
use super::relation::RemoteRelation;
use super::table::RowValues;
use super::version::known;
use super::{Current, Session};
use crate::error::PgError;
use crate::registry;
use crate::subscription::execute_counting;
use crate::tombstone::{self, Seen};

/// A removal that has found no row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Removal {
    hash: u64,
    timestamp: i64,
    origin: pg_sys::RepOriginId,
}

impl Removal {
    /// What is known, then, of a row that is to come.
    pub(super) fn found(self) -> Found {
        Found::Missing(Some(known(self.timestamp, self.origin)))
    }
}

impl Session {
    /// Whether removals of a table's rows are remembered.
    pub(super) fn is_bag(&self, key: Key) -> bool {
        self.targets
            .get(&key)
            .is_some_and(|target| target.plan.key.is_none())
            && registry::remembers_deletions()
    }

    /// The hash of all values that came. `None` where the table has a key, or a value is not in the change.
    fn row_hash(&self, key: Key, values: &RowValues) -> Option<u64> {
        let target = self.targets.get(&key)?;
        let table = target.table.as_ref()?;
        if target.plan.key.is_some() {
            return None;
        }
        let mut hash = RowHash::new(target.plan.row_hash);
        for column in &target.plan.columns {
            let value = values.get(column.local).copied().flatten()?;
            // SAFETY: the table is open, and the value is one of the column.
            unsafe {
                let descriptor = (*table.relation()).rd_att;
                hash.feed(column.name_hash, descriptor, column.local, value);
            }
        }
        Some(hash.finish())
    }

    /// Whether a row that is to be inserted may meet a removal.
    pub(super) fn may_meet_removal(&self, key: Key, values: &RowValues, timestamp: i64) -> bool {
        self.may_be_removed(key, values, timestamp).is_some()
    }

    /// The same, with the hash by which that is known.
    fn may_be_removed(&self, key: Key, values: &RowValues, since: i64) -> Option<u64> {
        if !registry::may_have_tombstone_since(since) {
            return None;
        }
        self.row_hash(key, values)
            .filter(|hash| registry::may_have_tombstone(*hash, since))
    }

    /// A row is to be taken out of a table without a key, and is not here. Write that down, and look again: true if it has come meanwhile.
    pub(super) fn removed_row_has_come(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        current: &Current,
        old: &RowValues,
    ) -> Result<bool, PgError> {
        if !self.is_bag(key) {
            return Ok(false);
        }
        let Some(hash) = self.row_hash(key, old) else {
            return Ok(false);
        };
        let removal = Removal {
            hash,
            timestamp: current.timestamp,
            origin: session_origin(),
        };
        self.entomb(key, hash, (removal.timestamp, removal.origin))?;
        self.store_tombstones()?;
        if matches!(self.find_here(key, remote, old, true)?, Found::Missing(_)) {
            return Ok(false);
        }
        self.spend(key, removal)?;
        Ok(true)
    }

    /// The removal that was meant for a row that is to come, and what is decided about that then: it stays away, unless a rule says otherwise.
    pub(super) fn removal_of(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        current: &Current,
        row: &RowValues,
    ) -> Result<Option<(Removal, Decision)>, PgError> {
        let since = if current.runs { 1 } else { current.timestamp };
        if !self.is_bag(key) {
            return Ok(None);
        }
        let Some(hash) = self.may_be_removed(key, row, since) else {
            return Ok(None);
        };
        self.store_tombstones()?;
        let removals = self.removals(hash, Seen::Committed)?;
        if current.runs && !removals.is_empty() {
            return Err(self.wait_for_commit("It brings a row that was to be taken out before."));
        }
        let Some(removal) = self.meant(&removals, current) else {
            return Ok(None);
        };
        let mut decision = self.decide(key, remote, current, removal.found(), decide_insert)?;
        if decision.action == Action::Ask {
            let local = self.local(removal.found());
            decision = decide_insert(local, version(current), current.from_origin);
        }
        Ok((decision.action == Action::Keep).then_some((removal, decision)))
    }

    /// A row without a key was just inserted. Not if another stream has removed it just now: then the transaction is applied again.
    pub(super) fn check_not_removed(
        &mut self,
        key: Key,
        current: &Current,
        row: &RowValues,
    ) -> Result<(), PgError> {
        let Some(hash) = self.may_be_removed(key, row, current.timestamp) else {
            return Ok(());
        };
        let all = self.removals(hash, Seen::All)?;
        let rules = self.target(key)?.plan.rules;
        match self.meant(&all, current) {
            Some(_) if rules.go_by_versions() => Err(PgError::new(
                "40001",
                "row was removed by another subscription's transaction at the same time",
            )),
            _ => Ok(()),
        }
    }

    /// It has done what it was remembered for.
    pub(super) fn spend(&mut self, key: Key, removal: Removal) -> Result<(), PgError> {
        self.user.restore();
        let spent = execute_counting(
            "delete from braid.tombstone where ctid = (select ctid from braid.tombstone \
             where key_hash = $1 and (deleted_at = $2 or deleted_at = 0) and origin_id = $3 order by deleted_at desc limit 1 for update)",
            &[
                removal.hash.cast_signed().into(),
                removal.timestamp.into(),
                i32::from(removal.origin).into(),
            ],
        )?;
        self.work_as_owner_of(key);
        // SAFETY: the context lives as long as the process.
        unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
        if spent == 0 {
            return Err(PgError::new(
                "40001",
                "a removal counted for another row at the same time",
            ));
        }
        Ok(())
    }

    fn removals(&mut self, hash: u64, seen: Seen) -> Result<Vec<Removal>, PgError> {
        // SAFETY: in a transaction.
        let before = unsafe { pg_sys::MemoryContextSwitchTo(pg_sys::CurTransactionContext) };
        let found = tombstone::find_all(hash, seen);
        // SAFETY: the caller's.
        unsafe { pg_sys::MemoryContextSwitchTo(before) };
        let removal = |(timestamp, origin)| Removal {
            hash,
            timestamp,
            origin,
        };
        Ok(found?.into_iter().map(removal).collect())
    }

    fn meant(&mut self, removals: &[Removal], current: &Current) -> Option<Removal> {
        let names: Vec<String> = removals
            .iter()
            .map(|removal| self.origins.node(removal.origin).to_owned())
            .collect();
        let versions: Vec<Version<'_>> = removals
            .iter()
            .zip(&names)
            .map(|(removal, origin)| Version {
                timestamp: removal.timestamp,
                origin,
            })
            .collect();
        let place = keyless::removal_of(&versions, version(current), current.from_origin)?;
        removals.get(place).copied()
    }
}
