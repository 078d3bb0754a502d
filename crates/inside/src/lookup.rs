//! The row that a change is about is found: by keys of every kind, by whole rows, whatever the form
//! of the values.

use braid_bgworker::sqlstate::SqlState;
use braid_gir::BeforeKind::{Key, Row as Whole};
use braid_gir::{ColumnFlags, Value};
use braid_postgres::error::PgError;

use crate::changes::{Row, apply, apply_as, describe};
use crate::db::{column, script, sql, value};
use crate::samples::quoted;
use crate::{Outcome, Test, check, same, test};

/// A key's type, the stored value, the value in the change, and whether that finds the row.
#[rustfmt::skip]
const KEYS: &[(&str, &str, &str, bool)] = &[
    ("integer", "1", "1", true),
    ("integer", "1", "2", false),
    ("numeric", "1.00", "1.0", true),
    ("numeric", "NaN", "NaN", true),
    ("numeric", "1.00", "1.01", false),
    ("double precision", "0", "-0", true),
    ("double precision", "NaN", "NaN", true),
    ("real", "0.1", "0.10000001", false),
    ("text", "a", "a", true),
    ("text", "a", "A", false),
    ("text", "a", "a ", false),
    ("text", "", "", true),
    ("text collate l.folded", "Weise", "WEISE", true),
    ("text collate l.folded", "é", "e\u{301}", true),
    ("text collate l.folded", "a", "b", false),
    ("text collate \"C\"", "é", "e\u{301}", false),
    ("char(5)", "a", "a", true),
    ("char(5)", "a", "a    ", true),
    ("bpchar", "a", "a   ", true),
    ("varchar(9)", "a", "a", true),
    ("name", "a", "a", true),
    ("\"char\"", "a", "a", true),
    ("boolean", "f", "f", true),
    ("bytea", "\\x00ff", "\\x00ff", true),
    ("bytea", "\\x00ff", "\\x00", false),
    ("date", "infinity", "infinity", true),
    ("timestamptz", "2000-01-01 00:00:00+00", "2000-01-01 02:00:00+02", true),
    ("timetz", "12:00:00+00", "14:00:00+02", false),
    ("interval", "1 day", "24 hours", true),
    ("interval", "1 mon", "31 days", false),
    ("uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", true),
    ("inet", "10.0.0.1", "10.0.0.1/32", true),
    ("inet", "10.0.0.1/8", "10.0.0.1", false),
    ("jsonb", "{\"a\": 1.0}", "{\"a\": 1.00}", true),
    ("integer[]", "{1,NULL}", "{1,NULL}", true),
    ("integer[]", "{1,2}", "[0:1]={1,2}", false),
    ("numeric[]", "{1.0}", "{1.00}", true),
    ("numrange", "[1.0,2)", "[1.00,2.0)", true),
    ("int4range", "[1,2]", "[1,3)", true),
    ("int4multirange", "{[1,3),[2,5)}", "{[1,5)}", true),
    ("l.mood", "sad", "sad", true),
    ("l.mood", "sad", "ok", false),
    ("l.pair", "(1.0,a)", "(1.00,a)", true),
    ("l.pair", "(1.0,a)", "(1.0,b)", false),
    ("l.positive", "1.0", "1.00", true),
    ("tsvector", "'a' 'b'", "'b' 'a'", true),
    ("pg_lsn", "0/1", "0/1", true),
    ("macaddr", "08:00:2b:01:02:03", "08002b010203", true),
    ("varbit", "101", "101", true),
    ("oid", "4294967295", "4294967295", true),
    ("xid8", "1", "1", true),
    ("oidvector", "1 2", "1 2", true),
];

