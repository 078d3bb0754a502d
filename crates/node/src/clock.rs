//! Causality of commits (I4): a transaction of this node that writes gets no version that is older
//! than a row it may have seen. Run by every session of a server that has the library preloaded.
//!
//! The version of a row is its transaction's commit timestamp, which PostgreSQL takes from the
//! clock right after the callbacks that run before a commit. So it is enough to wait in such a
//! callback until the clock is past the newest version that this database has seen. That is the
//! newest timestamp that was applied on this node, raised before its commit makes it visible, or
//! that a transaction of this node had, up to `GRAIN`. The latter is for a clock that is set back:
//! then too the order of a node's commits is the order of their versions.
//!
//! Without a need to wait, this costs a few loads. Locks are held during the wait. So if the limit
//! would not suffice, the session does not wait: the transaction gets a version of its own, right
//! after the newest one (`local_version.rs`). So versions grow whatever clocks do, like those of a
//! hybrid logical clock (Kulkarni et al., Logical Physical Clocks, OPODIS 2014).

use std::cell::Cell;
use std::ffi::CStr;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::compat::{self, ReplOriginId};
use braid_postgres::error::{PgError, pass_on};
use braid_postgres::hook::Utility;
use braid_postgres::names::{find_table, own_table};
use braid_postgres::parse_tree::committed_name;
use braid_postgres::table_scan::{self, Sees, low};
use braid_postgres::transaction::{self, End};
use braid_postgres::wait::Wait;
use braid_postgres::xid::parts_of_prepared;
use braid_postgres::{latch, plain, process, server, snapshot, timestamp, worker, xid};
use pgrx::pg_sys::{self, NodeTag};

use crate::local_version;
use crate::registry::{self, ManagerEntry};
use crate::settings::{self, BehindAction};
use crate::subscription::rows;

/// Microseconds by which a transaction's timestamp must exceed the stored one to be stored:
/// sessions that commit side by side do not all write the same place.
const GRAIN: i64 = 1000;
/// So many transactions are looked at when the server has started.
const REMEMBERED: u64 = 1000;
/// A time further ahead of this node's clock is remembered in another way. The limit is more
/// microseconds than commits wait, within these.
const FAR: Range<i64> = 100_000..1_000_000;
/// Columns of `braid.origin`.
const ORIGIN_COLUMNS: usize = 6;
/// Microseconds between two warnings, in all sessions of a database.
const WARNING_INTERVAL: i64 = 10_000_000;

/// Commits of this process do not wait, though it is no worker.
static EXEMPT: AtomicBool = AtomicBool::new(false);
thread_local! {
    /// This process has looked whether its database has the extension, as no manager had registered
    /// it.
    static LOOKED_FOR_EXTENSION: Cell<bool> = const { Cell::new(false) };
}

/// Starts to watch commits. Called once, while the postmaster loads its libraries: every session
/// inherits it.
pub(crate) fn install() {
    transaction::on_end(at_end);
}

/// A change of this timestamp (TimestampTz) is about to become visible on this node. Called in its
/// transaction, if this process has one for it.
pub fn seen(timestamp: i64) {
    let Some(entry) = registry::my_manager() else {
        return;
    };
    entry.newest.fetch_max(timestamp, Ordering::AcqRel);
    let ahead = timestamp.saturating_sub(timestamp::now());
    if ahead <= FAR.start {
        return;
    }
    let limit = settings::max_clock_wait().map_or(0, |limit| limit.as_micros());
    let far = i64::try_from(limit).map_or(FAR.end, |limit| limit.clamp(FAR.start, FAR.end));
    if ahead > far && transaction::is_open() {
        local_version::mark(timestamp);
    }
}

/// The server has started, and its clock may have been set meanwhile. The newest version that was
/// stored counts as seen, and so do the last transactions. Applied ones are known by their origins,
/// which belong to this database. Local ones may be of another database; they are ahead of the
/// clock only if it was set back. To be called in a transaction.
///
/// # Errors
/// 42P01 if the extension is missing.
pub fn remember() -> Result<(), PgError> {
    let Some(entry) = registry::my_manager() else {
        return Ok(());
    };
    if entry.remembers_newest.load(Ordering::Acquire) {
        return Ok(());
    }
    let raise = |timestamp: i64| entry.newest.fetch_max(timestamp, Ordering::AcqRel);
    if let Some(newest) = local_version::newest()? {
        raise(newest);
    }
    let origins = origins()?;
    if plain::track_commit_timestamp() {
        let next = plain::ReadNextFullTransactionId().value;
        for full in next.saturating_sub(REMEMBERED)..next {
            let xid = u32::try_from(full & 0xffff_ffff).unwrap_or(0);
            let data = local_version::commit_data(pg_sys::TransactionId::from_inner(xid));
            if let Some((timestamp, origin)) = data
                && (origin == 0 || origins.contains(&origin))
            {
                raise(timestamp);
            }
        }
    }
    entry.remembers_newest.store(true, Ordering::Release);
    Ok(())
}

