//! Histories of registers: transactions write unique values, and read the last one.
//!
//! A register does not say what it was before. Its versions are ordered by two rules: the initial
//! value comes first, and a transaction's write comes after the version that it read. With
//! [`Options`](crate::Options), the order in which a process, or any process in real time, worked
//! with a register counts too.
#![expect(
    clippy::indexing_slicing,
    reason = "transactions, keys and versions are numbered by this module"
)]

use std::collections::HashMap;

use crate::anomaly::{Anomaly, Orders};
use crate::cycles::{Explain, link_orders};
use crate::error::HistoryError;
use crate::graph::{ALL, Builder, Fan, Graph, NO_KEY, RW, WR, WW};
use crate::history::{MicroOp, Seen};
use crate::keys::Keys;
use crate::report::{Findings, Relation, finding};
use crate::transactions::{Event, Status, Transactions, number};
use crate::value::Value;

/// A value of a register.
struct Version<'h> {
    key: u32,
    value: &'h Value,
    /// The transaction that wrote it. `None`: the initial value.
    writer: Option<u32>,
    /// Whether its transaction does not write the register again.
    last: bool,
    /// Committed transactions whose first step with the register read it.
    readers: Vec<u32>,
}

/// A transaction's reads and writes of a register, as other transactions see them.
#[derive(Clone, Copy, Default)]
struct Access {
    /// The version that it read before it wrote.
    read: Option<u32>,
    /// The version that it left.
    wrote: Option<u32>,
}

/// Orders of single keys that count.
#[derive(Clone, Copy)]
pub(crate) struct KeyOrders {
    pub sequential: bool,
    pub linearizable: bool,
}

/// The analysis of a history of registers.
pub(crate) struct Registers<'h> {
    transactions: &'h Transactions<'h>,
    keys: Keys<'h>,
    versions: Vec<Version<'h>>,
    /// Versions by their keys and values.
    numbers: HashMap<(u32, &'h Value), u32>,
    /// Reads and writes of each transaction, by key.
    accesses: Vec<Vec<(u32, Access)>>,
    /// Pairs of versions, of which the second follows the first.
    later: Vec<(u32, u32)>,
    /// Whether a transaction is committed, or was seen to be.
    pub live: Vec<bool>,
}

impl<'h> Registers<'h> {
    /// Finds all anomalies but cycles of transactions.
    pub fn analyze(
        transactions: &'h Transactions<'h>,
        orders: KeyOrders,
        findings: &mut Findings,
    ) -> Result<Self, HistoryError> {
        let mut registers = Self {
            transactions,
            keys: Keys::default(),
            versions: Vec::new(),
            numbers: HashMap::new(),
            accesses: vec![Vec::new(); transactions.all.len()],
            later: Vec::new(),
            live: Vec::new(),
        };
        let all = transactions.all.iter();
        registers.live = all.map(|t| t.status == Status::Committed).collect();
        registers.index_writes()?;
        for (number, transaction) in (0..).zip(&transactions.all) {
            let reads = transaction.status == Status::Committed;
            registers.take(number, transaction.steps, reads, findings);
        }
        registers.find_lost_updates(findings);
        registers.order_versions(orders, findings);
        Ok(registers)
    }

    fn index_writes(&mut self) -> Result<(), HistoryError> {
        for (writer, transaction) in (0..).zip(&self.transactions.all) {
            let mut last: HashMap<u32, u32> = HashMap::new();
            for step in transaction.steps {
                let key = self.keys.number(step.key());
                let MicroOp::Write { key: name, value } = step else {
                    continue;
                };
                let index = transaction.index;
                if *value == Value::Nil {
                    let key = name.clone();
                    return Err(HistoryError::NilWrite { key, index });
                }
                let version = self.add_version(key, value, Some(writer))?;
                if let Some(other) = self.numbers.insert((key, value), version) {
                    let other = self.versions[other as usize].writer.unwrap_or(writer);
                    return Err(HistoryError::RepeatedWrite {
                        key: name.clone(),
                        value: value.clone(),
                        first: self.transactions.index(other),
                        second: index,
                    });
                }
                if let Some(before) = last.insert(key, version) {
                    self.versions[before as usize].last = false;
                }
            }
        }
        for key in 0..number(self.keys.len())? {
            let version = self.add_version(key, &Value::Nil, None)?;
            self.numbers.insert((key, &Value::Nil), version);
        }
        Ok(())
    }

