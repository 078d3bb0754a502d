//! Dependencies between transactions over lists, and the reasons for them.
#![expect(
    clippy::indexing_slicing,
    reason = "transactions, keys and elements are numbered by the module above"
)]

use std::collections::HashSet;

use super::{List, Lists, write_read};
use crate::anomaly::Orders;
use crate::cycles::{Explain, link_orders};
use crate::error::HistoryError;
use crate::graph::{Builder, Fan, Graph, RW, WR, WW};
use crate::report::Relation;
use crate::transactions::number;
use crate::value::Value;

impl<'h> Lists<'h> {
    /// Makes the graph of dependencies.
    pub fn graph(&self, orders: Orders) -> Result<Graph, HistoryError> {
        let mut graph = Builder::new(number(self.transactions.all.len())?);
        for (key, list) in (0..).zip(&self.lists) {
            self.link_list(key, list, &mut graph);
        }
        link_orders(&mut graph, self.transactions, &self.live, orders);
        Ok(graph.build())
    }

    fn link_list(&self, key: u32, list: &List<'h>, graph: &mut Builder) {
        let live = |element: &'h Value| {
            let writer = self.appends.get(&(key, element))?.transaction;
            self.live[writer as usize].then_some(writer)
        };
        let order: Vec<Option<u32>> = list.order.iter().map(live).collect();
        for read in &list.reads {
            if let Some(length) = read.external
                && let Some(writer) = read.list[..length].last().and_then(live)
            {
                graph.link(writer, read.transaction, WR, key);
            }
        }
        if !list.usable && !list.order.is_empty() {
            return;
        }
        let mut last = None;
        for writer in order.iter().flatten().copied() {
            if let Some(last) = last {
                graph.link(last, writer, WW, key);
            }
            last = Some(writer);
        }
        let mut unseen = self.unseen(list);
        let mut fan = (!unseen.is_empty()).then(|| Fan::new(graph, std::mem::take(&mut unseen)));
        if let (Some(fan), Some(last)) = (&mut fan, last) {
            fan.link(graph, last, WW, key);
        }
        // The writer that follows each length of the list.
        let mut next = vec![None; order.len() + 1];
        for place in (0..order.len()).rev() {
            next[place] = order[place].or(next[place + 1]);
        }
        for read in &list.reads {
            let Some(length) = read.external else {
                continue;
            };
            if !list.order.starts_with(&read.list[..length]) {
                continue;
            }
            if let Some(writer) = next[length] {
                graph.link(read.transaction, writer, RW, key);
            } else if let Some(fan) = &mut fan {
                fan.link(graph, read.transaction, RW, key);
            }
        }
    }

    /// Returns the writers of elements that are committed and in no read.
    fn unseen(&self, list: &List<'h>) -> Vec<u32> {
        let mut seen: HashSet<&Value> = list.order.iter().collect();
        for read in &list.reads {
            if !list.order.starts_with(read.list) {
                seen.extend(read.list);
            }
        }
        let mut writers: Vec<u32> = list
            .appends
            .iter()
            .filter(|(element, writer)| self.live[*writer as usize] && !seen.contains(element))
            .map(|(_, writer)| *writer)
            .collect();
        writers.dedup();
        writers
    }
}

impl Explain for Lists<'_> {
    fn key(&self, key: u32) -> Option<&Value> {
        self.keys.name(key)
    }

    fn reason(&self, relation: Relation, key: u32, from: u32, to: u32, names: [&str; 2]) -> String {
        let [first, second] = names;
        let name = self.name(key);
        let list = &self.lists[key as usize];
        let place = |element: &Value| list.order.iter().position(|other| other == element);
        let appends = |transaction: u32| {
            let appends = list.appends.iter().filter(move |(_, t)| *t == transaction);
            appends.map(move |(element, _)| (place(element).unwrap_or(usize::MAX), *element))
        };
        let external = |transaction: u32| {
            let mut reads = list
                .reads
                .iter()
                .filter(move |r| r.transaction == transaction);
            reads.find_map(|read| read.external.map(|length| &read.list[..length]))
        };
        match relation {
            Relation::WriteWrite => {
                // The nearest pair: what the second appended first after something of the first.
                let pair = appends(to).filter_map(|(later, b)| {
                    let before = appends(from).filter(|(earlier, _)| *earlier < later);
                    before
                        .max_by_key(|(earlier, _)| *earlier)
                        .map(|(_, a)| (later, a, b))
                });
                match pair.min_by_key(|(later, ..)| *later) {
                    Some((usize::MAX, a, b)) => format!(
                        "{second} appended {b} to {name}, which no read of {name} has, \
                         and {first} appended {a}, which a read has"
                    ),
                    Some((_, a, b)) => {
                        format!("{second} appended {b} to {name} after {first} appended {a}")
                    }
                    None => format!("{second} appended to {name} after {first}"),
                }
            }
            Relation::WriteRead => {
                let seen = external(to)
                    .and_then(<[Value]>::last)
                    .unwrap_or(&Value::Nil);
                format!("{second} read {name} with {seen} at its end, which {first} appended")
            }
            _ => {
                let seen = external(from).unwrap_or(&[]);
                let missed = appends(to).filter(|(place, _)| *place >= seen.len());
                let (_, missed) = missed
                    .min_by_key(|(place, _)| *place)
                    .unwrap_or((0, &Value::Nil));
                let mut text = format!("{first} read ");
                write_read(&mut text, name, seen);
                text.push_str(&format!(", without {missed}, which {second} appended"));
                text
            }
        }
    }
}
