//! Histories of lists: transactions append unique elements, and read whole lists.
//!
//! Each read of a list shows a prefix of its version order. So the longest read gives the order of
//! all elements that any transaction read. Elements of committed transactions that no transaction
//! read come after these: a reader that misses them came before their writers. With the order of
//! processes or of real time, that finds lost appends.
#![expect(
    clippy::indexing_slicing,
    reason = "transactions, keys and elements are numbered by this module"
)]

mod dependencies;

use std::collections::{HashMap, HashSet};

use crate::anomaly::Anomaly;
use crate::error::HistoryError;
use crate::format::write_list;
use crate::history::{MicroOp, Seen};
use crate::keys::Keys;
use crate::report::{Findings, finding};
use crate::transactions::{Status, Transactions, number};
use crate::value::Value;

/// Lists longer than this are shortened in explanations.
const MOST_ELEMENTS: usize = 12;

/// An append.
struct Append {
    transaction: u32,
    /// Whether its transaction appends nothing more to the list.
    last: bool,
}

/// A read of a committed transaction.
struct Read<'h> {
    transaction: u32,
    list: &'h [Value],
    /// How many of the elements are of other transactions. Only set for the first read of the list
    /// in its transaction.
    external: Option<usize>,
    /// Whether its transaction appends to the list later.
    updates: bool,
}

/// Reads of a list, and the order of its elements.
#[derive(Default)]
struct List<'h> {
    reads: Vec<Read<'h>>,
    appends: Vec<(&'h Value, u32)>,
    /// The longest read.
    order: &'h [Value],
    /// Whether `order` has no element twice.
    usable: bool,
}

/// The analysis of a history of lists.
pub(crate) struct Lists<'h> {
    transactions: &'h Transactions<'h>,
    keys: Keys<'h>,
    appends: HashMap<(u32, &'h Value), Append>,
    lists: Vec<List<'h>>,
    /// Whether a transaction is committed, or was seen to be.
    pub live: Vec<bool>,
}

impl<'h> Lists<'h> {
    /// Finds all anomalies but cycles.
    pub fn analyze(
        transactions: &'h Transactions<'h>,
        findings: &mut Findings,
    ) -> Result<Self, HistoryError> {
        let mut lists = Self {
            transactions,
            keys: Keys::default(),
            appends: HashMap::new(),
            lists: Vec::new(),
            live: Vec::new(),
        };
        let all = transactions.all.iter();
        lists.live = all.map(|t| t.status == Status::Committed).collect();
        lists.index_appends()?;
        for (number, transaction) in (0..).zip(&transactions.all) {
            if transaction.status == Status::Committed {
                lists.read_transaction(number, transaction.steps, findings);
            }
        }
        for key in 0..number(lists.lists.len())? {
            lists.order_list(key, findings);
            lists.find_lost_updates(key, findings);
        }
        Ok(lists)
    }

    fn index_appends(&mut self) -> Result<(), HistoryError> {
        for (number, transaction) in (0..).zip(&self.transactions.all) {
            let mut last: HashMap<u32, &'h Value> = HashMap::new();
            for step in transaction.steps {
                let key = self.keys.number(step.key());
                let MicroOp::Append { key: name, value } = step else {
                    continue;
                };
                let append = Append {
                    transaction: number,
                    last: true,
                };
                if let Some(other) = self.appends.insert((key, value), append) {
                    return Err(HistoryError::RepeatedWrite {
                        key: name.clone(),
                        value: value.clone(),
                        first: self.transactions.index(other.transaction),
                        second: transaction.index,
                    });
                }
                if let Some(before) = last.insert(key, value)
                    && let Some(before) = self.appends.get_mut(&(key, before))
                {
                    before.last = false;
                }
            }
        }
        self.lists.resize_with(self.keys.len(), List::default);
        for (number, transaction) in (0..).zip(&self.transactions.all) {
            for step in transaction.steps {
                if let MicroOp::Append { key, value } = step {
                    let key = self.keys.number(key);
                    self.lists[key as usize].appends.push((value, number));
                }
            }
        }
        Ok(())
    }

