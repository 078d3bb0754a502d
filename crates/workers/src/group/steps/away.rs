//! A member that is away when this node joins: the join goes on without it, and nothing of it is
//! missed when it comes back.
//!
//! No slot can be made at it. But the source of the copy has one there, which keeps all that the
//! source lacked when it was connected last. So the source confirms no more than that, also when
//! the member is back, until this node has a copy of that slot. What lies before is in the rows
//! that are copied from the source; what lies behind comes by the slot, and counts once where it
//! was in the copy as well.
//!
//! The row of that member in `braid.group_member`, and who moves it:
//!
//! | `held_by` | `held_slot` | the subscription | is so | moved on by |
//! |---|---|---|---|---|
//! | null | null | none | nothing was tried | `pass_over`, before it asks |
//! | set | null | none | the source may hold back, or has refused | `pass_over`; `let_go` if it is back |
//! | set | set | none | the source holds back up to `held_lsn` | `stand_in`, with the source's subscription |
//! | set | set | disabled | changes before `held_lsn` are copied | `meet`, once the member is back |
//! | set | null | enabled | this node has a slot there | `meet`: the source has to hold back no more |
//! | null | null | enabled | it is a member as any other | |
//!
//! The source refuses while it is connected to the member: then this node can't reach one that is
//! not away. It also refuses if it has joined itself while that member was away: a copy of a copy
//! does not say what was deleted.
//!
//! Rows that the copy brings keep their versions as far back as the source last was in step with
//! that member (`held_since`): what comes late is compared with them.

use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::DESCRIPTIONS;
use braid_node::owners;
use braid_node::subscription::{execute, rows, rows_written};
use braid_postgres::error::{self, PgError};

use super::peer::Peer;
use super::{Progress, View};

/// Whether an error says that the server could not be reached.
pub(super) fn is_away(failure: &PgError) -> bool {
    failure.sqlstate.is_of("08") || failure.sqlstate == SqlState::CannotConnectNow
}

/// Has the source hold back for this node what a member that is away will send.
///
/// # Errors
/// `failure`, by which the member could not be reached, if the source is connected to it. Otherwise
/// the source's.
pub(super) fn pass_over(
    view: &View,
    peer: &Peer,
    source: &Peer,
    failure: PgError,
) -> Result<(), PgError> {
    // First: what is held back has to be let go of, whatever happens.
    note_holder(peer, Some(source.id))?;
    let answer = match source.ask(&format!(
        "select braid.group_hold({}, {})",
        peer.id, view.own.id
    )) {
        Ok(answer) => answer.unwrap_or_default(),
        Err(refusal) if refusal.sqlstate == SqlState::ObjectInUse => {
            note_holder(peer, None)?;
            return Err(failure);
        }
        Err(other) => return Err(other),
    };
    let words: Vec<&str> = answer.split(' ').collect();
    let [position, since, slot, system_identifier, database_oid] = words[..] else {
        return Err(PgError::new(
            SqlState::ProtocolViolation,
            format!("node \"{}\" did not say what it holds back", source.name),
        )
        .with_hint("Use the same version of Braid on both nodes."));
    };
    error::transaction(|| {
        execute(
            "update braid.group_member set held_slot = $2::name, held_lsn = $3::text::pg_lsn, \
                    held_since = to_timestamp($4::text::bigint / 1000000.0) where member_id = $1",
            &[
                number(peer.id).into(),
                slot.into(),
                position.into(),
                since.into(),
            ],
        )?;
        // As a subscription that is made by connecting to it notes it.
        execute(
            "delete from braid.node where node_name = $1::name and not is_local",
            &[peer.name.as_str().into()],
        )?;
        execute(
            "insert into braid.node (node_name, node_id, is_local, connection_id, system_identifier, database_oid) \
             select m.node_name, m.node_id, false, m.connection_id, $2, $3::text::oid from braid.group_member m where m.member_id = $1",
            &[
                number(peer.id).into(),
                system_identifier.into(),
                database_oid.into(),
            ],
        )
    })?;
    pgrx::log!(
        "node \"{}\" is away: this node joins without it, and follows it once it is back",
        peer.name
    );
    Ok(())
}

/// Creates the subscriptions to members that are away, disabled, with the options and the tables of
/// that to the source. In the transaction that creates this one.
pub(super) fn stand_in(view: &View, source: &str) -> Result<(), PgError> {
    let rest: Vec<&str> = DESCRIPTIONS
        .iter()
        .map(|option| option.name)
        .filter(|name| !["copy_data", "enabled", "create_slot", "slot_name"].contains(name))
        .collect();
    let rest = rest.join(", ");
    for peer in view.earlier().filter(|peer| peer.held_slot.is_some()) {
        let (name, slot) = peer.subscription_to(&view.own.name);
        let made = rows_written(
            &format!(
                "insert into braid.subscription (subscription_name, subscription_owner, connection_id, provider_name, provider_id, phase, \
                        start_lsn, created_at, copy_data, enabled, create_slot, slot_name, {rest}) \
                 select $1::name, s.subscription_owner, m.connection_id, m.node_name, m.node_id, 'stream', m.held_lsn, m.held_since, \
                        false, false, false, $2::name, {rest} \
                   from braid.subscription s cross join braid.group_member m \
                  where s.subscription_name = $3::name and m.member_id = $4 returning subscription_id::text"
            ),
            &[
                name.as_str().into(),
                slot.as_str().into(),
                source.into(),
                number(peer.id).into(),
            ],
        )?;
        let made = made
            .into_iter()
            .next()
            .and_then(|row| row.into_iter().next()?);
        execute(
            "insert into braid.subscription_table (subscription_id, relation, schema_name, table_name, state, ready_at) \
             select $1::text::integer, t.relation, t.schema_name, t.table_name, 'ready', now() \
               from braid.subscription_table t join braid.subscription s using (subscription_id) \
              where s.subscription_name = $2::name",
            &[made.into(), source.into()],
        )?;
    }
    owners::tie()
}

