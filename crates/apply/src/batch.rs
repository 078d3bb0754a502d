//! Batches: transactions of one origin that are committed here as one, and the true versions of
//! their rows. Run by the appliers.
//!
//! A local commit has one commit timestamp, but a row's version is that of the source's transaction
//! that wrote it. So the commit that ends a batch carries the newest timestamp, and, in the same
//! transaction, a row of `braid.batch` says for each row of the batch that is older which it has:
//! by a hash of table and key, as the row's place changes when a table is rewritten. Two rows with
//! one hash in one batch are told apart by neither; the later one's version then counts for both.
//! Where that matters, as several nodes write to a table without a key, a batch in which two
//! transactions have written identical rows is given up, and they are applied one by one.
//!
//! `versions` is pairs of little-endian 64-bit numbers: the hash, and the timestamp in microseconds
//! since 1970-01-01 UTC.
//!
//! Rows that the user's function made of two (`braid_bgworker::merge`), or a losing change has
//! added to (`braid_bgworker::column_rule`), are written down too, batch or not, in `merged`: hash,
//! timestamp, and 16 bits for the origin's number here, little-endian. These have a version of
//! another origin, or one that does not tell all that is in them. They are kept for longer: until
//! whoever wrote one half has surely heard of the other.
//!
//! It is asked only when versions decide: a change that comes straight from the origin that wrote
//! the row is newer anyway.

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

/// Batches whose versions are remembered by a process.
const REMEMBERED: usize = 64;
/// Columns of `braid.batch`.
const COLUMNS: usize = 4;
/// Of these, from 0, `versions` and `merged`.
const TIMES: usize = 2;
const MERGED: usize = 3;
/// Bytes of a row in `merged`.
const MERGED_BYTES: usize = 18;
/// For how long merged rows are known to be some, in microseconds, beyond what holds for batches:
/// 30 days.
pub const KEEP_MERGED: i64 = 30 * 86_400 * 1_000_000;

/// A row that was made of several, and its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merged {
    hash: u64,
    timestamp: i64,
    origin: ReplOriginId,
}

/// Versions that rows have, where the commit does not tell.
#[derive(Debug, Clone, Default)]
pub struct Versions {
    /// Hash and timestamp of each row.
    times: Vec<(u64, i64)>,
    /// Sorted by hash.
    merged: Vec<Merged>,
}

impl Versions {
    /// What was written after that, too.
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

/// Versions of rows that the attempt in hand has written, as far as its commit does not tell them.
#[derive(Debug, Default)]
pub struct WrittenVersions {
    /// Those of the batch in the making.
    making: Option<Vec<(u64, i64)>>,
    /// Rows of tables without a key that the batch in the making has written: how many by which
    /// hash, and the time of the transaction.
    alike: NumberMap<u64, (i64, usize)>,
    /// Some of them are identical, but of several transactions.
    is_ambiguous: bool,
    /// Of the transaction in hand, batch or not: by hash.
    merged: NumberMap<u64, Merged>,
}

/// Committed batches, as far as a process remembers them.
#[derive(Debug, Default)]
pub struct KnownVersions {
    known: NumberMap<u32, Rc<Versions>>,
    /// Whether there were batches when this process looked first.
    found_some: Option<bool>,
}

impl WrittenVersions {
    /// What is written from here on belongs to one batch.
    pub fn begin(&mut self) {
        self.making = Some(Vec::new());
    }

    /// Whether a batch is in the making.
    #[must_use]
    pub fn is_making(&self) -> bool {
        self.making.is_some()
    }

    /// The row with this hash was written by a transaction of this time.
    pub fn note(&mut self, hash: u64, timestamp: i64) {
        if !self.merged.is_empty() {
            self.merged.remove(&hash);
        }
        self.note_gone(hash, timestamp);
    }

    /// A row of a table without a key, with this hash, was written by a transaction of this time.
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

    /// Such a row, which this local transaction has written, is gone. The time of the transaction
    /// that it came with, if there is a batch.
    pub fn take_alike(&mut self, hash: u64) -> Option<i64> {
        let (timestamp, count) = self.alike.get_mut(&hash).filter(|(_, count)| *count > 0)?;
        *count -= 1;
        Some(*timestamp)
    }

    /// The row that had this hash has another key now, by a transaction of this time.
    pub fn note_gone(&mut self, hash: u64, timestamp: i64) {
        if let Some(making) = self.making.as_mut() {
            making.push((hash, timestamp));
        }
    }

    /// The row with this hash, just written, was made of several, and has this version.
    pub fn note_merged(&mut self, hash: u64, timestamp: i64, origin: ReplOriginId) {
        let row = Merged {
            hash,
            timestamp,
            origin,
        };
        self.merged.insert(hash, row);
    }

    /// Whether the transaction in hand has rows that were made of several.
    #[must_use]
    pub fn has_merged(&self) -> bool {
        !self.merged.is_empty()
    }

    fn forget_alike(&mut self) {
        self.alike.clear();
        self.is_ambiguous = false;
    }

    /// Write down the versions of the batch that is about to be committed with the timestamp
    /// `newest`.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises; 40001 where they can't be written down.
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

    /// The version of a row that transaction `xid` wrote, given that of the transaction. `written`
    /// has the versions of the attempt in hand, `hash` gives the row's.
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
            // By a piece of it that is committed, with what it has merged.
            Stamp::Own => {}
            Stamp::Unversioned | Stamp::Merged(..) | Stamp::OwnMerged(..) => return Ok(stamp),
        }
        // Allocations go with the transaction, instead of staying with the look-up that this is
        // part of.
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
            // Between two pieces of the transaction in hand, an older change of another node was
            // merged with what the first one wrote.
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

/// Write down the versions that rows of transaction `xid` have, where they differ from that of its
/// commit, which is to carry the timestamp `newest`.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn store(xid: impl FnOnce() -> u64, versions: Versions, newest: i64) -> Result<(), PgError> {
    let Versions {
        times: mut versions,
        merged,
    } = versions;
    // Of one row the last counts; sorting is stable.
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

/// The versions of a batch, sorted by hash; without an id those of any.
fn read(xid: Option<u64>) -> Result<Option<Versions>, PgError> {
    let index =
        braid_postgres::names::find_table("braid", "batch_pkey")?.unwrap_or(pg_sys::InvalidOid);
    let by = xid.map(|xid| By {
        index,
        value: i64::try_from(xid).unwrap_or(i64::MAX),
    });
    let mut versions = None;
    // A batch that was committed with the row that is looked at has to be seen.
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

/// Transactions, by their full ids, that have written rows that were made of several.
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
