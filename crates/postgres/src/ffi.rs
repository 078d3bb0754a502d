//! Exported functions of PostgreSQL that the bindings lack. Each is called through `pg_guard_ffi_boundary`, as the bindings'
//! own functions are, so that an error raised in it unwinds as a panic; signal handlers are only passed on by address.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};

use pgrx::pg_sys;

/// src/backend/executor/execPartition.c; opaque.
#[repr(C)]
#[derive(Debug)]
pub struct PartitionTupleRouting {
    _private: [u8; 0],
}

unsafe extern "C-unwind" {
    /// Whether the postmaster still runs (src/backend/storage/ipc/pmsignal.c, 15 to 18).
    pub fn PostmasterIsAliveInternal() -> bool;

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
pub unsafe fn exec_setup_partition_tuple_routing(
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
pub unsafe fn exec_find_partition(
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
pub unsafe fn exec_cleanup_tuple_routing(
    state: *mut pg_sys::ModifyTableState,
    routing: *mut PartitionTupleRouting,
) {
    // SAFETY: as above.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| cleanup_tuple_routing_unguarded(state, routing));
    }
}

unsafe extern "C-unwind" {
    // src/include/executor/nodeModifyTable.h, 15 to 18.
    #[link_name = "ExecComputeStoredGenerated"]
    fn compute_stored_generated_unguarded(
        target: *mut pg_sys::ResultRelInfo,
        estate: *mut pg_sys::EState,
        slot: *mut pg_sys::TupleTableSlot,
        command: pg_sys::CmdType::Type,
    );
}

/// Compute the stored generated columns of the row in a slot.
///
/// # Safety
/// As the PostgreSQL function: the table has such columns.
pub unsafe fn compute_stored_generated(
    target: *mut pg_sys::ResultRelInfo,
    estate: *mut pg_sys::EState,
    slot: *mut pg_sys::TupleTableSlot,
    command: pg_sys::CmdType::Type,
) {
    // SAFETY: the signature is that of the header; nothing with a destructor is on the closure's stack.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            compute_stored_generated_unguarded(target, estate, slot, command);
        });
    }
}

/// OIDs of a table and all tables below it, each locked.
///
/// # Safety
/// In a transaction; the list is allocated in the current memory context.
pub unsafe fn find_all_inheritors(parent: pg_sys::Oid, lock_mode: c_int) -> *mut pg_sys::List {
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
pub unsafe fn get_partition_ancestors(relid: pg_sys::Oid) -> *mut pg_sys::List {
    // SAFETY: the signature is that of the header; nothing with a destructor is on the stack of the closure.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| get_partition_ancestors_unguarded(relid)) }
}

unsafe extern "C-unwind" {
    /// src/include/utils/multirangetypes.h, 15 to 18.
    #[link_name = "multirange_deserialize"]
    fn multirange_deserialize_unguarded(
        range_type: *mut pg_sys::TypeCacheEntry,
        multirange: *const pg_sys::varlena,
        count: *mut i32,
        ranges: *mut *mut *mut pg_sys::RangeType,
    );
}

/// Takes a multirange apart: its ranges, and their number.
///
/// # Safety
/// `range_type` is the type cache's entry of the range type, with what it has of ranges; the
/// multirange is one of that, and not compressed or stored out of line. The ranges are allocated in
/// the current memory context.
pub unsafe fn multirange_deserialize(
    range_type: *mut pg_sys::TypeCacheEntry,
    multirange: *const pg_sys::varlena,
) -> (*mut *mut pg_sys::RangeType, usize) {
    let (mut count, mut ranges) = (0, std::ptr::null_mut());
    let (to_count, to_ranges) = (&raw mut count, &raw mut ranges);
    // SAFETY: the signature is that of the header; nothing with a destructor is on the stack of
    // the closure.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            multirange_deserialize_unguarded(range_type, multirange, to_count, to_ranges);
        });
    }
    (ranges, usize::try_from(count).unwrap_or(0))
}

