//! Tombstones: this node's records of deleted rows, so that an older change of a row that arrives
//! late does not bring it back.
//!
//! As long as the dead row version exists, it has the version of the deletion. From then on a row
//! of `braid.tombstone` has it. Appliers write one with each deletion that they apply, in its
//! transaction. Local deletions cost their sessions nothing: the collector (`workers/collector`)
//! reads them from WAL, and keeps dead rows from being removed until it is past them. So at any
//! moment one of the two records each deletion.
//!
//! A change that finds no row looks for its tombstone. For inserts that is the common case. So
//! shared memory has the newest deletion for each of `TOMBSTONE_GROUPS` (`registry/deletions.rs`)
//! groups of keys: a change that is newer conflicts with none.
//!
//! Rows that arrived by a copy, whose own commit does not have their version, are kept in a table
//! of almost the same form ([`store_copied`]).
//!
//! Tombstones are never updated: of a key's tombstones the newest counts. They are removed when no
//! older change can arrive any more (`manager.rs`).

pub mod drop_database;
pub mod waiting;

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;

use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, By, Cell, Is, Row, Sees, int8, low};
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::transaction;
use pgrx::pg_sys;

use crate::local_version::commit_data;
use crate::registry;
use crate::subscription::execute_lazily;

/// Columns of `braid.tombstone`.
const COLUMNS: usize = 4;
/// The one of its table.
const RELATION: i16 = 3;
/// Columns of `braid.copied_version`.
const COPIED_COLUMNS: usize = 5;

/// A deleted row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tombstone {
    /// Hash of its table and key (`apply/key_hash/`).
    pub hash: u64,
    /// OID of the local table.
    pub relation: u32,
    /// Commit timestamp of the deletion at its origin, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// The node that deleted it: a replication origin, 0 for this node.
    pub origin: ReplOriginId,
}

/// The version of a row that a copy has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CopiedVersion {
    /// Commit timestamp at its origin, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// The node that wrote it: a replication origin, 0 for this node.
    pub origin: ReplOriginId,
    /// The row was made of several: the writer of this version has not seen all of it.
    pub merged: bool,
}

/// The time of a tombstone that a prepared transaction has written. Its commit record will have the
/// real time; the manager then stores it.
pub const AT_COMMIT: i64 = 0;

/// The commit time of the transaction that removed a row and was prepared ([`AT_COMMIT`]). `None`
/// if that does not count: it is the current transaction, or its time is forgotten.
#[must_use]
pub fn committed_at(writer: pg_sys::TransactionId, seen: Seen) -> Option<i64> {
    if transaction::is_own(writer) {
        return None;
    }
    let runs = transaction::is_running(writer);
    match commit_data(writer) {
        Some((timestamp, _)) => Some(timestamp.saturating_add(EPOCH_DIFFERENCE)),
        // Prepared: its version will be newer than all earlier ones.
        None => (seen == Seen::All && runs).then_some(i64::MAX),
    }
}

/// The tables that are read by the hash of a row's key.
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
            Self::Deletions => own_table("tombstone"),
            Self::Copies => own_table("copied_version"),
        }
    }

    fn index(self) -> Result<pg_sys::Oid, PgError> {
        match self {
            Self::Deletions => own_table("tombstone_key_hash"),
            Self::Copies => own_table("copied_version_key_hash"),
        }
    }
}

/// Stores tombstones. In the caller's transaction: they count when it commits.
///
/// # Errors
/// Those of PostgreSQL.
pub fn store(tombstones: &[Tombstone]) -> Result<(), PgError> {
    if tombstones.is_empty() {
        return Ok(());
    }
    // Before the commit, so that no process finds that there is none while there is one.
    for tombstone in tombstones {
        let newest = match tombstone.timestamp {
            // As late as its commit may come.
            AT_COMMIT => i64::MAX,
            timestamp => timestamp,
        };
        registry::raise_tombstone(tombstone.hash, newest);
    }
    write(Known::Deletions, tombstones.iter().map(values))
}