    fn add_version(
        &mut self,
        key: u32,
        value: &'h Value,
        writer: Option<u32>,
    ) -> Result<u32, HistoryError> {
        let version = number(self.versions.len())?;
        self.versions.push(Version {
            key,
            value,
            writer,
            last: true,
            readers: Vec::new(),
        });
        Ok(version)
    }

    /// Stores the steps of a transaction: all, or only its writes if its reads are not known.
    fn take(&mut self, number: u32, steps: &'h [MicroOp], reads: bool, findings: &mut Findings) {
        // The last value that the transaction knows of each register.
        let mut known: HashMap<u32, &'h Value> = HashMap::new();
        let mut accesses: HashMap<u32, Access> = HashMap::new();
        for step in steps {
            let key = self.keys.number(step.key());
            let value = match step {
                MicroOp::Read { .. } if !reads => continue,
                MicroOp::Read {
                    seen: Seen::Value(value),
                    ..
                }
                | MicroOp::Write { value, .. } => value,
                _ => &Value::Nil,
            };
            let version = self.numbers.get(&(key, value)).copied();
            let access = accesses.entry(key).or_default();
            if matches!(step, MicroOp::Write { .. }) {
                access.wrote = version;
                known.insert(key, value);
                continue;
            }
            let before = known.insert(key, value);
            if before.is_none() && self.find_in_read(number, key, value, findings) {
                access.read = version;
            }
            if let Some(before) = before
                && before != value
            {
                let writer = version.and_then(|v| self.versions[v as usize].writer);
                if writer != Some(number) {
                    self.find_in_read(number, key, value, findings);
                }
                let operations = [number];
                findings.add(Anomaly::Internal, || {
                    finding(self.transactions, Anomaly::Internal, &operations, |names| {
                        let key = step.key();
                        format!("{} read {key} = {value}, after it had {before}", names[0])
                    })
                });
            }
        }
        let mut accesses: Vec<_> = accesses.into_iter().collect();
        accesses.sort_unstable_by_key(|(key, _)| *key);
        for (_, access) in &accesses {
            if let Some(read) = access.read {
                self.versions[read as usize].readers.push(number);
            }
        }
        self.accesses[number as usize] = accesses;
    }

    /// Finds the anomaly in a read of a value that its transaction had not written yet. Returns
    /// whether the value is a committed version.
    fn find_in_read(
        &mut self,
        reader: u32,
        key: u32,
        value: &'h Value,
        findings: &mut Findings,
    ) -> bool {
        let name = self.name(key);
        let Some(version) = self.numbers.get(&(key, value)).copied() else {
            findings.add(Anomaly::GarbageRead, || {
                finding(
                    self.transactions,
                    Anomaly::GarbageRead,
                    &[reader],
                    |names| format!("{} read {name} = {value}, but nobody wrote that", names[0]),
                )
            });
            return false;
        };
        let version = &self.versions[version as usize];
        let Some(writer) = version.writer else {
            return true;
        };
        let (anomaly, reason) = match self.transactions.all[writer as usize].status {
            _ if writer == reader => (Anomaly::FutureRead, "before it wrote that"),
            Status::Aborted => (Anomaly::G1a, "and failed"),
            status => {
                self.live[writer as usize] |= status == Status::Indeterminate;
                if version.last {
                    return true;
                }
                (Anomaly::G1b, "and then another value")
            }
        };
        let operations = [reader, writer];
        let operations = &operations[..if writer == reader { 1 } else { 2 }];
        findings.add(anomaly, || {
            finding(self.transactions, anomaly, operations, |names| {
                let mut text = format!("{} read {name} = {value}", names[0]);
                if let Some(writer) = names.get(1) {
                    text.push_str(&format!(", which {writer} wrote"));
                }
                text.push_str(&format!(" {reason}"));
                text
            })
        });
        false
    }

    fn find_lost_updates(&self, findings: &mut Findings) {
        for version in &self.versions {
            let updates: Vec<u32> = version
                .readers
                .iter()
                .copied()
                .filter(|reader| self.access(*reader, version.key).wrote.is_some())
                .collect();
            if updates.len() > 1 {
                findings.add(Anomaly::LostUpdate, || {
                    finding(self.transactions, Anomaly::LostUpdate, &updates, |names| {
                        let (key, value) = (self.name(version.key), version.value);
                        let names = names.join(", ");
                        format!("{names} all read {key} = {value} and wrote another value")
                    })
                });
            }
        }
    }

