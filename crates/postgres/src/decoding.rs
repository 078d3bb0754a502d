//! Views of what a callback of logical decoding is given: the context, a transaction, a change and
//! its rows. Run by processes that decode WAL.
//!
//! Each view has the lifetime of the callback. It is made from PostgreSQL's pointer once, by an
//! `unsafe` function, and is safe to use from then on.
//!
//! Not for: the use of a change.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ops::Deref;
use std::ptr::NonNull;

use pgrx::pg_sys;

use crate::compat;
use crate::encoding::raw_name;
use crate::memory;
use crate::parse_tree::{List, Part, tree};
use crate::pointee;
use crate::relation::RelationRef;
use crate::tuple_desc::TupleDesc;
use crate::value::Value;

/// An argument that PostgreSQL gives to a callback of an output plugin.
pub trait Argument {
    /// A view of it, for the time of the callback.
    type View<'c>;

    /// Makes the view.
    ///
    /// # Safety
    /// PostgreSQL has given the argument to a callback, which runs for `'c`.
    unsafe fn view<'c>(self) -> Self::View<'c>;
}

/// Declares views of pointers, each with the function that makes it.
macro_rules! pointers {
    ($($raw:ty => $view:ty, $make:ident::$how:ident;)*) => {$(
        impl Argument for $raw {
            type View<'c> = $view;

            #[inline]
            unsafe fn view<'c>(self) -> Self::View<'c> {
                // SAFETY: the pointer is valid for `'c`, or null where that can be, as PostgreSQL
                // gives it to a callback.
                unsafe { $make::$how(self) }
            }
        }
    )*};
}

pointers! {
    *mut pg_sys::LogicalDecodingContext => Context<'c>, Context::from_ptr;
    *mut pg_sys::ReorderBufferTXN => Option<Transaction<'c>>, Transaction::from_ptr;
    *mut pg_sys::ReorderBufferChange => DecodedChange<'c>, DecodedChange::from_ptr;
    pg_sys::Relation => Option<RelationRef<'c>>, RelationRef::from_ptr;
    *const c_char => &'c CStr, CStr::from_ptr;
}

impl Argument for (*mut pg_sys::Relation, c_int) {
    type View<'c> = Vec<RelationRef<'c>>;

    unsafe fn view<'c>(self) -> Self::View<'c> {
        let count = usize::try_from(self.1).unwrap_or(0);
        // SAFETY: PostgreSQL gives so many relations to a callback, all open.
        let one = |place: usize| unsafe { RelationRef::from_ptr(*self.0.add(place)) };
        (0..count).filter_map(one).collect()
    }
}

impl Argument for (*const c_char, pg_sys::Size) {
    type View<'c> = &'c [u8];

    unsafe fn view<'c>(self) -> Self::View<'c> {
        if self.1 == 0 {
            return &[];
        }
        // SAFETY: PostgreSQL gives so many bytes to a callback.
        unsafe { std::slice::from_raw_parts(self.0.cast(), self.1) }
    }
}

/// Declares arguments that are no pointers.
macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Argument for $number {
            type View<'c> = Self;

            #[inline]
            unsafe fn view<'c>(self) -> Self::View<'c> {
                self
            }
        }
    )*};
}

numbers!(bool, i64, u64, pg_sys::TransactionId);

/// A decoding context, through which an output plugin writes.
#[derive(Debug, Clone, Copy)]
pub struct Context<'c> {
    raw: NonNull<pg_sys::LogicalDecodingContext>,
    lives: PhantomData<&'c pg_sys::LogicalDecodingContext>,
}

