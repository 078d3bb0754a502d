//! A copy worker: one table, then it ends. Started by the [`Coordinator`](super::Coordinator),
//! which learns the result from the catalog.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_apply::{is_in_the_way, meanwhile};
use braid_bgworker::copy_query::{OwnRows, Published};
use braid_bgworker::key_columns::KeyColumn;
use braid_bgworker::policy;
use braid_bgworker::reason::Reason;
use braid_bgworker::sqlstate::SqlState;
use braid_node::origin::COPIED;
use braid_node::rate_limit::Limiter;
use braid_node::registry::{self, TableEntry};
use braid_node::subscription;
use braid_node::{crash, tombstone};
use braid_postgres::error::{self, PgError};
use braid_postgres::session_origin;
use braid_postgres::worker::{self, Extra};
use pgrx::pg_sys;

use super::load::{Filled, Filling, Purpose, Target};
use super::record::{From, Start, begin, finish, key, leave_as_it_is, record_failure, record_plan};
use super::source::Source;
use super::{held, is_permanent, try_lock, versions};

/// The task of a copy worker.
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
    /// How often the table's copy has failed in a row.
    pub failures: u32,
}

/// If a row of another node, or of this one, keeps a row of the provider out, the two will conflict
/// on these nodes too, and one is deleted. The table is copied again until its copy has failed this
/// often.
const UNTIL_THEY_MEET: u32 = 6;
/// Rows that are kept out and may come with the changes that follow.
const MET_AT_A_TIME: usize = 1000;
/// A table that need not be copied waits this often, and this long, for its local writers: their
/// commits may wait for the very changes that wait for the copy (`synchronous_standby_names`).
pub(super) const LOCK_ATTEMPTS: u32 = 2;
pub(super) const LOCK_TIMEOUT: &str = "2s";

impl Task {
    /// As a worker's `bgw_extra`.
    #[must_use]
    pub fn pack(&self) -> Extra {
        let words = [
            u64::from(self.subscription),
            u64::from(self.relation),
            self.lsn,
            u64::from(self.failures),
        ];
        Extra::pack_with_text(words, &self.snapshot)
    }

    fn unpack(extra: &Extra) -> Self {
        let number = |index| u32::try_from(extra.word(index)).unwrap_or(0);
        Self {
            subscription: number(0),
            relation: number(1),
            lsn: extra.word(2),
            failures: number(3),
            snapshot: extra.text::<4>(),
        }
    }
}

/// A provider in recovery may lack objects that exist once it is promoted. The coordinator knows a
/// failure by its SQLSTATE alone, so a failure that may pass gets the SQLSTATE of a server that is
/// not ready.
fn of_standby(failure: PgError) -> PgError {
    if !failure.in_recovery || !is_permanent(&failure, true) {
        return failure;
    }
    let message = format!("the provider, a standby, reported: {}", failure.message);
    PgError {
        detail: failure.detail,
        ..PgError::new(SqlState::CannotConnectNow, message).with_hint(policy::STANDBY_HINT)
    }
}

/// A copy worker's main function; `argument` is the OID of the database.
pub fn worker_main(argument: pg_sys::Datum) {
    worker::initialize();
    worker::connect(u32::try_from(argument.value()).unwrap_or(0));
    let task = Task::unpack(&Extra::mine());
    crash::enter_copying(task.subscription, task.relation);
    let outcome = error::catch(|| run(&task)).and_then(|outcome| outcome);
    if let Err(mut failure) = outcome {
        error::abort();
        failure = of_standby(failure);
        // libpq's messages have line breaks.
        failure.message = failure
            .message
            .lines()
            .map(str::trim)
            .collect::<Vec<_>>()
            .join(" ");
        failure.log(&format!("{} failed", worker::my_name()));
        if let Err(second) = error::transaction(|| record_failure(&task, &failure)) {
            second.log("could not record why copying a table failed");
        }
    }
}

/// Makes text forms, triggers and names independent of this server's settings. The provider's side
/// does the same.
fn pin_settings() {
    for (name, value) in [
        ("session_replication_role", "replica"),
        ("search_path", "pg_catalog"),
        ("datestyle", "ISO"),
        ("intervalstyle", "postgres"),
        ("extra_float_digits", "3"),
        ("lc_monetary", "C"),
        ("bytea_output", "hex"),
        ("xmloption", "content"),
        ("statement_timeout", "0"),
        ("lock_timeout", "0"),
        // Of two that wait for each other an applier, or a session, gives way: it has less to do
        // again.
        ("deadlock_timeout", "10s"),
        // Nothing before the last commit needs to last: a table that is not ready is copied again.
        ("synchronous_commit", "off"),
    ] {
        worker::set(name, value);
    }
}

