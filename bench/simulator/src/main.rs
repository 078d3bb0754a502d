//! Predicts the speed of the apply engine with more appliers than this machine has processors for.
//!
//! ```text
//! braid-simulator run [--traces DIRECTORY] [--costs FILE] [--out DIRECTORY] [--transactions N]
//!     [--cores N] [--no-decoder]
//! braid-simulator costs --results FILE [--results FILE] [--quiet]
//! braid-simulator check --results FILE [--results FILE] [--traces DIRECTORY] [--costs FILE]
//!     [--transactions N] [--within PERCENT]
//! braid-simulator record [--transactions N]
//! braid-simulator trace WORKLOAD [--transactions N]
//! braid-simulator one --trace FILE [--costs FILE] [--appliers N] [--cores N] [--mode M]
//!     [--order O] [--flush F] [--singly] [--rows WORKLOAD]
//! ```
//!
//! `--no-decoder` leaves decoder and leader out, to show what the appliers alone could do.
//!
//! - `run` writes `simulated.json` and `simulated.svg`: the throughput with 1 to 64 appliers, by
//!   workload and mode, and what sets the limit at each point. If several appliers are slower than
//!   one, one is used, as the leader does.
//! - `costs` prints the costs that follow from a result file of `make bench` with one applier, and
//!   a second one with two and `braid.parallel_apply = always` (`--quiet`: nothing else ran on the
//!   machine).
//! - `check` compares with such files, and fails if a point is further away than `--within`.
//! - `record` makes a trace of the output plugin's frames; each line of the standard input is a
//!   frame in hexadecimal digits. `make bench-traces` calls it for each workload, and `--traces`
//!   says where the traces are (`WORKLOAD.txt`).
//! - `trace` generates a trace. `run` and `check` do so too without `--traces`.
//! - `one` simulates a trace from a file.
//!
//! Costs are microseconds, in JSON: see `costs.rs`.
#![forbid(unsafe_code)]

mod chart;
mod costs;
mod engine;
mod measured;
mod record;
mod workload;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;

use costs::{Costs, Rows};
use engine::{Flush, Mode, Order, Outcome, Setup, simulate};
use measured::Results;
use workload::{Transaction, Workload};

const APPLIERS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const MODES: [Mode; 4] = [Mode::Serial, Mode::Parallel, Mode::Batch, Mode::Consolidate];
const COSTS: &str = include_str!("../costs.json");

/// A simulated point.
#[derive(Debug, Clone, Serialize)]
struct Point {
    workload: String,
    #[serde(flatten)]
    setup: Setup,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Arguments: names with a value, and flags.
struct Arguments {
    command: String,
    rest: Vec<String>,
}

impl Arguments {
    fn value(&self, name: &str) -> Option<&str> {
        let at = self.rest.iter().position(|word| word == name)?;
        self.rest.get(at + 1).map(String::as_str)
    }

    fn values(&self, name: &str) -> Vec<&str> {
        let pairs = self.rest.iter().zip(self.rest.iter().skip(1));
        let named = pairs.filter(|(word, _)| *word == name);
        named.map(|(_, value)| value.as_str()).collect()
    }

    fn has(&self, name: &str) -> bool {
        self.rest.iter().any(|word| word == name)
    }

    fn number<T: std::str::FromStr>(&self, name: &str, default: T) -> Result<T, String> {
        self.value(name).map_or(Ok(default), |text| {
            text.parse()
                .map_err(|_| format!("{name} {text}: not a number"))
        })
    }

    /// Returns the first transactions of a workload: recorded ones, if a directory is given, else
    /// generated ones.
    fn trace_of(
        &self,
        workload: Workload,
        transactions: usize,
    ) -> Result<Vec<Transaction>, String> {
        let Some(directory) = self.value("--traces") else {
            return Ok(workload.trace(transactions));
        };
        let path = Path::new(directory).join(workload.name() + ".txt");
        let path = path.to_string_lossy();
        let mut trace =
            workload::read(&read(&path)?).map_err(|error| format!("{path}: {error}"))?;
        trace.truncate(transactions);
        Ok(trace)
    }

