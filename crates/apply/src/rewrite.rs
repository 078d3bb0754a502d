//! Versions of rows whose table a statement has rewritten: `ALTER TABLE` with another type of a
//! column, a volatile default, and the like. Run by the session or applier that executes the
//! statement, and by processes that need a version.
//!
//! The statement writes all rows again. Without more, each row would get the statement's version,
//! at every node another one. A change that is on its way, older than the statement and newer than
//! the row, would lose at one node and win at another. So rows keep their versions:
//!
//! | a rewritten row whose last writer was | has its version in |
//! |---|---|
//! | an earlier transaction, if an older change can still arrive | `braid.copied_version` |
//! | a transaction before those | no place: it is older than every change that can arrive |
//! | the transaction itself, before the statement or after it | the transaction's commit |
//!
//! A row of `braid.rewrite` says which transaction, or subtransaction, has rewritten which table.
//! The row has the hashes of rows that the transaction had written before the statement. Rows that
//! it has written afterwards are recognized by their place behind the statement's last row, or as
//! new states of rows. `VACUUM FULL` and `CLUSTER` give rows other places. Then rows that the
//! transaction inserted after the statement count as older than every change that can arrive.
//!
//! The table is read before and after the statement. In between, rows are identified by their
//! order: PostgreSQL reads the old file from beginning to end, and writes the new one in the same
//! order. The old rows are not deformed, because the catalog has the new types by then. Hashes are
//! made of the new rows. So if the type of a key changes, a row that was itself copied, written in
//! a batch or rewritten lately is not found among those. It counts as older than every change that
//! can arrive, or as the newest of its batch.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_node::tombstone::{self, Tombstone};
use braid_node::{ddl, registry};
use braid_postgres::catalog::{Rights, query, with_rights};
use braid_postgres::error::PgError;
use braid_postgres::heap_page::{Place, place_of};
use braid_postgres::memory::Scratch;
use braid_postgres::names::{find_table, own_table};
use braid_postgres::relation::RelationRef;
use braid_postgres::sequential_scan::SequentialScan;
use braid_postgres::slot::Slot;
use braid_postgres::table_scan::{self, Cell, Is, Sees, int8, low};
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};
use braid_postgres::xid::full;
use braid_postgres::{latch, transaction};
use pgrx::pg_sys;

use super::batch::{self, KEEP_MERGED};
use super::copied::{self, From, Keys, stamp_by, with_table};
use super::version::{Stamp, stamp_of, tells_none};
use crate::FIRST_NORMAL_OBJECT;

/// Columns of `braid.rewrite`.
const COLUMNS: usize = 7;
/// Positions of some of them, from 0: the file, the last place (block and item), and the hashes of
/// the transaction's own rows.
const FILE: usize = 3;
const BLOCK: usize = 4;
const ITEM: usize = 5;
const OWN: usize = 6;
/// Number of versions that are stored at a time.
const PIECE: usize = 1000;
/// Number of transactions whose age is remembered while a table is read.
const REMEMBERED: usize = 100_000;
/// Time that a server that was just started may take to know which changes can still arrive.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Author of a row whose transaction may have rewritten its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Author {
    /// The transaction that wrote the row; also if it has rewritten other tables and not this one.
    Transaction,
    /// An earlier transaction: the row has the stored version, or none.
    Other,
}

/// A table that a transaction has rewritten.
#[derive(Debug)]
struct Rewrite {
    /// The file that the transaction has written.
    file: u32,
    /// Place of the statement's last row in it.
    last: Place,
    /// Hashes of the rows that were the transaction's own, sorted.
    own: Vec<u64>,
}

/// Contents of `braid.rewrite` that a process has read.
#[derive(Debug, Default)]
struct Known {
    /// Value of `registry::rewrites` when the table was read.
    at: Option<u64>,
    /// Ids of all transactions, without their epochs.
    transactions: HashSet<u32>,
    /// By transaction and table.
    tables: HashMap<(u32, u32), Option<Rc<Rewrite>>>,
}

thread_local! {
    static KNOWN: RefCell<Known> = RefCell::default();
}

/// Whether a transaction, which may be in progress, has rewritten any table, as far as is
/// remembered.
pub(super) fn has_rewritten(xid: pg_sys::TransactionId) -> bool {
    let count = registry::rewrites();
    let short = xid.into_inner();
    let known = KNOWN.with_borrow(|known| {
        (known.at == Some(count)).then(|| known.transactions.contains(&short))
    });
    known.unwrap_or_else(|| load(count).contains(&short))
}

