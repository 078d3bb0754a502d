//! Counts of rows that a transaction has written. Run by the processes that apply changes.

use std::sync::atomic::{AtomicU64, Ordering};

use braid_node::registry::{self, SubscriptionEntry};

use super::Session;
use super::attempt::Uncounted;
use super::target::Key;

/// Counts of a transaction, for the shared counters.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Inserted.
    pub inserts: u64,
    /// Updated.
    pub updates: u64,
    /// Deleted.
    pub deletes: u64,
    /// Tables truncated.
    pub truncates: u64,
    /// Conflicts.
    pub conflicts: u64,
    /// Changes in whose place a later one of the same row was written.
    pub consolidated: u64,
    /// Questions to other nodes.
    pub questions: u64,
    /// Column values that came in answer.
    pub fetched: u64,
}

impl Counts {
    /// Returns the number of all changes.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.inserts + self.updates + self.deletes + self.truncates
    }
}

impl Session {
    /// Returns the counts of the current attempt.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.attempt
            .as_ref()
            .map_or_else(Counts::default, |attempt| attempt.counts)
    }

    /// Adds the counts of the committed transaction to the shared counters.
    pub fn publish_counts(&mut self, entry: &SubscriptionEntry) {
        entry.transactions.fetch_add(1, Ordering::Relaxed);
        self.publish_changes(entry);
    }

    /// Adds the changes of a committed transaction, or of a chunk of one, to the shared counters.
    pub(super) fn publish_changes(&mut self, entry: &SubscriptionEntry) {
        let add = |counter: &AtomicU64, count: u64| {
            if count > 0 {
                counter.fetch_add(count, Ordering::Relaxed);
            }
        };
        let Uncounted {
            counts,
            tables,
            truncated,
        } = &mut self.uncounted;
        let counts = std::mem::take(counts);
        add(&entry.inserts, counts.inserts);
        add(&entry.updates, counts.updates);
        add(&entry.deletes, counts.deletes);
        add(&entry.truncates, counts.truncates);
        add(&entry.conflicts, counts.conflicts);
        add(&entry.schedule.consolidated, counts.consolidated);
        add(&entry.questions, counts.questions);
        add(&entry.fetched, counts.fetched);
        let subscription = self.identity.subscription_id;
        for key in tables.drain(..) {
            let Some(target) = self.tables.get_mut(key) else {
                continue;
            };
            let counts = std::mem::take(&mut target.counts);
            if target.counters.is_none() {
                target.counters = registry::table(subscription, key.1);
            }
            if let Some(table) = target.counters {
                add(&table.inserts, counts.inserts);
                add(&table.updates, counts.updates);
                add(&table.deletes, counts.deletes);
                add(&table.conflicts, counts.conflicts);
            }
        }
        for relation in truncated.drain(..) {
            if let Some(table) = registry::table(subscription, relation) {
                add(&table.truncates, 1);
            }
        }
    }

    pub(super) fn count(&mut self, key: Key, add: impl Fn(&mut Counts)) {
        add(&mut self.attempt().counts);
        if let Some(target) = self.tables.get_mut(key) {
            add(&mut target.counts);
        }
    }
}
