//! The leader process of a subscription: receives the stream, schedules its transactions, and
//! confirms durable commits.
//!
//! Its life: connect, create the slot (phase `slot`), have the tables copied (phase `copy`), then
//! stream (phase `stream`) until something ends it. It ends after any failure. A permanent failure
//! is recorded in the catalog, and the subscription stops. After any other failure the manager
//! starts a new leader after a pause. Only durable state is carried over, so a restart is the one
//! way of recovering.
//!
//! Invariants: a position that is confirmed as flushed is durably committed on this node (I1); a
//! transaction is handed out whole or, when it is too large for the ring, alone (I6, I9); no byte
//! from the network is trusted (I10).

mod confirm;
mod confirmation;
mod confirmed;
mod copies;
mod handout;
mod intake;
mod membership;
mod prepared;
mod provider;
mod provider_end;
mod receive;
mod reception;
pub(crate) mod running;
mod schedule;
mod scheduling;
mod segments;
mod skew;
mod spread;
mod untangle;

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use braid_apply::take_rule;
use braid_bgworker::policy::{self, AfterStop, Policy};
use braid_bgworker::reason::Reason;
use braid_bgworker::remedy::{Subject, with_arguments};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::lsn_text;
use braid_node::registry::{self, Activity, SubscriptionEntry};
use braid_node::subscription::{self, InitialCopy};
use braid_node::{crash, owners, settings, standing};
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::{self, Connection, Mode};
use braid_postgres::wait::{self, Wait};
use braid_postgres::{latch, process, server, timestamp, worker};
use pgrx::pg_sys;

use crate::copy::Coordinator;
use provider::{create_slot, open_beside, published_tables, rules_for_all_nodes};
use reception::Reception;

/// How often in a row the provider's messages may be invalid before the subscription stops: a
/// connection may be broken, or the two nodes may not understand each other.
const GARBLED_ATTEMPTS: u32 = 8;
/// Attempts if the provider has removed the required WAL.
const REMOVED_ATTEMPTS: u32 = 3;

/// The subscription that this process leads, for its exit callback.
static LEADING: AtomicU32 = AtomicU32::new(0);

/// How a leader ends.
enum End {
    /// Asked to, or there is nothing to do.
    Quiet,
    /// The manager may try again; the position is where the transaction that failed ends, 0 for
    /// none.
    Transient(PgError, u64),
    /// A person has to act. The position is where the transaction that failed ends, 0 for none.
    Permanent(PgError, u64),
    /// A table could not be copied, and a person has to act.
    Copy(PgError),
    /// The provider refuses, and a person has to act at the provider.
    Refused(PgError),
}

impl End {
    /// Ends a leader whose check of the provider failed. A standby may lack objects that it has
    /// once it is promoted, so its failures are never final.
    fn at_provider(error: PgError, in_recovery: bool) -> Self {
        if !in_recovery {
            return Self::Permanent(error, 0);
        }
        let mut error = error.with_hint(policy::STANDBY_HINT);
        error.in_recovery = true;
        Self::Transient(error, 0)
    }
}

impl From<PgError> for End {
    fn from(error: PgError) -> Self {
        match policy::for_apply(error.sqlstate) {
            Policy::Stop => Self::Permanent(error, 0),
            Policy::Retry | Policy::Reconnect | Policy::Conflict => Self::Transient(error, 0),
        }
    }
}

impl From<braid_gir::Error> for End {
    fn from(error: braid_gir::Error) -> Self {
        // `finish` makes it permanent when it comes again and again.
        Self::Transient(error.into(), 0)
    }
}

