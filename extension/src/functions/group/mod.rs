//! Groups: creating, joining, leaving, and the functions that members call at each other.
//!
//! These functions propose changes and wait for agreement. The rest happens in the group worker and
//! the steps process (`braid_workers::group`), after commit.
//!
//! | file | functions |
//! |---|---|
//! | `alter.rs` | of a member that has moved, or whose agreement has failed |
//! | `create.rs`, `join.rs` | of a database that becomes a member |
//! | `leave.rs` | of a member that leaves, is removed, or gives up |
//! | `peer.rs` | that members call at each other |
//! | `progress.rs` | waiting, and the view of the group |
//! | `sequence.rs` | of sequences |
//! | `source.rs` | none: the reasons why a database may not join |
//! | `standing.rs` | members that take no writes, or rest |

mod alter;
mod create;
mod join;
mod leave;
pub mod peer;
mod progress;
mod sequence;
mod source;
mod standing;

use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_bgworker::hex;
use braid_bgworker::subscription_option::array_literal;
use braid_group::{Command, GroupId, MemberId};
use braid_node::registry;
use braid_postgres::catalog::{is_superuser, query};
use braid_workers::group::{WITNESS, request};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::failure::{Failure, Outcome};
use super::local::Subscription;

/// How long a function waits for the group to agree.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Checks that the caller may create, join and leave groups.
pub fn check_rights(caller: pg_sys::Oid) -> Outcome<()> {
    if is_superuser(caller) {
        return Ok(());
    }
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        "permission denied to change the group",
    )
    .hint(
        "Subscriptions of a group apply changes of all roles, so only a superuser may change it.",
    ))
}

/// The database's own member and name; none if it is in no group.
fn find_own() -> Option<(MemberId, String)> {
    let found = query(
        "select s.member_id, s.group_name from braid.group_self s",
        &[],
    );
    let id = MemberId::new(found.get(0, 0)?.parse().ok()?)?;
    Some((id, found.get(0, 1)?.to_owned()))
}

pub fn require_own() -> Outcome<(MemberId, String)> {
    find_own().ok_or_else(|| {
        Failure::state("this database is not a member of a group")
            .hint("Create one with braid.create_group, or join one with braid.join_group.")
    })
}

/// The member of a name.
fn find_member(name: &str, group: &str) -> Outcome<MemberId> {
    let found = query(
        "select member_id from braid.group_member where node_name = $1::name and state <> 'removed'",
        &[Some(name)],
    );
    let id = found.get(0, 0).and_then(|id| id.parse().ok());
    id.and_then(MemberId::new).ok_or_else(|| {
        Failure::undefined(format!("group \"{group}\" has no node \"{name}\""))
            .hint("The view braid.group_nodes lists its nodes.")
    })
}

fn check_no_group() -> Outcome<()> {
    query(
        "lock table braid.group_self in share row exclusive mode",
        &[],
    );
    match find_own() {
        None => Ok(()),
        Some((_, group)) => Err(Failure::duplicate(format!(
            "this database is a member of group \"{group}\" already"
        ))
        .hint("A database is in one group at a time. See braid.group_nodes; braid.leave_group() leaves it.")),
    }
}

fn insert_self(
    group: &GroupId,
    name: &str,
    me: MemberId,
    publications: &[String],
    source: Option<&str>,
    mode: &str,
) {
    query(
        "insert into braid.group_self (group_id, group_name, member_id, publications, source_name, join_mode) \
         values (decode($1, 'hex'), $2::name, $3::bigint, $4::text[], $5::name, $6)",
        &[
            Some(&hex::encode(&group.0)),
            Some(name),
            Some(&me.to_string()),
            Some(&array_literal(publications)),
            source,
            Some(mode),
        ],
    );
    // The manager notes it after the commit; statements that change the schema count from now on.
    if let Some(entry) = registry::my_manager().filter(|_| mode != WITNESS) {
        entry.membership.store(registry::MEMBER, Ordering::Release);
    }
}

pub fn ask(command: Command) -> Outcome<Vec<u64>> {
    Ok(request::ask(command, PATIENCE)?)
}

/// Checks that this member still takes part, and has joined.
pub fn check_goes_on() -> Outcome<()> {
    let found = query(
        "select s.stopped, s.stopped_hint, exists (select from braid.join_step where done_at is null) from braid.group_self s",
        &[],
    );
    if let Some(why) = found.get(0, 0) {
        return Err(Failure::state(why).hint(found.get(0, 1).unwrap_or_default()));
    }
    if found.get(0, 2) == Some("t") {
        return Err(Failure::state("this node has not joined its group yet")
            .hint("Wait with braid.wait_for_group(), or give up with braid.abort_join()."));
    }
    Ok(())
}

/// Checks that a subscription is none of those by which this member follows another one.
pub fn check_not_needed(subscription: &Subscription) -> Outcome<()> {
    let found = query(
        "select m.node_name, s.group_name \
           from braid.group_self s \
           join braid.group_member own on own.member_id = s.member_id and own.state in ('active', 'in maintenance') \
           join braid.group_member m on m.node_id = $1::uuid and m.state not in ('leaving', 'removed') \
          where s.stopped is null
            and not exists (select from braid.subscription u where u.subscription_id = $2::integer and u.only_origin is not null)",
        &[Some(&subscription.provider_id), Some(&subscription.id)],
    );
    let (Some(node), Some(group)) = (found.get(0, 0), found.get(0, 1)) else {
        return Ok(());
    };
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
        format!(
            "subscription \"{}\" belongs to group \"{group}\"",
            subscription.name
        ),
    )
    .detail(format!("By it this node follows node \"{node}\"."))
    .hint("Leave the group with braid.leave_group(), or remove that node with braid.remove_node."))
}

/// Checks that a subscription is none of those by which this node followed members of a group that
/// it has forgotten.
pub fn check_no_former_member(subscription: &Subscription) -> Outcome<()> {
    let found = query(
        "select 1 from braid.subscription where subscription_id = $1::integer and former_member",
        &[Some(&subscription.id)],
    );
    if found.is_empty() {
        return Ok(());
    }
    Err(Failure::state(format!(
        "subscription \"{}\" is one of a group that this node has forgotten",
        subscription.name
    ))
    .detail("The group drops the slot that it read, or gives its name to the slot of a new member.")
    .hint("Drop it with braid.drop_subscription. To follow the node again, join its group, or create another subscription with a copy."))
}
