//! The appliers of a subscription: started, made more or fewer, ended. Run by the leader.
//!
//! The group's memory is laid out for the maximum, so the number of appliers changes while the
//! group works. An applier that is to leave claims no more transactions, and ends when it has no
//! current one. No applier is terminated before the whole group is.

use std::mem::Discriminant;
use std::time::{Duration, Instant};

use braid_bgworker::scaling::{Decision, Limits, Reason, Rule, Sample, Scaler};
use braid_bgworker::sqlstate::SqlState;
use braid_node::registry::{RecordedDecision, SubscriptionEntry};
use braid_node::settings;
use braid_postgres::error::PgError;
use braid_postgres::{process, worker};
use braid_ring::{ApplierState, Ring};

use crate::applier::Arguments;

/// How often the number is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// States of the appliers, counted since the last look.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    glances: u32,
    busy: u32,
    waiting: u32,
}

/// The appliers.
#[derive(Debug)]
pub struct Appliers {
    subscription_id: u32,
    subscription: String,
    handle: u32,
    ring: Ring,
    entry: &'static SubscriptionEntry,
    /// The appliers that have been started and have not ended, by number.
    workers: Vec<Option<worker::Handle>>,
    scaler: Scaler,
    /// Not more: no worker was free for another one.
    cap: usize,
    began: Instant,
    last_look: Instant,
    rows: u64,
    seen: Seen,
    /// Why there were to be no more appliers, when that was kept last.
    refused: Option<Discriminant<Reason>>,
}

fn limits(most: usize) -> Limits {
    Limits {
        minimum: settings::min_appliers_per_subscription()
            .unwrap_or(most)
            .min(most),
        maximum: most,
        rows_per_applier: settings::rows_per_applier(),
    }
}

/// Start an applier's process; `None` when no worker is free.
pub(crate) fn start_process(arguments: Arguments, subscription: &str) -> Option<worker::Handle> {
    let name = format!(
        "braid applier {} of subscription {subscription}",
        arguments.number
    );
    worker::start(&worker::Worker {
        name: &name,
        kind: "braid applier",
        function: "braid_applier_main",
        argument: process::my_database(),
        extra: arguments.pack(),
    })
}

impl Appliers {
    /// Start as many as there are to be at least, of at most `most`, for which the ring is laid
    /// out.
    ///
    /// # Errors
    /// 53400 when no worker is free for one of them.
    pub fn start(
        subscription: (u32, &str),
        handle: u32,
        ring: Ring,
        entry: &'static SubscriptionEntry,
        most: usize,
    ) -> Result<Self, PgError> {
        let now = Instant::now();
        let scaler = Scaler::new(Rule::default(), limits(most), 1);
        let mut appliers = Self {
            subscription_id: subscription.0,
            subscription: subscription.1.to_owned(),
            handle,
            ring,
            entry,
            workers: (0..most).map(|_| None).collect(),
            scaler,
            cap: most,
            began: now,
            last_look: now,
            rows: 0,
            seen: Seen::default(),
            refused: None,
        };
        let count = appliers.scaler.appliers();
        appliers.ring.set_active_appliers(count);
        if !appliers.start_up_to(count) {
            appliers.stop();
            return Err(PgError::new(
                SqlState::ConfigurationLimitExceeded,
                "no background worker is free to apply changes",
            )
            .with_hint("Increase max_worker_processes and restart the server."));
        }
        Ok(appliers)
    }

    /// Starts the appliers with numbers below `count` that are missing. Returns false if one could
    /// not be started.
    fn start_up_to(&mut self, count: usize) -> bool {
        for (number, place) in self.workers.iter_mut().enumerate().take(count) {
            if place.is_some() {
                continue;
            }
            let arguments = Arguments {
                subscription_id: self.subscription_id,
                number,
                handle: self.handle,
                running: false,
            };
            *place = start_process(arguments, &self.subscription);
            if place.is_none() {
                return false;
            }
        }
        true
    }

    /// End them all.
    pub fn stop(&mut self) {
        self.ring.request_stop();
        for latch in self.ring.all_appliers().iter() {
            process::set_latch(latch);
        }
        for worker in self.workers.iter().flatten() {
            worker.terminate();
        }
        for worker in self.workers.iter_mut().filter_map(Option::take) {
            if !worker.wait_ended(Duration::from_secs(10)) {
                pgrx::log!(
                    "an applier of subscription \"{}\" is slow to end",
                    self.subscription
                );
            }
        }
    }

