//! Converts GIR values to Datums of a local column's type. Run by the appliers, in a transaction.
//!
//! The common types are converted directly. All others go through the local type's own receive or
//! input function. So a subscriber's column may have another type than the provider's, as far as
//! the text form allows, and domains check their constraints.

use std::ffi::{CStr, CString};

use braid_bgworker::sqlstate::SqlState;
use braid_gir::{DateTime, DateTimeKind, Value};
use braid_postgres::error::PgError;
use braid_postgres::memory::Context;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::type_function::{Input, Output, Receive};
use braid_postgres::value::{self, Value as PgValue};
use braid_postgres::{catalog, encoding, plain};
use pgrx::pg_sys;

const EPOCH_DIFFERENCE_DAYS: i32 = 10_957;

/// Direct conversion for a column's values, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shortcut {
    Bool,
    Int2,
    Int4,
    Int8,
    Oid,
    Float4,
    Float8,
    TimestampTz,
    Timestamp,
    Date,
    Text,
    Bytea,
    Uuid,
    Char,
    None,
}

/// Converter for the values of one local column.
#[derive(Debug)]
pub struct ColumnDecoder {
    shortcut: Shortcut,
    type_modifier: i32,
    receive: Option<Receive>,
    input: Input,
    /// The column's type, that of the domain's base for a domain.
    base: pg_sys::Oid,
    /// Whether the column has the same type as at the source, apart from domains and modifiers, so
    /// that the type's own binary form can be used.
    same_type: bool,
    /// The type at the source.
    remote_type: pg_sys::Oid,
    /// Converter to text, once a value came in the binary form of a type that the column does not
    /// have.
    translator: Option<Box<Translator>>,
    /// Memory of the type's functions. It outlives the decoder.
    memory: Context,
    /// Charset of the stream, as PostgreSQL numbers encodings.
    charset: i32,
    /// Whether the stream's charset is this database's encoding.
    same_charset: bool,
}

/// Converter of a built-in type's binary form to text. Built-in types have the same OIDs
/// everywhere.
#[derive(Debug)]
struct Translator {
    receive: Receive,
    output: Output,
}

impl Translator {
    /// Returns the converter of a built-in type; `None` if this version of PostgreSQL does not have
    /// the type. Called in a transaction. Its functions keep their state in `memory`.
    fn new(type_id: pg_sys::Oid, memory: Context) -> Option<Self> {
        if type_id.to_u32() >= pg_sys::FirstNormalObjectId {
            return None;
        }
        Some(Self {
            receive: Receive::find(type_id, memory)?,
            output: Output::of(type_id, memory),
        })
    }

    /// Returns the text, in the database's encoding, in the current memory context.
    fn text(&mut self, bytes: &[u8]) -> Result<&CStr, PgError> {
        let value = receive(&mut self.receive, -1, bytes)?;
        // The settings that copies and single values have; triggers run under their own settings.
        let settings = [
            ("timezone", "UTC"),
            ("bytea_output", "hex"),
            ("extra_float_digits", "3"),
        ];
        catalog::with_settings(&settings, || {
            self.output.write(value).ok_or_else(binary_format)
        })
    }
}

fn out_of_range(what: &str) -> PgError {
    PgError::new(
        SqlState::NumericValueOutOfRange,
        format!("value from the provider is out of range for type {what}"),
    )
}

