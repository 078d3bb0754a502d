//! Counters by table of each subscription, in the registry: an open hash table of
//! `braid.max_table_counters` entries, and half as many places more, so that chains stay short.
//! Appliers and copy workers add, the views read.
//!
//! If a subscription's table finds no room, that table and all new ones are counted in the
//! subscription's own entry for other tables, until its entry is released. So each table is counted
//! in one place from its first change on, and never in two.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use braid_postgres::process::my_database;

use super::lock::locked;
use super::memory::{Shared, shared};
use super::subscriptions::{SubscriptionEntry, subscription, subscriptions};
use crate::settings;

/// Counters of one table of one subscription.
#[repr(C)]
#[derive(Debug)]
pub struct TableEntry {
    /// Subscription; 0: free.
    pub subscription_id: AtomicU32,
    /// Relation's OID; 0: all tables of the subscription that found no room.
    pub relation: AtomicU32,
    /// OID of the database; 0: the place was never taken, or ends no chain any more.
    pub database: AtomicU32,
    /// Rows inserted.
    pub inserts: AtomicU64,
    /// Rows updated.
    pub updates: AtomicU64,
    /// Rows deleted.
    pub deletes: AtomicU64,
    /// Times truncated.
    pub truncates: AtomicU64,
    /// Number of conflicts.
    pub conflicts: AtomicU64,
    /// Rows that the initial copy has written so far.
    pub copy_rows: AtomicU64,
    /// Bytes that the initial copy has received so far.
    pub copy_bytes: AtomicU64,
}

impl TableEntry {
    fn is_of(&self, database: u32, subscription_id: u32) -> bool {
        self.subscription_id.load(Ordering::Acquire) == subscription_id
            && self.database.load(Ordering::Acquire) == database
    }

    fn take(&self, database: u32, subscription_id: u32, relation: u32) {
        for counter in [
            &self.inserts,
            &self.updates,
            &self.deletes,
            &self.truncates,
            &self.conflicts,
            &self.copy_rows,
            &self.copy_bytes,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
        self.relation.store(relation, Ordering::Relaxed);
        self.database.store(database, Ordering::Relaxed);
        self.subscription_id
            .store(subscription_id, Ordering::Release);
    }

    /// Gives an entry for other tables back.
    pub(super) fn reset(&self) {
        self.subscription_id.store(0, Ordering::Release);
    }
}

/// Places for `tables` entries.
pub(super) fn places(tables: usize) -> usize {
    tables + tables / 2
}

/// Bytes of shared memory for the counters.
pub(super) fn bytes() -> usize {
    places(settings::max_table_counters()) * size_of::<TableEntry>()
}

fn entries(shared: &'static Shared) -> &'static [TableEntry] {
    let tables = usize::try_from(shared.max_tables.load(Ordering::Relaxed)).unwrap_or(0);
    // SAFETY: `set_up_ours` made room for these behind the subscriptions' entries, whose alignment
    // is no smaller; atomics only.
    unsafe {
        let first = subscriptions().as_ptr_range().end.cast::<TableEntry>();
        std::slice::from_raw_parts(first, places(tables))
    }
}

/// All entries: those of single tables, and those for the other tables of a subscription.
pub fn tables() -> impl Iterator<Item = &'static TableEntry> {
    let single = shared().map_or(&[][..], entries);
    let other = subscriptions().iter().map(|entry| &entry.other_tables);
    single.iter().chain(other)
}

/// Places in the order in which a table's entry is looked for.
fn order(
    places: &'static [TableEntry],
    relation: u32,
) -> impl Iterator<Item = &'static TableEntry> {
    let hash = u64::from(relation.wrapping_mul(0x9e37_79b1));
    let start = usize::try_from((hash * places.len() as u64) >> 32).unwrap_or(0);
    let (head, tail) = places.split_at_checked(start).unwrap_or((places, &[]));
    tail.iter().chain(head)
}

/// The table's own entry. A released entry keeps its database while entries may lie behind it; any
/// other free one ends the search.
fn find(
    places: &'static [TableEntry],
    database: u32,
    subscription_id: u32,
    relation: u32,
) -> Option<&'static TableEntry> {
    order(places, relation)
        .take_while(|entry| {
            entry.subscription_id.load(Ordering::Acquire) != 0
                || entry.database.load(Ordering::Acquire) != 0
        })
        .find(|entry| {
            entry.is_of(database, subscription_id)
                && entry.relation.load(Ordering::Acquire) == relation
        })
}

/// The counters of a table of a subscription of this database, taken if it has none. `None` if
/// there is no room for an entry of its own.
#[must_use]
pub fn own_table(subscription_id: u32, relation: u32) -> Option<&'static TableEntry> {
    let shared = shared()?;
    let of = subscription(subscription_id)?;
    let (places, database) = (entries(shared), my_database());
    find(places, database, subscription_id, relation).or_else(|| {
        if of.other_tables.is_of(database, subscription_id) {
            return None;
        }
        locked(|| take(shared, of, database, relation))
    })
}

/// As [`own_table`]; a table without room has the entry of the subscription's other tables. `None`
/// only without shared memory, or if the subscription does not run.
#[must_use]
pub fn table(subscription_id: u32, relation: u32) -> Option<&'static TableEntry> {
    // Records of a source belong to no subscription.
    if subscription_id == 0 {
        return None;
    }
    let shared = shared()?;
    let of = subscription(subscription_id)?;
    let (places, database) = (entries(shared), my_database());
    if let Some(entry) = find(places, database, subscription_id, relation) {
        return Some(entry);
    }
    let other = &of.other_tables;
    if other.is_of(database, subscription_id) {
        return Some(other);
    }
    locked(|| {
        take(shared, of, database, relation).or_else(|| {
            // Somebody may have taken it while this process waited for the lock.
            if !other.is_of(database, subscription_id) {
                other.take(database, subscription_id, 0);
            }
            Some(other)
        })
    })
}

/// By the holder of the lock.
fn take(
    shared: &'static Shared,
    of: &'static SubscriptionEntry,
    database: u32,
    relation: u32,
) -> Option<&'static TableEntry> {
    let subscription_id = of.subscription_id.load(Ordering::Acquire);
    let places = entries(shared);
    if let Some(entry) = find(places, database, subscription_id, relation) {
        return Some(entry);
    }
    if of.other_tables.is_of(database, subscription_id)
        || shared.tables_taken.load(Ordering::Relaxed) >= shared.max_tables.load(Ordering::Relaxed)
    {
        return None;
    }
    let entry =
        order(places, relation).find(|entry| entry.subscription_id.load(Ordering::Acquire) == 0)?;
    entry.take(database, subscription_id, relation);
    shared.tables_taken.fetch_add(1, Ordering::Relaxed);
    Some(entry)
}

/// Releases the entries of a subscription's tables. Called with the lock, while none of the
/// subscription's processes runs.
pub(super) fn release(shared: &'static Shared, database: u32, subscription_id: u32) {
    let places = entries(shared);
    let own = places
        .iter()
        .filter(|entry| entry.is_of(database, subscription_id));
    for entry in own {
        entry.subscription_id.store(0, Ordering::Release);
        shared.tables_taken.fetch_sub(1, Ordering::Relaxed);
    }
    // A free place before one that ends a search ends it as well. The second round takes those at
    // the end, before the first place.
    let mut ends = false;
    for entry in places.iter().rev().chain(places.iter().rev()) {
        ends = entry.subscription_id.load(Ordering::Acquire) == 0
            && (ends || entry.database.load(Ordering::Acquire) == 0);
        if ends {
            entry.database.store(0, Ordering::Release);
        }
    }
}
