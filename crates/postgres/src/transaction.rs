//! The current transaction: its ids, its commit, and functions that run as it ends.

use std::ffi::{CStr, c_void};

use pgrx::pg_sys;

use crate::{memory, plain, snapshot};

/// Returns the id under which this process writes now; invalid if it has not written yet.
#[must_use]
pub fn current_id() -> pg_sys::TransactionId {
    plain::GetCurrentTransactionIdIfAny()
}

/// Returns the id of the whole current transaction; invalid if it has not written yet.
#[must_use]
pub fn top_id() -> pg_sys::TransactionId {
    plain::GetTopTransactionIdIfAny()
}

/// Returns the full id under which this process writes, and takes one if it has none. Run in a
/// transaction.
#[must_use]
pub fn assign_full_id() -> u64 {
    plain::GetCurrentFullTransactionId().value
}

/// Returns the full id of the whole current transaction, and assigns one if it has none. Run in a
/// transaction.
#[must_use]
pub fn assign_top_full_id() -> u64 {
    plain::GetTopFullTransactionId().value
}

/// Assigns an id to the current transaction if it has none. Run in a transaction.
pub fn assign_id() {
    plain::GetCurrentTransactionId();
}

/// Has PostgreSQL refuse, or allow, writes in the current transaction from now on, whatever it has
/// done before. Raises nothing.
pub fn set_read_only(read_only: bool) {
    plain::set_XactReadOnly(read_only);
}

/// Returns whether this process is in a transaction that has not failed.
#[must_use]
pub fn is_open() -> bool {
    plain::IsTransactionState()
}

/// Returns how deeply the current subtransaction is nested: 1 is the transaction itself, 0 none.
#[must_use]
pub fn nest_level() -> i32 {
    plain::GetCurrentTransactionNestLevel()
}

/// Returns whether an id is that of the current transaction, or of a part of it.
#[must_use]
pub fn is_own(xid: pg_sys::TransactionId) -> bool {
    plain::TransactionIdIsCurrentTransactionId(xid)
}

/// Returns whether a transaction runs in any process, or is prepared.
#[must_use]
pub fn is_running(xid: pg_sys::TransactionId) -> bool {
    plain::TransactionIdIsInProgress(xid)
}

/// Returns whether a transaction has committed. Ask [`is_running`] before.
#[must_use]
pub fn has_committed(xid: pg_sys::TransactionId) -> bool {
    plain::TransactionIdDidCommit(xid)
}

/// Waits until a transaction of any process has ended, with deadlock detection. In a transaction.
pub fn wait_for(xid: pg_sys::TransactionId) {
    // SAFETY: waits for a transaction by its id; deadlocks and cancellations are errors.
    unsafe {
        pg_sys::XactLockTableWait(
            xid,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            pg_sys::XLTW_Oper::XLTW_None,
        );
    }
}

/// Returns the number of the current command.
#[must_use]
pub fn command() -> pg_sys::CommandId {
    plain::GetCurrentCommandId(false)
}

/// Returns when the current transaction has begun (TimestampTz).
#[must_use]
pub fn start_time() -> pg_sys::TimestampTz {
    plain::GetCurrentTransactionStartTimestamp()
}

/// Returns when the current statement has begun (TimestampTz).
#[must_use]
pub fn statement_start() -> pg_sys::TimestampTz {
    plain::GetCurrentStatementStartTimestamp()
}

/// Returns the number of the current subtransaction.
#[must_use]
pub fn subtransaction() -> pg_sys::SubTransactionId {
    plain::GetCurrentSubTransactionId()
}

/// Returns whether the current transaction only reads.
#[must_use]
pub fn is_read_only() -> bool {
    plain::XactReadOnly()
}

/// Returns whether the current transaction keeps one snapshot for all its statements.
#[must_use]
pub fn keeps_its_snapshot() -> bool {
    let level = plain::XactIsoLevel();
    level >= pg_sys::XACT_REPEATABLE_READ.cast_signed()
}

/// Has the commit of the current transaction wait for this server's disk, whatever
/// `synchronous_commit` says.
pub fn flush_at_commit() {
    plain::ForceSyncCommit();
}

/// Makes the writes of the current transaction visible to its next command.
pub fn next_command() {
    plain::CommandCounterIncrement();
}

/// Returns where the record of this process's last commit ends in local WAL.
#[must_use]
pub fn last_commit_end() -> u64 {
    plain::XactLastCommitEnd()
}

/// Starts a transaction. Outside of one.
pub fn start() {
    plain::SetCurrentStatementStartTimestamp();
    plain::StartTransactionCommand();
}

/// Commits the current transaction of a command that commits by itself, and begins the next one, in
/// which the command goes on, as VACUUM does.
pub fn go_on_in_next() {
    plain::CommitTransactionCommand();
    plain::StartTransactionCommand();
}

