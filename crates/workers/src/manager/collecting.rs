//! When the collector of deletions runs. Run by the manager.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::policy;
use braid_bgworker::sqlstate::SqlState;
use braid_node::registry::ManagerEntry;
use braid_postgres::error::{self, PgError};
use braid_postgres::{process, worker};

use super::SETTLED;
use crate::collector;

/// Pauses (ms) before a collector that has ended, or could not be started, is started again: the
/// first, and the longest. Processes that need the collector wait longer than that
/// (`tombstone::waiting`).
const COLLECTOR_PAUSES: [u64; 2] = [100, 5_000];

/// The collector's process, and when it is started again.
#[derive(Debug, Default)]
pub(super) struct Collecting {
    process: Option<(worker::Handle, Instant)>,
    not_before: Option<Instant>,
    /// How often in a row it has ended soon after its start, or could not be started.
    failures: u32,
}

impl Collecting {
    /// Has the collector run, or end. Shortens the manager's rest.
    pub(super) fn tend(&mut self, wanted: bool, entry: &ManagerEntry, wait: &mut Duration) {
        entry.remembers_deletions.store(wanted, Ordering::Release);
        if let Some((handle, started)) = &self.process {
            if handle.status() != worker::Status::Ended {
                if !wanted {
                    handle.terminate();
                    *wait = (*wait).min(Duration::from_millis(100));
                } else {
                    // Tables may have come, or gone.
                    entry.collector_list_is_old.store(true, Ordering::Release);
                    process::set_latch(entry.collector_latch.load(Ordering::Acquire));
                }
                return;
            }
            if started.elapsed() > SETTLED {
                self.failures = 0;
            }
            self.process = None;
            self.pause();
        }
        if !wanted {
            self.not_before = None;
            drop_slot();
            return;
        }
        if let Some(at) = self.not_before {
            let left = at.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                *wait = (*wait).min(left);
                return;
            }
        }
        let started = worker::start(&worker::Worker {
            name: "braid collector of deletions",
            kind: "braid collector",
            function: "braid_collector_main",
            argument: process::my_database(),
            extra: worker::Extra::pack(&[]),
        });
        if let Some(handle) = started {
            self.process = Some((handle, Instant::now()));
            return;
        }
        PgError::new(SqlState::ConfigurationLimitExceeded, "no background worker is free")
            .with_detail("Local deletions are not collected: an older change from another node can bring back a row that was deleted here.")
            .with_hint("Increase max_worker_processes and restart the server.")
            .log("braid collector of deletions");
        *wait = (*wait).min(self.pause());
    }

    /// The collector has ended, or could not be started: how long it is not started again.
    fn pause(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let [first, most] = COLLECTOR_PAUSES;
        let pause = Duration::from_millis(policy::backoff_ms(self.failures, first, most));
        self.not_before = Some(Instant::now() + pause);
        pause
    }

    /// Ends the collector, and drops its slot.
    pub(super) fn stop(&mut self) {
        if let Some((collector, _)) = self.process.take() {
            collector.terminate();
            if !collector.wait_ended(Duration::from_secs(10)) {
                pgrx::log!("the collector of deletions is slow to end");
            }
        }
        drop_slot();
    }
}

fn drop_slot() {
    let database = process::my_database();
    if let Err(failure) = error::transaction(|| collector::drop_slot(database)) {
        failure.log("could not drop the slot of the collector of deletions");
    }
}
