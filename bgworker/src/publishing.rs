//! When the leader publishes complete transactions to the appliers. Run by the leader.
//!
//! Each publication costs every process that looks for work, so transactions are published in
//! groups, and later in two cases:
//! - A few small ones that are the only current transactions are withheld until it is known whether
//!   more has arrived. If not, the leader applies them itself.
//! - If transactions are joined into batches, large groups are better. They wait for a moment while
//!   the provider's messages are full, since more is about to arrive then.
//!
//! Not for: how transactions are published (the ring), and whose latch is set.

use std::time::Duration;

/// Most changes before transactions are published, if each is applied on its own.
const AT_ONCE: u32 = 16;
/// A message of this many bytes is followed by another: a provider with nothing more to read sends
/// its messages before they are that large.
const FULL_MESSAGE: usize = 32 << 10;

/// Complete transactions that are not published.
#[derive(Debug)]
pub struct Unpublished {
    /// Number of withheld transactions. If there are any, there are no others.
    quiet: u64,
    /// Changes of the others; a transaction counts as at least one.
    changes: u32,
    /// Number of changes at which they are published.
    at_once: u32,
    /// Transactions are joined into batches.
    gathers: bool,
    /// Bytes of the last message.
    last_length: usize,
}

impl Unpublished {
    /// How long transactions that are to be joined wait for more.
    pub const MOMENT: Duration = Duration::from_millis(1);

    /// Returns an empty set. `joined`: transactions are joined, up to this many changes at a time.
    #[must_use]
    pub fn new(joined: Option<u32>) -> Self {
        Self {
            quiet: 0,
            changes: 0,
            at_once: joined.map_or(AT_ONCE, |changes| changes / 2),
            gathers: joined.is_some(),
            last_length: 0,
        }
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.quiet == 0 && self.changes == 0
    }

    /// Returns whether there are transactions that are not withheld.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.changes != 0
    }

    /// Returns the number of withheld transactions.
    #[must_use]
    pub fn quiet(&self) -> u64 {
        self.quiet
    }

    /// Adds a withheld transaction.
    pub fn keep_quiet(&mut self) {
        self.quiet += 1;
    }

    /// Stops withholding and returns how many transactions were withheld.
    pub fn take_quiet(&mut self) -> u64 {
        std::mem::take(&mut self.quiet)
    }

    /// Adds a transaction and stops withholding the earlier ones. Returns whether all are to be
    /// published now.
    pub fn add(&mut self, changes: u32) -> bool {
        let quiet = u32::try_from(self.take_quiet()).unwrap_or(u32::MAX);
        self.changes = self
            .changes
            .saturating_add(changes.max(1))
            .saturating_add(quiet);
        self.changes >= self.at_once
    }

    /// Records that all are published.
    pub fn clear(&mut self) {
        self.quiet = 0;
        self.changes = 0;
    }

    /// Records that the provider has sent a message of `length` bytes.
    pub fn message(&mut self, length: usize) {
        self.last_length = length;
    }

    /// Returns whether complete transactions may wait for more, this long after the last message.
    #[must_use]
    pub fn awaits_more(&self, since_message: impl FnOnce() -> Duration) -> bool {
        self.is_due()
            && self.gathers
            && self.last_length >= FULL_MESSAGE
            && since_message() < Self::MOMENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_published_some_at_a_time() {
        let mut unpublished = Unpublished::new(None);
        assert!(unpublished.is_empty());
        for _ in 1..AT_ONCE {
            // A transaction without changes counts too.
            assert!(!unpublished.add(0));
        }
        assert!(unpublished.is_due());
        assert!(unpublished.add(1));
        unpublished.clear();
        assert!(unpublished.is_empty());
        assert!(unpublished.add(AT_ONCE));
        assert!(unpublished.add(u32::MAX));
    }

    #[test]
    fn what_was_kept_quiet_about_goes_along() {
        let mut unpublished = Unpublished::new(None);
        unpublished.keep_quiet();
        unpublished.keep_quiet();
        assert_eq!(unpublished.quiet(), 2);
        assert!(!unpublished.is_empty() && !unpublished.is_due());
        assert!(!unpublished.add(AT_ONCE - 3));
        assert_eq!(unpublished.quiet(), 0);
        assert!(unpublished.add(1));
        // Or the leader has applied them itself.
        unpublished.clear();
        unpublished.keep_quiet();
        assert_eq!(unpublished.take_quiet(), 1);
        assert!(unpublished.is_empty());
    }

    #[test]
    fn what_is_joined_waits_while_messages_are_full() {
        let mut unpublished = Unpublished::new(Some(1024));
        let now = || Duration::ZERO;
        unpublished.message(FULL_MESSAGE);
        assert!(!unpublished.awaits_more(now), "nothing to wait with");
        assert!(!unpublished.add(511));
        assert!(unpublished.awaits_more(now));
        assert!(!unpublished.awaits_more(|| Unpublished::MOMENT));
        unpublished.message(FULL_MESSAGE - 1);
        assert!(!unpublished.awaits_more(now));
        assert!(unpublished.add(1), "half of what is taken at once");
        let mut unpublished = Unpublished::new(None);
        unpublished.message(FULL_MESSAGE);
        unpublished.add(1);
        assert!(!unpublished.awaits_more(now), "each is applied as one");
    }
}