    fn costs(&self) -> Result<Costs, String> {
        match self.value("--costs") {
            None => Costs::read(COSTS),
            Some(path) => Costs::read(&read(path)?),
        }
        .map_err(|error| format!("costs: {error}"))
    }
}

fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let arguments = Arguments {
        command: words.next().unwrap_or_default(),
        rest: words.collect(),
    };
    let done = match arguments.command.as_str() {
        "run" => run(&arguments),
        "costs" => print_costs(&arguments),
        "check" => check(&arguments),
        "record" => record(&arguments),
        "trace" => trace(&arguments),
        "one" => one(&arguments),
        _ => Err("usage: braid-simulator run | costs | check | record | trace | one (see the head of bench/simulator/src/main.rs)".to_owned()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("braid-simulator: {error}");
            ExitCode::from(2)
        }
    }
}

/// Simulates as the leader decides: if commits wait for each other, one applier and all are tried,
/// and the faster setup is kept.
fn as_the_leader_has_it(trace: &[Transaction], costs: &Costs, rows: Rows, setup: Setup) -> Outcome {
    if setup.order == Order::Relaxed || setup.appliers == 1 {
        return simulate(trace, costs, rows, setup);
    }
    let tried = |appliers, singly| {
        let setup = Setup {
            appliers,
            singly,
            ..setup
        };
        simulate(trace, costs, rows, setup)
    };
    let (one, all) = (tried(1, false), tried(setup.appliers, true));
    if all.transactions_per_second > one.transactions_per_second {
        all
    } else {
        one
    }
}

fn run(arguments: &Arguments) -> Result<bool, String> {
    let mut costs = arguments.costs()?;
    if arguments.has("--no-decoder") {
        costs.leave_out_decoder();
    }
    let out = PathBuf::from(arguments.value("--out").unwrap_or("."));
    let transactions = arguments.number("--transactions", 40_000)?;
    let cores = arguments.number("--cores", 0)?;
    let mut points = Vec::new();
    for workload in Workload::ALL {
        let trace = arguments.trace_of(workload, transactions)?;
        let rows = costs.rows_of(&workload.name());
        for flush in [Flush::None, Flush::Leader, Flush::Appliers] {
            for order in [Order::Source, Order::Relaxed] {
                for mode in MODES {
                    for appliers in APPLIERS {
                        if mode == Mode::Serial && (appliers > 1 || order == Order::Relaxed) {
                            continue;
                        }
                        let setup = Setup {
                            appliers,
                            cores,
                            order,
                            mode,
                            flush,
                            singly: false,
                        };
                        points.push(Point {
                            workload: workload.name(),
                            setup,
                            outcome: as_the_leader_has_it(&trace, &costs, rows, setup),
                        });
                    }
                }
            }
        }
        eprintln!("{}", workload.name());
    }
    let document = serde_json::json!({ "costs": costs, "points": points });
    let json = serde_json::to_string(&document).map_err(|error| error.to_string())?;
    write(&out.join("simulated.json"), &(json + "\n"))?;
    write(&out.join("simulated.svg"), &chart::draw(&points))?;
    Ok(true)
}

