//! The manager process: one for each database that has the extension. It starts and stops the
//! leaders of subscriptions as the catalog says, and drops the slots that dropped subscriptions
//! left at providers. It has local deletions collected if other nodes may send older changes of the
//! rows, and removes records that are not needed any more.
//!
//! It acts on committed changes, woken by their commit, so nothing takes effect before. A leader
//! that ended is started again after a pause that doubles with each failure in a row. If its
//! subscription has stopped with an error, it is not.

mod collecting;
mod grouping;

use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::fingerprint_columns;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::{policy, slot_name};
use braid_node::registry::{self, Activity, ManagerEntry, SubscriptionEntry};
use braid_node::settings::{RememberDeletions, timers};
use braid_node::subscription::rows;
use braid_node::{
    clock, crash, ddl, left_origin, local_version, owners, settings, standing, tombstone, versions,
};
use braid_postgres::error::{self, PgError};
use braid_postgres::{latch, process, worker};
use pgrx::pg_sys;

use collecting::Collecting;
use grouping::Grouping;

use crate::purge::Purge;
use crate::supervisor;

/// A leader that ran this long and ended without an error starts again at once.
const SETTLED: Duration = Duration::from_secs(5);

struct Led {
    handle: worker::Handle,
    started: Instant,
    /// The catalog row with which it was started; another row asks for a new leader.
    fingerprint: String,
    stopping: bool,
}

#[derive(Default)]
struct Manager {
    leaders: HashMap<u32, Led>,
    not_before: HashMap<u32, Instant>,
    /// The value of `ManagerEntry::members_reached` at the last look.
    members_reached: u64,
    cleanup: Option<worker::Handle>,
    cleanup_not_before: Option<Instant>,
    /// The process that looks for orphans, and when it is started next.
    orphans: Option<worker::Handle>,
    orphans_not_before: Option<Instant>,
    /// The process that sends values which rows have got on this node, and when it is started next.
    values: Option<worker::Handle>,
    values_not_before: Option<Instant>,
    /// The process that runs a statement of another node by itself.
    intent: Option<worker::Handle>,
    collecting: Collecting,
    grouping: Grouping,
    purge: Purge,
    /// Why nothing runs, as it was last logged.
    refused: Option<String>,
}

struct Wanted {
    id: u32,
    name: String,
    fingerprint: String,
    /// Rows and bytes a second; 0 for no limit.
    rate_limit: (u64, u64),
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = crate::connect(argument);
    let Some(entry) = registry::manager(database) else {
        pgrx::log!("braid: too many databases");
        return;
    };
    match error::transaction(|| Ok(standing::has_extension())) {
        Ok(true) => {}
        Ok(false) => {
            left_origin::drop_without_extension();
            left_origin::sweep();
            entry.pid.store(supervisor::NO_EXTENSION, Ordering::SeqCst);
            return;
        }
        Err(failure) => {
            failure.log("braid manager");
            return;
        }
    }
    entry.latch.store(process::my_latch(), Ordering::SeqCst);
    entry.pid.store(process::my_pid(), Ordering::SeqCst);
    // The supervisor looks at the next database now.
    registry::wake_supervisor();
    process::before_exit(move || leave(entry));
    worker::report_activity("watching subscriptions");
    end_left_over_workers(database, entry);
    forget_crashes();
    left_origin::sweep();
    // Before the first applier asks.
    if let Err(failure) = error::transaction(tombstone::load) {
        failure.log("braid manager");
    }
    let remembered = error::transaction(|| {
        local_version::may_be();
        clock::remember()
    });
    if let Err(failure) = remembered {
        failure.log("could not look at the last commits");
    }
    // An upgraded server does not know them.
    if let Err(failure) = error::transaction(owners::tie) {
        failure.log("could not look at the owners of subscriptions");
    }
    let mut manager = Manager::default();
    loop {
        worker::reload_settings();
        entry.poked.store(0, Ordering::SeqCst);
        // Before the look, which then shows the altered options.
        let alterations = alterations();
        let wait = match error::transaction(look) {
            Ok(Database::Node(state)) => manager.tend(&state, entry),
            Ok(Database::Refused(refusal)) => manager.rest(&refusal, entry),
            Ok(Database::WithoutExtension) => {
                entry
                    .membership
                    .store(registry::NO_MEMBER, Ordering::Release);
                manager.stop_all();
                versions::tables::changed(false);
                left_origin::drop_without_extension();
                entry.pid.store(supervisor::NO_EXTENSION, Ordering::SeqCst);
                return;
            }
            Err(failure) => {
                failure.log("braid manager");
                Duration::from_secs(1)
            }
        };
        manager.heed(&alterations);
        if entry.poked.load(Ordering::SeqCst) == 0 {
            latch::wait(Some(wait));
        }
    }
}

