//! The constant text of a relation's changes, prepared once: everything except values is only
//! copied.

use super::escape::{push_integer, push_string, push_type_name, push_unsigned};
use super::options::{Version, Wal2JsonOptions};

/// A column, in the server's encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnText {
    /// Name of the column.
    pub name: Vec<u8>,
    /// Type of the column as shown: the result of `format_type`, or the bare name
    /// ([`Wal2JsonOptions::formats_types`]).
    pub type_name: Vec<u8>,
    /// OID of the type.
    pub type_oid: u32,
    /// Attribute number in the table, which counts dropped columns.
    pub position: i16,
    /// The column has no NOT NULL constraint.
    pub optional: bool,
    /// Default expression of the column, if it has one.
    pub default: Option<Vec<u8>>,
    /// The column is part of the index that identifies rows.
    pub in_identity: bool,
    /// The column is part of the primary key.
    pub in_primary_key: bool,
}

/// A relation, in the server's encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelationText {
    /// Schema of the relation.
    pub schema: Vec<u8>,
    /// Name of the relation.
    pub table: Vec<u8>,
    /// Columns of the relation, without dropped ones.
    pub columns: Vec<ColumnText>,
    /// REPLICA IDENTITY FULL: rows before a change are whole.
    pub full_identity: bool,
    /// REPLICA IDENTITY DEFAULT.
    pub default_identity: bool,
}

/// State of a column's value in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Null.
    Null,
    /// A TOAST value that has not changed and is not in WAL.
    Unavailable,
    /// A value.
    Present,
}

/// Port: a row's columns, by their index in [`RelationText::columns`].
pub trait Image {
    /// Returns the state of a column.
    fn state(&self, column: usize) -> State;

    /// Appends the JSON value of a column that is [`State::Present`].
    fn put(&self, column: usize, out: &mut Vec<u8>);
}

/// Names and white space of one style.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    pretty: bool,
}

impl Style {
    pub(super) const fn new(options: &Wal2JsonOptions) -> Self {
        Self {
            pretty: options.pretty && matches!(options.version, Version::One),
        }
    }

    pub(super) const fn is_pretty(self) -> bool {
        self.pretty
    }

    /// Appends a new line with this indentation.
    pub(super) fn line(self, out: &mut Vec<u8>, depth: usize) {
        if self.pretty {
            out.push(b'\n');
            self.indent(out, depth);
        }
    }

    pub(super) fn indent(self, out: &mut Vec<u8>, depth: usize) {
        if self.pretty {
            out.extend(std::iter::repeat_n(b'\t', depth));
        }
    }

    /// Appends `"key":`, for a key that needs no escape.
    pub(super) fn key(self, out: &mut Vec<u8>, key: &str) {
        out.push(b'"');
        out.extend_from_slice(key.as_bytes());
        out.extend_from_slice(if self.pretty { b"\": " } else { b"\":" });
    }

    #[inline]
    pub(super) fn comma(self, out: &mut Vec<u8>) {
        out.extend_from_slice(if self.pretty { b", " } else { b"," });
    }

    /// Appends `"key":[item,item]`.
    fn array<T>(
        self,
        out: &mut Vec<u8>,
        key: &str,
        items: impl IntoIterator<Item = T>,
        mut put: impl FnMut(&mut Vec<u8>, T),
    ) {
        self.key(out, key);
        out.push(b'[');
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.comma(out);
            }
            put(out, item);
        }
        out.push(b']');
    }
}

/// A relation's prepared text, by the options.
#[derive(Debug)]
pub struct Layout {
    version: Version,
    style: Style,
    relation: RelationText,
    /// Indexes of the columns in old rows that consist of a key only.
    identity: Vec<usize>,
    all: Vec<usize>,
    lists: Lists,
    /// `"schema":..,"table":..`, with the text before and after it in either version.
    names: Vec<u8>,
    /// Version 1: names and types of all columns up to their values.
    all_columns: Vec<u8>,
    /// Version 1: names and types of the key columns of old rows, up to their values.
    identity_keys: Vec<u8>,
    /// The primary key, with the comma that either version needs.
    primary_key: Vec<u8>,
    /// Version 2: the text around each column's value.
    columns: Vec<Around>,
    /// Version 2: the text around each value in "identity".
    identities: Vec<Around>,
}

/// The lists to write.
#[derive(Debug, Clone, Copy)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the options are what they are"
)]
struct Lists {
    types: bool,
    /// Types are shown as by `format_type`, otherwise by their bare names.
    formatted_types: bool,
    type_oids: bool,
    positions: bool,
    not_null: bool,
    defaults: bool,
    unchanged: bool,
}

