//! Transactions that are put aside because something that they depend on is not committed yet. Run
//! by the appliers, where commits may overtake each other.
//!
//! Whoever has claimed a transaction and finds that it can't be applied yet hangs it on one of
//! those that are missing, and takes another. Whoever commits that one takes off all that hang on
//! it: each is hung on the next that is missing, or is *ready* when none is, and then anybody may
//! take it, before anything new. So a transaction that is put aside is in one place at any time: in
//! the hands of an applier, on the list of one that is not committed, or ready.
//!
//! The word of a list says whose it is, who was hung on it last, and whether it is closed. It is
//! closed by the commit of its transaction, with one exchange that takes the list as well, before
//! that transaction is marked as done: what was hung on it until then is found by the one who
//! commits, and nothing can be hung on it any more. A list is never taken apart in another way, so
//! that its links stay true. A place that is used again has another number in its word, so what
//! belongs to an earlier transaction is never taken for a later one's.
//!
//! This module knows nothing of how things lie in shared memory, so that loom can check it
//! (`tests/loom.rs`).

use crate::sync::{AtomicU64, Ordering};
use crate::wake::Padded;

/// Single transactions that one can depend on when commits may overtake each other: as many as a
/// descriptor's second cache line has room for. More than that are few, and stand for all before
/// the last of them.
pub const EDGES: usize = 6;

/// The lower bits of a list's word: how far behind its transaction the one is that was hung on it
/// last; 0 for none.
const OFFSET_BITS: u32 = 21;
/// The list is closed: its transaction is committed.
const CLOSED: u64 = (1 << OFFSET_BITS) - 1;

/// The word of an empty list. Written by the leader before the transaction is published.
pub(crate) fn empty(sequence: u64) -> u64 {
    sequence << OFFSET_BITS
}

/// Which transaction a list belongs to.
fn owner(word: u64) -> u64 {
    word >> OFFSET_BITS
}

/// The transaction that was hung on it last; 0 for none.
fn last(word: u64) -> u64 {
    match word & CLOSED {
        0 | CLOSED => 0,
        offset => owner(word) + offset,
    }
}

/// What all transactions in flight have for this, by number. A place is used again by the
/// transaction that is as many further on as there are places.
pub trait Places {
    /// The list of those that wait for it.
    fn waiters(&self, sequence: u64) -> &AtomicU64;
    /// Which is next on the list that it is on; 0 for none.
    fn next(&self, sequence: u64) -> &AtomicU64;
    /// All up to the first must be committed before it is applied, and each of the others, up to
    /// the first 0.
    fn needs(&self, sequence: u64) -> (u64, [u64; EDGES]);
    /// One bit for each place: whether what is there is ready.
    fn ready(&self, word: usize) -> &AtomicU64;
    /// How many there are; a power of two.
    fn count(&self) -> u64;
    /// Transactions that are committed, with all before them.
    fn committed(&self) -> u64;
}

/// How many are put aside.
#[repr(C)]
#[derive(Debug)]
pub struct Aside {
    /// These are ready. Never less than there are bits.
    ready: Padded,
    /// These wait for another one.
    waiting: Padded,
}

impl Aside {
    /// How many are ready to be taken.
    pub fn ready(&self) -> u64 {
        self.ready.0.load(Ordering::SeqCst)
    }

    /// How many wait for another one.
    pub fn waiting(&self) -> u64 {
        self.waiting.0.load(Ordering::SeqCst)
    }

    /// Put a transaction aside that the caller has in hand, if anything that it needs is missing.
    /// False: nothing is, and it stays in hand. True: it may be in anybody's hands by now.
    pub fn put(&self, places: &impl Places, sequence: u64) -> bool {
        // Counted first: who takes it off counts down.
        self.waiting.0.fetch_add(1, Ordering::SeqCst);
        let is_hung = hang(places, sequence);
        if !is_hung {
            self.waiting.0.fetch_sub(1, Ordering::SeqCst);
        }
        is_hung
    }

    /// Give back a transaction that the caller has in hand and that can be applied.
    pub fn give_back(&self, places: &impl Places, sequence: u64) {
        let (word, bit) = place_of(places, sequence);
        self.ready.0.fetch_add(1, Ordering::SeqCst);
        places.ready(word).fetch_or(bit, Ordering::SeqCst);
    }

