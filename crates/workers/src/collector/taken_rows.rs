//! Rows that sessions have taken out of tables without a key, as the collector writes them down
//! (`braid_node::taken_row`).
//!
//! Decoded WAL says whole rows, but not which of several identical ones is gone. The record has the
//! place of the row, and the dead version is there until the collector has come past it.

use std::ffi::CStr;
use std::mem::size_of;
use std::ptr;

use braid_apply::DeadRows;
use braid_gir::{lsn_text, parse_lsn};
use braid_node::subscription::{execute_counting, rows};
use braid_node::taken_row::{TakenRow, store};
use braid_postgres::error::PgError;
use braid_postgres::subtransaction::attempt;
use braid_postgres::{compat, ffi};
use pgrx::pg_sys;

/// XLOG_HEAP_OPMASK of src/include/access/heapam_xlog.h, 15 to 18.
const HEAP_OPERATION: u32 = 0x70;
/// XLOG_HEAP_DELETE, XLOG_HEAP_UPDATE and XLOG_HEAP_HOT_UPDATE there.
const HEAP_REMOVES: [u32; 3] = [0x10, 0x20, 0x40];

/// A row that a session has taken out, as WAL has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// Its table.
    pub relation: u32,
    /// Where the record of its deletion or update begins.
    pub lsn: u64,
    /// Commit timestamp of that, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// Where the transaction ends.
    pub end_lsn: u64,
}

/// Reads single records of WAL.
#[derive(Debug)]
pub struct RecordReader {
    reader: *mut pg_sys::XLogReaderState,
}

impl RecordReader {
    fn new() -> Result<Self, PgError> {
        let mut routine = pg_sys::XLogReaderRoutine {
            page_read: Some(ffi::read_local_xlog_page),
            segment_open: Some(ffi::wal_segment_open),
            segment_close: Some(ffi::wal_segment_close),
        };
        // SAFETY: the reader copies the routine, and is freed with this.
        let reader = unsafe {
            pg_sys::XLogReaderAllocate(
                pg_sys::wal_segment_size,
                ptr::null(),
                &raw mut routine,
                ptr::null_mut(),
            )
        };
        if reader.is_null() {
            return Err(PgError::new("53200", "out of memory for a reader of WAL"));
        }
        Ok(Self { reader })
    }

    /// The file and place of the row that the record which begins at `lsn` has deleted, or replaced.
    fn row_of(
        &mut self,
        lsn: u64,
    ) -> Result<Option<(compat::FileLocator, pg_sys::ItemPointerData)>, PgError> {
        // SAFETY: the reader is valid; a record that it gives is decoded until the next one is asked for. The data of a deletion and of an update begins with
        // a transaction id and the row's number (xl_heap_delete, xl_heap_update of src/include/access/heapam_xlog.h, 15 to 18); where an update names two
        // blocks the second is the old row's.
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
                    "58P01",
                    format!("could not read WAL for rows that were taken out: {message}"),
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

impl Drop for RecordReader {
    fn drop(&mut self) {
        // SAFETY: allocated once, and freed once.
        unsafe { pg_sys::XLogReaderFree(self.reader) };
    }
}

/// What is collected in one transaction.
#[derive(Debug)]
pub struct Collection {
    reader: RecordReader,
    /// What is looked at of one row.
    memory: pg_sys::MemoryContext,
    dead: DeadRows,
    /// Up to here it was collected before.
    from: u64,
    /// And up to here now.
    up_to: u64,
    /// It is said in the log that something could not be read.
    has_warned: bool,
}

impl Collection {
    /// Begin, in a transaction of the caller's.
    ///
    /// # Errors
    /// Whatever SPI says.
    pub fn begin() -> Result<Self, PgError> {
        let found = rows("select \"position\"::text from braid.taken_up_to", &[])?;
        let found = found.first().and_then(|row| row.first()?.clone());
        let from = found.and_then(|text| parse_lsn(&text)).unwrap_or(0);
        Ok(Self {
            reader: RecordReader::new()?,
            // SAFETY: goes with the transaction.
            memory: unsafe {
                pg_sys::AllocSetContextCreateInternal(
                    pg_sys::CurTransactionContext,
                    c"braid taken row".as_ptr(),
                    0,
                    8 * 1024,
                    8 * 1024 * 1024,
                )
            },
            dead: DeadRows::default(),
            from,
            up_to: from,
            has_warned: false,
        })
    }

    /// Write down what sessions have taken out. Of what lies in a file that is no more, as the table was rewritten or truncated since, nothing is known; nor of what can't be
    /// read, which is said in the log: this process, for which all others wait and dead rows stay, goes on.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises when it is written.
    pub fn add(&mut self, removals: &[Removal]) -> Result<(), PgError> {
        let all = attempt(|| Ok((self.read(removals)?, true)));
        let taken = all.unwrap_or_else(|_| {
            // One by one, without those at which that fails.
            let each = removals.iter().flat_map(|removal| {
                let one = attempt(|| Ok((self.read(std::slice::from_ref(removal))?, true)));
                one.unwrap_or_else(|error| {
                    if !std::mem::replace(&mut self.has_warned, true) {
                        PgError::new("01000", format!("a row that was taken out of a table without a key can't be read: {}", error.message))
                            .with_detail("Should several nodes add and take out identical rows at this time, they may end with different numbers of them.")
                            .warn();
                    }
                    Vec::new()
                })
            });
            each.collect()
        });
        store(&taken)
    }

    fn read(&mut self, removals: &[Removal]) -> Result<Vec<TakenRow>, PgError> {
        let mut taken = Vec::new();
        for removal in removals {
            pgrx::check_for_interrupts!();
            // It was decoded before, and the server has crashed before the slot had moved on.
            if removal.end_lsn <= self.from {
                continue;
            }
            self.up_to = self.up_to.max(removal.end_lsn);
            let Some((file, place)) = self.reader.row_of(removal.lsn)? else {
                continue;
            };
            let table = pg_sys::Oid::from(removal.relation);
            // SAFETY: of what is allocated nothing is used afterwards.
            let found = unsafe {
                pg_sys::MemoryContextReset(self.memory);
                let before = pg_sys::MemoryContextSwitchTo(self.memory);
                let found = self.dead.at(table, file, place);
                pg_sys::MemoryContextSwitchTo(before);
                found?
            };
            if let Some((hash, row)) = found {
                let own = (removal.timestamp, 0);
                // What a transaction has added and taken out itself nobody else has seen.
                if row != Some(own) {
                    taken.push(TakenRow {
                        hash,
                        relation: removal.relation,
                        row,
                        removal: own,
                    });
                }
            }
        }
        Ok(taken)
    }

    /// All of it is written.
    ///
    /// # Errors
    /// Whatever SPI says.
    pub fn end(self) -> Result<(), PgError> {
        if self.up_to == self.from {
            return Ok(());
        }
        let position = lsn_text(self.up_to);
        let moved = execute_counting(
            "update braid.taken_up_to set \"position\" = $1::pg_lsn",
            &[position.as_str().into()],
        )?;
        if moved == 0 {
            execute_counting(
                "insert into braid.taken_up_to values ($1::pg_lsn)",
                &[position.as_str().into()],
            )?;
        }
        Ok(())
    }
}