fn run(task: &Task) -> Result<(), PgError> {
    pin_settings();
    let counters = registry::own_table(task.subscription, task.relation);
    if let Some(counters) = counters {
        counters.copy_rows.store(0, Ordering::Relaxed);
        counters.copy_bytes.store(0, Ordering::Relaxed);
    }
    let before = snapshot_before(task)?;
    let Some(start) = error::transaction(|| begin(task, before.as_deref()))? else {
        return Ok(());
    };
    begin_others(task, before.as_deref())?;
    if start.unless_filled {
        worker::set("lock_timeout", LOCK_TIMEOUT);
    }
    worker::report_activity(&format!("copying {}.{}", start.namespace, start.name));
    // Another attempt may find local rows that keep the provider's rows out. The provider decides
    // which of two such rows is deleted, once it has both.
    let node = error::transaction(subscription::local_node)?;
    let has_own = task.failures > 0 && start.began_at.is_some() && start.first_lsn.is_some();
    if start.made_anew || has_own {
        await_own(task, &start, node.as_deref().unwrap_or_default())?;
    }
    // A table that is emptied is copied only once the provider has what was written to it locally.
    let mut source = if start.truncate {
        Source::look(&start.subscription)?
    } else {
        Source::open(&start.subscription, &task.snapshot, task.lsn)?
    };
    let since = node.clone().zip(start.began_at.clone());
    let since = since.map(|(node, since)| OwnRows { node, since });
    let node = node.unwrap_or_default();
    let publications = &start.subscription.options.publications;
    let published = source.published(publications, &start.namespace, &start.name, since, &node);
    let mut published = match published {
        // No table is there to be copied. Changes from before it was dropped arrive by the stream.
        Err(failure) if failure.reason == Some(Reason::TableDropped) => {
            pgrx::log!(
                "{}: the table is not at the provider any more, and not copied",
                worker::my_name()
            );
            return error::transaction(|| leave_as_it_is(task));
        }
        published => published?,
    };
    let may_ask = held::may_ask(&mut source.connection)?;
    let is_held = is_held(task, &start, &published, &mut source, may_ask)?;
    let first_lsn = start.first_lsn.unwrap_or(source.lsn);
    let snapshot =
        (start.first_lsn.is_none() && !start.truncate).then_some(source.snapshot.as_str());
    error::transaction(|| record_plan(task, &published, first_lsn, snapshot))?;
    worker::set("synchronous_commit", "local");
    // Neither sent on nor counted as local; RecordTransactionCommit does not advance this id, so it
    // needs no set-up.
    session_origin::set(COPIED);
    if is_held {
        // The provider's copy of this node's rows replaces the local ones.
        published.own = None;
    }
    if is_held || (start.truncate && may_ask) {
        // Most of it while nobody has to wait for that.
        let behind = || {
            held::await_provider(task, &start.subscription, published.oid, held::PATIENCE).map(drop)
        };
        error::transaction(behind)?;
    }
    let filled = Cell::new(None);
    let outcome = error::transaction(|| {
        let plan = Plan {
            start: &start,
            published: &published,
            counters,
            may_ask,
            is_held,
        };
        fill(task, &plan, source, &filled)
    });
    let Err(met) = outcome else {
        return Ok(());
    };
    let may_pass = filled.get() == Some(Filling::Empty)
        && is_in_the_way(met.sqlstate)
        && error::transaction(|| versions::others_write(task.subscription))?
        && error::transaction(|| Target::lock(task.relation, Purpose::Fill)?.is_empty())
            .is_ok_and(|is_empty| !is_empty);
    if !may_pass {
        return Err(met);
    }
    // Another node's row, by its own subscription. Beside it the table is filled at the next
    // attempt.
    Err(PgError::new(
        SqlState::SerializationFailure,
        "a copied row was written on this node during the copy",
    )
    .with_detail(met.message)
    .with_hint("The table is copied again by itself, next to the existing rows."))
}

