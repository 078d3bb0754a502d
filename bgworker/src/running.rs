//! Shared state of an in-progress transaction, which is applied while it still runs at the provider
//! (`streaming => 'parallel'`). The leader, the streaming process and the waiting applier use it.
//! One at a time in each group.
//!
//! The leader writes all changes of the transaction to a file (`leader::spool`), as it does without
//! this mode. The streaming process reads the file as it grows, and applies it in an open
//! transaction. The version of the written rows is that of the commit, which is known when the
//! transaction commits locally. Nothing depends on success. The process rolls back if a decision
//! would need the commit's version, if it blocks another process, or on an error. Then the
//! transaction is applied from the file once it has committed, or is requested again.
//!
//! States:
//!
//! - free: there is no transaction. The leader sets *started*.
//! - started: the process reads and applies, and the leader adds to the file. The leader sets
//!   *whole*; any process may set *given up*.
//! - whole: the transaction has committed at the provider. The file is complete, its end is known,
//!   and the ring has an entry that says "elsewhere". An applier sets *turn*; the process or the
//!   leader may set *given up*.
//! - turn: all earlier transactions are committed locally. The process sets *committed* or *given
//!   up*; the leader sets *given up* if the process has ended.
//! - committed: the transaction is committed locally. When the process has ended, the leader sets
//!   *free*.
//! - given up: the process rolls back, or has rolled back. When the process has ended, the leader
//!   sets *free*.
//!
//! If a transaction is given up after its ring entry says "elsewhere", it is requested again: the
//! leader restarts and applies it in the ordinary way (`SubscriptionEntry::not_running`). The
//! origin's position tells whether it was committed after all, as for all other transactions (I1).

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};

/// Longest time without new data for an in-progress transaction: it holds local locks, and keeps
/// dead rows from being removed.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

const PATH: usize = 512;

/// State of the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// There is no transaction.
    Free = 0,
    /// The transaction is applied as it arrives.
    Started = 1,
    /// The transaction has committed at the provider.
    Whole = 2,
    /// All earlier transactions are committed locally.
    Turn = 3,
    /// The transaction is committed locally.
    Committed = 4,
    /// The process does not apply the transaction any more.
    GivenUp = 5,
}

/// The transaction's end at the provider.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ending {
    /// Start LSN of its commit record.
    pub commit_lsn: u64,
    /// End LSN of its commit record.
    pub end_lsn: u64,
    /// Commit timestamp, Unix microseconds.
    pub timestamp: i64,
    /// Sequence number in the ring.
    pub sequence: u64,
}

/// The data that the process may apply, and its preconditions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Supply {
    /// Bytes of the file that may be applied,
    pub length: u64,
    /// once this transaction and all earlier ones are committed locally.
    pub after: u64,
    /// The transaction commits after this LSN of the provider,
    pub read: u64,
    /// and not before this time (Unix microseconds), unless a clock steps back.
    pub newest: i64,
}

/// The state in the group's shared memory. All zeros are a valid value.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Running {
    state: AtomicU32,
    xid: AtomicU32,
    /// Latches of the process, and of the applier that waits for it.
    process: AtomicUsize,
    waiter: AtomicUsize,
    /// Sequence lock: a reading is consistent if this is even, and equal before and after.
    supplied: AtomicU64,
    length: AtomicU64,
    after: AtomicU64,
    read: AtomicU64,
    newest: AtomicI64,
    commit_lsn: AtomicU64,
    end_lsn: AtomicU64,
    timestamp: AtomicI64,
    sequence: AtomicU64,
    local_end: AtomicU64,
    path_length: AtomicUsize,
    path: [AtomicU8; PATH],
}

impl Default for Running {
    fn default() -> Self {
        Self::new()
    }
}

