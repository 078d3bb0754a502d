//! Differences between the supported major versions. The only place with `cfg(feature = "pgNN")`.

mod access;
mod calls;
mod held_locks;
mod planning;
mod signal;

use std::io;

use pgrx::pg_sys;

use crate::parse_tree::{Node, Part, tree};

pub(crate) use access::{install_access_check, plan_query};
pub use calls::{
    acquire_slot, delete_tuple, enter_block, eval_plan_qual_init, execute_truncate,
    index_beginscan, insert_index_tuples, lock_exclusive, lock_shared, make_virtual_slot,
    primary_key_index, prune_page, relation_publications, replorigin_session_setup,
    rescan_without_pages, session_origin, unlock, update_tuple_and_indexes,
};
pub(crate) use calls::{create_wait_event_set, oldest_active_transaction};
pub(crate) use held_locks::HeldLocks;
pub use held_locks::LISTS_LOCKS;
pub(crate) use planning::{
    change_rights, install_planner_hook, install_relation_hook, simple_restriction,
};
pub(crate) use signal::handle_as_backend;
pub use signal::on_quit;

/// The number of a wait event of ours, under which pg_stat_activity shows its name; before 17 they
/// are all "Extension". One number for each name in the whole server.
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

/// Attribute `index` (from 0) of a tuple descriptor: the macro of src/include/access/tupdesc.h up
/// to 17, the function of 18.
///
/// # Safety
/// `descriptor` is valid and has more than `index` attributes.
#[allow(non_snake_case)]
pub unsafe fn TupleDescAttr(
    descriptor: pg_sys::TupleDesc,
    index: usize,
) -> *mut pg_sys::FormData_pg_attribute {
    // SAFETY: the attributes follow the descriptor, from 18 on behind the array of compact ones
    // (src/include/access/tupdesc.h, 18), and there are more than `index`.
    unsafe {
        #[cfg(not(any(feature = "pg18", feature = "pg19")))]
        let attributes = (*descriptor).attrs.as_mut_ptr();
        #[cfg(any(feature = "pg18", feature = "pg19"))]
        let attributes = {
            let natts = usize::try_from((*descriptor).natts).unwrap_or_default();
            let behind = (*descriptor).compact_attrs.as_mut_ptr().add(natts);
            behind.cast::<pg_sys::FormData_pg_attribute>()
        };
        attributes.add(index)
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

/// The place of the tuple of a decoded change; null stays null.
pub(crate) fn change_tuple(tuple: ChangeTuple) -> pg_sys::HeapTuple {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    {
        if tuple.is_null() {
            return std::ptr::null_mut();
        }
        let before = std::mem::offset_of!(pg_sys::ReorderBufferTupleBuf, tuple);
        tuple.wrapping_byte_add(before).cast()
    }
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    tuple
}

/// The changed tuples of a decoded change.
pub(crate) type ChangedTuples = pg_sys::ReorderBufferChange__bindgen_ty_1__bindgen_ty_1;

/// Writes to a file at an offset, and returns how many bytes were written: at least one. Up to 16
/// `FileWrite` and `FileRead` are functions, from 17 on wrappers of others.
///
/// # Errors
/// That of the operating system. An error without a number stands for a full disk, as with
/// PostgreSQL.
pub fn file_write(file: pg_sys::File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    let offset = file_offset(offset)?;
    let wait = pg_sys::WaitEventIO::WAIT_EVENT_BUFFILE_WRITE;
    // SAFETY: the file is open; the bytes are read only, whatever the declarations say.
    let written = unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let written = {
            #[cfg(feature = "pg15")]
            let amount = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
            #[cfg(feature = "pg16")]
            let amount = bytes.len();
            pg_sys::FileWrite(file, bytes.as_ptr().cast_mut().cast(), amount, offset, wait)
        };
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let written = {
            let vector = pg_sys::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            };
            pg_sys::FileWriteV(file, &raw const vector, 1, offset, wait)
        };
        written
    };
    match usize::try_from(written) {
        Ok(written) if written > 0 => Ok(written),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

fn file_offset(offset: u64) -> io::Result<pg_sys::off_t> {
    pg_sys::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Reads from a file at an offset, as [`file_write`], and returns how many bytes were read: 0 at
/// its end.
///
/// # Errors
/// That of the operating system.
pub fn file_read(file: pg_sys::File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let offset = file_offset(offset)?;
    let wait = pg_sys::WaitEventIO::WAIT_EVENT_BUFFILE_READ;
    // SAFETY: the file is open, and there is room for as many bytes.
    let read = unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let read = {
            #[cfg(feature = "pg15")]
            let amount = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
            #[cfg(feature = "pg16")]
            let amount = bytes.len();
            pg_sys::FileRead(file, bytes.as_mut_ptr().cast(), amount, offset, wait)
        };
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let read = {
            let vector = pg_sys::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            pg_sys::FileReadV(file, &raw const vector, 1, offset, wait)
        };
        read
    };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
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
    locator(unsafe { &*relation })
}

fn locator(relation: &pg_sys::RelationData) -> FileLocator {
    #[cfg(feature = "pg15")]
    let file = relation.rd_node;
    #[cfg(not(feature = "pg15"))]
    let file = relation.rd_locator;
    file
}

/// Whether a relation is in this file.
pub(crate) fn is_in_file(relation: &pg_sys::RelationData, file: &FileLocator) -> bool {
    file_number(file) == relation_file(relation)
}

/// Number of the file that a relation is in.
pub(crate) fn relation_file(relation: &pg_sys::RelationData) -> u32 {
    file_number(&locator(relation))
}

fn file_number(file: &FileLocator) -> u32 {
    #[cfg(feature = "pg15")]
    let number = file.relNode;
    #[cfg(not(feature = "pg15"))]
    let number = file.relNumber;
    number.to_u32()
}

/// Whether a publication sends stored generated columns (`publish_generated_columns = stored`,
/// since 18).
#[must_use]
pub fn publishes_generated(publication: &pg_sys::Publication) -> bool {
    #[cfg(any(feature = "pg18", feature = "pg19"))]
    {
        publication.pubgencols_type == pg_sys::PublishGencolsType::PUBLISH_GENCOLS_STORED
    }
    #[cfg(not(any(feature = "pg18", feature = "pg19")))]
    {
        let _ = publication;
        false
    }
}

/// Replaces virtual generated columns in an expression by their definitions (since 18).
///
/// # Safety
/// `node` is an expression over `relation`, in the current memory context.
pub unsafe fn expand_generated_columns(
    node: *mut pg_sys::Node,
    relation: pg_sys::Relation,
) -> *mut pg_sys::Node {
    #[cfg(any(feature = "pg18", feature = "pg19"))]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::expand_generated_columns_in_expr(node, relation, 1)
    }
    #[cfg(not(any(feature = "pg18", feature = "pg19")))]
    {
        let _ = relation;
        node
    }
}

/// Whether the reorder buffer itself reports progress within a large transaction of which nothing
/// is sent (since 16).
pub const REPORTS_PROGRESS: bool = cfg!(not(feature = "pg15"));

/// `ExecInitRangeTable` for one relation in which these attributes, counted from 1, may change: 16
/// added permission infos, 18 the unpruned relations. PostgreSQL's own apply worker names the
/// columns that the provider sends as well. A trigger `UPDATE OF` goes by them, and an index on
/// other columns is known to keep its keys.
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
            #[cfg(not(any(feature = "pg18", feature = "pg19")))]
            pg_sys::ExecInitRangeTable(estate, list, permissions);
            #[cfg(any(feature = "pg18", feature = "pg19"))]
            pg_sys::ExecInitRangeTable(estate, list, permissions, pg_sys::bms_make_singleton(1));
        }
    }
}

