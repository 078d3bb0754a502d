//! What finds nothing here, and is news all the same: deletions of rows that are not here, and what a truncate has not found. Run by the
//! appliers, for the nodes behind this one (`braid_node::readers`).
//!
//! To this node it is a tombstone, which keeps older changes away (`deletion`); WAL has nothing of it. A node that has an older state of
//! the row from elsewhere would never learn that it is gone. So there is a row of `braid.unfound` of it, inserted and deleted in the very
//! transaction that is applied, which has the version already: of the insertion the output plugin makes the deletion, or the truncate, for
//! nodes that want what others wrote (`plugin/unfound.rs`).
//!
//! What is known here already, or older than that, is not passed on: who is told of what it knows is silent, so nothing goes round (I8).

use braid_bgworker::conflict::Local;
use braid_node::readers;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use pgrx::datum::IntoDatum;
use pgrx::pg_sys;

use super::change::{Key, version};
use super::lookup::Found;
use super::table::{OpenTable, RowValues};
use super::{Current, Session};

impl Session {
    /// The row that a deletion was for, with these values, is not here, which is written down already: so the transaction has an id.
    pub(super) fn pass_on_deletion(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
        values: &RowValues,
    ) -> Result<(), PgError> {
        if !self.remembers(key) || !readers::passes_on() {
            return Ok(());
        }
        if matches!(self.local(found), Local::Deleted(known) if known >= version(current)) {
            return Ok(());
        }
        let Some(target) = self.targets.get(&key) else {
            return Ok(());
        };
        let Some(table) = target.table.as_ref() else {
            return Ok(());
        };
        let keys = target.plan.key.iter().flat_map(|key| &key.columns);
        let keys: Vec<i16> = keys.map(|column| column.attribute).collect();
        // SAFETY: the table is open.
        if !unsafe { is_told_by(table, &keys) } {
            return Ok(());
        }
        let slot = table.new_slot();
        // SAFETY: the slot is one of the table's, for rows that are to be written; nothing is in it that is still used.
        let row = unsafe {
            table.fill(slot, values);
            self.row_to_tell(key, slot)?
        };
        self.tell_unfound(&[pg_sys::Oid::from(key.1)], Some(row), false)
    }

    /// Tables were truncated row by row.
    pub(super) fn pass_on_truncate(
        &mut self,
        tables: &[pg_sys::Oid],
        restart_identity: bool,
    ) -> Result<(), PgError> {
        // It may have deleted nothing yet.
        // SAFETY: in a transaction.
        unsafe { pg_sys::GetCurrentTransactionId() };
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
        let oid = own_table("unfound")?;
        let lock = i32::try_from(pg_sys::RowExclusiveLock).unwrap_or(3);
        // SAFETY: in a transaction; the values have the types of the table's columns. It has no index, and none but the extension writes to it.
        unsafe {
            let relation = pg_sys::table_open(oid, lock);
            let row = row.and_then(IntoDatum::into_datum);
            let mut values = [
                relations
                    .to_vec()
                    .into_datum()
                    .unwrap_or(pg_sys::Datum::null()),
                row.unwrap_or(pg_sys::Datum::null()),
                pg_sys::Datum::from(restart_identity),
            ];
            let mut nulls = [false, row.is_none(), false];
            let tuple = pg_sys::heap_form_tuple(
                (*relation).rd_att,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            pg_sys::simple_heap_insert(relation, tuple);
            pg_sys::CommandCounterIncrement();
            pg_sys::simple_heap_delete(relation, &raw mut (*tuple).t_self);
            pg_sys::heap_freetuple(tuple);
            pg_sys::table_close(relation, i32::try_from(pg_sys::NoLock).unwrap_or(0));
            pg_sys::CommandCounterIncrement();
            pg_sys::UpdateActiveSnapshotCommandId();
        }
        Ok(())
    }
}

/// Whether deletions of a table's rows are sent with no more than these columns, by which the provider's are found: then one that was not
/// found can be sent too.
///
/// # Safety
/// The table is open.
unsafe fn is_told_by(table: &OpenTable, keys: &[i16]) -> bool {
    // SAFETY: as the caller says; its indexes are locked as long as the table is open. rd_index and its array belong to the index.
    unsafe {
        let relation = table.relation();
        match (*(*relation).rd_rel).relreplident.cast_unsigned() {
            b'f' => return true,
            b'n' => return false,
            _ => {}
        }
        let identity = pg_sys::RelationGetReplicaIndex(relation);
        if identity == pg_sys::InvalidOid {
            return false;
        }
        let index = pg_sys::index_open(
            identity,
            i32::try_from(pg_sys::AccessShareLock).unwrap_or(1),
        );
        let form = (*index).rd_index;
        let count = usize::try_from((*form).indnkeyatts).unwrap_or(0);
        let attributes = (*form).indkey.values.as_slice(count);
        let told = attributes.iter().all(|attribute| keys.contains(attribute));
        pg_sys::index_close(index, i32::try_from(pg_sys::NoLock).unwrap_or(0));
        told
    }
}
