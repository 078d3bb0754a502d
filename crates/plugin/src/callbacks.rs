//! The callbacks of the output plugin: PostgreSQL's pointers in, calls of the stream's [`Format`]
//! out. An error that is raised in one leaves it as it was, but for `filter_by_origin`, which runs
//! no users' code and is called for each record.

use std::cell::{OnceCell, RefCell};
use std::ffi::{CString, c_char, c_int, c_void};

use braid_decoder::{OriginPolicy, Request};
use braid_node::readers::{self, Reader};
use braid_node::{registry, standing};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::decoding::{Argument, Context, DecodedChange, Transaction};
use braid_postgres::error::pass_on;
use braid_postgres::{encoding, plain, process};
use pgrx::pg_sys;
use pgrx::pg_sys::submodules::panic::pgrx_extern_c_guard;

use super::arguments::{given_options, split_identifiers};
use super::format::{self, Author, Change, Format, LogicalMessage, Preparation, Truncation};
use super::report::or_raise;
use super::transaction::in_transaction;
use super::turn::Turn;
use super::{held, invalidation};

/// Fill in the table of callbacks. Prepared transactions are decoded when they commit, and so are
/// running ones, unless the stream's format wants them (`startup`).
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

/// The plugin's state of a decoding context.
struct State {
    /// Lent to one callback at a time.
    format: RefCell<Box<dyn Format>>,
    turn: OnceCell<Turn>,
}

/// The state of a decoding context: one that only creates a slot has none.
#[inline]
fn hanging<'c>(ctx: Context<'c>) -> Option<&'c State> {
    // SAFETY: `hang` has set this to null, or to a box that lives as long as the context's memory.
    // Everything in the box is read through shared references.
    unsafe {
        (*ctx.as_ptr())
            .output_plugin_private
            .cast::<State>()
            .cast_const()
            .as_ref()
    }
}

/// Lends the stream's format to `work`. `None` if there is no format, or if it is lent already:
/// callbacks do not nest.
#[inline]
pub(super) fn with_state<T>(
    ctx: Context<'_>,
    work: impl FnOnce(&mut dyn Format) -> T,
) -> Option<T> {
    let mut format = hanging(ctx)?.format.try_borrow_mut().ok()?;
    Some(work(&mut **format))
}

/// The stream's place in a walsender: the functions that it has replaced. May be read while a
/// callback has the format.
pub(super) fn turn<'c>(ctx: Context<'c>) -> Option<&'c Turn> {
    hanging(ctx)?.turn.get()
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn startup(
    ctx: *mut pg_sys::LogicalDecodingContext,
    opt: *mut pg_sys::OutputPluginOptions,
    is_init: bool,
) {
    // SAFETY: PostgreSQL calls this once for a context, with valid pointers.
    let (ctx, opt) = unsafe { (Context::from_ptr(ctx), &mut *opt) };
    pass_on(|| start(ctx, opt, is_init));
}

/// Abilities of a context: its own, or those that its stream wants.
struct Abilities {
    streaming: bool,
    two_phase: bool,
}

/// Sets the abilities that a context's stream wants. Returns the former ones.
fn set_abilities(ctx: Context<'_>, wants: &Abilities) -> Abilities {
    // SAFETY: the context is valid, in its startup callback, and nobody holds a reference to it.
    let context = unsafe { &mut *ctx.as_ptr() };
    // A slot that was created without it is marked from now on.
    context.twophase_opt_given = wants.two_phase;
    Abilities {
        streaming: std::mem::replace(&mut context.streaming, wants.streaming),
        two_phase: std::mem::replace(&mut context.twophase, wants.two_phase),
    }
}

