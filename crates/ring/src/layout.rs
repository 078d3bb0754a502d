//! Layout of the segment. It has indices and offsets and no pointers, except for latches, which
//! PostgreSQL keeps at the same address in all of its processes.

use crate::aside::{Aside, EDGES};
use crate::failure::Failure;
use crate::sync::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use crate::wake::{ApplierWait, Counters, LeaderWait, MAX_APPLIERS};

pub(crate) const MAGIC: u64 = 0x6272_6169_6472_0005;
/// Frames start at multiples of this.
pub(crate) const ALIGN: u64 = 8;

/// Sizes that the segment is made for.
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
    /// Rounds the requested sizes to ones that are allowed.
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

    /// Returns the number of bytes that a segment of this shape needs.
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
    /// 1 in relaxed commit order. Set by the leader before another process attaches.
    pub(crate) relaxed: AtomicU64,
    /// Position at the provider up to which all was committed before the first transaction. Set by
    /// the leader before another process attaches.
    pub(crate) start: AtomicU64,
    /// Only appliers with a number below this may claim transactions. Set by the leader.
    pub(crate) active_appliers: AtomicU64,
    /// Number of active appliers that may claim transactions: those with the highest numbers. Set
    /// by the leader.
    pub(crate) taking: AtomicU64,
    /// 1 if transactions are claimed one by one, not in runs. Set by the leader.
    pub(crate) singly: AtomicU64,
    pub(crate) leader: LeaderWait,
    pub(crate) leader_pid: AtomicI32,
    /// 1 if all processes of the subscription are to stop.
    pub(crate) stop: AtomicU32,
    pub(crate) counters: Counters,
    pub(crate) aside: Aside,
    pub(crate) failure: Failure,
    pub(crate) slots: [ApplierSlot; MAX_APPLIERS],
}

/// Activity of an applier, for other appliers and for the views.
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
    /// Returns the number of the state in shared memory.
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

    /// Returns the name of the state in the views.
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

    /// Returns the state of a number; [`Absent`](Self::Absent) for an unknown number.
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

/// State and counters of an applier.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ApplierSlot {
    pub(crate) pid: AtomicI32,
    pub(crate) state: AtomicU32,
    pub(crate) wait: ApplierWait,
    /// First transaction that the applier has claimed and not yet committed; 0 for none.
    pub(crate) sequence: AtomicU64,
    /// Transactions committed.
    pub transactions: AtomicU64,
    /// Changes applied.
    pub changes: AtomicU64,
    /// Attempts that were rolled back and tried again.
    pub retries: AtomicU64,
    /// Microseconds spent with a claimed transaction.
    pub busy_micros: AtomicU64,
}

impl ApplierSlot {
    /// Process id; 0 if absent.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid.load(Ordering::Acquire)
    }

    /// Returns the applier's activity.
    #[must_use]
    pub fn state(&self) -> ApplierState {
        ApplierState::from_u32(self.state.load(Ordering::Relaxed))
    }

    /// Returns the first transaction that the applier has claimed and not yet committed; 0 for
    /// none.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    /// Address of the applier's latch; 0 if absent.
    #[must_use]
    pub fn latch(&self) -> usize {
        self.wait.latch.load(Ordering::Acquire)
    }
}

/// A transaction in flight. The leader writes it before it is published, except for `local_end`,
/// `done` and `end` of an open transaction. An applier may raise `through` and set flags when it
/// sets the transaction to wait for its turn.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Descriptor {
    /// Position of its first frame.
    pub(crate) begin: AtomicU64,
    /// Position behind its last frame so far. Moved by the leader while the transaction is open.
    pub(crate) end: AtomicU64,
    /// The latest transaction that it depends on; 0 for none. If commits follow the provider's
    /// order, all of its dependencies are committed once this one is.
    pub(crate) depends_on: AtomicU64,
    /// Bit 0: open, the leader is still adding frames. Bit 1: passed over, not applied. Bit 2: may
    /// be committed in several chunks. Bit 3: its keys do not tell what it depends on. The
    /// constants at the end of this file have all bits.
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
    // The fields below are for relaxed commit order, and for transactions that are committed
    // together.
    /// The last transaction in this place that is committed. The current one is committed if this
    /// is its number. The value only grows, so it needs no reset. Only in relaxed order.
    pub(crate) done: AtomicU64,
    /// All up to this transaction must be committed first; 0 for none.
    pub(crate) through: AtomicU64,
    /// Single transactions that must be committed first, up to the first 0.
    pub(crate) edges: [AtomicU64; EDGES],
}

/// Second part of a descriptor, for wait lists (`aside.rs`).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Place {
    /// Wait list of the transaction in this place.
    pub(crate) waiters: AtomicU64,
    /// Next transaction on the wait list that this one is on; 0 for none.
    pub(crate) next: AtomicU64,
}

pub(crate) const OPEN: u32 = 1;
pub(crate) const SKIP: u32 = 2;
pub(crate) const SPLIT: u32 = 4;
pub(crate) const WIDE: u32 = 8;
pub(crate) const ALONE: u32 = 16;
pub(crate) const ELSEWHERE: u32 = 32;
/// The transaction waits until all before it are committed. Set by the applier that sets it to
/// wait: the transaction has failed, or must not overtake others.
pub(crate) const TRIED: u32 = 64;
/// As [`TRIED`], after a unique violation.
pub(crate) const CAREFUL: u32 = 128;
