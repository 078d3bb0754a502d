//! The whole of a PostgreSQL error: the fields of `ErrorData` (src/include/utils/elog.h) beside the
//! four texts of a [`PgError`].
//!
//! pgrx turns an error into a panic that carries SQLSTATE, message, detail and hint, and loses the
//! rest. A [`Watch`] is the outermost error context callback while `catch` runs: PostgreSQL calls
//! it with the error complete, after all callbacks of the code inside, and it keeps a copy.
//! [`raise`] raises such an error again: when pgrx reports the panic to PostgreSQL, another
//! callback adds the fields that the panic did not carry.
//!
//! Errors leave the PostgreSQL functions that this module calls by a long jump, so no value with a
//! destructor is alive while one is called.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::AssertUnwindSafe;

use pgrx::pg_sys;

use super::{INTERNAL_ERROR, PgError};
use crate::ffi::raw;
use crate::plain;

/// ERROR of src/include/utils/elog.h, 15 to 18.
pub(super) const ERROR: c_int = pgrx::PgLogLevel::ERROR as c_int;

/// The fields of an error that PostgreSQL raised.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields {
    sqlstate: c_int,
    message: Option<CString>,
    detail: Option<CString>,
    detail_log: Option<CString>,
    hint: Option<CString>,
    context: Option<CString>,
    /// The context as text, with the lines added since.
    said: Option<String>,
    schema: Option<CString>,
    table: Option<CString>,
    column: Option<CString>,
    data_type: Option<CString>,
    constraint: Option<CString>,
    internal_query: Option<CString>,
    position: c_int,
    internal_position: c_int,
    file: Option<CString>,
    line: c_int,
    function: Option<CString>,
}

/// Whether `carried` is pgrx's code for the SQLSTATE `raised`.
fn may_be(carried: c_int, raised: c_int) -> bool {
    carried == raised || carried == INTERNAL_ERROR
}

fn lossy(text: Option<&CString>) -> Option<String> {
    text.map(|text| text.to_string_lossy().into_owned())
}

impl Fields {
    /// # Safety
    /// The error's texts are null or C strings.
    unsafe fn of(data: &pg_sys::ErrorData) -> Self {
        let text = |text: *const c_char| {
            // SAFETY: as the caller says.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_owned())
        };
        Self {
            sqlstate: data.sqlerrcode,
            message: text(data.message),
            detail: text(data.detail),
            detail_log: text(data.detail_log),
            hint: text(data.hint),
            context: text(data.context),
            said: lossy(text(data.context).as_ref()),
            schema: text(data.schema_name),
            table: text(data.table_name),
            column: text(data.column_name),
            data_type: text(data.datatype_name),
            constraint: text(data.constraint_name),
            internal_query: text(data.internalquery),
            position: data.cursorpos,
            internal_position: data.internalpos,
            file: text(data.filename),
            line: data.lineno,
            function: text(data.funcname),
        }
    }

    /// Whether they are those of an error of which pgrx says this code and message.
    pub(super) fn are_of(&self, sqlstate: i32, message: &str) -> bool {
        may_be(sqlstate, self.sqlstate) && lossy(self.message.as_ref()).as_deref() == Some(message)
    }

    /// The SQLSTATE that PostgreSQL said.
    pub(super) fn code(&self) -> i32 {
        self.sqlstate
    }

    /// CONTEXT.
    pub(super) fn context(&self) -> Option<&str> {
        self.said.as_deref()
    }

    /// Adds a line to CONTEXT, after the existing ones.
    pub(super) fn add_context(&mut self, line: &str) {
        match &mut self.said {
            Some(said) => {
                said.push('\n');
                said.push_str(line);
            }
            None => self.said = Some(line.to_owned()),
        }
    }

    /// Schema and name of the table that the error is about, as PostgreSQL names them.
    #[must_use]
    pub fn table(&self) -> Option<(String, String)> {
        Some((lossy(self.schema.as_ref())?, lossy(self.table.as_ref())?))
    }

