//! The segment, as all of its processes use it.

use std::ops::Range;
use std::ptr::NonNull;

use crate::aside;
use crate::consumer::Transaction;
use crate::failure::Failure;
use crate::layout::{ApplierSlot, ApplierState, Descriptor, Geometry, Header, MAGIC, Place};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::wake::{ApplierWait, Awaited, Wakes};

/// Errors of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The memory is too small, or was not laid out by this version.
    #[error("shared memory segment is not an apply ring of this version")]
    NotARing,
    /// A frame header is invalid.
    #[error("apply ring is corrupt at position {0}")]
    Corrupt(u64),
}

/// Consecutive transactions that an applier has claimed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Sequence number of the first.
    pub first: u64,
    /// Sequence number of the last.
    pub last: u64,
}

/// Rule for which transactions are claimed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grain {
    /// Changes that a run may have, at least 1.
    pub run: u32,
    /// Largest number of changes of a small transaction.
    pub small: u32,
}

impl Grain {
    /// Every transaction is claimed alone.
    pub const ONE: Self = Self { run: 1, small: 0 };

    /// Returns how much a transaction with that many changes adds to a run: a whole run if the
    /// transaction is not small.
    #[must_use]
    pub fn weight(self, changes: u32) -> u32 {
        let changes = changes.max(1);
        if changes > self.small {
            self.run
        } else {
            changes
        }
    }

    /// As [`Grain::weight`], for a transaction in the ring. One with any flag set is claimed alone,
    /// so it adds a whole run.
    fn weight_of(self, descriptor: &Descriptor) -> u32 {
        let changes = descriptor.changes.load(Ordering::Relaxed);
        if descriptor.flags.load(Ordering::Acquire) == 0 {
            self.weight(changes)
        } else {
            self.run
        }
    }
}

/// A view of the segment. Copies are views of the same segment.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    base: NonNull<u8>,
    geometry: Geometry,
}

impl Ring {
    /// Lays out a segment.
    ///
    /// # Errors
    /// [`Error::NotARing`] if `len` is too small or `base` is not aligned.
    ///
    /// # Safety
    /// `base` is aligned to 64 bytes, valid for `len` bytes for as long as the ring and its copies
    /// are used, and used by nothing else yet.
    pub unsafe fn create(base: NonNull<u8>, len: usize, geometry: Geometry) -> Result<Self, Error> {
        if len < geometry.bytes() || !base.as_ptr().addr().is_multiple_of(64) {
            return Err(Error::NotARing);
        }
        // SAFETY: all-zero bytes are a valid Header and valid Descriptors (atomics and plain
        // bytes); the range was checked.
        unsafe { base.as_ptr().write_bytes(0, geometry.buffer_at()) };
        let ring = Self { base, geometry };
        let header = ring.header();
        header
            .appliers
            .store(geometry.appliers as u64, Ordering::Relaxed);
        header.buffer.store(geometry.buffer, Ordering::Relaxed);
        header
            .descriptors
            .store(geometry.descriptors, Ordering::Relaxed);
        header
            .active_appliers
            .store(geometry.appliers as u64, Ordering::Relaxed);
        header.taking.store(u64::MAX, Ordering::Relaxed);
        header.leader.reset();
        for slot in &header.slots {
            slot.wait.reset();
        }
        header.magic.store(MAGIC, Ordering::Release);
        Ok(ring)
    }

