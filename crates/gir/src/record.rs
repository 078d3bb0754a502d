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
    /// [`SegmentStart`].
    SegmentStart = b'G',
    /// End of a segment.
    SegmentStop = b'E',
    /// Whose changes follow in a segment.
    Subtransaction = b'X',
    /// [`Abort`].
    Abort = b'A',
    /// [`StreamedCommit`].
    StreamedCommit = b'F',
    /// [`Prepared`], the start of one.
    BeginPrepared = b'P',
    /// [`Commit`], of PREPARE.
    Prepare = b'Q',
    /// [`Prepared`], of which segments came.
    StreamedPrepare = b'J',
    /// [`Prepared`], committed.
    CommitPrepared = b'K',
    /// [`RollbackPrepared`].
    RollbackPrepared = b'R',
}

impl Tag {
    /// As docs/PROTOCOL.md calls such a record.
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
    /// Start of a transaction that is prepared, and may be rolled back yet.
    BeginPrepared(Prepared<'a>),
    /// End of such a transaction.
    Prepare(Commit),
    /// A transaction of which segments came is prepared.
    StreamedPrepare(Prepared<'a>),
    /// What was prepared has committed.
    CommitPrepared(Prepared<'a>),
    /// What was prepared was rolled back.
    RollbackPrepared(RollbackPrepared<'a>),
}

/// Reads a frame record by record.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    frame: &'a [u8],
    cursor: Cursor<'a>,
    /// Bytes from the start of the record that was read last to the end of the frame.
    from: usize,
    /// Records that were read, one that was refused included.
    records: usize,
}

impl<'a> Reader<'a> {
    /// Read `frame`, which holds whole records.
    #[must_use]
    pub fn new(frame: &'a [u8]) -> Self {
        Self {
            frame,
            cursor: Cursor::new(frame),
            from: frame.len(),
            records: 0,
        }
    }

    /// Whether the frame is used up.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cursor.is_empty()
    }

    /// Bytes of the frame that were not read yet.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.cursor.rest().len()
    }

    /// Where the record stands that was read last, or refused. [`Position::error`] makes an error
    /// say so.
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

    /// Tag and body of the next record, the body unchecked. `None` at the end of the frame.
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

    /// The next record, checked to its last byte. `None` at the end of the frame.
    ///
    /// # Errors
    /// Any [`Error`] that the record's bytes deserve; [`Reader::position`] says of which record it
    /// is.
    #[inline]
    pub fn next_record(&mut self) -> Result<Option<Record<'a>>> {
        match self.next_raw()? {
            Some((tag, body)) => Record::read(tag, body).map(Some),
            None => Ok(None),
        }
    }
}

impl<'a> Record<'a> {
    /// Its kind.
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

    /// Read a record's body.
    ///
    /// # Errors
    /// Any [`Error`] that the bytes deserve; bytes left over are one.
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
///
/// Only whole records are ever seen: where a closure that fills in a row fails, or a PostgreSQL
/// error unwinds through it, what it wrote is dropped.
#[derive(Debug, Default)]
pub struct Writer {
    out: Vec<u8>,
    /// End of the last whole record; what lies behind it was left by a body that unwound.
    whole: usize,
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
        self.out.get(..self.whole).unwrap_or_default()
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.whole
    }

    /// Whether nothing was written since the last [`Writer::clear`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.whole == 0
    }

    /// Start a new frame. Memory is kept, up to `keep` bytes.
    pub fn clear(&mut self, keep: usize) {
        self.whole = 0;
        self.out.clear();
        self.out.shrink_to(keep);
    }

    /// Forget everything after `len` bytes, which must be where a record ended.
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

    /// Append a stream header.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn stream_header(&mut self, header: &StreamHeader<'_>) -> Result<()> {
        self.record(Tag::StreamHeader, |out| header.write(out))
    }

    /// Append a schema; `names` are namespace and relation, the last argument columns and keys.
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

    /// Append a begin.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn begin(&mut self, begin: &Begin<'_>) -> Result<()> {
        self.record(Tag::Begin, |out| begin.write(out))
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
        self.change(
            Tag::Insert,
            schema,
            (BeforeKind::Absent, barrier),
            keys,
            |out| write_image(out, after),
        )
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

    /// Append a delete, whose key or row `before` writes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when `kind` is [`BeforeKind::Absent`], [`Error::TooLarge`], or
    /// whatever `before` returns. Nothing is left in the frame then.
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
        self.record(Tag::Truncate, |out| {
            Truncate::write(out, cascade, restart_identity, schemas)
        })
    }

    /// Append a logical message.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn message(&mut self, message: &Message<'_>) -> Result<()> {
        self.record(Tag::Message, |out| message.write(out))
    }

    /// Append the start of a segment.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn segment_start(&mut self, start: SegmentStart) -> Result<()> {
        self.record(Tag::SegmentStart, |out| {
            start.write(out);
            Ok(())
        })
    }

    /// Append the end of a segment.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn segment_stop(&mut self) -> Result<()> {
        self.record(Tag::SegmentStop, |_| Ok(()))
    }

    /// Say whose changes follow in a segment.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn subtransaction(&mut self, xid: u32) -> Result<()> {
        self.record(Tag::Subtransaction, |out| {
            out.extend_from_slice(&xid.to_le_bytes());
            Ok(())
        })
    }

    /// Append an abort.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn abort(&mut self, abort: Abort) -> Result<()> {
        self.record(Tag::Abort, |out| {
            abort.write(out);
            Ok(())
        })
    }

    /// Append the commit of a transaction that came in segments.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn streamed_commit(&mut self, commit: &StreamedCommit<'_>) -> Result<()> {
        self.record(Tag::StreamedCommit, |out| commit.write(out))
    }

    /// Append the start of a transaction that is prepared.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn begin_prepared(&mut self, prepared: &Prepared<'_>) -> Result<()> {
        self.record(Tag::BeginPrepared, |out| prepared.write(out))
    }

    /// Append the end of a transaction that is prepared.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn prepare(&mut self, prepare: &Commit) -> Result<()> {
        self.record(Tag::Prepare, |out| {
            prepare.write(out);
            Ok(())
        })
    }

    /// Append that a transaction is prepared that came in segments.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn streamed_prepare(&mut self, prepared: &Prepared<'_>) -> Result<()> {
        self.record(Tag::StreamedPrepare, |out| prepared.write(out))
    }

    /// Append the commit of a prepared transaction.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn commit_prepared(&mut self, prepared: &Prepared<'_>) -> Result<()> {
        self.record(Tag::CommitPrepared, |out| prepared.write(out))
    }

    /// Append that a prepared transaction was rolled back.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::NulInName`].
    pub fn rollback_prepared(&mut self, rollback: &RollbackPrepared<'_>) -> Result<()> {
        self.record(Tag::RollbackPrepared, |out| rollback.write(out))
    }

    /// Append a record that was read. The bytes are those that it was read from: everything has
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
