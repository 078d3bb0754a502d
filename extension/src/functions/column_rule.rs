//! Rules that merge single columns when a change conflicts with a row.

use std::ffi::CStr;

use braid_apply::{adds_up, has_order};
use braid_bgworker::column_rule::ColumnRule;
use braid_postgres::catalog::query;
use braid_postgres::encoding::Text;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::conflict::{announce, check_table, list, pass_on};
use super::failure::{Failure, Outcome};
use super::{local, required, required_name, run, text};

/// braid.set_column_rule(relation regclass, column_name name, rule text, on_all_nodes boolean)
#[pg_extern(sql = false)]
fn set_column_rule(
    relation: Option<pg_sys::Oid>,
    column_name: Option<&CStr>,
    rule: Option<Text>,
    on_all_nodes: Option<bool>,
) {
    run(|| {
        let relation = required(relation, "relation")?.to_u32().to_string();
        let column = required_name(column_name, "column_name")?;
        let rule = text(rule).as_deref().map(parse).transpose()?;
        check_table(&relation)?;
        let number = check_column(&relation, &column, rule)?;
        let everywhere = on_all_nodes.unwrap_or(false);
        let node = if everywhere {
            Some(local::require_node()?)
        } else {
            local::find_node()
        };
        let author = Author {
            at: None,
            node: node.as_ref().map_or("", |node| &node.name),
            on_all_nodes: everywhere,
        };
        set(&relation, &number, rule, &author);
        if everywhere {
            tell(&relation, &column);
        }
        announce()
    });
}

/// braid.take_column_rule(content text, required boolean)
#[pg_extern(sql = false)]
fn take_column_rule(content: Text, is_required: bool) {
    let Text(content) = content;
    run(|| {
        let rows = query(
            "select format('%I.%I', r.rule ->> 'schema', r.rule ->> 'table'), c.oid::text, r.rule ->> 'column', r.rule ->> 'rule', \
                    r.rule ->> 'set_at', r.rule ->> 'set_by', a.attname is not null, \
                    exists (select from braid.column_rule o where o.relation = c.oid and o.column_number = a.attnum \
                            and (o.set_at, o.set_by) >= ((r.rule ->> 'set_at')::timestamptz, (r.rule ->> 'set_by')::name collate \"C\")) \
               from (select convert_from(decode($1, 'hex'), 'UTF8')::jsonb as rule) r \
               left join pg_namespace n on n.nspname = r.rule ->> 'schema' and n.nspname <> 'braid' \
               left join pg_class c on c.relnamespace = n.oid and c.relname = r.rule ->> 'table' and c.relkind in ('r', 'p') \
               left join pg_attribute a on a.attrelid = c.oid and a.attname = r.rule ->> 'column' and a.attnum > 0 and not a.attisdropped",
            &[Some(&content)],
        );
        let cell = |column| rows.get(0, column);
        let (table, column, node) = (
            cell(0).unwrap_or_default(),
            cell(2).unwrap_or_default(),
            cell(5).unwrap_or_default(),
        );
        let rule = cell(3).map(parse).transpose()?;
        // The absence of a rule also holds for a table that does not exist.
        let is_any = rule.is_some();
        let Some(relation) = cell(1) else {
            return missing_table(table, column, node, is_required && is_any);
        };
        if cell(6) != Some("t") {
            if !is_any {
                return Ok(());
            }
            return Err(Failure::state(format!("column \"{column}\" of table {table} does not exist here, and has a rule on all nodes"))
                .detail(told_by(node))
                .hint(format!("Add the column here too, then {GO_ON}")));
        }
        // A rule that was refused on this node, and is out of date, need not stop anything.
        if cell(7) == Some("t") {
            return Ok(());
        }
        let number = check_column(relation, column, rule)
            .map_err(|failure| failure.elsewhere(&told_by(node), &format!("Then {GO_ON}")))?;
        let author = Author {
            at: cell(4),
            node,
            on_all_nodes: true,
        };
        if !set(relation, &number, rule, &author) {
            return Ok(());
        }
        // For nodes that receive changes of others from this one.
        pass_on(&content);
        announce()
    });
}

/// The hint if a rule of another node can't be set.
const GO_ON: &str =
    "run braid.enable_subscription, or braid.retry_parked where the transaction was parked.";

fn told_by(node: &str) -> String {
    format!("Node \"{node}\" has set it on all nodes.")
}

/// A rule has arrived for a table that does not exist: if the table is created later, nothing would
/// say that it lacks the rule.
fn missing_table(table: &str, column: &str, node: &str, is_required: bool) -> Outcome<()> {
    if is_required {
        return Err(Failure::state(format!(
            "table {table} does not exist here, and its column \"{column}\" has a rule on all nodes"
        ))
        .detail(told_by(node))
        .hint(format!(
            "Create the table here too, then {GO_ON} Where it is not to be here, leave the transaction out with braid.skip_transaction."
        )));
    }
    Failure::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("node \"{node}\" has set a rule for column \"{column}\" of table {table} on all nodes, and there is no such table here"),
    )
    .hint("If it is made later, set the rule for it with braid.set_column_rule.")
    .warn();
    Ok(())
}

fn parse(name: &str) -> Outcome<ColumnRule> {
    name.parse().map_err(|_| {
        Failure::parameter(format!("unknown column rule \"{name}\"")).hint(format!(
            "Rules are {}; null for none.",
            list(ColumnRule::ALL.into_iter().map(ColumnRule::name))
        ))
    })
}

