//! The way of each change of a row: find it, decide, lock it first where that is needed, carry out.
//! Run by the appliers.
//!
//! A row is locked first only where there is a conflict to record, or where it turns out to have
//! changed between being found and being written.

use braid_bgworker::conflict::{Decision, Kind, Local, Version};
use braid_postgres::error::PgError;

use crate::Session;
use crate::lookup::{Found, Purpose};
use crate::row_context::RowContext;
use crate::table::RowValues;
use crate::target::Key;
use crate::write::Written;

/// The row that is looked for.
#[derive(Clone, Copy)]
pub(super) struct Sought<'v> {
    /// Have its key.
    values: &'v RowValues,
    purpose: Purpose,
    /// The row as the change's writer saw it, if all of it is known: that counts where a function
    /// is asked about conflicts of this kind.
    seen: Option<(Kind, &'v RowValues)>,
}

impl<'v> Sought<'v> {
    pub(super) fn new(
        values: &'v RowValues,
        purpose: Purpose,
        seen: Option<(Kind, &'v RowValues)>,
    ) -> Self {
        Self {
            values,
            purpose,
            seen,
        }
    }
}

/// A change of one row: an insert, an update or a delete.
pub(super) trait RowChange {
    /// The row that the change is about.
    fn sought(&self) -> Sought<'_>;

    /// Decides by versions about the change when it meets this row.
    fn decide(local: Local<'_>, version: Version<'_>, from_origin: bool) -> Decision;

    /// Whether another node may be asked about the row, before it is locked: nobody is to wait for
    /// a row meanwhile.
    fn may_ask(&self) -> bool {
        false
    }

    /// Ask another node for what the change lacks. Whether the node was asked.
    fn ask(
        &mut self,
        _session: &mut Session,
        _context: RowContext<'_>,
        _found: Found,
        _decision: Decision,
    ) -> Result<bool, PgError> {
        Ok(false)
    }

    /// Do what was decided about the row that was found, or the gap. Nothing is done if the row has
    /// changed since it was found.
    fn carry_out(
        &mut self,
        session: &mut Session,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<Written, PgError>;
}

impl Session {
    /// Apply a change of one row: find the row, decide, and carry that out; anew as long as the row
    /// changes meanwhile.
    pub(super) fn apply_row<C: RowChange>(
        &mut self,
        context: RowContext<'_>,
        change: &mut C,
    ) -> Result<(), PgError> {
        let must_lock = self.needs_lock(context.key);
        let mut lock = must_lock && !change.may_ask();
        loop {
            let (found, decision) =
                self.find_and_decide(context, change.sought(), lock, C::decide)?;
            if change.ask(self, context, found, decision)? {
                // An answer may take long. A row that was not here may have come since, and may be
                // gone again.
                continue;
            }
            if !lock
                && matches!(found, Found::Row(_))
                && (must_lock || self.must_lock_first(context.key, found, decision)?)
            {
                lock = true;
                continue;
            }
            if change.carry_out(self, context, found, decision)? == Written::Done {
                return Ok(());
            }
            lock = true;
        }
    }

    /// Find the row that is sought, and decide.
    fn find_and_decide(
        &mut self,
        context: RowContext<'_>,
        sought: Sought<'_>,
        lock: bool,
        decide: impl Fn(Local<'_>, Version<'_>, bool) -> Decision,
    ) -> Result<(Found, Decision), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let found = self.find(key, remote, sought.values, (sought.purpose, lock))?;
        let decision = self.decide(context, found, decide)?;
        let seen = sought.seen.filter(|(kind, _)| {
            !current.is_displacement_notice && self.tables.is_asked(key, *kind)
        });
        let decision = match seen {
            Some((kind, before)) => match self.tables.is_as_seen(key, found, before)? {
                Some(same) => {
                    let origins = &mut self.origins;
                    origins.compare_with_seen(current, found, decision, (kind, same))
                }
                None => decision,
            },
            None => decision,
        };
        Ok((found, decision))
    }

    /// Whether a row that was found has to be locked, and decided about once more, before the
    /// decision is carried out: there is a conflict to record, or its version may change.
    fn must_lock_first(
        &mut self,
        key: Key,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        Ok(decision.conflict.is_some() || self.tables.may_lose(key, found, decision)?)
    }
}
