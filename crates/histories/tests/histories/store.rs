//! A simulated store of one copy, with transactions whose steps are interleaved at random, and
//! with a fault of its own for each level of isolation.

use std::collections::{HashMap, HashSet};

use braid_histories::{Executor, Generator, History, Kind, MicroOp, Objects, Outcome, Seen, Value};
use braid_testing::Random;

/// Isolation level of the store's transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// All steps at one moment.
    Serial,
    /// A snapshot from the beginning; the commit fails if anything read or written was changed.
    Optimistic,
    /// As `Optimistic`, but transactions that only read see an older snapshot.
    StaleReads,
    /// A snapshot from the beginning; the commit fails if anything written was changed.
    Snapshot,
    /// Each step sees the last commit; writes are done at the commit, under locks.
    Committed,
    /// Each step takes effect at once; an abort undoes it.
    Uncommitted,
}

/// A version of a key: the number of its commit, and the value that was appended or written.
type Version = (u64, Value);

struct Transaction {
    /// Number of the transaction.
    number: u64,
    steps: Vec<MicroOp>,
    done: usize,
    snapshot: u64,
    /// Whether the history has its outcome as unknown.
    unknown: bool,
    /// Whether it must not commit: it found a lock.
    doomed: bool,
}

/// The store.
pub struct Store {
    isolation: Isolation,
    objects: Objects,
    clock: u64,
    versions: HashMap<Value, Vec<Version>>,
    /// Locked keys, and the transactions that have locked them.
    locks: HashMap<Value, u64>,
}

impl Store {
    pub fn new(isolation: Isolation, objects: Objects) -> Self {
        Self {
            isolation,
            objects,
            clock: 0,
            versions: HashMap::new(),
            locks: HashMap::new(),
        }
    }

    fn read(&self, key: &Value, snapshot: u64, own: &[MicroOp]) -> Seen {
        let versions = self.versions.get(key).map_or(&[][..], Vec::as_slice);
        let mut values: Vec<Value> = versions
            .iter()
            .filter(|(at, _)| *at <= snapshot)
            .map(|(_, value)| value.clone())
            .collect();
        values.extend(own.iter().filter_map(|step| match step {
            MicroOp::Append { key: other, value } | MicroOp::Write { key: other, value }
                if other == key =>
            {
                Some(value.clone())
            }
            _ => None,
        }));
        match (self.objects, values.pop()) {
            (Objects::Registers, Some(value)) => Seen::Value(value),
            (Objects::Lists, Some(value)) => {
                values.push(value);
                Seen::List(values)
            }
            (_, None) => Seen::Nil,
        }
    }

    fn write(&mut self, step: &MicroOp) {
        if let MicroOp::Append { key, value } | MicroOp::Write { key, value } = step {
            let versions = self.versions.entry(key.clone()).or_default();
            versions.push((self.clock, value.clone()));
        }
    }

    /// Does the next step of a transaction.
    fn step(&mut self, transaction: &mut Transaction) {
        let snapshot = match self.isolation {
            Isolation::Committed | Isolation::Uncommitted => u64::MAX,
            _ => transaction.snapshot,
        };
        let (done, rest) = transaction.steps.split_at_mut(transaction.done);
        transaction.done += 1;
        match &mut rest[0] {
            MicroOp::Read { key, seen } => {
                let own = if self.isolation == Isolation::Uncommitted {
                    &[][..]
                } else {
                    &*done
                };
                *seen = self.read(key, snapshot, own);
            }
            write if self.isolation == Isolation::Uncommitted => self.write(&write.clone()),
            write if self.isolation == Isolation::Committed => {
                let holder = self.locks.entry(write.key().clone());
                transaction.doomed |= *holder.or_insert(transaction.number) != transaction.number;
            }
            _ => {}
        }
    }

    /// Commits, if the level allows it.
    fn commit(&mut self, transaction: &Transaction) -> bool {
        let changed = |key: &Value| {
            let versions = self.versions.get(key).and_then(|versions| versions.last());
            versions.is_some_and(|(at, _)| *at > transaction.snapshot)
        };
        let writes = |step: &MicroOp| !matches!(step, MicroOp::Read { .. });
        let only_reads = !transaction.steps.iter().any(writes);
        let conflict = |step: &MicroOp| match self.isolation {
            Isolation::Serial | Isolation::Committed | Isolation::Uncommitted => false,
            Isolation::Optimistic => changed(step.key()),
            Isolation::StaleReads => !only_reads && changed(step.key()),
            Isolation::Snapshot => writes(step) && changed(step.key()),
        };
        if transaction.doomed || transaction.steps.iter().any(conflict) {
            return false;
        }
        if self.isolation != Isolation::Uncommitted {
            self.clock += 1;
            for step in &transaction.steps {
                self.write(step);
            }
        }
        true
    }

