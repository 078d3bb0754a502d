//! The reception of a leader: the stream of a subscription, the parts that look after it, and the
//! loop that tends to them.
//!
//! Each part has an interface of its own. `dictionary` and `resumption` (`braid_bgworker`) have the
//! schemas of the stream and the position where it resumes. `scheduling` has dependencies,
//! `handout` hands transactions out, `confirmation` has what is confirmed, and `contact`
//! (`braid_bgworker`) when.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

use braid_bgworker::contact::Contact;
use braid_bgworker::dictionary::Dictionary;
use braid_bgworker::policy::{self, Policy};
use braid_bgworker::reason::Reason;
use braid_bgworker::resumption::{HalfApplied, Resumption};
use braid_bgworker::sql_text::{quote_identifier, quote_option};
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::{ApplyMode, Streaming};
use braid_bgworker::throughput::Throughput;
use braid_gir::lsn_text;
use braid_node::group::Group;
use braid_node::rate_limit::Limiter;
use braid_node::registry::{Activity, SubscriptionEntry};
use braid_node::subscription::{self, Subscription, publication_list};
use braid_node::{applied, crash, origin, prepared, settings, split};
use braid_postgres::error::{self, PgError};
use braid_postgres::latch::SocketWait;
use braid_postgres::libpq::{self, Connection, CopyData, Mode};
use braid_postgres::{process, server, timestamp, worker};
use braid_ring::Leader as Producer;

use super::confirmation::Confirmation;
use super::copies::Copies;
use super::handout::Handout;
use super::intake::Intake;
use super::provider::check_provider;
use super::provider_end::{self, ProviderEnd};
use super::running::Watch;
use super::scheduling::Scheduling;
use super::segments::Segments;
use super::skew::ClockWatch;
use super::spread::Spread;
use super::untangle::Tangle;
use super::{End, confirmed};
use crate::applier;
use crate::applier::here::LeadersApplier;
use crate::appliers::Appliers;
use crate::copy::Coordinator;
use crate::durability::Durability;

/// The transaction that is being received.
pub(super) struct InHand {
    pub(super) begin_commit_lsn: u64,
    pub(super) commit_timestamp: i64,
    pub(super) changes: u32,
    pub(super) discard: bool,
    pub(super) skip: bool,
    /// The transaction may be committed in chunks, whatever the number of its changes: that number
    /// is not known, or some chunks are committed already.
    pub(super) split: bool,
    /// The transaction was streamed while in progress: its keys were hashed at another time than
    /// those of its neighbours.
    pub(super) streamed: bool,
    /// The transaction ends in PREPARE, or ends a prepared one. It is applied alone. The bytes are
    /// the record that replaces it if its content is to be left out.
    pub(super) two_phase: Option<Vec<u8>>,
    /// The transaction only changes rows by their keys, in tables that are ready, and runs no
    /// users' triggers.
    pub(super) is_plain: bool,
    /// The transaction sets a rule for conflicts.
    pub(super) has_rule: bool,
    /// The transaction changes the schema: all earlier ones are applied before it, and all later
    /// ones are examined afterwards.
    pub(super) has_ddl: bool,
    /// Another process has applied it.
    pub(super) elsewhere: bool,
    /// Tables that it touches and that are not ready.
    pub(super) blocked_on: HashSet<u32>,
}

/// Everything that a leader has while it streams.
pub(super) struct Reception {
    pub(super) subscription: Subscription,
    pub(super) local_node: String,
    pub(super) entry: &'static SubscriptionEntry,
    pub(super) connection: Connection,
    pub(super) socket_wait: SocketWait,
    pub(super) contact: Contact,
    pub(super) intake: Intake,
    pub(super) clock_watch: ClockWatch,
    pub(super) provider_end: ProviderEnd,
    pub(super) dictionary: Dictionary,
    pub(super) resumption: Resumption,
    pub(super) copies: Copies,
    pub(super) in_hand: Option<InHand>,
    /// Transactions in progress at the provider, as far as they were sent.
    pub(super) segments: Segments,
    /// The transaction of these that is applied while in progress.
    pub(super) watch: Watch,
    pub(super) scheduling: Scheduling,
    pub(super) group: Group,
    /// Of the group's memory.
    pub(super) handle: u32,
    pub(super) producer: Producer,
    pub(super) handout: Handout,
    pub(super) appliers: Appliers,
    pub(super) spread: Spread,
    pub(super) tangle: Tangle,
    pub(super) confirmation: Confirmation,
    pub(super) throughput: Throughput,
}

