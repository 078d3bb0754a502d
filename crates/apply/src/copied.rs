//! Versions of rows that an initial copy has brought (`workers/copy/versions.rs` writes them down). The commit of the copy tells none; and a
//! change of a third node that comes after it may be older than what was copied.
//!
//! A row is known by the hashes that its key has in the table that it was copied from ([`From::hashes`]): so deletions can be brought along
//! too, of which the provider has nothing but these. Where keys are stored differently there (another encoding, an enum)
//! nothing is found: then such a row is older than whatever comes.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use braid_node::subscription::local_node;
use braid_node::taken_row::Author;
use braid_node::tombstone::{self, CopiedVersion};
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, Is, Sees, low};
use braid_postgres::xid::full;
use braid_postgres::{compat, latch};
use pgrx::pg_sys;

use super::batch::{self, KnownVersions, WrittenVersions};
use super::key_hash::{
    KeyHashes, copied_hash, key_hashes_as, key_hashes_of_row, row_hash, row_hash_by,
    stored_row_hash, table_hash,
};
use super::lookup::writer;
use super::partition::with_ancestors;
use super::relation::LocalRelation;
use super::scan;
use super::version::{OriginNames, Stamp, is_copied, known, stamp_of};
use crate::identity_key;

/// A table that somebody has to himself is waited for so long, by who only looks at its rows.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Between two attempts at that.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// From where rows were copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct From {
    /// OID of the table here.
    relation: u32,
    /// OID of the one there.
    table: u32,
}

impl From {
    /// What a copied row is known by here, of which `there` gives the hashes in a table with that OID.
    pub fn hashes(self, there: impl FnOnce(u32) -> Option<KeyHashes>) -> impl Iterator<Item = u64> {
        let hashes = there(self.table).into_iter().flat_map(KeyHashes::each);
        hashes.map(move |hash| copied_hash(self.relation, hash))
    }

    /// What a copied row of a table without a key is known by, whose hash is the same everywhere.
    #[must_use]
    pub fn row_hash(self, hash: u64) -> u64 {
        copied_hash(self.relation, hash)
    }

    /// The same of all rows of the table.
    #[must_use]
    pub fn table_hash(self) -> u64 {
        copied_hash(self.relation, table_hash(self.table))
    }
}

/// From where rows of this table, or of those of which it is a partition, were copied that are remembered. In a transaction, with the
/// process's own rights.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn tables(relation: pg_sys::Oid) -> Result<Vec<From>, PgError> {
    let (table, index) = (own_table("copied_table")?, own_table("copied_table_pkey")?);
    let mut found = Vec::new();
    // SAFETY: in a transaction.
    for relation in unsafe { with_ancestors(relation) } {
        // SAFETY: in a transaction; the key begins with the relation, and the table's OID there comes next.
        unsafe {
            table_scan::find(
                table,
                index,
                &[Is::Oid(1, relation)],
                Sees::Committed,
                |row| {
                    found.extend(row.get(1).copied().flatten().map(|table| From {
                        relation: relation.to_u32(),
                        table: low(table),
                    }));
                    ControlFlow::Continue(())
                },
            );
        }
    }
    Ok(found)
}

/// The version of a row whose writer, `xid`, tells none.
///
/// # Errors
/// Whatever PostgreSQL raises.
///
/// # Safety
/// In a transaction; the slot holds a row of the table of `plan`, which is open.
pub unsafe fn refine(
    plan: &LocalRelation,
    xid: pg_sys::TransactionId,
    slot: *mut pg_sys::TupleTableSlot,
) -> Result<Stamp, PgError> {
    if plan.copied_from.is_empty() || !is_copied(xid) {
        return Ok(Stamp::Unversioned);
    }
    if plan.key.is_none() {
        // SAFETY: as the caller says.
        return unsafe { refine_identical(plan, slot) };
    }
    let from = plan.copied_from.iter();
    // SAFETY: as the caller says.
    find(
        from.flat_map(|from| {
            from.hashes(|table| Some(unsafe { key_hashes_as(table, plan, slot) }))
        }),
    )
}

