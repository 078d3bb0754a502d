//! Values of a stream become values of columns: every built-in type in both forms, conversions
//! between types, and garbage.

use braid_bgworker::sqlstate::SqlState;
use braid_gir::{DateTime, DateTimeKind, Decimal, Value};

use crate::changes::{Row, apply, apply_as, describe};
use crate::db::{column, script, sql, unhex, value};
use crate::samples::{SAMPLES, is_known, quoted};
use crate::{Outcome, Test, check, same, test};

/// Prefixes of a binary form that are tried, at most.
const PREFIXES: usize = 12;

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (of, literals) in SAMPLES {
        tests.push(test(format!("decode: {of}, binary form"), move || {
            each_form(of, literals, true)
        }));
        tests.push(test(format!("decode: {of}, text form"), move || {
            each_form(of, literals, false)
        }));
        tests.push(test(
            format!("decode: {of}, binary form cut short"),
            move || prefixes(of, literals[literals.len() - 1]),
        ));
    }
    for case in cases() {
        let name = format!("decode: {} into {}", case.name, case.into);
        tests.push(test(name, move || convert(&case)));
    }
    tests.push(test("decode: values that are not in the record", absent));
    tests.push(test(
        "decode: binary form of a type that nobody has",
        unknown_type,
    ));
    tests.push(test(
        "decode: binary form of another built-in type",
        other_type,
    ));
    tests.push(test("decode: bytes of every value, damaged", damaged));
    tests
}

fn table(of: &str) {
    sql("create schema d");
    sql(&format!("create table d.t (id int primary key, v {of})"));
}

/// The binary form of a literal.
pub(crate) fn binary(of: &str, literal: &str) -> Vec<u8> {
    let send = value(
        "select typsend::oid::regproc from pg_type where oid = (select atttypid from pg_attribute \
         where attrelid = 'd.t'::regclass and attname = 'v')",
    )
    .unwrap();
    let cast = format!("({}::{of})", quoted(literal));
    unhex(&value(&format!("select {send}({cast})")).unwrap())
}

fn each_form(of: &str, literals: &[&str], is_binary: bool) -> Outcome {
    if !is_known(of) {
        return Ok(());
    }
    table(of);
    for (id, literal) in literals.iter().enumerate() {
        let cast = format!("{}::{of}", quoted(literal));
        let text = value(&format!("select {cast}::text")).unwrap();
        let bytes = binary(of, literal);
        let value = if is_binary {
            Value::Binary(&bytes)
        } else {
            Value::BinaryText(text.as_bytes())
        };
        let id = Value::Integer(i64::try_from(id).unwrap());
        apply("d.t", &[Row::Insert(&[id, value])])
            .map_err(|error| format!("{literal}: {} {}", error.sqlstate, error.message))?;
        let stored = column("select v::text from d.t order by id desc limit 1");
        same(&stored, &vec![text])?;
    }
    same(
        &column("select count(*) from d.t"),
        &vec![literals.len().to_string()],
    )
}

/// A prefix of a binary form is refused, or it is the binary form of another value.
fn prefixes(of: &str, literal: &str) -> Outcome {
    if !is_known(of) {
        return Ok(());
    }
    table(of);
    let bytes = binary(of, literal);
    let step = bytes.len().div_ceil(PREFIXES).max(1);
    for len in (0..bytes.len()).step_by(step) {
        let prefix = &bytes[..len];
        let row = [Value::Integer(1), Value::Binary(prefix)];
        match apply("d.t", &[Row::Insert(&row)]) {
            Ok(()) => {
                let stored = value("select v::text from d.t").unwrap();
                let cast = stored.trim_end_matches('\0').to_owned();
                // Six bytes are the older form of such an address.
                if (of, len) != ("macaddr8", 6) {
                    same(&binary(of, &cast), &prefix.to_vec())?;
                }
                sql("delete from d.t");
            }
            Err(error) => check(
                !error.message.contains("out of bounds") && !error.message.contains("panicked"),
                error.message,
            )?,
        }
    }
    Ok(())
}

/// A value, a column's type, and the text that is stored or the SQLSTATE.
struct Case {
    name: &'static str,
    into: &'static str,
    value: Value<'static>,
    wanted: Result<&'static str, SqlState>,
}