/// Declares calls that take the context and a flag.
macro_rules! writes {
    ($($(#[doc = $doc:literal])* fn $name:ident($flag:ident) = $symbol:ident;)*) => {
        impl Context<'_> {$(
            $(#[doc = $doc])*
            #[inline]
            pub fn $name(self, $flag: bool) {
                // SAFETY: the context is valid. PostgreSQL checks that it accepts writes, and that
                // a message was prepared.
                unsafe { pg_sys::$symbol(self.as_ptr(), $flag) };
            }
        )*}
    };
}

writes! {
    /// Says that the stream has come so far; `skipped` if nothing of the transaction was sent.
    fn update_progress(skipped) = OutputPluginUpdateProgress;
    /// Begins a message; `last` if it is the last of what belongs together. Where no message may be
    /// written PostgreSQL raises an error.
    fn prepare_write(last) = OutputPluginPrepareWrite;
    /// Sends the message that was prepared. Without one PostgreSQL raises an error.
    fn write(last) = OutputPluginWrite;
}

impl<'c> Context<'c> {
    /// The context that PostgreSQL gives to a callback, or that its WAL reader belongs to.
    ///
    /// # Safety
    /// The pointer is not null. The context, its output buffer and its reader live for `'c`.
    #[inline]
    #[must_use]
    pub unsafe fn from_ptr(raw: *mut pg_sys::LogicalDecodingContext) -> Self {
        Self {
            // SAFETY: the caller says that it is not null.
            raw: unsafe { NonNull::new_unchecked(raw) },
            lives: PhantomData,
        }
    }

    /// PostgreSQL's own pointer, valid for `'c`.
    #[inline]
    #[must_use]
    pub fn as_ptr(self) -> *mut pg_sys::LogicalDecodingContext {
        self.raw.as_ptr()
    }

    #[inline]
    fn get(&self) -> &pg_sys::LogicalDecodingContext {
        // SAFETY: the context lives for `'c`. It changes in calls, during which nobody holds this.
        unsafe { self.raw.as_ref() }
    }

    /// Memory that goes with the context.
    #[must_use]
    pub fn memory(self) -> pg_sys::MemoryContext {
        self.get().context
    }

    /// A new context below its memory, with which it goes.
    #[must_use]
    pub fn memory_below(self, name: &'static CStr) -> memory::Context {
        memory::Context(self.memory()).below(name)
    }

    /// The options that the stream was asked for with.
    pub fn options(self) -> impl Iterator<Item = Part<'c, pg_sys::DefElem>> {
        // SAFETY: the options belong to the context, which lives for `'c`, and nobody changes them.
        let list: Option<List<'c>> = unsafe { tree(self.get().output_plugin_options) };
        list.into_iter().flat_map(List::of)
    }

    /// Place and name of the slot that is decoded, which is this process's.
    #[must_use]
    pub fn slot(&self) -> Option<(usize, &CStr)> {
        // SAFETY: null, or a slot in shared memory that stays this process's, and keeps its name,
        // as long as the context.
        let (place, slot) = unsafe {
            let slot = self.get().slot.as_ref()?;
            (pg_sys::ReplicationSlotIndex(self.get().slot), slot)
        };
        Some((usize::try_from(place).ok()?, raw_name(&slot.data.name)))
    }

    /// The position that the next message carries.
    #[inline]
    #[must_use]
    pub fn write_location(self) -> u64 {
        self.get().write_location
    }

    /// Sets the position that the next message carries.
    #[inline]
    pub fn set_write_location(self, location: u64) {
        self.change(|context| context.write_location = location);
    }

    #[inline]
    fn change(mut self, change: impl FnOnce(&mut pg_sys::LogicalDecodingContext)) {
        // SAFETY: the context lives for `'c`; nobody holds a reference to it.
        change(unsafe { self.raw.as_mut() });
    }

    /// Lets `work` write outside of a callback, at a position.
    pub fn writing_at<T>(self, location: u64, work: impl FnOnce() -> T) -> T {
        let accept = |accepts| {
            self.change(|context| {
                context.accept_writes = accepts;
                context.write_xid = pg_sys::InvalidTransactionId;
                context.write_location = location;
            });
        };
        accept(true);
        let done = work();
        accept(false);
        done
    }

    /// Appends to the current message.
    #[inline]
    pub fn append(self, bytes: &[u8]) {
        let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        // SAFETY: the output buffer is the context's; PostgreSQL copies the bytes, of which there
        // are at least as many.
        unsafe {
            pg_sys::appendBinaryStringInfo(self.get().out, bytes.as_ptr().cast(), length);
        }
    }

    /// The current message as far as it is written, its header included.
    #[must_use]
    pub fn written(&self) -> &[u8] {
        pointee::message(self.get()).map_or(&[], pointee::bytes)
    }

    /// Empties the output buffer if it has more memory than `most`, and gives the rest back.
    pub fn shrink(self, most: i32) {
        // SAFETY: the output buffer is the context's; it is empty when its memory is made smaller.
        unsafe {
            let out = &mut *self.get().out;
            if out.maxlen > most {
                pg_sys::resetStringInfo(out);
                let kept = pg_sys::Size::try_from(most).unwrap_or_default();
                out.data = pg_sys::repalloc(out.data.cast(), kept).cast();
                out.maxlen = most;
            }
        }
    }

    /// The reader of the context's WAL; `None` where there is none.
    #[inline]
    #[must_use]
    pub fn reader(&self) -> Option<&pg_sys::XLogReaderState> {
        pointee::reader(self.get())
    }

    /// The record that is being decoded.
    #[inline]
    #[must_use]
    pub fn record(self) -> Option<Record<'c>> {
        let record = self.reader()?.record;
        // SAFETY: null, or the record that the reader holds until it reads the next one, which it
        // does outside of callbacks.
        unsafe { record.as_ref() }.map(Record)
    }
}

