//! What the provider is told: what is committed and durable here, that this end lives; and what is made of its silence.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::publishing::Unpublished;
use braid_node::registry::Activity;
use braid_node::{settings, subscription};
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};
use braid_postgres::wait::Wait;
use braid_postgres::{error, libpq};
use pgrx::pg_sys;

use super::provider_end::SIGN_OF_LIFE;
use super::stream::Stream;
use super::{End, confirmed};
use crate::durability::Durability;

/// Local WAL is flushed for confirmation this often. Whoever commits at the provider waits for it only if commits are to be
/// durable at once; the leader receives nothing meanwhile.
pub(super) const FLUSH_INTERVAL: Duration = Duration::from_millis(50);
/// The same where commits are to be durable at once.
const EAGER_FLUSH_INTERVAL: Duration = Duration::from_millis(1);
/// While the rate limit holds the stream back, positions are reported at least this often: well within any wal_sender_timeout.
const HELD_STATUS_INTERVAL: Duration = Duration::from_millis(500);
const RATE_INTERVAL: Duration = Duration::from_secs(2);
/// An answer on the second connection is looked for this often.
const ASKING: Duration = Duration::from_millis(100);
/// By which what is due after some time is looked at when that is over.
const A_MOMENT: Duration = Duration::from_millis(1);

pub(super) struct Rate {
    pub(super) at: Instant,
    pub(super) transactions: u64,
    pub(super) rows: u64,
}

impl Durability {
    pub(super) fn flush_interval(self) -> Duration {
        if self.is_eager() {
            EAGER_FLUSH_INTERVAL
        } else {
            FLUSH_INTERVAL
        }
    }
}

impl Stream {
    /// Take note of what is committed since the last time.
    pub(super) fn collect(&mut self) {
        let committed = self.group.ring.committed();
        let mut last_timestamp = None;
        while self.collected < committed {
            self.collected += 1;
            let (remote_end, local_end, timestamp) = self.producer.committed_at(self.collected);
            self.progress.applied(remote_end, local_end);
            last_timestamp = Some(timestamp);
        }
        if let Some(timestamp) = last_timestamp {
            let timestamp = timestamp.saturating_sub(EPOCH_DIFFERENCE);
            self.entry
                .last_commit_at
                .store(timestamp, Ordering::Relaxed);
        }
    }

    /// Report positions to the provider when they are wanted or have moved.
    pub(super) fn confirm(&mut self) -> Result<(), End> {
        let now = Instant::now();
        let idle = !self.in_flight();
        if let Some(local_end) = self.progress.unflushed()
            && ((idle && self.durability.is_eager())
                || now.duration_since(self.last_flush) > self.durability.flush_interval())
        {
            // One flush here for all that was committed, instead of one in each commit; waiting for the WAL writer
            // would hold up a provider whose commits wait for this node.
            // SAFETY: flushes WAL that exists up to a position that a commit here returned.
            unsafe { pg_sys::XLogFlush(local_end) };
            self.last_flush = now;
        }
        let flushed_here = self.durability.durable_up_to();
        let mut positions = self.progress.update(flushed_here, self.in_flight());
        positions.flushed = self.may_confirm(positions.flushed)?;
        let entry = self.entry;
        let moved = entry.flushed_lsn.swap(positions.flushed, Ordering::Relaxed)
            != positions.flushed
            || entry.applied_lsn.load(Ordering::Relaxed) != positions.applied;
        entry
            .applied_lsn
            .store(positions.applied, Ordering::Relaxed);
        let interval = settings::status_interval();
        let since = now.duration_since(self.last_feedback);
        let due = self.reply_wanted
            || (moved && (idle || since > self.durability.flush_interval()))
            || interval.is_some_and(|interval| since > interval);
        if !due {
            return Ok(());
        }
        self.last_feedback = now;
        self.reply_wanted = false;
        // A provider that has nothing to send, and is told that all has arrived, says no more for a long time, not even that this is all.
        let is_all = self.entry.activity() == Activity::CatchingUp && !self.in_flight();
        self.send_status(
            positions.received,
            positions.flushed,
            positions.applied,
            is_all,
        )
    }

    /// What of `flushed` may be confirmed; the bound of that is raised where it is too low.
    fn may_confirm(&mut self, flushed: u64) -> Result<u64, End> {
        if let Some(up_to) = self.lease.wanted(flushed, millis())
            && confirmed::extend(self.subscription.id, up_to)?
        {
            self.lease.extend(up_to, millis());
        }
        let allowed = self.lease.allowed(flushed);
        confirmed::reported(allowed);
        Ok(allowed)
    }

    pub(super) fn send_status(
        &mut self,
        write: u64,
        flush: u64,
        apply: u64,
        ping: bool,
    ) -> Result<(), End> {
        let message = status(write, flush, apply, ping);
        Ok(self.connection.put_copy_data(&message)?)
    }

    /// A status that says nothing new and asks for a reply.
    pub(super) fn status_for_reply(&self) -> Vec<u8> {
        let load = |position: &std::sync::atomic::AtomicU64| position.load(Ordering::Relaxed);
        let entry = self.entry;
        status(
            load(&entry.received_lsn),
            load(&entry.flushed_lsn),
            load(&entry.applied_lsn),
            true,
        )
    }

