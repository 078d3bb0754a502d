//! Looks up rows before their changes can be applied. Run by the appliers, for a batch that waits
//! for others to be committed: meanwhile pages are read and pruned, and indexes are searched. The
//! batch then finds its rows by their places (`super::places`), which are checked there.
//!
//! Nothing is written, and nothing is waited for except pages: neither a writer of a row nor a lock
//! on a table.

use braid_gir::{Change, Image, Operation};
use braid_postgres::error::PgError;

use super::lookup::Purpose;
use super::relation::{LocalColumn, fill_row};
use super::table::RowValues;
use super::target::{Key, Standing};
use super::{Session, generation};

impl Session {
    /// Opens a transaction for [`Session::look_ahead`].
    pub fn begin_to_look(&mut self) {
        self.start();
    }

    /// Ends that transaction.
    pub fn end_look(&mut self) {
        self.close_tables();
        // Nothing was written to them.
        self.attempt().open.clear();
        self.end();
    }

    /// Looks up the place of a change's row, if that is simple: in a plain table that this process
    /// has changed before, and that no session locks at present. Returns whether the row was looked
    /// up.
    ///
    /// # Errors
    /// As [`Session::change`]; each comes again when the change is applied.
    pub fn look_ahead(&mut self, change: &Change<'_>) -> Result<bool, PgError> {
        let purpose = match change.operation {
            Operation::Insert => return Ok(false),
            Operation::Update => Purpose::Change,
            Operation::Delete => Purpose::Delete,
        };
        let image = change.before.as_ref().or(change.after.as_ref());
        let Some((image, key)) = image.zip(self.open_to_look(change.header.schema.0)) else {
            return Ok(false);
        };
        self.work_as_owner_of(key);
        self.begin_change();
        let Some(values) = self.key_values(image, key)? else {
            return Ok(false);
        };
        let mut was_sought = false;
        if let Some(target) = self.tables.get_mut(key)
            && let (Some(table), Some(index)) = (target.table.as_mut(), &target.plan.key)
        {
            was_sought = table.look_ahead(&values, index, purpose);
        }
        self.spare.push(values);
        Ok(was_sought)
    }

    /// Opens the plain table that a relation of the stream goes to; returns `None` if it would have
    /// to be waited for, or set up.
    fn open_to_look(&mut self, schema: u32) -> Option<Key> {
        let route = self.routes.get(&schema)?;
        if !generation::is_current(route.generation) || route.from_lsn.is_none() {
            return None;
        }
        let key = (schema, route.oid.to_u32());
        if self.tables.resume_if_free(key)? == Standing::Resumed {
            self.attempt().open.push(key);
        }
        Some(key)
    }

    /// Returns the values of the key by which rows of the table are found; `None` if there is no
    /// key.
    fn key_values(&mut self, image: &Image<'_>, key: Key) -> Result<Option<RowValues>, PgError> {
        let Some(target) = self.tables.get_mut(key) else {
            return Ok(None);
        };
        let Some(index) = &target.plan.key else {
            return Ok(None);
        };
        let mut row = self.spare.pop().unwrap_or_default();
        row.clear();
        row.resize(target.plan.width, None);
        let is_key = |column: &LocalColumn| {
            let mut key = index.identity.iter();
            key.any(|of_key| usize::try_from(of_key.attribute - 1) == Ok(column.local))
        };
        fill_row(&mut row, &mut target.plan.columns, image, is_key)?;
        Ok(Some(row))
    }
}