/// The number of a replication origin: `RepOriginId`, since 19 `ReplOriginId`.
pub type ReplOriginId = u16;

/// Declares functions that set a variable that this process's commits carry: before 19, and since
/// then as a member of `replorigin_xact_state`.
macro_rules! setters {
    ($($(#[doc = $doc:literal])* fn $name:ident($type:ty) = $before:ident, $since:ident;)*) => {$(
        $(#[doc = $doc])*
        pub fn $name(value: $type) {
            // SAFETY: writes a number that every part of PostgreSQL takes as it is.
            unsafe {
                #[cfg(not(feature = "pg19"))]
                {
                    pg_sys::$before = value;
                }
                #[cfg(feature = "pg19")]
                {
                    pg_sys::replorigin_xact_state.$since = value;
                }
            }
        }
    )*};
}

setters! {
    /// Sets the origin that this process's commits carry. PostgreSQL asks for no origin of that
    /// number.
    fn set_session_origin(ReplOriginId) = replorigin_session_origin, origin;
    /// Sets the provider's position (a remote LSN) that this process's next commit carries.
    fn set_session_origin_lsn(pg_sys::XLogRecPtr) = replorigin_session_origin_lsn, origin_lsn;
    /// Sets the commit timestamp, in microseconds since 2000, that this process's next commit
    /// carries.
    fn set_session_origin_timestamp(pg_sys::TimestampTz) =
        replorigin_session_origin_timestamp, origin_timestamp;
}

/// Whether this major has the setting `transaction_timeout`.
pub const HAS_TRANSACTION_TIMEOUT: bool = !cfg!(any(feature = "pg15", feature = "pg16"));

/// Whether `ExecuteTruncateGuts` runs triggers as the calling user instead of as each table's
/// owner.
pub const TRUNCATES_AS_CALLER: bool = cfg!(feature = "pg15");

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
    #[cfg(feature = "pg19")]
    fn ExecInsertIndexTuples(
        target: *mut pg_sys::ResultRelInfo,
        estate: *mut pg_sys::EState,
        flags: u32,
        slot: *mut pg_sys::TupleTableSlot,
        arbiters: *mut pg_sys::List,
        spec_conflict: *mut bool,
    ) -> *mut pg_sys::List;
    #[cfg(not(any(feature = "pg15", feature = "pg19")))]
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

unsafe extern "C-unwind" {
    // src/include/storage/bufmgr.h, access/heapam.h.
    #[cfg(not(feature = "pg19"))]
    fn LockBuffer(buffer: pg_sys::Buffer, mode: i32);
    #[cfg(feature = "pg19")]
    fn LockBufferInternal(buffer: pg_sys::Buffer, mode: i32);
    #[cfg(feature = "pg19")]
    fn UnlockBuffer(buffer: pg_sys::Buffer);
    #[cfg(not(feature = "pg19"))]
    fn heap_page_prune_opt(relation: pg_sys::Relation, buffer: pg_sys::Buffer);
    #[cfg(feature = "pg19")]
    fn heap_page_prune_opt(
        relation: pg_sys::Relation,
        buffer: pg_sys::Buffer,
        visibility_map: *mut pg_sys::Buffer,
        read_only: bool,
    );
}

/// `BUFFER_LOCK_UNLOCK` of src/include/storage/bufmgr.h.
const UNLOCK: i32 = 0;
/// `BUFFER_LOCK_SHARE`.
const SHARE: i32 = 1;
/// `BUFFER_LOCK_EXCLUSIVE`: 19 has another mode before it.
const EXCLUSIVE: i32 = if cfg!(feature = "pg19") { 3 } else { 2 };

/// For `layout::by_hand`.
pub(crate) const BY_HAND: &[(&str, usize)] = &[
    ("BUFFER_LOCK_UNLOCK", UNLOCK as usize),
    ("BUFFER_LOCK_SHARE", SHARE as usize),
    ("BUFFER_LOCK_EXCLUSIVE", EXCLUSIVE as usize),
];

/// The number of a system cache: signed since 19.
#[must_use]
pub const fn cache_number(cache: pg_sys::SysCacheIdentifier::Type) -> i32 {
    #[cfg(not(feature = "pg19"))]
    let cache = cache.cast_signed();
    cache
}

/// Options of `heap_insert`: unsigned since 19.
#[cfg(not(feature = "pg19"))]
pub type InsertOptions = i32;
/// Options of `heap_insert`.
#[cfg(feature = "pg19")]
pub type InsertOptions = u32;

/// `TABLE_INSERT_NO_LOGICAL` of src/include/access/tableam.h: logical decoding passes the row over.
#[cfg(not(feature = "pg19"))]
pub const INSERT_NO_LOGICAL: InsertOptions = pg_sys::TABLE_INSERT_NO_LOGICAL.cast_signed();
/// `TABLE_INSERT_NO_LOGICAL` of src/include/access/tableam.h: logical decoding passes the row over.
#[cfg(feature = "pg19")]
pub const INSERT_NO_LOGICAL: InsertOptions = pg_sys::TABLE_INSERT_NO_LOGICAL;

/// The cache of a callback's argument: unsigned up to 18.
#[must_use]
pub const fn cache_of_number(number: i32) -> pg_sys::SysCacheIdentifier::Type {
    #[cfg(not(feature = "pg19"))]
    let number = number.cast_unsigned();
    number
}

/// When a decoded transaction was committed, prepared or rolled back: a member of an unnamed union
/// since 19. 0 before that.
pub(crate) fn end_time(transaction: &pg_sys::ReorderBufferTXN) -> pg_sys::TimestampTz {
    #[cfg(not(feature = "pg19"))]
    let times = &transaction.xact_time;
    #[cfg(feature = "pg19")]
    let times = &transaction.__bindgen_anon_1;
    // SAFETY: all members of the union are times, and PostgreSQL begins with zeros.
    unsafe { times.commit_time }
}

/// `tuple_delete` of a table access method.
#[cfg(not(feature = "pg19"))]
pub type TupleDelete = unsafe extern "C-unwind" fn(
    pg_sys::Relation,
    pg_sys::ItemPointer,
    pg_sys::CommandId,
    pg_sys::Snapshot,
    pg_sys::Snapshot,
    bool,
    *mut pg_sys::TM_FailureData,
    bool,
) -> pg_sys::TM_Result::Type;
/// `tuple_delete` of a table access method: options since 19.
#[cfg(feature = "pg19")]
pub type TupleDelete = unsafe extern "C-unwind" fn(
    pg_sys::Relation,
    pg_sys::ItemPointer,
    pg_sys::CommandId,
    u32,
    pg_sys::Snapshot,
    pg_sys::Snapshot,
    bool,
    *mut pg_sys::TM_FailureData,
) -> pg_sys::TM_Result::Type;

/// Attribute number of `prqual` in pg_publication_rel: 19 has `prexcept` before it.
pub const ANUM_PRQUAL: i16 = if cfg!(feature = "pg19") { 5 } else { 4 };
/// Attribute number of `prattrs` in pg_publication_rel.
pub const ANUM_PRATTRS: i16 = ANUM_PRQUAL + 1;

/// Publications of all tables that except a relation, as a List of OIDs: since 19.
///
/// # Safety
/// In a transaction with a snapshot for catalogs.
pub unsafe fn excluding_publications(relation: pg_sys::Oid) -> *mut pg_sys::List {
    #[cfg(feature = "pg19")]
    // SAFETY: as the caller says.
    unsafe {
        pg_sys::GetRelationExcludedPublications(relation)
    }
    #[cfg(not(feature = "pg19"))]
    {
        let _ = relation;
        std::ptr::null_mut()
    }
}

/// The relation that CLUSTER, or REPACK, rewrites, if `node` is such a statement. A statement
/// without a name is about all relations of the database. From 19 on, both have one node.
#[cfg(not(feature = "pg19"))]
pub(crate) fn rewritten_by(node: Node<'_>) -> Option<Option<Part<'_, pg_sys::RangeVar>>> {
    (node.tag() == pg_sys::NodeTag::T_ClusterStmt).then(|| {
        // SAFETY: the tag says that the node is one of this type; its pointers lead to parts of the
        // same tree, which lives as long.
        unsafe { tree((*node.as_ptr().cast::<pg_sys::ClusterStmt>()).relation) }
    })
}

/// The relation that CLUSTER, or REPACK, rewrites, if `node` is such a statement. A statement
/// without a name is about all relations of the database. From 19 on, both have one node.
#[cfg(feature = "pg19")]
pub(crate) fn rewritten_by(node: Node<'_>) -> Option<Option<Part<'_, pg_sys::RangeVar>>> {
    (node.tag() == pg_sys::NodeTag::T_RepackStmt).then(|| {
        // SAFETY: the tag says that the node is one of this type; its pointer is null or leads to a
        // part of the same tree, which lives as long.
        unsafe {
            let named = (*node.as_ptr().cast::<pg_sys::RepackStmt>()).relation;
            tree(named.as_ref()?.relation)
        }
    })
}
