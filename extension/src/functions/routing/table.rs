//! route_table, unroute_table and add_routing_rule.
//!
//! A table becomes routed in these steps. Each can be repeated: a call that failed is made again.
//!
//! | step | what happens | rows |
//! |---|---|---|
//! | 1 | every member checks the table, and all have the same facts | written everywhere |
//! | 2 | the group agrees on shards and sets (`Route`) | written everywhere |
//! | 3 | every member adds the guard | new and updated ones wait |
//! | 4 | with rows: all have all rows from before the guards; each deletes those of others | wait |
//! | 5 | the group agrees that the table takes rows (`Close`, `Open`) | each at its home |
//!
//! Routing ends in the reverse order: the group agrees that the table takes no rows (`Shut`); all
//! members receive the earlier writes; each drops its guard; the group forgets the table
//! (`Unroute`). So a change from under a guard is sent by the map by which it was written.
//!
//! The session connects to each member, itself included, and holds no lock on the table meanwhile.

use std::time::Duration;

use braid_bgworker::hex;
use braid_bgworker::sql_text::quote_literal;
use braid_group::Command;
use braid_node::routing::{self, Known};
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::libpq::{self, Connection};
use braid_postgres::{latch, timestamp};
use braid_routing::{
    Entry, Expressions, NodeId, NodeSet, RoutedTable, SetId, Shards, Spread, TableName, Tenant,
    Time,
};
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome, notice};
use super::super::group::{ask, check_goes_on, check_rights, require_own};
use super::super::{provider, required, run, text};
use super::balancer::turn_off;
use super::look::{Keys, known, table_of};
use super::umbrella;
use super::umbrella_member::check_table;

/// A rule that comes too late for its time is tried again so often.
const ATTEMPTS: u32 = 20;

/// A member with data, and a connection to it.
pub(super) struct Member {
    pub(super) id: u64,
    pub(super) name: String,
    connection: Connection,
}

impl Member {
    pub(super) fn ask(&mut self, sql: &str) -> Outcome<Option<String>> {
        let found = self
            .connection
            .query(sql)
            .map_err(|error| failed_at(&self.name, &error))?;
        Ok(found.get(0, 0).map(str::to_owned))
    }
}

/// The error of another member, under its own SQLSTATE.
fn failed_at(name: &str, error: &libpq::Error) -> Failure {
    let failure = Failure::provider(format!("node \"{name}\" could not do its part"), error);
    match error {
        libpq::Error::Server {
            hint: Some(hint), ..
        } => failure.hint(hint.clone()),
        _ => failure.hint("The function can be called again."),
    }
}

/// Connects to all members with data, this one included.
pub(super) fn connect_all(caller: pg_sys::Oid) -> Outcome<Vec<Member>> {
    let found = query(
        "select m.member_id, m.node_name, m.state, c.dsn from braid.group_member m join braid.connection c using (connection_id) \
          where m.role = 'data' and m.state <> 'removed' order by m.member_id",
        &[],
    );
    let mut members = Vec::new();
    for row in found.iter() {
        let [Some(id), Some(name), Some(state), Some(dsn)] = row else {
            continue;
        };
        if !["active", "in maintenance"].contains(&state.as_str()) {
            return Err(Failure::state(format!("node \"{name}\" is {state}"))
                .hint("Wait until it has joined or left: braid.wait_for_group() there."));
        }
        let connection = provider::connect_member(name, dsn, caller).map_err(|failure| {
            failure.elsewhere(
                &format!("All nodes take part; this is node \"{name}\"."),
                "Call the function again when it is back, or remove the node.",
            )
        })?;
        members.push(Member {
            id: id.parse().unwrap_or(0),
            name: name.clone(),
            connection,
        });
    }
    Ok(members)
}

/// The table that a function is called for, once its caller and this node may change its routing.
pub(super) fn table_to_change(
    caller: pg_sys::Oid,
    relation: Option<pg_sys::Oid>,
) -> Outcome<(pg_sys::Oid, TableName)> {
    check_rights(caller)?;
    require_own()?;
    check_goes_on()?;
    let relation = required(relation, "relation")?;
    Ok((relation, table_of(relation)?))
}