/// How often the options of each subscription have changed.
fn alterations() -> Vec<(&'static SubscriptionEntry, u32, u32)> {
    let entries = registry::subscriptions().iter();
    entries
        .map(|entry| {
            let id = entry.subscription_id.load(Ordering::Acquire);
            (entry, id, entry.alterations())
        })
        .filter(|(_, id, _)| *id != 0)
        .collect()
}

/// The manager's process ends.
fn leave(entry: &ManagerEntry) {
    if entry.pid.load(Ordering::SeqCst) == process::my_pid() {
        entry.pid.store(0, Ordering::SeqCst);
    }
    entry.latch.store(0, Ordering::SeqCst);
}

/// The kind of the manager's database.
enum Database {
    /// The extension was dropped.
    WithoutExtension,
    /// The database must not act as the node that its catalog names: no worker of Braid runs in it.
    Refused(PgError),
    /// A node, or no node yet.
    Node(State),
}

fn look() -> Result<Database, PgError> {
    if !standing::has_extension() {
        return Ok(Database::WithoutExtension);
    }
    match standing::refusal()? {
        Some(refusal) => Ok(Database::Refused(refusal)),
        None => read().map(Database::Node),
    }
}

/// Leaders, and the collector, that a manager before this one has started: nobody watches them.
fn end_left_over_workers(database: u32, own: &ManagerEntry) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let alive: Vec<i32> = registry::subscriptions()
            .iter()
            .filter(|entry| {
                entry.subscription_id.load(Ordering::Acquire) != 0
                    && entry.database.load(Ordering::Acquire) == database
            })
            .map(|entry| entry.leader_pid.load(Ordering::Acquire))
            .chain([
                own.collector_pid.load(Ordering::SeqCst),
                own.group_pid.load(Ordering::SeqCst),
                own.sequences_pid.load(Ordering::SeqCst),
                own.versions_pid.load(Ordering::SeqCst),
            ])
            .filter(|pid| *pid > 0)
            .collect();
        if alive.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in alive {
            worker::terminate_pid(pid);
        }
        latch::wait(Some(Duration::from_millis(50)));
    }
}

/// Forgets crashes of subscriptions that are gone.
fn forget_crashes() {
    let known = error::transaction(|| {
        let found = rows("select subscription_id::text from braid.subscription", &[])?;
        let id = |row: Vec<Option<String>>| row.into_iter().next()??.parse().ok();
        Ok(found.into_iter().filter_map(id).collect::<Vec<u32>>())
    });
    match known {
        Ok(known) => crash::forget_others(&known),
        Err(failure) => failure.log("braid manager"),
    }
}

/// The state that the catalog has.
struct State {
    /// Subscriptions that should run.
    wanted: Vec<Wanted>,
    /// All that exist.
    known: Vec<u32>,
    /// When the next one that has stopped is to be tried again; not longer than the manager rests.
    retry_in: Duration,
    /// Slots are to be cleaned up.
    cleanup: bool,
    /// Rows have got values on this node that are not sent to the others yet.
    values: bool,
    /// When the next statement is due that this node runs by itself.
    intent: Option<Duration>,
    /// There are rules for foreign keys.
    orphans: bool,
    /// Changes of the same row may come from several nodes.
    several_writers: bool,
    /// The columns that local sessions write must be recorded.
    columns: bool,
    /// The database is a member of a group.
    is_member: bool,
    /// The database takes no writes of users.
    is_read_only: bool,
    /// A member that only votes.
    is_witness: bool,
    /// Tables are versioned.
    is_versioned: bool,
    /// The node differs from what its group has agreed.
    is_behind_group: bool,
    /// The node was taken down, and has left replication origins.
    has_left_origins: bool,
    /// The first transaction of this node's life, by its full id; 0: not known.
    first_xid: u64,
}

