//! Published columns that a local table does not have. They are an error, or left out, by the
//! table's rule (`braid.missing_column_rule`) or the subscription's option `on_missing_column`. Run
//! by the appliers and copy workers, once for each plan of a table.
//!
//! Invariants: a column of a key is never left out, and no row is. Each column that is left out is
//! recorded in `braid.missing_column`, in the transaction that leaves it out.
//!
//! Not for: columns of this node that the provider does not send (`Lacking`).

use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::rows_written;
use braid_postgres::error::PgError;
use braid_postgres::{encoding, kept_plan};
use pgrx::pg_sys;

use super::{NO_SUBSCRIPTION, Session};

/// The rule of a table, or of the nearest partitioned table above it.
pub const RULE: &str = "\
    select r.rule from braid.missing_column_rule r \
    join (select relid::oid, steps from pg_catalog.pg_partition_ancestors($1::oid) with ordinality p (relid, steps) \
          union select $1::oid, 1) a on a.relid = r.relation::oid \
    order by a.steps limit 1";

/// Several appliers may record a column at a time, so none waits for another.
const NOTE: &str = "\
    insert into braid.missing_column (subscription_id, source_name, relation, column_name, relation_columns) \
    select $1, $2::name, c.oid::regclass, u.name::name, c.relnatts \
    from pg_catalog.pg_class c cross join unnest($4::text[]) u (name) \
    where c.oid = $3::oid and not exists (select from braid.missing_column m \
        where m.subscription_id = $1 and m.source_name is not distinct from $2::name and m.relation = c.oid::regclass \
          and m.column_name = u.name::name and m.relation_columns = c.relnatts) \
    returning column_name::text, relation::text";

/// A published column that is missing here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingColumn {
    /// Name.
    pub name: String,
    /// Part of the provider's primary key, or of a replica identity that is an index.
    pub is_key: bool,
}

fn listed(columns: &[&MissingColumn]) -> (&'static str, String) {
    let names: Vec<String> = columns
        .iter()
        .map(|column| format!("\"{}\"", column.name))
        .collect();
    let noun = if names.len() == 1 {
        "column"
    } else {
        "columns"
    };
    (noun, names.join(", "))
}

/// Returns the names of the columns to leave out. `table` is the table's name for messages,
/// `ignores` the subscription's option. In a transaction, with the process's own rights.
///
/// # Errors
/// 42703 if one of them must not be left out; whatever PostgreSQL raises.
pub fn left_out(
    oid: pg_sys::Oid,
    table: &str,
    ignores: bool,
    missing: &[MissingColumn],
) -> Result<Vec<String>, PgError> {
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    let found = kept_plan::rows(RULE, &[oid.into()])?;
    let rule = found
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next());
    let ignores = rule.flatten().map_or(ignores, |rule| rule == "ignore");
    let keys: Vec<&MissingColumn> = missing.iter().filter(|column| column.is_key).collect();
    if ignores && keys.is_empty() {
        return Ok(missing.iter().map(|column| column.name.clone()).collect());
    }
    if ignores {
        let (noun, names) = listed(&keys);
        return Err(PgError::new(
            SqlState::UndefinedColumn,
            format!("table \"{table}\" lacks key {noun} {names} that the provider sends"),
        )
        .with_detail("Columns of a primary key or replica identity cannot be ignored.")
        .with_hint("Add what is missing here, then run braid.enable_subscription."));
    }
    let (noun, names) = listed(&missing.iter().collect::<Vec<_>>());
    Err(PgError::new(
        SqlState::UndefinedColumn,
        format!("table \"{table}\" lacks {noun} {names} that the provider sends"),
    )
    .with_hint(
        "Add what is missing here, leave it out of the publication with a column list, or have it left out here with \
         braid.set_missing_column_rule, then run braid.enable_subscription.",
    ))
}

/// Records and logs that columns of a table are left out, unless that is recorded already. `source`
/// names the source of `braid.ingest`, if there is no subscription. In a transaction, with the
/// process's own rights.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn note(
    (subscription, source): (u32, Option<&str>),
    oid: pg_sys::Oid,
    columns: &[String],
) -> Result<(), PgError> {
    if columns.is_empty() {
        return Ok(());
    }
    let noted = rows_written(
        NOTE,
        &[
            i32::try_from(subscription).unwrap_or(0).into(),
            source.into(),
            i64::from(oid.to_u32()).into(),
            encoding::texts_argument(columns),
        ],
    )?;
    for row in noted {
        let [column, table] = <[_; 2]>::try_from(row).unwrap_or_default();
        pgrx::log!(
            "column \"{}\" of table {} is left out of what is applied, as the table does not have it",
            column.unwrap_or_default(),
            table.unwrap_or_default()
        );
    }
    Ok(())
}

impl Session {
    /// Records the columns that the current transaction leaves out of the tables that it has
    /// opened.
    pub(super) fn note_missing(&mut self) -> Result<(), PgError> {
        let (id, name) = (
            self.identity.subscription_id,
            self.identity.subscription.as_str(),
        );
        let writer = (id, (id == NO_SUBSCRIPTION).then_some(name));
        for key in self.attempt.iter().flat_map(|attempt| &attempt.open) {
            let Some(target) = self.tables.get_mut(*key) else {
                continue;
            };
            if target.missing_noted || target.plan.missing.is_empty() {
                continue;
            }
            // A partition has the rows of the table that the stream names.
            let table = target.plan.root.unwrap_or(target.plan.oid);
            note(writer, table, &target.plan.missing)?;
            target.missing_noted = true;
        }
        Ok(())
    }
}