/// The same where the table has no key. Of rows that are identical nothing tells which has which version: the oldest leave first, so those that are
/// left have the newest of them; and what has none is older than all that have one.
///
/// # Safety
/// As [`refine`].
unsafe fn refine_identical(
    plan: &LocalRelation,
    slot: *mut pg_sys::TupleTableSlot,
) -> Result<Stamp, PgError> {
    // SAFETY: as the caller says; what is allocated goes with the transaction.
    let before = unsafe { pg_sys::MemoryContextSwitchTo(pg_sys::CurTransactionContext) };
    // SAFETY: as the caller says.
    let hash = unsafe { row_hash_by(plan, slot) };
    let relations: HashSet<u64> = plan
        .copied_from
        .iter()
        .map(|from| from.row_hash(hash))
        .collect();
    let mut versions = Vec::new();
    for hash in relations {
        versions.extend(tombstone::find_all_copied(hash)?);
    }
    let mut stamp = Stamp::Unversioned;
    if !versions.is_empty() {
        versions.sort_unstable();
        // SAFETY: the table is open.
        let here = with_table(plan.oid, |table| unsafe { copies_of(table, plan, hash) })?;
        let oldest = versions.len().checked_sub(here);
        if let Some(oldest) = oldest.and_then(|place| versions.get(place)) {
            stamp = known(oldest.timestamp, oldest.origin);
        }
    }
    // SAFETY: the caller's.
    unsafe { pg_sys::MemoryContextSwitchTo(before) };
    Ok(stamp)
}

/// How many rows with this hash a copy has brought, and are there.
///
/// # Safety
/// The table is open, and that of the plan.
unsafe fn copies_of(
    table: pg_sys::Relation,
    plan: &LocalRelation,
    hash: u64,
) -> Result<usize, PgError> {
    // SAFETY: as the caller says. The snapshot is registered, and the scan ended, unless an error ends the transaction.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
        let slot = pg_sys::table_slot_create(table, std::ptr::null_mut());
        let rows = scan::begin(table, snapshot)?;
        let memory = super::memory_context(c"braid copied rows that are alike");
        let mut count = 0;
        while scan::next(table, rows, slot) {
            pgrx::check_for_interrupts!();
            if !is_copied(writer(slot)) {
                continue;
            }
            let before = pg_sys::MemoryContextSwitchTo(memory);
            count += usize::from(row_hash_by(plan, slot) == hash);
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::MemoryContextReset(memory);
        }
        pg_sys::MemoryContextDelete(memory);
        scan::end(table, rows);
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        pg_sys::UnregisterSnapshot(snapshot);
        Ok(count)
    }
}

fn find(hashes: impl Iterator<Item = u64>) -> Result<Stamp, PgError> {
    // SAFETY: in a transaction; what is allocated goes with it.
    let before = unsafe { pg_sys::MemoryContextSwitchTo(pg_sys::CurTransactionContext) };
    let mut newest = Ok(None);
    for hash in hashes {
        match tombstone::find_copied(hash) {
            Ok(found) => newest = newest.map(|newest: Option<_>| newest.max(found)),
            Err(error) => newest = Err(error),
        }
    }
    // SAFETY: the caller's.
    unsafe { pg_sys::MemoryContextSwitchTo(before) };
    Ok(newest?.map_or(Stamp::Unversioned, |found: CopiedVersion| {
        if found.merged {
            // Also where it is the transaction in hand that has this version: the row had all of that in it when it was copied.
            Stamp::Merged(found.timestamp, found.origin)
        } else {
            known(found.timestamp, found.origin)
        }
    }))
}

/// What is known of a row by its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowVersion {
    /// Hashes of its table and key; `None` where it has no key, or that is too large.
    pub hashes: Option<KeyHashes>,
    /// By what it is known everywhere, where the table has no key.
    pub row_hash: Option<u64>,
    /// When its transaction was committed, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// At which node.
    pub node: String,
    /// The row was made of several: that node has not seen all of it.
    pub merged: bool,
}

/// What one statement has looked up.
#[derive(Debug)]
struct Looked {
    /// When the statement began.
    at: pg_sys::TimestampTz,
    names: OriginNames,
    tables: HashMap<pg_sys::Oid, Vec<From>>,
    merging: Option<Merging>,
}

