//! How many grants a second the sequencer gives on one core.
//!
//! `cargo run --release -p braid-versions --example grants`
//!
//! Each grant includes reading the request's bytes, writing and reading the answer's, and the
//! release after the commit. Time is that of the processor (Linux), so other programs do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::time::Instant;

use braid_versions::{
    Access, Answer, Batch, Boot, Bytes, Cut, NodeNumber, Release, Released, Report, Reports,
    Request, Sequencer, TableNumber, Term,
};

const NODES: u16 = 4;
const GRANTS: u64 = 40_000;

/// Seconds of processor time that this process has used.
fn used(began: Instant) -> f64 {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanoseconds = stat.split(' ').next().and_then(|text| text.parse().ok());
    nanoseconds.map_or_else(|| began.elapsed().as_secs_f64(), |n: f64| n / 1e9)
}

/// The tables of a transaction: `reads` that it reads and one that it writes.
fn tables(number: u64, reads: u64, tables: u64) -> BTreeMap<TableNumber, Access> {
    let table = |n: u64| TableNumber(u32::try_from(n % tables).unwrap_or(0));
    let mut declared: BTreeMap<_, _> = (1..=reads)
        .map(|read| {
            (
                table(number.wrapping_mul(7).wrapping_add(read)),
                Access::Read,
            )
        })
        .collect();
    declared.insert(table(number.wrapping_mul(3)), Access::Write);
    declared
}

fn begin() -> Result<Sequencer, Box<dyn Error>> {
    let report = Report {
        term: Term(0),
        ends: BTreeMap::new(),
    };
    let members = (1..=NODES).map(|node| (NodeNumber(node), report.clone()));
    let reports: Reports = members.collect();
    let cut = Cut::new_sequencer(Term(0), NODES.into(), &reports, true)?;
    Ok(Sequencer::begin(&cut).ok_or("not a cut over everyone")?)
}

/// Gives the grants in messages of `joined` requests. Returns grants a second.
fn run(joined: u64, reads: u64, count: u64) -> Result<f64, Box<dyn Error>> {
    let mut sequencer = begin()?;
    let began = Instant::now();
    let (before, mut granted, mut first) = (used(began), 0, 1);
    let mut releases = vec![Vec::new(); usize::from(NODES)];
    while granted < GRANTS {
        for (node, releases) in (1..=NODES).zip(&mut releases) {
            let request = |number| Request {
                number,
                tables: tables(number.wrapping_add(node.into()), reads, count),
            };
            let batch = Batch {
                term: Term(1),
                node: NodeNumber(node),
                boot: Boot(1),
                low: first.max(joined + 1) - joined,
                requests: (first..first + joined).map(request).collect(),
                releases: std::mem::take(releases),
            };
            let batch = Batch::decode(&batch.encode())?;
            let answer = Answer::decode(&sequencer.receive(&batch, true).encode())?;
            for grant in &answer.grants {
                let written = grant.tables.iter().filter(|(_, g)| g.own.is_some());
                let written: BTreeSet<_> = written.map(|(table, _)| *table).collect();
                releases.push(Release {
                    number: grant.id.number,
                    released: Released::Committed(written),
                });
                granted += 1;
            }
        }
        first += joined;
    }
    let seconds = used(began) - before;
    #[expect(clippy::cast_precision_loss, reason = "a figure to print")]
    Ok(granted as f64 / seconds)
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("grants a second on one core (goal: 10,000)");
    for (joined, reads, count) in [
        (1, 2, 20),
        (16, 2, 20),
        (16, 8, 20),
        (16, 8, 200),
        (256, 2, 20),
    ] {
        let rate = run(joined, reads, count)?;
        println!(
            "{joined:>4} requests a message, {reads} tables read and 1 written of {count:>3}: {rate:>9.0}"
        );
    }
    Ok(())
}
