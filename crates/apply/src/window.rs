//! The time between a TRUNCATE by a session of this node and its tombstone. Run by the appliers.
//!
//! The dead version of a deleted row is kept until the collector has stored the deletion
//! (`workers/collector`). TRUNCATE leaves no dead rows. But its transaction wrote the table's row
//! of `pg_class`. An applier that has locked the table sees that, and waits until the collector has
//! processed all WAL up to then. It waits once for each new row of `pg_class`, and mostly the
//! collector has got there already.

use std::collections::HashMap;

use braid_node::local_version::commit_data;
use braid_node::origin::COPIED;
use braid_node::registry;
use braid_node::tombstone::waiting;
use braid_postgres::error::PgError;
use braid_postgres::syscache::ClassRow;
use braid_postgres::{transaction, wal};
use pgrx::pg_sys;

/// Tables for whose truncates the process has waited.
#[derive(Debug, Default)]
pub struct Window {
    /// By table: the transaction that wrote its row of `pg_class`.
    past: HashMap<u32, u32>,
}

impl Window {
    /// Waits until committed truncates of a table by sessions of this node have tombstones.
    ///
    /// The transaction holds a lock on the table, and has processed the invalidations that came
    /// before it.
    ///
    /// # Errors
    /// 40001 if the collector does not get there: the transaction is rolled back, and applied
    /// again.
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
    // A commit with a truncate is flushed before any session can see it.
    let aim = wal::flushed();
    // Truncates from before the collector's slot exists have no tombstone; and creating the slot
    // waits for the current transaction.
    if waiting::wait_past(aim) || !registry::remembers_deletions() || !waiting::has_slot() {
        return Ok(());
    }
    Err(waiting::not_yet(
        "what sessions of this node have truncated is not known yet",
    ))
}

/// Whether an applier was the writer: then that applier has waited for earlier truncates.
fn was_applied(writer: pg_sys::TransactionId) -> bool {
    commit_data(writer).is_some_and(|(_, origin)| origin != 0 && origin != COPIED)
}
