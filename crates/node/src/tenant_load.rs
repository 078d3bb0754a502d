//! Writes by tenant of routed tables with a balancer, in shared memory: walsenders count, the group
//! worker reads and clears.
//!
//! Several walsenders of a node decode each transaction, one for each subscriber. A transaction
//! must count once, whichever walsender is first and whichever ends:
//!
//! 1. Walsender A decodes transactions up to the commit at 100, and counts each. The table's
//!    position is 100.
//! 2. Walsender B is slower. It decodes the commit at 90, which is not behind 100, and counts
//!    nothing.
//! 3. A ends. B decodes on; the commit at 110 is behind 100: it counts it, and the position is 110.
//!
//! Each walsender decodes all local commits in the order of their positions, so none is left out.
//! If a slot is created while all others lag, the transactions in between are lost. A transaction
//! that no walsender decodes, because the node has no subscriber, does not count.
//!
//! The group worker creates one segment for a database when its first table gets a balancer. It has
//! room for [`TABLES`] tables and stays until the server ends. All is read and written under the
//! registry's lock, but for the position. No process does anything for a table that has no
//! balancer.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use braid_codec::{Malformed, Reader, Writer};
use braid_postgres::error::PgError;
use braid_routing::{
    NodeId, RecordHash, SharedSketch, Sketch, TABLE_LIMIT, TENANT_LIMIT, TableName, Tenant,
};
use pgrx::pg_sys;

use crate::group;
use crate::registry::{self, ManagerEntry, locked};

/// Tables with a balancer in one database.
pub const TABLES: usize = 8;
/// Counters for each table.
pub const COUNTERS: usize = 2_048;
/// Length of the group worker's view in bytes.
pub const VIEW: usize = 128 * 1024;

/// Words of a table: the hash of its name, 0 if free; the position of the last commit that was
/// counted; the counts.
const TABLE: usize = 2 + SharedSketch::words(COUNTERS);
/// The length of the view, and its bytes.
const SHOWN: usize = 1 + VIEW / 8;
const WORDS: usize = SHOWN + TABLES * TABLE;

/// A table, as it is known in the segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadTable(u64);

impl LoadTable {
    /// The table of a name.
    #[must_use]
    pub fn of(table: &TableName) -> Self {
        Self(RecordHash::of_canonical(table.as_bytes()).0.max(1))
    }
}

type Words = &'static [AtomicU64];

/// Maps a segment until this process ends.
fn mapped(handle: u32) -> Result<Words, PgError> {
    let mapping = group::attach(handle, WORDS * 8)?;
    // SAFETY: the segment is page-aligned, at least as long, and mapped until this process ends.
    // Zeroes are valid words, which its creator has written; atomics only.
    Ok(unsafe { std::slice::from_raw_parts(mapping.base.as_ptr().cast::<AtomicU64>(), WORDS) })
}

/// A table's part of the segment.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    table: &'static AtomicU64,
    position: &'static AtomicU64,
    counts: SharedSketch<'static>,
}

fn loads(words: Words) -> impl Iterator<Item = Load> {
    let tables = words.get(SHOWN..).unwrap_or_default().chunks_exact(TABLE);
    tables.filter_map(load)
}

fn load(words: Words) -> Option<Load> {
    let [table, position, counts @ ..] = words else {
        return None;
    };
    Some(Load {
        table,
        position,
        counts: SharedSketch::over(counts, COUNTERS)?,
    })
}

impl Load {
    fn is_of(&self, table: LoadTable) -> bool {
        self.table.load(Ordering::Relaxed) == table.0
    }

    /// Whether the transaction with this commit has been counted.
    #[must_use]
    pub fn has(&self, commit_lsn: u64) -> bool {
        commit_lsn <= self.position.load(Ordering::Relaxed)
    }

    /// Counts a committed transaction, if no other walsender has.
    pub fn add(&self, table: LoadTable, commit_lsn: u64, counts: &Sketch) {
        if self.has(commit_lsn) {
            return;
        }
        locked(|| {
            if self.is_of(table) && !self.has(commit_lsn) {
                self.counts.absorb(counts);
                self.position.store(commit_lsn, Ordering::Relaxed);
            }
        });
    }
}

thread_local! {
    /// The segment that this process has mapped, by its handle.
    static MAPPED: Cell<(u32, Option<Words>)> = const { Cell::new((0, None)) };
}

fn my_words() -> Option<Words> {
    let handle = registry::my_manager()?.routing.load_segment();
    if handle == 0 {
        return None;
    }
    let (known, words) = MAPPED.get();
    if known == handle {
        return words;
    }
    let words = mapped(handle).ok();
    MAPPED.set((handle, words));
    words
}

/// Where the writes of a table are counted; `None` if the table has no balancer. For walsenders.
#[must_use]
pub fn load_of(table: LoadTable) -> Option<Load> {
    let mut tables = my_words()?.get(SHOWN..)?.chunks_exact(TABLE);
    let is_of = |words: &&[AtomicU64]| {
        let name = words.first();
        name.is_some_and(|name| name.load(Ordering::Relaxed) == table.0)
    };
    load(tables.find(is_of)?)
}

