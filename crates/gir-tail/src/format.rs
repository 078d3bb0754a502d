//! Converts the plugin's messages to output, and determines which positions are safe to report.
//!
//! The rule: **confirmed data is never cut.** An output may be cut back to the last place that was
//! marked as whole. So a place is marked as whole only if nothing before it is still open, and a
//! position counts as reached only while everything written is whole (`tail::Progress`). Open are:
//!
//! - in text and JSON: a transaction up to its commit or prepare, and a segment of a transaction
//!   that still runs up to the segment's end. Records outside of these, such as stream headers and
//!   non-transactional messages, are whole by themselves. Segments of a transaction stay in the
//!   output although it may not have ended: the server sends them again, whatever is confirmed;
//! - in wal2json's version 1: an object that continues in the next message (`write-in-chunks`,
//!   `max-message-size`);
//! - in wal2json's version 2: a transaction from its object B to its object C. Without
//!   `include-transaction` its end is unknown, and each object is whole. The positions of its
//!   changes lie before its commit, so confirming them does not confirm the transaction.

use std::fmt;
use std::io;

use braid_gir::{
    Detail, JsonError, JsonReader, OrderError, Position, Reader, Record, Schemas, StreamOrder,
    Writer, lsn_text, render_to,
};

use crate::options::Format;

/// Reason why a message could not be converted, and its place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The message is not valid GIR.
    #[error("invalid data from the server: {}: {error}", place(.position, *.lsn))]
    Gir {
        /// Position of the message.
        lsn: u64,
        /// The record in the message.
        position: Position,
        /// The error in the record.
        error: braid_gir::Error,
    },
    /// A record is not allowed in its place.
    #[error("invalid order of data from the server: {}: {error}", place(.position, *.lsn))]
    Order {
        /// Position of the message.
        lsn: u64,
        /// The record in the message.
        position: Position,
        /// The violated rule.
        error: OrderError,
    },
    /// The message is not valid gir-json.
    #[error("invalid JSON from the server: message at {}: {error}", lsn_text(*.lsn))]
    Json {
        /// Position of the message.
        lsn: u64,
        /// The error, and its place in the message.
        error: JsonError,
    },
    /// An object is not allowed in its place.
    #[error("invalid order of JSON from the server: message at {}: {error}", lsn_text(*.lsn))]
    JsonOrder {
        /// Position of the message.
        lsn: u64,
        /// The violated rule.
        error: OrderError,
    },
    /// Writing to the output failed.
    #[error("could not write: {0}")]
    Output(#[from] io::Error),
}

/// Returns `record 3 (Update, at byte 120 of the message at 0/1A2B3C4)`.
fn place(position: &Position, lsn: u64) -> String {
    let (record, kind, offset) = (position.record, position.kind(), position.offset);
    let lsn = lsn_text(lsn);
    format!("record {record} ({kind}, at byte {offset} of the message at {lsn})")
}

/// Port: takes lines.
pub trait Lines {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Marks that nothing is open: everything written so far will not be cut any more.
    fn mark_whole(&mut self);
}

/// Result of a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Everything before this position is complete, once everything written is whole and flushed.
    pub complete: Option<u64>,
    /// The next transaction is past the position at which to end; nothing of it was written.
    pub past_end: bool,
}

/// Converts messages to lines. One for each connection, as schema numbers belong to a stream.
pub struct Renderer {
    form: Form,
    /// Checks the order of records, and knows whether a transaction or segment is open. Not used
    /// for wal2json.
    order: StreamOrder,
}

enum Form {
    /// GIR as text.
    Text(Schemas),
    /// JSON from the server, which is parsed only to find the ends of transactions.
    Json(Box<JsonReader>, Writer),
    /// JSON from the server, which is copied.
    Wal2json(Wal2json),
}

