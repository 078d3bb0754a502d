//! Whether this database may act as the node that its catalog names. Run by every process that
//! would act for the node: manager, leader, cleanup, and the output plugin.
//!
//! A copy of a node has the node's catalog: subscriptions, slots' names, the node's identity. A
//! node after `pg_upgrade` has it too, but not its replication origins, nor its commit timestamps.
//! The SQL function `braid.node_standing` decides, and gives a hint; this module calls it.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::error::PgError;
use braid_postgres::{plain, snapshot};
use pgrx::pg_sys;

use crate::subscription::rows;

/// Whether this database has the extension. In a transaction.
#[must_use]
pub fn has_extension() -> bool {
    let oid = plain::get_extension_oid(c"braid", true);
    oid != pg_sys::InvalidOid
}

/// Why this database must not act as its node; `None` where it may, and where it is no node. In a
/// transaction with a snapshot, in a database that has the extension.
///
/// # Errors
/// Those of SPI.
pub fn refusal() -> Result<Option<PgError>, PgError> {
    let found = rows(
        "select message, detail, hint from braid.node_standing() where not holds",
        &[],
    )?;
    let Some(row) = found.into_iter().next() else {
        return Ok(None);
    };
    let [message, detail, hint] = <[Option<String>; 3]>::try_from(row).unwrap_or_default();
    let mut refusal = PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        message.unwrap_or_default(),
    );
    refusal.detail = detail;
    refusal.hint = hint;
    Ok(Some(refusal))
}

/// Raise [`refusal`], for a stream that would speak for the node. In a transaction.
///
/// # Errors
/// 55000, or whatever SPI says.
pub fn require() -> Result<(), PgError> {
    if !has_extension() {
        return Ok(());
    }
    let refusal = snapshot::of_transaction(|| with_rights(Rights::ExtensionOwner, refusal))?;
    refusal.map_or(Ok(()), Err)
}
