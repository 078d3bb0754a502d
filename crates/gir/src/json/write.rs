//! Converts records to JSON objects.

mod boundary;

use std::collections::HashMap;
use std::fmt::Write as _;

use super::IDENTITIES;
use super::moment::timestamp_text;
use super::value::{Charset, Decoder, hex_into, put_string, put_value};
use crate::change::{BeforeKind, Change, Operation};
use crate::error::{Error, Result};
use crate::image::Image;
use crate::message::Message;
use crate::record::Record;
use crate::schema::{Schema, SchemaNumber};
use crate::statement::Statement;
use crate::stream::{PROTOCOL_VERSION, StreamHeader};
use crate::truncate::Truncate;
use crate::value::Value;

/// OID of PostgreSQL's type bool, which is fixed.
const BOOL: u32 = 16;

/// How much of a relation's schema a change contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchemaDetail {
    /// The whole schema, so that each object can be understood alone.
    #[default]
    Each,
    /// Names and number; the columns are in the schema object, which is written once.
    Once,
}

/// Options of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JsonOptions {
    /// How much of their relation's schema changes contain.
    pub schema: SchemaDetail,
    /// Write key hashes and barriers of changes, and the hashed keys of schemas. Only needed for
    /// scheduling; a change that is read without them is a barrier.
    pub keys: bool,
    /// Complete an after image from the before image: a column that the after image of an update
    /// lacks was not changed.
    pub complete: bool,
}

/// Writes the records of one stream as JSON objects. Remembers what records refer to: the stream
/// header, schemas, the current transaction.
#[derive(Debug, Clone, Default)]
pub struct JsonWriter {
    options: JsonOptions,
    decoder: Option<Decoder>,
    charset: Charset,
    /// Name of the node and of the database, as JSON strings.
    node: String,
    database: String,
    schemas: HashMap<SchemaNumber, Shape>,
    /// The current transaction's members in each object, as JSON: `transaction`, that and
    /// `prepared`, or `running`; empty outside of transactions.
    within: String,
    /// The transaction of the current segment.
    segment: Option<u32>,
}

/// A relation's schema, as JSON.
#[derive(Debug, Clone)]
struct Shape {
    each: String,
    once: String,
    /// `"name":` of each column, and whether it is of type bool.
    columns: Vec<(String, bool)>,
}

impl JsonWriter {
    /// Returns a writer for a new stream.
    #[must_use]
    pub fn new(options: JsonOptions) -> Self {
        Self {
            options,
            ..Self::default()
        }
    }

    /// Returns a writer with a function that decodes text which is not in UTF-8. Without one,
    /// strings that are not ASCII are written as bytes if the stream's charset is neither UTF8 nor
    /// SQL_ASCII.
    #[must_use]
    pub fn with_decoder(options: JsonOptions, decoder: Decoder) -> Self {
        Self {
            decoder: Some(decoder),
            ..Self::new(options)
        }
    }

    /// Appends a record as one JSON object, without a line break in it or after it. Records must be
    /// passed in the order of the stream, without omissions.
    ///
    /// # Errors
    /// [`Error::UnknownSchema`], [`Error::ColumnCount`] and [`Error::RepeatedColumn`]. Then nothing
    /// is appended.
    pub fn record(&mut self, record: &Record<'_>, out: &mut String) -> Result<()> {
        self.record_with(record, None, out)
    }

    /// Appends a record like [`JsonWriter::record`]. Columns that a change's after image lacks are
    /// taken from `fetched`, marked as fetched.
    ///
    /// # Errors
    /// As [`JsonWriter::record`].
    pub fn record_with(
        &mut self,
        record: &Record<'_>,
        fetched: Option<&Image<'_>>,
        out: &mut String,
    ) -> Result<()> {
        let start = out.len();
        let written = match record {
            Record::Schema(schema) => self.schema(schema, out),
            Record::Change(change) => self.change(change, fetched, out),
            Record::Truncate(truncate) => self.truncate(truncate, out),
            Record::StreamHeader(header) => {
                self.stream_header(header, out);
                Ok(())
            }
            Record::Message(message) => {
                self.message(message, out);
                Ok(())
            }
            _ => {
                self.boundary(record, out);
                Ok(())
            }
        };
        if written.is_err() {
            out.truncate(start);
        }
        written
    }

