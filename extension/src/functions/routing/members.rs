//! The parts of `braid.route_table`, `braid.unroute_table` and `braid.move_shard` that each member
//! carries out, under the role of the connection string: each in a transaction of its own.

use std::time::{Duration, Instant};

use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_decoder::{guard_function, is_plain_guard};
use braid_node::origin::COPIED;
use braid_node::routing::{self, Known};
use braid_node::routing_guard::{self, GUARD};
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::error;
use braid_postgres::lock::LockMode;
use braid_postgres::relation::Relation;
use braid_postgres::{latch, session_origin, syscache};
use braid_routing::{Expressions, Phase, RoutedTable, Shard, TableName};
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::group::peer::check_peer;
use super::super::{in_recovery, on_standby, required, run, text};
use super::check::{RoutedKeys, check_routable};

/// How long a member waits for a change that the group has agreed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time limit of a wait for a lock on the table.
pub(super) const LOCK_TIMEOUT: &str = "set local lock_timeout = '10s'";

/// The table of a name, as the log has it.
pub(super) fn find_table(name: &str) -> Outcome<pg_sys::Oid> {
    let found = query("select pg_catalog.to_regclass($1)::oid", &[Some(name)]);
    let oid = found.get(0, 0).and_then(|oid| oid.parse::<u32>().ok());
    oid.map(pg_sys::Oid::from).ok_or_else(|| {
        Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("table {name} does not exist on this node"),
        )
        .hint("Create the table on all nodes first, and wait until they have it.")
    })
}

/// A table as SQL names it. The text that another member has sent is none.
pub(super) fn shown(table: pg_sys::Oid) -> String {
    let (schema, name) = syscache::relation_name(table);
    format!("{}.{}", quote_identifier(&schema), quote_identifier(&name))
}

/// The stage at which a node knows a table to be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The table is not routed.
    Unrouted,
    /// The table is routed, and takes no rows.
    Prepared,
    /// The table takes rows.
    Open,
}

impl Stage {
    fn of(known: &Known, name: &TableName) -> Self {
        match known.table(name) {
            None => Self::Unrouted,
            Some(table) if table.is_open() => Self::Open,
            Some(_) => Self::Prepared,
        }
    }
}

/// Waits until this node knows something.
fn wait_until<T>(mut look: impl FnMut(Known) -> Option<T>) -> Outcome<T> {
    // A standby never receives it.
    if in_recovery() {
        return Err(on_standby());
    }
    let since = Instant::now();
    loop {
        if let Some(found) = routing::known().and_then(&mut look) {
            return Ok(found);
        }
        if since.elapsed() > PATIENCE {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
                "this node has not received what the group has agreed",
            )
            .hint("See in braid.group_nodes whether it is connected to the others. Then call the function again."));
        }
        latch::wait(Some(Duration::from_millis(10)));
    }
}

/// Waits until this node knows that a table is in one of these stages.
pub(super) fn wait_for(name: &TableName, stages: &[Stage]) -> Outcome<Known> {
    wait_until(|known| stages.contains(&Stage::of(&known, name)).then_some(known))
}

/// braid.group_route_wait(relation text, state text)
#[pg_extern(sql = false)]
fn group_route_wait(relation: Option<Text>, state: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let name = table_name(&required(text(relation), "relation")?)?;
        let stage = match required(text(state), "state")?.as_str() {
            "open" => Stage::Open,
            "prepared" => Stage::Prepared,
            "unrouted" => Stage::Unrouted,
            other => return Err(Failure::parameter(format!("invalid state \"{other}\""))),
        };
        wait_for(&name, &[stage]).map(drop)
    });
}

pub(super) fn table_name(text: &str) -> Outcome<TableName> {
    TableName::new(text.as_bytes()).map_err(|error| Failure::parameter(error.to_string()))
}

/// braid.group_route_check(relation text, tenant text, record text, created text)
///
/// The facts that must be the same on all nodes, each in a line; first whether there are rows.
#[pg_extern(sql = false)]
fn group_route_check(
    relation: Option<Text>,
    tenant: Option<Text>,
    record: Option<Text>,
    created: Option<Text>,
) -> Text {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let name = required(text(relation), "relation")?;
        let keys = RoutedKeys {
            tenant: required(text(tenant), "tenant")?,
            record: required(text(record), "record")?,
            created: required(text(created), "created")?,
        };
        let table = find_table(&name)?;
        let facts = check_routable(table, &keys)?;
        let rows = rows_of(&shown(table), &keys)?;
        let mut lines = vec![rows.to_string()];
        lines.extend(facts.iter().map(|fact| fact.replace('\n', " ")));
        Ok(Text(lines.join("\n")))
    })
}

