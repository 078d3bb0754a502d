//! Composite values, formed and taken apart. Run by processes that hash, compare or show rows which
//! are values.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::owned::frees;
use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::decoding::Tuple;
use crate::error::PgError;
use crate::slot::Slot;
use crate::tuple_desc::{Attribute, TupleDesc};
use crate::value::Value;

/// A row that was formed, in the memory context that was the current one then.
#[derive(Debug)]
pub struct Formed<'s> {
    tuple: NonNull<pg_sys::HeapTupleData>,
    shape: TupleDesc<'s>,
}

impl<'s> Formed<'s> {
    /// Forms a row of values, one for each column; `None` is null. Raises XX000 if one is of
    /// another type than its column.
    #[must_use]
    pub fn new<'v>(shape: TupleDesc<'s>, cell: impl FnMut(usize) -> Option<Value<'v>>) -> Self {
        let cells: Vec<Option<Value<'v>>> = (0..shape.len()).map(cell).collect();
        let fits = |(column, cell): (Attribute<'_>, &Option<Value<'_>>)| {
            cell.is_none_or(|cell| cell.type_id() == column.type_id())
        };
        if !shape.iter().zip(&cells).all(fits) {
            PgError::new(
                SqlState::InternalError,
                "a value is of another type than its column",
            )
            .raise();
        }
        let value = |cell: &Option<Value<'_>>| cell.map_or(pg_sys::Datum::null(), Value::datum);
        let mut values: Vec<pg_sys::Datum> = cells.iter().map(value).collect();
        let mut nulls: Vec<bool> = cells.iter().map(Option::is_none).collect();
        let (from, is_null) = (values.as_mut_ptr(), nulls.as_mut_ptr());
        // SAFETY: one value and one mark a column, of its type. A new tuple is never null.
        let tuple = unsafe {
            NonNull::new_unchecked(pg_sys::heap_form_tuple(shape.as_ptr(), from, is_null))
        };
        Self { tuple, shape }
    }

    /// Copies the row in a slot; `None` if it is empty.
    #[must_use]
    pub fn of_slot(slot: &'s Slot) -> Option<Self> {
        Some(Self {
            tuple: NonNull::new(slot.copy_tuple())?,
            shape: slot.descriptor(),
        })
    }

    /// The tuple's header and values.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the tuple was formed in memory that only unsafe functions reset.
        unsafe { Tuple::from_ptr(self.tuple.as_ptr()) }.map_or(&[], Tuple::bytes)
    }

    /// The row as a value of its own type.
    #[must_use]
    pub fn value(&self) -> Value<'static> {
        self.as_type(self.shape.row_type())
    }

    /// The row as a value of a composite type: its own, or that of a table of which it is a
    /// partition. Columns go by their names; PostgreSQL raises an error if they do not suit.
    #[must_use]
    pub fn as_type(&self, row_type: pg_sys::Oid) -> Value<'static> {
        let (mut tuple, mut shape) = (self.tuple.as_ptr(), self.shape.as_ptr());
        // SAFETY: the tuple is of the shape; the wanted shape is a copy, as is the value.
        unsafe {
            if self.shape.row_type() != row_type {
                let wanted = pg_sys::lookup_rowtype_tupdesc_copy(row_type, -1);
                let map = pg_sys::convert_tuples_by_name(shape, wanted);
                if !map.is_null() {
                    tuple = pg_sys::execute_attr_map_tuple(tuple, map);
                }
                shape = wanted;
            }
            let value = pg_sys::heap_copy_tuple_as_datum(tuple, shape);
            Value::stored(row_type, (-1, false), value)
        }
    }
}