    /// Forgets the schemas for which `in_use` returns false: no later record may refer to them. A
    /// caller that does not know which are in use keeps them all, which takes memory for each shape
    /// that a table of the stream ever had.
    pub fn keep_schemas(&mut self, mut in_use: impl FnMut(SchemaNumber) -> bool) {
        self.schemas.retain(|number, _| in_use(*number));
    }

    /// Appends a record of a transaction's boundaries.
    fn boundary(&mut self, record: &Record<'_>, out: &mut String) {
        match record {
            Record::Begin(begin) => self.begin(begin, out),
            Record::Commit(commit) => self.commit(commit, out),
            Record::SegmentStart(start) => self.segment_start(*start, out),
            Record::SegmentStop => self.segment_end(out),
            Record::Subtransaction(xid) => self.subtransaction(*xid, out),
            Record::Abort(abort) => Self::abort(*abort, out),
            Record::StreamedCommit(commit) => self.streamed_commit(commit, out),
            Record::BeginPrepared(prepared) => self.begin_prepared(prepared, out),
            Record::Prepare(prepare) => self.prepare(prepare, out),
            Record::StreamedPrepare(prepared) => self.step("streamed_prepare", prepared, out),
            Record::CommitPrepared(prepared) => self.step("commit_prepared", prepared, out),
            Record::RollbackPrepared(rollback) => self.rollback_prepared(rollback, out),
            Record::StreamHeader(_)
            | Record::Schema(_)
            | Record::Change(_)
            | Record::Truncate(_)
            | Record::Message(_) => {}
        }
    }

