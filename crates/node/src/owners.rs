//! The roles that own subscriptions, as PostgreSQL's shared dependencies know them, so that DROP
//! ROLE refuses to drop one. Run by sessions that create, change or drop subscriptions, and by the
//! manager when it starts.
//!
//! Invariant: the dependencies are those of privileges on `braid.subscription`, which nobody is
//! granted. PostgreSQL removes them with the table.

use braid_postgres::catalog::query;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use pgrx::pg_sys;

fn roles(sql: &str, table: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    let found = query(sql, &[Some(&table.to_u32().to_string())]);
    found
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse::<u32>().ok())
        .map(pg_sys::Oid::from)
        .collect()
}

/// Copies OIDs to memory of PostgreSQL's. Returns how many there are, and where; null for none.
///
/// # Safety
/// The memory belongs to the current memory context.
unsafe fn allocated(roles: &[pg_sys::Oid]) -> (i32, *mut pg_sys::Oid) {
    if roles.is_empty() {
        return (0, std::ptr::null_mut());
    }
    // SAFETY: as many bytes are allocated as are written.
    unsafe {
        let copy = pg_sys::palloc(size_of_val(roles)).cast::<pg_sys::Oid>();
        std::ptr::copy_nonoverlapping(roles.as_ptr(), copy, roles.len());
        (i32::try_from(roles.len()).unwrap_or(0), copy)
    }
}

/// Makes the dependencies those that the subscriptions of this database have, as this transaction
/// sees them.
///
/// # Errors
/// 42P01 when the extension's table is missing. Raises 42704 for a role that is being dropped.
pub fn tie() -> Result<(), PgError> {
    let table = own_table("subscription")?;
    let before = roles(
        "select refobjid from pg_catalog.pg_shdepend where dbid = (select oid from pg_catalog.pg_database where datname = current_database()) \
            and classid = 'pg_catalog.pg_class'::regclass and objid = $1::oid and objsubid = 0 and deptype = 'a' \
            and refclassid = 'pg_catalog.pg_authid'::regclass order by 1",
        table,
    );
    let after = roles(
        "select distinct r.oid from braid.subscription s join pg_catalog.pg_roles r on r.oid = s.subscription_owner::oid \
          where r.oid <> (select relowner from pg_catalog.pg_class where oid = $1::oid) order by 1",
        table,
    );
    if before == after {
        return Ok(());
    }
    // SAFETY: in a transaction; both arrays are sorted, free of duplicates, palloc'd and as long as
    // is said: PostgreSQL frees them. No role's OID is the invalid one, which stands for the
    // table's owner.
    unsafe {
        let (olds, before) = allocated(&before);
        let (news, after) = allocated(&after);
        pg_sys::updateAclDependencies(
            pg_sys::RelationRelationId,
            table,
            0,
            pg_sys::InvalidOid,
            olds,
            before,
            news,
            after,
        );
    }
    Ok(())
}

/// Whether a role exists. In a transaction.
#[must_use]
pub fn exists(role: u32) -> bool {
    !query(
        "select 1 from pg_catalog.pg_roles where oid = $1::oid",
        &[Some(&role.to_string())],
    )
    .is_empty()
}
