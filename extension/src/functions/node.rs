//! Creating and dropping nodes.

use std::ffi::CStr;

use braid_bgworker::slot_name;
use braid_node::{connection_string, secrecy};
use braid_postgres::catalog::query;
use braid_postgres::encoding::Text;
use braid_postgres::libpq;
use pgrx::pg_extern;

use super::failure::{Failure, Outcome, notice};
use super::subscription::tie_owners;
use super::{local, required, required_name, run, server, text, wake_manager};

/// braid.create_node(node_name name, dsn text)
#[pg_extern(sql = false)]
fn create_node(node_name: Option<&CStr>, dsn: Option<Text>) {
    secrecy::note_call();
    run(|| {
        create(
            &required_name(node_name, "node_name")?,
            &required(text(dsn), "dsn")?,
        )
    });
}

/// braid.drop_node(node_name name)
#[pg_extern(sql = false)]
fn drop_node(node_name: Option<&CStr>) {
    run(|| drop(&required_name(node_name, "node_name")?));
}

/// Makes this database a node.
pub fn create(name: &str, dsn: &str) -> Outcome<()> {
    check_name(name, "node")?;
    libpq::check_connection_string(dsn).map_err(|error| Failure::malformed_dsn(&error))?;
    server::check_for_node()?;
    // One at a time: two sessions that both find no local node would conflict in the unique index,
    // with a less helpful error.
    query("lock table braid.node in share row exclusive mode", &[]);
    if let Some(node) = local::find_node() {
        return Err(
            Failure::duplicate(format!("this database already is node \"{}\"", node.name)).hint(
                format!(
                    "To give it another name, run braid.drop_node('{}') first.",
                    node.name
                ),
            ),
        );
    }
    let peers = query(
        "select 1 from braid.node where node_name = $1::name",
        &[Some(name)],
    );
    if !peers.is_empty() {
        return Err(
            Failure::duplicate(format!("a peer is known here as node \"{name}\""))
                .hint("Choose a name that no other node has."),
        );
    }
    let connection = connection_string::store(dsn)?;
    query(
        "insert into braid.node (node_name, node_id, is_local, connection_id, system_identifier, database_oid, first_xid) \
         select $1::name, gen_random_uuid(), true, $2::bigint, c.system_identifier::text, d.oid, \
                case when not exists (select from braid.origin) then pg_current_xact_id()::text::bigint end \
           from pg_control_system() c, pg_database d where d.datname = current_database()",
        &[Some(name), Some(&connection)],
    );
    wake_manager();
    Ok(())
}

/// A name of a node or a subscription: it becomes part of replication origins' names, where '/'
/// separates, and of messages.
pub fn check_name(name: &str, what: &str) -> Outcome<()> {
    let hint = "Choose a name without slashes and control characters.";
    if name.is_empty() {
        return Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_INVALID_NAME,
            format!("{what} name must not be empty"),
        )
        .hint(hint));
    }
    if name
        .chars()
        .any(|letter| letter == '/' || letter.is_control())
    {
        return Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_INVALID_NAME,
            format!("{what} name contains a character that is not allowed"),
        )
        .hint(hint));
    }
    Ok(())
}

fn drop(name: &str) -> Outcome<()> {
    let local = local::lock_node();
    match local.filter(|node| node.name == name) {
        Some(node) if node.identity_valid => drop_local(name),
        Some(_) => {
            drop_copy(name);
            Ok(())
        }
        None => drop_peer(name),
    }
}

fn drop_local(name: &str) -> Outcome<()> {
    let subscriptions = local::column(&query(
        "select subscription_name from braid.subscription order by 1",
        &[],
    ));
    if !subscriptions.is_empty() {
        return Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
            format!("node \"{name}\" still has subscriptions"),
        )
        .detail(format!("Subscriptions: {}.", subscriptions.join(", ")))
        .hint("Drop them first, each with braid.drop_subscription(subscription_name)."));
    }
    let group = query("select group_name from braid.group_self", &[]);
    if let Some(group) = group.get(0, 0) {
        return Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
            format!("node \"{name}\" is a member of group \"{group}\""),
        )
        .hint("Leave the group first, with braid.leave_group()."));
    }
    query("delete from braid.node", &[]);
    connection_string::forget_unused();
    warn_of_slots(&slots(), "slots of other nodes hold back WAL here until");
    forget_upgrades();
    wake_manager();
    Ok(())
}

/// A replication slot of this database that another node reads.
struct Slot {
    name: String,
    /// WAL that it holds back, for people.
    held: String,
}

