//! Pages in shared buffers; and a row of one that is in hand: heap_fetch of src/backend/access/heap/heapam.c, 15 to 18, for a buffer that is pinned already.

use std::ffi::c_char;

use pgrx::pg_sys;

use super::lookup::tid_of;
use super::places::Place;
use crate::ffi::raw;

/// BUFFER_LOCK_UNLOCK and BUFFER_LOCK_SHARE of src/include/storage/bufmgr.h.
const UNLOCK: i32 = 0;
pub(super) const SHARE: i32 = 1;
/// Size of a page's header without its items, and of an item's pointer: src/include/storage/bufpage.h.
const HEADER: usize = 24;
const ITEM: usize = 4;
/// LP_NORMAL of src/include/storage/itemid.h.
const NORMAL: u32 = 1;

/// The page in a shared buffer.
///
/// # Safety
/// The buffer is a shared one, which have positive numbers.
pub(super) unsafe fn page_of(buffer: pg_sys::Buffer) -> *mut c_char {
    let before = usize::try_from(buffer - 1).unwrap_or(0);
    // SAFETY: as the caller says: BufferGetBlock of src/include/storage/bufmgr.h.
    unsafe { pg_sys::BufferBlocks.add(before * pg_sys::BLCKSZ as usize) }
}

/// How many items a page has: PageGetMaxOffsetNumber of src/include/storage/bufpage.h.
///
/// # Safety
/// The page is pinned and locked.
pub(super) unsafe fn items(page: *mut c_char) -> usize {
    // SAFETY: as the caller says.
    let end = usize::from(unsafe { (*page.cast::<pg_sys::PageHeaderData>()).pd_lower });
    end.saturating_sub(HEADER) / ITEM
}

/// Put the row version at `place` into `slot` if the snapshot sees it. The pin goes to the slot, or is given up.
///
/// # Safety
/// Under a guard. The table is an open one of the heap access method that is not temporary; the place's block is in the buffer, which is
/// pinned; the slot is one of the table's.
pub(super) unsafe fn fetch(
    table: pg_sys::Relation,
    buffer: pg_sys::Buffer,
    place: Place,
    snapshot: pg_sys::Snapshot,
    slot: *mut pg_sys::TupleTableSlot,
) -> bool {
    // SAFETY: as the caller says. The page is read while it is locked; of an item only what lies in the page is taken.
    unsafe {
        let (_, item) = place;
        let tuple = &raw mut (*slot.cast::<pg_sys::BufferHeapTupleTableSlot>())
            .base
            .tupdata;
        raw::LockBuffer(buffer, SHARE);
        let page = page_of(buffer);
        let pointer = match usize::from(item).checked_sub(1) {
            Some(before) if before < items(page) => {
                page.add(HEADER + before * ITEM).cast::<u32>().read()
            }
            _ => 0,
        };
        // ItemIdData: 15 bits for the place in the page, two for what it is, 15 for the length.
        let is_visible = pointer >> 15 & 3 == NORMAL && {
            (*tuple).t_data = page.add((pointer & 0x7FFF) as usize).cast();
            (*tuple).t_len = pointer >> 17;
            (*tuple).t_tableOid = (*table).rd_id;
            (*tuple).t_self = tid_of(place);
            raw::HeapTupleSatisfiesVisibility(tuple, snapshot, buffer)
        };
        raw::LockBuffer(buffer, UNLOCK);
        if !is_visible {
            raw::ReleaseBuffer(buffer);
            return false;
        }
        raw::ExecStorePinnedBufferHeapTuple(tuple, slot, buffer);
        (*slot).tts_tableOid = (*table).rd_id;
        true
    }
}