    /// What was hung on a transaction that has committed (`close`) is hung on the next that is
    /// missing, or ready. How many are ready.
    pub fn release(&self, places: &impl Places, first: u64) -> u64 {
        let mut ready = 0;
        let mut sequence = first;
        while sequence != 0 {
            // Once it is on another list it is no longer this one's.
            let next = places.next(sequence).load(Ordering::SeqCst);
            if !hang(places, sequence) {
                self.waiting.0.fetch_sub(1, Ordering::SeqCst);
                self.give_back(places, sequence);
                ready += 1;
            }
            sequence = next;
        }
        ready
    }

    /// Take one that is ready: the oldest, or one that was when others came.
    pub fn take(&self, places: &impl Places) -> Option<u64> {
        if self.ready() == 0 {
            return None;
        }
        let (first, oldest) = place_of(places, places.committed() + 1);
        let words = usize::try_from(places.count().div_ceil(64)).unwrap_or(1);
        let from_oldest = !(oldest - 1);
        // The first word at both ends: what is before the oldest one's place there is last.
        for step in 0..=words {
            let number = (first + step) % words;
            let word = places.ready(number);
            let mut bits = word.load(Ordering::SeqCst);
            if step == 0 {
                bits &= from_oldest;
            } else if step == words {
                bits &= !from_oldest;
            }
            while bits != 0 {
                let bit = bits & bits.wrapping_neg();
                bits &= !bit;
                if word.fetch_and(!bit, Ordering::SeqCst) & bit != 0 {
                    self.ready.0.fetch_sub(1, Ordering::SeqCst);
                    let place = number as u64 * 64 + u64::from(bit.trailing_zeros());
                    return Some(owner(places.waiters(place).load(Ordering::SeqCst)));
                }
            }
        }
        None
    }

    /// Whether a transaction is ready, and nobody has taken it.
    pub fn is_ready(&self, places: &impl Places, sequence: u64) -> bool {
        let (word, bit) = place_of(places, sequence);
        places.ready(word).load(Ordering::SeqCst) & bit != 0
    }
}

/// A transaction is committed: nothing waits for it from now on. Returns the last that was hung on
/// it, 0 for none, for [`Aside::release`] once it is marked as done.
pub fn close(places: &impl Places, sequence: u64) -> u64 {
    let closed = empty(sequence) | CLOSED;
    last(places.waiters(sequence).swap(closed, Ordering::SeqCst))
}

/// Which bit of which word.
fn place_of(places: &impl Places, sequence: u64) -> (usize, u64) {
    let place = sequence & (places.count() - 1);
    (usize::try_from(place / 64).unwrap_or(0), 1 << (place % 64))
}

/// Hang a transaction on one that it needs and that is not committed. False when there is none.
fn hang(places: &impl Places, sequence: u64) -> bool {
    let (through, single) = places.needs(sequence);
    if single
        .into_iter()
        .take_while(|edge| *edge != 0)
        .any(|edge| hang_on(places, edge, sequence))
    {
        return true;
    }
    let committed = places.committed();
    // The last first: where it is one that all behind it wait for, all before it are committed when
    // it is.
    through > committed
        && (hang_on(places, through, sequence)
            || (committed + 1..through).any(|missing| hang_on(places, missing, sequence)))
}

/// Hang a transaction on an earlier one. False when that is committed.
fn hang_on(places: &impl Places, missing: u64, sequence: u64) -> bool {
    let list = places.waiters(missing);
    let mut word = list.load(Ordering::SeqCst);
    loop {
        if owner(word) != missing || word & CLOSED == CLOSED {
            return false;
        }
        places.next(sequence).store(last(word), Ordering::SeqCst);
        let with = empty(missing) | (sequence - missing);
        match list.compare_exchange(word, with, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return true,
            Err(now) => word = now,
        }
    }
}

#[cfg(loom)]
impl Aside {
    /// Of a fresh ring.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for the model only")]
    pub fn new() -> Self {
        Self {
            ready: Padded(AtomicU64::new(0)),
            waiting: Padded(AtomicU64::new(0)),
        }
    }
}

/// The word of an empty list, for the model.
#[cfg(loom)]
#[must_use]
pub fn list_of(sequence: u64) -> AtomicU64 {
    AtomicU64::new(empty(sequence))
}
