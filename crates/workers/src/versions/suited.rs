//! Whether a table of this node can be versioned in a group of several nodes with data: every node
//! gets every write of it, in its order.

use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::rows;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

/// Each query finds what prevents it; the second column names it.
const CHECKS: [(&str, &str, &str); 7] = [
    (
        "select s.subscription_name from braid.subscription s where s.on_error = 'park' order by 1 limit 1",
        "subscription \"{}\" parks transactions that fail, and tables cannot be versioned beside it",
        "Set on_error => 'stop' with braid.alter_subscription.",
    ),
    (
        "select s.subscription_name from braid.subscription s where s.split_transactions_above > 0 order by 1 limit 1",
        "subscription \"{}\" commits transactions in chunks, and tables cannot be versioned beside it",
        "Set split_transactions_above => 0 with braid.alter_subscription.",
    ),
    (
        "select s.subscription_name from braid.subscription s \
          where not exists (select from braid.group_member m where m.node_id = s.provider_id and m.state <> 'removed') order by 1 limit 1",
        "subscription \"{}\" is none of the group, and tables cannot be versioned beside it yet",
        "Drop the subscription first.",
    ),
    (
        "select m.node_name from braid.group_member m, braid.group_self g \
          where m.role = 'data' and m.state <> 'removed' and m.member_id <> g.member_id \
            and not exists (select from braid.subscription s where s.provider_id = m.node_id and s.only_origin is null) order by 1 limit 1",
        "this node does not subscribe to node \"{}\", and every node needs every write of a versioned table",
        "Wait with braid.wait_for_group().",
    ),
    (
        "select s.subname from pg_catalog.pg_subscription s \
          where s.subdbid = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()) order by 1 limit 1",
        "tables of a database with PostgreSQL's subscription \"{}\" cannot be versioned yet",
        "Drop the subscription first.",
    ),
    (
        "select source_name from braid.ingest_source limit 1",
        "tables of a database that ingests changes of source \"{}\" cannot be versioned yet",
        "Forget the source with braid.forget_source first.",
    ),
    (
        "select p.pubname from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid \
          where r.prrelid = $1 and (r.prqual is not null or r.prattrs is not null) order by 1 limit 1",
        "publication \"{}\" has a row filter or a column list for the table",
        "Publish the whole table: every node needs every write of it.",
    ),
];

/// Checks it. In a transaction.
///
/// # Errors
/// 55000 for what prevents it.
pub fn check(relation: pg_sys::Oid) -> Result<(), PgError> {
    for (query, message, hint) in CHECKS {
        let found = if query.contains("$1") {
            rows(query, &[relation.into()])?
        } else {
            rows(query, &[])?
        };
        let Some(name) = found.first() else {
            continue;
        };
        let name = name.first().cloned().flatten().unwrap_or_default();
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            message.replace("{}", &name),
        )
        .with_hint(hint));
    }
    let found = rows(
        "select 1::text from braid.routed_tables r where r.relation::oid = $1",
        &[relation.into()],
    )?;
    if found.is_empty() {
        return Ok(());
    }
    Err(PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        "the table is routed, and a routed table cannot be versioned",
    )
    .with_hint("Call braid.unroute_table first."))
}
