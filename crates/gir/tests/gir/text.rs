//! Values as text, against what PostgreSQL 15 and 18 print (ISO dates, time zone UTC).

use std::borrow::Cow;

use braid_gir::{DateTime, DateTimeKind, Decimal, Value};
use proptest::prelude::*;

use crate::model::{config, decimal_bytes, value};

fn text(value: &Value<'_>) -> String {
    String::from_utf8(value.to_text().unwrap().into_owned()).unwrap()
}

#[test]
fn doubles_look_as_in_postgres() {
    let known: [(f64, &str); 20] = [
        (0.0, "0"),
        (-0.0, "-0"),
        (1.0, "1"),
        (0.1, "0.1"),
        (0.1 + 0.2, "0.30000000000000004"),
        (-1.5, "-1.5"),
        (1e14, "100000000000000"),
        (123_456_789_012_345.0, "123456789012345"),
        (1e15, "1e+15"),
        (1_234_567_890_123_456.0, "1.234567890123456e+15"),
        (0.0001, "0.0001"),
        (0.000_012_5, "1.25e-05"),
        (1e-7, "1e-07"),
        (1e100, "1e+100"),
        (-1.234e-200, "-1.234e-200"),
        (f64::MAX, "1.7976931348623157e+308"),
        (5e-324, "5e-324"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "Infinity"),
        (f64::NEG_INFINITY, "-Infinity"),
    ];
    for (value, expected) in known {
        assert_eq!(text(&Value::Double(value)), expected);
    }
    assert_eq!(text(&Value::Double(-f64::NAN)), "NaN");
}

#[test]
fn singles_look_as_in_postgres() {
    let known: [(f32, &str); 11] = [
        (0.1, "0.1"),
        (-0.0, "-0"),
        (123_456.0, "123456"),
        (1e6, "1e+06"),
        (1_234_567.0, "1.234567e+06"),
        (0.0001, "0.0001"),
        (1e-5, "1e-05"),
        (f32::MAX, "3.4028235e+38"),
        (f32::NAN, "NaN"),
        (f32::INFINITY, "Infinity"),
        (f32::NEG_INFINITY, "-Infinity"),
    ];
    for (value, expected) in known {
        assert_eq!(text(&Value::Single(value)), expected);
    }
}

#[test]
fn decimals_look_as_numeric_out_writes_them() {
    // Digits as numeric_send gives them for the literal on the right.
    let known: [(i16, u16, u16, &[u16], &str); 17] = [
        (0, 0, 0, &[], "0"),
        (0, 0, 3, &[], "0.000"),
        (0, 0, 0, &[1], "1"),
        (0, 0x4000, 2, &[1, 5000], "-1.50"),
        (0, 0, 10, &[1, 5000], "1.5000000000"),
        (1, 0, 0, &[1], "10000"),
        (1, 0, 4, &[12, 3456, 7890], "123456.7890"),
        (-1, 0, 1, &[1000], "0.1"),
        (-1, 0, 4, &[1], "0.0001"),
        (-2, 0, 8, &[1], "0.00000001"),
        (-2, 0x4000, 7, &[1230], "-0.0000123"),
        (2, 0, 0, &[1], "100000000"),
        (
            4,
            0,
            2,
            &[12, 3456, 0, 7890, 1234, 5600],
            "123456000078901234.56",
        ),
        (0, 0xC000, 0, &[], "NaN"),
        (0, 0xD000, 32, &[], "Infinity"),
        (0, 0xF000, 32, &[], "-Infinity"),
        (3, 0, 1, &[5], "5000000000000.0"),
    ];
    for (weight, sign, scale, digits, expected) in known {
        let bytes = decimal_bytes(weight, sign, scale, digits);
        assert_eq!(Decimal::new(&bytes).unwrap().to_text(), expected);
    }
}

