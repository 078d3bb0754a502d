//! Removes records that are not needed any more: row versions, deletions and images that are older
//! than any change that may still arrive, old conflicts, calls of conflict functions. Run by the
//! manager. Other processes ask this module what has arrived.
//!
//! A round that removes nothing writes no WAL: no statement takes a transaction id in advance.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_apply::KEEP_MERGED;
use braid_gir::lsn_text;
use braid_node::settings::timers;
use braid_node::subscription::{execute_lazily, rows};
use braid_node::{crash, left_origin, registry, settings, tombstone};
use braid_postgres::error::{self, PgError};
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};

use crate::away::Peers;
use crate::{away, keep_commits};

/// Batches' row versions, and tombstones, are kept for this long after all subscriptions have come
/// past them: more than clocks are ever apart.
pub(crate) const MARGIN_MICROS: i64 = 3_600_000_000;
/// Conflicts that are removed in one transaction; the statement has the same number.
const PURGE_BATCH: usize = 10_000;
/// Pause between two removals in a row.
const BREATH: Duration = Duration::from_millis(100);

/// When the manager removes old records.
#[derive(Debug, Default)]
pub(crate) struct Purge {
    at: Option<Instant>,
}

impl Purge {
    /// Has the next turn remove old records.
    pub(crate) fn look_again(&mut self) {
        self.at = None;
    }

    /// Removes old records, if it is time to; `known` are all subscriptions. Shortens the manager's
    /// rest.
    pub(crate) fn tend(&mut self, known: &[u32], wait: &mut Duration) {
        if self.at.is_some_and(|at| at > Instant::now()) {
            return;
        }
        let mut pause = timers::purge();
        let peers = away::peers(known);
        match error::transaction(|| purge_versions(&peers)) {
            Ok(again) => pause = again.unwrap_or(pause),
            Err(failure) => failure.log("could not remove old row versions and deletions"),
        }
        pause = pause.min(keep_commits(&peers));
        if let Err(failure) = error::transaction(|| purge_calls(known)) {
            failure.log("could not remove calls of conflict functions");
        }
        left_origin::sweep();
        crash::forget_others(known);
        add_up_conflicts();
        pause = pause.min(purge_conflicts());
        self.at = Some(Instant::now() + pause);
        *wait = (*wait).min(pause);
    }
}

/// Everything up to this time (microseconds since 1970-01-01 UTC) has arrived: all subscriptions
/// have come further, and all sources of braid.ingest, and nothing older is parked. With none of
/// these, nothing arrives. `None` when that can't be said.
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
        // A source without new records for longer than that holds nothing back: otherwise a source
        // that was tried once would do so for ever.
        let newest = row.first().cloned().flatten();
        reached = reached.min(newest.and_then(|text| text.parse().ok()).unwrap_or(0));
    }
    // A parked transaction has arrived only when it is applied.
    let parked = rows(
        "select floor(extract(epoch from min(committed_at)) * 1000000)::bigint::text from braid.parked_transaction where state <> 'skipped'",
        &[],
    )?;
    let oldest = parked
        .first()
        .and_then(|row| row.first()?.as_ref()?.parse().ok());
    Ok(Some(oldest.map_or(reached, |oldest| reached.min(oldest))))
}

/// Returns the time up to which changes of all subscriptions have arrived, minus a margin.
///
/// # Errors
/// Those of SPI.
pub fn arrived_for_all() -> Result<Option<i64>, PgError> {
    let found = rows("select subscription_id::text from braid.subscription", &[])?;
    let ids: Vec<u32> = found
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse().ok())
        .collect();
    Ok(arrived(&ids)?.map(|reached| reached.saturating_sub(MARGIN_MICROS)))
}

