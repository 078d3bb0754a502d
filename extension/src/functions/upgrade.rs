//! Moving a node to another server by `pg_upgrade`: prepare_upgrade, which is made of three of
//! these functions, and finish_upgrade.

use braid_gir::{lsn_text, parse_lsn};
use braid_postgres::catalog::{flush_all, query};
use braid_postgres::error::PgError;
use braid_workers::upgrade::{self, Remade};
use pgrx::datum::Interval;
use pgrx::pg_extern;

use super::failure::{Failure, Outcome, notice};
use super::waiting::{Progress, wait_until};
use super::{local, required, run, server, wake_manager};

/// This node's slots that peers read.
const PEERS_SLOTS: &str = "plugin = 'braid' and database = current_database() and not temporary and slot_name !~ '^braid_deletions_'";

/// braid.await_peers(timeout interval) returns pg_lsn
#[pg_extern(sql = false)]
fn await_peers(timeout: Option<Interval>) -> i64 {
    run(|| {
        local::require_node()?;
        server::check_workers_run()?;
        // Something behind all that was written, for peers to receive.
        query(
            "select pg_logical_emit_message(false, 'braid.prepare_upgrade', '')",
            &[],
        );
        let end = flush_all();
        let position = lsn_text(end);
        wait_until(timeout, "peers and the collector of deletions", || {
            let behind = local::column(&query(
                &format!(
                    "select slot_name from pg_replication_slots where {PEERS_SLOTS} and confirmed_flush_lsn < $1::pg_lsn order by 1"
                ),
                &[Some(&position)],
            ));
            Ok(if !behind.is_empty() {
                Progress::Waiting(format!(
                    "These slots are not confirmed up to {position}: {}. A peer that is away has to come back, or its slot has to be dropped.",
                    behind.join(", ")
                ))
            } else if !upgrade::is_collected(end) {
                Progress::Waiting(format!("Deletions are not collected up to {position}."))
            } else {
                Progress::Reached
            })
        })?;
        Ok(end.cast_signed())
    })
}

/// braid.begin_upgrade(from_lsn pg_lsn)
#[pg_extern(sql = false)]
fn begin_upgrade(from_lsn: Option<i64>) {
    run(|| {
        let from = lsn_text(required(from_lsn, "from_lsn")?.cast_unsigned());
        local::check_node(local::lock_node())?;
        forget();
        query(
            "insert into braid.upgrade (system_identifier, from_lsn) \
             select system_identifier, $1::pg_lsn from braid.node where is_local",
            &[Some(&from)],
        );
        wake_manager();
        Ok(())
    });
}

/// braid.record_upgrade(timeout interval)
#[pg_extern(sql = false)]
fn record_upgrade(timeout: Option<Interval>) {
    run(|| {
        let begun = query(
            "select 1 from braid.upgrade u, braid.node n where u.to_lsn is null and u.prepared_at is null \
             and n.is_local and n.system_identifier = (select c.system_identifier::text from pg_control_system() c) for update",
            &[],
        );
        if begun.is_empty() {
            return Err(Failure::state("no upgrade of this node has begun")
                .hint("Run call braid.prepare_upgrade()."));
        }
        wait_until(timeout, "this node's workers to end", || {
            Ok(match upgrade::still_running() {
                None => Progress::Reached,
                Some(missing) => Progress::Waiting(format!(
                    "{missing} Call braid.prepare_upgrade again after braid.finish_upgrade()."
                )),
            })
        })?;
        query(
            "insert into braid.upgrade_origin select o.origin_id, coalesce(p.remote_lsn, '0/0') \
             from braid.origin o left join pg_replication_origin_status p on p.local_id = o.origin_id \
             where braid.is_own_origin(o.origin_id, o.node_name, o.number)",
            &[],
        );
        query(
            &format!(
                "insert into braid.upgrade_slot select slot_name, two_phase, coalesce((to_jsonb(s) ->> 'failover')::boolean, false) \
                 from pg_replication_slots s where {PEERS_SLOTS}"
            ),
            &[],
        );
        query(
            "insert into braid.upgrade_function select distinct p.oid, p.oid::regprocedure::text \
             from braid.conflict_rule r join pg_proc p on p.oid = r.function_id",
            &[],
        );
        // The control file says from where on PostgreSQL has commit timestamps; a young server's
        // does not before its first checkpoint.
        query("checkpoint", &[]);
        raised(upgrade::arrived_for_all().and_then(upgrade::keep_commits));
        query(
            "update braid.upgrade set prepared_at = clock_timestamp() where to_lsn is null",
            &[],
        );
        Ok(())
    });
}