    /// Stores the reads of a committed transaction, and compares them with its other steps.
    fn read_transaction(&mut self, number: u32, steps: &'h [MicroOp], findings: &mut Findings) {
        struct Own<'h> {
            /// The last read.
            base: Option<&'h [Value]>,
            /// Elements that were appended since.
            appended: Vec<&'h Value>,
            /// The position of the first read in `List::reads`, if nothing was appended before it.
            first: Option<usize>,
        }
        let mut own: HashMap<u32, Own<'h>> = HashMap::new();
        for step in steps {
            let key = self.keys.number(step.key());
            let known = own.get_mut(&key);
            let list: &'h [Value] = match step {
                MicroOp::Append { value, .. } => {
                    if let Some(own) = known {
                        if own.base.is_some_and(|base| base.contains(value)) {
                            self.find(findings, Anomaly::FutureRead, &[number], |names| {
                                let key = step.key();
                                format!("{} read {value} in {key} before it appended it", names[0])
                            });
                        }
                        if let Some(first) = own.first {
                            self.lists[key as usize].reads[first].updates = true;
                        }
                        own.appended.push(value);
                    } else {
                        let first = Own {
                            base: None,
                            appended: vec![value],
                            first: None,
                        };
                        own.insert(key, first);
                    }
                    continue;
                }
                MicroOp::Read {
                    seen: Seen::List(list),
                    ..
                } => list,
                _ => &[],
            };
            let reads = &mut self.lists[key as usize].reads;
            let mut read = Read {
                transaction: number,
                list,
                external: Some(list.len()),
                updates: false,
            };
            let mut first = None;
            if let Some(own) = known {
                first = own.first;
                let base = own.base.unwrap_or(&[]);
                let from = list.len().checked_sub(own.appended.len());
                let kept = from
                    .map(|from| list.split_at(from))
                    .is_some_and(|(begin, end)| {
                        end.iter().eq(own.appended.iter().copied())
                            && (own.base.is_none() || begin == base)
                    });
                read.external = from.filter(|_| own.base.is_none() && kept);
                reads.push(read);
                if !kept {
                    let appended: Vec<Value> = own.appended.iter().copied().cloned().collect();
                    self.find(findings, Anomaly::Internal, &[number], |names| {
                        let mut text = format!("{} read ", names[0]);
                        write_read(&mut text, step.key(), list);
                        text.push_str(", after it had ");
                        if own.base.is_some() {
                            text.push_str("read ");
                            write_list(&mut text, base, MOST_ELEMENTS);
                        }
                        if own.base.is_some() && !appended.is_empty() {
                            text.push_str(" and ");
                        }
                        if !appended.is_empty() {
                            text.push_str("appended ");
                            write_list(&mut text, &appended, MOST_ELEMENTS);
                        }
                        text
                    });
                }
            } else {
                first = first.or(Some(reads.len()));
                reads.push(read);
            }
            let read = Own {
                base: Some(list),
                appended: Vec::new(),
                first,
            };
            own.insert(key, read);
        }
    }

    /// Finds the order of a list, reads that do not fit it, and reads of elements that must not be
    /// visible.
    fn order_list(&mut self, key: u32, findings: &mut Findings) {
        let mut reads = std::mem::take(&mut self.lists[key as usize].reads);
        let longest = reads
            .iter()
            .max_by_key(|read| (read.list.len(), u32::MAX - read.transaction));
        let Some((order, longest)) = longest.map(|read| (read.list, read.transaction)) else {
            return;
        };
        // The elements of aborted transactions, and of no transaction, that a read of each length
        // sees.
        let mut aborted: Vec<(usize, u32)> = Vec::new();
        let mut garbage: Vec<usize> = Vec::new();
        let mut usable = true;
        let mut elements = HashSet::with_capacity(order.len());
        for (place, element) in order.iter().enumerate() {
            usable &= elements.insert(element);
            match self.see(key, element) {
                None => garbage.push(place),
                Some(writer) if self.status(writer) == Status::Aborted => {
                    aborted.push((place, writer));
                }
                Some(_) => {}
            }
        }
        let list = &mut self.lists[key as usize];
        list.order = order;
        list.usable = usable;
        for read in &mut reads {
            if order.starts_with(read.list) {
                let length = read.list.len();
                for (place, writer) in aborted.iter().take_while(|(place, _)| *place < length) {
                    self.find_aborted(key, read, &order[*place], *writer, findings);
                }
                for place in garbage.iter().take_while(|place| **place < length) {
                    self.find_garbage(key, read, &order[*place], findings);
                }
            } else {
                let operations = [read.transaction, longest];
                self.find(findings, Anomaly::IncompatibleOrder, &operations, |names| {
                    let mut text = format!("{} read ", names[0]);
                    write_read(&mut text, self.name(key), read.list);
                    text.push_str(&format!(", {} read ", names[1]));
                    write_read(&mut text, self.name(key), order);
                    text
                });
                for element in read.list {
                    match self.see(key, element) {
                        None => self.find_garbage(key, read, element, findings),
                        Some(writer) if self.status(writer) == Status::Aborted => {
                            self.find_aborted(key, read, element, writer, findings);
                        }
                        Some(_) => {}
                    }
                }
            }
            self.find_twice(key, read, !usable, findings);
            if self.find_intermediate(key, read, findings) {
                // Dependencies are between final versions.
                read.external = None;
            }
        }
        self.lists[key as usize].reads = reads;
    }

    /// Returns the transaction that appended an element. If its outcome is not known, it counts as
    /// committed: the element was read.
    fn see(&mut self, key: u32, element: &'h Value) -> Option<u32> {
        let writer = self.appends.get(&(key, element))?.transaction;
        if self.status(writer) == Status::Indeterminate {
            self.live[writer as usize] = true;
        }
        Some(writer)
    }

    fn find_aborted(
        &self,
        key: u32,
        read: &Read<'_>,
        element: &Value,
        writer: u32,
        findings: &mut Findings,
    ) {
        let operations = [read.transaction, writer];
        self.find(findings, Anomaly::G1a, &operations, |names| {
            let mut text = format!("{} read ", names[0]);
            write_read(&mut text, self.name(key), read.list);
            text.push_str(&format!(", but {} appended {element} and failed", names[1]));
            text
        });
    }

    fn find_garbage(&self, key: u32, read: &Read<'_>, element: &Value, findings: &mut Findings) {
        self.find(
            findings,
            Anomaly::GarbageRead,
            &[read.transaction],
            |names| {
                let mut text = format!("{} read ", names[0]);
                write_read(&mut text, self.name(key), read.list);
                text.push_str(&format!(", but nobody appended {element}"));
                text
            },
        );
    }

    /// Finds elements that a read has twice.
    fn find_twice(&self, key: u32, read: &Read<'h>, doubtful: bool, findings: &mut Findings) {
        let list = &self.lists[key as usize];
        if doubtful || !list.order.starts_with(read.list) {
            let mut elements = HashSet::new();
            if let Some(twice) = read.list.iter().find(|element| !elements.insert(*element)) {
                self.find(
                    findings,
                    Anomaly::DuplicateElements,
                    &[read.transaction],
                    |names| {
                        let mut text = format!("{} read ", names[0]);
                        write_read(&mut text, self.name(key), read.list);
                        text.push_str(&format!(", which has {twice} twice"));
                        text
                    },
                );
            }
        }
    }

    /// Returns whether a read shows a list to which its writer appended more in the same
    /// transaction.
    fn find_intermediate(&self, key: u32, read: &Read<'h>, findings: &mut Findings) -> bool {
        if let Some(length) = read.external
            && let Some(last) = read.list[..length].last()
            && let Some(append) = self.appends.get(&(key, last))
            && !append.last
            && append.transaction != read.transaction
        {
            let operations = [read.transaction, append.transaction];
            self.find(findings, Anomaly::G1b, &operations, |names| {
                let mut text = format!("{} read ", names[0]);
                write_read(&mut text, self.name(key), read.list);
                text.push_str(&format!(
                    ", but {last} is not the last that {} appended",
                    names[1]
                ));
                text
            });
            return true;
        }
        false
    }

    /// Finds transactions that read the same version and then append.
    fn find_lost_updates(&self, key: u32, findings: &mut Findings) {
        let list = &self.lists[key as usize];
        let mut updates: Vec<(usize, u32, &[Value])> = list
            .reads
            .iter()
            .filter(|read| read.updates && list.order.starts_with(read.list))
            .map(|read| (read.list.len(), read.transaction, read.list))
            .collect();
        updates.sort_unstable();
        for same in updates.chunk_by(|a, b| a.0 == b.0) {
            if same.len() > 1 {
                let operations: Vec<u32> = same.iter().map(|update| update.1).collect();
                self.find(findings, Anomaly::LostUpdate, &operations, |names| {
                    let mut text = format!("{} all read ", names.join(", "));
                    write_read(&mut text, self.name(key), same[0].2);
                    text.push_str(" and appended to it");
                    text
                });
            }
        }
    }

    fn status(&self, transaction: u32) -> Status {
        self.transactions.all[transaction as usize].status
    }

    fn name(&self, key: u32) -> &'h Value {
        self.keys.name(key).unwrap_or(&Value::Nil)
    }

    fn find(
        &self,
        findings: &mut Findings,
        anomaly: Anomaly,
        transactions: &[u32],
        text: impl FnOnce(&[String]) -> String,
    ) {
        findings.add(anomaly, || {
            finding(self.transactions, anomaly, transactions, text)
        });
    }
}

fn write_read(text: &mut String, key: &Value, list: &[Value]) {
    text.push_str(&format!("{key} = "));
    write_list(text, list, MOST_ELEMENTS);
}
