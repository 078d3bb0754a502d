//! Reading and moving the catalog's rows about subscriptions. Run by the manager, the leader and
//! the copy workers, each call in a transaction of the caller's.

use std::time::Duration;

use braid_bgworker::sql_text::{quote_identifier, quote_literal, quote_option};
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::{self, Options};
use braid_gir::{lsn_text, parse_lsn};
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::error::PgError;
use braid_postgres::{catalog, encoding, kept_plan};
use pgrx::datum::DatumWithOid;
use pgrx::spi::SpiError;

use crate::connection_string::{self, DSN};

/// A row of `braid.subscription`, as its workers need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscription {
    /// `subscription_id`.
    pub id: u32,
    /// Where the transaction ends at which it had stopped, 0 for none; `None` where it has not
    /// stopped.
    pub stopped_at: Option<u64>,
    /// `subscription_name`.
    pub name: String,
    /// OID of its owner.
    pub owner: u32,
    /// Connection string of the provider. Never to be logged or shown.
    pub dsn: String,
    /// Name of the provider.
    pub provider: String,
    /// A leader has tried to create the slot after it had seen that there was none.
    pub slot_attempted: bool,
    /// The subscription's options, as created or last changed.
    pub options: Options,
    /// `slot`, `copy` or `stream`.
    pub phase: String,
    /// Where the slot starts.
    pub start_lsn: u64,
    /// Transaction to leave out; 0 for none.
    pub skip_lsn: u64,
    /// The only other node whose transactions are requested, and up to where this node has them.
    pub only: Option<(String, u64)>,
}

fn spi<T>(result: Result<T, SpiError>) -> Result<T, PgError> {
    result.map_err(|error| {
        PgError::new(
            SqlState::InternalError,
            format!("could not use braid's catalog: {error}"),
        )
    })
}

