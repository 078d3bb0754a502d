//! Index ends: a key is known to be beyond all that an index has, and never wrongly so.

use braid_postgres::index_end::IndexEnd;
use braid_postgres::value;
use pgrx::pg_sys;

use crate::db::{Open, script, sql};
use crate::{Outcome, Test, check, test};

/// An index over the table, its rows, the key that is looked for, and whether it is beyond the end.
struct Case {
    name: &'static str,
    index: &'static str,
    rows: &'static str,
    key: &'static [Part],
    wanted: bool,
}

#[derive(Clone, Copy)]
enum Part {
    Number(i32),
    Text(&'static std::ffi::CStr),
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case { name: "an empty index", index: "(a)", rows: "", key: &[Part::Number(1)], wanted: false },
    Case { name: "a greater key", index: "(a)", rows: "(1), (5)", key: &[Part::Number(6)], wanted: true },
    Case { name: "the last key", index: "(a)", rows: "(1), (5)", key: &[Part::Number(5)], wanted: false },
    Case { name: "a key in between", index: "(a)", rows: "(1), (5)", key: &[Part::Number(3)], wanted: false },
    Case { name: "a key before all", index: "(a)", rows: "(1), (5)", key: &[Part::Number(-1)], wanted: false },
    Case { name: "a lesser key, downwards", index: "(a desc)", rows: "(1), (5)", key: &[Part::Number(0)], wanted: true },
    Case { name: "a greater key, downwards", index: "(a desc)", rows: "(1), (5)", key: &[Part::Number(6)], wanted: false },
    Case { name: "the last key, downwards", index: "(a desc)", rows: "(1), (5)", key: &[Part::Number(1)], wanted: false },
    Case { name: "nulls at the end", index: "(a)", rows: "(1), (null)", key: &[Part::Number(6)], wanted: false },
    Case { name: "nulls at the beginning", index: "(a nulls first)", rows: "(1), (null)", key: &[Part::Number(6)], wanted: true },
    Case { name: "nulls at the beginning, downwards", index: "(a desc)", rows: "(1), (null)", key: &[Part::Number(0)], wanted: true },
    Case { name: "two columns, the second greater", index: "(a, b)", rows: "(1, 9), (2, 3)", key: &[Part::Number(2), Part::Number(4)], wanted: true },
    Case { name: "two columns, the second lesser", index: "(a, b)", rows: "(1, 9), (2, 3)", key: &[Part::Number(2), Part::Number(2)], wanted: false },
    Case { name: "two columns, the first lesser", index: "(a, b)", rows: "(1, 9), (2, 3)", key: &[Part::Number(1), Part::Number(99)], wanted: false },
    Case { name: "two columns, both directions", index: "(a, b desc)", rows: "(1, 9), (2, 3)", key: &[Part::Number(2), Part::Number(2)], wanted: true },
    Case { name: "a column that is only included", index: "(a) include (b)", rows: "(1, 9), (2, 3)", key: &[Part::Number(3)], wanted: true },
    Case { name: "fewer values than columns", index: "(a, b)", rows: "(1, 9)", key: &[Part::Number(9)], wanted: false },
    Case { name: "more values than columns", index: "(a)", rows: "(1, 9)", key: &[Part::Number(9), Part::Number(9)], wanted: false },
    Case { name: "another kind of index", index: "using hash (a)", rows: "(1)", key: &[Part::Number(9)], wanted: false },
    Case { name: "a text beyond, bytewise", index: "(t collate \"C\")", rows: "(1, 1, 'B'), (1, 1, 'a')", key: &[Part::Text(c"b")], wanted: true },
    Case { name: "a text before, bytewise", index: "(t collate \"C\")", rows: "(1, 1, 'B'), (1, 1, 'a')", key: &[Part::Text(c"Z")], wanted: false },
    Case { name: "a text beyond, by a collation", index: "(t collate \"und-x-icu\")", rows: "(1, 1, 'B'), (1, 1, 'a')", key: &[Part::Text(c"Z")], wanted: true },
    Case { name: "equal under the collation", index: "(t collate i.folded)", rows: "(1, 1, 'a'), (1, 1, 'b')", key: &[Part::Text(c"B")], wanted: false },
];

pub(crate) fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = CASES
        .iter()
        .map(|case| test(format!("index end: {}", case.name), || run(case)))
        .collect();
    tests.push(test("index end: the last key is deleted", deleted));
    tests.push(test("index end: it moves while it is remembered", grows));
    tests.push(test("index end: of a temporary table", temporary));
    tests.push(test("index end: the index is emptied", emptied));
    tests.push(test("index end: looks in vain get rarer", pauses));
    tests.push(test("index end: keys alike on many pages", alike));
    tests
}

