//! Functions that members call at each other, under the role of the connection string.

use std::sync::atomic::Ordering;

use braid_bgworker::hex;
use braid_group::{Command, MemberId};
use braid_node::{mailbox, registry, secrecy, versions};
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, Cell};
use braid_workers::group::request;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::{required, run, wake_manager};
use super::{PATIENCE, ask, require_own, source};

/// braid.group_receive(messages bytea[])
#[pg_extern(sql = false)]
fn group_receive(messages: Option<pgrx::Array<'_, &[u8]>>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        for message in messages.iter().flat_map(pgrx::Array::iter).flatten() {
            if message.len() <= mailbox::MESSAGE_LIMIT {
                // A message that finds no room is lost, as on any network: it is sent again.
                mailbox::deliver(message)?;
            } else {
                let next = query(
                    "select nextval(pg_get_serial_sequence('braid.group_letter', 'letter_id'))",
                    &[],
                );
                let number = next
                    .get(0, 0)
                    .and_then(|text| text.parse().ok())
                    .unwrap_or(0);
                table_scan::insert_undecoded(
                    own_table("group_letter")?,
                    [Cell::Bigint(number), Cell::Bytes(message)],
                );
                mailbox::announce_letter()?;
            }
        }
        Ok(())
    });
}

/// braid.version_receive(messages bytea[])
#[pg_extern(sql = false)]
fn version_receive(messages: Option<pgrx::Array<'_, &[u8]>>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        for message in messages.iter().flat_map(pgrx::Array::iter).flatten() {
            versions::mailbox::deliver(message);
        }
        Ok(())
    });
}

/// Checks that the caller is a role by which nodes connect.
pub fn check_peer(caller: pg_sys::Oid) -> Outcome<()> {
    let role = caller.to_u32().to_string();
    let may = query(
        "select 1 from pg_roles where oid = $1::oid and (rolsuper or rolreplication)",
        &[Some(&role)],
    );
    if may.is_empty() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            "permission denied to act as a member of the group",
        )
        .hint("The role in the connection string needs the REPLICATION attribute."));
    }
    Ok(())
}

/// braid.group_add(request bytea) returns text
#[pg_extern(sql = false)]
fn group_add(request: Option<Vec<u8>>) -> Text {
    // The request has the connection string in it.
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        require_own()?;
        let question = required(request, "request")?;
        let Ok(braid_group::Proposal {
            command: Command::AddMember(new),
            ..
        }) = braid_group::Proposal::decode(&question)
        else {
            return Err(Failure::parameter("the request is not one to join")
                .hint("Use the same version of Braid on both nodes."));
        };
        // A node that has asked before, and did not get the answer.
        let there = query(
            "select m.member_id || ' ' || m.node_number from braid.group_member m \
              where m.node_name = $1::name and m.node_id = $2::uuid and m.state = 'joining'",
            &[Some(&new.name), Some(&hex::encode(&new.identity.node))],
        );
        if let Some(numbers) = there.get(0, 0) {
            return Ok(Text(numbers.to_owned()));
        }
        source::check_reached(&new)?;
        // An earlier attempt of this server's, which nobody goes on with: its node is gone.
        let before = query(
            "select m.member_id from braid.group_member m \
              where m.node_name = $1::name and m.node_id <> $2::uuid and m.state = 'joining' and m.system_identifier = $3",
            &[
                Some(&new.name),
                Some(&hex::encode(&new.identity.node)),
                Some(&new.identity.system.to_string()),
            ],
        );
        if let Some(member) = before
            .get(0, 0)
            .and_then(|id| MemberId::new(id.parse().ok()?))
        {
            ask(Command::RemoveMember { member })?;
        }
        let numbers = request::ask_encoded(&question, PATIENCE)?;
        let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        Ok(Text(words.join(" ")))
    })
}

/// braid.group_alter(request bytea)
#[pg_extern(sql = false)]
fn group_alter(request: Option<Vec<u8>>) {
    // The request has the connection string in it.
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        require_own()?;
        let question = required(request, "request")?;
        let Ok(braid_group::Proposal {
            command: Command::SetConnection { member, connection },
            ..
        }) = braid_group::Proposal::decode(&question)
        else {
            return Err(
                Failure::parameter("the request is not one to change a connection string")
                    .hint("Use the same version of Braid on both nodes."),
            );
        };
        let name = query(
            "select node_name from braid.group_member where member_id = $1::bigint and state <> 'removed'",
            &[Some(&member.to_string())],
        );
        let name = name.get(0, 0).ok_or_else(|| {
            Failure::undefined("the node is not a member of the group")
                .hint("The view braid.group_nodes lists its nodes.")
        })?;
        source::check_leads_to(member, name, connection.expose())?;
        request::ask_encoded(&question, PATIENCE)?;
        Ok(())
    });
}

/// braid.group_take_over(member bigint)
#[pg_extern(sql = false)]
fn group_take_over(member: i64) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        require_own()?;
        let joining = query(
            "select 1 from braid.group_member where member_id = $1::bigint and state = 'joining' and role = 'data'",
            &[Some(&member.to_string())],
        );
        if joining.is_empty() {
            return Err(Failure::state("the node is not joining")
                .hint("Only rows of a node that joins are taken over."));
        }
        query(
            "insert into braid.group_merge (member_id) values ($1::bigint) on conflict do nothing",
            &[Some(&member.to_string())],
        );
        wake_manager();
        Ok(())
    });
}

