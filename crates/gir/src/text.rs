//! Portable values as text that PostgreSQL's input functions accept.
//!
//! An applier uses it to write a value into a column with another type than at the source: the text
//! goes through the local type's input function. Digits and dates are ASCII, in the form of
//! PostgreSQL's own output under `DateStyle = ISO` and `TimeZone = UTC`, so they mean the same
//! under every setting.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::calendar::Date;
use crate::value::{DateTime, DateTimeKind, Decimal, Value};

const MICROS_PER_SECOND: i64 = 1_000_000;
const MICROS_PER_DAY: i64 = 86_400 * MICROS_PER_SECOND;

/// Bytes of the widest integer that numeric can hold (131072 decimal digits). For wider ones, a
/// peer could make the quadratic conversion run for any time.
const MAX_BIG_INTEGER_BYTES: usize = 54_427;

impl<'a> Value<'a> {
    /// Returns the value as text that PostgreSQL's input functions accept: digits for the numbers,
    /// ISO dates and times, a string's own bytes (in the stream's charset). `None` for values
    /// without such a text: Null, None and Binary, and an integer too wide for numeric (more than
    /// 131072 digits).
    #[must_use]
    pub fn to_text(&self) -> Option<Cow<'a, [u8]>> {
        let text = match self {
            Self::Null | Self::None | Self::Binary(_) => return None,
            Self::String(bytes) | Self::BinaryText(bytes) => return Some(Cow::Borrowed(bytes)),
            Self::Integer(value) => value.to_string(),
            Self::BigInteger(bytes) => big_integer_text(bytes)?,
            Self::Double(value) => double_text(*value),
            Self::Single(value) => single_text(*value),
            Self::Decimal(value) => value.to_text(),
            Self::UnixTimestamp(micros) => unix_timestamp_text(*micros),
            Self::DateTime(value) => value.to_text(),
        };
        Some(Cow::Owned(text.into_bytes()))
    }
}

/// Returns microseconds since 1970-01-01 UTC as an ISO date and time with offset +00.
pub(crate) fn unix_timestamp_text(micros: i64) -> String {
    let date = Date::from_days(micros.div_euclid(MICROS_PER_DAY));
    finite_text(date, micros.rem_euclid(MICROS_PER_DAY), Some(0))
}

impl DateTime {
    /// Returns date and time in the form of timestamp and timestamptz: `2024-02-29
    /// 12:30:00.5+05:30`, `0044-03-15 00:00:00 BC`, `infinity`.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self.kind {
            DateTimeKind::Infinity => "infinity".to_owned(),
            DateTimeKind::MinusInfinity => "-infinity".to_owned(),
            DateTimeKind::Finite => finite_text(
                Date::from_days(i64::from(self.days)),
                self.micros,
                self.offset,
            ),
        }
    }

    /// Returns the date alone, in the form of type date: `2024-02-29`, `0044-03-15 BC`, `infinity`.
    #[must_use]
    pub fn date_text(&self) -> String {
        if self.kind != DateTimeKind::Finite {
            return self.to_text();
        }
        let date = Date::from_days(i64::from(self.days));
        let mut text = String::new();
        push_date(&mut text, date);
        push_era(&mut text, date);
        text
    }

    /// Returns the time of day alone, with the offset if there is one, in the form of time and
    /// timetz: `12:30:00.5+05:30`. `None` for the infinities.
    #[must_use]
    pub fn time_text(&self) -> Option<String> {
        if self.kind != DateTimeKind::Finite {
            return None;
        }
        let mut text = String::new();
        push_time(&mut text, self.micros);
        push_offset(&mut text, self.offset);
        Some(text)
    }
}

fn finite_text(date: Date, micros: i64, offset: Option<i32>) -> String {
    let mut text = String::with_capacity(40);
    push_date(&mut text, date);
    text.push(' ');
    push_time(&mut text, micros);
    push_offset(&mut text, offset);
    push_era(&mut text, date);
    text
}

// Writing to a String does not fail, so the results of write! are ignored below.

fn push_date(text: &mut String, date: Date) {
    let year = if date.year > 0 {
        date.year
    } else {
        1 - date.year
    };
    let _ = write!(text, "{year:04}-{:02}-{:02}", date.month, date.day);
}

fn push_era(text: &mut String, date: Date) {
    if date.year <= 0 {
        text.push_str(" BC");
    }
}

