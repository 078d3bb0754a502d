//! The format `wal2json`: JSON as the output plugin wal2json writes it, in its format versions 1
//! and 2, for consumers that read that already.
//!
//! What is written was learnt from wal2json's documentation and by running it (2.5), and a test
//! compares the two byte by byte over the same WAL. Where 2.5 writes what is no JSON, this writes
//! what later versions do; `docs/reference/wal2json.md` lists these places.
//!
//! `options` reads the options, `selection` what they choose, `layout` prepares what a relation's
//! changes have in common, `document` puts changes, messages and transactions together. All of it
//! is bytes in the server's encoding, as wal2json's is, and appends to a buffer that is used again
//! and again.

mod document;
mod escape;
mod layout;
mod list;
mod options;
mod selection;

pub use document::{ChangeKind, Document, MessageText, TransactionText};
pub use escape::{push_hex, push_integer, push_string, push_unsigned};
pub use layout::{ColumnText, Image, Layout, RelationText, State};
pub use options::{Actions, Error, OPTIONS, Version, Wal2JsonOptions};
pub use selection::{Patterns, Prefixes};
