//! Key hashes: rows with equal keys have equal hashes, rows with other keys have others.

use std::ops::ControlFlow;

use braid_apply::{KeyHashes, KeyPart, identity_key, key_hashes_of_row};
use braid_postgres::table_scan::{self, Sees};

use crate::db::{Open, script, sql, value};
use crate::{Outcome, Test, check, same, test};

/// Types that tests make.
const TYPES: &str = "create schema k;\ncreate type k.mood as enum ('sad', 'ok');\ncreate type k.pair as (a numeric, b text);\n\
    create domain k.money as numeric check (value >= 0);\ncreate type k.span as range (subtype = numeric);\n\
    create collation k.folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false)";

/// How two values compare.
#[derive(Clone, Copy, PartialEq)]
enum Are {
    /// Equal, with the same bytes.
    Same,
    /// Equal, with other bytes.
    Equal,
    /// Different.
    Different,
}

#[rustfmt::skip]
const PAIRS: &[(&str, &str, &str, Are)] = &[
    ("integer", "1", "1", Are::Same),
    ("integer", "1", "2", Are::Different),
    ("bigint", "1", "4294967297", Are::Different),
    ("boolean", "'t'", "'f'", Are::Different),
    ("numeric", "1.0", "1.00", Are::Equal),
    ("numeric", "0", "-0.000", Are::Equal),
    ("numeric", "'NaN'", "'nan'", Are::Same),
    ("numeric", "1.0", "-1.0", Are::Different),
    ("numeric", "1", "10000", Are::Different),
    ("numeric", "'NaN'", "'Infinity'", Are::Different),
    ("numeric", "'NaN'", "0", Are::Different),
    ("numeric", "1", "1.0000000000000001", Are::Different),
    ("double precision", "0.0", "'-0'", Are::Equal),
    ("double precision", "'NaN'", "'NaN'", Are::Same),
    ("double precision", "0.1", "0.2", Are::Different),
    ("real", "0.0", "'-0'", Are::Equal),
    ("text", "'a'", "'a'", Are::Same),
    ("text", "'a'", "'A'", Are::Different),
    ("text", "'a'", "'a '", Are::Different),
    ("text", "''", "' '", Are::Different),
    ("text", "E'\\u00e9'", "E'e\\u0301'", Are::Different),
    ("text collate k.folded", "'straSse'", "'STRASSE'", Are::Equal),
    ("text collate k.folded", "E'\\u00e9'", "E'e\\u0301'", Are::Equal),
    ("text collate k.folded", "'a'", "'b'", Are::Different),
    ("char(5)", "'a'", "'a   '", Are::Same),
    ("bpchar", "'a'", "'a   '", Are::Equal),
    ("bpchar", "'a'", "' a'", Are::Different),
    ("varchar(9)", "'a'", "'b'", Are::Different),
    ("name", "'a'", "'b'", Are::Different),
    ("bytea", "'\\x00'", "'\\x0000'", Are::Different),
    ("date", "'2000-01-01'", "'2000-01-02'", Are::Different),
    ("date", "'infinity'", "'-infinity'", Are::Different),
    ("timestamptz", "'2000-01-01 00:00+00'", "'2000-01-01 02:00+02'", Are::Same),
    ("timetz", "'12:00+00'", "'14:00+02'", Are::Different),
    ("interval", "'1 day'", "'24 hours'", Are::Equal),
    ("interval", "'1 mon'", "'30 days'", Are::Equal),
    ("interval", "'1 day'", "'25 hours'", Are::Different),
    ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", Are::Same),
    ("inet", "'10.0.0.1'", "'10.0.0.1/32'", Are::Same),
    ("inet", "'10.0.0.1/8'", "'10.0.0.1'", Are::Different),
    ("jsonb", "'{\"a\": 1.0}'", "'{\"a\": 1.00}'", Are::Equal),
    ("jsonb", "'{\"a\": 1, \"b\": 2}'", "'{\"b\": 2, \"a\": 1}'", Are::Same),
    ("jsonb", "'{\"a\": 1}'", "'{\"a\": 2}'", Are::Different),
    ("jsonb", "'{\"a\": 1}'", "'{\"a\": -1}'", Are::Different),
    ("jsonb", "'1'", "'-1'", Are::Different),
    ("jsonb", "'1'", "'[1]'", Are::Different),
    ("integer[]", "'{1,2}'", "'{2,1}'", Are::Different),
    ("integer[]", "'{1,2}'", "'{{1,2}}'", Are::Different),
    ("integer[]", "'{1,2}'", "'[0:1]={1,2}'", Are::Different),
    ("integer[]", "'{1,NULL}'", "'{1}'", Are::Different),
    ("text[] collate k.folded", "'{straSse}'", "'{STRASSE}'", Are::Equal),
    ("numeric[]", "'{1.0}'", "'{-1.0}'", Are::Different),
    ("numeric[]", "'{1.0}'", "'{1.00}'", Are::Equal),
    ("numeric[]", "'{1.0}'", "'{1.01}'", Are::Different),
    ("numrange", "'[1.0,2.0)'", "'[1.00,2.00)'", Are::Equal),
    ("numrange", "'[1,2)'", "'[1,2]'", Are::Different),
    ("numrange", "'[1,2)'", "'[-1,2)'", Are::Different),
    ("numrange", "'(,1)'", "'[1,)'", Are::Different),
    ("nummultirange", "'{[1,2)}'", "'{[-1,2)}'", Are::Different),
    ("nummultirange", "'{}'", "'{(,)}'", Are::Different),
    ("int4range", "'[1,2]'", "'[1,3)'", Are::Same),
    ("int4range", "'empty'", "'[1,1)'", Are::Same),
    ("nummultirange", "'{[1.0,2.0)}'", "'{[1.00,2.00)}'", Are::Equal),
    ("k.mood", "'sad'", "'sad'", Are::Same),
    ("k.mood", "'sad'", "'ok'", Are::Different),
    ("k.mood[]", "'{sad}'", "'{ok}'", Are::Different),
    ("k.money", "1.0", "1.00", Are::Equal),
    ("k.money", "1.0", "1.5", Are::Different),
    ("k.money[]", "'{1.0}'", "'{1.00}'", Are::Equal),
    ("k.money[]", "'{1.0}'", "'{{1.0}}'", Are::Different),
    ("k.pair", "'(1.0,a)'", "'(1.00,a)'", Are::Equal),
    ("k.pair", "'(1.0,a)'", "'(1.0,b)'", Are::Different),
    ("k.pair", "'(1.0,a)'", "'(-1.0,a)'", Are::Different),
    ("k.pair", "'(,a)'", "'(0,a)'", Are::Different),
    ("k.span", "'[1.0,2)'", "'[1.00,2)'", Are::Equal),
    ("k.span", "'[1,2)'", "'[1,3)'", Are::Different),
    ("k.span", "'[1,2)'", "'[-1,2)'", Are::Different),
    ("pg_lsn", "'0/1'", "'1/0'", Are::Different),
    ("macaddr", "'08:00:2b:01:02:03'", "'08002b:010203'", Are::Same),
    ("varbit", "B'10'", "B'100'", Are::Different),
    ("money", "1", "1.00", Are::Same),
    ("xid8", "'1'", "'2'", Are::Different),
    ("tsvector", "'a b'", "'b a'", Are::Same),
    ("tsvector", "'a b'", "'a c'", Are::Different),
    ("oidvector", "'1 2'", "'2 1'", Are::Different),
];

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (of, first, second, are) in PAIRS {
        let word = match are {
            Are::Same | Are::Equal => "as",
            Are::Different => "unlike",
        };
        let name = format!("key hash: {of} {first} {word} {second}");
        tests.push(test(name, move || compare(of, first, second, *are)));
    }
    tests.push(test(
        "key hash: none where a column of the key is null",
        null,
    ));
    tests.push(test(
        "key hash: the order of the key's columns counts",
        order,
    ));
    tests.push(test(
        "key hash: columns outside of the key do not count",
        outside,
    ));
    tests.push(test("key hash: another table has others", other_table));
    tests.push(test(
        "key hash: replica identity before primary key",
        identity,
    ));
    tests.push(test("key hash: no key, no parts", keyless));
    tests.push(test("key hash: a value out of line has none", out_of_line));
    tests.push(test("key hash: compressed as stored plainly", compressed));
    tests.push(test("key hash: a label's number does not count", label));
    tests.push(test(
        "key hash: a collation's order counts for this node alone",
        everywhere,
    ));
    tests.push(test(
        "key hash: a dropped field of a row does not count",
        dropped_field,
    ));
    tests
}

