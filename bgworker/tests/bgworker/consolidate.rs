//! Net changes have the same result as the changes one after the other: against a model of tables
//! with versions, tombstones, and conflicts resolved by `last_update_wins`.

use std::collections::BTreeMap;

use braid_bgworker::conflict::{
    self, Decision, Kind, Local, decide_delete, decide_insert, decide_new_key, decide_update,
};
use braid_bgworker::consolidate::{
    Action, Change, Ended, Net, Operation, Run, Version, group_by_table,
};

use crate::random::{Budget, Random};

const COLUMNS: usize = 3;
const NAMES: [&str; 3] = ["here", "source", "third"];

/// A table and a key.
type Place = (u32, u64);
type Columns = [u64; COLUMNS];

/// A change as the source made it.
#[derive(Debug, Clone)]
pub(super) struct Made {
    pub(super) relation: u32,
    /// The change's columns are sent rotated by this many places.
    shape: u32,
    /// `None`: truncate.
    pub(super) operation: Option<Operation>,
    barrier: bool,
    key: u64,
    new_key: u64,
    columns: Vec<Option<u64>>,
    hashes: Vec<u64>,
    version: Version,
    from_origin: bool,
}

/// State of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    /// A copied row has no known version. `extra` is a column that the source lacks.
    Row {
        version: Option<(i64, u32)>,
        columns: Columns,
        extra: u64,
    },
    Deleted((i64, u32)),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Subscriber {
    registers: BTreeMap<Place, Register>,
    /// Conflicts: kind, place, version of the change.
    pub(super) history: Vec<(Kind, Place, i64)>,
}

fn named(version: (i64, u32)) -> conflict::Version<'static> {
    conflict::Version {
        timestamp: version.0,
        origin: NAMES[version.1 as usize],
    }
}

