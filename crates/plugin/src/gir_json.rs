//! The format `gir-json`: the records of `gir`, each as a JSON object and a message of its own.
//!
//! All earlier steps are those of `gir`: publications, row filters, column lists and the origin
//! filter. The difference is in the values: types without a portable form have their text form, and
//! values that are not in WAL may be asked for ([`super::fetch`]).
//!
//! A client may confirm the position of any object. So of the objects of one frame, which ends a
//! transaction or a record about one, only the last has the end as its position. The objects before
//! it, such as a stream header, have a position before the record that ends the transaction, which
//! is then sent again. Segments hold nothing back: their positions lie before the end of their
//! transaction.

use std::collections::HashSet;

use braid_decoder::JsonRequest;
use braid_gir::{
    Change, JsonOptions, JsonWriter, Reader, Record, SchemaDetail, SchemaNumber, Tag, Value,
};
use braid_postgres::decoding::Context;
use braid_postgres::encoding;

use super::delivery::{Delivery, write_message};
use super::fetch::Fetcher;
use super::report::or_raise;
use super::running::Unwatched;
use super::scratch::{Scratch, StreamMemory};
use super::transaction::in_transaction;

/// Frames as JSON.
pub(super) struct GirJson {
    writer: JsonWriter,
    fetch: Option<Fetching>,
    /// Where the record lies that ends the current frame's transaction; 0: there is none.
    end_record: u64,
    text: String,
    scratch: Scratch,
}

/// The state that is needed for asking.
#[derive(Default)]
struct Fetching {
    fetcher: Fetcher,
    /// Schema records by number, as they came.
    schemas: std::collections::HashMap<SchemaNumber, Vec<u8>>,
}

impl GirJson {
    /// A stream that has sent nothing.
    pub(super) fn new(request: JsonRequest, ctx: Context<'_>) -> Self {
        let options = JsonOptions {
            schema: if request.schema_once {
                SchemaDetail::Once
            } else {
                SchemaDetail::Each
            },
            keys: request.keys,
            complete: request.fetch,
        };
        Self {
            writer: JsonWriter::with_decoder(options, encoding::text_from_server),
            fetch: request.fetch.then(Fetching::default),
            end_record: 0,
            text: String::new(),
            scratch: Scratch::new(StreamMemory::new(ctx, c"braid JSON")),
        }
    }

    /// The record as JSON, in `text`.
    fn write(&mut self, record: &Record<'_>, raw: &[u8]) {
        self.text.clear();
        let mut answer = None;
        if let Some(fetching) = &mut self.fetch {
            match record {
                Record::StreamHeader(_) => fetching.schemas.clear(),
                Record::Schema(schema) => {
                    fetching.schemas.insert(schema.number, raw.to_vec());
                }
                Record::Change(change) if lacks_values(change) => {
                    let schema = fetching.schemas.get(&change.header.schema);
                    answer = schema.and_then(|schema| fetching.fetcher.ask(schema, raw));
                }
                _ => {}
            }
        }
        let fetched = answer.as_deref().and_then(row_in);
        or_raise(
            self.writer
                .record_with(record, fetched.as_ref(), &mut self.text),
        );
        if !encoding::is_utf8() {
            self.text = encoding::json_in_ascii(&self.text);
        }
    }
}

impl Delivery for GirJson {
    fn is_text(&self) -> bool {
        true
    }

    fn deliver(&mut self, ctx: Context<'_>, frame: &[u8]) {
        let location = ctx.write_location();
        // Header and schemas may stand before the Begin.
        if let Some(lsn) = end_record_in(frame) {
            self.end_record = lsn;
        }
        let mut reader = Reader::new(frame);
        let mut rest = frame;
        while let Some(record) = or_raise(reader.next_record()) {
            let (raw, behind) = rest.split_at(rest.len() - reader.remaining());
            rest = behind;
            let is_end = is_end(&record);
            let at = if is_end || self.end_record == 0 {
                location
            } else {
                location.min(self.end_record)
            };
            if is_end {
                self.end_record = 0;
            }
            let scratch = Scratch::new(self.scratch.memory());
            scratch.run(|| {
                if matches!(record, Record::Change(_)) && !encoding::is_utf8() {
                    // A conversion is looked up in the catalog. The transaction may be rolled back
                    // meanwhile; that must not end the look-up in the middle of a frame.
                    let _unwatched = Unwatched::enter();
                    in_transaction(|| self.write(&record, raw))
                } else {
                    self.write(&record, raw);
                }
            });
            ctx.set_write_location(at);
            write_message(ctx, self.text.as_bytes(), true);
            scratch.reset();
        }
        self.text.shrink_to(KEPT_BYTES);
        ctx.set_write_location(location);
    }

    fn keep_schemas(&mut self, in_use: &HashSet<SchemaNumber>) {
        self.writer.keep_schemas(|number| in_use.contains(&number));
        if let Some(fetching) = &mut self.fetch {
            fetching.schemas.retain(|number, _| in_use.contains(number));
        }
    }
}

/// The position of the WAL record that ends the frame's transaction: its commit, its PREPARE, or
/// the end of a prepared one. A frame is of one transaction at most.
fn end_record_in(frame: &[u8]) -> Option<u64> {
    let mut reader = Reader::new(frame);
    while let Some((tag, body)) = reader.next_raw().ok()? {
        if !matches!(
            tag,
            Tag::Begin
                | Tag::StreamedCommit
                | Tag::BeginPrepared
                | Tag::StreamedPrepare
                | Tag::CommitPrepared
                | Tag::RollbackPrepared
        ) {
            continue;
        }
        let begin = match Record::read(tag, body).ok()? {
            Record::Begin(begin) => begin,
            Record::StreamedCommit(commit) => commit.begin,
            Record::BeginPrepared(prepared)
            | Record::StreamedPrepare(prepared)
            | Record::CommitPrepared(prepared) => prepared.begin,
            Record::RollbackPrepared(rollback) => rollback.prepared.begin,
            _ => continue,
        };
        return Some(begin.commit_lsn);
    }
    None
}

/// Whether a transaction, or the records about it, end with this record.
fn is_end(record: &Record<'_>) -> bool {
    matches!(
        record,
        Record::Commit(_)
            | Record::Prepare(_)
            | Record::StreamedCommit(_)
            | Record::StreamedPrepare(_)
            | Record::CommitPrepared(_)
            | Record::RollbackPrepared(_)
    )
}

/// How many bytes of text are kept for the next frame.
const KEPT_BYTES: usize = 64 * 1024;

/// The after image lacks something that the before image does not have either.
fn lacks_values(change: &Change<'_>) -> bool {
    let Some(after) = &change.after else {
        return false;
    };
    let mut before = change.before.iter().flat_map(braid_gir::Image::values);
    after.values().any(|value| {
        let known = before
            .next()
            .is_some_and(|value| value.is_ok_and(|value| value != Value::None));
        !known && value.is_ok_and(|value| value == Value::None)
    })
}

/// The row in a fetcher's answer.
fn row_in(answer: &[u8]) -> Option<braid_gir::Image<'_>> {
    match Reader::new(answer).next_record() {
        Ok(Some(Record::Change(change))) => change.after,
        _ => None,
    }
}