unsafe extern "C-unwind" {
    // src/include/utils/timeout.h, 15 to 18.
    #[link_name = "RegisterTimeout"]
    fn register_timeout_unguarded(id: c_int, handler: unsafe extern "C-unwind" fn()) -> c_int;
    #[link_name = "enable_timeout_every"]
    fn enable_timeout_every_unguarded(id: c_int, first: pg_sys::TimestampTz, milliseconds: c_int);
    #[link_name = "disable_timeout"]
    fn disable_timeout_unguarded(id: c_int, keep_indicator: bool);
}

/// At least `USER_TIMEOUT` of src/include/utils/timeout.h in every version: registering it gives a number of one's own.
const ANY_USER_TIMEOUT: c_int = 20;

/// Whether two values are the same, byte for byte but for how they are stored.
///
/// # Safety
/// Both are of the type that has this length and is passed so.
pub unsafe fn datum_image_eq(
    one: pg_sys::Datum,
    other: pg_sys::Datum,
    by_value: bool,
    length: i16,
) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            raw::datum_image_eq(one, other, by_value, c_int::from(length))
        })
    }
}

/// A timer of this process, whose end calls `handler` in the signal handler of its alarm.
///
/// # Safety
/// The handler does only what a signal handler may, and is never unloaded.
pub unsafe fn register_timeout(handler: unsafe extern "C-unwind" fn()) -> c_int {
    // SAFETY: as the caller says; raises an error when all numbers are taken.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| register_timeout_unguarded(ANY_USER_TIMEOUT, handler))
    }
}

/// Have a timer end in so many milliseconds, and again after each `next` milliseconds from then on.
///
/// # Safety
/// The timer was registered by this process.
pub unsafe fn enable_timeout(timer: c_int, first: c_int, next: c_int) {
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            let first = pg_sys::GetCurrentTimestamp() + i64::from(first) * 1000;
            enable_timeout_every_unguarded(timer, first, next);
        });
    }
}

/// Stop a timer, if it has not ended.
///
/// # Safety
/// The timer was registered by this process.
pub unsafe fn disable_timeout(timer: c_int) {
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| disable_timeout_unguarded(timer, false));
    }
}

/// BTScanInsertData of src/include/access/nbtree.h, 15 to 18.
#[repr(C)]
pub(crate) struct ScanInsert {
    pub(crate) has_heap_key_space: bool,
    pub(crate) all_equal_image: bool,
    flags: [bool; 3],
    tie_breaker: pg_sys::ItemPointer,
    pub(crate) keys: i32,
    /// As many as an index may have.
    pub(crate) scan_keys: [pg_sys::ScanKeyData; 0],
}

/// PostgreSQL's functions without the guard that the bindings put around each: for several calls in a row under one guard
/// (`pg_sys::ffi::pg_guard_ffi_boundary`), where a guard for each would cost as much as the calls. An error leaves such a
/// closure by a long jump, so nothing with a destructor may live on its stack.
pub mod raw {
    use std::ffi::{c_char, c_int, c_void};

    use pgrx::pg_sys;

    use super::ScanInsert;
    use crate::compat::FileLocator;

