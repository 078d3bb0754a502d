//! The 90-50 rule against load curves (`tests/load`): drawn ones of all kinds, and four that were
//! recorded. The model is simple: an applier carries 1,000 rows a second, and offered rows beyond
//! that wait.

use std::time::Duration;

use braid_bgworker::scaling::{Decision, Limits, Measure, Reason, Rule, Sample, Scaler};

const EACH: f64 = 1000.0;

fn curve(name: &str) -> Vec<f64> {
    let path = format!("{}/tests/load/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap();
    let numbers = text.lines().filter(|line| !line.starts_with('#'));
    numbers.map(|line| line.parse().unwrap()).collect()
}

struct Run {
    changes: Vec<Decision>,
    /// Number of appliers and of waiting rows, second by second.
    appliers: Vec<usize>,
    backlog: Vec<f64>,
}

impl Run {
    fn most_backlog(&self) -> f64 {
        self.backlog.iter().copied().fold(0.0, f64::max)
    }

    fn most(&self) -> usize {
        self.appliers.iter().copied().max().unwrap()
    }

    fn applier_seconds(&self) -> usize {
        self.appliers.iter().sum()
    }

    /// Returns the number of halvings that were reverted within a minute.
    fn swings(&self) -> usize {
        let pairs = self.changes.windows(2);
        let taken_back = |pair: &&[Decision]| {
            pair[0].to < pair[0].from
                && pair[1].to > pair[1].from
                && pair[1].at.checked_sub(pair[0].at).unwrap() < Duration::from_secs(60)
        };
        pairs.filter(taken_back).count()
    }
}

#[allow(clippy::cast_precision_loss, reason = "small numbers")]
fn run(offered: &[f64], limits: Limits, by_rows: bool) -> Run {
    let mut scaler = Scaler::new(Rule::default(), limits, 1);
    let mut run = Run {
        changes: Vec::new(),
        appliers: Vec::new(),
        backlog: Vec::new(),
    };
    let mut backlog = 0.0;
    for (second, offered) in (1_u64..).zip(offered) {
        let capacity = scaler.appliers() as f64 * EACH;
        let done = (backlog + offered).min(capacity);
        backlog += offered - done;
        let decision = scaler.look(Sample {
            at: Duration::from_secs(second),
            // By rows alone: as if the appliers' waiting were invisible.
            busy: if by_rows { 0.0 } else { done / capacity },
            waiting: 0.0,
            rows_per_second: done,
        });
        assert_eq!(decision.to, scaler.appliers());
        assert!((limits.minimum..=limits.maximum).contains(&decision.to));
        if decision.is_change() {
            assert!(
                decision.to == decision.from * 2
                    || decision.to * 2 == decision.from
                    || decision.to == limits.maximum
            );
            run.changes.push(decision);
        }
        run.appliers.push(scaler.appliers());
        run.backlog.push(backlog);
    }
    run
}

fn limits(minimum: usize, maximum: usize) -> Limits {
    Limits {
        minimum,
        maximum,
        rows_per_applier: None,
    }
}

#[test]
fn steps_are_followed_up_and_down() {
    let run = run(&curve("steps"), limits(1, 16), false);
    // At the end of each step: enough, and not more than twice as many as needed.
    let at: Vec<usize> = [89, 179, 269, 359, 599, 839]
        .map(|second| run.appliers[second])
        .to_vec();
    assert_eq!(at, [1, 2, 8, 16, 2, 1]);
    // Two load steps came right after a halving.
    assert!(run.swings() <= 2, "{:?}", run.changes);
    // From 1,500 to 6,000 rows a second: doubled twice within twenty seconds.
    assert!(run.appliers[200] >= 8, "{:?}", &run.appliers[180..210]);
    // Six doublings and six halvings, no more.
    assert!(run.changes.len() <= 12, "{:?}", run.changes);
}

#[test]
fn a_ramp_doubles_before_anything_waits_for_long() {
    let run = run(&curve("ramp"), limits(1, 16), false);
    assert_eq!(run.most(), 16);
    // Less than a second's worth at the top.
    assert!(run.most_backlog() < 12_000.0, "{}", run.most_backlog());
    assert_eq!(*run.appliers.last().unwrap(), 1);
    assert_eq!(run.swings(), 0, "{:?}", run.changes);
    assert_eq!(run.changes.len(), 8, "{:?}", run.changes);
}

#[test]
fn short_bursts_do_not_make_it_swing_for_ever() {
    let run = run(&curve("bursts"), limits(1, 16), false);
    let early = run
        .changes
        .iter()
        .filter(|change| change.at < Duration::from_secs(450));
    let late = run
        .changes
        .iter()
        .filter(|change| change.at >= Duration::from_secs(450));
    assert!(late.count() <= early.count(), "{:?}", run.changes);
    // A burst is worked off before the next one comes.
    let left = (0..15).map(|minute| run.backlog[minute * 60 + 59]);
    assert!(
        left.clone().all(|backlog| backlog < 1.0),
        "{:?}",
        left.collect::<Vec<_>>()
    );
}

#[test]
fn long_bursts_are_carried() {
    let run = run(&curve("long_bursts"), limits(1, 16), false);
    assert!(run.most() >= 8);
    for burst in 0..10 {
        let end = (burst * 180 + 179).min(1799);
        assert!(run.backlog[end] < 1.0, "burst {burst}");
    }
    // The rule learns to stay: the last burst waits less than the first.
    let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
    let (first, last) = (most(&run.backlog[..180]), most(&run.backlog[1620..]));
    assert!(last < first / 4.0, "{first}, {last}");
}

#[test]
fn a_sine_costs_less_than_its_peak() {
    let run = run(&curve("sine"), limits(1, 16), false);
    assert!(run.most_backlog() < 15_000.0, "{}", run.most_backlog());
    assert!(
        run.applier_seconds() < 8 * 1800,
        "{}",
        run.applier_seconds()
    );
    assert!(run.changes.len() <= 6 * 6 + 3, "{:?}", run.changes);
}

#[test]
fn noise_between_the_marks_changes_nothing_once_settled() {
    let run = run(&curve("noise"), limits(1, 16), false);
    assert_eq!(*run.appliers.last().unwrap(), 4);
    let late = run
        .changes
        .iter()
        .filter(|change| change.at > Duration::from_secs(60));
    assert_eq!(late.count(), 0, "{:?}", run.changes);
}

#[test]
fn at_the_edge_of_both_marks_it_does_not_swing() {
    // 1,800 rows a second are 90 % of two appliers and 45 % of four.
    let run = run(&curve("edge"), limits(1, 16), false);
    assert!(run.swings() <= 2, "{:?}", run.changes);
    assert!(run.changes.len() <= 8, "{:?}", run.changes);
}

#[test]
fn a_day_needs_a_quarter_of_what_its_peak_needs() {
    let run = run(&curve("day"), limits(1, 16), false);
    assert!(run.most() >= 8);
    // DTS reports 25.5 % for its own rule (section 6.3.1).
    let share = run.applier_seconds() * 100 / (16 * run.appliers.len());
    assert!(share <= 40, "{share} %");
    let seconds_behind = run
        .backlog
        .iter()
        .filter(|backlog| **backlog > 2000.0)
        .count();
    assert!(seconds_behind < 60, "{seconds_behind}");
}

/// Allowed results for a recorded load.
struct Bounds {
    name: &'static str,
    /// Rows per second that an applier carries.
    each: f64,
    /// Most appliers.
    most: usize,
    /// Reverted halvings.
    swings: usize,
    /// Changes of the number in a quarter of an hour.
    changes: usize,
    /// Applier time as a percentage of sixteen appliers all the time.
    share: usize,
    /// Backlog, in seconds of the work of sixteen appliers.
    behind: f64,
}

#[test]
fn what_providers_were_seen_to_do_is_carried() {
    #[rustfmt::skip]
    let all = [
        // The highest load is about the capacity of sixteen.
        Bounds { name: "tpcb", each: 250.0, most: 16, swings: 1, changes: 20, share: 50, behind: 2.0 },
        Bounds { name: "shop", each: 100.0, most: 16, swings: 2, changes: 12, share: 80, behind: 1.0 },
        Bounds { name: "night", each: 125.0, most: 16, swings: 4, changes: 14, share: 85, behind: 3.5 },
        Bounds { name: "hot", each: 125.0, most: 16, swings: 4, changes: 18, share: 70, behind: 2.5 },
        // Nearly always within the capacity of eight.
        Bounds { name: "shop", each: 250.0, most: 8, swings: 2, changes: 10, share: 40, behind: 0.5 },
        Bounds { name: "night", each: 250.0, most: 8, swings: 3, changes: 12, share: 45, behind: 1.0 },
        Bounds { name: "hot", each: 250.0, most: 16, swings: 3, changes: 16, share: 40, behind: 0.5 },
        // Far below the capacity of one.
        Bounds { name: "night", each: 4000.0, most: 1, swings: 0, changes: 0, share: 7, behind: 0.0 },
    ];
    for bounds in all {
        let offered: Vec<f64> = curve(&format!("recorded_{}", bounds.name))
            .iter()
            .map(|rows| rows / bounds.each * EACH)
            .collect();
        let run = run(&offered, limits(1, 16), false);
        let name = format!("{}, {} each", bounds.name, bounds.each);
        assert_eq!(run.most(), bounds.most, "{name}");
        assert!(run.swings() <= bounds.swings, "{name}: {:?}", run.changes);
        let changes = run.changes.len();
        assert!(changes <= bounds.changes, "{name}: {:?}", run.changes);
        let share = run.applier_seconds() * 100 / (16 * run.appliers.len());
        assert!(share <= bounds.share, "{name}: {share} %");
        let behind = run.most_backlog() / (16.0 * EACH);
        assert!(behind <= bounds.behind, "{name}: {behind} s");
    }
}

#[test]
fn rows_alone_scale_too() {
    let mut by_rows = limits(1, 16);
    by_rows.rows_per_applier = Some(EACH);
    let run = run(&curve("steps"), by_rows, true);
    assert_eq!(run.appliers[269], 8);
    assert_eq!(*run.appliers.last().unwrap(), 1);
    let first = run.changes[0].reason;
    assert!(
        matches!(first, Reason::Full(load) if load.measure == Measure::Rows),
        "{first}"
    );
    assert!(
        first
            .to_string()
            .contains("rows per second that they can carry"),
        "{first}"
    );
}

/// Takes a sample of a second with this load.
fn look(scaler: &mut Scaler, second: u64, busy: f64, waiting: f64, rows: f64) -> Decision {
    scaler.look(Sample {
        at: Duration::from_secs(second),
        busy,
        waiting,
        rows_per_second: rows,
    })
}

#[test]
fn those_that_wait_for_each_other_do_not_become_more() {
    let mut scaler = Scaler::new(Rule::default(), limits(1, 16), 2);
    for second in 0..100 {
        let decision = look(&mut scaler, second, 1.0, 0.6, 1000.0);
        assert!(!decision.is_change());
        if second > 20 {
            assert!(
                matches!(decision.reason, Reason::Blocked(_, share) if (share - 0.6).abs() < 0.01)
            );
            assert_eq!(
                decision.reason.to_string(),
                "stays: the load is 100 % of the appliers' time, but for 60 % of that they wait for each other"
            );
        }
    }
}

#[test]
fn a_doubling_without_gain_is_the_last() {
    let mut scaler = Scaler::new(Rule::default(), limits(1, 64), 2);
    let mut last = None;
    for second in 0..300 {
        // Something else is full: as many rows with any number of appliers.
        last = Some(look(&mut scaler, second, 1.0, 0.0, 5000.0));
    }
    assert_eq!(scaler.appliers(), 4);
    let reason = last.unwrap().reason;
    assert_eq!(
        reason.to_string(),
        "stays: the load is 100 % of the appliers' time, but the last doubling went from 5000 to 5000 rows per second"
    );
    // Less load, and then more that appliers can use.
    for second in 300..320 {
        look(&mut scaler, second, 0.6, 0.0, 3000.0);
    }
    for second in 320..350 {
        look(&mut scaler, second, 1.0, 0.0, 9000.0);
    }
    assert_eq!(scaler.appliers(), 8);
}

#[test]
fn where_one_applier_takes_everything_the_others_count_as_idle() {
    // Of eight appliers, one is always busy: it takes all transactions, as all together were found
    // to be no faster. More appliers do not help. Two are kept, so that a later trial can find
    // otherwise.
    let run = |busy: fn(f64) -> f64| {
        let mut scaler = Scaler::new(Rule::default(), limits(1, 64), 8);
        let mut numbers = vec![8];
        for second in 0..300 {
            let all = u32::try_from(scaler.appliers()).unwrap();
            let decision = look(&mut scaler, second, busy(f64::from(all)), 0.0, 5000.0);
            if decision.is_change() {
                numbers.push(decision.to);
            }
        }
        numbers
    };
    assert_eq!(run(|all| 1.0 / all), [8, 4, 2]);
    // As a share of its own time alone the load would request more appliers, which would have
    // nothing to do.
    assert_eq!(run(|_| 1.0), [8, 16]);
}

#[test]
fn limits_are_followed_at_once() {
    let mut scaler = Scaler::new(Rule::default(), limits(2, 8), 100);
    assert_eq!(scaler.appliers(), 8);
    scaler.set_limits(limits(1, 3));
    let decision = look(&mut scaler, 0, 0.7, 0.0, 1.0);
    assert_eq!((decision.from, decision.to), (8, 3));
    assert_eq!(
        decision.reason.to_string(),
        "moved between the limits, which are 1 and 3"
    );
    scaler.set_limits(limits(0, 0));
    assert_eq!(look(&mut scaler, 1, 0.7, 0.0, 1.0).to, 1);
}

#[test]
fn what_cannot_be_measured_is_left_out() {
    let mut scaler = Scaler::new(Rule::default(), limits(1, 8), 2);
    for second in 0..100 {
        look(&mut scaler, second, f64::NAN, f64::INFINITY, -1.0);
    }
    assert!(scaler.appliers() >= 1);
}