fn read() -> Result<State, PgError> {
    let found = rows(
        &format!(
            "select subscription_id::text, subscription_name::text, (enabled and not exists (select from braid.resting_subscription r where r.subscription_id = s.subscription_id) and given_up_at is null and (error_sqlstate is null or coalesce(error_retry_at <= clock_timestamp(), false)))::text, \
         md5(row(subscription_name, connection_id, provider_name, subscription_owner, {})::text), coalesce(rows_per_second, 0)::text, coalesce(bytes_per_second, 0)::text, \
         (case when enabled and given_up_at is null and error_retry_at > clock_timestamp() \
               then ceil(extract(epoch from error_retry_at - clock_timestamp()) * 1000) end)::bigint::text \
         from braid.subscription s",
            fingerprint_columns()
        ),
        &[],
    )?;
    let cleanup = rows("select 1::text from braid.slot_cleanup limit 1", &[])?;
    let values = rows("select 1::text from braid.own_value limit 1", &[])?;
    let orphans = rows("select 1::text from braid.foreign_key_rule limit 1", &[])?;
    // A node that reads changes from this one may write the same rows, and so may each provider,
    // and each source.
    let several = rows(
        "select 1::text \
         from (select (select count(*) from braid.subscription) + (select count(*) from braid.ingest_source), \
                      (select count(*) from pg_catalog.pg_replication_slots \
                       where plugin = 'braid' and database = current_database() and slot_name <> $1::name)) as n (from_others, to_others) \
         where from_others > 0 and from_others + to_others > 1",
        &[slot_name::of_collector(process::my_database())
            .as_str()
            .into()],
    )?;
    let columns = rows(
        "select 1::text from braid.column_rule where rule = 'last_update_wins' limit 1",
        &[],
    )?;
    let group = rows(
        "select exists (select from braid.group_self)::text, braid.group_is_behind()::text, \
                exists (select from braid.group_self s join braid.group_member m using (member_id) where m.read_only)::text, \
                exists (select from braid.group_self where join_mode = 'witness')::text, \
                (not exists (select from braid.node where is_local) and not exists (select from braid.subscription) \
                 and not exists (select from braid.ingest_source) \
                 and exists (select from braid.origin o where braid.is_own_origin(o.origin_id, o.node_name, o.number)))::text, \
                (select first_xid::text from braid.node where is_local), \
                exists (select from braid.versioned_table)::text",
        &[],
    )?;
    let text = |index: usize| group.first().and_then(|row| row.get(index)?.as_deref());
    let group = |index: usize| text(index) == Some("true");
    let first_xid = text(5).and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut wanted = Vec::new();
    let mut known = Vec::new();
    let mut retry_in = timers::manager();
    for row in found {
        let text = |index: usize| row.get(index).cloned().flatten().unwrap_or_default();
        let Ok(id) = text(0).parse::<u32>() else {
            continue;
        };
        known.push(id);
        if let Ok(left) = text(6).parse() {
            retry_in = retry_in.min(Duration::from_millis(left));
        }
        if text(2) == "true" {
            wanted.push(Wanted {
                id,
                name: text(1),
                fingerprint: text(3),
                rate_limit: (text(4).parse().unwrap_or(0), text(5).parse().unwrap_or(0)),
            });
        }
    }
    Ok(State {
        wanted,
        known,
        retry_in,
        cleanup: !cleanup.is_empty(),
        values: !values.is_empty(),
        intent: ddl::intent::due_in().map(Duration::from_millis),
        orphans: !orphans.is_empty(),
        several_writers: !several.is_empty(),
        columns: !columns.is_empty(),
        is_member: group(0),
        is_behind_group: group(1),
        is_read_only: group(2),
        is_witness: group(3),
        is_versioned: group(6),
        has_left_origins: group(4),
        first_xid,
    })
}

impl Manager {
    /// The database must not act as a node: have everything end that still runs. Returns how long
    /// to wait.
    fn rest(&mut self, refusal: &PgError, entry: &ManagerEntry) -> Duration {
        if self.refused.as_ref() != Some(&refusal.message) {
            refusal.log("braid manager: nothing runs here");
            self.refused = Some(refusal.message.clone());
        }
        let mut wait = timers::manager();
        self.reap(&[]);
        for led in self.leaders.values_mut() {
            if !led.stopping {
                led.handle.terminate();
                led.stopping = true;
            }
            wait = Duration::from_millis(100);
        }
        self.not_before.clear();
        self.cleanup
            .take_if(|handle| handle.status() == worker::Status::Ended);
        // Next time all is looked at anew.
        self.purge.look_again();
        self.collecting.tend(false, entry, &mut wait);
        self.grouping.tend(false, false, false, &mut wait);
        wait
    }

