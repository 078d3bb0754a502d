//! One column's value as JSON, and back.
//!
//! Null, integers that every reader represents exactly, and strings are JSON's own. Any other value
//! is an object with one member, whose name is the kind of value. True and false are the integers 1
//! and 0; columns of type bool use this form. `fetched` encloses a value that was fetched from the
//! table and is not in WAL.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::error::{Inside, JsonErrorKind, Result};
use super::scan::Node;
use super::{MAX_SAFE_INTEGER, moment, number};
use crate::value::{DateTime, Decimal, Value};

/// Converts bytes of a stream whose charset is not UTF-8 to text.
pub type Decoder = fn(&[u8]) -> Option<String>;

/// How bytes of the stream are converted to text.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Charset {
    /// UTF8, or SQL_ASCII, where bytes that are valid UTF-8 count as text.
    #[default]
    Utf8,
    /// Another charset; ASCII is the same in all of them.
    Other(Option<Decoder>),
}

impl Charset {
    /// Converts bytes to text; `None` if they are not text. A zero byte is not text either: JSON
    /// allows it, but PostgreSQL's jsonb does not.
    pub(super) fn decode(self, bytes: &[u8]) -> Option<Cow<'_, str>> {
        let text = match self {
            Self::Other(Some(decoder)) if !bytes.is_ascii() => decoder(bytes).map(Cow::Owned),
            Self::Other(None) if !bytes.is_ascii() => None,
            _ => std::str::from_utf8(bytes).ok().map(Cow::Borrowed),
        };
        text.filter(|text| !text.contains('\0'))
    }
}

/// Appends `value`. [`Value::None`] has no form of its own: the column is left out.
pub(super) fn put_value(out: &mut String, value: &Value<'_>, charset: Charset) {
    match value {
        Value::Null | Value::None => out.push_str("null"),
        Value::Integer(value) if value.unsigned_abs() <= MAX_SAFE_INTEGER => {
            print(out, format_args!("{value}"));
        }
        Value::Integer(value) => print(out, format_args!(r#"{{"integer":"{value}"}}"#)),
        Value::BigInteger(bytes) => match value.to_text() {
            Some(text) if number::is_plain_integer(bytes) => {
                put_kind(out, "big_integer", &String::from_utf8_lossy(&text));
            }
            _ => put_hex(out, "big_integer_bytes", bytes),
        },
        Value::Double(value) => put_float(out, "double", &Float::from(*value)),
        Value::Single(value) => put_float(out, "single", &Float::from(*value)),
        Value::Decimal(decimal)
            if number::is_plain_decimal(decimal) && decimal.has_short_text() =>
        {
            put_kind(out, "decimal", &decimal.to_text());
        }
        Value::Decimal(decimal) => put_hex(out, "decimal_bytes", decimal.as_bytes()),
        Value::UnixTimestamp(micros) => {
            put_kind(out, "timestamp", &moment::timestamp_text(*micros));
        }
        Value::DateTime(value) => put_kind(out, "datetime", &moment::date_time_text(value)),
        Value::String(bytes) => match charset.decode(bytes) {
            Some(text) => put_string(out, &text),
            None => put_hex(out, "string_bytes", bytes),
        },
        Value::Binary(bytes) => put_hex(out, "binary", bytes),
        Value::BinaryText(bytes) => match charset.decode(bytes) {
            Some(text) => {
                out.push_str(r#"{"text":"#);
                put_string(out, &text);
                out.push('}');
            }
            None => put_hex(out, "text_bytes", bytes),
        },
    }
}

/// Appends formatted text. Writing to a String does not fail.
fn print(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
}

/// Appends an object with one member; `text` needs no escapes.
fn put_kind(out: &mut String, kind: &str, text: &str) {
    for part in ["{\"", kind, "\":\"", text, "\"}"] {
        out.push_str(part);
    }
}

fn put_hex(out: &mut String, kind: &str, bytes: &[u8]) {
    out.push_str("{\"");
    out.push_str(kind);
    out.push_str("\":\"");
    hex_into(out, bytes);
    out.push_str("\"}");
}

/// Appends bytes as lower-case hexadecimal digits.
pub(super) fn hex_into(out: &mut String, bytes: &[u8]) {
    out.reserve(bytes.len() * 2);
    for byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            out.push(char::from_digit(u32::from(nibble), 16).unwrap_or_default());
        }
    }
}

/// Parses hexadecimal digits, two a byte.
pub(super) fn hex_bytes(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs
        .iter()
        .map(|[high, low]| {
            let digit = |byte: &u8| char::from(*byte).to_digit(16);
            u8::try_from(digit(high)? * 16 + digit(low)?).ok()
        })
        .collect()
}

/// Appends a JSON string. Only quotes, backslashes and control characters are escaped.
pub(super) fn put_string(out: &mut String, text: &str) {
    out.push('"');
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c < ' ' || c == '"' || c == '\\') {
        let (plain, tail) = rest.split_at(at);
        out.push_str(plain);
        let mut tail = tail.chars();
        match tail.next() {
            Some('"') => out.push_str("\\\""),
            Some('\\') => out.push_str("\\\\"),
            Some('\n') => out.push_str("\\n"),
            Some('\r') => out.push_str("\\r"),
            Some('\t') => out.push_str("\\t"),
            Some(control) => print(out, format_args!("\\u{:04x}", u32::from(control))),
            None => {}
        }
        rest = tail.as_str();
    }
    out.push_str(rest);
    out.push('"');
}

