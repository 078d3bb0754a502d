//! Exported functions of PostgreSQL that the bindings lack. Each is called through
//! `pg_guard_ffi_boundary`, as the bindings' own functions are, so that an error raised in it
//! unwinds as a panic; signal handlers are only passed on by address.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};

use pgrx::pg_sys;

use crate::plain;

/// src/backend/executor/execPartition.c; opaque.
#[repr(C)]
#[derive(Debug)]
pub struct PartitionTupleRouting {
    _private: [u8; 0],
}

unsafe extern "C-unwind" {
    /// Whether the postmaster still runs (src/backend/storage/ipc/pmsignal.c, 15 to 18). Raises no
    /// error, and has no condition.
    pub safe fn PostmasterIsAliveInternal() -> bool;
}

/// Declares functions that the bindings lack, by their signatures in PostgreSQL's headers, behind
/// the bindings' guard.
macro_rules! guarded {
    ($($(#[doc = $doc:literal])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $returned:ty)? = $symbol:literal;)*) => {$(
        $(#[doc = $doc])*
        ///
        /// # Safety
        /// As the PostgreSQL function: pointers are valid, and belong together.
        pub unsafe fn $name($($argument: $type),*) $(-> $returned)? {
            unsafe extern "C-unwind" {
                #[link_name = $symbol]
                fn unguarded($($argument: $type),*) $(-> $returned)?;
            }
            // SAFETY: as the caller says; the signature is the header's. Arguments are plain, so
            // nothing with a destructor is on the closure's stack.
            unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| unguarded($($argument),*)) }
        }
    )*};
}

guarded! {
    /// Prepares to route rows of a partitioned table (src/include/executor/execPartition.h, 15 to
    /// 18).
    fn exec_setup_partition_tuple_routing(
        estate: *mut pg_sys::EState,
        relation: pg_sys::Relation,
    ) -> *mut PartitionTupleRouting = "ExecSetupPartitionTupleRouting";

    /// The partition that a row belongs to (src/include/executor/execPartition.h, 15 to 18).
    fn exec_find_partition(
        state: *mut pg_sys::ModifyTableState,
        root: *mut pg_sys::ResultRelInfo,
        routing: *mut PartitionTupleRouting,
        slot: *mut pg_sys::TupleTableSlot,
        estate: *mut pg_sys::EState,
    ) -> *mut pg_sys::ResultRelInfo = "ExecFindPartition";

    /// Closes the tables that routing has opened (src/include/executor/execPartition.h, 15 to 18).
    fn exec_cleanup_tuple_routing(
        state: *mut pg_sys::ModifyTableState,
        routing: *mut PartitionTupleRouting,
    ) = "ExecCleanupTupleRouting";

    /// Computes the stored generated columns of the row in a slot, of a table that has such columns
    /// (src/include/executor/nodeModifyTable.h, 15 to 18).
    fn compute_stored_generated(
        target: *mut pg_sys::ResultRelInfo,
        estate: *mut pg_sys::EState,
        slot: *mut pg_sys::TupleTableSlot,
        command: pg_sys::CmdType::Type,
    ) = "ExecComputeStoredGenerated";

    /// OIDs of a table and all tables below it, each locked, in the current memory context
    /// (src/include/catalog/pg_inherits.h, 15 to 18). In a transaction; `parents` may be null.
    fn find_all_inheritors(
        parent: pg_sys::Oid,
        lock_mode: c_int,
        parents: *mut *mut pg_sys::List,
    ) -> *mut pg_sys::List = "find_all_inheritors";

    /// OIDs of a partition's ancestors, its parent first, in the current memory context
    /// (src/backend/catalog/partition.c, 15 to 18). In a transaction, with a snapshot for catalogs.
    fn get_partition_ancestors(relid: pg_sys::Oid) -> *mut pg_sys::List = "get_partition_ancestors";

    /// Takes a multirange apart, into the current memory context
    /// (src/include/utils/multirangetypes.h, 15 to 18). The range type is the type cache's entry,
    /// with its fields about ranges. The multirange is not compressed or stored out of line.
    fn multirange_deserialize(
        range_type: *mut pg_sys::TypeCacheEntry,
        multirange: *const pg_sys::varlena,
        count: *mut i32,
        ranges: *mut *mut *mut pg_sys::RangeType,
    ) = "multirange_deserialize";

    /// A timer of this process, whose end calls `handler` in the signal handler of its alarm
    /// (src/include/utils/timeout.h, 15 to 18). The handler does only what a signal handler may,
    /// and is never unloaded. Raises an error if all numbers are taken.
    fn register_timeout(id: c_int, handler: unsafe extern "C-unwind" fn()) -> c_int = "RegisterTimeout";

    /// Has a timer of this process end at a time, and again after so many milliseconds each
    /// (src/include/utils/timeout.h, 15 to 18).
    fn enable_timeout_every(
        timer: c_int,
        first: pg_sys::TimestampTz,
        milliseconds: c_int,
    ) = "enable_timeout_every";

    /// Stops a timer of this process, if it has not ended (src/include/utils/timeout.h, 15 to 18).
    fn disable_timeout(timer: c_int, keep_indicator: bool) = "disable_timeout";

    /// Decodes the record that was read (src/include/replication/decode.h, 15 to 18).
    fn logical_decoding_process_record(
        context: *mut pg_sys::LogicalDecodingContext,
        reader: *mut pg_sys::XLogReaderState,
    ) = "LogicalDecodingProcessRecord";

    /// Whether a transaction is prepared on this server under this name, at this position and time
    /// of its origin (src/include/access/twophase.h, 15 to 18). In a transaction.
    fn lookup_gxact(
        gid: *const c_char,
        prepare_end_lsn: pg_sys::XLogRecPtr,
        origin_prepare_timestamp: pg_sys::TimestampTz,
    ) -> bool = "LookupGXact";

    /// COMMIT PREPARED or ROLLBACK PREPARED, in a transaction that has done nothing else
    /// (src/include/access/twophase.h, 15 to 18).
    fn finish_prepared_transaction(gid: *const c_char, is_commit: bool) = "FinishPreparedTransaction";

    /// Whether two values are the same, byte for byte but for how they are stored
    /// (src/include/utils/datum.h, 15 to 18). Both are of the type that has this length and is
    /// passed so.
    fn datum_image_eq(
        one: pg_sys::Datum,
        other: pg_sys::Datum,
        by_value: bool,
        length: c_int,
    ) -> bool = "datum_image_eq";
}

