//! The moment between a local TRUNCATE and its tombstone. Run by the appliers.
//!
//! A row that was deleted tells of it until the collector has come past it (`workers/collector`). TRUNCATE leaves no rows. But its
//! transaction wrote the table's row of `pg_class`, and whoever applies a change to the table sees that once it has the table's lock:
//! then it waits until the collector has come past everything that is committed by then. That is once for each new row of
//! `pg_class`, and mostly it has come further already.

use std::collections::HashMap;

use braid_node::local_version::commit_data;
use braid_node::origin::COPIED;
use braid_node::registry;
use braid_node::tombstone::waiting;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

/// What was waited for.
#[derive(Debug, Default)]
pub struct Window {
    /// By table: the transaction that wrote its row of `pg_class`.
    past: HashMap<u32, u32>,
}

impl Window {
    /// Truncates of a table that have committed here have a tombstone when this returns.
    ///
    /// # Errors
    /// 40001 where the collector does not get there: the transaction is to be rolled back, and applied again.
    ///
    /// # Safety
    /// In a transaction that holds a lock on the table, and has processed the invalidations that came before it had that.
    pub unsafe fn close(&mut self, table: pg_sys::Oid) -> Result<(), PgError> {
        if !registry::remembers_deletions() {
            return Ok(());
        }
        // SAFETY: as the caller says.
        let Some(writer) = (unsafe { class_writer(table) }) else {
            return Ok(());
        };
        let short = writer.into_inner();
        if self.past.get(&table.to_u32()) == Some(&short) {
            return Ok(());
        }
        // SAFETY: looks at the transaction in hand.
        let own = unsafe { pg_sys::TransactionIdIsCurrentTransactionId(writer) };
        if !own && !registry::is_collected(writer) && !was_applied(writer) {
            wait()?;
        }
        self.past.insert(table.to_u32(), short);
        Ok(())
    }
}

fn wait() -> Result<(), PgError> {
    // A commit that has truncated is flushed before anybody can see it.
    // SAFETY: a read of shared memory.
    let aim = unsafe { pg_sys::GetFlushRecPtr(std::ptr::null_mut()) };
    // What was truncated before its slot is made has no tombstone; and to make one waits for the transaction in hand.
    if waiting::wait_past(aim) || !registry::remembers_deletions() || !waiting::has_slot() {
        return Ok(());
    }
    Err(waiting::not_yet(
        "what sessions of this node have truncated is not known yet",
    ))
}

/// The transaction that wrote a table's row of `pg_class`; `None` where that is long ago.
///
/// # Safety
/// In a transaction.
unsafe fn class_writer(table: pg_sys::Oid) -> Option<pg_sys::TransactionId> {
    // SAFETY: as the caller says; the tuple is released after it was read.
    unsafe {
        let cache = pg_sys::SysCacheIdentifier::RELOID.cast_signed();
        let tuple = pg_sys::SearchSysCache1(cache, table.into());
        if tuple.is_null() {
            return None;
        }
        let header = (*tuple).t_data;
        let writer = (*header).t_choice.t_heap.t_xmin;
        let frozen = pg_sys::HEAP_XMIN_COMMITTED | pg_sys::HEAP_XMIN_INVALID;
        let is_frozen = u32::from((*header).t_infomask) & frozen == frozen;
        pg_sys::ReleaseSysCache(tuple);
        let is_normal = writer.into_inner() >= pg_sys::FirstNormalTransactionId.into_inner();
        (is_normal && !is_frozen).then_some(writer)
    }
}

/// Whether an applier wrote that: then it has waited for what was before it.
fn was_applied(writer: pg_sys::TransactionId) -> bool {
    commit_data(writer).is_some_and(|(_, origin)| origin != 0 && origin != COPIED)
}
