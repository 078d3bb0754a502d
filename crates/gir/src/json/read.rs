//! Converts JSON objects to records.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::IDENTITIES;
use super::error::{Inside, JsonError, JsonErrorKind, Result};
use super::scan::Node;
use super::value::{Read, fetched_value, hex_bytes, read_value};
use crate::builtin;
use crate::change::BeforeKind;
use crate::image::ImageWriter;
use crate::message::Message;
use crate::record::Writer;
use crate::schema::{Column, ColumnFlags, ReplicaIdentity, SchemaKeyColumn, SchemaNumber};
use crate::stream::{PROTOCOL_VERSION, StreamHeader};
use crate::value::Value;

/// Most columns of a relation that are accepted, as PostgreSQL's tuples have no more. An image
/// names only the columns that it has, so a larger limit would let a short text allocate much
/// memory.
const MAX_COLUMNS: usize = 1_664;

/// Reads gir-json and writes the records that it describes.
///
/// One value reads one stream. Objects may arrive in any portions; an array counts as its objects.
/// The output of [`super::JsonWriter`] yields the original records. Objects from other sources may
/// contain less:
///
/// - no stream object, no schema objects: changes carry their schema;
/// - no `number` in a schema: equal schemas get one;
/// - no begin and commit: neighbours with the same `transaction` form one transaction, and
///   [`JsonReader::finish`] ends the last one;
/// - no `keys`: the change is a barrier.
///
/// In-progress and prepared transactions must be complete: segments have a start and an end,
/// prepared transactions a begin and a prepare object. Changes in them may only omit which
/// transaction they belong to.
///
/// Memory is bounded by the length of the input.
#[derive(Debug, Default)]
pub struct JsonReader {
    /// Whether anything was read.
    started: bool,
    schemas: HashMap<u32, Known>,
    /// Schemas without a number, by their encoded form.
    numbers: HashMap<Vec<u8>, u32>,
    next_number: u32,
    open: Open,
    /// Transactions of which segments came, but no end.
    running: HashSet<u32>,
    /// Transactions that have not committed are refused.
    committed_only: bool,
}

/// An announced schema.
#[derive(Debug)]
struct Known {
    /// The last text of the schema, as it mostly is repeated unchanged.
    text: String,
    /// Namespace and table.
    names: [String; 2],
    /// The record's body without the number.
    body: Vec<u8>,
    columns: HashMap<String, usize>,
}

/// A member that may occur once.
struct Member<'a>(Option<Node<'a>>);

impl<'a> Member<'a> {
    const NONE: Self = Self(None);

    fn set(&mut self, name: &str, node: Node<'a>) -> Result<()> {
        if self.0.replace(node).is_some() {
            return Err(node
                .error(JsonErrorKind::Twice(name.to_owned()))
                .inside(name));
        }
        Ok(())
    }

    fn required(&self, within: &Node<'a>, name: &'static str) -> Result<Node<'a>> {
        self.0
            .ok_or_else(|| within.error(JsonErrorKind::Missing(name)))
    }

    /// Returns the value; null counts as missing.
    fn given(&self) -> Option<Node<'a>> {
        self.0.filter(|node| !node.is_null())
    }
}

/// Reads the members of `$node`: each name may occur at most once, and other names are errors.
macro_rules! members {
    ($node:expr, $($name:literal => $place:ident),+ $(,)?) => {
        $(let mut $place = Member::NONE;)+
        for member in $node.members()? {
            let (name, value) = member?;
            match name.as_ref() {
                $($name => $place.set($name, value)?,)+
                _ => return Err(value.error(JsonErrorKind::UnknownMember(name.into_owned()))),
            }
        }
    };
}

// Declared behind the macro, which it uses.
mod boundary;

use boundary::{Open, Within};

impl JsonReader {
    /// Returns a reader for a new stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a reader that accepts only committed transactions: records of others are refused
    /// ([`JsonErrorKind::Uncommitted`]).
    #[must_use]
    pub fn of_committed() -> Self {
        Self {
            committed_only: true,
            ..Self::default()
        }
    }