/// braid.route_table(relation regclass, tenant text, record text, created text, shards integer,
/// copies integer, existing text, umbrella boolean)
#[pg_extern(sql = false)]
#[expect(clippy::too_many_arguments, reason = "the SQL function's arguments")]
fn route_table(
    relation: Option<pg_sys::Oid>,
    tenant: Option<Text>,
    record: Option<Text>,
    created: Option<Text>,
    shards: Option<i32>,
    copies: Option<i32>,
    existing: Option<Text>,
    umbrella: Option<bool>,
) {
    let caller = current_role();
    run(|| {
        let (relation, name) = table_to_change(caller, relation)?;
        let umbrella = required(umbrella, "umbrella")?;
        if umbrella {
            check_table(relation)?;
        }
        let existing = required(text(existing), "existing")?;
        if !["refuse", "move"].contains(&existing.as_str()) {
            return Err(
                Failure::parameter(format!("invalid value \"{existing}\" for existing")).hint(
                    "Use refuse for a table without rows, move to leave each row on the nodes of its shard alone.",
                ),
            );
        }
        let expressions = Expressions {
            tenant: required(text(tenant), "tenant")?,
            record: required(text(record), "record")?,
            created: required(text(created), "created")?,
        };
        let shards = number(shards, "shards")?;
        let shards = Shards::new(shards)
            .map_err(|error| Failure::parameter(error.to_string()).hint(error.hint()))?;
        let mut members = connect_all(caller)?;
        let sets = sets_of(&members, number(copies, "copies")?)?;
        let has_rows = check_all(&mut members, &name, &expressions)?;
        if has_rows && existing == "refuse" {
            return Err(Failure::state(format!("table {name} has rows")).hint(
                "Use existing => 'move' to leave each row on the nodes of its shard alone.",
            ));
        }
        prepare(&name, &expressions, shards, sets)?;
        let table = quote_literal(&name.to_string());
        for member in &mut members {
            member.ask(&format!("select braid.group_route_guard({table})"))?;
        }
        if has_rows {
            send_home(&mut members, &name)?;
        }
        // Existing rows keep their places: no rule applies to them.
        close(Time(timestamp::now()))?;
        ask(Command::Route(Entry::Open {
            table: name.clone(),
        }))?;
        wait_all(&mut members, &table, "open")?;
        if umbrella {
            umbrella::make(&mut members, &name, caller)?;
        }
        Ok(())
    });
}

/// Waits until all members know how it stands with a table.
fn wait_all(members: &mut [Member], table: &str, state: &str) -> Outcome<()> {
    for member in members {
        member.ask(&format!(
            "select braid.group_route_wait({table}, '{state}')"
        ))?;
    }
    Ok(())
}

fn number(value: Option<i32>, argument: &str) -> Outcome<u32> {
    u32::try_from(required(value, argument)?)
        .map_err(|_| Failure::parameter(format!("{argument} must not be negative")))
}

/// Sets of so many nodes each, in the order of the members' numbers.
fn sets_of(members: &[Member], copies: u32) -> Outcome<Vec<NodeSet>> {
    let size = usize::try_from(copies).unwrap_or(0);
    if size == 0 || !members.len().is_multiple_of(size) {
        return Err(Failure::parameter(format!(
            "{} nodes cannot be divided into sets of {copies}",
            members.len()
        ))
        .hint("Each set of nodes has as many nodes as there are copies of a row."));
    }
    let sets = members.chunks(size).zip(1..);
    Ok(sets
        .map(|(members, id)| NodeSet {
            id: SetId(id),
            nodes: members.iter().map(|member| NodeId(member.id)).collect(),
        })
        .collect())
}

/// Has all members check the table. Returns whether any has rows.
fn check_all(members: &mut [Member], name: &TableName, expressions: &Expressions) -> Outcome<bool> {
    let call = format!(
        "select braid.group_route_check({}, {}, {}, {})",
        quote_literal(&name.to_string()),
        quote_literal(&expressions.tenant),
        quote_literal(&expressions.record),
        quote_literal(&expressions.created)
    );
    let mut has_rows = false;
    let mut first: Option<(String, String)> = None;
    for member in members {
        let answer = member.ask(&call)?.unwrap_or_default();
        let (rows, facts) = answer.split_once('\n').unwrap_or((&answer, ""));
        has_rows |= rows == "true";
        match &first {
            None => first = Some((member.name.clone(), facts.to_owned())),
            Some((node, known)) if known != facts => {
                return Err(Failure::state(format!(
                    "table {name} differs between nodes \"{node}\" and \"{}\"",
                    member.name
                ))
                .detail(differences(known, facts))
                .hint("Make the table the same on all nodes first."));
            }
            Some(_) => {}
        }
    }
    Ok(has_rows)
}

