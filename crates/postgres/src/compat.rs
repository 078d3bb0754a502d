//! What differs between the major versions that are supported. The only place with `cfg(feature = "pgNN")`.

use pgrx::pg_sys;

/// The number of a wait event of ours, under which pg_stat_activity shows its name; before 17 they are all "Extension". One number for
/// each name in the whole server.
pub(crate) fn wait_event(name: &std::ffi::CStr) -> u32 {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    {
        let _ = name;
        pg_sys::PG_WAIT_EXTENSION
    }
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: PostgreSQL copies the name into shared memory; in a process that is attached to it.
    unsafe {
        pg_sys::WaitEventExtensionNew(name.as_ptr())
    }
}

/// Attribute `index` (from 0) of a tuple descriptor: the macro of src/include/access/tupdesc.h up to 17, the function of 18.
///
/// # Safety
/// `descriptor` is valid and has more than `index` attributes.
#[allow(non_snake_case)]
pub unsafe fn TupleDescAttr(
    descriptor: pg_sys::TupleDesc,
    index: usize,
) -> *mut pg_sys::FormData_pg_attribute {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: the attributes follow the descriptor, and there are more than `index`.
    unsafe {
        (*descriptor).attrs.as_mut_ptr().add(index)
    }
    #[cfg(feature = "pg18")]
    // SAFETY: the attributes follow the array of compact ones (src/include/access/tupdesc.h, 18), and there are more than `index`.
    unsafe {
        let natts = usize::try_from((*descriptor).natts).unwrap_or_default();
        (*descriptor)
            .compact_attrs
            .as_mut_ptr()
            .add(natts)
            .cast::<pg_sys::FormData_pg_attribute>()
            .add(index)
    }
}

/// A row of a decoded change: up to 16 it is wrapped in a `ReorderBufferTupleBuf`.
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub(crate) type ChangeTuple = *mut pg_sys::ReorderBufferTupleBuf;
/// A row of a decoded change.
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub(crate) type ChangeTuple = pg_sys::HeapTuple;

/// The file of a block that a WAL record names: another name from 16 on.
pub fn block_file(block: &pg_sys::DecodedBkpBlock) -> FileLocator {
    #[cfg(feature = "pg15")]
    {
        block.rnode
    }
    #[cfg(not(feature = "pg15"))]
    {
        block.rlocator
    }
}

/// The tuple of a decoded change; null stays null.
///
/// # Safety
/// `tuple` is null or valid.
pub unsafe fn change_tuple(tuple: ChangeTuple) -> pg_sys::HeapTuple {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    {
        if tuple.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: not null, so valid as the caller says.
        unsafe { &raw mut (*tuple).tuple }
    }
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    tuple
}

/// The changed tuples of a decoded change.
pub(crate) type ChangedTuples = pg_sys::ReorderBufferChange__bindgen_ty_1__bindgen_ty_1;

/// Write to a file at an offset: how many bytes were, `None` for an error, of which errno tells. Up to 16 `FileWrite` and `FileRead` are
/// functions, from 17 on wrappers of others.
pub fn file_write(file: pg_sys::File, bytes: &[u8], offset: u64) -> Option<usize> {
    let offset = pg_sys::off_t::try_from(offset).ok()?;
    let wait = pg_sys::WaitEventIO::WAIT_EVENT_BUFFILE_WRITE;
    #[cfg(feature = "pg15")]
    // SAFETY: the file is open; the bytes are read only, whatever the older declaration says.
    let written = unsafe {
        let amount = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        pg_sys::FileWrite(file, bytes.as_ptr().cast_mut().cast(), amount, offset, wait)
    };
    #[cfg(feature = "pg16")]
    // SAFETY: the file is open.
    let written =
        unsafe { pg_sys::FileWrite(file, bytes.as_ptr().cast(), bytes.len(), offset, wait) };
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: the file is open; the bytes are read only.
    let written = unsafe {
        let vector = pg_sys::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        pg_sys::FileWriteV(file, &raw const vector, 1, offset, wait)
    };
    usize::try_from(written).ok()
}

