//! The activity of the workers, from shared memory: the functions under the monitoring views.
//!
//! Positions and times are returned as the 64-bit numbers that PostgreSQL's pg_lsn and timestamptz
//! are; the install script declares them as such.

use std::ffi::CStr;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence};

use braid_node::{clock, readers, registry};
use braid_postgres::encoding::Text;
use braid_postgres::process;
use braid_postgres::wait::Wait;
use pgrx::iter::{SetOfIterator, TableIterator};
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

/// The event that a process waits for, by Braid's or PostgreSQL's name; null if it does not wait.
fn wait(place: &AtomicU32, pid: i32) -> Option<String> {
    if let Some(wait) = Wait::from_u32(place.load(Ordering::Relaxed)) {
        return Some(wait.name().to_string_lossy().into_owned());
    }
    // SAFETY: the entry of a process stays in shared memory, even if another process has it by now;
    // a number is read whole, and the names are constants.
    unsafe {
        let process = pg_sys::BackendPidGetProc(pid);
        if process.is_null() {
            return None;
        }
        let name =
            pg_sys::pgstat_get_wait_event((&raw const (*process).wait_event_info).read_volatile());
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// Returns `read` of each entry of this database's subscriptions. An entry that is claimed for
/// another subscription meanwhile is left out.
fn subscriptions<T>(read: impl Fn(i32, &registry::SubscriptionEntry) -> T) -> Vec<T> {
    let database = process::my_database();
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

/// braid.is_preloaded() returns boolean
#[pg_extern(sql = false)]
fn is_preloaded() -> bool {
    registry::is_preloaded()
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
        name!(last_error, Option<Text>),
        name!(last_error_detail, Option<Text>),
        name!(last_error_hint, Option<Text>),
        name!(last_error_lsn, Option<i64>),
        name!(last_error_at, Option<i64>),
        name!(failures, i32),
        name!(leader_wait, Option<String>),
        name!(caught_up_at, Option<i64>),
    ),
> {
    let rows = subscriptions(|id, entry| {
        let leader = process(entry.leader_pid.load(Ordering::Acquire));
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
            entry.applier_pids(),
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
            rate(&entry.per_second.transactions),
            rate(&entry.per_second.rows),
            leader.is_some() && entry.rate_limit.is_holding(),
            leader.and_then(|_| time(&entry.started_at)),
            time(&entry.stats_since),
            error.as_ref().map(|error| error.sqlstate.to_string()),
            error.as_ref().map(|error| Text(error.message.clone())),
            error
                .as_ref()
                .and_then(|error| error.detail.clone())
                .map(Text),
            error.and_then(|error| error.hint).map(Text),
            failure
                .as_ref()
                .map(|failure| failure.lsn.cast_signed())
                .filter(|lsn| *lsn != 0),
            failure.map(|failure| failure.at),
            entry.failures.load(Ordering::Relaxed).cast_signed(),
            leader.and_then(|pid| wait(&entry.leader_wait, pid)),
            time(&entry.caught_up_at),
        )
    });
    TableIterator::new(rows)
}

/// braid.failure_activity()
#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn failure_activity() -> TableIterator<
    'static,
    (
        name!(subscription_id, i32),
        name!(context, Option<Text>),
        name!(held_up_by, Option<Text>),
        name!(held_up_hint, Option<Text>),
        name!(held_up_context, Option<Text>),
        name!(held_up_lsn, Option<i64>),
    ),
> {
    let context_of = |failure: &registry::RecordedFailure| {
        let context = failure.error.context();
        context.map(|context| Text(context.to_owned()))
    };
    let rows = subscriptions(|id, entry| {
        let failure = entry.failure();
        let held_up = entry.held_up().or_else(|| entry.copy_held_up());
        let error = held_up.as_ref().map(|failure| failure.error.clone());
        (
            id,
            failure.as_ref().and_then(context_of),
            error.as_ref().map(|error| Text(error.message.clone())),
            error.and_then(|error| error.hint).map(Text),
            held_up.as_ref().and_then(context_of),
            held_up
                .map(|failure| failure.lsn.cast_signed())
                .filter(|lsn| *lsn != 0),
        )
    });
    TableIterator::new(rows)
}

#[pg_extern(sql = false)]
fn lag_activity()
-> TableIterator<'static, (name!(subscription_id, i32), name!(measured_at, Option<i64>))> {
    TableIterator::new(subscriptions(|id, entry| {
        (id, time(&entry.provider_lsn_at))
    }))
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
        name!(wait, Option<String>),
        name!(taken_at, Option<i64>),
    ),
> {
    let rows = subscriptions(|id, entry| {
        let mut rows = Vec::new();
        for (number, applier) in entry.appliers.iter().enumerate() {
            let Some(pid) = process(applier.pid.load(Ordering::Acquire)) else {
                continue;
            };
            let taken_at = time(&applier.taken_at);
            rows.push((
                id,
                i32::try_from(number).unwrap_or(0),
                pid,
                applier.state().name(),
                taken_at.and_then(|_| position(&applier.commit_lsn)),
                count(&applier.transactions),
                count(&applier.changes),
                count(&applier.retries),
                applier.busy_share(),
                wait(&applier.wait, pid),
                taken_at,
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
    let database = process::my_database();
    let key = |entry: &registry::TableEntry| {
        (
            entry.subscription_id.load(Ordering::Acquire),
            entry.relation.load(Ordering::Acquire),
            entry.database.load(Ordering::Acquire),
        )
    };
    let rows: Vec<_> = registry::tables()
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
            // The entry may have been released and claimed for another table.
            fence(Ordering::Acquire);
            (key(entry) == (id, relation, of)).then_some(row)
        })
        .collect();
    TableIterator::new(rows)
}

#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn schedule_activity() -> TableIterator<
    'static,
    (
        name!(subscription_id, i32),
        name!(scheduled, i64),
        name!(dependent, i64),
        name!(edges, i64),
        name!(keys, i64),
        name!(keys_forgotten, i64),
        name!(table_barriers, i64),
        name!(all_barriers, i64),
        name!(barriers_truncate, i64),
        name!(barriers_unkeyed, i64),
        name!(barriers_index, i64),
        name!(barriers_trigger, i64),
        name!(barriers_size, i64),
        name!(large, i64),
        name!(in_flight, i64),
        name!(width, i64),
        name!(width_mean, Option<f64>),
        name!(width_max, i64),
        name!(batches, i64),
        name!(batched, i64),
        name!(batch_max, i64),
        name!(consolidated, i64),
        name!(sought_ahead, i64),
        name!(pieces, i64),
        name!(applied_while_running, i64),
        name!(given_up_while_running, i64),
        name!(applied_by_leader, i64),
        name!(taking, i32),
        name!(rate_one, Option<f64>),
        name!(rate_all, Option<f64>),
        name!(questions, i64),
        name!(fetched_columns, i64),
    ),
> {
    let rows = subscriptions(|id, entry| {
        process(entry.leader_pid.load(Ordering::Acquire))?;
        let schedule = &entry.schedule;
        let looks = count(&schedule.width_looks);
        let tried = |rate: &AtomicU64| {
            Some(f64::from_bits(rate.load(Ordering::Relaxed))).filter(|rate| *rate > 0.0)
        };
        #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
        let mean = (looks > 0).then(|| count(&schedule.width_sum) as f64 / looks as f64);
        Some((
            id,
            count(&schedule.scheduled),
            count(&schedule.dependent),
            count(&schedule.edges),
            count(&schedule.keys),
            count(&schedule.keys_forgotten),
            count(&schedule.table_barriers),
            count(&schedule.all_barriers),
            count(&schedule.barriers_truncate),
            count(&schedule.barriers_unkeyed),
            count(&schedule.barriers_index),
            count(&schedule.barriers_trigger),
            count(&schedule.barriers_size),
            count(&schedule.large),
            count(&schedule.in_flight),
            count(&schedule.width),
            mean,
            count(&schedule.width_max),
            count(&schedule.batches),
            count(&schedule.batched),
            count(&schedule.batch_max),
            count(&schedule.consolidated),
            count(&schedule.sought_ahead),
            count(&schedule.pieces),
            count(&schedule.applied_while_running),
            count(&schedule.given_up_while_running),
            count(&schedule.applied_by_leader),
            i32::try_from(count(&schedule.taking)).unwrap_or(0),
            tried(&schedule.rate_one),
            tried(&schedule.rate_all),
            count(&entry.questions),
            count(&entry.fetched),
        ))
    });
    TableIterator::new(rows.into_iter().flatten())
}

#[pg_extern(sql = false)]
fn scaling_activity() -> TableIterator<
    'static,
    (
        name!(subscription_id, i32),
        name!(at, i64),
        name!(appliers_before, i32),
        name!(appliers_after, i32),
        name!(utilisation, f64),
        name!(rows_per_second, f64),
        name!(reason, String),
    ),
> {
    let rows = subscriptions(|id, entry| {
        let decisions = entry.decisions().into_iter().map(move |decision| {
            (
                id,
                decision.at,
                decision.from.cast_signed(),
                decision.to.cast_signed(),
                decision.utilisation,
                decision.rows_per_second,
                decision.reason,
            )
        });
        decisions.collect::<Vec<_>>()
    });
    TableIterator::new(rows.into_iter().flatten())
}

#[pg_extern(sql = false)]
fn passing_slots() -> SetOfIterator<'static, String> {
    SetOfIterator::new(readers::passing_slots())
}

#[pg_extern(sql = false)]
fn clock_activity() -> TableIterator<
    'static,
    (
        name!(newest, Option<i64>),
        name!(waits, i64),
        name!(wait_micros, i64),
        name!(exceeded, i64),
    ),
> {
    let row = clock::status().map(|entry| {
        (
            time(&entry.newest),
            count(&entry.clock_waits),
            count(&entry.clock_wait_micros),
            count(&entry.clock_exceeded),
        )
    });
    TableIterator::new(row)
}

#[pg_extern(sql = false)]
fn skew_activity() -> TableIterator<
    'static,
    (
        name!(subscription_id, i32),
        name!(offset_micros, i64),
        name!(error_micros, i64),
        name!(measured_at, i64),
    ),
> {
    let rows = subscriptions(|id, entry| {
        let measured = entry.clock.get()?;
        Some((id, measured.offset, measured.error, measured.at))
    });
    TableIterator::new(rows.into_iter().flatten())
}

#[pg_extern(sql = false)]
fn deletion_activity() -> TableIterator<
    'static,
    (
        name!(remembered, bool),
        name!(collector_pid, Option<i32>),
        name!(collected_lsn, Option<i64>),
    ),
> {
    let entry = registry::find_manager(process::my_database());
    TableIterator::new(entry.map(|entry| {
        (
            entry.remembers_deletions.load(Ordering::Relaxed),
            process(entry.collector_pid.load(Ordering::Relaxed)),
            position(&entry.collected_lsn),
        )
    }))
}