    /// Starts and stops workers as the catalog wants it. Returns how long to wait.
    fn tend(&mut self, state: &State, entry: &ManagerEntry) -> Duration {
        let State {
            wanted,
            known,
            cleanup,
            values,
            orphans,
            ..
        } = state;
        let mut wait = timers::manager().min(state.retry_in);
        self.refused = None;
        self.collect(state, entry, &mut wait);
        // Statements and sequences in the database of a witness are no affair of the group.
        let shares = state.is_member && !state.is_witness;
        let membership = match (state.is_member, state.is_read_only) {
            (true, true) => registry::READ_ONLY,
            (true, false) if shares => registry::MEMBER,
            _ => registry::NO_MEMBER,
        };
        entry.membership.store(membership, Ordering::Release);
        entry.first_xid.store(state.first_xid, Ordering::Release);
        self.grouping
            .tend(state.is_member, shares, state.is_behind_group, &mut wait);
        self.grouping.tend_versions(state.is_versioned, &mut wait);
        // The group is forgotten, and its tables with it. Otherwise the group worker says so.
        let was_versioned = entry.versioned.load(Ordering::Acquire) == versions::tables::SOME;
        if was_versioned && !state.is_member && !state.is_versioned {
            versions::tables::changed(false);
        }
        self.reap(wanted);
        let reached = entry.members_reached.load(Ordering::Acquire);
        if std::mem::replace(&mut self.members_reached, reached) != reached {
            self.not_before.clear();
        }
        // Announces deletions of losing rows that an applier could not announce, as it was ended or
        // has failed. This is done before others start and with each check of the workers: until
        // then this node lacks a row that others have.
        if let Err(failure) = braid_apply::tell_displacements() {
            failure.log("could not tell other nodes of rows that have left");
        }
        for (id, led) in &mut self.leaders {
            let right = wanted
                .iter()
                .any(|wanted| wanted.id == *id && led.fingerprint == wanted.fingerprint);
            if !right && !led.stopping {
                led.handle.terminate();
                led.stopping = true;
            }
            if led.stopping {
                wait = wait.min(Duration::from_millis(100));
            }
        }
        for wanted in wanted {
            let Some(entry) = registry::take_subscription(wanted.id) else {
                PgError::new(
                    SqlState::ConfigurationLimitExceeded,
                    "too many subscriptions run in this server",
                )
                .with_hint("Increase braid.max_subscriptions and restart the server.")
                .log(&format!("subscription \"{}\"", wanted.name));
                continue;
            };
            entry
                .rate_limit
                .set(wanted.rate_limit.0, wanted.rate_limit.1);
            if self.leaders.contains_key(&wanted.id) {
                // The leader does not watch by itself which tables are to be copied.
                entry.catalog_version.fetch_add(1, Ordering::AcqRel);
                process::set_latch(entry.leader_latch.load(Ordering::Acquire));
                continue;
            }
            let left = self
                .not_before
                .get(&wanted.id)
                .map_or(Duration::ZERO, |at| {
                    at.saturating_duration_since(Instant::now())
                });
            if !left.is_zero() {
                wait = wait.min(left);
                continue;
            }
            match start_leader(wanted) {
                Some(led) => {
                    self.leaders.insert(wanted.id, led);
                }
                None => {
                    entry.set_activity(Activity::Retrying);
                    let error = PgError::new(
                        SqlState::ConfigurationLimitExceeded,
                        "no background worker is free for the leader",
                    )
                    .with_hint("Increase max_worker_processes and restart the server.");
                    entry.set_failure(&error, 0);
                    wait = wait.min(Duration::from_secs(2));
                }
            }
        }
        self.release(wanted, known);
        if state.has_left_origins && self.leaders.is_empty() {
            left_origin::drop_of_no_node();
        }
        self.clean_up(*cleanup, &mut wait);
        self.send_values(*values, &mut wait);
        self.run_intents(state.intent, &mut wait);
        self.look_for_orphans(*orphans, &mut wait);
        self.purge.tend(known, &mut wait);
        wait
    }

