//! Valid histories with one fault put in: each is found. Random changes are answered, whatever
//! they do.

use std::collections::HashMap;

use braid_histories::{Generator, History, Kind, MicroOp, Model, Seen, Value, Workload, check};
use braid_testing::Random;

use crate::store::{Chances, Isolation, simulate};

/// A strict serializable history of lists, nothing of which is unknown.
fn valid(random: &mut Random) -> History {
    let mut generator = Generator::new(Workload::lists(), Random::from_seed(random.next()));
    let chances = Chances {
        aborts: 30,
        unknown: u64::MAX,
    };
    let objects = Workload::lists().objects;
    simulate(
        Isolation::Serial,
        objects,
        &mut generator,
        5,
        300,
        chances,
        random,
    )
}

/// Where a transaction begins and ends.
struct Span {
    invoke: usize,
    complete: usize,
}

/// The committed transactions that append, by key and element.
fn appends(history: &History) -> HashMap<(Value, Value), Span> {
    let mut began = HashMap::new();
    let mut appends = HashMap::new();
    for (place, operation) in history.operations.iter().enumerate() {
        if operation.kind == Kind::Invoke {
            began.insert(operation.process, place);
        } else if operation.kind == Kind::Ok {
            for step in operation.value.iter().flatten() {
                if let MicroOp::Append { key, value } = step {
                    let span = Span {
                        invoke: began[&operation.process],
                        complete: place,
                    };
                    appends.insert((key.clone(), value.clone()), span);
                }
            }
        }
    }
    appends
}

/// Calls `change` with all reads of committed transactions: with the place where the transaction
/// was invoked, the key, and the list.
fn each_read(history: &mut History, mut change: impl FnMut(usize, &Value, &mut Vec<Value>)) {
    let mut began = HashMap::new();
    for (place, operation) in history.operations.iter_mut().enumerate() {
        if operation.kind == Kind::Invoke {
            began.insert(operation.process, place);
        } else if operation.kind == Kind::Ok {
            for step in operation.value.iter_mut().flatten() {
                if let MicroOp::Read {
                    key,
                    seen: Seen::List(list),
                } = step
                {
                    change(began[&operation.process], key, list);
                }
            }
        }
    }
}

/// Puts a fault into valid histories until that was possible 30 times, and expects it to be found.
/// `fault` returns whether it could change the history.
fn each_is_found(test: &str, mut fault: impl FnMut(&mut History, &mut Random) -> bool) {
    let mut random = Random::new(test);
    let mut changed = 0;
    for _ in 0..300 {
        let mut history = valid(&mut random);
        if fault(&mut history, &mut random) {
            let report = check(&history, Model::StrictSerializable).unwrap();
            assert!(!report.is_valid(), "{test}: {report}");
            changed += 1;
            if changed == 30 {
                return;
            }
        }
    }
    panic!("{test}: only {changed} histories had a place for the fault");
}

#[test]
fn histories_are_valid_before() {
    let mut random = Random::new("histories_are_valid_before");
    for _ in 0..10 {
        let report = check(&valid(&mut random), Model::StrictSerializable).unwrap();
        assert!(report.totals.is_empty(), "{report}");
    }
}

#[test]
fn a_changed_read_is_found() {
    each_is_found("a_changed_read", |history, random| {
        let nth = random.below(50);
        let (mut count, mut done) = (0, false);
        each_read(history, |_, _, list| {
            count += 1;
            if count > nth && !done && !list.is_empty() {
                let place = random.index(list.len());
                list[place] = Value::Integer(-1);
                done = true;
            }
        });
        done
    });
}

#[test]
fn swapped_elements_of_a_read_are_found() {
    each_is_found("swapped_elements", |history, random| {
        // The read must not be the only one with these elements.
        let mut longest: HashMap<Value, usize> = HashMap::new();
        each_read(history, |_, key, list| {
            let length = longest.entry(key.clone()).or_default();
            *length = list.len().max(*length);
        });
        let mut done = false;
        each_read(history, |_, key, list| {
            if !done && list.len() > 1 && list.len() < longest[key] {
                let place = random.index(list.len() - 1);
                list.swap(place, place + 1);
                done = true;
            }
        });
        done
    });
}