impl From<libpq::Error> for End {
    fn from(error: libpq::Error) -> Self {
        let garbled = matches!(error, libpq::Error::Unexpected(_));
        let mut error = PgError::from(error);
        if garbled {
            // Like an error of the records' reader.
            error.message = format!("connection to the provider: {}", error.message);
            return Self::Transient(error, 0);
        }
        match policy::for_refusal(error.sqlstate, error.reason) {
            Policy::Stop if error.in_recovery => {
                error.message = format!("the provider reported: {}", error.message);
                Self::Transient(error.with_hint(policy::STANDBY_HINT), 0)
            }
            Policy::Stop => {
                if error.hint.is_none() {
                    let hint = policy::provider_hint(error.sqlstate, error.reason);
                    error = error.with_hint(hint);
                }
                let may_pass = error.reason == Some(Reason::WalRemoved);
                error.message = format!("the provider reported: {}", error.message);
                if may_pass {
                    Self::Transient(error, 0)
                } else {
                    Self::Refused(error)
                }
            }
            Policy::Retry | Policy::Reconnect | Policy::Conflict => {
                error.message = format!("connection to the provider: {}", error.message);
                Self::Transient(error, 0)
            }
        }
    }
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = u32::try_from(argument.value()).unwrap_or(0);
    let id = u32::try_from(worker::Extra::mine().word(0)).unwrap_or(0);
    worker::connect(database);
    let Some(entry) = registry::subscription(id) else {
        return;
    };
    entry.leader_pid.store(process::my_pid(), Ordering::Release);
    entry
        .leader_latch
        .store(process::my_latch(), Ordering::Release);
    entry.started_at.store(timestamp::now(), Ordering::Relaxed);
    entry.go_on();
    entry.starts.fetch_add(1, Ordering::Relaxed);
    entry.leader_wait.store(0, Ordering::Relaxed);
    wait::show_in(&entry.leader_wait);
    entry.set_activity(Activity::Starting);
    LEADING.store(id, Ordering::Relaxed);
    process::before_exit(leave);
    let end = match error::catch(|| lead(id, entry)) {
        Ok(Ok(())) => End::Quiet,
        Ok(Err(end)) => end,
        Err(error) => {
            error::abort();
            error.into()
        }
    };
    finish(id, entry, end);
}

/// The leader's process ends.
fn leave() {
    if let Some(entry) = registry::subscription(LEADING.load(Ordering::Relaxed)) {
        // However this process ends, its appliers end too.
        for applier in &entry.appliers {
            worker::terminate_pid(applier.pid.load(Ordering::Acquire));
        }
        confirmed::settle(LEADING.load(Ordering::Relaxed));
        entry.confirms.store(0, Ordering::Release);
        entry.leader_latch.store(0, Ordering::Release);
        entry.leader_pid.store(0, Ordering::Release);
    }
}

/// Write down how it ended, for people and for the manager.
fn finish(id: u32, entry: &SubscriptionEntry, end: End) {
    // The cause of an error of a transaction, or of a copy, can be this node's tables.
    let (mut error, lsn, permanent, after) = match end {
        End::Quiet => return,
        End::Transient(error, lsn) => (error, lsn, false, AfterStop::Wait),
        End::Permanent(error, 0) => (error, 0, true, AfterStop::Wait),
        End::Permanent(error, lsn) => {
            let after = policy::after_stop(error.sqlstate);
            (error, lsn, true, after)
        }
        End::Copy(error) => {
            let after = policy::after_stop(error.sqlstate);
            (error, 0, true, after)
        }
        End::Refused(error) => {
            let after = policy::after_refusal(error.sqlstate, error.reason);
            (error, 0, true, after)
        }
    };
    let failures = entry.failures.load(Ordering::Acquire);
    let mut permanent = permanent
        || (error.sqlstate == SqlState::ProtocolViolation && failures >= GARBLED_ATTEMPTS)
        || (!error.in_recovery
            && error.reason == Some(Reason::WalRemoved)
            && failures >= REMOVED_ATTEMPTS);
    let recorded = error::transaction(|| {
        let Some(subscription) = subscription::load(id)? else {
            return Ok(String::new());
        };
        let is_failure = policy::is_failure(error.sqlstate) && !error.in_recovery;
        if subscription.options.disable_on_error && !permanent && is_failure {
            permanent = true;
            error.hint.get_or_insert_with(|| {
                "Remove the cause and run braid.enable_subscription.".into()
            });
        }
        if !permanent && error.hint.is_none() {
            error.hint = Some(policy::transient_hint(error.sqlstate).to_owned());
        }
        let position = (lsn != 0).then(|| lsn_text(lsn));
        let subject = Subject {
            subscription: &subscription.name,
            position: position.as_deref(),
            table: None,
        };
        error.hint = error.hint.take().map(|hint| with_arguments(&hint, subject));
        if permanent {
            let may_be_cured = after == AfterStop::TryAgain;
            let pause = settings::stopped_retry_interval()
                .filter(|_| may_be_cured && !subscription.options.disable_on_error);
            subscription::set_error(id, &error, lsn, pause)?;
        }
        Ok(subscription.name)
    });
    entry.set_failure(&error, lsn);
    match recorded {
        Ok(name) if permanent => {
            error.log_as_error(&format!("subscription \"{name}\" has stopped"));
        }
        Ok(name) => error.log(&format!("subscription \"{name}\" will be tried again")),
        Err(failure) => failure.log("could not record the error of a subscription"),
    }
}