/// Follows a member that was away when this node joined, as soon as it is back.
pub(super) fn meet(view: &View, peer: &Peer) -> Result<Progress, PgError> {
    if let Some(held) = &peer.held_slot {
        let Some(subscription) = &peer.subscription else {
            return Err(PgError::new(
                SqlState::UndefinedObject,
                format!(
                    "the subscription to node \"{}\" is gone: its changes are no longer available",
                    peer.name
                ),
            )
            .with_hint("Remove the node with braid.remove_node, and have it join again."));
        };
        let slot = peer.subscription_to(&view.own.name).1;
        if !peer.has_slot(held)? {
            if holder(view, peer).is_none() {
                return Err(PgError::new(
                    SqlState::UndefinedObject,
                    format!(
                        "slot \"{held}\" at node \"{}\" is gone with the node that it was for: this node cannot receive what was committed there before",
                        peer.name
                    ),
                )
                .with_hint("Leave the group here with braid.leave_group(), and join again from a member that has all."));
            }
            return Ok(Progress::Waits(format!(
                "slot \"{held}\" at {}, from which this node's is made",
                peer.name
            )));
        }
        let begins = copy_slot(peer, held, &slot)?;
        begin(subscription, (&begins, &peer.position()?), peer)?;
    }
    let_go(view, peer)?;
    Ok(Progress::Moved)
}

/// Makes this node's slot there from that of the holder. Returns where it begins.
fn copy_slot(peer: &Peer, held: &str, slot: &str) -> Result<String, PgError> {
    let (held, slot) = (quote_literal(held), quote_literal(slot));
    // One that is there is of an attempt that was cut off, or of an earlier membership.
    peer.ask(&format!(
        "select pg_catalog.pg_drop_replication_slot(slot_name) from pg_catalog.pg_replication_slots \
          where slot_name = {slot} and not active"
    ))?;
    peer.ask(&format!(
        "select lsn from pg_catalog.pg_copy_logical_replication_slot({held}, {slot})"
    ))?;
    let begins = peer.ask(&format!(
        "select confirmed_flush_lsn from pg_catalog.pg_replication_slots where slot_name = {slot}"
    ))?;
    begins.ok_or_else(|| {
        PgError::new(
            SqlState::UndefinedObject,
            format!("slot {slot} is gone at node \"{}\"", peer.name),
        )
        .with_hint("It is tried again.")
    })
}

/// Lets the changes behind the slot's beginning come, and with them the tables that were created
/// there meanwhile. The holder may have had what is before `end` when this node copied its rows.
fn begin(subscription: &str, (begins, end): (&str, &str), peer: &Peer) -> Result<(), PgError> {
    error::transaction(|| {
        // The holder has all that lies before it, and had it before this node copied its rows.
        execute(
            "update braid.subscription set start_lsn = greatest(start_lsn, $2::text::pg_lsn) where subscription_name = $1::name",
            &[subscription.into(), begins.into()],
        )?;
        rows_written(
            "select braid.enable_subscription($1::name)::text",
            &[subscription.into()],
        )?;
        // They are not in this node's WAL as that member's, to be passed on.
        execute(
            "update braid.group_kept set kept_lsn = greatest(kept_lsn, $2::text::pg_lsn) where member_id = $1",
            &[number(peer.id).into(), end.into()],
        )?;
        execute(
            "update braid.group_member set held_slot = null where member_id = $1",
            &[number(peer.id).into()],
        )
    })?;
    pgrx::log!("node \"{}\" is back, and this node follows it", peer.name);
    Ok(())
}

/// Tells the holder that it need not hold anything back any more, if there is one.
pub(super) fn let_go(view: &View, peer: &Peer) -> Result<(), PgError> {
    if peer.held_by.is_none() {
        return Ok(());
    }
    if let Some(holder) = holder(view, peer) {
        holder.ask(&format!(
            "select braid.group_release({}, {})",
            peer.id, view.own.id
        ))?;
    }
    note_holder(peer, None)
}

/// Who holds back, if anybody does: one that was removed, or has left, does not.
fn holder<'a>(view: &'a View, peer: &Peer) -> Option<&'a Peer> {
    let id = peer.held_by?;
    view.peers
        .iter()
        .find(|other| other.id == id && other.state != "removed")
}

fn note_holder(peer: &Peer, holder: Option<u64>) -> Result<(), PgError> {
    error::transaction(|| {
        execute(
            "update braid.group_member set held_by = $2 where member_id = $1",
            &[number(peer.id).into(), holder.map(number).into()],
        )
    })
}

/// Members that have joined while another one was away, and still need this node's slot there.
pub(super) fn held_for() -> Result<Vec<String>, PgError> {
    let found = error::transaction(|| {
        rows(
            "select distinct f.node_name::text from braid.group_hold h \
               join braid.group_member f on f.member_id = h.for_id and f.state <> 'removed' \
               join braid.group_member m on m.member_id = h.member_id and m.state <> 'removed' order by 1",
            &[],
        )
    })?;
    Ok(found
        .into_iter()
        .filter_map(|row| row.into_iter().next()?)
        .collect())
}

/// What was held back, for or of a member that was removed, is needed no more. In a transaction.
pub(super) fn forget(peer: &Peer) -> Result<(), PgError> {
    execute(
        "delete from braid.group_hold where $1 in (member_id, for_id)",
        &[number(peer.id).into()],
    )
}

fn number(id: u64) -> i64 {
    i64::try_from(id).unwrap_or(0)
}
