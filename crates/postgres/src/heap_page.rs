//! Pages in shared buffers; and a row of a page that is pinned already: heap_fetch of
//! src/backend/access/heap/heapam.c, 15 to 18, for such a buffer.

use std::cell::Cell;
use std::ffi::c_char;

use pgrx::pg_sys;

use crate::compat::{self, FileLocator};
use crate::ffi::raw;
use crate::plain;

/// Size of a page's header without its items, and of an item's pointer:
/// src/include/storage/bufpage.h.
const HEADER: usize = 24;
const ITEM: usize = 4;
/// LP_NORMAL of src/include/storage/itemid.h.
const NORMAL: u32 = 1;

/// For `layout::by_hand`.
pub(crate) const BY_HAND: &[(&str, usize)] = &[
    ("SizeOfPageHeaderData", HEADER),
    ("sizeof(ItemIdData)", ITEM),
    ("LP_NORMAL", NORMAL as usize),
];

/// A place in a table: block, and item in it.
pub type Place = (u32, u16);

/// Turns a tuple identifier into a place, which can be compared and kept.
pub fn place_of(tid: pg_sys::ItemPointerData) -> Place {
    let block = u32::from(tid.ip_blkid.bi_hi) << 16 | u32::from(tid.ip_blkid.bi_lo);
    (block, tid.ip_posid)
}

/// Turns a place into a tuple identifier.
pub fn tid_of((block, item): Place) -> pg_sys::ItemPointerData {
    let [hi1, hi0, lo1, lo0] = block.to_be_bytes();
    let mut tid = pg_sys::ItemPointerData::default();
    tid.ip_blkid.bi_hi = u16::from_be_bytes([hi1, hi0]);
    tid.ip_blkid.bi_lo = u16::from_be_bytes([lo1, lo0]);
    tid.ip_posid = item;
    tid
}

/// The place of the page in a shared buffer, which have positive numbers: BufferGetBlock of
/// src/include/storage/bufmgr.h.
pub(crate) fn page_of(buffer: pg_sys::Buffer) -> *mut c_char {
    let before = usize::try_from(buffer.saturating_sub(1)).unwrap_or(0);
    plain::BufferBlocks().wrapping_add(before * pg_sys::BLCKSZ as usize)
}

/// How many items a page has: PageGetMaxOffsetNumber of src/include/storage/bufpage.h.
///
/// # Safety
/// The page is pinned and locked.
pub(crate) unsafe fn items(page: *mut c_char) -> usize {
    // SAFETY: as the caller says.
    let end = usize::from(unsafe { (*page.cast::<pg_sys::PageHeaderData>()).pd_lower });
    end.saturating_sub(HEADER) / ITEM
}

/// The row version that is item `item` of a page, and its length; `None` if that item is none.
///
/// # Safety
/// The page is pinned and locked. The result is valid as long as it stays so.
unsafe fn version_at(
    page: *mut c_char,
    item: u16,
) -> Option<(*mut pg_sys::HeapTupleHeaderData, u32)> {
    let before = usize::from(item).checked_sub(1)?;
    // SAFETY: as the caller says; of the page only items are read that it has.
    unsafe {
        if before >= items(page) {
            return None;
        }
        // ItemIdData: 15 bits for the place in the page, two for its kind, 15 for the length.
        let pointer = page.add(HEADER + before * ITEM).cast::<u32>().read();
        (pointer >> 15 & 3 == NORMAL)
            .then(|| (page.add((pointer & 0x7FFF) as usize).cast(), pointer >> 17))
    }
}

/// Put the row version at `place` into `slot` if the snapshot sees it. The pin goes to the slot, or
/// is given up.
///
/// # Safety
/// Under a guard. The table is an open one of the heap access method that is not temporary; the
/// place's block is in the buffer, which is pinned; the slot is one of the table's.
pub unsafe fn fetch(
    table: pg_sys::Relation,
    buffer: pg_sys::Buffer,
    place: Place,
    snapshot: pg_sys::Snapshot,
    slot: *mut pg_sys::TupleTableSlot,
) -> bool {
    // SAFETY: the caller guarantees that the buffer is pinned. The page is read while it is locked;
    // of an item, only bytes within the page are used.
    unsafe {
        let (_, item) = place;
        let tuple = &raw mut (*slot.cast::<pg_sys::BufferHeapTupleTableSlot>())
            .base
            .tupdata;
        compat::lock_shared(buffer);
        let found = version_at(page_of(buffer), item);
        let is_visible = found.is_some_and(|(header, length)| {
            (*tuple).t_data = header;
            (*tuple).t_len = length;
            (*tuple).t_tableOid = (*table).rd_id;
            (*tuple).t_self = tid_of(place);
            raw::HeapTupleSatisfiesVisibility(tuple, snapshot, buffer)
        });
        compat::unlock(buffer);
        if !is_visible {
            raw::ReleaseBuffer(buffer);
            return false;
        }
        raw::ExecStorePinnedBufferHeapTuple(tuple, slot, buffer);
        (*slot).tts_tableOid = (*table).rd_id;
        true
    }
}

