//! The positions that may be confirmed to the provider. Run by the leader.
//!
//! Local commits reach disk later than they happen (`synchronous_commit = off`). So each applied
//! transaction is kept as a pair (its end at the provider, its local end) until the local WAL is
//! flushed past it. Positions without changes to apply are confirmed with the transactions before
//! them.

use std::collections::VecDeque;

/// Received, applied and flushed positions, all as LSNs of the provider.
#[derive(Debug, Default)]
pub struct Progress {
    pending: VecDeque<(u64, u64)>,
    received: u64,
    applied: u64,
    flushed: u64,
}

/// Positions to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Positions {
    /// Received: the replication protocol's write position.
    pub received: u64,
    /// Durable locally: the protocol's flush position, which the slot's confirmed_flush_lsn
    /// follows.
    pub flushed: u64,
    /// Visible locally: the protocol's apply position.
    pub applied: u64,
}

impl Progress {
    /// Starts after `start`: everything before it is applied locally, by commits that end before
    /// `local_end`. These may not be durable yet, as a previous leader may have made them. Nothing
    /// is confirmed before they are.
    #[must_use]
    pub fn new(start: u64, local_end: u64) -> Self {
        Self {
            pending: VecDeque::from([(start, local_end)]),
            received: start,
            applied: start,
            flushed: 0,
        }
    }

    /// Records that the stream has reached `position`.
    pub fn received(&mut self, position: u64) {
        self.received = self.received.max(position);
    }

    /// Records the local commit of a transaction that ends at `remote_end`; its record ends at
    /// `local_end`.
    pub fn applied(&mut self, remote_end: u64, local_end: u64) {
        self.applied = self.applied.max(remote_end);
        // A transaction that wrote nothing has no local commit record, and its position may lie
        // before those of others.
        let local_end = self
            .unflushed()
            .map_or(local_end, |last| last.max(local_end));
        self.pending.push_back((remote_end, local_end));
    }

    /// Records that the local WAL is flushed up to `local_flush`, and returns the positions to
    /// report. `in_flight`: some received transactions are not applied yet.
    pub fn update(&mut self, local_flush: u64, in_flight: bool) -> Positions {
        while let Some(&(remote_end, local_end)) = self.pending.front() {
            if local_end > local_flush {
                break;
            }
            self.flushed = self.flushed.max(remote_end);
            self.pending.pop_front();
        }
        if !in_flight {
            self.applied = self.applied.max(self.received);
            if self.pending.is_empty() {
                self.flushed = self.flushed.max(self.received);
            }
        }
        Positions {
            received: self.received,
            flushed: self.flushed,
            applied: self.applied,
        }
    }

    /// Returns the LSN up to which the local WAL must be flushed to make everything applied
    /// durable; `None` if all is.
    #[must_use]
    pub fn unflushed(&self) -> Option<u64> {
        self.pending.back().map(|(_, local_end)| *local_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_confirmed_before_it_is_flushed_here() {
        let mut progress = Progress::new(100, 0);
        progress.received(300);
        progress.applied(200, 1000);
        let positions = progress.update(999, true);
        assert_eq!(
            (positions.flushed, positions.applied, positions.received),
            (100, 200, 300)
        );
        assert_eq!(progress.update(1000, true).flushed, 200);
    }

    #[test]
    fn what_was_applied_before_the_start_is_not_confirmed_before_it_is_flushed_here() {
        let mut progress = Progress::new(100, 1000);
        assert_eq!(progress.unflushed(), Some(1000));
        assert_eq!(progress.update(999, false).flushed, 0);
        progress.received(200);
        assert_eq!(progress.update(999, false).flushed, 0);
        assert_eq!(progress.update(1000, false).flushed, 200);
    }

    #[test]
    fn an_idle_stream_confirms_what_it_received() {
        let mut progress = Progress::new(100, 0);
        progress.applied(200, 1000);
        progress.received(500);
        assert_eq!(
            progress.update(1, false),
            Positions {
                received: 500,
                flushed: 100,
                applied: 500
            }
        );
        assert_eq!(progress.update(1000, false).flushed, 500);
        assert_eq!(progress.unflushed(), None);
    }

    #[test]
    fn what_wrote_nothing_does_not_hide_what_did() {
        let mut progress = Progress::new(100, 0);
        progress.applied(200, 1000);
        progress.applied(300, 0);
        assert_eq!(progress.unflushed(), Some(1000));
        assert_eq!(progress.update(999, true).flushed, 100);
        assert_eq!(progress.update(1000, true).flushed, 300);
    }

    #[test]
    fn received_but_unapplied_is_never_confirmed() {
        let mut progress = Progress::new(100, 0);
        progress.received(500);
        assert_eq!(progress.update(u64::MAX, true).flushed, 100);
    }
}
