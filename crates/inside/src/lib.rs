//! Tests of logic that needs a server, run inside one. `scripts/check-inside` builds this library,
//! loads it and calls each test.
//!
//! A test is a name and a function. It runs in a subtransaction that is rolled back afterwards.
//! Commits go through a second session (`db::other`). The library holds a copy of the tested crates
//! of its own: that copy has no shared memory attached, and settings have their defaults.
//!
//! Users never get this library. Not for: the whole extension, which `sql/` and `t/` test.

#![allow(unsafe_code)]
#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests: a panic is a failure with a message"
)]

mod catch;
mod changes;
mod db;
mod decode;
mod encoding;
mod format;
mod index_end;
mod key_hash;
mod layout;
mod lookup;
mod names;
mod page;
mod samples;
mod spool;
mod xid;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error;
use braid_postgres::subtransaction::Subtransaction;
use pgrx::iter::SetOfIterator;
use pgrx::pg_extern;

pgrx::pg_module_magic!();

/// The message of a test that failed.
pub(crate) type Outcome = Result<(), String>;

/// A test and the name that a run prints.
pub(crate) struct Test {
    name: String,
    run: Box<dyn Fn() -> Outcome>,
}

/// Makes a test. `name` starts with the group's name and a colon.
pub(crate) fn test(name: impl Into<String>, run: impl Fn() -> Outcome + 'static) -> Test {
    Test {
        name: name.into(),
        run: Box::new(run),
    }
}

/// Fails unless both are equal.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(got: &T, wanted: &T) -> Outcome {
    if got == wanted {
        return Ok(());
    }
    Err(format!("got {got:?}, wanted {wanted:?}"))
}

/// Fails with `message` unless `holds`.
pub(crate) fn check(holds: bool, message: impl Into<String>) -> Outcome {
    if holds { Ok(()) } else { Err(message.into()) }
}

fn all() -> Vec<Test> {
    [
        lookup::tests(),
        key_hash::tests(),
        decode::tests(),
        index_end::tests(),
        layout::tests(),
        format::tests(),
        names::tests(),
        encoding::tests(),
        xid::tests(),
        page::tests(),
        spool::tests(),
        catch::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// inside.tests(): the names of all tests.
#[pg_extern(sql = false)]
fn tests() -> SetOfIterator<'static, String> {
    SetOfIterator::new(all().into_iter().map(|test| test.name))
}

/// inside.run(name text): null if the test passes, else why it failed.
#[pg_extern(sql = false)]
fn run(name: &str) -> Option<String> {
    let Some(test) = all().into_iter().find(|test| test.name == name) else {
        return Some("there is no such test".to_owned());
    };
    let subtransaction = Subtransaction::begin();
    let outcome = error::catch(|| (test.run)());
    subtransaction.end(false);
    match outcome {
        Ok(outcome) => outcome.err(),
        Err(error) => Some(format!("{}: {}", error.sqlstate, error.message)),
    }
}

/// inside.fail(sqlstate text): raises an error with this SQLSTATE.
#[pg_extern(sql = false)]
fn fail(sqlstate: &str) {
    error::pass_on(|| error::PgError::new(SqlState::parse(sqlstate), "so it failed").raise());
}

/// inside.error_with_lock(): null if only the lock that was taken within is released.
#[pg_extern(sql = false)]
fn error_with_lock() -> Option<String> {
    catch::error_with_lock().err()
}
