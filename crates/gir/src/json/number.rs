//! Parses numbers that JSON numbers cannot hold from their decimal digits: decimals in
//! `numeric_send` form, integers of any width.

use crate::value::Decimal;

/// Most digits before the point in numeric (`NUMERIC_WEIGHT_MAX` + 1, times four digits).
const MAX_WHOLE_DIGITS: usize = 131_072;
/// Bytes of the widest integer that is written as digits, since the conversion takes quadratic
/// time.
const MAX_INTEGER_BYTES: usize = 1024;

/// Returns the number in `numeric_send` form, as PostgreSQL would send it: no zero digits at either
/// end.
pub(super) fn decimal_from_text(text: &str) -> Option<Vec<u8>> {
    let special = match text {
        "NaN" => Some((0xC000_u16, 0_u16)),
        // PostgreSQL sends 32 as the scale of an infinity.
        "Infinity" => Some((0xD000, 32)),
        "-Infinity" => Some((0xF000, 32)),
        _ => None,
    };
    if let Some((sign, scale)) = special {
        return Some(fields(0, sign, scale, &[]));
    }
    let (negative, plain) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = match plain.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => return None,
        None => (plain, ""),
    };
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    let scale = u16::try_from(fraction.len())
        .ok()
        .filter(|scale| *scale <= Decimal::MAX_SCALE)?;
    let whole = whole.trim_start_matches('0');
    if whole.len() > MAX_WHOLE_DIGITS {
        return None;
    }
    let mut digits = Vec::with_capacity(whole.len() / 4 + fraction.len() / 4 + 2);
    // The first group has the whole digits that do not fill the others; the last group is filled up
    // with zeros.
    let (head, tail) = whole.split_at_checked(whole.len() % 4)?;
    if !head.is_empty() {
        digits.push(head.parse::<u16>().ok()?);
    }
    groups(tail, &mut digits)?;
    let groups_before = digits.len();
    groups(fraction, &mut digits)?;
    let leading = digits.iter().take_while(|digit| **digit == 0).count();
    let used = digits.iter().rposition(|digit| *digit != 0).map(|i| i + 1);
    let Some(used) = used else {
        return Some(fields(0, 0x0000, scale, &[]));
    };
    let weight = i64::try_from(groups_before).ok()? - 1 - i64::try_from(leading).ok()?;
    let sign = if negative { 0x4000 } else { 0x0000 };
    Some(fields(
        i16::try_from(weight).ok()?,
        sign,
        scale,
        digits.get(leading..used)?,
    ))
}

/// Appends groups of four digits each, the last one filled up with zeros.
fn groups(text: &str, out: &mut Vec<u16>) -> Option<()> {
    for chunk in text.as_bytes().chunks(4) {
        let mut group = 0_u16;
        for place in 0..4 {
            let digit = chunk.get(place).map_or(0, |byte| byte.wrapping_sub(b'0'));
            group = group.checked_mul(10)?.checked_add(u16::from(digit))?;
        }
        out.push(group);
    }
    Some(())
}

fn fields(weight: i16, sign: u16, scale: u16, digits: &[u16]) -> Vec<u8> {
    let count = u16::try_from(digits.len()).unwrap_or(u16::MAX);
    [count, weight.cast_unsigned(), sign, scale]
        .iter()
        .chain(digits)
        .flat_map(|field| field.to_be_bytes())
        .collect()
}

/// Returns whether parsing the number's digits yields exactly these bytes.
pub(super) fn is_plain_decimal(decimal: &Decimal<'_>) -> bool {
    let (fields, _) = decimal.as_bytes().as_chunks::<2>();
    let [_, weight, sign, scale, digits @ ..] = fields else {
        return false;
    };
    let number = |raw: &[u8; 2]| u16::from_be_bytes(*raw);
    let (weight, scale) = (i64::from(i16::from_be_bytes(*weight)), number(scale));
    match number(sign) {
        0xC000 => return (weight, scale) == (0, 0),
        0xD000 | 0xF000 => return (weight, scale) == (0, 32),
        _ => {}
    }
    let (Some(first), Some(last)) = (digits.first(), digits.last()) else {
        return weight == 0 && number(sign) == 0;
    };
    let last = number(last);
    if number(first) == 0 || last == 0 {
        return false;
    }
    // Decimal places that the stored digits require.
    let groups = i64::try_from(digits.len()).unwrap_or(i64::MAX) - 1 - weight;
    let spare = [1000, 100, 10]
        .iter()
        .position(|unit| last % unit == 0)
        .map_or(0, |at| 3 - i64::try_from(at).unwrap_or(3));
    groups * 4 - spare <= i64::from(scale)
}

/// Returns whether parsing the integer's digits yields exactly these bytes, and they are not too
/// many.
pub(super) fn is_plain_integer(bytes: &[u8]) -> bool {
    is_shortest(bytes) && bytes.len() <= MAX_INTEGER_BYTES
}

