//! Encodes JSON values.

const HEX: &[u8; 16] = b"0123456789abcdef";

/// Appends a JSON string, with quotes. Bytes above 0x7f are copied, in any encoding.
pub fn push_string(out: &mut Vec<u8>, text: &[u8]) {
    out.reserve(text.len() + 2);
    out.push(b'"');
    let mut rest = text;
    loop {
        let plain = plain_prefix(rest);
        let Some((head, tail)) = rest.split_at_checked(plain) else {
            break;
        };
        out.extend_from_slice(head);
        let Some((special, after)) = tail.split_first() else {
            break;
        };
        push_escape(out, *special);
        rest = after;
    }
    out.push(b'"');
}

/// Returns how many bytes at the start need no escape. Eight are checked at a time.
#[inline]
fn plain_prefix(text: &[u8]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let zero_bytes = |word: u64| word.wrapping_sub(ONES) & !word & HIGH;
    let (words, tail) = text.as_chunks::<8>();
    for (index, word) in words.iter().enumerate() {
        let word = u64::from_ne_bytes(*word);
        // A byte below 0x20 has none of its three upper bits.
        let control = zero_bytes(word & (ONES * 0xe0));
        let quote = zero_bytes(word ^ (ONES * 0x22));
        let backslash = zero_bytes(word ^ (ONES * 0x5c));
        if control | quote | backslash != 0 {
            let rest = text.get(index * 8..).unwrap_or_default();
            return index * 8 + plain_bytes(rest);
        }
    }
    words.len() * 8 + plain_bytes(tail)
}

#[inline]
fn plain_bytes(text: &[u8]) -> usize {
    text.iter()
        .position(|byte| *byte < 0x20 || *byte == b'"' || *byte == b'\\')
        .unwrap_or(text.len())
}

fn push_escape(out: &mut Vec<u8>, byte: u8) {
    let letter = match byte {
        b'"' | b'\\' => byte,
        0x08 => b'b',
        b'\t' => b't',
        b'\n' => b'n',
        0x0c => b'f',
        b'\r' => b'r',
        _ => {
            out.extend_from_slice(b"\\u00");
            out.extend_from_slice(&hex_pair(byte));
            return;
        }
    };
    out.extend_from_slice(&[b'\\', letter]);
}

#[inline]
fn hex_pair(byte: u8) -> [u8; 2] {
    let digit = |nibble: u8| HEX.get(usize::from(nibble)).copied().unwrap_or(b'0');
    [digit(byte >> 4), digit(byte & 15)]
}

/// Appends the name of a type in the form of `format_type`. wal2json uses a quoted identifier as a
/// JSON string as it is. If that would not be valid JSON (a schema before or after it, a quote or a
/// backslash in it), this function escapes it.
pub(super) fn push_type_name(out: &mut Vec<u8>, name: &[u8]) {
    match name {
        [b'"', inner @ .., b'"'] if plain_prefix(inner) == inner.len() => {
            out.extend_from_slice(name);
        }
        _ => push_string(out, name),
    }
}

/// Appends bytes as hexadecimal digits in quotes.
pub fn push_hex(out: &mut Vec<u8>, bytes: &[u8]) {
    out.reserve(bytes.len() * 2 + 2);
    out.push(b'"');
    out.extend(bytes.iter().flat_map(|byte| hex_pair(*byte)));
    out.push(b'"');
}

/// Appends the digits of an integer.
#[inline]
pub fn push_integer(out: &mut Vec<u8>, value: i64) {
    if value < 0 {
        out.push(b'-');
    }
    push_unsigned(out, value.unsigned_abs());
}

/// Appends the digits of an unsigned integer.
#[inline]
pub fn push_unsigned(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0_u8; 20];
    let mut used = 0;
    for slot in digits.iter_mut().rev() {
        let [digit, ..] = (value % 10).to_le_bytes();
        *slot = b'0' + digit;
        value /= 10;
        used += 1;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(digits.get(20 - used..).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(text: &[u8]) -> String {
        let mut out = Vec::new();
        push_string(&mut out, text);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn strings() {
        assert_eq!(string(b""), "\"\"");
        assert_eq!(string("a\u{7f}é/'".as_bytes()), "\"a\u{7f}é/'\"");
        assert_eq!(
            string(b"\x08\t\n\x0c\r\x01\x1f\"\\"),
            r#""\b\t\n\f\r\u0001\u001f\"\\""#
        );
    }

    #[test]
    fn a_special_byte_at_every_place() {
        for len in 0..40_usize {
            let plain = vec![b'x'; len];
            assert_eq!(plain_prefix(&plain), len);
            for place in 0..len {
                for special in
                    (0..=255_u8).filter(|byte| *byte < 0x20 || *byte == b'"' || *byte == b'\\')
                {
                    let mut text = plain.clone();
                    text[place] = special;
                    assert_eq!(plain_prefix(&text), place);
                }
                for other in [0x20, 0x7f, 0x80, 0xa2, 0xdc, 0xff, b'!', b'#', b'[', b']'] {
                    let mut text = plain.clone();
                    text[place] = other;
                    assert_eq!(plain_prefix(&text), len);
                }
            }
        }
    }

    #[test]
    fn numbers() {
        for value in [
            0,
            1,
            9,
            10,
            99,
            100,
            101,
            12345,
            -1,
            -10,
            i64::MAX,
            i64::MIN,
            1_000_000_000,
        ] {
            let mut out = Vec::new();
            push_integer(&mut out, value);
            assert_eq!(String::from_utf8(out).unwrap(), value.to_string());
        }
        let mut out = Vec::new();
        push_unsigned(&mut out, u64::MAX);
        assert_eq!(String::from_utf8(out).unwrap(), u64::MAX.to_string());
    }

    #[test]
    fn type_names() {
        for (name, expected) in [
            ("integer", "\"integer\""),
            ("\"char\"", "\"char\""),
            ("\"Odd type\"", "\"Odd type\""),
            ("\"char\"[]", r#""\"char\"[]""#),
            (r#""s 1".plain"#, r#""\"s 1\".plain""#),
            (r#""a"."b""#, r#""\"a\".\"b\"""#),
            (r#""B\s""#, r#""\"B\\s\"""#),
            ("\"", r#""\"""#),
        ] {
            let mut out = Vec::new();
            push_type_name(&mut out, name.as_bytes());
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn hex() {
        let mut out = Vec::new();
        push_hex(&mut out, &[0, 0xff, 0x5c]);
        assert_eq!(out, b"\"00ff5c\"");
    }
}
