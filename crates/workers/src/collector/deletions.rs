//! What local transactions delete, for the collector of deletions (`super`), which decodes in its own process
//! and is sent nothing: it takes what was gathered here. And which columns they write, where these are registers of their own (`braid_node::column_write`); and where WAL says
//! what they take out of tables without a key (`braid_node::taken_row`).
//!
//! Which columns are is known from the table of rules, as it is when the process looks, and from WAL: a rule counts for what is committed after it.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use braid_apply::{KeyHashes, KeyPart, identity_key, key_hashes_of_row, table_hash};
use braid_bgworker::column_rule::ColumnRule;
use braid_node::column_write::ColumnWrite;
use braid_node::tombstone::Tombstone;
use braid_plugin::{
    Change, Context, Format, LogicalMessage, Truncation, is_elsewhere, oids, version_of,
};
use braid_postgres::error::PgError;
use braid_postgres::spool::Spool;
use braid_postgres::table_scan::low;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::{compat, ffi};
use pgrx::{FromDatum, pg_sys};

use super::taken_rows::Removal;

thread_local! {
    static GATHERED: RefCell<Option<Gathered>> = const { RefCell::new(None) };
}

/// Deletions of one transaction that are held in memory.
const HELD: usize = 1 << 16;
/// Bytes of one in a file: what kind of table, the table, and a number.
const BYTES: usize = 13;
/// Bytes of a column write's head in a file: table and hash.
const WRITE_BYTES: usize = 12;

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
    /// Columns that are registers of their own: table and number. None is ever taken away: what is told of others does no harm.
    registers: BTreeSet<(u32, i16)>,
    /// `braid.column_rule`.
    rules: u32,
    /// Of transactions that have committed.
    ended: Vec<Tombstone>,
    removed: Vec<Removal>,
    /// The same of columns.
    written: Vec<ColumnWrite>,
    /// Of those that have deleted more than is held in memory.
    large: Vec<Large>,
    large_written: Vec<LargeWritten>,
}

/// What a large transaction has deleted.
#[derive(Debug)]
pub(crate) struct Large {
    file: Spool,
    timestamp: i64,
    end_lsn: u64,
}

/// A row that is gone from a table.
#[derive(Debug, Clone, Copy)]
enum Gone {
    /// The hash of its key.
    Key(u64),
    /// The table has none: where the record begins that says so.
    Row(u64),
}

/// The transaction that rows are gone by: its version, and where it ends.
#[derive(Debug, Clone, Copy)]
struct By {
    timestamp: i64,
    end_lsn: u64,
}

impl By {
    /// Put down what this transaction has removed from a table.
    fn sort(
        self,
        relation: u32,
        gone: Gone,
        deleted: &mut Vec<Tombstone>,
        removed: &mut Vec<Removal>,
    ) {
        match gone {
            Gone::Key(hash) => deleted.push(tombstone(relation, hash, self.timestamp)),
            Gone::Row(lsn) => removed.push(Removal {
                relation,
                lsn,
                timestamp: self.timestamp,
                end_lsn: self.end_lsn,
            }),
        }
    }
}

/// Which columns a large transaction has written.
#[derive(Debug)]
pub(crate) struct LargeWritten {
    file: Spool,
    timestamp: i64,
}

/// All columns, where otherwise their number would stand.
const ALL_COLUMNS: i16 = -1;

impl LargeWritten {
    /// As [`Large::each`].
    pub(crate) fn each(
        mut self,
        mut take: impl FnMut(&[ColumnWrite]) -> Result<(), PgError>,
    ) -> Result<(), PgError> {
        self.file.rewind()?;
        let mut bytes = Vec::new();
        let mut piece: Vec<ColumnWrite> = Vec::new();
        while self.file.read(&mut bytes)? {
            let [head, numbers] = [bytes.get(..WRITE_BYTES), bytes.get(WRITE_BYTES..)];
            let head = head.and_then(|head| <[u8; WRITE_BYTES]>::try_from(head).ok());
            if let (Some([a, b, c, d, hash @ ..]), Some(numbers)) = (head, numbers) {
                let (numbers, _) = numbers.as_chunks::<2>();
                let numbers: Vec<i16> = numbers.iter().map(|n| i16::from_ne_bytes(*n)).collect();
                piece.push(ColumnWrite {
                    hash: u64::from_ne_bytes(hash),
                    relation: u32::from_ne_bytes([a, b, c, d]),
                    timestamp: self.timestamp,
                    origin: 0,
                    columns: (numbers != [ALL_COLUMNS]).then_some(numbers),
                });
            }
            if piece.len() >= HELD {
                take(&piece)?;
                piece.clear();
                pgrx::check_for_interrupts!();
            }
            bytes.clear();
        }
        take(&piece)
    }
}

