//! Every schedule of a few steps over the real agreement, by a model checker.
//!
//! A state of the model is the list of actions that led to it: it is built by carrying them out
//! anew. Two lists are one state if all members look alike after them: what is stored, the
//! algorithm's volatile state as far as it shows it, and the messages under way. Messages are
//! delivered in any order or not at all (a partition). Elections begin by an action, not by time;
//! without the vote before the vote, which only saves elections. Time passes by an action too, for
//! all members at once: only leases ask for it. (`lease` has clocks that drift.)
//!
//! Each case also runs with a rule broken, and the checker finds a schedule that shows it. To be
//! quick it begins with the first steps of a known one, and looks at all schedules if that leads
//! nowhere. `BRAID_GROUP_STATES` is how many states each case visits at most; with it all schedules
//! are looked at at once.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};

use stateright::{Checker, HasDiscoveries, Model, Property};

use crate::cluster::{Cluster, GROUP, id, new_member};
use crate::mutation::Mutation;
use crate::{Command, Continuity, MemberId, MemberState, Monotonic, Settings, Stored};

const LEASE: &[u8] = b"sequencer";
/// Microseconds.
const LEASE_TIME: u64 = 100_000;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Move {
    /// A member stands for election; the others have heard of no leader for long.
    Campaign(u64),
    Propose(u64, Command),
    /// A member offers again what it has proposed.
    Offer(u64),
    /// A member's machine is switched off and on.
    Restart(u64),
    /// A member goes on from the backup of its disk.
    Restore(u64),
    /// So many microseconds pass.
    Wait(u64),
    /// A member asks for the lease, or renews it, as it knows the state.
    Lease(u64),
    /// All that is under way between these members is delivered, and what comes of it. Other
    /// messages stay under way.
    Among(&'static [u64]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    /// The message at this place is delivered.
    Deliver(usize),
    /// A message is delivered, and the member's machine fails before its answer is written.
    DeliverAndFail(usize),
    /// The move at this place is made; each once.
    Make(usize),
}

/// A case: where it begins, and what can happen.
struct Case {
    begin: fn(Option<Mutation>) -> World,
    moves: Vec<Move>,
    /// How many deliveries may fail.
    failures: usize,
    depth: usize,
    /// The depth if nothing is asked for.
    quick: usize,
    mutation: Option<Mutation>,
    /// The first steps, if not all schedules are wanted.
    first: Vec<Action>,
}

struct World {
    cluster: Cluster,
    now: Monotonic,
    backup: Option<Stored>,
    /// How many entries were applied and leaders elected before the first action.
    begun: usize,
}

#[derive(Clone)]
struct Seen {
    history: Vec<Action>,
    next: Arc<[Action]>,
    digest: u64,
    broken: Option<String>,
    reached: bool,
}

impl PartialEq for Seen {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Hash for Seen {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.history, self.broken)
    }
}

use Action::{Deliver, DeliverAndFail, Make};

impl World {
    fn of(stored: &[Stored], mutation: Option<Mutation>) -> Self {
        let settings = Settings::default();
        let mut cluster = Cluster::empty(settings, mutation);
        for stored in stored {
            cluster.add(stored.clone());
        }
        for me in cluster.nodes.keys().copied().collect::<Vec<_>>() {
            cluster.agreement(me).unwrap().without_pre_vote();
        }
        cluster.letters.clear();
        Self {
            cluster,
            now: Monotonic(0),
            backup: None,
            begun: 0,
        }
    }

    fn make(&mut self, what: &Move) {
        match what {
            Move::Campaign(me) => self.campaign(id(*me)),
            Move::Propose(me, command) => {
                self.cluster.propose(id(*me), command.clone(), self.now);
            }
            Move::Offer(me) => {
                if let Some(agreement) = self.cluster.agreement(id(*me)) {
                    let _ = agreement.offer_all();
                }
                self.cluster.settle(id(*me));
            }
            Move::Restart(me) => self.restart(id(*me), Continuity::Proven),
            Move::Restore(me) => {
                let backup = self.backup.clone().unwrap();
                let node = self.cluster.nodes.get_mut(&id(*me)).unwrap();
                node.stored = backup.clone();
                node.flushed = backup;
                self.restart(id(*me), Continuity::Unproven);
            }
            Move::Wait(microseconds) => self.now.0 += microseconds,
            Move::Lease(me) => self.lease(id(*me)),
            Move::Among(members) => self.among(members),
        }
    }

