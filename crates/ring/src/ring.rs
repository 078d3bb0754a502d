//! The segment as all of its processes see it.

use std::ops::Range;
use std::ptr::NonNull;

use crate::aside;
use crate::consumer::Transaction;
use crate::failure::Failure;
use crate::layout::{ApplierSlot, ApplierState, Descriptor, Geometry, Header, MAGIC, Place};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::wake::{ApplierWait, Awaited, Wakes};

/// What is wrong with a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Too small, or not made by this build.
    #[error("shared memory segment is not an apply ring of this version")]
    NotARing,
    /// A frame header that makes no sense.
    #[error("apply ring is corrupt at position {0}")]
    Corrupt(u64),
}

/// Transactions that an applier has taken, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of the first.
    pub first: u64,
    /// Number of the last.
    pub last: u64,
}

/// Which transactions are taken together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grain {
    /// Changes of a run, at least 1.
    pub run: u32,
    /// Changes up to which a transaction is small.
    pub small: u32,
}

impl Grain {
    /// Every transaction is taken alone.
    pub const ONE: Self = Self { run: 1, small: 0 };

    /// Returns how much a transaction of so many changes adds to a run; the whole of it if the
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

    /// As [`Grain::weight`], of a transaction in the ring, which adds the whole of a run if it
    /// stands alone.
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
    /// Lay out a segment.
    ///
    /// # Errors
    /// [`Error::NotARing`] when `len` is too small.
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

    /// View a segment that [`Ring::create`] laid out.
    ///
    /// # Errors
    /// [`Error::NotARing`].
    ///
    /// # Safety
    /// As for [`Ring::create`], but for the last condition.
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

    /// Address of buffer position `position`, and how many bytes lie behind it in one piece.
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

    /// The shape of the segment.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Transactions that appliers may take.
    #[must_use]
    pub fn published(&self) -> u64 {
        self.header().counters.published.0.load(Ordering::Acquire)
    }

    /// Transactions that were taken.
    #[must_use]
    pub fn claimed(&self) -> u64 {
        self.header().counters.claimed.0.load(Ordering::Acquire)
    }