impl Subscriber {
    fn local(&self, place: Place) -> Local<'static> {
        match self.registers.get(&place) {
            None => Local::Missing,
            Some(Register::Deleted(version)) => Local::Deleted(named(*version)),
            Some(Register::Row { version: None, .. }) => Local::Unversioned,
            Some(Register::Row {
                version: Some(version),
                ..
            }) => Local::Present(named(*version)),
        }
    }

    fn is_row(&self, place: Place) -> bool {
        matches!(self.registers.get(&place), Some(Register::Row { .. }))
    }

    fn note(&mut self, decision: Decision, place: Place, version: Version) {
        if let Some(kind) = decision.conflict {
            self.history.push((kind, place, version.timestamp));
        }
    }

    /// Writes columns over an existing row, or as a new one.
    fn write(&mut self, place: Place, columns: &[Option<u64>], version: Version) {
        let version = Some((version.timestamp, version.origin));
        let (mut values, extra) = match self.registers.get(&place) {
            Some(Register::Row { columns, extra, .. }) => (*columns, *extra),
            _ => ([u64::MAX; COLUMNS], 0),
        };
        for (value, column) in values.iter_mut().zip(columns) {
            *value = column.unwrap_or(*value);
        }
        let row = Register::Row {
            version,
            columns: values,
            extra,
        };
        self.registers.insert(place, row);
    }

    fn delete(&mut self, place: Place, version: Version) {
        let trace = Register::Deleted((version.timestamp, version.origin));
        self.registers.insert(place, trace);
    }

    /// Applies one change like an applier.
    pub(super) fn apply(&mut self, made: &Made) {
        let place = (made.relation, made.key);
        let target = (made.relation, made.new_key);
        let remote = named((made.version.timestamp, made.version.origin));
        match made.operation {
            None => self.registers.retain(|place, _| place.0 != made.relation),
            Some(Operation::Insert) => {
                let decision = decide_insert(self.local(place), remote, made.from_origin);
                self.note(decision, place, made.version);
                if decision.action == conflict::Action::Apply {
                    self.write(place, &made.columns, made.version);
                }
            }
            Some(Operation::Delete) => self.apply_delete(made),
            Some(Operation::Update) => {
                if place != target {
                    let decision = decide_new_key(self.local(target), remote, made.from_origin);
                    self.note(decision, target, made.version);
                    if decision.action == conflict::Action::Keep {
                        return self.apply_delete(made);
                    }
                    self.registers.remove(&target);
                }
                let decision = decide_update(self.local(place), remote, made.from_origin);
                self.note(decision, place, made.version);
                let gaps = !self.is_row(place) && made.columns.contains(&None);
                if decision.action == conflict::Action::Keep || gaps {
                    return;
                }
                self.write(place, &made.columns, made.version);
                if place != target {
                    let row = self.registers.remove(&place).unwrap();
                    self.registers.insert(target, row);
                }
            }
        }
    }

    fn apply_delete(&mut self, made: &Made) {
        let place = (made.relation, made.key);
        let remote = named((made.version.timestamp, made.version.origin));
        let decision = decide_delete(self.local(place), remote, made.from_origin);
        self.note(decision, place, made.version);
        if decision.action == conflict::Action::Apply {
            self.delete(place, made.version);
        }
    }

    /// Applies a net change by the two rules of the module's documentation.
    pub(super) fn apply_net(&mut self, net: &Net<(u64, u64), u64>, parts: &[&Made]) {
        let place = (net.relation, net.key.0);
        let (operation, version) = net.first;
        let remote = named((version.timestamp, version.origin));
        let from_origin = parts[0].from_origin;
        let decision = match operation {
            Operation::Insert => decide_insert(self.local(place), remote, from_origin),
            Operation::Update => decide_update(self.local(place), remote, from_origin),
            Operation::Delete => decide_delete(self.local(place), remote, from_origin),
        };
        let plain = decision.action == conflict::Action::Apply && decision.conflict.is_none();
        if !plain || parts.len() == 1 {
            for part in parts {
                self.apply(part);
            }
            return;
        }
        // In the shape of the first of its changes.
        let put = |columns: &Vec<Option<u64>>| {
            let mut columns = columns.clone();
            columns.rotate_left(parts[0].shape as usize % COLUMNS);
            columns
        };
        match &net.action {
            Action::Insert(columns) => self.write(place, &put(columns), net.version),
            Action::Update(columns) => {
                assert!(self.is_row(place), "an update without a conflict has a row");
                self.write(place, &put(columns), net.version);
            }
            Action::Replace(columns) => {
                assert!(columns.iter().all(Option::is_some), "as if new");
                self.registers.remove(&place);
                self.write(place, &put(columns), net.version);
            }
            Action::Delete | Action::Vanish => self.delete(place, net.version),
        }
    }

    /// Returns a second row with an equal first column, which is unique.
    pub(super) fn collision(&self) -> Option<Place> {
        let mut seen = BTreeMap::new();
        self.registers
            .iter()
            .find_map(|(place, register)| match register {
                Register::Row { columns, .. } => {
                    seen.insert((place.0, columns[0]), place).map(|_| *place)
                }
                Register::Deleted(_) => None,
            })
    }
}

/// The source: rows with a key and a unique first column.
#[derive(Debug, Default)]
struct Source {
    rows: BTreeMap<Place, Columns>,
    clock: i64,
    shape: u32,
}

impl Source {
    fn is_free(&self, relation: u32, value: u64) -> bool {
        !self
            .rows
            .iter()
            .any(|(place, columns)| place.0 == relation && columns[0] == value)
    }

