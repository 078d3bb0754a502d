//! A copy worker: one table, then it ends. Started by the [`Coordinator`](super::Coordinator), which learns from the catalog what
//! came of it.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_apply::{is_in_the_way, meanwhile};
use braid_bgworker::copy_query::{OwnRows, Published};
use braid_bgworker::policy;
use braid_gir::{lsn_text, parse_lsn};
use braid_node::origin::COPIED;
use braid_node::rate_limit::Limiter;
use braid_node::registry::{self, TableEntry};
use braid_node::subscription::{self, Subscription};
use braid_node::{crash, tombstone};
use braid_postgres::error::{self, LOCK_NOT_AVAILABLE, PgError};
use braid_postgres::worker::{self, Extra};
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use super::load::{Copied, Filled, Filling, Purpose, Target};
use super::source::{GONE, Source};
use super::{held, is_permanent, try_lock, versions};

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
    /// How often the table's copy has failed in a row.
    pub failures: u32,
}

/// Where another node's row keeps one of the provider's out, the two will meet on these nodes too, and one leaves. The table is copied again
/// until its copy has failed so often.
const UNTIL_THEY_MEET: u32 = 6;
/// A table that need not be copied waits so often, and for so long, for those who write to it here: their commits may wait for the very changes
/// that wait for the copy (`synchronous_standby_names`).
const LOCK_ATTEMPTS: u32 = 2;
const LOCK_TIMEOUT: &str = "2s";

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

/// A copy worker's main function; `argument` is the OID of the database.
pub fn worker_main(argument: pg_sys::Datum) {
    worker::initialize();
    worker::connect(u32::try_from(argument.value()).unwrap_or(0));
    let task = Task::unpack(&Extra::mine());
    crash::enter_copying(task.subscription, task.relation);
    let outcome = error::catch(|| run(&task)).and_then(|outcome| outcome);
    if let Err(mut failure) = outcome {
        error::abort();
        // libpq's messages have line breaks.
        failure.message = failure
            .message
            .lines()
            .map(str::trim)
            .collect::<Vec<_>>()
            .join(" ");
        failure.log(&format!("{} failed", my_name()));
        if let Err(second) = error::transaction(|| record_failure(&task, &failure)) {
            second.log("could not record why copying a table failed");
        }
    }
}

/// This worker's name, which has those of the subscription and of the table.
fn my_name() -> String {
    // SAFETY: MyBgworkerEntry is this worker's own registration; PostgreSQL ends the name with a zero byte.
    unsafe {
        let name = (*pg_sys::MyBgworkerEntry).bgw_name.as_ptr();
        std::ffi::CStr::from_ptr(name)
            .to_string_lossy()
            .into_owned()
    }
}