/// At least `USER_TIMEOUT` of src/include/utils/timeout.h in every version: registering it gives a
/// number of one's own.
pub const ANY_USER_TIMEOUT: c_int = 20;

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

/// For `layout::by_hand`.
pub(crate) const BY_HAND: &[(&str, usize)] = &[
    (
        "BTScanInsertData.heapkeyspace",
        offset_of!(ScanInsert, has_heap_key_space),
    ),
    (
        "BTScanInsertData.allequalimage",
        offset_of!(ScanInsert, all_equal_image),
    ),
    (
        "BTScanInsertData.anynullkeys",
        offset_of!(ScanInsert, flags),
    ),
    (
        "BTScanInsertData.scantid",
        offset_of!(ScanInsert, tie_breaker),
    ),
    ("BTScanInsertData.keysz", offset_of!(ScanInsert, keys)),
    (
        "BTScanInsertData.scankeys",
        offset_of!(ScanInsert, scan_keys),
    ),
    ("sizeof(ScanKeyData)", size_of::<pg_sys::ScanKeyData>()),
    (
        "PQcommMethods.comm_reset",
        offset_of!(PqCommMethods, comm_reset),
    ),
    ("PQcommMethods.flush", offset_of!(PqCommMethods, flush)),
    (
        "PQcommMethods.flush_if_writable",
        offset_of!(PqCommMethods, flush_if_writable),
    ),
    (
        "PQcommMethods.is_send_pending",
        offset_of!(PqCommMethods, is_send_pending),
    ),
    (
        "PQcommMethods.putmessage",
        offset_of!(PqCommMethods, putmessage),
    ),
    (
        "PQcommMethods.putmessage_noblock",
        offset_of!(PqCommMethods, putmessage_noblock),
    ),
    ("sizeof(PQcommMethods)", size_of::<PqCommMethods>()),
    ("Port.sock", offset_of!(PortHead, sock)),
    ("Port.noblock", offset_of!(PortHead, noblock)),
];

/// PostgreSQL's functions without the guard that the bindings put around each: for several calls in
/// a row under one guard (`pg_sys::ffi::pg_guard_ffi_boundary`), where a guard for each would cost
/// as much as the calls. An error leaves such a closure by a long jump, so nothing with a
/// destructor may live on its stack.
pub mod raw {
    use std::ffi::{c_char, c_int};

    use pgrx::pg_sys;

    use super::ScanInsert;
    use crate::compat::FileLocator;

