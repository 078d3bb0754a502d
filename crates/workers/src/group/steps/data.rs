//! Joining with rows: `braid.join_group(.., mode => 'data')`. This node's rows and the group's
//! become the same, nothing is truncated, and users may write everywhere meanwhile, also here.
//!
//! # Who decides
//!
//! Members do not agree about this node's old rows by themselves: what versions these have is known
//! here, if at all. So one node decides about them, the source, and what it decides is an ordinary
//! change of its own: (t, source), which all other members take as they take any.
//!
//! | state | where | who moves it on |
//! |---|---|---|
//! | changes stream | slots: steps 4 to 6 of joining, as in other modes | this node |
//! | open | `braid.group_merge` at the source | this node, by `braid.group_take_over` |
//! | a table, up to a key | `braid.group_merge_table` at the source | the source (`take_over`) |
//! | done | `braid.group_merge` at the source | the source |
//! | a table is the source's | `braid.subscription_table` here | a copy worker here |
//!
//! All are durable, and each is moved on in one transaction with the rows that it speaks of. So
//! whatever is killed begins again where the last one has ended.
//!
//! # Why nothing is lost, and all end alike
//!
//! 1. Slots for all members are here before a row is read, that for the source last. So what is
//!    committed here later streams to all members, with its own version. What streams to some of
//!    them only, as their slots were there first, is written by the source once more; but a row
//!    that is deleted here in between stays at those whose slots came later.
//! 2. The source fixes a time t by this node's clock, and reads here only once all transactions
//!    have ended that ran at t. So a row has all that was committed before t in it. What comes by
//!    the stream and is not in it is newer than t. The time holds for some minutes, then there is
//!    another.
//! 3. The source decides by the version that the row has here, if it is known and before t, else
//!    the row is older than all. If the source's row is older, or there is none, the row is written
//!    with version (t, source). A version at the source that is larger than that wins anyway. So
//!    the source only overwrites what is older than what it writes, as every node does, and members
//!    agree.
//! 4. A row that left between being read and being written would come back. So this node is asked
//!    again before the commit: what is gone has the batch begin anew; what goes later finds the
//!    row.
//! 5. When all is taken over, each table is copied from the source as one that is held
//!    ([`crate::copy`]): writers here wait, the source has applied all that they wrote, and one
//!    transaction replaces the rows here by the source's, with their versions and what is known of
//!    deletions. Readers see the one or the other. What was known of versions and deletions here
//!    goes: this node knows what the source knows.
//!
//! A row that is equal on both sides is left alone, with the source's version. Of rows that meet
//! under another unique key the newer one stays, by rule 3. A row that has left so, at the source,
//! does not keep this node's row of that key out. What loses is in `braid.conflict_history` of the
//! source, whole.
//!
//! Sequences of the source go on after this node's values before the first row comes: else sessions
//! would give numbers again that rows have which are yet to come.
//!
//! `join_group` refuses this mode: the deletion that point 1 names would be lost at some members.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::{self, PgError};

use super::peer::Peer;
use super::{Progress, View, take_over};

/// The mode of joining.
pub(super) const MODE: &str = "data";

/// Has the source take over the rows of this node, before they are copied. None if that is done, or
/// not wanted.
pub(super) fn hand_over(view: &View, source: &Peer) -> Result<Option<Progress>, PgError> {
    if view.own.mode != MODE || source.subscription.is_some() {
        return Ok(None);
    }
    let id = view.own.id;
    let asked = source.query(&format!(
        "select is_done, waits_for, last_error, last_hint, rows from braid.group_taken_over({id})"
    ))?;
    let name = &source.name;
    if asked.is_empty() {
        // Values of rows that are here may be in the numbers that this node has got as a member.
        error::transaction(|| take_over::raise_sequences(None))?;
        source.ask(&format!("select braid.group_take_over({id})"))?;
        return Ok(Some(Progress::Waits(format!(
            "node \"{name}\" to take over the rows of this one"
        ))));
    }
    if asked.get(0, 0) == Some("t") {
        return Ok(None);
    }
    if let Some(words) = asked.get(0, 2) {
        let failure = PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!("node \"{name}\" could not take over rows of this one: {words}"),
        );
        let hint = asked.get(0, 3).unwrap_or("It is tried again.");
        return Err(failure.with_hint(hint));
    }
    let waits = match asked.get(0, 1) {
        Some(what) => format!(", which waits for {what}"),
        None => String::new(),
    };
    Ok(Some(Progress::Waits(format!(
        "node \"{name}\" to take over the rows of this one: {} compared{waits}",
        asked.get(0, 4).unwrap_or("0")
    ))))
}