/// braid.group_remove(request bytea)
#[pg_extern(sql = false)]
fn group_remove(request: Option<Vec<u8>>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        require_own()?;
        let question = required(request, "request")?;
        let Ok(braid_group::Proposal {
            command: Command::RemoveMember { member },
            ..
        }) = braid_group::Proposal::decode(&question)
        else {
            return Err(Failure::parameter("the request is not one to leave")
                .hint("Use the same version of Braid on both nodes."));
        };
        // Others have their own say: this way is for one that has not joined.
        let joining = query(
            "select 1 from braid.group_member where member_id = $1::bigint and state = 'joining'",
            &[Some(&member.to_string())],
        );
        if joining.is_empty() {
            return Err(Failure::state("the node is not joining any more")
                .hint("Leave with braid.leave_group() there."));
        }
        request::ask_encoded(&question, PATIENCE)?;
        Ok(())
    });
}

/// braid.group_hold(member bigint, for_member bigint) returns text
///
/// From now on this node confirms no more to a member that is away than the member has, so that the
/// member's slot can be copied for another member. Words: that position, since when changes may be
/// missing (microseconds since 1970), the slot, the system identifier and the database's OID.
#[pg_extern(sql = false)]
fn group_hold(member: Option<i64>, for_member: Option<i64>) -> Text {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        require_own()?;
        let member = required(member, "member")?.to_string();
        let for_member = required(for_member, "for_member")?.to_string();
        // A leader that begins to confirm says so first, takes this lock, and looks then.
        query("lock table braid.group_hold in exclusive mode", &[]);
        let found = query(
            "select u.subscription_id, m.node_name, u.given_up_at is not null, u.phase <> 'stream', u.slot_name, \
                    coalesce(h.held_lsn, greatest(u.start_lsn, \
                        (select max(pg_replication_origin_progress(r.roname, true)) from braid.origin o \
                           join pg_replication_origin r on r.roident = o.origin_id \
                          where o.subscription_id = u.subscription_id and o.node_name = u.provider_name))), \
                    h.held_lsn is not null, \
                    format('%s %s %s %s', floor(extract(epoch from coalesce(u.caught_up_at, u.created_at)) * 1000000)::bigint, u.slot_name, \
                           n.system_identifier, n.database_oid), \
                    m.held_slot is not null \
               from braid.group_member m join braid.subscription u on u.provider_id = m.node_id and u.only_origin is null \
               join braid.node n on n.node_id = m.node_id \
               left join braid.group_hold h on h.member_id = m.member_id and h.for_id = $2::bigint \
              where m.member_id = $1::bigint and m.state not in ('leaving', 'removed') order by u.subscription_id limit 1",
            &[Some(&member), Some(&for_member)],
        );
        let (Some(subscription), Some(name)) = (found.get(0, 0), found.get(0, 1)) else {
            return Err(Failure::state("this node does not follow that member")
                .hint("It is tried again by itself."));
        };
        let is = |column: usize| found.get(0, column) == Some("t");
        let (Some(position), false) = (found.get(0, 5), is(3)) else {
            return Err(Failure::state(format!(
                "this node has not copied what node \"{name}\" has yet"
            ))
            .hint("It is tried again by itself."));
        };
        if is(2) {
            return Err(Failure::state(format!(
                "node \"{name}\" was away for longer than braid.peer_away_limit"
            ))
            .detail("What was deleted since then is not remembered for its sake.")
            .hint("Remove it with braid.remove_node, and have it join again when it is back."));
        }
        // This node knows deletions from before its join only by its own copy, and can't pass them
        // on.
        if is(8) {
            return Err(Failure::state(format!(
                "this node itself has joined while node \"{name}\" was away"
            ))
            .hint("Give up with braid.abort_join(), and join from a member that was there before. Or wait until that node is back."));
        }
        if !is(6) {
            let confirms = subscription
                .parse()
                .ok()
                .and_then(registry::subscription)
                .is_some_and(|entry| entry.confirms.load(Ordering::SeqCst) != 0);
            if confirms {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
                    format!("this node is connected to node \"{name}\""),
                )
                .hint("See that the node that joins can connect to it, too."));
            }
            query(
                "insert into braid.group_hold (member_id, for_id, held_lsn) values ($1::bigint, $2::bigint, $3::pg_lsn)",
                &[Some(&member), Some(&for_member), Some(position)],
            );
        }
        Ok(Text(format!(
            "{position} {}",
            found.get(0, 7).unwrap_or_default()
        )))
    })
}

/// braid.group_release(member bigint, for_member bigint)
#[pg_extern(sql = false)]
fn group_release(member: Option<i64>, for_member: Option<i64>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        query(
            "delete from braid.group_hold where member_id = $1::bigint and for_id = $2::bigint",
            &[
                Some(&required(member, "member")?.to_string()),
                Some(&required(for_member, "for_member")?.to_string()),
            ],
        );
        Ok(())
    });
}
