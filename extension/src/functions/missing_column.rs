//! Whether published columns that a local table does not have are an error or left out.

use braid_postgres::catalog::query;
use braid_postgres::encoding::Text;
use pgrx::{pg_extern, pg_sys};

use super::conflict::{announce, check_table};
use super::failure::Failure;
use super::{lock_rules, required, run, text};

/// braid.set_missing_column_rule(relation regclass, rule text)
#[pg_extern(sql = false)]
fn set_missing_column_rule(relation: Option<pg_sys::Oid>, rule: Option<Text>) {
    run(|| {
        let relation = required(relation, "relation")?.to_u32().to_string();
        check_table(&relation)?;
        let rule = text(rule);
        let rule = rule.as_deref();
        if rule.is_some_and(|rule| !matches!(rule, "error" | "ignore")) {
            return Err(Failure::parameter(format!(
                "unknown rule \"{}\" for missing columns",
                rule.unwrap_or_default()
            ))
            .hint("Rules are error and ignore; null removes the rule."));
        }
        lock_rules("missing_column_rule");
        query(
            "delete from braid.missing_column_rule r where r.relation = $1::oid::regclass \
                or not exists (select from pg_class c where c.oid = r.relation)",
            &[Some(&relation)],
        );
        query(
            "insert into braid.missing_column_rule (relation, rule) select $1::oid::regclass, $2 where $2 is not null",
            &[Some(&relation), rule],
        );
        announce()
    });
}
