//! The source's part in a join with rows ([`super::data`] has the whole): it reads the rows of the
//! node that joins, decides about each, and writes those that win as changes of its own.
//!
//! Run by the steps process, for a second at a time. Not for: what comes by streams meanwhile.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use braid_bgworker::compare::{Key, differing};
use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::{self, Subscription, execute, execute_counting, rows, rows_written};
use braid_node::{clock, local_version};
use braid_postgres::catalog::{Rights, with_rights, with_settings};
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::{Connection, Mode};
use braid_postgres::subtransaction;
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};

use super::peer::{self, Peer};
use super::{Progress, View, told};
use crate::as_owner::AsOwner;
use crate::compare::table::{At, SETTINGS, Table};
use crate::ingest::rows::{Incoming, Into, UNKNOWN_THERE, decide};

/// Rows that are decided about in one transaction.
const BATCH: u64 = 500;
/// Rows that are in memory at once.
const AT_ONCE: usize = 50;
/// How long one call goes on.
const SLICE: Duration = Duration::from_secs(1);
/// A node that joins is given up for now if it does not answer within this time.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a time counts: much less than what versions and deletions are kept for (an hour), and
/// enough for the transactions that ran when it was taken.
const HOLDS: Duration = Duration::from_mins(20);
/// Microseconds by which the clocks of both nodes may be apart.
const APART: i64 = 300_000_000;

/// The time that rows are decided by, and what has to have ended or come first.
#[derive(Debug)]
struct Epoch {
    member: u64,
    taken: Instant,
    /// By the clock of the node that joins, Unix microseconds.
    time: i64,
    /// Transactions there with smaller ids may have ended before that time, unseen.
    barrier: String,
    /// Subscriptions of this node to other members, and up to where each is to be applied.
    positions: Vec<(String, String)>,
    is_ready: bool,
}

thread_local! {
    /// Taken anew by another process.
    static EPOCH: RefCell<Option<Epoch>> = const { RefCell::new(None) };
}

/// A node that joins, whose rows are taken over.
struct Task<'a> {
    view: &'a View,
    peer: &'a Peer,
    subscription: Subscription,
}

/// Goes on with the rows of nodes that join.
pub(super) fn go_on(view: &View) -> Result<Progress, PgError> {
    let wanted = error::transaction(|| {
        execute_counting(
            "delete from braid.group_merge g \
              where not exists (select from braid.group_member m where m.member_id = g.member_id and m.state = 'joining')",
            &[],
        )?;
        rows(
            "select member_id::text from braid.group_merge where done_at is null order by member_id",
            &[],
        )
    })?;
    let ids = wanted
        .iter()
        .filter_map(|row| row.first()?.as_deref()?.parse::<u64>().ok());
    let mut outcome = Ok(Progress::Done);
    for id in ids {
        let Some(peer) = view.peers.iter().find(|peer| peer.id == id) else {
            continue;
        };
        let this = error::catch(|| go_on_with(view, peer)).and_then(|outcome| outcome);
        let (waits, failure) = match &this {
            Ok(Progress::Waits(what)) => (Some(what.as_str()), None),
            Ok(_) => (None, None),
            Err(failure) => {
                error::abort();
                (None, Some(failure))
            }
        };
        note(id, waits, failure)?;
        outcome = match (outcome, this) {
            (_, Err(failure)) | (Err(failure), _) => Err(failure),
            (Ok(Progress::Moved), _) | (_, Ok(Progress::Moved)) => Ok(Progress::Moved),
            (Ok(Progress::Done), other) => other,
            (before, _) => before,
        };
    }
    outcome
}

fn note(id: u64, waits_for: Option<&str>, failure: Option<&PgError>) -> Result<(), PgError> {
    let (words, hint) = told(failure);
    error::transaction(|| {
        execute(
            "update braid.group_merge set waits_for = $2, last_error = $3, last_hint = $4 \
              where member_id = $1 and (waits_for, last_error, last_hint) is distinct from ($2, $3, $4)",
            &[
                i64::try_from(id).unwrap_or(0).into(),
                waits_for.into(),
                words.into(),
                hint.into(),
            ],
        )
    })
}

