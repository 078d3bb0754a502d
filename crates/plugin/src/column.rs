//! Writes one column's value into a row image.
//!
//! Types whose stored form is simple are read in place. Other built-in types go through their send
//! function: the binary form is the same everywhere. Users' types, and types that name users'
//! objects, go through their output function: their binary forms hold OIDs, or belong to one
//! version of an extension.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CStr;

use braid_decoder::{Numeric, date_to_datetime, timestamp_to_datetime, timestamptz_to_value};
use braid_gir::{Decimal, ImageWriter, Value};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::report;
use super::scratch::{Scratch, StreamMemory};
use super::tuple::{self, Varlena};
use super::type_facts::TypeFacts;

/// Built-in types that travel as text, and so do arrays of them (src/include/catalog/pg_type.dat):
/// their values name objects by OID, or their binary form can't always be read (an empty vector is
/// sent, and refused).
const TEXT_TYPES: [pg_sys::Oid; 14] = [
    pg_sys::OIDVECTOROID,
    pg_sys::INT2VECTOROID,
    pg_sys::REGPROCOID,
    pg_sys::REGPROCEDUREOID,
    pg_sys::REGOPEROID,
    pg_sys::REGOPERATOROID,
    pg_sys::REGCLASSOID,
    pg_sys::REGTYPEOID,
    pg_sys::REGROLEOID,
    pg_sys::REGNAMESPACEOID,
    pg_sys::REGCONFIGOID,
    pg_sys::REGDICTIONARYOID,
    pg_sys::REGCOLLATIONOID,
    REGDATABASEOID,
];

/// The type regdatabase: since 19. No other type had this number before.
const REGDATABASEOID: pg_sys::Oid = pg_sys::Oid::from_u32(6490);

/// Objects that all encoders share.
pub(super) struct Tools {
    pub(super) scratch: Scratch,
    /// Labels of enums by OID of the value.
    pub(super) labels: RefCell<HashMap<u32, Box<[u8]>>>,
    /// Bytes of one value in the making.
    buffer: RefCell<Vec<u8>>,
}

impl Tools {
    /// Calls allocate in `context`.
    pub(super) fn new(context: StreamMemory) -> Self {
        Self {
            scratch: Scratch::new(context),
            labels: RefCell::default(),
            buffer: RefCell::default(),
        }
    }
}

/// A function of a type, ready to be called.
#[derive(Debug)]
pub(super) struct TypeFunction {
    info: Box<RefCell<pg_sys::FmgrInfo>>,
    by_value: bool,
}

/// How a column's value is written.
#[derive(Debug)]
pub(super) enum Encoder {
    Bool,
    /// Signed integers of 1 ("char"), 2, 4 and 8 bytes.
    Signed,
    /// oid and xid.
    Unsigned,
    Float4,
    Float8,
    Numeric,
    Date,
    Timestamp,
    TimestampTz,
    /// A varlena of characters.
    Text,
    /// A C string in a field of fixed or variable length.
    CString,
    Bytea,
    Uuid,
    Enum(TypeFunction),
    Send(TypeFunction),
    Output(TypeFunction),
}

impl Encoder {
    /// Choose the encoder for a column of a type; functions keep their memory in `context`. With
    /// `text`, types that have no portable form are written in their text form, for readers that do
    /// not know PostgreSQL's binary ones. In a transaction with a snapshot for catalogs.
    pub(super) fn new(
        facts: &TypeFacts,
        by_value: bool,
        text: bool,
        context: StreamMemory,
    ) -> Self {
        let function = |oid| TypeFunction::new(oid, by_value, context);
        match facts.oid {
            pg_sys::BOOLOID => Self::Bool,
            pg_sys::CHAROID | pg_sys::INT2OID | pg_sys::INT4OID | pg_sys::INT8OID => Self::Signed,
            pg_sys::OIDOID | pg_sys::XIDOID => Self::Unsigned,
            pg_sys::FLOAT4OID => Self::Float4,
            pg_sys::FLOAT8OID => Self::Float8,
            pg_sys::NUMERICOID => Self::Numeric,
            pg_sys::DATEOID => Self::Date,
            pg_sys::TIMESTAMPOID => Self::Timestamp,
            pg_sys::TIMESTAMPTZOID => Self::TimestampTz,
            pg_sys::TEXTOID
            | pg_sys::VARCHAROID
            | pg_sys::BPCHAROID
            | pg_sys::JSONOID
            | pg_sys::XMLOID => Self::Text,
            pg_sys::NAMEOID | pg_sys::UNKNOWNOID => Self::CString,
            pg_sys::BYTEAOID => Self::Bytea,
            pg_sys::UUIDOID if !text => Self::Uuid,
            oid => {
                let is_text = TEXT_TYPES.contains(&oid) || TEXT_TYPES.contains(&facts.element);
                if facts.kind == pg_sys::TYPTYPE_ENUM {
                    Self::Enum(function(facts.output))
                } else if !text
                    && facts.is_built_in()
                    && !is_text
                    && facts.kind != pg_sys::TYPTYPE_COMPOSITE
                    && facts.send != pg_sys::InvalidOid
                {
                    Self::Send(function(facts.send))
                } else {
                    Self::Output(function(facts.output))
                }
            }
        }
    }