    /// Reads one JSON text, an object or an array of objects, and appends its records to `out`.
    ///
    /// # Errors
    /// [`JsonError`], with the place in `text`. Then nothing is appended, and reading cannot
    /// continue.
    pub fn read(&mut self, text: &[u8], out: &mut Writer) -> std::result::Result<(), JsonError> {
        let start = out.len();
        let read = self.read_text(text, out);
        if read.is_err() {
            out.truncate_to(start);
        }
        read
    }

    /// Ends the text: writes the Commit of a transaction without a begin object.
    ///
    /// # Errors
    /// [`JsonErrorKind::OutOfOrder`] if a transaction with a begin object has no commit or prepare
    /// object, or a segment no end.
    pub fn finish(&mut self, out: &mut Writer) -> std::result::Result<(), JsonError> {
        self.close(out).map_err(|kind| JsonError::new(0, kind))
    }

    fn read_text(&mut self, text: &[u8], out: &mut Writer) -> Result<()> {
        let node = Node::parse(text)?;
        if !node.is_array() {
            return self.object(&node, out);
        }
        for (index, element) in node.elements()?.enumerate() {
            self.object(&element?, out).inside(&index.to_string())?;
        }
        Ok(())
    }

    fn object(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        let mut operation = Member::NONE;
        for member in node.members()? {
            let (name, value) = member?;
            if name == "operation" {
                operation.set(&name, value)?;
            }
        }
        let operation = operation.required(node, "operation")?;
        let word = operation.string().inside("operation")?;
        self.check_committed(&word)
            .map_err(|kind| operation.error(kind).inside("operation"))?;
        match word.as_ref() {
            "stream" => self.stream(node, out),
            "schema" => self.schema_object(node, out),
            "insert" | "update" | "delete" => self.change(&word, node, out),
            "truncate" => self.truncate(node, out),
            "message" => self.message(node, out),
            word if Self::is_boundary(word) => self.boundary(word, node, out),
            _ => Err(operation
                .error(JsonErrorKind::UnknownWord {
                    what: "operation",
                    found: word.into_owned(),
                })
                .inside("operation")),
        }?;
        self.started = true;
        Ok(())
    }

