//! The steps process: brings this node in line with what its group has agreed. The manager starts
//! it when `braid.group_is_behind()` says that something is to be done, and it ends when that is
//! done.
//!
//! Kinds of work, each safe to repeat:
//!
//! | work | when |
//! |---|---|
//! | `join` | this node joins: the steps of `braid.join_step`, one after the other |
//! | `members` | a subscription to a member that joined later, that was away, or that was removed |
//! | `take_over` | a node that joins with rows has this one as its source (see `data`) |
//! | `recover` | a removed member's last transactions that only some have |
//! | `leave` | this node leaves |
//! | `moved` | a member has another connection string |
//! | `keep` | every 10 s, while something is written: the slot that keeps what others may lack |
//!
//! A subscription of the group is an ordinary one. It is known by its provider, which is a member.
//!
//! Not for: deciding who is a member, which the group agrees on.

mod away;
mod data;
mod join;
mod keep;
mod leave;
mod members;
mod moved;
mod peer;
pub mod publication;
mod recover;
pub mod schema;
mod sequences;
mod take_over;

use std::time::Duration;

use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};
use braid_postgres::held_slot;
use braid_postgres::{latch, worker};
use pgrx::pg_sys;

use peer::Peer;

/// Between two attempts at what can't be done yet: at first, and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(40), Duration::from_millis(500)];
/// After an attempt that failed.
const FAILED_PAUSE: Duration = Duration::from_secs(2);

/// What came of a piece of work.
enum Progress {
    /// Nothing is left of it.
    Done,
    /// Something was done; the rest can be tried at once.
    Moved,
    /// It waits for this: a sentence's beginning, for people.
    Waits(String),
}

/// This member, as it is stored.
struct Own {
    id: u64,
    name: String,
    state: String,
    /// The index of the entry that added it; the largest number until that has come.
    since: u64,
    /// The member that is copied from, while joining.
    source: Option<String>,
    /// `empty`, `schema`, `adopt` or `witness`.
    mode: String,
    /// Whether the steps of joining are not all done.
    joins: bool,
}

/// All that a look needs.
struct View {
    own: Own,
    peers: Vec<Peer>,
}

impl View {
    /// Members with data that were there before this one, and still are. One that leaves waits for
    /// a node that has a slot there.
    fn earlier(&self) -> impl Iterator<Item = &Peer> {
        self.before()
            .filter(|peer| peer.stays() || (peer.state == "leaving" && peer.subscription.is_some()))
    }

    /// Those that leave, and do not wait for this node.
    fn leaving(&self) -> impl Iterator<Item = &Peer> {
        self.before()
            .filter(|peer| peer.state == "leaving" && peer.subscription.is_none())
    }

    fn before(&self) -> impl Iterator<Item = &Peer> {
        let since = self.own.since;
        self.peers
            .iter()
            .filter(move |peer| peer.has_data && peer.since < since)
    }
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    crate::connect(argument);
    worker::report_activity("bringing this node in line with its group");
    // Logged once, not with each attempt.
    let mut last = None;
    let [shortest, longest] = PAUSES;
    let mut pause = shortest;
    loop {
        worker::reload_settings();
        let view = match error::transaction(look) {
            Ok(Some(view)) => view,
            Ok(None) => return,
            Err(failure) => {
                failure.log("braid group steps");
                return;
            }
        };
        let progress = error::catch(|| tend(&view)).and_then(|outcome| outcome);
        let wait = match progress {
            Ok(Progress::Done) => None,
            Ok(Progress::Moved) => {
                // What is kept moves on also while there is much to do.
                pause = shortest;
                Some(Duration::ZERO)
            }
            Ok(Progress::Waits(_)) => {
                let this = pause;
                pause = (pause * 2).min(longest);
                Some(this)
            }
            Err(failure) => {
                error::abort();
                if last.as_ref() != Some(&failure.message) {
                    failure.log("braid group steps");
                    last = Some(failure.message);
                }
                // A slot whose creation failed would look as if it were there.
                if let Err(failure) = error::catch(held_slot::release) {
                    failure.log("braid group steps: releasing a slot");
                    return;
                }
                Some(FAILED_PAUSE)
            }
        };
        // A slot that the process holds when this fails is released at its end.
        if let Err(failure) = error::catch(|| keep::tend(&view)).and_then(|outcome| outcome) {
            failure.log("braid group steps: keeping changes for other members");
            return;
        }
        let Some(wait) = wait else {
            return;
        };
        latch::wait(Some(wait));
    }
}

/// What is to be done; none if this is no member, or takes no part. A node that has left is no
/// member any more.
fn look() -> Result<Option<View>, PgError> {
    execute(
        "select braid.forget_members() from braid.group_self where stopped is not null and failures = 0 and leave_lsn is not null",
        &[],
    )?;
    let found = rows(
        "select s.member_id::text, coalesce(m.node_name, n.node_name)::text, coalesce(m.state, 'joining'), \
                m.since_index::text, s.source_name::text, s.join_mode, \
                exists (select from braid.join_step j where j.done_at is null)::text \
           from braid.group_self s join braid.node n on n.is_local \
           left join braid.group_member m on m.member_id = s.member_id \
          where s.stopped is null",
        &[],
    )?;
    let Some(row) = found.first() else {
        return Ok(None);
    };
    let text = |index: usize| row.get(index).cloned().flatten();
    let own = Own {
        id: text(0).and_then(|id| id.parse().ok()).unwrap_or(0),
        name: text(1).unwrap_or_default(),
        state: text(2).unwrap_or_default(),
        since: text(3)
            .and_then(|since| since.parse().ok())
            .unwrap_or(u64::MAX),
        source: text(4),
        mode: text(5).unwrap_or_default(),
        joins: text(6).as_deref() == Some("true"),
    };
    let mut peers = peer::all(own.id)?;
    if own.mode == super::WITNESS {
        // It has nothing to do with what they have.
        for peer in &mut peers {
            peer.has_data = false;
            peer.recover = false;
        }
    }
    Ok(Some(View { own, peers }))
}

fn tend(view: &View) -> Result<Progress, PgError> {
    moved::follow()?;
    if view.own.joins {
        return join::go_on(view);
    }
    if view.own.state == "leaving" {
        return leave::go_on(view);
    }
    members::follow(view)
}

/// The words and the hint by which views show how a step failed.
fn told(failure: Option<&PgError>) -> (Option<String>, Option<String>) {
    let words = failure.map(|failure| match &failure.detail {
        Some(detail) => format!("{}: {detail}", failure.message),
        None => failure.message.clone(),
    });
    (words, failure.and_then(|failure| failure.hint.clone()))
}

/// Notes on a step of joining what it waits for, or how it failed.
fn note(step: i32, waits_for: Option<&str>, failure: Option<&PgError>) -> Result<(), PgError> {
    let (words, hint) = told(failure);
    error::transaction(|| {
        execute(
            "update braid.join_step set waits_for = $2, last_error = $3, last_hint = $4, attempts = attempts + ($3 is not null)::integer \
              where step = $1 and (waits_for, last_error, last_hint) is distinct from ($2, $3, $4)",
            &[step.into(), waits_for.into(), words.into(), hint.into()],
        )
    })
}