    fn lease(&mut self, me: MemberId) {
        let Some(agreement) = self.cluster.agreement(me) else {
            return;
        };
        let name = LEASE.to_vec();
        let known = agreement.state().and_then(|state| state.lease(LEASE));
        let command = match agreement.granted(LEASE) {
            Some(token) => Command::RenewLease {
                name,
                token,
                acting: false,
            },
            None => Command::GrantLease {
                name,
                holder: me,
                duration: LEASE_TIME,
                instead_of: known.map(|lease| lease.token),
            },
        };
        self.cluster.propose(me, command, self.now);
    }

    /// The members that may act alone under the lease at this moment.
    fn acting(&self) -> Vec<MemberId> {
        let acts = |agreement: &crate::Agreement| agreement.may_act(LEASE, self.now).is_some();
        self.cluster
            .nodes
            .iter()
            .filter(|(_, node)| node.agreement.as_ref().is_some_and(acts))
            .map(|(me, _)| *me)
            .collect()
    }

    fn check(&self) -> Result<(), String> {
        self.cluster.check()?;
        match self.acting() {
            acting if acting.len() > 1 => Err(format!("several hold the lease: {acting:?}")),
            _ => Ok(()),
        }
    }

    fn among(&mut self, members: &[u64]) {
        loop {
            let among = |who: MemberId| members.contains(&who.get());
            let (now, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.cluster.letters)
                .into_iter()
                .partition(|letter| among(letter.from) && among(letter.to));
            self.cluster.letters = later;
            if now.is_empty() {
                return;
            }
            for letter in now {
                self.cluster.deliver(&letter, self.now);
            }
        }
    }

    fn restart(&mut self, me: MemberId, continuity: Continuity) {
        self.cluster.power_off(me);
        self.cluster.boot(me, continuity, self.now);
        if let Some(agreement) = self.cluster.agreement(me) {
            agreement.without_pre_vote();
        }
    }

    fn campaign(&mut self, me: MemberId) {
        for node in self.cluster.nodes.values_mut() {
            if let Some(agreement) = &mut node.agreement {
                agreement.hears_no_leader();
            }
        }
        if let Some(agreement) = self.cluster.agreement(me)
            && agreement.stopped().is_none()
            && !agreement.is_confirming()
        {
            let _ = agreement.campaign();
            self.cluster.settle(me);
        }
    }

    fn act(&mut self, action: Action, moves: &[Move]) {
        match action {
            Action::Make(at) => self.make(&moves[at]),
            Action::Deliver(at) => {
                let letter = self.cluster.letters.remove(at);
                self.cluster.deliver(&letter, self.now);
            }
            Action::DeliverAndFail(at) => {
                let letter = self.cluster.letters.remove(at);
                if let Some(agreement) = self.cluster.agreement(letter.to) {
                    let _ = agreement.receive(&letter.bytes, self.now);
                    self.cluster.write(letter.to, false);
                    self.restart(letter.to, Continuity::Proven);
                }
            }
        }
    }

