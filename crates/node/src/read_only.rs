//! A member of a group that takes no writes of users. Run by every session of a server that has the
//! library preloaded.
//!
//! The group agrees which members these are (`crates/group`). A member stores it in shared memory
//! ([`registry::READ_ONLY`]). If it is not stored yet since the server started, the session that
//! runs the first statement looks it up. Each statement of a session on such a member first makes
//! its transaction a read-only one, so that PostgreSQL itself refuses writes, with its own errors.
//! Temporary tables can be written to, and not created, as in any such transaction.
//!
//! Braid's own processes and functions still write: [`allowing`]. So do sessions that apply changes
//! of another node, under a replication origin.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::{PgError, pass_on};
use braid_postgres::hook::Explanation;
use braid_postgres::{compat, names, plain, process, syscache, transaction, worker};

use crate::ddl::owners_query;
use crate::registry;

thread_local! {
    /// How many tasks of Braid's own, one inside of the other, this session is in.
    static ALLOWED: Cell<u32> = const { Cell::new(0) };
}

/// Whether users may not write to this database, as its group has agreed.
fn is_refused() -> bool {
    ALLOWED.get() == 0 && !worker::is_worker() && compat::session_origin() == 0 && is_read_only()
}

/// Whether the group has agreed that this database takes no writes of users.
fn is_read_only() -> bool {
    let known = registry::my_manager().map_or(0, |entry| entry.membership.load(Ordering::Acquire));
    if known != 0 {
        return known == registry::READ_ONLY;
    }
    // A statement without a snapshot reads no table and writes to none.
    plain::IsTransactionState() && plain::ActiveSnapshotSet() && look_up() == registry::READ_ONLY
}

/// Looks up and stores what a manager stores at its first look. Raises PostgreSQL's errors, as
/// PostgreSQL does.
#[pgrx::pg_guard]
extern "C-unwind" fn look_up() -> u32 {
    struct Looking;
    impl Drop for Looking {
        fn drop(&mut self) {
            ALLOWED.set(ALLOWED.get().saturating_sub(1));
        }
    }
    pass_on(|| {
        // The names are in the catalog's cache: other databases have no more to do than this. An
        // extension that is yet to be updated knows nothing of it.
        let Ok(Some(members)) = names::find_table("braid", "group_member") else {
            return registry::NO_MEMBER;
        };
        if syscache::column_number(members, c"read_only") == 0 {
            return registry::NO_MEMBER;
        }
        ALLOWED.set(ALLOWED.get() + 1);
        let _looking = Looking;
        let found = owners_query(
            "select m.read_only from braid.group_self s left join braid.group_member m using (member_id)",
            &[],
        );
        let membership = if found.is_empty() {
            registry::NO_MEMBER
        } else if found.get(0, 0) == Some("t") {
            registry::READ_ONLY
        } else {
            registry::MEMBER
        };
        if let Some(entry) = registry::manager(process::my_database()) {
            let noted = entry.membership.compare_exchange(
                0,
                membership,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            return noted.map_or_else(|noted| noted, |_| membership);
        }
        membership
    })
}

/// Checks that users may write to this database.
///
/// # Errors
/// 25006 if its group has agreed that they may not.
pub fn check() -> Result<(), PgError> {
    if !is_read_only() {
        return Ok(());
    }
    Err(PgError::new(
        SqlState::ReadOnlySqlTransaction,
        "this node takes no writes of users",
    )
    .with_hint(HINT.to_string_lossy()))
}

/// Does Braid's own work, which may write.
pub fn allowing<T>(work: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            ALLOWED.set(ALLOWED.get().saturating_sub(1));
            transaction::set_read_only(self.0);
        }
    }
    if !is_refused() {
        return work();
    }
    ALLOWED.set(ALLOWED.get() + 1);
    let _before = Before(plain::XactReadOnly());
    transaction::set_read_only(false);
    work()
}

const HINT: &std::ffi::CStr =
    c"This node of a group is read only: see braid.group_nodes. A superuser lets it take writes with braid.set_read_only(false).";

static EXPLANATION: Explanation = Explanation {
    sqlstate: SqlState::ReadOnlySqlTransaction,
    hint: HINT,
};

/// A statement begins: makes its transaction a read-only one, if it has to be. Returns how its
/// errors are explained then. Errors of this function are raised behind a guard.
pub(crate) fn statement_begins() -> Option<&'static Explanation> {
    if !is_refused() {
        return None;
    }
    transaction::set_read_only(true);
    Some(&EXPLANATION)
}
