//! Rows that leave because they are equal to another one under a further unique key (`in_the_way` finds and decides that), between
//! the transaction that met them, which was rolled back, and its next attempt. Run by the appliers.
//!
//! A row that loses has to lose everywhere, also where the two never met: the winner may have given way, by another change, before
//! the loser came. So whoever finds that a row loses tells the others that this version of it is dead: a deletion with a version
//! just above the loser's own. Not one of now, which would also take what was written to that row elsewhere meanwhile and is newer
//! than the winner; then both would go, each on the node that knew the other. With it, each key stays the register of
//! `braid_bgworker::conflict`, for which it does not matter how many nodes find out, and in which order.
//!
//! 1. Carry it out here, in one transaction: the losers go, with a tombstone of the version that is told, and for each there is a row
//!    in `braid.displacement`, which is yet to be told. A loser that was about to come meets the tombstone at the next attempt, and stays
//!    away.
//! 2. Tell: delete those rows, each in a transaction of this node's own, of which the output plugin makes the deletion that is told
//!    (`plugin::displacement`). What a crash has left there the manager tells later.
//!
//! A row that is to come loses only if its transaction leaves it so: it may change again in there, and then be in nobody's way.
//!
//! Where no deletions are remembered only one node writes, and where the user's function has decided there is no version to tell: there
//! the row leaves as a deletion of this node.

use braid_bgworker::conflict::Decision;
use braid_node::subscription::{execute, execute_counting};
use braid_postgres::compat;
use braid_postgres::error::{self, PgError};
use pgrx::pg_sys;

use super::change::{Key, Rows};
use super::image::fields;
use super::in_the_way::UNIQUE_VIOLATION;
use super::key_hash::key_hash;
use super::lookup::{Found, Purpose, lock_row, writer};
use super::merge::{self, Call};
use super::row_context::RowContext;
use super::table::{OpenTable, RowValues};
use super::version::Stamp;
use super::{Current, Session, Target};

/// Largest column, in bytes, that is told beside the key: what a row filter may look at.
const TOLD_BYTES: usize = 1024;

const TO_BE_TOLD: &str = "insert into braid.displacement (relation, version_at, origin, displaced) values ($1::oid, $2, $3, $4)";
/// One at a time: a transaction has one version.
const TELL: &str = "delete from braid.displacement where ctid = \
    (select ctid from braid.displacement limit 1 for update skip locked)";

/// A row that leaves, or does not come, before a transaction can be applied, and what the history is to say of it.
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
    incoming: pg_sys::HeapTuple,
    /// Of its key.
    hash: u64,
    loser: Loser,
}

/// Which of the two leaves, and how.
#[derive(Debug, Clone, Copy)]
pub(super) enum Loser {
    /// The row that is here, as a deletion of this node.
    HereAsOwn,
    /// The row that is here; the others are told so.
    Here,
    /// The row that is to come, and with it what stands under its key; the others are told so. `first` of the rows in its way, which
    /// each are a conflict of their own.
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
    ///
    /// # Safety
    /// The slot holds a row of a table.
    unsafe fn of(slot: *mut pg_sys::TupleTableSlot) -> Self {
        // SAFETY: as the caller says.
        unsafe {
            Self {
                tid: (*slot).tts_tid,
                writer: writer(slot),
            }
        }
    }
}

impl Eviction {
    /// The time of the deletion that is told: just after the version of the row that loses. What it is not known of is older than
    /// anything that is replicated, and so than what it has lost to.
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

/// `ExecCopySlotHeapTuple` of src/include/executor/tuptable.h, 15 to 18: in the current memory context.
///
/// # Safety
/// The slot holds a row.
pub(super) unsafe fn copy_tuple(slot: *mut pg_sys::TupleTableSlot) -> pg_sys::HeapTuple {
    // SAFETY: as the caller says; every kind of slot has the function.
    unsafe {
        match (*(*slot).tts_ops).copy_heap_tuple {
            Some(copy) => pg_sys::ffi::pg_guard_ffi_boundary(|| copy(slot)),
            None => std::ptr::null_mut(),
        }
    }
}

/// A slot for a row of a table, to be dropped.
///
/// # Safety
/// The table is open.
pub(super) unsafe fn slot_for(table: &OpenTable) -> *mut pg_sys::TupleTableSlot {
    // SAFETY: the table is open.
    unsafe {
        pg_sys::MakeSingleTupleTableSlot(
            (*table.relation).rd_att,
            pg_sys::table_slot_callbacks(table.relation),
        )
    }
}

impl Session {
    /// Have the row in a slot leave before the transaction in hand is applied once more, or the one in the new slot if the transaction
    /// leaves that so.
    pub(super) fn plan_eviction(
        &mut self,
        key: Key,
        current: &Current,
        (slot, stamp): (*mut pg_sys::TupleTableSlot, Stamp),
        decision: Decision,
        loser: Loser,
    ) -> Result<(), PgError> {
        let new_slot = self.open(key)?.new_slot();
        let hash = self.hash_of_new(key);
        let index = self.met_index(key, slot);
        let (schema, table) = key;
        // SAFETY: both slots hold rows of the table; the copy outlives the transaction, which is rolled back.
        let eviction = unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            let incoming = copy_tuple(new_slot);
            pg_sys::MemoryContextSwitchTo(before);
            Eviction {
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
            }
        };
        match loser {
            Loser::Incoming { .. } => self.attempt().kept_out.push(eviction),
            Loser::Here | Loser::HereAsOwn => self.hints.evictions.push(eviction),
        }
        Ok(())
    }

