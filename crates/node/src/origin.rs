//! Replication origins: under which a subscription's commits are stamped, and how far it has come.
//!
//! One origin for each pair of node and applier, named `braid/<node>/<database OID><four digits>`,
//! because a process can only advance an origin that no other process holds, and because all
//! databases of a server share one list of origins. Commits are in the provider's order, and so are
//! their WAL records: the largest position of a subscription's origins is where it stands, also
//! after a crash (I1).

use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, Ordering};

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::error::{self, PgError};
use braid_postgres::lock::LockMode;
use braid_postgres::transaction::{self, End};
use braid_postgres::{compat, plain, process, session_origin};
use pgrx::pg_sys;

use crate::subscription::{execute, rows, rows_written};

/// An origin's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginId(pub ReplOriginId);

/// Origin of rows that the initial copy wrote (src/include/replication/origin.h: DoNotReplicateId).
pub const COPIED: ReplOriginId = 0xFFFF;

fn parse(rows: Vec<Vec<Option<String>>>) -> Vec<OriginId> {
    rows.into_iter()
        .filter_map(|row| row.into_iter().next().flatten()?.parse().ok().map(OriginId))
        .collect()
}

/// Gives a subscription an origin for `node` at each place below `count` that has none: one that a
/// dropped subscription left, or a new one. The process with that number uses it, and a place keeps
/// its origin for as long as the subscription lives. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn ensure(subscription_id: u32, node: &str, count: usize) -> Result<(), PgError> {
    // One at a time: two leaders that start at once must not take the same.
    execute("lock table braid.origin in share row exclusive mode", &[])?;
    for place in 0..count {
        if at_place(subscription_id, node, place)?.is_some() {
            continue;
        }
        let id = i64::from(subscription_id);
        let place = i64::try_from(place).unwrap_or(i64::MAX);
        let left = rows(
            "update braid.origin set subscription_id = $1, place = $3::integer where origin_id = (select origin_id from braid.origin \
             where subscription_id is null and source_name is null and node_name = $2::name and braid.is_own_origin(origin_id, node_name, number) \
             order by number limit 1) returning origin_id::text",
            &[id.into(), node.into(), place.into()],
        )
        .map(parse)?;
        match left.first() {
            // The position of another subscription says nothing about this one.
            Some(origin) => advance(*origin, 0),
            None => create(Owner::Subscription(id, place), node)?,
        }
    }
    Ok(())
}

/// The origin that the process with this number has for `node`. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn at_place(
    subscription_id: u32,
    node: &str,
    place: usize,
) -> Result<Option<OriginId>, PgError> {
    rows(
        "select origin_id::text from braid.origin where subscription_id = $1 and node_name = $2::name and place = $3::integer",
        &[
            i64::from(subscription_id).into(),
            node.into(),
            i64::try_from(place).unwrap_or(i64::MAX).into(),
        ],
    )
    .map(|rows| parse(rows).first().copied())
}

/// The origins that a subscription's commits of `node`'s transactions may have. In a transaction of
/// the caller's.
///
/// # Errors
/// Those of SPI.
pub fn all_of(subscription_id: u32, node: &str) -> Result<Vec<OriginId>, PgError> {
    rows(
        "select origin_id::text from braid.origin where subscription_id = $1 and node_name = $2::name order by place",
        &[i64::from(subscription_id).into(), node.into()],
    )
    .map(parse)
}

/// Whether a subscription may use one more origin for `node` than the `count` that it has: some
/// must be left for subscriptions that have none. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn has_room(subscription_id: u32, node: &str, count: usize) -> Result<bool, PgError> {
    if all_of(subscription_id, node)?.len() > count {
        return Ok(true);
    }
    // Which setting it is depends on the version. Places that are planned for and not in use count
    // too.
    let found = rows(
        "select 1 from pg_catalog.pg_settings s where s.name in ('max_active_replication_origins', 'max_replication_slots') \
         having (array_agg(s.setting::bigint order by s.name))[1] \
                >= $1 + (select count(*) from pg_catalog.pg_show_replication_origin_status())",
        &[SPARE_ORIGINS.into()],
    )?;
    Ok(!found.is_empty())
}

/// Of the server's places for origins so many stay free before one is taken that can be done
/// without; with that one.
const SPARE_ORIGINS: i64 = 3;

/// The owner of an origin.
#[derive(Debug, Clone, Copy)]
enum Owner<'a> {
    /// A subscription, and the process of it that uses the origin.
    Subscription(i64, i64),
    Source(&'a str),
}

