//! Converts PostgreSQL's dates and timestamps, which count from 2000-01-01, into GIR values, which
//! count from 1970-01-01.

use braid_gir::{DateTime, DateTimeKind, Value};

/// Days from 1970-01-01 to 2000-01-01.
const EPOCH_DAYS: i32 = 10_957;
/// Microseconds of a day.
const DAY: i64 = 86_400_000_000;
/// Microseconds from 1970-01-01 to 2000-01-01.
const EPOCH_MICROS: i64 = EPOCH_DAYS as i64 * DAY;

/// Returns the microseconds since 1970-01-01 UTC of a finite `TimestampTz`.
#[must_use]
pub fn to_unix_micros(timestamp: i64) -> i64 {
    timestamp.saturating_add(EPOCH_MICROS)
}

fn infinite(kind: DateTimeKind, offset: Option<i32>) -> DateTime {
    DateTime {
        kind,
        days: 0,
        micros: 0,
        offset,
    }
}

/// Converts a `timestamptz`. A finite one is an instant. The infinities and the last thirty years
/// of PostgreSQL's range are no instants (microseconds since 1970 end in the year 294247), so they
/// become calendar values at offset 0.
#[must_use]
pub fn timestamptz_to_value(timestamp: i64) -> Value<'static> {
    if timestamp != i64::MAX
        && timestamp != i64::MIN
        && let Some(micros) = timestamp.checked_add(EPOCH_MICROS)
    {
        return Value::UnixTimestamp(micros);
    }
    Value::DateTime(DateTime {
        offset: Some(0),
        ..timestamp_to_datetime(timestamp)
    })
}

/// Converts a `timestamp`, which has no offset.
#[must_use]
pub fn timestamp_to_datetime(timestamp: i64) -> DateTime {
    match timestamp {
        i64::MAX => infinite(DateTimeKind::Infinity, None),
        i64::MIN => infinite(DateTimeKind::MinusInfinity, None),
        finite => DateTime {
            kind: DateTimeKind::Finite,
            // 2^63 microseconds are 106,751,991 days: no day number of a timestamp leaves i32.
            days: i32::try_from(finite.div_euclid(DAY)).unwrap_or(i32::MAX - EPOCH_DAYS)
                + EPOCH_DAYS,
            micros: finite.rem_euclid(DAY),
            offset: None,
        },
    }
}

/// Converts a `date` to midnight without offset.
#[must_use]
pub fn date_to_datetime(date: i32) -> DateTime {
    match date {
        i32::MAX => infinite(DateTimeKind::Infinity, None),
        i32::MIN => infinite(DateTimeKind::MinusInfinity, None),
        finite => DateTime {
            kind: DateTimeKind::Finite,
            days: finite.saturating_add(EPOCH_DAYS),
            micros: 0,
            offset: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs() {
        assert_eq!(to_unix_micros(0), 946_684_800_000_000);
        assert_eq!(date_to_datetime(-10_957).days, 0);
        let before = timestamp_to_datetime(-1);
        assert_eq!((before.days, before.micros), (10_956, 86_399_999_999));
    }

    #[test]
    fn infinities_are_not_instants() {
        assert_eq!(
            timestamptz_to_value(i64::MAX),
            Value::DateTime(DateTime {
                kind: DateTimeKind::Infinity,
                days: 0,
                micros: 0,
                offset: Some(0)
            })
        );
        assert_eq!(
            timestamp_to_datetime(i64::MIN).kind,
            DateTimeKind::MinusInfinity
        );
        assert_eq!(date_to_datetime(i32::MIN).kind, DateTimeKind::MinusInfinity);
        assert_eq!(date_to_datetime(i32::MAX).offset, None);
    }
}
