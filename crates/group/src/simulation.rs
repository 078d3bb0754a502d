//! Random schedules over real agreements: loss, repeats, reordering, partitions, crashes that lose
//! what was not written, power cuts that lose what was not flushed, restarts, restored members,
//! joins beside leaves, proposers side by side. A seed gives one schedule. `BRAID_GROUP_STEPS` asks
//! for so many steps of random ones (`scripts/test unit` outside of the gate: a million),
//! `BRAID_GROUP_SECONDS` for so long; `BRAID_TEST_SEED` repeats such a run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use braid_testing::Random;

use crate::cluster::{Cluster, GROUP, id, new_member};
use crate::mutation::Mutation;
use crate::{
    Command, Continuity, Distrust, MemberId, MemberState, Monotonic, ProposalId, Settings, Stopped,
    Stored, Value,
};

const LEASE: &[u8] = b"sequencer";
const LEASE_TIME: u64 = 2_000_000;
/// Steps of a schedule.
const STEPS: u64 = 1500;
/// Rates of the members' clocks, in millionths: within the bound between any two.
const RATES: [u64; 3] = [990_200, 1_000_000, 1_009_800];

struct World {
    cluster: Cluster,
    random: Random,
    /// True time, in microseconds.
    time: u64,
    /// Members that can't reach the others.
    cut: BTreeSet<MemberId>,
    backups: BTreeMap<MemberId, Stored>,
    joined: BTreeSet<MemberId>,
    restores: bool,
    restored: BTreeSet<MemberId>,
    crashes: bool,
}

impl World {
    fn new(mut random: Random, mutation: Option<Mutation>, restores: bool) -> Self {
        let settings = Settings {
            snapshot_entries: 3 + random.below(20),
            ..Settings::default()
        };
        let mut now = Monotonic(0);
        let mut cluster = Cluster::grown(settings, 3, &mut now);
        cluster.mutation = mutation;
        for number in 1..=3 {
            cluster.agreement(id(number)).unwrap().break_rule(mutation);
        }
        // Every clock goes on from a common point at its own rate.
        Self {
            cluster,
            random,
            time: now.0 * 2,
            cut: BTreeSet::new(),
            backups: BTreeMap::new(),
            joined: (1..=3).map(id).collect(),
            restores,
            restored: BTreeSet::new(),
            crashes: true,
        }
    }

    fn clock(&self, me: MemberId) -> Monotonic {
        let rate = RATES[usize::try_from(me.get()).unwrap() % RATES.len()];
        Monotonic(u64::try_from(u128::from(self.time) * u128::from(rate) / 1_000_000).unwrap())
    }

