//! Bytes of everything that a member of a group keeps or sends: fixed-width big-endian numbers, and
//! runs of bytes after their length.
//!
//! Reading never panics, whatever the bytes are. Lengths are bounded before memory is taken. Not
//! for: the meaning of the values, which each type checks itself.

#![forbid(unsafe_code)]

use thiserror::Error;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Malformed {
    /// The bytes end within a value.
    #[error("{0} ends too early")]
    Truncated(&'static str),
    /// A length is above its limit.
    #[error("{what} is longer than {limit} bytes")]
    TooLong {
        /// The value's name.
        what: &'static str,
        /// The limit, in bytes.
        limit: usize,
    },
    /// A count is above its limit.
    #[error("{what} has more than {limit} items")]
    TooMany {
        /// The value's name.
        what: &'static str,
        /// The limit, in items.
        limit: usize,
    },
    /// A tag has no meaning in this version.
    #[error("{what} has the unknown tag {tag}")]
    UnknownTag {
        /// The value's name.
        what: &'static str,
        /// The tag that was read.
        tag: u64,
    },
    /// A format is newer than this version of Braid.
    #[error("{what} has format {version}, which this version of Braid does not know")]
    UnknownVersion {
        /// The value's name.
        what: &'static str,
        /// The format that was read.
        version: u8,
    },
    /// A value is outside its range.
    #[error("{0} is not valid")]
    Invalid(&'static str),
    /// Bytes are left over after the last value.
    #[error("{0} has bytes after its end")]
    Trailing(&'static str),
}

impl Malformed {
    /// The hint for the user, where there is one: a sentence.
    #[must_use]
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnknownTag { .. } | Self::UnknownVersion { .. } => {
                Some("A newer Braid wrote it. Update Braid on this node.")
            }
            _ => None,
        }
    }
}

/// Appends values to bytes.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// No bytes yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    /// One byte: 0 or 1.
    pub fn bool(&mut self, value: bool) -> &mut Self {
        self.u8(u8::from(value))
    }

    /// A number of two bytes.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A number of four bytes.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A number of eight bytes.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A number of eight bytes with a sign.
    pub fn i64(&mut self, value: i64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// The number of items that follow.
    pub fn count(&mut self, count: usize) -> &mut Self {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// A run of bytes after its length.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
        self
    }

    /// A text in UTF-8 after its length.
    pub fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    /// Bytes of a width that the reader knows.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// The bytes.
    #[must_use]
    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

/// Takes values from bytes; `what` names them in errors.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// A reader of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    /// A reader of a format that begins with its version.
    ///
    /// # Errors
    /// [`Malformed::UnknownVersion`] and [`Malformed::Truncated`].
    pub fn versioned(bytes: &'a [u8], what: &'static str, known: u8) -> Result<Self, Malformed> {
        let mut reader = Self::new(bytes, what);
        let version = reader.u8()?;
        if version == 0 || version > known {
            return Err(Malformed::UnknownVersion { what, version });
        }
        Ok(reader)
    }

    /// Bytes of a known width.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn raw(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(Malformed::Truncated(self.what))?;
        self.rest = rest;
        Ok(taken)
    }

    /// Bytes of a known width.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.raw(N)?
            .try_into()
            .map_err(|_| Malformed::Truncated(self.what))
    }

    /// One byte.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    /// One byte: 0 or 1.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed::Invalid(self.what)),
        }
    }

    /// A number of two bytes.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    /// A number of four bytes.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    /// A number of eight bytes.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A number of items, at most `limit` and never more than bytes are left.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn count(&mut self, limit: usize) -> Result<usize, Malformed> {
        let count = usize::try_from(self.u32()?).unwrap_or(usize::MAX);
        if count > limit {
            let what = self.what;
            return Err(Malformed::TooMany { what, limit });
        }
        if count > self.rest.len() {
            return Err(Malformed::Truncated(self.what));
        }
        Ok(count)
    }

    /// A run of bytes after its length, of at most `limit` bytes.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn bytes(&mut self, limit: usize) -> Result<&'a [u8], Malformed> {
        let what = self.what;
        let len = self.count(limit).map_err(|error| match error {
            Malformed::TooMany { .. } => Malformed::TooLong { what, limit },
            other => other,
        })?;
        self.raw(len)
    }

    /// A text in UTF-8 after its length, of at most `limit` bytes and without a zero byte.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn text(&mut self, limit: usize) -> Result<String, Malformed> {
        let what = self.what;
        let bytes = self.bytes(limit)?;
        match std::str::from_utf8(bytes) {
            Ok(text) if !text.contains('\0') => Ok(text.to_owned()),
            _ => Err(Malformed::Invalid(what)),
        }
    }

    /// A number of eight bytes with a sign.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn i64(&mut self) -> Result<i64, Malformed> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    /// The error for a value that is not valid.
    #[must_use]
    pub const fn invalid(&self) -> Malformed {
        Malformed::Invalid(self.what)
    }

    /// All bytes that are left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// The error for a tag without meaning.
    #[must_use]
    pub fn unknown(&self, tag: impl Into<u64>) -> Malformed {
        Malformed::UnknownTag {
            what: self.what,
            tag: tag.into(),
        }
    }

    /// An error if bytes are left.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Malformed::Trailing(self.what))
        }
    }
}
