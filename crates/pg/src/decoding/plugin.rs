//! The callbacks of the output plugin. What they find and write is [`Stream`]'s.

use std::ffi::{c_char, c_int, c_void};

use braid_decoder::{Options, OriginPolicy, classify, to_unix_micros};
use braid_gir::Message;
use pgrx::pg_sys;

use super::arguments::{given_options, split_identifiers};
use super::report::or_raise;
use super::session::Session;
use super::stream::{Sink, Stream, no_origin};
use super::{invalidation, names};
use crate::compat;

/// Fill in the table of callbacks. In-progress and prepared transactions have none yet: they are decoded when they commit.
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
}

/// The stream's state, if it has one: creating a slot has none.
unsafe fn state<'c>(ctx: *mut pg_sys::LogicalDecodingContext) -> Option<&'c mut Stream> {
    // SAFETY: set by `startup` to null or a box that lives as long as the context; callbacks do not nest.
    unsafe { (*ctx).output_plugin_private.cast::<Stream>().as_mut() }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn startup(
    ctx: *mut pg_sys::LogicalDecodingContext,
    opt: *mut pg_sys::OutputPluginOptions,
    is_init: bool,
) {
    // SAFETY: PostgreSQL calls this once for a context, with valid pointers; the box is dropped with the context's memory.
    unsafe {
        (*opt).output_type = pg_sys::OutputPluginOutputType::OUTPUT_PLUGIN_BINARY_OUTPUT;
        (*opt).receive_rewrites = false;
        (*ctx).output_plugin_private = std::ptr::null_mut();
        if is_init {
            return;
        }
        let options = or_raise(Options::parse(given_options(ctx), split_identifiers));
        invalidation::listen();
        // What was noted before this stream has no one to concern.
        invalidation::take();
        let stream = Box::new(Stream::new(options, (*ctx).context));
        let callback = pg_sys::MemoryContextAllocZero(
            (*ctx).context,
            size_of::<pg_sys::MemoryContextCallback>(),
        )
        .cast::<pg_sys::MemoryContextCallback>();
        let stream = Box::into_raw(stream);
        (*callback).func = Some(drop_state);
        (*callback).arg = stream.cast();
        pg_sys::MemoryContextRegisterResetCallback((*ctx).context, callback);
        (*ctx).output_plugin_private = stream.cast();
        (*stream).session = Some(Session::enter());
    }
}

/// Called when the context's memory goes, after its children's went.
unsafe extern "C-unwind" fn drop_state(state: *mut c_void) {
    // SAFETY: the pointer is that of `startup`'s box, and this is called once.
    drop(unsafe { Box::from_raw(state.cast::<Stream>()) });
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn shutdown(ctx: *mut pg_sys::LogicalDecodingContext) {
    // SAFETY: a valid context; the state itself goes with the context's memory.
    if let Some(session) = unsafe { state(ctx) }.and_then(|stream| stream.session.take()) {
        session.leave();
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn filter_by_origin(
    ctx: *mut pg_sys::LogicalDecodingContext,
    origin: pg_sys::RepOriginId,
) -> bool {
    // Called while WAL is read, outside of transactions: an origin's name can't be looked up yet.
    // SAFETY: a valid context.
    let stream = unsafe { state(ctx) };
    stream
        .is_some_and(|stream| stream.options.origin == OriginPolicy::Local && origin != no_origin())
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn begin(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot. The commit time is the member of the union that is
    // set for a transaction that committed.
    unsafe {
        let Some(stream) = state(ctx) else { return };
        let txn = &*txn;
        stream.absorb_invalidations();
        let origin = stream.origin_name(txn.origin_id);
        let source = classify(&origin);
        stream.skip = source.is_node(stream.options.node.as_deref());
        let transaction = stream.outbox.start();
        transaction.commit_lsn = txn.final_lsn;
        transaction.commit_timestamp = to_unix_micros(txn.xact_time.commit_time);
        transaction.xid = txn.xid.into_inner();
        transaction.origin.clear();
        transaction.origin.push_str(source.name());
        transaction.origin_lsn = if source.name().is_empty() {
            0
        } else {
            txn.origin_lsn
        };
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
        let Some(stream) = state(ctx) else { return };
        let sent = or_raise(stream.outbox.commit((*txn).end_lsn, &mut Sink(ctx)));
        // Keeps feedback and synchronous replication going over transactions of which nothing is sent.
        pg_sys::OutputPluginUpdateProgress(ctx, !sent);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn change(
    ctx: *mut pg_sys::LogicalDecodingContext,
    _txn: *mut pg_sys::ReorderBufferTXN,
    relation: pg_sys::Relation,
    change: *mut pg_sys::ReorderBufferChange,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot, in a callback that may write. The tuples of the union
    // are the member that is set for a row's change.
    unsafe {
        let Some(stream) = state(ctx) else { return };
        let written = !stream.skip && {
            let action = (*change).action;
            let tuples = (*change).data.tp;
            stream.row_changed(
                relation,
                action,
                compat::change_tuple(tuples.oldtuple),
                compat::change_tuple(tuples.newtuple),
            )
        };
        stream.old.clear();
        stream.new.clear();
        stream.tools.scratch.reset();
        stream.end_of_change(ctx, written);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn truncate(
    ctx: *mut pg_sys::LogicalDecodingContext,
    _txn: *mut pg_sys::ReorderBufferTXN,
    count: c_int,
    relations: *mut pg_sys::Relation,
    change: *mut pg_sys::ReorderBufferChange,
) {
    // SAFETY: as for `change`; there are `count` relations.
    unsafe {
        let Some(stream) = state(ctx) else { return };
        let mut written = false;
        if !stream.skip {
            let count = usize::try_from(count).unwrap_or_default();
            let relations = std::slice::from_raw_parts(relations, count);
            let flags = (*change).data.truncate;
            written = stream.truncated(relations, flags.cascade, flags.restart_seqs);
        }
        stream.tools.scratch.reset();
        stream.end_of_change(ctx, written);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn message(
    ctx: *mut pg_sys::LogicalDecodingContext,
    _txn: *mut pg_sys::ReorderBufferTXN,
    lsn: pg_sys::XLogRecPtr,
    transactional: bool,
    prefix: *const c_char,
    size: pg_sys::Size,
    content: *const c_char,
) {
    // SAFETY: valid pointers; the content has `size` bytes. A message that is not transactional comes outside of any
    // transaction, and never between a transaction's changes.
    unsafe {
        let Some(stream) = state(ctx) else { return };
        if !stream.options.messages || (transactional && stream.skip) {
            return;
        }
        let prefix = names::from_server(prefix);
        let content = if size == 0 {
            &[][..]
        } else {
            std::slice::from_raw_parts(content.cast::<u8>(), size)
        };
        let message = Message {
            transactional,
            lsn,
            prefix: &prefix,
            content,
        };
        stream.ensure_header();
        if transactional {
            or_raise(stream.outbox.ensure_begun());
            or_raise(stream.outbox.writer().message(&message));
            stream.end_of_change(ctx, true);
        } else {
            or_raise(stream.outbox.lone_message(&message, &mut Sink(ctx)));
        }
    }
}
