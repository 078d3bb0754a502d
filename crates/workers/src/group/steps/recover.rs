//! The last transactions of a removed member, which only some of the others have, reach all of
//! these.
//!
//! Each survivor does its own part, in states that are kept in `braid.group_recovery`. The steps of
//! each state may be repeated.
//!
//! | state | what is done in it | until |
//! |---|---|---|
//! | `stopping` | the subscription to the removed member is disabled | no process of it runs |
//! | `asking` | the others say how far they came; `keeping` chooses who passes on | all answered |
//! | `passing` | a subscription brings transactions from a survivor's kept slot | all are applied |
//! | `complete` | this node lacks nothing, and keeps its slot for the others | all are complete |
//! | `done` | subscription and slots for the removed member are dropped | |
//!
//! The stream that passes on has the transactions under their origin's name, with their versions.
//! Those are left out that this node has: by their position at their origin where the survivor
//! applies them one by one in order, else by their rows' versions.

use braid_bgworker::keeping::{self, Share, Survivor};
use braid_bgworker::slot_name;
use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{lsn_text, parse_lsn};
use braid_node::registry;
use braid_node::subscription::{execute, rows, rows_written};
use braid_postgres::error::{self, PgError};
use braid_postgres::rows::Rows;
use braid_postgres::{process, transaction};

use super::peer::{self, Peer};
use super::{Progress, View, told};

/// The name of the slot of kept changes, at the node that is asked.
const KEPT_SLOT: &str = "'braid_kept_' || (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())";

/// Whether a removed member's last transactions are to be recovered here: this node follows it
/// still.
pub(super) fn is_open(removed: &Peer) -> bool {
    removed.recover && removed.subscription.is_some()
}

/// This node's part, as it is stored.
struct Part {
    state: String,
    had: Option<u64>,
    from: Option<u64>,
    through: Option<String>,
}

/// Goes on with the recovery of a removed member's transactions. Done once all survivors are.
pub(super) fn go_on(removed: &Peer, view: &View) -> Result<Progress, PgError> {
    let outcome = error::catch(|| run(removed, view)).and_then(|outcome| outcome);
    match &outcome {
        Ok(Progress::Waits(what)) => note(removed, view, Some(what), None)?,
        Ok(_) => note(removed, view, None, None)?,
        Err(failure) => {
            error::abort();
            note(removed, view, None, Some(failure))?;
        }
    }
    outcome
}

