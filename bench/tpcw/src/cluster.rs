//! Clients, nodes, the sequencer and appliers, from event to event.
//!
//! A client sends one interaction after the other, without a pause. Its way through a node:
//!
//! 1. It arrives. A versioned one asks the node's versions process (*keeper*), which asks the
//!    sequencer on node 0.
//! 2. Once all writes before it are visible, the keeper wakes the session. It runs the statements,
//!    with a round trip to the client for each.
//! 3. If it writes, it asks the keeper again, commits, and flushes.
//! 4. Walsenders send it to all other nodes. There an applier asks the keeper, applies, asks
//!    again, and commits. Transactions of one origin are applied one after the other.
//!
//! Grants, waits, and what may be applied come from `braid_versions`: a [`Local`] for each node and
//! one [`Sequencer`]. Whatever needs a processor shares those of its node with all else there.

use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::rc::Rc;

use braid_testing::Random;
use braid_versions::{
    Answer, Batch, Boot, Commit, Cut, Ends, Local, NodeNumber, Record, Report, Reports, Sequencer,
    Start, TableNumber, Term, Verdict, Version,
};

use crate::costs::Costs;
use crate::interactions::{Interaction, Mix};
use crate::processors::{Processors, Time};

/// Where interactions that write run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writers {
    /// At the client's own node.
    Everywhere,
    /// At the sequencer's node.
    AtSequencer,
}

/// A simulated group and its clients.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Nodes.
    pub nodes: usize,
    /// Clients, spread evenly over the nodes.
    pub clients: usize,
    /// The mix of interactions.
    pub mix: Mix,
    /// Whether transactions are versioned. Without, on one node alone, nothing waits.
    pub is_versioned: bool,
    /// Whether what reads one table needs no grant.
    pub single_read: bool,
    /// Whether a table that is not written after all is released early.
    pub early_release: bool,
    /// Whether a node sends its next message to the sequencer once the last one is answered.
    pub joins: bool,
    /// Where interactions that write run.
    pub writers: Writers,
    /// Processors of a node.
    pub processors: usize,
    /// Interactions that are measured.
    pub interactions: usize,
}

/// The result of a simulation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Interactions a second.
    pub throughput: f64,
    /// Mean seconds from a client's request to its answer.
    pub latency: f64,
    /// Mean part of that in which a transaction waited for versions, of those that asked for some.
    pub wait: f64,
    /// Part of the processors' time that was used, at node 0 and at the last one.
    pub busy: [f64; 2],
    /// Transactions that wrote, by second.
    pub writes: f64,
}

/// A transaction on its way to other nodes.
#[derive(Debug)]
struct Change {
    record: Record,
    interaction: usize,
}

#[derive(Debug)]
enum Job {
    Begin(usize),
    Statements(usize),
    Turn,
    Decode(usize, Rc<Change>),
    Skip,
    Apply(usize),
    Show(usize),
}

/// A message to a keeper.
#[derive(Debug)]
enum Message {
    Asked(usize),
    ReadAsked(usize),
    /// A session has its snapshot; and the table that it releases early.
    Running(u64, Option<TableNumber>),
    CommitAsked(usize),
    Ended(u64),
    Committed(u64),
    ApplyAsked,
    Applied(Rc<Change>),
    Batch(Batch),
    Answer(Answer),
    Announce(Ends),
}

#[derive(Debug)]
enum Event {
    Arrive(usize),
    Sliced(usize, usize, Time),
    /// The keeper of a node wakes up.
    Turn(usize),
    /// A session wakes up with its snapshot.
    Ready(usize),
    /// All statements are done, and the client says COMMIT.
    Commit(usize),
    Flushed(usize),
    Tell(usize, Message),
    Change(usize, usize, Rc<Change>),
    /// An applier may begin, or may commit: node, origin.
    Apply(usize, usize),
    Show(usize, usize),
}

