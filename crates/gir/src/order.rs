//! The order of a stream's records (docs/PROTOCOL.md, section 3): what is missing, comes twice or
//! comes too late is found here, where [`crate::Reader`] takes each record for itself.
//!
//! For readers that trust nothing. Records that come only with an option are taken wherever they
//! may stand. Memory is two bytes for each schema, which takes more in the stream, and one id for
//! each transaction that came in segments and has not ended.
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

/// Prefix of the messages that say how far the server is; alone of all records they may stand
/// before the stream header.
const POSITION_PREFIX: &str = "braid.position";

/// Why a record may not stand where it does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// A record of another kind has to come here.
    #[error("{} where {expected} was expected", found.name())]
    Unexpected {
        /// What came.
        found: Tag,
        /// What may come here.
        expected: &'static str,
    },
    /// Schema numbers start at 0 and grow by one.
    #[error("schema {found} where schema {expected} was expected")]
    SchemaNumber {
        /// What came.
        found: u32,
        /// What has to come.
        expected: usize,
    },
    /// A change or Truncate of a schema that did not come, or an image that is not of its schema.
    #[error(transparent)]
    Schema(#[from] Error),
    /// A Commit or Prepare of another transaction than the one that is open.
    #[error("end of the transaction at {} where that of the transaction at {} was expected", lsn_text(*.found), lsn_text(*.expected))]
    OtherTransaction {
        /// LSN in the record.
        found: u64,
        /// LSN in the record that opened the transaction.
        expected: u64,
    },
    /// A transaction comes again, or too late: transactions come in the order of their ends.
    #[error("transaction at {} after one that ends at {}", lsn_text(*.found), lsn_text(*.after))]
    Backward {
        /// LSN in the record.
        found: u64,
        /// Where the transaction before it ended.
        after: u64,
    },
    /// Something is said of a transaction of which no segment came, or which has ended.
    #[error("transaction {0}, of which no segment came")]
    NoSegment(u32),
    /// A segment is the first of its transaction, of which segments came before.
    #[error("first segment of transaction {0}, of which segments came before")]
    FirstSegment(u32),
}

/// What is open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    /// The stream header has not come.
    #[default]
    Start,
    /// Outside of all transactions.
    Between,
    /// From the Begin of the transaction at this LSN to its Commit.
    Transaction(u64),
    /// From its Begin prepared to its Prepare.
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

/// Sees each record of a stream and says which of them may not stand where it does. One for each
/// stream: a new connection starts a new one.
#[derive(Debug, Clone, Default)]
pub struct StreamOrder {
    place: Place,
    /// Number of columns of each schema.
    schemas: Vec<u16>,
    /// Where the last transaction ended that ended.
    end: u64,
    /// Transactions of which segments came, and no end.
    running: HashSet<u32>,
}

type Result = std::result::Result<(), OrderError>;

impl StreamOrder {
    /// A stream of which nothing has come.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a transaction, up to its Commit or Prepare, or a segment, up to its end, is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !matches!(self.place, Place::Start | Place::Between)
    }

    /// The next record. After an error the stream is of no more use.
    ///
    /// # Errors
    /// [`OrderError`], when the record may not stand here.
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
                // It may have come in segments once more since its Prepare was confirmed.
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

    /// A transaction comes, or has ended: not before the last one ended.
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

    /// A transaction that came in segments has ended.
    fn streamed(&mut self, xid: u32) -> Result {
        if !self.running.remove(&xid) {
            return Err(OrderError::NoSegment(xid));
        }
        Ok(())
    }
}
