//! Versioned tables: version_table, unversion_table, declare, read_current, and what the view
//! shows.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_group::{Command, TableNumber};
use braid_node::versions::memory::{self, mark, state};
use braid_node::versions::{self, tables};
use braid_postgres::catalog::{current_role, query, sees_new_commits};
use braid_postgres::encoding::Text;
use braid_postgres::error::{self, PgError};
use braid_postgres::lock::LockMode;
use braid_postgres::{declared_tables, latch, syscache};
use braid_versions::{Access, Declaration, TableName};
use braid_workers::versions::suited;
use pgrx::iter::TableIterator;
use pgrx::{PgSqlErrorCode, name, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::group::{PATIENCE, ask, check_goes_on, check_rights, require_own};
use super::{in_recovery, on_standby, required, run, server, text};

fn unsupported(message: impl Into<String>) -> Failure {
    Failure::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, message)
}

fn check_caller(caller: pg_sys::Oid) -> Outcome<()> {
    if in_recovery() {
        return Err(on_standby());
    }
    check_rights(caller)?;
    if !sees_new_commits() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
            "tables cannot be versioned in a transaction that does not see new commits",
        )
        .hint("Call the function at isolation level READ COMMITTED."));
    }
    require_own()?;
    check_goes_on()?;
    server::check_workers_run()
}

/// braid.version_table(relation regclass)
#[pg_extern(sql = false)]
fn version_table(relation: Option<pg_sys::Oid>) {
    let caller = current_role();
    run(|| {
        check_caller(caller)?;
        let relation = required(relation, "relation")?;
        let table = check_table(relation)?;
        if is_shared() {
            suited::check(relation)?;
            ask(Command::VersionTable { table })?;
            return wait_for_phase(relation, "phase = 1");
        }
        // Current writers of the table end first, and no session writes it until it is versioned.
        lock(relation);
        check_database(relation)?;
        ask(Command::VersionTable { table })?;
        Ok(())
    });
}

/// Whether several nodes of the group have data, or a sequencer was agreed on.
fn is_shared() -> bool {
    let found = query(
        "select (select count(*) > 1 from braid.group_member where role = 'data' and state <> 'removed') \
             or exists (select from braid.version_cut)",
        &[],
    );
    found.get(0, 0) == Some("t")
}

/// Waits until all nodes have drained the table.
fn wait_for_phase(relation: pg_sys::Oid, wanted: &str) -> Outcome<()> {
    let deadline = Instant::now() + PATIENCE;
    let sql = format!(
        "select exists (select from braid.versioned_table where relation = $1::oid and {wanted}), \
                exists (select from braid.versioned_table where relation = $1::oid)"
    );
    loop {
        let found = query(&sql, &[Some(&relation.to_u32().to_string())]);
        let is = |column: usize| found.get(0, column) == Some("t");
        if is(0) || (wanted == GONE && !is(1)) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
                format!("not all nodes have drained table {} yet", described(relation)),
            )
            .detail("The group has agreed. Until all nodes have what was written before, nobody writes the table.")
            .hint("End transactions that have written it, this one included. See braid.group_nodes for nodes that are away."));
        }
        latch::wait(Some(Duration::from_millis(50)));
    }
}

/// Has [`wait_for_phase`] wait until a table is an ordinary one again.
const GONE: &str = "false";

/// braid.unversion_table(relation regclass)
#[pg_extern(sql = false)]
fn unversion_table(relation: Option<pg_sys::Oid>) {
    let caller = current_role();
    run(|| {
        check_caller(caller)?;
        let relation = required(relation, "relation")?;
        let found = query(
            "select v.table_number from braid.versioned_table v where v.relation = $1::oid",
            &[Some(&relation.to_u32().to_string())],
        );
        let number = found.get(0, 0).and_then(|number| number.parse().ok());
        let Some(number) = number else {
            return Err(
                Failure::state(format!("table {} is not versioned", described(relation)))
                    .hint("The view braid.table_versions lists the versioned tables."),
            );
        };
        let shared = is_shared();
        if !shared {
            lock(relation);
        }
        ask(Command::UnversionTable {
            table: TableNumber(number),
        })?;
        if shared {
            return wait_for_phase(relation, GONE);
        }
        Ok(())
    });
}

fn lock(relation: pg_sys::Oid) {
    LockMode::ShareRowExclusive.on_relation(relation);
}

fn described(relation: pg_sys::Oid) -> String {
    let (schema, table) = syscache::relation_name(relation);
    if table.is_empty() {
        return relation.to_u32().to_string();
    }
    let schema = Some(schema);
    TableName { schema, table }.to_string()
}

