//! A row image: the values of a row before or after a change.
//!
//! Layout: u16 number of columns, then one value each, in the column order of the schema record. An
//! image that is only a key has all columns too; those that are not in the key have the value None.

use crate::error::{Error, Result};
use crate::value::Value;
use crate::wire::Cursor;

/// A row image, borrowed from the record. The bytes were checked when the record was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image<'a> {
    columns: u16,
    values: &'a [u8],
}

impl<'a> Image<'a> {
    pub(crate) fn read(cursor: &mut Cursor<'a>) -> Result<Self> {
        let columns = cursor.u16("column count")?;
        let start = cursor.rest();
        for _ in 0..columns {
            Value::read(cursor)?;
        }
        let used = start.len() - cursor.rest().len();
        let values = start.get(..used).unwrap_or_default();
        Ok(Self { columns, values })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.columns.to_le_bytes());
        out.extend_from_slice(self.values);
    }

    /// Reads an image from all of `bytes`, for example the content of a message.
    ///
    /// # Errors
    /// Any [`Error`] in the bytes; bytes left over are one.
    pub fn read_alone(bytes: &'a [u8]) -> Result<Self> {
        let mut cursor = Cursor::new(bytes);
        let image = Self::read(&mut cursor)?;
        cursor.finish("image")?;
        Ok(image)
    }

    /// Returns the number of columns.
    #[must_use]
    pub fn columns(&self) -> u16 {
        self.columns
    }

    /// Returns the size of the values in the record, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.values.len()
    }

    /// Returns the encoded values.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.values
    }

    /// Returns the values in column order.
    #[must_use]
    pub fn values(&self) -> Values<'a> {
        Values {
            left: self.columns,
            cursor: Cursor::new(self.values),
        }
    }
}

/// Iterator over an image's values. Ends after the first error.
#[derive(Debug, Clone)]
pub struct Values<'a> {
    left: u16,
    cursor: Cursor<'a>,
}

impl<'a> Iterator for Values<'a> {
    type Item = Result<Value<'a>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let value = Value::read(&mut self.cursor);
        if value.is_err() {
            self.left = 0;
        }
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(usize::from(self.left)))
    }
}

/// Writes a row image column by column; the count is filled in at the end.
#[derive(Debug)]
pub struct ImageWriter<'b> {
    out: &'b mut Vec<u8>,
    start: usize,
    columns: usize,
    refused: Option<Error>,
}

impl<'b> ImageWriter<'b> {
    pub(crate) fn new(out: &'b mut Vec<u8>) -> Self {
        let start = out.len();
        out.extend_from_slice(&[0, 0]);
        Self {
            out,
            start,
            columns: 0,
            refused: None,
        }
    }

    /// Appends a separate image to `out`, whose columns `fill` writes. After an error nothing is
    /// appended.
    ///
    /// # Errors
    /// [`Error::TooLarge`], or whatever `fill` returns.
    pub fn write_alone(
        out: &mut Vec<u8>,
        fill: impl FnOnce(&mut ImageWriter<'_>) -> Result<()>,
    ) -> Result<()> {
        let start = out.len();
        let mut image = ImageWriter::new(out);
        let written = fill(&mut image).and_then(|()| image.finish());
        if written.is_err() {
            out.truncate(start);
        }
        written
    }

    /// Appends the next column's value. A value that no reader would accept (a time of day outside
    /// its day) makes the whole record an error.
    #[inline]
    pub fn put(&mut self, value: &Value<'_>) {
        if let Value::DateTime(date_time) = value
            && let Err(error) = date_time.check()
        {
            self.refused = Some(error);
        }
        value.write(self.out);
        self.columns += 1;
    }

    /// Sets the column count.
    pub(crate) fn finish(self) -> Result<()> {
        if let Some(error) = self.refused {
            return Err(error);
        }
        let columns = u16::try_from(self.columns).map_err(|_| Error::TooLarge("column count"))?;
        if let Some(count) = self.out.get_mut(self.start..self.start + 2) {
            count.copy_from_slice(&columns.to_le_bytes());
        }
        Ok(())
    }
}
