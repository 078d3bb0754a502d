//! Records as lines of text, for tests and for inspecting a stream.
//!
//! Run by SQL functions that show what a slot decodes, and by tests. Not a format to parse:
//! docs/PROTOCOL.md defines that. With [`Detail::Stable`] the same changes give the same lines on
//! every server.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use crate::change::{BeforeKind, Change, Operation};
use crate::error::Result;
use crate::image::Image;
use crate::lsn::lsn_text;
use crate::message::Message;
use crate::prepared::Prepared;
use crate::record::{Reader, Record};
use crate::schema::{Schema, SchemaNumber};
use crate::stream::{PROTOCOL_VERSION, StreamHeader};
use crate::text::unix_timestamp_text;
use crate::transaction::{Begin, Commit};
use crate::truncate::Truncate;
use crate::value::Value;

/// How detailed a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Without everything that differs from run to run: LSNs, transaction ids, commit timestamps,
    /// OIDs, identities of node and server, names of database and charset. Key hashes are only
    /// counted. OIDs inside a value's binary form stay.
    Stable,
    /// Everything.
    Full,
}

/// Names of relations and columns by schema number, kept while a stream is read.
#[derive(Debug, Clone, Default)]
pub struct Schemas {
    shapes: BTreeMap<SchemaNumber, Shape>,
}

#[derive(Debug, Clone)]
struct Shape {
    relation: String,
    columns: Vec<ShapeColumn>,
}

#[derive(Debug, Clone)]
struct ShapeColumn {
    name: String,
    identity: bool,
}

impl Schemas {
    /// Returns an empty collection.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Remembers a schema, replacing one with the same number.
    pub fn remember(&mut self, schema: &Schema<'_>) {
        let columns = schema
            .columns()
            .map(|column| ShapeColumn {
                name: identifier(column.name),
                identity: column.flags.is_identity(),
            })
            .collect();
        let relation = qualified(schema.namespace, schema.name);
        self.shapes
            .insert(schema.number, Shape { relation, columns });
    }

    /// Returns the qualified name of a relation, quoted as in SQL.
    #[must_use]
    pub fn relation(&self, number: SchemaNumber) -> Option<&str> {
        self.shapes
            .get(&number)
            .map(|shape| shape.relation.as_str())
    }

    fn columns(&self, number: SchemaNumber) -> &[ShapeColumn] {
        self.shapes.get(&number).map_or(&[], |shape| &shape.columns)
    }
}

/// Returns every record of a frame as a line, and remembers its schemas.
///
/// # Errors
/// The error of the first invalid record.
pub fn render_frame(frame: &[u8], schemas: &mut Schemas, detail: Detail) -> Result<Vec<String>> {
    let mut reader = Reader::new(frame);
    let mut lines = Vec::new();
    while let Some(record) = reader.next_record()? {
        if let Record::Schema(schema) = &record {
            schemas.remember(schema);
        }
        lines.push(render(&record, schemas, detail));
    }
    Ok(lines)
}

/// Returns a record as one line without line break. If its schema was remembered, a change names
/// its columns; otherwise they are numbered from 1.
#[must_use]
pub fn render(record: &Record<'_>, schemas: &Schemas, detail: Detail) -> String {
    let mut text = String::new();
    // Writing to a String can't fail.
    let _ = render_to(record, schemas, detail, &mut text);
    text
}

/// Writes a record's line to `out` in parts. The line names columns and relations as often as the
/// record refers to them, so it may be much longer than the record. No part is longer than a few
/// times its source.
///
/// # Errors
/// An error of `out`.
pub fn render_to(
    record: &Record<'_>,
    schemas: &Schemas,
    detail: Detail,
    out: &mut dyn fmt::Write,
) -> fmt::Result {
    let mut line = Line {
        out,
        written: Ok(()),
        detail,
    };
    match record {
        Record::StreamHeader(header) => line.stream_header(header),
        Record::Schema(schema) => line.schema(schema),
        Record::Begin(begin) => line.begin(begin),
        Record::Commit(commit) => line.commit(commit),
        Record::Change(change) => line.change(change, schemas),
        Record::Truncate(truncate) => line.truncate(truncate, schemas),
        Record::Message(message) => line.message(message),
        Record::SegmentStart(start) => {
            let first = if start.first { " first" } else { "" };
            line.print(format_args!("SEGMENT xid={}{first}", start.xid));
        }
        Record::SegmentStop => line.put("SEGMENT END"),
        Record::Subtransaction(xid) => line.print(format_args!("SUBTRANSACTION xid={xid}")),
        Record::Abort(abort) => {
            line.print(format_args!("ABORT xid={} of={}", abort.subxid, abort.xid));
        }
        Record::StreamedCommit(commit) => {
            line.print(format_args!("STREAMED xid={} ", commit.begin.xid));
            line.begin(&commit.begin);
            line.put(" ");
            line.commit(&commit.commit());
        }
        Record::BeginPrepared(prepared) => line.prepared("BEGIN PREPARED", prepared),
        Record::Prepare(prepare) => line.end("PREPARE", prepare),
        Record::StreamedPrepare(prepared) => line.prepared("STREAMED PREPARE", prepared),
        Record::CommitPrepared(prepared) => line.prepared("COMMIT PREPARED", prepared),
        Record::RollbackPrepared(rollback) => {
            line.prepared("ROLLBACK PREPARED", &rollback.prepared);
            line.detail("prepare_end_lsn", &lsn_text(rollback.prepare_end_lsn));
            let prepared_at = unix_timestamp_text(rollback.prepare_timestamp);
            line.detail("prepared_at", &literal(prepared_at.as_bytes()));
        }
    }
    line.written
}