/// A decoded record of WAL.
#[derive(Debug, Clone, Copy)]
pub struct Record<'c>(&'c pg_sys::DecodedXLogRecord);

impl<'c> Record<'c> {
    /// The data of its resource manager.
    #[inline]
    #[must_use]
    pub fn data(self) -> &'c [u8] {
        pointee::data(self.0)
    }

    /// The blocks that it names, by their numbers; some may not be in use.
    #[inline]
    #[must_use]
    pub fn blocks(self) -> &'c [pg_sys::DecodedBkpBlock] {
        pointee::blocks(self.0)
    }
}

impl Deref for Record<'_> {
    type Target = pg_sys::DecodedXLogRecord;

    #[inline]
    fn deref(&self) -> &Self::Target {
        self.0
    }
}

/// A transaction of the reorder buffer.
#[derive(Clone, Copy)]
pub struct Transaction<'c>(&'c pg_sys::ReorderBufferTXN);

impl<'c> Transaction<'c> {
    /// The transaction that PostgreSQL gives to a callback; `None` for a null pointer.
    ///
    /// # Safety
    /// The transaction lives, and stays as it is, for `'c`.
    #[inline]
    #[must_use]
    pub unsafe fn from_ptr(raw: *const pg_sys::ReorderBufferTXN) -> Option<Self> {
        // SAFETY: the caller says so.
        unsafe { raw.as_ref() }.map(Self)
    }

    /// The transaction's id.
    #[inline]
    #[must_use]
    pub fn id(self) -> u32 {
        self.0.xid.into_inner()
    }

    /// The id of the whole transaction that it is a part of, or its own.
    #[must_use]
    pub fn top_id(self) -> u32 {
        let whole = pointee::whole(self.0);
        whole.unwrap_or(self.0).xid.into_inner()
    }

    /// When it was committed or prepared (TimestampTz); 0 if it was not.
    #[inline]
    #[must_use]
    pub fn time(self) -> i64 {
        compat::end_time(self.0)
    }

    /// The name under which it was prepared.
    #[must_use]
    pub fn name(self) -> Option<&'c CStr> {
        pointee::prepared_name(self.0)
    }

    /// The transaction's changes that are in memory, the last one first.
    pub fn changes_backwards(self) -> impl Iterator<Item = DecodedChange<'c>> {
        let head = &raw const self.0.changes.head;
        let mut node = self.0.changes.head.prev.cast_const();
        std::iter::from_fn(move || {
            if node.is_null() || node == head {
                return None;
            }
            // SAFETY: the list is the transaction's and circular, and each of its nodes but the
            // head is in a change. It does not change for `'c`.
            unsafe {
                let change = node
                    .byte_sub(offset_of!(pg_sys::ReorderBufferChange, node))
                    .cast::<pg_sys::ReorderBufferChange>();
                node = (*node).prev;
                Some(DecodedChange(&*change))
            }
        })
    }
}

impl Deref for Transaction<'_> {
    type Target = pg_sys::ReorderBufferTXN;

    #[inline]
    fn deref(&self) -> &Self::Target {
        self.0
    }
}

/// A change of the reorder buffer.
#[derive(Clone, Copy)]
pub struct DecodedChange<'c>(&'c pg_sys::ReorderBufferChange);

impl<'c> DecodedChange<'c> {
    /// The change that PostgreSQL gives to a callback.
    ///
    /// # Safety
    /// The change belongs to the transaction that is being decoded, and lives for `'c`.
    #[inline]
    #[must_use]
    pub unsafe fn from_ptr(raw: *const pg_sys::ReorderBufferChange) -> Self {
        // SAFETY: the caller says so.
        Self(unsafe { &*raw })
    }

    /// The action: insert, update, delete, truncate or another.
    #[inline]
    #[must_use]
    pub fn action(self) -> pg_sys::ReorderBufferChangeType::Type {
        self.0.action
    }

    /// LSN of its record.
    #[inline]
    #[must_use]
    pub fn lsn(self) -> u64 {
        self.0.lsn
    }

    /// The replication origin under which it was written.
    #[inline]
    #[must_use]
    pub fn origin(self) -> compat::ReplOriginId {
        self.0.origin_id
    }

    /// The transaction or subtransaction that made it.
    #[inline]
    #[must_use]
    pub fn author(self) -> u32 {
        let author = pointee::author(self.0);
        author.map_or(0, |author| author.xid.into_inner())
    }

