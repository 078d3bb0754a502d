//! Rows that leave because they are equal to another one under a further unique key (`in_the_way`
//! finds and decides that), between the transaction that met them, which was rolled back, and its
//! next attempt. Run by the appliers.
//!
//! A row that loses has to lose everywhere, also where the two never met: the winner may have given
//! way, by another change, before the loser came. So whoever finds that a row loses tells the
//! others that this version of it is dead: a deletion with a version just above the loser's own.
//! Not one of now, which would also take what was written to that row elsewhere meanwhile and is
//! newer than the winner; then both would go, each on the node that knew the other. With it, each
//! key stays the register of `braid_bgworker::conflict`, for which it does not matter how many
//! nodes find out, and in which order.
//!
//! 1. Carry it out here, in one transaction: the losers go, with a tombstone of the version that is
//!    told, and for each there is a row in `braid.displacement`, which is yet to be told. A loser
//!    that was about to come meets the tombstone at the next attempt, and stays away.
//! 2. Tell: delete those rows, each in a transaction of this node's own, of which the output plugin
//!    makes the deletion that is told (`plugin::displacement`). What a crash has left there the
//!    manager tells later.
//!
//! A row that is to come loses only if its transaction leaves it so: it may change again in there,
//! and then be in nobody's way.
//!
//! One attempt finds all rows here that are to leave ([`Session::leave_for_now`]): each leaves
//! within the attempt, which goes on, and is rolled back at its end. If each of 3,000 rows had the
//! attempt rolled back, the transaction would be applied 3,000 times.
//!
//! Where no deletions are remembered only one node writes, and where the user's function has
//! decided there is no version to tell: there the row leaves as a deletion of this node.

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

/// Largest column, in bytes, that is told beside the key: what a row filter may look at.
const TOLD_BYTES: usize = 1024;

/// Most rows that one attempt has leave.
const MOST_LEAVING: usize = 20_000;
/// Most bytes of the rows that they make way for.
const MOST_BYTES: usize = 64 * 1024 * 1024;

const TO_BE_TOLD: &str = "insert into braid.displacement (relation, version_at, origin, displaced) values ($1::oid, $2, $3, $4)";

/// Rows to be told next.
const UNTOLD: &str = "select ctid::text from braid.displacement limit 1000";
/// One at a time: a transaction has one version. Another process may tell it meanwhile.
const TELL: &str = "delete from braid.displacement where ctid = \
    (select ctid from braid.displacement where ctid = $1::tid for update skip locked)";

/// A row that leaves, or does not come, before a transaction can be applied, and what the history
/// is to say of it.
#[derive(Debug)]
pub(super) struct Eviction {
    /// The stream's relation, and its table here.
    schema: u32,
    table: pg_sys::Oid,
    /// The row that is here: where it is, as which version.
    place: Place,
    stamp: Stamp,
    decision: Decision,
    current: Current,
    /// The index in which they meet.
    index: Option<pg_sys::Oid>,
    /// The row that is to come; lives until it is stored in a slot.
    incoming: Option<Tuple>,
    /// Of its key.
    hash: u64,
    loser: Loser,
    /// Bytes of the rows that are to come, of this and the evictions planned before.
    bytes_so_far: usize,
}

/// Which of the two leaves, and how.
#[derive(Debug, Clone, Copy)]
pub(super) enum Loser {
    /// The row that is here, as a deletion of this node.
    HereAsOwn,
    /// The row that is here; the others are told so.
    Here,
    /// The row that is to come, and with it what stands under its key; the others are told so.
    /// `first` of the rows in its way, which each are a conflict of their own.
    Incoming { first: bool },
}

/// A version of a row.
#[derive(Debug, Clone, Copy)]
struct Place {
    tid: pg_sys::ItemPointerData,
    writer: pg_sys::TransactionId,
}

impl Place {
    /// That of the row in a slot.
    fn of(slot: &Slot) -> Self {
        Self {
            tid: slot.tid(),
            writer: slot.writer(),
        }
    }
}

impl Eviction {
    /// The time of the deletion that is told: just after the version of the row that loses. What it
    /// is not known of is older than anything that is replicated, and so than what it has lost to.
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

    /// The bytes of a heap tuple with the key of the row in a slot, and what else of it is small.
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
    /// Have the row in a slot leave before the transaction in hand is applied once more, or the one
    /// in the new slot if the transaction leaves that so.
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

    /// The row in the new slot was written: what its transaction did to it before is not the end of
    /// it.
    pub(super) fn let_in(&mut self, key: Key) {
        if self.attempt().kept_out.is_empty() {
            return;
        }
        let hash = self.tables.hash_of_new(key);
        self.attempt().kept_out.let_in(hash);
    }

