//! Clock offsets: measurements are right for any network, and a clock that is set is noticed.

use braid_bgworker::skew::{Alarm, Burst, DRIFT, Exchange, REPEAT, Say, Skew};
use proptest::prelude::*;

const SECOND: i64 = 1_000_000;

/// Returns an exchange whose request takes `to` and whose reply takes `back`, with a clock that is
/// `difference` ahead.
fn exchange(at: i64, to: i64, back: i64, difference: i64) -> Exchange {
    Exchange {
        asked: at,
        answered: at + to + back,
        there: at + to + difference,
    }
}

#[test]
fn one_exchange_is_right_to_half_its_round_trip() {
    let mut skew = Skew::default();
    assert_eq!(skew.estimate(0), None);
    assert_eq!(skew.add(&exchange(0, 100, 300, 5 * SECOND)), None);
    let known = skew.estimate(400).unwrap();
    assert_eq!(known.error, 201);
    assert!((known.difference - 5 * SECOND).abs() <= known.error);
}

#[test]
fn the_quickest_counts_and_others_take_nothing_away() {
    let mut skew = Skew::default();
    skew.add(&exchange(0, 50, 50, 7000));
    for slow in 1..=20 {
        skew.add(&exchange(slow * SECOND, 10, 3 * SECOND, 7000));
    }
    let known = skew.estimate(24 * SECOND).unwrap();
    assert!(known.error <= 51 + 24 * DRIFT, "{known:?}");
    assert!((known.difference - 7000).abs() <= known.error);
}

#[test]
fn ways_that_differ_complete_each_other() {
    let mut skew = Skew::default();
    skew.add(&exchange(0, 10, 100_000, 0));
    skew.add(&exchange(200_000, 100_000, 10, 0));
    assert!(skew.estimate(300_010).unwrap().error < 60);
}

#[test]
fn a_clock_that_is_set_is_noticed_and_the_past_forgotten() {
    let mut skew = Skew::default();
    for at in 0..10 {
        assert_eq!(skew.add(&exchange(at * 10 * SECOND, 100, 100, 0)), None);
    }
    let by = skew
        .add(&exchange(100 * SECOND, 100, 100, 3 * SECOND))
        .unwrap();
    assert!((by - 3 * SECOND).abs() < 500, "{by}");
    let known = skew.estimate(100 * SECOND + 200).unwrap();
    assert!((known.difference - 3 * SECOND).abs() <= 101);
    assert!(
        skew.add(&exchange(110 * SECOND, 100, 100, -SECOND))
            .unwrap()
            < -3 * SECOND
    );
}

#[test]
fn drift_is_followed() {
    let mut skew = Skew::default();
    for step in 0..200 {
        let at = step * 10 * SECOND;
        // 80 microseconds a second.
        assert_eq!(skew.add(&exchange(at, 200, 200, step * 800)), None);
        let known = skew.estimate(at + 400).unwrap();
        assert!((known.difference - step * 800).abs() <= known.error + 1);
    }
}

#[test]
fn a_row_of_answers_is_told_from_single_keepalives() {
    let mut burst = Burst::new(1000);
    // Under way when the request was sent: one, and one with another position.
    assert_eq!(burst.keepalive(5, 70, 1010), None);
    assert_eq!(burst.keepalive(6, 80, 1020), None);
    for n in 1..Burst::LENGTH {
        assert_eq!(burst.keepalive(7, 90 + i64::from(n), 1100), None);
    }
    let answer = burst.keepalive(7, 99, 1101);
    let expected = Exchange {
        asked: 1000,
        answered: 1101,
        there: 99,
    };
    assert_eq!(answer, Some(expected));
}

#[test]
fn a_row_is_broken_by_data_by_another_position_and_by_time() {
    for broken in 0..3 {
        let mut burst = Burst::new(0);
        for n in 1..Burst::LENGTH {
            assert_eq!(burst.keepalive(7, i64::from(n), 10), None);
        }
        let answer = match broken {
            0 => {
                burst.other();
                burst.keepalive(7, 8, 10)
            }
            1 => burst.keepalive(8, 8, 10),
            _ => burst.keepalive(7, 5000, 10),
        };
        assert_eq!(answer, None);
        // As many keepalives arrived as were requested: after a quiet time no more are expected.
        assert!(!burst.is_lost(9 * SECOND, SECOND));
        assert!(burst.is_lost(9 * SECOND, 6 * SECOND));
    }
    // Nothing arrived: the replies are under way, perhaps in a long queue.
    let burst = Burst::new(0);
    assert!(!burst.is_lost(300 * SECOND, 300 * SECOND));
    assert!(burst.is_lost(601 * SECOND, 0));
}

