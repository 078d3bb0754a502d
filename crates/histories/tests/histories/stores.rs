//! Histories of simulated stores: none has an anomaly that its level forbids, and the level above
//! finds one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use braid_histories::{
    Anomaly, Cycle, Generator, History, Kind, MicroOp, Model, Options, Value, Workload, check,
    check_with, run,
};
use braid_testing::Random;

use crate::store::{Chances, Isolation, Shared, Store, simulate};

fn history(isolation: Isolation, workload: Workload, count: usize, random: &mut Random) -> History {
    let mut generator = Generator::new(workload, Random::from_seed(random.next()));
    let chances = Chances {
        aborts: 20,
        unknown: 30,
    };
    let objects = workload.objects;
    simulate(
        isolation,
        objects,
        &mut generator,
        8,
        count,
        chances,
        random,
    )
}

/// Checks histories of a level: all are valid in `holds`, and soon one is not in `fails`.
fn level(isolation: Isolation, holds: Model, fails: Option<Model>) {
    let mut random = Random::new("level");
    for workload in [Workload::lists(), Workload::registers()] {
        let workload = Workload {
            keys: 3,
            most_steps: 5,
            ..workload
        };
        let mut failed = false;
        for _ in 0..20 {
            let history = history(isolation, workload, 1000, &mut random);
            let report = check(&history, holds).unwrap();
            assert!(report.is_valid(), "{isolation:?} {workload:?}: {report}");
            assert!(report.committed > 50, "{report}");
            assert!(report.indeterminate.0 > 0 && report.aborted > 0, "{report}");
            failed = fails.is_some_and(|fails| !check(&history, fails).unwrap().is_valid());
            if failed || fails.is_none() {
                break;
            }
        }
        assert_eq!(failed, fails.is_some(), "{isolation:?} {workload:?}");
    }
}

#[test]
fn one_after_another_is_strict_serializable() {
    level(Isolation::Serial, Model::StrictSerializable, None);
}

#[test]
fn optimistic_commits_are_strict_serializable() {
    level(Isolation::Optimistic, Model::StrictSerializable, None);
}

#[test]
fn stale_snapshots_are_found_with_real_time() {
    level(
        Isolation::StaleReads,
        Model::Serializable,
        Some(Model::StrictSerializable),
    );
}

#[test]
fn snapshots_have_write_skew() {
    level(
        Isolation::Snapshot,
        Model::StrongSnapshotIsolation,
        Some(Model::Serializable),
    );
}

#[test]
fn read_committed_loses_updates() {
    level(
        Isolation::Committed,
        Model::ReadCommitted,
        Some(Model::SnapshotIsolation),
    );
    let mut random = Random::new("read_committed");
    let workload = Workload {
        keys: 3,
        most_steps: 6,
        ..Workload::lists()
    };
    let history = history(Isolation::Committed, workload, 3000, &mut random);
    let report = check(&history, Model::SnapshotIsolation).unwrap();
    for anomaly in [Anomaly::LostUpdate, Anomaly::Internal] {
        assert!(report.totals.contains_key(&anomaly), "{report}");
    }
}

#[test]
fn read_uncommitted_shows_all() {
    let mut random = Random::new("read_uncommitted");
    let workload = Workload {
        keys: 4,
        ..Workload::lists()
    };
    let history = history(Isolation::Uncommitted, workload, 1500, &mut random);
    let report = check(&history, Model::ReadCommitted).unwrap();
    assert!(!report.is_valid());
    assert!(report.totals.contains_key(&Anomaly::G1a), "{report}");
    assert!(report.totals.contains_key(&Anomaly::G1b), "{report}");
    let g0 = report
        .totals
        .keys()
        .any(|a| matches!(a, Anomaly::Cycle(Cycle::G0, _)));
    assert!(g0, "{report}");
    assert!(!check(&history, Model::ReadUncommitted).unwrap().is_valid());
}

#[test]
fn orders_of_keys_hold_in_a_strict_store() {
    let mut random = Random::new("orders_of_keys");
    for isolation in [Isolation::Serial, Isolation::Optimistic] {
        let history = history(isolation, Workload::registers(), 1500, &mut random);
        let mut options = Options::new(Model::StrictSerializable);
        options.sequential_keys = true;
        options.linearizable_keys = true;
        let report = check_with(&history, options).unwrap();
        assert!(report.totals.is_empty(), "{isolation:?}: {report}");
    }
}

#[test]
fn threads_are_recorded() {
    for workload in [Workload::lists(), Workload::registers()] {
        let store = Mutex::new(Store::new(Isolation::Serial, workload.objects));
        let clients = (0..4).map(|_| Shared(&store)).collect();
        let generator = Generator::new(workload, Random::new("threads"));
        let history = run(generator, clients, 500);
        let began = history.operations.iter().filter(|o| o.kind == Kind::Invoke);
        assert_eq!(began.count(), 500);
        assert_eq!(history.operations.len(), 1000);
        let report = check(&history, Model::StrictSerializable).unwrap();
        assert!(report.totals.is_empty(), "{report}");
        assert!(report.indeterminate.1 > 0, "{report}");
    }
}

#[test]
fn workloads_keep_their_limits() {
    let workload = Workload {
        keys: 3,
        writes_per_key: 5,
        fewest_steps: 2,
        most_steps: 6,
        ..Workload::lists()
    };
    let mut generator = Generator::new(workload, Random::new("limits"));
    let mut appends: BTreeMap<Value, BTreeSet<Value>> = BTreeMap::new();
    for _ in 0..1000 {
        let steps = generator.transaction();
        assert!((2..=6).contains(&steps.len()));
        for step in steps {
            if let MicroOp::Append { key, value } = step {
                assert!(appends.entry(key).or_default().insert(value));
            }
        }
    }
    let unfinished = appends.values().filter(|values| values.len() < 5).count();
    assert!(unfinished <= 3 && appends.values().all(|values| values.len() <= 5));
}