/// braid.finish_upgrade()
#[pg_extern(sql = false)]
fn finish_upgrade() {
    run(|| {
        // A slot is only made in a transaction that has written nothing.
        query("lock table braid.node in share row exclusive mode", &[]);
        let Some(node) = local::find_node() else {
            return local::check_node(None).map(|_| ());
        };
        let found = query(
            "select u.prepared_at is not null, u.system_identifier = (select c.system_identifier::text from pg_control_system() c), \
                    n.database_oid = (select d.oid from pg_database d where d.datname = current_database()) \
               from braid.upgrade u, braid.node n where u.to_lsn is null and n.is_local",
            &[],
        );
        let is = |column| found.get(0, column) == Some("t");
        if found.is_empty() {
            if node.identity_valid {
                return Err(Failure::state(format!(
                    "no upgrade of node \"{}\" is under way",
                    node.name
                ))
                .hint(
                    "Nothing is to be done. Before pg_upgrade, run call braid.prepare_upgrade().",
                ));
            }
            return local::check_node(Some(node)).map(|_| ());
        }
        if is(1) && is(2) {
            forget();
            notice(format!(
                "node \"{}\" goes on in the server that it was prepared in",
                node.name
            ));
            wake_manager();
            return Ok(());
        }
        if !is(0) || !is(2) {
            return local::check_node(Some(node)).map(|_| ());
        }
        server::check_for_node()?;
        let to = remake_slots()?;
        remake_origins()?;
        remake_functions()?;
        query(
            "update braid.node set system_identifier = (select c.system_identifier::text from pg_control_system() c) where is_local",
            &[],
        );
        query(
            "update braid.upgrade set to_lsn = $1::pg_lsn where to_lsn is null",
            &[Some(&to)],
        );
        for table in ["upgrade_origin", "upgrade_slot", "upgrade_function"] {
            query(&format!("delete from braid.{table}"), &[]);
        }
        wake_manager();
        Ok(())
    });
}

/// Nothing is under way any more.
fn forget() {
    query("delete from braid.upgrade where to_lsn is null", &[]);
    for table in ["upgrade_origin", "upgrade_slot", "upgrade_function"] {
        query(&format!("delete from braid.{table}"), &[]);
    }
}

/// Make peers' slots that were not carried along. Returns a position that none of them begins
/// after.
fn remake_slots() -> Outcome<String> {
    let wanted = query(
        "select w.slot_name, w.two_phase, w.failover from braid.upgrade_slot w \
         where not exists (select from pg_replication_slots s where s.slot_name = w.slot_name) order by 1",
        &[],
    );
    let free = local::number_setting("max_replication_slots", 0);
    let used = query("select count(*) from pg_replication_slots", &[]);
    let used: i64 = used
        .get(0, 0)
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    let count = i64::try_from(wanted.len()).unwrap_or(i64::MAX);
    if used.saturating_add(count) > free {
        return Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            format!("there is no room for the slots of {count} peers"),
        )
        .hint(format!(
            "Set max_replication_slots to at least {} in postgresql.conf and restart the server.",
            used.saturating_add(count)
        )));
    }
    for row in wanted.iter() {
        let text = |column: usize| row.get(column).and_then(Option::as_deref);
        let failover = if text(2) == Some("t") {
            ", failover => true"
        } else {
            ""
        };
        query(
            &format!(
                "select pg_create_logical_replication_slot($1::name, 'braid', temporary => false, twophase => $2::boolean{failover})"
            ),
            &[text(0), text(1)],
        );
    }
    let end = query(
        "select greatest(pg_current_wal_insert_lsn(), (select max(s.confirmed_flush_lsn) from braid.upgrade_slot w join pg_replication_slots s using (slot_name)))",
        &[],
    );
    Ok(end.get(0, 0).unwrap_or("0/0").to_owned())
}

fn remake_origins() -> Outcome<()> {
    let wanted = query(
        "select o.origin_id, o.node_name, o.number, coalesce(u.\"position\", '0/0') \
           from braid.origin o join braid.upgrade_origin u using (origin_id) order by 1",
        &[],
    );
    for row in wanted.iter() {
        let text = |column: usize| {
            row.get(column)
                .and_then(Option::as_deref)
                .unwrap_or_default()
        };
        let position = parse_lsn(text(3)).unwrap_or(0);
        let id = text(0).parse().unwrap_or(0);
        if raised(upgrade::remake_origin(id, text(1), text(2), position)) == Remade::Yes {
            continue;
        }
        let taken = query(
            "select roname from pg_replication_origin where roident = $1::oid",
            &[Some(text(0))],
        );
        return Err(Failure::duplicate(format!(
            "replication origin number {} is in use as \"{}\"",
            text(0),
            taken.get(0, 0).unwrap_or_default()
        ))
        .detail(format!("Rows here know node \"{}\" by this number.", text(1)))
        .hint("Drop the native subscription or the origin that has the number, run braid.finish_upgrade(), and create it again."));
    }
    Ok(())
}

/// Rules refer to functions by number, and these have new ones.
fn remake_functions() -> Outcome<()> {
    let missing = query(
        "select signature from braid.upgrade_function where to_regprocedure(signature) is null",
        &[],
    );
    if let Some(signature) = missing.get(0, 0) {
        return Err(Failure::undefined(format!(
            "function {signature}, which decides about conflicts, is not in this server"
        ))
        .hint("Create it as it was, and run braid.finish_upgrade() again."));
    }
    // One statement: a new number may be the old one of another function.
    query(
        "update braid.conflict_rule r set function_id = to_regprocedure(u.signature)::oid \
           from braid.upgrade_function u where u.function_id = r.function_id",
        &[],
    );
    Ok(())
}

fn raised<T>(outcome: Result<T, PgError>) -> T {
    match outcome {
        Ok(value) => value,
        Err(error) => error.raise(),
    }
}
