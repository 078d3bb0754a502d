//! Leaves out partitions of an umbrella that a query does not need. Run by every session of a
//! server that has the library preloaded, while it plans or starts a query.
//!
//! An umbrella is the partitioned table `everywhere.orders`, which has a partition for each set of
//! nodes. Without this module each query of it asks all sets. Then it misses nothing, but while a
//! shard moves it gets rows of the shard twice.
//!
//! - If a query names the tenant by a constant, partitions that can't have rows of the tenant are
//!   left out when it is planned; if by a parameter or by another table, when it runs.
//! - A set without shards is never asked.
//! - A shard that moves is on two sets, and one of them answers for it. From the first move on, a
//!   query of several sets checks of each row which set answers for it, by what this node knows.
//!
//! - `INSERT .. ON CONFLICT (columns)` needs the unique index of the plain table. So it is made a
//!   statement about that one, which refuses rows of other nodes.
//!
//! A plan is right as long as the rules that the group has agreed by then count (`begins`).
//!
//! Not for: how umbrellas are made.

use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::conflict_target;
use braid_postgres::error::PgError;
use braid_postgres::partition_planning::{self, Asked, Decision, Note, Tenant, Watch};
use braid_postgres::{latch, plain as postgres, syscache, timestamp};
use braid_routing::{ReadBound, RoutedTable, SetId, ShardMap, TableName, TenantHash, Time};

use pgrx::pg_sys;

use crate::routing::{self, Known};
use crate::routing_guard;
use crate::routing_key::with_key;
use crate::subscription::rows;

/// How long a read waits for the group, before it asks all nodes.
const READ_PATIENCE: Duration = Duration::from_millis(500);
/// The schema of umbrellas.
const SCHEMA: &str = "everywhere";
/// The time in the note of a plan to which no rule matters.
const NO_TIME: u32 = 0;

static WATCH: Watch = Watch {
    schema: c"braid",
    key: c"place",
    answers: c"answering_set",
    candidate: c"candidate_set",
    candidate_of_any: c"candidate_set_of_any",
    decide,
    begins,
};

static TARGETS: conflict_target::Watch = conflict_target::Watch { plain, differs };

/// Starts to watch queries. Called once, while the postmaster loads its libraries.
pub(crate) fn install() {
    partition_planning::install(&WATCH);
    conflict_target::install(&TARGETS);
}

/// The routed table that is a partition of an umbrella. `None` if the table is no umbrella.
fn plain(umbrella: pg_sys::Oid) -> Result<Option<pg_sys::Oid>, PgError> {
    let (schema, name) = syscache::relation_name(umbrella);
    if schema != SCHEMA {
        return Ok(None);
    }
    let partitions = conflict_target::partitions(umbrella);
    let is_umbrella = partitions.iter().any(|partition| {
        syscache::relation_name(*partition)
            .1
            .starts_with(&format!("{name}@"))
    });
    let found = partitions
        .into_iter()
        .find(|partition| routing_guard::is_routed(*partition));
    match found {
        Some(plain) => Ok(Some(plain)),
        None if is_umbrella => Err(PgError::new(
            SqlState::FeatureNotSupported,
            format!(
                "ON CONFLICT with columns is not supported for table {SCHEMA}.{name} at this node"
            ),
        )
        .with_detail("This node has no rows of the table: all of them are at other nodes.")
        .with_hint(
            "Write the row at its own node. The function braid.route says which one that is.",
        )),
        None => Ok(None),
    }
}

/// The routed table that is a partition of an umbrella at this node, if the table is one and the
/// node has its own set.
#[must_use]
pub fn plain_of(umbrella: pg_sys::Oid) -> Option<pg_sys::Oid> {
    let partitioned = pg_sys::RELKIND_PARTITIONED_TABLE;
    (syscache::relation_kind(umbrella) == partitioned)
        .then(|| plain(umbrella).ok().flatten())
        .flatten()
}

fn differs(umbrella: pg_sys::Oid) -> PgError {
    let (schema, name) = syscache::relation_name(umbrella);
    PgError::new(
        SqlState::FeatureNotSupported,
        format!("ON CONFLICT with columns is not supported for table {schema}.{name}"),
    )
    .with_detail("A column was dropped before the table was made, so its columns have other numbers than those of the routed table.")
    .with_hint("Name the routed table itself, which takes the rows of this node.")
}

/// The agreed routing, for a query that relies on it to leave nodes out. Waits a moment for the
/// group if a read would have to ask all nodes: after a pause. Not if somebody has just waited in
/// vain, as on a node that is cut off.
#[must_use]
pub fn known_for_read(name: &TableName, upto: Option<Time>) -> Option<Known> {
    let must_ask_all = |known: &Known| {
        known
            .table(name)
            .is_some_and(|table| known.read_bound(table, upto) == ReadBound::Everywhere)
    };
    let mut now = routing::known()?;
    let is_pause = !routing::is_in_use();
    if must_ask_all(&now) {
        routing::note_use();
        let since = Instant::now();
        while is_pause && since.elapsed() < READ_PATIENCE && must_ask_all(&now) {
            latch::wait(Some(Duration::from_millis(5)));
            now = routing::known()?;
        }
    }
    Some(now)
}

/// The sets that answer for some shard.
fn all_sets(map: &ShardMap) -> Vec<SetId> {
    let mut sets: Vec<SetId> = map
        .shards()
        .all()
        .filter_map(|shard| map.route(shard).map(|route| route.set))
        .collect();
    sets.sort_unstable();
    sets.dedup();
    sets
}

