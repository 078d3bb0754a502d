//! The choice between one applier and all, against a machine whose speed with one and with all is
//! known.

use std::time::Duration;

use braid_bgworker::breadth::{Breadth, Chooser, Look, Rule};

use braid_testing::Random;

const LOOK: Duration = Duration::from_millis(1);

/// A subscription's load, and the choices made for it, sample by sample.
struct Machine {
    chooser: Chooser,
    random: Random,
    now: Duration,
    /// Work per second with one applier and with all.
    speed: (f64, f64),
    /// Work of a transaction.
    size: f64,
    /// Transactions in a local transaction.
    joined: u64,
    /// The measured work of a sample is off by up to this share.
    noise: f64,
    done: f64,
    breadth: Breadth,
    /// Samples with one applier, and with all.
    looks: (u32, u32),
}

impl Machine {
    fn new(seed: u64, one: f64, all: f64) -> Self {
        Self {
            chooser: Chooser::new(Rule::default()),
            random: Random::from_seed(seed),
            now: Duration::ZERO,
            speed: (one, all),
            size: 4.0,
            joined: 1,
            noise: 0.2,
            done: 0.0,
            breadth: Breadth::One,
            looks: (0, 0),
        }
    }

    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "small positive numbers"
    )]
    fn look(&mut self, in_flight: u64) {
        let speed = match self.breadth {
            Breadth::One => self.speed.0,
            Breadth::All => self.speed.1,
        };
        let off = 1.0 + self.noise * (self.random.below(2001) as f64 / 1000.0 - 1.0);
        self.now += LOOK;
        if in_flight > 0 {
            self.done += speed * LOOK.as_secs_f64() * off;
        }
        let commits = (self.done / self.size) as u64 / self.joined;
        let transactions = commits * self.joined;
        self.breadth = self.chooser.look(Look {
            at: self.now,
            transactions,
            commits,
            work: transactions * self.size as u64,
            in_flight,
        });
        match self.breadth {
            Breadth::One => self.looks.0 += 1,
            Breadth::All => self.looks.1 += 1,
        }
    }

    fn full(&mut self, milliseconds: u32) {
        for _ in 0..milliseconds {
            self.look(100);
        }
    }

    fn chosen(&mut self) -> Breadth {
        // During a trial the choice alternates. Over a long time the kept one dominates.
        self.looks = (0, 0);
        self.full(600);
        if self.looks.0 > self.looks.1 {
            Breadth::One
        } else {
            Breadth::All
        }
    }
}

#[test]
fn the_faster_way_is_found_and_kept() {
    for seed in 0..50 {
        for (one, all, expected) in [
            (80_000.0, 60_000.0, Breadth::One),
            (80_000.0, 80_000.0, Breadth::One),
            (80_000.0, 82_000.0, Breadth::One),
            (80_000.0, 96_000.0, Breadth::All),
            (80_000.0, 600_000.0, Breadth::All),
            (900.0, 1_800.0, Breadth::All),
            (900.0, 450.0, Breadth::One),
        ] {
            let mut machine = Machine::new(seed, one, all);
            machine.full(5_000);
            assert_eq!(machine.chosen(), expected, "{one} {all}, seed {seed}");
        }
    }
}

#[test]
fn half_a_second_is_enough() {
    let mut machine = Machine::new(1, 80_000.0, 120_000.0);
    machine.full(500);
    assert_eq!(machine.breadth, Breadth::All);
    let mut machine = Machine::new(1, 80_000.0, 60_000.0);
    machine.full(500);
    assert_eq!(machine.breadth, Breadth::One);
}

#[test]
fn trials_cost_little() {
    let mut machine = Machine::new(2, 80_000.0, 40_000.0);
    machine.full(10_000);
    let few = machine.looks.1;
    assert!(few > 60, "it is tried");
    assert!(few < 500, "{few} of 10,000 looks in the slower way");
    machine.full(300_000);
    let more = machine.looks.1 - few;
    assert!(
        more < 1_000,
        "{more} of 300,000 looks in the slower way later"
    );
    assert!(more > 100, "it is tried for ever");
}

#[test]
fn a_load_that_changes_is_followed() {
    let mut machine = Machine::new(3, 80_000.0, 40_000.0);
    machine.full(20_000);
    assert_eq!(machine.chosen(), Breadth::One);
    machine.speed = (40_000.0, 80_000.0);
    machine.full(62_000);
    assert_eq!(machine.chosen(), Breadth::All);
    machine.speed = (80_000.0, 40_000.0);
    machine.full(62_000);
    assert_eq!(machine.chosen(), Breadth::One);
}

#[test]
fn more_appliers_are_tried_at_once() {
    let mut machine = Machine::new(7, 80_000.0, 60_000.0);
    machine.full(100_000);
    assert_eq!(machine.chosen(), Breadth::One);
    machine.speed = (80_000.0, 120_000.0);
    machine.chooser.forget();
    assert_eq!(machine.chooser.rates(), None);
    machine.full(500);
    assert_eq!(machine.breadth, Breadth::All);
}

#[test]
fn while_nothing_waits_nothing_is_tried() {
    let mut machine = Machine::new(4, 40_000.0, 80_000.0);
    for _ in 0..10_000 {
        machine.look(1);
        machine.look(0);
    }
    assert_eq!(machine.looks.1, 0);
    machine.full(600);
    assert_eq!(machine.breadth, Breadth::All);
    let before = machine.looks;
    for _ in 0..10_000 {
        machine.look(1);
        machine.look(0);
    }
    assert_eq!(machine.looks.0, before.0, "what was found is kept");
}

#[test]
fn a_pause_in_the_middle_of_a_turn_does_not_count() {
    // Most of the time nothing waits, and both ways are slow; with waiting transactions all are
    // twice as fast.
    let mut machine = Machine::new(5, 40_000.0, 80_000.0);
    for _ in 0..200 {
        machine.full(50);
        for _ in 0..100 {
            machine.look(0);
        }
    }
    let rates = machine.chooser.rates().expect("there was a trial");
    let ratio = rates.all / rates.one;
    assert!((1.8..2.2).contains(&ratio), "{rates:?}");
}

#[test]
fn few_and_long_transactions_are_waited_for() {
    // Ten transactions in a second: most windows of some milliseconds would have none.
    let mut machine = Machine::new(6, 40.0, 80.0);
    machine.full(60_000);
    let rates = machine.chooser.rates().expect("there was a trial");
    let ratio = rates.all / rates.one;
    assert!((1.7..2.3).contains(&ratio), "{rates:?}");
    assert_eq!(machine.chosen(), Breadth::All);
}

#[test]
fn batches_are_many_before_they_count() {
    // A transaction takes some twelve milliseconds: a window of thirty has two or three.
    for seed in 0..50 {
        for (all, expected) in [(82_000.0, Breadth::One), (100_000.0, Breadth::All)] {
            let mut machine = Machine::new(seed, 80_000.0, all);
            machine.joined = 256;
            machine.full(1_500);
            let rates = machine.chooser.rates().expect("there was a trial");
            let found = if rates.all >= rates.one * Rule::default().gain {
                Breadth::All
            } else {
                Breadth::One
            };
            assert_eq!(found, expected, "{rates:?}, seed {seed}");
        }
    }
}