    /// Transactions that are committed, with all before them.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.header().counters.committed()
    }

    /// Let commits overtake each other. `start` is where the provider's WAL is read from: all
    /// before is committed here. To be said by the leader before anybody else is there.
    pub fn relax(&self, start: u64) {
        self.header().start.store(start, Ordering::Relaxed);
        self.header().relaxed.store(1, Ordering::Release);
    }

    /// Whether commits may overtake each other.
    #[must_use]
    pub fn is_relaxed(&self) -> bool {
        self.header().relaxed.load(Ordering::Acquire) != 0
    }

    /// Whether this very transaction is committed.
    #[must_use]
    pub fn is_done(&self, sequence: u64) -> bool {
        // In this order: a descriptor is used again only after `committed` has passed it.
        self.marked(sequence) || self.committed() >= sequence
    }

    fn marked(&self, sequence: u64) -> bool {
        self.descriptor(sequence).done.load(Ordering::SeqCst) >= sequence
    }

    /// The low-water mark: the last transaction that is committed with all before it, 0 for none,
    /// and where it ends at the provider. Only when commits may overtake each other.
    #[must_use]
    pub fn mark(&self) -> (u64, u64) {
        loop {
            let mark = self.committed();
            if mark == 0 {
                return (0, self.header().start.load(Ordering::Relaxed));
            }
            let end = self.descriptor(mark).end_lsn.load(Ordering::Acquire);
            fence(Ordering::Acquire);
            // The descriptor is its own for as long as `committed` has not moved on.
            if self.committed() == mark {
                return (mark, end);
            }
        }
    }

    /// Bytes of the buffer that are released.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.header().counters.tail()
    }

    /// What an applier shows of itself; `None` for a number that is out of range.
    #[must_use]
    pub fn slot(&self, applier: usize) -> Option<&ApplierSlot> {
        self.header()
            .slots
            .get(applier)
            .filter(|_| applier < self.geometry.appliers)
    }

    /// The place for failures.
    #[must_use]
    pub fn failure(&self) -> &Failure {
        &self.header().failure
    }

    /// Ask everybody to stop.
    pub fn request_stop(&self) {
        self.header().stop.store(1, Ordering::Release);
    }

    /// Whether everybody is to stop.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        self.header().stop.load(Ordering::Acquire) != 0
    }

    /// Let only the first `count` appliers take transactions.
    pub fn set_active_appliers(&self, count: usize) {
        let count = count.clamp(1, self.geometry.appliers);
        self.header()
            .active_appliers
            .store(count as u64, Ordering::Release);
    }

    /// How many appliers may take transactions.
    #[must_use]
    pub fn active_appliers(&self) -> usize {
        usize::try_from(self.header().active_appliers.load(Ordering::Acquire)).unwrap_or(1)
    }

    /// Of the active appliers, let no more than `count` take transactions, those with the highest
    /// numbers: the first one may have other things to do. The others stay and wait. After more
    /// were let, those in [`Ring::idle_appliers`] are to be woken.
    pub fn set_taking(&self, count: usize) {
        self.header()
            .taking
            .store(count.max(1) as u64, Ordering::SeqCst);
    }

    /// Have transactions taken one by one, or in runs.
    pub fn set_singly(&self, singly: bool) {
        self.header()
            .singly
            .store(u64::from(singly), Ordering::Release);
    }

    /// Whether transactions are to be taken one by one, however small they are.
    #[must_use]
    pub fn is_singly(&self) -> bool {
        self.header().singly.load(Ordering::Acquire) != 0
    }

    /// The appliers that take transactions, by number.
    #[must_use]
    pub fn takers(&self) -> Range<usize> {
        let active = self.active_appliers();
        let count = self.header().taking.load(Ordering::SeqCst);
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(active);
        active - count..active
    }

    /// Say where the leader is.
    pub fn register_leader(&self, pid: i32, latch: usize) {
        self.header().leader.latch.store(latch, Ordering::Release);
        self.header().leader_pid.store(pid, Ordering::Release);
    }

    /// The leader's process id and the address of its latch.
    #[must_use]
    pub fn leader(&self) -> (i32, usize) {
        let header = self.header();
        (
            header.leader_pid.load(Ordering::Acquire),
            header.leader.latch.load(Ordering::Acquire),
        )
    }

    /// The leader is about to wait until `sequence` is committed, or for room that an open
    /// transaction releases. It looks again at what it waits for after this, before it sleeps: at
    /// [`Ring::committed`], and for room at [`Ring::tail`] too.
    pub fn leader_will_wait(&self, sequence: u64) {
        self.header().leader.will_wait(sequence);
    }

    /// Say where an applier is.
    pub fn register_applier(&self, applier: usize, pid: i32, latch: usize) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.latch.store(latch, Ordering::Release);
            slot.state
                .store(ApplierState::Idle.as_u32(), Ordering::Relaxed);
            slot.pid.store(pid, Ordering::Release);
        }
    }

    /// Say what an applier is doing.
    pub fn set_state(&self, applier: usize, state: ApplierState) {
        if let Some(slot) = self.slot(applier) {
            slot.state.store(state.as_u32(), Ordering::Relaxed);
        }
    }

    /// Take the next transaction in order, if there is one and this applier may.
    #[must_use]
    pub fn claim(&self, applier: usize) -> Option<Transaction> {
        self.claim_run(applier, Grain::ONE)
            .map(|run| self.transaction(run.first))
    }

    /// Take the next transactions in order, if there are any and this applier may: one, and if it
    /// is small those behind it for as long as they are small and have no more changes together
    /// than a run. One that is open, is to be skipped, may be split, or never joins others is taken
    /// alone.
    #[must_use]
    pub fn claim_run(&self, applier: usize, grain: Grain) -> Option<Run> {
        if !self.takers().contains(&applier) {
            return None;
        }
        let slot = self.slot(applier)?;
        // Shown before it is taken: whoever asks who is ahead never misses it.
        let show = |sequence| slot.sequence.store(sequence, Ordering::SeqCst);
        let last = |first: u64, published: u64| {
            let mut last = first;
            let mut sum = 0_u32;
            for sequence in first..=published {
                // What nobody has taken is not committed, so its descriptor stays as it is. It may
                // have been taken meanwhile: then what was read does not count.
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

    /// Take the transaction that was just published, for the leader itself: all before it are
    /// committed, and nobody has taken it. True: nobody else will, unless it is given back
    /// ([`Ring::give_back_last`]). Only where commits are in order.
    #[must_use]
    pub fn take_last(&self, sequence: u64) -> bool {
        !self.is_relaxed()
            && self.committed() + 1 == sequence
            && self.header().counters.take_last(sequence)
    }

    /// Give back what [`Ring::take_last`] took. Returns the latches of all appliers, to be set: one
    /// that was about to take it when it was gone may not look again by itself.
    #[must_use]
    pub fn give_back_last(&self, sequence: u64) -> Wakes {
        self.header().counters.give_back_last(sequence);
        self.all_appliers()
    }

    /// A transaction that this applier has taken.
    #[must_use]
    pub fn transaction(&self, sequence: u64) -> Transaction {
        Transaction::taken(*self, sequence, self.descriptor(sequence))
    }

    /// An applier is about to wait. It looks again after this for what it waits for
    /// ([`Ring::committed`], [`Ring::claim`], the next frame), before it sleeps.
    pub fn applier_will_wait(&self, applier: usize, awaited: Awaited) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.will_wait(awaited);
        }
    }

    /// An applier is about to wait until this very transaction is committed. It asks
    /// [`Ring::is_done`] again after this, before it sleeps.
    pub fn applier_will_wait_for(&self, applier: usize, sequence: u64) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.will_wait_for(sequence);
        }
    }

    /// The wait is over.
    pub fn applier_awake(&self, applier: usize) {
        if let Some(slot) = self.slot(applier) {
            slot.wait.awake();
        }
    }

    /// `sequence` is committed here, its commit record ending at `local_end`; `next` is the next of
    /// the run that the applier has taken, 0 for none. Returns the latches to set.
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

    /// The transactions from `run.first` to `run.last` are committed here as one; else as
    /// [`Ring::commit`].
    pub fn commit_run(&self, applier: usize, run: Run, local_end: u64, next: u64) -> Wakes {
        let relaxed = self.is_relaxed();
        // Of each of them, who was hung on it last. Mostly nobody.
        let mut waiters = Vec::new();
        for sequence in run.first..=run.last {
            let descriptor = self.descriptor(sequence);
            descriptor.local_end.store(local_end, Ordering::Relaxed);
            if relaxed {
                // Before its place may be used again.
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
            // It comes for one itself, or finds that it takes no more and hands on what is left.
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

    /// Release the bytes of an open transaction up to `position`. Returns the leader's latch if it
    /// waits for room.
    pub(crate) fn release(&self, position: u64) -> Wakes {
        let header = self.header();
        header.counters.release(position, &header.leader)
    }

    /// Latches of idle appliers that are to take what was published: one for each run that nobody
    /// has taken, and at least one when no applier is busy. To be asked for after each publication,
    /// and after [`Ring::set_active_appliers`] and [`Ring::set_taking`].
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

    /// Latch of an applier that takes transactions, if something is left to take. For one that
    /// takes no more, when it has nothing in hand.
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

    /// Latches of all appliers that are there.
    #[must_use]
    pub fn all_appliers(&self) -> Wakes {
        let mut wakes = Wakes::default();
        for slot in self.header().slots.iter().take(self.geometry.appliers) {
            wakes.push(slot.wait.latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// The appliers that hold a transaction before `sequence`: process ids.
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
