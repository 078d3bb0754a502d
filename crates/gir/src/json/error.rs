//! What can be wrong with text that claims to be gir-json.

/// Where and what: every error says at which byte, and in which member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}, at byte {offset}{}", place(.path))]
pub struct JsonError {
    /// Bytes before the place, from the start of the text that was given.
    pub offset: usize,
    /// The place as a JSON pointer (RFC 6901), for example `/after/price`; empty for the text as a
    /// whole.
    pub path: String,
    /// What is wrong there.
    pub kind: JsonErrorKind,
}

fn place(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        format!(" ({path})")
    }
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonErrorKind {
    /// The text is not JSON: what should have been there.
    #[error("{0} expected")]
    Expected(&'static str),
    /// The text is not UTF-8.
    #[error("text is not valid UTF-8")]
    NotUtf8,
    /// A string has an escape that JSON does not have, or half of a surrogate pair.
    #[error("malformed escape in a string")]
    BadEscape,
    /// Objects or arrays in each other, deeper than any record needs.
    #[error("nested too deeply")]
    TooDeep,
    /// The value has another JSON type than this place takes.
    #[error("{0} expected here")]
    WrongType(&'static str),
    /// A member that has to be there is not.
    #[error("member \"{0}\" is missing")]
    Missing(&'static str),
    /// A member that this version does not know, or a column that the schema does not have.
    #[error("unknown member \"{0}\"")]
    UnknownMember(String),
    /// A member is there twice.
    #[error("member \"{0}\" is there twice")]
    Twice(String),
    /// A word out of a fixed list is another one.
    #[error("unknown {what} \"{found}\"")]
    UnknownWord {
        /// Of what.
        what: &'static str,
        /// The word.
        found: String,
    },
    /// Text that is not in the form of what it should be.
    #[error("malformed {0}")]
    Malformed(&'static str),
    /// A number or a time outside its range.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
    /// A schema is referred to that was not there.
    #[error("schema {0} was not announced")]
    UnknownSchema(u32),
    /// A schema number stands for something else than before.
    #[error("schema {0} is not the one that was announced under this number")]
    OtherSchema(u32),
    /// A record in a place where it has no business: the stream's order is broken.
    #[error("{0}")]
    OutOfOrder(&'static str),
    /// The object is of a stream with transactions that have not committed, where only others are
    /// taken.
    #[error("transactions that have not committed are not taken here")]
    Uncommitted,
    /// The record can't be written in the binary form.
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

    /// The same error, seen from the object or array around it.
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
