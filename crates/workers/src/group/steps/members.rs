//! Subscriptions of the group at a member that has joined: one to each other member with data, none
//! to a removed one.
//!
//! A member that joins later makes a slot here and one at itself, in this order, before it copies.
//! So this node subscribes to it from the slot that is there, and copies nothing: all that was
//! written there since the slot was made comes, and before it nothing was that others lack.
//!
//! The subscription to a removed member whose last transactions are recovered stays until that is
//! done. By it something is to be done, and deletions are remembered for what is still to come.

use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};

use super::peer::{Peer, Start};
use super::{Progress, View, away, recover, take_over};

/// Subscribes to members that have none yet, and drops what is left of removed ones.
pub(super) fn follow(view: &View) -> Result<Progress, PgError> {
    let own = &view.own.name;
    let mut waits = Vec::new();
    let mut failed = None;
    let mut moved = false;
    match take_over::go_on(view) {
        Ok(Progress::Done) => {}
        Ok(Progress::Moved) => moved = true,
        Ok(Progress::Waits(what)) => waits.push(what),
        Err(failure) => failed = Some(failure),
    }
    for peer in &view.peers {
        if peer.forgotten {
            continue;
        }
        if peer.state == "removed" {
            let progress = if recover::is_open(peer) {
                recover::go_on(peer, view)
            } else {
                Ok(Progress::Done)
            };
            match progress {
                Ok(Progress::Done) => {
                    if !forget(peer, own)? {
                        waits.push(format!("{} to let go of its slot", peer.name));
                    }
                }
                Ok(Progress::Moved) => moved = true,
                Ok(Progress::Waits(what)) => waits.push(what),
                Err(failure) => failed = Some(failure),
            }
            continue;
        }
        if !peer.has_data || !peer.stays() {
            continue;
        }
        let progress = if peer.held_by.is_some() || peer.held_slot.is_some() {
            away::meet(view, peer)
        } else if peer.subscription.is_none() {
            subscribe(peer, own)
        } else if view.own.mode == "adopt" && peer.slot.is_none() && peer.state != "joining" {
            note_slot(peer, own)
        } else {
            continue;
        };
        // A member that can't be reached keeps no other one waiting.
        match progress {
            Ok(Progress::Waits(what)) => waits.push(what),
            Ok(_) => moved = true,
            Err(failure) => failed = Some(failure),
        }
    }
    match failed {
        Some(failure) => Err(failure),
        None if moved => Ok(Progress::Moved),
        None if waits.is_empty() => Ok(Progress::Done),
        None => Ok(Progress::Waits(waits.join(", "))),
    }
}

/// Notes the slot here that a member reads, which may have subscribed by hand.
pub(super) fn note_slot(peer: &Peer, own: &str) -> Result<Progress, PgError> {
    Ok(if peer.note_slot(own)? {
        Progress::Moved
    } else {
        Progress::Waits(format!("{} to subscribe to this node", peer.name))
    })
}

/// Subscribes to a member that joined later, if its slot for this node is there.
fn subscribe(peer: &Peer, own: &str) -> Result<Progress, PgError> {
    let (name, slot) = peer.subscription_to(own);
    if !peer.has_slot(&slot)? {
        return Ok(Progress::Waits(format!(
            "a slot for this node at {}",
            peer.name
        )));
    }
    peer.subscribe(&name, &publications()?, Start::Slot(&slot))?;
    Ok(Progress::Moved)
}

/// The group's publications, as an array's text.
pub(super) fn publications() -> Result<String, PgError> {
    let found = error::transaction(|| {
        rows(
            "select coalesce((select publications::text from braid.group_self), '{braid}')",
            &[],
        )
    })?;
    Ok(found
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?)
        .unwrap_or_else(|| "{braid}".to_owned()))
}

/// Drops the subscription to a member that was removed, and the slot that it read here, once: its
/// node may be back as another member, which has made a slot of the same name or goes on with that
/// one. False while the slot is still read.
fn forget(peer: &Peer, own: &str) -> Result<bool, PgError> {
    if is_by_hand(peer)? {
        error::transaction(|| {
            execute(
                "update braid.group_member set forgotten = true where member_id = $1",
                &[i64::try_from(peer.id).unwrap_or(0).into()],
            )
        })?;
        return Ok(true);
    }
    peer.unsubscribe()?;
    if let Some(subscription) = &peer.subscription {
        pgrx::log!(
            "node \"{}\" was removed from the group: subscription \"{subscription}\" is dropped",
            peer.name
        );
    }
    let slot = peer.slot_here(own);
    if !peer.is_back {
        drop_slot(&slot)?;
    }
    error::transaction(|| {
        away::forget(peer)?;
        // Another node may join under its name.
        execute(
            "delete from braid.node n using braid.group_member m where m.member_id = $1 and n.node_id = m.node_id and not n.is_local \
                and not exists (select from braid.subscription s where s.provider_id = n.node_id) \
                and not exists (select from braid.group_member o where o.node_id = n.node_id and o.state <> 'removed')",
            &[i64::try_from(peer.id).unwrap_or(0).into()],
        )?;
        execute(
            "update braid.group_member m set forgotten = true \
              where member_id = $1 and ($2 or not exists (select from pg_replication_slots where slot_name = $3::name))",
            &[
                i64::try_from(peer.id).unwrap_or(0).into(),
                peer.is_back.into(),
                slot.as_str().into(),
            ],
        )?;
        let found = rows(
            "select 1::text from braid.group_member where member_id = $1 and forgotten",
            &[i64::try_from(peer.id).unwrap_or(0).into()],
        )?;
        Ok(!found.is_empty())
    })
}

/// Whether the subscription to a removed member was made by hand, and the member gave up before it
/// was adopted. Then the group has never had it.
fn is_by_hand(peer: &Peer) -> Result<bool, PgError> {
    let found = error::transaction(|| {
        rows(
            "select 1::text from braid.group_self s cross join braid.group_member m \
               join braid.subscription u on u.provider_id = m.node_id and u.only_origin is null \
               join braid.group_logged l on l.log_index = m.since_index \
              where m.member_id = $1 and s.join_mode = 'adopt' and m.slot_name is null and u.created_at < l.applied_at",
            &[i64::try_from(peer.id).unwrap_or(0).into()],
        )
    })?;
    Ok(!found.is_empty())
}

/// Drops a slot of this server, if it is there and nobody reads it.
pub(super) fn drop_slot(slot: &str) -> Result<(), PgError> {
    error::transaction(|| {
        rows(
            "select pg_drop_replication_slot(slot_name)::text from pg_replication_slots \
              where slot_name = $1::name and not active and database = current_database()",
            &[slot.into()],
        )
        .map(drop)
    })
}