    /// Finds pairs of versions, of which the second follows the first. If the versions of a key
    /// form a cycle, only pairs from single transactions are kept, or none if these form a cycle
    /// already.
    fn order_versions(&mut self, orders: KeyOrders, findings: &mut Findings) {
        let mut certain = Vec::new();
        for (number, accesses) in (0_u32..).zip(&self.accesses) {
            for (_, access) in accesses {
                if let (Some(read), Some(wrote), true) =
                    (access.read, access.wrote, self.live[number as usize])
                {
                    certain.push((read, wrote));
                }
            }
        }
        let mut later = certain.clone();
        if orders.sequential {
            self.sequential(&mut later);
        }
        if orders.linearizable {
            self.linearizable(&mut later);
        }
        later.sort_unstable();
        later.dedup();
        let bad = self.cyclic_keys(&later, findings);
        if !bad.is_empty() {
            let mut unsure = Findings::new(0);
            let worse = self.cyclic_keys(&certain, &mut unsure);
            let key = |pair: &(u32, u32)| self.versions[pair.0 as usize].key;
            later.retain(|pair| !bad.contains(&key(pair)));
            certain.retain(|pair| bad.contains(&key(pair)) && !worse.contains(&key(pair)));
            later.append(&mut certain);
            later.sort_unstable();
            later.dedup();
        }
        self.later = later;
    }

    /// Returns the keys whose versions form a cycle.
    fn cyclic_keys(&self, later: &[(u32, u32)], findings: &mut Findings) -> Vec<u32> {
        let count = u32::try_from(self.versions.len()).unwrap_or(u32::MAX);
        let mut graph = Builder::new(count);
        for (from, to) in later {
            graph.link(*from, *to, WW, NO_KEY);
            // The initial value comes before all others.
            if self.versions[*to as usize].writer.is_none() {
                graph.link(*to, *from, WW, NO_KEY);
            }
        }
        let mut keys = Vec::new();
        for versions in graph.build().components(ALL) {
            let key = self.versions[versions[0] as usize].key;
            keys.push(key);
            findings.add(Anomaly::CyclicVersions, || {
                let mut values: Vec<&Value> = versions
                    .iter()
                    .map(|v| self.versions[*v as usize].value)
                    .collect();
                values.sort_unstable();
                values.truncate(8);
                let writers = versions
                    .iter()
                    .filter_map(|v| self.versions[*v as usize].writer);
                let writers: Vec<u32> = writers.take(8).collect();
                finding(self.transactions, Anomaly::CyclicVersions, &writers, |_| {
                    let values: Vec<String> = values.iter().map(ToString::to_string).collect();
                    let (key, values) = (self.name(key), values.join(", "));
                    format!("values of {key} follow each other in a cycle: {values}")
                })
            });
        }
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Orders versions of a key as each process sees them.
    fn sequential(&self, later: &mut Vec<(u32, u32)>) {
        let mut last: HashMap<(i64, u32), u32> = HashMap::new();
        for (number, transaction) in (0_u32..).zip(&self.transactions.all) {
            let Some(process) = transaction.process else {
                continue;
            };
            if !self.live[number as usize] {
                continue;
            }
            for (key, access) in &self.accesses[number as usize] {
                let before = last.get(&(process, *key)).copied();
                if let (Some(before), Some(first)) = (before, access.read.or(access.wrote)) {
                    push_different(later, before, first);
                }
                if let (Some(left), Status::Committed) =
                    (access.wrote.or(access.read), transaction.status)
                {
                    last.insert((process, *key), left);
                }
            }
        }
    }

    /// Orders versions by real time: transactions that begin after a commit see its version, or a
    /// later one. Per key, it keeps the committed transactions that no other committed one lies
    /// behind: no more than were in progress at one time.
    fn linearizable(&self, later: &mut Vec<(u32, u32)>) {
        let mut over: Vec<Vec<u32>> = vec![Vec::new(); self.keys.len()];
        let mut before: HashMap<(u32, u32), Vec<u32>> = HashMap::new();
        for event in &self.transactions.events {
            match *event {
                Event::Began(number) if self.live[number as usize] => {
                    for (key, access) in &self.accesses[number as usize] {
                        let over = &over[*key as usize];
                        let Some(first) = access.read.or(access.wrote) else {
                            continue;
                        };
                        for earlier in over {
                            let earlier = self.access(*earlier, *key);
                            if let Some(left) = earlier.wrote.or(earlier.read) {
                                push_different(later, left, first);
                            }
                        }
                        before.insert((number, *key), over.clone());
                    }
                }
                Event::Began(_) => {}
                Event::Committed(number) => {
                    for (key, access) in &self.accesses[number as usize] {
                        // Without a version of its own, it can't stand for the transactions before
                        // it.
                        if access.wrote.or(access.read).is_none() {
                            continue;
                        }
                        let gone = before.remove(&(number, *key)).unwrap_or_default();
                        let over = &mut over[*key as usize];
                        over.retain(|other| !gone.contains(other));
                        over.push(number);
                    }
                }
            }
        }
    }

    /// Makes the graph of dependencies.
    pub fn graph(&self, orders: Orders) -> Result<Graph, HistoryError> {
        let mut graph = Builder::new(number(self.transactions.all.len())?);
        for version in &self.versions {
            if let Some(writer) = self.live_writer(version) {
                for reader in &version.readers {
                    graph.link(writer, *reader, WR, version.key);
                }
            }
        }
        for same in self.later.chunk_by(|a, b| a.0 == b.0) {
            let version = &self.versions[same[0].0 as usize];
            let writers = same
                .iter()
                .map(|(_, later)| &self.versions[*later as usize]);
            let writers = writers
                .filter_map(|later| self.live_writer(later))
                .collect();
            self.link_version(version, writers, &mut graph);
        }
        let mut writers: Vec<Vec<u32>> = vec![Vec::new(); self.keys.len()];
        for version in &self.versions {
            match self.live_writer(version) {
                Some(writer) if version.last => writers[version.key as usize].push(writer),
                _ => {}
            }
        }
        for initial in self
            .versions
            .iter()
            .filter(|version| version.writer.is_none())
        {
            let writers = std::mem::take(&mut writers[initial.key as usize]);
            self.link_version(initial, writers, &mut graph);
        }
        link_orders(&mut graph, self.transactions, &self.live, orders);
        Ok(graph.build())
    }

    /// Links the writer and the readers of a version with the writers of later ones.
    fn link_version(&self, version: &Version<'_>, writers: Vec<u32>, graph: &mut Builder) {
        let writer = self.live_writer(version);
        if writers.is_empty() || (writer.is_none() && version.readers.is_empty()) {
            return;
        }
        let mut fan = Fan::new(graph, writers);
        if let Some(writer) = writer {
            fan.link(graph, writer, WW, version.key);
        }
        for reader in &version.readers {
            fan.link(graph, *reader, RW, version.key);
        }
    }

    fn live_writer(&self, version: &Version<'_>) -> Option<u32> {
        version.writer.filter(|writer| self.live[*writer as usize])
    }

    fn access(&self, transaction: u32, key: u32) -> Access {
        let accesses = &self.accesses[transaction as usize];
        let place = accesses.binary_search_by_key(&key, |(key, _)| *key);
        place.map_or_else(|_| Access::default(), |place| accesses[place].1)
    }

    fn name(&self, key: u32) -> &'h Value {
        self.keys.name(key).unwrap_or(&Value::Nil)
    }

