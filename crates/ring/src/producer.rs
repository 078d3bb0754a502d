//! The producer's side: the leader writes frames and publishes transactions.

use crate::aside::{self, EDGES};
use crate::frame::{FRAME_HEADER, LAST_PART, PART, WHOLE, WRAP, footprint};
use crate::layout::{ALONE, Descriptor, ELSEWHERE, OPEN, SKIP, SPLIT, WIDE};
use crate::ring::Ring;
use crate::sync::Ordering;

/// The producer's side. A segment has one, for as long as it exists.
#[derive(Debug)]
pub struct Leader {
    ring: Ring,
    /// Position of the next frame.
    head: u64,
    /// Position of the current transaction's first frame. The current transaction is the one that
    /// is being received.
    begin: u64,
    /// Sequence number of the current transaction.
    sequence: u64,
    /// Whether the current transaction is published already.
    open: bool,
    /// Transactions up to this one were collected ([`Leader::committed_at`]): their descriptors may
    /// be used again.
    collected: u64,
}

impl Leader {
    /// Becomes the producer of a fresh ring.
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

    /// Sequence number of the current transaction, or of the next one.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Bytes of the current transaction.
    #[must_use]
    pub fn pending_bytes(&self) -> u64 {
        self.head - self.begin
    }

    /// Whether a descriptor is free for the current transaction. A committed transaction's
    /// descriptor becomes free when [`Leader::committed_at`] has read it. If it were used earlier,
    /// the leader would read the positions of another transaction.
    #[must_use]
    pub fn has_descriptor(&self) -> bool {
        self.sequence - self.collected < self.ring.geometry().descriptors
    }

    /// Whether the current transaction has grown so large that it must be published open.
    #[must_use]
    pub fn should_open(&self) -> bool {
        !self.open && self.pending_bytes() > self.ring.geometry().buffer / 4
    }

    /// Whether the current transaction is published open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Returns the number of bytes of a frame that are stored at once. A larger frame is stored in
    /// parts.
    #[must_use]
    pub fn piece(&self) -> usize {
        usize::try_from(self.ring.geometry().buffer / 8).unwrap_or(usize::MAX)
    }

    /// Stores a frame or a part of one. `first` says that the frame begins with `piece`, `last`
    /// that it ends with it. Returns false and stores nothing if there is no room at present; for
    /// more than [`Leader::piece`] bytes there may never be. The applier of an open transaction
    /// sees the bytes after [`Leader::extend`].
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
        // Release, as for `end_lsn`: a process that reads these values for a later transaction must
        // also see that `committed` has passed the earlier one it asks about.
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

    /// Publishes the current transaction while it is still being received. It depends on all before
    /// it. `commit_lsn` is the start of its commit record, so that a failure can name it before it
    /// is complete. `split`: it may be committed in chunks.
    pub fn publish_open(&mut self, commit_lsn: u64, split: bool) {
        let descriptor = self.fill(self.sequence - 1, OPEN | if split { SPLIT } else { 0 });
        descriptor.commit_lsn.store(commit_lsn, Ordering::Release);
        self.open = true;
        self.ring.header().counters.publish(self.sequence);
    }

    /// Makes visible to the applier of the open transaction what was stored since.
    pub fn extend(&mut self) {
        if self.open {
            self.ring
                .descriptor(self.sequence)
                .end
                .store(self.head, Ordering::Release);
        }
    }

    /// Completes the current transaction. Publishes it, and all that were completed before; if it
    /// is open already, closes it. Returns its sequence number.
    pub fn publish(&mut self, complete: &Complete) -> u64 {
        let sequence = self.complete(complete);
        self.publish_completed();
        sequence
    }

    /// Publishes all completed transactions. Each call costs every process that looks for
    /// transactions to claim a cache miss, so the leader calls it for several at once.
    pub fn publish_completed(&self) {
        self.ring.header().counters.publish(self.completed());
    }

    /// Publishes the completed transactions up to `sequence`.
    pub fn publish_up_to(&self, sequence: u64) {
        self.ring
            .header()
            .counters
            .publish(sequence.min(self.completed()));
    }

    /// Sequence number of the last transaction that is complete or open.
    #[must_use]
    pub fn completed(&self) -> u64 {
        if self.open {
            self.sequence
        } else {
            self.sequence - 1
        }
    }

    /// Completes the current transaction. It can be published then; if it is open already, it is
    /// closed. Returns its sequence number.
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

    /// Drops the stored bytes of the current transaction. Only if it is not open.
    pub fn discard(&mut self) {
        if !self.open {
            self.head = self.begin;
        }
    }

    /// Returns the ends of a committed transaction's commit records, at the provider and local, and
    /// its commit timestamp at the origin (Unix microseconds). Called once for each transaction, in
    /// order: the descriptor is free afterwards.
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

/// Properties of a transaction that are known once it is received whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Complete {
    /// The latest transaction that this one depends on; 0 for none.
    pub depends_on: u64,
    /// All up to this transaction must be committed before this one is applied; 0 for none.
    pub through: u64,
    /// Single transactions that must be committed first. Unused places are 0, at the end.
    pub edges: [u64; EDGES],
    /// Start of the commit record at the provider.
    pub commit_lsn: u64,
    /// End of the commit record at the provider.
    pub end_lsn: u64,
    /// Commit timestamp at the origin, Unix microseconds.
    pub commit_timestamp: i64,
    /// Number of changes.
    pub changes: u32,
    /// Passed over, not applied.
    pub skip: bool,
    /// May be committed in chunks. It depends on all before it, and all after it depend on it.
    pub split: bool,
    /// The keys of its rows do not tell what it depends on.
    pub wide: bool,
    /// Never joined with other transactions.
    pub alone: bool,
    /// The ring does not have its changes: another process has applied them, and waits for its turn
    /// to commit.
    pub elsewhere: bool,
}