/// Hashes of the rows of a table with `N` columns, in the order of the rows.
fn hashes<const N: usize>(table: &str) -> Vec<Option<KeyHashes>> {
    let open = Open::new(table);
    let key = identity_key(open.view()).expect("a key");
    hashes_by::<N>(&open, &key)
}

/// As [`hashes`], by this key.
fn hashes_by<const N: usize>(open: &Open, key: &[KeyPart]) -> Vec<Option<KeyHashes>> {
    let mut found = Vec::new();
    table_scan::each::<N>(open.oid(), None, Sees::Committed, |row| {
        let values: Vec<_> = (0..N).map(|column| row.cell(column)).collect();
        found.push(key_hashes_of_row(open.oid(), key, &values));
        ControlFlow::Continue(())
    });
    found
}

/// The only row's.
fn hash<const N: usize>(table: &str) -> KeyHashes {
    let found = hashes::<N>(table);
    assert_eq!(found.len(), 1, "rows");
    found[0].expect("a hash")
}

fn one(expression: &str) -> KeyHashes {
    sql("delete from k.t");
    sql(&format!("insert into k.t values ({expression})"));
    hash::<1>("k.t")
}

fn compare(of: &str, first: &str, second: &str, are: Are) -> Outcome {
    script(TYPES);
    sql(&format!("create table k.t (v {of} primary key)"));
    let (first, second) = (one(first), one(second));
    check(
        (first.equal == second.equal) == (are != Are::Different),
        format!("by equality: {:x} and {:x}", first.equal, second.equal),
    )?;
    check(
        (first.stored == second.stored) == (are == Are::Same),
        format!("of the bytes: {:x} and {:x}", first.stored, second.stored),
    )
}

