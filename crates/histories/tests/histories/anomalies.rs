//! One small history for each kind of anomaly, found with just that kind.

use braid_histories::{
    Anomaly, Cycle, HistoryError, Model, Options, Orders, Relation, Report, check, check_with, read,
};

/// Checks a history in text against the strictest model.
fn strict(text: &str) -> Report {
    check(&read(text).unwrap(), Model::StrictSerializable).unwrap()
}

/// Committed transactions that ran at the same time, each of a process of its own.
fn together(transactions: &[&str]) -> String {
    let mut text = String::new();
    for kind in ["invoke", "ok"] {
        for (process, steps) in transactions.iter().enumerate() {
            text += &format!("{{:type :{kind} :process {process} :value {steps}}}\n");
        }
    }
    text
}

/// Transactions that ran one after another: kind, process, steps.
fn in_turn(transactions: &[(&str, i64, &str)]) -> String {
    let mut text = String::new();
    for (kind, process, steps) in transactions {
        text += &format!("{{:type :invoke :process {process} :value {steps}}}\n");
        text += &format!("{{:type :{kind} :process {process} :value {steps}}}\n");
    }
    text
}

fn names(report: &Report) -> Vec<String> {
    report.totals.keys().map(ToString::to_string).collect()
}

/// The history has these kinds of anomalies, each of them once.
#[track_caller]
fn finds(report: &Report, kinds: &[&str]) {
    assert_eq!(names(report), kinds, "{report}");
    assert!(report.totals.values().all(|count| *count == 1), "{report}");
    assert_eq!(report.is_valid(), kinds.is_empty());
}

#[test]
fn writes_in_a_cycle_are_g0() {
    let report = lists(&[
        "[[:append x 1] [:append y 1]]",
        "[[:append x 2] [:append y 2]]",
        "[[:r x [1 2]]]",
        "[[:r y [2 1]]]",
    ]);
    finds(&report, &["G0"]);
    let finding = &report.findings[0];
    assert_eq!(finding.operations, [4, 5]);
    assert!(
        finding
            .steps
            .iter()
            .all(|step| step.relation == Relation::WriteWrite)
    );
    assert_eq!(
        finding.explanation,
        "  T1 = {:index 4, :type :ok, :process 0, :value [[:append :x 1] [:append :y 1]]}\n  \
         T2 = {:index 5, :type :ok, :process 1, :value [[:append :x 2] [:append :y 2]]}\n  \
         T1 < T2, because T2 appended 2 to :x after T1 appended 1\n  \
         T2 < T1, because T1 appended 1 to :y after T2 appended 2: a contradiction"
    );
}

/// Keys are letters in the tests, and keywords in histories.
fn keywords(steps: &str) -> String {
    steps
        .replace(" x ", " :x ")
        .replace(" y ", " :y ")
        .replace(" z ", " :z ")
}

fn lists(transactions: &[&str]) -> Report {
    let steps: Vec<String> = transactions.iter().map(|steps| keywords(steps)).collect();
    strict(&together(
        &steps.iter().map(String::as_str).collect::<Vec<_>>(),
    ))
}

fn turns(transactions: &[(&str, i64, &str)]) -> String {
    keywords(&in_turn(transactions))
}

#[test]
fn information_in_a_cycle_is_g1c() {
    let report = lists(&["[[:append x 1] [:r y [1]]]", "[[:append y 1] [:r x [1]]]"]);
    finds(&report, &["G1c"]);
    assert!(
        report.findings[0]
            .explanation
            .contains("T2 read :x with 1 at its end, which T1 appended"),
        "{report}"
    );
    // The second transaction of a write to write and write to read cycle.
    finds(
        &lists(&[
            "[[:append x 1] [:r y [1]]]",
            "[[:append x 2] [:append y 1]]",
            "[[:r x [1 2]]]",
        ]),
        &["G1c"],
    );
}