    fn value(&self, version: Option<u32>) -> &'h Value {
        version.map_or(&Value::Nil, |version| self.versions[version as usize].value)
    }
}

fn push_different(pairs: &mut Vec<(u32, u32)>, from: u32, to: u32) {
    if from != to {
        pairs.push((from, to));
    }
}

impl Explain for Registers<'_> {
    fn key(&self, key: u32) -> Option<&Value> {
        self.keys.name(key)
    }

    fn reason(&self, relation: Relation, key: u32, from: u32, to: u32, names: [&str; 2]) -> String {
        let [first, second] = names;
        let name = self.name(key);
        let (a, b) = (self.access(from, key), self.access(to, key));
        let wrote = self.value(b.wrote);
        // The reason why the second transaction's write is the later one.
        let how = |before: Option<u32>| match before {
            Some(before) if self.versions[before as usize].writer.is_none() => {
                "the initial value comes before all others".to_owned()
            }
            Some(_) if b.read == before => format!("{second} read that before it wrote"),
            _ => format!("{name} had them in this order"),
        };
        match relation {
            Relation::WriteWrite => {
                let how = how(a.wrote);
                let before = self.value(a.wrote);
                format!("{second} wrote {name} = {wrote} after {first} wrote {before}: {how}")
            }
            Relation::WriteRead => {
                let seen = self.value(b.read);
                format!("{second} read {name} = {seen}, which {first} wrote")
            }
            _ => {
                let how = how(a.read);
                let seen = self.value(a.read);
                format!("{first} read {name} = {seen}, and {second} wrote {wrote} later: {how}")
            }
        }
    }
}
