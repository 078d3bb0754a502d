//! The settings `braid.versions`, `braid.release` and `braid.version_timeout`.
//!
//! The hooks of the first two only parse. They refuse a value unless SET LOCAL of this transaction
//! gives it: `set_config`, ALTER ROLE, configuration files and connection options can't wait for
//! versions. What SET LOCAL does follows the statement (`transaction.rs`).

use std::cell::Cell;
use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::declared_tables::is_named;
use braid_postgres::error::PgError;
use braid_postgres::hook::Utility;
use braid_postgres::text_setting::{self, Place, TextSetting};
use braid_postgres::touched_tables::set_statement;
use braid_versions::{Declaration, TableName};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

/// A setting that acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Acting {
    /// `braid.versions`.
    Versions,
    /// `braid.release`.
    Release,
}

/// A statement that sets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Set {
    pub(super) setting: Acting,
    pub(super) is_local: bool,
}

static TIMEOUT_MS: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static VERSIONS: Place = Place::new();
static RELEASE: Place = Place::new();

thread_local! {
    /// SET LOCAL of one of the settings is being executed.
    static SETS: Cell<bool> = const { Cell::new(false) };
}

braid_postgres::check_hook!(check_versions, versions_may_be);
braid_postgres::check_hook!(check_release, release_may_be);

/// Registers the settings. Once, when the library is loaded.
pub(crate) fn register() {
    let versions = TextSetting {
        name: c"braid.versions",
        short: c"Tables that the transaction reads and writes in the order of versions.",
        long: c"SET LOCAL makes the transaction a versioned one, and waits until this node has what it is to see.",
        hook: Some(check_versions),
    };
    let release = TextSetting {
        name: c"braid.release",
        short: c"Versioned tables that the transaction uses no more.",
        long: c"SET LOCAL lets later transactions go on that wait for a table which this one has declared and not used.",
        hook: Some(check_release),
    };
    text_setting::define(&versions, &VERSIONS);
    text_setting::define(&release, &RELEASE);
    GucRegistry::define_int_guc(
        c"braid.version_timeout",
        c"Longest time that a versioned transaction waits for others.",
        c"0 sets no limit. It counts for SET LOCAL braid.versions, for the commit, and for braid.read_current, each.",
        &TIMEOUT_MS,
        0,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
}

/// How long a transaction waits; `None`: without a limit.
pub(super) fn timeout() -> Option<Duration> {
    let limit = u64::try_from(TIMEOUT_MS.get()).unwrap_or(0);
    (limit > 0).then(|| Duration::from_millis(limit))
}

/// The setting that a statement gives a value. Raises nothing.
pub(super) fn of(statement: Utility<'_>) -> Option<Set> {
    let (name, is_local) = set_statement(statement.node()?)?;
    let setting = if is_named(Some(name), c"braid.versions") {
        Acting::Versions
    } else if is_named(Some(name), c"braid.release") {
        Acting::Release
    } else {
        return None;
    };
    Some(Set { setting, is_local })
}

/// Lets the current statement set a value, or no other one from now on.
pub(super) fn allow(sets: bool) {
    SETS.set(sets);
}

fn check_allowed(name: &str) -> Result<(), PgError> {
    if SETS.get() {
        return Ok(());
    }
    Err(PgError::new(
        SqlState::ActiveSqlTransaction,
        format!("parameter \"{name}\" can only be set with SET LOCAL"),
    )
    .with_hint(format!(
        "Run SET LOCAL {name} = '...' in the transaction itself: set_config, ALTER ROLE, SET clauses of functions and configuration files cannot wait for versions."
    )))
}

fn malformed(error: &braid_versions::DeclarationError) -> PgError {
    PgError::new(SqlState::InvalidParameterValue, error.problem.to_string())
        .with_detail(format!("The error is at character {}.", error.position))
}

fn versions_may_be(value: &str) -> Result<(), PgError> {
    check_allowed("braid.versions")?;
    let parsed = value.parse::<Declaration>();
    parsed.map(drop).map_err(|error| {
        malformed(&error).with_hint(
            "Name each table with what is done with it, as in 'read accounts, write stock'.",
        )
    })
}

fn release_may_be(value: &str) -> Result<(), PgError> {
    check_allowed("braid.release")?;
    let parsed = TableName::list(value);
    parsed.map(drop).map_err(|error| {
        malformed(&error).with_hint("Name tables with commas between, as in 'accounts, stock'.")
    })
}
