//! Rules for conflicts in a table: `braid.conflict_rule`. Read with a table's plan. A change of a
//! rule makes all plans stale, from the next transaction on.

use braid_bgworker::resolution::{Function, Level, Rule, Rules};
use braid_bgworker::sqlstate::SqlState;
use braid_decoder::{RULE_PREFIX, VERSIONS_PREFIX};
use braid_gir::Message;
use braid_node::subscription::execute;
use braid_postgres::error::PgError;
use braid_postgres::kept_plan;
use braid_postgres::names::own_table;
use braid_postgres::relation;
use braid_postgres::table_scan::{Sees, has_any};
use pgrx::pg_sys;

use super::Session;

/// Rules for the table, for those of which it is a partition, and for all tables, each with its
/// level; null for all tables. Each half uses an index, because there may be as many rules as
/// tables.
const RULES: &str = "\
    select null::text, r.kind, r.resolution, r.function_id::text, r.replicates::text, r.has_asked::text from braid.conflict_rule r \
    where r.relation is null \
    union all \
    select (a.steps - 1)::text, r.kind, r.resolution, r.function_id::text, r.replicates::text, r.has_asked::text \
    from (select relid::oid, steps from pg_catalog.pg_partition_ancestors($1::oid) with ordinality p (relid, steps) \
          union select $1::oid, 1) a join braid.conflict_rule r on r.relation::oid = a.relid";

/// Returns the rules for conflicts in a table. In a transaction, with the process's own rights.
///
/// # Errors
/// XX000 for a rule that this version does not know; whatever PostgreSQL raises.
pub fn load(table: pg_sys::Oid) -> Result<Rules, PgError> {
    let all = own_table("conflict_rule")?;
    let found = if has_any(all, pg_sys::InvalidOid, &[], Sees::Committed) {
        kept_plan::rows(RULES, &[table.into()])?
    } else {
        Vec::new()
    };
    let mut rules = Vec::with_capacity(found.len());
    let mut asked = false;
    for row in found {
        let [steps, kind, resolution, function, replicates, has_asked] =
            <[_; 6]>::try_from(row).unwrap_or_default();
        asked |= has_asked.as_deref() == Some("true");
        // The rule was removed.
        let Some(resolution) = resolution else {
            continue;
        };
        let level = match steps.as_deref() {
            None => Level::Default,
            Some("0") => Level::Table,
            Some(steps) => Level::Ancestor(steps.parse().unwrap_or(u32::MAX)),
        };
        let unknown = |name: &str| {
            PgError::new(
                SqlState::InternalError,
                format!("\"{name}\" in braid.conflict_rule is not known to this version"),
            )
        };
        let kind = kind
            .map(|kind| kind.parse().map_err(|_| unknown(&kind)))
            .transpose()?;
        let function = function
            .and_then(|oid| oid.parse().ok())
            .map(|oid| Function {
                oid,
                replicates: replicates.as_deref() == Some("true"),
            });
        rules.push(Rule {
            level,
            kind,
            resolution: resolution.parse().map_err(|_| unknown(&resolution))?,
            function,
        });
    }
    Ok(Rules::new(&rules).with_merged_rows(asked))
}

/// Whether a message is a rule that was set for all nodes.
#[must_use]
pub fn is_rule(message: &Message<'_>) -> bool {
    message.transactional && message.prefix == RULE_PREFIX
}

/// Whether a message is the versions of the transaction that begins with it.
#[must_use]
pub fn is_versions(message: &Message<'_>) -> bool {
    message.transactional && message.prefix == VERSIONS_PREFIX
}

impl Session {
    /// Sets a rule from another node that was set for all nodes; `content` is its message.
    ///
    /// # Errors
    /// 42883 if its function is missing here; 55000 if a column can't have it; other errors of
    /// setting it.
    pub fn take_rule(&mut self, content: &[u8]) -> Result<(), PgError> {
        self.flush()?;
        take_rule(&String::from_utf8_lossy(content), true)
    }
}

/// Sets a rule from another node that was set for all nodes, unless a newer one is here. In a
/// transaction of the caller. `required`: a rule for a column of a missing table is an error, not a
/// warning.
///
/// # Errors
/// 42883 if its function is missing here; 55000 if a column can't have it; other errors of setting
/// it.
pub fn take_rule(content: &str, required: bool) -> Result<(), PgError> {
    execute(
        "select case when convert_from(decode($1, 'hex'), 'UTF8')::jsonb ? 'positions' then braid.take_sequence_positions($1) \
                when convert_from(decode($1, 'hex'), 'UTF8')::jsonb ? 'column' then braid.take_column_rule($1, $2) \
                else braid.take_conflict_resolution($1) end",
        &[content.into(), required.into()],
    )
}

/// Makes every process that applies changes read the rules again, once the current transaction,
/// which has changed rules, has committed.
///
/// # Errors
/// 42P01 without the table of rules.
pub fn announce() -> Result<(), PgError> {
    let Some(oid) = braid_postgres::names::find_table("braid", "conflict_rule")? else {
        return Err(PgError::new(
            SqlState::UndefinedTable,
            "table braid.conflict_rule does not exist",
        ));
    };
    // Any invalidation of a relation makes plans stale. This one is for a table that nothing else
    // uses.
    relation::invalidate(oid.to_u32());
    Ok(())
}
