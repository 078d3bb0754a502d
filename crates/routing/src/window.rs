//! Times: how far ahead of the clock rows may be created, what a read may rely on, and when the
//! group's leader closes the next time.
//!
//! Example of a read that would miss a row. Node R applies the log 1.5 s late, so its last `Close`
//! is 0.3 s ahead of its clock. A rule counts from 0.3 s ahead on. Node W has applied it and places
//! a row that is dated 0.4 s ahead on a shard that R does not know of. R's clock is before its last
//! `Close`, and it must still not rely on its rules. So R adds the slack and
//! the skew to its clock before it compares ([`Window::read_bound`]), and W creates no row dated
//! further ahead than the slack ([`Window::admission`]).
//!
//! Where a row is placed relies on no clock. That a read without a bound finds all rows relies on
//! clocks of two nodes being at most the skew apart.

use std::time::Duration;

use crate::rules::{Invalid, Time};

/// The times of agreement, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    ahead: i64,
    period: i64,
    slack: i64,
    skew: i64,
}

impl Default for Window {
    /// Two seconds ahead, each half second; a slack of a quarter, a skew of half a second. So a
    /// read asks few nodes while the log is applied less than 0.75 s after a proposal.
    fn default() -> Self {
        Self {
            ahead: 2_000_000,
            period: 500_000,
            slack: 250_000,
            skew: 500_000,
        }
    }
}

/// Whether a node may create a row, or has to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The row's place is final.
    Now,
    /// The row waits until the node has applied a `Close` at or after `created`.
    WaitForClose,
    /// The row waits until the node's clock shows this time: it is dated too far ahead.
    WaitUntil(Time),
    /// The row is dated further ahead than the window: an error.
    TooFarAhead,
}

/// The shards that a read has to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadBound {
    /// Those that can hold rows created at or before this time; the read has that bound.
    Upto(Time),
    /// Those of all rules that the node has applied.
    Known,
    /// All: the node can't know whether it has applied all rules that count.
    Everywhere,
}

impl Window {
    /// A window: `Close` goes `ahead` of the leader's clock, each `period`; rows may be dated
    /// `slack` ahead of their node's clock; clocks of nodes are at most `skew` apart. All are in
    /// microseconds.
    ///
    /// # Errors
    /// [`Invalid::Window`] if one is negative, the period is 0, or `ahead` is not longer than the
    /// others together: then each read would ask all nodes.
    pub fn new(ahead: i64, period: i64, slack: i64, skew: i64) -> Result<Self, Invalid> {
        let others = period
            .checked_add(slack)
            .and_then(|sum| sum.checked_add(skew));
        let fits = others.is_some_and(|others| ahead > others);
        if period < 1 || slack < 0 || skew < 0 || !fits {
            return Err(Invalid::Window);
        }
        Ok(Self {
            ahead,
            period,
            slack,
            skew,
        })
    }

    /// Whether a node whose clock shows `now`, and which has applied `Close(closed)`, may create a
    /// row.
    #[must_use]
    pub const fn admission(&self, created: Time, now: Time, closed: Time) -> Admission {
        if !created.is_finite() && created.0 > 0 || created.0 > now.plus(self.ahead).0 {
            Admission::TooFarAhead
        } else if created.0 > closed.0 {
            Admission::WaitForClose
        } else if created.0 > now.plus(self.slack).0 {
            Admission::WaitUntil(created.plus(-self.slack))
        } else {
            Admission::Now
        }
    }

    /// The time of a rule that is proposed now: after all times that are closed, or that somebody
    /// may have proposed to close. So a rule is seldom too late for its time.
    #[must_use]
    pub const fn rule_time(&self, now: Time, closed: Time) -> Time {
        let proposed = now.plus(self.ahead);
        if closed.0 > proposed.0 {
            closed.plus(1)
        } else {
            proposed.plus(1)
        }
    }

    /// Whether nobody has closed a time for one period, and `patience`.
    #[must_use]
    pub fn is_due(&self, now: Time, closed: Time, patience: Duration) -> bool {
        let patience = i64::try_from(patience.as_micros()).unwrap_or(i64::MAX);
        let wait = self.period.saturating_add(patience);
        now.plus(self.ahead).0.saturating_sub(closed.0) >= wait
    }

    /// What a read may rely on at a node whose clock shows `now` and which has applied
    /// `Close(closed)`. `upto`: the read asks only for rows created at or before it.
    #[must_use]
    pub const fn read_bound(&self, upto: Option<Time>, now: Time, closed: Time) -> ReadBound {
        match upto {
            Some(upto) if upto.0 <= closed.0 => ReadBound::Upto(upto),
            // No node has created a row after `now + slack + skew`.
            _ if now.plus(self.slack).plus(self.skew).0 <= closed.0 => match upto {
                Some(upto) => ReadBound::Upto(upto),
                None => ReadBound::Known,
            },
            _ => ReadBound::Everywhere,
        }
    }
}

/// When the leader proposes the next `Close`: each period, and only while routed tables are used.
///
/// Used means: a row is created, or a read would have to ask all nodes. Without the second, reads
/// would ask all nodes as soon as nobody writes. All times of `at` are of one monotonic clock.
#[derive(Debug, Clone)]
pub struct Pacer {
    window: Window,
    used: Option<Duration>,
    proposed: Option<Duration>,
}

impl Pacer {
    /// The pacer of a new leader, which knows of no use yet.
    #[must_use]
    pub const fn new(window: Window) -> Self {
        Self {
            window,
            used: None,
            proposed: None,
        }
    }

    /// Notes that a node has used routed tables.
    pub fn note_use(&mut self, at: Duration) {
        self.used = self.used.max(Some(at));
    }

    /// The time to close now, if one is due; the caller proposes it. `now` is the leader's clock,
    /// `closed` the last `Close` that it has applied.
    ///
    /// A proposal that is lost is followed by the next one after a period. If the leader's clock
    /// was set back, nothing is proposed until it has caught up.
    pub fn tick(&mut self, now: Time, at: Duration, closed: Time) -> Option<Time> {
        if self.next(at)? > at {
            return None;
        }
        let time = now.plus(self.window.ahead);
        if time <= closed {
            return None;
        }
        self.proposed = Some(at);
        Some(time)
    }

    /// When the next `Close` is due, on the clock of `at`; `None` while nothing is used. Use is
    /// over when a whole window has passed since it was noted.
    #[must_use]
    pub fn next(&self, at: Duration) -> Option<Duration> {
        let used = self.used?;
        if at.saturating_sub(used) > micros(self.window.ahead) {
            return None;
        }
        Some(match self.proposed {
            Some(proposed) => proposed.saturating_add(micros(self.window.period)),
            None => used,
        })
    }
}

fn micros(micros: i64) -> Duration {
    Duration::from_micros(micros.unsigned_abs())
}