/// A snapshot of the provider from before rows of this node may stay in the table, unless an
/// attempt has noted one. The leader holds the table's changes back since before this worker was
/// started. So whatever the snapshot does not see comes with the stream. `None` where the provider
/// is not reached: the copy itself says why.
fn snapshot_before(task: &Task) -> Result<Option<String>, PgError> {
    let wanted = error::transaction(|| {
        let found = subscription::rows(
            "select 1::text from braid.subscription_table where subscription_id = $1 and relation = $2::oid \
             and state <> 'ready' and not truncate_first and copy_snapshot is null",
            &key(task),
        )?;
        if found.is_empty() {
            return Ok(None);
        }
        subscription::load(task.subscription)
    })?;
    let source = wanted.map(|subscription| Source::look(&subscription));
    Ok(source.and_then(Result::ok).map(|source| source.snapshot))
}

/// Waits until the provider has all that this node wrote to the table, or to its predecessor: then
/// the copy includes it. If the provider waits for this node in turn, the copy goes on without.
fn await_own(task: &Task, start: &Start, node: &str) -> Result<(), PgError> {
    let mut source = Source::look(&start.subscription)?;
    let publications = &start.subscription.options.publications;
    let published = source.published(publications, &start.namespace, &start.name, None, node);
    let Ok(published) = published else {
        // The copy itself says why.
        return Ok(());
    };
    if !held::may_ask(&mut source.connection)? {
        return Ok(());
    }
    drop(source);
    let wait =
        || held::await_provider(task, &start.subscription, published.oid, OWN_PATIENCE).map(drop);
    match error::transaction(wait) {
        Err(late)
            if late.sqlstate == SqlState::SerializationFailure && task.failures >= OWN_ATTEMPTS =>
        {
            late.log(&format!(
                "{}: the table is copied all the same",
                worker::my_name()
            ));
            Ok(())
        }
        outcome => outcome,
    }
}

/// Facts about a copy, read before the table is filled.
struct Plan<'a> {
    start: &'a Start,
    published: &'a Published,
    counters: Option<&'static TableEntry>,
    /// The connecting role may ask the provider how far it has applied this node's changes.
    may_ask: bool,
    /// The table is locked while positions are read ([`held`]).
    is_held: bool,
}

/// Whether the table has to be locked for its copy: others than the provider write to it, and
/// versions do not say which of their changes are in the copy.
fn is_held(
    task: &Task,
    start: &Start,
    published: &Published,
    source: &mut Source,
    may_ask: bool,
) -> Result<bool, PgError> {
    // If the table joins with its first change, all its changes are in the stream.
    if start.unless_filled {
        return Ok(false);
    }
    if start.replaces {
        return if may_ask {
            Ok(true)
        } else {
            Err(PgError::new(
                SqlState::InsufficientPrivilege,
                "the role that connects to the provider may not ask which changes of this node the provider has",
            )
            .with_hint("Grant braid_monitor to it there."))
        };
    }
    let (others_write, is_keyless, has_rules) = error::transaction(|| {
        Ok((
            versions::others_write(task.subscription)?,
            Target::lock(task.relation, Purpose::Fill)?.is_keyless()?,
            held::has_rules(task.relation)?,
        ))
    })?;
    if !others_write {
        return Ok(false);
    }
    let wanted = is_keyless
        || has_rules
        || (may_ask && held::has_rules_there(&mut source.connection, published.oid)?);
    if wanted && !may_ask {
        held::warn();
    }
    Ok(wanted && may_ask)
}

