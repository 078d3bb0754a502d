//! Values that are not null, with their types. Run by processes that hash, compare or show values.
//!
//! Not for: rows (`slot`), and arguments of PostgreSQL's functions.

use std::ffi::{CStr, CString};
use std::marker::PhantomData;

use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use crate::table_scan::low;
use crate::tuple_desc::Attribute;
use crate::{encoding, ffi, syscache};

/// A value that is not null. `'a` is how long the memory that it is in stays as it is.
#[derive(Debug, Clone, Copy)]
pub struct Value<'a> {
    datum: pg_sys::Datum,
    of: pg_sys::Oid,
    /// Length and passing of its type, where they are known without a look-up.
    stored: Option<(i16, bool)>,
    lives: PhantomData<&'a pg_sys::Datum>,
}

impl<'a> Value<'a> {
    /// A value of a column.
    ///
    /// # Safety
    /// The value is one of the column's type, and exists for `'a`.
    #[inline]
    #[must_use]
    pub unsafe fn new(column: Attribute<'_>, datum: pg_sys::Datum) -> Self {
        Self {
            datum,
            of: column.type_id(),
            stored: Some((column.length(), column.is_by_value())),
            lives: PhantomData,
        }
    }

    /// A value of a type.
    ///
    /// # Safety
    /// The value is one of the type, and exists for `'a`.
    #[inline]
    #[must_use]
    pub unsafe fn of_type(of: pg_sys::Oid, datum: pg_sys::Datum) -> Self {
        Self {
            datum,
            of,
            stored: None,
            lives: PhantomData,
        }
    }

    /// A value of a type of which length and passing are known.
    ///
    /// # Safety
    /// The value is one of the type, which has this length and is passed so, and exists for `'a`.
    #[inline]
    #[must_use]
    pub unsafe fn stored(of: pg_sys::Oid, how: (i16, bool), datum: pg_sys::Datum) -> Self {
        Self {
            datum,
            of,
            stored: Some(how),
            lives: PhantomData,
        }
    }

    /// As PostgreSQL's functions take it.
    #[inline]
    #[must_use]
    pub fn datum(self) -> pg_sys::Datum {
        self.datum
    }

    /// The value's type.
    #[inline]
    #[must_use]
    pub fn type_id(self) -> pg_sys::Oid {
        self.of
    }

    /// As one of the type that its own is a domain over; itself if its type is no domain.
    #[must_use]
    pub fn as_base(self) -> Self {
        Self {
            of: syscache::base_type(self.of),
            ..self
        }
    }

    /// A composite value as one of no named type: its own header names its type. Another value is
    /// itself.
    #[must_use]
    pub fn as_record(self) -> Self {
        let of = if self.is_composite() {
            pg_sys::RECORDOID
        } else {
            self.of
        };
        Self { of, ..self }
    }

    /// Whether it is a composite value. In a transaction.
    #[must_use]
    pub fn is_composite(self) -> bool {
        self.of == pg_sys::RECORDOID || syscache::type_kind(self.of) == b'c'
    }