/// Whether the table has rows; all of them must have a place.
fn rows_of(name: &str, keys: &RoutedKeys) -> Outcome<bool> {
    let RoutedKeys {
        tenant,
        record,
        created,
    } = keys;
    let found = query(
        &format!(
            "select exists (select from only {name}), \
                    exists (select from only {name} where ({tenant}) is null or ({record}) is null or ({created}) is null), \
                    exists (select from only {name} where ({created}) > pg_catalog.now())"
        ),
        &[],
    );
    let is = |column: usize| found.get(0, column) == Some("t");
    if is(1) {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_NOT_NULL_VIOLATION,
            format!("rows of table {name} have no tenant, record or creation"),
        )
        .hint("Give each row a value for all three, or use other expressions."));
    }
    if is(2) {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_DATETIME_FIELD_OVERFLOW,
            format!("rows of table {name} are dated in the future"),
        )
        .hint("A row's creation must be the time at which it is inserted: routing rules count from a time on. Use another expression."));
    }
    Ok(is(0))
}

/// braid.group_route_guard(relation text)
///
/// From the commit on, this node refuses rows of other nodes, and sends each row to the nodes that
/// have its shard.
#[pg_extern(sql = false)]
fn group_route_guard(relation: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let text = required(text(relation), "relation")?;
        let name = table_name(&text)?;
        let known = wait_for(&name, &[Stage::Prepared, Stage::Open])?;
        let Some(routed) = known.table(&name) else {
            return Ok(());
        };
        set_guard(&text, routed)
    });
}

/// The guard's name, which is a plain word.
fn guard_name() -> String {
    quote_identifier(&GUARD.to_string_lossy())
}

fn has_guard(table: pg_sys::Oid) -> Outcome<Option<std::ffi::CString>> {
    let open = Relation::open(table, LockMode::AccessShare);
    Ok(open.view().check_constraint(GUARD))
}

fn set_guard(name: &str, routed: &RoutedTable) -> Outcome<()> {
    let table = find_table(name)?;
    let name = &shown(table);
    query(LOCK_TIMEOUT, &[]);
    query("set local braid.ddl_replication = off", &[]);
    if has_guard(table)?.is_none() {
        let Expressions {
            tenant,
            record,
            created,
        } = routed.expressions();
        let relation = quote_literal(name);
        routing_guard::allowed(|| {
            query(
                &format!(
                    "alter table {name} add constraint {} \
                       check (braid.is_here({relation}::pg_catalog.regclass, ({tenant}), ({record}), ({created}))) not valid",
                    guard_name()
                ),
                &[],
            );
        });
    }
    // The output plugin evaluates only expressions of columns and PostgreSQL's own functions.
    let guard = has_guard(table)?;
    let stored = guard.as_deref().and_then(|guard| guard.to_str().ok());
    let is_plain = stored.is_some_and(|guard| {
        guard_function(guard).is_some_and(|function| is_plain_guard(guard, function))
    });
    if is_plain {
        return Ok(());
    }
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("expressions of routed table {name} use more than columns and functions of PostgreSQL's own"),
    )
    .hint("Use columns, or a stored generated column that is computed by the expression."))
}

/// braid.group_route_digest(relation text)
///
/// How many rows there are, and a sum over their tenants, records and creations.
#[pg_extern(sql = false)]
fn group_route_digest(relation: Option<Text>) -> Text {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let text = required(text(relation), "relation")?;
        let name = table_name(&text)?;
        let known = wait_for(&name, &[Stage::Prepared])?;
        let Some(routed) = known.table(&name) else {
            return Ok(Text(String::new()));
        };
        let Expressions {
            tenant,
            record,
            created,
        } = routed.expressions();
        let found = query(
            &format!(
                "select pg_catalog.format('%s rows, sum %s', pg_catalog.count(*), pg_catalog.sum(pg_catalog.hashtextextended( \
                        pg_catalog.encode(braid.routing_key({tenant}), 'hex') || ' ' || pg_catalog.encode(braid.routing_key({record}), 'hex') \
                        || ' ' || pg_catalog.encode(braid.routing_key({created}), 'hex'), 0)::numeric)) from only {}",
                shown(find_table(&text)?)
            ),
            &[],
        );
        Ok(Text(found.get(0, 0).unwrap_or_default().to_owned()))
    })
}

/// braid.group_route_clear(relation text)
///
/// Deletes the rows of other nodes, on this node alone. All nodes must have all rows that were
/// written before their guards.
#[pg_extern(sql = false)]
fn group_route_clear(relation: Option<Text>) -> i64 {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let text = required(text(relation), "relation")?;
        let name = table_name(&text)?;
        let known = wait_for(&name, &[Stage::Prepared, Stage::Open])?;
        let Some(routed) = known.table(&name).filter(|routed| !routed.is_open()) else {
            return Err(Failure::state(format!("table {text} takes rows already"))
                .hint("Rows of other nodes are only deleted while a table is prepared."));
        };
        clear(&text, &known, routed)
    })
}