fn push_time(text: &mut String, micros: i64) {
    let (seconds, fraction) = (micros / MICROS_PER_SECOND, micros % MICROS_PER_SECOND);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let _ = write!(text, "{hour:02}:{minute:02}:{second:02}");
    if fraction != 0 {
        let digits = format!("{fraction:06}");
        text.push('.');
        text.push_str(digits.trim_end_matches('0'));
    }
}

fn push_offset(text: &mut String, offset: Option<i32>) {
    let Some(offset) = offset else { return };
    let sign = if offset < 0 { '-' } else { '+' };
    let east = offset.unsigned_abs();
    let (hours, minutes, seconds) = (east / 3600, east / 60 % 60, east % 60);
    let _ = write!(text, "{sign}{hours:02}");
    if minutes != 0 || seconds != 0 {
        let _ = write!(text, ":{minutes:02}");
    }
    if seconds != 0 {
        let _ = write!(text, ":{seconds:02}");
    }
}

fn double_text(value: f64) -> String {
    special_float(value)
        .unwrap_or_else(|| float_text(&value.to_string(), &format!("{value:e}"), 15))
}

fn single_text(value: f32) -> String {
    special_float(f64::from(value))
        .unwrap_or_else(|| float_text(&value.to_string(), &format!("{value:e}"), 6))
}

fn special_float(value: f64) -> Option<String> {
    let text = match () {
        () if value.is_nan() => "NaN",
        () if value == f64::INFINITY => "Infinity",
        () if value == f64::NEG_INFINITY => "-Infinity",
        () => return None,
    };
    Some(text.to_owned())
}

/// Returns the shortest digits that are parsed as the same number, in PostgreSQL's layout
/// (src/common/d2s.c and f2s.c): plain for exponents from -4 up to but without `limit`, otherwise
/// with an exponent of at least two digits.
///
/// If the shortest digits lie exactly halfway between two numbers, PostgreSQL prefers longer ones
/// (9.999999999999999e+22 for 1e23), which are parsed as the same number too.
fn float_text(plain: &str, scientific: &str, limit: i32) -> String {
    let split = scientific.split_once('e');
    let Some((mantissa, Ok(exponent))) = split.map(|(m, e)| (m, e.parse::<i32>())) else {
        return plain.to_owned();
    };
    if (-4..limit).contains(&exponent) {
        return plain.to_owned();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

impl Decimal<'_> {
    /// Returns the number in the form of `numeric_out`: all decimal places of its scale, `NaN`,
    /// `Infinity`, `-Infinity`. At most some 147,500 bytes.
    #[must_use]
    pub fn to_text(&self) -> String {
        let (fields, _) = self.as_bytes().as_chunks::<2>();
        let [_, weight, sign, scale, digits @ ..] = fields else {
            return "0".to_owned();
        };
        match u16::from_be_bytes(*sign) {
            0xC000 => return "NaN".to_owned(),
            0xD000 => return "Infinity".to_owned(),
            0xF000 => return "-Infinity".to_owned(),
            _ => {}
        }
        let weight = i32::from(i16::from_be_bytes(*weight));
        let scale = usize::from(u16::from_be_bytes(*scale));
        // Digit `index` counts from the most significant stored digit; digits outside are zero.
        let digit = |index: i32| {
            let stored = usize::try_from(index)
                .ok()
                .and_then(|index| digits.get(index));
            stored.map_or(0, |raw| u16::from_be_bytes(*raw))
        };
        let mut whole = String::new();
        for index in 0..=weight {
            let _ = write!(whole, "{:04}", digit(index));
        }
        let mut fraction = String::new();
        let mut index = weight;
        while fraction.len() < scale {
            index += 1;
            let _ = write!(fraction, "{:04}", digit(index));
        }
        fraction.truncate(scale);
        let whole = whole.trim_start_matches('0');
        let zero = whole.is_empty() && fraction.bytes().all(|byte| byte == b'0');
        let minus = if u16::from_be_bytes(*sign) == 0x4000 && !zero {
            "-"
        } else {
            ""
        };
        let whole = if whole.is_empty() { "0" } else { whole };
        let point = if scale == 0 { "" } else { "." };
        format!("{minus}{whole}{point}{fraction}")
    }
}

impl Decimal<'_> {
    /// Length up to which [`Decimal::to_text`] counts as short, regardless of the value's size.
    const SHORT_TEXT: usize = 1024;

    /// Returns whether [`Decimal::to_text`] is not much longer than the value itself. Otherwise the
    /// text is mostly zeros that were not sent: ten bytes can stand for 147,000 of them, and a
    /// record can have many such values. Code that shows values of peers checks this first.
    #[must_use]
    pub fn has_short_text(&self) -> bool {
        let Some((weight, _, scale, _)) = self.finite() else {
            return true;
        };
        let whole = usize::try_from(weight + 1).unwrap_or(0) * 4;
        // Sign, a zero before the point, the point.
        let text = whole + scale + 3;
        text <= Self::SHORT_TEXT || text <= self.as_bytes().len() * 4
    }

    /// Returns the number of [`Decimal::to_text`] with an exponent instead of zeros at either end:
    /// `1.5e-70`, `-2e+1000`, `0e-16383`. At most two bytes for each of the value's, and 20.
    /// `numeric_in` accepts it, though it may show fewer decimal places.
    #[must_use]
    pub fn to_scientific_text(&self) -> String {
        let Some((weight, minus, scale, groups)) = self.finite() else {
            return self.to_text();
        };
        let mut digits = String::with_capacity(groups.len() * 4 + 20);
        for raw in groups {
            let _ = write!(digits, "{:04}", u16::from_be_bytes(*raw));
        }
        // Digits before the point, and those that the scale shows after it: further digits are not
        // part of the number.
        let places = i64::from(weight + 1) * 4;
        let shown = places + i64::try_from(scale).unwrap_or_default();
        digits.truncate(usize::try_from(shown).unwrap_or(0));
        let leading = digits.len() - digits.trim_start_matches('0').len();
        let exponent = places - 1 - i64::try_from(leading).unwrap_or_default();
        match digits.trim_matches('0').split_at_checked(1) {
            None if scale == 0 => "0".to_owned(),
            None => format!("0e-{scale}"),
            Some((first, rest)) => {
                let sign = if minus { "-" } else { "" };
                let point = if rest.is_empty() { "" } else { "." };
                format!("{sign}{first}{point}{rest}e{exponent:+}")
            }
        }
    }

    /// Returns weight, whether the number is negative, scale and digits; `None` for NaN and the
    /// infinities.
    fn finite(&self) -> Option<(i32, bool, usize, &[[u8; 2]])> {
        let (fields, _) = self.as_bytes().as_chunks::<2>();
        let [_, weight, sign, scale, digits @ ..] = fields else {
            return None;
        };
        let minus = match u16::from_be_bytes(*sign) {
            0x0000 => false,
            0x4000 => true,
            _ => return None,
        };
        let weight = i32::from(i16::from_be_bytes(*weight));
        let scale = usize::from(u16::from_be_bytes(*scale));
        Some((weight, minus, scale, digits))
    }
}