fn run(removed: &Peer, view: &View) -> Result<Progress, PgError> {
    let Some(part) = error::transaction(|| load(removed, view))? else {
        return begin(removed, view);
    };
    match part.state.as_str() {
        "stopping" => stop(removed, view),
        "asking" => choose(removed, view, part.had.unwrap_or(0)),
        "passing" => pass_on(removed, view, &part),
        "complete" => await_others(removed, view),
        _ => Ok(Progress::Done),
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn load(removed: &Peer, view: &View) -> Result<Option<Part>, PgError> {
    let found = rows(
        "select state, had_lsn::text, from_id::text, through_lsn::text from braid.group_recovery where member_id = $1 and survivor_id = $2",
        &[signed(removed.id).into(), signed(view.own.id).into()],
    )?;
    Ok(found.into_iter().next().map(|row| {
        let [state, had, from, through] = <[Option<String>; 4]>::try_from(row).unwrap_or_default();
        Part {
            state: state.unwrap_or_default(),
            had: had.as_deref().and_then(parse_lsn),
            from: from.and_then(|from| from.parse().ok()),
            through,
        }
    }))
}

/// Notes what the part waits for, or how it failed.
fn note(
    removed: &Peer,
    view: &View,
    waits_for: Option<&str>,
    failure: Option<&PgError>,
) -> Result<(), PgError> {
    let (words, hint) = told(failure);
    error::transaction(|| {
        execute(
            "update braid.group_recovery set waits_for = $3, last_error = $4, last_hint = $5, attempts = attempts + ($4 is not null)::integer \
              where member_id = $1 and survivor_id = $2 and (waits_for, last_error, last_hint) is distinct from ($3, $4, $5)",
            &[
                signed(removed.id).into(),
                signed(view.own.id).into(),
                waits_for.into(),
                words.into(),
                hint.into(),
            ],
        )
    })
}

/// Nothing of the removed member is to come any more.
fn begin(removed: &Peer, view: &View) -> Result<Progress, PgError> {
    error::transaction(|| {
        execute(
            "insert into braid.group_recovery (member_id, survivor_id, survivor, state) values ($1, $2, $3::name, 'stopping')",
            &[
                signed(removed.id).into(),
                signed(view.own.id).into(),
                view.own.name.as_str().into(),
            ],
        )?;
        rows_written(
            "select braid.disable_subscription($1::name)::text",
            &[removed.subscription.as_deref().into()],
        )
        .map(drop)
    })?;
    Ok(Progress::Moved)
}

/// Notes how far this node came, once that stands still.
fn stop(removed: &Peer, view: &View) -> Result<Progress, PgError> {
    let runs = error::transaction(|| {
        rows(
            "select 1::text from braid.subscription s left join braid.subscription_activity() a using (subscription_id) \
              where s.subscription_name = $1::name and (s.enabled or a.leader_pid is not null or cardinality(a.applier_pids) > 0)",
            &[removed.subscription.as_deref().into()],
        )
    })?;
    if !runs.is_empty() {
        // Somebody may have enabled it.
        error::transaction(|| {
            rows_written(
                "select braid.disable_subscription(s.subscription_name)::text from braid.subscription s \
                  where s.subscription_name = $1::name and s.enabled",
                &[removed.subscription.as_deref().into()],
            )
            .map(drop)
        })?;
        return Ok(Progress::Waits(format!(
            "the stream of {} to end",
            removed.name
        )));
    }
    error::transaction(|| {
        // Others read up to this position.
        transaction::flush_at_commit();
        execute(
            "update braid.group_recovery r \
                set state = 'asking', upto_lsn = pg_current_wal_insert_lsn(), \
                    (had_lsn, written_lsn) = (select coalesce(a.applied_lsn, '0/0'), coalesce(a.written_lsn, '0/0') from braid.group_applied() a \
                                               where a.member_id = r.member_id), \
                    heard_lsn = (select nullif(v.provider_lsn, '0/0') from braid.subscription s join braid.subscription_activity() v using (subscription_id) \
                                  where s.subscription_name = $3::name) \
              where r.member_id = $1 and r.survivor_id = $2",
            &[
                signed(removed.id).into(),
                signed(view.own.id).into(),
                removed.subscription.as_deref().into(),
            ],
        )
    })?;
    Ok(Progress::Moved)
}

/// Members with data that go on.
fn survivors(view: &View) -> impl Iterator<Item = &Peer> {
    view.peers
        .iter()
        .filter(|peer| peer.has_data && peer.stays())
}

/// A survivor's own words about its part; or what is waited for.
fn ask(survivor: &Peer, removed: &Peer) -> Result<Rows, String> {
    let asked = survivor.query(&format!(
        "select state, had_lsn, keeps_from, upto_lsn, is_exact, heard_lsn, most_lsn, gone_lsn, from_node, transactions, inserts, updates, \
                deletes, truncates, waits_for, last_error, last_hint, written_lsn from braid.group_survivor({})",
        removed.id
    ));
    match asked {
        Ok(found) => Ok(found),
        Err(failure) => Err(failure.message),
    }
}

/// Keeps what another survivor says of itself, for people.
fn store(survivor: &Peer, removed: &Peer, said: &Rows) -> Result<(), PgError> {
    let text = |column: usize| said.get(0, column).map(str::to_owned);
    error::transaction(|| {
        execute(
            "insert into braid.group_recovery as r (member_id, survivor_id, survivor, state, had_lsn, upto_lsn, heard_lsn, most_lsn, gone_lsn, \
                    from_node, transactions, inserts, updates, deletes, truncates, waits_for, last_error, last_hint, written_lsn, done_at) \
             values ($1, $2, $3::name, $4, $5::text::pg_lsn, $6::text::pg_lsn, $7::text::pg_lsn, $8::text::pg_lsn, $9::text::pg_lsn, $10::name, \
                     $11::text::bigint, $12::text::bigint, $13::text::bigint, $14::text::bigint, $15::text::bigint, $16, $17, $18, $19::text::pg_lsn, \
                     case when $4 in ('complete', 'done') then clock_timestamp() end) \
             on conflict (member_id, survivor_id) do update set \
                 (state, had_lsn, upto_lsn, heard_lsn, most_lsn, gone_lsn, from_node, transactions, inserts, updates, deletes, truncates, waits_for, \
                  last_error, last_hint, written_lsn, done_at) \
               = (excluded.state, excluded.had_lsn, excluded.upto_lsn, excluded.heard_lsn, excluded.most_lsn, excluded.gone_lsn, excluded.from_node, \
                  excluded.transactions, excluded.inserts, excluded.updates, excluded.deletes, excluded.truncates, excluded.waits_for, \
                  excluded.last_error, excluded.last_hint, excluded.written_lsn, coalesce(r.done_at, excluded.done_at))",
            &[
                signed(removed.id).into(),
                signed(survivor.id).into(),
                survivor.name.as_str().into(),
                text(0).into(),
                text(1).into(),
                text(3).into(),
                text(5).into(),
                text(6).into(),
                text(7).into(),
                text(8).into(),
                text(9).into(),
                text(10).into(),
                text(11).into(),
                text(12).into(),
                text(13).into(),
                text(14).into(),
                text(15).into(),
                text(16).into(),
                text(17).into(),
            ],
        )
    })
}

/// Asks all others how far they came, and chooses who passes on.
fn choose(removed: &Peer, view: &View, had: u64) -> Result<Progress, PgError> {
    let mut waits = Vec::new();
    let mut others = Vec::new();
    for survivor in survivors(view) {
        let said = match ask(survivor, removed) {
            Ok(said) => said,
            Err(why) => {
                waits.push(why);
                continue;
            }
        };
        let position = |column: usize| said.get(0, column).and_then(parse_lsn);
        match said.get(0, 0) {
            Some("asking" | "passing" | "complete" | "done") => {
                store(survivor, removed, &said)?;
                others.push((
                    Survivor {
                        member: survivor.id,
                        has: position(17).unwrap_or(0),
                        keeps_from: position(2),
                    },
                    survivor.name.as_str(),
                    said.get(0, 3).map(str::to_owned),
                ));
            }
            // A member that has never followed it.
            Some("none") => {}
            _ => waits.push(format!("node \"{}\" to know of the removal", survivor.name)),
        }
    }
    if !waits.is_empty() {
        return Ok(Progress::Waits(waits.join(", ")));
    }
    let survivors: Vec<Survivor> = others.iter().map(|(survivor, ..)| *survivor).collect();
    let share = keeping::share(had, &survivors);
    let from = others
        .iter()
        .find(|(survivor, ..)| Some(survivor.member) == share.from);
    error::transaction(|| {
        execute(
            "update braid.group_recovery set state = $3, most_lsn = $4::text::pg_lsn, gone_lsn = $5::text::pg_lsn, from_id = $6, from_node = $7::name, \
                    through_lsn = $8::text::pg_lsn, transactions = 0, inserts = 0, updates = 0, deletes = 0, truncates = 0 \
              where member_id = $1 and survivor_id = $2",
            &[
                signed(removed.id).into(),
                signed(view.own.id).into(),
                if from.is_some() {
                    "passing"
                } else {
                    "complete"
                }
                .into(),
                lsn_text(share.most).into(),
                lsn_text(share.gone_to).into(),
                share.from.map(signed).into(),
                from.map(|(_, name, _)| *name).into(),
                from.and_then(|(.., through)| through.clone()).into(),
            ],
        )
    })?;
    tell(removed, had, share, from.map(|(_, name, _)| *name));
    Ok(Progress::Moved)
}

fn tell(removed: &Peer, had: u64, share: Share, from: Option<&str>) {
    if let Some(from) = from {
        pgrx::log!(
            "node \"{from}\" passes on the transactions of removed node \"{}\" between {} and {}",
            removed.name,
            lsn_text(had),
            lsn_text(share.most)
        );
    }
    if share.gone_to > had {
        PgError::new(
            SqlState::Warning,
            format!(
                "transactions that removed node \"{}\" committed between {} and {} are no longer available",
                removed.name,
                lsn_text(had),
                lsn_text(share.gone_to)
            ),
        )
        .with_detail("Another node has them, and does not keep them to be passed on.")
        .with_hint("Find the rows with braid.compare, and bring them here with braid.repair.")
        .log("braid group steps");
    }
}

/// Has the chosen survivor pass on what this node lacks.
fn pass_on(removed: &Peer, view: &View, part: &Part) -> Result<Progress, PgError> {
    let (name, slot) = slot_name::recovering(&view.own.name, &removed.name);
    let source = survivors(view).find(|peer| Some(peer.id) == part.from);
    let there = error::transaction(|| {
        rows(
            "select s.state, s.last_error from braid.subscription_status s where s.name = $1::name",
            &[name.as_str().into()],
        )
    })?;
    let Some(source) = source else {
        return ask_again(removed, view, &name);
    };
    let (Some(row), Some(through)) = (there.first(), &part.through) else {
        return subscribe(removed, view, source, (&name, &slot));
    };
    if peer::has_applied(&name, through)? {
        return finish(removed, view, &name);
    }
    let text = |index: usize| row.get(index).cloned().flatten().unwrap_or_default();
    let (state, failure) = (text(0), text(1));
    Ok(Progress::Waits(if failure.is_empty() {
        format!("subscription \"{name}\": {state}")
    } else {
        format!("subscription \"{name}\", which has an error: {failure}")
    }))
}

/// The survivor that was chosen is no member any more: another one is.
fn ask_again(removed: &Peer, view: &View, name: &str) -> Result<Progress, PgError> {
    error::transaction(|| {
        rows_written(
            "select braid.drop_subscription(s.subscription_name)::text from braid.subscription s where s.subscription_name = $1::name",
            &[name.into()],
        )?;
        execute(
            "update braid.group_recovery set state = 'asking', from_id = null, from_node = null where member_id = $1 and survivor_id = $2",
            &[signed(removed.id).into(), signed(view.own.id).into()],
        )
    })?;
    Ok(Progress::Moved)
}

fn subscribe(
    removed: &Peer,
    view: &View,
    source: &Peer,
    (name, slot): (&str, &str),
) -> Result<Progress, PgError> {
    let said = match ask(source, removed) {
        Ok(said) => said,
        Err(why) => return Ok(Progress::Waits(why)),
    };
    // The node kept changes when it was chosen, and moves nothing meanwhile; but PostgreSQL may
    // have dropped its slot.
    if said.get(0, 2).is_none() {
        return ask_again(removed, view, name);
    }
    let is_exact = said.get(0, 4) == Some("t");
    let quoted = quote_literal(slot);
    source.query(&format!(
        "select pg_catalog.pg_copy_logical_replication_slot({KEPT_SLOT}, {quoted}, false) \
          where not exists (select from pg_catalog.pg_replication_slots s where s.slot_name = {quoted})"
    ))?;
    error::transaction(|| follow(removed, view, source, (name, slot), is_exact))?;
    registry::wake_manager(process::my_database());
    Ok(Progress::Moved)
}

/// Stores the subscription that has the changes passed on, with the tables and options of that to
/// the removed member: `create_subscription` would ask for tables that are yet to come by it.
fn follow(
    removed: &Peer,
    view: &View,
    source: &Peer,
    (name, slot): (&str, &str),
    is_exact: bool,
) -> Result<(), PgError> {
    execute(
        "insert into braid.subscription (subscription_name, subscription_owner, connection_id, provider_name, provider_id, publications, origin, \
                slot_name, create_slot, copy_data, enabled, synchronous_commit, run_as_owner, disable_on_error, on_error, on_missing_column, \
                replicate_ddl, apply_mode, commit_order, streaming, phase, only_origin, only_after) \
         select $1::name, u.subscription_owner, m.connection_id, m.node_name, m.node_id, u.publications, 'any', $2::name, false, false, true, \
                u.synchronous_commit, u.run_as_owner, u.disable_on_error, u.on_error, u.on_missing_column, u.replicate_ddl, u.apply_mode, 'source', \
                'off', 'stream', $3::name, \
                case when $4 then (select r.had_lsn from braid.group_recovery r where r.member_id = $5 and r.survivor_id = $6) else '0/0' end \
           from braid.subscription u cross join braid.group_member m \
          where u.subscription_name = $7::name and m.member_id = $8",
        &[
            name.into(),
            slot.into(),
            removed.name.as_str().into(),
            is_exact.into(),
            signed(removed.id).into(),
            signed(view.own.id).into(),
            removed.subscription.as_deref().into(),
            signed(source.id).into(),
        ],
    )?;
    execute(
        "insert into braid.subscription_table (subscription_id, relation, schema_name, table_name, state) \
         select n.subscription_id, t.relation, t.schema_name, t.table_name, 'ready' \
           from braid.subscription n cross join braid.subscription u join braid.subscription_table t on t.subscription_id = u.subscription_id \
          where n.subscription_name = $1::name and u.subscription_name = $2::name",
        &[name.into(), removed.subscription.as_deref().into()],
    )
}

/// All that was lacked is applied.
fn finish(removed: &Peer, view: &View, name: &str) -> Result<Progress, PgError> {
    error::transaction(|| {
        // The slot at the other node is dropped for it.
        transaction::flush_at_commit();
        execute(
            "update braid.group_recovery r \
                set state = 'complete', transactions = a.transactions, inserts = a.inserts, updates = a.updates, deletes = a.deletes, truncates = a.truncates \
               from braid.subscription s left join braid.subscription_activity() a using (subscription_id) \
              where r.member_id = $1 and r.survivor_id = $2 and s.subscription_name = $3::name",
            &[
                signed(removed.id).into(),
                signed(view.own.id).into(),
                name.into(),
            ],
        )?;
        rows_written(
            "select braid.drop_subscription($1::name)::text",
            &[name.into()],
        )
        .map(drop)
    })?;
    Ok(Progress::Moved)
}

/// Keeps the changes here until nobody needs them.
fn await_others(removed: &Peer, view: &View) -> Result<Progress, PgError> {
    let mut waits = Vec::new();
    for survivor in survivors(view) {
        match ask(survivor, removed) {
            Ok(said) => match said.get(0, 0) {
                Some("complete" | "done") => store(survivor, removed, &said)?,
                Some("none") => {}
                _ => waits.push(format!("node \"{}\"", survivor.name)),
            },
            Err(why) => waits.push(why),
        }
    }
    if !waits.is_empty() {
        return Ok(Progress::Waits(waits.join(", ")));
    }
    error::transaction(|| {
        // Nobody asks the others again: what is shown of their parts ends here as well.
        execute(
            "update braid.group_recovery set state = 'done', waits_for = null, \
                    done_at = case when survivor_id = $2 then clock_timestamp() else done_at end \
              where member_id = $1 and (survivor_id = $2 or state = 'complete')",
            &[signed(removed.id).into(), signed(view.own.id).into()],
        )
    })?;
    Ok(Progress::Moved)
}
