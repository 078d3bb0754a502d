//! Finds a row by all of its values, in a scan of the whole table: for tables that no unique key
//! identifies. Run by the appliers.
//!
//! First a row is looked for that is identical to the provider's old row, byte for byte. Rows that
//! are equal but not identical (1.0 and 1.00) are different rows at the provider, and types without
//! an equality (json) are compared like others. If no row is identical, an equal one is looked for,
//! because some values have several byte forms (a tsquery that came as text or in binary form).
//! Values are equal if the type's own equality says so. Values of a type without one (json, point,
//! xml, arrays and rows of these) are equal if they have the same text. Columns that only this node
//! has are not compared.

use braid_postgres::error::PgError;
use braid_postgres::heap_page::{Place, place_of};
use braid_postgres::memory::Scratch;
use braid_postgres::relation::RelationRef;
use braid_postgres::sequential_scan::SequentialScan;
use braid_postgres::slot::Slot;
use braid_postgres::transaction;
use braid_postgres::type_cache::CachedType;
use braid_postgres::value::Value;
use pgrx::pg_sys;

use super::row_version::lock_row;
use super::version::Stamp;

/// Rule for when a row is the one that is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Likeness {
    /// Byte for byte.
    Identical,
    /// Value for value.
    Equal,
}

/// Finds and locks a row that matches `cells`, its values column by column, other than those at
/// `passed_over`, and reads it into `slot`. Returns `None` if there is none.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn find_like(
    table: RelationRef<'_>,
    slot: &Slot,
    cells: &[Cell<'_>],
    passed_over: &[Place],
    likeness: Likeness,
) -> Result<Option<Stamp>, PgError> {
    loop {
        let mut scan = SequentialScan::of_unfinished(table, slot)?;
        let mut writer = pg_sys::InvalidTransactionId;
        let mut found = Ok(None);
        let mut changed = false;
        // Memory for one comparison.
        // SAFETY: dropped here.
        let mut memory = unsafe { Scratch::below_current(c"braid scan") };
        while scan.advance() {
            pgrx::check_for_interrupts!();
            if passed_over.contains(&place_of(slot.tid())) {
                continue;
            }
            let is_like = memory.run(|| is_like(slot, cells, likeness));
            if !is_like {
                continue;
            }
            writer = scan.unfinished();
            if writer == pg_sys::InvalidTransactionId {
                // Before the scan ends: the slot's row belongs to the scan until locking stores it
                // again.
                found = lock_row(table, slot);
                changed = matches!(found, Ok(None));
            }
            break;
        }
        if !matches!(found, Ok(Some(_))) {
            slot.clear();
        }
        drop(scan);
        if writer != pg_sys::InvalidTransactionId {
            transaction::wait_for(writer);
        } else if !changed {
            return found;
        }
    }
}

/// A value that is looked for: `None` is any value, `Some(None)` is null.
pub(super) type Cell<'v> = Option<Option<Value<'v>>>;

/// Whether the row in `slot` has these values. In a transaction.
fn is_like(slot: &Slot, cells: &[Cell<'_>], likeness: Likeness) -> bool {
    let columns = slot.descriptor().iter().zip(cells).enumerate();
    for (position, (attribute, value)) in columns {
        let Some(value) = value else { continue };
        let same = match (value, slot.cell(position)) {
            (None, here) => here.is_none(),
            (Some(_), None) => false,
            (Some(value), Some(here)) => {
                value.is_same(here)
                    || (likeness == Likeness::Equal && equal(attribute.collation(), *value, here))
            }
        };
        if !same {
            return false;
        }
    }
    true
}

/// Whether two values of a column, which are not null, are equal: by the type's own equality if it
/// has one, else by their text. In a transaction.
pub(super) fn equal(collation: pg_sys::Oid, one: Value<'_>, other: Value<'_>) -> bool {
    // Arrays and rows have an equality if all their parts have one.
    let known = CachedType::find(one.type_id(), pg_sys::TYPECACHE_EQ_OPR_FINFO);
    if let Some(is_equal) = known.equals(collation, one, other) {
        return is_equal;
    }
    one.output() == other.output()
}
