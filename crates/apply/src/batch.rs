//! Batches: transactions of one origin that are committed here as one, and the true versions of
//! their rows. Run by the appliers.
//!
//! Example. T1 (10:00) writes row 1, T2 (10:05) writes row 2, and both are committed here as one
//! transaction of 10:05. A change of row 1 from another node, made at 10:03, must win over T1. But
//! by its commit, row 1 is of 10:05.
//!
//! So the commit that ends a batch carries the newest timestamp. In the same transaction, a row of
//! `braid.batch` has the true timestamp of each older row of the batch. A row is identified by a
//! hash of table and key, because its place changes when the table is rewritten. If two rows of a
//! batch have the same hash, the later one's version counts for both. That matters for tables
//! without a key that several nodes write to: if two transactions of a batch have written identical
//! rows of such a table, the batch is given up and applied one by one.
//!
//! `versions` is pairs of little-endian 64-bit numbers: the hash, and the timestamp in microseconds
//! since 1970-01-01 UTC.
//!
//! `merged` has rows that a conflict function made of two (`braid_bgworker::merge`), or that a
//! losing change has added to (`braid_bgworker::column_rule`), in a batch or not: hash, timestamp,
//! and 16 bits for the origin's local number, little-endian. Their version is of another origin, or
//! does not tell all that is in them. They are kept for longer: until the writer of each half has
//! surely received the other.
//!
//! `braid.batch` is only read if versions decide. A change that comes straight from the origin that
//! wrote the row is newer in any case.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::rc::Rc;

use braid_bgworker::sqlstate::SqlState;
use braid_node::registry;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::memory;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, By, Cell, Sees};
use braid_postgres::transaction;
use braid_postgres::xid::full;
use pgrx::pg_sys;

use super::number_map::NumberMap;
use super::version::{Stamp, is_own};

/// Number of batches whose versions a process remembers.
const REMEMBERED: usize = 64;
/// Columns of `braid.batch`.
const COLUMNS: usize = 4;
/// Positions of `versions` and `merged` among them, from 0.
const TIMES: usize = 2;
const MERGED: usize = 3;
/// Bytes of a row in `merged`.
const MERGED_BYTES: usize = 18;
/// Time for which merged rows are kept beyond what holds for batches, in microseconds: 30 days.
pub const KEEP_MERGED: i64 = 30 * 86_400 * 1_000_000;

/// A merged row, and its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merged {
    hash: u64,
    timestamp: i64,
    origin: ReplOriginId,
}

/// Versions of rows that the commit's timestamp does not carry.
#[derive(Debug, Clone, Default)]
pub struct Versions {
    /// Hash and timestamp of each row.
    times: Vec<(u64, i64)>,
    /// Sorted by hash.
    merged: Vec<Merged>,
}

impl Versions {
    /// Adds versions that were written later.
    pub fn extend(&mut self, later: Self) {
        if !self.merged.is_empty() {
            let times = later.times.iter().map(|(hash, _)| *hash);
            let written: HashSet<u64> = times
                .chain(later.merged.iter().map(|row| row.hash))
                .collect();
            self.merged.retain(|row| !written.contains(&row.hash));
        }
        self.times.extend(later.times);
        self.merged.extend(later.merged);
        self.merged.sort_unstable_by_key(|row| row.hash);
    }
}

/// Versions of rows that the current attempt has written, and that its commit's timestamp does not
/// carry.
#[derive(Debug, Default)]
pub struct WrittenVersions {
    /// Rows of the current batch; `None` without a batch.
    making: Option<Vec<(u64, i64)>>,
    /// Rows of tables without a key that the current batch has written, by hash: the time of their
    /// transaction, and their number.
    alike: NumberMap<u64, (i64, usize)>,
    /// Whether identical rows were written by different transactions of the batch.
    is_ambiguous: bool,
    /// Merged rows of the current transaction, in a batch or not, by hash.
    merged: NumberMap<u64, Merged>,
}

/// Committed batches, as far as a process remembers them.
#[derive(Debug, Default)]
pub struct KnownVersions {
    known: NumberMap<u32, Rc<Versions>>,
    /// Whether there were batches when this process first looked.
    found_some: Option<bool>,
}

impl WrittenVersions {
    /// Begins a batch.
    pub fn begin(&mut self) {
        self.making = Some(Vec::new());
    }

    /// Whether a batch is being applied.
    #[must_use]
    pub fn is_making(&self) -> bool {
        self.making.is_some()
    }

    /// Notes that the row with this hash was written by a transaction of this time.
    pub fn note(&mut self, hash: u64, timestamp: i64) {
        if !self.merged.is_empty() {
            self.merged.remove(&hash);
        }
        self.note_gone(hash, timestamp);
    }

