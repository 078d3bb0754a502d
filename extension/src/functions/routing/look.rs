//! Where rows are: `braid.route`, `braid.route_query`, and the rows of the views of routing.

use braid_bgworker::hex;
use braid_bgworker::sql_text::quote_literal;
use braid_node::registry;
use braid_node::routing::{self, Known};
use braid_node::umbrella;
use braid_postgres::catalog::query;
use braid_postgres::encoding::Text;
use braid_postgres::lock::LockMode;
use braid_postgres::relation::Relation;
use braid_postgres::table_expression::TableExpression;
use braid_postgres::{encoding, syscache, timestamp};
use braid_routing::{
    Expressions, NodeId, Phase, RecordHash, RoutedTable, RuleList, Run, SetId, Shard, TableName,
    Tenant, TenantHash, Time,
};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::iter::TableIterator;
use pgrx::{PgSqlErrorCode, name, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::{required, run, text};

/// The name of a table in the group's log.
pub fn table_of(relation: pg_sys::Oid) -> Outcome<TableName> {
    let (schema, name) = syscache::relation_name(relation);
    if name.is_empty() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("relation with OID {} does not exist", relation.to_u32()),
        )
        .hint("Give the name of a table."));
    }
    Ok(routing::table_name(&schema, &name)?)
}

/// The agreed routing.
///
/// # Errors
/// 55000 if this node knows nothing of it.
pub fn known() -> Outcome<Known> {
    routing::known().ok_or_else(|| {
        Failure::state("this node knows nothing of its group's routing")
            .hint("Tables are routed in a group: see braid.group_nodes, or create one with braid.create_group.")
    })
}

/// The facts of a routed table's expressions by which a tenant and a record are read from text.
pub struct Keys {
    /// The type of the tenant, as SQL: one of PostgreSQL's own.
    pub tenant: String,
    /// The type of the record, likewise.
    pub record: String,
    /// The name of the record's column, if the creation is an expression over it alone.
    source: Option<String>,
}

impl Keys {
    /// The facts of a routed table. Evaluates nothing.
    pub fn of(relation: pg_sys::Oid, expressions: &Expressions) -> Outcome<Self> {
        let table = Relation::open(relation, LockMode::AccessShare);
        let read = |text: &str| TableExpression::read(table.view(), text);
        let [tenant, record, created] = [
            read(&expressions.tenant)?,
            read(&expressions.record)?,
            read(&expressions.created)?,
        ];
        // A domain's checks would be code of its owner.
        let type_name = |of| {
            let name = syscache::format_type(syscache::base_type(of), -1);
            encoding::utf8(&name)
        };
        let is_source = record.is_column && created.columns == record.columns;
        Ok(Self {
            tenant: type_name(tenant.of),
            record: type_name(record.of),
            source: (is_source && !created.is_column).then_some(record.text),
        })
    }
}

fn routed<'k>(known: &'k Known, name: &TableName) -> Outcome<&'k RoutedTable> {
    known.table(name).ok_or_else(|| {
        Failure::state(format!("table {name} is not routed"))
            .hint("The view braid.routed_tables lists the tables that are.")
    })
}

/// The canonical bytes of a value that is given as text.
fn canonical(value: &str, type_name: &str) -> Outcome<Vec<u8>> {
    let found = query(
        &format!("select pg_catalog.encode(braid.routing_key($1::{type_name}), 'hex')"),
        &[Some(value)],
    );
    found
        .get(0, 0)
        .and_then(hex::decode)
        .ok_or_else(|| Failure::null_argument("the value"))
}

/// When a row was created, as its record says; now if the record does not say it.
fn creation(expressions: &Expressions, keys: &Keys, record: &str) -> Time {
    let now = Time(timestamp::now());
    let Some(column) = &keys.source else {
        return now;
    };
    // The guard of the table has made sure that the expression is PostgreSQL's own.
    let found = query(
        &format!(
            "select pg_catalog.trunc(extract(epoch from c - timestamptz '2000-01-01 00:00 UTC') * 1000000) \
               from (select ({}) as c from (select {}::{} as {column}) r) k",
            expressions.created,
            quote_literal(record),
            keys.record
        ),
        &[],
    );
    let micros = found.get(0, 0).and_then(|text| text.parse().ok());
    micros.map_or(now, Time)
}