    /// Leaders have these options, but for those that were asked to end and have not yet.
    fn heed(&self, alterations: &[(&SubscriptionEntry, u32, u32)]) {
        for (entry, id, count) in alterations {
            let is_it = entry.subscription_id.load(Ordering::Acquire) == *id
                && entry.database.load(Ordering::Acquire) == process::my_database();
            let is_ending = self.leaders.get(id).is_some_and(|led| led.stopping);
            if is_it && !is_ending && entry.is_to_heed() {
                entry.heed(*count);
                process::set_latch(entry.leader_latch.load(Ordering::Acquire));
            }
        }
    }

    /// Take note of leaders that have ended, and when each may start again.
    fn reap(&mut self, wanted: &[Wanted]) {
        let mut ended = Vec::new();
        self.leaders.retain(|id, led| {
            let over = led.handle.status() == worker::Status::Ended;
            if over {
                ended.push((*id, led.started, led.stopping));
            }
            !over
        });
        for (id, started, stopping) in ended {
            let failures = registry::subscription(id).map_or(0, |entry| {
                entry.set_activity(Activity::Stopped);
                entry.failures.load(Ordering::Acquire)
            });
            if stopping {
                self.not_before.remove(&id);
                if let Some(entry) = registry::subscription(id) {
                    entry.clear_failure();
                }
                continue;
            }
            let first = u64::try_from(settings::retry_interval().as_millis()).unwrap_or(1000);
            let most = u64::try_from(settings::retry_interval_max().as_millis()).unwrap_or(60_000);
            let at_once = registry::subscription(id)
                .is_some_and(|entry| entry.at_once.swap(0, Ordering::AcqRel) != 0);
            let pause = if at_once || (failures == 0 && started.elapsed() > SETTLED) {
                0
            } else {
                policy::backoff_ms(failures.max(1), first, most)
            };
            self.not_before
                .insert(id, Instant::now() + Duration::from_millis(pause));
            if wanted.iter().any(|wanted| wanted.id == id)
                && let Some(entry) = registry::subscription(id)
            {
                entry.set_activity(if at_once {
                    Activity::Starting
                } else {
                    Activity::Retrying
                });
            }
        }
    }

    /// Releases the entries of subscriptions that were dropped, and forgets the pauses of those
    /// that do not run.
    fn release(&mut self, wanted: &[Wanted], known: &[u32]) {
        let database = process::my_database();
        for entry in registry::subscriptions() {
            let id = entry.subscription_id.load(Ordering::Acquire);
            if id == 0 || entry.database.load(Ordering::Acquire) != database {
                continue;
            }
            if !known.contains(&id) && !self.leaders.contains_key(&id) {
                registry::release_subscription(entry);
                crash::forget(id);
            } else if !wanted.iter().any(|wanted| wanted.id == id)
                && !self.leaders.contains_key(&id)
            {
                entry.set_activity(Activity::Stopped);
                // If a user enables it again, it starts with a short pause, and without an old
                // error.
                entry.failures.store(0, Ordering::Release);
            }
        }
        self.not_before
            .retain(|id, _| wanted.iter().any(|wanted| wanted.id == *id));
    }

    /// Have local deletions collected, or not any more.
    fn collect(&mut self, state: &State, entry: &ManagerEntry, wait: &mut Duration) {
        let wanted = match settings::remember_deletions() {
            RememberDeletions::Auto => state.several_writers || state.columns,
            RememberDeletions::On => true,
            RememberDeletions::Off => false,
        };
        self.collecting.tend(wanted, entry, wait);
    }

