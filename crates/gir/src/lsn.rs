//! WAL positions as text.

/// Parses a position in PostgreSQL's text form, `X/Y`: two hexadecimal numbers of up to eight
/// digits.
#[must_use]
pub fn parse_lsn(text: &str) -> Option<u64> {
    let (high, low) = text.split_once('/')?;
    let half = |text: &str| {
        let digits = (1..=8).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_hexdigit());
        u32::from_str_radix(text, 16).ok().filter(|_| digits)
    };
    Some(u64::from(half(high)?) << 32 | u64::from(half(low)?))
}

/// Returns a position in PostgreSQL's text form.
#[must_use]
pub fn lsn_text(lsn: u64) -> String {
    format!("{:X}/{:X}", lsn >> 32, lsn & 0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::{lsn_text, parse_lsn};

    #[test]
    fn positions() {
        assert_eq!(parse_lsn("0/0"), Some(0));
        assert_eq!(parse_lsn("FFFFFFFF/ffffffff"), Some(u64::MAX));
        assert_eq!(lsn_text(0x1_0000_00f0), "1/F0");
        for text in [
            "",
            "/",
            "1",
            "1/",
            "/1",
            "1/2/3",
            "100000000/0",
            "+1/0",
            "g/0",
        ] {
            assert_eq!(parse_lsn(text), None, "{text}");
        }
    }
}