    /// As an argument of a statement.
    #[must_use]
    pub fn argument(self) -> DatumWithOid<'a> {
        // SAFETY: the value is of the type, and exists for `'a`.
        unsafe { DatumWithOid::new(self.datum, self.of) }
    }

    /// A copy in the current memory context, decompressed and contiguous.
    #[must_use]
    pub fn copy(self) -> Value<'static> {
        let (length, by_value) = self.form();
        let datum = if by_value {
            self.datum
        } else if length == -1 {
            // SAFETY: a value of variable length.
            unsafe { pg_sys::pg_detoast_datum_copy(self.datum.cast_mut_ptr()) }.into()
        } else {
            copy_of(self.stored_bytes().unwrap_or_default())
        };
        made(self.of, (length, by_value), datum)
    }

    fn form(self) -> (i16, bool) {
        self.stored.unwrap_or_else(|| syscache::length_of(self.of))
    }

    /// Calls `read` with the bytes of a value that is passed by reference, without the header of a
    /// value of variable length; or with its word, if it is passed by value. A decompressed or
    /// fetched copy is in the current memory context.
    #[inline]
    pub fn read<T>(self, read: impl FnOnce(Content<'_>) -> T) -> T {
        let (length, by_value) = self.form();
        if by_value {
            return read(Content::Word(self.datum.value() as u64));
        }
        // SAFETY: the value is one of its type, whose length says where it ends.
        let bytes = unsafe {
            match length {
                -1 => {
                    let packed = pg_sys::pg_detoast_datum_packed(self.datum.cast_mut_ptr());
                    pgrx::varlena_to_byte_slice(packed)
                }
                -2 => CStr::from_ptr(self.datum.cast_mut_ptr()).to_bytes(),
                length => std::slice::from_raw_parts(
                    self.datum.cast_mut_ptr::<u8>(),
                    usize::try_from(length).unwrap_or(0),
                ),
            }
        };
        read(Content::Bytes(bytes))
    }

    /// The bytes of a value that is passed by reference, as it is stored: with the header of one of
    /// variable length, or the zero byte of a C string. `None` for one that is passed by value.
    #[inline]
    #[must_use]
    pub fn stored_bytes(self) -> Option<&'a [u8]> {
        let (length, by_value) = self.form();
        if by_value {
            return None;
        }
        let start = self.datum.cast_mut_ptr::<u8>().cast_const();
        // SAFETY: the value is one of its type, whose length says where it ends, and exists for
        // `'a`.
        unsafe {
            let length = match length {
                -1 => pgrx::varsize_any(start.cast()),
                -2 => return Some(CStr::from_ptr(start.cast()).to_bytes_with_nul()),
                length => usize::try_from(length).unwrap_or(0),
            };
            Some(std::slice::from_raw_parts(start, length))
        }
    }

    /// The text that its type's own function writes, in the server's encoding.
    #[must_use]
    pub fn output(self) -> CString {
        let (mut output, mut is_varlena) = (pg_sys::InvalidOid, false);
        // SAFETY: the value is of the type, whose own function writes it. The text ends with a zero
        // byte; only its copy is kept.
        unsafe {
            pg_sys::getTypeOutputInfo(self.of, &raw mut output, &raw mut is_varlena);
            let text = pg_sys::OidOutputFunctionCall(output, self.datum);
            let copy = CStr::from_ptr(text).to_owned();
            pg_sys::pfree(text.cast());
            copy
        }
    }

    /// The decimal digits of a numeric, as its type writes them, without a look-up; `None` for
    /// another type. They are in the current memory context.
    #[must_use]
    pub fn digits(self) -> Option<&'a CStr> {
        if self.of != pg_sys::NUMERICOID {
            return None;
        }
        // SAFETY: a numeric, which the function writes as a text that ends with a zero byte.
        unsafe { pgrx::direct_function_call(pg_sys::numeric_out, &[Some(self.datum)]) }
    }

    /// The text that it is, in UTF-8; `None` for another type.
    #[must_use]
    pub fn text(self) -> Option<String> {
        if self.of != pg_sys::TEXTOID {
            return None;
        }
        // SAFETY: a text, whose copy ends with a zero byte.
        unsafe {
            let copy = pg_sys::text_to_cstring(self.datum.cast_mut_ptr());
            Some(encoding::utf8(CStr::from_ptr(copy)))
        }
    }

    /// The number of 32 bits, or the OID, that it is; `None` for a type that is passed otherwise.
    #[must_use]
    pub fn low(self) -> Option<u32> {
        self.form().1.then(|| low(self.datum))
    }

    /// Whether it lies in a TOAST table: of a row in WAL, a value that was left as it was.
    #[must_use]
    pub fn is_in_toast_table(self) -> bool {
        /// `VARTAG_ONDISK` of src/include/varatt.h, 15 to 18.
        const ON_DISK: u8 = 18;
        // SAFETY: behind the first byte that says that a value is a pointer there is one that says
        // where to.
        self.is_elsewhere() && unsafe { *self.datum.cast_mut_ptr::<u8>().add(1) == ON_DISK }
    }

    /// Bytes of a value, as large as it is once it is decompressed and fetched.
    #[must_use]
    pub fn size(self) -> usize {
        match self.form() {
            // SAFETY: a value of variable length.
            (-1, _) => unsafe { pg_sys::toast_raw_datum_size(self.datum) },
            (length, _) => usize::try_from(length).unwrap_or(8),
        }
    }

    /// Whether it is of variable length, and stored outside of its row.
    #[must_use]
    pub fn is_elsewhere(self) -> bool {
        // SAFETY: a value of variable length begins with a header.
        self.form() == (-1, false) && unsafe { pgrx::varatt_is_1b_e(self.datum.cast_mut_ptr()) }
    }

    /// Whether it has the bytes of another value of its type, but for how they are stored.
    #[must_use]
    pub fn is_same(self, other: Value<'_>) -> bool {
        let (length, by_value) = self.form();
        if self.of != other.of {
            return false;
        }
        if by_value {
            return self.datum == other.datum;
        }
        if length != -1 {
            return self.read(|one| other.read(|other| one == other));
        }
        // SAFETY: both are of this type.
        unsafe { ffi::datum_image_eq(self.datum, other.datum, by_value, length.into()) }
    }
}

