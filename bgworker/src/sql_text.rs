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

/// Quote an SQL identifier.
#[must_use]
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
