//! A group of agreements in memory, for tests: what each has stored, and messages under way.

use std::collections::{BTreeMap, BTreeSet};

use braid_testing::Random;

use crate::mutation::Mutation;
use crate::stored::Core;
use crate::{
    Agreement, Applied, Command, ConnectionString, Continuity, Error, GroupId, Identity, MemberId,
    Monotonic, NewMember, Outcome, ProposalId, Role, Settings, Stored, Version,
};

pub(crate) const GROUP: GroupId = GroupId(*b"the group's name");

/// The member with this number.
pub(crate) fn id(number: u64) -> MemberId {
    MemberId::new(number).unwrap()
}

/// A new member, by its number.
pub(crate) fn new_member(number: u64) -> NewMember {
    NewMember {
        name: format!("n{number}"),
        role: Role::Data,
        identity: Identity {
            system: number,
            node: [u8::try_from(number).unwrap(); 16],
        },
        braid: Version::new(0, 0, 0),
        postgres: 18,
        connection: ConnectionString::new(format!("host=n{number}")).unwrap(),
    }
}

/// A message under way.
#[derive(Debug, Clone)]
pub(crate) struct Letter {
    pub(crate) from: MemberId,
    pub(crate) to: MemberId,
    pub(crate) bytes: Vec<u8>,
}

/// One member of the cluster.
pub(crate) struct Node {
    /// With what is not flushed.
    pub(crate) stored: Stored,
    /// Left by a crash of the machine.
    pub(crate) flushed: Stored,
    /// None while it is down.
    pub(crate) agreement: Option<Agreement>,
    pub(crate) applied: Vec<Applied>,
    pub(crate) answered: Vec<(ProposalId, Outcome)>,
    boots: u64,
}

/// All members.
pub(crate) struct Cluster {
    pub(crate) settings: Settings,
    pub(crate) nodes: BTreeMap<MemberId, Node>,
    pub(crate) letters: Vec<Letter>,
    pub(crate) mutation: Option<Mutation>,
    /// The leader of each term, as it was seen.
    pub(crate) leaders: BTreeMap<u64, BTreeSet<MemberId>>,
    /// Each index's entry, as any member applied it.
    pub(crate) log: BTreeMap<u64, Applied>,
    /// The term of each index, as any member applied it; entries without content included.
    pub(crate) terms: BTreeMap<u64, u64>,
    /// Rules that were found broken.
    pub(crate) broken: Vec<String>,
    salt: u64,
}

impl Cluster {
    /// A group of one.
    pub(crate) fn new(settings: Settings, mutation: Option<Mutation>) -> Self {
        let mut cluster = Self::empty(settings, mutation);
        cluster.add(Stored::create(GROUP, "shop", new_member(1)).unwrap());
        cluster
    }

    /// Without members.
    pub(crate) fn empty(settings: Settings, mutation: Option<Mutation>) -> Self {
        Self {
            settings,
            nodes: BTreeMap::new(),
            letters: Vec::new(),
            mutation,
            leaders: BTreeMap::new(),
            log: BTreeMap::new(),
            terms: BTreeMap::new(),
            broken: Vec::new(),
            salt: 1,
        }
    }

    pub(crate) fn add(&mut self, stored: Stored) {
        let me = stored.me;
        let node = Node {
            flushed: stored.clone(),
            stored,
            agreement: None,
            applied: Vec::new(),
            answered: Vec::new(),
            boots: 0,
        };
        self.nodes.insert(me, node);
        self.boot(me, Continuity::Proven, Monotonic(0));
    }

    pub(crate) fn boot(&mut self, me: MemberId, continuity: Continuity, now: Monotonic) {
        let node = self.nodes.get_mut(&me).unwrap();
        node.boots += 1;
        self.salt += 1;
        let random = Random::from_seed(me.get() * 1000 + self.salt).next();
        let started = Agreement::start(&node.stored, self.settings, continuity, random, now);
        let mut agreement = match started {
            Ok(agreement) => agreement,
            Err(error) => {
                self.broken.push(format!("{me} does not start: {error}"));
                return;
            }
        };
        agreement.break_rule(self.mutation);
        node.agreement = Some(agreement);
        node.applied.clear();
        self.settle(me);
    }

    /// Ends a member's process.
    pub(crate) fn crash(&mut self, me: MemberId) {
        self.nodes.get_mut(&me).unwrap().agreement = None;
    }

    /// Ends a member's machine: what was not flushed is lost.
    pub(crate) fn power_off(&mut self, me: MemberId) {
        let node = self.nodes.get_mut(&me).unwrap();
        node.agreement = None;
        node.stored = node.flushed.clone();
    }

    /// Starts a member from what it had stored, whatever it has done since.
    pub(crate) fn boot_anew(&mut self, me: MemberId, now: Monotonic) {
        let stored = self.nodes[&me].stored.clone();
        self.boot(me, Continuity::Proven, now);
        self.letters.clear();
        self.nodes.get_mut(&me).unwrap().stored = stored;
    }

