//! Functions that set how conflicts are resolved.

use braid_bgworker::conflict::Kind;
use braid_bgworker::resolution::Resolution;
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use pgrx::datum::AnyElement;
use pgrx::{FromDatum, PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::{local, required, run, text};

/// braid.set_conflict_resolution(relation regclass, kind text, resolution text, function regproc,
/// replicate boolean, on_all_nodes boolean)
#[pg_extern(sql = false)]
fn set_conflict_resolution(
    relation: Option<pg_sys::Oid>,
    kind: Option<Text>,
    resolution: Option<Text>,
    function: Option<pg_sys::Oid>,
    replicate: Option<bool>,
    on_all_nodes: Option<bool>,
) {
    let caller = current_role();
    run(|| {
        let kind = text(kind).as_deref().map(parse_kind).transpose()?;
        let resolution = text(resolution)
            .as_deref()
            .map(parse_resolution)
            .transpose()?;
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
        let everywhere = on_all_nodes.unwrap_or(false);
        let node = if everywhere {
            Some(local::require_node()?)
        } else {
            local::find_node()
        };
        let rule = Rule {
            relation: relation.as_deref(),
            kind: kind.map(Kind::name),
            resolution: resolution.map(Resolution::name),
            function: function.as_deref(),
            replicates: replicate.unwrap_or(false),
            set_at: None,
            set_by: node.as_ref().map_or("", |node| &node.name),
            on_all_nodes: everywhere,
        };
        set(&rule);
        if everywhere {
            tell(&rule);
        }
        warn_of_differences(kind, resolution);
        announce()
    });
}

/// Warns if a change by a writer that has seen the row would count as a conflict, too:
/// `Rules::resolve` only compares versions.
fn warn_of_differences(kind: Option<Kind>, resolution: Option<Resolution>) {
    let changes = kind.is_none_or(|kind| {
        matches!(
            kind,
            Kind::UpdateOriginDiffers | Kind::DeleteOriginDiffers | Kind::UpdateDeleted
        )
    });
    if resolution == Some(Resolution::FirstUpdateWins) && changes {
        Failure::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            "first_update_wins keeps updates and deletes of other nodes' rows from being applied, so nodes come to differ",
        )
        .hint("Use it for insert_exists, in tables whose rows are written once.")
        .warn();
    }
}

/// braid.take_conflict_resolution(content text)
#[pg_extern(sql = false)]
fn take_conflict_resolution(content: Text) {
    let Text(content) = content;
    let caller = current_role();
    run(|| {
        let rows = query(
            "select f.table_name, c.oid::text, f.rule ->> 'kind', f.rule ->> 'resolution', f.function_name, p.oid::text, f.rule ->> 'replicate', \
                    f.rule ->> 'set_at', f.rule ->> 'set_by' \
               from (select r.rule, \
                            case when r.rule ->> 'table' is not null then format('%I.%I', r.rule ->> 'schema', r.rule ->> 'table') end as table_name, \
                            case when r.rule ->> 'function' is not null \
                                then format('%I.%I', r.rule ->> 'function_schema', r.rule ->> 'function') end as function_name \
                       from (select convert_from(decode($1, 'hex'), 'UTF8')::jsonb as rule) r) f \
               left join pg_namespace n on n.nspname = f.rule ->> 'schema' and n.nspname <> 'braid' \
               left join pg_class c on c.relnamespace = n.oid and c.relname = f.rule ->> 'table' and c.relkind in ('r', 'p') \
               left join pg_namespace m on m.nspname = f.rule ->> 'function_schema' \
               left join pg_proc p on p.pronamespace = m.oid and p.proname = f.rule ->> 'function' and p.prorettype = c.reltype \
                    and p.proargtypes = concat_ws(' ', c.reltype, c.reltype, c.reltype, 'braid.conflict'::regtype::oid)::oidvector",
            &[Some(&content)],
        );
        let cell = |column| rows.get(0, column);
        let node = cell(8).unwrap_or_default();
        let (relation, function) = (cell(1), cell(5));
        if let (Some(table), None) = (cell(0), relation) {
            Failure::new(
                PgSqlErrorCode::ERRCODE_WARNING,
                format!("node \"{node}\" has set a rule for conflicts of table {table} on all nodes, and there is no such table here"),
            )
            .hint("If it is made later, set the rule for it with braid.set_conflict_resolution.")
            .warn();
            return Ok(());
        }
        if let (Some(table), Some(name), None) = (cell(0), cell(4), function) {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION,
                format!("there is no conflict function {name} for table {table} here"),
            )
            .detail(format!(
                "Node \"{node}\" has set it for the table on all nodes."
            ))
            .hint("Create it here too, then run braid.enable_subscription, or braid.retry_parked where the transaction was parked."));
        }
        let kind = cell(2).map(parse_kind).transpose()?;
        let resolution = cell(3).map(parse_resolution).transpose()?;
        check_function((relation, kind), resolution, function, caller)?;
        let rule = Rule {
            relation,
            kind: kind.map(Kind::name),
            resolution: resolution.map(Resolution::name),
            function,
            replicates: cell(6) == Some("true"),
            set_at: cell(7),
            set_by: node,
            on_all_nodes: true,
        };
        if !set(&rule) {
            return Ok(());
        }
        // For nodes that receive changes of others from this one.
        pass_on(&content);
        announce()
    });
}

