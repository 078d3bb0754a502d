//! The steps of `braid.compare` and `braid.repair`: procedures, which commit between these steps.

use std::ffi::CStr;
use std::num::NonZeroU64;

use braid_bgworker::compare::Side;
use braid_postgres::catalog::{query, sees_new_commits};
use braid_postgres::encoding::Text;
use braid_postgres::error::PgError;
use braid_workers::compare::{self, Repairing, Request};
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::local::{self, LocalNode};
use super::provider::Provider;
use super::waiting::check_running;
use super::{required, required_name, routing, run, server, text};

/// The subscription of a call, this node, and the provider.
struct Ends {
    subscription: braid_node::subscription::Subscription,
    relation: u32,
    node: LocalNode,
    provider: Provider,
}

fn ends(subscription_name: Option<&CStr>, relation: Option<pg_sys::Oid>) -> Outcome<Ends> {
    let name = required_name(subscription_name, "subscription_name")?;
    let relation = required(relation, "relation")?.to_u32();
    if !sees_new_commits() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
            "cannot compare in a transaction that does not see new commits",
        )
        .hint("Set default_transaction_isolation to read committed for the session."));
    }
    let node = local::require_node()?;
    server::check_for_subscription()?;
    let found = local::lock_subscription(&name)?;
    check_table(&found, relation)?;
    let rows = query(
        "select enabled, error_message from braid.subscription where subscription_id = $1::integer",
        &[Some(&found.id)],
    );
    check_running(&name, rows.get(0, 0), rows.get(0, 1))?;
    let id = found.id.parse().unwrap_or(0);
    let Some(subscription) = raised(braid_node::subscription::load(id)) else {
        return Err(local::undefined_subscription(&name));
    };
    let provider = Provider::open(found.dsn()?, pg_sys::Oid::from_u32(found.owner))?;
    provider.check_is(&found)?;
    Ok(Ends {
        subscription,
        relation,
        node,
        provider,
    })
}

/// Checks that the table is the subscription's, and is copied.
fn check_table(subscription: &local::Subscription, relation: u32) -> Outcome<()> {
    let relation = relation.to_string();
    let rows = query(
        "select t.state, $2::oid::regclass::text from (select) one \
           left join braid.subscription_table t on t.subscription_id = $1::integer and t.relation = $2::oid",
        &[Some(&subscription.id), Some(&relation)],
    );
    let shown = rows.get(0, 1).unwrap_or_default();
    match rows.get(0, 0) {
        Some("ready") => {
            let table = pg_sys::Oid::from(relation.parse::<u32>().unwrap_or(0));
            routing::check_whole(table, "compare", shown)
        }
        Some(state) => Err(Failure::state(format!("table {shown} is not copied yet"))
            .detail(format!("Its state is {state}."))
            .hint("Wait for it with braid.wait_for_subscription.")),
        None => Err(Failure::undefined(format!(
            "table {shown} is not in subscription \"{}\"",
            subscription.name
        ))
        .hint(
            "The view braid.subscription_tables lists the tables of each subscription. Of a partitioned table, name what is listed there: \
             the table or its partitions.",
        )),
    }
}

fn raised<T>(outcome: Result<T, PgError>) -> T {
    match outcome {
        Ok(value) => value,
        Err(error) => error.raise(),
    }
}

/// A number that is greater than zero, or null.
fn positive(value: Option<i64>, argument: &str) -> Outcome<Option<NonZeroU64>> {
    match value {
        None => Ok(None),
        Some(value) => match u64::try_from(value).ok().and_then(NonZeroU64::new) {
            Some(value) => Ok(Some(value)),
            None => Err(
                Failure::parameter(format!("{argument} must be greater than zero"))
                    .hint("Use null for no limit."),
            ),
        },
    }
}

/// braid.compare_begin(subscription_name name, relation regclass, rows_per_second bigint,
/// max_differences bigint, keys text)
#[pg_extern(sql = false)]
fn compare_begin(
    subscription_name: Option<&CStr>,
    relation: Option<pg_sys::Oid>,
    rows_per_second: Option<i64>,
    max_differences: Option<i64>,
    keys: Option<Text>,
) -> i64 {
    run(|| {
        let per_second = positive(rows_per_second, "rows_per_second")?;
        let limit = positive(max_differences, "max_differences")?;
        let ends = ends(subscription_name, relation)?;
        let request = Request {
            subscription: ends.subscription,
            relation: ends.relation,
            local_node: ends.node.name,
            per_second,
            limit: limit.map_or(u64::MAX, NonZeroU64::get),
            keys: text(keys),
        };
        Ok(raised(compare::start(
            request,
            ends.provider.into_connection(),
        )))
    })
}

/// braid.compare_step(comparison_id bigint)
#[pg_extern(sql = false)]
fn compare_step(comparison_id: Option<i64>) -> bool {
    run(|| {
        let id = required(comparison_id, "comparison_id")?;
        Ok(raised(compare::step(id)))
    })
}

/// braid.repair_begin(subscription_name name, relation regclass, side text, keys text, dry_run
/// boolean)
#[pg_extern(sql = false)]
fn repair_begin(
    subscription_name: Option<&CStr>,
    relation: Option<pg_sys::Oid>,
    side: Option<Text>,
    keys: Option<Text>,
    dry_run: Option<bool>,
) -> i64 {
    run(|| {
        let side = match required(text(side), "side")?.as_str() {
            "provider" => Side::Provider,
            "newest" => Side::Newest,
            other => {
                return Err(Failure::parameter(format!(
                    "\"{other}\" is not a side that can be right"
                ))
                .hint("Sides are provider and newest."));
            }
        };
        let dry_run = required(dry_run, "dry_run")?;
        let ends = ends(subscription_name, relation)?;
        let request = Repairing {
            subscription: ends.subscription,
            relation: ends.relation,
            local_node: ends.node.name,
            side,
            keys: text(keys),
            dry_run,
        };
        Ok(raised(compare::start_repair(
            request,
            ends.provider.into_connection(),
        )))
    })
}

/// braid.repair_step(repair_id bigint)
#[pg_extern(sql = false)]
fn repair_step(repair_id: Option<i64>) -> bool {
    run(|| {
        let id = required(repair_id, "repair_id")?;
        Ok(raised(compare::repair_step(id)))
    })
}

/// braid.repair_failed(repair_id bigint, reason text)
#[pg_extern(sql = false)]
fn repair_failed(repair_id: Option<i64>, reason: Option<Text>) {
    run(|| {
        let id = required(repair_id, "repair_id")?;
        raised(compare::repair_failed(
            id,
            &text(reason).unwrap_or_default(),
        ));
        Ok(())
    });
}