#[test]
fn read_skew_is_g_single() {
    let report = lists(&[
        "[[:append x 1] [:append y 1]]",
        "[[:r x []] [:r y [1]]]",
        "[[:r x [1]]]",
    ]);
    finds(&report, &["G-single"]);
    assert!(
        report.findings[0]
            .explanation
            .contains("T2 read :x = [], without 1, which T1 appended"),
        "{report}"
    );
    assert!(!report_for(&report, Model::SnapshotIsolation));
    assert!(report_for(&report, Model::ReadCommitted));
}

/// Whether the anomalies of a report are allowed by a model.
fn report_for(report: &Report, model: Model) -> bool {
    report.totals.keys().all(|anomaly| !model.forbids(*anomaly))
}

#[test]
fn write_skew_is_g2_item() {
    let report = lists(&[
        "[[:r x []] [:r y []] [:append x 1]]",
        "[[:r x []] [:r y []] [:append y 1]]",
        "[[:r x [1]] [:r y [1]]]",
    ]);
    finds(&report, &["G2-item"]);
    assert!(report_for(&report, Model::SnapshotIsolation));
    assert!(report_for(&report, Model::StrongSnapshotIsolation));
    assert!(!report_for(&report, Model::RepeatableRead));
    assert!(!report_for(&report, Model::Serializable));
}

#[test]
fn a_long_fork_is_g_nonadjacent() {
    let report = lists(&[
        "[[:append x 1]]",
        "[[:append y 1]]",
        "[[:r x [1]] [:r y nil]]",
        "[[:r x nil] [:r y [1]]]",
    ]);
    finds(&report, &["G-nonadjacent"]);
    assert_eq!(report.findings[0].steps.len(), 4);
    assert!(!report_for(&report, Model::SnapshotIsolation));
}

#[test]
fn a_cycle_may_need_the_order_of_a_process() {
    // The process reads less than before.
    let text = turns(&[
        ("ok", 0, "[[:append x 1]]"),
        ("ok", 1, "[[:r x [1]]]"),
        ("ok", 1, "[[:r x []]]"),
    ]);
    finds(&strict(&text), &["G-single-process"]);
    let history = read(&text).unwrap();
    assert!(check(&history, Model::Serializable).unwrap().is_valid());
    assert!(
        !check(&history, Model::StrongSessionSerializable)
            .unwrap()
            .is_valid()
    );
    assert!(
        !check(&history, Model::StrongSessionSnapshotIsolation)
            .unwrap()
            .is_valid()
    );

    // A later write of the process comes first.
    finds(
        &strict(&turns(&[
            ("ok", 0, "[[:append x 1]]"),
            ("ok", 0, "[[:append x 2]]"),
            ("ok", 1, "[[:r x [2 1]]]"),
        ])),
        &["G0-process"],
    );
    // A process sees what it writes later, by way of another one.
    let text = "{:type :invoke :process 1 :value [[:append y 1] [:r z nil]]}
        {:type :invoke :process 0 :value [[:r y nil]]}
        {:type :ok :process 0 :value [[:r y [1]]]}
        {:type :invoke :process 0 :value [[:append z 1]]}
        {:type :ok :process 0 :value [[:append z 1]]}
        {:type :ok :process 1 :value [[:append y 1] [:r z [1]]]}";
    finds(&strict(&keywords(text)), &["G1c-process"]);
}