/// Forget the row versions of batches, and deletions, that are older than anything that can still
/// arrive, by more than nodes' clocks are ever apart. When to look again, if that is soon.
fn purge_versions(peers: &Peers) -> Result<Option<Duration>, PgError> {
    let Some(reached) = arrived(&peers.awaited)? else {
        // How far subscriptions have arrived is not known yet: they have just started.
        return Ok(Some(timers::purge_again()));
    };
    let before = reached.saturating_sub(MARGIN_MICROS);
    if let Some(entry) = registry::my_manager() {
        entry.arrived_before.store(before, Ordering::Release);
    }
    execute_lazily(
        "delete from braid.batch where newest < $1",
        &[before.into()],
    );
    // Versions that logical decoding still needs stay. So do those of prepared transactions: they
    // may commit at any moment.
    execute_lazily(
        "delete from braid.local_version where case when xid = 0 then committed_at < $1 else \
         xid < (select least(pg_snapshot_xmin(pg_current_snapshot())::text::bigint, \
         pg_snapshot_xmax(pg_current_snapshot())::text::bigint - coalesce(max(age(catalog_xmin)), 0) - 1000) \
         from pg_replication_slots where database = current_database()) \
         and (committed_at < $1 or braid.commit_timestamp((xid & 4294967295)::text::xid) is null) end",
        &[before.into()],
    );
    tombstone::settle();
    let forgotten = execute_lazily(
        "delete from braid.tombstone where ctid = any (array(select ctid from braid.tombstone where deleted_at < $1 and deleted_at <> 0 limit 10000))",
        &[before.into()],
    );
    let copied = execute_lazily(
        "delete from braid.copied_version where ctid = any (array(select ctid from braid.copied_version where version_at < case when merged then $2 else $1 end limit 10000))",
        &[before.into(), before.saturating_sub(KEEP_MERGED).into()],
    );
    execute_lazily(
        "delete from braid.rewrite where newest < $1",
        &[before.into()],
    );
    execute_lazily(
        "delete from braid.copied_table where newest < $1",
        &[before.into()],
    );
    // If all streams are past a copied position, all changes have arrived, or were left out.
    execute_lazily(
        "delete from braid.copied_position c where not exists (select from pg_class r where r.oid = c.relation) \
         or (select bool_and(coalesce(a.applied_lsn, '0/0') >= greatest(c.\"position\", (select max(lsn) from unnest(c.beyond) as lsn), (select max(lsn) from unnest(c.missing) as lsn))) \
             from braid.subscription s left join braid.subscription_activity() a using (subscription_id) where s.provider_id = c.node_id)",
        &[],
    );
    let columns = execute_lazily(
        "delete from braid.column_write where ctid = any (array(select ctid from braid.column_write where written_at < $1 limit 10000))",
        &[before.into()],
    );
    let taken = execute_lazily(
        "delete from braid.taken_row where ctid = any (array(select ctid from braid.taken_row where removed_at < $1 and removed_at <> 0 limit 10000))",
        &[before.into()],
    );
    let images = execute_lazily(
        "delete from braid.deleted_parent where ctid = any (array(select ctid from braid.deleted_parent \
         where written_at < 'epoch'::timestamptz + $1 * interval '1 microsecond' limit 10000))",
        &[before.into()],
    );
    let more = [forgotten, copied, columns, taken, images]
        .into_iter()
        .any(|some| some >= PURGE_BATCH);
    let more = more.then_some(BREATH);
    Ok(more.or(peers.again))
}

/// Keeps commit timestamps that PostgreSQL may forget before all older changes have arrived.
/// Returns the time until the next look.
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
        Ok(false) => timers::purge(),
        Err(failure) => {
            failure.log("could not keep commit timestamps");
            timers::purge()
        }
    }
}

/// Forget calls of conflict functions whose transaction is applied, and has not asked for them: the
/// row was another one by then.
fn purge_calls(subscriptions: &[u32]) -> Result<(), PgError> {
    for id in subscriptions {
        // Confirmed changes are not received again.
        let confirmed = registry::subscription(*id)
            .map_or(0, |entry| entry.flushed_lsn.load(Ordering::Relaxed));
        execute_lazily(
            "delete from braid.conflict_call where subscription_id = $1 and commit_lsn < $2::pg_lsn",
            &[i64::from(*id).into(), lsn_text(confirmed).as_str().into()],
        );
    }
    Ok(())
}

/// Remove conflicts that are older than they are to be kept. When to look again.
fn purge_conflicts() -> Duration {
    let Some(minutes) = settings::conflict_history_retention_minutes() else {
        return timers::purge();
    };
    let purged = error::transaction(|| {
        let purged = execute_lazily(
            "delete from braid.conflict_record where conflict_id in (select conflict_id from braid.conflict_record \
             where recorded_at < now() - make_interval(mins => $1) limit 10000)",
            &[minutes.into()],
        );
        execute_lazily(
            "delete from braid.conflict_value v where not exists (select from braid.conflict_record c where c.conflict_id = v.conflict_id)",
            &[],
        );
        execute_lazily(
            "with gone as (delete from braid.parked_transaction where state = 'skipped' and skipped_at < now() - make_interval(mins => $1) \
             returning parked_id) delete from braid.parked_record r using gone where r.parked_id = gone.parked_id",
            &[minutes.into()],
        );
        execute_lazily(
            "with old as (delete from braid.ddl_entry e where recorded_at < now() - make_interval(mins => $1) \
             and not (state in ('waiting', 'running', 'failed') and exists (select from braid.ddl_intent i where i.ddl_id = e.ddl_id)) returning ddl_id) \
             delete from braid.ddl_intent i using old where i.ddl_id = old.ddl_id",
            &[minutes.into()],
        );
        Ok(purged)
    });
    match purged {
        // More is left: go on after a breath.
        Ok(PURGE_BATCH..) => BREATH,
        Ok(_) => timers::purge(),
        Err(failure) => {
            failure.log("could not remove old conflicts");
            timers::purge()
        }
    }
}

/// Adds up the counts of conflicts of all appliers. The numbers of a dropped table are removed: its
/// OID may be used again.
fn add_up_conflicts() {
    let done = error::transaction(|| {
        execute_lazily(
            "with counted as (delete from braid.conflict_count returning *) \
             insert into braid.conflict_total as t select subscription_name, relation, kind, resolution, winner, sum(conflicts), \
             min(counted_at), max(counted_at) from counted group by subscription_name, relation, kind, resolution, winner \
             on conflict (subscription_name, relation, kind, resolution, winner) do update set \
             conflicts = t.conflicts + excluded.conflicts, first_at = least(t.first_at, excluded.first_at), \
             last_at = greatest(t.last_at, excluded.last_at)",
            &[],
        );
        Ok(execute_lazily(
            "delete from braid.conflict_total t where not exists (select from pg_catalog.pg_class c where c.oid = t.relation)",
            &[],
        ))
    });
    if let Err(failure) = done {
        failure.log("could not add up conflicts");
    }
}
