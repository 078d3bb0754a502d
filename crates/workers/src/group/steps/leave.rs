//! Leaving: this node hands over what others still lack, drops its subscriptions, and has itself
//! removed.

use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_group::{Command, MemberId};
use braid_node::subscription::{execute, rows, rows_written};
use braid_postgres::error::{self, PgError};

use super::super::request;
use super::peer::Peer;
use super::{Progress, View, away, members, told};

const PATIENCE: Duration = Duration::from_secs(15);

/// Goes on with leaving, and notes what it waits for, which the views show.
pub(super) fn go_on(view: &View) -> Result<Progress, PgError> {
    let outcome = error::catch(|| hand_over(view)).and_then(|outcome| outcome);
    let message = match &outcome {
        Ok(Progress::Waits(what)) => Some(format!("waits for {what}")),
        Ok(_) => None,
        Err(failure) => {
            error::abort();
            told(Some(failure)).0
        }
    };
    error::transaction(|| {
        execute(
            "update braid.group_self set leave_message = $1 where leave_message is distinct from $1",
            &[message.into()],
        )
    })?;
    outcome
}

fn hand_over(view: &View) -> Result<Progress, PgError> {
    let is_unknown = |peer: &&Peer| peer.has_data && peer.stays() && peer.slot.is_none();
    if view.own.mode == "adopt"
        && let Some(peer) = view.peers.iter().find(is_unknown)
    {
        return members::note_slot(peer, &view.own.name);
    }
    let behind = behind(view)?;
    if !behind.is_empty() {
        return Ok(Progress::Waits(format!(
            "{} to receive what was written here",
            behind.join(", ")
        )));
    }
    let held = away::held_for()?;
    if !held.is_empty() {
        return Ok(Progress::Waits(format!(
            "{} to follow a member that was away, by this node's slot there",
            held.join(", ")
        )));
    }
    for peer in &view.peers {
        peer.unsubscribe()?;
    }
    let me = MemberId::new(view.own.id)
        .ok_or_else(|| PgError::new(SqlState::DataCorrupted, "this member has no number"))?;
    request::ask(Command::RemoveMember { member: me }, PATIENCE)?;
    for peer in &view.peers {
        members::drop_slot(&peer.slot_here(&view.own.name))?;
    }
    error::transaction(|| execute("select braid.forget_members()", &[]))?;
    Ok(Progress::Done)
}

/// Members that have not confirmed all that is committed here by now.
fn behind(view: &View) -> Result<Vec<String>, PgError> {
    let mut behind = Vec::new();
    let noted = error::transaction(|| {
        rows(
            "select coalesce(leave_lsn::text, '') from braid.group_self",
            &[],
        )
    })?;
    let noted = noted
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?);
    let position = match noted {
        Some(noted) if !noted.is_empty() => noted,
        _ => error::transaction(|| {
            let made = rows_written(
                "update braid.group_self set leave_lsn = braid.sync_event() returning leave_lsn::text",
                &[],
            )?;
            Ok(made
                .into_iter()
                .next()
                .and_then(|row| row.into_iter().next()?)
                .unwrap_or_default())
        })?,
    };
    for peer in view
        .peers
        .iter()
        .filter(|peer| peer.has_data && peer.stays())
    {
        let slot = peer.slot_here(&view.own.name);
        let found = error::transaction(|| {
            rows(
                "select 1::text from pg_replication_slots where slot_name = $1::name and confirmed_flush_lsn < $2::text::pg_lsn",
                &[slot.as_str().into(), position.as_str().into()],
            )
        })?;
        if !found.is_empty() {
            behind.push(peer.name.clone());
        }
    }
    Ok(behind)
}