    unsafe extern "C-unwind" {
        // src/include/access/genam.h, 15 to 18.
        /// Starts a scan anew with these keys, and frees what it holds of the last row.
        pub fn index_rescan(
            scan: pg_sys::IndexScanDesc,
            keys: pg_sys::ScanKey,
            nkeys: c_int,
            orderbys: pg_sys::ScanKey,
            norderbys: c_int,
        );
        /// The next entry's row, null at the end. The tuple id lives in the scan, until the next call.
        pub fn index_getnext_tid(
            scan: pg_sys::IndexScanDesc,
            direction: pg_sys::ScanDirection::Type,
        ) -> pg_sys::ItemPointer;
        /// Puts the version of the current row that the scan's snapshot sees into the slot; false if none.
        pub fn index_fetch_heap(
            scan: pg_sys::IndexScanDesc,
            slot: *mut pg_sys::TupleTableSlot,
        ) -> bool;
        // src/include/storage/bufmgr.h, access/heapam.h; src/include/executor/tuptable.h; src/include/utils/datum.h.
        /// Length of the fork, in blocks.
        pub fn RelationGetNumberOfBlocksInFork(
            relation: pg_sys::Relation,
            fork: pg_sys::ForkNumber::Type,
        ) -> pg_sys::BlockNumber;
        /// Reads a block of the main fork and pins its buffer.
        pub fn ReadBuffer(relation: pg_sys::Relation, block: pg_sys::BlockNumber)
        -> pg_sys::Buffer;
        /// Releases one pin of the buffer.
        pub fn ReleaseBuffer(buffer: pg_sys::Buffer);
        /// Pins the block's buffer and releases the given one, which may be invalid or hold that block.
        pub fn ReleaseAndReadBuffer(
            buffer: pg_sys::Buffer,
            relation: pg_sys::Relation,
            block: pg_sys::BlockNumber,
        ) -> pg_sys::Buffer;
        /// Pins this buffer if it still holds the block; false, and no pin, if not.
        pub fn ReadRecentBuffer(
            file: FileLocator,
            fork: pg_sys::ForkNumber::Type,
            block: pg_sys::BlockNumber,
            recent: pg_sys::Buffer,
        ) -> bool;
        pub(crate) fn BufferGetBlockNumber(buffer: pg_sys::Buffer) -> pg_sys::BlockNumber;
        pub(crate) fn LockBuffer(buffer: pg_sys::Buffer, mode: c_int);
        pub(crate) fn UnlockReleaseBuffer(buffer: pg_sys::Buffer);
        // src/include/access/nbtree.h, 15 to 18.
        pub(crate) fn _bt_mkscankey(
            index: pg_sys::Relation,
            tuple: pg_sys::IndexTuple,
        ) -> *mut ScanInsert;
        pub(crate) fn _bt_metaversion(
            index: pg_sys::Relation,
            has_heap_key_space: *mut bool,
            all_equal_image: *mut bool,
        );
        pub(crate) fn _bt_compare(
            index: pg_sys::Relation,
            key: *mut ScanInsert,
            page: pg_sys::Page,
            item: pg_sys::OffsetNumber,
        ) -> i32;
        pub(crate) fn _bt_get_endpoint(
            index: pg_sys::Relation,
            level: u32,
            rightmost: bool,
            snapshot: pg_sys::Snapshot,
        ) -> pg_sys::Buffer;
        /// Prunes the page if it is worth while and its cleanup lock is free. The caller has a pin, no lock.
        pub fn heap_page_prune_opt(relation: pg_sys::Relation, buffer: pg_sys::Buffer);
        pub(crate) fn HeapTupleSatisfiesVisibility(
            tuple: pg_sys::HeapTuple,
            snapshot: pg_sys::Snapshot,
            buffer: pg_sys::Buffer,
        ) -> bool;
        pub(crate) fn ExecStorePinnedBufferHeapTuple(
            tuple: pg_sys::HeapTuple,
            slot: *mut pg_sys::TupleTableSlot,
            buffer: pg_sys::Buffer,
        ) -> *mut pg_sys::TupleTableSlot;
        /// Takes the first columns of the slot's row apart, as many as given.
        pub fn slot_getsomeattrs_int(slot: *mut pg_sys::TupleTableSlot, attnum: c_int);
        /// Whether two values of a type are the same bytes, after decompression. Neither is null.
        pub fn datum_image_eq(
            one: pg_sys::Datum,
            other: pg_sys::Datum,
            by_value: bool,
            length: c_int,
        ) -> bool;
        // src/include/executor/executor.h.
        /// Raises an error if the slot's row breaks a NOT NULL or CHECK constraint of the table.
        pub fn ExecConstraints(
            target: *mut pg_sys::ResultRelInfo,
            slot: *mut pg_sys::TupleTableSlot,
            estate: *mut pg_sys::EState,
        );
        // src/include/access/xact.h.
        /// Id of the current command, which counts as used if so told.
        pub fn GetCurrentCommandId(used: bool) -> pg_sys::CommandId;
        /// Makes the changes of the current command visible to the next.
        pub fn CommandCounterIncrement();
        // src/include/utils/memutils.h.
        /// Frees all that is in the context, and deletes its children.
        pub fn MemoryContextReset(context: pg_sys::MemoryContext);
        // src/include/utils/rel.h, relcache.h; src/include/storage/lmgr.h.
        /// Keeps the relation open once more, without a lock.
        pub fn RelationIncrementReferenceCount(relation: pg_sys::Relation);
        /// Gives up one reference to the relation.
        pub fn RelationDecrementReferenceCount(relation: pg_sys::Relation);
        /// Locks the relation until the end of the transaction; waits, and serves invalidations.
        pub fn LockRelationOid(relation: pg_sys::Oid, mode: pg_sys::LOCKMODE);
        // src/include/storage/buf_internals.h, 15 to 18.
        pub(crate) fn BufTableHashCode(tag: *mut pg_sys::BufferTag) -> u32;
        pub(crate) fn BufTableLookup(tag: *mut pg_sys::BufferTag, hash: u32) -> c_int;
        // src/include/storage/lwlock.h, 15 to 18.
        pub(crate) fn LWLockAcquire(
            lock: *mut pg_sys::LWLock,
            mode: pg_sys::LWLockMode::Type,
        ) -> bool;
        pub(crate) fn LWLockRelease(lock: *mut pg_sys::LWLock);
        pub(crate) fn ForEachLWLockHeldByMe(
            callback: Option<
                unsafe extern "C-unwind" fn(
                    *mut pg_sys::LWLock,
                    pg_sys::LWLockMode::Type,
                    *mut c_void,
                ),
            >,
            context: *mut c_void,
        );
        // src/include/utils/elog.h, 15 to 18.
        pub(crate) fn CopyErrorData() -> *mut pg_sys::ErrorData;
        pub(crate) fn FreeErrorData(error: *mut pg_sys::ErrorData);
        pub(crate) fn EmitErrorReport();
        pub(crate) fn FlushErrorState();
        pub(crate) fn errstart(level: c_int, domain: *const c_char) -> bool;
        pub(crate) fn errcode(sqlstate: c_int) -> c_int;
        pub(crate) fn errmsg_internal(format: *const c_char, ...) -> c_int;
        pub(crate) fn errdetail_internal(format: *const c_char, ...) -> c_int;
        pub(crate) fn errdetail_log(format: *const c_char, ...) -> c_int;
        pub(crate) fn errhint(format: *const c_char, ...) -> c_int;
        pub(crate) fn errcontext_msg(format: *const c_char, ...) -> c_int;
        pub(crate) fn set_errcontext_domain(domain: *const c_char) -> c_int;
        pub(crate) fn err_generic_string(field: c_int, text: *const c_char) -> c_int;
        pub(crate) fn errposition(position: c_int) -> c_int;
        pub(crate) fn internalerrposition(position: c_int) -> c_int;
        pub(crate) fn internalerrquery(query: *const c_char) -> c_int;
        // src/include/tcop/utility.h, 15 to 18.
        /// Runs a utility statement as PostgreSQL does without hooks.
        pub fn standard_ProcessUtility(
            statement: *mut pg_sys::PlannedStmt,
            text: *const c_char,
            read_only_tree: bool,
            context: pg_sys::ProcessUtilityContext::Type,
            parameters: pg_sys::ParamListInfo,
            environment: *mut pg_sys::QueryEnvironment,
            receiver: *mut pg_sys::DestReceiver,
            completion: *mut pg_sys::QueryCompletion,
        );
    }
}

