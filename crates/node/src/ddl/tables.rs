//! Former names of tables (`braid.former_table`). A statement that renames a table is run on one
//! node after the other. Meanwhile a node that has run it gets rows from others under the former
//! name. If two tables have swapped their names, a name alone does not say which is meant.
//!
//! Written in the transaction of the statement. A table of a provider keeps its OID, so
//! `braid.subscription_table` has that OID. The leader asks the provider once, for its renames and
//! for those of this node that it lacks (`workers/leader/membership.rs`).

use braid_gir::{Statement, TableState};
use braid_postgres::error::PgError;
use braid_postgres::kept_plan;
use braid_postgres::names::{find_table, own_table};
use braid_postgres::table_scan::{Sees, has_any};
use pgrx::pg_sys;

use super::facts::owners_query;
use super::roles;

/// Writes down the names that a statement has changed. In its transaction.
pub fn note_renames(statement: &Statement) {
    let name = |state: &TableState| (state.namespace.clone(), state.name.clone());
    for table in &statement.tables {
        let (Some(before), Some(after)) = (&table.before, &table.after) else {
            continue;
        };
        if name(before) == name(after) || roles::is_role(after) {
            continue;
        }
        owners_query(
            "insert into braid.former_table (schema_name, table_name, relation, ddl_id) \
             select $1::name, $2::name, c.oid, $5::uuid from pg_class c join pg_namespace n on n.oid = c.relnamespace \
             where n.nspname = $3::name and c.relname = $4::name \
             on conflict do nothing",
            &[
                Some(&before.namespace),
                Some(&before.name),
                Some(&after.namespace),
                Some(&after.name),
                Some(&statement.uuid()),
            ],
        );
        owners_query(
            "delete from braid.former_table f where not exists (select from pg_class c where c.oid = f.relation)",
            &[],
        );
    }
}

/// Whether any table was renamed by a statement.
fn has_renamed() -> Result<bool, PgError> {
    let table = own_table("former_table")?;
    Ok(has_any(table, pg_sys::InvalidOid, &[], Sees::Active))
}

fn first_oid(found: Vec<Vec<Option<String>>>) -> Option<pg_sys::Oid> {
    let cell = found.into_iter().next()?.into_iter().next()??;
    cell.parse::<u32>().ok().map(pg_sys::Oid::from)
}

/// The table of a subscription whose provider sends its rows under this name, if the table was
/// renamed by a statement; `None` for other tables, whose names count. In a transaction with a
/// snapshot.
///
/// # Errors
/// 42P01 when the extension is older than the library; those of PostgreSQL.
pub fn renamed(
    subscription_id: u32,
    namespace: &str,
    name: &str,
) -> Result<Option<pg_sys::Oid>, PgError> {
    if !has_renamed()? {
        return Ok(None);
    }
    Ok(first_oid(kept_plan::rows_in_snapshot(
        "select t.relation::oid::text from braid.subscription_table t \
         where t.subscription_id = $1 and t.schema_name = $2::name and t.table_name = $3::name \
           and exists (select from braid.former_table f where f.relation = t.relation::oid) \
           and exists (select from pg_catalog.pg_class c where c.oid = t.relation::oid)",
        &[
            i64::from(subscription_id).into(),
            namespace.into(),
            name.into(),
        ],
    )?))
}

/// The local table that takes the rows of a provider's table, by the provider's OID of it. `None`
/// if that is not recorded, or if a statement that was not replicated has renamed the local table.
/// In a transaction with a snapshot.
///
/// # Errors
/// 42P01 when the extension is older than the library; those of PostgreSQL.
pub fn numbered(subscription_id: u32, number: u32) -> Result<Option<pg_sys::Oid>, PgError> {
    if number == 0 {
        return Ok(None);
    }
    Ok(first_oid(kept_plan::rows_in_snapshot(
        "select c.oid::text from braid.subscription_table t join pg_catalog.pg_class c on c.oid = t.relation::oid \
           join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
         where t.subscription_id = $1 and t.provider_relation = $2::oid \
           and ((n.nspname = t.schema_name and c.relname = t.table_name) \
             or exists (select from braid.former_table f where f.relation = c.oid))",
        &[i64::from(subscription_id).into(), i64::from(number).into()],
    )?))
}

/// When a subscription was created, in seconds since 1970, and the ids of the statements that have
/// renamed local tables since then. A table that was renamed before had its name at both nodes
/// already. In a transaction.
///
/// # Errors
/// 42P01 when the extension is older than the library; those of PostgreSQL.
pub fn renames(subscription_id: u32) -> Result<(String, Vec<String>), PgError> {
    let found = kept_plan::rows_in_snapshot(
        "select extract(epoch from s.created_at)::text, array_to_string(array(select distinct f.ddl_id from braid.former_table f \
           where f.recorded_at > s.created_at), ',') from braid.subscription s where s.subscription_id = $1",
        &[i64::from(subscription_id).into()],
    )?;
    let [since, statements] = found
        .into_iter()
        .next()
        .and_then(|row| <[_; 2]>::try_from(row).ok())
        .unwrap_or_default();
    let statements = statements.unwrap_or_default();
    let statements = statements.split(',').filter(|id| !id.is_empty());
    Ok((
        since.unwrap_or_else(|| "0".to_owned()),
        statements.map(str::to_owned).collect(),
    ))
}

/// Returns those of some statements that this node has not run. In a transaction.
///
/// # Errors
/// Those of PostgreSQL.
pub fn not_run(statements: &[String]) -> Result<Vec<String>, PgError> {
    if statements.is_empty() {
        return Ok(Vec::new());
    }
    let found = kept_plan::rows_in_snapshot(
        "select s from unnest(string_to_array($1, ',')) s where not exists (select from braid.former_table f where f.ddl_id::text = s) \
         and not exists (select from braid.ddl_entry e where e.ddl_id = s::uuid and e.state <> 'failed')",
        &[statements.join(",").into()],
    )?;
    Ok(found
        .into_iter()
        .filter_map(|row| row.into_iter().next().flatten())
        .collect())
}

/// The local table that has a name at a node which has not run these statements. In a transaction.
///
/// # Errors
/// Those of PostgreSQL.
pub fn table_without(
    lacks: &[String],
    namespace: &str,
    name: &str,
) -> Result<Option<pg_sys::Oid>, PgError> {
    // The first of these statements that took the name from a table says which table had it before
    // all of them.
    let former = kept_plan::rows_in_snapshot(
        "select f.relation::text from braid.former_table f where f.schema_name = $1::name and f.table_name = $2::name \
           and f.ddl_id::text = any (string_to_array($3, ',')) and exists (select from pg_catalog.pg_class c where c.oid = f.relation) \
         order by f.recorded_at limit 1",
        &[namespace.into(), name.into(), lacks.join(",").into()],
    )?;
    match first_oid(former) {
        None => find_table(namespace, name),
        former => Ok(former),
    }
}
