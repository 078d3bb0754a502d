//! Counter of relcache invalidations: cached data about a table, and about the route to it, is
//! valid for one generation. Run by the processes that apply changes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use braid_postgres::relation;
use pgrx::pg_sys;

/// Raised by each relcache invalidation.
static GENERATION: AtomicU64 = AtomicU64::new(1);
static REGISTERED: AtomicBool = AtomicBool::new(false);

fn on_invalidation(_relation: pg_sys::Oid) {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Counts invalidations from here on.
pub(super) fn register() {
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        relation::on_invalidation(on_invalidation);
    }
}

/// Returns the present generation.
pub(super) fn now() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// Whether nothing was invalidated since this generation.
pub(super) fn is_current(generation: u64) -> bool {
    generation == now()
}

/// Begins another generation, as if there had been an invalidation.
pub(super) fn begin() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
