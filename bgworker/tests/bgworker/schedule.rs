//! Applying in parallel along the dependency graph gives what applying one by one gives.
//!
//! Tables are in memory, with a primary and a secondary unique key. Each transaction's operations are those of a serial
//! history at the source; each says what it must find. A schedule applies an operation as soon as its transaction may
//! start: what other transactions see of it does not matter, as those that look at the same keys must wait.

use std::collections::{BTreeMap, BTreeSet};

use braid_bgworker::dependency::{DependencyTracker, Edges};

use crate::random::Random;

type Row = (u64, u64, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Insert { table: u32, row: Row },
    Update { table: u32, old: Row, new: Row },
    Delete { table: u32, old: Row },
    Truncate { table: u32 },
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Table {
    rows: BTreeMap<u64, (u64, u64)>,
    secondary: BTreeMap<u64, u64>,
}

impl Table {
    fn take(&mut self, old: Row) -> Result<(), String> {
        if self.rows.remove(&old.0) != Some((old.1, old.2)) {
            return Err(format!("row {old:?} is missing or not as it was"));
        }
        if self.secondary.remove(&old.1) != Some(old.0) {
            return Err(format!("secondary key of {old:?} is missing"));
        }
        Ok(())
    }

    fn put(&mut self, new: Row) -> Result<(), String> {
        if self.rows.insert(new.0, (new.1, new.2)).is_some() {
            return Err(format!("primary key of {new:?} is taken"));
        }
        if self.secondary.insert(new.1, new.0).is_some() {
            return Err(format!("secondary key of {new:?} is taken"));
        }
        Ok(())
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Database {
    tables: BTreeMap<u32, Table>,
}

impl Database {
    fn apply(&mut self, operation: Operation) -> Result<(), String> {
        match operation {
            Operation::Insert { table, row } => self.tables.entry(table).or_default().put(row),
            Operation::Update { table, old, new } => {
                let table = self.tables.entry(table).or_default();
                table.take(old)?;
                table.put(new)
            }
            Operation::Delete { table, old } => self.tables.entry(table).or_default().take(old),
            Operation::Truncate { table } => {
                *self.tables.entry(table).or_default() = Table::default();
                Ok(())
            }
        }
    }

    /// A random operation that this state allows. Few keys, so that transactions meet.
    fn random(&self, random: &mut Random, keys: u64) -> Option<Operation> {
        let table = u32::try_from(random.below(3)).unwrap();
        let empty = Table::default();
        let content = self.tables.get(&table).unwrap_or(&empty);
        if random.one_in(60) {
            return Some(Operation::Truncate { table });
        }
        let row = (random.below(keys), random.below(keys), random.next());
        let old = (!content.rows.is_empty()).then(|| {
            let (key, (second, value)) = content
                .rows
                .iter()
                .nth(random.index(content.rows.len()))
                .unwrap();
            (*key, *second, *value)
        });
        let free = |new: Row, old: Option<Row>| {
            (old.is_some_and(|old| old.0 == new.0) || !content.rows.contains_key(&new.0))
                && (old.is_some_and(|old| old.1 == new.1)
                    || !content.secondary.contains_key(&new.1))
        };
        match (random.below(4), old) {
            (0, Some(old)) => Some(Operation::Delete { table, old }),
            (1 | 2, Some(old)) => {
                // Half of the updates change keys.
                let new = match random.below(4) {
                    0 => (row.0, old.1, row.2),
                    1 => (old.0, row.1, row.2),
                    _ => (old.0, old.1, row.2),
                };
                free(new, Some(old)).then_some(Operation::Update { table, old, new })
            }
            _ => free(row, None).then_some(Operation::Insert { table, row }),
        }
    }
}

fn hash(table: u32, key: u64, value: u64) -> u64 {
    let mut z = (u64::from(table) << 40) ^ (key << 32) ^ value;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn hashes(table: u32, rows: &[Row]) -> Vec<u64> {
    rows.iter()
        .flat_map(|row| [hash(table, 0, row.0), hash(table, 1, row.1)])
        .collect()
}

fn enter(tracker: &mut DependencyTracker, operations: &[Operation]) {
    for operation in operations {
        match *operation {
            Operation::Insert { table, row } => {
                tracker.change(table, hashes(table, &[row]).into_iter())
            }
            Operation::Update { table, old, new } => {
                tracker.change(table, hashes(table, &[old, new]).into_iter());
            }
            Operation::Delete { table, old } => {
                tracker.change(table, hashes(table, &[old]).into_iter())
            }
            Operation::Truncate { table } => tracker.barrier(table),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Starts after `latest`, commits in the order of the source.
    Source,
    /// Starts after all that it depends on, commits when it is done.
    Relaxed,
}

/// Run transactions in a random schedule of up to `appliers` at a time. The tracker is asked as the leader does it: a bounded
/// way ahead, knowing what is committed by then.
fn replay(
    history: &[Vec<Operation>],
    order: Order,
    appliers: usize,
    capacity: usize,
    random: &mut Random,
) -> Result<(Database, usize), String> {
    let mut tracker = DependencyTracker::new(capacity);
    let mut database = Database::default();
    let mut edges: Vec<Edges> = Vec::new();
    // Sequence numbers start at 1. `done` is beyond `committed` only when commits may overtake each other.
    let (mut committed, mut done) = (0, BTreeSet::new());
    let mut running: Vec<(u64, usize)> = Vec::new();
    let mut taken: BTreeSet<u64> = BTreeSet::new();
    let mut most = 0;
    while committed < history.len() as u64 {
        let ahead = edges.len() as u64 - committed;
        if edges.len() < history.len() && ahead < 40 && random.one_in(2) {
            let next = edges.len() as u64 + 1;
            if random.one_in(10) {
                // One that is not applied here after all, with keys that matter.
                tracker.begin(next, committed);
                let other = random.index(history.len());
                enter(&mut tracker, &history[other]);
                tracker.abandon();
            }
            tracker.begin(next, committed);
            enter(&mut tracker, &history[edges.len()]);
            edges.push(tracker.finish());
            continue;
        }
        if running.len() < appliers && random.one_in(2) {
            // Taken in order, as from the ring; relaxed appliers may pick any that is ready.
            let candidates: Vec<u64> = (committed + 1..=edges.len() as u64)
                .filter(|sequence| !taken.contains(sequence))
                .collect();
            let ready = |sequence: u64| {
                let edges = &edges[usize::try_from(sequence - 1).unwrap()];
                match order {
                    Order::Source => edges.latest <= committed,
                    Order::Relaxed => {
                        edges.through <= committed
                            && edges
                                .all
                                .iter()
                                .all(|edge| *edge <= committed || done.contains(edge))
                    }
                }
            };
            let ready: Vec<u64> = candidates
                .into_iter()
                .filter(|sequence| ready(*sequence))
                .collect();
            let picked = match order {
                Order::Source => ready.first().copied(),
                Order::Relaxed if ready.is_empty() => None,
                Order::Relaxed => Some(ready[random.index(ready.len())]),
            };
            if let Some(sequence) = picked {
                taken.insert(sequence);
                running.push((sequence, 0));
                most = most.max(running.len());
            }
            continue;
        }
        if running.is_empty() {
            continue;
        }
        let place = random.index(running.len());
        let (sequence, at) = running[place];
        let operations = &history[usize::try_from(sequence - 1).unwrap()];
        if let Some(operation) = operations.get(at) {
            database
                .apply(*operation)
                .map_err(|error| format!("transaction {sequence}, {operation:?}: {error}"))?;
            running[place].1 += 1;
        } else if order == Order::Relaxed || committed + 1 == sequence {
            running.swap_remove(place);
            done.insert(sequence);
            while done.remove(&(committed + 1)) {
                committed += 1;
            }
        }
    }
    Ok((database, most))
}

fn history(random: &mut Random, transactions: usize, keys: u64) -> (Vec<Vec<Operation>>, Database) {
    let mut database = Database::default();
    let mut history = Vec::new();
    for _ in 0..transactions {
        let mut operations = Vec::new();
        for _ in 0..=random.below(4) {
            if let Some(operation) = database.random(random, keys) {
                database.apply(operation).unwrap();
                operations.push(operation);
            }
        }
        history.push(operations);
    }
    (history, database)
}

fn parallel_equals_serial(test: &str, order: Order) {
    let mut random = Random::new(test);
    let mut overlapped = 0;
    for round in 0..250 {
        let keys = [3, 10, 40, 400][round % 4];
        let (history, serial) = history(&mut random, 100, keys);
        // Small capacities make the tracker forget.
        let capacity = [16, 60, 100_000][round % 3];
        let appliers = 1 + random.index(8);
        match replay(&history, order, appliers, capacity, &mut random) {
            Ok((parallel, most)) => {
                assert!(parallel == serial, "round {round}: the final states differ");
                overlapped += usize::from(most > 1);
            }
            Err(error) => {
                panic!("round {round} ({appliers} appliers, capacity {capacity}): {error}")
            }
        }
    }
    assert!(
        overlapped > 100,
        "schedules did run in parallel: {overlapped}"
    );
}

#[test]
fn i5_parallel_is_serial_when_commits_follow_the_source() {
    parallel_equals_serial(
        "i5_parallel_is_serial_when_commits_follow_the_source",
        Order::Source,
    );
}

#[test]
fn i5_parallel_is_serial_when_commits_overtake_each_other() {
    parallel_equals_serial(
        "i5_parallel_is_serial_when_commits_overtake_each_other",
        Order::Relaxed,
    );
}
