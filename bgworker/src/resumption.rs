//! Where a leader's stream resumes, which of its transactions are already committed locally, and
//! the order in which they arrive. Run by the leader.
//!
//! Earlier appliers may have committed transactions before others (`applied`), or the first chunks
//! of a large one (`split`). The provider sends these again, and they are not applied again (I1).

use crate::applied::AppliedAhead;
use crate::commit_sequence::{Arrival, CommitSequence};

/// A transaction of which the first chunks are committed locally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HalfApplied {
    /// Start LSN of its commit record at the provider.
    pub commit_lsn: u64,
    /// Number of its changes that are committed.
    pub changes: u64,
}

/// State of the resumed stream.
#[derive(Debug)]
pub struct Resumption {
    start: u64,
    commits: CommitSequence,
    ahead: AppliedAhead,
    /// The half-applied transaction, until it arrives again.
    half_applied: Option<HalfApplied>,
}

impl Resumption {
    /// Returns the state of a stream that resumes at `start`. `ahead` and `half_applied` are
    /// already committed locally.
    #[must_use]
    pub fn new(start: u64, ahead: AppliedAhead, half_applied: Option<HalfApplied>) -> Self {
        Self {
            start,
            commits: CommitSequence::new(start),
            ahead,
            half_applied,
        }
    }

    /// Returns the LSN at which the stream resumes.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns whether the transaction with this commit record is committed locally.
    #[must_use]
    pub fn is_committed(&self, commit_lsn: u64) -> bool {
        self.ahead.contains(commit_lsn)
    }

    /// Returns the half-applied transaction if its rest cannot arrive any more: the stream is at
    /// `position`.
    #[must_use]
    pub fn lost_rest(&self, position: u64) -> Option<HalfApplied> {
        self.half_applied.filter(|half| half.commit_lsn < position)
    }

    /// Forgets the half-applied transaction, as its rest is not wanted any more.
    pub fn give_up_rest(&mut self) {
        self.half_applied = None;
    }

    /// Begins a transaction. Returns whether it is the half-applied one, which is then forgotten.
    pub fn takes_rest(&mut self, commit_lsn: u64) -> bool {
        self.half_applied
            .take_if(|half| half.commit_lsn == commit_lsn)
            .is_some()
    }

    /// Classifies a transaction that has arrived completely.
    pub fn arrive(&mut self, commit_lsn: u64, end_lsn: u64) -> Arrival {
        self.commits.arrive(commit_lsn, end_lsn)
    }

    /// Returns whether any transaction has arrived completely.
    #[must_use]
    pub fn has_arrived(&self) -> bool {
        self.commits.last_end() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: HalfApplied = HalfApplied {
        commit_lsn: 200,
        changes: 7,
    };

    #[test]
    fn the_rest_comes_once() {
        let mut resumption = Resumption::new(100, AppliedAhead::default(), Some(HALF));
        assert_eq!(resumption.start(), 100);
        assert!(!resumption.takes_rest(150));
        assert_eq!(resumption.lost_rest(200), None);
        assert!(resumption.takes_rest(200));
        assert!(!resumption.takes_rest(200));
        assert_eq!(resumption.lost_rest(300), None);
    }

    #[test]
    fn a_rest_that_lies_before_the_stream_is_lost() {
        let mut resumption = Resumption::new(100, AppliedAhead::default(), Some(HALF));
        assert_eq!(resumption.lost_rest(201), Some(HALF));
        resumption.give_up_rest();
        assert_eq!(resumption.lost_rest(201), None);
    }

    #[test]
    fn transactions_arrive_in_the_order_of_their_commits() {
        let mut resumption = Resumption::new(100, AppliedAhead::default(), None);
        assert!(!resumption.has_arrived());
        assert!(matches!(resumption.arrive(110, 120), Arrival::Next));
        assert!(resumption.has_arrived());
        assert!(matches!(resumption.arrive(110, 120), Arrival::Again));
        assert!(!resumption.is_committed(110));
    }
}