impl Large {
    /// Hand all of it on, piece by piece.
    pub(crate) fn each(
        mut self,
        mut take: impl FnMut(&[Tombstone], &[Removal]) -> Result<(), PgError>,
    ) -> Result<(), PgError> {
        self.file.rewind()?;
        let by = By {
            timestamp: self.timestamp,
            end_lsn: self.end_lsn,
        };
        let mut bytes = Vec::new();
        let (mut deleted, mut removed) = (Vec::new(), Vec::new());
        while self.file.read(&mut bytes)? {
            let (records, _) = bytes.as_chunks::<BYTES>();
            for record in records {
                let [kind, a, b, c, d, number @ ..] = *record;
                let number = u64::from_ne_bytes(number);
                let gone = match kind {
                    0 => Gone::Key(number),
                    _ => Gone::Row(number),
                };
                let relation = u32::from_ne_bytes([a, b, c, d]);
                by.sort(relation, gone, &mut deleted, &mut removed);
            }
            take(&deleted, &removed)?;
            deleted.clear();
            removed.clear();
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
    braid_plugin::set_format(format);
}

/// What is wanted.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// Tables of which deletions are.
    pub(crate) tables: HashSet<u32>,
    /// Columns that are registers of their own: table and number.
    pub(crate) registers: Vec<(u32, i16)>,
    /// `braid.column_rule`.
    pub(crate) rules: u32,
}

/// This is wanted from here on.
pub(crate) fn want(wanted: Wanted) {
    with(|gathered| {
        gathered.tables = wanted.tables;
        // One that WAL tells of may not be visible yet.
        gathered.registers.extend(wanted.registers);
        gathered.rules = wanted.rules;
    });
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// What was gathered.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) deleted: Vec<Tombstone>,
    pub(crate) removed: Vec<Removal>,
    pub(crate) large: Vec<Large>,
    pub(crate) written: Vec<ColumnWrite>,
    pub(crate) large_written: Vec<LargeWritten>,
}

impl Taken {
    pub(crate) fn is_empty(&self) -> bool {
        self.deleted.is_empty()
            && self.removed.is_empty()
            && self.large.is_empty()
            && self.written.is_empty()
            && self.large_written.is_empty()
    }
}

/// What was gathered since the last call.
pub(crate) fn take() -> Taken {
    with(|gathered| Taken {
        deleted: std::mem::take(&mut gathered.ended),
        removed: std::mem::take(&mut gathered.removed),
        large: std::mem::take(&mut gathered.large),
        written: std::mem::take(&mut gathered.written),
        large_written: std::mem::take(&mut gathered.large_written),
    })
    .unwrap_or_default()
}

fn with<T>(what: impl FnOnce(&mut Gathered) -> T) -> Option<T> {
    GATHERED.with_borrow_mut(|gathered| gathered.as_mut().map(what))
}

/// A stream that has gathered nothing.
fn format() -> Box<dyn Format> {
    Box::new(Deletions {
        keys: HashMap::new(),
        generation: 0,
        in_hand: Vec::new(),
        file: None,
        written: Vec::new(),
        written_file: None,
        version: None,
    })
}

/// What a relation's rows are known by.
#[derive(Debug, Clone)]
enum Looked {
    /// The columns of their key, and the numbers of those that are registers of their own.
    Key(Rc<[KeyPart]>, Rc<[i16]>),
    /// There is no key, and changes say whole rows.
    Row,
}

/// The stream of nothing.
#[derive(Debug)]
struct Deletions {
    /// By relation; `None`: nothing of it is wanted, or its rows are not known by anything.
    keys: HashMap<u32, Option<Looked>>,
    generation: u64,
    /// Of the transaction in hand.
    in_hand: Vec<(u32, Gone)>,
    /// More of it.
    file: Option<Spool>,
    /// Columns that the transaction in hand has written.
    written: Vec<ColumnWrite>,
    /// More of it.
    written_file: Option<Spool>,
    /// The version of the transaction in hand, if that is not the time of its commit.
    version: Option<i64>,
}

impl Deletions {
    /// What rows of a relation are known by.
    ///
    /// # Safety
    /// The relation is open, under the historic snapshot.
    unsafe fn look(&mut self, relation: pg_sys::Relation) -> Option<Looked> {
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
            .or_insert_with(|| unsafe {
                let registers = registers_of(oid);
                if registers.is_empty() && !is_wanted(relation, oid) {
                    return None;
                }
                match identity_key(relation) {
                    Some(key) => Some(Looked::Key(key.into(), registers.into())),
                    None => {
                        let says_all = (*(*relation).rd_rel).relreplident.cast_unsigned() == b'f';
                        says_all.then_some(Looked::Row)
                    }
                }
            })
            .clone()
    }
}

/// Columns of a table that are registers of their own.
fn registers_of(table: pg_sys::Oid) -> Vec<i16> {
    let table = table.to_u32();
    with(|gathered| {
        let of = gathered
            .registers
            .range((table, i16::MIN)..=(table, i16::MAX));
        of.map(|(_, number)| *number).collect()
    })
    .unwrap_or_default()
}

impl Deletions {
    fn push(&mut self, relation: u32, gone: Gone) {
        self.in_hand.push((relation, gone));
        if self.in_hand.len() >= HELD {
            self.spill().unwrap_or_else(|error| error.raise());
        }
    }

