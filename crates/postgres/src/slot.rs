//! Slots of rows, as the executor has them. Run by processes that find, compare or write rows.
//!
//! A slot is empty, or it holds a row whose values exist. Two rules keep that true:
//! - Values are put into a slot by `unsafe` functions only. Their callers make sure that the memory
//!   of a value outlives the row in the slot.
//! - Memory contexts are reset or deleted by `unsafe` functions only. Their callers make sure that
//!   no slot is read afterwards whose row has values in that memory.

use std::ptr::NonNull;
use std::rc::Rc;

use crate::owned::frees;
use pgrx::pg_sys;

use crate::compat;
use crate::memory;
use crate::pointee;
use crate::relation::RelationRef;
use crate::tuple_desc::TupleDesc;
use crate::value::Value;

/// A slot. Clones are the same slot, and one of its own is dropped with the last of them.
#[derive(Debug, Clone)]
pub struct Slot(Rc<Held>);

#[derive(Debug)]
struct Held {
    raw: NonNull<pg_sys::TupleTableSlot>,
    /// Nothing else frees the slot.
    is_own: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_own && !std::thread::panicking() {
            // SAFETY: made for this value by `Slot::of`, whose caller guarantees that it still
            // exists. No clone is left.
            unsafe { pg_sys::ExecDropSingleTupleTableSlot(self.raw.as_ptr()) };
        }
    }
}

/// A function of a kind of slots, which changes a slot.
type Operation = unsafe extern "C-unwind" fn(*mut pg_sys::TupleTableSlot);

/// The part of a heap tuple's header that says which transaction wrote the tuple, and how it ended.
#[derive(Debug, Clone, Copy)]
pub struct TupleHeader {
    /// `t_infomask`.
    pub infomask: u32,
    /// The transaction that wrote the tuple, also if it is frozen.
    pub xmin: pg_sys::TransactionId,
    /// The transaction that deleted or replaced it; invalid if none has.
    pub xmax: pg_sys::TransactionId,
    /// Place of the next version; its own if the tuple is the last one.
    pub ctid: pg_sys::ItemPointerData,
}

impl Slot {
    /// Makes a slot for rows of a relation, of the relation's own kind, in the current memory
    /// context.
    ///
    /// # Safety
    /// The slot and its clones are dropped before the current memory context is reset, and before
    /// the current transaction ends.
    #[must_use]
    pub unsafe fn of(relation: RelationRef<'_>) -> Self {
        // SAFETY: the relation is open, so it has a descriptor and a kind of slots. Memory that
        // PostgreSQL has allocated is never null.
        let raw = unsafe {
            NonNull::new_unchecked(pg_sys::MakeSingleTupleTableSlot(
                relation.descriptor().as_ptr(),
                relation.slot_kind(),
            ))
        };
        Self(Rc::new(Held { raw, is_own: true }))
    }

    /// A slot that somebody else frees; `None` for a null pointer.
    ///
    /// # Safety
    /// The slot exists until this value and its clones are dropped.
    #[must_use]
    pub unsafe fn borrowed(raw: *mut pg_sys::TupleTableSlot) -> Option<Self> {
        let raw = NonNull::new(raw)?;
        Some(Self(Rc::new(Held { raw, is_own: false })))
    }

    /// Makes a virtual slot of another one's shape, in the current memory context, which frees it.
    ///
    /// # Safety
    /// The slot and its clones are dropped before the current memory context is reset. The other
    /// slot's shape exists until then, and its references are not counted.
    #[must_use]
    pub unsafe fn virtual_like(other: &Self) -> Self {
        let shape = other.descriptor().as_ptr();
        // SAFETY: the shape exists. Memory that PostgreSQL has allocated is never null.
        let raw = unsafe { NonNull::new_unchecked(compat::make_virtual_slot(shape)) };
        Self(Rc::new(Held { raw, is_own: false }))
    }