fn start(ctx: Context<'_>, opt: &mut pg_sys::OutputPluginOptions, is_init: bool) {
    opt.output_type = pg_sys::OutputPluginOutputType::OUTPUT_PLUGIN_BINARY_OUTPUT;
    opt.receive_rewrites = false;
    hang(ctx, None);
    // Set because there are callbacks for it.
    let can = set_abilities(
        ctx,
        &Abilities {
            streaming: false,
            two_phase: false,
        },
    );
    if is_init {
        note_reader(ctx, Reader::Unknown);
        // A node that reads from this one may write too: then deletions must be recorded.
        registry::wake_manager(process::my_database());
        return;
    }
    if let Some(format) = format::of_process() {
        hang(ctx, Some(format));
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
    note_reader(ctx, reader(&request));
    invalidation::listen();
    // Notes from before this stream concern nobody.
    invalidation::take();
    let format = format::start(request, ctx);
    if format.is_text() {
        opt.output_type = pg_sys::OutputPluginOutputType::OUTPUT_PLUGIN_TEXTUAL_OUTPUT;
    }
    set_abilities(
        ctx,
        &Abilities {
            streaming: can.streaming && format.streams(),
            two_phase: can.two_phase && format.prepares(),
        },
    );
    hang(ctx, Some(format));
    let Some(state) = hanging(ctx) else {
        return;
    };
    // First, as the others put theirs in front of it.
    if let Some(turn) = Turn::enter(ctx) {
        state.turn.get_or_init(|| turn);
    }
    with_state(ctx, |format| {
        if let Some(stream) = format.joined() {
            held::join_if_wanted(ctx, stream);
        }
        if let Some(pacing) = format.paced() {
            pacing.enter(ctx);
        }
    });
}

fn note_reader(ctx: Context<'_>, reader: Reader) {
    if let Some((place, name)) = ctx.slot() {
        readers::note(place, name, reader);
    }
}

/// The options that the stream is asked for with. In a transaction, as encodings are converted.
fn request(ctx: Context<'_>) -> Request {
    let mut request = or_raise(Request::parse(given_options(ctx), split_identifiers));
    if let Request::Wal2Json(_, options) = &mut request {
        options.encode(|text| encoding::name_here(text).map(CString::into_bytes));
    }
    request
}

/// The kind of reader that asks for a stream.
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

/// Stores a stream's format, or none, in its context, with whose memory it is freed.
fn hang(ctx: Context<'_>, format: Option<Box<dyn Format>>) {
    let state = format.map_or(std::ptr::null_mut(), |format| {
        Box::into_raw(Box::new(State {
            format: RefCell::new(format),
            turn: OnceCell::new(),
        }))
    });
    // SAFETY: the context is valid, in its startup callback, and has none yet. The callback lies in
    // the memory that it watches.
    unsafe {
        (*ctx.as_ptr()).output_plugin_private = state.cast();
        if state.is_null() {
            return;
        }
        let size = size_of::<pg_sys::MemoryContextCallback>();
        let callback = pg_sys::MemoryContextAllocZero(ctx.memory(), size)
            .cast::<pg_sys::MemoryContextCallback>();
        (*callback).func = Some(drop_state);
        (*callback).arg = state.cast();
        pg_sys::MemoryContextRegisterResetCallback(ctx.memory(), callback);
    }
}

/// Called when the context's memory goes, after its children's went.
unsafe extern "C-unwind" fn drop_state(state: *mut c_void) {
    // SAFETY: the pointer is that of `hang`'s box, and this is called once.
    drop(unsafe { Box::from_raw(state.cast::<State>()) });
}

type RawTransaction = *mut pg_sys::ReorderBufferTXN;
type RawChange = *mut pg_sys::ReorderBufferChange;

/// A pointer, or one with a number of elements.
macro_rules! given {
    ($one:ident) => {
        $one
    };
    ($pointer:ident, $count:ident) => {
        ($pointer, $count)
    };
    ($one:ty) => {
        $one
    };
    ($pointer:ty, $count:ty) => {
        ($pointer, $count)
    };
}

/// Declares callbacks. Each one's body works with the stream's format, if there is one, its
/// context, and views of the other arguments. An argument with a number of elements behind it is a
/// pointer to as many, which PostgreSQL gives after that number.
///
/// Row filters, output functions and hash functions are users' code: its errors go on with all of
/// their fields.
macro_rules! callbacks {
    ($(
        fn $callback:ident($($name:ident: $type:ty $(, $count:ident: $of:ty)?);*)
            $(-> $returned:ty)?, |$format:ident, $ctx:ident| $work:expr;
    )*) => {$(
        unsafe extern "C-unwind" fn $callback(
            $ctx: *mut pg_sys::LogicalDecodingContext,
            $($($count: $of,)? $name: $type,)*
        ) $(-> $returned)? {
            fn work<'c>(
                $format: &mut dyn Format,
                $ctx: Context<'c>,
                $($name: <given!($type $(, $of)?) as Argument>::View<'c>,)*
            ) $(-> $returned)? {
                $work
            }
            // SAFETY: PostgreSQL passes valid arguments, for the time of the call. All values with
            // a destructor are within the guard.
            unsafe {
                pgrx_extern_c_guard(move || {
                    let done = pass_on(|| {
                        let $ctx = Argument::view($ctx);
                        with_state($ctx, |format| {
                            work(format, $ctx, $(Argument::view(given!($name $(, $count)?)),)*)
                        })
                    });
                    done.unwrap_or_default()
                })
            }
        }
    )*};
}

callbacks! {
    fn begin(txn: RawTransaction), |format, ctx| of(txn, |txn| format.begin(ctx, txn));
    fn commit(txn: RawTransaction; _lsn: u64), |format, ctx| {
        of(txn, |txn| format.commit(ctx, txn));
    };
    fn begin_prepare(txn: RawTransaction), |format, ctx| {
        of(txn, |txn| format.begin_prepared(ctx, txn, preparation(ctx, txn)));
    };
    fn prepare(txn: RawTransaction; _lsn: u64), |format, ctx| {
        of(txn, |txn| format.prepared(ctx, txn));
    };
    fn stream_prepare(txn: RawTransaction; _lsn: u64), |format, ctx| {
        of(txn, |txn| format.segments_prepared(ctx, txn, preparation(ctx, txn)));
    };
    fn commit_prepared(txn: RawTransaction; _lsn: u64), |format, ctx| {
        of(txn, |txn| format.prepared_finished(ctx, txn, None));
    };
    fn rollback_prepared(txn: RawTransaction; end: u64; time: i64), |format, ctx| {
        of(txn, |txn| format.prepared_finished(ctx, txn, Some((end, time))));
    };
    fn stream_start(txn: RawTransaction), |format, ctx| {
        of(txn, |txn| format.segment_started(ctx, txn));
    };
    fn stream_stop(txn: RawTransaction), |format, ctx| of(txn, |_| format.segment_stopped(ctx));
    fn stream_abort(txn: RawTransaction; _lsn: u64), |format, ctx| {
        of(txn, |txn| format.segments_aborted(ctx, txn.top_id(), txn.id()));
    };
    fn stream_commit(txn: RawTransaction; _lsn: u64), |format, ctx| {
        of(txn, |txn| format.segments_committed(ctx, txn));
    };
    fn shutdown(), |format, _ctx| format.leave();
    fn filter_prepare(xid: pg_sys::TransactionId; _gid: *const c_char) -> bool, |format, _ctx| {
        format.refuses_prepared(xid.into_inner())
    };
    fn change(txn: RawTransaction; relation: pg_sys::Relation; change: RawChange), |format, ctx| {
        if let Some((txn, relation)) = txn.zip(relation) {
            let change = Change {
                relation,
                action: change.action(),
                old: change.before(),
                new: change.after(),
                lsn: change.lsn(),
                author: author(change),
            };
            format.row_changed(ctx, txn, &change);
        }
    };
    fn truncate(
        txn: RawTransaction;
        relations: *mut pg_sys::Relation, count: c_int;
        change: RawChange
    ), |format, ctx| {
        of(txn, |txn| {
            let (cascade, restart_identity) = change.truncate_flags();
            let truncation = Truncation {
                relations: &relations,
                cascade,
                restart_identity,
                lsn: change.lsn(),
                author: author(change),
            };
            format.truncated(ctx, txn, &truncation);
        });
    };
    fn message(
        txn: RawTransaction;
        lsn: pg_sys::XLogRecPtr;
        transactional: bool;
        prefix: *const c_char;
        content: *const c_char, size: pg_sys::Size
    ), |format, ctx| {
        let xid = txn.map_or(0, Transaction::id);
        format.message(ctx, txn, &LogicalMessage { transactional, xid, lsn, prefix, content });
    };
    fn stream_message(
        txn: RawTransaction;
        lsn: pg_sys::XLogRecPtr;
        transactional: bool;
        prefix: *const c_char;
        content: *const c_char, size: pg_sys::Size
    ), |format, ctx| {
        // The callback does not get the subtransaction. The reorder buffer has just set
        // CheckXidAlive to it. If the transaction has committed, CheckXidAlive is invalid: then the
        // message can't be rolled back, and the transaction's own id suffices.
        let alive = plain::CheckXidAlive();
        let xid = if alive == pg_sys::InvalidTransactionId {
            txn.map_or(0, Transaction::id)
        } else {
            alive.into_inner()
        };
        format.message(ctx, txn, &LogicalMessage { transactional, xid, lsn, prefix, content });
    };
}

/// Does what a callback does for a transaction, which PostgreSQL always gives.
#[inline]
fn of<'c>(txn: Option<Transaction<'c>>, work: impl FnOnce(Transaction<'c>)) {
    if let Some(txn) = txn {
        work(txn);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn filter_by_origin(
    ctx: *mut pg_sys::LogicalDecodingContext,
    origin: ReplOriginId,
) -> bool {
    // SAFETY: a valid context; the question is about the record that its reader holds.
    let ctx = unsafe { Context::from_ptr(ctx) };
    with_state(ctx, |format| {
        let refuses = format.refuses_origin(origin);
        if !refuses {
            format.record_read(ctx);
        }
        refuses
    })
    .unwrap_or(false)
}

/// Why a prepared transaction is decoded: because of its PREPARE, or because of its COMMIT
/// PREPARED, with the commit's time. In the second case it was prepared before the slot was set to
/// send prepared transactions.
fn preparation(ctx: Context<'_>, txn: Transaction<'_>) -> Preparation {
    let (read, end) = ctx
        .reader()
        .map_or((0, 0), |reader| (reader.ReadRecPtr, reader.EndRecPtr));
    if read == txn.final_lsn {
        return Preparation::Now;
    }
    // A record is being decoded, that of PREPARE or that of COMMIT PREPARED; the latter's data
    // start with its time (xl_xact_commit of src/include/access/xact.h, 15 to 18).
    let time = ctx.record().and_then(|record| record.data().first_chunk());
    Preparation::Before {
        commit_lsn: read,
        end_lsn: end,
        commit_time: time.map_or(0, |time| i64::from_ne_bytes(*time)),
    }
}

/// The author of a change in the reorder buffer.
fn author(change: DecodedChange<'_>) -> Author {
    Author {
        xid: change.author(),
        origin: change.origin(),
    }
}