/// The replication origins of this database's subscriptions and sources.
fn origins() -> Result<Vec<ReplOriginId>, PgError> {
    let table = own_table("origin")?;
    let mut origins = Vec::new();
    table_scan::each::<ORIGIN_COLUMNS>(table, None, Sees::Committed, |row| {
        let [number, ..] = row.values;
        origins.extend(ReplOriginId::try_from(low(number)));
        ControlFlow::Continue(())
    });
    Ok(origins)
}

fn at_end(end: End) {
    match end {
        End::BeforeCommit if !is_exempt() => {
            let (xid, origin) = (transaction::top_id(), compat::session_origin());
            if xid != pg_sys::InvalidTransactionId && origin == 0 {
                pass_on(before_own_commit);
            }
        }
        End::Committed => local_version::ended(true),
        End::RolledBack | End::Prepared => local_version::ended(false),
        End::BeforeCommit | End::BeforePrepare => {}
    }
}

/// Whether a statement begins or ends a transaction. Raises nothing.
pub(crate) fn is_of_transaction(statement: Utility<'_>) -> bool {
    let node = statement.node();
    node.is_some_and(|node| node.tag() == NodeTag::T_TransactionStmt)
}

/// COMMIT PREPARED commits a transaction that has been through its callbacks long ago.
pub(crate) fn before(statement: Utility<'_>) {
    let Some(name) = statement.node().and_then(committed_name) else {
        return;
    };
    // With an origin the transaction is another node's. In a transaction block the statement is
    // about to be refused.
    if compat::session_origin() == 0 && !statement.is_in_block() {
        before_commit_prepared(name);
    }
}

/// The current transaction, which has written something, is about to commit as one of this node's.
/// Its version must be newer than all that this database has seen. Waits for the clock, or gives
/// the transaction a version of its own. Serves interrupts.
pub fn before_own_commit() {
    let Some(entry) = entry() else {
        return;
    };
    match wait_until_past(entry) {
        Clock::Past => return,
        Clock::Behind => {}
        Clock::FarBehind(now, behind) => exceeded(entry, now, behind),
    }
    local_version::assign(next_version(entry));
}

/// A version after all that this database has seen, which it has seen then (TimestampTz).
fn next_version(entry: &ManagerEntry) -> i64 {
    let now = timestamp::now();
    let next = |newest: i64| Some(newest.saturating_add(1).max(now));
    let newest = &entry.newest;
    match newest.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) {
        Ok(newest) | Err(newest) => newest.saturating_add(1).max(now),
    }
}

/// Does the same as [`before_own_commit`] for a prepared transaction. Nothing can be added to its
/// writes. So COMMIT PREPARED's own transaction writes the version and commits, and the next one is
/// begun. If the server stops in between, or COMMIT PREPARED fails, a transaction that is still
/// prepared has a version. The next COMMIT PREPARED then writes a newer one, whatever the clock
/// says, as other changes may have arrived since the first. In the transaction of a command that
/// commits by itself.
fn before_commit_prepared(name: &CStr) {
    if server::is_in_recovery() {
        return;
    }
    let Some(entry) = entry() else {
        return;
    };
    let past = match wait_until_past(entry) {
        Clock::Past => true,
        Clock::Behind => false,
        Clock::FarBehind(now, behind) => {
            exceeded(entry, now, behind);
            false
        }
    };
    if past && !local_version::may_be() {
        return;
    }
    snapshot::push();
    let prepared = may_commit(name);
    let written = prepared.is_some_and(|full| {
        if past && local_version::written_for(full).is_none() {
            return false;
        }
        let version = next_version(entry);
        for part in parts_of_prepared(full) {
            local_version::assign_to(part, version);
        }
        local_version::assign_to(full, version)
    });
    snapshot::pop();
    if written {
        // A command that commits by itself is in no block.
        let _own = Exempt::now();
        transaction::go_on_in_next();
    }
}

