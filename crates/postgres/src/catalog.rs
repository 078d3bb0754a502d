//! SQL in this session's own database, and whose rights it runs with.
//!
//! For the SQL functions and for workers that are in a transaction. Every query is parsed with the session's search_path: callers
//! run with one that is pinned to pg_catalog and qualify everything else. Each query takes a snapshot of its own, so that
//! a function that polls sees what others commit. Values go in and come out as text in UTF-8, whatever the database's encoding.

use std::ffi::{CStr, CString, c_char, c_int};

use pgrx::{IntoDatum, PgSqlErrorCode, pg_sys};

use crate::encoding;
use crate::rows::Rows;

/// Which rights a piece of work has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// Those of the extension's owner, who may read and write its tables.
    ExtensionOwner,
    /// Those of a role, and of nobody else whatever the objects it meets do: for looking into a user's table.
    Confined(pg_sys::Oid),
}

/// Run SQL. Parameters are text (cast them in the SQL); rows come back as text.
///
/// Raises PostgreSQL's own error if the statement fails.
pub fn query(sql: &str, parameters: &[Option<&str>]) -> Rows {
    let sql = encoding::statement(sql);
    // SAFETY: SPI_connect and SPI_finish enclose all use of SPI's memory; an error in between unwinds and PostgreSQL's abort
    // cleans SPI up. The parameter arrays have one entry a parameter and outlive the call.
    unsafe {
        pg_sys::SPI_connect();
        let mut types = vec![pg_sys::TEXTOID; parameters.len()];
        let mut values = Vec::with_capacity(parameters.len());
        let mut nulls: Vec<c_char> = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let datum = parameter.and_then(|text| {
                let text = encoding::statement(text);
                pg_sys::Datum::from(pg_sys::cstring_to_text(text.as_ptr())).into_datum()
            });
            nulls.push(if datum.is_some() {
                b' '.cast_signed()
            } else {
                b'n'.cast_signed()
            });
            values.push(datum.unwrap_or(pg_sys::Datum::from(0_usize)));
        }
        let code = pg_sys::SPI_execute_with_args(
            sql.as_ptr(),
            c_int::try_from(parameters.len()).unwrap_or(0),
            types.as_mut_ptr(),
            values.as_mut_ptr(),
            nulls.as_ptr(),
            false,
            0,
        );
        if code < 0 {
            pgrx::ereport!(
                ERROR,
                PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
                format!("SPI failed with code {code}")
            );
        }
        let rows = if pg_sys::SPI_tuptable.is_null() {
            Rows::default()
        } else {
            collect()
        };
        pg_sys::SPI_finish();
        rows
    }
}

/// The rows that the last SPI command left.
///
/// # Safety
/// SPI is connected and `SPI_tuptable` is not null.
pub unsafe fn collect() -> Rows {
    // SAFETY: SPI says that `vals` has SPI_processed tuples of the shape `tupdesc`.
    unsafe {
        let table = pg_sys::SPI_tuptable;
        let tupdesc = (*table).tupdesc;
        let columns = (*tupdesc).natts;
        let count = usize::try_from(pg_sys::SPI_processed).unwrap_or(0);
        let mut cells = Vec::new();
        for row in 0..count {
            let tuple = *(*table).vals.add(row);
            for column in 1..=columns {
                let value = pg_sys::SPI_getvalue(tuple, tupdesc, column);
                cells.push((!value.is_null()).then(|| utf8_string(CStr::from_ptr(value))));
            }
        }
        Rows::new(usize::try_from(columns).unwrap_or(0), cells)
    }
}

/// Text in the database's encoding as UTF-8.
#[must_use]
pub fn utf8_string(text: &CStr) -> String {
    // SAFETY: a C string.
    unsafe { encoding::from_server(text.as_ptr()) }
}

/// The role that statements run as now.
#[must_use]
pub fn current_role() -> pg_sys::Oid {
    // SAFETY: reads a variable of this process.
    unsafe { pg_sys::GetUserId() }
}

