//! Records and frames.
//!
//! A record is a tag byte, the length of its body as u32, and the body. A frame is what one message of the replication
//! protocol carries: one or more whole records. A transaction may span frames; a record never does.

use crate::change::{BeforeKind, Change, ChangeHeader, Operation};
use crate::error::{Error, Result};
use crate::image::ImageWriter;
use crate::message::Message;
use crate::schema::{Column, ReplicaIdentity, Schema, SchemaNumber};
use crate::stream::StreamHeader;
use crate::transaction::{Begin, Commit};
use crate::truncate::Truncate;
use crate::wire::Cursor;

/// Bytes before a record's body.
const HEADER: usize = 5;

/// A record's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Tag {
    /// [`StreamHeader`].
    StreamHeader = b'H',
    /// [`Schema`].
    Schema = b'S',
    /// [`Begin`].
    Begin = b'B',
    /// [`Commit`].
    Commit = b'C',
    /// [`Change`], insert.
    Insert = b'I',
    /// [`Change`], update.
    Update = b'U',
    /// [`Change`], delete.
    Delete = b'D',
    /// [`Truncate`].
    Truncate = b'T',
    /// [`Message`].
    Message = b'M',
}

impl Tag {
    fn from_byte(tag: u8) -> Result<Self> {
        Ok(match tag {
            b'H' => Self::StreamHeader,
            b'S' => Self::Schema,
            b'B' => Self::Begin,
            b'C' => Self::Commit,
            b'I' => Self::Insert,
            b'U' => Self::Update,
            b'D' => Self::Delete,
            b'T' => Self::Truncate,
            b'M' => Self::Message,
            _ => return Err(Error::UnknownTag { what: "record", tag }),
        })
    }
}

