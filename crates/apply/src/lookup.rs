//! Finding the row that a change is about, and locking it. Run by the appliers.
//!
//! A scan with a dirty snapshot sees what other transactions are writing, so it waits for them instead of missing them. It
//! can still miss a row that is updated to a new place while it looks; before a row is called missing it is looked for
//! again with a fresh ordinary snapshot. Dead row versions that VACUUM has not taken yet tell who deleted a row.

use braid_decoder::KeyHasher;
use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::ffi::raw;
use braid_postgres::heap_page::{self, Place, place_of, tid_of};
use braid_postgres::index_end::IndexEnd;
use pgrx::pg_sys;

use super::key_hash::feed;
use super::places::{Hint, Places};
use super::relation::{Key, KeyColumn};
use super::table::RowValues;
use super::version::{Stamp, stamp_of};

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The row is in the slot, locked unless that was not wanted, with this version.
    Row(Stamp),
    /// No row. The version of its deletion, if dead row versions still tell.
    Missing(Option<Stamp>),
}

/// What a row is looked for for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// One with its key is to be inserted, if it is not there.
    Insert,
    /// It is to be changed.
    Change,
    /// It is to go: nothing will be written into its page, so no room is made there. Whoever changes a row there next makes it, for several at once.
    Delete,
}

/// Rows, each in a slot of its own that is to be dropped, locked, with the version of the transaction that wrote it.
pub(super) type LockedRows = Vec<(*mut pg_sys::TupleTableSlot, Stamp)>;

/// Makes of what a transaction's commit says of its rows' version that of the row in a slot.
pub type Refine<'a> = &'a mut dyn FnMut(
    pg_sys::TransactionId,
    *mut pg_sys::TupleTableSlot,
    Stamp,
) -> Result<Stamp, PgError>;

/// An open index of an open table, ready to look for keys.
#[derive(Debug)]
pub struct IndexLookup {
    table: pg_sys::Relation,
    keys: Vec<pg_sys::ScanKeyData>,
    scan: pg_sys::IndexScanDesc,
    /// Where the scan allocates: access methods allocate some of their state only when they first need it, and keep it.
    context: pg_sys::MemoryContext,
    /// The scan's snapshot points here.
    dirty: Box<pg_sys::SnapshotData>,
    /// Where rows were, by their keys.
    places: Places,
    /// Where the index ends.
    end: IndexEnd,
    /// Nothing was under the key that was looked for last, not even what is dead.
    found_nothing: bool,
    /// The hash of the key that was looked for last.
    last: u64,
    /// The row that this transaction has deleted: the hash of its key, where it was, and the command from which on nothing else was written.
    deleted: Option<(u64, Place, pg_sys::CommandId)>,
    /// What is dead is taken out of pages on the way, as PostgreSQL's own look-ups do.
    prunes: bool,
    /// At least so many blocks the table has: it does not get shorter while this transaction has it locked. 0: not known.
    blocks: pg_sys::BlockNumber,
}

/// A scan marks index entries of rows that are dead to everybody, and passes over those that are marked. The first so many of a
/// key are spared: they tell of its deletion. The others are not, as many dead ones would be looked at each time.
const SPARED: usize = 8;

enum Outcome {
    None { candidates: usize },
    Visible,
}

impl IndexLookup {
    /// Prepare look-ups by `key`.
    ///
    /// # Safety
    /// `table` and `index` are open and locked whenever the look-up is used; the current memory context lives as long as it.
    pub unsafe fn new(table: pg_sys::Relation, index: pg_sys::Relation, key: &Key) -> Self {
        let mut keys = vec![pg_sys::ScanKeyData::default(); key.columns.len()];
        for (position, (place, column)) in keys.iter_mut().zip(&key.columns).enumerate() {
            // SAFETY: fills in the entry; the function exists, the catalog said so.
            unsafe {
                pg_sys::ScanKeyEntryInitialize(
                    place,
                    0,
                    i16::try_from(position + 1).unwrap_or(1),
                    3, // BTEqualStrategyNumber
                    pg_sys::InvalidOid,
                    column.collation,
                    column.equal,
                    pg_sys::Datum::null(),
                );
            }
        }
        // SAFETY: as the caller says.
        unsafe { Self::with_keys(table, index, keys) }
    }

