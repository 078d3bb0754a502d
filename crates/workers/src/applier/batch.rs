//! Batches (`apply_mode => 'batch'` and `'aggregate'`): an applier commits the run that it has
//! claimed as one local transaction, if possible.
//!
//! A batch ends before a transaction of another origin, and before one whose version is not newer
//! than the one before it (`conflict::joins`). A batch that fails is rolled back, and its
//! transactions are applied one by one. Then only the failing transaction is held back, with its
//! own position.
//!
//! Nothing is joined if another node reads forwarded changes from this one: it would receive a
//! batch as one transaction, with one version.

use std::sync::atomic::Ordering;

use braid_apply::Item;
use braid_bgworker::conflict::{self, Version};
use braid_bgworker::joining;
use braid_bgworker::sqlstate::SqlState;
use braid_decoder::REPLACED_PREFIX;
use braid_gir::{Begin, Reader, Record, Tag};
use braid_node::readers;
use braid_postgres::error::{self, PgError};
use braid_postgres::transaction;
use braid_ring::{FrameRead, Run, Transaction};

use super::Applier;
use super::in_hand::InHand;
use super::post::{Trouble, next_frame, set_latches};
use super::records::out_of_order;
use braid_bgworker::taking::Mode;

/// A transaction that is gathered has fewer frames than this.
const FRAMES: usize = 8;

/// The outcome of an attempt at a batch.
enum Joined {
    /// Committed up to this transaction; the end of the local commit record.
    Up(u64, u64),
    /// Nothing was done: the first can't join others.
    Alone,
    /// The batch was rolled back.
    Failed,
    /// The process is asked to end.
    Stop,
}

impl Applier {
    /// Apply a run as one transaction, or as few as it takes. False when it is time to end.
    pub(super) fn apply_batch(&mut self, run: Run) -> bool {
        if readers::passes_on() {
            if self.entry.schedule.not_joined.swap(1, Ordering::Relaxed) == 0 {
                pgrx::log!(
                    "subscription \"{}\" commits each transaction by itself, as a node may read from this one with origin => 'any'",
                    self.subscription.name
                );
            }
            return self.apply_singly(run);
        }
        self.entry.schedule.not_joined.store(0, Ordering::Relaxed);
        let mut rest = run;
        while rest.first < rest.last {
            self.post
                .show_in_hand(&self.post.ring.transaction(rest.first));
            match self.join(rest) {
                Joined::Up(last, local_end) => {
                    let next = if last < rest.last { last + 1 } else { 0 };
                    let done = Run {
                        first: rest.first,
                        last,
                    };
                    let wakes = self
                        .post
                        .ring
                        .commit_run(self.post.number, done, local_end, next);
                    set_latches(&wakes);
                    // Autovacuum goes by these counters. PostgreSQL itself sends them no more than
                    // once a second. SAFETY: outside of a transaction.
                    transaction::report_statistics(false);
                    if next == 0 {
                        return self.post.housekeeping();
                    }
                    rest.first = next;
                }
                Joined::Alone => {
                    let next = rest.first + 1;
                    if !self.apply_until_done(self.post.ring.transaction(rest.first), next) {
                        return false;
                    }
                    rest.first = next;
                }
                Joined::Failed => return self.apply_singly(rest),
                Joined::Stop => return false,
            }
            if !self.post.housekeeping() {
                return false;
            }
        }
        self.apply_singly(rest)
    }

