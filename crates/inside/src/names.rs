//! Relations by their names.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::names::{find_table, own_table};
use braid_postgres::wait::Wait;

use crate::db::{sql, value};
use crate::{Outcome, Test, check, same, test};

/// Schema and table, as they are and not as SQL writes them.
const NAMES: &[(&str, &str)] = &[
    ("plain", "t"),
    ("Upper Case", "With \"Quotes\""),
    ("é", "𝄞 ключ"),
    ("a.b", "c.d"),
    ("select", "'; drop table t; --"),
    (
        "sixty_three_bytes_sixty_three_bytes_sixty_three_bytes_sixty_thr",
        "sixty_three_bytes_sixty_three_bytes_sixty_three_bytes_sixty_thr",
    ),
];

pub(crate) fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = NAMES
        .iter()
        .map(|(schema, table)| {
            test(format!("name: {schema}.{table} is found"), move || {
                found(schema, table)
            })
        })
        .collect();
    tests.push(test("name: one that is not there", absent));
    tests.push(test("name: the case counts", case));
    tests.push(test("name: a zero byte is an error", zero));
    tests.push(test("name: a table of the extension", own));
    tests.push(test("name: waits have names, there and back", waits));
    tests
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn found(schema: &str, table: &str) -> Outcome {
    sql(&format!("create schema {}", quoted(schema)));
    let name = format!("{}.{}", quoted(schema), quoted(table));
    sql(&format!("create table {name} ()"));
    let wanted = value(&format!(
        "select max(oid::bigint) from pg_class where relname = '{}'",
        table.replace('\'', "''")
    ));
    let oid = find_table(schema, table).map_err(|error| error.message)?;
    same(&oid.map(|oid| oid.to_u32().to_string()), &wanted)
}

fn absent() -> Outcome {
    let find = |schema, table| find_table(schema, table).map_err(|error| error.message);
    same(&find("pg_catalog", "no_such_table")?, &None)?;
    same(&find("no_such_schema", "pg_class")?, &None)?;
    same(&find("", "")?, &None)?;
    same(&find("pg_catalog", &"x".repeat(1000))?, &None)
}

fn case() -> Outcome {
    sql("create schema \"S\"");
    sql("create table \"S\".t ()");
    let find = |schema, table| find_table(schema, table).map_err(|error| error.message);
    same(&find("s", "t")?, &None)?;
    same(&find("S", "T")?, &None)?;
    check(find("S", "t")?.is_some(), "not found")
}

fn zero() -> Outcome {
    for (schema, table) in [("pg_catalog\0", "pg_class"), ("pg_catalog", "pg_class\0x")] {
        let error = find_table(schema, table).err().ok_or("found")?;
        same(&error.sqlstate, &SqlState::ProtocolViolation)?;
    }
    Ok(())
}

fn own() -> Outcome {
    let oid = own_table("subscription").map_err(|error| error.message)?;
    let wanted = value("select 'braid.subscription'::regclass::oid");
    same(&Some(oid.to_u32().to_string()), &wanted)?;
    let error = own_table("no_such_table").err().ok_or("found")?;
    same(&error.sqlstate, &SqlState::UndefinedTable)?;
    check(error.hint.is_some(), "no hint")
}

fn waits() -> Outcome {
    let mut names = Vec::new();
    for number in 0..64 {
        if let Some(wait) = Wait::from_u32(number) {
            same(&(wait as u32), &number)?;
            names.push(wait.name());
        }
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    check(count > 3 && names.len() == count, "names are not distinct")
}