/// Types that have no equality, or none for an index, in whole rows; and values that look alike.
#[rustfmt::skip]
const WHOLE: &[(&str, &str, &str, bool)] = &[
    ("json", "{\"a\": 1}", "{\"a\": 1}", true),
    ("json", "{\"a\": 1}", "{\"a\":1}", false),
    ("point", "(1,2)", "(1,2)", true),
    ("point", "(1,2)", "(1,3)", false),
    ("polygon", "((0,0),(1,1))", "((0,0),(1,1))", true),
    ("box", "(1,1),(0,0)", "(1,1),(0,0)", true),
    ("circle", "<(1,2),3>", "<(1,2),3>", true),
    ("xid", "7", "7", true),
    ("tid", "(0,1)", "(0,1)", true),
    ("cid", "7", "7", true),
    ("txid_snapshot", "10:20:10", "10:20:10", true),
    ("jsonpath", "$.\"a\"", "$.\"a\"", true),
    ("numeric", "1.0", "1.00", true),
    ("double precision", "0", "-0", true),
    ("text", "a", "A", false),
    ("l.pair", "(1.0,a)", "(1.0,a)", true),
    ("l.shape", "(\"(1,2)\",x)", "(\"(1,2)\",x)", true),
    ("l.mood[]", "{sad}", "{sad}", true),
    ("point[]", "{\"(1,2)\"}", "{\"(1,2)\"}", true),
];

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (of, stored, sought, found) in KEYS {
        let verb = if *found { "finds" } else { "does not find" };
        let name = format!("lookup: key {of}: {sought:?} {verb} {stored:?}");
        tests.push(test(name, move || by_key(of, stored, sought, *found)));
        let name = format!("lookup: beside a narrow key {of}: {sought:?} {verb} {stored:?}");
        tests.push(test(name, move || {
            by_narrow_key(of, stored, sought, *found)
        }));
    }
    for (of, stored, sought, found) in WHOLE {
        let verb = if *found { "finds" } else { "does not find" };
        let name = format!("lookup: whole row with {of}: {sought:?} {verb} {stored:?}");
        tests.push(test(name, move || by_row(of, stored, sought, *found)));
    }
    for case in CASES {
        tests.push(test(format!("lookup: {}", case.name), || run(case)));
    }
    tests.push(test(
        "lookup: a key that is checked at commit finds nothing",
        deferrable,
    ));
    tests.push(test(
        "lookup: a whole row with a value out of line",
        out_of_line,
    ));
    tests.push(test("lookup: a row among thousands without a key", many));
    tests.push(test("lookup: an error leaves nothing open", error));
    tests
}

const TYPES: &str = "create schema l;\ncreate type l.mood as enum ('sad', 'ok');\ncreate type l.pair as (a numeric, b text);\n\
    create type l.shape as (p point, b text);\ncreate domain l.positive as numeric check (value > 0);\n\
    create collation l.folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false)";

fn done(outcome: Result<(), PgError>) -> Outcome {
    outcome.map_err(|error| format!("{}: {}", error.sqlstate, error.message))
}

fn by_key(of: &str, stored: &str, sought: &str, found: bool) -> Outcome {
    script(TYPES);
    sql(&format!("create table l.t (k {of} primary key, v text)"));
    sql(&format!(
        "insert into l.t values ({}, 'old')",
        quoted(stored)
    ));
    let key = Value::BinaryText(sought.as_bytes());
    done(apply("l.t", &[Row::Update(&[key, Value::String(b"new")])]))?;
    let kept = value("select count(*) from l.t where v = 'old'");
    same(&kept.as_deref(), &Some(if found { "0" } else { "1" }))?;
    if found {
        same(&value("select count(*) from l.t").as_deref(), &Some("1"))?;
        done(apply("l.t", &[Row::Delete(Key, &[key, Value::None])]))?;
        same(&value("select count(*) from l.t").as_deref(), &Some("0"))?;
    }
    Ok(())
}