    /// Move what is in memory to the file.
    fn spill(&mut self) -> Result<(), PgError> {
        let mut bytes = Vec::with_capacity(self.in_hand.len() * BYTES);
        for (relation, gone) in self.in_hand.drain(..) {
            let (kind, number) = match gone {
                Gone::Key(hash) => (0, hash),
                Gone::Row(lsn) => (1, lsn),
            };
            bytes.push(kind);
            bytes.extend_from_slice(&relation.to_ne_bytes());
            bytes.extend_from_slice(&number.to_ne_bytes());
        }
        self.file.get_or_insert_with(Spool::create).write(&bytes)
    }

    fn push_written(&mut self, relation: u32, hash: u64, columns: Option<&[i16]>) {
        self.written.push(ColumnWrite {
            hash,
            relation,
            timestamp: 0,
            origin: 0,
            columns: columns.map(<[i16]>::to_vec),
        });
        if self.written.len() >= HELD {
            self.spill_written().unwrap_or_else(|error| error.raise());
        }
    }

    /// Move what is in memory to the file.
    fn spill_written(&mut self) -> Result<(), PgError> {
        let file = self.written_file.get_or_insert_with(Spool::create);
        let mut bytes = Vec::new();
        for write in self.written.drain(..) {
            bytes.clear();
            bytes.extend_from_slice(&write.relation.to_ne_bytes());
            bytes.extend_from_slice(&write.hash.to_ne_bytes());
            let columns = write.columns.as_deref().unwrap_or(&[ALL_COLUMNS]);
            bytes.extend(columns.iter().flat_map(|number| number.to_ne_bytes()));
            file.write(&bytes)?;
        }
        Ok(())
    }

    /// A row of a table with registers came, or changed: what it has written.
    ///
    /// # Safety
    /// The tuples are of the relation, which is open.
    unsafe fn note_written(
        &mut self,
        change: &Change,
        registers: &[i16],
        gone: Option<KeyHashes>,
        here: Option<KeyHashes>,
    ) {
        use pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE;
        let Some(hashes) = here.or(gone) else { return };
        if change.action == REORDER_BUFFER_CHANGE_DELETE || change.new.is_null() {
            return;
        }
        let moved = gone.is_some_and(|gone| gone.equal != hashes.equal);
        // A new row, or one under a key that it had not; or nobody knows what it was before.
        let columns = if change.old.is_null() || moved {
            None
        } else {
            // SAFETY: as the caller says.
            let written = unsafe { changed(change, registers) };
            if written.is_empty() {
                return;
            }
            Some(written)
        };
        // SAFETY: as the caller says.
        let relation = unsafe { (*change.relation).rd_id }.to_u32();
        for hash in hashes.each() {
            self.push_written(relation, hash, columns.as_deref());
        }
    }
}

/// What a tuple of a relation has in its columns; `None` for null.
///
/// # Safety
/// The tuple is of the descriptor.
unsafe fn taken_apart(
    descriptor: pg_sys::TupleDesc,
    tuple: pg_sys::HeapTuple,
) -> Vec<Option<pg_sys::Datum>> {
    // SAFETY: as the caller says; there is room for all columns.
    unsafe {
        let columns = usize::try_from((*descriptor).natts).unwrap_or(0);
        let mut values = vec![pg_sys::Datum::null(); columns];
        let mut nulls = vec![true; columns];
        pg_sys::heap_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
        let pairs = values.into_iter().zip(nulls);
        pairs
            .map(|(value, is_null)| (!is_null).then_some(value))
            .collect()
    }
}

/// A rule for a column is set: `braid.column_rule` has its table, its number, and the rule first.
///
/// # Safety
/// The tuple is of the relation, which is open.
unsafe fn note_rule(change: &Change) {
    // SAFETY: as the caller says; the table's columns are of these types.
    unsafe {
        let oid = (*change.relation).rd_id.to_u32();
        if with(|gathered| gathered.rules) != Some(oid) || change.new.is_null() {
            return;
        }
        let values = taken_apart((*change.relation).rd_att, change.new);
        let [Some(table), Some(number), Some(rule), ..] = values.as_slice() else {
            return;
        };
        let rule =
            pgrx::varlena_to_byte_slice(pg_sys::pg_detoast_datum_packed(rule.cast_mut_ptr()));
        if rule != ColumnRule::LastUpdateWins.name().as_bytes() {
            return;
        }
        let number = i16::from_datum(*number, false).unwrap_or(0);
        with(|gathered| gathered.registers.insert((low(*table), number)));
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
}

/// Which of these columns an update has given another value.
///
/// # Safety
/// The tuples are of the relation, which is open.
unsafe fn changed(change: &Change, columns: &[i16]) -> Vec<i16> {
    // SAFETY: as the caller says. Values that are not in WAL are not looked at; the others are in memory, whole or compressed.
    unsafe {
        let descriptor = (*change.relation).rd_att;
        let old = taken_apart(descriptor, change.old);
        let new = taken_apart(descriptor, change.new);
        let mut changed = Vec::new();
        for number in columns {
            let Ok(position) = usize::try_from(*number - 1) else {
                continue;
            };
            let (Some(old), Some(new)) = (old.get(position), new.get(position)) else {
                continue;
            };
            let attribute = compat::TupleDescAttr(descriptor, position);
            let is_large = |value: pg_sys::Datum| {
                (*attribute).attlen == -1 && is_elsewhere(value.cast_mut_ptr())
            };
            let is_same = match (*old, *new) {
                // Left as it was, and so not in WAL.
                (_, Some(new)) if is_large(new) => true,
                (Some(old), Some(new)) => {
                    !is_large(old)
                        && ffi::datum_image_eq(old, new, (*attribute).attbyval, (*attribute).attlen)
                }
                (old, new) => old.is_none() && new.is_none(),
            };
            if !is_same {
                changed.push(*number);
            }
        }
        changed
    }
}

/// # Safety
/// As `Deletions::look`.
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
        self.written.clear();
        self.written_file = None;
        // SAFETY: as the caller says.
        self.version = unsafe { version_of(ctx, txn) };
    }

