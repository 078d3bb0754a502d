//! Transaction ids, and PostgreSQL's state of the transactions. Not for: Braid's own state of them
//! (`local_version` and `kept_commit` of the layer above).

use crate::compat::ReplOriginId;
use crate::plain;
use pgrx::pg_sys;

/// The full id that the next transaction gets.
#[must_use]
pub fn next_full() -> u64 {
    plain::ReadNextFullTransactionId().value
}

/// The full id of a transaction that ended or runs: FullTransactionIdFromAllowableAt of
/// src/include/access/transam.h, 18.
#[must_use]
pub fn full(xid: pg_sys::TransactionId) -> u64 {
    let next = next_full();
    let (epoch, short) = (next >> 32, next & 0xFFFF_FFFF);
    let xid = u64::from(xid.into_inner());
    let epoch = if xid > short {
        epoch.saturating_sub(1)
    } else {
        epoch
    };
    (epoch << 32) | xid
}

/// The full ids of the subtransactions of a prepared transaction, given by its own; also of those
/// that were rolled back. By a look at each id that was given later. With an active snapshot.
/// Serves interrupts.
#[must_use]
pub fn parts_of_prepared(full: u64) -> Vec<u64> {
    let short = |full: u64| {
        let low = u32::try_from(full & 0xFFFF_FFFF).unwrap_or(0);
        pg_sys::TransactionId::from_inner(low)
    };
    let whole = short(full);
    let mut parts = Vec::new();
    for later in full.saturating_add(1)..next_full() {
        pgrx::check_for_interrupts!();
        let part = short(later);
        // Special ids are nobody's.
        if part.into_inner() >= pg_sys::FirstNormalTransactionId.into_inner()
            && plain::SubTransGetTopmostTransaction(part) == whole
        {
            parts.push(later);
        }
    }
    parts
}

/// The ids of the subtransactions that have written and are committed as parts of the current
/// transaction. At its top level.
#[must_use]
pub fn committed_parts() -> Vec<pg_sys::TransactionId> {
    let mut parts = std::ptr::null_mut();
    // SAFETY: an array in the transaction's memory, or null where there are none, which is copied
    // at once.
    unsafe {
        let count = pg_sys::xactGetCommittedChildren(&raw mut parts);
        match usize::try_from(count) {
            Ok(count) if count > 0 && !parts.is_null() => {
                std::slice::from_raw_parts(parts, count).to_vec()
            }
            _ => Vec::new(),
        }
    }
}

/// The commit timestamp (TimestampTz) and origin that PostgreSQL has of a transaction. `None` if it
/// has forgotten them, or never had them.
#[must_use]
pub fn still_known(xid: pg_sys::TransactionId) -> Option<(i64, ReplOriginId)> {
    let (mut timestamp, mut origin) = (0, 0);
    // SAFETY: a plain look-up; an id that is not normal has no commit data.
    let known = unsafe {
        xid.into_inner() >= pg_sys::FirstNormalTransactionId.into_inner()
            && pg_sys::TransactionIdGetCommitTsData(xid, &raw mut timestamp, &raw mut origin)
    };
    known.then_some((timestamp, origin))
}