/// A value of a composite type with these columns; `None` if the type has another number of them.
/// Raises as [`Formed::new`].
#[must_use]
pub fn of_type(of: pg_sys::Oid, cells: &[Option<Value<'_>>]) -> Option<Value<'static>> {
    // SAFETY: a copy, in memory that only unsafe functions reset; a type that is gone is an error.
    let shape = unsafe { TupleDesc::from_ptr(pg_sys::lookup_rowtype_tupdesc_copy(of, -1)) }?;
    if shape.len() != cells.len() {
        return None;
    }
    let row = Formed::new(shape, |position| cells.get(position).copied().flatten());
    Some(row.value())
}

/// The columns of a composite value in the order of a shape, to which they go by their names;
/// `None` is null. Another value has none. Memory that this takes is in the current context.
#[must_use]
pub fn taken_apart<'v>(row: Value<'v>, shape: TupleDesc<'_>) -> Vec<Option<Value<'v>>> {
    if !row.is_composite() {
        return Vec::new();
    }
    // SAFETY: the value is composite, so it has a header. The tuple lies in it, or is a new one.
    unsafe {
        let header = pg_sys::pg_detoast_datum(row.datum().cast_mut_ptr());
        let mut data = pg_sys::HeapTupleData {
            t_len: u32::try_from(pgrx::varsize_any(header)).unwrap_or(0),
            t_data: header.cast(),
            ..Default::default()
        };
        let mut tuple = &raw mut data;
        if row.type_id() != shape.row_type() {
            let given = pg_sys::lookup_rowtype_tupdesc_copy(row.type_id(), -1);
            let map = pg_sys::convert_tuples_by_name(given, shape.as_ptr());
            if !map.is_null() {
                tuple = pg_sys::execute_attr_map_tuple(tuple, map);
            }
        }
        Tuple::from_ptr(tuple).map_or_else(Vec::new, |tuple| tuple.values(shape))
    }
}

/// A composite value, contiguous in memory, and the shape that its header names.
#[derive(Debug)]
pub struct Composite {
    header: *mut pg_sys::HeapTupleHeaderData,
    descriptor: pg_sys::TupleDesc,
    /// Both are memory of this process.
    alone: PhantomData<*mut ()>,
}

impl Composite {
    /// Opens a value. The copies that this takes are in the current memory context.
    ///
    /// # Safety
    /// `value` is a composite one. It and the current memory context outlive the result.
    #[must_use]
    pub unsafe fn open(value: pg_sys::Datum) -> Self {
        // SAFETY: the caller says so: its header names its type. The descriptor is a copy.
        unsafe {
            let header = pg_sys::pg_detoast_datum(value.cast_mut_ptr())
                .cast::<pg_sys::HeapTupleHeaderData>();
            let of = (*header).t_choice.t_datum;
            Self {
                header,
                descriptor: pg_sys::lookup_rowtype_tupdesc_copy(of.datum_typeid, of.datum_typmod),
                alone: PhantomData,
            }
        }
    }

    /// The shape of the row.
    #[must_use]
    pub fn shape(&self) -> TupleDesc<'_> {
        // SAFETY: `open` has made a copy, so it is not null, and freed with this value.
        unsafe { TupleDesc::from_ptr(self.descriptor).unwrap_unchecked() }
    }

    /// The columns that were not dropped, with their values; `None` is null.
    pub fn cells(&self) -> impl Iterator<Item = (Attribute<'_>, Option<Value<'_>>)> {
        let cells = self.shape().iter().zip(self.values());
        cells.filter(|(column, _)| !column.is_dropped())
    }

    /// A value for each column, dropped ones included; `None` is null.
    #[must_use]
    pub fn values(&self) -> Vec<Option<Value<'_>>> {
        let mut tuple = pg_sys::HeapTupleData {
            t_data: self.header,
            ..Default::default()
        };
        // SAFETY: the row is one of the shape, as its header says, and exists as long as `self`.
        unsafe {
            tuple.t_len = u32::try_from(pgrx::varsize_any(self.header.cast())).unwrap_or(0);
            let tuple = Tuple::from_ptr(&raw mut tuple);
            tuple.map_or_else(Vec::new, |tuple| tuple.values(self.shape()))
        }
    }
}

frees! {
    Composite: |value| pg_sys::FreeTupleDesc(value.descriptor);
}