/// Query for the properties of a column on which its rules depend.
const COLUMN: &str = "select c.oid::regclass::text, a.attnum::text, c.relkind = 'p' or c.relispartition, a.attgenerated <> '', a.atttypid::text, \
     format_type(a.atttypid, a.atttypmod), c.relreplident::text, \
     exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary and i.indimmediate), \
     exists (select from pg_index i where i.indrelid = c.oid and (i.indisunique or i.indisexclusion) and a.attnum = any (i.indkey)), \
     exists (select from pg_publication_rel p where p.prrelid = c.oid and p.prqual is not null), \
     exists (select from braid.conflict_rule r where r.relation = c.oid and r.resolution = 'function'), \
     (select g.attname::text from pg_attribute g join pg_namespace n on n.oid = c.relnamespace \
        join pg_publication_tables t on t.schemaname = n.nspname and t.tablename = c.relname \
       where current_setting('server_version_num')::int >= 180000 and g.attrelid = c.oid and g.attnum > 0 and not g.attisdropped \
         and g.attgenerated <> '' and g.attname <> all (t.attnames) limit 1) \
     from pg_class c left join pg_attribute a on a.attrelid = c.oid and a.attname = $2::name and a.attnum > 0 and not a.attisdropped \
     where c.oid = $1::oid";

/// The column's number, if it can have the rule.
fn check_column(relation: &str, column: &str, rule: Option<ColumnRule>) -> Outcome<String> {
    let rows = query(COLUMN, &[Some(relation), Some(column)]);
    let table = rows.get(0, 0).unwrap_or_default();
    let is = |column| rows.get(0, column) == Some("t");
    let Some(number) = rows.get(0, 1) else {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
            format!("column \"{column}\" of table {table} does not exist"),
        )
        .hint("Name a column of the table, as it is in pg_attribute."));
    };
    let Some(rule) = rule else {
        return Ok(number.to_owned());
    };
    let refused = |why: &str| {
        Failure::state(format!(
            "column \"{column}\" of table {table} cannot have rule \"{}\"",
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
            "It is part of a key: a value that each node merges for itself cannot be unique.",
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
    let needs_old = match rule {
        ColumnRule::Delta => Some(("with all that was added before", "What an update adds")),
        ColumnRule::LastUpdateWins => {
            Some(("with all its columns", "Which columns an update writes"))
        }
        ColumnRule::Max | ColumnRule::Min => None,
    };
    if let Some((sent_with, what)) = needs_old {
        if is(9) {
            return Err(refused(&format!(
                "A publication has a row filter for the table: a row that begins to pass it is sent as a new one, {sent_with}."
            ))
            .hint("Publish the table without a row filter."));
        }
        if let Some(unpublished) = rows.get(0, 11) {
            return Err(refused(&format!(
                "{what} is known from the old row, and with REPLICA IDENTITY FULL PostgreSQL refuses updates and deletes of a table whose generated columns are not published, as {unpublished} is not."
            ))
            .hint("Publish it (publish_generated_columns = stored), where it is stored; or have no generated columns in the table."));
        }
        if rows.get(0, 6) != Some("f") {
            let identity = match rows.get(0, 6) {
                Some("n") => "nothing",
                Some("i") => "that of an index",
                _ => "that of its primary key",
            };
            return Err(refused(&format!(
                "{what} is known from the old value, which is not in WAL: the replica identity is {identity}."
            ))
            .hint(format!(
                "Run ALTER TABLE {table} REPLICA IDENTITY FULL on every node that writes the table; when all have applied what was written before, set the rule on every node."
            )));
        }
    }
    Ok(number.to_owned())
}

/// Whether the rule is one for values of the type; if not, why, and the user's next step.
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

/// When and where a rule was set.
struct Author<'a> {
    /// `None`: now.
    at: Option<&'a str>,
    node: &'a str,
    /// The rule was set for all nodes, on this node or another one.
    on_all_nodes: bool,
}

/// Sets a rule, unless the existing one is newer. Returns whether it was set. The absence of a rule
/// is stored as a row without a name: rows that a former rule has merged must still be known as
/// merged. A rule for all nodes has to be compared with later ones.
fn set(relation: &str, number: &str, rule: Option<ColumnRule>, author: &Author<'_>) -> bool {
    // Rules of tables that are gone go too: an OID may be used again.
    query(
        "delete from braid.column_rule r where not exists (select from pg_class c where c.oid = r.relation)",
        &[],
    );
    let text = |value: bool| if value { "true" } else { "false" };
    let set = query(
        "insert into braid.column_rule as r (relation, column_number, rule, set_at, set_by, on_all_nodes) \
         select $1::oid, $2::int2, $3, coalesce($4::timestamptz, greatest(clock_timestamp(), o.set_at + interval '1 microsecond')), $5::name, $6::boolean \
           from (select) n left join braid.column_rule o on o.relation = $1::oid and o.column_number = $2::int2 \
          where $6::boolean or $3 is not null or o.relation is not null \
         on conflict (relation, column_number) do update set rule = excluded.rule, set_at = excluded.set_at, set_by = excluded.set_by, \
             on_all_nodes = excluded.on_all_nodes \
          where r.set_at is null or (r.set_at, r.set_by) < (excluded.set_at, excluded.set_by) \
         returning 1",
        &[
            Some(relation),
            Some(number),
            rule.map(ColumnRule::name),
            author.at,
            Some(author.node),
            Some(text(author.on_all_nodes)),
        ],
    );
    set.get(0, 0).is_some()
}

/// Sends a rule that was just set on this node to the other nodes.
fn tell(relation: &str, column: &str) {
    let rows = query(
        "select content from braid.rules_for_all_nodes() r where r.relation = $1::oid and r.column_name = $2::name",
        &[Some(relation), Some(column)],
    );
    if let Some(content) = rows.get(0, 0) {
        pass_on(content);
    }
}