    /// The function of PostgreSQL's source that raised it.
    pub(super) fn function(&self) -> Option<String> {
        lossy(self.function.as_ref())
    }

    /// The column that it is about.
    #[must_use]
    pub fn column(&self) -> Option<String> {
        lossy(self.column.as_ref())
    }
}

/// Keeps the last error that PostgreSQL raises while it is installed.
pub(super) struct Watch {
    entry: pg_sys::ErrorContextCallback,
    seen: RefCell<Option<Box<Fields>>>,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            entry: pg_sys::ErrorContextCallback::default(),
            seen: RefCell::new(None),
        }
    }

    /// Do something under watch. A panic of `work` is the caller's to catch, who calls
    /// [`Watch::end`].
    pub(super) fn begin(&mut self) {
        // SAFETY: variables of the process. The caller keeps this value in its place until it has
        // called `end`.
        unsafe {
            self.entry.previous = pg_sys::error_context_stack;
            self.entry.callback = Some(keep);
            self.entry.arg = (&raw mut self.seen).cast();
            pg_sys::error_context_stack = &raw mut self.entry;
        }
    }

    /// Stops watching. Returns the error that was seen last.
    pub(super) fn end(&mut self) -> Option<Box<Fields>> {
        // SAFETY: puts back what `begin` found, whatever was left above it.
        unsafe { pg_sys::error_context_stack = self.entry.previous };
        self.seen.take()
    }
}

/// The error context callback of a [`Watch`]. PostgreSQL calls it in ErrorContext, for notices as
/// well.
unsafe extern "C-unwind" fn keep(seen: *mut c_void) {
    // SAFETY: the argument is the place of a watch that has not ended; the error that is being
    // reported is copied into a context that is not reset with it.
    unsafe {
        if is_critical() {
            return;
        }
        let data = copy_error();
        if (*data).elevel == ERROR {
            let seen = seen.cast::<RefCell<Option<Box<Fields>>>>();
            (*seen).replace(Some(Box::new(Fields::of(&*data))));
        }
        raw::FreeErrorData(data);
    }
}

/// Whether nothing may be allocated. From 18 on a read of a damaged page logs that in a critical
/// section. An error in a critical section ends the server, so it can't be caught.
fn is_critical() -> bool {
    plain::CritSectionCount() != 0
}

/// A copy of the error that is being reported, to be freed.
///
/// # Safety
/// In an error context callback.
unsafe fn copy_error() -> *mut pg_sys::ErrorData {
    // SAFETY: this runs in an error context callback. An error in it is raised as PostgreSQL raises
    // errors of callbacks.
    unsafe {
        let context = pg_sys::CurrentMemoryContext;
        pg_sys::CurrentMemoryContext = pg_sys::TopMemoryContext;
        let data = raw::CopyErrorData();
        pg_sys::CurrentMemoryContext = context;
        data
    }
}

/// An error as PostgreSQL's own structure, in the current memory context.
///
/// # Safety
/// To be freed with [`free`].
unsafe fn allocate(level: c_int, error: &PgError) -> *mut pg_sys::ErrorData {
    let plain = |text: &str| CString::new(text.replace('\0', "")).unwrap_or_default();
    // PostgreSQL's texts are returned unchanged, in the server's encoding; only texts that were
    // changed since are converted.
    let best = |now: Option<&str>, then: Option<&CString>| {
        now.map(|now| match then {
            Some(then) if then.to_string_lossy() == now => then.clone(),
            _ => plain(now),
        })
    };
    let none = Fields::default();
    let fields = error.fields.as_deref().unwrap_or(&none);
    let message = best(Some(&error.message), fields.message.as_ref());
    let detail = best(error.detail.as_deref(), fields.detail.as_ref());
    let hint = best(error.hint.as_deref(), fields.hint.as_ref());
    let context = best(error.context(), fields.context.as_ref());
    // SAFETY: palloc gives zeroed memory of the right size and alignment, pstrdup copies; both
    // raise errors as panics.
    unsafe {
        let copy = |text: Option<&CString>| {
            text.map_or(std::ptr::null_mut(), |text| pg_sys::pstrdup(text.as_ptr()))
        };
        let data = pg_sys::palloc0(size_of::<pg_sys::ErrorData>()).cast::<pg_sys::ErrorData>();
        (*data).elevel = level;
        (*data).sqlerrcode = error.sqlstate.packed();
        (*data).message = copy(message.as_ref());
        (*data).detail = copy(detail.as_ref());
        (*data).detail_log = copy(fields.detail_log.as_ref());
        (*data).hint = copy(hint.as_ref());
        (*data).context = copy(context.as_ref());
        (*data).schema_name = copy(fields.schema.as_ref());
        (*data).table_name = copy(fields.table.as_ref());
        (*data).column_name = copy(fields.column.as_ref());
        (*data).datatype_name = copy(fields.data_type.as_ref());
        (*data).constraint_name = copy(fields.constraint.as_ref());
        (*data).internalquery = copy(fields.internal_query.as_ref());
        (*data).cursorpos = fields.position;
        (*data).internalpos = fields.internal_position;
        (*data).filename = copy(fields.file.as_ref());
        (*data).lineno = fields.line;
        (*data).funcname = copy(fields.function.as_ref());
        data
    }
}

