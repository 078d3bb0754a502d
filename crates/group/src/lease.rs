//! Leases by a member's own monotonic clock: who may act alone, and until when.
//!
//! Rules, for a lease of duration `D`:
//! - The holder notes its clock `t0` before it proposes the grant or a renewal. Once that entry is
//!   applied under its token, it may act until `t0 + D`.
//! - A grant replaces the one before it at its entry: from there on renewals under the earlier
//!   token are refused. So the earlier holder's last renewal has a `t0` before the moment at which
//!   anybody applies the new grant.
//! - The new holder acts only after it has waited `W * (1 + drift)` from applying its grant, `W`
//!   being the longest lease that may still run (the state knows it), and only under a renewal of
//!   its own.
//! - All that is done under a lease carries the grant's [`Token`]; whoever has seen a greater one
//!   refuses it.
//!
//! Assumption: two members' monotonic clocks run at rates that differ by less than [`DRIFT_PPM`],
//! and go on while the machine sleeps or is suspended (`CLOCK_BOOTTIME`, not `CLOCK_MONOTONIC`):
//! a member that wakes must not believe in a lease from before. Nothing is assumed of what the
//! clocks show. After a restart a member holds no lease until it has renewed it.

use std::collections::BTreeMap;

use crate::command::{Command, ProposalId, Token};
use crate::member::MemberId;
use crate::mutation::Mutation;
use crate::state::State;

/// How much faster one member's clock may run than another's, in parts per million.
pub const DRIFT_PPM: u64 = 20_000;

/// A point of a member's monotonic clock, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Monotonic(pub u64);

impl Monotonic {
    pub(crate) const fn after(self, microseconds: u64) -> Self {
        Self(self.0.saturating_add(microseconds))
    }

    pub(crate) const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Held {
    token: Token,
    /// Earlier holders' leases are over from then on.
    from: Monotonic,
    /// None until a renewal of this member's own is applied.
    until: Option<Monotonic>,
}

/// The leases of one member, as its own clock counts them. Volatile.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases {
    held: BTreeMap<Vec<u8>, Held>,
    /// When grants and renewals were proposed.
    asked: BTreeMap<ProposalId, Monotonic>,
    pub(crate) mutation: Option<Mutation>,
}

impl Leases {
    /// Notes that a proposal is about to leave.
    pub(crate) fn asks(&mut self, id: ProposalId, command: &Command, now: Monotonic) {
        match command {
            Command::GrantLease { .. } | Command::RenewLease { .. } => {
                self.asked.insert(id, now);
            }
            // The holder stops before the group hears of it.
            Command::ReleaseLease { name, token }
                if self.held.get(name).is_some_and(|held| held.token == *token) =>
            {
                self.held.remove(name);
            }
            _ => {}
        }
    }

    /// Forgets a proposal that was given up.
    pub(crate) fn forget(&mut self, id: ProposalId) {
        self.asked.remove(&id);
    }

    /// Takes an applied entry into account; `state` is the one after it.
    pub(crate) fn applied(
        &mut self,
        me: MemberId,
        id: ProposalId,
        command: &Command,
        took_effect: bool,
        state: &State,
        now: Monotonic,
    ) {
        let mut asked = self.asked.remove(&id);
        if !took_effect {
            return;
        }
        match self.mutation {
            Some(Mutation::LeaseFromAnswer) => asked = asked.map(|_| now),
            Some(Mutation::LeaseOutlivesRestart) => asked = asked.or(Some(now)),
            _ => {}
        }
        match command {
            Command::GrantLease { name, duration, .. } => {
                self.meet(me, name, state, now);
                if let Some(held) = self.held.get_mut(name) {
                    held.until = asked.map(|t0| t0.after(*duration));
                }
            }
            Command::RenewLease { name, token, .. } => {
                let duration = state.lease(name).map_or(0, |lease| lease.duration);
                if let (Some(held), Some(t0)) = (self.held.get_mut(name), asked)
                    && held.token == *token
                {
                    held.until = held.until.max(Some(t0.after(duration)));
                }
            }
            Command::ReleaseLease { name, .. } => {
                self.held.remove(name);
            }
            Command::RemoveMember { member } if *member == me => self.held.clear(),
            _ => {}
        }
    }

