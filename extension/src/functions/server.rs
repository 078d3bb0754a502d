//! Checks what Braid needs of its server, as far as it can be known when a node or a subscription
//! is created.

use braid_bgworker::sql_text::quote_literal;
use braid_node::registry;
use braid_postgres::catalog::query;
use pgrx::PgSqlErrorCode;

use super::failure::{Failure, Outcome};
use super::{in_recovery, local, on_standby};

/// Checks the needs of a node to which peers subscribe.
pub fn check_for_node() -> Outcome<()> {
    let has_setting = |name: &str, wanted: &str| local::setting(name).as_deref() == Some(wanted);
    // Since 19 a server with `replica` raises its level by itself as long as it has a logical slot.
    let raises =
        has_setting("wal_level", "replica") && local::setting("effective_wal_level").is_some();
    if !has_setting("wal_level", "logical") && !raises {
        return Err(Failure::state("wal_level must be logical")
            .hint("Set wal_level = logical in postgresql.conf and restart the server."));
    }
    check_for_subscription()?;
    for (name, what) in [
        ("max_replication_slots", "peers"),
        (
            "max_wal_senders",
            "peers, with some to spare for tables that are copied",
        ),
    ] {
        if local::number_setting(name, 0) == 0 {
            return Err(Failure::state(format!("{name} must be greater than zero"))
                .hint(format!("Set {name} to at least the number of {what} in postgresql.conf and restart the server.")));
        }
    }
    // Only the newest minor releases know this setting. A path does not do: the slot's plugin is
    // compared by name.
    if let Some(listed) = local::setting("output_plugin_libraries")
        .filter(|list| !elements(list).iter().any(|item| item == "braid"))
    {
        return Err(
            Failure::state("output_plugin_libraries does not list braid")
                .detail(
                    "The server refuses replication slots for an output plugin that is not listed.",
                )
                .hint(format!("To allow them, {}", output_plugin_setting(&listed))),
        );
    }
    Ok(())
}

/// Checks the needs of any local work: since the node was created, its server may have been started
/// with other settings.
pub fn check_for_subscription() -> Outcome<()> {
    if in_recovery() {
        return Err(on_standby());
    }
    check_workers_run()?;
    if local::setting("track_commit_timestamp").as_deref() != Some("on") {
        return Err(Failure::state("track_commit_timestamp must be on")
            .detail("Commit timestamps are the versions that conflicts are resolved by.")
            .hint("Set track_commit_timestamp = on in postgresql.conf and restart the server."));
    }
    Ok(())
}

/// Checks the needs of a subscription that prepares transactions.
pub fn check_for_two_phase() -> Outcome<()> {
    if local::number_setting("max_prepared_transactions", 0) > 0 {
        return Ok(());
    }
    Err(
        Failure::state("max_prepared_transactions must be greater than zero for two_phase").hint(
            "Set max_prepared_transactions, here, to what may be prepared at once in postgresql.conf and restart the server, or use two_phase => false.",
        ),
    )
}

/// Checks that the server was started with the library: otherwise no worker ever looks at the
/// catalog.
pub fn check_workers_run() -> Outcome<()> {
    if registry::is_preloaded() {
        return Ok(());
    }
    Err(
        Failure::state("braid must be loaded when the server starts").hint(
            "Add braid to shared_preload_libraries in postgresql.conf and restart the server.",
        ),
    )
}

/// Statements after which slots of the output plugin are allowed, given the present list.
pub fn output_plugin_setting(listed: &str) -> String {
    // SET takes a list in single quotes for one name, with commas in it.
    let present = elements(listed);
    let names = present
        .iter()
        .flat_map(|element| element.split(','))
        .map(str::trim)
        .filter(|name| !name.is_empty() && *name != "braid");
    let literals: Vec<String> = names.chain(["braid"]).map(quote_literal).collect();
    format!(
        "run ALTER SYSTEM SET output_plugin_libraries = {}; SELECT pg_reload_conf();",
        literals.join(", ")
    )
}

/// Elements of a list as settings write it. An element in double quotes may have commas.
fn elements(list: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut quoted = false;
    for character in list.chars() {
        match character {
            '"' => quoted = !quoted,
            ',' if !quoted => found.push(String::new()),
            other => {
                if let Some(last) = found.last_mut() {
                    last.push(other);
                }
            }
        }
    }
    found
        .into_iter()
        .map(|element| element.trim().to_owned())
        .collect()
}

/// The facts that decide how many processes a subscription has.
pub struct Workers {
    /// The subscription has one applier.
    pub is_serial: bool,
    /// Tables are copied first.
    pub copy_data: bool,
}

/// Checks that one more subscription fits into this server's limits; its workers too, if it is to
/// start now.
pub fn check_room(workers: Option<Workers>) -> Outcome<()> {
    let counts = query(
        "select count(*), count(*) filter (where s.enabled), count(*) filter (where s.enabled and s.apply_mode = 'serial'), \
                (select count(*) from pg_subscription), (select count(*) from braid.ingest_source) + (select count(*) from pg_replication_slots \
                   where plugin = 'braid' and database = current_database() and slot_name !~ '^braid_deletions_') from braid.subscription s",
        &[],
    );
    let count = |column| {
        counts
            .get(0, column)
            .and_then(|text| text.parse::<i64>().ok())
            .unwrap_or(0)
    };
    let subscriptions = count(0).saturating_add(1);
    if subscriptions > local::number_setting("braid.max_subscriptions", 64) {
        return Err(full(
            "this node has no room for another subscription",
            "braid.max_subscriptions",
            subscriptions,
        ));
    }
    // Each applier has a replication origin of its own in use. Before version 18,
    // max_replication_slots limits these.
    let appliers = local::number_setting("braid.appliers_per_subscription", 2);
    let origins = subscriptions
        .saturating_mul(appliers)
        .saturating_add(count(3));
    let slots = local::number_setting("max_replication_slots", 0);
    let (setting, limit) = match local::number_setting("max_active_replication_origins", -1) {
        -1 => ("max_replication_slots", slots),
        limit => ("max_active_replication_origins", limit),
    };
    if origins > limit {
        return Err(full(
            "not enough replication origins for another subscription",
            setting,
            origins,
        ));
    }
    let Some(workers) = workers else {
        return Ok(());
    };
    let group = |serial: bool| 1 + if serial { 1 } else { appliers };
    let (enabled, serial) = (count(1), count(2));
    // The launcher of native logical replication is one of the server's worker processes, as are
    // the supervisor and the manager.
    let launcher = i64::from(local::number_setting("max_logical_replication_workers", 0) > 0);
    let elsewhere = i64::try_from(registry::workers_elsewhere()).unwrap_or(0);
    // Where several nodes write, deletions are collected.
    let collector = i64::from(subscriptions.saturating_add(count(4)) > 1);
    let needed = launcher
        + 2
        + collector
        + elsewhere
        + serial * group(true)
        + (enabled - serial) * group(false)
        + group(workers.is_serial)
        + i64::from(workers.copy_data);
    if needed > local::number_setting("max_worker_processes", 8) {
        return Err(full(
            "not enough worker processes for another subscription",
            "max_worker_processes",
            needed,
        )
        .detail(
            "Besides a supervisor, a manager and, where several nodes write, a collector of deletions, each subscription needs a leader, its \
             appliers, and one to copy tables with.",
        ));
    }
    Ok(())
}

fn full(message: &str, setting: &str, needed: i64) -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
        message,
    )
    .hint(format!(
        "Set {setting} to at least {needed} in postgresql.conf and restart the server."
    ))
}