    fn join(&mut self, run: Run) -> Joined {
        // Outside of a transaction: without a lock that another could wait for.
        let first = self.post.ring.transaction(run.first);
        if !first.may_join() {
            return Joined::Alone;
        }
        self.look_ahead(run);
        if !self.wait_for_dependencies(&first) {
            return Joined::Stop;
        }
        self.in_hand = InHand::once();
        // Before the first that has to follow a parked one. Where that can't be said, each is
        // looked at alone.
        let run = match error::catch(|| self.before_held(run)) {
            Ok(Ok(Some(run))) => run,
            Ok(Ok(None)) => return Joined::Alone,
            Ok(Err(_)) | Err(_) => {
                error::abort();
                return Joined::Failed;
            }
        };
        self.post.show(braid_ring::ApplierState::Applying);
        let outcome = match error::catch(|| {
            if self.consolidate || self.mode == Mode::Aggregate {
                self.apply_gathered(run)
            } else {
                self.apply_joined(run).map(Some)
            }
        }) {
            Ok(outcome) => outcome,
            Err(error) => Err(Trouble::Error(error)),
        };
        match outcome {
            Ok(Some((last, local_end))) => Joined::Up(last, local_end),
            Ok(None) => Joined::Alone,
            Err(_) => {
                // The error is raised again when the transaction is applied alone, and handled
                // then.
                error::abort();
                if let Some(session) = self.session.as_mut() {
                    session.forget_transaction();
                }
                self.post.own.retries.fetch_add(1, Ordering::Relaxed);
                self.entry.retries.fetch_add(1, Ordering::Relaxed);
                if self.post.ring.stop_requested() {
                    Joined::Stop
                } else {
                    Joined::Failed
                }
            }
        }
    }

    /// As long as the batch has to wait for others, look where its rows are.
    fn look_ahead(&mut self, run: Run) {
        let first = self.post.ring.transaction(run.first);
        if self.missing(&first, run.first).is_none() {
            return;
        }
        self.post
            .show(braid_ring::ApplierState::WaitingForDependency);
        if !matches!(error::catch(|| self.look(&first, run)), Ok(Ok(()))) {
            // The error is raised again when the change is applied.
            error::abort();
            if let Some(session) = self.session.as_mut() {
                session.forget_transaction();
            }
        }
    }

    fn look(&mut self, first: &Transaction, run: Run) -> Result<(), PgError> {
        let Some(session) = self.session.as_mut() else {
            return Ok(());
        };
        session.begin_to_look();
        let mut sought = 0;
        let mut parts = Vec::new();
        for sequence in run.first..=run.last {
            pgrx::check_for_interrupts!();
            let mut transaction = self.post.ring.transaction(sequence);
            if !transaction.may_join() || self.missing(first, run.first).is_none() {
                break;
            }
            let Some(session) = self.session.as_mut() else {
                break;
            };
            // A frame that is not contiguous in the ring is large.
            while let FrameRead::Frame(frame) = next_frame(&mut transaction, &mut parts)? {
                let mut reader = Reader::new(frame);
                while let Some((tag, body)) = reader.next_raw()? {
                    if matches!(tag, Tag::Update | Tag::Delete)
                        && let Record::Change(change) = Record::read(tag, body)?
                    {
                        sought += u64::from(session.look_ahead(&change)?);
                    }
                }
            }
        }
        if let Some(session) = self.session.as_mut() {
            session.end_look();
        }
        let counter = &self.entry.schedule.sought_ahead;
        counter.fetch_add(sought, Ordering::Relaxed);
        Ok(())
    }

    /// Up to which transaction all must be committed before this one can join a batch that starts
    /// with `first`; `None` when it can join.
    fn missing(&self, transaction: &Transaction, first: u64) -> Option<u64> {
        let needs = transaction.needs(first);
        joining::missing(needs, first, self.post.ring.committed(), |sequence| {
            self.post.ring.is_done(sequence)
        })
    }

