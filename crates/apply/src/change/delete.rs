//! A deleted row. Run by the appliers.

use braid_bgworker::conflict::{Action, Decision, Kind, Local, Version, decide_delete};
use braid_gir::ReplicaIdentity;
use braid_postgres::error::PgError;

use super::row_change::{RowChange, Sought};
use crate::lookup::{Found, Purpose};
use crate::merge::ConflictInput;
use crate::removal::Without;
use crate::row_context::RowContext;
use crate::table::{OpenTable, RowValues};
use crate::target::Key;
use crate::write::Written;
use crate::{Current, Session, Target};

/// A row that a change deletes.
struct Delete<'v> {
    /// Values that include the row's key.
    before: &'v RowValues,
    /// Whether all of the row, as its writer saw it, is known.
    is_whole: bool,
}

impl RowChange for Delete<'_> {
    fn sought(&self) -> Sought<'_> {
        let seen = self
            .is_whole
            .then_some((Kind::DeleteOriginDiffers, self.before));
        Sought::new(self.before, Purpose::Delete, seen)
    }

    fn decide(local: Local<'_>, version: Version<'_>, from_origin: bool) -> Decision {
        decide_delete(local, version, from_origin)
    }

    fn carry_out(
        &mut self,
        session: &mut Session,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<Written, PgError> {
        session.delete_row(context, found, decision, self)
    }
}

impl Session {
    /// Applies a delete.
    pub(super) fn delete(
        &mut self,
        context: RowContext<'_>,
        before: &RowValues,
    ) -> Result<(), PgError> {
        let is_whole = context.remote.identity == ReplicaIdentity::Full;
        self.apply_row(context, &mut Delete { before, is_whole })
    }

    /// Deletes the row that was found, as decided; records the conflict.
    fn delete_row(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        Delete { before, is_whole }: &Delete<'_>,
    ) -> Result<Written, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let exists = matches!(found, Found::Row(_));
        if !exists {
            if self.has_come(key, remote, current.timestamp, before)? {
                return Ok(Written::Changed);
            }
            match self.remove_without_row(context, before)? {
                Without::Changed => return Ok(Written::Changed),
                // Treated as if it had been found.
                Without::Served => return Ok(Written::Done),
                Without::Remembered => {}
            }
            self.pass_on_deletion(key, current, found, before)?;
        }
        if let (Action::Ask, Some(kind)) = (decision.action, decision.conflict) {
            let rows = self.tables.rows(key, exists, None)?;
            let input = ConflictInput {
                found,
                kind,
                rows: &rows,
                before: is_whole.then_some(*before),
                in_the_way: false,
                others: &[],
            };
            return self.settle_by_function(context, input);
        }
        if decision.conflict.is_some() {
            if !exists
                && let Target {
                    plan,
                    table: Some(table),
                    ..
                } = self.tables.target(key)?
            {
                // The history shows at least the key of the row that was to be deleted.
                table.prepare_insert(plan, before);
            }
            let rows = self.tables.rows(key, exists, (!exists).then_some(before))?;
            self.record(context, found, decision, &rows)?;
        }
        if decision.action == Action::Apply && exists {
            if self.tables.open(key)?.delete()? == Written::Changed {
                return Ok(Written::Changed);
            }
            self.note_gone(key, current);
            self.deletions()
                .remember(key, current.timestamp, OpenTable::local_slot)?;
            self.removals().remember_taken(key, current, found)?;
            self.count(key, |counts| counts.deletes += 1);
        }
        Ok(Written::Done)
    }

    /// Stores the version of the row in the local slot, which was just deleted, if this is a batch.
    /// In tables without a key, the version of a deleted row is not needed.
    pub(crate) fn note_gone(&mut self, key: Key, current: &Current) {
        let has_key = |target: &Target| target.plan.key.is_some();
        if self.tables.get(key).is_some_and(has_key) {
            self.note_version(key, current, OpenTable::local_slot);
        }
    }
}
