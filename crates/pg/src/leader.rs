//! The leader process of a subscription: receives the stream, schedules its transactions, confirms what is durable.
//!
//! Its life: connect, create the slot (phase `slot`), have the tables copied (phase `copy`), then stream (phase `stream`) until
//! something ends it. It ends after any failure: what is broken for good is recorded in the catalog, and the subscription
//! stops; everything else is left to the manager, which starts a new leader after a pause. Nothing is carried over but what
//! is durable, so a restart is the one way of recovering.
//!
//! Invariants: what is confirmed as flushed is durably committed here (I1); a transaction is handed out whole or, when it is too
//! large for the ring, alone (I6, I9); no byte from the network is trusted (I10).

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use braid_bgworker::dependency::DependencyTracker;
use braid_bgworker::policy::{self, Policy};
use braid_bgworker::progress::Progress;
use braid_bgworker::table_order::TableOrder;
use braid_gir::{Begin, Commit, Reader, Record, Tag};
use braid_ring::{Complete, Grain, Leader as Producer};
use pgrx::pg_sys;

use crate::applier;
use crate::appliers::Appliers;
use crate::apply::EPOCH_DIFFERENCE;
use crate::copy::Coordinator;
use crate::durability::Durability;
use crate::error::{self, PgError};
use crate::group::Group;
use crate::latch::{self, SocketWait};
use crate::libpq::{self, Connection, CopyData, Mode, quote_identifier, quote_literal};
use crate::rate_limit::Limiter;
use crate::registry::{self, Activity, SubscriptionEntry};
use crate::subscription::{self, Subscription, lsn_text, parse_lsn, publication_list};
use crate::table_order::TableOrders;
use crate::{origin, settings, worker};

/// Keys that the dependency tracker remembers.
const TRACKED_KEYS: usize = 200_000;
/// Local WAL is flushed for confirmation this often. Whoever commits at the provider waits for it only if commits are to be
/// durable at once; the leader receives nothing meanwhile.
const FLUSH_INTERVAL: Duration = Duration::from_millis(50);
/// The same where commits are to be durable at once.
const EAGER_FLUSH_INTERVAL: Duration = Duration::from_millis(1);
/// While the rate limit holds the stream back, positions are reported at least this often: well within any wal_sender_timeout.
const HELD_STATUS_INTERVAL: Duration = Duration::from_millis(500);
const RATE_INTERVAL: Duration = Duration::from_secs(2);
/// How far a commit record's end may lie behind its start: XLogRecordMaxSize of src/include/access/xlogrecord.h, 18, and what
/// page headers add to it.
const MAX_COMMIT_RECORD: u64 = 1 << 31;
/// How often in a row what comes from the provider may be invalid before the subscription stops: a connection may be broken, or
/// the two may not understand each other.
const GARBLED_ATTEMPTS: u32 = 8;

/// The subscription that this process leads, for its exit callback.
static LEADING: AtomicU32 = AtomicU32::new(0);

/// How a leader ends.
enum End {
    /// Asked to, or there is nothing to do.
    Quiet,
    /// The manager may try again; the position is where the transaction that failed ends, 0 for none.
    Transient(PgError, u64),
    /// A person has to look; the position as above.
    Permanent(PgError, u64),
}

impl From<PgError> for End {
    fn from(error: PgError) -> Self {
        match policy::for_apply(&error.sqlstate) {
            Policy::Stop => Self::Permanent(error, 0),
            Policy::Retry | Policy::Reconnect | Policy::Conflict => Self::Transient(error, 0),
        }
    }
}

impl From<braid_gir::Error> for End {
    fn from(error: braid_gir::Error) -> Self {
        // `finish` makes it permanent when it comes again and again.
        Self::Transient(error.into(), 0)
    }
}

impl From<libpq::Error> for End {
    fn from(error: libpq::Error) -> Self {
        let garbled = matches!(error, libpq::Error::Unexpected(_));
        let mut error = PgError::from(error);
        if garbled {
            // As what the records' reader refuses.
            error.message = format!("connection to the provider: {}", error.message);
            return Self::Transient(error, 0);
        }
        match policy::for_provider(&error.sqlstate) {
            Policy::Stop => {
                if error.hint.is_none() {
                    let hint = policy::provider_hint(&error.sqlstate, &error.message);
                    error = error.with_hint(hint);
                }
                error.message = format!("the provider reported: {}", error.message);
                Self::Permanent(error, 0)
            }
            Policy::Retry | Policy::Reconnect | Policy::Conflict => {
                error.message = format!("connection to the provider: {}", error.message);
                Self::Transient(error, 0)
            }
        }
    }
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = u32::try_from(argument.value()).unwrap_or(0);
    let id = u32::try_from(worker::Extra::mine().word(0)).unwrap_or(0);
    worker::connect(database);
    let Some(entry) = registry::subscription(id) else {
        return;
    };
    entry
        .leader_pid
        .store(registry::my_pid(), Ordering::Release);
    entry
        .leader_latch
        .store(registry::my_latch(), Ordering::Release);
    entry.started_at.store(registry::now(), Ordering::Relaxed);
    entry.starts.fetch_add(1, Ordering::Relaxed);
    entry.set_activity(Activity::Starting);
    LEADING.store(id, Ordering::Relaxed);
    // SAFETY: the callback only touches shared memory, which outlives the process.
    unsafe { pg_sys::before_shmem_exit(Some(on_exit), pg_sys::Datum::null()) };
    let end = match error::catch(|| lead(id, entry)) {
        Ok(Ok(())) => End::Quiet,
        Ok(Err(end)) => end,
        Err(error) => {
            error::abort();
            error.into()
        }
    };
    finish(id, entry, end);
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: i32, _argument: pg_sys::Datum) {
    if let Some(entry) = registry::subscription(LEADING.load(Ordering::Relaxed)) {
        // However this process ends, its appliers end too.
        for applier in &entry.appliers {
            worker::terminate_pid(applier.pid.load(Ordering::Acquire));
        }
        entry.leader_latch.store(0, Ordering::Release);
        entry.leader_pid.store(0, Ordering::Release);
    }
}

