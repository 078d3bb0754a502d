//! Records and frames.
//!
//! A record is a tag byte, the length of its body as u32, and the body. A frame is what one message
//! of the replication protocol carries: one or more whole records. A transaction may span frames; a
//! record never does.

use crate::change::{BeforeKind, Change, ChangeHeader, Operation, check_before};
use crate::error::{Error, Result};
use crate::image::ImageWriter;
use crate::message::Message;
use crate::position::Position;
use crate::prepared::{Prepared, RollbackPrepared};
use crate::schema::{Column, ReplicaIdentity, Schema, SchemaNumber, WrittenKey};
use crate::segment::{Abort, SegmentStart, StreamedCommit};
use crate::stream::StreamHeader;
use crate::transaction::{Begin, Commit};
use crate::truncate::Truncate;
use crate::wire::Cursor;

/// Size of a record's header, in bytes.
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
    /// [`SegmentStart`].
    SegmentStart = b'G',
    /// End of a segment.
    SegmentStop = b'E',
    /// Subtransaction of the segment's next changes.
    Subtransaction = b'X',
    /// [`Abort`].
    Abort = b'A',
    /// [`StreamedCommit`].
    StreamedCommit = b'F',
    /// [`Prepared`], the start of a prepared transaction.
    BeginPrepared = b'P',
    /// [`Commit`], of PREPARE.
    Prepare = b'Q',
    /// [`Prepared`], the end of one that came in segments.
    StreamedPrepare = b'J',
    /// [`Prepared`], committed.
    CommitPrepared = b'K',
    /// [`RollbackPrepared`].
    RollbackPrepared = b'R',
}

impl Tag {
    /// Returns the record's name in docs/PROTOCOL.md.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StreamHeader => "Stream header",
            Self::Schema => "Schema",
            Self::Begin => "Begin",
            Self::Commit => "Commit",
            Self::Insert => "Insert",
            Self::Update => "Update",
            Self::Delete => "Delete",
            Self::Truncate => "Truncate",
            Self::Message => "Message",
            Self::SegmentStart => "Segment start",
            Self::SegmentStop => "Segment end",
            Self::Subtransaction => "Subtransaction",
            Self::Abort => "Abort",
            Self::StreamedCommit => "Streamed commit",
            Self::BeginPrepared => "Begin prepared",
            Self::Prepare => "Prepare",
            Self::StreamedPrepare => "Streamed prepare",
            Self::CommitPrepared => "Commit prepared",
            Self::RollbackPrepared => "Rollback prepared",
        }
    }

    pub(crate) fn from_byte(tag: u8) -> Result<Self> {
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
            b'G' => Self::SegmentStart,
            b'E' => Self::SegmentStop,
            b'X' => Self::Subtransaction,
            b'A' => Self::Abort,
            b'F' => Self::StreamedCommit,
            b'P' => Self::BeginPrepared,
            b'Q' => Self::Prepare,
            b'J' => Self::StreamedPrepare,
            b'K' => Self::CommitPrepared,
            b'R' => Self::RollbackPrepared,
            _ => {
                return Err(Error::UnknownTag {
                    what: "record",
                    tag,
                });
            }
        })
    }
}