    /// PostgreSQL's own pointer, valid as long as `self` is.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *mut pg_sys::TupleTableSlot {
        self.0.raw.as_ptr()
    }

    /// Whether a clone of it is held elsewhere.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Rc::strong_count(&self.0) > 1
    }

    #[inline]
    fn get(&self) -> &pg_sys::TupleTableSlot {
        // SAFETY: the slot exists as long as `self` does. PostgreSQL changes it only in calls,
        // during which nobody holds the returned reference.
        unsafe { self.0.raw.as_ref() }
    }

    /// Whether it holds no row.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        u32::from(self.get().tts_flags) & pg_sys::TTS_FLAG_EMPTY != 0
    }

    /// The shape of its rows.
    #[inline]
    #[must_use]
    pub fn descriptor(&self) -> TupleDesc<'_> {
        pointee::slot_shape(self.get())
    }

    /// Where its row is, or was.
    #[inline]
    #[must_use]
    pub fn tid(&self) -> pg_sys::ItemPointerData {
        self.get().tts_tid
    }

    /// Says where the row is that is to be locked into the slot.
    pub fn set_tid(&self, tid: pg_sys::ItemPointerData) {
        // SAFETY: the slot exists as long as `self` does.
        unsafe { (*self.as_ptr()).tts_tid = tid };
    }

    /// Takes the row apart, up to its column number `last`.
    #[inline]
    pub fn deform(&self, last: usize) {
        let last = i16::try_from(last.min(self.descriptor().len())).unwrap_or(i16::MAX);
        if self.get().tts_nvalid < last && !self.is_empty() {
            // SAFETY: the slot holds a row, which has so many columns.
            unsafe { pg_sys::slot_getsomeattrs_int(self.as_ptr(), i32::from(last)) };
        }
    }

    /// The value of a column, from 0; `None` for null, and if the slot has no such value.
    #[inline]
    #[must_use]
    pub fn value(&self, column: usize) -> Option<pg_sys::Datum> {
        if usize::try_from(self.get().tts_nvalid).unwrap_or(0) <= column {
            self.deform(self.descriptor().len());
        }
        self.taken(column)
    }

    /// As [`Slot::value`], of a column up to which the row is taken apart.
    #[inline]
    #[must_use]
    pub fn taken(&self, column: usize) -> Option<pg_sys::Datum> {
        let slot = self.get();
        if usize::try_from(slot.tts_nvalid).unwrap_or(0) <= column {
            return None;
        }
        // SAFETY: the arrays have `tts_nvalid` members that are set.
        unsafe { (!*slot.tts_isnull.add(column)).then(|| *slot.tts_values.add(column)) }
    }

    /// As [`Slot::value`], with the column.
    #[inline]
    #[must_use]
    pub fn cell(&self, column: usize) -> Option<Value<'_>> {
        self.cell_with(column, self.value(column)?)
    }

    /// As [`Slot::taken`], of this column of the slot's shape.
    #[inline]
    #[must_use]
    pub fn taken_cell(&self, column: usize) -> Option<Value<'_>> {
        self.cell_with(column, self.taken(column)?)
    }

    /// The value that the row has in a column.
    #[inline]
    fn cell_with(&self, column: usize, value: pg_sys::Datum) -> Option<Value<'_>> {
        // SAFETY: the value is one of the column, and exists as long as the row.
        Some(unsafe { Value::new(self.descriptor().get(column)?, value) })
    }

    /// As [`Slot::value`], copied to the current memory context.
    #[must_use]
    pub fn copy_value(&self, column: usize) -> Option<pg_sys::Datum> {
        Some(self.cell(column)?.copy().datum())
    }

    /// Whether a column, from 0, has exactly this value, or is null if none is given: the same
    /// bytes, not only an equal value. Values of another type count as different.
    #[must_use]
    pub fn has(&self, column: usize, value: Option<Value<'_>>) -> bool {
        column < self.descriptor().len()
            && match (value, self.cell(column)) {
                (None, None) => true,
                (Some(value), Some(here)) => value.is_same(here),
                _ => false,
            }
    }

    /// All columns of the row; `None` for null.
    #[must_use]
    pub fn values(&self) -> Vec<Option<pg_sys::Datum>> {
        let count = self.descriptor().len();
        self.deform(count);
        (0..count).map(|column| self.taken(column)).collect()
    }

    fn is_of(&self, kind: *const pg_sys::TupleTableSlotOps) -> bool {
        std::ptr::eq(self.get().tts_ops, kind)
    }

    fn heap_tuple(&self) -> Option<&pg_sys::HeapTupleData> {
        let is_heap = self.is_of(&raw const pg_sys::TTSOpsBufferHeapTuple)
            || self.is_of(&raw const pg_sys::TTSOpsHeapTuple);
        if !is_heap || self.is_empty() {
            return None;
        }
        // SAFETY: both kinds begin with a HeapTupleTableSlot, whose tuple is null or exists as long
        // as the row is in the slot.
        unsafe {
            self.as_ptr()
                .cast::<pg_sys::HeapTupleTableSlot>()
                .as_ref()?
                .tuple
                .as_ref()
        }
    }

    /// The transaction that wrote the row, also a frozen one: its id stays in the row. Invalid if
    /// the row is not one of a heap.
    #[inline]
    #[must_use]
    pub fn writer(&self) -> pg_sys::TransactionId {
        let header = self.heap_tuple().and_then(pointee::header);
        header.map_or(pg_sys::InvalidTransactionId, pointee::writer)
    }

    /// The header of the row; `None` if the row is not one of a heap.
    #[must_use]
    pub fn header(&self) -> Option<TupleHeader> {
        let header = self.heap_tuple()?.t_data;
        // SAFETY: a tuple has a header. `xmax` is a set of transactions only if the mask says so,
        // and one of them may have written only if they do not only lock.
        unsafe {
            let infomask = u32::from((*header).t_infomask);
            let fields = (*header).t_choice.t_heap;
            let xmax = if infomask & (pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_LOCK_ONLY) != 0
            {
                pg_sys::InvalidTransactionId
            } else if infomask & pg_sys::HEAP_XMAX_IS_MULTI != 0 {
                pg_sys::HeapTupleGetUpdateXid(header)
            } else {
                fields.t_xmax
            };
            Some(TupleHeader {
                infomask,
                xmin: fields.t_xmin,
                xmax,
                ctid: (*header).t_ctid,
            })
        }
    }

    /// The buffer that the row is in; 0 if it is in none.
    #[inline]
    #[must_use]
    pub fn buffer(&self) -> pg_sys::Buffer {
        if !self.is_of(&raw const pg_sys::TTSOpsBufferHeapTuple) {
            return 0;
        }
        // SAFETY: a slot of that kind is a BufferHeapTupleTableSlot.
        unsafe { (*self.as_ptr().cast::<pg_sys::BufferHeapTupleTableSlot>()).buffer }
    }

    /// Empties it: ExecClearTuple of src/include/executor/tuptable.h.
    #[inline]
    pub fn clear(&self) {
        self.run(self.operations().clear);
    }

    /// Has the slot own its row, whatever becomes of the memory that the row is in.
    pub fn materialize(&self) {
        self.run(self.operations().materialize);
    }

    /// The functions of slots of its kind.
    #[inline]
    fn operations(&self) -> &pg_sys::TupleTableSlotOps {
        pointee::operations(self.get())
    }

    /// Runs one of the slot's own functions, if its kind has it.
    #[inline]
    fn run(&self, function: Option<Operation>) {
        let raw = self.as_ptr();
        if let Some(function) = function {
            // SAFETY: the function belongs to the kind of the slot; it is behind pgrx's guard.
            unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| function(raw)) };
        }
    }

    /// Puts the row of another slot, of the same shape, into this one: ExecCopySlot of
    /// src/include/executor/tuptable.h, 15 to 18. An empty one, or one of another shape, empties
    /// this one.
    pub fn copy_from(&self, other: &Self) {
        if other.is_empty() || self.descriptor().len() != other.descriptor().len() {
            return self.clear();
        }
        let (raw, from) = (self.as_ptr(), other.as_ptr());
        // SAFETY: the slot's own function, behind pgrx's guard. It copies the row.
        unsafe {
            if let Some(copy) = self.operations().copyslot {
                pg_sys::ffi::pg_guard_ffi_boundary(|| copy(raw, from));
            }
        }
    }

    /// The row as a composite value, in memory of the slot or of the current memory context.
    #[must_use]
    pub fn composite(&self) -> pg_sys::Datum {
        // SAFETY: PostgreSQL makes a copy of the row, or takes it as it is.
        unsafe { pg_sys::ExecFetchSlotHeapTupleDatum(self.as_ptr()) }
    }

    /// As [`Slot::composite`], with its type, which is that of the slot's shape.
    #[must_use]
    pub fn composite_value(&self) -> Value<'_> {
        // SAFETY: a composite value of that type, which stays as long as the row.
        unsafe { Value::of_type(self.descriptor().row_type(), self.composite()) }
    }

    /// Copies the row as a heap tuple into the current memory context: ExecCopySlotHeapTuple of
    /// src/include/executor/tuptable.h, 15 to 18.
    #[must_use]
    pub fn copy_tuple(&self) -> pg_sys::HeapTuple {
        let raw = self.as_ptr();
        // SAFETY: the slot's own function, behind pgrx's guard; an empty slot has nothing to copy.
        unsafe {
            match self.operations().copy_heap_tuple {
                Some(copy) if !self.is_empty() => pg_sys::ffi::pg_guard_ffi_boundary(|| copy(raw)),
                _ => std::ptr::null_mut(),
            }
        }
    }

    /// Puts a row into a virtual slot, column by column; `None` is null.
    ///
    /// # Safety
    /// The slot is a virtual one. The values are of its columns, and exist until it is emptied or
    /// filled again.
    #[inline]
    pub unsafe fn fill(&self, mut value: impl FnMut(usize) -> Option<pg_sys::Datum>) {
        self.clear();
        let raw = self.as_ptr();
        let count = self.descriptor().len();
        // SAFETY: the arrays have a place for each column. ExecStoreVirtualTuple of
        // src/backend/executor/execTuples.c, 15 to 18.
        unsafe {
            for column in 0..count {
                let value = value(column);
                *(*raw).tts_values.add(column) = value.unwrap_or_else(pg_sys::Datum::null);
                *(*raw).tts_isnull.add(column) = value.is_none();
            }
            (*raw).tts_flags &= !u16::try_from(pg_sys::TTS_FLAG_EMPTY).unwrap_or(2);
            (*raw).tts_nvalid = i16::try_from(count).unwrap_or(i16::MAX);
        }
    }

    /// Gives a column, from 0, of the row in a virtual slot another value. A column that the slot
    /// does not have is left out.
    ///
    /// # Safety
    /// As [`Slot::fill`].
    #[inline]
    pub unsafe fn set(&self, column: usize, value: Option<pg_sys::Datum>) {
        if column < self.descriptor().len() {
            let raw = self.as_ptr();
            // SAFETY: the arrays have a place for each column.
            unsafe {
                *(*raw).tts_values.add(column) = value.unwrap_or_else(pg_sys::Datum::null);
                *(*raw).tts_isnull.add(column) = value.is_none();
            }
        }
    }

    /// Takes the row that is visible to a snapshot at a place of the slot's table. False if there
    /// is none: the slot is empty then.
    pub fn fetch(
        &self,
        relation: RelationRef<'_>,
        tid: pg_sys::ItemPointerData,
        snapshot: Visible,
    ) -> bool {
        let (table, raw) = (relation.as_ptr(), self.as_ptr());
        let mut tid = tid;
        let tid = &raw mut tid;
        if !self.is_for(relation) {
            return false;
        }
        // SAFETY: the relation is open, and the slot is of its kind and shape. The table access
        // method's function is behind pgrx's guard.
        unsafe {
            let snapshot = match snapshot {
                Visible::Any => &raw mut pg_sys::SnapshotAnyData,
                Visible::ToItself => &raw mut pg_sys::SnapshotSelfData,
                Visible::Active if pg_sys::ActiveSnapshotSet() => pg_sys::GetActiveSnapshot(),
                Visible::Active => return false,
            };
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let fetch = (*(*table).rd_tableam).tuple_fetch_row_version;
                fetch.is_some_and(|fetch| fetch(table, tid, snapshot, raw))
            })
        }
    }

    /// Whether rows of the relation can be put into it by its table access method.
    pub(crate) fn is_for(&self, relation: RelationRef<'_>) -> bool {
        relation.has_storage()
            && self.is_of(relation.slot_kind())
            && self.descriptor().len() == relation.descriptor().len()
    }
}

