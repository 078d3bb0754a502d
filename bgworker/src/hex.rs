//! Bytes as pairs of hexadecimal digits, for SQL and for text columns.

use std::fmt::Write;

/// Returns the bytes as lower-case digits, two for each.
#[must_use]
pub fn encode(bytes: &[u8]) -> String {
    let mut digits = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a String does not fail.
        let _ = write!(digits, "{byte:02x}");
    }
    digits
}

/// Returns the bytes of pairs of digits; `None` if there is any other character.
#[must_use]
pub fn decode(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let pair = |[high, low]: &[u8; 2]| u8::try_from(digit(*high)? * 16 + digit(*low)?).ok();
    rest.is_empty().then(|| pairs.iter().map(pair).collect())?
}

#[cfg(test)]
mod tests {
    use super::{decode, encode};
    use proptest::prelude::*;

    #[test]
    fn other_text_is_no_bytes() {
        for text in ["0", "0g", "+1", "0x", " 1", "é"] {
            assert_eq!(decode(text), None, "{text}");
        }
        assert_eq!(decode("00Ff"), Some(vec![0, 255]));
    }

    proptest! {
        #[test]
        fn digits_are_read_back(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(decode(&encode(&bytes)), Some(bytes));
        }
    }
}