const TABLE: &str = "create schema i;\n\
    create collation i.folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false);\n\
    create table i.t (a int, b int, t text)";

fn made(index: &str, rows: &str) -> Open {
    script(TABLE);
    sql(&format!("create index e on i.t {index}"));
    if !rows.is_empty() {
        sql(&format!("insert into i.t values {rows}"));
    }
    Open::new("i.e")
}

fn look(end: &mut IndexEnd, index: &Open, key: &[Part]) -> bool {
    let argument = |part: &Part| match part {
        Part::Number(number) => pg_sys::Datum::from(*number),
        Part::Text(text) => value::text(text.to_bytes()).datum(),
    };
    let keys: Vec<pg_sys::ScanKeyData> = key
        .iter()
        .map(|part| pg_sys::ScanKeyData {
            sk_argument: argument(part),
            ..Default::default()
        })
        .collect();
    // SAFETY: the index is open, and the values are of its columns' types.
    unsafe { end.is_before(index.as_ptr(), &keys) }
}

fn run(case: &Case) -> Outcome {
    let index = made(case.index, case.rows);
    let got = look(&mut IndexEnd::default(), &index, case.key);
    check(got == case.wanted, format!("it says {got}"))
}

/// A dead entry still counts.
fn deleted() -> Outcome {
    let index = made("(a)", "(1), (5)");
    sql("delete from i.t where a = 5");
    check(
        !look(&mut IndexEnd::default(), &index, &[Part::Number(5)]),
        "the key of a dead row",
    )?;
    check(
        look(&mut IndexEnd::default(), &index, &[Part::Number(6)]),
        "a greater key",
    )
}

/// The last page is split many times.
fn grows() -> Outcome {
    let index = made("(a)", "(0)");
    let mut end = IndexEnd::default();
    for last in (500..20_000).step_by(500) {
        check(
            look(&mut end, &index, &[Part::Number(last)]),
            format!("before {last}"),
        )?;
        sql(&format!(
            "insert into i.t select generate_series({last} - 499, {last})"
        ));
        check(
            !look(&mut IndexEnd::default(), &index, &[Part::Number(last)]),
            format!("{last} is there"),
        )?;
    }
    check(
        !look(&mut end, &index, &[Part::Number(19_500)]),
        "the last key",
    )
}

fn temporary() -> Outcome {
    script(
        "create temporary table mine (a int);\ncreate index mine_a on mine (a);\ninsert into mine values (1)",
    );
    let index = Open::new("mine_a");
    check(
        !look(&mut IndexEnd::default(), &index, &[Part::Number(9)]),
        "a page that is in no shared buffer",
    )
}

fn emptied() -> Outcome {
    let index = made("(a)", "(1)");
    let mut end = IndexEnd::default();
    check(look(&mut end, &index, &[Part::Number(2)]), "a greater key")?;
    drop(index);
    sql("truncate i.t");
    let index = Open::new("i.e");
    check(
        !look(&mut end, &index, &[Part::Number(2)]),
        "an empty index",
    )
}

/// After a look in vain one is left out, after the next three.
fn pauses() -> Outcome {
    let index = made("(a)", "(5)");
    let mut end = IndexEnd::default();
    let mut said = Vec::new();
    for key in [5, 6, 5, 6, 6, 6, 6] {
        said.push(look(&mut end, &index, &[Part::Number(key)]));
    }
    let wanted = vec![false, false, false, false, false, false, true];
    crate::same(&said, &wanted)
}

fn alike() -> Outcome {
    let index = made("(a)", "(1)");
    sql("insert into i.t select 7 from generate_series(1, 5000)");
    check(
        !look(&mut IndexEnd::default(), &index, &[Part::Number(7)]),
        "the key of all",
    )?;
    check(
        look(&mut IndexEnd::default(), &index, &[Part::Number(8)]),
        "a greater key",
    )
}
