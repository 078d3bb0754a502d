//! set_balancer, and the rows of braid.tenant_load.
//!
//! A balancer that is turned on first decides from the rows that tenants have stored. Each member
//! counts its rows, of a sample of blocks if there are many, and the session adds them up. If a
//! member can't be reached, storage does not count: large tenants are found when they write.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_bgworker::hex;
use braid_bgworker::sql_text::quote_literal;
use braid_group::Command;
use braid_node::routing;
use braid_node::settings;
use braid_node::tenant_load::{self, TABLES};
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::timestamp;
use braid_routing::{
    Balanced, Balancer, Decided, Mode, RoutedTable, Settings, TableName, Tenant, Time,
};
use pgrx::iter::TableIterator;
use pgrx::{name, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome, notice};
use super::super::group::ask;
use super::super::{required, run, text};
use super::look::known;
use super::table::{connect_all, not_routed, table_to_change};

/// braid.set_balancer(relation regclass, mode text)
#[pg_extern(sql = false)]
fn set_balancer(relation: Option<pg_sys::Oid>, mode: Option<Text>) {
    let caller = current_role();
    run(|| {
        let (_, name) = table_to_change(caller, relation)?;
        let mode = required(text(mode), "mode")?;
        let mode = match mode.as_str() {
            "off" => None,
            "advise" => Some(Mode::Advise),
            "on" => Some(Mode::On),
            _ => {
                return Err(Failure::parameter(format!("invalid balancer \"{mode}\"")).hint(
                    "Use advise to have decisions written down, on to have their rules added as well, or off.",
                ));
            }
        };
        let known = known()?;
        let table = known.table(&name).ok_or_else(|| not_routed(&name))?;
        let Some(mode) = mode else {
            // Also if it looks off from this node, which may lag.
            return ask_off(&name);
        };
        let before = mode_of(&name);
        if before == Some(mode) {
            return Ok(());
        }
        let settings = settings::balancer();
        settings
            .check(table.map().shards())
            .map_err(|error| Failure::parameter(error.to_string()).hint(error.hint()))?;
        if before.is_none() {
            check_room()?;
        }
        let since = Time(timestamp::now());
        ask(Command::SetOption {
            name: Balanced::option(&name),
            value: Some(Balanced { mode, since }.to_string()),
        })?;
        decide_from_storage(caller, &name, table, settings, mode)
    });
}

/// The mode of a table's balancer; `None` if it is off.
fn mode_of(name: &TableName) -> Option<Mode> {
    let found = query(
        "select value from braid.group_option where option_name = $1",
        &[Some(&Balanced::option(name))],
    );
    Balanced::read(found.get(0, 0)?).map(|balanced| balanced.mode)
}

/// Turns the balancer of a table off, if it is not.
pub(super) fn turn_off(name: &TableName) -> Outcome<()> {
    match mode_of(name) {
        None => Ok(()),
        Some(_) => ask_off(name),
    }
}

fn ask_off(name: &TableName) -> Outcome<()> {
    ask(Command::SetOption {
        name: Balanced::option(name),
        value: None,
    })
    .map(drop)
}

/// Checks that one more table can have a balancer.
fn check_room() -> Outcome<()> {
    let found = query("select option_name from braid.group_option", &[]);
    let names = found.iter().filter_map(|row| row.first()?.as_deref());
    if names.filter(|name| Balanced::is_option(name)).count() < TABLES {
        return Ok(());
    }
    Err(Failure::new(
        pgrx::PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("{TABLES} tables have a balancer already"),
    )
    .hint("Turn the balancer of another table off with braid.set_balancer."))
}

fn decide_from_storage(
    caller: pg_sys::Oid,
    name: &TableName,
    table: &RoutedTable,
    settings: Settings,
    mode: Mode,
) -> Outcome<()> {
    let Ok((total, storage)) = storage_of(caller, name) else {
        notice(format!(
            "the balancer of table {name} does not know what tenants have stored, as not all nodes could be asked"
        ));
        return Ok(());
    };
    if total < settings.least_writes {
        return Ok(());
    }
    let balancer = Balancer::new(settings, table.map().shards());
    let mut balancer =
        balancer.map_err(|error| Failure::parameter(error.to_string()).hint(error.hint()))?;
    let Some(decision) = balancer.start(Duration::ZERO, storage, total, table.rules()) else {
        return Ok(());
    };
    let now = Time(timestamp::now());
    for decided in Decided::of(name, now, mode == Mode::On, Duration::ZERO, &decision) {
        ask(Command::Decide(decided))?;
    }
    Ok(())
}

/// How many rows there are on all nodes, and the rows of the largest tenants.
fn storage_of(caller: pg_sys::Oid, name: &TableName) -> Outcome<(u64, BTreeMap<Tenant, u64>)> {
    let call = format!(
        "select braid.group_route_storage({})",
        quote_literal(&name.to_string())
    );
    let (mut total, mut storage) = (0_u64, BTreeMap::<Tenant, u64>::new());
    for member in &mut connect_all(caller)? {
        let answer = member.ask(&call)?.unwrap_or_default();
        let mut lines = answer.lines();
        let rows = lines.next().and_then(|rows| rows.parse().ok());
        total = total.saturating_add(rows.unwrap_or(0_u64));
        for line in lines {
            let (key, rows) = line.split_once(' ').unwrap_or_default();
            let tenant = hex::decode(key).and_then(|key| Tenant::from_canonical(&key).ok());
            if let (Some(tenant), Ok(rows)) = (tenant, rows.parse::<u64>()) {
                let sum = storage.entry(tenant).or_default();
                *sum = sum.saturating_add(rows);
            }
        }
    }
    Ok((total, storage))
}

/// braid.tenant_load_rows() returns table
#[pg_extern(sql = false)]
fn tenant_load_rows() -> TableIterator<
    'static,
    (
        name!(relation, Text),
        name!(tenant, Text),
        name!(node, Text),
        name!(writes_per_second, f64),
        name!(share, f64),
        name!(spread, i32),
        name!(error_per_second, f64),
    ),
> {
    let known = routing::known();
    let rows = tenant_load::shown_rows();
    // Of each node the total comes with each of its rows.
    let mut totals = BTreeMap::new();
    for row in &rows {
        totals.insert((&row.table, row.node), row.total);
    }
    let total_of = |table: &TableName| -> u64 {
        let totals = totals.iter().filter(|((of, _), _)| *of == table);
        totals.map(|(_, total)| *total).sum()
    };
    let shown: Vec<_> = rows
        .iter()
        .map(|row| {
            let table = known.as_ref().and_then(|known| known.table(&row.table));
            let spread = table.map_or(1, |table| {
                let spread = table.rules().largest_spread(row.tenant.tenant_hash());
                i32::try_from(spread.get()).unwrap_or(i32::MAX)
            });
            let names = known.as_ref().map(|known| known.agreed.names(&[row.node]));
            let node = names.and_then(|names| names.into_iter().next());
            (
                Text(row.table.to_string()),
                Text(row.tenant.to_string()),
                Text(node.unwrap_or_default()),
                ratio(row.count.saturating_mul(1_000_000), row.micros),
                ratio(row.count, total_of(&row.table)),
                spread,
                ratio(row.error.saturating_mul(1_000_000), row.micros),
            )
        })
        .collect();
    TableIterator::new(shown)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of a period, far below what f64 holds exactly"
)]
fn ratio(number: u64, of: u64) -> f64 {
    number as f64 / of.max(1) as f64
}
