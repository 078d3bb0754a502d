//! Transactions that are prepared on this node for a subscription, and those that can't be. Run by
//! leader and appliers, and by functions.
//!
//! The name of a prepared transaction is
//! `braid_<database OID>_<subscription>_<transaction at the provider>`. All databases of a server
//! share one list of prepared transactions. Unfinished ones have different ids at the provider.
//!
//! A transaction can't be prepared if a conflict is decided only by its commit. It is recorded in
//! `braid.unprepared`, with the position of its PREPARE. The provider is asked for it by number,
//! and sends it whole when it has committed. A record that stays for too long is harmless: another
//! transaction with the same number would arrive whole, too. It must not be removed too early: the
//! commit would arrive without the transaction.
//!
//! A prepared transaction can be given up as well, if it blocks transactions that come before its
//! end (`in_a_circle`): it is recorded, and the leader starts anew. A transaction that is recorded
//! and nevertheless prepared on this node is rolled back before anything is received (`noted`). So
//! an interruption at any point is harmless.

use std::collections::BTreeSet;
use std::ffi::CString;

use braid_bgworker::lock_circle::{self, Holder, Wait};
use braid_bgworker::provider_snapshot::ProviderSnapshot;
use braid_bgworker::reason::Reason;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::lsn_text;
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::Connection;
use braid_postgres::{process, two_phase};

use crate::registry;
use crate::subscription::{Subscription, execute, rows};

/// Returns the error by which an applier makes the leader restart and request a recorded
/// transaction; `why` is the detail.
#[must_use]
pub fn to_be_sent_whole(why: &str) -> PgError {
    PgError::new(
        SqlState::SerializationFailure,
        "a prepared transaction is to be sent once it has committed",
    )
    .with_detail(why)
    .for_reason(Reason::SendOnceCommitted)
}

/// The prefix of the names of a subscription's prepared transactions, in the current database.
#[must_use]
pub fn prefix(subscription_id: u32) -> String {
    format!("braid_{}_{subscription_id}_", process::my_database())
}

/// The name of a transaction that has this id at the provider.
pub fn gid(subscription_id: u32, xid: u32) -> CString {
    CString::new(format!("{}{xid}", prefix(subscription_id))).unwrap_or_default()
}

/// Records that a transaction, whose PREPARE ends at this position, is not prepared on this node.
/// In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn note(subscription_id: u32, xid: u32, end_lsn: u64, reason: &str) -> Result<(), PgError> {
    execute(
        "insert into braid.unprepared (subscription_id, xid, prepare_lsn, reason) values ($1, $2, $3::pg_lsn, $4) \
         on conflict (subscription_id, xid) do update \
            set prepare_lsn = excluded.prepare_lsn, reason = excluded.reason, noted_at = excluded.noted_at, over_lsn = null",
        &[
            i64::from(subscription_id).into(),
            i64::from(xid).into(),
            lsn_text(end_lsn).into(),
            reason.into(),
        ],
    )
}

/// Numbers of the transactions that are to arrive only when they have committed. Removes the
/// records of those that have ended, if their end has arrived: the stream resumes at `start`.
/// Outside of a transaction.
///
/// # Errors
/// Those of SPI and of the provider.
pub fn noted(
    subscription: &Subscription,
    start: u64,
    provider: &mut Connection,
) -> Result<Vec<String>, PgError> {
    let id = i64::from(subscription.id);
    let numbers: Vec<String> = error::transaction(|| {
        execute(
            "delete from braid.unprepared where subscription_id = $1 and over_lsn <= $2::pg_lsn",
            &[id.into(), lsn_text(start).into()],
        )?;
        rows(
            "select xid::text from braid.unprepared where subscription_id = $1 order by xid",
            &[id.into()],
        )
    })?
    .into_iter()
    .filter_map(|row| row.into_iter().next().flatten())
    .collect();
    if numbers.is_empty() {
        return Ok(numbers);
    }
    roll_back(subscription.id, &numbers)?;
    // The position is read after the snapshot: a transaction that is over in the snapshot has ended
    // before that position. `pg_prepared_xacts` does not show yet a transaction that is prepared at
    // this very moment.
    let snapshot = provider
        .query("SELECT pg_catalog.pg_current_snapshot()")?
        .get(0, 0)
        .and_then(ProviderSnapshot::parse)
        .ok_or_else(|| {
            PgError::new(
                SqlState::ProtocolViolation,
                "the provider has sent something else than a snapshot",
            )
        })?;
    let position = provider.query("SELECT pg_catalog.pg_current_wal_insert_lsn()")?;
    let over: Vec<&str> = numbers
        .iter()
        .map(String::as_str)
        .filter(|number| number.parse().is_ok_and(|xid| snapshot.sees(xid)))
        .collect();
    if !over.is_empty() {
        error::transaction(|| {
            execute(
                "update braid.unprepared set over_lsn = $3::pg_lsn \
                 where subscription_id = $1 and xid = any (string_to_array($2, ',')::bigint[]) and over_lsn is null",
                &[id.into(), over.join(",").into(), position.get(0, 0).into()],
            )
        })?;
    }
    Ok(numbers)
}

