//! Checks the order of a stream's records (docs/PROTOCOL.md, section 3). Missing, repeated and late
//! records are found here, as [`crate::Reader`] handles each record separately.
//!
//! For readers that trust nothing. Records that depend on an option of the stream are accepted
//! wherever they are allowed. Memory: two bytes for each schema, which takes more in the stream,
//! and one id for each transaction that came in segments and has not ended.
//!
//! Not for: images, whose values the record's own reader has checked.

use std::collections::HashSet;

use crate::change::Change;
use crate::error::Error;
use crate::lsn::lsn_text;
use crate::message::Message;
use crate::record::{Record, Tag};
use crate::schema::SchemaNumber;
use crate::segment::{Abort, SegmentStart};
use crate::transaction::{Begin, Commit};

/// Prefix of the messages that report the server's position. Only these records may precede the
/// stream header.
const POSITION_PREFIX: &str = "braid.position";

/// Reason why a record is not allowed in its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// A record of another kind was required.
    #[error("{} where {expected} was expected", found.name())]
    Unexpected {
        /// The record that came.
        found: Tag,
        /// The allowed records.
        expected: &'static str,
    },
    /// Schema numbers start at 0 and increase by one.
    #[error("schema {found} where schema {expected} was expected")]
    SchemaNumber {
        /// The number that came.
        found: u32,
        /// The required number.
        expected: usize,
    },
    /// A change or Truncate of an unannounced schema, or an image that does not match its schema.
    #[error(transparent)]
    Schema(#[from] Error),
    /// A Commit or Prepare of another transaction than the open one.
    #[error("end of the transaction at {} where that of the transaction at {} was expected", lsn_text(*.found), lsn_text(*.expected))]
    OtherTransaction {
        /// LSN in the record.
        found: u64,
        /// LSN in the record that opened the transaction.
        expected: u64,
    },
    /// A transaction came again, or too late: transactions come in the order of their ends.
    #[error("transaction at {} after one that ends at {}", lsn_text(*.found), lsn_text(*.after))]
    Backward {
        /// LSN in the record.
        found: u64,
        /// End of the previous transaction.
        after: u64,
    },
    /// A record refers to a transaction of which no segment came, or which has ended.
    #[error("transaction {0}, of which no segment came")]
    NoSegment(u32),
    /// A segment claims to be the first of its transaction, but others came before.
    #[error("first segment of transaction {0}, of which segments came before")]
    FirstSegment(u32),
}

/// The place in the stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    /// Before the stream header.
    #[default]
    Start,
    /// Outside of all transactions.
    Between,
    /// From the Begin of the transaction at this LSN to its Commit.
    Transaction(u64),
    /// From the Begin prepared of the transaction at this LSN to its Prepare.
    Prepared(u64),
    /// From a Segment start to the segment's end.
    Segment,
}

impl Place {
    fn expected(self) -> &'static str {
        match self {
            Self::Start => "the stream header",
            Self::Between => "something outside of a transaction",
            Self::Transaction(_) => "a change or the Commit of the open transaction",
            Self::Prepared(_) => "a change or the Prepare of the open transaction",
            Self::Segment => "a change or the end of the open segment",
        }
    }
}

/// Checks each record of a stream. One for each stream: a new connection needs a new one.
#[derive(Debug, Clone, Default)]
pub struct StreamOrder {
    place: Place,
    /// Number of columns of each schema.
    schemas: Vec<u16>,
    /// End of the last finished transaction.
    end: u64,
    /// Transactions of which segments came, but no end.
    running: HashSet<u32>,
}

type Result = std::result::Result<(), OrderError>;

