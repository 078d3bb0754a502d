//! Keeps connection strings in `braid.connection`, out of reach of logical decoding.
//!
//! Sessions that create, alter and drop nodes and subscriptions call it. A connection string may
//! have a password in it, and any output plugin decodes changes of an ordinary table. Rows of this
//! table are written to WAL without the copy that decoding reads, as PostgreSQL does it for tables
//! that it rewrites. So a row survives a crash and reaches physical standbys, and no plugin sees
//! it.
//!
//! A row is never updated: an UPDATE would be decoded. Another string gets another row.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::catalog::query;
use braid_postgres::encoding;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, Cell};

/// An expression for the connection string of a row `s` that has a `connection_id`. Null if the row
/// of `braid.connection` is gone.
pub const DSN: &str =
    "(select c.dsn from braid.connection c where c.connection_id = s.connection_id)";

/// The error for a subscription whose connection string is gone: 55000.
#[must_use]
pub fn missing(subscription: &str) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("subscription \"{subscription}\" has no connection string"),
    )
    .with_hint("Give it one with braid.alter_subscription(subscription_name, dsn => ...).")
}

/// Stores a connection string. Returns its `connection_id`.
///
/// Runs with the rights of the extension's owner, in a transaction.
///
/// # Errors
/// [`PgError`] if the table does not exist.
pub fn store(dsn: &str) -> Result<String, PgError> {
    let table = own_table("connection")?;
    let next = query(
        "select nextval(pg_catalog.pg_get_serial_sequence('braid.connection', 'connection_id'))",
        &[],
    );
    let id = next.get(0, 0).unwrap_or_default().to_owned();
    let number: i64 = id.parse().unwrap_or(0);
    let text = encoding::statement(dsn);
    table_scan::insert_undecoded(table, [Cell::Bigint(number), Cell::Text(&text)]);
    Ok(id)
}

/// Deletes the strings that neither a node nor a subscription nor a slot that is to be dropped
/// refers to.
///
/// Runs with the rights of the extension's owner, in a transaction that has moved its references.
pub fn forget_unused() {
    query(
        "delete from braid.connection c \
          where not exists (select from braid.node n where n.connection_id = c.connection_id) \
            and not exists (select from braid.subscription s where s.connection_id = c.connection_id) \
            and not exists (select from braid.slot_cleanup s where s.connection_id = c.connection_id) \
            and not exists (select from braid.group_member m where c.connection_id in (m.connection_id, m.moved_from))",
        &[],
    );
}
