//! A statement that changes the schema (DDL), on its way to other nodes: the content of the message
//! that the output plugin sends for it.
//!
//! Layout, version 1: u8 version, 16 bytes id, then names (a length and UTF-8 without a zero byte):
//! node, tag, text, role; settings (a count, then name and value of each); publications (a count,
//! then names); tables (a count, then each in the layout of [`StatementTable`]). Counts are LEB128.
//!
//! Not for: which statements are captured, where they are sent, or whether they are run; see
//! `braid_node::ddl` and `braid_bgworker::ddl`.

use std::borrow::Cow;

use crate::error::{Error, Result};
use crate::wire::{Cursor, put_name, put_varint};

/// Prefix of the messages that carry statements which change the schema.
pub const DDL_PREFIX: &str = "braid.ddl";

/// Setting with the stored form of a password, or an empty text for none. Never shown to users.
pub const PASSWORD_SETTING: &str = "braid.password";

/// The version of the layout that this build writes and reads.
const VERSION: u8 = 1;
/// Flag: the table exists before the statement.
const BEFORE: u8 = 1;
/// Flag: the table exists after the statement.
const AFTER: u8 = 2;

/// A table under a name, with a digest of its shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableState {
    /// Name of the table's schema.
    pub namespace: String,
    /// Name of the table.
    pub name: String,
    /// Digest of the lines of the table's shape.
    pub digest: String,
}

/// A table that a statement touches.
///
/// Layout: u8 flags (1 exists before, 2 exists after); namespace, name and digest of each existing
/// state; lines that the statement removes, lines that it adds, publications that publish the
/// table, each as a count and names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StatementTable {
    /// The table before the statement; `None` if the statement creates it.
    pub before: Option<TableState>,
    /// The table after the statement; `None` if the statement drops it.
    pub after: Option<TableState>,
    /// Lines of the shape that only the state before has.
    pub removed: Vec<String>,
    /// Lines of the shape that only the state after has.
    pub added: Vec<String>,
    /// Publications that have published the table, before or after.
    pub publications: Vec<String>,
}

/// Returns the mark of the columns that a statement with this id names.
#[must_use]
pub fn mark_of(id: [u8; 16]) -> i64 {
    let [a, b, c, d, e, f, g, h, ..] = id;
    i64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// A statement, with everything that its meaning depends on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Statement {
    /// Identity of the statement, the same on all nodes.
    pub id: [u8; 16],
    /// Node on which a user ran the statement.
    pub node: String,
    /// Command tag, such as `CREATE TABLE`.
    pub tag: String,
    /// The statement itself.
    pub text: String,
    /// Role that ran the statement.
    pub role: String,
    /// Settings that the statement depends on, and their values.
    pub settings: Vec<(String, String)>,
    /// Publications whose subscribers get the statement.
    pub publications: Vec<String>,
    /// Tables that the statement touches.
    pub tables: Vec<StatementTable>,
}

fn put_names(out: &mut Vec<u8>, names: &[String], what: &'static str) -> Result<()> {
    put_varint(out, names.len() as u64);
    names.iter().try_for_each(|name| put_name(out, name, what))
}

/// Reads as many items as a count says. Each takes at least a byte, so a count that is too large
/// allocates nothing.
fn list<'a, T>(
    cursor: &mut Cursor<'a>,
    what: &'static str,
    mut item: impl FnMut(&mut Cursor<'a>) -> Result<T>,
) -> Result<Vec<T>> {
    let count = cursor.varint(what)?;
    if usize::try_from(count).map_or(true, |count| count > cursor.rest().len()) {
        return Err(Error::Truncated(what));
    }
    (0..count).map(|_| item(cursor)).collect()
}

fn name(cursor: &mut Cursor<'_>, what: &'static str) -> Result<String> {
    Ok(cursor.name(what)?.to_owned())
}

fn names(cursor: &mut Cursor<'_>, what: &'static str) -> Result<Vec<String>> {
    list(cursor, what, |cursor| name(cursor, what))
}

impl TableState {
    fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        put_name(out, &self.namespace, "table's schema")?;
        put_name(out, &self.name, "table's name")?;
        put_name(out, &self.digest, "table's digest")
    }

    fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        Ok(Self {
            namespace: name(cursor, "table's schema")?,
            name: name(cursor, "table's name")?,
            digest: name(cursor, "table's digest")?,
        })
    }
}

