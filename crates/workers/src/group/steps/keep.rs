//! The slot by which this member keeps, in its own WAL, what other members may lack of each other's
//! transactions: from it these are passed on if their author dies (`recover`).
//!
//! The slot follows the slowest member. Every 10 s this node takes a sample, its own position and
//! up to where it has each other member's transactions, or asks the others whether they have the
//! last sample; if they do, the slot moves there. A member that is away keeps the slot where it is,
//! for at most `braid.peer_away_limit`, and PostgreSQL drops it by its own limits
//! (`max_slot_wal_keep_size`): then it is made anew, and `braid.group_kept` says from where on
//! something is kept.
//!
//! | written first | then | after a crash in between |
//! |---|---|---|
//! | the slot is made | `kept_lsn` | nothing counts as kept; later positions are noted |
//! | `kept_lsn` is raised, on disk | the slot moves | it says less than what is kept |
//!
//! A look writes, also on a node on which nothing else happens. So there is none while no
//! transaction has come from another member since the slot moved, and this node has written less
//! than 1 MB (`braid.kept_slot_may_rest`). A slot that stays behind keeps more than is needed,
//! never less.
//!
//! With two members there is no slot: a single survivor lacks nothing that another one has.

use std::collections::BTreeMap;

use braid_bgworker::keeping::{self, Vector};
use braid_bgworker::slot_name;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::parse_lsn;
use braid_node::settings;
use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};
use braid_postgres::{process, transaction};

use super::peer::{self, Peer};
use super::{View, members};

/// How long a new slot waits for a transaction that runs. Read, not executed: the transaction must
/// not have an id.
const LOCK_TIMEOUT: &str = "select set_config('lock_timeout', '30s', true)";

/// The stored state of the slot.
struct Kept {
    /// `pg_replication_slots.wal_status`; none without a slot.
    slot: Option<String>,
    /// A recovery runs: nothing is to move.
    recovers: bool,
    /// The slot has not moved for longer than peers are waited for.
    is_too_old: bool,
    /// The position in this node's WAL of the sample; none if none was taken.
    sample: Option<String>,
    /// No positions are noted.
    is_blank: bool,
}

/// Makes, moves or drops the slot, if it was not looked at for 10 s.
pub(super) fn tend(view: &View) -> Result<(), PgError> {
    if view.own.joins || view.own.state == "leaving" {
        return Ok(());
    }
    let slot = slot_name::of_kept(process::my_database());
    let Some(kept) = error::transaction(|| look(&slot))? else {
        return Ok(());
    };
    let others: Vec<&Peer> = view
        .peers
        .iter()
        .filter(|peer| peer.has_data && peer.stays())
        .collect();
    if kept.recovers {
        return Ok(());
    }
    if others.len() < 2 {
        return forget(&slot);
    }
    match kept.slot.as_deref() {
        Some("lost") => make_anew(&slot, "its WAL is gone"),
        Some(_) if kept.is_too_old => make_anew(
            &slot,
            "a member was away for longer than braid.peer_away_limit",
        ),
        Some(_) if kept.is_blank => error::transaction(note_start),
        Some(_) => go_on(&slot, &kept, &others),
        None => make(&slot),
    }
}

/// Reads what is stored, if it is time, and notes that it was looked at.
fn look(slot: &str) -> Result<Option<Kept>, PgError> {
    let limit = i64::from(settings::peer_away_limit().unwrap_or(0));
    let found = rows(
        "select (select l.wal_status from pg_replication_slots l where l.slot_name = $1::name), \
                (exists (select from braid.group_recovery r where r.survivor_id = s.member_id and r.state <> 'done') \
                 or exists (select from braid.group_member m join braid.subscription u on u.provider_id = m.node_id \
                             where m.state = 'removed' and m.recover))::text, \
                ($2 > 0 and s.kept_moved_at < now() - make_interval(secs => $2))::text, \
                s.kept_sample_lsn::text, \
                (not exists (select from braid.group_kept))::text \
           from braid.group_self s \
          where s.stopped is null and (s.kept_looked_at < clock_timestamp() - interval '10 s') is not false",
        &[slot.into(), limit.into()],
    )?;
    let Some(row) = found.into_iter().next() else {
        return Ok(None);
    };
    execute(
        "update braid.group_self set kept_looked_at = clock_timestamp()",
        &[],
    )?;
    let [slot, recovers, is_too_old, sample, is_blank] =
        <[Option<String>; 5]>::try_from(row).unwrap_or_default();
    let is = |text: Option<String>| text.as_deref() == Some("true");
    Ok(Some(Kept {
        slot,
        recovers: is(recovers),
        is_too_old: is(is_too_old),
        sample,
        is_blank: is(is_blank),
    }))
}

