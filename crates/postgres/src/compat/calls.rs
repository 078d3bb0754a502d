//! Calls of PostgreSQL's functions whose arguments, or whose names, differ between majors.

use pgrx::pg_sys;

use super::{ReplOriginId, TupleDelete};

/// Declares calls. Each is as unsafe as the functions that it calls: its documentation says what
/// the caller has to see to.
macro_rules! calls {
    ($(
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident($($(#[$on:meta])* $argument:ident: $type:ty),* $(,)?) $(-> $returned:ty)? { $($body:tt)* }
    )*) => {$(
        $(#[$meta])*
        $vis unsafe fn $name($($(#[$on])* $argument: $type),*) $(-> $returned)? {
            // SAFETY: the caller keeps the rule that the documentation gives, which is the rule of
            // the functions that this one calls.
            unsafe { $($body)* }
        }
    )*};
}

/// Declares calls and variables that follow the rule of [`crate::plain`].
macro_rules! plain {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident($($argument:ident: $type:ty),*) $(-> $returned:ty)? { $($body:tt)* }
    )*) => {$(
        $(#[$meta])*
        $vis fn $name($($argument: $type),*) $(-> $returned)? {
            // SAFETY: the function takes and returns plain values, and checks them itself, or this
            // is a variable of this process, in which one thread runs PostgreSQL's code.
            unsafe { $($body)* }
        }
    )*};
}

plain! {
    /// `replorigin_session_setup`: 16 added the process that holds the origin already.
    pub fn replorigin_session_setup(origin: ReplOriginId) {
        pg_sys::replorigin_session_setup(
            origin,
            #[cfg(not(feature = "pg15"))]
            0,
        );
    }

    /// The origin that this process's commits carry: since 19 a member of `replorigin_xact_state`.
    #[must_use]
    pub fn session_origin() -> ReplOriginId {
        #[cfg(not(feature = "pg19"))]
        let origin = pg_sys::replorigin_session_origin;
        #[cfg(feature = "pg19")]
        let origin = pg_sys::replorigin_xact_state.origin;
        origin
    }

    /// The oldest transaction that runs, in any database: `GetOldestActiveTransactionId`, to which
    /// 19 added which ones count.
    pub(crate) fn oldest_active_transaction() -> pg_sys::TransactionId {
        pg_sys::GetOldestActiveTransactionId(
            #[cfg(feature = "pg19")]
            false,
            #[cfg(feature = "pg19")]
            true,
        )
    }
}

calls! {
    /// `index_beginscan`: 18 added instrumentation, 19 flags.
    ///
    /// # Safety
    /// As the PostgreSQL function.
    pub unsafe fn index_beginscan(
        table: pg_sys::Relation,
        index: pg_sys::Relation,
        snapshot: pg_sys::Snapshot,
        keys: i32,
    ) -> pg_sys::IndexScanDesc {
        // 19 gets no flag: the table may be written to.
        pg_sys::index_beginscan(
            table,
            index,
            snapshot,
            #[cfg(any(feature = "pg18", feature = "pg19"))]
            std::ptr::null_mut(),
            keys,
            0,
            #[cfg(feature = "pg19")]
            0,
        )
    }

    /// Has the scan of a heap's index hold the pin of this block: 19 notes the block beside the
    /// pin, and releases a pin only with a block.
    ///
    /// # Safety
    /// Under a guard; the scan is one of an index of this table, which is a heap.
    pub unsafe fn enter_block(
        scan: pg_sys::IndexScanDesc,
        table: pg_sys::Relation,
        block: pg_sys::BlockNumber,
    ) {
        let fetch = (*scan).xs_heapfetch.cast::<pg_sys::IndexFetchHeapData>();
        (*fetch).xs_cbuf = crate::ffi::raw::ReleaseAndReadBuffer((*fetch).xs_cbuf, table, block);
        #[cfg(feature = "pg19")]
        {
            (*fetch).xs_blk = block;
        }
    }

    /// Starts an index scan anew and lets go of all pages. From 19 on `index_rescan` alone keeps
    /// the heap's page and the one of its visibility map (heapam_index_fetch_reset of
    /// src/backend/access/heap/heapam_indexscan.c).
    ///
    /// # Safety
    /// Under a guard; as `index_rescan`.
    pub unsafe fn rescan_without_pages(scan: pg_sys::IndexScanDesc, keys: pg_sys::ScanKey, count: i32) {
        // The fetch of a heap's scan is of the heap's kind.
        crate::ffi::raw::index_rescan(scan, keys, count, std::ptr::null_mut(), 0);
        #[cfg(feature = "pg19")]
        if (*(*(*scan).heapRelation).rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID {
            let fetch = (*scan).xs_heapfetch.cast::<pg_sys::IndexFetchHeapData>();
            for buffer in [&raw mut (*fetch).xs_cbuf, &raw mut (*fetch).xs_vmbuffer] {
                if *buffer != 0 {
                    crate::ffi::raw::ReleaseBuffer(*buffer);
                    *buffer = 0;
                }
            }
            (*fetch).xs_blk = pg_sys::InvalidBlockNumber;
        }
    }

    /// `EvalPlanQualInit`: 16 added the result relations.
    ///
    /// # Safety
    /// As the PostgreSQL function.
    pub unsafe fn eval_plan_qual_init(state: *mut pg_sys::EPQState, estate: *mut pg_sys::EState) {
        pg_sys::EvalPlanQualInit(
            state,
            estate,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            -1,
            #[cfg(not(feature = "pg15"))]
            std::ptr::null_mut(),
        );
    }

    /// `ExecuteTruncateGuts`: 16 added `as_owner`, that it works as each table's owner.
    ///
    /// # Safety
    /// As the PostgreSQL function.
    pub unsafe fn execute_truncate(
        relations: *mut pg_sys::List,
        oids: *mut pg_sys::List,
        logged: *mut pg_sys::List,
        restart_identity: bool,
        #[cfg_attr(feature = "pg15", allow(unused_variables))] as_owner: bool,
    ) {
        let behavior = pg_sys::DropBehavior::DROP_RESTRICT;
        pg_sys::ExecuteTruncateGuts(
            relations,
            oids,
            logged,
            behavior,
            restart_identity,
            #[cfg(not(feature = "pg15"))]
            as_owner,
        );
    }

    /// The call of a table access method's `tuple_update` and of `ExecInsertIndexTuples` after it,
    /// as `ExecSimpleRelationUpdate` makes them (src/backend/executor/execReplication.c). From 16
    /// on, `tuple_update` returns which indexes need an entry.
    ///
    /// # Safety
    /// Under a guard; all arguments belong together, and the table has an access method.
    pub unsafe fn update_tuple_and_indexes(
        relation: pg_sys::Relation,
        target: *mut pg_sys::ResultRelInfo,
        estate: *mut pg_sys::EState,
        tid: pg_sys::ItemPointer,
        slot: *mut pg_sys::TupleTableSlot,
        command: pg_sys::CommandId,
        failure: *mut pg_sys::TM_FailureData,
    ) -> pg_sys::TM_Result::Type {
        let Some(update) = (*(*relation).rd_tableam).tuple_update else {
            return pg_sys::TM_Result::TM_Invisible;
        };
        let mut mode = pg_sys::LockTupleMode::LockTupleNoKeyExclusive;
        #[cfg(feature = "pg15")]
        let (mut indexes, none) = (false, false);
        #[cfg(not(feature = "pg15"))]
        let (mut indexes, none) = (
            pg_sys::TU_UpdateIndexes::TU_None,
            pg_sys::TU_UpdateIndexes::TU_None,
        );
        let result = update(
            relation,
            tid,
            slot,
            command,
            #[cfg(feature = "pg19")]
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            true,
            failure,
            &raw mut mode,
            &raw mut indexes,
        );
        if result == pg_sys::TM_Result::TM_Ok && indexes != none {
            #[cfg(not(feature = "pg15"))]
            let summarizing = indexes == pg_sys::TU_UpdateIndexes::TU_Summarizing;
            #[cfg(feature = "pg15")]
            let summarizing = false;
            insert_index_tuples(target, slot, estate, true, summarizing);
        }
        result
    }

    /// `ExecInsertIndexTuples`, for a table whose unique indexes are all immediate: 16 added
    /// indexes that only summarize, 19 flags.
    ///
    /// # Safety
    /// Under a guard; as the PostgreSQL function.
    pub unsafe fn insert_index_tuples(
        target: *mut pg_sys::ResultRelInfo,
        slot: *mut pg_sys::TupleTableSlot,
        estate: *mut pg_sys::EState,
        update: bool,
        summarizing: bool,
    ) {
        if (*target).ri_NumIndices == 0 {
            return;
        }
        #[cfg(feature = "pg15")]
        {
            let _ = summarizing;
            super::ExecInsertIndexTuples(
                target,
                slot,
                estate,
                update,
                false,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            );
        }
        #[cfg(feature = "pg19")]
        {
            // EIIT_IS_UPDATE and EIIT_ONLY_SUMMARIZING of the header.
            let flags = u32::from(update) | u32::from(summarizing) << 2;
            let none = std::ptr::null_mut();
            super::ExecInsertIndexTuples(target, estate, flags, slot, none, std::ptr::null_mut());
        }
        #[cfg(not(any(feature = "pg15", feature = "pg19")))]
        super::ExecInsertIndexTuples(
            target,
            slot,
            estate,
            update,
            false,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            summarizing,
        );
    }

    /// `RelationGetPrimaryKeyIndex`: 18 asks whether a deferrable one will do.
    ///
    /// # Safety
    /// As the PostgreSQL function.
    pub unsafe fn primary_key_index(relation: pg_sys::Relation) -> pg_sys::Oid {
        pg_sys::RelationGetPrimaryKeyIndex(
            relation,
            #[cfg(any(feature = "pg18", feature = "pg19"))]
            false,
        )
    }

    /// `CreateWaitEventSet`, for the life of the process: 17 wants a resource owner instead of a
    /// memory context.
    ///
    /// # Safety
    /// As the PostgreSQL function.
    pub(crate) unsafe fn create_wait_event_set(events: i32) -> *mut pg_sys::WaitEventSet {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let owner = pg_sys::TopMemoryContext;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let owner = std::ptr::null_mut();
        pg_sys::CreateWaitEventSet(owner, events)
    }

    /// `ReplicationSlotAcquire`, without waiting. 18 has an argument for invalidated slots; such a
    /// slot is an error, as in earlier versions.
    ///
    /// # Safety
    /// As the PostgreSQL function.
    pub unsafe fn acquire_slot(name: &std::ffi::CStr) {
        pg_sys::ReplicationSlotAcquire(
            name.as_ptr(),
            true,
            #[cfg(any(feature = "pg18", feature = "pg19"))]
            true,
        );
    }

    /// Locks a page for reading. `LockBuffer`: since 19 an inline function.
    ///
    /// # Safety
    /// Under a guard; the buffer is pinned and not locked by this process.
    pub unsafe fn lock_shared(buffer: pg_sys::Buffer) {
        #[cfg(not(feature = "pg19"))]
        super::LockBuffer(buffer, super::SHARE);
        #[cfg(feature = "pg19")]
        super::LockBufferInternal(buffer, super::SHARE);
    }

    /// Locks a page for writing.
    ///
    /// # Safety
    /// Under a guard; the buffer is pinned and not locked by this process.
    pub unsafe fn lock_exclusive(buffer: pg_sys::Buffer) {
        #[cfg(not(feature = "pg19"))]
        super::LockBuffer(buffer, super::EXCLUSIVE);
        #[cfg(feature = "pg19")]
        super::LockBufferInternal(buffer, super::EXCLUSIVE);
    }

    /// Unlocks a page, which stays pinned.
    ///
    /// # Safety
    /// Under a guard; the buffer is locked by this process.
    pub unsafe fn unlock(buffer: pg_sys::Buffer) {
        #[cfg(not(feature = "pg19"))]
        super::LockBuffer(buffer, super::UNLOCK);
        #[cfg(feature = "pg19")]
        super::UnlockBuffer(buffer);
    }

    /// Prunes a page if it is worth while and its cleanup lock is free. `heap_page_prune_opt`: 19
    /// may set the page's bit in the visibility map as well.
    ///
    /// # Safety
    /// Under a guard; the buffer is one of the table's, pinned and not locked.
    pub unsafe fn prune_page(table: pg_sys::Relation, buffer: pg_sys::Buffer) {
        #[cfg(not(feature = "pg19"))]
        super::heap_page_prune_opt(table, buffer);
        #[cfg(feature = "pg19")]
        {
            let mut map = 0;
            // The table is about to be written to: that a page is all visible would not last.
            super::heap_page_prune_opt(table, buffer, &raw mut map, false);
            if map != 0 {
                pg_sys::ReleaseBuffer(map);
            }
        }
    }

    /// A new slot for values of a row. `MakeTupleTableSlot`: 19 added flags.
    ///
    /// # Safety
    /// In a memory context that lives no longer than the descriptor.
    pub unsafe fn make_virtual_slot(descriptor: pg_sys::TupleDesc) -> *mut pg_sys::TupleTableSlot {
        let kind = &raw const pg_sys::TTSOpsVirtual;
        #[cfg(not(feature = "pg19"))]
        let slot = pg_sys::MakeTupleTableSlot(descriptor, kind);
        #[cfg(feature = "pg19")]
        let slot = pg_sys::MakeTupleTableSlot(descriptor, kind, 0);
        slot
    }

    /// Deletes a row version, waiting for a transaction that has it.
    ///
    /// # Safety
    /// Under a guard; `delete` is of the table's access method.
    pub unsafe fn delete_tuple(
        delete: TupleDelete,
        table: pg_sys::Relation,
        tid: pg_sys::ItemPointer,
        command: pg_sys::CommandId,
        failure: *mut pg_sys::TM_FailureData,
    ) -> pg_sys::TM_Result::Type {
        let none = std::ptr::null_mut();
        #[cfg(not(feature = "pg19"))]
        let result = delete(table, tid, command, none, none, true, failure, false);
        #[cfg(feature = "pg19")]
        let result = delete(table, tid, command, 0, none, none, true, failure);
        result
    }

    /// Publications that list a relation, as a List of OIDs: `GetRelationPublications`, since 19
    /// `GetRelationIncludedPublications`.
    ///
    /// # Safety
    /// In a transaction with a snapshot for catalogs.
    pub unsafe fn relation_publications(relation: pg_sys::Oid) -> *mut pg_sys::List {
        #[cfg(not(feature = "pg19"))]
        let list = pg_sys::GetRelationPublications(relation);
        #[cfg(feature = "pg19")]
        let list = pg_sys::GetRelationIncludedPublications(relation);
        list
    }
}