fn moment(kind: DateTimeKind, days: i32, micros: i64, offset: Option<i32>) -> Value<'static> {
    Value::DateTime(DateTime {
        kind,
        days,
        micros,
        offset,
    })
}

/// 12.50 and NaN in numeric_send's form.
const TWELVE: &[u8] = &[0, 2, 0, 0, 0, 0, 0, 2, 0, 12, 0x13, 0x88];
const NOT_A_NUMBER: &[u8] = &[0, 0, 0, 0, 0xC0, 0, 0, 0];

#[rustfmt::skip]
fn cases() -> Vec<Case> {
    use DateTimeKind::{Finite, Infinity, MinusInfinity};
    let decimal = |bytes| Value::Decimal(Decimal::new(bytes).unwrap());
    let case = |name, into, value, wanted| Case { name, into, value, wanted };
    vec![
        case("null", "integer", Value::Null, Ok("null")),
        case("1", "boolean", Value::Integer(1), Ok("true")),
        case("0", "boolean", Value::Integer(0), Ok("false")),
        case("32767", "smallint", Value::Integer(32_767), Ok("32767")),
        case("32768", "smallint", Value::Integer(32_768), Err(SqlState::NumericValueOutOfRange)),
        case("2147483647", "integer", Value::Integer(2_147_483_647), Ok("2147483647")),
        case("2147483648", "integer", Value::Integer(2_147_483_648), Err(SqlState::NumericValueOutOfRange)),
        case("the least integer", "bigint", Value::Integer(i64::MIN), Ok("-9223372036854775808")),
        case("4294967295", "oid", Value::Integer(4_294_967_295), Ok("4294967295")),
        case("-1", "oid", Value::Integer(-1), Err(SqlState::NumericValueOutOfRange)),
        case("97", "\"char\"", Value::Integer(97), Ok("a")),
        case("128", "\"char\"", Value::Integer(128), Err(SqlState::NumericValueOutOfRange)),
        case("an integer", "text", Value::Integer(-5), Ok("-5")),
        case("an integer", "numeric", Value::Integer(i64::MAX), Ok("9223372036854775807")),
        case("an integer", "double precision", Value::Integer(3), Ok("3")),
        case("an integer", "date", Value::Integer(3), Err(SqlState::InvalidDatetimeFormat)),
        case("a big integer", "numeric", Value::BigInteger(&[0, 0, 0, 0, 0, 0, 0, 0, 1]), Ok("18446744073709551616")),
        case("a big integer", "bigint", Value::BigInteger(&[0, 0, 0, 0, 0, 0, 0, 0, 1]), Err(SqlState::NumericValueOutOfRange)),
        case("a single", "real", Value::Single(0.1), Ok("0.1")),
        case("negative zero", "real", Value::Single(-0.0), Ok("-0")),
        case("a double", "double precision", Value::Double(5e-324), Ok("5e-324")),
        case("infinity", "double precision", Value::Double(f64::NEG_INFINITY), Ok("-Infinity")),
        case("not a number", "double precision", Value::Double(f64::NAN), Ok("NaN")),
        case("a double", "numeric", Value::Double(0.25), Ok("0.25")),
        case("a double", "real", Value::Double(1e300), Err(SqlState::NumericValueOutOfRange)),
        case("a double", "integer", Value::Double(0.5), Err(SqlState::InvalidTextRepresentation)),
        case("a decimal", "numeric", decimal(TWELVE), Ok("12.50")),
        case("a decimal", "numeric(4,1)", decimal(TWELVE), Ok("12.5")),
        case("a decimal", "numeric(2,1)", decimal(TWELVE), Err(SqlState::NumericValueOutOfRange)),
        case("a decimal", "text", decimal(TWELVE), Ok("12.50")),
        case("a decimal", "double precision", decimal(TWELVE), Ok("12.5")),
        case("a decimal", "integer", decimal(TWELVE), Err(SqlState::InvalidTextRepresentation)),
        case("not a number", "numeric", decimal(NOT_A_NUMBER), Ok("NaN")),
        case("Unix time 0", "timestamptz", Value::UnixTimestamp(0), Ok("1970-01-01 00:00:00+00")),
        case("the last Unix time", "timestamptz", Value::UnixTimestamp(i64::MAX), Ok("294247-01-10 04:00:54.775807+00")),
        case("the first Unix time", "timestamptz", Value::UnixTimestamp(i64::MIN), Err(SqlState::NumericValueOutOfRange)),
        case("Unix time 0", "text", Value::UnixTimestamp(0), Ok("1970-01-01 00:00:00+00")),
        case("infinity", "date", moment(Infinity, 0, 0, None), Ok("infinity")),
        case("minus infinity", "date", moment(MinusInfinity, 0, 0, None), Ok("-infinity")),
        case("infinity", "timestamp", moment(Infinity, 0, 0, None), Ok("infinity")),
        case("minus infinity", "timestamptz", moment(MinusInfinity, 0, 0, Some(0)), Ok("-infinity")),
        case("a day", "date", moment(Finite, -1, 0, None), Ok("1969-12-31")),
        case("the last day", "timestamp", moment(Finite, i32::MAX, 0, None), Err(SqlState::NumericValueOutOfRange)),
        case("the first day", "date", moment(Finite, i32::MIN, 0, None), Err(SqlState::NumericValueOutOfRange)),
        case("noon two hours east", "timestamptz", moment(Finite, 0, 43_200_000_000, Some(7200)), Ok("1970-01-01 10:00:00+00")),
        case("noon", "timestamp", moment(Finite, 0, 43_200_000_000, None), Ok("1970-01-01 12:00:00")),
        case("noon", "timestamp(0)", moment(Finite, 0, 43_200_000_000, None), Ok("1970-01-01 12:00:00")),
        case("noon", "text", moment(Finite, 0, 43_200_000_000, None), Ok("1970-01-01 12:00:00")),
        case("text", "text", Value::String("é𝄞".as_bytes()), Ok("é𝄞")),
        case("digits", "integer", Value::String(b"12"), Ok("12")),
        case("letters", "integer", Value::String(b"twelve"), Err(SqlState::InvalidTextRepresentation)),
        case("text that is too long", "varchar(3)", Value::String(b"abcd"), Err(SqlState::StringDataRightTruncation)),
        case("text with blanks that fits", "varchar(3)", Value::String(b"abc  "), Ok("abc")),
        case("short text", "char(3)", Value::String(b"a"), Ok("a")),
        case("bytes that are not UTF-8", "text", Value::String(b"a\xff"), Err(SqlState::CharacterNotInRepertoire)),
        case("a zero byte", "text", Value::String(b"a\0b"), Err(SqlState::CharacterNotInRepertoire)),
        case("a zero byte", "integer", Value::String(b"1\0"), Err(SqlState::CharacterNotInRepertoire)),
        case("JSON", "jsonb", Value::String(b"{\"a\":1}"), Ok("{\"a\": 1}")),
        case("half JSON", "jsonb", Value::String(b"{\"a\":"), Err(SqlState::InvalidTextRepresentation)),
        case("bytes", "bytea", Value::Binary(b"\0\xff"), Ok("\\x00ff")),
        case("16 bytes", "uuid", Value::Binary(&[7; 16]), Ok("07070707-0707-0707-0707-070707070707")),
        case("15 bytes", "uuid", Value::Binary(&[7; 15]), Err(SqlState::ProtocolViolation)),
        case("17 bytes", "uuid", Value::Binary(&[7; 17]), Err(SqlState::InvalidBinaryRepresentation)),
        case("no bytes", "inet", Value::Binary(b""), Err(SqlState::ProtocolViolation)),
        case("a label", "d.mood", Value::BinaryText(b"sad"), Ok("sad")),
        case("a label that is not there", "d.mood", Value::BinaryText(b"angry"), Err(SqlState::InvalidTextRepresentation)),
        case("a row", "d.pair", Value::BinaryText(b"(1,\"b c\")"), Ok("(1,\"b c\")")),
        case("a row that is too wide", "d.pair", Value::BinaryText(b"(1,b,c)"), Err(SqlState::InvalidTextRepresentation)),
        case("a value in its range", "d.positive", Value::Integer(1), Ok("1")),
        case("a value out of its range", "d.positive", Value::Integer(-1), Err(SqlState::CheckViolation)),
        case("an array", "d.mood[]", Value::BinaryText(b"{sad,NULL}"), Ok("{sad,NULL}")),
        case("half an array", "integer[]", Value::BinaryText(b"{1,"), Err(SqlState::InvalidTextRepresentation)),
    ]
}