/// Who has written rows that were made of several.
#[derive(Debug)]
struct Merging {
    /// Transactions, by their full ids.
    transactions: HashSet<u64>,
    /// Copies may have.
    copies: bool,
}

thread_local! {
    static KNOWN: RefCell<KnownVersions> = RefCell::default();
    static LOOKED: RefCell<Option<Looked>> = const { RefCell::new(None) };
}

/// Does `work` with what this process remembers of batches, where it has written no rows itself.
fn with_known<T>(work: impl FnOnce(&mut KnownVersions, &WrittenVersions) -> T) -> T {
    let none = WrittenVersions::default();
    KNOWN.with_borrow_mut(|known| work(known, &none))
}

fn looked<T>(work: impl FnOnce(&mut Looked) -> Result<T, PgError>) -> Result<T, PgError> {
    // SAFETY: reads a variable of the process.
    let at = unsafe { pg_sys::GetCurrentStatementStartTimestamp() };
    let known = LOOKED.with_borrow(|looked| looked.as_ref().is_some_and(|looked| looked.at == at));
    if !known {
        let names = OriginNames::new(&local_node()?.unwrap_or_default());
        let tables = HashMap::new();
        LOOKED.set(Some(Looked {
            at,
            names,
            tables,
            merging: None,
        }));
    }
    LOOKED.with_borrow_mut(|looked| match looked {
        Some(looked) => work(looked),
        None => Err(PgError::new("XX000", "nothing was looked up")),
    })
}

/// The version of the row at a place of a table, for `role`. `None` where there is no such row, or nobody knows its version. With the
/// rights of the extension's owner.
///
/// # Errors
/// 42809 for what is no ordinary table; 42501 for who may not read it; whatever PostgreSQL raises.
pub fn row_version(
    relation: pg_sys::Oid,
    place: pg_sys::ItemPointerData,
    role: pg_sys::Oid,
) -> Result<Option<RowVersion>, PgError> {
    let mode = pg_sys::AclMode::from(pg_sys::ACL_SELECT);
    with_table(relation, |table| {
        // SAFETY: the table is open; in a transaction with a snapshot.
        unsafe {
            if (*(*table).rd_rel).relkind.cast_unsigned() != b'r' {
                return Err(
                    PgError::new("42809", "only rows of ordinary tables have a version").with_hint(
                        "Of a partitioned table, ask for the partition: tableoid, ctid.",
                    ),
                );
            }
            if pg_sys::pg_class_aclcheck(relation, role, mode) != pg_sys::AclResult::ACLCHECK_OK {
                return Err(PgError::new("42501", "permission denied for the table")
                    .with_hint("Grant SELECT on it to whoever asks for versions of its rows."));
            }
            let snapshot = pg_sys::GetActiveSnapshot();
            at_place(table, place, snapshot, |slot| version_in(table, slot))
        }
    })
}

/// Whether any row that this transaction wrote may be one that was made of several. With the rights of the extension's owner.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn has_merged_rows(xid: pg_sys::TransactionId) -> Result<bool, PgError> {
    looked(|looked| {
        let merging = match looked.merging.take() {
            Some(known) => known,
            None => Merging {
                transactions: batch::merging()?,
                copies: tombstone::has_copied_merged()?,
            },
        };
        let merging = looked.merging.insert(merging);
        Ok(merging.copies && is_copied(xid)
            || !merging.transactions.is_empty() && merging.transactions.contains(&full(xid)))
    })
}

/// The hashes of the key of the row at a place of an ordinary table, also of one that was just written there. `None` where there is no such row, or it has no key.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn key_hashes_at(
    relation: pg_sys::Oid,
    place: pg_sys::ItemPointerData,
) -> Result<Option<KeyHashes>, PgError> {
    with_table(relation, |table| {
        // SAFETY: the table is open; in a transaction with a snapshot.
        unsafe {
            at_place(table, place, &raw mut pg_sys::SnapshotAnyData, |slot| {
                Ok(hasher(table, slot)(relation.to_u32()))
            })
        }
    })
}

