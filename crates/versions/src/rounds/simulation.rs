//! Random schedules of rounds over real nodes: messages that are late, repeated, reordered and
//! lost, clocks that step, crashes in each phase of a round, the sequencer killed, nodes that are
//! cut off and removed. A seed gives one schedule. `braid_histories` judges what clients have seen.
//!
//! `BRAID_VERSIONS_STEPS` asks for so many steps of random schedules; `BRAID_TEST_SEED` repeats
//! such a run.

use std::collections::BTreeMap;
use std::time::Instant;

use braid_histories::{History, Kind, MicroOp, Model, Seen, Value};
use braid_testing::Random;

use super::Timing;
use super::world::{Budget, Group, Phase, Step};
use crate::Access;
use crate::broken::Broken;
use crate::cluster::State;

/// The steps of one schedule, before all faults are over.
const STEPS: u64 = 1_000;
/// So much time passes in a cycle after that: more than each period but one.
const PASS: u64 = 1_100_000;

/// A schedule.
struct Schedule {
    random: Random,
    group: Group,
    history: History,
    /// The last entry of each transaction in the history.
    known: Vec<Option<Kind>>,
    /// Crashes by phase.
    crashes: BTreeMap<Phase, u64>,
}

impl Schedule {
    fn new(seed: u64, broken: Option<Broken>) -> Self {
        let mut random = Random::from_seed(seed);
        let mut up_to = |limit: u64| u8::try_from(random.below(limit)).unwrap();
        let budget = Budget {
            rounds: u64::MAX,
            crashes: up_to(6),
            isolations: up_to(4),
            removals: u8::from(up_to(4) == 0),
            aborts: up_to(4),
        };
        let nodes = 3 + random.index(2);
        let mut group = Group::new(nodes, Timing::default(), budget);
        if !random.one_in(4) {
            group.begin();
        }
        group.break_rule(broken);
        for _ in 0..6 + random.below(10) {
            let mut declared = Vec::new();
            for table in 1..=2 {
                match random.below(4) {
                    0 => declared.push((table, Access::Read)),
                    1 | 2 => declared.push((table, Access::Write)),
                    _ => {}
                }
            }
            if declared.is_empty() {
                declared.push((1, Access::Write));
            }
            group.add(random.index(nodes), &declared);
        }
        group.candidates = match random.below(3) {
            0 => None,
            1 => Some(&[0, 1]),
            _ => Some(&[1, 2]),
        };
        let known = vec![None; group.transactions.len()];
        Self {
            random,
            group,
            history: History::default(),
            known,
            crashes: BTreeMap::new(),
        }
    }

    fn one_of(&mut self, steps: &[Step]) -> Option<Step> {
        let at = (!steps.is_empty()).then(|| self.random.index(steps.len()))?;
        steps.get(at).copied()
    }

    fn any_member(&mut self) -> usize {
        let members = self.group.members();
        members[self.random.index(members.len())]
    }

    fn choose(&mut self) -> Option<Step> {
        let mut steps = Vec::new();
        match self.random.below(24) {
            0..=9 => {
                let count = self.group.messages.len();
                let at = (count > 0).then(|| self.random.index(count))?;
                // Of a message that stays the next delivery is a repeat.
                self.group.keeps_messages = self.random.one_in(12);
                let is_lost = count > 60 || self.random.one_in(12);
                match self.group.is_deliverable(at) {
                    _ if is_lost => Some(Step::Lose(at)),
                    true => Some(Step::Deliver(at)),
                    false => None,
                }
            }
            10..=13 => Some(Step::Turn(self.any_member())),
            14..=15 => {
                let node = self.any_member();
                let is_new = self.group.nodes[node].learned < self.group.log.len();
                (is_new && self.group.isolated != Some(node)).then_some(Step::Learn(node))
            }
            16 => {
                let count = self.group.proposals.len();
                let at = (count > 0).then(|| self.random.index(count))?;
                let proposer = self.group.proposals[at].0;
                if self.random.one_in(8) {
                    Some(Step::Forget(at))
                } else {
                    (self.group.isolated != Some(proposer)).then_some(Step::Agree(at))
                }
            }
            17..=19 => {
                let count = self.group.transactions.len();
                let first = self.random.index(count);
                let members = self.group.members();
                for at in (0..count).map(|at| (first + at) % count) {
                    let is_member = members.contains(&self.group.transactions[at].node);
                    if is_member && steps.is_empty() {
                        self.group.steps_of_transaction(at, &mut steps);
                    }
                }
                if steps.len() > 1 && !self.random.one_in(20) {
                    steps.truncate(1);
                }
                self.one_of(&steps)
            }
            20..=22 => {
                for node in self.group.members() {
                    self.group.steps_of_stream(node, &mut steps);
                }
                self.one_of(&steps)
            }
            _ => self.choose_fault(),
        }
    }

    fn choose_fault(&mut self) -> Option<Step> {
        let budget = self.group.budget;
        let node = self.any_member();
        match self.random.below(8) {
            // Crashes that come in the middle of a round.
            0..=2 if budget.crashes > 0 => {
                let members = self.group.members();
                let busy = members
                    .into_iter()
                    .filter(|node| self.group.phase(*node) != Phase::Idle);
                let busy: Vec<usize> = busy.collect();
                let node = match self.random.one_in(3) || busy.is_empty() {
                    true => node,
                    false => busy[self.random.index(busy.len())],
                };
                *self.crashes.entry(self.group.phase(node)).or_default() += 1;
                Some(Step::Crash(node, self.random.one_in(2)))
            }
            3 if budget.isolations > 0 && self.group.isolated.is_none() => {
                Some(Step::Isolate(node))
            }
            4 if budget.removals > 0 && self.group.members().len() > 2 => Some(Step::Remove(node)),
            5 if self.group.isolated.is_some() => Some(Step::Heal),
            6 => {
                // A clock steps, as none should.
                let clock = &mut self.group.nodes[node].clock;
                let by = self.random.below(8_000_000);
                clock.0 = match self.random.one_in(2) {
                    true => clock.0 + by,
                    false => clock.0.saturating_sub(by),
                };
                None
            }
            _ => None,
        }
    }