fn convert(case: &Case) -> Outcome {
    script(
        "create schema d;\ncreate type d.mood as enum ('sad', 'ok');\n\
         create type d.pair as (a int, b text);\ncreate domain d.positive as int check (value > 0);\n\
         set local timezone = 'UTC'",
    );
    sql(&format!(
        "create table d.t (id int primary key, v {})",
        case.into
    ));
    let row = [Value::Integer(1), case.value];
    let outcome = apply("d.t", &[Row::Insert(&row)]);
    match (outcome, case.wanted) {
        (Ok(()), Ok(wanted)) => same(&column("select v::text from d.t"), &vec![wanted.to_owned()]),
        (Err(error), Err(state)) => {
            same(&error.sqlstate, &state).map_err(|differs| format!("{differs}: {}", error.message))
        }
        (Ok(()), Err(state)) => Err(format!(
            "stored {:?}, wanted the error {state}",
            column("select v::text from d.t")
        )),
        (Err(error), Ok(_)) => Err(format!("{}: {}", error.sqlstate, error.message)),
    }
}

/// An update keeps columns of which the record says nothing; an insert takes their defaults.
fn absent() -> Outcome {
    script(
        "create schema d;\ncreate table d.t (id int primary key, a text default 'x', b text);\ninsert into d.t values (1, 'one', 'b')",
    );
    let row = [Value::Integer(1), Value::None, Value::String(b"new")];
    apply("d.t", &[Row::Update(&row)]).map_err(|error| error.message)?;
    same(
        &column("select a || b from d.t"),
        &vec!["onenew".to_owned()],
    )
}

