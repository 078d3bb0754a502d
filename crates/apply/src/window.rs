//! The moment between a local TRUNCATE and its tombstone. Run by the appliers.
//!
//! A row that was deleted tells of it until the collector has come past it (`workers/collector`).
//! TRUNCATE leaves no rows. But its transaction wrote the table's row of `pg_class`, and whoever
//! applies a change to the table sees that once it has the table's lock: then it waits until the
//! collector has come past everything that is committed by then. That is once for each new row of
//! `pg_class`, and mostly it has come further already.

use std::collections::HashMap;

use braid_node::local_version::commit_data;
use braid_node::origin::COPIED;
use braid_node::registry;
use braid_node::tombstone::waiting;
use braid_postgres::error::PgError;
use braid_postgres::syscache::ClassRow;
use braid_postgres::{transaction, wal};
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
    /// 40001 where the collector does not get there: the transaction is to be rolled back, and
    /// applied again.
    ///
    /// The transaction holds a lock on the table, and has processed the invalidations that came
    /// before it had that.
    pub fn close(&mut self, table: pg_sys::Oid) -> Result<(), PgError> {
        if !registry::remembers_deletions() {
            return Ok(());
        }
        let Some(writer) = ClassRow::find(table).and_then(|row| row.writer()) else {
            return Ok(());
        };
        let short = writer.into_inner();
        if self.past.get(&table.to_u32()) == Some(&short) {
            return Ok(());
        }
        let own = transaction::is_own(writer);
        if !own && !registry::is_collected(writer) && !was_applied(writer) {
            wait()?;
        }
        self.past.insert(table.to_u32(), short);
        Ok(())
    }
}

fn wait() -> Result<(), PgError> {
    // A commit that has truncated is flushed before anybody can see it.
    let aim = wal::flushed();
    // What was truncated before its slot is made has no tombstone; and to make one waits for the
    // transaction in hand.
    if waiting::wait_past(aim) || !registry::remembers_deletions() || !waiting::has_slot() {
        return Ok(());
    }
    Err(waiting::not_yet(
        "what sessions of this node have truncated is not known yet",
    ))
}

/// Whether an applier wrote that: then it has waited for what was before it.
fn was_applied(writer: pg_sys::TransactionId) -> bool {
    commit_data(writer).is_some_and(|(_, origin)| origin != 0 && origin != COPIED)
}
