//! Applier 0 tries parked transactions again, in between those that it takes from the ring.

use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_apply::{Session, is_in_the_way};
use braid_bgworker::policy::{self, Policy};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Reader, Record};
use braid_node::group::LogPlace;
use braid_node::{crash, parked};
use braid_postgres::error::{self, PgError};
use braid_postgres::latch;
use braid_postgres::wait::Wait;
use braid_ring::ApplierState;

use super::super::in_hand::{Attempt, InHand};
use super::super::post::{Trouble, set_latches};
use super::super::records::new_session;
use super::super::{Applier, fail};

/// Attempts at a parked transaction whose error may pass.
const ATTEMPTS: u32 = 5;

/// The end of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Applied,
    /// The transaction stays, with the error.
    Failed,
    /// The transaction stays, and is tried again: it waits for a lock at another node.
    Waits,
    /// This process is to end.
    Stop,
}

impl Applier {
    /// Handles parked transactions, if there is something to do. Only applier 0 does. Returns false
    /// when the process is asked to end.
    pub(in crate::applier) fn tend_parked(&mut self) -> bool {
        if self.post.number != 0 {
            return true;
        }
        loop {
            let asked = self.entry.retry.asked.load(Ordering::Acquire);
            let now = (self.entry.parked_version.load(Ordering::Acquire), asked);
            let is_due = self.parking.until_next().is_some_and(|left| left.is_zero());
            if self.parking.tended == Some(now) && !is_due {
                return true;
            }
            // This process may have been woken for something in the ring, and an attempt may wait
            // for a lock.
            set_latches(&self.post.ring.left_behind());
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
                    fail(self.post.ring, &error, 0);
                    return false;
                }
            }
        }
    }

    /// Retries the requested transactions, and those that need not wait any more. Returns false
    /// when the process is asked to end.
    fn try_parked(&mut self, asked: u64) -> Result<bool, PgError> {
        let applied = &mut 0;
        let tried = self.try_each(asked, applied);
        let retry = &self.entry.retry;
        // However it ends: otherwise a request with an error that may pass would be repeated for
        // ever.
        if !matches!(tried, Ok(false)) && asked > retry.done.load(Ordering::Acquire) {
            retry.applied.store(*applied, Ordering::Relaxed);
            retry.done.store(asked, Ordering::Release);
        }
        tried
    }

    fn try_each(&mut self, asked: u64, applied: &mut u64) -> Result<bool, PgError> {
        self.look_at_parked()?;
        let known = &self.parking.known;
        self.parking
            .by_lock
            .retain(|id, _| known.by_lock.contains(id));
        let entry = self.entry;
        let wanted = (asked > entry.retry.done.load(Ordering::Acquire))
            .then(|| entry.retry.id.load(Ordering::Relaxed));
        let ids: Vec<i64> = self.parking.known.parked.ids().collect();
        for id in ids {
            let due = (self.parking.known.waiting.contains(&id) && !self.parking.is_put_off(id))
                || wanted.is_some_and(|wanted| wanted == 0 || wanted == id);
            if !due || self.parking.known.parked.holder_of(id).is_some() {
                self.parking.put_off_if_due(id);
                continue;
            }
            if !self.post.housekeeping() {
                return Ok(false);
            }
            match self.try_one(id)? {
                Outcome::Applied => {
                    *applied += 1;
                    self.parking.by_lock.remove(&id);
                    self.parking.known.parked.remove(id);
                    entry.parked_version.fetch_add(1, Ordering::AcqRel);
                }
                Outcome::Waits => {
                    let known = &mut self.parking.known;
                    known.waiting.insert(id);
                    known.by_lock.insert(id);
                    self.parking.put_off(id);
                }
                Outcome::Failed => {
                    self.parking.by_lock.remove(&id);
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
        self.post.show(ApplierState::Applying);
        let main = self.session.take();
        self.in_hand = InHand::default();
        let mut attempt = 0;
        let outcome = loop {
            let error = match error::catch(|| self.apply_parked(id)) {
                Ok(Ok(())) => break Ok(Outcome::Applied),
                Ok(Err(Trouble::Error(error))) | Err(error) => error,
                Ok(Err(Trouble::InTheWay)) => PgError::new(
                    SqlState::SerializationFailure,
                    "the transaction blocks another one",
                ),
            };
            let error = error
                .with_hint_of_cause("Then run braid.retry_parked.")
                .with_context(&self.doing(0));
            let statement = self.session.as_mut().and_then(Session::failed_statement);
            error::abort();
            if let Some(session) = self.session.as_mut() {
                session.forget_transaction();
            }
            let mut error = error;
            if self.post.ring.stop_requested() {
                break Ok(Outcome::Stop);
            }
            self.in_hand.check_other_keys |= is_in_the_way(error.sqlstate);
            attempt += 1;
            let way_made = self.session.is_some() && self.evict(&mut error);
            let waits_for_lock = error.peer_lock.is_some();
            let again = match policy::for_apply(error.sqlstate) {
                _ if way_made => attempt < 100,
                _ if waits_for_lock => false,
                // Not bytes that a connection has garbled: they are the same next time.
                _ if error.sqlstate == SqlState::ProtocolViolation => false,
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
            if waits_for_lock {
                break error::transaction(|| parked::still_waits(id, &error))
                    .map(|()| Outcome::Waits);
            }
            // It has not failed so far: it is tried until it is applied, or fails for good.
            let passes = policy::for_apply(error.sqlstate) == Policy::Retry;
            if passes && self.parking.known.by_lock.contains(&id) {
                break Ok(Outcome::Waits);
            }
            error.log(&format!(
                "subscription \"{}\" cannot apply parked transaction {id}",
                self.subscription.name
            ));
            self.note_failed_statement(statement.as_deref(), &error);
            break error::transaction(|| parked::failed_again(id, &error))
                .map(|()| Outcome::Failed);
        };
        self.in_hand = InHand::default();
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
        self.in_hand.attempt = Attempt::default();
        let mut part = 0;
        let ((end_lsn, is_rest), preamble, mut frame) = error::transaction(|| {
            Ok((
                parked::end_of(id)?,
                parked::frame(id, &mut part)?,
                parked::frame(id, &mut part)?,
            ))
        })?;
        self.in_hand.attempt.is_rest = is_rest;
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
            return Err(
                PgError::new(SqlState::DataCorrupted, "parked records are incomplete").into(),
            );
        };
        session.finish()?;
        if !parked::remove(id)? {
            return Err(
                PgError::new(SqlState::UndefinedObject, "the transaction was given up").into(),
            );
        }
        let counts = session.counts();
        // The subscription's position is not before this one's end: both were committed together.
        session.commit(end_lsn)?;
        self.count_committed(1, counts.changes());
        Ok(())
    }

    /// A session that knows the schemas of these records. Outside of a transaction.
    fn session_of(&self, preamble: &[u8]) -> Result<Session, PgError> {
        let mut session = None;
        let mut reader = Reader::new(preamble);
        while let Some(record) = reader.next_record()? {
            match (record, session.as_mut()) {
                (Record::StreamHeader(header), None) => {
                    let made = new_session(&self.subscription, &self.local_node, &header)?;
                    session.insert(made).apply_parked();
                }
                (Record::Schema(schema), Some(session)) => session.learn(&schema),
                _ => {}
            }
        }
        session
            .ok_or_else(|| PgError::new(SqlState::DataCorrupted, "parked records are incomplete"))
    }
}