/// The first facts that differ, as a sentence.
fn differences(one: &str, other: &str) -> String {
    let only = |these: &str, those: &str| {
        let found = these
            .lines()
            .find(|line| !those.lines().any(|other| other == *line));
        found.unwrap_or("nothing").to_owned()
    };
    format!(
        "One has \"{}\", the other has \"{}\".",
        only(one, other),
        only(other, one)
    )
}

/// Has the group agree on shards and sets, unless an earlier call has come so far.
fn prepare(
    name: &TableName,
    expressions: &Expressions,
    shards: Shards,
    sets: Vec<NodeSet>,
) -> Outcome<()> {
    let before = routing::known();
    let before = before.as_ref().and_then(|known| known.table(name));
    let is_same = |table: &RoutedTable| {
        !table.is_open()
            && table.expressions() == expressions
            && table.map().shards() == shards
            && table.map().sets() == sets
    };
    match before {
        Some(table) if is_same(table) => {
            notice(format!(
                "goes on with the routing of table {name}, which is being prepared"
            ));
            Ok(())
        }
        Some(table) if !table.is_open() => Err(Failure::state(format!(
            "table {name} is being prepared with other shards, nodes or expressions"
        ))
        .hint("Call braid.unroute_table for the table, then route it anew.")),
        _ => ask(Command::Route(Entry::Route {
            table: name.clone(),
            expressions: expressions.clone(),
            shards,
            sets,
        }))
        .map(drop),
    }
}

/// Waits until each member has received all commits of each other one so far.
pub(super) fn exchange(members: &mut [Member]) -> Outcome<()> {
    let mut events = Vec::new();
    for member in members.iter_mut() {
        let event = member.ask("select braid.sync_event()")?.unwrap_or_default();
        events.push((member.name.clone(), event));
    }
    for member in members.iter_mut() {
        for (node, event) in &events {
            if *node != member.name {
                member.ask(&format!(
                    "select braid.wait_for_event({}, {}, '5 min')",
                    quote_literal(node),
                    quote_literal(event)
                ))?;
            }
        }
    }
    Ok(())
}

/// Has all members delete the rows of others, once each has all that was written before the guards.
fn send_home(members: &mut [Member], name: &TableName) -> Outcome<()> {
    exchange(members)?;
    // A row that its home lacks would be lost.
    let call = format!(
        "select braid.group_route_digest({})",
        quote_literal(&name.to_string())
    );
    let mut first: Option<(String, String)> = None;
    for member in members.iter_mut() {
        let digest = member.ask(&call)?.unwrap_or_default();
        match &first {
            None => first = Some((member.name.clone(), digest)),
            Some((node, known)) if *known != digest => {
                return Err(Failure::state(format!(
                    "nodes \"{node}\" and \"{}\" have different rows of table {name}",
                    member.name
                ))
                .detail(format!("One has {known}, the other has {digest}."))
                .hint("If rows were deleted meanwhile, call the function again. Else end the routing with braid.unroute_table, and make the rows the same with braid.compare and braid.repair."));
            }
            Some(_) => {}
        }
    }
    let mut deleted = 0_u64;
    for member in members {
        let count = member.ask(&format!(
            "select braid.group_route_clear({})",
            quote_literal(&name.to_string())
        ))?;
        deleted += count.and_then(|count| count.parse().ok()).unwrap_or(0);
    }
    notice(format!(
        "{deleted} rows of table {name} were deleted on nodes that do not have their shards"
    ));
    Ok(())
}

/// Has the group close a time, unless a later one is closed already.
fn close(time: Time) -> Outcome<()> {
    let closed = routing::known().map(|known| known.closed);
    if closed.is_some_and(|closed| closed >= time) {
        return Ok(());
    }
    let entry = Entry::Close { time };
    match ask(Command::Route(entry)) {
        // Another member has closed a later one just now.
        Err(_) if routing::known().is_some_and(|known| known.closed >= time) => Ok(()),
        asked => asked.map(drop),
    }
}

