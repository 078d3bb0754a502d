//! The SQL functions. Run in the session that calls them.
//!
//! Each function checks its arguments with the caller's rights, then does its work with those of the extension's owner: who may
//! call it at all is said by GRANT in the install script. search_path is pinned there as well, for every function.
//! What a function changes takes effect at commit: nothing is created or dropped at a provider before it.
//!
//! The install script is kept by hand; `scripts/check-sql` compares it with what the library exports.

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
mod parked;
mod position;
mod provider;
mod server;
mod slot;
mod subscription;
mod table_set;
mod upgrade;
mod version;
mod waiting;

use std::ffi::CStr;

use braid_node::read_only;
use braid_postgres::catalog::{Rights, utf8_string, with_rights};
use braid_postgres::encoding::Text;
use braid_postgres::error::pass_on;

use failure::{Failure, Outcome};

/// Run a function's work with the rights of the extension's owner and raise what it fails with. An error of PostgreSQL, of users' code that
/// runs in it as well, keeps all of its fields.
fn run<T>(work: impl FnOnce() -> Outcome<T>) -> T {
    match pass_on(|| read_only::allowing(|| with_rights(Rights::ExtensionOwner, work))) {
        Ok(value) => value,
        Err(failure) => failure.raise(),
    }
}

/// An argument of type name that must be there.
fn required_name(value: Option<&CStr>, argument: &str) -> Outcome<String> {
    value
        .map(utf8_string)
        .ok_or_else(|| Failure::null_argument(argument))
}

/// An argument of type text, if it is there.
fn text(value: Option<Text>) -> Option<String> {
    value.map(|Text(text)| text)
}

/// An argument that must be there.
fn required<T>(value: Option<T>, argument: &str) -> Outcome<T> {
    value.ok_or_else(|| Failure::null_argument(argument))
}

/// Have the manager look at the catalog once this transaction has committed.
fn wake_manager() {
    braid_node::wake::manager_at_commit();
}
