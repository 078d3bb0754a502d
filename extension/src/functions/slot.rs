//! Chooses the replication slot that a new subscription reads.

use braid_bgworker::slot_name;
use braid_postgres::catalog::query;

use super::failure::{Failure, Outcome};
use super::local::{self, LocalNode};
use super::provider::Provider;

/// The slot that a new subscription is to read, and its position if it exists already.
pub struct ChosenSlot {
    /// The slot's name.
    pub name: String,
    /// The position from which it sends; none for a slot that is still to be created.
    pub start_lsn: Option<String>,
}

/// The named slot, which must exist or be free according to `create_slot`; without a name, one that
/// is free.
pub fn choose_slot(
    subscription: &str,
    wanted: Option<&str>,
    create_slot: bool,
    node: &LocalNode,
    provider: &mut Provider,
) -> Outcome<ChosenSlot> {
    let provider_name = provider.name.clone();
    let used_here = local::column(&query(
        "select slot_name from braid.subscription where provider_name = $1::name \
         union select slot_name from braid.slot_cleanup where provider_name = $1::name",
        &[Some(&provider_name)],
    ));
    let is_named = wanted.is_some();
    let wanted = wanted.map_or_else(
        || slot_name::for_subscription(&node.name, subscription, 1),
        str::to_owned,
    );
    let is_used_here = |name: &String| used_here.contains(name);
    if !create_slot {
        if is_used_here(&wanted) {
            return Err(slot_in_use(&wanted));
        }
        let slot = provider.require_slot(&wanted)?;
        return Ok(ChosenSlot {
            name: wanted,
            start_lsn: slot.confirmed_flush_lsn,
        });
    }
    let there = provider.slot_names()?;
    if !is_named {
        let name = (1..)
            .map(|attempt| slot_name::for_subscription(&node.name, subscription, attempt))
            .find(|name| !is_used_here(name) && !there.contains(name))
            .unwrap_or(wanted);
        return Ok(ChosenSlot {
            name,
            start_lsn: None,
        });
    }
    if is_used_here(&wanted) {
        return Err(slot_in_use(&wanted));
    }
    if there.contains(&wanted) {
        return Err(Failure::duplicate(format!("replication slot \"{wanted}\" already exists at the provider"))
            .hint("Choose another slot_name, drop the slot there, or use create_slot => false to read from it."));
    }
    Ok(ChosenSlot {
        name: wanted,
        start_lsn: None,
    })
}

/// 42710: the slot is another subscription's.
pub fn slot_in_use(name: &str) -> Failure {
    Failure::duplicate(format!("replication slot \"{name}\" belongs to another subscription of this node"))
        .hint("Choose another slot_name. Slots of dropped subscriptions are listed in braid.pending_cleanup until they are gone.")
}