/// Fills the table, and makes it ready. Sets `filled` as soon as it is known what the table
/// contained.
fn fill(
    task: &Task,
    plan: &Plan<'_>,
    source: Source,
    filled: &Cell<Option<Filling>>,
) -> Result<(), PgError> {
    let Plan {
        start, published, ..
    } = plan;
    let purpose = if start.truncate {
        Purpose::Truncate
    } else {
        Purpose::Fill
    };
    let target = Target::lock(task.relation, purpose)?;
    let mut contents = None;
    let source = if plan.is_held {
        drop(source);
        if start.replaces {
            target.lock_out_lockers()?;
        } else {
            target.lock_out_writers()?;
        }
        let (held, source) = held::take(task, &start.subscription, published)?;
        held.make_room(&target, start.replaces)?;
        contents = Some(held);
        source
    } else if start.truncate {
        drop(source);
        if plan.may_ask {
            // Local rows that have not reached the provider yet would be lost when the table is
            // emptied.
            held::await_provider(task, &start.subscription, published.oid, held::PATIENCE)?;
        }
        Source::open(&start.subscription, "", 0)?
    } else {
        source
    };
    let is_keyless = target.is_keyless()?;
    let (lsn, snapshot) = (source.lsn, source.snapshot.clone());
    let copied_lsn = lsn;
    let (filling, lsn) = match start.first_lsn {
        _ if start.truncate => (Filling::Truncate, lsn),
        // Rows of its own that the provider does not have.
        _ if plan.is_held && !is_keyless && !target.is_empty()? => (Filling::Beside, lsn),
        _ if plan.is_held => (Filling::Empty, lsn),
        // Rows that were written locally since the first attempt may have been changed at the
        // provider before this attempt's snapshot. The changes since the first snapshot were held
        // back, and all of them are applied.
        Some(first) if !target.is_empty()? => (Filling::Beside, first.min(lsn)),
        _ => (Filling::Empty, lsn),
    };
    // If nobody could write meanwhile, a blocking row stays.
    filled.set((!plan.is_held).then_some(filling));
    let run_as = start
        .subscription
        .options
        .run_as_owner
        .then_some(start.subscription.owner);
    let limiter = Limiter::new(task.subscription);
    let mut done = target.fill(
        source,
        published,
        filling,
        &start.subscription,
        plan.counters,
        limiter,
    )?;
    let reaches = versions::bring_along(
        task,
        published,
        &mut done.source,
        versions::Reach {
            is_keyless: plan.is_held && is_keyless,
            joins: start.replaces,
            has_own: filling == Filling::Beside && !plan.is_held,
        },
    )?;
    // While it was emptied, or held, nobody could write.
    if filling != Filling::Truncate && (reaches.is_some() || filling == Filling::Beside) {
        target.lock_out_writers()?;
    }
    if filling == Filling::Beside {
        // A row that blocked another one may be deleted by now.
        done.copied.rows += target.merge_again(&done.columns, run_as)?;
        if let (Some(_), Some(since)) = (target.rows_kept_out()?, reaches) {
            make_room(task, &target, (since, run_as), &mut done)?;
        }
        if let Some(missing) = target.rows_kept_out()?
            && !come_later(task, published, &target, &mut done.source)?
        {
            return Err(kept_out(task, missing));
        }
    }
    let was_written = filling == Filling::Beside || (filling == Filling::Empty && !plan.is_held);
    if let Some(since) = reaches.filter(|_| was_written) {
        settle(task, &target, filling, (since, run_as), &mut done)?;
    }
    // If local rows stay, the snapshot stored with the first attempt's position stays too.
    let snapshot = (plan.is_held || filling != Filling::Beside).then_some(&*snapshot);
    let from = From {
        relation: published.oid,
        copied_lsn,
        copy_lsn: lsn,
        snapshot,
    };
    finish(task, &from, done.copied)?;
    match contents {
        Some(contents) => contents.remember(task),
        None => Ok(()),
    }
}

/// The error for rows of the provider that local rows keep out. If the provider receives the local
/// rows as well, one of two such rows is deleted.
fn kept_out(task: &Task, missing: PgError) -> PgError {
    if !is_in_the_way(missing.sqlstate) || task.failures >= UNTIL_THEY_MEET {
        return missing;
    }
    PgError::new(SqlState::SerializationFailure, missing.message).with_hint(
        "The table is copied again by itself: one of two such rows leaves as soon as the nodes that wrote them know of both.",
    )
}

/// Whether all rows that are kept out arrive with the changes that follow: sessions of the provider
/// have written them since the first attempt's snapshot. Then they conflict as changes do.
fn come_later(
    task: &Task,
    published: &Published,
    target: &Target,
    source: &mut Source,
) -> Result<bool, PgError> {
    let found = subscription::rows(
        "select copy_snapshot::text from braid.subscription_table where subscription_id = $1 and relation = $2::oid",
        &key(task),
    )?;
    let Some(snapshot) = found
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?)
    else {
        return Ok(false);
    };
    let keys = target.missing_keys(MET_AT_A_TIME)?;
    if keys.len() > MET_AT_A_TIME {
        return Ok(false);
    }
    let names: Vec<&str> = keys
        .first()
        .map(|key| key.iter().map(|(name, _)| name.as_str()).collect())
        .unwrap_or_default();
    let columns = source.connection.query(&published.key_query(&names))?;
    let columns: Vec<KeyColumn> = columns
        .iter()
        .filter_map(|row| KeyColumn::read(|place| row.get(place)?.as_deref()))
        .collect();
    let question = published.later_query(&keys, &columns, &snapshot);
    let later = source.query(published, &question)?;
    let later = later.get(0, 0).and_then(|count| count.parse().ok());
    Ok(later == Some(keys.len()))
}

