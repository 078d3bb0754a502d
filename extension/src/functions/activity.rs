//! What the workers are doing, from shared memory: the functions under the monitoring views.
//!
//! Positions and times are returned as the 64-bit numbers that PostgreSQL's pg_lsn and timestamptz are; the install script
//! declares them as such.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use braid_pg::registry;
use pgrx::iter::TableIterator;
use pgrx::name;
use pgrx::prelude::*;

fn count(counter: &AtomicU64) -> i64 {
    counter.load(Ordering::Relaxed).cast_signed()
}

/// A position; null when there is none yet.
fn position(counter: &AtomicU64) -> Option<i64> {
    Some(count(counter)).filter(|lsn| *lsn != 0)
}

/// A time; null when there is none yet.
fn time(counter: &AtomicI64) -> Option<i64> {
    Some(counter.load(Ordering::Relaxed)).filter(|time| *time != 0)
}

fn process(pid: i32) -> Option<i32> {
    Some(pid).filter(|pid| *pid > 0)
}

/// Entries of this database's subscriptions.
fn subscriptions() -> impl Iterator<Item = (i32, &'static registry::SubscriptionEntry)> {
    let database = registry::my_database();
    registry::subscriptions().iter().filter_map(move |entry| {
        let id = entry.subscription_id.load(Ordering::Acquire);
        let here = id != 0 && entry.database.load(Ordering::Acquire) == database;
        here.then(|| (id.cast_signed(), entry))
    })
}

#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn subscription_activity() -> TableIterator<
    'static,
    (
        name!(subscription_id, i32),
        name!(state, &'static str),
        name!(leader_pid, Option<i32>),
        name!(applier_pids, Vec<i32>),
        name!(received_lsn, Option<i64>),
        name!(applied_lsn, Option<i64>),
        name!(flushed_lsn, Option<i64>),
        name!(provider_lsn, Option<i64>),
        name!(last_message_at, Option<i64>),
        name!(last_commit_at, Option<i64>),
        name!(transactions, i64),
        name!(inserts, i64),
        name!(updates, i64),
        name!(deletes, i64),
        name!(truncates, i64),
        name!(bytes, i64),
        name!(conflicts, i64),
        name!(retries, i64),
        name!(transactions_per_second, f64),
        name!(rows_per_second, f64),
        name!(started_at, Option<i64>),
        name!(stats_since, Option<i64>),
        name!(last_error, Option<String>),
        name!(last_error_at, Option<i64>),
        name!(failures, i32),
    ),
> {
    let rows: Vec<_> = subscriptions()
        .map(|(id, entry)| {
            let leader = process(entry.leader_pid.load(Ordering::Acquire));
            let appliers: Vec<i32> = entry
                .appliers
                .iter()
                .filter_map(|applier| process(applier.pid.load(Ordering::Acquire)))
                .collect();
            // A rate belongs to a process that runs.
            let rate = |bits: &AtomicU64| {
                if leader.is_some() {
                    f64::from_bits(bits.load(Ordering::Relaxed))
                } else {
                    0.0
                }
            };
            let error = entry.error();
            (
                id,
                entry.activity().name(),
                leader,
                appliers,
                position(&entry.received_lsn),
                position(&entry.applied_lsn),
                position(&entry.flushed_lsn),
                position(&entry.provider_lsn),
                time(&entry.last_message_at),
                time(&entry.last_commit_at),
                count(&entry.transactions),
                count(&entry.inserts),
                count(&entry.updates),
                count(&entry.deletes),
                count(&entry.truncates),
                count(&entry.bytes),
                count(&entry.conflicts),
                count(&entry.retries),
                rate(&entry.transactions_per_second),
                rate(&entry.rows_per_second),
                leader.and_then(|_| time(&entry.started_at)),
                time(&entry.stats_since),
                error.as_ref().map(|(text, _)| text.clone()),
                error.map(|(_, at)| at),
                entry.failures.load(Ordering::Relaxed).cast_signed(),
            )
        })
        .collect();
    TableIterator::new(rows)
}

fn applier_state(code: u32) -> &'static str {
    match code {
        1 => "idle",
        2 => "waiting for a dependency",
        3 => "applying",
        4 => "waiting for its turn",
        _ => "starting",
    }
}

#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn applier_activity() -> TableIterator<
    'static,
    (
        name!(subscription_id, i32),
        name!(number, i32),
        name!(pid, i32),
        name!(state, &'static str),
        name!(commit_lsn, Option<i64>),
        name!(transactions, i64),
        name!(changes, i64),
        name!(retries, i64),
        name!(busy_fraction, Option<f64>),
    ),
> {
    let now = registry::now();
    let mut rows = Vec::new();
    for (id, entry) in subscriptions() {
        for (number, applier) in entry.appliers.iter().enumerate() {
            let Some(pid) = process(applier.pid.load(Ordering::Acquire)) else {
                continue;
            };
            let lived = now.saturating_sub(applier.started_at.load(Ordering::Relaxed));
            #[expect(clippy::cast_precision_loss, reason = "a fraction for people")]
            let busy = (lived > 0)
                .then(|| (count(&applier.busy_micros) as f64 / lived as f64).clamp(0.0, 1.0));
            rows.push((
                id,
                i32::try_from(number).unwrap_or(0),
                pid,
                applier_state(applier.state.load(Ordering::Relaxed)),
                position(&applier.commit_lsn),
                count(&applier.transactions),
                count(&applier.changes),
                count(&applier.retries),
                busy,
            ));
        }
    }
    TableIterator::new(rows)
}

#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn table_activity() -> TableIterator<
    'static,
    (
        name!(subscription_id, i32),
        name!(relation, pg_sys::Oid),
        name!(inserts, i64),
        name!(updates, i64),
        name!(deletes, i64),
        name!(truncates, i64),
        name!(conflicts, i64),
        name!(copy_rows, i64),
        name!(copy_bytes, i64),
    ),
> {
    let database = registry::my_database();
    let rows: Vec<_> = registry::tables()
        .iter()
        .filter(|entry| {
            entry.subscription_id.load(Ordering::Acquire) != 0
                && entry.database.load(Ordering::Acquire) == database
        })
        .map(|entry| {
            (
                entry.subscription_id.load(Ordering::Acquire).cast_signed(),
                pg_sys::Oid::from(entry.relation.load(Ordering::Acquire)),
                count(&entry.inserts),
                count(&entry.updates),
                count(&entry.deletes),
                count(&entry.truncates),
                count(&entry.conflicts),
                count(&entry.copy_rows),
                count(&entry.copy_bytes),
            )
        })
        .collect();
    TableIterator::new(rows)
}