fn go_on_with(view: &View, peer: &Peer) -> Result<Progress, PgError> {
    let Some(name) = &peer.subscription else {
        return Ok(Progress::Waits("its subscription to it".to_owned()));
    };
    let Some(subscription) = error::transaction(|| list(peer, name))? else {
        return Ok(Progress::Waits(format!("subscription \"{name}\"")));
    };
    let task = Task {
        view,
        peer,
        subscription,
    };
    let mut connection =
        Connection::open_within(&peer.dsn, "braid group steps", Mode::Sql, PATIENCE)
            .map_err(PgError::from)?;
    connection.look_into_silence(&peer.dsn)?;
    error::transaction(|| task.begin(&mut connection))?;
    let until = Instant::now() + SLICE;
    while Instant::now() < until {
        if let Err(what) = await_time(&task, &mut connection)? {
            return Ok(Progress::Waits(what));
        }
        let next = error::transaction(|| {
            rows(
                "select relation::oid::text from braid.group_merge_table where member_id = $1 and done_at is null order by relation limit 1",
                &[task.member()],
            )
        })?;
        let Some(relation) = next
            .first()
            .and_then(|row| row.first()?.as_deref()?.parse::<u32>().ok())
        else {
            error::transaction(|| {
                execute(
                    "update braid.group_merge set done_at = clock_timestamp() where member_id = $1",
                    &[task.member()],
                )
            })?;
            pgrx::log!(
                "node \"{}\" joins with rows, which are taken over: the view braid.conflict_history has those that have lost",
                peer.name
            );
            return Ok(Progress::Moved);
        };
        let table = error::transaction(|| {
            with_settings(&SETTINGS, || {
                Table::find(&task.subscription, relation, &mut connection)
            })
        })?;
        while Instant::now() < until {
            let outcome = error::transaction(|| {
                with_settings(&SETTINGS, || {
                    task.take_batch(relation, &table, &mut connection)
                })
            });
            match outcome {
                Ok(false) => {}
                Ok(true) => break,
                // Others write to the rows: once more.
                Err(failure) if is_passing(failure.sqlstate) => {
                    return Ok(Progress::Waits(format!(
                        "rows that are written to ({})",
                        failure.message
                    )));
                }
                Err(failure) => return Err(failure),
            }
        }
    }
    Ok(Progress::Moved)
}

fn is_passing(sqlstate: SqlState) -> bool {
    matches!(
        sqlstate,
        SqlState::SerializationFailure | SqlState::DeadlockDetected | SqlState::LockNotAvailable
    )
}

/// Notes which tables there are. Returns the subscription to the node that joins.
fn list(peer: &Peer, name: &str) -> Result<Option<Subscription>, PgError> {
    let found = rows(
        "select subscription_id::text from braid.subscription where subscription_name = $1::name",
        &[name.into()],
    )?;
    let Some(id) = found
        .first()
        .and_then(|row| row.first()?.as_deref()?.parse::<u32>().ok())
    else {
        return Ok(None);
    };
    execute(
        "insert into braid.group_merge_table (member_id, relation) \
         select $1, t.relation from braid.subscription_table t where t.subscription_id = $2 on conflict do nothing",
        &[
            i64::try_from(peer.id).unwrap_or(0).into(),
            i64::from(id).into(),
        ],
    )?;
    subscription::load(id)
}

/// Takes a time if there is none that counts, and says what it waits for until rows may be read.
fn await_time(task: &Task<'_>, connection: &mut Connection) -> Result<Result<(), String>, PgError> {
    let counts = EPOCH.with_borrow(|epoch| {
        epoch
            .as_ref()
            .is_some_and(|epoch| epoch.member == task.peer.id && epoch.taken.elapsed() < HOLDS)
    });
    if !counts {
        let epoch = take_time(task, connection)?;
        EPOCH.set(Some(epoch));
    }
    let Some((barrier, positions, is_ready)) = EPOCH.with_borrow(|epoch| {
        let epoch = epoch.as_ref()?;
        let known = (epoch.barrier.clone(), epoch.positions.clone());
        Some((known.0, known.1, epoch.is_ready))
    }) else {
        return Ok(Err("the time".to_owned()));
    };
    if is_ready {
        return Ok(Ok(()));
    }
    let ended = connection.query(&format!(
        "select pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()) >= '{barrier}'::pg_catalog.xid8"
    ))?;
    if ended.get(0, 0) != Some("t") {
        return Ok(Err(
            "transactions that were running there, prepared ones included".to_owned(),
        ));
    }
    for (subscription, position) in positions {
        if !peer::has_applied(&subscription, &position)? {
            return Ok(Err(format!(
                "subscription \"{subscription}\" to come past what was written before"
            )));
        }
    }
    EPOCH.with_borrow_mut(|epoch| {
        if let Some(epoch) = epoch {
            epoch.is_ready = true;
        }
    });
    Ok(Ok(()))
}

