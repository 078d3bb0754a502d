//! Walks through the versions of rows under a key of an index, in the page that each is in. Run by
//! the appliers, and by other processes that look rows up in the same way.

use braid_postgres::compat;
use braid_postgres::ffi::raw;
use braid_postgres::heap_page::place_of;
use pgrx::pg_sys;

use super::relation::KeyColumn;

/// Number of dead index entries per key that a scan does not mark: they tell of the key's deletion.
/// A scan marks entries of rows that are dead to everybody, and skips marked ones. Further entries
/// of a key are marked, because many dead ones would be visited each time.
const SPARED: usize = 8;

/// Whether the row in a slot has this very key: the same bytes, not only equal ones.
///
/// # Safety
/// Under a guard; the slot holds a row of the table, and keys and columns are `count` each.
pub(super) unsafe fn has_key(
    table: pg_sys::Relation,
    keys: *const pg_sys::ScanKeyData,
    columns: *const KeyColumn,
    count: usize,
    slot: *mut pg_sys::TupleTableSlot,
) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        (0..count).all(|position| {
            let attribute = (*columns.add(position)).attribute;
            let column = usize::try_from(attribute - 1).unwrap_or(0);
            if (*slot).tts_nvalid < attribute {
                raw::slot_getsomeattrs_int(slot, i32::from(attribute));
            }
            let of_table = compat::TupleDescAttr((*table).rd_att, column);
            !*(*slot).tts_isnull.add(column)
                && raw::datum_image_eq(
                    *(*slot).tts_values.add(column),
                    (*keys.add(position)).sk_argument,
                    (*of_table).attbyval,
                    i32::from((*of_table).attlen),
                )
        })
    }
}

/// Returns whether there is a next version that the scan's snapshot sees, and how many index
/// entries were visited: the loop of index_getnext_slot (src/backend/access/index/indexam.c, 15 to
/// 18). With `prunes`, dead rows are removed from the pages.
///
/// # Safety
/// Under a guard; the scan was started, and the slot is of its table.
pub(super) unsafe fn next_version(
    scan: pg_sys::IndexScanDesc,
    slot: *mut pg_sys::TupleTableSlot,
    prunes: bool,
) -> (bool, usize) {
    let mut entries = 0;
    // SAFETY: as the caller says; what the scan of a heap has is of that kind.
    unsafe {
        loop {
            if !(*scan).xs_heap_continue {
                let forward = pg_sys::ScanDirection::ForwardScanDirection;
                if raw::index_getnext_tid(scan, forward).is_null() {
                    return (false, entries);
                }
                entries += 1;
                // A heap's scan prunes a page when it reaches it (heapam_index_fetch_tuple of
                // src/backend/access/heap/heapam_handler.c, 15 to 19), but not the page that it is
                // in already.
                let table = (*scan).heapRelation;
                if !prunes && (*(*table).rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID {
                    let (block, _) = place_of((*scan).xs_heaptid);
                    compat::enter_block(scan, table, block);
                }
            }
            if raw::index_fetch_heap(scan, slot) {
                return (true, entries);
            }
            if entries <= SPARED {
                (*scan).kill_prior_tuple = false;
            }
        }
    }
}
