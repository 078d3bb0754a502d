//! Versions of rows of the initial copy (`workers/copy/versions.rs` stores them). The commit of the
//! copy does not tell a row's version, and a later change of a third node may be older than the
//! row.
//!
//! A record has the hashes of the row's key in the table that it was copied from
//! ([`From::hashes`]). So deletions can be copied too: of a deleted row the provider has only these
//! hashes. If keys are stored differently at the provider (another encoding, an enum), nothing is
//! found. Then the row counts as older than every change.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::local_node;
use braid_node::taken_row::Author;
use braid_node::tombstone::{self, CopiedVersion};
use braid_postgres::error::PgError;
use braid_postgres::heap_page::place_of;
use braid_postgres::lock::LockMode;
use braid_postgres::memory::{self, Scratch};
use braid_postgres::names::own_table;
use braid_postgres::relation::{Relation, RelationRef};
use braid_postgres::sequential_scan::SequentialScan;
use braid_postgres::slot::{Slot, Visible};
use braid_postgres::syscache::with_ancestors;
use braid_postgres::table_rights;
use braid_postgres::table_scan::{self, Is, Sees, low};
use braid_postgres::xid::full;
use braid_postgres::{compat, latch, transaction};
use pgrx::pg_sys;

use super::batch::{self, KnownVersions, WrittenVersions};
use super::key_hash::{
    KeyHashes, copied_hash, key_hashes_in_slot, known_by, row_hash, row_hash_by, stored_row_hash,
    table_hash,
};
use super::relation::LocalRelation;
use super::rewrite::{self, Author as Writer};
use super::version::{
    OriginNames, Stamp, is_copied, known, stamp_of, stamp_of_transaction, tells_none,
};
use crate::identity_key;

/// Columns of `braid.copied_table`.
const COLUMNS: usize = 3;
/// Time that a reader of rows waits for a table that another session has locked exclusively.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two attempts to lock it.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Source of copied rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct From {
    /// OID of the local table.
    relation: u32,
    /// OID of the table at the provider.
    table: u32,
}

impl From {
    /// Returns the source of rows of a table that a statement has rewritten: the table itself.
    pub(super) fn itself(relation: pg_sys::Oid) -> Self {
        let relation = relation.to_u32();
        Self {
            relation,
            table: relation,
        }
    }

    /// Returns the hashes by which a copied row is identified here. `there` returns the provider's
    /// hashes for a table with the given OID.
    pub fn hashes<F, T>(self, there: F) -> impl Iterator<Item = u64> + use<F, T>
    where
        F: FnOnce(u32) -> T,
        T: IntoIterator<Item = KeyHashes>,
    {
        let hashes = there(self.table).into_iter().flat_map(KeyHashes::each);
        hashes.map(move |hash| copied_hash(self.relation, hash))
    }

    /// Returns the hash by which a copied row of a table without a key is identified here, given
    /// `hash`, which is the same at all nodes.
    #[must_use]
    pub fn row_hash(self, hash: u64) -> u64 {
        copied_hash(self.relation, hash)
    }

    /// Returns the hash that stands for all rows of the table.
    #[must_use]
    pub fn table_hash(self) -> u64 {
        copied_hash(self.relation, table_hash(self.table))
    }
}

/// Returns the sources of remembered copied rows of this table, or of the tables of which it is a
/// partition. In a transaction, with the process's own rights.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn tables(relation: pg_sys::Oid) -> Result<Vec<From>, PgError> {
    let (table, index) = (own_table("copied_table")?, own_table("copied_table_pkey")?);
    let mut found = Vec::new();
    for relation in with_ancestors(relation) {
        let by = [Is::Oid(1, relation)];
        table_scan::find::<COLUMNS>(table, index, &by, Sees::Committed, |row| {
            found.extend(row.value(1).map(|table| From {
                relation: relation.to_u32(),
                table: low(table),
            }));
            ControlFlow::Continue(())
        });
    }
    Ok(found)
}

/// Source of a row's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// The transaction that wrote the row, as for most rows. The record of a batch may correct it
    /// ([`KnownVersions`]).
    ByTransaction(Stamp),
    /// A record of its own, or none.
    Apart(Stamp),
}

