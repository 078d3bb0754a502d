//! Parallel apply along the dependency graph has the result of applying one by one.
//!
//! Tables are in memory, with three unique keys each. Each transaction's operations are those of a
//! serial history at the source, and state what they must find. A schedule applies an operation as
//! soon as its transaction may start. Other transactions may see it at once, since those that read
//! the same keys must wait.

use std::collections::{BTreeMap, BTreeSet};

use braid_bgworker::dependency::DependencyTracker;
use braid_bgworker::joining::missing;

use crate::random::{Budget, Random};

const KEYS: usize = 3;
const TABLES: u64 = 5;
/// Only the subscriber has the third unique key, so all changes of this table are ordered.
const EXTRA_KEY_HERE: u32 = 2;
/// A table without replica identity: updates and deletes are barriers, inserts have no keys.
const KEYLESS: u32 = 3;
/// A table with a trigger that writes elsewhere, so its transactions are ordered with everything.
const TRIGGERED: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    keys: [u64; KEYS],
    value: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Operation {
    Insert { table: u32, row: Row },
    Update { table: u32, old: Row, new: Row },
    Delete { table: u32, old: Row },
    Truncate { tables: Vec<u32> },
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Table {
    /// Rows by the first key.
    rows: BTreeMap<u64, Row>,
    others: [BTreeSet<u64>; KEYS - 1],
}

impl Table {
    fn take(&mut self, old: Row) -> Result<(), String> {
        if self.rows.remove(&old.keys[0]) != Some(old) {
            return Err(format!("row {old:?} is missing or not as it was"));
        }
        for (taken, key) in self.others.iter_mut().zip(&old.keys[1..]) {
            taken.remove(key);
        }
        Ok(())
    }

    fn put(&mut self, new: Row) -> Result<(), String> {
        if self.rows.insert(new.keys[0], new).is_some() {
            return Err(format!("first key of {new:?} is taken"));
        }
        for (taken, key) in self.others.iter_mut().zip(&new.keys[1..]) {
            if !taken.insert(*key) {
                return Err(format!("another key of {new:?} is taken"));
            }
        }
        Ok(())
    }

    fn has_room_for(&self, new: Row, instead_of: Option<Row>) -> bool {
        let same = |place: usize| instead_of.is_some_and(|old| old.keys[place] == new.keys[place]);
        (same(0) || !self.rows.contains_key(&new.keys[0]))
            && (1..KEYS)
                .all(|place| same(place) || !self.others[place - 1].contains(&new.keys[place]))
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Database {
    tables: BTreeMap<u32, Table>,
    /// Result of the trigger: it depends on the order of all rows that it saw, and on the other
    /// tables' sizes.
    trail: u64,
}

impl Database {
    fn apply(&mut self, operation: &Operation) -> Result<(), String> {
        let fired = match operation {
            Operation::Insert { table, row } => {
                self.tables.entry(*table).or_default().put(*row)?;
                *table == TRIGGERED
            }
            Operation::Update { table, old, new } => {
                let content = self.tables.entry(*table).or_default();
                content.take(*old)?;
                content.put(*new)?;
                *table == TRIGGERED
            }
            Operation::Delete { table, old } => {
                self.tables.entry(*table).or_default().take(*old)?;
                *table == TRIGGERED
            }
            Operation::Truncate { tables } => {
                for table in tables {
                    *self.tables.entry(*table).or_default() = Table::default();
                }
                tables.contains(&TRIGGERED)
            }
        };
        if fired {
            let sizes = self.tables.values().map(|table| table.rows.len() as u64);
            self.trail = sizes.fold(self.trail, |trail, size| {
                trail.wrapping_mul(31).wrapping_add(size + 1)
            });
        }
        Ok(())
    }

    /// Returns a random operation that this state allows. Keys are few, so that transactions
    /// conflict.
    fn random(&self, random: &mut Random, keys: u64) -> Option<Operation> {
        // The trigger's table is rare: it orders everything.
        let tables = if random.one_in(12) {
            TABLES
        } else {
            TABLES - 1
        };
        let table = u32::try_from(random.below(tables)).unwrap();
        let empty = Table::default();
        let content = self.tables.get(&table).unwrap_or(&empty);
        if random.one_in(60) {
            let mut tables = vec![table];
            if random.one_in(2) {
                tables.push((table + 1) % u32::try_from(TABLES).unwrap());
            }
            return Some(Operation::Truncate { tables });
        }
        let row = Row {
            keys: std::array::from_fn(|_| random.below(keys)),
            value: random.next(),
        };
        let old = (!content.rows.is_empty()).then(|| {
            let place = random.index(content.rows.len());
            *content.rows.values().nth(place).unwrap()
        });
        match (random.below(4), old) {
            (0, Some(old)) => Some(Operation::Delete { table, old }),
            (1 | 2, Some(old)) => {
                // Most updates change a key.
                let mut new = Row {
                    value: row.value,
                    ..old
                };
                let place = random.index(KEYS + 1);
                if let Some(key) = new.keys.get_mut(place) {
                    *key = row.keys[place];
                }
                content
                    .has_room_for(new, Some(old))
                    .then_some(Operation::Update { table, old, new })
            }
            _ => content
                .has_room_for(row, None)
                .then_some(Operation::Insert { table, row }),
        }
    }
}

/// Quality of the hashes.
#[derive(Debug, Clone, Copy)]
enum Hashes {
    Good,
    /// Two keys in three share their hash with many others.
    Colliding,
    /// All keys fall into one line of the tracker's table.
    OneLine,
}

fn hash(hashes: Hashes, table: u32, place: usize, key: u64) -> u64 {
    let mut z = (u64::from(table) << 40) ^ ((place as u64) << 32) ^ key;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    match hashes {
        Hashes::Good => z,
        Hashes::Colliding if z.is_multiple_of(3) => z,
        Hashes::Colliding => z % 7,
        Hashes::OneLine => z & 0xffff_ffff,
    }
}

/// Enters a change into the tracker, like the leader.
fn enter(tracker: &mut DependencyTracker, operation: &Operation, hashes: Hashes) {
    let mut change = |table: u32, rows: &[Row], insert: bool| {
        // A key that the provider lacks is not hashed.
        let known = match table {
            KEYLESS => 0,
            EXTRA_KEY_HERE => KEYS - 1,
            _ => KEYS,
        };
        match table {
            TRIGGERED => tracker.barrier_for_all(),
            EXTRA_KEY_HERE => tracker.barrier(table),
            KEYLESS if !insert => tracker.barrier(table),
            _ => {}
        }
        let keys = rows
            .iter()
            .flat_map(|row| row.keys[..known].iter().enumerate());
        tracker.change(
            table,
            keys.map(|(place, key)| hash(hashes, table, place, *key)),
        );
    };
    match operation {
        Operation::Insert { table, row } => change(*table, &[*row], true),
        Operation::Update { table, old, new } => change(*table, &[*old, *new], false),
        Operation::Delete { table, old } => change(*table, &[*old], false),
        Operation::Truncate { tables } => {
            for table in tables {
                match *table {
                    TRIGGERED => tracker.barrier_for_all(),
                    table => tracker.barrier(table),
                }
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// A transaction starts after `latest`, and commits in the order of the source.
    Source,
    /// A transaction starts after all that it depends on, and commits when it is done. At most this
    /// many single edges are kept.
    Relaxed(usize),
}

/// The edges of a transaction that a schedule keeps.
struct Kept {
    latest: u64,
    through: u64,
    all: Vec<u64>,
}

/// A claimed run, and the batch that is made of its beginning.
struct Hand {
    first: u64,
    last: u64,
    begun: bool,
    /// The current transaction, and how much of it is applied.
    at: u64,
    place: usize,
}

impl Hand {
    fn new(first: u64, last: u64) -> Self {
        Self {
            first,
            last,
            begun: false,
            at: first,
            place: 0,
        }
    }
}

struct Replay<'a> {
    history: &'a [Vec<Operation>],
    order: Order,
    appliers: usize,
    capacity: usize,
    hashes: Hashes,
}

impl Replay<'_> {
    /// Runs the transactions in a random schedule. The tracker is used as by the leader: a bounded
    /// distance ahead, knowing what is committed by then. Returns the final state and how many
    /// transactions ran at a time.
    fn run(&self, random: &mut Random) -> Result<(Database, usize), String> {
        let mut tracker = DependencyTracker::new(self.capacity);
        let mut database = Database::default();
        let mut edges: Vec<Kept> = Vec::new();
        // Numbers start at 1. `done` has members only if commits may overtake each other.
        let (mut committed, mut done) = (0, BTreeSet::new());
        let mut running: Vec<(u64, usize)> = Vec::new();
        let mut taken: BTreeSet<u64> = BTreeSet::new();
        let mut most = 0;
        let ahead_at_most = 1 + random.below(80);
        while committed < self.history.len() as u64 {
            let ahead = edges.len() as u64 - committed;
            if edges.len() < self.history.len() && ahead < ahead_at_most && random.one_in(2) {
                edges.push(self.ask(&mut tracker, edges.len(), committed, random));
                continue;
            }
            if running.len() < self.appliers && random.one_in(2) {
                // Claimed in order, as from the ring; relaxed appliers may claim any that is ready.
                let ready = |sequence: &u64| {
                    let edges = &edges[usize::try_from(sequence - 1).unwrap()];
                    match self.order {
                        Order::Source => edges.latest <= committed,
                        Order::Relaxed(_) => {
                            let is_done = |edge: &u64| *edge <= committed || done.contains(edge);
                            edges.through <= committed && edges.all.iter().all(is_done)
                        }
                    }
                };
                let mut waiting = (committed + 1..=edges.len() as u64)
                    .filter(|sequence| !taken.contains(sequence));
                let picked = match self.order {
                    Order::Source => waiting.next().filter(ready),
                    Order::Relaxed(_) => {
                        let ready: Vec<u64> = waiting.filter(ready).collect();
                        (!ready.is_empty()).then(|| ready[random.index(ready.len())])
                    }
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
            let operations = &self.history[usize::try_from(sequence - 1).unwrap()];
            if let Some(operation) = operations.get(at) {
                database
                    .apply(operation)
                    .map_err(|error| format!("transaction {sequence}, {operation:?}: {error}"))?;
                running[place].1 += 1;
            } else if self.order != Order::Source || committed + 1 == sequence {
                running.swap_remove(place);
                done.insert(sequence);
                while done.remove(&(committed + 1)) {
                    committed += 1;
                }
            }
        }
        Ok((database, most))
    }

    /// Runs the transactions in batches: runs are claimed in order, as from the ring, and each
    /// batch is committed as one. Batches commit in the source's order, or whenever they are done;
    /// in the latter case a batch ends before a transaction that would have to wait.
    fn run_batches(
        &self,
        random: &mut Random,
        in_order: bool,
    ) -> Result<(Database, usize), String> {
        let mut tracker = DependencyTracker::new(self.capacity);
        let mut database = Database::default();
        let mut edges: Vec<Kept> = Vec::new();
        let (mut committed, mut done) = (0, BTreeSet::new());
        let mut hands: Vec<Hand> = Vec::new();
        let (mut claimed, mut joined) = (0, 0);
        let ahead_at_most = 1 + random.below(80);
        while committed < self.history.len() as u64 {
            let ahead = edges.len() as u64 - committed;
            if edges.len() < self.history.len() && ahead < ahead_at_most && random.one_in(2) {
                edges.push(self.ask(&mut tracker, edges.len(), committed, random));
                continue;
            }
            let free = edges.len() as u64 - claimed;
            if hands.len() < self.appliers && free > 0 && random.one_in(2) {
                let run = free.min(1 + random.below(8));
                hands.push(Hand::new(claimed + 1, claimed + run));
                claimed += run;
                continue;
            }
            if hands.is_empty() {
                continue;
            }
            let place = random.index(hands.len());
            let hand = &mut hands[place];
            let kept = |sequence: u64| &edges[usize::try_from(sequence - 1).unwrap()];
            let is_done = |sequence: u64| sequence <= committed || done.contains(&sequence);
            if !hand.begun {
                let needs = kept(hand.first);
                hand.begun = if in_order {
                    needs.latest <= committed
                } else {
                    needs.through <= committed && needs.all.iter().all(|edge| is_done(*edge))
                };
                continue;
            }
            let operations = &self.history[usize::try_from(hand.at - 1).unwrap()];
            if let Some(operation) = operations.get(hand.place) {
                database.apply(operation).map_err(|error| {
                    format!(
                        "transaction {} of a batch from {}, {operation:?}: {error}",
                        hand.at, hand.first
                    )
                })?;
                hand.place += 1;
                continue;
            }
            // Another origin, for example, ends a batch.
            if hand.at < hand.last && !random.one_in(20) {
                let needs = kept(hand.at + 1);
                let needed = (needs.through, needs.all.iter().copied());
                match missing(needed, hand.first, committed, is_done) {
                    None => {
                        hand.at += 1;
                        hand.place = 0;
                        joined += 1;
                        continue;
                    }
                    Some(missing) if in_order => {
                        assert!(missing < hand.first);
                        continue;
                    }
                    Some(_) => {}
                }
            }
            if in_order && committed + 1 != hand.first {
                continue;
            }
            done.extend(hand.first..=hand.at);
            while done.remove(&(committed + 1)) {
                committed += 1;
            }
            if hand.at < hand.last {
                *hand = Hand::new(hand.at + 1, hand.last);
            } else {
                hands.swap_remove(place);
            }
        }
        Ok((database, joined))
    }

    fn ask(
        &self,
        tracker: &mut DependencyTracker,
        place: usize,
        committed: u64,
        random: &mut Random,
    ) -> Kept {
        let next = place as u64 + 1;
        if random.one_in(10) {
            // A transaction that is abandoned, with keys that matter.
            tracker.begin(next, committed);
            for operation in &self.history[random.index(self.history.len())] {
                enter(tracker, operation, self.hashes);
            }
            tracker.abandon();
        }
        tracker.begin(next, committed);
        for operation in &self.history[place] {
            enter(tracker, operation, self.hashes);
        }
        let mut edges = tracker.finish();
        if let Order::Relaxed(most) = self.order {
            edges = edges.at_most(most);
        }
        assert!(edges.latest < next && edges.through <= edges.latest);
        Kept {
            latest: edges.latest,
            through: edges.through,
            all: edges.all.to_vec(),
        }
    }
}

fn history(random: &mut Random, transactions: usize, keys: u64) -> (Vec<Vec<Operation>>, Database) {
    let mut database = Database::default();
    let mut history = Vec::new();
    for _ in 0..transactions {
        let mut operations = Vec::new();
        // A large transaction now and then, with more keys than the smallest tracker takes.
        let most = if random.one_in(50) { 60 } else { 4 };
        for _ in 0..=random.below(most) {
            if let Some(operation) = database.random(random, keys) {
                database.apply(&operation).unwrap();
                operations.push(operation);
            }
        }
        history.push(operations);
    }
    (history, database)
}

fn parallel_equals_serial(test: &str, relaxed: bool) {
    let mut random = Random::new(test);
    let mut budget = Budget::new();
    let (mut overlapped, mut rounds) = (0, 0);
    while let Some(round) = budget.round(250) {
        let (history, serial) = history(&mut random, 100, [3, 10, 40, 400][round % 4]);
        let replay = Replay {
            history: &history,
            order: if relaxed {
                Order::Relaxed([0, 1, 3, 1000][random.index(4)])
            } else {
                Order::Source
            },
            appliers: 1 + random.index(8),
            // Small capacities make the tracker forget keys.
            capacity: [16, 60, 100_000][round % 3],
            hashes: [
                Hashes::Good,
                Hashes::Good,
                Hashes::Colliding,
                Hashes::OneLine,
            ][random.index(4)],
        };
        let about = format!(
            "round {round} ({:?}, {} appliers, capacity {}, {:?})",
            replay.order, replay.appliers, replay.capacity, replay.hashes
        );
        match replay.run(&mut random) {
            Ok((parallel, most)) => {
                assert!(parallel == serial, "{about}: the final states differ");
                overlapped += usize::from(most > 1);
            }
            Err(error) => panic!("{about}: {error}"),
        }
        rounds = round + 1;
    }
    assert!(
        overlapped * 2 > rounds,
        "schedules did run in parallel: {overlapped} of {rounds}"
    );
}

#[test]
fn i5_parallel_is_serial_when_commits_follow_the_source() {
    parallel_equals_serial(
        "i5_parallel_is_serial_when_commits_follow_the_source",
        false,
    );
}

#[test]
fn i5_parallel_is_serial_when_commits_overtake_each_other() {
    parallel_equals_serial(
        "i5_parallel_is_serial_when_commits_overtake_each_other",
        true,
    );
}

fn batches_equal_serial(test: &str, in_order: bool) {
    let mut random = Random::new(test);
    let mut budget = Budget::new();
    let (mut joined, mut rounds) = (0, 0);
    while let Some(round) = budget.round(250) {
        let (history, serial) = history(&mut random, 100, [3, 10, 40, 400][round % 4]);
        let replay = Replay {
            history: &history,
            order: Order::Relaxed([0, 1, 3, 6][random.index(4)]),
            appliers: 1 + random.index(8),
            capacity: [16, 60, 100_000][round % 3],
            hashes: [Hashes::Good, Hashes::Good, Hashes::Colliding][random.index(3)],
        };
        let about = format!(
            "round {round} ({:?}, {} appliers, capacity {}, {:?})",
            replay.order, replay.appliers, replay.capacity, replay.hashes
        );
        match replay.run_batches(&mut random, in_order) {
            Ok((batches, count)) => {
                assert!(batches == serial, "{about}: the final states differ");
                joined += count;
            }
            Err(error) => panic!("{about}: {error}"),
        }
        rounds = round + 1;
    }
    assert!(
        joined > rounds * 10,
        "transactions did join others: {joined} in {rounds}"
    );
}

#[test]
fn i5_batches_are_serial_when_commits_follow_the_source() {
    batches_equal_serial("i5_batches_are_serial_when_commits_follow_the_source", true);
}

#[test]
fn i5_batches_are_serial_when_commits_overtake_each_other() {
    batches_equal_serial(
        "i5_batches_are_serial_when_commits_overtake_each_other",
        false,
    );
}
