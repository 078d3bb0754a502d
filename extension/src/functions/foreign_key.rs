//! What is done about rows whose referenced row is missing.

use std::ffi::CStr;

use braid_postgres::catalog::{query, utf8_string};
use braid_postgres::encoding::Text;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

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