/// Read from a file at an offset, as [`file_write`]. 0 at its end.
pub fn file_read(file: pg_sys::File, bytes: &mut [u8], offset: u64) -> Option<usize> {
    let offset = pg_sys::off_t::try_from(offset).ok()?;
    let wait = pg_sys::WaitEventIO::WAIT_EVENT_BUFFILE_READ;
    #[cfg(feature = "pg15")]
    // SAFETY: the file is open, and there is room for as many bytes.
    let read = unsafe {
        let amount = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        pg_sys::FileRead(file, bytes.as_mut_ptr().cast(), amount, offset, wait)
    };
    #[cfg(feature = "pg16")]
    // SAFETY: as above.
    let read =
        unsafe { pg_sys::FileRead(file, bytes.as_mut_ptr().cast(), bytes.len(), offset, wait) };
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: as above.
    let read = unsafe {
        let vector = pg_sys::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        pg_sys::FileReadV(file, &raw const vector, 1, offset, wait)
    };
    usize::try_from(read).ok()
}

/// Number of the file that a decoded change was made in.
pub fn change_file(tuples: &ChangedTuples) -> u32 {
    #[cfg(feature = "pg15")]
    let file = tuples.relnode.relNode;
    #[cfg(not(feature = "pg15"))]
    let file = tuples.rlocator.relNumber;
    file.to_u32()
}

/// Where a relation's file is.
#[cfg(feature = "pg15")]
pub type FileLocator = pg_sys::RelFileNode;
/// Where a relation's file is.
#[cfg(not(feature = "pg15"))]
pub type FileLocator = pg_sys::RelFileLocator;

/// The tag of a block in shared buffers.
pub(crate) fn buffer_tag(
    file: FileLocator,
    fork: pg_sys::ForkNumber::Type,
    block: pg_sys::BlockNumber,
) -> pg_sys::BufferTag {
    pg_sys::BufferTag {
        #[cfg(feature = "pg15")]
        rnode: file,
        #[cfg(not(feature = "pg15"))]
        spcOid: file.spcOid,
        #[cfg(not(feature = "pg15"))]
        dbOid: file.dbOid,
        #[cfg(not(feature = "pg15"))]
        relNumber: file.relNumber,
        forkNum: fork,
        blockNum: block,
    }
}

/// Where a relation's file is.
///
/// # Safety
/// `relation` is open.
pub unsafe fn file_of(relation: pg_sys::Relation) -> FileLocator {
    // SAFETY: as the caller says.
    unsafe {
        #[cfg(feature = "pg15")]
        let file = (*relation).rd_node;
        #[cfg(not(feature = "pg15"))]
        let file = (*relation).rd_locator;
        file
    }
}

/// Whether a relation is in this file.
///
/// # Safety
/// `relation` is open.
pub unsafe fn is_in_file(relation: pg_sys::Relation, file: &FileLocator) -> bool {
    #[cfg(feature = "pg15")]
    let number = file.relNode;
    #[cfg(not(feature = "pg15"))]
    let number = file.relNumber;
    // SAFETY: as the caller says.
    number.to_u32() == unsafe { relation_file(relation) }
}

/// Number of the file that a relation is in.
///
/// # Safety
/// `relation` is open.
pub unsafe fn relation_file(relation: pg_sys::Relation) -> u32 {
    // SAFETY: as the caller says.
    unsafe {
        #[cfg(feature = "pg15")]
        let file = (*relation).rd_node.relNode;
        #[cfg(not(feature = "pg15"))]
        let file = (*relation).rd_locator.relNumber;
        file.to_u32()
    }
}

/// Whether a publication sends stored generated columns (`publish_generated_columns = stored`, since 18).
///
/// # Safety
/// `publication` is valid.
pub unsafe fn publishes_generated(publication: *const pg_sys::Publication) -> bool {
    #[cfg(feature = "pg18")]
    // SAFETY: valid as the caller says.
    unsafe {
        (*publication).pubgencols_type == pg_sys::PublishGencolsType::PUBLISH_GENCOLS_STORED
    }
    #[cfg(not(feature = "pg18"))]
    {
        let _ = publication;
        false
    }
}