    /// Ask a silent provider for a sign of life; give it up after `wal_receiver_timeout`.
    pub(super) fn check_silence(&mut self) -> Result<(), End> {
        let timeout = libpq::receiver_timeout();
        let silence = self.last_message.elapsed();
        if timeout.is_some_and(|timeout| silence > timeout) {
            return Err(libpq::Error::Silent.into());
        }
        if silence > self.patience() && !self.ping_sent {
            self.ping_sent = true;
            let status = self.status_for_reply();
            self.connection.put_copy_data(&status)?;
        }
        Ok(())
    }

    /// After so long without a message the provider is asked for a sign of life. Questions for the time are answered by signs of life, too.
    fn patience(&self) -> Duration {
        let half = libpq::receiver_timeout().map_or(Duration::MAX, |timeout| timeout / 2);
        if self.clock_watch.is_asking() {
            half
        } else {
            half.min(SIGN_OF_LIFE)
        }
    }

    pub(super) fn measure(&mut self) {
        let elapsed = self.rate.at.elapsed();
        if elapsed < RATE_INTERVAL {
            return;
        }
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let entry = self.entry;
        let transactions = load(&entry.transactions);
        let rows = entry.rows();
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let per_second =
            |now: u64, before: u64| now.saturating_sub(before) as f64 / elapsed.as_secs_f64();
        let store = |place: &std::sync::atomic::AtomicU64, rate: f64| {
            place.store(rate.to_bits(), Ordering::Relaxed);
        };
        store(
            &entry.per_second.transactions,
            per_second(transactions, self.rate.transactions),
        );
        store(&entry.per_second.rows, per_second(rows, self.rate.rows));
        self.rate = Rate {
            at: Instant::now(),
            transactions,
            rows,
        };
        if entry.has_failed() && entry.activity() != Activity::Paused {
            // It has streamed for a while: what was wrong is over.
            entry.clear_failure();
        }
    }

    /// A subscription that had stopped is past what it stopped at.
    pub(super) fn forget_stop(&mut self) {
        let Some(lsn) = self.subscription.stopped_at else {
            return;
        };
        if self.entry.applied_lsn.load(Ordering::Relaxed) < lsn || self.copies > 0 {
            return;
        }
        self.subscription.stopped_at = None;
        match error::transaction(|| subscription::clear_error(self.subscription.id)) {
            Ok(()) => pgrx::log!(
                "subscription \"{}\" goes on after an error",
                self.subscription.name
            ),
            Err(failure) => failure.log("could not clear the error of a subscription"),
        }
    }

    /// Leave what the provider sends where it is for a while, so that it sends no more. Its requests for a sign of life lie there too:
    /// so it is given one without being asked.
    pub(super) fn hold_back(&mut self, pause: Duration) {
        self.last_message = Instant::now();
        self.report_while_held();
        if let Some(time) = self.time_to_rest() {
            self.limiter.wait(pause.min(time));
        }
    }

    /// Nobody sees what the provider asks for.
    pub(super) fn report_while_held(&mut self) {
        self.reply_wanted |= self.last_feedback.elapsed() > HELD_STATUS_INTERVAL;
    }

    pub(super) fn sleep(&mut self) {
        if let Some(time) = self.time_to_rest() {
            self.publish_schedule_now();
            self.socket_wait.wait(Wait::Provider, time);
        }
    }

    /// How long there is nothing to do but to receive; `None`: commits are there to be taken note of. Appliers set the latch when there
    /// will be.
    pub(super) fn time_to_rest(&self) -> Option<Duration> {
        // Nothing is to be done for each commit: when all are there, and every now and then.
        let last = self.group.ring.published();
        let until = if self.durability.is_eager() {
            last.min(self.collected + 1)
        } else {
            last
        };
        self.group.ring.leader_will_wait(until);
        if self.collected < until && self.group.ring.committed() >= until {
            return None;
        }
        if self.awaits_more() {
            return Some(Unpublished::MOMENT);
        }
        if self.in_flight() || self.progress.unflushed().is_some() {
            return Some(self.durability.flush_interval());
        }
        // Neither a sign of life, nor asking for one, may come late.
        let since_message = self.last_message.elapsed();
        if self.provider_end.is_asking() {
            return Some(ASKING);
        }
        let limit = if self.ping_sent {
            libpq::receiver_timeout()
        } else {
            Some(self.patience())
        };
        let silence = limit.map(|limit| limit.saturating_sub(since_message));
        let status = settings::status_interval()
            .map(|interval| interval.saturating_sub(self.last_feedback.elapsed()));
        let due = silence.into_iter().chain(status).min();
        Some(due.map_or(RATE_INTERVAL, |due| {
            due.saturating_add(A_MOMENT).min(RATE_INTERVAL)
        }))
    }
}

/// This node's clock, in milliseconds.
pub(super) fn millis() -> u64 {
    u64::try_from(timestamp::now() / 1000).unwrap_or(0)
}

/// The bytes of a status.
fn status(write: u64, flush: u64, apply: u64, ping: bool) -> Vec<u8> {
    let mut message = Vec::with_capacity(34);
    message.push(b'r');
    for position in [write, flush, apply] {
        message.extend_from_slice(&position.to_be_bytes());
    }
    message.extend_from_slice(&timestamp::now().to_be_bytes());
    message.push(u8::from(ping));
    message
}
