//! Keys with which an index or a table is looked through.

use pgrx::pg_sys;

/// A key for the column at a position, from 0: flags, the strategy, the function (none if invalid)
/// and the collation by which it is compared, and the value. The function's own memory is in the
/// current memory context.
#[must_use]
pub fn new(
    position: usize,
    flags: i32,
    (strategy, procedure, collation): (u16, pg_sys::Oid, pg_sys::Oid),
    value: pg_sys::Datum,
) -> pg_sys::ScanKeyData {
    let mut key = pg_sys::ScanKeyData::default();
    // SAFETY: fills in the key. PostgreSQL looks the function up; a dropped one is an error. The
    // value is not read before the key is used.
    unsafe {
        pg_sys::ScanKeyEntryInitialize(
            &raw mut key,
            flags,
            i16::try_from(position + 1).unwrap_or(1),
            strategy,
            pg_sys::InvalidOid,
            collation,
            procedure,
            value,
        );
    }
    key
}
