//! In-progress transactions, which are sent while they still run: in segments, with other
//! transactions between them.
//!
//! Segment start: u8 flags (1 the first of its transaction in this stream), u32 xid of the
//! transaction. Segment stop: nothing. Subtransaction: u32 xid; the next changes in the segment
//! belong to that subtransaction, or to the transaction itself if it is its xid. Abort: u32 xid of
//! the transaction, u32 xid that was rolled back: the transaction's or a subtransaction's. Streamed
//! commit: the fields of a Begin, then u64 LSN of the end of the commit record.

use crate::error::{Error, Result};
use crate::transaction::{Begin, Commit};
use crate::wire::Cursor;

/// Start of a segment: the changes up to its end belong to a transaction that may still run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentStart {
    /// This is the transaction's first segment in this stream.
    pub first: bool,
    /// Transaction id in the sender's WAL.
    pub xid: u32,
}

impl SegmentStart {
    pub(crate) fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        let flags = cursor.u8("segment flags")?;
        if flags & !1 != 0 {
            return Err(Error::UnknownTag {
                what: "segment flags",
                tag: flags,
            });
        }
        Ok(Self {
            first: flags == 1,
            xid: cursor.u32("transaction id")?,
        })
    }

    pub(crate) fn write(self, out: &mut Vec<u8>) {
        out.push(u8::from(self.first));
        out.extend_from_slice(&self.xid.to_le_bytes());
    }
}

/// Rollback of a transaction that came in segments, or of a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abort {
    /// The transaction.
    pub xid: u32,
    /// Id that was rolled back: the transaction's, or a subtransaction's.
    pub subxid: u32,
}

impl Abort {
    pub(crate) fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        Ok(Self {
            xid: cursor.u32("transaction id")?,
            subxid: cursor.u32("subtransaction id")?,
        })
    }

    pub(crate) fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.xid.to_le_bytes());
        out.extend_from_slice(&self.subxid.to_le_bytes());
    }
}

/// Commit of a transaction that came in segments, with the fields of both Begin and Commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamedCommit<'a> {
    /// Transaction, time and position.
    pub begin: Begin<'a>,
    /// LSN just past the commit record, which a subscriber confirms.
    pub end_lsn: u64,
}

impl<'a> StreamedCommit<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        Ok(Self {
            begin: Begin::read(cursor)?,
            end_lsn: cursor.u64("end lsn")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        self.begin.write(out)?;
        out.extend_from_slice(&self.end_lsn.to_le_bytes());
        Ok(())
    }

    /// Returns the Commit that a transaction sent as a whole would end with.
    #[must_use]
    pub fn commit(&self) -> Commit {
        Commit {
            commit_lsn: self.begin.commit_lsn,
            end_lsn: self.end_lsn,
            commit_timestamp: self.begin.commit_timestamp,
        }
    }
}