/// How a backend talks to its client: `PQcommMethods` of src/include/libpq/libpq.h, 15 to 18.
#[repr(C)]
#[derive(Clone, Copy)]
struct PqCommMethods {
    comm_reset: unsafe extern "C-unwind" fn(),
    flush: Flush,
    flush_if_writable: Flush,
    is_send_pending: IsSendPending,
    putmessage: PutMessage,
    putmessage_noblock: PutMessageNoblock,
}

/// Sends what there is, or what can be sent without waiting; EOF when the client is gone.
pub type Flush = unsafe extern "C-unwind" fn() -> c_int;
/// Whether something is still to be sent.
pub type IsSendPending = unsafe extern "C-unwind" fn() -> bool;
/// Sends a protocol message: its kind, its body and the body's length. EOF when the client is gone.
pub type PutMessage = unsafe extern "C-unwind" fn(c_char, *const c_char, usize) -> c_int;
/// Puts a protocol message into the send buffer: its kind, its body and the body's length.
pub type PutMessageNoblock = unsafe extern "C-unwind" fn(c_char, *const c_char, usize);

/// What stands in the place of PostgreSQL's functions.
#[derive(Clone, Copy)]
pub struct Methods {
    /// Waits until all is sent.
    pub flush: Flush,
    /// Sends what can be sent without waiting.
    pub flush_if_writable: Flush,
    /// Tells whether something is left to send.
    pub is_send_pending: IsSendPending,
    /// Sends a message.
    pub put_message: PutMessage,
    /// Puts a message into the send buffer, which grows.
    pub put_message_noblock: PutMessageNoblock,
}

