//! What local transactions delete, for the collector of deletions (`crate::tombstone::collector`), which decodes in its own process
//! and is sent nothing: it takes what was gathered here.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use pgrx::pg_sys;

use super::format::{Change, Context, Format, LogicalMessage, Truncation};
use super::publications::oids;
use super::version;
use crate::apply::{EPOCH_DIFFERENCE, Equality, KeyHashes, KeyPart, key_hashes_of_row, table_hash};
use crate::compat;
use crate::error::PgError;
use crate::ffi;
use crate::leader::spool::Spool;
use crate::tombstone::Tombstone;

thread_local! {
    static GATHERED: RefCell<Option<Gathered>> = const { RefCell::new(None) };
}

/// Deletions of one transaction that are held in memory.
const HELD: usize = 1 << 16;
/// Bytes of one in a file: table and hash.
const BYTES: usize = 12;

/// Grows with each relcache invalidation.
static GENERATION: AtomicU64 = AtomicU64::new(0);

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_invalidation(_arg: pg_sys::Datum, _relation: pg_sys::Oid) {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// What this process gathers.
#[derive(Debug, Default)]
struct Gathered {
    /// Tables of which deletions are wanted, or tables above them.
    tables: HashSet<u32>,
    /// Of transactions that have committed.
    ended: Vec<Tombstone>,
    /// Of those that have deleted more than is held in memory.
    large: Vec<Large>,
}

/// What a large transaction has deleted.
#[derive(Debug)]
pub(crate) struct Large {
    file: Spool,
    timestamp: i64,
}

impl Large {
    /// Hand all of it on, piece by piece.
    pub(crate) fn each(
        mut self,
        mut take: impl FnMut(&[Tombstone]) -> Result<(), PgError>,
    ) -> Result<(), PgError> {
        self.file.rewind()?;
        let mut bytes = Vec::new();
        let mut piece = Vec::new();
        while self.file.read(&mut bytes)? {
            let (records, _) = bytes.as_chunks::<BYTES>();
            piece.extend(records.iter().map(|record| {
                let [a, b, c, d, hash @ ..] = *record;
                tombstone(
                    u32::from_ne_bytes([a, b, c, d]),
                    u64::from_ne_bytes(hash),
                    self.timestamp,
                )
            }));
            take(&piece)?;
            piece.clear();
            bytes.clear();
            pgrx::check_for_interrupts!();
        }
        Ok(())
    }
}

/// A deletion by this node.
fn tombstone(relation: u32, hash: u64, timestamp: i64) -> Tombstone {
    Tombstone {
        hash,
        relation,
        timestamp,
        origin: 0,
    }
}

/// From here on this process gathers deletions instead of sending anything.
pub(crate) fn gather() {
    // SAFETY: the callback belongs to this library, which is never unloaded.
    unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(on_invalidation), pg_sys::Datum::null()) };
    GATHERED.set(Some(Gathered::default()));
}

