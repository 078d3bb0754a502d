//! Transaction boundaries.
//!
//! Begin: u64 LSN of the commit record, i64 commit timestamp (microseconds since 1970-01-01 UTC),
//! u32 xid at the sender, name of the origin (empty: the sender of the stream), u64 LSN of the
//! commit at the origin (0 if the sender is the origin).
//!
//! Commit: u64 LSN of the commit record, u64 LSN of the end of the commit record, i64 commit
//! timestamp.

use crate::error::Result;
use crate::wire::{Cursor, put_name};

/// Start of a committed transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begin<'a> {
    /// LSN of the commit record in the sender's WAL.
    pub commit_lsn: u64,
    /// Commit timestamp at the origin, microseconds since 1970-01-01 UTC.
    pub commit_timestamp: i64,
    /// Transaction id in the sender's WAL.
    pub xid: u32,
    /// Name of the node where the transaction was first committed; empty if that is the sender.
    pub origin: &'a str,
    /// LSN of the commit in the origin's WAL; 0 if the sender is the origin.
    pub origin_lsn: u64,
}

impl<'a> Begin<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        Ok(Self {
            commit_lsn: cursor.u64("commit lsn")?,
            commit_timestamp: cursor.i64("commit timestamp")?,
            xid: cursor.u32("transaction id")?,
            origin: cursor.name("origin")?,
            origin_lsn: cursor.u64("origin lsn")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        out.extend_from_slice(&self.commit_lsn.to_le_bytes());
        out.extend_from_slice(&self.commit_timestamp.to_le_bytes());
        out.extend_from_slice(&self.xid.to_le_bytes());
        put_name(out, self.origin, "origin")?;
        out.extend_from_slice(&self.origin_lsn.to_le_bytes());
        Ok(())
    }
}

/// End of a committed transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    /// LSN of the commit record in the sender's WAL.
    pub commit_lsn: u64,
    /// LSN just past the commit record, which a subscriber confirms.
    pub end_lsn: u64,
    /// Commit timestamp at the origin, microseconds since 1970-01-01 UTC.
    pub commit_timestamp: i64,
}

impl Commit {
    pub(crate) fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        Ok(Self {
            commit_lsn: cursor.u64("commit lsn")?,
            end_lsn: cursor.u64("end lsn")?,
            commit_timestamp: cursor.i64("commit timestamp")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.commit_lsn.to_le_bytes());
        out.extend_from_slice(&self.end_lsn.to_le_bytes());
        out.extend_from_slice(&self.commit_timestamp.to_le_bytes());
    }
}