/// Write down how it ended, for people and for the manager.
fn finish(id: u32, entry: &SubscriptionEntry, end: End) {
    let (error, lsn, permanent) = match end {
        End::Quiet => return,
        End::Transient(error, lsn) => (error, lsn, false),
        End::Permanent(error, lsn) => (error, lsn, true),
    };
    let mut error = error;
    let mut permanent = permanent
        || (error.sqlstate == "08P01"
            && entry.failures.load(Ordering::Acquire) >= GARBLED_ATTEMPTS);
    let recorded = error::transaction(|| {
        let Some(subscription) = subscription::load(id)? else {
            return Ok(String::new());
        };
        if subscription.disable_on_error && !permanent {
            permanent = true;
            error.hint.get_or_insert_with(|| {
                "Remove the cause and run braid.enable_subscription.".into()
            });
        }
        if permanent {
            subscription::set_error(id, &error, lsn)?;
        }
        Ok(subscription.name)
    });
    if !permanent && error.hint.is_none() {
        error.hint = Some(policy::transient_hint(&error.sqlstate).to_owned());
    }
    entry.set_failure(&error, lsn);
    match recorded {
        Ok(name) if permanent => error.log(&format!("subscription \"{name}\" has stopped")),
        Ok(name) => error.log(&format!("subscription \"{name}\" will be tried again")),
        Err(failure) => failure.log("could not record the error of a subscription"),
    }
}

fn lead(id: u32, entry: &'static SubscriptionEntry) -> Result<(), End> {
    wait_for_old_appliers(entry);
    let loaded = error::transaction(|| {
        let Some(subscription) = subscription::load(id)? else {
            return Ok(None);
        };
        let node = subscription::local_node()?
            .ok_or_else(|| PgError::new("55000", "this database has no node"))?;
        Ok(Some((subscription, node)))
    })?;
    let Some((mut subscription, local_node)) = loaded else {
        return Ok(());
    };
    worker::report_activity(&format!("subscription {}", subscription.name));
    let mut coordinator = Coordinator::new(&subscription);
    if subscription.phase == "slot" {
        let mut connection =
            Connection::open(&subscription.dsn, &subscription.name, Mode::Replication)?;
        let (lsn, snapshot) = create_slot(&mut connection, &subscription)?;
        // Tables that were published between the look at the provider and the slot would be in neither.
        let published = published_tables(&subscription)?;
        error::transaction(|| {
            for (namespace, name) in &published {
                subscription::add_table(id, namespace, name, subscription.copy_data)?;
            }
            subscription::set_phase(id, "copy", Some(lsn))
        })?;
        "copy".clone_into(&mut subscription.phase);
        subscription.start_lsn = lsn;
        coordinator.adopt(connection, snapshot, lsn);
    }
    let copied = copy_tables(&mut coordinator, entry);
    if copied.is_err() {
        coordinator.stop();
    }
    copied?;
    if subscription.phase == "copy" {
        error::transaction(|| subscription::set_phase(id, "stream", None))?;
        "stream".clone_into(&mut subscription.phase);
    }
    let mut stream = Stream::open(&subscription, local_node, entry, coordinator)?;
    // Also when it unwinds: appliers end through the exit callback then.
    let outcome = stream.run();
    if let Err(End::Transient(error, _)) = &outcome
        && (error.sqlstate.starts_with("08") || error.sqlstate.starts_with("57P"))
        && stream.last_end > 0
    {
        // The connection broke, but not before something came through: the first failure of a row.
        entry.failures.store(0, Ordering::Release);
    }
    stream.stop_appliers();
    outcome
}

/// A leader that was killed may have left appliers that are still ending; they hold origins.
fn wait_for_old_appliers(entry: &SubscriptionEntry) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let alive: Vec<i32> = entry
            .appliers
            .iter()
            .map(|applier| applier.pid.load(Ordering::Acquire))
            .filter(|pid| *pid != 0)
            .collect();
        if alive.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in alive {
            worker::terminate_pid(pid);
        }
        latch::wait(Some(Duration::from_millis(20)));
    }
}

