//! Timestamps, as PostgreSQL counts them: microseconds since 2000-01-01 UTC (`TimestampTz`).

/// Microseconds from 1970-01-01 to 2000-01-01, PostgreSQL's epoch.
pub const EPOCH_DIFFERENCE: i64 = 946_684_800_000_000;
