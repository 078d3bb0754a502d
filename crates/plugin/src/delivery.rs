//! How finished frames leave the plugin.

use std::collections::HashSet;

use braid_decoder::FrameSink;
use braid_gir::SchemaNumber;
use braid_postgres::compat;
use braid_postgres::decoding::Context;
use pgrx::PgSqlErrorCode;

use super::bulk::{self, Body, LARGE_BYTES};
use super::report;

/// After how many changes that are not sent progress is reported where the reorder buffer does not
/// do it.
const SILENT_CHANGES: u32 = 100;

/// How the frames of a stream leave: as they are, or as something else that says the same.
pub(super) trait Delivery {
    /// Whether it is text in the server's encoding that leaves.
    fn is_text(&self) -> bool;

    /// Send a frame: whole records, at most of one transaction. In a callback that may write, in a
    /// transaction with a historic snapshot, unless the frame is a lone message or of a transaction
    /// that came in segments or is prepared.
    fn deliver(&mut self, ctx: Context<'_>, frame: &[u8]);

    /// Frames to come refer to no other schemas than these and new ones.
    fn keep_schemas(&mut self, _in_use: &HashSet<SchemaNumber>) {}
}

/// Each frame as one message.
pub(super) struct Frames;

impl Delivery for Frames {
    fn is_text(&self) -> bool {
        false
    }

    fn deliver(&mut self, ctx: Context<'_>, frame: &[u8]) {
        write_message(ctx, frame, true);
    }
}

/// Sends `bytes` through the decoding context; `last` if its buffer holds the last part of a unit.
/// In a callback that may write.
pub(super) fn write_message(ctx: Context<'_>, bytes: &[u8], last: bool) {
    if i32::try_from(bytes.len()).is_err() {
        report::fail(
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            "row is too large to be replicated".to_owned(),
            None,
        );
    }
    ctx.prepare_write(last);
    if bytes.len() > LARGE_BYTES && bulk::is_possible(ctx) {
        bulk::write(ctx, Body::Bytes(bytes), last);
        return;
    }
    ctx.append(bytes);
    ctx.write(last);
}

/// The outbox's way out.
pub(super) struct Sink<'s> {
    pub(super) ctx: Context<'s>,
    pub(super) delivery: &'s mut dyn Delivery,
}

impl FrameSink for Sink<'_> {
    fn send(&mut self, frame: &[u8]) {
        self.delivery.deliver(self.ctx, frame);
    }
}

/// Reports progress within a large transaction of which nothing is sent, where the reorder buffer
/// does not do it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    silent: u32,
}

impl Progress {
    /// A change is done with.
    #[inline]
    pub(super) fn note(&mut self, ctx: Context<'_>, written: bool) {
        if written {
            self.silent = 0;
        } else if !compat::REPORTS_PROGRESS {
            self.silent += 1;
            if self.silent >= SILENT_CHANGES {
                self.silent = 0;
                ctx.update_progress(false);
            }
        }
    }
}
