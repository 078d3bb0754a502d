//! Versions that a copy brings along: those of rows that were written recently, and of deletions. A
//! change of a third node may arrive after the copy although it is older than the copied row, or
//! included in it.
//!
//! The copy brings versions only as far back as such a change can reach: to the time up to which
//! all other subscriptions of this node have replicated, or were created. With no other
//! subscription it brings none, unless this node has written to the table since its copy began;
//! then it reaches back to that time. Of rows with a merge marker it brings all: the writer of one
//! half may keep writing for as long as markers are kept, without knowing of the other half. Run by
//! the copy worker, in the transaction that fills the table.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use braid_apply::{KEEP_MERGED, copied_hash};
use braid_bgworker::copy_query::{Published, parse_taken_row, parse_version, parse_written};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::lsn_text;
use braid_node::column_write::{self, ColumnWrite};
use braid_node::origin;
use braid_node::subscription::{self, execute_counting, rows};
use braid_node::taken_row::{self, TakenRow};
use braid_node::tombstone::{self, Tombstone};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::PgError;
use braid_postgres::latch;
use braid_postgres::libpq::Connection;
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};

use super::source::Source;
use super::worker::Task;
use crate::purge::{MARGIN_MICROS, arrived};

/// Rows that are written at a time.
const PIECE: usize = 1000;
/// How long the provider may take to collect deletions from before the copy.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);
/// The source of origins for nodes that nothing comes from.
const SOURCE: &str = "braid/copy";

/// How much a copy is to bring along.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    /// The table has no key by which rows are found.
    pub is_keyless: bool,
    /// This node joins a group: streams of other members follow.
    pub joins: bool,
    /// This node may have written rows since the copy began. The provider may know that one of them
    /// is dead.
    pub has_own: bool,
}

/// Brings along the versions of the rows that were just copied, and of deletions. Returns the time
/// to which that reaches back, microseconds since 1970-01-01 UTC; `None`: nothing was asked for.
///
/// # Errors
/// The provider's; 40001 if it has not collected its deletions in time.
pub fn bring_along(
    task: &Task,
    published: &Published,
    source: &mut Source,
    reach: Reach,
) -> Result<Option<i64>, PgError> {
    let own = if reach.has_own {
        began(task)?
    } else if reach.joins {
        join_began()?
    } else {
        None
    };
    let Some(reaches) = since(task.subscription)?.into_iter().chain(own).min() else {
        return Ok(None);
    };
    if !may_ask(source)? {
        return Ok(None);
    }
    let since = reaches.div_euclid(1_000_000);
    let mut nodes = Nodes::new()?;
    let mut newest = timestamp::now().saturating_add(EPOCH_DIFFERENCE);

    source.start_copy(published, &published.versions_command(since))?;
    let versions = |piece: &[Brought]| {
        let versions: Vec<_> = piece.iter().map(|row| (row.row, row.merged)).collect();
        tombstone::store_copied(&versions)
    };
    newest = newest.max(receive(task, source, &mut nodes, versions)?);
    source.finish()?;

    if reach.is_keyless {
        // A removal is identified by the same hash on all nodes, and counts once. So removals are
        // read as of the snapshot of the rows.
        source
            .connection
            .start_copy(&published.deletions_command(since))?;
        let removals = |piece: &[Brought]| {
            let removal = |brought: &Brought| Tombstone {
                hash: brought.hash_there,
                ..brought.row
            };
            tombstone::store(&piece.iter().map(removal).collect::<Vec<_>>())
        };
        newest = newest.max(receive(task, source, &mut nodes, removals)?);
        // These also decide which row a removal gets that arrives later.
        source
            .connection
            .start_copy(&published.taken_rows_command(since))?;
        receive_taken_rows(task, source, &mut nodes)?;
    }

    let tables = source.connection.query(&published.tables_query())?;
    // Deletions that are collected from now on must be visible.
    source.commit()?;
    wait_for_collector(&mut source.connection, source.lsn)?;
    source
        .connection
        .start_copy(&published.deletions_command(since))?;
    let deletions = |piece: &[Brought]| {
        let deletions: Vec<Tombstone> = piece.iter().map(|brought| brought.row).collect();
        tombstone::store(&deletions)
    };
    newest = newest.max(receive(task, source, &mut nodes, deletions)?);

    source
        .connection
        .start_copy(&published.columns_command(since))?;
    newest = newest.max(receive_columns(task, source, &mut nodes)?);

    for table in tables.iter() {
        let Some(table) = table.first().cloned().flatten() else {
            continue;
        };
        execute_counting(
            "insert into braid.copied_table as t (relation, table_id, newest) values ($1::oid, $2::oid, $3) \
             on conflict (relation, table_id) do update set newest = greatest(t.newest, excluded.newest)",
            &[
                i64::from(task.relation).into(),
                table.parse::<i64>().unwrap_or(0).into(),
                newest.into(),
            ],
        )?;
    }
    Ok(Some(reaches))
}

