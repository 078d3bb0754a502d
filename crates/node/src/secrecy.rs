//! Keeps connection strings out of the server's log: a statement that fails is logged with its text
//! (`log_min_error_statement`), and the text of a call of create_subscription has a password in it.
//! A statement that does not name the function, such as EXECUTE, has one if the function was
//! called.
//!
//! Runs in every session, only when something is logged. Does not touch statements that an
//! administrator has logged (`log_statement`).

use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

use braid_postgres::plain;
use pgrx::pg_sys;

/// Functions that take a connection string. `check` is a word of SQL: [`names_check`] looks for it.
const FUNCTIONS: [&[u8]; 11] = [
    b"create_subscription",
    b"alter_subscription",
    b"create_node",
    b"create_group",
    b"join_group",
    b"add_witness",
    b"group_add",
    b"alter_node",
    b"group_alter",
    b"peer_facts",
    b"dsn_role",
];

/// The previous hook.
static PREVIOUS: OnceLock<pg_sys::emit_log_hook_type> = OnceLock::new();

/// When the last statement started that has called one of the functions (TimestampTz).
static CALLED_AT: AtomicI64 = AtomicI64::new(i64::MIN);

/// Notes that the statement that runs now has a connection string in it. The functions call it
/// before anything that can fail.
pub fn note_call() {
    let started = plain::GetCurrentStatementStartTimestamp();
    CALLED_AT.store(started, Ordering::Relaxed);
}

/// Start hiding. Called once, from the library's initialization.
pub fn hide_connection_strings() {
    // SAFETY: PostgreSQL runs _PG_init alone; hooks are chained as its own modules do it.
    unsafe {
        if PREVIOUS.set(pg_sys::emit_log_hook).is_ok() {
            pg_sys::emit_log_hook = Some(hide_statement);
        }
    }
}

/// Runs in the middle of PostgreSQL's error reporting: allocates nothing and raises nothing.
unsafe extern "C-unwind" fn hide_statement(error: *mut pg_sys::ErrorData) {
    // SAFETY: PostgreSQL passes the error that it is about to log; debug_query_string is null or
    // the session's current statement.
    unsafe {
        let statement = pg_sys::debug_query_string;
        let called =
            pg_sys::GetCurrentStatementStartTimestamp() == CALLED_AT.load(Ordering::Relaxed);
        if called
            || (!statement.is_null() && names_a_function(CStr::from_ptr(statement).to_bytes()))
        {
            (*error).hide_stmt = true;
            (*error).hide_ctx = true;
        }
        braid_postgres::worker::calm(&mut *error);
        if let Some(Some(previous)) = PREVIOUS.get() {
            previous(error);
        }
    }
}

fn names_a_function(statement: &[u8]) -> bool {
    FUNCTIONS.iter().any(|function| {
        statement
            .windows(function.len())
            .any(|window| window.eq_ignore_ascii_case(function))
    }) || names_check(statement)
}

/// Whether a statement has `check` in quotes or with a schema before it. The bare word is reserved,
/// and never a function.
fn names_check(statement: &[u8]) -> bool {
    const NAME: &[u8] = b"check";
    statement
        .windows(NAME.len())
        .enumerate()
        .filter(|(_, window)| window.eq_ignore_ascii_case(NAME))
        .any(|(at, _)| {
            let before = statement.get(..at).unwrap_or_default().trim_ascii_end();
            before.ends_with(b".") || before.ends_with(b"\"")
        })
}
