//! The locked copy: copies a table that others than the provider write to as well, if versions
//! can't tell which changes it has. That concerns keyless tables, tables with column rules, and
//! tables whose conflicts a function resolves.
//!
//! For each transaction of each node it must be known whether the copy has it. Positions answer
//! that at a moment when neither this node nor the provider writes to the table. So the table is
//! locked on this node from the start until the copy is committed. At the provider it is locked
//! only while positions are read and a snapshot is exported:
//!
//! | step | this node | provider |
//! |---|---|---|
//! | 1 | writers wait | |
//! | 2 | reads each node's applied position | has to reach these positions, and this node's |
//! | 3 | | writers wait; positions are read, a snapshot is exported; writers go on |
//! | 4 | rows of those nodes are replaced by the copy; positions are stored | |
//!
//! So the local table equals the provider's as of those positions. An applier of another node's
//! changes waits for the lock. Then it leaves out the changes before that node's position (`Route`
//! in `apply`).

use std::collections::HashSet;
use std::time::{Duration, Instant};

use braid_apply::meanwhile;
use braid_bgworker::copy_query::Published;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::parse_lsn;
use braid_node::registry;
use braid_node::subscription::{Subscription, execute_counting, rows};
use braid_node::tombstone::waiting;
use braid_postgres::error::PgError;
use braid_postgres::latch;
use braid_postgres::libpq::{Connection, Mode};

use super::blocked;
use super::load::Target;
use super::source::Source;
use super::versions;
use super::worker::Task;

/// How long the provider may take to apply what this node has applied.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);
/// Writers at the provider wait behind this lock, so it is not waited for longer.
const LOCK_TIMEOUT: &str = "2s";

/// How far the transactions of a node are applied at another one, to a table.
#[derive(Debug, Clone)]
struct Applied {
    node_id: String,
    node: String,
    position: String,
    beyond: String,
    missing: String,
    forwards: String,
    is_ready: bool,
    in_pieces: bool,
    is_stopped: bool,
    last: String,
}

const POSITIONS: &str = "select node_id::text, node::text, \"position\"::text, array_to_string(beyond, ','), array_to_string(missing, ','), \
     forwards::text, is_ready::text, in_pieces::text, is_stopped::text, last_lsn::text from braid.applied_positions(";

fn positions_of(table: u32) -> String {
    format!("{POSITIONS}{table}) order by 1")
}

impl Applied {
    fn parse(row: &[Option<String>]) -> Option<Self> {
        let [
            node_id,
            node,
            position,
            beyond,
            missing,
            forwards,
            is_ready,
            in_pieces,
            is_stopped,
            last,
        ] = <&[_; 10]>::try_from(row).ok()?;
        let is = |value: &Option<String>| value.as_deref() == Some("true");
        Some(Self {
            node_id: node_id.clone()?,
            node: node.clone()?,
            position: position.clone()?,
            beyond: beyond.clone()?,
            missing: missing.clone()?,
            forwards: forwards.clone()?,
            is_ready: is(is_ready),
            in_pieces: is(in_pieces),
            is_stopped: is(is_stopped),
            last: last.clone()?,
        })
    }

    /// Where the last of them ends that has written anything.
    fn last(&self) -> u64 {
        let beyond = self.beyond.split(',').filter_map(parse_lsn);
        beyond.chain(parse_lsn(&self.last)).max().unwrap_or(0)
    }
}

/// How much of the other nodes' changes a copy has.
#[derive(Debug)]
pub struct Contents {
    /// Of the nodes but this one.
    there: Vec<Applied>,
    /// The provider has applied this node's own changes.
    has_mine: bool,
}

/// Returns this node's id.
fn my_id() -> Result<String, PgError> {
    let found = rows("select node_id::text from braid.node where is_local", &[])?;
    Ok(found
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next().flatten())
        .unwrap_or_default())
}

