//! Lists in option values: members are separated by commas, with spaces around them; a backslash
//! escapes the next character.

/// Returns whether C's `isspace` accepts the byte. Unlike `u8::is_ascii_whitespace`, it accepts the
/// vertical tab (0x0b).
pub(super) const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | 0x0b | 0x0c | b'\r')
}

/// Returns the members of a list, with their backslashes. `None` for an invalid list: with an empty
/// member, or with two words in one.
pub(super) fn split(list: &str) -> Option<Vec<&str>> {
    let members = split_loosely(list)?;
    let whole = members.iter().all(|member| !member.is_empty());
    whole.then_some(members)
}

/// Returns the members of a list like [`split`], but members may be empty.
pub(super) fn split_loosely(list: &str) -> Option<Vec<&str>> {
    let bytes = list.as_bytes();
    let skip_space = |mut at: usize| {
        while bytes.get(at).copied().is_some_and(is_space) {
            at += 1;
        }
        at
    };
    let mut members = Vec::new();
    let mut at = skip_space(0);
    if at == bytes.len() {
        return Some(members);
    }
    loop {
        let start = at;
        while let Some(byte) = bytes.get(at).copied() {
            match byte {
                b'\\' => at += 2,
                b',' => break,
                _ if is_space(byte) => break,
                _ => at += 1,
            }
        }
        // A backslash at the very end escapes nothing. After one before a character of several
        // bytes the loop is in step again: no continuation byte is a comma, a space or a backslash.
        at = at.min(bytes.len());
        members.push(list.get(start..at)?);
        at = skip_space(at);
        match bytes.get(at) {
            None => return Some(members),
            Some(b',') => at = skip_space(at + 1),
            Some(_) => return None,
        }
    }
}

/// Returns the position of the first `wanted` without a backslash before it.
pub(super) fn find_unescaped(text: &str, wanted: u8) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let found = !escaped && byte == wanted;
        escaped = !escaped && byte == b'\\';
        found
    })
}

/// Returns the text without its backslashes, except those that another one escapes.
pub(super) fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => plain.extend(characters.next()),
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(split("").unwrap(), Vec::<&str>::new());
        assert_eq!(split(" \t\n").unwrap(), Vec::<&str>::new());
        assert_eq!(split("a").unwrap(), ["a"]);
        assert_eq!(split(" a , b\t,\nc ").unwrap(), ["a", "b", "c"]);
        assert_eq!(split("\x0ba\x0b,\x0cb\r").unwrap(), ["a", "b"]);
        assert_eq!(split("a\u{a0}b").unwrap(), ["a\u{a0}b"]);
        assert_eq!(split(r"a\,b,c\ d").unwrap(), [r"a\,b", r"c\ d"]);
        assert_eq!(split(r"a\").unwrap(), [r"a\"]);
        assert_eq!(split(r"\é,é").unwrap(), [r"\é", "é"]);
        for wrong in [",", "a,", ",a", "a,,b", "a b", "a, ,b"] {
            assert_eq!(split(wrong), None, "{wrong}");
        }
        assert_eq!(split_loosely(" a,, b,").unwrap(), ["a", "", "b", ""]);
        assert_eq!(split_loosely("a b"), None);
    }

    #[test]
    fn escapes() {
        assert_eq!(find_unescaped("a.b.c", b'.'), Some(1));
        assert_eq!(find_unescaped(r"a\.b.c", b'.'), Some(4));
        assert_eq!(find_unescaped(r"a\\.b", b'.'), Some(3));
        assert_eq!(find_unescaped(r"a\.b", b'.'), None);
        assert_eq!(unescape(r"a\.b\\c\"), r"a.b\c");
    }
}