unsafe extern "C" {
    #[link_name = "PqCommMethods"]
    static mut PQ_COMM_METHODS: *const PqCommMethods;
}

/// The table that was there, while ours is in its place.
static ORIGINAL_METHODS: AtomicPtr<PqCommMethods> = AtomicPtr::new(std::ptr::null_mut());
/// That table is PostgreSQL's own, and not one of another extension.
static ORIGINAL_IS_POSTGRES: AtomicBool = AtomicBool::new(false);

/// Ours.
static OUR_METHODS: OnceLock<PqCommMethods> = OnceLock::new();

/// Put functions in the place of PostgreSQL's; always the same ones.
///
/// # Safety
/// This process has a client. The functions do what those of PostgreSQL do, sooner or later, and are never unloaded.
pub unsafe fn replace_methods(methods: Methods) {
    if !ORIGINAL_METHODS.load(Relaxed).is_null() {
        return;
    }
    // SAFETY: a table is set before a process serves its client and is never freed; a backend has one thread.
    unsafe {
        let original = PQ_COMM_METHODS;
        let ours = OUR_METHODS.get_or_init(|| PqCommMethods {
            flush: methods.flush,
            flush_if_writable: methods.flush_if_writable,
            is_send_pending: methods.is_send_pending,
            putmessage: methods.put_message,
            putmessage_noblock: methods.put_message_noblock,
            ..*original
        });
        let is_postgres = same_object(
            (*original).putmessage_noblock as *const c_void,
            secure_write_unguarded as *const c_void,
        );
        ORIGINAL_IS_POSTGRES.store(is_postgres, Relaxed);
        ORIGINAL_METHODS.store(original.cast_mut(), Relaxed);
        PQ_COMM_METHODS = ours;
    }
}

/// Put PostgreSQL's functions back.
pub fn restore_methods() {
    let original = ORIGINAL_METHODS.swap(std::ptr::null_mut(), Relaxed);
    if !original.is_null() {
        // SAFETY: it is the table that was there.
        unsafe { PQ_COMM_METHODS = original };
    }
}

/// Whether functions stand in the place of PostgreSQL's own, and not of another extension's.
pub fn has_replaced_postgres_methods() -> bool {
    !ORIGINAL_METHODS.load(Relaxed).is_null() && ORIGINAL_IS_POSTGRES.load(Relaxed)
}

/// Whether both addresses are of the same executable or library.
fn same_object(one: *const c_void, other: *const c_void) -> bool {
    let base = |address| {
        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: it only looks the address up, and fills in the structure if it finds it.
        let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
        // SAFETY: zeros are a value of it, as its fields are pointers.
        let base = unsafe { info.assume_init() }.dli_fbase;
        (found != 0).then_some(base)
    };
    base(one).is_some_and(|found| base(other) == Some(found))
}