impl Renderer {
    /// Returns a renderer for a new stream.
    pub fn new(format: Format) -> Self {
        let form = match format {
            Format::Text => Form::Text(Schemas::new()),
            Format::Json => Form::Json(Box::default(), Writer::new()),
            Format::Wal2json => Form::Wal2json(Wal2json::default()),
        };
        let order = StreamOrder::new();
        Self { form, order }
    }

    /// Writes the lines of a message at `lsn` to `out`. Transactions that commit at or after
    /// `until` are left out.
    ///
    /// # Errors
    /// [`Error`] of the first invalid record, or of `out`.
    pub fn message(
        &mut self,
        lsn: u64,
        body: &[u8],
        until: Option<u64>,
        out: &mut impl Lines,
    ) -> Result<Outcome, Error> {
        let order = &mut self.order;
        match &mut self.form {
            Form::Text(schemas) => text(schemas, order, (lsn, body), until, out),
            Form::Json(reader, records) => json(reader, records, order, (lsn, body), until, out),
            Form::Wal2json(wal2json) => {
                let mut outcome = Outcome::default();
                if until.is_some_and(|until| lsn > until) {
                    outcome.past_end = true;
                    return Ok(outcome);
                }
                out.write(body)?;
                out.write(b"\n")?;
                wal2json.see(body);
                if !wal2json.is_open() {
                    out.mark_whole();
                    outcome.complete = Some(lsn);
                }
                Ok(outcome)
            }
        }
    }
}

/// Writes a line in parts, as it may be much longer than its record.
struct Pieces<'o, L> {
    out: &'o mut L,
    written: io::Result<()>,
}

impl<L: Lines> fmt::Write for Pieces<'_, L> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.written = self.out.write(text.as_bytes());
        self.written.as_ref().map_err(|_| fmt::Error).copied()
    }
}

fn text(
    schemas: &mut Schemas,
    order: &mut StreamOrder,
    (lsn, body): (u64, &[u8]),
    until: Option<u64>,
    out: &mut impl Lines,
) -> Result<Outcome, Error> {
    let mut outcome = Outcome::default();
    let mut reader = Reader::new(body);
    loop {
        let record = match reader.next_record() {
            Ok(Some(record)) => record,
            Ok(None) => return Ok(outcome),
            Err(error) => {
                let position = reader.position();
                return Err(Error::Gir {
                    lsn,
                    position,
                    error,
                });
            }
        };
        order.see(&record).map_err(|error| Error::Order {
            lsn,
            position: reader.position(),
            error,
        })?;
        if is_past(&record, until) {
            outcome.past_end = true;
            return Ok(outcome);
        }
        if let Record::Schema(schema) = &record {
            schemas.remember(schema);
        }
        let written = Ok(());
        let mut pieces = Pieces { out, written };
        // The only possible error is one of the output, which `pieces` has kept.
        let _ = render_to(&record, schemas, Detail::Full, &mut pieces);
        pieces.written?;
        out.write(b"\n")?;
        outcome.complete = end_of(&record).or(outcome.complete);
        // A message may contain the end of one transaction and the start of another.
        if !order.is_open() {
            out.mark_whole();
        }
    }
}

fn json(
    json: &mut JsonReader,
    records: &mut Writer,
    order: &mut StreamOrder,
    (lsn, body): (u64, &[u8]),
    until: Option<u64>,
    out: &mut impl Lines,
) -> Result<Outcome, Error> {
    let mut outcome = Outcome::default();
    records.clear(KEPT_BYTES);
    json.read(body, records)
        .map_err(|error| Error::Json { lsn, error })?;
    let mut reader = Reader::new(records.frame());
    // The records were just written, so they are valid; only their order is checked.
    while let Ok(Some(record)) = reader.next_record() {
        order
            .see(&record)
            .map_err(|error| Error::JsonOrder { lsn, error })?;
        if is_past(&record, until) {
            return Ok(Outcome {
                past_end: true,
                complete: None,
            });
        }
        outcome.complete = end_of(&record).or(outcome.complete);
    }
    out.write(body)?;
    out.write(b"\n")?;
    if !order.is_open() {
        out.mark_whole();
    }
    Ok(outcome)
}