/// The version of a row that is seen at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visible {
    /// Any stored version.
    Any,
    /// Rows that are committed, and those that this transaction has written so far.
    ToItself,
    /// Rows that the active snapshot shows.
    Active,
}

/// A heap tuple that lives as long as this value, in this process's own memory.
#[derive(Debug)]
pub struct Tuple(NonNull<pg_sys::HeapTupleData>);

impl Tuple {
    /// Copies the row in a slot; `None` if it is empty.
    #[must_use]
    pub fn copy_of(slot: &Slot) -> Option<Self> {
        NonNull::new(memory::in_process(|| slot.copy_tuple())).map(Self)
    }

    /// How many columns it has: HeapTupleHeaderGetNatts of src/include/access/htup_details.h.
    #[must_use]
    pub fn columns(&self) -> usize {
        // SAFETY: the tuple is this value's own.
        let header = pointee::header(unsafe { self.0.as_ref() });
        let mask = header.map_or(0, |header| usize::from(header.t_infomask2));
        mask & pg_sys::HEAP_NATTS_MASK as usize
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn size(&self) -> usize {
        // SAFETY: the tuple is this value's own.
        let length = unsafe { self.0.as_ref() }.t_len;
        usize::try_from(length).unwrap_or(usize::MAX)
    }

    /// Puts it into a slot.
    ///
    /// # Safety
    /// The slot has the shape of the tuple's. The tuple exists until the slot is emptied or filled
    /// again.
    pub unsafe fn store(&self, slot: &Slot) {
        // SAFETY: the caller says so; the slot does not free the tuple.
        unsafe { pg_sys::ExecForceStoreHeapTuple(self.0.as_ptr(), slot.as_ptr(), false) };
    }
}

frees! {
    Tuple: |value| pg_sys::heap_freetuple(value.0.as_ptr());
}
