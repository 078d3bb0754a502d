//! How much a subscription applies per second, for the views. Run by the leader.

use std::time::{Duration, Instant};

/// Shortest time between two readings.
const INTERVAL: Duration = Duration::from_secs(2);

/// Rates, per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Transactions.
    pub transactions: f64,
    /// Rows.
    pub rows: f64,
}

/// The counters at the last reading.
#[derive(Debug)]
pub struct Throughput {
    at: Instant,
    transactions: u64,
    rows: u64,
}

impl Throughput {
    /// Starts with counters of zero.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            at: now,
            transactions: 0,
            rows: 0,
        }
    }

    /// Returns whether a reading is due.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= INTERVAL
    }

    /// Reads the counters, and returns the rates since the last reading.
    #[must_use]
    pub fn look(&mut self, now: Instant, transactions: u64, rows: u64) -> Rates {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let rates = Rates {
            transactions: per_second(transactions, self.transactions),
            rows: per_second(rows, self.rows),
        };
        *self = Self {
            at: now,
            transactions,
            rows,
        };
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_since_the_last_look() {
        let now = Instant::now();
        let mut throughput = Throughput::new(now);
        assert!(!throughput.is_due(now + INTERVAL / 2));
        assert!(throughput.is_due(now + INTERVAL));
        let rates = throughput.look(now + INTERVAL, 10, 40);
        assert_eq!(
            rates,
            Rates {
                transactions: 5.0,
                rows: 20.0
            }
        );
        let rates = throughput.look(now + INTERVAL * 2, 10, 42);
        assert_eq!(
            rates,
            Rates {
                transactions: 0.0,
                rows: 1.0
            }
        );
    }

    #[test]
    fn counters_that_were_reset_are_no_rate() {
        let now = Instant::now();
        let mut throughput = Throughput::new(now);
        let _ = throughput.look(now + INTERVAL, 10, 40);
        let rates = throughput.look(now + INTERVAL * 2, 0, 0);
        assert_eq!(
            rates,
            Rates {
                transactions: 0.0,
                rows: 0.0
            }
        );
    }
}
