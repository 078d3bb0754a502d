//! Memory that stands in for a shared segment, and other helpers of the tests.

pub use braid_testing::Random;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use braid_ring::{Error, FrameRead, Geometry, Leader, Ring, Transaction};

/// An aligned piece of the heap.
pub struct Memory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: only handed to rings, which share it as processes would.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 64).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Self { base, layout }
    }

    pub fn len(&self) -> usize {
        self.layout.size()
    }

    pub fn create(&self, geometry: Geometry) -> Result<Ring, Error> {
        // SAFETY: aligned, of that length, and the tests keep it as long as the ring.
        unsafe { Ring::create(self.base, self.len(), geometry) }
    }

    pub fn attach(&self) -> Result<Ring, Error> {
        self.attach_at(0, self.len())
    }

    /// Attaches to a part of it.
    pub fn attach_at(&self, offset: usize, len: usize) -> Result<Ring, Error> {
        assert!(offset + len <= self.len());
        // SAFETY: within the memory.
        unsafe { Ring::attach(self.base.add(offset), len) }
    }

    /// Overwrites some of it. Only while nothing else uses it.
    pub fn scribble(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len());
        // SAFETY: within the memory.
        unsafe {
            self.base
                .add(at)
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len())
        };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// The smallest ring: 64 KiB of buffer.
pub fn small() -> Geometry {
    Geometry::new(2, 0, 16)
}

/// A fresh ring.
pub fn ring(geometry: Geometry) -> (Memory, Leader) {
    let memory = Memory::new(geometry.bytes());
    let ring = memory.create(geometry).unwrap();
    for applier in 0..geometry.appliers {
        ring.register_applier(applier, i32::try_from(applier).unwrap() + 1, applier + 2);
    }
    ring.register_leader(1000, 1);
    (memory, Leader::new(ring))
}

/// Offset of the buffer: it is the end of the segment.
pub fn buffer_at(geometry: Geometry) -> usize {
    geometry.bytes() - usize::try_from(geometry.buffer).unwrap()
}

/// Stores a frame, in parts if it is large. Returns false if the ring is full.
pub fn store(leader: &mut Leader, frame: &[u8]) -> bool {
    let piece = leader.piece();
    let mut first = true;
    let mut rest = frame;
    loop {
        let (now, later) = rest.split_at(rest.len().min(piece));
        if !leader.store(now, first, later.is_empty()) {
            return false;
        }
        if later.is_empty() {
            return true;
        }
        first = false;
        rest = later;
    }
}

/// Returns all frames of a complete transaction.
pub fn frames(transaction: &mut Transaction) -> Result<Vec<Vec<u8>>, Error> {
    let mut assembled = Vec::new();
    let mut frames = Vec::new();
    loop {
        match transaction.next_frame(&mut assembled, |_| {})? {
            FrameRead::Frame(frame) => frames.push(frame.to_vec()),
            FrameRead::Assembled => frames.push(assembled.clone()),
            FrameRead::Pending => panic!("a complete transaction has no more to come"),
            FrameRead::End => return Ok(frames),
        }
    }
}