    #[inline]
    fn tuples(self) -> Option<&'c compat::ChangedTuples> {
        use pg_sys::ReorderBufferChangeType as Type;
        let is_of_row = matches!(
            self.0.action,
            Type::REORDER_BUFFER_CHANGE_INSERT
                | Type::REORDER_BUFFER_CHANGE_UPDATE
                | Type::REORDER_BUFFER_CHANGE_DELETE
        );
        // SAFETY: the tuples are the member that is set for a change of a row.
        is_of_row.then_some(unsafe { &self.0.data.tp })
    }

    /// The row before a change, as far as WAL has it.
    #[inline]
    #[must_use]
    pub fn before(self) -> Option<Tuple<'c>> {
        self.tuple(self.tuples()?.oldtuple)
    }

    /// The row after a change.
    #[inline]
    #[must_use]
    pub fn after(self) -> Option<Tuple<'c>> {
        self.tuple(self.tuples()?.newtuple)
    }

    #[inline]
    fn tuple(self, raw: compat::ChangeTuple) -> Option<Tuple<'c>> {
        let tuple = compat::change_tuple(raw);
        // SAFETY: null, or a tuple of the change, which lives as long as it.
        unsafe { Tuple::from_ptr(tuple) }
    }

    /// Number of the file that a change of a row was made in.
    #[must_use]
    pub fn file(self) -> Option<u32> {
        self.tuples().map(compat::change_file)
    }

    /// Whether a truncate cascades, and whether it restarts sequences; neither for another change.
    #[must_use]
    pub fn truncate_flags(self) -> (bool, bool) {
        if self.0.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_TRUNCATE {
            return (false, false);
        }
        // SAFETY: the member that is set for a truncate.
        let flags = unsafe { &self.0.data.truncate };
        (flags.cascade, flags.restart_seqs)
    }
}

/// A heap tuple.
#[derive(Debug, Clone, Copy)]
pub struct Tuple<'c>(&'c pg_sys::HeapTupleData);

impl<'c> Tuple<'c> {
    /// A tuple; `None` for a null pointer.
    ///
    /// # Safety
    /// The tuple, with its header and as many bytes as it says, lives for `'c`.
    #[inline]
    #[must_use]
    pub unsafe fn from_ptr(raw: pg_sys::HeapTuple) -> Option<Self> {
        // SAFETY: the caller says so.
        unsafe { raw.cast_const().as_ref() }.map(Self)
    }

    /// The tuple's header and values.
    #[inline]
    #[must_use]
    pub fn bytes(self) -> &'c [u8] {
        pointee::tuple_bytes(self.0)
    }

    /// The tuple's header.
    #[inline]
    #[must_use]
    pub fn header(self) -> &'c pg_sys::HeapTupleHeaderData {
        // SAFETY: a tuple has a header.
        unsafe { &*self.0.t_data }
    }

    /// The values of its columns; `None` for null.
    ///
    /// # Safety
    /// The tuple is of this shape.
    #[must_use]
    pub unsafe fn values(self, shape: TupleDesc<'_>) -> Vec<Option<Value<'c>>> {
        let mut values = vec![pg_sys::Datum::null(); shape.len()];
        let mut nulls = vec![true; shape.len()];
        // SAFETY: the caller says so. There is room for all columns; the values are of the columns,
        // and lie in the tuple.
        unsafe {
            let tuple = std::ptr::from_ref(self.0).cast_mut();
            let to = (values.as_mut_ptr(), nulls.as_mut_ptr());
            pg_sys::heap_deform_tuple(tuple, shape.as_ptr(), to.0, to.1);
            let cells = shape.iter().zip(values).zip(nulls);
            cells
                .map(|((column, value), is_null)| (!is_null).then(|| Value::new(column, value)))
                .collect()
        }
    }
}

/// A heap tuple in memory of its own.
#[derive(Debug)]
pub struct OwnTuple {
    tuple: pg_sys::HeapTupleData,
    /// Header and values, aligned as PostgreSQL's memory is.
    words: Vec<u64>,
}

impl OwnTuple {
    /// Copies a tuple's header and values; `None` if they are too short for a header.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < size_of::<pg_sys::HeapTupleHeaderData>() {
            return None;
        }
        let mut words: Vec<u64> = bytes
            .chunks(size_of::<u64>())
            .map(|chunk| {
                let mut word = [0; size_of::<u64>()];
                word.iter_mut()
                    .zip(chunk)
                    .for_each(|(to, from)| *to = *from);
                u64::from_ne_bytes(word)
            })
            .collect();
        let tuple = pg_sys::HeapTupleData {
            t_len: u32::try_from(bytes.len()).ok()?,
            t_self: pg_sys::ItemPointerData::default(),
            t_tableOid: pg_sys::InvalidOid,
            t_data: words.as_mut_ptr().cast(),
        };
        Some(Self { tuple, words })
    }

    /// The tuple.
    #[must_use]
    pub fn view(&self) -> Tuple<'_> {
        debug_assert_eq!(self.tuple.t_data.cast_const().cast(), self.words.as_ptr());
        Tuple(&self.tuple)
    }
}
