//! Applies the rule (`braid_bgworker::breadth`) that decides whether transactions go to one applier
//! or to all.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::breadth::{Breadth, Chooser, Look, Rule};
use braid_node::settings::{self, ParallelApply};
use braid_postgres::process;

use super::reception::Reception;
use crate::applier;

/// Not looked at more often: the counters are written by the appliers, and reading them has a price
/// for these too.
const INTERVAL: Duration = Duration::from_millis(1);

/// The state between two looks.
#[derive(Debug)]
pub(super) struct Spread {
    /// `None` where commits do not wait for each other.
    chooser: Option<Chooser>,
    began: Instant,
    looked: Duration,
    /// The result of the rule. `None` if there is nothing to choose, and all appliers claim
    /// transactions, small ones in runs.
    breadth: Option<Breadth>,
    /// The number of appliers at the last look.
    appliers: usize,
}

impl Spread {
    pub(super) fn new(relaxed: bool) -> Self {
        Self {
            chooser: (!relaxed).then(|| Chooser::new(Rule::default())),
            began: Instant::now(),
            looked: Duration::ZERO,
            breadth: None,
            appliers: 0,
        }
    }
}

impl Reception {
    /// Have one applier take transactions, or all, whichever is faster.
    pub(super) fn spread_transactions(&mut self) {
        let at = self.spread.began.elapsed();
        if at.saturating_sub(self.spread.looked) < INTERVAL {
            return;
        }
        self.spread.looked = at;
        let breadth = self.choose_breadth(at);
        if breadth == self.spread.breadth {
            return;
        }
        self.spread.breadth = breadth;
        // All together are faster only where a transaction takes long against a hand-over: then
        // also where it is small.
        let singly = breadth == Some(Breadth::All);
        self.handout
            .set_grain(applier::grain(&self.subscription, singly));
        let ring = self.group.ring;
        ring.set_singly(singly);
        ring.set_taking(match breadth {
            Some(Breadth::One) => 1,
            Some(Breadth::All) | None => usize::MAX,
        });
        // Some appliers have something to claim now; and transactions left for an applier that is
        // to wait are for another one.
        for latch in ring.all_appliers().iter() {
            process::set_latch(latch);
        }
    }

    fn choose_breadth(&mut self, at: Duration) -> Option<Breadth> {
        let ring = self.group.ring;
        let appliers = ring.active_appliers();
        let before = std::mem::replace(&mut self.spread.appliers, appliers);
        if appliers < 2 || settings::parallel_apply() != ParallelApply::Auto {
            return None;
        }
        let chooser = self.spread.chooser.as_mut()?;
        if appliers != before {
            chooser.forget();
        }
        let transactions = ring.committed();
        let counters = &self.entry.schedule;
        let breadth = chooser.look(Look {
            at,
            transactions,
            commits: counters.commits_of(transactions),
            work: transactions.wrapping_add(self.entry.rows()),
            in_flight: ring.published().saturating_sub(transactions),
        });
        let rates = chooser.rates();
        for (counter, rate) in [
            (&counters.rate_one, rates.map(|rates| rates.one)),
            (&counters.rate_all, rates.map(|rates| rates.all)),
        ] {
            counter.store(rate.map_or(0, f64::to_bits), Ordering::Relaxed);
        }
        Some(breadth)
    }
}
