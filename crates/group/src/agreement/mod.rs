//! One member of a group: the algorithm over its stored log, with the agreed state on top.
//!
//! A worker of the server drives it: it brings the time, messages and proposals in, writes what
//! [`Agreement::work`] gives, and sends and shows what [`Agreement::persisted`] gives back. Nothing
//! that a member says leaves it before what it promises is written: messages come out of
//! `persisted` alone.
//!
//! ```text
//! tick, receive, propose  ->  work  ->  write, flush  ->  persisted  ->  send, show what was applied
//! ```
//!
//! Invariants: one thread; no clock, no randomness, no input or output of its own. A bad message is
//! an error and changes nothing. If the algorithm panics nevertheless, the agreement has failed: it
//! is started anew from what is stored.
//!
//! Not for: connections and tables, which the server side has.
//!
//! | file | part |
//! |---|---|
//! | `elections`, `pacer` | ticks, signs of life, standing for election |
//! | `receiving` | messages, and who is believed |
//! | `confirming` | the welcome that a member needs which is not proven |
//! | `proposing`, `proposals` | a member's proposals and their answers |
//! | `configuring` | who receives the log and who votes |
//! | `writing` | work to be written, and what follows from it |
//! | `applying` | agreed entries |
//! | `library` | the consensus library |

mod applying;
mod configuring;
mod confirming;
mod elections;
mod library;
mod pacer;
mod proposals;
mod proposing;
mod receiving;
#[cfg(test)]
mod testing;
mod writing;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use raft::eraftpb::HardState;
use raft::{RawNode, StateRole};

pub use applying::Applied;
use confirming::Confirming;
pub(crate) use library::snapshot_of;
use library::{open, words};
use pacer::Pacer;
pub use proposals::PROPOSALS_LIMIT;
use proposals::Proposals;
pub use writing::Effects;
use writing::Outstanding;

use crate::boot::{Boot, Continuity, Distrust, Known, Start};
use crate::command::Token;
use crate::envelope::Body;
use crate::error::{Error, Stopped};
use crate::lease::{Leases, Monotonic};
use crate::member::{GroupId, MemberId, MemberState};
use crate::mirror::Mirror;
use crate::mutation::Mutation;
use crate::state::State;
use crate::stored::{Core, Stored};

/// The times and sizes of an agreement.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The length of a tick, in microseconds.
    pub tick: u64,
    /// A leader shows that it is there once in so many ticks.
    pub heartbeat_ticks: u16,
    /// A member stands for election after so many ticks without a leader, or up to twice as many.
    pub election_ticks: u16,
    /// A snapshot is taken after so many entries.
    pub snapshot_entries: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            tick: 100_000,
            heartbeat_ticks: 2,
            election_ticks: 15,
            snapshot_entries: 1000,
        }
    }
}

/// Facts about another member from its messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heard {
    pub(crate) at: Monotonic,
    pub(crate) applied: u64,
}

/// One member's agreement.
pub struct Agreement {
    pub(crate) settings: Settings,
    group: GroupId,
    pub(crate) me: MemberId,
    boot: Boot,
    start: Start,
    pacer: Pacer,
    pub(crate) raw: RawNode<Mirror>,
    pub(crate) state: Option<State>,
    hard: HardState,
    core_changed: bool,
    known: BTreeMap<MemberId, Known>,
    known_changed: BTreeSet<MemberId>,
    stopped: Option<Stopped>,
    confirming: Option<Confirming>,
    outstanding: Option<Outstanding>,
    work_number: u64,
    outbox: Vec<(MemberId, Body)>,
    proposals: Proposals,
    leases: Leases,
    pub(crate) heard: BTreeMap<MemberId, Heard>,
    pub(crate) started: Monotonic,
    pub(crate) now: Monotonic,
    /// Whether a snapshot is taken at once: a new member takes only one that it is in.
    snapshot_due: bool,
    mutation: Option<Mutation>,
}

impl std::fmt::Debug for Agreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agreement")
            .field("me", &self.me)
            .field("boot", &self.boot)
            .field("term", &self.raw.raft.term)
            .field("role", &self.raw.raft.state)
            .field("stopped", &self.stopped)
            .finish_non_exhaustive()
    }
}

