//! A logical message (`pg_logical_emit_message`).
//!
//! Layout: u8 flags (1 transactional), u64 LSN of the message, prefix (a name), content as a byte
//! string. A message that is not transactional stands outside of any transaction.

use crate::error::{Error, Result};
use crate::wire::{Cursor, put_byte_string, put_name};

/// A logical message, borrowed from the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// The message is part of the transaction around it.
    pub transactional: bool,
    /// LSN of the message in the sender's WAL.
    pub lsn: u64,
    /// Identifies the sender of the message.
    pub prefix: &'a str,
    /// The content.
    pub content: &'a [u8],
}

impl<'a> Message<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let flags = cursor.u8("message flags")?;
        if flags & !1 != 0 {
            return Err(Error::UnknownTag {
                what: "message flags",
                tag: flags,
            });
        }
        Ok(Self {
            transactional: flags == 1,
            lsn: cursor.u64("message lsn")?,
            prefix: cursor.name("message prefix")?,
            content: cursor.byte_string("message content")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        out.push(u8::from(self.transactional));
        out.extend_from_slice(&self.lsn.to_le_bytes());
        put_name(out, self.prefix, "message prefix")?;
        put_byte_string(out, self.content);
        Ok(())
    }
}