/// Stores the versions of rows that a copy has brought, each with whether it was merged. In the
/// transaction of the copy.
///
/// # Errors
/// Those of PostgreSQL.
pub fn store_copied(rows: &[(Tombstone, bool)]) -> Result<(), PgError> {
    let each = rows.iter().map(|(row, merged)| {
        let [hash, timestamp, relation, origin] = values(row);
        [hash, timestamp, relation, origin, Cell::Boolean(*merged)]
    });
    write(Known::Copies, each)
}

fn values(tombstone: &Tombstone) -> [Cell<'static>; COLUMNS] {
    [
        Cell::Bigint(tombstone.hash.cast_signed()),
        Cell::Bigint(tombstone.timestamp),
        Cell::Oid(pg_sys::Oid::from(tombstone.relation)),
        Cell::Integer(i32::from(tombstone.origin)),
    ]
}

fn write<const N: usize>(
    known: Known,
    rows: impl Iterator<Item = [Cell<'static>; N]>,
) -> Result<(), PgError> {
    table_scan::insert(known.table()?, rows);
    Ok(())
}

/// The tombstones that a search sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Committed ones, and the transaction's own.
    Committed,
    /// Also those of running transactions.
    All,
}

impl Seen {
    /// The rows by which they are known.
    #[must_use]
    pub fn sees(self) -> Sees {
        match self {
            Self::Committed => Sees::Committed,
            Self::All => Sees::Running,
        }
    }
}

/// A transaction that was prepared commits at this time. Its deletions, if any, are not known by
/// group, so the times of all groups are raised.
pub fn prepared_commits(timestamp: i64) {
    if registry::remembers_deletions() {
        registry::raise_all_tombstones(timestamp);
    }
}

/// Gives tombstones of prepared transactions that have committed the time of the commit, and also
/// the rows that these have removed from keyless tables. In the caller's transaction.
pub fn settle() {
    for (table, column) in [("tombstone", "deleted_at"), ("taken_row", "removed_at")] {
        execute_lazily(
            &format!(
                "update braid.{table} set {column} = (extract(epoch from coalesce(pg_xact_commit_timestamp(xmin), now())) * 1000000)::bigint \
                 where {column} = 0"
            ),
            &[],
        );
    }
}

/// The newest deletion of the row with this hash: its time and origin.
///
/// # Errors
/// Those of PostgreSQL.
pub fn find(hash: u64, seen: Seen) -> Result<Option<(i64, ReplOriginId)>, PgError> {
    let mut newest: Option<(i64, ReplOriginId)> = None;
    each(Some(by(Known::Deletions, hash)?), seen, |tombstone| {
        if newest.is_none_or(|(known, _)| tombstone.timestamp > known) {
            newest = Some((tombstone.timestamp, tombstone.origin));
        }
    })?;
    Ok(newest)
}

fn by(known: Known, hash: u64) -> Result<By, PgError> {
    Ok(By {
        index: known.index()?,
        value: hash.cast_signed(),
    })
}