    /// Notes that a row of a table without a key, with this hash, was written by a transaction of
    /// this time.
    pub fn note_alike(&mut self, hash: u64, timestamp: i64) {
        if self.making.is_none() {
            return;
        }
        let one = self.alike.entry(hash).or_insert((timestamp, 0));
        match one {
            (_, 0) => *one = (timestamp, 1),
            (at, count) if *at == timestamp => *count += 1,
            _ => self.is_ambiguous = true,
        }
    }

    /// Notes that a row of a table without a key, which this local transaction has written, was
    /// removed. Returns the time of the transaction that brought it, if there is a batch.
    pub fn take_alike(&mut self, hash: u64) -> Option<i64> {
        let (timestamp, count) = self.alike.get_mut(&hash).filter(|(_, count)| *count > 0)?;
        *count -= 1;
        Some(*timestamp)
    }

    /// Notes that a transaction of this time has deleted the row with this hash, or given it
    /// another key.
    pub fn note_gone(&mut self, hash: u64, timestamp: i64) {
        if let Some(making) = self.making.as_mut() {
            making.push((hash, timestamp));
        }
    }

    /// Notes that the row with this hash, which was just written, is merged, and has this version.
    pub fn note_merged(&mut self, hash: u64, timestamp: i64, origin: ReplOriginId) {
        let row = Merged {
            hash,
            timestamp,
            origin,
        };
        self.merged.insert(hash, row);
    }

    /// Whether the current transaction has merged rows.
    #[must_use]
    pub fn has_merged(&self) -> bool {
        !self.merged.is_empty()
    }

    fn forget_alike(&mut self) {
        self.alike.clear();
        self.is_ambiguous = false;
    }

    /// Stores the versions of the batch that is about to be committed with the timestamp `newest`.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises; 40001 if two transactions of the batch have written identical
    /// rows.
    pub fn store(&mut self, newest: i64) -> Result<(), PgError> {
        if self.is_ambiguous {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "transactions that are committed as one have written identical rows to a table without a key",
            ));
        }
        let versions = self.take();
        store(transaction::assign_top_full_id, versions, newest)
    }

    /// Takes the versions written since [`WrittenVersions::begin`], and ends the batch.
    pub fn take(&mut self) -> Versions {
        let mut merged: Vec<Merged> = self.merged.drain().map(|(_, row)| row).collect();
        merged.sort_unstable_by_key(|row| row.hash);
        self.forget_alike();
        Versions {
            times: self.making.take().unwrap_or_default(),
            merged,
        }
    }
}

impl KnownVersions {
    /// Whether any transaction may have been a batch.
    fn may_be(&mut self) -> Result<bool, PgError> {
        if registry::batches() > 0 {
            return Ok(true);
        }
        if let Some(found) = self.found_some {
            return Ok(found);
        }
        let found = read(None)?.is_some();
        self.found_some = Some(found);
        Ok(found)
    }

    /// Returns the version of a row that transaction `xid` wrote. `stamp` is the version of the
    /// transaction, `written` has the versions of the current attempt, `hash` returns the row's
    /// hash.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn refine(
        &mut self,
        written: &WrittenVersions,
        xid: pg_sys::TransactionId,
        stamp: Stamp,
        hash: impl FnOnce() -> u64,
    ) -> Result<Stamp, PgError> {
        match stamp {
            Stamp::Known(..) => {}
            Stamp::Own if transaction::is_own(xid) => {
                if written.merged.is_empty() {
                    return Ok(stamp);
                }
                let row = written.merged.get(&hash());
                return Ok(row.map_or(stamp, |row| Stamp::OwnMerged(row.timestamp, row.origin)));
            }
            // Written by a committed chunk of it, perhaps merged.
            Stamp::Own => {}
            Stamp::Unversioned | Stamp::Merged(..) | Stamp::OwnMerged(..) => return Ok(stamp),
        }
        // Allocations are freed with the transaction. The memory of the look-up that calls this
        // lives longer.
        memory::in_top_transaction(|| self.look_up(xid, stamp, hash))
    }

    fn look_up(
        &mut self,
        xid: pg_sys::TransactionId,
        stamp: Stamp,
        hash: impl FnOnce() -> u64,
    ) -> Result<Stamp, PgError> {
        if !self.may_be()? {
            return Ok(stamp);
        }
        let short = xid.into_inner();
        let versions = match self.known.get(&short) {
            Some(versions) => Rc::clone(versions),
            None => {
                let versions = Rc::new(read(Some(full(xid)))?.unwrap_or_default());
                if self.known.len() >= REMEMBERED {
                    self.known.clear();
                }
                self.known.insert(short, Rc::clone(&versions));
                versions
            }
        };
        if versions.times.is_empty() && versions.merged.is_empty() {
            return Ok(stamp);
        }
        let hash = hash();
        let merged = find_merged(&versions.merged, hash);
        let Stamp::Known(_, origin) = stamp else {
            return Ok(merged.map_or(stamp, |row| Stamp::OwnMerged(row.timestamp, row.origin)));
        };
        if let Some(row) = merged {
            // Between two chunks of the current transaction, an older change of another node was
            // merged with a row of the first chunk.
            return Ok(if is_own(row.timestamp, row.origin) {
                Stamp::OwnMerged(row.timestamp, row.origin)
            } else {
                Stamp::Merged(row.timestamp, row.origin)
            });
        }
        let times = &versions.times;
        let found = times
            .binary_search_by_key(&hash, |(hash, _)| *hash)
            .ok()
            .and_then(|at| times.get(at));
        Ok(found.map_or(stamp, |(_, timestamp)| Stamp::Known(*timestamp, origin)))
    }
}