/// Replace virtual generated columns in an expression by what they are generated from (since 18).
///
/// # Safety
/// `node` is an expression over `relation`, in the current memory context.
pub unsafe fn expand_generated_columns(
    node: *mut pg_sys::Node,
    relation: pg_sys::Relation,
) -> *mut pg_sys::Node {
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::expand_generated_columns_in_expr(node, relation, 1)
    }
    #[cfg(not(feature = "pg18"))]
    {
        let _ = relation;
        node
    }
}

/// Whether the reorder buffer itself reports progress within a large transaction of which nothing is sent (since 16).
pub const REPORTS_PROGRESS: bool = cfg!(not(feature = "pg15"));

/// `index_beginscan`: 18 added instrumentation.
///
/// # Safety
/// As the PostgreSQL function.
pub unsafe fn index_beginscan(
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: i32,
) -> pg_sys::IndexScanDesc {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::index_beginscan(table, index, snapshot, keys, 0)
    }
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::index_beginscan(table, index, snapshot, std::ptr::null_mut(), keys, 0)
    }
}

/// `EvalPlanQualInit`: 16 added the result relations.
///
/// # Safety
/// As the PostgreSQL function.
pub unsafe fn eval_plan_qual_init(state: *mut pg_sys::EPQState, estate: *mut pg_sys::EState) {
    #[cfg(feature = "pg15")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::EvalPlanQualInit(
            state,
            estate,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            -1,
        );
    }
    #[cfg(not(feature = "pg15"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::EvalPlanQualInit(
            state,
            estate,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            -1,
            std::ptr::null_mut(),
        );
    }
}

/// `ExecInitRangeTable` for one relation in which these attributes, counted from 1, may change: 16 added permission infos, 18 the
/// unpruned relations. PostgreSQL's own apply worker names the columns that the provider sends as well. A trigger `UPDATE OF` goes by
/// them, and an index on other columns is known to keep its keys.
///
/// # Safety
/// `entry` is a range table entry in the executor state's memory context, which is the current one.
pub unsafe fn init_range_table(
    estate: *mut pg_sys::EState,
    entry: *mut pg_sys::RangeTblEntry,
    attributes: impl Iterator<Item = i32>,
) {
    // SAFETY: as the caller says; the lists are allocated in the current context.
    unsafe {
        let mut updated = std::ptr::null_mut();
        for attribute in attributes {
            updated = pg_sys::bms_add_member(
                updated,
                attribute - pg_sys::FirstLowInvalidHeapAttributeNumber,
            );
        }
        #[cfg(feature = "pg15")]
        {
            (*entry).updatedCols = updated;
            let list = pg_sys::lappend(std::ptr::null_mut(), entry.cast());
            pg_sys::ExecInitRangeTable(estate, list);
        }
        #[cfg(not(feature = "pg15"))]
        {
            let mut permissions: *mut pg_sys::List = std::ptr::null_mut();
            let permission = pg_sys::addRTEPermissionInfo(&raw mut permissions, entry);
            (*permission).updatedCols = updated;
            let list = pg_sys::lappend(std::ptr::null_mut(), entry.cast());
            #[cfg(not(feature = "pg18"))]
            pg_sys::ExecInitRangeTable(estate, list, permissions);
            #[cfg(feature = "pg18")]
            pg_sys::ExecInitRangeTable(estate, list, permissions, pg_sys::bms_make_singleton(1));
        }
    }
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
    #[cfg(feature = "pg15")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ExecuteTruncateGuts(relations, oids, logged, behavior, restart_identity);
    }
    #[cfg(not(feature = "pg15"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ExecuteTruncateGuts(
            relations,
            oids,
            logged,
            behavior,
            restart_identity,
            as_owner,
        );
    }
}

/// `replorigin_session_setup`: 16 added the process that holds the origin already.
///
/// # Safety
/// As the PostgreSQL function.
pub unsafe fn replorigin_session_setup(origin: pg_sys::RepOriginId) {
    #[cfg(feature = "pg15")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::replorigin_session_setup(origin);
    }
    #[cfg(not(feature = "pg15"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::replorigin_session_setup(origin, 0);
    }
}

