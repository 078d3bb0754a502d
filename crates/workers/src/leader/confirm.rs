//! Reports to the provider what is committed and durable on this node, and that the leader is
//! alive. Also decides what a silent provider means.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::contact::{News, Silence};
use braid_bgworker::publishing::Unpublished;
use braid_node::registry::Activity;
use braid_node::{settings, subscription};
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};
use braid_postgres::wait::Wait;
use braid_postgres::{error, libpq};

use super::End;
use super::provider_end::SIGN_OF_LIFE;
use super::reception::Reception;

/// The leader looks around this often, whatever comes.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// An answer on the second connection is looked for this often.
const ASKING: Duration = Duration::from_millis(100);
/// Work that is due after some time is done when this time is over.
const A_MOMENT: Duration = Duration::from_millis(1);

impl Reception {
    /// Takes note of the commits since the last call.
    pub(super) fn collect(&mut self) {
        let committed = self.group.ring.committed();
        if let Some(timestamp) = self.confirmation.collect(committed, &mut self.producer) {
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
        self.confirmation.flush(now, idle);
        let positions = self.confirmation.positions(self.subscription.id, !idle)?;
        let entry = self.entry;
        let moved = entry.flushed_lsn.swap(positions.flushed, Ordering::Relaxed)
            != positions.flushed
            || entry.applied_lsn.load(Ordering::Relaxed) != positions.applied;
        entry
            .applied_lsn
            .store(positions.applied, Ordering::Relaxed);
        let news = News {
            moved,
            idle,
            pause: self.confirmation.pause(),
            longest: settings::status_interval(),
        };
        if !self.contact.is_due(now, news) {
            return Ok(());
        }
        self.contact.reported(now);
        // A provider that has nothing to send, and knows that all was received, may stay silent for
        // a long time. So ask it to reply that this is all.
        let is_all = self.entry.activity() == Activity::CatchingUp && !self.in_flight();
        self.send_status(
            positions.received,
            positions.flushed,
            positions.applied,
            is_all,
        )
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
        let patience = self.patience();
        match self
            .contact
            .judge(Instant::now(), libpq::receiver_timeout(), patience)
        {
            Silence::Bear => Ok(()),
            Silence::Ask => {
                let status = self.status_for_reply();
                Ok(self.connection.put_copy_data(&status)?)
            }
            Silence::GiveUp => Err(libpq::Error::Silent.into()),
        }
    }

    /// After so long without a message the provider is asked for a sign of life. Questions for the
    /// time are answered by signs of life, too.
    fn patience(&self) -> Duration {
        let half = libpq::receiver_timeout().map_or(Duration::MAX, |timeout| timeout / 2);
        if self.clock_watch.is_asking() {
            half
        } else {
            half.min(SIGN_OF_LIFE)
        }
    }

    pub(super) fn measure(&mut self) {
        let now = Instant::now();
        if !self.throughput.is_due(now) {
            return;
        }
        let entry = self.entry;
        let transactions = entry.transactions.load(Ordering::Relaxed);
        let rates = self.throughput.look(now, transactions, entry.rows());
        for (place, rate) in [
            (&entry.per_second.transactions, rates.transactions),
            (&entry.per_second.rows, rates.rows),
        ] {
            place.store(rate.to_bits(), Ordering::Relaxed);
        }
        if entry.has_failed() && entry.activity() != Activity::Paused {
            // The subscription has streamed for a while, so the failure is over.
            entry.clear_failure();
        }
    }

    /// Forgets the stop, if the subscription is past the transaction at which it had stopped.
    pub(super) fn forget_stop(&mut self) {
        let Some(lsn) = self.subscription.stopped_at else {
            return;
        };
        if self.entry.applied_lsn.load(Ordering::Relaxed) < lsn || !self.copies.are_done() {
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

    /// Leaves the provider's messages in the socket for a while, so that the provider stops
    /// sending. Its requests for a sign of life wait in the socket, too: so the leader reports
    /// without being asked.
    pub(super) fn hold_back(&mut self, pause: Duration) {
        self.contact.looked_away(Instant::now());
        self.report_while_held();
        if let Some(time) = self.time_to_rest() {
            self.intake.wait(pause.min(time));
        }
    }

    /// Reports unasked, as the provider's requests are not read.
    pub(super) fn report_while_held(&mut self) {
        self.contact.report_unasked(Instant::now());
    }

    pub(super) fn sleep(&mut self) {
        if let Some(time) = self.time_to_rest() {
            self.publish_schedule(true);
            self.socket_wait.wait(Wait::Provider, time);
        }
    }

    /// How long the leader has nothing to do but receive. `None`: there are commits to take note
    /// of. Appliers set the latch when there are new ones.
    pub(super) fn time_to_rest(&self) -> Option<Duration> {
        // The leader need not wake for each commit: it wakes when all are committed, and from time
        // to time.
        let published = self.group.ring.published();
        let until = self.confirmation.next_of_interest(published);
        self.group.ring.leader_will_wait(until);
        if self.confirmation.collected() < until && self.group.ring.committed() >= until {
            return None;
        }
        if self.awaits_more() {
            return Some(Unpublished::MOMENT);
        }
        if self.in_flight() || self.confirmation.is_behind() {
            return Some(self.confirmation.pause());
        }
        if self.provider_end.is_asking() {
            return Some(ASKING);
        }
        // Neither a sign of life, nor asking for one, may come late.
        let due = self.contact.time_to_rest(
            Instant::now(),
            libpq::receiver_timeout(),
            self.patience(),
            settings::status_interval(),
        );
        Some(due.map_or(LONGEST_REST, |due| {
            due.saturating_add(A_MOMENT).min(LONGEST_REST)
        }))
    }
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
