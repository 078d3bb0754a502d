//! GIR, the General Internal Representation of a change (after Alibaba DTS, PVLDB 17(12), 2024,
//! section 3): the record model, its binary codec, and its JSON.
//!
//! Pure Rust, no process of its own, and usable without PostgreSQL. The output plugin writes
//! records with [`Writer`]; the leader, the appliers and other programs read them in place with
//! [`Reader`]. Reading borrows from the input and allocates nothing. Invalid input leads to an
//! [`Error`], never to a panic. The bytes are described in `docs/PROTOCOL.md`.
//!
//! # Reading a stream
//!
//! A frame is what one message of the replication protocol carries, or one row of
//! `pg_logical_slot_peek_binary_changes`. A change names its relation by a number that a schema
//! record announced earlier in the stream.
//!
//! ```
//! use std::collections::HashMap;
//! use braid_gir::{Operation, Reader, Record, Result, Value};
//!
//! /// The rows of a frame, as `table: column=value ...`.
//! fn rows(frame: &[u8], names: &mut HashMap<u32, (String, Vec<String>)>) -> Result<Vec<String>> {
//!     let mut rows = Vec::new();
//!     let mut reader = Reader::new(frame);
//!     while let Some(record) = reader.next_record()? {
//!         match record {
//!             Record::Schema(schema) => {
//!                 let columns = schema.columns().map(|column| column.name.to_owned());
//!                 names.insert(schema.number.0, (schema.name.to_owned(), columns.collect()));
//!             }
//!             Record::Change(change) if change.operation != Operation::Delete => {
//!                 let (Some((table, columns)), Some(after)) =
//!                     (names.get(&change.header.schema.0), &change.after)
//!                 else {
//!                     continue;
//!                 };
//!                 let mut row = format!("{table}:");
//!                 for (column, value) in columns.iter().zip(after.values()) {
//!                     let text = match value? {
//!                         Value::Null => "null".into(),
//!                         // An unchanged TOAST value: not in WAL, so not in the record.
//!                         Value::None => continue,
//!                         value => {
//!                             let text = value.to_text().unwrap_or_default();
//!                             String::from_utf8_lossy(&text).into_owned()
//!                         }
//!                     };
//!                     row += &format!(" {column}={text}");
//!                 }
//!                 rows.push(row);
//!             }
//!             _ => {}
//!         }
//!     }
//!     Ok(rows)
//! }
//!
//! // From the worked example in docs/PROTOCOL.md: a schema and an insert.
//! let frame = b"\x53\x59\0\0\0\0\0\0\0\x0b\x40\0\0\x64\x06public\x05items\x02\0\
//!     \x07\x17\0\0\0\xff\xff\xff\xff\x02id\x0apg_catalog\x04int4\
//!     \0\x19\0\0\0\xff\xff\xff\xff\x04note\x0apg_catalog\x04text\x01\0\x01\0\0\0\0\
//!     \x49\x19\0\0\0\0\0\0\0\0\x01\x88\x77\x66\x55\x44\x33\x22\x11\
//!     \x02\0\x02\x02\x09\x05h\xc3\xa9y!";
//! assert_eq!(rows(frame, &mut HashMap::new())?, ["items: id=1 note=h\u{e9}y!"]);
//! # Ok::<(), braid_gir::Error>(())
//! ```
//!
//! An [`Error`] says what is wrong with a record, [`Reader::position`] which one it is.
//! [`StreamOrder`] checks the order of records:
//!
//! ```
//! use braid_gir::{Reader, StreamOrder};
//!
//! /// Refuses what no server sends, and says where.
//! fn check(frame: &[u8], order: &mut StreamOrder) -> Result<(), String> {
//!     let mut reader = Reader::new(frame);
//!     loop {
//!         match reader.next_record() {
//!             Ok(Some(record)) => order
//!                 .see(&record)
//!                 .map_err(|error| reader.position().error(error).to_string())?,
//!             Ok(None) => return Ok(()),
//!             Err(error) => return Err(reader.position().error(error).to_string()),
//!         }
//!     }
//! }
//!
//! let error = check(b"C\x02\0\0\0\0\0", &mut StreamOrder::new()).unwrap_err();
//! assert_eq!(error, "record 1 (Commit, at byte 0): record ends inside commit lsn");
//! let error = check(b"E\0\0\0\0", &mut StreamOrder::new()).unwrap_err();
//! let at = "record 1 (Segment end, at byte 0): ";
//! let wanted = format!("{at}Segment end where the stream header was expected");
//! assert_eq!(error, wanted);
//! ```
//!
//! # JSON
//!
//! [`JsonWriter`] writes a stream's records as JSON objects. [`JsonReader`] reads these, and
//! objects of other programs (`docs/gir.schema.json` defines their form):
//!
//! ```
//! use braid_gir::{JsonOptions, JsonReader, JsonWriter, Reader, Writer};
//!
//! let text = r#"{"operation": "insert",
//!     "transaction": {"lsn": "0/10", "commit_time": "2024-02-29T12:30:00Z", "origin": "erp"},
//!     "schema": {"namespace": "public", "table": "items", "columns": [
//!         {"name": "id", "type": "int4", "identity": true},
//!         {"name": "price", "type": "numeric"}]},
//!     "after": {"id": 1, "price": {"decimal": "9.90"}}}"#;
//! let mut records = Writer::new();
//! let mut reader = JsonReader::new();
//! reader.read(text.as_bytes(), &mut records)?;
//! reader.finish(&mut records)?;
//!
//! let mut json = JsonWriter::new(JsonOptions::default());
//! let mut lines = String::new();
//! let mut frame = Reader::new(records.frame());
//! while let Some(record) = frame.next_record()? {
//!     json.record(&record, &mut lines)?;
//!     lines.push('\n');
//! }
//! assert!(lines.contains(r#""after":{"id":1,"price":{"decimal":"9.90"}}"#));
//!
//! // Errors say what and where.
//! let error = JsonReader::new().read(br#"{"operation": "upsert"}"#, &mut records).unwrap_err();
//! assert_eq!(error.to_string(), r#"unknown operation "upsert", at byte 14 (/operation)"#);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Text
//!
//! [`render()`] returns a record as a line of text, [`render_to`] writes the line in parts, and
//! [`Value::to_text`] returns a value as text that PostgreSQL's input functions accept.
//!
//! Not for: decisions about changes. `decoder` decides what is emitted, `bgworker` how it is
//! applied.
#![forbid(unsafe_code)]