/// The index has one of two columns that identify the row.
fn by_narrow_key(of: &str, stored: &str, sought: &str, found: bool) -> Outcome {
    script(TYPES);
    sql(&format!(
        "create table l.t (a int primary key, k {of}, v text)"
    ));
    let stored = quoted(stored);
    sql(&format!("insert into l.t values (1, {stored}, 'old')"));
    let (identity, mut columns) = describe("l.t");
    let k = columns.get_mut(1).ok_or("no column k")?;
    k.flags |= ColumnFlags::IDENTITY | ColumnFlags::PRIMARY_KEY;
    let apply = |change: Row<'_>| done(apply_as("l.t", identity, &columns, &[change]));
    let (one, k) = (Value::Integer(1), Value::BinaryText(sought.as_bytes()));
    if found {
        // Also without a key in front of it.
        apply(Row::Update(&[one, k, Value::String(b"new")]))?;
        same(&value("select v from l.t").as_deref(), &Some("new"))?;
    }
    let other = Value::Integer(2);
    apply(Row::Delete(Key, &[other, k, Value::None]))?;
    same(&value("select count(*) from l.t").as_deref(), &Some("1"))?;
    apply(Row::Delete(Key, &[one, k, Value::None]))?;
    let left = if found { "0" } else { "1" };
    same(&value("select count(*) from l.t").as_deref(), &Some(left))
}

fn by_row(of: &str, stored: &str, sought: &str, found: bool) -> Outcome {
    script(TYPES);
    sql(&format!("create table l.t (k {of}, v text)"));
    sql("alter table l.t replica identity full");
    let stored = quoted(stored);
    sql(&format!(
        "insert into l.t values ({stored}, 'old'), ({stored}, 'other'), (null, 'old')"
    ));
    let before = [Value::BinaryText(sought.as_bytes()), Value::String(b"old")];
    done(apply("l.t", &[Row::Delete(Whole, &before)]))?;
    let left =
        column("select v || coalesce(' ' || nullif(k is null, false), '') from l.t order by 1");
    let wanted: &[&str] = if found {
        &["old true", "other"]
    } else {
        &["old", "old true", "other"]
    };
    same(
        &left.iter().map(String::as_str).collect::<Vec<_>>(),
        &wanted.to_vec(),
    )
}

/// A table with rows, changes, and the rows that are there afterwards.
struct Case {
    name: &'static str,
    setup: &'static str,
    changes: &'static [Row<'static>],
    wanted: &'static [&'static str],
}

