//! A discrete event simulation of one subscription: decoder, leader, appliers, flushes. The
//! dependency tracker and the consolidation are the real ones; times are given by the costs.
//!
//! Processors are shared evenly: if more processes are runnable than there are processors, all run
//! at the same fraction of full speed. Waiting processes use none.
//!
//! Transactions are claimed as from the real ring: small ones in runs. If several appliers share
//! pages, their work costs more; that is measured with two appliers. Not simulated: a further rise
//! of that cost with many appliers (caches, locks on pages and WAL buffers), the network, and local
//! load. So a prediction for many appliers is the limit that scheduling sets.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashSet, VecDeque};

use braid_bgworker::consolidate::{self, Change as NetChange, Run, Version};
use braid_bgworker::dependency::DependencyTracker;
use braid_bgworker::subscription_option::ApplyMode;
use braid_bgworker::taking::{self, Grain};
use serde::{Deserialize, Serialize};

use crate::costs::{Costs, Rows};
use crate::workload::{Operation, Transaction};

/// Number of keys that the tracker remembers, as in the leader.
const TRACKED_KEYS: usize = 200_000;

/// The order of commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// The provider's.
    Source,
    /// Any order that the dependencies allow.
    Relaxed,
}

/// How transactions are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One by one, by one applier.
    Serial,
    /// Each transaction by itself.
    Parallel,
    /// Several transactions as one.
    Batch,
    /// Several transactions as one, each row once.
    Consolidate,
}

/// Process that waits until commits are flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// Nobody.
    None,
    /// The leader, at intervals, for all commits; as Braid does with `synchronous_commit`.
    Leader,
    /// Each applier for its own commit, after the next applier's turn has begun. Several appliers
    /// share a flush.
    Appliers,
}

/// Parameters of a simulation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// Appliers.
    pub appliers: usize,
    /// Number of processors; 0 for no limit.
    pub cores: u32,
    /// Order of commits.
    pub order: Order,
    /// Mode.
    pub mode: Mode,
    /// Flushes.
    pub flush: Flush,
    /// Claim small transactions one by one too, and make batches smaller: the leader has found that
    /// all appliers are faster than one.
    #[serde(default)]
    pub singly: bool,
}

/// Result of a simulation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Throughput.
    pub transactions_per_second: f64,
    /// Throughput in rows of the provider.
    pub rows_per_second: f64,
    /// The resource that sets the limit.
    pub bottleneck: &'static str,
    /// Share of the time that the decoder worked.
    pub decoder: f64,
    /// Share of the time that the leader worked.
    pub leader: f64,
    /// Share of the processors that was used; 0 if they are not limited.
    #[serde(rename = "processors")]
    pub cores: f64,
    /// Share of the appliers' time: applying and committing.
    pub working: f64,
    /// Share of the appliers' time: nothing to do.
    pub idle: f64,
    /// Share of the appliers' time: waiting for a transaction with a common key.
    #[serde(rename = "waits_for_keys")]
    pub dependency: f64,
    /// Share of the appliers' time: waiting for the turn to commit.
    #[serde(rename = "waits_for_turn")]
    pub turn: f64,
    /// Share of the appliers' time: waiting for a flush.
    #[serde(rename = "waits_for_flush")]
    pub flush: f64,
    /// Share of the appliers' time: woken, and not running yet.
    pub woken: f64,
    /// Transactions of the source per local transaction, on average.
    pub batch: f64,
    /// Rows written here per row written at the provider.
    pub written: f64,
}

/// A time that can be ordered.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Dependency,
    Applying,
    Turn,
    Committing,
    Flush,
    Woken,
}

const STATES: usize = 7;

#[derive(Debug)]
struct Applier {
    state: State,
    since: f64,
    spent: [f64; STATES],
    /// Transactions that are applied as one at present.
    unit: Vec<u64>,
    /// Transactions of the claimed run that come after them.
    rest: VecDeque<u64>,
    /// Whether the transactions of `unit` are applied.
    is_applied: bool,
    /// `unit` may start when all up to this transaction are committed.
    needs: u64,
    /// Time to wait after the processor time.
    wait: f64,
}

/// A transaction that the leader has handed out.
#[derive(Debug, Clone, Default)]
struct Published {
    latest: u64,
    through: u64,
    all: Vec<u64>,
    dependents: Vec<u64>,
    unmet: usize,
    taken: bool,
    done: bool,
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Process {
    Decoder,
    Leader,
    Applier(usize),
}

struct Engine<'t> {
    costs: &'t Costs,
    row_prices: Rows,
    setup: Setup,
    trace: &'t [Transaction],
    now: f64,
    /// Microseconds that a process would have run that was always runnable.
    shared: f64,
    running: BinaryHeap<Reverse<(Time, Process)>>,
    /// Appliers that wait for something other than a processor, and the end of the wait.
    waits: BinaryHeap<Reverse<(Time, usize)>>,
    flush_ends: Option<f64>,
    last_flush: f64,
    /// Transactions that were committed before the last flush.
    flushed: u64,
    /// Appliers that wait for the flush in progress; below, those that wait for the next one.
    flushing: Vec<usize>,
    to_flush: Vec<usize>,
    worked: f64,
    decoder_worked: f64,
    leader_worked: f64,
    decoder_runs: bool,
    leader_runs: bool,
    decoded: u64,
    in_pipe: u64,
    dispatched: u64,
    claimed: u64,
    committed: u64,
    tracker: DependencyTracker,
    published: Vec<Published>,
    /// Relaxed order: transactions that may start; below, those that wait for all before them.
    ready: BinaryHeap<Reverse<u64>>,
    behind: BinaryHeap<Reverse<(u64, u64)>>,
    appliers: Vec<Applier>,
    units: u64,
    rows: u64,
    written: u64,
    keyless: u64,
}

