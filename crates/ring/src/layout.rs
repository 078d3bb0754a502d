//! What lies where in the segment. Indices and offsets only, no pointers but latches', which
//! PostgreSQL keeps at the same address in all of its processes.

use crate::aside::{Aside, EDGES};
use crate::failure::Failure;
use crate::sync::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use crate::wake::{ApplierWait, Counters, LeaderWait, MAX_APPLIERS};

pub(crate) const MAGIC: u64 = 0x6272_6169_6472_0005;
/// Frames start at multiples of this.
pub(crate) const ALIGN: u64 = 8;

/// What the segment is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Appliers, 1 to [`MAX_APPLIERS`].
    pub appliers: usize,
    /// Bytes for frames; a multiple of 4096, at least 65536.
    pub buffer: u64,
    /// Transactions in flight; a power of two.
    pub descriptors: u64,
}

impl Geometry {
    /// Round what was asked for to what works.
    #[must_use]
    pub fn new(appliers: usize, buffer: u64, descriptors: u64) -> Self {
        Self {
            appliers: appliers.clamp(1, MAX_APPLIERS),
            buffer: buffer.clamp(65_536, 1 << 40).next_multiple_of(4096),
            descriptors: descriptors.clamp(16, 1 << 20).next_power_of_two(),
        }
    }

    pub(crate) fn descriptors_at() -> usize {
        size_of::<Header>().next_multiple_of(64)
    }

    pub(crate) fn places_at(&self) -> usize {
        let descriptors = usize::try_from(self.descriptors).unwrap_or(usize::MAX);
        Self::descriptors_at().saturating_add(descriptors.saturating_mul(size_of::<Descriptor>()))
    }

    pub(crate) fn ready_at(&self) -> usize {
        let descriptors = usize::try_from(self.descriptors).unwrap_or(usize::MAX);
        self.places_at()
            .saturating_add(descriptors.saturating_mul(size_of::<Place>()))
    }

    pub(crate) fn buffer_at(&self) -> usize {
        let words = usize::try_from(self.descriptors.div_ceil(64)).unwrap_or(usize::MAX);
        self.ready_at()
            .saturating_add(words.saturating_mul(size_of::<AtomicU64>()))
            .next_multiple_of(64)
    }

    /// Bytes that a segment of this shape needs.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffer_at()
            .saturating_add(usize::try_from(self.buffer).unwrap_or(usize::MAX))
    }
}

/// The start of the segment.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) appliers: AtomicU64,
    pub(crate) buffer: AtomicU64,
    pub(crate) descriptors: AtomicU64,
    /// 1 when commits may overtake each other. Set by the leader before anybody else is there.
    pub(crate) relaxed: AtomicU64,
    /// Position at the provider up to which all was committed before the first transaction. Set by
    /// the leader before anybody else is there.
    pub(crate) start: AtomicU64,
    /// Appliers with a number below this may take transactions. Moved by the leader.
    pub(crate) active_appliers: AtomicU64,
    /// Of these, so many do, those with the highest numbers. Moved by the leader.
    pub(crate) taking: AtomicU64,
    /// 1 when they are to take transactions one by one. Moved by the leader.
    pub(crate) singly: AtomicU64,
    pub(crate) leader: LeaderWait,
    pub(crate) leader_pid: AtomicI32,
    /// 1 when everybody is to stop.
    pub(crate) stop: AtomicU32,
    pub(crate) counters: Counters,
    pub(crate) aside: Aside,
    pub(crate) failure: Failure,
    pub(crate) slots: [ApplierSlot; MAX_APPLIERS],
}

/// What an applier is doing, for the others and for the views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApplierState {
    /// Not started yet, or gone. Set by the leader.
    Absent,
    /// Waiting for a transaction. Set by the applier.
    Idle,
    /// Waiting for an earlier transaction that shares a key. Set by the applier.
    WaitingForDependency,
    /// Applying. Set by the applier.
    Applying,
    /// Applied, waiting for its turn to commit. Set by the applier.
    WaitingForTurn,
}

impl ApplierState {
    /// Its number in shared memory.
    #[must_use]
    pub fn as_u32(self) -> u32 {
        match self {
            Self::Absent => 0,
            Self::Idle => 1,
            Self::WaitingForDependency => 2,
            Self::Applying => 3,
            Self::WaitingForTurn => 4,
        }
    }