/// Returns the version of a row. `xid` is its writer, `stamp` is [`stamp_of`] of the writer.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn told(
    plan: &LocalRelation,
    xid: pg_sys::TransactionId,
    slot: &Slot,
    stamp: Stamp,
) -> Result<Told, PgError> {
    if stamp != Stamp::Unversioned {
        return Ok(Told::ByTransaction(stamp));
    }
    let itself;
    let sources = match rewrite::author(plan.oid, xid, slot)? {
        Writer::Other => {
            itself = [From::itself(plan.oid)];
            &itself[..]
        }
        Writer::Transaction if is_copied(xid) => &plan.copied_from,
        Writer::Transaction => return Ok(Told::ByTransaction(stamp_of_transaction(xid))),
    };
    let stamp = if sources.is_empty() {
        Stamp::Unversioned
    } else if plan.key.is_none() {
        refine_identical(plan, sources, slot)?
    } else {
        let each = sources.iter();
        find(each.flat_map(|from| from.hashes(|table| known_by(table, plan, slot))))?
    };
    Ok(Told::Apart(stamp))
}

/// As [`told`], for tables without a key. No record says which of several identical rows has which
/// version. The oldest leave first, so the remaining rows have the newest versions. Rows without a
/// version are older than all that have one.
fn refine_identical(plan: &LocalRelation, sources: &[From], slot: &Slot) -> Result<Stamp, PgError> {
    // Allocations are freed with the transaction.
    memory::in_transaction(|| version_of_identical(plan, sources, row_hash_by(plan, slot)))
}

fn version_of_identical(
    plan: &LocalRelation,
    sources: &[From],
    hash: u64,
) -> Result<Stamp, PgError> {
    let relations: HashSet<u64> = sources.iter().map(|from| from.row_hash(hash)).collect();
    let mut versions = Vec::new();
    for hash in relations {
        versions.extend(tombstone::find_all_copied(hash)?);
    }
    let mut stamp = Stamp::Unversioned;
    if !versions.is_empty() {
        versions.sort_unstable();
        let here = with_table(plan.oid, |table| copies_of(table, plan, hash))?;
        let oldest = versions.len().checked_sub(here);
        if let Some(oldest) = oldest.and_then(|place| versions.get(place)) {
            stamp = known(oldest.timestamp, oldest.origin);
        }
    }
    Ok(stamp)
}

/// Returns how many rows with this hash that a copy has brought, or a statement has rewritten,
/// still exist.
fn copies_of(table: RelationRef<'_>, plan: &LocalRelation, hash: u64) -> Result<usize, PgError> {
    table.with_slot(|slot| {
        let mut rows = SequentialScan::of_latest(table, slot)?;
        let mut memory = Scratch::new(c"braid copied rows that are alike");
        let mut count = 0;
        while rows.advance() {
            pgrx::check_for_interrupts!();
            let xid = slot.writer();
            if tells_none(xid) {
                let counts = memory.run(|| {
                    let is_apart =
                        is_copied(xid) || rewrite::author(plan.oid, xid, slot)? == Writer::Other;
                    Ok::<_, PgError>(is_apart && row_hash_by(plan, slot) == hash)
                })?;
                count += usize::from(counts);
            }
        }
        Ok(count)
    })
}

fn find(hashes: impl Iterator<Item = u64>) -> Result<Stamp, PgError> {
    let newest = memory::in_transaction(|| {
        let mut newest = Ok(None);
        for hash in hashes {
            match tombstone::find_copied(hash) {
                Ok(found) => newest = newest.map(|newest: Option<_>| newest.max(found)),
                Err(error) => newest = Err(error),
            }
        }
        newest
    });
    Ok(newest?.map_or(Stamp::Unversioned, |found: CopiedVersion| {
        if found.merged {
            // Also if this is the current transaction's version: the row contained all of it when
            // it was copied.
            Stamp::Merged(found.timestamp, found.origin)
        } else {
            known(found.timestamp, found.origin)
        }
    }))
}

/// Version and hashes of the row at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowVersion {
    /// Hashes of its table and key; `None` if it has no key, or the key is too large.
    pub hashes: Option<KeyHashes>,
    /// Hash that identifies the row at all nodes, if the table has no key.
    pub row_hash: Option<u64>,
    /// Commit time of its transaction, in microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// Node of that commit.
    pub node: String,
    /// The row was merged from several: that node has not seen all of it.
    pub merged: bool,
}

