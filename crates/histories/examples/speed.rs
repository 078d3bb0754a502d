//! How long it takes to check a history.
//! `cargo run --release -p braid-histories --example speed [TRANSACTIONS]`
//!
//! The history is of a store of one copy, whose clients are interleaved: whole transactions, or
//! their steps without any isolation. Prints lines for lists and for registers: seconds to check,
//! and to write and read the text.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::time::Instant;

use braid_histories::{
    Generator, History, Kind, MicroOp, Model, Objects, Options, Seen, Value, Workload, check_with,
    read, write,
};
use braid_testing::Random;

const CLIENTS: usize = 20;

fn main() {
    let count = std::env::args().nth(1).and_then(|count| count.parse().ok());
    let count = count.unwrap_or(100_000);
    for (mut workload, isolated) in [
        (Workload::lists(), true),
        (Workload::registers(), true),
        (Workload::lists(), false),
        (Workload::registers(), false),
    ] {
        (workload.fewest_steps, workload.most_steps) = (4, 4);
        let history = record(workload, isolated, count);
        let began = Instant::now();
        let text = write(&history);
        let read = read(&text).map(|read| read == history);
        let text_time = began.elapsed().as_secs_f64();
        let mut options = Options::new(Model::StrictSerializable);
        options.linearizable_keys = true;
        options.sequential_keys = true;
        let began = Instant::now();
        let report = check_with(&history, options);
        println!(
            "{:?}: {count} transactions, checked in {:.2} s, {} MB of text written and read in \
             {text_time:.2} s ({read:?}), valid: {:?}",
            workload.objects,
            began.elapsed().as_secs_f64(),
            text.len() / 1_000_000,
            report.map(|report| report.is_valid())
        );
    }
}

/// Runs transactions of several clients, each at one moment between its beginning and its end, or
/// step by step.
fn record(workload: Workload, isolated: bool, mut left: usize) -> History {
    let mut random = Random::from_seed(1);
    let mut generator = Generator::new(workload, Random::from_seed(2));
    let mut store: HashMap<Value, Vec<Value>> = HashMap::new();
    let mut history = History::default();
    let mut running: Vec<Option<(usize, Vec<MicroOp>)>> = vec![None; CLIENTS];
    while left > 0 || running.iter().any(Option::is_some) {
        let client = random.index(CLIENTS);
        let process = i64::try_from(client).ok();
        let Some(state) = running.get_mut(client) else {
            continue;
        };
        if let Some((mut done, mut steps)) = state.take() {
            for step in steps.iter_mut().skip(done) {
                run(step, workload.objects, &mut store);
                done += 1;
                if !isolated {
                    break;
                }
            }
            if done == steps.len() {
                history.push(Kind::Ok, process, None, Some(steps));
            } else {
                *state = Some((done, steps));
            }
        } else if left > 0 {
            left -= 1;
            let steps = generator.transaction();
            history.push(Kind::Invoke, process, None, Some(steps.clone()));
            *state = Some((0, steps));
        }
    }
    history
}

fn run(step: &mut MicroOp, objects: Objects, store: &mut HashMap<Value, Vec<Value>>) {
    let values = store.entry(step.key().clone()).or_default();
    match step {
        MicroOp::Append { value, .. } => values.push(value.clone()),
        MicroOp::Write { value, .. } => *values = vec![value.clone()],
        MicroOp::Read { seen, .. } => {
            *seen = match (objects, values.last()) {
                (Objects::Lists, _) => Seen::List(values.clone()),
                (Objects::Registers, None) => Seen::Nil,
                (Objects::Registers, Some(value)) => Seen::Value(value.clone()),
            };
        }
    }
}
