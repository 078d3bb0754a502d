//! The stream of a subscription: everything that a leader has in hand, and the loop that tends to it.

use braid_bgworker::subscription_option::{ApplyMode, Streaming};
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

use braid_bgworker::applied::AppliedAhead;
use braid_bgworker::commit_sequence::CommitSequence;
use braid_bgworker::dependency::DependencyTracker;
use braid_bgworker::lease::Lease;
use braid_bgworker::policy::{self, Policy};
use braid_bgworker::progress::Progress;
use braid_bgworker::publishing::Unpublished;
use braid_bgworker::sql_text::{quote_identifier, quote_option};
use braid_gir::lsn_text;
use braid_node::group::Group;
use braid_node::rate_limit::Limiter;
use braid_node::registry::{Activity, SubscriptionEntry};
use braid_node::subscription::{self, Subscription, publication_list};
use braid_node::table_order::TableOrders;
use braid_node::{applied, crash, origin, prepared, settings, split};
use braid_postgres::error::{self, PgError};
use braid_postgres::latch::SocketWait;
use braid_postgres::libpq::{self, Connection, CopyData, Mode};
use braid_postgres::{process, timestamp, worker};
use braid_ring::{Grain, Leader as Producer};

use super::confirm::{Rate, millis};
use super::provider::check_provider;
use super::provider_end::{self, ProviderEnd};
use super::running::Watch;
use super::schedule::Schedule;
use super::segments::Segments;
use super::skew::ClockWatch;
use super::spread::Spread;
use super::untangle::Tangle;
use super::{End, confirmed};
use crate::applier;
use crate::applier::here::{self, LeadersApplier};
use crate::appliers::Appliers;
use crate::copy::Coordinator;
use crate::durability::Durability;

/// Keys that the dependency tracker remembers.
const TRACKED_KEYS: usize = 200_000;

pub(super) struct InHand {
    pub(super) begin_commit_lsn: u64,
    pub(super) commit_timestamp: i64,
    pub(super) changes: u32,
    pub(super) discard: bool,
    pub(super) skip: bool,
    /// It may be committed in pieces, however many changes it has: there is no telling, or some pieces are.
    pub(super) split: bool,
    /// It came while it ran: its keys were hashed under other circumstances than its neighbours'.
    pub(super) streamed: bool,
    /// It is prepared here, or what was is finished: applied alone, and what stands for it if its content is to be left out.
    pub(super) two_phase: Option<Vec<u8>>,
    /// It changes rows by their keys, of tables that are there, and nothing of it runs users' triggers.
    pub(super) is_plain: bool,
    /// It sets a rule for conflicts.
    pub(super) has_rule: bool,
    /// Another process has applied it.
    pub(super) elsewhere: bool,
    /// Tables that it touches and that are not ready.
    pub(super) blocked_on: HashSet<u32>,
}

pub(super) struct Stream {
    pub(super) subscription: Subscription,
    pub(super) durability: Durability,
    pub(super) grain: Grain,
    pub(super) local_node: String,
    pub(super) entry: &'static SubscriptionEntry,
    pub(super) coordinator: Coordinator,
    pub(super) connection: Connection,
    pub(super) socket_wait: SocketWait,
    pub(super) group: Group,
    pub(super) producer: Producer,
    pub(super) tracker: DependencyTracker,
    pub(super) orders: TableOrders,
    pub(super) schedule: Schedule,
    pub(super) progress: Progress,
    /// Up to where may be confirmed.
    pub(super) lease: Lease,
    pub(super) appliers: Appliers,
    pub(super) spread: Spread,
    /// Name of each schema's relation, by number.
    pub(super) schemas: Vec<(String, String)>,
    /// Its OID at the provider, by number.
    pub(super) relations: Vec<u32>,
    pub(super) header_seen: bool,
    /// Where it goes on.
    start: u64,
    /// The transactions that were received whole.
    pub(super) commits: CommitSequence,
    /// What is committed here already of what is still to come.
    pub(super) ahead: AppliedAhead,
    /// Where the commit record of the transaction starts of which pieces are committed here, until it comes again; and how many of its changes.
    pub(super) half_applied: Option<(u64, u64)>,
    /// A publication is FOR ALL TABLES.
    pub(super) all_tables: bool,
    pub(super) in_hand: Option<InHand>,
    /// What runs at the provider, as far as it was sent.
    pub(super) segments: Segments,
    /// What of it is applied while it runs.
    pub(super) watch: Watch,
    /// Of the group's memory.
    pub(super) handle: u32,
    /// Commits that were taken note of.
    pub(super) collected: u64,
    /// Version of the catalog that the coordinator has read.
    pub(super) catalog_version: u32,
    pub(super) last_message: Instant,
    pub(super) last_feedback: Instant,
    pub(super) last_flush: Instant,
    pub(super) limiter: Limiter,
    pub(super) clock_watch: ClockWatch,
    pub(super) provider_end: ProviderEnd,
    /// Changes received, for the limiter.
    pub(super) rows: u64,
    /// When the provider sent the message in hand, by its clock.
    pub(super) sent_at: i64,
    pub(super) ping_sent: bool,
    pub(super) reply_wanted: bool,
    pub(super) rate: Rate,
    /// Tables that are not copied yet.
    pub(super) copies: usize,
    pub(super) tangle: Tangle,
    /// For what comes while nothing is in hand.
    here: Option<LeadersApplier>,
    unpublished: Unpublished,
}

