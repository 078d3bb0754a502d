//! The primitives of the encoding: little-endian fixed-width integers, LEB128 variable-length
//! integers, byte strings and names. Every length is checked against the remaining bytes before any
//! are read.

use crate::error::{Error, Result};

/// A position in a byte slice that only moves forward.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    #[inline]
    pub(crate) fn take(&mut self, count: usize, what: &'static str) -> Result<&'a [u8]> {
        let Some((head, tail)) = self.rest.split_at_checked(count) else {
            return Err(Error::Truncated(what));
        };
        self.rest = tail;
        Ok(head)
    }

    #[inline]
    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let Some((head, tail)) = self.rest.split_first_chunk::<N>() else {
            return Err(Error::Truncated(what));
        };
        self.rest = tail;
        Ok(*head)
    }

    #[inline]
    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8> {
        let Some((head, tail)) = self.rest.split_first() else {
            return Err(Error::Truncated(what));
        };
        self.rest = tail;
        Ok(*head)
    }

    #[inline]
    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    #[inline]
    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    #[inline]
    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    #[inline]
    pub(crate) fn i32(&mut self, what: &'static str) -> Result<i32> {
        Ok(i32::from_le_bytes(self.array(what)?))
    }

    #[inline]
    pub(crate) fn i64(&mut self, what: &'static str) -> Result<i64> {
        Ok(i64::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn bytes16(&mut self, what: &'static str) -> Result<[u8; 16]> {
        self.array(what)
    }

    /// Reads LEB128 in its shortest form only, so that a value has one encoding.
    #[inline]
    pub(crate) fn varint(&mut self, what: &'static str) -> Result<u64> {
        let first = self.u8(what)?;
        if first < 0x80 {
            return Ok(u64::from(first));
        }
        let mut value = u64::from(first & 0x7f);
        let mut shift = 7_u32;
        loop {
            let byte = self.u8(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(Error::BadVarint(what));
            }
            value |= bits << shift;
            if byte < 0x80 {
                return if byte == 0 {
                    Err(Error::BadVarint(what))
                } else {
                    Ok(value)
                };
            }
            shift += 7;
            if shift > 63 {
                return Err(Error::BadVarint(what));
            }
        }
    }

    #[inline]
    pub(crate) fn zigzag(&mut self, what: &'static str) -> Result<i64> {
        let raw = self.varint(what)?;
        Ok((raw >> 1).cast_signed() ^ -(raw & 1).cast_signed())
    }

    #[inline]
    pub(crate) fn byte_string(&mut self, what: &'static str) -> Result<&'a [u8]> {
        let len = self.varint(what)?;
        let len = usize::try_from(len).map_err(|_| Error::Truncated(what))?;
        self.take(len, what)
    }

    pub(crate) fn name(&mut self, what: &'static str) -> Result<&'a str> {
        let name =
            std::str::from_utf8(self.byte_string(what)?).map_err(|_| Error::NotUtf8(what))?;
        checked_name(name, what)
    }

    pub(crate) fn finish(&self, what: &'static str) -> Result<()> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Error::TrailingBytes {
                what,
                count: self.rest.len(),
            })
        }
    }
}

/// Refuses a zero byte in a name. Names become C strings, which end at a zero byte: two different
/// names could become equal.
fn checked_name<'n>(name: &'n str, what: &'static str) -> Result<&'n str> {
    if name.as_bytes().contains(&0) {
        Err(Error::NulInName(what))
    } else {
        Ok(name)
    }
}

#[inline]
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push((value & 0x7f) as u8);
}

#[inline]
pub(crate) fn put_zigzag(out: &mut Vec<u8>, value: i64) {
    put_varint(out, ((value << 1) ^ (value >> 63)).cast_unsigned());
}

#[inline]
pub(crate) fn put_byte_string(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

pub(crate) fn put_name(out: &mut Vec<u8>, name: &str, what: &'static str) -> Result<()> {
    put_byte_string(out, checked_name(name, what)?.as_bytes());
    Ok(())
}
