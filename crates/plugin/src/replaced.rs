//! Finds the row versions, written by other nodes, that changes in WAL have replaced. Run by the
//! walsender, for a subscriber that wants to distinguish concurrent changes from others.
//!
//! WAL names the place of the old row version, not its writer. So the walsender looks at the
//! version in its table as soon as it reads the record. The version still exists then, and its page
//! is in shared buffers, unless the walsender is far behind. If the version or the page is gone,
//! nothing is sent about it. In a database without subscriptions all rows are its own, so nothing
//! is looked up.
//!
//! A walsender does this for each update and delete of its node, which is a large part of its work.
//! So this module never asks the file system, and remembers the transactions that it looked up
//! last.

use braid_decoder::{ReplacedVersions, Writers, Written, full_id};
use braid_node::origin::COPIED;
use braid_node::registry;
use braid_postgres::compat;
use braid_postgres::decoding::{Context, Record};
use braid_postgres::heap_page::lifetime;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{Sees, has_any};
use braid_postgres::xid::{self, still_known};
use braid_postgres::{server, wal};
use pgrx::pg_sys;

use super::origin_names::no_origin;
use super::transaction::in_transaction;

/// XLOG_HEAP_OPMASK and the kinds of records of src/include/access/heapam_xlog.h, 15 to 18.
const KINDS: u8 = 0x70;
const DELETE: u8 = 0x10;
const UPDATE: u8 = 0x20;
const HOT_UPDATE: u8 = 0x40;
/// XLH_UPDATE_CONTAINS_NEW_TUPLE and XLH_DELETE_CONTAINS_OLD of the same file: a table that is
/// decoded.
const HAS_NEW: u8 = 1 << 4;
const HAS_OLD: u8 = 1 << 1 | 1 << 2;
/// Size of the fields that xl_heap_update and xl_heap_delete have in common: xmax, the row's
/// number, two bytes of flags.
const FIELDS: usize = 8;

/// How many versions are kept for changes that are not sent yet, in 24 bytes each. Of the others
/// nothing is known.
const KEPT: usize = 262_144;
/// How many records are read between two looks at how things are.
const LOOK_EVERY: u32 = 256;
/// Further behind the end of WAL than this many bytes, old row versions are mostly gone, and
/// reading their pages would cost time.
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
    /// Where a transaction can be begun, or in one; without a historic snapshot.
    pub(super) fn new() -> Self {
        let subscribed = in_transaction(has_subscriptions);
        Self {
            versions: ReplacedVersions::new(KEPT),
            writers: Writers::default(),
            next_xid: 0,
            subscribed,
            until_look: 0,
            looks: false,
        }
    }

    /// Looks at the row versions that a record has replaced. The record is read, and may be
    /// decoded.
    ///
    /// A record with an origin is none of this node's writers': it was applied on this node, and
    /// its writer may not have seen the row that it replaced.
    #[inline]
    pub(super) fn note(&mut self, ctx: Context<'_>) {
        let (Some(record), Some(reader)) = (ctx.record(), ctx.reader()) else {
            return;
        };
        if record.record_origin != no_origin()
            || u32::from(record.header.xl_rmid) != pg_sys::RmgrIds::RM_HEAP_ID
        {
            return;
        }
        let (lsn, kind) = (reader.ReadRecPtr, record.header.xl_info & KINDS);
        if matches!(kind, DELETE | UPDATE | HOT_UPDATE) && self.is_looking(lsn) {
            self.look(lsn, record, kind);
        }
    }

    fn is_looking(&mut self, lsn: u64) -> bool {
        if self.until_look == 0 {
            self.until_look = LOOK_EVERY;
            let keeps_versions = server::tracks_commit_timestamps();
            self.subscribed |= registry::has_subscriptions();
            self.looks = keeps_versions
                && self.subscribed
                && wal::readable_end().saturating_sub(lsn) < FAR_BEHIND;
            if self.looks {
                self.next_xid = xid::next_full();
            }
        }
        self.until_look -= 1;
        self.looks
    }

    fn look(&mut self, lsn: u64, record: Record<'_>, kind: u8) {
        let Some([_, _, _, _, low, high, _, flags]) = record.data().first_chunk::<FIELDS>() else {
            return;
        };
        let item = u16::from_ne_bytes([*low, *high]);
        let wanted = if kind == DELETE { HAS_OLD } else { HAS_NEW };
        if flags & wanted == 0 {
            return;
        }
        // The second block is the old row's, if that is not the new one's.
        let block = match record.blocks() {
            [_, second, ..] if kind != DELETE && second.in_use => second,
            [first, ..] => first,
            [] => return,
        };
        if !block.in_use || block.forknum != pg_sys::ForkNumber::MAIN_FORKNUM {
            return;
        }
        // SAFETY: a block that a decoded record names.
        let Some(found) = (unsafe { lifetime(compat::block_file(block), block.blkno, item) })
        else {
            return;
        };
        // Another row may have its place by now.
        let xid = record.header.xl_xid;
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

    /// The version that the change at `lsn` has replaced: commit timestamp (TimestampTz) and
    /// origin.
    #[inline]
    pub(super) fn take(&mut self, lsn: u64) -> Option<Written> {
        self.versions.take(lsn)
    }
}

/// Whether the database has subscriptions. The manager knows only enabled ones; rows of the other
/// providers still exist. In a transaction without a historic snapshot.
fn has_subscriptions() -> bool {
    own_table("subscription")
        .is_ok_and(|table| has_any(table, pg_sys::InvalidOid, &[], Sees::Committed))
}
