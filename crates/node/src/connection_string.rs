//! Keeps connection strings in `braid.connection`, out of reach of logical decoding.
//!
//! Sessions that create, alter and drop nodes and subscriptions call it. A connection string may have a password in it, and any
//! output plugin decodes what is written to an ordinary table. Rows of this table are written to WAL without the copy that
//! decoding reads, as PostgreSQL does it for tables that it rewrites. So a row survives a crash and reaches physical standbys,
//! and no plugin sees it.
//!
//! A row is never updated: an UPDATE would be decoded. Another string gets another row.

use std::ffi::CString;

use braid_postgres::catalog::query;
use braid_postgres::encoding;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use pgrx::pg_sys;

/// An expression for the connection string of a row `s` that has a `connection_id`. Null if the row of `braid.connection` is gone.
pub const DSN: &str =
    "(select c.dsn from braid.connection c where c.connection_id = s.connection_id)";

/// The error for a subscription whose connection string is gone: 55000.
#[must_use]
pub fn missing(subscription: &str) -> PgError {
    PgError::new(
        "55000",
        format!("subscription \"{subscription}\" has no connection string"),
    )
    .with_hint("Give it one with braid.alter_subscription(subscription_name, dsn => ...).")
}

/// Stores a connection string. Returns its `connection_id`.
///
/// Runs with the rights of the extension's owner, in a transaction.
///
/// # Errors
/// [`PgError`] if the table is not there.
pub fn store(dsn: &str) -> Result<String, PgError> {
    let table = own_table("connection")?;
    let next = query(
        "select nextval(pg_catalog.pg_get_serial_sequence('braid.connection', 'connection_id'))",
        &[],
    );
    let id = next.get(0, 0).unwrap_or_default().to_owned();
    let number: i64 = id.parse().unwrap_or(0);
    let text = encoding::statement(dsn);
    // SAFETY: in a transaction; the table has these two columns.
    unsafe { insert(table, number, &text) };
    Ok(id)
}

/// Deletes the strings that neither a node nor a subscription nor a slot that is to be dropped refers to.
///
/// Runs with the rights of the extension's owner, in a transaction that has moved its references.
pub fn forget_unused() {
    query(
        "delete from braid.connection c \
          where not exists (select from braid.node n where n.connection_id = c.connection_id) \
            and not exists (select from braid.subscription s where s.connection_id = c.connection_id) \
            and not exists (select from braid.slot_cleanup s where s.connection_id = c.connection_id)",
        &[],
    );
}

/// # Safety
/// In a transaction; `table` is `braid.connection`.
unsafe fn insert(table: pg_sys::Oid, id: i64, dsn: &CString) {
    let lock = |mode: u32| i32::try_from(mode).unwrap_or(1);
    // SAFETY: as the caller says. The tuple is made for the table's descriptor; indexes are open while they are written to, and a
    // slot holds the tuple meanwhile, as in CatalogTupleInsert (src/backend/catalog/indexing.c, 15 to 18).
    unsafe {
        let relation = pg_sys::table_open(table, lock(pg_sys::RowExclusiveLock));
        let mut values = [
            pg_sys::Datum::from(id),
            pg_sys::Datum::from(pg_sys::cstring_to_text(dsn.as_ptr())),
        ];
        let mut nulls = [false; 2];
        let tuple =
            pg_sys::heap_form_tuple((*relation).rd_att, values.as_mut_ptr(), nulls.as_mut_ptr());
        pg_sys::heap_insert(
            relation,
            tuple,
            pg_sys::GetCurrentCommandId(true),
            lock(pg_sys::TABLE_INSERT_NO_LOGICAL),
            std::ptr::null_mut(),
        );
        let slot = pg_sys::MakeSingleTupleTableSlot(
            (*relation).rd_att,
            &raw const pg_sys::TTSOpsHeapTuple,
        );
        pg_sys::ExecStoreHeapTuple(tuple, slot, false);
        let indexes = pg_sys::CatalogOpenIndexes(relation);
        for place in 0..usize::try_from((*indexes).ri_NumIndices).unwrap_or(0) {
            let index = *(*indexes).ri_IndexRelationDescs.add(place);
            let info = *(*indexes).ri_IndexRelationInfo.add(place);
            let mut keys = [pg_sys::Datum::null(); pg_sys::INDEX_MAX_KEYS as usize];
            let mut is_null = [true; pg_sys::INDEX_MAX_KEYS as usize];
            pg_sys::FormIndexDatum(
                info,
                slot,
                std::ptr::null_mut(),
                keys.as_mut_ptr(),
                is_null.as_mut_ptr(),
            );
            pg_sys::index_insert(
                index,
                keys.as_mut_ptr(),
                is_null.as_mut_ptr(),
                &raw mut (*tuple).t_self,
                relation,
                pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES,
                false,
                info,
            );
        }
        pg_sys::CatalogCloseIndexes(indexes);
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        pg_sys::heap_freetuple(tuple);
        pg_sys::table_close(relation, lock(pg_sys::NoLock));
    }
}