/// Simulates a trace whose rows have these prices.
#[must_use]
pub fn simulate(trace: &[Transaction], costs: &Costs, row_prices: Rows, setup: Setup) -> Outcome {
    let setup = Setup {
        appliers: if setup.mode == Mode::Serial {
            1
        } else {
            setup.appliers.max(1)
        },
        ..setup
    };
    let mut engine = Engine {
        costs,
        row_prices,
        setup,
        trace,
        now: 0.0,
        shared: 0.0,
        running: BinaryHeap::new(),
        waits: BinaryHeap::new(),
        flush_ends: None,
        last_flush: 0.0,
        flushed: 0,
        flushing: Vec::new(),
        to_flush: Vec::new(),
        worked: 0.0,
        decoder_worked: 0.0,
        leader_worked: 0.0,
        decoder_runs: false,
        leader_runs: false,
        decoded: 0,
        in_pipe: 0,
        dispatched: 0,
        claimed: 0,
        committed: 0,
        tracker: DependencyTracker::new(TRACKED_KEYS),
        published: vec![Published::default()],
        ready: BinaryHeap::new(),
        behind: BinaryHeap::new(),
        appliers: (0..setup.appliers)
            .map(|_| Applier {
                state: State::Idle,
                since: 0.0,
                spent: [0.0; STATES],
                unit: Vec::new(),
                rest: VecDeque::new(),
                is_applied: false,
                needs: 0,
                wait: 0.0,
            })
            .collect(),
        units: 0,
        rows: 0,
        written: 0,
        keyless: 0,
    };
    engine.run();
    engine.outcome()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of a simulation are small"
)]
fn float(number: u64) -> f64 {
    number as f64
}

fn place(sequence: u64) -> usize {
    usize::try_from(sequence).unwrap_or(usize::MAX)
}

