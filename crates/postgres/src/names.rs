//! Relations by their names, in the catalog of this process's database. Run in a transaction.

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::error::PgError;
use crate::{encoding, syscache};

/// OID of a relation by name; `None` when it does not exist.
///
/// # Errors
/// 08P01 for a name that is none.
pub fn find_table(namespace: &str, name: &str) -> Result<Option<pg_sys::Oid>, PgError> {
    if namespace.contains('\0') || name.contains('\0') {
        return Err(PgError::new(
            SqlState::ProtocolViolation,
            "name from the provider has a zero byte",
        ));
    }
    let (Some(namespace), Some(name)) = (encoding::name_here(namespace), encoding::name_here(name))
    else {
        return Ok(None);
    };
    let schema = syscache::namespace(&namespace);
    Ok(schema.and_then(|schema| syscache::relation_named(&name, schema)))
}

/// OID of a table, or an index, of the extension's own.
///
/// # Errors
/// 42P01 when it does not exist: the library is newer than the extension.
pub fn own_table(name: &str) -> Result<pg_sys::Oid, PgError> {
    find_table("braid", name)?.ok_or_else(|| {
        PgError::new(
            SqlState::UndefinedTable,
            format!("braid.{name} does not exist"),
        )
        .with_hint("Update the extension with ALTER EXTENSION braid UPDATE.")
    })
}