    /// Prepare to look for what is in the keys.
    ///
    /// # Safety
    /// As [`IndexLookup::new`]; the keys are of the index's columns.
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
        // SAFETY: reads a process-local variable.
        let context = unsafe { pg_sys::CurrentMemoryContext };
        Self {
            table,
            keys,
            scan,
            context,
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

    /// The transaction ends: the table may get shorter.
    pub(super) fn end_transaction(&mut self) {
        self.blocks = 0;
        self.deleted = None;
    }

    /// The row that was looked for last is in this slot now, written to the table.
    pub(super) fn note(&mut self, slot: *mut pg_sys::TupleTableSlot) {
        // SAFETY: the slot is of the table.
        let hint = unsafe {
            Hint {
                place: place_of((*slot).tts_tid),
                buffer: buffer_of(slot),
            }
        };
        self.places.note(self.last, hint);
    }

    /// The row that was looked for last, in this slot, was just deleted.
    pub(super) fn note_deleted(&mut self, slot: *mut pg_sys::TupleTableSlot) {
        // SAFETY: the slot is of the table; reads the command counter.
        let (tid, command) = unsafe { ((*slot).tts_tid, pg_sys::GetCurrentCommandId(false)) };
        self.deleted = Some((self.last, place_of(tid), command));
    }

    /// Whether the row with the very key that is looked for is gone, as this transaction has just deleted it, and written nothing since. Then
    /// there is none under the key: it was the only one, as the index is unique at all times, and whoever else has one for it waits for
    /// the end of this transaction.
    fn is_deleted(&mut self, key: &Key, slot: *mut pg_sys::TupleTableSlot) -> bool {
        let Some((hash, place, command)) = self.deleted else {
            return false;
        };
        // SAFETY: reads the command counter.
        if hash != self.last || command != unsafe { pg_sys::GetCurrentCommandId(false) } {
            return false;
        }
        let (table, keys) = (self.table, self.keys.as_ptr());
        let (columns, count) = (key.columns.as_ptr(), self.keys.len());
        let any = super::any_snapshot();
        let mut tid = tid_of(place);
        let tid = &raw mut tid;
        // SAFETY: as in `is_at`; what this transaction has deleted stays where it is until it ends.
        let is_there = unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let fetch = (*(*table).rd_tableam).tuple_fetch_row_version;
                (*(*table).rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID
                    && fetch.is_some_and(|fetch| fetch(table, tid, any, slot))
                    && has_key(table, keys, columns, count, slot)
            })
        };
        // SAFETY: the slot holds that version, and is not wanted any more.
        unsafe {
            let is_deleted =
                is_there && matches!(end_of(slot), EndOfVersion::Deleted(_, Stamp::Own));
            super::clear_slot(slot);
            is_deleted
        }
    }

    /// End the scan. To be called before the table is closed.
    pub fn end(self) {
        // SAFETY: the scan was begun in `new` and is ended once.
        unsafe { pg_sys::index_endscan(self.scan) };
    }

    /// The scan.
    #[must_use]
    pub fn scan(&self) -> pg_sys::IndexScanDesc {
        self.scan
    }

    /// What `index_rescan` wants: the scan, its keys, and how many. Always with the keys: those that a scan was begun with are
    /// whatever was in memory, and some access methods look at them although none were given.
    #[must_use]
    pub fn restart(&mut self) -> (pg_sys::IndexScanDesc, pg_sys::ScanKey, i32) {
        let count = i32::try_from(self.keys.len()).unwrap_or(0);
        (self.scan, self.keys.as_mut_ptr(), count)
    }

    /// Find the row with the values' key, into `slot`, and with `lock` lock it for change. Null in a key finds nothing. What the
    /// transactions say of versions goes through `refine`.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises: lock timeouts, cancelled waits.
    pub fn find(
        &mut self,
        values: &RowValues,
        key: &Key,
        slot: *mut pg_sys::TupleTableSlot,
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
        // SAFETY: the context lives as long as the scan.
        let before = unsafe { pg_sys::MemoryContextSwitchTo(self.context) };
        self.prunes = purpose != Purpose::Delete;
        let noted = self.places.get(self.last);
        let found = if noted.is_none() && self.found_nothing && self.is_past_end() {
            Ok(Found::Missing(None))
        } else {
            self.find_prepared((key, noted), slot, lock, refine)
        };
        self.prunes = true;
        if matches!(found, Ok(Found::Row(_))) {
            self.note(slot);
        }
        // SAFETY: as above.
        unsafe { pg_sys::MemoryContextSwitchTo(before) };
        found
    }

    /// Look for these values from now on. False where one is null: that finds nothing.
    fn set_keys(&mut self, values: &RowValues, key: &Key) -> bool {
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

    /// Look where the row with the values' key is, finished or not, unless that is known; and remember it. Whether it was looked for.
    pub(super) fn look_ahead(
        &mut self,
        values: &RowValues,
        key: &Key,
        slot: *mut pg_sys::TupleTableSlot,
        purpose: Purpose,
    ) -> bool {
        if !self.set_keys(values, key) {
            return false;
        }
        self.last = self.hash(key);
        if self.places.get(self.last).is_some() {
            return false;
        }
        // SAFETY: the context lives as long as the scan.
        let before = unsafe { pg_sys::MemoryContextSwitchTo(self.context) };
        let dirty = &raw mut *self.dirty;
        self.prunes = purpose != Purpose::Delete;
        if self.first(dirty, slot).0 {
            self.note(slot);
            // SAFETY: the slot is of the table.
            unsafe { super::clear_slot(slot) };
        }
        self.prunes = true;
        // SAFETY: as above.
        unsafe { pg_sys::MemoryContextSwitchTo(before) };
        true
    }

    /// Whether the key that is looked for is greater than all that are in the index.
    fn is_past_end(&mut self) -> bool {
        // SAFETY: the scan's index is open; the keys are of its columns; the caller has switched to the context of the scan.
        unsafe { self.end.is_before((*self.scan).indexRelation, &self.keys) }
    }

    /// Hash of the key that is looked for. Keys that are equal without being the same have others, which costs a look into the index.
    fn hash(&self, key: &Key) -> u64 {
        let mut hasher = KeyHasher::new(0);
        for (place, column) in self.keys.iter().zip(&key.columns) {
            let position = usize::try_from(column.attribute - 1).unwrap_or(0);
            // SAFETY: the table is open; the value is one of the column.
            unsafe {
                feed(
                    &mut hasher,
                    (*self.table).rd_att,
                    position,
                    Some(place.sk_argument),
                );
            }
        }
        hasher.finish()
    }

    /// Whether the row with this very key is at the place, alive and not being written by anybody: then it is in the slot. There is
    /// one such row at most, as the index is unique at all times.
    fn is_at(&mut self, key: &Key, hint: Hint, slot: *mut pg_sys::TupleTableSlot) -> bool {
        let (table, keys, count) = (self.table, self.keys.as_ptr(), self.keys.len());
        let (columns, dirty) = (key.columns.as_ptr(), &raw mut *self.dirty);
        let prunes = self.prunes;
        let mut blocks = self.blocks;
        let known = &raw mut blocks;
        // SAFETY: the table is open and locked, the slot is one of its own, and there is a key for each column. Nothing with a
        // destructor is on the closure's stack.
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
                    // A temporary table's: not one of those that all can read.
                    raw::ReleaseBuffer(buffer);
                    return false;
                }
                // As a look through the index does: what nobody sees any more makes room.
                if prunes {
                    raw::heap_page_prune_opt(table, buffer);
                }
                if !heap_page::fetch(table, buffer, hint.place, dirty, slot)
                    || (*dirty).xmin != pg_sys::InvalidTransactionId
                    || (*dirty).xmax != pg_sys::InvalidTransactionId
                {
                    return false;
                }
                has_key(table, keys, columns, count, slot)
            })
        };
        self.blocks = blocks;
        is_at
    }

    fn find_prepared(
        &mut self,
        (key, mut noted): (&Key, Option<Hint>),
        slot: *mut pg_sys::TupleTableSlot,
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
                Outcome::Visible => {
                    let stamp = if lock {
                        self.lock(slot)?
                    } else {
                        // SAFETY: the slot holds the version that the scan stands on.
                        Some(stamp_of(unsafe { writer(slot) }))
                    };
                    if let Some(stamp) = stamp {
                        // SAFETY: as above.
                        let xid = unsafe { writer(slot) };
                        return Ok(Found::Row(refine(xid, slot, stamp)?));
                    }
                }
                Outcome::None { candidates: 0 } => {
                    self.found_nothing = true;
                    return Ok(Found::Missing(None));
                }
                Outcome::None { .. } => {
                    let (moved, deletion) = self.survey(slot, refine)?;
                    if !moved || !self.visible_to_fresh_snapshot(slot) {
                        return Ok(Found::Missing(deletion));
                    }
                }
            }
        }
    }

    /// Start to look: the first version under the key that `snapshot` sees, and how many entries the index had up to it.
    fn first(
        &mut self,
        snapshot: pg_sys::Snapshot,
        slot: *mut pg_sys::TupleTableSlot,
    ) -> (bool, usize) {
        let prunes = self.prunes;
        let (scan, keys, count) = self.restart();
        // SAFETY: the scan is open and has as many keys as it was begun with; the snapshot outlives this look.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                (*scan).xs_snapshot = snapshot;
                raw::index_rescan(scan, keys, count, std::ptr::null_mut(), 0);
                next_version(scan, slot, prunes)
            })
        }
    }

    /// The next version under the key that the scan's snapshot sees.
    fn next(&mut self, slot: *mut pg_sys::TupleTableSlot) -> bool {
        let (scan, prunes) = (self.scan, self.prunes);
        // SAFETY: the scan was started.
        unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| next_version(scan, slot, prunes).0) }
    }

    /// Find and lock all rows under the keys that are not the one at `own` and not among `rows`, where they are put. Of what a lossy
    /// index brings, those that `meets` takes. Waits for who is writing one.
    ///
    /// # Errors
    /// As [`IndexLookup::find`].
    pub(super) fn find_others(
        &mut self,
        own: Option<pg_sys::ItemPointerData>,
        rows: &mut LockedRows,
        meets: &mut dyn FnMut(*mut pg_sys::TupleTableSlot) -> bool,
    ) -> Result<(), PgError> {
        // Each time one was waited for, from the start: another may have come.
        'again: loop {
            let mut slot = self.make_slot();
            let dirty = &raw mut *self.dirty;
            let (mut found, _) = self.first(dirty, slot);
            while found {
                // SAFETY: the slots hold rows that were found.
                let tid = unsafe { (*slot).tts_tid };
                let is_known = own.is_some_and(|own| same_place(own, tid))
                    || rows
                        .iter()
                        // SAFETY: as above.
                        .any(|(other, _)| same_place(unsafe { (**other).tts_tid }, tid));
                if !is_known && self.is_met(slot, meets) {
                    if self.wait_for_writer() {
                        drop_slot(slot);
                        continue 'again;
                    }
                    let Some(stamp) = self.lock(slot)? else {
                        drop_slot(slot);
                        continue 'again;
                    };
                    rows.push((slot, stamp));
                    slot = self.make_slot();
                }
                found = self.next(slot);
            }
            drop_slot(slot);
            return Ok(());
        }
    }

    /// Whether there is a row under the keys that is not the one at `own`, finished or not, and that `meets` takes if the index is lossy.
    pub(super) fn has_other(
        &mut self,
        own: pg_sys::ItemPointerData,
        meets: &mut dyn FnMut(*mut pg_sys::TupleTableSlot) -> bool,
    ) -> bool {
        let slot = self.make_slot();
        let dirty = &raw mut *self.dirty;
        let (mut found, _) = self.first(dirty, slot);
        // SAFETY: the slot holds what was found.
        while found && (same_place(own, unsafe { (*slot).tts_tid }) || !self.is_met(slot, meets)) {
            found = self.next(slot);
        }
        drop_slot(slot);
        found
    }

    fn is_met(
        &self,
        slot: *mut pg_sys::TupleTableSlot,
        meets: &mut dyn FnMut(*mut pg_sys::TupleTableSlot) -> bool,
    ) -> bool {
        // SAFETY: the scan is open.
        let is_lossy = unsafe { (*self.scan).xs_recheck };
        !is_lossy || meets(slot)
    }

    /// A slot for a row of the table.
    fn make_slot(&self) -> *mut pg_sys::TupleTableSlot {
        // SAFETY: the table is open.
        unsafe {
            pg_sys::MakeSingleTupleTableSlot(
                (*self.table).rd_att,
                pg_sys::table_slot_callbacks(self.table),
            )
        }
    }

    /// The dirty snapshot says who is writing or deleting the version that it showed: wait for that transaction to end, with deadlock
    /// detection. False if there is none.
    fn wait_for_writer(&self) -> bool {
        let writer = [self.dirty.xmin, self.dirty.xmax]
            .into_iter()
            .find(|xid| *xid != pg_sys::InvalidTransactionId);
        if let Some(xid) = writer {
            // SAFETY: waits for a transaction by its id.
            unsafe {
                pg_sys::XactLockTableWait(
                    xid,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    pg_sys::XLTW_Oper::XLTW_None,
                );
            }
        }
        writer.is_some()
    }

    fn scan_once(&mut self, slot: *mut pg_sys::TupleTableSlot) -> Outcome {
        loop {
            let dirty = &raw mut *self.dirty;
            let (found, candidates) = self.first(dirty, slot);
            if !found {
                return Outcome::None { candidates };
            }
            if !self.wait_for_writer() {
                return Outcome::Visible;
            }
        }
    }

    /// Lock the version in `slot`; `None` when it changed meanwhile and has to be looked for again.
    fn lock(&mut self, slot: *mut pg_sys::TupleTableSlot) -> Result<Option<Stamp>, PgError> {
        lock_row(self.table, slot)
    }

    fn visible_to_fresh_snapshot(&mut self, slot: *mut pg_sys::TupleTableSlot) -> bool {
        // SAFETY: the snapshot is registered with the active stack while the scan uses it.
        unsafe {
            pg_sys::PushActiveSnapshot(pg_sys::GetLatestSnapshot());
            let snapshot = pg_sys::GetActiveSnapshot();
            let (found, _) = self.first(snapshot, slot);
            super::clear_slot(slot);
            pg_sys::PopActiveSnapshot();
            found
        }
    }

    /// Look through the dead versions under the key: whether the row may have gone to a place that the scan had passed, and
    /// the latest deletion.
    fn survey(
        &mut self,
        slot: *mut pg_sys::TupleTableSlot,
        refine: Refine<'_>,
    ) -> Result<(bool, Option<Stamp>), PgError> {
        let mut moved = false;
        let mut latest = None;
        // SAFETY: the scan is open. What is marked as dead is there until VACUUM has taken the row.
        unsafe { (*self.scan).ignore_killed_tuples = false };
        let (mut found, _) = self.first(super::any_snapshot(), slot);
        while found {
            // SAFETY: the slot holds the version that the scan stands on, with its buffer pinned.
            let end = unsafe { end_of(slot) };
            moved |= matches!(end, EndOfVersion::Open | EndOfVersion::Replaced(..));
            match end {
                // Where none of them is there any more, the last one was given another key: that is a deletion of this one.
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
        // SAFETY: lets go of the buffer pin; no error leaves the scan in use.
        unsafe {
            (*self.scan).ignore_killed_tuples = true;
            super::clear_slot(slot);
        }
        Ok((moved, latest))
    }
}

/// The buffer that a slot's row is in; 0 where it is in none.
///
/// # Safety
/// The slot is there.
unsafe fn buffer_of(slot: *mut pg_sys::TupleTableSlot) -> pg_sys::Buffer {
    // SAFETY: only a slot of that kind is taken for one.
    unsafe {
        if std::ptr::eq((*slot).tts_ops, &raw const pg_sys::TTSOpsBufferHeapTuple) {
            (*slot.cast::<pg_sys::BufferHeapTupleTableSlot>()).buffer
        } else {
            0
        }
    }
}

/// Whether the row in a slot has this very key: the same bytes, not only equal ones.
///
/// # Safety
/// Under a guard; the slot holds a row of the table, and keys and columns are `count` each.
unsafe fn has_key(
    table: pg_sys::Relation,
    keys: *const pg_sys::ScanKeyData,
    columns: *const KeyColumn,
    count: usize,
    slot: *mut pg_sys::TupleTableSlot,
) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        (0..count).all(|position| {
            let attribute = (*columns.add(position)).attribute;
            let column = usize::try_from(attribute - 1).unwrap_or(0);
            if (*slot).tts_nvalid < attribute {
                raw::slot_getsomeattrs_int(slot, i32::from(attribute));
            }
            let of_table = compat::TupleDescAttr((*table).rd_att, column);
            !*(*slot).tts_isnull.add(column)
                && raw::datum_image_eq(
                    *(*slot).tts_values.add(column),
                    (*keys.add(position)).sk_argument,
                    (*of_table).attbyval,
                    i32::from((*of_table).attlen),
                )
        })
    }
}