#[test]
fn decimals_that_postgres_would_tidy_up_are_tidied_up() {
    // numeric_recv strips zero digits, cuts at the scale and knows no minus zero.
    let known: [(i16, u16, u16, &[u16], &str); 4] = [
        (2, 0, 0, &[0, 0, 7], "7"),
        (0, 0x4000, 1, &[0, 0], "0.0"),
        (0, 0, 1, &[1, 2345], "1.2"),
        (0, 0x4000, 0, &[0, 9999], "0"),
    ];
    for (weight, sign, scale, digits, expected) in known {
        let bytes = decimal_bytes(weight, sign, scale, digits);
        assert_eq!(Decimal::new(&bytes).unwrap().to_text(), expected);
    }
}

#[test]
fn the_extremes_of_decimals_are_bounded() {
    let widest = decimal_bytes(i16::MAX, 0, Decimal::MAX_SCALE, &[9999]);
    assert_eq!(
        Decimal::new(&widest).unwrap().to_text().len(),
        131_072 + 1 + 16_383
    );
    let finest = decimal_bytes(i16::MIN, 0, Decimal::MAX_SCALE, &[9999]);
    let text = Decimal::new(&finest).unwrap().to_text();
    assert_eq!(text.len(), 2 + 16_383);
    assert!(text.trim_matches('0') == ".");
}