    fn change(&mut self, random: &mut Random, keys: u64) -> Option<Made> {
        let relation = u32::try_from(random.below(2)).unwrap();
        let key = random.below(keys);
        let place = (relation, key);
        // The clock goes back at times.
        self.clock += 1 - 3 * i64::from(random.one_in(15));
        let direct = !random.one_in(10);
        if random.one_in(30) {
            self.shape += 1;
        }
        let mut made = Made {
            relation,
            shape: self.shape,
            operation: None,
            barrier: random.one_in(40),
            key,
            new_key: key,
            columns: Vec::new(),
            hashes: Vec::new(),
            version: Version {
                timestamp: self.clock,
                origin: if direct { 1 } else { 2 },
            },
            from_origin: direct,
        };
        let old = self.rows.get(&place).copied();
        if random.one_in(100) {
            made.barrier = true;
            self.rows.retain(|place, _| place.0 != relation);
            return Some(made);
        }
        let new: Columns = std::array::from_fn(|_| random.below(keys * 2));
        match old {
            None => {
                if !self.is_free(relation, new[0]) {
                    return None;
                }
                made.operation = Some(Operation::Insert);
                made.columns = new.map(Some).to_vec();
                self.rows.insert(place, new);
                made.hashes = hashes(relation, key, new[0]).to_vec();
            }
            Some(old) if random.one_in(4) => {
                made.operation = Some(Operation::Delete);
                self.rows.remove(&place);
                made.hashes = hashes(relation, key, old[0]).to_vec();
            }
            Some(old) => {
                let mut row = old;
                for (at, value) in new.iter().enumerate() {
                    let allowed = at > 0 || self.is_free(relation, *value);
                    if allowed && random.one_in(3) {
                        row[at] = *value;
                    }
                }
                let new_key = random.below(keys);
                if random.one_in(8) && !self.rows.contains_key(&(relation, new_key)) {
                    made.new_key = new_key;
                }
                made.operation = Some(Operation::Update);
                // Unchanged columns may be missing.
                let columns = row
                    .iter()
                    .zip(&old)
                    .map(|(new, old)| (new != old || random.one_in(2)).then_some(*new));
                made.columns = columns.collect();
                self.rows.remove(&place);
                self.rows.insert((relation, made.new_key), row);
                made.hashes = hashes(relation, key, old[0]).to_vec();
                made.hashes.extend(hashes(relation, made.new_key, row[0]));
            }
        }
        Some(made)
    }
}

fn hashes(relation: u32, key: u64, unique: u64) -> [u64; 2] {
    let hash = |kind: u64, value: u64| {
        ((u64::from(relation) << 40) | (kind << 32) | value).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    [hash(1, key), hash(2, unique)]
}

pub(super) fn changed(made: &Made) -> Change<'_, (u64, u64), u64> {
    let mut columns = made.columns.clone();
    let by = made.shape as usize % columns.len().max(1);
    columns.rotate_right(by);
    Change {
        relation: made.relation,
        shape: made.shape,
        operation: made.operation.unwrap_or(Operation::Delete),
        barrier: made.barrier,
        hashes: &made.hashes,
        key: (made.key, 0),
        moves: made.key != made.new_key,
        columns,
        version: made.version,
        from_origin: made.from_origin,
    }
}

/// Counters of the applied batches.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) changes: usize,
    pub(super) nets: usize,
    pub(super) parts_replayed: usize,
}

/// Applies a batch, and checks after each step that unique columns hold if they have to.
pub(super) type Way = fn(&mut Subscriber, &[Made], bool, &mut Random, &mut Tally);

/// Applies a batch through runs.
fn consolidated(
    subscriber: &mut Subscriber,
    batch: &[Made],
    unique: bool,
    random: &mut Random,
    tally: &mut Tally,
) {
    let limit = 1 + u32::try_from(random.below(60)).unwrap();
    let mut run = Run::new(limit);
    let mut start = 0;
    tally.changes += batch.len();
    for (at, made) in batch.iter().enumerate() {
        let Err(ended) = run.push(changed(made)) else {
            continue;
        };
        let full = std::mem::replace(&mut run, Run::new(limit));
        flush(subscriber, full, &batch[start..at], unique, random, tally);
        start = at;
        if ended == Ended::Barrier {
            subscriber.apply(made);
            start = at + 1;
            tally.nets += 1;
        } else {
            run.push(changed(made)).unwrap();
        }
    }
    flush(subscriber, run, &batch[start..], unique, random, tally);
}

fn flush(
    subscriber: &mut Subscriber,
    run: Run<(u64, u64), u64>,
    made: &[Made],
    unique: bool,
    random: &mut Random,
    tally: &mut Tally,
) {
    assert_eq!(run.changes() as usize, made.len());
    let mut nets = run.finish();
    tally.nets += nets.len();
    if random.one_in(2) {
        group_by_table(&mut nets);
    } else {
        // Any order is valid.
        for place in (1..nets.len()).rev() {
            nets.swap(place, random.index(place + 1));
        }
    }
    for net in &nets {
        let parts: Vec<&Made> = net.parts.iter().map(|part| &made[*part as usize]).collect();
        let before = subscriber.history.len();
        subscriber.apply_net(net, &parts);
        tally.parts_replayed += usize::from(subscriber.history.len() > before && parts.len() > 1);
        if unique {
            assert_eq!(subscriber.collision(), None, "{net:?}");
        }
    }
}