    fn abort(&mut self, transaction: &Transaction) {
        if self.isolation == Isolation::Uncommitted {
            let written: HashSet<(&Value, &Value)> = transaction
                .steps
                .iter()
                .filter_map(|step| match step {
                    MicroOp::Append { key, value } | MicroOp::Write { key, value } => {
                        Some((key, value))
                    }
                    MicroOp::Read { .. } => None,
                })
                .collect();
            for (key, versions) in &mut self.versions {
                versions.retain(|(_, value)| !written.contains(&(key, value)));
            }
        }
    }
}

/// Chances of events beside commits.
#[derive(Debug, Clone, Copy)]
pub struct Chances {
    /// One transaction in so many is aborted at its end.
    pub aborts: u64,
    /// One transaction in so many has an unknown end.
    pub unknown: u64,
}

/// Runs random transactions of several clients, and returns their history.
pub fn simulate(
    isolation: Isolation,
    objects: Objects,
    generator: &mut Generator,
    clients: usize,
    transactions: usize,
    chances: Chances,
    random: &mut Random,
) -> History {
    let mut store = Store::new(isolation, objects);
    let mut history = History::default();
    let mut running: Vec<(i64, Option<Transaction>)> = (0_i64..)
        .take(clients)
        .map(|process| (process, None))
        .collect();
    let mut left = transactions;
    while left > 0 || running.iter().any(|(_, transaction)| transaction.is_some()) {
        let place = random.index(clients);
        let (process, state) = &mut running[place];
        let Some(transaction) = state else {
            if left > 0 {
                left -= 1;
                let steps = generator.transaction();
                history.push(Kind::Invoke, Some(*process), None, Some(steps.clone()));
                let stale = isolation == Isolation::StaleReads
                    && steps
                        .iter()
                        .all(|step| matches!(step, MicroOp::Read { .. }));
                let behind = if stale { random.below(20) } else { 0 };
                *state = Some(Transaction {
                    number: left as u64,
                    steps,
                    done: 0,
                    snapshot: store.clock.saturating_sub(behind),
                    unknown: random.one_in(chances.unknown),
                    doomed: false,
                });
            }
            continue;
        };
        if isolation == Isolation::Serial {
            transaction.snapshot = store.clock;
            while transaction.done < transaction.steps.len() {
                store.step(transaction);
            }
        } else if transaction.done < transaction.steps.len() {
            store.step(transaction);
            continue;
        }
        let committed = !random.one_in(chances.aborts) && store.commit(transaction);
        if !committed {
            store.abort(transaction);
        }
        let number = transaction.number;
        store.locks.retain(|_, holder| *holder != number);
        let kind = match (transaction.unknown, committed) {
            (true, _) => Kind::Info,
            (false, true) => Kind::Ok,
            (false, false) => Kind::Fail,
        };
        let steps = (kind == Kind::Ok).then(|| transaction.steps.clone());
        history.push(kind, Some(*process), None, steps);
        if kind == Kind::Info {
            *process += i64::try_from(clients).unwrap();
        }
        *state = None;
    }
    history
}

/// A client of a store that other threads use too: all steps at one moment.
pub struct Shared<'s>(pub &'s std::sync::Mutex<Store>);

impl Executor for Shared<'_> {
    fn execute(&mut self, steps: &[MicroOp]) -> Outcome {
        let mut store = self.0.lock().unwrap();
        let mut transaction = Transaction {
            steps: steps.to_vec(),
            done: 0,
            snapshot: store.clock,
            unknown: false,
            number: 0,
            doomed: false,
        };
        while transaction.done < transaction.steps.len() {
            store.step(&mut transaction);
        }
        assert!(store.commit(&transaction));
        if store.clock.is_multiple_of(10) {
            return Outcome::Unknown;
        }
        Outcome::Committed(transaction.steps)
    }
}
