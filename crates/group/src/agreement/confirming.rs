//! A member that is not proven asks all voters to welcome its start before it takes part.

use std::collections::BTreeSet;

use super::Agreement;
use crate::boot::Boot;
use crate::member::MemberId;
use crate::state::State;

/// Welcomes that a member which is not proven asks the others for.
#[derive(Debug)]
pub(super) struct Confirming {
    welcomed: BTreeSet<u64>,
    /// The newest list of voters that is known, and the index that it is from.
    voters: (u64, Vec<u64>),
}

impl Confirming {
    /// Begins with the voters of the stored state, if there is one.
    pub(super) fn new(state: Option<&State>) -> Self {
        let voters = state.map_or((0, Vec::new()), |state| {
            (state.index(), state.configuration().0)
        });
        Self {
            welcomed: BTreeSet::new(),
            voters,
        }
    }

    /// The voters that are known.
    pub(super) fn voters(&self) -> impl Iterator<Item = MemberId> + '_ {
        self.voters.1.iter().filter_map(|id| MemberId::new(*id))
    }

    /// The voters other than `me` that have not welcomed the start.
    fn missing(&self, me: MemberId) -> impl Iterator<Item = MemberId> + '_ {
        self.voters()
            .filter(move |id| *id != me && !self.welcomed.contains(&id.get()))
    }

    /// Notes a welcome; a list of voters that is at least as new replaces the known one.
    fn welcome(&mut self, from: MemberId, applied: u64, voters: &[u64]) {
        self.welcomed.insert(from.get());
        if applied >= self.voters.0 && !voters.is_empty() {
            self.voters = (applied, voters.to_vec());
        }
    }

    /// Whether voters are known and all have welcomed the start.
    fn is_done(&self, me: MemberId) -> bool {
        !self.voters.1.is_empty() && self.missing(me).next().is_none()
    }
}

impl Agreement {
    /// Whether the member still waits for others to find its start in order.
    #[must_use]
    pub const fn is_confirming(&self) -> bool {
        self.confirming.is_some()
    }

    /// The voters that have not found this member's start in order yet.
    pub(crate) fn unconfirmed(&self) -> Vec<MemberId> {
        self.confirming
            .as_ref()
            .map_or_else(Vec::new, |confirming| confirming.missing(self.me).collect())
    }

    pub(super) fn welcomed(&mut self, boot: Boot, from: MemberId, applied: u64, voters: &[u64]) {
        if boot != self.boot {
            return;
        }
        if let Some(confirming) = &mut self.confirming {
            confirming.welcome(from, applied, voters);
        }
        self.check_confirmed();
    }

    /// Takes somebody's word that this member has forgotten nothing which it had promised to a
    /// voter that is gone for good. False if that is not waited for.
    pub fn vouch(&mut self, absent: MemberId) -> bool {
        let waits = self.unconfirmed().contains(&absent);
        if let Some(confirming) = &mut self.confirming {
            confirming.welcomed.insert(absent.get());
        }
        self.check_confirmed();
        waits
    }

    /// Lets the member take part once all voters that are known have welcomed it.
    pub(super) fn check_confirmed(&mut self) {
        if let Some(confirming) = &self.confirming
            && confirming.is_done(self.me)
        {
            self.confirming = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::Settings;
    use crate::boot::Continuity;
    use crate::cluster::{Cluster, id};
    use crate::command::Command;
    use crate::lease::Monotonic;
    use crate::outcome::Refusal;

    #[test]
    fn all_voters_of_the_newest_list_are_asked() {
        let mut confirming = Confirming::new(None);
        assert!(!confirming.is_done(id(1)), "no voter is known yet");
        confirming.welcome(id(2), 5, &[1, 2, 3]);
        assert_eq!(confirming.missing(id(1)).collect::<Vec<_>>(), [id(3)]);
        confirming.welcome(id(4), 4, &[1, 4]);
        confirming.welcome(id(4), 6, &[]);
        assert!(
            !confirming.is_done(id(1)),
            "an older list, or none, changes nothing"
        );
        confirming.welcome(id(5), 6, &[1, 2, 5]);
        assert!(confirming.is_done(id(1)));
    }

    #[test]
    fn somebody_vouches_for_a_start_where_a_voter_is_gone() {
        let mut now = Monotonic(0);
        let mut cluster = Cluster::grown(Settings::default(), 3, &mut now);
        cluster.power_off(id(3));
        cluster.power_off(id(1));
        cluster.boot(id(1), Continuity::Unproven, now);
        cluster.run(&mut now, 100);
        let waits_for = |cluster: &mut Cluster| cluster.agreement(id(1)).unwrap().unconfirmed();
        assert_eq!(waits_for(&mut cluster), [id(3)]);
        let asked = Command::RemoveMember { member: id(3) };
        assert_eq!(
            cluster.ask(id(2), asked.clone(), &mut now),
            None,
            "no majority"
        );
        let mut vouch = |member| cluster.agreement(id(1)).unwrap().vouch(id(member));
        assert!(!vouch(2), "it has confirmed");
        assert!(vouch(3));
        assert!(!vouch(3), "nothing is waited for any more");
        let outcome = cluster.ask(id(2), asked, &mut now);
        let removed = Refusal::Removed("n3".to_owned());
        assert_eq!(outcome, Some(Err(removed)), "the first request took effect");
        assert_eq!(cluster.check(), Ok(()));
    }
}
