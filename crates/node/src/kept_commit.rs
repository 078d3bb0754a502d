//! Commit timestamps of this node's transactions that are kept for longer than PostgreSQL has them.
//!
//! PostgreSQL forgets a transaction's commit timestamp, with its origin, once no row of any
//! database needs its id any more: by default that is some fifty million transactions later. A row
//! that was written then has no version for it, so that any change wins against it. A node which is
//! cut off for long enough still sends changes that are older than such a row, and at all others
//! the row wins.
//!
//! So the manager copies the commit timestamps of old transactions (`workers/keep_commits.rs`) into
//! `braid.kept_commit`, by blocks of consecutive ids, if older changes may still arrive. If no node
//! is away for long, there is nothing to copy.
//!
//! Rows of the table:
//!
//! | `first_xid` | `newest` | `commits` |
//! |---|---|---|
//! | a block's first transaction, with its epoch | newest version in the block | the block |
//! | a block's first transaction | null | null |
//!
//! `braid_bgworker::commit_block` has the format of a block. A block is removed when no change can
//! arrive any more that is older than `newest`. One row has nulls: the blocks before its block were
//! examined.
//!
//! Shared memory has the range of transactions for which the table is read. A reader asks
//! PostgreSQL first. A block is stored long before PostgreSQL forgets its transactions, so shared
//! memory may learn of it after the commit.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use braid_bgworker::commit_block::{self, Commit, TRANSACTIONS};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::names::find_table;
use braid_postgres::table_scan::{self, By, Sees};
use braid_postgres::{transaction, xid};
use pgrx::pg_sys;

use crate::registry;

/// Columns of `braid.kept_commit`.
const COLUMNS: usize = 3;
/// Blocks that a process remembers: three megabytes.
const REMEMBERED: usize = 8;

type Block = Rc<Vec<Option<Commit>>>;

thread_local! {
    /// The blocks that were read last, the newest first.
    static KNOWN: RefCell<VecDeque<(u64, Block)>> = const { RefCell::new(VecDeque::new()) };
}

/// Commit timestamp (TimestampTz) and origin of a transaction of which PostgreSQL knows none any
/// more. In a transaction without a historic snapshot; outside of one nothing is known.
#[must_use]
pub fn of(xid: pg_sys::TransactionId) -> Option<(i64, ReplOriginId)> {
    let entry = registry::my_manager()?;
    let kept = entry.kept_commits_from.load(Ordering::SeqCst)
        ..entry.kept_commits_to.load(Ordering::SeqCst);
    // Mostly there is nothing: then it takes no lock, as the full id does.
    if kept.is_empty() {
        return None;
    }
    let full = xid::full(xid);
    if !kept.contains(&full) || !transaction::is_open() {
        return None;
    }
    let (first, place) = commit_block::place_of(full);
    let commit = (*block(first)?.get(place)?)?;
    Some((commit.timestamp, commit.origin))
}

fn block(first: u64) -> Option<Block> {
    let known = KNOWN.with_borrow_mut(|known| {
        let at = known.iter().position(|(block, _)| *block == first)?;
        let found = known.remove(at)?;
        let block = Rc::clone(&found.1);
        known.push_front(found);
        Some(block)
    });
    if known.is_some() {
        return known;
    }
    let block = Rc::new(stored(first)?);
    KNOWN.with_borrow_mut(|known| {
        known.truncate(REMEMBERED - 1);
        known.push_front((first, Rc::clone(&block)));
    });
    Some(block)
}

/// A block as it is in the table.
pub fn stored(first: u64) -> Option<Vec<Option<Commit>>> {
    let table = find_table("braid", "kept_commit").ok()??;
    let by = By {
        index: find_table("braid", "kept_commit_pkey").ok()??,
        value: i64::try_from(first).unwrap_or(i64::MAX),
    };
    let count = usize::try_from(TRANSACTIONS).unwrap_or(usize::MAX);
    let mut read: Option<Vec<Option<Commit>>> = None;
    table_scan::each::<COLUMNS>(table, Some(by), Sees::Committed, |row| {
        let found = row.with_bytes(COLUMNS - 1, |bytes| commit_block::decode(bytes, count));
        if let Some(found) = found {
            read = found;
        }
        ControlFlow::Continue(())
    });
    read
}
