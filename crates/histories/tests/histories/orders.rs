//! Small histories against every order in which their transactions can have run.
//!
//! With lists, and a last transaction that reads all of them, the checker knows all dependencies:
//! it must find an anomaly exactly if there is no order. With registers, or without that read, it
//! must not find one if there is an order.

use std::collections::HashMap;

use braid_histories::{
    Generator, History, Kind, MicroOp, Model, Objects, Options, Seen, Value, Workload, check,
    check_with,
};
use braid_testing::Random;

use crate::store::{Chances, Isolation, simulate};

/// A transaction of a history.
struct Transaction {
    invoked: usize,
    /// `usize::MAX` if that is not known.
    completed: usize,
    process: i64,
    steps: Vec<MicroOp>,
    /// Whether it must have happened, and its reads count.
    committed: bool,
}

type State = HashMap<Value, Vec<Value>>;

fn transactions(history: &History) -> Vec<Transaction> {
    let mut all: Vec<Transaction> = Vec::new();
    for (place, operation) in history.operations.iter().enumerate() {
        let process = operation.process.unwrap();
        if operation.kind == Kind::Invoke {
            all.push(Transaction {
                invoked: place,
                completed: usize::MAX,
                process,
                steps: operation.value.clone().unwrap(),
                committed: false,
            });
            continue;
        }
        let number = all.iter().rposition(|t| t.process == process).unwrap();
        match operation.kind {
            Kind::Ok => {
                all[number].completed = place;
                all[number].steps = operation.value.clone().unwrap();
                all[number].committed = true;
            }
            Kind::Fail => drop(all.remove(number)),
            _ => {}
        }
    }
    all
}

/// Runs a transaction on a state. Returns whether its reads fit, if they count.
fn apply(transaction: &Transaction, state: &mut State) -> bool {
    for step in &transaction.steps {
        let values = state.entry(step.key().clone()).or_default();
        match step {
            MicroOp::Append { value, .. } => values.push(value.clone()),
            MicroOp::Write { value, .. } => *values = vec![value.clone()],
            MicroOp::Read { seen, .. } => {
                let fits = match seen {
                    Seen::Nil => values.is_empty(),
                    Seen::List(list) => values == list,
                    Seen::Value(value) => values.as_slice() == std::slice::from_ref(value),
                };
                if !fits && transaction.committed {
                    return false;
                }
            }
        }
    }
    true
}

/// Whether `first` must come before `second`.
fn before(first: &Transaction, second: &Transaction, model: Model) -> bool {
    match model {
        Model::StrictSerializable | Model::StrongSnapshotIsolation => {
            first.completed < second.invoked
        }
        Model::StrongSessionSerializable => {
            first.completed < second.invoked && first.process == second.process
        }
        _ => false,
    }
}

/// Whether the transactions can have run in some order. Those that are not known to be committed
/// may be left out.
fn possible(all: &[Transaction], model: Model) -> bool {
    let mut order = Vec::new();
    let snapshots = matches!(
        model,
        Model::SnapshotIsolation | Model::StrongSnapshotIsolation
    );
    extend(all, model, snapshots, &mut order, &mut vec![State::new()])
}

/// Tries all ways to go on. `states` are those before and after each transaction of `order`.
fn extend(
    all: &[Transaction],
    model: Model,
    snapshots: bool,
    order: &mut Vec<usize>,
    states: &mut Vec<State>,
) -> bool {
    let left = |n: &usize| !order.contains(n);
    if (0..all.len()).filter(left).all(|n| !all[n].committed) {
        return true;
    }
    let rest: Vec<usize> = (0..all.len()).filter(left).collect();
    for next in rest.iter().copied() {
        let transaction = &all[next];
        if rest
            .iter()
            .any(|other| all[*other].committed && before(&all[*other], transaction, model))
        {
            continue;
        }
        let mut state = states.last().unwrap().clone();
        let fits = if snapshots {
            let fits = (0..states.len()).any(|snapshot| {
                // Nothing that it writes was written since, and all is seen that must be.
                let since = &order[snapshot..];
                apply(transaction, &mut states[snapshot].clone())
                    && !since.iter().any(|other| {
                        before(&all[*other], transaction, model)
                            || writes(transaction).any(|k| writes(&all[*other]).any(|o| o == k))
                    })
            });
            for step in &transaction.steps {
                if !matches!(step, MicroOp::Read { .. }) {
                    let values = state.entry(step.key().clone()).or_default();
                    match step {
                        MicroOp::Append { value, .. } => values.push(value.clone()),
                        MicroOp::Write { value, .. } => *values = vec![value.clone()],
                        MicroOp::Read { .. } => {}
                    }
                }
            }
            fits
        } else {
            apply(transaction, &mut state)
        };
        if fits {
            order.push(next);
            states.push(state);
            if extend(all, model, snapshots, order, states) {
                return true;
            }
            order.pop();
            states.pop();
        }
    }
    false
}

