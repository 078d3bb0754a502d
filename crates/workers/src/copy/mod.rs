//! The initial copy: every table of a subscription as it was at one position of the provider's WAL,
//! from which on its changes are applied.
//!
//! The leader has a [`Coordinator`], which starts one worker a table; [`worker_main`] is the
//! worker's main function. A table that existed when the slot was created is copied under the
//! slot's own snapshot, for as long as the leader keeps that open. Any other table, and one that
//! has to start again after that, is copied under a snapshot that its worker takes, at a later
//! position.
//!
//! Invariants: a table's rows, its state `ready` and the position of the snapshot are one commit,
//! so a copy happens exactly once, whichever process dies. Two workers never copy the same table:
//! each holds a lock for it. A copy's commit carries the origin `COPIED`, so its rows are neither
//! forwarded nor taken for local changes.
//!
//! Not for: changes of rows. Appliers leave out the changes of transactions before a table's
//! position, and hold back those that arrive while it is not ready.

mod blocked;
mod coordinator;
mod feed;
mod held;
mod load;
mod record;
pub(crate) mod source;
mod versions;
mod worker;

pub use coordinator::{Coordinator, Progress, Readiness};
pub use worker::worker_main;

use braid_bgworker::policy::{self, Policy};
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::lock::Advisory;
use braid_postgres::process;

/// The worker's exported function.
pub const WORKER_FUNCTION: &str = "braid_copy_main";
/// Shown as `backend_type` of the worker.
pub const WORKER_KIND: &str = "braid copy";

// PostgreSQL's own advisory locks have 1 and 2 in this field (src/backend/utils/adt/lockfuncs.c).
const LOCK_CLASS: u16 = 0xb41d;

/// Take the lock that stands for the copy of a table, without waiting: until this process ends, or
/// until its transaction does. False when another process has it.
fn try_lock(subscription: u32, relation: u32, for_session: bool) -> bool {
    Advisory {
        database: process::my_database(),
        key: (subscription, relation),
        class: LOCK_CLASS,
    }
    .try_take(for_session)
}

/// Whether a table has no rows, and whether none of its keys finds them. Until the transaction
/// ends, nobody else writes to the table.
///
/// # Errors
/// 42P01 when it was dropped, 42809 when it is not a table, 55P03 when its lock is not to be had in
/// time.
pub(crate) fn look_into(relation: u32) -> Result<(bool, bool), PgError> {
    let target = load::Target::lock(relation, load::Purpose::CheckEmpty)?;
    Ok((target.is_empty()?, target.is_keyless()?))
}

/// Whether other nodes, or sources, send changes besides a subscription.
///
/// # Errors
/// Those of reading the catalog.
pub(crate) fn others_write(subscription: u32) -> Result<bool, PgError> {
    versions::others_write(subscription)
}

/// Whether a copy that failed like this fails again. With `disable_on_error`, a person wants to see
/// everything but lost connections.
fn is_permanent(error: &PgError, disable_on_error: bool) -> bool {
    let sqlstate = error.sqlstate;
    let (here, there) = (policy::for_apply(sqlstate), policy::for_provider(sqlstate));
    // A message that arrived malformed was sent malformed.
    if sqlstate == SqlState::ProtocolViolation {
        return true;
    }
    let connection = here == Policy::Reconnect || there == Policy::Reconnect;
    !connection && (here != Policy::Retry || disable_on_error)
}
