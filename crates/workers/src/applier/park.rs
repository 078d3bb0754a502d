//! Transactions that are set aside (`on_error => 'park'`): how one is parked, how those behind it are found, and how they are tried again.
//! `braid_bgworker::parked` has the rule, `braid_node::parked` what is stored.
//!
//! Of one that is committed in pieces, what is not committed yet is parked, in the commit that forgets how far the pieces went.
//!
//! A transaction is parked in one commit that stores its records and moves the subscription's position past it: it is either applied or
//! parked, whatever is killed (I1). It is parked when it is its turn, with all before it committed, in relaxed order too.
//!
//! Whoever depends on a transaction waits until that is committed, or parked, before it looks at what is parked; and `parked_version` grows
//! before the ring says that a transaction is done. So nobody misses one that it has to follow.
//!
//! Applier 0 tries what is parked again, one transaction at a time, in between those that it takes from the ring: what is asked for by
//! `braid.retry_parked`, and what has no error of its own and nothing to wait for any more. Whatever else touches the same keys is parked behind it, so
//! nothing of the stream can overtake it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_apply::{Session, is_in_the_way};
use braid_bgworker::parked::Touch;
use braid_bgworker::policy::{self, Policy};
use braid_bgworker::split::{Progress, Split};
use braid_gir::{Reader, Record, Tag, lsn_text};
use braid_node::group::LogPlace;
use braid_node::parked::{self, Known, Note, Why};
use braid_node::{crash, origin, split};
use braid_postgres::error::{self, PgError};
use braid_postgres::wait::Wait;
use braid_postgres::{latch, process};
use braid_ring::{ApplierState, FrameRead, Run, Transaction};
use pgrx::pg_sys;

use super::piece::differs;
use super::{Applier, Trouble, fail, new_session, set_latches};

/// What is said when there is no room for another one.
const FULL: &str = "53400";
/// How long to wait for room while nothing happens to what is parked.
const PATIENCE: Duration = Duration::from_secs(10);
/// Attempts at a parked transaction that fails with what may pass.
const ATTEMPTS: u32 = 5;

/// What is parked, as this applier knows it.
#[derive(Debug, Default)]
pub(super) struct Parking {
    known: Known,
    /// The `parked_version` that it is as of.
    version: Option<u32>,
    /// The same, and the request, that applier 0 has dealt with.
    tended: Option<(u32, u64)>,
    /// Changes of the transaction in hand are held against it one by one.
    guarding: bool,
    /// The parked transaction that the one in hand has turned out to have to follow; 0: none.
    held_by: i64,
    /// What is tried is the rest of a transaction whose first pieces are committed.
    is_rest: bool,
    /// How long to wait for room while nothing happens to what is parked.
    patience: Option<((usize, usize), Instant)>,
}

/// What a transaction in the ring consists of.
#[derive(Debug, Default)]
struct Content {
    note: Note,
    /// Changed rows by schema: whether there is a barrier, and hashes.
    changes: BTreeMap<u32, (bool, Vec<u64>)>,
}

impl Content {
    fn record(&mut self, tag: Tag, body: &[u8]) -> Result<(), PgError> {
        match tag {
            Tag::Insert | Tag::Update | Tag::Delete => {
                let header = Record::read_change_header(body)?;
                let (barrier, hashes) = self.changes.entry(header.schema.0).or_default();
                *barrier |= header.barrier;
                hashes.extend(header.writeset.hashes());
                self.note.changes += 1;
            }
            _ => match Record::read(tag, body)? {
                Record::Begin(begin) => {
                    self.note.xid = begin.xid;
                    self.note.commit_lsn = begin.commit_lsn;
                    self.note.timestamp = begin.commit_timestamp;
                    begin.origin.clone_into(&mut self.note.origin);
                }
                Record::Commit(commit) => self.note.end_lsn = commit.end_lsn,
                Record::Truncate(truncate) => {
                    for schema in truncate.schemas() {
                        self.changes.entry(schema.0).or_default().0 = true;
                        self.note.changes += 1;
                    }
                }
                _ => {}
            },
        }
        Ok(())
    }

