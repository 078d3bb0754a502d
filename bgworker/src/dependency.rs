//! The dependency tracker (after Alibaba DTS, PVLDB 17(12), 2024, section 5.2): which earlier transactions a transaction
//! must wait for. Run by the leader.
//!
//! Two transactions depend on each other when they share a key hash, or when one of them has a barrier on a table that
//! the other changes. Transactions enter in the provider's commit order under consecutive numbers.
//!
//! Cost per change is constant. Memory is bounded by `capacity` keys: when it is reached, keys of transactions that are
//! committed are forgotten, and when that does not help, everything is, and what follows waits for all before it. A
//! transaction that has more keys than that by itself orders with everything.
//!
//! Not for: deciding which applier does what, or when. While commits follow the provider's order, "the latest
//! predecessor is committed" says that all of them are, so an edge to the latest one is all that a schedule needs; the
//! whole set is kept for schedules in which commits may overtake each other.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Keys are hashes already.
#[derive(Debug, Default, Clone)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        // hashbrown takes the top bits for its tags and the low ones for the bucket; both are good in a good hash.
        self.0 = value;
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Table {
    last_change: u64,
    last_barrier: u64,
}

/// Edges of one transaction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edges {
    /// The latest transaction that this one depends on; 0 for none.
    pub latest: u64,
    /// Each transaction up to this one must be committed, not only those in `all`; 0 for none. What a barrier orders with,
    /// and what was forgotten, is not known one by one.
    pub through: u64,
    /// The transactions that it depends on directly, without repetition, ascending. Together with `through` they are
    /// enough when commits may overtake each other.
    pub all: Vec<u64>,
    /// Whether a barrier was among the reasons.
    pub barrier: bool,
}

/// What the tracker has seen so far, for the views.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Transactions that entered.
    pub transactions: u64,
    /// Transactions that depend on another.
    pub dependent: u64,
    /// Edges.
    pub edges: u64,
    /// Transactions with a barrier among their edges.
    pub barriers: u64,
    /// Times that everything was forgotten to stay within capacity.
    pub resets: u64,
}

/// Tracks which keys were last written by which transaction.
#[derive(Debug)]
pub struct DependencyTracker {
    keys: HashMap<u64, u64, BuildHasherDefault<Identity>>,
    tables: HashMap<u32, Table>,
    capacity: usize,
    /// Everything that enters depends on this one: history before it was forgotten.
    floor: u64,
    current: u64,
    /// What the transaction in hand does. Entered when it is complete: one that is abandoned leaves no trace.
    keys_in_hand: Vec<u64>,
    tables_changed: Vec<u32>,
    tables_barred: Vec<u32>,
    bars_all: bool,
    edges: Vec<u64>,
    through: u64,
    statistics: Statistics,
}

