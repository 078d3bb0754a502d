//! Up to where this subscription has confirmed, as `braid.confirmed` has it: the durable side of
//! [`braid_bgworker::lease`]. Run by the leader, also while it ends.
//!
//! Invariant: nothing beyond `up_to` is ever reported as flushed. So if a slot begins beyond it,
//! this leader has not moved it there.

use std::sync::atomic::{AtomicU64, Ordering};

use braid_bgworker::lease::leaves_a_gap;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{lsn_text, parse_lsn};
use braid_node::standing;
use braid_node::subscription::{
    self, Subscription, execute_counting, rows, rows_lazily, rows_written,
};
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::Connection;
use braid_postgres::{server, transaction};

use super::End;
use super::provider::Provider;

/// The position that this process has reported as flushed, or found confirmed; 0: not known.
static REPORTED: AtomicU64 = AtomicU64::new(0);

/// The limits of what may be confirmed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// The position up to which may be confirmed, until a higher one is stored durably.
    pub(super) up_to: u64,
    /// The position up to which may be confirmed as long as a member needs what comes after it
    /// (`braid.group_hold`).
    pub(super) held: Option<u64>,
}

/// Compares where the slot begins with what this node has applied (all up to `start`) and what was
/// confirmed. Returns up to where may be confirmed from now on.
///
/// # Errors
/// The subscription stops if something is missing in between.
pub(super) fn check_slot(
    connection: &mut Connection,
    subscription: &Subscription,
    provider: &Provider,
    start: u64,
) -> Result<Bounds, End> {
    let id = i64::from(subscription.id);
    let begins = provider.slot_begins;
    let known = error::transaction(|| {
        let found = rows(
            "select coalesce(c.up_to, s.start_lsn)::text from braid.subscription s left join braid.confirmed c using (subscription_id) \
             where s.subscription_id = $1",
            &[id.into()],
        )?;
        Ok(found
            .first()
            .and_then(|row| parse_lsn(row.first()?.as_deref()?)))
    })?;
    let reached = known.unwrap_or(begins).max(start);
    if begins > reached && leaves_a_gap(begins, reached, &moves(connection)?) {
        let copied = error::transaction(|| {
            rows(
                "select 1::text from braid.subscription_table where subscription_id = $1 and (copy_lsn < $2::pg_lsn) is not false limit 1",
                &[id.into(), lsn_text(begins).into()],
            )
            .map(|found| found.is_empty())
        })?;
        if !copied {
            let error = gap(subscription, begins, reached);
            return Err(End::at_provider(error, provider.in_recovery));
        }
    }
    let up_to = reached.max(begins);
    error::transaction(|| raise(subscription.id, up_to))?;
    REPORTED.store(begins, Ordering::Relaxed);
    // A position that was confirmed before can't be held back any more, and no member needs it.
    let held = held(subscription.id)?.map(|held| held.max(begins));
    Ok(Bounds { up_to, held })
}

/// The limit of confirmation for the sake of members that have joined while the provider was away.
/// Waits for a session that is about to add such a limit.
fn held(id: u32) -> Result<Option<u64>, PgError> {
    error::transaction(|| {
        subscription::limit_lock_waits()?;
        execute_counting("lock table braid.group_hold in share mode", &[])?;
        least_held(id)
    })
}

/// Returns that limit as of now. It is never lower than when this process began to confirm: no
/// member has more held back later.
///
/// # Errors
/// Those of PostgreSQL.
pub(super) fn held_now(id: u32) -> Result<Option<u64>, PgError> {
    error::transaction(|| least_held(id))
}

fn least_held(id: u32) -> Result<Option<u64>, PgError> {
    // By a snapshot that is taken now, behind the lock.
    let found = rows_lazily(
        "select min(h.held_lsn)::text from braid.subscription s join braid.group_member m on m.node_id = s.provider_id \
           join braid.group_hold h on h.member_id = m.member_id \
          where s.subscription_id = $1 and s.only_origin is null",
        &[i64::from(id).into()],
    );
    Ok(found
        .first()
        .and_then(|row| parse_lsn(row.first()?.as_deref()?)))
}