    /// The value's text is converted on the way when the connection's encoding is not the server's.
    pub(super) fn sends_text(&self) -> bool {
        matches!(self, Self::Send(_))
    }

    /// Write the value whose stored form is `bytes`.
    #[inline]
    pub(super) fn put(&self, bytes: &[u8], image: &mut ImageWriter<'_>, tools: &Tools) {
        match self {
            Self::Bool => image.put(&Value::Integer(i64::from(
                bytes.first().is_some_and(|b| *b != 0),
            ))),
            Self::Signed => image.put(&Value::Integer(signed(bytes))),
            Self::Unsigned => {
                image.put(&Value::Integer(i64::from(u32::from_le_bytes(fixed(bytes)))))
            }
            Self::Float4 => image.put(&Value::Single(f32::from_le_bytes(fixed(bytes)))),
            Self::Float8 => image.put(&Value::Double(f64::from_le_bytes(fixed(bytes)))),
            Self::Numeric => put_numeric(bytes, image, tools),
            Self::Date => {
                image.put(&Value::DateTime(date_to_datetime(i32::from_le_bytes(
                    fixed(bytes),
                ))));
            }
            Self::Timestamp => {
                let timestamp = i64::from_le_bytes(fixed(bytes));
                image.put(&Value::DateTime(timestamp_to_datetime(timestamp)));
            }
            Self::TimestampTz => image.put(&timestamptz_to_value(i64::from_le_bytes(fixed(bytes)))),
            Self::Text => with_content(bytes, tools, |text| image.put(&Value::String(text))),
            Self::CString => image.put(&Value::String(until_zero(bytes))),
            Self::Bytea => with_content(bytes, tools, |raw| image.put(&Value::Binary(raw))),
            Self::Uuid => image.put(&Value::Binary(bytes)),
            Self::Enum(function) => {
                with_label(function, bytes, tools, |label| {
                    image.put(&Value::String(label))
                });
            }
            Self::Send(function) => {
                let sent = function.send(bytes, tools);
                with_content(sent, tools, |raw| image.put(&Value::Binary(raw)));
            }
            Self::Output(function) => {
                let text = function.output(bytes, tools);
                image.put(&Value::BinaryText(text.to_bytes()));
            }
        }
    }
}

impl TypeFunction {
    /// Prepare to call `oid`, a function of a type's whose values are passed so. In a transaction.
    pub(super) fn new(oid: pg_sys::Oid, by_value: bool, context: StreamMemory) -> Self {
        let info = Box::new(RefCell::new(pg_sys::FmgrInfo::default()));
        // SAFETY: the box is a place for one FmgrInfo. The context exists as long as the stream's
        // parts, of which this is one.
        unsafe { pg_sys::fmgr_info_cxt(oid, info.as_ptr(), context.as_ptr()) };
        Self { info, by_value }
    }

    /// Call the type's send function. The bytea lives until the change is over.
    fn send<'t>(&self, bytes: &[u8], tools: &'t Tools) -> &'t [u8] {
        let value = to_datum(bytes, self.by_value);
        // SAFETY: the function is the type's own, and the value is of the type; it returns a bytea
        // in the scratch memory, which is not reset before the change is written.
        tools.scratch.run(|| unsafe {
            let sent = pg_sys::SendFunctionCall(self.info.as_ptr(), value);
            varlena_at(sent.cast::<u8>().cast_const())
        })
    }

    /// Call the type's output function. The text lives until the change is over.
    pub(super) fn output<'t>(&self, bytes: &[u8], tools: &'t Tools) -> &'t CStr {
        let value = to_datum(bytes, self.by_value);
        // SAFETY: the function is the type's own, and the value is of the type; it returns a C
        // string in the scratch memory, which is not reset before the change is written.
        tools.scratch.run(|| unsafe {
            CStr::from_ptr(pg_sys::OutputFunctionCall(self.info.as_ptr(), value))
        })
    }
}

