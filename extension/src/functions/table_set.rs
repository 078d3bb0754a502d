//! The tables of a subscription: finds their local counterparts, and keeps braid.subscription_table
//! in step with the publications.

use std::collections::{BTreeMap, HashSet};
use std::ffi::CStr;

use braid_apply::MISSING_COLUMN_RULE;
use braid_bgworker::sql_text::quote_identifier;
use braid_node::routing_guard;
use braid_node::subscription::joins_with_rows;
use braid_postgres::catalog::{Rights, glance, query};
use pgrx::iter::TableIterator;
use pgrx::{PgSqlErrorCode, name, pg_extern, pg_sys};

use super::failure::{Failure, Outcome, notice};
use super::local::{self, Subscription};
use super::provider::{Provider, PublishedColumn, PublishedTables};
use super::subscription::prepared_for;
use super::{required, required_name, routing, run, wake_manager};

/// A local table that changes are to be applied to.
pub struct Target {
    /// The table's OID as text.
    pub oid: String,
    /// Schema-qualified and quoted.
    pub qualified: String,
    /// For messages.
    pub shown: String,
    owner: u32,
    partitioned: bool,
}

/// braid.refresh_subscription(subscription_name name, copy_data boolean)
#[pg_extern(sql = false)]
fn refresh_subscription(
    subscription_name: Option<&CStr>,
    copy_data: Option<bool>,
) -> TableIterator<'static, (name!(relation, pg_sys::Oid), name!(action, &'static str))> {
    let changes = run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let copy_data = required(copy_data, "copy_data")?;
        local::require_node()?;
        let subscription = local::lock_subscription(&name)?;
        let mut provider = Provider::open(
            subscription.dsn()?,
            pg_sys::Oid::from_u32(subscription.owner),
        )?;
        provider.check_is(&subscription)?;
        provider.check_publications(&subscription.options.publications)?;
        let changes = refresh(&subscription, &mut provider, copy_data)?;
        if !changes.is_empty() {
            wake_manager();
        }
        Ok(changes)
    });
    TableIterator::new(changes)
}

/// braid.resync_table(subscription_name name, relation regclass, truncate_first boolean)
#[pg_extern(sql = false)]
fn resync_table(
    subscription_name: Option<&CStr>,
    relation: Option<pg_sys::Oid>,
    truncate_first: Option<bool>,
) {
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let relation = required(relation, "relation")?.to_u32().to_string();
        let truncate_first = required(truncate_first, "truncate_first")?;
        local::require_node()?;
        let subscription = local::lock_subscription(&name)?;
        resync(&subscription, &relation, truncate_first)
    });
}

fn resync(subscription: &Subscription, relation: &str, truncate_first: bool) -> Outcome<()> {
    // A table that was made anew is known by its name.
    query(
        "update braid.subscription_table t set relation = $2::oid, replaced_by = null \
           from pg_class c join pg_namespace n on n.oid = c.relnamespace \
          where c.oid = $2::oid and t.subscription_id = $1::integer and t.schema_name = n.nspname and t.table_name = c.relname \
            and t.state <> 'copying' and t.relation <> $2::oid \
            and not exists (select from braid.subscription_table o where o.subscription_id = t.subscription_id and o.relation = $2::oid)",
        &[Some(&subscription.id), Some(relation)],
    );
    let rows = query(
        "select t.state, t.relation::text, c.oid is not null \
           from braid.subscription_table t left join pg_class c on c.oid = t.relation \
          where t.subscription_id = $1::integer and t.relation = $2::oid for update of t",
        &[Some(&subscription.id), Some(relation)],
    );
    let shown = query("select $1::oid::regclass::text", &[Some(relation)]);
    let shown = shown.get(0, 0).unwrap_or_default();
    if rows.is_empty() {
        return Err(Failure::undefined(format!(
            "table {shown} is not in subscription \"{}\"",
            subscription.name
        ))
        .hint("The view braid.subscription_tables lists the tables of each subscription; braid.refresh_subscription brings new ones in."));
    }
    if rows.get(0, 2) != Some("t") {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("table {shown} does not exist any more"),
        )
        .hint(format!(
            "Create the table and run braid.refresh_subscription('{}').",
            subscription.name
        )));
    }
    if rows.get(0, 0) == Some("copying") {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("table {shown} is being copied"),
        )
        .hint("Wait until it is ready, or disable the subscription first."));
    }
    routing::check_whole(oid(relation), "copy", shown)?;
    // The copy would wait for it, and its end for the copy.
    if let Some(gid) = prepared_for(subscription).first() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!(
                "transaction \"{gid}\" of subscription \"{}\" is prepared here",
                subscription.name
            ),
        )
        .hint("Wait until it is committed or rolled back at the provider."));
    }
    if truncate_first {
        notice(format!(
            "table {shown} will be truncated here before it is copied"
        ));
    } else {
        let target = find_target(&shown_name(relation)?, &[], false)?;
        check_partitions(&target)?;
        check_empty(&target)?;
    }
    query(
        "update braid.subscription_table set state = 'waiting', copy_lsn = null, copy_snapshot = null, copy_began_at = null, rows_copied = null, bytes_copied = null, \
                rows_total = null, bytes_total = null, copy_error = null, ready_at = null, unless_filled = false, made_anew = false, truncate_first = $3::boolean \
          where subscription_id = $1::integer and relation = $2::oid",
        &[
            Some(&subscription.id),
            Some(relation),
            Some(if truncate_first { "t" } else { "f" }),
        ],
    );
    wake_manager();
    Ok(())
}