/// Data that one statement has looked up.
#[derive(Debug)]
struct Looked {
    /// Start time of the statement.
    at: pg_sys::TimestampTz,
    names: OriginNames,
    tables: HashMap<pg_sys::Oid, Vec<From>>,
    merging: Option<Merging>,
}

/// Writers of merged rows.
#[derive(Debug)]
struct Merging {
    /// Transactions, by their full ids.
    transactions: HashSet<u64>,
    /// Whether copies may have written merged rows.
    copies: bool,
}

thread_local! {
    static KNOWN: RefCell<KnownVersions> = RefCell::default();
    static LOOKED: RefCell<Option<Looked>> = const { RefCell::new(None) };
}

/// Runs `work` with the batches that this process remembers, and no rows written by itself.
fn with_known<T>(work: impl FnOnce(&mut KnownVersions, &WrittenVersions) -> T) -> T {
    let none = WrittenVersions::default();
    KNOWN.with_borrow_mut(|known| work(known, &none))
}

fn looked<T>(work: impl FnOnce(&mut Looked) -> Result<T, PgError>) -> Result<T, PgError> {
    let at = transaction::statement_start();
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
        None => Err(PgError::new(
            SqlState::InternalError,
            "nothing was looked up",
        )),
    })
}

/// Returns the version of the row at a place of a table, for `role`. Returns `None` if there is no
/// such row, or its version is not known. With the rights of the extension's owner.
///
/// # Errors
/// 42809 if the relation is no ordinary table; 42501 if the role may not read it; whatever
/// PostgreSQL raises.
pub fn row_version(
    relation: pg_sys::Oid,
    place: pg_sys::ItemPointerData,
    role: pg_sys::Oid,
) -> Result<Option<RowVersion>, PgError> {
    with_table(relation, |table| {
        if table.kind() != b'r' {
            return Err(PgError::new(
                SqlState::WrongObjectType,
                "only rows of ordinary tables have a version",
            )
            .with_hint("Of a partitioned table, ask for the partition: tableoid, ctid."));
        }
        // A role that may read a partitioned table may read the rows of its partitions.
        let mut tables = with_ancestors(relation).into_iter();
        if !tables.any(|table| table_rights::may_read_all(role, table)) {
            return Err(PgError::new(
                SqlState::InsufficientPrivilege,
                "permission denied for the table",
            )
            .with_hint("Grant SELECT on it to whoever asks for versions of its rows."));
        }
        at_place(table, place, Visible::Active, |slot| {
            version_in(table, slot)
        })
    })
}

/// Whether any row that this transaction wrote may have been merged from several. With the rights
/// of the extension's owner.
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
        Ok(merging.copies && tells_none(xid)
            || !merging.transactions.is_empty() && merging.transactions.contains(&full(xid)))
    })
}

/// Returns the hashes of the key of the row at a place of an ordinary table, also of a row that was
/// just written there. Returns `None` if there is no such row, or it has no key.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn key_hashes_at(
    relation: pg_sys::Oid,
    place: pg_sys::ItemPointerData,
) -> Result<Option<KeyHashes>, PgError> {
    with_table(relation, |table| {
        at_place(table, place, Visible::Any, |slot| {
            Ok(hasher(table, slot)(relation.to_u32()))
        })
    })
}

/// Dead rows of tables without a key that VACUUM has not removed yet.
#[derive(Debug, Default)]
pub struct DeadRows {
    copied_from: HashMap<pg_sys::Oid, Vec<From>>,
    /// Tables that another session had locked exclusively.
    locked: HashSet<pg_sys::Oid>,
}