/// Sign, digits without zeros at either end, and the place of the first one.
fn number(text: &str) -> (bool, String, i64) {
    let (minus, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let leading = digits.len() - digits.trim_start_matches('0').len();
    let place = i64::try_from(whole.len()).unwrap() - i64::try_from(leading).unwrap();
    let digits = digits.trim_matches('0').to_owned();
    if digits.is_empty() {
        return (minus, digits, 0);
    }
    (minus, digits, place + exponent.parse::<i64>().unwrap())
}

#[test]
fn decimals_that_are_mostly_zeros_have_a_short_text() {
    let known: [(i16, u16, u16, &[u16], &str); 9] = [
        (500, 0, 0, &[1], "1e+2000"),
        (500, 0x4000, 0, &[12, 3400], "-1.234e+2001"),
        (i16::MAX, 0, Decimal::MAX_SCALE, &[9999], "9.999e+131071"),
        (-4096, 0, Decimal::MAX_SCALE, &[10], "1e-16383"),
        (i16::MIN, 0, Decimal::MAX_SCALE, &[9999], "0e-16383"),
        (0, 0x4000, Decimal::MAX_SCALE, &[], "0e-16383"),
        (0, 0, Decimal::MAX_SCALE, &[15, 5000], "1.55e+1"),
        (500, 0, 0, &[0, 7], "7e+1996"),
        (-1, 0, 2, &[1234], "1.2e-1"),
    ];
    for (weight, sign, scale, digits, expected) in known {
        let bytes = decimal_bytes(weight, sign, scale, digits);
        let decimal = Decimal::new(&bytes).unwrap();
        assert_eq!(decimal.to_scientific_text(), expected);
        assert_eq!(decimal.has_short_text(), scale == 2, "{expected}");
    }
    // Text that is about as long as the digits, or short in any case.
    let dense = decimal_bytes(4_999, 0, 0, &[1_234; 5_000]);
    assert!(Decimal::new(&dense).unwrap().has_short_text());
    let short = decimal_bytes(250, 0, 0, &[123]);
    assert!(Decimal::new(&short).unwrap().has_short_text());
    for sign in [0xC000, 0xD000, 0xF000] {
        let special = decimal_bytes(0, sign, 0, &[]);
        let special = Decimal::new(&special).unwrap();
        assert!(special.has_short_text());
        assert_eq!(special.to_scientific_text(), special.to_text());
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn both_texts_of_a_decimal_are_the_same_number(
        weight in prop_oneof![-5_i16..5, any::<i16>()],
        sign in prop::sample::select(vec![0_u16, 0x4000]),
        scale in prop_oneof![0_u16..12, 0..=Decimal::MAX_SCALE],
        digits in prop::collection::vec(prop_oneof![0_u16..10_000, Just(0)], 0..6),
    ) {
        let bytes = decimal_bytes(weight, sign, scale, &digits);
        let decimal = Decimal::new(&bytes).unwrap();
        let (plain, short) = (decimal.to_text(), decimal.to_scientific_text());
        prop_assert!(short.len() <= 2 * bytes.len() + 20);
        if decimal.has_short_text() {
            prop_assert!(plain.len() <= 1024.max(4 * bytes.len()));
        }
        prop_assert_eq!(number(&plain), number(&short), "{}", short);
    }
}

#[test]
fn integers_of_any_width() {
    assert_eq!(text(&Value::Integer(i64::MIN)), "-9223372036854775808");
    assert_eq!(text(&Value::Integer(i64::MAX)), "9223372036854775807");
    let known: [(&[u8], &str); 12] = [
        (&[], "0"),
        (&[0, 0, 0], "0"),
        (&[0xff], "-1"),
        (&[0xff; 40], "-1"),
        (&[0x7f], "127"),
        (&[0x80], "-128"),
        (&[0x80, 0], "128"),
        (&[0, 0, 0, 0, 0xff], "-4294967296"),
        (&[0, 0, 0, 0, 1], "4294967296"),
        (&[0, 0, 0, 0, 0, 0, 0, 0, 1], "18446744073709551616"),
        (&[0, 0, 0, 0, 0, 0, 0, 0x80, 0xff], "-9223372036854775808"),
        (&[0, 0xca, 0x9a, 0x3b], "1000000000"),
    ];
    for (bytes, expected) in known {
        assert_eq!(text(&Value::BigInteger(bytes)), expected, "{bytes:?}");
    }
}

#[test]
fn an_integer_too_wide_for_numeric_has_no_text() {
    let mut bytes = vec![0x55; 54_428];
    assert_eq!(Value::BigInteger(&bytes).to_text(), None);
    // Bytes that only repeat the sign don't count, however many a peer sends.
    bytes.fill(0);
    bytes[0] = 5;
    assert_eq!(text(&Value::BigInteger(&bytes)), "5");
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn wide_integers_agree_with_128_bit_arithmetic(value in any::<i128>(), shift in 0_u32..128) {
        let value = value >> shift;
        prop_assert_eq!(text(&Value::BigInteger(&value.to_le_bytes())), value.to_string());
    }

    #[test]
    fn floats_read_back_as_the_same_bits(double in any::<u64>(), single in any::<u32>()) {
        let (double, single) = (f64::from_bits(double), f32::from_bits(single));
        if double.is_finite() {
            let read: f64 = text(&Value::Double(double)).parse().unwrap();
            prop_assert_eq!(read.to_bits(), double.to_bits());
        }
        if single.is_finite() {
            let read: f32 = text(&Value::Single(single)).parse().unwrap();
            prop_assert_eq!(read.to_bits(), single.to_bits());
        }
    }

    #[test]
    fn every_value_has_text_or_is_known_to_have_none(value in value()) {
        let borrowed = value.borrow();
        let none = matches!(borrowed, Value::Null | Value::None | Value::Binary(_));
        match borrowed.to_text() {
            None => prop_assert!(none),
            Some(Cow::Borrowed(_)) => {
                prop_assert!(matches!(borrowed, Value::String(_) | Value::BinaryText(_)));
            }
            Some(Cow::Owned(text)) => prop_assert!(!none && text.is_ascii() && !text.is_empty()),
        }
    }
}

#[test]
fn strings_are_their_own_text() {
    for bytes in [&b""[..], b"x", b"\xff\xfe"] {
        assert_eq!(Value::String(bytes).to_text(), Some(Cow::Borrowed(bytes)));
        assert_eq!(
            Value::BinaryText(bytes).to_text(),
            Some(Cow::Borrowed(bytes))
        );
    }
}

#[test]
fn unix_timestamps_are_iso_in_utc() {
    let known = [
        (0, "1970-01-01 00:00:00+00"),
        (-1, "1969-12-31 23:59:59.999999+00"),
        (1_709_209_800_500_000, "2024-02-29 12:30:00.5+00"),
        (946_684_800_000_000, "2000-01-01 00:00:00+00"),
        (-62_135_596_800_000_000, "0001-01-01 00:00:00+00"),
        (-62_135_596_800_000_001, "0001-12-31 23:59:59.999999+00 BC"),
        (253_402_300_800_000_000, "10000-01-01 00:00:00+00"),
        (i64::MAX, "294247-01-10 04:00:54.775807+00"),
        (i64::MIN, "290309-12-21 19:59:05.224192+00 BC"),
    ];
    for (micros, expected) in known {
        assert_eq!(text(&Value::UnixTimestamp(micros)), expected);
    }
}

fn finite(days: i32, micros: i64, offset: Option<i32>) -> DateTime {
    DateTime {
        kind: DateTimeKind::Finite,
        days,
        micros,
        offset,
    }
}

#[test]
fn dates_and_times_are_iso() {
    let noon = 43_200_000_000;
    let known = [
        (finite(0, 0, None), "1970-01-01 00:00:00"),
        (
            finite(19_782, noon + 1_800_500_000, None),
            "2024-02-29 12:30:00.5",
        ),
        (
            finite(19_782, noon + 1, Some(19_800)),
            "2024-02-29 12:00:00.000001+05:30",
        ),
        (finite(0, noon, Some(-10_800)), "1970-01-01 12:00:00-03"),
        (finite(0, noon, Some(-1_800)), "1970-01-01 12:00:00-00:30"),
        (finite(0, noon, Some(3_625)), "1970-01-01 12:00:00+01:00:25"),
        (finite(-735_160, 0, None), "0044-03-15 00:00:00 BC"),
        (finite(-735_160, 0, Some(0)), "0044-03-15 00:00:00+00 BC"),
        (finite(106_751_991, 0, None), "294247-01-10 00:00:00"),
        (finite(0, DateTime::MAX_MICROS, None), "1970-01-01 24:00:00"),
    ];
    for (value, expected) in known {
        assert_eq!(text(&Value::DateTime(value)), expected);
    }
    for offset in [None, Some(0)] {
        let value = DateTime {
            kind: DateTimeKind::Infinity,
            days: 0,
            micros: 0,
            offset,
        };
        assert_eq!(
            (value.to_text().as_str(), value.date_text().as_str()),
            ("infinity", "infinity")
        );
        assert_eq!(value.time_text(), None);
        let value = DateTime {
            kind: DateTimeKind::MinusInfinity,
            ..value
        };
        assert_eq!(value.to_text(), "-infinity");
        assert_eq!(value.date_text(), "-infinity");
        assert_eq!(value.time_text(), None);
    }
}

#[test]
fn date_and_time_of_day_alone() {
    assert_eq!(finite(19_782, 1, Some(0)).date_text(), "2024-02-29");
    assert_eq!(finite(-719_163, 0, None).date_text(), "0001-12-31 BC");
    assert_eq!(finite(-719_162, 0, None).date_text(), "0001-01-01");
    assert_eq!(finite(-2_440_588, 0, None).date_text(), "4714-11-24 BC");
    assert_eq!(finite(2_145_042_905, 0, None).date_text(), "5874897-12-31");
    assert_eq!(finite(0, 1_000, None).time_text().unwrap(), "00:00:00.001");
    assert_eq!(
        finite(0, 86_399_999_999, Some(-43_200))
            .time_text()
            .unwrap(),
        "23:59:59.999999-12"
    );
    assert_eq!(
        finite(0, DateTime::MAX_MICROS, None).time_text().unwrap(),
        "24:00:00"
    );
}