/// Whether the connecting role may ask the provider for positions, and hold its tables.
///
/// # Errors
/// The provider's.
pub fn may_ask(connection: &mut Connection) -> Result<bool, PgError> {
    let rows = connection.query(
        "select count(*) = 2 and bool_and(has_function_privilege(oid, 'execute')) and has_schema_privilege('braid', 'usage') \
         and has_table_privilege(to_regclass('braid.column_rules'), 'select') and has_table_privilege(to_regclass('braid.conflict_resolutions'), 'select') \
         from pg_proc where oid in (to_regprocedure('braid.hold_table(oid)'), to_regprocedure('braid.applied_positions(oid)'))",
    )?;
    Ok(rows.get(0, 0) == Some("t"))
}

/// Whether a local table has rules by which changes of a row are merged.
///
/// # Errors
/// Those of PostgreSQL.
pub fn has_rules(table: u32) -> Result<bool, PgError> {
    let found = rows(
        "with tables as (select $1::oid as oid union select relid from pg_partition_tree($1::oid) union select relid from pg_partition_ancestors($1::oid)) \
         select 1::text from braid.column_rule r join tables on tables.oid = r.relation::oid where r.rule is not null \
         union all select 1::text from braid.conflict_rule r left join tables on tables.oid = r.relation::oid \
         where r.resolution = 'function' and (r.relation is null or tables.oid is not null) limit 1",
        &[i64::from(table).into()],
    )?;
    Ok(!found.is_empty())
}

/// Whether the provider's table has such rules. They may not be set on this node yet.
///
/// # Errors
/// The provider's.
pub fn has_rules_there(connection: &mut Connection, table: u32) -> Result<bool, PgError> {
    let found = connection.query(&format!(
        "select 1 from braid.column_rules where relation = {table} \
         union all select 1 from braid.conflict_resolutions where resolution = 'function' and (relation is null or relation = {table}) limit 1"
    ))?;
    Ok(!found.is_empty())
}

/// Warns of the consequences if the role may not ask.
pub fn warn() {
    PgError::new(
        SqlState::Warning,
        "changes that come with a copy may count a second time: the role that connects to the provider may not ask how far other nodes' changes are in it",
    )
    .with_hint("Grant braid_monitor to it there.")
    .warn();
}

/// Waits until the provider has applied what this node has: changes of this node's own, and of each
/// other node that both receive from. If the current transaction has locked the local table against
/// writers, those are all its changes, else almost all. `there` is its OID at the provider. Returns
/// a connection to it.
///
/// # Errors
/// The provider's; 40001 if it takes too long.
pub fn await_provider(
    task: &Task,
    subscription: &Subscription,
    there: u32,
    patience: Duration,
) -> Result<Connection, PgError> {
    let application_name = format!("{} copy", subscription.name);
    let mut connection = Connection::open(&subscription.dsn, &application_name, Mode::Sql)?;
    connection.look_into_silence(&subscription.dsn)?;
    blocked::watch(&mut connection, subscription)?;
    connection.lift_transaction_timeout()?;
    connection.query("set statement_timeout = 0; set idle_in_transaction_session_timeout = 0; set search_path = pg_catalog")?;
    let here = applied_here(task)?;
    let me = my_id()?;
    let mine = rows(
        "select pg_logical_emit_message(false, 'braid.sync_event', '')::text",
        &[],
    )?;
    let mine = mine
        .first()
        .and_then(|row| parse_lsn(row.first()?.as_deref()?))
        .unwrap_or(0);
    braid_postgres::catalog::flush_wal(mine);

    let deadline = Instant::now() + patience;
    let mut look_at = Some(Instant::now() + blocked::FIRST_LOOK);
    while let Some(late) = late(&mut connection, there, &here, (&me, mine))? {
        if late.is_stopped || Instant::now() > deadline {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                format!(
                    "the provider has not yet applied all changes of node \"{}\" that this node has",
                    late.node
                ),
            )
            .with_hint("Its view braid.subscription_status says how far it is, and why. The table is copied again by itself."));
        }
        if look_at.is_some_and(|at| Instant::now() > at) {
            blocked::look(&mut connection, subscription)?;
            look_at = None;
        }
        latch::wait(Some(PAUSE));
    }
    Ok(connection)
}