fn put_numeric(bytes: &[u8], image: &mut ImageWriter<'_>, tools: &Tools) {
    with_content(bytes, tools, |stored| {
        let mut buffer = tools.buffer.borrow_mut();
        buffer.clear();
        if let Some(numeric) = Numeric::from_stored(stored) {
            numeric.send(&mut buffer);
        }
        match Decimal::new(&buffer) {
            Ok(decimal) => image.put(&Value::Decimal(decimal)),
            Err(error) => corrupt_value("numeric", &error),
        }
    });
}

#[cold]
fn corrupt_value(kind: &str, error: &braid_gir::Error) -> ! {
    report::fail(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("stored value of type {kind} is not valid: {error}"),
        None,
    )
}

/// Label of an enum's value.
pub(super) fn with_label<T>(
    function: &TypeFunction,
    bytes: &[u8],
    tools: &Tools,
    f: impl FnOnce(&[u8]) -> T,
) -> T {
    let value = u32::from_le_bytes(fixed(bytes));
    if let Some(label) = tools.labels.borrow().get(&value) {
        return f(label);
    }
    let label: Box<[u8]> = function.output(bytes, tools).to_bytes().into();
    let result = f(&label);
    tools.labels.borrow_mut().insert(value, label);
    result
}

/// Call `f` with the content of a varlena, fetching and decompressing it where needed.
#[inline]
pub(super) fn with_content<T>(bytes: &[u8], tools: &Tools, f: impl FnOnce(&[u8]) -> T) -> T {
    match tuple::open(bytes) {
        Varlena::Plain(content) => f(content),
        Varlena::Indirect(target) => {
            // SAFETY: the reorder buffer points to a whole varlena that it keeps for the time of
            // the change, and that is no pointer itself.
            let target = unsafe { varlena_at(target) };
            match tuple::open(target) {
                Varlena::Plain(content) => f(content),
                Varlena::Indirect(_) | Varlena::Fetch => f(fetch(bytes, tools)),
            }
        }
        Varlena::Fetch => f(fetch(bytes, tools)),
    }
}

fn fetch<'t>(bytes: &[u8], tools: &'t Tools) -> &'t [u8] {
    let value = bytes.as_ptr().cast::<pg_sys::varlena>().cast_mut();
    // SAFETY: a whole varlena; the result is in the scratch memory, which is not reset before the
    // change is written.
    let fetched = tools.scratch.run(|| unsafe {
        let fetched = pg_sys::detoast_attr(value);
        varlena_at(fetched.cast::<u8>().cast_const())
    });
    match tuple::open(fetched) {
        Varlena::Plain(content) => content,
        Varlena::Indirect(_) | Varlena::Fetch => &[],
    }
}

/// The bytes of a varlena, its header included.
///
/// # Safety
/// `start` points to a whole varlena that lives as long as it is used.
pub(super) unsafe fn varlena_at<'v>(start: *const u8) -> &'v [u8] {
    // SAFETY: as the caller says. The length is in the first byte or, when its lowest bit says so,
    // in the first four.
    unsafe {
        let first = *start;
        let len = if first & 1 == 1 {
            let head = std::slice::from_raw_parts(start, 2);
            tuple::varlena_len(head).unwrap_or(1)
        } else {
            tuple::varlena_len(std::slice::from_raw_parts(start, 4)).unwrap_or(4)
        };
        std::slice::from_raw_parts(start, len)
    }
}

/// The first `N` bytes; zeros where there are fewer, which a tuple that was taken apart never has.
#[inline]
pub(super) fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.first_chunk::<N>().copied().unwrap_or([0; N])
}

/// A signed integer of 1, 2, 4 or 8 bytes.
#[inline]
pub(super) fn signed(bytes: &[u8]) -> i64 {
    match bytes.len() {
        1 => i64::from(i8::from_le_bytes(fixed(bytes))),
        2 => i64::from(i16::from_le_bytes(fixed(bytes))),
        4 => i64::from(i32::from_le_bytes(fixed(bytes))),
        _ => i64::from_le_bytes(fixed(bytes)),
    }
}

/// The bytes before the first zero.
#[inline]
pub(super) fn until_zero(bytes: &[u8]) -> &[u8] {
    let len = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    bytes.get(..len).unwrap_or_default()
}

/// A stored value as a datum.
#[inline]
pub(super) fn to_datum(bytes: &[u8], by_value: bool) -> pg_sys::Datum {
    if by_value {
        pg_sys::Datum::from(signed(bytes))
    } else {
        pg_sys::Datum::from(bytes.as_ptr().cast_mut())
    }
}
