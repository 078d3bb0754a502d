//! leave_group, abort_join, remove_node and forget_group.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use braid_bgworker::hex;
use braid_bgworker::slot_name;
use braid_bgworker::sql_text::quote_literal;
use braid_group::{Command, MemberId, MemberState};
use braid_node::connection_string;
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::latch;
use braid_postgres::rows::Rows;
use braid_workers::group::{request, store};
use pgrx::iter::TableIterator;
use pgrx::{name, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome, notice};
use super::super::{local, provider, required, required_name, run, wake_manager};
use super::{PATIENCE, ask, check_goes_on, check_rights, find_member, require_own};

/// How long the reader of a slot may take to end.
const READER_ENDS: Duration = Duration::from_secs(5);

/// braid.leave_group()
#[pg_extern(sql = false)]
fn leave_group() {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let (me, group) = require_own()?;
        check_goes_on()?;
        let others = query(
            "select 1 from braid.group_member where member_id <> $1::bigint and state <> 'removed'",
            &[Some(&me.to_string())],
        );
        if others.is_empty() {
            // No other member is left that would have to agree.
            query("select braid.forget_members()", &[]);
            connection_string::forget_unused();
        } else {
            ask(Command::SetState {
                member: me,
                state: MemberState::Leaving,
            })?;
            notice(format!(
                "this node leaves group \"{group}\" once all other members have what was committed here; braid.group_nodes is empty then"
            ));
        }
        wake_manager();
        Ok(())
    });
}

/// braid.abort_join()
#[pg_extern(sql = false)]
fn abort_join() {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let (me, group) = require_own()?;
        let open = query("select 1 from braid.join_step where done_at is null", &[]);
        if open.is_empty() {
            return Err(
                Failure::state(format!("this node has joined group \"{group}\""))
                    .hint("Leave it with braid.leave_group()."),
            );
        }
        let members = query(
            "select m.node_name, c.dsn, \
                    (select s.subscription_name from braid.subscription s \
                      where s.provider_id = m.node_id \
                        and not (own.join_mode = 'adopt' and s.created_at < own.since) \
                      order by s.subscription_id limit 1) \
               from braid.group_self own cross join braid.group_member m join braid.connection c using (connection_id) \
              where m.member_id <> $1::bigint and m.state <> 'removed' order by m.member_id",
            &[Some(&me.to_string())],
        );
        remove_by_others(me, &members, caller)?;
        for row in members.iter() {
            if let Some(subscription) = row.get(2).cloned().flatten() {
                query(
                    "select braid.drop_subscription($1::name)",
                    &[Some(&subscription)],
                );
            }
        }
        let own = local::require_node()?.name;
        for row in members.iter() {
            let Some(peer) = row.first().cloned().flatten() else {
                continue;
            };
            drop_own_slot(&slot_name::between(&peer, &own).1);
        }
        // The nodes to which this one subscribed were stored, with their connection strings.
        query(
            "delete from braid.node n using braid.group_member m \
              where n.node_id = m.node_id and not n.is_local \
                and not exists (select from braid.subscription s where s.provider_id = n.node_id)",
            &[],
        );
        query("select braid.forget_members()", &[]);
        connection_string::forget_unused();
        wake_manager();
        Ok(())
    });
}

/// Drops a slot of this server that another member has read, or reads. Its reader is ended: a slot
/// that stays would be taken for a new one when this node joins again.
fn drop_own_slot(slot: &str) {
    let deadline = Instant::now() + READER_ENDS;
    loop {
        let readers = query(
            "select pg_terminate_backend(active_pid) from pg_replication_slots \
              where slot_name = $1::name and database = current_database() and active_pid is not null",
            &[Some(slot)],
        );
        if readers.is_empty() || Instant::now() >= deadline {
            query(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots \
                  where slot_name = $1::name and database = current_database() and not active",
                &[Some(slot)],
            );
            return;
        }
        latch::wait(Some(Duration::from_millis(20)));
    }
}

