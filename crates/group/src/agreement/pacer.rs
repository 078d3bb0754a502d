//! Ticks of a member, counted from the time that it is told, and the time of its next election.
//!
//! Not for: what a tick does (`elections`).

use super::Settings;
use crate::lease::Monotonic;

/// Members show that they are there, and proposals are offered again, once in so many ticks.
const PING_TICKS: u64 = 5;

/// A member's ticks.
#[derive(Debug)]
pub(super) struct Pacer {
    random: u64,
    last_tick: Monotonic,
    ticks: u64,
    /// Ticks without a leader before the member stands for election.
    election: usize,
}

impl Pacer {
    /// Begins at this time; `random` is 64 fresh random bits.
    pub(super) fn new(settings: &Settings, random: u64, now: Monotonic) -> Self {
        let mut pacer = Self {
            random,
            last_tick: now,
            ticks: 0,
            election: 0,
        };
        pacer.draw(settings);
        pacer
    }

    /// Takes the ticks since the last call. A process that stood still does not catch up: its ticks
    /// mean that others had time to answer.
    pub(super) fn passed(&mut self, settings: &Settings, now: Monotonic) -> u64 {
        let most = u64::from(settings.election_ticks);
        let passed = now.since(self.last_tick) / settings.tick.max(1);
        self.last_tick = if passed > most {
            now
        } else {
            self.last_tick.after(passed * settings.tick)
        };
        passed.min(most)
    }

    /// Begins a tick; true if the member shows in it that it is there.
    pub(super) fn next_pings(&mut self) -> bool {
        self.ticks += 1;
        self.ticks % PING_TICKS == 1
    }

    /// Whether a member stands for election after so many ticks without a leader.
    pub(super) const fn stands_after(&self, elapsed: usize) -> bool {
        elapsed >= self.election
    }

    /// Draws the time of the next election: between one and two times the setting.
    pub(super) fn draw(&mut self, settings: &Settings) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let ticks = u64::from(settings.election_ticks.max(1));
        let drawn = ticks + (self.random >> 33) % ticks;
        self.election = usize::try_from(drawn).unwrap_or(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            tick: 10,
            election_ticks: 15,
            ..Settings::default()
        }
    }

    #[test]
    fn ticks_are_neither_lost_nor_caught_up() {
        let mut pacer = Pacer::new(&settings(), 1, Monotonic(0));
        let taken: Vec<u64> = [9, 19, 30, 180, 400, 409]
            .map(|now| pacer.passed(&settings(), Monotonic(now)))
            .into();
        assert_eq!(taken, [0, 1, 2, 15, 15, 0]);
    }

    #[test]
    fn an_election_is_between_one_and_two_times_the_setting_away() {
        let mut pacer = Pacer::new(&settings(), 7, Monotonic(0));
        let mut drawn = std::collections::BTreeSet::new();
        for _ in 0..200 {
            pacer.draw(&settings());
            assert!(!pacer.stands_after(14) && pacer.stands_after(29));
            drawn.insert(pacer.election);
        }
        assert_eq!(drawn.len(), 15, "each number of ticks comes");
    }

    #[test]
    fn one_tick_in_five_is_a_sign_of_life() {
        let mut pacer = Pacer::new(&settings(), 1, Monotonic(0));
        let pings: Vec<bool> = (0..7).map(|_| pacer.next_pings()).collect();
        assert_eq!(pings, [true, false, false, false, false, true, false]);
    }
}
