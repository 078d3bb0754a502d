//! Updates that give a row another key, or partition, and so concern two rows here: one is deleted,
//! one is inserted. Run by the appliers.

use braid_gir::ReplicaIdentity;
use braid_postgres::error::PgError;

use crate::Session;
use crate::lookup::{Found, Purpose};
use crate::querier::{Fetched, Wanted, completed};
use crate::relation::RemoteRelation;
use crate::row_context::RowContext;
use crate::table::RowValues;
use crate::target::{Key, Tables};

impl Tables {
    /// Whether an update that gives a row another key is applied as two rows. That is so if a
    /// conflict function or column rules merge rows with the same key. Otherwise a concurrent
    /// change under the old key would be merged into the new row at one node, and would conflict
    /// with a deletion at another.
    pub(super) fn is_two_rows(&self, key: Key, old: &RowValues, after: &RowValues) -> bool {
        let merges = self
            .get(key)
            .is_some_and(|target| target.plan.rules.asks() || target.plan.column_rules.any());
        // Another form of the same key is not another key.
        merges
            && self
                .key_hashes(key, old)
                .is_none_or(|gone| self.leaves(key, gone, after))
    }
}

impl Session {
    /// Applies an update that concerns two rows here: deletes one, inserts the other.
    pub(super) fn replace(
        &mut self,
        context: RowContext<'_>,
        (old_key, new_key): (Key, Key),
        old: RowValues,
        after: RowValues,
    ) -> Result<(), PgError> {
        let complete = self.complete_moved(context, (old_key, new_key), &old, after)?;
        self.bring_lacking((old_key, new_key), context.remote, &old)?;
        self.delete(context.at(old_key), &old)?;
        self.spare.push(old);
        match complete {
            Some(complete) => self.insert(context.at(new_key), &complete),
            None => Ok(()),
        }
    }

    /// Fills in unchanged TOAST values of a row that gets another key, or partition. Returns `None`
    /// if no node has them: the row is gone.
    fn complete_moved(
        &mut self,
        context: RowContext<'_>,
        (old_key, new_key): (Key, Key),
        old: &RowValues,
        mut after: RowValues,
    ) -> Result<Option<RowValues>, PgError> {
        let RowContext {
            remote, current, ..
        } = context;
        let gaps: Vec<(usize, usize)> = {
            let from = self.tables.target(old_key)?.plan.columns.iter();
            let from: Vec<(usize, usize)> =
                from.map(|column| (column.remote, column.local)).collect();
            let to = self.tables.target(new_key)?.plan.columns.iter();
            to.filter(|column| after.get(column.local).is_some_and(Option::is_none))
                .filter_map(|column| {
                    let same = from.iter().find(|(remote, _)| *remote == column.remote);
                    same.map(|(_, local)| (*local, column.local))
                })
                .collect()
        };
        if gaps.is_empty() {
            return Ok(Some(after));
        }
        if remote.identity == ReplicaIdentity::Full {
            for (from, to) in gaps {
                if let Some(place) = after.get_mut(to) {
                    *place = old.get(from).copied().flatten();
                }
            }
            return Ok(Some(after));
        }
        let found = self.find(old_key, remote, old, (Purpose::Change, false))?;
        if !self.origins.knows_rest(found, current) {
            let wanted = Wanted {
                row: &after,
                before: (old_key, old),
                moved: true,
            };
            if let Fetched::Columns { values, is_exact } =
                self.questions().fetch_gaps(context.at(new_key), wanted)?
            {
                self.attempt().is_unverified = !is_exact;
                return Ok(Some(completed(&after, &values)));
            }
        }
        if !matches!(
            self.find(old_key, remote, old, (Purpose::Change, true))?,
            Found::Row(_)
        ) {
            return Ok(None);
        }
        let table = self.tables.open(old_key)?;
        for (from, to) in gaps {
            let value = table.local_value(from);
            if let Some(place) = after.get_mut(to) {
                *place = Some(value);
            }
        }
        Ok(Some(after))
    }

    /// Takes the values of columns that the stream does not have from the old row, for a row that
    /// gets another key or partition.
    fn bring_lacking(
        &mut self,
        (old_key, new_key): (Key, Key),
        remote: &RemoteRelation,
        old: &RowValues,
    ) -> Result<(), PgError> {
        let defaults = |key: Key| self.tables.get(key).map(|target| &target.plan.defaults);
        let (Some(from), Some(to)) = (defaults(old_key), defaults(new_key)) else {
            return Ok(());
        };
        let columns: Vec<(usize, usize)> = to
            .iter()
            .filter_map(|to| {
                let same = from.iter().find(|from| from.named == to.named)?;
                Some((same.local, to.local))
            })
            .collect();
        if columns.is_empty() {
            return Ok(());
        }
        if !matches!(
            self.find(old_key, remote, old, (Purpose::Change, false))?,
            Found::Row(_)
        ) {
            return Ok(());
        }
        let table = self.tables.open(old_key)?;
        let values = columns
            .into_iter()
            .map(|(from, to)| (to, table.copied_value(from)))
            .collect();
        self.give(new_key, values)
    }
}