    fn stream(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "version" => version, "node_id" => node_id,
            "system_identifier" => system, "server_version" => server, "node" => name,
            "database" => database, "charset" => charset);
        if self.started {
            return Err(node.error(JsonErrorKind::OutOfOrder(
                "stream object is not the first one",
            )));
        }
        let number = version.required(node, "version")?;
        let found: u16 = number.integer("version").inside("version")?;
        if found != PROTOCOL_VERSION {
            let error = crate::Error::UnsupportedVersion {
                found,
                supported: PROTOCOL_VERSION,
            };
            return Err(number.error(JsonErrorKind::Record(error)).inside("version"));
        }
        let node_id = node_id.required(node, "node_id")?;
        let system = system.required(node, "system_identifier")?;
        let name = text(&name, node, "node")?;
        let database = text(&database, node, "database")?;
        let charset = text(&charset, node, "charset")?;
        let header = StreamHeader {
            node_id: uuid(&node_id).inside("node_id")?,
            system_identifier: system
                .string()
                .and_then(|text| {
                    let wrong = |_| system.error(JsonErrorKind::Malformed("system identifier"));
                    text.parse().map_err(wrong)
                })
                .inside("system_identifier")?,
            server_version: server
                .required(node, "server_version")?
                .integer("server version")
                .inside("server_version")?,
            node_name: &name,
            database: &database,
            charset: &charset,
        };
        out.stream_header(&header)
            .map_err(|error| node.error(JsonErrorKind::Record(error)))
    }

    fn schema_object(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "schema" => schema);
        let schema = schema.required(node, "schema")?;
        self.schema(&schema, out).inside("schema").map(drop)
    }

    /// Returns the number of a schema, which is announced if it is new.
    fn schema(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<SchemaNumber> {
        members!(node, "number" => number, "database" => database, "namespace" => namespace,
            "table" => table, "oid" => oid, "identity" => identity, "columns" => columns,
            "unique_keys" => keys);
        if let Some(database) = database.given() {
            database.string().inside("database")?;
        }
        let namespace = text(&namespace, node, "namespace")?;
        let table = text(&table, node, "table")?;
        let number: Option<u32> = match number.given() {
            Some(number) => Some(number.integer("schema number").inside("number")?),
            None => None,
        };
        let known = number.and_then(|number| Some((number, self.schemas.get(&number)?)));
        if let Some((number, known)) = known {
            let is_reference = columns.0.is_none();
            let same_names = known.names[0] == namespace && known.names[1] == table;
            if known.text == node.text() || (is_reference && same_names) {
                return Ok(SchemaNumber(number));
            }
            if is_reference {
                return Err(node.error(JsonErrorKind::OtherSchema(number)));
            }
        }
        let Some(columns) = columns.0 else {
            return Err(node.error(match number {
                Some(number) => JsonErrorKind::UnknownSchema(number),
                None => JsonErrorKind::Missing("columns"),
            }));
        };
        let mut owned = Vec::new();
        for (index, column) in columns.elements().inside("columns")?.enumerate() {
            let at = index.to_string();
            let column = column.and_then(|column| {
                if index >= MAX_COLUMNS {
                    return Err(column.error(JsonErrorKind::OutOfRange("number of columns")));
                }
                read_column(&column)
            });
            owned.push(column.inside(&at).inside("columns")?);
        }
        let oid: u32 = match oid.given() {
            Some(oid) => oid.integer("oid").inside("oid")?,
            None => 0,
        };
        let identity = match identity.given() {
            Some(word) => read_identity(&word).inside("identity")?,
            None => ReplicaIdentity::Default,
        };
        let mut by_name = HashMap::with_capacity(owned.len());
        for (index, column) in owned.iter().enumerate() {
            if by_name.insert(column.name.to_string(), index).is_some() {
                let error = crate::Error::RepeatedColumn(column.name.to_string());
                return Err(node.error(JsonErrorKind::Record(error)));
            }
        }
        let keys = match keys.given() {
            Some(keys) => read_unique_keys(&keys, &by_name).inside("unique_keys")?,
            None => Vec::new(),
        };
        let shape = Shape {
            names: [&namespace, &table],
            oid,
            identity,
            columns: owned.iter().map(OwnedColumn::borrow).collect(),
            keys: &keys,
        };
        self.announce(node, number, &shape, by_name, out)
    }

    fn announce(
        &mut self,
        node: &Node<'_>,
        number: Option<u32>,
        shape: &Shape<'_>,
        by_name: HashMap<String, usize>,
        out: &mut Writer,
    ) -> Result<SchemaNumber> {
        let record = |error| node.error(JsonErrorKind::Record(error));
        let mut body = Writer::new();
        shape.write(SchemaNumber(0), &mut body).map_err(record)?;
        let body = body.frame().to_vec();
        if let Some(number) = number {
            if let Some(known) = self.schemas.get_mut(&number) {
                if known.body != body {
                    return Err(node.error(JsonErrorKind::OtherSchema(number)));
                }
                node.text().clone_into(&mut known.text);
                return Ok(SchemaNumber(number));
            }
        } else if let Some(number) = self.numbers.get(&body) {
            return Ok(SchemaNumber(*number));
        }
        let assigned = number.unwrap_or(self.next_number);
        shape.write(SchemaNumber(assigned), out).map_err(record)?;
        self.next_number = self.next_number.max(assigned.saturating_add(1));
        if number.is_none() {
            self.numbers.insert(body.clone(), assigned);
        }
        let known = Known {
            text: node.text().to_owned(),
            names: shape.names.map(str::to_owned),
            body,
            columns: by_name,
        };
        self.schemas.insert(assigned, known);
        Ok(SchemaNumber(assigned))
    }

    fn change(&mut self, operation: &str, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "transaction" => transaction,
            "prepared" => prepared, "running" => running, "schema" => schema,
            "before_kind" => kind, "before" => before, "after" => after, "keys" => keys,
            "barrier" => barrier, "unavailable" => unavailable);
        let schema = schema.required(node, "schema")?;
        let number = self.schema(&schema, out).inside("schema")?;
        let within = Within {
            transaction: &transaction,
            prepared: &prepared,
            running: &running,
        };
        self.enter(node, &within, out)?;
        let kind = match (before.given(), kind.given()) {
            (None, None) => BeforeKind::Absent,
            (None, Some(_)) => return Err(node.error(JsonErrorKind::Missing("before"))),
            (Some(_), None) => BeforeKind::Key,
            (Some(_), Some(word)) => read_before_kind(&word).inside("before_kind")?,
        };
        let hashes = match keys.given() {
            Some(keys) => Some(read_keys(&keys).inside("keys")?),
            None => None,
        };
        let barrier = match barrier.given() {
            Some(barrier) => barrier.boolean().inside("barrier")?,
            None => hashes.is_none(),
        };
        let hashes = hashes.unwrap_or_default();
        let Some(known) = self.schemas.get(&number.0) else {
            return Err(schema.error(JsonErrorKind::UnknownSchema(number.0)));
        };
        let has_before = match operation {
            "insert" => false,
            "delete" => true,
            _ => kind != BeforeKind::Absent,
        };
        let has_after = operation != "delete";
        let before = read_side(node, ("before", &before), has_before, &known.columns)?;
        let mut after = read_side(node, ("after", &after), has_after, &known.columns)?;
        if operation == "insert" {
            take_fetched(node, &known.columns, &mut after)?;
        }
        if let Some(list) = unavailable.given() {
            let lacks = |name: &str| {
                let place = known.columns.get(name).filter(|_| operation == "insert");
                place.is_some_and(|place| matches!(after.get(*place), Some(None)))
            };
            check_unavailable(&list, lacks).inside("unavailable")?;
        }
        let put_before = |image: &mut ImageWriter<'_>| put_image(&before, image);
        let put_after = |image: &mut ImageWriter<'_>| put_image(&after, image);
        match operation {
            "insert" => out.insert(number, barrier, &hashes, put_after),
            "update" => out.update(number, kind, barrier, &hashes, put_before, put_after),
            _ => out.delete(number, kind, barrier, &hashes, put_before),
        }
        .map_err(|error| node.error(JsonErrorKind::Record(error)))
    }

    fn truncate(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "transaction" => transaction,
            "prepared" => prepared, "running" => running, "schemas" => schemas, "cascade" => cascade, "restart_identity" => restart);
        let mut numbers = Vec::new();
        let schemas = schemas.required(node, "schemas")?;
        for (index, schema) in schemas.elements().inside("schemas")?.enumerate() {
            let number = schema.and_then(|schema| self.schema(&schema, out));
            numbers.push(number.inside(&index.to_string()).inside("schemas")?);
        }
        let within = Within {
            transaction: &transaction,
            prepared: &prepared,
            running: &running,
        };
        self.enter(node, &within, out)?;
        let flag = |member: &Member<'_>, name| match member.given() {
            Some(flag) => flag.boolean().inside(name),
            None => Ok(false),
        };
        let (cascade, restart) = (
            flag(&cascade, "cascade")?,
            flag(&restart, "restart_identity")?,
        );
        out.truncate(cascade, restart, &numbers)
            .map_err(|error| node.error(JsonErrorKind::Record(error)))
    }

    fn message(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "transaction" => transaction,
            "prepared" => prepared, "running" => running, "transactional" => transactional, "lsn" => lsn, "prefix" => prefix,
            "content" => content);
        let transactional = transactional
            .required(node, "transactional")?
            .boolean()
            .inside("transactional")?;
        let within = Within {
            transaction: &transaction,
            prepared: &prepared,
            running: &running,
        };
        if transactional {
            self.enter(node, &within, out)?;
        } else {
            within.refuse("message is not transactional")?;
        }
        let prefix = text(&prefix, node, "prefix")?;
        let content = read_content(&content.required(node, "content")?).inside("content")?;
        let message = Message {
            transactional,
            lsn: read_lsn(&lsn.required(node, "lsn")?).inside("lsn")?,
            prefix: &prefix,
            content: &content,
        };
        out.message(&message)
            .map_err(|error| node.error(JsonErrorKind::Record(error)))
    }
}

