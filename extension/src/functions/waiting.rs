//! Waiting in a session for commits of the workers.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use braid_postgres::catalog::{query, sees_new_commits};
use braid_postgres::latch;
use pgrx::datum::Interval;
use pgrx::{PgSqlErrorCode, pg_extern};

use super::failure::{Failure, Outcome};
use super::{in_recovery, local, on_standby, required_name, run, server};

/// How often the catalog is looked at.
const POLL: Duration = Duration::from_millis(50);

/// The result of a look at the catalog.
pub enum Progress {
    /// The awaited state is reached.
    Reached,
    /// Not yet; a sentence about the missing part.
    Waiting(String),
}

/// Look every 50 ms until it is reached, an error is found or the time is over (57014). Can be
/// cancelled. 25006 at a standby, where no worker runs.
pub fn wait_until(
    timeout: Option<Interval>,
    what: &str,
    look: impl FnMut() -> Outcome<Progress>,
) -> Outcome<()> {
    let hint = "See braid.subscription_status for the state and the lag of each subscription.";
    wait_with_hint(timeout, what, hint, look)
}

/// As [`wait_until`], with a hint of its own for when the time is over.
pub fn wait_with_hint(
    timeout: Option<Interval>,
    what: &str,
    hint: &str,
    mut look: impl FnMut() -> Outcome<Progress>,
) -> Outcome<()> {
    if in_recovery() {
        return Err(on_standby());
    }
    if !sees_new_commits() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
            "cannot wait in a transaction that does not see new commits",
        )
        .hint("Wait in a transaction at isolation level read committed."));
    }
    let deadline = timeout
        .map(duration)
        .transpose()?
        .map(|time| Instant::now() + time);
    loop {
        let missing = match look()? {
            Progress::Reached => return Ok(()),
            Progress::Waiting(missing) => missing,
        };
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_QUERY_CANCELED,
                format!("timeout expired while waiting for {what}"),
            )
            .detail(missing)
            .hint(hint));
        }
        latch::wait(Some(left.map_or(POLL, |left| left.min(POLL))));
    }
}

/// Months count as 30 days and years never end: nobody waits for that long.
fn duration(interval: Interval) -> Outcome<Duration> {
    let days = i64::from(interval.months()) * 30 + i64::from(interval.days());
    let micros = days
        .saturating_mul(86_400_000_000)
        .saturating_add(interval.micros());
    let micros = u64::try_from(micros).map_err(|_| {
        Failure::parameter("timeout must not be negative").hint("Use null to wait without a limit.")
    })?;
    Ok(Duration::from_micros(
        micros.min(100 * 365 * 86_400_000_000),
    ))
}

/// Checks that a subscription can reach the awaited state by itself.
pub fn check_running(name: &str, enabled: Option<&str>, error: Option<&str>) -> Outcome<()> {
    server::check_workers_run()?;
    if let Some(error) = error {
        return Err(
            Failure::state(format!("subscription \"{name}\" has stopped with an error"))
                .detail(error)
                .hint(format!(
                    "Remove the cause and run braid.enable_subscription('{name}')."
                )),
        );
    }
    if enabled != Some("t") {
        return Err(
            Failure::state(format!("subscription \"{name}\" is disabled"))
                .hint(format!("Run braid.enable_subscription('{name}').")),
        );
    }
    Ok(())
}

/// braid.wait_for_subscription(subscription_name name, timeout interval)
#[pg_extern(sql = false)]
fn wait_for_subscription(subscription_name: Option<&CStr>, timeout: Option<Interval>) {
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        local::require_node()?;
        wait_until(timeout, &format!("subscription \"{name}\""), || {
            look_at_subscription(&name)
        })
    });
}

fn look_at_subscription(name: &str) -> Outcome<Progress> {
    let rows = query(
        "select s.phase, s.enabled, s.error_message, s.xmin = pg_current_xact_id_if_assigned()::xid, \
                (select count(*) from braid.subscription_table t join pg_class c on c.oid = t.relation \
                  where t.subscription_id = s.subscription_id and t.state <> 'ready'), \
                coalesce(a.state, 'starting') \
           from braid.subscription s \
           left join braid.subscription_activity() a on a.subscription_id = s.subscription_id \
          where s.subscription_name = $1::name",
        &[Some(name)],
    );
    if rows.is_empty() {
        return Err(local::undefined_subscription(name));
    }
    if rows.get(0, 3) == Some("t") {
        return Err(Failure::state(format!(
            "subscription \"{name}\" was created or changed in this transaction"
        ))
        .detail("Workers do not see it before the transaction commits.")
        .hint("Commit first, then wait."));
    }
    check_running(name, rows.get(0, 1), rows.get(0, 2))?;
    let (phase, tables, state) = (rows.get(0, 0), rows.get(0, 4), rows.get(0, 5));
    if phase == Some("stream") && tables == Some("0") && state == Some("streaming") {
        return Ok(Progress::Reached);
    }
    let tables = tables.unwrap_or("?");
    Ok(Progress::Waiting(format!(
        "The subscription is {}; tables still to be copied: {tables}.",
        state.unwrap_or("starting")
    )))
}
