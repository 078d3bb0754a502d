//! The shared state of all Braid processes of this server: fixed shared memory, laid out when the
//! server starts.
//!
//! Written by the workers, read by the monitoring functions in any backend. Everything is an
//! atomic; a light-weight lock keeps the parts of a subscription's last failure together. Positions
//! are in the provider's WAL unless a name says local.
//!
//! An entry's life: the manager claims it when it first sees a subscription (under the lock,
//! `subscription_id` set last), the leader fills it, and the manager releases it when the
//! subscription is gone. Counters live as long as the entry. Readers hold no lock: a function that
//! shows an entry's numbers reads `generation` before and after them, and leaves them out if it has
//! moved.

use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use braid_postgres::process::{my_database, my_latch, my_pid, set_latch};

mod appliers;
mod decisions;
mod deletions;
mod last_failure;
mod lock;
mod managers;
mod memory;
mod provider_clock;
mod rate_limit;
mod schedule;
mod subscriptions;
mod table_counters;
mod text;

pub use appliers::ApplierEntry;
pub use decisions::RecordedDecision;
pub use deletions::{
    ask_collector, is_collected, may_have_tombstone, may_have_tombstone_since, remembers_deletions,
};
pub(crate) use deletions::{raise_all_tombstones, raise_tombstone, tombstones_are_known};
pub use last_failure::RecordedFailure;
pub(crate) use lock::locked;
pub(crate) use managers::poke;
pub use managers::{
    MAX_DATABASES, MEMBER, ManagerEntry, NO_MEMBER, READ_ONLY, find_manager, is_no_member, manager,
    my_manager, release_manager, wake_manager, wake_sequences,
};
use memory::shared;
pub use memory::{batches, count_batch, count_rewrite, install, is_preloaded, life, rewrites};
pub(crate) use memory::{readers, versions};
pub use provider_clock::{MeasuredClock, ProviderClock};
pub use rate_limit::RateLimit;
pub use schedule::ScheduleCounters;
pub use subscriptions::{
    Activity, Anew, BY_LOCK, PerSecond, RetryRequest, SubscriptionEntry, has_subscriptions,
    release_subscription, subscription, subscriptions, take_subscription, waited_for_by,
};
pub use table_counters::{TableEntry, own_table, table, tables};

/// Say where the supervisor is.
pub fn register_supervisor() {
    if let Some(shared) = shared() {
        shared.supervisor_latch.store(my_latch(), Ordering::Release);
        shared.supervisor_pid.store(my_pid(), Ordering::Release);
    }
}

/// Wake the supervisor.
pub fn wake_supervisor() {
    if let Some(shared) = shared() {
        set_latch(shared.supervisor_latch.load(Ordering::Acquire));
    }
}

/// Background workers that run now for the other databases of this server: managers, leaders and
/// appliers.
#[must_use]
pub fn workers_elsewhere() -> usize {
    let here = my_database();
    let elsewhere = |database: &AtomicU32| ![0, here].contains(&database.load(Ordering::Acquire));
    let runs = |pid: &AtomicI32| usize::from(pid.load(Ordering::Acquire) > 0);
    let managers = shared().map_or(&[][..], |shared| &shared.managers);
    let managers = managers.iter().filter(|entry| elsewhere(&entry.database));
    let groups = subscriptions().iter().filter(|entry| {
        entry.subscription_id.load(Ordering::Acquire) != 0 && elsewhere(&entry.database)
    });
    managers
        .map(|entry| {
            let all = [
                &entry.pid,
                &entry.collector_pid,
                &entry.group_pid,
                &entry.sequences_pid,
                &entry.versions_pid,
            ];
            all.into_iter().map(runs).sum::<usize>()
        })
        .sum::<usize>()
        + groups
            .map(|entry| {
                let appliers = entry.appliers.iter().map(|applier| runs(&applier.pid));
                runs(&entry.leader_pid) + appliers.sum::<usize>()
            })
            .sum::<usize>()
}

/// Releases the entries of databases that are gone, and of their subscriptions.
pub fn release_databases(existing: &[u32]) {
    let Some(shared) = shared() else { return };
    let gone = |database: u32| database != 0 && !existing.contains(&database);
    for entry in &shared.managers {
        let database = entry.database.load(Ordering::Acquire);
        if gone(database) {
            entry.poked.store(0, Ordering::SeqCst);
            release_manager(database);
        }
    }
    for entry in subscriptions() {
        let database = entry.database.load(Ordering::Acquire);
        if entry.subscription_id.load(Ordering::Acquire) != 0
            && gone(database)
            && find_manager(database).is_none()
        {
            release_subscription(entry);
        }
    }
}
