//! This server and its setup: facts that stay while it runs, and settings of PostgreSQL's own.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::plain;
use crate::{ffi, setting};

/// Returns the number that `initdb` gave this cluster.
#[must_use]
pub fn system_identifier() -> u64 {
    plain::GetSystemIdentifier()
}

/// Returns the major version of PostgreSQL.
#[must_use]
pub fn major() -> u16 {
    u16::try_from(pg_sys::PG_VERSION_NUM / 10_000).unwrap_or(0)
}

/// Returns when the server started (`TimestampTz`).
#[must_use]
pub fn started_at() -> i64 {
    plain::PgStartTime()
}

/// Returns whether the server is a standby, or recovers from a crash.
#[must_use]
pub fn is_in_recovery() -> bool {
    plain::RecoveryInProgress()
}

/// Returns whether `pg_upgrade` has started this server.
#[must_use]
pub fn is_binary_upgrade() -> bool {
    plain::IsBinaryUpgrade()
}

/// Returns the bytes that a process without privileges may still write to the file system of a
/// path, which is relative to the data directory. `None`: the system does not say.
#[must_use]
pub fn free_bytes(path: &CStr) -> Option<u64> {
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: `path` ends with a zero byte. The call writes to `found`, which is of its type. All
    // zero is a value of that, as its members are numbers.
    let (status, found) = unsafe {
        let status = libc::statvfs(path.as_ptr(), found.as_mut_ptr());
        (status, found.assume_init())
    };
    if status != 0 {
        return None;
    }
    found.f_bavail.checked_mul(found.f_frsize)
}

/// Returns whether the postmaster still runs.
#[must_use]
pub fn postmaster_is_alive() -> bool {
    // The function only looks at a pipe, or at the parent's process id.
    ffi::PostmasterIsAliveInternal()
}

/// Returns the name of this database's encoding, as COPY takes it.
#[must_use]
pub fn database_encoding() -> String {
    let name = plain::GetDatabaseEncodingName().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the setting `server_version_num`, for example 150020.
#[must_use]
pub fn version() -> u32 {
    setting::get(c"server_version_num")
        .and_then(|version| version.to_str().ok()?.parse().ok())
        .unwrap_or(0)
}

/// Returns the setting `track_commit_timestamp`.
#[must_use]
pub fn tracks_commit_timestamps() -> bool {
    plain::track_commit_timestamp()
}

/// Returns whether the setting `temp_file_limit` is in force.
#[must_use]
pub fn has_temp_file_limit() -> bool {
    (plain::temp_file_limit()) >= 0
}

/// Returns the setting `vacuum_freeze_min_age`, in transactions.
#[must_use]
pub fn vacuum_freeze_min_age() -> i32 {
    plain::vacuum_freeze_min_age()
}

/// Returns the OIDs of the databases that take connections. Runs in a transaction of its own, in a
/// process that may be connected to no database.
#[must_use]
pub fn databases() -> Vec<u32> {
    let mut found = Vec::new();
    // SAFETY: a scan of pg_database as the autovacuum launcher does it
    // (src/backend/postmaster/autovacuum.c, 15 to 18). Each tuple is read before the next one is
    // fetched, and pg_database is open until then.
    unsafe {
        pg_sys::StartTransactionCommand();
        let _ = pg_sys::GetTransactionSnapshot();
        let lock = crate::lock::LockMode::AccessShare.as_raw();
        let relation = pg_sys::table_open(pg_sys::DatabaseRelationId, lock);
        let scan = pg_sys::table_beginscan_catalog(relation, 0, std::ptr::null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_database>();
            if (*form).datallowconn && (*form).datconnlimit != INVALID_DATABASE {
                found.push((*form).oid.to_u32());
            }
        }
        pg_sys::heap_endscan(scan);
        pg_sys::table_close(relation, lock);
        pg_sys::CommitTransactionCommand();
    }
    found
}

/// DATCONNLIMIT_INVALID_DB of src/include/catalog/pg_database.h: DROP DATABASE was interrupted.
const INVALID_DATABASE: i32 = -2;