fn clear(name: &str, known: &Known, routed: &RoutedTable) -> Outcome<i64> {
    let Some(own) = known.agreed.place(known.agreed.me) else {
        return Err(Failure::state("this node is not a member of its group"));
    };
    let Expressions {
        tenant,
        record,
        created,
    } = routed.expressions();
    let name = &shown(find_table(name)?);
    let (relation, node) = (quote_literal(name), quote_literal(&own.name));
    query(LOCK_TIMEOUT, &[]);
    delete_here(
        name,
        &format!(
            "not braid.is_at({node}, {relation}::pg_catalog.regclass, ({tenant}), ({record}), ({created}))"
        ),
    )
}

/// braid.group_route_unguard(relation text)
#[pg_extern(sql = false)]
fn group_route_unguard(relation: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let text = required(text(relation), "relation")?;
        wait_for(&table_name(&text)?, &[Stage::Prepared, Stage::Unrouted])?;
        let table = find_table(&text)?;
        query(LOCK_TIMEOUT, &[]);
        query("set local braid.ddl_replication = off", &[]);
        if has_guard(table)?.is_some() {
            routing_guard::allowed(|| {
                query(
                    &format!(
                        "alter table {} drop constraint {}",
                        shown(table),
                        guard_name()
                    ),
                    &[],
                );
            });
        }
        Ok(())
    });
}

/// braid.group_route_rows(relation text)
#[pg_extern(sql = false)]
fn group_route_rows(relation: Option<Text>) -> bool {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let name = required(text(relation), "relation")?;
        let table = shown(find_table(&name)?);
        let found = query(&format!("select exists (select from only {table})"), &[]);
        Ok(found.get(0, 0) == Some("t"))
    })
}

/// Blocks of a table that are read to see which tenants have stored much.
const STORAGE_BLOCKS: i64 = 8_192;

/// braid.group_route_storage(relation text)
///
/// How many rows there are, and in a line each the largest tenants: canonical bytes and rows. Of a
/// large table some blocks are read, and stand for all.
#[pg_extern(sql = false)]
fn group_route_storage(relation: Option<Text>) -> Text {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let text = required(text(relation), "relation")?;
        let name = table_name(&text)?;
        let known = wait_for(&name, &[Stage::Prepared, Stage::Open])?;
        let Some(routed) = known.table(&name) else {
            return Ok(Text(String::new()));
        };
        let tenant = &routed.expressions().tenant;
        let table = find_table(&text)?;
        let blocks = count(&format!(
            "select pg_catalog.pg_relation_size({}::oid) / pg_catalog.current_setting('block_size')::bigint",
            table.to_u32()
        ))?;
        let (sample, scale) = if blocks > STORAGE_BLOCKS {
            let percent = format!("100.0 * {STORAGE_BLOCKS} / {blocks}");
            (
                format!("tablesample system ({percent})"),
                format!("{blocks}.0 / {STORAGE_BLOCKS}"),
            )
        } else {
            (String::new(), "1".to_owned())
        };
        let found = query(
            &format!(
                "with t as (select braid.routing_key({tenant}) as k, pg_catalog.count(*) as n from only {} {sample} group by 1) \
                 select coalesce(pg_catalog.sum(t.n) * ({scale}), 0)::bigint::text || coalesce((select pg_catalog.string_agg( \
                        E'\\n' || pg_catalog.encode(l.k, 'hex') || ' ' || (l.n * ({scale}))::bigint, '') \
                   from (select t.k, t.n from t order by t.n desc, t.k limit 2048) l), '') from t",
                shown(table)
            ),
            &[],
        );
        Ok(Text(found.get(0, 0).unwrap_or("0").to_owned()))
    })
}

/// braid.group_route_touch(relation text, shard integer, from_block bigint, to_block bigint)
///
/// Writes the rows of a shard in these blocks again as they are, so that they are sent to the nodes
/// that have begun to get the shard. Returns how many.
#[pg_extern(sql = false)]
fn group_route_touch(
    relation: Option<Text>,
    shard: Option<i32>,
    from_block: Option<i64>,
    to_block: Option<i64>,
) -> i64 {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let part = Part::read(relation, shard, from_block, to_block)?;
        query("set local session_replication_role = replica", &[]);
        let column = part.column()?;
        count(&format!(
            "with again as (update only {} set {column} = {column} where {} returning 1) select count(*) from again",
            part.table, part.condition
        ))
    })
}

