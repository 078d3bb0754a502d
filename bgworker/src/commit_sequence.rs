//! Whether transactions come in the order of their commits, each once.
//!
//! What is committed here says that all before it is here too: a transaction that comes after a
//! later one would, once that is applied, never be asked for again. One that comes twice only has
//! to be asked for in its place.

use std::collections::VecDeque;

/// Commits that are remembered.
const REMEMBERED: usize = 4096;

/// What a commit is beside those that came before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// After all that came.
    Next,
    /// It came before, or lies before where the stream began: nothing is missing.
    Again,
    /// It has not come before, and what ends here, behind it, has.
    Late(u64),
}

/// The commits of a stream.
#[derive(Debug)]
pub struct CommitSequence {
    start: u64,
    last_end: u64,
    /// Where the last commit records start, in their order.
    recent: VecDeque<u64>,
}

impl CommitSequence {
    /// A stream that was asked for from `start` on.
    #[must_use]
    pub fn new(start: u64) -> Self {
        Self {
            start,
            last_end: 0,
            recent: VecDeque::with_capacity(REMEMBERED),
        }
    }

    /// End of the last transaction that has arrived, 0 for none.
    #[must_use]
    pub fn last_end(&self) -> u64 {
        self.last_end
    }

    /// A transaction arrives whole, whose commit record is at `lsn` and ends at `end_lsn`. Noted if
    /// it is the next.
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