/// Rules were changed: with the next transaction they count.
pub(super) fn announce() -> Outcome<()> {
    match braid_apply::announce_rules() {
        Ok(()) => Ok(()),
        Err(error) => error.raise(),
    }
}

/// braid.row_image(row record), with the caller's rights.
#[pg_extern(sql = false)]
fn row_image(row: AnyElement) -> Option<AnyElement> {
    let image = braid_apply::row_image(row.datum())?;
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
    /// When and at which node it was set; `None`: now.
    set_at: Option<&'a str>,
    set_by: &'a str,
    /// The rule was set for all nodes, on this node or another one.
    on_all_nodes: bool,
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
                exists (select from braid.column_rule r where r.relation = c.oid and r.rule is not null) \
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
        .hint("Ask its owner to grant you EXECUTE on it."));
    }
    if rows.get(0, 7) == Some("t") {
        let table = rows.get(0, 6).unwrap_or_default();
        return Err(Failure::state(format!("table {table} has rules for its columns"))
            .detail("A conflict function gives whole rows: it would have to do what these rules do.")
            .hint("Remove them with braid.set_column_rule(table, column, null)."));
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
            format!("{name} does not receive what the writer of a change had seen of table {table}"),
        )
        .detail("A row that was deleted by somebody who knew it looks like one that was deleted by somebody who did not: if the function keeps it, nodes differ.")
        .hint(format!(
            "Run ALTER TABLE {table} REPLICA IDENTITY FULL on every node that writes it, or set the function for insert_exists and update_origin_differs only."
        ))
        .warn();
    }
    Ok(())
}

/// Sets a rule, unless the existing one is newer. Returns whether it was set. A rule without a
/// resolution stays in the table: it says that there is none.
fn set(rule: &Rule<'_>) -> bool {
    // Rules of tables that are gone go too: an OID may be used again.
    query(
        "delete from braid.conflict_rule r where r.relation is not null and not exists (select from pg_class c where c.oid = r.relation)",
        &[],
    );
    let text = |value: bool| if value { "true" } else { "false" };
    let set = query(
        "insert into braid.conflict_rule as r (relation, kind, resolution, function_id, replicates, has_asked, set_at, set_by, on_all_nodes) \
         values ($1::oid, $2, $3, $4::oid, $5::boolean, $4 is not null, coalesce($6::timestamptz, \
            (select greatest(clock_timestamp(), max(o.set_at) + interval '1 microsecond') from braid.conflict_rule o \
              where o.relation is not distinct from $1::oid and o.kind is not distinct from $2)), $7::name, $8::boolean) \
         on conflict (relation, kind) do update set resolution = excluded.resolution, function_id = excluded.function_id, \
             replicates = excluded.replicates, has_asked = r.has_asked or excluded.has_asked, set_at = excluded.set_at, set_by = excluded.set_by, \
             on_all_nodes = excluded.on_all_nodes \
          where r.set_at is null or (r.set_at, r.set_by) < (excluded.set_at, excluded.set_by) \
         returning 1",
        &[
            rule.relation,
            rule.kind,
            rule.resolution,
            rule.function,
            Some(text(rule.replicates)),
            rule.set_at,
            Some(rule.set_by),
            Some(text(rule.on_all_nodes)),
        ],
    );
    set.get(0, 0).is_some()
}

/// Sends a rule that was just set on this node to the other nodes.
fn tell(rule: &Rule<'_>) {
    let rows = query(
        "select content from braid.rules_for_all_nodes() r \
          where r.relation is not distinct from $1::oid and r.kind is not distinct from $2 and r.column_name is null",
        &[rule.relation, rule.kind],
    );
    if let Some(content) = rows.get(0, 0) {
        pass_on(content);
    }
}

/// Sends a rule: the output plugin sends each inserted row.
pub(super) fn pass_on(content: &str) {
    query(
        "insert into braid.rule_change (content) values ($1)",
        &[Some(content)],
    );
    query("delete from braid.rule_change", &[]);
}
