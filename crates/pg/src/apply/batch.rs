//! Batches: transactions of one origin that are committed here as one, and the true versions of their rows. Run by the appliers.
//!
//! A local commit has one commit timestamp, but a row's version is that of the source's transaction that wrote it. So the commit
//! that ends a batch carries the newest timestamp, and, in the same transaction, a row of `braid.batch` says for each row of
//! the batch that is older which it has: by a hash of table and key, as the row's place changes when a table is rewritten.
//! Two rows with one hash in one batch are told apart by neither; the later one's version then counts for both.
//!
//! `versions` is pairs of little-endian 64-bit numbers: the hash, and the timestamp in microseconds since 1970-01-01 UTC.
//!
//! It is asked only when versions decide: a change that comes straight from the origin that wrote the row is newer anyway.

use std::rc::Rc;

use pgrx::pg_sys;

use super::number_map::NumberMap;
use super::version::Stamp;
use crate::compat;
use crate::error::PgError;
use crate::registry;

/// Batches whose versions are remembered by a process.
const REMEMBERED: usize = 64;
/// F_INT8EQ of src/include/utils/fmgroids.h.
const INT8_EQUAL: u32 = 467;

type Versions = Rc<[(u64, i64)]>;

/// The batch in the making, and what is known of others.
#[derive(Debug, Default)]
pub struct Batches {
    making: Option<Vec<(u64, i64)>>,
    known: NumberMap<u32, Versions>,
    /// Whether there were batches when this process looked first.
    found_some: Option<bool>,
}

impl Batches {
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
        if let Some(making) = self.making.as_mut() {
            making.push((hash, timestamp));
        }
    }

    /// The transaction was rolled back.
    pub fn forget(&mut self) {
        self.making = None;
    }

    /// Write down the versions of the batch that is about to be committed with the timestamp `newest`.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn store(&mut self, newest: i64) -> Result<(), PgError> {
        let versions = self.take();
        // SAFETY: in a transaction.
        let xid = || unsafe { pg_sys::GetTopFullTransactionId() }.value;
        store(xid, versions, newest)
    }

    /// What was written since [`Batches::begin`], which ends.
    pub fn take(&mut self) -> Vec<(u64, i64)> {
        self.making.take().unwrap_or_default()
    }

    /// Whether any transaction may have been a batch.
    fn may_be(&mut self) -> Result<bool, PgError> {
        if registry::batches() > 0 {
            return Ok(true);
        }
        if let Some(found) = self.found_some {
            return Ok(found);
        }
        // SAFETY: in a transaction.
        let found = unsafe { read(None)?.is_some() };
        self.found_some = Some(found);
        Ok(found)
    }

    /// The version of a row that transaction `xid` wrote, given that of the transaction. `hash` gives the row's.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn refine(
        &mut self,
        xid: pg_sys::TransactionId,
        stamp: Stamp,
        hash: impl FnOnce() -> u64,
    ) -> Result<Stamp, PgError> {
        let Stamp::Known(_, origin) = stamp else {
            return Ok(stamp);
        };
        // SAFETY: in a transaction; what is allocated goes with it, instead of staying with the look-up that this is part of.
        let before = unsafe { pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext) };
        let refined = self.look_up(xid, stamp, origin, hash);
        // SAFETY: the caller's.
        unsafe { pg_sys::MemoryContextSwitchTo(before) };
        refined
    }

    fn look_up(
        &mut self,
        xid: pg_sys::TransactionId,
        stamp: Stamp,
        origin: pg_sys::RepOriginId,
        hash: impl FnOnce() -> u64,
    ) -> Result<Stamp, PgError> {
        if !self.may_be()? {
            return Ok(stamp);
        }
        let short = xid.into_inner();
        let versions = match self.known.get(&short) {
            Some(versions) => Rc::clone(versions),
            None => {
                // SAFETY: in a transaction.
                let versions: Versions =
                    unsafe { read(Some(full(xid)))? }.map_or_else(|| Rc::from([]), Rc::from);
                if self.known.len() >= REMEMBERED {
                    self.known.clear();
                }
                self.known.insert(short, Rc::clone(&versions));
                versions
            }
        };
        if versions.is_empty() {
            return Ok(stamp);
        }
        let hash = hash();
        let found = versions
            .binary_search_by_key(&hash, |(hash, _)| *hash)
            .ok()
            .and_then(|at| versions.get(at));
        Ok(found.map_or(stamp, |(_, timestamp)| Stamp::Known(*timestamp, origin)))
    }
}