    /// Have a worker of its own drop left-over slots: reaching a provider may take long.
    fn clean_up(&mut self, needed: bool, wait: &mut Duration) {
        if let Some(handle) = &self.cleanup {
            if handle.status() != worker::Status::Ended {
                return;
            }
            self.cleanup = None;
            self.cleanup_not_before = Some(Instant::now() + Duration::from_secs(5));
        }
        // A slot is only free once the leader that used it is gone.
        if !needed || self.leaders.values().any(|led| led.stopping) {
            return;
        }
        if let Some(at) = self.cleanup_not_before {
            let left = at.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                *wait = (*wait).min(left);
                return;
            }
        }
        self.cleanup = worker::start(&worker::Worker {
            name: "braid slot cleanup",
            kind: "braid cleanup",
            function: "braid_cleanup_main",
            argument: process::my_database(),
            extra: worker::Extra::pack(&[]),
        });
    }

    /// Has a worker of its own send the values that rows have got on this node: a table may be
    /// large.
    fn send_values(&mut self, needed: bool, wait: &mut Duration) {
        if let Some(handle) = &self.values {
            if handle.status() != worker::Status::Ended {
                return;
            }
            self.values = None;
            self.values_not_before = Some(Instant::now() + Duration::from_secs(1));
        }
        if !needed {
            self.values_not_before = None;
            return;
        }
        let left = self.values_not_before.map_or(Duration::ZERO, |at| {
            at.saturating_duration_since(Instant::now())
        });
        if !left.is_zero() {
            *wait = (*wait).min(left);
            return;
        }
        self.values = worker::start(&worker::Worker {
            name: "braid own values",
            kind: "braid values",
            function: "braid_values_main",
            argument: process::my_database(),
            extra: worker::Extra::pack(&[]),
        });
        *wait = (*wait).min(Duration::from_secs(1));
    }

    /// Have a worker of its own run the next statement that this node has to run by itself.
    fn run_intents(&mut self, due: Option<Duration>, wait: &mut Duration) {
        if let Some(handle) = &self.intent {
            if handle.status() != worker::Status::Ended {
                return;
            }
            self.intent = None;
            // `due` was read before the end of the process was seen.
            *wait = Duration::ZERO;
            return;
        }
        let Some(left) = due else { return };
        if !left.is_zero() {
            *wait = (*wait).min(left);
            return;
        }
        self.intent = worker::start(&worker::Worker {
            name: "braid intent",
            kind: "braid intent",
            function: "braid_intent_main",
            argument: process::my_database(),
            extra: worker::Extra::pack(&[]),
        });
        if self.intent.is_none() {
            *wait = (*wait).min(Duration::from_secs(2));
        }
    }

    /// Have a worker of its own look for rows whose referenced row is missing: it reads whole
    /// tables, and triggers of users may fire.
    fn look_for_orphans(&mut self, wanted: bool, wait: &mut Duration) {
        let interval = settings::orphan_check_interval().filter(|_| wanted);
        if let Some(handle) = &self.orphans {
            if handle.status() != worker::Status::Ended {
                return;
            }
            self.orphans = None;
            self.orphans_not_before = interval.map(|interval| Instant::now() + interval);
        }
        let Some(interval) = interval else {
            return;
        };
        // A shorter interval counts at once.
        let latest = Instant::now() + interval;
        let at = self.orphans_not_before.map_or(latest, |at| at.min(latest));
        self.orphans_not_before = Some(at);
        let left = at.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            *wait = (*wait).min(left);
            return;
        }
        self.orphans = worker::start(&worker::Worker {
            name: "braid orphans",
            kind: "braid orphans",
            function: "braid_orphans_main",
            argument: process::my_database(),
            extra: worker::Extra::pack(&[]),
        });
        if self.orphans.is_none() {
            self.orphans_not_before = Some(latest);
        }
        *wait = (*wait).min(interval);
    }

    fn stop_all(&mut self) {
        for led in self.leaders.values() {
            led.handle.terminate();
        }
        self.collecting.stop();
        self.grouping.stop();
        for (id, led) in std::mem::take(&mut self.leaders) {
            if !led.handle.wait_ended(Duration::from_secs(10)) {
                pgrx::log!("the leader of subscription {id} is slow to end");
            }
        }
        let database = process::my_database();
        for entry in registry::subscriptions() {
            if entry.subscription_id.load(Ordering::Acquire) != 0
                && entry.database.load(Ordering::Acquire) == database
            {
                registry::release_subscription(entry);
            }
        }
    }
}

fn start_leader(wanted: &Wanted) -> Option<Led> {
    let handle = worker::start(&worker::Worker {
        name: &format!("braid leader of subscription {}", wanted.name),
        kind: "braid leader",
        function: "braid_leader_main",
        argument: process::my_database(),
        extra: worker::Extra::pack(&[u64::from(wanted.id)]),
    })?;
    Some(Led {
        handle,
        started: Instant::now(),
        fingerprint: wanted.fingerprint.clone(),
        stopping: false,
    })
}
