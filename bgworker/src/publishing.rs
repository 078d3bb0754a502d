//! When the leader shows appliers the transactions that are complete. Run by the leader.
//!
//! Each time costs whoever looks for something to do, so it is done for some transactions at a
//! time, and not at once in two cases:
//! - few small ones that are all there is in hand are kept quiet about until it is known whether
//!   more has come; if not, the leader applies them itself;
//! - where transactions are joined, the more there are at once the better: they wait for a moment
//!   while the provider's messages are full, since more is about to come then.
//!
//! Not for: what is published how (the ring), and whose latch is set.

use std::time::Duration;

/// Changes after which transactions are published at the latest, where each is applied as one.
const AT_ONCE: u32 = 16;
/// A message of so many bytes is followed by another: a provider that has nothing more to read
/// sends what it has before it is that much.
const FULL_MESSAGE: usize = 32 << 10;

/// The transactions that are complete and not published.
#[derive(Debug)]
pub struct Unpublished {
    /// How many of the last ones are kept quiet about: then they are all.
    quiet: u64,
    /// Changes, or more, of the others.
    changes: u32,
    /// With how many of these they are published at the latest.
    at_once: u32,
    /// They are joined.
    gathers: bool,
    /// Bytes of the last message.
    last_length: usize,
}

impl Unpublished {
    /// How long what is to be joined waits for more of it.
    pub const MOMENT: Duration = Duration::from_millis(1);

    /// None yet. `joined`: they are joined, so many changes at a time.
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

    /// There are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.quiet == 0 && self.changes == 0
    }

    /// There are some that nobody keeps quiet about.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.changes != 0
    }

    /// How many are kept quiet about.
    #[must_use]
    pub fn quiet(&self) -> u64 {
        self.quiet
    }

    /// One more is kept quiet about.
    pub fn keep_quiet(&mut self) {
        self.quiet += 1;
    }

    /// Those that were kept quiet about, which is over.
    pub fn take_quiet(&mut self) -> u64 {
        std::mem::take(&mut self.quiet)
    }

    /// One more, and no word about those before it is kept any longer. Whether all are to be
    /// published now.
    pub fn add(&mut self, changes: u32) -> bool {
        let quiet = u32::try_from(self.take_quiet()).unwrap_or(u32::MAX);
        self.changes = self
            .changes
            .saturating_add(changes.max(1))
            .saturating_add(quiet);
        self.changes >= self.at_once
    }

    /// All are published.
    pub fn clear(&mut self) {
        self.quiet = 0;
        self.changes = 0;
    }

    /// The provider has sent a message of so many bytes.
    pub fn message(&mut self, length: usize) {
        self.last_length = length;
    }

    /// Whether what is complete may wait for more, so long after the last message.
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
            // Of no change, it counts all the same.
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
        // Or the leader has applied them.
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