/// Has another member ask the group to remove this one, and drops its slots for this one.
fn remove_by_others(me: MemberId, members: &Rows, caller: pg_sys::Oid) -> Outcome<()> {
    let question = request::question(Command::RemoveMember { member: me })?;
    let own = local::require_node()?.name;
    let mut removed = false;
    let mut last = None;
    for row in members.iter() {
        let [Some(peer), Some(dsn), _] = row else {
            continue;
        };
        let mut connection = match provider::connect_member(peer, dsn, caller) {
            Ok(connection) => connection,
            Err(failure) => {
                last = Some(failure);
                continue;
            }
        };
        if !removed {
            match connection.query(&format!(
                "select braid.group_remove('\\x{}'::pg_catalog.bytea)",
                hex::encode(&question)
            )) {
                Ok(_) => removed = true,
                Err(error) => {
                    last = Some(Failure::provider(
                        format!("node \"{peer}\" could not have this node removed"),
                        &error,
                    ));
                }
            }
        }
        let slot = slot_name::between(&own, peer).1;
        let dropped = connection.query(&format!(
            "select pg_catalog.pg_drop_replication_slot(slot_name) from pg_catalog.pg_replication_slots where slot_name = {} and not active",
            quote_literal(&slot)
        ));
        if let Err(error) = dropped {
            Failure::provider(format!("slot \"{slot}\" stays at node \"{peer}\""), &error)
                .into_warning(format!("slot \"{slot}\" stays at node \"{peer}\""))
                .warn();
        }
    }
    match last {
        Some(failure) if !removed => Err(failure),
        _ => Ok(()),
    }
}

/// braid.remove_node(node_name name, recover boolean)
///
/// Returns, for each member with data that stays, up to where it had the removed one's transactions
/// just before (a position in that one's WAL), or why that is not known.
#[pg_extern(sql = false)]
fn remove_node(
    node_name: Option<&CStr>,
    recover: Option<bool>,
) -> TableIterator<
    'static,
    (
        name!(node, Text),
        name!(applied_lsn, Option<i64>),
        name!(problem, Option<Text>),
    ),
> {
    let caller = current_role();
    let survivors = run(|| {
        check_rights(caller)?;
        let (me, group) = require_own()?;
        check_goes_on()?;
        let name = required_name(node_name, "node_name")?;
        let recover = required(recover, "recover")?;
        let id = find_member(&name, &group)?;
        let found = query(
            "select recover from braid.group_member where member_id = $1::bigint",
            &[Some(&id.to_string())],
        );
        if id == me {
            return Err(Failure::parameter("a node cannot remove itself")
                .hint("Use braid.leave_group(), or remove it from another node."));
        }
        // Once it is removed, the others drop the subscriptions that know their positions.
        let survivors = survivors(id, me, caller);
        // Before: all members know it when they see that the node was removed.
        let was_asked = found.get(0, 0) == Some("t");
        if recover != was_asked {
            ask(Command::SetOption {
                name: store::recovery_option(id),
                value: recover.then(|| "on".to_owned()),
            })?;
        }
        ask(Command::RemoveMember { member: id })?;
        wake_manager();
        Ok(survivors)
    });
    TableIterator::new(
        survivors
            .into_iter()
            .map(|survivor| {
                let (position, problem) = match survivor.position {
                    Ok(position) => (position, None),
                    Err(problem) => (None, Some(Text(problem))),
                };
                (Text(survivor.name), position, problem)
            })
            .collect::<Vec<_>>(),
    )
}

/// A member that stays when another one is removed.
struct Survivor {
    name: String,
    /// Up to where it has the other one's transactions, as the 64-bit number that a position is;
    /// none if it never followed that one. Otherwise why that is not known.
    position: Result<Option<i64>, String>,
}

