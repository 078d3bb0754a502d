//! Reads and writes the catalog's row of a table's copy (`braid.subscription_table`): beginning,
//! progress, outcome. Run by the copy workers.

use braid_bgworker::copy_query::Published;
use braid_bgworker::policy;
use braid_bgworker::remedy::{Subject, with_arguments};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{lsn_text, parse_lsn};
use braid_node::subscription::{self, Subscription};
use braid_postgres::error::PgError;
use braid_postgres::{relation, worker};
use pgrx::datum::DatumWithOid;

use super::feed::Copied;
use super::load::{Purpose, Target};
use super::worker::{LOCK_ATTEMPTS, LOCK_TIMEOUT, Task};
use super::{is_permanent, try_lock};

/// The catalog's row of a copy that begins.
pub(super) struct Start {
    pub(super) subscription: Subscription,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) truncate: bool,
    /// The table was empty at this time; rows that were written locally since then stay. `None`:
    /// the copy empties the table.
    pub(super) began_at: Option<String>,
    /// Position of the first attempt; `None`: this is the first.
    pub(super) first_lsn: Option<u64>,
    /// The table need not be copied if the copy would have to wait for local writers.
    pub(super) unless_filled: bool,
    /// The provider's rows replace the local ones: this node joins a group with its rows, and the
    /// provider has taken them over.
    pub(super) replaces: bool,
    /// The table has replaced one of the same name, to which this node may have written.
    pub(super) made_anew: bool,
}

/// Records that the copy runs. Returns `None` if there is nothing left to do. `before` is a
/// snapshot of the provider, as the text of a `pg_snapshot`; transactions that it does not see
/// arrive by the stream.
pub(super) fn begin(task: &Task, before: Option<&str>) -> Result<Option<Start>, PgError> {
    // Another leader's worker still copies the table: the coordinator looks again.
    if !try_lock(task.subscription, task.relation, true) {
        return Ok(None);
    }
    let Some(subscription) = subscription::load(task.subscription)? else {
        return Ok(None);
    };
    let found = subscription::rows(
        "select truncate_first::text, copy_began_at::text, copy_lsn::text, unless_filled::text, copy_error_sqlstate, made_anew::text from braid.subscription_table \
         where subscription_id = $1 and relation = $2::oid and state <> 'ready'",
        &key(task),
    )?;
    let Some(row) = found.into_iter().next() else {
        return Ok(None);
    };
    let text = |index: usize| row.get(index).cloned().flatten();
    let truncate = text(0).as_deref() == Some("true");
    let unless_filled = text(3).as_deref() == Some("true");
    if unless_filled
        && task.failures >= LOCK_ATTEMPTS
        && text(4).is_some_and(|code| SqlState::parse(&code) == SqlState::LockNotAvailable)
    {
        pgrx::log!(
            "{}: the table is written to, and not copied: all of its changes come",
            worker::my_name()
        );
        leave_as_it_is(task)?;
        return Ok(None);
    }
    if unless_filled {
        worker::set("lock_timeout", LOCK_TIMEOUT);
    }
    let mut start = Start {
        subscription,
        namespace: String::new(),
        name: String::new(),
        truncate,
        began_at: text(1).filter(|_| !truncate),
        first_lsn: None,
        unless_filled,
        replaces: !truncate && !unless_filled && subscription::joins_with_rows()?,
        made_anew: text(5).as_deref() == Some("true"),
    };
    // Rows that were written locally since the copy began stay in the table through failures. But a
    // user who repaired the last failure may have emptied the table: then all rows are to be
    // copied.
    let may_be_emptied = text(4)
        .is_some_and(|sqlstate| is_permanent(&PgError::new(SqlState::parse(&sqlstate), ""), false));
    if start.began_at.is_some() && may_be_emptied {
        let target = Target::lock(task.relation, Purpose::CheckEmpty)?;
        if target.is_empty()? {
            subscription::execute_counting(
                "update braid.subscription_table set copy_began_at = null where subscription_id = $1 and relation = $2::oid",
                &key(task),
            )?;
            start.began_at = None;
        }
    }
    let target = if truncate || start.began_at.is_some() {
        // Cut off before it had one: every change that was held back is applied then.
        start.first_lsn = (!truncate).then(|| text(2).and_then(|lsn| parse_lsn(&lsn)).unwrap_or(0));
        Target::lock(task.relation, Purpose::Fill)?
    } else if start.replaces {
        Target::lock(task.relation, Purpose::Fill)?
    } else {
        let target = Target::lock(task.relation, Purpose::CheckEmpty)?;
        if unless_filled && !target.is_empty()? {
            pgrx::log!(
                "{}: the table has rows by now, and is not copied: all of its changes come",
                worker::my_name()
            );
            leave_as_it_is(task)?;
            return Ok(None);
        }
        target.check_empty()?;
        target
    };
    start.namespace = target.namespace;
    start.name = target.name;
    // The clock is read while no session can write to the table: all later commits in it have later
    // times.
    let [subscription, relation] = key(task);
    subscription::execute_counting(
        "update braid.subscription_table set state = 'copying', rows_copied = null, bytes_copied = null, \
         rows_total = null, bytes_total = null, ready_at = null, copy_error_sqlstate = null, \
         copy_snapshot = coalesce(copy_snapshot, $3::pg_snapshot), \
         copy_began_at = case when not truncate_first then coalesce(copy_began_at, clock_timestamp()) end \
         where subscription_id = $1 and relation = $2::oid",
        &[subscription, relation, before.into()],
    )?;
    Ok(Some(start))
}