fn shown_name(relation: &str) -> Outcome<(String, String)> {
    let rows = query(
        "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = $1::oid",
        &[Some(relation)],
    );
    match (rows.get(0, 0), rows.get(0, 1)) {
        (Some(schema), Some(table)) => Ok((schema.to_owned(), table.to_owned())),
        _ => Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            "table does not exist any more",
        )
        .hint("Create the table and refresh the subscription.")),
    }
}

/// The local counterparts of published tables. They must all exist, with all columns; to be copied
/// into, they must be empty. With `ignores`, missing columns are left out, unless a rule of the
/// table forbids that.
pub fn find_targets(
    published: &PublishedTables,
    to_copy: bool,
    ignores: bool,
) -> Outcome<Vec<Target>> {
    let missing: Vec<String> = published
        .keys()
        .filter(|(schema, table)| resolve(schema, table).is_empty())
        .map(|(schema, table)| format!("\"{schema}.{table}\""))
        .collect();
    if !missing.is_empty() {
        let (noun, verb) = if missing.len() == 1 {
            ("table", "does")
        } else {
            ("tables", "do")
        };
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("published {noun} {} {verb} not exist here", missing.join(", ")),
        )
        .hint("Create them first, for example from pg_dump --schema-only at the provider, or publish fewer tables."));
    }
    let replaces = to_copy && joins_with_rows()?;
    let mut targets = Vec::with_capacity(published.len());
    for (table, columns) in published {
        let target = find_target(table, columns, ignores)?;
        if to_copy {
            check_partitions(&target)?;
            if !replaces {
                check_empty(&target)?;
            }
        }
        targets.push(target);
    }
    Ok(targets)
}

fn qualify(schema: &str, table: &str) -> String {
    format!("{}.{}", quote_identifier(schema), quote_identifier(table))
}

fn resolve(schema: &str, table: &str) -> braid_postgres::rows::Rows {
    query(
        "select c.oid, c.relkind, c.relowner::oid from pg_class c where c.oid = to_regclass($1)",
        &[Some(&qualify(schema, table))],
    )
}