impl StreamOrder {
    /// Returns the state before the first record.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether a transaction (up to its Commit or Prepare) or a segment (up to its end) is
    /// open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !matches!(self.place, Place::Start | Place::Between)
    }

    /// Checks the next record. After an error the stream must not be continued.
    ///
    /// # Errors
    /// [`OrderError`] if the record is not allowed here.
    pub fn see(&mut self, record: &Record<'_>) -> Result {
        match record {
            Record::StreamHeader(_) => {
                if self.place != Place::Start {
                    return Err(self.unexpected(record));
                }
                self.place = Place::Between;
                return Ok(());
            }
            Record::Message(message) => return self.message(message, record),
            _ if self.place == Place::Start => return Err(self.unexpected(record)),
            _ => {}
        }
        match (record, self.place) {
            (Record::Schema(schema), _) => self.schema(schema.number, schema.column_count()),
            (Record::Change(change), _) if self.is_open() => self.change(change),
            (Record::Truncate(truncate), _) if self.is_open() => truncate
                .schemas()
                .try_for_each(|number| self.columns(number).map(drop)),
            (Record::Begin(begin), Place::Between) => {
                self.forward(begin)?;
                self.place = Place::Transaction(begin.commit_lsn);
                Ok(())
            }
            (Record::Commit(end), Place::Transaction(open))
            | (Record::Prepare(end), Place::Prepared(open)) => self.end(end, open),
            (Record::BeginPrepared(prepared), Place::Between) => {
                self.forward(&prepared.begin)?;
                self.place = Place::Prepared(prepared.begin.commit_lsn);
                Ok(())
            }
            (Record::SegmentStart(start), Place::Between) => self.segment(*start),
            (Record::SegmentStop, Place::Segment) => {
                self.place = Place::Between;
                Ok(())
            }
            (Record::Subtransaction(_), Place::Segment) => Ok(()),
            (Record::Abort(abort), Place::Between) => self.abort(*abort),
            (Record::StreamedCommit(commit), Place::Between) => {
                self.forward(&commit.begin)?;
                self.end = commit.end_lsn;
                self.streamed(commit.begin.xid)
            }
            (Record::StreamedPrepare(prepared), Place::Between) => {
                self.forward(&prepared.begin)?;
                self.end = prepared.end_lsn;
                self.streamed(prepared.begin.xid)
            }
            (Record::CommitPrepared(prepared), Place::Between) => {
                self.forward(&prepared.begin)?;
                self.end = prepared.end_lsn;
                // After its Prepare was confirmed, segments of the transaction may have come once
                // more.
                self.running.remove(&prepared.begin.xid);
                Ok(())
            }
            (Record::RollbackPrepared(rollback), Place::Between) => {
                self.forward(&rollback.prepared.begin)?;
                self.end = rollback.prepared.end_lsn;
                self.running.remove(&rollback.prepared.begin.xid);
                Ok(())
            }
            _ => Err(self.unexpected(record)),
        }
    }

    fn unexpected(&self, record: &Record<'_>) -> OrderError {
        OrderError::Unexpected {
            found: record.tag(),
            expected: self.place.expected(),
        }
    }

    fn message(&self, message: &Message<'_>, record: &Record<'_>) -> Result {
        let fits = match self.place {
            Place::Start => !message.transactional && message.prefix == POSITION_PREFIX,
            Place::Between => !message.transactional,
            Place::Transaction(_) | Place::Prepared(_) | Place::Segment => true,
        };
        if fits {
            return Ok(());
        }
        Err(match self.place {
            Place::Between => OrderError::Unexpected {
                found: Tag::Message,
                expected: "a message that is not transactional",
            },
            _ => self.unexpected(record),
        })
    }

    fn schema(&mut self, number: SchemaNumber, columns: u16) -> Result {
        let expected = self.schemas.len();
        if usize::try_from(number.0) != Ok(expected) {
            return Err(OrderError::SchemaNumber {
                found: number.0,
                expected,
            });
        }
        self.schemas.push(columns);
        Ok(())
    }

    fn columns(&self, number: SchemaNumber) -> std::result::Result<u16, OrderError> {
        let columns = usize::try_from(number.0)
            .ok()
            .and_then(|number| self.schemas.get(number));
        Ok(*columns.ok_or(Error::UnknownSchema(number.0))?)
    }

    fn change(&self, change: &Change<'_>) -> Result {
        let expected = self.columns(change.header.schema)?;
        for image in [&change.before, &change.after].into_iter().flatten() {
            let found = image.columns();
            if found != expected {
                let expected = usize::from(expected);
                return Err(Error::ColumnCount { found, expected }.into());
            }
        }
        Ok(())
    }

    /// Checks that a transaction does not come before the end of the previous one.
    fn forward(&self, begin: &Begin<'_>) -> Result {
        if begin.commit_lsn < self.end {
            return Err(OrderError::Backward {
                found: begin.commit_lsn,
                after: self.end,
            });
        }
        Ok(())
    }

    fn end(&mut self, end: &Commit, open: u64) -> Result {
        if end.commit_lsn != open {
            return Err(OrderError::OtherTransaction {
                found: end.commit_lsn,
                expected: open,
            });
        }
        self.end = end.end_lsn;
        self.place = Place::Between;
        Ok(())
    }

    fn segment(&mut self, start: SegmentStart) -> Result {
        if start.first != self.running.insert(start.xid) {
            return Err(if start.first {
                OrderError::FirstSegment(start.xid)
            } else {
                OrderError::NoSegment(start.xid)
            });
        }
        self.place = Place::Segment;
        Ok(())
    }

    fn abort(&mut self, abort: Abort) -> Result {
        if abort.xid == abort.subxid {
            return self.streamed(abort.xid);
        }
        if !self.running.contains(&abort.xid) {
            return Err(OrderError::NoSegment(abort.xid));
        }
        Ok(())
    }

    /// Ends a transaction that came in segments.
    fn streamed(&mut self, xid: u32) -> Result {
        if !self.running.remove(&xid) {
            return Err(OrderError::NoSegment(xid));
        }
        Ok(())
    }
}
