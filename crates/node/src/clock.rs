//! Causality of commits (I4): a transaction of this node that writes gets no version that is older than a row it may have seen. Run by
//! every session of a server that has the library preloaded.
//!
//! The version of a row is its transaction's commit timestamp, which PostgreSQL takes from the clock right after the callbacks that run
//! before a commit. So it is enough to wait in one of these until the clock is past the newest version that this database has seen:
//! the newest timestamp that was applied here, raised before its commit makes it visible, or that a transaction of this node
//! had, up to `GRAIN`. The latter is for a clock that steps back: a node's own order of commits is the order of their versions
//! then too.
//!
//! Where there is nothing to wait for, this costs a few loads. Locks are held while it waits; so it does not where the limit would not
//! suffice: then the transaction gets a version of its own, right after the newest one (`local_version.rs`). So versions grow whatever
//! clocks do, like those of a hybrid logical clock (Kulkarni et al., Logical Physical Clocks, OPODIS 2014).

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ops::{ControlFlow, Range};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use braid_postgres::error::{PgError, pass_on};
use braid_postgres::ffi::raw;
use braid_postgres::names::{find_table, own_table};
use braid_postgres::table_scan::{self, Sees, low};
use braid_postgres::wait::Wait;
use braid_postgres::{latch, process, timestamp, worker, xid};
use pgrx::pg_sys;

use crate::local_version;
use crate::registry::{self, ManagerEntry};
use crate::settings::{self, BehindAction};
use crate::subscription::rows;

/// Microseconds by which a transaction's timestamp must exceed what was noted last to be noted: sessions that commit side by side do not
/// all write the same place.
const GRAIN: i64 = 1000;
/// So many transactions are looked at when the server has started.
const REMEMBERED: u64 = 1000;
/// What is further ahead of this node's clock is remembered otherwise: more microseconds than commits wait, within these.
const FAR: Range<i64> = 100_000..1_000_000;
/// Columns of `braid.origin`.
const ORIGIN_COLUMNS: usize = 6;
/// Microseconds between two warnings, in all sessions of a database.
const WARNING_INTERVAL: i64 = 10_000_000;

/// Commits of this process do not wait, though it is no worker.
static EXEMPT: AtomicBool = AtomicBool::new(false);
thread_local! {
    /// This process has looked whether its database has the extension, when nobody had told.
    static LOOKED_FOR_EXTENSION: Cell<bool> = const { Cell::new(false) };
}
static PREVIOUS_UTILITY: OnceLock<pg_sys::ProcessUtility_hook_type> = OnceLock::new();

/// Start watching commits. Called once, while the postmaster loads its libraries: every session inherits it.
pub fn install() {
    // SAFETY: functions of this library, which is never unloaded; hooks are chained as PostgreSQL's own modules do it.
    unsafe {
        pg_sys::RegisterXactCallback(Some(at_end), std::ptr::null_mut());
        if PREVIOUS_UTILITY.set(pg_sys::ProcessUtility_hook).is_ok() {
            pg_sys::ProcessUtility_hook = Some(utility);
        }
    }
}

/// A change of this timestamp (TimestampTz) is about to become visible here. In its transaction, if it has one of this process's.
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
    // SAFETY: reads a variable of the process.
    if ahead > far && unsafe { pg_sys::IsTransactionState() } {
        local_version::mark(timestamp);
    }
}

/// The server has started, and its clock may have been set meanwhile: the newest of what was written down, and of the last transactions,
/// counts as seen. Those that were applied are known by their origins, which belong to this database. Those that were written here may
/// have been so in another one; they are ahead of the clock only if it was set back. To be called in a transaction.
///
/// # Errors
/// 42P01 where the extension is not there.
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
    // SAFETY: reads of shared memory; commit timestamps are kept, or nothing is asked.
    unsafe {
        if pg_sys::track_commit_timestamp {
            let next = pg_sys::ReadNextFullTransactionId().value;
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
    }
    entry.remembers_newest.store(true, Ordering::Release);
    Ok(())
}

/// The replication origins of this database's subscriptions and sources.
fn origins() -> Result<Vec<pg_sys::RepOriginId>, PgError> {
    let table = own_table("origin")?;
    let mut origins = Vec::new();
    // SAFETY: in a transaction; the table has so many columns.
    unsafe {
        table_scan::each::<ORIGIN_COLUMNS>(table, None, Sees::Committed, |row| {
            let [number, ..] = row.values;
            origins.extend(pg_sys::RepOriginId::try_from(low(number)));
            ControlFlow::Continue(())
        });
    }
    Ok(origins)
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_end(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    match event {
        pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT if !is_exempt() => {
            // SAFETY: reads of variables of the process, in a transaction.
            let (xid, origin) = unsafe {
                (
                    pg_sys::GetTopTransactionIdIfAny(),
                    pg_sys::replorigin_session_origin,
                )
            };
            if xid != pg_sys::InvalidTransactionId && origin == 0 {
                pass_on(before_own_commit);
            }
        }
        pg_sys::XactEvent::XACT_EVENT_COMMIT => local_version::ended(true),
        pg_sys::XactEvent::XACT_EVENT_ABORT | pg_sys::XactEvent::XACT_EVENT_PREPARE => {
            local_version::ended(false);
        }
        _ => {}
    }
}

/// A utility statement. Ours comes first, under pgrx's guard; the rest is a plain call without one, so that PostgreSQL's errors
/// pass as they are. They leave this function by a long jump: it has nothing with a destructor.
#[allow(
    clippy::too_many_arguments,
    reason = "the signature of PostgreSQL's hook"
)]
unsafe extern "C-unwind" fn utility(
    statement: *mut pg_sys::PlannedStmt,
    text: *const c_char,
    read_only_tree: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    parameters: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    receiver: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    // SAFETY: PostgreSQL passes a utility statement, whose tag says what it is; what was there before gets the same.
    unsafe {
        let node = (*statement).utilityStmt;
        if !node.is_null() && (*node).type_ == pg_sys::NodeTag::T_TransactionStmt {
            before_transaction_statement(node.cast(), context);
        }
        let next = match PREVIOUS_UTILITY.get() {
            Some(Some(previous)) => *previous,
            _ => raw::standard_ProcessUtility,
        };
        next(
            statement,
            text,
            read_only_tree,
            context,
            parameters,
            environment,
            receiver,
            completion,
        );
    }
}