    fn any(&mut self) -> MemberId {
        let nodes: Vec<MemberId> = self.cluster.nodes.keys().copied().collect();
        nodes[self.random.index(nodes.len())]
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..=29 => self.pass_time(),
            30..=79 => self.deliver(),
            80..=91 => self.propose(),
            92..=93 if self.crashes => self.crash(),
            94..=96 => self.restart(),
            97 => self.cut_or_heal(),
            98 => self.welcome(),
            _ if self.restores => self.back_up_or_restore(),
            _ => {}
        }
    }

    fn pass_time(&mut self) {
        self.time += self.random.below(150_000);
        for me in self.cluster.nodes.keys().copied().collect::<Vec<_>>() {
            if !self.random.one_in(8) {
                let now = self.clock(me);
                self.cluster.tick(me, now);
            }
        }
    }

    fn deliver(&mut self) {
        for _ in 0..self.random.below(6) {
            if self.cluster.letters.is_empty() {
                return;
            }
            // Mostly the oldest, sometimes any.
            let len = self.cluster.letters.len();
            let at = if self.random.one_in(4) {
                self.random.index(len)
            } else {
                0
            };
            let letter = if self.random.one_in(20) {
                self.cluster.letters[at].clone()
            } else {
                self.cluster.letters.remove(at)
            };
            let apart = self.cut.contains(&letter.from) != self.cut.contains(&letter.to);
            if apart || self.random.one_in(20) {
                continue;
            }
            let now = self.clock(letter.to);
            self.cluster.deliver(&letter, now);
        }
        // Letters that are not read for long are lost.
        let len = self.cluster.letters.len();
        if len > 300 {
            self.cluster.letters.drain(..len - 200);
        }
    }

    fn propose(&mut self) {
        let (me, holder) = (self.any(), self.any());
        let now = self.clock(me);
        let Some(agreement) = self.cluster.agreement(me) else {
            return;
        };
        let granted = agreement.granted(LEASE);
        let Some(state) = agreement.state() else {
            return;
        };
        let lock = state.lock(b"t").map(|lock| (lock.holder, lock.token));
        let lease = state
            .lease(LEASE)
            .filter(|lease| lease.duration > 0)
            .map(|lease| lease.token);
        let joining = state
            .members()
            .find(|m| m.state == MemberState::Joining)
            .map(|m| m.id);
        let present = state
            .members()
            .filter(|m| m.state != MemberState::Removed)
            .count();
        let voters = state.configuration().0.len();
        let command = match self.random.below(14) {
            0..=2 => Command::AssignBlock {
                sequence: b"s".to_vec(),
                holder: me,
                size: 1 + self.random.below(5),
                at_least: 0,
            },
            3..=4 => match lock {
                Some((holder, token)) if holder == me => Command::ReleaseLock {
                    key: b"t".to_vec(),
                    token,
                },
                _ => Command::TakeLock {
                    key: b"t".to_vec(),
                    holder: me,
                },
            },
            5..=8 => match granted {
                Some(token) if self.random.one_in(8) => Command::ReleaseLease {
                    name: LEASE.to_vec(),
                    token,
                },
                Some(token) => Command::RenewLease {
                    name: LEASE.to_vec(),
                    token,
                    acting: false,
                },
                None => Command::GrantLease {
                    name: LEASE.to_vec(),
                    holder: me,
                    duration: LEASE_TIME,
                    instead_of: lease,
                },
            },
            9 => Command::SetState {
                member: holder,
                state: if self.random.one_in(2) {
                    MemberState::Maintenance
                } else {
                    MemberState::Active
                },
            },
            10 if present < 5 => {
                let number = 4 + self.random.below(200);
                Command::AddMember(new_member(number))
            }
            11 => Command::Activate {
                member: joining.unwrap_or(holder),
            },
            // Nobody can tell of the only voter that it was put back.
            12 if voters > 2 && (!self.restores || holder > id(3)) => {
                Command::RemoveMember { member: holder }
            }
            _ => Command::SetOption {
                name: "o".into(),
                value: Some(self.random.next().to_string()),
            },
        };
        self.cluster.propose(me, command, now);
    }

    fn crash(&mut self) {
        let me = self.any();
        let now = self.clock(me);
        // In the middle of its work: some of it is never written.
        if let Some(letter) = self
            .cluster
            .letters
            .iter()
            .find(|letter| letter.to == me)
            .cloned()
            && let Some(agreement) = self.cluster.agreement(me)
        {
            let _ = agreement.receive(&letter.bytes, now);
            self.cluster.write(me, self.random.one_in(3));
        }
        if self.random.one_in(2) {
            self.cluster.crash(me);
        } else {
            self.cluster.power_off(me);
        }
    }

    fn restart(&mut self) {
        let me = self.any();
        if self.cluster.nodes[&me].agreement.is_none() {
            let now = self.clock(me);
            // Once it was put back it is never proven again here.
            let continuity = if self.restored.contains(&me) {
                Continuity::Unproven
            } else {
                Continuity::Proven
            };
            self.cluster.boot(me, continuity, now);
        }
    }

    fn cut_or_heal(&mut self) {
        if self.cut.is_empty() {
            for _ in 0..self.random.below(3) {
                let member = self.any();
                self.cut.insert(member);
            }
        } else {
            self.cut.clear();
        }
    }

    /// New members start once they are told their number.
    fn welcome(&mut self) {
        let added: Vec<MemberId> = self
            .cluster
            .log
            .values()
            .filter_map(|applied| match applied.outcome {
                Ok(Value::Member { id, .. }) => Some(id),
                _ => None,
            })
            .collect();
        for member in added {
            if self.joined.insert(member) {
                self.cluster.add(Stored::join(GROUP, member));
                let now = self.clock(member);
                self.cluster.crash(member);
                self.cluster.boot(member, Continuity::Proven, now);
            }
        }
    }

    fn back_up_or_restore(&mut self) {
        let me = self.any();
        match self.backups.get(&me) {
            // One at a time: more of them at once is a majority that has forgotten.
            Some(backup) if self.restored.is_empty() && self.random.one_in(3) => {
                let node = self.cluster.nodes.get_mut(&me).unwrap();
                node.stored = backup.clone();
                node.flushed = backup.clone();
                node.agreement = None;
                self.restored.insert(me);
                let now = self.clock(me);
                self.cluster.boot(me, Continuity::Unproven, now);
            }
            _ => {
                let stored = self.cluster.nodes[&me].flushed.clone();
                if stored.core.is_some() {
                    self.backups.insert(me, stored);
                }
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        self.cluster.check()?;
        let acting: Vec<MemberId> = self
            .cluster
            .nodes
            .iter()
            .filter(|(me, node)| {
                node.agreement
                    .as_ref()
                    .is_some_and(|a| a.may_act(LEASE, self.clock(**me)).is_some())
            })
            .map(|(me, _)| *me)
            .collect();
        if acting.len() > 1 {
            return Err(format!("several hold the lease: {acting:?}"));
        }
        Ok(())
    }

    /// Checks what the whole log has given.
    fn check_log(&self) -> Result<(), String> {
        let mut blocks: BTreeMap<u64, u64> = BTreeMap::new();
        let mut given: BTreeMap<ProposalId, (u64, Value)> = BTreeMap::new();
        let mut lock = None;
        for applied in self.cluster.log.values() {
            let proposal = applied.proposal.id;
            let value = match &applied.outcome {
                Ok(value) => *value,
                Err(_) => continue,
            };
            if let Some((index, before)) = given.insert(proposal, (applied.index, value)) {
                if before != value {
                    return Err(format!(
                        "{proposal:?} took effect at {index} and {}",
                        applied.index
                    ));
                }
                continue;
            }
            match (&applied.proposal.command, value) {
                (_, Value::Block { start, size }) => {
                    let before = blocks.range(..start + size).next_back();
                    if before.is_some_and(|(other, len)| other + len > start) {
                        return Err(format!("block {start}+{size} is assigned twice"));
                    }
                    blocks.insert(start, size);
                }
                (Command::TakeLock { holder, .. }, Value::Lock { .. }) => {
                    if let Some(before) = lock.replace(*holder) {
                        return Err(format!("{holder} took a lock that {before} holds"));
                    }
                }
                (Command::ReleaseLock { .. }, _) => lock = None,
                (Command::RemoveMember { member }, _) if lock == Some(*member) => lock = None,
                _ => {}
            }
        }
        Ok(())
    }

    fn run(&mut self, steps: u64) -> Result<(), String> {
        for _ in 0..steps {
            self.step();
            self.check()?;
        }
        self.check_log()
    }

    /// Without faults the group comes together again, if a majority may take part.
    fn recover(&mut self) -> Result<(), String> {
        self.cut.clear();
        self.welcome();
        for me in self.cluster.nodes.keys().copied().collect::<Vec<_>>() {
            if self.cluster.nodes[&me].agreement.is_none() {
                let now = self.clock(me);
                let restored = self.restored.contains(&me);
                let continuity = if restored {
                    Continuity::Unproven
                } else {
                    Continuity::Proven
                };
                self.cluster.boot(me, continuity, now);
            }
        }
        for _ in 0..150 {
            self.time += self.cluster.settings.tick * 102 / 100;
            for me in self.cluster.nodes.keys().copied().collect::<Vec<_>>() {
                let now = self.clock(me);
                self.cluster.tick(me, now);
            }
            while !self.cluster.letters.is_empty() {
                for letter in std::mem::take(&mut self.cluster.letters) {
                    let now = self.clock(letter.to);
                    self.cluster.deliver(&letter, now);
                }
            }
            self.check()?;
        }
        self.check_log()?;
        let newest = self
            .cluster
            .nodes
            .values()
            .filter_map(|node| node.agreement.as_ref())
            .filter(|a| a.stopped().is_none() && !a.is_confirming())
            .filter_map(|a| a.state())
            .max_by_key(|state| state.index())
            .cloned();
        let Some(newest) = newest else { return Ok(()) };
        let (voters, _) = newest.configuration();
        let can = voters.iter().filter(|voter| {
            let node = MemberId::new(**voter).and_then(|id| self.cluster.nodes.get(&id));
            node.and_then(|node| node.agreement.as_ref())
                .is_some_and(|a| a.stopped().is_none() && !a.is_confirming())
        });
        if can.count() * 2 <= voters.len() {
            return Ok(());
        }
        for node in self.cluster.nodes.values() {
            let Some(agreement) = &node.agreement else {
                continue;
            };
            let present = voters.contains(&node.stored.me.get());
            if !present || agreement.stopped().is_some() || agreement.is_confirming() {
                continue;
            }
            if agreement.state() != Some(&newest) {
                return Err(format!("{agreement:?} did not catch up"));
            }
            if agreement.leader().is_none() {
                return Err(format!("{agreement:?} has no leader"));
            }
        }
        Ok(())
    }
}

/// Runs the same few schedules each time; random ones for as many steps or as long as is asked for.
fn schedules(test: &str, restores: bool) {
    let asked = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let (mut seeds, time, most) = match (asked("BRAID_GROUP_SECONDS"), asked("BRAID_GROUP_STEPS")) {
        (Some(seconds), _) => (Random::new(test), Duration::from_secs(seconds), u64::MAX),
        (None, Some(steps)) => (Random::new(test), Duration::MAX, steps.div_ceil(STEPS)),
        (None, None) => (Random::from_seed(1), Duration::from_secs(8), 120),
    };
    let schedules = search(&mut seeds, None, restores, time, most);
    let steps = schedules.as_ref().map(|schedules| schedules * STEPS);
    println!("{test}: {schedules:?} schedules, {steps:?} steps");
    schedules.unwrap();
}

/// Runs schedules for a time; the count, or the first failure.
fn search(
    seeds: &mut Random,
    mutation: Option<Mutation>,
    restores: bool,
    time: Duration,
    most: u64,
) -> Result<u64, String> {
    let began = Instant::now();
    let mut schedules = 0;
    while schedules < most && (began.elapsed() < time || schedules == 0) {
        let seed = seeds.next();
        let mut world = World::new(Random::from_seed(seed), mutation, restores);
        let result = world.run(STEPS).and_then(|()| world.recover());
        result.map_err(|why| format!("schedule {seed}: {why}"))?;
        schedules += 1;
    }
    Ok(schedules)
}

#[test]
fn no_schedule_breaks_a_rule() {
    schedules("no_schedule_breaks_a_rule", false);
}

#[test]
fn no_restored_member_breaks_a_rule() {
    schedules("no_restored_member_breaks_a_rule", true);
}

/// The checks see each of these rules broken.
#[test]
fn broken_rules_are_found() {
    for mutation in [
        Mutation::ApplyRepeats,
        Mutation::LockTwice,
        Mutation::BlockTwice,
        Mutation::LeaseWithoutWait,
        Mutation::ForgetVote,
    ] {
        let began = Instant::now();
        let mut seeds = Random::from_seed(1);
        let found = search(&mut seeds, Some(mutation), false, Duration::MAX, 500);
        println!("{mutation:?}: {found:?}, {:?}", began.elapsed());
        assert!(found.is_err(), "{mutation:?} is not found");
    }
}

/// A member that its own server does not believe says nothing, now or later.
#[test]
fn a_broken_member_takes_no_part() {
    let mut now = Monotonic(0);
    let mut cluster = Cluster::grown(Settings::default(), 3, &mut now);
    cluster.crash(id(3));
    cluster.boot(id(3), Continuity::Broken, now);
    cluster.run(&mut now, 20);
    assert!(matches!(
        cluster.agreement(id(3)).unwrap().stopped(),
        Some(Stopped::Refused(_))
    ));
    cluster.boot(id(3), Continuity::Proven, now);
    assert!(matches!(
        cluster.agreement(id(3)).unwrap().stopped(),
        Some(Stopped::Refused(_))
    ));
}

/// A member is put back to before an entry that it acknowledged, and taken for proven. The one that
/// it acknowledged the entry to is away; the other one has met a later boot of it.
fn put_back(mutation: Option<Mutation>) -> (Cluster, Result<(), String>) {
    let mut now = Monotonic(0);
    let mut cluster = Cluster::grown(Settings::default(), 3, &mut now);
    cluster.mutation = mutation;
    let option = |value: &str| Command::SetOption {
        name: "o".into(),
        value: Some(value.into()),
    };
    let backup = cluster.nodes[&id(3)].flushed.clone();
    for number in 1..=3 {
        cluster.boot(id(number), Continuity::Proven, now);
    }
    cluster.run(&mut now, 60);
    cluster.crash(id(2));
    let agreed = cluster.ask(id(1), option("agreed"), &mut now);
    assert!(matches!(agreed, Some(Ok(_))), "{agreed:?}");
    cluster.crash(id(1));
    let node = cluster.nodes.get_mut(&id(3)).unwrap();
    node.stored = backup.clone();
    node.flushed = backup;
    cluster.boot(id(3), Continuity::Proven, now);
    cluster.boot(id(2), Continuity::Proven, now);
    cluster.run(&mut now, 60);
    cluster.propose(id(2), option("instead"), now);
    cluster.run(&mut now, 60);
    let result = cluster.check();
    (cluster, result)
}

#[test]
fn a_boot_that_is_known_to_be_old_is_not_believed() {
    let (mut cluster, result) = put_back(None);
    result.unwrap();
    let stopped = cluster.agreement(id(3)).unwrap().stopped();
    assert!(
        matches!(
            stopped,
            Some(Stopped::Refused(
                Distrust::OlderBoot { .. } | Distrust::TwoOfOne
            ))
        ),
        "{stopped:?}"
    );
    let (_, result) = put_back(Some(Mutation::BelieveAnyBoot));
    let why = result.unwrap_err();
    assert!(why.starts_with("index "), "{why}");
}

/// Repeats one schedule: `BRAID_GROUP_SCHEDULE`, with restores if `BRAID_GROUP_RESTORES` is set.
#[test]
#[ignore = "for one schedule by hand"]
fn one_schedule() {
    let seed = std::env::var("BRAID_GROUP_SCHEDULE")
        .unwrap()
        .parse()
        .unwrap();
    let restores = std::env::var("BRAID_GROUP_RESTORES").is_ok();
    let mut world = World::new(Random::from_seed(seed), None, restores);
    let result = world.run(STEPS).and_then(|()| world.recover());
    for node in world.cluster.nodes.values() {
        let now = world.clock(node.stored.me);
        println!(
            "{:?} {:?}",
            node.agreement,
            node.agreement.as_ref().map(|a| a.diagnosis(now))
        );
    }
    result.unwrap();
}
