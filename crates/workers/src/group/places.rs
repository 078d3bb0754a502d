//! Routing in the group worker: it shows what is agreed to the other processes of its database, and
//! has the group close times while routed tables are used (`braid_routing::Window`).
//!
//! Each member does so for its own sessions, and none if another member has just done it. The
//! leader comes first; the others do it if they see that nobody has.

use std::time::{Duration, Instant};

use braid_group::{Applied, Command, MemberId, MemberState, ProposalId, State};
use braid_node::registry::ManagerEntry;
use braid_node::routing::{self, Agreed, Place};
use braid_postgres::error::PgError;
use braid_postgres::timestamp;
use braid_routing::{Entry, NodeId, Pacer, Time};

/// A proposal that is older is given up for a newer one.
const STALE: Duration = Duration::from_secs(2);
/// How much longer than the leader the others wait for somebody to close the next time.
const BEHIND: Duration = Duration::from_millis(150);

/// Whether an entry does nothing but close a time.
pub(super) fn only_closes(entry: &Applied) -> bool {
    matches!(entry.proposal.command, Command::Route(Entry::Close { .. }))
}

/// Whether an entry changes what processes know of routing: all of them read it anew then.
pub(super) fn concerns_routing(entry: &Applied) -> bool {
    match &entry.proposal.command {
        Command::Route(_) => !only_closes(entry),
        Command::AddMember(_)
        | Command::Activate { .. }
        | Command::SetState { .. }
        | Command::SetConnection { .. }
        | Command::RemoveMember { .. } => true,
        _ => false,
    }
}

/// The next step towards a closed time.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) withdraw: Option<ProposalId>,
    pub(super) propose: Option<Entry>,
}

/// Routing in the group worker.
pub(super) struct Places {
    entry: &'static ManagerEntry,
    pacer: Pacer,
    started: Instant,
    /// The last use of a routed table that is known (TimestampTz).
    used_at: i64,
    /// A time that the group is to close, and since when.
    closing: Option<(ProposalId, Instant)>,
    /// Whether this process has shown anything yet.
    is_shown: bool,
}

impl Places {
    pub(super) fn new(entry: &'static ManagerEntry) -> Self {
        Self {
            entry,
            pacer: Pacer::new(routing::window()),
            started: Instant::now(),
            used_at: entry.routing.used_at(),
            closing: None,
            is_shown: false,
        }
    }

    /// Whether this process has shown what is agreed. Before that the state of the process before
    /// it counts.
    pub(super) const fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// Shows what is agreed.
    pub(super) fn show(&mut self, state: &State, me: MemberId) -> Result<(), PgError> {
        let present = state
            .members()
            .filter(|member| member.state != MemberState::Removed);
        let places = present.map(|member| Place {
            node: NodeId(member.id.get()),
            name: member.about.name.clone(),
            dsn: routing::public_dsn(member.about.connection.expose()),
        });
        let removed = state
            .members()
            .filter(|member| member.state == MemberState::Removed)
            .map(|member| (NodeId(member.id.get()), member.about.name.clone()));
        let agreed = Agreed {
            me: NodeId(me.get()),
            places: places.collect(),
            removed: removed.collect(),
            routing: state.routing().clone(),
        };
        routing::show(self.entry, &agreed)?;
        self.is_shown = true;
        Ok(())
    }

    /// Shows the last time that is closed.
    pub(super) fn show_close(&self, closed: Time) {
        routing::show_close(self.entry, closed);
    }

    /// Nothing is known here any more.
    pub(super) fn hide(&self) {
        routing::hide(self.entry);
    }

    /// Says what is to be done now. `closed`: the last time that is closed here.
    pub(super) fn tick(&mut self, closed: Time, leads: bool) -> Step {
        let mut step = Step::default();
        let at = self.started.elapsed();
        let used_at = self.entry.routing.used_at();
        if used_at != self.used_at {
            self.used_at = used_at;
            self.pacer.note_use(at);
        }
        if let Some((id, since)) = self.closing {
            if since.elapsed() < STALE {
                return step;
            }
            step.withdraw = Some(id);
            self.closing = None;
        }
        let now = Time(timestamp::now());
        let patience = if leads { Duration::ZERO } else { BEHIND };
        if !routing::window().is_due(now, closed, patience) {
            return step;
        }
        step.propose = self
            .pacer
            .tick(now, at, closed)
            .map(|time| Entry::Close { time });
        step
    }

    /// Notes what was proposed.
    pub(super) fn proposed(&mut self, id: Option<ProposalId>) {
        self.closing = id.map(|id| (id, Instant::now()));
    }

    /// Notes that a proposal was answered.
    pub(super) fn answered(&mut self, id: ProposalId) {
        if let Some((closing, since)) = self.closing
            && closing == id
        {
            self.entry.routing.note_agreement(since.elapsed());
            self.closing = None;
        }
    }
}
