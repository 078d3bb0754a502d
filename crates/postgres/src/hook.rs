//! PostgreSQL's hooks around statements and access to objects. Run by every session of a server
//! that has the library preloaded.
//!
//! Hooks are chained as PostgreSQL's own modules do it. Code of the library runs under pgrx's
//! guard. The statement itself, and hooks of other libraries, are plain calls without a guard:
//! PostgreSQL's errors pass unchanged, and leave this module's functions by a long jump. So these
//! have nothing with a destructor on their stack.
//!
//! Not for: the library's actions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::sync::OnceLock;

use braid_bgworker::sql_text::Edit;
use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::error::{PgError, pass_on};
use crate::ffi::raw;
use crate::parse_tree::{Node, tree};
use crate::{encoding, plain, role_statement, schema_statement};

/// A library's callbacks around statements. Those that raise nothing are called without a guard.
#[derive(Debug)]
pub struct Watch {
    /// A statement of any kind begins. Returns which of its errors are explained. The function
    /// raises errors behind a guard of its own, and has nothing with a destructor on its stack.
    pub begins: fn() -> Option<&'static Explanation>,
    /// Whether [`Watch::before`] is to be called for a utility statement. Raises nothing.
    pub wants: fn(Utility<'_>) -> bool,
    /// A utility statement begins. Returns what [`Watch::after`] gets when it has succeeded; 0: it
    /// is not called.
    pub before: fn(Utility<'_>) -> u8,
    /// A utility statement has succeeded.
    pub after: fn(u8),
    /// Accesses to objects.
    pub objects: &'static [ObjectWatch],
}

/// A library's callback for accesses to objects.
#[derive(Debug)]
pub struct ObjectWatch {
    /// The kind of access.
    pub access: pg_sys::ObjectAccessType::Type,
    /// The catalog that the object is in.
    pub class: pg_sys::Oid,
    /// Called with the OID of the object.
    pub handler: fn(pg_sys::Oid),
}

impl ObjectWatch {
    fn is_of(&self, access: pg_sys::ObjectAccessType::Type, class: pg_sys::Oid) -> bool {
        self.access == access && self.class == class
    }
}

/// A hint for errors with an SQLSTATE.
#[derive(Debug)]
pub struct Explanation {
    /// The SQLSTATE.
    pub sqlstate: SqlState,
    /// The hint, in ASCII.
    pub hint: &'static CStr,
}

/// A utility statement that begins, in its transaction.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Utility<'s> {
    planned: *const pg_sys::PlannedStmt,
    text: *const c_char,
    context: pg_sys::ProcessUtilityContext::Type,
    lives: PhantomData<&'s pg_sys::PlannedStmt>,
}

impl<'s> Utility<'s> {
    fn planned(self) -> &'s pg_sys::PlannedStmt {
        // SAFETY: PostgreSQL has passed a statement to the hook, and runs it for `'s`.
        unsafe { &*self.planned }
    }

    /// The statement's tree.
    #[must_use]
    pub fn node(self) -> Option<Node<'s>> {
        // SAFETY: the tree belongs to the statement. It stays as it is until the statement runs.
        unsafe { tree(self.planned().utilityStmt) }
    }

    /// The statement's text.
    #[must_use]
    pub fn text(self) -> String {
        let planned = self.planned();
        // SAFETY: PostgreSQL passes the text that the statement is in, a C string, to the hook.
        let text = unsafe { CStr::from_ptr(self.text) };
        schema_statement::text_of(text, planned.stmt_location, planned.stmt_len)
    }

    /// The statement's text, with edits.
    ///
    /// # Errors
    /// 0A000 where a part is not where the statement says.
    pub fn text_with(self, edits: &[Edit]) -> Result<String, PgError> {
        let planned = self.planned();
        // SAFETY: as of `text`.
        let text = unsafe { CStr::from_ptr(self.text) };
        let place = usize::try_from(planned.stmt_location).unwrap_or(0);
        let rest = text.to_bytes().get(place..).unwrap_or_default();
        let part = match usize::try_from(planned.stmt_len) {
            Ok(length) if length > 0 => rest.get(..length).unwrap_or(rest),
            _ => rest,
        };
        let text = role_statement::edited(part, place, edits)?;
        Ok(encoding::utf8(&text).trim().to_owned())
    }

    /// Whether it is a part of another utility statement.
    #[must_use]
    pub fn is_part(self) -> bool {
        self.context == pg_sys::ProcessUtilityContext::PROCESS_UTILITY_SUBCOMMAND
    }

    /// Whether it is in a transaction block, or in a function.
    #[must_use]
    pub fn is_in_block(self) -> bool {
        let top_level = self.context == pg_sys::ProcessUtilityContext::PROCESS_UTILITY_TOPLEVEL;
        plain::IsInTransactionBlock(top_level)
    }
}

/// The previous hooks.
#[derive(Debug)]
struct Chain {
    watch: &'static Watch,
    start: pg_sys::ExecutorStart_hook_type,
    utility: pg_sys::ProcessUtility_hook_type,
    access: pg_sys::object_access_hook_type,
}

static CHAIN: OnceLock<Chain> = OnceLock::new();

