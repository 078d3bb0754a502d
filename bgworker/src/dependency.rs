//! The dependency tracker (after Alibaba DTS, PVLDB 17(12), 2024, section 5.2): which earlier
//! transactions a transaction must wait for. Run by the leader.
//!
//! Two transactions depend on each other if they share a key hash, or if one of them has a barrier
//! on a table that the other changes. Transactions enter in the provider's commit order with
//! increasing numbers. DTS compares a transaction with each waiting one. This tracker stores the
//! last writer of each key, and the last change and barrier of each table.
//!
//! A change costs one cache line per key, regardless of how many transactions wait. Memory is fixed
//! by [`DependencyTracker::new`]. If it does not suffice, the oldest key of a cache line is
//! forgotten. Transactions that may have had that key wait for its writer and everything before
//! (`recent_writers`). Nothing is ever swept, rehashed or cleared, so no transaction pays for
//! others. A transaction with more keys than the capacity orders with everything.
//!
//! Not for: deciding which applier does what, or when; finding out which tables need barriers. The
//! provider marks barriers for its keys, [`crate::table_order`] those that the local table needs in
//! addition.

mod recent_writers;
mod table_book;
mod width;

use recent_writers::{RecentWriters, Writer};
use table_book::TableBook;
use width::Chains;
pub use width::Width;

/// Duplicate edges are removed when there are this many edges, and again each time that they have
/// doubled.
const MANY_EDGES: usize = 64;

/// Edges of one transaction, without those to transactions that were committed when it entered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Edges<'t> {
    /// The latest transaction that this one depends on; 0 for none. If commits follow the
    /// provider's order, all dependencies are committed once the latest is, so such a schedule
    /// needs only this field.
    pub latest: u64,
    /// Every transaction up to this one must be committed; 0 for none. Dependencies by barriers and
    /// forgotten keys are only known as such ranges.
    pub through: u64,
    /// The transactions after `through` that must be committed, ascending, without duplicates. If
    /// commits may overtake each other, a schedule needs `through` and these.
    pub all: &'t [u64],
    /// Whether one of the edges comes from a barrier.
    pub barrier: bool,
}

impl<'t> Edges<'t> {
    /// Limits the single edges to `most`, for callers without room for more. The result is the same
    /// order or a stricter one: the earliest edges become part of `through`.
    #[must_use]
    pub fn at_most(self, most: usize) -> Self {
        let Some(surplus) = self.all.len().checked_sub(most).filter(|some| *some > 0) else {
            return self;
        };
        let (joined, kept) = self.all.split_at_checked(surplus).unwrap_or_default();
        Self {
            through: joined.last().copied().unwrap_or(self.through),
            all: kept,
            ..self
        }
    }
}

/// Counters of the tracker, for the views.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Transactions that entered.
    pub transactions: u64,
    /// Transactions that had to wait for another when they entered.
    pub dependent: u64,
    /// Edges: one for each single transaction, and one for a whole range (`through`).
    pub edges: u64,
    /// Transactions with a barrier.
    pub barriers: u64,
    /// Transactions with a barrier for everything.
    pub barriers_for_all: u64,
    /// Keys entered.
    pub keys: u64,
    /// Keys of transactions that were not committed yet, forgotten to stay within capacity.
    pub forgotten: u64,
    /// Transactions that order with everything because they have too many keys or tables.
    pub too_large: u64,
}

/// Tracks which transaction wrote each key last.
#[derive(Debug)]
pub struct DependencyTracker {
    writers: RecentWriters,
    tables: TableBook,
    capacity: usize,
    /// Every entering transaction depends on everything up to this one, so nothing before it is
    /// kept.
    floor: u64,
    current: u64,
    /// All transactions up to this one were committed when the current transaction entered.
    committed: u64,
    /// The larger of `committed` and `floor`: edges up to here add nothing.
    horizon: u64,
    /// Keys of the current transaction. They are entered once it is complete, so an abandoned
    /// transaction leaves no trace.
    keys_in_hand: Vec<u64>,
    bars_all: bool,
    edges: EdgeList,
    chains: Chains,
    statistics: Statistics,
}