/// Rows of tables without a key that are dead, but still there.
#[derive(Debug, Default)]
pub struct DeadRows {
    copied_from: HashMap<pg_sys::Oid, Vec<From>>,
    /// Tables that somebody else had to himself.
    locked: HashSet<pg_sys::Oid>,
}

impl DeadRows {
    /// The hash of all of the row that is, or was, at a place of a table, and who wrote it; `None` there: older than all. Nothing where the table is in another file by
    /// now, or is no such table any more; or where somebody else has it to himself, and keeps it.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn at(
        &mut self,
        relation: pg_sys::Oid,
        file: compat::FileLocator,
        place: pg_sys::ItemPointerData,
    ) -> Result<Option<(u64, Option<Author>)>, PgError> {
        let share = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
        let since = Instant::now();
        // Whoever empties a table may be waiting for this process.
        // SAFETY: in a transaction, which releases the lock.
        while !unsafe { pg_sys::ConditionalLockRelationOid(relation, share) } {
            if self.locked.contains(&relation) || since.elapsed() > LOCK_PATIENCE {
                self.locked.insert(relation);
                return Ok(None);
            }
            latch::wait(Some(LOCK_PAUSE));
        }
        // SAFETY: in a transaction; the table is closed before it ends, or with an error.
        unsafe {
            let table = pg_sys::try_relation_open(relation, share);
            if table.is_null() {
                return Ok(None);
            }
            let is_keyless = (*(*table).rd_rel).relreplident.cast_unsigned() == b'f'
                && compat::is_in_file(table, &file)
                && identity_key(table).is_none();
            let found = if is_keyless {
                let any = &raw mut pg_sys::SnapshotAnyData;
                at_place(table, place, any, |slot| {
                    let hash = row_hash(table, slot);
                    Ok(Some((hash, self.author(relation, slot, hash)?)))
                })
            } else {
                Ok(None)
            };
            pg_sys::relation_close(table, share);
            found
        }
    }

    /// Who wrote the row in a slot, which has this hash.
    ///
    /// # Safety
    /// The slot holds a row of the table without a key that has this OID; in a transaction.
    unsafe fn author(
        &mut self,
        relation: pg_sys::Oid,
        slot: *mut pg_sys::TupleTableSlot,
        hash: u64,
    ) -> Result<Option<Author>, PgError> {
        // SAFETY: as the caller says.
        let xid = unsafe { writer(slot) };
        let stamp = match stamp_of(xid) {
            Stamp::Unversioned if is_copied(xid) => {
                let from = match self.copied_from.entry(relation) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(place) => place.insert(tables(relation)?),
                };
                if from.is_empty() {
                    return Ok(None);
                }
                let hashes: HashSet<u64> = from.iter().map(|from| from.row_hash(hash)).collect();
                let mut oldest: Option<CopiedVersion> = None;
                for hash in hashes {
                    // Of those that are identical the oldest leaves first.
                    let versions = tombstone::find_all_copied(hash)?.into_iter();
                    oldest = versions.chain(oldest).min();
                }
                return Ok(oldest.map(|version| (version.timestamp, version.origin)));
            }
            stamp @ Stamp::Known(_, origin) if origin != 0 => {
                // SAFETY: as the caller says.
                let stored = || unsafe { stored_row_hash(relation.to_u32(), slot) };
                with_known(|known, none| known.refine(none, xid, stamp, stored))?
            }
            stamp => stamp,
        };
        Ok(stamp.known())
    }
}

pub(super) fn with_table<T>(
    relation: pg_sys::Oid,
    look: impl FnOnce(pg_sys::Relation) -> Result<T, PgError>,
) -> Result<T, PgError> {
    let share = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
    // SAFETY: in a transaction; the table is closed before it ends. An error ends the transaction, and with it the lock.
    unsafe {
        let table = pg_sys::relation_open(relation, share);
        let found = look(table);
        pg_sys::relation_close(table, share);
        found
    }
}

