//! Row versions: which node committed a row, and when. Run by the appliers.
//!
//! A row's version is its xmin's commit timestamp and replication origin (pg_commit_ts). Braid's
//! origins are named `braid/<node>/<number>`; origin 0 is this node. Rows of the initial copy carry
//! `DoNotReplicateId`, which tells no version.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

use braid_bgworker::origin_name::{is_of_database, is_ours, node_of_origin};
use braid_node::local_version::{self, commit_data};
use braid_node::origin::{COPIED, OriginId};
use braid_node::{left_origin, registry};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::{process, session_origin, transaction, xid};
use pgrx::pg_sys;

use super::rewrite;

/// Commit timestamp (Unix microseconds) of the current transaction, if rows of it may have come by
/// the same stream before: in a committed chunk of it, or in one of several transactions that the
/// provider made of it. [`NO_TIME`] otherwise.
static NOW_AT: AtomicI64 = AtomicI64::new(NO_TIME);
/// Origins under which the same stream has brought rows.
static SAME_STREAM: Mutex<Vec<OriginId>> = Mutex::new(Vec::new());
const NO_TIME: i64 = i64::MIN;

/// Makes rows with this commit timestamp and one of these origins count as written by the current
/// transaction.
pub fn own(timestamp: i64, origins: &[OriginId]) {
    if let Ok(mut of) = SAME_STREAM.lock() {
        of.clear();
        of.extend_from_slice(origins);
        NOW_AT.store(timestamp, Ordering::Relaxed);
    }
}

/// Makes only rows count as the current transaction's own that its local transaction writes.
pub fn own_nothing() {
    NOW_AT.store(NO_TIME, Ordering::Relaxed);
}

/// Returns the version of a row that a transaction with this commit timestamp (Unix microseconds)
/// and origin wrote.
pub fn known(timestamp: i64, origin: ReplOriginId) -> Stamp {
    if is_own(timestamp, origin) {
        return Stamp::Own;
    }
    Stamp::Known(timestamp, origin)
}

/// Whether that is the version of the current transaction.
pub(super) fn is_own(timestamp: i64, origin: ReplOriginId) -> bool {
    NOW_AT.load(Ordering::Relaxed) == timestamp
        && SAME_STREAM
            .lock()
            .is_ok_and(|of| of.contains(&OriginId(origin)))
}

/// A version with its origin's number, as it is read from a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stamp {
    /// Written by the current transaction, or by a chunk of it that is committed.
    Own,
    /// Frozen, copied, or from before commit timestamps were kept.
    Unversioned,
    /// Commit timestamp (Unix microseconds) and origin.
    Known(i64, ReplOriginId),
    /// Commit timestamp (Unix microseconds) and origin of a row that was merged here from several:
    /// the largest of theirs.
    Merged(i64, ReplOriginId),
    /// As [`Stamp::Merged`], written by the current transaction.
    OwnMerged(i64, ReplOriginId),
}

impl Stamp {
    /// The timestamp, if it is known.
    #[must_use]
    pub fn timestamp(self) -> Option<i64> {
        self.known().map(|(timestamp, _)| timestamp)
    }

    /// Timestamp and origin, if they are known.
    #[must_use]
    pub fn known(self) -> Option<(i64, ReplOriginId)> {
        match self {
            Self::Known(timestamp, origin)
            | Self::Merged(timestamp, origin)
            | Self::OwnMerged(timestamp, origin) => Some((timestamp, origin)),
            Self::Own | Self::Unversioned => None,
        }
    }
}

/// Returns the version of a row that a transaction has written, as far as the transaction tells it:
/// [`Stamp::Unversioned`] also if the transaction has rewritten tables ([`rewrite`]).
#[must_use]
pub fn stamp_of(xid: pg_sys::TransactionId) -> Stamp {
    if rewrite::has_rewritten(xid) {
        return Stamp::Unversioned;
    }
    stamp_of_transaction(xid)
}

/// Returns the version that a transaction gives to the rows that it writes.
#[must_use]
pub fn stamp_of_transaction(xid: pg_sys::TransactionId) -> Stamp {
    if transaction::is_own(xid) {
        return Stamp::Own;
    }
    let Some((timestamp, origin)) = commit_data(xid).filter(|(_, origin)| *origin != COPIED) else {
        return Stamp::Unversioned;
    };
    let own = if origin == 0 {
        local_version::of(xid)
    } else {
        None
    };
    let origin = if origin != 0 && is_of_earlier_life(xid) {
        0
    } else {
        origin
    };
    let timestamp = own.unwrap_or_else(|| timestamp.saturating_add(EPOCH_DIFFERENCE));
    known(timestamp, origin)
}

/// Whether a transaction was committed before this database became the node that it is now. Its
/// origin may have been dropped since, and another node may have the number.
fn is_of_earlier_life(xid: pg_sys::TransactionId) -> bool {
    let first = registry::my_manager().map_or(0, |entry| entry.first_xid.load(Ordering::Acquire));
    if first == 0 {
        return false;
    }
    // Cheap, and right except for ids of more than 2^31 transactions ago, of which there are no
    // rows.
    let low = u32::try_from(first & 0xFFFF_FFFF).unwrap_or(0);
    let may_precede = xid.into_inner().wrapping_sub(low).cast_signed() < 0;
    may_precede && xid::full(xid) < first
}

/// Whether the versions of rows of this transaction are stored apart from it: it was an initial
/// copy's, or has rewritten a table.
#[must_use]
pub fn tells_none(xid: pg_sys::TransactionId) -> bool {
    rewrite::has_rewritten(xid) || is_copied(xid)
}

/// Whether this transaction was an initial copy's.
#[must_use]
pub fn is_copied(xid: pg_sys::TransactionId) -> bool {
    commit_data(xid).is_some_and(|(_, origin)| origin == COPIED)
}

/// Terms on which this node alone decides about incoming rows
/// ([`Session::decide_alone`](super::Session::decide_alone)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alone {
    /// Local rows without a known version count as written here at this time (Unix microseconds).
    pub(crate) unversioned_at: i64,
    /// Version of the rows that are written: this time (Unix microseconds), and this node.
    pub(crate) time: i64,
}

impl Alone {
    /// Whether a row was deleted because it lost to an incoming one, by this or an earlier
    /// transaction.
    pub(crate) fn has_evicted(self, timestamp: i64, origin: ReplOriginId) -> bool {
        origin == 0 && timestamp == self.time
    }
}

/// Names of nodes by origin number, looked up once.
#[derive(Debug)]
pub struct OriginNames {
    local: String,
    /// `None`: all nodes decide, each by itself.
    pub(crate) alone: Option<Alone>,
    names: HashMap<ReplOriginId, String>,
}

impl OriginNames {
    /// `local` is this node's name.
    #[must_use]
    pub fn new(local: &str) -> Self {
        Self {
            local: local.to_owned(),
            alone: None,
            names: HashMap::new(),
        }
    }

    /// The node that an origin stands for.
    pub fn node(&mut self, origin: ReplOriginId) -> &str {
        if origin == 0 {
            return &self.local;
        }
        self.names.entry(origin).or_insert_with(|| {
            let name = session_origin::name_of(origin);
            let database = process::my_database();
            let is_known = |name: &String| !is_ours(name) || is_of_database(name, database);
            // An origin of this database that was dropped leaves its number to others.
            let dropped = match &name {
                Some(name) if is_known(name) => None,
                _ => left_origin::node_of_dropped(origin),
            };
            dropped
                .or_else(|| name.map(|name| node_of_origin(&name).to_owned()))
                .unwrap_or_else(|| format!("origin {origin}"))
        })
    }
}
