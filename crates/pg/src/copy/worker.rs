//! A copy worker: one table, then it ends. Started by the [`Coordinator`](super::Coordinator), which learns from the catalog what
//! came of it.

use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use super::load::{self, Copied, Target};
use super::source::{Published, Source};
use super::try_lock;
use crate::apply::COPIED;
use crate::error::{self, PgError};
use crate::subscription::{self, Subscription, lsn_text};
use crate::worker::{self, Extra};
use crate::registry;

/// What a worker is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// Of the subscription.
    pub subscription: u32,
    /// Of the local table.
    pub relation: u32,
    /// Exported by the provider; empty: the worker takes one itself.
    pub snapshot: String,
    /// Position that belongs to the snapshot.
    pub lsn: u64,
}

impl Task {
    /// As a worker's `bgw_extra`.
    #[must_use]
    pub fn pack(&self) -> Extra {
        let words = [u64::from(self.subscription), u64::from(self.relation), self.lsn];
        Extra::pack_with_text(words, &self.snapshot)
    }

    fn unpack(extra: &Extra) -> Self {
        let number = |index| u32::try_from(extra.word(index)).unwrap_or(0);
        Self {
            subscription: number(0),
            relation: number(1),
            lsn: extra.word(2),
            snapshot: extra.text::<3>(),
        }
    }
}

/// A copy worker's main function; `argument` is the OID of the database.
pub fn worker_main(argument: pg_sys::Datum) {
    worker::initialize();
    worker::connect(u32::try_from(argument.value()).unwrap_or(0));
    let task = Task::unpack(&Extra::mine());
    let outcome = error::catch(|| run(&task)).and_then(|outcome| outcome);
    if let Err(failure) = outcome {
        error::abort();
        failure.log("copying a table failed");
        if let Err(second) = error::transaction(|| record_failure(&task, &failure)) {
            second.log("could not record why copying a table failed");
        }
    }
}

/// What makes text forms, triggers and names independent of this server's settings, as the provider's side does.
fn pin_settings() -> Result<(), PgError> {
    for (name, value) in [
        (c"session_replication_role", "replica"),
        (c"search_path", "pg_catalog"),
        (c"datestyle", "ISO"),
        (c"intervalstyle", "postgres"),
        (c"extra_float_digits", "3"),
        (c"lc_monetary", "C"),
        (c"bytea_output", "hex"),
        (c"xmloption", "content"),
        (c"statement_timeout", "0"),
        (c"lock_timeout", "0"),
        // Nothing before the last commit needs to last: a table that is not ready is copied again.
        (c"synchronous_commit", "off"),
    ] {
        load::set(name, value)?;
    }
    Ok(())
}

fn run(task: &Task) -> Result<(), PgError> {
    pin_settings()?;
    let Some(start) = error::transaction(|| begin(task))? else {
        return Ok(());
    };
    worker::report_activity(&format!("copying {}.{}", start.namespace, start.name));
    let counters = registry::table(task.subscription, task.relation);
    let mut source = Source::open(&start.subscription, &task.snapshot, task.lsn)?;
    let published =
        source.published(&start.subscription.publications, &start.namespace, &start.name)?;
    error::transaction(|| record_size(task, &published))?;
    load::set(c"synchronous_commit", "local")?;
    // Neither sent on nor counted as local; RecordTransactionCommit does not advance this id, so it needs no set-up.
    // SAFETY: process-local variable of a process that does nothing else.
    unsafe { pg_sys::replorigin_session_origin = COPIED };
    let lsn = source.lsn;
    error::transaction(|| {
        let target = Target::lock(task.relation, start.truncate)?;
        if !start.truncate {
            target.check_empty()?;
        }
        let run_as = start.subscription.run_as_owner.then_some(start.subscription.owner);
        let copied = target.fill(source, &published, run_as, start.truncate, counters)?;
        finish(task, lsn, copied)
    })
}