/// A float of either width: a number if that is exact.
enum Float {
    Number(String),
    Word(&'static str),
    /// A NaN with a sign or a non-standard payload.
    Bits(String),
}

impl From<f64> for Float {
    fn from(value: f64) -> Self {
        if value.is_nan() && value.to_bits() != f64::NAN.to_bits() {
            return Self::Bits(format!("{:016x}", value.to_bits()));
        }
        special(value).unwrap_or_else(|| Self::Number(format!("{value:?}")))
    }
}

impl From<f32> for Float {
    fn from(value: f32) -> Self {
        if value.is_nan() && value.to_bits() != f32::NAN.to_bits() {
            return Self::Bits(format!("{:08x}", value.to_bits()));
        }
        special(f64::from(value)).unwrap_or_else(|| Self::Number(format!("{value:?}")))
    }
}

/// Returns the word of a special value. Negative zero is one, as a reader may take it for an
/// integer.
fn special(value: f64) -> Option<Float> {
    Some(Float::Word(match () {
        () if value.is_nan() => "NaN",
        () if value == f64::INFINITY => "Infinity",
        () if value == f64::NEG_INFINITY => "-Infinity",
        () if value == 0.0 && value.is_sign_negative() => "-0",
        () => return None,
    }))
}

fn put_float(out: &mut String, kind: &str, value: &Float) {
    match value {
        Float::Number(digits) => print(out, format_args!(r#"{{"{kind}":{digits}}}"#)),
        Float::Word(word) => put_kind(out, kind, word),
        Float::Bits(bits) => put_kind(out, &format!("{kind}_bits"), bits),
    }
}

/// A value that was read, which owns the parts that had to be built.
#[derive(Debug)]
pub(super) enum Read<'a> {
    Plain(Value<'static>),
    String(Cow<'a, str>),
    Text(Cow<'a, str>),
    BigInteger(Vec<u8>),
    Decimal(Vec<u8>),
    StringBytes(Vec<u8>),
    Binary(Vec<u8>),
    TextBytes(Vec<u8>),
}

impl Read<'_> {
    pub(super) fn value(&self) -> Value<'_> {
        match self {
            Self::Plain(value) => *value,
            Self::String(text) => Value::String(text.as_bytes()),
            Self::Text(text) => Value::BinaryText(text.as_bytes()),
            Self::BigInteger(bytes) => Value::BigInteger(bytes),
            Self::Decimal(bytes) => Decimal::new(bytes).map_or(Value::Null, Value::Decimal),
            Self::StringBytes(bytes) => Value::String(bytes),
            Self::Binary(bytes) => Value::Binary(bytes),
            Self::TextBytes(bytes) => Value::BinaryText(bytes),
        }
    }
}

/// Reads a column's value.
pub(super) fn read_value<'a>(node: &Node<'a>) -> Result<Read<'a>> {
    if node.is_null() {
        return Ok(Read::Plain(Value::Null));
    }
    if node.is_string() {
        return Ok(Read::String(node.string()?));
    }
    if node.is_number() {
        let value: i64 = node.integer("integer")?;
        // Beyond that, a reader in between may have rounded the value.
        if value.unsigned_abs() > MAX_SAFE_INTEGER {
            return Err(node.error(JsonErrorKind::OutOfRange("integer")));
        }
        return Ok(Read::Plain(Value::Integer(value)));
    }
    if !node.is_object() {
        let value = node.boolean().map_err(|_| {
            node.error(JsonErrorKind::WrongType(
                "null, true, false, a number, a string or an object",
            ))
        })?;
        return Ok(Read::Plain(Value::Integer(i64::from(value))));
    }
    let mut members = node.members()?;
    let one = |_| JsonErrorKind::WrongType("an object of one member");
    let Some(member) = members.next() else {
        return Err(node.error(one(())));
    };
    let (kind, inner) = member?;
    if members.next().is_some() {
        return Err(node.error(one(())));
    }
    read_kind(node, &kind, &inner).inside(&kind)
}

/// Returns the fetched value in a node, if it has one.
pub(super) fn fetched_value<'a>(node: &Node<'a>) -> Result<Option<Read<'a>>> {
    if !node.is_object() {
        return Ok(None);
    }
    for member in node.members()? {
        let (kind, inner) = member?;
        if kind == "fetched" {
            return read_value(&inner).map(Some);
        }
    }
    Ok(None)
}

