//! Deletes rows that lose to another row under a further unique key, and announces the deletions.
//! `in_the_way` finds and decides the conflict; the transaction is rolled back; the steps below
//! come before its next attempt. Run by the appliers.
//!
//! Example. Tokyo inserts (1, 'ada') at 10:00, paris inserts (2, 'ada') at 10:01, and names are
//! unique. Oslo may never have both rows at once: when the loser arrives, the winner may have
//! another name. So a node that sees both rows announces that the loser is deleted.
//!
//! The announced deletion has a version just above the loser's own, not the present time. A
//! deletion with the present time would also remove what another node has written to that row
//! meanwhile and is newer than the winner. Then both rows could be lost, each at the node that knew
//! the other. With the loser's version, each key stays a register as in `braid_bgworker::conflict`:
//! it does not matter how many nodes announce the deletion, and in which order.
//!
//! 1. Delete here, in one transaction: the losers leave, with a tombstone of the announced version.
//!    For each, a row of `braid.displacement` says that it is not announced yet. An incoming loser
//!    meets the tombstone at the next attempt, and is not written.
//! 2. Announce: delete the rows of `braid.displacement`, each in a transaction of this node. The
//!    output plugin makes the announced deletion of it (`plugin::displacement`). After a crash
//!    between the steps, the manager does this step.
//!
//! An incoming row is announced only if it loses in the final state of its transaction: a later
//! change of the transaction may end the conflict.
//!
//! One attempt finds all local rows that lose ([`Session::leave_for_now`]). Each is deleted within
//! the attempt, which goes on and is rolled back at its end. If each of 3,000 rows had the attempt
//! rolled back, the transaction would be applied 3,000 times.
//!
//! If deletions are not remembered, only one node writes. If the user's function has decided, there
//! is no version to announce. In both cases the row is deleted by an ordinary deletion of this
//! node.

use std::collections::HashSet;

use braid_bgworker::conflict::{Decision, Kind};
use braid_bgworker::resolution::Resolution;
use braid_bgworker::sqlstate::SqlState;
use braid_node::origin::{self, OriginId};
use braid_node::subscription::{execute, execute_counting, rows};
use braid_postgres::composite::Formed;
use braid_postgres::error::{self, PgError};
use braid_postgres::slot::{Slot, Tuple};
use pgrx::pg_sys;

use super::change::Rows;
use super::in_the_way::Way;
use super::key_hash::{identity_hash, key_hashes_as};
use super::lookup::{Found, Purpose};
use super::merge::{self, Call};
use super::row_context::RowContext;
use super::row_version::lock_row;
use super::table::{OpenTable, RowValues};
use super::target::{Key, Tables};
use super::version::Stamp;
use super::write::Written;
use super::{Current, Session, Target};

/// Largest column, in bytes, that is announced beside the key. A row filter may need it.
const TOLD_BYTES: usize = 1024;

/// Largest number of rows that one attempt deletes.
const MOST_LEAVING: usize = 20_000;
/// Largest number of bytes of the incoming rows that win over them.
const MOST_BYTES: usize = 64 * 1024 * 1024;

const TO_BE_TOLD: &str = "insert into braid.displacement (relation, version_at, origin, displaced) values ($1::oid, $2, $3, $4)";

/// Deletions to be announced next.
const UNTOLD: &str = "select ctid::text from braid.displacement limit 1000";
/// One at a time: a transaction has one version. Another process may announce it meanwhile.
const TELL: &str = "delete from braid.displacement where ctid = \
    (select ctid from braid.displacement where ctid = $1::tid for update skip locked)";

/// A row to delete, or not to write, before the transaction is applied again, and the conflict for
/// the history.
#[derive(Debug)]
pub(super) struct Eviction {
    /// The stream's relation, and its local table.
    schema: u32,
    table: pg_sys::Oid,
    /// The local row: its place, and its version.
    place: Place,
    stamp: Stamp,
    decision: Decision,
    current: Current,
    /// The index that has the conflict.
    index: Option<pg_sys::Oid>,
    /// The incoming row; lives until it is stored in a slot.
    incoming: Option<Tuple>,
    /// Hash of the incoming row's key.
    hash: u64,
    loser: Loser,
    /// Bytes of the incoming rows of this and the evictions planned before it.
    bytes_so_far: usize,
}

