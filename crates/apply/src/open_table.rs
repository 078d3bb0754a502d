//! Functions for other crates about a table that they have open.

use braid_postgres::error::PgError;
use braid_postgres::relation::Relation;
use pgrx::pg_sys;

use crate::key_hash::{KeyPart, identity_key};
use crate::{relation, user};

/// Checks that rows of the stream may be written to a relation, and to its partitions of any level.
///
/// # Errors
/// 42809 for anything but an ordinary or partitioned table, and if a partition is a foreign table.
pub fn check_target(table: &Relation) -> Result<(), PgError> {
    relation::check_kind(table.view())?;
    if table.is_partitioned() {
        relation::check_partitions(table.oid())?;
    }
    Ok(())
}

/// Returns the columns of the key that identifies the table's rows, in the key's order; `None` if
/// there is none.
#[must_use]
pub fn key_of(table: &Relation) -> Option<Vec<KeyPart>> {
    identity_key(table.view())
}

/// Returns whether the user whom this process works as may insert into the table, and whether
/// row-level security applies to the user.
#[must_use]
pub fn may_insert(table: &Relation) -> (bool, bool) {
    user::rights(table.oid(), pg_sys::ACL_INSERT)
}