struct Timed {
    at: Time,
    order: u64,
    event: Event,
}

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Timed {}
impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timed {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There is nothing to apply.
    Idle,
    /// The first change waits for what its transaction had seen.
    Waiting,
    /// The first change is being applied, or is about to be.
    Busy,
    /// The first change waits for its commit.
    CommitAsked,
}

#[derive(Debug)]
struct Stream {
    changes: VecDeque<Rc<Change>>,
    stage: Stage,
}

struct Client {
    node: usize,
    interaction: usize,
    number: u64,
    began: Time,
    asked: Time,
    record: Option<Record>,
    waits_for: Option<(TableNumber, Version)>,
    releases: bool,
}

struct Node {
    local: Local,
    processors: Processors<Job>,
    /// Messages to the keeper: new ones, and those that it is working on.
    inbox: Vec<Message>,
    turn: Vec<Message>,
    is_awake: bool,
    /// Clients that wait for their snapshot, for a single read, for their commit.
    waiting: Vec<usize>,
    reading: Vec<usize>,
    committing: Vec<usize>,
    streams: Vec<Stream>,
    asked: Option<Batch>,
    is_asking: bool,
}

struct World<'a> {
    setup: Setup,
    costs: &'a Costs,
    interactions: &'a [Interaction],
    shares: Vec<u64>,
    random: Random,
    now: Time,
    order: u64,
    events: BinaryHeap<Timed>,
    nodes: Vec<Node>,
    clients: Vec<Client>,
    sequencer: Sequencer,
    announced: Ends,
    /// Announcements that the sequencer's process has sent since its last turn began.
    told: usize,
    done: usize,
    measured_from: Option<Time>,
    measured: Sums,
}

#[derive(Default)]
struct Sums {
    count: usize,
    latency: Time,
    asked: u64,
    wait: Time,
    writes: usize,
    used: [Time; 2],
}

fn nanoseconds(micros: f64) -> Time {
    (micros * 1000.0).round() as Time
}

fn seconds(time: Time) -> f64 {
    time as f64 / 1e9
}

/// Simulates.
pub fn run(setup: Setup, costs: &Costs, interactions: &[Interaction]) -> Outcome {
    let mut world = World::new(setup, costs, interactions);
    for client in 0..setup.clients {
        // Not all at once.
        let at = world.random.below(nanoseconds(1000.0));
        world.schedule(at, Event::Arrive(client));
    }
    while world.measured.count < setup.interactions {
        let next = world.events.pop().expect("somebody has something to do");
        world.now = next.at;
        world.step(next.event);
    }
    world.outcome()
}

impl<'a> World<'a> {
    fn new(setup: Setup, costs: &'a Costs, interactions: &'a [Interaction]) -> Self {
        let number = |node: usize| NodeNumber(node as u16 + 1);
        let report = Report {
            term: Term(0),
            ends: BTreeMap::new(),
        };
        let reports: Reports = (0..setup.nodes)
            .map(|node| (number(node), report.clone()))
            .collect();
        let cut = Cut::new_sequencer(Term(0), setup.nodes, &reports, true).unwrap();
        let processes = setup.clients + 2 + 2 * setup.nodes;
        let node = |node| {
            let mut local = Local::new(number(node), Boot(1));
            local.learn(&cut).unwrap();
            Node {
                local,
                processors: Processors::new(setup.processors, processes),
                inbox: Vec::new(),
                turn: Vec::new(),
                is_awake: false,
                waiting: Vec::new(),
                reading: Vec::new(),
                committing: Vec::new(),
                streams: (0..setup.nodes)
                    .map(|_| Stream {
                        changes: VecDeque::new(),
                        stage: Stage::Idle,
                    })
                    .collect(),
                asked: None,
                is_asking: false,
            }
        };
        let client = |client| Client {
            node: client % setup.nodes,
            interaction: 0,
            number: 0,
            began: 0,
            asked: 0,
            record: None,
            waits_for: None,
            releases: false,
        };
        Self {
            setup,
            costs,
            interactions,
            shares: interactions
                .iter()
                .map(|i| i.shares[setup.mix as usize])
                .collect(),
            random: Random::from_seed(7),
            now: 0,
            order: 0,
            events: BinaryHeap::new(),
            nodes: (0..setup.nodes).map(node).collect(),
            clients: (0..setup.clients).map(client).collect(),
            sequencer: Sequencer::begin(&cut).unwrap(),
            announced: Ends::new(),
            told: 0,
            done: 0,
            measured_from: None,
            measured: Sums::default(),
        }
    }