    fn frame(&mut self, frame: &[u8]) -> Result<(), PgError> {
        let mut reader = Reader::new(frame);
        while let Some((tag, body)) = reader.next_raw()? {
            if !matches!(tag, Tag::StreamHeader | Tag::Schema) {
                self.record(tag, body)?;
            }
        }
        self.note.bytes += frame.len() as u64;
        Ok(())
    }
}

impl Applier {
    /// Set a transaction aside before it is applied, if it has to be; `next` is the next in hand, 0 for none. All that it depends on is
    /// committed, or parked. Outside of a transaction.
    pub(super) fn set_aside(&mut self, transaction: &mut Transaction, next: u64) -> Aside {
        let holder = match error::catch(|| self.holder(transaction)) {
            Ok(holder) => holder,
            Err(error) => Err(error),
        };
        let done = match holder {
            // It is parked at its turn.
            Ok(Some(_)) if self.put_aside_until_turn(transaction, self.careful) => Some(true),
            Ok(Some(holder)) => match self.follow_parked(transaction, next, holder) {
                None => return Aside::Again,
                done => done,
            },
            Ok(None) => self.park_open(transaction, next),
            Err(error) => {
                error::abort();
                if !self.ring.stop_requested() {
                    fail(self.ring, &error, transaction.end_lsn());
                }
                Some(false)
            }
        };
        done.map_or(Aside::No, Aside::Done)
    }

    /// As [`Applier::park`], of a transaction that has to follow a parked one.
    fn follow_parked(&mut self, transaction: &Transaction, next: u64, holder: i64) -> Option<bool> {
        let left = match error::catch(|| self.leave_held(transaction.sequence)) {
            Ok(left) => left,
            Err(error) => Err(error),
        };
        let said = match left {
            Ok(None) => return self.park(transaction, next, Why::Waits(holder)),
            Ok(Some(again)) => again,
            Err(error) => {
                error::abort();
                error
            }
        };
        if !self.ring.stop_requested() {
            fail(self.ring, &said, transaction.commit_lsn());
        }
        Some(false)
    }

    /// Know what is parked now. Outside of a transaction.
    fn look_at_parked(&mut self) -> Result<(), PgError> {
        let version = self.entry.parked_version.load(Ordering::Acquire);
        if self.parking.version == Some(version) {
            return Ok(());
        }
        let id = self.subscription.id;
        let known = &mut self.parking.known;
        error::transaction(|| known.read(id))?;
        self.parking.version = Some(version);
        Ok(())
    }

    /// Whether anything is parked. Outside of a transaction.
    pub(super) fn has_parked(&mut self) -> Result<bool, PgError> {
        self.look_at_parked()?;
        Ok(!self.parking.known.parked.is_empty())
    }

    /// Whether what was found out about what is parked is out of date.
    pub(super) fn is_parking_stale(&self) -> bool {
        self.parking.version != Some(self.entry.parked_version.load(Ordering::Acquire))
    }

    /// Give each frame of a transaction in the ring to `each`. Not for one that is open.
    pub(super) fn each_frame(
        &self,
        sequence: u64,
        mut each: impl FnMut(&[u8]) -> Result<(), PgError>,
    ) -> Result<(), PgError> {
        let mut transaction = self.ring.transaction(sequence);
        let mut assembled = Vec::new();
        loop {
            match transaction
                .next_frame(&mut assembled, set_latches)
                .map_err(|error| PgError::new("XX000", error.to_string()))?
            {
                FrameRead::Frame(frame) => each(frame)?,
                FrameRead::Assembled => each(&assembled)?,
                FrameRead::End => return Ok(()),
                FrameRead::Pending => {
                    return Err(PgError::new("XX000", "a transaction is not complete"));
                }
            }
        }
    }