    /// Compares with a state that was received whole, or that the member starts with.
    pub(crate) fn meet_all(&mut self, me: MemberId, state: &State, now: Monotonic) {
        let names: Vec<Vec<u8>> = state.leases().map(|(name, _)| name.to_vec()).collect();
        self.held.retain(|name, _| state.lease(name).is_some());
        for name in names {
            self.meet(me, &name, state, now);
        }
    }

    fn meet(&mut self, me: MemberId, name: &[u8], state: &State, now: Monotonic) {
        let Some(lease) = state.lease(name).filter(|lease| lease.holder == Some(me)) else {
            self.held.remove(name);
            return;
        };
        if self
            .held
            .get(name)
            .is_some_and(|held| held.token == lease.token)
        {
            return;
        }
        let wait = match self.mutation {
            Some(Mutation::LeaseWithoutWait) => 0,
            Some(Mutation::LeaseWithoutDrift) => lease.wait,
            _ => lease.wait.saturating_add(drift(lease.wait)),
        };
        let held = Held {
            token: lease.token,
            from: now.after(wait),
            until: None,
        };
        self.held.insert(name.to_vec(), held);
    }

    /// The token under which the member may act at this moment.
    pub(crate) fn may_act(&self, name: &[u8], now: Monotonic) -> Option<Token> {
        let held = self.held.get(name)?;
        (held.from <= now && held.until.is_some_and(|until| now < until)).then_some(held.token)
    }

    /// The grant that the member has, and whether earlier ones are waited out. For renewals.
    pub(crate) fn granted(&self, name: &[u8], now: Monotonic) -> Option<(Token, bool)> {
        let held = self.held.get(name)?;
        Some((held.token, held.from <= now))
    }
}

