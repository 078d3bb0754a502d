//! Transactions that are prepared here for a subscription, and such that can't be. Run by leader and appliers, and by functions.
//!
//! The name of one that is prepared is `braid_<database OID>_<subscription>_<transaction at the provider>`: all databases of a server
//! share one list of prepared transactions, and of those that are not finished each has another number at the provider.
//!
//! What can't be prepared, because what it meets is decided by its commit, is noted down in `braid.unprepared`, with the position of its
//! PREPARE; the provider is asked for it by number, and sends it whole when it has committed. A note that stays for too long does no harm: a
//! transaction that has the number again would come whole, too. It must not go too early: its commit would come without it.

use std::ffi::CString;

use braid_bgworker::provider_snapshot::ProviderSnapshot;
use pgrx::pg_sys;

use crate::error::{self, PgError};
use crate::libpq::Connection;
use crate::registry;
use crate::subscription::{Subscription, execute, lsn_text, rows};

/// The message by which an applier has the leader start anew, and ask for what was noted down.
pub(crate) const TO_BE_SENT_WHOLE: &str =
    "a prepared transaction is to be sent once it has committed";

/// What the names of all of a subscription's begin with, in the database in hand.
#[must_use]
pub fn prefix(subscription_id: u32) -> String {
    format!("braid_{}_{subscription_id}_", registry::my_database())
}

/// The name of a transaction that has this id at the provider.
pub(crate) fn gid(subscription_id: u32, xid: u32) -> CString {
    CString::new(format!("{}{xid}", prefix(subscription_id))).unwrap_or_default()
}

/// Note down that a transaction, whose PREPARE ends at this position, is not prepared here. In a transaction of the caller's.
///
/// # Errors
/// Whatever SPI says.
pub(crate) fn note(
    subscription_id: u32,
    xid: u32,
    end_lsn: u64,
    reason: &str,
) -> Result<(), PgError> {
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

/// Numbers of the transactions that are to come when they have committed, and not before. Notes of those go that are over, and whose end has
/// come here: the stream goes on from `start`. Outside of a transaction.
///
/// # Errors
/// Whatever SPI and the provider say.
pub(crate) fn noted(
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
    // The position after the look: what is over by then has ended before it. Not by `pg_prepared_xacts`, which does not show yet what was prepared
    // this very moment.
    let snapshot = provider
        .query("SELECT pg_catalog.pg_current_snapshot()")?
        .get(0, 0)
        .and_then(ProviderSnapshot::parse)
        .ok_or_else(|| {
            PgError::new(
                "08P01",
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

/// Up to where local WAL is flushed: past the record of each step of a prepared transaction, which is flushed with it.
pub(crate) fn flushed() -> u64 {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::GetFlushRecPtr(std::ptr::null_mut()) }
}