/// Asks the members with data but one up to where they have that one's transactions. Members that
/// can't be reached are not waited for.
fn survivors(removed: MemberId, me: MemberId, caller: pg_sys::Oid) -> Vec<Survivor> {
    let question = |of: &str| {
        format!(
            "select pg_catalog.pg_wal_lsn_diff(a.applied_lsn, '0/0')::bigint from {of} a where a.member_id = {removed}"
        )
    };
    let members = query(
        "select m.node_name, m.member_id = $1::bigint, coalesce(a.reachable, false), c.dsn \
           from braid.group_member m \
           left join braid.connection c using (connection_id) \
           left join braid.group_activity() a using (member_id) \
          where m.role = 'data' and m.state <> 'removed' \
            and m.member_id <> $2::bigint \
            and exists (select from braid.group_member r where r.member_id = $2::bigint and r.role = 'data') \
          order by m.member_id",
        &[Some(&me.to_string()), Some(&removed.to_string())],
    );
    let first = |rows: &Rows| rows.get(0, 0).and_then(|position| position.parse().ok());
    let position = |row: &[Option<String>]| {
        let is = |column: usize| row.get(column).and_then(Option::as_deref) == Some("t");
        if is(1) {
            return Ok(first(&query(&question("braid.member_positions()"), &[])));
        }
        if !is(2) {
            return Err("cannot be reached from here".to_owned());
        }
        let dsn = row.get(3).cloned().flatten().unwrap_or_default();
        let name = row.first().cloned().flatten().unwrap_or_default();
        let mut connection =
            provider::connect_member(&name, &dsn, caller).map_err(|failure| failure.words())?;
        connection
            .query(&question("braid.group_applied()"))
            .map(|rows| first(&rows))
            .map_err(|error| error.to_string())
    };
    members
        .iter()
        .map(|row| Survivor {
            name: row.first().cloned().flatten().unwrap_or_default(),
            position: position(row),
        })
        .collect()
}

/// braid.start_without(node_name name)
#[pg_extern(sql = false)]
fn start_without(node_name: Option<&CStr>) {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let (_, group) = require_own()?;
        let name = required_name(node_name, "node_name")?;
        let absent = find_member(&name, &group)?;
        request::vouch(absent, PATIENCE)?;
        notice(format!(
            "this node takes part in group \"{group}\" without a word of node \"{name}\"; remove that one with braid.remove_node if it is gone for good"
        ));
        Ok(())
    });
}

/// braid.forget_group(abandon boolean)
#[pg_extern(sql = false)]
fn forget_group(abandon: Option<bool>) {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let abandon = required(abandon, "abandon")?;
        let (_, group) = require_own()?;
        let stopped = query(
            "select 1 from braid.group_self where stopped is not null",
            &[],
        );
        if stopped.is_empty() && !abandon {
            return Err(Failure::state(format!(
                "this node still is a member of group \"{group}\""
            ))
            .hint("Leave it with braid.leave_group(), or have another node remove it. If a majority of the members is gone for good, use abandon => true."));
        }
        disable_subscriptions();
        if abandon {
            drop_slots_of_members()?;
        }
        query("select braid.forget_members()", &[]);
        connection_string::forget_unused();
        wake_manager();
        Ok(())
    });
}

/// Drops this node's slots that members read, if they do not read them at this moment.
fn drop_slots_of_members() -> Outcome<()> {
    let own = local::require_node()?.name;
    let members = query(
        "select m.node_name, m.slot_name from braid.group_self s join braid.group_member m on m.member_id <> s.member_id \
          where m.state <> 'removed'",
        &[],
    );
    for row in members.iter() {
        let Some(Some(peer)) = row.first() else {
            continue;
        };
        let noted = row.get(1).cloned().flatten();
        let slot = noted.unwrap_or_else(|| slot_name::between(peer, &own).1);
        query(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = $1::name and not active",
            &[Some(&slot)],
        );
    }
    Ok(())
}

/// Ends the subscriptions of this node to the members. They drop the slots for it, once nobody
/// reads these; a new member that gets its name has slots of the same names. The subscriptions stay
/// for `braid.compare`, which needs their connection strings.
fn disable_subscriptions() {
    let disabled = local::column(&query(
        "update braid.subscription s set enabled = false, former_member = true \
           from braid.group_member m \
          where m.node_id = s.provider_id and not s.former_member returning s.subscription_name",
        &[],
    ));
    if !disabled.is_empty() {
        notice(format!(
            "subscriptions to former fellow members are disabled: {}; drop them with braid.drop_subscription before this node joins again",
            disabled.join(", ")
        ));
    }
}
