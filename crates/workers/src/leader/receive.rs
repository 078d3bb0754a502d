//! Frames from the provider, taken apart into transactions: each record is looked at for what
//! scheduling wants to know, its bytes are stored as they are.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_apply::{is_rule, is_statement, is_versions};
use braid_bgworker::commit_sequence::Arrival;
use braid_bgworker::dictionary::Entry;
use braid_bgworker::sqlstate::SqlState;
use braid_decoder::{POSITION_PREFIX, REPLACED_PREFIX};
use braid_gir::{Begin, Commit, Position, Reader, Record, Tag, lsn_text};
use braid_node::subscription::{self, InitialCopy};
use braid_postgres::error::{self, PgError};
use braid_postgres::wait::Wait;
use braid_postgres::{latch, process};
use braid_ring::{Complete, EDGES};

use super::confirmation::FLUSH_INTERVAL;
use super::provider_end;
use super::reception::{InHand, Reception};
use super::{End, late, out_of_order};
use crate::applier::here;
use crate::copy::Readiness;

/// How far a commit record's end may lie behind its start: XLogRecordMaxSize of
/// src/include/access/xlogrecord.h, 18, with page headers.
const MAX_COMMIT_RECORD: u64 = 1 << 31;
/// How long the manager may take to act on options that have changed, and how long a leader rests
/// until it looks whether it has.
const OF_MANAGER: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(100);

/// Say where to look, if the error is that the provider's bytes are wrong.
fn located(end: End, position: &Position, read: u64) -> End {
    match end {
        End::Transient(mut error, lsn) if error.sqlstate == SqlState::ProtocolViolation => {
            let read = lsn_text(read);
            error.detail.get_or_insert_with(|| {
                format!("In {position} of the frame that was sent at {read}.")
            });
            End::Transient(error, lsn)
        }
        end => end,
    }
}

/// Whether a message says which version of a row the change that comes next has replaced.
fn is_replaced(tag: Tag, body: &[u8]) -> Result<bool, End> {
    let record = Record::read(tag, body)?;
    Ok(matches!(record, Record::Message(message) if message.prefix == REPLACED_PREFIX))
}

impl Reception {
    /// Splits a frame into the parts of transactions and stores them. The provider had read WAL up
    /// to `read` when it sent the frame.
    pub(super) fn frame(&mut self, frame: &[u8], read: u64) -> Result<(), End> {
        let mut reader = Reader::new(frame);
        self.records(frame, read, &mut reader)
            .map_err(|end| located(end, &reader.position(), read))
    }