fn read_kind<'a>(node: &Node<'a>, kind: &str, inner: &Node<'a>) -> Result<Read<'a>> {
    let bytes = |what| {
        hex_bytes(&inner.string()?).ok_or_else(|| inner.error(JsonErrorKind::Malformed(what)))
    };
    let malformed = |what| inner.error(JsonErrorKind::Malformed(what));
    Ok(match kind {
        "integer" => {
            let text = inner.string()?;
            let value = text.parse().map_err(|_| malformed("integer"))?;
            Read::Plain(Value::Integer(value))
        }
        "big_integer" => {
            let bytes = number::integer_from_text(&inner.string()?);
            Read::BigInteger(bytes.ok_or_else(|| malformed("integer"))?)
        }
        "big_integer_bytes" => Read::BigInteger(bytes("hexadecimal bytes")?),
        "double" => {
            let value = match read_float(inner)?.as_ref() {
                "NaN" => f64::NAN,
                // Rust also parses its own names of special values; only PostgreSQL's are accepted.
                text => finite(text).ok_or_else(|| malformed("float"))?,
            };
            Read::Plain(Value::Double(value))
        }
        "single" => {
            let value = match read_float(inner)?.as_ref() {
                "NaN" => f32::NAN,
                text => finite(text).ok_or_else(|| malformed("float"))?,
            };
            Read::Plain(Value::Single(value))
        }
        "double_bits" => match *bytes("bits of a float")? {
            [a, b, c, d, e, f, g, h] => {
                Read::Plain(Value::Double(f64::from_be_bytes([a, b, c, d, e, f, g, h])))
            }
            _ => return Err(malformed("bits of a float")),
        },
        "single_bits" => match *bytes("bits of a float")? {
            [a, b, c, d] => Read::Plain(Value::Single(f32::from_be_bytes([a, b, c, d]))),
            _ => return Err(malformed("bits of a float")),
        },
        "decimal" => {
            let bytes = number::decimal_from_text(&inner.string()?);
            Read::Decimal(bytes.ok_or_else(|| malformed("decimal"))?)
        }
        "decimal_bytes" => {
            let bytes = bytes("hexadecimal bytes")?;
            Decimal::new(&bytes).map_err(|error| inner.error(JsonErrorKind::Record(error)))?;
            Read::Decimal(bytes)
        }
        "timestamp" => Read::Plain(Value::UnixTimestamp(read_timestamp(inner)?)),
        "datetime" => {
            let value: Option<DateTime> = moment::date_time_from_text(&inner.string()?);
            Read::Plain(Value::DateTime(
                value.ok_or_else(|| malformed("date and time"))?,
            ))
        }
        "string_bytes" => Read::StringBytes(bytes("hexadecimal bytes")?),
        "binary" => Read::Binary(bytes("hexadecimal bytes")?),
        "text" => Read::Text(inner.string()?),
        "text_bytes" => Read::TextBytes(bytes("hexadecimal bytes")?),
        // The record itself does not have the value.
        "fetched" => {
            if inner.is_object()
                && let Some(Ok((name, _))) = inner.members()?.next()
                && name == "fetched"
            {
                return Err(inner.error(JsonErrorKind::TooDeep));
            }
            read_value(inner)?;
            Read::Plain(Value::None)
        }
        _ => {
            return Err(node.error(JsonErrorKind::UnknownWord {
                what: "kind of value",
                found: kind.to_owned(),
            }));
        }
    })
}

/// Reads a timestamp in UTC.
pub(super) fn read_timestamp(node: &Node<'_>) -> Result<i64> {
    moment::timestamp_from_text(&node.string()?)
        .ok_or_else(|| node.error(JsonErrorKind::Malformed("timestamp")))
}

fn read_float<'a>(node: &Node<'a>) -> Result<Cow<'a, str>> {
    if node.is_number() {
        return Ok(Cow::Borrowed(node.text()));
    }
    let word = node.string()?;
    if matches!(word.as_ref(), "NaN" | "Infinity" | "-Infinity" | "-0") {
        Ok(word)
    } else {
        Err(node.error(JsonErrorKind::Malformed("float")))
    }
}

/// Parses any float but NaN. Digits that overflow are not a number.
fn finite<F: std::str::FromStr + Into<f64> + Copy>(text: &str) -> Option<F> {
    let value: F = text.parse().ok()?;
    let overflowed = value.into().is_infinite() && !text.ends_with("Infinity");
    (!overflowed).then_some(value)
}
