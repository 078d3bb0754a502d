//! An inserted row. Run by the appliers.

use braid_bgworker::conflict::{Action, Decision, Local, Version, decide_insert};
use braid_postgres::error::PgError;

use super::incoming::Incoming;
use super::row_change::{RowChange, Sought};
use crate::Session;
use crate::lookup::{Found, Purpose};
use crate::row_context::RowContext;
use crate::table::RowValues;
use crate::write::Written;

/// A row that a change inserts into a table with a key.
struct Insert<'v> {
    after: &'v RowValues,
}

impl RowChange for Insert<'_> {
    fn sought(&self) -> Sought<'_> {
        Sought::new(self.after, Purpose::Insert, None)
    }

    fn decide(local: Local<'_>, version: Version<'_>, from_origin: bool) -> Decision {
        decide_insert(local, version, from_origin)
    }

    fn carry_out(
        &mut self,
        session: &mut Session,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<Written, PgError> {
        session.check_complete(context, found, decision, self.after)?;
        let incoming = Incoming::inserted(self.after);
        let written = session.write_row(context, found, decision, incoming)?;
        if written == Written::Done {
            session.mark_entered(context, decision)?;
            session.settle_late(context, found, decision, (self.after, self.after))?;
        }
        Ok(written)
    }
}

impl Session {
    /// Applies an insert.
    pub(crate) fn insert(
        &mut self,
        context: RowContext<'_>,
        after: &RowValues,
    ) -> Result<(), PgError> {
        if self.tables.target(context.key)?.plan.key.is_none() {
            return self.insert_without_key(context, after);
        }
        self.apply_row(context, &mut Insert { after })
    }

    /// Applies an insert into a table without a key. The row is added even if an equal one is
    /// there, unless a remembered removal was meant for it.
    fn insert_without_key(
        &mut self,
        context: RowContext<'_>,
        after: &RowValues,
    ) -> Result<(), PgError> {
        let RowContext { key, current, .. } = context;
        let incoming = Incoming::inserted(after);
        if let Some(met) = self.removal_of(context, after)? {
            let (found, decision) = (met.found(), met.decision);
            self.removals().stay_away(key, current, met)?;
            self.write_row(context, found, decision, incoming)?;
            return Ok(());
        }
        // If no removal was meant for it, only a truncate may have removed it.
        let found = self.deletions().recall(key, after, None, true)?;
        let mut decision = self.decide(context, found, decide_insert)?;
        if decision.action == Action::Ask {
            let local = self.origins.local(found);
            decision = decide_insert(local, context.version(), current.from_origin);
        }
        self.check_complete(context, found, decision, after)?;
        self.write_row(context, found, decision, incoming)?;
        Ok(())
    }
}
