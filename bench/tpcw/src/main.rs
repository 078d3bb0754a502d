//! TPC-W on 1 to 64 simulated nodes, with the mixes, numbers of clients and categories of the
//! report *Distributed Versioning: Scaling Back-End Database through Replication in Asynchronous
//! Rust*.
//!
//! ```text
//! braid-tpcw               prints tables, writes its chart
//! braid-tpcw one NODES CLIENTS MIX [single] [early] [writers] [plain] [joins]
//! ```
//!
//! Grants and waits are those of `crates/versions`. Costs are in `costs.json`. Seeds are fixed, and
//! there is no clock.
#![forbid(unsafe_code)]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a bench: it may panic, and its numbers are small"
)]

mod chart;
mod cluster;
mod costs;
mod interactions;
mod processors;

use std::thread;

use chart::Row;
use cluster::{Outcome, Setup, Writers, run};
use costs::Costs;
use interactions::{Interaction, MIXES, Mix};

/// Numbers of nodes and clients, as the report has them.
const NODES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const CLIENTS: [usize; 10] = [1, 5, 10, 20, 40, 80, 100, 200, 400, 800];
/// The report's limit of the mean latency for a peak, in seconds.
const LIMIT: f64 = 0.2;

fn setup(nodes: usize, clients: usize, mix: Mix) -> Setup {
    Setup {
        nodes,
        clients,
        mix,
        is_versioned: true,
        single_read: true,
        early_release: true,
        joins: false,
        writers: Writers::Everywhere,
        // As the report's machines.
        processors: 4,
        interactions: if nodes < 16 { 3_000 } else { 1_500 },
    }
}

/// The highest throughput within the limit, with its number of clients.
fn peak(outcomes: &[Outcome]) -> (f64, usize) {
    let within = outcomes
        .iter()
        .zip(CLIENTS)
        .filter(|(outcome, _)| outcome.latency <= LIMIT);
    within.fold((0.0, 0), |best, (outcome, clients)| {
        if outcome.throughput > best.0 {
            (outcome.throughput, clients)
        } else {
            best
        }
    })
}

struct Bench {
    costs: Costs,
    interactions: Vec<Interaction>,
}

impl Bench {
    /// Outcomes by number of nodes and of clients.
    fn sweep(
        &self,
        title: &str,
        change: &(dyn Fn(&mut Setup) + Sync),
        mix: Mix,
    ) -> Vec<Vec<Outcome>> {
        println!("\n{title}");
        println!(
            "{:>6} {:>9} {:>8} {:>7} {:>9} {:>8} {:>9} {:>6} {:>6}",
            "nodes", "peak/s", "clients", "times", "latency", "wait", "writes/s", "busy", "last"
        );
        let mut all: Vec<Vec<Outcome>> = Vec::new();
        for nodes in NODES {
            let one = |clients| {
                let mut setup = setup(nodes, clients, mix);
                change(&mut setup);
                run(setup, &self.costs, &self.interactions)
            };
            // One thread for each half: few clients take as long as many, as nothing overlaps.
            let half = CLIENTS.len() / 2;
            let outcomes = thread::scope(|scope| {
                let second = scope.spawn(move || CLIENTS[half..].iter().map(|c| one(*c)).collect());
                let first: Vec<Outcome> = CLIENTS[..half].iter().map(|c| one(*c)).collect();
                let second: Vec<Outcome> = second.join().unwrap();
                [first, second].concat()
            });
            all.push(outcomes);
            let (best, clients) = peak(all.last().unwrap());
            let at = CLIENTS
                .iter()
                .position(|count| *count == clients)
                .unwrap_or(0);
            let Outcome {
                latency,
                wait,
                busy,
                writes,
                ..
            } = all.last().unwrap()[at];
            println!(
                "{nodes:>6} {best:>9.0} {clients:>8} {:>7.2} {:>7.1}ms {:>6.1}ms {writes:>9.0} {:>5.0}% {:>5.0}%",
                best / peak(&all[0]).0,
                latency * 1e3,
                wait * 1e3,
                busy[0] * 100.0,
                busy[1] * 100.0
            );
        }
        all
    }

    fn all(&self) {
        let mut rows = Vec::new();
        // Best of the report: databases and multiple of one (sections 5.1.1 to 5.1.3).
        let report = [(4, 1.29), (16, 1.34), (8, 1.22)];
        for (place, mix) in MIXES.into_iter().enumerate() {
            let plain = CLIENTS.map(|clients| {
                let mut setup = setup(1, clients, mix);
                setup.is_versioned = false;
                run(setup, &self.costs, &self.interactions)
            });
            let name = mix.name();
            println!(
                "\n{name}, one node without versions: peak {:.0} at {} clients",
                peak(&plain).0,
                peak(&plain).1
            );
            let title = format!("figure {}, {name}", 8 + place);
            let everywhere = self.sweep(&title, &|_| {}, mix);
            let at_one = format!("{title}, writers at the sequencer's node");
            let at_one = self.sweep(&at_one, &|setup| setup.writers = Writers::AtSequencer, mix);
            rows.push(row(title, &everywhere, Some(&at_one), Some(report[place])));
        }
        let title = "figure 11, browsing, without single reads";
        let without = self.sweep(title, &|setup| setup.single_read = false, Mix::Browsing);
        rows.push(row(title.to_owned(), &without, None, None));
        let title = "figure 12, ordering, without early release";
        let without = self.sweep(title, &|setup| setup.early_release = false, Mix::Ordering);
        rows.push(row(title.to_owned(), &without, None, None));
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/transactions-benchmark",
            ".svg"
        );
        std::fs::write(path, chart::draw(&rows)).unwrap();
    }
}