impl DependencyTracker {
    /// Returns a tracker that remembers up to about `capacity` keys (at most 19 bytes each,
    /// allocated at once), and as many of the current transaction (8 bytes each).
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(16);
        Self {
            writers: RecentWriters::new(capacity),
            tables: TableBook::new(capacity),
            capacity,
            floor: 0,
            current: 0,
            committed: 0,
            horizon: 0,
            keys_in_hand: Vec::new(),
            bars_all: false,
            edges: EdgeList::default(),
            chains: Chains::new(),
            statistics: Statistics::default(),
        }
    }

    /// Starts a transaction. `sequence` is larger than that of any earlier one that was not
    /// abandoned; all transactions up to `committed` are committed.
    pub fn begin(&mut self, sequence: u64, committed: u64) {
        self.current = sequence;
        self.forget_hand();
        if self.tables.is_full() || sequence.saturating_sub(committed) > RecentWriters::WINDOW {
            self.tables.clear();
            self.floor = sequence.saturating_sub(1);
        }
        self.committed = committed;
        self.horizon = committed.max(self.floor);
    }

    /// Adds a change of a row of `table`; `hashes` are those of the row's unique keys before and
    /// after. `table` is any number that identifies the target table.
    #[inline]
    pub fn change(&mut self, table: u32, hashes: impl Iterator<Item = u64>) {
        if self.bars_all {
            return;
        }
        match self.tables.touch(table) {
            // The barrier already covers all edges of these keys.
            Some(true) => return,
            Some(false) => self.keys_in_hand.extend(hashes),
            None => return self.too_large(),
        }
        if self.keys_in_hand.len() > self.capacity {
            self.too_large();
        }
    }

    /// Adds a change of `table` that has no key: the transaction orders with every other change of
    /// the table.
    #[inline]
    pub fn barrier(&mut self, table: u32) {
        if !self.bars_all && !self.tables.bar(table) {
            self.too_large();
        }
    }

    /// Makes the transaction a barrier for everything: it depends on all earlier ones, and all
    /// later ones depend on it.
    pub fn barrier_for_all(&mut self) {
        self.forget_hand();
        self.bars_all = true;
    }

    /// Makes the transaction a barrier for everything as it is too large to be tracked, or to be
    /// buffered whole.
    pub fn too_large(&mut self) {
        if !self.bars_all {
            self.statistics.too_large += 1;
        }
        self.barrier_for_all();
    }

    /// Completes the transaction and returns its edges.
    pub fn finish(&mut self) -> Edges<'_> {
        let Self {
            writers,
            tables,
            edges,
            statistics,
            ..
        } = self;
        let current = self.current;
        edges.start(current, self.horizon);
        if self.floor > self.committed {
            edges.through = self.floor;
        }
        let mut barrier = self.bars_all;
        if self.bars_all {
            edges.add_all_up_to(current.saturating_sub(1));
            self.floor = current;
        } else {
            tables.each_in_hand(|table| {
                barrier |= table.barred;
                match (table.barred, table.last_change == table.last_barrier) {
                    // The last change is a barrier too, so it orders with all changes before it.
                    (true, true) | (false, _) => edges.add(table.last_barrier),
                    (true, false) => edges.add_all_up_to(table.last_change),
                }
                table.last_change = current;
                if table.barred {
                    table.last_barrier = current;
                }
            });
            writers.start(current, self.horizon);
            for key in &self.keys_in_hand {
                match writers.replace(*key) {
                    Writer::None => {}
                    Writer::Known(writer) => edges.add(writer),
                    Writer::UpTo(writer) => edges.add_all_up_to(writer),
                }
            }
            statistics.keys += self.keys_in_hand.len() as u64;
            statistics.forgotten = writers.forgotten();
        }
        self.keys_in_hand.clear();
        self.statistics.barriers_for_all += u64::from(self.bars_all);
        self.bars_all = false;
        self.tables.let_go();
        let edges = self.edges.finish(barrier);
        self.chains.enter(current, self.committed, &edges);
        self.statistics.transactions += 1;
        self.statistics.dependent += u64::from(edges.latest != 0);
        self.statistics.edges += edges.all.len() as u64 + u64::from(edges.through != 0);
        self.statistics.barriers += u64::from(barrier);
        edges
    }

    /// Abandons the current transaction: it will not be applied, and its number is used again.
    pub fn abandon(&mut self) {
        self.forget_hand();
    }

    fn forget_hand(&mut self) {
        self.keys_in_hand.clear();
        self.tables.let_go();
        self.bars_all = false;
    }

    /// Returns the width of the graph of the transactions that entered and are not committed; all
    /// up to `committed` are. Costs some nanoseconds for each.
    #[must_use]
    pub fn width(&self, committed: u64) -> Width {
        self.chains.width(committed)
    }

    /// Returns the counters.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }
}

/// Edges of the current transaction.
#[derive(Debug, Default)]
struct EdgeList {
    current: u64,
    horizon: u64,
    through: u64,
    all: Vec<u64>,
    /// Number of edges at which duplicates are removed.
    many: usize,
}

impl EdgeList {
    fn start(&mut self, current: u64, horizon: u64) {
        (self.current, self.horizon) = (current, horizon);
        self.through = 0;
        self.all.clear();
        self.many = MANY_EDGES;
    }

    #[inline]
    fn add(&mut self, writer: u64) {
        if writer <= self.horizon || writer == self.current || self.all.last() == Some(&writer) {
            return;
        }
        self.all.push(writer);
        if self.all.len() > self.many {
            // At most as many edges stay as there are waiting transactions.
            self.all.sort_unstable();
            self.all.dedup();
            self.many = (2 * self.all.len()).max(MANY_EDGES);
        }
    }

    #[inline]
    fn add_all_up_to(&mut self, writer: u64) {
        if writer > self.horizon && writer != self.current {
            self.through = self.through.max(writer);
        }
    }

    fn finish(&mut self, barrier: bool) -> Edges<'_> {
        if self.all.len() > 1 {
            self.all.sort_unstable();
            self.all.dedup();
        }
        let covered = self.all.partition_point(|edge| *edge <= self.through);
        let all = self.all.get(covered..).unwrap_or_default();
        Edges {
            latest: all.last().copied().unwrap_or(self.through),
            through: self.through,
            all,
            barrier,
        }
    }
}

#[cfg(test)]
mod tests;