/// Losing row of a unique conflict, and how it is deleted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Loser {
    /// The local row, by an ordinary deletion of this node.
    HereAsOwn,
    /// The local row; the deletion is announced.
    Here,
    /// The incoming row. The local row with the same key is deleted too, and the deletion is
    /// announced. `first`: this is the first of several blocking rows; each counts as a conflict.
    Incoming { first: bool },
}

/// Place and writer of a row version.
#[derive(Debug, Clone, Copy)]
struct Place {
    tid: pg_sys::ItemPointerData,
    writer: pg_sys::TransactionId,
}

impl Place {
    /// Returns those of the row in a slot.
    fn of(slot: &Slot) -> Self {
        Self {
            tid: slot.tid(),
            writer: slot.writer(),
        }
    }
}

impl Eviction {
    /// Returns the time of the announced deletion: just after the version of the losing row. A
    /// local row whose version is not known is older than everything that is replicated, so the
    /// time of the winner will do.
    fn timestamp(&self) -> i64 {
        match self.loser {
            Loser::Incoming { .. } => self.current.timestamp.saturating_add(1),
            Loser::Here | Loser::HereAsOwn => self
                .stamp
                .timestamp()
                .map_or(self.current.timestamp, |timestamp| {
                    timestamp.saturating_add(1)
                }),
        }
    }
}

impl Tables {
    fn hash_of_new(&self, key: Key) -> u64 {
        match self.get(key) {
            Some(Target {
                plan,
                table: Some(table),
                ..
            }) => identity_hash(plan, &table.new_slot()),
            _ => 0,
        }
    }

    /// Returns the bytes of a heap tuple with the key of the row in a slot, and its small columns.
    pub(super) fn row_to_tell(&mut self, key: Key, slot: &Slot) -> Result<Vec<u8>, PgError> {
        let target = self.target(key)?;
        let keys = target.plan.key.iter().flat_map(|key| &key.identity);
        let keys: Vec<usize> = keys
            .filter_map(|column| usize::try_from(column.attribute - 1).ok())
            .collect();
        let shape = slot.descriptor();
        let told = Formed::new(shape, |position| {
            let value = slot.cell(position)?;
            if !shape.get(position)?.is_varlena() {
                return Some(value);
            }
            if keys.contains(&position) {
                return Some(value.copy());
            }
            let is_small = !value.is_elsewhere()
                && value
                    .stored_bytes()
                    .is_some_and(|bytes| bytes.len() <= TOLD_BYTES);
            is_small.then_some(value)
        });
        Ok(told.bytes().to_vec())
    }
}

impl Session {
    /// Plans to delete the row in a slot before the current transaction is applied again. If
    /// `loser` is the incoming row, plans to keep that one out, unless the transaction ends the
    /// conflict itself.
    pub(super) fn plan_eviction(
        &mut self,
        key: Key,
        current: &Current,
        (slot, stamp): (&Slot, Stamp),
        decision: Decision,
        loser: Loser,
    ) -> Result<(), PgError> {
        let new_slot = self.tables.open(key)?.new_slot();
        let hash = self.tables.hash_of_new(key);
        let index = self.tables.met_index(key, slot);
        let (schema, table) = key;
        let incoming = Tuple::copy_of(&new_slot);
        let bytes = incoming.as_ref().map_or(0, Tuple::size);
        let before = self.hints.evictions.last();
        let before = before.map_or(0, |eviction| eviction.bytes_so_far);
        let eviction = Eviction {
            schema,
            table: table.into(),
            place: Place::of(slot),
            stamp,
            decision,
            current: current.clone(),
            index,
            incoming,
            hash,
            loser,
            bytes_so_far: before.saturating_add(bytes),
        };
        match loser {
            Loser::Incoming { .. } => self.attempt().kept_out.push(hash, eviction),
            Loser::Here | Loser::HereAsOwn => self.hints.evictions.push(eviction),
        }
        Ok(())
    }