/// One record, borrowed from its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    /// The first record of a stream.
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
    /// Start of a segment of a transaction that may still run.
    SegmentStart(SegmentStart),
    /// End of a segment.
    SegmentStop,
    /// The changes that follow in the segment belong to the subtransaction with this id.
    Subtransaction(u32),
    /// A transaction of which segments came, or a part of it, was rolled back.
    Abort(Abort),
    /// A transaction of which segments came has committed.
    StreamedCommit(StreamedCommit<'a>),
    /// Start of a prepared transaction, which may still be rolled back.
    BeginPrepared(Prepared<'a>),
    /// End of a prepared transaction.
    Prepare(Commit),
    /// A transaction of which segments came is prepared.
    StreamedPrepare(Prepared<'a>),
    /// A prepared transaction has committed.
    CommitPrepared(Prepared<'a>),
    /// A prepared transaction was rolled back.
    RollbackPrepared(RollbackPrepared<'a>),
}

/// Reads a frame record by record.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    frame: &'a [u8],
    cursor: Cursor<'a>,
    /// Bytes from the start of the last record to the end of the frame.
    from: usize,
    /// Number of records that were read, including a refused one.
    records: usize,
}

impl<'a> Reader<'a> {
    /// Returns a reader of `frame`, which consists of whole records.
    #[must_use]
    pub fn new(frame: &'a [u8]) -> Self {
        Self {
            frame,
            cursor: Cursor::new(frame),
            from: frame.len(),
            records: 0,
        }
    }

    /// Returns whether the whole frame was read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cursor.is_empty()
    }

    /// Returns the number of bytes that were not read yet.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.cursor.rest().len()
    }

    /// Returns the position of the last record, which was read or refused. [`Position::error`] adds
    /// it to an error.
    #[must_use]
    pub fn position(&self) -> Position {
        let offset = self.frame.len() - self.from;
        let tag = self.frame.get(offset).filter(|_| self.records > 0);
        Position {
            record: self.records,
            offset,
            tag: tag.copied(),
        }
    }

    /// Returns tag and body of the next record, the body unchecked. `None` at the end of the frame.
    ///
    /// # Errors
    /// [`Error::UnknownTag`] and [`Error::Truncated`].
    #[inline]
    pub fn next_raw(&mut self) -> Result<Option<(Tag, &'a [u8])>> {
        if self.cursor.is_empty() {
            return Ok(None);
        }
        self.from = self.cursor.rest().len();
        self.records += 1;
        let tag = Tag::from_byte(self.cursor.u8("record tag")?)?;
        let len = self.cursor.u32("record length")?;
        let len = usize::try_from(len).map_err(|_| Error::Truncated("record"))?;
        Ok(Some((tag, self.cursor.take(len, "record")?)))
    }

    /// Returns the next record, completely checked. `None` at the end of the frame.
    ///
    /// # Errors
    /// Any [`Error`] in the record's bytes; [`Reader::position`] tells which record it is.
    #[inline]
    pub fn next_record(&mut self) -> Result<Option<Record<'a>>> {
        match self.next_raw()? {
            Some((tag, body)) => Record::read(tag, body).map(Some),
            None => Ok(None),
        }
    }
}

impl<'a> Record<'a> {
    /// Returns the record's kind.
    #[must_use]
    pub fn tag(&self) -> Tag {
        match self {
            Self::StreamHeader(_) => Tag::StreamHeader,
            Self::Schema(_) => Tag::Schema,
            Self::Begin(_) => Tag::Begin,
            Self::Commit(_) => Tag::Commit,
            Self::Change(change) => match change.operation {
                Operation::Insert => Tag::Insert,
                Operation::Update => Tag::Update,
                Operation::Delete => Tag::Delete,
            },
            Self::Truncate(_) => Tag::Truncate,
            Self::Message(_) => Tag::Message,
            Self::SegmentStart(_) => Tag::SegmentStart,
            Self::SegmentStop => Tag::SegmentStop,
            Self::Subtransaction(_) => Tag::Subtransaction,
            Self::Abort(_) => Tag::Abort,
            Self::StreamedCommit(_) => Tag::StreamedCommit,
            Self::BeginPrepared(_) => Tag::BeginPrepared,
            Self::Prepare(_) => Tag::Prepare,
            Self::StreamedPrepare(_) => Tag::StreamedPrepare,
            Self::CommitPrepared(_) => Tag::CommitPrepared,
            Self::RollbackPrepared(_) => Tag::RollbackPrepared,
        }
    }