#[test]
fn a_cycle_may_need_real_time() {
    // A stale read.
    let text = turns(&[
        ("ok", 0, "[[:append x 1]]"),
        ("ok", 1, "[[:r x []]]"),
        ("ok", 2, "[[:r x [1]]]"),
    ]);
    let report = strict(&text);
    finds(&report, &["G-single-realtime"]);
    assert!(
        report.findings[0]
            .explanation
            .contains("T1 < T2, because T1 was over before T2 began"),
        "{report}"
    );
    let history = read(&text).unwrap();
    for model in [
        Model::Serializable,
        Model::StrongSessionSerializable,
        Model::SnapshotIsolation,
    ] {
        assert!(check(&history, model).unwrap().is_valid());
    }
    assert!(
        !check(&history, Model::StrongSnapshotIsolation)
            .unwrap()
            .is_valid()
    );

    finds(
        &strict(&turns(&[
            ("ok", 0, "[[:append x 1]]"),
            ("ok", 1, "[[:append x 2]]"),
            ("ok", 2, "[[:r x [2 1]]]"),
        ])),
        &["G0-realtime"],
    );
    // A read from the future.
    finds(
        &strict(&turns(&[
            ("ok", 0, "[[:r x [1]]]"),
            ("ok", 1, "[[:append x 1]]"),
        ])),
        &["G1c-realtime"],
    );
}

#[test]
fn write_skew_may_need_real_time() {
    // T1 -rw-> T2 -rw-> T3 -realtime-> T1.
    let text = "{:type :invoke :process 1 :value [[:r y nil] [:append x 1]]}
        {:type :invoke :process 2 :value [[:append y 1]]}
        {:type :ok :process 2 :value [[:append y 1]]}
        {:type :invoke :process 0 :value [[:r x nil]]}
        {:type :ok :process 0 :value [[:r x nil]]}
        {:type :ok :process 1 :value [[:r y nil] [:append x 1]]}
        {:type :ok :process 3 :value [[:r x [1]] [:r y [1]]]}";
    let report = strict(&keywords(text));
    finds(&report, &["G2-item-realtime"]);
    assert!(report_for(&report, Model::StrongSnapshotIsolation));
    assert!(report_for(&report, Model::Serializable));
    let processes = keywords(text).replace(":process 0", ":process 2");
    finds(&strict(&processes), &["G2-item-process"]);
}

#[test]
fn long_forks_may_need_orders() {
    let text = "{:type :invoke :process 0 :value [[:append x 1]]}
        {:type :invoke :process 1 :value [[:append y 1]]}
        {:type :invoke :process 2 :value [[:r x nil]]}
        {:type :invoke :process 3 :value [[:r y nil]]}
        {:type :ok :process 2 :value [[:r x [1]]]}
        {:type :ok :process 3 :value [[:r y [1]]]}
        {:type :invoke :process 4 :value [[:r y nil]]}
        {:type :invoke :process 5 :value [[:r x nil]]}
        {:type :ok :process 4 :value [[:r y nil]]}
        {:type :ok :process 5 :value [[:r x nil]]}
        {:type :ok :process 0 :value [[:append x 1]]}
        {:type :ok :process 1 :value [[:append y 1]]}";
    // In real time there is a shorter one: 3 was over before 4 began.
    finds(&strict(&keywords(text)), &["G-single-realtime"]);
    let text = keywords(text)
        .replace(":process 4", ":process 2")
        .replace(":process 5", ":process 3");
    let history = read(&text).unwrap();
    let report = check(&history, Model::StrongSessionSerializable).unwrap();
    finds(&report, &["G-nonadjacent-process"]);
}

#[test]
fn aborted_reads_are_g1a() {
    let report = strict(&turns(&[
        ("fail", 0, "[[:append x 1]]"),
        ("ok", 1, "[[:r x [1]]]"),
    ]));
    finds(&report, &["G1a"]);
    assert_eq!(report.findings[0].operations, [3, 1]);
    assert!(
        report.findings[0]
            .explanation
            .contains("but T2 appended 1 and failed"),
        "{report}"
    );
    finds(
        &strict(&turns(&[
            ("fail", 0, "[[:w x 1]]"),
            ("ok", 1, "[[:r x 1]]"),
        ])),
        &["G1a"],
    );
}