/// Starts to watch statements. Called once, while the postmaster loads its libraries: every session
/// inherits it.
pub fn install(watch: &'static Watch) {
    // SAFETY: the variables are set in the postmaster, which has one thread and no children yet, to
    // functions of this library, which is never unloaded.
    unsafe {
        let before = Chain {
            watch,
            start: pg_sys::ExecutorStart_hook,
            utility: pg_sys::ProcessUtility_hook,
            access: pg_sys::object_access_hook,
        };
        if CHAIN.set(before).is_ok() {
            pg_sys::ExecutorStart_hook = Some(start);
            pg_sys::ProcessUtility_hook = Some(utility);
            pg_sys::object_access_hook = Some(on_access);
        }
    }
}

/// Adds why to PostgreSQL's error.
unsafe extern "C-unwind" fn explain(explanation: *mut c_void) {
    // SAFETY: PostgreSQL calls this while it puts an error together, with the argument that
    // `explained` has given: an explanation that lives as long as the process.
    unsafe {
        let explanation = &*explanation.cast::<Explanation>();
        if raw::geterrcode() == explanation.sqlstate.packed() {
            raw::errhint(explanation.hint.as_ptr());
        }
    }
}

/// Runs `work`, whose errors get an explanation if there is one. If `work` leaves by a long jump,
/// PostgreSQL takes back its list of callbacks itself.
///
/// # Safety
/// Nothing with a destructor is in the closure, or on the stack up to PostgreSQL's call.
unsafe fn explained(explanation: Option<&'static Explanation>, work: impl FnOnce()) {
    let Some(explanation) = explanation else {
        return work();
    };
    // SAFETY: a variable of the process. The entry is on the list for as long as this function
    // runs.
    unsafe {
        let mut entry = pg_sys::ErrorContextCallback {
            previous: pg_sys::error_context_stack,
            callback: Some(explain),
            arg: std::ptr::from_ref(explanation).cast_mut().cast(),
        };
        pg_sys::error_context_stack = &raw mut entry;
        work();
        pg_sys::error_context_stack = entry.previous;
    }
}

/// A query begins.
unsafe extern "C-unwind" fn start(query: *mut pg_sys::QueryDesc, flags: c_int) {
    let chain = CHAIN.get();
    let next = chain.and_then(|chain| chain.start);
    let next = next.unwrap_or(raw::standard_ExecutorStart);
    let explanation = chain.and_then(|chain| (chain.watch.begins)());
    // SAFETY: the next hook, or PostgreSQL's own function, gets PostgreSQL's arguments. There are
    // pointers and numbers only on the stack.
    unsafe { explained(explanation, || next(query, flags)) };
}

/// A utility statement.
#[allow(
    clippy::too_many_arguments,
    reason = "the signature of PostgreSQL's hook"
)]
unsafe extern "C-unwind" fn utility(
    planned: *mut pg_sys::PlannedStmt,
    text: *const c_char,
    read_only_tree: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    parameters: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    receiver: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    let chain = CHAIN.get();
    let next = chain.and_then(|chain| chain.utility);
    let next = next.unwrap_or(raw::standard_ProcessUtility);
    let explanation = chain.and_then(|chain| (chain.watch.begins)());
    let statement = Utility {
        planned,
        text,
        context,
        lives: PhantomData,
    };
    let run = || {
        let wanted = chain.is_some_and(|chain| (chain.watch.wants)(statement));
        let followed = if wanted { before(statement) } else { 0 };
        // SAFETY: the next hook, or PostgreSQL's own function, gets PostgreSQL's arguments.
        unsafe {
            next(
                planned,
                text,
                read_only_tree,
                context,
                parameters,
                environment,
                receiver,
                completion,
            );
        }
        if followed != 0 {
            after(followed);
        }
    };
    // SAFETY: there are pointers, numbers and flags only on the stack.
    unsafe { explained(explanation, run) };
}

#[pgrx::pg_guard]
extern "C-unwind" fn before(statement: Utility<'_>) -> u8 {
    let watch = CHAIN.get().map(|chain| chain.watch);
    pass_on(|| watch.map_or(0, |watch| (watch.before)(statement)))
}

#[pgrx::pg_guard]
extern "C-unwind" fn after(followed: u8) {
    if let Some(chain) = CHAIN.get() {
        pass_on(|| (chain.watch.after)(followed));
    }
}

/// An object is created, altered, dropped or used. The hook of another library comes first.
unsafe extern "C-unwind" fn on_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    part: c_int,
    argument: *mut c_void,
) {
    let Some(chain) = CHAIN.get() else {
        return;
    };
    if let Some(previous) = chain.access {
        // SAFETY: the previous hook gets PostgreSQL's arguments.
        unsafe { previous(access, class, object, part, argument) };
    }
    let mut objects = chain.watch.objects.iter();
    if part == 0 && objects.any(|watched| watched.is_of(access, class)) {
        accessed(access, class, object);
    }
}

#[pgrx::pg_guard]
extern "C-unwind" fn accessed(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
) {
    let objects = CHAIN.get().map_or(&[][..], |chain| chain.watch.objects);
    for watched in objects {
        if watched.is_of(access, class) {
            pass_on(|| (watched.handler)(object));
        }
    }
}