fn find_target(
    table: &(String, String),
    columns: &[PublishedColumn],
    ignores: bool,
) -> Outcome<Target> {
    let (schema, name) = table;
    let shown = format!("{schema}.{name}");
    let rows = resolve(schema, name);
    let kind = rows.get(0, 1);
    if kind != Some("r") && kind != Some("p") {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
            format!("cannot replicate into \"{shown}\", which is not a table here"),
        )
        .hint("Rename it and create a table, or publish fewer tables."));
    }
    let oid = rows.get(0, 0).unwrap_or_default().to_owned();
    let attributes = query(
        "select attname, attgenerated <> '' from pg_attribute \
          where attrelid = $1::oid and attnum > 0 and not attisdropped",
        &[Some(&oid)],
    );
    let here: BTreeMap<String, bool> = attributes
        .iter()
        .filter_map(|row| Some((row.first()?.clone()?, row.get(1)?.as_deref() == Some("t"))))
        .collect();
    let quoted = |columns: Vec<&PublishedColumn>| {
        columns
            .iter()
            .map(|column| format!("\"{}\"", column.name))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let missing: Vec<&PublishedColumn> = columns
        .iter()
        .filter(|column| !here.contains_key(&column.name))
        .collect();
    let ignores = !missing.is_empty() && ignores_missing(&oid, ignores);
    let missing_keys: Vec<&PublishedColumn> = missing
        .iter()
        .copied()
        .filter(|column| column.is_key)
        .collect();
    if ignores && !missing_keys.is_empty() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
            format!(
                "table \"{shown}\" lacks published columns of a key: {}",
                quoted(missing_keys)
            ),
        )
        .detail("Columns of a primary key or replica identity cannot be ignored.")
        .hint("Add the columns here."));
    }
    if !missing.is_empty() && !ignores {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
            format!(
                "table \"{shown}\" lacks published columns: {}",
                quoted(missing)
            ),
        )
        .hint("Add the columns here, publish the table with a column list, or use on_missing_column => 'ignore'."));
    }
    let generated: Vec<&PublishedColumn> = columns
        .iter()
        .filter(|column| here.get(&column.name) == Some(&true))
        .collect();
    if !generated.is_empty() {
        return Err(Failure::state(format!(
            "published columns of table \"{shown}\" are generated columns here: {}",
            quoted(generated)
        ))
        .hint("Make them ordinary columns here, or publish the table with a column list."));
    }
    Ok(Target {
        qualified: qualify(schema, name),
        owner: rows
            .get(0, 2)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0),
        partitioned: kind == Some("p"),
        shown,
        oid,
    })
}

/// Whether columns that the table does not have are left out; `option` is the subscription's.
fn ignores_missing(oid: &str, option: bool) -> bool {
    match query(MISSING_COLUMN_RULE, &[Some(oid)]).get(0, 0) {
        Some(rule) => rule == "ignore",
        None => option,
    }
}

/// Checks that no partition is a foreign table, which can't be copied into.
fn check_partitions(target: &Target) -> Outcome<()> {
    if !target.partitioned {
        return Ok(());
    }
    let foreign = query(
        "select n.nspname, c.relname from braid.partition_tree($1::oid) p (oid) join pg_class c on c.oid = p.oid \
           join pg_namespace n on n.oid = c.relnamespace where c.relkind = 'f' order by 1, 2 limit 1",
        &[Some(&target.oid)],
    );
    let (Some(schema), Some(name)) = (foreign.get(0, 0), foreign.get(0, 1)) else {
        return Ok(());
    };
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
        format!("partition \"{schema}.{name}\" is a foreign table here"),
    )
    .detail("Changes are applied to ordinary and partitioned tables only.")
    .hint("Detach the partition, put an ordinary table in its place, or use copy_data => false."))
}

/// Checks that a table has no rows. The query runs as the table's owner: should the name have come
/// to mean something else by now, for example a view with functions in it, these run with no more
/// rights than that. Its locks are released: the copy locks the table, and checks again.
fn check_empty(target: &Target) -> Outcome<()> {
    let only = if target.partitioned { "" } else { "only " };
    let sql = format!("select exists (select from {only}{})", target.qualified);
    let owner = pg_sys::Oid::from_u32(target.owner);
    let rows = glance(Rights::Confined(owner), &sql);
    if rows.get(0, 0) == Some("f") {
        return Ok(());
    }
    Err(Failure::state(format!("table \"{}\" already contains rows", target.shown))
        .detail("The initial copy would conflict with existing rows.")
        .hint("If it agrees with the provider already, use copy_data => false. To replace its rows, do so and then run braid.resync_table, which empties it on this node only. A TRUNCATE would also empty it on the nodes that subscribe to this one."))
}

/// Puts a table into a subscription, unless a leader that starts has just done that. Returns
/// whether it has.
pub fn add(subscription_id: &str, target: &Target, to_copy: bool) -> bool {
    let unlogged = query("select braid.is_unlogged($1::oid)", &[Some(&target.oid)]);
    if unlogged.get(0, 0) == Some("t") {
        braid_apply::unlogged(&target.shown).warn();
    }
    let added = query(
        "insert into braid.subscription_table (subscription_id, relation, schema_name, table_name, state, ready_at) \
         select $1::integer, c.oid, n.nspname, c.relname, $3, case when $3 = 'ready' then now() end \
           from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = $2::oid \
         on conflict do nothing returning 1",
        &[
            Some(subscription_id),
            Some(&target.oid),
            Some(if to_copy { "waiting" } else { "ready" }),
        ],
    );
    !added.is_empty()
}