/// Returns the decimal digits of a two's complement little-endian integer, by repeated division by
/// 10^9.
fn big_integer_text(bytes: &[u8]) -> Option<String> {
    let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let filler = if negative { 0xff } else { 0 };
    // Without the bytes that only repeat the sign. For -1 no bytes are left; the filler below
    // restores it.
    let significant = bytes
        .iter()
        .rposition(|byte| *byte != filler)
        .map_or(0, |last| last + 1);
    let bytes = bytes.get(..significant)?;
    if bytes.len() > MAX_BIG_INTEGER_BYTES {
        return None;
    }
    let mut limbs: Vec<u32> = bytes
        .chunks(4)
        .map(|chunk| {
            let mut raw = [filler; 4];
            for (to, from) in raw.iter_mut().zip(chunk) {
                *to = *from;
            }
            u32::from_le_bytes(raw)
        })
        .collect();
    if negative {
        let mut carry = true;
        for limb in &mut limbs {
            (*limb, carry) = (!*limb).overflowing_add(u32::from(carry));
        }
        if carry {
            limbs.push(1);
        }
    }
    let mut groups = Vec::new();
    while let Some(top) = limbs.last() {
        if *top == 0 {
            limbs.pop();
            continue;
        }
        let mut rest = 0_u64;
        for limb in limbs.iter_mut().rev() {
            let dividend = rest << 32 | u64::from(*limb);
            // Less than 2^32, since the remainder is less than the divisor.
            *limb = u32::try_from(dividend / 1_000_000_000).ok()?;
            rest = dividend % 1_000_000_000;
        }
        groups.push(rest);
    }
    let mut text = String::from(if negative { "-" } else { "" });
    let _ = write!(text, "{}", groups.pop().unwrap_or(0));
    for group in groups.iter().rev() {
        let _ = write!(text, "{group:09}");
    }
    Some(text)
}