/// Whether nulls are equal in a key, and the key's columns.
type OwnedKey<'a> = (bool, Vec<(u16, Cow<'a, str>)>);

/// A schema to be written.
struct Shape<'s> {
    /// Namespace and table.
    names: [&'s str; 2],
    oid: u32,
    identity: ReplicaIdentity,
    columns: Vec<Column<'s>>,
    keys: &'s [OwnedKey<'s>],
}

impl Shape<'_> {
    fn write(&self, number: SchemaNumber, out: &mut Writer) -> crate::Result<()> {
        let keys: Vec<(bool, Vec<SchemaKeyColumn<'_>>)> = self
            .keys
            .iter()
            .map(|(nulls_equal, columns)| {
                let columns = columns.iter().map(|(column, comparison)| SchemaKeyColumn {
                    column: *column,
                    comparison,
                });
                (*nulls_equal, columns.collect())
            })
            .collect();
        let keys: Vec<_> = keys
            .iter()
            .map(|(nulls_equal, columns)| (*nulls_equal, columns.as_slice()))
            .collect();
        let [namespace, table] = self.names;
        out.schema(
            number,
            self.oid,
            self.identity,
            (namespace, table),
            (&self.columns, &keys),
        )
    }
}

/// Reads the keys whose hashes changes have.
fn read_unique_keys<'a>(
    node: &Node<'a>,
    columns: &HashMap<String, usize>,
) -> Result<Vec<OwnedKey<'a>>> {
    let mut keys = Vec::new();
    for (index, key) in node.elements()?.enumerate() {
        let key = key.and_then(|key| read_unique_key(&key, columns));
        keys.push(key.inside(&index.to_string())?);
    }
    Ok(keys)
}

