//! Tombstones: what this node remembers of deleted rows, so that an older change of one that comes late does not bring it back.
//!
//! Who has deleted a row is told by its dead version for as long as that is there. A row of `braid.tombstone` tells it from then
//! on. Appliers write one with each deletion that they apply, in its transaction. Local deletions cost who makes them nothing: the
//! collector (`collector`) reads them off WAL, and keeps dead rows from being removed until it has come past them. So at any
//! moment each deletion is told by one of the two.
//!
//! A change that finds no row looks for its tombstone. For inserts that is the common case, so shared memory has, for each of
//! [`registry::TOMBSTONE_GROUPS`] groups of keys, the newest deletion of any of them: what is newer than that meets none.
//!
//! Rows that came by a copy, whose own commit does not tell their version, are kept in a table of the same form ([`store_copied`]).
//!
//! Nothing is ever changed here: of a key's tombstones the newest counts. They are removed when nothing older can arrive any more
//! (`manager.rs`).

pub mod collector;
pub mod drop_database;

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;

use pgrx::pg_sys;

use crate::apply::{EPOCH_DIFFERENCE, find_table};
use crate::error::PgError;
use crate::local_version::commit_data;
use crate::registry;
use crate::subscription::execute;
use crate::table_scan::{self, By, Row, Sees, int8, low};

/// Columns of `braid.tombstone`.
const COLUMNS: usize = 4;

/// A deleted row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tombstone {
    /// Hash of its table and key (`apply/key_hash.rs`).
    pub hash: u64,
    /// Its table here.
    pub relation: u32,
    /// Commit timestamp of the deletion at its origin, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// Where it was deleted: a replication origin, 0 for here.
    pub origin: pg_sys::RepOriginId,
}

/// The time of a tombstone that a prepared transaction has written: that of its commit, which its commit record tells. The manager puts it
/// in its place.
pub const AT_COMMIT: i64 = 0;

/// The time of what this transaction has deleted, which was prepared; `None` when it is the one in hand, or its time is forgotten.
fn committed_at(writer: pg_sys::TransactionId) -> Option<i64> {
    // SAFETY: looks at the transaction in hand.
    if unsafe { pg_sys::TransactionIdIsCurrentTransactionId(writer) } {
        return None;
    }
    commit_data(writer).map(|(timestamp, _)| timestamp.saturating_add(EPOCH_DIFFERENCE))
}

fn lock(mode: u32) -> i32 {
    i32::try_from(mode).unwrap_or(1)
}

/// What is known by the hash of a row's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// `braid.tombstone`.
    Deletions,
    /// `braid.copied_version`.
    Copies,
}

impl Known {
    fn table(self) -> Result<pg_sys::Oid, PgError> {
        match self {
            Self::Deletions => relation("tombstone"),
            Self::Copies => relation("copied_version"),
        }
    }

    fn index(self) -> Result<pg_sys::Oid, PgError> {
        match self {
            Self::Deletions => relation("tombstone_key_hash"),
            Self::Copies => relation("copied_version_key_hash"),
        }
    }
}

fn relation(name: &str) -> Result<pg_sys::Oid, PgError> {
    find_table("braid", name)?.ok_or_else(|| {
        PgError::new("42P01", format!("braid.{name} does not exist"))
            .with_hint("Update the extension with ALTER EXTENSION braid UPDATE.")
    })
}

/// Write tombstones down. In a transaction of the caller's: they are there when it commits.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn store(tombstones: &[Tombstone]) -> Result<(), PgError> {
    if tombstones.is_empty() {
        return Ok(());
    }
    // Before the commit, so that nobody is told that there is none while there is one.
    for tombstone in tombstones {
        let newest = match tombstone.timestamp {
            // As late as its commit may come.
            AT_COMMIT => i64::MAX,
            timestamp => timestamp,
        };
        registry::raise_tombstone(tombstone.hash, newest);
    }
    write(Known::Deletions, tombstones)
}

/// Write down the versions of rows that a copy has brought. In the transaction of the copy.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn store_copied(rows: &[Tombstone]) -> Result<(), PgError> {
    write(Known::Copies, rows)
}

fn write(known: Known, tombstones: &[Tombstone]) -> Result<(), PgError> {
    let oid = known.table()?;
    // SAFETY: in a transaction; the values have the types of the table's columns.
    unsafe {
        let relation = pg_sys::table_open(oid, lock(pg_sys::RowExclusiveLock));
        let indexes = pg_sys::CatalogOpenIndexes(relation);
        for tombstone in tombstones {
            let mut values: [pg_sys::Datum; COLUMNS] = [
                pg_sys::Datum::from(tombstone.hash.cast_signed()),
                pg_sys::Datum::from(tombstone.timestamp),
                pg_sys::Datum::from(pg_sys::Oid::from(tombstone.relation)),
                pg_sys::Datum::from(i32::from(tombstone.origin)),
            ];
            let mut nulls = [false; COLUMNS];
            let tuple = pg_sys::heap_form_tuple(
                (*relation).rd_att,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            pg_sys::CatalogTupleInsertWithInfo(relation, tuple, indexes);
            pg_sys::heap_freetuple(tuple);
        }
        pg_sys::CatalogCloseIndexes(indexes);
        pg_sys::table_close(relation, lock(pg_sys::NoLock));
    }
    Ok(())
}

/// Which tombstones are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Those that are committed, and the transaction's own.
    Committed,
    /// Those of transactions that still run, too.
    All,
}

