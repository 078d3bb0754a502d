//! Checks of the tables that a statement is about to read and write, after PostgreSQL's own checks
//! of rights: of queries, statements in functions, triggers and cascades, views, and COPY. Run by
//! every session of a server that has the library preloaded.
//!
//! All relations of the range table count: from PostgreSQL 16 on, members of an inheritance tree
//! have no entry of their own among the rights. A relation that is locked to be written is written;
//! SELECT FOR UPDATE takes a weaker lock, and counts as reading.
//!
//! EXPLAIN without ANALYZE starts the executor and reads nothing, so it is not checked. Hooks are
//! chained as in `hook.rs`; the functions of this module have nothing with a destructor on their
//! stack.
//!
//! Not for: statements that write below the executor (TRUNCATE, DDL, appliers), and the rules of
//! refusal.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::compat;
use crate::error::{PgError, pass_on};
use crate::ffi::raw;
use crate::parse_tree::{List, tree};

/// A library's callbacks for the tables of statements.
#[derive(Debug)]
pub struct AccessWatch {
    /// Whether [`AccessWatch::check`] is to be called. Raises nothing.
    pub wants: fn() -> bool,
    /// Called with each table of a statement, and whether the statement writes it.
    pub check: fn(pg_sys::Oid, bool) -> Result<(), PgError>,
}

static WATCH: OnceLock<&'static AccessWatch> = OnceLock::new();
static NEXT_START: OnceLock<pg_sys::ExecutorStart_hook_type> = OnceLock::new();

thread_local! {
    /// The executor starts for EXPLAIN alone.
    static EXPLAINS: Cell<bool> = const { Cell::new(false) };
}

/// Starts to check statements. Called once, while the postmaster loads its libraries.
pub fn install(watch: &'static AccessWatch) {
    if WATCH.set(watch).is_err() {
        return;
    }
    compat::install_access_check();
    // SAFETY: the variable is set in the postmaster, which has one thread and no children yet, to a
    // function of this library, which is never unloaded.
    unsafe {
        if NEXT_START.set(pg_sys::ExecutorStart_hook).is_ok() {
            pg_sys::ExecutorStart_hook = Some(start);
        }
    }
}

/// An error may have ended an EXPLAIN. Called when a transaction, or a part of one, is rolled back.
pub fn forget_explain() {
    EXPLAINS.set(false);
}

unsafe extern "C-unwind" fn start(query: *mut pg_sys::QueryDesc, flags: c_int) {
    let next = NEXT_START.get().copied().flatten();
    let next = next.unwrap_or(raw::standard_ExecutorStart);
    EXPLAINS.set(flags.cast_unsigned() & pg_sys::EXEC_FLAG_EXPLAIN_ONLY != 0);
    // SAFETY: the next hook, or PostgreSQL's own function, gets PostgreSQL's arguments. There are
    // plain values only on the stack.
    unsafe { next(query, flags) };
    EXPLAINS.set(false);
}

/// Whether a statement may go on. Raises the error that forbids it, if `reports`.
///
/// # Safety
/// A range table, or null.
pub(crate) unsafe fn allows(range: *mut pg_sys::List, reports: bool) -> bool {
    let Some(watch) = WATCH.get() else {
        return true;
    };
    EXPLAINS.get() || !(watch.wants)() || checked(range, reports)
}

#[pgrx::pg_guard]
extern "C-unwind" fn checked(range: *mut pg_sys::List, reports: bool) -> bool {
    let Some(watch) = WATCH.get() else {
        return true;
    };
    pass_on(|| {
        // SAFETY: `allows` was given a range table, which stays as it is until the statement runs.
        let range: Option<List<'_>> = unsafe { tree(range) };
        let entries = range
            .into_iter()
            .flat_map(List::of::<pg_sys::RangeTblEntry>);
        for entry in entries {
            if entry.rtekind != pg_sys::RTEKind::RTE_RELATION {
                continue;
            }
            let writes = writes(&entry);
            match (watch.check)(entry.relid, writes) {
                Ok(()) => {}
                Err(error) if reports => error.raise(),
                Err(_) => return false,
            }
        }
        true
    })
}

/// Whether a relation of a statement is locked to be written.
pub(crate) fn writes(entry: &pg_sys::RangeTblEntry) -> bool {
    entry.rellockmode >= pg_sys::RowExclusiveLock.cast_signed()
}
