//! Checks that transactions arrive in the order of their commits, each once.
//!
//! A stored position claims that all earlier transactions are committed locally. So a transaction
//! that arrives after a later one would be lost once the later one is applied: no restart would
//! ask for it again. A transaction that arrives twice is harmless: it only has to be skipped.

use std::collections::VecDeque;

/// Number of commits that are remembered.
const REMEMBERED: usize = 4096;

/// How a commit relates to those that arrived before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// The transaction follows all that have arrived.
    Next,
    /// The transaction arrived before, or ends before the start of the stream: nothing is missing.
    Again,
    /// The transaction is new, but a later one, which ends at this LSN, has already arrived.
    Late(u64),
}

/// The commits of a stream that have arrived.
#[derive(Debug)]
pub struct CommitSequence {
    start: u64,
    last_end: u64,
    /// Start LSNs of the last commit records, in ascending order.
    recent: VecDeque<u64>,
}

impl CommitSequence {
    /// Returns the state of a stream that was requested from `start` on.
    #[must_use]
    pub fn new(start: u64) -> Self {
        Self {
            start,
            last_end: 0,
            recent: VecDeque::with_capacity(REMEMBERED),
        }
    }

    /// Returns the end LSN of the last transaction that has arrived, 0 for none.
    #[must_use]
    pub fn last_end(&self) -> u64 {
        self.last_end
    }

    /// Classifies a complete transaction whose commit record starts at `lsn` and ends at `end_lsn`.
    /// Remembers it if it is the next.
    pub fn arrive(&mut self, lsn: u64, end_lsn: u64) -> Arrival {
        if lsn >= self.last_end {
            if self.recent.len() == REMEMBERED {
                self.recent.pop_front();
            }
            self.recent.push_back(lsn);
            self.last_end = end_lsn;
            return Arrival::Next;
        }
        if end_lsn <= self.start || self.recent.binary_search(&lsn).is_ok() {
            Arrival::Again
        } else {
            Arrival::Late(self.last_end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Arrival, CommitSequence, REMEMBERED};

    #[test]
    fn commits_follow_each_other() {
        let mut sequence = CommitSequence::new(100);
        assert_eq!(sequence.arrive(100, 110), Arrival::Next);
        assert_eq!(sequence.arrive(110, 120), Arrival::Next);
        assert_eq!(sequence.arrive(150, 160), Arrival::Next);
        assert_eq!(sequence.last_end(), 160);
    }

    #[test]
    fn one_that_came_is_told_from_one_that_did_not() {
        let mut sequence = CommitSequence::new(100);
        sequence.arrive(110, 120);
        sequence.arrive(150, 160);
        assert_eq!(sequence.arrive(110, 120), Arrival::Again);
        assert_eq!(sequence.arrive(150, 160), Arrival::Again);
        assert_eq!(sequence.arrive(80, 100), Arrival::Again);
        assert_eq!(sequence.arrive(100, 110), Arrival::Late(160));
        assert_eq!(sequence.arrive(120, 130), Arrival::Late(160));
        assert_eq!(sequence.last_end(), 160, "neither counts");
        assert_eq!(sequence.arrive(160, 170), Arrival::Next);
    }

    #[test]
    fn one_that_came_long_ago_is_taken_for_late() {
        let mut sequence = CommitSequence::new(0);
        let lsn = |number: usize| number as u64 * 10;
        for number in 1..=REMEMBERED + 1 {
            assert_eq!(sequence.arrive(lsn(number), lsn(number) + 5), Arrival::Next);
        }
        assert!(matches!(sequence.arrive(10, 15), Arrival::Late(_)));
        assert_eq!(sequence.arrive(20, 25), Arrival::Again);
    }
}
