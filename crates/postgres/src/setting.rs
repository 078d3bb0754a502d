//! Settings for the time of a call: a level of settings, restored at its end, or by the rollback
//! after an error. Run in a transaction.
//!
//! Not for: the choice of settings, which each caller knows.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::plain;

/// Settings under which values have the same text in every session, but for `timezone` and
/// `search_path`. Every user may set them.
pub const OF_TEXTS: [(&CStr, &CStr); 5] = [
    (c"datestyle", c"ISO"),
    (c"intervalstyle", c"postgres"),
    (c"extra_float_digits", c"3"),
    (c"bytea_output", c"hex"),
    (c"lc_monetary", c"C"),
];

/// The rights that a setting needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum As {
    /// Every user may.
    User,
    /// A superuser may.
    Superuser,
}

/// A level of settings. Levels end in the order opposite to that in which they began.
#[derive(Debug)]
pub struct Level(i32);

impl Level {
    /// Begins a level.
    #[must_use]
    pub fn begin() -> Self {
        Self(plain::NewGUCNestLevel())
    }

    /// Sets a setting until the level ends.
    pub fn set(&self, name: &CStr, value: &CStr, rights: As) {
        change(name, value, rights, pg_sys::GucAction::GUC_ACTION_SAVE);
    }

    /// Ends the level, with those that are above it: puts all settings back that were changed in
    /// it. `keeps` says whether those stay that were set for the whole transaction or session.
    pub fn end(self, keeps: bool) {
        // SAFETY: `begin` has made the level, which ends once.
        unsafe { pg_sys::AtEOXact_GUC(keeps, self.0) };
    }
}

/// Sets a setting for the session. Outside of a transaction too.
pub fn set_for_session(name: &CStr, value: &CStr, rights: As) {
    change(name, value, rights, pg_sys::GucAction::GUC_ACTION_SET);
}

fn change(name: &CStr, value: &CStr, rights: As, action: pg_sys::GucAction::Type) {
    let context = match rights {
        As::User => pg_sys::GucContext::PGC_USERSET,
        As::Superuser => pg_sys::GucContext::PGC_SUSET,
    };
    // SAFETY: both end with a zero byte, and are copied. PostgreSQL refuses unknown and forbidden
    // settings with an error.
    unsafe {
        pg_sys::set_config_option(
            name.as_ptr(),
            value.as_ptr(),
            context,
            pg_sys::GucSource::PGC_S_SESSION,
            action,
            true,
            0,
            false,
        );
    }
}

/// The value of a setting that exists; `None` if it has none.
#[must_use]
pub fn get(name: &CStr) -> Option<std::ffi::CString> {
    value(name, false)
}

/// The value of a setting that may not exist; `None` if it does not, or has no value.
#[must_use]
pub fn find(name: &CStr) -> Option<std::ffi::CString> {
    value(name, true)
}

fn value(name: &CStr, missing_ok: bool) -> Option<std::ffi::CString> {
    // SAFETY: the name ends with a zero byte. The value, if there is one, is a string that ends
    // with one, and is copied.
    unsafe {
        let value = pg_sys::GetConfigOption(name.as_ptr(), missing_ok, false);
        (!value.is_null()).then(|| CStr::from_ptr(value).to_owned())
    }
}
