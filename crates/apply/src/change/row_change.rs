//! The loop of each change of a row: find it, decide, lock it first if needed, carry out. Run by
//! the appliers.
//!
//! A row is locked first only if there is a conflict to record, or if it has changed between being
//! found and being written.

use braid_bgworker::conflict::{Decision, Kind, Local, Version};
use braid_postgres::error::PgError;

use crate::Session;
use crate::lookup::{Found, Purpose};
use crate::row_context::RowContext;
use crate::table::RowValues;
use crate::target::Key;
use crate::write::Written;

/// How to look up the row of a change.
#[derive(Clone, Copy)]
pub(super) struct Sought<'v> {
    /// Values that include its key.
    values: &'v RowValues,
    purpose: Purpose,
    /// The row as the change's writer saw it, if all of it is known. It is used if a function is
    /// called for conflicts of this kind.
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
    /// Returns how to look up the row of the change.
    fn sought(&self) -> Sought<'_>;

    /// Decides by versions about the change and this row.
    fn decide(local: Local<'_>, version: Version<'_>, from_origin: bool) -> Decision;

    /// Whether another node may be asked about the row, before the row is locked: no session must
    /// wait for the row meanwhile.
    fn may_ask(&self) -> bool {
        false
    }

    /// Asks another node for values that the change lacks. Returns whether the node was asked.
    fn ask(
        &mut self,
        _session: &mut Session,
        _context: RowContext<'_>,
        _found: Found,
        _decision: Decision,
    ) -> Result<bool, PgError> {
        Ok(false)
    }

    /// Carries out the decision about the row that was found, or that was not. Does nothing if the
    /// row has changed since it was found.
    fn carry_out(
        &mut self,
        session: &mut Session,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<Written, PgError>;
}

impl Session {
    /// Applies a change of one row: finds the row, decides, and carries the decision out. Starts
    /// again if the row changes meanwhile.
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
                // An answer may take long. A missing row may have come meanwhile, and a row that
                // was found may be gone.
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

    /// Finds the row, and decides.
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

    /// Whether a row that was found must be locked, and decided about again, before the decision is
    /// carried out: there is a conflict to record, or its version may change.
    fn must_lock_first(
        &mut self,
        key: Key,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        Ok(decision.conflict.is_some() || self.tables.may_lose(key, found, decision)?)
    }
}
