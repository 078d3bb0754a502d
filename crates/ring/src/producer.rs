//! The producer's side: the leader writes frames and publishes transactions.

use crate::aside::{self, EDGES};
use crate::frame::{FRAME_HEADER, LAST_PART, PART, WHOLE, WRAP, footprint};
use crate::layout::{ALONE, Descriptor, ELSEWHERE, OPEN, SKIP, SPLIT, WIDE};
use crate::ring::Ring;
use crate::sync::Ordering;

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
    /// Transactions whose ends were read: their descriptors may be used again.
    collected: u64,
}

impl Leader {
    /// Become the producer of a fresh ring.
    #[must_use]
    pub fn new(ring: Ring) -> Self {
        Self {
            ring,
            head: 0,
            begin: 0,
            sequence: 1,
            open: false,
            collected: 0,
        }
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

    /// Whether a descriptor is free for the transaction in hand. One becomes free when
    /// [`Leader::committed_at`] has read it, not before: what a committed transaction left there
    /// would be lost, and another's be taken for it.
    #[must_use]
    pub fn has_descriptor(&self) -> bool {
        self.sequence - self.collected < self.ring.geometry().descriptors
    }

    /// Whether the transaction in hand has grown so large that it must be published open.
    #[must_use]
    pub fn should_open(&self) -> bool {
        !self.open && self.pending_bytes() > self.ring.geometry().buffer / 4
    }

    /// Whether the transaction in hand is published open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Largest piece of a frame that is stored at once. Larger frames go in several.
    #[must_use]
    pub fn piece(&self) -> usize {
        usize::try_from(self.ring.geometry().buffer / 8).unwrap_or(usize::MAX)
    }

    /// Store one piece of a frame: `last` says that the frame ends with it, `first` that it starts
    /// with it. Returns false, and has done nothing, when there is no room now (for a piece of more
    /// than [`Leader::piece`]: maybe never). The applier of an open transaction sees it after
    /// [`Leader::extend`].
    #[must_use]
    pub fn store(&mut self, piece: &[u8], first: bool, last: bool) -> bool {
        let Ok(len) = u32::try_from(piece.len()) else {
            return false;
        };
        let total = footprint(len);
        let (_, room) = self.ring.at(self.head);
        let wrap = if total > room { room } else { 0 };
        if self.head + wrap + total - self.ring.tail() > self.ring.geometry().buffer {
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
        // SAFETY: `total` bytes from `head` lie in one piece and between `tail` and
        // `tail + buffer`, where nobody reads.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), at, piece.len()) };
        self.head += total;
        true
    }

    fn fill(&self, depends_on: u64, flags: u32) -> &Descriptor {
        let descriptor = self.ring.descriptor(self.sequence);
        descriptor.begin.store(self.begin, Ordering::Relaxed);
        descriptor.depends_on.store(depends_on, Ordering::Relaxed);
        descriptor.flags.store(flags, Ordering::Relaxed);
        // Released, as below: who reads what was written here for a later transaction must see that
        // `committed` has passed the one that it asks about.
        descriptor.end.store(self.head, Ordering::Release);
        descriptor.end_lsn.store(0, Ordering::Release);
        descriptor.commit_lsn.store(0, Ordering::Relaxed);
        descriptor.local_end.store(0, Ordering::Relaxed);
        descriptor.through.store(depends_on, Ordering::Relaxed);
        if let Some(first) = descriptor.edges.first() {
            first.store(0, Ordering::Relaxed);
        }
        self.ring
            .place(self.sequence)
            .waiters
            .store(aside::empty(self.sequence), Ordering::Release);
        descriptor
    }

    /// Publish the transaction in hand while it is still being received. It depends on all before
    /// it. `commit_lsn` says where it commits, so that a failure can name it before it is complete;
    /// `split` that it may be committed in pieces.
    pub fn publish_open(&mut self, commit_lsn: u64, split: bool) {
        let descriptor = self.fill(self.sequence - 1, OPEN | if split { SPLIT } else { 0 });
        descriptor.commit_lsn.store(commit_lsn, Ordering::Release);
        self.open = true;
        self.ring.header().counters.publish(self.sequence);
    }

    /// Show the applier of the open transaction what was stored since.
    pub fn extend(&mut self) {
        if self.open {
            self.ring
                .descriptor(self.sequence)
                .end
                .store(self.head, Ordering::Release);
        }
    }

    /// The transaction in hand is complete: publish it, and all that were completed before, or
    /// close it when it is open. Returns its number.
    pub fn publish(&mut self, complete: &Complete) -> u64 {
        let sequence = self.complete(complete);
        self.publish_completed();
        sequence
    }

    /// Publish what was completed. Each time costs whoever looks for something to take a line of
    /// its cache.
    pub fn publish_completed(&self) {
        self.ring.header().counters.publish(self.completed());
    }

    /// Publish what was completed, but only up to a transaction.
    pub fn publish_up_to(&self, sequence: u64) {
        self.ring
            .header()
            .counters
            .publish(sequence.min(self.completed()));
    }

    /// Number of the last transaction that is complete, or open.
    #[must_use]
    pub fn completed(&self) -> u64 {
        if self.open {
            self.sequence
        } else {
            self.sequence - 1
        }
    }

    /// The transaction in hand is complete: it can be published, or is closed when it is open.
    /// Returns its number.
    pub fn complete(&mut self, complete: &Complete) -> u64 {
        let skip = if complete.skip { SKIP } else { 0 };
        let split = if complete.split { SPLIT } else { 0 };
        let wide = if complete.wide { WIDE } else { 0 };
        let alone = if complete.alone { ALONE } else { 0 };
        let elsewhere = if complete.elsewhere { ELSEWHERE } else { 0 };
        let flags = skip | split | wide | alone | elsewhere;
        let descriptor = if self.open {
            let descriptor = self.ring.descriptor(self.sequence);
            descriptor.end.store(self.head, Ordering::Release);
            descriptor
        } else {
            self.fill(complete.depends_on, OPEN | flags)
        };
        if !self.open {
            descriptor
                .through
                .store(complete.through, Ordering::Relaxed);
            for (place, edge) in descriptor.edges.iter().zip(complete.edges) {
                place.store(edge, Ordering::Relaxed);
            }
        }
        descriptor
            .commit_lsn
            .store(complete.commit_lsn, Ordering::Relaxed);
        descriptor
            .end_lsn
            .store(complete.end_lsn, Ordering::Release);
        descriptor
            .changes
            .store(complete.changes, Ordering::Relaxed);
        descriptor
            .commit_timestamp
            .store(complete.commit_timestamp.cast_unsigned(), Ordering::Relaxed);
        descriptor.flags.store(flags, Ordering::Release);
        let sequence = self.sequence;
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

    /// Ends of a committed transaction: (at the provider, here), and its commit timestamp (Unix
    /// microseconds). To be read once for each, in order: its descriptor is free afterwards.
    pub fn committed_at(&mut self, sequence: u64) -> (u64, u64, i64) {
        self.collected = self.collected.max(sequence.min(self.ring.committed()));
        let descriptor = self.ring.descriptor(sequence);
        (
            descriptor.end_lsn.load(Ordering::Acquire),
            descriptor.local_end.load(Ordering::Acquire),
            descriptor
                .commit_timestamp
                .load(Ordering::Acquire)
                .cast_signed(),
        )
    }
}

/// What is known of a transaction once it is received whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Complete {
    /// The latest transaction that this one depends on; 0 for none.
    pub depends_on: u64,
    /// All up to this transaction must be committed before this one is applied; 0 for none.
    pub through: u64,
    /// These must be committed besides. The last places are 0.
    pub edges: [u64; EDGES],
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
    /// It may be committed in pieces. It depends on all before it, and all after it on it.
    pub split: bool,
    /// Its keys do not say what it depends on.
    pub wide: bool,
    /// It never joins others.
    pub alone: bool,
    /// Its content is not here: another process has applied it, and is only to be told that it is
    /// its turn.
    pub elsewhere: bool,
}
