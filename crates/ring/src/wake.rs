//! Who waits for what, and who wakes whom. Run by the leader and by the appliers.
//!
//! Whoever waits says so first and looks again before it sleeps; whoever moves a counter does so
//! first and looks then who waits. A fence between the two steps on either side makes that one of
//! them sees the other: no wake-up is lost. A wake-up too many is harmless.
//!
//! This module knows nothing of how things lie in shared memory, so that loom can check it
//! (`tests/loom.rs`).

use crate::aside::Aside;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};

/// Most appliers that one subscription can have.
pub const MAX_APPLIERS: usize = 64;

/// An applier waits for nothing.
const AWAKE: u64 = u64::MAX;
/// [`Awaited::Transaction`].
const IDLE: u64 = u64::MAX - 1;
/// [`Awaited::Rest`].
const REST: u64 = u64::MAX - 2;

/// What an applier is about to wait for, beside its own latch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// A transaction to take. The leader wakes as many idle appliers as it has use for.
    Transaction,
    /// More of the transaction in hand. The leader wakes all appliers when it has sent some.
    Rest,
    /// The commit of this transaction, and of all before it.
    Commit(u64),
}

impl Awaited {
    /// The value of `wakes_at`: no commit reaches those that are none.
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

/// How far everybody is. All only grow.
#[repr(C)]
#[derive(Debug)]
pub struct Counters {
    pub(crate) published: Padded,
    pub(crate) claimed: Padded,
    pub(crate) committed: Padded,
    pub(crate) tail: Padded,
}

/// Where the leader's latch is, and whether it waits.
#[repr(C)]
#[derive(Debug)]
pub struct LeaderWait {
    /// Address of its latch, 0 before it is there.
    pub(crate) latch: AtomicUsize,
    /// Wants to be woken when `committed` reaches this, and by any release; [`AWAKE`] when it does
    /// not wait.
    wakes_at: AtomicU64,
}

/// Where an applier's latch is, and what it waits for.
#[repr(C)]
#[derive(Debug)]
pub struct ApplierWait {
    /// Address of its latch, 0 before it is there.
    pub(crate) latch: AtomicUsize,
    /// Wants to be woken when `committed` reaches this; [`REST`], [`IDLE`] and [`AWAKE`] are never
    /// reached.
    wakes_at: AtomicU64,
    /// Wants to be woken when this very transaction is done; 0 for none.
    wakes_for: AtomicU64,
}

impl LeaderWait {
    /// What fresh memory is to hold.
    pub fn reset(&self) {
        self.wakes_at.store(AWAKE, Ordering::Relaxed);
    }

