//! Functions for parked transactions: retry one, give one up, and show its contents.
//!
//! An applier makes the attempt: a function can't commit, and each transaction must be committed by
//! itself, with the origin and position of its source. So the request goes through shared memory,
//! and the session waits for the answer.

use std::ffi::CStr;
use std::time::Duration;

use braid_node::parked::{RETRY_LOCK, Request, records_as_json};
use braid_postgres::catalog::{query, sees_new_commits};
use braid_postgres::encoding::Text;
use braid_postgres::latch;
use pgrx::PgSqlErrorCode;
use pgrx::iter::TableIterator;
use pgrx::prelude::*;

use super::failure::{Failure, Outcome, notice};
use super::waiting::check_running;
use super::{local, required, required_name, run, wake_manager};

/// How often the answer is looked for.
const POLL: Duration = Duration::from_millis(20);

fn undefined(name: &str, id: i64) -> Failure {
    Failure::undefined(format!(
        "subscription \"{name}\" has no parked transaction {id}"
    ))
    .hint("The view braid.parked_transactions lists them.")
}

/// 55000 while a subscription that is to go has parked transactions: nothing else has them.
pub fn check_none_left(subscription: &local::Subscription) -> Outcome<()> {
    let left = query(
        "select count(*) from braid.parked_transaction where subscription_id = $1::integer and state <> 'skipped' having count(*) > 0",
        &[Some(&subscription.id)],
    );
    let Some(count) = left.get(0, 0) else {
        return Ok(());
    };
    Err(Failure::state(format!(
        "cannot drop subscription \"{}\" with parked transactions",
        subscription.name
    ))
    .detail(format!(
        "Transactions that were received and are not applied: {count}."
    ))
    .hint("Apply them with braid.retry_parked, or give each of them up with braid.skip_parked."))
}

/// braid.retry_parked(subscription_name name, parked_id bigint)
#[pg_extern(sql = false)]
fn retry_parked(subscription_name: Option<&CStr>, parked_id: Option<i64>) -> i64 {
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        local::require_node()?;
        if !sees_new_commits() {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
                "cannot wait in a transaction that does not see new commits",
            )
            .hint("Use a transaction at isolation level read committed."));
        }
        retry(&name, parked_id)
    })
}

/// The number of a subscription that can apply something.
fn running(name: &str) -> Outcome<String> {
    let rows = query(
        "select enabled, error_message, subscription_id from braid.subscription where subscription_name = $1::name",
        &[Some(name)],
    );
    if rows.is_empty() {
        return Err(local::undefined_subscription(name));
    }
    check_running(name, rows.get(0, 0), rows.get(0, 1))?;
    Ok(rows.get(0, 2).unwrap_or_default().to_owned())
}

/// Has the request carried out when the subscription runs again.
fn retry_later(name: &str, parked_id: Option<i64>) -> Outcome<i64> {
    let subscription = local::lock_subscription(name)?;
    let id = parked_id.map(|id| id.to_string());
    let marked = query(
        "update braid.parked_transaction set state = 'waiting' \
          where subscription_id = $1::integer and state <> 'skipped' and ($2::bigint is null or parked_id = $2::bigint) returning 1",
        &[Some(&subscription.id), id.as_deref()],
    );
    if marked.is_empty() {
        return parked_id.map_or(Ok(0), |id| Err(undefined(name, id)));
    }
    wake_manager();
    notice(format!(
        "parked transactions are tried as soon as subscription \"{name}\" runs"
    ));
    Ok(0)
}

/// Whether a subscription is disabled, or has stopped with an error.
fn is_stopped(name: &str) -> bool {
    let rows = query(
        "select 1 from braid.subscription where subscription_name = $1::name and (not enabled or error_sqlstate is not null)",
        &[Some(name)],
    );
    !rows.is_empty()
}

