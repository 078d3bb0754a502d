//! Whether a subscription's transactions go to all of its appliers or to one of them. Run by the
//! leader, many times a second.
//!
//! Where transactions are committed in the provider's order, each applier waits for the others'
//! commits. Is a transaction long against such a wait, or does it wait for the disk, then several
//! appliers are faster than one. Is it short, then they are slower: what an applier has in its
//! processor's caches is worth more than company, above all where processors are few. Which it is
//! depends on the tables, the load and the machine, so it is tried: while transactions wait, one
//! applier and all of them take turns for some hundredths of a second each, and the faster way is
//! kept. It is tried again after a while, less often when that changes nothing.
//!
//! One is chosen unless all are faster by a margin, since they cost more processor time. While
//! nothing waits, nothing is tried: what was found last stays, as each change costs a moment.
//!
//! Not for: how many appliers there are (`scaling`).

use std::time::Duration;

/// Who takes transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// One applier.
    One,
    /// Each of them.
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

/// Marks and times. The default is the rule as documented.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// So much of a turn is not counted: what the turn before has begun is still in hand,
    pub settle: Duration,
    /// at least until so many local transactions are committed.
    pub settle_commits: u64,
    /// A turn is counted for at least so long,
    pub window: Duration,
    /// until so many transactions are committed in it,
    pub transactions: u64,
    /// and so many local ones: a batch counts once, and there are to be many of them, as one more
    /// or less is not to matter,
    pub commits: u64,
    /// and no longer than this.
    pub window_at_most: Duration,
    /// Turns of each in a trial.
    pub turns: u32,
    /// All are chosen instead of one when they are faster by this factor.
    pub gain: f64,
    /// All are kept while they are faster by this factor.
    pub keep: f64,
    /// So long transactions have to wait before the first trial, and the first with other appliers:
    /// new processes read their tables' definitions first.
    pub warm_up: Duration,
    /// And so long before the trial that follows a change.
    pub pause: Duration,
    /// A trial that changes nothing doubles the time before the next one, up to this.
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

/// What is to be seen at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// When, on any clock that only goes forwards.
    pub at: Duration,
    /// Transactions committed here so far.
    pub transactions: u64,
    /// As how many local transactions, counted from anywhere; it may be behind by a batch for a
    /// moment.
    pub commits: u64,
    /// Work done so far, in any unit: rows and transactions, say.
    pub work: u64,
    /// Transactions received and not committed here yet.
    pub in_flight: u64,
}

/// What a trial has found: work per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// With one applier.
    pub one: f64,
    /// With all.
    pub all: f64,
}

/// Time and work of turns.
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

/// A turn of a trial: it settles, then it counts.
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

/// How many more commits there are, of a count that may have begun below zero.
fn more(from: u64, to: u64) -> u64 {
    to.wrapping_sub(from).cast_signed().max(0).cast_unsigned()
}

/// Decides for one subscription.
#[derive(Debug)]
pub struct Chooser {
    rule: Rule,
    chosen: Breadth,
    /// For how long transactions have waited since the last trial.
    waited: Duration,
    /// For how long they have to, until the next one.
    pause: Duration,
    /// When transactions were seen waiting at the last look.
    last: Option<Duration>,
    trial: Option<Trial>,
    rates: Option<Rates>,
}

impl Chooser {
    /// Start with one.
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

    /// What the last trial has found.
    #[must_use]
    pub fn rates(&self) -> Option<Rates> {
        self.rates
    }

    /// All are more or fewer than they were: what was found is to be looked at again soon.
    pub fn forget(&mut self) {
        self.pause = self.rule.warm_up;
        self.waited = Duration::ZERO;
        self.trial = None;
        self.rates = None;
    }

    /// Who is to take transactions from now on.
    pub fn look(&mut self, look: Look) -> Breadth {
        // One in hand, and another one that could be.
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