/// Removes local rows that keep others out and that the provider has announced as deleted. Then
/// merges the rows that they kept out.
fn make_room(
    task: &Task,
    target: &Target,
    (since, run_as): (i64, Option<u32>),
    filled: &mut Filled,
) -> Result<(), PgError> {
    let node = subscription::local_node()?.unwrap_or_default();
    for leaf in target.leaves()? {
        let leaving = meanwhile::leaving(leaf, task.relation, &HashSet::new(), since, &node)?;
        target.remove(leaf, &leaving.gone)?;
        if !leaving.gone.is_empty() {
            pgrx::log!(
                "{}: {} rows that were written meanwhile leave, since the provider has newer ones that they kept out",
                worker::my_name(),
                leaving.gone.len()
            );
        }
    }
    filled.copied.rows += target.merge_again(&filled.columns, run_as)?;
    Ok(())
}

/// Compares the copied rows with changes that arrived or were made locally while the table was
/// filled: of each row the newest version stays. No other session writes to the table now.
fn settle(
    task: &Task,
    target: &Target,
    filling: Filling,
    (since, run_as): (i64, Option<u32>),
    filled: &mut Filled,
) -> Result<(), PgError> {
    let node = subscription::local_node()?.unwrap_or_default();
    let leaves = target.leaves()?;
    let deleted_here = tombstone::received(&leaves, since)?;
    let (mut deleted, mut replaced) = (0, 0);
    loop {
        let mut again = false;
        for (&leaf, deleted_here) in &deleted_here {
            let leaving = meanwhile::leaving(leaf, task.relation, deleted_here, since, &node)?;
            for left in [&leaving.deleted, &leaving.gone, &leaving.replaced] {
                target.remove(leaf, left)?;
            }
            deleted += leaving.deleted.len() + leaving.gone.len();
            replaced += leaving.replaced.len();
            again |= !leaving.replaced.is_empty();
        }
        if !again {
            break;
        }
        if filling != Filling::Beside {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "copied rows were written on this node during the copy",
            ));
        }
        // Also with rows that were removed as deleted: the next round finds them once more.
        filled.copied.rows += target.merge_again(&filled.columns, run_as)?;
    }
    if deleted + replaced > 0 {
        pgrx::log!(
            "{}: of what was written meanwhile, {replaced} rows were older than the copied ones, and {deleted} were deleted here or at the provider",
            worker::my_name()
        );
    }
    Ok(())
}

/// Time limit of one wait until the provider has this node's changes, and number of attempts.
const OWN_PATIENCE: Duration = Duration::from_secs(3);
const OWN_ATTEMPTS: u32 = 2;

/// Say of the tables that wait for their turn that they are empty, as long as they are: other
/// nodes' changes may come before their copy, also by a subscription that is yet to be made.
/// `before` is [`snapshot_before`].
fn begin_others(task: &Task, before: Option<&str>) -> Result<(), PgError> {
    let waiting = error::transaction(|| {
        // One worker does it for all, and keeps others from it for as long as it runs.
        if !try_lock(task.subscription, 0, true) {
            return Ok(Vec::new());
        }
        subscription::rows(
            "select relation::oid::text from braid.subscription_table where subscription_id = $1 and relation <> $2::oid \
             and state = 'waiting' and copy_began_at is null and not truncate_first",
            &key(task),
        )
    })?;
    // If a session has been writing to a table for long, the table is not empty any more.
    worker::set("lock_timeout", "1s");
    for relation in waiting
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse().ok())
    {
        let noted = error::transaction(|| {
            let other = Task {
                relation,
                ..task.clone()
            };
            if Target::lock(relation, Purpose::CheckEmpty)?.is_empty()? {
                let [subscription, relation] = key(&other);
                subscription::execute_counting(
                    "update braid.subscription_table set copy_began_at = clock_timestamp(), \
                     copy_snapshot = coalesce(copy_snapshot, $3::pg_snapshot) where subscription_id = $1 \
                     and relation = $2::oid and state = 'waiting' and copy_began_at is null and not truncate_first",
                    &[subscription, relation, before.into()],
                )?;
            }
            Ok(())
        });
        // Dropped, or not to be had: its own copy says so.
        if let Err(failure) = noted
            && policy::for_apply(failure.sqlstate) == policy::Policy::Reconnect
        {
            return Err(failure);
        }
    }
    worker::set("lock_timeout", "0");
    Ok(())
}