    /// Its name in the views.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "starting",
            Self::Idle => "idle",
            Self::WaitingForDependency => "waiting for a dependency",
            Self::Applying => "applying",
            Self::WaitingForTurn => "waiting for its turn",
        }
    }

    /// The state of a number; any that is not known is [`Absent`](Self::Absent).
    #[must_use]
    pub fn from_u32(raw: u32) -> Self {
        match raw {
            1 => Self::Idle,
            2 => Self::WaitingForDependency,
            3 => Self::Applying,
            4 => Self::WaitingForTurn,
            _ => Self::Absent,
        }
    }
}

/// What an applier shows of itself.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ApplierSlot {
    pub(crate) pid: AtomicI32,
    pub(crate) state: AtomicU32,
    pub(crate) wait: ApplierWait,
    /// The transaction in hand, 0 for none.
    pub(crate) sequence: AtomicU64,
    /// Transactions committed.
    pub transactions: AtomicU64,
    /// Changes applied.
    pub changes: AtomicU64,
    /// Attempts that were rolled back and tried again.
    pub retries: AtomicU64,
    /// Microseconds spent with a transaction in hand.
    pub busy_micros: AtomicU64,
}

impl ApplierSlot {
    /// Process id, 0 when absent.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid.load(Ordering::Acquire)
    }

    /// What it is doing.
    #[must_use]
    pub fn state(&self) -> ApplierState {
        ApplierState::from_u32(self.state.load(Ordering::Relaxed))
    }

    /// The transaction in hand, 0 for none.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    /// Address of its latch, 0 when absent.
    #[must_use]
    pub fn latch(&self) -> usize {
        self.wait.latch.load(Ordering::Acquire)
    }
}

/// A transaction in flight. Written by the leader before it is published, but for `end` of an open
/// one, `local_end` and `done`.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Descriptor {
    /// Where its first frame starts.
    pub(crate) begin: AtomicU64,
    /// Where the frames that are there end. Moved by the leader while the transaction is open.
    pub(crate) end: AtomicU64,
    /// It is not applied before this transaction is committed. 0: for none. While commits are in
    /// order, all that it depends on is committed then.
    pub(crate) depends_on: AtomicU64,
    /// Bit 0: open, the leader is still adding frames. Bit 1: not to be applied, only to be passed.
    /// Bit 2: it may be committed in several pieces. Bit 3: its keys do not say what it depends on.
    pub(crate) flags: AtomicU32,
    pub(crate) changes: AtomicU32,
    /// Start of the commit record at the provider.
    pub(crate) commit_lsn: AtomicU64,
    /// End of the commit record at the provider; 0 while open.
    pub(crate) end_lsn: AtomicU64,
    /// Commit timestamp at the origin, Unix microseconds.
    pub(crate) commit_timestamp: AtomicU64,
    /// End of the local commit record. Written by the applier before it moves `committed`.
    pub(crate) local_end: AtomicU64,
    // From here on for commits that may overtake each other, and for what is committed together
    // with others.
    /// The last transaction in this place that is committed: this one when it is its number. It
    /// only grows, so it needs no reset. Only where commits may overtake each other.
    pub(crate) done: AtomicU64,
    /// All up to this transaction must be committed. 0: none has to.
    pub(crate) through: AtomicU64,
    /// These must be committed besides, whatever is before them. Up to the first 0.
    pub(crate) edges: [AtomicU64; EDGES],
}

/// What goes with a descriptor where transactions are put aside (`aside.rs`).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Place {
    /// Those that wait for the transaction in this place.
    pub(crate) waiters: AtomicU64,
    /// The next on the list that this one is on.
    pub(crate) next: AtomicU64,
}

pub(crate) const OPEN: u32 = 1;
pub(crate) const SKIP: u32 = 2;
pub(crate) const SPLIT: u32 = 4;
pub(crate) const WIDE: u32 = 8;
pub(crate) const ALONE: u32 = 16;
pub(crate) const ELSEWHERE: u32 = 32;
/// It was tried, and is applied when all before it are committed. Set by the applier that puts it
/// aside.
pub(crate) const TRIED: u32 = 64;
/// The same, and it ended in a unique violation.
pub(crate) const CAREFUL: u32 = 128;
