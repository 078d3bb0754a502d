//! What is done about conflicts.

use braid_bgworker::conflict::Kind;
use braid_bgworker::resolution::Resolution;
use braid_pg::catalog::query;
use pgrx::datum::AnyElement;
use pgrx::{FromDatum, PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::{required, run};

/// braid.set_conflict_resolution(relation regclass, kind text, resolution text)
#[pg_extern(sql = false)]
fn set_conflict_resolution(
    relation: Option<pg_sys::Oid>,
    kind: Option<&str>,
    resolution: Option<&str>,
) {
    run(|| {
        let kind = kind.map(parse_kind).transpose()?.map(Kind::name);
        let resolution = resolution
            .map(parse_resolution)
            .transpose()?
            .map(Resolution::name);
        let relation = relation.map(|oid| oid.to_u32().to_string());
        if let Some(oid) = &relation {
            check_table(oid)?;
        }
        set(relation.as_deref(), kind, resolution);
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

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
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

fn check_table(oid: &str) -> Outcome<()> {
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

fn set(relation: Option<&str>, kind: Option<&str>, resolution: Option<&str>) {
    // Rules of tables that are gone go too: an OID may be used again.
    query(
        "delete from braid.conflict_rule r where (r.relation is not distinct from $1::oid and r.kind is not distinct from $2) \
             or (r.relation is not null and not exists (select from pg_class c where c.oid = r.relation))",
        &[relation, kind],
    );
    if resolution.is_some() {
        query(
            "insert into braid.conflict_rule (relation, kind, resolution) values ($1::oid, $2, $3)",
            &[relation, kind, resolution],
        );
    }
}
