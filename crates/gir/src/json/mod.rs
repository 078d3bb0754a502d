//! gir-json: records as JSON objects, one object a record, and back.
//!
//! [`JsonWriter`] is run by the output plugin (`format` = `gir-json`) and by programs that read the
//! binary stream. [`JsonReader`] is run by programs that get records in JSON. The objects are
//! defined in `docs/gir.schema.json` and described in `docs/PROTOCOL.md`. Records that were written
//! and read again are equal byte for byte.
//!
//! A value that JSON readers would round, or could not distinguish from another one, is never a
//! bare number: integers past 2^53, floats, decimals, times and bytes are objects with one member,
//! which names the kind of value. A column that an image does not have (an unchanged TOAST value,
//! or a column outside of the key) is left out of its object; null is SQL's null.
//!
//! Not for: JSON in wal2json's form, which has less than a record.

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

/// Names of replica identities, with the letters of the binary form.
const IDENTITIES: [(&str, u8); 4] = [
    ("default", b'd'),
    ("index", b'i'),
    ("full", b'f'),
    ("nothing", b'n'),
];

/// Largest integer that every JSON reader can distinguish from its neighbours: 2^53 - 1.
const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;
