//! The parts that two sides of a table share: columns, a unique key, how each side orders that key,
//! and a hash of rows that both compute alike. Run by the session that compares.

use braid_bgworker::copy_query::Published;
use braid_bgworker::key_columns;
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::catalog;
use braid_postgres::error::PgError;
use braid_postgres::libpq::Connection;
use braid_postgres::rows::Rows;

use super::key::{self, KeyPart};
use super::table::{Column, array};

/// A key as it may be used, and how its columns are ordered.
#[derive(Debug, PartialEq, Eq)]
struct UniqueKey {
    columns: Vec<String>,
}

const UNIQUE_KEYS: &str = "select i.indexrelid, a.attname from pg_index i \
      join pg_class x on x.oid = i.indexrelid join pg_am m on m.oid = x.relam \
     cross join lateral unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) with ordinality k (number, place) \
      join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number \
     where i.indrelid = $1::oid and i.indisunique and i.indimmediate and i.indisvalid and i.indpred is null \
       and i.indexprs is null and m.amname = 'btree' \
       and not exists (select from pg_attribute n where n.attrelid = i.indrelid \
           and n.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]) and not n.attnotnull) \
     order by i.indisprimary desc, i.indisreplident desc, i.indexrelid, k.place";

/// How a column's values are ordered, in words that are equal where the order is, as far as that is
/// known; the schema of its type, and the encoding.
const ORDER: &str = "with recursive k (place, type, collated) as ( \
     select k.place, a.atttypid, a.attcollation from unnest($2::name[]) with ordinality k (name, place) \
       join pg_attribute a on a.attrelid = $1::oid and a.attname = k.name \
     union all \
     select k.place, t.typbasetype, k.collated from k join pg_type t on t.oid = k.type where t.typtype = 'd') \
   select case \
     when t.typtype = 'e' then (select 'enum ' || string_agg(quote_literal(e.enumlabel), ',' order by e.enumsortorder) \
        from pg_enum e where e.enumtypid = t.oid) \
     when t.oid in (20, 21, 23, 700, 701, 1700) then 'number' \
     when k.collated = 0 then t.typname \
     when l.provider = 'c' and l.locale in ('C', 'POSIX') or l.provider = 'b' then 'bytes ' || t.typname || ' ' || getdatabaseencoding() \
     else concat_ws(' ', 'locale', t.typname, getdatabaseencoding(), l.provider, l.locale, c.collisdeterministic, l.version) end, \
     n.nspname, getdatabaseencoding() \
   from k \
   join pg_type t on t.oid = k.type and t.typtype <> 'd' \
   join pg_namespace n on n.oid = t.typnamespace \
   left join pg_collation c on c.oid = k.collated \
   left join pg_database d on d.datname = current_database() \
   left join lateral (select to_jsonb(c) as collation, to_jsonb(d) as database) j on true \
   left join lateral (select case c.collprovider when 'd' then d.datlocprovider else c.collprovider end as provider, \
       case c.collprovider when 'd' then pg_database_collation_actual_version(d.oid) else pg_collation_actual_version(c.oid) end as version, \
       case when c.collprovider = 'd' \
            then case d.datlocprovider when 'c' then d.datcollate else coalesce(j.database->>'datlocale', j.database->>'daticulocale') end \
            else case c.collprovider when 'c' then c.collcollate else coalesce(j.collation->>'colllocale', j.collation->>'colliculocale') end \
       end as locale) l on true \
   order by k.place";

fn unique_keys(rows: &Rows) -> Vec<UniqueKey> {
    let mut keys: Vec<UniqueKey> = Vec::new();
    let mut before = None;
    for row in rows.iter() {
        let (Some(index), Some(Some(column))) = (row.first(), row.get(1)) else {
            continue;
        };
        if before != Some(index) {
            keys.push(UniqueKey {
                columns: Vec::new(),
            });
        }
        before = Some(index);
        if let Some(key) = keys.last_mut() {
            key.columns.push(column.clone());
        }
    }
    keys
}

/// SQL with `$1` and `$2` filled in, for a connection.
fn filled(sql: &str, first: &str, second: &str) -> String {
    sql.replace("$1", &quote_literal(first))
        .replace("$2", &quote_literal(second))
}

fn names(columns: &[String]) -> String {
    array(&columns.iter().cloned().map(Some).collect::<Vec<_>>())
}

/// Columns, each as an identifier.
fn quoted(columns: &[String]) -> Vec<String> {
    columns.iter().map(|name| quote_identifier(name)).collect()
}

/// Returns the published columns that exist locally and are not generated locally.
pub(super) fn common_columns(there: &Published, oid: &str) -> (Vec<Column>, Vec<String>) {
    let here = catalog::query(
        "select a.attname, case when b.oid in (20, 21, 23, 700, 701, 1700) then 'n' when b.oid = 16 then 'b' \
                when b.oid = 3802 then 'j' else 's' end, a.attgenerated <> '' \
           from pg_attribute a join pg_type t on t.oid = a.atttypid \
           join pg_type b on b.oid = coalesce(nullif(t.typbasetype, 0), t.oid) \
          where a.attrelid = $1::oid and a.attnum > 0 and not a.attisdropped",
        &[Some(oid)],
    );
    let (mut common, mut missing) = (Vec::new(), Vec::new());
    for name in &there.columns {
        let found = here
            .iter()
            .find(|row| row.first().and_then(Option::as_ref) == Some(name));
        match found {
            None => missing.push(name.clone()),
            Some(row) if row.get(2).and_then(Option::as_deref) == Some("t") => {}
            Some(row) => common.push(Column {
                name: name.clone(),
                shown: row.get(1).cloned().flatten().unwrap_or_default(),
            }),
        }
    }
    (common, missing)
}