/// Version 2: the text around a value.
#[derive(Debug, Default)]
struct Around {
    before: Vec<u8>,
    after: Vec<u8>,
}

/// Version 2: the end of [`Around::before`].
const VALUE_KEY: &[u8] = b",\"value\":";

impl Layout {
    /// Prepares the text of a relation.
    #[must_use]
    pub fn new(relation: RelationText, options: &Wal2JsonOptions) -> Self {
        let identity = indexes(&relation, |column| column.in_identity);
        let all = indexes(&relation, |_| true);
        let mut layout = Self {
            version: options.version,
            style: Style::new(options),
            identity,
            all,
            lists: Lists {
                types: options.types,
                formatted_types: options.formats_types(),
                type_oids: options.type_oids,
                positions: options.column_positions,
                not_null: options.not_null,
                defaults: options.defaults,
                unchanged: options.unchanged_marker,
            },
            names: Vec::new(),
            all_columns: Vec::new(),
            identity_keys: Vec::new(),
            primary_key: Vec::new(),
            columns: Vec::new(),
            identities: Vec::new(),
            relation,
        };
        match options.version {
            Version::One => layout.prepare_one(options),
            Version::Two => layout.prepare_two(options),
        }
        layout
    }

    /// Returns whether old rows can be identified. Otherwise updates and deletes are not written.
    #[must_use]
    pub fn has_identity(&self) -> bool {
        self.relation.full_identity || !self.identity.is_empty()
    }

    /// Returns the relation's schema, in the server's encoding.
    #[must_use]
    pub fn schema(&self) -> &[u8] {
        &self.relation.schema
    }

    /// Returns the relation's name, in the server's encoding.
    #[must_use]
    pub fn table(&self) -> &[u8] {
        &self.relation.table
    }

    fn column(&self, index: usize) -> Option<&ColumnText> {
        self.relation.columns.get(index)
    }

    fn prepare_one(&mut self, options: &Wal2JsonOptions) {
        let style = self.style;
        let mut names = Vec::new();
        if options.schemas {
            style.line(&mut names, 3);
            style.key(&mut names, "schema");
            push_string(&mut names, &self.relation.schema);
            names.push(b',');
        }
        style.line(&mut names, 3);
        style.key(&mut names, "table");
        push_string(&mut names, &self.relation.table);
        self.names = names;

        let mut bytes = Vec::new();
        self.put_column_lists(&mut bytes, &self.all);
        self.all_columns = bytes;
        let mut bytes = Vec::new();
        self.put_key_lists(&mut bytes, self.old_columns());
        self.identity_keys = bytes;

        // The identity's index, if it is the primary key by default. Nothing for a relation without
        // one.
        let primary = indexes(&self.relation, |column| column.in_primary_key);
        if options.primary_key && self.relation.default_identity && !primary.is_empty() {
            let mut bytes = vec![b','];
            style.line(&mut bytes, 3);
            style.key(&mut bytes, "pk");
            bytes.push(b'{');
            style.line(&mut bytes, 4);
            self.put_names(&mut bytes, "pknames", &primary);
            bytes.push(b',');
            style.line(&mut bytes, 4);
            // Without types, wal2json leaves the list empty.
            let typed: &[usize] = if self.lists.types { &primary } else { &[] };
            self.put_types(&mut bytes, "pktypes", typed);
            style.line(&mut bytes, 3);
            bytes.push(b'}');
            self.primary_key = bytes;
        }
    }

    fn prepare_two(&mut self, options: &Wal2JsonOptions) {
        let mut names = Vec::new();
        if options.schemas {
            names.extend_from_slice(b",\"schema\":");
            push_string(&mut names, &self.relation.schema);
        }
        names.extend_from_slice(b",\"table\":");
        push_string(&mut names, &self.relation.table);
        self.names = names;

        let lists = self.lists;
        let describe = |column: &ColumnText| {
            let mut bytes = b"{\"name\":".to_vec();
            push_string(&mut bytes, &column.name);
            if lists.types {
                bytes.extend_from_slice(b",\"type\":");
                push_type_name(&mut bytes, &column.type_name);
            }
            if lists.type_oids {
                bytes.extend_from_slice(b",\"typeoid\":");
                push_unsigned(&mut bytes, u64::from(column.type_oid));
            }
            bytes
        };
        if options.primary_key {
            let mut bytes = b",\"pk\":[".to_vec();
            let key = self
                .relation
                .columns
                .iter()
                .filter(|column| column.in_primary_key);
            for (index, column) in key.enumerate() {
                if index > 0 {
                    bytes.push(b',');
                }
                bytes.extend(describe(column));
                bytes.push(b'}');
            }
            bytes.push(b']');
            self.primary_key = bytes;
        }
        for column in &self.relation.columns {
            let mut before = describe(column);
            before.extend_from_slice(VALUE_KEY);
            let mut after = Vec::new();
            if lists.not_null {
                after.extend_from_slice(b",\"optional\":");
                after.extend_from_slice(boolean(column.optional));
            }
            if lists.positions {
                after.extend_from_slice(b",\"position\":");
                push_integer(&mut after, i64::from(column.position));
            }
            if lists.defaults {
                after.extend_from_slice(b",\"default\":");
                push_default(&mut after, column);
            }
            after.push(b'}');
            self.columns.push(Around {
                before: before.clone(),
                after,
            });
            self.identities.push(Around {
                before,
                after: vec![b'}'],
            });
        }
    }

