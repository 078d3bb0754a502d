//! The rights of a role on a table. In a transaction; the table exists.

use pgrx::pg_sys;

use crate::plain;

/// Whether a role has a right (`ACL_INSERT` and so on) on a table.
#[must_use]
pub fn may(role: pg_sys::Oid, table: pg_sys::Oid, right: u32) -> bool {
    let found = plain::pg_class_aclcheck(table, role, pg_sys::AclMode::from(right));
    found == pg_sys::AclResult::ACLCHECK_OK
}

/// Whether the current role may read something of a table, or write to it.
#[must_use]
pub fn has_any(table: pg_sys::Oid, writes: bool) -> bool {
    let right = if writes {
        pg_sys::ACL_INSERT | pg_sys::ACL_UPDATE | pg_sys::ACL_DELETE | pg_sys::ACL_TRUNCATE
    } else {
        pg_sys::ACL_SELECT
    };
    let role = plain::GetUserId();
    let mode = pg_sys::AclMode::from(right);
    let any = pg_sys::AclMaskHow::ACLMASK_ANY;
    may(role, table, right)
        || plain::pg_attribute_aclcheck_all(table, role, mode, any)
            == pg_sys::AclResult::ACLCHECK_OK
}

/// Whether a role may read these columns of a table, by their numbers from 1: all of the table, or
/// each of them.
#[must_use]
pub fn may_read(role: pg_sys::Oid, table: pg_sys::Oid, columns: &[i16]) -> bool {
    let right = pg_sys::ACL_SELECT;
    let mode = pg_sys::AclMode::from(right);
    may(role, table, right)
        || columns.iter().all(|column| {
            let found = plain::pg_attribute_aclcheck(table, *column, role, mode);
            found == pg_sys::AclResult::ACLCHECK_OK
        })
}

/// Whether a role may read all rows and columns of a table.
#[must_use]
pub fn may_read_all(role: pg_sys::Oid, table: pg_sys::Oid) -> bool {
    may(role, table, pg_sys::ACL_SELECT) && !has_policies(role, table)
}

/// Whether row-level security applies to what a role does with a table.
#[must_use]
pub fn has_policies(role: pg_sys::Oid, table: pg_sys::Oid) -> bool {
    let found = plain::check_enable_rls(table, role, true);
    u32::try_from(found).ok() == Some(pg_sys::CheckEnableRlsResult::RLS_ENABLED)
}
