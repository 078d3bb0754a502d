//! The worker of intents: runs the next statement that this node has to run by itself
//! (`braid_node::ddl::intent`), and ends. The manager starts it when one is due. So each statement
//! has a session of its own, and the worker's death, or the server's, leaves it to the next one.
//!
//! A statement that commits on its way runs at the top level, as the role that has run it at its
//! node: PostgreSQL has such statements work for the table's owner under its own limits.
//!
//! Not for: handling a received statement (`braid_apply`).

use braid_apply::role_of;
use braid_bgworker::ddl::shortened;
use braid_bgworker::sql_text::quote_identifier;
use braid_bgworker::sqlstate::SqlState;
use braid_node::ddl::intent::{self, Due, Verdict};
use braid_node::standing;
use braid_node::subscription::rows;
use braid_postgres::catalog::{Rights, query, with_rights, with_settings};
use braid_postgres::error::{self, PgError};
use braid_postgres::{top_level, worker};
use pgrx::pg_sys;

/// Class of the advisory lock that the only worker of a database holds: the worker of an earlier
/// manager may still be running.
const LOCK_CLASS: i32 = 0xb424;
/// Characters of a statement that the process list shows.
const SHOWN: usize = 200;

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    crate::connect(argument);
    let taken = error::transaction(|| {
        if standing::refusal()?.is_some() {
            return Ok(None);
        }
        let locked = query(
            &format!("select pg_try_advisory_lock({LOCK_CLASS}, 0)"),
            &[],
        );
        if locked.get(0, 0) != Some("t") {
            return Ok(None);
        }
        Ok(intent::take())
    });
    match taken {
        Ok(Some(due)) => run(due),
        Ok(None) => {}
        Err(failure) => failure.log("braid intents"),
    }
}

fn run(mut due: Due) {
    let id = due.statement.uuid();
    worker::report_activity(&shortened(&due.statement.text, SHOWN));
    let outcome = attempt(&mut due);
    let again = match outcome {
        Ok((state, reason)) => error::transaction(|| {
            intent::finish(&id, state, reason.as_deref());
            Ok(true)
        }),
        Err(failure) => {
            failure.log("a statement of another node failed here");
            let interrupted = matches!(
                failure.sqlstate,
                SqlState::QueryCanceled | SqlState::DeadlockDetected
            );
            error::transaction(|| Ok(intent::fail(&id, &failure.message, interrupted)))
        }
    };
    match again {
        Ok(true) => {}
        Ok(false) => clean_up(&due),
        Err(failure) => failure.log("could not write down what became of a statement"),
    }
}

/// Drops what a cancelled attempt has left.
fn clean_up(due: &Due) {
    let dropped = match error::transaction(|| Ok(intent::drop_of_rest(due))) {
        Ok(Some(drop)) => top_level::run(&drop),
        Ok(None) => Ok(()),
        Err(failure) => Err(failure),
    };
    if let Err(failure) = dropped {
        failure.log("could not drop the index that a cancelled statement has left");
    }
}

/// Runs an intent unless it is done. Returns its state, and why.
fn attempt(due: &mut Due) -> Result<(&'static str, Option<String>), PgError> {
    let role = error::transaction(|| role_for(due))?;
    let Some(role) = role else {
        return Ok((
            "skipped",
            Some("the subscription that brought it is gone".to_owned()),
        ));
    };
    if let Some(drop) = error::transaction(|| Ok(intent::drop_of_rest(due)))? {
        top_level::run(&drop)?;
    }
    let text = match error::transaction(|| Ok(intent::judge(due)))? {
        Verdict::Done(why) => return Ok(("done", Some(why.to_owned()))),
        Verdict::Skipped(why) => return Ok(("skipped", Some(why.to_owned()))),
        Verdict::Run(text) => text,
    };
    let ran = if intent::is_confined(&due.statement) {
        confined(due, role, &text)
    } else {
        at_top_level(due, &text)
    };
    match ran {
        Err(failure) if intent::is_gone(&due.statement, &failure) => {
            Ok(("skipped", Some(failure.message)))
        }
        ran => ran.map(|()| ("done", None)),
    }
}

/// The role of an intent; `None` without the subscription that has brought it.
fn role_for(due: &Due) -> Result<Option<pg_sys::Oid>, PgError> {
    let found = rows(
        "select subscription_owner::oid::text from braid.subscription where subscription_name = $1::name",
        &[due.subscription.as_str().into()],
    )?;
    let owner = found
        .first()
        .and_then(|row| row.first()?.as_deref()?.parse().ok());
    let role = owner.map(|owner| role_of(&due.statement.role, owner, &due.subscription));
    role.transpose()
}

/// Runs a statement in a transaction, as a role that can't become another one.
fn confined(due: &Due, role: pg_sys::Oid, text: &str) -> Result<(), PgError> {
    error::transaction(|| {
        let settings: Vec<(&str, &str)> = intent::settings_of(&due.statement).collect();
        with_settings(&settings, || {
            with_rights(Rights::Confined(role), || query(text, &[]));
            Ok(())
        })
    })
}

/// Runs a statement outside of a transaction block, in a session of its role.
fn at_top_level(due: &Due, text: &str) -> Result<(), PgError> {
    let name = quote_identifier(&due.statement.role);
    error::transaction(|| {
        for (name, value) in intent::settings_of(&due.statement) {
            worker::set(name, value);
        }
        query(&format!("set session authorization {name}"), &[]);
        Ok(())
    })?;
    let ran = top_level::run(text);
    error::transaction(|| {
        query("set session authorization default", &[]);
        worker::set("search_path", "");
        Ok(())
    })?;
    ran
}
