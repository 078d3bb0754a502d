//! Relations by their names, in the catalog of this process's database. Run in a transaction.

use pgrx::pg_sys;

use crate::encoding;
use crate::error::PgError;

/// OID of a relation by name; `None` when it does not exist.
///
/// # Errors
/// 08P01 for a name that is none.
pub fn find_table(namespace: &str, name: &str) -> Result<Option<pg_sys::Oid>, PgError> {
    if namespace.contains('\0') || name.contains('\0') {
        return Err(PgError::new(
            "08P01",
            "name from the provider has a zero byte",
        ));
    }
    let (Some(namespace), Some(name)) = (encoding::name_here(namespace), encoding::name_here(name))
    else {
        return Ok(None);
    };
    // SAFETY: catalog look-ups in a transaction with NUL-terminated names.
    unsafe {
        let schema = pg_sys::get_namespace_oid(namespace.as_ptr(), true);
        if schema == pg_sys::InvalidOid {
            return Ok(None);
        }
        let oid = pg_sys::get_relname_relid(name.as_ptr(), schema);
        Ok((oid != pg_sys::InvalidOid).then_some(oid))
    }
}

/// OID of a table, or an index, of the extension's own.
///
/// # Errors
/// 42P01 when it does not exist: the library is newer than the extension.
pub fn own_table(name: &str) -> Result<pg_sys::Oid, PgError> {
    find_table("braid", name)?.ok_or_else(|| {
        PgError::new("42P01", format!("braid.{name} does not exist"))
            .with_hint("Update the extension with ALTER EXTENSION braid UPDATE.")
    })
}
