//! How many appliers a subscription has: the 90-50 rule (Alibaba DTS, PVLDB 17(12), 2024, section
//! 4.2). Run by the leader, once in a second or so.
//!
//! Between a minimum and a maximum, appliers double when their load reaches 90 % and halve when it
//! has fallen to 50 %. The load is the larger of two shares: of their time that they have a
//! transaction in hand, and of the rows per second that they can carry.
//!
//! Half as many at 50 % would be full, and double again at once. So that they do not swing:
//! - the load is a moving average, and has to stay on its side of a mark for a while: briefly to
//!   grow, longer to shrink;
//! - they do not halve when half as many would be within a margin of 90 %, so between 42.5 and 50 %
//!   nothing happens;
//! - after each change there is a pause in which its effect shows, and after a halving that had to
//!   be taken back sooner than another could have followed, the next one waits twice as long, up to
//!   a limit;
//! - they do not double when they mostly wait for each other, nor when the last doubling has
//!   brought nothing: then something else is the bottleneck.
//!
//! Every look has a decision, also one to stay, with its reason in numbers.
//!
//! Not for: measuring, starting or stopping processes.

use std::fmt;
use std::time::Duration;

/// Between what the number of appliers moves, and what one of them can carry.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Never fewer; at least 1.
    pub minimum: usize,
    /// Never more; at least `minimum`.
    pub maximum: usize,
    /// Rows per second that one applier can carry; `None` when only time counts.
    pub rows_per_applier: Option<f64>,
}

/// Marks and times. The default is the rule as documented.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// Load from which on they double.
    pub grow_at: f64,
    /// Load down to which they halve.
    pub shrink_at: f64,
    /// Half as many must stay this far below `grow_at`.
    pub margin: f64,
    /// Time constant of the average.
    pub smoothing: Duration,
    /// The load must be at `grow_at` for so long.
    pub grow_after: Duration,
    /// The load must be at `shrink_at` for so long.
    pub shrink_after: Duration,
    /// The longest that it becomes after halvings that were taken back.
    pub shrink_after_at_most: Duration,
    /// Nothing happens for so long after a change.
    pub pause: Duration,
    /// Of their time with a transaction in hand, the part from which on waiting for each other is
    /// the bottleneck.
    pub blocked_at: f64,
    /// A doubling has brought something when rows per second grew by this factor.
    pub gain: f64,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            grow_at: 0.9,
            shrink_at: 0.5,
            margin: 0.05,
            smoothing: Duration::from_secs(2),
            grow_after: Duration::from_secs(2),
            shrink_after: Duration::from_secs(30),
            shrink_after_at_most: Duration::from_secs(480),
            pause: Duration::from_secs(5),
            blocked_at: 0.5,
            gain: 1.1,
        }
    }
}

/// What was measured since the last look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// When, on any clock that only goes forwards.
    pub at: Duration,
    /// Share of the appliers' time in which they had a transaction in hand, 0 to 1. Of all
    /// appliers, whether or not they are let take any (`breadth`).
    pub busy: f64,
    /// Share of their time in which they had one and waited: for another transaction, or for their
    /// turn to commit.
    pub waiting: f64,
    /// Rows applied per second, by all of them.
    pub rows_per_second: f64,
}

/// What the load was measured by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Time.
    Utilisation,
    /// Rows per second.
    Rows,
}

/// A load, 1 being all that the appliers can carry.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// The average.
    pub share: f64,
    /// What it was measured by.
    pub measure: Measure,
}

