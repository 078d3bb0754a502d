//! Decides who applies complete transactions: appliers, to which they are published in groups, or
//! the leader itself, if there are only a few small ones (`braid_bgworker::publishing` decides).
//! Run by the leader.

use std::time::Duration;

use braid_bgworker::publishing::Unpublished;
use braid_node::group::Group;
use braid_node::settings;
use braid_postgres::process;
use braid_ring::{Grain, Leader as Producer};

use crate::applier::here::{self, LeadersApplier};

/// The transactions that are complete and not handed out.
pub(super) struct Handout {
    unpublished: Unpublished,
    /// How much an applier claims at once.
    grain: Grain,
    /// Applies transactions that arrive while none is in flight.
    here: Option<LeadersApplier>,
}

impl Handout {
    /// There are none. `joined`: appliers join them.
    pub(super) fn new(grain: Grain, joined: bool, here: Option<LeadersApplier>) -> Self {
        Self {
            unpublished: Unpublished::new(joined.then_some(grain.run)),
            grain,
            here,
        }
    }

    /// Appliers take this much at once from now on.
    pub(super) fn set_grain(&mut self, grain: Grain) {
        self.grain = grain;
    }

    /// A message of so many bytes has come.
    pub(super) fn message(&mut self, length: usize) {
        self.unpublished.message(length);
    }

    /// Whether there are some that nobody keeps quiet about.
    pub(super) fn is_due(&self) -> bool {
        self.unpublished.is_due()
    }

    /// Whether more transactions that can be joined are about to arrive, so that complete ones may
    /// wait for them. That is so while full messages arrive, and for a moment at most.
    pub(super) fn awaits_more(&self, silence: impl FnOnce() -> Duration) -> bool {
        self.unpublished.awaits_more(silence)
    }

    /// Has a complete transaction applied. A few small transactions, if they are the only ones in
    /// flight, are not published until it is known whether more has arrived. Others are published
    /// in groups: checking which transactions and appliers wait costs more than receiving a
    /// transaction.
    pub(super) fn add(
        &mut self,
        (group, producer): (&Group, &Producer),
        sequence: u64,
        may_be_here: bool,
        changes: u32,
    ) {
        let nothing_else = sequence == group.ring.committed() + self.unpublished.quiet() + 1;
        if may_be_here
            && nothing_else
            && self.unpublished.quiet() < here::TRANSACTIONS
            && settings::leader_applies()
            && self.here.as_mut().is_some_and(LeadersApplier::is_ready)
        {
            self.unpublished.keep_quiet();
        } else if self.unpublished.add(changes) {
            self.publish(group, producer);
        }
    }

    fn publish(&mut self, group: &Group, producer: &Producer) {
        self.unpublished.clear();
        producer.publish_completed();
        for latch in group.ring.idle_appliers(self.grain).iter() {
            process::set_latch(latch);
        }
    }

    /// Something else is to be done first: what is complete is for appliers.
    pub(super) fn hand_out(&mut self, group: &Group, producer: &Producer) {
        if !self.unpublished.is_empty() {
            self.publish(group, producer);
        }
    }

    /// Nothing more has come.
    pub(super) fn apply_here(&mut self, group: &Group, producer: &Producer) {
        let last = producer.completed();
        let first = last + 1 - self.unpublished.take_quiet();
        for sequence in first..=last {
            // One by one, as only what was published last can be taken.
            producer.publish_up_to(sequence);
            if !self
                .here
                .as_mut()
                .is_some_and(|here| here.apply(group, sequence))
            {
                self.publish(group, producer);
                return;
            }
        }
    }

    /// To be called every now and then.
    pub(super) fn rest(&mut self) {
        if let Some(here) = &mut self.here {
            here.rest();
        }
    }
}