/// Bytes of the record buffer that stay allocated for the next message.
const KEPT_BYTES: usize = 64 * 1024;

/// Returns whether the record begins, or completely describes, a transaction at or after `until`.
fn is_past(record: &Record<'_>, until: Option<u64>) -> bool {
    let begin = match record {
        Record::Begin(begin) => begin,
        Record::StreamedCommit(commit) => &commit.begin,
        Record::BeginPrepared(prepared)
        | Record::StreamedPrepare(prepared)
        | Record::CommitPrepared(prepared) => &prepared.begin,
        Record::RollbackPrepared(rollback) => &rollback.prepared.begin,
        _ => return false,
    };
    until.is_some_and(|until| begin.commit_lsn >= until)
}

/// Returns the position that a record completes: the end of the transaction that it ends.
fn end_of(record: &Record<'_>) -> Option<u64> {
    match record {
        Record::Commit(end) | Record::Prepare(end) => Some(end.end_lsn),
        Record::StreamedCommit(commit) => Some(commit.end_lsn),
        Record::StreamedPrepare(prepared) | Record::CommitPrepared(prepared) => {
            Some(prepared.end_lsn)
        }
        Record::RollbackPrepared(rollback) => Some(rollback.prepared.end_lsn),
        _ => None,
    }
}

/// State of wal2json's objects and transactions, for either version.
#[derive(Debug, Default)]
struct Wal2json {
    /// Number of open objects and arrays.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Version 2: between the objects B and C.
    in_transaction: bool,
}

impl Wal2json {
    /// Updates the state with a message that was written.
    fn see(&mut self, body: &[u8]) {
        // The server writes exactly this text, and nothing before "action".
        if self.depth == 0 {
            if body.starts_with(br#"{"action":"B""#) {
                self.in_transaction = true;
            } else if body.starts_with(br#"{"action":"C""#) {
                self.in_transaction = false;
            }
        }
        for byte in body {
            if self.escaped {
                self.escaped = false;
            } else if self.in_string {
                match byte {
                    b'"' => self.in_string = false,
                    b'\\' => self.escaped = true,
                    _ => {}
                }
            } else {
                match byte {
                    b'"' => self.in_string = true,
                    b'{' | b'[' => self.depth += 1,
                    b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                    _ => {}
                }
            }
        }
    }

    fn is_open(&self) -> bool {
        self.in_transaction || self.depth > 0 || self.in_string
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]
mod tests {
    use braid_gir::{
        Abort, Begin, Commit, JsonWriter, Message, Prepared, RollbackPrepared, SegmentStart,
        StreamHeader, StreamedCommit,
    };

    use super::*;

    /// Everything that was written, and the length that a cut leaves.
    #[derive(Default)]
    struct Kept {
        bytes: Vec<u8>,
        whole: usize,
    }

    impl Lines for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
            self.bytes.extend_from_slice(bytes);
            Ok(())
        }

