use braid_bgworker::busy_time::BusyTime;

const SECOND: i64 = 1_000_000;

/// Returns the busy share in percent, rounded.
fn percent(busy: &BusyTime, now: i64, since: Option<i64>) -> Option<i64> {
    #[expect(clippy::cast_possible_truncation, reason = "0 to 100")]
    busy.share(now, since)
        .map(|share| (share * 100.0).round() as i64)
}

#[test]
fn the_share_is_that_of_the_last_seconds() {
    let busy = BusyTime::default();
    let start = 1000 * SECOND;
    busy.start(start);
    assert_eq!(percent(&busy, start, None), None);
    // Half of each second for a minute, a tenth for another one, then nothing.
    let load = |second: i64| match second {
        0..60 => 500_000,
        60..120 => 100_000,
        _ => 0,
    };
    for second in 0..180 {
        busy.add(load(second));
        let now = start + (second + 1) * SECOND;
        busy.look(now, None);
        let seen = percent(&busy, now, None).unwrap();
        // Earlier load counts for twenty seconds, and not longer.
        let range = match second {
            0..60 => 50..=50,
            60..80 => 10..=50,
            80..120 => 10..=10,
            120..140 => 0..=10,
            _ => 0..=0,
        };
        assert!(range.contains(&seen), "{seen} % in second {second}");
    }
}

#[test]
fn what_is_in_hand_counts_while_it_is_and_once() {
    let busy = BusyTime::default();
    busy.start(0);
    let taken = 5 * SECOND;
    for second in 6..=60 {
        let now = second * SECOND;
        busy.look(now, Some(taken));
        let seen = percent(&busy, now, Some(taken)).unwrap();
        if second >= 30 {
            assert_eq!(seen, 100, "in second {second}");
        }
    }
    busy.add(55 * 1_000_000);
    assert_eq!(percent(&busy, 60 * SECOND, None), Some(100));
    busy.start(100 * SECOND);
    assert_eq!(percent(&busy, 101 * SECOND, None), Some(0));
}
