//! Names of replication origins, as the changes of a stream need them.

use std::collections::HashMap;
use std::ops::ControlFlow;

use braid_postgres::compat::ReplOriginId;
use braid_postgres::session_origin;
use braid_postgres::table_scan::{self, Sees, low};
use pgrx::pg_sys;

use super::scratch::Scratch;
use super::transaction::in_transaction;

/// `InvalidReplOriginId` of src/include/replication/origin.h: first committed on this node.
pub(super) fn no_origin() -> ReplOriginId {
    0
}

/// Names that were looked up, until an origin is made or dropped.
#[derive(Debug, Default)]
pub(super) struct OriginNames(HashMap<u16, String>);

impl OriginNames {
    /// Forgets all of them.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Name of a replication origin; empty for none, for one that is not known any more, and for
    /// changes that are marked as not to be replicated. In a transaction with a historic snapshot.
    pub(super) fn get(&mut self, origin: ReplOriginId, scratch: &Scratch) -> String {
        let unnamed = u32::from(origin) == pg_sys::DoNotReplicateId;
        if origin == no_origin() || unnamed {
            return String::new();
        }
        if let Some(name) = self.0.get(&origin) {
            return name.clone();
        }
        let name = scratch.run(|| {
            session_origin::name_of(origin)
                .or_else(|| origin_of_any_time(origin))
                .unwrap_or_default()
        });
        self.0.insert(origin, name.clone());
        name
    }

    /// As [`OriginNames::get`], where there may be no transaction.
    pub(super) fn get_outside(&mut self, origin: ReplOriginId, scratch: &Scratch) -> String {
        // A known name is not looked up.
        if origin == no_origin() || self.0.contains_key(&origin) {
            return self.get(origin, scratch);
        }
        in_transaction(|| self.get(origin, scratch))
    }
}

/// Name of a replication origin that the historic snapshot does not show: the current transaction
/// has created it, as the first transaction of a source of `braid.ingest` does. A change of another
/// node must not be sent as this node's own. In a transaction.
fn origin_of_any_time(origin: ReplOriginId) -> Option<String> {
    let mut found = None;
    // The catalog has two columns, number and name.
    let catalog = pg_sys::ReplicationOriginRelationId;
    table_scan::each::<2>(catalog, None, Sees::Any, |row| {
        let [number, _] = row.values;
        if low(number) != u32::from(origin) {
            return ControlFlow::Continue(());
        }
        // The number of a dropped origin may be in use again: a row that is not deleted counts,
        // else the newest one.
        found = row.text(1);
        if row.is_live() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    found
}