fn find_merged(rows: &[Merged], hash: u64) -> Option<&Merged> {
    let at = rows.binary_search_by_key(&hash, |row| row.hash).ok()?;
    rows.get(at)
}

/// Stores the versions of rows of transaction `xid` that differ from that of its commit, which will
/// carry the timestamp `newest`.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn store(xid: impl FnOnce() -> u64, versions: Versions, newest: i64) -> Result<(), PgError> {
    let Versions {
        times: mut versions,
        merged,
    } = versions;
    // If a row is there twice, the last counts; sorting is stable.
    versions.reverse();
    versions.sort_by_key(|(hash, _)| *hash);
    versions.dedup_by_key(|(hash, _)| *hash);
    versions.retain(|(_, timestamp)| *timestamp != newest);
    if versions.is_empty() && merged.is_empty() {
        return Ok(());
    }
    let kept = merged
        .iter()
        .map(|row| row.timestamp.saturating_add(KEEP_MERGED))
        .max();
    let mut merged_bytes = Vec::with_capacity(merged.len() * MERGED_BYTES);
    for row in &merged {
        merged_bytes.extend_from_slice(&row.hash.to_le_bytes());
        merged_bytes.extend_from_slice(&row.timestamp.to_le_bytes());
        merged_bytes.extend_from_slice(&row.origin.to_le_bytes());
    }
    let mut bytes = Vec::with_capacity(versions.len() * 16);
    for (hash, timestamp) in &versions {
        bytes.extend_from_slice(&hash.to_le_bytes());
        bytes.extend_from_slice(&timestamp.to_le_bytes());
    }
    let row: [Cell<'_>; COLUMNS] = [
        Cell::Bigint(i64::try_from(xid()).unwrap_or(i64::MAX)),
        Cell::Bigint(kept.map_or(newest, |kept| kept.max(newest))),
        Cell::Bytes(&bytes),
        if merged.is_empty() {
            Cell::Null
        } else {
            Cell::Bytes(&merged_bytes)
        },
    ];
    table_scan::insert(own_table("batch")?, std::iter::once(row));
    registry::count_batch();
    Ok(())
}

/// Reads the versions of a batch, sorted by hash; without an id, those of any batch.
fn read(xid: Option<u64>) -> Result<Option<Versions>, PgError> {
    let index =
        braid_postgres::names::find_table("braid", "batch_pkey")?.unwrap_or(pg_sys::InvalidOid);
    let by = xid.map(|xid| By {
        index,
        value: i64::try_from(xid).unwrap_or(i64::MAX),
    });
    let mut versions = None;
    // A batch that was committed together with the row in question must be visible.
    table_scan::each::<COLUMNS>(own_table("batch")?, by, Sees::Committed, |row| {
        let times = row.with_bytes(TIMES, |bytes| {
            let (pairs, _) = bytes.as_chunks::<16>();
            pairs.iter().map(read_time).collect()
        });
        let merged = row.with_bytes(MERGED, |bytes| {
            let (rows, _) = bytes.as_chunks::<MERGED_BYTES>();
            let mut rows: Vec<Merged> = rows.iter().map(read_merged).collect();
            rows.sort_unstable_by_key(|row| row.hash);
            rows
        });
        versions = Some(Versions {
            times: times.unwrap_or_default(),
            merged: merged.unwrap_or_default(),
        });
        ControlFlow::Break(())
    });
    Ok(versions)
}

/// Returns the transactions, by their full ids, that have written merged rows.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn merging() -> Result<HashSet<u64>, PgError> {
    let mut found = HashSet::new();
    table_scan::each::<COLUMNS>(own_table("batch")?, None, Sees::Committed, |row| {
        pgrx::check_for_interrupts!();
        let ([xid, ..], [.., none]) = (row.values, row.nulls);
        if !none {
            found.insert(table_scan::int8(xid).cast_unsigned());
        }
        ControlFlow::Continue(())
    });
    Ok(found)
}

fn read_time(pair: &[u8; 16]) -> (u64, i64) {
    let [a, b, c, d, e, f, g, h, rest @ ..] = *pair;
    (
        u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        i64::from_le_bytes(rest),
    )
}

fn read_merged(row: &[u8; MERGED_BYTES]) -> Merged {
    let [head @ .., low, high] = *row;
    let (hash, timestamp) = read_time(&head);
    Merged {
        hash,
        timestamp,
        origin: u16::from_le_bytes([low, high]),
    }
}