impl ColumnDecoder {
    /// Returns a decoder for a column of type `local_type`, whose values have type `remote_type` at
    /// the source. Called in a transaction. The type's functions keep their state in `memory`,
    /// which outlives the decoder. Raises a PostgreSQL error if the type has no input function.
    #[must_use]
    pub fn new(
        local_type: u32,
        type_modifier: i32,
        remote: (u32, i32),
        (charset, local_encoding): (i32, i32),
        memory: Context,
    ) -> Self {
        let local = pg_sys::Oid::from(local_type);
        let same = local_type == remote.0 && (type_modifier == -1 || type_modifier == remote.1);
        let shortcut = match local {
            _ if !same => Shortcut::None,
            pg_sys::BOOLOID => Shortcut::Bool,
            pg_sys::INT2OID => Shortcut::Int2,
            pg_sys::INT4OID => Shortcut::Int4,
            pg_sys::INT8OID => Shortcut::Int8,
            pg_sys::OIDOID | pg_sys::XIDOID | pg_sys::CIDOID => Shortcut::Oid,
            pg_sys::FLOAT4OID => Shortcut::Float4,
            pg_sys::FLOAT8OID => Shortcut::Float8,
            pg_sys::TIMESTAMPTZOID => Shortcut::TimestampTz,
            pg_sys::TIMESTAMPOID => Shortcut::Timestamp,
            pg_sys::DATEOID => Shortcut::Date,
            pg_sys::TEXTOID | pg_sys::VARCHAROID | pg_sys::BPCHAROID => Shortcut::Text,
            pg_sys::BYTEAOID => Shortcut::Bytea,
            pg_sys::UUIDOID => Shortcut::Uuid,
            pg_sys::CHAROID => Shortcut::Char,
            _ => Shortcut::None,
        };
        let base = plain::getBaseType(local);
        Self {
            shortcut,
            type_modifier,
            receive: Receive::find(local, memory),
            input: Input::of(local, type_modifier, memory),
            base,
            same_type: base.to_u32() == remote.0 && remote.0 < pg_sys::FirstNormalObjectId,
            remote_type: match remote.0 {
                // Bytes of a type without a number are those of a bytea.
                0 if base == pg_sys::BYTEAOID => pg_sys::BYTEAOID,
                number => pg_sys::Oid::from(number),
            },
            translator: None,
            memory,
            charset,
            same_charset: charset == local_encoding,
        }
    }

    /// Returns a value as a Datum in the current memory context; `None` for null. The caller
    /// handles [`Value::None`].
    ///
    /// # Errors
    /// 22xxx if the value does not fit; whatever the type's function raises.
    pub fn decode(&mut self, value: &Value<'_>) -> Result<Option<pg_sys::Datum>, PgError> {
        use pgrx::IntoDatum;
        let datum = match (self.shortcut, value) {
            (_, Value::Null | Value::None) => return Ok(None),
            (Shortcut::Bool, Value::Integer(value)) => pg_sys::Datum::from(*value != 0),
            (Shortcut::Char, Value::Integer(value)) => i8::try_from(*value)
                .map_err(|_| out_of_range("\"char\""))?
                .into(),
            (Shortcut::Int2, Value::Integer(value)) => i16::try_from(*value)
                .map_err(|_| out_of_range("smallint"))?
                .into(),
            (Shortcut::Int4, Value::Integer(value)) => i32::try_from(*value)
                .map_err(|_| out_of_range("integer"))?
                .into(),
            (Shortcut::Int8, Value::Integer(value)) => (*value).into(),
            (Shortcut::Oid, Value::Integer(value)) => u32::try_from(*value)
                .map_err(|_| out_of_range("oid"))?
                .into(),
            (Shortcut::Float4, Value::Single(value)) => value.to_bits().cast_signed().into(),
            (Shortcut::Float8, Value::Double(value)) => pg_sys::Datum::from(value.to_bits()),
            (Shortcut::TimestampTz, Value::UnixTimestamp(micros)) => micros
                .checked_sub(EPOCH_DIFFERENCE)
                .ok_or_else(|| out_of_range("timestamp with time zone"))?
                .into(),
            (Shortcut::TimestampTz, Value::DateTime(value)) => {
                let east = i64::from(value.offset.unwrap_or(0)) * 1_000_000;
                match value.kind {
                    DateTimeKind::Finite => timestamp(value)?
                        .checked_sub(east)
                        .ok_or_else(|| out_of_range("timestamp with time zone"))?
                        .into(),
                    _ => timestamp(value)?.into(),
                }
            }
            (Shortcut::Timestamp, Value::DateTime(value)) => timestamp(value)?.into(),
            (Shortcut::Date, Value::DateTime(value)) => date(value)?.into(),
            (Shortcut::Text, Value::String(bytes)) => self.text(bytes),
            (Shortcut::Bytea, Value::Binary(bytes)) => {
                bytes.into_datum().unwrap_or_else(pg_sys::Datum::null)
            }
            (Shortcut::Uuid, Value::Binary(bytes)) if let Ok(bytes) = (*bytes).try_into() => {
                value::uuid(bytes).datum()
            }
            (_, Value::Binary(bytes)) => self.receive(bytes)?,
            // This is numeric's own binary form, whatever the type's name at the source.
            (_, Value::Decimal(decimal)) if self.is_numeric() => {
                self.receive_local(decimal.as_bytes())?
            }
            (_, Value::String(bytes) | Value::BinaryText(bytes)) => self.input(bytes)?,
            (_, other) => {
                let text = self.portable_text(other)?;
                self.input_ascii(&text)?
            }
        };
        Ok(Some(datum))
    }

