//! Where pointers in PostgreSQL's structures lead, for the views in this crate. Run by every
//! process.
//!
//! Each structure of this module is PostgreSQL's own. The views make references to it, and never
//! fill one in themselves. The listed pointers belong to their structure: each is null, or valid as
//! long as the structure is. The memory behind a pointer changes in PostgreSQL's calls only, during
//! which no view holds a reference.
//!
//! Not for: pointers whose kind only another field says, and structures that others change.

use std::ffi::CStr;

use pgrx::pg_sys::{
    AttrDefault, DecodedBkpBlock, DecodedXLogRecord, FormData_pg_class, FormData_pg_index,
    FormData_pg_proc, HeapTupleData, HeapTupleHeaderData, LogicalDecodingContext, Oid,
    RelationData, ReorderBufferChange, ReorderBufferTXN, StringInfoData, TransactionId,
    TupleConstr, TupleDescData, TupleTableSlot, TupleTableSlotOps, XLogReaderState,
};

use crate::tuple_desc::TupleDesc;

/// Declares pointers to one structure.
macro_rules! structures {
    ($($(#[doc = $doc:literal])* fn $name:ident($owner:ty) -> $target:ty = $field:ident;)*) => {$(
        $(#[doc = $doc])*
        #[inline]
        pub(crate) fn $name(owner: &$owner) -> Option<&$target> {
            // SAFETY: the pointer is one of this module's: null, or valid as long as its owner.
            unsafe { owner.$field.cast_const().as_ref() }
        }
    )*};
}

structures! {
    /// The row of pg_index of an open index.
    fn index(RelationData) -> FormData_pg_index = rd_index;
    /// The constraints and defaults of a shape.
    fn constraints(TupleDescData) -> TupleConstr = constr;
    /// The header of a tuple.
    fn header(HeapTupleData) -> HeapTupleHeaderData = t_data;
    /// The whole transaction that a subtransaction is a part of.
    fn whole(ReorderBufferTXN) -> ReorderBufferTXN = toptxn;
    /// The transaction or subtransaction of a change.
    fn author(ReorderBufferChange) -> ReorderBufferTXN = txn;
    /// The reader of a decoding context.
    fn reader(LogicalDecodingContext) -> XLogReaderState = reader;
    /// The message that a decoding context writes.
    fn message(LogicalDecodingContext) -> StringInfoData = out;
}

/// Declares pointers to one structure that are never null.
macro_rules! parts {
    ($($(#[doc = $doc:literal])* fn $name:ident($owner:ty) -> $target:ty = $field:ident;)*) => {$(
        $(#[doc = $doc])*
        #[inline]
        pub(crate) fn $name(owner: &$owner) -> &$target {
            // SAFETY: the pointer is one of this module's. PostgreSQL sets it when it makes the
            // owner, so it is not null.
            unsafe { &*owner.$field }
        }
    )*};
}

parts! {
    /// The row of pg_class of an open relation.
    fn class(RelationData) -> FormData_pg_class = rd_rel;
    /// The functions of slots of a slot's kind, which are a constant.
    fn operations(TupleTableSlot) -> TupleTableSlotOps = tts_ops;
}

/// Declares the shapes of rows, which are never null.
macro_rules! shapes {
    ($($(#[doc = $doc:literal])* fn $name:ident($owner:ty) = $field:ident;)*) => {$(
        $(#[doc = $doc])*
        #[inline]
        pub(crate) fn $name(owner: &$owner) -> TupleDesc<'_> {
            // SAFETY: the pointer is one of this module's. PostgreSQL sets it when it makes the
            // owner, so it is not null; the shape does not change as long as a view exists.
            unsafe { TupleDesc::from_ptr(owner.$field).unwrap_unchecked() }
        }
    )*};
}

shapes! {
    /// The shape of the rows of an open relation. A lock keeps it as it is.
    fn shape(RelationData) = rd_att;
    /// The shape of the rows in a slot.
    fn slot_shape(TupleTableSlot) = tts_tupleDescriptor;
}

/// Declares texts, which end with a zero byte.
macro_rules! texts {
    ($($(#[doc = $doc:literal])* fn $name:ident($owner:ty) = $field:ident;)*) => {$(
        $(#[doc = $doc])*
        #[inline]
        pub(crate) fn $name(owner: &$owner) -> Option<&CStr> {
            let text = owner.$field.cast_const();
            // SAFETY: the pointer is one of this module's: null, or a text that is valid as long as
            // its owner.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
        }
    )*};
}

texts! {
    /// The name under which a transaction was prepared.
    fn prepared_name(ReorderBufferTXN) = gid;
    /// The node tree of a column's default.
    fn default(AttrDefault) = adbin;
}

/// Declares arrays behind a pointer, with the field that says how long they are.
macro_rules! arrays {
    ($($(#[doc = $doc:literal])* fn $name:ident($owner:ty) -> [$member:ty] = $field:ident, $length:ident;)*) => {$(
        $(#[doc = $doc])*
        #[inline]
        pub(crate) fn $name(owner: &$owner) -> &[$member] {
            let length = usize::try_from(owner.$length).unwrap_or(0);
            let start = owner.$field.cast_const().cast::<$member>();
            if start.is_null() || length == 0 {
                return &[];
            }
            // SAFETY: the pointer is one of this module's. Behind it there are as many members as
            // its owner says, as long as the owner is valid.
            unsafe { std::slice::from_raw_parts(start, length) }
        }
    )*};
}

arrays! {
    /// The bytes of a string that PostgreSQL puts together.
    fn bytes(StringInfoData) -> [u8] = data, len;
    /// The data of the resource manager of a record.
    fn data(DecodedXLogRecord) -> [u8] = main_data, main_data_len;
    /// The header and the values of a tuple.
    fn tuple_bytes(HeapTupleData) -> [u8] = t_data, t_len;
    /// The defaults of a table's columns.
    fn defaults(TupleConstr) -> [AttrDefault] = defval, num_defval;
}

/// Declares arrays at the end of a structure, with their length.
macro_rules! tails {
    ($($(#[doc = $doc:literal])* fn $name:ident($owner:ty) -> [$member:ty] = $($field:ident).+, $length:expr;)*) => {$(
        $(#[doc = $doc])*
        #[inline]
        pub(crate) fn $name(owner: &$owner) -> &[$member] {
            let length: fn(&$owner) -> i32 = $length;
            let length = usize::try_from(length(owner)).unwrap_or(0);
            // SAFETY: PostgreSQL has allocated the structure with so many members at its end.
            unsafe { owner.$($field).+.as_slice(length) }
        }
    )*};
}

tails! {
    /// Numbers of the key columns of an index in its table, 0 for an expression.
    fn key_columns(FormData_pg_index) -> [i16] = indkey.values, |index| index.indnkeyatts.into();
    /// Types of the arguments of a function.
    fn arguments(FormData_pg_proc) -> [Oid] = proargtypes.values, |function| function.pronargs.into();
    /// The blocks that a record names, by their numbers.
    fn blocks(DecodedXLogRecord) -> [DecodedBkpBlock] = blocks, |record| record.max_block_id + 1;
}

/// The transaction that wrote a stored tuple, also a frozen one: HeapTupleHeaderGetRawXmin of
/// src/include/access/htup_details.h.
#[inline]
pub(crate) fn writer(header: &HeapTupleHeaderData) -> TransactionId {
    // SAFETY: a stored tuple has this member of the union, and composite values never get to this
    // function.
    unsafe { header.t_choice.t_heap.t_xmin }
}