fn gap(subscription: &Subscription, begins: u64, reached: u64) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!(
            "replication slot \"{}\" at the provider begins at {}, after {}, up to where this node has applied or skipped its transactions",
            subscription.options.slot_name,
            lsn_text(begins),
            lsn_text(reached)
        ),
    )
    .with_detail("The slot was created again or advanced by somebody else. What the provider committed in between would not be sent.")
    .with_hint(
        "Copy each table of the subscription anew with braid.resync_table, then run braid.enable_subscription. Or drop the subscription and create it again; \
         with copy_data => false, braid.compare finds what is missing.",
    )
}

/// Positions between which the provider has nothing for its peers, as it was moved by `pg_upgrade`.
fn moves(connection: &mut Connection) -> Result<Vec<(u64, u64)>, End> {
    let may = connection.query(
        "SELECT 1 FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regprocedure('braid.upgrades()') \
         AND has_function_privilege(oid, 'execute') AND has_schema_privilege(pg_catalog.to_regnamespace('braid'), 'usage')",
    )?;
    if may.is_empty() {
        return Ok(Vec::new());
    }
    let found = connection.query("SELECT from_lsn, to_lsn FROM braid.upgrades()")?;
    Ok((0..found.len())
        .filter_map(|row| {
            Some((
                parse_lsn(found.get(row, 0)?)?,
                parse_lsn(found.get(row, 1)?)?,
            ))
        })
        .collect())
}

/// Have the bound be durable. In the caller's transaction. False where the subscription is
/// gone.
fn raise(id: u32, up_to: u64) -> Result<bool, PgError> {
    subscription::limit_lock_waits()?;
    let (id, up_to) = (i64::from(id), lsn_text(up_to));
    // The bound has to be on disk when it is used.
    transaction::flush_at_commit();
    let raised = execute_counting(
        "update braid.confirmed set up_to = greatest(up_to, $2::pg_lsn) where subscription_id = $1",
        &[id.into(), up_to.as_str().into()],
    )?;
    if raised > 0 {
        return Ok(true);
    }
    execute_counting(
        "insert into braid.confirmed select subscription_id, $2::pg_lsn from braid.subscription where subscription_id = $1",
        &[id.into(), up_to.as_str().into()],
    )
    .map(|inserted| inserted > 0)
}

/// Allows confirmation up to `up_to` from now on. Returns false if this must be tried again,
/// because a session is changing the subscription.
///
/// # Errors
/// Those of PostgreSQL.
pub(super) fn extend(id: u32, up_to: u64) -> Result<bool, PgError> {
    match error::transaction(|| raise(id, up_to)) {
        Err(failure) if failure.sqlstate == SqlState::LockNotAvailable => Ok(false),
        outcome => outcome,
    }
}

/// So far is now reported.
pub(super) fn reported(flushed: u64) {
    REPORTED.fetch_max(flushed, Ordering::Relaxed);
}

/// The process ends: lowers the bound to what was reported. If another session has locked the row,
/// the bound stays too high, and detects less.
pub(super) fn settle(id: u32) {
    let reported = REPORTED.swap(0, Ordering::Relaxed);
    // Without the postmaster nobody might let go of the locks that a transaction takes.
    if reported == 0 || !server::postmaster_is_alive() {
        return;
    }
    error::abort();
    let settled = error::transaction(|| {
        if !standing::has_extension() {
            return Ok(0);
        }
        let id = i64::from(id);
        let mine = rows_written(
            "select 1::text from braid.confirmed where subscription_id = $1 for update skip locked",
            &[id.into()],
        )?;
        if mine.is_empty() {
            return Ok(0);
        }
        execute_counting(
            "update braid.confirmed set up_to = $2::pg_lsn where subscription_id = $1 and up_to > $2::pg_lsn",
            &[id.into(), lsn_text(reported).into()],
        )
    });
    if let Err(failure) = settled {
        failure.log("could not note up to where was confirmed");
    }
}