/// The drift over a time, rounded up.
fn drift(microseconds: u64) -> u64 {
    let product = u128::from(microseconds) * u128::from(DRIFT_PPM);
    u64::try_from(product.div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{GROUP, id, new_member};
    use crate::{Outcome, Proposal, Value};

    const LEASE: &[u8] = b"sequencer";
    const TIME: u64 = 100_000;

    /// Two members that apply one log, each by its own clock; the second one's runs as much faster
    /// as is allowed.
    struct Pair {
        state: State,
        leases: [Leases; 2],
        time: u64,
        counters: u64,
        /// Whether the first member hears nothing any more.
        cut: bool,
    }

    impl Pair {
        fn new(mutation: Option<Mutation>) -> Self {
            let mut pair = Self {
                state: State::create(GROUP, "shop", new_member(1)).unwrap(),
                leases: [Leases::default(), Leases::default()],
                time: 1_000_000,
                counters: 0,
                cut: false,
            };
            for leases in &mut pair.leases {
                leases.mutation = mutation;
            }
            pair.propose(0, Command::AddMember(new_member(2))).unwrap();
            pair
        }

        fn clock(&self, who: usize) -> Monotonic {
            Monotonic(if who == 0 {
                self.time
            } else {
                self.time + self.time * DRIFT_PPM / 1_000_000
            })
        }

        fn id(&mut self, who: usize) -> ProposalId {
            self.counters += 1;
            ProposalId {
                member: id(who as u64 + 1),
                boot: 1,
                counter: self.counters,
            }
        }

        fn apply(&mut self, proposal: &Proposal) -> Outcome {
            let (index, now) = (self.state.index() + 1, [self.clock(0), self.clock(1)]);
            let outcome = self.state.apply(index, 1, proposal);
            for (who, leases) in self.leases.iter_mut().enumerate() {
                if self.cut && who == 0 {
                    continue;
                }
                let me = id(who as u64 + 1);
                let took = outcome.is_ok();
                leases.applied(
                    me,
                    proposal.id,
                    &proposal.command,
                    took,
                    &self.state,
                    now[who],
                );
            }
            outcome
        }

        fn propose(&mut self, who: usize, command: Command) -> Outcome {
            let id = self.id(who);
            let now = self.clock(who);
            self.leases[who].asks(id, &command, now);
            self.apply(&Proposal { id, command })
        }

        fn grant(&mut self, who: usize, instead_of: Option<Token>) -> Outcome {
            let command = Command::GrantLease {
                name: LEASE.to_vec(),
                holder: id(who as u64 + 1),
                duration: TIME,
                instead_of,
            };
            self.propose(who, command)
        }

        fn renew(&mut self, who: usize) -> Outcome {
            let (token, acting) = self.leases[who].granted(LEASE, self.clock(who)).unwrap();
            let name = LEASE.to_vec();
            self.propose(
                who,
                Command::RenewLease {
                    name,
                    token,
                    acting,
                },
            )
        }

        fn acts(&self, who: usize) -> bool {
            self.leases[who].may_act(LEASE, self.clock(who)).is_some()
        }
    }

    fn token(outcome: &Outcome) -> Option<Token> {
        match outcome {
            Ok(Value::Lease { token, .. }) => Some(*token),
            _ => None,
        }
    }

    /// Whether both act at once while the lease goes from the first member to the second.
    fn both_act(mutation: Option<Mutation>) -> bool {
        let mut pair = Pair::new(mutation);
        let first = pair.grant(0, None);
        assert!(pair.acts(0));
        pair.time += TIME / 2;
        pair.renew(0).unwrap();
        pair.cut = true;
        pair.grant(1, token(&first)).unwrap();
        let mut both = false;
        for _ in 0..300 {
            pair.time += TIME / 100;
            pair.renew(1).unwrap();
            both |= pair.acts(0) && pair.acts(1);
        }
        assert!(pair.acts(1) && !pair.acts(0));
        both
    }

    #[test]
    fn the_next_holder_waits_for_the_clocks_drift() {
        assert!(!both_act(None));
        assert!(both_act(Some(Mutation::LeaseWithoutWait)));
        assert!(both_act(Some(Mutation::LeaseWithoutDrift)));
    }

    /// The holder's renewal is applied by all at once, but the holder hears of it late, and no more
    /// after it.
    fn both_act_after_a_late_answer(mutation: Option<Mutation>) -> bool {
        let mut pair = Pair::new(mutation);
        let first = pair.grant(0, None);
        let renewal = Command::RenewLease {
            name: LEASE.to_vec(),
            token: token(&first).unwrap(),
            acting: true,
        };
        pair.cut = true;
        let renewed = pair.id(0);
        let now = pair.clock(0);
        pair.leases[0].asks(renewed, &renewal, now);
        let before = pair.state.clone();
        pair.apply(&Proposal {
            id: renewed,
            command: renewal.clone(),
        })
        .unwrap();
        pair.grant(1, token(&first)).unwrap();
        pair.time += TIME / 2;
        let now = pair.clock(0);
        pair.leases[0].applied(id(1), renewed, &renewal, true, &before, now);
        assert!(pair.acts(0));
        let mut both = false;
        for _ in 0..200 {
            pair.time += TIME / 100;
            pair.renew(1).unwrap();
            both |= pair.acts(0) && pair.acts(1);
        }
        assert!(pair.acts(1) && !pair.acts(0));
        both
    }

    #[test]
    fn a_lease_counts_from_when_it_was_asked_for() {
        assert!(!both_act_after_a_late_answer(None));
        assert!(both_act_after_a_late_answer(Some(
            Mutation::LeaseFromAnswer
        )));
    }

    /// A clock that counts the time in which the machine slept: the lease is over when it wakes.
    #[test]
    fn a_holder_that_slept_has_no_lease() {
        let mut pair = Pair::new(None);
        let first = pair.grant(0, None);
        assert!(pair.acts(0));
        // Nothing reaches the holder meanwhile, not even a tick.
        pair.cut = true;
        pair.time += 3_600_000_000;
        assert!(!pair.acts(0));
        pair.grant(1, token(&first)).unwrap();
        assert!(!pair.acts(0) && !pair.acts(1));
    }

    #[test]
    fn a_grant_that_never_acted_leaves_the_one_before_to_be_waited_for() {
        let mut pair = Pair::new(None);
        let first = pair.grant(0, None);
        let second = pair.grant(1, token(&first));
        let third = pair.grant(0, token(&second));
        assert_eq!(
            third,
            Ok(Value::Lease {
                token: token(&third).unwrap(),
                wait: TIME
            })
        );
        // Nobody may renew under an earlier grant.
        let command = Command::RenewLease {
            name: LEASE.to_vec(),
            token: token(&first).unwrap(),
            acting: true,
        };
        assert_eq!(pair.propose(0, command), Err(crate::Refusal::LeaseLost));
        assert!(!pair.acts(0));
        pair.time += TIME * 2;
        pair.renew(0).unwrap();
        assert!(pair.acts(0));
        // Released after it acted: the next one need not wait.
        let command = Command::ReleaseLease {
            name: LEASE.to_vec(),
            token: token(&third).unwrap(),
        };
        pair.propose(0, command).unwrap();
        assert!(!pair.acts(0));
        let fourth = pair.grant(1, None);
        assert_eq!(
            fourth,
            Ok(Value::Lease {
                token: token(&fourth).unwrap(),
                wait: 0
            })
        );
        assert!(pair.acts(1));
    }

    #[test]
    fn a_removed_holder_is_waited_for() {
        let mut pair = Pair::new(None);
        pair.propose(0, Command::Activate { member: id(2) })
            .unwrap();
        let first = pair.grant(1, None);
        assert!(pair.acts(1));
        pair.propose(0, Command::RemoveMember { member: id(2) })
            .unwrap();
        assert!(!pair.acts(1));
        let second = pair.grant(0, token(&first));
        assert!(matches!(second, Ok(Value::Lease { wait: TIME, .. })));
        assert!(!pair.acts(0));
    }
}

/// Every schedule of a hand-over between two members, by a model checker over the real rules.
#[cfg(test)]
mod model {
    use std::hash::{Hash, Hasher};

    use stateright::{Checker, HasDiscoveries, Model, Property};

    use super::*;
    use crate::Proposal;
    use crate::cluster::{GROUP, id, new_member};

    const LEASE: &[u8] = b"sequencer";
    const TIME: u64 = 100_000;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Step {
        /// Time passes for both, a little less than half a lease.
        Wait,
        /// A member asks for the lease, or renews it, as it knows the state.
        Ask(usize),
        /// A member applies the next entry.
        Apply(usize),
    }

    #[derive(Debug, Clone)]
    struct Member {
        state: State,
        leases: Leases,
        applied: usize,
    }

    #[derive(Debug, Clone)]
    struct Both {
        log: Vec<Proposal>,
        members: [Member; 2],
        time: u64,
    }

    impl PartialEq for Both {
        fn eq(&self, other: &Self) -> bool {
            self.picture() == other.picture()
        }
    }

    impl Hash for Both {
        fn hash<H: Hasher>(&self, hasher: &mut H) {
            self.picture().hash(hasher);
        }
    }

    impl Both {
        fn picture(&self) -> String {
            let of = |member: &Member| format!("{:?} {:?}", member.leases, member.applied);
            format!(
                "{:?} {} {:?}",
                self.log,
                self.time,
                self.members.each_ref().map(of)
            )
        }

        /// The second member's clock runs as much faster as is allowed.
        fn clock(&self, who: usize) -> Monotonic {
            let drift = if who == 0 { 0 } else { DRIFT_PPM };
            Monotonic(self.time + self.time * drift / 1_000_000)
        }

        fn acts(&self, who: usize) -> bool {
            self.members[who]
                .leases
                .may_act(LEASE, self.clock(who))
                .is_some()
        }
    }

    struct HandOver {
        mutation: Option<Mutation>,
        entries: usize,
    }

    impl Model for HandOver {
        type State = Both;
        type Action = Step;

        fn init_states(&self) -> Vec<Both> {
            let mut state = State::create(GROUP, "shop", new_member(1)).unwrap();
            let add = Proposal {
                id: ProposalId {
                    member: id(1),
                    boot: 1,
                    counter: 1,
                },
                command: Command::AddMember(new_member(2)),
            };
            state.apply(2, 1, &add).unwrap();
            let leases = Leases {
                mutation: self.mutation,
                ..Leases::default()
            };
            let member = Member {
                state,
                leases,
                applied: 0,
            };
            vec![Both {
                log: Vec::new(),
                members: [member.clone(), member],
                time: 1_000_000,
            }]
        }

        fn actions(&self, both: &Both, actions: &mut Vec<Step>) {
            if both.time < 1_000_000 + TIME * 3 / 2 {
                actions.push(Step::Wait);
            }
            for who in [0, 1] {
                if both.log.len() < self.entries {
                    actions.push(Step::Ask(who));
                }
                if both.members[who].applied < both.log.len() {
                    actions.push(Step::Apply(who));
                }
            }
        }

        fn next_state(&self, last: &Both, step: Step) -> Option<Both> {
            let mut both = last.clone();
            match step {
                Step::Wait => both.time += TIME * 99 / 200,
                Step::Ask(who) => {
                    let now = both.clock(who);
                    let member = &mut both.members[who];
                    let name = LEASE.to_vec();
                    let command = match member.leases.granted(LEASE, now) {
                        Some((token, acting)) => Command::RenewLease {
                            name,
                            token,
                            acting,
                        },
                        None => Command::GrantLease {
                            name,
                            holder: id(who as u64 + 1),
                            duration: TIME,
                            instead_of: member.state.lease(LEASE).map(|lease| lease.token),
                        },
                    };
                    let counter = both.log.len() as u64 + 2;
                    let id = ProposalId {
                        member: id(who as u64 + 1),
                        boot: 1,
                        counter,
                    };
                    member.leases.asks(id, &command, now);
                    both.log.push(Proposal { id, command });
                }
                Step::Apply(who) => {
                    let now = both.clock(who);
                    let member = &mut both.members[who];
                    let proposal = &both.log[member.applied];
                    let index = member.state.index() + 1;
                    let took = member.state.apply(index, 1, proposal).is_ok();
                    let me = id(who as u64 + 1);
                    let (state, command) = (&member.state, &proposal.command);
                    member
                        .leases
                        .applied(me, proposal.id, command, took, state, now);
                    member.applied += 1;
                }
            }
            Some(both)
        }

        fn properties(&self) -> Vec<Property<Self>> {
            vec![
                Property::always("one acts", |_, both: &Both| !(both.acts(0) && both.acts(1))),
                Property::sometimes("the second acts", |_, both: &Both| both.acts(1)),
            ]
        }
    }

    fn check(mutation: Option<Mutation>) -> (bool, bool) {
        let entries = std::env::var("BRAID_GROUP_ENTRIES")
            .ok()
            .and_then(|text| text.parse().ok());
        let model = HandOver {
            mutation,
            entries: entries.unwrap_or(3),
        };
        let began = std::time::Instant::now();
        let checker = model
            .checker()
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        let found = checker.discovery("one acts").is_some();
        let states = checker.unique_state_count();
        println!(
            "hand-over, {mutation:?}: {states} states, {:?}, found {found}",
            began.elapsed()
        );
        (found, checker.discovery("the second acts").is_some())
    }

    #[test]
    fn no_schedule_lets_both_act() {
        assert_eq!(check(None), (false, true));
        assert!(check(Some(Mutation::LeaseWithoutWait)).0);
        assert!(check(Some(Mutation::LeaseWithoutDrift)).0);
        assert!(check(Some(Mutation::LeaseFromAnswer)).0);
    }
}
