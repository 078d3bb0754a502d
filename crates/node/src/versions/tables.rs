//! Which tables of this database are versioned. Run by every session.
//!
//! The group worker writes `braid.versioned_table` and then calls [`changed`]. A session keeps the
//! table's rows until the count of changes moves. Where no table is versioned, it costs one load.
//!
//! | `ManagerEntry::versioned` | set by |
//! |---|---|
//! | 0: nobody has looked since the server started | |
//! | [`NONE`] | the first session that looks, or the group worker |
//! | [`SOME`] | the group worker, or the first session that looks |

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use braid_postgres::names;
use braid_postgres::process;
use braid_postgres::table_scan::{self, Sees, low};
use pgrx::pg_sys;

use crate::registry;

/// `ManagerEntry::versioned` where no table is.
pub const NONE: u32 = 1;
/// `ManagerEntry::versioned` where tables are.
pub const SOME: u32 = 2;
/// Columns of `braid.versioned_table`.
const COLUMNS: usize = 5;
/// `Table::phase` of a table that is not written: it is about to count.
pub const BEGINS: u32 = 0;
/// `Table::phase` of a table that is written in versioned transactions.
pub const COUNTS: u32 = 1;
/// `Table::phase` of a table that is not written: it is about to be an ordinary one.
pub const ENDS: u32 = 2;

/// A versioned table of this database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// Its number in the group.
    pub number: u32,
    /// The table; invalid if this node does not have it.
    pub relation: pg_sys::Oid,
    /// [`BEGINS`], [`COUNTS`] or [`ENDS`].
    pub phase: u32,
}

thread_local! {
    /// The tables, as of which change.
    static KNOWN: RefCell<Option<(u64, Vec<Table>)>> = const { RefCell::new(None) };
    /// This process has looked where nobody could note it: the database had no extension.
    static LOOKED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a table may be versioned. Raises nothing.
#[must_use]
pub fn may_be() -> bool {
    match registry::my_manager() {
        Some(entry) => entry.versioned.load(Ordering::Acquire) != NONE,
        None => !LOOKED.get() && process::my_database() != 0,
    }
}

/// The number of a table; `None` if it is not versioned. In a transaction; takes no snapshot that
/// the transaction would keep.
#[must_use]
pub fn number_of(relation: pg_sys::Oid) -> Option<u32> {
    if !may_be() {
        return None;
    }
    let of = |table: &&Table| table.relation == relation;
    all().iter().find(of).map(|table| table.number)
}

/// A versioned table. In a transaction; takes no snapshot that the transaction would keep.
#[must_use]
pub fn of(relation: pg_sys::Oid) -> Option<Table> {
    let is = |table: &Table| table.relation == relation;
    all().into_iter().find(is)
}

/// All versioned tables of this database. In a transaction.
#[must_use]
pub fn all() -> Vec<Table> {
    if !may_be() {
        return Vec::new();
    }
    let entry = registry::my_manager();
    // Before the look: a later change has it looked at again.
    let change = entry.map_or(0, |entry| entry.versioned_changes.load(Ordering::Acquire));
    let known = KNOWN.with_borrow(|known| {
        let (of, tables) = known.as_ref()?;
        (*of == change && entry.is_some()).then(|| tables.clone())
    });
    if let Some(known) = known {
        return known;
    }
    let tables = load();
    if let Some(entry) = entry {
        let found = if tables.is_empty() { NONE } else { SOME };
        // The group worker knows better.
        let _ = entry
            .versioned
            .compare_exchange(0, found, Ordering::AcqRel, Ordering::Acquire);
        KNOWN.set(Some((change, tables.clone())));
    } else if tables.is_empty() {
        LOOKED.set(true);
    }
    tables
}

fn load() -> Vec<Table> {
    let mut tables = Vec::new();
    // An extension that is yet to be updated does not have it.
    let Ok(Some(stored)) = names::find_table("braid", "versioned_table") else {
        return tables;
    };
    // Not as of the latest snapshot: the first one of a transaction is kept.
    table_scan::each::<COLUMNS>(stored, None, Sees::Catalog, |row| {
        let [number, _, _, relation, phase] = row.values;
        let [_, _, _, is_missing, _] = row.nulls;
        let relation = if is_missing {
            pg_sys::InvalidOid
        } else {
            pg_sys::Oid::from(low(relation))
        };
        tables.push(Table {
            number: low(number),
            relation,
            phase: low(phase),
        });
        ControlFlow::Continue(())
    });
    tables
}

/// The rows have changed, and are committed: sessions look again. `any`: there are rows.
pub fn changed(any: bool) {
    if let Some(entry) = registry::manager(process::my_database()) {
        entry.versioned_changes.fetch_add(1, Ordering::AcqRel);
        let now = if any { SOME } else { NONE };
        entry.versioned.store(now, Ordering::Release);
        process::set_latch(entry.versions_latch.load(Ordering::Acquire));
    }
}