impl Engine<'_> {
    fn run(&mut self) {
        let all = self.trace.len() as u64;
        self.decode();
        while self.committed < all || self.flush_ends.is_some() {
            let speed = self.speed();
            let next_run = self
                .running
                .peek()
                .map(|Reverse((end, _))| self.now + (end.0 - self.shared) / speed);
            let next_wait = self.waits.peek().map(|Reverse((end, _))| end.0);
            let outside = match (self.flush_ends, next_wait) {
                (Some(flush), Some(wait)) => Some(flush.min(wait)),
                (flush, wait) => flush.or(wait),
            };
            match (outside, next_run) {
                // Nothing runs, and nothing will.
                (None, None) => return,
                (Some(end), run) if run.is_none_or(|run| end < run) => {
                    self.shared += (end - self.now) * speed;
                    self.now = end;
                    if self.flush_ends == Some(end) {
                        self.flush_ends = None;
                        self.flush_ended();
                    } else if let Some(Reverse((_, number))) = self.waits.pop() {
                        self.applied(number);
                    }
                }
                _ => {
                    if let Some(Reverse((end, process))) = self.running.pop() {
                        self.now += (end.0 - self.shared) / speed;
                        self.shared = end.0;
                        self.done(process);
                    }
                }
            }
        }
    }

    /// Returns the fraction of full speed at which each runnable process runs.
    fn speed(&self) -> f64 {
        let runnable = self.running.len() as u64;
        if self.setup.cores == 0 || runnable <= u64::from(self.setup.cores) {
            1.0
        } else {
            f64::from(self.setup.cores) / float(runnable)
        }
    }

    fn start(&mut self, process: Process, cost: f64) {
        self.worked += cost;
        match process {
            Process::Decoder => self.decoder_worked += cost,
            Process::Leader => self.leader_worked += cost,
            Process::Applier(_) => {}
        }
        self.running
            .push(Reverse((Time(self.shared + cost), process)));
    }

    fn done(&mut self, process: Process) {
        match process {
            Process::Decoder => {
                self.decoder_runs = false;
                self.decoded += 1;
                self.dispatch();
                self.decode();
            }
            Process::Leader => {
                self.leader_runs = false;
                self.publish();
                self.dispatch();
                self.decode();
            }
            Process::Applier(number) => self.computed(number),
        }
    }

    /// Called when an applier has used its processor time; it may have to wait for something else.
    fn computed(&mut self, number: usize) {
        let now = self.now;
        match self.appliers.get_mut(number) {
            Some(applier) if applier.state == State::Applying && applier.wait > 0.0 => {
                let end = now + std::mem::take(&mut applier.wait);
                self.waits.push(Reverse((Time(end), number)));
            }
            _ => self.applied(number),
        }
    }

    fn transaction(&self, sequence: u64) -> Option<&Transaction> {
        self.trace.get(place(sequence).checked_sub(1)?)
    }

    /// Lets the decoder go on, if it has input and there is room in the pipe.
    fn decode(&mut self) {
        if self.decoder_runs || self.in_pipe >= self.costs.pipe {
            return;
        }
        let Some(transaction) = self.transaction(self.decoded + 1) else {
            return;
        };
        let bytes = u64::from(transaction.bytes);
        let price = self.row_prices.decode.unwrap_or_else(|| {
            let rows = transaction.changes.len() as u64;
            self.costs.decode.of(float(rows), float(bytes))
        });
        self.decoder_runs = true;
        self.in_pipe += bytes;
        self.start(Process::Decoder, price);
    }

    /// Lets the leader go on, if it has input and a free descriptor.
    fn dispatch(&mut self) {
        if self.setup.flush == Flush::Leader && !self.leader_runs && self.flush_is_due() {
            self.leader_runs = true;
            self.flushed = self.committed;
            self.flush_ends = Some(self.now + self.costs.commit.flush);
        }
        if self.leader_runs
            || self.dispatched >= self.decoded
            || self.dispatched - self.committed >= self.costs.in_flight
        {
            return;
        }
        let Some(transaction) = self.transaction(self.dispatched + 1) else {
            return;
        };
        let bytes = u64::from(transaction.bytes);
        let price = self.row_prices.dispatch.unwrap_or_else(|| {
            let rows = transaction.changes.len() as u64;
            self.costs.dispatch.of(float(rows), float(bytes))
        });
        self.leader_runs = true;
        self.in_pipe -= bytes;
        self.start(Process::Leader, price);
    }

    fn flush_is_due(&self) -> bool {
        let all = self.trace.len() as u64;
        let since = self.now - self.last_flush;
        self.committed > self.flushed
            && (since >= self.costs.commit.interval || self.committed == all)
    }

    fn publish(&mut self) {
        self.dispatched += 1;
        let sequence = self.dispatched;
        self.tracker.begin(sequence, self.committed);
        if let Some(transaction) = self.trace.get(place(sequence) - 1) {
            for change in &transaction.changes {
                if change.barrier {
                    self.tracker.barrier(change.table);
                }
                self.tracker
                    .change(change.table, change.hashes.iter().copied());
            }
        }
        let edges = self.tracker.finish();
        let mut entry = Published {
            latest: edges.latest,
            through: edges.through,
            all: edges.all.to_vec(),
            ..Published::default()
        };
        if self.setup.order == Order::Relaxed {
            for edge in &entry.all {
                if let Some(before) = self.published.get_mut(place(*edge))
                    && !before.done
                {
                    before.dependents.push(sequence);
                    entry.unmet += 1;
                }
            }
            if entry.through > self.committed {
                entry.unmet += 1;
                self.behind.push(Reverse((entry.through, sequence)));
            }
            if entry.unmet == 0 {
                self.ready.push(Reverse(sequence));
            }
        }
        self.published.push(entry);
        self.employ();
    }

    /// Lets idle appliers claim transactions: one applier for each run that is not claimed, and one
    /// if none is busy.
    fn employ(&mut self) {
        for number in 0..self.appliers.len() {
            let idle = |applier: &Applier| applier.state == State::Idle;
            if !self.appliers.get(number).is_some_and(idle) {
                continue;
            }
            let took = match self.setup.order {
                Order::Source => {
                    (self.has_run() || self.appliers.iter().all(idle)) && self.claim(number)
                }
                Order::Relaxed => self.pick(number),
            };
            if !took {
                return;
            }
        }
    }

    fn taking(&self) -> taking::Mode {
        let (mode, consolidate) = match self.setup.mode {
            Mode::Serial => (ApplyMode::Serial, false),
            Mode::Parallel => (ApplyMode::Parallel, false),
            Mode::Batch => (ApplyMode::Batch, false),
            Mode::Consolidate => (ApplyMode::Batch, true),
        };
        taking::Mode::of(mode, consolidate)
    }

    fn joins(&self) -> bool {
        self.taking().joins()
    }

    /// Returns the grain by which appliers claim transactions. With one applier it does not matter.
    fn grain(&self) -> Grain {
        let relaxed = self.setup.order == Order::Relaxed;
        let singly = self.setup.singly || self.setup.mode == Mode::Serial;
        self.taking().grain(relaxed, singly)
    }

    fn weight(&self, sequence: u64) -> u32 {
        let changes = self
            .transaction(sequence)
            .map_or(1, |one| one.changes.len());
        self.grain()
            .weight(u32::try_from(changes).unwrap_or(u32::MAX))
    }

    /// Whether a whole run is not claimed yet.
    fn has_run(&self) -> bool {
        let run = self.grain().run;
        let mut sum = 0;
        (self.claimed + 1..=self.dispatched).any(|sequence| {
            sum += self.weight(sequence);
            sum >= run
        })
    }

    /// Claims the next run, in source order.
    fn claim(&mut self, number: usize) -> bool {
        let first = self.claimed + 1;
        if first > self.dispatched {
            return false;
        }
        let run = self.grain().run;
        let (mut last, mut sum) = (first, 0);
        for sequence in first..=self.dispatched {
            let weight = self.weight(sequence);
            sum += weight;
            if weight == run || sum > run {
                break;
            }
            last = sequence;
        }
        self.claimed = last;
        let (unit, rest) = if self.joins() {
            ((first..=last).collect(), VecDeque::new())
        } else {
            (vec![first], (first + 1..=last).collect())
        };
        if let Some(applier) = self.appliers.get_mut(number) {
            applier.rest = rest;
        }
        self.take_up(number, unit);
        true
    }

    /// Begins a local transaction, or waits for transactions before it.
    fn take_up(&mut self, number: usize, unit: Vec<u64>) {
        let first = unit.first().copied().unwrap_or(0);
        // Within a unit the order is kept in any case.
        let before = |sequence: &u64| {
            let entry = self.published.get(place(*sequence))?;
            let edges = entry.all.iter().copied();
            edges
                .chain([entry.latest, entry.through])
                .filter(|edge| *edge < first)
                .max()
        };
        let needs = unit.iter().filter_map(before).max();
        if let Some(applier) = self.appliers.get_mut(number) {
            applier.unit = unit;
            applier.is_applied = false;
            applier.needs = needs.unwrap_or(0);
        }
        if needs.is_some_and(|needs| needs > self.committed) {
            self.enter(number, State::Dependency);
        } else {
            self.go_on(number);
        }
    }

    /// Claims ready transactions, and transactions that depend on nothing but these, in relaxed
    /// order.
    fn pick(&mut self, number: usize) -> bool {
        let joined = if self.joins() { self.grain().run } else { 1 };
        let most = (self.ready.len() / self.appliers.len()).clamp(1, joined as usize);
        let mut unit: Vec<u64> = Vec::new();
        let mut sum = 0;
        let mut members: HashSet<u64> = HashSet::new();
        let mut candidates: BinaryHeap<Reverse<u64>> = BinaryHeap::new();
        while sum < joined {
            let next = match candidates.pop() {
                Some(Reverse(next)) => Some(next),
                None if unit.len() < most => self.ready.pop().map(|Reverse(next)| next),
                None => None,
            };
            let Some(next) = next else { break };
            let free = self.published.get(place(next)).is_some_and(|entry| {
                let met = |edge: &u64| {
                    members.contains(edge)
                        || self
                            .published
                            .get(place(*edge))
                            .is_some_and(|before| before.done)
                };
                !entry.taken && entry.through <= self.committed && entry.all.iter().all(met)
            });
            if !free {
                continue;
            }
            sum += if joined > 1 { self.weight(next) } else { 1 };
            unit.push(next);
            members.insert(next);
            if let Some(entry) = self.published.get_mut(place(next)) {
                entry.taken = true;
                candidates.extend(entry.dependents.iter().map(|later| Reverse(*later)));
            }
        }
        if unit.is_empty() {
            return false;
        }
        unit.sort_unstable();
        if let Some(applier) = self.appliers.get_mut(number) {
            applier.unit = unit;
            applier.is_applied = false;
        }
        self.go_on(number);
        true
    }

    fn enter(&mut self, number: usize, state: State) {
        let now = self.now;
        if let Some(applier) = self.appliers.get_mut(number) {
            if let Some(spent) = applier.spent.get_mut(applier.state as usize) {
                *spent += now - applier.since;
            }
            applier.since = now;
            applier.state = state;
        }
    }

    /// Lets an applier that waited go on; one that has slept is woken first.
    fn go_on(&mut self, number: usize) {
        let Some(applier) = self.appliers.get(number) else {
            return;
        };
        let latency = self.costs.apply.latency;
        // An applier without work sleeps at once.
        let slept = match applier.state {
            State::Idle => self.now > applier.since,
            State::Dependency | State::Turn => self.now - applier.since > self.costs.apply.spin,
            _ => false,
        };
        if !slept {
            return self.work(number, 0.0);
        }
        self.enter(number, State::Woken);
        if latency > 0.0 {
            self.waits.push(Reverse((Time(self.now + latency), number)));
        } else {
            self.work(number, self.costs.apply.wake);
        }
    }

    /// Applies or commits the applier's unit; `before` is a cost in front of it.
    fn work(&mut self, number: usize, before: f64) {
        let Some(applier) = self.appliers.get(number) else {
            return;
        };
        if applier.is_applied {
            self.enter(number, State::Committing);
            let cost = before + self.costs.commit.transaction * self.share();
            return self.start(Process::Applier(number), cost);
        }
        let unit = applier.unit.clone();
        let written = self.written;
        let cost = before + self.price(&unit) * self.share();
        let wait = float(self.written - written) * self.row_prices.wait;
        if let Some(applier) = self.appliers.get_mut(number) {
            applier.wait = wait;
        }
        self.enter(number, State::Applying);
        self.start(Process::Applier(number), cost);
    }

    /// Returns the cost of work as a multiple of its cost for a single applier.
    fn share(&self) -> f64 {
        if self.appliers.len() == 1 {
            1.0
        } else if self.joins() {
            self.row_prices.batch_shared
        } else {
            self.row_prices.shared
        }
    }

    fn price(&mut self, unit: &[u64]) -> f64 {
        let apply = self.costs.apply;
        let batch = self.costs.batch;
        let prices = self.row_prices;
        let row = |operation: Operation| match operation {
            Operation::Insert => prices.insert,
            Operation::Update => prices.update,
            Operation::Delete => prices.delete,
        };
        let changes: Vec<_> = unit
            .iter()
            .filter_map(|sequence| self.trace.get(place(*sequence) - 1))
            .flat_map(|transaction| &transaction.changes)
            .collect();
        self.units += 1;
        self.rows += changes.len() as u64;
        if !self.joins() || unit.len() == 1 {
            self.written += changes.len() as u64;
            return apply.transaction
                + changes
                    .iter()
                    .map(|change| row(change.operation))
                    .sum::<f64>();
        }
        let fixed = apply.transaction + batch.transaction * float(unit.len() as u64);
        if self.setup.mode == Mode::Batch {
            self.written += changes.len() as u64;
            let rows: f64 = changes.iter().map(|change| row(change.operation)).sum();
            return fixed + rows * prices.batch;
        }
        let mut rows = 0.0;
        let mut run = Run::new(u32::MAX);
        for (at, change) in (0_i64..).zip(&changes) {
            let as_net = || NetChange {
                relation: change.table,
                shape: change.table,
                operation: match change.operation {
                    Operation::Insert => consolidate::Operation::Insert,
                    Operation::Update => consolidate::Operation::Update,
                    Operation::Delete => consolidate::Operation::Delete,
                },
                barrier: change.barrier,
                hashes: &change.hashes,
                key: change.hashes.first().copied(),
                moves: change.hashes.len() > 1,
                columns: vec![Some(())],
                version: Version {
                    timestamp: at,
                    origin: 0,
                },
                from_origin: true,
            };
            if change.hashes.is_empty() {
                self.keyless += 1;
            }
            if run.push(as_net()).is_err() {
                rows += self.net_rows(std::mem::replace(&mut run, Run::new(u32::MAX)));
                if run.push(as_net()).is_err() {
                    rows += row(change.operation);
                    self.written += 1;
                }
            }
        }
        rows += self.net_rows(run);
        fixed + rows * prices.batch + batch.consolidate * float(changes.len() as u64)
    }

    fn net_rows(&mut self, run: Run<Option<u64>, ()>) -> f64 {
        let prices = self.row_prices;
        let nets = run.finish();
        self.written += nets.len() as u64;
        nets.iter()
            .map(|net| match net.action {
                consolidate::Action::Insert(_) => prices.insert,
                consolidate::Action::Update(_) | consolidate::Action::Replace(_) => prices.update,
                consolidate::Action::Delete | consolidate::Action::Vanish => prices.delete,
            })
            .sum()
    }

    /// Called when an applier has finished its step.
    fn applied(&mut self, number: usize) {
        let Some(applier) = self.appliers.get(number) else {
            return;
        };
        let first = applier.unit.first().copied().unwrap_or(0);
        match applier.state {
            State::Woken => return self.work(number, self.costs.apply.wake),
            State::Applying => {
                if let Some(applier) = self.appliers.get_mut(number) {
                    applier.is_applied = true;
                }
                if self.setup.order == Order::Relaxed || self.committed + 1 == first {
                    self.work(number, 0.0);
                } else {
                    self.enter(number, State::Turn);
                }
                return;
            }
            _ => {}
        }
        self.committed_unit(number);
        if self.setup.flush == Flush::Appliers {
            self.enter(number, State::Flush);
            self.to_flush.push(number);
            self.flush();
        } else {
            self.next(number);
        }
        self.employ();
        self.dispatch();
        self.decode();
    }

    /// Lets an applier go on with its run, or claim another one.
    fn next(&mut self, number: usize) {
        self.enter(number, State::Idle);
        let next = self
            .appliers
            .get_mut(number)
            .and_then(|applier| applier.rest.pop_front());
        if let Some(next) = next {
            self.take_up(number, vec![next]);
        } else if self.setup.order == Order::Source {
            self.claim(number);
        } else {
            self.pick(number);
        }
    }

    fn committed_unit(&mut self, number: usize) {
        let unit = self
            .appliers
            .get_mut(number)
            .map(|applier| std::mem::take(&mut applier.unit))
            .unwrap_or_default();
        let mut freed = Vec::new();
        for sequence in &unit {
            if let Some(entry) = self.published.get_mut(place(*sequence)) {
                entry.done = true;
                freed.append(&mut entry.dependents);
            }
        }
        while self
            .published
            .get(place(self.committed + 1))
            .is_some_and(|entry| entry.done)
        {
            self.committed += 1;
        }
        while let Some(Reverse((through, sequence))) = self.behind.peek().copied()
            && through <= self.committed
        {
            self.behind.pop();
            freed.push(sequence);
        }
        for sequence in freed {
            if let Some(entry) = self.published.get_mut(place(sequence)) {
                entry.unmet = entry.unmet.saturating_sub(1);
                if entry.unmet == 0 && !entry.taken {
                    self.ready.push(Reverse(sequence));
                }
            }
        }
        if self.setup.order == Order::Relaxed {
            return;
        }
        for other in 0..self.appliers.len() {
            let Some(applier) = self.appliers.get(other) else {
                continue;
            };
            let first = applier.unit.first().copied().unwrap_or(0);
            match applier.state {
                State::Dependency if applier.needs <= self.committed => self.go_on(other),
                State::Turn if first == self.committed + 1 => self.go_on(other),
                _ => {}
            }
        }
    }

    fn flush(&mut self) {
        if self.flush_ends.is_none() && !self.to_flush.is_empty() {
            self.flushing = std::mem::take(&mut self.to_flush);
            self.flush_ends = Some(self.now + self.costs.commit.flush);
        }
    }

    fn flush_ended(&mut self) {
        self.last_flush = self.now;
        if self.setup.flush == Flush::Leader {
            self.leader_runs = false;
            self.dispatch();
            self.decode();
            return;
        }
        for number in std::mem::take(&mut self.flushing) {
            self.next(number);
        }
        self.flush();
        self.employ();
    }

    fn outcome(mut self) -> Outcome {
        for number in 0..self.appliers.len() {
            self.enter(number, State::Idle);
        }
        let elapsed = self.now.max(1e-9);
        let applier_time = elapsed * float(self.appliers.len() as u64);
        let share = |state: State| {
            let spent = self
                .appliers
                .iter()
                .filter_map(|applier| applier.spent.get(state as usize));
            spent.sum::<f64>() / applier_time
        };
        let mut outcome = Outcome {
            transactions_per_second: float(self.committed) / elapsed * 1e6,
            rows_per_second: float(self.rows) / elapsed * 1e6,
            bottleneck: "",
            decoder: self.decoder_worked / elapsed,
            leader: self.leader_worked / elapsed,
            cores: if self.setup.cores == 0 {
                0.0
            } else {
                self.worked / elapsed / f64::from(self.setup.cores)
            },
            working: share(State::Applying) + share(State::Committing),
            idle: share(State::Idle),
            dependency: share(State::Dependency),
            turn: share(State::Turn),
            flush: share(State::Flush),
            woken: share(State::Woken),
            batch: float(self.committed) / float(self.units.max(1)),
            written: float(self.written) / float(self.rows.max(1)),
        };
        let commits = float(self.units) * self.costs.commit.transaction * self.share() / elapsed;
        outcome.bottleneck = bottleneck(&outcome, commits, self.setup);
        outcome
    }
}

