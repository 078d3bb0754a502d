//! join_group with mode data: what has to be so before rows of this database and of a group can be
//! reconciled.
//!
//! Each check only reads. It refuses what can't be mended later without losing rows, or would have
//! nodes end with different rows.

use std::collections::BTreeMap;

use braid_node::subscription::publication_literals;
use braid_postgres::catalog::query;
use braid_postgres::rows::Rows;

use super::super::failure::{Failure, Outcome};
use super::super::local;
use super::super::provider::Provider;

/// A table's facts: its shape, whether its primary key finds rows, whether columns of it are
/// registers of their own, whether rows may be equal until a transaction ends.
struct Table {
    shape: String,
    has_key: bool,
    has_rules: bool,
    is_deferrable: bool,
}

/// That rows can be reconciled with those of the group at the source.
pub(super) fn check(source: &mut Provider, publications: &[String]) -> Outcome<()> {
    check_alone()?;
    check_members(source)?;
    // Names of types are written as here.
    source.ask("set search_path = pg_catalog, pg_temp")?;
    let names = publication_literals(publications);
    let here_sql = format!("select 1 from pg_publication where pubname in ({names})");
    let publishes = !query(&here_sql, &[]).is_empty();
    check_publications(&query(&partial_sql(&names), &[]), "this database")?;
    check_publications(
        &source.ask(&partial_sql(&names))?,
        &format!("node \"{}\"", source.name),
    )?;
    let here = tables(&query(&facts_sql(&names, publishes), &[]));
    let there = tables(&source.ask(&facts_sql(&names, true))?);
    check_tables(&here, &there, &source.name)
}

/// That nobody else's changes come here: the source would have to decide about these, too.
fn check_alone() -> Outcome<()> {
    let found = local::column(&query(
        "select quote_ident(subscription_name) from braid.subscription order by 1 limit 5",
        &[],
    ));
    if found.is_empty() {
        return Ok(());
    }
    Err(Failure::state("this database has subscriptions")
        .detail(format!("Subscriptions: {}.", found.join(", ")))
        .hint("Drop them with braid.drop_subscription before joining with rows, or join with mode => 'adopt'."))
}

fn check_members(source: &mut Provider) -> Outcome<()> {
    let away = local::column(&source.ask(
        "select pg_catalog.quote_ident(name) from braid.group_nodes \
          where role = 'data' and not is_local and (reachable is not true or state <> 'active') order by 1",
    )?);
    if away.is_empty() {
        return Ok(());
    }
    Err(
        Failure::state("not all members of the group take part at present")
            .detail(format!("Away, joining, leaving or in maintenance: {}.", away.join(", ")))
            .hint("All of their changes have to be known before rows are reconciled. Wait for them, or remove them with braid.remove_node."),
    )
}

/// Publications that publish only a part of their tables, or of what is done to them.
fn partial_sql(names: &str) -> String {
    format!(
        "select quote_ident(p.pubname) from pg_publication p where p.pubname in ({names}) \
            and (not (p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate) \
                 or exists (select from pg_publication_rel r where r.prpubid = p.oid and (r.prqual is not null or r.prattrs is not null)))"
    )
}

fn check_publications(found: &Rows, owner: &str) -> Outcome<()> {
    let names = local::column(found);
    if names.is_empty() {
        return Ok(());
    }
    Err(Failure::state(format!("{owner} does not publish all of its rows"))
        .detail(format!("Publications with row filters, column lists, or without some kinds of changes: {}.", names.join(", ")))
        .hint("Publish tables whole. What is not published can't be reconciled."))
}