    pub(crate) fn agreement(&mut self, me: MemberId) -> Option<&mut Agreement> {
        self.nodes.get_mut(&me)?.agreement.as_mut()
    }

    /// Carries out all work of a member.
    pub(crate) fn settle(&mut self, me: MemberId) {
        while self.write(me, true) {}
    }

    /// Carries out one piece of work; without `survives` the member crashes before it is written.
    pub(crate) fn write(&mut self, me: MemberId, survives: bool) -> bool {
        let node = self.nodes.get_mut(&me).unwrap();
        let Some(agreement) = &mut node.agreement else {
            return false;
        };
        let work = match agreement.work() {
            Ok(Some(work)) => work,
            Ok(None) => return false,
            Err(error) => {
                self.broken.push(format!("{me}: {error}"));
                node.agreement = None;
                return false;
            }
        };
        if !survives {
            if self.mutation == Some(Mutation::SendEarly)
                && let Ok(effects) = agreement.persisted(work.number)
            {
                for (to, bytes) in effects.send {
                    self.letters.push(Letter {
                        from: me,
                        to,
                        bytes,
                    });
                }
            }
            node.agreement = None;
            return false;
        }
        let mut work = work;
        if self.mutation == Some(Mutation::ForgetVote) {
            work.core = work.core.map(|core| {
                let mut core = Core::decode(&core).unwrap();
                core.hard.vote = 0;
                core.encode()
            });
        }
        node.stored.write(&work);
        if work.flush {
            node.flushed = node.stored.clone();
        }
        let effects = match agreement.persisted(work.number) {
            Ok(effects) => effects,
            Err(error) => {
                self.broken.push(format!("{me}: {error}"));
                node.agreement = None;
                return false;
            }
        };
        for (to, bytes) in effects.send {
            self.letters.push(Letter {
                from: me,
                to,
                bytes,
            });
        }
        if agreement.leads() {
            self.leaders.entry(agreement.term()).or_default().insert(me);
        }
        if let Some(state) = agreement.state() {
            let first = *self.terms.entry(state.index()).or_insert(state.term());
            if first != state.term() {
                self.broken.push(format!(
                    "index {} has terms {first} and {}",
                    state.index(),
                    state.term()
                ));
            }
        }
        for applied in &effects.applied {
            let first = self
                .log
                .entry(applied.index)
                .or_insert_with(|| applied.clone());
            if first != applied {
                self.broken.push(format!(
                    "index {} differs: {first:?}, {applied:?}",
                    applied.index
                ));
            }
        }
        node.applied.extend(effects.applied);
        node.answered.extend(effects.answered);
        true
    }

    pub(crate) fn tick(&mut self, me: MemberId, now: Monotonic) {
        if let Some(agreement) = self.agreement(me) {
            let result = agreement.tick(now);
            self.note(me, result.err());
            self.settle(me);
        }
    }

    pub(crate) fn deliver(&mut self, letter: &Letter, now: Monotonic) {
        if let Some(agreement) = self
            .nodes
            .get_mut(&letter.to)
            .and_then(|node| node.agreement.as_mut())
        {
            let result = agreement.receive(&letter.bytes, now);
            self.note(letter.to, result.err());
            self.settle(letter.to);
        }
    }

    pub(crate) fn propose(
        &mut self,
        me: MemberId,
        command: Command,
        now: Monotonic,
    ) -> Option<ProposalId> {
        let proposed = self.agreement(me)?.propose(command, now).ok();
        self.settle(me);
        proposed
    }

    fn note(&mut self, me: MemberId, error: Option<Error>) {
        match error {
            Some(Error::Failed(why)) => self.broken.push(format!("{me} failed: {why}")),
            Some(
                error @ (Error::UnknownEntry { .. } | Error::Malformed(_) | Error::Outstanding),
            ) => {
                self.broken.push(format!("{me}: {error}"));
            }
            _ => {}
        }
    }

    /// All messages, in order, until there are none.
    pub(crate) fn deliver_all(&mut self, now: Monotonic) {
        while !self.letters.is_empty() {
            for letter in std::mem::take(&mut self.letters) {
                self.deliver(&letter, now);
            }
        }
    }

    /// Lets time pass for all, with all messages.
    pub(crate) fn run(&mut self, now: &mut Monotonic, ticks: u64) {
        for _ in 0..ticks {
            now.0 += self.settings.tick;
            for me in self.nodes.keys().copied().collect::<Vec<_>>() {
                self.tick(me, *now);
            }
            self.deliver_all(*now);
        }
    }

    /// Proposes and waits for the answer.
    pub(crate) fn ask(
        &mut self,
        me: MemberId,
        command: Command,
        now: &mut Monotonic,
    ) -> Option<Outcome> {
        let proposal = self.propose(me, command, *now)?;
        for _ in 0..200 {
            self.run(now, 1);
            let node = &self.nodes[&me];
            if let Some((_, outcome)) = node.answered.iter().find(|answered| answered.0 == proposal)
            {
                return Some(outcome.clone());
            }
        }
        None
    }