    /// Notes that the row in the new slot was written: an eviction planned for it earlier in its
    /// transaction no longer counts.
    pub(super) fn let_in(&mut self, key: Key) {
        if self.attempt().kept_out.is_empty() {
            return;
        }
        let hash = self.tables.hash_of_new(key);
        self.attempt().kept_out.let_in(hash);
    }

    /// Deletes local rows that lose to the one in the new slot, and whose eviction is planned,
    /// within the current attempt only. The attempt goes on, so that it finds all such rows, and is
    /// rolled back at its end ([`Session::check_leaving`]).
    ///
    /// From here on the attempt must decide as the next attempt will once the rows are deleted;
    /// otherwise it ends:
    ///
    /// | the next attempt sees | why it decides alike |
    /// |---|---|
    /// | a deletion just above the row's version | older than the change: applied both times |
    /// | a deletion of this node, with the present time | a change of the row ends the attempt |
    ///
    /// In the first case too, a change of the row ends the attempt if a rule of the table decides
    /// about missing rows.
    ///
    /// # Errors
    /// 23505 ends the attempt, if it must not go on.
    pub(super) fn leave_for_now(
        &mut self,
        context: RowContext<'_>,
        rows: &[Slot],
        loser: Loser,
    ) -> Result<Way, PgError> {
        let RowContext { key, current, .. } = context;
        let planned = &self.hints.evictions;
        let bytes: usize = planned.last().map_or(0, |eviction| eviction.bytes_so_far);
        if current.unsettled
            || self.tables.is_keyless(key)
            || planned.len() >= MOST_LEAVING
            || bytes >= MOST_BYTES
        {
            return Err(to_leave_first());
        }
        let plan = self.tables.plan(key)?;
        let decides_alike = matches!(loser, Loser::Here)
            && plan.rules.of(Kind::UpdateMissing) == Resolution::LastUpdateWins
            && planned
                .iter()
                .rev()
                .take(rows.len())
                .all(|eviction| eviction.timestamp() < current.timestamp);
        for slot in rows {
            if !decides_alike {
                let plan = self.tables.plan(key)?;
                let hash = key_hashes_as(plan.oid.to_u32(), plan, slot).equal;
                self.attempt().left_for_now.insert(hash);
            }
            if self.tables.open(key)?.delete_row(slot)? == Written::Changed {
                return Err(to_leave_first());
            }
        }
        self.attempt().is_to_be_repeated = true;
        Ok(Way::ForNow)
    }

    /// Called for a row that was not found. Ends the attempt if the attempt has deleted that row,
    /// and the next attempt may decide otherwise about a change of it.
    pub(super) fn check_left_for_now(&self, key: Key, values: &RowValues) -> Result<(), PgError> {
        let left = self.attempt.as_ref().map(|attempt| &attempt.left_for_now);
        let Some(left) = left.filter(|left| !left.is_empty()) else {
            return Ok(());
        };
        match self.tables.key_hashes(key, values) {
            Some(hashes) if !left.contains(&hashes.equal) => Ok(()),
            _ => Err(to_leave_first()),
        }
    }

    /// Called when the whole transaction is applied. Fails if rows were deleted within this attempt
    /// only. The next attempt looks again at incoming rows that were kept out: the rows that keep
    /// them out may be deleted by then.
    pub(super) fn check_leaving(&mut self) -> Result<(), PgError> {
        if self.attempt().is_to_be_repeated {
            return Err(to_leave_first());
        }
        Ok(())
    }

    /// Called before the commit. Fails if incoming rows stay out whose deletion is not announced
    /// yet.
    pub(super) fn check_kept_out(&mut self) -> Result<(), PgError> {
        let mut kept_out = std::mem::take(&mut self.attempt().kept_out);
        if kept_out.is_empty() {
            return Ok(());
        }
        self.hints.evictions.extend(kept_out.take());
        Err(to_leave_first())
    }

    /// Whether the deletion of the new slot's row was already announced for the current
    /// transaction.
    pub(super) fn is_displaced(&self, key: Key, current: &Current) -> bool {
        let (lsn, hashes) = &self.hints.displaced;
        *lsn == current.commit_lsn
            && !hashes.is_empty()
            && hashes.contains(&self.tables.hash_of_new(key))
    }