#[test]
fn warnings_are_confirmed_and_rare() {
    let mut alarm = Alarm::default();
    let limit = Some(500);
    assert_eq!(alarm.judge(900, 300, limit, 1), None, "once");
    assert_eq!(
        alarm.judge(900, 500, limit, 2),
        None,
        "the error explains it"
    );
    assert_eq!(alarm.judge(900, 300, limit, 3), None, "once, again");
    assert_eq!(alarm.judge(-900, 300, limit, 4), Some(Say::Apart));
    assert_eq!(alarm.judge(900, 300, limit, 5), None, "said already");
    let mut next = Alarm::resume(alarm.warned_at());
    assert_eq!(next.judge(900, 300, limit, 6), None);
    assert_eq!(next.judge(900, 300, limit, 7), None, "by the one before it");
    assert_eq!(next.judge(900, 300, limit, 4 + REPEAT), Some(Say::Apart));
    assert_eq!(next.judge(400, 300, limit, 5 + REPEAT), None, "perhaps");
    assert_eq!(next.judge(100, 300, limit, 6 + REPEAT), Some(Say::Together));
    assert_eq!(next.judge(100, 300, limit, 7 + REPEAT), None);
    assert_eq!(next.judge(i64::MIN, 0, limit, 8), None);
    assert_eq!(next.judge(i64::MIN, 0, limit, 9), Some(Say::Apart));
    assert_eq!(next.judge(i64::MIN, 0, None, 10), None);
    assert_eq!(next.warned_at(), 0);
}

#[test]
fn no_numbers_overflow() {
    let mut skew = Skew::default();
    for extreme in [i64::MIN, -1, 0, i64::MAX] {
        for there in [i64::MIN, 0, i64::MAX] {
            skew.add(&Exchange {
                asked: extreme,
                answered: extreme,
                there,
            });
            assert!(skew.estimate(i64::MAX).is_some());
            assert!(skew.estimate(i64::MIN).is_some());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// For any delays, and with clocks that drift within the limit, the true difference is within
    /// the error.
    #[test]
    fn the_truth_is_within_the_error(
        start in -1_000_000_000_000_i64..1_000_000_000_000,
        steps in prop::collection::vec((1_i64..60_000_000, 0_i64..2_000_000, 0_i64..2_000_000, -DRIFT..=DRIFT), 1..100),
    ) {
        let mut skew = Skew::default();
        let mut now = 1_000_000_000_i64;
        let mut difference = start;
        for (pause, to, back, drift) in steps {
            // The clock drifts while there is no exchange, so that the difference is known exactly.
            now += pause;
            difference += pause * drift / 1_000_000;
            prop_assert_eq!(skew.add(&exchange(now, to, back, difference)), None);
            now += to + back;
            let known = skew.estimate(now).unwrap();
            prop_assert!((known.difference - difference).abs() <= known.error, "{:?} is not {}", known, difference);
            prop_assert!(known.error <= (to + back) / 2 + 2);
        }
    }

    /// If a clock is set by more than the error, the next exchange notices it, and its error holds.
    #[test]
    fn a_step_is_noticed(
        before in prop::collection::vec((0_i64..10_000, 0_i64..10_000), 1..40),
        (to, back) in (0_i64..10_000, 0_i64..10_000),
        step in prop_oneof![-1_000_000_000_i64..-50_000, 50_000_i64..1_000_000_000],
    ) {
        let mut skew = Skew::default();
        let mut now = 0;
        for (to, back) in before {
            skew.add(&exchange(now, to, back, 0));
            now += SECOND;
        }
        prop_assert!(skew.add(&exchange(now, to, back, step)).is_some());
        let known = skew.estimate(now + to + back).unwrap();
        prop_assert!((known.difference - step).abs() <= known.error);
    }
}
