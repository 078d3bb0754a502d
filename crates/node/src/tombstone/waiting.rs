//! Waiting for the collector of this database, which stores the deletions of sessions. Run by
//! appliers and copy workers.
//!
//! The collector itself is another process (`workers/collector`).

use std::ffi::CString;
use std::time::{Duration, Instant};

use braid_bgworker::slot_name;
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::{latch, process};
use pgrx::pg_sys;

use crate::registry;

/// Between two looks at how far the collector has come.
const LOOK: Duration = Duration::from_millis(2);
/// How long to wait for a collector that runs without progress: its current transaction may be
/// large.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long to wait for a collector that does not run.
const PATIENCE_WITHOUT: Duration = Duration::from_secs(10);

/// Whether the slot of this database's collector exists, and is complete.
#[must_use]
pub fn has_slot() -> bool {
    let Ok(name) = CString::new(slot_name::of_collector(process::my_database())) else {
        return false;
    };
    // SAFETY: slots are in shared memory for as long as the server runs. Another slot may take the
    // place at any moment, and that does no harm.
    unsafe {
        let slot = pg_sys::SearchNamedReplicationSlot(name.as_ptr(), true);
        !slot.is_null()
            && (*slot).data.persistency == pg_sys::ReplicationSlotPersistency::RS_PERSISTENT
    }
}

/// Waits until the collector of this database has passed a position in flushed WAL and has stored
/// its findings. Returns false if it does not get that far.
#[must_use]
pub fn wait_past(aim: u64) -> bool {
    let mut before = 0;
    let mut since = Instant::now();
    loop {
        let (lsn, runs) = registry::ask_collector();
        if lsn >= aim {
            return true;
        }
        if lsn != before {
            before = lsn;
            since = Instant::now();
        }
        let patience = if runs { PATIENCE } else { PATIENCE_WITHOUT };
        // Making its slot waits for the transaction that runs.
        if !registry::remembers_deletions() || (!runs && !has_slot()) || since.elapsed() > patience
        {
            return false;
        }
        latch::wait(Some(LOOK));
    }
}

/// The error if the collector did not get that far. The current transaction must be rolled back and
/// retried.
#[must_use]
pub fn not_yet(message: &str) -> PgError {
    PgError::new(SqlState::SerializationFailure, message)
        .with_detail("The collector of deletions, which reads it off WAL, has not come that far.")
        .with_hint("The view braid.deletions says how far it is. It needs a replication slot and a background worker.")
}
