//! Tables by the names in a declaration, and the tables that a query reads and writes by
//! PostgreSQL's own parse and plan. Run in a session's transaction.
//!
//! Looking names up takes no snapshot that the transaction would keep, so a transaction that has to
//! wait before its snapshot can do it. Planning needs an active snapshot.

use std::ffi::{CStr, CString};

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys::{self, NodeTag};

use crate::access_check::writes;
use crate::compat;
use crate::encoding;
use crate::error::PgError;
use crate::lock::LockMode;
use crate::parse_tree::{List, Part, tree};
use crate::plain;
use crate::relation::Relation;

/// The relation that a name stands for, by the search path if it has no schema; `None` if there is
/// none.
#[must_use]
pub fn find(schema: Option<&str>, name: &str) -> Option<pg_sys::Oid> {
    let schema = match schema {
        Some(schema) => Some(encoding::name_here(schema)?),
        None => None,
    };
    find_raw(schema.as_deref(), &encoding::name_here(name)?)
}

/// As [`find`], of names in the server's encoding.
#[must_use]
pub fn find_raw(schema: Option<&CStr>, name: &CStr) -> Option<pg_sys::Oid> {
    let schema = schema.map_or(std::ptr::null_mut(), |schema| schema.as_ptr().cast_mut());
    let missing_ok = pg_sys::RVROption::RVR_MISSING_OK;
    // SAFETY: the names end with zero bytes and outlive the calls, which change nothing of them.
    let found = unsafe {
        let named = pg_sys::makeRangeVar(schema, name.as_ptr().cast_mut(), -1);
        let lock = pg_sys::NoLock.cast_signed();
        pg_sys::RangeVarGetRelidExtended(named, lock, missing_ok, None, std::ptr::null_mut())
    };
    (found != pg_sys::InvalidOid).then_some(found)
}

/// Whether the name of a relation stands for it without its schema.
#[must_use]
pub fn is_visible(relation: pg_sys::Oid) -> bool {
    // SAFETY: takes an OID; a relation that is gone is an error.
    unsafe { pg_sys::RelationIsVisible(relation) }
}

/// The tables that foreign keys of a table reference.
#[must_use]
pub fn referenced(table: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    let Some(open) = Relation::try_open(table, LockMode::AccessShare) else {
        return Vec::new();
    };
    // SAFETY: the relation is open, and the list is the relation cache's own until it is closed.
    let keys: Option<List<'_>> = unsafe { tree(pg_sys::RelationGetFKeyList(open.as_ptr())) };
    let keys = keys
        .into_iter()
        .flat_map(List::of::<pg_sys::ForeignKeyCacheInfo>);
    let referenced = keys.map(|key| key.confrelid).collect();
    open.close(LockMode::AccessShare);
    referenced
}

/// The relations of a query's plan, in order, and whether it writes each.
///
/// # Errors
/// 0A000 for a statement that is not planned, 42601 for several statements, and PostgreSQL's errors
/// about the query.
pub fn of_query(query: &str) -> Result<Vec<(pg_sys::Oid, bool)>, PgError> {
    let text = encoding::statement(query);
    let text: &CStr = text.as_c_str();
    // SAFETY: the text ends with a zero byte; the trees are allocated in the current context, which
    // outlives this function. In a transaction with an active snapshot.
    unsafe {
        let parsed: Option<List<'_>> = tree(pg_sys::pg_parse_query(text.as_ptr()));
        let mut statements = parsed.into_iter().flat_map(List::of::<pg_sys::RawStmt>);
        let (Some(statement), None) = (statements.next(), statements.next()) else {
            return Err(
                PgError::new(SqlState::SyntaxError, "a declaration is of one statement").with_hint(
                    "Declare the tables of each statement, and name them all in one declaration.",
                ),
            );
        };
        check_kind(statement)?;
        let (mut types, mut count) = (std::ptr::null_mut(), 0);
        let queries: Option<List<'_>> = tree(pg_sys::pg_analyze_and_rewrite_varparams(
            statement.as_ptr(),
            text.as_ptr(),
            &raw mut types,
            &raw mut count,
            std::ptr::null_mut(),
        ));
        let mut found = Vec::new();
        for query in queries.into_iter().flat_map(List::of::<pg_sys::Query>) {
            if query.commandType == pg_sys::CmdType::CMD_UTILITY {
                continue;
            }
            let planned: Option<Part<'_, pg_sys::PlannedStmt>> =
                tree(compat::plan_query(query.as_ptr(), text));
            let Some(planned) = planned else { continue };
            let range: Option<List<'_>> = tree(planned.rtable);
            let entries = range
                .into_iter()
                .flat_map(List::of::<pg_sys::RangeTblEntry>);
            let entries = entries.filter(|e| e.rtekind == pg_sys::RTEKind::RTE_RELATION);
            found.extend(entries.map(|entry| (entry.relid, writes(&entry))));
        }
        Ok(found)
    }
}

fn check_kind(statement: Part<'_, pg_sys::RawStmt>) -> Result<(), PgError> {
    // SAFETY: a raw statement has a tree.
    let tag = unsafe { tree(statement.stmt) }.map(crate::parse_tree::Node::tag);
    let is_planned = matches!(
        tag,
        Some(
            NodeTag::T_SelectStmt
                | NodeTag::T_InsertStmt
                | NodeTag::T_UpdateStmt
                | NodeTag::T_DeleteStmt
                | NodeTag::T_MergeStmt
        )
    );
    if is_planned {
        return Ok(());
    }
    Err(PgError::new(
        SqlState::FeatureNotSupported,
        "only SELECT, INSERT, UPDATE, DELETE and MERGE can be declared",
    )
    .with_hint("Name the tables of other statements, and of functions and triggers, yourself."))
}

/// The name of a setting as PostgreSQL's parser has it, in lower case.
#[must_use]
pub fn is_named(name: Option<&CStr>, wanted: &CStr) -> bool {
    name.is_some_and(|name| name.to_bytes().eq_ignore_ascii_case(wanted.to_bytes()))
}

/// Whether the transaction has taken the snapshot that all its statements see.
#[must_use]
pub fn has_snapshot() -> bool {
    plain::FirstSnapshotSet()
}

/// A text in the memory of the statement, for PostgreSQL's own variables.
pub(crate) fn kept(text: &str) -> *mut std::ffi::c_char {
    let text = CString::new(text).unwrap_or_default();
    // SAFETY: copies a string that ends with a zero byte into the current context.
    unsafe { pg_sys::pstrdup(text.as_ptr()) }
}