/// The origin for changes from `source` that were first committed at `node`; created if it is
/// missing. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn ensure_for_source(source: &str, node: &str) -> Result<OriginId, PgError> {
    let find = || {
        rows(
            "select origin_id::text from braid.origin where source_name = $1::name and node_name = $2::name",
            &[source.into(), node.into()],
        )
        .map(parse)
    };
    if let Some(origin) = find()?.first() {
        return Ok(*origin);
    }
    execute("lock table braid.origin in share row exclusive mode", &[])?;
    // Somebody may have made it while this transaction waited for the lock.
    if let Some(origin) = find()?.first() {
        return Ok(*origin);
    }
    let left = rows_written(
        "update braid.origin set source_name = $1::name where origin_id = (select origin_id from braid.origin \
         where subscription_id is null and source_name is null and node_name = $2::name and braid.is_own_origin(origin_id, node_name, number) \
         order by number limit 1) returning origin_id::text",
        &[source.into(), node.into()],
    )
    .map(parse)?;
    match left.first() {
        Some(origin) => advance(*origin, 0),
        None => create(Owner::Source(source), node)?,
    }
    find()?
        .first()
        .copied()
        .ok_or_else(|| PgError::new(SqlState::InternalError, "no replication origin"))
}

fn create(owner: Owner<'_>, node: &str) -> Result<(), PgError> {
    let number = rows(
        "select (coalesce(max(number), -1) + 1)::text from braid.origin where node_name = $1::name",
        &[node.into()],
    )?
    .into_iter()
    .next()
    .and_then(|row| row.into_iter().next().flatten())
    .unwrap_or_else(|| "0".to_owned());
    let c_name = name_of(node, &number)?;
    // A name that exists already: the extension was dropped on this node and created again.
    let origin = match plain::replorigin_by_name(&c_name, true) {
        0 => make(&c_name)?,
        found => found,
    };
    advance(OriginId(origin), 0);
    execute(
        "insert into braid.origin (origin_id, node_name, number, subscription_id, source_name, place) \
         values ($1::oid, $2::name, $3::integer, $4, $5::name, $6::integer)",
        &[
            i64::from(origin).into(),
            node.into(),
            number.parse::<i64>().unwrap_or(0).into(),
            match owner {
                Owner::Subscription(id, _) => Some(id),
                Owner::Source(_) => None,
            }
            .into(),
            match owner {
                Owner::Subscription(..) => None,
                Owner::Source(name) => Some(name),
            }
            .into(),
            match owner {
                Owner::Subscription(_, place) => Some(place),
                Owner::Source(_) => None,
            }
            .into(),
        ],
    )
}

/// Makes an origin whose number no row of this database has from an earlier one, which was dropped
/// with another node (`left_origin`).
fn make(name: &CStr) -> Result<ReplOriginId, PgError> {
    let mut others = Vec::new();
    let made = loop {
        // PostgreSQL gives a new origin the lowest free number.
        let made = plain::replorigin_create(name);
        let number = i64::from(made);
        let known = rows(
            "select 1::text from braid.origin where origin_id = $1::oid",
            &[number.into()],
        )?;
        if known.is_empty() {
            break made;
        }
        plain::replorigin_drop_by_name(name, false, true);
        plain::CommandCounterIncrement();
        let other = format!("braid/taken/{}", others.len());
        let other = CString::new(other).unwrap_or_default();
        plain::replorigin_create(&other);
        plain::CommandCounterIncrement();
        others.push(other);
    };
    for other in others {
        plain::replorigin_drop_by_name(&other, false, true);
    }
    Ok(made)
}

/// The name of an origin of this database's. `braid.is_own_origin` has the same.
fn name_of(node: &str, number: &str) -> Result<CString, PgError> {
    let name = format!(
        "braid/{node}/{}{number:0>4}",
        braid_postgres::process::my_database()
    );
    CString::new(braid_postgres::encoding::statement(&name).into_bytes())
        .map_err(|_| PgError::new(SqlState::InvalidParameterValue, "node name has a zero byte"))
}

/// The outcome of [`remake`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remade {
    /// The origin exists.
    Yes,
    /// Another origin has its number.
    Taken,
}

/// Creates one of this database's origins again, under the number that rows refer to, and at a
/// position. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn remake(origin: u16, node: &str, number: &str, lsn: u64) -> Result<Remade, PgError> {
    let name = name_of(node, number)?;
    let mut found = plain::replorigin_by_name(&name, true);
    let mut others = Vec::new();
    if found == 0 {
        if session_origin::name_of(origin).is_some() {
            return Ok(Remade::Taken);
        }
        // PostgreSQL gives a new origin the lowest free number.
        loop {
            let other = CString::new(format!("braid/number/{}", others.len())).unwrap_or_default();
            let at = others.len();
            let made = plain::replorigin_create(&other);
            others.push(other);
            if made == origin {
                let last = others.swap_remove(at);
                plain::replorigin_drop_by_name(&last, false, true);
                plain::CommandCounterIncrement();
                found = plain::replorigin_create(&name);
                break;
            }
            if made > origin {
                break;
            }
        }
    }
    for other in others {
        plain::replorigin_drop_by_name(&other, false, true);
    }
    plain::CommandCounterIncrement();
    if found != origin {
        return Ok(Remade::Taken);
    }
    advance(OriginId(origin), lsn);
    Ok(Remade::Yes)
}

