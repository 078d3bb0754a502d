//! Rows that were removed from keyless tables, and the removal of each: rows of `braid.taken_row`
//! (`braid_bgworker::keyless` says why).
//!
//! | a removal by | is in |
//! |---|---|
//! | an applier | a row of the table, from its commit on |
//! | a session, and `collected_lsn` is before its commit | WAL; readers wait for the collector |
//! | a session, and it is collected | a row of the table |
//!
//! Decoded WAL has whole rows, but does not say which of several identical ones was deleted. The
//! WAL record has the row's place, and the dead row version stays until the collector is past the
//! record (`workers/collector`). Each removal is stored once, even if the server crashes: the
//! collector's position is stored with them (`braid.taken_up_to`).

use std::ops::ControlFlow;

use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, By, Cell, Row, int8, low};
use pgrx::pg_sys;

use crate::subscription::execute_counting;
use crate::tombstone::{AT_COMMIT, Seen, committed_at};

/// Columns of `braid.taken_row`.
const COLUMNS: usize = 6;
/// The time of a row's version that is not known: older than all.
const OLDEST: i64 = 0;

/// Commit timestamp at its origin, microseconds since 1970-01-01 UTC, and that origin, 0 for this
/// node.
pub type Author = (i64, ReplOriginId);

/// A removed row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TakenRow {
    /// Hash of all of it (`apply/key_hash/`).
    pub hash: u64,
    /// OID of the local table.
    pub relation: u32,
    /// The row's writer; `None`: older than all.
    pub row: Option<Author>,
    /// The removal.
    pub removal: Author,
}

/// Where one stands in `braid.taken_row`: block and number in it.
pub type Place = (u32, u16);

/// Stores removed rows. In the caller's transaction: they count when it commits.
///
/// # Errors
/// Those of PostgreSQL.
pub fn store(taken: &[TakenRow]) -> Result<(), PgError> {
    if taken.is_empty() {
        return Ok(());
    }
    let each = taken.iter().map(|taken| {
        let (written_at, written_by) = taken.row.unwrap_or((OLDEST, 0));
        let row: [Cell<'_>; COLUMNS] = [
            Cell::Bigint(taken.hash.cast_signed()),
            Cell::Bigint(taken.removal.0),
            Cell::Oid(pg_sys::Oid::from(taken.relation)),
            Cell::Integer(i32::from(taken.removal.1)),
            Cell::Bigint(written_at),
            Cell::Integer(i32::from(written_by)),
        ];
        row
    });
    table_scan::insert(own_table("taken_row")?, each);
    Ok(())
}

/// Passes on the rows with this hash, or all, each with its place.
///
/// # Errors
/// Those of PostgreSQL.
pub fn each(
    hash: Option<u64>,
    seen: Seen,
    mut take: impl FnMut(TakenRow, Place),
) -> Result<(), PgError> {
    let by = match hash {
        Some(hash) => Some(By {
            index: own_table("taken_row_row_hash")?,
            value: hash.cast_signed(),
        }),
        None => None,
    };
    table_scan::each::<COLUMNS>(own_table("taken_row")?, by, seen.sees(), |row| {
        pgrx::check_for_interrupts!();
        if let Some(taken) = read(row, seen) {
            take(taken, row.place());
        }
        ControlFlow::Continue(())
    });
    Ok(())
}

/// `None` for one that does not count.
fn read(row: &Row<'_, COLUMNS>, seen: Seen) -> Option<TakenRow> {
    let [
        hash,
        removed_at,
        relation,
        removed_by,
        written_at,
        written_by,
    ] = row.values;
    let number = |value| u16::try_from(low(value)).unwrap_or(0);
    let removed_at = match int8(removed_at) {
        AT_COMMIT => committed_at(row.writer(), seen)?,
        at => at,
    };
    let written_at = int8(written_at);
    Some(TakenRow {
        hash: int8(hash).cast_unsigned(),
        relation: low(relation),
        row: (written_at != OLDEST).then_some((written_at, number(written_by))),
        removal: (removed_at, number(removed_by)),
    })
}

/// Forgets one. Returns false if another process has done so.
///
/// # Errors
/// Those of SPI.
pub fn forget(hash: u64, (block, number): Place) -> Result<bool, PgError> {
    let place = format!("({block},{number})");
    let forgotten = execute_counting(
        "delete from braid.taken_row where ctid = $1::tid and row_hash = $2",
        &[place.as_str().into(), hash.cast_signed().into()],
    )?;
    Ok(forgotten > 0)
}
