//! What is done about conflicts.

use braid_bgworker::conflict::Kind;
use braid_bgworker::resolution::Resolution;
use braid_pg::catalog::{current_role, query};
use pgrx::datum::AnyElement;
use pgrx::{FromDatum, PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::{required, run};

/// braid.set_conflict_resolution(relation regclass, kind text, resolution text, function regproc, replicate boolean)
#[pg_extern(sql = false)]
fn set_conflict_resolution(
    relation: Option<pg_sys::Oid>,
    kind: Option<&str>,
    resolution: Option<&str>,
    function: Option<pg_sys::Oid>,
    replicate: Option<bool>,
) {
    let caller = current_role();
    run(|| {
        let kind = kind.map(parse_kind).transpose()?;
        let resolution = resolution.map(parse_resolution).transpose()?;
        let relation = relation.map(|oid| oid.to_u32().to_string());
        if let Some(oid) = &relation {
            check_table(oid)?;
        }
        let function = function.map(|oid| oid.to_u32().to_string());
        check_function(
            (relation.as_deref(), kind),
            resolution,
            function.as_deref(),
            caller,
        )?;
        let rule = Rule {
            relation: relation.as_deref(),
            kind: kind.map(Kind::name),
            resolution: resolution.map(Resolution::name),
            function: function.as_deref(),
            replicates: replicate.unwrap_or(false),
        };
        set(&rule);
        match braid_pg::apply::announce_rules() {
            Ok(()) => Ok(()),
            Err(error) => error.raise(),
        }
    });
}

/// braid.row_image(row record), with the caller's rights.
#[pg_extern(sql = false)]
fn row_image(row: AnyElement) -> Option<AnyElement> {
    let image = braid_pg::apply::row_image(row.datum())?;
    // SAFETY: a jsonb value in the caller's memory context.
    unsafe { AnyElement::from_polymorphic_datum(image, false, pg_sys::JSONBOID) }
}

/// A rule that is to be set.
struct Rule<'a> {
    relation: Option<&'a str>,
    kind: Option<&'a str>,
    resolution: Option<&'a str>,
    function: Option<&'a str>,
    replicates: bool,
}

pub(super) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

fn parse_kind(name: &str) -> Outcome<Kind> {
    name.parse().map_err(|_| {
        Failure::parameter(format!("unknown kind of conflict \"{name}\"")).hint(format!(
            "Kinds are {}; null stands for all.",
            list(Kind::ALL.into_iter().map(Kind::name))
        ))
    })
}

fn parse_resolution(name: &str) -> Outcome<Resolution> {
    name.parse().map_err(|_| {
        Failure::parameter(format!("unknown resolution \"{name}\"")).hint(format!(
            "Resolutions are {}; null removes the rule.",
            list(Resolution::ALL.into_iter().map(Resolution::name))
        ))
    })
}

pub(super) fn check_table(oid: &str) -> Outcome<()> {
    let rows = query(
        "select c.relkind in ('r', 'p') and n.nspname <> 'braid', $1::oid::regclass::text \
           from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = $1::oid",
        &[Some(oid)],
    );
    let name = required(rows.get(0, 1), "relation").map_err(|_| {
        Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("table with OID {oid} does not exist"),
        )
    })?;
    if rows.get(0, 0) == Some("t") {
        return Ok(());
    }
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
        format!("\"{name}\" is not a table that changes are applied to"),
    )
    .hint("Rules are for ordinary and partitioned tables of users."))
}

