//! PostgreSQL's functions and variables of plain values, under their own names, safe to use.
//!
//! A function is listed in this module if it takes numbers only, returns a number or an address,
//! and has no rule that memory depends on. It may also read or copy a text besides, return a text,
//! which is copied, or fill in places of plain values. PostgreSQL checks its arguments; a call that
//! it can't serve is an error, which unwinds. A variable is listed if it has a plain value, which
//! PostgreSQL's one thread reads and writes whole; also an address, whose memory has to be read by
//! other means.
//!
//! Not for: functions that take other pointers, and those for which something has to be open.

#![expect(non_snake_case, reason = "PostgreSQL's names")]

use std::ffi::{CStr, CString};

use pgrx::pg_sys::{self, LOCKMODE, Oid, TimestampTz, TransactionId, XLogRecPtr};

use crate::compat::ReplOriginId;

/// Declares functions that follow the rule of this module.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $returned:ty)?;)*) => {$(
        #[doc = concat!("PostgreSQL's `", stringify!($name), "`.")]
        #[inline]
        pub fn $name($($argument: $type),*) $(-> $returned)? {
            // SAFETY: the function takes and returns plain values, and checks them itself. An error
            // unwinds, behind the bindings' guard.
            unsafe { pg_sys::$name($($argument),*) }
        }
    )*};
}

/// Declares readers of variables that follow the rule of this module.
macro_rules! variables {
    ($($name:ident: $type:ty;)*) => {$(
        #[doc = concat!("The value of PostgreSQL's `", stringify!($name), "`.")]
        #[inline]
        #[must_use]
        pub fn $name() -> $type {
            // SAFETY: a plain value of this process, in which one thread runs PostgreSQL's code.
            unsafe { pg_sys::$name }
        }
    )*};
}

/// Declares functions that read or copy a text, and otherwise follow the rule of this module.
macro_rules! readers {
    ($(fn $name:ident(text $(, $argument:ident: $type:ty)*) $(-> $returned:ty)?;)*) => {$(
        #[doc = concat!("PostgreSQL's `", stringify!($name), "`.")]
        #[inline]
        pub fn $name(text: &CStr $(, $argument: $type)*) $(-> $returned)? {
            // SAFETY: the text ends with a zero byte. The function reads or copies it during the
            // call; the rest are plain values, which it checks itself.
            unsafe { pg_sys::$name(text.as_ptr() $(, $argument)*) }
        }
    )*};
}

/// Declares functions that return a text, or null, and otherwise follow the rule of this module.
macro_rules! texts {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[doc = concat!("PostgreSQL's `", stringify!($name), "`; `None` for null.")]
        #[inline]
        pub fn $name($($argument: $type),*) -> Option<CString> {
            // SAFETY: the function takes plain values, and checks them itself. It returns null or a
            // text that ends with a zero byte. The text exists at least until PostgreSQL's code
            // runs again, and is copied before that.
            unsafe {
                let text = pg_sys::$name($($argument),*);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_owned())
            }
        }
    )*};
}

/// Declares functions that fill in places, which are returned, and otherwise follow the rule of
/// this module.
macro_rules! fillers {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> ($($place:ident: $filled:ty),*);)*) => {$(
        #[doc = concat!("What PostgreSQL's `", stringify!($name), "` fills in.")]
        #[inline]
        #[must_use]
        pub fn $name($($argument: $type),*) -> ($($filled),*) {
            $(let mut $place = <$filled>::default();)*
            // SAFETY: the function takes plain values, and checks them itself. Each place is one of
            // the type that it fills in.
            unsafe { pg_sys::$name($($argument,)* $(&raw mut $place),*) };
            ($($place),*)
        }
    )*};
}

/// Declares functions that set variables whose every value PostgreSQL takes as it is.
macro_rules! setters {
    ($($name:ident: $variable:ident: $type:ty;)*) => {$(
        #[doc = concat!("Sets PostgreSQL's `", stringify!($variable), "`.")]
        #[inline]
        pub fn $name(value: $type) {
            // SAFETY: a plain value of this process, in which one thread runs PostgreSQL's code.
            unsafe { pg_sys::$variable = value };
        }
    )*};
}

