//! Timestamps, as PostgreSQL counts them: microseconds since 2000-01-01 UTC (`TimestampTz`).

use std::ffi::CString;

use crate::plain;

/// Microseconds from 1970-01-01 to 2000-01-01, PostgreSQL's epoch.
pub const EPOCH_DIFFERENCE: i64 = 946_684_800_000_000;

/// Now, as TimestampTz (microseconds since 2000).
#[must_use]
pub fn now() -> i64 {
    plain::GetCurrentTimestamp()
}

/// A time as PostgreSQL's messages show it, in the session's time zone.
#[must_use]
pub fn text(time: i64) -> CString {
    plain::timestamptz_to_str(time).unwrap_or_default()
}

/// Nanoseconds of a clock that all processes of a server share, and that never steps back.
#[must_use]
pub fn monotonic_nanoseconds() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

/// Microseconds of a clock that never steps back, and goes on while the machine sleeps or is
/// suspended. For promises to other machines, such as leases.
#[must_use]
pub fn sleepless_microseconds() -> u64 {
    #[cfg(target_os = "linux")]
    let clock = libc::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    let clock = libc::CLOCK_MONOTONIC;
    nanoseconds(clock) / 1000
}

fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to `time`; these clocks always exist.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}
