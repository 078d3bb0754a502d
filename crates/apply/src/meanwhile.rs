//! What other nodes' changes have done to a table while a copy filled it. Run by the copy workers.
//!
//! Such a change does not see the copy's rows, nor what came along with them (`workers/copy/versions.rs`), before the copy has committed;
//! and the copy does not look whether a row was deleted here. So once all is there, and before it is committed, nobody may write, and
//! all rows are looked at:
//!
//! | row | leaves when |
//! |---|---|
//! | copied | a change that came here meanwhile has deleted it, and is newer |
//! | another node's | the provider had another version of it, or its deletion, that is newer |
//!
//! A copied row of no known version is as old as what no change is older than any more.

use std::cell::RefCell;
use std::collections::HashSet;

use braid_bgworker::compare::as_version;
use braid_node::local_version::commit_data;
use braid_node::tombstone;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

use super::copied::{self, From, hasher, version_in, with_table};
use super::key_hash::KeyHashes;
use super::lookup::writer;
use super::scan;
use super::version::OriginNames;

/// Rows of a table that are to leave, by their places.
#[derive(Debug, Default)]
pub struct Leaving {
    /// Copied, and deleted meanwhile; or written meanwhile, and deleted by what the copy has brought.
    pub deleted: Vec<String>,
    /// Written meanwhile, and older than what the copy has of them.
    pub replaced: Vec<String>,
}

/// Rows of an ordinary table that are to leave. Nothing that comes from another node is older than `since`, microseconds since 1970-01-01
/// UTC. `copied_to` is the table that was filled: this one, or that of which it is a partition. `deleted_here` has what others have deleted in this one
/// ([`tombstone::received`]). `node` is this one's name.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn leaving(
    table: u32,
    copied_to: u32,
    deleted_here: &HashSet<u64>,
    since: i64,
    node: &str,
) -> Result<Leaving, PgError> {
    let from: Vec<From> = copied::tables(copied_to.into())?;
    let names = OriginNames::new(node);
    with_table(table.into(), |relation| {
        let look = Look {
            relation,
            from,
            deleted_here,
            names: RefCell::new(names),
            since,
        };
        // SAFETY: the table is open and locked; in a transaction.
        unsafe { look.at_all() }
    })
}

/// Remove the rows of a table that one of these origins has brought; `None`: all rows. Whatever its replica identity is: nobody is told.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn remove_from(
    table: u32,
    origins: Option<&HashSet<pg_sys::RepOriginId>>,
) -> Result<(), PgError> {
    with_table(table.into(), |relation| {
        // SAFETY: the table is open, and locked against writers; the snapshot is registered, and the scan ended, unless an error ends
        // the transaction.
        unsafe {
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let slot = pg_sys::table_slot_create(relation, std::ptr::null_mut());
            let rows = scan::begin(relation, snapshot)?;
            while scan::next(relation, rows, slot) {
                pgrx::check_for_interrupts!();
                let leaves = origins.is_none_or(|origins| {
                    commit_data(writer(slot)).is_some_and(|(_, origin)| origins.contains(&origin))
                });
                if leaves {
                    pg_sys::simple_table_tuple_delete(relation, &raw mut (*slot).tts_tid, snapshot);
                }
            }
            scan::end(relation, rows);
            pg_sys::ExecDropSingleTupleTableSlot(slot);
            pg_sys::UnregisterSnapshot(snapshot);
            pg_sys::CommandCounterIncrement();
            Ok(())
        }
    })
}

struct Look<'a> {
    relation: pg_sys::Relation,
    from: Vec<From>,
    /// By the hashes that a key has here.
    deleted_here: &'a HashSet<u64>,
    names: RefCell<OriginNames>,
    since: i64,
}

