//! TRUNCATE of one or more relations in one command.
//!
//! Layout: u8 flags (1 CASCADE, 2 RESTART IDENTITY), u16 number of relations, their schema numbers
//! as u32.

use crate::error::{Error, Result};
use crate::schema::SchemaNumber;
use crate::wire::Cursor;

/// A truncate, borrowed from the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncate<'a> {
    /// CASCADE was given.
    pub cascade: bool,
    /// RESTART IDENTITY was given.
    pub restart_identity: bool,
    schemas: &'a [u8],
}

impl<'a> Truncate<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let flags = cursor.u8("truncate flags")?;
        if flags & !3 != 0 {
            return Err(Error::UnknownTag {
                what: "truncate flags",
                tag: flags,
            });
        }
        let count = usize::from(cursor.u16("relation count")?);
        let schemas = cursor.take(count * 4, "schema numbers")?;
        Ok(Self {
            cascade: flags & 1 != 0,
            restart_identity: flags & 2 != 0,
            schemas,
        })
    }

    pub(crate) fn write(
        out: &mut Vec<u8>,
        cascade: bool,
        restart_identity: bool,
        schemas: &[SchemaNumber],
    ) -> Result<()> {
        let count = u16::try_from(schemas.len()).map_err(|_| Error::TooLarge("relation count"))?;
        out.push(u8::from(cascade) | (u8::from(restart_identity) << 1));
        out.extend_from_slice(&count.to_le_bytes());
        for schema in schemas {
            out.extend_from_slice(&schema.0.to_le_bytes());
        }
        Ok(())
    }

    /// Returns the schema numbers of the truncated relations.
    pub fn schemas(&self) -> impl Iterator<Item = SchemaNumber> + 'a {
        self.schemas
            .as_chunks::<4>()
            .0
            .iter()
            .map(|raw| SchemaNumber(u32::from_le_bytes(*raw)))
    }
}
