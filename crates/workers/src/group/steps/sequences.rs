//! Sequences of a node that joins: they get numbers of its own before anybody writes there.
//!
//! The member that is copied from knows how each sequence is shared. This node's first block
//! follows from that and from its node number, so the group need not agree on anything. A schema
//! that is copied has the source's blocks, so its sequences get this node's in the transaction that
//! makes them. A database that was set up by hand keeps its sequences as they are.

use braid_bgworker::sequence::{Kind, Setting};
use braid_bgworker::sqlstate::SqlState;
use braid_node::sequence::{self, FACTS, There};
use braid_postgres::error::{self, PgError};

use super::super::sequences::caught_up;
use super::peer::Peer;
use super::{Progress, View};

/// The sequences of the source; or what the join waits for.
pub(super) fn of(source: &Peer) -> Result<Result<Vec<There>, Progress>, PgError> {
    let asked = source.query(FACTS)?;
    Ok(match sequence::unready(&asked) {
        Some(name) => Err(Progress::Waits(format!(
            "node \"{}\" to share the numbers of sequence {name}",
            source.name
        ))),
        None => Ok(sequence::facts(&asked)),
    })
}

/// Registers this node's sequences as the source has them, and carries that out.
pub(super) fn take_over(view: &View, source: &Peer) -> Result<Progress, PgError> {
    if view.own.mode == "adopt" {
        return keep();
    }
    match of(source)? {
        Ok(there) => error::transaction(|| register(&there)).map(|()| Progress::Done),
        Err(waits) => Ok(waits),
    }
}

/// Registers this node's sequences as the source has them, and carries that out. In a transaction.
///
/// # Errors
/// 55000 if the group's log has not come.
pub(super) fn register(there: &[There]) -> Result<(), PgError> {
    let own = sequence::own().ok_or_else(|| {
        PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "this node does not know its number in the group yet",
        )
        .with_hint("The group's log comes by itself. The step is tried again then.")
    })?;
    for unknown in sequence::unknown() {
        let found = there
            .iter()
            .find(|there| sequence::find(&there.name) == Some(unknown.relation));
        // A sequence that only this node has is no concern of the others.
        let Some(found) = found else {
            continue;
        };
        sequence::register_as_there(&unknown, found);
        if let Some(registered) = sequence::load(unknown.relation) {
            sequence::carry_out(&registered, own.number);
        }
    }
    Ok(())
}

/// Has sequences of kind follow go on after what any member had used when the copy's slot was made.
/// What was told later comes by the streams.
pub(super) fn catch_up(view: &View, source: &Peer) -> Result<Progress, PgError> {
    if view.own.mode == "adopt" {
        return Ok(Progress::Done);
    }
    let there = match of(source)? {
        Ok(there) => there,
        Err(waits) => return Ok(waits),
    };
    error::transaction(|| {
        for there in there {
            if there.setting.kind == Kind::Follow && there.top > 0 {
                sequence::note_told(&there.key, there.values.value(there.top));
            }
        }
        Ok(())
    })?;
    for behind in error::transaction(|| Ok(sequence::behind()))? {
        if !caught_up(&behind)? {
            return Ok(Progress::Waits(format!(
                "transactions here that have drawn from sequence {}",
                behind.name
            )));
        }
    }
    Ok(Progress::Done)
}

/// Leaves sequences as they are.
fn keep() -> Result<Progress, PgError> {
    error::transaction(|| {
        for unknown in sequence::unknown() {
            unknown.register(Setting::LOCAL, None);
        }
        Ok(Progress::Done)
    })
}