    fn records<'a>(
        &mut self,
        frame: &'a [u8],
        read: u64,
        reader: &mut Reader<'a>,
    ) -> Result<(), End> {
        // Where the records of the current transaction start in this frame.
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
                Tag::Subtransaction | Tag::SegmentStop => {
                    self.keep(frame.get(start..record_start).unwrap_or_default())?;
                    self.segment_record(tag, body)?;
                    start = at;
                }
                Tag::SegmentStart | Tag::Abort | Tag::StreamedCommit | Tag::StreamedPrepare => {
                    self.segment_record(tag, body)?;
                    start = at;
                }
                Tag::BeginPrepared => {
                    let Record::BeginPrepared(prepared) = Record::read(tag, body)? else {
                        continue;
                    };
                    start = record_start;
                    self.begin_prepared(&prepared)?;
                }
                Tag::CommitPrepared | Tag::RollbackPrepared => {
                    let record = frame.get(record_start..at).unwrap_or_default();
                    self.finish_prepared(&Record::read(tag, body)?, record)?;
                    start = at;
                }
                Tag::Insert | Tag::Update | Tag::Delete if self.segments.is_open() => {
                    self.intake.count_row();
                    self.running_change(body)?;
                }
                // The message belongs to the next change.
                Tag::Message if self.segments.is_open() && is_replaced(tag, body)? => {}
                Tag::Truncate | Tag::Message if self.segments.is_open() => {
                    if let Some(content) = self.segments.content() {
                        content.leave("It is more than changes of rows.");
                    }
                }
                Tag::Insert | Tag::Update | Tag::Delete => self.change(body)?,
                Tag::Truncate => self.truncate(tag, body)?,
                Tag::Message if self.in_hand.is_some() => self.transactional_message(tag, body)?,
                Tag::Message => {
                    if let Record::Message(message) = Record::read(tag, body)?
                        && !message.transactional
                    {
                        // A confirmed position is never sent again, so the provider can't have sent
                        // anything beyond what it has read.
                        if message.lsn > read {
                            return Err(out_of_order());
                        }
                        self.received(message.lsn);
                        if message.prefix == POSITION_PREFIX {
                            provider_end::told(self.entry, message.lsn, self.intake.sent_at());
                        }
                    }
                }
                Tag::Commit | Tag::Prepare => {
                    let (Record::Commit(commit) | Record::Prepare(commit)) =
                        Record::read(tag, body)?
                    else {
                        continue;
                    };
                    self.store(frame.get(start..at).unwrap_or_default())?;
                    self.commit(&commit)?;
                    start = at;
                }
            }
        }
        let rest = frame.get(start..at).unwrap_or_default();
        if self.in_hand.is_some() {
            self.store(rest)?;
        } else if self.segments.is_open() {
            self.keep(rest)?;
        }
        Ok(())
    }

    pub(super) fn header(&mut self, record: &[u8]) -> Result<(), End> {
        if self.dictionary.is_open() {
            return Err(out_of_order());
        }
        let mut reader = Reader::new(record);
        let Some(Record::StreamHeader(header)) = reader.next_record()? else {
            return Err(out_of_order());
        };
        if !header.node_name.is_empty() && header.node_name != self.subscription.provider {
            return Err(End::Permanent(
                PgError::new(
                    SqlState::ObjectNotInPrerequisiteState,
                    format!(
                        "the provider is node \"{}\", but the subscription was made for \"{}\"",
                        header.node_name, self.subscription.provider
                    ),
                )
                .with_hint("Correct the connection string with braid.alter_subscription."),
                0,
            ));
        }
        self.dictionary.open();
        Ok(self.group.append(record)?)
    }

    pub(super) fn schema(&mut self, body: &[u8], record: &[u8]) -> Result<(), End> {
        let Record::Schema(schema) = Record::read(Tag::Schema, body)? else {
            return Err(out_of_order());
        };
        let entry = Entry {
            oid: schema.relation_oid,
            namespace: schema.namespace.to_owned(),
            name: schema.name.to_owned(),
        };
        let all_tables = self.copies.take_all_tables();
        let is_new = all_tables && !self.copies.knows(&entry);
        if !self.dictionary.learn(schema.number.0, entry) {
            return Err(out_of_order());
        }
        self.scheduling.learn(&schema);
        if self.has_ddl() {
            // The statement that makes it may not be run yet.
        } else if all_tables && self.segments.is_open() {
            self.segments.tentative.insert(schema.number.0);
        } else if is_new {
            // For a known table, the first change shows whether it is still the same one
            // (`look_at_table`).
            self.adopt_table(schema.namespace, schema.name)?;
        }
        Ok(self.group.append(record)?)
    }

    /// Handles a table of a publication FOR ALL TABLES that was created after the slot. Its changes
    /// are in the stream from the first one on, so it joins the subscription; without a copy, if it
    /// has local rows. With a publication that lists tables, an added table may have rows already:
    /// braid.refresh_subscription copies them.
    pub(super) fn adopt_table(&mut self, namespace: &str, name: &str) -> Result<(), End> {
        let id = self.subscription.id;
        let copy_data = self.subscription.options.copy_data;
        let passes = self.passes_unknown();
        let added = self.without_blocking(|| {
            if subscription::has_table(id, namespace, name)? {
                return Ok(false);
            }
            // A local table that is empty may have been dropped and created again, while the
            // provider's was not.
            let copy = if !copy_data || !subscription::is_empty(namespace, name)? {
                InitialCopy::No
            } else if passes {
                InitialCopy::Yes
            } else {
                InitialCopy::UnlessFilled
            };
            subscription::add_table(id, namespace, name, copy)
        })?;
        if added {
            pgrx::log!(
                "table \"{namespace}.{name}\" is now part of subscription \"{}\"",
                self.subscription.name
            );
            self.copies.rescan(self.entry);
        }
        Ok(())
    }

    /// Runs a transaction of the leader's own that reads users' tables. Another session may have
    /// locked one, or wait for it in front of the leader. As long as that takes, the leader does
    /// its periodic work. That work may be what ends the lock: a transaction prepared on this node
    /// holds its locks until the leader has read its end, or has given it up.
    pub(super) fn without_blocking<T>(
        &mut self,
        mut work: impl FnMut() -> Result<T, PgError>,
    ) -> Result<T, End> {
        self.hand_out();
        loop {
            let outcome = error::transaction(|| {
                subscription::limit_lock_waits()?;
                work()
            });
            match outcome {
                Err(failure) if failure.sqlstate == SqlState::LockNotAvailable => {}
                outcome => return Ok(outcome?),
            }
            self.contact.looked_away(Instant::now());
            self.report_while_held();
            self.tend()?;
        }
    }

    /// Waits where options have changed, until the manager has ended this leader, or has found that
    /// it has them: nothing that comes after the change is applied with the options from before.
    fn wait_for_manager(&mut self) -> Result<(), End> {
        if !self.entry.is_to_heed() {
            return Ok(());
        }
        // A manager that does not come to it holds nothing up.
        let deadline = Instant::now() + OF_MANAGER;
        while self.entry.is_to_heed() && Instant::now() < deadline {
            self.contact.looked_away(Instant::now());
            self.report_while_held();
            self.tend()?;
            latch::wait(Some(LOOK));
        }
        self.contact.looked_away(Instant::now());
        Ok(())
    }

    pub(super) fn begin(&mut self, begin: &Begin<'_>) -> Result<(), End> {
        if self.in_hand.is_some() || self.segments.is_open() || !self.dictionary.is_open() {
            return Err(out_of_order());
        }
        self.wait_for_manager()?;
        self.expect_rest(begin.commit_lsn)?;
        let skip = self.subscription.skip_lsn;
        let skip = skip != 0 && begin.commit_lsn == skip;
        // A change never goes back to its origin (I8), whatever a provider sends. Nor is a
        // transaction applied again that an earlier leader's appliers have committed before others
        // (I1).
        let discard =
            begin.origin == self.local_node || self.resumption.is_committed(begin.commit_lsn);
        if !skip && !discard {
            self.wait_for_its_time(begin)?;
        }
        let is_rest = self.resumption.takes_rest(begin.commit_lsn);
        while !self.producer.has_descriptor() {
            let tail = self.group.ring.tail();
            self.wait_for_commits(tail)?;
        }
        self.scheduling
            .begin(self.producer.sequence(), self.group.ring.committed());
        self.in_hand = Some(InHand {
            begin_commit_lsn: begin.commit_lsn,
            commit_timestamp: begin.commit_timestamp,
            changes: 0,
            discard,
            skip,
            split: is_rest,
            streamed: false,
            two_phase: None,
            has_rule: false,
            has_ddl: false,
            is_plain: true,
            elsewhere: false,
            blocked_on: HashSet::new(),
        });
        Ok(())
    }

    /// Settles a schema that arrived in a segment: its relation exists after all.
    fn settle(&mut self, schema: u32) -> Result<(), End> {
        if !self.segments.tentative.remove(&schema) {
            return Ok(());
        }
        let table = self.dictionary.get(schema).cloned();
        let table = table.ok_or_else(out_of_order)?;
        self.adopt_table(&table.namespace, &table.name)
    }

    /// Whether the current transaction, which changes the relation of a schema, has to wait for a
    /// copy.
    pub(super) fn has_to_wait(&mut self, schema: u32) -> Result<bool, End> {
        if self.has_ddl() {
            // The transaction may change its tables before the change; its applier checks them.
            let table = self.dictionary.get(schema).ok_or_else(out_of_order)?;
            let readiness = self.copies.readiness(table);
            return Ok(readiness == Readiness::Waiting);
        }
        if !self.segments.tentative.is_empty() {
            self.settle(schema)?;
        }
        let is_wanted = self
            .in_hand
            .as_ref()
            .is_some_and(|in_hand| !in_hand.discard && !in_hand.skip);
        if is_wanted && !self.scheduling.is_known(schema) {
            self.look_at_table(schema)?;
        }
        let table = self.dictionary.get(schema).ok_or_else(out_of_order)?;
        Ok(match self.copies.readiness(table) {
            Readiness::Ready => false,
            Readiness::Waiting => true,
            Readiness::Unknown => !self.passes_unknown(),
        })
    }

    /// Whether the current transaction leaves out the changes of a table that it brings into the
    /// subscription. A prepared transaction can't wait for the copy: the copy can't begin before
    /// the transaction has ended.
    fn passes_unknown(&self) -> bool {
        self.in_hand
            .as_ref()
            .is_some_and(|in_hand| in_hand.two_phase.is_some())
    }

    pub(super) fn change(&mut self, body: &[u8]) -> Result<(), End> {
        let header = Record::read_change_header(body)?;
        self.intake.count_row();
        let waits = self.has_to_wait(header.schema.0)?;
        let Some(in_hand) = self.in_hand.as_mut() else {
            return Err(out_of_order());
        };
        if in_hand.discard {
            // The transaction's number is used again, so it must leave no trace in the tracker.
            return Ok(());
        }
        in_hand.changes = in_hand.changes.saturating_add(1);
        if waits {
            in_hand.blocked_on.insert(header.schema.0);
        }
        in_hand.is_plain &= !waits && !in_hand.has_ddl;
        // All before it is waited for, and all after it waits for it.
        if !in_hand.has_ddl {
            in_hand.is_plain &= self.scheduling.change(&header)?;
        }
        Ok(())
    }

    pub(super) fn truncate(&mut self, tag: Tag, body: &[u8]) -> Result<(), End> {
        let Record::Truncate(truncate) = Record::read(tag, body)? else {
            return Err(out_of_order());
        };
        if self.in_hand.as_ref().is_some_and(|in_hand| in_hand.discard) {
            return Ok(());
        }
        for schema in truncate.schemas() {
            let waits = self.has_to_wait(schema.0)?;
            if !self.has_ddl() {
                self.scheduling.truncate(schema.0)?;
            }
            let Some(in_hand) = self.in_hand.as_mut() else {
                return Err(out_of_order());
            };
            in_hand.is_plain = false;
            in_hand.changes = in_hand.changes.saturating_add(1);
            if waits {
                in_hand.blocked_on.insert(schema.0);
            }
        }
        Ok(())
    }

    /// A rule for conflicts, and a versioned transaction, come after all before and before all
    /// after.
    pub(super) fn transactional_message(&mut self, tag: Tag, body: &[u8]) -> Result<(), End> {
        let Record::Message(message) = Record::read(tag, body)? else {
            return Err(out_of_order());
        };
        if let Some(in_hand) = self.in_hand.as_mut()
            && is_rule(&message)
            && !in_hand.discard
        {
            in_hand.has_rule = true;
            self.scheduling.barrier_for_all();
        }
        if let Some(in_hand) = self.in_hand.as_mut()
            && is_versions(&message)
            && !in_hand.discard
        {
            // The transaction's applier waits for other streams before it begins. Then nothing of
            // this stream is open: all before it is committed, nothing after it has begun.
            in_hand.has_rule = true;
            in_hand.is_plain = false;
            self.scheduling.barrier_for_all();
        }
        if let Some(in_hand) = self.in_hand.as_mut()
            && is_statement(&message)
            && !in_hand.discard
        {
            in_hand.has_ddl = true;
            in_hand.is_plain = false;
            in_hand.changes = in_hand.changes.saturating_add(1);
            self.scheduling.barrier_for_all();
        }
        Ok(())
    }

    /// Whether the current transaction has changed the schema so far.
    fn has_ddl(&self) -> bool {
        self.in_hand.as_ref().is_some_and(|in_hand| in_hand.has_ddl)
    }

    /// Waits until all is applied, or parked: later changes are examined under the schema that a
    /// statement has left.
    fn wait_for_statement(&mut self) -> Result<(), End> {
        self.wait_for_all()?;
        self.copies.rescan(self.entry);
        Ok(())
    }

    /// Waits until all that is complete is applied, or parked.
    pub(super) fn wait_for_all(&mut self) -> Result<(), End> {
        while self.confirmation.collected() < self.producer.completed() {
            let tail = self.group.ring.tail();
            self.wait_for_commits(tail)?;
        }
        Ok(())
    }

    /// Holds the stream until the tables that the current transaction touches are copied. A copy
    /// may wait for a transaction at the provider whose commit waits for this subscription. Then
    /// the stream goes on: an applier parks the transaction (`copy/blocked.rs`).
    pub(super) fn wait_for_tables(&mut self) -> Result<(), End> {
        while self.is_blocked() && !self.entry.parks_for_copies() {
            self.tend()?;
            // Where the states of tables had only to be read again, there is nothing to wait for.
            if self.is_blocked() {
                latch::wait_as(Wait::Tables, Duration::from_millis(50));
            }
            // As in `wait_for_commits`: nobody looks at the socket meanwhile.
            self.contact.looked_away(Instant::now());
        }
        if let Some(in_hand) = self.in_hand.as_mut() {
            in_hand.blocked_on.clear();
        }
        Ok(())
    }

    /// Whether the current transaction touches a table that is still to be copied.
    fn is_blocked(&self) -> bool {
        self.in_hand.as_ref().is_some_and(|in_hand| {
            in_hand.blocked_on.iter().any(|schema| {
                self.dictionary
                    .get(*schema)
                    .is_some_and(|table| self.copies.readiness(table) != Readiness::Ready)
            })
        })
    }

    /// Stores records of the current transaction in the ring, in as many chunks as it takes.
    pub(super) fn store(&mut self, records: &[u8]) -> Result<(), End> {
        // A skipped transaction is passed without its content; a large one would otherwise be
        // applied while it arrives.
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
                self.hand_out();
                self.wait_for_tables()?;
                self.entry.schedule.large.fetch_add(1, Ordering::Relaxed);
                self.scheduling.too_large();
                if let Some(in_hand) = self.in_hand.as_mut() {
                    in_hand.split |= self.subscription.options.split_transactions_above > 0
                        && in_hand.two_phase.is_none();
                    self.producer
                        .publish_open(in_hand.begin_commit_lsn, in_hand.split);
                }
            }
            if self.producer.is_open() {
                self.producer.extend();
                for latch in self.group.ring.all_appliers().iter() {
                    process::set_latch(latch);
                }
            }
        }
        Ok(())
    }

    /// The ring is full: wait until appliers have committed something since it was last collected,
    /// or released room since `tail` was read; and keep the connection alive meanwhile.
    pub(super) fn wait_for_commits(&mut self, tail: u64) -> Result<(), End> {
        self.hand_out();
        // Read before anything is collected: otherwise a commit that made room after the failed
        // attempt would count as known, and the leader would sleep. Wake up when half of the
        // transactions are committed: a wake-up for each commit would cost more than the commit.
        let last = self.group.ring.published();
        let collected = self.confirmation.collected();
        self.group
            .ring
            .leader_will_wait(collected + last.saturating_sub(collected).div_ceil(2));
        if self.group.ring.committed() == collected && self.group.ring.tail() == tail {
            latch::wait_as(Wait::Appliers, FLUSH_INTERVAL);
        }
        self.tend()?;
        // Messages of the provider may wait in the socket, so its silence does not count.
        self.contact.looked_away(Instant::now());
        Ok(())
    }

    pub(super) fn commit(&mut self, commit: &Commit) -> Result<(), End> {
        if self.in_hand.is_none() {
            return Err(out_of_order());
        }
        self.wait_for_tables()?;
        self.store_outline()?;
        let Some(in_hand) = self.in_hand.take() else {
            return Err(out_of_order());
        };
        // Everything before an end that is committed on this node counts as received, and is never
        // requested again.
        if in_hand.begin_commit_lsn != commit.commit_lsn
            || in_hand.commit_timestamp != commit.commit_timestamp
            || commit.end_lsn <= commit.commit_lsn
            || commit.end_lsn - commit.commit_lsn > MAX_COMMIT_RECORD
        {
            return Err(out_of_order());
        }
        match self.resumption.arrive(commit.commit_lsn, commit.end_lsn) {
            Arrival::Next => {}
            Arrival::Again => return Err(out_of_order()),
            Arrival::Late(after) => return Err(late(commit.commit_lsn, after)),
        }
        if in_hand.discard {
            self.scheduling.abandon();
            self.producer.discard();
        } else {
            let most = self.subscription.options.split_transactions_above;
            let split = in_hand.split
                || (most > 0 && in_hand.changes > most && in_hand.two_phase.is_none());
            if split {
                // Its chunks must follow all earlier transactions, and all later ones must follow
                // the last chunk.
                self.scheduling.too_large();
            }
            let edges = self.scheduling.finish(&self.entry.schedule);
            let mut single = [0; EDGES];
            for (place, edge) in single.iter_mut().zip(edges.all) {
                *place = *edge;
            }
            let skip = in_hand.skip
                || (self.subscription.skip_lsn != 0
                    && self.subscription.skip_lsn == commit.end_lsn);
            let open = self.producer.is_open();
            let changes = in_hand.changes;
            let may_be_here = in_hand.is_plain
                && in_hand.changes <= here::CHANGES
                && self.producer.pending_bytes() <= here::BYTES
                && !skip
                && !split
                && !in_hand.streamed
                && in_hand.two_phase.is_none()
                && !in_hand.has_rule
                && !in_hand.has_ddl
                && !in_hand.elsewhere;
            let sequence = self.producer.complete(&Complete {
                depends_on: edges.latest,
                through: edges.through,
                edges: single,
                commit_lsn: commit.commit_lsn,
                end_lsn: commit.end_lsn,
                commit_timestamp: commit.commit_timestamp,
                changes: in_hand.changes,
                skip,
                split,
                wide: in_hand.streamed,
                alone: in_hand.two_phase.is_some()
                    || in_hand.has_rule
                    || in_hand.has_ddl
                    || in_hand.elsewhere,
                elsewhere: in_hand.elsewhere,
            });
            if open {
                // The reader waits for more of the transaction, or for its end.
                for latch in self.group.ring.all_appliers().iter() {
                    process::set_latch(latch);
                }
            } else {
                let out = (&self.group, &self.producer);
                self.handout.add(out, sequence, may_be_here, changes);
            }
            if in_hand.has_ddl {
                self.wait_for_statement()?;
            }
        }
        self.watch.newest = self.watch.newest.max(commit.commit_timestamp);
        self.received(commit.end_lsn);
        Ok(())
    }
}
