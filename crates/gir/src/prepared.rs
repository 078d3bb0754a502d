//! Prepared transactions (PREPARE TRANSACTION), which are sent when they are prepared, before their
//! outcome is known.
//!
//! Begin prepared, commit prepared, streamed prepare: the fields of a Begin for the record of
//! PREPARE or COMMIT PREPARED, then u64 LSN of the end of that record and the transaction's global
//! id. Prepare: the fields of a Commit for the record of PREPARE. Rollback prepared: the fields of
//! these for the record of ROLLBACK PREPARED, then u64 LSN of the end of the record of PREPARE, i64
//! time of PREPARE.

use crate::error::Result;
use crate::transaction::{Begin, Commit};
use crate::wire::{Cursor, put_name};

/// A step of a prepared transaction: its begin, its end if it came in segments, or its commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prepared<'a> {
    /// Transaction, time and position: those of the record of PREPARE, or of COMMIT PREPARED.
    pub begin: Begin<'a>,
    /// LSN just past that record, which a subscriber confirms.
    pub end_lsn: u64,
    /// Global id of the transaction.
    pub gid: &'a str,
}

impl<'a> Prepared<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        Ok(Self {
            begin: Begin::read(cursor)?,
            end_lsn: cursor.u64("end lsn")?,
            gid: cursor.name("global transaction id")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        self.begin.write(out)?;
        out.extend_from_slice(&self.end_lsn.to_le_bytes());
        put_name(out, self.gid, "global transaction id")
    }

    /// Returns the Commit that the transaction would end with if it were not prepared.
    #[must_use]
    pub fn commit(&self) -> Commit {
        Commit {
            commit_lsn: self.begin.commit_lsn,
            end_lsn: self.end_lsn,
            commit_timestamp: self.begin.commit_timestamp,
        }
    }
}

/// A prepared transaction is rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RollbackPrepared<'a> {
    /// Transaction, time and position: those of the record of ROLLBACK PREPARED.
    pub prepared: Prepared<'a>,
    /// LSN just past the record of PREPARE.
    pub prepare_end_lsn: u64,
    /// Time of PREPARE, microseconds since 1970-01-01 UTC.
    pub prepare_timestamp: i64,
}

impl<'a> RollbackPrepared<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        Ok(Self {
            prepared: Prepared::read(cursor)?,
            prepare_end_lsn: cursor.u64("end lsn of prepare")?,
            prepare_timestamp: cursor.i64("prepare timestamp")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        self.prepared.write(out)?;
        out.extend_from_slice(&self.prepare_end_lsn.to_le_bytes());
        out.extend_from_slice(&self.prepare_timestamp.to_le_bytes());
        Ok(())
    }
}
