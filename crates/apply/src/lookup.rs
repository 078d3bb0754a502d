//! Finds the row of a change, and locks it. Run by the appliers.
//!
//! A scan with a dirty snapshot sees rows that other transactions are writing. So it waits for
//! those transactions instead of missing the rows. It can still miss a row that is updated to a new
//! place during the scan. So before a row counts as missing, it is looked up again with a new
//! ordinary snapshot. Dead row versions that VACUUM has not removed yet tell who deleted a row.

use braid_decoder::KeyHasher;
use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::ffi::raw;
use braid_postgres::heap_page::{self, Place, place_of, tid_of};
use braid_postgres::index_end::IndexEnd;
use braid_postgres::memory::{self, Scratch};
use braid_postgres::relation::RelationRef;
use braid_postgres::scan_key;
use braid_postgres::slot::{Slot, Visible};
use braid_postgres::value::Value;
use braid_postgres::{snapshot, transaction};
use pgrx::pg_sys;

use super::index_walk::{has_key, next_version};
use super::key_hash::feed;
use super::places::{Hint, Places};
use super::relation::{Key, KeyColumn};
use super::row_version::{EndOfVersion, end_of, lock_row, same_place};
use super::scan;
use super::slot::{any_snapshot, slot_of};
use super::table::RowValues;
use super::version::{Stamp, stamp_of};

/// `BTEqualStrategyNumber` of src/include/access/stratnum.h.
const EQUAL: u16 = 3;

/// Result of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The row is in the slot, locked if that was asked for, with this version.
    Row(Stamp),
    /// No row. The version of its deletion, if dead row versions tell it.
    Missing(Option<Stamp>),
}

/// Reason for a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A row with the key will be inserted, if there is none.
    Insert,
    /// The row will be changed.
    Change,
    /// The row will be deleted. Nothing will be written into its page, so dead rows are not removed
    /// from it. The next change of a row there removes several at once.
    Delete,
}

/// Locked rows, each in a slot of its own, with the version of the transaction that wrote it. The
/// caller drops the slots.
pub(super) type LockedRows = Vec<(Slot, Stamp)>;

/// Returns the version of the row in a slot, given its writer and the version of the writer's
/// commit.
pub type Refine<'a> =
    &'a mut dyn FnMut(pg_sys::TransactionId, &Slot, Stamp) -> Result<Stamp, PgError>;

/// An open index of an open table, for look-ups of keys.
#[derive(Debug)]
pub struct IndexLookup {
    table: pg_sys::Relation,
    keys: Vec<pg_sys::ScanKeyData>,
    /// The other columns of the identity, if the index has only some of them.
    rest: Vec<RestColumn>,
    scan: pg_sys::IndexScanDesc,
    /// Memory of the scan: access methods allocate some of their state only when they first need
    /// it, and keep it.
    context: memory::Current,
    /// Snapshot to which the scan points.
    dirty: Box<pg_sys::SnapshotData>,
    /// Cache of rows' places, by their keys.
    places: Places,
    /// The end of the index.
    end: IndexEnd,
    /// Whether the last look-up found no index entry under its key, not even a dead one.
    found_nothing: bool,
    /// Hash of the key of the last look-up.
    last: u64,
    /// The row that this transaction has deleted: the hash of its key, its place, and the command
    /// since which nothing else was written.
    deleted: Option<(u64, Place, pg_sys::CommandId)>,
    /// Whether the scan removes dead rows from the pages that it visits, as PostgreSQL's own scans
    /// do.
    prunes: bool,
    /// Least number of blocks of the table: it does not shrink while this transaction has it
    /// locked. 0: not known.
    blocks: pg_sys::BlockNumber,
}

/// A column of the identity that the index lacks.
#[derive(Debug, Clone, Copy)]
struct RestColumn {
    /// Position in the table, from 0.
    position: usize,
    /// The value that is looked for: `None` is any value, `Some(None)` is null.
    wanted: Option<Option<pg_sys::Datum>>,
}

/// Row versions that a look-up sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sees {
    /// Rows of committed transactions, of transactions in progress, and of the current one.
    Unfinished,
    /// All row versions.
    Any,
    /// Rows that the active snapshot sees.
    Active,
}

