//! SQL in this session's own database, and whose rights it runs with.
//!
//! For the SQL functions and for workers that are in a transaction. Every query is parsed with the
//! session's search_path: callers run with one that is pinned to pg_catalog and qualify everything
//! else. Each query takes a snapshot of its own, so that a function that polls sees the commits of
//! others. Values go in and come out as text in UTF-8, whatever the database's encoding.

use std::ffi::{CStr, CString, c_char, c_int};

use pgrx::datum::DatumWithOid;
use pgrx::{IntoDatum, PgSqlErrorCode, pg_sys};

use crate::acting_role::ActingRole;
use crate::decoding::Tuple;
use crate::encoding::{self, Unpacked};
use crate::lock::LockMode;
use crate::plain;
use crate::rows::Rows;
use crate::setting::{As, Level};
use crate::subtransaction;
use crate::syscache::ClassRow;
use crate::tuple_desc::TupleDesc;
use crate::value::Value;

/// The rights with which work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// The rights of the extension's owner, who may read and write its tables.
    ExtensionOwner,
    /// The rights of one role only, whatever the objects do that it uses: for reading a user's
    /// table.
    Confined(pg_sys::Oid),
    /// The rights of a table's owner, confined likewise unless the owner is a superuser. The table
    /// is locked as for a reader. Planning a query is enough to run code of the owner: the planner
    /// folds constants in expressions of indexes, checks and statistics.
    OwnerOf(pg_sys::Oid),
}

/// Run SQL. Parameters are text (cast them in the SQL); rows come back as text.
///
/// Raises PostgreSQL's own error if the statement fails.
pub fn query(sql: &str, parameters: &[Option<&str>]) -> Rows {
    let sql = encoding::statement(sql);
    // SAFETY: SPI_connect and SPI_finish enclose all use of SPI's memory; an error in between
    // unwinds and PostgreSQL's abort cleans SPI up. The parameter arrays have one entry a parameter
    // and outlive the call.
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
        execute(&sql, &mut types, &mut values, &nulls);
        let rows = collect();
        pg_sys::SPI_finish();
        rows
    }
}

/// Executes a statement that may write, with these arguments. Raises PostgreSQL's own error if it
/// fails.
///
/// # Safety
/// SPI is connected. The slices have an entry for each argument.
unsafe fn execute(
    sql: &CStr,
    types: &mut [pg_sys::Oid],
    values: &mut [pg_sys::Datum],
    nulls: &[c_char],
) {
    // SAFETY: as the caller says.
    let code = unsafe {
        pg_sys::SPI_execute_with_args(
            sql.as_ptr(),
            c_int::try_from(types.len()).unwrap_or(0),
            types.as_mut_ptr(),
            values.as_mut_ptr(),
            nulls.as_ptr(),
            false,
            0,
        )
    };
    if code < 0 {
        pgrx::ereport!(
            ERROR,
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            format!("SPI failed with code {code}")
        );
    }
}

