//! The consumers' side: an applier reads the transaction that it has taken.

use crate::aside::EDGES;
use crate::frame::{FRAME_HEADER, LAST_PART, PART, WHOLE, WRAP, footprint};
use crate::layout::{CAREFUL, Descriptor, ELSEWHERE, OPEN, SKIP, SPLIT, TRIED, WIDE};
use crate::ring::{Error, Ring};
use crate::sync::Ordering;
use crate::wake::Wakes;

/// Result of reading on in a transaction.
#[derive(Debug, PartialEq, Eq)]
pub enum FrameRead<'a> {
    /// A frame, in place.
    Frame(&'a [u8]),
    /// A frame that was too large to lie in one piece. The caller's buffer has all of it.
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
    /// Sequence number.
    pub sequence: u64,
    /// The latest transaction that this one depends on; 0 for none.
    pub depends_on: u64,
    position: u64,
    open: bool,
    split: bool,
    /// True while a frame is put together from its parts.
    assembling: bool,
}

impl Transaction {
    pub(crate) fn taken(ring: Ring, sequence: u64, descriptor: &Descriptor) -> Self {
        let flags = descriptor.flags.load(Ordering::Acquire);
        Self {
            ring,
            sequence,
            depends_on: descriptor.depends_on.load(Ordering::Acquire),
            position: descriptor.begin.load(Ordering::Acquire),
            open: flags & OPEN != 0,
            split: flags & SPLIT != 0,
            assembling: false,
        }
    }

    /// Returns what must be committed before this transaction joins a batch that begins with
    /// transaction `first`: all up to the number, and each of the list, up to its first 0.
    /// Dependencies within the batch are left out. With its own sequence number as `first`: all of
    /// its dependencies.
    #[must_use]
    pub fn needs(&self, first: u64) -> (u64, [u64; EDGES]) {
        let descriptor = self.ring.descriptor(self.sequence);
        let through = descriptor.through.load(Ordering::Acquire);
        let mut needed = [0; EDGES];
        let mut free = needed.iter_mut();
        for edge in &descriptor.edges {
            match edge.load(Ordering::Acquire) {
                0 => break,
                edge if edge >= first => {}
                edge => {
                    if let Some(place) = free.next() {
                        *place = edge;
                    }
                }
            }
        }
        (through.min(first.saturating_sub(1)), needed)
    }

    /// Whether it was claimed while the leader was still receiving it. Its bytes are released as
    /// they are read, so it can't be read twice.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Whether it may be committed in several chunks.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.split
    }

    /// Whether its keys do not tell what it depends on. Not known yet while it is open.
    #[must_use]
    pub fn is_wide(&self) -> bool {
        self.has(WIDE)
    }

    /// Whether another process has applied its changes, and waits for its turn to commit.
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        self.has(ELSEWHERE)
    }

    /// Whether it is passed over, not applied.
    #[must_use]
    pub fn is_skipped(&self) -> bool {
        self.has(SKIP)
    }

    /// Whether it was set to wait until all before it are committed
    /// ([`Ring::put_aside_until_turn`]).
    #[must_use]
    pub fn is_tried(&self) -> bool {
        self.has(TRIED)
    }

    /// Whether it was set to wait because it failed with a unique violation.
    #[must_use]
    pub fn is_careful(&self) -> bool {
        self.has(CAREFUL)
    }

    /// Whether it can be applied together with others: the ring has all of its changes, and they
    /// are to be applied.
    #[must_use]
    pub fn may_join(&self) -> bool {
        !self.open && !self.has(SKIP | ELSEWHERE)
    }

    /// Whether it has any of these flags now.
    fn has(&self, flags: u32) -> bool {
        let descriptor = self.ring.descriptor(self.sequence);
        descriptor.flags.load(Ordering::Acquire) & flags != 0
    }

    /// End of its commit record at the provider; 0 until it is known.
    #[must_use]
    pub fn end_lsn(&self) -> u64 {
        self.ring
            .descriptor(self.sequence)
            .end_lsn
            .load(Ordering::Acquire)
    }

    /// Start of its commit record at the provider; 0 until it is known.
    #[must_use]
    pub fn commit_lsn(&self) -> u64 {
        self.ring
            .descriptor(self.sequence)
            .commit_lsn
            .load(Ordering::Acquire)
    }

    /// Starts reading at the beginning again. Not for a transaction that was open when it was
    /// claimed.
    pub fn rewind(&mut self) {
        self.position = self
            .ring
            .descriptor(self.sequence)
            .begin
            .load(Ordering::Acquire);
        self.assembling = false;
    }

    /// Returns the next frame. If the transaction is open, first releases the bytes of the frames
    /// read before; `wake` then sets the leader's latch. After [`FrameRead::Pending`], the caller
    /// passes the same buffer again: it may hold the first parts of a frame.
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
            let total = footprint(len);
            if kind == WRAP {
                // A frame follows always.
                if self.position + room >= end {
                    return Err(Error::Corrupt(self.position));
                }
                self.position += room;
                continue;
            }
            if total > room || self.position + total > end {
                return Err(Error::Corrupt(self.position));
            }
            let (at, _) = self.ring.at(self.position + FRAME_HEADER);
            let len = usize::try_from(len).unwrap_or(0);
            // SAFETY: the leader wrote `len` bytes here before it moved `end`, which was read with
            // acquire, and does not write here again before `tail` passes them: at this
            // transaction's commit, or at the next call.
            let bytes: &'a [u8] = unsafe { std::slice::from_raw_parts(at, len) };
            self.position += total;
            match kind {
                WHOLE if !self.assembling => return Ok(FrameRead::Frame(bytes)),
                PART | LAST_PART if kind == PART || self.assembling => {
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