    /// Apply transactions up to the end of the run, or to the first that can't join, and commit
    /// them. Returns the last one, and the end of the commit record.
    fn apply_joined(&mut self, run: Run) -> Result<(u64, u64), Trouble> {
        let mut last = None;
        let mut end_lsn = 0;
        for sequence in run.first..=run.last {
            let mut transaction = self.post.ring.transaction(sequence);
            if !transaction.may_join() {
                break;
            }
            // Its dependencies are part of this batch, or committed.
            if last.is_some() {
                match self.missing(&transaction, run.first) {
                    None => {}
                    // Waited for without a lock that another could wait for.
                    Some(_) if self.relaxed => break,
                    Some(missing) => self.post.wait_in_transaction(missing, run.first)?,
                }
                // A dependency may have been parked.
                if self.is_parking_stale() {
                    break;
                }
            }
            let mut begun = false;
            let mut end = None;
            let mut fits = true;
            let mut assembled = std::mem::take(&mut self.assembled);
            while fits {
                let frame = match next_frame(&mut transaction, &mut assembled)? {
                    FrameRead::Frame(frame) => frame,
                    FrameRead::Assembled => &assembled,
                    FrameRead::End => break,
                    FrameRead::Pending => {
                        return Err(PgError::new(
                            SqlState::InternalError,
                            "unexpected open transaction in a batch",
                        )
                        .into());
                    }
                };
                fits = self.frame_of_batch(frame, last.is_none(), &mut begun, &mut end)?;
            }
            self.assembled = assembled;
            if !fits {
                break;
            }
            let Some(end) = end else {
                return Err(PgError::new(
                    SqlState::ProtocolViolation,
                    "transaction without a commit from the provider",
                )
                .into());
            };
            end_lsn = end;
            last = Some(sequence);
        }
        let Some(last) = last else {
            return Err(PgError::new(SqlState::ProtocolViolation, "empty batch").into());
        };
        self.commit_batch(run.first, last, end_lsn)
    }

    /// As [`Applier::apply_joined`], with many changes of one row made one, or all regrouped by
    /// table. `None`, and nothing was done: the first can't join.
    fn apply_gathered(&mut self, run: Run) -> Result<Option<(u64, u64)>, Trouble> {
        let mut last = None;
        let mut end_lsn = 0;
        let mut begins: Vec<Begin<'_>> = Vec::new();
        let mut items = Vec::new();
        let mut buffers: Vec<[Vec<u8>; FRAMES]> = Vec::new();
        buffers.resize_with((run.first..=run.last).count(), Default::default);
        for (sequence, frames) in (run.first..=run.last).zip(&mut buffers) {
            let transaction = self.post.ring.transaction(sequence);
            if !transaction.may_join() {
                break;
            }
            if last.is_some()
                && let Some(missing) = self.missing(&transaction, run.first)
            {
                if self.relaxed {
                    break;
                }
                if !self
                    .post
                    .wait_for(missing, braid_ring::ApplierState::WaitingForDependency)
                {
                    return Err(
                        PgError::new(SqlState::AdminShutdown, "subscription is stopping").into(),
                    );
                }
            }
            if last.is_some() && self.is_parking_stale() {
                break;
            }
            let kept = (begins.len(), items.len());
            let Some(end) = self.gather(transaction, frames, &mut begins, &mut items)? else {
                begins.truncate(kept.0);
                items.truncate(kept.1);
                break;
            };
            end_lsn = end;
            last = Some(sequence);
        }
        let (Some(last), Some(first)) = (last, begins.first()) else {
            return Ok(None);
        };
        self.post.show(braid_ring::ApplierState::Applying);
        self.begin(first, true)?;
        let aggregate = self.mode == Mode::Aggregate;
        if let Some(session) = self.session.as_mut() {
            for begin in begins.get(1..).unwrap_or_default() {
                session.join(begin);
            }
            if aggregate {
                session.apply_aggregated(&begins, &items)?;
            } else {
                session.apply_joined(&begins, &items)?;
            }
        }
        self.commit_batch(run.first, last, end_lsn).map(Some)
    }

