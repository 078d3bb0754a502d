//! Who wrote which columns of a row, where columns are registers of their own (column rule
//! `last_update_wins`): rows of `braid.column_write`.
//!
//! A row's version tells who wrote it last, and not which of its columns. So in tables with such a
//! rule appliers write down, in the transaction of each change, which of these columns it has given
//! its values. Local sessions write nothing down: the collector of deletions (`workers/collector`)
//! reads it off WAL.
//!
//! | a write by | is told by |
//! |---|---|
//! | an applier | its row here, from its commit on |
//! | a session, and `collected_lsn` is before its commit | WAL: who has to know waits for the collector, with the row locked |
//! | a session, and it is collected | its row here |
//!
//! It is asked for what is newer than a change only. Nothing is ever changed here; what is older
//! than anything that can still arrive is removed (`manager.rs`). A row may be here twice, after a
//! crash.

use std::ops::ControlFlow;

use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, By, Cell, Sees, int8, low};
use braid_postgres::wal;
use pgrx::pg_sys;

use crate::registry;
use crate::tombstone::waiting;

/// Columns of `braid.column_write`.
const COLUMNS: usize = 5;

/// One write of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnWrite {
    /// Hash of its table and key (`apply/key_hash/`).
    pub hash: u64,
    /// Its table here.
    pub relation: u32,
    /// Commit timestamp at its origin, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// Where it was written: a replication origin, 0 for here.
    pub origin: ReplOriginId,
    /// Numbers of the columns; `None`: all.
    pub columns: Option<Vec<i16>>,
}

impl ColumnWrite {
    /// Whether it has written the column with this number.
    #[must_use]
    pub fn has(&self, number: i16) -> bool {
        self.columns
            .as_ref()
            .is_none_or(|columns| columns.contains(&number))
    }
}

/// Write writes down. In a transaction of the caller's: they are there when it commits.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn store(writes: &[ColumnWrite]) -> Result<(), PgError> {
    if writes.is_empty() {
        return Ok(());
    }
    let each = writes.iter().map(|write| {
        let columns = write.columns.as_deref();
        let row: [Cell<'_>; COLUMNS] = [
            Cell::Bigint(write.hash.cast_signed()),
            Cell::Bigint(write.timestamp),
            Cell::Oid(pg_sys::Oid::from(write.relation)),
            Cell::Integer(i32::from(write.origin)),
            columns.map_or(Cell::Null, Cell::Smallints),
        ];
        row
    });
    table_scan::insert(own_table("column_write")?, each);
    Ok(())
}

/// Hand on all writes of the row with this hash that are remembered, the transaction's own too. The
/// row is locked by the caller, or was written by nobody else.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn each(hash: u64, mut take: impl FnMut(ColumnWrite)) -> Result<(), PgError> {
    let by = By {
        index: own_table("column_write_key_hash")?,
        value: hash.cast_signed(),
    };
    // What runs is the caller's own, as others would have the row locked; or the collector's, and
    // true whether it commits or not.
    table_scan::each::<COLUMNS>(own_table("column_write")?, Some(by), Sees::Running, |row| {
        let [_, timestamp, relation, origin, _] = row.values;
        take(ColumnWrite {
            hash,
            relation: low(relation),
            timestamp: int8(timestamp),
            origin: u16::try_from(low(origin)).unwrap_or(0),
            columns: row.smallints(COLUMNS - 1),
        });
        ControlFlow::Continue(())
    });
    Ok(())
}

/// What sessions of this node have committed of a row that is locked now, and that transaction
/// `writer` wrote last, is written down when this returns.
///
/// Where the collector has come past the end of `writer` it has come past all that was there
/// before. Otherwise past the record of the lock: whoever wrote the row has committed before that.
///
/// # Errors
/// 40001 where the collector does not get there: the transaction is to be rolled back, and applied
/// again.
pub fn wait_for_local(writer: pg_sys::TransactionId) -> Result<(), PgError> {
    if registry::is_collected(writer) {
        return Ok(());
    }
    let aim = match wal::last_record_end() {
        0 => wal::flushed(),
        aim => aim,
    };
    wal::flush(aim);
    if waiting::wait_past(aim) {
        return Ok(());
    }
    Err(waiting::not_yet(
        "what sessions of this node have written to a row with column rules is not known yet",
    ))
}
