//! How much comes from the provider, and how fast it may. Run by the leader.

use std::time::Duration;

use braid_node::rate_limit::Limiter;

/// Counts of what the leader has received.
pub(super) struct Intake {
    limiter: Limiter,
    /// Changes received.
    rows: u64,
    /// The changes that the limiter knows of.
    taken: u64,
    /// When the provider sent the current message, by its clock.
    sent_at: i64,
}

impl Intake {
    /// Nothing has come.
    pub(super) fn new(limiter: Limiter) -> Self {
        Self {
            limiter,
            rows: 0,
            taken: 0,
            sent_at: 0,
        }
    }

    /// When the provider sent the current message, by its clock.
    pub(super) fn sent_at(&self) -> i64 {
        self.sent_at
    }

    /// Begins a message, which the provider has sent at this time of its clock.
    pub(super) fn begin(&mut self, sent_at: i64) {
        self.sent_at = sent_at;
        self.taken = self.rows;
    }

    /// Ends the current message, which had so many bytes.
    pub(super) fn end(&mut self, bytes: usize) {
        self.limiter
            .take(self.rows.wrapping_sub(self.taken), bytes as u64);
    }

    /// A change of a row has come.
    pub(super) fn count_row(&mut self) {
        self.rows = self.rows.wrapping_add(1);
    }

    /// Changes received so far.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Goes back to an earlier number: the changes since then were counted before.
    pub(super) fn set_rows(&mut self, rows: u64) {
        self.rows = rows;
    }

    /// How long nothing may be received.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.limiter.pause()
    }

    /// Waits, as the rate limit asks for.
    pub(super) fn wait(&self, pause: Duration) {
        self.limiter.wait(pause);
    }
}
