//! Has a transaction applied while it is in progress at the provider (`braid_bgworker::running`):
//! chooses it, checks its content, and ends that again.

use braid_bgworker::subscription_option::{ApplyMode, Origin, Streaming};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

use braid_bgworker::running::{Ending, State, Supply};
use braid_gir::{Commit, Record};
use braid_node::origin;
use braid_node::subscription::Subscription;
use braid_postgres::error::PgError;
use braid_postgres::{process, worker};
use braid_ring::MAX_APPLIERS;

use super::reception::Reception;
use super::{End, out_of_order};
use crate::applier::Arguments;
use crate::applier::running::say_given_up;
use crate::appliers;
use crate::copy::Readiness;

/// A transaction takes its time a moment before its place in WAL: of two, the later one can have
/// the earlier time, by so much at most (microseconds). Where it is more, that is found out in the
/// end.
const SLACK: i64 = 1_000_000;

/// The leader's part.
#[derive(Default)]
pub(super) struct Watch {
    process: Option<worker::Handle>,
    /// Number of its process among the appliers'; `None`: nothing is applied while it runs.
    number: Option<usize>,
    /// Of the commits that were received, the newest (Unix microseconds).
    pub(super) newest: i64,
}

impl Watch {
    /// For a subscription that may have so many appliers. In a transaction.
    pub(super) fn new(subscription: &Subscription, most: usize) -> Result<Self, PgError> {
        // Chunks commit before the end. A parked transaction is parked as a whole. If transactions
        // of other nodes are forwarded, only the end says whose a transaction is.
        let may = subscription.options.streaming == Streaming::Parallel
            && subscription.options.apply_mode != ApplyMode::Serial
            && subscription.options.split_transactions_above == 0
            && !subscription.options.parks()
            && subscription.options.origin == Origin::None
            && most < MAX_APPLIERS;
        let has_room = may && origin::has_room(subscription.id, &subscription.provider, most)?;
        if may && !has_room {
            pgrx::log!(
                "subscription \"{}\" applies large transactions once they have committed, not while they run: there are too few replication origins",
                subscription.name
            );
        }
        Ok(Self {
            process: None,
            number: has_room.then_some(most),
            newest: 0,
        })
    }

    /// How many processes may apply, with `most` appliers.
    pub(super) fn others(&self, most: usize) -> usize {
        self.number.map_or(most, |number| number + 1)
    }

    /// Whether segments need to be examined.
    pub(super) fn is_wanted(&self) -> bool {
        self.number.is_some()
    }

    /// End the process.
    pub(super) fn stop(&mut self) {
        if let Some(process) = self.process.take() {
            process.terminate();
            if !process.wait_ended(std::time::Duration::from_secs(10)) {
                pgrx::log!("a process that applies a running transaction is slow to end");
            }
        }
    }
}

/// Facts about the content of an in-progress transaction.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Why it is not applied before it has committed.
    unfit: Option<&'static str>,
    /// Schemas of its tables.
    schemas: HashSet<u32>,
    changes: u32,
}

impl Content {
    pub(super) fn leave(&mut self, reason: &'static str) {
        self.unfit.get_or_insert(reason);
    }

    pub(super) fn unfit(&self) -> Option<&'static str> {
        self.unfit
    }

    pub(super) fn changes(&self) -> u32 {
        self.changes
    }

    /// A part was rolled back: so many changes are left.
    pub(super) fn go_back(&mut self, changes: u32) {
        self.changes = changes;
    }

    pub(super) fn schemas(&self) -> Vec<u32> {
        self.schemas.iter().copied().collect()
    }
}

impl Reception {
    /// A row of the running transaction whose segment is received.
    pub(super) fn running_change(&mut self, body: &[u8]) -> Result<(), End> {
        if !self.watch.is_wanted() {
            return Ok(());
        }
        let schema = Record::read_change_header(body)?.schema.0;
        let content = self.segments.content().ok_or_else(out_of_order)?;
        content.changes = content.changes.saturating_add(1);
        if content.unfit.is_some() || !content.schemas.insert(schema) {
            return Ok(());
        }
        if let Some(reason) = self.unfit(schema)?
            && let Some(content) = self.segments.content()
        {
            content.leave(reason);
        }
        Ok(())
    }

    fn readiness(&self, schema: u32) -> Result<Readiness, End> {
        let table = self.dictionary.get(schema).ok_or_else(out_of_order)?;
        Ok(self.copies.readiness(table))
    }