    /// Whether one has ended that was not to.
    pub fn has_lost_one(&mut self) -> bool {
        let active = self.ring.active_appliers();
        for (number, place) in self.workers.iter_mut().enumerate() {
            let ended = place
                .as_ref()
                .is_some_and(|worker| worker.status() == worker::Status::Ended);
            if ended && number < active {
                return true;
            }
            if ended {
                *place = None;
            }
        }
        false
    }

    /// Counts the states of the appliers, and from time to time decides on their number.
    pub fn tend(&mut self) {
        let active = self.ring.active_appliers();
        // Counts all appliers, also those that wait while one claims everything (`Ring::takers`).
        // In that state all appliers together are no faster, so more would not be either. One
        // applier that is always busy, measured by itself, would keep asking for more.
        for applier in self.entry.appliers.iter().take(active) {
            self.seen.glances += 1;
            match applier.state() {
                ApplierState::Absent | ApplierState::Idle => {}
                ApplierState::Applying => self.seen.busy += 1,
                ApplierState::WaitingForDependency | ApplierState::WaitingForTurn => {
                    self.seen.busy += 1;
                    self.seen.waiting += 1;
                }
            }
        }
        let since = self.last_look.elapsed();
        // Appliers that are to leave must be gone before others can have their numbers.
        let leaving = self.workers.iter().skip(active).any(Option::is_some);
        if since >= LOOK_INTERVAL && !leaving {
            self.look(since);
        }
    }

    fn look(&mut self, since: Duration) {
        for applier in &self.entry.appliers {
            applier.look();
        }
        let rows = self.entry.rows();
        let done = u32::try_from(rows.saturating_sub(self.rows)).unwrap_or(u32::MAX);
        let seen = std::mem::take(&mut self.seen);
        let share = |part: u32| f64::from(part) / f64::from(seen.glances.max(1));
        self.last_look = Instant::now();
        self.rows = rows;
        let limits = limits(self.cap);
        self.scaler.set_limits(limits);
        if limits.minimum == limits.maximum && self.scaler.appliers() == limits.maximum {
            return;
        }
        let decision = self.scaler.look(Sample {
            at: self.began.elapsed(),
            busy: share(seen.busy),
            waiting: share(seen.waiting),
            rows_per_second: f64::from(done) / since.as_secs_f64(),
        });
        worker::report_activity(&format!(
            "subscription {}: {} appliers, {}",
            self.subscription, decision.to, decision.reason
        ));
        if !decision.is_change() {
            if decision.is_refusal() {
                self.record_refusal(&decision);
            }
            return;
        }
        pgrx::log!(
            "subscription \"{}\" has {} appliers instead of {}: {}",
            self.subscription,
            decision.to,
            decision.from,
            decision.reason
        );
        // Before any is started: an applier whose number is not among the active ones ends.
        self.ring.set_active_appliers(decision.to);
        if decision.to > decision.from && !self.start_up_to(decision.to) {
            self.cap = self
                .workers
                .iter()
                .take_while(|worker| worker.is_some())
                .count();
            pgrx::log!(
                "subscription \"{}\" stays with {} appliers: no background worker is free (max_worker_processes)",
                self.subscription,
                self.cap
            );
        }
        let to = decision.to.min(self.cap);
        let mut reason = decision.reason.to_string();
        if to < decision.to {
            reason.push_str("; no background worker is free (max_worker_processes)");
        }
        self.record(&decision, to, reason);
        self.refused = None;
        self.ring.set_active_appliers(to);
        // Some have more to claim; the others have to see that they are to end.
        for latch in self.ring.all_appliers().iter() {
            process::set_latch(latch);
        }
    }

    /// Keep a decision for the views.
    fn record(&self, decision: &Decision, to: usize, reason: String) {
        let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        self.entry.record_decision(&RecordedDecision {
            at: 0,
            from: small(decision.from),
            to: small(to),
            utilisation: decision.busy,
            rows_per_second: decision.rows_per_second,
            reason,
        });
    }

    /// Keep a decision against more appliers, once for each reason between two changes: it is made
    /// again each second.
    fn record_refusal(&mut self, decision: &Decision) {
        let kind = std::mem::discriminant(&decision.reason);
        if self.refused.replace(kind) != Some(kind) {
            self.record(decision, decision.to, decision.reason.to_string());
        }
    }
}