/// The table of PostgreSQL's own functions.
unsafe fn original_methods() -> *const PqCommMethods {
    let original = ORIGINAL_METHODS.load(Relaxed);
    if original.is_null() {
        // SAFETY: a table is set before a process serves its client.
        unsafe { PQ_COMM_METHODS }
    } else {
        original
    }
}

/// PostgreSQL's own `pq_flush`, for the function that stands in its place.
///
/// # Safety
/// Called by PostgreSQL: an error leaves by a long jump.
pub unsafe fn original_flush() -> c_int {
    // SAFETY: as the caller says.
    unsafe { ((*original_methods()).flush)() }
}

/// PostgreSQL's own `pq_putmessage`, for the function that stands in its place.
///
/// # Safety
/// Called by PostgreSQL: an error leaves by a long jump.
pub unsafe fn original_putmessage(kind: c_char, body: *const c_char, length: usize) -> c_int {
    // SAFETY: as the caller says.
    unsafe { ((*original_methods()).putmessage)(kind, body, length) }
}

/// PostgreSQL's own `pq_flush_if_writable`, for the function that stands in its place.
///
/// # Safety
/// Called by PostgreSQL: an error leaves by a long jump.
pub unsafe fn original_flush_if_writable() -> c_int {
    // SAFETY: as the caller says.
    unsafe { ((*original_methods()).flush_if_writable)() }
}

/// PostgreSQL's own `pq_is_send_pending`, for the function that stands in its place.
///
/// # Safety
/// Called by PostgreSQL.
pub unsafe fn original_is_send_pending() -> bool {
    // SAFETY: as the caller says.
    unsafe { ((*original_methods()).is_send_pending)() }
}

/// PostgreSQL's own `pq_putmessage_noblock`, for the function that stands in its place.
///
/// # Safety
/// Called by PostgreSQL: an error leaves by a long jump.
pub unsafe fn original_putmessage_noblock(kind: c_char, body: *const c_char, length: usize) {
    // SAFETY: as the caller says.
    unsafe { ((*original_methods()).putmessage_noblock)(kind, body, length) }
}

/// `pq_flush_if_writable`. False if the client is gone, which the next who writes finds out too.
///
/// # Safety
/// This process has a client.
pub unsafe fn pq_flush_if_writable() -> bool {
    // SAFETY: as the caller says. Nothing with a destructor is on the closure's stack.
    unsafe {
        let flush = (*original_methods()).flush_if_writable;
        pg_sys::ffi::pg_guard_ffi_boundary(|| flush()) == 0
    }
}

/// The first members of `Port` of src/include/libpq/libpq-be.h, 15 to 18.
#[repr(C)]
struct PortHead {
    sock: c_int,
    noblock: bool,
}

unsafe extern "C-unwind" {
    // src/include/libpq/libpq.h, 15 to 18. (The bytes are only read, whatever the older declarations say.)
    #[link_name = "secure_write"]
    fn secure_write_unguarded(
        port: *mut pg_sys::Port,
        bytes: *const c_void,
        length: usize,
    ) -> isize;
}

/// What came of writing to the client.
#[derive(Debug, Clone, Copy)]
pub enum Written {
    /// So many bytes were taken.
    Bytes(usize),
    /// None were, for now. The same bytes have to be written again, perhaps with more behind them.
    Later,
    /// The client is gone; the system's number for how.
    Lost(i32),
}

/// Write bytes to the client past the send buffer, without waiting: `secure_write`, which may encrypt them.
///
/// # Safety
/// This process has a client, and nothing is in the send buffer.
pub unsafe fn write_to_client(bytes: &[u8]) -> Written {
    // SAFETY: as the caller says. Nothing with a destructor is on the closure's stack.
    unsafe {
        let port = pg_sys::MyProcPort;
        loop {
            // As `socket_set_nonblocking` of src/backend/libpq/pqcomm.c does; who wants to wait sets it back.
            (*port.cast::<PortHead>()).noblock = true;
            let (written, code) = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let written = secure_write_unguarded(port, bytes.as_ptr().cast(), bytes.len());
                let error = std::io::Error::last_os_error();
                (written, error.raw_os_error().unwrap_or_default())
            });
            match usize::try_from(written) {
                Ok(count) if count > 0 => return Written::Bytes(count),
                _ if code == libc::EINTR => {}
                _ if code == libc::EAGAIN || code == libc::EWOULDBLOCK => return Written::Later,
                _ => return Written::Lost(code),
            }
        }
    }
}

