//! PostgreSQL's layouts and numbers that this crate writes down by hand, as the bindings lack them.
//! The tests inside a server compare each with the headers of the server's major version
//! (`crates/inside/layout.c`).

use crate::{compat, ffi, heap_page, index_end};

/// Place of AddinShmemInitLock in the main array of light-weight locks
/// (src/include/storage/lwlocklist.h, 15 to 19).
pub const ADDIN_SHMEM_INIT_LOCK: usize = 21;

/// A number that no timer of PostgreSQL's own has.
#[must_use]
pub fn any_user_timeout() -> i64 {
    i64::from(ffi::ANY_USER_TIMEOUT)
}

/// All layouts written down by hand: a member of a struct with its offset in bytes, or a constant
/// with its value. Names are those of the C headers.
#[must_use]
pub fn by_hand() -> Vec<(&'static str, usize)> {
    [
        &[("AddinShmemInitLock", ADDIN_SHMEM_INIT_LOCK)],
        compat::BY_HAND,
        ffi::BY_HAND,
        heap_page::BY_HAND,
        index_end::BY_HAND,
    ]
    .concat()
}