#[test]
fn all_are_counted_and_some_described() {
    let history = turns(&[
        ("fail", 0, "[[:append x 1]]"),
        ("ok", 1, "[[:r x [1]]]"),
        ("ok", 2, "[[:r x [1]]]"),
        ("ok", 3, "[[:r x [1]] [:r x [1]]]"),
    ]);
    let mut options = Options::new(Model::ReadCommitted);
    options.limit = 3;
    let report = check_with(&read(&history).unwrap(), options).unwrap();
    assert_eq!(report.totals[&Anomaly::G1a], 4);
    assert_eq!(report.findings.len(), 3);
    let head = "VIOLATION of read-committed\n\
                transactions: 3 committed, 1 aborted, 0 indeterminate (0 of these seen)\n\
                G1a: 4\n\nG1a\n  T1 = {:index 3, ";
    assert!(report.to_string().starts_with(head), "{report}");
}

#[test]
fn intermediate_reads_are_g1b() {
    finds(
        &lists(&[
            "[[:append x 1] [:append x 2]]",
            "[[:r x [1]]]",
            "[[:r x [1 2]]]",
        ]),
        &["G1b"],
    );
    // What follows the intermediate version is the reader's own.
    let own = lists(&[
        "[[:append x 1] [:append x 2]]",
        "[[:append x 3] [:r x [1 3]]]",
        "[[:r x [1 3 2]]]",
    ]);
    assert!(names(&own).contains(&"G1b".to_owned()), "{own}");
    finds(&lists(&["[[:w x 1] [:w x 2]]", "[[:r x 1]]"]), &["G1b"]);
    // A transaction sees its own intermediate versions.
    finds(
        &lists(&["[[:append x 1] [:r x [1]] [:append x 2]]", "[[:r x [1 2]]]"]),
        &[],
    );
    finds(&lists(&["[[:w x 1] [:r x 1] [:w x 2]]", "[[:r x 2]]"]), &[]);
}

#[test]
fn a_transaction_sees_itself() {
    finds(&lists(&["[[:append x 1] [:r x []]]"]), &["internal"]);
    finds(
        &lists(&["[[:append x 1]]", "[[:r x [1]] [:append x 2] [:r x [2]]]"]),
        &["incompatible-order", "internal"],
    );
    finds(
        &lists(&["[[:append x 1] [:append x 2]]", "[[:r x []] [:r x [1 2]]]"]),
        &["internal"],
    );
    finds(&lists(&["[[:w x 1] [:r x nil]]"]), &["internal"]);
    finds(
        &lists(&["[[:w x 1]]", "[[:r x nil] [:r x 1]]"]),
        &["internal"],
    );
    finds(&lists(&["[[:w x 1] [:w x 2] [:r x 1]]"]), &["internal"]);
    finds(
        &lists(&[
            "[[:append x 1]]",
            "[[:append x 2] [:r x [1 2]] [:append x 3] [:r x [1 2 3]]]",
        ]),
        &[],
    );
}

#[test]
fn nobody_sees_what_it_does_later() {
    finds(&lists(&["[[:r x [1]] [:append x 1]]"]), &["future-read"]);
    finds(&lists(&["[[:r x 1] [:w x 1]]"]), &["future-read"]);
}

#[test]
fn lost_updates_are_found() {
    // Both read the empty list; the second append is nowhere.
    let report = lists(&[
        "[[:r x []] [:append x 1]]",
        "[[:r x []] [:append x 2]]",
        "[[:r x [1]]]",
    ]);
    assert!(
        names(&report).contains(&"lost-update".to_owned()),
        "{report}"
    );
    let lost = report
        .findings
        .iter()
        .find(|f| f.anomaly == Anomaly::LostUpdate)
        .unwrap();
    assert_eq!(lost.operations, [3, 4]);
    assert!(!report_for(&report, Model::SnapshotIsolation));
    assert!(!report_for(&report, Model::RepeatableRead));

    let report = lists(&["[[:r x nil] [:w x 1]]", "[[:r x nil] [:w x 2]]"]);
    finds(&report, &["lost-update", "G2-item"]);
    finds(
        &lists(&["[[:w x 3]]", "[[:r x 3] [:w x 1]]", "[[:r x 3] [:w x 2]]"]),
        &["lost-update", "G2-item"],
    );
    // One after the other: none is lost.
    finds(
        &lists(&["[[:r x nil] [:w x 1]]", "[[:r x 1] [:w x 2]]"]),
        &[],
    );
}