/// COMMIT PREPARED commits a transaction that has been through its callbacks long ago.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn before_transaction_statement(
    statement: *mut pg_sys::TransactionStmt,
    context: pg_sys::ProcessUtilityContext::Type,
) {
    // SAFETY: PostgreSQL's own statement; reads of variables of the process.
    unsafe {
        if (*statement).kind != pg_sys::TransactionStmtKind::TRANS_STMT_COMMIT_PREPARED
            || pg_sys::replorigin_session_origin != 0
        {
            return;
        }
        let top_level = context == pg_sys::ProcessUtilityContext::PROCESS_UTILITY_TOPLEVEL;
        // Elsewhere it is about to be refused.
        if !pg_sys::IsInTransactionBlock(top_level) {
            let name = CStr::from_ptr((*statement).gid);
            pass_on(|| before_commit_prepared(name));
        }
    }
}

/// The transaction in hand, which has written something, is about to commit as one of this node's: its version is to be past whatever this
/// database has seen. Waits for the clock, or gives it a version of its own. Serves interrupts.
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

/// As [`before_own_commit`] for a transaction that was prepared. What it has written can't be added to: its version is written by the
/// transaction in hand, which is COMMIT PREPARED's own and is committed for that, and the next one is begun. If the server ends in between, or COMMIT PREPARED
/// fails, there is a version of a transaction that is still prepared; whoever commits it then gives it another, whatever the clock says, for much may have
/// come after the first.
///
/// # Safety
/// In the transaction of a command that commits by itself.
unsafe fn before_commit_prepared(name: &CStr) {
    // SAFETY: a read of shared memory.
    if unsafe { pg_sys::RecoveryInProgress() } {
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
    // SAFETY: the snapshot is taken off again; a command that commits by itself is in no block, and one that does so within goes on in another
    // transaction, as VACUUM does.
    unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        let prepared = may_commit(name);
        let written = prepared.is_some_and(|full| {
            (!past || local_version::written_for(full).is_some())
                && local_version::assign_to(full, next_version(entry))
        });
        pg_sys::PopActiveSnapshot();
        if written {
            let _own = Exempt::now();
            pg_sys::CommitTransactionCommand();
            pg_sys::StartTransactionCommand();
        }
    }
}

/// The full id of the transaction that is prepared under this name, if the user may commit it in this database (LockGXact of
/// src/backend/access/transam/twophase.c). In a transaction with a snapshot.
fn may_commit(name: &CStr) -> Option<u64> {
    let rows = rows(
        "select transaction::text from pg_catalog.pg_prepared_xact() \
         where gid operator(pg_catalog.=) $1 and dbid operator(pg_catalog.=) $2 and (ownerid operator(pg_catalog.=) $3 or $4)",
        &[
            name.to_string_lossy().into_owned().into(),
            // SAFETY: reads of variables of the process, and of a catalog.
            unsafe { pg_sys::MyDatabaseId }.into(),
            unsafe { pg_sys::GetUserId() }.into(),
            unsafe { pg_sys::superuser() }.into(),
        ],
    )
    .unwrap_or_else(|error| error.raise());
    let xid: u32 = rows.into_iter().next()?.into_iter().next()??.parse().ok()?;
    Some(xid::full(pg_sys::TransactionId::from_inner(xid)))
}

/// Whether commits of this process wait only where it says so with [`before_own_commit`]. Workers write
/// for Braid itself, and nothing that users' rows depend on.
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

/// What this database has seen, also if no manager has come to it since the server started. `None` where the extension is not.
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

/// What this database has seen, for who wants to read it: also before anybody has committed anything since the server started. In a transaction.
#[must_use]
pub fn status() -> Option<&'static ManagerEntry> {
    // SAFETY: a read of shared memory.
    if unsafe { pg_sys::RecoveryInProgress() } {
        // A standby has no commit timestamps to look at.
        return registry::my_manager();
    }
    entry()
}

/// How the clock stands to what this database has seen.
enum Clock {
    Past,
    /// And nobody waits, or it was set back while somebody did.
    Behind,
    /// By more than it may be waited for: what it says (TimestampTz), and by how much.
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
        "55000",
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
