//! Shapes of rows: a tuple descriptor and its attributes, as views that are checked.
//!
//! Every process that looks at rows reads their columns through these views.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr::NonNull;

use pgrx::pg_sys;

use crate::compat;
use crate::encoding;
use crate::pointee;
use crate::value::Value;

/// The shape of a row. `'a` is how long the descriptor lives and stays as it is.
#[derive(Debug, Clone, Copy)]
pub struct TupleDesc<'a> {
    raw: NonNull<pg_sys::TupleDescData>,
    lives: PhantomData<&'a pg_sys::TupleDescData>,
}

impl<'a> TupleDesc<'a> {
    /// A view of a descriptor; `None` for a null pointer.
    ///
    /// # Safety
    /// The descriptor lives for `'a`, and nobody changes it meanwhile.
    #[inline]
    #[must_use]
    pub unsafe fn from_ptr(descriptor: pg_sys::TupleDesc) -> Option<Self> {
        NonNull::new(descriptor).map(|raw| Self {
            raw,
            lives: PhantomData,
        })
    }

    /// PostgreSQL's own pointer, valid for `'a`.
    #[inline]
    #[must_use]
    pub fn as_ptr(self) -> pg_sys::TupleDesc {
        self.raw.as_ptr()
    }

    #[inline]
    fn data(self) -> &'a pg_sys::TupleDescData {
        // SAFETY: the descriptor lives for `'a`. PostgreSQL only counts references in it.
        unsafe { self.raw.as_ref() }
    }

    /// How many columns a row has, dropped ones included.
    #[inline]
    #[must_use]
    pub fn len(self) -> usize {
        usize::try_from(self.data().natts).unwrap_or(0)
    }

    /// Whether a row has no columns.
    #[inline]
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The composite type of its rows; `RECORD` if they have none.
    #[must_use]
    pub fn row_type(self) -> pg_sys::Oid {
        self.data().tdtypeid
    }

    /// The column at a position, from 0.
    #[inline]
    #[must_use]
    pub fn get(self, position: usize) -> Option<Attribute<'a>> {
        (position < self.len()).then(|| {
            // SAFETY: the descriptor has an attribute for each of its columns, and lives for `'a`.
            Attribute(unsafe { &*compat::TupleDescAttr(self.as_ptr(), position) })
        })
    }

    /// All columns, dropped ones included.
    pub fn iter(self) -> impl Iterator<Item = Attribute<'a>> {
        (0..self.len()).filter_map(move |position| self.get(position))
    }

    /// Whether the table has a CHECK constraint.
    #[must_use]
    pub fn has_checks(self) -> bool {
        self.constraints().is_some_and(|all| all.num_check > 0)
    }

    /// Whether a column's stored value is computed from others.
    #[must_use]
    pub fn has_stored_generated(self) -> bool {
        self.constraints()
            .is_some_and(|all| all.has_generated_stored)
    }

    fn constraints(self) -> Option<&'a pg_sys::TupleConstr> {
        pointee::constraints(self.data())
    }

    /// The value that rows have in a column which is younger than they; `None` for null.
    #[must_use]
    pub fn missing(self, column: Attribute<'_>) -> Option<Value<'a>> {
        let number = i32::from(column.number());
        if number < 1 || number > self.data().natts {
            return None;
        }
        let mut is_null = true;
        // SAFETY: the descriptor has so many attributes; the value is the column's, and belongs to
        // the descriptor.
        unsafe {
            let value = pg_sys::getmissingattr(self.as_ptr(), number, &raw mut is_null);
            let own = self.get(usize::try_from(number - 1).ok()?)?;
            (!is_null).then(|| Value::new(own, value))
        }
    }

    /// The default of a column as PostgreSQL stores it, a node tree; `None` if it has none.
    #[must_use]
    pub fn stored_default(self, column: Attribute<'_>) -> Option<&'a CStr> {
        let default = pointee::defaults(self.constraints()?)
            .iter()
            .find(|default| default.adnum == column.number())?;
        pointee::default(default)
    }
}

/// A column of a row.
#[derive(Debug, Clone, Copy)]
pub struct Attribute<'a>(&'a pg_sys::FormData_pg_attribute);