    /// Has rows leave that lose to the one in the new slot, and whose leaving is planned, within
    /// the current attempt only. The attempt goes on, so that it finds all rows that are to leave,
    /// and is rolled back at its end ([`Session::check_leaving`]).
    ///
    /// From this point on the attempt decides as the next attempt does once the rows have left, or
    /// else it ends:
    ///
    /// | the next attempt sees | why it decides alike |
    /// |---|---|
    /// | a deletion just above the row's version | that is older than the transaction, so both times the change is applied; where a rule decides about a missing row, a change of it ends the attempt |
    /// | a deletion of this node, as of now | a change of the row ends the attempt |
    ///
    /// # Errors
    /// 23505, which ends the attempt, where it is not to go on.
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

    /// A row is not here. Ends the attempt if that is one that it had leave, and the next attempt
    /// may decide otherwise about a change of it.
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

    /// All of the transaction is applied. It is not committed if rows have left within this attempt
    /// only. Rows that are kept out are met again by the next attempt, or are not, as rows may have
    /// left by then that keep them out now.
    pub(super) fn check_leaving(&mut self) -> Result<(), PgError> {
        if self.attempt().is_to_be_repeated {
            return Err(to_leave_first());
        }
        Ok(())
    }

    /// The transaction is to be committed. Not if rows stay out of which that is not told yet.
    pub(super) fn check_kept_out(&mut self) -> Result<(), PgError> {
        let mut kept_out = std::mem::take(&mut self.attempt().kept_out);
        if kept_out.is_empty() {
            return Ok(());
        }
        self.hints.evictions.extend(kept_out.take());
        Err(to_leave_first())
    }

    /// Whether the new slot's row was told to be dead for the transaction in hand: there is no more
    /// to say of it.
    pub(super) fn is_displaced(&self, key: Key, current: &Current) -> bool {
        let (lsn, hashes) = &self.hints.displaced;
        *lsn == current.commit_lsn
            && !hashes.is_empty()
            && hashes.contains(&self.tables.hash_of_new(key))
    }

    /// Have the rows leave that were found in the way of the transaction that was just rolled back,
    /// or that is itself to stay away, and make the calls of conflict functions that it asked for.
    /// When a row has changed meanwhile nothing is done: all is looked at again with the
    /// transaction. False when there is nothing of that.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises; the caller rolls back. What was found is forgotten either way.
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
            // All are locked before the first leaves: a function still finds them.
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

    /// Lock the rows that are here, each in a slot of its own, with its table. `None` when one of
    /// them has changed.
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

    /// Open the table of a row that leaves, and work as its owner.
    fn open_for(&mut self, eviction: &Eviction) -> Result<Key, PgError> {
        let remote = self.remote(eviction.schema)?;
        self.attempt().current = Some(eviction.current.clone());
        let key = self.open_table(eviction.schema, &remote, eviction.table)?;
        self.work_as_owner_of(key);
        Ok(key)
    }

    /// Record what was decided between the row in `slot` and the one that was to come, which is in
    /// the new slot from here on.
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

    /// The losers leave, in a transaction that is left open.
    fn remove_losers(&mut self, evictions: &[&Eviction]) -> Result<(), PgError> {
        self.start();
        let Some(locked) = self.lock_all(evictions)? else {
            return Ok(());
        };
        for (eviction, (key, slot)) in evictions.iter().zip(&locked) {
            let key = *key;
            self.record_eviction(eviction, key, slot)?;
            self.work_as_owner_of(key);
            // This node's own, as it is at the others.
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

    /// Remove what stands under the key of the row in the new slot, which does not come, unless it
    /// is newer.
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

    /// Commit as of `timestamp`, not as a change of this node.
    fn commit_as_of(&mut self, timestamp: i64) -> Result<(), PgError> {
        self.close_tables();
        self.deletions().store()?;
        self.store_tally()?;
        // The origin's position stays where it is: nothing of the stream is applied with this.
        self.commit_at(0, timestamp);
        Ok(())
    }
}

/// Tell the other nodes of all rows of which that is yet to be done.
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
        // The rest, if there is any, another process tells.
        if told == 0 {
            return Ok(());
        }
    }
}

/// The transaction is rolled back with this, and applied once more when what was planned is done.
pub(super) fn to_leave_first() -> PgError {
    PgError::new(
        SqlState::UniqueViolation,
        "rows in the way are to leave first",
    )
}

/// Lock the row at `place` into the slot. False when it is another version, or gone.
fn lock(table: &OpenTable, slot: &Slot, place: Place) -> Result<bool, PgError> {
    slot.set_tid(place.tid);
    Ok(lock_row(table.relation(), slot)?.is_some() && slot.writer() == place.writer)
}