/// Rolls back those of the transactions with these numbers that are prepared on this node.
fn roll_back(subscription_id: u32, numbers: &[String]) -> Result<(), PgError> {
    let names = error::transaction(|| {
        rows(
            "select gid from pg_catalog.pg_prepared_xacts where database = current_database() \
             and gid in (select $1 || xid from unnest(string_to_array($2, ',')) xid)",
            &[prefix(subscription_id).into(), numbers.join(",").into()],
        )
    })?;
    for name in names.into_iter().flatten().flatten() {
        let name = CString::new(name).unwrap_or_default();
        error::transaction(|| {
            two_phase::roll_back(&name);
            Ok(())
        })?;
    }
    Ok(())
}

/// Returns the transactions prepared on this node for the subscription for which an earlier
/// transaction waits, by their ids at the provider. In a transaction.
///
/// # Errors
/// Those of SPI.
pub fn in_a_circle(subscription_id: u32) -> Result<BTreeSet<u32>, PgError> {
    // pg_blocking_pids has 0 for a prepared transaction. Its locks are those without a process; the
    // lock on its own transaction id identifies it.
    let found = rows(
        "select w.pid::text, b.pid::text, null \
         from (select distinct pid from pg_catalog.pg_locks where not granted) w, unnest(pg_catalog.pg_blocking_pids(w.pid)) b (pid) where b.pid <> 0 \
         union all \
         select w.pid::text, null, p.gid \
         from pg_catalog.pg_locks w \
         join pg_catalog.pg_locks h on h.granted and h.pid is null and h.locktype = w.locktype \
           and (h.database, h.relation, h.page, h.tuple, h.virtualxid, h.transactionid, h.classid, h.objid, h.objsubid) is not distinct from \
               (w.database, w.relation, w.page, w.tuple, w.virtualxid, w.transactionid, w.classid, w.objid, w.objsubid) \
         join pg_catalog.pg_locks x on x.pid is null and x.virtualtransaction = h.virtualtransaction and x.locktype = 'transactionid' \
         join pg_catalog.pg_prepared_xacts p on p.transaction = x.transactionid \
         where not w.granted and 0 = any (pg_catalog.pg_blocking_pids(w.pid))",
        &[],
    )?;
    let waits: Vec<Wait> = found.iter().filter_map(|row| read_wait(row)).collect();
    Ok(lock_circle::through_own(
        subscription_id,
        &waits,
        |subscription| {
            registry::subscription(subscription)
                .map_or_else(Vec::new, registry::SubscriptionEntry::applier_pids)
        },
    ))
}

/// `None` for a transaction that a user has prepared: no process of Braid's can end it.
fn read_wait(row: &[Option<String>]) -> Option<Wait> {
    let text = |index: usize| row.get(index)?.as_deref();
    let process = text(0)?.parse().ok()?;
    let holder = if let Some(holder) = text(1) {
        Holder::Process(holder.parse().ok()?)
    } else {
        let start = format!("braid_{}_", process::my_database());
        let (subscription, xid) = text(2)?.strip_prefix(&start)?.split_once('_')?;
        Holder::Prepared(subscription.parse().ok()?, xid.parse().ok()?)
    };
    Some(Wait { process, holder })
}

/// Up to where local WAL is flushed: past the record of each step of a prepared transaction, which
/// is flushed with it.
pub fn flushed() -> u64 {
    braid_postgres::wal::flushed()
}