    /// Decodes a transaction, whose frames stay in the ring until it is committed. Returns its end.
    /// Returns `None` if it can't join: for example, if it has many frames or a frame that is not
    /// contiguous, or another origin than the batch.
    fn gather<'a>(
        &mut self,
        mut transaction: Transaction,
        frames: &'a mut [Vec<u8>],
        begins: &mut Vec<Begin<'a>>,
        items: &mut Vec<Item<'a>>,
    ) -> Result<Option<u64>, Trouble> {
        let number = begins.len();
        let mut end = None;
        for frame in frames {
            let read = next_frame(&mut transaction, frame)?;
            match read {
                FrameRead::Frame(frame) => {
                    if !self.gather_frame(frame, number, begins, items, &mut end)? {
                        return Ok(None);
                    }
                }
                FrameRead::End => return Ok(end),
                FrameRead::Assembled | FrameRead::Pending => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Take a frame apart. False when its transaction can't join the batch.
    fn gather_frame<'a>(
        &mut self,
        frame: &'a [u8],
        number: usize,
        begins: &mut Vec<Begin<'a>>,
        items: &mut Vec<Item<'a>>,
        end: &mut Option<u64>,
    ) -> Result<bool, Trouble> {
        let mut reader = Reader::new(frame);
        let mut replaced = None;
        while let Some((tag, body)) = reader.next_raw()? {
            if matches!(tag, Tag::Schema | Tag::StreamHeader) {
                continue;
            }
            match Record::read(tag, body)? {
                Record::Begin(begin) if begins.len() == number => {
                    let sent = |begin: &Begin<'a>| {
                        let (timestamp, origin) = (begin.commit_timestamp, begin.origin);
                        (Version { timestamp, origin }, origin.is_empty())
                    };
                    if begins
                        .last()
                        .is_some_and(|last| !conflict::joins(sent(last), sent(&begin)))
                    {
                        return Ok(false);
                    }
                    begins.push(begin);
                }
                Record::Commit(commit) if begins.len() > number => *end = Some(commit.end_lsn),
                Record::Change(change) if begins.len() > number => {
                    self.know(change.header.schema.0)?;
                    items.push(Item::Change(number, change, replaced.take()));
                }
                Record::Truncate(truncate) if begins.len() > number => {
                    for schema in truncate.schemas() {
                        self.know(schema.0)?;
                    }
                    items.push(Item::Truncate(number, truncate));
                }
                Record::Message(message) if begins.len() > number => {
                    if message.prefix == REPLACED_PREFIX {
                        replaced = Some(message.content);
                    }
                }
                _ => return Err(out_of_order().into()),
            }
        }
        Ok(true)
    }

    /// All of a batch is applied: commit it when it is its turn. Returns its last transaction, and
    /// the end of the commit record.
    fn commit_batch(&mut self, first: u64, last: u64, end_lsn: u64) -> Result<(u64, u64), Trouble> {
        let Some(session) = self.session.as_mut() else {
            return Err(PgError::new(SqlState::ProtocolViolation, "empty batch").into());
        };
        session.finish_batch()?;
        // If the batch has written something, its transaction id is assigned by now. The answer of
        // `passes_on` counts from that moment on.
        if first < last && readers::passes_on() {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "transactions are not joined any more",
            )
            .into());
        }
        let counts = session.counts();
        let local_end = self.commit(Run { first, last }, end_lsn)?;
        let count = last - first + 1;
        self.count_committed(count, counts.changes());
        if count > 1 {
            self.entry.schedule.count_batch(count);
        }
        Ok((last, local_end))
    }

    /// As [`Applier::frame`], of a transaction that is the batch's first or joins it. False when it
    /// can't: then nothing of it was applied.
    fn frame_of_batch(
        &mut self,
        frame: &[u8],
        first: bool,
        begun: &mut bool,
        end: &mut Option<u64>,
    ) -> Result<bool, Trouble> {
        let mut fits = true;
        self.records(frame, begun, end, |applier, begin: &Begin<'_>| {
            if first {
                applier.begin(begin, true)?;
                return Ok(true);
            }
            // Another applier may have created its first origin for the node, and written rows that
            // this transaction changes.
            let tables_version = applier.entry.tables_version.load(Ordering::Acquire);
            fits = applier.session.as_mut().is_some_and(|session| {
                (begin.origin.is_empty() || session.is_as_of(tables_version)) && session.join(begin)
            });
            Ok(fits)
        })?;
        Ok(fits)
    }
}
