//! Decides whether a subscription's transactions go to all of its appliers or to one of them. Run
//! by the leader, many times a second.
//!
//! If transactions are committed in the provider's order, each applier waits for the others'
//! commits. If transactions are long compared with that wait, or wait for the disk, several
//! appliers are faster. If they are short, one is: its warm processor caches outweigh parallelism,
//! above all with few processors. The answer depends on the tables, the load and the machine, so it
//! is tried out. While transactions wait, one applier and all appliers take turns for some
//! hundredths of a second each, and the faster way is kept. The trial is repeated after a pause,
//! which grows if the trial changes nothing.
//!
//! All appliers cost more processor time, so they are chosen only if they are faster by a margin.
//! While no transactions wait, nothing is tried and the last choice stays, as each change costs a
//! moment.
//!
//! Not for: how many appliers there are (`scaling`).

use std::time::Duration;

/// How many appliers take transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// One applier takes all transactions.
    One,
    /// Each applier takes transactions.
    All,
}

impl Breadth {
    fn other(self) -> Self {
        match self {
            Self::One => Self::All,
            Self::All => Self::One,
        }
    }
}

/// Thresholds and times. The default is the documented rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// Start of a turn that is not counted, as transactions of the turn before still run,
    pub settle: Duration,
    /// at least until this many local transactions are committed.
    pub settle_commits: u64,
    /// A turn is counted for at least this long,
    pub window: Duration,
    /// until this many transactions are committed in it,
    pub transactions: u64,
    /// and this many local transactions. A batch counts as one; there must be many of them, so that
    /// one more or less does not matter.
    pub commits: u64,
    /// Longest time that a turn is counted.
    pub window_at_most: Duration,
    /// Turns of each side in a trial.
    pub turns: u32,
    /// All appliers replace one if they are faster by this factor.
    pub gain: f64,
    /// All appliers are kept while they are faster by this factor.
    pub keep: f64,
    /// How long transactions have to wait before the first trial, and before the first one after
    /// the number of appliers has changed: new processes read their tables' definitions first.
    pub warm_up: Duration,
    /// Pause before the trial that follows a change.
    pub pause: Duration,
    /// A trial that changes nothing doubles the pause, up to this.
    pub pause_at_most: Duration,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            settle: Duration::from_millis(5),
            settle_commits: 2,
            window: Duration::from_millis(30),
            transactions: 50,
            commits: 10,
            window_at_most: Duration::from_secs(2),
            turns: 3,
            gain: 1.1,
            keep: 1.05,
            warm_up: Duration::from_millis(100),
            pause: Duration::from_secs(1),
            pause_at_most: Duration::from_secs(60),
        }
    }
}

/// Counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Time of the reading, on any monotonic clock.
    pub at: Duration,
    /// Remote transactions committed locally so far.
    pub transactions: u64,
    /// Local transactions committed for these, counted from any start. May lag by a batch for a
    /// moment.
    pub commits: u64,
    /// Work done so far, in any unit: rows and transactions, say.
    pub work: u64,
    /// Transactions received and not committed locally yet.
    pub in_flight: u64,
}

/// Result of a trial: work per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// With one applier.
    pub one: f64,
    /// With all.
    pub all: f64,
}

/// Time and work of several turns.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    time: Duration,
    work: u64,
}