/// Whether a role is a superuser.
#[must_use]
pub fn is_superuser(role: pg_sys::Oid) -> bool {
    // SAFETY: looks the role up in the catalog cache; a role that is gone is no superuser.
    unsafe { pg_sys::superuser_arg(role) }
}

/// Whether every query of this transaction sees what others have committed by then.
#[must_use]
pub fn sees_new_commits() -> bool {
    // SAFETY: reads a variable of this process.
    unsafe { pg_sys::XactIsoLevel < pg_sys::XACT_REPEATABLE_READ.cast_signed() }
}

/// Do `work` with other rights, then return to the caller's.
///
/// An error that PostgreSQL raises leaves the rights changed until the transaction or subtransaction aborts, which puts
/// them back: nothing of the caller's runs in between.
pub fn with_rights<T>(rights: Rights, work: impl FnOnce() -> T) -> T {
    let (role, flags) = match rights {
        Rights::ExtensionOwner => (extension_owner(), pg_sys::SECURITY_LOCAL_USERID_CHANGE),
        Rights::Confined(role) => (
            role,
            pg_sys::SECURITY_LOCAL_USERID_CHANGE
                | pg_sys::SECURITY_RESTRICTED_OPERATION
                | pg_sys::SECURITY_NOFORCE_RLS,
        ),
    };
    let mut saved_role = pg_sys::InvalidOid;
    let mut saved_context: c_int = 0;
    // SAFETY: as PostgreSQL's own maintenance commands do it; both values are put back below, or by the abort.
    unsafe {
        pg_sys::GetUserIdAndSecContext(&raw mut saved_role, &raw mut saved_context);
        pg_sys::SetUserIdAndSecContext(role, saved_context | flags.cast_signed());
    }
    let result = work();
    // SAFETY: as above.
    unsafe { pg_sys::SetUserIdAndSecContext(saved_role, saved_context) };
    result
}

/// Do `work` under other settings, then return to the session's. An error leaves that to the abort.
///
/// # Errors
/// Those of `work`.
pub fn with_settings<T, E>(
    settings: &[(&str, &str)],
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    // SAFETY: a nest level of settings within the function call's; strings are copied.
    let level = unsafe { pg_sys::NewGUCNestLevel() };
    for (name, value) in settings {
        let c = |text: &str| CString::new(text).unwrap_or_default();
        let (name, value) = (c(name), c(value));
        // SAFETY: as above.
        unsafe {
            pg_sys::set_config_option(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_SESSION,
                pg_sys::GucAction::GUC_ACTION_SAVE,
                true,
                0,
                false,
            );
        }
    }
    let value = work()?;
    // SAFETY: the level that was made above.
    unsafe { pg_sys::AtEOXact_GUC(true, level) };
    Ok(value)
}

fn extension_owner() -> pg_sys::Oid {
    let rows = query(
        "select extowner::oid from pg_catalog.pg_extension where extname = 'braid'",
        &[],
    );
    rows.get(0, 0)
        .and_then(|oid| oid.parse::<u32>().ok())
        .map_or_else(current_role, pg_sys::Oid::from_u32)
}

/// Make everything up to a local position durable, so that it is sent to subscribers.
pub fn flush_wal(position: u64) {
    // SAFETY: waits for WAL to be flushed; a position beyond the end of WAL is an error that PostgreSQL raises.
    unsafe { pg_sys::XLogFlush(position) };
}

/// All that is written of WAL by now is flushed when this returns. Up to where that is.
#[must_use]
pub fn flush_all() -> u64 {
    // SAFETY: a read of shared memory.
    let next = unsafe { pg_sys::GetXLogInsertRecPtr() };
    // The next record's place, which at the beginning of a page is behind its header: the last one ends where the page begins.
    let page = u64::from(pg_sys::XLOG_BLCKSZ);
    let header = size_of::<pg_sys::XLogLongPageHeaderData>() as u64;
    let end = if next % page <= header {
        next - next % page
    } else {
        next
    };
    flush_wal(end);
    end
}
