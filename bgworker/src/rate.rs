//! Limits how fast a subscriber reads: a token bucket that several processes share, as one number
//! in shared memory.
//!
//! The number is a time: everything taken is paid for up to then. If it lies before now, the
//! difference, at most [`BURST`], is credit; if it lies ahead of now, the difference is debt. A
//! process may take if there is no debt, and then as much as it needs: a record cannot be read in
//! part, so a large one is paid for afterwards.
//!
//! So over any stretch of time `t`, at most `rate * (t + BURST)` is taken, not counting the last
//! take (of as many processes as take at that very moment). Nothing is lost to rounding: the
//! remainder of a price is added to the next.
//!
//! Run by leaders and copy workers, set by the manager. All times are nanoseconds of one monotonic
//! clock.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// Largest credit, in nanoseconds.
pub const BURST: u64 = 100_000_000;

const SECOND: u128 = 1_000_000_000;

/// A bucket. Zeroed memory is a full one.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Bucket {
    paid_until: AtomicU64,
}

impl Bucket {
    /// Returns the nanoseconds until something may be taken; 0: now.
    #[must_use]
    pub fn ready_in(&self, now: u64) -> u64 {
        self.paid_until.load(Ordering::Relaxed).saturating_sub(now)
    }

    /// Takes something at a price in nanoseconds, which may leave a debt.
    pub fn take(&self, now: u64, price: u64) {
        let paid = |paid: u64| paid.max(now.saturating_sub(BURST)).saturating_add(price);
        self.paid_until
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |until| {
                Some(paid(until))
            })
            .ok();
    }

    /// Clears debts, which were made under another limit.
    pub fn settle(&self, now: u64) {
        self.paid_until.fetch_min(now, Ordering::Relaxed);
    }
}

/// Computes prices under a limit, for one process.
#[derive(Debug, Clone)]
pub struct Price {
    per_second: NonZeroU64,
    /// Remainder of the last price, in parts of a nanosecond: below `per_second`.
    left_over: u64,
}

impl Price {
    /// Returns the prices under a limit of `per_second` units a second.
    #[must_use]
    pub fn new(per_second: NonZeroU64) -> Self {
        Self {
            per_second,
            left_over: 0,
        }
    }

    /// Returns the limit.
    #[must_use]
    pub fn per_second(&self) -> NonZeroU64 {
        self.per_second
    }

