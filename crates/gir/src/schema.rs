//! The schema record: what a relation looks like from here on.
//!
//! Sent before the first change of a relation, and again, under a new number, before the first change after the relation was
//! altered. Numbers start at 0 in each stream, grow by one and are never reused, so a reader may keep every schema it has
//! seen and needs no invalidation.
//!
//! Layout: u32 schema number, u32 relation OID at the source, u8 replica identity ('d', 'i', 'f', 'n'), namespace, relation name,
//! u16 number of columns, then for each column: u8 flags (1 part of the replica identity, 2 part of the primary key, 4 not null, 8 generated),
//! u32 type OID at the source, i32 type modifier (-1 none), column name, type namespace, type name.

use crate::error::{Error, Result};
use crate::wire::{Cursor, put_name};

/// Number of a schema within its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SchemaNumber(pub u32);

/// How old rows are identified (pg_class.relreplident).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaIdentity {
    /// The primary key, if there is one.
    Default,
    /// A chosen unique index.
    Index,
    /// The whole row.
    Full,
    /// Nothing: updates and deletes can't be replicated.
    Nothing,
}

impl ReplicaIdentity {
    /// PostgreSQL's letter for it.
    #[must_use]
    pub fn as_byte(self) -> u8 {
        match self {
            Self::Default => b'd',
            Self::Index => b'i',
            Self::Full => b'f',
            Self::Nothing => b'n',
        }
    }

    /// From PostgreSQL's letter.
    ///
    /// # Errors
    /// [`Error::UnknownTag`] for any other byte.
    pub fn from_byte(tag: u8) -> Result<Self> {
        match tag {
            b'd' => Ok(Self::Default),
            b'i' => Ok(Self::Index),
            b'f' => Ok(Self::Full),
            b'n' => Ok(Self::Nothing),
            _ => Err(Error::UnknownTag {
                what: "replica identity",
                tag,
            }),
        }
    }
}

/// A column's flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ColumnFlags(pub u8);

impl ColumnFlags {
    /// Part of the replica identity.
    pub const IDENTITY: u8 = 1;
    /// Part of the primary key.
    pub const PRIMARY_KEY: u8 = 2;
    /// Declared not null.
    pub const NOT_NULL: u8 = 4;
    /// Generated at the source.
    pub const GENERATED: u8 = 8;
    /// Every flag that this version knows.
    const ALL: u8 = Self::IDENTITY | Self::PRIMARY_KEY | Self::NOT_NULL | Self::GENERATED;

    /// Part of the replica identity.
    #[must_use]
    pub fn is_identity(self) -> bool {
        self.0 & Self::IDENTITY != 0
    }

    /// Part of the primary key.
    #[must_use]
    pub fn is_primary_key(self) -> bool {
        self.0 & Self::PRIMARY_KEY != 0
    }

    /// Declared not null.
    #[must_use]
    pub fn is_not_null(self) -> bool {
        self.0 & Self::NOT_NULL != 0
    }

    /// Generated at the source.
    #[must_use]
    pub fn is_generated(self) -> bool {
        self.0 & Self::GENERATED != 0
    }

    fn checked(self) -> Result<Self> {
        if self.0 & !Self::ALL == 0 {
            Ok(self)
        } else {
            Err(Error::UnknownTag {
                what: "column flags",
                tag: self.0,
            })
        }
    }
}

/// One column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column<'a> {
    /// See [`ColumnFlags`].
    pub flags: ColumnFlags,
    /// OID of the type at the source. Only built-in types (below 16384) have the same elsewhere.
    pub type_oid: u32,
    /// Type modifier, -1 for none.
    pub type_modifier: i32,
    /// Name of the column.
    pub name: &'a str,
    /// Schema of the type.
    pub type_namespace: &'a str,
    /// Name of the type, as in pg_type.
    pub type_name: &'a str,
}

impl<'a> Column<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        Ok(Self {
            flags: ColumnFlags(cursor.u8("column flags")?).checked()?,
            type_oid: cursor.u32("type oid")?,
            type_modifier: cursor.i32("type modifier")?,
            name: cursor.name("column name")?,
            type_namespace: cursor.name("type namespace")?,
            type_name: cursor.name("type name")?,
        })
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        out.push(self.flags.checked()?.0);
        out.extend_from_slice(&self.type_oid.to_le_bytes());
        out.extend_from_slice(&self.type_modifier.to_le_bytes());
        put_name(out, self.name, "column name")?;
        put_name(out, self.type_namespace, "type namespace")?;
        put_name(out, self.type_name, "type name")
    }
}

/// A relation's shape, borrowed from the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schema<'a> {
    /// By which changes refer to it.
    pub number: SchemaNumber,
    /// OID of the relation at the source.
    pub relation_oid: u32,
    /// How its old rows are identified.
    pub replica_identity: ReplicaIdentity,
    /// Namespace (schema) of the relation.
    pub namespace: &'a str,
    /// Name of the relation.
    pub name: &'a str,
    columns: u16,
    column_bytes: &'a [u8],
}

impl<'a> Schema<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let number = SchemaNumber(cursor.u32("schema number")?);
        let relation_oid = cursor.u32("relation oid")?;
        let replica_identity = ReplicaIdentity::from_byte(cursor.u8("replica identity")?)?;
        let namespace = cursor.name("namespace")?;
        let name = cursor.name("relation name")?;
        let columns = cursor.u16("column count")?;
        let start = cursor.rest();
        for _ in 0..columns {
            Column::read(cursor)?;
        }
        let used = start.len() - cursor.rest().len();
        let column_bytes = start.get(..used).unwrap_or_default();
        Ok(Self {
            number,
            relation_oid,
            replica_identity,
            namespace,
            name,
            columns,
            column_bytes,
        })
    }

    /// Number of columns.
    #[must_use]
    pub fn column_count(&self) -> u16 {
        self.columns
    }

    /// The columns in order.
    #[must_use]
    pub fn columns(&self) -> Columns<'a> {
        Columns {
            left: self.columns,
            cursor: Cursor::new(self.column_bytes),
        }
    }

    /// Append the body of a schema record.
    pub(crate) fn write_parts(
        out: &mut Vec<u8>,
        number: SchemaNumber,
        relation_oid: u32,
        replica_identity: ReplicaIdentity,
        names: (&str, &str),
        columns: &[Column<'_>],
    ) -> Result<()> {
        let count = u16::try_from(columns.len()).map_err(|_| Error::TooLarge("column count"))?;
        out.extend_from_slice(&number.0.to_le_bytes());
        out.extend_from_slice(&relation_oid.to_le_bytes());
        out.push(replica_identity.as_byte());
        put_name(out, names.0, "namespace")?;
        put_name(out, names.1, "relation name")?;
        out.extend_from_slice(&count.to_le_bytes());
        for column in columns {
            column.write(out)?;
        }
        Ok(())
    }
}

/// Iterator over a schema's columns; they were checked when the record was read.
#[derive(Debug, Clone)]
pub struct Columns<'a> {
    left: u16,
    cursor: Cursor<'a>,
}

impl<'a> Iterator for Columns<'a> {
    type Item = Column<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        Column::read(&mut self.cursor).ok()
    }
}
