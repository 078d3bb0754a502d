//! One column's value.
//!
//! Layout: one tag byte, then
//!
//! | tag | value | body |
//! |---|---|---|
//! | 0 | Null | nothing |
//! | 1 | None: not available (unchanged TOAST, or not in WAL) | nothing |
//! | 2 | Integer that fits 64 bits | zigzag LEB128 |
//! | 3 | Integer of any width | byte string, two's complement, little-endian |
//! | 4 | Double | 8 bytes, IEEE 754 binary64, little-endian |
//! | 5 | Double, single precision at the source | 4 bytes, IEEE 754 binary32, little-endian |
//! | 6 | Decimal | byte string: PostgreSQL's `numeric_send` form, see [`Decimal`] |
//! | 7 | UnixTimestamp | 8 bytes, signed microseconds since 1970-01-01 UTC, little-endian |
//! | 8 | DateTime | see [`DateTime`] |
//! | 9 | String | byte string in the stream's charset |
//! | 10 | Binary, the type's own binary form (`typsend`) | byte string |
//! | 11 | Binary, the type's own text form (`typoutput`) in the stream's charset | byte string |
//!
//! A byte string is its length as LEB128 and then its bytes. The type of the values with tags 10
//! and 11 is the column's, in the schema record.

use crate::error::{Error, Result};
use crate::wire::{Cursor, put_byte_string, put_varint, put_zigzag};

const NULL: u8 = 0;
const NONE: u8 = 1;
const INTEGER: u8 = 2;
const BIG_INTEGER: u8 = 3;
const DOUBLE: u8 = 4;
const SINGLE: u8 = 5;
const DECIMAL: u8 = 6;
const UNIX_TIMESTAMP: u8 = 7;
const DATE_TIME: u8 = 8;
const STRING: u8 = 9;
const BINARY_SEND: u8 = 10;
const BINARY_TEXT: u8 = 11;