fn check(arguments: &Arguments) -> Result<bool, String> {
    let costs = arguments.costs()?;
    let files = arguments.values("--results");
    if files.is_empty() {
        return Err("check needs --results FILE".to_owned());
    }
    let mut measured = Vec::new();
    for path in files {
        let results = Results::read(&read(path)?).map_err(|error| format!("{path}: {error}"))?;
        measured.extend(results.points());
    }
    let transactions = arguments.number("--transactions", 100_000)?;
    let within: f64 = arguments.number("--within", 25.0)?;
    let mut traces: HashMap<String, Vec<Transaction>> = HashMap::new();
    let (mut sum, mut worst, mut count) = (0.0, 0.0_f64, 0_u32);
    println!(
        "workload     appliers mode        order    flush      measured  simulated  error  limit"
    );
    for point in &measured {
        let Some(workload) = Workload::by_name(&point.workload) else {
            continue;
        };
        let trace = match traces.entry(point.workload.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(arguments.trace_of(workload, transactions)?),
        };
        let setup = point.setup;
        let rows = costs.rows_of(&point.workload);
        let outcome = if point.always {
            simulate(trace, &costs, rows, setup)
        } else {
            as_the_leader_has_it(trace, &costs, rows, setup)
        };
        let error = 100.0 * (outcome.transactions_per_second / point.transactions_per_second - 1.0);
        println!(
            "{:<12} {:>8} {:<11} {:<8} {:<8} {:>10.0} {:>10.0} {error:>+5.0}%  {}",
            point.workload,
            setup.appliers,
            format!("{:?}", setup.mode).to_lowercase(),
            format!("{:?}", setup.order).to_lowercase(),
            format!("{:?}", setup.flush).to_lowercase(),
            point.transactions_per_second,
            outcome.transactions_per_second,
            outcome.bottleneck,
        );
        sum += error.abs();
        count += 1;
        worst = worst.max(error.abs());
    }
    println!(
        "mean error {:.0} %, largest {worst:.0} %",
        sum / f64::from(count.max(1))
    );
    Ok(worst <= within)
}

fn print_costs(arguments: &Arguments) -> Result<bool, String> {
    let results = arguments
        .values("--results")
        .into_iter()
        .map(|path| Results::read(&read(path)?).map_err(|error| format!("{path}: {error}")));
    let results: Vec<Results> = results.collect::<Result<_, _>>()?;
    let one = results.first().ok_or("costs needs --results FILE")?;
    let costs = one.costs(results.get(1), arguments.has("--quiet"))?;
    let json = serde_json::to_string_pretty(&costs).map_err(|error| error.to_string())?;
    println!("{json}");
    Ok(true)
}

fn record(arguments: &Arguments) -> Result<bool, String> {
    let lines = std::io::stdin().lines();
    let mut broken = None;
    let frames = lines.map_while(|line| line.map_err(|error| broken = Some(error)).ok());
    let mut trace = record::transactions(frames)?;
    if let Some(error) = broken {
        return Err(error.to_string());
    }
    trace.truncate(arguments.number("--transactions", 40_000)?);
    print!("{}", workload::write(&trace));
    Ok(true)
}

fn trace(arguments: &Arguments) -> Result<bool, String> {
    let name = arguments.rest.first().map_or("", String::as_str);
    let workload = Workload::by_name(name)
        .ok_or("trace needs a workload: single, sysbench, tpcb-SCALE, zipf-EXPONENT")?;
    let transactions = arguments.number("--transactions", 10_000)?;
    print!("{}", workload::write(&workload.trace(transactions)));
    Ok(true)
}

fn one(arguments: &Arguments) -> Result<bool, String> {
    let costs = arguments.costs()?;
    let path = arguments.value("--trace").ok_or("one needs --trace FILE")?;
    let trace = workload::read(&read(path)?).map_err(|error| format!("{path}: {error}"))?;
    let word = |name: &str, default: &str| {
        let word = arguments.value(name).unwrap_or(default);
        serde_json::Value::String(word.to_owned())
    };
    let named = |error: serde_json::Error| error.to_string();
    let setup = Setup {
        appliers: arguments.number("--appliers", 4)?,
        cores: arguments.number("--cores", 0)?,
        order: serde_json::from_value(word("--order", "source")).map_err(named)?,
        mode: serde_json::from_value(word("--mode", "parallel")).map_err(named)?,
        flush: serde_json::from_value(word("--flush", "none")).map_err(named)?,
        singly: arguments.has("--singly"),
    };
    let rows = costs.rows_of(arguments.value("--rows").unwrap_or_default());
    let outcome = simulate(&trace, &costs, rows, setup);
    println!("{}", serde_json::to_string_pretty(&outcome).map_err(named)?);
    Ok(true)
}
