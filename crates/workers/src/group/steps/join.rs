//! Joining: a list of small steps, kept in `braid.join_step`, each safe to repeat.
//!
//! A change that a member committed reaches this node by exactly one of two ways, whatever happens
//! meanwhile: by the copy, or by a slot of this node's. Four rules make it so.
//!
//! 1. This node's slot at each earlier member is there before the copy begins.
//! 2. The copy's source has applied all that a member had committed when that slot was made. The
//!    step `positions` waits for it: what lies before the slot is in the copy.
//! 3. Streams of other members than the source begin only after the copy. Changes that came by both
//!    ways have the same version, and count once. Their subscriptions are there before the copy,
//!    disabled: the copy brings along the versions of rows and the deletions that what these send
//!    may be older than.
//! 4. Slots for the others are made here before anything else, so that what is written here reaches
//!    them.
//!
//! A member that is away keeps nobody waiting (`away`): the source has its changes up to a
//! position, and sees to it that those behind that can still be had.
//!
//! Members that are added later deal with this node in the same way; this one does not wait for
//! them. So two that join at once never wait for each other.

use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_group::{Command, MemberId};
use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};

use super::super::request;
use super::peer::{self, Peer, Start};
use super::{Progress, View, away, data, members, note, publication, schema, sequences};

const PATIENCE: Duration = Duration::from_secs(15);

/// The steps, in their order. `braid.join_step` has their numbers and names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The group's log has come here, and says that this node is a member.
    Log = 1,
    /// The tables are made as at the source, and sequences with numbers of this node's.
    Schema = 2,
    /// The publications are there. Sequences that were made by hand have numbers of this node's.
    Publications = 3,
    /// Slots here, for all earlier members.
    SlotsHere = 4,
    /// Slots for this node at all earlier members but the source, and subscriptions that will read
    /// them.
    SlotsThere = 5,
    /// The source has applied all that earlier members had committed by then.
    Positions = 6,
    /// The rows are copied from the source, and its stream runs.
    Copy = 7,
    /// The streams of all other earlier members run, and have come to where these were.
    Streams = 8,
    /// All earlier members subscribe to this node.
    Subscribers = 9,
    /// The node has a vote.
    Activate = 10,
}

impl Step {
    const fn of(number: i32) -> Option<Self> {
        Some(match number {
            1 => Self::Log,
            2 => Self::Schema,
            3 => Self::Publications,
            4 => Self::SlotsHere,
            5 => Self::SlotsThere,
            6 => Self::Positions,
            7 => Self::Copy,
            8 => Self::Streams,
            9 => Self::Subscribers,
            10 => Self::Activate,
            _ => return None,
        })
    }
}

/// Goes on with the first step that is not done.
pub(super) fn go_on(view: &View) -> Result<Progress, PgError> {
    let next = error::transaction(|| {
        execute(
            "update braid.join_step set started_at = clock_timestamp() \
              where step = (select min(step) from braid.join_step where done_at is null) and started_at is null",
            &[],
        )?;
        rows(
            "select min(step)::text from braid.join_step where done_at is null",
            &[],
        )
    })?;
    let number = next
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()??.parse::<i32>().ok());
    let Some(number) = number else {
        return Ok(Progress::Done);
    };
    let Some(step) = Step::of(number) else {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            format!("step {number} of joining is not known to this version"),
        )
        .with_hint("Update Braid on this node."));
    };
    match error::catch(|| run(step, view)).and_then(|outcome| outcome) {
        Ok(Progress::Waits(what)) => {
            note(number, Some(&what), None)?;
            Ok(Progress::Waits(what))
        }
        Ok(_) => {
            error::transaction(|| note_done(number))?;
            Ok(Progress::Moved)
        }
        Err(failure) => {
            error::abort();
            note(number, None, Some(&failure))?;
            Err(failure)
        }
    }
}

fn note_done(number: i32) -> Result<(), PgError> {
    execute(
        "update braid.join_step set done_at = clock_timestamp(), waits_for = null, last_error = null, last_hint = null \
          where step = $1 and done_at is null",
        &[number.into()],
    )
}