enum Outcome {
    None { candidates: usize },
    Visible,
}

impl IndexLookup {
    /// Prepares look-ups of rows by their key.
    ///
    /// # Safety
    /// As [`IndexLookup::with_keys`]; the index is the key's.
    pub(super) unsafe fn of_key(
        table: pg_sys::Relation,
        index: pg_sys::Relation,
        key: &Key,
    ) -> Self {
        // SAFETY: as the caller says.
        let mut lookup = unsafe { Self::with_keys(table, index, Self::keys_of(key)) };
        let rest = key.rest().map(|column| RestColumn {
            position: usize::try_from(column.attribute - 1).unwrap_or(usize::MAX),
            wanted: None,
        });
        lookup.rest = rest.collect();
        lookup
    }

    /// Whether the index has all columns that identify a row.
    pub(super) fn has_whole_key(&self) -> bool {
        self.rest.is_empty()
    }

    /// Returns scan keys for a row's key, without values yet.
    fn keys_of(key: &Key) -> Vec<pg_sys::ScanKeyData> {
        let entry = |(position, column): (usize, &KeyColumn)| {
            let how = (EQUAL, column.equal, column.collation);
            scan_key::new(position, 0, how, pg_sys::Datum::null())
        };
        key.columns.iter().enumerate().map(entry).collect()
    }

    /// Prepares look-ups with the given scan keys.
    ///
    /// # Safety
    /// `table` and `index` are open and locked whenever the look-up is used; the current memory
    /// context lives as long as it. The keys are of the index's columns.
    pub unsafe fn with_keys(
        table: pg_sys::Relation,
        index: pg_sys::Relation,
        keys: Vec<pg_sys::ScanKeyData>,
    ) -> Self {
        let mut dirty: Box<pg_sys::SnapshotData> = Box::default();
        dirty.snapshot_type = pg_sys::SnapshotType::SNAPSHOT_DIRTY;
        // SAFETY: table and index are open; the boxed snapshot outlives the scan.
        let scan = unsafe {
            let count = i32::try_from(keys.len()).unwrap_or(0);
            compat::index_beginscan(table, index, &raw mut *dirty, count)
        };
        Self {
            table,
            keys,
            rest: Vec::new(),
            scan,
            context: memory::Current::now(),
            dirty,
            places: Places::default(),
            end: IndexEnd::default(),
            found_nothing: false,
            last: 0,
            deleted: None,
            prunes: true,
            blocks: 0,
        }
    }

    /// Ends a transaction: the table may shrink from here on.
    pub(super) fn end_transaction(&mut self) {
        self.blocks = 0;
        self.deleted = None;
    }

    /// Notes that the row of the last look-up, in this slot, was written to the table.
    pub(super) fn note(&mut self, slot: &Slot) {
        let hint = Hint {
            place: place_of(slot.tid()),
            buffer: slot.buffer(),
        };
        self.places.note(self.last, hint);
    }

    /// Notes that the row of the last look-up, in this slot, was deleted.
    pub(super) fn note_deleted(&mut self, slot: &Slot) {
        self.deleted = Some((self.last, place_of(slot.tid()), transaction::command()));
    }

    /// Whether this transaction has just deleted the row with the very key that is looked for, and
    /// has written nothing since. Then no row has the key. That row was the only one, because the
    /// index is unique at all times, and any session that inserts another one waits for the end of
    /// this transaction.
    fn is_deleted(&mut self, key: &Key, slot: &Slot) -> bool {
        let Some((hash, place, command)) = self.deleted else {
            return false;
        };
        if hash != self.last || command != transaction::command() {
            return false;
        }
        let table = self.table();
        // A row that this transaction has deleted keeps its place until the transaction ends.
        let is_there = table.is_heap()
            && slot.fetch(table, tid_of(place), Visible::Any)
            && self.wanted(key).all(|(position, wanted)| {
                let here = slot.cell(position);
                here.is_some_and(|here| here.is_same(wanted))
            });
        let is_deleted = is_there && matches!(end_of(slot), EndOfVersion::Deleted(_, Stamp::Own));
        slot.clear();
        is_deleted
    }

