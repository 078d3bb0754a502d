//! The format `wal2json`: JSON as the output plugin wal2json writes it, in its format versions 1
//! and 2, for existing consumers of that format.
//!
//! The format was learnt from wal2json's documentation and by running it (2.5), and a test compares
//! the two byte by byte over the same WAL. If the output of 2.5 is invalid JSON, this module writes
//! that of later versions; `docs/reference/wal2json.md` lists these cases.
//!
//! `options` reads the options, `selection` chooses tables and messages, `layout` prepares the
//! constant text of a relation's changes, `document` writes changes, messages and transactions. All
//! text is bytes in the server's encoding, like wal2json's, and is appended to a reused buffer.

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