/// Why a decision was made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// Doubled: the load has reached the upper mark.
    Full(Load),
    /// Halved: the load has been at the lower mark or below for so long.
    Idle(Load, Duration),
    /// The limits have moved past the number of appliers.
    Limits(Limits),
    /// Stays: the load is between the marks.
    Between(Load),
    /// Stays: the load is at the upper mark, but not yet for long enough.
    NotYetFull(Load),
    /// Stays: the load is at the lower mark, but not yet for long enough; so long is it to stay
    /// there.
    NotYetIdle(Load, Duration),
    /// Stays: the last change was a moment ago.
    JustChanged(Load),
    /// Stays: full, and there may be no more appliers.
    AtMaximum(Load),
    /// Stays: idle, and there may be no fewer.
    AtMinimum(Load),
    /// Stays: half as many appliers would have this load.
    HalfWouldBeFull(Load, f64),
    /// Stays: this share of their time with a transaction they wait for each other.
    Blocked(Load, f64),
    /// Stays: the last doubling raised rows per second from the first number to the second only.
    NoGain(Load, f64, f64),
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match self.measure {
            Measure::Utilisation => "of the appliers' time",
            Measure::Rows => "of the rows per second that they can carry",
        };
        write!(f, "{:.0} % {of}", self.share * 100.0)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(load) => write!(f, "doubled: the load is {load}"),
            Self::Idle(load, since) => write!(
                f,
                "halved: the load is {load}, and was low for {} s",
                since.as_secs()
            ),
            Self::Limits(limits) => write!(
                f,
                "moved between the limits, which are {} and {}",
                limits.minimum, limits.maximum
            ),
            Self::Between(load) => write!(f, "stays: the load is {load}"),
            Self::NotYetFull(load) => {
                write!(f, "stays: the load is {load}, for a moment so far")
            }
            Self::NotYetIdle(load, wanted) => write!(
                f,
                "stays: the load is {load}, and has to be low for {} s",
                wanted.as_secs()
            ),
            Self::JustChanged(load) => {
                write!(f, "stays: it was changed just now; the load is {load}")
            }
            Self::AtMaximum(load) => write!(f, "stays at the maximum: the load is {load}"),
            Self::AtMinimum(load) => write!(f, "stays at the minimum: the load is {load}"),
            Self::HalfWouldBeFull(load, half) => write!(
                f,
                "stays: the load is {load}, and of half as many it would be {:.0} %",
                half * 100.0
            ),
            Self::Blocked(load, share) => write!(
                f,
                "stays: the load is {load}, but for {:.0} % of that they wait for each other",
                share * 100.0
            ),
            Self::NoGain(load, before, now) => write!(
                f,
                "stays: the load is {load}, but the last doubling went from {before:.0} to {now:.0} rows per second"
            ),
        }
    }
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// When.
    pub at: Duration,
    /// Appliers until now.
    pub from: usize,
    /// Appliers from now on.
    pub to: usize,
    /// Share of the time of those until now in which they had a transaction in hand: the average
    /// that was decided by.
    pub busy: f64,
    /// Rows per second, averaged likewise.
    pub rows_per_second: f64,
    /// Why.
    pub reason: Reason,
}

impl Decision {
    /// Whether the number changes.
    #[must_use]
    pub fn is_change(&self) -> bool {
        self.from != self.to
    }

    /// Whether the load asks for more appliers, and there are to be no more all the same.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(
            self.reason,
            Reason::AtMaximum(_) | Reason::Blocked(..) | Reason::NoGain(..)
        )
    }
}

/// What is remembered of the last doubling.
#[derive(Debug, Clone, Copy)]
struct Doubling {
    at: Duration,
    rows_before: f64,
}

/// Decides for one subscription.
#[derive(Debug)]
pub struct Scaler {
    rule: Rule,
    limits: Limits,
    appliers: usize,
    last_look: Option<Duration>,
    /// Averages of time and of rows per second.
    busy: f64,
    waiting: f64,
    rows: f64,
    full_since: Option<Duration>,
    idle_since: Option<Duration>,
    last_change: Option<Duration>,
    /// Since the last doubling.
    last_halving: Option<Duration>,
    doubling: Option<Doubling>,
    shrink_after: Duration,
}

impl Scaler {
    /// Start with `appliers`, or what the limits make of it.
    #[must_use]
    pub fn new(rule: Rule, limits: Limits, appliers: usize) -> Self {
        let limits = sane(limits);
        Self {
            rule,
            limits,
            appliers: appliers.clamp(limits.minimum, limits.maximum),
            last_look: None,
            busy: 0.0,
            waiting: 0.0,
            rows: 0.0,
            full_since: None,
            idle_since: None,
            last_change: None,
            last_halving: None,
            doubling: None,
            shrink_after: rule.shrink_after,
        }
    }

    /// Appliers that there should be.
    #[must_use]
    pub fn appliers(&self) -> usize {
        self.appliers
    }