/// Copies the table as it is at a moment when no session writes to it. The current transaction has
/// locked the local table against writers. `published` is of the same table, read earlier.
///
/// # Errors
/// The provider's; 40001 if it has not applied yet what this node has, or is copying or splitting.
pub fn take(
    task: &Task,
    subscription: &Subscription,
    published: &Published,
) -> Result<(Contents, Source), PgError> {
    let mut there = await_provider(task, subscription, published.oid, PATIENCE)?;
    there.query("begin isolation level read committed")?;
    there.query(&format!("set local lock_timeout = '{LOCK_TIMEOUT}'"))?;
    there
        .query(&format!("select braid.hold_table({})", published.oid))
        .map_err(|error| {
            let error = PgError::from(error);
            if error.sqlstate != SqlState::LockNotAvailable {
                return error;
            }
            PgError::new(SqlState::SerializationFailure, "the table is written to at the provider by a transaction that does not end")
                .with_hint("A transaction that is prepared there counts, too. The table is copied again by itself.")
        })?;
    // Rows that the provider's sessions have deleted must be visible under the snapshot.
    let found = there.query("select pg_current_wal_insert_lsn()")?;
    let lsn = found.get(0, 0).and_then(parse_lsn).unwrap_or(0);
    versions::wait_for_collector(&mut there, lsn)?;
    // From now on the result is as of the lock.
    let found = there.query("select pg_export_snapshot(), pg_current_wal_insert_lsn()")?;
    let lsn = found.get(0, 1).and_then(parse_lsn);
    let (Some(snapshot), Some(lsn)) = (found.get(0, 0), lsn) else {
        return Err(PgError::new(
            SqlState::ProtocolViolation,
            "unexpected answer from the provider",
        ));
    };
    let mut positions = applied_there(&mut there, published.oid)?;
    // A transaction that is parked without the table is before the position, so parked ones are
    // read after the positions.
    let later = applied_there(&mut there, published.oid)?;
    for node in &mut positions {
        if let Some(same) = later.iter().find(|same| same.node_id == node.node_id) {
            node.missing.clone_from(&same.missing);
        }
    }
    let source = Source::open(subscription, snapshot, lsn)?;
    there.query("rollback")?;
    for node in &positions {
        if !node.is_ready || node.in_pieces {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                format!(
                    "the provider has applied only a part of what node \"{}\" has written to the table",
                    node.node
                ),
            )
            .with_detail(if node.is_ready {
                "A transaction is being committed in chunks."
            } else {
                "The table is being copied there."
            })
            .with_hint("The table is copied again by itself."));
        }
    }
    let me = my_id()?;
    let (mine, there): (Vec<_>, Vec<_>) =
        positions.into_iter().partition(|node| node.node_id == me);
    let contents = Contents {
        there,
        has_mine: !mine.is_empty(),
    };
    Ok((contents, source))
}

/// How far other nodes' transactions are applied on this node.
fn applied_here(task: &Task) -> Result<Vec<Applied>, PgError> {
    let found = rows(
        &format!(
            "{POSITIONS}$1::oid) where node_id <> (select provider_id from braid.subscription where subscription_id = $2)"
        ),
        &[
            i64::from(task.relation).into(),
            i64::from(task.subscription).into(),
        ],
    )?;
    let here: Vec<Applied> = found.iter().filter_map(|row| Applied::parse(row)).collect();
    match here.iter().find(|node| node.in_pieces) {
        Some(node) => Err(PgError::new(
            SqlState::SerializationFailure,
            format!(
                "a transaction of node \"{}\" is being committed in chunks",
                node.node
            ),
        )
        .with_hint("The table is copied again by itself.")),
        None => Ok(here),
    }
}

fn applied_there(connection: &mut Connection, table: u32) -> Result<Vec<Applied>, PgError> {
    let rows = connection.query(&positions_of(table))?;
    Ok(rows.iter().filter_map(Applied::parse).collect())
}