fn run(step: Step, view: &View) -> Result<Progress, PgError> {
    match step {
        Step::Log => Ok(if view.own.since == u64::MAX || view.peers.is_empty() {
            Progress::Waits(
                "the group's log, which members send by this node's connection string".to_owned(),
            )
        } else {
            Progress::Done
        }),
        Step::Schema => make_schema(view),
        Step::Publications => make_publications(view),
        Step::SlotsHere => {
            let source = source(view)?;
            // That of the source last: what is written here reaches all others by their slots then,
            // if it reaches the source by its own.
            for peer in others(view, source).chain([source]) {
                // One that has subscribed by hand reads a slot of its own.
                if view.own.mode != "adopt" {
                    peer::create_slot_here(&peer.slot_here(&view.own.name))?;
                }
            }
            Ok(Progress::Done)
        }
        Step::SlotsThere => {
            let source = source(view)?;
            let publications = members::publications()?;
            for peer in others(view, source) {
                if peer.subscription.is_some() || peer.held_slot.is_some() {
                    continue;
                }
                match take_slot(view, peer, &publications) {
                    Ok(Progress::Done) => {}
                    Err(failure) if away::is_away(&failure) => {
                        away::pass_over(view, peer, source, failure)?;
                    }
                    other => return other,
                }
            }
            Ok(Progress::Done)
        }
        Step::Positions => await_positions(view),
        Step::Copy => copy(view),
        Step::Streams => follow_others(view),
        Step::Subscribers => await_subscribers(view),
        Step::Activate => activate(view),
    }
}

/// Makes a slot for this node at a member, and the subscription that will read it.
fn take_slot(view: &View, peer: &Peer, publications: &str) -> Result<Progress, PgError> {
    // It may be joining, too. What a slot reads is decoded with the publications that there were at
    // that position: one that comes later never counts for it.
    if !peer.has_publications(publications)? {
        return Ok(Progress::Waits(format!(
            "the publications of node \"{}\"",
            peer.name
        )));
    }
    // The source may hold something back for this node since an attempt when that one was away.
    away::let_go(view, peer)?;
    let (name, slot) = peer.subscription_to(&view.own.name);
    peer.create_slot(&slot)?;
    peer.subscribe(&name, publications, Start::SlotLater(&slot))?;
    date_back(&name)?;
    Ok(Progress::Done)
}

/// A subscription's changes can be as old as its slot, which is made first, maybe long before.
fn date_back(subscription: &str) -> Result<(), PgError> {
    error::transaction(|| {
        execute(
            "update braid.subscription s set created_at = j.started_at from braid.join_step j \
              where s.subscription_name = $1::name and j.step = $2 and j.started_at < s.created_at",
            &[subscription.into(), (Step::SlotsThere as i32).into()],
        )
    })
}

fn source(view: &View) -> Result<&Peer, PgError> {
    let wanted = view.own.source.as_deref();
    view.earlier()
        .find(|peer| Some(peer.name.as_str()) == wanted)
        .ok_or_else(|| {
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "the node that is copied from is not a member any more",
            )
            .with_hint("Give up with braid.abort_join() and join from another member.")
        })
}

/// Earlier members with data but the source.
fn others<'a>(view: &'a View, source: &Peer) -> impl Iterator<Item = &'a Peer> {
    let id = source.id;
    view.earlier().filter(move |peer| peer.id != id)
}

fn make_schema(view: &View) -> Result<Progress, PgError> {
    if view.own.mode != "empty" {
        return Ok(Progress::Done);
    }
    let source = source(view)?;
    let text = schema::dump(source)?;
    // Asked later than the schema: what is created in between is not in the copy.
    let sequences = match sequences::of(source)? {
        Ok(sequences) => sequences,
        Err(waits) => return Ok(waits),
    };
    // The copy has the source's blocks, from which nobody may draw here.
    schema::make(source, &text, || {
        sequences::register(&sequences)?;
        note_done(Step::Schema as i32)
    })?;
    Ok(Progress::Done)
}

