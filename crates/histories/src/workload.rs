//! Random transactions, and a recorder of their outcomes.
//!
//! ```no_run
//! use braid_histories::{Executor, Generator, MicroOp, Model, Outcome, Workload, check, run};
//!
//! /// Runs the steps in one transaction of a client, and puts in the results of its reads.
//! struct Session<C>(C);
//! impl<C: FnMut(&[MicroOp]) -> Option<Vec<MicroOp>>> Executor for Session<C> {
//!     fn execute(&mut self, steps: &[MicroOp]) -> Outcome {
//!         (self.0)(steps).map_or(Outcome::Aborted, Outcome::Committed)
//!     }
//! }
//! // A database that refuses all.
//! let refused: fn(&[MicroOp]) -> Option<Vec<MicroOp>> = |_| None;
//! let sessions = vec![Session(refused), Session(refused)];
//! let generator = Generator::new(Workload::lists(), braid_testing::Random::new("lists"));
//! let history = run(generator, sessions, 1000);
//! println!("{}", check(&history, Model::StrictSerializable).unwrap());
//! ```

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use braid_testing::Random;

use crate::history::{History, Kind, MicroOp, Seen};
use crate::value::Value;

/// Kind of objects that transactions read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objects {
    /// Lists, which are appended to.
    Lists,
    /// Registers.
    Registers,
}

/// The shape of random transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Kind of objects that they read and write.
    pub objects: Objects,
    /// How many keys are used at one time, at least 1.
    pub keys: usize,
    /// Number of writes after which a key is replaced by a new one. That bounds the length of
    /// lists.
    pub writes_per_key: u32,
    /// The fewest steps of a transaction.
    pub fewest_steps: u64,
    /// The most steps of a transaction.
    pub most_steps: u64,
    /// How many of 100 steps write.
    pub writes: u64,
    /// Whether some keys are used more often than others.
    pub skewed: bool,
}

impl Workload {
    /// Returns a workload of lists: ten keys, 32 appends each, one to four steps, half of them
    /// appends.
    #[must_use]
    pub fn lists() -> Self {
        Self {
            objects: Objects::Lists,
            keys: 10,
            writes_per_key: 32,
            fewest_steps: 1,
            most_steps: 4,
            writes: 50,
            skewed: true,
        }
    }

    /// Returns the same workload for registers.
    #[must_use]
    pub fn registers() -> Self {
        Self {
            objects: Objects::Registers,
            ..Self::lists()
        }
    }
}

/// Makes random transactions. Each write to a key has a value of its own.
#[derive(Debug, Clone)]
pub struct Generator {
    workload: Workload,
    random: Random,
    /// The keys in use, and the number of writes to each.
    active: Vec<(i64, u32)>,
    next_key: i64,
}

impl Generator {
    /// Makes a generator.
    #[must_use]
    pub fn new(workload: Workload, random: Random) -> Self {
        let next_key = i64::try_from(workload.keys.max(1)).unwrap_or(1);
        Self {
            workload,
            random,
            active: (0..next_key).map(|key| (key, 0)).collect(),
            next_key,
        }
    }

    /// Returns the steps of the next transaction, as they are invoked.
    pub fn transaction(&mut self) -> Vec<MicroOp> {
        let fewest = self.workload.fewest_steps;
        let more = self.workload.most_steps.saturating_sub(fewest);
        let steps = fewest + self.random.below(more + 1);
        (0..steps).map(|_| self.step()).collect()
    }

    fn step(&mut self) -> MicroOp {
        let mut among = self.active.len();
        if self.workload.skewed {
            among = self.random.index(among) + 1;
        }
        let place = self.random.index(among);
        let write = self.random.below(100) < self.workload.writes;
        let Some((key, writes)) = self.active.get_mut(place) else {
            return MicroOp::Read {
                key: Value::Nil,
                seen: Seen::Nil,
            };
        };
        let name = Value::Integer(*key);
        if !write {
            return MicroOp::Read {
                key: name,
                seen: Seen::Nil,
            };
        }
        *writes += 1;
        let value = Value::Integer(i64::from(*writes));
        if *writes >= self.workload.writes_per_key {
            (*key, *writes) = (self.next_key, 0);
            self.next_key += 1;
        }
        match self.workload.objects {
            Objects::Lists => MicroOp::Append { key: name, value },
            Objects::Registers => MicroOp::Write { key: name, value },
        }
    }
}

/// Outcome of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Committed. The steps have the results of reads.
    Committed(Vec<MicroOp>),
    /// Aborted: not committed, and never will be.
    Aborted,
    /// Not known: the connection broke, or no answer came in time. The transaction may be
    /// committed, or be committed later.
    Unknown,
}

/// Runs transactions, one after another.
pub trait Executor {
    /// Runs the steps as one transaction. After [`Outcome::Unknown`] the next call must use
    /// another session.
    fn execute(&mut self, steps: &[MicroOp]) -> Outcome;
}

/// Records a history while several clients run.
#[derive(Debug)]
pub struct Recorder {
    history: Mutex<History>,
    began: Instant,
}

impl Default for Recorder {
    fn default() -> Self {
        Self {
            history: Mutex::new(History::default()),
            began: Instant::now(),
        }
    }
}

impl Recorder {
    /// Records that a process begins a transaction. Call it before the first step is sent.
    pub fn invoke(&self, process: i64, steps: &[MicroOp]) {
        let steps = steps.iter().map(MicroOp::invoked).collect();
        self.push(Kind::Invoke, process, Some(steps));
    }

    /// Records the outcome of the transaction of a process. Call it when the outcome is known.
    pub fn complete(&self, process: i64, outcome: Outcome) {
        match outcome {
            Outcome::Committed(steps) => self.push(Kind::Ok, process, Some(steps)),
            Outcome::Aborted => self.push(Kind::Fail, process, None),
            Outcome::Unknown => self.push(Kind::Info, process, None),
        }
    }

    /// Returns what was recorded.
    #[must_use]
    pub fn finish(self) -> History {
        self.history
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, kind: Kind, process: i64, steps: Option<Vec<MicroOp>>) {
        let mut history = lock(&self.history);
        let time = i64::try_from(self.began.elapsed().as_nanos()).ok();
        history.push(kind, Some(process), time, steps);
    }
}

/// Runs `transactions` random transactions, each executor in a thread of its own, and records them.
///
/// A process is an executor until a transaction has an unknown outcome; then the executor gets a
/// new process number.
#[must_use]
pub fn run<E: Executor + Send>(
    generator: Generator,
    executors: Vec<E>,
    transactions: u64,
) -> History {
    let recorder = Recorder::default();
    let clients = i64::try_from(executors.len()).unwrap_or(i64::MAX);
    let work = Mutex::new((generator, transactions));
    let next = || {
        let mut work = lock(&work);
        work.1 = work.1.checked_sub(1)?;
        Some(work.0.transaction())
    };
    std::thread::scope(|threads| {
        for (mut process, mut executor) in (0..).zip(executors) {
            let (next, recorder) = (&next, &recorder);
            threads.spawn(move || {
                while let Some(steps) = next() {
                    recorder.invoke(process, &steps);
                    let outcome = executor.execute(&steps);
                    let unknown = outcome == Outcome::Unknown;
                    recorder.complete(process, outcome);
                    if unknown {
                        process += clients;
                    }
                }
            });
        }
    });
    recorder.finish()
}

/// Locks. A thread that has panicked has left nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
