//! What the plugin's messages become, and which positions they make safe to report.

use braid_gir::{Detail, JsonError, JsonReader, Reader, Record, Schemas, Writer, render};

use crate::options::Format;

/// What came of a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Everything before this position is complete, once what was written is flushed.
    pub complete: Option<u64>,
    /// A transaction ended with the message.
    pub whole: bool,
    /// What follows is past the position at which to end; nothing of it was written.
    pub past_end: bool,
}

/// Makes lines of messages; one for each connection, because numbers of schemas are a stream's own.
pub enum Renderer {
    /// GIR as text.
    Text(Schemas, String),
    /// JSON from the server, which is read along to know where transactions end.
    Json(Box<JsonReader>, Writer),
    /// Already as it should be. The position of the message before.
    AsIs(u64),
}

impl Renderer {
    /// For a new stream.
    pub fn new(format: Format) -> Self {
        match format {
            Format::Text => Self::Text(Schemas::new(), String::new()),
            Format::Json => Self::Json(Box::default(), Writer::new()),
            Format::Wal2json => Self::AsIs(0),
        }
    }

    /// Hand the lines of a message at `lsn` to `write`. Transactions that commit at or after `until` are left out.
    ///
    /// # Errors
    /// That of the first record that is not valid, or of `write`.
    pub fn message<E: From<braid_gir::Error> + From<JsonError>>(
        &mut self,
        lsn: u64,
        body: &[u8],
        until: Option<u64>,
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Outcome, E> {
        match self {
            Self::Text(schemas, line) => {
                let mut outcome = Outcome::default();
                let mut reader = Reader::new(body);
                while let Some(record) = reader.next_record()? {
                    outcome.see(&record, until);
                    if outcome.past_end {
                        break;
                    }
                    if let Record::Schema(schema) = &record {
                        schemas.remember(schema);
                    }
                    *line = render(&record, schemas, Detail::Full);
                    line.push('\n');
                    write(line.as_bytes())?;
                }
                Ok(outcome)
            }
            Self::Json(json, records) => {
                let mut outcome = Outcome::default();
                records.clear(KEPT_BYTES);
                json.read(body, records)?;
                let mut reader = Reader::new(records.frame());
                while let Some(record) = reader.next_record()? {
                    outcome.see(&record, until);
                }
                if !outcome.past_end {
                    write(body)?;
                    write(b"\n")?;
                }
                Ok(outcome)
            }
            Self::AsIs(before) => {
                let mut outcome = Outcome::default();
                if until.is_some_and(|until| lsn > until) {
                    outcome.past_end = true;
                    return Ok(outcome);
                }
                write(body)?;
                write(b"\n")?;
                // Several messages may have one position; only another one, or a keepalive, says that all of them came.
                outcome.complete = (lsn > *before && *before > 0).then_some(*before);
                *before = lsn;
                Ok(outcome)
            }
        }
    }
}

/// How many bytes of records are kept for the next message.
const KEPT_BYTES: usize = 64 * 1024;

impl Outcome {
    /// A record is next. Transactions that commit at or after `until` are past the end.
    fn see(&mut self, record: &Record<'_>, until: Option<u64>) {
        match record {
            Record::Begin(begin) => {
                self.past_end |= until.is_some_and(|until| begin.commit_lsn >= until);
                self.whole = false;
            }
            Record::Commit(commit) => {
                self.complete = Some(commit.end_lsn);
                self.whole = true;
            }
            _ => self.whole = false,
        }
    }
}
