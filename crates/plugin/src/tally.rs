//! Writes by tenant of the transactions that a walsender decodes, until they commit. They count for
//! the balancer of routing (`braid_node::tenant_load`).
//!
//! Only local changes count: those of other nodes count at the node where they were written. A
//! transaction that is decoded before it commits, in segments or prepared, counts when it commits.
//! A change that is rolled back never counts.
//!
//! Memory is bounded. A current transaction has as many counters as the table. Of transactions that
//! have not committed, [`PARTS`] with [`PART_COUNTERS`] each are remembered. Subtransactions are
//! apart, as each may be rolled back. Changes of further ones do not count.

use std::collections::BTreeMap;

use braid_node::tenant_load::{self, COUNTERS, LoadTable};
use braid_routing::{Sketch, Tenant, TenantHash};

/// Transactions and subtransactions that have not committed, at most.
const PARTS: usize = 256;
/// Counters of each.
const PART_COUNTERS: usize = 256;

/// Writes by table.
type Writes = Vec<(LoadTable, Sketch)>;

/// The writes of transactions that have not ended.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Writes of the current transaction.
    current: Writes,
    /// Writes of transactions that have not committed, by transaction and subtransaction.
    parts: BTreeMap<(u32, u32), Writes>,
    /// The current transaction, if it comes in segments.
    segment: Option<u32>,
    /// The subtransaction of the current change.
    author: u32,
    /// Whether the current change is local.
    is_own: bool,
    /// The commit of the current transaction; the largest number if it has not committed.
    commit_lsn: u64,
}

impl Tally {
    /// A transaction begins that is decoded as a whole. `commit_lsn` is `None` if it is prepared.
    #[inline]
    pub(super) fn begin(&mut self, commit_lsn: Option<u64>) {
        self.segment = None;
        self.commit_lsn = commit_lsn.unwrap_or(u64::MAX);
        for (_, writes) in &mut self.current {
            writes.clear();
        }
    }

    /// A segment of a transaction begins.
    pub(super) fn begin_segment(&mut self, xid: u32) {
        self.begin(None);
        self.segment = Some(xid);
    }

    /// A change comes next.
    #[inline]
    pub(super) const fn turn(&mut self, author: u32, is_own: bool) {
        self.author = author;
        self.is_own = is_own;
    }

    /// Whether the current change counts, if it is of this table.
    pub(super) fn wants(&self, table: LoadTable) -> bool {
        self.is_own && tenant_load::load_of(table).is_some_and(|load| !load.has(self.commit_lsn))
    }

    /// Counts the current change.
    pub(super) fn note(&mut self, table: LoadTable, hash: TenantHash, tenant: Tenant) {
        let (writes, counters) = match self.segment {
            None => (&mut self.current, COUNTERS),
            Some(xid) => {
                let part = (xid, self.author);
                if self.parts.len() >= PARTS && !self.parts.contains_key(&part) {
                    return;
                }
                (self.parts.entry(part).or_default(), PART_COUNTERS)
            }
        };
        let place = match writes.iter().position(|(of, _)| *of == table) {
            Some(place) => place,
            None => {
                writes.push((table, Sketch::new(counters)));
                writes.len() - 1
            }
        };
        if let Some((_, sketch)) = writes.get_mut(place) {
            sketch.add(hash, 1, || tenant);
        }
    }

    /// The current transaction has committed.
    #[inline]
    pub(super) fn commit(&mut self, commit_lsn: u64) {
        if !self.current.is_empty() {
            count(&self.current, commit_lsn);
            // Tables come and go; each keeps its counters for the next transaction.
            if self.current.len() > tenant_load::TABLES {
                self.current.clear();
            }
            self.begin(None);
        }
    }

    /// The current transaction is prepared.
    pub(super) fn prepare(&mut self, xid: u32) {
        let mut writes = std::mem::take(&mut self.current);
        writes.retain(|(_, sketch)| !sketch.is_empty());
        if !writes.is_empty() && self.parts.len() < PARTS {
            self.parts.insert((xid, xid), writes);
        }
    }

    /// A transaction has committed that was decoded before.
    pub(super) fn commit_parts(&mut self, xid: u32, commit_lsn: u64) {
        let mut merged: Writes = Vec::new();
        for (table, sketch) in self.take(xid).into_iter().flatten() {
            match merged.iter_mut().find(|(of, _)| *of == table) {
                Some((_, sum)) => sum.absorb(&sketch),
                None => {
                    let mut sum = Sketch::new(COUNTERS);
                    sum.absorb(&sketch);
                    merged.push((table, sum));
                }
            }
        }
        count(&merged, commit_lsn);
    }

    /// A subtransaction was rolled back, or all of the transaction.
    pub(super) fn abort(&mut self, xid: u32, subxid: u32) {
        if xid == subxid {
            self.take(xid);
        } else {
            self.parts.remove(&(xid, subxid));
        }
    }

    /// Removes and returns the writes of a transaction.
    fn take(&mut self, xid: u32) -> Vec<Writes> {
        if self.parts.is_empty() {
            return Vec::new();
        }
        let of = self.parts.range((xid, 0)..=(xid, u32::MAX));
        let keys: Vec<_> = of.map(|(key, _)| *key).collect();
        keys.iter()
            .filter_map(|key| self.parts.remove(key))
            .collect()
    }
}

fn count(writes: &Writes, commit_lsn: u64) {
    for (table, sketch) in writes {
        if !sketch.is_empty()
            && let Some(load) = tenant_load::load_of(*table)
        {
            load.add(*table, commit_lsn, sketch);
        }
    }
}
