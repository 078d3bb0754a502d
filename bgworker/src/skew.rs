//! Difference between another node's clock and this one's, from requests and replies.
//!
//! Run by leaders. A reply was given after its request was sent and before it was read. So the
//! other clock showed the reply's time somewhere in between: an [`Exchange`] gives an interval of
//! the difference, half as wide as the round trip to either side. That holds for any network.
//! Several exchanges are combined by intersection, so the quickest ones count most. An older
//! interval is widened by as much as clocks may drift apart ([`DRIFT`]).
//!
//! If an exchange has no intersection with those before it, a clock was set in the meantime, and
//! the earlier ones are forgotten. If a clock was set by less than the error, that shows once the
//! earlier exchanges are too old.
//!
//! Times of this node come from a monotonic clock, so setting the local clock does not affect the
//! measurement. To show an offset, the caller adds the difference to the wall clock. All times are
//! microseconds.
//!
//! Not for: telling replies from other messages; see [`Burst`].

use std::collections::VecDeque;

/// Exchanges that are remembered.
const REMEMBERED: usize = 32;
/// Microseconds per second by which two clocks may drift apart: twice that of a bad quartz.
pub const DRIFT: i64 = 100;
/// Number of exchanges in a row that must show an offset before it is reported.
const CONFIRMED: u32 = 2;
/// An offset that persists is reported again after this time, in microseconds.
pub const REPEAT: i64 = 600_000_000;

/// A request and its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// When the request was sent, by this node's monotonic clock.
    pub asked: i64,
    /// When the reply was read, by this node's monotonic clock.
    pub answered: i64,
    /// The other node's clock when it replied.
    pub there: i64,
}

/// Estimated difference: the other clock minus this node's monotonic one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// Middle of the possible interval.
    pub difference: i64,
    /// Largest error of the difference.
    pub error: i64,
}

/// An interval that contained the difference at some time.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    at: i64,
    low: i64,
    high: i64,
}

impl Bounds {
    fn of(exchange: &Exchange) -> Self {
        // Each time was rounded down to whole microseconds.
        Self {
            at: exchange.answered,
            low: exchange
                .there
                .saturating_sub(exchange.answered)
                .saturating_sub(1),
            high: exchange
                .there
                .saturating_sub(exchange.asked)
                .saturating_add(1),
        }
    }

    /// Returns the bounds at another time: widened by the drift.
    fn aged(self, now: i64) -> Self {
        let age = now.saturating_sub(self.at).max(0);
        let drift = age.saturating_mul(DRIFT) / 1_000_000;
        Self {
            at: now,
            low: self.low.saturating_sub(drift),
            high: self.high.saturating_add(drift),
        }
    }

    /// Returns the intersection of two bounds of the same time.
    fn and(self, other: Self) -> Option<Self> {
        let low = self.low.max(other.low);
        let high = self.high.min(other.high);
        (low <= high).then_some(Self { low, high, ..self })
    }

    fn estimate(self) -> Estimate {
        let width = self.high.saturating_sub(self.low);
        Estimate {
            difference: self.low.saturating_add(width / 2),
            error: width - width / 2,
        }
    }
}

/// The last exchanges with one node.
#[derive(Debug, Default)]
pub struct Skew {
    exchanges: VecDeque<Bounds>,
}

impl Skew {
    /// Adds an exchange. If a clock was set in the meantime, returns by about how much.
    pub fn add(&mut self, exchange: &Exchange) -> Option<i64> {
        let new = Bounds::of(exchange);
        let before = self.bounds(new.at);
        let stepped = before.filter(|before| new.and(*before).is_none());
        if stepped.is_some() {
            self.exchanges.clear();
        }
        if self.exchanges.len() >= REMEMBERED {
            self.exchanges.pop_back();
        }
        self.exchanges.push_front(new);
        stepped.map(|before| {
            let (new, before) = (new.estimate(), before.estimate());
            new.difference.saturating_sub(before.difference)
        })
    }

    /// Returns the current estimate; `None` before the first exchange.
    #[must_use]
    pub fn estimate(&self, now: i64) -> Option<Estimate> {
        Some(self.bounds(now)?.estimate())
    }

    /// Returns the intersection of the latest exchanges that agree.
    fn bounds(&self, now: i64) -> Option<Bounds> {
        let mut known: Option<Bounds> = None;
        for bounds in &self.exchanges {
            let bounds = bounds.aged(now);
            match known {
                None => known = Some(bounds),
                Some(so_far) => match so_far.and(bounds) {
                    Some(both) => known = Some(both),
                    None => break,
                },
            }
        }
        known
    }
}