/// The full id of the transaction that is prepared under this name, if the user may commit it in
/// this database (LockGXact of src/backend/access/transam/twophase.c). In a transaction with a
/// snapshot.
fn may_commit(name: &CStr) -> Option<u64> {
    let rows = rows(
        "select transaction::text from pg_catalog.pg_prepared_xact() \
         where gid operator(pg_catalog.=) $1 and dbid operator(pg_catalog.=) $2 and (ownerid operator(pg_catalog.=) $3 or $4)",
        &[
            name.to_string_lossy().into_owned().into(),
            plain::MyDatabaseId().into(),
            plain::GetUserId().into(),
            plain::superuser().into(),
        ],
    )
    .unwrap_or_else(|error| error.raise());
    let xid: u32 = rows.into_iter().next()?.into_iter().next()??.parse().ok()?;
    Some(xid::full(pg_sys::TransactionId::from_inner(xid)))
}

/// Whether commits of this process wait only where it says so with [`before_own_commit`]. Workers
/// write for Braid itself, and nothing that users' rows depend on.
fn is_exempt() -> bool {
    worker::is_worker() || EXEMPT.load(Ordering::Relaxed)
}

/// Commits of this process do not wait, for a while.
struct Exempt(bool);

impl Exempt {
    fn now() -> Self {
        Self(EXEMPT.swap(true, Ordering::Relaxed))
    }
}

impl Drop for Exempt {
    fn drop(&mut self) {
        EXEMPT.store(self.0, Ordering::Relaxed);
    }
}

/// The entry with what this database has seen, also if no manager has registered it since the
/// server started. `None` if the extension is missing.
fn entry() -> Option<&'static ManagerEntry> {
    let entry = registry::my_manager().or_else(|| {
        if !LOOKED_FOR_EXTENSION.replace(true) && find_table("braid", "origin").ok()?.is_some() {
            return registry::manager(process::my_database());
        }
        None
    })?;
    if !entry.remembers_newest.load(Ordering::Acquire) {
        // There is nothing to remember where the extension is not, or not yet.
        let _ = remember();
    }
    Some(entry)
}

/// Returns the entry with what this database has seen, for display; also before anything was
/// committed since the server started. In a transaction.
#[must_use]
pub fn status() -> Option<&'static ManagerEntry> {
    if server::is_in_recovery() {
        // A standby has no commit timestamps to look at.
        return registry::my_manager();
    }
    entry()
}

/// The clock, compared with the newest version that this database has seen.
enum Clock {
    Past,
    /// And nobody waits, or it was set back while somebody did.
    Behind,
    /// The clock is further behind than the limit of the wait: its time (TimestampTz), and by how
    /// much.
    FarBehind(i64, Duration),
}

/// Wait until the clock is past the newest version that this database has seen, if that is soon.
fn wait_until_past(entry: &ManagerEntry) -> Clock {
    let newest = entry.newest.load(Ordering::Acquire);
    let now = timestamp::now();
    if now > newest {
        if now - newest > GRAIN {
            entry.newest.fetch_max(now, Ordering::AcqRel);
        }
        return Clock::Past;
    }
    let Some(limit) = settings::max_clock_wait() else {
        return Clock::Behind;
    };
    let behind = Duration::from_micros(u64::try_from(newest.saturating_sub(now)).unwrap_or(0));
    if behind > limit {
        return Clock::FarBehind(now, behind);
    }
    entry.clock_waits.fetch_add(1, Ordering::Relaxed);
    let started = Instant::now();
    while timestamp::now() <= newest && started.elapsed() <= limit {
        let left = newest.saturating_sub(timestamp::now()).saturating_add(1);
        let left = Duration::from_micros(u64::try_from(left).unwrap_or(1));
        latch::wait_as(Wait::Clock, left.min(limit));
    }
    let waited = u64::try_from(started.elapsed().as_micros()).unwrap_or(0);
    entry.clock_wait_micros.fetch_add(waited, Ordering::Relaxed);
    if timestamp::now() > newest {
        Clock::Past
    } else {
        Clock::Behind
    }
}

fn exceeded(entry: &ManagerEntry, now: i64, behind: Duration) {
    entry.clock_exceeded.fetch_add(1, Ordering::Relaxed);
    let error = PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!(
            "this node's clock is {} ms behind the newest change that was made or applied here",
            behind.as_millis()
        ),
    )
    .with_hint("Synchronize the clocks of all nodes. The view braid.clock_status shows how far; braid.max_clock_wait is how long a commit waits at most.");
    if settings::clock_behind_action() == BehindAction::Error {
        error.raise();
    }
    let last = entry.clock_warned_at.load(Ordering::Relaxed);
    // A clock that stepped back is before the last warning.
    if now.abs_diff(last) < WARNING_INTERVAL.unsigned_abs()
        || entry
            .clock_warned_at
            .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
    {
        return;
    }
    error
        .with_detail("The transaction gets a version that follows that change, whatever the clock says: what is written at other nodes until then may lose to it.")
        .warn();
}
