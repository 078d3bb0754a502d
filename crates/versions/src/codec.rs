//! Fixed-width big-endian numbers, and items after their count.
//!
//! Reading never panics, whatever the bytes are. Counts are bounded before memory is taken. Not
//! for: the meaning of the values, which `bytes.rs` checks.

use thiserror::Error;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Malformed {
    /// The bytes end within a value.
    #[error("{0} ends too early")]
    Truncated(&'static str),
    /// A count is above its limit.
    #[error("{what} has more than {limit} items")]
    TooMany {
        /// The value's name.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A tag has no meaning in this version.
    #[error("{what} has the unknown tag {tag}")]
    UnknownTag {
        /// The value's name.
        what: &'static str,
        /// The tag that was read.
        tag: u8,
    },
    /// The format is not one that this version of Braid knows.
    #[error("{what} has format {version}, which this version of Braid does not know")]
    UnknownVersion {
        /// The value's name.
        what: &'static str,
        /// The format that was read.
        version: u8,
    },
    /// A value is outside its range, or items are not in order.
    #[error("{0} is not valid")]
    Invalid(&'static str),
    /// Bytes are left over after the last value.
    #[error("{0} has bytes after its end")]
    Trailing(&'static str),
}

/// Appends values to bytes.
#[derive(Debug, Default)]
pub struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// The number of items that follow.
    pub(crate) fn count(&mut self, count: usize) -> &mut Self {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX))
    }
}

/// Takes values from bytes; `what` names them in errors.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(Malformed::Truncated(self.what))?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A number of items, at most `limit` and never more than bytes are left.
    pub(crate) fn count(&mut self, limit: usize) -> Result<usize, Malformed> {
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

    pub(crate) const fn unknown(&self, tag: u8) -> Malformed {
        let what = self.what;
        Malformed::UnknownTag { what, tag }
    }

    pub(crate) const fn invalid(&self) -> Malformed {
        Malformed::Invalid(self.what)
    }

    pub(crate) const fn what(&self) -> &'static str {
        self.what
    }

    pub(crate) const fn end(&self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Malformed::Trailing(self.what))
        }
    }
}