impl<'a> Attribute<'a> {
    /// The column's name, in the server's encoding.
    #[must_use]
    pub fn raw_name(self) -> &'a CStr {
        encoding::raw_name(&self.0.attname)
    }

    /// The column's name, in UTF-8.
    #[must_use]
    pub fn name(self) -> String {
        encoding::name(&self.0.attname)
    }

    /// The column's number, from 1.
    #[must_use]
    pub fn number(self) -> i16 {
        self.0.attnum
    }

    /// The column's type.
    #[inline]
    #[must_use]
    pub fn type_id(self) -> pg_sys::Oid {
        self.0.atttypid
    }

    /// The type's modifier.
    #[must_use]
    pub fn type_modifier(self) -> i32 {
        self.0.atttypmod
    }

    /// The column's collation; invalid if its type has none.
    #[inline]
    #[must_use]
    pub fn collation(self) -> pg_sys::Oid {
        self.0.attcollation
    }

    /// Whether values are passed by value.
    #[inline]
    #[must_use]
    pub fn is_by_value(self) -> bool {
        self.0.attbyval
    }

    /// Bytes of a value; -1 for a varlena, -2 for a C string.
    #[inline]
    #[must_use]
    pub fn length(self) -> i16 {
        self.0.attlen
    }

    /// Whether values are of variable length, with a header that has the length.
    #[inline]
    #[must_use]
    pub fn is_varlena(self) -> bool {
        self.0.attlen == -1
    }

    /// Whether large values may be compressed, or stored out of line.
    #[must_use]
    pub fn is_toastable(self) -> bool {
        self.0.attstorage.cast_unsigned() != pg_sys::TYPSTORAGE_PLAIN
    }

    /// Whether the column was dropped.
    #[inline]
    #[must_use]
    pub fn is_dropped(self) -> bool {
        self.0.attisdropped
    }

    /// Whether its values are computed from others.
    #[inline]
    #[must_use]
    pub fn is_generated(self) -> bool {
        self.0.attgenerated != 0
    }

    /// Whether its values are computed when a row is read (`ATTRIBUTE_GENERATED_VIRTUAL` of
    /// src/include/catalog/pg_attribute.h, 18): no stored row has one.
    #[inline]
    #[must_use]
    pub fn is_virtual(self) -> bool {
        self.0.attgenerated.cast_unsigned() == b'v'
    }

    /// Whether it is NOT NULL.
    #[must_use]
    pub fn is_not_null(self) -> bool {
        self.0.attnotnull
    }

    /// Whether it is an identity column.
    #[must_use]
    pub fn is_identity(self) -> bool {
        self.0.attidentity != 0
    }

    /// Whether it has a default, or is generated.
    #[must_use]
    pub fn has_default(self) -> bool {
        self.0.atthasdef
    }

    /// Whether rows that are older than the column have a value in it.
    #[must_use]
    pub fn has_missing(self) -> bool {
        self.0.atthasmissing
    }

    /// Whether its stored values are computed from others (`ATTRIBUTE_GENERATED_STORED`).
    #[must_use]
    pub fn is_stored_generated(self) -> bool {
        self.0.attgenerated.cast_unsigned() == pg_sys::ATTRIBUTE_GENERATED_STORED
    }

    /// Alignment of its values, in bytes: 1, 2, 4 or 8.
    #[must_use]
    pub fn alignment(self) -> usize {
        match self.0.attalign.cast_unsigned() {
            pg_sys::TYPALIGN_CHAR => 1,
            pg_sys::TYPALIGN_SHORT => 2,
            pg_sys::TYPALIGN_INT => 4,
            _ => 8,
        }
    }
}
