//! Changed rows of the stream, and how each change is applied. Run by the appliers.
//!
//! | step | where |
//! |---|---|
//! | the table, and the values of the row | this file, and `routed` |
//! | the loop of each change: find, decide, lock first, carry out | `row_change` |
//! | the local row, and its version | `find` |
//! | the winner: by versions, then by rules | `decision`, with `braid_bgworker::conflict` |
//! | what inserts, updates and deletes do | `insert`, `update`, `delete` |
//! | an insert that lacks large values | `entered` |
//! | an update that gives a row another key, or partition | `moved` |
//! | writing a row, over another one or as a new one | `incoming` |
//! | a conflict, counted and recorded | `record` |

mod decision;
mod delete;
mod entered;
mod find;
mod incoming;
mod insert;
mod moved;
mod record;
mod routed;
mod row_change;
mod update;

use std::rc::Rc;

use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Change, Operation, Value};
use braid_postgres::error::PgError;

use crate::doing::Step;
use crate::relation::{self, RemoteRelation};
use crate::route::Effect;
use crate::row_context::RowContext;
use crate::target::Key;
use crate::{Current, Session};

pub(crate) use decision::{refused, version};
pub(crate) use incoming::Incoming;
pub(crate) use record::Rows;

impl Session {
    /// Applies one change of the current transaction.
    ///
    /// # Errors
    /// An error that PostgreSQL raises comes as an unwinding panic; errors that are found here are
    /// returned. In both cases the caller rolls the transaction back.
    pub fn change(&mut self, change: &Change<'_>) -> Result<(), PgError> {
        let applied = self.apply_change(change);
        self.attempt().forget_told();
        applied
    }

    fn apply_change(&mut self, change: &Change<'_>) -> Result<(), PgError> {
        self.does(Step::Change(change.operation), Some(change.header.schema.0));
        if change.operation == Operation::Insert && self.is_bulk_allowed() {
            return self.insert_later(change);
        }
        self.flush()?;
        let schema = change.header.schema.0;
        let effect = Effect::of(change.operation);
        let Some((key, remote, current)) = self.prepare(schema, effect)? else {
            return Ok(());
        };
        let context = RowContext {
            key,
            remote: &remote,
            current: &current,
        };
        match change.operation {
            Operation::Insert => self.insert_now(change, schema, context),
            Operation::Update => self.update_change(change, schema, context),
            Operation::Delete => {
                let (key, before) = self.routed(change.before.as_ref(), schema, key, &remote)?;
                self.delete(context.at(key), &before)?;
                self.spare.push(before);
                Ok(())
            }
        }
    }

    pub(crate) fn insert_now(
        &mut self,
        change: &Change<'_>,
        schema: u32,
        context: RowContext<'_>,
    ) -> Result<(), PgError> {
        // A partition's bounds may use a column whose value the provider has to be asked for.
        if self.tables.plan(context.key)?.partitioned
            && change.after.as_ref().is_some_and(entered::lacks_values)
        {
            return self.insert_entered(change, schema, context);
        }
        let (key, after) =
            self.routed_new(change.after.as_ref(), schema, context.key, context.remote)?;
        if self.tables.has_gaps(key, &after) {
            self.spare.push(after);
            return self.insert_entered(change, schema, context);
        }
        self.insert(context.at(key), &after)?;
        self.spare.push(after);
        Ok(())
    }

    /// Opens the table that a relation of the stream goes to, and works as its owner. Returns
    /// `None` if its changes are not applied: they are in its copy, or it is not part of the
    /// subscription.
    pub(crate) fn prepare(
        &mut self,
        schema: u32,
        effect: Effect,
    ) -> Result<Option<(Key, Rc<RemoteRelation>, Current)>, PgError> {
        let remote = self.remote(schema)?;
        let Some(current) = self.current().cloned() else {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                "change outside of a transaction from the provider",
            ));
        };
        let key = loop {
            let route = self.route(schema, &remote)?;
            if !self.takes(&route, &remote, &current, effect)? {
                return Ok(None);
            }
            let key = self.open_table(schema, &remote, route.oid)?;
            // While waiting for the lock, the table may have been truncated and copied again.
            if route.is_current() {
                break key;
            }
            self.close_tables();
        };
        self.work_as_owner_of(key);
        self.forget_given();
        self.begin_change();
        Ok(Some((key, remote, current)))
    }

    fn update_change(
        &mut self,
        change: &Change<'_>,
        schema: u32,
        context: RowContext<'_>,
    ) -> Result<(), PgError> {
        let RowContext {
            key: root,
            remote,
            current,
        } = context;
        let (new_key, after) = self.routed(change.after.as_ref(), schema, root, remote)?;
        let Some(before) = change.before.as_ref() else {
            self.update(context.at(new_key), &after, &after, false)?;
            self.spare.push(after);
            return Ok(());
        };
        let (old_key, old) = self.routed(Some(before), schema, root, remote)?;
        if old_key != new_key {
            // The row moves to another partition.
            return self.replace(context, (old_key, new_key), old, after);
        }
        let moved = match &self.tables.target(old_key)?.plan.key {
            Some(key) => key_differs(change, key)?,
            // Without a key, only a further unique key can conflict. A row that equals the new one
            // is a row of its own.
            None => false,
        };
        if moved && current.runs {
            return Err(self.hints.wait_for_commit("It changes a key."));
        }
        if moved && self.tables.is_two_rows(old_key, &old, &after) {
            return self.replace(context, (old_key, new_key), old, after);
        }
        self.update(context.at(old_key), &old, &after, moved)?;
        self.spare.extend([old, after]);
        Ok(())
    }
}

/// Whether the columns that identify a row differ between the images.
fn key_differs(change: &Change<'_>, key: &relation::Key) -> Result<bool, PgError> {
    let (Some(before), Some(after)) = (&change.before, &change.after) else {
        return Ok(false);
    };
    for (index, (old, new)) in before.values().zip(after.values()).enumerate() {
        let (old, new) = (old?, new?);
        let in_key = key.identity.iter().any(|column| column.remote == index);
        if in_key && new != Value::None && old != new {
            return Ok(true);
        }
    }
    Ok(false)
}
