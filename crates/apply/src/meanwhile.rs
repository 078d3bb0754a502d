//! Reconciles a copied table with changes of other nodes that came while the copy filled it. Run by
//! the copy workers.
//!
//! Such a change does not see the copy's rows, nor the versions and deletions that came with them
//! (`workers/copy/versions.rs`), before the copy has committed. And the copy does not check whether
//! a row was deleted here. So when all rows are loaded, and before the commit, writers are locked
//! out and all rows are checked:
//!
//! | row | is deleted if |
//! |---|---|
//! | copied | a newer change that came meanwhile has deleted it |
//! | of another node, or this one | the provider had a newer version, or deletion, of it |
//!
//! A copied row without a known version counts as old as changes that can't arrive any more.

use std::cell::RefCell;
use std::collections::HashSet;

use braid_bgworker::compare::as_version;
use braid_node::local_version::commit_data;
use braid_node::tombstone;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::memory::Scratch;
use braid_postgres::relation::RelationRef;
use braid_postgres::sequential_scan::SequentialScan;
use braid_postgres::slot::Slot;
use braid_postgres::transaction;

use super::copied::{self, From, Keys, hasher, stamp_in, version_in, with_table};
use super::key_hash::KeyHashes;
use super::rewrite::has_rewritten;
use super::version::OriginNames;

/// Rows of a table that are to be deleted, by their places.
#[derive(Debug, Default)]
pub struct Leaving {
    /// Copied, and deleted by a change that came meanwhile.
    pub deleted: Vec<String>,
    /// Written meanwhile, and deleted by a deletion that the copy has brought. The provider also
    /// reports rows as deleted that have lost a unique conflict there.
    pub gone: Vec<String>,
    /// Written meanwhile, and older than the copy's version.
    pub replaced: Vec<String>,
}

/// Returns the rows of an ordinary table that are to be deleted. No change from another node is
/// older than `since`, microseconds since 1970-01-01 UTC. `copied_to` is the table that was filled:
/// this one, or one of which it is a partition. `deleted_here` has the deletions of others in this
/// table ([`tombstone::received`]). `node` is the name of this node.
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
        look.at_all()
    })
}

/// Deletes the rows of a table that one of these origins has brought; `None`: all rows. The replica
/// identity does not matter: the deletions are not sent.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn remove_from(table: u32, origins: Option<&HashSet<ReplOriginId>>) -> Result<(), PgError> {
    with_table(table.into(), |relation| {
        relation.with_slot(|slot| {
            let mut rows = SequentialScan::of_latest(relation, slot)?;
            while rows.advance() {
                pgrx::check_for_interrupts!();
                let leaves = match origins {
                    None => true,
                    Some(origins) => {
                        let origin = origin_in(relation, slot)?;
                        origin.is_some_and(|origin| origins.contains(&origin))
                    }
                };
                if leaves {
                    rows.delete();
                }
            }
            Ok::<(), PgError>(())
        })?;
        transaction::next_command();
        Ok(())
    })
}

/// Returns the origin that has brought the row in a slot of a table, as far as it is known.
fn origin_in(relation: RelationRef<'_>, slot: &Slot) -> Result<Option<ReplOriginId>, PgError> {
    let xid = slot.writer();
    if has_rewritten(xid) {
        let stamp = stamp_in(relation, slot, Keys::of(relation, slot), || Ok(Vec::new()))?;
        if let Some((_, origin)) = stamp.known() {
            return Ok(Some(origin));
        }
    }
    Ok(commit_data(xid).map(|(_, origin)| origin))
}

struct Look<'a> {
    relation: RelationRef<'a>,
    from: Vec<From>,
    /// By the local hashes of keys.
    deleted_here: &'a HashSet<u64>,
    names: RefCell<OriginNames>,
    since: i64,
}

impl Look<'_> {
    /// Checks all rows. The table is locked against writers.
    fn at_all(&self) -> Result<Leaving, PgError> {
        self.relation.with_slot(|slot| self.at_rows(slot))
    }

    fn at_rows(&self, slot: &Slot) -> Result<Leaving, PgError> {
        let mut rows = SequentialScan::of_latest(self.relation, slot)?;
        let mut memory = Scratch::new(c"braid rows beside a copy");
        let mut leaving = Leaving::default();
        while rows.advance() {
            pgrx::check_for_interrupts!();
            let is_copied = transaction::is_own(slot.writer());
            if is_copied && self.deleted_here.is_empty() {
                continue;
            }
            let fate = memory.run(|| {
                if is_copied {
                    self.copied(slot)
                } else {
                    self.written(slot)
                }
            });
            match fate? {
                Fate::Stays => {}
                Fate::Deleted if is_copied => leaving.deleted.push(place(slot)),
                Fate::Deleted => leaving.gone.push(place(slot)),
                Fate::Replaced => leaving.replaced.push(place(slot)),
            }
        }
        Ok(leaving)
    }

    fn version(&self, (timestamp, origin): (i64, ReplOriginId)) -> (i64, String) {
        (timestamp, self.names.borrow_mut().node(origin).to_owned())
    }

    fn copied(&self, slot: &Slot) -> Result<Fate, PgError> {
        let hashes_as = hasher(self.relation, slot);
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

    fn written(&self, slot: &Slot) -> Result<Fate, PgError> {
        let row = version_in(self.relation, slot)?;
        let hashes_as = hasher(self.relation, slot);
        let is_newer = |found: &(i64, ReplOriginId)| match &row {
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

    /// Returns the newest version or deletion that the copy has brought for a row's key.
    fn newest(
        &self,
        hashes_as: &impl Fn(u32) -> Option<KeyHashes>,
        find: impl Fn(u64) -> Result<Option<(i64, ReplOriginId)>, PgError>,
    ) -> Result<Option<(i64, ReplOriginId)>, PgError> {
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
        self.relation.oid().to_u32()
    }
}

/// Returns the version with which the copy has brought a row.
fn brought(hash: u64) -> Result<Option<(i64, ReplOriginId)>, PgError> {
    let found = tombstone::find_copied(hash)?;
    Ok(found.map(|found| (found.timestamp, found.origin)))
}

enum Fate {
    Stays,
    Deleted,
    Replaced,
}

/// Returns the text of a row's tid.
fn place(slot: &Slot) -> String {
    let (block, offset) = pgrx::itemptr::item_pointer_get_both(slot.tid());
    format!("({block},{offset})")
}