fn initial(random: &mut Random, keys: u64, conflicts: bool) -> (Source, Subscriber) {
    let mut source = Source::default();
    let mut subscriber = Subscriber::default();
    for _ in 0..keys {
        if let Some(made) = source.change(random, keys) {
            subscriber.apply(&made);
        }
    }
    if !conflicts {
        // Rows as at the source, some with unknown versions, and a value in their extra column.
        subscriber.registers.clear();
        for (place, columns) in &source.rows {
            let row = Register::Row {
                version: (!random.one_in(3)).then_some((source.clock - 100, 1)),
                columns: *columns,
                extra: random.next(),
            };
            subscriber.registers.insert(*place, row);
        }
    } else {
        for relation in 0..2 {
            for key in 0..keys {
                let version = (
                    source.clock + i64::try_from(random.below(200)).unwrap() - 50,
                    0,
                );
                let row = Register::Row {
                    version: (!random.one_in(8)).then_some(version),
                    columns: std::array::from_fn(|_| random.next()),
                    extra: random.next(),
                };
                match random.below(6) {
                    0 => drop(subscriber.registers.insert((relation, key), row)),
                    1 => drop(
                        subscriber
                            .registers
                            .insert((relation, key), Register::Deleted(version)),
                    ),
                    2 => drop(subscriber.registers.remove(&(relation, key))),
                    _ => {}
                }
            }
        }
    }
    subscriber.history.clear();
    (source, subscriber)
}

pub(super) fn equals_serial(test: &str, conflicts: bool, way: Way) -> Tally {
    let mut random = Random::new(test);
    let mut budget = Budget::new();
    let mut tally = Tally::default();
    while let Some(round) = budget.round(300) {
        let keys = [3, 10, 60][round % 3];
        let (mut source, mut serial) = initial(&mut random, keys, conflicts);
        let mut net = serial.clone();
        for _ in 0..5 {
            let batch: Vec<Made> = (0..random.below(80))
                .filter_map(|_| source.change(&mut random, keys))
                .map(|made| if conflicts { made } else { direct(made) })
                .collect();
            for made in &batch {
                serial.apply(made);
            }
            way(&mut net, &batch, !conflicts, &mut random, &mut tally);
            serial.history.sort_by_key(|entry| format!("{entry:?}"));
            net.history.sort_by_key(|entry| format!("{entry:?}"));
            assert!(
                net.history == serial.history,
                "round {round}: other conflicts"
            );
            for place in serial.registers.keys().chain(net.registers.keys()) {
                let (one, other) = (serial.registers.get(place), net.registers.get(place));
                assert!(
                    one == other,
                    "round {round}, {place:?}: {one:?} one by one, {other:?} joined"
                );
            }
        }
        if !conflicts {
            let here = serial
                .registers
                .iter()
                .filter_map(|(place, register)| match register {
                    Register::Row { columns, .. } => Some((*place, *columns)),
                    Register::Deleted(_) => None,
                });
            assert!(here.eq(source.rows), "round {round}: not as at the source");
            assert!(serial.history.is_empty(), "{:?}", serial.history);
        }
    }
    tally
}

/// Makes the change one of the origin itself, without a third node.
fn direct(mut made: Made) -> Made {
    made.version.origin = 1;
    made.from_origin = true;
    made
}

#[test]
fn i2_net_changes_are_serial_where_nobody_else_writes() {
    let tally = equals_serial(
        "i2_net_changes_are_serial_where_nobody_else_writes",
        false,
        consolidated,
    );
    assert!(
        tally.nets * 10 < tally.changes * 9,
        "something was joined: {tally:?}"
    );
}

#[test]
fn i2_net_changes_are_serial_where_others_write_too() {
    let tally = equals_serial(
        "i2_net_changes_are_serial_where_others_write_too",
        true,
        consolidated,
    );
    assert!(
        tally.nets * 10 < tally.changes * 9,
        "something was joined: {tally:?}"
    );
    assert!(tally.parts_replayed > 100, "conflicts were met: {tally:?}");
}