    fn schedule(&mut self, after: Time, event: Event) {
        self.order += 1;
        self.events.push(Timed {
            at: self.now + after,
            order: self.order,
            event,
        });
    }

    // Processes of a node, beside its sessions.
    fn keeper(&self) -> usize {
        self.setup.clients
    }

    fn filter(&self) -> usize {
        self.setup.clients + 1
    }

    fn sender(&self, peer: usize) -> usize {
        self.setup.clients + 2 + peer
    }

    fn applier(&self, origin: usize) -> usize {
        self.setup.clients + 2 + self.setup.nodes + origin
    }

    fn network(&self) -> Time {
        nanoseconds(self.costs.network)
    }

    fn wake(&self) -> Time {
        nanoseconds(self.costs.wake)
    }

    fn give(&mut self, node: usize, process: usize, micros: f64, job: Job) {
        self.nodes[node]
            .processors
            .give(process, nanoseconds(micros), job);
        self.start(node);
    }

    fn start(&mut self, node: usize) {
        for (process, slice) in self.nodes[node].processors.start() {
            self.schedule(slice, Event::Sliced(node, process, slice));
        }
    }

    fn of(&self, client: usize) -> &'a Interaction {
        &self.interactions[self.clients[client].interaction]
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrive(client) => self.arrive(client),
            Event::Sliced(node, process, slice) => {
                let job = self.nodes[node].processors.stop(process, slice);
                if let Some(job) = job {
                    self.done(node, job);
                }
                self.start(node);
            }
            Event::Turn(node) => self.turn(node),
            Event::Ready(client) => {
                let node = self.clients[client].node;
                let waited = self.now - self.clients[client].asked;
                self.measured.wait += waited;
                self.measured.asked += 1;
                let micros = self.costs.statements[&self.of(client).name];
                if self.clients[client].waits_for.is_none() {
                    let releases = self.clients[client].releases && self.setup.early_release;
                    let released = self.of(client).releases.filter(|_| releases);
                    let number = self.clients[client].number;
                    self.tell(
                        node,
                        Message::Running(number, released.map(|(table, _)| table)),
                    );
                }
                self.give(
                    node,
                    client,
                    micros + self.costs.session / 2.0,
                    Job::Statements(client),
                );
            }
            Event::Commit(client) => self.commit(client),
            Event::Flushed(client) => self.flushed(client),
            Event::Tell(node, message) => self.tell(node, message),
            Event::Change(node, origin, change) => {
                let stream = &mut self.nodes[node].streams[origin];
                stream.changes.push_back(change);
                if stream.stage == Stage::Idle {
                    stream.stage = Stage::Waiting;
                    self.tell(node, Message::ApplyAsked);
                }
            }
            Event::Apply(node, origin) => {
                let change = &self.nodes[node].streams[origin].changes[0];
                let micros = self.costs.apply[&self.interactions[change.interaction].name];
                self.give(node, self.applier(origin), micros, Job::Apply(origin));
            }
            // The commit itself is part of what applying costs.
            Event::Show(node, origin) => {
                self.give(node, self.applier(origin), 1.0, Job::Show(origin));
            }
        }
    }

    /// A client's next interaction is at its node.
    fn arrive(&mut self, client: usize) {
        let mut at = self.random.below(10_000);
        let chosen = self.shares.iter().position(|share| {
            let is_it = at < *share;
            at = at.saturating_sub(*share);
            is_it
        });
        let chosen = chosen.unwrap_or(0);
        let interaction = &self.interactions[chosen];
        let node = match self.setup.writers {
            Writers::AtSequencer if interaction.writes() => 0,
            _ => client % self.setup.nodes,
        };
        let percent = interaction.releases.map_or(0, |(_, percent)| percent);
        let releases = self.random.below(100) < percent;
        let now = self.now;
        let single = interaction.single().filter(|_| self.setup.single_read);
        let at = &mut self.clients[client];
        (at.node, at.interaction, at.began, at.asked) = (node, chosen, now, now);
        (at.record, at.waits_for, at.releases) = (None, None, releases);
        if interaction.tables.is_empty() || !self.setup.is_versioned {
            let micros = self.costs.statements[&interaction.name];
            self.give(node, client, micros, Job::Statements(client));
        } else if let Some(table) = single {
            at.waits_for = Some((table, Version(0)));
            self.give(node, client, self.costs.session / 2.0, Job::Begin(client));
        } else {
            self.give(node, client, self.costs.session / 2.0, Job::Begin(client));
        }
    }

    fn done(&mut self, node: usize, job: Job) {
        match job {
            Job::Begin(client) if self.clients[client].waits_for.is_some() => {
                self.tell(node, Message::ReadAsked(client));
            }
            Job::Begin(client) => self.tell(node, Message::Asked(client)),
            Job::Statements(client) => {
                let trips = 2 * self.of(client).statements.saturating_sub(1);
                self.schedule(trips * self.network(), Event::Commit(client));
            }
            Job::Turn => self.work(node),
            Job::Decode(peer, change) => {
                self.schedule(self.network(), Event::Change(peer, node, change));
            }
            Job::Skip => {}
            Job::Apply(origin) => {
                self.nodes[node].streams[origin].stage = Stage::CommitAsked;
                self.tell(node, Message::ApplyAsked);
            }
            Job::Show(origin) => {
                let peers = (self.setup.nodes - 1) as f64;
                self.give(node, self.filter(), peers * self.costs.skip, Job::Skip);
                let stream = &mut self.nodes[node].streams[origin];
                let change = stream.changes.pop_front().unwrap();
                stream.stage = if stream.changes.is_empty() {
                    Stage::Idle
                } else {
                    Stage::Waiting
                };
                self.tell(node, Message::Applied(change));
            }
        }
    }

    fn commit(&mut self, client: usize) {
        let interaction = self.of(client);
        let at = &self.clients[client];
        let (node, number) = (at.node, at.number);
        if interaction.writes() {
            if self.setup.is_versioned {
                self.tell(node, Message::CommitAsked(client));
            } else {
                self.schedule(nanoseconds(self.costs.flush), Event::Flushed(client));
            }
        } else {
            if self.setup.is_versioned && !interaction.tables.is_empty() && at.waits_for.is_none() {
                self.tell(node, Message::Ended(number));
            }
            self.finish(client);
        }
    }

    fn flushed(&mut self, client: usize) {
        let at = &mut self.clients[client];
        let (node, number, interaction) = (at.node, at.number, at.interaction);
        if let Some(record) = at.record.take() {
            self.tell(node, Message::Committed(number));
            let change = Rc::new(Change {
                record,
                interaction,
            });
            for peer in (0..self.setup.nodes).filter(|peer| *peer != node) {
                let job = Job::Decode(peer, Rc::clone(&change));
                self.give(node, self.sender(peer), self.costs.decode, job);
            }
        }
        self.finish(client);
    }

    /// A client has its answer, and sends its next interaction.
    fn finish(&mut self, client: usize) {
        let both = 2 * self.network();
        self.done += 1;
        self.measured.count += 1;
        self.measured.latency += self.now - self.clients[client].began + both;
        self.measured.writes += usize::from(self.of(client).writes());
        let warm = 300 + self.setup.clients;
        if self.measured_from.is_none() && self.done == warm {
            self.measured_from = Some(self.now);
            self.measured = Sums {
                used: self.used(),
                ..Sums::default()
            };
        } else if self.measured_from.is_none() {
            self.measured.count = 0;
        }
        self.schedule(both, Event::Arrive(client));
    }

    fn used(&self) -> [Time; 2] {
        [0, self.setup.nodes - 1].map(|node| self.nodes[node].processors.used)
    }

    fn tell(&mut self, node: usize, message: Message) {
        self.nodes[node].inbox.push(message);
        if !self.nodes[node].is_awake {
            self.nodes[node].is_awake = true;
            self.schedule(self.wake(), Event::Turn(node));
        }
    }

    /// The keeper of a node begins with what it has heard.
    fn turn(&mut self, node: usize) {
        let turn = std::mem::take(&mut self.nodes[node].inbox);
        let cost = |message: &Message| match message {
            Message::Batch(batch) => {
                self.costs.ask + batch.requests.len() as f64 * self.costs.request
            }
            Message::Answer(_) => self.costs.answer,
            _ => self.costs.keeper,
        };
        let mut micros = turn.iter().map(cost).sum::<f64>();
        if node == 0 {
            micros += std::mem::take(&mut self.told) as f64 * self.costs.announce;
        }
        self.nodes[node].turn = turn;
        self.give(node, self.keeper(), micros, Job::Turn);
    }

    /// Does the keeper's work, once it has had its time.
    fn work(&mut self, node: usize) {
        for message in std::mem::take(&mut self.nodes[node].turn) {
            self.hear(node, message);
        }
        loop {
            let mut changed = self.start_some(node);
            changed |= self.commit_some(node);
            changed |= self.apply_some(node);
            changed |= self.exchange(node);
            if !changed {
                break;
            }
        }
        if self.nodes[node].inbox.is_empty() {
            self.nodes[node].is_awake = false;
        } else {
            self.turn(node);
        }
    }

    fn hear(&mut self, node: usize, message: Message) {
        let owner = |client: usize| client as u64;
        match message {
            Message::Asked(client) => {
                let declared = self.of(client).tables.clone();
                let at = &mut self.nodes[node];
                let number = at
                    .local
                    .ask(owner(client), declared, self.now / 1000, u64::MAX);
                self.clients[client].number = number.unwrap();
                at.waiting.push(client);
            }
            Message::ReadAsked(client) => {
                if let Some((table, version)) = &mut self.clients[client].waits_for {
                    *version = self.nodes[node].local.read_current(*table);
                }
                self.nodes[node].reading.push(client);
            }
            Message::Running(number, released) => {
                let local = &mut self.nodes[node].local;
                assert_eq!(local.started(number), Ok(Start::Ready));
                if let Some(table) = released {
                    local.release(number, table, false, false).unwrap();
                }
            }
            Message::CommitAsked(client) => self.nodes[node].committing.push(client),
            Message::Ended(number) => self.nodes[node].local.abort(number),
            Message::Committed(number) => self.nodes[node].local.committed(number).unwrap(),
            Message::ApplyAsked => {}
            Message::Applied(change) => self.nodes[node].local.applied(&change.record),
            Message::Batch(batch) => {
                let answer = self.sequencer.receive(&batch, true);
                let to = usize::from(batch.node.0) - 1;
                self.schedule(self.network(), Event::Tell(to, Message::Answer(answer)));
                self.announce();
            }
            Message::Answer(answer) => {
                self.nodes[node].is_asking = false;
                let refused = self.nodes[node].local.answer(&answer);
                assert!(refused.is_empty(), "{refused:?}");
            }
            Message::Announce(ends) => {
                assert!(
                    self.nodes[node]
                        .local
                        .announced(self.sequencer.term(), &ends)
                );
            }
        }
    }

    fn start_some(&mut self, node: usize) -> bool {
        let wake = self.wake();
        let mut changed = false;
        for client in std::mem::take(&mut self.nodes[node].waiting) {
            let number = self.clients[client].number;
            let at = &mut self.nodes[node];
            match at.local.start(number).unwrap() {
                Start::Ready => {
                    self.schedule(wake, Event::Ready(client));
                    changed = true;
                }
                Start::Wait(_) => at.waiting.push(client),
                Start::Overtaken | Start::OldTerm => {
                    self.clients[client].number = at.local.ask_again(number).unwrap();
                    at.waiting.push(client);
                    changed = true;
                }
            }
        }
        for client in std::mem::take(&mut self.nodes[node].reading) {
            let at = &mut self.nodes[node];
            match self.clients[client].waits_for {
                Some((table, version)) if !at.local.has_reached(table, version) => {
                    at.reading.push(client);
                }
                _ => self.schedule(wake, Event::Ready(client)),
            }
        }
        changed
    }

    fn commit_some(&mut self, node: usize) -> bool {
        let after = self.wake() + nanoseconds(self.costs.flush);
        let mut changed = false;
        for client in std::mem::take(&mut self.nodes[node].committing) {
            let at = &mut self.nodes[node];
            match at.local.commit(self.clients[client].number).unwrap() {
                Commit::Record(record) => {
                    self.clients[client].record = Some(record);
                    self.schedule(after, Event::Flushed(client));
                    changed = true;
                }
                Commit::Wait => at.committing.push(client),
                Commit::ReadOnly => unreachable!("each interaction that asks has written"),
            }
        }
        changed
    }

    fn apply_some(&mut self, node: usize) -> bool {
        let wake = self.wake();
        let mut changed = false;
        for origin in 0..self.setup.nodes {
            let at = &mut self.nodes[node];
            let stream = &mut at.streams[origin];
            let asks = matches!(stream.stage, Stage::Waiting | Stage::CommitAsked);
            let (Some(change), true) = (stream.changes.front(), asks) else {
                continue;
            };
            match at.local.may_apply(&change.record) {
                Verdict::Apply => {}
                Verdict::Wait(_) | Verdict::Later => continue,
                other => unreachable!("{other:?}"),
            }
            let event = if stream.stage == Stage::Waiting {
                Event::Apply(node, origin)
            } else {
                at.local.apply(&change.record).unwrap();
                Event::Show(node, origin)
            };
            stream.stage = Stage::Busy;
            self.schedule(wake, event);
            changed = true;
        }
        changed
    }

    /// Brings requests and releases to the sequencer.
    fn exchange(&mut self, node: usize) -> bool {
        let batch = self.nodes[node].local.batch();
        if node > 0 {
            // A node that joins has one message on the way at most.
            if self.setup.joins && self.nodes[node].is_asking {
                return false;
            }
            if batch.is_some() && self.nodes[node].asked != batch {
                self.nodes[node].is_asking = true;
                let message = Message::Batch(batch.clone().unwrap());
                self.schedule(self.network(), Event::Tell(0, message));
            }
            self.nodes[node].asked = batch;
            return false;
        }
        let Some(batch) = batch else {
            return false;
        };
        let answer = self.sequencer.receive(&batch, true);
        self.announce();
        let refused = self.nodes[0].local.answer(&answer);
        assert!(refused.is_empty(), "{refused:?}");
        true
    }

    /// Tells all what is decided, if it is something new.
    fn announce(&mut self) {
        let ends = self.sequencer.ends();
        if ends == self.announced {
            return;
        }
        assert!(self.nodes[0].local.announced(self.sequencer.term(), &ends));
        for node in 1..self.setup.nodes {
            let message = Message::Announce(ends.clone());
            self.schedule(self.network(), Event::Tell(node, message));
        }
        self.told += self.setup.nodes - 1;
        self.announced = ends;
    }

    fn outcome(&self) -> Outcome {
        let took = self.now - self.measured_from.unwrap_or(0);
        let used = self.used();
        let count = self.measured.count as f64;
        let all = took as f64 * self.setup.processors as f64;
        let busy = |at: usize| (used[at] - self.measured.used[at]) as f64 / all;
        Outcome {
            throughput: count / seconds(took),
            latency: seconds(self.measured.latency) / count,
            wait: seconds(self.measured.wait) / self.measured.asked.max(1) as f64,
            busy: [busy(0), busy(1)],
            writes: self.measured.writes as f64 / seconds(took),
        }
    }
}