    /// Ends the scan. Called before the table is closed.
    pub fn end(self) {
        // SAFETY: the scan was begun in `new` and is ended once.
        unsafe { pg_sys::index_endscan(self.scan) };
    }

    /// Returns the scan.
    #[must_use]
    pub fn scan(&self) -> pg_sys::IndexScanDesc {
        self.scan
    }

    fn state(&self) -> &pg_sys::IndexScanDescData {
        // SAFETY: the scan was begun, and has not ended. It changes in calls, during which nobody
        // holds this.
        unsafe { &*self.scan }
    }

    /// Sets whether the scan skips index entries that are marked as dead. A marked entry stays
    /// until VACUUM removes the row.
    fn ignore_killed(&mut self, ignores: bool) {
        // SAFETY: the scan was begun, and has not ended; nobody holds a reference to it. No look is
        // under way that goes by the mark.
        unsafe { (*self.scan).ignore_killed_tuples = ignores };
    }

    /// Returns the index, which is open whenever the look-up is used.
    pub(super) fn index(&self) -> pg_sys::Relation {
        self.state().indexRelation
    }

    /// Runs `work` in the memory in which the scan was begun.
    fn in_own_memory<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let context = self.context;
        // SAFETY: the context lives as long as the scan.
        unsafe { context.run(|| work(self)) }
    }

    /// Returns the arguments of `index_rescan`: the scan, its keys, and their number. The keys are
    /// always passed: a scan begins with uninitialized keys, and some access methods read them even
    /// if no keys were given.
    #[must_use]
    pub fn restart(&mut self) -> (pg_sys::IndexScanDesc, pg_sys::ScanKey, i32) {
        let count = i32::try_from(self.keys.len()).unwrap_or(0);
        (self.scan, self.keys.as_mut_ptr(), count)
    }

    /// Finds the row with the values' key, and reads it into `slot`; with `lock`, locks it for a
    /// change. A null in a key finds nothing. `refine` corrects the versions that transactions
    /// tell.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises: lock timeouts, cancelled waits.
    pub fn find(
        &mut self,
        values: &RowValues,
        key: &Key,
        slot: &Slot,
        (purpose, lock): (Purpose, bool),
        refine: Refine<'_>,
    ) -> Result<Found, PgError> {
        if !self.set_keys(values, key) {
            return Ok(Found::Missing(None));
        }
        self.last = self.hash(key);
        if self.is_deleted(key, slot) {
            return Ok(Found::Missing(None));
        }
        self.in_own_memory(|lookup| {
            lookup.prunes = purpose != Purpose::Delete;
            let noted = lookup.places.get(lookup.last);
            let found = if noted.is_none() && lookup.found_nothing && lookup.is_past_end() {
                Ok(Found::Missing(None))
            } else {
                lookup.find_prepared((key, noted), slot, lock, refine)
            };
            lookup.prunes = true;
            if matches!(found, Ok(Found::Row(_))) {
                lookup.note(slot);
            }
            found
        })
    }

    /// Sets the values to look for. Returns false if one is null: that finds nothing.
    fn set_keys(&mut self, values: &RowValues, key: &Key) -> bool {
        for column in &mut self.rest {
            column.wanted = values.get(column.position).copied().flatten();
        }
        self.keys
            .iter_mut()
            .zip(&key.columns)
            .all(|(place, column)| {
                let position = usize::try_from(column.attribute - 1).unwrap_or(usize::MAX);
                let value = values.get(position).copied().flatten().flatten();
                place.sk_argument = value.unwrap_or(pg_sys::Datum::null());
                value.is_some()
            })
    }

    /// Looks up the place of the row with the values' key, committed or not, unless it is known,
    /// and stores it. Returns whether it was looked up.
    pub(super) fn look_ahead(
        &mut self,
        values: &RowValues,
        key: &Key,
        slot: &Slot,
        purpose: Purpose,
    ) -> bool {
        if !self.set_keys(values, key) {
            return false;
        }
        self.last = self.hash(key);
        if self.places.get(self.last).is_some() {
            return false;
        }
        self.in_own_memory(|lookup| {
            lookup.prunes = purpose != Purpose::Delete;
            if lookup.first(Sees::Unfinished, slot).0 {
                lookup.note(slot);
                slot.clear();
            }
            lookup.prunes = true;
        });
        true
    }

    /// Whether the key that is looked for is greater than all in the index.
    fn is_past_end(&mut self) -> bool {
        // SAFETY: the scan's index is open; the keys are of its columns; the caller has switched to
        // the context of the scan.
        unsafe { self.end.is_before((*self.scan).indexRelation, &self.keys) }
    }

    /// Returns the hash of the key that is looked for. Keys that are equal but not identical have
    /// different hashes, which costs a look-up in the index.
    fn hash(&self, key: &Key) -> u64 {
        let mut hasher = KeyHasher::new(0);
        for (_, value) in self.wanted(key) {
            feed(&mut hasher, Some(value));
        }
        hasher.finish()
    }

    /// Returns the values that are looked for, with the positions of their columns in the table.
    fn wanted(&self, key: &Key) -> impl Iterator<Item = (usize, Value<'_>)> {
        let shape = self.table().descriptor();
        let each = self.keys.iter().zip(&key.columns);
        each.filter_map(move |(place, column)| {
            let position = usize::try_from(column.attribute - 1).ok()?;
            // SAFETY: the value that is looked for is one of the column, and there while it is.
            let value = unsafe { Value::new(shape.get(position)?, place.sk_argument) };
            Some((position, value))
        })
    }

    /// Whether the row in a slot has the identity's other values that are looked for.
    fn has_rest(&self, slot: &Slot) -> bool {
        let shape = self.table().descriptor();
        let mut rest = self.rest.iter();
        rest.all(|column| {
            let (Some(wanted), Some(attribute)) = (column.wanted, shape.get(column.position))
            else {
                return true;
            };
            let (wanted, here) = match (wanted, slot.cell(column.position)) {
                (Some(wanted), Some(here)) => (wanted, here),
                (wanted, here) => return wanted.is_none() && here.is_none(),
            };
            // SAFETY: the value that is looked for is one of the column, and there while it is.
            let wanted = unsafe { Value::new(attribute, wanted) };
            wanted.is_same(here) || {
                // Memory for one comparison.
                // SAFETY: dropped here.
                let mut memory = unsafe { Scratch::below_current(c"braid key") };
                memory.run(|| scan::equal(attribute.collation(), wanted, here))
            }
        })
    }

    /// Whether the row with this very key is at the place, alive and not being written by another
    /// transaction. If so, it is in the slot. There is at most one such row, because the index is
    /// unique at all times.
    fn is_at(&mut self, key: &Key, hint: Hint, slot: &Slot) -> bool {
        let (table, keys, count) = (self.table, self.keys.as_ptr(), self.keys.len());
        let (columns, dirty) = (key.columns.as_ptr(), &raw mut *self.dirty);
        let prunes = self.prunes;
        let mut blocks = self.blocks;
        let (known, raw) = (&raw mut blocks, slot.as_ptr());
        // SAFETY: the table is open and locked, the slot is one of its own, and there is a key for
        // each column. Nothing with a destructor is on the closure's stack.
        let is_at = unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let form = &*(*table).rd_rel;
                if form.relam != pg_sys::HEAP_TABLE_AM_OID {
                    return false;
                }
                let (fork, block) = (pg_sys::ForkNumber::MAIN_FORKNUM, hint.place.0);
                let file = compat::file_of(table);
                let mut buffer = hint.buffer;
                if buffer <= 0 || !raw::ReadRecentBuffer(file, fork, block, buffer) {
                    if *known == 0 {
                        *known = raw::RelationGetNumberOfBlocksInFork(table, fork);
                    }
                    if block >= *known {
                        return false;
                    }
                    buffer = raw::ReadBuffer(table, block);
                }
                if buffer < 0 {
                    // A buffer of a temporary table, not a shared one.
                    raw::ReleaseBuffer(buffer);
                    return false;
                }
                // As an index scan does: dead rows are removed to make room.
                if prunes {
                    compat::prune_page(table, buffer);
                }
                if !heap_page::fetch(table, buffer, hint.place, dirty, raw)
                    || (*dirty).xmin != pg_sys::InvalidTransactionId
                    || (*dirty).xmax != pg_sys::InvalidTransactionId
                {
                    return false;
                }
                has_key(table, keys, columns, count, raw)
            })
        };
        self.blocks = blocks;
        is_at
    }

    fn find_prepared(
        &mut self,
        (key, mut noted): (&Key, Option<Hint>),
        slot: &Slot,
        lock: bool,
        refine: Refine<'_>,
    ) -> Result<Found, PgError> {
        self.found_nothing = false;
        loop {
            let outcome = match noted.take() {
                Some(hint) if self.is_at(key, hint, slot) => Outcome::Visible,
                _ => self.scan_once(slot),
            };
            match outcome {
                Outcome::Visible if self.has_rest(slot) => {
                    let stamp = if lock {
                        self.lock(slot)?
                    } else {
                        Some(stamp_of(slot.writer()))
                    };
                    if let Some(stamp) = stamp {
                        return Ok(Found::Row(refine(slot.writer(), slot, stamp)?));
                    }
                }
                Outcome::None { candidates: 0 } => {
                    self.found_nothing = true;
                    return Ok(Found::Missing(None));
                }
                // Also if another row has the key in the index, which allows only one.
                Outcome::None { .. } | Outcome::Visible => {
                    let (moved, deletion) = self.survey(slot, refine)?;
                    if !moved || !self.visible_to_fresh_snapshot(slot) {
                        return Ok(Found::Missing(deletion));
                    }
                }
            }
        }
    }

    /// Starts a scan. Returns whether there is a version under the key that the snapshot sees, and
    /// how many index entries came up to it.
    fn first(&mut self, sees: Sees, slot: &Slot) -> (bool, usize) {
        let prunes = self.prunes;
        let dirty = &raw mut *self.dirty;
        let ((scan, keys, count), raw) = (self.restart(), slot.as_ptr());
        // SAFETY: the scan is open and has as many keys as it was begun with; the snapshot outlives
        // this look.
        unsafe {
            let snapshot = match sees {
                Sees::Unfinished => dirty,
                Sees::Any => any_snapshot(),
                Sees::Active => pg_sys::GetActiveSnapshot(),
            };
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                (*scan).xs_snapshot = snapshot;
                raw::index_rescan(scan, keys, count, std::ptr::null_mut(), 0);
                next_version(scan, raw, prunes)
            })
        }
    }

    /// Returns whether there is another version under the key that the scan's snapshot sees.
    fn next(&mut self, slot: &Slot) -> bool {
        let (scan, prunes, raw) = (self.scan, self.prunes, slot.as_ptr());
        // SAFETY: the scan was started.
        unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| next_version(scan, raw, prunes).0) }
    }

    /// Finds and locks all rows under the keys except the one at `own` and those in `rows`, and
    /// adds them to `rows`. If the index is lossy, only rows that `meets` accepts. Waits for
    /// transactions that are writing such a row.
    ///
    /// # Errors
    /// As [`IndexLookup::find`].
    pub(super) fn find_others(
        &mut self,
        own: Option<pg_sys::ItemPointerData>,
        rows: &mut LockedRows,
        meets: &mut dyn FnMut(&Slot) -> bool,
    ) -> Result<(), PgError> {
        // After each wait from the start: another row may have come.
        'again: loop {
            let mut slot = self.make_slot();
            let (mut found, _) = self.first(Sees::Unfinished, &slot);
            while found {
                let tid = slot.tid();
                let is_known = own.is_some_and(|own| same_place(own, tid))
                    || rows.iter().any(|(other, _)| same_place(other.tid(), tid));
                if !is_known && self.is_met(&slot, meets) {
                    if self.wait_for_writer() {
                        continue 'again;
                    }
                    let Some(stamp) = self.lock(&slot)? else {
                        continue 'again;
                    };
                    rows.push((slot, stamp));
                    slot = self.make_slot();
                }
                found = self.next(&slot);
            }
            return Ok(());
        }
    }

    /// Whether there is a row under the keys other than the one at `own`, committed or not, that
    /// `meets` accepts if the index is lossy.
    pub(super) fn has_other(
        &mut self,
        own: pg_sys::ItemPointerData,
        meets: &mut dyn FnMut(&Slot) -> bool,
    ) -> bool {
        let slot = self.make_slot();
        let (mut found, _) = self.first(Sees::Unfinished, &slot);
        while found && (same_place(own, slot.tid()) || !self.is_met(&slot, meets)) {
            found = self.next(&slot);
        }
        found
    }

    fn is_met(&self, slot: &Slot, meets: &mut dyn FnMut(&Slot) -> bool) -> bool {
        !self.state().xs_recheck || meets(slot)
    }

    /// Returns the table, which is open whenever the look-up is used.
    fn table(&self) -> RelationRef<'_> {
        // SAFETY: the caller of `with_keys` says so, and that there is one.
        unsafe { RelationRef::from_ptr(self.table).unwrap_unchecked() }
    }

    /// Returns a new slot for a row of the table.
    fn make_slot(&self) -> Slot {
        slot_of(self.table())
    }

    /// Waits for the transaction that is writing or deleting the version that the dirty snapshot
    /// showed, with deadlock detection. Returns false if there is none.
    fn wait_for_writer(&self) -> bool {
        let writer = [self.dirty.xmin, self.dirty.xmax]
            .into_iter()
            .find(|xid| *xid != pg_sys::InvalidTransactionId);
        writer.map(transaction::wait_for).is_some()
    }

    fn scan_once(&mut self, slot: &Slot) -> Outcome {
        loop {
            let (found, candidates) = self.first(Sees::Unfinished, slot);
            if !found {
                return Outcome::None { candidates };
            }
            if !self.wait_for_writer() {
                return Outcome::Visible;
            }
        }
    }

    /// Locks the version in `slot`. Returns `None` if it has changed meanwhile and must be looked
    /// up again.
    fn lock(&mut self, slot: &Slot) -> Result<Option<Stamp>, PgError> {
        lock_row(self.table(), slot)
    }

    fn visible_to_fresh_snapshot(&mut self, slot: &Slot) -> bool {
        let seen = snapshot::latest(|| {
            let (found, _) = self.first(Sees::Active, slot);
            let found = found && self.has_rest(slot);
            slot.clear();
            Ok::<bool, PgError>(found)
        });
        matches!(seen, Ok(true))
    }

    /// Looks through the dead versions of the row under the key. Returns whether the row may have
    /// moved to a place that the scan had passed, and the latest deletion.
    fn survey(
        &mut self,
        slot: &Slot,
        refine: Refine<'_>,
    ) -> Result<(bool, Option<Stamp>), PgError> {
        let mut moved = false;
        let mut latest = None;
        self.ignore_killed(false);
        let (mut found, _) = self.first(Sees::Any, slot);
        while found {
            if !self.has_rest(slot) {
                found = self.next(slot);
                continue;
            }
            let end = end_of(slot);
            moved |= matches!(end, EndOfVersion::Open | EndOfVersion::Replaced(..));
            match end {
                // If none of the versions is there any more, the last one was given another key,
                // which is a deletion of this key.
                EndOfVersion::Replaced(xid, stamp @ Stamp::Known(..))
                | EndOfVersion::Deleted(xid, stamp @ Stamp::Known(..)) => {
                    let refined = refine(xid, slot, stamp)?;
                    let newer = match (refined.timestamp(), latest.and_then(Stamp::timestamp)) {
                        (Some(timestamp), Some(known)) => timestamp > known,
                        _ => true,
                    };
                    if newer {
                        latest = Some(refined);
                    }
                }
                EndOfVersion::Open
                | EndOfVersion::Replaced(..)
                | EndOfVersion::Deleted(..)
                | EndOfVersion::Aborted => {}
            }
            found = self.next(slot);
        }
        self.ignore_killed(true);
        slot.clear();
        Ok((moved, latest))
    }
}