    fn put_names(&self, out: &mut Vec<u8>, key: &str, columns: &[usize]) {
        let columns = columns.iter().filter_map(|index| self.column(*index));
        self.style.array(out, key, columns, |out, column| {
            push_string(out, &column.name);
        });
    }

    fn put_types(&self, out: &mut Vec<u8>, key: &str, columns: &[usize]) {
        let columns = columns.iter().filter_map(|index| self.column(*index));
        self.style.array(out, key, columns, |out, column| {
            if self.lists.formatted_types {
                push_type_name(out, &column.type_name);
            } else {
                push_string(out, &column.type_name);
            }
        });
    }

    fn put_type_oids(&self, out: &mut Vec<u8>, key: &str, columns: &[usize]) {
        let columns = columns.iter().filter_map(|index| self.column(*index));
        self.style.array(out, key, columns, |out, column| {
            push_unsigned(out, u64::from(column.type_oid));
        });
    }

    /// Version 1: appends the lists that accompany values of rows, up to the values.
    fn put_column_lists(&self, out: &mut Vec<u8>, columns: &[usize]) {
        let (style, lists) = (self.style, self.lists);
        let next = |out: &mut Vec<u8>| {
            out.push(b',');
            style.line(out, 3);
        };
        let found = || columns.iter().filter_map(|index| self.column(*index));
        next(out);
        self.put_names(out, "columnnames", columns);
        if lists.types {
            next(out);
            self.put_types(out, "columntypes", columns);
        }
        if lists.type_oids {
            next(out);
            self.put_type_oids(out, "columntypeoids", columns);
        }
        if lists.positions {
            next(out);
            style.array(out, "columnpositions", found(), |out, column| {
                push_integer(out, i64::from(column.position));
            });
        }
        if lists.not_null {
            next(out);
            // Without types, wal2json leaves the list empty.
            let count = if lists.types { columns.len() } else { 0 };
            style.array(
                out,
                "columnoptionals",
                found().take(count),
                |out, column| {
                    out.extend_from_slice(boolean(column.optional));
                },
            );
        }
        if lists.defaults {
            next(out);
            style.array(out, "columndefaults", found(), push_default);
        }
        next(out);
        style.key(out, "columnvalues");
        out.push(b'[');
    }

    /// Version 1: appends the lists that accompany values of keys, up to the values.
    fn put_key_lists(&self, out: &mut Vec<u8>, columns: &[usize]) {
        let style = self.style;
        out.push(b',');
        style.line(out, 3);
        style.key(out, "oldkeys");
        out.push(b'{');
        style.line(out, 4);
        self.put_names(out, "keynames", columns);
        out.push(b',');
        style.line(out, 4);
        if self.lists.types {
            self.put_types(out, "keytypes", columns);
            out.push(b',');
            style.line(out, 4);
        }
        if self.lists.type_oids {
            self.put_type_oids(out, "keytypeoids", columns);
            out.push(b',');
            style.line(out, 4);
        }
        style.key(out, "keyvalues");
        out.push(b'[');
    }

    /// Returns the columns of an old row, unless some are null.
    fn old_columns(&self) -> &[usize] {
        if self.relation.full_identity {
            &self.all
        } else {
            &self.identity
        }
    }