/// Commits the current transaction, whose active snapshot is the only one. Returns where its record
/// ends in local WAL; 0 if it has written nothing. Then the current memory context is that of the
/// process.
pub fn commit() -> u64 {
    plain::set_XactLastCommitEnd(0);
    snapshot::pop();
    plain::CommitTransactionCommand();
    memory::Context::of_process().enter();
    plain::XactLastCommitEnd()
}

/// As [`commit`], of a transaction that is prepared under a name.
pub fn prepare(name: &CStr) {
    snapshot::pop();
    // The steps of PostgreSQL's own worker (apply_handle_prepare_internal of
    // src/backend/replication/logical/worker.c, 15 to 18).
    plain::BeginTransactionBlock();
    plain::CommitTransactionCommand();
    plain::PrepareTransactionBlock(name);
    plain::CommitTransactionCommand();
    memory::Context::of_process().enter();
}

/// Sends the counters of this process to the cumulative statistics: `now`, or if PostgreSQL thinks
/// it is time to. In a transaction it does nothing.
pub fn report_statistics(now: bool) {
    if !plain::IsTransactionOrTransactionBlock() {
        plain::pgstat_report_stat(now);
    }
}

/// Settings of an impatient process: it gives a lock up soon, and its commits wait for nothing.
#[derive(Debug)]
pub struct Impatient {
    lock_timeout: i32,
    synchronous_commit: i32,
}

impl Impatient {
    /// Sets `lock_timeout`, in milliseconds, and turns `synchronous_commit` off, past the
    /// bookkeeping of settings: each costs one store.
    #[inline]
    #[must_use]
    pub fn begin(lock_timeout: i32) -> Self {
        let before = Self {
            lock_timeout: plain::LockTimeout(),
            synchronous_commit: plain::synchronous_commit(),
        };
        // Settings without hooks: PostgreSQL reads them when a lock is waited for, and when a
        // transaction commits.
        plain::set_LockTimeout(lock_timeout);
        let off = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF;
        plain::set_synchronous_commit(off.cast_signed());
        before
    }

    /// Puts both back.
    #[inline]
    pub fn end(self) {
        plain::set_LockTimeout(self.lock_timeout);
        plain::set_synchronous_commit(self.synchronous_commit);
    }
}

/// A step of a transaction's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The transaction is about to commit; errors still roll it back.
    BeforeCommit,
    /// The transaction is about to be prepared; errors still roll it back.
    BeforePrepare,
    /// The transaction has committed.
    Committed,
    /// The transaction has been prepared.
    Prepared,
    /// The transaction is rolled back.
    RolledBack,
}

/// The end of a subtransaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartEnd {
    /// The subtransaction.
    pub part: pg_sys::SubTransactionId,
    /// The transaction, or subtransaction, that it is a part of.
    pub parent: pg_sys::SubTransactionId,
    /// The subtransaction's writes stay, as its parent's.
    pub stays: bool,
}

/// Has this process call `handler` at the end of each of its transactions, from now on.
pub fn on_end(handler: fn(End)) {
    // SAFETY: the callback belongs to this library, which is never unloaded; it takes a `fn(End)`.
    unsafe { pg_sys::RegisterXactCallback(Some(at_end), handler as *mut c_void) };
}

/// Has this process call `handler` at the end of each of its subtransactions, from now on.
pub fn on_part_end(handler: fn(PartEnd)) {
    // SAFETY: the callback belongs to this library, which is never unloaded; it takes a
    // `fn(PartEnd)`.
    unsafe { pg_sys::RegisterSubXactCallback(Some(at_part_end), handler as *mut c_void) };
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_end(event: pg_sys::XactEvent::Type, handler: *mut c_void) {
    let end = match event {
        pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT => End::BeforeCommit,
        pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE => End::BeforePrepare,
        pg_sys::XactEvent::XACT_EVENT_COMMIT => End::Committed,
        pg_sys::XactEvent::XACT_EVENT_PREPARE => End::Prepared,
        pg_sys::XactEvent::XACT_EVENT_ABORT => End::RolledBack,
        _ => return,
    };
    // SAFETY: `on_end` has registered a `fn(End)`.
    let handler = unsafe { std::mem::transmute::<*mut c_void, fn(End)>(handler) };
    handler(end);
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_part_end(
    event: pg_sys::SubXactEvent::Type,
    part: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    handler: *mut c_void,
) {
    let stays = match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => true,
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => false,
        _ => return,
    };
    // SAFETY: `on_part_end` has registered a `fn(PartEnd)`.
    let handler = unsafe { std::mem::transmute::<*mut c_void, fn(PartEnd)>(handler) };
    handler(PartEnd {
        part,
        parent,
        stays,
    });
}
