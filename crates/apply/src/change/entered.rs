//! Inserts that come without some of the row's values: an update at the provider has brought the
//! row into the publication's row filter. Run by the appliers.
//!
//! The provider is asked for the values before the row is routed, found or written
//! (`crate::querier`), because partition bounds and conflict rules use them. For changes of
//! `braid.ingest` there is nobody to ask. There, the row that is found completes the new one, and a
//! missing row is an error.

use braid_bgworker::conflict::{Action, Decision, Kind};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Change, Image, Value};
use braid_postgres::error::PgError;

use super::decision::writes;
use crate::Session;
use crate::deletion::session_origin;
use crate::lookup::Found;
use crate::querier::Entered;
use crate::relation::RemoteRelation;
use crate::row_context::RowContext;
use crate::table::RowValues;

/// Whether an image lacks a value.
pub(super) fn lacks_values(image: &Image<'_>) -> bool {
    let mut values = image.values();
    values.any(|value| matches!(value, Ok(Value::None)))
}

/// Decision about a row that the provider does not have any more.
const LEFT_OUT: Decision = Decision {
    action: Action::Keep,
    conflict: Some(Kind::UpdateMissing),
    reason: "the change does not carry its unchanged large values, and the provider does not have the row any more",
};

impl Session {
    /// Applies an insert that lacks values. `context` has the table that the stream names.
    pub(crate) fn insert_entered(
        &mut self,
        change: &Change<'_>,
        schema: u32,
        context: RowContext<'_>,
    ) -> Result<(), PgError> {
        let RowContext { key, remote, .. } = context;
        let Some(image) = &change.after else {
            return Ok(());
        };
        let values = self.values(image, key, remote)?;
        let former = self.former_key(context)?;
        let entered = self
            .questions()
            .fetch_entered(context, &values, former.as_ref())?;
        match entered {
            Entered::Gone => return self.leave_out(context, &values),
            Entered::Nobody => {}
            Entered::Values { answers, is_exact } => {
                let attempt = self.attempt();
                attempt.answers = Some(answers);
                attempt.is_unverified = !is_exact;
            }
        }
        let (key, after) = self.routed_new(Some(image), schema, key, remote)?;
        self.insert(context.at(key), &after)?;
        self.spare.extend([values, after]);
        Ok(())
    }

    /// The key that the row had before the update, if the provider has sent it.
    fn former_key(&mut self, context: RowContext<'_>) -> Result<Option<RowValues>, PgError> {
        let Some(content) = self.attempt().former_key.take() else {
            return Ok(None);
        };
        let image = Image::read_alone(&content)?;
        self.values(&image, context.key, context.remote).map(Some)
    }

    /// Records that a row is not written: its deletion, or its next key, follows in the stream.
    fn leave_out(&mut self, context: RowContext<'_>, values: &RowValues) -> Result<(), PgError> {
        let (plan, table) = self.tables.opened(context.key)?;
        table.prepare_insert(plan, values);
        let rows = self.tables.rows(context.key, false, Some(values))?;
        self.record(context, Found::Missing(None), LEFT_OUT, &rows)
    }

    /// Checks that an inserted row has all of its values, or that a row that was found completes
    /// it.
    ///
    /// # Errors
    /// 22023 if it would be written with nulls in place of values.
    pub(super) fn check_complete(
        &self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        after: &RowValues,
    ) -> Result<(), PgError> {
        let completes = matches!(found, Found::Row(_)) || !writes(decision);
        if completes || !self.tables.has_gaps(context.key, after) {
            return Ok(());
        }
        Err(incomplete(context.remote))
    }

    /// Marks the row in the new slot, which was just inserted, if some of its values may be those
    /// of another row. The next change of it then counts as a conflict.
    pub(super) fn mark_entered(
        &mut self,
        context: RowContext<'_>,
        decision: Decision,
    ) -> Result<(), PgError> {
        if !self.attempt().is_unverified || decision.action != Action::Apply {
            return Ok(());
        }
        let version = (context.current.timestamp, session_origin());
        self.mark_unverified(context.key, version)
    }
}

fn incomplete(remote: &RemoteRelation) -> PgError {
    PgError::new(
        SqlState::InvalidParameterValue,
        format!(
            "an inserted row of table \"{}\" lacks values of its columns",
            remote.qualified_name()
        ),
    )
    .with_detail("Null would take the place of a value that is not known.")
    .with_hint(
        "Give each column of the schema a value in \"after\", null if it is null; or leave the column out of the schema, then it gets its \
         default.",
    )
}