/// Records what the provider publishes of the table, and the snapshot of the copy.
pub(super) fn record_plan(
    task: &Task,
    published: &Published,
    first_lsn: u64,
    snapshot: Option<&str>,
) -> Result<(), PgError> {
    let [subscription, relation] = key(task);
    let arguments = [
        subscription,
        relation,
        published.rows.into(),
        published.bytes.into(),
        lsn_text(first_lsn).into(),
        snapshot.into(),
    ];
    subscription::execute_counting(
        "update braid.subscription_table set rows_total = $3, bytes_total = $4, copy_lsn = $5::pg_lsn, \
         copy_snapshot = coalesce($6::pg_snapshot, copy_snapshot) \
         where subscription_id = $1 and relation = $2::oid",
        &arguments,
    )
    .map(|_| ())
}

/// The snapshot from which a table was filled.
pub(super) struct From<'a> {
    /// OID of the provider's table.
    pub(super) relation: u32,
    /// Position of the snapshot that was copied.
    pub(super) copied_lsn: u64,
    /// Changes of transactions that committed from here on are applied.
    pub(super) copy_lsn: u64,
    /// `None`: the snapshot of the first attempt stays.
    pub(super) snapshot: Option<&'a str>,
}

/// Make the table ready, in the transaction that has filled it.
pub(super) fn finish(task: &Task, from: &From<'_>, copied: Copied) -> Result<(), PgError> {
    let [subscription, relation] = key(task);
    let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
    let arguments = [
        subscription,
        relation,
        lsn_text(from.copy_lsn).into(),
        number(copied.rows).into(),
        number(copied.bytes).into(),
        from.snapshot.into(),
        i64::from(from.relation).into(),
        lsn_text(from.copied_lsn).into(),
    ];
    let made = subscription::execute_counting(
        "update braid.subscription_table set state = 'ready', copy_lsn = $3::pg_lsn, copy_snapshot = coalesce($6::pg_snapshot, copy_snapshot), rows_copied = $4, bytes_copied = $5, \
         truncate_first = false, unless_filled = false, made_anew = false, copy_began_at = null, ready_at = clock_timestamp(), copy_error = null, copy_error_sqlstate = null, \
         copy_error_detail = null, copy_error_hint = null, copy_error_context = null, copied_relation = $7::oid, copied_lsn = $8::pg_lsn \
         where subscription_id = $1 and relation = $2::oid and state = 'copying'",
        &arguments,
    )?;
    if made == 1 {
        // The positions of an earlier copy do not count any more.
        subscription::execute_counting(
            "delete from braid.copied_position where relation = $1::oid",
            &[i64::from(task.relation).into()],
        )?;
        tell_appliers(task);
        return Ok(());
    }
    // The table was dropped, refreshed or resynced meanwhile: the copied rows must not stay.
    Err(PgError::new(
        SqlState::SerializationFailure,
        "the table's state was changed while it was copied",
    ))
}

