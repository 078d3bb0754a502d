//! Statements that a user has run on all nodes; and statements that a node runs by itself.

use braid_node::ddl::{self, intent};
use braid_postgres::encoding::Text;
use braid_postgres::error::pass_on;
use braid_postgres::schema_statement;
use pgrx::prelude::PgSqlErrorCode;
use pgrx::{Uuid, pg_extern};

use super::failure::{Failure, Outcome};
use super::{in_recovery, on_standby, required, run, text};

/// braid.replicate_ddl(statement text) returns void
///
/// The statement runs with the rights and the search path of the caller, on this node and on the
/// others.
#[pg_extern(sql = false)]
fn replicate_ddl(statement: Option<Text>) {
    if let Err(failure) = pass_on(|| replicate(text(statement))) {
        failure.raise();
    }
}

fn replicate(statement: Option<String>) -> Outcome<()> {
    let statement = required(statement, "statement")?;
    let Some(tag) = schema_statement::single_utility(&statement) else {
        return Err(Failure::parameter("this is not one utility statement")
            .hint("Give one statement, without a semicolon. Rows are replicated anyway."));
    };
    if !ddl::is_a_node() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "this database is not a node",
        )
        .hint("Run braid.create_node first."));
    }
    if in_recovery() {
        return Err(on_standby());
    }
    ddl::run_everywhere(&tag, &statement);
    Ok(())
}

/// braid.cancel_ddl(ddl_id uuid) returns void
#[pg_extern(sql = false)]
fn cancel_ddl(ddl_id: Option<Uuid>) {
    change(ddl_id, intent::cancel, "cancelled");
}

/// braid.retry_ddl(ddl_id uuid) returns void
#[pg_extern(sql = false)]
fn retry_ddl(ddl_id: Option<Uuid>) {
    change(ddl_id, intent::retry, "tried again");
}

/// Changes an intent by a function that returns the state that it had; raises why it can't be done.
fn change(ddl_id: Option<Uuid>, by: impl Fn(&str) -> Option<String>, what: &str) {
    run(|| {
        let id = required(ddl_id, "ddl_id")?.to_string();
        match by(&id).as_deref() {
            Some("waiting" | "running" | "failed" | "cancelled") => Ok(()),
            state => Err(refusal(&id, state, what)),
        }
    });
}

fn refusal(id: &str, state: Option<&str>, what: &str) -> Failure {
    match state {
        Some(state) => Failure::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("statement {id} is {state} and cannot be {what}"),
        )
        .hint("braid.ddl_log shows the state of each statement."),
        None => Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            format!("there is no statement {id} that this node runs by itself"),
        )
        .hint("braid.ddl_log shows the statements, with their attempts."),
    }
}
