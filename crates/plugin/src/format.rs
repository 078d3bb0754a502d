//! The port between the plugin's callbacks (`callbacks`) and the formats in which a stream can be asked for.
//!
//! The callbacks turn PostgreSQL's pointers into the values below and call the stream's [`Format`]; which one it is,
//! `braid_decoder::Request` reads from the options and [`start`] makes. A format sees everything that is decoded and decides
//! itself what of it is sent. To add one: a variant of `Request` with its options, an implementation of [`Format`] in a module
//! of its own, an arm in [`start`]. One that says what `gir` says in another way needs less: a [`super::stream::Delivery`].
//!
//! All methods run inside of a callback: catalogs are read under the historic snapshot of the change, errors leave by
//! unwinding, and a format is dropped when the decoding context's memory goes, also after an error.

use std::cell::Cell;
use std::ffi::CStr;

use braid_decoder::{Options, Request};
use pgrx::pg_sys;

use super::gir_json::GirJson;
use super::paced::Pacing;
use super::stream::{Frames, Stream};
use super::wal2json::Wal2Json;

/// The decoding context, through which a format writes.
pub type Context = *mut pg_sys::LogicalDecodingContext;

/// A row's change. The tuples may be null: an insert has no old one, a delete no new one, and an old one is only there where
/// the replica identity put it into WAL.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    /// The table, open for the time of the callback.
    pub relation: pg_sys::Relation,
    /// Insert, update or delete.
    pub action: pg_sys::ReorderBufferChangeType::Type,
    /// The row before the change, as far as WAL has it.
    pub old: pg_sys::HeapTuple,
    /// The row after the change.
    pub new: pg_sys::HeapTuple,
    /// LSN of the change's record.
    pub lsn: u64,
    /// Who made it.
    pub author: Author,
}

/// Who made a change.
#[derive(Debug, Clone, Copy)]
pub struct Author {
    /// The transaction or subtransaction.
    pub(crate) xid: u32,
    /// Under which replication origin the change itself was written.
    pub origin: pg_sys::RepOriginId,
}

/// A truncate of one or more relations.
#[derive(Debug, Clone, Copy)]
pub struct Truncation<'c> {
    /// The tables, open for the time of the callback.
    pub relations: &'c [pg_sys::Relation],
    pub(crate) cascade: bool,
    pub(crate) restart_identity: bool,
    /// LSN of the change's record.
    pub(crate) lsn: u64,
    /// Who made it.
    pub author: Author,
}

/// A logical message, in the server's encoding as far as it is text at all.
#[derive(Debug, Clone, Copy)]
pub struct LogicalMessage<'c> {
    /// Part of the transaction in hand. One that is not comes outside of any, and never between a transaction's changes.
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
    /// It is prepared.
    Now,
    /// It was prepared before that was to be told, and is committed by the record with this place and time.
    Before {
        commit_lsn: u64,
        end_lsn: u64,
        /// Microseconds since 2000-01-01 UTC.
        commit_time: i64,
    },
}

/// Port: what one stream makes of what is decoded.
pub trait Format {
    /// Whether what is written is text in the server's encoding, so that SQL functions that return text may be used.
    fn is_text(&self) -> bool;

    /// Whether nothing from `origin` is wanted. Asked while WAL is read, outside of transactions: no catalog can be read.
    fn refuses_origin(&self, origin: pg_sys::RepOriginId) -> bool;

    /// A record of WAL is read. Asked as [`Format::refuses_origin`] is, before it.
    ///
    /// # Safety
    /// The context is valid, and its reader holds the record.
    unsafe fn record_read(&mut self, _ctx: Context) {}

    /// The stream of joined transactions that this is, if it can be one (`held`).
    fn joined(&mut self) -> Option<&mut Stream> {
        None
    }

    /// When this format's messages are flushed, if that is its own to say (`paced`).
    fn paced(&mut self) -> Option<&mut Pacing> {
        None
    }

    /// Whether transactions that still run are wanted, in segments. Only then the four methods below are called.
    fn streams(&self) -> bool {
        false
    }

    /// A segment of a transaction starts, which may still run, and of which subtransactions may be rolled back later. Its changes
    /// come as those of others do.
    ///
    /// # Safety
    /// See [`Format::begin`].
    unsafe fn segment_started(&mut self, _ctx: Context, _txn: &pg_sys::ReorderBufferTXN) {}

