//! `braid.split_progress`: the committed part of a transaction that is committed in chunks
//! (`braid_bgworker::split`). Written by the applier whose current transaction it is, in the
//! commits of the chunks. Read by that applier, and by the leader when it starts.

use braid_bgworker::split::Progress;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{lsn_text, parse_lsn};
use braid_postgres::error::PgError;

use crate::subscription::{Subscription, execute, execute_counting, rows, rows_written};

/// Where the commit record of the partly committed transaction starts; `None` if there is none. In
/// the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn outstanding(subscription_id: u32) -> Result<Option<(u64, u64)>, PgError> {
    let found = rows(
        "select commit_lsn::text, changes::text from braid.split_progress where subscription_id = $1",
        &[i64::from(subscription_id).into()],
    )?;
    Ok(found.first().map(|row| {
        let text = |column: usize| row.get(column).cloned().flatten().unwrap_or_default();
        (
            parse_lsn(&text(0)).unwrap_or(0),
            text(1).parse().unwrap_or(0),
        )
    }))
}

/// Reads how much is committed of the transaction whose commit record starts at `commit_lsn`. In
/// the caller's transaction.
///
/// # Errors
/// Those of SPI; XX001 when the row can't be read.
pub fn read(subscription_id: u32, commit_lsn: u64) -> Result<Progress, PgError> {
    let found = rows(
        "select changes::text, digest::text from braid.split_progress where subscription_id = $1 and commit_lsn = $2::pg_lsn",
        &[
            i64::from(subscription_id).into(),
            lsn_text(commit_lsn).into(),
        ],
    )?;
    let Some(row) = found.first() else {
        return Ok(Progress::default());
    };
    let number = |column: usize| row.get(column)?.as_ref()?.parse::<i64>().ok();
    let (Some(changes), Some(digest)) = (number(0), number(1)) else {
        return Err(PgError::new(
            SqlState::DataCorrupted,
            "a row of braid.split_progress is corrupt",
        ));
    };
    Ok(Progress {
        changes: changes.cast_unsigned(),
        digest: digest.cast_unsigned(),
    })
}

/// Records how far the transaction is committed with the current one. Returns false if the
/// subscription was changed so that the rest would arrive differently; then the current transaction
/// must not be committed. The row lock orders this against a session that changes the subscription.
///
/// # Errors
/// Those of SPI.
pub fn write(
    subscription: &Subscription,
    commit_lsn: u64,
    progress: Progress,
) -> Result<bool, PgError> {
    execute_counting(
        "insert into braid.split_progress as p (subscription_id, commit_lsn, changes, digest) \
         select subscription_id, $2::pg_lsn, $3, $4 from braid.subscription \
          where subscription_id = $1 and origin = $5 and array_to_string(publications, E'\\x01') = $6 for key share \
         on conflict (subscription_id) do update \
            set commit_lsn = excluded.commit_lsn, changes = excluded.changes, digest = excluded.digest",
        &[
            i64::from(subscription.id).into(),
            lsn_text(commit_lsn).into(),
            progress.changes.cast_signed().into(),
            progress.digest.cast_signed().into(),
            subscription.options.origin.name().into(),
            subscription.options.publications.join("\x01").into(),
        ],
    )
    .map(|written| written == 1)
}

/// Records that the last chunk is committed with the current transaction.
///
/// # Errors
/// Those of SPI.
pub fn finish(subscription_id: u32) -> Result<(), PgError> {
    execute(
        "delete from braid.split_progress where subscription_id = $1",
        &[i64::from(subscription_id).into()],
    )
}

/// The rest of the transaction whose commit record starts at `commit_lsn` is left out. Returns how
/// many of its changes are committed on this node, if any are. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn leave(subscription_id: u32, commit_lsn: u64) -> Result<Option<u64>, PgError> {
    let left = rows_written(
        "delete from braid.split_progress where subscription_id = $1 and commit_lsn = $2::pg_lsn returning changes::text",
        &[
            i64::from(subscription_id).into(),
            lsn_text(commit_lsn).into(),
        ],
    )?;
    Ok(left
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next().flatten()?.parse().ok()))
}
