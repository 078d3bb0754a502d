//! Settings of text whose values are checked, and that only one place may set: the hooks that
//! PostgreSQL calls, and how a refusal gets its SQLSTATE, detail and hint.
//!
//! PostgreSQL calls a check also where nothing is set in the end: for ALTER ROLE, CREATE FUNCTION,
//! configuration files. So a check only looks.

use std::ffi::{CStr, c_char};

use pgrx::pg_sys;

use crate::declared_tables::kept;
use crate::encoding;
use crate::error::{PgError, pass_on};
use crate::plain;

/// A setting.
#[derive(Debug)]
pub struct TextSetting {
    /// The setting's name.
    pub name: &'static CStr,
    /// The first line of its description.
    pub short: &'static CStr,
    /// The rest of its description.
    pub long: &'static CStr,
    /// PostgreSQL's hook, made by [`crate::check_hook`].
    pub hook: pg_sys::GucStringCheckHook,
}

/// Where PostgreSQL keeps a setting's value. Only PostgreSQL reads and writes it.
#[derive(Debug)]
pub struct Place(std::cell::UnsafeCell<*mut c_char>);

// SAFETY: PostgreSQL's one thread uses it.
unsafe impl Sync for Place {}

impl Place {
    /// An empty one.
    #[must_use]
    pub const fn new() -> Self {
        Self(std::cell::UnsafeCell::new(std::ptr::null_mut()))
    }
}

impl Default for Place {
    fn default() -> Self {
        Self::new()
    }
}

/// Defines a setting that every user may set in a session, and no configuration file.
pub fn define(setting: &TextSetting, place: &'static Place) {
    // SAFETY: texts and place live as long as the process; the hook has PostgreSQL's signature.
    unsafe {
        pg_sys::DefineCustomStringVariable(
            setting.name.as_ptr(),
            setting.short.as_ptr(),
            setting.long.as_ptr(),
            place.0.get(),
            c"".as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            (pg_sys::GUC_NOT_IN_SAMPLE | pg_sys::GUC_DISALLOW_IN_FILE).cast_signed(),
            setting.hook,
            None,
            None,
        );
    }
}

/// The body of a setting's hook: asks `check` for a value that is not empty. A parallel worker
/// takes over the value that its leader was allowed.
///
/// # Safety
/// As PostgreSQL calls the hook.
pub unsafe fn checked(value: *mut *mut c_char, check: fn(&str) -> Result<(), PgError>) -> bool {
    // SAFETY: PostgreSQL passes the place of a value: null, or a text that ends with a zero byte.
    let text = unsafe {
        let value = if value.is_null() {
            std::ptr::null_mut()
        } else {
            *value
        };
        if value.is_null() {
            return true;
        }
        CStr::from_ptr(value)
    };
    if text.is_empty() || plain::InitializingParallelWorker() || plain::ParallelWorkerNumber() >= 0
    {
        return true;
    }
    pass_on(|| match check(&encoding::utf8(text)) {
        Ok(()) => true,
        Err(error) => {
            report(&error);
            false
        }
    })
}

/// Has PostgreSQL raise the error.
fn report(error: &PgError) {
    // SAFETY: plain pointers of this process, read by PostgreSQL right after the hook.
    unsafe {
        pg_sys::GUC_check_errcode(error.sqlstate.packed());
        pg_sys::GUC_check_errmsg_string = kept(&error.message);
        if let Some(detail) = &error.detail {
            pg_sys::GUC_check_errdetail_string = kept(detail);
        }
        if let Some(hint) = &error.hint {
            pg_sys::GUC_check_errhint_string = kept(hint);
        }
    }
}

/// Makes PostgreSQL's hook of a check.
#[macro_export]
macro_rules! check_hook {
    ($name:ident, $check:path) => {
        #[pgrx::pg_guard]
        unsafe extern "C-unwind" fn $name(
            value: *mut *mut ::std::ffi::c_char,
            _extra: *mut *mut ::std::ffi::c_void,
            _source: ::pgrx::pg_sys::GucSource::Type,
        ) -> bool {
            // SAFETY: PostgreSQL calls the hook.
            unsafe { $crate::text_setting::checked(value, $check) }
        }
    };
}