    /// The segment in hand ends.
    ///
    /// # Safety
    /// See [`Format::begin`], but in no transaction.
    unsafe fn segment_stopped(&mut self, _ctx: Context) {}

    /// Of transaction `xid`, of which there were segments, `subxid` was rolled back: a subtransaction, or all of it.
    ///
    /// # Safety
    /// See [`Format::begin`], but in no transaction.
    unsafe fn segments_aborted(&mut self, _ctx: Context, _xid: u32, _subxid: u32) {}

    /// A transaction has committed of which there were segments.
    ///
    /// # Safety
    /// See [`Format::begin`], but in no transaction.
    unsafe fn segments_committed(&mut self, _ctx: Context, _txn: &pg_sys::ReorderBufferTXN) {}

    /// Whether transactions are wanted when they are prepared. Only then the four methods below are called.
    fn prepares(&self) -> bool {
        false
    }

    /// Whether this transaction is not wanted before it has committed. The answer stays the same. Asked while WAL is read, outside of
    /// transactions.
    fn refuses_prepared(&self, _xid: u32) -> bool {
        false
    }

    /// A transaction starts which is, or was, prepared.
    ///
    /// # Safety
    /// See [`Format::begin`].
    unsafe fn begin_prepared(
        &mut self,
        _ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        _preparation: Preparation,
    ) {
    }

    /// The prepared transaction in hand ends; what it changed may have come in part if it was rolled back meanwhile.
    ///
    /// # Safety
    /// See [`Format::begin`], but perhaps in no transaction.
    unsafe fn prepared(&mut self, _ctx: Context, _txn: &pg_sys::ReorderBufferTXN) {}

    /// A transaction is, or was, prepared of which there were segments.
    ///
    /// # Safety
    /// See [`Format::begin`], but in no transaction.
    unsafe fn segments_prepared(
        &mut self,
        _ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        _preparation: Preparation,
    ) {
    }

    /// What was prepared has committed, or, with end and time of its preparation, was rolled back.
    ///
    /// # Safety
    /// See [`Format::begin`], but in no transaction.
    unsafe fn prepared_finished(
        &mut self,
        _ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        _rolled_back: Option<(u64, pg_sys::TimestampTz)>,
    ) {
    }

    /// A transaction starts, which has committed.
    ///
    /// # Safety
    /// As for all methods here: `ctx` is valid and may be written to, in a transaction with a historic snapshot; all pointers
    /// are valid for the time of the call.
    unsafe fn begin(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN);

    /// A row was changed by the transaction in hand.
    ///
    /// # Safety
    /// See [`Format::begin`].
    unsafe fn row_changed(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN, change: &Change);

    /// Relations were truncated by the transaction in hand.
    ///
    /// # Safety
    /// See [`Format::begin`].
    unsafe fn truncated(
        &mut self,
        ctx: Context,
        txn: &pg_sys::ReorderBufferTXN,
        truncation: &Truncation<'_>,
    );

    /// A message was emitted. There is no transaction for one that is not transactional.
    ///
    /// # Safety
    /// See [`Format::begin`].
    unsafe fn message(
        &mut self,
        ctx: Context,
        txn: Option<&pg_sys::ReorderBufferTXN>,
        message: &LogicalMessage<'_>,
    );

    /// The transaction in hand is over.
    ///
    /// # Safety
    /// See [`Format::begin`].
    unsafe fn commit(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN);

    /// The stream ends without an error: give back what the session lent.
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

/// The format that `request` asks for, of a stream that has sent nothing. `parent` is the decoding context's memory.
///
/// # Safety
/// `parent` is valid and outlives the format; in the startup callback.
pub(super) unsafe fn start(request: Request, parent: pg_sys::MemoryContext) -> Box<dyn Format> {
    let gir = |options: Options| {
        // SAFETY: as the caller says.
        Box::new(unsafe { Stream::new(options, Box::new(Frames), parent) })
    };
    match request {
        Request::Gir(options) => gir(options),
        // SAFETY: as the caller says.
        Request::Wal2Json(selection, options) => {
            Box::new(unsafe { Wal2Json::new(selection, options, parent) })
        }
        Request::GirJson(options, json) => {
            // SAFETY: as the caller says.
            unsafe {
                let delivery = Box::new(GirJson::new(json, parent));
                Box::new(Stream::new(options, delivery, parent))
            }
        }
    }
}