impl DependencyTracker {
    /// A tracker that remembers at most about `capacity` keys (32 bytes each), and as many of the transaction in hand.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            keys: HashMap::default(),
            tables: HashMap::new(),
            capacity: capacity.max(16),
            floor: 0,
            current: 0,
            keys_in_hand: Vec::new(),
            tables_changed: Vec::new(),
            tables_barred: Vec::new(),
            bars_all: false,
            edges: Vec::new(),
            through: 0,
            statistics: Statistics::default(),
        }
    }

    /// A transaction enters. `sequence` is larger than any before; `committed` is the largest up to which all are done.
    pub fn begin(&mut self, sequence: u64, committed: u64) {
        self.current = sequence;
        self.forget();
        if self.keys.len() > self.capacity {
            self.keys.retain(|_, last| *last > committed);
            if self.keys.len() > self.capacity / 2 {
                self.keys.clear();
                self.tables.clear();
                self.floor = sequence - 1;
                self.statistics.resets += 1;
            }
        }
    }

    fn depend_on(&mut self, sequence: u64) {
        if sequence != 0 && sequence != self.current {
            self.edges.push(sequence);
        }
    }

    fn depend_on_all_up_to(&mut self, sequence: u64) {
        self.depend_on(sequence);
        self.through = self.through.max(sequence);
    }

    /// It changes a row of `table`, whose unique keys before and after have these hashes.
    #[inline]
    pub fn change(&mut self, table: u32, hashes: impl Iterator<Item = u64>) {
        if self.bars_all {
            return;
        }
        if self.tables_changed.last() != Some(&table) {
            self.tables_changed.push(table);
        }
        self.keys_in_hand.extend(hashes);
        if self.keys_in_hand.len().max(self.tables_changed.len()) > self.capacity {
            // Too many to keep: it orders with everything, then.
            self.barrier_for_all();
        }
    }

    /// It does something to `table` that can't be keyed: it orders with every other change of the table.
    pub fn barrier(&mut self, table: u32) {
        if !self.bars_all && !self.tables_barred.contains(&table) {
            self.tables_barred.push(table);
        }
    }

    /// It is a barrier for everything: it depends on all before it, and all after it depend on it.
    pub fn barrier_for_all(&mut self) {
        self.forget();
        self.bars_all = true;
    }

    /// The transaction is complete.
    pub fn finish(&mut self) -> Edges {
        let current = self.current;
        self.edges.clear();
        self.through = 0;
        self.depend_on_all_up_to(self.floor);
        let barrier = self.bars_all || !self.tables_barred.is_empty();
        if self.bars_all {
            self.keys.clear();
            self.tables.clear();
            self.depend_on_all_up_to(current - 1);
            self.floor = current;
        }
        for table in std::mem::take(&mut self.tables_barred) {
            let entry = self.tables.entry(table).or_default();
            let last_change = entry.last_change;
            *entry = Table {
                last_change: current,
                last_barrier: current,
            };
            self.depend_on_all_up_to(last_change);
        }
        let mut tables = std::mem::take(&mut self.tables_changed);
        for table in tables.drain(..) {
            let entry = self.tables.entry(table).or_default();
            let last_barrier = entry.last_barrier;
            entry.last_change = current;
            self.depend_on(last_barrier);
        }
        self.tables_changed = tables;
        let mut keys = std::mem::take(&mut self.keys_in_hand);
        for key in keys.drain(..) {
            if let Some(previous) = self.keys.insert(key, current) {
                self.depend_on(previous);
            }
        }
        self.keys_in_hand = keys;
        self.edges.sort_unstable();
        self.edges.dedup();
        let edges = Edges {
            latest: self.edges.last().copied().unwrap_or(0),
            through: self.through,
            all: self.edges.clone(),
            barrier,
        };
        self.forget();
        self.statistics.transactions += 1;
        self.statistics.dependent += u64::from(!edges.all.is_empty());
        self.statistics.edges += edges.all.len() as u64;
        self.statistics.barriers += u64::from(edges.barrier);
        edges
    }

    /// The transaction in hand will not be applied after all: its number is used again.
    pub fn abandon(&mut self) {
        self.forget();
    }

    fn forget(&mut self) {
        self.keys_in_hand.clear();
        self.tables_changed.clear();
        self.tables_barred.clear();
        self.bars_all = false;
    }

    /// What was seen so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(tracker: &mut DependencyTracker, sequence: u64, keys: &[u64]) -> Edges {
        tracker.begin(sequence, 0);
        tracker.change(1, keys.iter().copied());
        tracker.finish()
    }

    #[test]
    fn independent_transactions_have_no_edges() {
        let mut tracker = DependencyTracker::new(100);
        for sequence in 1..10 {
            assert_eq!(enter(&mut tracker, sequence, &[sequence]).latest, 0);
        }
    }

    #[test]
    fn a_shared_key_is_an_edge_to_its_last_writer() {
        let mut tracker = DependencyTracker::new(100);
        enter(&mut tracker, 1, &[7]);
        enter(&mut tracker, 2, &[8]);
        assert_eq!(enter(&mut tracker, 3, &[7]).all, [1]);
        assert_eq!(enter(&mut tracker, 4, &[7, 8]).all, [2, 3]);
    }

    #[test]
    fn a_key_written_twice_in_one_transaction_is_no_edge_to_itself() {
        let mut tracker = DependencyTracker::new(100);
        tracker.begin(1, 0);
        tracker.change(1, [5].into_iter());
        tracker.change(1, [5].into_iter());
        assert_eq!(tracker.finish().all, [] as [u64; 0]);
    }

    #[test]
    fn a_barrier_orders_with_its_table_only() {
        let mut tracker = DependencyTracker::new(100);
        enter(&mut tracker, 1, &[1]);
        tracker.begin(2, 0);
        tracker.change(2, [9].into_iter());
        tracker.finish();
        tracker.begin(3, 0);
        tracker.barrier(1);
        assert_eq!(tracker.finish().all, [1]);
        assert_eq!(enter(&mut tracker, 4, &[44]).all, [3]);
        tracker.begin(5, 0);
        tracker.change(2, [10].into_iter());
        assert_eq!(tracker.finish().latest, 0);
    }

    #[test]
    fn memory_is_bounded_and_forgetting_is_safe() {
        let mut tracker = DependencyTracker::new(64);
        for sequence in 1..10_000 {
            enter(&mut tracker, sequence, &[sequence]);
            assert!(tracker.keys.len() <= 66);
        }
        assert!(tracker.statistics().resets > 0);
        // The last writer of key 1 was forgotten: then everything depends on the point of forgetting.
        assert!(enter(&mut tracker, 10_000, &[1]).latest >= tracker.floor);
        assert!(tracker.floor > 1);
    }

    #[test]
    fn i9_one_huge_transaction_is_bounded_too() {
        let mut tracker = DependencyTracker::new(64);
        enter(&mut tracker, 1, &[1]);
        enter(&mut tracker, 2, &[2]);
        tracker.begin(3, 0);
        for key in 0..100_000 {
            tracker.change(1, [key].into_iter());
            assert!(tracker.keys_in_hand.len() <= 65 && tracker.keys.len() <= 66);
        }
        let edges = tracker.finish();
        assert_eq!((edges.latest, edges.through, edges.barrier), (2, 2, true));
        assert_eq!(enter(&mut tracker, 4, &[1_000_000]).latest, 3);
    }

    #[test]
    fn an_abandoned_transaction_hides_nothing() {
        let mut tracker = DependencyTracker::new(100);
        enter(&mut tracker, 1, &[7]);
        tracker.begin(2, 0);
        tracker.change(1, [7].into_iter());
        tracker.abandon();
        assert_eq!(enter(&mut tracker, 2, &[7]).all, [1]);
        // The same for tables.
        tracker.begin(3, 0);
        tracker.change(1, [8].into_iter());
        tracker.barrier(1);
        tracker.abandon();
        tracker.begin(3, 0);
        tracker.barrier(1);
        assert_eq!(tracker.finish().all, [2]);
        // And for a barrier for all.
        tracker.begin(4, 0);
        tracker.barrier_for_all();
        tracker.abandon();
        assert_eq!(enter(&mut tracker, 4, &[7]).all, [2, 3]);
    }

    #[test]
    fn a_barrier_waits_for_all_changes_of_its_table() {
        let mut tracker = DependencyTracker::new(100);
        enter(&mut tracker, 1, &[1]);
        enter(&mut tracker, 2, &[2]);
        tracker.begin(3, 0);
        tracker.barrier(1);
        let edges = tracker.finish();
        assert_eq!(
            (edges.latest, edges.through),
            (2, 2),
            "1 too must be committed"
        );
    }
}
