//! The end of a B-tree: a key that is greater than all others in it does not exist, alive or dead.
//! One look at the last page answers that. Rows with growing keys, of a sequence or a clock, are
//! found missing without a descent from the root. Run by the appliers.
//!
//! The buffer of the last page is remembered. Each look locks the page, and checks that it is in
//! that buffer and is still the last one. So a split, vacuum, truncation or rebuild of the index
//! needs no notification.

use std::mem::offset_of;

use pgrx::pg_sys;

use crate::compat;
use crate::ffi::{ScanInsert, raw};
use crate::heap_page;

/// SK_ISNULL of src/include/access/skey.h.
const IS_NULL: i32 = 1;
/// BTP_LEAF, and BTP_DELETED with BTP_HALF_DEAD, of src/include/access/nbtree.h.
const LEAF: u16 = 1;
const GONE: u16 = 1 << 2 | 1 << 4;
/// Look-ups without a look at the end, at most, after one that was in vain. It doubles up to this.
const LONGEST_PAUSE: u32 = 1023;

/// BTPageOpaqueData of src/include/access/nbtree.h, 15 to 18.
#[repr(C)]
struct PageOpaque {
    previous: pg_sys::BlockNumber,
    next: pg_sys::BlockNumber,
    level: u32,
    flags: u16,
    cycle: u16,
}

/// For `layout::by_hand`.
pub(crate) const BY_HAND: &[(&str, usize)] = &[
    (
        "BTPageOpaqueData.btpo_prev",
        offset_of!(PageOpaque, previous),
    ),
    ("BTPageOpaqueData.btpo_next", offset_of!(PageOpaque, next)),
    ("BTPageOpaqueData.btpo_level", offset_of!(PageOpaque, level)),
    ("BTPageOpaqueData.btpo_flags", offset_of!(PageOpaque, flags)),
    (
        "BTPageOpaqueData.btpo_cycleid",
        offset_of!(PageOpaque, cycle),
    ),
    ("sizeof(BTPageOpaqueData)", size_of::<PageOpaque>()),
    ("SK_ISNULL", IS_NULL as usize),
    ("BTP_LEAF", LEAF as usize),
    ("BTP_DELETED | BTP_HALF_DEAD", GONE as usize),
];

/// The remembered end of an index.
#[derive(Debug)]
pub struct IndexEnd {
    /// Created at the first look.
    key: *mut ScanInsert,
    /// Block and buffer that the last page was in.
    page: Option<(pg_sys::BlockNumber, pg_sys::Buffer)>,
    /// Number of look-ups to come that do not look at the end.
    skip: u32,
    /// The number that `skip` had the last time.
    pause: u32,
}

impl Default for IndexEnd {
    fn default() -> Self {
        Self {
            key: std::ptr::null_mut(),
            page: None,
            skip: 0,
            pause: 0,
        }
    }
}

impl IndexEnd {
    /// Whether the key, which has a value for each column of the index, is known to be greater than
    /// all in it: then nothing is under it, as far as a scan of this moment could find. Also
    /// returns false if a look is not worth its cost.
    ///
    /// # Safety
    /// The index is open and locked; the values are of its columns' types. The current memory
    /// context lives as long as this.
    pub unsafe fn is_before(
        &mut self,
        index: pg_sys::Relation,
        keys: &[pg_sys::ScanKeyData],
    ) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let (count, keys) = (keys.len(), keys.as_ptr());
        let end: *mut Self = self;
        // SAFETY: as the caller says; nothing with a destructor is on the closure's stack.
        let is_before = unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                (*end).prepare(index, keys, count) && (*end).look(index)
            })
        };
        if is_before {
            self.pause = 0;
        } else {
            self.pause = LONGEST_PAUSE.min(self.pause * 2 + 1);
            self.skip = self.pause;
        }
        is_before
    }

    /// Put the values into the key. False for another kind of index, or where columns are missing.
    ///
    /// # Safety
    /// As [`IndexEnd::is_before`], under a guard.
    unsafe fn prepare(
        &mut self,
        index: pg_sys::Relation,
        keys: *const pg_sys::ScanKeyData,
        count: usize,
    ) -> bool {
        // SAFETY: as the caller says; the key was made with as many places as the index has key
        // columns.
        unsafe {
            if (*(*index).rd_rel).relam != pg_sys::BTREE_AM_OID
                || usize::try_from((*(*index).rd_index).indnkeyatts) != Ok(count)
            {
                return false;
            }
            if self.key.is_null() {
                self.key = raw::_bt_mkscankey(index, std::ptr::null_mut());
                // `_bt_mkscankey` leaves this to its caller. Only an index that may have entries
                // of several row versions compares them.
                raw::_bt_metaversion(
                    index,
                    &raw mut (*self.key).has_heap_key_space,
                    &raw mut (*self.key).all_equal_image,
                );
            }
            (*self.key).keys = i32::try_from(count).unwrap_or(0);
            let places = (&raw mut (*self.key).scan_keys).cast::<pg_sys::ScanKeyData>();
            for position in 0..count {
                let place = places.add(position);
                (*place).sk_flags &= !IS_NULL;
                (*place).sk_argument = (*keys.add(position)).sk_argument;
            }
            true
        }
    }

    /// Compare the key with the last entry of the index.
    ///
    /// # Safety
    /// As [`IndexEnd::is_before`], under a guard, with the key prepared.
    unsafe fn look(&mut self, index: pg_sys::Relation) -> bool {
        // SAFETY: as the caller says. Pages are read while they are pinned and locked.
        unsafe {
            let fork = pg_sys::ForkNumber::MAIN_FORKNUM;
            if let Some((block, buffer)) = self.page
                && raw::ReadRecentBuffer(compat::file_of(index), fork, block, buffer)
            {
                compat::lock_shared(buffer);
                let seen = self.compare(index, buffer);
                raw::UnlockReleaseBuffer(buffer);
                if let Some(is_greater) = seen {
                    return is_greater;
                }
            }
            self.page = None;
            // Up to 16 the function takes a snapshot as well, which may be null.
            let buffer = raw::_bt_get_endpoint(index, 0, true, std::ptr::null_mut());
            if buffer == 0 {
                // The index is empty.
                return false;
            }
            let seen = self.compare(index, buffer);
            if seen.is_some() {
                self.page = Some((raw::BufferGetBlockNumber(buffer), buffer));
            }
            raw::UnlockReleaseBuffer(buffer);
            seen.unwrap_or(false)
        }
    }

    /// Whether the key is greater than the last entry of this page; `None` where it is not the last
    /// page of the index, or empty.
    ///
    /// # Safety
    /// As [`IndexEnd::look`]; the page is pinned and locked.
    unsafe fn compare(&self, index: pg_sys::Relation, buffer: pg_sys::Buffer) -> Option<bool> {
        // A buffer of another kind than the shared ones has a negative number.
        if buffer <= 0 {
            return None;
        }
        // SAFETY: the caller guarantees a page of a B-tree, which ends with the fields that all of
        // these have.
        unsafe {
            let page = heap_page::page_of(buffer);
            let header = &*page.cast::<pg_sys::PageHeaderData>();
            let opaque = &*page
                .add(usize::from(header.pd_special))
                .cast::<PageOpaque>();
            if opaque.next != 0 || opaque.flags & LEAF == 0 || opaque.flags & GONE != 0 {
                return None;
            }
            let last = u16::try_from(heap_page::items(page)).unwrap_or(0);
            if last == 0 {
                return None;
            }
            Some(raw::_bt_compare(index, self.key, page.cast(), last) > 0)
        }
    }
}