/// Whether others than the provider send changes to this node.
///
/// # Errors
/// Those of PostgreSQL.
pub fn others_write(subscription: u32) -> Result<bool, PgError> {
    Ok(since(subscription)?.is_some())
}

/// Nothing that comes by the streams of other members is older than this (microseconds since
/// 1970-01-01 UTC): their slots were made after this node had begun to join.
fn join_began() -> Result<Option<i64>, PgError> {
    let found = rows(
        "select floor(extract(epoch from min(started_at)) * 1000000)::bigint::text from braid.join_step",
        &[],
    )?;
    let text = found
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?);
    let began: Option<i64> = text.and_then(|text| text.parse().ok());
    Ok(began.map(|began| began.saturating_sub(MARGIN_MICROS)))
}

/// When the local table was empty and its copy began (microseconds since 1970-01-01 UTC).
fn began(task: &Task) -> Result<Option<i64>, PgError> {
    let found = rows(
        "select floor(extract(epoch from copy_began_at) * 1000000)::bigint::text from braid.subscription_table \
         where subscription_id = $1 and relation = $2::oid",
        &[
            i64::from(task.subscription).into(),
            i64::from(task.relation).into(),
        ],
    )?;
    let text = found
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?);
    Ok(text.and_then(|text| text.parse().ok()))
}

/// Nothing that is older than this (microseconds since 1970-01-01 UTC) comes from another node;
/// `None` where nothing does.
fn since(subscription: u32) -> Result<Option<i64>, PgError> {
    let found = rows(
        "select subscription_id::text, floor(extract(epoch from created_at) * 1000000)::bigint::text from braid.subscription \
         where subscription_id <> $1",
        &[i64::from(subscription).into()],
    )?;
    let sources = rows("select 1::text from braid.ingest_source limit 1", &[])?;
    if found.is_empty() && sources.is_empty() {
        return Ok(None);
    }
    let number = |row: &[Option<String>], column: usize| -> Option<i64> {
        row.get(column)?.as_ref()?.parse().ok()
    };
    let others: Vec<u32> = found
        .iter()
        .filter_map(|row| u32::try_from(number(row, 0)?).ok())
        .collect();
    let since = match arrived(&others)? {
        Some(reached) => reached,
        // One of the subscriptions has not reported its position yet.
        None => found
            .iter()
            .filter_map(|row| number(row, 1))
            .min()
            .unwrap_or(0),
    };
    Ok(Some(since.saturating_sub(MARGIN_MICROS)))
}

/// Whether the connecting role may ask for versions. If not, that is said in the log.
fn may_ask(source: &mut Source) -> Result<bool, PgError> {
    let rows = source.connection.query(
        "select current_setting('track_commit_timestamp')::boolean and bool_and(has_function_privilege(oid, 'execute')) and count(*) = 7 \
         from pg_proc where oid in (to_regprocedure('braid.row_version(oid,tid)'), to_regprocedure('braid.has_merged_rows(xid)'), to_regprocedure('braid.commit_timestamp(xid)'), to_regprocedure('braid.deletion_activity()'), \
         to_regprocedure('braid.copied_deletions(oid,timestamptz)'), to_regprocedure('braid.copied_columns(oid,timestamptz)'), to_regprocedure('braid.copied_taken_rows(oid,timestamptz)')) \
         and has_schema_privilege('braid', 'usage')",
    )?;
    let may = rows.get(0, 0) == Some("t");
    if !may {
        PgError::new(
            SqlState::Warning,
            "a copy comes without the versions of its rows: the role that connects to the provider may not ask for them",
        )
        .with_hint("Grant braid_monitor to it there. Until then, a third node's change that was under way during the copy wins here whatever its version.")
        .warn();
    }
    Ok(may)
}

/// Waits until the provider has collected the deletions before a position in its WAL.
///
/// # Errors
/// The provider's; 40001 if it takes too long.
pub fn wait_for_collector(connection: &mut Connection, lsn: u64) -> Result<(), PgError> {
    let lsn = lsn_text(lsn);
    let question = format!(
        "select coalesce(bool_and(not remembered or coalesce(collected_lsn >= '{lsn}', false)), true) from braid.deletion_activity()"
    );
    let deadline = Instant::now() + PATIENCE;
    loop {
        if connection.query(&question)?.get(0, 0) == Some("t") {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "the provider has not yet collected the deletions that were made before the copy",
            )
            .with_hint(
                "Its view braid.deletions says how far it is. The table is copied again by itself.",
            ));
        }
        latch::wait(Some(PAUSE));
    }
}

/// A version that the copy has brought: of a row, or of a deletion.
struct Brought {
    /// Under the local hash that stands for the provider's.
    row: Tombstone,
    hash_there: u64,
    merged: bool,
}

