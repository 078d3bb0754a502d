//! Stores comparisons and repairs, and the positions that they wait for. Run by the session that
//! compares, as the extension's owner.

use braid_bgworker::compare::{Key, Seen, Sight};
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::Subscription;
use braid_postgres::catalog::query;
use braid_postgres::error::PgError;

use super::table::{Row, Table, array};
use super::{Counts, Request};

/// Records a comparison. Earlier results for the table are deleted, unless a session still works on
/// them.
pub fn begin(request: &Request, table: &Table) -> Result<i64, PgError> {
    let relation = request.relation.to_string();
    let subscription = request.subscription.name.as_str();
    query(
        "delete from braid.comparison c where c.subscription_name = $1::name and c.relation = $2::oid \
            and not (c.finished_at is null and exists (select from pg_stat_get_activity(c.pid) a \
                where a.state = 'active' and a.query_start = c.statement_at))",
        &[Some(subscription), Some(&relation)],
    );
    let rows = query(
        "insert into braid.comparison (subscription_name, relation, started_by, pid, statement_at, phase, walk, rows_total) \
         values ($1::name, $2::oid, session_user, pg_backend_pid(), statement_timestamp(), 'reading', $3, $4::bigint) \
         returning comparison_id",
        &[
            Some(subscription),
            Some(&relation),
            Some(match (&request.keys, table.ordered) {
                (Some(_), _) => "given keys",
                (None, true) => "ranges",
                (None, false) => "keys",
            }),
            table.rows.map(|rows| rows.to_string()).as_deref(),
        ],
    );
    rows.get(0, 0)
        .and_then(|id| id.parse().ok())
        .ok_or_else(|| PgError::new(SqlState::InternalError, "comparison has no number"))
}

/// Show how far it is.
pub fn show(id: i64, counts: &Counts, is_done: bool) -> Result<(), PgError> {
    let numbers = [
        counts.rows,
        counts.ranges,
        counts.differed,
        counts.looked_at,
        counts.differences,
        counts.unsettled,
    ]
    .map(|number| number.to_string());
    let id = id.to_string();
    let mut values = vec![
        Some(id.as_str()),
        Some(counts.phase),
        Some(if is_done { "t" } else { "f" }),
    ];
    values.extend(numbers.iter().map(|number| Some(number.as_str())));
    query(
        "update braid.comparison set phase = $2, finished_at = case when $3::boolean then clock_timestamp() end, \
                updated_at = clock_timestamp(), rows_compared = $4::bigint, ranges = $5::bigint, ranges_differed = $6::bigint, \
                looked_at = $7::bigint, differences = $8::bigint, unsettled = $9::bigint \
          where comparison_id = $1::bigint",
        &values,
    );
    Ok(())
}

/// Keys as a caller gives them: an array of objects, or one.
pub fn keys(table: &Table, keys: &str) -> Result<Vec<Key>, PgError> {
    let [_, _, names, shown] = shapes(table);
    let rows = query(
        // Of a jsonb value its own text.
        "select case k.shown when 'j' then (e.value -> k.name)::text else e.value ->> k.name end \
           from jsonb_array_elements(case jsonb_typeof($1::jsonb) when 'array' then $1::jsonb else jsonb_build_array($1::jsonb) end) \
                with ordinality e (value, number) \
          cross join unnest($2::text[], $3::text[]) with ordinality k (name, shown, place) order by e.number, k.place",
        &[Some(keys), Some(&names), Some(&shown)],
    );
    let values: Option<Vec<String>> = rows
        .iter()
        .map(|row| row.first().cloned().flatten())
        .collect();
    let values = values.ok_or_else(|| {
        PgError::new(SqlState::InvalidParameterValue, "a key lacks a column")
            .with_detail(format!("The key's columns are: {}.", table.key.join(", ")))
            .with_hint(
                "Give each key as an object with these columns, like '[{\"id\": 1}, {\"id\": 2}]'.",
            )
    })?;
    Ok(values
        .chunks(table.key.len().max(1))
        .map(<[String]>::to_vec)
        .collect())
}

/// Whether a subscription has applied everything up to a position.
///
/// # Errors
/// 55000 when it does not run.
pub fn is_applied_here(subscription: &Subscription, position: &str) -> Result<bool, PgError> {
    let id = subscription.id.to_string();
    let rows = query(
        "select s.enabled, s.error_message, coalesce(greatest(a.applied_lsn, \
                (select max(p.remote_lsn) from braid.origin o join pg_replication_origin_status p on p.local_id = o.origin_id \
                  where o.subscription_id = s.subscription_id and o.node_name = s.provider_name)) >= $2::pg_lsn, false) \
           from braid.subscription s left join braid.subscription_activity() a on a.subscription_id = s.subscription_id \
          where s.subscription_id = $1::integer",
        &[Some(&id), Some(position)],
    );
    let name = &subscription.name;
    if rows.get(0, 0) != Some("t") || rows.get(0, 1).is_some() {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!("subscription \"{name}\" does not run"),
        )
        .with_detail("Changes that are on their way cannot be distinguished from differences.")
        .with_hint(format!(
            "Remove the cause, which braid.subscription_status shows, and run braid.enable_subscription('{name}')."
        )));
    }
    Ok(rows.get(0, 2) == Some("t"))
}

