//! Places of records in a frame, for the errors that readers report.

use std::fmt;

use crate::record::Tag;

/// A record's place in its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Number of the record, from 1; 0 before the first.
    pub record: usize,
    /// Bytes before the record in the frame.
    pub offset: usize,
    /// First byte of the record, its tag; `None` before the first record.
    pub tag: Option<u8>,
}

impl Position {
    /// Returns the record's name in docs/PROTOCOL.md, or its tag if that is unknown.
    #[must_use]
    pub fn kind(&self) -> String {
        match self.tag {
            Some(tag) => match Tag::from_byte(tag) {
                Ok(tag) => tag.name().to_owned(),
                Err(_) => format!("tag 0x{tag:02x}"),
            },
            None => "none".to_owned(),
        }
    }

    /// Adds the position to an error.
    pub fn error<E>(self, error: E) -> Located<E> {
        Located {
            position: self,
            error,
        }
    }
}

/// Writes `record 3 (Update, at byte 120)`.
impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (record, kind, offset) = (self.record, self.kind(), self.offset);
        write!(f, "record {record} ({kind}, at byte {offset})")
    }
}

/// An error with the position of its record: [`crate::Error`], or [`crate::OrderError`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{position}: {error}")]
pub struct Located<E> {
    /// Position of the record.
    pub position: Position,
    /// The error in the record.
    pub error: E,
}