/// Finds the newest deletions of the row with this hash: several if several nodes have deleted it
/// at one time. Then their names decide, which this module does not know.
///
/// # Errors
/// Those of PostgreSQL.
pub fn find_each(hash: u64, seen: Seen) -> Result<Vec<(i64, ReplOriginId)>, PgError> {
    let mut newest: Vec<(i64, ReplOriginId)> = Vec::new();
    each(Some(by(Known::Deletions, hash)?), seen, |tombstone| {
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

/// All deletions with this hash: time and origin of each.
///
/// # Errors
/// Those of PostgreSQL.
pub fn find_all(hash: u64, seen: Seen) -> Result<Vec<(i64, ReplOriginId)>, PgError> {
    let mut all = Vec::new();
    each(Some(by(Known::Deletions, hash)?), seen, |tombstone| {
        all.push((tombstone.timestamp, tombstone.origin));
    })?;
    Ok(all)
}

/// The version with which a copy has brought the row with this hash.
///
/// # Errors
/// Those of PostgreSQL.
pub fn find_copied(hash: u64) -> Result<Option<CopiedVersion>, PgError> {
    let mut newest = None;
    let by = by(Known::Copies, hash)?;
    each_copied(Some(by), |version| {
        newest = newest.max(Some(version));
        ControlFlow::Continue(())
    })?;
    Ok(newest)
}

/// The versions with which copies have brought rows with this hash.
///
/// # Errors
/// Those of PostgreSQL.
pub fn find_all_copied(hash: u64) -> Result<Vec<CopiedVersion>, PgError> {
    let mut all = Vec::new();
    each_copied(Some(by(Known::Copies, hash)?), |version| {
        all.push(version);
        ControlFlow::Continue(())
    })?;
    Ok(all)
}

/// Whether a copy has brought any row that was merged.
///
/// # Errors
/// Those of PostgreSQL.
pub fn has_copied_merged() -> Result<bool, PgError> {
    let mut found = false;
    each_copied(None, |version| {
        pgrx::check_for_interrupts!();
        found = version.merged;
        if found {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    Ok(found)
}

/// Passes on the versions that copies have brought, or those that an index finds, until `look`
/// breaks.
fn each_copied(
    by: Option<By>,
    mut look: impl FnMut(CopiedVersion) -> ControlFlow<()>,
) -> Result<(), PgError> {
    let table = Known::Copies.table()?;
    table_scan::each::<COPIED_COLUMNS>(table, by, Sees::Committed, |row| {
        let [_, timestamp, _, origin, merged] = row.values;
        look(CopiedVersion {
            timestamp: int8(timestamp),
            origin: u16::try_from(low(origin)).unwrap_or(0),
            merged: merged.value() & 0xFF != 0,
        })
    });
    Ok(())
}

/// By table, hashes of rows that changes of other nodes have deleted which are newer than `since`,
/// microseconds since 1970-01-01 UTC.
///
/// # Errors
/// Those of PostgreSQL.
pub fn received(tables: &[u32], since: i64) -> Result<BTreeMap<u32, HashSet<u64>>, PgError> {
    let seen = Seen::Committed;
    let (table, index) = (Known::Deletions.table()?, own_table("tombstone_relation")?);
    let mut hashes: BTreeMap<u32, HashSet<u64>> = BTreeMap::new();
    for relation in tables {
        let hashes = hashes.entry(*relation).or_default();
        let by = [Is::Oid(RELATION, pg_sys::Oid::from(*relation))];
        table_scan::find::<COLUMNS>(table, index, &by, seen.sees(), |row| {
            pgrx::check_for_interrupts!();
            if let Some(tombstone) = read(row, seen)
                && tombstone.origin != 0
                && tombstone.timestamp > since
            {
                hashes.insert(tombstone.hash);
            }
            ControlFlow::Continue(())
        });
    }
    Ok(hashes)
}

/// Enters all existing tombstones into shared memory, after the server was started. In the caller's
/// transaction.
///
/// # Errors
/// Those of PostgreSQL.
pub fn load() -> Result<(), PgError> {
    each(None, Seen::Committed, |tombstone| {
        pgrx::check_for_interrupts!();
        registry::raise_tombstone(tombstone.hash, tombstone.timestamp);
    })?;
    registry::tombstones_are_known();
    Ok(())
}

/// Passes on all tombstones, or those that an index finds. If a deleted row is not found any more,
/// its tombstone was committed with the deletion.
fn each(by: Option<By>, seen: Seen, mut look: impl FnMut(Tombstone)) -> Result<(), PgError> {
    let table = Known::Deletions.table()?;
    table_scan::each::<COLUMNS>(table, by, seen.sees(), |row| {
        if let Some(tombstone) = read(row, seen) {
            look(tombstone);
        }
        ControlFlow::Continue(())
    });
    Ok(())
}

/// `None` for one that does not count.
fn read(row: &Row<'_, COLUMNS>, seen: Seen) -> Option<Tombstone> {
    let [hash, timestamp, relation, origin] = row.values;
    let timestamp = match int8(timestamp) {
        AT_COMMIT => committed_at(row.writer(), seen)?,
        at => at,
    };
    Some(Tombstone {
        hash: int8(hash).cast_unsigned(),
        relation: low(relation),
        timestamp,
        origin: u16::try_from(low(origin)).unwrap_or(0),
    })
}