    /// The settings have changed. What has to follow at once is decided with the next sample.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = sane(limits);
    }

    /// Look at a sample and decide.
    pub fn look(&mut self, sample: Sample) -> Decision {
        self.average(sample);
        let load = self.load();
        let wanted = self
            .appliers
            .clamp(self.limits.minimum, self.limits.maximum);
        if wanted != self.appliers {
            return self.change(sample.at, wanted, Reason::Limits(self.limits));
        }
        let at = sample.at;
        let hold = |since: &mut Option<Duration>, holds: bool| {
            *since = holds.then(|| since.unwrap_or(at));
            since.map(|since| at.saturating_sub(since))
        };
        let full_for = hold(&mut self.full_since, load.share >= self.rule.grow_at);
        let idle_for = hold(&mut self.idle_since, load.share <= self.rule.shrink_at);
        if full_for.is_none() {
            // What was the bottleneck is not any more, or has less to do.
            let settled = |doubling: &Doubling| at < doubling.at + self.rule.pause;
            self.doubling = self.doubling.filter(settled);
        }
        let paused = self
            .last_change
            .is_some_and(|last| at.saturating_sub(last) < self.rule.pause);
        match (full_for, idle_for) {
            _ if paused => self.stay(at, Reason::JustChanged(load)),
            (Some(full_for), _) => self.full(at, load, full_for),
            (None, Some(idle_for)) => self.idle(at, load, idle_for),
            (None, None) => self.stay(at, Reason::Between(load)),
        }
    }

    fn full(&mut self, at: Duration, load: Load, full_for: Duration) -> Decision {
        if self.appliers >= self.limits.maximum {
            return self.stay(at, Reason::AtMaximum(load));
        }
        if full_for < self.rule.grow_after {
            return self.stay(at, Reason::NotYetFull(load));
        }
        let blocked = if self.busy > 0.0 {
            self.waiting / self.busy
        } else {
            0.0
        };
        if blocked >= self.rule.blocked_at {
            return self.stay(at, Reason::Blocked(load, blocked));
        }
        if let Some(doubling) = self.doubling
            && self.rows < doubling.rows_before * self.rule.gain
        {
            return self.stay(at, Reason::NoGain(load, doubling.rows_before, self.rows));
        }
        if let Some(halving) = self.last_halving.take() {
            // One that did not last: be slower with the next.
            self.shrink_after = if at.saturating_sub(halving) < self.shrink_after {
                (self.shrink_after * 2).min(self.rule.shrink_after_at_most)
            } else {
                self.rule.shrink_after
            };
        }
        self.doubling = Some(Doubling {
            at,
            rows_before: self.rows,
        });
        let to = self.appliers.saturating_mul(2).min(self.limits.maximum);
        self.change(at, to, Reason::Full(load))
    }

    fn idle(&mut self, at: Duration, load: Load, idle_for: Duration) -> Decision {
        if self.appliers <= self.limits.minimum {
            return self.stay(at, Reason::AtMinimum(load));
        }
        let to = (self.appliers / 2).max(self.limits.minimum);
        let projected = load.share * ratio(self.appliers, to);
        if projected > self.rule.grow_at - self.rule.margin {
            // Not low enough, so its time does not count.
            self.idle_since = None;
            return self.stay(at, Reason::HalfWouldBeFull(load, projected));
        }
        if idle_for < self.shrink_after {
            return self.stay(at, Reason::NotYetIdle(load, self.shrink_after));
        }
        self.last_halving = Some(at);
        self.doubling = None;
        self.change(at, to, Reason::Idle(load, idle_for))
    }

    /// Averages with a time constant, so that the interval between samples does not matter.
    fn average(&mut self, sample: Sample) {
        let weight = match self.last_look {
            None => 1.0,
            Some(last) => {
                let passed = sample.at.saturating_sub(last).as_secs_f64();
                1.0 - (-passed / self.rule.smoothing.as_secs_f64().max(1e-3)).exp()
            }
        };
        self.last_look = Some(sample.at);
        let mix = |average: &mut f64, value: f64| {
            if value.is_finite() {
                *average += weight * (value.max(0.0) - *average);
            }
        };
        mix(&mut self.busy, sample.busy.min(1.0));
        mix(&mut self.waiting, sample.waiting.min(1.0));
        mix(&mut self.rows, sample.rows_per_second);
    }

    fn load(&self) -> Load {
        let by_time = Load {
            share: self.busy,
            measure: Measure::Utilisation,
        };
        match self.limits.rows_per_applier {
            Some(each) if each > 0.0 => {
                let by_rows = Load {
                    share: self.rows / (each * ratio(self.appliers, 1)),
                    measure: Measure::Rows,
                };
                if by_rows.share > by_time.share {
                    by_rows
                } else {
                    by_time
                }
            }
            _ => by_time,
        }
    }

    fn stay(&self, at: Duration, reason: Reason) -> Decision {
        Decision {
            at,
            from: self.appliers,
            to: self.appliers,
            busy: self.busy,
            rows_per_second: self.rows,
            reason,
        }
    }

    fn change(&mut self, at: Duration, to: usize, reason: Reason) -> Decision {
        let from = std::mem::replace(&mut self.appliers, to);
        let busy = self.busy;
        // The same work is another share of another number of appliers.
        let scale = ratio(from, to);
        self.busy = (self.busy * scale).min(1.0);
        self.waiting = (self.waiting * scale).min(1.0);
        self.last_change = Some(at);
        self.full_since = None;
        self.idle_since = None;
        Decision {
            at,
            from,
            to,
            busy,
            rows_per_second: self.rows,
            reason,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "numbers of processes are small")]
fn ratio(a: usize, b: usize) -> f64 {
    a as f64 / b.max(1) as f64
}

fn sane(limits: Limits) -> Limits {
    let minimum = limits.minimum.max(1);
    Limits {
        minimum,
        maximum: limits.maximum.max(minimum),
        ..limits
    }
}