#[test]
fn lost_appends_are_found() {
    // The append is committed, and no later read has it.
    finds(
        &strict(&turns(&[
            ("ok", 0, "[[:append x 1]]"),
            ("ok", 1, "[[:append x 2]]"),
            ("ok", 2, "[[:r x [1]]]"),
        ])),
        &["G-single-realtime"],
    );
    finds(
        &strict(&turns(&[
            ("ok", 0, "[[:append x 1]]"),
            ("ok", 0, "[[:r x []]]"),
        ])),
        &["G-single-process"],
    );
    // Several are lost, and one reader lost its own.
    let report = strict(&turns(&[
        ("ok", 0, "[[:append x 1]]"),
        ("ok", 1, "[[:r x [1]] [:append x 2]]"),
        ("ok", 2, "[[:append x 3]]"),
        ("ok", 3, "[[:append x 4]]"),
        ("ok", 4, "[[:r x [1]]]"),
    ]));
    finds(&report, &["G-single-realtime"]);
    // They may still come.
    finds(
        &lists(&[
            "[[:append x 1]]",
            "[[:append x 2]]",
            "[[:r x [1]]]",
            "[[:r x [1]] [:append x 3]]",
        ]),
        &[],
    );
}

#[test]
fn reads_fit_together() {
    finds(
        &lists(&[
            "[[:append x 1]]",
            "[[:append x 2]]",
            "[[:r x [1]]]",
            "[[:r x [2 1]]]",
        ]),
        &["incompatible-order"],
    );
    finds(
        &lists(&["[[:append x 1]]", "[[:r x [1 1]]]"]),
        &["duplicate-elements"],
    );
    finds(
        &lists(&["[[:append x 1]]", "[[:r x [7]]]"]),
        &["garbage-read"],
    );
    finds(&lists(&["[[:w x 1]]", "[[:r x 7]]"]), &["garbage-read"]);
}

#[test]
fn registers_have_cycles() {
    finds(
        &lists(&["[[:w x 1] [:r y 1]]", "[[:w y 1] [:r x 1]]"]),
        &["G1c"],
    );
    finds(
        &lists(&["[[:w x 1] [:w y 1]]", "[[:r x nil] [:r y 1]]"]),
        &["G-single"],
    );
    finds(
        &lists(&["[[:r x nil] [:w y 1]]", "[[:r y nil] [:w x 1]]"]),
        &["G2-item"],
    );
    finds(
        &lists(&[
            "[[:w x 1]]",
            "[[:w y 1]]",
            "[[:r x 1] [:r y nil]]",
            "[[:r x nil] [:r y 1]]",
        ]),
        &["G-nonadjacent"],
    );
    // Write to write: what was read comes before what is written.
    let report = lists(&[
        "[[:w x 1] [:r y 2] [:w y 3]]",
        "[[:r x 1] [:w x 2] [:w y 2]]",
    ]);
    finds(&report, &["G0"]);
    let reason = "T2 wrote :x = 2 after T1 wrote 1: T2 read that before it wrote";
    assert!(report.findings[0].explanation.contains(reason), "{report}");
    let report = strict(&turns(&[
        ("ok", 0, "[[:w x 1]]"),
        ("ok", 1, "[[:r x nil]]"),
    ]));
    finds(&report, &["G-single-realtime"]);
    assert!(
        report.findings[0].explanation.contains(
            "T2 read :x = nil, and T1 wrote 1 later: the initial value comes before all others"
        ),
        "{report}"
    );
}