/// A row as JSON: numbers and booleans as such, other values as PostgreSQL writes them.
const JSON: &str = "(select jsonb_object_agg(c.name, case \
        when c.value is null then 'null'::jsonb \
        when c.shown = 'n' and c.value ~ '^-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]+)?$' then c.value::jsonb \
        when c.shown = 'b' then to_jsonb(c.value = 't') \
        when c.shown = 'j' then c.value::jsonb \
        else to_jsonb(c.value) end) \
    from unnest($NAMES::text[], $SHOWN::text[], $VALUES::text[]) c (name, shown, value))";

fn json(names: &str, shown: &str, values: &str) -> String {
    JSON.replace("$NAMES", names)
        .replace("$SHOWN", shown)
        .replace("$VALUES", values)
}

/// The parameters of a row in SQL: names, how they are shown; key's names and how these are shown.
fn shapes(table: &Table) -> [String; 4] {
    let all = |of: &dyn Fn(&super::table::Column) -> String| {
        let cells: Vec<Option<String>> = table
            .columns
            .iter()
            .map(|column| Some(of(column)))
            .collect();
        array(&cells)
    };
    let key: Vec<Option<String>> = table.key.iter().cloned().map(Some).collect();
    let key_shown: Vec<Option<String>> = table
        .key
        .iter()
        .map(|name| {
            table
                .columns
                .iter()
                .find(|column| column.name == *name)
                .map(|column| column.shown.clone())
        })
        .collect();
    [
        all(&|column| column.name.clone()),
        all(&|column| column.shown.clone()),
        array(&key),
        array(&key_shown),
    ]
}

/// Names of the columns in which two rows differ.
fn differing_columns(
    table: &Table,
    here: Option<&Vec<Option<String>>>,
    there: Option<&Vec<Option<String>>>,
) -> Option<String> {
    let (here, there) = (here?, there?);
    let names: Vec<Option<String>> = table
        .columns
        .iter()
        .zip(here.iter().zip(there))
        .filter(|(_, (here, there))| here != there)
        .map(|(column, _)| Some(column.name.clone()))
        .collect();
    Some(array(&names))
}

/// The key as the local row writes it, else as the provider's row does: both may write equal values
/// differently.
fn key_of(table: &Table, key: &Key, row: Option<&Vec<Option<String>>>) -> String {
    let values: Vec<Option<String>> = table
        .key
        .iter()
        .zip(key)
        .map(|(name, given)| {
            let at = table
                .columns
                .iter()
                .position(|column| column.name == *name)?;
            row.and_then(|row| row.get(at).cloned())
                .unwrap_or_else(|| Some(given.clone()))
        })
        .collect();
    array(&values)
}

/// Records a difference. Returns false if it is recorded already, under a key that is written
/// differently.
pub fn keep(
    id: i64,
    table: &Table,
    key: &Key,
    sight: &Sight,
    here: Option<Row>,
    there: Option<Row>,
) -> bool {
    let values = |row: Option<Row>| row.map(|(_, values)| values);
    let (here, there) = (values(here), values(there));
    let id = id.to_string();
    let [names, shown, key_names, key_shown] = shapes(table);
    let key = key_of(table, key, here.as_ref().or(there.as_ref()));
    let columns = differing_columns(table, here.as_ref(), there.as_ref());
    let (here, there) = (here.as_deref().map(array), there.as_deref().map(array));
    let stamp = |seen: &Option<Seen>| {
        let version = seen.as_ref().and_then(|seen| seen.version.clone());
        (
            version.as_ref().map(|(timestamp, _)| timestamp.to_string()),
            version.map(|(_, origin)| origin),
            seen.as_ref().map(Seen::state),
        )
    };
    let (here_at, here_origin, here_state) = stamp(&sight.here);
    let (there_at, there_origin, there_state) = stamp(&sight.there);
    let rows = query(
        &format!(
            "insert into braid.difference (comparison_id, key_values, key, kind, columns, local_row, provider_row, \
                    local_timestamp, local_origin, local_state, provider_timestamp, provider_origin, provider_state) \
             select $1::bigint, $2::text[], {}, $3, $4::text[], case when $5 is not null then {} end, case when $6 is not null then {} end, \
                    timestamptz 'epoch' + $7::bigint * interval '1 us', $8::name, $9, \
                    timestamptz 'epoch' + $10::bigint * interval '1 us', $11::name, $12 \
              where not exists (select from braid.difference d where d.comparison_id = $1::bigint and d.key_values = $2::text[]) \
             returning 1",
            json("$15", "$16", "$2"),
            json("$13", "$14", "$5"),
            json("$13", "$14", "$6"),
        ),
        &[
            Some(&id),
            Some(&key),
            Some(sight.kind()),
            columns.as_deref(),
            here.as_deref(),
            there.as_deref(),
            here_at.as_deref(),
            here_origin.as_deref(),
            here_state.as_deref(),
            there_at.as_deref(),
            there_origin.as_deref(),
            there_state.as_deref(),
            Some(&names),
            Some(&shown),
            Some(&key_names),
            Some(&key_shown),
        ],
    );
    !rows.is_empty()
}