/// Reads all transactions of `braid.rewrite`. Those in progress count too: when one commits, its
/// rows become visible at once.
fn load(count: u64) -> HashSet<u32> {
    let mut transactions = HashSet::new();
    if !transaction::is_open() {
        return transactions;
    }
    if let Ok(Some(table)) = find_table("braid", "rewrite") {
        table_scan::each::<COLUMNS>(table, None, Sees::Running, |row| {
            let [xid, ..] = row.values;
            transactions.insert(low(xid));
            ControlFlow::Continue(())
        });
    }
    KNOWN.set(Known {
        at: Some(count),
        transactions: transactions.clone(),
        tables: HashMap::new(),
    });
    transactions
}

/// Finds the author of the row in a slot, which is one of a table and has this writer. In a
/// transaction.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub(super) fn author(
    relation: pg_sys::Oid,
    xid: pg_sys::TransactionId,
    slot: &Slot,
) -> Result<Author, PgError> {
    let is_later = is_later(relation, xid, slot)?;
    if is_later != Some(false) {
        return author_by(relation, xid, is_later, || None);
    }
    with_table(relation, |table| {
        author_by(relation, xid, is_later, || Some(Keys::of(table, slot)))
    })
}

/// As [`author`], given whether the row [`is_later`], and its hashes.
fn author_by(
    relation: pg_sys::Oid,
    xid: pg_sys::TransactionId,
    is_later: Option<bool>,
    keys: impl FnOnce() -> Option<Keys>,
) -> Result<Author, PgError> {
    Ok(match is_later {
        None | Some(true) => Author::Transaction,
        Some(false) => {
            let own = rewrite_of(relation, xid)?.filter(|rewrite| !rewrite.own.is_empty());
            let is_own = own.is_some_and(|rewrite| {
                let hash = keys().and_then(own_hash);
                hash.is_some_and(|hash| rewrite.own.binary_search(&hash).is_ok())
            });
            if is_own {
                Author::Transaction
            } else {
                Author::Other
            }
        }
    })
}

/// Whether the writer of the row in a slot has written it after it has rewritten the table; `None`
/// if it has not rewritten that table. The row is not deformed. In a transaction.
fn is_later(
    relation: pg_sys::Oid,
    xid: pg_sys::TransactionId,
    slot: &Slot,
) -> Result<Option<bool>, PgError> {
    let Some(rewrite) = rewrite_of(relation, xid)? else {
        return Ok(None);
    };
    let header = slot.header();
    // A new state of a row.
    if header.is_some_and(|header| header.infomask & pg_sys::HEAP_UPDATED != 0) {
        return Ok(Some(true));
    }
    let is_behind = place_of(slot.tid()) > rewrite.last;
    let is_later = is_behind && with_table(relation, |table| Ok(table.file() == rewrite.file))?;
    Ok(Some(is_later))
}

/// Looks up a table among those that a transaction has rewritten.
fn rewrite_of(
    relation: pg_sys::Oid,
    xid: pg_sys::TransactionId,
) -> Result<Option<Rc<Rewrite>>, PgError> {
    if !has_rewritten(xid) {
        return Ok(None);
    }
    let name = (xid.into_inner(), relation.to_u32());
    let known = KNOWN.with_borrow(|known| known.tables.get(&name).cloned());
    if let Some(known) = known {
        return Ok(known);
    }
    let rewrite = read(relation, full(xid))?.map(Rc::new);
    KNOWN.with_borrow_mut(|known| known.tables.insert(name, rewrite.clone()));
    Ok(rewrite)
}

/// Returns the hash that the row has among the transaction's own rows.
fn own_hash(keys: Keys) -> Option<u64> {
    keys.hashes.map(|hashes| hashes.stored).or(keys.row_hash)
}

fn read(relation: pg_sys::Oid, xid: u64) -> Result<Option<Rewrite>, PgError> {
    let (Some(table), Some(index)) = (
        find_table("braid", "rewrite")?,
        find_table("braid", "rewrite_pkey")?,
    ) else {
        return Ok(None);
    };
    let by = [Is::Bigint(1, xid.cast_signed()), Is::Oid(2, relation)];
    let mut found = None;
    table_scan::find::<COLUMNS>(table, index, &by, Sees::Running, |row| {
        let number = |column: usize| row.value(column).map_or(0, int8);
        let own = row.with_bytes(OWN, |bytes| {
            let (hashes, _) = bytes.as_chunks::<8>();
            hashes
                .iter()
                .map(|hash| u64::from_le_bytes(*hash))
                .collect()
        });
        found = Some(Rewrite {
            file: u32::try_from(number(FILE)).unwrap_or(0),
            last: (
                u32::try_from(number(BLOCK)).unwrap_or(u32::MAX),
                row.value(ITEM)
                    .map_or(0, |item| u16::try_from(low(item)).unwrap_or(u16::MAX)),
            ),
            own: own.unwrap_or_default(),
        });
        ControlFlow::Break(())
    });
    Ok(found)
}

