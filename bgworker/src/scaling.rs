//! The number of appliers of a subscription: the 90-50 rule (Alibaba DTS, PVLDB 17(12), 2024,
//! section 4.2). Run by the leader, about once a second.
//!
//! Between a minimum and a maximum, appliers double when their load reaches 90 % and halve when it
//! has fallen to 50 %. The load is the larger of two shares: of the appliers' time that they spend
//! on transactions, and of the rows per second that they can carry.
//!
//! Half as many appliers at 50 % would be full, and would double again at once. To prevent
//! oscillation:
//! - The load is a moving average. It has to stay beyond a threshold for a while: briefly to grow,
//!   longer to shrink.
//! - Appliers do not halve if half as many would be within a margin of 90 %. So between 42.5 and 50
//!   % nothing happens.
//! - After each change there is a pause in which its effect shows. If a halving had to be reverted
//!   before another could have followed, the next one waits twice as long, up to a limit.
//! - Appliers do not double if they mostly wait for each other, or if the last doubling has brought
//!   nothing: then the bottleneck is elsewhere.
//!
//! Each sample leads to a decision, possibly to stay, with its reason in numbers.
//!
//! Not for: measuring, starting or stopping processes.

use std::fmt;
use std::time::Duration;

/// Bounds of the number of appliers, and the capacity of one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Fewest appliers; at least 1.
    pub minimum: usize,
    /// Most appliers; at least `minimum`.
    pub maximum: usize,
    /// Rows per second that one applier can carry; `None` if only time counts.
    pub rows_per_applier: Option<f64>,
}

/// Thresholds and times. The default is the documented rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// Load from which on appliers double.
    pub grow_at: f64,
    /// Load down to which appliers halve.
    pub shrink_at: f64,
    /// The projected load of half as many appliers must stay this far below `grow_at`.
    pub margin: f64,
    /// Time constant of the average.
    pub smoothing: Duration,
    /// How long the load must be at `grow_at`.
    pub grow_after: Duration,
    /// How long the load must be at `shrink_at`.
    pub shrink_after: Duration,
    /// Largest value that this time gets after reverted halvings.
    pub shrink_after_at_most: Duration,
    /// Pause after a change.
    pub pause: Duration,
    /// Share of the busy time from which on waiting for other transactions counts as the
    /// bottleneck.
    pub blocked_at: f64,
    /// A doubling was useful if rows per second grew by this factor.
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

/// Measurements since the last sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Time of the sample, on any monotonic clock.
    pub at: Duration,
    /// Share of all appliers' time that they spent on transactions, 0 to 1. Includes appliers that
    /// may not take any (`breadth`).
    pub busy: f64,
    /// Share of their time in which they had a transaction and waited: for another transaction, or
    /// for their turn to commit.
    pub waiting: f64,
    /// Rows applied per second, by all appliers.
    pub rows_per_second: f64,
}

/// The kind of share that a load is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Share of time.
    Utilisation,
    /// Share of rows per second.
    Rows,
}

/// A load; 1 is the full capacity of the appliers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// The average.
    pub share: f64,
    /// The kind of share.
    pub measure: Measure,
}

/// Reason of a decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// Doubled: the load has reached the upper threshold.
    Full(Load),
    /// Halved: the load has been at or below the lower threshold for this long.
    Idle(Load, Duration),
    /// The new limits exclude the number of appliers.
    Limits(Limits),
    /// Unchanged: the load is between the thresholds.
    Between(Load),
    /// Unchanged: the load is at the upper threshold, but not yet for long enough.
    NotYetFull(Load),
    /// Unchanged: the load is at the lower threshold, but not yet for the required time, which is
    /// the second value.
    NotYetIdle(Load, Duration),
    /// Unchanged: the last change was a moment ago.
    JustChanged(Load),
    /// Unchanged: full, at the maximum of appliers.
    AtMaximum(Load),
    /// Unchanged: idle, at the minimum of appliers.
    AtMinimum(Load),
    /// Unchanged: half as many appliers would have this load.
    HalfWouldBeFull(Load, f64),
    /// Unchanged: for this share of their busy time appliers wait for each other.
    Blocked(Load, f64),
    /// Unchanged: the last doubling raised rows per second only from the first number to the
    /// second.
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

/// The decision about the number of appliers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// Time of the sample.
    pub at: Duration,
    /// Number of appliers before.
    pub from: usize,
    /// Number of appliers from now on.
    pub to: usize,
    /// Share of time that the appliers spent on transactions before the change: the average that
    /// led to the decision.
    pub busy: f64,
    /// Rows per second, as such an average.
    pub rows_per_second: f64,
    /// Reason of the decision.
    pub reason: Reason,
}

impl Decision {
    /// Returns whether the number changes.
    #[must_use]
    pub fn is_change(&self) -> bool {
        self.from != self.to
    }

    /// Returns whether the load demands more appliers, but there will be no more.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(
            self.reason,
            Reason::AtMaximum(_) | Reason::Blocked(..) | Reason::NoGain(..)
        )
    }
}

/// The last doubling.
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
    /// Averages of the shares of time, and of rows per second.
    busy: f64,
    waiting: f64,
    rows: f64,
    full_since: Option<Duration>,
    idle_since: Option<Duration>,
    last_change: Option<Duration>,
    /// Time of the last halving, if no doubling has followed.
    last_halving: Option<Duration>,
    doubling: Option<Doubling>,
    shrink_after: Duration,
}

impl Scaler {
    /// Starts with `appliers`, clamped to the limits.
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

    /// Returns the wanted number of appliers.
    #[must_use]
    pub fn appliers(&self) -> usize {
        self.appliers
    }

    /// Changes the limits. Their effect follows with the next sample.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = sane(limits);
    }

    /// Takes a sample and decides.
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
            // The bottleneck is gone, or the load is lower.
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
            // The halving did not last: wait longer before the next.
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
            // The load is not low enough, so the time starts anew.
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

    /// Updates the averages with a time constant, so that the interval between samples does not
    /// matter.
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
        // With another number of appliers, the load is another share.
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