/// Receives the lines of COPY and stores them in chunks. Returns the time up to which they are to
/// be kept.
fn receive(
    task: &Task,
    source: &mut Source,
    nodes: &mut Nodes,
    store: impl Fn(&[Brought]) -> Result<(), PgError>,
) -> Result<i64, PgError> {
    let mut piece = Vec::with_capacity(PIECE);
    let mut newest = 0;
    while let Some(message) = source.connection.copy_data()? {
        for line in message.split(|byte| *byte == b'\n') {
            if line.is_empty() {
                continue;
            }
            let version = parse_version(line).ok_or_else(|| {
                PgError::new(
                    SqlState::ProtocolViolation,
                    "unexpected version from the provider",
                )
            })?;
            newest = newest.max(if version.merged {
                version.timestamp.saturating_add(KEEP_MERGED)
            } else {
                version.timestamp
            });
            let row = Tombstone {
                hash: copied_hash(task.relation, version.hash),
                relation: task.relation,
                timestamp: version.timestamp,
                origin: nodes.origin(&version.node)?,
            };
            piece.push(Brought {
                row,
                hash_there: version.hash,
                merged: version.merged,
            });
        }
        if piece.len() >= PIECE {
            store(&piece)?;
            piece.clear();
            pgrx::check_for_interrupts!();
        }
    }
    store(&piece)?;
    Ok(newest)
}

/// Receives the rows that were removed from a keyless table, and stores them.
fn receive_taken_rows(task: &Task, source: &mut Source, nodes: &mut Nodes) -> Result<(), PgError> {
    let mut piece = Vec::with_capacity(PIECE);
    while let Some(message) = source.connection.copy_data()? {
        for line in message.split(|byte| *byte == b'\n') {
            if line.is_empty() {
                continue;
            }
            let taken = parse_taken_row(line).ok_or_else(|| {
                PgError::new(
                    SqlState::ProtocolViolation,
                    "unexpected deleted row from the provider",
                )
            })?;
            let row = match taken.written {
                Some((at, node)) => Some((at, nodes.origin(&node)?)),
                None => None,
            };
            piece.push(TakenRow {
                hash: taken.hash,
                relation: task.relation,
                row,
                removal: (taken.removed.0, nodes.origin(&taken.removed.1)?),
            });
        }
        if piece.len() >= PIECE {
            taken_row::store(&piece)?;
            piece.clear();
            pgrx::check_for_interrupts!();
        }
    }
    taken_row::store(&piece)
}

/// Receives which node wrote which columns, and stores it. Columns that do not exist locally are
/// ignored.
fn receive_columns(task: &Task, source: &mut Source, nodes: &mut Nodes) -> Result<i64, PgError> {
    let numbers: HashMap<String, i16> = rows(
        "select encode(convert_to(attname::text, 'UTF8'), 'hex'), attnum::text from pg_attribute where attrelid = $1::oid and attnum > 0 and not attisdropped",
        &[i64::from(task.relation).into()],
    )?
    .into_iter()
    .filter_map(|row| {
        let [name, number] = <[_; 2]>::try_from(row).ok()?;
        Some((name?, number?.parse().ok()?))
    })
    .collect();
    let mut piece = Vec::with_capacity(PIECE);
    let mut newest = 0;
    while let Some(message) = source.connection.copy_data()? {
        for line in message.split(|byte| *byte == b'\n') {
            if line.is_empty() {
                continue;
            }
            let written = parse_written(line).ok_or_else(|| {
                PgError::new(
                    SqlState::ProtocolViolation,
                    "unexpected version from the provider",
                )
            })?;
            newest = newest.max(written.timestamp);
            let columns: Option<Vec<i16>> = written.columns.map(|names| {
                let numbers = names.iter().filter_map(|name| numbers.get(name));
                numbers.copied().collect()
            });
            piece.push(ColumnWrite {
                hash: copied_hash(task.relation, written.hash),
                relation: task.relation,
                timestamp: written.timestamp,
                origin: nodes.origin(&written.node)?,
                columns,
            });
        }
        if piece.len() >= PIECE {
            column_write::store(&piece)?;
            piece.clear();
            pgrx::check_for_interrupts!();
        }
    }
    column_write::store(&piece)?;
    Ok(newest)
}

/// Origins that stand for nodes.
struct Nodes {
    known: HashMap<String, ReplOriginId>,
}

impl Nodes {
    fn new() -> Result<Self, PgError> {
        let mut known = HashMap::new();
        if let Some(local) = subscription::local_node()? {
            known.insert(local, 0);
        }
        Ok(Self { known })
    }

    fn origin(&mut self, node: &str) -> Result<ReplOriginId, PgError> {
        if let Some(origin) = self.known.get(node) {
            return Ok(*origin);
        }
        let found = rows(
            "select origin_id::text from braid.origin where node_name = $1::name order by number limit 1",
            &[node.into()],
        )?;
        let found = found
            .first()
            .and_then(|row| row.first()?.as_ref()?.parse().ok());
        let origin = match found {
            Some(origin) => origin,
            None => origin::ensure_for_source(SOURCE, node)?.0,
        };
        self.known.insert(node.to_owned(), origin);
        Ok(origin)
    }
}
