//! Dates and times as text: RFC 3339 for the years 1 to 9999, and outside of them the same form
//! with a longer year or ` BC`.
//!
//! PostgreSQL's input functions accept all of these texts.

use crate::calendar::Date;
use crate::value::{DateTime, DateTimeKind};

const MICROS_PER_SECOND: i64 = 1_000_000;
const MICROS_PER_DAY: i64 = 86_400 * MICROS_PER_SECOND;

/// Returns the text of microseconds since 1970-01-01 UTC: `2024-02-29T12:30:00.5Z`.
pub(super) fn timestamp_text(micros: i64) -> String {
    let moment = DateTime {
        kind: DateTimeKind::Finite,
        days: i32::try_from(micros.div_euclid(MICROS_PER_DAY)).unwrap_or_default(),
        micros: micros.rem_euclid(MICROS_PER_DAY),
        offset: None,
    };
    let text = moment.to_text();
    match text.strip_suffix(" BC") {
        Some(text) => format!("{}Z BC", text.replacen(' ', "T", 1)),
        None => format!("{}Z", text.replacen(' ', "T", 1)),
    }
}

/// Parses the text of [`timestamp_text`].
pub(super) fn timestamp_from_text(text: &str) -> Option<i64> {
    let (text, bc) = era(text);
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let days = days(date, bc)?;
    let micros = micros(time).filter(|micros| *micros < MICROS_PER_DAY)?;
    // Midnight of the first representable day does not fit, as that day is not complete.
    i64::try_from(i128::from(days) * i128::from(MICROS_PER_DAY) + i128::from(micros)).ok()
}

/// Returns the text of a date and time: `2024-02-29T12:30:00.5` without offset,
/// `2024-02-29T12:30:00+05:30` with one; `infinity`, `-infinity`, also with an offset.
pub(super) fn date_time_text(value: &DateTime) -> String {
    let (text, bc) = match value.kind {
        DateTimeKind::Infinity => ("infinity".to_owned(), ""),
        DateTimeKind::MinusInfinity => ("-infinity".to_owned(), ""),
        DateTimeKind::Finite => {
            let local = DateTime {
                offset: None,
                ..*value
            };
            let text = local.to_text().replacen(' ', "T", 1);
            match text.strip_suffix(" BC") {
                Some(text) => (text.to_owned(), " BC"),
                None => (text, ""),
            }
        }
    };
    let Some(offset) = value.offset else {
        return text + bc;
    };
    let sign = if offset < 0 { '-' } else { '+' };
    let east = offset.unsigned_abs();
    let (hours, minutes, seconds) = (east / 3600, east / 60 % 60, east % 60);
    if seconds == 0 {
        format!("{text}{sign}{hours:02}:{minutes:02}{bc}")
    } else {
        format!("{text}{sign}{hours:02}:{minutes:02}:{seconds:02}{bc}")
    }
}

/// Parses the text of [`date_time_text`].
pub(super) fn date_time_from_text(text: &str) -> Option<DateTime> {
    for (word, kind) in [
        ("infinity", DateTimeKind::Infinity),
        ("-infinity", DateTimeKind::MinusInfinity),
    ] {
        if let Some(rest) = text.strip_prefix(word) {
            return Some(DateTime {
                kind,
                days: 0,
                micros: 0,
                offset: if rest.is_empty() {
                    None
                } else {
                    Some(offset(rest)?)
                },
            });
        }
    }
    let (text, bc) = era(text);
    let (date, time) = text.split_once('T')?;
    let (time, offset) = match time.find(['+', '-']) {
        Some(at) => (time.get(..at)?, Some(offset(time.get(at..)?)?)),
        None => match time.strip_suffix('Z') {
            Some(time) => (time, Some(0)),
            None => (time, None),
        },
    };
    Some(DateTime {
        kind: DateTimeKind::Finite,
        days: i32::try_from(days(date, bc)?).ok()?,
        micros: micros(time)?,
        offset,
    })
}

fn era(text: &str) -> (&str, bool) {
    match text.strip_suffix(" BC") {
        Some(text) => (text, true),
        None => (text, false),
    }
}