/// Publications of the group that are missing here become what they are at the source.
fn make_publications(view: &View) -> Result<Progress, PgError> {
    let wanted = members::publications()?;
    let source = source(view)?;
    publication::create_missing(source, &wanted).map_err(|error| {
        error.with_context(&format!(
            "creating publications {wanted} of node \"{}\"",
            view.own.name
        ))
    })?;
    guard_routed_tables()?;
    sequences::take_over(view, source)
}

/// Has tables that were here before refuse rows of other nodes, as they do at the source.
fn guard_routed_tables() -> Result<(), PgError> {
    error::transaction(|| {
        execute(
            "select braid.group_route_guard(r.relation) from braid.routed_table_rows() r \
              where to_regclass(r.relation) is not null \
                and not exists (select from pg_constraint k where k.conrelid = to_regclass(r.relation) and k.conname = 'braid_routing')",
            &[],
        )
    })
}

/// Waits until the source has all that the others had committed when their slots for this node were
/// made.
fn await_positions(view: &View) -> Result<Progress, PgError> {
    let source = source(view)?;
    // The source has all of it once it is gone, and nobody would send it to this node later.
    if let Some(peer) = view.leaving().next() {
        return Ok(Progress::Waits(format!("node \"{}\" to leave", peer.name)));
    }
    let mut behind = Vec::new();
    for peer in others(view, source) {
        if peer.is_followed() || peer.held_slot.is_some() {
            continue;
        }
        // A later position than the slot's: it may be taken anew with each attempt.
        let position = noted_position(peer)?;
        let name = braid_bgworker::sql_text::quote_literal(&peer.name);
        let position = braid_bgworker::sql_text::quote_literal(&position);
        let has_it = source.ask(&format!(
            "select pg_catalog.bool_or(d.applied_lsn >= {position}) from braid.subscription_detail d \
              where d.provider = {name}"
        ))?;
        if has_it.as_deref() != Some("t") {
            behind.push(peer.name.clone());
        }
    }
    Ok(if behind.is_empty() {
        Progress::Done
    } else {
        Progress::Waits(format!(
            "node \"{}\" to apply changes of {}",
            source.name,
            behind.join(", ")
        ))
    })
}

/// A position of a member behind its slot for this node; noted once, so that it stands still.
fn noted_position(peer: &Peer) -> Result<String, PgError> {
    let id = i64::try_from(peer.id).unwrap_or(0);
    let noted = error::transaction(|| {
        rows(
            "select join_lsn::text from braid.group_member where member_id = $1",
            &[id.into()],
        )
    })?;
    if let Some(Some(Some(position))) = noted.into_iter().next().map(|row| row.into_iter().next()) {
        return Ok(position);
    }
    note_position(peer)
}

/// Notes where a member is now.
fn note_position(peer: &Peer) -> Result<String, PgError> {
    let id = i64::try_from(peer.id).unwrap_or(0);
    let position = peer.position()?;
    error::transaction(|| {
        execute(
            "update braid.group_member set join_lsn = $2::text::pg_lsn where member_id = $1",
            &[id.into(), position.as_str().into()],
        )
    })?;
    Ok(position)
}

fn copy(view: &View) -> Result<Progress, PgError> {
    let source = source(view)?;
    if let Some(progress) = data::hand_over(view, source)? {
        return Ok(progress);
    }
    let Some(subscription) = &source.subscription else {
        let name = source.subscription_to(&view.own.name).0;
        let publications = members::publications()?;
        error::transaction(|| {
            source.create_subscription(&name, &publications, Start::Copy)?;
            away::stand_in(view, &name)
        })?;
        return Ok(Progress::Waits("the copy".to_owned()));
    };
    match state_of(subscription)? {
        Progress::Done => sequences::catch_up(view, source),
        progress => Ok(progress),
    }
}

