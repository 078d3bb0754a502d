//! GIR, the General Internal Representation of a change (after Alibaba DTS, PVLDB 17(12), 2024, section 3): the record
//! model and its binary codec.
//!
//! Pure Rust, no process of its own: the output plugin writes records with [`Writer`], the leader and the appliers read
//! them in place with [`Reader`]. Reading borrows from the input and allocates nothing; any input, however broken, gives
//! an [`Error`] and never a panic. The bytes are described in `docs/PROTOCOL.md`.
//!
//! [`render()`] shows a record as a line of text, and [`Value::to_text`] gives a value the text that PostgreSQL's input functions
//! take.
//!
//! Not for: deciding anything about a change. What to emit is `decoder`'s, what to do with it `bgworker`'s.
#![forbid(unsafe_code)]

mod calendar;
mod change;
mod error;
mod image;
mod message;
mod record;
mod render;
mod schema;
mod stream;
mod text;
mod transaction;
mod truncate;
mod value;
mod wire;

pub use change::{BeforeKind, Change, ChangeHeader, Operation, Writeset};
pub use error::{Error, Result};
pub use image::{Image, ImageWriter, Values};
pub use message::Message;
pub use record::{Reader, Record, Tag, Writer};
pub use render::{Detail, Schemas, render, render_frame};
pub use schema::{Column, ColumnFlags, Columns, ReplicaIdentity, Schema, SchemaNumber};
pub use stream::{MAGIC, PROTOCOL_VERSION, StreamHeader};
pub use transaction::{Begin, Commit};
pub use truncate::Truncate;
pub use value::{DateTime, DateTimeKind, Decimal, Value};
