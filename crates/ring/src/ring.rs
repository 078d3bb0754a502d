//! The operations on the segment.

use std::ptr::NonNull;

use crate::layout::{
    ALIGN, ApplierSlot, ApplierState, Descriptor, Failure, Geometry, Header, MAGIC, MAX_APPLIERS,
    OPEN, SKIP,
};
use crate::sync::{Ordering, fence};

/// Bytes before a frame: u32 length, u32 kind.
const FRAME_HEADER: u64 = 8;
const WHOLE: u32 = 1;
/// The rest of the buffer is unused; go on at its start.
const WRAP: u32 = 2;
/// Part of a frame that is too large to lie in one piece; more follows.
const PART: u32 = 3;
/// Last part.
const LAST_PART: u32 = 4;

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
    /// `base` is aligned to 64 bytes, valid for `len` bytes for as long as the ring and its copies are used, and used by
    /// nothing else yet.
    pub unsafe fn create(base: NonNull<u8>, len: usize, geometry: Geometry) -> Result<Self, Error> {
        if len < geometry.bytes() || !base.as_ptr().addr().is_multiple_of(64) {
            return Err(Error::NotARing);
        }
        // SAFETY: all-zero bytes are a valid Header and valid Descriptors (atomics and plain bytes); the range was checked.
        unsafe { base.as_ptr().write_bytes(0, geometry.buffer_at()) };
        let ring = Self { base, geometry };
        let header = ring.header();
        header.appliers.store(geometry.appliers as u64, Ordering::Relaxed);
        header.buffer.store(geometry.buffer, Ordering::Relaxed);
        header.descriptors.store(geometry.descriptors, Ordering::Relaxed);
        header.active_appliers.store(geometry.appliers as u64, Ordering::Relaxed);
        for slot in &header.slots {
            slot.wakes_at.store(u64::MAX, Ordering::Relaxed);
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
        // SAFETY: large enough and aligned; the header is made of atomics, which any bytes are valid for.
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

    fn header(&self) -> &Header {
        // SAFETY: create or attach checked size and alignment; the header is shared through atomics only.
        unsafe { &*self.base.as_ptr().cast::<Header>() }
    }

    fn descriptor(&self, sequence: u64) -> &Descriptor {
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

    /// Address of buffer position `position`, and how many bytes lie behind it in one piece.
    fn at(&self, position: u64) -> (*mut u8, u64) {
        let offset = position % self.geometry.buffer;
        let at = self.geometry.buffer_at() + usize::try_from(offset).unwrap_or(0);
        // SAFETY: offset < buffer, and geometry.bytes() covers the buffer.
        (unsafe { self.base.as_ptr().add(at) }, self.geometry.buffer - offset)
    }

    fn read_frame_header(&self, position: u64) -> (u32, u32) {
        let (at, _) = self.at(position);
        // SAFETY: positions are multiples of 8 and so is the buffer's size: 8 bytes lie in one piece. The leader wrote
        // them before it moved the `end` or `published` that this process has read with acquire.
        let raw = unsafe { at.cast::<[u8; 8]>().read() };
        let [a, b, c, d, e, f, g, h] = raw;
        (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
    }

    fn write_frame_header(&self, position: u64, len: u32, kind: u32) {
        let [a, b, c, d] = len.to_le_bytes();
        let [e, f, g, h] = kind.to_le_bytes();
        let (at, _) = self.at(position);
        // SAFETY: as in read_frame_header; only the leader writes, between `tail` and `tail + buffer`, where nobody reads.
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
        self.header().published.0.load(Ordering::Acquire)
    }

    /// Transactions that were taken.
    #[must_use]
    pub fn claimed(&self) -> u64 {
        self.header().claimed.0.load(Ordering::Acquire)
    }

    /// Transactions that are committed.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.header().committed.0.load(Ordering::Acquire)
    }

    /// Bytes of the buffer that are released.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.header().tail.0.load(Ordering::Acquire)
    }

    /// What an applier shows of itself; `None` for a number that is out of range.
    #[must_use]
    pub fn slot(&self, applier: usize) -> Option<&ApplierSlot> {
        self.header().slots.get(applier).filter(|_| applier < self.geometry.appliers)
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
        self.header().active_appliers.store(count as u64, Ordering::Release);
    }

    /// How many appliers may take transactions.
    #[must_use]
    pub fn active_appliers(&self) -> usize {
        usize::try_from(self.header().active_appliers.load(Ordering::Acquire)).unwrap_or(1)
    }

    /// Say where the leader is.
    pub fn register_leader(&self, pid: i32, latch: usize) {
        self.header().leader_latch.store(latch, Ordering::Release);
        self.header().leader_pid.store(pid, Ordering::Release);
    }

    /// The leader's process id and the address of its latch.
    #[must_use]
    pub fn leader(&self) -> (i32, usize) {
        let header = self.header();
        (header.leader_pid.load(Ordering::Acquire), header.leader_latch.load(Ordering::Acquire))
    }

    /// The leader is about to wait for commits. It looks at [`Ring::committed`] again after this, before it sleeps.
    pub fn leader_will_wait(&self) {
        self.header().leader_waits.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Say where an applier is.
    pub fn register_applier(&self, applier: usize, pid: i32, latch: usize) {
        if let Some(slot) = self.slot(applier) {
            slot.latch.store(latch, Ordering::Release);
            slot.state.store(ApplierState::Idle.as_u32(), Ordering::Relaxed);
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
        if applier >= self.active_appliers() {
            return None;
        }
        let header = self.header();
        let slot = self.slot(applier)?;
        let mut claimed = header.claimed.0.load(Ordering::Acquire);
        loop {
            if claimed >= header.published.0.load(Ordering::Acquire) {
                return None;
            }
            // Shown before it is taken: whoever asks who is ahead never misses it.
            slot.sequence.store(claimed + 1, Ordering::SeqCst);
            match header.claimed.0.compare_exchange_weak(
                claimed,
                claimed + 1,
                Ordering::SeqCst,
                Ordering::Acquire,
            ) {
                Ok(_) => break,
                Err(now) => {
                    slot.sequence.store(0, Ordering::SeqCst);
                    claimed = now;
                }
            }
        }
        let sequence = claimed + 1;
        let descriptor = self.descriptor(sequence);
        Some(Transaction {
            ring: *self,
            sequence,
            depends_on: descriptor.depends_on.load(Ordering::Acquire),
            position: descriptor.begin.load(Ordering::Acquire),
            open: descriptor.flags.load(Ordering::Acquire) & OPEN != 0,
            assembling: false,
        })
    }

    /// An applier is about to wait until `sequence` is committed (or for anything, with `u64::MAX - 1`). It looks at
    /// [`Ring::committed`], or tries [`Ring::claim`], again after this, before it sleeps.
    pub fn applier_will_wait(&self, applier: usize, sequence: u64) {
        if let Some(slot) = self.slot(applier) {
            slot.wakes_at.store(sequence, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    /// The wait is over.
    pub fn applier_awake(&self, applier: usize) {
        if let Some(slot) = self.slot(applier) {
            slot.wakes_at.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// `sequence` is committed here, its commit record ending at `local_end`. Returns the latches to set.
    pub fn commit(&self, applier: usize, sequence: u64, local_end: u64) -> Wakes {
        let header = self.header();
        let descriptor = self.descriptor(sequence);
        descriptor.local_end.store(local_end, Ordering::Relaxed);
        let end = descriptor.end.load(Ordering::Acquire);
        if let Some(slot) = self.slot(applier) {
            slot.sequence.store(0, Ordering::SeqCst);
        }
        header.tail.0.store(end, Ordering::Release);
        header.committed.0.store(sequence, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut wakes = Wakes::default();
        for slot in header.slots.iter().take(self.geometry.appliers) {
            if slot.wakes_at.load(Ordering::SeqCst) <= sequence {
                wakes.push(slot.latch.load(Ordering::Acquire));
            }
        }
        if header.leader_waits.load(Ordering::SeqCst) != 0
            && header.leader_waits.swap(0, Ordering::SeqCst) != 0
        {
            wakes.push(header.leader_latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// Release the bytes of an open transaction up to `position`. Returns the leader's latch if it waits for room.
    fn release(&self, position: u64) -> Wakes {
        let header = self.header();
        header.tail.0.store(position, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut wakes = Wakes::default();
        if header.leader_waits.load(Ordering::SeqCst) != 0
            && header.leader_waits.swap(0, Ordering::SeqCst) != 0
        {
            wakes.push(header.leader_latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// Latches of idle appliers, at most `count` of them.
    #[must_use]
    pub fn idle_appliers(&self, count: usize) -> Wakes {
        let mut wakes = Wakes::default();
        fence(Ordering::SeqCst);
        for slot in self.header().slots.iter().take(self.active_appliers()) {
            if wakes.len() >= count {
                break;
            }
            if slot.wakes_at.load(Ordering::SeqCst) == u64::MAX - 1 {
                wakes.push(slot.latch.load(Ordering::Acquire));
            }
        }
        wakes
    }

    /// Latches of all appliers that are there.
    #[must_use]
    pub fn all_appliers(&self) -> Wakes {
        let mut wakes = Wakes::default();
        for slot in self.header().slots.iter().take(self.geometry.appliers) {
            wakes.push(slot.latch.load(Ordering::Acquire));
        }
        wakes
    }

    /// The appliers that hold a transaction before `sequence`: process ids.
    pub fn ahead_of(&self, sequence: u64) -> impl Iterator<Item = i32> {
        self.header().slots.iter().take(self.geometry.appliers).filter_map(move |slot| {
            let held = slot.sequence.load(Ordering::SeqCst);
            (held != 0 && held < sequence).then(|| slot.pid.load(Ordering::Acquire))
        })
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
        Self { latches: [0; MAX_APPLIERS + 1], count: 0 }
    }
}

impl Wakes {
    fn push(&mut self, latch: usize) {
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

/// What reading on in a transaction gives.
#[derive(Debug, PartialEq, Eq)]
pub enum FrameRead<'a> {
    /// A frame, in place.
    Frame(&'a [u8]),
    /// A frame that was too large to lie in one piece, put together in the caller's buffer.
    Assembled,
    /// The leader has not written more of this open transaction yet.
    Pending,
    /// The transaction is complete and read to its end.
    End,
}

/// A transaction that an applier has taken.
#[derive(Debug, Clone)]
pub struct Transaction {
    ring: Ring,
    /// Its number.
    pub sequence: u64,
    /// The transaction that must be committed before this one is applied; 0 for none.
    pub depends_on: u64,
    position: u64,
    open: bool,
    /// A frame in parts is being put together.
    assembling: bool,
}

impl Transaction {
    /// Whether it was taken while the leader was still receiving it. Such a one can't be read twice.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Whether it is to be passed without being applied.
    #[must_use]
    pub fn is_skipped(&self) -> bool {
        self.ring.descriptor(self.sequence).flags.load(Ordering::Acquire) & SKIP != 0
    }

    /// End of its commit record at the provider; 0 while it is not known.
    #[must_use]
    pub fn end_lsn(&self) -> u64 {
        self.ring.descriptor(self.sequence).end_lsn.load(Ordering::Acquire)
    }

    /// Start of its commit record at the provider; 0 while it is not known.
    #[must_use]
    pub fn commit_lsn(&self) -> u64 {
        self.ring.descriptor(self.sequence).commit_lsn.load(Ordering::Acquire)
    }

    /// Start reading again. Not for one that was open when it was taken.
    pub fn rewind(&mut self) {
        self.position = self.ring.descriptor(self.sequence).begin.load(Ordering::Acquire);
        self.assembling = false;
    }

    /// The next frame. Of an open transaction, what was read before is released first; `wake` sets the leader's latch.
    /// After [`FrameRead::Pending`] the same buffer is to be given again: it may hold the first parts of a frame.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn next_frame<'a>(
        &mut self,
        assembled: &'a mut Vec<u8>,
        mut wake: impl FnMut(&Wakes),
    ) -> Result<FrameRead<'a>, Error> {
        let descriptor = self.ring.descriptor(self.sequence);
        // The flags first: when they say complete, `end` is final.
        let complete = descriptor.flags.load(Ordering::Acquire) & OPEN == 0;
        let end = descriptor.end.load(Ordering::Acquire);
        if self.open {
            wake(&self.ring.release(self.position));
        }
        loop {
            if self.position >= end {
                return match (self.assembling, complete) {
                    (true, true) => Err(Error::Corrupt(self.position)),
                    (false, true) => Ok(FrameRead::End),
                    (_, false) => Ok(FrameRead::Pending),
                };
            }
            let (len, kind) = self.ring.read_frame_header(self.position);
            let (_, room) = self.ring.at(self.position);
            let total = (FRAME_HEADER + u64::from(len)).next_multiple_of(ALIGN);
            if kind == WRAP {
                self.position += room;
                continue;
            }
            if total > room || self.position + total > end {
                return Err(Error::Corrupt(self.position));
            }
            let (at, _) = self.ring.at(self.position + FRAME_HEADER);
            let len = usize::try_from(len).unwrap_or(0);
            // SAFETY: the leader wrote `len` bytes here before it moved `end`, which was read with acquire, and does not
            // write here again before `tail` passes them: at this transaction's commit, or at the next call.
            let bytes: &'a [u8] = unsafe { std::slice::from_raw_parts(at, len) };
            self.position += total;
            match kind {
                WHOLE if !self.assembling => return Ok(FrameRead::Frame(bytes)),
                PART | LAST_PART => {
                    if !self.assembling {
                        assembled.clear();
                        self.assembling = true;
                    }
                    assembled.extend_from_slice(bytes);
                    if self.open {
                        wake(&self.ring.release(self.position));
                    }
                    if kind == LAST_PART {
                        self.assembling = false;
                        return Ok(FrameRead::Assembled);
                    }
                }
                _ => return Err(Error::Corrupt(self.position - total)),
            }
        }
    }
}

/// The producer's side. There is one in a segment's life.
#[derive(Debug)]
pub struct Leader {
    ring: Ring,
    /// Where the next frame goes.
    head: u64,
    /// Where the transaction in hand starts.
    begin: u64,
    /// Number of the transaction in hand.
    sequence: u64,
    /// Whether the transaction in hand is published already.
    open: bool,
}

impl Leader {
    /// Become the producer of a fresh ring.
    #[must_use]
    pub fn new(ring: Ring) -> Self {
        Self { ring, head: 0, begin: 0, sequence: 1, open: false }
    }

    /// The ring.
    #[must_use]
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// Number of the transaction in hand, or of the next one.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Bytes of the transaction in hand.
    #[must_use]
    pub fn pending_bytes(&self) -> u64 {
        self.head - self.begin
    }

    /// Whether a descriptor is free for the transaction in hand.
    #[must_use]
    pub fn has_descriptor(&self) -> bool {
        self.sequence - self.ring.committed() < self.ring.geometry.descriptors
    }

    /// Whether the transaction in hand has grown so large that it must be published open.
    #[must_use]
    pub fn should_open(&self) -> bool {
        !self.open && self.pending_bytes() > self.ring.geometry.buffer / 4
    }

    /// Whether the transaction in hand is published open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Largest piece of a frame that is stored at once. Larger frames go in several.
    #[must_use]
    pub fn piece(&self) -> usize {
        usize::try_from(self.ring.geometry.buffer / 8).unwrap_or(usize::MAX)
    }

    /// Store one piece of a frame: `last` says that the frame ends with it, `first` that it starts with it. Returns
    /// false, and has done nothing, when there is no room now. The applier of an open transaction sees it after
    /// [`Leader::extend`].
    #[must_use]
    pub fn store(&mut self, piece: &[u8], first: bool, last: bool) -> bool {
        let Ok(len) = u32::try_from(piece.len()) else {
            return false;
        };
        let total = (FRAME_HEADER + u64::from(len)).next_multiple_of(ALIGN);
        let (_, room) = self.ring.at(self.head);
        let wrap = if total > room { room } else { 0 };
        if self.head + wrap + total - self.ring.tail() > self.ring.geometry.buffer {
            return false;
        }
        if wrap > 0 {
            self.ring.write_frame_header(self.head, 0, WRAP);
            self.head += wrap;
        }
        let kind = match (first, last) {
            (true, true) => WHOLE,
            (_, true) => LAST_PART,
            (_, false) => PART,
        };
        self.ring.write_frame_header(self.head, len, kind);
        let (at, _) = self.ring.at(self.head + FRAME_HEADER);
        // SAFETY: `total` bytes from `head` lie in one piece and between `tail` and `tail + buffer`, where nobody reads.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), at, piece.len()) };
        self.head += total;
        true
    }

    fn fill(&self, depends_on: u64, flags: u32) -> &Descriptor {
        let descriptor = self.ring.descriptor(self.sequence);
        descriptor.begin.store(self.begin, Ordering::Relaxed);
        descriptor.depends_on.store(depends_on, Ordering::Relaxed);
        descriptor.flags.store(flags, Ordering::Relaxed);
        descriptor.end.store(self.head, Ordering::Relaxed);
        descriptor.end_lsn.store(0, Ordering::Relaxed);
        descriptor.commit_lsn.store(0, Ordering::Relaxed);
        descriptor.local_end.store(0, Ordering::Relaxed);
        descriptor
    }

    /// Publish the transaction in hand while it is still being received. It depends on all before it.
    pub fn publish_open(&mut self) {
        self.fill(self.sequence - 1, OPEN);
        self.open = true;
        self.ring.header().published.0.store(self.sequence, Ordering::SeqCst);
    }

    /// Show the applier of the open transaction what was stored since.
    pub fn extend(&mut self) {
        if self.open {
            self.ring.descriptor(self.sequence).end.store(self.head, Ordering::Release);
        }
    }

    /// Say of the open transaction where it commits, so that a failure can name it before it is complete.
    pub fn announce(&mut self, commit_lsn: u64) {
        self.ring.descriptor(self.sequence).commit_lsn.store(commit_lsn, Ordering::Release);
    }

    /// The transaction in hand is complete: publish it, or close it when it is open. Returns its number.
    pub fn publish(&mut self, complete: &Complete) -> u64 {
        let descriptor = if self.open {
            let descriptor = self.ring.descriptor(self.sequence);
            descriptor.end.store(self.head, Ordering::Relaxed);
            descriptor
        } else {
            self.fill(complete.depends_on, if complete.skip { SKIP | OPEN } else { OPEN })
        };
        descriptor.commit_lsn.store(complete.commit_lsn, Ordering::Relaxed);
        descriptor.end_lsn.store(complete.end_lsn, Ordering::Relaxed);
        descriptor.changes.store(complete.changes, Ordering::Relaxed);
        descriptor
            .commit_timestamp
            .store(complete.commit_timestamp.cast_unsigned(), Ordering::Relaxed);
        descriptor.flags.store(if complete.skip { SKIP } else { 0 }, Ordering::Release);
        let sequence = self.sequence;
        if !self.open {
            self.ring.header().published.0.store(sequence, Ordering::SeqCst);
        }
        self.open = false;
        self.begin = self.head;
        self.sequence += 1;
        sequence
    }

    /// Forget what was stored of the transaction in hand. Only when it is not open.
    pub fn discard(&mut self) {
        if !self.open {
            self.head = self.begin;
        }
    }

    /// Ends of a committed transaction: (at the provider, here), and its commit timestamp (Unix microseconds).
    #[must_use]
    pub fn committed_at(&self, sequence: u64) -> (u64, u64, i64) {
        let descriptor = self.ring.descriptor(sequence);
        (
            descriptor.end_lsn.load(Ordering::Acquire),
            descriptor.local_end.load(Ordering::Acquire),
            descriptor.commit_timestamp.load(Ordering::Acquire).cast_signed(),
        )
    }
}

/// What is known of a transaction once it is received whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Complete {
    /// The transaction that must be committed before this one is applied; 0 for none.
    pub depends_on: u64,
    /// Start of the commit record at the provider.
    pub commit_lsn: u64,
    /// End of the commit record at the provider.
    pub end_lsn: u64,
    /// Commit timestamp at the origin, Unix microseconds.
    pub commit_timestamp: i64,
    /// Number of changes.
    pub changes: u32,
    /// To be passed without being applied.
    pub skip: bool,
}
