//! Queries that a process runs again and again, for each table of the stream: parsed and planned
//! once. Making a plan costs more than finding the rows.
//!
//! Where something that a plan depends on has changed, PostgreSQL makes it anew. Each is made for
//! any arguments at once: all of them look catalogs up by a key, and PostgreSQL's own choice would
//! plan the first five times for the very arguments.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr::NonNull;

use braid_bgworker::sqlstate::SqlState;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use crate::encoding::Unpacked;
use crate::error::PgError;
use crate::{catalog, encoding, snapshot};

/// Settings under which these queries are planned. Without statistics, as right after many tables
/// were made, the planner would join whole catalogs by hash, for each table anew.
const ONLY_LOOK_UPS: [(&str, &str); 4] = [
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_seqscan", "off"),
    // A scan for which there is no index counts as dear, which would have its plan compiled.
    ("jit", "off"),
];

/// A query's text, by its place, and the types of its arguments.
type Query = (usize, Vec<pg_sys::Oid>);

thread_local! {
    static PLANS: RefCell<HashMap<Query, NonNull<pg_sys::_SPI_plan>>> = RefCell::new(HashMap::new());
}

/// Runs a query that only reads, and returns its rows as text. It sees all that is committed by
/// now, and the writes of this transaction's statements. In a transaction.
///
/// # Errors
/// XX000 if SPI refuses the query; PostgreSQL's own errors unwind.
pub fn rows(
    sql: &'static str,
    arguments: &[DatumWithOid<'_>],
) -> Result<Vec<Vec<Option<String>>>, PgError> {
    // With the snapshot of the transaction, later commits of others would not be seen in some
    // isolation levels.
    snapshot::latest(|| rows_in_snapshot(sql, arguments))
}

/// Runs a query as [`rows`] does, under the active snapshot: for several queries of one moment.
///
/// # Errors
/// Those of [`rows`].
pub fn rows_in_snapshot(
    sql: &'static str,
    arguments: &[DatumWithOid<'_>],
) -> Result<Vec<Vec<Option<String>>>, PgError> {
    let arguments = encoding::arguments(arguments);
    let Unpacked {
        types,
        mut values,
        nulls,
    } = Unpacked::new(&arguments);
    // SAFETY: SPI_connect and SPI_finish enclose all use of SPI's memory; an error in between
    // unwinds, and the abort cleans it up. The arrays have an entry for each argument and outlive
    // the call; a plan that is kept lives as long as the process.
    unsafe {
        pg_sys::SPI_connect();
        let plan = plan(sql, types)?;
        // The first execution plans, and each one after something that the plan depends on has
        // changed.
        let code = catalog::with_settings::<_, PgError>(&ONLY_LOOK_UPS, || {
            Ok(pg_sys::SPI_execute_plan(
                plan.as_ptr(),
                values.as_mut_ptr(),
                nulls.as_ptr(),
                true,
                0,
            ))
        })?;
        if code != pg_sys::SPI_OK_SELECT.cast_signed() {
            return Err(refused(code));
        }
        let found = catalog::collect().iter().map(<[_]>::to_vec).collect();
        pg_sys::SPI_finish();
        Ok(found)
    }
}

/// The plan of a query.
///
/// # Safety
/// SPI is connected.
unsafe fn plan(
    sql: &'static str,
    mut types: Vec<pg_sys::Oid>,
) -> Result<NonNull<pg_sys::_SPI_plan>, PgError> {
    let query = (sql.as_ptr().addr(), types.clone());
    if let Some(plan) = PLANS.with_borrow(|plans| plans.get(&query).copied()) {
        return Ok(plan);
    }
    let text = encoding::statement(sql);
    // SAFETY: as the caller says; the types have an entry for each argument.
    let code = unsafe {
        let plan = pg_sys::SPI_prepare_cursor(
            text.as_ptr(),
            c_int::try_from(types.len()).unwrap_or(0),
            types.as_mut_ptr(),
            pg_sys::CURSOR_OPT_GENERIC_PLAN.cast_signed(),
        );
        match NonNull::new(plan) {
            Some(plan) => match pg_sys::SPI_keepplan(plan.as_ptr()) {
                0 => {
                    PLANS.with_borrow_mut(|plans| plans.insert(query, plan));
                    return Ok(plan);
                }
                code => code,
            },
            None => pg_sys::SPI_result,
        }
    };
    Err(refused(code))
}

fn refused(code: c_int) -> PgError {
    PgError::new(
        SqlState::InternalError,
        format!("could not use braid's catalog: SPI failed with code {code}"),
    )
}