/// Whether a subscription is copied and streams; what it waits for otherwise.
fn state_of(subscription: &str) -> Result<Progress, PgError> {
    let found = error::transaction(|| {
        rows(
            "select s.state, s.tables, s.last_error, \
                    (select pg_size_pretty(sum(t.bytes_copied)) from braid.subscription_tables t where t.subscription = s.name) \
               from braid.subscription_status s where s.name = $1::name",
            &[subscription.into()],
        )
    })?;
    let Some(row) = found.into_iter().next() else {
        return Ok(Progress::Waits(format!("subscription \"{subscription}\"")));
    };
    let [state, tables, failure, copied] = <[Option<String>; 4]>::try_from(row).unwrap_or_default();
    let (state, tables) = (state.unwrap_or_default(), tables.unwrap_or_default());
    let is_copied = tables
        .split_once('/')
        .is_some_and(|(ready, all)| ready == all);
    if state == "streaming" && is_copied {
        return Ok(Progress::Done);
    }
    let failure = failure.filter(|words| !words.is_empty());
    Ok(Progress::Waits(match failure {
        Some(words) => format!("subscription \"{subscription}\", which has an error: {words}"),
        None => format!(
            "subscription \"{subscription}\": {state}, tables {tables}, {} copied",
            copied.unwrap_or_else(|| "nothing".to_owned())
        ),
    }))
}

fn follow_others(view: &View) -> Result<Progress, PgError> {
    let source = source(view)?;
    let mut behind = Vec::new();
    for peer in others(view, source).filter(|peer| peer.held_slot.is_none()) {
        let Some(subscription) = &peer.subscription else {
            return Err(PgError::new(
                SqlState::UndefinedObject,
                format!("the subscription to node \"{}\" is gone", peer.name),
            )
            .with_hint("Give up with braid.abort_join() and join again."));
        };
        if !peer.is_followed() {
            // Behind all of it that came with the copy: this node can pass on what is later.
            note_position(peer)?;
            peer.follow()?;
        }
        if !matches!(state_of(subscription)?, Progress::Done)
            || !peer::has_applied(subscription, &noted_position(peer)?)?
        {
            behind.push(peer.name.clone());
        }
    }
    Ok(if behind.is_empty() {
        Progress::Done
    } else {
        Progress::Waits(format!("the streams of {}", behind.join(", ")))
    })
}

/// Waits until each earlier member reads its slot here.
fn await_subscribers(view: &View) -> Result<Progress, PgError> {
    let mut missing = Vec::new();
    for peer in view.earlier().filter(|peer| peer.held_slot.is_none()) {
        let slot = peer.slot_here(&view.own.name);
        let found = error::transaction(|| {
            rows(
                "select 1::text from pg_replication_slots where slot_name = $1::name and active_pid <> pg_backend_pid()",
                &[slot.as_str().into()],
            )
        })?;
        if found.is_empty() && !reads_another_slot(peer)? {
            missing.push(peer.name.clone());
        }
    }
    Ok(if missing.is_empty() {
        Progress::Done
    } else {
        Progress::Waits(format!("{} to subscribe to this node", missing.join(", ")))
    })
}

/// Whether a member has subscribed to this node by hand, before the group was.
fn reads_another_slot(peer: &Peer) -> Result<bool, PgError> {
    let found = error::transaction(|| {
        rows(
            "select 1::text from pg_stat_replication r join pg_replication_slots l on l.active_pid = r.pid \
              where l.plugin = 'braid' and l.database = current_database() and starts_with(l.slot_name, $1)",
            &[braid_bgworker::slot_name::prefix_of(&peer.name).into()],
        )
    })?;
    Ok(!found.is_empty())
}

fn activate(view: &View) -> Result<Progress, PgError> {
    if view.own.state == "joining" {
        let member = MemberId::new(view.own.id)
            .ok_or_else(|| PgError::new(SqlState::DataCorrupted, "this member has no number"))?;
        request::ask(Command::Activate { member }, PATIENCE)?;
        return Ok(Progress::Waits("the group to note it".to_owned()));
    }
    Ok(Progress::Done)
}
