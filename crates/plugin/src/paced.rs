//! Flushes that wait for more to flush. Run by the walsender, for formats whose messages have to
//! stay apart.
//!
//! A walsender tries to flush after each WAL record, so each small transaction costs a write to the
//! socket, which is more than all other work for it. While there is WAL to read, the send buffer is
//! not flushed. It stays in order, keepalives included, so that no position is sent before the
//! messages that precede it. It is flushed
//!
//! - before the walsender waits for WAL, when it has been held for too long, and before a long
//!   transaction ([`super::page_read`]);
//! - whenever something is written in the usual way (`outgoing`), as it is from some size on.
//!
//! The walsender's flushes go through functions of ours ([`super::turn`]), which do nothing while
//! flushes wait; a blocking flush (errors, the end of the stream) never does.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use braid_postgres::decoding::{Context, Transaction};
use braid_postgres::ffi::Client;

use super::page_read::{PageRead, before, is_long, page_reader};

/// Flushes wait.
static WAITING: AtomicBool = AtomicBool::new(false);

/// Whether the send buffer is not to be flushed for now.
#[inline]
pub(super) fn flushes_wait() -> bool {
    WAITING.load(Relaxed)
}

/// The state of a paced stream, beside its buffer.
#[derive(Debug, Default)]
pub struct Pacing {
    pages: PageRead,
    /// Flushes can wait.
    on: bool,
}

impl Pacing {
    /// Flushes can wait from now on. Only a walsender has any. In the startup callback of `ctx`, to
    /// whose format this belongs.
    pub(super) fn enter(&mut self, ctx: Context<'_>) {
        if self.on || !self.pages.install(ctx, read_page) {
            return;
        }
        WAITING.store(false, Relaxed);
        self.on = true;
    }

    /// Something was put into the send buffer: it may wait for now.
    #[inline]
    pub(super) fn hold(&self) {
        if self.on {
            WAITING.store(true, Relaxed);
        }
    }

    /// The next flush is one.
    #[inline]
    pub(super) fn release(&mut self) {
        WAITING.store(false, Relaxed);
        self.pages.let_go();
    }

    /// Flushes before a transaction that takes long to process.
    pub(super) fn release_before(&mut self, next: Transaction<'_>) {
        if is_long(next) && WAITING.load(Relaxed) {
            self.release();
            // If the client is gone, the next write finds that out too.
            let _ = Client::of_process().is_some_and(Client::flush_if_writable);
        }
    }
}

impl Drop for Pacing {
    /// Unlike in other guards, this also runs after an error: it only assigns a variable, and no
    /// connection must be left with flushes that wait.
    fn drop(&mut self) {
        if self.on {
            WAITING.store(false, Relaxed);
        }
    }
}

page_reader!(read_page, |ctx, wanted| before(
    ctx,
    wanted,
    |format, wanted| {
        let pacing = format.paced()?;
        // The original function flushes itself before it waits.
        if WAITING.load(Relaxed) && (!wanted.is_there() || pacing.pages.is_overdue()) {
            pacing.release();
        }
        Some(pacing.pages)
    }
));