/// Create the slot. One of its name that is there may be dropped only where it is a left-over of an attempt of ours that was cut off
/// before the catalog knew: that there was none before it is noted down ahead of each attempt.
fn create_slot(
    connection: &mut Connection,
    subscription: &Subscription,
) -> Result<(u64, String), End> {
    let slot = quote_identifier(&subscription.slot);
    let taken = || {
        let error = PgError::new(
            "42710",
            format!(
                "replication slot \"{}\" at the provider is not this subscription's",
                subscription.slot
            ),
        );
        End::Permanent(
            error
                .with_detail("Somebody else created it after this subscription had chosen the name.")
                .with_hint(
                    "Drop the subscription and create it with another slot_name, or, if nobody needs the slot, drop it at the \
                     provider and run braid.enable_subscription.",
                ),
            0,
        )
    };
    let there = !connection
        .query(&format!(
            "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = {}",
            quote_literal(&subscription.slot)
        ))?
        .is_empty();
    if there && !subscription.slot_attempted {
        return Err(taken());
    }
    if there {
        connection.query(&format!("DROP_REPLICATION_SLOT {slot} WAIT"))?;
    }
    let noted = error::transaction(|| {
        // Without synchronous_commit a crash could forget it, and keep the slot.
        // SAFETY: sets a flag of the transaction that is open.
        unsafe { pg_sys::ForceSyncCommit() };
        subscription::set_slot_attempted(subscription.id, true)
    })?;
    if !noted {
        return Err(End::Quiet);
    }
    let create = format!("CREATE_REPLICATION_SLOT {slot} LOGICAL braid (SNAPSHOT 'export')");
    let rows = match connection.query(&create) {
        Ok(rows) => rows,
        Err(error) => {
            // A connection that broke, or a server that stops, may have created it; whatever else it says, it has not.
            if !["08", "57"]
                .iter()
                .any(|class| error.sqlstate().starts_with(class))
            {
                error::transaction(|| subscription::set_slot_attempted(subscription.id, false))?;
            }
            return Err(if error.sqlstate() == "42710" {
                taken()
            } else {
                error.into()
            });
        }
    };
    let lsn = rows.get(0, 1).and_then(parse_lsn);
    let snapshot = rows.get(0, 2).map(str::to_owned);
    match (lsn, snapshot) {
        (Some(lsn), Some(snapshot)) => Ok((lsn, snapshot)),
        _ => Err(libpq::Error::Unexpected("CREATE_REPLICATION_SLOT").into()),
    }
}

/// What the publications publish now.
fn published_tables(subscription: &Subscription) -> Result<Vec<(String, String)>, End> {
    let mut connection = Connection::open(&subscription.dsn, &subscription.name, Mode::Sql)?;
    let names = subscription::publication_literals(&subscription.publications);
    let rows = connection.query(&format!(
        "SELECT DISTINCT schemaname, tablename FROM pg_catalog.pg_publication_tables WHERE pubname IN ({names}) \
         AND schemaname <> 'braid'"
    ))?;
    Ok((0..rows.len())
        .filter_map(|row| Some((rows.get(row, 0)?.to_owned(), rows.get(row, 1)?.to_owned())))
        .collect())
}

/// Have every table that waits copied, before anything is streamed.
fn copy_tables(coordinator: &mut Coordinator, entry: &SubscriptionEntry) -> Result<(), End> {
    let mut seen = entry.catalog_version.load(Ordering::Acquire);
    loop {
        let catalog_version = entry.catalog_version.load(Ordering::Acquire);
        if catalog_version != seen {
            seen = catalog_version;
            coordinator.rescan();
        }
        let progress = coordinator
            .poll()
            .map_err(|error| End::Permanent(error, 0))?;
        if progress.changed {
            entry.tables_version.fetch_add(1, Ordering::AcqRel);
        }
        if progress.waiting == 0 && progress.copying == 0 {
            return Ok(());
        }
        entry.set_activity(Activity::Copying);
        latch::wait(Some(progress.next.unwrap_or(Duration::from_secs(1))));
        worker::reload_settings();
    }
}

struct InHand {
    begin_commit_lsn: u64,
    commit_timestamp: i64,
    changes: u32,
    discard: bool,
    skip: bool,
    /// Tables that it touches and that are not ready.
    blocked_on: HashSet<u32>,
}

struct Stream {
    subscription: Subscription,
    durability: Durability,
    grain: Grain,
    local_node: String,
    entry: &'static SubscriptionEntry,
    coordinator: Coordinator,
    connection: Connection,
    socket_wait: SocketWait,
    group: Group,
    producer: Producer,
    tracker: DependencyTracker,
    orders: TableOrders,
    progress: Progress,
    appliers: Appliers,
    /// Name of each schema's relation, by number.
    schemas: Vec<(String, String)>,
    header_seen: bool,
    /// End of the last transaction that was received whole.
    last_end: u64,
    /// A publication is FOR ALL TABLES.
    all_tables: bool,
    in_hand: Option<InHand>,
    /// Commits that were taken note of.
    collected: u64,
    /// Version of the catalog that the coordinator has read.
    catalog_version: u32,
    last_message: Instant,
    last_feedback: Instant,
    last_flush: Instant,
    limiter: Limiter,
    /// Changes received, for the limiter.
    rows: u64,
    ping_sent: bool,
    reply_wanted: bool,
    rate: Rate,
}

struct Rate {
    at: Instant,
    transactions: u64,
    rows: u64,
}

impl Durability {
    fn flush_interval(self) -> Duration {
        if self.is_eager() {
            EAGER_FLUSH_INTERVAL
        } else {
            FLUSH_INTERVAL
        }
    }
}