/// Creates the slot, and notes which tables the copy is to bring, as of its snapshot.
fn begin(
    subscription: &mut subscription::Subscription,
    coordinator: &mut Coordinator,
) -> Result<(), End> {
    let mut connection =
        Connection::open(&subscription.dsn, &subscription.name, Mode::Replication)?;
    connection.look_into_silence(&subscription.dsn)?;
    // The slot's snapshot is kept in a transaction while tables are copied.
    connection.lift_transaction_timeout()?;
    let (lsn, snapshot) = create_slot(&mut connection, subscription)?;
    // Tables that were published between the look at the provider and the slot would be in neither.
    let mut asked = open_beside(&connection, subscription)?;
    let published = published_tables(&mut asked, subscription)?;
    let rules = rules_for_all_nodes(&mut asked, subscription)?;
    drop(asked);
    let copy = if subscription.options.copy_data {
        InitialCopy::Yes
    } else {
        InitialCopy::No
    };
    error::transaction(|| {
        for (content, concerned) in &rules {
            take_rule(content, *concerned)?;
        }
        for (namespace, name) in &published {
            subscription::add_table(subscription.id, namespace, name, copy)?;
        }
        subscription::set_phase(subscription.id, "copy", Some(lsn))
    })?;
    "copy".clone_into(&mut subscription.phase);
    subscription.start_lsn = lsn;
    coordinator.adopt(connection, snapshot, lsn);
    Ok(())
}

fn lead(id: u32, entry: &'static SubscriptionEntry) -> Result<(), End> {
    if !server::tracks_commit_timestamps() {
        let error = PgError::new(SqlState::ObjectNotInPrerequisiteState, "track_commit_timestamp must be on")
            .with_detail("Commit timestamps are the versions that conflicts are resolved by: nothing is applied without them.")
            .with_hint("Set track_commit_timestamp = on in postgresql.conf and restart the server.");
        return Err(End::Transient(error, 0));
    }
    wait_for_old_appliers(entry)?;
    entry.no_copy_waits();
    let loaded = error::transaction(|| {
        if standing::refusal()?.is_some() {
            return Ok(None);
        }
        let Some(subscription) = subscription::load(id)? else {
            return Ok(None);
        };
        let node = subscription::local_node()?.ok_or_else(|| {
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "this database has no node",
            )
        })?;
        Ok(Some((subscription, node)))
    })?;
    let Some((mut subscription, local_node)) = loaded else {
        return Ok(());
    };
    check_owner(&subscription)?;
    worker::report_activity(&format!("subscription {}", subscription.name));
    crash::look_back(id, &subscription.name).map_err(|(error, lsn)| End::Permanent(error, lsn))?;
    crash::enter(id, None);
    let mut coordinator = Coordinator::new(&subscription);
    if subscription.phase == "slot" {
        begin(&mut subscription, &mut coordinator)?;
    }
    let copied = copy_tables(&mut coordinator, entry);
    if copied.is_err() {
        coordinator.stop();
    }
    let catalog_version = copied?;
    if subscription.phase == "copy" {
        error::transaction(|| subscription::set_phase(id, "stream", None))?;
        "stream".clone_into(&mut subscription.phase);
    }
    let mut reception = Reception::open(
        &subscription,
        local_node,
        entry,
        (coordinator, catalog_version),
    )?;
    // Also when it unwinds: appliers end through the exit callback then.
    let outcome = reception.run();
    if let Err(End::Transient(error, _)) = &outcome
        && (error.sqlstate.is_of("08") || error.sqlstate.is_of("57P"))
        && reception.resumption.has_arrived()
    {
        // The connection broke, but not before something came through: the first failure of a row.
        entry.failures.store(0, Ordering::Release);
    }
    reception.stop_appliers();
    if let Err(End::Transient(error, _)) = &outcome
        && matches!(
            error.reason,
            Some(Reason::SendOnceCommitted | Reason::RunningGivenUp)
        )
    {
        // Nothing has failed: the provider is to be asked in another way.
        entry.failures.store(0, Ordering::Release);
        entry.at_once.store(1, Ordering::Release);
        return Ok(());
    }
    if let Err(End::Transient(error, _) | End::Permanent(error, _) | End::Refused(error)) = &outcome
        && error.reason == Some(Reason::SpoolFull)
    {
        pgrx::log!(
            "subscription \"{}\" asks for large transactions once they have committed: {}",
            subscription.name,
            error.detail.as_deref().unwrap_or_default()
        );
        entry.anew.whole.store(1, Ordering::Release);
        entry.failures.store(0, Ordering::Release);
        entry.at_once.store(1, Ordering::Release);
        return Ok(());
    }
    outcome
}