    /// Deletes the losing rows that the rolled back attempt has found, announces deletions of
    /// incoming rows that stay away, and makes the planned calls of conflict functions. If a row
    /// has changed meanwhile, does nothing: the next attempt looks at all again. Returns false if
    /// nothing was planned.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises; the caller rolls back. The plan is forgotten either way.
    pub fn evict(&mut self) -> Result<bool, PgError> {
        let evictions = std::mem::take(&mut self.hints.evictions);
        let calls = std::mem::take(&mut self.hints.calls);
        if evictions.is_empty() && calls.is_empty() {
            return Ok(false);
        }
        let origin = origin::stamp();
        let outcome = error::catch(|| self.evict_all(&evictions, &calls, origin));
        origin::resume(origin);
        calls.into_iter().for_each(merge::free);
        outcome?.map(|()| true)
    }

    fn evict_all(
        &mut self,
        evictions: &[Eviction],
        calls: &[Call],
        origin: OriginId,
    ) -> Result<(), PgError> {
        let (own, noticed): (Vec<_>, Vec<_>) = evictions
            .iter()
            .partition(|eviction| matches!(eviction.loser, Loser::HereAsOwn));
        // Commits have no origin until it is set again.
        origin::suspend();
        if !own.is_empty() || !calls.is_empty() {
            self.start();
            // All are locked before the first is deleted, so that a function still finds them.
            let locked = self.lock_all(&own)?;
            if locked.is_some() {
                self.make_calls(calls, origin)?;
            }
            for (eviction, (key, slot)) in own.iter().zip(locked.iter().flatten()) {
                self.record_eviction(eviction, *key, slot)?;
                self.tables.open(*key)?.delete_row(slot)?;
                self.count(*key, |counts| counts.deletes += 1);
            }
            drop(locked);
            self.commit_as_own()?;
        }
        let Some(first) = noticed.iter().map(|eviction| eviction.timestamp()).min() else {
            return Ok(());
        };
        origin::resume(origin);
        self.remove_losers(&noticed)?;
        self.commit_as_of(first)?;
        origin::suspend();
        tell()
    }

    /// Locks the local rows, each in a slot of its own, with its table. Returns `None` if one has
    /// changed.
    #[allow(clippy::type_complexity)]
    fn lock_all(&mut self, evictions: &[&Eviction]) -> Result<Option<Vec<(Key, Slot)>>, PgError> {
        let mut locked = Vec::with_capacity(evictions.len());
        let mut all = true;
        for eviction in evictions {
            let key = self.open_for(eviction)?;
            let table = self.tables.open(key)?;
            let columns = table.relation().descriptor().len();
            let same_shape = eviction
                .incoming
                .as_ref()
                .is_some_and(|tuple| tuple.columns() <= columns);
            let slot = table.make_slot();
            all &= same_shape && lock(table, &slot, eviction.place)?;
            // A copy: of very many rows the pages would fill the server's buffers.
            slot.materialize();
            locked.push((key, slot));
        }
        Ok(all.then_some(locked))
    }

    /// Opens the table of an eviction, and works as its owner.
    fn open_for(&mut self, eviction: &Eviction) -> Result<Key, PgError> {
        let remote = self.remote(eviction.schema)?;
        self.attempt().current = Some(eviction.current.clone());
        let key = self.open_table(eviction.schema, &remote, eviction.table)?;
        self.work_as_owner_of(key);
        Ok(key)
    }

    /// Records the decision between the row in `slot` and the incoming one, which is in the new
    /// slot from here on.
    fn record_eviction(
        &mut self,
        eviction: &Eviction,
        key: Key,
        slot: &Slot,
    ) -> Result<(), PgError> {
        self.work_as_owner_of(key);
        let remote = self.remote(eviction.schema)?;
        let new_slot = self.tables.open(key)?.new_slot();
        if let Some(incoming) = &eviction.incoming {
            // SAFETY: the tuple was copied from a slot of the same table, whose shape was compared,
            // and is there until the eviction is carried out.
            unsafe { incoming.store(&new_slot) };
        }
        let rows = Rows {
            local: Some(slot.clone()),
            remote: Some(new_slot),
            given: None,
            index: eviction.index,
        };
        let found = Found::Row(eviction.stamp);
        let context = RowContext {
            key,
            remote: &remote,
            current: &eviction.current,
        };
        self.record(context, found, eviction.decision, &rows)
    }