fn null() -> Outcome {
    script(
        "create schema k;\ncreate table k.t (a int, b int primary key);\ninsert into k.t values (null, 1)",
    );
    // A value of the key itself can only be null in the old row of a change, where it is not known.
    let open = Open::new("k.t");
    let key = identity_key(open.view()).expect("a key");
    let nulls = key_hashes_of_row(open.oid(), &key, &[None, None]);
    same(&nulls, &None)?;
    check(hash::<2>("k.t").equal != 0, "a null elsewhere is no matter")
}

fn order() -> Outcome {
    script(
        "create schema k;\ncreate table k.t (a int, b int, primary key (a, b));\ninsert into k.t values (1, 2), (2, 1)",
    );
    let found = hashes::<2>("k.t");
    check(found[0] != found[1], "(1,2) as (2,1)")
}

fn outside() -> Outcome {
    script(
        "create schema k;\ncreate table k.t (a int primary key, b text);\ninsert into k.t values (1, 'one')",
    );
    let before = hash::<2>("k.t");
    sql("update k.t set b = 'two'");
    same(&hash::<2>("k.t"), &before)
}

fn other_table() -> Outcome {
    script(
        "create schema k;\ncreate table k.t (a int primary key);\ncreate table k.u (a int primary key);\ninsert into k.t values (1);\ninsert into k.u values (1)",
    );
    check(hash::<1>("k.t").equal != hash::<1>("k.u").equal, "equal")
}

fn identity() -> Outcome {
    script(
        "create schema k;\ncreate table k.t (a int primary key, b int not null);\ncreate unique index i on k.t (b);\nalter table k.t replica identity using index i;\ninsert into k.t values (1, 7)",
    );
    let before = hash::<2>("k.t");
    sql("update k.t set a = 2");
    same(&hash::<2>("k.t"), &before)?;
    sql("update k.t set b = 8");
    check(hash::<2>("k.t") != before, "the other key counts")
}

fn keyless() -> Outcome {
    script("create schema k;\ncreate table k.t (a int)");
    sql("create unique index on k.t ((a + 1))");
    let open = Open::new("k.t");
    check(identity_key(open.view()).is_none(), "a key")
}

fn out_of_line() -> Outcome {
    script("create schema k;\ncreate table k.t (a int, v text not null)");
    sql("create unique index i on k.t (md5(v))");
    // No index takes a value that is long enough to be stored out of line. So the key is made here.
    sql("alter table k.t alter v set storage external");
    sql("insert into k.t values (1, repeat('x', 10000))");
    let open = Open::new("k.t");
    let part = KeyPart {
        attribute: 2,
        ..part_of_text()
    };
    same(&hashes_by::<2>(&open, &[part]), &vec![None])
}

/// A text as a key.
fn part_of_text() -> KeyPart {
    sql("create table k.other (v text primary key)");
    let open = Open::new("k.other");
    identity_key(open.view()).expect("a key")[0]
}

fn compressed() -> Outcome {
    script("create schema k;\ncreate table k.t (v text primary key)");
    sql("alter table k.t alter v set storage main");
    sql("insert into k.t values (repeat('x', 2500))");
    let before = hash::<1>("k.t");
    check(
        value("select pg_column_size(v) < 1000 from k.t").as_deref() == Some("t"),
        "the value is not compressed",
    )?;
    script(
        "alter table k.t alter v set storage plain;\ndelete from k.t;\ninsert into k.t values (repeat('x', 2500) || '')",
    );
    check(
        value("select pg_column_size(v) > 2000 from k.t").as_deref() == Some("t"),
        "the value is compressed",
    )?;
    same(&hash::<1>("k.t"), &before)
}

/// An enum's values have other OIDs at each node.
fn label() -> Outcome {
    script(
        "create schema k;\ncreate type k.mood as enum ('sad', 'ok');\ncreate table k.t (v k.mood[] primary key);\ninsert into k.t values ('{ok}')",
    );
    let before = hash::<1>("k.t").stored;
    script(
        "alter type k.mood rename to old;\ncreate type k.mood as enum ('ok');\nalter table k.t alter v type k.mood[] using v::text::k.mood[]",
    );
    same(&hash::<1>("k.t").stored, &before)
}

fn everywhere() -> Outcome {
    script(TYPES);
    sql("create table k.t (v text collate k.folded primary key)");
    let folded = one("'a'");
    check(folded.other() == Some(folded.stored), "one hash alone")?;
    sql("drop table k.t");
    sql("create table k.t (v numeric primary key)");
    same(&one("1.0").other(), &None)
}

fn dropped_field() -> Outcome {
    script(
        "create schema k;\ncreate type k.wide as (a int, gone int, b int);\ncreate table k.t (v k.wide primary key);\ninsert into k.t values ('(1,2,3)');\nalter type k.wide drop attribute gone",
    );
    let before = hash::<1>("k.t").stored;
    sql("update k.t set v = row(1, 3)");
    same(&hash::<1>("k.t").stored, &before)
}