#[test]
fn values_of_a_register_have_an_order() {
    finds(
        &lists(&["[[:r x 2] [:w x 1]]", "[[:r x 1] [:w x 2]]"]),
        &["cyclic-versions", "G1c"],
    );

    // Blind writes have no order of their own.
    let text = turns(&[
        ("ok", 0, "[[:w x 1]]"),
        ("ok", 1, "[[:w x 2]]"),
        ("ok", 2, "[[:r x 1]]"),
        ("ok", 3, "[[:r x 2]]"),
    ]);
    finds(&strict(&text), &[]);
    let mut options = Options::new(Model::StrictSerializable);
    options.linearizable_keys = true;
    let history = read(&text).unwrap();
    finds(
        &check_with(&history, options).unwrap(),
        &["cyclic-versions"],
    );
    // The processes agree, or do not.
    let mut options = Options::new(Model::Serializable);
    options.sequential_keys = true;
    finds(&check_with(&history, options).unwrap(), &[]);
    let text = text
        .replace(":process 1", ":process 0")
        .replace(":process 3", ":process 2");
    finds(&check_with(&read(&text).unwrap(), options).unwrap(), &[]);
    let text = turns(&[
        ("ok", 0, "[[:w x 1]]"),
        ("ok", 0, "[[:w x 2]]"),
        ("ok", 2, "[[:r x 2]]"),
        ("ok", 2, "[[:r x 1]]"),
    ]);
    finds(
        &check_with(&read(&text).unwrap(), options).unwrap(),
        &["cyclic-versions"],
    );

    // The order of keys makes the second write the later one: the reader of both is in between.
    let text = turns(&[
        ("ok", 0, "[[:w x 1]]"),
        ("ok", 0, "[[:w x 2] [:w y 1]]"),
        ("ok", 1, "[[:r x 1] [:r y 1]]"),
    ]);
    let history = read(&text).unwrap();
    finds(&check_with(&history, options).unwrap(), &["G-single"]);
    options.sequential_keys = false;
    finds(&check_with(&history, options).unwrap(), &[]);
}

#[test]
fn an_indeterminate_transaction_counts_once_it_is_seen() {
    // Seen: it is committed, and all of it.
    let text = "{:type :invoke :process 0 :value [[:append x 1] [:append y 1]]}
        {:type :info :process 0 :value nil}
        {:type :invoke :process 1 :value [[:r x nil] [:r y nil]]}
        {:type :ok :process 1 :value [[:r x [1]] [:r y []]]}";
    let report = strict(&keywords(text));
    finds(&report, &["G-single"]);
    assert_eq!(report.indeterminate, (1, 1));
    // Not seen: it may have failed, or happen later.
    let unseen = keywords(text).replace("[:r :x [1]]", "[:r :x []]");
    let report = strict(&unseen);
    finds(&report, &[]);
    assert_eq!(report.indeterminate, (1, 0));
    // Without a completion it is the same.
    let open = keywords(text).replace("{:type :info :process 0 :value nil}", "");
    finds(&strict(&open), &["G-single"]);
    // It happens when it likes, but not before it was invoked.
    let late = "{:type :invoke :process 0 :value [[:append x 1]]}
        {:type :info :process 0}
        {:type :ok :process 1 :value [[:r x []]]}
        {:type :invoke :process 2 :value [[:r x nil]]}
        {:type :ok :process 2 :value [[:r x [1]]]}";
    finds(&strict(&keywords(late)), &[]);
    let early = "{:type :invoke :process 2 :value [[:r x nil]]}
        {:type :ok :process 2 :value [[:r x [1]]]}
        {:type :invoke :process 0 :value [[:append x 1]]}
        {:type :info :process 0}";
    finds(&strict(&keywords(early)), &["G1c-realtime"]);
}