    /// Reads a record's body.
    ///
    /// # Errors
    /// Any [`Error`] in the bytes; bytes left over are one.
    #[inline]
    pub fn read(tag: Tag, body: &'a [u8]) -> Result<Self> {
        let mut cursor = Cursor::new(body);
        let (record, what) = match tag {
            Tag::StreamHeader => (
                Self::StreamHeader(StreamHeader::read(&mut cursor)?),
                "stream header",
            ),
            Tag::Schema => (Self::Schema(Schema::read(&mut cursor)?), "schema"),
            Tag::Begin => (Self::Begin(Begin::read(&mut cursor)?), "begin"),
            Tag::Commit => (Self::Commit(Commit::read(&mut cursor)?), "commit"),
            Tag::Insert => (
                Self::Change(Change::read(Operation::Insert, &mut cursor)?),
                "insert",
            ),
            Tag::Update => (
                Self::Change(Change::read(Operation::Update, &mut cursor)?),
                "update",
            ),
            Tag::Delete => (
                Self::Change(Change::read(Operation::Delete, &mut cursor)?),
                "delete",
            ),
            Tag::Truncate => (Self::Truncate(Truncate::read(&mut cursor)?), "truncate"),
            Tag::Message => (Self::Message(Message::read(&mut cursor)?), "message"),
            Tag::SegmentStart => (
                Self::SegmentStart(SegmentStart::read(&mut cursor)?),
                "segment start",
            ),
            Tag::SegmentStop => (Self::SegmentStop, "segment stop"),
            Tag::Subtransaction => (
                Self::Subtransaction(cursor.u32("subtransaction id")?),
                "subtransaction",
            ),
            Tag::Abort => (Self::Abort(Abort::read(&mut cursor)?), "abort"),
            Tag::StreamedCommit => (
                Self::StreamedCommit(StreamedCommit::read(&mut cursor)?),
                "streamed commit",
            ),
            Tag::BeginPrepared => (
                Self::BeginPrepared(Prepared::read(&mut cursor)?),
                "begin prepared",
            ),
            Tag::Prepare => (Self::Prepare(Commit::read(&mut cursor)?), "prepare"),
            Tag::StreamedPrepare => (
                Self::StreamedPrepare(Prepared::read(&mut cursor)?),
                "streamed prepare",
            ),
            Tag::CommitPrepared => (
                Self::CommitPrepared(Prepared::read(&mut cursor)?),
                "commit prepared",
            ),
            Tag::RollbackPrepared => (
                Self::RollbackPrepared(RollbackPrepared::read(&mut cursor)?),
                "rollback prepared",
            ),
        };
        cursor.finish(what)?;
        Ok(record)
    }

    /// Reads only the part of a change's body that scheduling needs.
    ///
    /// # Errors
    /// Any [`Error`] in the header's bytes; the images are not checked.
    #[inline]
    pub fn read_change_header(body: &'a [u8]) -> Result<ChangeHeader<'a>> {
        ChangeHeader::read(&mut Cursor::new(body))
    }
}

/// Appends records to a buffer that the caller owns, reuses and sends as frames.
///
/// Only whole records are visible: if a closure that writes a row fails, or a PostgreSQL error
/// unwinds through it, its output is dropped.
#[derive(Debug, Default)]
pub struct Writer {
    out: Vec<u8>,
    /// End of the last whole record; bytes behind it were left by a body that unwound.
    whole: usize,
}

impl Writer {
    /// Returns an empty frame.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the frame so far.
    #[must_use]
    pub fn frame(&self) -> &[u8] {
        self.out.get(..self.whole).unwrap_or_default()
    }

    /// Returns the number of bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.whole
    }