fn read_unique_key<'a>(node: &Node<'a>, columns: &HashMap<String, usize>) -> Result<OwnedKey<'a>> {
    members!(node, "nulls_equal" => nulls, "columns" => list);
    let nulls_equal = match nulls.given() {
        Some(nulls) => nulls.boolean().inside("nulls_equal")?,
        None => false,
    };
    let mut found = Vec::new();
    let list = list.required(node, "columns")?;
    for (index, column) in list.elements().inside("columns")?.enumerate() {
        let column = column.and_then(|column| read_key_column(&column, columns));
        found.push(column.inside(&index.to_string()).inside("columns")?);
    }
    Ok((nulls_equal, found))
}

fn read_key_column<'a>(
    node: &Node<'a>,
    columns: &HashMap<String, usize>,
) -> Result<(u16, Cow<'a, str>)> {
    let (name, comparison) = if node.is_object() {
        members!(node, "column" => column, "comparison" => comparison);
        (
            text(&column, node, "column")?,
            text(&comparison, node, "comparison")?,
        )
    } else {
        (node.string()?, Cow::Borrowed(""))
    };
    columns
        .get(name.as_ref())
        .and_then(|index| u16::try_from(*index).ok())
        .map(|index| (index, comparison))
        .ok_or_else(|| node.error(JsonErrorKind::UnknownMember(name.into_owned())))
}

/// A column of a schema, which owns the names that were built.
struct OwnedColumn<'a> {
    flags: ColumnFlags,
    type_oid: u32,
    type_modifier: i32,
    name: Cow<'a, str>,
    type_namespace: Cow<'a, str>,
    type_name: Cow<'a, str>,
    mark: u64,
}