/// Nobody could need anything from here.
fn forget(slot: &str) -> Result<(), PgError> {
    members::drop_slot(slot)?;
    error::transaction(|| {
        execute("delete from braid.group_kept", &[])?;
        execute(
            "update braid.group_self set kept_looked_at = null, kept_moved_at = null, kept_sample_lsn = null",
            &[],
        )
    })
}

fn make(slot: &str) -> Result<(), PgError> {
    error::transaction(|| execute("delete from braid.group_kept", &[]))?;
    error::transaction(|| {
        rows(LOCK_TIMEOUT, &[])?;
        peer::make_slot_here(slot)
    })?;
    error::transaction(note_start)
}

/// Gives up what was kept.
fn make_anew(slot: &str, why: &str) -> Result<(), PgError> {
    PgError::new(
        SqlState::Warning,
        format!("slot \"{slot}\" keeps no earlier changes for other members any more: {why}"),
    )
    .with_detail("It is created again. If a member fails now, its earlier transactions that only this node has cannot be passed on.")
    .with_hint("The view braid.kept_changes says from where on they can.")
    .log("braid group steps");
    error::transaction(|| execute("delete from braid.group_kept", &[]))?;
    members::drop_slot(slot)?;
    make(slot)
}

/// Notes for a new slot how much of each member may lie before it, or came with a copy.
fn note_start() -> Result<(), PgError> {
    execute("delete from braid.group_kept", &[])?;
    execute(
        "insert into braid.group_kept (member_id, kept_lsn) \
         select a.member_id, coalesce(greatest(a.applied_lsn, a.written_lsn), '0/0') from braid.group_applied() a",
        &[],
    )?;
    execute(
        "update braid.group_self set kept_sample_lsn = null, kept_moved_at = now()",
        &[],
    )
}

/// Takes a sample, or moves the slot to the last one if all others have it.
fn go_on(slot: &str, kept: &Kept, others: &[&Peer]) -> Result<(), PgError> {
    let Some(sample) = &kept.sample else {
        return error::transaction(take_sample);
    };
    let mut vectors = BTreeMap::new();
    for peer in others {
        // A member that can't be reached may lack it.
        vectors.insert(peer.id, vector_of(peer).ok());
    }
    if !keeping::may_move(&error::transaction(|| stored_sample(others))?, &vectors) {
        return Ok(());
    }
    error::transaction(|| {
        transaction::flush_at_commit();
        execute(
            "update braid.group_kept set kept_lsn = greatest(kept_lsn, sample_lsn), sample_lsn = null",
            &[],
        )?;
        execute(
            "delete from braid.group_kept k using braid.group_member m where m.member_id = k.member_id and m.state = 'removed'",
            &[],
        )
    })?;
    error::transaction(|| {
        rows(
            "select end_lsn::text from pg_replication_slots l cross join pg_replication_slot_advance(l.slot_name, $2::text::pg_lsn) \
              where l.slot_name = $1::name and l.confirmed_flush_lsn < $2::text::pg_lsn",
            &[slot.into(), sample.as_str().into()],
        )
        .map(drop)
    })?;
    error::transaction(|| {
        execute("update braid.group_self set kept_moved_at = now()", &[])?;
        take_sample()
    })
}

/// Notes a position here, and up to where this node has the others' transactions then or later.
fn take_sample() -> Result<(), PgError> {
    execute(
        "update braid.group_self set kept_sample_lsn = pg_current_wal_insert_lsn()",
        &[],
    )?;
    execute(
        "insert into braid.group_kept as k (member_id, kept_lsn, sample_lsn) \
         select a.member_id, coalesce(a.written_lsn, '0/0'), coalesce(a.written_lsn, '0/0') from braid.group_applied() a \
         on conflict (member_id) do update set sample_lsn = excluded.sample_lsn",
        &[],
    )
}

/// The sample, of members that go on.
fn stored_sample(others: &[&Peer]) -> Result<Vector, PgError> {
    let found = rows(
        "select member_id::text, sample_lsn::text from braid.group_kept where sample_lsn is not null",
        &[],
    )?;
    let pairs = found.iter().filter_map(|row| {
        let [member, position] = row.as_slice() else {
            return None;
        };
        Some((
            member.as_deref()?.parse().ok()?,
            parse_lsn(position.as_deref()?)?,
        ))
    });
    Ok(pairs
        .filter(|(member, _)| others.iter().any(|peer| peer.id == *member))
        .collect())
}

/// Up to where a member has the transactions of all others.
fn vector_of(peer: &Peer) -> Result<Vector, PgError> {
    let found = peer.query("select member_id, applied_lsn from braid.group_applied()")?;
    let pairs = (0..found.len()).filter_map(|row| {
        let position = found.get(row, 1).and_then(parse_lsn).unwrap_or(0);
        Some((found.get(row, 0)?.parse().ok()?, position))
    });
    Ok(pairs.collect())
}