// Transactions and commands.
functions! {
    fn ActiveSnapshotSet() -> bool;
    fn BeginTransactionBlock();
    fn CommitTransactionCommand();
    fn CommandCounterIncrement();
    fn ForceSyncCommit();
    fn GetCurrentCommandId(used: bool) -> pg_sys::CommandId;
    fn GetCurrentFullTransactionId() -> pg_sys::FullTransactionId;
    fn GetCurrentStatementStartTimestamp() -> TimestampTz;
    fn GetCurrentTransactionStartTimestamp() -> TimestampTz;
    fn GetCurrentSubTransactionId() -> pg_sys::SubTransactionId;
    fn GetCurrentTimestamp() -> TimestampTz;
    fn GetCurrentTransactionId() -> TransactionId;
    fn GetCurrentTransactionIdIfAny() -> TransactionId;
    fn GetCurrentTransactionNestLevel() -> i32;
    fn GetTopFullTransactionId() -> pg_sys::FullTransactionId;
    fn GetTopTransactionId() -> TransactionId;
    fn GetTopTransactionIdIfAny() -> TransactionId;
    fn GetCatalogSnapshot(relation: Oid) -> pg_sys::Snapshot;
    fn GetLatestSnapshot() -> pg_sys::Snapshot;
    fn IsInParallelMode() -> bool;
    fn IsInTransactionBlock(is_top_level: bool) -> bool;
    fn IsTransactionOrTransactionBlock() -> bool;
    fn IsTransactionState() -> bool;
    fn ReadNextFullTransactionId() -> pg_sys::FullTransactionId;
    fn SetCurrentStatementStartTimestamp();
    fn StartTransactionCommand();
    fn SubTransGetTopmostTransaction(xid: TransactionId) -> TransactionId;
    fn TransactionIdDidCommit(xid: TransactionId) -> bool;
    fn TransactionIdIsCurrentTransactionId(xid: TransactionId) -> bool;
    fn TransactionIdIsInProgress(xid: TransactionId) -> bool;
    fn TransactionIdPrecedes(one: TransactionId, other: TransactionId) -> bool;
    fn pgstat_report_stat(now: bool) -> std::ffi::c_long;
}

readers! {
    fn PrepareTransactionBlock(text) -> bool;
}

setters! {
    set_CheckXidAlive: CheckXidAlive: TransactionId;
    set_LockTimeout: LockTimeout: i32;
    set_XactLastCommitEnd: XactLastCommitEnd: XLogRecPtr;
    set_XactReadOnly: XactReadOnly: bool;
    set_synchronous_commit: synchronous_commit: i32;
}

variables! {
    CheckXidAlive: TransactionId;
    FirstSnapshotSet: bool;
    InitializingParallelWorker: bool;
    LockTimeout: i32;
    ParallelWorkerNumber: i32;
    XactIsoLevel: i32;
    XactLastCommitEnd: XLogRecPtr;
    XactLastRecEnd: XLogRecPtr;
    XactReadOnly: bool;
    creating_extension: bool;
    synchronous_commit: i32;
}

// Roles and settings.
functions! {
    fn GetSessionUserId() -> Oid;
    fn GetUserId() -> Oid;
    fn NewGUCNestLevel() -> i32;
    fn SetUserIdAndSecContext(role: Oid, limits: i32);
    fn check_enable_rls(relation: Oid, role: Oid, no_error: bool) -> i32;
    fn has_rolreplication(role: Oid) -> bool;
    fn pg_attribute_aclcheck(relation: Oid, column: i16, role: Oid, mode: pg_sys::AclMode) -> pg_sys::AclResult::Type;
    fn pg_attribute_aclcheck_all(relation: Oid, role: Oid, mode: pg_sys::AclMode, how: pg_sys::AclMaskHow::Type) -> pg_sys::AclResult::Type;
    fn pg_class_aclcheck(relation: Oid, role: Oid, mode: pg_sys::AclMode) -> pg_sys::AclResult::Type;
    fn superuser() -> bool;
    fn superuser_arg(role: Oid) -> bool;
}

texts! {
    fn GetUserNameFromId(role: Oid, no_error: bool);
}

fillers! {
    fn GetUserIdAndSecContext() -> (role: Oid, limits: i32);
}

// Catalogs: each look-up by an OID reports a dropped object by its result or by an error.
functions! {
    fn AcceptInvalidationMessages();
    fn CacheInvalidateRelcacheByRelid(relation: Oid);
    fn FindDefaultConversionProc(from: i32, to: i32) -> Oid;
    fn HistoricSnapshotActive() -> bool;
    fn IndexGetRelation(index: Oid, missing_ok: bool) -> Oid;
    fn InvalidateSystemCaches();
    fn getBaseType(of: Oid) -> Oid;
    fn getExtensionOfObject(catalog: Oid, object: Oid) -> Oid;
    fn get_collation_isdeterministic(collation: Oid) -> bool;
    fn get_element_type(of: Oid) -> Oid;
    fn get_opcode(operator: Oid) -> Oid;
    fn get_opfamily_member(family: Oid, left: Oid, right: Oid, strategy: i16) -> Oid;
    fn get_rel_namespace(relation: Oid) -> Oid;
    fn get_rel_persistence(relation: Oid) -> std::ffi::c_char;
    fn get_rel_relispartition(relation: Oid) -> bool;
    fn get_rel_relkind(relation: Oid) -> std::ffi::c_char;
    fn get_typtype(of: Oid) -> std::ffi::c_char;
}

