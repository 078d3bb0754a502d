//! Lock modes of relations, and heavyweight locks that stand for something else.

use std::ffi::CStr;
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::plain;

/// The extension that transactions of this process lock first.
static FIRST: OnceLock<&CStr> = OnceLock::new();

/// From now on each [`crate::error::transaction`] of this process begins with a lock of an
/// extension in `AccessShare`. DROP EXTENSION locks that in `AccessExclusive`, and then its tables
/// one by one: a transaction that had some of them, and wanted another one, would end in a deadlock
/// with it.
pub fn extension_first(name: &'static CStr) {
    // Another one would be as good.
    let _ = FIRST.set(name);
}

/// Locks the extension that [`extension_first`] names, if it exists.
pub(crate) fn take_first() {
    if let Some(name) = FIRST.get() {
        let oid = plain::get_extension_oid(name, true);
        if oid != pg_sys::InvalidOid {
            let mode = LockMode::AccessShare.as_raw();
            plain::LockDatabaseObject(pg_sys::ExtensionRelationId, oid, 0, mode);
        }
    }
}

/// A mode of PostgreSQL's heavyweight locks: src/include/storage/lockdefs.h, 15 to 18.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum LockMode {
    /// For a caller that holds a lock already.
    None = 0,
    /// SELECT.
    AccessShare = 1,
    /// SELECT FOR UPDATE.
    RowShare = 2,
    /// INSERT, UPDATE, DELETE.
    RowExclusive = 3,
    /// VACUUM, ANALYZE.
    ShareUpdateExclusive = 4,
    /// CREATE INDEX.
    Share = 5,
    /// As `Share`, by one transaction at a time.
    ShareRowExclusive = 6,
    /// Leaves only reading to others.
    Exclusive = 7,
    /// Leaves nothing to others.
    AccessExclusive = 8,
}

const _: () = assert!(LockMode::None as u32 == pg_sys::NoLock);
const _: () = assert!(LockMode::AccessShare as u32 == pg_sys::AccessShareLock);
const _: () = assert!(LockMode::RowShare as u32 == pg_sys::RowShareLock);
const _: () = assert!(LockMode::RowExclusive as u32 == pg_sys::RowExclusiveLock);
const _: () = assert!(LockMode::ShareUpdateExclusive as u32 == pg_sys::ShareUpdateExclusiveLock);
const _: () = assert!(LockMode::Share as u32 == pg_sys::ShareLock);
const _: () = assert!(LockMode::ShareRowExclusive as u32 == pg_sys::ShareRowExclusiveLock);
const _: () = assert!(LockMode::Exclusive as u32 == pg_sys::ExclusiveLock);
const _: () = assert!(LockMode::AccessExclusive as u32 == pg_sys::AccessExclusiveLock);

impl LockMode {
    /// Returns PostgreSQL's number for the mode.
    #[must_use]
    pub const fn as_raw(self) -> i32 {
        self as i32
    }

    /// Locks a relation in this mode until the current transaction ends, if that needs no wait.
    /// Returns whether it has. No relation has to have that OID.
    #[must_use]
    pub fn try_on_relation(self, relation: pg_sys::Oid) -> bool {
        plain::ConditionalLockRelationOid(relation, self.as_raw())
    }

    /// Locks a relation in this mode until the current transaction ends. No relation has to have
    /// that OID.
    pub fn on_relation(self, relation: pg_sys::Oid) {
        plain::LockRelationOid(relation, self.as_raw());
    }
}

/// DEFAULT_LOCKMETHOD and USER_LOCKMETHOD of src/include/storage/lock.h, 15 to 18.
const DEFAULT_LOCKMETHOD: u8 = 1;
const USER_LOCKMETHOD: u8 = 2;

/// An advisory lock of the extension's own: PostgreSQL's functions use the classes 1 and 2
/// (src/backend/utils/adt/lockfuncs.c).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advisory {
    /// The database.
    pub database: u32,
    /// Two numbers of the caller's choice.
    pub key: (u32, u32),
    /// The caller's class, neither 1 nor 2.
    pub class: u16,
}

impl Advisory {
    /// Takes the lock without waiting, until the process ends (`for_session`) or the transaction in
    /// hand does. Returns false if another process has it. Run in a transaction.
    #[must_use]
    pub fn try_take(self, for_session: bool) -> bool {
        let tag = self.tag();
        acquire(&tag, for_session, true) != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
    }

    /// Does `work` while no other process holds the lock, and waits for it. An error leaves the
    /// lock to the abort. Run in a transaction.
    pub fn hold<T>(self, work: impl FnOnce() -> T) -> T {
        let tag = self.tag();
        let mode = LockMode::Exclusive.as_raw();
        acquire(&tag, false, false);
        let value = work();
        // SAFETY: this process took the lock above.
        unsafe { pg_sys::LockRelease(&raw const tag, mode, false) };
        value
    }

    fn tag(self) -> pg_sys::LOCKTAG {
        pg_sys::LOCKTAG {
            locktag_field1: self.database,
            locktag_field2: self.key.0,
            locktag_field3: self.key.1,
            locktag_field4: self.class,
            locktag_type: u8::try_from(pg_sys::LockTagType::LOCKTAG_ADVISORY).unwrap_or(10),
            locktag_lockmethodid: USER_LOCKMETHOD,
        }
    }
}

/// Takes the lock of an object of a shared catalog until the current transaction ends, and waits
/// for it.
pub fn lock_shared_object(catalog: pg_sys::Oid, object: u32, mode: LockMode) {
    plain::LockSharedObject(catalog, pg_sys::Oid::from(object), 0, mode.as_raw());
}

/// Returns whether another process waits for the end of a transaction of this process.
#[must_use]
pub fn is_transaction_waited_for(xid: pg_sys::TransactionId) -> bool {
    if xid == pg_sys::InvalidTransactionId {
        return false;
    }
    // SET_LOCKTAG_TRANSACTION of src/include/storage/lock.h, 15 to 18.
    let tag = pg_sys::LOCKTAG {
        locktag_field1: xid.into_inner(),
        locktag_field2: 0,
        locktag_field3: 0,
        locktag_field4: 0,
        locktag_type: u8::try_from(pg_sys::LockTagType::LOCKTAG_TRANSACTION).unwrap_or(0),
        locktag_lockmethodid: DEFAULT_LOCKMETHOD,
    };
    // SAFETY: PostgreSQL reads the tag. A lock that this process does not hold is a WARNING, and
    // has no waiters.
    unsafe { pg_sys::LockHasWaiters(&raw const tag, LockMode::Exclusive.as_raw(), false) }
}

/// Takes a lock, which the current transaction or the session releases.
fn acquire(
    tag: &pg_sys::LOCKTAG,
    for_session: bool,
    only_if_free: bool,
) -> pg_sys::LockAcquireResult::Type {
    let mode = LockMode::Exclusive.as_raw();
    // SAFETY: PostgreSQL copies the tag. The current transaction has a resource owner.
    unsafe { pg_sys::LockAcquire(tag, mode, for_session, only_if_free) }
}
