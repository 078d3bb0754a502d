//! Decoding of this server's WAL through a logical replication slot, in a process that is no
//! walsender; and the dead rows that the slot holds.
//!
//! Decoded changes go to the slot's output plugin, which may gather them in this process.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pgrx::pg_sys;

use crate::error::{self, PgError};
use crate::{compat, ffi, latch, plain, wal};

/// Pause between two looks for a page of WAL that is still to be written.
const PAUSE: Duration = Duration::from_millis(100);

/// A slot that this process has taken up, and its decoder. There is one in a process, until the
/// process ends.
#[derive(Debug)]
pub struct SlotDecoder {
    context: *mut pg_sys::LogicalDecodingContext,
    slot: *mut pg_sys::ReplicationSlot,
    /// Catalogs were read as they are now since it decoded last.
    mixed: bool,
}

impl SlotDecoder {
    /// Takes the slot up, to decode from where it is. Run in a transaction.
    ///
    /// Outside of one PostgreSQL would mark the process as one that decodes and nothing else
    /// (`PROC_IN_LOGICAL_DECODING`), and leave it out of all snapshots. Then another process that
    /// reads a row which this process has written, but not committed yet, would take its
    /// transaction for aborted, and mark the row so for good.
    #[must_use]
    pub fn open(slot: &CStr) -> Self {
        // SAFETY: in a transaction of a process that is connected to the slot's database. The
        // functions are those that the SQL functions over slots read WAL with. The context is made
        // in TopMemoryContext, so it lives as long as the process, as the slot in shared memory
        // does.
        unsafe {
            pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            compat::acquire_slot(slot);
            let mut routine = pg_sys::XLogReaderRoutine {
                page_read: Some(read_page),
                segment_open: Some(ffi::wal_segment_open),
                segment_close: Some(ffi::wal_segment_close),
            };
            let context = pg_sys::CreateDecodingContext(
                0,
                std::ptr::null_mut(),
                false,
                &raw mut routine,
                None,
                None,
                None,
            );
            let slot = pg_sys::MyReplicationSlot;
            pg_sys::XLogBeginRead((*context).reader, (*slot).data.restart_lsn);
            Self {
                context,
                slot,
                mixed: true,
            }
        }
    }

    /// Returns up to where it has decoded.
    #[must_use]
    pub fn position(&self) -> u64 {
        // SAFETY: the context and its reader live as long as the process.
        unsafe { (*(*self.context).reader).EndRecPtr }
    }

    /// Decodes up to `end`, which is flushed, or for this time. Returns whether it is done. Run
    /// outside of transactions.
    pub fn read_up_to(&mut self, end: u64, longest: Duration) -> bool {
        if self.position() >= end {
            return true;
        }
        if std::mem::take(&mut self.mixed) {
            // Catalog entries read as of now differ from those of the decoded moment.
            forget_catalogs();
        }
        let started = Instant::now();
        while self.position() < end {
            // SAFETY: the context and its reader live as long as the process. A record stays
            // decoded until the next one is read.
            unsafe {
                let reader = (*self.context).reader;
                let mut message = std::ptr::null_mut();
                let record = pg_sys::XLogReadRecord(reader, &raw mut message);
                if !message.is_null() {
                    let message = CStr::from_ptr(message).to_string_lossy().into_owned();
                    pgrx::error!("could not read WAL for deletions: {message}");
                }
                if !record.is_null() {
                    ffi::logical_decoding_process_record(self.context, reader);
                }
            }
            pgrx::check_for_interrupts!();
            if started.elapsed() > longest {
                return false;
            }
        }
        true
    }

    /// Moves the slot on: everything up to where it has decoded is written and flushed.
    pub fn confirm(&self) {
        // SAFETY: the slot is this process's.
        unsafe { pg_sys::LogicalConfirmReceivedLocation(self.position()) };
    }

    /// Runs `work` in a transaction of its own, with catalogs as they are now.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn apart<T>(&mut self, work: impl FnOnce() -> Result<T, PgError>) -> Result<T, PgError> {
        if !std::mem::replace(&mut self.mixed, true) {
            forget_catalogs();
        }
        error::transaction(work)
    }

    /// Returns whether the slot holds dead rows.
    #[must_use]
    pub fn holds_dead_rows(&self) -> bool {
        // SAFETY: the slot is this process's, which alone writes this word.
        unsafe { (*self.slot).data.xmin != pg_sys::InvalidTransactionId }
    }

    /// Has the slot hold the dead rows that transactions from this one on have left, and earlier
    /// ones no more.
    pub fn hold_dead_rows(&self, horizon: pg_sys::TransactionId) {
        // SAFETY: the slot is this process's, which alone writes these two words; others read them,
        // each in one piece.
        unsafe {
            let slot = self.slot;
            let held = (*slot).data.xmin;
            if held != pg_sys::InvalidTransactionId && !pg_sys::TransactionIdPrecedes(held, horizon)
            {
                return;
            }
            for place in [&raw mut (*slot).data.xmin, &raw mut (*slot).effective_xmin] {
                AtomicU32::from_ptr(place.cast()).store(horizon.into_inner(), Ordering::Release);
            }
            pg_sys::ReplicationSlotMarkDirty();
            pg_sys::ReplicationSlotsComputeRequiredXmin(false);
        }
    }

    /// Writes the slot to disk.
    pub fn save(&self) {
        // SAFETY: the slot is this process's.
        unsafe { pg_sys::ReplicationSlotSave() };
    }
}

fn forget_catalogs() {
    plain::InvalidateSystemCaches();
}

/// Reads a page of WAL, up to `length` bytes of it: the next record may begin on one that is still
/// to be written.
///
/// PostgreSQL's own function waits for that without noticing that the postmaster is gone. Then this
/// process would go on for ever, and with it the shared memory, so that the server could not be
/// started again.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn read_page(
    reader: *mut pg_sys::XLogReaderState,
    page: pg_sys::XLogRecPtr,
    length: c_int,
    record: pg_sys::XLogRecPtr,
    buffer: *mut c_char,
) -> c_int {
    while !wal::has_page(page, length) {
        latch::wait(Some(PAUSE));
    }
    // SAFETY: the reader calls this with its own arguments.
    unsafe { ffi::read_local_xlog_page(reader, page, length, record, buffer) }
}