impl DeadRows {
    /// Returns the hash of the whole row that is, or was, at a place of a table, and its writer; a
    /// writer of `None` is older than all. Returns nothing if the table has been rewritten, is not
    /// such a table any more, or stays locked exclusively by another session.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn at(
        &mut self,
        relation: pg_sys::Oid,
        file: compat::FileLocator,
        place: pg_sys::ItemPointerData,
    ) -> Result<Option<(u64, Option<Author>)>, PgError> {
        let since = Instant::now();
        // A session that empties a table may be waiting for this process.
        while !LockMode::AccessShare.try_on_relation(relation) {
            if self.locked.contains(&relation) || since.elapsed() > LOCK_PATIENCE {
                self.locked.insert(relation);
                return Ok(None);
            }
            latch::wait(Some(LOCK_PAUSE));
        }
        let Some(open) = Relation::try_open(relation, LockMode::AccessShare) else {
            return Ok(None);
        };
        let table = open.view();
        let is_keyless = table.replica_identity() == b'f'
            && table.is_in_file(&file)
            && identity_key(table).is_none();
        let found = if is_keyless {
            at_place(table, place, Visible::Any, |slot| {
                let hash = row_hash(table, slot);
                Ok(Some((hash, self.author(relation, slot, hash)?)))
            })
        } else {
            Ok(None)
        };
        open.close(LockMode::AccessShare);
        found
    }

    /// Returns the writer of the row in a slot, which has this hash, of the table without a key
    /// that has this OID.
    fn author(
        &mut self,
        relation: pg_sys::Oid,
        slot: &Slot,
        hash: u64,
    ) -> Result<Option<Author>, PgError> {
        let xid = slot.writer();
        let mut stamp = stamp_of(xid);
        if stamp == Stamp::Unversioned && tells_none(xid) {
            let itself;
            let from = match rewrite::author(relation, xid, slot)? {
                Writer::Other => {
                    itself = [From::itself(relation)];
                    &itself[..]
                }
                Writer::Transaction if is_copied(xid) => match self.copied_from.entry(relation) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(place) => place.insert(tables(relation)?),
                },
                Writer::Transaction => {
                    stamp = stamp_of_transaction(xid);
                    &[]
                }
            };
            if stamp == Stamp::Unversioned {
                let hashes: HashSet<u64> = from.iter().map(|from| from.row_hash(hash)).collect();
                let mut oldest: Option<CopiedVersion> = None;
                for hash in hashes {
                    // Of identical rows the oldest leaves first.
                    let versions = tombstone::find_all_copied(hash)?.into_iter();
                    oldest = versions.chain(oldest).min();
                }
                return Ok(oldest.map(|version| (version.timestamp, version.origin)));
            }
        }
        let stamp = match stamp {
            stamp @ Stamp::Known(_, origin) if origin != 0 => {
                let stored = || stored_row_hash(relation.to_u32(), slot);
                with_known(|known, none| known.refine(none, xid, stamp, stored))?
            }
            stamp => stamp,
        };
        Ok(stamp.known())
    }
}

pub(super) fn with_table<T>(
    relation: pg_sys::Oid,
    look: impl FnOnce(RelationRef<'_>) -> Result<T, PgError>,
) -> Result<T, PgError> {
    let table = Relation::open(relation, LockMode::AccessShare);
    let found = look(table.view());
    table.close(LockMode::AccessShare);
    found
}

fn at_place<T>(
    table: RelationRef<'_>,
    place: pg_sys::ItemPointerData,
    visible: Visible,
    look: impl FnOnce(&Slot) -> Result<Option<T>, PgError>,
) -> Result<Option<T>, PgError> {
    // A line pointer without a row gives none.
    if place_of(place).0 >= table.blocks() || place.ip_posid == 0 {
        return Ok(None);
    }
    table.with_slot(|slot| {
        if slot.fetch(table, place, visible) {
            look(slot)
        } else {
            Ok(None)
        }
    })
}

/// Whether each of the rows at these places has not been updated since it was inserted, or since a
/// statement has rewritten its table. In a transaction.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn are_first_states(
    relation: pg_sys::Oid,
    places: &[pg_sys::ItemPointerData],
) -> Result<Vec<bool>, PgError> {
    with_table(relation, |table| {
        let each = places.iter().map(|place| {
            let header = at_place(table, *place, Visible::Active, |slot| Ok(slot.header()))?;
            Ok(header.is_some_and(|header| header.infomask & pg_sys::HEAP_UPDATED == 0))
        });
        each.collect()
    })
}