/// `pq_putmessage_noblock`: puts a protocol message into the connection's send buffer, which grows as it must.
///
/// # Safety
/// This process has a client.
pub unsafe fn pq_putmessage_noblock(kind: u8, body: &[u8]) {
    // SAFETY: as the caller says; the bytes are copied. Nothing with a destructor is on the closure's stack.
    unsafe {
        let put = (*original_methods()).putmessage_noblock;
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            put(kind.cast_signed(), body.as_ptr().cast(), body.len());
        });
    }
}

// Of src/include/access/xlogutils.h, 15 to 18: handed on to PostgreSQL by address.
unsafe extern "C-unwind" {
    /// Reads a page of local WAL for a reader, and waits until the record's end is written.
    pub fn read_local_xlog_page(
        reader: *mut pg_sys::XLogReaderState,
        page: pg_sys::XLogRecPtr,
        length: c_int,
        record: pg_sys::XLogRecPtr,
        buffer: *mut c_char,
    ) -> c_int;
    /// Opens the file of a WAL segment for a reader; raises an error if the file is gone.
    pub fn wal_segment_open(
        reader: *mut pg_sys::XLogReaderState,
        segment: pg_sys::XLogSegNo,
        timeline: *mut pg_sys::TimeLineID,
    );
    /// Closes the segment's file that a reader has open.
    pub fn wal_segment_close(reader: *mut pg_sys::XLogReaderState);
}

unsafe extern "C-unwind" {
    /// src/include/replication/decode.h, 15 to 18.
    #[link_name = "LogicalDecodingProcessRecord"]
    fn logical_decoding_process_record_unguarded(
        context: *mut pg_sys::LogicalDecodingContext,
        reader: *mut pg_sys::XLogReaderState,
    );
}

/// Decode the record that was read.
///
/// # Safety
/// As the PostgreSQL function.
pub unsafe fn logical_decoding_process_record(
    context: *mut pg_sys::LogicalDecodingContext,
    reader: *mut pg_sys::XLogReaderState,
) {
    // SAFETY: the signature is that of the header; nothing with a destructor is on the stack of the closure.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            logical_decoding_process_record_unguarded(context, reader);
        });
    }
}

unsafe extern "C-unwind" {
    // src/include/access/twophase.h, 15 to 18.
    #[link_name = "LookupGXact"]
    fn lookup_gxact_unguarded(
        gid: *const c_char,
        prepare_end_lsn: pg_sys::XLogRecPtr,
        origin_prepare_timestamp: pg_sys::TimestampTz,
    ) -> bool;
    #[link_name = "FinishPreparedTransaction"]
    fn finish_prepared_transaction_unguarded(gid: *const c_char, is_commit: bool);
}

/// Whether a transaction is prepared here under this name, at this position and time of its origin.
///
/// # Safety
/// In a transaction.
pub unsafe fn lookup_gxact(gid: &std::ffi::CStr, prepare_end_lsn: u64, timestamp: i64) -> bool {
    // SAFETY: as above.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            lookup_gxact_unguarded(gid.as_ptr(), prepare_end_lsn, timestamp)
        })
    }
}

/// COMMIT PREPARED or ROLLBACK PREPARED.
///
/// # Safety
/// In a transaction that has done nothing else.
pub unsafe fn finish_prepared_transaction(gid: &std::ffi::CStr, is_commit: bool) {
    // SAFETY: as above.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            finish_prepared_transaction_unguarded(gid.as_ptr(), is_commit);
        });
    }
}