impl OwnedColumn<'_> {
    fn borrow(&self) -> Column<'_> {
        Column {
            flags: self.flags,
            type_oid: self.type_oid,
            type_modifier: self.type_modifier,
            name: &self.name,
            type_namespace: &self.type_namespace,
            type_name: &self.type_name,
            mark: self.mark,
        }
    }
}

fn read_column<'a>(node: &Node<'a>) -> Result<OwnedColumn<'a>> {
    members!(node, "name" => name, "type" => type_name, "type_namespace" => namespace,
        "type_oid" => oid, "type_modifier" => modifier, "identity" => identity,
        "primary_key" => primary, "not_null" => not_null, "generated" => generated, "mark" => mark);
    let mut flags = 0;
    for (member, word, bit) in [
        (&identity, "identity", ColumnFlags::IDENTITY),
        (&primary, "primary_key", ColumnFlags::PRIMARY_KEY),
        (&not_null, "not_null", ColumnFlags::NOT_NULL),
        (&generated, "generated", ColumnFlags::GENERATED),
    ] {
        if let Some(flag) = member.given()
            && flag.boolean().inside(word)?
        {
            flags |= bit;
        }
    }
    let type_namespace = match namespace.given() {
        Some(namespace) => namespace.string().inside("type_namespace")?,
        None => Cow::Borrowed("pg_catalog"),
    };
    let type_name = text(&type_name, node, "type")?;
    Ok(OwnedColumn {
        flags: ColumnFlags(flags),
        type_oid: match oid.given() {
            Some(oid) => oid.integer("type_oid").inside("type_oid")?,
            None if type_namespace == "pg_catalog" => builtin::type_oid(&type_name).unwrap_or(0),
            None => 0,
        },
        type_modifier: match modifier.given() {
            Some(modifier) => modifier.integer("type_modifier").inside("type_modifier")?,
            None => -1,
        },
        name: text(&name, node, "name")?,
        type_namespace,
        type_name,
        mark: match mark.given() {
            Some(mark) => mark.integer("mark").inside("mark")?,
            None => 0,
        },
    })
}

/// Reads an image that is required (`wanted`), or not allowed.
fn read_side<'a>(
    node: &Node<'a>,
    (name, member): (&'static str, &Member<'a>),
    wanted: bool,
    columns: &HashMap<String, usize>,
) -> Result<Vec<Option<Read<'a>>>> {
    match (member.given(), wanted) {
        (Some(image), true) => read_image(&image, columns).inside(name),
        (None, false) => Ok(Vec::new()),
        (None, true) => Err(node.error(JsonErrorKind::Missing(name))),
        (Some(image), false) => {
            let kind = JsonErrorKind::OutOfOrder("this operation has no such image");
            Err(image.error(kind).inside(name))
        }
    }
}

/// Reads the values of an image by column; a missing column is not available.
fn read_image<'a>(
    node: &Node<'a>,
    columns: &HashMap<String, usize>,
) -> Result<Vec<Option<Read<'a>>>> {
    let mut values = Vec::new();
    values.resize_with(columns.len(), || None);
    for member in node.members()? {
        let (name, value) = member?;
        let Some(place) = columns
            .get(name.as_ref())
            .and_then(|index| values.get_mut(*index))
        else {
            let kind = JsonErrorKind::UnknownMember(name.to_string());
            return Err(value.error(kind).inside(&name));
        };
        if place.is_some() {
            let kind = JsonErrorKind::Twice(name.to_string());
            return Err(value.error(kind).inside(&name));
        }
        *place = Some(read_value(&value).inside(&name)?);
    }
    Ok(values)
}

/// Takes the values of an inserted row that its sender has fetched: the record has no others.
fn take_fetched<'a>(
    node: &Node<'a>,
    columns: &HashMap<String, usize>,
    values: &mut [Option<Read<'a>>],
) -> Result<()> {
    for member in node.members()? {
        let (name, image) = member?;
        if name != "after" {
            continue;
        }
        for member in image.members()? {
            let (name, value) = member?;
            let place = columns.get(name.as_ref());
            let place = place.and_then(|index| values.get_mut(*index));
            if let (Some(place), Some(fetched)) = (place, fetched_value(&value)?) {
                *place = Some(fetched);
            }
        }
    }
    Ok(())
}