impl StatementTable {
    fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        let flag = |state: &Option<TableState>, flag| if state.is_some() { flag } else { 0 };
        out.push(flag(&self.before, BEFORE) | flag(&self.after, AFTER));
        for state in [&self.before, &self.after].into_iter().flatten() {
            state.write(out)?;
        }
        put_names(out, &self.removed, "removed line")?;
        put_names(out, &self.added, "added line")?;
        put_names(out, &self.publications, "table's publication")
    }

    fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        let flags = cursor.u8("table flags")?;
        if flags & !(BEFORE | AFTER) != 0 {
            return Err(Error::UnknownTag {
                what: "table flags",
                tag: flags,
            });
        }
        let mut state = |flag| {
            (flags & flag != 0)
                .then(|| TableState::read(cursor))
                .transpose()
        };
        Ok(Self {
            before: state(BEFORE)?,
            after: state(AFTER)?,
            removed: names(cursor, "removed line")?,
            added: names(cursor, "added line")?,
            publications: names(cursor, "table's publication")?,
        })
    }
}

impl Statement {
    /// Returns the mark of the columns that the statement names: the first 8 bytes of its id, which
    /// begins with the time.
    #[must_use]
    pub fn mark(&self) -> i64 {
        mark_of(self.id)
    }

    /// Appends the statement to `out`.
    ///
    /// # Errors
    /// [`Error::NulInName`] for a text with a zero byte.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        out.push(VERSION);
        out.extend_from_slice(&self.id);
        put_name(out, &self.node, "statement's node")?;
        put_name(out, &self.tag, "statement's tag")?;
        put_name(out, &self.text, "statement's text")?;
        put_name(out, &self.role, "statement's role")?;
        put_varint(out, self.settings.len() as u64);
        for (name, value) in &self.settings {
            put_name(out, name, "setting")?;
            put_name(out, value, "setting's value")?;
        }
        put_names(out, &self.publications, "statement's publication")?;
        put_varint(out, self.tables.len() as u64);
        self.tables.iter().try_for_each(|table| table.write(out))
    }

    /// Reads a statement from all of `bytes`.
    ///
    /// # Errors
    /// Any [`Error`] in the bytes.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let cursor = &mut Cursor::new(bytes);
        let version = cursor.u8("statement's version")?;
        if version != VERSION {
            return Err(Error::UnsupportedVersion {
                found: version.into(),
                supported: VERSION.into(),
            });
        }
        let statement = Self {
            id: cursor.bytes16("statement's id")?,
            node: name(cursor, "statement's node")?,
            tag: name(cursor, "statement's tag")?,
            text: name(cursor, "statement's text")?,
            role: name(cursor, "statement's role")?,
            settings: list(cursor, "setting", |cursor| {
                Ok((name(cursor, "setting")?, name(cursor, "setting's value")?))
            })?,
            publications: names(cursor, "statement's publication")?,
            tables: list(cursor, "table", StatementTable::read)?,
        };
        cursor.finish("statement")?;
        Ok(statement)
    }

    /// Returns the content of a message as users may see it: without the password of a statement.
    #[must_use]
    pub fn shown<'a>(prefix: &str, content: &'a [u8]) -> Cow<'a, [u8]> {
        if prefix != DDL_PREFIX {
            return Cow::Borrowed(content);
        }
        let Ok(mut statement) = Self::read(content) else {
            return Cow::Borrowed(content);
        };
        let count = statement.settings.len();
        statement
            .settings
            .retain(|(name, _)| name != PASSWORD_SETTING);
        let mut out = Vec::new();
        if statement.settings.len() == count {
            return Cow::Borrowed(content);
        }
        match statement.write(&mut out) {
            Ok(()) => Cow::Owned(out),
            Err(_) => Cow::Borrowed(&[]),
        }
    }

    /// Returns whether a stream of these publications contains the statement.
    #[must_use]
    pub fn concerns(&self, publications: &[String]) -> bool {
        are_shared(&self.publications, publications)
    }

    /// Returns the id in PostgreSQL's uuid format.
    #[must_use]
    pub fn uuid(&self) -> String {
        let mut text = String::with_capacity(36);
        for (place, byte) in self.id.iter().enumerate() {
            if matches!(place, 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }
}

impl StatementTable {
    /// Returns whether a stream of these publications contains the table's rows.
    #[must_use]
    pub fn is_published(&self, publications: &[String]) -> bool {
        are_shared(&self.publications, publications)
    }
}

fn are_shared(some: &[String], others: &[String]) -> bool {
    some.iter().any(|name| others.contains(name))
}