/// A row that is about to be rewritten, and that an older change may still meet.
#[derive(Debug, Clone, Copy)]
struct Row {
    /// Number of the row in the order of rows, from 0.
    place: u64,
    /// The transaction that wrote it.
    xid: pg_sys::TransactionId,
    /// Result of [`is_later`].
    is_later: Option<bool>,
}

/// A table that is about to be rewritten.
#[derive(Debug)]
struct Before {
    relation: pg_sys::Oid,
    /// Time before which no change arrives any more.
    arrived: i64,
    /// Number of rows of the table.
    count: u64,
    /// Rows whose versions have to be kept, in order.
    rows: Vec<Row>,
}

/// Called before a statement rewrites a table. Returns a function that stores the versions of the
/// rows, to be called after the statement. In its transaction.
///
/// Raises whatever PostgreSQL raises.
#[must_use]
pub fn table_is_rewritten(relation: pg_sys::Oid) -> Option<Box<dyn FnOnce()>> {
    if relation.to_u32() < FIRST_NORMAL_OBJECT {
        return None;
    }
    let arrived = arrived_before()?;
    let before = with_table(relation, |table| {
        let is_kept = table.kind() == b'r' && table.is_heap() && table.persistence() != b't';
        if is_kept {
            Before::read(table, arrived).map(Some)
        } else {
            Ok(None)
        }
    });
    let before = before.unwrap_or_else(|error| error.raise())?;
    Some(Box::new(move || {
        before.write().unwrap_or_else(|error| error.raise());
    }))
}

/// Returns the time before which no change arrives any more; `None` if no changes arrive at all.
fn arrived_before() -> Option<i64> {
    let entry = registry::my_manager()?;
    // Not by SQL: the statement is in the middle of a command.
    let mut sources = ["subscription", "ingest_source"].into_iter();
    let arrives = sources.any(|table| {
        let table = find_table("braid", table).ok().flatten();
        table.is_some_and(|table| {
            table_scan::has_any(table, pg_sys::InvalidOid, &[], Sees::Committed)
        })
    });
    if !arrives {
        return None;
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        match entry.arrived_before.load(Ordering::Acquire) {
            0 if Instant::now() < deadline => {
                latch::wait(Some(PAUSE));
            }
            // Not known: all rows with a version count.
            0 => return Some(i64::MIN),
            before => return Some(before),
        }
    }
}

impl Before {
    /// Reads the writers of the rows. The rows are not deformed: the catalog has other column types
    /// than the rows by now.
    fn read(table: RelationRef<'_>, arrived: i64) -> Result<Self, PgError> {
        let relation = table.oid();
        let merging = batch::merging()?;
        let is_old = |xid: pg_sys::TransactionId| match stamp_of(xid) {
            Stamp::Unversioned => !tells_none(xid),
            Stamp::Known(timestamp, _) => {
                timestamp < arrived && (merging.is_empty() || !merging.contains(&full(xid)))
            }
            Stamp::Own | Stamp::Merged(..) | Stamp::OwnMerged(..) => false,
        };
        let mut before = Self {
            relation,
            arrived,
            count: 0,
            rows: Vec::new(),
        };
        let mut ages: HashMap<u32, bool> = HashMap::new();
        table.with_slot(|slot| {
            let mut rows = SequentialScan::of_latest(table, slot)?;
            while rows.advance() {
                pgrx::check_for_interrupts!();
                let place = before.count;
                before.count += 1;
                let xid = slot.writer();
                if ages.len() >= REMEMBERED {
                    ages.clear();
                }
                if *ages.entry(xid.into_inner()).or_insert_with(|| is_old(xid)) {
                    continue;
                }
                let is_later = is_later(relation, xid, slot)?;
                before.rows.push(Row {
                    place,
                    xid,
                    is_later,
                });
            }
            Ok(before)
        })
    }

    /// Stores the versions after the table was rewritten.
    fn write(self) -> Result<(), PgError> {
        transaction::next_command();
        let xid = transaction::current_id();
        let relation = self.relation;
        ddl::note_rewritten(relation, xid)?;
        let after = with_table(relation, |table| self.look(table, xid))?;
        let Some(after) = after else {
            PgError::new(
                SqlState::Warning,
                format!(
                    "the rows of table {} are not those that the statement has found, so all of them have its version",
                    relation.to_u32()
                ),
            )
            .with_hint("When all nodes have run the statement, run braid.compare for the table.")
            .warn();
            return Ok(());
        };
        after.store(relation, full(xid))
    }