/// A column's value, borrowed from the record. `PartialEq` compares bits: two NaNs with the same
/// payload are equal.
#[derive(Debug, Clone, Copy)]
pub enum Value<'a> {
    /// SQL null.
    Null,
    /// Not available: an unchanged TOAST value, or a column that is not in WAL. Differs from null.
    None,
    /// An integer that fits 64 bits.
    Integer(i64),
    /// An integer of any width: two's complement, little-endian bytes.
    BigInteger(&'a [u8]),
    /// Double precision.
    Double(f64),
    /// Single precision at the source; a variant of its own, so that its bits survive.
    Single(f32),
    /// Arbitrary precision, NaN and infinities included.
    Decimal(Decimal<'a>),
    /// Microseconds since 1970-01-01 00:00:00 UTC.
    UnixTimestamp(i64),
    /// Calendar date and time.
    DateTime(DateTime),
    /// Bytes in the stream's charset.
    String(&'a [u8]),
    /// The column type's own binary form, written by its `typsend` function.
    Binary(&'a [u8]),
    /// The column type's own text form, written by its `typoutput` function.
    BinaryText(&'a [u8]),
}

impl PartialEq for Value<'_> {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Null, Self::Null) | (Self::None, Self::None) => true,
            (Self::Integer(a), Self::Integer(b))
            | (Self::UnixTimestamp(a), Self::UnixTimestamp(b)) => a == b,
            (Self::Double(a), Self::Double(b)) => a.to_bits() == b.to_bits(),
            (Self::Single(a), Self::Single(b)) => a.to_bits() == b.to_bits(),
            (Self::Decimal(a), Self::Decimal(b)) => a == b,
            (Self::DateTime(a), Self::DateTime(b)) => a == b,
            (Self::BigInteger(a), Self::BigInteger(b))
            | (Self::String(a), Self::String(b))
            | (Self::Binary(a), Self::Binary(b))
            | (Self::BinaryText(a), Self::BinaryText(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Value<'_> {}

impl<'a> Value<'a> {
    #[inline]
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        Ok(match cursor.u8("value tag")? {
            NULL => Self::Null,
            NONE => Self::None,
            INTEGER => Self::Integer(cursor.zigzag("integer")?),
            BIG_INTEGER => Self::BigInteger(cursor.byte_string("big integer")?),
            DOUBLE => Self::Double(f64::from_bits(cursor.u64("double")?)),
            SINGLE => Self::Single(f32::from_bits(cursor.u32("single")?)),
            DECIMAL => Self::Decimal(Decimal::new(cursor.byte_string("decimal")?)?),
            UNIX_TIMESTAMP => Self::UnixTimestamp(cursor.i64("unix timestamp")?),
            DATE_TIME => Self::DateTime(DateTime::read(cursor)?),
            STRING => Self::String(cursor.byte_string("string")?),
            BINARY_SEND => Self::Binary(cursor.byte_string("binary value")?),
            BINARY_TEXT => Self::BinaryText(cursor.byte_string("text form of a value")?),
            tag => return Err(Error::UnknownTag { what: "value", tag }),
        })
    }

    /// Appends the value's encoding to `out`.
    #[inline]
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Null => out.push(NULL),
            Self::None => out.push(NONE),
            Self::Integer(value) => {
                out.push(INTEGER);
                put_zigzag(out, *value);
            }
            Self::BigInteger(bytes) => {
                out.push(BIG_INTEGER);
                put_byte_string(out, bytes);
            }
            Self::Double(value) => {
                out.push(DOUBLE);
                out.extend_from_slice(&value.to_bits().to_le_bytes());
            }
            Self::Single(value) => {
                out.push(SINGLE);
                out.extend_from_slice(&value.to_bits().to_le_bytes());
            }
            Self::Decimal(value) => {
                out.push(DECIMAL);
                put_byte_string(out, value.bytes);
            }
            Self::UnixTimestamp(value) => {
                out.push(UNIX_TIMESTAMP);
                out.extend_from_slice(&value.to_le_bytes());
            }
            Self::DateTime(value) => {
                out.push(DATE_TIME);
                value.write(out);
            }
            Self::String(bytes) => {
                out.push(STRING);
                put_byte_string(out, bytes);
            }
            Self::Binary(bytes) => {
                out.push(BINARY_SEND);
                put_byte_string(out, bytes);
            }
            Self::BinaryText(bytes) => {
                out.push(BINARY_TEXT);
                put_byte_string(out, bytes);
            }
        }
    }
}

/// An arbitrary-precision decimal in the form of PostgreSQL's `numeric_send`
/// (src/backend/utils/adt/numeric.c, 15 to 18). All fields are big-endian 16-bit: number of
/// base-10000 digits, weight of the first digit, sign (0x0000 plus, 0x4000 minus, 0xC000 NaN,
/// 0xD000 infinity, 0xF000 minus infinity), decimal places to show (at most 16383; the infinities
/// have a meaningless 32 there), digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decimal<'a> {
    bytes: &'a [u8],
}

impl<'a> Decimal<'a> {
    /// Most decimal places of PostgreSQL's numeric (`NUMERIC_DSCALE_MAX`).
    pub const MAX_SCALE: u16 = 0x3fff;

    /// Checks bytes in `numeric_send` form.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::TrailingBytes`] or [`Error::OutOfRange`] if they do not have
    /// that form.
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        let field = |index: usize| {
            bytes
                .get(index * 2..)
                .and_then(<[u8]>::first_chunk::<2>)
                .map(|raw| u16::from_be_bytes(*raw))
                .ok_or(Error::Truncated("decimal"))
        };
        let digits = usize::from(field(0)?);
        field(1)?;
        let sign = field(2)?;
        let scale = field(3)?;
        let expected = 8 + digits * 2;
        if bytes.len() < expected {
            return Err(Error::Truncated("decimal"));
        }
        if bytes.len() > expected {
            return Err(Error::TrailingBytes {
                what: "decimal",
                count: bytes.len() - expected,
            });
        }
        if !matches!(sign, 0x0000 | 0x4000 | 0xC000 | 0xD000 | 0xF000) {
            return Err(Error::OutOfRange {
                what: "decimal sign",
                value: i64::from(sign),
            });
        }
        if scale > Self::MAX_SCALE {
            return Err(Error::OutOfRange {
                what: "decimal scale",
                value: i64::from(scale),
            });
        }
        if !matches!(sign, 0x0000 | 0x4000) && digits != 0 {
            return Err(Error::OutOfRange {
                what: "number of digits of a decimal that is not finite",
                value: i64::try_from(digits).unwrap_or(i64::MAX),
            });
        }
        for index in 0..digits {
            let digit = field(4 + index)?;
            if digit > 9999 {
                return Err(Error::OutOfRange {
                    what: "decimal digit",
                    value: i64::from(digit),
                });
            }
        }
        Ok(Self { bytes })
    }

    /// Returns the `numeric_send` form.
    #[must_use]
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// The kind of a [`DateTime`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DateTimeKind {
    /// An ordinary date and time of day.
    Finite,
    /// Later than everything.
    Infinity,
    /// Earlier than everything.
    MinusInfinity,
}

/// A calendar date and time of day. BC and years past 9999 are ordinary values: days count the
/// proleptic Gregorian calendar from 1970-01-01.
///
/// Layout: one byte kind (0 finite, 1 infinity, 2 minus infinity) plus 16 if an offset follows; for
/// a finite value zigzag LEB128 days since 1970-01-01, LEB128 microseconds of the day (at most
/// 86,400,000,000); then the offset, if there is one, as zigzag LEB128 seconds east of UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DateTime {
    /// Finite or one of the infinities.
    pub kind: DateTimeKind,
    /// Days since 1970-01-01; 0 unless finite.
    pub days: i32,
    /// Microseconds since midnight, 0 to 86,400,000,000; 0 unless finite.
    pub micros: i64,
    /// Seconds east of UTC; `None` if the value explicitly has no offset.
    pub offset: Option<i32>,
}