/// The number that a List of OIDs has at `position`.
///
/// # Safety
/// `list` is null or a List of OIDs with more than `position` elements.
pub unsafe fn list_oid(list: *const pg_sys::List, position: usize) -> pg_sys::Oid {
    // SAFETY: as the caller says.
    unsafe { (*(*list).elements.add(position)).oid_value }
}

/// Elements of a List.
///
/// # Safety
/// `list` is null or a List.
pub unsafe fn list_length(list: *const pg_sys::List) -> usize {
    if list.is_null() {
        return 0;
    }
    // SAFETY: as the caller says.
    usize::try_from(unsafe { (*list).length }).unwrap_or(0)
}

/// `pqsignal`: a macro for `pqsignal_be` since 18.
///
/// # Safety
/// As the PostgreSQL function.
pub unsafe fn pqsignal(signal: i32, handler: pg_sys::pqsigfunc) {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::pqsignal(signal, handler);
    }
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::pqsignal_be(signal, handler);
    }
}

/// Whether `ExecuteTruncateGuts` runs triggers as the calling user instead of as each table's owner.
pub const TRUNCATES_AS_CALLER: bool = cfg!(feature = "pg15");

/// The call of a table access method's `tuple_update` and of `ExecInsertIndexTuples` after it, as
/// `ExecSimpleRelationUpdate` makes them (src/backend/executor/execReplication.c): 16 tells which indexes need an entry.
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
    // SAFETY: as the caller says.
    unsafe {
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
}

unsafe extern "C-unwind" {
    // src/include/executor/executor.h.
    #[cfg(feature = "pg15")]
    fn ExecInsertIndexTuples(
        target: *mut pg_sys::ResultRelInfo,
        slot: *mut pg_sys::TupleTableSlot,
        estate: *mut pg_sys::EState,
        update: bool,
        no_dup_error: bool,
        spec_conflict: *mut bool,
        arbiters: *mut pg_sys::List,
    ) -> *mut pg_sys::List;
    #[cfg(not(feature = "pg15"))]
    fn ExecInsertIndexTuples(
        target: *mut pg_sys::ResultRelInfo,
        slot: *mut pg_sys::TupleTableSlot,
        estate: *mut pg_sys::EState,
        update: bool,
        no_dup_error: bool,
        spec_conflict: *mut bool,
        arbiters: *mut pg_sys::List,
        only_summarizing: bool,
    ) -> *mut pg_sys::List;
}

/// `ExecInsertIndexTuples`, for a table whose unique indexes are all immediate: 16 added indexes that only summarize.
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
    // SAFETY: as the caller says.
    unsafe {
        if (*target).ri_NumIndices == 0 {
            return;
        }
        #[cfg(feature = "pg15")]
        {
            let _ = summarizing;
            ExecInsertIndexTuples(
                target,
                slot,
                estate,
                update,
                false,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            );
        }
        #[cfg(not(feature = "pg15"))]
        ExecInsertIndexTuples(
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
}

/// `RelationGetPrimaryKeyIndex`: 18 asks whether a deferrable one will do.
///
/// # Safety
/// As the PostgreSQL function.
pub unsafe fn primary_key_index(relation: pg_sys::Relation) -> pg_sys::Oid {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::RelationGetPrimaryKeyIndex(relation)
    }
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::RelationGetPrimaryKeyIndex(relation, false)
    }
}

/// `CreateWaitEventSet`, for the life of the process: 17 wants a resource owner instead of a memory context.
///
/// # Safety
/// As the PostgreSQL function.
pub(crate) unsafe fn create_wait_event_set(events: i32) -> *mut pg_sys::WaitEventSet {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::CreateWaitEventSet(pg_sys::TopMemoryContext, events)
    }
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::CreateWaitEventSet(std::ptr::null_mut(), events)
    }
}

/// `ReplicationSlotAcquire`, without waiting: 18 asks what to do about an invalidated one, which is an error here as it was before.
///
/// # Safety
/// As the PostgreSQL function.
pub unsafe fn acquire_slot(name: &std::ffi::CStr) {
    #[cfg(not(feature = "pg18"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ReplicationSlotAcquire(name.as_ptr(), true);
    }
    #[cfg(feature = "pg18")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ReplicationSlotAcquire(name.as_ptr(), true, true);
    }
}
