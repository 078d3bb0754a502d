//! Deleted rows and written columns that the collector of deletions (`super`) has gathered from WAL
//! and not stored yet. If a transaction has more of them than memory should hold, they are in a
//! file.
//!
//! `deletions` reads them from decoded changes.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use braid_node::column_write::ColumnWrite;
use braid_node::tombstone::Tombstone;
use braid_postgres::error::PgError;
use braid_postgres::relation;
use braid_postgres::spool::Spool;

use super::taken_rows::Removal;

thread_local! {
    static GATHERED: RefCell<Option<Gathered>> = const { RefCell::new(None) };
}

/// Deletions of one transaction that are held in memory.
const HELD: usize = 1 << 16;
/// Bytes of a deletion in a file: kind of table, table, and a number.
const BYTES: usize = 13;
/// Bytes of a column write's head in a file: table and hash.
const WRITE_BYTES: usize = 12;

/// Grows with each relcache invalidation.
static GENERATION: AtomicU64 = AtomicU64::new(0);

fn on_invalidation(_relation: pgrx::pg_sys::Oid) {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Returns a number that changes when relations, or the wanted tables and columns, may have
/// changed.
pub(super) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// The state of the collector's process.
#[derive(Debug, Default)]
struct Gathered {
    /// Tables of which deletions are wanted, or tables above them.
    tables: HashSet<u32>,
    /// Their names: schema and table.
    names: HashSet<(String, String)>,
    /// All tables are published.
    publishes_all: bool,
    /// Columns that are registers of their own: table and number. None is ever removed: writes of
    /// other columns do no harm.
    registers: BTreeSet<(u32, i16)>,
    /// `braid.column_rule`.
    rules: u32,
    /// Of transactions that have committed.
    ended: Vec<Tombstone>,
    removed: Vec<Removal>,
    /// Written columns of transactions that have committed.
    written: Vec<ColumnWrite>,
    /// Deletions of transactions with more of them than memory should hold.
    large: Vec<Large>,
    large_written: Vec<LargeWritten>,
}

/// The deletions of a large transaction.
#[derive(Debug)]
pub(crate) struct Large {
    file: Spool,
    timestamp: i64,
    end_lsn: u64,
}

/// A row that is gone from a table.
#[derive(Debug, Clone, Copy)]
pub(super) enum Gone {
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
    /// Gathers the rows that this transaction has removed from a table.
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

/// The columns that a large transaction has written.
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
    /// Passes all of it on, chunk by chunk.
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

/// Begins to gather in this process.
pub(super) fn begin() {
    relation::on_invalidation(on_invalidation);
    GATHERED.set(Some(Gathered::default()));
}

/// The tables and columns that the collector watches.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// Tables of which deletions are.
    pub(crate) tables: HashSet<u32>,
    /// Their names: schema and table.
    pub(crate) names: HashSet<(String, String)>,
    /// There is a publication for all tables.
    pub(crate) publishes_all: bool,
    /// Columns that are registers of their own: table and number.
    pub(crate) registers: Vec<(u32, i16)>,
    /// `braid.column_rule`.
    pub(crate) rules: u32,
}

/// Sets the wanted tables and columns.
pub(crate) fn want(wanted: Wanted) {
    with(|gathered| {
        gathered.tables = wanted.tables;
        gathered.names = wanted.names;
        gathered.publishes_all = wanted.publishes_all;
        // A column that WAL has announced may not be visible in the catalog yet.
        gathered.registers.extend(wanted.registers);
        gathered.rules = wanted.rules;
    });
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Gathered deletions and writes of committed transactions.
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

/// Returns the gathered deletions and writes since the last call.
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

/// Columns of a table that are registers of their own.
pub(super) fn registers_of(table: u32) -> Vec<i16> {
    with(|gathered| {
        let of = gathered
            .registers
            .range((table, i16::MIN)..=(table, i16::MAX));
        of.map(|(_, number)| *number).collect()
    })
    .unwrap_or_default()
}

/// Whether deletions of a table itself are wanted.
pub(super) fn is_listed(table: u32) -> bool {
    with(|gathered| gathered.tables.contains(&table)) == Some(true)
}

/// Whether a table of this name is one of them, or there is a publication for all tables.
pub(super) fn is_awaited(name: &(String, String)) -> bool {
    with(|gathered| gathered.publishes_all || gathered.names.contains(name)) == Some(true)
}

/// Whether a table is `braid.column_rule`.
pub(super) fn is_table_of_rules(table: u32) -> bool {
    with(|gathered| gathered.rules) == Some(table)
}

/// Makes a column a register of its own.
pub(super) fn add_register(table: u32, number: i16) {
    with(|gathered| gathered.registers.insert((table, number)));
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Deletions and writes of the current transaction.
#[derive(Debug, Default)]
pub(super) struct InHand {
    gone: Vec<(u32, Gone)>,
    /// More deletions.
    file: Option<Spool>,
    /// Columns that it has written.
    written: Vec<ColumnWrite>,
    /// More written columns.
    written_file: Option<Spool>,
}

impl InHand {
    /// A transaction begins.
    pub(super) fn clear(&mut self) {
        self.gone.clear();
        self.file = None;
        self.written.clear();
        self.written_file = None;
    }

    /// A row is gone from a table.
    pub(super) fn push(&mut self, relation: u32, gone: Gone) {
        self.gone.push((relation, gone));
        if self.gone.len() >= HELD {
            self.spill().unwrap_or_else(|error| error.raise());
        }
    }

    /// Moves the deletions in memory to the file.
    fn spill(&mut self) -> Result<(), PgError> {
        let mut bytes = Vec::with_capacity(self.gone.len() * BYTES);
        for (relation, gone) in self.gone.drain(..) {
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

    /// Columns of a row were written; without a list all of them.
    pub(super) fn push_written(&mut self, relation: u32, hash: u64, columns: Option<&[i16]>) {
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

    /// Moves the written columns in memory to the file.
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

    /// The transaction has committed, with this version, and ends at `end_lsn`: its changes wait to
    /// be taken.
    ///
    /// # Errors
    /// Those of writing to a file.
    pub(super) fn commit(&mut self, timestamp: i64, end_lsn: u64) -> Result<(), PgError> {
        if self.file.is_some() {
            self.spill()?;
        }
        let file = self.file.take();
        if self.written_file.is_some() {
            self.spill_written()?;
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
            let by = By { timestamp, end_lsn };
            for (relation, gone) in self.gone.drain(..) {
                by.sort(relation, gone, &mut gathered.ended, &mut gathered.removed);
            }
            gathered.large.extend(file.map(|file| Large {
                file,
                timestamp,
                end_lsn,
            }));
        });
        Ok(())
    }
}
