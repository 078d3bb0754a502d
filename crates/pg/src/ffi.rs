//! Exported functions of PostgreSQL that the bindings lack. Each is called through `pg_guard_ffi_boundary`, as the bindings'
//! own functions are, so that an error raised in it unwinds as a panic; signal handlers are only passed on by address.

use std::ffi::c_int;

use pgrx::pg_sys;

/// src/backend/executor/execPartition.c; opaque.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PartitionTupleRouting {
    _private: [u8; 0],
}

unsafe extern "C-unwind" {
    /// Handler for SIGTERM (src/backend/tcop/postgres.c, 15 to 18).
    pub(crate) fn die(signal: c_int);
    /// Handler for SIGHUP (src/backend/postmaster/interrupt.c, 15 to 18).
    pub(crate) fn SignalHandlerForConfigReload(signal: c_int);
    // src/include/executor/execPartition.h, 15 to 18.
    #[link_name = "ExecSetupPartitionTupleRouting"]
    fn setup_partition_tuple_routing_unguarded(
        estate: *mut pg_sys::EState,
        relation: pg_sys::Relation,
    ) -> *mut PartitionTupleRouting;
    #[link_name = "ExecFindPartition"]
    fn find_partition_unguarded(
        state: *mut pg_sys::ModifyTableState,
        root: *mut pg_sys::ResultRelInfo,
        routing: *mut PartitionTupleRouting,
        slot: *mut pg_sys::TupleTableSlot,
        estate: *mut pg_sys::EState,
    ) -> *mut pg_sys::ResultRelInfo;
    #[link_name = "ExecCleanupTupleRouting"]
    fn cleanup_tuple_routing_unguarded(
        state: *mut pg_sys::ModifyTableState,
        routing: *mut PartitionTupleRouting,
    );
    // src/include/catalog/pg_inherits.h, 15 to 18.
    #[link_name = "find_all_inheritors"]
    fn find_all_inheritors_unguarded(
        parent: pg_sys::Oid,
        lock_mode: c_int,
        parents: *mut *mut pg_sys::List,
    ) -> *mut pg_sys::List;
}

/// Prepare to route rows of a partitioned table.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn exec_setup_partition_tuple_routing(
    estate: *mut pg_sys::EState,
    relation: pg_sys::Relation,
) -> *mut PartitionTupleRouting {
    // SAFETY: the signature is that of the header; nothing with a destructor is on the closure's stack.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            setup_partition_tuple_routing_unguarded(estate, relation)
        })
    }
}

/// The partition that a row belongs to.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn exec_find_partition(
    state: *mut pg_sys::ModifyTableState,
    root: *mut pg_sys::ResultRelInfo,
    routing: *mut PartitionTupleRouting,
    slot: *mut pg_sys::TupleTableSlot,
    estate: *mut pg_sys::EState,
) -> *mut pg_sys::ResultRelInfo {
    // SAFETY: as above.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            find_partition_unguarded(state, root, routing, slot, estate)
        })
    }
}

/// Close what routing has opened.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn exec_cleanup_tuple_routing(
    state: *mut pg_sys::ModifyTableState,
    routing: *mut PartitionTupleRouting,
) {
    // SAFETY: as above.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| cleanup_tuple_routing_unguarded(state, routing));
    }
}

/// OIDs of a table and all tables below it, each locked.
///
/// # Safety
/// In a transaction; the list is allocated in the current memory context.
pub(crate) unsafe fn find_all_inheritors(
    parent: pg_sys::Oid,
    lock_mode: c_int,
) -> *mut pg_sys::List {
    // SAFETY: as above.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            find_all_inheritors_unguarded(parent, lock_mode, std::ptr::null_mut())
        })
    }
}

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