    /// Delivers messages between these members until there are none; others are lost.
    fn between(&mut self, members: &[u64]) {
        loop {
            let all = std::mem::take(&mut self.cluster.letters);
            let among = |who: MemberId| members.contains(&who.get());
            let letters: Vec<_> = all
                .into_iter()
                .filter(|l| among(l.from) && among(l.to))
                .collect();
            if letters.is_empty() {
                return;
            }
            for letter in letters {
                self.cluster.deliver(&letter, self.now);
            }
        }
    }

    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.now.hash(&mut hasher);
        for (me, node) in &self.cluster.nodes {
            me.hash(&mut hasher);
            for stored in [&node.stored, &node.flushed] {
                (&stored.core, &stored.known).hash(&mut hasher);
                for record in stored.snapshot.iter().chain(&stored.entries) {
                    (record.index, record.term, &record.bytes).hash(&mut hasher);
                }
            }
            let agreement = node.agreement.as_ref();
            agreement.map(crate::Agreement::picture).hash(&mut hasher);
            let state = agreement.and_then(crate::Agreement::state);
            state.map(crate::State::encode).hash(&mut hasher);
        }
        let letters = self.cluster.letters.iter();
        let mut letters: Vec<_> = letters.map(|l| (l.from, l.to, &l.bytes)).collect();
        letters.sort();
        letters.hash(&mut hasher);
        hasher.finish()
    }
}

impl Case {
    fn seen(&self, history: Vec<Action>) -> Seen {
        let mut world = (self.begin)(self.mutation);
        world.begun = world.cluster.log.len() + world.cluster.leaders.len();
        for action in &history {
            world.act(*action, &self.moves);
        }
        let mut next: Vec<Action> = (0..self.moves.len())
            .map(Action::Make)
            .filter(|action| !history.contains(action))
            .collect();
        let failed = history
            .iter()
            .filter(|a| matches!(a, Action::DeliverAndFail(_)))
            .count();
        let letters = &world.cluster.letters;
        for (at, letter) in letters.iter().enumerate() {
            let twin = |other: &crate::cluster::Letter| {
                other.to == letter.to && other.bytes == letter.bytes
            };
            if !letters[..at].iter().any(twin) {
                next.push(Action::Deliver(at));
                if failed < self.failures {
                    next.push(Action::DeliverAndFail(at));
                }
            }
        }
        // The goal that shows that the case is not empty: an entry of the case is applied, or a
        // restored member stopped.
        let reached = world.cluster.log.len() + world.cluster.leaders.len() > world.begun
            || world.cluster.nodes.values().any(|node| {
                node.agreement
                    .as_ref()
                    .is_some_and(|agreement| agreement.stopped().is_some())
            });
        Seen {
            history,
            next: next.into(),
            digest: world.digest(),
            broken: world.check().err(),
            reached,
        }
    }
}

impl Model for Case {
    type State = Seen;
    type Action = Action;

    fn init_states(&self) -> Vec<Seen> {
        vec![self.seen(self.first.clone())]
    }

    fn actions(&self, state: &Seen, actions: &mut Vec<Action>) {
        if state.history.len() < self.depth {
            actions.extend(state.next.iter().copied());
        }
    }

    fn next_state(&self, last: &Seen, action: Action) -> Option<Seen> {
        let mut history = last.history.clone();
        history.push(action);
        Some(self.seen(history))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("rules", |_, state: &Seen| state.broken.is_none()),
            Property::sometimes("something is agreed", |_, state: &Seen| state.reached),
        ]
    }
}

/// Three members with one log and no leader.
fn three() -> &'static [Stored] {
    static STORED: OnceLock<Vec<Stored>> = OnceLock::new();
    STORED.get_or_init(|| {
        let mut now = Monotonic(0);
        let cluster = Cluster::grown(Settings::default(), 3, &mut now);
        stored(&cluster)
    })
}

fn stored(cluster: &Cluster) -> Vec<Stored> {
    cluster
        .nodes
        .values()
        .map(|node| node.stored.clone())
        .collect()
}

fn block() -> Command {
    Command::AssignBlock {
        sequence: b"s".to_vec(),
        holder: id(1),
        size: 10,
        at_least: 0,
    }
}

/// How many states a case visits; none asked for: few.
fn asked() -> Option<usize> {
    std::env::var("BRAID_GROUP_STATES")
        .ok()
        .and_then(|text| text.parse().ok())
}

