//! The leader applies a transaction itself: a small one that arrives while no transaction, or few,
//! are in flight. Waking an applier would take as long as applying the transaction, and twice the
//! processor time.
//!
//! The leader must keep reading the stream, so it never waits: it waits for a lock for
//! [`LOCK_TIMEOUT_MS`] at most, and any other wait, and a conflict function, is an error
//! (`latch::refuse_waits`). After any error the transaction is rolled back and goes to an applier,
//! as if it had not been tried.
//!
//! States of the transaction, which only the leader moves: complete -> published, without waking an
//! applier -> claimed (`Ring::take_last`) -> committed, or released and all appliers woken. Of
//! several transactions, each is published when the previous one is committed. If one is not
//! committed, all the others are published. An applier that happens to look may claim a published
//! transaction before the leader does; then that applier applies it.

use braid_bgworker::subscription_option::{ApplyMode, Origin};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_node::crash;
use braid_node::group::Group;
use braid_node::origin::{self, OriginId};
use braid_node::registry::{ApplierEntry, SubscriptionEntry};
use braid_node::subscription::Subscription;
use braid_postgres::error::{self, PgError};
use braid_postgres::latch;
use braid_postgres::transaction::{self, Impatient};

use super::in_hand::InHand;
use super::post::Trouble;
use super::{Applier, prepare_settings};

/// Time limit of a wait for a lock.
const LOCK_TIMEOUT_MS: i32 = 2;
/// If a transaction takes longer than this, appliers are the better choice: the leader reads on
/// meanwhile.
const LONG: Duration = Duration::from_millis(2);
/// After a long transaction, and after a failure, all transactions go to appliers for this time.
const PAUSE: Duration = Duration::from_millis(100);
/// Applied changes are reported to the cumulative statistics after this time at the latest.
const REPORT: Duration = Duration::from_secs(1);
/// The leader applies at most this many transactions that arrive at once. For more, several
/// processes are faster.
pub(crate) const TRANSACTIONS: u64 = 4;
/// Changes, and bytes, that a transaction has at most.
pub(crate) const CHANGES: u32 = 16;
pub(crate) const BYTES: u64 = 32 * 1024;

/// The applier within a leader.
pub(crate) struct LeadersApplier {
    applier: Applier,
    /// The replication origin of the applier while it is not used.
    origin: OriginId,
    /// The leader applies nothing before this time.
    not_before: Option<Instant>,
    /// Since when there are transactions that are not reported to the cumulative statistics.
    unreported: Option<Instant>,
}

/// Settings of the leader's process that differ while it applies a transaction.
struct Otherwise(Impatient);

impl Otherwise {
    fn begin(origin: OriginId) -> Self {
        origin::resume(origin);
        latch::refuse_waits(true);
        // The leader waits for the durability that the subscription demands, once for many commits,
        // before it confirms them.
        Self(Impatient::begin(LOCK_TIMEOUT_MS))
    }

    fn end(self) -> OriginId {
        self.0.end();
        latch::refuse_waits(false);
        origin::suspend()
    }
}

impl LeadersApplier {
    /// Creates the applier for a subscription with that many other processes that apply. Returns
    /// `None` if the leader is not to apply anything.
    ///
    /// # Errors
    /// Those of SPI.
    pub(crate) fn new(
        subscription: &Subscription,
        local_node: &str,
        entry: &'static SubscriptionEntry,
        group: &Group,
        others: usize,
    ) -> Result<Option<Self>, PgError> {
        let may = subscription.options.apply_mode == ApplyMode::Parallel
            && !subscription.options.is_relaxed()
            && !subscription.options.parks()
            && !subscription.options.two_phase
            && subscription.options.origin == Origin::None;
        if !may {
            return Ok(None);
        }
        let has_room = error::transaction(|| {
            origin::has_room(subscription.id, &subscription.provider, others)
        })?;
        if !has_room {
            pgrx::log!(
                "the leader of subscription \"{}\" leaves all transactions to appliers: there are too few replication origins",
                subscription.name
            );
            return Ok(None);
        }
        prepare_settings();
        // Of this process alone: transactions that the leader applies are counted for the
        // subscription.
        let own: &'static ApplierEntry = Box::leak(Box::default());
        let applier = Applier::new(
            others,
            group.view(),
            subscription.clone(),
            local_node.to_owned(),
            entry,
            own,
        );
        Ok(Some(Self {
            applier,
            origin: OriginId(0),
            not_before: None,
            unreported: None,
        }))
    }

    /// Whether it is worth trying.
    pub(crate) fn is_ready(&mut self) -> bool {
        if self.not_before.is_some_and(|at| Instant::now() < at) {
            return false;
        }
        self.not_before = None;
        true
    }

    /// Apply the transaction that was published last, if all before it are committed and nobody has
    /// taken it. False: appliers are to be woken for it.
    pub(crate) fn apply(&mut self, group: &Group, sequence: u64) -> bool {
        let ring = group.ring;
        // The transaction may have to follow a parked one. Then it goes to the appliers.
        match error::catch(|| self.applier.has_parked()) {
            Ok(Ok(false)) => {}
            Ok(Ok(true)) => return false,
            Ok(Err(_)) | Err(_) => {
                error::abort();
                return false;
            }
        }
        if !ring.take_last(sequence) {
            return false;
        }
        // One before it may have been parked between the look and now, when all of them are done.
        if self.applier.is_parking_stale() {
            super::post::set_latches(&ring.give_back_last(sequence));
            return true;
        }
        let started = Instant::now();
        let applier = &mut self.applier;
        applier.group.follow(group);
        applier.in_hand = InHand::once();
        let mut transaction = ring.transaction(sequence);
        super::note_in_hand(&transaction);
        let otherwise = Otherwise::begin(self.origin);
        let outcome = error::catch(|| applier.apply(&mut transaction));
        let local_end = match outcome {
            Ok(Ok(local_end)) => Some(local_end),
            Ok(Err(Trouble::Error(error))) | Err(error) => {
                error::abort();
                pgrx::debug1!(
                    "subscription \"{}\" leaves a transaction to an applier: {}",
                    applier.subscription.name,
                    error.message
                );
                None
            }
            Ok(Err(Trouble::InTheWay)) => {
                error::abort();
                None
            }
        };
        self.origin = otherwise.end();
        crash::done(sequence);
        applier.in_hand.attempt.pieces = None;
        if local_end.is_none() || started.elapsed() > LONG {
            self.not_before = Some(Instant::now() + PAUSE);
        }
        let Some(local_end) = local_end else {
            if let Some(session) = applier.session.as_mut() {
                session.forget_transaction();
            }
            super::post::set_latches(&ring.give_back_last(sequence));
            return true;
        };
        applier.post.has_committed(sequence, local_end, 0);
        applier
            .entry
            .schedule
            .applied_by_leader
            .fetch_add(1, Ordering::Relaxed);
        self.unreported.get_or_insert(started);
        true
    }

    /// To be called every now and then.
    pub(crate) fn rest(&mut self) {
        if self.unreported.is_none_or(|since| since.elapsed() < REPORT) {
            return;
        }
        self.unreported = None;
        transaction::report_statistics(true);
        if let Some(session) = self.applier.session.as_mut() {
            session.rest();
        }
    }
}
