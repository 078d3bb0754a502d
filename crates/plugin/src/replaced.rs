//! Finds the row versions, written by other nodes, that changes in WAL have replaced. Run by the walsender, for a subscriber that wants to
//! tell concurrent changes from others.
//!
//! WAL names the place of the old row version, not its writer. So the walsender looks at the version in its table as soon as it reads the
//! record: the version is still there then, and its page in shared buffers, unless the walsender is far behind. Of a version that is gone,
//! or whose page is, nothing is known and nothing sent. In a database without subscriptions all rows are its own, so nothing is looked at.
//!
//! A walsender looks for each update and delete of its node, which is a large part of its work: so nothing here asks the file system, and
//! the transactions that were looked up last are remembered.

use braid_decoder::{ReplacedVersions, Writers, Written, full_id};
use braid_node::origin::COPIED;
use braid_node::registry;
use braid_postgres::compat;
use braid_postgres::heap_page::lifetime;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{Sees, has_any};
use braid_postgres::xid::still_known;
use pgrx::pg_sys;

use super::page_read::readable_end;
use super::stream::{in_transaction, no_origin};

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

/// How many versions are kept for changes that are not sent yet, in 24 bytes each. Of the others nothing is known.
const KEPT: usize = 262_144;
/// How many records are read between two looks at how things are.
const LOOK_EVERY: u32 = 256;
/// Further behind the end of WAL than this many bytes, old row versions are mostly gone, and reading their pages would cost time.
const FAR_BEHIND: u64 = 64 * 1024 * 1024;

/// Versions that changes have replaced, by the LSNs of the changes.
#[derive(Debug)]
pub(super) struct ReplacedRows {
    versions: ReplacedVersions,
    writers: Writers,
    /// The next transaction's full id, as of the last look at how things are.
    next_xid: u64,
    /// The database has, or had since the stream began, subscriptions, enabled or not.
    subscribed: bool,
    /// Records until the next look.
    until_look: u32,
    /// Whether other nodes' rows are looked for.
    looks: bool,
}

impl ReplacedRows {
    /// Nothing is looked at yet.
    ///
    /// # Safety
    /// Where a transaction can be begun, or in one; without a historic snapshot.
    pub(super) unsafe fn new() -> Self {
        // SAFETY: as the caller says.
        let subscribed = unsafe { in_transaction(|| has_subscriptions()) };
        Self {
            versions: ReplacedVersions::new(KEPT),
            writers: Writers::default(),
            next_xid: 0,
            subscribed,
            until_look: 0,
            looks: false,
        }
    }

    /// A record is read that may be decoded: look at what it has replaced.
    ///
    /// A record with an origin is none of this node's writers': it was applied here, and its writer
    /// may not have seen the row that it replaced here.
    ///
    /// # Safety
    /// The reader is valid and holds a record.
    #[inline]
    pub(super) unsafe fn note(&mut self, reader: *mut pg_sys::XLogReaderState) {
        // SAFETY: as the caller says.
        unsafe {
            let record = (*reader).record;
            if record.is_null()
                || (*record).record_origin != no_origin()
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
            self.subscribed |= registry::has_subscriptions();
            self.looks = keeps_versions
                && self.subscribed
                && readable_end().saturating_sub(lsn) < FAR_BEHIND;
            if self.looks {
                // SAFETY: a read of shared memory.
                self.next_xid = unsafe { pg_sys::ReadNextFullTransactionId() }.value;
            }
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
            let xid = (*record).header.xl_xid;
            if found.ended_by != Some(xid) {
                return;
            }
            // A transaction's own row is this node's.
            let Some(writer) = found.writer.filter(|writer| *writer != xid) else {
                return;
            };
            let id = full_id(writer.into_inner(), self.next_xid);
            if let Some(version) = self.writers.get(id, || still_known(writer))
                && version.1 != COPIED
            {
                self.versions.keep(lsn, version);
            }
        }
    }

    /// The version that the change at `lsn` has replaced: commit timestamp (TimestampTz) and origin.
    #[inline]
    pub(super) fn take(&mut self, lsn: u64) -> Option<Written> {
        self.versions.take(lsn)
    }
}

/// Whether the database has subscriptions. The manager knows only those that are enabled; rows of
/// the others' nodes are there all the same.
///
/// # Safety
/// In a transaction without a historic snapshot.
unsafe fn has_subscriptions() -> bool {
    // SAFETY: as the caller says; the table is read without an index.
    own_table("subscription")
        .is_ok_and(|table| unsafe { has_any(table, pg_sys::InvalidOid, &[], Sees::Committed) })
}
