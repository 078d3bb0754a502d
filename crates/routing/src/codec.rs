//! Bytes of entries and of the state: fixed-width big-endian numbers, and runs of bytes after their
//! length.
//!
//! Reading never panics, whatever the bytes are. Lengths are bounded before memory is taken.

use thiserror::Error;

/// Why bytes are not an entry or a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MalformedBytes {
    /// The bytes end within a value.
    #[error("bytes of routing end too early")]
    Truncated,
    /// Bytes are left over after the last value.
    #[error("bytes of routing go on after their end")]
    Trailing,
    /// The bytes, or a list in them, are above a limit.
    #[error("bytes of routing are longer than the limit {0}")]
    TooLong(usize),
    /// A tag has no meaning in this version.
    #[error("bytes of routing have the unknown tag {0}")]
    UnknownTag(u8),
    /// A newer Braid wrote the bytes.
    #[error("bytes of routing have format {0}, which this version of Braid does not know")]
    UnknownFormat(u8),
    /// A newer Braid has routed the table with another hash.
    #[error("bytes of routing have hash version {0}, which this version of Braid does not know")]
    UnknownHash(u8),
    /// A value is outside its range.
    #[error("bytes of routing have an invalid {0}")]
    Invalid(&'static str),
}

impl MalformedBytes {
    /// The hint for the user, where there is one: a sentence.
    #[must_use]
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnknownTag(_) | Self::UnknownFormat(_) | Self::UnknownHash(_) => {
                Some("A newer Braid wrote it. Update Braid on this node.")
            }
            Self::TooLong(_) => Some("Divide the tenants among several rules with one time."),
            _ => None,
        }
    }
}

/// Appends values to bytes.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
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

    pub(crate) fn i64(&mut self, value: i64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// The number of items that follow.
    pub(crate) fn count(&mut self, count: usize) -> &mut Self {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// A run of bytes after its length.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn done(self) -> Vec<u8> {
        self.0
    }
}

/// Takes values from bytes.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn raw(&mut self, len: usize) -> Result<&'a [u8], MalformedBytes> {
        let (taken, rest) = self
            .0
            .split_at_checked(len)
            .ok_or(MalformedBytes::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedBytes> {
        self.raw(N)?
            .try_into()
            .map_err(|_| MalformedBytes::Truncated)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, MalformedBytes> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, MalformedBytes> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, MalformedBytes> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    pub(crate) fn i64(&mut self) -> Result<i64, MalformedBytes> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    /// A number of items, at most `limit` and never more than bytes are left.
    pub(crate) fn count(&mut self, limit: usize) -> Result<usize, MalformedBytes> {
        let count = usize::try_from(self.u32()?).unwrap_or(usize::MAX);
        if count > limit {
            return Err(MalformedBytes::TooLong(limit));
        }
        if count > self.0.len() {
            return Err(MalformedBytes::Truncated);
        }
        Ok(count)
    }

    pub(crate) fn bytes(&mut self, limit: usize) -> Result<&'a [u8], MalformedBytes> {
        let len = self.count(limit)?;
        self.raw(len)
    }

    /// An error if bytes are left.
    pub(crate) fn end(self) -> Result<(), MalformedBytes> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(MalformedBytes::Trailing)
        }
    }
}