/// Deletions of these tables are wanted from here on.
pub(crate) fn want(tables: HashSet<u32>) {
    with(|gathered| gathered.tables = tables);
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// What was gathered since the last call.
pub(crate) fn take() -> (Vec<Tombstone>, Vec<Large>) {
    with(|gathered| {
        (
            std::mem::take(&mut gathered.ended),
            std::mem::take(&mut gathered.large),
        )
    })
    .unwrap_or_default()
}

fn with<T>(what: impl FnOnce(&mut Gathered) -> T) -> Option<T> {
    GATHERED.with_borrow_mut(|gathered| gathered.as_mut().map(what))
}

/// The format of this process, if it gathers deletions.
pub(super) fn format() -> Option<Box<dyn Format>> {
    with(|_| ())?;
    Some(Box::new(Deletions {
        keys: HashMap::new(),
        generation: 0,
        in_hand: Vec::new(),
        file: None,
        version: None,
    }))
}

/// The stream of nothing.
#[derive(Debug)]
struct Deletions {
    /// Columns of the key by relation; `None`: its deletions are not wanted, or have no key.
    keys: HashMap<u32, Option<Vec<KeyPart>>>,
    generation: u64,
    /// Of the transaction in hand.
    in_hand: Vec<(u32, u64)>,
    /// More of it.
    file: Option<Spool>,
    /// The version of the transaction in hand, if that is not the time of its commit.
    version: Option<i64>,
}

impl Deletions {
    /// The columns by which rows of a relation are known.
    ///
    /// # Safety
    /// The relation is open, under the historic snapshot.
    unsafe fn key(&mut self, relation: pg_sys::Relation) -> Option<&[KeyPart]> {
        let generation = GENERATION.load(Ordering::Relaxed);
        if self.generation != generation {
            self.keys.clear();
            self.generation = generation;
        }
        // SAFETY: as the caller says.
        let oid = unsafe { (*relation).rd_id };
        self.keys
            .entry(oid.to_u32())
            // SAFETY: as the caller says.
            .or_insert_with(|| unsafe { key_of(relation, oid) })
            .as_deref()
    }
}

impl Deletions {
    fn push(&mut self, relation: u32, hash: u64) {
        self.in_hand.push((relation, hash));
        if self.in_hand.len() >= HELD {
            self.spill().unwrap_or_else(|error| error.raise());
        }
    }

    /// Move what is in memory to the file.
    fn spill(&mut self) -> Result<(), PgError> {
        let mut bytes = Vec::with_capacity(self.in_hand.len() * BYTES);
        for (relation, hash) in self.in_hand.drain(..) {
            bytes.extend_from_slice(&relation.to_ne_bytes());
            bytes.extend_from_slice(&hash.to_ne_bytes());
        }
        self.file.get_or_insert_with(Spool::create).write(&bytes)
    }
}

/// # Safety
/// As `Deletions::key`.
unsafe fn is_wanted(relation: pg_sys::Relation, oid: pg_sys::Oid) -> bool {
    let is_listed =
        |oid: pg_sys::Oid| with(|gathered| gathered.tables.contains(&oid.to_u32())) == Some(true);
    // SAFETY: as the caller says.
    unsafe {
        is_listed(oid)
            || ((*(*relation).rd_rel).relispartition
                && oids(ffi::get_partition_ancestors(oid))
                    .into_iter()
                    .any(|above| is_listed(above.into())))
    }
}

/// # Safety
/// As `Deletions::key`.
unsafe fn key_of(relation: pg_sys::Relation, oid: pg_sys::Oid) -> Option<Vec<KeyPart>> {
    // SAFETY: as the caller says.
    unsafe {
        if !is_wanted(relation, oid) {
            return None;
        }
        identity_key(relation)
    }
}

/// The columns of the key that identifies a table's rows, in the key's order: that of the replica identity, or else the primary key.
///
/// # Safety
/// The relation is open; in a transaction with a snapshot for catalogs.
pub(crate) unsafe fn identity_key(relation: pg_sys::Relation) -> Option<Vec<KeyPart>> {
    // SAFETY: as the caller says; the index is open while it is read, and its columns are the relation's.
    unsafe {
        let replica = pg_sys::RelationGetReplicaIndex(relation);
        let index = if replica == pg_sys::InvalidOid {
            compat::primary_key_index(relation)
        } else {
            replica
        };
        if index == pg_sys::InvalidOid {
            return None;
        }
        let index = pg_sys::RelationIdGetRelation(index);
        if index.is_null() {
            return None;
        }
        let shape = (*index).rd_index;
        let count = usize::try_from((*shape).indnkeyatts).unwrap_or(0);
        let columns = (*shape).indkey.values.as_slice(count).iter().enumerate();
        let part = |(position, attribute): (usize, &i16)| {
            // An expression has number 0; such an index is nobody's identity.
            let column = usize::try_from(*attribute).ok()?.checked_sub(1)?;
            let declared = (*compat::TupleDescAttr((*relation).rd_att, column)).atttypid;
            Some(KeyPart {
                attribute: *attribute,
                equality: Equality::of(index, position, declared),
            })
        };
        let parts = columns.map(part).collect();
        pg_sys::RelationClose(index);
        parts
    }
}

/// Hashes of a row's key.
///
/// # Safety
/// The tuple is one of the relation.
unsafe fn hashes_of(
    relation: pg_sys::Relation,
    key: &[KeyPart],
    tuple: pg_sys::HeapTuple,
) -> Option<KeyHashes> {
    if tuple.is_null() {
        return None;
    }
    // SAFETY: as the caller says; there is room for all columns.
    unsafe {
        let descriptor = (*relation).rd_att;
        let columns = usize::try_from((*descriptor).natts).unwrap_or(0);
        let mut values = vec![pg_sys::Datum::null(); columns];
        let mut nulls = vec![true; columns];
        pg_sys::heap_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
        key_hashes_of_row((*relation).rd_id, descriptor, key, &values, &nulls)
    }
}

impl Format for Deletions {
    fn is_text(&self) -> bool {
        false
    }

    fn refuses_origin(&self, origin: pg_sys::RepOriginId) -> bool {
        // Appliers remember what they delete.
        origin != 0
    }

    unsafe fn begin(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        self.in_hand.clear();
        self.file = None;
        // SAFETY: as the caller says.
        self.version = unsafe { version::of(ctx, txn) };
    }

    unsafe fn row_changed(
        &mut self,
        _ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        change: &Change,
    ) {
        use pg_sys::ReorderBufferChangeType::{
            REORDER_BUFFER_CHANGE_DELETE, REORDER_BUFFER_CHANGE_UPDATE,
        };
        if change.old.is_null()
            || ![REORDER_BUFFER_CHANGE_DELETE, REORDER_BUFFER_CHANGE_UPDATE]
                .contains(&change.action)
            || change.author.origin != 0
        {
            return;
        }
        // SAFETY: the relation is open, and the tuples are its.
        unsafe {
            let relation = change.relation;
            let Some(key) = self.key(relation) else {
                return;
            };
            let gone = hashes_of(relation, key, change.old);
            let here = hashes_of(relation, key, change.new).map(|here| here.equal);
            // A row that has another form of the same key has not left it.
            if let Some(gone) = gone.filter(|gone| here != Some(gone.equal)) {
                for hash in gone.each() {
                    self.push((*relation).rd_id.to_u32(), hash);
                }
            }
        }
    }

    unsafe fn truncated(
        &mut self,
        _ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        truncation: &Truncation<'_>,
    ) {
        if truncation.author.origin != 0 {
            return;
        }
        for relation in truncation.relations {
            // SAFETY: the relations are open, under the historic snapshot.
            unsafe {
                let oid = (**relation).rd_id;
                // The rows of a partitioned table are in its partitions, which are named too.
                let has_rows = (*(**relation).rd_rel).relkind.cast_unsigned() == b'r';
                if has_rows && is_wanted(*relation, oid) {
                    self.push(oid.to_u32(), table_hash(oid.to_u32()));
                }
            }
        }
    }

    unsafe fn message(
        &mut self,
        _ctx: Context,
        _txn: Option<&pg_sys::ReorderBufferTXN>,
        _message: &LogicalMessage<'_>,
    ) {
    }

    unsafe fn commit(&mut self, _ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        // SAFETY: the member that is set for a transaction that has committed.
        let time = unsafe { txn.xact_time.commit_time };
        let timestamp = self
            .version
            .take()
            .unwrap_or_else(|| time.saturating_add(EPOCH_DIFFERENCE));
        if self.file.is_some() {
            self.spill().unwrap_or_else(|error| error.raise());
        }
        let file = self.file.take();
        with(|gathered| {
            let ended = self.in_hand.drain(..);
            gathered
                .ended
                .extend(ended.map(|(relation, hash)| tombstone(relation, hash, timestamp)));
            gathered
                .large
                .extend(file.map(|file| Large { file, timestamp }));
        });
    }

    fn leave(&mut self) {}
}
