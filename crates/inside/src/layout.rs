//! Layouts that are written down by hand are those of the server's headers, as a C program has
//! printed them into the table `inside.header`.

use braid_postgres::layout::{any_user_timeout, by_hand};

use crate::db::value;
use crate::{Outcome, Test, check, same, test};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        test(
            "layout: members and numbers are those of the headers",
            members,
        ),
        test("layout: a timer of our own is none of PostgreSQL's", timer),
    ]
}

fn header(name: &str) -> Option<String> {
    value(&format!(
        "select value::text from inside.header where name = '{name}'"
    ))
}

fn members() -> Outcome {
    for (name, value) in by_hand() {
        same(&(name, header(name)), &(name, Some(value.to_string())))?;
    }
    Ok(())
}

fn timer() -> Outcome {
    let first = header("USER_TIMEOUT").and_then(|first| first.parse::<i64>().ok());
    check(
        first.is_some_and(|first| first <= any_user_timeout()),
        format!("USER_TIMEOUT is {first:?}"),
    )
}