    /// Returns whether nothing was written since the last [`Writer::clear`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.whole == 0
    }

    /// Starts a new frame. Memory is kept, up to `keep` bytes.
    pub fn clear(&mut self, keep: usize) {
        self.whole = 0;
        self.out.clear();
        self.out.shrink_to(keep);
    }

    /// Drops everything after `len` bytes, which must be the end of a record.
    pub fn truncate_to(&mut self, len: usize) {
        self.whole = self.whole.min(len);
        self.out.truncate(self.whole);
    }

    #[inline]
    fn record<E: From<Error>>(
        &mut self,
        tag: Tag,
        body: impl FnOnce(&mut Vec<u8>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let start = self.whole;
        self.out.truncate(start);
        self.out.extend_from_slice(&[tag as u8, 0, 0, 0, 0]);
        let written = body(&mut self.out).and_then(|()| {
            let len = u32::try_from(self.out.len() - start - HEADER)
                .map_err(|_| Error::TooLarge("record"))?;
            if let Some(field) = self.out.get_mut(start + 1..start + HEADER) {
                field.copy_from_slice(&len.to_le_bytes());
            }
            Ok(())
        });
        match &written {
            Ok(()) => self.whole = self.out.len(),
            Err(_) => self.out.truncate(start),
        }
        written
    }

    /// Appends a stream header.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn stream_header(&mut self, header: &StreamHeader<'_>) -> Result<()> {
        self.record(Tag::StreamHeader, |out| header.write(out))
    }

    /// Appends a schema; `names` are namespace and relation, the last argument columns and keys.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::NulInName`], [`Error::UnknownTag`] for column flags that this
    /// version does not have, [`Error::OutOfRange`] for a key's column that is none of `columns`.
    pub fn schema(
        &mut self,
        number: SchemaNumber,
        relation_oid: u32,
        replica_identity: ReplicaIdentity,
        names: (&str, &str),
        (columns, keys): (&[Column<'_>], &[WrittenKey<'_>]),
    ) -> Result<()> {
        self.record(Tag::Schema, |out| {
            Schema::write_parts(
                out,
                (number, relation_oid, replica_identity),
                names,
                columns,
                keys,
            )
        })
    }

    /// Appends a begin.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn begin(&mut self, begin: &Begin<'_>) -> Result<()> {
        self.record(Tag::Begin, |out| begin.write(out))
    }

    /// Appends a commit.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn commit(&mut self, commit: &Commit) -> Result<()> {
        self.record(Tag::Commit, |out| {
            commit.write(out);
            Ok(())
        })
    }

    /// Appends an insert, whose row `after` writes.
    ///
    /// # Errors
    /// [`Error::TooLarge`], or any error of `after`. Then nothing is left in the frame.
    pub fn insert<E: From<Error>>(
        &mut self,
        schema: SchemaNumber,
        barrier: bool,
        keys: &[u64],
        after: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.change(
            Tag::Insert,
            schema,
            (BeforeKind::Absent, barrier),
            keys,
            |out| write_image(out, after),
        )
    }

    /// Appends an update. `before` is not called if `kind` is [`BeforeKind::Absent`].
    ///
    /// # Errors
    /// [`Error::TooLarge`], or any error of the closures. Then nothing is left in the frame.
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

    /// Appends a delete, whose key or row `before` writes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if `kind` is [`BeforeKind::Absent`], [`Error::TooLarge`], or any error
    /// of `before`. Then nothing is left in the frame.
    pub fn delete<E: From<Error>>(
        &mut self,
        schema: SchemaNumber,
        kind: BeforeKind,
        barrier: bool,
        keys: &[u64],
        before: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.change(Tag::Delete, schema, (kind, barrier), keys, |out| {
            check_before(Operation::Delete, kind)?;
            write_image(out, before)
        })
    }

    /// Appends a truncate.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn truncate(
        &mut self,
        cascade: bool,
        restart_identity: bool,
        schemas: &[SchemaNumber],
    ) -> Result<()> {
        self.record(Tag::Truncate, |out| {
            Truncate::write(out, cascade, restart_identity, schemas)
        })
    }

    /// Appends a logical message.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn message(&mut self, message: &Message<'_>) -> Result<()> {
        self.record(Tag::Message, |out| message.write(out))
    }

    /// Appends the start of a segment.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn segment_start(&mut self, start: SegmentStart) -> Result<()> {
        self.record(Tag::SegmentStart, |out| {
            start.write(out);
            Ok(())
        })
    }

    /// Appends the end of a segment.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn segment_stop(&mut self) -> Result<()> {
        self.record(Tag::SegmentStop, |_| Ok(()))
    }

    /// Appends the subtransaction of the segment's next changes.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn subtransaction(&mut self, xid: u32) -> Result<()> {
        self.record(Tag::Subtransaction, |out| {
            out.extend_from_slice(&xid.to_le_bytes());
            Ok(())
        })
    }

    /// Appends an abort.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn abort(&mut self, abort: Abort) -> Result<()> {
        self.record(Tag::Abort, |out| {
            abort.write(out);
            Ok(())
        })
    }

    /// Appends the commit of a transaction that came in segments.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn streamed_commit(&mut self, commit: &StreamedCommit<'_>) -> Result<()> {
        self.record(Tag::StreamedCommit, |out| commit.write(out))
    }

    /// Appends the start of a prepared transaction.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn begin_prepared(&mut self, prepared: &Prepared<'_>) -> Result<()> {
        self.record(Tag::BeginPrepared, |out| prepared.write(out))
    }

    /// Appends the end of a prepared transaction.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn prepare(&mut self, prepare: &Commit) -> Result<()> {
        self.record(Tag::Prepare, |out| {
            prepare.write(out);
            Ok(())
        })
    }

    /// Appends the PREPARE of a transaction that came in segments.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn streamed_prepare(&mut self, prepared: &Prepared<'_>) -> Result<()> {
        self.record(Tag::StreamedPrepare, |out| prepared.write(out))
    }

    /// Appends the commit of a prepared transaction.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn commit_prepared(&mut self, prepared: &Prepared<'_>) -> Result<()> {
        self.record(Tag::CommitPrepared, |out| prepared.write(out))
    }

    /// Appends the rollback of a prepared transaction.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn rollback_prepared(&mut self, rollback: &RollbackPrepared<'_>) -> Result<()> {
        self.record(Tag::RollbackPrepared, |out| rollback.write(out))
    }

    /// Appends a record that was read. The bytes equal the original ones, as every record has
    /// exactly one encoding.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn copy(&mut self, record: &Record<'_>) -> Result<()> {
        match record {
            Record::StreamHeader(header) => self.stream_header(header),
            Record::Schema(schema) => {
                let columns: Vec<_> = schema.columns().collect();
                let keys: Vec<(bool, Vec<_>)> = schema
                    .keys()
                    .map(|key| (key.nulls_equal, key.columns().collect()))
                    .collect();
                let keys: Vec<WrittenKey<'_>> = keys
                    .iter()
                    .map(|(nulls_equal, columns)| (*nulls_equal, columns.as_slice()))
                    .collect();
                self.schema(
                    schema.number,
                    schema.relation_oid,
                    schema.replica_identity,
                    (schema.namespace, schema.name),
                    (&columns, &keys),
                )
            }
            Record::Begin(begin) => self.begin(begin),
            Record::Commit(commit) => self.commit(commit),
            Record::Change(change) => self.copy_change(change),
            Record::Truncate(truncate) => {
                let schemas: Vec<_> = truncate.schemas().collect();
                self.truncate(truncate.cascade, truncate.restart_identity, &schemas)
            }
            Record::Message(message) => self.message(message),
            Record::SegmentStart(start) => self.segment_start(*start),
            Record::SegmentStop => self.segment_stop(),
            Record::Subtransaction(xid) => self.subtransaction(*xid),
            Record::Abort(abort) => self.abort(*abort),
            Record::StreamedCommit(commit) => self.streamed_commit(commit),
            Record::BeginPrepared(prepared) => self.begin_prepared(prepared),
            Record::Prepare(prepare) => self.prepare(prepare),
            Record::StreamedPrepare(prepared) => self.streamed_prepare(prepared),
            Record::CommitPrepared(prepared) => self.commit_prepared(prepared),
            Record::RollbackPrepared(rollback) => self.rollback_prepared(rollback),
        }
    }

    fn copy_change(&mut self, change: &Change<'_>) -> Result<()> {
        let tag = Record::Change(*change).tag();
        let header = change.header;
        let keys: Vec<_> = header.writeset.hashes().collect();
        self.change(
            tag,
            header.schema,
            (header.before, header.barrier),
            &keys,
            |out| {
                for image in [change.before, change.after].into_iter().flatten() {
                    image.write(out);
                }
                Ok(())
            },
        )
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
        self.record(tag, |out| {
            ChangeHeader::write(out, schema, before, barrier, keys);
            images(out)
        })
    }
}

fn write_image<E: From<Error>>(
    out: &mut Vec<u8>,
    fill: impl FnOnce(&mut ImageWriter<'_>) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let mut image = ImageWriter::new(out);
    fill(&mut image)?;
    Ok(image.finish()?)
}
