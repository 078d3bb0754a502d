//! Which versions of rows, written by other nodes, the changes in WAL have replaced. Run by the walsender, for a subscriber that wants to
//! tell concurrent changes from others.
//!
//! WAL names the place of the old row version, not its writer. So the version is looked at in its table, in the moment in which the record
//! is read: then it is still there, unless the walsender is far behind. Where it is not there any more, nothing is known and nothing sent.
//! Nothing is looked at in a database that has no subscriptions, as all rows are its own.

use std::collections::{HashMap, VecDeque};

use braid_node::origin::COPIED;
use braid_node::registry;
use braid_postgres::compat;
use braid_postgres::heap_page::lifetime;
use braid_postgres::xid::still_known;
use pgrx::pg_sys;

use super::page_read::readable_end;

/// XLOG_HEAP_OPMASK and the kinds of records of src/include/access/heapam_xlog.h, 15 to 18.
const KINDS: u8 = 0x70;
const DELETE: u8 = 0x10;
const UPDATE: u8 = 0x20;
const HOT_UPDATE: u8 = 0x40;
/// XLH_UPDATE_CONTAINS_NEW_TUPLE and XLH_DELETE_CONTAINS_OLD there: a table that is decoded.
const HAS_NEW: u8 = 1 << 4;
const HAS_OLD: u8 = 1 << 1 | 1 << 2;
/// Size of the fields that xl_heap_update and xl_heap_delete have in common: xmax, the row's number, two bytes of flags.
const FIELDS: u32 = 8;

/// How many versions are kept for changes that are not sent yet. Of the others nothing is known.
const KEPT: usize = 65_536;
/// How many records are read between two looks at how things are.
const LOOK_EVERY: u32 = 256;
/// Further behind the end of WAL than this many bytes, old row versions are mostly gone, and reading their pages would cost time.
const FAR_BEHIND: u64 = 64 * 1024 * 1024;

/// Versions that changes have replaced, by the LSNs of the changes.
#[derive(Debug, Default)]
pub(super) struct ReplacedRows {
    /// Commit timestamp (TimestampTz) and origin of each.
    versions: HashMap<u64, (i64, pg_sys::RepOriginId)>,
    /// Their LSNs, as they were read.
    order: VecDeque<u64>,
    /// Records until the next look.
    until_look: u32,
    /// Whether other nodes' rows are looked for.
    looks: bool,
}

impl ReplacedRows {
    /// A record is read that may be decoded: look at what it has replaced.
    ///
    /// # Safety
    /// The reader is valid and holds a record.
    #[inline]
    pub(super) unsafe fn note(&mut self, reader: *mut pg_sys::XLogReaderState) {
        // SAFETY: as the caller says.
        unsafe {
            let record = (*reader).record;
            if record.is_null()
                || u32::from((*record).header.xl_rmid) != pg_sys::RmgrIds::RM_HEAP_ID
            {
                return;
            }
            let kind = (*record).header.xl_info & KINDS;
            if matches!(kind, DELETE | UPDATE | HOT_UPDATE) && self.is_looking((*reader).ReadRecPtr)
            {
                self.look((*reader).ReadRecPtr, record, kind);
            }
        }
    }

    fn is_looking(&mut self, lsn: u64) -> bool {
        if self.until_look == 0 {
            self.until_look = LOOK_EVERY;
            // SAFETY: a variable of the process.
            let keeps_versions = unsafe { pg_sys::track_commit_timestamp };
            self.looks = keeps_versions
                && registry::has_subscriptions()
                && readable_end().saturating_sub(lsn) < FAR_BEHIND;
        }
        self.until_look -= 1;
        self.looks
    }

    /// # Safety
    /// The record is a valid one of this kind.
    unsafe fn look(&mut self, lsn: u64, record: *mut pg_sys::DecodedXLogRecord, kind: u8) {
        // SAFETY: as the caller says; the fields are as long as they are, and there are blocks up to `max_block_id`.
        unsafe {
            if (*record).main_data_len < FIELDS || (*record).max_block_id < 0 {
                return;
            }
            let data = (*record).main_data.cast::<u8>();
            let item = data.add(4).cast::<u16>().read_unaligned();
            let flags = data.add(7).read();
            let wanted = if kind == DELETE { HAS_OLD } else { HAS_NEW };
            if flags & wanted == 0 {
                return;
            }
            // The second block is the old row's, if that is not the new one's.
            let blocks = (*record).blocks.as_ptr();
            let has_second = (*record).max_block_id > 0 && (*blocks.add(1)).in_use;
            let block = &*blocks.add(usize::from(kind != DELETE && has_second));
            if !block.in_use || block.forknum != pg_sys::ForkNumber::MAIN_FORKNUM {
                return;
            }
            let Some(found) = lifetime(compat::block_file(block), block.blkno, item) else {
                return;
            };
            // Another row may have its place by now.
            if found.ended_by != Some((*record).header.xl_xid) {
                return;
            }
            let version = found.writer.and_then(still_known);
            if let Some((timestamp, origin)) =
                version.filter(|(_, origin)| *origin != 0 && *origin != COPIED)
            {
                self.keep(lsn, (timestamp, origin));
            }
        }
    }

    fn keep(&mut self, lsn: u64, version: (i64, pg_sys::RepOriginId)) {
        while self.order.len() >= KEPT {
            if let Some(oldest) = self.order.pop_front() {
                self.versions.remove(&oldest);
            }
        }
        if self.versions.insert(lsn, version).is_none() {
            self.order.push_back(lsn);
        }
    }

    /// What the change at `lsn` has replaced: commit timestamp (TimestampTz) and origin.
    #[inline]
    pub(super) fn take(&mut self, lsn: u64) -> Option<(i64, pg_sys::RepOriginId)> {
        if self.versions.is_empty() {
            return None;
        }
        let version = self.versions.remove(&lsn);
        if self.versions.is_empty() {
            self.order.clear();
        }
        version
    }
}
