//! The schema record: the shape of a relation for the changes after it.
//!
//! Sent before the first change of a relation, and again, under a new number, before the first
//! change after the relation was altered. Numbers start at 0 in each stream, increase by one and
//! are never reused. So a reader may keep every schema and needs no invalidation.
//!
//! Layout: u32 schema number, u32 relation OID at the source, u8 replica identity ('d', 'i', 'f',
//! 'n'), namespace, relation name, u16 number of columns, then for each column: u8 flags (1 part of
//! the replica identity, 2 part of the primary key, 4 not null, 8 generated, 16 a mark follows),
//! u32 type OID at the source, i32 type modifier (-1 none), column name, type namespace, type name,
//! with flag 16 the u64 mark; then u8 number of keys whose hashes changes have, and for each: u8
//! flags (1 nulls are equal), u16 number of columns, then for each of these: u16 column's index
//! from 0, name of the collation that compares it (empty: as usual for the type).

use crate::error::{Error, Result};
use crate::wire::{Cursor, put_name};

/// Number of a schema within its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SchemaNumber(pub u32);

/// How rows before a change are identified (pg_class.relreplident).
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
    /// Returns PostgreSQL's letter for the identity.
    #[must_use]
    pub fn as_byte(self) -> u8 {
        match self {
            Self::Default => b'd',
            Self::Index => b'i',
            Self::Full => b'f',
            Self::Nothing => b'n',
        }
    }

    /// Returns the identity for PostgreSQL's letter.
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
    /// The column is part of the replica identity.
    pub const IDENTITY: u8 = 1;
    /// The column is part of the primary key.
    pub const PRIMARY_KEY: u8 = 2;
    /// The column is declared not null.
    pub const NOT_NULL: u8 = 4;
    /// The column is generated at the source.
    pub const GENERATED: u8 = 8;
    /// All flags of this version.
    const ALL: u8 = Self::IDENTITY | Self::PRIMARY_KEY | Self::NOT_NULL | Self::GENERATED;

    /// Returns whether the column is part of the replica identity.
    #[must_use]
    pub fn is_identity(self) -> bool {
        self.0 & Self::IDENTITY != 0
    }

    /// Returns whether the column is part of the primary key.
    #[must_use]
    pub fn is_primary_key(self) -> bool {
        self.0 & Self::PRIMARY_KEY != 0
    }

    /// Returns whether the column is declared not null.
    #[must_use]
    pub fn is_not_null(self) -> bool {
        self.0 & Self::NOT_NULL != 0
    }

    /// Returns whether the column is generated at the source.
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
    /// Flags of the column.
    pub flags: ColumnFlags,
    /// OID of the type at the source. Only built-in types (below 16384) have the same OID on other
    /// servers.
    pub type_oid: u32,
    /// Type modifier, -1 for none.
    pub type_modifier: i32,
    /// Name of the column.
    pub name: &'a str,
    /// Schema of the type.
    pub type_namespace: &'a str,
    /// Name of the type, as in pg_type.
    pub type_name: &'a str,
    /// Mark of the statement that named the column; 0 if unknown. A later column with the same name
    /// has a larger mark.
    pub mark: u64,
}

/// Flag: a column has a mark.
const MARKED: u8 = 16;

impl<'a> Column<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let flags = cursor.u8("column flags")?;
        if flags & !(ColumnFlags::ALL | MARKED) != 0 {
            return Err(Error::UnknownTag {
                what: "column flags",
                tag: flags,
            });
        }
        Ok(Self {
            flags: ColumnFlags(flags & ColumnFlags::ALL),
            type_oid: cursor.u32("type oid")?,
            type_modifier: cursor.i32("type modifier")?,
            name: cursor.name("column name")?,
            type_namespace: cursor.name("type namespace")?,
            type_name: cursor.name("type name")?,
            mark: if flags & MARKED == 0 {
                0
            } else {
                match cursor.u64("column mark")? {
                    0 => {
                        return Err(Error::OutOfRange {
                            what: "column mark",
                            value: 0,
                        });
                    }
                    mark => mark,
                }
            },
        })
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        let marked = if self.mark == 0 { 0 } else { MARKED };
        out.push(self.flags.checked()?.0 | marked);
        out.extend_from_slice(&self.type_oid.to_le_bytes());
        out.extend_from_slice(&self.type_modifier.to_le_bytes());
        put_name(out, self.name, "column name")?;
        put_name(out, self.type_namespace, "type namespace")?;
        put_name(out, self.type_name, "type name")?;
        if self.mark != 0 {
            out.extend_from_slice(&self.mark.to_le_bytes());
        }
        Ok(())
    }
}

/// A column of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchemaKeyColumn<'a> {
    /// Index among the schema's columns, from 0.
    pub column: u16,
    /// The collation that makes values equal whose bytes differ; empty for the type's usual
    /// equality.
    pub comparison: &'a str,
}

impl<'a> SchemaKeyColumn<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        Ok(Self {
            column: cursor.u16("key column")?,
            comparison: cursor.name("comparison")?,
        })
    }
}