    /// A group of `n` active members.
    pub(crate) fn grown(settings: Settings, n: u64, now: &mut Monotonic) -> Self {
        let mut cluster = Self::new(settings, None);
        for number in 2..=n {
            let outcome = cluster.ask(id(1), Command::AddMember(new_member(number)), now);
            assert!(matches!(outcome, Some(Ok(_))), "{outcome:?}");
            cluster.add(Stored::join(GROUP, id(number)));
            let outcome = cluster.ask(id(number), Command::Activate { member: id(number) }, now);
            assert!(matches!(outcome, Some(Ok(_))), "{outcome:?}");
        }
        cluster
    }

    /// The rules that hold whatever happens.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(broken) = self.broken.first() {
            return Err(broken.clone());
        }
        for (term, leaders) in &self.leaders {
            if leaders.len() > 1 {
                return Err(format!("term {term} has two leaders: {leaders:?}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Value;

    #[test]
    fn a_group_grows_and_loses_a_member() {
        let mut now = Monotonic(0);
        let mut cluster = Cluster::grown(Settings::default(), 3, &mut now);
        let block = Command::AssignBlock {
            sequence: b"s".to_vec(),
            holder: id(2),
            size: 10,
            at_least: 1,
        };
        assert_eq!(
            cluster.ask(id(2), block.clone(), &mut now),
            Some(Ok(Value::Block { start: 1, size: 10 }))
        );
        assert_eq!(
            cluster.ask(id(3), block.clone(), &mut now),
            Some(Ok(Value::Block {
                start: 11,
                size: 10
            }))
        );
        let one = cluster.agreement(id(1)).unwrap().diagnosis(now);
        assert_eq!(one.to_string(), "node \"n1\" leads");
        cluster.crash(id(1));
        cluster.run(&mut now, 60);
        assert!(matches!(
            cluster.ask(id(3), block.clone(), &mut now),
            Some(Ok(_))
        ));
        let two = cluster.agreement(id(2)).unwrap().diagnosis(now);
        assert_eq!(two.missing(), ["n1"]);
        cluster.crash(id(3));
        cluster.run(&mut now, 60);
        let two = cluster.agreement(id(2)).unwrap().diagnosis(now);
        assert_eq!(two.to_string(), "no majority: waiting for members n1, n3");
        cluster.boot(id(3), Continuity::Proven, now);
        cluster.run(&mut now, 60);
        // The leader itself leaves: another one leads first.
        let leader = cluster.agreement(id(3)).unwrap().leader().unwrap();
        cluster.boot(id(1), Continuity::Proven, now);
        cluster.run(&mut now, 60);
        assert_eq!(
            cluster.ask(leader, Command::RemoveMember { member: leader }, &mut now),
            Some(Ok(Value::Done))
        );
        cluster.run(&mut now, 60);
        cluster.check().unwrap();
        assert!(cluster.agreement(leader).unwrap().stopped().is_some());
        let other = id(if leader == id(2) { 3 } else { 2 });
        let refused = Err(crate::Refusal::Removed(format!("n{leader}")));
        let of_removed = with_holder(&block, leader);
        assert_eq!(cluster.ask(other, of_removed, &mut now), Some(refused));
        let of_present = with_holder(&block, other);
        assert!(matches!(
            cluster.ask(other, of_present, &mut now),
            Some(Ok(_))
        ));
        cluster.check().unwrap();
    }

    fn with_holder(block: &Command, member: MemberId) -> Command {
        let mut block = block.clone();
        if let Command::AssignBlock { holder, .. } = &mut block {
            *holder = member;
        }
        block
    }

    #[test]
    fn a_member_far_behind_gets_the_snapshot() {
        let mut now = Monotonic(0);
        let settings = Settings {
            snapshot_entries: 5,
            ..Settings::default()
        };
        let mut cluster = Cluster::grown(settings, 3, &mut now);
        cluster.crash(id(3));
        for number in 0..300 {
            let option = Command::SetOption {
                name: format!("o{number}"),
                value: Some("x".into()),
            };
            assert!(matches!(cluster.ask(id(2), option, &mut now), Some(Ok(_))));
        }
        assert!(cluster.nodes[&id(1)].stored.entries.len() < 20);
        cluster.boot(id(3), Continuity::Proven, now);
        cluster.run(&mut now, 60);
        cluster.check().unwrap();
        let options = cluster
            .agreement(id(3))
            .unwrap()
            .state()
            .unwrap()
            .options()
            .count();
        assert_eq!(options, 300);
        // All start anew from what they have stored.
        for number in 1..=3 {
            cluster.boot(id(number), Continuity::Proven, now);
        }
        cluster.run(&mut now, 60);
        cluster.check().unwrap();
        let states: Vec<_> = (1..=3)
            .map(|number| {
                cluster
                    .agreement(id(number))
                    .unwrap()
                    .state()
                    .unwrap()
                    .encode()
            })
            .collect();
        assert!(states.iter().all(|state| *state == states[0]));
    }
}