    /// Why rows of a relation may not be applied before their transaction has ended, if they may
    /// not.
    fn unfit(&mut self, schema: u32) -> Result<Option<&'static str>, End> {
        let table = self.dictionary.get(schema).ok_or_else(out_of_order)?;
        if self.segments.tentative.contains(&schema) && !self.copies.has(table) {
            return Ok(Some("It changes a table that is new."));
        }
        if !self.scheduling.is_known(schema) && !self.is_plain_member(schema)? {
            return Ok(Some("It changes a table that is not known."));
        }
        let mut readiness = self.readiness(schema)?;
        if readiness == Readiness::Unknown {
            self.copies.poll(self.entry)?;
            readiness = self.readiness(schema)?;
        }
        if readiness != Readiness::Ready {
            return Ok(Some("It changes a table that is yet to be copied."));
        }
        Ok((!self.scheduling.is_by_keys(schema)?)
            .then_some("It changes a table whose changes are ordered as a whole."))
    }

    /// Returns why an in-progress transaction can't be applied before its commit, if any of its
    /// tables or its content forbids it.
    fn any_unfit(&mut self, xid: u32) -> Result<Option<&'static str>, End> {
        for schema in self.segments.schemas(xid) {
            if let Some(reason) = self.unfit(schema)? {
                return Ok(Some(reason));
            }
        }
        Ok(self.segments.unfit(xid))
    }

    /// A segment has ended: the process may apply what its transaction's file has.
    pub(super) fn supply(&mut self, xid: u32) -> Result<(), End> {
        let Some(number) = self.watch.number else {
            return Ok(());
        };
        self.tend_running();
        let running = self.group.running();
        let unfit = self.segments.unfit(xid);
        match running.state() {
            State::Started if running.xid() == xid => {
                if let Some(reason) = unfit {
                    self.give_up_running(xid, Some(reason));
                    return Ok(());
                }
            }
            State::Free
                if unfit.is_none()
                    && self.subscription.skip_lsn == 0
                    && self.entry.anew.not_running.load(Ordering::Relaxed) != xid =>
            {
                let Some(path) = self.segments.path(xid) else {
                    return Ok(());
                };
                if !running.prepare(xid, &path) {
                    return Ok(());
                }
                self.start_process(number);
                if self.watch.process.is_none() {
                    running.free();
                    self.segments.leave(xid);
                    return Ok(());
                }
            }
            _ => return Ok(()),
        }
        self.hand_over(xid)
    }

    /// Publishes the length of the file for the process.
    fn hand_over(&mut self, xid: u32) -> Result<(), End> {
        let running = self.group.running();
        if let Some(length) = self.segments.hand_over(xid)? {
            running.supply(Supply {
                length,
                after: self.producer.completed(),
                read: self.entry.received_lsn.load(Ordering::Relaxed),
                newest: self.watch.newest.saturating_sub(SLACK),
            });
            process::set_latch(running.process());
        }
        Ok(())
    }

    fn start_process(&mut self, number: usize) {
        let arguments = Arguments {
            subscription_id: self.subscription.id,
            number,
            handle: self.handle,
            running: true,
        };
        self.watch.process = appliers::start_process(arguments, &self.subscription.name);
    }

    /// The process is not to commit the transaction, nor to be started for it again. Without a
    /// reason: it does not come to be committed.
    pub(super) fn give_up_running(&mut self, xid: u32, reason: Option<&str>) {
        self.segments.leave(xid);
        let running = self.group.running();
        if self.watch.process.is_none() || running.xid() != xid || !running.give_up() {
            return;
        }
        process::set_latch(running.process());
        let Some(reason) = reason else { return };
        say_given_up(self.entry, &self.subscription.name, xid, reason);
    }

    /// Looks after the process that applies an in-progress transaction.
    pub(super) fn tend_running(&mut self) {
        let has_ended = self
            .watch
            .process
            .as_ref()
            .is_some_and(|process| process.status() == worker::Status::Ended);
        if !has_ended {
            return;
        }
        let running = self.group.running();
        if running.give_up() {
            // The process has ended by itself.
            self.segments.leave(running.xid());
            process::set_latch(running.waiter());
            return;
        }
        if running.state() == State::GivenUp {
            self.segments.leave(running.xid());
        }
        // The applier that waits for it has to see the outcome.
        let sequence = running.ending().sequence;
        if sequence == 0 || self.group.ring.committed() >= sequence {
            self.watch.process = None;
            running.free();
        }
    }

    /// An in-progress transaction has committed at the provider. Returns whether the process
    /// applies it; then the process has all of it.
    pub(super) fn is_applied_elsewhere(
        &mut self,
        xid: u32,
        is_own: bool,
        commit: &Commit,
        timestamp: i64,
    ) -> Result<bool, End> {
        self.tend_running();
        let running = self.group.running();
        if self.watch.process.is_none() || running.state() != State::Started || running.xid() != xid
        {
            return Ok(false);
        }
        let reason = if !is_own {
            Some("It is another node's.")
        } else if running.process() == 0 {
            // Without the file, which is about to go, it comes too late.
            Some("It was over before its process had begun.")
        } else {
            self.any_unfit(xid)?
        };
        if reason.is_some() {
            self.give_up_running(xid, reason);
            return Ok(false);
        }
        self.hand_over(xid)?;
        let is_taken = running.is_whole(Ending {
            commit_lsn: commit.commit_lsn,
            end_lsn: commit.end_lsn,
            timestamp,
            sequence: self.producer.sequence(),
        });
        process::set_latch(running.process());
        Ok(is_taken)
    }
}