fn number(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<i64> {
    let plain = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

fn days(text: &str, bc: bool) -> Option<i64> {
    let mut parts = text.splitn(3, '-');
    let year = number(parts.next()?, 4..=7).filter(|year| *year > 0)?;
    let date = Date {
        year: if bc { 1 - year } else { year },
        month: number(parts.next()?, 2..=2)?,
        day: number(parts.next()?, 2..=2)?,
    };
    date.to_days()
}

/// Parses a time of day, up to 24:00:00, and returns its microseconds.
fn micros(text: &str) -> Option<i64> {
    let (clock, fraction) = match text.split_once('.') {
        Some((clock, fraction)) => (clock, Some(fraction)),
        None => (text, None),
    };
    let mut parts = clock.splitn(3, ':');
    let mut part = |limit: i64| number(parts.next()?, 2..=2).filter(|part| *part <= limit);
    let seconds = part(24)? * 3600 + part(59)? * 60 + part(59)?;
    let micros = match fraction {
        Some(digits) => number(digits, 1..=6)? * 10_i64.pow(u32::try_from(6 - digits.len()).ok()?),
        None => 0,
    };
    Some(seconds * MICROS_PER_SECOND + micros).filter(|micros| *micros <= DateTime::MAX_MICROS)
}

/// Parses an offset like `+05:30` or `-00:00:01`; its seconds must fit 32 bits. Returns seconds.
fn offset(text: &str) -> Option<i32> {
    let (sign, text) = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(text), _) => (1, text),
        (None, Some(text)) => (-1, text),
        (None, None) => return None,
    };
    let mut parts = text.splitn(3, ':');
    let hours = number(parts.next()?, 2..=6)?;
    let minutes = number(parts.next()?, 2..=2).filter(|minutes| *minutes < 60)?;
    let seconds = match parts.next() {
        Some(seconds) => number(seconds, 2..=2).filter(|seconds| *seconds < 60)?,
        None => 0,
    };
    i32::try_from(sign * (hours * 3600 + minutes * 60 + seconds)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps() {
        for (micros, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59.999999Z"),
            (1_709_209_800_500_000, "2024-02-29T12:30:00.5Z"),
            (i64::MAX, "294247-01-10T04:00:54.775807Z"),
            (i64::MIN, "290309-12-21T19:59:05.224192Z BC"),
        ] {
            assert_eq!(timestamp_text(micros), text);
            assert_eq!(timestamp_from_text(text), Some(micros));
        }
        for text in [
            "",
            "2024-02-29",
            "2024-02-29T12:30:00",
            "2024-02-29T12:30Z",
            "2024-02-29T24:00:00Z",
            "2023-02-29T00:00:00Z",
            "2024-13-01T00:00:00Z",
            "2024-01-00T00:00:00Z",
            "0000-01-01T00:00:00Z",
            "2024-01-01T00:60:00Z",
            "2024-01-01T00:00:00.Z",
            "2024-01-01T00:00:00.1234567Z",
            "2024-01-01T00:00:00z",
            "2024-01-01 00:00:00Z",
            "294247-01-10T04:00:54.775808Z",
            "9999999-01-01T00:00:00Z",
            "+2024-01-01T00:00:00Z",
        ] {
            assert_eq!(timestamp_from_text(text), None, "{text}");
        }
    }

    #[test]
    fn dates_and_times() {
        let finite = |days, micros, offset| DateTime {
            kind: DateTimeKind::Finite,
            days,
            micros,
            offset,
        };
        let infinite = |kind, offset| DateTime {
            kind,
            days: 0,
            micros: 0,
            offset,
        };
        for (value, text) in [
            (finite(19_782, 1, None), "2024-02-29T00:00:00.000001"),
            (
                finite(0, 86_400_000_000, Some(0)),
                "1970-01-01T24:00:00+00:00",
            ),
            (
                finite(-735_160, 0, Some(19_800)),
                "0044-03-15T00:00:00+05:30 BC",
            ),
            (
                finite(i32::MAX, 0, Some(i32::MIN)),
                "5881580-07-11T00:00:00-596523:14:08",
            ),
            (
                finite(i32::MIN, 0, Some(-1)),
                "5877642-06-23T00:00:00-00:00:01 BC",
            ),
            (infinite(DateTimeKind::Infinity, None), "infinity"),
            (
                infinite(DateTimeKind::MinusInfinity, Some(0)),
                "-infinity+00:00",
            ),
        ] {
            assert_eq!(date_time_text(&value), text);
            assert_eq!(date_time_from_text(text), Some(value), "{text}");
        }
        assert_eq!(
            date_time_from_text("1970-01-01T00:00:00Z"),
            Some(finite(0, 0, Some(0)))
        );
        for text in [
            "",
            "infinityx",
            "1970-01-01",
            "1970-01-01T24:00:01",
            "1970-01-01T00:00:00+5",
            "1970-01-01T00:00:00+05",
            "1970-01-01T00:00:00+00:60",
            "1970-01-01T00:00:00+596524:00",
        ] {
            assert_eq!(date_time_from_text(text), None, "{text}");
        }
    }
}