/// A group of status messages that request a reply, sent at once, and the keepalives that answer
/// them.
///
/// A walsender answers each status that requests a reply with a keepalive. It also sends keepalives
/// of its own accord, and they look alike. A keepalive that was already under way when the request
/// was sent would pass for a quick reply, and make the offset wrong by its transit time. So
/// [`Burst::LENGTH`] statuses go out in one write. The walsender reads them together and answers
/// each before it does anything else (`ProcessRepliesIfAny` of src/backend/replication/walsender.c,
/// 15 to 18). The replies form a row of that many keepalives with the same position and nearly the
/// same time. Of its own accord a walsender sends one each time it goes to sleep, and these are
/// further apart.
#[derive(Debug)]
pub struct Burst {
    asked: i64,
    /// Keepalives received since then.
    heard: u32,
    /// The row of keepalives that the last message belongs to: its position, the provider's clock
    /// when it began, and its length.
    position: u64,
    began: i64,
    length: u32,
}

impl Burst {
    /// Statuses in a burst.
    pub const LENGTH: u32 = 8;
    /// All replies come within this time, in microseconds of the provider's clock.
    const SPREAD: i64 = 2_000;
    /// After enough keepalives, and this many microseconds without a message, no reply is expected
    /// any more.
    const QUIET: i64 = 5_000_000;
    /// Longest time that a burst is waited for, in microseconds.
    const LONGEST: i64 = 600_000_000;

    /// Returns a burst that is sent now.
    #[must_use]
    pub fn new(now: i64) -> Self {
        Self {
            asked: now,
            heard: 0,
            position: 0,
            began: 0,
            length: 0,
        }
    }

    /// Takes a keepalive that requests nothing, with a position and a time of the provider. Returns
    /// the exchange if it completes one.
    pub fn keepalive(&mut self, position: u64, there: i64, now: i64) -> Option<Exchange> {
        self.heard = self.heard.saturating_add(1);
        let goes_on = self.length > 0
            && position == self.position
            && (0..=Self::SPREAD).contains(&there.saturating_sub(self.began));
        if goes_on {
            self.length = self.length.saturating_add(1);
        } else {
            (self.position, self.began, self.length) = (position, there, 1);
        }
        (self.length >= Self::LENGTH).then_some(Exchange {
            asked: self.asked,
            answered: now,
            there,
        })
    }

    /// Takes any other message.
    pub fn other(&mut self) {
        self.length = 0;
    }

    /// Returns whether the burst can be given up. `quiet`: for how long no message has arrived
    /// although there was nothing to read. Until then no other burst may be sent, as this one's
    /// replies could be taken for those of the new one: they arrive behind everything that the
    /// other node has sent before, which may stay unread for long.
    #[must_use]
    pub fn is_lost(&self, now: i64, quiet: i64) -> bool {
        now.saturating_sub(self.asked) > Self::LONGEST
            || (self.heard >= Self::LENGTH && quiet > Self::QUIET)
    }
}

/// Report about an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Say {
    /// The clocks are apart by more than the threshold.
    Apart,
    /// The clocks agree again.
    Together,
}

/// Decides when to warn: not about an offset that the error could explain, not after a single
/// exchange, and not repeatedly in a short time.
#[derive(Debug, Default)]
pub struct Alarm {
    in_a_row: u32,
    /// When the offset was last reported, by the monotonic clock; 0: there is none to report.
    warned_at: i64,
}

impl Alarm {
    /// Continues with the [`Alarm::warned_at`] of an earlier one.
    #[must_use]
    pub fn resume(warned_at: i64) -> Self {
        Self {
            in_a_row: 0,
            warned_at,
        }
    }

    /// Returns when an offset was last reported; 0: there is none.
    #[must_use]
    pub fn warned_at(&self) -> i64 {
        self.warned_at
    }

    /// Judges an exchange that shows this offset, to within `error`. Offsets above `threshold` are
    /// reported; `None`: never.
    pub fn judge(
        &mut self,
        offset: i64,
        error: i64,
        threshold: Option<i64>,
        now: i64,
    ) -> Option<Say> {
        let Some(threshold) = threshold else {
            *self = Self::default();
            return None;
        };
        let apart = offset.saturating_abs();
        if apart.saturating_sub(error) > threshold {
            self.in_a_row = self.in_a_row.saturating_add(1);
            let due = self.warned_at == 0 || now.saturating_sub(self.warned_at) >= REPEAT;
            if due && self.in_a_row >= CONFIRMED {
                self.warned_at = now;
                return Some(Say::Apart);
            }
            return None;
        }
        self.in_a_row = 0;
        // Within the error of the threshold nothing changes.
        if self.warned_at != 0 && apart.saturating_add(error) <= threshold {
            self.warned_at = 0;
            return Some(Say::Together);
        }
        None
    }
}