/// Visits the case's states: none breaks a rule, and something happens.
fn holds(name: &str, mut case: Case) {
    let began = std::time::Instant::now();
    if asked().is_none() {
        case.depth = case.quick;
    }
    let checker = case
        .checker()
        .target_state_count(asked().unwrap_or(usize::MAX))
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    println!(
        "{name}: {} states, depth {}, {:?}",
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed()
    );
    if let Some(path) = checker.discovery("rules") {
        panic!("{name}: {:?}", path.last_state());
    }
    if asked().is_some() {
        let happened = checker.discovery("something is agreed");
        assert!(happened.is_some(), "{name}: nothing happens");
    }
}

/// With the rule broken the checker finds a schedule.
fn finds(name: &str, mutation: Mutation, case: fn() -> Case, first: &[Action]) {
    let began = std::time::Instant::now();
    let search = |first: &[Action], states: usize| {
        let mut case = case();
        case.depth += 2;
        case.mutation = Some(mutation);
        case.first = first.to_vec();
        let checker = case
            .checker()
            .target_state_count(states)
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        let found = checker
            .discovery("rules")
            .map(|path| path.last_state().clone());
        println!(
            "{name}, {mutation:?}: {} states, {:?}, {found:?}",
            checker.unique_state_count(),
            began.elapsed()
        );
        found.is_some()
    };
    let found = asked().is_none() && search(first, 1_000);
    assert!(
        found || search(&[], asked().unwrap_or(30_000)),
        "{name}: {mutation:?} is not found"
    );
}

fn two_leaders() -> Case {
    Case {
        begin: |mutation| World::of(three(), mutation),
        moves: vec![Move::Campaign(1), Move::Campaign(2), Move::Restart(3)],
        failures: 0,
        depth: 9,
        quick: 5,
        mutation: None,
        first: Vec::new(),
    }
}

#[test]
fn there_are_no_two_leaders() {
    holds("two leaders", two_leaders());
    finds(
        "two leaders",
        Mutation::ForgetVote,
        two_leaders,
        &[Make(0), Deliver(1), Make(2), Make(1)],
    );
}

/// The first member leads, all have its entry; what is under way is lost.
fn led(members: &[Stored], mutation: Option<Mutation>) -> World {
    let mut world = World::of(members, mutation);
    world.campaign(id(1));
    world.between(&[1, 2, 3, 4]);
    world
}

fn partition() -> Case {
    Case {
        begin: |mutation| led(three(), mutation),
        moves: vec![
            Move::Propose(1, block()),
            Move::Campaign(3),
            Move::Propose(3, block()),
        ],
        failures: 1,
        depth: 9,
        quick: 5,
        mutation: None,
        first: Vec::new(),
    }
}

#[test]
fn a_partition_splits_nothing() {
    holds("partition", partition());
    finds(
        "partition",
        Mutation::SendEarly,
        partition,
        &[Make(0), Make(1), Deliver(3), DeliverAndFail(3)],
    );
}

/// The second member acknowledged an entry that the third never got, and is put back to before it.
fn restored() -> Case {
    Case {
        begin: |mutation| {
            let mut world = led(three(), mutation);
            world.backup = Some(world.cluster.nodes[&id(2)].flushed.clone());
            world.cluster.propose(id(1), block(), world.now);
            world.between(&[1, 2]);
            world
        },
        moves: vec![
            Move::Restore(2),
            Move::Campaign(3),
            Move::Propose(3, block()),
        ],
        failures: 0,
        depth: 8,
        quick: 6,
        mutation: None,
        first: Vec::new(),
    }
}

#[test]
fn a_restored_member_is_not_believed() {
    holds("restored member", restored());
    finds(
        "restored member",
        Mutation::TrustUnproven,
        restored,
        &[Make(0), Make(1), Deliver(0), Deliver(2), Deliver(2)],
    );
}

