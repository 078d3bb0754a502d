//! The port between the plugin's callbacks (`callbacks`) and the formats in which a stream can be
//! asked for.
//!
//! The callbacks turn PostgreSQL's pointers into the values below and call the stream's [`Format`].
//! `braid_decoder::Request` reads from the options which format is wanted, and [`start`] creates
//! it. A format sees everything that is decoded and decides itself what it sends. A new format
//! needs a variant of `Request` with its options, an implementation of [`Format`] in a module of
//! its own, and an arm in [`start`]. If it only encodes the records of `gir` differently, a
//! [`super::delivery::Delivery`] is enough.
//!
//! All methods run inside of a callback: catalogs are read under the historic snapshot of the
//! change, errors leave by unwinding, and a format is dropped when the decoding context's memory
//! goes, also after an error.

use std::cell::Cell;
use std::ffi::CStr;

use braid_decoder::Request;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::decoding::{Context, Transaction, Tuple};
use braid_postgres::relation::RelationRef;
use braid_postgres::value::Value;
use pgrx::pg_sys;

use super::delivery::Frames;
use super::gir_json::GirJson;
use super::paced::Pacing;
use super::stream::GirStream;
use super::wal2json::Wal2Json;

/// A row's change. An insert has no old row, and a delete no new one. An old row exists only if the
/// replica identity put it into WAL. The rows are of the relation: a change is made from
/// PostgreSQL's change, or from a row of the extension's that describes one.
#[derive(Debug, Clone, Copy)]
pub struct Change<'c> {
    pub(crate) relation: RelationRef<'c>,
    pub(crate) action: pg_sys::ReorderBufferChangeType::Type,
    pub(crate) old: Option<Tuple<'c>>,
    pub(crate) new: Option<Tuple<'c>>,
    pub(crate) lsn: u64,
    pub(crate) author: Author,
}

impl<'c> Change<'c> {
    /// The table, open for the time of the callback.
    #[inline]
    #[must_use]
    pub fn relation(&self) -> RelationRef<'c> {
        self.relation
    }

    /// Insert, update or delete.
    #[inline]
    #[must_use]
    pub fn action(&self) -> pg_sys::ReorderBufferChangeType::Type {
        self.action
    }

    /// Whether WAL has the row before the change, or its key.
    #[inline]
    #[must_use]
    pub fn has_old(&self) -> bool {
        self.old.is_some()
    }

    /// Whether there is a row after the change.
    #[inline]
    #[must_use]
    pub fn has_new(&self) -> bool {
        self.new.is_some()
    }

    /// LSN of the change's record.
    #[inline]
    #[must_use]
    pub fn lsn(&self) -> u64 {
        self.lsn
    }

    /// The author of the change.
    #[inline]
    #[must_use]
    pub fn author(&self) -> Author {
        self.author
    }

    /// The columns of the row before the change, as far as WAL has it.
    #[must_use]
    pub fn old_values(&self) -> Option<Vec<Option<Value<'c>>>> {
        self.old.map(|row| self.values(row))
    }

    /// The columns of the row after the change.
    #[must_use]
    pub fn new_values(&self) -> Option<Vec<Option<Value<'c>>>> {
        self.new.map(|row| self.values(row))
    }

    fn values(&self, row: Tuple<'c>) -> Vec<Option<Value<'c>>> {
        // SAFETY: the rows of a change are of its relation.
        unsafe { row.values(self.relation.descriptor()) }
    }
}

/// The author of a change.
#[derive(Debug, Clone, Copy)]
pub struct Author {
    /// The transaction or subtransaction.
    pub(crate) xid: u32,
    /// Under which replication origin the change itself was written.
    pub origin: ReplOriginId,
}

/// A truncate of one or more relations.
#[derive(Debug, Clone, Copy)]
pub struct Truncation<'c> {
    /// The tables, open for the time of the callback.
    pub relations: &'c [RelationRef<'c>],
    pub(crate) cascade: bool,
    pub(crate) restart_identity: bool,
    /// LSN of the change's record.
    pub(crate) lsn: u64,
    /// The author of the truncation.
    pub author: Author,
}

/// A logical message, in the server's encoding as far as it is text at all.
#[derive(Debug, Clone, Copy)]
pub struct LogicalMessage<'c> {
    /// Part of the current transaction. A message that is not arrives outside of any transaction,
    /// and never between a transaction's changes.
    pub(crate) transactional: bool,
    /// The transaction or subtransaction; 0 where there is none.
    pub(crate) xid: u32,
    pub(crate) lsn: u64,
    pub(crate) prefix: &'c CStr,
    pub(crate) content: &'c [u8],
}

/// Why a prepared transaction is decoded.
#[derive(Debug, Clone, Copy)]
pub enum Preparation {
    /// The transaction is prepared.
    Now,
    /// The transaction was prepared before prepared transactions were to be sent, and is committed
    /// by the record with this place and time.
    Before {
        commit_lsn: u64,
        end_lsn: u64,
        /// Microseconds since 2000-01-01 UTC.
        commit_time: i64,
    },
}

