//! Making the manager, or the sequences process, look at the catalog when the transaction that
//! changed it commits, and not before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use braid_postgres::process;
use braid_postgres::transaction::{self, End};

use crate::registry;

/// A change of a subscription that its leader minds from the commit on.
enum Change {
    /// The limit of its rate: rows and bytes a second.
    Limit(u64, u64),
    /// The subscription's options.
    Options,
}

/// The subscriptions that the current transaction has changed, by their numbers.
static CHANGES: Mutex<Vec<(u32, Change)>> = Mutex::new(Vec::new());
static WANTED: AtomicBool = AtomicBool::new(false);
/// Whether sequences are to be looked at.
static SEQUENCES: AtomicBool = AtomicBool::new(false);
static REGISTERED: AtomicBool = AtomicBool::new(false);

fn at_end_of_transaction(end: End) {
    let of_sequences = match end {
        End::Committed | End::RolledBack | End::Prepared => {
            SEQUENCES.swap(false, Ordering::Relaxed)
        }
        _ => false,
    };
    if of_sequences && end == End::Committed {
        registry::wake_sequences(process::my_database());
    }
    match end {
        End::Committed if WANTED.swap(false, Ordering::Relaxed) => {
            for (id, change) in changes() {
                match (registry::subscription(id), change) {
                    (Some(entry), Change::Limit(rows, bytes)) => entry.rate_limit.set(rows, bytes),
                    (Some(entry), Change::Options) => entry.alter(),
                    (None, _) => {}
                }
            }
            registry::poke(process::my_database());
        }
        End::RolledBack | End::Prepared => {
            WANTED.store(false, Ordering::Relaxed);
            drop(changes());
        }
        _ => {}
    }
}

fn changes() -> Vec<(u32, Change)> {
    std::mem::take(&mut CHANGES.lock().unwrap_or_else(PoisonError::into_inner))
}

fn at_commit(subscription: u32, change: Change) {
    CHANGES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push((subscription, change));
    manager_at_commit();
}

/// As [`manager_at_commit`]; a leader that runs begins no transaction with the options that this
/// subscription had before the commit.
pub fn alter_at_commit(subscription: u32) {
    at_commit(subscription, Change::Options);
}

/// Like [`manager_at_commit`]. Also, a running leader keeps to this limit (rows and bytes a second,
/// 0 for none) from the commit on. If only a part of the transaction is rolled back, the manager
/// corrects a wrong limit.
pub fn limit_at_commit(subscription: u32, rows: u64, bytes: u64) {
    at_commit(subscription, Change::Limit(rows, bytes));
}

/// When the current transaction commits, wake this database's manager; when it rolls back, do
/// nothing.
pub fn manager_at_commit() {
    WANTED.store(true, Ordering::Relaxed);
    register();
}

/// When the current transaction commits, wake this database's sequences process; when it rolls
/// back, do nothing.
pub fn sequences_at_commit() {
    SEQUENCES.store(true, Ordering::Relaxed);
    register();
}

fn register() {
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        transaction::on_end(at_end_of_transaction);
    }
}