impl Sum {
    fn add(&mut self, from: Look, to: Look) {
        self.time += to.at.saturating_sub(from.at);
        self.work += to.work.saturating_sub(from.work);
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn rate(self) -> f64 {
        self.work as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

/// A turn of a trial: first it settles, then it counts.
#[derive(Debug, Clone, Copy)]
enum Turn {
    Settling(Look),
    Counting(Look),
}

#[derive(Debug)]
struct Trial {
    whose: Breadth,
    /// `None` until transactions wait.
    turn: Option<Turn>,
    turns: u32,
    one: Sum,
    all: Sum,
}

/// Returns how many commits were added, for a counter that may have begun below zero.
fn more(from: u64, to: u64) -> u64 {
    to.wrapping_sub(from).cast_signed().max(0).cast_unsigned()
}

/// Decides for one subscription.
#[derive(Debug)]
pub struct Chooser {
    rule: Rule,
    chosen: Breadth,
    /// How long transactions have waited since the last trial.
    waited: Duration,
    /// How long they have to wait until the next trial.
    pause: Duration,
    /// Time of the last call that saw transactions waiting; `None` if the last call saw none.
    last: Option<Duration>,
    trial: Option<Trial>,
    rates: Option<Rates>,
}

impl Chooser {
    /// Starts with one applier.
    #[must_use]
    pub fn new(rule: Rule) -> Self {
        Self {
            rule,
            chosen: Breadth::One,
            waited: Duration::ZERO,
            pause: rule.warm_up,
            last: None,
            trial: None,
            rates: None,
        }
    }

    /// Returns the result of the last trial.
    #[must_use]
    pub fn rates(&self) -> Option<Rates> {
        self.rates
    }

    /// Starts over, as the number of appliers has changed: a trial follows soon.
    pub fn forget(&mut self) {
        self.pause = self.rule.warm_up;
        self.waited = Duration::ZERO;
        self.trial = None;
        self.rates = None;
    }

    /// Takes a reading and returns how many appliers take transactions from now on.
    pub fn look(&mut self, look: Look) -> Breadth {
        // One transaction is being applied, and another one could be.
        if look.in_flight < 2 {
            self.last = None;
            if let Some(trial) = &mut self.trial {
                trial.turn = None;
            }
            return self.chosen;
        }
        if let Some(last) = self.last.replace(look.at) {
            self.waited += look.at.saturating_sub(last);
        }
        if self.trial.is_none() && self.waited >= self.pause {
            self.trial = Some(Trial {
                whose: self.chosen,
                turn: None,
                turns: 0,
                one: Sum::default(),
                all: Sum::default(),
            });
        }
        let Some(trial) = &mut self.trial else {
            return self.chosen;
        };
        match trial.turn {
            None => trial.turn = Some(Turn::Settling(look)),
            Some(Turn::Settling(since)) => {
                let time = look.at.saturating_sub(since.at);
                let enough = more(since.commits, look.commits) >= self.rule.settle_commits
                    || time >= self.rule.window_at_most;
                if time >= self.rule.settle && enough {
                    trial.turn = Some(Turn::Counting(look));
                }
            }
            Some(Turn::Counting(from)) => {
                let time = look.at.saturating_sub(from.at);
                let enough = look.transactions.saturating_sub(from.transactions)
                    >= self.rule.transactions
                    && more(from.commits, look.commits) >= self.rule.commits
                    || time >= self.rule.window_at_most;
                if time >= self.rule.window && enough {
                    let sum = match trial.whose {
                        Breadth::One => &mut trial.one,
                        Breadth::All => &mut trial.all,
                    };
                    sum.add(from, look);
                    trial.turns += 1;
                    trial.whose = trial.whose.other();
                    trial.turn = Some(Turn::Settling(look));
                }
            }
        }
        if trial.turns < 2 * self.rule.turns {
            return trial.whose;
        }
        let rates = Rates {
            one: trial.one.rate(),
            all: trial.all.rate(),
        };
        self.conclude(rates);
        self.chosen
    }

    fn conclude(&mut self, rates: Rates) {
        let margin = match self.chosen {
            Breadth::One => self.rule.gain,
            Breadth::All => self.rule.keep,
        };
        let chosen = if rates.all >= rates.one * margin {
            Breadth::All
        } else {
            Breadth::One
        };
        self.pause = if chosen == self.chosen {
            (self.pause * 2).clamp(self.rule.pause, self.rule.pause_at_most)
        } else {
            self.rule.pause
        };
        self.chosen = chosen;
        self.rates = Some(rates);
        self.trial = None;
        self.waited = Duration::ZERO;
    }
}