fn retry(name: &str, parked_id: Option<i64>) -> Outcome<i64> {
    if is_stopped(name) {
        return retry_later(name, parked_id);
    }
    let subscription = running(name)?;
    let wanted = parked_id.map(|id| id.to_string());
    let parked = query(
        "select count(*) from braid.parked_transaction \
          where subscription_id = $1::integer and state <> 'skipped' and ($2::bigint is null or parked_id = $2::bigint)",
        &[Some(&subscription), wanted.as_deref()],
    );
    if parked.get(0, 0) == Some("0") {
        return match parked_id {
            Some(id) => Err(undefined(name, id)),
            None => Ok(0),
        };
    }
    // One request at a time.
    query(
        "select pg_advisory_xact_lock($1::integer, $2::integer)",
        &[Some(&RETRY_LOCK.to_string()), Some(&subscription)],
    );
    let number = subscription.parse().unwrap_or(0);
    let mut request = None;
    let applied = loop {
        if let Some(request) = &request {
            let request: &Request = request;
            if let Some(applied) = request.outcome() {
                break applied;
            }
            if request.is_blocked_by_me() {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED,
                    "parked transactions wait for a lock that this transaction holds",
                )
                .hint("Commit what removes the cause first, then run braid.retry_parked in a transaction of its own."));
            }
            request.remind();
        } else {
            // Between two runs of its workers there may be no place for it.
            request = Request::make(number, parked_id);
        }
        running(name)?;
        latch::wait(Some(POLL));
    };
    report(name, &subscription, wanted.as_deref());
    Ok(i64::try_from(applied).unwrap_or(i64::MAX))
}

/// Reports which of the requested transactions are still parked.
fn report(name: &str, subscription: &str, wanted: Option<&str>) {
    let left = query(
        "select parked_id, error_message, waits_for, count(*) over () from braid.parked_transaction \
          where subscription_id = $1::integer and state <> 'skipped' and ($2::bigint is null or parked_id = $2::bigint) \
          order by parked_id limit 1",
        &[Some(subscription), wanted],
    );
    let Some(id) = left.get(0, 0) else { return };
    let why = match (left.get(0, 1), left.get(0, 2)) {
        (Some(error), _) => format!("Number {id} failed: {error}."),
        (None, Some(other)) => format!("Number {id} has to follow number {other}."),
        (None, None) => format!("Number {id} was not tried."),
    };
    let count = left.get(0, 3).unwrap_or("?");
    Failure::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("subscription \"{name}\" still has {count} parked transactions of those asked for"),
    )
    .detail(why)
    .hint("The view braid.parked_transactions says why each is parked.")
    .warn();
}

/// braid.skip_parked(subscription_name name, parked_id bigint)
#[pg_extern(sql = false)]
fn skip_parked(subscription_name: Option<&CStr>, parked_id: Option<i64>) {
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let id = required(parked_id, "parked_id")?;
        local::require_node()?;
        let subscription = query(
            "select subscription_id from braid.subscription where subscription_name = $1::name",
            &[Some(&name)],
        );
        let Some(subscription) = subscription.get(0, 0) else {
            return Err(local::undefined_subscription(&name));
        };
        let skipped = query(
            "update braid.parked_transaction set state = 'skipped', waits_for = null, skipped_at = clock_timestamp() \
              where subscription_id = $1::integer and parked_id = $2::bigint and state <> 'skipped' returning 1",
            &[Some(subscription), Some(&id.to_string())],
        );
        if skipped.is_empty() {
            return Err(undefined(&name, id));
        }
        wake_manager();
        Ok(())
    });
}

/// braid.parked_records(parked_id bigint)
#[pg_extern(sql = false)]
fn parked_records(
    parked_id: Option<i64>,
) -> TableIterator<'static, (name!(number, i32), name!(record, Text))> {
    let lines = run(|| {
        let Some(id) = parked_id else {
            return Ok(Vec::new());
        };
        Ok(match records_as_json(id) {
            Ok(lines) => lines,
            Err(error) => error.raise(),
        })
    });
    TableIterator::new((1..).zip(lines.into_iter().map(Text)))
}