/// Returns the known version of the row in a slot of an open table. In a transaction.
pub(super) fn version_in(
    table: RelationRef<'_>,
    slot: &Slot,
) -> Result<Option<RowVersion>, PgError> {
    let oid = table.oid();
    let keys = Keys::of(table, slot);
    let copied_from = || {
        looked(|looked| match looked.tables.get(&oid) {
            Some(known) => Ok(known.clone()),
            None => {
                let found = tables(oid)?;
                looked.tables.insert(oid, found.clone());
                Ok(found)
            }
        })
    };
    let stamp = stamp_in(table, slot, keys, copied_from)?;
    let Some((timestamp, origin)) = stamp.known() else {
        return Ok(None);
    };
    let node = looked(|looked| Ok(looked.names.node(origin).to_owned()))?;
    Ok(Some(RowVersion {
        hashes: keys.hashes,
        row_hash: keys.row_hash,
        timestamp,
        node,
        merged: matches!(stamp, Stamp::Merged(..) | Stamp::OwnMerged(..)),
    }))
}

/// Hashes by which records identify a row of an open table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys {
    /// As in [`RowVersion`].
    pub(super) hashes: Option<KeyHashes>,
    /// As in [`RowVersion`].
    pub(super) row_hash: Option<u64>,
}

impl Keys {
    /// Returns those of the row in a slot. In a transaction.
    pub(super) fn of(table: RelationRef<'_>, slot: &Slot) -> Self {
        let hashes = hasher(table, slot)(table.oid().to_u32());
        // If changes do not carry whole old rows, no row is removed by its values.
        let is_keyless = table.replica_identity() == b'f' && identity_key(table).is_none();
        let row_hash = is_keyless.then(|| row_hash(table, slot));
        Self { hashes, row_hash }
    }

    /// Returns the hashes by which the row is identified among copied rows.
    pub(super) fn copied(self, from: From) -> impl Iterator<Item = u64> {
        let row = self.row_hash.map(|hash| from.row_hash(hash));
        from.hashes(move |_| self.hashes).chain(row)
    }
}

/// Returns the version of the row in a slot of an open table, as far as it is known. `copied_from`
/// is called for a row that a copy has brought. In a transaction.
pub(super) fn stamp_in(
    table: RelationRef<'_>,
    slot: &Slot,
    keys: Keys,
    copied_from: impl FnOnce() -> Result<Vec<From>, PgError>,
) -> Result<Stamp, PgError> {
    let xid = slot.writer();
    let author = rewrite::author(table.oid(), xid, slot)?;
    stamp_by(table, slot, (xid, author), keys, copied_from)
}

/// As [`stamp_in`], for a row with this writer; [`rewrite::author`] says who that is.
pub(super) fn stamp_by(
    table: RelationRef<'_>,
    slot: &Slot,
    (xid, author): (pg_sys::TransactionId, Writer),
    keys: Keys,
    copied_from: impl FnOnce() -> Result<Vec<From>, PgError>,
) -> Result<Stamp, PgError> {
    let oid = table.oid();
    let mut stamp = stamp_of(xid);
    if stamp == Stamp::Unversioned && tells_none(xid) {
        stamp = match author {
            Writer::Other => return find(keys.copied(From::itself(oid))),
            Writer::Transaction if is_copied(xid) => {
                let hashes_as = hasher(table, slot);
                let from = copied_from()?.into_iter();
                return find(from.flat_map(|from| from.hashes(&hashes_as)));
            }
            Writer::Transaction => stamp_of_transaction(xid),
        };
    }
    let stamp = match (stamp, keys.hashes) {
        (stamp @ Stamp::Known(_, origin), Some(hashes)) if origin != 0 => {
            with_known(|known, none| known.refine(none, xid, stamp, || hashes.stored))?
        }
        (stamp @ Stamp::Known(_, origin), None) if origin != 0 && keys.row_hash.is_some() => {
            let stored = || stored_row_hash(oid.to_u32(), slot);
            with_known(|known, none| known.refine(none, xid, stamp, stored))?
        }
        (stamp, _) => stamp,
    };
    Ok(stamp)
}

/// Returns a function for the hashes of a row's key, as of a row of the table with the given OID.
/// In a transaction.
pub(super) fn hasher<'s>(
    table: RelationRef<'_>,
    slot: &'s Slot,
) -> impl Fn(u32) -> Option<KeyHashes> + use<'s> {
    let key = identity_key(table);
    move |as_table| key_hashes_in_slot(as_table, key.as_deref()?, slot)
}