/// A unique key of which each change has hashes, before and after the change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchemaKey<'a> {
    /// Two nulls are equal in this key. Otherwise a key with a null equals no other, and has no
    /// hash.
    pub nulls_equal: bool,
    columns: u16,
    column_bytes: &'a [u8],
}

fn out_of_range(column: u16) -> Error {
    Error::OutOfRange {
        what: "key column",
        value: i64::from(column),
    }
}

/// Flag: two nulls are equal.
const NULLS_EQUAL: u8 = 1;

impl<'a> SchemaKey<'a> {
    fn read(cursor: &mut Cursor<'a>, schema_columns: u16) -> Result<Self> {
        let flags = cursor.u8("key flags")?;
        if flags & !NULLS_EQUAL != 0 {
            return Err(Error::UnknownTag {
                what: "key flags",
                tag: flags,
            });
        }
        let columns = cursor.u16("key column count")?;
        let start = cursor.rest();
        for _ in 0..columns {
            let column = SchemaKeyColumn::read(cursor)?.column;
            if column >= schema_columns {
                return Err(out_of_range(column));
            }
        }
        let used = start.len() - cursor.rest().len();
        Ok(Self {
            nulls_equal: flags & NULLS_EQUAL != 0,
            columns,
            column_bytes: start.get(..used).unwrap_or_default(),
        })
    }

    /// Returns the key's columns, in no particular order.
    #[must_use]
    pub fn columns(&self) -> SchemaKeyColumns<'a> {
        SchemaKeyColumns {
            left: self.columns,
            cursor: Cursor::new(self.column_bytes),
        }
    }
}

/// Iterator over a key's columns; they were checked when the record was read.
#[derive(Debug, Clone)]
pub struct SchemaKeyColumns<'a> {
    left: u16,
    cursor: Cursor<'a>,
}

impl<'a> Iterator for SchemaKeyColumns<'a> {
    type Item = SchemaKeyColumn<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        SchemaKeyColumn::read(&mut self.cursor).ok()
    }
}

/// Iterator over a schema's keys; they were checked when the record was read.
#[derive(Debug, Clone)]
pub struct SchemaKeys<'a> {
    left: u8,
    schema_columns: u16,
    cursor: Cursor<'a>,
}

impl<'a> Iterator for SchemaKeys<'a> {
    type Item = SchemaKey<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        SchemaKey::read(&mut self.cursor, self.schema_columns).ok()
    }
}

/// A key to write: whether nulls are equal in it, and its columns.
pub type WrittenKey<'a> = (bool, &'a [SchemaKeyColumn<'a>]);

/// A relation's shape, borrowed from the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schema<'a> {
    /// Number by which changes refer to the schema.
    pub number: SchemaNumber,
    /// OID of the relation at the source.
    pub relation_oid: u32,
    /// How rows before a change are identified.
    pub replica_identity: ReplicaIdentity,
    /// Namespace (schema) of the relation.
    pub namespace: &'a str,
    /// Name of the relation.
    pub name: &'a str,
    columns: u16,
    column_bytes: &'a [u8],
    keys: u8,
    key_bytes: &'a [u8],
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
        let keys = cursor.u8("key count")?;
        let start = cursor.rest();
        for _ in 0..keys {
            SchemaKey::read(cursor, columns)?;
        }
        let used = start.len() - cursor.rest().len();
        let key_bytes = start.get(..used).unwrap_or_default();
        Ok(Self {
            number,
            relation_oid,
            replica_identity,
            namespace,
            name,
            columns,
            column_bytes,
            keys,
            key_bytes,
        })
    }

    /// Returns the unique keys whose hashes changes have.
    #[must_use]
    pub fn keys(&self) -> SchemaKeys<'a> {
        SchemaKeys {
            left: self.keys,
            schema_columns: self.columns,
            cursor: Cursor::new(self.key_bytes),
        }
    }

    /// Returns the number of columns.
    #[must_use]
    pub fn column_count(&self) -> u16 {
        self.columns
    }

    /// Returns the columns in order.
    #[must_use]
    pub fn columns(&self) -> Columns<'a> {
        Columns {
            left: self.columns,
            cursor: Cursor::new(self.column_bytes),
        }
    }

    /// Appends the body of a schema record.
    pub(crate) fn write_parts(
        out: &mut Vec<u8>,
        (number, relation_oid, replica_identity): (SchemaNumber, u32, ReplicaIdentity),
        names: (&str, &str),
        columns: &[Column<'_>],
        keys: &[WrittenKey<'_>],
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
        out.push(u8::try_from(keys.len()).map_err(|_| Error::TooLarge("key count"))?);
        for (nulls_equal, columns) in keys {
            out.push(if *nulls_equal { NULLS_EQUAL } else { 0 });
            let key_columns =
                u16::try_from(columns.len()).map_err(|_| Error::TooLarge("key column count"))?;
            out.extend_from_slice(&key_columns.to_le_bytes());
            for key in *columns {
                if key.column >= count {
                    return Err(out_of_range(key.column));
                }
                out.extend_from_slice(&key.column.to_le_bytes());
                put_name(out, key.comparison, "comparison")?;
            }
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