/// A unique key of columns that are compared, which both sides have.
pub(super) fn common_key(
    connection: &mut Connection,
    columns: &[Column],
    oid: &str,
    namespace: &str,
    name: &str,
) -> Result<Vec<String>, PgError> {
    let here = unique_keys(&catalog::query(UNIQUE_KEYS, &[Some(oid)]));
    let sql = UNIQUE_KEYS.replace("$1::oid", &remote_oid(namespace, name));
    let there = unique_keys(&connection.query(&sql)?);
    let sorted = |key: &UniqueKey| {
        let mut columns = key.columns.clone();
        columns.sort();
        columns
    };
    here.into_iter()
        .find(|key| {
            key.columns
                .iter()
                .all(|name| columns.iter().any(|column| column.name == *name))
                && there.iter().any(|other| sorted(other) == sorted(key))
        })
        .map(|key| key.columns)
        .ok_or_else(|| {
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                format!("table \"{namespace}.{name}\" has no unique key by which its rows can be compared"),
            )
            .with_detail("It needs a primary key, or a unique index over columns that are not null and published, on both nodes.")
            .with_hint("Add a primary key on both nodes.")
        })
}

fn remote_oid(namespace: &str, name: &str) -> String {
    format!(
        "(select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = {} and c.relname = {})",
        quote_literal(namespace),
        quote_literal(name)
    )
}

/// How the two sides order a key.
pub(super) struct Orders {
    /// Both order it alike, as far as that is known.
    pub(super) alike: bool,
    /// How each side compares its columns.
    pub(super) parts: Vec<KeyPart>,
    /// Where the operators of its types are.
    pub(super) search_path: String,
}

/// Compares how the two sides order a key.
///
/// # Errors
/// Those of the connection to the provider.
pub(super) fn orders(
    connection: &mut Connection,
    key: &[String],
    oid: &str,
    namespace: &str,
    name: &str,
) -> Result<Orders, PgError> {
    let here = catalog::query(ORDER, &[Some(oid), Some(&names(key))]);
    let sql = filled(
        &ORDER.replace("$1::oid", &remote_oid(namespace, name)),
        "",
        &names(key),
    );
    let there = connection.query(&sql)?;
    let names = names(key);
    let parts_sql = |relation: &str| {
        let names = format!("{}::text[]", quote_literal(&names));
        key_columns::query(relation, &names)
    };
    let known_here = key::columns(&catalog::query(&parts_sql(&format!("{oid}::oid")), &[]));
    let sql = parts_sql(&remote_oid(namespace, name));
    let known_there = key::columns(&connection.query(&sql)?);
    let mut alike = true;
    let mut parts = Vec::new();
    for (place, column) in key.iter().enumerate() {
        let words = [here.get(place, 0), there.get(place, 0)];
        let Some(part) = KeyPart::new(column, [&known_here, &known_there], words) else {
            return Err(changed(namespace, name));
        };
        alike &= if part.is_by_text() {
            here.get(place, 2) == there.get(place, 2)
        } else {
            words[0].is_some() && words[0] == words[1]
        };
        parts.push(part);
    }
    // Operators of an extension's types are where these are.
    let mut search_path = "pg_catalog".to_owned();
    for row in here.iter().chain(there.iter()) {
        if let Some(schema) = row.get(1).and_then(Option::as_deref)
            && schema != "pg_catalog"
        {
            search_path.push_str(", ");
            search_path.push_str(&quote_identifier(schema));
        }
    }
    Ok(Orders {
        alike,
        parts,
        search_path,
    })
}

/// The key was another one a moment ago.
fn changed(namespace: &str, name: &str) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("columns of table \"{namespace}.{name}\" were changed while it was looked at"),
    )
    .with_hint("Compare it again.")
}

/// A 64-bit hash of a row's columns that both servers compute alike.
pub(super) fn hash_expression(
    connection: &mut Connection,
    columns: &[String],
) -> Result<String, PgError> {
    const PROBE: &str = "select hashtextextended(md5('braid'), 7), getdatabaseencoding()";
    let (here, there) = (catalog::query(PROBE, &[]), connection.query(PROBE)?);
    let row = format!("row({})::text", quoted(columns).join(", "));
    let text = if here.get(0, 1) == there.get(0, 1) {
        row
    } else {
        format!("encode(convert_to({row}, 'UTF8'), 'hex')")
    };
    Ok(if here.get(0, 0) == there.get(0, 0) {
        format!("hashtextextended({text} collate \"C\", 7)")
    } else {
        // Servers of other byte orders.
        format!("('x' || left(md5({text}), 16))::bit(64)::bigint")
    })
}