impl DateTime {
    /// Largest value of `micros`: 24:00:00.
    pub const MAX_MICROS: i64 = 86_400_000_000;

    fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        let tag = cursor.u8("date and time")?;
        let kind = match tag & 0x0f {
            0 => DateTimeKind::Finite,
            1 => DateTimeKind::Infinity,
            2 => DateTimeKind::MinusInfinity,
            _ => {
                return Err(Error::UnknownTag {
                    what: "date and time",
                    tag,
                });
            }
        };
        if tag & 0xe0 != 0 {
            return Err(Error::UnknownTag {
                what: "date and time",
                tag,
            });
        }
        let small =
            |what, value: i64| i32::try_from(value).map_err(|_| Error::OutOfRange { what, value });
        let (mut days, mut micros) = (0, 0);
        if kind == DateTimeKind::Finite {
            days = small("days", cursor.zigzag("days")?)?;
            let raw = cursor.varint("microseconds of the day")?;
            micros = i64::try_from(raw).unwrap_or(i64::MAX);
        }
        let offset = if tag & 0x10 == 0 {
            None
        } else {
            Some(small("offset", cursor.zigzag("offset")?)?)
        };
        let value = Self {
            kind,
            days,
            micros,
            offset,
        };
        value.check()?;
        Ok(value)
    }

    /// Checks the time of day: one outside the day has no encoding.
    pub(crate) fn check(&self) -> Result<()> {
        if self.kind != DateTimeKind::Finite || (0..=Self::MAX_MICROS).contains(&self.micros) {
            return Ok(());
        }
        Err(Error::OutOfRange {
            what: "microseconds of the day",
            value: self.micros,
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        let kind = match self.kind {
            DateTimeKind::Finite => 0,
            DateTimeKind::Infinity => 1,
            DateTimeKind::MinusInfinity => 2,
        };
        out.push(kind | if self.offset.is_some() { 0x10 } else { 0 });
        if self.kind == DateTimeKind::Finite {
            put_zigzag(out, i64::from(self.days));
            put_varint(out, self.micros.cast_unsigned());
        }
        if let Some(offset) = self.offset {
            put_zigzag(out, i64::from(offset));
        }
    }
}
