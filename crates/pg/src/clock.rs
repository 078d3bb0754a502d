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
//! suffice, and says so instead.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pgrx::pg_sys;

use crate::error::PgError;
use crate::latch;
use crate::registry::{self, ManagerEntry};
use crate::settings::{self, BehindAction};
use crate::subscription::rows;
use crate::wait::Wait;

/// Microseconds by which a transaction's timestamp must exceed what was noted last to be noted: sessions that commit side by side do not
/// all write the same place.
const GRAIN: i64 = 1000;
/// So many transactions are looked at when the server has started.
const REMEMBERED: u64 = 1000;
/// Microseconds between two warnings, in all sessions of a database.
const WARNING_INTERVAL: i64 = 10_000_000;

/// This process writes for Braid itself: nothing that users' rows depend on.
static EXEMPT: AtomicBool = AtomicBool::new(false);
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

/// Commits of this process do not wait, but where it says so with [`wait_until_past`].
pub fn exempt_this_process() {
    EXEMPT.store(true, Ordering::Relaxed);
}

/// A change of this timestamp (TimestampTz) is about to become visible here.
pub fn seen(timestamp: i64) {
    if let Some(entry) = registry::my_manager() {
        entry.newest.fetch_max(timestamp, Ordering::AcqRel);
    }
}

/// The server has started, and its clock may have been set meanwhile: the newest of the last transactions counts as seen. Those that were
/// applied are known by their origins, which belong to this database; what was written here may have been so in another
/// one, so it counts only where the clock will be past it soon. To be called in a transaction.
///
/// # Errors
/// Whatever SPI says.
pub fn remember() -> Result<(), PgError> {
    let found = rows("select origin_id::text from braid.origin", &[])?;
    let origins: Vec<pg_sys::RepOriginId> = found
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse().ok())
        .collect();
    let limit = settings::max_clock_wait().unwrap_or_default();
    let soon = registry::now().saturating_add(i64::try_from(limit.as_micros()).unwrap_or(i64::MAX));
    // SAFETY: reads of shared memory; commit timestamps are kept, or nothing is asked.
    unsafe {
        if !pg_sys::track_commit_timestamp {
            return Ok(());
        }
        let next = pg_sys::ReadNextFullTransactionId().value;
        for full in next.saturating_sub(REMEMBERED)..next {
            let xid = u32::try_from(full & 0xffff_ffff).unwrap_or(0);
            let (mut timestamp, mut origin) = (0, 0);
            if xid >= pg_sys::FirstNormalTransactionId.into_inner()
                && pg_sys::TransactionIdGetCommitTsData(
                    pg_sys::TransactionId::from_inner(xid),
                    &raw mut timestamp,
                    &raw mut origin,
                )
                && (origins.contains(&origin) || (origin == 0 && timestamp <= soon))
            {
                seen(timestamp);
            }
        }
    }
    Ok(())
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_end(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    if event != pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT || EXEMPT.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: reads of variables of the process, in a transaction.
    let (xid, origin) = unsafe {
        (
            pg_sys::GetTopTransactionIdIfAny(),
            pg_sys::replorigin_session_origin,
        )
    };
    if xid != pg_sys::InvalidTransactionId && origin == 0 {
        wait_until_past();
    }
}

/// COMMIT PREPARED commits a transaction that has been through its callbacks long ago.
#[allow(
    clippy::too_many_arguments,
    reason = "the signature of PostgreSQL's hook"
)]
#[pgrx::pg_guard]
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
        if !node.is_null()
            && (*node).type_ == pg_sys::NodeTag::T_TransactionStmt
            && (*node.cast::<pg_sys::TransactionStmt>()).kind
                == pg_sys::TransactionStmtKind::TRANS_STMT_COMMIT_PREPARED
            && pg_sys::replorigin_session_origin == 0
        {
            wait_until_past();
        }
        match PREVIOUS_UTILITY.get() {
            Some(Some(previous)) => pg_sys::ffi::pg_guard_ffi_boundary(|| {
                previous(
                    statement,
                    text,
                    read_only_tree,
                    context,
                    parameters,
                    environment,
                    receiver,
                    completion,
                );
            }),
            _ => pg_sys::standard_ProcessUtility(
                statement,
                text,
                read_only_tree,
                context,
                parameters,
                environment,
                receiver,
                completion,
            ),
        }
    }
}

/// Wait until the clock is past the newest version that this database has seen. Serves interrupts.
pub fn wait_until_past() {
    let Some(entry) = registry::my_manager() else {
        return;
    };
    let newest = entry.newest.load(Ordering::Acquire);
    let now = registry::now();
    if now > newest {
        if now - newest > GRAIN {
            entry.newest.fetch_max(now, Ordering::AcqRel);
        }
        return;
    }
    let Some(limit) = settings::max_clock_wait() else {
        return;
    };
    let behind = Duration::from_micros(u64::try_from(newest.saturating_sub(now)).unwrap_or(0));
    if behind > limit {
        exceeded(entry, now, behind);
        return;
    }
    entry.clock_waits.fetch_add(1, Ordering::Relaxed);
    let started = Instant::now();
    while registry::now() <= newest && started.elapsed() <= limit {
        let left = newest.saturating_sub(registry::now()).saturating_add(1);
        let left = Duration::from_micros(u64::try_from(left).unwrap_or(1));
        latch::wait_as(Wait::Clock, left.min(limit));
    }
    let waited = u64::try_from(started.elapsed().as_micros()).unwrap_or(0);
    entry.clock_wait_micros.fetch_add(waited, Ordering::Relaxed);
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
    .with_detail("Rows that this transaction writes can lose to older values of theirs, and nodes can come to differ.")
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
    error.warn();
}