/// One record, borrowed from its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    /// First record of a stream.
    StreamHeader(StreamHeader<'a>),
    /// Shape of a relation.
    Schema(Schema<'a>),
    /// Start of a transaction.
    Begin(Begin<'a>),
    /// End of a transaction.
    Commit(Commit),
    /// A changed row.
    Change(Change<'a>),
    /// Truncated relations.
    Truncate(Truncate<'a>),
    /// A logical message.
    Message(Message<'a>),
}

/// Reads a frame record by record.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    cursor: Cursor<'a>,
}

impl<'a> Reader<'a> {
    /// Read `frame`, which holds whole records.
    #[must_use]
    pub fn new(frame: &'a [u8]) -> Self {
        Self { cursor: Cursor::new(frame) }
    }

    /// Whether the frame is used up.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cursor.is_empty()
    }

    /// Tag and body of the next record, the body unchecked. `None` at the end of the frame.
    ///
    /// # Errors
    /// [`Error::UnknownTag`] and [`Error::Truncated`].
    #[inline]
    pub fn next_raw(&mut self) -> Result<Option<(Tag, &'a [u8])>> {
        if self.cursor.is_empty() {
            return Ok(None);
        }
        let tag = Tag::from_byte(self.cursor.u8("record tag")?)?;
        let len = self.cursor.u32("record length")?;
        let len = usize::try_from(len).map_err(|_| Error::Truncated("record"))?;
        Ok(Some((tag, self.cursor.take(len, "record")?)))
    }

    /// The next record, checked to its last byte. `None` at the end of the frame.
    ///
    /// # Errors
    /// Any [`Error`] that the record's bytes deserve.
    #[inline]
    pub fn next_record(&mut self) -> Result<Option<Record<'a>>> {
        match self.next_raw()? {
            Some((tag, body)) => Record::read(tag, body).map(Some),
            None => Ok(None),
        }
    }
}

impl<'a> Record<'a> {
    /// Read a record's body.
    ///
    /// # Errors
    /// Any [`Error`] that the bytes deserve; bytes left over are one.
    #[inline]
    pub fn read(tag: Tag, body: &'a [u8]) -> Result<Self> {
        let mut cursor = Cursor::new(body);
        let (record, what) = match tag {
            Tag::StreamHeader => {
                (Self::StreamHeader(StreamHeader::read(&mut cursor)?), "stream header")
            }
            Tag::Schema => (Self::Schema(Schema::read(&mut cursor)?), "schema"),
            Tag::Begin => (Self::Begin(Begin::read(&mut cursor)?), "begin"),
            Tag::Commit => (Self::Commit(Commit::read(&mut cursor)?), "commit"),
            Tag::Insert => (Self::Change(Change::read(Operation::Insert, &mut cursor)?), "insert"),
            Tag::Update => (Self::Change(Change::read(Operation::Update, &mut cursor)?), "update"),
            Tag::Delete => (Self::Change(Change::read(Operation::Delete, &mut cursor)?), "delete"),
            Tag::Truncate => (Self::Truncate(Truncate::read(&mut cursor)?), "truncate"),
            Tag::Message => (Self::Message(Message::read(&mut cursor)?), "message"),
        };
        cursor.finish(what)?;
        Ok(record)
    }

    /// Read only what scheduling needs of a change's body.
    ///
    /// # Errors
    /// Any [`Error`] that the header's bytes deserve; the images are not looked at.
    #[inline]
    pub fn read_change_header(body: &'a [u8]) -> Result<ChangeHeader<'a>> {
        ChangeHeader::read(&mut Cursor::new(body))
    }
}

/// Appends records to a buffer that the caller owns, reuses and sends as frames.
#[derive(Debug, Default)]
pub struct Writer {
    out: Vec<u8>,
}

impl Writer {
    /// An empty frame.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The frame so far.
    #[must_use]
    pub fn frame(&self) -> &[u8] {
        &self.out
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether nothing was written since the last [`Writer::clear`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Start a new frame. Memory is kept, up to `keep` bytes.
    pub fn clear(&mut self, keep: usize) {
        self.out.clear();
        self.out.shrink_to(keep);
    }

    /// Forget everything after `len` bytes, which must be where a record ended.
    pub fn truncate_to(&mut self, len: usize) {
        self.out.truncate(len);
    }

    #[inline]
    fn record<T>(&mut self, tag: Tag, body: impl FnOnce(&mut Vec<u8>) -> Result<T>) -> Result<T> {
        let start = self.out.len();
        self.out.extend_from_slice(&[tag as u8, 0, 0, 0, 0]);
        let written = body(&mut self.out).and_then(|value| {
            let len = u32::try_from(self.out.len() - start - HEADER)
                .map_err(|_| Error::TooLarge("record"))?;
            if let Some(field) = self.out.get_mut(start + 1..start + HEADER) {
                field.copy_from_slice(&len.to_le_bytes());
            }
            Ok(value)
        });
        if written.is_err() {
            self.out.truncate(start);
        }
        written
    }

    /// Append a stream header.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn stream_header(&mut self, header: &StreamHeader<'_>) -> Result<()> {
        self.record(Tag::StreamHeader, |out| {
            header.write(out);
            Ok(())
        })
    }

    /// Append a schema; `names` are namespace and relation.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn schema(
        &mut self,
        number: SchemaNumber,
        relation_oid: u32,
        replica_identity: ReplicaIdentity,
        names: (&str, &str),
        columns: &[Column<'_>],
    ) -> Result<()> {
        self.record(Tag::Schema, |out| {
            Schema::write_parts(out, number, relation_oid, replica_identity, names, columns)
        })
    }

    /// Append a begin.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn begin(&mut self, begin: &Begin<'_>) -> Result<()> {
        self.record(Tag::Begin, |out| {
            begin.write(out);
            Ok(())
        })
    }

    /// Append a commit.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn commit(&mut self, commit: &Commit) -> Result<()> {
        self.record(Tag::Commit, |out| {
            commit.write(out);
            Ok(())
        })
    }

    /// Append an insert, whose row `after` writes.
    ///
    /// # Errors
    /// [`Error::TooLarge`], or whatever `after` returns. Nothing is left in the frame then.
    pub fn insert<E: From<Error>>(
        &mut self,
        schema: SchemaNumber,
        barrier: bool,
        keys: &[u64],
        after: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.change(Tag::Insert, schema, (BeforeKind::Absent, barrier), keys, |out| {
            write_image(out, after)
        })
    }

    /// Append an update. `before` is not called when `kind` is [`BeforeKind::Absent`].
    ///
    /// # Errors
    /// [`Error::TooLarge`], or whatever the closures return. Nothing is left in the frame then.
    pub fn update<E: From<Error>>(
        &mut self,
        schema: SchemaNumber,
        kind: BeforeKind,
        barrier: bool,
        keys: &[u64],
        before: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
        after: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.change(Tag::Update, schema, (kind, barrier), keys, |out| {
            if kind != BeforeKind::Absent {
                write_image(out, before)?;
            }
            write_image(out, after)
        })
    }

    /// Append a delete, whose key or row `before` writes; `kind` is not [`BeforeKind::Absent`].
    ///
    /// # Errors
    /// [`Error::TooLarge`], or whatever `before` returns. Nothing is left in the frame then.
    pub fn delete<E: From<Error>>(
        &mut self,
        schema: SchemaNumber,
        kind: BeforeKind,
        barrier: bool,
        keys: &[u64],
        before: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.change(Tag::Delete, schema, (kind, barrier), keys, |out| {
            if kind == BeforeKind::Absent {
                return Ok(());
            }
            write_image(out, before)
        })
    }

    /// Append a truncate.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn truncate(
        &mut self,
        cascade: bool,
        restart_identity: bool,
        schemas: &[SchemaNumber],
    ) -> Result<()> {
        self.record(Tag::Truncate, |out| Truncate::write(out, cascade, restart_identity, schemas))
    }

    /// Append a logical message.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn message(&mut self, message: &Message<'_>) -> Result<()> {
        self.record(Tag::Message, |out| {
            message.write(out);
            Ok(())
        })
    }

    #[inline]
    fn change<E: From<Error>>(
        &mut self,
        tag: Tag,
        schema: SchemaNumber,
        (before, barrier): (BeforeKind, bool),
        keys: &[u64],
        images: impl FnOnce(&mut Vec<u8>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let start = self.out.len();
        let mut failed = None;
        self.record(tag, |out| {
            ChangeHeader::write(out, schema, before, barrier, keys);
            if let Err(error) = images(out) {
                failed = Some(error);
            }
            Ok(())
        })?;
        match failed {
            Some(error) => {
                self.out.truncate(start);
                Err(error)
            }
            None => Ok(()),
        }
    }
}

fn write_image<E>(
    out: &mut Vec<u8>,
    fill: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let mut image = ImageWriter::new(out);
    let filled = fill(&mut image);
    image.finish();
    filled
}
