//! Uses of versioned tables that a transaction has not declared, and statements that would break
//! the order of versions. Run by every session.
//!
//! | way to a table | checked by |
//! |---|---|
//! | queries, also in functions, triggers, cascades and views; COPY | the executor's check of rights |
//! | TRUNCATE, also CASCADE | access to the object |
//! | ALTER TABLE, CREATE INDEX, CREATE TRIGGER, CREATE RULE, RENAME | the statement |
//! | DROP, also CASCADE | access to the object: refused until the table is unversioned |
//!
//! Inheritance and partitions are refused: a read of the parent reads the child. VACUUM, CLUSTER,
//! REINDEX and CREATE INDEX CONCURRENTLY change no content, and are not checked.
//!
//! Not for: processes that write below the executor, which check for themselves
//! (`braid_apply`).

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::access_check::{self, AccessWatch};
use braid_postgres::declared_tables::find_raw;
use braid_postgres::error::PgError;
use braid_postgres::hook::Utility;
use braid_postgres::touched_tables::{self, Touch};
use pgrx::pg_sys;

use super::{tables, transaction};

static WATCH: AccessWatch = AccessWatch {
    wants: transaction::checks,
    check,
};

pub(super) fn install() {
    access_check::install(&WATCH);
}

fn check(relation: pg_sys::Oid, writes: bool) -> Result<(), PgError> {
    if tables::number_of(relation).is_none() {
        return Ok(());
    }
    transaction::allows(relation, writes)
}

fn or_raise(checked: Result<(), PgError>) {
    if let Err(error) = checked {
        error.raise();
    }
}

/// Whether a statement may change a versioned table's definition. Raises nothing.
pub(super) fn may_concern(statement: Utility<'_>) -> bool {
    tables::may_be() && statement.node().is_some_and(touched_tables::may_touch)
}

/// Such a statement begins.
pub(super) fn before(statement: Utility<'_>) {
    let Some(node) = statement.node() else {
        return;
    };
    for touch in touched_tables::touched(node) {
        or_raise(check_touch(touch));
    }
}

fn check_touch(touch: Touch<'_>) -> Result<(), PgError> {
    let versioned = |schema, name| {
        let relation = find_raw(schema, name)?;
        tables::number_of(relation).map(|_| relation)
    };
    match touch {
        Touch::Changes(schema, name) => match versioned(schema, name) {
            Some(relation) => transaction::allows(relation, true),
            None => Ok(()),
        },
        Touch::Joins(schema, name) => match versioned(schema, name) {
            Some(relation) => Err(PgError::new(
                SqlState::FeatureNotSupported,
                format!(
                    "versioned table {} cannot be part of an inheritance tree",
                    transaction::name_of(relation)
                ),
            )
            .with_detail("A read of the parent would read tables that are not declared.")
            .with_hint("Call braid.unversion_table first.")),
            None => Ok(()),
        },
        Touch::Subscribes if !tables::all().is_empty() => Err(PgError::new(
            SqlState::FeatureNotSupported,
            "a database with versioned tables cannot subscribe yet",
        )
        .with_detail("Changes of a provider would be applied without regard to versions.")
        .with_hint("Call braid.unversion_table for each table of braid.table_versions first.")),
        Touch::Subscribes => Ok(()),
    }
}

/// A relation is being truncated.
pub(crate) fn truncated(relation: pg_sys::Oid) {
    or_raise(check(relation, true));
}

/// A relation is being dropped.
pub(crate) fn dropped(relation: pg_sys::Oid) {
    if tables::number_of(relation).is_none() {
        return;
    }
    PgError::new(
        SqlState::DependentObjectsStillExist,
        format!(
            "versioned table {} cannot be dropped",
            transaction::name_of(relation)
        ),
    )
    .with_hint("Call braid.unversion_table first.")
    .raise();
}
