//! The hash against its test vectors, its published parts, its page and its example in Python.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::hash::Fnv;
use crate::key::Sink;
use crate::{HASH_VERSION, Key, KeyType, Number, RecordHash, Shards, Spread, Tenant, TenantHash};

fn docs(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs")
        .join(file)
}

fn vectors() -> Value {
    let text = std::fs::read_to_string(docs("examples/shard_vectors.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn text<'a>(vector: &'a Value, field: &str) -> &'a str {
    vector[field].as_str().unwrap()
}

fn number(vector: &Value, field: &str) -> u32 {
    vector[field].as_u64().unwrap().try_into().unwrap()
}

/// Days from 2000-01-01 to a date in the form 2024-02-29.
fn days(date: &str) -> i32 {
    let parts: Vec<i32> = date.split('-').map(|part| part.parse().unwrap()).collect();
    let [year, month, day] = parts[..] else {
        panic!("{date}")
    };
    let is_leap = |year: i32| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let of_year = |year: i32| if is_leap(year) { 366 } else { 365 };
    let before_year: i32 = if year >= 2000 {
        (2000..year).map(of_year).sum()
    } else {
        -(year..2000).map(of_year).sum::<i32>()
    };
    let february = if is_leap(year) { 29 } else { 28 };
    let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let before_month: i32 = months[..usize::try_from(month - 1).unwrap()].iter().sum();
    before_year + before_month + day - 1
}

/// Microseconds since 2000-01-01 in the form 2024-02-29 12:34:56.789012+09:00.
fn micros(text: &str) -> i64 {
    match text {
        "infinity" => return i64::MAX,
        "-infinity" => return i64::MIN,
        _ => {}
    }
    let (date, time) = text.split_once(' ').unwrap();
    let (time, offset) = time.split_once('+').unwrap_or((time, "00:00"));
    let seconds = |time: &str| {
        time.split(':')
            .map(|part| part.parse::<i64>().unwrap())
            .fold(0, |sum, part| sum * 60 + part)
    };
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let second = i64::from(days(date)) * 86_400 + seconds(time) - seconds(offset) * 60;
    second * 1_000_000 + fraction.parse::<i64>().unwrap()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap())
        .collect()
}

/// Calls back with the value of a type, given as text.
fn with_key<T>(type_name: &str, value: &str, use_it: impl FnOnce(&Key<'_>) -> T) -> T {
    let bytes;
    let key = match type_name {
        "smallint" | "integer" | "bigint" => Key::Integer(value.parse().unwrap()),
        "numeric" => Key::Numeric(Number::parse(value).unwrap()),
        "text" | "varchar" | "name" => Key::Text(value),
        "char" => Key::PaddedText(value),
        "uuid" => Key::Uuid(unhex(&value.replace('-', "")).try_into().unwrap()),
        "boolean" => Key::Bool(value.parse().unwrap()),
        "date" if value == "infinity" => Key::Date(i32::MAX),
        "date" => Key::Date(days(value)),
        "timestamp" => Key::Timestamp(micros(value)),
        "timestamptz" => Key::TimestampTz(micros(value)),
        "bytea" => {
            bytes = unhex(value.strip_prefix("\\x").unwrap());
            Key::Bytes(&bytes)
        }
        _ => panic!("{type_name}"),
    };
    use_it(&key)
}

#[test]
fn the_hash_gives_the_test_vectors() {
    let vectors = vectors();
    assert_eq!(vectors["version"], HASH_VERSION);
    let values = vectors["values"].as_array().unwrap();
    for vector in values {
        with_key(text(vector, "type"), text(vector, "value"), |key| {
            assert_eq!(
                key.canonical(),
                unhex(text(vector, "canonical")),
                "{vector}"
            );
            let h1 = format!("{:016x}", TenantHash::of(key).0);
            let h2 = format!("{:016x}", RecordHash::of(key).0);
            assert_eq!(
                (h1.as_str(), h2.as_str()),
                (text(vector, "h1"), text(vector, "h2"))
            );
            assert_eq!(Tenant::new(key).unwrap().tenant_hash(), TenantHash::of(key));
        });
    }
    let rows = vectors["rows"].as_array().unwrap();
    for row in rows {
        let tenant = with_key(
            text(row, "tenant_type"),
            text(row, "tenant"),
            TenantHash::of,
        );
        let record = with_key(
            text(row, "record_type"),
            text(row, "record"),
            RecordHash::of,
        );
        let spread = Spread::new(number(row, "spread")).unwrap();
        let shards = Shards::new(number(row, "shards")).unwrap();
        let shard = shards.place(tenant, record, spread);
        assert_eq!(shard.0, number(row, "shard"), "{row}");
    }
    assert!(values.len() > 30 && rows.len() > 5);
}

/// Each supported type has a vector, by the OIDs of PostgreSQL's `pg_type.dat`.
#[test]
fn every_supported_type_has_a_vector() {
    let types = [
        (16, "boolean"),
        (17, "bytea"),
        (19, "name"),
        (20, "bigint"),
        (21, "smallint"),
        (25, "text"),
        (1042, "char"),
        (1043, "varchar"),
        (1082, "date"),
        (1114, "timestamp"),
        (1184, "timestamptz"),
        (1700, "numeric"),
        (2950, "uuid"),
    ];
    let vectors = vectors();
    for (oid, name) in types {
        KeyType::of_type(oid, name).unwrap();
        let values = vectors["values"].as_array().unwrap();
        assert!(values.iter().any(|vector| vector["type"] == name), "{name}");
    }
    // float4, float8, jsonb, "char", interval, time
    for oid in [700, 701, 3802, 18, 1186, 1083, 0] {
        let error = KeyType::of_type(oid, "other").unwrap_err();
        assert_eq!(error.to_string(), "type other is not supported by routing");
    }
    assert!(KeyType::Text.check_collation("ci", false).is_err());
    assert!(KeyType::PaddedText.check_collation("ci", false).is_err());
    assert!(KeyType::Text.check_collation("C", true).is_ok());
    assert!(KeyType::Integer.check_collation("ci", false).is_ok());
}

/// The numbers that the authors of the two functions give.
#[test]
fn the_parts_of_the_hash_are_the_published_ones() {
    for (text, hash) in [
        ("", 0xcbf2_9ce4_8422_2325_u64),
        ("a", 0xaf63_dc4c_8601_ec8c),
        ("foobar", 0x8594_4171_f739_67e8),
    ] {
        let mut fnv = Fnv(0xcbf2_9ce4_8422_2325);
        fnv.put(text.as_bytes());
        assert_eq!(fnv.0, hash);
    }
    assert_eq!(Fnv(0).finish(), 0);
    assert_eq!(Fnv(1).finish(), 0xb456_bcfc_34c2_cb2c);
}

/// The page shows the vectors as they are in the file.
#[test]
fn the_page_has_the_vectors() {
    let page = std::fs::read_to_string(docs("routing-hash.md")).unwrap();
    let vectors = vectors();
    for vector in vectors["values"].as_array().unwrap() {
        let line = format!(
            "| {} | `{}` | `{}` | `{}` | `{}` |",
            text(vector, "type"),
            text(vector, "value"),
            text(vector, "canonical"),
            text(vector, "h1"),
            text(vector, "h2")
        );
        assert!(page.contains(&line), "docs/routing-hash.md lacks: {line}");
    }
    for row in vectors["rows"].as_array().unwrap() {
        let line = format!(
            "| {} `{}` | {} `{}` | {} | {} | {} |",
            text(row, "tenant_type"),
            text(row, "tenant"),
            text(row, "record_type"),
            text(row, "record"),
            number(row, "spread"),
            number(row, "shards"),
            number(row, "shard")
        );
        assert!(page.contains(&line), "docs/routing-hash.md lacks: {line}");
    }
}

#[test]
fn the_example_in_python_gives_the_test_vectors() {
    let script = docs("examples/shard.py");
    let python = |arguments: &[&str]| {
        Command::new("python3")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg(&script)
            .args(arguments)
            .output()
    };
    let file = docs("examples/shard_vectors.json");
    let Ok(output) = python(&["--check", file.to_str().unwrap()]) else {
        println!("python3 is not there: docs/examples/shard.py is not checked");
        return;
    };
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(printed.ends_with(" vectors, 0 wrong\n"), "{printed}");
    let one = python(&["64", "8", "bigint", "42", "bigint", "4711"]).unwrap();
    assert_eq!(one.stdout, b"45\n", "{one:?}");
    // A vector that is wrong is found.
    let broken = std::env::temp_dir().join(format!("shard_vectors_{}.json", std::process::id()));
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(
        &broken,
        text.replace("24ecaf38f168a127", "24ecaf38f168a128"),
    )
    .unwrap();
    let output = python(&["--check", broken.to_str().unwrap()]).unwrap();
    std::fs::remove_file(&broken).unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn numbers_that_postgresql_does_not_print_are_refused() {
    for text in [
        "", "-", ".5", "5.", "1e3", "+1", "0x10", " 1", "1 ", "--1", "1.2.3", "nan", "infinity",
        "１",
    ] {
        assert!(Number::parse(text).is_err(), "{text}");
    }
    for (text, canonical) in [
        ("-0", "n0"),
        ("-0.00", "n0"),
        ("007.10", "n7.1"),
        ("0.10", "n0.1"),
    ] {
        let key = Key::Numeric(Number::parse(text).unwrap());
        assert_eq!(key.canonical(), canonical.as_bytes());
    }
    assert_eq!(Key::Date(i32::MIN).canonical(), b"d-infinity");
    assert_eq!(
        Key::Date(i32::MAX - 1).canonical(),
        b"d185542587014400000000".as_slice()
    );
    assert_eq!(Key::TimestampTz(i64::MIN).canonical(), b"z-infinity");
    assert!(Tenant::new(&Key::Text(&"x".repeat(511))).is_ok());
    assert!(Tenant::new(&Key::Text(&"x".repeat(512))).is_err());
    assert!(Tenant::from_canonical(b"").is_err());
    assert!(Tenant::from_canonical(b"q1").is_err());
}
