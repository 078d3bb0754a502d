//! The options that a stream was started with, as text.

use std::ffi::c_char;

use braid_postgres::decoding::Context;
use braid_postgres::encoding;
use pgrx::pg_sys;

/// The options of the decoding context.
pub fn given_options(ctx: Context<'_>) -> Vec<(String, Option<String>)> {
    ctx.options()
        .map(|option| option.name_and_string())
        .collect()
}

/// A list of identifiers, as SQL reads it.
pub fn split_identifiers(list: &str) -> Option<Vec<String>> {
    let text = encoding::to_server(list)?;
    let mut parts = std::ptr::null_mut();
    // SAFETY: the function writes into its copy of the text; the list's cells point into that.
    unsafe {
        let text = pg_sys::pstrdup(text.as_ptr());
        let separator = c_char::try_from(b',').ok()?;
        if !pg_sys::SplitIdentifierString(text, separator, &raw mut parts) {
            return None;
        }
        if parts.is_null() {
            return Some(Vec::new());
        }
        let len = usize::try_from((*parts).length).unwrap_or_default();
        let cells = std::slice::from_raw_parts((*parts).elements, len);
        Some(
            cells
                .iter()
                .map(|cell| encoding::from_server(cell.ptr_value.cast()))
                .collect(),
        )
    }
}
