//! Scans of tables that may be read under a historic snapshot: catalogs, and users' tables that
//! count as such. Run by processes that decode WAL, in a transaction.
//!
//! Not for: tables of which the present matters (`table_scan`).

use pgrx::pg_sys;

use crate::decoding::Tuple;
use crate::relation::RelationRef;

/// Returns the find of `look` in the first row in which it finds anything.
pub fn find<T>(
    relation: RelationRef<'_>,
    mut look: impl FnMut(Tuple<'_>) -> Option<T>,
) -> Option<T> {
    let (none, snapshot) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the relation is open. Each row exists until the next one is fetched. The scan is
    // ended after its last use, or by the rollback if `look` unwinds.
    unsafe {
        let table = relation.as_ptr();
        let scan = pg_sys::systable_beginscan(table, pg_sys::InvalidOid, false, snapshot, 0, none);
        let mut found = None;
        while found.is_none() {
            let Some(row) = Tuple::from_ptr(pg_sys::systable_getnext(scan)) else {
                break;
            };
            found = look(row);
        }
        pg_sys::systable_endscan(scan);
        found
    }
}