/// A node of which this node has changes that the provider should have, and does not have yet.
fn late(
    connection: &mut Connection,
    table: u32,
    here: &[Applied],
    (me, mine): (&str, u64),
) -> Result<Option<Applied>, PgError> {
    let there = applied_there(connection, table)?;
    Ok(there.into_iter().find(|node| {
        let wanted = if node.node_id == me {
            mine
        } else {
            let same = here.iter().find(|same| same.node_id == node.node_id);
            same.map_or(0, Applied::last)
        };
        parse_lsn(&node.position).unwrap_or(0) < wanted
    }))
}

impl Contents {
    /// Removes the rows that the copy replaces, or whose deletion it includes. With `all`, all
    /// rows.
    ///
    /// # Errors
    /// Those of PostgreSQL; 40001 if the provider does not have this node's changes.
    pub fn make_room(&self, target: &Target, all: bool) -> Result<(), PgError> {
        if all && !self.has_mine {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "the provider does not subscribe to this node's table yet",
            )
            .with_hint("The table is copied by itself once it does."));
        }
        let ids: Vec<&str> = self.there.iter().map(|node| &*node.node_id).collect();
        let found = rows(
            "select o.origin_id::text from braid.origin o join braid.subscription s using (subscription_id) \
             where s.provider_id = any ($1::uuid[])",
            &[format!("{{{}}}", ids.join(",")).into()],
        )?;
        let origins = found.iter().flatten().flatten();
        let origins: HashSet<_> = origins.filter_map(|origin| origin.parse().ok()).collect();
        for leaf in target.leaves()? {
            meanwhile::remove_from(leaf, (!self.has_mine).then_some(&origins))?;
        }
        // The provider's records of deleted rows come with the copy. If the provider has this
        // node's changes, this includes this node's own deletions, so the local collector must not
        // add them later. If nothing is collected, there is nothing to wait for.
        let collects = !all || registry::remembers_deletions();
        if self.has_mine && collects && !waiting::wait_past(braid_postgres::catalog::flush_all()) {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "the rows that sessions of this node have deleted from the table are not known yet",
            )
            .with_hint("The view braid.deletions says how far the collector of deletions is. The table is copied again by itself."));
        }
        execute_counting(
            "delete from braid.taken_row where ($2 or removed_by <> 0 and written_by <> 0) \
             and relation = any (array(select $1::oid union select relid from pg_partition_tree($1::oid)))",
            &[i64::from(target.oid()).into(), self.has_mine.into()],
        )?;
        execute_counting(
            "delete from braid.tombstone where ($2 or origin_id <> 0) \
             and relation = any (array(select $1::oid union select relid from pg_partition_tree($1::oid)))",
            &[i64::from(target.oid()).into(), self.has_mine.into()],
        )?;
        Ok(())
    }

    /// Remember how much of other nodes the table has, in the transaction that fills it.
    ///
    /// # Errors
    /// Those of PostgreSQL.
    pub fn remember(&self, task: &Task) -> Result<(), PgError> {
        // Two subscriptions of the provider's may bring the table's changes from one node: a
        // position that both have reached is certain.
        for node in &self.there {
            execute_counting(
                "insert into braid.copied_position (relation, node_id, \"position\", beyond, missing, forwards) \
                 values ($1::oid, $2::uuid, $3::pg_lsn, string_to_array($4, ',')::pg_lsn[], string_to_array($5, ',')::pg_lsn[], $6::boolean) \
                 on conflict (relation, node_id) do update set \"position\" = least(copied_position.\"position\", excluded.\"position\")",
                &[
                    i64::from(task.relation).into(),
                    node.node_id.as_str().into(),
                    node.position.as_str().into(),
                    node.beyond.as_str().into(),
                    node.missing.as_str().into(),
                    node.forwards.as_str().into(),
                ],
            )?;
        }
        Ok(())
    }
}