/// # Safety
/// `data` came from [`allocate`], and is not used any more.
unsafe fn free(data: *mut pg_sys::ErrorData) {
    // SAFETY: as the caller says. PostgreSQL frees neither of the two, as its own are constants.
    unsafe {
        for text in [(*data).filename, (*data).funcname] {
            if !text.is_null() {
                pg_sys::pfree(text.cast_mut().cast());
            }
        }
        pg_sys::FreeErrorData(data);
    }
}

/// Report a message of a level below ERROR, with its context.
pub(super) fn report(level: c_int, error: &PgError) {
    // SAFETY: PostgreSQL copies the data that it reports.
    unsafe {
        let data = allocate(level, error);
        pg_sys::ThrowErrorData(data);
        free(data);
    }
}

/// Write an error to the server's log as one, and go on.
pub(super) fn log_as_error(error: &PgError) {
    // SAFETY: as an error handler of PostgreSQL's own workers does it: the error is put on
    // PostgreSQL's stack of errors, reported, and taken off again. Nothing is raised.
    unsafe {
        let data = allocate(ERROR, error);
        let text = |text: *mut c_char| {
            if text.is_null() {
                c"".as_ptr()
            } else {
                text.cast_const()
            }
        };
        pg_sys::ffi::pg_guard_ffi_boundary(|| {
            if raw::errstart(ERROR, std::ptr::null()) {
                raw::errcode((*data).sqlerrcode);
                raw::errmsg_internal(c"%s".as_ptr(), text((*data).message));
                if !(*data).detail.is_null() {
                    raw::errdetail_internal(c"%s".as_ptr(), text((*data).detail));
                }
                if !(*data).hint.is_null() {
                    raw::errhint(c"%s".as_ptr(), text((*data).hint));
                }
                complete_with(data);
                let context = pg_sys::CurrentMemoryContext;
                raw::EmitErrorReport();
                raw::FlushErrorState();
                pg_sys::CurrentMemoryContext = context;
            }
        });
        free(data);
    }
}

/// Adds to the error that is being reported the fields that a panic of pgrx does not carry.
///
/// # Safety
/// While an error is put together. May raise one.
unsafe fn complete_with(data: *const pg_sys::ErrorData) {
    // SAFETY: PostgreSQL copies the texts.
    unsafe {
        let percent = c"%s".as_ptr();
        if !(*data).detail_log.is_null() {
            raw::errdetail_log(percent, (*data).detail_log.cast_const());
        }
        if !(*data).context.is_null() {
            raw::set_errcontext_domain(std::ptr::null());
            raw::errcontext_msg(percent, (*data).context.cast_const());
        }
        for (field, text) in [
            (pg_sys::PG_DIAG_SCHEMA_NAME, (*data).schema_name),
            (pg_sys::PG_DIAG_TABLE_NAME, (*data).table_name),
            (pg_sys::PG_DIAG_COLUMN_NAME, (*data).column_name),
            (pg_sys::PG_DIAG_DATATYPE_NAME, (*data).datatype_name),
            (pg_sys::PG_DIAG_CONSTRAINT_NAME, (*data).constraint_name),
        ] {
            if !text.is_null() {
                raw::err_generic_string(c_int::from(field), text);
            }
        }
        if (*data).cursorpos > 0 {
            raw::errposition((*data).cursorpos);
        }
        if (*data).internalpos > 0 {
            raw::internalerrposition((*data).internalpos);
        }
        if !(*data).internalquery.is_null() {
            raw::internalerrquery((*data).internalquery);
        }
    }
}

