//! Checks the output plugin's values in each format, and that they can be applied again.

use braid_gir::{DateTime, DateTimeKind, Decimal, Reader, Record, Value};

use crate::changes::apply_frame;
use crate::db::{column, other, sql, unhex};
use crate::samples::{SAMPLES, is_known, quoted};
use crate::{Outcome, Test, check, same, test};

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (of, literals) in SAMPLES {
        let name = format!("format: {of}, decoded and applied");
        tests.push(test(name, move || there_and_back(of, literals)));
    }
    for (of, literal, wal2json, gir_json) in JSON {
        tests.push(test(
            format!("format: wal2json of {of} {literal}"),
            move || as_wal2json(of, literal, wal2json),
        ));
        tests.push(test(
            format!("format: gir-json of {of} {literal}"),
            move || as_gir_json(of, literal, gir_json),
        ));
    }
    for (of, literal, wanted) in values() {
        tests.push(test(format!("format: gir of {of} {literal}"), move || {
            as_gir(of, literal, wanted)
        }));
    }
    tests.push(test(
        "format: names with quotes and other characters",
        names,
    ));
    tests.push(test(
        "format: the session's settings do not count",
        settings,
    ));
    tests
}

/// A type, a literal, and the value in the JSON of either format.
#[rustfmt::skip]
const JSON: &[(&str, &str, &str, &str)] = &[
    ("integer", "-2147483648", "-2147483648", "-2147483648"),
    ("bigint", "9007199254740993", "9007199254740993", r#"{"integer":"9007199254740993"}"#),
    ("boolean", "t", "true", "true"),
    ("numeric", "1.50", "1.50", r#"{"decimal":"1.50"}"#),
    ("numeric", "NaN", "null", r#"{"decimal":"NaN"}"#),
    ("numeric", "-Infinity", "null", r#"{"decimal":"-Infinity"}"#),
    ("double precision", "0.1", "0.1", r#"{"double":0.1}"#),
    ("double precision", "-0", "-0", r#"{"double":"-0"}"#),
    ("double precision", "NaN", "null", r#"{"double":"NaN"}"#),
    ("double precision", "Infinity", "null", r#"{"double":"Infinity"}"#),
    ("real", "-Infinity", "null", r#"{"single":"-Infinity"}"#),
    ("real", "0.1", "0.1", r#"{"single":0.1}"#),
    ("text", "null", "null", "null"),
    ("text", "", r#""""#, r#""""#),
    ("text", "q\"b\\t\té𝄞\u{1}\u{7f}/", "\"q\\\"b\\\\t\\té𝄞\\u0001\u{7f}/\"", "\"q\\\"b\\\\t\\té𝄞\\u0001\u{7f}/\""),
    ("char(3)", "a", r#""a  ""#, r#""a  ""#),
    ("\"char\"", "a", r#""a""#, "97"),
    ("bytea", "\\x00ff", r#""00ff""#, r#"{"binary":"00ff"}"#),
    ("date", "infinity", r#""infinity""#, r#"{"datetime":"infinity"}"#),
    ("date", "0044-03-15 BC", r#""0044-03-15 BC""#, r#"{"datetime":"0044-03-15T00:00:00 BC"}"#),
    ("timestamp", "-infinity", r#""-infinity""#, r#"{"datetime":"-infinity"}"#),
    ("timestamp", "2020-02-29 24:00:00", r#""2020-03-01 00:00:00""#, r#"{"datetime":"2020-03-01T00:00:00"}"#),
    ("timestamptz", "infinity", r#""infinity""#, r#"{"datetime":"infinity+00:00"}"#),
    ("timestamptz", "1969-12-31 23:59:59.999999+00", r#""1969-12-31 23:59:59.999999+00""#, r#"{"timestamp":"1969-12-31T23:59:59.999999Z"}"#),
    ("time", "24:00:00", r#""24:00:00""#, r#"{"text":"24:00:00"}"#),
    ("interval", "1 year -3 days 04:05:06.7", r#""1 year -3 days +04:05:06.7""#, r#"{"text":"1 year -3 days +04:05:06.7"}"#),
    ("uuid", "A0EEBC999C0B4EF8BB6D6BB9BD380A11", r#""a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11""#, r#"{"text":"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"}"#),
    ("json", "{\"a\":  1}", r#""{\"a\":  1}""#, r#""{\"a\":  1}""#),
    ("jsonb", "{\"b\": 1.50}", r#""{\"b\": 1.50}""#, r#"{"text":"{\"b\": 1.50}"}"#),
    ("integer[]", "{{1,NULL},{3,4}}", r#""{{1,NULL},{3,4}}""#, r#"{"text":"{{1,NULL},{3,4}}"}"#),
    ("text[]", "{\"a \\\"b\",NULL,\"NULL\",é}", r#""{\"a \\\"b\",NULL,\"NULL\",é}""#, r#"{"text":"{\"a \\\"b\",NULL,\"NULL\",é}"}"#),
    ("f.mood", "it's \"ok\"", r#""it's \"ok\"""#, r#""it's \"ok\"""#),
    ("f.mood[]", "{sad}", r#""{sad}""#, r#"{"text":"{sad}"}"#),
    ("f.pair", "(1,\"b \"\"c\"\"\")", r#""(1,\"b \"\"c\"\"\")""#, r#"{"text":"(1,\"b \"\"c\"\"\")"}"#),
    ("f.positive", "1.10", r#""1.10""#, r#"{"decimal":"1.10"}"#),
    ("int4range", "[1,5)", r#""[1,5)""#, r#"{"text":"[1,5)"}"#),
    ("money", "-1.50", r#""-$1.50""#, r#"{"text":"-$1.50"}"#),
    ("oid", "4294967295", "4294967295", "4294967295"),
    ("inet", "::1/64", r#""::1/64""#, r#"{"text":"::1/64"}"#),
    ("point", "(1.5,NaN)", r#""(1.5,NaN)""#, r#"{"text":"(1.5,NaN)"}"#),
    ("regclass", "pg_class", r#""pg_class""#, r#"{"text":"pg_class"}"#),
    ("xid", "7", r#""7""#, "7"),
    ("bit(3)", "101", r#""101""#, r#"{"text":"101"}"#),
];

/// A type, a literal, and the value in GIR.
#[rustfmt::skip]
fn values() -> Vec<(&'static str, &'static str, Value<'static>)> {
    use DateTimeKind::{Finite, Infinity, MinusInfinity};
    let moment = |kind, days, micros, offset| Value::DateTime(DateTime { kind, days, micros, offset });
    let decimal = |bytes: &'static [u8]| Value::Decimal(Decimal::new(bytes).unwrap());
    vec![
        ("text", "null", Value::Null),
        ("boolean", "t", Value::Integer(1)),
        ("\"char\"", "a", Value::Integer(97)),
        ("smallint", "-32768", Value::Integer(-32_768)),
        ("bigint", "-9223372036854775808", Value::Integer(i64::MIN)),
        ("oid", "4294967295", Value::Integer(4_294_967_295)),
        ("real", "-0", Value::Single(-0.0)),
        ("double precision", "Infinity", Value::Double(f64::INFINITY)),
        ("double precision", "5e-324", Value::Double(5e-324)),
        ("numeric", "12.50", decimal(&[0, 2, 0, 0, 0, 0, 0, 2, 0, 12, 0x13, 0x88])),
        ("numeric", "0", decimal(&[0; 8])),
        ("numeric", "NaN", decimal(&[0, 0, 0, 0, 0xC0, 0, 0, 0])),
        ("f.positive", "12.50", decimal(&[0, 2, 0, 0, 0, 0, 0, 2, 0, 12, 0x13, 0x88])),
        ("date", "1969-12-31", moment(Finite, -1, 0, None)),
        ("date", "-infinity", moment(MinusInfinity, 0, 0, None)),
        ("timestamp", "1970-01-02 00:00:00.000001", moment(Finite, 1, 1, None)),
        ("timestamp", "1969-12-31 23:59:59.999999", moment(Finite, -1, 86_399_999_999, None)),
        ("timestamp", "infinity", moment(Infinity, 0, 0, None)),
        ("timestamptz", "1970-01-01 00:00:00+00", Value::UnixTimestamp(0)),
        ("timestamptz", "-infinity", moment(MinusInfinity, 0, 0, Some(0))),
        ("text", "é𝄞", Value::String("é𝄞".as_bytes())),
        ("char(3)", "a", Value::String(b"a  ")),
        ("name", "a name", Value::String(b"a name")),
        ("json", "[1,  2]", Value::String(b"[1,  2]")),
        ("bytea", "\\x00ff", Value::Binary(b"\0\xff")),
        ("uuid", "07070707-0707-0707-0707-070707070707", Value::Binary(&[7; 16])),
        ("inet", "10.0.0.1/8", Value::Binary(&[2, 8, 0, 4, 10, 0, 0, 1])),
        ("jsonb", "[]", Value::Binary(b"\x01[]")),
        ("integer[]", "{}", Value::Binary(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 23])),
        ("f.mood", "sad", Value::String(b"sad")),
        ("f.mood[]", "{sad,NULL}", Value::BinaryText(b"{sad,NULL}")),
        ("f.pair", "(1,)", Value::BinaryText(b"(1,)")),
        ("regclass", "pg_class", Value::BinaryText(b"pg_class")),
        ("int2vector", "1 2", Value::BinaryText(b"1 2")),
    ]
}

/// Makes a table with this value, and gives what is decoded of that with these options.
fn decoded(of: &str, literals: &[&str], function: &str, options: &str) -> Vec<String> {
    other("drop table if exists f.t");
    other(&format!("create table f.t (id int primary key, v {of})"));
    let rows: Vec<String> = literals
        .iter()
        .enumerate()
        .map(|(id, literal)| {
            format!(
                "({}, {})",
                id + 1,
                if *literal == "null" {
                    "null".to_owned()
                } else {
                    quoted(literal)
                }
            )
        })
        .collect();
    changes(
        &format!("insert into f.t values {}", rows.join(", ")),
        function,
        options,
    )
}

/// The decoded changes of a statement of the second session.
fn changes(statement: &str, function: &str, options: &str) -> Vec<String> {
    other("select pg_replication_slot_advance('inside', pg_current_wal_insert_lsn())");
    other(statement);
    let data = if function.contains("binary") {
        "encode(data, 'hex')"
    } else {
        "data"
    };
    other(&format!(
        "select {data} from {function}('inside', null, null, {options})"
    ))
}

const BINARY: &str = "pg_logical_slot_get_binary_changes";
const TEXT: &str = "pg_logical_slot_get_changes";
const GIR: &str = "'proto_version', '1', 'publication_names', 'inside'";
const GIR_JSON: &str = "'format', 'gir-json', 'publication_names', 'inside'";
const WAL2JSON: &str = "'format-version', '2', 'include-transaction', '0'";

/// The bytes of a stream.
fn gir(of: &str, literals: &[&str]) -> Vec<u8> {
    let frames = decoded(of, literals, BINARY, GIR);
    frames.iter().flat_map(|frame| unhex(frame)).collect()
}

fn there_and_back(of: &str, literals: &[&str]) -> Outcome {
    if !is_known(of) {
        return Ok(());
    }
    let frame = gir(of, literals);
    let read = || column("select v::text from f.t order by id");
    let before = read();
    same(&before.len(), &literals.len())?;
    sql("delete from f.t");
    apply_frame(&frame).map_err(|error| format!("{}: {}", error.sqlstate, error.message))?;
    same(&read(), &before)
}

fn as_wal2json(of: &str, literal: &str, wanted: &str) -> Outcome {
    let lines = decoded(of, &[literal], TEXT, WAL2JSON);
    let wanted = format!("\"value\":{wanted}}}]}}");
    check(
        lines.len() == 1 && lines[0].ends_with(&wanted),
        format!("{lines:?} lacks {wanted}"),
    )
}

fn as_gir_json(of: &str, literal: &str, wanted: &str) -> Outcome {
    let lines = decoded(of, &[literal], TEXT, GIR_JSON);
    let wanted = format!("\"after\":{{\"id\":1,\"v\":{wanted}}}");
    let line = lines
        .iter()
        .find_map(|line| line.find("\"after\"").map(|at| &line[at..]));
    check(
        line.is_some_and(|line| line.contains(&wanted)),
        format!("{line:?} lacks {wanted}"),
    )
}

fn as_gir(of: &str, literal: &str, wanted: Value<'static>) -> Outcome {
    let frame = gir(of, &[literal]);
    let mut reader = Reader::new(&frame);
    while let Some(record) = reader.next_record().map_err(|error| error.to_string())? {
        if let Record::Change(change) = record {
            let after = change.after.ok_or("no row")?;
            let value = after.values().nth(1).ok_or("no value")?;
            return same(&value.map_err(|error| error.to_string())?, &wanted);
        }
    }
    Err("no change".to_owned())
}

fn names() -> Outcome {
    other("drop table if exists f.\"T \\ \"\"é\"\"\"");
    other("create table f.\"T \\ \"\"é\"\"\" (\"c \"\"ö\"\"\" int primary key)");
    let lines = changes(
        "insert into f.\"T \\ \"\"é\"\"\" values (1)",
        TEXT,
        WAL2JSON,
    );
    let wanted = r#"{"action":"I","schema":"f","table":"T \\ \"é\"","columns":[{"name":"c \"ö\"","type":"integer","value":1}]}"#;
    same(&lines, &vec![wanted.to_owned()])?;
    let lines = changes(
        "update f.\"T \\ \"\"é\"\"\" set \"c \"\"ö\"\"\" = 2",
        TEXT,
        GIR_JSON,
    );
    let wanted = r#""after":{"c \"ö\"":2}"#;
    check(
        lines.iter().any(|line| line.contains(wanted)),
        format!("{lines:?}"),
    )?;
    other("drop table f.\"T \\ \"\"é\"\"\"");
    Ok(())
}

/// Text forms are PostgreSQL's own defaults, whatever the session that asks prefers.
fn settings() -> Outcome {
    let preferred = [
        ("datestyle", "'SQL, DMY'"),
        ("intervalstyle", "iso_8601"),
        ("extra_float_digits", "-10"),
        ("bytea_output", "escape"),
        ("timezone", "'Asia/Kathmandu'"),
    ];
    for (name, value) in preferred {
        other(&format!("set {name} = {value}"));
    }
    let literals = ["(0.1,\"2000-12-31 00:00:00+00\",\"3 days\",\"\\\\x00\")"];
    other("drop type if exists f.many cascade");
    other("create type f.many as (a float8, b timestamptz, c interval, d bytea)");
    let lines = decoded("f.many", &literals, TEXT, GIR_JSON);
    for (name, _) in preferred {
        other(&format!("reset {name}"));
    }
    let wanted = r#"(0.1,\"2000-12-31 00:00:00+00\",\"3 days\",\"\\\\x00\")"#;
    check(
        lines.iter().any(|line| line.contains(wanted)),
        format!("{lines:?}"),
    )
}
