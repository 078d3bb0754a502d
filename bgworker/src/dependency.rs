//! The dependency tracker (after Alibaba DTS, PVLDB 17(12), 2024, section 5.2): which earlier
//! transactions a transaction must wait for. Run by the leader.
//!
//! Two transactions depend on each other when they share a key hash, or when one of them has a
//! barrier on a table that the other changes. Transactions enter in the provider's commit order
//! under numbers that grow. DTS compares a transaction with each one that waits; here each key
//! knows its last writer, and each table its last change and its last barrier.
//!
//! The price of a change is one cache line per key, however many transactions wait. Memory is what
//! [`DependencyTracker::new`] is given: where it does not suffice, the oldest key of a cache line
//! is forgotten, and those that may have had it wait for its writer and all before
//! (`recent_writers`). Nothing is ever swept, rehashed or cleared, so no transaction pays for
//! others. A transaction that has more keys than fit by itself orders with everything.
//!
//! Not for: deciding which applier does what, or when; finding out which tables need barriers: the
//! provider says so of its keys, [`crate::table_order`] of what this node's table has besides.

mod recent_writers;
mod table_book;
mod width;

use recent_writers::{RecentWriters, Writer};
use table_book::TableBook;
use width::Chains;
pub use width::Width;

/// Edges are rid of repetitions when there are this many, and then each time that they have
/// doubled.
const MANY_EDGES: usize = 64;

/// Edges of one transaction. Those to transactions that were committed when it entered are left
/// out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Edges<'t> {
    /// The latest transaction that this one depends on; 0 for none. While commits follow the
    /// provider's order, "the latest is committed" says that all are: it is all that such a
    /// schedule needs.
    pub latest: u64,
    /// Each transaction up to this one must be committed; 0 for none. What a barrier orders with,
    /// and what was forgotten, is not known one by one.
    pub through: u64,
    /// The transactions after `through` that must be committed, without repetition, ascending.
    /// `through` and these are enough when commits may overtake each other.
    pub all: &'t [u64],
    /// Whether a barrier was among the reasons.
    pub barrier: bool,
}

impl<'t> Edges<'t> {
    /// The same order or a stricter one in at most `most` single edges, for whoever has no room for
    /// more: the earliest ones become part of `through`.
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

/// What the tracker has seen so far, for the views.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Transactions that entered.
    pub transactions: u64,
    /// Transactions that had to wait for another when they entered.
    pub dependent: u64,
    /// Edges: to single transactions, and one for all that a barrier or forgotten keys stand for.
    pub edges: u64,
    /// Transactions with a barrier.
    pub barriers: u64,
    /// Those of them whose barrier was for everything.
    pub barriers_for_all: u64,
    /// Keys entered.
    pub keys: u64,
    /// Keys of transactions that were not committed yet, forgotten to stay within capacity.
    pub forgotten: u64,
    /// Transactions that order with everything since they have too many keys or tables.
    pub too_large: u64,
}

/// Tracks which keys were last written by which transaction.
#[derive(Debug)]
pub struct DependencyTracker {
    writers: RecentWriters,
    tables: TableBook,
    capacity: usize,
    /// All that enters depends on everything up to this one, so nothing before it has to be known.
    floor: u64,
    current: u64,
    /// All up to this one were committed when the transaction in hand entered.
    committed: u64,
    /// What is committed, or up to `floor`: further edges up to here say nothing.
    horizon: u64,
    /// What the transaction in hand does, beside its tables. Entered when it is complete: one that
    /// is abandoned leaves no trace.
    keys_in_hand: Vec<u64>,
    bars_all: bool,
    edges: EdgeList,
    chains: Chains,
    statistics: Statistics,
}

impl DependencyTracker {
    /// A tracker that remembers up to about `capacity` keys (at most 19 bytes each, taken at once),
    /// and as many of the transaction in hand (8 bytes each).
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

    /// A transaction enters. `sequence` is larger than any before that was not abandoned;
    /// `committed` is the largest up to which all are done.
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

    /// It changes a row of `table`, whose unique keys before and after have these hashes. `table`
    /// is any number that stands for the table to which changes go.
    #[inline]
    pub fn change(&mut self, table: u32, hashes: impl Iterator<Item = u64>) {
        if self.bars_all {
            return;
        }
        match self.tables.touch(table) {
            // The barrier orders with all that these keys would.
            Some(true) => return,
            Some(false) => self.keys_in_hand.extend(hashes),
            None => return self.too_large(),
        }
        if self.keys_in_hand.len() > self.capacity {
            self.too_large();
        }
    }

    /// It does something to `table` that can't be keyed: it orders with every other change of the
    /// table.
    #[inline]
    pub fn barrier(&mut self, table: u32) {
        if !self.bars_all && !self.tables.bar(table) {
            self.too_large();
        }
    }

    /// It is a barrier for everything: it depends on all before it, and all after it depend on it.
    pub fn barrier_for_all(&mut self) {
        self.forget_hand();
        self.bars_all = true;
    }

    /// The same, since it is too large: to be tracked, or to be held whole.
    pub fn too_large(&mut self) {
        if !self.bars_all {
            self.statistics.too_large += 1;
        }
        self.barrier_for_all();
    }

    /// The transaction is complete.
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
                    // All before the last change are ordered by that one, which is a barrier too.
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

    /// The transaction in hand will not be applied after all: its number is used again.
    pub fn abandon(&mut self) {
        self.forget_hand();
    }

    fn forget_hand(&mut self) {
        self.keys_in_hand.clear();
        self.tables.let_go();
        self.bars_all = false;
    }

    /// How wide the graph of those is that entered and are not committed; all up to `committed`
    /// are. Costs some nanoseconds for each.
    #[must_use]
    pub fn width(&self, committed: u64) -> Width {
        self.chains.width(committed)
    }

    /// What was seen so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }
}

/// The edges of the transaction in hand.
#[derive(Debug, Default)]
struct EdgeList {
    current: u64,
    horizon: u64,
    through: u64,
    all: Vec<u64>,
    /// To look for repetitions at this length.
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
            // At most as many stay as there are transactions that wait.
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
