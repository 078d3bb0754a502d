//! The manager process: one for each database that has the extension. It starts and stops the leaders of subscriptions as the
//! catalog says, drops the slots that dropped subscriptions left at providers, has local deletions collected where other nodes may
//! send older changes of the rows, and removes what is too old to be needed.
//!
//! It acts on what is committed, woken by the commit of a change, so nothing takes effect before. A leader that ended is started
//! again after a pause that doubles with each failure in a row; one whose subscription has an error is not.

use braid_bgworker::subscription_option::fingerprint_columns;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_apply::KEEP_MERGED;
use braid_bgworker::{policy, slot_name};
use braid_gir::lsn_text;
use braid_node::registry::{self, Activity, ManagerEntry};
use braid_node::settings::RememberDeletions;
use braid_node::subscription::{execute_counting, rows};
use braid_node::{clock, crash, local_version, owners, settings, standing, tombstone};
use braid_postgres::error::{self, PgError};
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};
use braid_postgres::{latch, process, worker};
use pgrx::pg_sys;

use crate::away::Peers;
use crate::{away, collector, keep_commits, supervisor};

/// The catalog is read again after this, in case a wake-up was lost.
const INTERVAL: Duration = Duration::from_secs(10);
const PURGE_INTERVAL: Duration = Duration::from_secs(60);
/// The same while it is not known how far subscriptions have come: just after they have started.
const PURGE_AGAIN: Duration = Duration::from_secs(5);
/// Batches' row versions, and tombstones, are kept for this long after all subscriptions have come past them: more than clocks are
/// ever apart.
pub(crate) const MARGIN_MICROS: i64 = 3_600_000_000;
/// Pauses (ms) before a collector that has ended, or could not be started, is started again: the first, and the longest. That is shorter than whoever
/// needs it waits (`tombstone::waiting`).
const COLLECTOR_PAUSES: [u64; 2] = [100, 5_000];
/// Conflicts that are removed in one transaction; the statement has the same number.
const PURGE_BATCH: usize = 10_000;
/// Pause between two removals in a row.
const BREATH: Duration = Duration::from_millis(100);
/// A leader that ran this long and ended without an error starts again at once.
const SETTLED: Duration = Duration::from_secs(5);

struct Led {
    handle: worker::Handle,
    started: Instant,
    /// What its catalog row said when it was started; another one asks for a new leader.
    fingerprint: String,
    stopping: bool,
}