impl Look<'_> {
    /// # Safety
    /// The table is open and locked against writers.
    unsafe fn at_all(&self) -> Result<Leaving, PgError> {
        // SAFETY: as the caller says. The snapshot is registered, and the scan ended, unless an error ends the transaction.
        unsafe {
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let slot = pg_sys::table_slot_create(self.relation, std::ptr::null_mut());
            let rows = scan::begin(self.relation, snapshot)?;
            // A table may have any number of rows.
            let memory = super::memory_context(c"braid rows beside a copy");
            let mut leaving = Leaving::default();
            while scan::next(self.relation, rows, slot) {
                pgrx::check_for_interrupts!();
                let is_copied = pg_sys::TransactionIdIsCurrentTransactionId(writer(slot));
                if is_copied && self.deleted_here.is_empty() {
                    continue;
                }
                let before = pg_sys::MemoryContextSwitchTo(memory);
                let fate = if is_copied {
                    self.copied(slot)
                } else {
                    self.written(slot)
                };
                pg_sys::MemoryContextSwitchTo(before);
                pg_sys::MemoryContextReset(memory);
                match fate? {
                    Fate::Stays => {}
                    Fate::Deleted => leaving.deleted.push(place(slot)),
                    Fate::Replaced => leaving.replaced.push(place(slot)),
                }
            }
            pg_sys::MemoryContextDelete(memory);
            scan::end(self.relation, rows);
            pg_sys::ExecDropSingleTupleTableSlot(slot);
            pg_sys::UnregisterSnapshot(snapshot);
            Ok(leaving)
        }
    }

    fn version(&self, (timestamp, origin): (i64, pg_sys::RepOriginId)) -> (i64, String) {
        (timestamp, self.names.borrow_mut().node(origin).to_owned())
    }

    /// # Safety
    /// The slot holds a row of the table.
    unsafe fn copied(&self, slot: *mut pg_sys::TupleTableSlot) -> Result<Fate, PgError> {
        // SAFETY: as the caller says.
        let hashes_as = unsafe { hasher(self.relation, slot) };
        let hashes = hashes_as(self.oid()).into_iter().flat_map(KeyHashes::each);
        let mut deleted = None;
        for here in hashes.filter(|hash| self.deleted_here.contains(hash)) {
            deleted = deleted.max(tombstone::find(here, tombstone::Seen::Committed)?);
        }
        if deleted.is_none() {
            return Ok(Fate::Stays);
        }
        let brought = self.newest(&hashes_as, brought)?;
        let is_newer = |deleted| match brought {
            Some(brought) => {
                as_version(&self.version(deleted)) > as_version(&self.version(brought))
            }
            None => deleted.0 > self.since,
        };
        Ok(if deleted.is_some_and(is_newer) {
            Fate::Deleted
        } else {
            Fate::Stays
        })
    }

    /// # Safety
    /// The slot holds a row of the table.
    unsafe fn written(&self, slot: *mut pg_sys::TupleTableSlot) -> Result<Fate, PgError> {
        // SAFETY: as the caller says.
        let (row, hashes_as) = unsafe {
            (
                version_in(self.relation, slot)?,
                hasher(self.relation, slot),
            )
        };
        let is_newer = |found: &(i64, pg_sys::RepOriginId)| match &row {
            Some(row) => {
                as_version(&self.version(*found)) > as_version(&(row.timestamp, row.node.clone()))
            }
            None => found.0 > self.since,
        };
        let brought = self.newest(&hashes_as, brought)?;
        let deleted = self.newest(&hashes_as, |hash| {
            tombstone::find(hash, tombstone::Seen::Committed)
        })?;
        let (brought, deleted) = (brought.filter(is_newer), deleted.filter(is_newer));
        Ok(match (brought, deleted) {
            (None, None) => Fate::Stays,
            (Some(_), None) => Fate::Replaced,
            (None, Some(_)) => Fate::Deleted,
            (Some(brought), Some(deleted)) => {
                if as_version(&self.version(deleted)) > as_version(&self.version(brought)) {
                    Fate::Deleted
                } else {
                    Fate::Replaced
                }
            }
        })
    }

    /// The newest that the copy has brought for a row's key.
    fn newest(
        &self,
        hashes_as: &impl Fn(u32) -> Option<KeyHashes>,
        find: impl Fn(u64) -> Result<Option<(i64, pg_sys::RepOriginId)>, PgError>,
    ) -> Result<Option<(i64, pg_sys::RepOriginId)>, PgError> {
        let mut newest = None;
        for from in &self.from {
            for hash in from.hashes(hashes_as) {
                let found = find(hash)?;
                newest = newest.max(found);
            }
        }
        Ok(newest)
    }

    fn oid(&self) -> u32 {
        // SAFETY: the table is open as long as this value is there.
        unsafe { (*self.relation).rd_id }.to_u32()
    }
}

/// The version with which the copy has brought a row.
fn brought(hash: u64) -> Result<Option<(i64, pg_sys::RepOriginId)>, PgError> {
    let found = tombstone::find_copied(hash)?;
    Ok(found.map(|found| (found.timestamp, found.origin)))
}

enum Fate {
    Stays,
    Deleted,
    Replaced,
}

/// As a tid is written.
///
/// # Safety
/// The slot holds a row of a table.
unsafe fn place(slot: *mut pg_sys::TupleTableSlot) -> String {
    // SAFETY: as the caller says.
    let (block, offset) = pgrx::itemptr::item_pointer_get_both(unsafe { (*slot).tts_tid });
    format!("({block},{offset})")
}