    /// Opens a segment that [`Ring::create`] has laid out.
    ///
    /// # Errors
    /// [`Error::NotARing`] if the memory does not hold one.
    ///
    /// # Safety
    /// As for [`Ring::create`], except that other processes may use the memory.
    pub unsafe fn attach(base: NonNull<u8>, len: usize) -> Result<Self, Error> {
        if len < size_of::<Header>() || !base.as_ptr().addr().is_multiple_of(64) {
            return Err(Error::NotARing);
        }
        // SAFETY: large enough and aligned; the header is made of atomics, which any bytes are
        // valid for.
        let header = unsafe { &*base.as_ptr().cast::<Header>() };
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(Error::NotARing);
        }
        let geometry = Geometry {
            appliers: usize::try_from(header.appliers.load(Ordering::Relaxed)).unwrap_or(0),
            buffer: header.buffer.load(Ordering::Relaxed),
            descriptors: header.descriptors.load(Ordering::Relaxed),
        };
        if geometry != Geometry::new(geometry.appliers, geometry.buffer, geometry.descriptors)
            || len < geometry.bytes()
        {
            return Err(Error::NotARing);
        }
        Ok(Self { base, geometry })
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: create or attach checked size and alignment; the header is shared through atomics
        // only.
        unsafe { &*self.base.as_ptr().cast::<Header>() }
    }

    pub(crate) fn descriptor(&self, sequence: u64) -> &Descriptor {
        let index = sequence & (self.geometry.descriptors - 1);
        let index = usize::try_from(index).unwrap_or(0);
        // SAFETY: index < descriptors, and geometry.bytes() covers that many; atomics only.
        unsafe {
            &*self
                .base
                .as_ptr()
                .add(Geometry::descriptors_at())
                .cast::<Descriptor>()
                .add(index)
        }
    }

    pub(crate) fn place(&self, sequence: u64) -> &Place {
        let index = sequence & (self.geometry.descriptors - 1);
        let index = usize::try_from(index).unwrap_or(0);
        // SAFETY: index < descriptors, and geometry.bytes() covers that many; both parts before are
        // multiples of 64 bytes long; atomics only.
        unsafe {
            &*self
                .base
                .as_ptr()
                .add(self.geometry.places_at())
                .cast::<Place>()
                .add(index)
        }
    }

    pub(crate) fn ready_word(&self, word: usize) -> &AtomicU64 {
        let words = usize::try_from(self.geometry.descriptors.div_ceil(64)).unwrap_or(1);
        // SAFETY: the index is below the number of words, which geometry.bytes() covers; aligned as
        // what is before it; atomics only.
        unsafe {
            &*self
                .base
                .as_ptr()
                .add(self.geometry.ready_at())
                .cast::<AtomicU64>()
                .add(word % words)
        }
    }

    /// Returns the address of buffer position `position`, and the number of bytes from there to the
    /// end of the buffer.
    pub(crate) fn at(&self, position: u64) -> (*mut u8, u64) {
        let offset = position % self.geometry.buffer;
        let at = self.geometry.buffer_at() + usize::try_from(offset).unwrap_or(0);
        // The offset is below `buffer`, and geometry.bytes() covers that.
        (
            self.base.as_ptr().wrapping_add(at),
            self.geometry.buffer - offset,
        )
    }

    pub(crate) fn read_frame_header(&self, position: u64) -> (u32, u32) {
        let (at, _) = self.at(position);
        // SAFETY: positions are multiples of 8 and so is the buffer's size: 8 bytes lie in one
        // piece. The leader wrote them before it moved the `end` or `published` that this process
        // has read with acquire.
        let raw = unsafe { at.cast::<[u8; 8]>().read() };
        let [a, b, c, d, e, f, g, h] = raw;
        (
            u32::from_le_bytes([a, b, c, d]),
            u32::from_le_bytes([e, f, g, h]),
        )
    }

    pub(crate) fn write_frame_header(&self, position: u64, len: u32, kind: u32) {
        let [a, b, c, d] = len.to_le_bytes();
        let [e, f, g, h] = kind.to_le_bytes();
        let (at, _) = self.at(position);
        // SAFETY: positions are multiples of 8 and so is the buffer's size, so 8 bytes lie in one
        // piece. Only the leader writes, between `tail` and `tail + buffer`, where nobody reads.
        unsafe { at.cast::<[u8; 8]>().write([a, b, c, d, e, f, g, h]) };
    }

    /// Returns the sizes of the segment.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the last transaction that appliers may claim.
    #[must_use]
    pub fn published(&self) -> u64 {
        self.header().counters.published.0.load(Ordering::Acquire)
    }

    /// Returns the last transaction that is claimed.
    #[must_use]
    pub fn claimed(&self) -> u64 {
        self.header().counters.claimed.0.load(Ordering::Acquire)
    }

    /// Returns the last transaction that is committed with all before it.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.header().counters.committed()
    }

    /// Switches to relaxed commit order. `start` is the position at which reading the provider's
    /// WAL begins: all before it is committed here. Called by the leader before another process
    /// attaches.
    pub fn relax(&self, start: u64) {
        self.header().start.store(start, Ordering::Relaxed);
        self.header().relaxed.store(1, Ordering::Release);
    }

    /// Whether the commit order is relaxed.
    #[must_use]
    pub fn is_relaxed(&self) -> bool {
        self.header().relaxed.load(Ordering::Acquire) != 0
    }

    /// Whether this very transaction is committed.
    #[must_use]
    pub fn is_done(&self, sequence: u64) -> bool {
        // The order of the two matters: a descriptor is used again only after `committed` has
        // passed it.
        self.marked(sequence) || self.committed() >= sequence
    }

    fn marked(&self, sequence: u64) -> bool {
        self.descriptor(sequence).done.load(Ordering::SeqCst) >= sequence
    }

    /// Returns the low-water mark: the last transaction that is committed with all before it, 0 for
    /// none, and the end of its commit record at the provider. Only in relaxed order.
    #[must_use]
    pub fn mark(&self) -> (u64, u64) {
        loop {
            let mark = self.committed();
            if mark == 0 {
                return (0, self.header().start.load(Ordering::Relaxed));
            }
            let end = self.descriptor(mark).end_lsn.load(Ordering::Acquire);
            fence(Ordering::Acquire);
            // The descriptor still belongs to `mark` if `committed` has not moved.
            if self.committed() == mark {
                return (mark, end);
            }
        }
    }

    /// Returns the position before which bytes of the buffer are released.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.header().counters.tail()
    }

    /// Returns the state of an applier; `None` for a number that is out of range.
    #[must_use]
    pub fn slot(&self, applier: usize) -> Option<&ApplierSlot> {
        self.header()
            .slots
            .get(applier)
            .filter(|_| applier < self.geometry.appliers)
    }

    /// Returns the first failure's slot.
    #[must_use]
    pub fn failure(&self) -> &Failure {
        &self.header().failure
    }

    /// Asks all processes of the subscription to stop.
    pub fn request_stop(&self) {
        self.header().stop.store(1, Ordering::Release);
    }

    /// Whether all processes of the subscription are to stop.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        self.header().stop.load(Ordering::Acquire) != 0
    }

    /// Lets only the first `count` appliers claim transactions.
    pub fn set_active_appliers(&self, count: usize) {
        let count = count.clamp(1, self.geometry.appliers);
        self.header()
            .active_appliers
            .store(count as u64, Ordering::Release);
    }

    /// Returns how many appliers may claim transactions.
    #[must_use]
    pub fn active_appliers(&self) -> usize {
        usize::try_from(self.header().active_appliers.load(Ordering::Acquire)).unwrap_or(1)
    }

    /// Lets only `count` of the active appliers claim transactions, those with the highest numbers:
    /// the first one also retries parked transactions. The others stay and wait. If more may claim
    /// than before, the caller wakes those in [`Ring::idle_appliers`].
    pub fn set_taking(&self, count: usize) {
        self.header()
            .taking
            .store(count.max(1) as u64, Ordering::SeqCst);
    }

    /// Has transactions claimed one by one (`singly`), or in runs.
    pub fn set_singly(&self, singly: bool) {
        self.header()
            .singly
            .store(u64::from(singly), Ordering::Release);
    }

    /// Whether transactions are claimed one by one, however small they are.
    #[must_use]
    pub fn is_singly(&self) -> bool {
        self.header().singly.load(Ordering::Acquire) != 0
    }

    /// Returns the numbers of the appliers that may claim transactions.
    #[must_use]
    pub fn takers(&self) -> Range<usize> {
        let active = self.active_appliers();
        let count = self.header().taking.load(Ordering::SeqCst);
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(active);
        active - count..active
    }

    /// Registers the leader.
    pub fn register_leader(&self, pid: i32, latch: usize) {
        self.header().leader.latch.store(latch, Ordering::Release);
        self.header().leader_pid.store(pid, Ordering::Release);
    }

    /// Returns the leader's process id and the address of its latch.
    #[must_use]
    pub fn leader(&self) -> (i32, usize) {
        let header = self.header();
        (
            header.leader_pid.load(Ordering::Acquire),
            header.leader.latch.load(Ordering::Acquire),
        )
    }

    /// Says that the leader will wait until `sequence` is committed, or for room that an open
    /// transaction releases. The leader checks its condition again after this, before it sleeps:
    /// [`Ring::committed`], and for room [`Ring::tail`] too.
    pub fn leader_will_wait(&self, sequence: u64) {
        self.header().leader.will_wait(sequence);
    }

    /// Registers an applier.
    pub fn register_applier(&self, applier: usize, pid: i32, latch: usize) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.latch.store(latch, Ordering::Release);
            slot.state
                .store(ApplierState::Idle.as_u32(), Ordering::Relaxed);
            slot.pid.store(pid, Ordering::Release);
        }
    }

    /// Sets the state of an applier.
    pub fn set_state(&self, applier: usize, state: ApplierState) {
        if let Some(slot) = self.slot(applier) {
            slot.state.store(state.as_u32(), Ordering::Relaxed);
        }
    }

    /// Claims the next transaction in order, if there is one and this applier may.
    #[must_use]
    pub fn claim(&self, applier: usize) -> Option<Transaction> {
        self.claim_run(applier, Grain::ONE)
            .map(|run| self.transaction(run.first))
    }

    /// Claims the next transactions in order, if there are any and this applier may. If the first
    /// is small, following small ones are claimed with it, as long as the run has at most
    /// [`Grain::run`] changes. A transaction that is open, is to be skipped, may be split, or never
    /// joins others is claimed alone.
    #[must_use]
    pub fn claim_run(&self, applier: usize, grain: Grain) -> Option<Run> {
        if !self.takers().contains(&applier) {
            return None;
        }
        let slot = self.slot(applier)?;
        // Shown before it is claimed, so that [`Ring::ahead_of`] never misses it.
        let show = |sequence| slot.sequence.store(sequence, Ordering::SeqCst);
        let last = |first: u64, published: u64| {
            let mut last = first;
            let mut sum = 0_u32;
            for sequence in first..=published {
                // A transaction that is not claimed is not committed, so its descriptor does not
                // change. If another applier has claimed it meanwhile, the claim below fails and
                // this result is not used.
                let descriptor = self.descriptor(sequence);
                let weight = grain.weight_of(descriptor);
                sum = sum.saturating_add(weight);
                if weight == grain.run || sum > grain.run {
                    break;
                }
                last = sequence;
            }
            last
        };
        let (first, last) = self.header().counters.claim(&slot.wait, show, last)?;
        Some(Run { first, last })
    }

    /// Claims the transaction that was just published for the leader itself, if all before it are
    /// committed and no applier has claimed it. After true, no applier claims it unless
    /// [`Ring::give_back_last`] releases it. Only if commits follow the provider's order.
    #[must_use]
    pub fn take_last(&self, sequence: u64) -> bool {
        !self.is_relaxed()
            && self.committed() + 1 == sequence
            && self.header().counters.take_last(sequence)
    }

    /// Releases the transaction that [`Ring::take_last`] has claimed. Returns the latches of all
    /// appliers, which the caller sets: an applier that found the transaction claimed may not look
    /// again otherwise.
    #[must_use]
    pub fn give_back_last(&self, sequence: u64) -> Wakes {
        self.header().counters.give_back_last(sequence);
        self.all_appliers()
    }

    /// Returns a transaction that this applier has claimed.
    #[must_use]
    pub fn transaction(&self, sequence: u64) -> Transaction {
        Transaction::taken(*self, sequence, self.descriptor(sequence))
    }

    /// Says that an applier will wait. It checks again after this what it waits for
    /// ([`Ring::committed`], [`Ring::claim`], the next frame), before it sleeps.
    pub fn applier_will_wait(&self, applier: usize, awaited: Awaited) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.will_wait(awaited);
        }
    }

    /// Says that an applier will wait until this very transaction is committed. It checks
    /// [`Ring::is_done`] again after this, before it sleeps.
    pub fn applier_will_wait_for(&self, applier: usize, sequence: u64) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.will_wait_for(sequence);
        }
    }

    /// Ends the wait.
    pub fn applier_awake(&self, applier: usize) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.awake();
        }
    }

    /// Records that `sequence` is committed. Its local commit record ends at `local_end`. `next` is
    /// the next transaction of the run that the applier has claimed, 0 for none. Returns the
    /// latches to set.
    pub fn commit(&self, applier: usize, sequence: u64, local_end: u64, next: u64) -> Wakes {
        let run = Run {
            first: sequence,
            last: sequence,
        };
        self.commit_run(applier, run, local_end, next)
    }

    fn commit_in_order(&self, sequence: u64) -> Wakes {
        let header = self.header();
        let end = self.descriptor(sequence).end.load(Ordering::Acquire);
        header.counters.commit(
            sequence,
            end,
            &header.leader,
            self.waits(0..self.geometry.appliers),
        )
    }

    /// As [`Ring::commit`], for the transactions from `run.first` to `run.last`, which were
    /// committed as one.
    pub fn commit_run(&self, applier: usize, run: Run, local_end: u64, next: u64) -> Wakes {
        let relaxed = self.is_relaxed();
        // The last transaction that was enqueued on each of them. Mostly none.
        let mut waiters = Vec::new();
        for sequence in run.first..=run.last {
            let descriptor = self.descriptor(sequence);
            descriptor.local_end.store(local_end, Ordering::Relaxed);
            if relaxed {
                // Closed before the place may be used again.
                match aside::close(self, sequence) {
                    0 => {}
                    waiter => waiters.push(waiter),
                }
                descriptor.done.store(sequence, Ordering::SeqCst);
            }
        }
        if let Some(slot) = self.slot(applier) {
            slot.sequence.store(next, Ordering::SeqCst);
        }
        if !relaxed {
            return self.commit_in_order(run.last);
        }
        let header = self.header();
        let mut wakes = header.counters.complete(
            run.first,
            run.last,
            |sequence| self.marked(sequence),
            |sequence| self.descriptor(sequence).end.load(Ordering::Acquire),
            &header.leader,
            self.waits(0..self.geometry.appliers),
        );
        let ready: u64 = waiters
            .into_iter()
            .map(|waiter| header.aside.release(self, waiter))
            .sum();
        if ready > 0 {
            // Less one: this applier takes one itself. If it may not claim any more, it wakes
            // another ([`Ring::left_behind`]).
            self.offer_but(1, &mut wakes);
        }
        wakes
    }

    pub(crate) fn waits(
        &self,
        appliers: Range<usize>,
    ) -> impl Iterator<Item = &ApplierWait> + Clone {
        self.header()
            .slots
            .get(appliers)
            .unwrap_or_default()
            .iter()
            .map(|slot| &slot.wait)
    }

    /// Releases the bytes of an open transaction up to `position`. Returns the leader's latch if it
    /// waits for room.
    pub(crate) fn release(&self, position: u64) -> Wakes {
        let header = self.header();
        header.counters.release(position, &header.leader)
    }

    /// Returns latches of idle appliers to wake for published transactions: one for each run that
    /// is not claimed, and at least one if no applier is busy. Called after each publication, and
    /// after [`Ring::set_active_appliers`] and [`Ring::set_taking`].
    #[must_use]
    pub fn idle_appliers(&self, grain: Grain) -> Wakes {
        let takers = self.takers();
        let count = takers.len() as u64;
        self.header().counters.idle(
            self.waits(takers),
            &self.header().aside,
            |first, published, busy| {
                let run = u64::from(grain.run);
                let mut sum = 0_u64;
                for sequence in first..=published {
                    sum += u64::from(grain.weight_of(self.descriptor(sequence)));
                    if sum >= run * count {
                        break;
                    }
                }
                (sum / run).max(u64::from(!busy))
            },
        )
    }

    /// Returns the latch of an applier that claims transactions, if one is left to claim. Called by
    /// an applier that may not claim any more, when it has no transaction left.
    #[must_use]
    pub fn left_behind(&self) -> Wakes {
        let mut wakes = Wakes::default();
        if self.is_relaxed() {
            self.offer_but(0, &mut wakes);
        } else if self.header().counters.leaves_some()
            && let Some(last) = self.slot(self.takers().end - 1)
        {
            wakes.push(last.wait.latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// Returns the latches of all registered appliers.
    #[must_use]
    pub fn all_appliers(&self) -> Wakes {
        let mut wakes = Wakes::default();
        for slot in self.header().slots.iter().take(self.geometry.appliers) {
            wakes.push(slot.wait.latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// Returns the process ids of the appliers that have claimed a transaction before `sequence`.
    pub fn ahead_of(&self, sequence: u64) -> impl Iterator<Item = i32> {
        self.header()
            .slots
            .iter()
            .take(self.geometry.appliers)
            .filter_map(move |slot| {
                let held = slot.sequence.load(Ordering::SeqCst);
                (held != 0 && held < sequence).then(|| slot.pid.load(Ordering::Acquire))
            })
    }
}
