//! The options' selection: tables by pattern, messages by prefix.

use super::list;

/// A pattern for a name: one name, or any.
#[derive(Debug, Clone, PartialEq, Eq)]
enum NamePattern {
    Any,
    Name(String),
}

impl NamePattern {
    fn parse(text: &str) -> Self {
        if text == "*" {
            Self::Any
        } else {
            Self::Name(list::unescape(text))
        }
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Name(wanted) => wanted == name,
        }
    }
}

/// A list of tables: `schema.table`, where either may be `*`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Patterns(Vec<(NamePattern, NamePattern)>);

impl Patterns {
    /// Parses a list; `None` if it is invalid, or has a member without a schema.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let parse = |member: &str| {
            let (schema, table) = member.split_at(list::find_unescaped(member, b'.')?);
            Some((
                NamePattern::parse(schema),
                NamePattern::parse(table.get(1..)?),
            ))
        };
        let members: Option<Vec<_>> = list::split(text)?.into_iter().map(parse).collect();
        members.map(Self)
    }

    /// Adds the members of another list.
    pub fn append(&mut self, mut more: Self) {
        self.0.append(&mut more.0);
    }

    /// Returns whether a member that names this schema explicitly matches the table.
    #[must_use]
    pub fn name_schema_of(&self, schema: &str, table: &str) -> bool {
        self.0.iter().any(|(schemas, tables)| {
            *schemas != NamePattern::Any && schemas.matches(schema) && tables.matches(table)
        })
    }

    /// Returns whether the list matches a table.
    #[must_use]
    pub fn matches(&self, schema: &str, table: &str) -> bool {
        self.0
            .iter()
            .any(|(schemas, tables)| schemas.matches(schema) && tables.matches(table))
    }
}

/// A list of prefixes. wal2json compares them literally, with their backslashes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prefixes(Vec<Vec<u8>>);

impl Prefixes {
    /// Parses a list; `None` if it is invalid.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        list::split(text).map(|members| Self(members.into_iter().map(Vec::from).collect()))
    }

    /// Converts the prefixes from UTF-8 to the messages' encoding. One that this encoding cannot
    /// represent stays as it is: no message has it.
    pub(super) fn encode(&mut self, encode: impl Fn(&str) -> Option<Vec<u8>>) {
        for member in &mut self.0 {
            if let Some(there) = std::str::from_utf8(member).ok().and_then(&encode) {
                *member = there;
            }
        }
    }

    /// Adds the members of another list.
    pub fn append(&mut self, mut more: Self) {
        self.0.append(&mut more.0);
    }

    /// Returns whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a prefix is in the list.
    #[must_use]
    pub fn has(&self, prefix: &[u8]) -> bool {
        self.0.iter().any(|member| member == prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        let matches = |patterns: &str, schema, table| {
            Patterns::parse(patterns).unwrap().matches(schema, table)
        };
        assert!(matches("public.t", "public", "t"));
        assert!(matches("*.t", "s", "t"));
        assert!(matches("s.*, *.t", "s", "x"));
        assert!(matches("public.a.b", "public", "a.b"));
        assert!(matches(r"a\.b.c", "a.b", "c"));
        assert!(matches(r"s\ 1.t\,x", "s 1", "t,x"));
        assert!(matches(r"public.t\", "public", "t"));
        assert!(matches(r"public.\*", "public", "*"));
        assert!(!matches(r"public.\*", "public", "t"));
        assert!(!matches("public.t*", "public", "tt"));
        assert!(!matches("Public.t", "public", "t"));
        assert!(!matches("public.", "public", "t"));
        assert!(!matches("", "public", "t"));
        for wrong in ["t", r"public\.t", "public.t,", "public. t", "public.t,bad"] {
            assert_eq!(Patterns::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn prefixes() {
        let prefixes = Prefixes::parse(r"a, b\ c").unwrap();
        assert!(prefixes.has(b"a"));
        assert!(prefixes.has(br"b\ c"));
        assert!(!prefixes.has(b"b c"));
        assert!(Prefixes::parse(" ").unwrap().is_empty());
    }

    #[test]
    fn prefixes_in_another_encoding() {
        let mut prefixes = Prefixes::parse("é, a, 世").unwrap();
        let latin1 = |text: &str| text.chars().map(|c| u8::try_from(c).ok()).collect();
        prefixes.encode(latin1);
        assert!(prefixes.has(b"\xe9"));
        assert!(prefixes.has(b"a"));
        assert!(!prefixes.has("é".as_bytes()));
        assert!(!prefixes.has(b"?"));
        assert!(!prefixes.is_empty());
    }
}
