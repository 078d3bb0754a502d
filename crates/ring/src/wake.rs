//! Waiting and waking: records what each process waits for, and returns which latches to set. Run
//! by the leader and by the appliers.
//!
//! Example. An applier finds nothing to claim. Before it sleeps, the leader publishes a transaction
//! and sees no idle applier. The wake-up is lost. So:
//!
//! 1. A process that will wait first says for what, and then checks its condition again before it
//!    sleeps.
//! 2. A process that moves a counter does so first, and then checks who waits.
//!
//! Both have a fence between the two steps. So at least one of them sees the other, and no wake-up
//! is lost. A superfluous wake-up is harmless.
//!
//! This module does not know the layout of shared memory, so that loom can check it
//! (`tests/loom.rs`).

use crate::aside::Aside;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};

/// Largest number of appliers of a subscription.
pub const MAX_APPLIERS: usize = 64;

/// Value of `wakes_at` of a process that does not wait.
const AWAKE: u64 = u64::MAX;
/// Value of `wakes_at` for [`Awaited::Transaction`].
const IDLE: u64 = u64::MAX - 1;
/// Value of `wakes_at` for [`Awaited::Rest`].
const REST: u64 = u64::MAX - 2;

/// Event that an applier is about to wait for, beside its own latch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// A transaction to claim. The leader wakes as many idle appliers as it needs.
    Transaction,
    /// More bytes of its open transaction. The leader wakes all appliers when it has stored some.
    Rest,
    /// The commit of this transaction, and of all before it.
    Commit(u64),
}

impl Awaited {
    /// Returns the value of `wakes_at`. `committed` never reaches the values that are no sequence
    /// numbers.
    const fn wakes_at(self) -> u64 {
        match self {
            Self::Transaction => IDLE,
            Self::Rest => REST,
            Self::Commit(sequence) => sequence,
        }
    }
}

/// A counter in a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Padded(pub(crate) AtomicU64);

/// Progress of the subscription's processes. All counters only grow, but for `claimed`, which
/// [`Counters::give_back_last`] moves back by one.
#[repr(C)]
#[derive(Debug)]
pub struct Counters {
    pub(crate) published: Padded,
    pub(crate) claimed: Padded,
    pub(crate) committed: Padded,
    pub(crate) tail: Padded,
}

/// The leader's latch, and whether the leader waits.
#[repr(C)]
#[derive(Debug)]
pub struct LeaderWait {
    /// Address of the leader's latch; 0 before the leader is registered.
    pub(crate) latch: AtomicUsize,
    /// The leader is to be woken when `committed` reaches this, and by any release; [`AWAKE`] if it
    /// does not wait.
    wakes_at: AtomicU64,
}

/// An applier's latch, and what the applier waits for.
#[repr(C)]
#[derive(Debug)]
pub struct ApplierWait {
    /// Address of the applier's latch; 0 before the applier is registered.
    pub(crate) latch: AtomicUsize,
    /// The applier is to be woken when `committed` reaches this. `committed` never reaches
    /// [`REST`], [`IDLE`] and [`AWAKE`].
    wakes_at: AtomicU64,
    /// The applier is to be woken when this very transaction is done; 0 for none.
    wakes_for: AtomicU64,
}

impl LeaderWait {
    /// Initializes fresh memory.
    pub fn reset(&self) {
        self.wakes_at.store(AWAKE, Ordering::Relaxed);
    }