/// Whether transactions are to come while they run.
fn takes_running(subscription: &Subscription, entry: &SubscriptionEntry) -> bool {
    // Without a limit there is room again.
    // SAFETY: reads a setting.
    let is_limited = unsafe { pgrx::pg_sys::temp_file_limit } >= 0;
    // A transaction that crashes the server is to be known by the position of its commit.
    subscription.options.streaming != Streaming::Off
        && !crash::is_cautious()
        && !(is_limited && entry.anew.whole.load(Ordering::Acquire) == 1)
}

/// Have the provider send what it has from `start` on.
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
    Ok(connection.start_copy(&format!(
        "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}, origin {}, node {}, join_transactions 'on', replaced_versions 'on', streaming {}{})",
        quote_identifier(&subscription.options.slot_name),
        lsn_text(start),
        publication_list(&subscription.options.publications),
        quote_option(subscription.options.origin.name()),
        quote_option(local_node),
        quote_option(if streams { "on" } else { "off" }),
        prepared,
    ))?)
}

type HalfApplied = Option<(u64, u64)>;

/// Where it goes on, what of what comes then is committed here already, and what may be applied while it runs.
fn come_so_far(
    subscription: &Subscription,
    most: usize,
) -> Result<(u64, AppliedAhead, HalfApplied, Watch), PgError> {
    let found = error::transaction(|| {
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
    let (start, ahead, ..) = &found;
    if !ahead.is_empty() {
        pgrx::log!(
            "subscription \"{}\" goes on at {}, with {} ranges of transactions after it committed already",
            subscription.name,
            lsn_text(*start),
            ahead.len()
        );
    }
    Ok(found)
}

impl Stream {
    pub(super) fn open(
        subscription: &Subscription,
        local_node: String,
        entry: &'static SubscriptionEntry,
        (coordinator, catalog_version): (Coordinator, u32),
    ) -> Result<Self, End> {
        let most = if subscription.options.apply_mode == ApplyMode::Serial {
            1
        } else {
            settings::appliers_per_subscription()
        };
        let (start, ahead, half_applied, watch) = come_so_far(subscription, most)?;
        // What was applied up to there is on disk here by now; standbys may be wanted too.
        let applied_up_to = Durability::Local.durable_up_to();
        let mut connection =
            Connection::open(&subscription.dsn, &subscription.name, Mode::Replication)?;
        connection.give_up_when_silent();
        let provider = check_provider(&mut connection, subscription)?;
        provider.check_reaches(start)?;
        let up_to = confirmed::check_slot(&mut connection, subscription, &provider, start)?;
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
        let grain = applier::grain(subscription, false);
        let stream = Self {
            grain,
            durability: Durability::of(subscription.options.synchronous_commit),
            subscription: subscription.clone(),
            local_node,
            entry,
            coordinator,
            socket_wait: SocketWait::new(connection.socket()),
            connection,
            group,
            producer,
            tracker: DependencyTracker::new(TRACKED_KEYS),
            orders: TableOrders::new(),
            schedule: Schedule::new(),
            progress: Progress::new(start, applied_up_to),
            lease: Lease::new(up_to, millis()),
            appliers,
            spread: Spread::new(subscription.options.is_relaxed()),
            schemas: Vec::new(),
            relations: Vec::new(),
            header_seen: false,
            start,
            commits: CommitSequence::new(start),
            ahead,
            half_applied,
            all_tables: provider.all_tables,
            in_hand: None,
            segments: Segments::default(),
            watch,
            handle,
            collected: 0,
            // As of when the coordinator has read the tables: a change since then is looked at with the first turn.
            catalog_version,
            last_message: now,
            last_feedback: now,
            last_flush: now,
            limiter: Limiter::new(subscription.id),
            clock_watch,
            provider_end: ProviderEnd::new(),
            rows: 0,
            sent_at: 0,
            ping_sent: false,
            // The first word to the provider: this subscriber is there, and how far it is.
            reply_wanted: true,
            rate: Rate {
                at: now,
                transactions: 0,
                rows: 0,
            },
            copies: usize::MAX,
            tangle: Tangle::new(),
            here,
            unpublished: Unpublished::new(applier::joins(subscription).then_some(grain.run)),
        };
        entry.received_lsn.store(start, Ordering::Relaxed);
        entry.applied_lsn.store(start, Ordering::Relaxed);
        entry.flushed_lsn.store(0, Ordering::Relaxed);
        // It may be before what was heard last: of another server that has taken its place, or of a peer that said anything.
        entry.provider_lsn.store(provider.end, Ordering::Relaxed);
        entry
            .provider_lsn_at
            .store(timestamp::now(), Ordering::Relaxed);
        entry.set_activity(Activity::CatchingUp);
        Ok(stream)
    }

    /// The stream goes on at `position`: what is committed in part must not lie before it.
    pub(super) fn expect_rest(&mut self, position: u64) -> Result<(), End> {
        let Some((lsn, changes)) = self.half_applied.filter(|(lsn, _)| *lsn < position) else {
            return Ok(());
        };
        if self.subscription.skip_lsn != lsn {
            let error = PgError::new(
                "55000",
                "the rest of a transaction does not come any more",
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
        self.half_applied = None;
        self.subscription.skip_lsn = 0;
        Ok(())
    }

    pub(super) fn stop_appliers(&mut self) {
        self.watch.stop();
        self.appliers.stop();
        self.coordinator.stop();
    }

    pub(super) fn run(&mut self) -> Result<(), End> {
        self.expect_rest(self.start)?;
        loop {
            let more = self.receive(64)?;
            if !self.awaits_more() {
                self.hand_out();
            }
            self.tend_meanwhile()?;
            self.ask_for_time()?;
            if let Some(pause) = self.limiter.pause() {
                self.hand_out();
                self.hold_back(pause);
            } else if !more {
                self.sleep();
            }
        }
    }

    /// Take up to `most` messages from the socket, and no more than the rate limit allows. True when there may be more.
    pub(super) fn receive(&mut self, most: usize) -> Result<bool, End> {
        for _ in 0..most {
            if self.limiter.pause().is_some() {
                return Ok(true);
            }
            match self.connection.try_copy_data()? {
                CopyData::Message(message) => self.message(&message)?,
                CopyData::Pending => {
                    if self.in_hand.is_none() {
                        self.apply_here();
                    }
                    return Ok(false);
                }
                CopyData::End => return Err(libpq::Error::EndOfStream.into()),
            }
        }
        Ok(true)
    }

    /// A transaction is complete: have it applied. Few that are small, and the only ones in hand, are kept quiet about until it is known whether more
    /// has come. Others are published some at a time: to look at what waits, and who, costs more than to receive one.
    pub(super) fn is_complete(&mut self, sequence: u64, may_be_here: bool, changes: u32) {
        let nothing_else = sequence == self.group.ring.committed() + self.unpublished.quiet() + 1;
        if may_be_here
            && nothing_else
            && self.unpublished.quiet() < here::TRANSACTIONS
            && settings::leader_applies()
            && self.here.as_mut().is_some_and(LeadersApplier::is_ready)
        {
            self.unpublished.keep_quiet();
        } else if self.unpublished.add(changes) {
            self.publish();
        }
    }

    fn publish(&mut self) {
        self.unpublished.clear();
        self.producer.publish_completed();
        for latch in self.group.ring.idle_appliers(self.grain).iter() {
            process::set_latch(latch);
        }
    }

    /// Something else is to be done first: what is complete is for appliers.
    pub(super) fn hand_out(&mut self) {
        if !self.unpublished.is_empty() {
            self.publish();
        }
    }

    /// Nothing more has come.
    fn apply_here(&mut self) {
        let last = self.producer.completed();
        let first = last + 1 - self.unpublished.take_quiet();
        for sequence in first..=last {
            // One by one, as only what was published last can be taken.
            self.producer.publish_up_to(sequence);
            if !self
                .here
                .as_mut()
                .is_some_and(|here| here.apply(&self.group, sequence))
            {
                self.publish();
                return;
            }
        }
    }

    /// Whether more of what is joined is about to come, and what is complete may wait for it: as it does while the provider has sent so much that
    /// it has more, and for a moment at most.
    pub(super) fn awaits_more(&self) -> bool {
        self.unpublished.awaits_more(|| self.last_message.elapsed())
    }

    /// What has to be done from time to time, also while waiting for room.
    pub(super) fn tend(&mut self) -> Result<(), End> {
        self.hand_out();
        self.tend_meanwhile()
    }

    /// The same while more may be about to come.
    fn tend_meanwhile(&mut self) -> Result<(), End> {
        pgrx::check_for_interrupts!();
        worker::reload_settings();
        self.check_appliers()?;
        self.appliers.tend();
        self.spread_transactions();
        self.tend_running();
        self.collect();
        let catalog_version = self.entry.catalog_version.load(Ordering::Acquire);
        if catalog_version != self.catalog_version {
            // Tables may have come or gone. Nothing of what is in flight depends on it: a table that has just come is
            // skipped up to its copy.
            self.catalog_version = catalog_version;
            self.coordinator.rescan();
            self.entry.tables_version.fetch_add(1, Ordering::AcqRel);
            // A parked transaction may have been given up.
            self.entry.parked_version.fetch_add(1, Ordering::AcqRel);
            process::set_latch(self.entry.first_applier_latch.load(Ordering::Acquire));
        }
        self.look_at_copies()?;
        self.confirm()?;
        self.check_silence()?;
        self.ask_for_end();
        self.untangle()?;
        if let Some(here) = &mut self.here {
            here.rest();
        }
        self.forget_stop();
        self.measure();
        self.publish_schedule();
        Ok(())
    }

    /// Start and reap workers that copy tables, and know their states.
    pub(super) fn look_at_copies(&mut self) -> Result<(), End> {
        let copy = self.coordinator.poll().map_err(End::Copy)?;
        self.copies = copy.waiting + copy.copying;
        if copy.changed {
            self.entry.tables_version.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    pub(super) fn check_appliers(&mut self) -> Result<(), End> {
        if let Some(failure) = self.group.ring.failure().get() {
            self.collect();
            let some = |text: String| (!text.is_empty()).then_some(text);
            let mut error = PgError {
                detail: some(failure.detail),
                hint: some(failure.hint).or_else(|| {
                    Some(
                        "Remove the cause and run braid.enable_subscription, or leave this transaction out with \
                         braid.skip_transaction."
                            .to_owned(),
                    )
                }),
                ..PgError::new(&failure.sqlstate, failure.message)
            };
            if let Some(context) = some(failure.context) {
                error = error.with_context(&context);
            }
            return Err(match policy::for_apply(&error.sqlstate) {
                Policy::Stop | Policy::Conflict => End::Permanent(error, failure.lsn),
                Policy::Retry | Policy::Reconnect => End::Transient(error, failure.lsn),
            });
        }
        if self.appliers.has_lost_one() {
            return Err(End::Transient(
                PgError::new("57P01", "an applier has ended"),
                0,
            ));
        }
        Ok(())
    }

    pub(super) fn in_flight(&self) -> bool {
        self.in_hand.is_some() || self.collected < self.producer.completed()
    }

    pub(super) fn message(&mut self, message: &[u8]) -> Result<(), End> {
        self.last_message = Instant::now();
        self.ping_sent = false;
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
                let rows = self.rows;
                self.sent_at = position(17)?.cast_signed();
                self.frame(frame, position(1)?)?;
                self.unpublished.message(frame.len());
                let waits =
                    self.awaits_more() || (!self.unpublished.is_due() && self.in_hand.is_none());
                if !waits {
                    self.hand_out();
                }
                self.limiter
                    .take(self.rows.wrapping_sub(rows), frame.len() as u64);
                Ok(())
            }
            Some(b'k') => {
                // Up to here WAL was read; what was sent says the stream itself, as transactions may be held back.
                let end = position(1)?;
                entry.provider_lsn.fetch_max(end, Ordering::Relaxed);
                let there = position(9)?.cast_signed();
                if message.get(17) == Some(&1) {
                    self.reply_wanted = true;
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
                        // What it commits from now on has a time of its own clock's.
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
        self.progress.received(position);
        self.entry
            .received_lsn
            .fetch_max(position, Ordering::Relaxed);
    }
}
