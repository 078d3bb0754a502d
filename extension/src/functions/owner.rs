//! Working with another role's rights for the rest of a transaction: reading a table as its owner,
//! for another node that copies or compares it, and calling code that another role has written.

use std::cell::Cell;
use std::sync::Once;

use braid_postgres::acting_role::ActingRole;
use braid_postgres::catalog::{is_superuser, owner_of};
use braid_postgres::transaction::{self, End};
use braid_postgres::{plain, table_rights};
use pgrx::prelude::PgSqlErrorCode;
use pgrx::{pg_extern, pg_sys};

use super::failure::Failure;

thread_local! {
    /// The role before the first call in the transaction.
    static BEFORE: Cell<Option<ActingRole>> = const { Cell::new(None) };
}
static AT_END: Once = Once::new();

/// braid.read_as_owner("relation" oid) returns boolean
///
/// Has the rest of the transaction, or of the savepoint until it is rolled back, run with the
/// rights of a table's owner, confined to these. Planning a query of a table runs code of its
/// owner, who could take the rights of the role that connects. Returns false, and changes nothing,
/// if that role has no more rights than the owner, or if policies bind it.
#[pg_extern(sql = false)]
fn read_as_owner(relation: pg_sys::Oid) -> bool {
    match as_owner(relation) {
        Ok(confined) => confined,
        Err(failure) => failure.raise(),
    }
}

fn as_owner(relation: pg_sys::Oid) -> Result<bool, Failure> {
    let caller = ActingRole::now();
    let role = caller.role;
    if !(is_superuser(role) || plain::has_rolreplication(role)) || caller.is_restricted() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            "a table is read as its owner only by roles that connect for replication",
        )
        .hint("Give the role in the connection string the REPLICATION attribute."));
    }
    // Then the owner's code can only read.
    if !transaction::is_read_only() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
            "a table is read as its owner only in a read-only transaction",
        )
        .hint("Begin it with BEGIN READ ONLY."));
    }
    let Some(owner) = owner_of(relation) else {
        return Ok(false);
    };
    if owner == role || is_superuser(owner) || !table_rights::may_read_all(role, relation) {
        return Ok(false);
    }
    become_confined(caller, owner);
    Ok(true)
}

/// braid.confine("role" oid) returns boolean
///
/// Has a superuser's transaction, or the part that a block of PL/pgSQL rolls back, run with the
/// rights of another role, confined to these: code of that role is about to be called. Returns
/// false, and changes nothing, for other roles, which have no such rights to lose.
#[pg_extern(sql = false)]
fn confine(role: pg_sys::Oid) -> bool {
    let caller = ActingRole::now();
    if !is_superuser(caller.role) || caller.is_restricted() || is_superuser(role) {
        return false;
    }
    become_confined(caller, role);
    true
}

fn become_confined(caller: ActingRole, role: pg_sys::Oid) {
    AT_END.call_once(|| transaction::on_end(forget));
    if BEFORE.get().is_none() {
        BEFORE.set(Some(caller));
    }
    caller.confined(role).take();
}

/// A rollback has put the role back by now; a commit does not.
fn forget(end: End) {
    match end {
        End::BeforeCommit | End::BeforePrepare => {}
        End::RolledBack => BEFORE.set(None),
        End::Committed | End::Prepared => {
            if let Some(before) = BEFORE.take() {
                before.take();
            }
        }
    }
}