    /// Appends `,"schema":..,"table":..`; the comma is version 2's.
    pub(super) fn put_relation(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.names);
    }

    /// Appends the primary key, if it is requested, with a comma before it.
    pub(super) fn put_primary_key(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.primary_key);
    }

    /// Appends a new row, with a comma before it. Columns that an inserted row lacks are always
    /// named: a reader would take them for null. `scratch` is reused memory.
    #[inline]
    pub(super) fn put_new<I: Image>(
        &self,
        out: &mut Vec<u8>,
        row: &I,
        is_insert: bool,
        scratch: &mut Vec<usize>,
    ) {
        let marks = is_insert || self.lists.unchanged;
        match self.version {
            Version::One => self.put_new_one(out, row, marks, scratch),
            Version::Two => {
                out.extend_from_slice(b",\"columns\":[");
                self.put_objects(out, row, &self.all, &self.columns, marks);
                out.push(b']');
            }
        }
    }

    fn put_new_one<I: Image>(
        &self,
        out: &mut Vec<u8>,
        row: &I,
        marks: bool,
        scratch: &mut Vec<usize>,
    ) {
        let missing = |index: &usize| row.state(*index) == State::Unavailable;
        if !self.all.iter().any(missing) {
            out.extend_from_slice(&self.all_columns);
            self.put_values(out, row, &self.all);
            out.push(b']');
            return;
        }
        scratch.clear();
        scratch.extend(self.all.iter().filter(|index| !missing(index)));
        self.put_column_lists(out, scratch);
        self.put_values(out, row, scratch);
        out.push(b']');
        if marks {
            scratch.clear();
            scratch.extend(self.all.iter().filter(|index| missing(index)));
            out.push(b',');
            self.style.line(out, 3);
            self.put_names(out, "columnsunchanged", scratch);
        }
    }

    /// Appends the identity of the old row, with a comma before it. `row` is the old row; if WAL
    /// does not have it because no column of the identity changed, it is the new one.
    #[inline]
    pub(super) fn put_identity<I: Image>(
        &self,
        out: &mut Vec<u8>,
        row: &I,
        is_old: bool,
        scratch: &mut Vec<usize>,
    ) {
        let columns = if is_old {
            self.old_columns()
        } else {
            &self.identity
        };
        match self.version {
            Version::One => {
                scratch.clear();
                // A key has nulls in all other columns, and nulls of a whole row are left out too.
                let candidates = if is_old { &self.all } else { &self.identity };
                let present = |index: &&usize| row.state(**index) == State::Present;
                scratch.extend(candidates.iter().filter(present));
                if scratch == self.old_columns() {
                    out.extend_from_slice(&self.identity_keys);
                } else {
                    self.put_key_lists(out, scratch);
                }
                self.put_values(out, row, scratch);
                out.push(b']');
                self.style.line(out, 3);
                out.push(b'}');
            }
            Version::Two => {
                out.extend_from_slice(b",\"identity\":[");
                self.put_objects(out, row, columns, &self.identities, false);
                out.push(b']');
            }
        }
    }

    #[inline]
    fn put_values<I: Image>(&self, out: &mut Vec<u8>, row: &I, columns: &[usize]) {
        for (count, index) in columns.iter().enumerate() {
            if count > 0 {
                self.style.comma(out);
            }
            put_value(out, row, *index);
        }
    }

    #[inline]
    fn put_objects<I: Image>(
        &self,
        out: &mut Vec<u8>,
        row: &I,
        columns: &[usize],
        around: &[Around],
        mark_unchanged: bool,
    ) {
        let mut first = true;
        for index in columns {
            let Some(around) = around.get(*index) else {
                continue;
            };
            let state = row.state(*index);
            if state == State::Unavailable && !mark_unchanged {
                continue;
            }
            if !first {
                out.push(b',');
            }
            first = false;
            match state {
                State::Present => {
                    out.extend_from_slice(&around.before);
                    row.put(*index, out);
                }
                State::Null => {
                    out.extend_from_slice(&around.before);
                    out.extend_from_slice(b"null");
                }
                State::Unavailable => {
                    let described = around.before.len() - VALUE_KEY.len();
                    out.extend_from_slice(around.before.get(..described).unwrap_or_default());
                    out.extend_from_slice(b",\"unchanged\":true");
                }
            }
            out.extend_from_slice(&around.after);
        }
    }
}

fn put_value<I: Image>(out: &mut Vec<u8>, row: &I, index: usize) {
    if row.state(index) == State::Present {
        row.put(index, out);
    } else {
        out.extend_from_slice(b"null");
    }
}

fn indexes(relation: &RelationText, wanted: impl Fn(&ColumnText) -> bool) -> Vec<usize> {
    let columns = relation.columns.iter().enumerate();
    columns
        .filter(|(_, column)| wanted(column))
        .map(|(index, _)| index)
        .collect()
}

fn boolean(value: bool) -> &'static [u8] {
    if value { b"true" } else { b"false" }
}

fn push_default(out: &mut Vec<u8>, column: &ColumnText) {
    match &column.default {
        Some(default) => push_string(out, default),
        None => out.extend_from_slice(b"null"),
    }
}