/// Checks that a relation can be versioned. Returns its name.
fn check_table(relation: pg_sys::Oid) -> Outcome<TableName> {
    let found = query(
        "select n.nspname, c.relname, c.relkind, c.relpersistence, c.relispartition, \
                exists (select from pg_inherits i where c.oid in (i.inhrelid, i.inhparent)), \
                c.xmin = pg_current_xact_id_if_assigned()::xid, \
                n.nspname in ('pg_catalog', 'information_schema', 'braid') or n.nspname ~ '^pg_' \
                or exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'), \
                exists (select from pg_rewrite w where w.ev_class = c.oid) \
           from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = $1::oid",
        &[Some(&relation.to_u32().to_string())],
    );
    let (Some(schema), Some(table)) = (found.get(0, 0), found.get(0, 1)) else {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            "there is no such table",
        )
        .hint("Name a table of this database."));
    };
    let name = described(relation);
    let is = |column: usize| found.get(0, column) == Some("t");
    match found.get(0, 2) {
        Some("r") => {}
        Some("p") => {
            return Err(
                unsupported(format!("partitioned table {name} cannot be versioned yet"))
                    .hint("Version a table without partitions."),
            );
        }
        _ => {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
                format!("{name} is not a table"),
            )
            .hint("Version the tables that a view reads. Foreign tables and sequences have no versions."));
        }
    }
    if is(4) || is(5) {
        return Err(unsupported(format!(
            "table {name} is part of an inheritance tree and cannot be versioned yet"
        ))
        .detail("A read of the parent would read tables that are not declared.")
        .hint("Version a table that stands alone."));
    }
    if found.get(0, 3) != Some("p") {
        return Err(Failure::state(format!(
            "table {name} is temporary or unlogged, and cannot be versioned"
        ))
        .detail("Other nodes get no changes of it.")
        .hint("Run ALTER TABLE ... SET LOGGED first, or use a permanent table."));
    }
    if is(7) {
        return Err(Failure::state(format!(
            "{name} belongs to PostgreSQL or an extension, and cannot be versioned"
        ))
        .hint("Version tables of your own."));
    }
    if is(8) {
        return Err(unsupported(format!(
            "table {name} has rules and cannot be versioned yet"
        ))
        .hint("Drop its rules, or use triggers."));
    }
    if is(6) {
        return Err(Failure::state(format!(
            "table {name} was created or changed in this transaction"
        ))
        .detail("The group's worker does not see it before the transaction commits.")
        .hint("Commit first, then call braid.version_table."));
    }
    Ok(TableName {
        schema: Some(schema.to_owned()),
        table: table.to_owned(),
    })
}

/// Checks that nothing in this database would write the table without regard to its order.
fn check_database(relation: pg_sys::Oid) -> Outcome<()> {
    // A session that subscribes waits, and then finds the table versioned.
    query("lock table braid.subscription in share mode", &[]);
    let subscriptions = query(
        "select s.subscription_name, s.on_error from braid.subscription s order by s.on_error <> 'park', s.subscription_name",
        &[],
    );
    if let Some(name) = subscriptions.get(0, 0) {
        if subscriptions.get(0, 1) == Some("park") {
            return Err(unsupported(format!(
                "subscription \"{name}\" parks transactions that fail, and tables cannot be versioned beside it"
            ))
            .detail("Every versioned transaction after a parked one would have to wait for it.")
            .hint("Set on_error => 'stop' with braid.alter_subscription."));
        }
        return Err(unsupported(
            "tables of a database with subscriptions cannot be versioned yet",
        )
        .detail(format!(
            "Changes that subscription \"{name}\" receives would be applied without regard to versions."
        ))
        .hint("Version tables in a group of one node and witnesses, without subscriptions."));
    }
    let native = query(
        "select s.subname from pg_subscription s where s.subdbid = (select d.oid from pg_database d where d.datname = current_database()) order by 1 limit 1",
        &[],
    );
    if let Some(name) = native.get(0, 0) {
        return Err(unsupported(
            "tables of a database with subscriptions cannot be versioned yet",
        )
        .detail(format!(
            "Changes that PostgreSQL's subscription \"{name}\" receives would be applied without regard to versions."
        ))
        .hint("Drop the subscription first."));
    }
    let sources = query("select source_name from braid.ingest_source limit 1", &[]);
    if let Some(name) = sources.get(0, 0) {
        return Err(unsupported(
            "tables of a database that ingests changes cannot be versioned yet",
        )
        .detail(format!(
            "Source \"{name}\" writes without regard to versions."
        ))
        .hint("Forget the source with braid.forget_source first."));
    }
    let filtered = query(
        "select p.pubname from pg_publication_rel r join pg_publication p on p.oid = r.prpubid \
          where r.prrelid = $1::oid and (r.prqual is not null or r.prattrs is not null) order by 1 limit 1",
        &[Some(&relation.to_u32().to_string())],
    );
    if let Some(publication) = filtered.get(0, 0) {
        return Err(Failure::state(format!(
            "publication \"{publication}\" has a row filter or a column list for table {}",
            described(relation)
        ))
        .detail("Every node needs every write of a versioned table.")
        .hint("Publish the whole table."));
    }
    Ok(())
}