/// Returns whether the last byte is needed for the value or its sign.
fn is_shortest(bytes: &[u8]) -> bool {
    match bytes {
        [] => true,
        [last] => *last != 0,
        [.., before, last] => !matches!((*last, before & 0x80), (0, 0) | (0xff, 0x80)),
    }
}

/// Returns the shortest two's complement, lowest byte first; no bytes for zero.
pub(super) fn integer_from_text(text: &str) -> Option<Vec<u8>> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    // 2.41 digits a byte.
    let too_many = digits.len() > MAX_INTEGER_BYTES * 5 / 2;
    if digits.is_empty() || too_many || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let mut limbs: Vec<u32> = Vec::with_capacity(digits.len() / 9 + 1);
    for chunk in digits.as_bytes().chunks(9) {
        let mut factor = 1_u64;
        let mut carry = 0_u64;
        for byte in chunk {
            factor *= 10;
            carry = carry * 10 + u64::from(byte.wrapping_sub(b'0'));
        }
        for limb in &mut limbs {
            let product = u64::from(*limb) * factor + carry;
            *limb = u32::try_from(product & 0xffff_ffff).ok()?;
            carry = product >> 32;
        }
        if carry > 0 {
            limbs.push(u32::try_from(carry).ok()?);
        }
    }
    let mut bytes: Vec<u8> = limbs.iter().flat_map(|limb| limb.to_le_bytes()).collect();
    if negative {
        let mut carry = true;
        for byte in &mut bytes {
            (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
        }
    }
    // Append a sign byte, then remove redundant ones.
    let is_zero = bytes.iter().all(|byte| *byte == 0);
    bytes.push(if negative && !is_zero { 0xff } else { 0 });
    while !is_shortest(&bytes) {
        bytes.pop();
    }
    (bytes.len() <= MAX_INTEGER_BYTES).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;

    fn digits(text: &str) -> Option<String> {
        let bytes = decimal_from_text(text)?;
        let decimal = Decimal::new(&bytes).unwrap();
        assert!(is_plain_decimal(&decimal), "{text}");
        Some(decimal.to_text())
    }

    #[test]
    fn decimals_keep_their_digits() {
        for text in [
            "0",
            "0.00",
            "1",
            "-1",
            "10000",
            "12345.67",
            "-0.0001",
            "0.00001",
            "99990000",
            "1.10",
            "123456789012345678901234567890.000000000001000",
            "NaN",
            "Infinity",
            "-Infinity",
        ] {
            assert_eq!(digits(text).as_deref(), Some(text));
        }
        assert_eq!(digits("-0.0").as_deref(), Some("0.0"));
        assert_eq!(digits("007").as_deref(), Some("7"));
    }

    #[test]
    fn what_is_no_decimal_is_refused() {
        let wide = "9".repeat(MAX_WHOLE_DIGITS + 1);
        let long = format!("0.{}", "0".repeat(16_384));
        for text in [
            "", "-", ".5", "5.", "1e5", "+1", " 1", "1.2.3", "nan", "--1", &wide, &long,
        ] {
            assert_eq!(decimal_from_text(text), None, "{text:.20}");
        }
        assert!(decimal_from_text(&"9".repeat(MAX_WHOLE_DIGITS)).is_some());
    }

    #[test]
    fn the_example_of_the_protocol() {
        let bytes = [0, 3, 0, 1, 0x40, 0, 0, 2, 0, 1, 9, 0x29, 0x1a, 0x2c];
        assert_eq!(decimal_from_text("-12345.67").as_deref(), Some(&bytes[..]));
    }

    #[test]
    fn integers_have_one_form() {
        for (text, bytes) in [
            ("0", &[][..]),
            ("1", &[1]),
            ("-1", &[0xff]),
            ("127", &[0x7f]),
            ("128", &[0x80, 0]),
            ("-128", &[0x80]),
            ("-129", &[0x7f, 0xff]),
            ("255", &[0xff, 0]),
            ("256", &[0, 1]),
            ("-256", &[0, 0xff]),
            ("18446744073709551616", &[0, 0, 0, 0, 0, 0, 0, 0, 1]),
        ] {
            assert_eq!(integer_from_text(text).as_deref(), Some(bytes), "{text}");
            assert!(is_plain_integer(bytes), "{text}");
            let back = Value::BigInteger(bytes).to_text().unwrap();
            assert_eq!(back.as_ref(), text.as_bytes());
        }
        for bytes in [&[0][..], &[1, 0], &[0xff, 0xff], &[0; 9]] {
            assert!(!is_plain_integer(bytes));
        }
        assert_eq!(integer_from_text("-0").as_deref(), Some(&[][..]));
        assert_eq!(integer_from_text("1x"), None);
        assert_eq!(integer_from_text(&"9".repeat(4000)), None);
    }
}