/// Whether transactions are to come while they run.
fn takes_running(subscription: &Subscription, entry: &SubscriptionEntry) -> bool {
    // Without a limit there is room again.
    let is_limited = server::has_temp_file_limit();
    // A transaction that crashes the server is to be known by the position of its commit.
    subscription.options.streaming != Streaming::Off
        && !crash::is_cautious()
        && !(is_limited && entry.anew.whole.load(Ordering::Acquire) == 1)
}

/// Has the provider send changes from `start` on.
fn start_streaming(
    subscription: &Subscription,
    local_node: &str,
    start: u64,
    streams: bool,
    connection: &mut Connection,
) -> Result<(), End> {
    let prepared = if subscription.options.two_phase {
        let unprepared = prepared::noted(subscription, start, connection)?;
        match unprepared.join(",") {
            none if none.is_empty() => ", two_phase 'on'".to_owned(),
            numbers => format!(", two_phase 'on', unprepared {}", quote_option(&numbers)),
        }
    } else {
        // A provider that does not know the option is not asked for it.
        String::new()
    };
    let ddl = if subscription.options.replicate_ddl {
        ", ddl 'on'"
    } else {
        ""
    };
    let only = subscription.only.as_ref().map_or_else(String::new, |only| {
        let (node, after) = (quote_option(&only.0), quote_option(&lsn_text(only.1)));
        format!(", only_origin {node}, only_after {after}")
    });
    Ok(connection.start_copy(&format!(
        "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}, origin {}, node {}, join_transactions 'on', replaced_versions 'on', streaming {}{}{}{})",
        quote_identifier(&subscription.options.slot_name),
        lsn_text(start),
        publication_list(&subscription.options.publications),
        quote_option(subscription.options.origin.name()),
        quote_option(local_node),
        quote_option(if streams { "on" } else { "off" }),
        prepared,
        ddl,
        only,
    ))?)
}

/// Returns where the stream resumes, which of the following transactions are committed on this node
/// already, and which transaction may be applied while it is in progress.
fn come_so_far(subscription: &Subscription, most: usize) -> Result<(Resumption, Watch), PgError> {
    let (start, ahead, half_applied, watch) = error::transaction(|| {
        origin::ensure(subscription.id, &subscription.provider, most)?;
        let watch = Watch::new(subscription, most)?;
        let start = origin::progress(subscription.id)?.max(subscription.start_lsn);
        // In either order: it may have been changed a moment ago.
        Ok((
            start,
            applied::ahead_of(subscription.id, start)?,
            split::outstanding(subscription.id)?,
            watch,
        ))
    })?;
    if !ahead.is_empty() {
        pgrx::log!(
            "subscription \"{}\" goes on at {}, with {} ranges of transactions after it committed already",
            subscription.name,
            lsn_text(start),
            ahead.len()
        );
    }
    let half_applied = half_applied.map(|(commit_lsn, changes)| HalfApplied {
        commit_lsn,
        changes,
    });
    Ok((Resumption::new(start, ahead, half_applied), watch))
}