/// Whether a function can be asked about rows of the table.
fn check_function(
    (relation, kind): (Option<&str>, Option<Kind>),
    resolution: Option<Resolution>,
    function: Option<&str>,
    caller: pg_sys::Oid,
) -> Outcome<()> {
    let Some(function) = function else {
        if resolution == Some(Resolution::Function) {
            return Err(Failure::null_argument("function"));
        }
        return Ok(());
    };
    if resolution != Some(Resolution::Function) {
        return Err(
            Failure::parameter("a function goes with resolution \"function\" only")
                .hint("Give function => null, or resolution => 'function'."),
        );
    }
    let Some(relation) = relation else {
        return Err(Failure::parameter(
            "a conflict function is for one table: it takes and gives rows of it",
        )
        .hint("Name the table."));
    };
    let rows = query(
        "select p.oid::regprocedure::text, \
                p.prokind = 'f' and not p.proretset and p.prorettype = c.reltype \
                and p.proargtypes = concat_ws(' ', c.reltype, c.reltype, c.reltype, 'braid.conflict'::regtype::oid)::oidvector, \
                p.proisstrict, has_function_privilege($3::oid, p.oid, 'execute'), c.reltype::regtype::text, c.relreplident = 'f', c.oid::regclass::text, \
                exists (select from braid.column_rule r where r.relation = c.oid and r.rule <> 'last_update_wins') \
           from pg_proc p, pg_class c where p.oid = $1::oid and c.oid = $2::oid",
        &[
            Some(function),
            Some(relation),
            Some(&caller.to_u32().to_string()),
        ],
    );
    let Some(name) = rows.get(0, 0) else {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION,
            format!("function with OID {function} does not exist"),
        )
        .hint("Create it first."));
    };
    let row_type = rows.get(0, 4).unwrap_or_default();
    if rows.get(0, 1) != Some("t") {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INVALID_FUNCTION_DEFINITION,
            format!("{name} is not a conflict function for this table"),
        )
        .hint(format!(
            "It has to be declared as f(local {row_type}, remote {row_type}, before {row_type}, info braid.conflict) returns {row_type}."
        )));
    }
    if rows.get(0, 2) == Some("t") {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INVALID_FUNCTION_DEFINITION,
            format!("conflict function {name} is declared STRICT"),
        )
        .detail("Without a call, its result would be null, which deletes the row.")
        .hint("Declare it CALLED ON NULL INPUT: local, remote and before may be null."));
    }
    if rows.get(0, 3) != Some("t") {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("permission denied for function {name}"),
        )
        .hint("Have EXECUTE on it granted to you."));
    }
    if rows.get(0, 7) == Some("t") {
        let table = rows.get(0, 6).unwrap_or_default();
        return Err(Failure::state(format!("table {table} has rules for its columns"))
            .detail("A conflict function gives whole rows: it would have to do what these rules do.")
            .hint("Remove them with braid.set_column_rule(table, column, 'last_update_wins')."));
    }
    let about_deletes = kind.is_none_or(|kind| {
        matches!(
            kind,
            Kind::DeleteOriginDiffers | Kind::UpdateDeleted | Kind::UpdateMissing
        )
    });
    if about_deletes && rows.get(0, 5) != Some("t") {
        let table = rows.get(0, 6).unwrap_or_default();
        Failure::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            format!("{name} is not told what the writer of a change had seen of table {table}"),
        )
        .detail("A row that was deleted by somebody who knew it looks like one that was deleted by somebody who did not: if the function keeps it, nodes differ.")
        .hint(format!(
            "Run ALTER TABLE {table} REPLICA IDENTITY FULL on every node that writes it, or set the function for insert_exists and update_origin_differs only."
        ))
        .warn();
    }
    Ok(())
}

fn set(rule: &Rule<'_>) {
    // Rules of tables that are gone go too: an OID may be used again.
    query(
        "delete from braid.conflict_rule r where (r.relation is not distinct from $1::oid and r.kind is not distinct from $2 \
             and not r.has_asked) \
             or (r.relation is not null and not exists (select from pg_class c where c.oid = r.relation))",
        &[rule.relation, rule.kind],
    );
    if rule.resolution.is_some() {
        let replicates = if rule.replicates { "true" } else { "false" };
        query(
            "insert into braid.conflict_rule as r (relation, kind, resolution, function_id, replicates, has_asked) \
             values ($1::oid, $2, $3, $4::oid, $5::boolean, $4 is not null) \
             on conflict (relation, kind) do update set resolution = excluded.resolution, function_id = excluded.function_id, \
                 replicates = excluded.replicates, has_asked = r.has_asked or excluded.has_asked",
            &[
                rule.relation,
                rule.kind,
                rule.resolution,
                rule.function,
                Some(replicates),
            ],
        );
    } else {
        // Rows that it has made are still to be known as such.
        query(
            "update braid.conflict_rule r set resolution = null, function_id = null \
              where r.relation is not distinct from $1::oid and r.kind is not distinct from $2",
            &[rule.relation, rule.kind],
        );
    }
}
