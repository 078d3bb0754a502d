//! Writes one column's value as JSON, as wal2json does: numbers and booleans bare, bytea as
//! hexadecimal digits, all other values as a string of the type's output function under the
//! session's own settings.
//!
//! Types whose text depends on nothing are written in place, without a call into PostgreSQL.

use braid_decoder::wal2json::{push_hex, push_integer, push_string, push_unsigned};
use pgrx::pg_sys;

use super::column::{self, Tools, TypeFunction};
use super::scratch::StreamMemory;
use super::type_facts::TypeFacts;

/// How a column's value is written.
#[derive(Debug)]
pub(super) enum Renderer {
    Bool,
    /// Integers of 2, 4 and 8 bytes; in quotes or not.
    Signed(Quotes),
    /// oid.
    Unsigned(Quotes),
    /// A varlena of characters.
    Text,
    /// A C string in a field of fixed or variable length.
    CString,
    Bytea,
    Uuid,
    /// An enum's label.
    Enum(TypeFunction),
    /// The text of an output function, as a number; `null` for values that are no numbers in JSON.
    Number(TypeFunction),
    /// The text of an output function, as a string.
    Output(TypeFunction),
}

/// Whether a number is in quotes (`numeric-data-types-as-string`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quotes {
    Bare,
    Quoted,
}

impl Renderer {
    /// Choose for a column that is written as `declared`; functions keep their memory in `context`.
    /// In a transaction with a snapshot for catalogs; `facts` are those of the type.
    pub(super) fn new(
        declared: pg_sys::Oid,
        facts: &TypeFacts,
        by_value: bool,
        numeric_as_string: bool,
        context: StreamMemory,
    ) -> Self {
        let output = || TypeFunction::new(facts.output, by_value, context);
        let quotes = if numeric_as_string {
            Quotes::Quoted
        } else {
            Quotes::Bare
        };
        match declared {
            pg_sys::INT2OID | pg_sys::INT4OID | pg_sys::INT8OID => Self::Signed(quotes),
            pg_sys::OIDOID => Self::Unsigned(quotes),
            pg_sys::FLOAT4OID | pg_sys::FLOAT8OID | pg_sys::NUMERICOID => match quotes {
                Quotes::Bare => Self::Number(output()),
                Quotes::Quoted => Self::Output(output()),
            },
            pg_sys::BOOLOID => Self::Bool,
            pg_sys::BYTEAOID => Self::Bytea,
            // A domain is no number to wal2json; the output of its base type is a string.
            _ => match facts.oid {
                pg_sys::INT2OID | pg_sys::INT4OID | pg_sys::INT8OID => Self::Signed(Quotes::Quoted),
                pg_sys::TEXTOID | pg_sys::VARCHAROID | pg_sys::BPCHAROID | pg_sys::JSONOID => {
                    Self::Text
                }
                pg_sys::NAMEOID => Self::CString,
                pg_sys::UUIDOID => Self::Uuid,
                _ if facts.kind == pg_sys::TYPTYPE_ENUM => Self::Enum(output()),
                _ => Self::Output(output()),
            },
        }
    }

    /// Append the value whose stored form is `bytes`.
    #[inline]
    pub(super) fn put(&self, bytes: &[u8], out: &mut Vec<u8>, tools: &Tools) {
        match self {
            Self::Bool => {
                let on = bytes.first().is_some_and(|byte| *byte != 0);
                out.extend_from_slice(if on { b"true" } else { b"false" });
            }
            Self::Signed(quotes) => quotes.around(out, |out| {
                push_integer(out, column::signed(bytes));
            }),
            Self::Unsigned(quotes) => quotes.around(out, |out| {
                push_unsigned(out, u64::from(u32::from_le_bytes(column::fixed(bytes))));
            }),
            Self::Text => column::with_content(bytes, tools, |text| push_string(out, text)),
            Self::CString => push_string(out, column::until_zero(bytes)),
            Self::Bytea => column::with_content(bytes, tools, |raw| push_hex(out, raw)),
            Self::Uuid => put_uuid(bytes, out),
            Self::Enum(function) => {
                column::with_label(function, bytes, tools, |label| push_string(out, label));
            }
            Self::Number(function) => {
                let text = function.output(bytes, tools).to_bytes();
                // NaN, Infinity, -Infinity.
                if matches!(text, [b'N' | b'I', ..] | [b'-', b'I', ..]) {
                    out.extend_from_slice(b"null");
                } else {
                    out.extend_from_slice(text);
                }
            }
            Self::Output(function) => push_string(out, function.output(bytes, tools).to_bytes()),
        }
    }
}

impl Quotes {
    #[inline]
    fn around(self, out: &mut Vec<u8>, put: impl FnOnce(&mut Vec<u8>)) {
        if self == Self::Quoted {
            out.push(b'"');
            put(out);
            out.push(b'"');
        } else {
            put(out);
        }
    }
}

fn put_uuid(bytes: &[u8], out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    out.push(b'"');
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            out.push(b'-');
        }
        for nibble in [byte >> 4, byte & 15] {
            out.push(DIGITS.get(usize::from(nibble)).copied().unwrap_or(b'0'));
        }
    }
    out.push(b'"');
}
