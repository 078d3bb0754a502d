//! Finds out why a copy waits at the provider. Run by the copy workers.
//!
//! Example: paris is tokyo's synchronous standby, and copies table `doc` from tokyo. At tokyo T
//! changes `doc` and commits.
//!
//! 1. T's commit record is written. T counts as running, and keeps its locks, until paris confirms
//!    T (`SyncRepWaitForLSN`).
//! 2. The copy worker at paris has tokyo make a slot, for a snapshot. Tokyo waits for all
//!    transactions that run, so for T.
//! 3. The leader at paris gets T, and holds the stream: `doc` is not copied yet. T waits for paris,
//!    and the copy for T.
//!
//! So while the process at the provider is silent, a copy worker asks why it waits. If it waits for
//! a transaction, and commits at the provider wait for this subscription, the worker sets
//! `parks_for_copies`. From then on, until all tables are copied:
//!
//! 1. The leader hands T out, though `doc` is not copied.
//! 2. The applier parks T at its turn (`Session::takes`, `Why::Lock`). Parking takes no lock on
//!    `doc`, which the copy worker may have locked. T is durable at paris, and is confirmed.
//! 3. Tokyo's commit returns, and the copy goes on.
//! 4. Applier 0 tries T again until `doc` is copied. Then it leaves out the changes of T that the
//!    copy has, as with any other transaction.
//!
//! A lock at the provider that T has, on any published table, does the same to a question of the
//! worker. Rejected: to leave T out and have the copy begin later, as a copy that began before
//! keeps the rows that this node has written since, which T may have changed; and `lock_timeout`
//! for the making of a slot, as that would begin anew each time and might never end among long
//! transactions.

use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_node::registry;
use braid_node::subscription::{self, Subscription};
use braid_postgres::error::PgError;
use braid_postgres::libpq::{self, Connection, Mode, Watched};
use braid_postgres::process;

/// Silence of the provider before the first look.
pub(super) const FIRST_LOOK: Duration = Duration::from_secs(1);
/// Pause between looks.
const EVERY: Duration = Duration::from_secs(5);

/// Has a copy's connection to the provider ask why the provider waits.
///
/// # Errors
/// The provider's.
pub(super) fn watch(connection: &mut Connection, subscription: &Subscription) -> libpq::Result<()> {
    let rows = connection.query("select pg_catalog.pg_backend_pid()")?;
    let Some(pid) = rows.get(0, 0).and_then(|pid| pid.parse::<i32>().ok()) else {
        return Err(libpq::Error::Unexpected("a query"));
    };
    let (id, name) = (subscription.id, subscription.name.clone());
    let (dsn, sql) = (
        subscription.dsn.clone(),
        format!(
            "select pg_catalog.cardinality(pg_catalog.pg_blocking_pids({pid})) > 0, {}",
            by_commit(subscription)
        ),
    );
    connection.watch_silence(FIRST_LOOK, EVERY, move |watched| {
        if watched == Watched::Heard {
            if let Some(entry) = registry::subscription(id) {
                entry.copy_goes_on();
            }
            return;
        }
        let found = Connection::open(&dsn, &name, Mode::Sql).and_then(|mut other| {
            other.give_up_when_silent();
            other.query(&sql)
        });
        // Another look is made where the question fails.
        if let Ok(found) = found
            && found.get(0, 0) == Some("t")
        {
            note(id, found.get(0, 1) == Some("t"));
        }
    });
    Ok(())
}

/// Whether commits at the provider wait for the subscription, as a condition.
fn by_commit(subscription: &Subscription) -> String {
    subscription::commits_wait_for(&quote_literal(&subscription.name))
}

/// Asks why the provider has not applied what this node has. A transaction at the provider may
/// prevent it whose commit waits for this subscription.
///
/// # Errors
/// The provider's.
pub(super) fn look(connection: &mut Connection, subscription: &Subscription) -> libpq::Result<()> {
    let found = connection.query(&format!("select {}", by_commit(subscription)))?;
    if found.get(0, 0) == Some("t") {
        note(subscription.id, true);
    }
    Ok(())
}

fn note(subscription: u32, by_commit: bool) {
    let Some(entry) = registry::subscription(subscription) else {
        return;
    };
    let error = PgError::new(
        SqlState::LockNotAvailable,
        "the copy of a table waits for a transaction at the provider",
    )
    .with_hint(
        "The provider's pg_stat_activity and pg_prepared_xacts show its transactions. The copy goes on by itself once that one has ended.",
    );
    entry.hold_up_copy(&error, by_commit);
    process::set_latch(entry.leader_latch.load(Ordering::Acquire));
}