    /// Whether values are bytea here and at the source.
    pub(super) fn is_bytea(&self) -> bool {
        self.shortcut == Shortcut::Bytea
    }

    /// Returns a value, given its text form in this database's encoding, as a Datum in the current
    /// memory context. A bytea ([`ColumnDecoder::is_bytea`]) is given as its bytes.
    ///
    /// # Errors
    /// As [`ColumnDecoder::decode`].
    pub(super) fn decode_answer(&mut self, bytes: &[u8]) -> Result<pg_sys::Datum, PgError> {
        use pgrx::IntoDatum;
        if self.is_bytea() {
            return Ok(bytes.into_datum().unwrap_or_else(pg_sys::Datum::null));
        }
        if i32::try_from(bytes.len()).is_err() {
            return Err(out_of_range("this column"));
        }
        encoding::check(bytes);
        if self.shortcut == Shortcut::Text && self.base == pg_sys::TEXTOID {
            return Ok(value::text(bytes).datum());
        }
        let text = CString::new(bytes).map_err(|_| {
            PgError::new(
                SqlState::CharacterNotInRepertoire,
                "text from the provider contains a zero byte",
            )
        })?;
        Ok(self.call_input(&text))
    }

    /// Returns the text form of a value that has one, for the type's input function.
    fn portable_text(&self, value: &Value<'_>) -> Result<String, PgError> {
        let is_date = [self.base, self.remote_type].contains(&pg_sys::DATEOID);
        let is_bool = self.base == pg_sys::BOOLOID;
        match value {
            Value::DateTime(value) if is_date && value.kind == DateTimeKind::Finite => {
                Ok(value.date_text())
            }
            Value::Integer(value) if is_bool => Ok(if *value == 0 { "f" } else { "t" }.to_owned()),
            Value::Integer(value) if self.base == pg_sys::CHAROID => char_text(*value),
            // As the source writes it, except for a number column, which can have it as a number.
            Value::Integer(value) if self.remote_type == pg_sys::BOOLOID && !self.is_number() => {
                Ok(if *value == 0 { "f" } else { "t" }.to_owned())
            }
            Value::Integer(value) if self.remote_type == pg_sys::CHAROID && !self.is_number() => {
                char_text(*value)
            }
            _ => value
                .to_text()
                .map(|text| String::from_utf8_lossy(&text).into_owned())
                .ok_or_else(|| {
                    PgError::new(
                        SqlState::CannotCoerce,
                        "value from the provider has no text form",
                    )
                }),
        }
    }

    fn is_number(&self) -> bool {
        matches!(
            self.base,
            pg_sys::INT2OID
                | pg_sys::INT4OID
                | pg_sys::INT8OID
                | pg_sys::NUMERICOID
                | pg_sys::FLOAT4OID
                | pg_sys::FLOAT8OID
        )
    }

    fn text(&self, bytes: &[u8]) -> pg_sys::Datum {
        value::text(self.to_local(bytes)).datum()
    }

    /// Whether the column's binary form is that of a numeric.
    fn is_numeric(&self) -> bool {
        let receive = self.receive.as_ref();
        receive.is_some_and(|receive| receive.parameter() == pg_sys::NUMERICOID)
    }

