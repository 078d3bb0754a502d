//! Moves a node to another server by `pg_upgrade`, as far as SQL can't. Run by the sessions that
//! call `braid.prepare_upgrade` and `braid.finish_upgrade`.
//!
//! `pg_upgrade` carries tables along, and transaction ids, and the numbers of tables, types and
//! roles. It leaves behind replication origins with their positions, commit timestamps, the numbers
//! of functions and, before PostgreSQL 17, slots; and the server gets another system identifier. So
//! the node writes these down before, and has them made again afterwards, under the same numbers:
//! rows of Braid's tables refer to them.

use std::sync::atomic::Ordering;

use braid_node::registry;
use braid_node::tombstone::waiting;
use braid_postgres::{process, server};

pub use crate::keep_commits::keep_all as keep_commits;
pub use crate::purge::arrived_for_all;
pub use braid_node::origin::{Remade, remake as remake_origin};

/// Whether this server was started by `pg_upgrade`.
#[must_use]
pub fn is_under_way() -> bool {
    server::is_binary_upgrade()
}

/// Returns which of this database's workers still run; `None` if all have ended and the collector's
/// slot is dropped.
#[must_use]
pub fn still_running() -> Option<&'static str> {
    let database = process::my_database();
    let works = registry::subscriptions().iter().any(|entry| {
        entry.subscription_id.load(Ordering::Acquire) != 0
            && entry.database.load(Ordering::Acquire) == database
            && (entry.leader_pid.load(Ordering::Acquire) > 0 || !entry.applier_pids().is_empty())
    });
    if works {
        return Some("Workers of subscriptions still run.");
    }
    waiting::has_slot().then_some("The collector of deletions has not let go of its slot.")
}

/// Whether the collector has all local deletions up to a position in WAL. Asks it to go on.
#[must_use]
pub fn is_collected(position: u64) -> bool {
    if !registry::remembers_deletions() {
        return true;
    }
    let (collected, _) = registry::ask_collector();
    collected >= position
}