    /// Records what the clients of all transactions know now.
    fn record(&mut self) {
        for at in 0..self.known.len() {
            let transaction = &self.group.transactions[at];
            let is_member = self.group.members().contains(&transaction.node);
            let kind = match &transaction.state {
                State::New => continue,
                _ if !is_member && transaction.state != State::Lost => Kind::Info,
                _ if transaction.acknowledged => Kind::Ok,
                State::Done | State::Ended(_) => Kind::Info,
                State::Lost if transaction.record.is_none() => Kind::Fail,
                State::Lost => Kind::Info,
                _ => Kind::Invoke,
            };
            if matches!(self.known[at], Some(Kind::Ok | Kind::Fail | Kind::Info))
                || self.known[at] == Some(kind)
            {
                continue;
            }
            let mut steps = Vec::new();
            for (table, access) in &transaction.declared {
                let key = Value::Integer(i64::from(table.0));
                let read = transaction.read.get(table).copied().flatten();
                let value = |at: usize| Value::Integer(i64::try_from(at).unwrap());
                let seen = match read {
                    _ if kind != Kind::Ok => Seen::Nil,
                    None => Seen::Nil,
                    Some(writer) => Seen::Value(value(writer)),
                };
                steps.push(MicroOp::Read {
                    key: key.clone(),
                    seen,
                });
                if *access == Access::Write {
                    let value = value(at);
                    steps.push(MicroOp::Write { key, value });
                }
            }
            let process = Some(i64::try_from(at).unwrap());
            if self.known[at].is_none() && kind != Kind::Invoke {
                let invoked = steps.iter().map(MicroOp::invoked).collect();
                self.history
                    .push(Kind::Invoke, process, None, Some(invoked));
            }
            self.history.push(kind, process, None, Some(steps));
            self.known[at] = Some(kind);
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for number in 0..STEPS {
            let passed = self.random.below(40_000);
            for node in &mut self.group.nodes {
                // Clocks run at different rates.
                node.clock.0 += passed + self.random.below(4_000);
            }
            let Some(step) = self.choose() else {
                continue;
            };
            self.group.step(step);
            self.record();
            if number % 16 == 0 || self.group.error.is_some() {
                self.group
                    .check()
                    .map_err(|e| format!("step {number}, {step:?}: {e}"))?;
            }
        }
        self.group.check()?;
        let loses = self.random.one_in(2);
        self.group.recovers(loses, PASS)?;
        if self.group.members().len() < self.group.nodes.len() {
            // Commits of a removed node that nobody else has are lost, as its page says.
            return Ok(());
        }
        let report = braid_histories::check(&self.history, Model::StrictSerializable);
        let report = report.map_err(|e| format!("{e}"))?;
        if !report.is_valid() {
            return Err(format!("{:?}", report.findings));
        }
        Ok(())
    }
}

fn steps() -> Option<u64> {
    let asked = std::env::var("BRAID_VERSIONS_STEPS").ok();
    asked.and_then(|text| text.parse().ok())
}

#[test]
fn rounds_with_faults_are_strictly_serializable() {
    let mut crashes: BTreeMap<Phase, u64> = BTreeMap::new();
    let (mut rounds, mut committed, mut schedules) = (0, 0, 0_u64);
    let began = Instant::now();
    let mut check = |seed| {
        let mut schedule = Schedule::new(seed, None);
        schedule
            .run()
            .unwrap_or_else(|e| panic!("schedule of seed {seed}: {e}"));
        for (phase, count) in schedule.crashes {
            *crashes.entry(phase).or_default() += count;
        }
        rounds += schedule.group.last_term().0;
        let done = schedule.group.transactions.iter();
        committed += done.map(|t| u64::from(t.acknowledged)).sum::<u64>();
        schedules += 1;
    };
    if let Some(steps) = steps() {
        let mut random = Random::new("rounds of versions");
        (0..steps / STEPS).for_each(|_| check(random.next()));
    } else {
        let many = if cfg!(debug_assertions) { 40 } else { 1_000 };
        (0..many).for_each(&mut check);
    }
    println!(
        "{schedules} schedules of {STEPS} steps: {rounds} cuts, {committed} transactions \
         acknowledged, crashes: {crashes:?}, {:?}",
        began.elapsed()
    );
    assert!(committed > schedules && rounds > schedules);
    for phase in [
        Phase::Idle,
        Phase::Gives,
        Phase::Asks,
        Phase::Promised,
        Phase::Proposed,
    ] {
        assert!(crashes.contains_key(&phase), "no crash in {phase:?}");
    }
}

/// With a rule broken some schedule shows it. (`model.rs` has those that are found seldom.)
#[test]
fn broken_rounds_are_found() {
    for broken in [
        Broken::MajorityReports,
        Broken::PromiseOutlivesCut,
        Broken::PromiseHoldsNothing,
        Broken::AskOnce,
    ] {
        let run = |seed| Schedule::new(seed, Some(broken)).run().err();
        let found = (0..200).find_map(|seed| Some((seed, run(seed)?)));
        println!("{broken:?}: {found:?}");
        assert!(found.is_some(), "{broken:?} is not found");
    }
}
