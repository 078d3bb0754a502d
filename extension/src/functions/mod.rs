//! The SQL functions. Run in the session that calls them.
//!
//! Each function checks its arguments with the caller's rights, then does its work with those of
//! the extension's owner. GRANTs in the install script decide which roles may call it. The script
//! also pins the search_path of every function. Changes take effect at commit: nothing is created
//! or dropped at a provider before it.
//!
//! The install script is kept by hand; `scripts/check-sql` compares it with the library's exports.

mod activity;
mod alter;
mod check;
mod column_rule;
mod compare;
mod conflict;
mod create;
mod ddl;
mod drop_guard;
mod failure;
mod foreign_key;
mod group;
mod hold;
mod ingest;
mod local;
mod missing_column;
mod node;
mod options;
mod owner;
mod parked;
mod position;
mod provider;
mod routing;
mod server;
mod slot;
mod subscription;
mod table_set;
mod upgrade;
mod version;
mod versions;
mod waiting;

use std::ffi::CStr;

use braid_bgworker::sqlstate::SqlState;
use braid_node::read_only;
use braid_postgres::catalog::{Rights, query, utf8_string, with_rights};
use braid_postgres::encoding::Text;
use braid_postgres::error::{self, PgError};
use braid_postgres::server::is_in_recovery as in_recovery;
use pgrx::PgSqlErrorCode;

use failure::{Failure, Outcome};

/// Runs a function's work with the rights of the extension's owner and raises its errors. An error
/// of PostgreSQL, of users' code that runs in it as well, keeps all of its fields, unless there is
/// a better one ([`explained`]).
fn run<T>(work: impl FnOnce() -> Outcome<T>) -> T {
    match error::catch(|| read_only::allowing(|| with_rights(Rights::ExtensionOwner, work))) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => failure.raise(),
        Err(error) => match explained(&error) {
            Some(failure) => failure.raise(),
            None => error.as_raised().raise(),
        },
    }
}

/// Returns the error that a user is to see in place of PostgreSQL's bare one: at a standby, and
/// where another session has written the same row of Braid's tables, which a transaction with an
/// older snapshot does not see.
fn explained(error: &PgError) -> Option<Failure> {
    let fields = error.fields.as_deref()?;
    let is_write = matches!(
        error.sqlstate,
        SqlState::ReadOnlySqlTransaction
            | SqlState::InternalError
            | SqlState::ObjectNotInPrerequisiteState
    );
    if is_write && in_recovery() {
        return Some(on_standby().detail(format!("PostgreSQL reported: {}.", error.message)));
    }
    // A transaction with an older snapshot has read a row that another session has changed.
    if error.sqlstate == SqlState::SerializationFailure {
        let reported = format!("PostgreSQL reported: {}.", error.message);
        return Some(changed_meanwhile().detail(reported));
    }
    let (schema, table) = fields.table()?;
    if error.sqlstate != SqlState::UniqueViolation || schema != "braid" {
        return None;
    }
    let has_names = matches!(
        table.as_str(),
        "node" | "subscription" | "group_self" | "group_member"
    );
    Some(if has_names {
        Failure::duplicate("another session has created an object of the same name")
            .hint("A new transaction sees that object. Choose another name, or change that object.")
    } else {
        changed_meanwhile()
    })
}

/// 40001: another session was faster.
fn changed_meanwhile() -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
        "another session has changed the same object at the same time",
    )
    .hint("Try again in a new transaction.")
}

/// 25006: this server is a standby.
fn on_standby() -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION,
        "this server is a standby, where nothing is replicated and nothing can be changed",
    )
    .hint("Call the function at the primary, or promote this server.")
}

/// Has sessions that set rules of one kind do so one after the other.
fn lock_rules(table: &str) {
    let lock = format!("lock table braid.{table} in share row exclusive mode");
    query(&lock, &[]);
}

/// A required argument of type name.
fn required_name(value: Option<&CStr>, argument: &str) -> Outcome<String> {
    value
        .map(utf8_string)
        .ok_or_else(|| Failure::null_argument(argument))
}

/// An optional argument of type text.
fn text(value: Option<Text>) -> Option<String> {
    value.map(|Text(text)| text)
}

/// A required argument.
fn required<T>(value: Option<T>, argument: &str) -> Outcome<T> {
    value.ok_or_else(|| Failure::null_argument(argument))
}

/// Have the manager look at the catalog once this transaction has committed.
fn wake_manager() {
    braid_node::wake::manager_at_commit();
}