mod builtin;
mod calendar;
mod change;
mod error;
mod image;
mod json;
mod lsn;
mod message;
mod order;
mod position;
mod prepared;
mod record;
mod render;
mod schema;
mod segment;
mod statement;
mod stream;
mod text;
mod transaction;
mod truncate;
mod value;
mod wire;

pub use change::{BeforeKind, Change, ChangeHeader, Operation, Writeset};
pub use error::{Error, Result};
pub use image::{Image, ImageWriter, Values};
pub use json::{
    Decoder, JsonError, JsonErrorKind, JsonOptions, JsonReader, JsonWriter, SchemaDetail,
};
pub use lsn::{lsn_text, parse_lsn};
pub use message::Message;
pub use order::{OrderError, StreamOrder};
pub use position::{Located, Position};
pub use prepared::{Prepared, RollbackPrepared};
pub use record::{Reader, Record, Tag, Writer};
pub use render::{Detail, Schemas, render, render_frame, render_to};
pub use schema::{
    Column, ColumnFlags, Columns, ReplicaIdentity, Schema, SchemaKey, SchemaKeyColumn,
    SchemaKeyColumns, SchemaKeys, SchemaNumber, WrittenKey,
};
pub use segment::{Abort, SegmentStart, StreamedCommit};
pub use statement::{DDL_PREFIX, PASSWORD_SETTING, Statement, StatementTable, TableState, mark_of};
pub use stream::{MAGIC, PROTOCOL_VERSION, StreamHeader};
pub use transaction::{Begin, Commit};
pub use truncate::Truncate;
pub use value::{DateTime, DateTimeKind, Decimal, Value};
