//! Timestamps, as PostgreSQL counts them: microseconds since 2000-01-01 UTC (`TimestampTz`).

use pgrx::pg_sys;

/// Microseconds from 1970-01-01 to 2000-01-01, PostgreSQL's epoch.
pub const EPOCH_DIFFERENCE: i64 = 946_684_800_000_000;

/// Now, as TimestampTz (microseconds since 2000).
#[must_use]
pub fn now() -> i64 {
    // SAFETY: reads the clock.
    unsafe { pg_sys::GetCurrentTimestamp() }
}