/// Checks that no table is versioned, for what would write tables without regard to versions.
pub fn check_none(what: &str) -> Outcome<()> {
    let found = query(
        "select relation::regclass::text from braid.versioned_table limit 1",
        &[],
    );
    let Some(table) = found.get(0, 0) else {
        return Ok(());
    };
    Err(unsupported(format!(
        "a database with versioned tables cannot {what} yet"
    ))
    .detail(format!(
        "Table {table} is versioned, and the changes would be applied without regard to that."
    ))
    .hint("Call braid.unversion_table for each table of braid.table_versions first."))
}

/// braid.declare(query text) returns text: under the caller's rights and search path.
#[pg_extern(sql = false)]
fn declare(query: Option<Text>) -> Option<Text> {
    let query = text(query)?;
    error::pass_on(|| match declaration(&query) {
        Ok(declared) => Some(Text(declared)),
        Err(error) => error.raise(),
    })
}

fn declaration(query: &str) -> Result<String, PgError> {
    let mut found = Vec::new();
    for (relation, writes) in declared_tables::of_query(query)? {
        if tables::number_of(relation).is_none() {
            continue;
        }
        let access = if writes { Access::Write } else { Access::Read };
        let (schema, table) = syscache::relation_name(relation);
        let schema = (!declared_tables::is_visible(relation)).then_some(schema);
        found.push((TableName { schema, table }, access));
    }
    Ok(Declaration::new(found).map_or_else(String::new, |declared| declared.to_string()))
}

/// braid.read_current(relation regclass)
#[pg_extern(sql = false)]
fn read_current(relation: Option<pg_sys::Oid>) {
    error::pass_on(|| {
        let Some(relation) = relation else {
            Failure::null_argument("relation").raise();
        };
        if let Err(error) = versions::read_current(relation) {
            error.raise();
        }
    });
}

/// braid.version_activity()
#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn version_activity() -> TableIterator<
    'static,
    (
        name!(table_number, i32),
        name!(last_assigned, Option<i64>),
        name!(reached, Option<i64>),
        name!(waiting_pid, Option<i32>),
        name!(waits_for, Option<i64>),
        name!(waits_for_pid, Option<i32>),
        name!(waits_for_number, Option<i32>),
        name!(waiting_since, Option<i64>),
        name!(waiting_until, Option<i64>),
    ),
> {
    let number = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
    let version = |version: u64| i64::try_from(version).unwrap_or(i64::MAX);
    let mut rows = Vec::new();
    for shown in memory::shown() {
        rows.push((
            number(shown.number),
            Some(version(shown.assigned)),
            Some(version(shown.reached)),
            None,
            None,
            None,
            None,
            None,
            None,
        ));
    }
    for slot in memory::own_slots() {
        if !matches!(
            slot.state(),
            state::ASKED | state::WAITING | state::COMMIT_ASKED
        ) {
            continue;
        }
        let pid = slot.pid.load(Ordering::Acquire);
        let since = slot.since.load(Ordering::Acquire);
        let until = slot.deadline.load(Ordering::Acquire);
        let until = (until < i64::MAX).then_some(until);
        let mut waits: Vec<_> = slot
            .waits()
            .iter()
            .map(|wait| {
                let holder = (wait.holder != 0).then_some(wait.holder);
                let node = (wait.node != 0).then_some(i32::from(wait.node));
                (wait.table, Some(version(wait.version)), holder, node)
            })
            .collect();
        if waits.is_empty() || slot.state() != state::WAITING {
            // For numbers, or for a snapshot of another one.
            let tables = slot.tables().map(|cell| cell.load(Ordering::Acquire));
            waits = tables
                .map(|table| (table & mark::NUMBER, None, None, None))
                .collect();
        }
        for (table, waited, holder, node) in waits {
            rows.push((
                number(table),
                None,
                None,
                Some(pid),
                waited,
                holder,
                node,
                Some(since),
                until,
            ));
        }
    }
    TableIterator::new(rows)
}