impl Stream {
    fn open(
        subscription: &Subscription,
        local_node: String,
        entry: &'static SubscriptionEntry,
        coordinator: Coordinator,
    ) -> Result<Self, End> {
        let most = if subscription.apply_mode == "serial" {
            1
        } else {
            settings::appliers_per_subscription()
        };
        let start = error::transaction(|| {
            origin::ensure(subscription.id, &subscription.provider, most)?;
            Ok(origin::progress(subscription.id)?.max(subscription.start_lsn))
        })?;
        // What was applied up to there is on disk here by now; standbys may be wanted too.
        let applied_up_to = Durability::Local.durable_up_to();
        let mut connection =
            Connection::open(&subscription.dsn, &subscription.name, Mode::Replication)?;
        let all_tables = check_provider(&mut connection, subscription)?;
        connection.start_copy(&format!(
            "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}, origin {}, node {}, join_transactions 'on')",
            quote_identifier(&subscription.slot),
            lsn_text(start),
            publication_list(&subscription.publications),
            quote_literal(&subscription.origin),
            quote_literal(&local_node),
        ))?;
        let (group, handle) = Group::create(most, settings::apply_buffer_bytes())?;
        group
            .ring
            .register_leader(registry::my_pid(), registry::my_latch());
        let producer = Producer::new(group.ring);
        let appliers = Appliers::start(
            (subscription.id, &subscription.name),
            handle,
            group.ring,
            entry,
            most,
        )
        .map_err(|error| End::Transient(error, 0))?;
        let now = Instant::now();
        let stream = Self {
            grain: applier::grain(&subscription.apply_mode),
            durability: Durability::parse(&subscription.synchronous_commit),
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
            progress: Progress::new(start, applied_up_to),
            appliers,
            schemas: Vec::new(),
            header_seen: false,
            last_end: 0,
            all_tables,
            in_hand: None,
            collected: 0,
            catalog_version: entry.catalog_version.load(Ordering::Acquire),
            last_message: now,
            last_feedback: now,
            last_flush: now,
            limiter: Limiter::new(subscription.id),
            rows: 0,
            ping_sent: false,
            // The first word to the provider: this subscriber is there, and how far it is.
            reply_wanted: true,
            rate: Rate {
                at: now,
                transactions: 0,
                rows: 0,
            },
        };
        entry.received_lsn.store(start, Ordering::Relaxed);
        entry.applied_lsn.store(start, Ordering::Relaxed);
        entry.flushed_lsn.store(0, Ordering::Relaxed);
        entry.set_activity(Activity::CatchingUp);
        Ok(stream)
    }

    fn stop_appliers(&mut self) {
        self.appliers.stop();
        self.coordinator.stop();
    }

    fn run(&mut self) -> Result<(), End> {
        loop {
            let more = self.receive(64)?;
            self.tend()?;
            if let Some(pause) = self.limiter.pause() {
                self.hold_back(pause);
            } else if !more {
                self.sleep();
            }
        }
    }

    /// Take up to `most` messages from the socket, and no more than the rate limit allows. True when there may be more.
    fn receive(&mut self, most: usize) -> Result<bool, End> {
        for _ in 0..most {
            if self.limiter.pause().is_some() {
                return Ok(true);
            }
            match self.connection.try_copy_data()? {
                CopyData::Message(message) => self.message(&message)?,
                CopyData::Pending => return Ok(false),
                CopyData::End => return Err(libpq::Error::EndOfStream.into()),
            }
        }
        Ok(true)
    }

    /// What has to be done from time to time, also while waiting for room.
    fn tend(&mut self) -> Result<(), End> {
        pgrx::check_for_interrupts!();
        worker::reload_settings();
        self.check_appliers()?;
        self.appliers.tend();
        self.collect();
        let catalog_version = self.entry.catalog_version.load(Ordering::Acquire);
        if catalog_version != self.catalog_version {
            // Tables may have come or gone. Nothing of what is in flight depends on it: a table that has just come is
            // skipped up to its copy.
            self.catalog_version = catalog_version;
            self.coordinator.rescan();
            self.entry.tables_version.fetch_add(1, Ordering::AcqRel);
        }
        let copy = self
            .coordinator
            .poll()
            .map_err(|error| End::Permanent(error, 0))?;
        if copy.changed {
            self.entry.tables_version.fetch_add(1, Ordering::AcqRel);
        }
        self.confirm()?;
        self.check_silence()?;
        self.measure();
        Ok(())
    }