/// A text with these bytes, which are in the server's encoding, in the current memory context.
/// PostgreSQL raises an error beyond 1 GB.
#[inline]
#[must_use]
pub fn text(bytes: &[u8]) -> Value<'static> {
    let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    // SAFETY: PostgreSQL copies so many bytes, or fewer.
    let copy = unsafe { pg_sys::cstring_to_text_with_len(bytes.as_ptr().cast(), length) };
    made(pg_sys::TEXTOID, (-1, false), copy.into())
}

/// A uuid with these bytes, in the current memory context.
#[inline]
#[must_use]
pub fn uuid(bytes: &[u8; 16]) -> Value<'static> {
    made(pg_sys::UUIDOID, (16, false), copy_of(bytes))
}

/// A name with these bytes, as many of them as fit, in the current memory context.
#[must_use]
pub fn name(bytes: &[u8]) -> Value<'static> {
    let mut name = [0; pg_sys::NAMEDATALEN as usize];
    let (room, _) = name.split_at_mut(pg_sys::NAMEDATALEN as usize - 1);
    room.iter_mut()
        .zip(bytes)
        .for_each(|(to, from)| *to = *from);
    let length = i16::try_from(name.len()).unwrap_or(i16::MAX);
    made(pg_sys::NAMEOID, (length, false), copy_of(&name))
}

/// A timestamp with time zone: microseconds since 2000.
#[must_use]
pub fn timestamptz(micros: pg_sys::TimestampTz) -> Value<'static> {
    made(pg_sys::TIMESTAMPTZOID, (8, true), micros.into())
}

/// A relation's OID, as a regclass.
#[must_use]
pub fn relation(oid: pg_sys::Oid) -> Value<'static> {
    made(pg_sys::REGCLASSOID, (4, true), oid.into())
}

/// An array of texts, in the current memory context. Values of other types are left out.
#[must_use]
pub fn texts<'v>(values: impl Iterator<Item = Value<'v>>) -> Value<'static> {
    let texts = values.filter(|value| value.type_id() == pg_sys::TEXTOID);
    let mut texts: Vec<pg_sys::Datum> = texts.map(Value::datum).collect();
    // SAFETY: so many texts; a text has a variable length and is aligned as an integer is.
    let array = unsafe {
        pg_sys::construct_array(
            texts.as_mut_ptr(),
            i32::try_from(texts.len()).unwrap_or_default(),
            pg_sys::TEXTOID,
            -1,
            false,
            std::ffi::c_char::try_from(pg_sys::TYPALIGN_INT).unwrap_or_default(),
        )
    };
    made(pg_sys::TEXTARRAYOID, (-1, false), array.into())
}

/// A value that was just made, of a type that is stored so.
#[inline]
fn made(of: pg_sys::Oid, stored: (i16, bool), datum: pg_sys::Datum) -> Value<'static> {
    Value {
        datum,
        of,
        stored: Some(stored),
        lives: PhantomData,
    }
}

#[inline]
fn copy_of(bytes: &[u8]) -> pg_sys::Datum {
    // SAFETY: as many fresh bytes as are copied.
    unsafe {
        let to = pg_sys::palloc(bytes.len()).cast::<u8>();
        to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        to.into()
    }
}

/// The content of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Content<'v> {
    /// The value is passed by value.
    Word(u64),
    /// The value is passed by reference.
    Bytes(&'v [u8]),
}