        fn mark_whole(&mut self) {
            self.whole = self.bytes.len();
        }
    }

    impl Kept {
        fn is_whole(&self) -> bool {
            self.whole == self.bytes.len()
        }

        /// Number of lines that a cut leaves.
        fn lines(&self) -> usize {
            let left = self.bytes[..self.whole].iter();
            left.filter(|byte| **byte == b'\n').count()
        }
    }

    /// A stream, and the output that was kept.
    struct Stream {
        renderer: Renderer,
        /// The writer of a server that sends JSON.
        server: Option<JsonWriter>,
        kept: Kept,
        until: Option<u64>,
    }

    impl Stream {
        fn new(format: Format) -> Self {
            Self {
                renderer: Renderer::new(format),
                server: (format == Format::Json).then(JsonWriter::default),
                kept: Kept::default(),
                until: None,
            }
        }

        fn give(&mut self, lsn: u64, body: &[u8]) -> Result<Outcome, Error> {
            let (until, kept) = (self.until, &mut self.kept);
            self.renderer.message(lsn, body, until, kept)
        }

        /// Returns the position that may be confirmed after a message, if any, and how many lines a
        /// cut would leave.
        fn message(&mut self, lsn: u64, body: &[u8]) -> (Option<u64>, usize) {
            let complete = self.give(lsn, body).unwrap().complete;
            (complete.filter(|_| self.kept.is_whole()), self.kept.lines())
        }

        /// Feeds records: in one message, as a server sends GIR; or one message for each, as it
        /// sends JSON. The result is that of the last message.
        fn records(&mut self, records: &[Record<'_>]) -> (Option<u64>, usize) {
            if self.server.is_some() {
                let mut last = (None, 0);
                for record in records {
                    let mut object = String::new();
                    let server = self.server.as_mut().unwrap();
                    server.record(record, &mut object).unwrap();
                    last = self.message(0, object.as_bytes());
                }
                return last;
            }
            let mut writer = Writer::new();
            for record in records {
                writer.copy(record).unwrap();
            }
            self.message(0, writer.frame())
        }
    }

    const HEADER: Record<'_> = Record::StreamHeader(StreamHeader {
        node_id: [0; 16],
        system_identifier: 1,
        server_version: 150_000,
        node_name: "tokyo",
        database: "shop",
        charset: "UTF8",
    });

    fn about(lsn: u64) -> Begin<'static> {
        Begin {
            commit_lsn: lsn,
            commit_timestamp: 0,
            xid: 7,
            origin: "",
            origin_lsn: 0,
        }
    }

    fn begin(lsn: u64) -> Record<'static> {
        Record::Begin(about(lsn))
    }

    fn commit(lsn: u64) -> Record<'static> {
        Record::Commit(Commit {
            commit_lsn: lsn,
            end_lsn: lsn + 5,
            commit_timestamp: 0,
        })
    }

    fn note(transactional: bool) -> Record<'static> {
        Record::Message(Message {
            transactional,
            lsn: 1,
            prefix: "p",
            content: b"c",
        })
    }

    fn prepared(lsn: u64) -> Prepared<'static> {
        Prepared {
            begin: about(lsn),
            end_lsn: lsn + 5,
            gid: "two",
        }
    }

    #[test]
    fn text_is_whole_between_transactions() {
        let mut stream = Stream::new(Format::Text);
        assert_eq!(stream.records(&[HEADER, begin(10)]), (None, 1));
        assert_eq!(stream.records(&[note(true), note(false)]), (None, 1));
        assert_eq!(stream.records(&[commit(10)]), (Some(15), 5));
        // A keepalive after it allows confirming.
        assert_eq!(stream.records(&[note(false)]), (None, 6));
        assert!(stream.kept.is_whole());
        // The first of two in one message is whole, but the written text as a whole is not.
        let two = [begin(20), commit(20), begin(30)];
        assert_eq!(stream.records(&two), (None, 8));
        assert!(!stream.kept.is_whole());
        assert_eq!(stream.records(&[commit(30)]), (Some(35), 10));
    }

    #[test]
    fn text_and_json_are_whole_between_segments_and_prepared_transactions() {
        for format in [Format::Text, Format::Json] {
            whole_between_segments_and_prepared_transactions(format);
        }
    }

    fn whole_between_segments_and_prepared_transactions(format: Format) {
        let mut stream = Stream::new(format);
        let segment = |first| Record::SegmentStart(SegmentStart { first, xid: 7 });
        assert_eq!(stream.records(&[HEADER, segment(true)]), (None, 1));
        let more = [note(true), Record::SegmentStop];
        assert_eq!(stream.records(&more), (None, 4));
        // Other transactions may be confirmed between segments.
        assert_eq!(stream.records(&[begin(10), commit(10)]), (Some(15), 6));
        let abort = Record::Abort(Abort { xid: 7, subxid: 8 });
        assert_eq!(stream.records(&[abort]), (None, 7));
        assert!(stream.kept.is_whole());
        let committed = StreamedCommit {
            begin: about(20),
            end_lsn: 25,
        };
        let streamed = [Record::StreamedCommit(committed)];
        assert_eq!(stream.records(&streamed), (Some(25), 8));
        let open = [Record::BeginPrepared(prepared(30))];
        assert_eq!(stream.records(&open), (None, 8));
        let end = [Record::Prepare(prepared(30).commit())];
        assert_eq!(stream.records(&end), (Some(35), 10));
        let known = [Record::CommitPrepared(prepared(40))];
        assert_eq!(stream.records(&known), (Some(45), 11));
        let rollback = RollbackPrepared {
            prepared: prepared(50),
            prepare_end_lsn: 35,
            prepare_timestamp: 0,
        };
        let rolled_back = [Record::RollbackPrepared(rollback)];
        assert_eq!(stream.records(&rolled_back), (Some(55), 12));
        let streamed = [
            segment(true),
            Record::SegmentStop,
            Record::StreamedPrepare(prepared(60)),
        ];
        assert_eq!(stream.records(&streamed), (Some(65), 15));
    }

    #[test]
    fn text_and_json_end_before_what_commits_later() {
        let streamed = StreamedCommit {
            begin: about(20),
            end_lsn: 25,
        };
        let rollback = RollbackPrepared {
            prepared: prepared(20),
            prepare_end_lsn: 15,
            prepare_timestamp: 0,
        };
        let ends = [
            begin(20),
            Record::StreamedCommit(streamed),
            Record::BeginPrepared(prepared(20)),
            Record::StreamedPrepare(prepared(20)),
            Record::CommitPrepared(prepared(20)),
            Record::RollbackPrepared(rollback),
        ];
        for (format, complete) in [(Format::Text, Some(15)), (Format::Json, None)] {
            for end in &ends {
                let mut stream = Stream::new(format);
                stream.until = Some(20);
                let records = [
                    HEADER,
                    Record::SegmentStart(SegmentStart {
                        first: true,
                        xid: 7,
                    }),
                    Record::SegmentStop,
                    begin(10),
                    commit(10),
                    *end,
                ];
                assert_eq!(stream.records(&records), (complete, 5));
                assert!(stream.kept.is_whole());
            }
        }
    }

    #[test]
    fn json_is_whole_between_transactions() {
        let header = r#"{"operation":"stream","version":1,"node_id":"00000000-0000-0000-0000-000000000000","system_identifier":"1","server_version":150000,"node":"tokyo","database":"shop","charset":"UTF8"}"#;
        let about = r#""transaction":{"xid":7,"lsn":"0/A","commit_time":"2024-02-29T12:30:00Z"}"#;
        let begin = format!(r#"{{"operation":"begin",{about}}}"#);
        let note = r#"{"operation":"message","transactional":false,"lsn":"0/1","prefix":"p","content":"c"}"#;
        let commit = r#"{"operation":"commit","lsn":"0/A","end_lsn":"0/F","commit_time":"2024-02-29T12:30:00Z"}"#;
        let later = r#"{"operation":"begin","transaction":{"xid":8,"lsn":"0/14","commit_time":"2024-02-29T12:30:00Z"}}"#;
        let mut stream = Stream::new(Format::Json);
        assert_eq!(stream.message(1, header.as_bytes()), (None, 1));
        assert_eq!(stream.message(1, note.as_bytes()), (None, 2));
        assert_eq!(stream.message(2, begin.as_bytes()), (None, 2));
        assert_eq!(stream.message(3, note.as_bytes()), (None, 2));
        assert_eq!(stream.message(15, commit.as_bytes()), (Some(15), 5));
        stream.until = Some(20);
        assert_eq!(stream.message(20, later.as_bytes()), (None, 5));
        assert!(stream.kept.is_whole());
    }

    #[test]
    fn a_wal2json_object_is_whole_at_its_end() {
        let mut stream = Stream::new(Format::Wal2json);
        let object = br#"{"change":[{"kind":"insert","columnvalues":["a \"{[ \\"]}]}"#;
        assert_eq!(stream.message(10, object), (Some(10), 1));
        // With line breaks in it, as with pretty-print.
        assert_eq!(
            stream.message(20, b"{\n\t\"change\": [\n\t]\n}"),
            (Some(20), 5)
        );
        // In parts, one of them ending inside a string, which the server does not do.
        assert_eq!(stream.message(21, br#"{"change":["#), (None, 5));
        assert_eq!(stream.message(22, br#"{"kind":"insert"}"#), (None, 5));
        assert_eq!(stream.message(23, br#",{"kind":"}]}"#), (None, 5));
        assert_eq!(stream.message(24, br#"]}"}"#), (None, 5));
        assert!(!stream.kept.is_whole());
        assert_eq!(stream.message(30, b"]}"), (Some(30), 10));
    }

    #[test]
    fn a_wal2json_transaction_is_whole_at_its_end() {
        let mut stream = Stream::new(Format::Wal2json);
        let message = br#"{"action":"M","transactional":false,"prefix":"p","content":"{"}"#;
        assert_eq!(stream.message(5, message), (Some(5), 1));
        assert_eq!(stream.message(6, br#"{"action":"B","xid":7}"#), (None, 1));
        assert_eq!(
            stream.message(7, br#"{"action":"I","schema":"s"}"#),
            (None, 1)
        );
        assert_eq!(stream.message(8, message), (None, 1));
        assert_eq!(
            stream.message(20, br#"{"action":"C","xid":7}"#),
            (Some(20), 5)
        );
        // Without B and C each change is whole.
        assert_eq!(
            stream.message(30, br#"{"action":"I","schema":"s"}"#),
            (Some(30), 6)
        );
        stream.until = Some(30);
        assert_eq!(stream.message(31, message), (None, 6));
    }

    #[test]
    fn errors_name_the_message_and_the_record() {
        let error = |format, bodies: &[&[u8]]| {
            let mut stream = Stream::new(format);
            let mut results = bodies.iter().map(|body| stream.give(0x1a2_b3c4, body));
            results.find_map(Result::err).unwrap().to_string()
        };
        let frame = |records: &[Record<'_>]| {
            let mut writer = Writer::new();
            records
                .iter()
                .try_for_each(|record| writer.copy(record))
                .unwrap();
            writer.frame().to_vec()
        };
        let mut cut = frame(&[HEADER, begin(10), note(true)]);
        let offset = frame(&[HEADER, begin(10)]).len();
        cut.pop();
        let expected = format!(
            "invalid data from the server: record 3 (Message, at byte {offset} of the message at 0/1A2B3C4): record ends inside record"
        );
        assert_eq!(error(Format::Text, &[&cut]), expected);
        let twice = frame(&[begin(10)]);
        assert_eq!(
            error(Format::Text, &[&frame(&[HEADER]), &twice, &twice]),
            "invalid order of data from the server: record 1 (Begin, at byte 0 of the message at 0/1A2B3C4): Begin where a change or the Commit of the open transaction was expected"
        );
        assert_eq!(
            error(Format::Json, &[br#"{"operation":"upsert"}"#]),
            r#"invalid JSON from the server: message at 0/1A2B3C4: unknown operation "upsert", at byte 13 (/operation)"#
        );
        let object = br#"{"operation":"begin","transaction":{"lsn":"0/A","commit_time":"2024-02-29T12:30:00Z"}}"#;
        assert_eq!(
            error(Format::Json, &[object]),
            "invalid order of JSON from the server: message at 0/1A2B3C4: Begin where the stream header was expected"
        );
    }
}
