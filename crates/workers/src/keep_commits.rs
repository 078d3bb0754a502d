//! Copying commit timestamps into `braid.kept_commit` before PostgreSQL forgets them. Run by the
//! manager, and by the session that prepares an upgrade. `braid_node::kept_commit` reads them.

use std::sync::atomic::Ordering;

use braid_bgworker::commit_block::{self, Commit, TRANSACTIONS};
use braid_node::kept_commit::stored;
use braid_node::registry::{self, ManagerEntry};
use braid_node::subscription::{execute, execute_lazily, rows};
use braid_node::{local_version, settings};
use braid_postgres::error::{self, PgError};
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::{server, xid};
use pgrx::pg_sys;

/// Blocks that are copied in one transaction: a million commit timestamps, some four megabytes.
const BLOCKS_AT_ONCE: u64 = 64;

/// Age in transactions from which on commit timestamps are copied: well before PostgreSQL may
/// forget them. The database that is vacuumed least decides that. This is mostly `template0`, which
/// only autovacuum visits. Autovacuum leaves `vacuum_freeze_min_age` transactions.
fn age() -> u64 {
    let freeze = server::vacuum_freeze_min_age() / 2;
    u64::try_from(settings::keep_commits_older_than().min(freeze)).unwrap_or(0)
}

/// Removes copies that are not needed any more, and makes those that may be needed. Everything up
/// to `before` (microseconds since 1970-01-01 UTC) has arrived. If it is `None`, all may be needed.
/// `nobody`: nothing arrives at all. Returns whether more is to be copied at once. Outside of a
/// transaction.
///
/// # Errors
/// Those of PostgreSQL.
pub fn tend(before: Option<i64>, nobody: bool) -> Result<bool, PgError> {
    let (kept, more) = error::transaction(|| {
        if let Some(before) = before {
            execute_lazily(
                "delete from braid.kept_commit where newest < $1",
                &[before.into()],
            );
        }
        let more = copy(before.unwrap_or(i64::MIN), nobody, Reach::Old)?;
        let kept = number_row(
            "select coalesce(min(first_xid), 0), coalesce(max(first_xid) + $1, 0) from braid.kept_commit where commits is not null",
            &[i64::try_from(TRANSACTIONS).unwrap_or(i64::MAX).into()],
        )?;
        Ok((kept, more))
    })?;
    if let (Some(entry), [from, to]) = (registry::my_manager(), kept) {
        publish(entry, from, to);
    }
    Ok(more)
}

/// Publishes the range. A process that reads it meanwhile finds a range that is too large at worst:
/// either the old or the new one contains it.
fn publish(entry: &ManagerEntry, from: u64, to: u64) {
    entry.kept_commits_to.store(to, Ordering::SeqCst);
    entry.kept_commits_from.store(from, Ordering::SeqCst);
}

fn number_row<const N: usize>(
    sql: &str,
    arguments: &[pgrx::datum::DatumWithOid<'_>],
) -> Result<[u64; N], PgError> {
    let found = rows(sql, arguments)?;
    let row = found.first().map(Vec::as_slice).unwrap_or_default();
    let mut numbers = [0; N];
    for (number, text) in numbers.iter_mut().zip(row) {
        *number = text
            .as_ref()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
    }
    Ok(numbers)
}

/// Up to where commit timestamps are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// Transactions that PostgreSQL may forget soon.
    Old,
    /// All that have ended.
    All,
}

/// Copies all commit timestamps, before `pg_upgrade` has PostgreSQL forget them at once. In the
/// caller's transaction; the caller makes sure that no other process does the same.
///
/// # Errors
/// Those of PostgreSQL.
pub fn keep_all(before: Option<i64>) -> Result<(), PgError> {
    while copy(before.unwrap_or(i64::MIN), false, Reach::All)? {}
    Ok(())
}

/// Copies blocks that were not examined yet. Returns whether there are more.
fn copy(before: i64, nobody: bool, reach: Reach) -> Result<bool, PgError> {
    let [tracked, running, next, oldest, seen] = number_row(
        "select current_setting('track_commit_timestamp')::boolean::integer, pg_snapshot_xmin(pg_current_snapshot())::text, \
         pg_snapshot_xmax(pg_current_snapshot())::text, (select oldest_commit_ts_xid::text from pg_control_checkpoint()), \
         (select max(first_xid) from braid.kept_commit where commits is null)",
        &[],
    )?;
    if tracked == 0 || oldest == 0 {
        return Ok(false);
    }
    // A running transaction has no commit timestamp yet.
    let age = if reach == Reach::All { 0 } else { age() };
    let (end, ended) = commit_block::place_of(running.min(next.saturating_sub(age)));
    let oldest = pg_sys::TransactionId::from_inner(u32::try_from(oldest).unwrap_or(0));
    let (oldest, _) = commit_block::place_of(xid::full(oldest));
    let first = if nobody { end } else { seen.max(oldest) };
    let mut next = first;
    while next < end && next - first < BLOCKS_AT_ONCE * TRANSACTIONS {
        pgrx::check_for_interrupts!();
        keep(next, before)?;
        next += TRANSACTIONS;
    }
    if next > seen {
        execute("delete from braid.kept_commit where commits is null", &[])?;
        execute(
            "insert into braid.kept_commit values ($1, null, null) on conflict do nothing",
            &[i64::try_from(next).unwrap_or(i64::MAX).into()],
        )?;
    }
    if reach == Reach::All && next >= end && ended > 0 {
        // The block that is not full yet comes once more when it is.
        keep(end, before)?;
    }
    Ok(next < end)
}

/// Copy a block, if anything that is older than one of its versions can still arrive.
fn keep(first: u64, before: i64) -> Result<(), PgError> {
    let mut newest: Option<i64> = None;
    // Includes timestamps that PostgreSQL has forgotten since this block was copied in part.
    let mut before_this = stored(first).unwrap_or_default().into_iter();
    let commits: Vec<_> = (first..first + TRANSACTIONS)
        .map(|full| {
            let copied = before_this.next().flatten();
            let xid = pg_sys::TransactionId::from_inner(u32::try_from(full & 0xFFFF_FFFF).ok()?);
            let Some((timestamp, origin)) = xid::still_known(xid) else {
                newest = newest.max(copied.map(|copied| copied.timestamp));
                return copied;
            };
            newest = newest.max(local_version::commit_timestamp(xid));
            Some(Commit { timestamp, origin })
        })
        .collect();
    let Some(newest) = newest.map(|newest| newest.saturating_add(EPOCH_DIFFERENCE)) else {
        return Ok(());
    };
    if newest < before {
        return Ok(());
    }
    // After a crash between the copy and the record of it, the block is stored already.
    execute(
        "insert into braid.kept_commit values ($1, $2, $3) on conflict (first_xid) do update set newest = excluded.newest, commits = excluded.commits",
        &[
            i64::try_from(first).unwrap_or(i64::MAX).into(),
            newest.into(),
            commit_block::encode(&commits).into(),
        ],
    )?;
    Ok(())
}