    unsafe extern "C-unwind" {
        // src/include/access/genam.h, 15 to 18.
        /// Starts a scan anew with these keys, and frees its state of the last row.
        pub fn index_rescan(
            scan: pg_sys::IndexScanDesc,
            keys: pg_sys::ScanKey,
            nkeys: c_int,
            orderbys: pg_sys::ScanKey,
            norderbys: c_int,
        );
        /// The next entry's row, null at the end. The tuple id lives in the scan, until the next
        /// call.
        pub fn index_getnext_tid(
            scan: pg_sys::IndexScanDesc,
            direction: pg_sys::ScanDirection::Type,
        ) -> pg_sys::ItemPointer;
        /// Puts the version of the current row that the scan's snapshot sees into the slot; false
        /// if none.
        pub fn index_fetch_heap(
            scan: pg_sys::IndexScanDesc,
            slot: *mut pg_sys::TupleTableSlot,
        ) -> bool;
        // src/include/storage/bufmgr.h, access/heapam.h; src/include/executor/tuptable.h;
        // src/include/utils/datum.h.
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
        /// Pins the block's buffer and releases the given one, which may be invalid or hold that
        /// block.
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
        /// Id of the current command, which counts as used if `used` is true.
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
        /// Adds a hint to the error that is put together.
        pub fn errhint(format: *const c_char, ...) -> c_int;
        pub(crate) fn errcontext_msg(format: *const c_char, ...) -> c_int;
        pub(crate) fn set_errcontext_domain(domain: *const c_char) -> c_int;
        pub(crate) fn err_generic_string(field: c_int, text: *const c_char) -> c_int;
        pub(crate) fn errposition(position: c_int) -> c_int;
        pub(crate) fn internalerrposition(position: c_int) -> c_int;
        pub(crate) fn internalerrquery(query: *const c_char) -> c_int;
        /// SQLSTATE of the error that is put together.
        pub fn geterrcode() -> c_int;
        // src/include/executor/executor.h, 15 to 18.
        /// Begins a query as PostgreSQL does without hooks.
        pub fn standard_ExecutorStart(query: *mut pg_sys::QueryDesc, flags: c_int);
        // src/include/optimizer/planner.h, 15 to 18; 19 adds an argument.
        /// Plans a query as PostgreSQL does without hooks.
        #[cfg(not(feature = "pg19"))]
        pub fn standard_planner(
            query: *mut pg_sys::Query,
            text: *const c_char,
            options: c_int,
            parameters: pg_sys::ParamListInfo,
        ) -> *mut pg_sys::PlannedStmt;
        /// Plans a query as PostgreSQL does without hooks.
        #[cfg(feature = "pg19")]
        pub fn standard_planner(
            query: *mut pg_sys::Query,
            text: *const c_char,
            options: c_int,
            parameters: pg_sys::ParamListInfo,
            explain: *mut pg_sys::ExplainState,
        ) -> *mut pg_sys::PlannedStmt;
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

/// Sends all, or as much as can be sent without waiting; EOF when the client is gone.
pub type Flush = unsafe extern "C-unwind" fn() -> c_int;
/// Whether something is still to be sent.
pub type IsSendPending = unsafe extern "C-unwind" fn() -> bool;
/// Sends a protocol message: its kind, its body and the body's length. EOF when the client is gone.
pub type PutMessage = unsafe extern "C-unwind" fn(c_char, *const c_char, usize) -> c_int;
/// Puts a protocol message into the send buffer: its kind, its body and the body's length.
pub type PutMessageNoblock = unsafe extern "C-unwind" fn(c_char, *const c_char, usize);

/// Replacements for PostgreSQL's functions.
#[derive(Clone, Copy)]
pub struct Methods {
    /// Waits until all is sent.
    pub flush: Flush,
    /// Sends as much as can be sent without waiting.
    pub flush_if_writable: Flush,
    /// Returns whether something is left to send.
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

/// PostgreSQL's table of functions, while ours is in its place.
static ORIGINAL_METHODS: AtomicPtr<PqCommMethods> = AtomicPtr::new(std::ptr::null_mut());
/// Whether the replaced table is PostgreSQL's own, and not one of another extension.
static ORIGINAL_IS_POSTGRES: AtomicBool = AtomicBool::new(false);

/// Ours.
static OUR_METHODS: OnceLock<PqCommMethods> = OnceLock::new();

/// Put functions in the place of PostgreSQL's; always the same ones.
///
/// # Safety
/// This process has a client. The functions have the effects of PostgreSQL's, sooner or later, and
/// are never unloaded.
pub unsafe fn replace_methods(methods: Methods) {
    if !ORIGINAL_METHODS.load(Relaxed).is_null() {
        return;
    }
    // SAFETY: a table is set before a process serves its client and is never freed; a backend has
    // one thread.
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
        // SAFETY: it is the table that was replaced.
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
        // SAFETY: the function looks the address up, and fills in the structure if it finds it.
        // Zeros are a value of that, as its fields are pointers.
        let (found, info) = unsafe {
            let found = libc::dladdr(address, info.as_mut_ptr());
            (found, info.assume_init())
        };
        (found != 0).then_some(info.dli_fbase)
    };
    base(one).is_some_and(|found| base(other) == Some(found))
}

/// PostgreSQL's own functions.
fn original_methods() -> PqCommMethods {
    let original = ORIGINAL_METHODS.load(Relaxed);
    // SAFETY: PostgreSQL has set the variable at the beginning of the process, and frees no table.
    unsafe {
        *(if original.is_null() {
            PQ_COMM_METHODS
        } else {
            original.cast_const()
        })
    }
}

/// Declares PostgreSQL's own functions for the functions that stand in their places.
macro_rules! originals {
    ($($(#[doc = $doc:literal])* fn $name:ident = $member:ident($($argument:ident: $type:ty),*) $(-> $returned:ty)?;)*) => {$(
        $(#[doc = $doc])*
        ///
        /// # Safety
        /// Called by PostgreSQL in place of this one, with these arguments: an error leaves by a
        /// long jump.
        pub unsafe fn $name($($argument: $type),*) $(-> $returned)? {
            // SAFETY: as the caller says.
            unsafe { (original_methods().$member)($($argument),*) }
        }
    )*};
}

originals! {
    /// PostgreSQL's own `pq_flush`.
    fn original_flush = flush() -> c_int;
    /// PostgreSQL's own `pq_putmessage`.
    fn original_putmessage = putmessage(kind: c_char, body: *const c_char, length: usize) -> c_int;
    /// PostgreSQL's own `pq_flush_if_writable`.
    fn original_flush_if_writable = flush_if_writable() -> c_int;
    /// PostgreSQL's own `pq_putmessage_noblock`.
    fn original_putmessage_noblock = putmessage_noblock(kind: c_char, body: *const c_char, length: usize);
}

/// The client of this process: it has one from its beginning to its end, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client(());

impl Client {
    /// The client, if this process has one.
    #[must_use]
    pub fn of_process() -> Option<Self> {
        (!plain::MyProcPort().is_null()).then_some(Self(()))
    }

    /// `pq_is_send_pending`: whether something is in the send buffer.
    #[must_use]
    pub fn is_send_pending(self) -> bool {
        // SAFETY: there is a client; the function looks at the send buffer, and raises no error.
        unsafe { (original_methods().is_send_pending)() }
    }

    /// `pq_flush_if_writable`. Returns false if the client is gone; the next write finds that out
    /// too.
    #[must_use]
    pub fn flush_if_writable(self) -> bool {
        let flush = original_methods().flush_if_writable;
        // SAFETY: there is a client. Nothing with a destructor is on the closure's stack.
        unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| flush()) == 0 }
    }

    /// `pq_putmessage_noblock`: puts a protocol message into the connection's send buffer, which
    /// grows as it must.
    pub fn put_message_noblock(self, kind: u8, body: &[u8]) {
        let put = original_methods().putmessage_noblock;
        // SAFETY: there is a client; the bytes are copied. Nothing with a destructor is on the
        // closure's stack.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                put(kind.cast_signed(), body.as_ptr().cast(), body.len());
            });
        }
    }

    /// Write bytes to the client past the send buffer, without waiting: `secure_write`, which may
    /// encrypt them. Nothing is in the send buffer, or it comes later.
    #[must_use]
    pub fn write(self, bytes: &[u8]) -> Written {
        // SAFETY: there is a client. Nothing with a destructor is on the closure's stack.
        unsafe {
            let port = pg_sys::MyProcPort;
            loop {
                // As `socket_set_nonblocking` of src/backend/libpq/pqcomm.c does; a caller that
                // wants to wait sets it back.
                (*port.cast::<PortHead>()).noblock = true;
                let (written, code) = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    let written = secure_write_unguarded(port, bytes.as_ptr().cast(), bytes.len());
                    let error = std::io::Error::last_os_error();
                    (written, error.raw_os_error().unwrap_or_default())
                });
                match usize::try_from(written) {
                    Ok(count) if count > 0 => return Written::Bytes(count),
                    _ if code == libc::EINTR => {}
                    _ if code == libc::EAGAIN || code == libc::EWOULDBLOCK => {
                        return Written::Later;
                    }
                    _ => return Written::Lost(code),
                }
            }
        }
    }
}

/// The first members of `Port` of src/include/libpq/libpq-be.h, 15 to 18.
#[repr(C)]
struct PortHead {
    sock: c_int,
    noblock: bool,
}

unsafe extern "C-unwind" {
    // src/include/libpq/libpq.h, 15 to 18. (The bytes are only read, whatever the older
    // declarations say.)
    #[link_name = "secure_write"]
    fn secure_write_unguarded(
        port: *mut pg_sys::Port,
        bytes: *const c_void,
        length: usize,
    ) -> isize;
}

/// The result of writing to the client.
#[derive(Debug, Clone, Copy)]
pub enum Written {
    /// So many bytes were taken.
    Bytes(usize),
    /// Nothing was taken, for now. The same bytes have to be written again, perhaps with more
    /// behind them.
    Later,
    /// The client is gone; the system's number for how.
    Lost(i32),
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
