//! Width of the graph of transactions in flight: how many of them could run in parallel with enough
//! appliers. Computed now and then by the leader, for the views.
//!
//! The width is the number of transactions in flight divided by the longest chain among them (work
//! over span): 1 for updates of one row, their number for transactions that share nothing.
//!
//! Each transaction remembers only one of its dependencies: the one with the longest chain when it
//! entered. As commits shorten chains, another dependency may become the longest. So a chain may be
//! measured too short, but never too long.

use super::Edges;

/// Transactions that are remembered, a power of two. Older waiting transactions are not counted.
const REMEMBERED: usize = 1 << 14;

#[derive(Debug, Clone, Copy, Default)]
struct Link {
    sequence: u64,
    /// The remembered dependency; 0 for none.
    behind: u64,
    /// Length of the transaction's chain when it entered, itself included.
    chain: u32,
}

/// Transactions in flight, and their longest chain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Width {
    /// Number of transactions that are not committed.
    pub in_flight: u64,
    /// Length of the longest chain: each of its transactions waits for the one before.
    pub chain: u64,
}

impl Width {
    /// Returns how many transactions could run in parallel; 0 if none is in flight.
    #[must_use]
    pub fn side_by_side(self) -> u64 {
        self.in_flight.div_ceil(self.chain.max(1))
    }
}

/// Chains of the latest transactions.
#[derive(Debug)]
pub(super) struct Chains {
    links: Vec<Link>,
    /// The transaction with the longest chain of those that may be in flight.
    deepest: Link,
    last: u64,
}

impl Chains {
    pub(super) fn new() -> Self {
        Self {
            links: vec![Link::default(); REMEMBERED],
            deepest: Link::default(),
            last: 0,
        }
    }

    fn place(sequence: u64) -> usize {
        usize::try_from(sequence).unwrap_or(usize::MAX) % REMEMBERED
    }

    fn link(&self, sequence: u64) -> Option<&Link> {
        self.links
            .get(Self::place(sequence))
            .filter(|link| link.sequence == sequence && sequence != 0)
    }

    /// Adds a transaction with these edges; all up to `committed` are committed.
    pub(super) fn enter(&mut self, sequence: u64, committed: u64, edges: &Edges<'_>) {
        if self.deepest.sequence <= committed {
            self.deepest = Link::default();
        }
        let mut behind = Link::default();
        if edges.through != 0 {
            behind = if self.deepest.sequence <= edges.through {
                self.deepest
            } else {
                self.link(edges.through).copied().unwrap_or_default()
            };
        }
        for edge in edges.all {
            if let Some(link) = self.link(*edge).filter(|link| link.chain > behind.chain) {
                behind = *link;
            }
        }
        let link = Link {
            sequence,
            behind: behind.sequence,
            chain: behind.chain.saturating_add(1),
        };
        if link.chain >= self.deepest.chain {
            self.deepest = link;
        }
        if let Some(place) = self.links.get_mut(Self::place(sequence)) {
            *place = link;
        }
        self.last = sequence;
    }

    /// Returns the width if all transactions up to `committed` are committed.
    pub(super) fn width(&self, committed: u64) -> Width {
        let from = committed.max(self.last.saturating_sub(REMEMBERED as u64));
        let mut chains: Vec<u64> = Vec::new();
        let mut longest = 0;
        for sequence in from + 1..=self.last {
            let behind = self.link(sequence).map_or(0, |link| link.behind);
            let before = behind
                .checked_sub(from + 1)
                .and_then(|at| chains.get(usize::try_from(at).ok()?))
                .copied()
                .unwrap_or(0);
            chains.push(before + 1);
            longest = longest.max(before + 1);
        }
        Width {
            in_flight: chains.len() as u64,
            chain: longest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(chains: &mut Chains, sequence: u64, committed: u64, through: u64, all: &[u64]) {
        let edges = Edges {
            latest: all.last().copied().unwrap_or(through),
            through,
            all,
            barrier: through != 0,
        };
        chains.enter(sequence, committed, &edges);
    }

    fn seen(chains: &Chains, committed: u64) -> (u64, u64, u64) {
        let width = chains.width(committed);
        (width.in_flight, width.chain, width.side_by_side())
    }

    #[test]
    fn what_shares_nothing_is_as_wide_as_it_is_long() {
        let mut chains = Chains::new();
        assert_eq!(seen(&chains, 0), (0, 0, 0));
        for sequence in 1..=100 {
            enter(&mut chains, sequence, 0, 0, &[]);
        }
        assert_eq!(seen(&chains, 0), (100, 1, 100));
        assert_eq!(seen(&chains, 60), (40, 1, 40));
        assert_eq!(seen(&chains, 100), (0, 0, 0));
    }

    #[test]
    fn a_hot_row_is_one_wide() {
        let mut chains = Chains::new();
        for sequence in 1..=100_u64 {
            let committed = sequence.saturating_sub(50);
            let before = sequence - 1;
            let edges: &[u64] = if before > committed { &[before] } else { &[] };
            enter(&mut chains, sequence, committed, 0, edges);
        }
        assert_eq!(seen(&chains, 50), (50, 50, 1));
        assert_eq!(seen(&chains, 99), (1, 1, 1));
    }

    #[test]
    fn a_barrier_is_behind_the_longest_chain() {
        let mut chains = Chains::new();
        for sequence in 1..=10 {
            enter(&mut chains, sequence, 0, 0, &[]);
        }
        enter(&mut chains, 11, 0, 0, &[3]);
        enter(&mut chains, 12, 0, 11, &[]);
        for sequence in 13..=20 {
            enter(&mut chains, sequence, 0, 12, &[]);
        }
        // One of ten, one behind it, the barrier, and one of eight behind that.
        assert_eq!(seen(&chains, 0), (20, 4, 5));
        assert_eq!(seen(&chains, 12), (8, 1, 8));
    }

    #[test]
    fn what_waits_too_long_is_left_out() {
        let mut chains = Chains::new();
        let last = REMEMBERED as u64 + 500;
        for sequence in 1..=last {
            enter(&mut chains, sequence, 0, 0, &[]);
        }
        assert_eq!(chains.width(0).in_flight, REMEMBERED as u64);
    }
}