/// Make the table ready without a copy: all of its changes are applied.
pub(super) fn leave_as_it_is(task: &Task) -> Result<(), PgError> {
    subscription::execute_counting(
        "update braid.subscription_table set state = 'ready', copy_lsn = null, copy_snapshot = null, copy_began_at = null, unless_filled = false, made_anew = false, \
         ready_at = clock_timestamp(), copy_error = null, copy_error_sqlstate = null, copy_error_detail = null, copy_error_hint = null, copy_error_context = null, \
         copied_relation = null, copied_lsn = null where subscription_id = $1 and relation = $2::oid",
        &key(task),
    )?;
    tell_appliers(task);
    Ok(())
}

/// Has appliers with a current transaction read again from which position on the table's changes
/// count.
fn tell_appliers(task: &Task) {
    relation::invalidate(task.relation);
}

/// Notes why the copy failed.
pub(super) fn record_failure(task: &Task, failure: &PgError) -> Result<(), PgError> {
    let failure = &failure
        .clone()
        .with_hint_of_cause("Then run braid.enable_subscription.");
    let hint = failure
        .hint
        .as_deref()
        .or_else(|| hint(failure.sqlstate))
        .or_else(|| {
            (!is_permanent(failure, false)).then(|| policy::transient_hint(failure.sqlstate))
        });
    let hint = hint.map(|hint| in_full(hint, task)).transpose()?;
    let [subscription, relation] = key(task);
    let arguments = [
        subscription,
        relation,
        failure.message.as_str().into(),
        failure.sqlstate.to_string().into(),
        failure.detail.as_deref().into(),
        hint.into(),
        failure.context().into(),
    ];
    subscription::execute_counting(
        "update braid.subscription_table set state = 'waiting', copy_error = $3, copy_error_sqlstate = $4, \
         copy_error_detail = $5, copy_error_hint = $6, copy_error_context = $7 \
         where subscription_id = $1 and relation = $2::oid and state <> 'ready'",
        &arguments,
    )
    .map(|_| ())
}

/// The hint with the arguments of the calls that it names.
fn in_full(hint: &str, task: &Task) -> Result<String, PgError> {
    let found = subscription::rows(
        "select subscription_name::text, $2::oid::regclass::text from braid.subscription where subscription_id = $1",
        &key(task),
    )?;
    let Some([Some(name), table]) = found.first().map(Vec::as_slice) else {
        return Ok(hint.to_owned());
    };
    let subject = Subject {
        subscription: name,
        position: None,
        table: table.as_deref(),
    };
    Ok(with_arguments(hint, subject))
}

/// A hint for an error that PostgreSQL raises while it fills a table.
fn hint(sqlstate: SqlState) -> Option<&'static str> {
    match &sqlstate.class() {
        b"22" => Some(
            "Give the column a type here that takes what the provider has, then run braid.enable_subscription.",
        ),
        b"23" => Some(
            "Drop the constraint here, or change the rows that violate it at the node where they are wrong, then run \
             braid.enable_subscription. What is deleted here is deleted on the nodes that subscribe to this one, too.",
        ),
        _ => None,
    }
}

/// A task as arguments of a statement: subscription and table.
pub(super) fn key(task: &Task) -> [DatumWithOid<'static>; 2] {
    [
        i64::from(task.subscription).into(),
        i64::from(task.relation).into(),
    ]
}
