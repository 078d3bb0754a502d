//! The subscription's tables while it streams: which of them are still to be copied, and by which
//! worker. Run by the leader.

use std::sync::atomic::Ordering;

use braid_bgworker::dictionary::Entry;
use braid_node::registry::SubscriptionEntry;
use braid_postgres::process;

use super::End;
use crate::copy::{Coordinator, Readiness};

/// The copies of a subscription that streams.
pub(super) struct Copies {
    coordinator: Coordinator,
    /// Tables that are not copied yet.
    outstanding: usize,
    /// Version of the catalog that the coordinator has read.
    catalog_version: u32,
    /// A publication is FOR ALL TABLES.
    take_all_tables: bool,
}

impl Copies {
    /// The coordinator has read the tables as of a version of the catalog: a change since then is
    /// looked at with the first turn.
    pub(super) fn new(
        (coordinator, catalog_version): (Coordinator, u32),
        take_all_tables: bool,
    ) -> Self {
        Self {
            coordinator,
            outstanding: usize::MAX,
            catalog_version,
            take_all_tables,
        }
    }

    /// Whether a publication is FOR ALL TABLES.
    pub(super) fn take_all_tables(&self) -> bool {
        self.take_all_tables
    }

    /// Whether all tables are copied.
    pub(super) fn are_done(&self) -> bool {
        self.outstanding == 0
    }

    /// Whether a table's changes may be applied.
    pub(super) fn readiness(&self, table: &Entry) -> Readiness {
        self.coordinator.readiness(table)
    }

    /// Whether a table is the subscription's, and is copied.
    pub(super) fn has(&self, table: &Entry) -> bool {
        self.coordinator.has(table)
    }

    /// Whether a table is known to be the subscription's.
    pub(super) fn knows(&self, table: &Entry) -> bool {
        self.coordinator.knows(table)
    }

    /// Whether a relation is the subscription's under this name.
    pub(super) fn is_member(&self, relation: u32, namespace: &str, name: &str) -> bool {
        self.coordinator.is_member(relation, namespace, name)
    }

    /// The catalog's rows about tables are others than before, and the coordinator and the appliers
    /// are to read them again.
    pub(super) fn rescan(&mut self, entry: &SubscriptionEntry) {
        self.coordinator.rescan();
        entry.tables_version.fetch_add(1, Ordering::AcqRel);
    }

    /// Reads the catalog again if tables may have been added or removed. No transaction in flight
    /// depends on it: the changes of an added table are skipped up to its copy.
    pub(super) fn follow_catalog(&mut self, entry: &SubscriptionEntry) {
        let catalog_version = entry.catalog_version.load(Ordering::Acquire);
        if catalog_version == self.catalog_version {
            return;
        }
        self.catalog_version = catalog_version;
        self.rescan(entry);
        // A parked transaction may have been given up.
        entry.parked_version.fetch_add(1, Ordering::AcqRel);
        process::set_latch(entry.first_applier_latch.load(Ordering::Acquire));
    }

    /// Starts and reaps workers that copy tables, and learns the tables' states.
    pub(super) fn poll(&mut self, entry: &SubscriptionEntry) -> Result<(), End> {
        let copy = self.coordinator.poll().map_err(End::Copy)?;
        self.outstanding = copy.waiting + copy.copying;
        if copy.copying == 0 {
            entry.copy_goes_on();
        }
        if copy.changed {
            entry.tables_version.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Ends the workers that copy.
    pub(super) fn stop(&mut self) {
        self.coordinator.stop();
    }
}
