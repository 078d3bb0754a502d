//! Keys and values of a history: the atoms that clients write and read.

use std::fmt;
use std::sync::Arc;

/// A key, an element of a list, or the value of a register. Takes 16 bytes; names are shared.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// `nil`: no value. Registers begin with it.
    Nil,
    /// `true` or `false`.
    Bool(bool),
    /// An integer of 64 bits.
    Integer(i64),
    /// A keyword, without its colon. [`Value::keyword`] makes only those that can be read back.
    Keyword(Arc<String>),
    /// A string.
    Text(Arc<String>),
}

impl Value {
    /// Returns the keyword `name`, or `None` if the text form could not be read back.
    #[must_use]
    pub fn keyword(name: &str) -> Option<Self> {
        (!name.is_empty() && name.chars().all(is_name))
            .then(|| Self::Keyword(Arc::new(name.to_owned())))
    }
}

/// Whether a keyword or a symbol can have this character in it.
pub(crate) fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric()
        || matches!(c, '-' | '_' | '.' | '*' | '+' | '!' | '?' | '/' | '=')
        || matches!(c, '<' | '>' | '$' | '%' | '&' | '\'' | '|')
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Integer(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(Arc::new(value.to_owned()))
    }
}

impl fmt::Display for Value {
    /// Writes the EDN text of the value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("nil"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Keyword(name) => write!(f, ":{name}"),
            Self::Text(text) => {
                f.write_str("\"")?;
                for c in text.chars() {
                    match c {
                        '"' => f.write_str("\\\"")?,
                        '\\' => f.write_str("\\\\")?,
                        '\n' => f.write_str("\\n")?,
                        '\r' => f.write_str("\\r")?,
                        '\t' => f.write_str("\\t")?,
                        c if u32::from(c) < 0x20 => write!(f, "\\u{:04x}", u32::from(c))?,
                        c => write!(f, "{c}")?,
                    }
                }
                f.write_str("\"")
            }
        }
    }
}