    fn stream_header(&mut self, header: &StreamHeader<'_>, out: &mut String) {
        // Decoded text is in UTF-8.
        let (charset, name) = match (header.charset, self.decoder) {
            ("UTF8" | "SQL_ASCII", _) => (Charset::Utf8, header.charset),
            (_, Some(decoder)) => (Charset::Other(Some(decoder)), "UTF8"),
            (name, None) => (Charset::Other(None), name),
        };
        *self = Self {
            options: self.options,
            decoder: self.decoder,
            charset,
            node: json_string(header.node_name),
            database: json_string(header.database),
            ..Self::default()
        };
        print(
            out,
            format_args!(r#"{{"operation":"stream","version":{PROTOCOL_VERSION},"node_id":""#),
        );
        for (index, byte) in header.node_id.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                out.push('-');
            }
            hex_into(out, &[*byte]);
        }
        print(
            out,
            format_args!(
                r#"","system_identifier":"{}","server_version":{},"node":{},"database":{},"charset":"#,
                header.system_identifier, header.server_version, self.node, self.database
            ),
        );
        put_string(out, name);
        out.push('}');
    }

    fn schema(&mut self, schema: &Schema<'_>, out: &mut String) -> Result<()> {
        let shape = Shape::new(schema, &self.database, self.options.keys)?;
        out.push_str(r#"{"operation":"schema","schema":"#);
        out.push_str(&shape.each);
        out.push('}');
        self.schemas.insert(schema.number, shape);
        Ok(())
    }

    fn shape(&self, number: SchemaNumber) -> Result<&Shape> {
        self.schemas
            .get(&number)
            .ok_or(Error::UnknownSchema(number.0))
    }

    fn put_shape(&self, shape: &Shape, out: &mut String) {
        out.push_str(match self.options.schema {
            SchemaDetail::Each => &shape.each,
            SchemaDetail::Once => &shape.once,
        });
    }

    fn change(
        &self,
        change: &Change<'_>,
        fetched: Option<&Image<'_>>,
        out: &mut String,
    ) -> Result<()> {
        let header = &change.header;
        let shape = self.shape(header.schema)?;
        out.push_str(match change.operation {
            Operation::Insert => r#"{"operation":"insert""#,
            Operation::Update => r#"{"operation":"update""#,
            Operation::Delete => r#"{"operation":"delete""#,
        });
        self.put_within(out);
        out.push_str(r#","schema":"#);
        self.put_shape(shape, out);
        match header.before {
            BeforeKind::Absent => {}
            BeforeKind::Key => out.push_str(r#","before_kind":"key""#),
            BeforeKind::Row => out.push_str(r#","before_kind":"row""#),
        }
        out.push_str(r#","before":"#);
        self.image(shape, change.before.as_ref(), None, None, out)?;
        out.push_str(r#","after":"#);
        let before = change.before.as_ref().filter(|_| self.options.complete);
        self.image(shape, change.after.as_ref(), before, fetched, out)?;
        if let (Operation::Insert, Some(after)) = (change.operation, &change.after) {
            put_unavailable(shape, after, fetched, out)?;
        }
        if self.options.keys {
            out.push_str(r#","keys":["#);
            for (index, hash) in header.writeset.hashes().enumerate() {
                let comma = if index == 0 { "" } else { "," };
                print(out, format_args!(r#"{comma}"{hash:016x}""#));
            }
            print(out, format_args!(r#"],"barrier":{}"#, header.barrier));
        }
        out.push('}');
        Ok(())
    }

    fn image(
        &self,
        shape: &Shape,
        image: Option<&Image<'_>>,
        before: Option<&Image<'_>>,
        fetched: Option<&Image<'_>>,
        out: &mut String,
    ) -> Result<()> {
        let Some(image) = image else {
            out.push_str("null");
            return Ok(());
        };
        if usize::from(image.columns()) != shape.columns.len() {
            return Err(Error::ColumnCount {
                found: image.columns(),
                expected: shape.columns.len(),
            });
        }
        let mut before = before.map(Image::values);
        let mut fetched = fetched.map(Image::values);
        let mut open = '{';
        for ((column, is_bool), value) in shape.columns.iter().zip(image.values()) {
            let other = before.as_mut().and_then(Iterator::next).transpose()?;
            let current = fetched.as_mut().and_then(Iterator::next).transpose()?;
            let (value, marked) = match (value?, other, current) {
                (Value::None, None | Some(Value::None), Some(current)) => (current, true),
                (Value::None, Some(other), _) => (other, false),
                (value, _, _) => (value, false),
            };
            if value == Value::None {
                continue;
            }
            out.push(open);
            open = ',';
            out.push_str(column);
            if marked {
                out.push_str(r#"{"fetched":"#);
            }
            match value {
                Value::Integer(0) if *is_bool => out.push_str("false"),
                Value::Integer(1) if *is_bool => out.push_str("true"),
                value => put_value(out, &value, self.charset),
            }
            if marked {
                out.push('}');
            }
        }
        if open == '{' {
            out.push('{');
        }
        out.push('}');
        Ok(())
    }

    fn truncate(&self, truncate: &Truncate<'_>, out: &mut String) -> Result<()> {
        out.push_str(r#"{"operation":"truncate""#);
        self.put_within(out);
        out.push_str(r#","schemas":["#);
        for (index, number) in truncate.schemas().enumerate() {
            if index > 0 {
                out.push(',');
            }
            self.put_shape(self.shape(number)?, out);
        }
        print(
            out,
            format_args!(
                r#"],"cascade":{},"restart_identity":{}}}"#,
                truncate.cascade, truncate.restart_identity
            ),
        );
        Ok(())
    }

    fn message(&self, message: &Message<'_>, out: &mut String) {
        out.push_str(r#"{"operation":"message""#);
        if message.transactional {
            self.put_within(out);
        }
        print(
            out,
            format_args!(r#","transactional":{},"lsn":"#, message.transactional),
        );
        put_lsn(out, message.lsn);
        out.push_str(r#","prefix":"#);
        put_string(out, message.prefix);
        out.push_str(r#","content":"#);
        // A message's content is not necessarily text in the database's charset.
        let charset = match self.charset {
            Charset::Utf8 => Charset::Utf8,
            Charset::Other(_) => Charset::Other(None),
        };
        let content = Statement::shown(message.prefix, message.content);
        match charset.decode(&content) {
            Some(text) => put_string(out, &text),
            None => {
                out.push_str(r#"{"binary":""#);
                hex_into(out, &content);
                out.push_str(r#""}"#);
            }
        }
        out.push('}');
    }
}

impl Shape {
    fn new(schema: &Schema<'_>, database: &str, keys: bool) -> Result<Self> {
        let mut once = format!(r#"{{"number":{},"#, schema.number.0);
        if !database.is_empty() {
            print(&mut once, format_args!(r#""database":{database},"#));
        }
        once.push_str(r#""namespace":"#);
        put_string(&mut once, schema.namespace);
        once.push_str(r#","table":"#);
        put_string(&mut once, schema.name);
        let letter = schema.replica_identity.as_byte();
        let identity = IDENTITIES
            .iter()
            .find(|(_, byte)| *byte == letter)
            .map_or("", |(word, _)| word);
        let oid = schema.relation_oid;
        let mut each = format!(r#"{once},"oid":{oid},"identity":"{identity}","columns":["#);
        once.push('}');
        let mut columns = Vec::with_capacity(usize::from(schema.column_count()));
        let mut names = std::collections::HashSet::with_capacity(columns.capacity());
        for column in schema.columns() {
            if !names.insert(column.name) {
                return Err(Error::RepeatedColumn(column.name.to_owned()));
            }
            let name = json_string(column.name);
            each.push_str(if columns.is_empty() { "{" } else { ",{" });
            print(&mut each, format_args!(r#""name":{name},"type":"#));
            put_string(&mut each, column.type_name);
            // Usual values are not mentioned.
            if column.type_namespace != "pg_catalog" {
                each.push_str(r#","type_namespace":"#);
                put_string(&mut each, column.type_namespace);
            }
            print(
                &mut each,
                format_args!(r#","type_oid":{}"#, column.type_oid),
            );
            if column.type_modifier != -1 {
                let modifier = column.type_modifier;
                print(&mut each, format_args!(r#","type_modifier":{modifier}"#));
            }
            let flags = column.flags;
            for (set, word) in [
                (flags.is_identity(), r#","identity":true"#),
                (flags.is_primary_key(), r#","primary_key":true"#),
                (flags.is_not_null(), r#","not_null":true"#),
                (flags.is_generated(), r#","generated":true"#),
            ] {
                each.push_str(if set { word } else { "" });
            }
            if column.mark != 0 {
                print(&mut each, format_args!(r#","mark":{}"#, column.mark));
            }
            each.push('}');
            columns.push((format!("{name}:"), column.type_oid == BOOL));
        }
        each.push(']');
        if keys {
            put_unique_keys(&mut each, schema);
        }
        each.push('}');
        Ok(Self {
            each,
            once,
            columns,
        })
    }
}

/// Names the columns that an inserted row lacks, if there are any: a reader would take them for
/// null or give them defaults.
fn put_unavailable(
    shape: &Shape,
    after: &Image<'_>,
    fetched: Option<&Image<'_>>,
    out: &mut String,
) -> Result<()> {
    let mut fetched = fetched.map(Image::values);
    let mut open = r#","unavailable":["#;
    for ((column, _), value) in shape.columns.iter().zip(after.values()) {
        let current = fetched.as_mut().and_then(Iterator::next).transpose()?;
        let is_known = value? != Value::None || current.is_some_and(|value| value != Value::None);
        if !is_known {
            out.push_str(open);
            out.push_str(column.trim_end_matches(':'));
            open = ",";
        }
    }
    if open == "," {
        out.push(']');
    }
    Ok(())
}

/// Appends the keys whose hashes changes have. A column with the usual comparison is only named.
fn put_unique_keys(out: &mut String, schema: &Schema<'_>) {
    let names: Vec<_> = schema.columns().map(|column| column.name).collect();
    out.push_str(r#","unique_keys":["#);
    for (index, key) in schema.keys().enumerate() {
        out.push_str(if index == 0 { "{" } else { ",{" });
        if key.nulls_equal {
            out.push_str(r#""nulls_equal":true,"#);
        }
        out.push_str(r#""columns":["#);
        for (index, column) in key.columns().enumerate() {
            out.push_str(if index == 0 { "" } else { "," });
            let name = names.get(usize::from(column.column)).copied();
            if column.comparison.is_empty() {
                put_string(out, name.unwrap_or_default());
            } else {
                out.push_str(r#"{"column":"#);
                put_string(out, name.unwrap_or_default());
                out.push_str(r#","comparison":"#);
                put_string(out, column.comparison);
                out.push('}');
            }
        }
        out.push_str("]}");
    }
    out.push(']');
}

fn json_string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    put_string(&mut out, text);
    out
}

/// Appends formatted text. Writing to a String does not fail.
fn print(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
}

/// Appends an LSN like `"X/Y"`.
fn put_lsn(out: &mut String, lsn: u64) {
    print(
        out,
        format_args!(r#""{:X}/{:X}""#, lsn >> 32, lsn & 0xffff_ffff),
    );
}