fn take_time(task: &Task<'_>, connection: &mut Connection) -> Result<Epoch, PgError> {
    let taken = Instant::now();
    let unexpected = || {
        PgError::new(
            SqlState::ProtocolViolation,
            "unexpected answer from the node that joins",
        )
    };
    let time = connection.query(
        "select (extract(epoch from pg_catalog.clock_timestamp()) * 1000000)::pg_catalog.int8",
    )?;
    let time: i64 = time
        .get(0, 0)
        .and_then(|text| text.parse().ok())
        .ok_or_else(unexpected)?;
    // Later than the time: whoever has ended before it and is not seen yet is among these.
    let barrier = connection
        .query("select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())")?
        .get(0, 0)
        .and_then(|text| text.parse::<u64>().ok())
        .ok_or_else(unexpected)?
        .to_string();
    let here = timestamp::now().saturating_add(EPOCH_DIFFERENCE);
    if here.abs_diff(time) > APART.unsigned_abs() {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "the clock of node \"{}\" is {} s apart from this one's",
                task.peer.name,
                here.abs_diff(time) / 1_000_000
            ),
        )
        .with_hint("Synchronize the clocks of all nodes. It is tried again."));
    }
    let mut positions = Vec::new();
    for other in &task.view.peers {
        if other.id != task.peer.id
            && other.has_data
            && other.stays()
            && other.state != "joining"
            && let Some(subscription) = &other.subscription
        {
            positions.push((subscription.clone(), other.position()?));
        }
    }
    Ok(Epoch {
        member: task.peer.id,
        taken,
        time,
        barrier,
        positions,
        is_ready: false,
    })
}

/// The time that rows are decided by, Unix microseconds.
fn time() -> i64 {
    EPOCH.with_borrow(|epoch| epoch.as_ref().map_or(0, |epoch| epoch.time))
}

impl Task<'_> {
    fn member(&self) -> pgrx::datum::DatumWithOid<'static> {
        i64::try_from(self.peer.id).unwrap_or(0).into()
    }

    /// Has sequences of this node go on after what is there, once, before the first row comes: two
    /// rows of different things would meet under one number.
    fn begin(&self, connection: &mut Connection) -> Result<(), PgError> {
        let found = rows(
            "select 1::text from braid.group_merge where member_id = $1 and began_at is null",
            &[self.member()],
        )?;
        if found.is_empty() {
            return Ok(());
        }
        raise_sequences(Some(connection))?;
        execute(
            "update braid.group_merge set began_at = clock_timestamp() where member_id = $1",
            &[self.member()],
        )
    }

    /// Decides about the next rows of a table. True if there are none. In a transaction.
    fn take_batch(
        &self,
        relation: u32,
        table: &Table,
        connection: &mut Connection,
    ) -> Result<bool, PgError> {
        subscription::limit_lock_waits()?;
        let listed = table.walk(
            At::There,
            self.last_key(relation)?.as_ref(),
            BATCH,
            connection,
        )?;
        let Some((last, _)) = listed.last().cloned() else {
            self.note_end(relation)?;
            return Ok(true);
        };
        let count = listed.len();
        let keys: Vec<Key> = listed.iter().map(|(key, _)| key.clone()).collect();
        let here = table.with_keys(At::Here, &keys, connection)?;
        let differ = differing(here, listed);
        for some in differ.chunks(AT_ONCE) {
            self.decide_some(relation, table, some, connection)?;
        }
        let time = time();
        self.note_batch(relation, &last, count)?;
        if !differ.is_empty() {
            clock::seen(time.saturating_sub(EPOCH_DIFFERENCE));
            if !local_version::commit_as(time) {
                return Err(PgError::new(
                    SqlState::UndefinedTable,
                    "braid.local_version does not exist",
                ));
            }
        }
        Ok(false)
    }

    /// Decides about the rows with these keys.
    fn decide_some(
        &self,
        relation: u32,
        table: &Table,
        keys: &[Key],
        connection: &mut Connection,
    ) -> Result<(), PgError> {
        let time = time();
        let mut incoming = Vec::with_capacity(keys.len());
        for (seen, values) in table.whole_there(keys, connection)? {
            let (timestamp, node) = seen
                .version
                .unwrap_or_else(|| (UNKNOWN_THERE, self.peer.name.clone()));
            incoming.push(Incoming {
                node,
                // What has come later streams with its own version.
                timestamp: timestamp.min(time.saturating_sub(1)),
                values,
            });
        }
        incoming
            .sort_by(|one, other| (&one.node, one.timestamp).cmp(&(&other.node, other.timestamp)));
        let names = table.columns.iter().map(|column| column.name.clone());
        let columns: Vec<String> = names.collect();
        let into = Into {
            relation,
            columns: &columns,
            key: &table.key,
            time,
            local_node: &self.view.own.name,
            subscription: &self.subscription.name,
        };
        decide(&into, &incoming)?;
        // A row that was deleted there before it was written here must not come back.
        if table.with_keys(At::There, keys, connection)?.len() < incoming.len() {
            return Err(PgError::new(
                SqlState::SerializationFailure,
                "a row was deleted at the node that joins while it was taken over",
            ));
        }
        Ok(())
    }

    /// The last key of a table that was decided about.
    fn last_key(&self, relation: u32) -> Result<Option<Key>, PgError> {
        let found = rows(
            "select unnest(last_key) from braid.group_merge_table where member_id = $1 and relation = $2::oid",
            &[self.member(), i64::from(relation).into()],
        )?;
        let key: Key = found
            .into_iter()
            .filter_map(|row| row.into_iter().next().flatten())
            .collect();
        Ok((!key.is_empty()).then_some(key))
    }

    fn note_batch(&self, relation: u32, last: &Key, count: usize) -> Result<(), PgError> {
        execute(
            "update braid.group_merge_table set last_key = $3::text[], rows_compared = rows_compared + $4 \
              where member_id = $1 and relation = $2::oid",
            &[
                self.member(),
                i64::from(relation).into(),
                braid_postgres::encoding::texts_argument(last),
                i64::try_from(count).unwrap_or(0).into(),
            ],
        )
    }

    fn note_end(&self, relation: u32) -> Result<(), PgError> {
        execute(
            "update braid.group_merge_table set done_at = clock_timestamp() where member_id = $1 and relation = $2::oid",
            &[self.member(), i64::from(relation).into()],
        )
    }
}

