//! Functions that set rules for rows whose referenced row is missing.

use std::ffi::CStr;

use braid_postgres::catalog::{Rights, current_role, glance, is_superuser, query, utf8_string};
use braid_postgres::encoding::Text;
use braid_postgres::table_rights;
use pgrx::iter::TableIterator;
use pgrx::{PgSqlErrorCode, name, pg_extern, pg_sys};

use super::conflict::{announce, check_table};
use super::failure::{Failure, Outcome};
use super::{lock_rules, required, run, text};

/// braid.set_foreign_key_rule(relation regclass, constraint_name name, rule text)
#[pg_extern(sql = false)]
fn set_foreign_key_rule(
    relation: Option<pg_sys::Oid>,
    constraint_name: Option<&CStr>,
    rule: Option<Text>,
) {
    run(|| {
        let relation = required(relation, "relation")?.to_u32().to_string();
        check_table(&relation)?;
        let name = constraint_name.map(utf8_string);
        let rule = text(rule);
        let rule = rule.as_deref();
        if rule.is_some_and(|rule| !matches!(rule, "record" | "delete" | "restore")) {
            return Err(Failure::parameter(format!(
                "unknown rule \"{}\" for a foreign key",
                rule.unwrap_or_default()
            ))
            .hint("Rules are record, delete and restore; null removes the rule."));
        }
        let names = constraints(&relation, name.as_deref())?;
        lock_rules("foreign_key_rule");
        for name in names {
            let arguments = [Some(relation.as_str()), Some(name.as_str()), rule];
            query(
                "delete from braid.foreign_key_rule where relation = $1::oid::regclass and constraint_name = $2::name \
                 and rule is distinct from $3",
                &arguments,
            );
            query(
                "insert into braid.foreign_key_rule (relation, constraint_name, rule) \
                 select $1::oid::regclass, $2::name, $3 where $3 is not null on conflict do nothing",
                &arguments,
            );
        }
        announce()
    });
}

/// braid.orphan_rows("table" oid, "constraint" oid) returns table (referencing text,
/// constraint_name text, key text, referenced text, referenced_key text, "row" text)
#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn orphan_rows(
    table: pg_sys::Oid,
    constraint: pg_sys::Oid,
) -> TableIterator<
    'static,
    (
        name!(referencing, Option<Text>),
        name!(constraint_name, Option<Text>),
        name!(key, Option<Text>),
        name!(referenced, Option<Text>),
        name!(referenced_key, Option<Text>),
        name!(row, Option<Text>),
    ),
> {
    let caller = current_role();
    let asked = run(|| orphan_query(table, constraint, caller));
    // A superuser's table has no code of anybody else.
    // Its locks are released: braid.orphans() asks for one foreign key of the database after the
    // other.
    let found = asked.map(|sql| glance(Rights::OwnerOf(table), &sql));
    let found: Vec<_> = found.iter().flat_map(|rows| rows.iter()).collect();
    let rows: Vec<_> = found
        .into_iter()
        .map(|row| {
            let cell = |place: usize| row.get(place).cloned().flatten().map(Text);
            (cell(0), cell(1), cell(2), cell(3), cell(4), cell(5))
        })
        .collect();
    TableIterator::new(rows)
}

/// The query that finds orphans, for a role that may read both tables. `None` if the foreign key is
/// gone.
fn orphan_query(
    table: pg_sys::Oid,
    constraint: pg_sys::Oid,
    role: pg_sys::Oid,
) -> Outcome<Option<String>> {
    let numbers = [table, constraint].map(|oid| oid.to_u32().to_string());
    let [table_oid, constraint_oid] = numbers.each_ref().map(|text| Some(text.as_str()));
    let found = query(
        "select braid.orphan_query($1::oid, $2::oid), c.confrelid::oid, c.confrelid::regclass::text, $1::oid::regclass::text \
           from pg_constraint c where c.oid = $2::oid and exists (select from pg_class r where r.oid = $1::oid)",
        &[table_oid, constraint_oid],
    );
    let (Some(sql), Some(parent)) = (found.get(0, 0), found.get(0, 1)) else {
        return Ok(None);
    };
    let parent = pg_sys::Oid::from(parent.parse::<u32>().unwrap_or(0));
    for (oid, name) in [(table, found.get(0, 3)), (parent, found.get(0, 2))] {
        if !is_superuser(role) && !table_rights::may_read_all(role, oid) {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                format!("permission denied for table {}", name.unwrap_or_default()),
            )
            .hint("Grant SELECT on it, and BYPASSRLS if the table has row-level security."));
        }
    }
    Ok(Some(format!(
        "select q.relation::text, q.constraint_name::text, q.key::text, q.referenced::text, q.referenced_key::text, q.row::text from ({sql}) q"
    )))
}

/// The table's foreign keys, or the one of this name.
fn constraints(relation: &str, name: Option<&str>) -> Outcome<Vec<String>> {
    let rows = query(
        "select distinct c.conname::text from braid.foreign_keys($1::oid) k join pg_constraint c on c.oid = k.constraint \
         where $2 is null or c.conname = $2::name order by 1",
        &[Some(relation), name],
    );
    let found: Vec<String> = rows
        .iter()
        .filter_map(|row| row.first().cloned().flatten())
        .collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let table = query("select $1::oid::regclass::text", &[Some(relation)]);
    let table = table.get(0, 0).unwrap_or_default().to_owned();
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
        match name {
            Some(name) => format!("foreign key \"{name}\" of table \"{table}\" does not exist"),
            None => format!("table \"{table}\" has no foreign key"),
        },
    )
    .hint("Name the referencing table; its foreign keys are in pg_constraint."))
}
