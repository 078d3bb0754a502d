//! Records which node wrote which columns of a row, for columns that are registers of their own
//! (column rule `last_update_wins`): rows of `braid.column_write`.
//!
//! A row's version says which node wrote it last, and not which of its columns. So in tables with
//! such a rule appliers record, in the transaction of each change, which of these columns the
//! change has set. Local sessions record nothing: the collector of deletions (`workers/collector`)
//! reads their writes from WAL.
//!
//! | a write by | is in |
//! |---|---|
//! | an applier | a row of the table, from its commit on |
//! | a session, and `collected_lsn` is before its commit | WAL; readers wait for the collector |
//! | a session, and it is collected | a row of the table |
//!
//! Only writes that are newer than a change are looked up. A reader waits for the collector with
//! the changed row locked. Rows of the table are never updated; those older than any change that
//! may still arrive are removed (`manager.rs`). After a crash a row may be present twice.

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
    /// OID of the local table.
    pub relation: u32,
    /// Commit timestamp at its origin, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// The node that wrote: a replication origin, 0 for this node.
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

/// Stores writes. In the caller's transaction: they count when it commits.
///
/// # Errors
/// Those of PostgreSQL.
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

/// Passes on all recorded writes of the row with this hash, the transaction's own too. The caller
/// has locked the row, or no other session has written it.
///
/// # Errors
/// Those of PostgreSQL.
pub fn each(hash: u64, mut take: impl FnMut(ColumnWrite)) -> Result<(), PgError> {
    let by = By {
        index: own_table("column_write_key_hash")?,
        value: hash.cast_signed(),
    };
    // An uncommitted record is the caller's own, as others would have the row locked. Or it is the
    // collector's, and true whether it commits or not.
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

/// Waits until the committed writes of this node's sessions to a row are recorded. The row is
/// locked, and transaction `writer` wrote it last.
///
/// If the collector is past the end of `writer`, it is past all earlier writes too. Otherwise the
/// function waits until the collector is past the WAL record of the row lock: the row's writers
/// have committed before that.
///
/// # Errors
/// 40001 if the collector does not get that far: the transaction is to be rolled back, and applied
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