/// What makes text forms, triggers and names independent of this server's settings, as the provider's side does.
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
        // Of two that wait for each other an applier, or a session, gives way: it has less to do again.
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
    let Some(start) = error::transaction(|| begin(task))? else {
        return Ok(());
    };
    begin_others(task)?;
    if start.unless_filled {
        worker::set("lock_timeout", LOCK_TIMEOUT);
    }
    worker::report_activity(&format!("copying {}.{}", start.namespace, start.name));
    if start.made_anew {
        await_own(task, &start)?;
    }
    // One that is emptied is copied as it is once the provider has what was written here.
    let mut source = if start.truncate {
        Source::look(&start.subscription)?
    } else {
        Source::open(&start.subscription, &task.snapshot, task.lsn)?
    };
    let since = match &start.began_at {
        Some(began_at) => error::transaction(subscription::local_node)?.map(|node| OwnRows {
            node,
            since: began_at.clone(),
        }),
        None => None,
    };
    let publications = &start.subscription.options.publications;
    let published = source.published(publications, &start.namespace, &start.name, since);
    let mut published = match published {
        // Nothing is there to be copied. Changes that were made before it was dropped come.
        Err(failure) if failure.message == GONE => {
            pgrx::log!(
                "{}: the table is not at the provider any more, and not copied",
                my_name()
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
    // Neither sent on nor counted as local; RecordTransactionCommit does not advance this id, so it needs no set-up.
    // SAFETY: process-local variable of a process that does nothing else.
    unsafe { pg_sys::replorigin_session_origin = COPIED };
    if is_held {
        // What the provider has of this node replaces what is here.
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
        && is_in_the_way(&met.sqlstate)
        && error::transaction(|| versions::others_write(task.subscription))?
        && error::transaction(|| Target::lock(task.relation, Purpose::Fill)?.is_empty())
            .is_ok_and(|is_empty| !is_empty);
    if !may_pass {
        return Err(met);
    }
    // Another node's row, by its own subscription. Beside it the table is filled at the next attempt.
    Err(
        PgError::new("40001", "a row that was copied was written here meanwhile")
            .with_detail(met.message)
            .with_hint("The table is copied again by itself, beside what is there."),
    )
}

/// Wait until the provider has what this node wrote to the table's predecessor: it is in the copy then. Where the provider waits for this node in turn, the
/// copy goes on without.
fn await_own(task: &Task, start: &Start) -> Result<(), PgError> {
    let mut source = Source::look(&start.subscription)?;
    let publications = &start.subscription.options.publications;
    let published = source.published(publications, &start.namespace, &start.name, None);
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
        Err(late) if late.sqlstate == "40001" && task.failures >= OWN_ATTEMPTS => {
            late.log(&format!("{}: the table is copied all the same", my_name()));
            Ok(())
        }
        outcome => outcome,
    }
}

/// What is known of the copy before the table is filled.
struct Plan<'a> {
    start: &'a Start,
    published: &'a Published,
    counters: Option<&'static TableEntry>,
    /// The connecting role may ask the provider how far it has applied what is here.
    may_ask: bool,
    /// The table is held while positions are read ([`held`]).
    is_held: bool,
}

/// Whether the table has to be held for its copy: others than the provider write to it, and what of that is in the copy is not told by versions.
fn is_held(
    task: &Task,
    start: &Start,
    published: &Published,
    source: &mut Source,
    may_ask: bool,
) -> Result<bool, PgError> {
    // One that joins with its first change has all of them in the stream.
    if start.unless_filled {
        return Ok(false);
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

/// Fill the table, and make it ready. What it was filled beside is put into `filled` as soon as that is known.
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
        target.lock_out_writers()?;
        let (held, source) = held::take(task, &start.subscription, published)?;
        held.make_room(&target)?;
        contents = Some(held);
        source
    } else if start.truncate {
        drop(source);
        if plan.may_ask {
            // What was written here, and has not come there yet, would be gone with what is emptied.
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
        // Rows that were written here since the first attempt may have been changed at the provider before this one's
        // snapshot. The changes since the first one's were held back, and all of them are applied.
        Some(first) if !target.is_empty()? => (Filling::Beside, first.min(lsn)),
        _ => (Filling::Empty, lsn),
    };
    // Where nobody could write meanwhile, what is in the way stays there.
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
        plan.is_held && is_keyless,
    )?;
    // While it was emptied, or held, nobody could write.
    if filling != Filling::Truncate && (reaches.is_some() || filling == Filling::Beside) {
        target.lock_out_writers()?;
    }
    if filling == Filling::Beside {
        // What was in the way of one may be gone again.
        done.copied.rows += target.merge_again(&done.columns, run_as)?;
        target
            .check_all_came()
            .map_err(|missing| kept_out(task, missing))?;
    }
    let was_written = filling == Filling::Beside || (filling == Filling::Empty && !plan.is_held);
    if let Some(since) = reaches.filter(|_| was_written) {
        settle(task, &target, filling, (since, run_as), &mut done)?;
    }
    // Beside what is here, what was recorded with the first attempt's position stays.
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

/// Rows of the provider's are kept out by others that are here. Where these came from other nodes, the provider hears of them as well.
fn kept_out(task: &Task, missing: PgError) -> PgError {
    if !is_in_the_way(&missing.sqlstate) || task.failures >= UNTIL_THEY_MEET {
        return missing;
    }
    PgError::new("40001", missing.message).with_hint(
        "The table is copied again by itself: one of two such rows leaves as soon as the nodes that wrote them know of both.",
    )
}

/// What other nodes' changes have done here while the table was filled meets what was copied: of each row the newest version stays. Nobody
/// else writes to the table now.
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
            target.remove(leaf, &leaving.deleted)?;
            target.remove(leaf, &leaving.replaced)?;
            deleted += leaving.deleted.len();
            replaced += leaving.replaced.len();
            again |= !leaving.replaced.is_empty();
        }
        if !again {
            break;
        }
        if filling != Filling::Beside {
            return Err(PgError::new(
                "40001",
                "rows that were copied were written here meanwhile",
            ));
        }
        // With what left as deleted, too, which is found once more.
        filled.copied.rows += target.merge_again(&filled.columns, run_as)?;
    }
    if deleted + replaced > 0 {
        pgrx::log!(
            "{}: of what was written meanwhile, {replaced} rows were older than the copied ones, and {deleted} were deleted here or at the provider",
            my_name()
        );
    }
    Ok(())
}