/// braid.unroute_table(relation regclass, rows text)
#[pg_extern(sql = false)]
fn unroute_table(relation: Option<pg_sys::Oid>, rows: Option<Text>) {
    let caller = current_role();
    run(|| {
        let (_, name) = table_to_change(caller, relation)?;
        let rows = required(text(rows), "rows")?;
        if !["refuse", "keep"].contains(&rows.as_str()) {
            return Err(
                Failure::parameter(format!("invalid value \"{rows}\" for rows")).hint(
                    "Use refuse for a table without rows, keep to leave each row where it is.",
                ),
            );
        }
        let mut members = connect_all(caller)?;
        let table = quote_literal(&name.to_string());
        if rows == "refuse" {
            for member in &mut members {
                let has_rows = member.ask(&format!("select braid.group_route_rows({table})"))?;
                if has_rows.as_deref() == Some("t") {
                    return Err(Failure::state(format!(
                        "table {name} has rows on node \"{}\"",
                        member.name
                    ))
                    .hint("Use rows => 'keep' to leave each row on the node that has it; other nodes do not get it."));
                }
            }
        }
        umbrella::remove(&mut members, &name)?;
        let before = known()?;
        if before.table(&name).is_some_and(RoutedTable::is_open) {
            ask(Command::Route(Entry::Shut {
                table: name.clone(),
            }))?;
        }
        if before.table(&name).is_some() {
            // The rows that were written under the guards must have reached their nodes before
            // these are forgotten.
            wait_all(&mut members, &table, "prepared")?;
            exchange(&mut members)?;
        }
        for member in &mut members {
            member.ask(&format!("select braid.group_route_unguard({table})"))?;
        }
        if before.table(&name).is_some() {
            exchange(&mut members)?;
            turn_off(&name)?;
            ask(Command::Route(Entry::Unroute { table: name }))?;
            wait_all(&mut members, &table, "unrouted")?;
        }
        Ok(())
    });
}

/// braid.add_routing_rule(relation regclass, spread integer, tenants text)
#[pg_extern(sql = false)]
fn add_routing_rule(
    relation: Option<pg_sys::Oid>,
    spread: Option<i32>,
    tenants: Option<Text>,
) -> pgrx::datum::TimestampWithTimeZone {
    let caller = current_role();
    run(|| {
        let (relation, name) = table_to_change(caller, relation)?;
        let spread = Spread::new(number(spread, "spread")?)
            .map_err(|error| Failure::parameter(error.to_string()).hint(error.hint()))?;
        let tenants = required(text(tenants), "tenants")?;
        let known = known()?;
        let table = known.table(&name).ok_or_else(|| not_routed(&name))?;
        let tenants = read_tenants(relation, table, &tenants)?;
        let time = add_rule(&name, &known, spread, &tenants)?;
        pgrx::datum::TimestampWithTimeZone::try_from(time.0)
            .map_err(|_| Failure::state("the rule's time is out of range"))
    })
}

pub(super) fn not_routed(name: &TableName) -> Failure {
    Failure::state(format!("table {name} is not routed"))
        .hint("Route the table with braid.route_table first.")
}

fn read_tenants(relation: pg_sys::Oid, table: &RoutedTable, tenants: &str) -> Outcome<Vec<Tenant>> {
    let keys = Keys::of(relation, table.expressions())?;
    let found = query(
        &format!(
            "select pg_catalog.encode(braid.routing_key(t::{}), 'hex') from pg_catalog.unnest($1::text[]) t where t is not null",
            keys.tenant
        ),
        &[Some(tenants)],
    );
    let read = found.iter().map(|row| {
        let bytes = row
            .first()
            .cloned()
            .flatten()
            .and_then(|digits| hex::decode(&digits));
        Tenant::from_canonical(&bytes.unwrap_or_default())
            .map_err(|error| Failure::parameter(error.to_string()).hint(error.hint()))
    });
    read.collect()
}

/// Adds a rule from the first time on that is not closed. If that is closed meanwhile, from the
/// next one on.
fn add_rule(name: &TableName, known: &Known, spread: Spread, tenants: &[Tenant]) -> Outcome<Time> {
    let is_open = known.table(name).is_some_and(RoutedTable::is_open);
    let mut last = None;
    for _ in 0..ATTEMPTS {
        // A table that takes no rows yet has rules from any time on; this one counts at once.
        let closed = routing::known().map_or(known.closed, |known| known.closed);
        let now = Time(timestamp::now());
        let time = if is_open {
            Time(closed.0.max(now.0)).plus(1)
        } else {
            now
        };
        let entry = Entry::Rule {
            table: name.clone(),
            time,
            spread,
            tenants: tenants.to_vec(),
        };
        match ask(Command::Route(entry)) {
            Ok(_) => return Ok(time),
            Err(failure) => {
                let closed = routing::known().map_or(time, |known| known.closed);
                if closed < time {
                    return Err(failure);
                }
                last = Some(failure);
            }
        }
        latch::wait(Some(Duration::from_millis(20)));
    }
    Err(last.unwrap_or_else(|| {
        Failure::new(
            PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
            "the group has not agreed on the rule in time",
        )
        .hint("Call the function again.")
    }))
}