#[test]
fn faults_of_the_recorder_are_errors() {
    let error = |text: &str| {
        let history = read(&keywords(text)).unwrap();
        check(&history, Model::Serializable).unwrap_err()
    };
    assert_eq!(
        error("{:type :ok :value [[:append x 1] [:append x 1]]}").to_string(),
        "operations 0 and 0 both write 1 to key :x"
    );
    assert_eq!(
        error("{:type :ok :value [[:w x 1]]} {:type :fail :value [[:w x 1]]}").to_string(),
        "operations 0 and 1 both write 1 to key :x"
    );
    assert!(matches!(
        error("{:type :ok :value [[:append x 1] [:r x 1]]}"),
        HistoryError::Mixed { index: 0 }
    ));
    assert!(matches!(
        error("{:type :ok :value [[:w x nil]]}"),
        HistoryError::NilWrite { index: 0, .. }
    ));
    let invoke = "{:type :invoke :process 1 :value [[:r x nil]]}";
    assert!(matches!(
        error(&[invoke, invoke].concat()),
        HistoryError::Overlap {
            process: 1,
            index: 1
        }
    ));
    assert!(matches!(
        error(&[invoke, "{:type :ok :process 1 :value [[:r y [1]]]}"].concat()),
        HistoryError::Mismatch { index: 1 }
    ));
    assert!(matches!(
        error(&[invoke, "{:type :ok :process 1}"].concat()),
        HistoryError::MissingValue { index: 1 }
    ));
    assert!(matches!(
        error("{:type :invoke :process 1}"),
        HistoryError::MissingValue { .. }
    ));
}

#[test]
fn models_forbid_more_and_more() {
    use Model::{
        ReadCommitted, ReadUncommitted, RepeatableRead, Serializable, SnapshotIsolation,
        StrictSerializable, StrongSessionSerializable, StrongSessionSnapshotIsolation,
        StrongSnapshotIsolation,
    };
    let mut all = vec![
        Anomaly::DuplicateElements,
        Anomaly::IncompatibleOrder,
        Anomaly::GarbageRead,
        Anomaly::CyclicVersions,
        Anomaly::Internal,
        Anomaly::FutureRead,
        Anomaly::G1a,
        Anomaly::G1b,
        Anomaly::LostUpdate,
    ];
    for cycle in [
        Cycle::G0,
        Cycle::G1c,
        Cycle::GSingle,
        Cycle::GNonadjacent,
        Cycle::G2Item,
    ] {
        for orders in [Orders::Data, Orders::Process, Orders::Realtime] {
            all.push(Anomaly::Cycle(cycle, orders));
        }
    }
    for (weaker, stronger) in [
        (ReadUncommitted, ReadCommitted),
        (ReadCommitted, RepeatableRead),
        (ReadCommitted, SnapshotIsolation),
        (RepeatableRead, Serializable),
        (SnapshotIsolation, Serializable),
        (SnapshotIsolation, StrongSessionSnapshotIsolation),
        (StrongSessionSnapshotIsolation, StrongSnapshotIsolation),
        (StrongSessionSnapshotIsolation, StrongSessionSerializable),
        (StrongSnapshotIsolation, StrictSerializable),
        (Serializable, StrongSessionSerializable),
        (StrongSessionSerializable, StrictSerializable),
    ] {
        let more = all
            .iter()
            .filter(|a| stronger.forbids(**a) && !weaker.forbids(**a));
        assert!(more.count() > 0 || (weaker, stronger) == (RepeatableRead, Serializable));
        assert!(
            all.iter()
                .all(|a| stronger.forbids(*a) || !weaker.forbids(*a)),
            "{weaker}"
        );
        assert_eq!(weaker.to_string().parse(), Ok(weaker));
    }
    assert!(
        all.iter()
            .all(|anomaly| StrictSerializable.forbids(*anomaly))
    );
    assert!("chaos".parse::<Model>().is_err());
}