impl Reception {
    pub(super) fn open(
        subscription: &Subscription,
        local_node: String,
        entry: &'static SubscriptionEntry,
        coordinator: (Coordinator, u32),
    ) -> Result<Self, End> {
        let most = if subscription.options.apply_mode == ApplyMode::Serial {
            1
        } else {
            settings::appliers_per_subscription()
        };
        let (resumption, watch) = come_so_far(subscription, most)?;
        let start = resumption.start();
        // All that was applied up to there is on this server's disk by now; standbys may be
        // required too.
        let applied_up_to = Durability::Local.durable_up_to();
        let mut connection =
            Connection::open(&subscription.dsn, &subscription.name, Mode::Replication)?;
        connection.give_up_when_silent();
        // A transaction is decoded in a transaction.
        connection.lift_transaction_timeout()?;
        let provider = check_provider(&mut connection, subscription)?;
        provider.check_reaches(start)?;
        // From here on, no further position is held back: a process that asks now sees that the
        // leader confirms.
        entry.confirms.store(1, Ordering::SeqCst);
        let bounds = confirmed::check_slot(&mut connection, subscription, &provider, start)?;
        let clock_watch = ClockWatch::ask(&mut connection, &subscription.name, entry)?;
        let streams = takes_running(subscription, entry);
        start_streaming(subscription, &local_node, start, streams, &mut connection)?;
        let (group, handle) = Group::create(most, settings::apply_buffer_bytes())?;
        if subscription.options.is_relaxed() {
            group.ring.relax(start);
        }
        group
            .ring
            .register_leader(process::my_pid(), process::my_latch());
        let producer = Producer::new(group.ring);
        let appliers = Appliers::start(
            (subscription.id, &subscription.name),
            handle,
            group.ring,
            entry,
            most,
        )
        .map_err(|error| End::Transient(error, 0))?;
        let here =
            LeadersApplier::new(subscription, &local_node, entry, &group, watch.others(most))?;
        let now = Instant::now();
        let reception = Self {
            subscription: subscription.clone(),
            local_node,
            entry,
            socket_wait: SocketWait::new(connection.socket()),
            connection,
            contact: Contact::new(now),
            intake: Intake::new(Limiter::new(subscription.id)),
            clock_watch,
            provider_end: ProviderEnd::new(),
            dictionary: Dictionary::default(),
            resumption,
            copies: Copies::new(coordinator, provider.all_tables),
            in_hand: None,
            segments: Segments::default(),
            watch,
            scheduling: Scheduling::new(),
            group,
            handle,
            producer,
            handout: Handout::new(
                applier::grain(subscription, false),
                applier::joins(subscription),
                here,
            ),
            appliers,
            spread: Spread::new(subscription.options.is_relaxed()),
            tangle: Tangle::new(),
            confirmation: Confirmation::new(
                Durability::of(subscription.options.synchronous_commit),
                (start, applied_up_to),
                bounds,
                now,
            ),
            throughput: Throughput::new(now),
        };
        entry.received_lsn.store(start, Ordering::Relaxed);
        entry.applied_lsn.store(start, Ordering::Relaxed);
        entry.flushed_lsn.store(0, Ordering::Relaxed);
        // The new position may lie before the one heard last: another server may have replaced the
        // provider, or a peer may have reported anything.
        entry.provider_lsn.store(provider.end, Ordering::Relaxed);
        entry
            .provider_lsn_at
            .store(timestamp::now(), Ordering::Relaxed);
        entry.set_activity(Activity::CatchingUp);
        Ok(reception)
    }

