//! Rows of `braid.version_record`: what travels with versioned transactions, and what a node has.
//!
//! A row is written by the transaction that it is about, as its first change. The output plugin
//! makes a message of it, so nobody but the extension can send one. The row stays: it says after a
//! crash that the transaction is committed here. An applier writes the same row in the transaction
//! that it applies. The versions process removes rows that later ones supersede.

use std::ffi::CString;

use braid_bgworker::hex;
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::table_scan::{self, Cell};

/// Writes a row. In a transaction; under nobody's rights, and without a snapshot.
///
/// # Errors
/// 42P01 if the extension is too old.
pub fn write(note: &[u8]) -> Result<(), PgError> {
    let digits = CString::new(hex::encode(note))
        .map_err(|_| PgError::new(SqlState::InternalError, "a note has no such bytes"))?;
    let table = own_table("version_record")?;
    table_scan::insert(table, std::iter::once([Cell::Text(&digits)]));
    Ok(())
}