fn as_type(type_oid: u32, bytes: &[u8]) -> Result<(), braid_postgres::error::PgError> {
    let (identity, mut columns) = describe("d.t");
    columns[1].type_oid = type_oid;
    let row = [Value::Integer(1), Value::Binary(bytes)];
    apply_as("d.t", identity, &columns, &[Row::Insert(&row)])
}

fn unknown_type() -> Outcome {
    table("text");
    match as_type(9999, b"x") {
        Ok(()) => Err("stored".to_owned()),
        Err(error) => {
            same(&error.sqlstate, &SqlState::CannotCoerce)?;
            check(error.hint.is_some(), "no hint")
        }
    }
}

/// int4 (23) at the provider, a bigint here; and inet (869) for a text.
fn other_type() -> Outcome {
    table("bigint");
    as_type(23, &[0xff, 0xff, 0xff, 0xfe]).map_err(|error| error.message)?;
    same(&value("select v from d.t").as_deref(), &Some("-2"))?;
    sql("drop table d.t");
    sql("create table d.t (id int primary key, v text)");
    as_type(869, &[2, 8, 0, 4, 10, 0, 0, 1]).map_err(|error| error.message)?;
    same(&value("select v from d.t").as_deref(), &Some("10.0.0.1/8"))
}

/// Each byte of a binary form is inverted in turn: the value is refused or stored.
fn damaged() -> Outcome {
    let mut refused = 0;
    for (of, literals) in SAMPLES {
        if !is_known(of) {
            continue;
        }
        table(of);
        let bytes = binary(of, literals[0]);
        for place in 0..bytes.len().min(8) {
            let mut bytes = bytes.clone();
            bytes[place] = !bytes[place];
            let row = [Value::Integer(1), Value::Binary(&bytes)];
            match apply("d.t", &[Row::Insert(&row)]) {
                Ok(()) => {
                    value("select v::text from d.t");
                    sql("delete from d.t");
                }
                Err(error) => {
                    refused += 1;
                    check(!error.message.contains("out of bounds"), error.message)?;
                }
            }
        }
        sql("drop schema d cascade");
    }
    check(refused > 50, format!("only {refused} were refused"))
}
