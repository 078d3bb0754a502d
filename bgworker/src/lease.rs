//! Bounds what a subscription may confirm to its provider before a new bound is stored, and tells
//! whether a slot begins after a gap. Run by the leader.
//!
//! A slot at the provider begins at the position that the subscriber has confirmed. If it begins
//! later, somebody has recreated or advanced it, and transactions in between would be missing. To
//! notice that, the leader makes a bound durable before it confirms anything beyond it. Each write
//! of the bound costs a local transaction, so the bound is set some way ahead, further on a fast
//! stream.

/// Smallest distance that the bound is set ahead, in bytes of the provider's WAL.
const LEAST: u64 = 1 << 20;
/// Largest distance.
const MOST: u64 = 1 << 28;
/// If two writes follow each other faster than this (ms), the distance doubles.
const SOON: u64 = 1000;

/// The durable bound of what may be confirmed. Positions are LSNs of the provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    up_to: u64,
    spare: u64,
    written_at: u64,
}

impl Lease {
    /// Returns a lease that ends at `up_to`, at `now` (ms).
    #[must_use]
    pub fn new(up_to: u64, now: u64) -> Self {
        Self {
            up_to,
            spare: LEAST,
            written_at: now,
        }
    }

    /// Returns the bound that must be durable before `flushed` is confirmed, at `now` (ms); `None`
    /// if the present bound suffices.
    #[must_use]
    pub fn wanted(&mut self, flushed: u64, now: u64) -> Option<u64> {
        if flushed <= self.up_to {
            return None;
        }
        let is_soon = now.saturating_sub(self.written_at) < SOON;
        self.spare = if is_soon {
            self.spare.saturating_mul(2).min(MOST)
        } else {
            (self.spare / 2).max(LEAST)
        };
        Some(flushed.saturating_add(self.spare))
    }

    /// Records that the bound is durable, at `now` (ms).
    pub fn extend(&mut self, up_to: u64, now: u64) {
        self.up_to = self.up_to.max(up_to);
        self.written_at = now;
    }

    /// Returns the position that may be confirmed: `flushed`, but not beyond the bound.
    #[must_use]
    pub fn allowed(&self, flushed: u64) -> u64 {
        flushed.min(self.up_to)
    }
}

/// Returns whether a slot that begins at `begins` misses something that the subscriber lacks. The
/// subscriber has everything up to `reached`. The WAL between each two positions in `empty`, in
/// order, has nothing to send.
#[must_use]
pub fn leaves_a_gap(begins: u64, reached: u64, empty: &[(u64, u64)]) -> bool {
    let reached = empty.iter().fold(reached, |reached, &(from, to)| {
        if reached >= from {
            reached.max(to)
        } else {
            reached
        }
    });
    begins > reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_confirmed_beyond_the_bound() {
        let mut lease = Lease::new(100, 0);
        assert_eq!(lease.wanted(100, 0), None);
        assert_eq!(lease.allowed(100), 100);
        let wanted = lease.wanted(101, 5000).unwrap_or(0);
        assert!(wanted > 101);
        assert_eq!(lease.allowed(101), 100);
        lease.extend(wanted, 5000);
        assert_eq!(lease.allowed(101), 101);
        assert_eq!(lease.wanted(wanted, 5001), None);
    }

    #[test]
    fn a_fast_stream_writes_about_once_a_second() {
        let (mut lease, mut written, mut flushed) = (Lease::new(0, 0), 0, 0);
        // 100 MB a second for a minute, checked every 10 ms.
        for tick in 0..6000_u64 {
            flushed += 1_000_000;
            if let Some(up_to) = lease.wanted(flushed, tick * 10) {
                lease.extend(up_to, tick * 10);
                written += 1;
            }
            assert_eq!(lease.allowed(flushed), flushed);
        }
        assert!(written < 90, "{written}");
        assert!(lease.wanted(u64::MAX, 0).is_some());
    }

    #[test]
    fn a_slot_that_begins_later_leaves_a_gap() {
        assert!(!leaves_a_gap(100, 100, &[]));
        assert!(!leaves_a_gap(90, 100, &[]));
        assert!(leaves_a_gap(101, 100, &[]));
    }

    #[test]
    fn nothing_is_missing_where_there_is_nothing() {
        let moved = [(90, 200), (250, 300)];
        assert!(!leaves_a_gap(200, 100, &moved));
        assert!(leaves_a_gap(201, 100, &moved));
        assert!(leaves_a_gap(200, 80, &moved));
        assert!(leaves_a_gap(300, 100, &moved));
        assert!(!leaves_a_gap(300, 260, &moved));
        // Two advances with nothing in between.
        assert!(!leaves_a_gap(300, 90, &[(90, 200), (200, 300)]));
    }
}
