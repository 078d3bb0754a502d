//! This server's WAL: how far it reaches, how far it is durable, and single records of it.

use std::ffi::{CStr, c_int};
use std::ptr;

use crate::owned::frees;
use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::compat::{self, FileLocator};
use crate::error::PgError;
use crate::{ffi, plain, server};

/// Declares positions that PostgreSQL gives with their timeline, if it is asked for.
macro_rules! positions {
    ($($(#[doc = $doc:literal])* $vis:vis fn $name:ident = $symbol:ident;)*) => {$(
        $(#[doc = $doc])*
        #[must_use]
        $vis fn $name() -> u64 {
            // SAFETY: reads shared memory under its spinlock; no timeline is asked for.
            unsafe { pg_sys::$symbol(ptr::null_mut()) }
        }
    )*};
}

positions! {
    /// Returns up to where WAL is on this server's disk.
    pub fn flushed = GetFlushRecPtr;
    /// Returns up to where a standby has replayed WAL.
    fn replayed = GetXLogReplayRecPtr;
}

/// Returns up to where WAL is written into the buffers.
#[must_use]
pub fn inserted() -> u64 {
    plain::GetXLogInsertRecPtr()
}

/// Returns where the last record ends that this process has written; 0 if it has written none in
/// the current transaction.
#[must_use]
pub fn last_record_end() -> u64 {
    plain::XactLastRecEnd()
}

/// Writes WAL to disk up to a position that a record of it has.
pub fn flush(up_to: u64) {
    plain::XLogFlush(up_to);
}

/// Returns the oldest transaction that runs, and then the end of WAL.
#[must_use]
pub fn horizon() -> (pg_sys::TransactionId, u64) {
    (compat::oldest_active_transaction(), inserted())
}

/// Returns up to where the server has WAL for decoding to read.
#[must_use]
pub fn readable_end() -> u64 {
    if server::is_in_recovery() {
        replayed()
    } else {
        flushed()
    }
}

/// Returns whether the server has a page of WAL up to `length` bytes, for decoding to read.
#[must_use]
pub fn has_page(page: u64, length: c_int) -> bool {
    page.saturating_add(u64::try_from(length).unwrap_or(0)) <= readable_end()
}

/// Kinds of positions that synchronous standbys report: `NUM_SYNC_REP_WAIT_MODE` of
/// src/include/replication/syncrep.h, 15 to 18.
const STANDBY_POSITIONS: usize = 3;

/// Returns up to where the synchronous standbys have WAL, in the sense of `mode`
/// (`SYNC_REP_WAIT_WRITE` and so on). `None` if there are to be none.
#[must_use]
pub fn at_standbys(mode: usize) -> Option<u64> {
    // SAFETY: the settings are variables of the process. The positions are an array in shared
    // memory that is never freed, with more than `mode` entries; each is read whole.
    unsafe {
        // SyncRepRequested and SyncStandbysDefined of src/include/replication/syncrep.h, 15 to 18.
        let names = pg_sys::SyncRepStandbyNames;
        if pg_sys::max_wal_senders == 0
            || names.is_null()
            || *names == 0
            || pg_sys::WalSndCtl.is_null()
            || mode >= STANDBY_POSITIONS
        {
            return None;
        }
        let positions = (&raw const (*pg_sys::WalSndCtl).lsn).cast::<pg_sys::XLogRecPtr>();
        Some(positions.add(mode).read_volatile())
    }
}

/// XLOG_HEAP_OPMASK, and XLOG_HEAP_DELETE, UPDATE and HOT_UPDATE of
/// src/include/access/heapam_xlog.h, 15 to 18.
const HEAP_OPERATION: u32 = 0x70;
const HEAP_REMOVES: [u32; 3] = [0x10, 0x20, 0x40];

/// Reads single records of WAL.
#[derive(Debug)]
pub struct RecordReader {
    reader: *mut pg_sys::XLogReaderState,
}

impl RecordReader {
    /// Makes a reader.
    ///
    /// # Errors
    /// 53200 without memory for it.
    pub fn new() -> Result<Self, PgError> {
        let mut routine = pg_sys::XLogReaderRoutine {
            page_read: Some(ffi::read_local_xlog_page),
            segment_open: Some(ffi::wal_segment_open),
            segment_close: Some(ffi::wal_segment_close),
        };
        // SAFETY: the reader copies the routine; no directory means the server's own.
        let reader = unsafe {
            pg_sys::XLogReaderAllocate(
                pg_sys::wal_segment_size,
                ptr::null(),
                &raw mut routine,
                ptr::null_mut(),
            )
        };
        if reader.is_null() {
            return Err(PgError::new(
                SqlState::OutOfMemory,
                "out of memory for a reader of WAL",
            ));
        }
        Ok(Self { reader })
    }

    /// Returns the file and place of the row that the record which begins at `lsn` has deleted, or
    /// replaced; `None` for another kind of record.
    ///
    /// # Errors
    /// 58P01 if there is no such record any more.
    pub fn removed_row(
        &mut self,
        lsn: u64,
    ) -> Result<Option<(FileLocator, pg_sys::ItemPointerData)>, PgError> {
        // SAFETY: the reader is valid, and the record that it gives stays decoded until the next
        // one is asked for. The data of a deletion and of an update begins with a transaction id
        // and the row's number (xl_heap_delete, xl_heap_update of src/include/access/heapam_xlog.h,
        // 15 to 18), and its length is checked. Where an update names two blocks, the second is the
        // old row's.
        unsafe {
            let mut message = ptr::null_mut();
            pg_sys::XLogBeginRead(self.reader, lsn);
            let record = pg_sys::XLogReadRecord(self.reader, &raw mut message);
            if record.is_null() {
                let message = if message.is_null() {
                    "no record".to_owned()
                } else {
                    CStr::from_ptr(message).to_string_lossy().into_owned()
                };
                return Err(PgError::new(
                    SqlState::UndefinedFile,
                    format!("could not read WAL for deleted rows: {message}"),
                ));
            }
            let decoded = (*self.reader).record;
            let heap = u32::from((*record).xl_rmid) == pg_sys::RmgrIds::RM_HEAP_ID;
            let operation = u32::from((*record).xl_info) & HEAP_OPERATION;
            let data = (*decoded).main_data;
            if !heap
                || !HEAP_REMOVES.contains(&operation)
                || data.is_null()
                || (*decoded).main_data_len < 6
            {
                return Ok(None);
            }
            let number = ptr::read_unaligned(
                data.add(size_of::<pg_sys::TransactionId>())
                    .cast::<pg_sys::OffsetNumber>(),
            );
            let mut file = compat::FileLocator::default();
            let mut block = 0;
            let found = (0..2_u8).rev().any(|id| {
                pg_sys::XLogRecGetBlockTagExtended(
                    self.reader,
                    id,
                    &raw mut file,
                    ptr::null_mut(),
                    &raw mut block,
                    ptr::null_mut(),
                )
            });
            if !found {
                return Ok(None);
            }
            let mut place = pg_sys::ItemPointerData::default();
            pgrx::itemptr::item_pointer_set_all(&mut place, block, number);
            Ok(Some((file, place)))
        }
    }
}

frees! {
    RecordReader: |value| pg_sys::XLogReaderFree(value.reader);
}
