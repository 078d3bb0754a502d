//! Versions of rows that an initial copy has brought (`workers/copy/versions.rs` writes them down).
//! The commit of the copy tells none; and a change of a third node that comes after it may be older
//! than what was copied.
//!
//! A row is known by the hashes that its key has in the table that it was copied from
//! ([`From::hashes`]): so deletions can be brought along too, of which the provider has nothing but
//! these. Where keys are stored differently there (another encoding, an enum) nothing is found:
//! then such a row is older than whatever comes.

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
    /// Of a table whose rows were there when a statement has rewritten it.
    pub(super) fn itself(relation: pg_sys::Oid) -> Self {
        let relation = relation.to_u32();
        Self {
            relation,
            table: relation,
        }
    }

    /// What a copied row is known by here, of which `there` gives the hashes in a table with that
    /// OID.
    pub fn hashes<F, T>(self, there: F) -> impl Iterator<Item = u64> + use<F, T>
    where
        F: FnOnce(u32) -> T,
        T: IntoIterator<Item = KeyHashes>,
    {
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

/// From where rows of this table, or of those of which it is a partition, were copied that are
/// remembered. In a transaction, with the process's own rights.
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

/// Where the version of a row is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// By the transaction that wrote it, as for most rows; a batch may say more
    /// ([`KnownVersions`]).
    ByTransaction(Stamp),
    /// Apart from that, or nowhere.
    Apart(Stamp),
}

/// The version of a row of whose writer, `xid`, [`stamp_of`] says `stamp`.
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

/// The same where the table has no key. Of rows that are identical nothing tells which has which
/// version: the oldest leave first, so those that are left have the newest of them; and what has
/// none is older than all that have one.
fn refine_identical(plan: &LocalRelation, sources: &[From], slot: &Slot) -> Result<Stamp, PgError> {
    // Allocations go with the transaction.
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

/// How many rows with this hash a copy has brought, or a statement has written anew, and are there.
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
            // Also where it is the transaction in hand that has this version: the row had all of
            // that in it when it was copied.
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

/// The version of the row at a place of a table, for `role`. `None` where there is no such row, or
/// nobody knows its version. With the rights of the extension's owner.
///
/// # Errors
/// 42809 for what is no ordinary table; 42501 for who may not read it; whatever PostgreSQL raises.
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

/// Whether any row that this transaction wrote may be one that was made of several. With the rights
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

/// The hashes of the key of the row at a place of an ordinary table, also of one that was just
/// written there. `None` where there is no such row, or it has no key.
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

/// Rows of tables without a key that are dead, but still there.
#[derive(Debug, Default)]
pub struct DeadRows {
    copied_from: HashMap<pg_sys::Oid, Vec<From>>,
    /// Tables that somebody else had to himself.
    locked: HashSet<pg_sys::Oid>,
}

impl DeadRows {
    /// The hash of all of the row that is, or was, at a place of a table, and who wrote it; `None`
    /// there: older than all. Nothing where the table is in another file by now, or is no such
    /// table any more; or where somebody else has it to himself, and keeps it.
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
        // Whoever empties a table may be waiting for this process.
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

    /// Who wrote the row in a slot, which has this hash.
    /// The table is the one without a key that has this OID.
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
                    // Of those that are identical the oldest leaves first.
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
    // A line pointer that holds no row gives none.
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

/// Whether each of the rows at these places was inserted as it stands there, or by a statement that
/// has rewritten its table, and not updated since. In a transaction.
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

/// By what a row of an open table is known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys {
    /// As in [`RowVersion`].
    pub(super) hashes: Option<KeyHashes>,
    /// As in [`RowVersion`].
    pub(super) row_hash: Option<u64>,
}

impl Keys {
    /// Of the row in a slot. In a transaction.
    pub(super) fn of(table: RelationRef<'_>, slot: &Slot) -> Self {
        let hashes = hasher(table, slot)(table.oid().to_u32());
        // Where no change says whole old rows, none is ever taken out.
        let is_keyless = table.replica_identity() == b'f' && identity_key(table).is_none();
        let row_hash = is_keyless.then(|| row_hash(table, slot));
        Self { hashes, row_hash }
    }

    /// By what the row is known among those that were copied.
    pub(super) fn copied(self, from: From) -> impl Iterator<Item = u64> {
        let row = self.row_hash.map(|hash| from.row_hash(hash));
        from.hashes(move |_| self.hashes).chain(row)
    }
}

/// The version of the row in a slot of an open table, as far as it is known. `copied_from` is asked
/// for a row that a copy has brought. In a transaction.
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

/// The same, of a row with this writer, of which [`rewrite::author`] says who that is.
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

/// The hashes of a row's key, as of a row of the table with the given OID. In a transaction.
pub(super) fn hasher<'s>(
    table: RelationRef<'_>,
    slot: &'s Slot,
) -> impl Fn(u32) -> Option<KeyHashes> + use<'s> {
    let key = identity_key(table);
    move |as_table| key_hashes_in_slot(as_table, key.as_deref()?, slot)
}