    /// What a transaction in the ring consists of, and what it touches. Outside of a transaction.
    fn content(&mut self, sequence: u64) -> Result<(Content, Touch), PgError> {
        let mut content = Content::default();
        self.each_frame(sequence, |frame| content.frame(frame))?;
        for schema in content.changes.keys() {
            self.know(*schema)?;
        }
        let mut touch = Touch::default();
        let wide = self.ring.transaction(sequence).is_wide();
        if let Some(session) = self.session.as_mut() {
            error::transaction(|| {
                for (schema, (barrier, hashes)) in &content.changes {
                    let barrier = *barrier || wide;
                    session.touch(&mut touch, *schema, barrier, hashes.iter().copied())?;
                }
                Ok(())
            })?;
        }
        Ok((content, touch.finish()))
    }

    /// The parked transaction that this one has to follow. All that it depends on is committed, or parked. Outside of a transaction.
    fn holder(&mut self, transaction: &Transaction) -> Result<Option<i64>, PgError> {
        self.look_at_parked()?;
        self.parking.guarding = false;
        self.parking.held_by = 0;
        if self.parking.known.parked.is_empty() || transaction.is_skipped() {
            return Ok(None);
        }
        if transaction.is_open() || transaction.is_split() {
            self.parking.guarding = true;
            return Ok(None);
        }
        let (_, touch) = self.content(transaction.sequence)?;
        Ok(self.parking.known.parked.holder(&touch, i64::MAX))
    }

    /// The part of a run before the first transaction that has to follow a parked one; `None` when its first has to. Outside of a
    /// transaction.
    pub(super) fn before_held(&mut self, run: Run) -> Result<Option<Run>, PgError> {
        for sequence in run.first..=run.last {
            let transaction = self.ring.transaction(sequence);
            if transaction.is_open() || transaction.is_split() {
                // They are taken alone.
                break;
            }
            if self.holder(&transaction)?.is_some() {
                return Ok((sequence > run.first).then(|| Run {
                    first: run.first,
                    last: sequence - 1,
                }));
            }
            if self.parking.known.parked.is_empty() {
                break;
            }
        }
        Ok(Some(run))
    }

    /// Whether changes of the transaction in hand have to be looked at one by one.
    pub(super) fn is_guarding(&self) -> bool {
        self.parking.guarding
    }

    /// That a change of a transaction that is not looked at as a whole has nothing to wait for.
    pub(super) fn guard(
        &mut self,
        schema: u32,
        barrier: bool,
        hashes: impl IntoIterator<Item = u64>,
    ) -> Result<(), PgError> {
        let mut touch = Touch::default();
        if let Some(session) = self.session.as_mut() {
            session.touch(&mut touch, schema, barrier, hashes)?;
        }
        let Some(holder) = self.parking.known.parked.holder(&touch.finish(), i64::MAX) else {
            return Ok(());
        };
        self.parking.held_by = holder;
        Err(PgError::new(
            "55000",
            "a part of a transaction has to follow a parked one",
        )
        .with_detail(format!(
            "It changes what parked transaction {holder} changes too."
        )))
    }

    /// Whether a transaction that has failed with `error` for good is parked.
    pub(super) fn parks(&self, error: &PgError) -> bool {
        let subscription = &self.subscription;
        (subscription.options.parks()
            || self.parking.held_by != 0
            || (error.by_function && subscription.options.parks_functions()))
            && self.session.is_some()
            && matches!(
                policy::for_apply(&error.sqlstate),
                Policy::Stop | Policy::Conflict
            )
    }

