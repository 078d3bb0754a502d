//! The text form: what is read, round trips, errors with their place, and any garbage.

use std::sync::Arc;

use braid_histories::{
    History, Kind, MAX_DEPTH, MicroOp, Model, Operation, Seen, Value, check, read, write,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::{Just, Strategy, any, prop_assert_eq, prop_oneof, proptest};

#[test]
fn forms_of_other_writers_are_read() {
    let text = "; a comment
        [#jepsen.history.Op{:index 7, :time 12N, :type :invoke, :process 3, :f :txn,
          :value ([:append :x -1] [:r \"y\\u0041\\n\" nil])}
         {:type :ok :process 3 :value [[:append :x -1] [:r \"yA\\n\" (true a/b nil)]]}
         #_ {:type nonsense}
         {:type :info, :process :nemesis, :f :start, :value {:n1 #{:n2 :n3}}}
         {:type :info, :process nil, :value nil, :error [\"x\" 1.5 1/2 \\a \\newline ##NaN #{}],
          #inst \"2026\" {1 [2 (3)]}}]";
    let text = text.replace("a/b", ":a/b");
    let history = read(&text).unwrap();
    let key = || Value::from("yA\n");
    let append = MicroOp::Append {
        key: Value::keyword("x").unwrap(),
        value: Value::Integer(-1),
    };
    let read = |seen| MicroOp::Read { key: key(), seen };
    let list = vec![
        Value::Bool(true),
        Value::keyword("a/b").unwrap(),
        Value::Nil,
    ];
    let operation = |kind, process, index, time, value| Operation {
        kind,
        process,
        index,
        time,
        value,
    };
    let invoked = vec![append.clone(), read(Seen::Nil)];
    let completed = vec![append, read(Seen::List(list))];
    assert_eq!(
        history.operations,
        [
            operation(Kind::Invoke, Some(3), 7, Some(12), Some(invoked)),
            operation(Kind::Ok, Some(3), 1, None, Some(completed)),
            operation(Kind::Info, None, 2, None, None),
        ]
    );
    assert_eq!(
        write(&history).lines().nth(1).unwrap(),
        "{:index 1, :type :ok, :process 3, :f :txn, \
         :value [[:append :x -1] [:r \"yA\\n\" [true :a/b nil]]]}"
    );
}

#[test]
fn an_empty_history_is_valid() {
    for text in ["", " , ; nothing", "[]", "()"] {
        let history = read(text).unwrap();
        assert!(history.operations.is_empty());
        assert!(
            check(&history, Model::StrictSerializable)
                .unwrap()
                .is_valid()
        );
    }
}

#[test]
fn errors_have_a_place() {
    for (text, error) in [
        ("{:type :ok", "line 1, column 1: missing \"}\""),
        ("\n  [{:type :ok}", "line 2, column 3: missing \"]\""),
        ("{:type :ok} )", "line 1, column 13: unexpected \")\""),
        (
            "[] {:type :ok}",
            "line 1, column 4: text follows the history",
        ),
        ("{:type}", "line 1, column 2: map has a key without a value"),
        ("7", "line 1, column 1: expected a map, found an integer"),
        ("{}", "line 1, column 1: operation has no :type"),
        (
            "{:type :done}",
            "line 1, column 8: expected :invoke, :ok, :fail or :info",
        ),
        (
            "{:type :ok :index -1}",
            "line 1, column 19: :index is negative",
        ),
        (
            "{:type :ok :index :a}",
            "line 1, column 19: expected an integer, found a keyword",
        ),
        (
            "{:type :ok :value 1}",
            "line 1, column 19: expected steps, found an integer",
        ),
        (
            "{:type :ok :value [[:cas 1 2]]}",
            "line 1, column 21: expected [:append key value], [:w key value] or [:r key value]",
        ),
        (
            "{:type :ok\n :value [[:r 1]]}",
            "line 2, column 10: expected [:append key value], [:w key value] or [:r key value]",
        ),
        (
            "{:type :ok :value [[:r [] 1]]}",
            "line 1, column 24: expected a key or a value, found a sequence",
        ),
        (
            "{:type :ok :value [[:w 1 é]]}",
            "line 1, column 26: unexpected character 'é'",
        ),
        (
            "{:type :ok :value [[:w \"é\" 99999999999999999999]]}",
            "line 1, column 28: integer does not fit into 64 bits",
        ),
        (
            "{:type :ok :x \"a\\q\"}",
            "line 1, column 17: unknown escape in string",
        ),
        (
            "{:type :ok :x \"\\u12\"}",
            "line 1, column 16: \\u needs four hexadecimal digits",
        ),
        (
            "{:type :ok :x \"\\ud800\"}",
            "line 1, column 16: escape is not a character",
        ),
        ("{:type :ok :x \"a}", "line 1, column 15: string has no end"),
        ("{:type :ok #_", "line 1, column 12: nothing follows #_"),
        (
            "{:type :ok :x #a",
            "line 1, column 15: nothing follows a tag",
        ),
        ("# {}", "line 1, column 1: tag has no name"),
        (": {}", "line 1, column 1: keyword has no name"),
    ] {
        assert_eq!(read(text).unwrap_err().to_string(), error, "{text}");
    }
}

#[test]
fn nesting_is_bounded() {
    let nested = |open: &str, depth: usize| {
        let text = format!("{{:type :ok :x {} 1", open.repeat(depth));
        read(&text).unwrap_err().problem
    };
    for open in ["[", "(", "{", "#{", "#a ", "#_ ", "#_ #a ["] {
        assert_ne!(nested(open, MAX_DEPTH / 4), "forms are nested too deeply");
        for depth in [MAX_DEPTH + 1, 100_000] {
            assert_eq!(nested(open, depth), "forms are nested too deeply", "{open}");
        }
    }
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<i64>().prop_map(Value::Integer),
        any::<bool>().prop_map(Value::Bool),
        any::<String>().prop_map(|text| Value::Text(Arc::new(text))),
        "[a-z][a-z0-9./?*-]{0,8}".prop_map(|name| Value::keyword(&name).unwrap()),
    ]
}

fn micro_op() -> impl Strategy<Value = MicroOp> {
    let seen = prop_oneof![
        Just(Seen::Nil),
        vec(prop_oneof![value(), Just(Value::Nil)], 0..5).prop_map(Seen::List),
        value().prop_map(Seen::Value),
    ];
    prop_oneof![
        (value(), value()).prop_map(|(key, value)| MicroOp::Append { key, value }),
        (value(), value()).prop_map(|(key, value)| MicroOp::Write { key, value }),
        (value(), seen).prop_map(|(key, seen)| MicroOp::Read { key, seen }),
    ]
}

fn history() -> impl Strategy<Value = History> {
    let kind = prop_oneof![
        Just(Kind::Invoke),
        Just(Kind::Ok),
        Just(Kind::Fail),
        Just(Kind::Info)
    ];
    let index = 0..u64::MAX / 2;
    let steps = option::of(vec(micro_op(), 0..5));
    let operation = (
        kind,
        option::of(any::<i64>()),
        index,
        option::of(any::<i64>()),
        steps,
    );
    let operation = operation.prop_map(|(kind, process, index, time, value)| Operation {
        kind,
        process,
        index,
        time,
        value,
    });
    vec(operation, 0..12).prop_map(|operations| History { operations })
}

/// Reads a text, and checks what was read: neither may panic.
fn answer(text: &str) {
    if let Ok(history) = read(text)
        && let Ok(report) = check(&history, Model::StrictSerializable)
    {
        assert!(!report.to_string().is_empty());
    }
}

const FORMS: &[&str] = &[
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    "#{",
    "#_",
    "#a",
    "##",
    ":type ",
    ":ok ",
    ":invoke ",
    ":value ",
    ":process ",
    ":index ",
    "nil ",
    "1 ",
    "-7 ",
    "\"",
    "\\",
    "\\u00e9",
    ":r ",
    ":append ",
    ":w ",
    "[[:r 1 [1 2]]]",
    "[[:append 1 1]]",
    "{:type :ok :value ",
    ";",
    "\n",
];

proptest! {
    #[test]
    fn written_histories_are_read(history in history()) {
        let text = write(&history);
        prop_assert_eq!(read(&text).unwrap(), history.clone());
        // In a vector too.
        prop_assert_eq!(read(&format!("[{text}]")).unwrap(), history);
    }

    #[test]
    fn garbage_has_an_answer(text in any::<String>()) {
        answer(&text);
    }

    #[test]
    fn forms_in_any_order_have_an_answer(
        forms in vec(proptest::sample::select(FORMS), 0..40)
    ) {
        answer(&forms.concat());
    }

    #[test]
    fn damaged_histories_have_an_answer(
        history in history(), place in any::<proptest::sample::Index>(), with in any::<char>()
    ) {
        let mut text: Vec<char> = write(&history).chars().collect();
        if !text.is_empty() {
            let place = place.index(text.len());
            text[place] = with;
            answer(&text.iter().collect::<String>());
            answer(&text[..place].iter().collect::<String>());
        }
    }
}
