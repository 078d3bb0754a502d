//! Objects that servers wrote in gir-json (the seeds of the fuzz target) satisfy the published
//! schema. Each part of that schema refuses an object with a missing or a foreign member, and
//! anything else.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::json::is_published;

/// Streams of servers: one object a line.
const STREAMS: [&str; 5] = [
    include_str!("../../../../fuzz/seeds/json/changes"),
    include_str!("../../../../fuzz/seeds/json/changes-once"),
    include_str!("../../../../fuzz/seeds/json/fetched"),
    include_str!("../../../../fuzz/seeds/json/kinds"),
    include_str!("../../../../fuzz/seeds/json/running"),
];

fn objects() -> Vec<Value> {
    let lines = STREAMS.iter().flat_map(|stream| stream.lines());
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn published() -> Value {
    serde_json::from_str(include_str!("../../../../docs/gir.schema.json")).unwrap()
}

/// Returns a validator for one of the definitions.
fn part(name: &str) -> jsonschema::Validator {
    let mut schema = published();
    let root = schema.as_object_mut().unwrap();
    for member in ["type", "required", "oneOf"] {
        root.remove(member);
    }
    root.insert("$ref".to_owned(), json!(format!("#/$defs/{name}")));
    jsonschema::draft202012::new(&schema).unwrap()
}

/// Returns a server's object for each definition of an object with named members, including a
/// schema without columns.
fn samples() -> Vec<(&'static str, Value)> {
    let objects = objects();
    let first = |operation: &str| {
        let found = objects
            .iter()
            .find(|object| object["operation"] == operation);
        found.unwrap().clone()
    };
    let binary = objects
        .iter()
        .filter_map(|object| object["after"].as_object())
        .flat_map(|row| row.values())
        .find(|value| value.get("binary").is_some());
    let running = objects
        .iter()
        .map(|object| &object["running"])
        .find(|running| running.is_object());
    vec![
        ("stream", first("stream")),
        ("schemaRecord", first("schema")),
        ("begin", first("begin")),
        ("commit", first("commit")),
        ("insert", first("insert")),
        ("update", first("update")),
        ("delete", first("delete")),
        ("truncate", first("truncate")),
        ("message", first("message")),
        ("segmentStart", first("segment_start")),
        ("segmentEnd", first("segment_end")),
        ("subtransaction", first("subtransaction")),
        ("abort", first("abort")),
        ("streamedCommit", first("streamed_commit")),
        ("preparedStep", first("begin_prepared")),
        ("prepare", first("prepare")),
        ("rollbackPrepared", first("rollback_prepared")),
        ("running", running.unwrap().clone()),
        ("transaction", first("begin")["transaction"].clone()),
        ("schema", first("schema")["schema"].clone()),
        ("column", first("schema")["schema"]["columns"][0].clone()),
        ("binary", binary.unwrap().clone()),
    ]
}

/// Returns values that the other definitions accept, and values that they refuse.
fn values() -> Vec<(&'static str, Vec<Value>, Vec<Value>)> {
    vec![
        (
            "image",
            vec![json!({}), json!({"a": 1, "b": {"fetched": "x"}})],
            vec![
                json!({"a": []}),
                json!({"a": {"fetched": "x", "more": 1}}),
                json!({"a": {"fetched": {"fetched": 1}}}),
                json!([1]),
                json!(null),
            ],
        ),
        (
            "value",
            vec![
                json!(null),
                json!(-1),
                json!(true),
                json!("a"),
                json!({"double": 0.5}),
            ],
            vec![
                json!({}),
                json!({"foreign": "1"}),
                json!({"integer": "1", "text": "1"}),
                json!({"integer": 1}),
                json!({"timestamp": "today"}),
                json!(0.5),
                json!(9_007_199_254_740_992_u64),
                json!([]),
            ],
        ),
        (
            "float",
            vec![json!(1), json!(-0.5), json!("NaN")],
            vec![json!("1"), json!(null)],
        ),
        (
            "keys",
            vec![json!([]), json!(["0123456789abcdef"])],
            vec![
                json!(["0123456789ABCDEF"]),
                json!(["0"]),
                json!([1]),
                json!({}),
            ],
        ),
        (
            "prepared",
            vec![json!("two"), json!("")],
            vec![json!(2), json!(null)],
        ),
        (
            "ofOneTransaction",
            vec![
                json!({"running": {}}),
                json!({"transaction": {}, "prepared": "two"}),
            ],
            vec![
                json!({"running": {}, "transaction": {}}),
                json!({"running": {}, "prepared": "two"}),
            ],
        ),
    ]
}

/// Returns values accepted and refused by definitions of scalars whose text has a form.
fn scalars() -> Vec<(&'static str, Vec<Value>, Vec<Value>)> {
    vec![
        ("barrier", vec![json!(true)], vec![json!(1), json!("true")]),
        (
            "beforeKind",
            vec![json!("key"), json!("row")],
            vec![json!("none"), json!(null)],
        ),
        (
            "lsn",
            vec![json!("0/0"), json!("FFFFFFFF/1a")],
            vec![
                json!("0"),
                json!("/1"),
                json!("100000000/0"),
                json!("G/0"),
                json!(0),
            ],
        ),
        (
            "timestamp",
            vec![
                json!("2026-01-02T03:04:05Z"),
                json!("0044-03-15T12:00:00.5Z BC"),
            ],
            vec![
                json!("2026-01-02T03:04:05"),
                json!("2026-01-02"),
                json!("2026-01-02T03:04:05+00"),
                json!(0),
            ],
        ),
        (
            "datetime",
            vec![json!("2026-01-02T03:04:05+02:00"), json!("-infinity")],
            vec![json!("2026-01-02"), json!("forever"), json!(0)],
        ),
        (
            "hex",
            vec![json!(""), json!("00ff")],
            vec![json!("0"), json!("FF"), json!("0x00"), json!(0)],
        ),
        (
            "uint32",
            vec![json!(0), json!(u32::MAX)],
            vec![json!(-1), json!(1_u64 << 32), json!(0.5), json!("0")],
        ),
    ]
}

#[test]
fn what_servers_wrote_is_as_published() {
    let mut operations = BTreeSet::new();
    for stream in STREAMS {
        for line in stream.lines() {
            assert_eq!(is_published(line), Ok(()), "{line}");
            let object: Value = serde_json::from_str(line).unwrap();
            operations.insert(object["operation"].as_str().unwrap().to_owned());
        }
    }
    assert_eq!(operations, published_operations());
}

/// Returns each kind of object in the schema.
fn published_operations() -> BTreeSet<String> {
    let published = published();
    let kinds = published["oneOf"].as_array().unwrap().iter();
    let operations = kinds.flat_map(|kind| {
        let name = kind["$ref"].as_str().unwrap();
        let operation =
            &published["$defs"][name.trim_start_matches("#/$defs/")]["properties"]["operation"];
        match operation["enum"].as_array() {
            Some(several) => several.clone(),
            None => vec![operation["const"].clone()],
        }
    });
    operations
        .map(|operation| operation.as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn every_definition_is_looked_at() {
    let of_objects = samples().into_iter().map(|(name, _)| name);
    let of_values = values().into_iter().chain(scalars()).map(|(name, ..)| name);
    let looked_at: BTreeSet<_> = of_objects.chain(of_values).map(str::to_owned).collect();
    let published = published();
    let published: BTreeSet<_> = published["$defs"]
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    assert_eq!(looked_at, published);
}

#[test]
fn an_object_has_its_members_and_no_others() {
    for (name, sample) in samples() {
        let (part, definition) = (part(name), &published()["$defs"][name]);
        assert!(part.is_valid(&sample), "{name}: {sample}");
        for member in definition["required"].as_array().unwrap() {
            let mut lacks = sample.clone();
            let member = member.as_str().unwrap();
            assert!(lacks.as_object_mut().unwrap().remove(member).is_some());
            assert!(!part.is_valid(&lacks), "{name} without {member}");
        }
        let mut foreign = sample.clone();
        foreign["foreign"] = json!(1);
        assert!(!part.is_valid(&foreign), "{name} with a foreign member");
        for (member, _) in sample.as_object().unwrap() {
            let mut other = sample.clone();
            other[member] = json!([[]]);
            assert!(!part.is_valid(&other), "{name} with another {member}");
        }
        assert!(!part.is_valid(&json!([])), "{name}: an array");
    }
}

#[test]
fn an_object_of_any_kind_is_refused_as_a_whole() {
    for object in objects() {
        let mut foreign = object.clone();
        foreign["foreign"] = json!(1);
        assert!(is_published(&foreign.to_string()).is_err(), "{foreign}");
        let mut lacks = object.clone();
        lacks.as_object_mut().unwrap().remove("operation");
        assert!(is_published(&lacks.to_string()).is_err(), "{lacks}");
        let mut unknown = object;
        unknown["operation"] = json!("upsert");
        assert!(is_published(&unknown.to_string()).is_err(), "{unknown}");
    }
}

#[test]
fn a_schema_has_a_number_or_columns() {
    let part = part("schema");
    let table = json!({"namespace": "public", "table": "items"});
    assert!(!part.is_valid(&table));
    for (member, value) in [("number", json!(1)), ("columns", json!([]))] {
        let mut schema = table.clone();
        schema[member] = value;
        assert!(part.is_valid(&schema), "{schema}");
    }
    let keys = |keys: Value| {
        let mut schema = table.clone();
        schema["number"] = json!(1);
        schema["unique_keys"] = keys;
        part.is_valid(&schema)
    };
    assert!(keys(
        json!([{"columns": ["a", {"column": "b", "comparison": "C"}], "nulls_equal": true}])
    ));
    assert!(!keys(json!([{}])));
    assert!(!keys(json!([{"columns": ["a"], "foreign": 1}])));
    assert!(!keys(json!([{"columns": [{"column": "b"}]}])));
    assert!(!keys(
        json!([{"columns": [{"column": "b", "comparison": "C", "foreign": 1}]}])
    ));
}

#[test]
fn values_are_of_their_form() {
    for (name, taken, refused) in values().into_iter().chain(scalars()) {
        let part = part(name);
        for value in taken {
            assert!(part.is_valid(&value), "{name}: {value}");
        }
        for value in refused {
            assert!(!part.is_valid(&value), "{name}: {value}");
        }
    }
}
