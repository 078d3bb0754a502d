//! A transaction that is sent while it still runs: in segments, with other transactions between
//! them.
//!
//! Segment start: u8 flags (1 the first of its transaction in this stream), u32 xid of the
//! transaction. Segment stop: nothing. Subtransaction: u32 xid; the changes that follow in the
//! segment are that subtransaction's, or the transaction's own if it is its xid. Abort: u32 xid of
//! the transaction, u32 xid of what was rolled back: the same, or a subtransaction. Streamed
//! commit: what a Begin has, then u64 LSN of the end of the commit record.

use crate::error::{Error, Result};
use crate::transaction::{Begin, Commit};
use crate::wire::Cursor;

/// The changes that follow, up to the segment's end, belong to a transaction that may still run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentStart {
    /// Nothing of the transaction came before in this stream.
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

/// A transaction of which segments came, or a part of it, was rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abort {
    /// The transaction.
    pub xid: u32,
    /// What was rolled back: the transaction itself, or a subtransaction.
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

/// A transaction of which segments came has committed. It says what Begin and Commit say of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamedCommit<'a> {
    /// Of which transaction, when and where.
    pub begin: Begin<'a>,
    /// LSN just past the commit record: what a subscriber confirms.
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

    /// The Commit that a transaction sent as a whole would end with.
    #[must_use]
    pub fn commit(&self) -> Commit {
        Commit {
            commit_lsn: self.begin.commit_lsn,
            end_lsn: self.end_lsn,
            commit_timestamp: self.begin.commit_timestamp,
        }
    }
}