    fn check_appliers(&mut self) -> Result<(), End> {
        if let Some(failure) = self.group.ring.failure().get() {
            self.collect();
            let some = |text: String| (!text.is_empty()).then_some(text);
            let error = PgError {
                sqlstate: failure.sqlstate,
                message: failure.message,
                detail: some(failure.detail),
                hint: some(failure.hint).or_else(|| {
                    Some(
                        "Remove the cause and run braid.enable_subscription, or leave this transaction out with \
                         braid.skip_transaction."
                            .to_owned(),
                    )
                }),
            };
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

    /// Take note of what is committed since the last time.
    fn collect(&mut self) {
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

    fn in_flight(&self) -> bool {
        self.in_hand.is_some() || self.collected < self.group.ring.published()
    }

    /// Report positions to the provider when they are wanted or have moved.
    fn confirm(&mut self) -> Result<(), End> {
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
        let positions = self.progress.update(flushed_here, self.in_flight());
        let entry = self.entry;
        let moved = entry.flushed_lsn.swap(positions.flushed, Ordering::Relaxed)
            != positions.flushed
            || entry.applied_lsn.load(Ordering::Relaxed) != positions.applied;
        entry
            .applied_lsn
            .store(positions.applied, Ordering::Relaxed);
        let interval = status_interval();
        let since = now.duration_since(self.last_feedback);
        let due = self.reply_wanted
            || (moved && (idle || since > self.durability.flush_interval()))
            || interval.is_some_and(|interval| since > interval);
        if !due {
            return Ok(());
        }
        self.last_feedback = now;
        self.reply_wanted = false;
        self.send_status(
            positions.received,
            positions.flushed,
            positions.applied,
            false,
        )
    }

    fn send_status(&mut self, write: u64, flush: u64, apply: u64, ping: bool) -> Result<(), End> {
        let mut message = Vec::with_capacity(34);
        message.push(b'r');
        for position in [write, flush, apply] {
            message.extend_from_slice(&position.to_be_bytes());
        }
        message.extend_from_slice(&registry::now().to_be_bytes());
        message.push(u8::from(ping));
        Ok(self.connection.put_copy_data(&message)?)
    }

    /// Ask a silent provider for a sign of life; give it up after `wal_receiver_timeout`.
    fn check_silence(&mut self) -> Result<(), End> {
        let Some(timeout) = receiver_timeout() else {
            return Ok(());
        };
        let silence = self.last_message.elapsed();
        if silence > timeout {
            let error = PgError::new(
                "08006",
                "the provider has been silent for longer than wal_receiver_timeout",
            );
            return Err(End::Transient(error, 0));
        }
        if silence > timeout / 2 && !self.ping_sent {
            self.ping_sent = true;
            let load = |position: &std::sync::atomic::AtomicU64| position.load(Ordering::Relaxed);
            let entry = self.entry;
            let (write, flush, apply) = (
                load(&entry.received_lsn),
                load(&entry.flushed_lsn),
                load(&entry.applied_lsn),
            );
            self.send_status(write, flush, apply, true)?;
        }
        Ok(())
    }

    fn measure(&mut self) {
        let elapsed = self.rate.at.elapsed();
        if elapsed < RATE_INTERVAL {
            return;
        }
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let entry = self.entry;
        let transactions = load(&entry.transactions);
        let rows = load(&entry.inserts) + load(&entry.updates) + load(&entry.deletes);
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let per_second =
            |now: u64, before: u64| now.saturating_sub(before) as f64 / elapsed.as_secs_f64();
        let store = |place: &std::sync::atomic::AtomicU64, rate: f64| {
            place.store(rate.to_bits(), Ordering::Relaxed);
        };
        store(
            &entry.transactions_per_second,
            per_second(transactions, self.rate.transactions),
        );
        store(&entry.rows_per_second, per_second(rows, self.rate.rows));
        self.rate = Rate {
            at: Instant::now(),
            transactions,
            rows,
        };
        if entry.has_failed() {
            // It has streamed for a while: what was wrong is over.
            entry.clear_failure();
        }
    }

    /// Leave what the provider sends where it is for a while, so that it sends no more. Its requests for a sign of life lie there too:
    /// so it is given one without being asked.
    fn hold_back(&mut self, pause: Duration) {
        self.last_message = Instant::now();
        self.reply_wanted |= self.last_feedback.elapsed() > HELD_STATUS_INTERVAL;
        if let Some(time) = self.time_to_rest() {
            self.limiter.wait(pause.min(time));
        }
    }

    fn sleep(&mut self) {
        if let Some(time) = self.time_to_rest() {
            self.socket_wait.wait(time);
        }
    }

    /// How long there is nothing to do but to receive; `None`: commits are there to be taken note of. Appliers set the latch when there
    /// will be.
    fn time_to_rest(&self) -> Option<Duration> {
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
        Some(if self.in_flight() || self.progress.unflushed().is_some() {
            self.durability.flush_interval()
        } else {
            RATE_INTERVAL
        })
    }

    fn message(&mut self, message: &[u8]) -> Result<(), End> {
        self.last_message = Instant::now();
        self.ping_sent = false;
        let entry = self.entry;
        entry
            .last_message_at
            .store(registry::now(), Ordering::Relaxed);
        let position = |at: usize| {
            message
                .get(at..)
                .and_then(<[u8]>::first_chunk::<8>)
                .map(|raw| u64::from_be_bytes(*raw))
                .ok_or(libpq::Error::Unexpected("START_REPLICATION"))
        };
        match message.first() {
            Some(b'w') => {
                let end = position(9)?;
                entry.provider_lsn.fetch_max(end, Ordering::Relaxed);
                let frame = message.get(25..).unwrap_or_default();
                entry.bytes.fetch_add(frame.len() as u64, Ordering::Relaxed);
                let rows = self.rows;
                self.frame(frame, position(1)?)?;
                self.limiter
                    .take(self.rows.wrapping_sub(rows), frame.len() as u64);
                Ok(())
            }
            Some(b'k') => {
                // Up to here WAL was read; what was sent says the stream itself, as transactions may be held back.
                let end = position(1)?;
                entry.provider_lsn.fetch_max(end, Ordering::Relaxed);
                self.reply_wanted |= message.get(17) == Some(&1);
                if !self.in_flight() {
                    if entry.activity() == Activity::CatchingUp {
                        entry.set_activity(Activity::Streaming);
                    }
                    if end <= entry.received_lsn.load(Ordering::Relaxed) {
                        entry.caught_up_at.store(registry::now(), Ordering::Relaxed);
                    }
                }
                Ok(())
            }
            _ => Err(libpq::Error::Unexpected("START_REPLICATION").into()),
        }
    }

    fn received(&mut self, position: u64) {
        self.progress.received(position);
        self.entry
            .received_lsn
            .fetch_max(position, Ordering::Relaxed);
    }

    /// Take a frame apart into the pieces of transactions and store them. The provider had read WAL up to `read` when it sent it.
    fn frame(&mut self, frame: &[u8], read: u64) -> Result<(), End> {
        let mut reader = Reader::new(frame);
        // Where the records that belong to the transaction in hand start in this frame.
        let mut start = 0;
        let mut at = 0;
        while let Some((tag, body)) = reader.next_raw()? {
            let record_start = at;
            at += 5 + body.len();
            match tag {
                Tag::StreamHeader => {
                    self.header(frame.get(record_start..at).unwrap_or_default())?
                }
                Tag::Schema => {
                    self.schema(body, frame.get(record_start..at).unwrap_or_default())?;
                }
                Tag::Begin => {
                    let Record::Begin(begin) = Record::read(tag, body)? else {
                        continue;
                    };
                    start = record_start;
                    self.begin(&begin)?;
                }
                Tag::Insert | Tag::Update | Tag::Delete => self.change(body)?,
                Tag::Truncate => self.truncate(tag, body)?,
                Tag::Message => {
                    if let Record::Message(message) = Record::read(tag, body)?
                        && !message.transactional
                        && self.in_hand.is_none()
                    {
                        // What is confirmed is never sent again: nothing beyond what was read can have been sent.
                        if message.lsn > read {
                            return Err(out_of_order());
                        }
                        self.received(message.lsn);
                    }
                }
                Tag::Commit => {
                    let Record::Commit(commit) = Record::read(tag, body)? else {
                        continue;
                    };
                    self.store(frame.get(start..at).unwrap_or_default())?;
                    self.commit(&commit)?;
                    start = at;
                }
            }
        }
        if self.in_hand.is_some() {
            self.store(frame.get(start..at).unwrap_or_default())?;
        }
        Ok(())
    }

    fn header(&mut self, record: &[u8]) -> Result<(), End> {
        if self.header_seen {
            return Err(out_of_order());
        }
        let mut reader = Reader::new(record);
        let Some(Record::StreamHeader(header)) = reader.next_record()? else {
            return Err(out_of_order());
        };
        if !header.node_name.is_empty() && header.node_name != self.subscription.provider {
            return Err(End::Permanent(
                PgError::new(
                    "55000",
                    format!(
                        "the provider is node \"{}\", but the subscription was made for \"{}\"",
                        header.node_name, self.subscription.provider
                    ),
                )
                .with_hint("Correct the connection string with braid.alter_subscription."),
                0,
            ));
        }
        self.header_seen = true;
        Ok(self.group.append(record)?)
    }

    fn schema(&mut self, body: &[u8], record: &[u8]) -> Result<(), End> {
        if !self.header_seen {
            return Err(out_of_order());
        }
        let Record::Schema(schema) = Record::read(Tag::Schema, body)? else {
            return Err(out_of_order());
        };
        if schema.number.0 as usize != self.schemas.len() {
            return Err(out_of_order());
        }
        self.schemas
            .push((schema.namespace.to_owned(), schema.name.to_owned()));
        self.orders.learn(&schema);
        if self.all_tables {
            self.adopt_table(schema.namespace, schema.name)?;
        }
        Ok(self.group.append(record)?)
    }

    /// A table that was not there when the slot was made, of a publication FOR ALL TABLES: its changes are in the stream from the
    /// first one on, so it belongs to the subscription; where it has rows here, without a copy. Of a publication with a list, a table that is added may
    /// have rows already: braid.refresh_subscription copies them.
    fn adopt_table(&mut self, namespace: &str, name: &str) -> Result<(), End> {
        let id = self.subscription.id;
        let copy_data = self.subscription.copy_data;
        let added = error::transaction(|| {
            // One that is empty here may have been dropped and made anew while the provider's was not.
            let copy = copy_data && subscription::is_empty(namespace, name)?;
            subscription::add_table(id, namespace, name, copy)
        })?;
        if added {
            pgrx::log!(
                "table \"{namespace}.{name}\" is now part of subscription \"{}\"",
                self.subscription.name
            );
            self.coordinator.rescan();
            self.entry.tables_version.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    fn begin(&mut self, begin: &Begin<'_>) -> Result<(), End> {
        if self.in_hand.is_some() || !self.header_seen {
            return Err(out_of_order());
        }
        while !self.producer.has_descriptor() {
            let tail = self.group.ring.tail();
            self.wait_for_commits(tail)?;
        }
        self.orders.refresh();
        self.tracker
            .begin(self.producer.sequence(), self.group.ring.committed());
        let skip = self.subscription.skip_lsn;
        self.in_hand = Some(InHand {
            begin_commit_lsn: begin.commit_lsn,
            commit_timestamp: begin.commit_timestamp,
            changes: 0,
            // A change never goes back to where it came from (I8), whatever a provider sends.
            discard: begin.origin == self.local_node,
            skip: skip != 0 && begin.commit_lsn == skip,
            blocked_on: HashSet::new(),
        });
        Ok(())
    }

    fn is_ready(&self, schema: u32) -> Result<bool, End> {
        let Some((namespace, name)) = self.schemas.get(schema as usize) else {
            return Err(out_of_order());
        };
        Ok(self.coordinator.is_ready(namespace, name))
    }

    fn change(&mut self, body: &[u8]) -> Result<(), End> {
        let header = Record::read_change_header(body)?;
        self.rows = self.rows.wrapping_add(1);
        let ready = self.is_ready(header.schema.0)?;
        let Some(in_hand) = self.in_hand.as_mut() else {
            return Err(out_of_order());
        };
        if in_hand.discard {
            // Its number is used again: it must leave no trace in the tracker.
            return Ok(());
        }
        in_hand.changes = in_hand.changes.saturating_add(1);
        if !ready {
            in_hand.blocked_on.insert(header.schema.0);
        }
        let (table, order) = self.orders.of(header.schema.0)?.ok_or_else(out_of_order)?;
        match order {
            TableOrder::Keys if !header.barrier => {}
            TableOrder::Keys | TableOrder::Table { .. } => self.tracker.barrier(table),
            TableOrder::Everything { .. } => self.tracker.barrier_for_all(),
        }
        self.tracker.change(table, header.writeset.hashes());
        Ok(())
    }

    fn truncate(&mut self, tag: Tag, body: &[u8]) -> Result<(), End> {
        let Record::Truncate(truncate) = Record::read(tag, body)? else {
            return Err(out_of_order());
        };
        if self.in_hand.as_ref().is_some_and(|in_hand| in_hand.discard) {
            return Ok(());
        }
        for schema in truncate.schemas() {
            let ready = self.is_ready(schema.0)?;
            let (table, order) = self.orders.of(schema.0)?.ok_or_else(out_of_order)?;
            match order {
                TableOrder::Keys | TableOrder::Table { .. } => self.tracker.barrier(table),
                TableOrder::Everything { .. } => self.tracker.barrier_for_all(),
            }
            let Some(in_hand) = self.in_hand.as_mut() else {
                return Err(out_of_order());
            };
            in_hand.changes = in_hand.changes.saturating_add(1);
            if !ready {
                in_hand.blocked_on.insert(schema.0);
            }
        }
        Ok(())
    }

    /// Hold the stream until the tables that the transaction in hand touches are copied.
    fn wait_for_tables(&mut self) -> Result<(), End> {
        loop {
            let blocked = self.in_hand.as_ref().is_some_and(|in_hand| {
                in_hand.blocked_on.iter().any(|schema| {
                    self.schemas
                        .get(*schema as usize)
                        .is_some_and(|(namespace, name)| {
                            !self.coordinator.is_ready(namespace, name)
                        })
                })
            });
            if !blocked {
                if let Some(in_hand) = self.in_hand.as_mut() {
                    in_hand.blocked_on.clear();
                }
                return Ok(());
            }
            self.tend()?;
            latch::wait(Some(Duration::from_millis(50)));
            // As in `wait_for_commits`: nobody looks at the socket meanwhile.
            self.last_message = Instant::now();
        }
    }

    /// Store records of the transaction in hand, in as many pieces as it takes.
    fn store(&mut self, records: &[u8]) -> Result<(), End> {
        // What is to be skipped is passed without its content: a large one would else be applied as it comes.
        if self
            .in_hand
            .as_ref()
            .is_none_or(|in_hand| in_hand.discard || in_hand.skip)
            || records.is_empty()
        {
            return Ok(());
        }
        let piece = self.producer.piece();
        let mut rest = records;
        let mut first = true;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(piece));
            loop {
                let tail = self.group.ring.tail();
                if self.producer.store(now, first, later.is_empty()) {
                    break;
                }
                self.wait_for_commits(tail)?;
            }
            first = false;
            rest = later;
            if self.producer.should_open() {
                // Too large to be held whole: it is applied as it comes, alone.
                self.wait_for_tables()?;
                self.tracker.barrier_for_all();
                self.producer.publish_open();
                let lsn = self
                    .in_hand
                    .as_ref()
                    .map_or(0, |in_hand| in_hand.begin_commit_lsn);
                self.producer.announce(lsn);
            }
            if self.producer.is_open() {
                self.producer.extend();
                for latch in self.group.ring.all_appliers().iter() {
                    registry::set_latch(latch);
                }
            }
        }
        Ok(())
    }

    /// The ring is full: wait until appliers have committed something since it was last collected, or released room since
    /// `tail` was read; and keep the connection alive meanwhile.
    fn wait_for_commits(&mut self, tail: u64) -> Result<(), End> {
        // Looked at before anything is collected: else a commit that made room after the failed attempt would count as
        // known, and be slept on.
        // A wake-up for half of what is there: one for each commit would cost more than the commit.
        let last = self.group.ring.published();
        self.group
            .ring
            .leader_will_wait(self.collected + last.saturating_sub(self.collected).div_ceil(2));
        if self.group.ring.committed() == self.collected && self.group.ring.tail() == tail {
            latch::wait(Some(FLUSH_INTERVAL));
        }
        self.tend()?;
        // What the provider sends lies in the socket: it is alive as far as anybody can tell.
        self.last_message = Instant::now();
        Ok(())
    }

    fn commit(&mut self, commit: &Commit) -> Result<(), End> {
        if self.in_hand.is_none() {
            return Err(out_of_order());
        }
        self.wait_for_tables()?;
        let Some(in_hand) = self.in_hand.take() else {
            return Err(out_of_order());
        };
        // Everything before an end that is committed here counts as received, and is never asked for again.
        if in_hand.begin_commit_lsn != commit.commit_lsn
            || in_hand.commit_timestamp != commit.commit_timestamp
            || commit.commit_lsn < self.last_end
            || commit.end_lsn <= commit.commit_lsn
            || commit.end_lsn - commit.commit_lsn > MAX_COMMIT_RECORD
        {
            return Err(out_of_order());
        }
        self.last_end = commit.end_lsn;
        if in_hand.discard {
            self.tracker.abandon();
            self.producer.discard();
        } else {
            let edges = self.tracker.finish();
            let skip = in_hand.skip
                || (self.subscription.skip_lsn != 0
                    && self.subscription.skip_lsn == commit.end_lsn);
            let open = self.producer.is_open();
            self.producer.publish(&Complete {
                depends_on: edges.latest,
                commit_lsn: commit.commit_lsn,
                end_lsn: commit.end_lsn,
                commit_timestamp: commit.commit_timestamp,
                changes: in_hand.changes,
                skip,
            });
            // The reader of an open one waits for more of it, or for this.
            let ring = self.group.ring;
            let wakes = if open {
                ring.all_appliers()
            } else {
                ring.idle_appliers(self.grain)
            };
            for latch in wakes.iter() {
                registry::set_latch(latch);
            }
        }
        self.received(commit.end_lsn);
        Ok(())
    }
}

fn out_of_order() -> End {
    End::Transient(
        PgError::new("08P01", "records from the provider are out of order")
            .with_hint("The provider runs a version of braid that this one does not understand."),
        0,
    )
}

/// Look at the provider before streaming: what can be said better than START_REPLICATION says it. Returns whether one of the
/// publications is FOR ALL TABLES.
fn check_provider(connection: &mut Connection, subscription: &Subscription) -> Result<bool, End> {
    let rows = connection.query(&format!(
        "SELECT plugin, wal_status FROM pg_catalog.pg_replication_slots WHERE slot_name = {}",
        quote_literal(&subscription.slot)
    ))?;
    let permanent = |sqlstate: &str, message: String, hint: &str| -> Result<bool, End> {
        Err(End::Permanent(
            PgError::new(sqlstate, message).with_hint(hint),
            0,
        ))
    };
    if rows.is_empty() {
        return permanent(
            "42704",
            format!(
                "replication slot \"{}\" does not exist at the provider",
                subscription.slot
            ),
            policy::provider_hint("42704", "replication slot"),
        );
    }
    if rows.get(0, 0) != Some("braid") {
        return permanent(
            "55000",
            format!(
                "replication slot \"{}\" at the provider is not braid's",
                subscription.slot
            ),
            "Drop the subscription and create it with another slot_name.",
        );
    }
    if rows.get(0, 1) == Some("lost") {
        return permanent(
            "55000",
            format!(
                "the provider has removed WAL that slot \"{}\" needs",
                subscription.slot
            ),
            policy::provider_hint("55000", "removed"),
        );
    }
    let names = subscription::publication_literals(&subscription.publications);
    let rows = connection.query(&format!(
        "SELECT p FROM unnest(ARRAY[{names}]::text[]) p \
         WHERE p NOT IN (SELECT pubname FROM pg_catalog.pg_publication)"
    ))?;
    if let Some(missing) = rows.get(0, 0) {
        return permanent(
            "42704",
            format!("publication \"{missing}\" does not exist at the provider"),
            policy::provider_hint("42704", "publication"),
        );
    }
    let rows = connection.query(&format!(
        "SELECT 1 FROM pg_catalog.pg_publication WHERE puballtables AND pubname IN ({names})"
    ))?;
    Ok(!rows.is_empty())
}

/// `wal_receiver_status_interval`; `None` when it is 0.
fn status_interval() -> Option<Duration> {
    // SAFETY: a setting of the server, in seconds.
    let seconds = unsafe { pg_sys::wal_receiver_status_interval };
    u64::try_from(seconds)
        .ok()
        .filter(|seconds| *seconds > 0)
        .map(Duration::from_secs)
}

/// `wal_receiver_timeout`; `None` when it is 0.
fn receiver_timeout() -> Option<Duration> {
    // SAFETY: a setting of the server, in milliseconds.
    let milliseconds = unsafe { pg_sys::wal_receiver_timeout };
    u64::try_from(milliseconds)
        .ok()
        .filter(|time| *time > 0)
        .map(Duration::from_millis)
}