type Names = Vec<Text>;
type Numbers = Vec<i32>;
type MaybeText = Option<Text>;
type MaybeNumber = Option<i32>;
type RouteRow = (i32, i32, Vec<Text>, Option<Text>);

/// braid.route(relation regclass, tenant text, record text, created timestamptz) returns table
#[pg_extern(sql = false)]
fn route(
    relation: Option<pg_sys::Oid>,
    tenant: Option<Text>,
    record: Option<Text>,
    created: Option<TimestampWithTimeZone>,
) -> TableIterator<
    'static,
    (
        name!(shard, i32),
        name!(node_set, i32),
        name!(nodes, Names),
        name!(dsn, MaybeText),
    ),
> {
    let row = run(|| find_route(relation, text(tenant), text(record), created));
    TableIterator::once(row)
}

fn find_route(
    relation: Option<pg_sys::Oid>,
    tenant: Option<String>,
    record: Option<String>,
    created: Option<TimestampWithTimeZone>,
) -> Outcome<RouteRow> {
    let relation = required(relation, "relation")?;
    let name = table_of(relation)?;
    let (tenant, record) = (required(tenant, "tenant")?, required(record, "record")?);
    let known = known()?;
    let table = routed(&known, &name)?;
    let keys = Keys::of(relation, table.expressions())?;
    let tenant = TenantHash::of_canonical(&canonical(&tenant, &keys.tenant)?);
    let hash = RecordHash::of_canonical(&canonical(&record, &keys.record)?);
    let created = match created {
        Some(created) => Time(created.into()),
        None => creation(table.expressions(), &keys, &record),
    };
    if created > known.closed && table.is_open() {
        routing::note_use();
    }
    let shard = table.placement(tenant, hash, created);
    row_of(&known, table, shard)
}

fn row_of(known: &Known, table: &RoutedTable, shard: Shard) -> Outcome<RouteRow> {
    let route = table
        .map()
        .route(shard)
        .ok_or_else(|| Failure::state(format!("shard {shard} does not exist")))?;
    Ok((
        signed(shard.0),
        signed(route.set.0),
        known
            .agreed
            .names(route.nodes)
            .into_iter()
            .map(Text)
            .collect(),
        known.agreed.dsn(route.nodes).map(Text),
    ))
}

