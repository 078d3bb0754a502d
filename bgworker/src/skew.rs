//! How far another node's clock is from this one's, from questions and answers between them.
//!
//! Run by leaders. An answer was given after its question was asked and before it was read, so it
//! says of the other clock that it showed such a time somewhere in between: an [`Exchange`] gives
//! an interval, half as wide as the round trip to either side. It is right whatever the network
//! did. What several of them say is what they have in common, so the quickest ones count most. An
//! older one counts for less, by as much as clocks may drift apart ([`DRIFT`]).
//!
//! An exchange that has nothing in common with those before it means that a clock was set
//! meanwhile: they are forgotten. One that was set by less than the error shows when they are too
//! old.
//!
//! Times of this node are of a clock that never steps back and is never set (monotonic), so that
//! its own being set is no part of what is measured; whoever shows an offset takes the difference
//! to the clock on the wall. All times are microseconds.
//!
//! Not for what an answer means that can't be told from a message without a question: see
//! [`Burst`].

use std::collections::VecDeque;

/// Exchanges that are remembered.
const REMEMBERED: usize = 32;
/// Microseconds in a second by which two clocks may drift apart that nobody sets: twice what a bad
/// quartz does.
pub const DRIFT: i64 = 100;
/// So many in a row have to say that clocks are apart before it is said.
const CONFIRMED: u32 = 2;
/// It is said again after this time, as long as it is so.
pub const REPEAT: i64 = 600_000_000;

/// A question and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// When it was asked, by this node's monotonic clock.
    pub asked: i64,
    /// When the answer was read, by the same.
    pub answered: i64,
    /// The other node's clock as it answered.
    pub there: i64,
}

/// What the other clock shows more than this node's monotonic one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// The middle of what is possible.
    pub difference: i64,
    /// How far off that can be.
    pub error: i64,
}

/// An interval in which the difference was at some time.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    at: i64,
    low: i64,
    high: i64,
}

impl Bounds {
    fn of(exchange: &Exchange) -> Self {
        // Each time was cut to whole microseconds.
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

    /// The same at another time.
    fn aged(self, now: i64) -> Self {
        let age = now.saturating_sub(self.at).max(0);
        let drift = age.saturating_mul(DRIFT) / 1_000_000;
        Self {
            at: now,
            low: self.low.saturating_sub(drift),
            high: self.high.saturating_add(drift),
        }
    }

    /// What two of the same time have in common.
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
    /// Another exchange. By how much a clock was set meanwhile, if it was, as far as that is known.
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

    /// What is known now; `None` before the first exchange.
    #[must_use]
    pub fn estimate(&self, now: i64) -> Option<Estimate> {
        Some(self.bounds(now)?.estimate())
    }

    /// What as many of the last exchanges as agree have in common.
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

/// Statuses that ask for a reply, many at once, and the keepalives that answer them.
///
/// A walsender answers each status that asks for a reply with a keepalive, but it also sends some
/// of its own accord, and nothing in them tells which is which. One that was on its way when the
/// question was asked would pass for a quick answer, and give an offset that is wrong by the time
/// it was on its way. So [`Burst::LENGTH`] statuses go out in one write. The walsender reads them
/// together and answers each before it does anything else (`ProcessRepliesIfAny` of
/// src/backend/replication/walsender.c, 15 to 18): a row of so many keepalives with the same
/// position and nearly the same time. Of its own accord it sends one each time it goes to sleep,
/// and these are further apart.
#[derive(Debug)]
pub struct Burst {
    asked: i64,
    /// Keepalives since then.
    heard: u32,
    /// The row that the last message belongs to: its position, the provider's clock when it began,
    /// and how long it is.
    position: u64,
    began: i64,
    length: u32,
}

impl Burst {
    /// Statuses in one.
    pub const LENGTH: u32 = 8;
    /// Microseconds by the provider's clock within which all are answered.
    const SPREAD: i64 = 2_000;
    /// After so many keepalives, and so long without a message, there is no answer to be expected
    /// any more.
    const QUIET: i64 = 5_000_000;
    /// After this time a burst is not waited for, whatever came.
    const LONGEST: i64 = 600_000_000;

    /// One that goes out now.
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

    /// A keepalive that asks for nothing, of a position and a time at the provider. The exchange
    /// that is complete with it.
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

    /// Any other message.
    pub fn other(&mut self) {
        self.length = 0;
    }

    /// Whether it can be given up, when for so long no message has come although there was nothing
    /// to read. Until then no other is to be sent, as its answers could be taken for that one's:
    /// they come behind whatever the other node has sent before, which may lie unread for long.
    #[must_use]
    pub fn is_lost(&self, now: i64, quiet: i64) -> bool {
        now.saturating_sub(self.asked) > Self::LONGEST
            || (self.heard >= Self::LENGTH && quiet > Self::QUIET)
    }
}

/// What is to be said of an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Say {
    /// The clocks are apart by more than is to be warned of.
    Apart,
    /// They are not any more.
    Together,
}

/// When to warn: not of what the error could explain, not of a single exchange, and not all the
/// time.
#[derive(Debug, Default)]
pub struct Alarm {
    in_a_row: u32,
    /// When it was said last that they are apart, by the monotonic clock; 0: they are not.
    warned_at: i64,
}

impl Alarm {
    /// As [`Alarm::warned_at`] was for an earlier one.
    #[must_use]
    pub fn resume(warned_at: i64) -> Self {
        Self {
            in_a_row: 0,
            warned_at,
        }
    }

    /// When it was said last that clocks are apart; 0: they are not.
    #[must_use]
    pub fn warned_at(&self) -> i64 {
        self.warned_at
    }

    /// An exchange says that the clocks are so far apart, to within an error. Above `threshold` is
    /// to be warned of; `None`: never.
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
        // In between it may be so or not.
        if self.warned_at != 0 && apart.saturating_add(error) <= threshold {
            self.warned_at = 0;
            return Some(Say::Together);
        }
        None
    }
}
