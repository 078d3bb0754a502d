//! Transaction ids, and what PostgreSQL has of the transactions. Not: what Braid has beside
//! (`local_version` and `kept_commit` of the layer above).

use pgrx::pg_sys;

/// The full id of a transaction that ended or runs: FullTransactionIdFromAllowableAt of
/// src/include/access/transam.h, 18.
#[must_use]
pub fn full(xid: pg_sys::TransactionId) -> u64 {
    // SAFETY: a read of shared memory.
    let next = unsafe { pg_sys::ReadNextFullTransactionId() }.value;
    let (epoch, short) = (next >> 32, next & 0xFFFF_FFFF);
    let xid = u64::from(xid.into_inner());
    let epoch = if xid > short {
        epoch.saturating_sub(1)
    } else {
        epoch
    };
    (epoch << 32) | xid
}

/// The commit timestamp (TimestampTz) and origin that PostgreSQL has of a transaction. `None` if it has
/// forgotten them, or never had them.
#[must_use]
pub fn still_known(xid: pg_sys::TransactionId) -> Option<(i64, pg_sys::RepOriginId)> {
    let (mut timestamp, mut origin) = (0, 0);
    // SAFETY: a plain look-up; an id that is not normal has no commit data.
    let known = unsafe {
        xid.into_inner() >= pg_sys::FirstNormalTransactionId.into_inner()
            && pg_sys::TransactionIdGetCommitTsData(xid, &raw mut timestamp, &raw mut origin)
    };
    known.then_some((timestamp, origin))
}