#[test]
fn a_lost_append_is_found() {
    each_is_found("a_lost_append", |history, random| {
        // An element that somebody read who began after it was committed is in no read.
        let appends = appends(history);
        let mut candidates = Vec::new();
        each_read(history, |began, key, list| {
            for element in list.iter() {
                if appends[&(key.clone(), element.clone())].complete < began {
                    candidates.push((key.clone(), element.clone()));
                }
            }
        });
        if candidates.is_empty() {
            return false;
        }
        let (lost_key, lost) = candidates.swap_remove(random.index(candidates.len()));
        each_read(history, |_, key, list| {
            if *key == lost_key {
                list.retain(|element| *element != lost);
            }
        });
        true
    });
}

#[test]
fn a_stale_snapshot_is_found() {
    each_is_found("a_stale_snapshot", |history, random| {
        let appends = appends(history);
        let nth = random.below(50);
        let (mut count, mut done) = (0, false);
        each_read(history, |began, key, list| {
            count += 1;
            let last = list.last().cloned();
            if count > nth
                && !done
                && last.is_some_and(|last| appends[&(key.clone(), last)].complete < began)
            {
                list.pop();
                done = true;
            }
        });
        done
    });
}

#[test]
fn swapped_commits_are_found() {
    each_is_found("swapped_commits", |history, random| {
        // Two elements that follow each other, the first committed before the second began, change
        // places in all reads.
        let appends = appends(history);
        let mut candidates = Vec::new();
        each_read(history, |_, key, list| {
            for pair in list.windows(2) {
                let first = &appends[&(key.clone(), pair[0].clone())];
                let second = &appends[&(key.clone(), pair[1].clone())];
                if first.complete < second.invoke {
                    candidates.push((key.clone(), pair[0].clone(), pair[1].clone()));
                }
            }
        });
        if candidates.is_empty() {
            return false;
        }
        let (swapped, a, b) = candidates.swap_remove(random.index(candidates.len()));
        each_read(history, |_, key, list| {
            for element in list.iter_mut().filter(|_| *key == swapped) {
                if *element == a {
                    *element = b.clone();
                } else if *element == b {
                    *element = a.clone();
                }
            }
        });
        true
    });
}

#[test]
fn an_abort_that_was_none_is_found() {
    each_is_found("an_abort", |history, random| {
        // A transaction is said to be aborted, and another one read what it appended.
        let appends = appends(history);
        let mut seen = Vec::new();
        each_read(history, |began, key, list| {
            for element in list.iter() {
                let span = &appends[&(key.clone(), element.clone())];
                if span.invoke != began {
                    seen.push(span.complete);
                }
            }
        });
        if seen.is_empty() {
            return false;
        }
        history.operations[seen[random.index(seen.len())]].kind = Kind::Fail;
        true
    });
}

#[test]
fn any_change_has_an_answer() {
    let mut random = Random::new("any_change");
    let mut answered = (0, 0);
    for round in 0..200 {
        let mut history = valid(&mut random);
        for _ in 0..=round % 4 {
            let place = random.index(history.operations.len());
            let other = random.index(history.operations.len());
            let steps = history.operations[other].value.clone();
            let operation = &mut history.operations[place];
            match random.below(9) {
                0 => operation.kind = Kind::Info,
                1 => operation.kind = Kind::Fail,
                2 => operation.kind = Kind::Ok,
                3 => operation.process = None,
                4 => operation.value = steps,
                5 => operation.value = None,
                6 => history.operations.swap(place, other),
                7 => drop(history.operations.remove(place)),
                _ => {
                    for step in operation.value.iter_mut().flatten() {
                        if let MicroOp::Read { seen, .. } = step {
                            let from = i64::try_from(random.below(9)).unwrap();
                            *seen = Seen::List((from..9).map(Value::Integer).collect());
                        }
                    }
                }
            }
        }
        for model in [Model::StrictSerializable, Model::SnapshotIsolation] {
            match check(&history, model) {
                Ok(report) => {
                    answered.0 += 1;
                    assert!(!report.to_string().is_empty());
                }
                Err(problem) => {
                    answered.1 += 1;
                    assert!(!problem.to_string().is_empty());
                }
            }
        }
    }
    assert!(answered.0 > 20 && answered.1 > 20, "{answered:?}");
}
