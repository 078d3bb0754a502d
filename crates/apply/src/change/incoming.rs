//! Writes an incoming row over the one that was found, or as a new one, as decided. Run by the
//! appliers.

use braid_bgworker::conflict::{Action, Decision};
use braid_node::registry;
use braid_postgres::error::PgError;
use braid_postgres::slot::Slot;

use crate::in_the_way::Way;
use crate::key_hash::key_hash;
use crate::lookup::Found;
use crate::merge::ConflictInput;
use crate::row_context::RowContext;
use crate::table::{OpenTable, RowValues};
use crate::target::Key;
use crate::write::Written;
use crate::{Current, Session, Target};

/// An incoming row, or an incoming change of one.
#[derive(Clone, Copy)]
pub(crate) struct Incoming<'a> {
    /// The row after the change.
    pub(crate) after: &'a RowValues,
    /// The row as its writer saw it, if all of it is known.
    pub(crate) before: Option<&'a RowValues>,
    /// Whether the change inserts the row.
    pub(crate) is_insert: bool,
}

impl<'a> Incoming<'a> {
    pub(super) fn inserted(after: &'a RowValues) -> Self {
        Self {
            after,
            before: None,
            is_insert: true,
        }
    }
}

impl Session {
    /// Writes an incoming row over the row that was found, or as a new one, as decided. Records the
    /// conflict.
    pub(super) fn write_row(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        incoming: Incoming<'_>,
    ) -> Result<Written, PgError> {
        let RowContext { key, current, .. } = context;
        let after = incoming.after;
        let exists = matches!(found, Found::Row(_));
        {
            let (plan, table) = self.tables.opened(key)?;
            if exists {
                table.prepare_update(after);
            } else {
                table.prepare_insert(plan, after);
            }
        }
        if let (Action::Ask, Some(kind)) = (decision.action, decision.conflict) {
            let rows = self.tables.rows(key, exists, Some(after))?;
            let input = ConflictInput {
                found,
                kind,
                rows: &rows,
                before: incoming.before,
                in_the_way: false,
                others: &[],
            };
            return self.settle_by_function(context, input);
        }
        let merged = self
            .columns()
            .merge(key, current, found, decision, incoming)?;
        if decision.conflict.is_some() {
            let rows = self.tables.rows(key, exists, Some(after))?;
            let words = merged.as_ref().map_or("", |merged| &merged.words);
            self.record_in_words(context, found, decision, (&rows, words))?;
        }
        if decision.action == Action::Keep {
            let Some(merged) = merged else {
                return Ok(Written::Done);
            };
            let written = self.write_merged(key, found, &merged)?;
            if written == Written::Done {
                let row = incoming.before.unwrap_or(after);
                self.tables.remember_columns(key, current, &merged, row)?;
            }
            return Ok(written);
        }
        if let Some(merged) = &merged {
            let values = merged.over(after);
            let (plan, table) = self.tables.opened(key)?;
            if exists {
                table.prepare_update(&values);
            } else {
                table.prepare_insert(plan, &values);
            }
        }
        let written = self.write_new(context, found)?;
        if written == Written::Done {
            self.removals().check_not_removed(key, current, after)?;
            self.removals().note_added(key, after);
            if let Some(merged) = &merged {
                self.tables.remember_columns(key, current, merged, after)?;
            }
        }
        Ok(written)
    }

    /// Writes the row in the new slot over the row that was found, or as a new one.
    pub(crate) fn write_new(
        &mut self,
        context: RowContext<'_>,
        found: Found,
    ) -> Result<Written, PgError> {
        let RowContext { key, current, .. } = context;
        let exists = matches!(found, Found::Row(_));
        if self.hints.check_other_keys {
            match self.make_way(context, found)? {
                Way::Clear | Way::ForNow => {}
                Way::Leave if exists => {
                    if self.tables.open(key)?.delete()? == Written::Changed {
                        return Ok(Written::Changed);
                    }
                    self.note_gone(key, current);
                    self.deletions()
                        .remember(key, current.timestamp, OpenTable::local_slot)?;
                    self.removals().remember_taken(key, current, found)?;
                    self.count(key, |counts| counts.deletes += 1);
                    return Ok(Written::Done);
                }
                Way::Leave | Way::Stay => return Ok(Written::Done),
            }
        }
        let table = self.tables.open(key)?;
        if exists {
            if table.update()? == Written::Changed {
                return Ok(Written::Changed);
            }
            self.removals().remember_taken(key, current, found)?;
            self.count(key, |counts| counts.updates += 1);
        } else {
            table.insert();
            let slot = table.new_slot();
            if !self.origins.is_over_newer(found, current) {
                self.deletions().check_not_deleted(key, current, &slot)?;
            }
            self.count(key, |counts| counts.inserts += 1);
        }
        self.let_in(key);
        self.note_version(key, current, OpenTable::new_slot);
        Ok(Written::Done)
    }

    /// Stores the version of the row in a slot, which was just written or deleted, if this is a
    /// batch.
    pub(crate) fn note_version(
        &mut self,
        key: Key,
        current: &Current,
        slot: impl Fn(&OpenTable) -> Slot,
    ) {
        let Self {
            tables, attempt, ..
        } = self;
        let versions = &mut attempt.get_or_insert_default().written;
        if !versions.is_making() && !versions.has_merged() {
            return;
        }
        if let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = tables.get(key)
        {
            let hash = key_hash(plan, &slot(table));
            versions.note(hash, current.timestamp);
            if plan.key.is_none() && registry::remembers_deletions() {
                versions.note_alike(hash, current.timestamp);
            }
        }
    }
}