#[derive(Default)]
struct Manager {
    leaders: HashMap<u32, Led>,
    not_before: HashMap<u32, Instant>,
    cleanup: Option<worker::Handle>,
    cleanup_not_before: Option<Instant>,
    /// The process that looks for orphans, and when it is started next.
    orphans: Option<worker::Handle>,
    orphans_not_before: Option<Instant>,
    collector: Option<(worker::Handle, Instant)>,
    collector_not_before: Option<Instant>,
    /// How often in a row it has ended soon after its start, or could not be started.
    collector_failures: u32,
    purge_at: Option<Instant>,
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
    let database = u32::try_from(argument.value()).unwrap_or(0);
    worker::connect(database);
    let Some(entry) = registry::manager(database) else {
        pgrx::log!("braid: too many databases");
        return;
    };
    match error::transaction(|| Ok(standing::has_extension())) {
        Ok(true) => {}
        Ok(false) => {
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
    // It looks at the next database now.
    registry::wake_supervisor();
    // SAFETY: the callback only touches shared memory, which outlives the process.
    unsafe {
        let address = std::ptr::from_ref(entry).addr();
        pg_sys::before_shmem_exit(Some(on_exit), pg_sys::Datum::from(address));
    }
    worker::report_activity("watching subscriptions");
    end_left_over_workers(database, entry);
    forget_crashes();
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
        let wait = match error::transaction(look) {
            Ok(Database::Node(state)) => manager.tend(&state, entry),
            Ok(Database::Refused(refusal)) => manager.rest(&refusal, entry),
            Ok(Database::WithoutExtension) => {
                manager.stop_all();
                entry.pid.store(supervisor::NO_EXTENSION, Ordering::SeqCst);
                return;
            }
            Err(failure) => {
                failure.log("braid manager");
                Duration::from_secs(1)
            }
        };
        if entry.poked.load(Ordering::SeqCst) == 0 {
            latch::wait(Some(wait));
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: i32, argument: pg_sys::Datum) {
    // SAFETY: the argument is the address of this manager's entry in the registry.
    let entry = unsafe { &*std::ptr::with_exposed_provenance::<ManagerEntry>(argument.value()) };
    if entry.pid.load(Ordering::SeqCst) == process::my_pid() {
        entry.pid.store(0, Ordering::SeqCst);
    }
    entry.latch.store(0, Ordering::SeqCst);
}

/// What the manager's database is.
enum Database {
    /// The extension was dropped.
    WithoutExtension,
    /// It must not act as the node that its catalog names: nothing of ours runs in it.
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

/// Everything up to this time (microseconds since 1970-01-01 UTC) has arrived: all subscriptions have come further, and all sources of
/// braid.ingest, and nothing older is parked. With none of these, nothing arrives. `None` when that can't be said.
pub(crate) fn arrived(subscriptions: &[u32]) -> Result<Option<i64>, PgError> {
    let mut reached = timestamp::now().saturating_add(EPOCH_DIFFERENCE);
    for id in subscriptions {
        let caught_up = match registry::subscription(*id)
            .map_or(0, |entry| entry.caught_up_at.load(Ordering::Relaxed))
        {
            // Not since the server started.
            0 => away::caught_up_before(*id)?,
            at => Some(at.saturating_add(EPOCH_DIFFERENCE)),
        };
        let Some(caught_up) = caught_up else {
            return Ok(None);
        };
        reached = reached.min(caught_up);
    }
    let sources = rows(
        "select coalesce(floor(extract(epoch from newest_at) * 1000000), 0)::bigint::text from braid.ingest_source \
         where last_at > now() - interval '1 day'",
        &[],
    )?;
    for row in sources {
        // One that has said nothing for longer holds nothing back: a source that was tried once would do so for ever.
        let newest = row.first().cloned().flatten();
        reached = reached.min(newest.and_then(|text| text.parse().ok()).unwrap_or(0));
    }
    // What is parked arrives when it is applied.
    let parked = rows(
        "select floor(extract(epoch from min(committed_at)) * 1000000)::bigint::text from braid.parked_transaction where state <> 'skipped'",
        &[],
    )?;
    let oldest = parked
        .first()
        .and_then(|row| row.first()?.as_ref()?.parse().ok());
    Ok(Some(oldest.map_or(reached, |oldest| reached.min(oldest))))
}

/// The same for all subscriptions that there are.
///
/// # Errors
/// Whatever SPI says.
pub fn arrived_for_all() -> Result<Option<i64>, PgError> {
    let found = rows("select subscription_id::text from braid.subscription", &[])?;
    let ids: Vec<u32> = found
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse().ok())
        .collect();
    Ok(arrived(&ids)?.map(|reached| reached.saturating_sub(MARGIN_MICROS)))
}

/// Forget the row versions of batches, and deletions, that are older than anything that can still arrive, by more than nodes' clocks are
/// ever apart. When to look again, if that is soon.
fn purge_versions(peers: &Peers) -> Result<Option<Duration>, PgError> {
    let Some(reached) = arrived(&peers.awaited)? else {
        return Ok(Some(PURGE_AGAIN));
    };
    let before = reached.saturating_sub(MARGIN_MICROS);
    execute_counting(
        "delete from braid.batch where newest < $1",
        &[before.into()],
    )?;
    // What is still to be decoded has to be told by its version, and so does what is prepared, and may be committed under it this moment.
    execute_counting(
        "delete from braid.local_version where case when xid = 0 then committed_at < $1 else \
         xid < (select least(pg_snapshot_xmin(pg_current_snapshot())::text::bigint, \
         pg_snapshot_xmax(pg_current_snapshot())::text::bigint - coalesce(max(age(catalog_xmin)), 0) - 1000) \
         from pg_replication_slots where database = current_database()) \
         and (committed_at < $1 or braid.commit_timestamp((xid & 4294967295)::text::xid) is null) end",
        &[before.into()],
    )?;
    tombstone::settle()?;
    let forgotten = execute_counting(
        "delete from braid.tombstone where ctid = any (array(select ctid from braid.tombstone where deleted_at < $1 and deleted_at <> 0 limit 10000))",
        &[before.into()],
    )?;
    let copied = execute_counting(
        "delete from braid.copied_version where ctid = any (array(select ctid from braid.copied_version where version_at < case when merged then $2 else $1 end limit 10000))",
        &[before.into(), before.saturating_sub(KEEP_MERGED).into()],
    )?;
    execute_counting(
        "delete from braid.copied_table where newest < $1",
        &[before.into()],
    )?;
    // What is past them all has come, or was left out.
    execute_counting(
        "delete from braid.copied_position c where not exists (select from pg_class r where r.oid = c.relation) \
         or (select bool_and(coalesce(a.applied_lsn, '0/0') >= greatest(c.\"position\", (select max(lsn) from unnest(c.beyond) as lsn), (select max(lsn) from unnest(c.missing) as lsn))) \
             from braid.subscription s left join braid.subscription_activity() a using (subscription_id) where s.provider_id = c.node_id)",
        &[],
    )?;
    let columns = execute_counting(
        "delete from braid.column_write where ctid = any (array(select ctid from braid.column_write where written_at < $1 limit 10000))",
        &[before.into()],
    )?;
    let taken = execute_counting(
        "delete from braid.taken_row where ctid = any (array(select ctid from braid.taken_row where removed_at < $1 and removed_at <> 0 limit 10000))",
        &[before.into()],
    )?;
    let images = execute_counting(
        "delete from braid.deleted_parent where ctid = any (array(select ctid from braid.deleted_parent \
         where written_at < 'epoch'::timestamptz + $1 * interval '1 microsecond' limit 10000))",
        &[before.into()],
    )?;
    let more = [forgotten, copied, columns, taken, images]
        .into_iter()
        .any(|some| some >= PURGE_BATCH);
    let more = more.then_some(BREATH);
    Ok(more.or(peers.again))
}

/// Keep commit timestamps that PostgreSQL may forget before all older changes are here. When to look again.
fn keep_commits(peers: &Peers) -> Duration {
    let kept = error::transaction(|| {
        let sources = rows("select 1::text from braid.ingest_source limit 1", &[])?;
        let reached = arrived(&peers.awaited)?;
        Ok((reached, peers.awaited.is_empty() && sources.is_empty()))
    })
    .and_then(|(reached, nobody)| {
        let before = reached.map(|reached| reached.saturating_sub(MARGIN_MICROS));
        keep_commits::tend(before, nobody)
    });
    match kept {
        Ok(true) => BREATH,
        Ok(false) => PURGE_INTERVAL,
        Err(failure) => {
            failure.log("could not keep commit timestamps");
            PURGE_INTERVAL
        }
    }
}

/// Forget calls of conflict functions whose transaction is applied, and has not asked for them: the row was another one by then.
fn purge_calls(subscriptions: &[u32]) -> Result<(), PgError> {
    for id in subscriptions {
        // What is confirmed does not come again.
        let confirmed = registry::subscription(*id)
            .map_or(0, |entry| entry.flushed_lsn.load(Ordering::Relaxed));
        execute_counting(
            "delete from braid.conflict_call where subscription_id = $1 and commit_lsn < $2::pg_lsn",
            &[i64::from(*id).into(), lsn_text(confirmed).as_str().into()],
        )?;
    }
    Ok(())
}

/// Remove conflicts that are older than they are to be kept. When to look again.
fn purge_conflicts() -> Duration {
    let Some(minutes) = settings::conflict_history_retention_minutes() else {
        return PURGE_INTERVAL;
    };
    let purged = error::transaction(|| {
        let purged = execute_counting(
            "delete from braid.conflict_record where conflict_id in (select conflict_id from braid.conflict_record \
             where recorded_at < now() - make_interval(mins => $1) limit 10000)",
            &[minutes.into()],
        )?;
        execute_counting(
            "delete from braid.conflict_value v where not exists (select from braid.conflict_record c where c.conflict_id = v.conflict_id)",
            &[],
        )?;
        execute_counting(
            "with gone as (delete from braid.parked_transaction where state = 'skipped' and skipped_at < now() - make_interval(mins => $1) \
             returning parked_id) delete from braid.parked_record r using gone where r.parked_id = gone.parked_id",
            &[minutes.into()],
        )?;
        Ok(purged)
    });
    match purged {
        // More is left: go on after a breath.
        Ok(PURGE_BATCH..) => BREATH,
        Ok(_) => PURGE_INTERVAL,
        Err(failure) => {
            failure.log("could not remove old conflicts");
            PURGE_INTERVAL
        }
    }
}

/// Add up what appliers have counted, each by itself. A table that is gone takes its numbers along: its OID may be used again.
fn add_up_conflicts() {
    let done = error::transaction(|| {
        execute_counting(
            "with counted as (delete from braid.conflict_count returning *) \
             insert into braid.conflict_total as t select subscription_name, relation, kind, resolution, winner, sum(conflicts), \
             min(counted_at), max(counted_at) from counted group by subscription_name, relation, kind, resolution, winner \
             on conflict (subscription_name, relation, kind, resolution, winner) do update set \
             conflicts = t.conflicts + excluded.conflicts, first_at = least(t.first_at, excluded.first_at), \
             last_at = greatest(t.last_at, excluded.last_at)",
            &[],
        )?;
        execute_counting(
            "delete from braid.conflict_total t where not exists (select from pg_catalog.pg_class c where c.oid = t.relation)",
            &[],
        )
    });
    if let Err(failure) = done {
        failure.log("could not add up conflicts");
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
            .chain([own.collector_pid.load(Ordering::SeqCst)])
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

/// What the catalog says.
struct State {
    /// Subscriptions that should run.
    wanted: Vec<Wanted>,
    /// All that exist.
    known: Vec<u32>,
    /// When the next one that has stopped is to be tried again; not longer than the manager rests.
    retry_in: Duration,
    /// Slots are to be cleaned up.
    cleanup: bool,
    /// There are rules for foreign keys.
    orphans: bool,
    /// Changes of the same row may come from several nodes.
    several_writers: bool,
    /// It has to be known which columns local sessions write.
    columns: bool,
}

fn read() -> Result<State, PgError> {
    let found = rows(
        &format!(
            "select subscription_id::text, subscription_name::text, (enabled and given_up_at is null and (error_sqlstate is null or coalesce(error_retry_at <= clock_timestamp(), false)))::text, \
         md5(row(subscription_name, connection_id, provider_name, subscription_owner, {})::text), coalesce(rows_per_second, 0)::text, coalesce(bytes_per_second, 0)::text, \
         (case when enabled and given_up_at is null and error_retry_at > clock_timestamp() \
               then ceil(extract(epoch from error_retry_at - clock_timestamp()) * 1000) end)::bigint::text \
         from braid.subscription",
            fingerprint_columns()
        ),
        &[],
    )?;
    let cleanup = rows("select 1::text from braid.slot_cleanup limit 1", &[])?;
    let orphans = rows("select 1::text from braid.foreign_key_rule limit 1", &[])?;
    // Whoever reads changes here may write the same rows, and so may each provider, and each source.
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
    let mut wanted = Vec::new();
    let mut known = Vec::new();
    let mut retry_in = INTERVAL;
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
        orphans: !orphans.is_empty(),
        several_writers: !several.is_empty(),
        columns: !columns.is_empty(),
    })
}

impl Manager {
    /// The database must not act as a node: have everything end that still runs. Returns how long to wait.
    fn rest(&mut self, refusal: &PgError, entry: &ManagerEntry) -> Duration {
        if self.refused.as_ref() != Some(&refusal.message) {
            refusal.log("braid manager: nothing runs here");
            self.refused = Some(refusal.message.clone());
        }
        let mut wait = INTERVAL;
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
        self.purge_at = None;
        self.collect_if(false, entry, &mut wait);
        wait
    }

    /// Bring what runs in line with what is wanted. Returns how long to wait.
    fn tend(&mut self, state: &State, entry: &ManagerEntry) -> Duration {
        let State {
            wanted,
            known,
            cleanup,
            orphans,
            ..
        } = state;
        let mut wait = INTERVAL.min(state.retry_in);
        self.refused = None;
        self.collect(state, entry, &mut wait);
        self.reap(wanted);
        // What an applier did not come to, since it was ended or failed: before others start, and with each look at what runs, since
        // until then this node lacks a row that others have.
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
                PgError::new("53400", "too many subscriptions run in this server")
                    .with_hint("Increase braid.max_subscriptions and restart the server.")
                    .log(&format!("subscription \"{}\"", wanted.name));
                continue;
            };
            entry
                .rate_limit
                .set(wanted.rate_limit.0, wanted.rate_limit.1);
            if self.leaders.contains_key(&wanted.id) {
                // What it does not watch for itself: tables that are to be copied.
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
                    let error =
                        PgError::new("53400", "no background worker is free for the leader")
                            .with_hint("Increase max_worker_processes and restart the server.");
                    entry.set_failure(&error, 0);
                    wait = wait.min(Duration::from_secs(2));
                }
            }
        }
        self.release(wanted, known);
        self.clean_up(*cleanup, &mut wait);
        self.look_for_orphans(*orphans, &mut wait);
        self.purge(known, &mut wait);
        wait
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

    /// Give back the entries of subscriptions that are gone, and forget the pauses of those that do not run.
    fn release(&mut self, wanted: &[Wanted], known: &[u32]) {
        let database = process::my_database();
        for entry in registry::subscriptions() {
            let id = entry.subscription_id.load(Ordering::Acquire);
            if id == 0 || entry.database.load(Ordering::Acquire) != database {
                continue;
            }
            if !known.contains(&id) && !self.leaders.contains_key(&id) {
                registry::release_subscription(entry);
            } else if !wanted.iter().any(|wanted| wanted.id == id)
                && !self.leaders.contains_key(&id)
            {
                entry.set_activity(Activity::Stopped);
                // Whoever lets it run again starts with a short pause, and without an error of the past.
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
        self.collect_if(wanted, entry, wait);
    }

    fn collect_if(&mut self, wanted: bool, entry: &ManagerEntry, wait: &mut Duration) {
        entry.remembers_deletions.store(wanted, Ordering::Release);
        if let Some((handle, started)) = &self.collector {
            if handle.status() != worker::Status::Ended {
                if !wanted {
                    handle.terminate();
                    *wait = (*wait).min(Duration::from_millis(100));
                } else {
                    // Tables may have come, or gone.
                    entry.collector_list_is_old.store(true, Ordering::Release);
                    process::set_latch(entry.collector_latch.load(Ordering::Acquire));
                }
                return;
            }
            if started.elapsed() > SETTLED {
                self.collector_failures = 0;
            }
            self.collector = None;
            self.pause_collector();
        }
        if !wanted {
            self.collector_not_before = None;
            let database = process::my_database();
            if let Err(failure) = error::transaction(|| collector::drop_slot(database)) {
                failure.log("could not drop the slot of the collector of deletions");
            }
            return;
        }
        if let Some(at) = self.collector_not_before {
            let left = at.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                *wait = (*wait).min(left);
                return;
            }
        }
        let started = worker::start(&worker::Worker {
            name: "braid collector of deletions",
            kind: "braid collector",
            function: "braid_collector_main",
            argument: process::my_database(),
            extra: worker::Extra::pack(&[]),
        });
        if let Some(handle) = started {
            self.collector = Some((handle, Instant::now()));
            return;
        }
        PgError::new("53400", "no background worker is free")
            .with_detail("Local deletions are not collected: an older change from another node can bring back a row that was deleted here.")
            .with_hint("Increase max_worker_processes and restart the server.")
            .log("braid collector of deletions");
        *wait = (*wait).min(self.pause_collector());
    }

    /// The collector has ended, or could not be started: how long it is not started again.
    fn pause_collector(&mut self) -> Duration {
        self.collector_failures = self.collector_failures.saturating_add(1);
        let [first, most] = COLLECTOR_PAUSES;
        let pause = Duration::from_millis(policy::backoff_ms(self.collector_failures, first, most));
        self.collector_not_before = Some(Instant::now() + pause);
        pause
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

    /// Have a worker of its own look for rows whose referenced row is missing: it reads whole tables, and triggers of users may fire.
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

    fn purge(&mut self, known: &[u32], wait: &mut Duration) {
        if self.purge_at.is_some_and(|at| at > Instant::now()) {
            return;
        }
        let mut pause = PURGE_INTERVAL;
        let peers = away::peers(known);
        match error::transaction(|| purge_versions(&peers)) {
            Ok(again) => pause = again.unwrap_or(pause),
            Err(failure) => failure.log("could not remove old row versions and deletions"),
        }
        pause = pause.min(keep_commits(&peers));
        if let Err(failure) = error::transaction(|| purge_calls(known)) {
            failure.log("could not remove calls of conflict functions");
        }
        add_up_conflicts();
        pause = pause.min(purge_conflicts());
        self.purge_at = Some(Instant::now() + pause);
        *wait = (*wait).min(pause);
    }

    fn stop_all(&mut self) {
        for led in self.leaders.values() {
            led.handle.terminate();
        }
        if let Some((collector, _)) = self.collector.take() {
            collector.terminate();
            if !collector.wait_ended(Duration::from_secs(10)) {
                pgrx::log!("the collector of deletions is slow to end");
            }
        }
        let dropped = error::transaction(|| collector::drop_slot(process::my_database()));
        if let Err(failure) = dropped {
            failure.log("could not drop the slot of the collector of deletions");
        }
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