    /// The row in the new slot was written: what its transaction did to it before is not the end of it.
    pub(super) fn let_in(&mut self, key: Key) {
        if self.attempt().kept_out.is_empty() {
            return;
        }
        let hash = self.hash_of_new(key);
        let attempt = self.attempt();
        let (stay, gone) = std::mem::take(&mut attempt.kept_out)
            .into_iter()
            .partition(|eviction| eviction.hash != hash);
        attempt.kept_out = stay;
        free(gone);
    }

    /// The transaction is to be committed. Not if rows stay out of which that is not told yet.
    pub(super) fn check_kept_out(&mut self) -> Result<(), PgError> {
        let mut kept_out = std::mem::take(&mut self.attempt().kept_out);
        if kept_out.is_empty() {
            return Ok(());
        }
        self.hints.evictions.append(&mut kept_out);
        Err(to_leave_first())
    }

    fn hash_of_new(&self, key: Key) -> u64 {
        match self.targets.get(&key) {
            Some(Target {
                plan,
                table: Some(table),
                ..
            }) => {
                // SAFETY: the slot holds a row of the table, which is open.
                unsafe { key_hash(plan, table.new_slot()) }
            }
            _ => 0,
        }
    }

    /// Whether the new slot's row was told to be dead for the transaction in hand: there is no more to say of it.
    pub(super) fn is_displaced(&self, key: Key, current: &Current) -> bool {
        let (lsn, hashes) = &self.hints.displaced;
        *lsn == current.commit_lsn && !hashes.is_empty() && hashes.contains(&self.hash_of_new(key))
    }

    /// Have the rows leave that were found in the way of the transaction that was just rolled back, or that is itself to stay away, and
    /// make the calls of conflict functions that it asked for. When a row has changed meanwhile nothing is done: all is looked
    /// at again with the transaction. False when there is nothing of that.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises; the caller rolls back. What was found is forgotten either way.
    pub fn evict(&mut self) -> Result<bool, PgError> {
        let evictions = std::mem::take(&mut self.hints.evictions);
        let calls = std::mem::take(&mut self.hints.calls);
        if evictions.is_empty() && calls.is_empty() {
            return Ok(false);
        }
        // SAFETY: reads a variable of the process.
        let origin = unsafe { pg_sys::replorigin_session_origin };
        let outcome = error::catch(|| self.evict_all(&evictions, &calls, origin));
        // SAFETY: the one that this process has set up.
        unsafe { pg_sys::replorigin_session_origin = origin };
        free(evictions);
        calls.into_iter().for_each(merge::free);
        outcome?.map(|()| true)
    }

    fn evict_all(
        &mut self,
        evictions: &[Eviction],
        calls: &[Call],
        origin: pg_sys::RepOriginId,
    ) -> Result<(), PgError> {
        let (own, noticed): (Vec<_>, Vec<_>) = evictions
            .iter()
            .partition(|eviction| matches!(eviction.loser, Loser::HereAsOwn));
        // SAFETY: outside of a transaction; without an origin for the commits, until it is set again.
        let stamp_with = |origin| unsafe { pg_sys::replorigin_session_origin = origin };
        stamp_with(0);
        if !own.is_empty() || !calls.is_empty() {
            self.start();
            // All are locked before the first leaves: a function still finds them.
            let locked = self.lock_all(&own)?;
            if locked.is_some() {
                self.make_calls(calls, origin)?;
            }
            for (eviction, (key, slot)) in own.iter().zip(locked.iter().flatten()) {
                self.record_eviction(eviction, *key, *slot)?;
                // SAFETY: the slot holds a row of the table, locked.
                unsafe { self.open(*key)?.delete_row(*slot)? };
                self.count(*key, |counts| counts.deletes += 1);
            }
            drop_slots(locked);
            self.commit_as_own()?;
        }
        let Some(first) = noticed.iter().map(|eviction| eviction.timestamp()).min() else {
            return Ok(());
        };
        stamp_with(origin);
        self.remove_losers(&noticed)?;
        self.commit_as_of(first)?;
        stamp_with(0);
        tell()
    }