const fn text(text: &'static str) -> Value<'static> {
    Value::String(text.as_bytes())
}

const fn number(number: i64) -> Value<'static> {
    Value::Integer(number)
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case {
        name: "a key of two columns in another order",
        setup: "create table l.t (a int, b int, v text, primary key (b, a));\ninsert into l.t values (1, 2, 'x'), (2, 1, 'y')",
        changes: &[Row::Update(&[number(1), number(2), text("new")])],
        wanted: &["(1,2,new)", "(2,1,y)"],
    },
    Case {
        name: "a replica identity that is not the primary key",
        setup: "create table l.t (a int primary key, b int not null, v text);\ncreate unique index i on l.t (b);\nalter table l.t replica identity using index i;\ninsert into l.t values (1, 2, 'x'), (2, 1, 'y')",
        changes: &[Row::Delete(Key, &[Value::None, number(2), Value::None])],
        wanted: &["(2,1,y)"],
    },
    Case {
        name: "a key with an included column",
        setup: "create table l.t (a int, b int, primary key (a) include (b));\ninsert into l.t values (1, 2)",
        changes: &[Row::Update(&[number(1), number(3)])],
        wanted: &["(1,3)"],
    },
    Case {
        name: "a row gets another key",
        setup: "create table l.t (a int primary key, v text);\ninsert into l.t values (1, 'x'), (2, 'y')",
        changes: &[Row::UpdateFrom(Key, &[number(1), Value::None], &[number(3), text("new")])],
        wanted: &["(2,y)", "(3,new)"],
    },
    Case {
        name: "rows trade their keys",
        setup: "create table l.t (a int primary key, v text);\ninsert into l.t values (1, 'x'), (2, 'y')",
        changes: &[
            Row::UpdateFrom(Key, &[number(1), Value::None], &[number(3), text("x")]),
            Row::UpdateFrom(Key, &[number(2), Value::None], &[number(1), text("y")]),
            Row::UpdateFrom(Key, &[number(3), Value::None], &[number(2), text("x")]),
        ],
        wanted: &["(1,y)", "(2,x)"],
    },
    Case {
        name: "a row is deleted and comes again",
        setup: "create table l.t (a int primary key, v text);\ninsert into l.t values (1, 'x')",
        changes: &[Row::Delete(Key, &[number(1), Value::None]), Row::Insert(&[number(1), text("new")])],
        wanted: &["(1,new)"],
    },
    Case {
        name: "a row that comes and is changed at once",
        setup: "create table l.t (a int primary key, v text)",
        changes: &[Row::Insert(&[number(1), text("x")]), Row::Update(&[number(1), text("y")]), Row::Update(&[number(1), text("z")])],
        wanted: &["(1,z)"],
    },
    Case {
        name: "one of two identical rows",
        setup: "create table l.t (a int, v text);\nalter table l.t replica identity full;\ninsert into l.t values (1, 'x'), (1, 'x')",
        changes: &[Row::Delete(Whole, &[number(1), text("x")])],
        wanted: &["(1,x)"],
    },
    Case {
        name: "identical rows, one changed",
        setup: "create table l.t (a int, v text);\nalter table l.t replica identity full;\ninsert into l.t values (1, 'x'), (1, 'x')",
        changes: &[Row::UpdateFrom(Whole, &[number(1), text("x")], &[number(1), text("y")])],
        wanted: &["(1,x)", "(1,y)"],
    },
    Case {
        name: "a null equals a null in a whole row",
        setup: "create table l.t (a int, v text);\nalter table l.t replica identity full;\ninsert into l.t values (1, null), (1, '')",
        changes: &[Row::Delete(Whole, &[number(1), Value::Null])],
        wanted: &["(1,\"\")"],
    },
    Case {
        name: "a partial index finds no row outside of it",
        setup: "create table l.t (a int not null, v text);\nalter table l.t replica identity full;\ncreate unique index on l.t (a) where a > 5;\ninsert into l.t values (1, 'x'), (9, 'y')",
        changes: &[Row::Delete(Whole, &[number(1), text("x")]), Row::UpdateFrom(Whole, &[number(9), text("y")], &[number(9), text("z")])],
        wanted: &["(9,z)"],
    },
    Case {
        name: "an index on an expression is no key",
        setup: "create table l.t (a int not null, v text);\nalter table l.t replica identity full;\ncreate unique index on l.t ((a % 100));\ninsert into l.t values (1, 'x')",
        changes: &[Row::Delete(Whole, &[number(101), text("x")]), Row::UpdateFrom(Whole, &[number(1), text("x")], &[number(1), text("y")])],
        wanted: &["(1,y)"],
    },
    Case {
        name: "a whole row, though there is a primary key",
        setup: "create table l.t (a int primary key, v text);\nalter table l.t replica identity full;\ninsert into l.t values (1, 'x'), (2, 'x')",
        changes: &[Row::UpdateFrom(Whole, &[number(2), text("x")], &[number(2), text("y")])],
        wanted: &["(1,x)", "(2,y)"],
    },
    Case {
        name: "columns are dropped here",
        setup: "create table l.t (gone int, a int primary key, gone_too text, v text);\nalter table l.t drop gone;\nalter table l.t drop gone_too;\ninsert into l.t values (1, 'x'), (2, 'y')",
        changes: &[Row::Update(&[number(2), text("new")]), Row::Insert(&[number(3), text("z")])],
        wanted: &["(1,x)", "(2,new)", "(3,z)"],
    },
    Case {
        name: "a partitioned table",
        setup: "create table l.t (a int primary key, v text) partition by range (a);\ncreate table l.t1 partition of l.t for values from (0) to (10);\ncreate table l.t2 (v text, gone int, a int not null);\nalter table l.t2 drop gone;\nalter table l.t attach partition l.t2 for values from (10) to (20);\ninsert into l.t values (1, 'x'), (11, 'y')",
        changes: &[Row::Update(&[number(11), text("new")]), Row::UpdateFrom(Key, &[number(1), Value::None], &[number(12), text("moved")])],
        wanted: &["(11,new)", "(12,moved)"],
    },
    Case {
        name: "a newer row takes the place of one with its key",
        setup: "create table l.t (a int primary key, v text);\ninsert into l.t values (1, 'here')",
        changes: &[Row::Insert(&[number(1), text("there")])],
        wanted: &["(1,there)"],
    },
    Case {
        name: "a deletion of what is not here",
        setup: "create table l.t (a int primary key, v text);\ninsert into l.t values (1, 'x')",
        changes: &[Row::Delete(Key, &[number(2), Value::None])],
        wanted: &["(1,x)"],
    },
    Case {
        name: "a value that the record lacks stays",
        setup: "create table l.t (a int primary key, v text, w text);\ninsert into l.t values (1, 'x', 'kept')",
        changes: &[Row::Update(&[number(1), text("new"), Value::None])],
        wanted: &["(1,new,kept)"],
    },
    Case {
        name: "names that need quotes",
        setup: "create table l.\"T t\" (\"A \"\"a\" int primary key, \"é\" text);\ninsert into l.\"T t\" values (1, 'x')",
        changes: &[Row::Update(&[number(1), text("new")])],
        wanted: &["(1,new)"],
    },
];

