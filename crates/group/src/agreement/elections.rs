//! Time of a member: ticks, signs of life, and when it stands for election.

use std::collections::BTreeSet;

use raft::StateRole;

use super::Agreement;
use crate::envelope::Body;
use crate::error::Error;
use crate::lease::Monotonic;
use crate::member::{MemberId, MemberState};
use crate::state::State;

impl Agreement {
    /// Brings the time forward: elections, heartbeats, repeats.
    ///
    /// # Errors
    /// [`Error::Stopped`], [`Error::Outstanding`], [`Error::Failed`].
    pub fn tick(&mut self, now: Monotonic) -> Result<(), Error> {
        self.ready_for_more()?;
        self.now = self.now.max(now);
        for _ in 0..self.pacer.passed(&self.settings, self.now) {
            self.tick_once()?;
        }
        Ok(())
    }

    fn tick_once(&mut self) -> Result<(), Error> {
        let ping = self.pacer.next_pings();
        if ping {
            self.ping();
        }
        if self.confirming.is_some() {
            return Ok(());
        }
        self.guard(|raw| raw.tick())?;
        let raft = &self.raw.raft;
        let waits = raft.state != StateRole::Leader && raft.promotable();
        if waits && self.pacer.stands_after(raft.election_elapsed) {
            self.campaign()?;
        }
        if ping {
            self.offer_all()?;
        }
        Ok(())
    }

    /// Shows the others that this member is there, or asks them to welcome it.
    pub(super) fn ping(&mut self) {
        let asks = self.confirming.is_some();
        for member in self.others() {
            self.outbox.push((member, Body::Ping { asks }));
        }
    }

    /// Stands for election. For tests; `tick` does it when it is time.
    pub(crate) fn campaign(&mut self) -> Result<(), Error> {
        self.pacer.draw(&self.settings);
        self.guard(|raw| {
            raw.raft.election_elapsed = 0;
            // Refused where an entry that changes the configuration waits to be applied.
            let _ = raw.campaign();
        })
    }

    /// All other members that are not removed.
    pub(super) fn others(&self) -> Vec<MemberId> {
        let mut others: BTreeSet<MemberId> = self
            .state
            .iter()
            .flat_map(State::members)
            .filter(|member| member.state != MemberState::Removed)
            .map(|member| member.id)
            .collect();
        if let Some(confirming) = &self.confirming {
            others.extend(confirming.voters());
        }
        if self.state.is_none() {
            others.extend(self.heard.keys());
        }
        others.remove(&self.me);
        others.into_iter().collect()
    }
}