    /// Deletes the losers, in a transaction that stays open.
    fn remove_losers(&mut self, evictions: &[&Eviction]) -> Result<(), PgError> {
        self.start();
        let Some(locked) = self.lock_all(evictions)? else {
            return Ok(());
        };
        for (eviction, (key, slot)) in evictions.iter().zip(&locked) {
            let key = *key;
            self.record_eviction(eviction, key, slot)?;
            self.work_as_owner_of(key);
            // As a version of this node, as at the other nodes.
            let version = (eviction.timestamp(), 0);
            let loser = match eviction.loser {
                Loser::Here | Loser::HereAsOwn => {
                    self.tables.open(key)?.delete_row(slot)?;
                    self.count(key, |counts| counts.deletes += 1);
                    slot.clone()
                }
                Loser::Incoming { first: false } => continue,
                Loser::Incoming { first: true } => {
                    self.remove_older(eviction, key)?;
                    let lsn = eviction.current.commit_lsn;
                    let displaced = &mut self.hints.displaced;
                    if displaced.0 != lsn {
                        *displaced = (lsn, HashSet::new());
                    }
                    displaced.1.insert(eviction.hash);
                    self.tables.open(key)?.new_slot()
                }
            };
            self.deletions()
                .remember_as(key, version, |_| loser.clone())?;
            let row = self.tables.row_to_tell(key, &loser)?;
            self.work_as_self();
            execute(
                TO_BE_TOLD,
                &[
                    i64::from(key.1).into(),
                    version.0.into(),
                    self.identity.local_node.as_str().into(),
                    row.into(),
                ],
            )?;
        }
        Ok(())
    }

    /// Deletes the local row with the key of the row in the new slot, which is not written, unless
    /// the local row is newer.
    fn remove_older(&mut self, eviction: &Eviction, key: Key) -> Result<(), PgError> {
        let remote = self.remote(eviction.schema)?;
        let new_slot = self.tables.open(key)?.new_slot();
        let values: RowValues = new_slot.values().into_iter().map(Some).collect();
        let found = self.find(key, &remote, &values, (Purpose::Change, true))?;
        let is_newer = match found {
            Found::Missing(_) => true,
            Found::Row(stamp) => stamp
                .timestamp()
                .is_some_and(|timestamp| timestamp >= eviction.timestamp()),
        };
        if !is_newer {
            // Locked since it was found.
            self.tables.open(key)?.delete()?;
            self.count(key, |counts| counts.deletes += 1);
        }
        Ok(())
    }

    /// Commits with the version `timestamp`, not as a transaction of this node.
    fn commit_as_of(&mut self, timestamp: i64) -> Result<(), PgError> {
        self.close_tables();
        self.deletions().store()?;
        self.store_tally()?;
        // The origin's position does not move: this commit applies nothing of the stream.
        self.commit_at(0, timestamp);
        Ok(())
    }
}

/// Announces all deletions of losing rows that are not announced yet.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn tell() -> Result<(), PgError> {
    loop {
        let places = error::transaction(|| rows(UNTOLD, &[]))?;
        let mut told = 0;
        for place in places.into_iter().filter_map(|row| row.into_iter().next()?) {
            pgrx::check_for_interrupts!();
            told += error::transaction(|| execute_counting(TELL, &[place.as_str().into()]))?;
        }
        // Another process announces the rest, if there is any.
        if told == 0 {
            return Ok(());
        }
    }
}

/// Returns an error that rolls the transaction back, so that it is applied again after the planned
/// evictions.
pub(super) fn to_leave_first() -> PgError {
    PgError::new(
        SqlState::UniqueViolation,
        "conflicting rows must be deleted first",
    )
}

/// Locks the row at `place` into the slot. Returns false if it is another version, or gone.
fn lock(table: &OpenTable, slot: &Slot, place: Place) -> Result<bool, PgError> {
    slot.set_tid(place.tid);
    Ok(lock_row(table.relation(), slot)?.is_some() && slot.writer() == place.writer)
}