    /// Returns `bytes` in this database's encoding, checked. Raises a PostgreSQL error if they are
    /// not valid.
    fn to_local<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        if bytes.is_ascii() && !bytes.contains(&0) {
            bytes
        } else if self.same_charset {
            encoding::check(bytes);
            bytes
        } else {
            encoding::of_charset(bytes, self.charset)
        }
    }

    fn input(&mut self, bytes: &[u8]) -> Result<pg_sys::Datum, PgError> {
        let text = CString::new(self.to_local(bytes)).map_err(|_| {
            PgError::new(
                SqlState::CharacterNotInRepertoire,
                "text from the provider contains a zero byte",
            )
        })?;
        Ok(self.call_input(&text))
    }

    fn input_ascii(&mut self, text: &str) -> Result<pg_sys::Datum, PgError> {
        let text = CString::new(text).map_err(|_| {
            PgError::new(
                SqlState::CharacterNotInRepertoire,
                "text from the provider contains a zero byte",
            )
        })?;
        Ok(self.call_input(&text))
    }

    fn call_input(&mut self, text: &CStr) -> pg_sys::Datum {
        self.input.read(text).datum()
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<pg_sys::Datum, PgError> {
        if !self.same_type {
            return self.translate(bytes);
        }
        self.receive_local(bytes)
    }

    /// Returns a value that came in the binary form of the column's own type.
    fn receive_local(&mut self, bytes: &[u8]) -> Result<pg_sys::Datum, PgError> {
        let Some(function) = self.receive.as_mut() else {
            return Err(PgError::new(
                SqlState::UndefinedFunction,
                "the local type has no binary input function for a value that came in binary form",
            ));
        };
        receive(function, self.type_modifier, bytes).map(PgValue::datum)
    }

    /// Returns a value that came in the binary form of another type, by way of its text.
    fn translate(&mut self, bytes: &[u8]) -> Result<pg_sys::Datum, PgError> {
        let mut translator = match self.translator.take() {
            Some(translator) => translator,
            None => Box::new(
                Translator::new(self.remote_type, self.memory).ok_or_else(|| {
                    PgError::new(
                    SqlState::CannotCoerce,
                    "value came in the binary form of a type that is not known here",
                )
                .with_hint(
                    "Give the column, at the provider, a type that this version of PostgreSQL has.",
                )
                })?,
            ),
        };
        let value = translator.text(bytes).map(|text| self.call_input(text));
        self.translator = Some(translator);
        value
    }
}

/// Returns the text form of a "char", which came as a number.
fn char_text(value: i64) -> Result<String, PgError> {
    let byte = i8::try_from(value).map_err(|_| out_of_range("\"char\""))?;
    // charin takes a single character, or, since 16, a backslash and three octal digits.
    Ok(match byte.cast_unsigned() {
        0 => String::new(),
        byte if byte.is_ascii() => char::from(byte).to_string(),
        byte => format!("\\{byte:03o}"),
    })
}

/// PostgreSQL converts from client_encoding, which the applier sets to the stream's charset.
fn receive(
    function: &mut Receive,
    type_modifier: i32,
    bytes: &[u8],
) -> Result<PgValue<'static>, PgError> {
    if i32::try_from(bytes.len()).is_err() {
        return Err(out_of_range("this column"));
    }
    function
        .read(type_modifier, bytes)
        .ok_or_else(binary_format)
}

fn binary_format() -> PgError {
    PgError::new(
        SqlState::InvalidBinaryRepresentation,
        "incorrect binary data format from the provider",
    )
}

fn timestamp(value: &DateTime) -> Result<i64, PgError> {
    match value.kind {
        DateTimeKind::Infinity => Ok(i64::MAX),
        DateTimeKind::MinusInfinity => Ok(i64::MIN),
        DateTimeKind::Finite => {
            let days = i64::from(value.days) - i64::from(EPOCH_DIFFERENCE_DAYS);
            days.checked_mul(86_400_000_000)
                .and_then(|micros| micros.checked_add(value.micros))
                .ok_or_else(|| out_of_range("timestamp"))
        }
    }
}

fn date(value: &DateTime) -> Result<i32, PgError> {
    match value.kind {
        DateTimeKind::Infinity => Ok(i32::MAX),
        DateTimeKind::MinusInfinity => Ok(i32::MIN),
        DateTimeKind::Finite => value
            .days
            .checked_sub(EPOCH_DIFFERENCE_DAYS)
            .ok_or_else(|| out_of_range("date")),
    }
}
