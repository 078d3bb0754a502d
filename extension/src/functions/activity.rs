//! What the workers are doing, from shared memory: the functions under the monitoring views.
//!
//! Positions and times are returned as the 64-bit numbers that PostgreSQL's pg_lsn and timestamptz are; the install script
//! declares them as such.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering, fence};

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

/// What `read` makes of each entry of this database's subscriptions. An entry that becomes another's meanwhile is left out.
fn subscriptions<T>(read: impl Fn(i32, &registry::SubscriptionEntry) -> T) -> Vec<T> {
    let database = registry::my_database();
    registry::subscriptions()
        .iter()
        .filter_map(|entry| {
            entry.consistent(|entry| {
                let id = entry.subscription_id.load(Ordering::Acquire);
                let here = id != 0 && entry.database.load(Ordering::Acquire) == database;
                here.then(|| read(id.cast_signed(), entry))
            })?
        })
        .collect()
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
        name!(is_throttled, bool),
        name!(started_at, Option<i64>),
        name!(stats_since, Option<i64>),
        name!(last_error_sqlstate, Option<String>),
        name!(last_error, Option<String>),
        name!(last_error_detail, Option<String>),
        name!(last_error_hint, Option<String>),
        name!(last_error_lsn, Option<i64>),
        name!(last_error_at, Option<i64>),
        name!(failures, i32),
    ),
> {
    let rows = subscriptions(|id, entry| {
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
        let failure = entry.failure();
        let error = failure.as_ref().map(|failure| failure.error.clone());
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
            leader.is_some() && entry.rate_limit.is_holding(),
            leader.and_then(|_| time(&entry.started_at)),
            time(&entry.stats_since),
            error.as_ref().map(|error| error.sqlstate.clone()),
            error.as_ref().map(|error| error.message.clone()),
            error.as_ref().and_then(|error| error.detail.clone()),
            error.and_then(|error| error.hint),
            failure
                .as_ref()
                .map(|failure| failure.lsn.cast_signed())
                .filter(|lsn| *lsn != 0),
            failure.map(|failure| failure.at),
            entry.failures.load(Ordering::Relaxed).cast_signed(),
        )
    });
    TableIterator::new(rows)
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
    let rows = subscriptions(|id, entry| {
        let mut rows = Vec::new();
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
                applier.state().name(),
                position(&applier.commit_lsn),
                count(&applier.transactions),
                count(&applier.changes),
                count(&applier.retries),
                busy,
            ));
        }
        rows
    });
    TableIterator::new(rows.into_iter().flatten())
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
    let key = |entry: &registry::TableEntry| {
        (
            entry.subscription_id.load(Ordering::Acquire),
            entry.relation.load(Ordering::Acquire),
            entry.database.load(Ordering::Acquire),
        )
    };
    let rows: Vec<_> = registry::tables()
        .iter()
        .filter_map(|entry| {
            let (id, relation, of) = key(entry);
            if id == 0 || of != database {
                return None;
            }
            let row = (
                id.cast_signed(),
                pg_sys::Oid::from(relation),
                count(&entry.inserts),
                count(&entry.updates),
                count(&entry.deletes),
                count(&entry.truncates),
                count(&entry.conflicts),
                count(&entry.copy_rows),
                count(&entry.copy_bytes),
            );
            // It may have been given back and become another table's.
            fence(Ordering::Acquire);
            (key(entry) == (id, relation, of)).then_some(row)
        })
        .collect();
    TableIterator::new(rows)
}