    /// Returns the price of `units` in nanoseconds.
    pub fn of(&mut self, units: u64) -> u64 {
        let rate = u128::from(self.per_second.get());
        let total = u128::from(units) * SECOND + u128::from(self.left_over);
        // Below `rate`, which is a u64.
        self.left_over = u64::try_from(total % rate).unwrap_or(0);
        u64::try_from(total / rate).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rate(per_second: u64) -> Price {
        Price::new(NonZeroU64::new(per_second).unwrap_or(NonZeroU64::MIN))
    }

    /// Returns the units that cost `nanos` at most, times SECOND to avoid fractions.
    fn worth(nanos: u128, per_second: u64) -> u128 {
        nanos * u128::from(per_second)
    }

    #[test]
    fn a_fresh_bucket_is_full_and_a_debt_is_waited_for_exactly() {
        let (bucket, mut price) = (Bucket::default(), rate(1000));
        let start = 5_000_000_000;
        assert_eq!(bucket.ready_in(start), 0);
        // 100 are credit; 1,000 more cost a second.
        bucket.take(start, price.of(1100));
        assert_eq!(bucket.ready_in(start), 1_000_000_000);
        assert_eq!(bucket.ready_in(start + 999_999_999), 1);
        assert_eq!(bucket.ready_in(start + 1_000_000_000), 0);
    }

    #[test]
    fn a_huge_record_goes_into_debt_for_as_long_as_it_is_worth() {
        let (bucket, mut price) = (Bucket::default(), rate(1024));
        let start = 1_000_000_000_000;
        bucket.take(start, price.of(1 << 30));
        assert_eq!(bucket.ready_in(start), (1 << 20) * 1_000_000_000 - BURST);
        bucket.settle(start);
        assert_eq!(bucket.ready_in(start), 0, "another limit starts without it");
    }

    #[test]
    fn the_largest_numbers_saturate() {
        let (bucket, mut price) = (Bucket::default(), rate(1));
        bucket.take(u64::MAX, price.of(u64::MAX));
        assert_eq!(bucket.ready_in(0), u64::MAX);
        let mut fast = rate(u64::MAX);
        assert_eq!(fast.of(u64::MAX), 1_000_000_000);
        assert_eq!(fast.of(1), 0);
        // If time seems to stand still or to go back, there is no credit.
        let bucket = Bucket::default();
        let mut price = rate(10);
        bucket.take(2_000_000_000, price.of(10));
        bucket.take(1_000_000_000, price.of(10));
        assert_eq!(bucket.ready_in(2_000_000_000), 2 * 1_000_000_000 - BURST);
    }

    #[test]
    fn nothing_is_lost_to_rounding() {
        // A unit costs a third of a nanosecond.
        let mut price = rate(3_000_000_000);
        let paid: u64 = (0..3_000_000).map(|_| price.of(1)).sum();
        assert_eq!(paid, 1_000_000);
    }

    /// Runs processes that are always ready to take, each at its own pace, for a while. Returns
    /// when each take happened, and how much it took.
    fn takers(per_second: u64, sizes: &[u64], gaps: &[u64], processes: usize) -> Vec<(u64, u64)> {
        let bucket = Bucket::default();
        let mut prices: Vec<Price> = (0..processes).map(|_| rate(per_second)).collect();
        let mut now = 10_000_000_000_u64;
        let mut taken = Vec::new();
        for (turn, (size, gap)) in sizes.iter().zip(gaps.iter().cycle()).enumerate() {
            now += gap;
            now += bucket.ready_in(now);
            // No process takes between the check and the take, except those of the same moment.
            let mut together = 1 + turn % processes;
            while together > 0 {
                together -= 1;
                if let Some(price) = prices.get_mut(together) {
                    bucket.take(now, price.of(*size));
                    taken.push((now, *size));
                }
            }
        }
        taken
    }

    proptest! {
        #[test]
        fn no_window_has_more_than_the_limit_and_one_burst(
            per_second in 1_u64..10_000_000_000,
            sizes in proptest::collection::vec(prop_oneof![1_u64..10, 1_u64..10_000, 1_u64..100_000_000], 1..120),
            gaps in proptest::collection::vec(prop_oneof![Just(0_u64), 0_u64..1_000, 0_u64..1_000_000_000], 1..20),
            processes in 1_usize..4,
        ) {
            let taken = takers(per_second, &sizes, &gaps, processes);
            for first in 0..taken.len() {
                let mut sum = 0_u128;
                let Some((from, _)) = taken.get(first) else { continue };
                for (at, size) in taken.iter().skip(first) {
                    // Takes of this moment come on top, and so do the remainders of each process.
                    let before: u128 = taken.iter().skip(first).filter(|(t, _)| t < at).map(|(_, s)| u128::from(*s)).sum();
                    let allowed = worth(u128::from(at - from) + u128::from(BURST) + processes as u128, per_second);
                    prop_assert!(before * SECOND <= allowed, "{} units in {} ns at {}/s", before, at - from, per_second);
                    sum += u128::from(*size);
                }
                prop_assert!(sum > 0);
            }
        }

        #[test]
        fn who_always_waits_gets_what_the_limit_allows(
            per_second in 1_u64..10_000_000_000,
            sizes in proptest::collection::vec(1_u64..100_000, 50..300),
        ) {
            let taken = takers(per_second, &sizes, &[0], 1);
            let (Some((start, _)), Some((end, last))) = (taken.first(), taken.last()) else { return Ok(()) };
            let before: u128 = taken.iter().map(|(_, size)| u128::from(*size)).sum::<u128>() - u128::from(*last);
            // Everything that this time was worth was taken, up to a nanosecond, and the burst on
            // top if it was needed.
            prop_assert!(before * SECOND + u128::from(per_second) >= worth(u128::from(end - start), per_second));
            prop_assert!(before * SECOND <= worth(u128::from(end - start) + u128::from(BURST) + 1, per_second));
        }

        #[test]
        fn pauses_save_up_no_more_than_a_burst(per_second in 1_u64..1_000_000, pause in 0_u64..u64::MAX / 4) {
            let (bucket, mut price) = (Bucket::default(), rate(per_second));
            bucket.take(BURST, price.of(1));
            let now = BURST.saturating_add(pause).saturating_add(bucket.ready_in(BURST));
            bucket.take(now, price.of(per_second));
            prop_assert!(bucket.ready_in(now) >= 1_000_000_000 - BURST);
        }
    }
}