impl Agreement {
    /// Starts from what is stored; `random` is 64 fresh random bits.
    ///
    /// If the agreement has [`Agreement::stopped`] then already, its first work notes why.
    ///
    /// # Errors
    /// [`Error::Malformed`] and [`Error::Damaged`] if what is stored can't be read or does not fit
    /// together.
    pub fn start(
        stored: &Stored,
        settings: Settings,
        continuity: Continuity,
        random: u64,
        now: Monotonic,
    ) -> Result<Self, Error> {
        let core = match &stored.core {
            Some(bytes) => Core::decode(bytes)?,
            None => Core::default(),
        };
        let boot = Boot {
            counter: core.boot.counter + 1,
            random,
        };
        let stopped = match (core.refused, continuity) {
            (Some(why), _) => Some(Stopped::Refused(why)),
            (None, Continuity::Broken) => Some(Stopped::Refused(Distrust::Broken)),
            _ => None,
        };
        let mut known = BTreeMap::new();
        for (member, bytes) in &stored.known {
            known.insert(*member, Known::decode(bytes)?);
        }
        let (state, mirror) = stored.open(&core)?;
        let start = Start {
            term: mirror.hard.term,
            index: mirror.last(),
        };
        let hard = mirror.hard.clone();
        let raw = open(
            stored.me,
            settings,
            state.as_ref().map_or(0, State::index),
            mirror,
        )?;
        let confirming =
            (continuity == Continuity::Unproven).then(|| Confirming::new(state.as_ref()));
        let mut agreement = Self {
            settings,
            group: stored.group,
            me: stored.me,
            boot,
            start,
            pacer: Pacer::new(&settings, random, now),
            raw,
            state,
            hard,
            core_changed: true,
            known,
            known_changed: BTreeSet::new(),
            stopped,
            confirming,
            outstanding: None,
            work_number: 0,
            outbox: Vec::new(),
            proposals: Proposals::new(stored.me, boot.counter),
            leases: Leases::default(),
            heard: BTreeMap::new(),
            started: now,
            now,
            snapshot_due: false,
            mutation: None,
        };
        if let Some(state) = &agreement.state {
            agreement.leases.meet_all(agreement.me, state, now);
        }
        agreement.check_removed();
        agreement.check_confirmed();
        if agreement.confirming.is_some() {
            agreement.ping();
        }
        Ok(agreement)
    }

    /// This member.
    #[must_use]
    pub const fn me(&self) -> MemberId {
        self.me
    }

    /// This start.
    #[must_use]
    pub const fn boot(&self) -> Boot {
        self.boot
    }

    /// The agreed state as far as it is known here; none before the log has come.
    #[must_use]
    pub const fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// Why the member takes no part any more.
    #[must_use]
    pub const fn stopped(&self) -> Option<&Stopped> {
        self.stopped.as_ref()
    }

    /// The leader, if one is known.
    #[must_use]
    pub fn leader(&self) -> Option<MemberId> {
        MemberId::new(self.raw.raft.leader_id)
    }

    /// Whether this member leads, as far as it knows. Only a [`Token`] proves anything to others.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }

    /// The term.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.raw.raft.term
    }

    /// The token under which this member may act alone at this moment.
    #[must_use]
    pub fn may_act(&self, lease: &[u8], now: Monotonic) -> Option<Token> {
        if self.stopped.is_some() {
            return None;
        }
        self.leases.may_act(lease, now)
    }

    /// The grant that this member has of a lease, whether or not it may act at this moment.
    #[must_use]
    pub fn granted(&self, lease: &[u8]) -> Option<Token> {
        Some(self.leases.granted(lease, self.now)?.0)
    }

    /// Says that a message to a member could not be sent.
    ///
    /// # Errors
    /// [`Error::Outstanding`], [`Error::Stopped`], [`Error::Failed`].
    pub fn unreachable(&mut self, member: MemberId) -> Result<(), Error> {
        self.ready_for_more()?;
        self.guard(|raw| raw.report_unreachable(member.get()))
    }

    fn check_removed(&mut self) {
        let member = self.state.as_ref().and_then(|state| state.member(self.me));
        if member.is_some_and(|member| member.state == MemberState::Removed)
            && self.stopped.is_none()
        {
            self.stopped = Some(Stopped::Removed);
        }
    }

    fn stop(&mut self, why: Stopped) {
        if self.stopped.is_none() {
            self.stopped = Some(why);
            self.core_changed = true;
        }
    }

    fn ready_for_more(&self) -> Result<(), Error> {
        match (&self.stopped, &self.outstanding) {
            (Some(stopped), _) => Err(Error::Stopped(stopped.clone())),
            (None, Some(_)) => Err(Error::Outstanding),
            (None, None) => Ok(()),
        }
    }

    fn fail(&mut self, why: String) -> Error {
        self.stopped = Some(Stopped::Failed(why.clone()));
        Error::Failed(why)
    }

    /// Calls the library; a panic of it ends this agreement and nothing else.
    fn guard<T>(&mut self, call: impl FnOnce(&mut RawNode<Mirror>) -> T) -> Result<T, Error> {
        let raw = &mut self.raw;
        catch_unwind(AssertUnwindSafe(|| call(raw))).map_err(|panic| self.fail(words(&*panic)))
    }

    fn is_broken(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }
}