/// Runs a statement that may write, and returns how many rows it has touched, and those that it
/// returns. The transaction takes an id with the first row that it writes, and not before. In a
/// transaction.
///
/// Raises PostgreSQL's own error if the statement fails.
pub fn write(sql: &str, arguments: &[DatumWithOid<'_>]) -> (usize, Rows) {
    let sql = encoding::statement(sql);
    let arguments = encoding::arguments(arguments);
    let mut unpacked = Unpacked::new(&arguments);
    // SAFETY: SPI_connect and SPI_finish enclose all use of SPI's memory; an error in between
    // unwinds, and the abort cleans SPI up. The arrays have an entry for each argument, and outlive
    // the call.
    unsafe {
        pg_sys::SPI_connect();
        execute(
            &sql,
            &mut unpacked.types,
            &mut unpacked.values,
            &unpacked.nulls,
        );
        let touched = usize::try_from(pg_sys::SPI_processed).unwrap_or(usize::MAX);
        let rows = collect();
        pg_sys::SPI_finish();
        (touched, rows)
    }
}

/// Runs the statements of a script, in UTF-8, one after the other in the current transaction.
/// Settings that they make hold until it ends.
pub fn run_script(script: &str) {
    let script = encoding::statement(script);
    // SAFETY: in a transaction; SPI copies the text that it keeps. An error unwinds, and the abort
    // cleans up.
    unsafe {
        pg_sys::SPI_connect();
        let code = pg_sys::SPI_execute(script.as_ptr(), false, 0);
        if code < 0 {
            pgrx::ereport!(
                ERROR,
                PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
                format!("SPI failed with code {code}")
            );
        }
        pg_sys::SPI_finish();
    }
}

/// The rows that the last SPI command left; none if it left no table.
pub fn collect() -> Rows {
    // SAFETY: SPI sets this to null when it frees the table, or is left. It says that `vals` has
    // `numvals` tuples of the shape `tupdesc`.
    unsafe {
        let table = pg_sys::SPI_tuptable;
        if table.is_null() {
            return Rows::new(0, Vec::new());
        }
        let tupdesc = (*table).tupdesc;
        let columns = (*tupdesc).natts;
        let count = usize::try_from((*table).numvals).unwrap_or(0);
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

/// Runs a query that only reads, in the server's encoding. Returns `read` of the row's values;
/// `None` if the query does not give just one row. In a transaction.
pub fn only_row<T>(statement: &CStr, read: impl FnOnce(&[Option<Value<'_>>]) -> T) -> Option<T> {
    // SAFETY: SPI_connect and SPI_finish enclose all use of SPI's memory; an error in between
    // unwinds, and the abort cleans SPI up. The tuple is of the shape, and exists until then.
    unsafe {
        pg_sys::SPI_connect();
        pg_sys::SPI_execute(statement.as_ptr(), true, 2);
        let found = match pg_sys::SPI_tuptable.cast_const().as_ref() {
            Some(table) if pg_sys::SPI_processed == 1 => {
                TupleDesc::from_ptr(table.tupdesc).zip(Tuple::from_ptr(*table.vals))
            }
            _ => None,
        };
        let read = found.map(|(shape, tuple)| read(&tuple.values(shape)));
        pg_sys::SPI_finish();
        read
    }
}

/// Text in the database's encoding as UTF-8.
#[must_use]
pub fn utf8_string(text: &CStr) -> String {
    encoding::utf8(text)
}

/// The role that statements run as now.
#[must_use]
pub fn current_role() -> pg_sys::Oid {
    plain::GetUserId()
}

/// Whether a role is a superuser.
#[must_use]
pub fn is_superuser(role: pg_sys::Oid) -> bool {
    plain::superuser_arg(role)
}

/// Whether every query of this transaction sees the commits of others so far.
#[must_use]
pub fn sees_new_commits() -> bool {
    plain::XactIsoLevel() < pg_sys::XACT_REPEATABLE_READ.cast_signed()
}

/// Do `work` with other rights, then return to the caller's.
///
/// An error that PostgreSQL raises leaves the rights changed until the transaction or
/// subtransaction aborts, which puts them back: nothing of the caller's runs in between.
pub fn with_rights<T>(rights: Rights, work: impl FnOnce() -> T) -> T {
    let before = ActingRole::now();
    let other = match rights {
        Rights::ExtensionOwner => {
            before.other(extension_owner(), pg_sys::SECURITY_LOCAL_USERID_CHANGE)
        }
        Rights::Confined(role) => before.confined(role),
        Rights::OwnerOf(table) => match owner_of(table) {
            Some(owner) => before.as_owner(owner),
            // Without the table its statements fail, and run nothing of anybody.
            None => before,
        },
    };
    other.take();
    let result = work();
    before.take();
    result
}

/// Runs a query that only reads, with other rights, and releases the locks that it takes: one on
/// each table that it names, and on each index of these. So a transaction can read thousands of
/// tables, one after the other, and hold the locks of one at a time.
///
/// The tables may change as soon as this returns. Only for callers that do not rely on the result:
/// the code that acts on their decision checks it again.
///
/// Raises PostgreSQL's own error if the statement fails.
pub fn glance(rights: Rights, sql: &str) -> Rows {
    // The rollback of a subtransaction is what releases locks before the transaction ends.
    match subtransaction::attempt(|| Ok((with_rights(rights, || query(sql, &[])), false))) {
        Ok(rows) => rows,
        Err(error) => error.as_raised().raise(),
    }
}

/// Does `work` under other settings, then returns to the session's, also when `work` returns an
/// error. An error that PostgreSQL raises leaves that to the abort.
///
/// # Errors
/// Those of `work`.
pub fn with_settings<T, E>(
    settings: &[(&str, &str)],
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let level = Level::begin();
    for (name, value) in settings {
        let c = |text: &str| CString::new(text).unwrap_or_default();
        level.set(&c(name), &c(value), As::Superuser);
    }
    let outcome = work();
    level.end(true);
    outcome
}

/// The owner of a relation, which is locked as for a reader until the transaction ends: nobody can
/// give it another owner before that. `None` if it is gone.
#[must_use]
pub fn owner_of(relation: pg_sys::Oid) -> Option<pg_sys::Oid> {
    plain::LockRelationOid(relation, LockMode::AccessShare.as_raw());
    Some(ClassRow::find(relation)?.relowner)
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
    plain::XLogFlush(position);
}

/// All that is written of WAL by now is flushed when this returns. Up to where that is.
#[must_use]
pub fn flush_all() -> u64 {
    let next = plain::GetXLogInsertRecPtr();
    // The next record's place, which at the beginning of a page is behind its header: the last one
    // ends where the page begins.
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