/// braid.group_route_drop(relation text, shard integer, from_block bigint, to_block bigint)
///
/// Deletes the rows of a shard in these blocks, on this node alone, if this node no longer has the
/// shard. Returns how many.
#[pg_extern(sql = false)]
fn group_route_drop(
    relation: Option<Text>,
    shard: Option<i32>,
    from_block: Option<i64>,
    to_block: Option<i64>,
) -> i64 {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let part = Part::read(relation, shard, from_block, to_block)?;
        let known = wait_for(&part.name, &[Stage::Open, Stage::Prepared])?;
        let holds = known
            .table(&part.name)
            .is_none_or(|table| routing::holds(table, known.agreed.me, part.shard));
        if holds {
            return Err(Failure::state(format!(
                "this node has shard {} of table {}",
                part.shard, part.name
            ))
            .hint("Only rows of shards that a node has no more are deleted."));
        }
        delete_here(&part.table, &part.condition)
    })
}

/// braid.group_route_blocks(relation text)
#[pg_extern(sql = false)]
fn group_route_blocks(relation: Option<Text>) -> i64 {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let table = find_table(&required(text(relation), "relation")?)?;
        let found = query(
            "select pg_catalog.pg_relation_size($1::oid) / pg_catalog.current_setting('block_size')::bigint + 1",
            &[Some(&table.to_u32().to_string())],
        );
        Ok(found
            .get(0, 0)
            .and_then(|blocks| blocks.parse().ok())
            .unwrap_or(1))
    })
}

fn read_shard(shard: Option<i32>) -> Outcome<Shard> {
    u32::try_from(required(shard, "shard")?)
        .map(Shard)
        .map_err(|_| Failure::parameter("shard must not be negative"))
}

/// The rows of a shard in some blocks of a table.
struct Part {
    name: TableName,
    oid: pg_sys::Oid,
    /// The table, as SQL.
    table: String,
    shard: Shard,
    condition: String,
}

impl Part {
    fn read(
        relation: Option<Text>,
        shard: Option<i32>,
        from_block: Option<i64>,
        to_block: Option<i64>,
    ) -> Outcome<Self> {
        let text = required(text(relation), "relation")?;
        let name = table_name(&text)?;
        let shard = read_shard(shard)?;
        let (from, to) = (
            required(from_block, "from_block")?,
            required(to_block, "to_block")?,
        );
        let known = wait_for(&name, &[Stage::Open, Stage::Prepared])?;
        let routed = known
            .table(&name)
            .ok_or_else(|| Failure::from(routing::not_routed(&name)))?;
        let Expressions {
            tenant,
            record,
            created,
        } = routed.expressions();
        let oid = find_table(&text)?;
        let table = shown(oid);
        let relation = quote_literal(&table);
        let condition = format!(
            "ctid >= '({from},0)'::tid and ctid < '({to},0)'::tid \
               and braid.shard_of({relation}::pg_catalog.regclass, ({tenant}), ({record}), ({created})) = {shard}"
        );
        query(LOCK_TIMEOUT, &[]);
        Ok(Self {
            name,
            oid,
            table,
            shard,
            condition,
        })
    }

    /// A column of the table that can be written.
    fn column(&self) -> Outcome<String> {
        let found = query(
            "select attname from pg_catalog.pg_attribute \
              where attrelid = $1::oid and attnum > 0 and not attisdropped and attgenerated = '' and attidentity <> 'a' order by attnum limit 1",
            &[Some(&self.oid.to_u32().to_string())],
        );
        found.get(0, 0).map(quote_identifier).ok_or_else(|| {
            Failure::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                format!("table {} has no column that can be written", self.name),
            )
        })
    }
}

fn count(sql: &str) -> Outcome<i64> {
    let found = query(sql, &[]);
    Ok(found
        .get(0, 0)
        .and_then(|count| count.parse().ok())
        .unwrap_or(0))
}

/// Deletes rows on this node alone: neither sent on nor counted as a deletion.
fn delete_here(table: &str, condition: &str) -> Outcome<i64> {
    if session_origin::get() != 0 {
        return Err(Failure::state(
            "this session replays for a replication origin of its own",
        ));
    }
    query("set local session_replication_role = replica", &[]);
    session_origin::set(COPIED);
    let deleted = error::catch(|| {
        count(&format!(
            "with gone as (delete from only {table} where {condition} returning 1) select count(*) from gone"
        ))
    });
    session_origin::set(0);
    deleted.map_err(Failure::from)?
}

/// braid.group_route_moved(relation text, shard integer, phase text)
#[pg_extern(sql = false)]
fn group_route_moved(relation: Option<Text>, shard: Option<i32>, phase: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let name = table_name(&required(text(relation), "relation")?)?;
        let shard = read_shard(shard)?;
        let wanted = match required(text(phase), "phase")?.as_str() {
            "copying" => Some(Phase::Copying),
            "switched" => Some(Phase::Switched),
            _ => None,
        };
        wait_until(|known| {
            let moving = known.table(&name)?.map().moving(shard);
            (moving.map(|moving| moving.phase) == wanted).then_some(())
        })
    });
}
