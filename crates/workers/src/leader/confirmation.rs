//! Decides what may be confirmed to the provider: what is committed on this node, durable as the
//! subscription demands, and within the bound that is stored durably (`confirmed`). Run by the
//! leader.

use std::time::{Duration, Instant};

use braid_bgworker::lease::Lease;
use braid_bgworker::progress::{Positions, Progress};
use braid_postgres::error::PgError;
use braid_postgres::{timestamp, wal};
use braid_ring::Leader as Producer;

use super::confirmed::{self, Bounds};
use crate::durability::Durability;

/// Local WAL is flushed for confirmation this often. A commit at the provider waits for it only if
/// commits are to be durable at once. The leader receives nothing while it flushes.
pub(super) const FLUSH_INTERVAL: Duration = Duration::from_millis(50);
/// The interval if commits are to be durable at once.
const EAGER_FLUSH_INTERVAL: Duration = Duration::from_millis(1);
/// While the confirmation is held back for others, this is checked at this interval.
const HELD_INTERVAL: Duration = Duration::from_secs(1);

/// Local commits, and how much of them may be confirmed.
pub(super) struct Confirmation {
    durability: Durability,
    progress: Progress,
    /// Up to where may be confirmed.
    lease: Lease,
    /// No position beyond this is confirmed: another node needs what comes after it.
    held: Option<u64>,
    looked_at: Instant,
    /// Commits that were taken note of.
    collected: u64,
    last_flush: Instant,
}

impl Confirmation {
    /// Everything before `start` is applied on this node, by commits that are on this server's disk
    /// and end before `applied_up_to`. Standbys may be required as well. `bounds` limits what is
    /// confirmed.
    pub(super) fn new(
        durability: Durability,
        (start, applied_up_to): (u64, u64),
        bounds: Bounds,
        now: Instant,
    ) -> Self {
        Self {
            durability,
            progress: Progress::new(start, applied_up_to),
            lease: Lease::new(bounds.up_to, millis()),
            held: bounds.held,
            looked_at: now,
            collected: 0,
            last_flush: now,
        }
    }

    /// The stream has reached `position`.
    pub(super) fn received(&mut self, position: u64) {
        self.progress.received(position);
    }

    /// How many commits were taken note of.
    pub(super) fn collected(&self) -> u64 {
        self.collected
    }

    /// Takes note of the transactions up to `committed`. Returns when the last of them was
    /// committed at the provider.
    pub(super) fn collect(&mut self, committed: u64, producer: &mut Producer) -> Option<i64> {
        let mut last_timestamp = None;
        while self.collected < committed {
            self.collected += 1;
            let (remote_end, local_end, timestamp) = producer.committed_at(self.collected);
            self.progress.applied(remote_end, local_end);
            last_timestamp = Some(timestamp);
        }
        last_timestamp
    }

    /// The commit that the leader looks for next, of those that are published.
    pub(super) fn next_of_interest(&self, published: u64) -> u64 {
        if self.durability.is_eager() {
            published.min(self.collected + 1)
        } else {
            published
        }
    }

    /// Whether local commits are not durable yet.
    pub(super) fn is_behind(&self) -> bool {
        self.progress.unflushed().is_some()
    }

    /// How long commits may wait to be made durable, and to be reported.
    pub(super) fn pause(&self) -> Duration {
        if self.durability.is_eager() {
            EAGER_FLUSH_INTERVAL
        } else {
            FLUSH_INTERVAL
        }
    }

    /// Makes commits durable, if it is time to. `idle`: there are no others in flight.
    pub(super) fn flush(&mut self, now: Instant, idle: bool) {
        if let Some(local_end) = self.progress.unflushed()
            && ((idle && self.durability.is_eager())
                || now.duration_since(self.last_flush) > self.pause())
        {
            // One flush for all commits, instead of one in each commit; waiting for the WAL writer
            // would delay a provider whose commits wait for this node.
            wal::flush(local_end);
            self.last_flush = now;
        }
    }

    /// Returns the positions to report, and raises the bound of what may be confirmed if it is too
    /// low.
    pub(super) fn positions(
        &mut self,
        subscription: u32,
        in_flight: bool,
    ) -> Result<Positions, PgError> {
        let mut positions = self
            .progress
            .update(self.durability.durable_up_to(), in_flight);
        if let Some(held) = self.held {
            positions.flushed = positions.flushed.min(held);
            if self.looked_at.elapsed() > HELD_INTERVAL {
                self.looked_at = Instant::now();
                self.held = confirmed::held_now(subscription)?.map(|now| now.max(held));
            }
        }
        if let Some(up_to) = self.lease.wanted(positions.flushed, millis())
            && confirmed::extend(subscription, up_to)?
        {
            self.lease.extend(up_to, millis());
        }
        positions.flushed = self.lease.allowed(positions.flushed);
        confirmed::reported(positions.flushed);
        Ok(positions)
    }
}

/// This node's clock, in milliseconds.
fn millis() -> u64 {
    u64::try_from(timestamp::now() / 1000).unwrap_or(0)
}
