//! Utility statements as a session executes them: outside of a transaction block, so that
//! statements run which commit while they run. Run by workers.
//!
//! Not for: statements in a transaction (`catalog`).

use std::ffi::CStr;

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::error::{PgError, abort, catch};
use crate::{encoding, memory, plain, snapshot, transaction};

/// Runs one utility statement. Nothing is open before, nor afterwards.
///
/// # Errors
/// 42601 for another number of statements; those of the statement. All that it has not committed by
/// itself is rolled back.
pub fn run(text: &str) -> Result<(), PgError> {
    let context = memory::Context::new(c"statement at the top level");
    let outcome = catch(|| {
        transaction::start();
        snapshot::push();
        // The tree has to outlive the transactions of the statement.
        let (planned, text) = context.run(|| planned(text))?;
        // SAFETY: a process of its own, in which no portal is open. PostgreSQL's commands keep
        // memory in this context that outlives their transactions.
        unsafe { pg_sys::PortalContext = context.as_ptr() };
        // Memory that PostgreSQL frees when the statement has ended outlives them too.
        context.run(|| execute(planned, text));
        // A statement that commits has taken the snapshot away.
        snapshot::pop();
        plain::CommitTransactionCommand();
        Ok(())
    });
    let outcome = outcome.and_then(|done| done);
    if outcome.is_err() {
        abort();
    }
    memory::Context::of_process().enter();
    outcome
}

/// The statement for execution, in the current context.
pub(crate) fn planned(text: &str) -> Result<(*mut pg_sys::PlannedStmt, &'static CStr), PgError> {
    let text = encoding::statement(text);
    // SAFETY: in a transaction. The copy of the text, the tree and the plan lie in the current
    // context, which stays until the process ends.
    unsafe {
        let text = CStr::from_ptr(pg_sys::pstrdup(text.as_ptr()));
        let parsed = pg_sys::pg_parse_query(text.as_ptr());
        if parsed.is_null() || (*parsed).length != 1 {
            return Err(PgError::new(
                SqlState::SyntaxError,
                "this is not one statement",
            ));
        }
        let raw = (*(*parsed).elements).ptr_value.cast::<pg_sys::RawStmt>();
        let size = size_of::<pg_sys::PlannedStmt>();
        let planned = pg_sys::palloc0(size).cast::<pg_sys::PlannedStmt>();
        (*planned).type_ = pg_sys::NodeTag::T_PlannedStmt;
        (*planned).commandType = pg_sys::CmdType::CMD_UTILITY;
        (*planned).canSetTag = true;
        (*planned).utilityStmt = (*raw).stmt;
        (*planned).stmt_location = (*raw).stmt_location;
        (*planned).stmt_len = (*raw).stmt_len;
        Ok((planned, text))
    }
}

fn execute(planned: *mut pg_sys::PlannedStmt, text: &CStr) {
    // SAFETY: in a transaction with an active snapshot, outside of a block; the statement is one
    // that `planned` has made. Nobody wants its result.
    unsafe { pg_sys::debug_query_string = text.as_ptr() };
    process(
        planned,
        text,
        pg_sys::ProcessUtilityContext::PROCESS_UTILITY_TOPLEVEL,
    );
}

/// Runs a statement that [`planned`] has made in the current transaction, with an active snapshot.
/// Raises the errors of the statement.
pub(crate) fn execute_within(planned: *mut pg_sys::PlannedStmt, text: &CStr) {
    process(
        planned,
        text,
        pg_sys::ProcessUtilityContext::PROCESS_UTILITY_QUERY,
    );
}

fn process(
    planned: *mut pg_sys::PlannedStmt,
    text: &CStr,
    context: pg_sys::ProcessUtilityContext::Type,
) {
    // SAFETY: in a transaction with an active snapshot; the statement is one that `planned` has
    // made. Nobody wants its result.
    unsafe {
        pg_sys::ProcessUtility(
            planned,
            text.as_ptr(),
            false,
            context,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            pg_sys::None_Receiver,
            std::ptr::null_mut(),
        );
    }
}
