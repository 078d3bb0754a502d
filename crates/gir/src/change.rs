//! Insert, update and delete.
//!
//! Layout: u32 schema number, u8 flags (bits 0-1 before image: 0 none, 1 key, 2 whole row; bit 2:
//! barrier, as a key of the change is not known), u8 number of key hashes, the hashes as u64, then
//! the before image if there is one, then the after image for insert and update. An insert has no
//! before image, a delete always has one.
//!
//! The hashes are the writeset: one for each unique key of the before and after images. Equal keys
//! have equal hashes. The leader reads them with [`ChangeHeader`], which does not parse the images.

use crate::error::{Error, Result};
use crate::image::Image;
use crate::schema::SchemaNumber;
use crate::wire::Cursor;

/// The kind of a row's change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A new row.
    Insert,
    /// A changed row.
    Update,
    /// A deleted row.
    Delete,
}

/// Content of a before image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeforeKind {
    /// No before image: an insert, or an update that did not change the key.
    Absent,
    /// Only the replica identity's columns; the others are None.
    Key,
    /// The whole row, as with REPLICA IDENTITY FULL.
    Row,
}

const BARRIER: u8 = 4;

impl BeforeKind {
    fn bits(self) -> u8 {
        match self {
            Self::Absent => 0,
            Self::Key => 1,
            Self::Row => 2,
        }
    }
}

/// Key hashes of one change, borrowed from the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writeset<'a> {
    bytes: &'a [u8],
}

impl<'a> Writeset<'a> {
    /// Returns the hashes in the order in which they were written.
    pub fn hashes(&self) -> impl Iterator<Item = u64> + 'a {
        self.bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|raw| u64::from_le_bytes(*raw))
    }

    /// Returns the number of hashes, at most 255.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / 8
    }

    /// Returns whether there is no hash.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// The part of a change that scheduling needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeHeader<'a> {
    /// Number of the relation's schema.
    pub schema: SchemaNumber,
    /// Content of the before image.
    pub before: BeforeKind,
    /// The change orders with every other change of its table.
    pub barrier: bool,
    /// Key hashes of the change.
    pub writeset: Writeset<'a>,
}

impl<'a> ChangeHeader<'a> {
    #[inline]
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let schema = SchemaNumber(cursor.u32("schema number")?);
        let flags = cursor.u8("change flags")?;
        let before = match flags & 3 {
            0 => BeforeKind::Absent,
            1 => BeforeKind::Key,
            2 => BeforeKind::Row,
            _ => {
                return Err(Error::UnknownTag {
                    what: "change flags",
                    tag: flags,
                });
            }
        };
        if flags & !(3 | BARRIER) != 0 {
            return Err(Error::UnknownTag {
                what: "change flags",
                tag: flags,
            });
        }
        let count = usize::from(cursor.u8("writeset size")?);
        let writeset = Writeset {
            bytes: cursor.take(count * 8, "writeset")?,
        };
        Ok(Self {
            schema,
            before,
            barrier: flags & BARRIER != 0,
            writeset,
        })
    }

    /// Appends a change's header; the images follow it. If there are too many keys, the change
    /// becomes a barrier.
    pub(crate) fn write(
        out: &mut Vec<u8>,
        schema: SchemaNumber,
        before: BeforeKind,
        barrier: bool,
        keys: &[u64],
    ) {
        let listed = u8::try_from(keys.len());
        let barrier = barrier || listed.is_err();
        out.extend_from_slice(&schema.0.to_le_bytes());
        out.push(before.bits() | if barrier { BARRIER } else { 0 });
        match listed {
            Ok(count) => {
                out.push(count);
                for key in keys {
                    out.extend_from_slice(&key.to_le_bytes());
                }
            }
            Err(_) => out.push(0),
        }
    }
}

/// Checks the before image: an insert must not have one, and a delete without one could not be
/// applied.
pub(crate) fn check_before(operation: Operation, before: BeforeKind) -> Result<()> {
    let what = match (operation, before == BeforeKind::Absent) {
        (Operation::Insert, false) => "before image of an insert",
        (Operation::Delete, true) => "before image of a delete",
        _ => return Ok(()),
    };
    Err(Error::OutOfRange {
        what,
        value: i64::from(before.bits()),
    })
}

/// One changed row, borrowed from the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change<'a> {
    /// Insert, update or delete.
    pub operation: Operation,
    /// Relation and keys.
    pub header: ChangeHeader<'a>,
    /// The row, or its key, before the change; `None` for insert, always present for delete.
    pub before: Option<Image<'a>>,
    /// The row after the change; always present for insert and update, `None` for delete.
    pub after: Option<Image<'a>>,
}

impl<'a> Change<'a> {
    pub(crate) fn read(operation: Operation, cursor: &mut Cursor<'a>) -> Result<Self> {
        let header = ChangeHeader::read(cursor)?;
        check_before(operation, header.before)?;
        let before = match header.before {
            BeforeKind::Absent => None,
            BeforeKind::Key | BeforeKind::Row => Some(Image::read(cursor)?),
        };
        let after = match operation {
            Operation::Insert | Operation::Update => Some(Image::read(cursor)?),
            Operation::Delete => None,
        };
        Ok(Self {
            operation,
            header,
            before,
            after,
        })
    }
}