    /// Reads the rows that were written. Returns `None` if they are not those that were there
    /// before.
    fn look(
        &self,
        table: RelationRef<'_>,
        xid: pg_sys::TransactionId,
    ) -> Result<Option<After>, PgError> {
        let copied_from = copied::tables(table.oid())?;
        let mut after = After {
            file: table.file(),
            last: (0, 0),
            newest: timestamp::now().saturating_add(EPOCH_DIFFERENCE),
            own: Vec::new(),
            versions: Vec::new(),
        };
        let mut known = self.rows.iter().peekable();
        let mut count = 0;
        table.with_slot(|slot| {
            let mut rows = SequentialScan::of_latest(table, slot)?;
            let mut memory = Scratch::new(c"braid rows that were rewritten");
            while rows.advance() {
                pgrx::check_for_interrupts!();
                let place = count;
                count += 1;
                if slot.writer() != xid {
                    return Ok(None);
                }
                after.last = after.last.max(place_of(slot.tid()));
                let Some(row) = known.next_if(|row| row.place == place) else {
                    continue;
                };
                memory.run(|| {
                    let keys = Keys::of(table, slot);
                    let author = author_by(self.relation, row.xid, row.is_later, || Some(keys))?;
                    let stamp = stamp_by(table, slot, (row.xid, author), keys, || {
                        Ok(copied_from.clone())
                    })?;
                    after.take(self, keys, stamp);
                    Ok::<_, PgError>(())
                })?;
            }
            Ok((count == self.count).then_some(after))
        })
    }
}

/// A table that was rewritten.
#[derive(Debug)]
struct After {
    file: u32,
    last: Place,
    /// Newest time of its records, microseconds since 1970-01-01 UTC.
    newest: i64,
    /// Hashes of the transaction's own rows.
    own: Vec<u64>,
    versions: Vec<(Tombstone, bool)>,
}

impl After {
    /// Adds the version of a row.
    fn take(&mut self, before: &Before, keys: Keys, stamp: Stamp) {
        // Merge markers are kept for longer.
        let (timestamp, origin, merged) = match stamp {
            Stamp::Own => {
                self.own.extend(own_hash(keys));
                return;
            }
            Stamp::Known(at, origin) if at >= before.arrived => (at, origin, false),
            Stamp::Merged(at, origin) | Stamp::OwnMerged(at, origin)
                if at >= before.arrived.saturating_sub(KEEP_MERGED) =>
            {
                (at, origin, true)
            }
            Stamp::Unversioned | Stamp::Known(..) | Stamp::Merged(..) | Stamp::OwnMerged(..) => {
                return;
            }
        };
        let kept = if merged { KEEP_MERGED } else { 0 };
        self.newest = self.newest.max(timestamp.saturating_add(kept));
        let relation = before.relation.to_u32();
        let hashes = keys.copied(From::itself(before.relation));
        self.versions.extend(hashes.map(|hash| {
            let row = Tombstone {
                hash,
                relation,
                timestamp,
                origin,
            };
            (row, merged)
        }));
    }

    fn store(mut self, relation: pg_sys::Oid, xid: u64) -> Result<(), PgError> {
        self.own.sort_unstable();
        self.own.dedup();
        for piece in self.versions.chunks(PIECE) {
            tombstone::store_copied(piece)?;
            pgrx::check_for_interrupts!();
        }
        let xid = xid.cast_signed();
        // An earlier statement of the transaction may have rewritten the table, too.
        let (one, other) = (xid.to_string(), relation.to_u32().to_string());
        with_rights(Rights::ExtensionOwner, || {
            let by = [Some(one.as_str()), Some(other.as_str())];
            query(
                "delete from braid.rewrite where xid = $1::bigint and relation = $2::oid",
                &by,
            );
        });
        let own: Vec<u8> = self
            .own
            .iter()
            .flat_map(|hash| hash.to_le_bytes())
            .collect();
        let (block, item) = self.last;
        let row: [Cell<'_>; COLUMNS] = [
            Cell::Bigint(xid),
            Cell::Oid(relation),
            Cell::Bigint(self.newest),
            Cell::Bigint(i64::from(self.file)),
            Cell::Bigint(i64::from(block)),
            Cell::Integer(i32::from(item)),
            Cell::Bytes(&own),
        ];
        table_scan::insert(own_table("rewrite")?, std::iter::once(row));
        transaction::next_command();
        registry::count_rewrite();
        Ok(())
    }
}