/// Updates braid.subscription_table to the published tables. Returns the changes.
pub fn refresh(
    subscription: &Subscription,
    provider: &mut Provider,
    to_copy: bool,
) -> Outcome<Vec<(pg_sys::Oid, &'static str)>> {
    let published = provider.published_tables(&subscription.options.publications, to_copy)?;
    let present = local::column(&query(
        "select relation::oid from braid.subscription_table where subscription_id = $1::integer",
        &[Some(&subscription.id)],
    ));
    // Tables that exist already may have rows.
    let known: HashSet<&str> = present.iter().map(String::as_str).collect();
    let (old, new): (PublishedTables, PublishedTables) =
        published.into_iter().partition(|((schema, table), _)| {
            resolve(schema, table)
                .get(0, 0)
                .is_some_and(|oid| known.contains(oid))
        });
    let ignores = subscription.options.ignores_missing();
    let kept: HashSet<String> = find_targets(&old, false, ignores)?
        .into_iter()
        .map(|target| target.oid)
        .collect();
    // With or without a copy, the caller has made sure of the tables that have the names of former
    // ones.
    query(
        "update braid.subscription_table t set schema_name = n.nspname, table_name = c.relname, replaced_by = null, \
                copy_error = case when t.replaced_by is null then t.copy_error end, copy_error_hint = case when t.replaced_by is null then t.copy_error_hint end, \
                copy_error_sqlstate = case when t.replaced_by is null then t.copy_error_sqlstate end, \
                copy_error_context = case when t.replaced_by is null then t.copy_error_context end \
           from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = t.relation::oid and t.subscription_id = $1::integer \
            and (t.schema_name <> n.nspname or t.table_name <> c.relname or t.replaced_by is not null)",
        &[Some(&subscription.id)],
    );
    let mut changes = Vec::new();
    // Each node has rows of its own of a routed table.
    let (routed, new): (PublishedTables, PublishedTables) =
        new.into_iter().partition(|(table, _)| is_routed(table));
    let routed = find_targets(&routed, false, ignores)?;
    for target in &routed {
        if to_copy {
            notice(format!(
                "table \"{}\" is routed, and is not copied: each node has rows of its own",
                target.shown
            ));
        }
        if add(&subscription.id, target, false) {
            changes.push((oid(&target.oid), "added"));
        }
    }
    for target in find_targets(&new, to_copy, ignores)? {
        if add(&subscription.id, &target, to_copy) {
            changes.push((oid(&target.oid), "added"));
        }
    }
    for relation in present.iter().filter(|relation| !kept.contains(*relation)) {
        remove(&subscription.id, relation);
        changes.push((oid(relation), "removed"));
    }
    query(
        "delete from braid.left_out_table l using braid.subscription_table t where l.subscription_id = $1::integer and l.provider_relation = 0 \
            and t.subscription_id = l.subscription_id and t.schema_name = l.schema_name and t.table_name = l.table_name",
        &[Some(&subscription.id)],
    );
    Ok(changes)
}

fn is_routed((schema, table): &(String, String)) -> bool {
    let found = resolve(schema, table);
    found
        .get(0, 0)
        .is_some_and(|relation| routing_guard::is_routed(oid(relation)))
}

/// Removes a table from a subscription. Its later changes are left out.
fn remove(subscription_id: &str, relation: &str) {
    query(
        "with gone as ( \
             delete from braid.subscription_table where subscription_id = $1::integer and relation = $2::oid \
             returning subscription_id, schema_name, table_name) \
         insert into braid.left_out_table (subscription_id, schema_name, table_name, provider_relation, reason) \
         select subscription_id, schema_name, table_name, 0, 'removed' from gone on conflict do nothing",
        &[Some(subscription_id), Some(relation)],
    );
}

fn oid(text: &str) -> pg_sys::Oid {
    pg_sys::Oid::from_u32(text.parse().unwrap_or(0))
}