/// A transaction that was prepared commits at this time: what it has deleted, if anything, is not known here by group.
pub fn prepared_commits(timestamp: i64) {
    if registry::remembers_deletions() {
        registry::raise_all_tombstones(timestamp);
    }
}

/// Give tombstones of prepared transactions that have committed the time of that. In a transaction of the caller's.
///
/// # Errors
/// Whatever SPI says.
pub fn settle() -> Result<(), PgError> {
    execute(
        "update braid.tombstone set deleted_at = (extract(epoch from coalesce(pg_xact_commit_timestamp(xmin), now())) * 1000000)::bigint \
         where deleted_at = 0",
        &[],
    )
}

/// The newest deletion of the row with this hash: its time and origin.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn find(hash: u64, seen: Seen) -> Result<Option<(i64, pg_sys::RepOriginId)>, PgError> {
    newest(Known::Deletions, hash, seen)
}

/// The same, all of them where several nodes have deleted it at one time: their names decide, which this module does not know.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn find_each(hash: u64, seen: Seen) -> Result<Vec<(i64, pg_sys::RepOriginId)>, PgError> {
    let known = Known::Deletions;
    let by = By {
        index: known.index()?,
        value: hash.cast_signed(),
    };
    let mut newest: Vec<(i64, pg_sys::RepOriginId)> = Vec::new();
    each(known, Some(by), seen, |tombstone| {
        let time = newest.first().map_or(i64::MIN, |(time, _)| *time);
        if tombstone.timestamp > time {
            newest.clear();
        }
        let deletion = (tombstone.timestamp, tombstone.origin);
        if tombstone.timestamp >= time && !newest.contains(&deletion) {
            newest.push(deletion);
        }
    })?;
    Ok(newest)
}

/// The version with which a copy has brought the row with this hash: its time and origin.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn find_copied(hash: u64) -> Result<Option<(i64, pg_sys::RepOriginId)>, PgError> {
    newest(Known::Copies, hash, Seen::Committed)
}

fn newest(
    known: Known,
    hash: u64,
    seen: Seen,
) -> Result<Option<(i64, pg_sys::RepOriginId)>, PgError> {
    let by = By {
        index: known.index()?,
        value: hash.cast_signed(),
    };
    let mut newest: Option<(i64, pg_sys::RepOriginId)> = None;
    each(known, Some(by), seen, |tombstone| {
        if newest.is_none_or(|(known, _)| tombstone.timestamp > known) {
            newest = Some((tombstone.timestamp, tombstone.origin));
        }
    })?;
    Ok(newest)
}

/// By table, hashes of rows that changes of other nodes have deleted which are newer than `since`, microseconds since 1970-01-01 UTC.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn received(tables: &[u32], since: i64) -> Result<BTreeMap<u32, HashSet<u64>>, PgError> {
    let mut hashes: BTreeMap<u32, HashSet<u64>> = tables
        .iter()
        .map(|table| (*table, HashSet::new()))
        .collect();
    each(Known::Deletions, None, Seen::Committed, |tombstone| {
        pgrx::check_for_interrupts!();
        if tombstone.origin != 0
            && tombstone.timestamp > since
            && let Some(hashes) = hashes.get_mut(&tombstone.relation)
        {
            hashes.insert(tombstone.hash);
        }
    })?;
    Ok(hashes)
}

/// Tell shared memory of all tombstones that there are, after the server was started. In a transaction of the caller's.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn load() -> Result<(), PgError> {
    each(Known::Deletions, None, Seen::Committed, |tombstone| {
        pgrx::check_for_interrupts!();
        registry::raise_tombstone(tombstone.hash, tombstone.timestamp);
    })?;
    registry::tombstones_are_known();
    Ok(())
}

/// Look at all tombstones, or at those that an index finds. Whoever deleted a row that was not found has committed its tombstone with that.
fn each(
    known: Known,
    by: Option<By>,
    seen: Seen,
    mut look: impl FnMut(Tombstone),
) -> Result<(), PgError> {
    let sees = match seen {
        Seen::Committed => Sees::Committed,
        Seen::All => Sees::Running,
    };
    // SAFETY: in a transaction; the tables have so many columns.
    unsafe {
        table_scan::each::<COLUMNS>(known.table()?, by, sees, |row| {
            if let Some(tombstone) = read(row, seen) {
                look(tombstone);
            }
            ControlFlow::Continue(())
        });
    }
    Ok(())
}

/// `None` for one that does not count.
fn read(row: &Row<COLUMNS>, seen: Seen) -> Option<Tombstone> {
    let [hash, timestamp, relation, origin] = row.values;
    let mut timestamp = int8(timestamp);
    if timestamp == AT_COMMIT {
        let writer = row.writer();
        // SAFETY: looks at what runs.
        let (runs, is_own) = unsafe {
            (
                pg_sys::TransactionIdIsInProgress(writer),
                pg_sys::TransactionIdIsCurrentTransactionId(writer),
            )
        };
        timestamp = match committed_at(writer) {
            Some(at) => at,
            // Prepared: it will be newer than what has come before it.
            None if seen == Seen::All && runs && !is_own => i64::MAX,
            None => return None,
        };
    }
    Some(Tombstone {
        hash: int8(hash).cast_unsigned(),
        relation: low(relation),
        timestamp,
        origin: u16::try_from(low(origin)).unwrap_or(0),
    })
}