    /// Checks that the stream resumes at `position`: a transaction that is committed in part must
    /// not lie before it.
    pub(super) fn expect_rest(&mut self, position: u64) -> Result<(), End> {
        let Some(half) = self.resumption.lost_rest(position) else {
            return Ok(());
        };
        let (lsn, changes) = (half.commit_lsn, half.changes);
        if self.subscription.skip_lsn != lsn {
            let error = PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "the rest of a transaction is no longer available",
            )
            .with_detail(format!(
                "The first {changes} changes of the transaction that commits at {} are committed here.",
                lsn_text(lsn)
            ))
            .with_hint(
                "Look for publications, or a slot, that were changed meanwhile. To do without the rest, run \
                 braid.skip_transaction, and copy its tables anew with braid.resync_table.",
            );
            return Err(End::Permanent(error, lsn));
        }
        let id = self.subscription.id;
        error::transaction(|| {
            split::leave(id, lsn)?;
            subscription::execute(
                "update braid.subscription set skip_lsn = null where subscription_id = $1",
                &[i64::from(id).into()],
            )
        })?;
        pgrx::log!(
            "subscription \"{}\" has skipped all but the first {changes} changes of the transaction that commits at {}",
            self.subscription.name,
            lsn_text(lsn)
        );
        self.resumption.give_up_rest();
        self.subscription.skip_lsn = 0;
        Ok(())
    }

    pub(super) fn stop_appliers(&mut self) {
        self.watch.stop();
        self.appliers.stop();
        self.copies.stop();
    }

    pub(super) fn run(&mut self) -> Result<(), End> {
        self.expect_rest(self.resumption.start())?;
        loop {
            let more = self.receive(64)?;
            if !self.awaits_more() {
                self.hand_out();
            }
            self.tend_meanwhile()?;
            self.ask_for_time()?;
            if let Some(pause) = self.intake.pause() {
                self.hand_out();
                self.hold_back(pause);
            } else if !more {
                self.sleep();
            }
        }
    }

    /// Take up to `most` messages from the socket, and no more than the rate limit allows. True
    /// when there may be more.
    pub(super) fn receive(&mut self, most: usize) -> Result<bool, End> {
        for _ in 0..most {
            if self.intake.pause().is_some() {
                return Ok(true);
            }
            match self.connection.try_copy_data()? {
                CopyData::Message(message) => self.message(&message)?,
                CopyData::Pending => {
                    if self.in_hand.is_none() {
                        self.handout.apply_here(&self.group, &self.producer);
                    }
                    return Ok(false);
                }
                CopyData::End => return Err(libpq::Error::EndOfStream.into()),
            }
        }
        Ok(true)
    }

    /// Other work is to be done first: appliers get the complete transactions.
    pub(super) fn hand_out(&mut self) {
        self.handout.hand_out(&self.group, &self.producer);
    }

    /// Whether more transactions that can be joined are about to arrive, so that complete ones may
    /// wait for them.
    pub(super) fn awaits_more(&self) -> bool {
        self.handout
            .awaits_more(|| self.contact.silence(Instant::now()))
    }

    /// Does the periodic work, also while the leader waits for room in the ring.
    pub(super) fn tend(&mut self) -> Result<(), End> {
        self.hand_out();
        self.tend_meanwhile()
    }

    /// The periodic work that is done while more messages may be about to arrive.
    fn tend_meanwhile(&mut self) -> Result<(), End> {
        pgrx::check_for_interrupts!();
        worker::reload_settings();
        self.check_appliers()?;
        self.appliers.tend();
        self.spread_transactions();
        self.tend_running();
        self.collect();
        self.copies.follow_catalog(self.entry);
        self.copies.poll(self.entry)?;
        self.end_parking_for_copies();
        self.confirm()?;
        self.check_silence()?;
        self.ask_for_end();
        self.untangle()?;
        self.handout.rest();
        self.forget_stop();
        self.measure();
        self.publish_schedule(false);
        Ok(())
    }

    /// Once all tables are copied, no transaction is parked for a copy any more. An applier that
    /// began before may not know that a table is ready, and would leave out its changes: so not
    /// before all that was handed out is applied.
    fn end_parking_for_copies(&self) {
        if self.entry.parks_for_copies()
            && self.copies.are_done()
            && !self.producer.is_open()
            && self.confirmation.collected() >= self.producer.completed()
        {
            self.entry.no_copy_waits();
        }
    }

    /// Publishes the counts of scheduling, if it is time to, or `now`.
    pub(super) fn publish_schedule(&mut self, now: bool) {
        self.scheduling.publish(now, self.group.ring, self.entry);
    }

    pub(super) fn check_appliers(&mut self) -> Result<(), End> {
        if let Some(failure) = self.group.ring.failure().get() {
            self.collect();
            let some = |text: String| (!text.is_empty()).then_some(text);
            let mut error = PgError {
                detail: some(failure.detail),
                hint: some(failure.hint),
                reason: Reason::from_code(failure.reason),
                ..PgError::new(SqlState::from_code(failure.sqlstate), failure.message)
            };
            if let Some(context) = some(failure.context) {
                error = error.with_context(&context);
            }
            let stops = matches!(
                policy::for_apply(error.sqlstate),
                Policy::Stop | Policy::Conflict
            );
            if failure.comes_again || !stops {
                return Err(End::Transient(error, failure.lsn));
            }
            error.hint.get_or_insert_with(|| {
                "Remove the cause and run braid.enable_subscription, or leave this transaction out with \
                 braid.skip_transaction."
                    .to_owned()
            });
            return Err(End::Permanent(error, failure.lsn));
        }
        if self.appliers.has_lost_one() {
            return Err(End::Transient(
                PgError::new(SqlState::AdminShutdown, "an applier has ended"),
                0,
            ));
        }
        Ok(())
    }

    pub(super) fn in_flight(&self) -> bool {
        self.in_hand.is_some() || self.confirmation.collected() < self.producer.completed()
    }

    pub(super) fn message(&mut self, message: &[u8]) -> Result<(), End> {
        self.contact.heard(Instant::now());
        let entry = self.entry;
        entry
            .last_message_at
            .store(timestamp::now(), Ordering::Relaxed);
        let position = |at: usize| {
            message
                .get(at..)
                .and_then(<[u8]>::first_chunk::<8>)
                .map(|raw| u64::from_be_bytes(*raw))
                .ok_or(libpq::Error::Unexpected("START_REPLICATION"))
        };
        match message.first() {
            Some(b'w') => {
                self.clock_watch.other();
                let end = position(9)?;
                entry.provider_lsn.fetch_max(end, Ordering::Relaxed);
                let frame = message.get(25..).unwrap_or_default();
                entry.bytes.fetch_add(frame.len() as u64, Ordering::Relaxed);
                self.intake.begin(position(17)?.cast_signed());
                self.frame(frame, position(1)?)?;
                self.handout.message(frame.len());
                let waits =
                    self.awaits_more() || (!self.handout.is_due() && self.in_hand.is_none());
                if !waits {
                    self.hand_out();
                }
                self.intake.end(frame.len());
                Ok(())
            }
            Some(b'k') => {
                // WAL was read up to this position. The stream itself shows what was sent, as
                // transactions may be held back.
                let end = position(1)?;
                entry.provider_lsn.fetch_max(end, Ordering::Relaxed);
                let there = position(9)?.cast_signed();
                if message.get(17) == Some(&1) {
                    self.contact.owe_report();
                    self.clock_watch.other();
                } else {
                    let name = &self.subscription.name;
                    self.clock_watch.keepalive(end, there, name, entry);
                }
                if end <= entry.received_lsn.load(Ordering::Relaxed) {
                    provider_end::told(entry, end, there);
                }
                if !self.in_flight() {
                    if entry.activity() == Activity::CatchingUp {
                        entry.set_activity(Activity::Streaming);
                    }
                    if end <= entry.received_lsn.load(Ordering::Relaxed) {
                        // A later commit of the provider has a later time of its clock.
                        let reached = timestamp::now().min(there);
                        entry.caught_up_at.store(reached, Ordering::Relaxed);
                    }
                }
                Ok(())
            }
            _ => Err(libpq::Error::Unexpected("START_REPLICATION").into()),
        }
    }

    pub(super) fn received(&mut self, position: u64) {
        self.confirmation.received(position);
        self.entry
            .received_lsn
            .fetch_max(position, Ordering::Relaxed);
    }
}
