//! The rows that a copy reads, as COPY's text form, from the provider to PostgreSQL's COPY. Run by
//! the copy workers.

use std::cell::RefCell;
use std::sync::atomic::Ordering;

use braid_node::rate_limit::Limiter;
use braid_node::registry::TableEntry;
use braid_postgres::error::PgError;
use braid_postgres::libpq::{CopyData, CopyMessage};

use super::source::Source;

/// Bytes that are read at a time where only rows count.
const DRAINED: usize = 64 * 1024;

/// How much was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Rows.
    pub rows: u64,
    /// Bytes received.
    pub bytes: u64,
}

/// Where COPY's rows come from. COPY's callback has no argument of its own.
struct Feed {
    source: Source,
    message: Option<CopyMessage>,
    /// Bytes of `message` that COPY has.
    taken: usize,
    ended: bool,
    copied: Copied,
    counters: Option<&'static TableEntry>,
    limiter: Limiter,
}

thread_local! {
    static FEED: RefCell<Option<Feed>> = const { RefCell::new(None) };
}

/// Begins to read what `source` has started to send.
pub(super) fn open(source: Source, counters: Option<&'static TableEntry>, limiter: Limiter) {
    FEED.set(Some(Feed {
        source,
        message: None,
        taken: 0,
        ended: false,
        copied: Copied::default(),
        counters,
        limiter,
    }));
}

/// Ends it. Returns the source, and how much came.
pub(super) fn close() -> Option<(Source, Copied)> {
    let feed = FEED.take()?;
    Some((feed.source, feed.copied))
}

/// Reads the feed to its end. Returns the number of rows.
pub(super) fn drain() -> Result<u64, PgError> {
    let mut passed_over = vec![0; DRAINED];
    FEED.with(|cell| {
        let mut feed = cell.borrow_mut();
        let Some(feed) = feed.as_mut() else {
            return Ok(0);
        };
        while feed.read(&mut passed_over, 1)? > 0 {
            pgrx::check_for_interrupts!();
        }
        Ok(feed.copied.rows)
    })
}

/// Gives COPY the bytes of the feed.
pub(super) fn read(out: &mut [u8], minimum: usize) -> Result<usize, PgError> {
    FEED.with(|cell| match cell.borrow_mut().as_mut() {
        Some(feed) => feed.read(out, minimum),
        None => Ok(0),
    })
}

impl Feed {
    /// Fills `out` with the received bytes; waits only while it has less than `minimum` bytes.
    fn read(&mut self, out: &mut [u8], minimum: usize) -> Result<usize, PgError> {
        let mut filled = 0;
        while let Some(room) = out.get_mut(filled..).filter(|room| !room.is_empty()) {
            if let Some(message) = &self.message {
                let rest = message.get(self.taken..).unwrap_or_default();
                let count = rest.len().min(room.len());
                for (to, from) in room.iter_mut().zip(rest) {
                    *to = *from;
                }
                filled += count;
                self.taken += count;
                if count == rest.len() {
                    self.message = None;
                }
                continue;
            }
            if self.ended {
                break;
            }
            if let Some(pause) = self.limiter.pause() {
                if filled >= minimum {
                    break;
                }
                self.limiter.wait(pause);
                continue;
            }
            let next = match self.source.connection.try_copy_data()? {
                CopyData::Message(message) => Some(message),
                CopyData::Pending if filled >= minimum => break,
                CopyData::Pending => self.source.connection.copy_data()?,
                CopyData::End => None,
            };
            match next {
                Some(message) => self.accept(message),
                None => self.ended = true,
            }
        }
        if let Some(counters) = self.counters {
            counters
                .copy_rows
                .store(self.copied.rows, Ordering::Relaxed);
            counters
                .copy_bytes
                .store(self.copied.bytes, Ordering::Relaxed);
        }
        Ok(filled)
    }

    fn accept(&mut self, message: CopyMessage) {
        // In COPY's text form a line feed inside a value is escaped, so each one ends a row.
        let rows = message.iter().filter(|byte| **byte == b'\n').count();
        let rows = u64::try_from(rows).unwrap_or(0);
        let bytes = u64::try_from(message.len()).unwrap_or(0);
        self.copied.rows += rows;
        self.copied.bytes += bytes;
        self.limiter.take(rows, bytes);
        self.message = Some(message);
        self.taken = 0;
    }
}
