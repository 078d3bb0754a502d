//! PostgreSQL's own COPY FROM, fed by a function of this process.

use std::cell::Cell;
use std::ffi::{CString, c_int, c_void};

use pgrx::pg_sys;

use crate::error::PgError;
use crate::lock::LockMode;
use crate::relation::Relation;

/// Fills the room with COPY's text form. It waits only while it has less than the given number of
/// bytes; a shorter result ends the data. Returns the number of bytes.
pub type Read = fn(&mut [u8], usize) -> Result<usize, PgError>;

thread_local! {
    /// COPY's callback has no argument of its own.
    static READ: Cell<Option<Read>> = const { Cell::new(None) };
}

/// COPY relation (columns) FROM what `read` gives, in the server's encoding. Returns the number of
/// rows. Run in a transaction with an active snapshot; an error of `read` is raised.
#[must_use]
pub fn copy_from(relation: &Relation, columns: &[CString], read: Read) -> u64 {
    READ.set(Some(read));
    // SAFETY: the relation is open and locked. The lists, their strings and the parse state are
    // allocated in the transaction's memory, which outlives the COPY. The callback belongs to this
    // library.
    let rows = unsafe {
        let state = pg_sys::make_parsestate(std::ptr::null_mut());
        let _ = pg_sys::addRangeTableEntryForRelation(
            state,
            relation.as_ptr(),
            LockMode::AccessShare.as_raw(),
            std::ptr::null_mut(),
            false,
            false,
        );
        let mut names = std::ptr::null_mut();
        for column in columns {
            let name = pg_sys::makeString(pg_sys::pstrdup(column.as_ptr()));
            names = pg_sys::lappend(names, name.cast());
        }
        let encoding = pg_sys::pstrdup(pg_sys::GetDatabaseEncodingName());
        let option = pg_sys::makeDefElem(
            pg_sys::pstrdup(c"encoding".as_ptr()),
            pg_sys::makeString(encoding).cast(),
            -1,
        );
        let copy = pg_sys::BeginCopyFrom(
            state,
            relation.as_ptr(),
            std::ptr::null_mut(),
            std::ptr::null(),
            false,
            Some(read_data),
            names,
            pg_sys::lappend(std::ptr::null_mut(), option.cast()),
        );
        let rows = pg_sys::CopyFrom(copy);
        pg_sys::EndCopyFrom(copy);
        pg_sys::free_parsestate(state);
        rows
    };
    READ.set(None);
    rows
}

/// `copy_data_source_cb` of src/include/commands/copy.h, 15 to 18: at least `minimum` bytes, unless
/// the data ends.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn read_data(out: *mut c_void, minimum: c_int, maximum: c_int) -> c_int {
    let room = usize::try_from(maximum).unwrap_or(0);
    // SAFETY: COPY gives `maximum` bytes of room.
    let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), room) };
    let minimum = usize::try_from(minimum).unwrap_or(0).max(1);
    let Some(read) = READ.get() else {
        return 0;
    };
    match read(out, minimum) {
        Ok(count) => c_int::try_from(count).unwrap_or(0),
        Err(error) => error.raise(),
    }
}