struct Line<'o> {
    out: &'o mut dyn fmt::Write,
    /// After an error nothing more is written.
    written: fmt::Result,
    detail: Detail,
}

impl Line<'_> {
    fn is_full(&self) -> bool {
        self.detail == Detail::Full
    }

    fn put(&mut self, text: &str) {
        if self.written.is_ok() {
            self.written = self.out.write_str(text);
        }
    }

    fn print(&mut self, text: fmt::Arguments<'_>) {
        if self.written.is_ok() {
            self.written = self.out.write_fmt(text);
        }
    }

    /// Appends ` name=value`, with [`Detail::Full`] only.
    fn detail(&mut self, name: &str, value: &str) {
        if self.is_full() {
            self.print(format_args!(" {name}={value}"));
        }
    }

    fn stream_header(&mut self, header: &StreamHeader<'_>) {
        let node = literal(header.node_name.as_bytes());
        self.print(format_args!(
            "STREAM version={PROTOCOL_VERSION} node={node}"
        ));
        self.detail("database", &literal(header.database.as_bytes()));
        self.detail("charset", &literal(header.charset.as_bytes()));
        self.detail("node_id", &hex(&header.node_id));
        self.detail("system_identifier", &header.system_identifier.to_string());
        self.detail("server_version", &header.server_version.to_string());
    }

    fn schema(&mut self, schema: &Schema<'_>) {
        let relation = qualified(schema.namespace, schema.name);
        self.print(format_args!("SCHEMA {} {relation}", schema.number.0));
        self.detail("oid", &schema.relation_oid.to_string());
        let identity = char::from(schema.replica_identity.as_byte());
        self.print(format_args!(" identity={identity} ("));
        for (index, column) in schema.columns().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            let name = identifier(column.name);
            let type_name = qualified(column.type_namespace, column.type_name);
            self.print(format_args!("{separator}{name} {type_name}"));
            self.detail("oid", &column.type_oid.to_string());
            if column.type_modifier != -1 {
                self.print(format_args!(" typmod={}", column.type_modifier));
            }
            let flags = column.flags;
            for (set, word) in [
                (flags.is_identity(), " key"),
                (flags.is_primary_key(), " primary"),
                (flags.is_not_null(), " not null"),
                (flags.is_generated(), " generated"),
            ] {
                self.put(if set { word } else { "" });
            }
            if column.mark != 0 {
                self.detail("mark", &column.mark.to_string());
            }
        }
        self.put(")");
        if self.is_full() {
            self.keys(schema);
        }
    }

    fn keys(&mut self, schema: &Schema<'_>) {
        for key in schema.keys() {
            self.put(" hashed=(");
            for (index, column) in key.columns().enumerate() {
                self.put(if index == 0 { "" } else { ", " });
                let name = schema.columns().nth(usize::from(column.column));
                self.put(&name.map_or_else(String::new, |column| identifier(column.name)));
                if !column.comparison.is_empty() {
                    self.print(format_args!(" by {}", identifier(column.comparison)));
                }
            }
            self.put(if key.nulls_equal {
                ") nulls equal"
            } else {
                ")"
            });
        }
    }

    fn prepared(&mut self, step: &str, prepared: &Prepared<'_>) {
        let gid = literal(prepared.gid.as_bytes());
        self.print(format_args!("{step} {gid}"));
        self.about(&prepared.begin);
        self.detail("end_lsn", &lsn_text(prepared.end_lsn));
    }

    fn begin(&mut self, begin: &Begin<'_>) {
        self.put("BEGIN");
        self.about(begin);
    }

    fn about(&mut self, begin: &Begin<'_>) {
        self.detail("xid", &begin.xid.to_string());
        self.detail("commit_lsn", &lsn_text(begin.commit_lsn));
        self.detail(
            "at",
            &literal(unix_timestamp_text(begin.commit_timestamp).as_bytes()),
        );
        if !begin.origin.is_empty() {
            self.print(format_args!(" origin={}", literal(begin.origin.as_bytes())));
        }
        self.detail("origin_lsn", &lsn_text(begin.origin_lsn));
    }

    fn commit(&mut self, commit: &Commit) {
        self.end("COMMIT", commit);
    }

    fn end(&mut self, step: &str, commit: &Commit) {
        self.put(step);
        self.detail("commit_lsn", &lsn_text(commit.commit_lsn));
        self.detail("end_lsn", &lsn_text(commit.end_lsn));
        self.detail(
            "at",
            &literal(unix_timestamp_text(commit.commit_timestamp).as_bytes()),
        );
    }

    fn change(&mut self, change: &Change<'_>, schemas: &Schemas) {
        let header = &change.header;
        self.put(match change.operation {
            Operation::Insert => "INSERT ",
            Operation::Update => "UPDATE ",
            Operation::Delete => "DELETE ",
        });
        let relation = schemas.relation(header.schema).unwrap_or("?");
        self.print(format_args!("{} {relation}", header.schema.0));
        if self.is_full() {
            self.put(" keys=[");
            for (index, hash) in header.writeset.hashes().enumerate() {
                let separator = if index == 0 { "" } else { " " };
                self.print(format_args!("{separator}{hash:016x}"));
            }
            self.put("]");
        } else {
            self.print(format_args!(" keys={}", header.writeset.len()));
        }
        if header.barrier {
            self.put(" barrier");
        }
        let columns = schemas.columns(header.schema);
        if let Some(before) = &change.before {
            let key_only = header.before == BeforeKind::Key;
            self.put(if key_only {
                " before key"
            } else {
                " before row"
            });
            self.image(before, columns, key_only);
        }
        if let Some(after) = &change.after {
            self.put(" after");
            self.image(after, columns, false);
        }
    }

    /// Appends an image. `key_only` leaves out the columns that are None because they are not in
    /// the key.
    fn image(&mut self, image: &Image<'_>, columns: &[ShapeColumn], key_only: bool) {
        self.put("(");
        let mut separator = "";
        for (index, value) in image.values().enumerate() {
            // A record's values were checked when it was read.
            let Ok(value) = value else { continue };
            let column = columns.get(index);
            let in_key = column.is_some_and(|column| column.identity);
            if key_only && !in_key && value == Value::None {
                continue;
            }
            self.put(separator);
            separator = ", ";
            match column {
                Some(column) => self.put(&column.name),
                None => self.print(format_args!("${}", index + 1)),
            }
            self.put("=");
            self.value(&value);
        }
        self.put(")");
    }

    fn value(&mut self, value: &Value<'_>) {
        match value {
            Value::Null => self.put("null"),
            Value::None => self.put("<none>"),
            Value::Binary(bytes) => self.print(format_args!("x'{}'", hex(bytes))),
            Value::String(bytes) => self.put(&literal(bytes)),
            Value::BinaryText(bytes) => self.print(format_args!("text{}", literal(bytes))),
            Value::BigInteger(bytes) => match value.to_text() {
                Some(text) => self.put(&String::from_utf8_lossy(&text)),
                None => self.print(format_args!("<integer of {} bytes>", bytes.len())),
            },
            Value::Decimal(decimal) if !decimal.has_short_text() => {
                self.put(&decimal.to_scientific_text());
            }
            _ => self.put(&String::from_utf8_lossy(
                &value.to_text().unwrap_or_default(),
            )),
        }
    }

    fn truncate(&mut self, truncate: &Truncate<'_>, schemas: &Schemas) {
        self.put("TRUNCATE");
        for (index, number) in truncate.schemas().enumerate() {
            self.put(if index == 0 { " " } else { ", " });
            match schemas.relation(number) {
                Some(relation) => self.put(relation),
                None => self.print(format_args!("{} ?", number.0)),
            }
        }
        self.put(if truncate.cascade { " cascade" } else { "" });
        self.put(if truncate.restart_identity {
            " restart_identity"
        } else {
            ""
        });
    }

    fn message(&mut self, message: &Message<'_>) {
        self.put(if message.transactional {
            "MESSAGE transactional"
        } else {
            "MESSAGE"
        });
        self.detail("lsn", &lsn_text(message.lsn));
        self.print(format_args!(
            " prefix={}",
            literal(message.prefix.as_bytes())
        ));
        self.print(format_args!(" content={}", literal(message.content)));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

fn qualified(namespace: &str, name: &str) -> String {
    format!("{}.{}", identifier(namespace), identifier(name))
}

/// Returns a name, quoted unless it is plain lower case.
fn identifier(name: &str) -> String {
    let plain = name.starts_with(|first: char| first.is_ascii_lowercase() || first == '_')
        && name
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'$'));
    if plain {
        name.to_owned()
    } else {
        quoted(name.as_bytes(), '"')
    }
}

fn literal(bytes: &[u8]) -> String {
    quoted(bytes, '\'')
}

/// Returns quoted text: the quote and backslashes are doubled; control characters and invalid UTF-8
/// become `\xNN` for each byte.
fn quoted(bytes: &[u8], quote: char) -> String {
    let mut text = String::with_capacity(bytes.len() + 2);
    text.push(quote);
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character.is_control() {
                let mut buffer = [0; 4];
                push_escaped(&mut text, character.encode_utf8(&mut buffer).as_bytes());
                continue;
            }
            if character == quote || character == '\\' {
                text.push(character);
            }
            text.push(character);
        }
        push_escaped(&mut text, chunk.invalid());
    }
    text.push(quote);
    text
}

fn push_escaped(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        let _ = write!(text, "\\x{byte:02x}");
    }
}
