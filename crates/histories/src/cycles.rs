//! Finds cycles of dependencies, and names the worst that there is in each component.
//!
//! The classes are looked for from the worst on: a cycle of writes (G0), of writes and reads of
//! them (G1c), with anti-dependencies of which no two follow each other (G-single if it is one,
//! else G-nonadjacent), any (G2-item). First without orders, then with the order of processes, then
//! with real time. Once a class is found in a component, only worse ones are looked for with more
//! orders. Whether each class is there takes linear time; only the choice of the shortest cycle,
//! and of G-single before G-nonadjacent, is limited by [`BUDGET`].
#![expect(
    clippy::indexing_slicing,
    reason = "node numbers are indexes that the graph made"
)]

use std::fmt::Write as _;

use crate::anomaly::{Anomaly, Cycle, Orders};
use crate::graph::{
    ALL, Builder, Graph, Hop, Kinds, PROCESS, REALTIME, RELAY, RW, Search, WR, WW, shortest_cycle,
};
use crate::report::{Finding, Findings, Relation, Step};
use crate::transactions::{Event, Status, Transactions};
use crate::value::Value;

/// How many edges a search for a shorter cycle looks at in a component.
const BUDGET: usize = 3_000_000;

/// Names keys, and explains dependencies between transactions.
pub(crate) trait Explain {
    /// The name of a key.
    fn key(&self, key: u32) -> Option<&Value>;

    /// Says why `from` comes before `to`. `names` are how the report calls them.
    fn reason(&self, relation: Relation, key: u32, from: u32, to: u32, names: [&str; 2]) -> String;
}

/// Adds the order of processes and of real time to a graph.
///
/// Both are chains of relays, to which committed transactions lead when they are over, and which
/// lead to transactions that begin. `live` says of a transaction whether it counts.
pub(crate) fn link_orders(
    graph: &mut Builder,
    transactions: &Transactions<'_>,
    live: &[bool],
    orders: Orders,
) {
    if orders >= Orders::Process {
        link_processes(graph, transactions, live);
    }
    if orders >= Orders::Realtime {
        link_real_time(graph, transactions, live);
    }
}

fn link_processes(graph: &mut Builder, transactions: &Transactions<'_>, live: &[bool]) {
    let mut last = std::collections::HashMap::new();
    for (number, transaction) in (0..).zip(&transactions.all) {
        let Some(process) = transaction.process else {
            continue;
        };
        if !live[number as usize] {
            continue;
        }
        let before: Option<u32> = last.get(&process).copied();
        if let Some(before) = before {
            graph.link(before, number, PROCESS, crate::graph::NO_KEY);
        }
        // The end of an indeterminate transaction may come later than what its process does next.
        if transaction.status == Status::Committed {
            let after = graph.relay();
            graph.link(number, after, PROCESS, crate::graph::NO_KEY);
            if let Some(before) = before {
                graph.link(before, after, PROCESS, crate::graph::NO_KEY);
            }
            last.insert(process, after);
        }
    }
}

fn link_real_time(graph: &mut Builder, transactions: &Transactions<'_>, live: &[bool]) {
    let mut over: Vec<u32> = Vec::new();
    let mut last: Option<u32> = None;
    for event in &transactions.events {
        match event {
            Event::Committed(number) => over.push(*number),
            Event::Began(number) if live[*number as usize] => {
                if !over.is_empty() {
                    let relay = graph.relay();
                    for before in over.drain(..).chain(last) {
                        graph.link(before, relay, REALTIME, crate::graph::NO_KEY);
                    }
                    last = Some(relay);
                }
                if let Some(last) = last {
                    graph.link(last, *number, REALTIME, crate::graph::NO_KEY);
                }
            }
            Event::Began(_) => {}
        }
    }
}

/// Finds the cycles of a graph, with orders up to `orders`.
pub(crate) fn find(
    graph: &Graph,
    orders: Orders,
    transactions: &Transactions<'_>,
    explain: &impl Explain,
    findings: &mut Findings,
) {
    for component in graph.components(ALL) {
        let whole = graph.part(&component, ALL);
        let mut found = vec![NONE; whole.len()];
        let mut kinds = WW | WR | RW | RELAY;
        for (level, order) in [
            (Orders::Data, 0),
            (Orders::Process, PROCESS),
            (Orders::Realtime, REALTIME),
        ] {
            if level > orders {
                break;
            }
            kinds |= order;
            for nodes in whole.components(kinds) {
                let part = whole.part(&nodes, kinds);
                let known = nodes.iter().map(|node| found[*node as usize]).min();
                let known = known.unwrap_or(NONE);
                let Some((cycle, path)) = worst(&part, known) else {
                    continue;
                };
                for node in &nodes {
                    found[*node as usize] = rank(cycle);
                }
                let anomaly = Anomaly::Cycle(cycle, level);
                findings.add(anomaly, || {
                    describe(anomaly, &part, &path, transactions, explain)
                });
            }
        }
    }
}

/// Worse than no cycle.
const NONE: u8 = 4;

