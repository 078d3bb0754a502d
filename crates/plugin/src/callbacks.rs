//! The callbacks of the output plugin: PostgreSQL's pointers in, calls of the stream's [`Format`] out.
//! An error that is raised in one leaves it as it was, but for `filter_by_origin`, which runs no
//! users' code and is called for each record.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use braid_decoder::{OriginPolicy, Request};
use braid_node::readers::{self, Reader};
use braid_node::{registry, standing};
use braid_postgres::error::pass_on;
use braid_postgres::{compat, encoding, process};
use pgrx::pg_sys;

use super::arguments::{given_options, split_identifiers};
use super::format::{self, Author, Change, Format, LogicalMessage, Preparation, Truncation};
use super::report::or_raise;
use super::stream::in_transaction;
use super::turn::Turn;
use super::{held, invalidation};

/// Fill in the table of callbacks. Prepared transactions are decoded when they commit, and so are running ones, unless the stream's
/// format wants them (`startup`).
///
/// # Safety
/// `callbacks` is the table that PostgreSQL hands to `_PG_output_plugin_init`.
pub unsafe fn install(callbacks: *mut c_void) {
    // SAFETY: as the caller says.
    let callbacks = unsafe { &mut *callbacks.cast::<pg_sys::OutputPluginCallbacks>() };
    callbacks.startup_cb = Some(startup);
    callbacks.begin_cb = Some(begin);
    callbacks.change_cb = Some(change);
    callbacks.truncate_cb = Some(truncate);
    callbacks.commit_cb = Some(commit);
    callbacks.message_cb = Some(message);
    callbacks.filter_by_origin_cb = Some(filter_by_origin);
    callbacks.shutdown_cb = Some(shutdown);
    callbacks.stream_start_cb = Some(stream_start);
    callbacks.stream_stop_cb = Some(stream_stop);
    callbacks.stream_abort_cb = Some(stream_abort);
    callbacks.stream_commit_cb = Some(stream_commit);
    callbacks.stream_change_cb = Some(change);
    callbacks.stream_truncate_cb = Some(truncate);
    callbacks.stream_message_cb = Some(stream_message);
    callbacks.filter_prepare_cb = Some(filter_prepare);
    callbacks.begin_prepare_cb = Some(begin_prepare);
    callbacks.prepare_cb = Some(prepare);
    callbacks.stream_prepare_cb = Some(stream_prepare);
    callbacks.commit_prepared_cb = Some(commit_prepared);
    callbacks.rollback_prepared_cb = Some(rollback_prepared);
}

/// What hangs on the decoding context.
struct State {
    format: Box<dyn Format>,
    turn: Turn,
}

/// The stream's format, if there is one: creating a slot has none.
pub(super) unsafe fn state<'c>(
    ctx: *mut pg_sys::LogicalDecodingContext,
) -> Option<&'c mut Box<dyn Format>> {
    let state = unsafe { (*ctx).output_plugin_private.cast::<State>() };
    // SAFETY: set by `startup` to null or a box that lives as long as the context; callbacks do not nest.
    (!state.is_null()).then(|| unsafe { &mut (*state).format })
}

/// Runs what a callback does with the stream's format, if there is one. Row filters, output
/// functions and hash functions are users' code: its errors go on with all of their fields.
///
/// # Safety
/// The context is valid.
#[inline]
unsafe fn with_format(
    ctx: *mut pg_sys::LogicalDecodingContext,
    work: impl FnOnce(&mut Box<dyn Format>),
) {
    pass_on(|| {
        // SAFETY: as the caller says.
        if let Some(format) = unsafe { state(ctx) } {
            work(format);
        }
    });
}

