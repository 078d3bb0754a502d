//! A member's view of the group for users: who leads, whether there is a majority, who is
//! missing since when.
//!
//! It is this member's view at this moment. Not for: decisions.

use std::fmt;

use raft::StateRole;

use crate::agreement::Agreement;
use crate::lease::Monotonic;
use crate::member::{MemberId, MemberState};

/// How one member looks from here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sight {
    /// The member.
    pub id: MemberId,
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: MemberState,
    /// Whether it is reachable: a message from it came within the last election timeout.
    pub reachable: bool,
    /// How long nothing has come from it, in microseconds; 0 for this member.
    pub silent: u64,
    /// The index that it has applied, as far as it said.
    pub applied: u64,
    /// The index that it has stored, as the leader knows; none at other members.
    pub stored: Option<u64>,
}

/// A member's view of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnosis {
    /// The leader's number and name, if one is known.
    pub leader: Option<(MemberId, String)>,
    /// The term.
    pub term: u64,
    /// The index that this member knows to be agreed.
    pub committed: u64,
    /// Whether a majority of those with a vote is reachable from here.
    pub majority: bool,
    /// The names of those with a vote that have still to find this member's start in order.
    pub unconfirmed: Vec<String>,
    /// All members that are not removed, by number.
    pub members: Vec<Sight>,
}

impl Agreement {
    /// This member's view of the group.
    #[must_use]
    pub fn diagnosis(&self, now: Monotonic) -> Diagnosis {
        let raft = &self.raw.raft;
        let patience = u64::from(self.settings.election_ticks) * self.settings.tick;
        let mut members = Vec::new();
        let (mut voters, mut reached) = (0, 0);
        for member in self.state.iter().flat_map(crate::State::members) {
            if member.state == MemberState::Removed {
                continue;
            }
            let own = member.id == self.me;
            let heard = self.heard.get(&member.id);
            let silent = if own {
                0
            } else {
                now.since(heard.map_or(self.started, |heard| heard.at))
            };
            let reachable = own || (heard.is_some() && silent <= patience);
            if member.state.votes() {
                voters += 1;
                reached += usize::from(reachable);
            }
            let progress = raft.prs().get(member.id.get());
            members.push(Sight {
                id: member.id,
                name: member.about.name.clone(),
                state: member.state,
                reachable,
                silent,
                applied: if own {
                    self.state.as_ref().map_or(0, crate::State::index)
                } else {
                    heard.map_or(0, |heard| heard.applied)
                },
                stored: progress
                    .filter(|_| raft.state == StateRole::Leader)
                    .map(|progress| progress.matched),
            });
        }
        Diagnosis {
            leader: self.leader().map(|id| {
                let name = self.state.as_ref().map(|state| state.name_of(id));
                (id, name.unwrap_or_else(|| format!("member {id}")))
            }),
            term: raft.term,
            committed: raft.raft_log.committed,
            majority: voters > 0 && reached * 2 > voters,
            unconfirmed: self
                .unconfirmed()
                .into_iter()
                .map(|id| {
                    self.state
                        .as_ref()
                        .map_or_else(|| format!("member {id}"), |s| s.name_of(id))
                })
                .collect(),
            members,
        }
    }
}

impl Diagnosis {
    /// The names of those with a vote that are not reachable.
    #[must_use]
    pub fn missing(&self) -> Vec<&str> {
        let voters = self.members.iter().filter(|member| member.state.votes());
        voters
            .filter(|member| !member.reachable)
            .map(|member| member.name.as_str())
            .collect()
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missing = self.missing().join(", ");
        if !self.unconfirmed.is_empty() {
            let names = self.unconfirmed.join(", ");
            return write!(
                f,
                "this node's start is not confirmed: waiting for members {names}"
            );
        }
        match (&self.leader, self.majority, missing.is_empty()) {
            (_, false, false) => write!(f, "no majority: waiting for members {missing}"),
            (_, false, true) => {
                f.write_str("no majority: this node has not got the group's log yet")
            }
            (None, true, _) => f.write_str("a leader is being elected"),
            (Some((_, name)), true, true) => write!(f, "node \"{name}\" leads"),
            (Some((_, name)), true, false) => {
                write!(f, "node \"{name}\" leads, waiting for members {missing}")
            }
        }
    }
}