/// Write down the versions that rows of transaction `xid` have, where they differ from that of its commit, which is to carry the
/// timestamp `newest`.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn store(
    xid: impl FnOnce() -> u64,
    mut versions: Vec<(u64, i64)>,
    newest: i64,
) -> Result<(), PgError> {
    // Of one row the last counts; sorting is stable.
    versions.reverse();
    versions.sort_by_key(|(hash, _)| *hash);
    versions.dedup_by_key(|(hash, _)| *hash);
    versions.retain(|(_, timestamp)| *timestamp != newest);
    if versions.is_empty() {
        return Ok(());
    }
    let mut bytes = Vec::with_capacity(versions.len() * 16);
    for (hash, timestamp) in &versions {
        bytes.extend_from_slice(&hash.to_le_bytes());
        bytes.extend_from_slice(&timestamp.to_le_bytes());
    }
    // SAFETY: in a transaction, as the process's own user; the values have the types of the table's columns.
    unsafe {
        let (relation, _) = open(pg_sys::RowExclusiveLock)?;
        let mut values = [
            pg_sys::Datum::from(i64::try_from(xid()).unwrap_or(i64::MAX)),
            pg_sys::Datum::from(newest),
            bytea(&bytes)?,
        ];
        let mut nulls = [false; 3];
        let tuple =
            pg_sys::heap_form_tuple((*relation).rd_att, values.as_mut_ptr(), nulls.as_mut_ptr());
        pg_sys::CatalogTupleInsert(relation, tuple);
        pg_sys::heap_freetuple(tuple);
        pg_sys::table_close(relation, lock(pg_sys::NoLock));
    }
    registry::count_batch();
    Ok(())
}

fn lock(mode: u32) -> i32 {
    i32::try_from(mode).unwrap_or(1)
}

/// The full id of a transaction that ended: FullTransactionIdFromAllowableAt of src/include/access/transam.h, 18.
fn full(xid: pg_sys::TransactionId) -> u64 {
    // SAFETY: a read of shared memory.
    let next = unsafe { pg_sys::ReadNextFullTransactionId() }.value;
    let (epoch, short) = (next >> 32, next & 0xFFFF_FFFF);
    let xid = u64::from(xid.into_inner());
    let epoch = if xid > short {
        epoch.saturating_sub(1)
    } else {
        epoch
    };
    (epoch << 32) | xid
}

/// `braid.batch`, opened, and its primary key.
///
/// # Safety
/// In a transaction.
unsafe fn open(mode: u32) -> Result<(pg_sys::Relation, pg_sys::Oid), PgError> {
    let Some(oid) = super::relation::find("braid", "batch")? else {
        return Err(PgError::new("42P01", "table braid.batch does not exist")
            .with_hint("Update the extension with ALTER EXTENSION braid UPDATE."));
    };
    // SAFETY: in a transaction.
    unsafe {
        let relation = pg_sys::table_open(oid, lock(mode));
        Ok((relation, compat::primary_key_index(relation)))
    }
}

/// The versions of a batch, sorted by hash; without an id those of any.
///
/// # Safety
/// In a transaction.
unsafe fn read(xid: Option<u64>) -> Result<Option<Vec<(u64, i64)>>, PgError> {
    // SAFETY: the scan ends before the table is closed; the tuple is read before the scan ends.
    unsafe {
        let (relation, index) = open(pg_sys::AccessShareLock)?;
        // What was committed with the row that is looked at has to be seen.
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
        let mut key = pg_sys::ScanKeyData::default();
        let count = i32::from(xid.is_some());
        if let Some(xid) = xid {
            pg_sys::ScanKeyInit(
                &raw mut key,
                1,
                3, // BTEqualStrategyNumber
                pg_sys::Oid::from(INT8_EQUAL),
                pg_sys::Datum::from(i64::try_from(xid).unwrap_or(i64::MAX)),
            );
        }
        let scan =
            pg_sys::systable_beginscan(relation, index, count > 0, snapshot, count, &raw mut key);
        let tuple = pg_sys::systable_getnext(scan);
        let mut versions = None;
        if !tuple.is_null() {
            let mut values = [pg_sys::Datum::null(); 3];
            let mut nulls = [true; 3];
            pg_sys::heap_deform_tuple(
                tuple,
                (*relation).rd_att,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            let [_, _, column] = values;
            let packed = pg_sys::pg_detoast_datum_packed(column.cast_mut_ptr());
            let bytes = pgrx::varlena_to_byte_slice(packed);
            let (pairs, _) = bytes.as_chunks::<16>();
            versions = Some(
                pairs
                    .iter()
                    .map(|pair| {
                        let [a, b, c, d, e, f, g, h, rest @ ..] = *pair;
                        (
                            u64::from_le_bytes([a, b, c, d, e, f, g, h]),
                            i64::from_le_bytes(rest),
                        )
                    })
                    .collect(),
            );
            if packed.cast_const() != column.cast_mut_ptr::<pg_sys::varlena>().cast_const() {
                // A transaction may meet rows of any number of batches.
                pg_sys::pfree(packed.cast());
            }
        }
        pg_sys::systable_endscan(scan);
        pg_sys::UnregisterSnapshot(snapshot);
        pg_sys::table_close(relation, lock(pg_sys::AccessShareLock));
        Ok(versions)
    }
}

/// A bytea in the current memory context.
fn bytea(bytes: &[u8]) -> Result<pg_sys::Datum, PgError> {
    use pgrx::IntoDatum;
    bytes
        .into_datum()
        .ok_or_else(|| PgError::new("XX000", "no value for a byte string"))
}