/// What the stream has replaced of a walsender's.
pub(super) unsafe fn turn<'c>(ctx: *mut pg_sys::LogicalDecodingContext) -> Option<&'c Turn> {
    let state = unsafe { (*ctx).output_plugin_private.cast::<State>() };
    // SAFETY: as above; nothing writes to it after `startup`.
    (!state.is_null()).then(|| unsafe { &(*state).turn })
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn startup(
    ctx: *mut pg_sys::LogicalDecodingContext,
    opt: *mut pg_sys::OutputPluginOptions,
    is_init: bool,
) {
    // SAFETY: as PostgreSQL calls it.
    pass_on(|| unsafe { start(ctx, opt, is_init) });
}

/// # Safety
/// As for the callback.
unsafe fn start(
    ctx: *mut pg_sys::LogicalDecodingContext,
    opt: *mut pg_sys::OutputPluginOptions,
    is_init: bool,
) {
    // SAFETY: PostgreSQL calls this once for a context, with valid pointers; the box is dropped with the context's memory.
    unsafe {
        (*opt).output_type = pg_sys::OutputPluginOutputType::OUTPUT_PLUGIN_BINARY_OUTPUT;
        (*opt).receive_rewrites = false;
        (*ctx).output_plugin_private = std::ptr::null_mut();
        // Set because there are callbacks for it.
        let can_stream = std::mem::replace(&mut (*ctx).streaming, false);
        let can_prepare = std::mem::replace(&mut (*ctx).twophase, false);
        (*ctx).twophase_opt_given = false;
        if is_init {
            readers::note((*ctx).slot, Reader::Unknown);
            // Who reads here may write too: then deletions are to be remembered.
            registry::wake_manager(process::my_database());
            return;
        }
        if let Some(format) = format::of_process() {
            hang(ctx, format);
            return;
        }
        let request = in_transaction(|| request(ctx));
        if matches!(request, Request::Gir(_) | Request::GirJson(..)) {
            // The stream names the node that it comes from.
            in_transaction(|| {
                if let Err(refusal) = standing::require() {
                    refusal.raise();
                }
            });
        }
        readers::note((*ctx).slot, reader(&request));
        invalidation::listen();
        // What was noted before this stream has no one to concern.
        invalidation::take();
        let format = format::start(request, (*ctx).context);
        if format.is_text() {
            (*opt).output_type = pg_sys::OutputPluginOutputType::OUTPUT_PLUGIN_TEXTUAL_OUTPUT;
        }
        (*ctx).streaming = can_stream && format.streams();
        (*ctx).twophase = can_prepare && format.prepares();
        // A slot that was made without it is marked from here on.
        (*ctx).twophase_opt_given = (*ctx).twophase;
        let state = &mut *hang(ctx, format);
        // First, as the others put theirs in front of it.
        state.turn.enter(ctx);
        if let Some(stream) = state.format.joined() {
            held::join_if_wanted(ctx, stream);
        }
        if let Some(pacing) = state.format.paced() {
            pacing.enter(ctx);
        }
    }
}

/// What the stream is asked for with.
///
/// # Safety
/// The context is valid. In a transaction, as encodings are converted.
unsafe fn request(ctx: *mut pg_sys::LogicalDecodingContext) -> Request {
    // SAFETY: as the caller says.
    let mut request = or_raise(Request::parse(
        unsafe { given_options(ctx) },
        split_identifiers,
    ));
    if let Request::Wal2Json(_, options) = &mut request {
        options.encode(|text| encoding::name_here(text).map(CString::into_bytes));
    }
    request
}

/// Who asks for a stream.
fn reader(request: &Request) -> Reader {
    match request {
        Request::Gir(options) | Request::GirJson(options, _)
            if options.node.is_some() && options.origin == OriginPolicy::Any =>
        {
            Reader::All
        }
        Request::Gir(_) | Request::GirJson(..) | Request::Wal2Json(..) => Reader::Rest,
    }
}

/// Hang a stream's format on its context, with whose memory it goes.
///
/// # Safety
/// The context is valid and has none.
unsafe fn hang(ctx: *mut pg_sys::LogicalDecodingContext, format: Box<dyn Format>) -> *mut State {
    // SAFETY: as the caller says; the callback lies in the memory that it watches.
    unsafe {
        let callback = pg_sys::MemoryContextAllocZero(
            (*ctx).context,
            size_of::<pg_sys::MemoryContextCallback>(),
        )
        .cast::<pg_sys::MemoryContextCallback>();
        let turn = Turn::default();
        let state = Box::into_raw(Box::new(State { format, turn }));
        (*callback).func = Some(drop_state);
        (*callback).arg = state.cast();
        pg_sys::MemoryContextRegisterResetCallback((*ctx).context, callback);
        (*ctx).output_plugin_private = state.cast();
        state
    }
}

/// Called when the context's memory goes, after its children's went.
unsafe extern "C-unwind" fn drop_state(state: *mut c_void) {
    // SAFETY: the pointer is that of `startup`'s box, and this is called once.
    drop(unsafe { Box::from_raw(state.cast::<State>()) });
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn shutdown(ctx: *mut pg_sys::LogicalDecodingContext) {
    // SAFETY: a valid context; the state itself goes with the context's memory.
    unsafe { with_format(ctx, |format| format.leave()) };
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn filter_by_origin(
    ctx: *mut pg_sys::LogicalDecodingContext,
    origin: pg_sys::RepOriginId,
) -> bool {
    // SAFETY: a valid context; what is asked about is the record that its reader holds.
    unsafe {
        state(ctx).is_some_and(|format| {
            let refuses = format.refuses_origin(origin);
            if !refuses {
                format.record_read(ctx);
            }
            refuses
        })
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn begin(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot.
    unsafe {
        with_format(ctx, |format| {
            format.begin(ctx, &*txn);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn commit(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    _commit_lsn: pg_sys::XLogRecPtr,
) {
    // SAFETY: valid pointers, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.commit(ctx, &*txn);
        });
    }
}

/// The transaction is decoded because its PREPARE is, or, with the time of that, its COMMIT PREPARED: it was prepared before the slot
/// was told to send what is prepared.
unsafe fn preparation(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: &pg_sys::ReorderBufferTXN,
) -> Preparation {
    // SAFETY: a record is being decoded, that of PREPARE or that of COMMIT PREPARED; the latter's data start with its time (xl_xact_commit of
    // src/include/access/xact.h, 15 to 18).
    unsafe {
        let reader = (*ctx).reader;
        if (*reader).ReadRecPtr == txn.final_lsn {
            return Preparation::Now;
        }
        let record = (*reader).record;
        Preparation::Before {
            commit_lsn: (*reader).ReadRecPtr,
            end_lsn: (*reader).EndRecPtr,
            commit_time: (*record).main_data.cast::<i64>().read_unaligned(),
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn filter_prepare(
    ctx: *mut pg_sys::LogicalDecodingContext,
    xid: pg_sys::TransactionId,
    _gid: *const c_char,
) -> bool {
    // SAFETY: a valid context.
    pass_on(|| {
        unsafe { state(ctx) }.is_some_and(|format| format.refuses_prepared(xid.into_inner()))
    })
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn begin_prepare(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot.
    unsafe {
        with_format(ctx, |format| {
            format.begin_prepared(ctx, &*txn, preparation(ctx, &*txn));
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn prepare(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    _prepare_lsn: pg_sys::XLogRecPtr,
) {
    // SAFETY: valid pointers, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.prepared(ctx, &*txn);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn stream_prepare(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    _prepare_lsn: pg_sys::XLogRecPtr,
) {
    // SAFETY: valid pointers, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.segments_prepared(ctx, &*txn, preparation(ctx, &*txn));
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn commit_prepared(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    _commit_lsn: pg_sys::XLogRecPtr,
) {
    // SAFETY: valid pointers, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.prepared_finished(ctx, &*txn, None);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn rollback_prepared(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    prepare_end_lsn: pg_sys::XLogRecPtr,
    prepare_time: pg_sys::TimestampTz,
) {
    // SAFETY: valid pointers, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.prepared_finished(ctx, &*txn, Some((prepare_end_lsn, prepare_time)));
        });
    }
}

/// Who made a change of the reorder buffer's.
unsafe fn author(change: *mut pg_sys::ReorderBufferChange) -> Author {
    // SAFETY: a change belongs to a transaction or subtransaction, which the reorder buffer sets when it queues it.
    unsafe {
        Author {
            xid: (*(*change).txn).xid.into_inner(),
            origin: (*change).origin_id,
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn stream_start(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.segment_started(ctx, &*txn);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn stream_stop(
    ctx: *mut pg_sys::LogicalDecodingContext,
    _txn: *mut pg_sys::ReorderBufferTXN,
) {
    // SAFETY: a valid context, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.segment_stopped(ctx);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn stream_abort(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    _abort_lsn: pg_sys::XLogRecPtr,
) {
    // SAFETY: valid pointers, in a callback that may write; a subtransaction knows its transaction, which is still there.
    unsafe {
        with_format(ctx, |format| {
            let top = (*txn).toptxn.as_ref().unwrap_or(&*txn);
            format.segments_aborted(ctx, top.xid.into_inner(), (*txn).xid.into_inner());
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn stream_commit(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    _commit_lsn: pg_sys::XLogRecPtr,
) {
    // SAFETY: valid pointers, in a callback that may write.
    unsafe {
        with_format(ctx, |format| {
            format.segments_committed(ctx, &*txn);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn stream_message(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    lsn: pg_sys::XLogRecPtr,
    transactional: bool,
    prefix: *const c_char,
    size: pg_sys::Size,
    content: *const c_char,
) {
    // SAFETY: as for `message`. The callback is not told the subtransaction; the reorder buffer has just set CheckXidAlive to it, or to
    // nothing if it has committed, transaction and all: then it can't be rolled back, and the transaction will do.
    unsafe {
        let alive = pg_sys::CheckXidAlive;
        let xid = if alive == pg_sys::InvalidTransactionId {
            txn.as_ref().map_or(alive, |txn| txn.xid)
        } else {
            alive
        };
        let text = (prefix, size, content);
        put_message(ctx, txn, (lsn, transactional, xid), text);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn change(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    relation: pg_sys::Relation,
    change: *mut pg_sys::ReorderBufferChange,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot, in a callback that may write. The tuples of the union
    // are the member that is set for a row's change.
    unsafe {
        with_format(ctx, |format| {
            let tuples = (*change).data.tp;
            let change = Change {
                relation,
                action: (*change).action,
                old: compat::change_tuple(tuples.oldtuple),
                new: compat::change_tuple(tuples.newtuple),
                lsn: (*change).lsn,
                author: author(change),
            };
            format.row_changed(ctx, &*txn, &change);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn truncate(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    count: c_int,
    relations: *mut pg_sys::Relation,
    change: *mut pg_sys::ReorderBufferChange,
) {
    // SAFETY: as for `change`; there are `count` relations.
    unsafe {
        with_format(ctx, |format| {
            let count = usize::try_from(count).unwrap_or_default();
            let flags = (*change).data.truncate;
            let truncation = Truncation {
                relations: std::slice::from_raw_parts(relations, count),
                cascade: flags.cascade,
                restart_identity: flags.restart_seqs,
                lsn: (*change).lsn,
                author: author(change),
            };
            format.truncated(ctx, &*txn, &truncation);
        });
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn message(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    lsn: pg_sys::XLogRecPtr,
    transactional: bool,
    prefix: *const c_char,
    size: pg_sys::Size,
    content: *const c_char,
) {
    // SAFETY: valid pointers; the content has `size` bytes; there is no transaction for a message that is not transactional.
    unsafe {
        let xid = txn.as_ref().map(|txn| txn.xid).unwrap_or_default();
        let text = (prefix, size, content);
        put_message(ctx, txn, (lsn, transactional, xid), text);
    }
}

/// # Safety
/// As for the callbacks.
unsafe fn put_message(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    (lsn, transactional, xid): (pg_sys::XLogRecPtr, bool, pg_sys::TransactionId),
    (prefix, size, content): (*const c_char, pg_sys::Size, *const c_char),
) {
    // SAFETY: as the caller says.
    unsafe {
        with_format(ctx, |format| {
            let message = LogicalMessage {
                transactional,
                xid: xid.into_inner(),
                lsn,
                prefix: CStr::from_ptr(prefix),
                content: if size == 0 {
                    &[]
                } else {
                    std::slice::from_raw_parts(content.cast::<u8>(), size)
                },
            };
            format.message(ctx, txn.as_ref(), &message);
        });
    }
}