/// The slots of this database that other nodes' subscriptions read, or have left.
fn slots() -> Vec<Slot> {
    let found = query(
        "select slot_name, coalesce(pg_size_pretty(pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end, restart_lsn)), 'no') \
           from pg_replication_slots where plugin = 'braid' and database = current_database() and not temporary \
            and not starts_with(slot_name, 'braid_deletions_') order by 1",
        &[],
    );
    let slot = |row: &[Option<String>]| {
        Some(Slot {
            name: row.first()?.clone()?,
            held: row.get(1)?.clone()?,
        })
    };
    found.iter().filter_map(slot).collect()
}

/// The slots that subscriptions of a peer read: those whose names begin with its name, but not with
/// a longer name of another peer.
fn slots_of(peer: &str) -> Vec<Slot> {
    let own = slot_name::prefix_of(peer);
    let others: Vec<String> = local::column(&query("select node_name from braid.node", &[]))
        .iter()
        .filter(|name| *name != peer)
        .map(|name| slot_name::prefix_of(name))
        .filter(|prefix| prefix.len() > own.len())
        .collect();
    let mut slots = slots();
    slots.retain(|slot| {
        slot.name.starts_with(&own) && !others.iter().any(|prefix| slot.name.starts_with(prefix))
    });
    slots
}

/// Says that slots stay, and hold back WAL.
fn warn_of_slots(slots: &[Slot], message: &str) {
    let Some(first) = slots.first() else {
        return;
    };
    let listed: Vec<String> = slots
        .iter()
        .map(|slot| format!("\"{}\" ({} of WAL)", slot.name, slot.held))
        .collect();
    Failure::new(
        pgrx::PgSqlErrorCode::ERRCODE_WARNING,
        format!("{message} they are dropped: {}", listed.join(", ")),
    )
    .hint(format!(
        "A node that still is there drops its slot with braid.drop_subscription. For one that does not come back, run select pg_drop_replication_slot('{}') here.",
        first.name
    ))
    .warn();
}

fn forget_upgrades() {
    for table in [
        "upgrade",
        "upgrade_origin",
        "upgrade_slot",
        "upgrade_function",
    ] {
        query(&format!("delete from braid.{table}"), &[]);
    }
}

/// In another server than the node's, the numbers of its origins are unused, or belong to others.
/// Then rows of Braid's tables that refer to these numbers are removed too. In the node's own
/// server the numbers still say which node wrote the rows that were copied.
fn forget_origins() {
    let gone = query(
        "delete from braid.origin o where not exists (select from pg_replication_origin r \
         where r.roident = o.origin_id and starts_with(r.roname, 'braid/' || o.node_name || '/')) returning 1",
        &[],
    );
    if gone.is_empty() {
        return;
    }
    for table in ["tombstone", "column_write", "copied_version"] {
        query(
            &format!(
                "delete from braid.{table} t where t.origin_id <> 0 and not exists (select from braid.origin o where o.origin_id = t.origin_id)"
            ),
            &[],
        );
    }
    for table in ["taken_row", "kept_commit", "batch"] {
        query(&format!("delete from braid.{table}"), &[]);
    }
}

/// The node is a copy of another: its subscriptions' slots belong to the original and stay.
fn drop_copy(name: &str) {
    let dropped = local::column(&query(
        "delete from braid.subscription returning subscription_name",
        &[],
    ));
    query("delete from braid.missing_column", &[]);
    query("delete from braid.slot_cleanup", &[]);
    query("delete from braid.node", &[]);
    if let Err(failure) = tie_owners() {
        failure.warn();
    }
    connection_string::forget_unused();
    forget_upgrades();
    forget_origins();
    if !dropped.is_empty() {
        notice(format!(
            "subscriptions that were copied from node \"{name}\" are dropped too: {}",
            dropped.join(", ")
        ));
    }
    wake_manager();
}

fn drop_peer(name: &str) -> Outcome<()> {
    let used = local::column(&query(
        "select subscription_name from braid.subscription where provider_name = $1::name order by 1",
        &[Some(name)],
    ));
    if !used.is_empty() {
        return Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
            format!("node \"{name}\" is in use by subscriptions"),
        )
        .detail(format!("Subscriptions: {}.", used.join(", ")))
        .hint("Drop them first, each with braid.drop_subscription(subscription_name)."));
    }
    let deleted = query(
        "delete from braid.node where node_name = $1::name returning 1",
        &[Some(name)],
    );
    if deleted.is_empty() {
        return Err(
            Failure::undefined(format!("node \"{name}\" does not exist"))
                .hint("The view braid.nodes lists the nodes that are known here."),
        );
    }
    connection_string::forget_unused();
    let message = format!("slots of node \"{name}\" hold back WAL here until");
    warn_of_slots(&slots_of(name), &message);
    Ok(())
}
