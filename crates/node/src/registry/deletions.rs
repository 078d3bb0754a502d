//! Records which deletions may exist, by groups of keys, so that most rows need no look-up; and how
//! far local deletions are collected.

use std::sync::atomic::{AtomicI64, Ordering};

use braid_postgres::plain;
use braid_postgres::process::{my_database, set_latch};
use pgrx::pg_sys;

use super::managers::my_manager;
use super::memory::shared;

/// Groups of keys of which the newest deletion is kept; by the hash of table and key, and by the
/// database.
pub(crate) const TOMBSTONE_GROUPS: usize = 1 << 16;

fn tombstone_group(hash: u64) -> Option<&'static AtomicI64> {
    // Databases differ by this, since the same table may have the same OID in several.
    let mixed = hash ^ u64::from(my_database()).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let group = usize::try_from(mixed % TOMBSTONE_GROUPS as u64).unwrap_or(0);
    shared()?.tombstones.get(group)
}

/// A row with this hash was deleted at this time, in microseconds since 1970-01-01 UTC.
pub(crate) fn raise_tombstone(hash: u64, timestamp: i64) {
    if let Some(group) = tombstone_group(hash) {
        group.fetch_max(timestamp, Ordering::AcqRel);
    }
    if let Some(entry) = my_manager() {
        entry
            .newest_tombstone
            .fetch_max(timestamp, Ordering::AcqRel);
    }
}

/// Any rows were deleted at this time.
pub(crate) fn raise_all_tombstones(timestamp: i64) {
    for group in shared().iter().flat_map(|shared| &shared.tombstones) {
        group.fetch_max(timestamp, Ordering::AcqRel);
    }
    if let Some(entry) = my_manager() {
        entry
            .newest_tombstone
            .fetch_max(timestamp, Ordering::AcqRel);
    }
}

/// Whether any deletion that is remembered may be as new as this, in microseconds since 1970-01-01
/// UTC.
#[must_use]
pub fn may_have_tombstone_since(timestamp: i64) -> bool {
    my_manager().is_none_or(|entry| {
        !entry.knows_tombstones.load(Ordering::Acquire)
            || entry.newest_tombstone.load(Ordering::Acquire) >= timestamp
    })
}

/// Whether the group of keys of this row may have a deletion that is not older than `timestamp`.
#[must_use]
pub fn may_have_tombstone(hash: u64, timestamp: i64) -> bool {
    may_have_tombstone_since(timestamp)
        && match (my_manager(), tombstone_group(hash)) {
            (Some(entry), Some(group)) => {
                !entry.knows_tombstones.load(Ordering::Acquire)
                    || group.load(Ordering::Acquire) >= timestamp
            }
            _ => true,
        }
}

/// Records that shared memory has all tombstones of this database.
pub(crate) fn tombstones_are_known() {
    if let Some(entry) = my_manager() {
        entry.knows_tombstones.store(true, Ordering::Release);
    }
}

/// Whether deletions of this database are to be remembered.
#[must_use]
pub fn remembers_deletions() -> bool {
    my_manager().is_some_and(|entry| entry.remembers_deletions.load(Ordering::Acquire))
}

/// Whether the local deletions of this transaction are collected, as far as that is known.
#[must_use]
pub fn is_collected(xid: pg_sys::TransactionId) -> bool {
    my_manager().is_some_and(|entry| {
        let before = entry.collected_before.load(Ordering::Acquire);
        before != 0 && plain::TransactionIdPrecedes(xid, pg_sys::TransactionId::from_inner(before))
    })
}

/// How far the collector of this database has come in local WAL, and whether it runs. It is asked
/// to go on at once.
#[must_use]
pub fn ask_collector() -> (u64, bool) {
    my_manager().map_or((0, false), |entry| {
        set_latch(entry.collector_latch.load(Ordering::Acquire));
        let lsn = entry.collected_lsn.load(Ordering::Acquire);
        (
            lsn,
            lsn != 0 && entry.collector_pid.load(Ordering::Acquire) > 0,
        )
    })
}