/// How long a copy waits for the provider to have what this node has written, and how often.
const OWN_PATIENCE: Duration = Duration::from_secs(3);
const OWN_ATTEMPTS: u32 = 2;

struct Start {
    subscription: Subscription,
    namespace: String,
    name: String,
    truncate: bool,
    /// The table was empty at this time; what was written here since then belongs in it. `None`: it is emptied by the copy.
    began_at: Option<String>,
    /// Position of the first attempt; `None`: this is the first.
    first_lsn: Option<u64>,
    /// It need not be copied where that would have to wait for whoever writes here.
    unless_filled: bool,
    /// It has taken the place of a table of the same name, to which this node may have written.
    made_anew: bool,
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
        && text(4).as_deref() == Some(LOCK_NOT_AVAILABLE)
    {
        pgrx::log!(
            "{}: the table is written to, and not copied: all of its changes come",
            my_name()
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
        made_anew: text(5).as_deref() == Some("true"),
    };
    // Rows that were written here since the table was made keep their place in it through failures, but
    // whoever mended the last one may have emptied it: then all rows are to be copied.
    let may_be_emptied = start.made_anew
        && text(4).is_some_and(|sqlstate| is_permanent(&PgError::new(&sqlstate, ""), false));
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
    } else {
        let target = Target::lock(task.relation, Purpose::CheckEmpty)?;
        if unless_filled && !target.is_empty()? {
            pgrx::log!(
                "{}: the table has rows by now, and is not copied: all of its changes come",
                my_name()
            );
            leave_as_it_is(task)?;
            return Ok(None);
        }
        target.check_empty()?;
        target
    };
    start.namespace = target.namespace;
    start.name = target.name;
    // The clock is read while nobody can write to the table: whatever commits in it from now on does so later.
    subscription::execute_counting(
        "update braid.subscription_table set state = 'copying', rows_copied = null, bytes_copied = null, \
         rows_total = null, bytes_total = null, ready_at = null, copy_error_sqlstate = null, \
         copy_began_at = case when not truncate_first then coalesce(copy_began_at, clock_timestamp()) end \
         where subscription_id = $1 and relation = $2::oid",
        &key(task),
    )?;
    Ok(Some(start))
}

/// Say of the tables that wait for their turn that they are empty, as long as they are: other nodes' changes may come before their copy, also by
/// a subscription that is yet to be made.
fn begin_others(task: &Task) -> Result<(), PgError> {
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
    // Whoever writes to one for long has not left it empty.
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
                subscription::execute_counting(
                    "update braid.subscription_table set copy_began_at = clock_timestamp() where subscription_id = $1 \
                     and relation = $2::oid and state = 'waiting' and copy_began_at is null and not truncate_first",
                    &key(&other),
                )?;
            }
            Ok(())
        });
        // Dropped, or not to be had: its own copy says so.
        if let Err(failure) = noted
            && policy::for_apply(&failure.sqlstate) == policy::Policy::Reconnect
        {
            return Err(failure);
        }
    }
    worker::set("lock_timeout", "0");
    Ok(())
}

