//! The point where held messages are released: a function in front of the one with which the
//! walsender's WAL reader reads a page. Run by the walsender.
//!
//! Before a walsender waits for more WAL it reads a page that does not exist yet. So a held message
//! waits only while existing WAL is read, and not longer than `HELD_FOR`, which is checked with
//! each page.

use std::ffi::{c_char, c_int};
use std::time::{Duration, Instant};

use braid_postgres::decoding::{Context, Transaction};
use braid_postgres::{plain, wal};
use pgrx::pg_sys;

use super::format::Format;
use crate::callbacks::with_state;

/// The longest that something is held while there is WAL to read.
const HELD_FOR: Duration = Duration::from_millis(5);
/// Before a transaction with more changes than this is processed, held messages are released.
const LONG_TRANSACTION: u64 = 200;

/// A function that reads a page: `XLogPageReadCB` of src/include/access/xlogreader.h, 18.
pub(super) type ReadPage = unsafe extern "C-unwind" fn(
    *mut pg_sys::XLogReaderState,
    pg_sys::XLogRecPtr,
    c_int,
    pg_sys::XLogRecPtr,
    *mut c_char,
) -> c_int;

/// The original function, and since when something is held.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PageRead {
    /// As the WAL reader was given it.
    original: pg_sys::XLogPageReadCB,
    since: Option<Instant>,
}

/// Declares a function that stands in front of the one with which a walsender's WAL reader reads a
/// page. It passes the context and the wanted page to the work, outside of the plugin's callbacks.
macro_rules! page_reader {
    ($name:ident, $work:expr) => {
        #[pgrx::pg_guard]
        unsafe extern "C-unwind" fn $name(
            reader: *mut pgrx::pg_sys::XLogReaderState,
            page: pgrx::pg_sys::XLogRecPtr,
            length: std::ffi::c_int,
            record: pgrx::pg_sys::XLogRecPtr,
            buffer: *mut std::ffi::c_char,
        ) -> std::ffi::c_int {
            let work: fn(Context<'_>, $crate::page_read::Wanted) -> std::ffi::c_int = $work;
            // SAFETY: called by the WAL reader of a decoding context, whose private data is that
            // context, with what a page is to be read with.
            let (ctx, wanted) = unsafe {
                let ctx = Context::from_ptr((*reader).private_data.cast());
                let wanted = (reader, page, length, record, buffer);
                (ctx, $crate::page_read::Wanted::new(wanted))
            };
            work(ctx, wanted)
        }
    };
}

pub(super) use page_reader;

/// Has the stream release its held messages, if it is to, and reads the page.
pub(super) fn before(
    ctx: Context<'_>,
    wanted: Wanted,
    work: impl FnOnce(&mut dyn Format, &Wanted) -> Option<PageRead>,
) -> c_int {
    let pages = with_state(ctx, |format| work(format, &wanted)).flatten();
    pages.map_or(-1, |pages| pages.read(wanted))
}

/// The arguments of `XLogPageReadCB` of src/include/access/xlogreader.h, 18.
type Arguments = (
    *mut pg_sys::XLogReaderState,
    pg_sys::XLogRecPtr,
    c_int,
    pg_sys::XLogRecPtr,
    *mut c_char,
);

/// A page that PostgreSQL wants to be read now, once.
#[derive(Debug)]
pub(super) struct Wanted(Arguments);

impl PageRead {
    /// Put `ours` in front. False where that is not possible: only a walsender's output can wait,
    /// the SQL functions end when there is no more WAL. In the startup callback.
    pub(super) fn install(&mut self, ctx: Context<'_>, ours: ReadPage) -> bool {
        if !plain::am_walsender() {
            return false;
        }
        // SAFETY: the context is valid. Its reader is null, or its own, made before the plugin was
        // started, and nobody holds a reference to it.
        let Some(reader) = (unsafe { (*ctx.as_ptr()).reader.as_mut() }) else {
            return false;
        };
        self.original = reader.routine.page_read.replace(ours);
        true
    }

    /// Read the page as the original function does.
    pub(super) fn read(&self, Wanted((reader, page, length, record, buffer)): Wanted) -> c_int {
        let Some(original) = self.original else {
            return -1;
        };
        // SAFETY: the arguments are PostgreSQL's, in the call that it has made, and the function is
        // the one that it would have called.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| original(reader, page, length, record, buffer))
        }
    }

    /// Whether something is held for too long; to be asked only while something is.
    pub(super) fn is_overdue(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now).elapsed() > HELD_FOR
    }

    /// Nothing is held any more.
    #[inline]
    pub(super) fn let_go(&mut self) {
        self.since = None;
    }
}

impl Wanted {
    /// A page that is wanted.
    ///
    /// # Safety
    /// PostgreSQL has given these arguments to the function that runs, which reads the page.
    pub(super) unsafe fn new(arguments: Arguments) -> Self {
        Self(arguments)
    }

    /// Whether the server has the WAL that is wanted, for a walsender to read.
    pub(super) fn is_there(&self) -> bool {
        let (_, page, length, ..) = self.0;
        wal::has_page(page, length)
    }
}

/// Whether held messages are to be released before this transaction, which takes long to process.
pub(super) fn is_long(next: Transaction<'_>) -> bool {
    next.nentries > LONG_TRANSACTION
}