    /// Why the transaction in hand is parked, which has failed with `error` after so many attempts.
    pub(super) fn why_parked<'a>(&self, error: &'a PgError, attempts: u32) -> Why<'a> {
        match self.parking.held_by {
            0 => Why::Error(error, attempts),
            holder => Why::Waits(holder),
        }
    }

    /// Whether the transaction in hand is the rest of one whose first pieces are committed.
    pub(super) fn is_rest(&self) -> bool {
        self.parking.is_rest
    }

    /// An open transaction that has failed with `error` is to be parked when it comes again: its first bytes are gone.
    pub(super) fn park_when_it_comes(&self, transaction: &Transaction, error: &PgError) {
        let lsn = transaction.commit_lsn();
        self.entry.park_next(error, self.parking.held_by, lsn);
        error.log(&format!(
            "subscription \"{}\" receives a large transaction again, to park it",
            self.subscription.name
        ));
    }

    /// Park an open transaction that has failed before, if it is one. `None` if it is not; false when it is time to end.
    fn park_open(&mut self, transaction: &mut Transaction, next: u64) -> Option<bool> {
        if !transaction.is_open() {
            return None;
        }
        let (error, after) = self.entry.is_to_park(transaction.commit_lsn())?;
        let why = if after == 0 {
            Why::Error(&error, 1)
        } else {
            Why::Waits(after)
        };
        let sequence = transaction.sequence;
        if !self.wait_for(sequence - 1, ApplierState::WaitingForTurn) {
            return Some(false);
        }
        self.show(ApplierState::Applying);
        let failure = match error::catch(|| self.store_as_it_comes(transaction, why)) {
            Ok(Ok((id, local_end))) => {
                self.parked(transaction, next, why, id, local_end);
                return Some(true);
            }
            Ok(Err(failure)) | Err(failure) => failure,
        };
        error::abort();
        if !self.ring.stop_requested() {
            if policy::for_apply(&failure.sqlstate) == Policy::Stop {
                // Somebody will do something about it: then it is to be applied.
                self.entry.park_next(&failure, 0, 0);
            }
            fail(self.ring, &failure, transaction.commit_lsn());
        }
        Some(false)
    }

    /// As [`Applier::store`], of a transaction that is read as it comes, and without what is committed of it in pieces.
    fn store_as_it_comes(
        &mut self,
        transaction: &mut Transaction,
        why: Why<'_>,
    ) -> Result<(i64, u64), PgError> {
        self.look_at_parked()?;
        self.read_log()?;
        self.stamp_as_provider()?;
        let mut assembled = Vec::new();
        let mut rest = Vec::new();
        // Of an open one it is not known whether its keys say what it depends on.
        let by_table = transaction.is_open() || transaction.is_wide();
        let id = error::transaction(|| {
            let id = parked::next_id()?;
            let mut split = Split::new(0, Progress::default());
            let mut content = Content::default();
            let mut touch = Touch::default();
            let mut schemas = BTreeSet::new();
            let mut part = 1;
            loop {
                let frame = match transaction
                    .next_frame(&mut assembled, set_latches)
                    .map_err(|error| PgError::new("XX000", error.to_string()))?
                {
                    FrameRead::Frame(frame) => frame,
                    FrameRead::Assembled => &assembled,
                    FrameRead::End => break,
                    FrameRead::Pending => {
                        if self.ring.stop_requested() {
                            return Err(PgError::new("57P01", "subscription is stopping"));
                        }
                        self.ring.applier_will_wait(self.number, u64::MAX - 2);
                        latch::wait_as(Wait::Rest, Duration::from_millis(100));
                        self.ring.applier_awake(self.number);
                        continue;
                    }
                };
                let frame = if transaction.is_split() {
                    self.rest_of(frame, &mut split, &mut rest)?;
                    rest.as_slice()
                } else {
                    frame
                };
                if frame.is_empty() {
                    continue;
                }
                content.frame(frame)?;
                for (schema, (barrier, hashes)) in std::mem::take(&mut content.changes) {
                    schemas.insert(schema);
                    self.know(schema)?;
                    if let Some(session) = self.session.as_mut() {
                        session.touch(&mut touch, schema, barrier || by_table, hashes)?;
                    }
                }
                parked::check_limits(&self.subscription, content.note.bytes, why)?;
                parked::add(id, &mut part, frame)?;
            }
            if content.note.origin.is_empty() {
                content.note.origin.clone_from(&self.subscription.provider);
            }
            let touch = touch.finish();
            let why = match why {
                // Known so far was only one that the first changes have to follow.
                Why::Waits(holder) => {
                    let all = self.parking.known.parked.holder(&touch, i64::MAX);
                    Why::Waits(all.unwrap_or(holder))
                }
                why @ Why::Error(..) => why,
            };
            split.finish().map_err(differs)?;
            content.note.committed = split.committed().changes;
            if content.note.committed > 0 {
                split::finish(self.subscription.id)?;
            }
            let preamble = self.preamble(schemas.into_iter())?;
            parked::add(id, &mut 0, &preamble)?;
            parked::insert(&self.subscription, id, &content.note, &touch, why)?;
            origin::stands_for(content.note.end_lsn, 0);
            Ok(id)
        })?;
        // SAFETY: set by the commit above.
        Ok((id, unsafe { pg_sys::XactLastCommitEnd }))
    }

    /// What of a frame is not committed here, in pieces; `split` knows how far these go from the record of the begin on. In a transaction.
    fn rest_of(
        &mut self,
        frame: &[u8],
        split: &mut Split,
        rest: &mut Vec<u8>,
    ) -> Result<(), PgError> {
        rest.clear();
        let mut reader = Reader::new(frame);
        let mut from = 0;
        while let Some((tag, body)) = reader.next_raw()? {
            let to = frame.len() - reader.remaining();
            let place = std::mem::replace(&mut from, to)..to;
            let is_committed = match tag {
                Tag::Begin => {
                    let Record::Begin(begin) = Record::read(tag, body)? else {
                        continue;
                    };
                    let committed = split::read(self.subscription.id, begin.commit_lsn)?;
                    *split = Split::new(0, committed);
                    false
                }
                Tag::Insert | Tag::Update | Tag::Delete | Tag::Truncate
                    if split.seen().changes < split.committed().changes =>
                {
                    let record = Record::read(tag, body)?;
                    match &record {
                        Record::Change(change) => self.know(change.header.schema.0)?,
                        Record::Truncate(truncate) => {
                            for schema in truncate.schemas() {
                                self.know(schema.0)?;
                            }
                        }
                        _ => {}
                    }
                    let content = match (&record, self.session.as_ref()) {
                        (Record::Change(change), Some(session)) => session.content(change)?,
                        (Record::Truncate(truncate), Some(session)) => {
                            session.content_of_truncate(truncate)?
                        }
                        _ => 0,
                    };
                    !split.take(content).map_err(differs)?
                }
                _ => false,
            };
            if !is_committed {
                rest.extend_from_slice(frame.get(place).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Park a transaction; `next` is the next in hand, 0 for none. `None`: it has to be looked at again. False when it is time to end.
    pub(super) fn park(
        &mut self,
        transaction: &Transaction,
        next: u64,
        why: Why<'_>,
    ) -> Option<bool> {
        let sequence = transaction.sequence;
        if !self.wait_for(sequence - 1, ApplierState::WaitingForTurn) {
            return Some(false);
        }
        self.show(ApplierState::Applying);
        let mut attempt = 0;
        let (id, local_end) = loop {
            let error = match error::catch(|| self.store(sequence, why)) {
                Ok(Ok(stored)) => break stored,
                Ok(Err(error)) | Err(error) => error,
            };
            error::abort();
            if self.ring.stop_requested() {
                return Some(false);
            }
            if error.sqlstate == FULL && self.makes_room() {
                return (!self.housekeeping()).then_some(false);
            }
            if policy::for_apply(&error.sqlstate) != Policy::Retry {
                fail(self.ring, &error, transaction.end_lsn());
                return Some(false);
            }
            attempt += 1;
            latch::wait_as(
                Wait::Retry,
                Duration::from_millis(policy::backoff_ms(attempt, 5, 1000)),
            );
        };
        self.parked(transaction, next, why, id, local_end);
        Some(true)
    }

    /// Whether some of what is parked is tried now, and there may be room for another one soon.
    fn makes_room(&mut self) -> bool {
        self.parking.version = None;
        if self.look_at_parked().is_err() || !self.parking.known.has_due() {
            return false;
        }
        // Applier 0 may have taken a transaction that has to follow this one, and can't try anything: once all start anew it can.
        let known = &self.parking.known;
        let now = (known.parked.ids().count(), known.waiting.len());
        match self.parking.patience {
            Some((before, until)) if before == now => {
                if Instant::now() > until {
                    return false;
                }
            }
            _ => self.parking.patience = Some((now, Instant::now() + PATIENCE)),
        }
        if self.number == 0 {
            self.tend_parked()
        } else {
            process::set_latch(self.entry.first_applier_latch.load(Ordering::Acquire));
            latch::wait_as(Wait::Retry, Duration::from_millis(50));
            true
        }
    }

    /// A transaction is parked as number `id`: others may go on, and people are told.
    fn parked(&self, transaction: &Transaction, next: u64, why: Why<'_>, id: i64, local_end: u64) {
        let sequence = transaction.sequence;
        // Before anybody goes on who depends on it.
        self.entry.parked_version.fetch_add(1, Ordering::AcqRel);
        self.has_committed(sequence, local_end, next);
        process::set_latch(self.entry.first_applier_latch.load(Ordering::Acquire));
        let name = &self.subscription.name;
        let end = lsn_text(transaction.end_lsn());
        match why {
            Why::Error(error, _) => {
                let mut said = error.clone();
                said.message = format!(
                    "subscription \"{name}\" has parked the transaction that ends at {end} as number {id}: {}",
                    error.message
                );
                said.hint = Some(
                    "Remove the cause and run braid.retry_parked, or give it up with braid.skip_parked. What depends on it is parked too."
                        .to_owned(),
                );
                said.warn();
            }
            Why::Waits(holder) => pgrx::log!(
                "subscription \"{name}\" has parked the transaction that ends at {end} as number {id}: it has to follow number {holder}"
            ),
        }
    }

    /// Store a transaction, and go past it, in one commit. Its number, and the end of the commit record.
    fn store(&mut self, sequence: u64, why: Why<'_>) -> Result<(i64, u64), PgError> {
        let mut transaction = self.ring.transaction(sequence);
        if transaction.is_split() {
            return self.store_as_it_comes(&mut transaction, why);
        }
        let (mut content, touch) = self.content(sequence)?;
        if content.note.origin.is_empty() {
            content.note.origin.clone_from(&self.subscription.provider);
        }
        let preamble = self.preamble(content.changes.keys().copied())?;
        self.stamp_as_provider()?;
        let end_lsn = content.note.end_lsn;
        let id = error::transaction(|| {
            origin::stands_for(end_lsn, 0);
            let id = parked::next_id()?;
            parked::insert(&self.subscription, id, &content.note, &touch, why)?;
            let mut part = 0;
            parked::add(id, &mut part, &preamble)?;
            self.each_frame(sequence, |frame| parked::add(id, &mut part, frame))?;
            Ok(id)
        })?;
        // SAFETY: set by the commit above.
        Ok((id, unsafe { pg_sys::XactLastCommitEnd }))
    }

    /// The stream's header, and these schemas, as records.
    fn preamble(&mut self, schemas: impl Iterator<Item = u32>) -> Result<Vec<u8>, PgError> {
        let wanted: Vec<u32> = schemas.collect();
        let mut records = Vec::new();
        self.group.read_log(&mut LogPlace::default(), |entry| {
            let mut reader = Reader::new(entry);
            while let Some(record) = reader.next_record()? {
                let keep = match record {
                    Record::StreamHeader(_) => true,
                    Record::Schema(schema) => wanted.contains(&schema.number.0),
                    _ => false,
                };
                if keep {
                    records.extend_from_slice(entry);
                }
            }
            Ok(())
        })?;
        Ok(records)
    }

    /// Deal with what is parked, if there is something to do. Only applier 0 does. False when it is time to end.
    pub(super) fn tend_parked(&mut self) -> bool {
        if self.number != 0 {
            return true;
        }
        loop {
            let asked = self.entry.retry.asked.load(Ordering::Acquire);
            let now = (self.entry.parked_version.load(Ordering::Acquire), asked);
            if self.parking.tended == Some(now) {
                return true;
            }
            // It may have been woken for something in the ring, and an attempt may wait for a lock.
            set_latches(&self.ring.left_behind());
            let tended = match error::catch(|| self.try_parked(asked)) {
                Ok(tended) => tended,
                Err(error) => Err(error),
            };
            crash::done(0);
            match tended {
                Ok(true) => self.parking.tended = Some(now),
                Ok(false) => return false,
                Err(error) => {
                    error::abort();
                    fail(self.ring, &error, 0);
                    return false;
                }
            }
        }
    }

    /// Try what is asked for, and what has nothing to wait for any more. False when it is time to end.
    fn try_parked(&mut self, asked: u64) -> Result<bool, PgError> {
        let applied = &mut 0;
        let tried = self.try_each(asked, applied);
        let retry = &self.entry.retry;
        // Whatever it ends with: what has not been tried for an error that may pass would be tried for ever.
        if !matches!(tried, Ok(false)) && asked > retry.done.load(Ordering::Acquire) {
            retry.applied.store(*applied, Ordering::Relaxed);
            retry.done.store(asked, Ordering::Release);
        }
        tried
    }

    fn try_each(&mut self, asked: u64, applied: &mut u64) -> Result<bool, PgError> {
        self.look_at_parked()?;
        let entry = self.entry;
        let wanted = (asked > entry.retry.done.load(Ordering::Acquire))
            .then(|| entry.retry.id.load(Ordering::Relaxed));
        let ids: Vec<i64> = self.parking.known.parked.ids().collect();
        for id in ids {
            let due = self.parking.known.waiting.contains(&id)
                || wanted.is_some_and(|wanted| wanted == 0 || wanted == id);
            if !due || self.parking.known.parked.holder_of(id).is_some() {
                continue;
            }
            if !self.housekeeping() {
                return Ok(false);
            }
            match self.try_one(id)? {
                Outcome::Applied => {
                    *applied += 1;
                    self.parking.known.parked.remove(id);
                    entry.parked_version.fetch_add(1, Ordering::AcqRel);
                }
                Outcome::Failed => {
                    self.parking.known.waiting.remove(&id);
                    entry.parked_version.fetch_add(1, Ordering::AcqRel);
                }
                Outcome::Stop => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Apply a parked transaction that has nothing to wait for.
    fn try_one(&mut self, id: i64) -> Result<Outcome, PgError> {
        self.show(ApplierState::Applying);
        let main = self.session.take();
        self.careful = false;
        self.bulk = false;
        self.parking.guarding = false;
        let mut attempt = 0;
        let outcome = loop {
            let error = match error::catch(|| self.apply_parked(id)) {
                Ok(Ok(())) => break Ok(Outcome::Applied),
                Ok(Err(Trouble::Error(error))) | Err(error) => error,
                Ok(Err(Trouble::InTheWay)) => PgError::new("40001", "in the way of another"),
            };
            let error = error
                .with_hint_of_cause("Then run braid.retry_parked.")
                .with_context(&self.doing(0));
            error::abort();
            if let Some(session) = self.session.as_mut() {
                session.forget_transaction();
            }
            let mut error = error;
            if self.ring.stop_requested() {
                break Ok(Outcome::Stop);
            }
            self.careful |= is_in_the_way(&error.sqlstate);
            attempt += 1;
            let way_made = self.session.is_some() && self.evict(&mut error);
            let again = match policy::for_apply(&error.sqlstate) {
                _ if way_made => attempt < 100,
                // Not bytes that a connection has garbled: they are the same next time.
                _ if error.sqlstate == "08P01" => false,
                Policy::Retry | Policy::Conflict => attempt < ATTEMPTS,
                Policy::Stop => false,
                Policy::Reconnect => break Err(error),
            };
            if again {
                latch::wait_as(
                    Wait::Retry,
                    Duration::from_millis(policy::backoff_ms(attempt, 5, 1000)),
                );
                continue;
            }
            error.log(&format!(
                "subscription \"{}\" can't apply parked transaction {id}",
                self.subscription.name
            ));
            break error::transaction(|| parked::failed_again(id, &error))
                .map(|()| Outcome::Failed);
        };
        self.parking.is_rest = false;
        if let Some(session) = self.session.take() {
            session.discard();
        }
        // The encoding of its stream, too, is read from the log again.
        if let Some(session) = main {
            session.discard();
            self.log = LogPlace::default();
        }
        if matches!(outcome, Ok(Outcome::Applied)) {
            pgrx::log!(
                "subscription \"{}\" has applied parked transaction {id}",
                self.subscription.name
            );
        }
        outcome
    }

    fn apply_parked(&mut self, id: i64) -> Result<(), Trouble> {
        self.pieces = None;
        let mut part = 0;
        let ((end_lsn, is_rest), preamble, mut frame) = error::transaction(|| {
            Ok((
                parked::end_of(id)?,
                parked::frame(id, &mut part)?,
                parked::frame(id, &mut part)?,
            ))
        })?;
        self.parking.is_rest = is_rest;
        if self.session.is_none() {
            self.session = Some(self.session_of(preamble.as_deref().unwrap_or_default())?);
        }
        let (mut begun, mut end) = (false, None);
        while let Some(records) = frame {
            self.frame(&records, None, &mut begun, &mut end)?;
            if let Some(session) = self.session.as_mut() {
                session.work_as_self();
            }
            frame = parked::frame(id, &mut part)?;
        }
        let Some(session) = self
            .session
            .as_mut()
            .filter(|_| begun && end == Some(end_lsn))
        else {
            return Err(PgError::new("XX001", "parked records are incomplete").into());
        };
        session.finish()?;
        if !parked::remove(id)? {
            return Err(PgError::new("42704", "the transaction was given up").into());
        }
        let counts = session.counts();
        // The subscription's position is not before this one's end: it was committed with what is stored.
        session.commit(end_lsn)?;
        self.count_committed(1, counts.changes());
        Ok(())
    }

    /// A session that knows what these records say. Outside of a transaction.
    fn session_of(&self, preamble: &[u8]) -> Result<Session, PgError> {
        let mut session = None;
        let mut reader = Reader::new(preamble);
        while let Some(record) = reader.next_record()? {
            match (record, session.as_mut()) {
                (Record::StreamHeader(header), None) => {
                    session = Some(new_session(&self.subscription, &self.local_node, &header)?);
                }
                (Record::Schema(schema), Some(session)) => session.learn(&schema),
                _ => {}
            }
        }
        session.ok_or_else(|| PgError::new("XX001", "parked records are incomplete"))
    }

    /// Stamp what is committed next with the provider's origin.
    pub(super) fn stamp_as_provider(&mut self) -> Result<(), PgError> {
        let provider = self.subscription.provider.clone();
        let origin = match self.origins.get(&provider) {
            Some(origin) => *origin,
            None => self.find_origin(&provider)?,
        };
        self.origins.insert(provider, origin);
        origin::use_for_commits(origin)
    }
}

/// Whether a transaction was set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aside {
    /// It is to be applied.
    No,
    /// It is done with; false when it is time to end.
    Done(bool),
    /// It has to be looked at again.
    Again,
}

/// What became of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Applied,
    /// It stays, with the error.
    Failed,
    /// It is time to end.
    Stop,
}