    /// Says that the leader will wait until `sequence` is committed. The leader checks its
    /// condition again after this, before it sleeps.
    pub fn will_wait(&self, sequence: u64) {
        self.wakes_at.store(sequence, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Adds the leader's latch to `wakes` if the leader waits for `committed` or less.
    fn wake(&self, committed: u64, wakes: &mut Wakes) {
        let at = self.wakes_at.load(Ordering::SeqCst);
        if at != AWAKE && at <= committed && self.wakes_at.swap(AWAKE, Ordering::SeqCst) != AWAKE {
            wakes.push(self.latch.load(Ordering::Acquire));
        }
    }
}

impl ApplierWait {
    /// Initializes fresh memory.
    pub fn reset(&self) {
        self.wakes_at.store(AWAKE, Ordering::Relaxed);
        self.wakes_for.store(0, Ordering::Relaxed);
    }

    /// Says that the applier will wait until `sequence` is done, even if transactions before it are
    /// not. It checks again after this, before it sleeps.
    pub fn will_wait_for(&self, sequence: u64) {
        self.wakes_for.store(sequence, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Says that the applier will wait. It checks its condition again after this, before it sleeps.
    pub fn will_wait(&self, awaited: Awaited) {
        self.wakes_at.store(awaited.wakes_at(), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Returns what the applier has said that it will wait for.
    pub fn waited(&self) -> Option<Awaited> {
        match self.wakes_at.load(Ordering::Relaxed) {
            AWAKE => None,
            IDLE => Some(Awaited::Transaction),
            REST => Some(Awaited::Rest),
            sequence => Some(Awaited::Commit(sequence)),
        }
    }

    /// Ends the wait.
    pub fn awake(&self) {
        self.wakes_at.store(AWAKE, Ordering::Relaxed);
        self.wakes_for.store(0, Ordering::Relaxed);
    }
}

impl Counters {
    /// Lets appliers claim transactions up to `sequence`. Called by the leader only.
    pub fn publish(&self, sequence: u64) {
        self.published.0.store(sequence, Ordering::SeqCst);
    }

    /// Claims a run of published transactions for the applier `me`. Returns its first and last. The
    /// run ends at `last(first, last published)`. Before each attempt, `show` publishes the
    /// sequence number that may be claimed; 0 means none.
    pub fn claim(
        &self,
        me: &ApplierWait,
        mut show: impl FnMut(u64),
        last: impl Fn(u64, u64) -> u64,
    ) -> Option<(u64, u64)> {
        let mut claimed = self.claimed.0.load(Ordering::Acquire);
        loop {
            let published = self.published.0.load(Ordering::Acquire);
            if claimed >= published {
                return None;
            }
            let first = claimed + 1;
            show(first);
            let last = last(first, published).clamp(first, published);
            // An applier that claims a run is no longer idle. A process that sees the new `claimed`
            // must see that too: otherwise it could spend the wake-up for the next transaction on
            // this busy applier.
            let waited = me.waited();
            if waited.is_some() {
                me.wakes_at.store(AWAKE, Ordering::Relaxed);
            }
            match self.claimed.0.compare_exchange(
                claimed,
                last,
                Ordering::SeqCst,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some((first, last)),
                Err(now) => {
                    show(0);
                    if let Some(awaited) = waited {
                        me.will_wait(awaited);
                    }
                    claimed = now;
                }
            }
        }
    }

    /// Claims the last published transaction for the leader. Returns false if an applier was
    /// faster.
    pub fn take_last(&self, sequence: u64) -> bool {
        self.claimed
            .0
            .compare_exchange(sequence - 1, sequence, Ordering::SeqCst, Ordering::Acquire)
            .is_ok()
    }

    /// Releases the transaction that [`Counters::take_last`] has claimed. An applier that found it
    /// claimed a moment ago may be about to sleep. So the caller sets the latches of all appliers,
    /// whether they look idle or not: a latch stays set until its process waits, and then it looks
    /// again.
    pub fn give_back_last(&self, sequence: u64) {
        self.claimed.0.store(sequence - 1, Ordering::SeqCst);
    }

    /// Returns latches of idle appliers to wake after transactions were published. Their number is
    /// that of ready transactions plus `wanted(first, last, busy)` of the published ones that are
    /// not claimed. `busy`: an applier is at work, and will look for more when it is done. The
    /// number just published would not do: an applier that was woken for an earlier transaction and
    /// has not run yet still looks idle, so the second wake-up would hit it too.
    pub fn idle<'a>(
        &self,
        appliers: impl Iterator<Item = &'a ApplierWait> + Clone,
        aside: &Aside,
        wanted: impl FnOnce(u64, u64, bool) -> u64,
    ) -> Wakes {
        fence(Ordering::SeqCst);
        let mut wakes = Wakes::default();
        let is_idle = |applier: &&ApplierWait| applier.wakes_at.load(Ordering::SeqCst) == IDLE;
        if !appliers.clone().any(|applier| is_idle(&applier)) {
            return wakes;
        }
        let published = self.published.0.load(Ordering::Relaxed);
        let claimed = self.claimed.0.load(Ordering::Acquire);
        let mut count = aside.ready();
        if claimed < published {
            let busy = self.committed.0.load(Ordering::Acquire) < claimed;
            count += wanted(claimed + 1, published, busy);
        }
        // Checked again: an applier that was idle a moment ago may have claimed something that is
        // no longer counted. The wake-up would be spent on it.
        for applier in appliers.filter(is_idle) {
            if wakes.len() as u64 >= count {
                break;
            }
            wakes.push(applier.latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// Adds latches of idle appliers to `wakes`, one for each transaction that is ready or not
    /// claimed, less `but`: callers that will look for more themselves. Called after transactions
    /// were made ready, and by an applier that was idle and has claimed one: all wake-ups may have
    /// hit that applier.
    pub fn offer<'a>(
        &self,
        appliers: impl Iterator<Item = &'a ApplierWait>,
        aside: &Aside,
        but: u64,
        wakes: &mut Wakes,
    ) {
        fence(Ordering::SeqCst);
        let claimed = self.claimed.0.load(Ordering::SeqCst);
        let published = self.published.0.load(Ordering::SeqCst);
        let takable = aside.ready() + published.saturating_sub(claimed);
        let mut left = takable.saturating_sub(but);
        for applier in appliers {
            if left == 0 {
                break;
            }
            if applier.wakes_at.load(Ordering::SeqCst) == IDLE {
                wakes.push(applier.latch.load(Ordering::Acquire));
                left -= 1;
            }
        }
    }

    /// Whether a published transaction is not claimed. An applier that may not claim any more asks
    /// this when it has committed its last one, and then wakes another: while it was busy, the
    /// leader may have counted on it ([`Counters::idle`]).
    pub fn leaves_some(&self) -> bool {
        fence(Ordering::SeqCst);
        self.claimed.0.load(Ordering::Acquire) < self.published.0.load(Ordering::Acquire)
    }

    /// Records that `sequence` is committed and that the bytes before `end` are released. Returns
    /// the latches to set.
    pub fn commit<'a>(
        &self,
        sequence: u64,
        end: u64,
        leader: &LeaderWait,
        appliers: impl Iterator<Item = &'a ApplierWait>,
    ) -> Wakes {
        self.tail.0.store(end, Ordering::Release);
        self.committed.0.store(sequence, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut wakes = Wakes::default();
        for applier in appliers {
            if applier.wakes_at.load(Ordering::SeqCst) <= sequence {
                wakes.push(applier.latch.load(Ordering::Acquire));
            }
        }
        leader.wake(sequence, &mut wakes);
        wakes
    }

    /// Records that the transactions from `first` to `last` are committed, even if some before them
    /// are not. The caller has marked them as done, with SeqCst. Moves `committed` over all done
    /// transactions that follow it: `is_done` says which are done, `end` where the bytes of one
    /// end. Returns the latches to set.
    ///
    /// If two appliers mark neighbours at the same time, at least one of them sees both marks: each
    /// has a fence between setting its own mark and reading the other. The value of `end` is valid
    /// for as long as `committed` has not moved past the transaction.
    pub fn complete<'a>(
        &self,
        first: u64,
        last: u64,
        is_done: impl Fn(u64) -> bool,
        end: impl Fn(u64) -> u64,
        leader: &LeaderWait,
        appliers: impl Iterator<Item = &'a ApplierWait>,
    ) -> Wakes {
        fence(Ordering::SeqCst);
        loop {
            let committed = self.committed.0.load(Ordering::SeqCst);
            let mut mark = committed;
            while is_done(mark + 1) {
                mark += 1;
            }
            if mark == committed {
                break;
            }
            let end = end(mark);
            fence(Ordering::Acquire);
            if self.committed.0.load(Ordering::SeqCst) != committed {
                continue;
            }
            // `tail` before `committed`, so that a process that sees the new `committed` has the
            // room too. `fetch_max`: the bytes are free, whichever process moves `committed`.
            self.tail.0.fetch_max(end, Ordering::SeqCst);
            let _ = self.committed.0.compare_exchange(
                committed,
                mark,
                Ordering::SeqCst,
                Ordering::SeqCst,
            );
        }
        fence(Ordering::SeqCst);
        let committed = self.committed.0.load(Ordering::SeqCst);
        let mut wakes = Wakes::default();
        for applier in appliers {
            if applier.wakes_at.load(Ordering::SeqCst) <= committed
                || (first..=last).contains(&applier.wakes_for.load(Ordering::SeqCst))
            {
                wakes.push(applier.latch.load(Ordering::Acquire));
            }
        }
        leader.wake(committed, &mut wakes);
        wakes
    }

    /// Records that the bytes before `position` are released. Returns the leader's latch if it
    /// waits.
    pub fn release(&self, position: u64, leader: &LeaderWait) -> Wakes {
        self.tail.0.store(position, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut wakes = Wakes::default();
        leader.wake(AWAKE - 1, &mut wakes);
        wakes
    }

    /// Returns the last transaction that is committed with all before it.
    pub fn committed(&self) -> u64 {
        self.committed.0.load(Ordering::Acquire)
    }

    /// Returns the position before which bytes are released.
    pub fn tail(&self) -> u64 {
        self.tail.0.load(Ordering::Acquire)
    }
}

/// Addresses of latches to set.
#[derive(Debug, Clone, Copy)]
pub struct Wakes {
    latches: [usize; MAX_APPLIERS + 1],
    count: usize,
}

impl Default for Wakes {
    fn default() -> Self {
        Self {
            latches: [0; MAX_APPLIERS + 1],
            count: 0,
        }
    }
}

impl Wakes {
    pub(crate) fn push(&mut self, latch: usize) {
        if latch == 0 {
            return;
        }
        if let Some(place) = self.latches.get_mut(self.count) {
            *place = latch;
            self.count += 1;
        }
    }

    /// Number of latches.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no latches.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The addresses.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.latches.iter().take(self.count).copied()
    }
}

#[cfg(loom)]
impl Counters {
    /// Counters of a fresh ring.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for the model only")]
    pub fn new() -> Self {
        let zero = || Padded(AtomicU64::new(0));
        Self {
            published: zero(),
            claimed: zero(),
            committed: zero(),
            tail: zero(),
        }
    }
}

#[cfg(loom)]
impl LeaderWait {
    /// A leader whose latch has this address.
    #[must_use]
    pub fn at(latch: usize) -> Self {
        Self {
            latch: AtomicUsize::new(latch),
            wakes_at: AtomicU64::new(AWAKE),
        }
    }
}

#[cfg(loom)]
impl ApplierWait {
    /// An applier whose latch has this address.
    #[must_use]
    pub fn at(latch: usize) -> Self {
        Self {
            latch: AtomicUsize::new(latch),
            wakes_at: AtomicU64::new(AWAKE),
            wakes_for: AtomicU64::new(0),
        }
    }
}