fn signed(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// braid.route_query(relation regclass, tenant text, upto timestamptz) returns table
#[pg_extern(sql = false)]
fn route_query(
    relation: Option<pg_sys::Oid>,
    tenant: Option<Text>,
    upto: Option<TimestampWithTimeZone>,
) -> TableIterator<
    'static,
    (
        name!(node_set, i32),
        name!(nodes, Names),
        name!(dsn, MaybeText),
        name!(shards, Numbers),
    ),
> {
    let rows = run(|| {
        let relation = required(relation, "relation")?;
        let name = table_of(relation)?;
        let tenant = required(text(tenant), "tenant")?;
        let upto = upto.map(|upto| Time(upto.into()));
        let known = wait_for_bound(&name, upto)?;
        let table = routed(&known, &name)?;
        let keys = Keys::of(relation, table.expressions())?;
        let tenant = TenantHash::of_canonical(&canonical(&tenant, &keys.tenant)?);
        let bound = known.read_bound(table, upto);
        let run: Run = table.candidates(tenant, bound);
        let routes = table.map().route_query(run).into_iter();
        Ok(routes
            .map(|route| {
                (
                    signed(route.set.0),
                    known
                        .agreed
                        .names(route.nodes)
                        .into_iter()
                        .map(Text)
                        .collect(),
                    known.agreed.dsn(route.nodes).map(Text),
                    route.shards.iter().map(|shard| signed(shard.0)).collect(),
                )
            })
            .collect::<Vec<(i32, Vec<Text>, Option<Text>, Vec<i32>)>>())
    });
    TableIterator::new(rows)
}

fn wait_for_bound(name: &TableName, upto: Option<Time>) -> Outcome<Known> {
    routed(&known()?, name)?;
    umbrella::known_for_read(name, upto).map_or_else(known, Ok)
}

fn tables(known: Option<&Known>) -> Vec<(String, &RoutedTable)> {
    let tables = known
        .into_iter()
        .flat_map(|known| known.agreed.routing.tables());
    tables
        .map(|(name, table)| (name.to_string(), table))
        .collect()
}

/// braid.routed_table_rows() returns table
#[pg_extern(sql = false)]
fn routed_table_rows() -> TableIterator<
    'static,
    (
        name!(relation, Text),
        name!(tenant, Text),
        name!(record, Text),
        name!(created, Text),
        name!(shards, i32),
        name!(node_sets, i32),
        name!(state, Text),
    ),
> {
    let known = routing::known();
    let rows: Vec<_> = tables(known.as_ref())
        .into_iter()
        .map(|(name, table)| {
            let expressions = table.expressions().clone();
            let state = if table.is_open() { "open" } else { "prepared" };
            (
                Text(name),
                Text(expressions.tenant),
                Text(expressions.record),
                Text(expressions.created),
                signed(table.map().shards().get()),
                i32::try_from(table.map().sets().len()).unwrap_or(i32::MAX),
                Text(state.to_owned()),
            )
        })
        .collect();
    TableIterator::new(rows)
}

/// braid.shard_rows() returns table
#[pg_extern(sql = false)]
fn shard_rows() -> TableIterator<
    'static,
    (
        name!(relation, Text),
        name!(shard, i32),
        name!(node_set, i32),
        name!(nodes, Names),
        name!(moves_to, MaybeNumber),
        name!(phase, MaybeText),
    ),
> {
    let known = routing::known();
    let mut rows = Vec::new();
    for (name, table) in tables(known.as_ref()) {
        let map = table.map();
        for shard in map.shards().all() {
            let Some(route) = map.route(shard) else {
                continue;
            };
            let moving = map.moving(shard);
            let names = |nodes: &[NodeId]| {
                let names = known.as_ref().map(|known| known.agreed.names(nodes));
                names.unwrap_or_default().into_iter().map(Text).collect()
            };
            rows.push((
                Text(name.clone()),
                signed(shard.0),
                signed(route.set.0),
                names(route.nodes),
                moving.map(|moving| set_number(moving.to)),
                moving.map(|moving| {
                    Text(
                        match moving.phase {
                            Phase::Copying => "copying",
                            Phase::Switched => "switched",
                        }
                        .to_owned(),
                    )
                }),
            ));
        }
    }
    TableIterator::new(rows)
}

fn set_number(set: SetId) -> i32 {
    signed(set.0)
}

/// braid.routing_rule_rows() returns table
#[pg_extern(sql = false)]
fn routing_rule_rows() -> TableIterator<
    'static,
    (
        name!(relation, Text),
        name!(counts_after, Option<TimestampWithTimeZone>),
        name!(spread, i32),
        name!(tenants, Vec<Text>),
    ),
> {
    let known = routing::known();
    let mut rows = Vec::new();
    for (name, table) in tables(known.as_ref()) {
        let rules: &RuleList = table.rules();
        for rule in rules.rules() {
            let tenants = rule.tenants.iter().filter_map(|hash| table.tenant(*hash));
            rows.push((
                Text(name.clone()),
                TimestampWithTimeZone::try_from(rule.time.0).ok(),
                signed(rule.spread.get()),
                tenants.map(Tenant::to_string).map(Text).collect(),
            ));
        }
    }
    TableIterator::new(rows)
}

/// braid.routing_activity() returns table
#[pg_extern(sql = false)]
fn routing_activity() -> TableIterator<
    'static,
    (
        name!(closed_upto, Option<TimestampWithTimeZone>),
        name!(waits, i64),
        name!(longest_wait_ms, f64),
        name!(longest_agreement_ms, f64),
    ),
> {
    let row = registry::my_manager().map(|entry| {
        let [waits, wait, agreement] = entry.routing.activity();
        let closed = routing::known().map(|known| known.closed);
        let closed = closed.filter(|time| time.is_finite());
        (
            closed.and_then(|time| TimestampWithTimeZone::try_from(time.0).ok()),
            i64::try_from(waits).unwrap_or(i64::MAX),
            milliseconds(wait),
            milliseconds(agreement),
        )
    });
    TableIterator::new(row)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a duration far below what f64 holds exactly"
)]
fn milliseconds(micros: u64) -> f64 {
    micros as f64 / 1000.0
}