/// Tables that are published; without publications, those that will be.
fn facts_sql(names: &str, publishes: bool) -> String {
    let shape = query("select braid.shape_query()", &[]);
    let shape = shape.get(0, 0).unwrap_or_default();
    let which = if publishes {
        format!(
            "exists (select from pg_publication_tables t where t.pubname in ({names}) and t.schemaname = n.nspname and t.tablename = c.relname)"
        )
    } else {
        "c.relkind = 'r'".to_owned()
    };
    format!(
        "select format('%I.%I', n.nspname, c.relname), s.lines, \
                (c.relreplident = 'd' and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary and i.indimmediate and i.indisvalid))::text, \
                (exists (select from braid.column_rules r where r.relation::oid = c.oid))::text, \
                (exists (select from pg_index i where i.indrelid = c.oid and not i.indimmediate))::text \
           from pg_class c join pg_namespace n on n.oid = c.relnamespace cross join lateral ({shape}) s \
          where c.relkind in ('r', 'p') and c.relpersistence = 'p' and n.nspname not in ('pg_catalog', 'information_schema', 'braid') \
            and n.nspname !~ '^pg_(toast|temp)' and {which} \
            and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e')"
    )
}

fn tables(found: &Rows) -> BTreeMap<String, Table> {
    let is = |row: &[Option<String>], index: usize| {
        row.get(index).and_then(Option::as_deref) == Some("true")
    };
    found
        .iter()
        .filter_map(|row| {
            let table = Table {
                shape: row.get(1).cloned().flatten().unwrap_or_default(),
                has_key: is(row, 2),
                has_rules: is(row, 3),
                is_deferrable: is(row, 4),
            };
            Some((row.first()?.clone()?, table))
        })
        .collect()
}

/// An error that names the tables, if there are any.
fn refuse(names: &[&str], message: &str, hint: &str) -> Outcome<()> {
    if names.is_empty() {
        return Ok(());
    }
    Err(Failure::state(message)
        .detail(format!("Tables: {}.", names.join(", ")))
        .hint(hint))
}

/// Tables that only the first has.
fn only<'a>(one: &'a BTreeMap<String, Table>, other: &BTreeMap<String, Table>) -> Vec<&'a str> {
    let names = one.keys().map(String::as_str);
    names.filter(|name| !other.contains_key(*name)).collect()
}

fn check_tables(
    here: &BTreeMap<String, Table>,
    there: &BTreeMap<String, Table>,
    source: &str,
) -> Outcome<()> {
    refuse(
        &only(there, here),
        "this database lacks tables of the group",
        "Create them here as they are there, for example with pg_dump -s.",
    )?;
    refuse(
        &only(here, there),
        "the group does not have all tables of this database",
        "Create them there, where that is replicated to all members, or move them to another database.",
    )?;
    let which = |wanted: &dyn Fn(&str, &Table) -> bool| -> Vec<&str> {
        here.iter()
            .filter(|(name, table)| wanted(name, table))
            .map(|(name, _)| name.as_str())
            .collect()
    };
    refuse(
        &which(&|name, table| {
            there
                .get(name)
                .is_some_and(|other| other.shape != table.shape)
        }),
        &format!("tables have another shape than at node \"{source}\""),
        "Change them so that columns, types and keys are alike. See select * from braid.check(member_dsn).",
    )?;
    refuse(
        &which(&|name, table| {
            !table.has_key || there.get(name).is_some_and(|other| !other.has_key)
        }),
        "tables have no primary key by which rows are found",
        "Give them a primary key that is not deferrable, on all nodes, with REPLICA IDENTITY DEFAULT.",
    )?;
    refuse(
        &which(&|name, table| {
            table.is_deferrable || there.get(name).is_some_and(|other| other.is_deferrable)
        }),
        "tables have deferrable unique or exclusion constraints",
        "Make them not deferrable, at least until the node has joined.",
    )?;
    refuse(
        &which(&|name, table| {
            table.has_rules || there.get(name).is_some_and(|other| other.has_rules)
        }),
        "columns have rules by which they are merged",
        "What each node has added is not known of rows from before. Remove the rules with braid.set_column_rule, join, and set them again.",
    )
}
