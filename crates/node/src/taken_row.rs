//! Rows that were taken out of tables without a key, and what took each: rows of `braid.taken_row`
//! (`braid_bgworker::keyless` says what for).
//!
//! | a removal by | is told by |
//! |---|---|
//! | an applier | its row here, from its commit on |
//! | a session, and `collected_lsn` is before its commit | WAL, and the dead row: who has to know waits for the collector |
//! | a session, and it is collected | its row here |
//!
//! What is decoded of WAL says whole rows, but not which of several that are identical is gone. The
//! record itself has its place, and its dead version is there until the collector has come past it
//! (`workers/collector`). Each is written once, also if the server crashes: how far they are is
//! written with them (`braid.taken_up_to`).

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

/// Commit timestamp at its origin, microseconds since 1970-01-01 UTC, and that origin, 0 for here.
pub type Author = (i64, ReplOriginId);

/// A row that was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TakenRow {
    /// Hash of all of it (`apply/key_hash/`).
    pub hash: u64,
    /// Its table here.
    pub relation: u32,
    /// Who wrote it; `None`: older than all.
    pub row: Option<Author>,
    /// What took it.
    pub removal: Author,
}

/// Where one stands in `braid.taken_row`: block and number in it.
pub type Place = (u32, u16);

/// Write rows down. In a transaction of the caller's: they are there when it commits.
///
/// # Errors
/// Whatever PostgreSQL raises.
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

/// Hand on the rows with this hash, or all, each with its place.
///
/// # Errors
/// Whatever PostgreSQL raises.
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

/// Forget one. False where somebody else has done so.
///
/// # Errors
/// Whatever SPI says.
pub fn forget(hash: u64, (block, number): Place) -> Result<bool, PgError> {
    let place = format!("({block},{number})");
    let forgotten = execute_counting(
        "delete from braid.taken_row where ctid = $1::tid and row_hash = $2",
        &[place.as_str().into(), hash.cast_signed().into()],
    )?;
    Ok(forgotten > 0)
}