/// Set an origin's position, also backwards.
pub fn advance(origin: OriginId, lsn: u64) {
    let mode = LockMode::RowExclusive.as_raw();
    plain::LockRelationOid(pg_sys::ReplicationOriginRelationId, mode);
    // An origin that another process holds is an error.
    plain::replorigin_advance(origin.0, lsn, 0, true, true);
}

/// The subscription's position in its provider's WAL: the largest position of its origins; 0 for
/// none. It is on the local disk: a leader that starts from a position reports it, and a reported
/// position must not be lost in a crash. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn progress(subscription_id: u32) -> Result<u64, PgError> {
    let origins = rows(
        "select origin_id::text from braid.origin where subscription_id = $1",
        &[i64::from(subscription_id).into()],
    )
    .map(parse)?;
    Ok(origins
        .into_iter()
        .map(|origin| plain::replorigin_get_progress(origin.0, true))
        .max()
        .unwrap_or(0))
}

/// Stamps the commits of this process with `origin` from now on.
///
/// # Errors
/// 55006 while another process holds it, 53400 if none is free.
pub fn use_for_commits(origin: OriginId) -> Result<(), PgError> {
    if compat::session_origin() == origin.0 {
        return Ok(());
    }
    if compat::session_origin() != 0 {
        plain::replorigin_session_reset();
        compat::set_session_origin(0);
    }
    // PostgreSQL raises with ReplicationOriginLock held. `catch` lets go of it, in a transaction as
    // well as outside of one.
    error::catch(|| compat::replorigin_session_setup(origin.0))?;
    compat::set_session_origin(origin.0);
    Ok(())
}

/// Stamps the commits of this process with no origin until [`resume`]. The origin stays this
/// process's. Returns it.
pub fn suspend() -> OriginId {
    let used = OriginId(compat::session_origin());
    compat::set_session_origin(0);
    used
}

/// The origin that this process stamps its commits with.
#[must_use]
pub fn stamp() -> OriginId {
    OriginId(session_origin::get())
}

/// Stamp commits, and records of WAL, with another origin than the one that this process has set
/// up, until [`resume`].
pub fn stamp_with(origin: OriginId) {
    session_origin::set(origin.0);
}

/// Stamp it with `suspended` again.
pub fn resume(suspended: OriginId) {
    compat::set_session_origin(suspended.0);
}

static WATCHED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The provider's position for which the current transaction stands; 0 while it stands for
    /// none.
    static ENDS_AT: Cell<u64> = const { Cell::new(0) };
}

/// Has the current transaction stand for the provider's transaction that ends at `end_lsn` and was
/// committed at `timestamp` (`TimestampTz`): its commit, or its PREPARE, moves the origin of this
/// process to that position.
///
/// The position is set only when no code of users runs any more, and cleared before anything is
/// rolled back. From 16 on, PostgreSQL also moves the origin with each rollback
/// (`RecordTransactionAbort` of src/backend/access/transam/xact.c). That includes subtransactions,
/// and the open transaction of a process that is asked to end. Then a change that was not applied
/// would count as applied (I1).
pub fn stands_for(end_lsn: u64, timestamp: i64) {
    if !WATCHED.swap(true, Ordering::Relaxed) {
        transaction::on_end(at_end);
        // The process is connected to its database: callbacks for its exit that are registered
        // later are called earlier, so before the current transaction is rolled back.
        process::before_exit(at_exit);
    }
    ENDS_AT.set(end_lsn);
    compat::set_session_origin_timestamp(timestamp);
}

fn at_end(end: End) {
    let position = match end {
        End::BeforeCommit | End::BeforePrepare => ENDS_AT.get(),
        End::Committed | End::Prepared | End::RolledBack => {
            ENDS_AT.set(0);
            0
        }
    };
    compat::set_session_origin_lsn(position);
}

/// The process ends, perhaps in the middle of a transaction.
fn at_exit() {
    ENDS_AT.set(0);
    // The origin itself is let go of by PostgreSQL.
    compat::set_session_origin(0);
    compat::set_session_origin_lsn(0);
}