struct Start {
    subscription: Subscription,
    namespace: String,
    name: String,
    truncate: bool,
}

/// Say that the copy runs. `None` when there is nothing to do any more.
fn begin(task: &Task) -> Result<Option<Start>, PgError> {
    // Another leader's worker still copies the table: the coordinator looks again.
    if !try_lock(task.subscription, task.relation, true) {
        return Ok(None);
    }
    let Some(subscription) = subscription::load(task.subscription)? else {
        return Ok(None);
    };
    let truncate = subscription::rows(
        "select truncate_first::text from braid.subscription_table where subscription_id = $1 and relation = $2::oid",
        &key(task),
    )?
    .into_iter()
    .next()
    .and_then(|row| row.into_iter().next().flatten());
    let Some(truncate) = truncate else { return Ok(None) };
    let marked = update(
        "update braid.subscription_table set state = 'copying', copy_lsn = null, rows_copied = null, bytes_copied = null, \
         rows_total = null, bytes_total = null, ready_at = null, copy_error_sqlstate = null \
         where subscription_id = $1 and relation = $2::oid and state <> 'ready'",
        &key(task),
    )?;
    if marked == 0 {
        return Ok(None);
    }
    let target = Target::lock(task.relation, false)?;
    Ok(Some(Start {
        subscription,
        namespace: target.namespace,
        name: target.name,
        truncate: truncate == "true",
    }))
}

fn record_size(task: &Task, published: &Published) -> Result<(), PgError> {
    let [subscription, relation] = key(task);
    let arguments = [subscription, relation, published.rows.into(), published.bytes.into()];
    update(
        "update braid.subscription_table set rows_total = $3, bytes_total = $4 \
         where subscription_id = $1 and relation = $2::oid",
        &arguments,
    )
    .map(|_| ())
}

/// Make the table ready, in the transaction that has filled it.
fn finish(task: &Task, lsn: u64, copied: Copied) -> Result<(), PgError> {
    let [subscription, relation] = key(task);
    let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
    let arguments = [
        subscription,
        relation,
        lsn_text(lsn).into(),
        number(copied.rows).into(),
        number(copied.bytes).into(),
    ];
    let made = update(
        "update braid.subscription_table set state = 'ready', copy_lsn = $3::pg_lsn, rows_copied = $4, bytes_copied = $5, \
         truncate_first = false, ready_at = clock_timestamp(), copy_error = null, copy_error_sqlstate = null, \
         copy_error_detail = null, copy_error_hint = null \
         where subscription_id = $1 and relation = $2::oid and state = 'copying'",
        &arguments,
    )?;
    if made == 1 {
        return Ok(());
    }
    // Dropped, refreshed or resynced meanwhile: what was copied must not stay.
    Err(PgError::new("40001", "the table's state was changed while it was copied"))
}

fn record_failure(task: &Task, failure: &PgError) -> Result<(), PgError> {
    let [subscription, relation] = key(task);
    let arguments = [
        subscription,
        relation,
        failure.message.as_str().into(),
        failure.sqlstate.as_str().into(),
        failure.detail.as_deref().into(),
        failure.hint.as_deref().into(),
    ];
    update(
        "update braid.subscription_table set state = 'waiting', copy_error = $3, copy_error_sqlstate = $4, \
         copy_error_detail = $5, copy_error_hint = $6 \
         where subscription_id = $1 and relation = $2::oid and state <> 'ready'",
        &arguments,
    )
    .map(|_| ())
}

fn key(task: &Task) -> [DatumWithOid<'static>; 2] {
    [i64::from(task.subscription).into(), i64::from(task.relation).into()]
}

/// Run a statement and give the number of its rows.
fn update(sql: &str, arguments: &[DatumWithOid<'_>]) -> Result<usize, PgError> {
    pgrx::Spi::connect_mut(|client| client.update(sql, None, arguments).map(|table| table.len()))
        .map_err(|error| PgError::new("XX000", format!("could not use braid's catalog: {error}")))
}