fn row(
    title: String,
    all: &[Vec<Outcome>],
    at_one: Option<&Vec<Vec<Outcome>>>,
    report: Option<(usize, f64)>,
) -> Row {
    let one = peak(&all[0]).0;
    let peaks = |all: &[Vec<Outcome>]| all.iter().map(|outcomes| peak(outcomes).0 / one).collect();
    let mut lines = vec![("writers at all nodes", peaks(all))];
    lines.extend(at_one.map(|all| ("writers at the sequencer's node", peaks(all))));
    Row {
        title,
        throughput: all
            .iter()
            .map(|at| at.iter().map(|o| o.throughput).collect())
            .collect(),
        peaks: lines,
        report,
    }
}

fn main() {
    let bench = Bench {
        costs: Costs::measured(),
        interactions: interactions::all(),
    };
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let ["one", nodes, clients, mix, options @ ..] = words.as_slice() else {
        return bench.all();
    };
    let mix = MIXES
        .into_iter()
        .find(|known| known.name() == *mix)
        .expect("a mix");
    let mut setup = setup(
        nodes.parse().expect("nodes"),
        clients.parse().expect("clients"),
        mix,
    );
    setup.single_read = options.contains(&"single");
    setup.early_release = options.contains(&"early");
    setup.is_versioned = !options.contains(&"plain");
    setup.joins = options.contains(&"joins");
    if options.contains(&"writers") {
        setup.writers = Writers::AtSequencer;
    }
    println!("{:#?}", run(setup, &bench.costs, &bench.interactions));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All interactions of the ordering mix, with costs that are easy to count with.
    fn bench() -> Bench {
        let interactions = interactions::all();
        let each = |micros: f64| {
            interactions
                .iter()
                .map(|i| (i.name.clone(), micros))
                .collect()
        };
        let costs = Costs {
            about: String::new(),
            statements: each(1000.0),
            apply: each(100.0),
            session: 10.0,
            keeper: 5.0,
            ask: 5.0,
            request: 1.0,
            answer: 5.0,
            announce: 1.0,
            decode: 10.0,
            skip: 1.0,
            flush: 500.0,
            wake: 20.0,
            network: 100.0,
        };
        Bench {
            costs,
            interactions,
        }
    }

    fn run_with(nodes: usize, clients: usize, mix: Mix, change: impl Fn(&mut Setup)) -> Outcome {
        let bench = bench();
        let mut setup = setup(nodes, clients, mix);
        setup.interactions = 1000;
        change(&mut setup);
        run(setup, &bench.costs, &bench.interactions)
    }

    #[test]
    fn the_same_seed_gives_the_same() {
        let once = run_with(3, 9, Mix::Ordering, |_| {});
        assert_eq!(once, run_with(3, 9, Mix::Ordering, |_| {}));
    }

    /// Four processors of 1 ms an interaction do 4,000 a second, and not more.
    #[test]
    fn one_node_without_versions_is_as_fast_as_its_processors() {
        let plain = run_with(1, 40, Mix::Shopping, |setup| setup.is_versioned = false);
        assert!((3_800.0..=4_050.0).contains(&plain.throughput), "{plain:?}");
        assert!(plain.busy[0] > 0.95, "{plain:?}");
        // A client alone waits for nobody: statements, and messages.
        let alone = run_with(1, 1, Mix::Browsing, |setup| setup.is_versioned = false);
        assert!((0.0012..0.0025).contains(&alone.latency), "{alone:?}");
    }

    #[test]
    fn versions_cost_something_and_nodes_help_readers() {
        let plain = run_with(1, 40, Mix::Browsing, |setup| setup.is_versioned = false);
        let one = run_with(1, 40, Mix::Browsing, |_| {});
        let four = run_with(4, 160, Mix::Browsing, |_| {});
        assert!(one.throughput < plain.throughput, "{one:?} {plain:?}");
        assert!(four.throughput > 1.5 * one.throughput, "{four:?} {one:?}");
    }

    /// A table that all write lets one after the other write: on several nodes each write has to
    /// come across before the next one begins.
    #[test]
    fn writers_of_one_table_wait_for_each_other() {
        let one = run_with(1, 40, Mix::Ordering, |_| {});
        let four = run_with(4, 160, Mix::Ordering, |_| {});
        assert!(four.wait > one.wait, "{one:?} {four:?}");
        let at_one = run_with(4, 160, Mix::Ordering, |setup| {
            setup.writers = Writers::AtSequencer
        });
        assert!(at_one.throughput > four.throughput, "{at_one:?} {four:?}");
    }

    #[test]
    fn single_reads_ask_nobody() {
        // One client of the second of two nodes: nobody else writes, so only requests take time.
        let one = |single_read| run_with(2, 1, Mix::Browsing, |s| s.single_read = single_read);
        let (with, without) = (one(true), one(false));
        assert!(with.busy[0] < without.busy[0], "{with:?} {without:?}");
    }

    #[test]
    fn a_peak_is_within_the_limit() {
        let outcome = |throughput, latency| Outcome {
            throughput,
            latency,
            wait: 0.0,
            busy: [0.0; 2],
            writes: 0.0,
        };
        let outcomes = [outcome(10.0, 0.1), outcome(30.0, 0.2), outcome(90.0, 0.3)];
        let (best, clients) = peak(&outcomes);
        assert!((best - 30.0).abs() < 0.1);
        assert_eq!(clients, CLIENTS[1]);
    }
}