fn drop_slot(slot: *mut pg_sys::TupleTableSlot) {
    // SAFETY: of those that `make_slot` has made, and not used any more.
    unsafe { pg_sys::ExecDropSingleTupleTableSlot(slot) };
}

fn same_place(one: pg_sys::ItemPointerData, other: pg_sys::ItemPointerData) -> bool {
    one.ip_posid == other.ip_posid
        && one.ip_blkid.bi_hi == other.ip_blkid.bi_hi
        && one.ip_blkid.bi_lo == other.ip_blkid.bi_lo
}

/// Have the scan stand in the page that its index entry leads to. A heap's scan prunes a page when it comes to it (heapam_index_fetch_tuple of
/// src/backend/access/heap/heapam_handler.c, 15 to 18), so it does not prune this one.
///
/// # Safety
/// Under a guard; the scan has just come to an entry.
unsafe fn enter_page(scan: pg_sys::IndexScanDesc) {
    // SAFETY: as the caller says; what the scan of a heap has is of that kind.
    unsafe {
        let table = (*scan).heapRelation;
        if (*(*table).rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID {
            let (block, _) = place_of((*scan).xs_heaptid);
            let fetch = (*scan).xs_heapfetch.cast::<pg_sys::IndexFetchHeapData>();
            (*fetch).xs_cbuf = raw::ReleaseAndReadBuffer((*fetch).xs_cbuf, table, block);
        }
    }
}

/// The next version that the scan's snapshot sees, and how many index entries were looked at: the loop of index_getnext_slot
/// (src/backend/access/index/indexam.c, 15 to 18). With `prunes`, what is dead is taken out of the pages.
///
/// # Safety
/// Under a guard; the scan was started, and the slot is of its table.
unsafe fn next_version(
    scan: pg_sys::IndexScanDesc,
    slot: *mut pg_sys::TupleTableSlot,
    prunes: bool,
) -> (bool, usize) {
    let mut entries = 0;
    // SAFETY: as the caller says.
    unsafe {
        loop {
            if !(*scan).xs_heap_continue {
                let forward = pg_sys::ScanDirection::ForwardScanDirection;
                if raw::index_getnext_tid(scan, forward).is_null() {
                    return (false, entries);
                }
                entries += 1;
                if !prunes {
                    enter_page(scan);
                }
            }
            if raw::index_fetch_heap(scan, slot) {
                return (true, entries);
            }
            if entries <= SPARED {
                (*scan).kill_prior_tuple = false;
            }
        }
    }
}

/// Lock the version in `slot` for change and say its row version; `None` when it changed meanwhile.
///
/// # Errors
/// Whatever PostgreSQL raises while it waits.
pub fn lock_row(
    table: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
) -> Result<Option<Stamp>, PgError> {
    let mut failure = pg_sys::TM_FailureData::default();
    // SAFETY: the slot holds a version of a row of the open table; the snapshot stays active for the call. The table access
    // method's function is called behind pgrx's guard, so that its errors unwind.
    unsafe {
        let mut tid = (*slot).tts_tid;
        pg_sys::PushActiveSnapshot(pg_sys::GetLatestSnapshot());
        let Some(tuple_lock) = (*(*table).rd_tableam).tuple_lock else {
            return Err(PgError::new(
                "0A000",
                "table access method cannot lock rows",
            ));
        };
        let snapshot = pg_sys::GetActiveSnapshot();
        let command = pg_sys::GetCurrentCommandId(false);
        let result = pg_sys::ffi::pg_guard_ffi_boundary(|| {
            tuple_lock(
                table,
                &raw mut tid,
                snapshot,
                slot,
                command,
                pg_sys::LockTupleMode::LockTupleExclusive,
                pg_sys::LockWaitPolicy::LockWaitBlock,
                0,
                &raw mut failure,
            )
        });
        pg_sys::PopActiveSnapshot();
        match result {
            pg_sys::TM_Result::TM_Ok => Ok(Some(stamp_of(writer(slot)))),
            pg_sys::TM_Result::TM_Updated | pg_sys::TM_Result::TM_Deleted => Ok(None),
            other => Err(PgError::new(
                "XX000",
                format!("unexpected result {other} of locking a row"),
            )),
        }
    }
}

/// The transaction that wrote the version in `slot`, also of a frozen one: its id stays in the row, and commit timestamps are
/// kept for longer than it takes VACUUM FULL or CLUSTER to freeze a row.
///
/// # Safety
/// The slot holds a heap tuple.
pub unsafe fn writer(slot: *mut pg_sys::TupleTableSlot) -> pg_sys::TransactionId {
    // SAFETY: as the caller says; HeapTupleHeaderGetRawXmin of src/include/access/htup_details.h.
    unsafe { (*heap_header(slot)).t_choice.t_heap.t_xmin }
}

/// Header of the heap tuple in `slot`.
///
/// # Safety
/// The slot holds a heap tuple.
unsafe fn heap_header(slot: *mut pg_sys::TupleTableSlot) -> pg_sys::HeapTupleHeader {
    // SAFETY: a slot that a heap scan filled is a heap tuple slot.
    unsafe { (*(*slot.cast::<pg_sys::HeapTupleTableSlot>()).tuple).t_data }
}

/// How a row version ended.
enum EndOfVersion {
    /// It has not ended, or nobody knows yet: there may be a newer version of the row elsewhere.
    Open,
    /// By a newer version of the row, elsewhere, perhaps under another key.
    Replaced(pg_sys::TransactionId, Stamp),
    /// Its deletion; [`Stamp::Own`] when this transaction deleted it.
    Deleted(pg_sys::TransactionId, Stamp),
    /// It never came to be.
    Aborted,
}

/// How the version in `slot`, which no snapshot of now sees, ended.
///
/// # Safety
/// The slot holds a heap tuple whose buffer is pinned.
unsafe fn end_of(slot: *mut pg_sys::TupleTableSlot) -> EndOfVersion {
    // SAFETY: the header's fields are read as HeapTupleSatisfiesVisibility does; xmax does not change any more once its
    // transaction has committed.
    unsafe {
        let header = heap_header(slot);
        let mask = u32::from((*header).t_infomask);
        if mask & (pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_LOCK_ONLY) != 0 {
            // Not deleted: its writer was rolled back, or the version came after the scan.
            let xmin = writer(slot);
            let frozen = pg_sys::HEAP_XMIN_COMMITTED | pg_sys::HEAP_XMIN_INVALID;
            let gone = mask & frozen != frozen
                && xmin.into_inner() >= pg_sys::FirstNormalTransactionId.into_inner()
                && !pg_sys::TransactionIdIsCurrentTransactionId(xmin)
                && !pg_sys::TransactionIdIsInProgress(xmin)
                && !pg_sys::TransactionIdDidCommit(xmin);
            return if gone {
                EndOfVersion::Aborted
            } else {
                EndOfVersion::Open
            };
        }
        let xmax = if mask & pg_sys::HEAP_XMAX_IS_MULTI == 0 {
            (*header).t_choice.t_heap.t_xmax
        } else {
            pg_sys::HeapTupleGetUpdateXid(header)
        };
        let ended = if same_place((*header).t_ctid, (*slot).tts_tid) {
            EndOfVersion::Deleted
        } else {
            EndOfVersion::Replaced
        };
        if pg_sys::TransactionIdIsCurrentTransactionId(xmax) {
            return ended(xmax, Stamp::Own);
        }
        // In this order: the commit log knows of a commit before snapshots do, and what was committed with it would not be seen.
        if !pg_sys::TransactionIdIsInProgress(xmax) && pg_sys::TransactionIdDidCommit(xmax) {
            ended(xmax, stamp_of(xmax))
        } else {
            EndOfVersion::Open
        }
    }
}