impl Running {
    /// Returns the state without a transaction.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            xid: AtomicU32::new(0),
            process: AtomicUsize::new(0),
            waiter: AtomicUsize::new(0),
            supplied: AtomicU64::new(0),
            length: AtomicU64::new(0),
            after: AtomicU64::new(0),
            read: AtomicU64::new(0),
            newest: AtomicI64::new(0),
            commit_lsn: AtomicU64::new(0),
            end_lsn: AtomicU64::new(0),
            timestamp: AtomicI64::new(0),
            sequence: AtomicU64::new(0),
            local_end: AtomicU64::new(0),
            path_length: AtomicUsize::new(0),
            path: [const { AtomicU8::new(0) }; PATH],
        }
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> State {
        match self.state.load(Acquire) {
            1 => State::Started,
            2 => State::Whole,
            3 => State::Turn,
            4 => State::Committed,
            5 => State::GivenUp,
            _ => State::Free,
        }
    }

    /// Changes the state from `from` to `to`. Returns false if it was not `from`.
    fn move_on(&self, from: State, to: State) -> bool {
        self.state
            .compare_exchange(from as u32, to as u32, AcqRel, Acquire)
            .is_ok()
    }

    /// Leader: prepares for starting a process for this transaction. Returns false if the path does
    /// not fit.
    pub fn prepare(&self, xid: u32, path: &str) -> bool {
        if path.len() > PATH || self.state() != State::Free {
            return false;
        }
        for (place, byte) in self.path.iter().zip(path.bytes()) {
            place.store(byte, Relaxed);
        }
        self.path_length.store(path.len(), Relaxed);
        self.xid.store(xid, Relaxed);
        self.process.store(0, Relaxed);
        self.waiter.store(0, Relaxed);
        self.length.store(0, Relaxed);
        self.local_end.store(0, Relaxed);
        self.sequence.store(0, Relaxed);
        self.move_on(State::Free, State::Started)
    }

    /// Returns the transaction's id at the provider.
    pub fn xid(&self) -> u32 {
        self.xid.load(Relaxed)
    }

    /// Returns the path of the transaction's file.
    pub fn path(&self) -> String {
        let length = self.path_length.load(Relaxed);
        let bytes: Vec<u8> = self
            .path
            .iter()
            .take(length)
            .map(|byte| byte.load(Relaxed))
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Leader: publishes how much may be applied now.
    pub fn supply(&self, supply: Supply) {
        self.supplied.fetch_add(1, AcqRel);
        self.after.store(supply.after, Relaxed);
        self.read.store(supply.read, Relaxed);
        self.newest.store(supply.newest, Relaxed);
        self.length.store(supply.length, Relaxed);
        self.supplied.fetch_add(1, Release);
    }

    /// Process: returns what may be applied. `None` while the leader is writing it.
    pub fn supplied(&self) -> Option<Supply> {
        let before = self.supplied.load(Acquire);
        let supply = Supply {
            length: self.length.load(Acquire),
            after: self.after.load(Acquire),
            read: self.read.load(Acquire),
            newest: self.newest.load(Acquire),
        };
        (before.is_multiple_of(2) && self.supplied.load(Acquire) == before).then_some(supply)
    }

    /// Leader: records that the transaction has committed at the provider, and that all of it was
    /// supplied. Returns false if the process has given up.
    pub fn is_whole(&self, ending: Ending) -> bool {
        self.commit_lsn.store(ending.commit_lsn, Relaxed);
        self.end_lsn.store(ending.end_lsn, Relaxed);
        self.timestamp.store(ending.timestamp, Relaxed);
        self.sequence.store(ending.sequence, Relaxed);
        self.move_on(State::Started, State::Whole)
    }

    /// Returns the transaction's end at the provider, once the transaction is whole.
    pub fn ending(&self) -> Ending {
        Ending {
            commit_lsn: self.commit_lsn.load(Relaxed),
            end_lsn: self.end_lsn.load(Relaxed),
            timestamp: self.timestamp.load(Relaxed),
            sequence: self.sequence.load(Relaxed),
        }
    }

    /// Applier: records that all earlier transactions are committed. The process sets this latch
    /// when it has committed or given up.
    pub fn take_turn(&self, latch: usize) {
        self.waiter.store(latch, Release);
        self.move_on(State::Whole, State::Turn);
    }

    /// Process: records the local commit, whose record ends at `local_end`.
    pub fn commit(&self, local_end: u64) -> bool {
        self.local_end.store(local_end, Relaxed);
        self.move_on(State::Turn, State::Committed)
    }

    /// Returns the local end LSN of the commit record, once the transaction is committed.
    pub fn local_end(&self) -> u64 {
        self.local_end.load(Relaxed)
    }

    /// Gives the transaction up, so that the process does not commit it. Returns false if it was
    /// committed, or if there is none.
    pub fn give_up(&self) -> bool {
        [State::Started, State::Whole, State::Turn]
            .into_iter()
            .any(|from| self.move_on(from, State::GivenUp))
    }

    /// Leader: frees the state, as the process has ended. Another one may follow.
    pub fn free(&self) {
        self.give_up();
        self.state.store(State::Free as u32, Release);
    }

    /// Process: registers its latch.
    pub fn register(&self, latch: usize) {
        self.process.store(latch, Release);
    }

    /// Returns the latch of the process; 0: not registered yet.
    pub fn process(&self) -> usize {
        self.process.load(Acquire)
    }

    /// Returns the latch of the applier that waits for the transaction; 0: none does.
    pub fn waiter(&self) -> usize {
        self.waiter.load(Acquire)
    }
}