    /// Lock the rows that are here, each in a slot of its own, with its table. `None` when one of them has changed.
    #[allow(clippy::type_complexity)]
    fn lock_all(
        &mut self,
        evictions: &[&Eviction],
    ) -> Result<Option<Vec<(Key, *mut pg_sys::TupleTableSlot)>>, PgError> {
        let mut locked = Vec::with_capacity(evictions.len());
        let mut all = true;
        for eviction in evictions {
            let key = self.open_for(eviction)?;
            let table = self.open(key)?;
            // SAFETY: the table is open; the slot is of its own kind.
            let same = unsafe {
                let natts = (*(*table.relation).rd_att).natts;
                let same_shape = (*(*eviction.incoming).t_data).t_infomask2 & 0x07FF
                    <= u16::try_from(natts).unwrap_or(u16::MAX);
                let slot = slot_for(table);
                locked.push((key, slot));
                same_shape && lock(table, slot, eviction.place)?
            };
            all &= same;
        }
        if !all {
            drop_slots(Some(locked));
            return Ok(None);
        }
        Ok(Some(locked))
    }

    /// Open the table of a row that leaves, and work as its owner.
    fn open_for(&mut self, eviction: &Eviction) -> Result<Key, PgError> {
        let remote = self.remote(eviction.schema)?;
        self.attempt().current = Some(eviction.current.clone());
        let key = self.open_table(eviction.schema, &remote, eviction.table)?;
        self.work_as_owner_of(key);
        Ok(key)
    }

