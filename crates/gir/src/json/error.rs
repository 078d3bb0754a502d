//! Errors in text that should be gir-json.

/// An error and its place: the byte, and the member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}, at byte {offset}{}", place(.path))]
pub struct JsonError {
    /// Bytes before the place, from the start of the given text.
    pub offset: usize,
    /// The place as a JSON pointer (RFC 6901), for example `/after/price`; empty for the text as a
    /// whole.
    pub path: String,
    /// The error at this place.
    pub kind: JsonErrorKind,
}

fn place(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        format!(" ({path})")
    }
}

/// The error without its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonErrorKind {
    /// The text is not JSON. The value names the expected text.
    #[error("{0} expected")]
    Expected(&'static str),
    /// The text is not UTF-8.
    #[error("text is not valid UTF-8")]
    NotUtf8,
    /// A string has an escape that JSON does not have, or half of a surrogate pair.
    #[error("malformed escape in a string")]
    BadEscape,
    /// Objects or arrays are nested more deeply than any record requires.
    #[error("nested too deeply")]
    TooDeep,
    /// The value does not have the JSON type that is required in this place.
    #[error("{0} expected here")]
    WrongType(&'static str),
    /// A required member is missing.
    #[error("member \"{0}\" is missing")]
    Missing(&'static str),
    /// A member is unknown to this version, or a column is not in the schema.
    #[error("unknown member \"{0}\"")]
    UnknownMember(String),
    /// A member occurs twice.
    #[error("member \"{0}\" is there twice")]
    Twice(String),
    /// A word is not one of a fixed list.
    #[error("unknown {what} \"{found}\"")]
    UnknownWord {
        /// The list that it should be from.
        what: &'static str,
        /// The word.
        found: String,
    },
    /// A text is not in the required form.
    #[error("malformed {0}")]
    Malformed(&'static str),
    /// A number or a time is outside its range.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
    /// The schema was not announced.
    #[error("schema {0} was not announced")]
    UnknownSchema(u32),
    /// A schema number was announced for another schema.
    #[error("schema {0} is not the one that was announced under this number")]
    OtherSchema(u32),
    /// A record is not allowed in its place: the stream's order is broken.
    #[error("{0}")]
    OutOfOrder(&'static str),
    /// The object belongs to a transaction that has not committed, and the reader accepts only
    /// committed ones.
    #[error("transactions that have not committed are not taken here")]
    Uncommitted,
    /// The record has no binary form.
    #[error("{0}")]
    Record(crate::Error),
}

/// Result of reading gir-json.
pub(super) type Result<T> = std::result::Result<T, JsonError>;

impl JsonError {
    pub(super) fn new(offset: usize, kind: JsonErrorKind) -> Self {
        Self {
            offset,
            path: String::new(),
            kind,
        }
    }

    /// Adds the object or array around the place to the path.
    pub(super) fn inside(mut self, member: &str) -> Self {
        let escaped = member.replace('~', "~0").replace('/', "~1");
        self.path.insert_str(0, &escaped);
        self.path.insert(0, '/');
        self
    }
}

/// Shortens `.map_err(|error| error.inside(..))`.
pub(super) trait Inside {
    /// Adds the member to the path of an error.
    fn inside(self, member: &str) -> Self;
}

impl<T> Inside for Result<T> {
    fn inside(self, member: &str) -> Self {
        self.map_err(|error| error.inside(member))
    }
}
