//! What travels with a versioned transaction's changes.

use std::collections::BTreeMap;

use crate::number::{GrantId, TableNumber, Term, Version};

/// Where a transaction's writes stand in the order of versions. Appliers wait by it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Record {
    /// The term that the node knew when it committed.
    pub term: Term,
    /// The transaction.
    pub id: GrantId,
    /// The versions by table.
    pub tables: BTreeMap<TableNumber, Shipped>,
}

/// The versions of one table in a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shipped {
    /// The last write that was in the transaction's snapshot, never a void one. Of a table that
    /// is written: the write right before `own`, so that appliers need not know of void numbers
    /// between them.
    pub seen: Version,
    /// The number of the transaction's write, above `seen`.
    pub own: Option<Version>,
}

impl Record {
    /// The written tables with their numbers.
    pub fn writes(&self) -> impl Iterator<Item = (TableNumber, Version)> {
        self.tables
            .iter()
            .filter_map(|(table, shipped)| Some((*table, shipped.own?)))
    }
}