/// Port: the output of one stream for the decoded changes.
pub trait Format {
    /// Whether the output is text in the server's encoding, so that SQL functions that return text
    /// may be used.
    fn is_text(&self) -> bool;

    /// Whether nothing from `origin` is wanted. Asked while WAL is read, outside of transactions:
    /// no catalog can be read.
    fn refuses_origin(&self, origin: ReplOriginId) -> bool;

    /// A record of WAL is read. Asked as [`Format::refuses_origin`] is, before it.
    fn record_read(&mut self, _ctx: Context<'_>) {}

    /// The stream of joined transactions that this is, if it can be one (`held`).
    fn joined(&mut self) -> Option<&mut GirStream> {
        None
    }

    /// When this format's messages are flushed, if that is its own to say (`paced`).
    fn paced(&mut self) -> Option<&mut Pacing> {
        None
    }

    /// Whether transactions that still run are wanted, in segments. Only then the four methods
    /// below are called.
    fn streams(&self) -> bool {
        false
    }

    /// A segment of a transaction starts, which may still run, and of which subtransactions may be
    /// rolled back later. Its changes come as those of others do.
    fn segment_started(&mut self, _ctx: Context<'_>, _txn: Transaction<'_>) {}

    /// The current segment ends. In no transaction.
    fn segment_stopped(&mut self, _ctx: Context<'_>) {}

    /// Of transaction `xid`, of which there were segments, `subxid` was rolled back: a
    /// subtransaction, or all of it. In no transaction.
    fn segments_aborted(&mut self, _ctx: Context<'_>, _xid: u32, _subxid: u32) {}

    /// A transaction has committed of which there were segments. In no transaction.
    fn segments_committed(&mut self, _ctx: Context<'_>, _txn: Transaction<'_>) {}

    /// Whether transactions are wanted when they are prepared. Only then the four methods below are
    /// called.
    fn prepares(&self) -> bool {
        false
    }

    /// Whether this transaction is not wanted before it has committed. The answer stays the same.
    /// Asked while WAL is read, outside of transactions.
    fn refuses_prepared(&self, _xid: u32) -> bool {
        false
    }

    /// A transaction starts which is, or was, prepared.
    fn begin_prepared(
        &mut self,
        _ctx: Context<'_>,
        _txn: Transaction<'_>,
        _preparation: Preparation,
    ) {
    }

    /// The current prepared transaction ends; its changes may have arrived in part if it was rolled
    /// back meanwhile. Perhaps in no transaction.
    fn prepared(&mut self, _ctx: Context<'_>, _txn: Transaction<'_>) {}

    /// A transaction is, or was, prepared of which there were segments. In no transaction.
    fn segments_prepared(
        &mut self,
        _ctx: Context<'_>,
        _txn: Transaction<'_>,
        _preparation: Preparation,
    ) {
    }

    /// A prepared transaction has committed, or, with end and time of its PREPARE, was rolled back.
    /// In no transaction.
    fn prepared_finished(
        &mut self,
        _ctx: Context<'_>,
        _txn: Transaction<'_>,
        _rolled_back: Option<(u64, pg_sys::TimestampTz)>,
    ) {
    }

    /// A transaction starts, which has committed.
    fn begin(&mut self, ctx: Context<'_>, txn: Transaction<'_>);

    /// A row was changed by the current transaction.
    fn row_changed(&mut self, ctx: Context<'_>, txn: Transaction<'_>, change: &Change<'_>);

    /// Relations were truncated by the current transaction.
    fn truncated(&mut self, ctx: Context<'_>, txn: Transaction<'_>, truncation: &Truncation<'_>);

    /// A message was emitted. There is no transaction for one that is not transactional.
    fn message(
        &mut self,
        ctx: Context<'_>,
        txn: Option<Transaction<'_>>,
        message: &LogicalMessage<'_>,
    );

    /// The current transaction is over.
    fn commit(&mut self, ctx: Context<'_>, txn: Transaction<'_>);

    /// The stream ends without an error: restores the settings of the session.
    fn leave(&mut self);
}

/// Makes the format of a stream that has sent nothing.
type Make = fn() -> Box<dyn Format>;

thread_local! {
    /// Makes the format of all streams of this process, whatever they ask for.
    static OF_PROCESS: Cell<Option<Make>> = const { Cell::new(None) };
}

/// Has this process decode into a format of its own, whatever a stream asks for.
pub fn set_format(make: Make) {
    OF_PROCESS.set(Some(make));
}

/// The format of this process, if it has one of its own.
pub(super) fn of_process() -> Option<Box<dyn Format>> {
    OF_PROCESS.get().map(|make| make())
}

/// The format that `request` asks for, of a stream that has sent nothing. In the startup callback.
pub(super) fn start(request: Request, ctx: Context<'_>) -> Box<dyn Format> {
    match request {
        Request::Gir(options) => Box::new(GirStream::new(options, Box::new(Frames), ctx)),
        Request::Wal2Json(selection, options) => Box::new(Wal2Json::new(selection, options, ctx)),
        Request::GirJson(options, json) => {
            let delivery = Box::new(GirJson::new(json, ctx));
            Box::new(GirStream::new(options, delivery, ctx))
        }
    }
}