/// A subscription whose owner was dropped stops.
fn check_owner(subscription: &subscription::Subscription) -> Result<(), End> {
    if !error::transaction(|| Ok(owners::exists(subscription.owner)))? {
        let error = PgError::new(
            SqlState::UndefinedObject,
            format!("the owner of subscription \"{}\" does not exist", subscription.name),
        )
        .with_hint("Give it another one with braid.set_subscription_owner, then run braid.enable_subscription.");
        return Err(End::Permanent(error, 0));
    }
    Ok(())
}

/// A leader that was killed may have left appliers that are still ending; they hold origins.
/// They might still commit, which must not happen after the look at how far they came.
fn wait_for_old_appliers(entry: &SubscriptionEntry) -> Result<(), End> {
    // An applier that starts just now first stores its process id, and then reads which leader is
    // running. `leader_pid` was written before. With this fence one of the two processes sees the
    // other.
    fence(Ordering::SeqCst);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let alive = entry.applier_pids();
        if alive.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            let error = PgError::new(
                SqlState::ObjectInUse,
                "appliers of an earlier leader have not ended yet",
            );
            return Err(End::Transient(error, 0));
        }
        for pid in alive {
            worker::terminate_pid(pid);
        }
        latch::wait(Some(Duration::from_millis(20)));
    }
}

/// Has every table that waits copied, before anything is streamed; unless a copy waits for a commit
/// that waits for the stream. Returns the `catalog_version` that the coordinator's knowledge is as
/// of.
fn copy_tables(coordinator: &mut Coordinator, entry: &SubscriptionEntry) -> Result<u32, End> {
    let mut seen = entry.catalog_version.load(Ordering::Acquire);
    loop {
        let catalog_version = entry.catalog_version.load(Ordering::Acquire);
        if catalog_version != seen {
            seen = catalog_version;
            coordinator.rescan();
        }
        let progress = coordinator.poll().map_err(End::Copy)?;
        if progress.changed {
            entry.tables_version.fetch_add(1, Ordering::AcqRel);
        }
        let is_done = progress.waiting == 0 && progress.copying == 0;
        if is_done || entry.parks_for_copies() {
            return Ok(seen);
        }
        entry.set_activity(Activity::Copying);
        latch::wait_as(
            Wait::Tables,
            progress.next.unwrap_or(Duration::from_secs(1)),
        );
        worker::reload_settings();
    }
}

/// A transaction that comes after a later one.
fn late(commit_lsn: u64, after: u64) -> End {
    End::Permanent(
        PgError::new(
            SqlState::ProtocolViolation,
            format!(
                "the provider sent the transaction at {} after one that ends at {}",
                lsn_text(commit_lsn),
                lsn_text(after)
            ),
        )
        .with_detail("It was not applied. Once a later one is, it is not asked for again.")
        .with_hint(
            "Something is wrong at the provider. After braid.enable_subscription, find what is missing with braid.compare.",
        ),
        0,
    )
}

fn out_of_order() -> End {
    End::Transient(
        PgError::new(SqlState::ProtocolViolation, "records from the provider are out of order")
            .with_hint("If it comes again, the provider runs a version of braid that this one does not understand."),
        0,
    )
}
