//! Finds the dependencies of the current transaction: its keys and barriers enter the dependency
//! tracker in the order of the stream. Run by the leader.
//!
//! How the changes of a relation are ordered depends on this node's table, too (`TableOrders`).
//! `Schedule` counts the results.

use braid_bgworker::dependency::{DependencyTracker, Edges};
use braid_bgworker::table_order::TableOrder;
use braid_gir::{ChangeHeader, Schema};
use braid_node::registry::ScheduleCounters;
use braid_node::registry::SubscriptionEntry;
use braid_node::table_order::TableOrders;
use braid_postgres::error::PgError;
use braid_ring::{EDGES, Ring};
use pgrx::pg_sys;
use std::sync::atomic::Ordering;

use super::schedule::{Barrier, Schedule};
use super::{End, out_of_order};

/// Keys that the dependency tracker remembers.
const TRACKED_KEYS: usize = 200_000;

/// The tracker, with the table orders that it needs and the counts of its results.
pub(super) struct Scheduling {
    tracker: DependencyTracker,
    orders: TableOrders,
    schedule: Schedule,
}

impl Scheduling {
    /// Nothing has come yet.
    pub(super) fn new() -> Self {
        Self {
            tracker: DependencyTracker::new(TRACKED_KEYS),
            orders: TableOrders::new(),
            schedule: Schedule::new(),
        }
    }

    /// A relation has come.
    pub(super) fn learn(&mut self, schema: &Schema<'_>) {
        self.orders.learn(schema);
    }

    /// Whether the order of a relation's changes is known.
    pub(super) fn is_known(&self, schema: u32) -> bool {
        self.orders.is_known(schema)
    }

    /// Looks up how a relation's changes are ordered, which go to a table. Run in a transaction.
    pub(super) fn look(&mut self, schema: u32, table: pg_sys::Oid) -> Result<(), PgError> {
        self.orders.look(schema, table)
    }

    /// Whether the changes of a relation are ordered by their keys alone.
    pub(super) fn is_by_keys(&mut self, schema: u32) -> Result<bool, End> {
        let (_, order) = self.orders.of(schema)?.ok_or_else(out_of_order)?;
        Ok(*order == TableOrder::Keys)
    }

    /// Begins a transaction; all up to `committed` are committed on this node.
    pub(super) fn begin(&mut self, sequence: u64, committed: u64) {
        self.orders.refresh();
        self.tracker.begin(sequence, committed);
    }

    /// Adds a row change of the current transaction. Returns whether its keys alone order the
    /// change.
    pub(super) fn change(&mut self, header: &ChangeHeader<'_>) -> Result<bool, End> {
        let (table, order) = self.orders.of(header.schema.0)?.ok_or_else(out_of_order)?;
        let by_keys = match order {
            TableOrder::Keys if !header.barrier => true,
            TableOrder::Keys => {
                self.schedule.saw(Barrier::Unkeyed);
                self.tracker.barrier(table);
                false
            }
            TableOrder::Table { .. } => {
                self.schedule.saw(Barrier::Index);
                self.tracker.barrier(table);
                false
            }
            TableOrder::Everything { .. } => {
                self.schedule.saw(Barrier::Trigger);
                self.tracker.barrier_for_all();
                false
            }
        };
        self.tracker.change(table, header.writeset.hashes());
        Ok(by_keys)
    }

    /// Adds a TRUNCATE of the current transaction.
    pub(super) fn truncate(&mut self, schema: u32) -> Result<(), End> {
        let (table, order) = self.orders.of(schema)?.ok_or_else(out_of_order)?;
        self.schedule.saw(Barrier::Truncate);
        match order {
            TableOrder::Keys | TableOrder::Table { .. } => self.tracker.barrier(table),
            TableOrder::Everything { .. } => {
                self.schedule.saw(Barrier::Trigger);
                self.tracker.barrier_for_all();
            }
        }
        Ok(())
    }

    /// Orders the current transaction after all before it, and before all after it.
    pub(super) fn barrier_for_all(&mut self) {
        self.tracker.barrier_for_all();
    }

    /// Orders it like `barrier_for_all`, as it is applied in chunks, or while it arrives.
    pub(super) fn too_large(&mut self) {
        self.tracker.too_large();
    }

    /// The current transaction is not applied, and leaves no trace.
    pub(super) fn abandon(&mut self) {
        self.tracker.abandon();
        self.schedule.abandoned();
    }

    /// Ends the current transaction. Returns its dependencies.
    pub(super) fn finish(&mut self, counters: &ScheduleCounters) -> Edges<'_> {
        self.schedule.entered(counters);
        self.tracker.finish().at_most(EDGES)
    }

    /// Publishes the counts, if it is time to, or `now`: before a sleep of unknown length.
    pub(super) fn publish(&mut self, now: bool, ring: Ring, entry: &SubscriptionEntry) {
        if !now && !self.schedule.is_due() {
            return;
        }
        let counters = &entry.schedule;
        let taking = ring.takers().len() as u64;
        counters.taking.store(taking, Ordering::Relaxed);
        let tracker = &self.tracker;
        self.schedule.publish(
            tracker.statistics(),
            || tracker.width(ring.committed()),
            counters,
        );
    }
}
