//! Wait lists: where a transaction waits for a dependency that is not committed yet. Run by the
//! appliers, in relaxed commit order.
//!
//! If an applier waited with a transaction for its dependency, all appliers could end up waiting.
//! So an applier that has claimed a transaction T with an unmet dependency D enqueues T on D's wait
//! list, and claims another transaction. Committing D takes three steps:
//!
//! 1. One atomic exchange detaches D's wait list and closes it (`close`).
//! 2. D is marked as done (`ring.rs`).
//! 3. Each transaction of the list is enqueued on its next unmet dependency, or becomes *ready* if
//!    it has none ([`Aside::release`]).
//!
//! Any applier may take a ready transaction, and does so before it claims a new one. So a
//! transaction is in one place at any time: with an applier, on the wait list of an uncommitted
//! transaction, or ready.
//!
//! The word of a list holds its owner's sequence number, which transaction was enqueued last, and
//! whether the list is closed. Because step 1 comes before step 2, D's commit finds every
//! transaction that was enqueued on D, and none can be enqueued afterwards. A list is only detached
//! as a whole, so its links stay valid. A place that is used again has another sequence number in
//! its word. So it cannot be mistaken for the list of its previous owner (no ABA).
//!
//! This module does not know the layout of shared memory, so that loom can check it
//! (`tests/loom.rs`).

use crate::sync::{AtomicU64, Ordering};
use crate::wake::Padded;

/// Number of single dependencies that a transaction can have in relaxed order. A descriptor's
/// second cache line has room for that many. A transaction with more of them depends on all up to
/// the last of the others instead (`through`).
pub const EDGES: usize = 6;

/// Number of lower bits of a list's word. They hold how many sequence numbers after the owner the
/// transaction comes that was enqueued last; 0 for an empty list.
const OFFSET_BITS: u32 = 21;
/// Value of the lower bits of a closed list: its owner is committed.
const CLOSED: u64 = (1 << OFFSET_BITS) - 1;

/// Returns the word of an empty list. The leader writes it before it publishes the transaction.
pub(crate) fn empty(sequence: u64) -> u64 {
    sequence << OFFSET_BITS
}

/// Returns the sequence number of the transaction that a list belongs to.
fn owner(word: u64) -> u64 {
    word >> OFFSET_BITS
}

/// Returns the transaction that was enqueued last; 0 for none.
fn last(word: u64) -> u64 {
    match word & CLOSED {
        0 | CLOSED => 0,
        offset => owner(word) + offset,
    }
}

/// Access to the places of the transactions in flight, by sequence number. Each place is used again
/// by the transaction that is [`count`](Self::count) numbers later.
pub trait Places {
    /// The wait list of a transaction.
    fn waiters(&self, sequence: u64) -> &AtomicU64;
    /// The next transaction on the wait list that a transaction is on; 0 for none.
    fn next(&self, sequence: u64) -> &AtomicU64;
    /// Dependencies of a transaction: all up to the first number, and each of the array, up to its
    /// first 0. They must be committed before it is applied.
    fn needs(&self, sequence: u64) -> (u64, [u64; EDGES]);
    /// Bits of 64 places: 1 if the transaction in the place is ready.
    fn ready(&self, word: usize) -> &AtomicU64;
    /// Number of places; a power of two.
    fn count(&self) -> u64;
    /// Low-water mark: the last transaction that is committed with all before it.
    fn committed(&self) -> u64;
}

/// Counts of the transactions that are on wait lists or ready.
#[repr(C)]
#[derive(Debug)]
pub struct Aside {
    /// Ready transactions. At least the number of bits that are set.
    ready: Padded,
    /// Transactions on wait lists.
    waiting: Padded,
}

impl Aside {
    /// Returns the number of ready transactions.
    pub fn ready(&self) -> u64 {
        self.ready.0.load(Ordering::SeqCst)
    }

    /// Returns the number of transactions on wait lists.
    pub fn waiting(&self) -> u64 {
        self.waiting.0.load(Ordering::SeqCst)
    }

    /// Enqueues a transaction of the caller on an unmet dependency. Returns false if it has none:
    /// then the caller keeps it. After true, another applier may have taken it already.
    pub fn put(&self, places: &impl Places, sequence: u64) -> bool {
        // Counted first: the commit that takes it off the list counts down.
        self.waiting.0.fetch_add(1, Ordering::SeqCst);
        let is_hung = hang(places, sequence);
        if !is_hung {
            self.waiting.0.fetch_sub(1, Ordering::SeqCst);
        }
        is_hung
    }

    /// Makes a transaction of the caller ready, so that any applier can take it. Its dependencies
    /// are met.
    pub fn give_back(&self, places: &impl Places, sequence: u64) {
        let (word, bit) = place_of(places, sequence);
        self.ready.0.fetch_add(1, Ordering::SeqCst);
        places.ready(word).fetch_or(bit, Ordering::SeqCst);
    }

    /// Goes through the list that `close` has detached, from `first` on. Enqueues each transaction
    /// on its next unmet dependency, or makes it ready if it has none. Returns how many became
    /// ready.
    pub fn release(&self, places: &impl Places, first: u64) -> u64 {
        let mut ready = 0;
        let mut sequence = first;
        while sequence != 0 {
            // Read first: once the transaction is on another list, its link belongs to that list.
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

    /// Takes a ready transaction: the oldest. If others become ready meanwhile, it may be a newer
    /// one.
    pub fn take(&self, places: &impl Places) -> Option<u64> {
        if self.ready() == 0 {
            return None;
        }
        let (first, oldest) = place_of(places, places.committed() + 1);
        let words = usize::try_from(places.count().div_ceil(64)).unwrap_or(1);
        let from_oldest = !(oldest - 1);
        // The first word is visited twice: its bits below the oldest transaction's place come last.
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

    /// Returns whether a transaction is ready and not taken.
    pub fn is_ready(&self, places: &impl Places, sequence: u64) -> bool {
        let (word, bit) = place_of(places, sequence);
        places.ready(word).load(Ordering::SeqCst) & bit != 0
    }
}

/// Closes the wait list of a transaction that is committed: nothing can be enqueued on it from now
/// on. Returns the transaction that was enqueued last, 0 for none. The caller passes it to
/// [`Aside::release`] after it has marked the committed transaction as done.
pub fn close(places: &impl Places, sequence: u64) -> u64 {
    let closed = empty(sequence) | CLOSED;
    last(places.waiters(sequence).swap(closed, Ordering::SeqCst))
}

/// Returns the index of the word and the bit of a transaction's place.
fn place_of(places: &impl Places, sequence: u64) -> (usize, u64) {
    let place = sequence & (places.count() - 1);
    (usize::try_from(place / 64).unwrap_or(0), 1 << (place % 64))
}

/// Enqueues a transaction on an unmet dependency. Returns false if it has none.
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
    // The last one first. If it depends on all before it, they are all committed once it is.
    through > committed
        && (hang_on(places, through, sequence)
            || (committed + 1..through).any(|missing| hang_on(places, missing, sequence)))
}

/// Enqueues a transaction on an earlier one, `missing`. Returns false if that one is committed.
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
    /// Counts of a fresh ring.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for the model only")]
    pub fn new() -> Self {
        Self {
            ready: Padded(AtomicU64::new(0)),
            waiting: Padded(AtomicU64::new(0)),
        }
    }
}

/// Returns the word of an empty list, for the model.
#[cfg(loom)]
#[must_use]
pub fn list_of(sequence: u64) -> AtomicU64 {
    AtomicU64::new(empty(sequence))
}