/// Has sequences go on after the values that rows of their columns have, here and at the node of a
/// connection. In a transaction.
///
/// # Errors
/// Whatever PostgreSQL raises, and the connection's.
pub(super) fn raise_sequences(mut there: Option<&mut Connection>) -> Result<(), PgError> {
    let owned = rows(
        "select d.objid::text, d.refobjid::text, quote_ident(n.nspname) || '.' || quote_ident(c.relname), quote_ident(a.attname), s.seqmin::text, s.seqmax::text \
           from pg_depend d join pg_sequence s on s.seqrelid = d.objid \
           join pg_class c on c.oid = d.refobjid join pg_namespace n on n.oid = c.relnamespace \
           join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid \
          where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype in ('a', 'i') \
            and not s.seqcycle and s.seqincrement > 0 and c.relpersistence = 'p' \
            and not exists (select from pg_depend e where e.classid = 'pg_class'::regclass and e.objid = d.refobjid and e.deptype = 'e')",
        &[],
    )?;
    for row in owned {
        let [
            Some(sequence),
            Some(oid),
            Some(table),
            Some(column),
            Some(least),
            Some(most),
        ] = row.as_slice()
        else {
            continue;
        };
        let question = format!(
            "select pg_catalog.max({column})::pg_catalog.text from {table} where {column} between {least} and {most}"
        );
        let owner = Rights::OwnerOf(oid.parse::<u32>().unwrap_or(0).into());
        // A rollback releases the locks on the table and its indexes: there may be thousands of
        // sequences. The hundred values below are for what is written from here on.
        let read = || with_rights(owner, || rows(&question, &[]));
        let here = subtransaction::attempt(|| Ok((read()?, false)))?
            .first()
            .and_then(|row| row.first()?.as_deref()?.parse::<i64>().ok());
        let literal = format!("{}::regclass", quote_literal(table));
        let there = match &mut there {
            Some(connection) => AsOwner::outside(connection)?
                .query(connection, &literal, &question)?
                .get(0, 0)
                .and_then(|text| text.parse().ok()),
            None => None,
        };
        let Some(top) = here.max(there) else {
            continue;
        };
        let name = rows(
            "select $1::oid::regclass::text",
            &[sequence.as_str().into()],
        )?;
        let Some(name) = name.first().and_then(|row| row.first()?.clone()) else {
            continue;
        };
        // A hundred values are left out: sessions may draw some between the look and the move.
        rows_written(
            &format!(
                "select setval(s.seqrelid, least(l.last_value + (($1 - l.last_value + s.seqincrement - 1) / s.seqincrement + 100) * s.seqincrement, \
                            l.last_value + (s.seqmax - l.last_value) / s.seqincrement * s.seqincrement))::text \
                   from pg_sequence s cross join {name} l where s.seqrelid = $2::oid and $1 >= l.last_value"
            ),
            &[top.into(), sequence.as_str().into()],
        )?;
    }
    Ok(())
}