    /// Record what was decided between the row in `slot` and the one that was to come, which is in the new slot from here on.
    fn record_eviction(
        &mut self,
        eviction: &Eviction,
        key: Key,
        slot: *mut pg_sys::TupleTableSlot,
    ) -> Result<(), PgError> {
        self.work_as_owner_of(key);
        let remote = self.remote(eviction.schema)?;
        let new_slot = self.open(key)?.new_slot();
        // SAFETY: the tuple was copied from a slot of the same table, whose shape was compared.
        unsafe { pg_sys::ExecForceStoreHeapTuple(eviction.incoming, new_slot, false) };
        let rows = Rows {
            local: Some(slot),
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
        self.record(context, found, eviction.decision, rows)
    }

    /// The bytes of a heap tuple with the key of the row in a slot, and what else of it is small.
    ///
    /// # Safety
    /// The slot holds a row of the table, which is open.
    pub(super) unsafe fn row_to_tell(
        &mut self,
        key: Key,
        slot: *mut pg_sys::TupleTableSlot,
    ) -> Result<Vec<u8>, PgError> {
        let target = self.target(key)?;
        let keys = target.plan.key.iter().flat_map(|key| &key.columns);
        let keys: Vec<usize> = keys
            .filter_map(|column| usize::try_from(column.attribute - 1).ok())
            .collect();
        // SAFETY: as the caller says; one value and one mark a column.
        unsafe {
            let descriptor = (*slot).tts_tupleDescriptor;
            let fields = fields(slot).into_iter().enumerate();
            let (mut values, mut nulls): (Vec<_>, Vec<_>) = fields
                .map(|(position, value)| {
                    let is_varlena = (*compat::TupleDescAttr(descriptor, position)).attlen == -1;
                    let told = value.and_then(|value| {
                        if !is_varlena {
                            return Some(value);
                        }
                        let pointer = value.cast_mut_ptr::<pg_sys::varlena>();
                        if keys.contains(&position) {
                            return Some(pg_sys::Datum::from(pg_sys::pg_detoast_datum(pointer)));
                        }
                        let is_small = !pgrx::varatt_is_1b_e(pointer)
                            && pgrx::varsize_any(pointer) <= TOLD_BYTES;
                        is_small.then_some(value)
                    });
                    (told.unwrap_or(pg_sys::Datum::null()), told.is_none())
                })
                .unzip();
            let tuple =
                pg_sys::heap_form_tuple(descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
            let len = usize::try_from((*tuple).t_len).unwrap_or(0);
            let bytes = std::slice::from_raw_parts((*tuple).t_data.cast::<u8>(), len).to_vec();
            pg_sys::heap_freetuple(tuple);
            Ok(bytes)
        }
    }

    /// The losers leave, in a transaction that is left open.
    fn remove_losers(&mut self, evictions: &[&Eviction]) -> Result<(), PgError> {
        self.start();
        let Some(locked) = self.lock_all(evictions)? else {
            return Ok(());
        };
        for (eviction, (key, slot)) in evictions.iter().zip(&locked) {
            let (key, slot) = (*key, *slot);
            self.record_eviction(eviction, key, slot)?;
            self.work_as_owner_of(key);
            // This node's own, as it is at the others.
            let version = (eviction.timestamp(), 0);
            let loser = match eviction.loser {
                Loser::Here | Loser::HereAsOwn => {
                    // SAFETY: the slot holds a row of the table, locked.
                    unsafe { self.open(key)?.delete_row(slot)? };
                    self.count(key, |counts| counts.deletes += 1);
                    slot
                }
                Loser::Incoming { first: false } => continue,
                Loser::Incoming { first: true } => {
                    self.remove_older(eviction, key)?;
                    let lsn = eviction.current.commit_lsn;
                    let displaced = &mut self.hints.displaced;
                    if displaced.0 != lsn {
                        *displaced = (lsn, Vec::new());
                    }
                    displaced.1.push(eviction.hash);
                    self.open(key)?.new_slot()
                }
            };
            self.remember_deletion_of(key, version, |_| loser)?;
            // SAFETY: the slot holds a row of the table.
            let row = unsafe { self.row_to_tell(key, loser)? };
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
        drop_slots(Some(locked));
        Ok(())
    }

    /// Remove what stands under the key of the row in the new slot, which does not come, unless it is newer.
    fn remove_older(&mut self, eviction: &Eviction, key: Key) -> Result<(), PgError> {
        let remote = self.remote(eviction.schema)?;
        let new_slot = self.open(key)?.new_slot();
        // SAFETY: the slot holds a row of the table.
        let values: RowValues = unsafe { fields(new_slot) }.into_iter().map(Some).collect();
        let found = self.find(key, &remote, &values, (Purpose::Change, true))?;
        let is_newer = match found {
            Found::Missing(_) => true,
            Found::Row(stamp) => stamp
                .timestamp()
                .is_some_and(|timestamp| timestamp >= eviction.timestamp()),
        };
        if !is_newer {
            // Locked since it was found.
            self.open(key)?.delete()?;
            self.count(key, |counts| counts.deletes += 1);
        }
        Ok(())
    }

    /// Commit as of `timestamp`, not as a change of this node.
    fn commit_as_of(&mut self, timestamp: i64) -> Result<(), PgError> {
        self.close_tables();
        self.store_tombstones()?;
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
    while error::transaction(|| execute_counting(TELL, &[]))? > 0 {
        pgrx::check_for_interrupts!();
    }
    Ok(())
}

/// The transaction is rolled back with this, and applied once more when what was planned is done.
pub(super) fn to_leave_first() -> PgError {
    PgError::new(UNIQUE_VIOLATION, "rows in the way are to leave first")
}

/// Free the rows that evictions hold.
pub(super) fn free(evictions: Vec<Eviction>) {
    for eviction in evictions {
        // SAFETY: the copy is this value's own.
        unsafe { pg_sys::heap_freetuple(eviction.incoming) };
    }
}

/// Lock the row at `place` into the slot. False when it is another version, or gone.
///
/// # Safety
/// The slot is one of the table, which is open.
unsafe fn lock(
    table: &OpenTable,
    slot: *mut pg_sys::TupleTableSlot,
    place: Place,
) -> Result<bool, PgError> {
    // SAFETY: as the caller says.
    unsafe {
        (*slot).tts_tid = place.tid;
        Ok(lock_row(table.relation, slot)?.is_some() && writer(slot) == place.writer)
    }
}

fn drop_slots(slots: Option<Vec<(Key, *mut pg_sys::TupleTableSlot)>>) {
    for (_, slot) in slots.into_iter().flatten() {
        // SAFETY: made by `lock_all`, and not used any more.
        unsafe { pg_sys::ExecDropSingleTupleTableSlot(slot) };
    }
}