fn record_plan(
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

/// What a table was filled from.
struct From<'a> {
    /// OID of the provider's table.
    relation: u32,
    /// Position of the snapshot that was copied.
    copied_lsn: u64,
    /// Changes of transactions that committed from here on are applied.
    copy_lsn: u64,
    /// `None`: that of the first attempt stays.
    snapshot: Option<&'a str>,
}

/// Make the table ready, in the transaction that has filled it.
fn finish(task: &Task, from: &From<'_>, copied: Copied) -> Result<(), PgError> {
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
        // What an earlier copy had is of no concern any more.
        subscription::execute_counting(
            "delete from braid.copied_position where relation = $1::oid",
            &[i64::from(task.relation).into()],
        )?;
        tell_appliers(task);
        return Ok(());
    }
    // Dropped, refreshed or resynced meanwhile: what was copied must not stay.
    Err(PgError::new(
        "40001",
        "the table's state was changed while it was copied",
    ))
}

/// Make the table ready without a copy: all of its changes are applied.
fn leave_as_it_is(task: &Task) -> Result<(), PgError> {
    subscription::execute_counting(
        "update braid.subscription_table set state = 'ready', copy_lsn = null, copy_snapshot = null, copy_began_at = null, unless_filled = false, made_anew = false, \
         ready_at = clock_timestamp(), copy_error = null, copy_error_sqlstate = null, copy_error_detail = null, copy_error_hint = null, copy_error_context = null, \
         copied_relation = null, copied_lsn = null where subscription_id = $1 and relation = $2::oid",
        &key(task),
    )?;
    tell_appliers(task);
    Ok(())
}

/// Those that have a transaction in hand look again from which position on the table's changes count.
fn tell_appliers(task: &Task) {
    // SAFETY: registers an invalidation message with this transaction.
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(pg_sys::Oid::from(task.relation)) };
}

fn record_failure(task: &Task, failure: &PgError) -> Result<(), PgError> {
    let [subscription, relation] = key(task);
    let failure = &failure
        .clone()
        .with_hint_of_cause("Then run braid.enable_subscription.");
    // Whoever mends a failure that does not pass by itself may also empty the table: then all rows are to be copied.
    // Into a table that took another one's place this node may write meanwhile: the next attempt looks itself.
    let starts_anew = is_permanent(failure, false);
    let arguments = [
        subscription,
        relation,
        failure.message.as_str().into(),
        failure.sqlstate.as_str().into(),
        failure.detail.as_deref().into(),
        failure
            .hint
            .as_deref()
            .or_else(|| hint(&failure.sqlstate))
            .or_else(|| (!starts_anew).then(|| policy::transient_hint(&failure.sqlstate)))
            .into(),
        starts_anew.into(),
        failure.context().into(),
    ];
    subscription::execute_counting(
        "update braid.subscription_table set state = 'waiting', copy_error = $3, copy_error_sqlstate = $4, \
         copy_error_detail = $5, copy_error_hint = $6, copy_error_context = $8, copy_began_at = case when made_anew or not $7 then copy_began_at end \
         where subscription_id = $1 and relation = $2::oid and state <> 'ready'",
        &arguments,
    )
    .map(|_| ())
}

/// For what PostgreSQL raises while it fills a table.
fn hint(sqlstate: &str) -> Option<&'static str> {
    match sqlstate.get(..2)? {
        "22" => Some(
            "Give the column a type here that takes what the provider has, then run braid.enable_subscription.",
        ),
        "23" => Some(
            "Drop the constraint here, or change the rows that violate it at the node where they are wrong, then run \
             braid.enable_subscription. What is deleted here is deleted on the nodes that subscribe to this one, too.",
        ),
        _ => None,
    }
}

fn key(task: &Task) -> [DatumWithOid<'static>; 2] {
    [
        i64::from(task.subscription).into(),
        i64::from(task.relation).into(),
    ]
}
