//! Exported functions of PostgreSQL that the bindings lack. Each is called through `pg_guard_ffi_boundary`, as the bindings'
//! own functions are, so that an error raised in it unwinds as a panic.

use pgrx::pg_sys;

unsafe extern "C-unwind" {
    /// src/backend/catalog/partition.c, 15 to 18: OIDs of a partition's ancestors, its parent first.
    #[link_name = "get_partition_ancestors"]
    fn get_partition_ancestors_unguarded(relid: pg_sys::Oid) -> *mut pg_sys::List;
}

/// OIDs of a partition's ancestors, its parent first.
///
/// # Safety
/// In a transaction, with a snapshot for catalogs; the list is allocated in the current memory context.
pub(crate) unsafe fn get_partition_ancestors(relid: pg_sys::Oid) -> *mut pg_sys::List {
    // SAFETY: the signature is that of the header; nothing with a destructor is on the stack of the closure.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| get_partition_ancestors_unguarded(relid)) }
}
