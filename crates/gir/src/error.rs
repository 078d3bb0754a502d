//! Errors in bytes that should be GIR.

/// Result of reading GIR.
pub type Result<T> = std::result::Result<T, Error>;

/// Reason why bytes are not valid GIR. A record is accepted or refused as a whole;
/// [`crate::Reader::position`] tells which record it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The input ends inside an item.
    #[error("record ends inside {0}")]
    Truncated(&'static str),
    /// A record has bytes left after its last item.
    #[error("{count} bytes left over after {what}")]
    TrailingBytes {
        /// The item that was complete.
        what: &'static str,
        /// Bytes that were left.
        count: usize,
    },
    /// A record, value or enum tag that this version does not know.
    #[error("unknown {what} tag 0x{tag:02x}")]
    UnknownTag {
        /// The kind of tag.
        what: &'static str,
        /// The byte that was read.
        tag: u8,
    },
    /// The stream is not GIR at all.
    #[error("stream does not start with the GIR signature")]
    BadMagic,
    /// The stream has a version that this build does not read.
    #[error("unsupported GIR version {found}, this build reads version {supported}")]
    UnsupportedVersion {
        /// Version in the stream.
        found: u16,
        /// Version of this build.
        supported: u16,
    },
    /// A name is not UTF-8.
    #[error("{0} is not valid UTF-8")]
    NotUtf8(&'static str),
    /// A name has a zero byte in it, which no PostgreSQL name can have.
    #[error("{0} contains a zero byte")]
    NulInName(&'static str),
    /// A variable-length integer does not fit its type or is not in its shortest form.
    #[error("malformed variable-length integer in {0}")]
    BadVarint(&'static str),
    /// A field has a value outside its range.
    #[error("{what} has the value {value}, which is out of range")]
    OutOfRange {
        /// The field.
        what: &'static str,
        /// The value that was read.
        value: i64,
    },
    /// A value is too large for the field that counts it.
    #[error("{0} is too large for a GIR record")]
    TooLarge(&'static str),
    /// A change or truncate refers to a schema that the stream did not announce.
    #[error("schema {0} was not announced")]
    UnknownSchema(u32),
    /// An image has another number of columns than its schema.
    #[error("image has {found} columns, its schema {expected}")]
    ColumnCount {
        /// Columns of the image.
        found: u16,
        /// Columns of the schema.
        expected: usize,
    },
    /// A schema has two columns with the same name, so an image cannot be an object with a member
    /// for each.
    #[error("column name \"{0}\" is there twice")]
    RepeatedColumn(String),
}