/// A tenant's writes at a node in the last period, as the group worker shows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadRow {
    /// The table.
    pub table: TableName,
    /// The node.
    pub node: NodeId,
    /// The tenant.
    pub tenant: Tenant,
    /// Writes, at most.
    pub count: u64,
    /// By how much `count` can be too large.
    pub error: u64,
    /// Writes of all tenants of the table at the node.
    pub total: u64,
    /// The length of the period in microseconds.
    pub micros: u64,
}

impl LoadRow {
    /// The row's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.bytes(self.table.as_bytes()).u64(self.node.0);
        w.bytes(self.tenant.canonical());
        w.u64(self.count).u64(self.error);
        w.u64(self.total).u64(self.micros);
        w.done()
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            table: TableName::new(r.bytes(TABLE_LIMIT)?)?,
            node: NodeId(r.u64()?),
            tenant: Tenant::from_canonical(r.bytes(TENANT_LIMIT)?)
                .map_err(|_| Malformed::Invalid("tenant"))?,
            count: r.u64()?,
            error: r.u64()?,
            total: r.u64()?,
            micros: r.u64()?,
        })
    }
}

/// The rows that the group worker shows; none if no table has a balancer, or nothing is written.
#[must_use]
pub fn shown_rows() -> Vec<LoadRow> {
    let bytes = shown();
    let mut rest = bytes.as_slice();
    let mut rows = Vec::new();
    while !rest.is_empty() {
        let mut r = Reader::new(rest, "writes by tenant");
        let Ok(row) = LoadRow::read(&mut r) else {
            break;
        };
        rows.push(row);
        rest = r.rest();
    }
    rows
}

fn shown() -> Vec<u8> {
    let Some([length, view @ ..]) = my_words().and_then(|words| words.get(..SHOWN)) else {
        return Vec::new();
    };
    let (length, words) = locked(|| {
        let words: Vec<u64> = view
            .iter()
            .map(|word| word.load(Ordering::Relaxed))
            .collect();
        (length.load(Ordering::Relaxed), words)
    });
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_be_bytes).collect();
    bytes.truncate(usize::try_from(length).unwrap_or(usize::MAX));
    bytes
}

/// The group worker's view of the segment.
#[derive(Debug, Clone, Copy)]
pub struct Loads {
    words: Words,
}

impl Loads {
    /// The segment of this database, created if there is none yet.
    ///
    /// # Errors
    /// 53200 and the like from PostgreSQL.
    pub fn open(entry: &ManagerEntry) -> Result<Self, PgError> {
        let known = entry.routing.load_segment();
        if known != 0
            && let Ok(words) = mapped(known)
        {
            return Ok(Self { words });
        }
        let (mapping, handle) = group::create(WORDS * 8)?;
        // SAFETY: the segment is fresh and long enough, and nobody else knows its handle. Pinned,
        // it stays until the server ends.
        unsafe {
            mapping.base.as_ptr().write_bytes(0, WORDS * 8);
            pg_sys::dsm_pin_segment(pg_sys::dsm_find_mapping(handle));
        }
        entry.routing.show_load_segment(handle);
        // SAFETY: as in `mapped`; the mapping is this process's own, and lasts as long.
        let words =
            unsafe { std::slice::from_raw_parts(mapping.base.as_ptr().cast::<AtomicU64>(), WORDS) };
        Ok(Self { words })
    }

    /// Has the writes of these tables counted, and of no others. Returns how many find no room.
    #[must_use]
    pub fn keep(&self, tables: &[LoadTable]) -> usize {
        locked(|| {
            for load in loads(self.words) {
                if !tables.iter().any(|table| load.is_of(*table)) {
                    load.table.store(0, Ordering::Relaxed);
                }
            }
            let mut left = 0;
            for table in tables {
                if loads(self.words).any(|load| load.is_of(*table)) {
                    continue;
                }
                let free = loads(self.words).find(|load| load.is_of(LoadTable(0)));
                let Some(free) = free else {
                    left += 1;
                    continue;
                };
                free.counts.clear();
                free.position.store(0, Ordering::Relaxed);
                free.table.store(table.0, Ordering::Relaxed);
            }
            left
        })
    }

    /// Takes the counts of a table; none if nothing was counted.
    #[must_use]
    pub fn take(&self, table: LoadTable) -> Option<Sketch> {
        let load = loads(self.words).find(|load| load.is_of(table))?;
        if load.counts.is_empty() {
            return None;
        }
        Some(locked(|| {
            let counts = load.counts.read();
            load.counts.clear();
            counts
        }))
    }

    /// Shows something to sessions: at most [`VIEW`] bytes of it.
    pub fn show(&self, view: &[u8]) {
        let Some([length, words @ ..]) = self.words.get(..SHOWN) else {
            return;
        };
        locked(|| {
            for (word, bytes) in words.iter().zip(view.chunks(8)) {
                let mut eight = [0; 8];
                for (to, from) in eight.iter_mut().zip(bytes) {
                    *to = *from;
                }
                word.store(u64::from_be_bytes(eight), Ordering::Relaxed);
            }
            let shown = u64::try_from(view.len().min(VIEW)).unwrap_or(0);
            length.store(shown, Ordering::Relaxed);
        });
    }
}