thread_local! {
    /// The error that passes through Rust as a panic, in TopMemoryContext; null while none does.
    static PASSING: Cell<*mut pg_sys::ErrorData> = const { Cell::new(std::ptr::null_mut()) };
    /// The callback that completes it; made once.
    static COMPLETER: Cell<*mut pg_sys::ErrorContextCallback> = const { Cell::new(std::ptr::null_mut()) };
}

/// Raise it, with all of its fields.
pub(super) fn raise(error: PgError) -> ! {
    // SAFETY: the copy is in a context that outlives the error. ThrowErrorData copies it, and
    // leaves by a long jump to pgrx's guard, where nothing but a pointer is on the stack.
    let (data, outcome) = unsafe {
        let context = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        let data = allocate(ERROR, &error);
        pg_sys::MemoryContextSwitchTo(context);
        drop(error);
        let thrown = AssertUnwindSafe(|| pg_sys::ThrowErrorData(data));
        (data, std::panic::catch_unwind(thrown))
    };
    pass(data);
    match outcome {
        Err(panic) => std::panic::resume_unwind(panic),
        Ok(()) => unreachable!("ereport(ERROR) does not return"),
    }
}

/// Have the error that is raised next, which is this one, completed where pgrx reports it.
fn pass(data: *mut pg_sys::ErrorData) {
    let before = PASSING.replace(data);
    // SAFETY: from `allocate`; nobody else has it.
    unsafe {
        if !before.is_null() {
            free(before);
        }
        let mut completer = COMPLETER.get();
        if completer.is_null() {
            completer = Box::leak(Box::<pg_sys::ErrorContextCallback>::default());
            (*completer).callback = Some(complete);
            COMPLETER.set(completer);
        }
        // Once in the list, also if an earlier error still passes.
        let mut place = &raw mut pg_sys::error_context_stack;
        while !(*place).is_null() {
            if *place == completer {
                *place = (*completer).previous;
            } else {
                place = &raw mut (**place).previous;
            }
        }
        (*completer).previous = pg_sys::error_context_stack;
        pg_sys::error_context_stack = completer;
    }
}

/// The error context callback above those of an error that passes. The code that catches the error
/// takes it off the list.
unsafe extern "C-unwind" fn complete(_: *mut c_void) {
    let passing = PASSING.get();
    if passing.is_null() || is_critical() {
        return;
    }
    // SAFETY: in an error context callback; the passing error was allocated by `allocate`.
    unsafe {
        let data = copy_error();
        let is_it = (*data).elevel == ERROR
            && may_be((*data).sqlerrcode, (*passing).sqlerrcode)
            && same_text((*data).message, (*passing).message);
        raw::FreeErrorData(data);
        if is_it {
            PASSING.set(std::ptr::null_mut());
            raw::errcode((*passing).sqlerrcode);
            complete_with(passing);
            free(passing);
        }
    }
}

/// # Safety
/// Both are null or C strings.
unsafe fn same_text(one: *const c_char, other: *const c_char) -> bool {
    if one.is_null() || other.is_null() {
        return one == other;
    }
    // SAFETY: both are texts that end with a zero byte. pgrx carries a message as UTF-8, and
    // replaces invalid bytes by a mark.
    unsafe { CStr::from_ptr(one).to_string_lossy() == CStr::from_ptr(other).to_string_lossy() }
}