    unsafe fn row_changed(
        &mut self,
        _ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        change: &Change,
    ) {
        use pg_sys::ReorderBufferChangeType::{
            REORDER_BUFFER_CHANGE_DELETE, REORDER_BUFFER_CHANGE_INSERT,
            REORDER_BUFFER_CHANGE_UPDATE,
        };
        if ![
            REORDER_BUFFER_CHANGE_DELETE,
            REORDER_BUFFER_CHANGE_INSERT,
            REORDER_BUFFER_CHANGE_UPDATE,
        ]
        .contains(&change.action)
            || change.author.origin != 0
        {
            return;
        }
        // SAFETY: the relation is open, and the tuple is its.
        unsafe { note_rule(change) };
        if change.old.is_null() && !change.new.is_null() {
            // SAFETY: the relation is open.
            let oid = unsafe { (*change.relation).rd_id };
            // Nothing has left its key: it is of interest for its columns only.
            if registers_of(oid).is_empty() {
                return;
            }
        }
        // SAFETY: the relation is open, and the tuples are its.
        unsafe {
            let relation = change.relation;
            let (key, registers) = match self.look(relation) {
                Some(Looked::Key(key, registers)) => (key, registers),
                Some(Looked::Row) => {
                    if !change.old.is_null() {
                        self.push((*relation).rd_id.to_u32(), Gone::Row(change.lsn));
                    }
                    return;
                }
                None => return,
            };
            let gone = hashes_of(relation, &key, change.old);
            let here = hashes_of(relation, &key, change.new);
            if !registers.is_empty() {
                self.note_written(change, &registers, gone, here);
            }
            let here = here.map(|here| here.equal);
            // A row that has another form of the same key has not left it.
            if let Some(gone) = gone.filter(|gone| here != Some(gone.equal)) {
                for hash in gone.each() {
                    self.push((*relation).rd_id.to_u32(), Gone::Key(hash));
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
                    self.push(oid.to_u32(), Gone::Key(table_hash(oid.to_u32())));
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
        if self.written_file.is_some() {
            self.spill_written().unwrap_or_else(|error| error.raise());
        }
        let written_file = self.written_file.take();
        for write in &mut self.written {
            write.timestamp = timestamp;
        }
        with(|gathered| {
            gathered.written.append(&mut self.written);
            gathered
                .large_written
                .extend(written_file.map(|file| LargeWritten { file, timestamp }));
            let end_lsn = txn.end_lsn;
            let by = By { timestamp, end_lsn };
            for (relation, gone) in self.in_hand.drain(..) {
                by.sort(relation, gone, &mut gathered.ended, &mut gathered.removed);
            }
            gathered.large.extend(file.map(|file| Large {
                file,
                timestamp,
                end_lsn,
            }));
        });
    }

    fn leave(&mut self) {}
}
