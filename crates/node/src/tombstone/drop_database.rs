//! DROP DATABASE: the collector's slot would forbid it, while it is in use. So the collector ends
//! first, as the other workers do with WITH (FORCE); where the database is not dropped after all,
//! the manager starts it again.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_postgres::{latch, process, worker};
use pgrx::pg_sys;

use crate::registry;

/// How long the collector is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// A database is about to be dropped.
pub(crate) fn end_collector_of(database: pg_sys::Oid) {
    end_collector(database.to_u32());
}

/// Have a database's collector end, and let go of its slot.
fn end_collector(database: u32) {
    let Some(entry) = registry::find_manager(database) else {
        return;
    };
    let pid = entry.collector_pid.load(Ordering::SeqCst);
    if pid <= 0 {
        return;
    }
    worker::terminate_pid(pid);
    let deadline = Instant::now() + PATIENCE;
    // It leaves the list of processes after it has let go of its slot.
    while process::exists(pid) && Instant::now() < deadline {
        latch::wait(Some(PAUSE));
    }
}