texts! {
    fn format_procedure_qualified(function: Oid);
    fn format_type_with_typemod(of: Oid, modifier: i32);
    fn get_collation_name(collation: Oid);
    fn get_database_name(database: Oid);
    fn get_namespace_name(namespace: Oid);
    fn get_rel_name(relation: Oid);
}

fillers! {
    fn getTypeInputInfo(of: Oid) -> (input: Oid, parameter: Oid);
    fn getTypeOutputInfo(of: Oid) -> (output: Oid, is_varlena: bool);
    fn get_typlenbyval(of: Oid) -> (length: i16, by_value: bool);
}

readers! {
    fn get_extension_oid(text, missing_ok: bool) -> Oid;
    fn get_namespace_oid(text, missing_ok: bool) -> Oid;
    fn get_relname_relid(text, namespace: Oid) -> Oid;
}

// Locks.
functions! {
    fn ConditionalLockRelationOid(relation: Oid, mode: LOCKMODE) -> bool;
    fn LockDatabaseObject(catalog: Oid, object: Oid, part: u16, mode: LOCKMODE);
    fn LockRelationOid(relation: Oid, mode: LOCKMODE);
    fn LockSharedObject(catalog: Oid, object: Oid, part: u16, mode: LOCKMODE);
}

// Relations: the resource owner of the current transaction holds an open one.
functions! {
    fn GetBulkInsertState() -> pg_sys::BulkInsertState;
    fn RelationIdGetRelation(relation: Oid) -> pg_sys::Relation;
    fn relation_open(relation: Oid, mode: LOCKMODE) -> pg_sys::Relation;
    fn try_relation_open(relation: Oid, mode: LOCKMODE) -> pg_sys::Relation;
}

// WAL and replication.
functions! {
    fn GetXLogInsertRecPtr() -> XLogRecPtr;
    fn RecoveryInProgress() -> bool;
    fn XLogFlush(up_to: XLogRecPtr);
    fn replorigin_advance(
        origin: ReplOriginId,
        remote: XLogRecPtr,
        local: XLogRecPtr,
        go_backward: bool,
        wal_log: bool
    );
    fn replorigin_get_progress(origin: ReplOriginId, flush: bool) -> XLogRecPtr;
    fn replorigin_session_reset();
}

readers! {
    fn replorigin_by_name(text, missing_ok: bool) -> ReplOriginId;
    fn replorigin_create(text) -> ReplOriginId;
    fn replorigin_drop_by_name(text, missing_ok: bool, nowait: bool);
}

variables! {
    ReplicationSlotCtl: *mut pg_sys::ReplicationSlotCtlData;
    am_walsender: bool;
    max_replication_slots: i32;
    max_wal_senders: i32;
    wal_receiver_status_interval: i32;
    wal_receiver_timeout: i32;
    wal_segment_size: i32;
}

// The server and this process.
functions! {
    fn BackendPidGetProc(pid: i32) -> *mut pg_sys::PGPROC;
    fn GetDatabaseEncoding() -> i32;
    fn GetSystemIdentifier() -> u64;
    fn PrepareClientEncoding(encoding: i32) -> i32;
    fn SetClientEncoding(encoding: i32) -> i32;
    fn dsm_attach(handle: pg_sys::dsm_handle) -> *mut pg_sys::dsm_segment;
    fn dsm_create(bytes: usize, flags: i32) -> *mut pg_sys::dsm_segment;
    fn pg_get_client_encoding() -> i32;
}

readers! {
    fn MarkGUCPrefixReserved(text);
}

texts! {
    fn GetDatabaseEncodingName();
    fn timestamptz_to_str(time: TimestampTz);
}

setters! {
    set_ClientConnectionLost: ClientConnectionLost: i32;
    set_InterruptPending: InterruptPending: i32;
    set_QueryCancelPending: QueryCancelPending: i32;
}

variables! {
    BufferBlocks: *mut std::ffi::c_char;
    CritSectionCount: u32;
    CurTransactionContext: pg_sys::MemoryContext;
    CurrentMemoryContext: pg_sys::MemoryContext;
    CurrentResourceOwner: pg_sys::ResourceOwner;
    InterruptHoldoffCount: u32;
    IsBinaryUpgrade: bool;
    MyDatabaseId: Oid;
    MyLatch: *mut pg_sys::Latch;
    MyProcPid: i32;
    MyProcPort: *mut pg_sys::Port;
    PgStartTime: TimestampTz;
    QueryCancelHoldoffCount: u32;
    TopMemoryContext: pg_sys::MemoryContext;
    TopTransactionContext: pg_sys::MemoryContext;
    process_shared_preload_libraries_in_progress: bool;
    temp_file_limit: i32;
    track_commit_timestamp: bool;
    vacuum_freeze_min_age: i32;
}
