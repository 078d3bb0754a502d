//! The stream header, the first record of every stream.
//!
//! Layout: 4 bytes "GIR\n", u16 version, 16 bytes node id, u64 system identifier, u32 server
//! version number, name of the node, name of the database, name of the charset (PostgreSQL's name
//! of the server encoding).

use crate::error::{Error, Result};
use crate::wire::{Cursor, put_name};

/// First bytes of the first record's body.
pub const MAGIC: [u8; 4] = *b"GIR\n";
/// The version that this build writes and reads.
pub const PROTOCOL_VERSION: u16 = 1;

/// Identity, version and charset of the stream's sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamHeader<'a> {
    /// The node's permanent identity, a UUID's bytes.
    pub node_id: [u8; 16],
    /// PostgreSQL's system identifier of the server.
    pub system_identifier: u64,
    /// `server_version_num`, for example 150020.
    pub server_version: u32,
    /// Name of the node.
    pub node_name: &'a str,
    /// Name of the database.
    pub database: &'a str,
    /// Charset of String values and of text forms, by PostgreSQL's name.
    pub charset: &'a str,
}

impl<'a> StreamHeader<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        if cursor.take(4, "signature")? != MAGIC {
            return Err(Error::BadMagic);
        }
        let found = cursor.u16("version")?;
        if found != PROTOCOL_VERSION {
            return Err(Error::UnsupportedVersion {
                found,
                supported: PROTOCOL_VERSION,
            });
        }
        Ok(Self {
            node_id: cursor.bytes16("node id")?,
            system_identifier: cursor.u64("system identifier")?,
            server_version: cursor.u32("server version")?,
            node_name: cursor.name("node name")?,
            database: cursor.name("database name")?,
            charset: cursor.name("charset")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        out.extend_from_slice(&self.node_id);
        out.extend_from_slice(&self.system_identifier.to_le_bytes());
        out.extend_from_slice(&self.server_version.to_le_bytes());
        put_name(out, self.node_name, "node name")?;
        put_name(out, self.database, "database name")?;
        put_name(out, self.charset, "charset")
    }
}
