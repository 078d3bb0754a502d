//! What becomes of single columns where a change meets a row.

use std::ffi::CStr;

use braid_bgworker::column_rule::ColumnRule;
use braid_pg::apply::{adds_up, has_order};
use braid_pg::catalog::query;
use braid_pg::encoding::Text;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::conflict::{check_table, list};
use super::failure::{Failure, Outcome};
use super::{required, required_name, run, text};

/// braid.set_column_rule(relation regclass, column_name name, rule text)
#[pg_extern(sql = false)]
fn set_column_rule(relation: Option<pg_sys::Oid>, column_name: Option<&CStr>, rule: Option<Text>) {
    run(|| {
        let relation = required(relation, "relation")?.to_u32().to_string();
        let column = required_name(column_name, "column_name")?;
        let rule = text(rule)
            .as_deref()
            .map_or(Ok(ColumnRule::LastUpdateWins), parse)?;
        check_table(&relation)?;
        let number = check_column(&relation, &column, rule)?;
        set(&relation, &number, rule);
        match braid_pg::apply::announce_rules() {
            Ok(()) => Ok(()),
            Err(error) => error.raise(),
        }
    });
}

fn parse(name: &str) -> Outcome<ColumnRule> {
    name.parse().map_err(|_| {
        Failure::parameter(format!("unknown column rule \"{name}\"")).hint(format!(
            "Rules are {}; null stands for the last.",
            list(ColumnRule::ALL.into_iter().map(ColumnRule::name))
        ))
    })
}

/// The column's number, if it can have the rule.
fn check_column(relation: &str, column: &str, rule: ColumnRule) -> Outcome<String> {
    let rows = query(
        "select c.oid::regclass::text, a.attnum::text, c.relkind = 'p' or c.relispartition, a.attgenerated <> '', a.atttypid::text, \
                format_type(a.atttypid, a.atttypmod), c.relreplident::text, \
                exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary and i.indimmediate), \
                exists (select from pg_index i where i.indrelid = c.oid and (i.indisunique or i.indisexclusion) and a.attnum = any (i.indkey)), \
                exists (select from pg_publication_rel p where p.prrelid = c.oid and p.prqual is not null), \
                exists (select from braid.conflict_rule r where r.relation = c.oid and r.resolution = 'function') \
           from pg_class c left join pg_attribute a on a.attrelid = c.oid and a.attname = $2::name and a.attnum > 0 and not a.attisdropped \
          where c.oid = $1::oid",
        &[Some(relation), Some(column)],
    );
    let table = rows.get(0, 0).unwrap_or_default();
    let is = |column| rows.get(0, column) == Some("t");
    let Some(number) = rows.get(0, 1) else {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
            format!("column \"{column}\" of table {table} does not exist"),
        )
        .hint("Name a column of the table, as it is in pg_attribute."));
    };
    if rule == ColumnRule::LastUpdateWins {
        return Ok(number.to_owned());
    }
    let refused = |why: &str| {
        Failure::state(format!(
            "column \"{column}\" of table {table} can't have rule \"{}\"",
            rule.name()
        ))
        .detail(why)
    };
    if is(2) {
        return Err(refused(
            "The table is partitioned, or a partition: column rules are for ordinary tables.",
        )
        .hint("A conflict function can be set for a partitioned table: braid.set_conflict_resolution."));
    }
    if !is(7) {
        return Err(refused("The table has no primary key that is checked at once, by which its rows are found whatever is in them.")
            .hint("Add a primary key, on every node."));
    }
    if is(3) {
        return Err(refused("It is generated: each node computes it.")
            .hint("Set the rule for the columns that it is computed from."));
    }
    if is(8) {
        return Err(refused(
            "It is part of a key: a value that each node merges for itself can't be unique.",
        )
        .hint("Keep what is merged in a column that is in no unique index."));
    }
    if is(10) {
        return Err(
            refused("A conflict function is set for the table: it gives whole rows.")
                .hint("Have the function do it, or remove it with braid.set_conflict_resolution."),
        );
    }
    check_type(
        rows.get(0, 4).unwrap_or_default(),
        rows.get(0, 5).unwrap_or_default(),
        rule,
    )
    .map_err(|(why, hint)| refused(&why).hint(hint))?;
    if rule == ColumnRule::Delta {
        if is(9) {
            return Err(refused("A publication has a row filter for the table: a row that begins to pass it is sent as a new one, with all that was added before.")
                .hint("Publish the table without a row filter."));
        }
        if rows.get(0, 6) != Some("f") {
            let identity = match rows.get(0, 6) {
                Some("n") => "nothing",
                Some("i") => "that of an index",
                _ => "that of its primary key",
            };
            return Err(refused(&format!(
                "What an update adds is known from the old value, which is not in WAL: the replica identity is {identity}."
            ))
            .hint(format!(
                "Run ALTER TABLE {table} REPLICA IDENTITY FULL on every node that writes the table; when all have applied what was written before, set the rule on every node."
            )));
        }
    }
    Ok(number.to_owned())
}

/// Whether the rule is one for values of the type; if not, why, and what to do.
fn check_type(type_id: &str, name: &str, rule: ColumnRule) -> Result<(), (String, &'static str)> {
    let type_id = pg_sys::Oid::from(type_id.parse::<u32>().unwrap_or(0));
    match rule {
        ColumnRule::Delta if matches!(type_id, pg_sys::FLOAT4OID | pg_sys::FLOAT8OID) => Err((
            format!(
                "Its type is {name}: what floating-point numbers add up to depends on the order, so nodes would differ."
            ),
            "Make it numeric, on every node.",
        )),
        ColumnRule::Delta if !adds_up(type_id) => Err((
            format!("Its type is {name}."),
            "Sums are for smallint, integer, bigint and numeric.",
        )),
        ColumnRule::Max | ColumnRule::Min if !has_order(type_id) => Err((
            format!("Its type is {name}, which has no order."),
            "Types that can be in a B-tree index have one.",
        )),
        _ => Ok(()),
    }
}

fn set(relation: &str, number: &str, rule: ColumnRule) {
    // Rules of tables that are gone go too: an OID may be used again.
    query(
        "delete from braid.column_rule r where not exists (select from pg_class c where c.oid = r.relation)",
        &[],
    );
    if rule == ColumnRule::LastUpdateWins {
        // Rows that it has made are still to be known as such.
        query(
            "update braid.column_rule set rule = 'last_update_wins' where relation = $1::oid and column_number = $2::int2",
            &[Some(relation), Some(number)],
        );
        return;
    }
    query(
        "insert into braid.column_rule (relation, column_number, rule) values ($1::oid, $2::int2, $3) \
         on conflict (relation, column_number) do update set rule = excluded.rule",
        &[Some(relation), Some(number), Some(rule.name())],
    );
}
