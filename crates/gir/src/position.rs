//! Where in a frame a record stands, for the errors that readers report.

use std::fmt;

use crate::record::Tag;

/// A record's place in its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Its number, counted from 1; 0 where none was read.
    pub record: usize,
    /// Bytes before it in the frame.
    pub offset: usize,
    /// Its first byte, which says what it is; `None` where none was read.
    pub tag: Option<u8>,
}

impl Position {
    /// What the record is, as docs/PROTOCOL.md calls it, or its tag where that is unknown.
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

    /// What is wrong there.
    pub fn error<E>(self, error: E) -> Located<E> {
        Located {
            position: self,
            error,
        }
    }
}

/// `record 3 (Update, at byte 120)`.
impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (record, kind, offset) = (self.record, self.kind(), self.offset);
        write!(f, "record {record} ({kind}, at byte {offset})")
    }
}

/// An error, and the record that it is of: [`crate::Error`], or [`crate::OrderError`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{position}: {error}")]
pub struct Located<E> {
    /// The record.
    pub position: Position,
    /// What is wrong with it.
    pub error: E,
}