/// # Safety
/// The relation is an open table; in a transaction with an active snapshot.
unsafe fn at_place<T>(
    table: pg_sys::Relation,
    mut place: pg_sys::ItemPointerData,
    snapshot: pg_sys::Snapshot,
    look: impl FnOnce(*mut pg_sys::TupleTableSlot) -> Result<Option<T>, PgError>,
) -> Result<Option<T>, PgError> {
    // SAFETY: as the caller says; the slot is of the table's kind, and freed here. A line pointer that holds no row gives none.
    unsafe {
        let blocks =
            pg_sys::RelationGetNumberOfBlocksInFork(table, pg_sys::ForkNumber::MAIN_FORKNUM);
        let Some(fetch) = (*(*table).rd_tableam).tuple_fetch_row_version else {
            return Ok(None);
        };
        if pgrx::itemptr::item_pointer_get_block_number_no_check(place) >= blocks
            || place.ip_posid == 0
        {
            return Ok(None);
        }
        let slot = pg_sys::table_slot_create(table, std::ptr::null_mut());
        let there =
            pg_sys::ffi::pg_guard_ffi_boundary(|| fetch(table, &raw mut place, snapshot, slot));
        let found = if there { look(slot) } else { Ok(None) };
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        found
    }
}

/// # Safety
/// The slot holds a row of the table, which is open.
pub(super) unsafe fn version_in(
    table: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
) -> Result<Option<RowVersion>, PgError> {
    // SAFETY: as the caller says; one value and one mark a column.
    unsafe {
        let oid = (*table).rd_id;
        let hashes_as = hasher(table, slot);
        let hashes = hashes_as(oid.to_u32());
        // Where no change says whole old rows, none is ever taken out.
        let is_keyless = (*(*table).rd_rel).relreplident.cast_unsigned() == b'f';
        let row_hash = (is_keyless && identity_key(table).is_none()).then(|| row_hash(table, slot));
        let xid = writer(slot);
        let stamp = match (stamp_of(xid), hashes) {
            (Stamp::Unversioned, _) if is_copied(xid) => {
                let copied_from = looked(|looked| match looked.tables.get(&oid) {
                    Some(known) => Ok(known.clone()),
                    None => {
                        let found = tables(oid)?;
                        looked.tables.insert(oid, found.clone());
                        Ok(found)
                    }
                })?;
                find(
                    copied_from
                        .into_iter()
                        .flat_map(|from| from.hashes(&hashes_as)),
                )?
            }
            (stamp @ Stamp::Known(_, origin), Some(hashes)) if origin != 0 => {
                with_known(|known, none| known.refine(none, xid, stamp, || hashes.stored))?
            }
            (stamp @ Stamp::Known(_, origin), None) if origin != 0 && row_hash.is_some() => {
                let stored = || stored_row_hash(oid.to_u32(), slot);
                with_known(|known, none| known.refine(none, xid, stamp, stored))?
            }
            (stamp, _) => stamp,
        };
        let Some((timestamp, origin)) = stamp.known() else {
            return Ok(None);
        };
        let node = looked(|looked| Ok(looked.names.node(origin).to_owned()))?;
        Ok(Some(RowVersion {
            hashes,
            row_hash,
            timestamp,
            node,
            merged: matches!(stamp, Stamp::Merged(..) | Stamp::OwnMerged(..)),
        }))
    }
}

/// The hashes of a row's key, as of a row of the table with the given OID; the row is read once.
///
/// # Safety
/// The slot holds a row of the table, which is open; both stay so as long as hashes are asked for. In a transaction.
pub(super) unsafe fn hasher(
    table: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
) -> impl Fn(u32) -> Option<KeyHashes> {
    // SAFETY: as the caller says; one value and one mark a column.
    unsafe {
        let descriptor = (*table).rd_att;
        let key = identity_key(table);
        let (values, nulls): (Vec<_>, Vec<_>) = super::image::fields(slot)
            .into_iter()
            .map(|value| (value.unwrap_or(pg_sys::Datum::null()), value.is_none()))
            .unzip();
        move |as_table| {
            key_hashes_of_row(
                as_table.into(),
                descriptor,
                key.as_deref()?,
                &values,
                &nulls,
            )
        }
    }
}