/// The transactions that wrote and ended a row version, from its header.
#[derive(Debug, Clone, Copy)]
pub struct Lifetime {
    /// The transaction that wrote it; `None` if the version is frozen.
    pub writer: Option<pg_sys::TransactionId>,
    /// The transaction that replaced or deleted it, if that was one alone.
    pub ended_by: Option<pg_sys::TransactionId>,
}

/// Reads which transactions wrote and ended the row version that is item `item` of a block of a
/// table's file. Returns `None` if the block is not in shared buffers, or has no such version any
/// more. Works outside of transactions too.
/// transactions too.
///
/// Nothing is read from files: so there is no file to miss, and no error of a read can leave a pin
/// or a read under way behind.
///
/// # Safety
/// In a process that is attached to shared buffers; the file is one of a permanent table of the
/// heap access method.
pub unsafe fn lifetime(
    file: FileLocator,
    block: pg_sys::BlockNumber,
    item: u16,
) -> Option<Lifetime> {
    let mut found = None;
    // SAFETY: as the caller says. Nothing on the closure's stack has a destructor. From the pin to
    // its release nothing raises an error, and the page is read while it is pinned and locked.
    unsafe {
        let _owner = Owner::ensure();
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            let Some(buffer) = pin(file, block) else {
                return;
            };
            compat::lock_shared(buffer);
            if let Some((header, _)) = version_at(page_of(buffer), item) {
                let mask = u32::from((*header).t_infomask);
                let fields = (*header).t_choice.t_heap;
                found = Some(Lifetime {
                    writer: (mask & pg_sys::HEAP_XMIN_FROZEN != pg_sys::HEAP_XMIN_FROZEN)
                        .then_some(fields.t_xmin),
                    ended_by: (mask & pg_sys::HEAP_XMAX_IS_MULTI == 0).then_some(fields.t_xmax),
                });
            }
            compat::unlock(buffer);
            raw::ReleaseBuffer(buffer);
        });
    }
    found
}

const MAIN_FORK: pg_sys::ForkNumber::Type = pg_sys::ForkNumber::MAIN_FORKNUM;

/// Pins the shared buffer that has this block, if there is one.
///
/// # Safety
/// Under a guard, in a process that is attached to shared buffers, with a resource owner.
unsafe fn pin(file: FileLocator, block: pg_sys::BlockNumber) -> Option<pg_sys::Buffer> {
    let mut tag = compat::buffer_tag(file, MAIN_FORK, block);
    // SAFETY: as the caller says. The table of buffers is read under the lock of its partition, as
    // in BufferAlloc of src/backend/storage/buffer/bufmgr.c, 15 to 18. Another block may be in the
    // buffer by the time that it is pinned: ReadRecentBuffer compares.
    unsafe {
        let hash = raw::BufTableHashCode(&raw mut tag);
        let partition = pg_sys::BUFFER_MAPPING_LWLOCK_OFFSET + hash % pg_sys::NUM_BUFFER_PARTITIONS;
        let lock = &raw mut (*pg_sys::MainLWLockArray.add(partition as usize)).lock;
        raw::LWLockAcquire(lock, pg_sys::LWLockMode::LW_SHARED);
        let number = raw::BufTableLookup(&raw mut tag, hash);
        raw::LWLockRelease(lock);
        let buffer = number + 1;
        (number >= 0 && raw::ReadRecentBuffer(file, MAIN_FORK, block, buffer)).then_some(buffer)
    }
}

/// Sees to a resource owner, which pins need: outside of transactions that is one of the process's
/// own. Puts the former one back at its end, also after an error.
struct Owner {
    outer: pg_sys::ResourceOwner,
}

impl Owner {
    fn ensure() -> Self {
        // SAFETY: a variable of the process.
        unsafe {
            let outer = pg_sys::CurrentResourceOwner;
            if outer.is_null() {
                pg_sys::CurrentResourceOwner = own_resource_owner();
            }
            Self { outer }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: a variable of the process, as it was.
        unsafe { pg_sys::CurrentResourceOwner = self.outer };
    }
}

/// A resource owner for work outside of transactions, created once in a process.
fn own_resource_owner() -> pg_sys::ResourceOwner {
    thread_local! {
        static OWNER: Cell<pg_sys::ResourceOwner> = const { Cell::new(std::ptr::null_mut()) };
    }
    OWNER.with(|owner| {
        if owner.get().is_null() {
            // SAFETY: without a parent it lives as long as the process; the name is a constant.
            owner.set(unsafe {
                pg_sys::ResourceOwnerCreate(std::ptr::null_mut(), c"braid page".as_ptr())
            });
        }
        owner.get()
    })
}