/// Run one statement that returns nothing.
///
/// # Errors
/// Those of SPI; PostgreSQL's own errors unwind.
pub fn execute(sql: &str, arguments: &[DatumWithOid<'_>]) -> Result<(), PgError> {
    spi(pgrx::Spi::connect_mut(|client| {
        client
            .update(sql, None, &encoding::arguments(arguments))
            .map(|_| ())
    }))
}

/// Run one statement and give the number of rows that it touched.
///
/// # Errors
/// As [`execute`].
pub fn execute_counting(sql: &str, arguments: &[DatumWithOid<'_>]) -> Result<usize, PgError> {
    spi(pgrx::Spi::connect_mut(|client| {
        client
            .update(sql, None, &encoding::arguments(arguments))
            .map(|table| table.len())
    }))
}

/// The rows of the result that SPI holds, as text.
fn texts(_held: &pgrx::spi::SpiTupleTable<'_>) -> Result<Vec<Vec<Option<String>>>, SpiError> {
    // A statement without rows has left no table.
    Ok(catalog::collect().iter().map(<[_]>::to_vec).collect())
}

/// Run one query and give its rows as text.
///
/// # Errors
/// As [`execute`].
pub fn rows(
    sql: &str,
    arguments: &[DatumWithOid<'_>],
) -> Result<Vec<Vec<Option<String>>>, PgError> {
    spi(pgrx::Spi::connect(|client| {
        texts(&client.select(
            encoding::statement(sql).as_c_str(),
            None,
            &encoding::arguments(arguments),
        )?)
    }))
}

/// Run one statement that writes, and give the rows that it returns as text.
///
/// # Errors
/// As [`execute`].
pub fn rows_written(
    sql: &str,
    arguments: &[DatumWithOid<'_>],
) -> Result<Vec<Vec<Option<String>>>, PgError> {
    spi(pgrx::Spi::connect_mut(|client| {
        texts(&client.update(
            encoding::statement(sql).as_c_str(),
            None,
            &encoding::arguments(arguments),
        )?)
    }))
}

/// Runs a statement that mostly finds nothing to write, and returns the number of rows that it has
/// touched. The transaction takes an id when a row is written. [`execute_counting`] always takes
/// one, so its transaction writes WAL: processes do not run it periodically.
///
/// Before the transaction has an id, [`rows`] sees no later commits, and may lock no rows.
pub fn execute_lazily(sql: &str, arguments: &[DatumWithOid<'_>]) -> usize {
    catalog::write(sql, arguments).0
}

/// As [`execute_lazily`], and returns the rows that the statement returns, as text.
#[must_use]
pub fn rows_lazily(sql: &str, arguments: &[DatumWithOid<'_>]) -> Vec<Vec<Option<String>>> {
    let (_, rows) = catalog::write(sql, arguments);
    rows.iter().map(<[_]>::to_vec).collect()
}

/// Read a subscription; `None` when it is gone.
///
/// # Errors
/// As [`execute`].
pub fn load(id: u32) -> Result<Option<Subscription>, PgError> {
    let found = rows(
        &format!(
            "select subscription_name::text, subscription_owner::oid::text, {DSN}, provider_name::text, slot_attempted::text, phase, \
                start_lsn::text, skip_lsn::text, case when error_sqlstate is not null then coalesce(error_lsn, '0/0')::text end, \
                only_origin::text, only_after::text, {} \
             from braid.subscription s where subscription_id = $1",
            subscription_option::select_list("s")
        ),
        &[i64::from(id).into()],
    )?;
    let Some(row) = found.into_iter().next() else {
        return Ok(None);
    };
    let text = |index: usize| row.get(index).cloned().flatten();
    let lsn = |index: usize| text(index).and_then(|lsn| parse_lsn(&lsn)).unwrap_or(0);
    let name = text(0).unwrap_or_default();
    Ok(Some(Subscription {
        id,
        owner: text(1).and_then(|oid| oid.parse().ok()).unwrap_or(0),
        dsn: text(2).ok_or_else(|| connection_string::missing(&name))?,
        provider: text(3).unwrap_or_default(),
        slot_attempted: text(4).as_deref() == Some("true"),
        phase: text(5).unwrap_or_default(),
        start_lsn: lsn(6),
        skip_lsn: lsn(7),
        stopped_at: text(8).map(|_| lsn(8)),
        only: text(9).map(|node| (node, lsn(10))),
        options: Options::read(|index| text(OPTIONS_AT + index))
            .map_err(|option| unreadable(&name, option))?,
        name,
    }))
}

/// Where the options begin in what [`load`] reads.
const OPTIONS_AT: usize = 11;

/// 22023: an option in the catalog has a value that this version does not know.
#[must_use]
pub fn unreadable(subscription: &str, option: &str) -> PgError {
    PgError::new(
        SqlState::InvalidParameterValue,
        format!("subscription \"{subscription}\" has an unrecognized value for {option}"),
    )
    .with_hint(
        "Table braid.subscription is written by Braid's functions only: put back what was there.",
    )
}

/// Name of this node; `None` when it has none.
///
/// # Errors
/// As [`execute`].
pub fn local_node() -> Result<Option<String>, PgError> {
    Ok(
        rows("select node_name::text from braid.node where is_local", &[])?
            .into_iter()
            .next()
            .and_then(|row| row.into_iter().next().flatten()),
    )
}

/// Whether this database joins a group with rows of its own, which its copies are to replace.
///
/// # Errors
/// As [`execute`].
pub fn joins_with_rows() -> Result<bool, PgError> {
    let found = rows(
        "select 1::text from braid.group_self where join_mode = 'data' and exists (select from braid.join_step where done_at is null)",
        &[],
    )?;
    Ok(!found.is_empty())
}

/// Limits waits for locks in this transaction to a moment: a longer one is
/// [`SqlState::LockNotAvailable`].
///
/// # Errors
/// As [`execute`].
pub fn limit_lock_waits() -> Result<(), PgError> {
    execute(LIMIT_LOCK_WAITS, &[])
}

/// The statement of [`limit_lock_waits`].
pub const LIMIT_LOCK_WAITS: &str = "set local lock_timeout = '100ms'";

/// Move a subscription's phase on.
///
/// # Errors
/// As [`execute`].
pub fn set_phase(id: u32, phase: &str, start_lsn: Option<u64>) -> Result<(), PgError> {
    execute(
        "update braid.subscription set phase = $2, start_lsn = coalesce($3::pg_lsn, start_lsn) \
         where subscription_id = $1",
        &[
            i64::from(id).into(),
            phase.into(),
            start_lsn.map(lsn_text).into(),
        ],
    )
}

/// Note down that the slot is about to be created, or that it was not. False when the subscription
/// is gone.
///
/// # Errors
/// As [`execute`].
pub fn set_slot_attempted(id: u32, attempted: bool) -> Result<bool, PgError> {
    execute_counting(
        "update braid.subscription set slot_attempted = $2 where subscription_id = $1",
        &[i64::from(id).into(), attempted.into()],
    )
    .map(|touched| touched == 1)
}

/// Whether a name is part of a subscription, or the table of this database that has it. The table
/// itself is not looked into, and no lock on it waited for.
///
/// # Errors
/// As [`execute`].
pub fn has_table(id: u32, namespace: &str, name: &str) -> Result<bool, PgError> {
    let found = kept_plan::rows(
        "select 1::text from braid.subscription_table t \
         where t.subscription_id = $1 and t.schema_name = $2 and t.table_name = $3 \
         union all \
         select 1::text from braid.subscription_table t \
         join pg_catalog.pg_class c on c.oid = t.relation \
         join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
         where t.subscription_id = $1 and n.nspname = $2 and c.relname = $3",
        &[i64::from(id).into(), namespace.into(), name.into()],
    )?;
    Ok(!found.is_empty())
}

/// Whether a table of the subscription is still to be copied.
///
/// # Errors
/// Those of PostgreSQL.
pub fn is_to_be_copied(id: u32, namespace: &str, name: &str) -> Result<bool, PgError> {
    let found = kept_plan::rows(
        "select 1::text from braid.subscription_table t \
         where t.subscription_id = $1 and t.schema_name = $2 and t.table_name = $3 and t.state <> 'ready'",
        &[i64::from(id).into(), namespace.into(), name.into()],
    )?;
    Ok(!found.is_empty())
}

/// Whether a table of this database has no rows; false if it does not exist.
///
/// # Errors
/// As [`execute`].
pub fn is_empty(namespace: &str, name: &str) -> Result<bool, PgError> {
    let here = rows(
        "select c.oid::text from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
         where n.nspname = $1 and c.relname = $2 and c.relkind in ('r', 'p')",
        &[namespace.into(), name.into()],
    )?;
    let oid = here
        .first()
        .and_then(|row| row.first()?.as_deref()?.parse::<u32>().ok());
    let Some(oid) = oid else {
        return Ok(false);
    };
    let table = format!("{}.{}", quote_identifier(namespace), quote_identifier(name));
    let question = format!("select 1::text from {table} limit 1");
    let found = with_rights(Rights::OwnerOf(oid.into()), || {
        catalog::query(&question, &[])
    });
    Ok(found.is_empty())
}

/// Whether a table is copied before its changes are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialCopy {
    /// As it is.
    No,
    /// Into an empty table.
    Yes,
    /// Copied if it is empty when its copy begins. Otherwise its rows have arrived, or will arrive,
    /// as changes.
    UnlessFilled,
}

/// Makes a table of this database part of a subscription, to be copied first or not. Returns false
/// if it was part already, or does not exist.
///
/// # Errors
/// As [`execute`].
pub fn add_table(id: u32, namespace: &str, name: &str, copy: InitialCopy) -> Result<bool, PgError> {
    let id = i64::from(id);
    execute(
        "delete from braid.left_out_table where subscription_id = $1 and schema_name = $2 and table_name = $3 and provider_relation = 0",
        &[id.into(), namespace.into(), name.into()],
    )?;
    let added = rows_written(
        "insert into braid.subscription_table (subscription_id, relation, schema_name, table_name, state, unless_filled) \
         select $1, c.oid, n.nspname, c.relname, $4, $5 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
         where n.nspname = $2 and c.relname = $3 and c.relkind in ('r', 'p') \
         on conflict do nothing returning relation::oid::text",
        &[
            id.into(),
            namespace.into(),
            name.into(),
            if copy == InitialCopy::No {
                "ready"
            } else {
                "waiting"
            }
            .into(),
            (copy == InitialCopy::UnlessFilled).into(),
        ],
    )?;
    Ok(!added.is_empty())
}

/// Take note that changes of a name are left out: all of them, or those of one relation of the
/// provider.
///
/// # Errors
/// As [`execute`].
pub fn leave_out(
    id: u32,
    (namespace, name): (&str, &str),
    provider_relation: Option<u32>,
    reason: &str,
) -> Result<(), PgError> {
    let id = i64::from(id);
    // Records of relations that are gone are needed for as long as their transactions are in
    // flight.
    execute(
        "delete from braid.left_out_table where subscription_id = $1 and provider_relation <> 0 and left_out_at < clock_timestamp() - interval '7 days'",
        &[id.into()],
    )?;
    execute(
        "insert into braid.left_out_table (subscription_id, schema_name, table_name, provider_relation, reason) values ($1, $2, $3, $4::oid, $5) \
         on conflict (subscription_id, table_name, schema_name, provider_relation) do update set reason = excluded.reason, left_out_at = excluded.left_out_at",
        &[
            id.into(),
            namespace.into(),
            name.into(),
            i64::from(provider_relation.unwrap_or(0)).into(),
            reason.into(),
        ],
    )
}

/// Whether changes of a name are left out that come from this relation of the provider.
///
/// # Errors
/// As [`execute`].
pub fn is_left_out(
    id: u32,
    namespace: &str,
    name: &str,
    provider_relation: u32,
) -> Result<bool, PgError> {
    let found = kept_plan::rows(
        "select 1::text from braid.left_out_table \
         where subscription_id = $1 and schema_name = $2 and table_name = $3 and provider_relation in (0, $4::oid)",
        &[
            i64::from(id).into(),
            namespace.into(),
            name.into(),
            i64::from(provider_relation).into(),
        ],
    )?;
    Ok(!found.is_empty())
}

/// Stop a subscription with an error, at the transaction that ends at `lsn` if it is one that
/// failed; it is tried again after `pause`, which doubles with each stop in a row. Not where that
/// transaction is to be left out: somebody has said so while it was tried again.
///
/// # Errors
/// As [`execute`].
pub fn set_error(
    id: u32,
    error: &PgError,
    lsn: u64,
    pause: Option<Duration>,
) -> Result<(), PgError> {
    execute(
        "update braid.subscription set error_sqlstate = $2, error_message = $3, error_detail = $4, error_hint = $5, \
         error_lsn = $6::pg_lsn, error_context = $7, error_at = clock_timestamp(), error_attempts = error_attempts + 1, \
         error_retry_at = clock_timestamp() + $8::bigint * 2 ^ least(error_attempts, 5) * interval '1 millisecond' \
         where subscription_id = $1 and skip_lsn is distinct from coalesce($6::pg_lsn, '0/0')",
        &[
            i64::from(id).into(),
            error.sqlstate.to_string().into(),
            error.message.as_str().into(),
            error.detail.as_deref().into(),
            error.hint.as_deref().into(),
            (lsn != 0).then(|| lsn_text(lsn)).into(),
            error.context().into(),
            pause
                .map(|pause| i64::try_from(pause.as_millis()).unwrap_or(i64::MAX))
                .into(),
        ],
    )
}

/// The reason why a subscription had stopped is over. In the caller's transaction.
///
/// # Errors
/// As [`execute`].
pub fn clear_error(id: u32) -> Result<(), PgError> {
    execute(
        "update braid.subscription set error_sqlstate = null, error_message = null, error_detail = null, error_hint = null, \
         error_context = null, error_lsn = null, error_at = null, error_attempts = 0, error_retry_at = null \
         where subscription_id = $1 and error_sqlstate is not null and given_up_at is null",
        &[i64::from(id).into()],
    )
}

/// The list of publication names as an option of START_REPLICATION.
#[must_use]
pub fn publication_list(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| quote_identifier(name)).collect();
    quote_option(&quoted.join(","))
}

/// Returns a condition for a query at the provider: commits at the provider wait for the
/// subscription to confirm them. `name` is an SQL expression. The condition takes no lock on a
/// user's table. For a role that must not see the standbys it is true wherever there can be some.
#[must_use]
pub fn commits_wait_for(name: &str) -> String {
    format!(
        "pg_catalog.current_setting('synchronous_standby_names') <> '' and \
         coalesce((select bool_or(sync_state <> 'async') from pg_catalog.pg_stat_replication where application_name = {name}), true)"
    )
}

/// The names of publications as a list of literals, for SQL: of none a list in which nothing is.
#[must_use]
pub fn publication_literals(names: &[String]) -> String {
    if names.is_empty() {
        return "null".to_owned();
    }
    let quoted: Vec<String> = names.iter().map(|name| quote_literal(name)).collect();
    quoted.join(", ")
}
