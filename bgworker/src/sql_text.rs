//! Values and names in SQL.

/// Quote an SQL string literal.
#[must_use]
pub fn quote_literal(value: &str) -> String {
    let escape = if value.contains('\\') { " E" } else { "" };
    format!(
        "{escape}'{}'",
        value.replace('\\', "\\\\").replace('\'', "''")
    )
}

/// Quote a value in a replication command, where a backslash is one: the grammar of these knows no `E''`.
#[must_use]
pub fn quote_option(value: &str) -> String {
    format!("'{}'", value.replace('\'', "''"))
}

/// Quote an SQL identifier.
#[must_use]
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_for_who_reads_them() {
        assert_eq!(quote_literal("it's"), "'it''s'");
        assert_eq!(quote_literal("a\\b"), " E'a\\\\b'");
        assert_eq!(quote_option("it's"), "'it''s'");
        assert_eq!(quote_option("a\\b"), "'a\\b'");
        assert_eq!(quote_identifier("a\"b\\"), "\"a\"\"b\\\"");
    }
}
