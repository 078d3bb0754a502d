//! When the group worker, the steps process and the sequences process run. Run by the manager.

use std::time::{Duration, Instant};

use braid_bgworker::policy;
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::{process, worker};

use super::SETTLED;

/// Pauses (ms) before a process that has ended, or could not be started, is started again: the
/// first, and the longest.
const PAUSES: [u64; 2] = [100, 5_000];

/// One process that is started again when it ends.
#[derive(Debug)]
struct Kept {
    name: &'static str,
    kind: &'static str,
    function: &'static str,
    running: Option<(worker::Handle, Instant)>,
    not_before: Option<Instant>,
    /// How often in a row it has ended soon after its start, or could not be started.
    failures: u32,
}

impl Kept {
    const fn new(name: &'static str, kind: &'static str, function: &'static str) -> Self {
        Self {
            name,
            kind,
            function,
            running: None,
            not_before: None,
            failures: 0,
        }
    }

    /// Has it run. If it is not wanted any more, `must_end` has it end; otherwise it does by
    /// itself. Shortens the manager's rest.
    fn tend(&mut self, wanted: bool, must_end: bool, wait: &mut Duration) {
        if let Some((handle, started)) = &self.running {
            if handle.status() != worker::Status::Ended {
                if !wanted && must_end {
                    handle.terminate();
                    *wait = (*wait).min(Duration::from_millis(100));
                }
                return;
            }
            if started.elapsed() > SETTLED {
                self.failures = 0;
            }
            self.running = None;
            self.pause();
        }
        if !wanted {
            self.not_before = None;
            return;
        }
        let left = self.not_before.map_or(Duration::ZERO, |at| {
            at.saturating_duration_since(Instant::now())
        });
        if !left.is_zero() {
            *wait = (*wait).min(left);
            return;
        }
        let started = worker::start(&worker::Worker {
            name: self.name,
            kind: self.kind,
            function: self.function,
            argument: process::my_database(),
            extra: worker::Extra::pack(&[]),
        });
        if let Some(handle) = started {
            self.running = Some((handle, Instant::now()));
            return;
        }
        PgError::new(
            SqlState::ConfigurationLimitExceeded,
            "no background worker is free",
        )
        .with_hint("Increase max_worker_processes and restart the server.")
        .log(self.name);
        *wait = (*wait).min(self.pause());
    }

    /// Returns how long it is not started again.
    fn pause(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let [first, most] = PAUSES;
        let pause = Duration::from_millis(policy::backoff_ms(self.failures, first, most));
        self.not_before = Some(Instant::now() + pause);
        pause
    }

    fn stop(&mut self) {
        if let Some((handle, _)) = self.running.take() {
            handle.terminate();
            if !handle.wait_ended(Duration::from_secs(10)) {
                pgrx::log!("{} is slow to end", self.name);
            }
        }
    }
}

/// The group's processes of one database.
#[derive(Debug)]
pub(super) struct Grouping {
    agreeing: Kept,
    steps: Kept,
    sequences: Kept,
    versions: Kept,
}

impl Default for Grouping {
    fn default() -> Self {
        Self {
            agreeing: Kept::new("braid group worker", "braid group", "braid_group_main"),
            steps: Kept::new(
                "braid group steps",
                "braid group steps",
                "braid_group_steps_main",
            ),
            sequences: Kept::new("braid sequences", "braid sequences", "braid_sequences_main"),
            versions: Kept::new("braid versions", "braid versions", "braid_versions_main"),
        }
    }
}

impl Grouping {
    /// Has the group worker run at a member, the sequences process at one that shares data, and the
    /// steps process while something is to be done.
    pub(super) fn tend(
        &mut self,
        is_member: bool,
        shares: bool,
        is_behind: bool,
        wait: &mut Duration,
    ) {
        self.agreeing.tend(is_member, true, wait);
        self.steps.tend(is_behind, !is_member, wait);
        self.sequences.tend(shares, true, wait);
    }

    /// Has the versions process run where tables are versioned. Otherwise it ends by itself, once
    /// its last transaction has ended.
    pub(super) fn tend_versions(&mut self, is_wanted: bool, wait: &mut Duration) {
        self.versions.tend(is_wanted, false, wait);
    }

    /// Ends all.
    pub(super) fn stop(&mut self) {
        self.agreeing.stop();
        self.steps.stop();
        self.sequences.stop();
        self.versions.stop();
    }
}