/// Whether rows may be on a set that does not answer for them: a shard moves, or has moved, and its
/// old rows may not be gone yet.
fn has_moved(map: &ShardMap) -> bool {
    let sets = map.sets();
    let is_first = |count: usize| {
        let mut shards = map.shards().all().zip(sets.iter().take(count).cycle());
        shards.all(|(shard, set)| map.source(shard) == Some(set.id))
    };
    map.has_moves() || !(1..=sets.len()).any(is_first)
}

fn tenant_hash(tenant: &Tenant) -> Result<TenantHash, PgError> {
    with_key(tenant.datum, tenant.of, tenant.collation, TenantHash::of)
}

/// The sets that can have rows of these tenants.
fn sets_of(known: &Known, table: &RoutedTable, tenants: &[TenantHash]) -> Vec<SetId> {
    let bound = known.read_bound(table, None);
    let map = table.map();
    let routes = tenants
        .iter()
        .flat_map(|tenant| map.route_query(table.candidates(*tenant, bound)));
    let mut sets: Vec<SetId> = routes.map(|route| route.set).collect();
    sets.sort_unstable();
    sets.dedup();
    sets
}

fn decide(asked: &Asked<'_>) -> Result<Decision, PgError> {
    let nothing = Decision {
        is_left_out: false,
        is_checked: false,
        note: None,
    };
    let Ok(name) = TableName::new(asked.table) else {
        return Ok(nothing);
    };
    let known = match asked.tenants {
        Some(_) => known_for_read(&name, None),
        None => routing::known(),
    };
    let Some(known) = known else {
        return Ok(nothing);
    };
    let Some(table) = known.table(&name) else {
        return Ok(nothing);
    };
    let map = table.map();
    let mut time = NO_TIME;
    let sets = match &asked.tenants {
        None => all_sets(map),
        Some(tenants) => {
            if known.read_bound(table, None) != ReadBound::Everywhere {
                time = milliseconds(known.closed);
            }
            let hashes: Result<Vec<_>, _> = tenants.iter().map(tenant_hash).collect();
            sets_of(&known, table, &hashes?)
        }
    };
    let is_asked = u32::try_from(asked.partition).is_ok_and(|set| sets.contains(&SetId(set)));
    Ok(Decision {
        is_left_out: !is_asked,
        is_checked: is_asked && sets.len() > 1 && has_moved(map),
        note: Some(Note {
            version: version(&known),
            time,
        }),
    })
}

/// A number that changes with the agreed rules.
fn version(known: &Known) -> u32 {
    u32::try_from(known.version % u64::from(u32::MAX)).unwrap_or(0)
}

/// A time as a number that grows for 49 days, and then begins anew.
fn milliseconds(time: Time) -> u32 {
    let time = time.0.div_euclid(1_000).rem_euclid(i64::from(u32::MAX));
    u32::try_from(time).unwrap_or(0).max(1)
}

/// Whether a time of a note has not come yet.
fn is_ahead(time: u32) -> bool {
    let now = milliseconds(Time(timestamp::now()));
    let ahead = time.wrapping_sub(now);
    ahead != 0 && ahead < 60_000
}

/// A plan starts. It may have been made long ago, as that of a prepared statement.
///
/// All rows that were created up to the closed time are where the plan asks for them. So the plan
/// is right until then, whatever was agreed meanwhile. Later it is right if nothing new was agreed
/// up to now, which this node knows if the group has closed the present time.
fn begins(note: Note) -> Result<(), PgError> {
    if is_ahead(note.time) {
        return Ok(());
    }
    let is_same = || {
        let known = routing::known()?;
        let is_closed = note.time == NO_TIME || known.closed.0 >= timestamp::now();
        (version(&known) == note.version).then_some(is_closed)
    };
    let is_pause = !routing::is_in_use();
    let since = Instant::now();
    loop {
        match is_same() {
            Some(true) => {
                routing::note_use();
                return Ok(());
            }
            Some(false) if is_pause && since.elapsed() < READ_PATIENCE => {
                routing::note_use();
                latch::wait(Some(Duration::from_millis(5)));
            }
            _ => break,
        }
    }
    routing::note_use();
    partition_planning::forget_plans();
    Err(PgError::new(
        SqlState::SerializationFailure,
        "the nodes to ask have changed since the statement was planned",
    )
    .with_hint("Try again. The statement is planned anew."))
}

/// Has all sessions plan queries of umbrellas anew. In a transaction, at whose end they know it.
///
/// # Errors
/// PostgreSQL's own, as if an umbrella is dropped meanwhile.
pub fn plan_anew() -> Result<(), PgError> {
    let found = rows(
        "select c.oid::text from pg_catalog.pg_class c where c.relkind = 'p' \
            and c.relnamespace = pg_catalog.to_regnamespace('everywhere')",
        &[],
    )?;
    let tables = found.iter().filter_map(|row| row.first()?.as_ref());
    for table in tables.filter_map(|oid| oid.parse::<u32>().ok()) {
        postgres::CacheInvalidateRelcacheByRelid(table.into());
    }
    Ok(())
}

/// The set that answers for a row, as far as this node knows.
///
/// # Errors
/// 55000 if the table is not routed.
pub fn answering_set(name: &TableName, row: &routing::RowKeys) -> Result<Option<SetId>, PgError> {
    let known = routing::known();
    let table = known.as_ref().and_then(|known| known.table(name));
    let table = table.ok_or_else(|| routing::not_routed(name))?;
    let route = table.map().route(routing::shard_of(table, row));
    Ok(route.map(|route| route.set))
}

/// Whether a set can have rows of one of these tenants.
#[must_use]
pub fn is_candidate(name: &TableName, set: SetId, tenants: &[TenantHash]) -> bool {
    let Some(known) = known_for_read(name, None) else {
        return true;
    };
    let table = known.table(name);
    table.is_none_or(|table| sets_of(&known, table, tenants).contains(&set))
}