/// The fourth member gets its vote while the third is removed; the second hears no more than it
/// must.
fn join_and_leave() -> Case {
    Case {
        begin: |mutation| {
            let mut world = led(joining(), mutation);
            let activate = Command::Activate { member: id(4) };
            world.cluster.propose(id(1), activate, world.now);
            let remove = Command::RemoveMember { member: id(3) };
            world.cluster.propose(id(1), remove, world.now);
            world.once(1, 2);
            world.once(2, 1);
            world.between(&[1, 4]);
            world.make(&Move::Offer(1));
            world.once(1, 2);
            world.once(2, 1);
            world.between(&[1, 4]);
            world
        },
        moves: vec![
            Move::Propose(1, block()),
            Move::Campaign(2),
            Move::Propose(2, block()),
        ],
        failures: 0,
        depth: 9,
        quick: 5,
        mutation: None,
        first: Vec::new(),
    }
}

impl World {
    /// Delivers what is under way from one member to another; the answers stay under way.
    fn once(&mut self, from: u64, to: u64) {
        let (now, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.cluster.letters)
            .into_iter()
            .partition(|letter| (letter.from, letter.to) == (id(from), id(to)));
        self.cluster.letters = later;
        for letter in now {
            self.cluster.deliver(&letter, self.now);
        }
    }
}

/// Three members with a vote and one that is about to get it.
fn joining() -> &'static [Stored] {
    static STORED: OnceLock<Vec<Stored>> = OnceLock::new();
    STORED.get_or_init(|| {
        let mut now = Monotonic(0);
        let mut cluster = Cluster::grown(Settings::default(), 3, &mut now);
        let outcome = cluster.ask(id(1), Command::AddMember(new_member(4)), &mut now);
        assert!(matches!(outcome, Some(Ok(_))));
        cluster.add(Stored::join(GROUP, id(4)));
        cluster.run(&mut now, 30);
        let state = cluster.agreement(id(4)).unwrap().state().unwrap();
        assert_eq!(state.member(id(4)).unwrap().state, MemberState::Joining);
        stored(&cluster)
    })
}

#[test]
fn a_member_joins_while_another_leaves() {
    holds("join and leave", join_and_leave());
    finds(
        "join and leave",
        Mutation::ReconfigureAnyTime,
        join_and_leave,
        &[Make(0), Make(1), Deliver(1), Deliver(2), Deliver(2)],
    );
}

/// The first member has the lease, the second one leads and takes it over.
fn lease() -> Case {
    const WAIT: u64 = LEASE_TIME * 9 / 20;
    Case {
        begin: |mutation| {
            let mut world = World::of(three(), mutation);
            world.campaign(id(2));
            world.between(&[1, 2, 3]);
            world.lease(id(1));
            world.between(&[1, 2, 3]);
            // With the renewal all have flushed that the grant is agreed.
            world.lease(id(1));
            world.between(&[1, 2, 3]);
            assert_eq!(world.acting(), [id(1)]);
            world
        },
        moves: vec![
            Move::Lease(1),
            Move::Lease(2),
            Move::Lease(2),
            Move::Among(&[2, 3]),
            Move::Among(&[2, 3]),
            Move::Among(&[2, 3]),
            Move::Wait(WAIT),
            Move::Wait(WAIT),
            Move::Wait(WAIT),
            Move::Restart(1),
            Move::Campaign(3),
        ],
        failures: 0,
        depth: 12,
        quick: 4,
        mutation: None,
        first: Vec::new(),
    }
}

#[test]
fn one_member_has_the_lease() {
    holds("lease", lease());
    let grant = [Make(1), Make(3)];
    let renew = [Make(2), Make(4)];
    finds("lease", Mutation::LeaseWithoutWait, lease, &grant);
    // The holder hears late of its renewal, and not of the next holder.
    let late: Vec<Action> = [Make(0), Deliver(0), Make(5)]
        .into_iter()
        .chain(grant)
        .chain([Make(6), Deliver(0), Deliver(0), Make(7), Make(8)])
        .collect();
    finds("lease", Mutation::LeaseFromAnswer, lease, &late);
    let restarted: Vec<Action> = grant
        .into_iter()
        .chain([Make(6), Make(7), Make(8)])
        .chain(renew)
        .collect();
    finds("lease", Mutation::LeaseOutlivesRestart, lease, &restarted);
}
