//! Converts a change's values for the table, or the partition, that they go to. Run by the
//! appliers.
//!
//! The rows of a partitioned table are in leaf partitions, whose columns may have another order. So
//! an image is converted once for the named table, and once more for the leaf.

use braid_bgworker::sqlstate::SqlState;
use braid_gir::Image;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

use crate::Session;
use crate::relation::{RemoteRelation, fill_row};
use crate::table::RowValues;
use crate::target::{Key, Tables};

impl Tables {
    /// Whether `values` lack a column that the stream has.
    pub(crate) fn has_gaps(&self, key: Key, values: &RowValues) -> bool {
        self.get(key).is_some_and(|target| {
            target
                .plan
                .columns
                .iter()
                .any(|column| values.get(column.local).is_some_and(Option::is_none))
        })
    }
}

impl Session {
    /// Sets the values that the row inserted by the current change has in columns that the stream
    /// does not have.
    pub(super) fn give(
        &mut self,
        key: Key,
        values: Vec<(usize, Option<pg_sys::Datum>)>,
    ) -> Result<(), PgError> {
        self.tables.open(key)?.given = Some(values);
        self.attempt().given_to = Some(key);
        Ok(())
    }

    /// Forgets the values that [`Session::give`] has set for the change before: their memory will
    /// be reused.
    pub(super) fn forget_given(&mut self) {
        if let Some(key) = self.attempt().given_to.take()
            && let Some(target) = self.tables.get_mut(key)
            && let Some(table) = target.table.as_mut()
        {
            table.given = None;
        }
    }

    /// Returns the values of a row to be inserted, for the partition that it belongs to, opened;
    /// for the table itself if it is not partitioned. The named table's defaults are computed once,
    /// for the routing and for the write.
    pub(super) fn routed_new(
        &mut self,
        image: Option<&Image<'_>>,
        schema: u32,
        key: Key,
        remote: &RemoteRelation,
    ) -> Result<(Key, RowValues), PgError> {
        let plan = &self.tables.target(key)?.plan;
        let Some(image) = image.filter(|_| plan.partitioned && !plan.defaults.is_empty()) else {
            return self.routed(image, schema, key, remote);
        };
        let values = self.values(image, key, remote)?;
        let (plan, table) = self.tables.opened(key)?;
        table.prepare_insert(plan, &values);
        let defaults: Vec<(i16, Option<pg_sys::Datum>)> = plan
            .defaults
            .iter()
            .map(|column| (column.named, table.new_value(column.local)))
            .collect();
        let oid = table.partition();
        let leaf = self.open_table(schema, remote, oid)?;
        self.work_as_owner_of(leaf);
        let given = self.tables.target(leaf)?.plan.defaults.iter();
        let given = given
            .map(|column| {
                let value = defaults.iter().find(|(named, _)| *named == column.named);
                (column.local, value.and_then(|(_, value)| *value))
            })
            .collect();
        self.give(leaf, given)?;
        self.spare.push(values);
        Ok((leaf, self.values(image, leaf, remote)?))
    }

    /// Returns the partition that a row belongs to, opened; the table itself if it is not
    /// partitioned.
    fn leaf(
        &mut self,
        schema: u32,
        remote: &RemoteRelation,
        key: Key,
        values: &RowValues,
    ) -> Result<Key, PgError> {
        let Some(target) = self.tables.get_mut(key) else {
            return Ok(key);
        };
        if !target.plan.partitioned {
            return Ok(key);
        }
        let Some(table) = target.table.as_mut() else {
            return Ok(key);
        };
        let oid = table.partition_for(values);
        let leaf = self.open_table(schema, remote, oid)?;
        self.work_as_owner_of(leaf);
        Ok(leaf)
    }

    /// Returns an image's values for the partition that they belong to, opened; for the table
    /// itself if it is not partitioned.
    pub(super) fn routed(
        &mut self,
        image: Option<&Image<'_>>,
        schema: u32,
        key: Key,
        remote: &RemoteRelation,
    ) -> Result<(Key, RowValues), PgError> {
        let Some(image) = image else {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                "change without a row from the provider",
            ));
        };
        let values = self.values(image, key, remote)?;
        let leaf = self.leaf(schema, remote, key, &values)?;
        if leaf == key {
            Ok((key, values))
        } else {
            Ok((leaf, self.values(image, leaf, remote)?))
        }
    }

    /// Converts an image to the values of a local row.
    pub(crate) fn values(
        &mut self,
        image: &Image<'_>,
        key: Key,
        remote: &RemoteRelation,
    ) -> Result<RowValues, PgError> {
        if usize::from(image.columns()) != remote.columns.len() {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                format!(
                    "row from the provider has {} columns where its schema has {}",
                    image.columns(),
                    remote.columns.len()
                ),
            ));
        }
        let Self {
            tables,
            spare,
            attempt,
            ..
        } = self;
        let Some(target) = tables.get_mut(key) else {
            return Err(PgError::new(SqlState::InternalError, "table is not open"));
        };
        let mut row = spare.pop().unwrap_or_default();
        row.clear();
        row.resize(target.plan.width, None);
        fill_row(&mut row, &mut target.plan.columns, image, |_| true)?;
        let asked = attempt
            .as_ref()
            .and_then(|attempt| attempt.answers.as_ref());
        if let Some(answers) = asked {
            tables.fill_gaps(key, &mut row, answers)?;
        }
        Ok(row)
    }
}
