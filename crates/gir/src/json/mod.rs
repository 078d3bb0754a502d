//! gir-json: records as JSON objects, one object a record, and back.
//!
//! [`JsonWriter`] is run by the output plugin (`format` = `gir-json`) and by programs that read the
//! binary stream; [`JsonReader`] by whoever takes records from elsewhere. What an object looks like
//! is in `docs/gir.schema.json` and, in words, in `docs/PROTOCOL.md`. Records that were written and
//! read again are the same, byte for byte.
//!
//! What JSON readers would round, or could not tell apart, is never a bare number: integers past
//! 2^53, floats, decimals, times and bytes are objects of one member that names the kind of value.
//! A column that an image does not have (an unchanged TOAST value, or one that is not in the key)
//! is left out of its object; null is SQL's null.
//!
//! Not for: JSON in wal2json's form, which says less than a record does.

mod error;
mod moment;
mod number;
mod read;
mod scan;
mod value;
mod write;

pub use error::{JsonError, JsonErrorKind};
pub use read::JsonReader;
pub use value::Decoder;
pub use write::{JsonOptions, JsonWriter, SchemaDetail};

/// How identities of rows are called, with the letters of the binary form.
const IDENTITIES: [(&str, u8); 4] = [
    ("default", b'd'),
    ("index", b'i'),
    ("full", b'f'),
    ("nothing", b'n'),
];

/// Largest integer of which every JSON reader knows each neighbour: 2^53 - 1.
const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;