/// Checks that a list contains names of columns that a row lacks.
fn check_unavailable(list: &Node<'_>, lacks: impl Fn(&str) -> bool) -> Result<()> {
    for (index, name) in list.elements()?.enumerate() {
        let at = index.to_string();
        let node = name?;
        let name = node.string().inside(&at)?;
        if !lacks(&name) {
            let kind = JsonErrorKind::UnknownMember(name.into_owned());
            return Err(node.error(kind).inside(&at));
        }
    }
    Ok(())
}

fn put_image(values: &[Option<Read<'_>>], image: &mut ImageWriter<'_>) -> crate::Result<()> {
    for value in values {
        image.put(&value.as_ref().map_or(Value::None, Read::value));
    }
    Ok(())
}

fn read_keys(node: &Node<'_>) -> Result<Vec<u64>> {
    let mut keys = Vec::new();
    for (index, key) in node.elements()?.enumerate() {
        let at = index.to_string();
        let key = key?;
        let text = key.string().inside(&at)?;
        let plain = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let hash = u64::from_str_radix(&text, 16).ok().filter(|_| plain);
        keys.push(hash.ok_or_else(|| key.error(JsonErrorKind::Malformed("key hash")).inside(&at))?);
    }
    if keys.len() > usize::from(u8::MAX) {
        return Err(node.error(JsonErrorKind::OutOfRange("number of keys")));
    }
    Ok(keys)
}

fn read_identity(node: &Node<'_>) -> Result<ReplicaIdentity> {
    let word = node.string()?;
    IDENTITIES
        .iter()
        .find(|(name, _)| *name == word)
        .and_then(|(_, letter)| ReplicaIdentity::from_byte(*letter).ok())
        .ok_or_else(|| {
            node.error(JsonErrorKind::UnknownWord {
                what: "replica identity",
                found: word.into_owned(),
            })
        })
}

fn read_before_kind(node: &Node<'_>) -> Result<BeforeKind> {
    let word = node.string()?;
    match word.as_ref() {
        "key" => Ok(BeforeKind::Key),
        "row" => Ok(BeforeKind::Row),
        _ => Err(node.error(JsonErrorKind::UnknownWord {
            what: "kind of before image",
            found: word.into_owned(),
        })),
    }
}

fn read_content<'a>(node: &Node<'a>) -> Result<Cow<'a, [u8]>> {
    if !node.is_object() {
        return Ok(match node.string()? {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        });
    }
    members!(node, "binary" => binary);
    let binary = binary.required(node, "binary")?;
    let malformed = || binary.error(JsonErrorKind::Malformed("hexadecimal bytes"));
    hex_bytes(&binary.string().inside("binary")?)
        .ok_or_else(malformed)
        .inside("binary")
        .map(Cow::Owned)
}

/// Parses an LSN, `X/Y`: two hexadecimal numbers of 32 bits.
fn read_lsn(node: &Node<'_>) -> Result<u64> {
    let half = |text: &str| {
        let plain = (1..=8).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_hexdigit());
        u32::from_str_radix(text, 16).ok().filter(|_| plain)
    };
    let text = node.string()?;
    text.split_once('/')
        .and_then(|(high, low)| Some(u64::from(half(high)?) << 32 | u64::from(half(low)?)))
        .ok_or_else(|| node.error(JsonErrorKind::Malformed("LSN")))
}

fn uuid(node: &Node<'_>) -> Result<[u8; 16]> {
    hex_bytes(&node.string()?.replace('-', ""))
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| node.error(JsonErrorKind::Malformed("UUID")))
}

/// Returns the text of a required member.
fn text<'a>(member: &Member<'a>, within: &Node<'a>, name: &'static str) -> Result<Cow<'a, str>> {
    member.required(within, name)?.string().inside(name)
}