fn rows(table: &str) -> Vec<String> {
    column(&format!("select t::text from {table} t order by 1"))
}

fn run(case: &Case) -> Outcome {
    script(TYPES);
    script(case.setup);
    let table = if case.setup.contains("\"T t\"") {
        "l.\"T t\""
    } else {
        "l.t"
    };
    done(apply(table, case.changes))?;
    same(
        &rows(table),
        &case.wanted.iter().map(|row| (*row).to_owned()).collect(),
    )
}

/// Such a key may be there twice for a while, so PostgreSQL takes it for no identity.
fn deferrable() -> Outcome {
    script(
        "create schema l;\ncreate table l.t (a int primary key deferrable, v text);\ninsert into l.t values (1, 'x')",
    );
    let error = apply("l.t", &[Row::Update(&[number(1), text("new")])])
        .err()
        .ok_or("no error")?;
    same(&error.sqlstate, &SqlState::ObjectNotInPrerequisiteState)?;
    check(error.hint.is_some(), "no hint")
}

fn out_of_line() -> Outcome {
    script(
        "create schema l;\ncreate table l.t (a int, v text);\nalter table l.t replica identity full;\nalter table l.t alter v set storage external",
    );
    sql("insert into l.t select n, repeat('x', 10000) || n from generate_series(1, 2) n");
    let old = format!("{}2", "x".repeat(10_000));
    let before = [number(2), Value::String(old.as_bytes())];
    done(apply("l.t", &[Row::Delete(Whole, &before)]))?;
    same(&column("select a from l.t"), &vec!["1".to_owned()])
}

fn many() -> Outcome {
    script(
        "create schema l;\ncreate table l.t (a int, v text);\nalter table l.t replica identity full",
    );
    sql("insert into l.t select n, 'v' || n from generate_series(1, 5000) n");
    done(apply(
        "l.t",
        &[
            Row::Delete(Whole, &[number(4999), text("v4999")]),
            Row::Delete(Whole, &[number(4998), text("v4999")]),
        ],
    ))?;
    same(
        &column("select count(*), count(*) filter (where a = 4999) from l.t"),
        &vec!["4999".to_owned()],
    )
}

/// After an error in the middle of the changes the table can be dropped, and takes changes again.
fn error() -> Outcome {
    script(
        "create schema l;\ncreate table l.t (a int primary key, v int check (v < 100));\ninsert into l.t values (1, 1)",
    );
    describe("l.t");
    let outcome = apply(
        "l.t",
        &[
            Row::Update(&[number(1), number(2)]),
            Row::Insert(&[number(2), number(100)]),
        ],
    );
    same(
        &outcome.map_err(|error| error.sqlstate),
        &Err(SqlState::CheckViolation),
    )?;
    same(&rows("l.t"), &vec!["(1,1)".to_owned()])?;
    done(apply("l.t", &[Row::Update(&[number(1), number(3)])]))?;
    same(&rows("l.t"), &vec!["(1,3)".to_owned()])?;
    sql("drop table l.t");
    check(
        value("select to_regclass('l.t')").is_none(),
        "the table is there",
    )
}
