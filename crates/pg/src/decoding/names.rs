//! Names between the server's encoding and UTF-8, in which GIR has them.

use std::ffi::{CStr, CString, c_char};

use pgrx::pg_sys;

const SQL_ASCII: i32 = pg_sys::pg_enc::PG_SQL_ASCII.cast_signed();
const UTF8: i32 = pg_sys::pg_enc::PG_UTF8.cast_signed();

/// A name as UTF-8. What is not valid (possible where the server's encoding is SQL_ASCII) becomes U+FFFD.
///
/// # Safety
/// `name` is null or a C string.
pub(super) unsafe fn from_server(name: *const c_char) -> String {
    if name.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a C string as the caller says.
    let bytes = unsafe { CStr::from_ptr(name) };
    if bytes.to_bytes().is_ascii() || is_verbatim() {
        return bytes.to_string_lossy().into_owned();
    }
    let len = i32::try_from(bytes.count_bytes()).unwrap_or_default();
    // SAFETY: a string of that length; the answer is the same string or a new one in the current context.
    let converted = unsafe { pg_sys::pg_server_to_any(name, len, UTF8) };
    if converted.is_null() {
        return bytes.to_string_lossy().into_owned();
    }
    // SAFETY: conversions end with a zero byte.
    unsafe { CStr::from_ptr(converted) }
        .to_string_lossy()
        .into_owned()
}

/// A name for PostgreSQL, in the server's encoding; `None` if it has a zero byte.
pub(super) fn to_server(name: &str) -> Option<CString> {
    let utf8 = CString::new(name).ok()?;
    if name.is_ascii() || is_verbatim() {
        return Some(utf8);
    }
    let len = i32::try_from(name.len()).ok()?;
    // SAFETY: a string of that length; the answer is the same string or a new one in the current context.
    let converted = unsafe { pg_sys::pg_any_to_server(utf8.as_ptr(), len, UTF8) };
    if converted.is_null() {
        return Some(utf8);
    }
    // SAFETY: conversions end with a zero byte.
    Some(unsafe { CStr::from_ptr(converted) }.to_owned())
}

/// Text of a value as UTF-8; `None` where a conversion can't be had.
pub(super) fn text_from_server(text: &[u8]) -> Option<String> {
    let len = i32::try_from(text.len()).ok()?;
    // SAFETY: a string of that length; the answer is the same string or a new one in the current context, which ends with a
    // zero byte.
    unsafe {
        let converted = pg_sys::pg_server_to_any(text.as_ptr().cast(), len, UTF8);
        if converted.is_null() || converted.cast_const() == text.as_ptr().cast() {
            return std::str::from_utf8(text).ok().map(str::to_owned);
        }
        CStr::from_ptr(converted).to_str().ok().map(str::to_owned)
    }
}

/// Whether the server's encoding is UTF8.
pub(crate) fn is_utf8() -> bool {
    // SAFETY: reads a variable.
    unsafe { pg_sys::GetDatabaseEncoding() == UTF8 }
}

fn is_verbatim() -> bool {
    // SAFETY: reads a variable.
    let encoding = unsafe { pg_sys::GetDatabaseEncoding() };
    encoding == UTF8 || encoding == SQL_ASCII
}

/// Schema and name of a relation that the relation cache holds.
///
/// # Safety
/// `relation` is valid; in a transaction.
pub(super) unsafe fn of_relation(relation: pg_sys::Relation) -> (String, String) {
    // SAFETY: as the caller says; the namespace's name is in the current context or null.
    unsafe {
        let form = &*(*relation).rd_rel;
        (
            from_server(pg_sys::get_namespace_name(form.relnamespace)),
            from_server(form.relname.data.as_ptr()),
        )
    }
}