fn writes(transaction: &Transaction) -> impl Iterator<Item = &Value> {
    let writes = transaction
        .steps
        .iter()
        .filter(|step| !matches!(step, MicroOp::Read { .. }));
    writes.map(MicroOp::key)
}

/// A small history of a random level.
fn small(objects: Objects, unknown: u64, random: &mut Random) -> History {
    let workload = Workload {
        objects,
        keys: 2,
        writes_per_key: 50,
        fewest_steps: 1,
        most_steps: 3,
        writes: 50,
        skewed: false,
    };
    let isolation = [
        Isolation::Serial,
        Isolation::Optimistic,
        Isolation::StaleReads,
        Isolation::Snapshot,
        Isolation::Committed,
        Isolation::Uncommitted,
    ][random.index(6)];
    let mut generator = Generator::new(workload, Random::from_seed(random.next()));
    let chances = Chances { aborts: 8, unknown };
    simulate(isolation, objects, &mut generator, 3, 5, chances, random)
}

/// Adds a transaction that reads the lists in the order in which elements were seen or, of those
/// that were not, appended. It may be wrong: then there is no order.
fn read_all(history: &mut History) {
    let mut lists: HashMap<Value, Vec<Value>> = HashMap::new();
    for operation in history.operations.iter().filter(|o| o.kind == Kind::Ok) {
        for step in operation.value.iter().flatten() {
            if let MicroOp::Read {
                key,
                seen: Seen::List(list),
            } = step
            {
                let longest = lists.entry(key.clone()).or_default();
                if list.len() > longest.len() {
                    longest.clone_from(list);
                }
            }
        }
    }
    for operation in history.operations.iter().filter(|o| o.kind == Kind::Ok) {
        for step in operation.value.iter().flatten() {
            if let MicroOp::Append { key, value } = step {
                let list = lists.entry(key.clone()).or_default();
                if !list.contains(value) {
                    list.push(value.clone());
                }
            }
        }
    }
    let steps: Vec<MicroOp> = lists
        .into_iter()
        .map(|(key, list)| MicroOp::Read {
            key,
            seen: Seen::List(list),
        })
        .collect();
    let invoked = steps.iter().map(MicroOp::invoked).collect();
    history.push(Kind::Invoke, Some(99), None, Some(invoked));
    history.push(Kind::Ok, Some(99), None, Some(steps));
}

#[test]
fn lists_have_an_anomaly_or_an_order() {
    let mut random = Random::new("lists_have_an_anomaly_or_an_order");
    let mut counts: HashMap<(Model, bool), u32> = HashMap::new();
    for _ in 0..400 {
        let mut history = small(Objects::Lists, u64::MAX, &mut random);
        read_all(&mut history);
        let all = transactions(&history);
        for model in [
            Model::SnapshotIsolation,
            Model::StrongSnapshotIsolation,
            Model::Serializable,
            Model::StrongSessionSerializable,
            Model::StrictSerializable,
        ] {
            let report = check(&history, model).unwrap();
            let possible = possible(&all, model);
            let text = braid_histories::write(&history);
            assert_eq!(report.is_valid(), possible, "{model}\n{text}{report}");
            *counts.entry((model, possible)).or_default() += 1;
        }
    }
    // Both answers are frequent.
    assert_eq!(counts.len(), 10, "{counts:?}");
    assert!(counts.values().all(|count| *count > 10), "{counts:?}");
}

#[test]
fn what_has_an_order_has_no_anomaly() {
    let mut random = Random::new("what_has_an_order_has_no_anomaly");
    let (mut impossible, mut found) = (0, 0);
    for round in 0..800 {
        let objects = [Objects::Lists, Objects::Registers][round % 2];
        let history = small(objects, 4, &mut random);
        let all = transactions(&history);
        for model in [
            Model::SnapshotIsolation,
            Model::Serializable,
            Model::StrictSerializable,
        ] {
            let mut options = Options::new(model);
            options.linearizable_keys = model == Model::StrictSerializable && round % 4 == 1;
            let report = check_with(&history, options).unwrap();
            let possible = possible(&all, model);
            let text = braid_histories::write(&history);
            assert!(report.is_valid() || !possible, "{model}\n{text}{report}");
            impossible += u32::from(!possible);
            found += u32::from(!report.is_valid());
        }
    }
    // Most of what has no order is found.
    assert!(found * 10 > impossible * 6, "{found} of {impossible}");
}