/// How bad a class is: all models that forbid one forbid those of lower ranks.
fn rank(cycle: Cycle) -> u8 {
    match cycle {
        Cycle::G0 => 0,
        Cycle::G1c => 1,
        Cycle::GSingle | Cycle::GNonadjacent => 2,
        Cycle::G2Item => 3,
    }
}

/// Returns the worst cycle of a graph, if it is worse than one of the rank `known`.
fn worst(graph: &Graph, known: u8) -> Option<(Cycle, Vec<Hop>)> {
    let others = ALL & !(WW | WR | RW);
    if known > rank(Cycle::G0)
        && let Some(path) = shortest_cycle(graph, WW | others, BUDGET)
    {
        return Some((Cycle::G0, path));
    }
    if known > rank(Cycle::G1c)
        && let Some(path) = shortest_cycle(graph, WW | WR | others, BUDGET)
    {
        return Some((Cycle::G1c, path));
    }
    if known > rank(Cycle::GSingle) {
        let alternating = graph.alternating();
        if let Some(path) = shortest_cycle(&alternating, ALL, BUDGET) {
            if let Some(path) = single(graph, WW | WR | others) {
                return Some((Cycle::GSingle, path));
            }
            let plain = |hop: &Hop| {
                let mut hop = *hop;
                hop.from /= 2;
                hop.edge.to /= 2;
                hop
            };
            return Some((Cycle::GNonadjacent, path.iter().map(plain).collect()));
        }
    }
    if known > rank(Cycle::G2Item)
        && let Some(path) = shortest_cycle(graph, ALL, BUDGET)
    {
        return Some((Cycle::G2Item, path));
    }
    None
}

/// Returns a shortest cycle of one anti-dependency and else edges of `kinds`.
fn single(graph: &Graph, kinds: Kinds) -> Option<Vec<Hop>> {
    let mut search = Search::new(graph, BUDGET);
    let mut best: Option<(u32, Vec<Hop>)> = None;
    for from in graph.nodes() {
        for edge in graph.edges(from).iter().filter(|edge| edge.kind == RW) {
            let limit = best.as_ref().map_or(u32::MAX, |(steps, _)| *steps);
            if limit == 1 || search.budget == 0 {
                break;
            }
            if let Some((steps, mut path)) = search.path(edge.to, from, kinds, limit) {
                path.insert(0, Hop { from, edge: *edge });
                best = Some((steps, path));
            }
        }
    }
    best.map(|(_, path)| path)
}

fn relation(kind: Kinds) -> Relation {
    match kind {
        WW => Relation::WriteWrite,
        WR => Relation::WriteRead,
        RW => Relation::ReadWrite,
        PROCESS => Relation::Process,
        _ => Relation::Realtime,
    }
}

fn describe(
    anomaly: Anomaly,
    graph: &Graph,
    path: &[Hop],
    transactions: &Transactions<'_>,
    explain: &impl Explain,
) -> Finding {
    // The hops of transactions; relays are passed through.
    let steps: Vec<(u32, Hop)> = path
        .iter()
        .filter(|hop| graph.is_transaction(hop.from))
        .map(|hop| (graph.origin[hop.from as usize], *hop))
        .collect();
    // T1 is the transaction that is first in the history.
    let start = (0..steps.len()).min_by_key(|place| steps[*place].0);
    let start = start.unwrap_or(0);
    let steps: Vec<_> = steps[start..].iter().chain(&steps[..start]).collect();

    // A walk may pass a transaction twice.
    let mut nodes: Vec<u32> = Vec::new();
    for (node, _) in &steps {
        if !nodes.contains(node) {
            nodes.push(*node);
        }
    }
    let name = |node: u32| {
        let place = nodes.iter().position(|known| *known == node);
        format!("T{}", place.unwrap_or(0) + 1)
    };
    let mut text = String::new();
    for node in &nodes {
        let _ = writeln!(text, "  {} = {}", name(*node), transactions.describe(*node));
    }
    let mut described = Vec::new();
    for (place, (from, hop)) in steps.iter().enumerate() {
        let to = steps[(place + 1) % steps.len()].0;
        let relation = relation(hop.edge.kind);
        let (first, second) = (name(*from), name(to));
        let names = [first.as_str(), second.as_str()];
        let reason = match relation {
            Relation::Process => format!("the process of {first} began {second} later"),
            Relation::Realtime => format!("{first} was over before {second} began"),
            _ => explain.reason(relation, hop.edge.key, *from, to, names),
        };
        let _ = write!(text, "  {first} < {second}, because {reason}");
        if place + 1 < steps.len() {
            text.push('\n');
        } else {
            text.push_str(": a contradiction");
        }
        described.push(Step {
            from: transactions.index(*from),
            to: transactions.index(to),
            relation,
            key: explain.key(hop.edge.key).cloned(),
            reason,
        });
    }
    Finding {
        anomaly,
        operations: nodes.iter().map(|node| transactions.index(*node)).collect(),
        steps: described,
        explanation: text,
    }
}