    /// It is about to wait until `sequence` is committed. It looks again at what it waits for after
    /// this, before it sleeps.
    pub fn will_wait(&self, sequence: u64) {
        self.wakes_at.store(sequence, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Wake it if it waits for no more than `committed`.
    fn wake(&self, committed: u64, wakes: &mut Wakes) {
        let at = self.wakes_at.load(Ordering::SeqCst);
        if at != AWAKE && at <= committed && self.wakes_at.swap(AWAKE, Ordering::SeqCst) != AWAKE {
            wakes.push(self.latch.load(Ordering::Acquire));
        }
    }
}

impl ApplierWait {
    /// What fresh memory is to hold.
    pub fn reset(&self) {
        self.wakes_at.store(AWAKE, Ordering::Relaxed);
        self.wakes_for.store(0, Ordering::Relaxed);
    }

    /// It is about to wait until `sequence` is done, whatever is before it. It looks again after
    /// this, before it sleeps.
    pub fn will_wait_for(&self, sequence: u64) {
        self.wakes_for.store(sequence, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// It is about to wait. It looks again after this, before it sleeps.
    pub fn will_wait(&self, awaited: Awaited) {
        self.wakes_at.store(awaited.wakes_at(), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// What it has said that it is about to wait for.
    pub fn waited(&self) -> Option<Awaited> {
        match self.wakes_at.load(Ordering::Relaxed) {
            AWAKE => None,
            IDLE => Some(Awaited::Transaction),
            REST => Some(Awaited::Rest),
            sequence => Some(Awaited::Commit(sequence)),
        }
    }

    /// The wait is over.
    pub fn awake(&self) {
        self.wakes_at.store(AWAKE, Ordering::Relaxed);
        self.wakes_for.store(0, Ordering::Relaxed);
    }
}

impl Counters {
    /// Appliers may take transactions up to `sequence`. Only the leader says so.
    pub fn publish(&self, sequence: u64) {
        self.published.0.store(sequence, Ordering::SeqCst);
    }

    /// Take the next transactions for the applier `me`: from the returned one up to what `last`
    /// makes of it and of the last that is published. `show` makes known which one it may be about
    /// to take first, 0 for none.
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
            // Who takes one is no longer idle, and that is seen by whoever sees that it was taken:
            // else the wake-up for the next transaction could be spent on an applier that is busy
            // with this one.
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

    /// The leader takes the transaction that it has published last. False when an applier was
    /// faster.
    pub fn take_last(&self, sequence: u64) -> bool {
        self.claimed
            .0
            .compare_exchange(sequence - 1, sequence, Ordering::SeqCst, Ordering::Acquire)
            .is_ok()
    }

    /// It gives it back. An applier that found it taken a moment ago may be on its way to sleep,
    /// and must be woken however it looks: its latch is set until it has waited, and then it looks
    /// again.
    pub fn give_back_last(&self, sequence: u64) {
        self.claimed.0.store(sequence - 1, Ordering::SeqCst);
    }

    /// Idle appliers to wake after transactions were published: as many as `wanted` says of what
    /// nobody has taken (the first, the last, and whether an applier is busy: that one looks for
    /// more when it is done). As many as were just published would not do: an applier that was
    /// woken for an earlier one and has not run yet still looks idle, and the wake-up would be
    /// spent on it twice. What was put aside and is ready counts as well, each for itself.
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
        // Looked at again: one that was idle a moment ago may have taken what is counted as taken
        // now, and the wake-up be spent on it.
        for applier in appliers.filter(is_idle) {
            if wakes.len() as u64 >= count {
                break;
            }
            wakes.push(applier.latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// Idle appliers to wake for what is ready or not taken, less `but` of it: for those who will
    /// look for more themselves. To be asked for by whoever has made something ready, and by an
    /// applier that was idle and has taken something: it may have been woken for all of it.
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

    /// Whether something is published that nobody has taken. An applier that takes no more asks
    /// when it has committed what it had, and wakes one that does: while it was busy, the leader
    /// may have counted on it ([`Counters::idle`]).
    pub fn leaves_some(&self) -> bool {
        fence(Ordering::SeqCst);
        self.claimed.0.load(Ordering::Acquire) < self.published.0.load(Ordering::Acquire)
    }

    /// `sequence` is committed, and the bytes before `end` are released. Returns whom to wake.
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

    /// The transactions from `first` to `last` are committed, whatever is before them; the caller
    /// has marked them so, with SeqCst. `committed` moves over all that follow it and are marked:
    /// `is_done` says which are, `end` where one's bytes end. Returns whom to wake.
    ///
    /// Of two that mark neighbours at the same time, one at least sees both marks: a fence lies
    /// between each one's mark and its look at the others'. What `end` says of a transaction holds
    /// for as long as `committed` has not moved past it.
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
            // Before the mark, so that whoever sees the mark has the room: the bytes are done with,
            // whoever moves it.
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

    /// The bytes before `position` are released. Returns the leader if it waits.
    pub fn release(&self, position: u64, leader: &LeaderWait) -> Wakes {
        self.tail.0.store(position, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut wakes = Wakes::default();
        leader.wake(AWAKE - 1, &mut wakes);
        wakes
    }

    /// Transactions that are committed.
    pub fn committed(&self) -> u64 {
        self.committed.0.load(Ordering::Acquire)
    }

    /// Bytes that are released.
    pub fn tail(&self) -> u64 {
        self.tail.0.load(Ordering::Acquire)
    }
}

/// Latches to set, by address.
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

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
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
    /// A leader whose latch is at this address.
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
    /// An applier whose latch is at this address.
    #[must_use]
    pub fn at(latch: usize) -> Self {
        Self {
            latch: AtomicUsize::new(latch),
            wakes_at: AtomicU64::new(AWAKE),
            wakes_for: AtomicU64::new(0),
        }
    }
}