/// Returns the resource that is fully used, or what the appliers wait for most.
fn bottleneck(outcome: &Outcome, commits: f64, setup: Setup) -> &'static str {
    const FULL: f64 = 0.92;
    if outcome.cores >= FULL {
        "processors"
    } else if outcome.decoder >= FULL {
        "decoder"
    } else if outcome.leader >= FULL {
        "leader"
    } else if setup.order == Order::Source && commits >= 0.85 {
        "one commit after the other"
    } else if outcome.working >= 0.85 {
        "appliers"
    } else if outcome.flush >= outcome.dependency.max(outcome.turn) && outcome.flush > 0.1 {
        "flushes"
    // An applier that waits for its turn often does so behind one that waits for a key. Relaxed
    // appliers without a ready transaction are idle.
    } else if outcome.dependency * 4.0 >= outcome.turn && outcome.dependency > 0.05
        || setup.order == Order::Relaxed && outcome.idle > 0.15
    {
        "common keys"
    } else if outcome.turn > 0.1 {
        "commit order"
    } else {
        "appliers"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::{Apply, Batch, Commit, Price};
    use crate::workload::Workload;

    const ROWS: Rows = Rows {
        insert: 10.0,
        update: 20.0,
        delete: 10.0,
        wait: 0.0,
        batch: 0.5,
        shared: 1.0,
        batch_shared: 1.0,
        decode: None,
        dispatch: None,
    };

    fn costs() -> Costs {
        Costs {
            about: String::new(),
            decode: Price {
                transaction: 1.0,
                row: 1.0,
                byte: 0.0,
            },
            dispatch: Price {
                transaction: 0.5,
                row: 0.5,
                byte: 0.0,
            },
            apply: Apply {
                transaction: 10.0,
                spin: 5.0,
                wake: 0.0,
                latency: 0.0,
            },
            rows: std::iter::once((String::new(), ROWS)).collect(),
            batch: Batch {
                transaction: 1.0,
                consolidate: 0.1,
            },
            commit: Commit {
                transaction: 5.0,
                flush: 100.0,
                interval: 1000.0,
            },
            in_flight: 8192,
            pipe: 1 << 20,
        }
    }

    fn run(
        workload: Workload,
        appliers: usize,
        mode: Mode,
        order: Order,
        durable: bool,
    ) -> Outcome {
        let setup = Setup {
            appliers,
            cores: 0,
            order,
            mode,
            flush: if durable {
                Flush::Appliers
            } else {
                Flush::None
            },
            singly: true,
        };
        simulate(&workload.trace(5_000), &costs(), ROWS, setup)
    }

    fn near(outcome: &Outcome, transactions_per_second: f64) {
        let ratio = outcome.transactions_per_second / transactions_per_second;
        assert!(
            (0.98..1.02).contains(&ratio),
            "{outcome:?}, not {transactions_per_second}"
        );
    }

    #[test]
    fn one_applier_takes_as_long_as_its_work() {
        // 10 to begin, 10 for the row, 5 to commit.
        let serial = run(Workload::Single, 1, Mode::Serial, Order::Source, false);
        near(&serial, 1e6 / 25.0);
        assert_eq!(serial.bottleneck, "appliers");
        near(
            &run(Workload::Single, 8, Mode::Serial, Order::Source, false),
            1e6 / 25.0,
        );
        // And with a flush each.
        near(
            &run(Workload::Single, 1, Mode::Serial, Order::Source, true),
            1e6 / 125.0,
        );
    }

    #[test]
    fn waiting_takes_no_processor() {
        let setup = |appliers| Setup {
            appliers,
            cores: 2,
            order: Order::Relaxed,
            mode: Mode::Parallel,
            flush: Flush::None,
            singly: true,
        };
        let rows = Rows {
            wait: 275.0,
            ..ROWS
        };
        let trace = Workload::Single.trace(5_000);
        near(&simulate(&trace, &costs(), rows, setup(1)), 1e6 / 300.0);
        // The appliers compete for processors now and then.
        let four = simulate(&trace, &costs(), rows, setup(4)).transactions_per_second;
        assert!((3.6e6 / 300.0..4.01e6 / 300.0).contains(&four), "{four}");
    }

    #[test]
    fn appliers_add_up_until_something_else_is_full() {
        near(
            &run(Workload::Single, 2, Mode::Parallel, Order::Source, false),
            2e6 / 25.0,
        );
        let source = run(Workload::Single, 16, Mode::Parallel, Order::Source, false);
        near(&source, 1e6 / 5.0);
        assert_eq!(source.bottleneck, "one commit after the other");
        let relaxed = run(Workload::Single, 16, Mode::Parallel, Order::Relaxed, false);
        near(&relaxed, 1e6 / 2.0);
        assert_eq!(relaxed.bottleneck, "decoder");
    }

    #[test]
    fn a_run_is_committed_by_who_has_taken_it() {
        let setup = |appliers, singly, order| Setup {
            appliers,
            cores: 0,
            order,
            mode: Mode::Parallel,
            flush: Flush::None,
            singly,
        };
        let trace = Workload::Single.trace(5_000);
        let rate = |setup| simulate(&trace, &costs(), ROWS, setup);
        // The others have applied one transaction each by the time that it is their turn.
        let runs = rate(setup(4, false, Order::Source));
        near(&runs, 1e6 / 25.0 * (128.0 / (128.0 - 20.0 / 25.0)));
        assert!(runs.turn > 0.7, "{runs:?}");
        near(&rate(setup(4, true, Order::Source)), 4e6 / 25.0);
        near(&rate(setup(4, false, Order::Relaxed)), 4e6 / 25.0);
        // Transactions with more changes are claimed one by one.
        let trace = Workload::Sysbench.trace(5_000);
        let one = simulate(&trace, &costs(), ROWS, setup(1, false, Order::Source));
        let four = simulate(&trace, &costs(), ROWS, setup(4, false, Order::Source));
        assert!(
            four.transactions_per_second > 3.5 * one.transactions_per_second,
            "{four:?}"
        );
    }

    #[test]
    fn who_sleeps_is_woken_first() {
        let setup = Setup {
            appliers: 1,
            cores: 0,
            order: Order::Source,
            mode: Mode::Serial,
            flush: Flush::None,
            singly: true,
        };
        let mut costs = costs();
        costs.apply.latency = 50.0;
        costs.decode.transaction = 1000.0;
        // The applier waits for each transaction, and the last one ends that much later.
        let trace = Workload::Single.trace(10);
        let outcome = simulate(&trace, &costs, ROWS, setup);
        near(&outcome, 10e6 / (10.0 * 1001.0 + 1.0 + 50.0 + 25.0));
        assert!(
            (outcome.woken * 10_087.0 - 500.0).abs() < 10.0,
            "{outcome:?}"
        );
    }

    #[test]
    fn what_several_share_costs_more() {
        let setup = |appliers, mode| Setup {
            appliers,
            cores: 0,
            order: Order::Relaxed,
            mode,
            flush: Flush::None,
            singly: true,
        };
        let rows = Rows {
            shared: 2.0,
            batch_shared: 1.0,
            ..ROWS
        };
        let trace = Workload::Single.trace(5_000);
        let rate = |rows, setup| simulate(&trace, &costs(), rows, setup).transactions_per_second;
        let one = setup(1, Mode::Parallel);
        assert!((rate(rows, one) - rate(ROWS, one)).abs() < 1.0);
        let two = setup(2, Mode::Parallel);
        assert!((rate(rows, two) / rate(ROWS, two) - 0.5).abs() < 0.01);
        let batch = setup(2, Mode::Batch);
        assert!((rate(rows, batch) - rate(ROWS, batch)).abs() < 1.0);
    }

    #[test]
    fn processors_are_shared() {
        let setup = Setup {
            appliers: 4,
            cores: 2,
            order: Order::Relaxed,
            mode: Mode::Parallel,
            flush: Flush::None,
            singly: true,
        };
        let outcome = simulate(&Workload::Single.trace(5_000), &costs(), ROWS, setup);
        // 25 + 2 + 1 microseconds of two processors.
        near(&outcome, 2e6 / 28.0);
        assert_eq!(outcome.bottleneck, "processors");
    }

    #[test]
    fn flushes_are_shared() {
        let one = run(Workload::Single, 1, Mode::Parallel, Order::Source, true);
        let many = run(Workload::Single, 16, Mode::Parallel, Order::Source, true);
        assert!(
            many.transactions_per_second > 9.0 * one.transactions_per_second,
            "{many:?}"
        );
        assert_eq!(many.bottleneck, "flushes");
    }

    #[test]
    fn one_flush_for_all_costs_hardly_anything() {
        let setup = |flush| Setup {
            appliers: 4,
            cores: 0,
            order: Order::Source,
            mode: Mode::Parallel,
            flush,
            singly: true,
        };
        let trace = Workload::Single.trace(5_000);
        let none = simulate(&trace, &costs(), ROWS, setup(Flush::None));
        let leader = simulate(&trace, &costs(), ROWS, setup(Flush::Leader));
        let ratio = leader.transactions_per_second / none.transactions_per_second;
        assert!((0.9..=1.0).contains(&ratio), "{none:?} {leader:?}");
    }

    #[test]
    fn a_hot_row_is_serial_until_it_is_consolidated() {
        let hot = |mode, order| run(Workload::Zipf(4.0), 16, mode, order, false);
        let parallel = hot(Mode::Parallel, Order::Source);
        assert!(
            parallel.transactions_per_second < 1e6 / 35.0 * 12.0,
            "{parallel:?}"
        );
        let consolidated = hot(Mode::Consolidate, Order::Source);
        assert!(consolidated.written < 0.5, "{consolidated:?}");
        assert!(
            consolidated.transactions_per_second > 1.5 * parallel.transactions_per_second,
            "{parallel:?} {consolidated:?}"
        );
        // One row of one table.
        let one = Transaction {
            changes: vec![Workload::Zipf(9.0).trace(1).remove(0).changes.remove(0)],
            bytes: 100,
        };
        let trace = vec![one; 3000];
        for order in [Order::Source, Order::Relaxed] {
            let setup = Setup {
                appliers: 8,
                cores: 0,
                order,
                mode: Mode::Parallel,
                flush: Flush::None,
                singly: true,
            };
            let outcome = simulate(&trace, &costs(), ROWS, setup);
            near(&outcome, 1e6 / 35.0);
            assert_eq!(outcome.bottleneck, "common keys");
        }
    }

    #[test]
    fn every_transaction_is_committed_in_every_setup() {
        for workload in Workload::ALL {
            let trace = workload.trace(2_000);
            for mode in [Mode::Serial, Mode::Parallel, Mode::Batch, Mode::Consolidate] {
                for order in [Order::Source, Order::Relaxed] {
                    for (appliers, cores, flush) in [
                        (1, 1, Flush::None),
                        (3, 2, Flush::Leader),
                        (64, 0, Flush::Appliers),
                    ] {
                        let setup = Setup {
                            appliers,
                            cores,
                            order,
                            mode,
                            flush,
                            singly: true,
                        };
                        let outcome = simulate(&trace, &costs(), ROWS, setup);
                        let rows: usize = trace.iter().map(|one| one.changes.len()).sum();
                        let counted = outcome.rows_per_second / outcome.transactions_per_second;
                        let expected = float(rows as u64) / float(trace.len() as u64);
                        assert!((counted - expected).abs() < 1e-6, "{setup:?} {outcome:?}");
                        let all = outcome.working
                            + outcome.idle
                            + outcome.dependency
                            + outcome.turn
                            + outcome.flush
                            + outcome.woken;
                        assert!((all - 1.0).abs() < 1e-6, "{setup:?} {outcome:?}");
                    }
                }
            }
        }
    }
}
