//! Deletions that find no row here, and truncates that are carried out row by row, passed on to the
//! nodes behind this one (`braid_node::readers`). Run by the appliers.
//!
//! This node stores a tombstone, which keeps older changes away (`deletion`), but WAL has no
//! deletion of a row that was not there. A node that has an older state of the row from elsewhere
//! would never learn that it is deleted. So the transaction that is applied, and has the version,
//! inserts a row into `braid.unfound` and deletes it. The output plugin makes the deletion, or the
//! truncate, of the insert, for nodes that want what other nodes wrote (`plugin/unfound.rs`).
//!
//! A deletion that is known here already, or is older than a known one, is not passed on. So
//! nothing goes round in circles (I8).

use braid_bgworker::conflict::Local;
use braid_node::readers;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::syscache::IndexRow;
use braid_postgres::table_scan::{self, Cell};
use braid_postgres::{snapshot, transaction};
use pgrx::pg_sys;

use super::change::version;
use super::lookup::Found;
use super::table::{OpenTable, RowValues};
use super::target::Key;
use super::{Current, Session};

impl Session {
    /// Passes on a deletion whose row, with these values, was not found. Its tombstone is stored
    /// already, so the transaction has an id.
    pub(super) fn pass_on_deletion(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
        values: &RowValues,
    ) -> Result<(), PgError> {
        if !self.tables.remembers(key) || !readers::passes_on() {
            return Ok(());
        }
        if matches!(self.origins.local(found), Local::Deleted(known) if known >= version(current)) {
            return Ok(());
        }
        let Some(target) = self.tables.get(key) else {
            return Ok(());
        };
        let Some(table) = target.table.as_ref() else {
            return Ok(());
        };
        let keys = target.plan.key.iter().flat_map(|key| &key.identity);
        let keys: Vec<i16> = keys.map(|column| column.attribute).collect();
        if !is_told_by(table, &keys) {
            return Ok(());
        }
        let slot = table.new_slot();
        // The slot has nothing that is still used.
        table.fill(&slot, values);
        let row = self.tables.row_to_tell(key, &slot)?;
        self.tell_unfound(&[pg_sys::Oid::from(key.1)], Some(row), false)
    }

    /// Passes on a truncate that was carried out row by row.
    pub(super) fn pass_on_truncate(
        &mut self,
        tables: &[pg_sys::Oid],
        restart_identity: bool,
    ) -> Result<(), PgError> {
        // The transaction may have deleted nothing yet.
        transaction::assign_id();
        if !readers::passes_on() {
            return Ok(());
        }
        self.tell_unfound(tables, None, restart_identity)
    }

    fn tell_unfound(
        &mut self,
        relations: &[pg_sys::Oid],
        row: Option<Vec<u8>>,
        restart_identity: bool,
    ) -> Result<(), PgError> {
        let row = [
            Cell::Oids(relations),
            row.as_deref().map_or(Cell::Null, Cell::Bytes),
            Cell::Boolean(restart_identity),
        ];
        // The table has no index, and only the extension writes to it.
        table_scan::pass_through(own_table("unfound")?, row);
        snapshot::show_own();
        Ok(())
    }
}

/// Whether deletions from a table are sent with these columns only, by which the provider's rows
/// are found. Then a deletion that was not found can be sent too. The table's indexes are locked as
/// long as it is open.
fn is_told_by(table: &OpenTable, keys: &[i16]) -> bool {
    let relation = table.relation();
    match relation.replica_identity() {
        b'f' => return true,
        b'n' => return false,
        _ => {}
    }
    IndexRow::find(relation.replica_index()).is_some_and(|index| {
        let mut columns = index.key_columns().iter();
        columns.all(|column| keys.contains(column))
    })
}
