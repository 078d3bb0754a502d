//! A transaction that is applied while it still runs at the provider (`streaming => 'parallel'`):
//! what leader, its process and the applier whose turn it is say to each other. One at a time in
//! each group.
//!
//! The leader keeps all that the transaction sends in a file (`leader::spool`), as it does without
//! this. A process of its own reads the file as it grows, and applies what is in it in an open
//! transaction; the version of what it writes is that of the commit, which is known when it commits
//! here. Nothing relies on it: whoever meets anything that the commit's version would have to
//! decide, who is in anybody's way, and who fails, rolls back, and the transaction is applied from
//! the file when it has committed, or is asked for again.
//!
//! | state | means | who moves it on |
//! |---|---|---|
//! | free | there is none | leader: started |
//! | started | the process reads and applies, the leader adds to the file | leader: whole; anybody: given up |
//! | whole | it has committed at the provider: all is in the file, its end is known, it is in the ring as one that is elsewhere | applier: turn; process, leader: given up |
//! | turn | all before it is committed here | process: committed, given up; leader, when the process has ended: given up |
//! | committed | it is committed here | leader, when the process has ended: free |
//! | given up | nothing is left of it but what was rolled back | leader, when the process has ended: free |
//!
//! A transaction whose ring entry says "elsewhere" and that is given up after that is asked for
//! again: the leader starts anew, and applies it in the ordinary way
//! (`SubscriptionEntry::not_running`). Whether it was committed after all says the origin's
//! position, as for all others (I1).

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};

/// The leader starts anew for a transaction that was given up late. Nothing has failed.
pub const COMES_AGAIN: &str = "a transaction that was applied while it ran is asked for again";

/// How long nothing may come of a transaction that is applied while it runs: its locks are held
/// here, and rows that are dead stay.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

const PATH: usize = 512;

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// There is none.
    Free = 0,
    /// It is applied as it comes.
    Started = 1,
    /// It has committed at the provider.
    Whole = 2,
    /// All before it is committed here.
    Turn = 3,
    /// It is committed here.
    Committed = 4,
    /// It is not applied so.
    GivenUp = 5,
}

/// How the transaction has ended at the provider.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ending {
    /// Start of its commit record there.
    pub commit_lsn: u64,
    /// End of it.
    pub end_lsn: u64,
    /// Unix microseconds.
    pub timestamp: i64,
    /// Its number in the ring.
    pub sequence: u64,
}

/// What the process may apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Supply {
    /// So many bytes of the file.
    pub length: u64,
    /// Once this transaction is committed here, and all before it.
    pub after: u64,
    /// The transaction commits after this position,
    pub read: u64,
    /// and not before this time (Unix microseconds), if no clock steps back.
    pub newest: i64,
}

/// In the group's memory. All zero is a valid one.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Running {
    state: AtomicU32,
    xid: AtomicU32,
    /// Latches: of the process, and of the applier that waits for it.
    process: AtomicUsize,
    waiter: AtomicUsize,
    /// Grows: what is read belongs together where it is even and the same before and after.
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
    /// Of nothing.
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

    /// How far it is.
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

    /// Move on from one state to another. False when it was not, or not any more, in that state.
    fn move_on(&self, from: State, to: State) -> bool {
        self.state
            .compare_exchange(from as u32, to as u32, AcqRel, Acquire)
            .is_ok()
    }

    /// Leader: a process for this transaction is about to be started. False where the path does not
    /// fit.
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

    /// The transaction's id at the provider.
    pub fn xid(&self) -> u32 {
        self.xid.load(Relaxed)
    }

    /// Where its file is.
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

    /// Leader: so much may be applied now.
    pub fn supply(&self, supply: Supply) {
        self.supplied.fetch_add(1, AcqRel);
        self.after.store(supply.after, Relaxed);
        self.read.store(supply.read, Relaxed);
        self.newest.store(supply.newest, Relaxed);
        self.length.store(supply.length, Relaxed);
        self.supplied.fetch_add(1, Release);
    }

    /// Process: what may be applied. `None` while the leader is writing it down.
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

    /// Leader: the transaction has committed at the provider, and all of it was supplied. False
    /// when the process has given up.
    pub fn is_whole(&self, ending: Ending) -> bool {
        self.commit_lsn.store(ending.commit_lsn, Relaxed);
        self.end_lsn.store(ending.end_lsn, Relaxed);
        self.timestamp.store(ending.timestamp, Relaxed);
        self.sequence.store(ending.sequence, Relaxed);
        self.move_on(State::Started, State::Whole)
    }

    /// How it has ended, once it is whole.
    pub fn ending(&self) -> Ending {
        Ending {
            commit_lsn: self.commit_lsn.load(Relaxed),
            end_lsn: self.end_lsn.load(Relaxed),
            timestamp: self.timestamp.load(Relaxed),
            sequence: self.sequence.load(Relaxed),
        }
    }

    /// Applier: all before it is committed. What becomes of it is told to this latch.
    pub fn take_turn(&self, latch: usize) {
        self.waiter.store(latch, Release);
        self.move_on(State::Whole, State::Turn);
    }

    /// Process: it is committed, in a record that ends here.
    pub fn commit(&self, local_end: u64) -> bool {
        self.local_end.store(local_end, Relaxed);
        self.move_on(State::Turn, State::Committed)
    }

    /// Where the commit record ends here, once it is committed.
    pub fn local_end(&self) -> u64 {
        self.local_end.load(Relaxed)
    }

    /// It does not come to be committed by the process. False when it was committed, or there is
    /// none.
    pub fn give_up(&self) -> bool {
        [State::Started, State::Whole, State::Turn]
            .into_iter()
            .any(|from| self.move_on(from, State::GivenUp))
    }

    /// Leader: its process has ended. There may be another one.
    pub fn free(&self) {
        self.give_up();
        self.state.store(State::Free as u32, Release);
    }

    /// Process: this is its latch.
    pub fn register(&self, latch: usize) {
        self.process.store(latch, Release);
    }

    /// The latch of the process; 0: it has not come so far.
    pub fn process(&self) -> usize {
        self.process.load(Acquire)
    }

    /// The latch of the applier that waits for it; 0: none does.
    pub fn waiter(&self) -> usize {
        self.waiter.load(Acquire)
    }
}
