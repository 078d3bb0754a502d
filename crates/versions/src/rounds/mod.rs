//! One node's part in the group's versions: who gives versions, and the messages about it. The
//! sequencer lives in one process of the group; each process has a [`Rounds`] of its own.
//!
//! # A round
//!
//! Nodes A, B and C have data. The group has no sequencer, and A is to be the next one.
//!
//! 1. A waits until it has heard of B and C within [`Timing::silent`]. Then it begins a round.
//! 2. A promises itself, and asks B and C to promise (`Promise`, with the last term T).
//! 3. B compares T with the last term that it knows. If they differ, B does nothing.
//! 4. B promises: it ends its own sequencer, and lets no versioned write become visible any more.
//! 5. Once no write of B is between mark and commit, B reports what it has (`Report`).
//! 6. Once A has a report of each node with data, A makes a cut and proposes it to the group.
//! 7. The group takes the first cut that follows T, and refuses all others. It notes the start of
//!    A's process with the cut.
//! 8. Each node sees the cut in the group's log. First it refuses the transactions that may take
//!    their snapshots and have not. Then it learns the cut. That ends its promise, its round, and
//!    its sequencer if it has one. Transactions that were granted before fail with 40001 if they
//!    write.
//! 9. The start of A's process that the group has noted begins as sequencer. Another start of A
//!    does not: step 1 follows.
//!
//! | state of a node | begins | ends | durable |
//! |---|---|---|---|
//! | gives versions | step 9 | step 4, 8 | no |
//! | tries to begin | step 1 | step 6, 8 | no |
//! | has promised | step 2, 4 | step 8, a restart | no |
//! | owes a report | step 4 | step 5, 8 | no |
//!
//! # Why it is safe
//!
//! - *One sequencer in a term.* The log has one cut of each term, and one start of one process
//!   begins with it.
//! - *No grant of term T commits after the cut that follows T.* Before the cut is proposed, every
//!   node has promised. It lets no write commit until it learns the cut, which makes its grants
//!   void. A promise is not durable: after a restart a node has no grants, so nothing of its own
//!   commits. Whatever it applies was reported by its origin.
//! - *No snapshot is taken too late.* A transaction that may take its snapshot is refused before
//!   the next term begins. Otherwise nothing holds back the writes of the next term, and the
//!   snapshot has them.
//! - *No write is given up.* All nodes report, not a majority. Whatever is committed anywhere is in
//!   the report of the node that has committed it.
//!
//! Example of what goes wrong with a majority and without more rules: A has the sequencer and is
//! cut off. B and C begin another one. A commits its own T1 meanwhile, and B gives the same number
//! to T2.
//!
//! The price: if one node with data is away, nobody begins. Transactions wait, and fail with 55P03
//! that names the node. If it does not come back, it has to be removed.
//!
//! # What ends a wait
//!
//! Each message may be lost, repeated or late.
//!
//! | message | if it is lost |
//! |---|---|
//! | hello | comes again each [`Timing::hello_every`] |
//! | ask | comes again each [`Timing::again`], until the answer leaves nothing to ask |
//! | answer | the next ask repeats the request |
//! | announcement | comes again each [`Timing::hello_every`] |
//! | promise, report | come again each [`Timing::again`] until the round ends |
//!
//! - *B has promised, and A ends.* B says in its hello that it waits in term T. The node that is to
//!   be the next sequencer begins a round, if it is in term T too. A hello of an earlier term says
//!   nothing about T. Otherwise the hello from before a cut would begin a round after the cut, and
//!   so on for ever.
//! - *A and B begin rounds at once.* C promises both, and reports to both. One cut is refused.
//! - *C is removed while A's round runs.* A takes C out of its round. If A has proposed the cut by
//!   then, A begins another round: the cut may count writes of C that nobody else ever gets.
//! - *C starts anew while A's round runs.* A asks C again.
//!
//! Not for: the rules of a node ([`Local`]) and of the sequencer ([`Sequencer`]), the group's log,
//! connections. There is no clock in here: the caller says which moment it is.

mod drains;
#[cfg(test)]
mod model;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod world;

use std::collections::{BTreeMap, BTreeSet};

use crate::broken::Broken;
use crate::bytes::Announcement;
use crate::cut::Cut;
use crate::grant::{Answer, Batch, Refusal};
use crate::joining::Learned;
use crate::local::{Error, Local};
use crate::message::{Content, Message};
use crate::number::{Boot, NodeNumber, Term};
use crate::sequencer::Sequencer;
use crate::vector::{Report, Reports};

pub use drains::{Drains, NextDrain};

/// A point of the node's monotonic clock, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// Whether a period has passed. A clock that went back counts as passed.
    const fn is_past(self, since: Self, period: u64) -> bool {
        match self.0.checked_sub(since.0) {
            Some(passed) => passed >= period,
            None => true,
        }
    }

    fn is_due(self, since: Option<Self>, period: u64) -> bool {
        since.is_none_or(|since| self.is_past(since, period))
    }
}

/// Periods, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Timing {
    /// Each node says so often that it is there.
    pub hello_every: u64,
    /// A message without an answer is sent again after this.
    pub again: u64,
    /// A node that was not heard of for so long is away.
    pub silent: u64,
    /// After a round that has ended in a proposal.
    pub pause: u64,
    /// Stored records that say nothing any more are removed so often.
    pub prune_every: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            hello_every: 1_000_000,
            again: 300_000,
            silent: 4_000_000,
            pause: 1_000_000,
            prune_every: 30_000_000,
        }
    }
}

/// The group's agreement about versions, as far as a node knows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Agreement {
    /// The members with data, this node included.
    pub nodes: BTreeSet<NodeNumber>,
    /// The last cuts, in their order.
    pub cuts: Vec<Cut>,
    /// The proposer of the last cut and the start of its process. `None` if no cut was agreed, or
    /// if the proposer is no member any more.
    pub holder: Option<(NodeNumber, Boot)>,
}

/// An act that the caller has to carry out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Send a message, which may be lost.
    Send(NodeNumber, Content),
    /// Propose the cut to the group, with the start of this process. Nothing depends on it being
    /// agreed.
    Propose(Cut),
    /// The sequencer has answered this node: grants and releases took effect.
    Answered(Answer),
    /// The request of this number can't be granted at all.
    Refused(u64, Refusal),
    /// Remove the stored records that say nothing any more ([`Local::is_superseded`]).
    Prune,
}

/// The outcome of learning the group's agreement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Followed {
    /// The node goes on.
    Current,
    /// The node goes on, and has writes that the group has given up.
    Diverged,
    /// The node was away for more cuts than are kept: the process has to start anew.
    StartAnew,
}

/// The rules of one node: its transactions and appliers, and the sequencer if it has it.
#[derive(Debug)]
pub struct Rules<'a> {
    /// The node.
    pub local: &'a mut Local,
    /// The sequencer, if this node gives versions.
    pub sequencer: &'a mut Option<Sequencer>,
}

/// The last sign of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Heard {
    at: Moment,
    boot: Boot,
    /// The term in which the node has promised, if it waits for a cut.
    waits: Option<Term>,
}

/// An attempt to begin as sequencer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Round {
    number: u64,
    follows: Term,
    reports: Reports,
    sent: Option<Moment>,
}

/// A report that this node owes for its promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Owed {
    boot: Boot,
    round: u64,
}

/// One node's part in the group's versions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rounds {
    me: NodeNumber,
    boot: Boot,
    timing: Timing,
    agreement: Agreement,
    started: Moment,
    heard: BTreeMap<NodeNumber, Heard>,
    round: Option<Round>,
    /// Counts the rounds of this start.
    last_round: u64,
    /// The end of the last round.
    paused: Option<Moment>,
    /// By the node that has asked for the promise.
    owed: BTreeMap<NodeNumber, Owed>,
    /// The nodes that have reported for cuts that this start has proposed after a term.
    proposed: Option<(Term, BTreeSet<NodeNumber>)>,
    /// The last message to the sequencer.
    asked: Option<(Batch, Moment)>,
    /// The last announcement.
    announced: Option<(Announcement, Moment)>,
    hello_at: Option<Moment>,
    pruned: Moment,
    /// The nodes whose writes the last cut may count: a sequencer knows grants of all of them.
    cut_with: BTreeSet<NodeNumber>,
    effects: Vec<Effect>,
    pub(crate) broken: Option<Broken>,
}

impl Rounds {
    /// Begins with a start of a node's process.
    #[must_use]
    pub fn new(
        me: NodeNumber,
        boot: Boot,
        timing: Timing,
        agreement: Agreement,
        now: Moment,
    ) -> Self {
        Self {
            me,
            boot,
            timing,
            started: now,
            heard: BTreeMap::new(),
            round: None,
            last_round: 0,
            paused: None,
            owed: BTreeMap::new(),
            proposed: None,
            asked: None,
            announced: None,
            hello_at: None,
            pruned: now,
            cut_with: agreement.nodes.clone(),
            agreement,
            effects: Vec::new(),
            broken: None,
        }
    }

    /// The group's agreement, as far as the node knows.
    #[must_use]
    pub const fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// How many rounds this start has begun.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.last_round
    }

    /// Whether something comes again soon.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.round.is_some() || self.asked.is_some() || !self.owed.is_empty()
    }

    /// The nodes that are away. None in the first moments of a start.
    #[must_use]
    pub fn missing(&self, now: Moment) -> Vec<NodeNumber> {
        if now.is_past(self.started, self.timing.silent) {
            self.silent(now).collect()
        } else {
            Vec::new()
        }
    }

    fn others(&self) -> impl Iterator<Item = NodeNumber> + use<> {
        let me = self.me;
        let nodes = self.agreement.nodes.clone();
        nodes.into_iter().filter(move |node| *node != me)
    }

    fn silent(&self, now: Moment) -> impl Iterator<Item = NodeNumber> {
        self.others().filter(move |node| {
            let heard = self.heard.get(node);
            heard.is_none_or(|heard| now.is_past(heard.at, self.timing.silent))
        })
    }

    fn send(&mut self, to: NodeNumber, content: Content) {
        self.effects.push(Effect::Send(to, content));
    }

    fn send_to_others(&mut self, content: &Content) {
        for node in self.others() {
            self.send(node, content.clone());
        }
    }

    fn done(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Learns what the group has agreed. If it has a later term than the node, the caller refuses
    /// first all transactions that may take their snapshots and have not.
    ///
    /// # Errors
    ///
    /// As [`Local::learn`], but for [`Error::Missing`].
    pub fn learn(
        &mut self,
        rules: &mut Rules<'_>,
        agreement: Agreement,
    ) -> Result<Followed, Error> {
        let nodes = &agreement.nodes;
        if self.broken != Some(Broken::RemovedWaits) {
            self.heard.retain(|node, _| nodes.contains(node));
        }
        self.owed.retain(|node, _| nodes.contains(node));
        if let Some(round) = &mut self.round
            && self.broken != Some(Broken::RemovedCounts)
        {
            round.reports.retain(|node, _| nodes.contains(node));
        }
        self.agreement = agreement;
        let mut followed = Followed::Current;
        let last = self.agreement.cuts.last().map(|cut| cut.term);
        for cut in self.agreement.cuts.clone() {
            match rules.local.learn(&cut) {
                Ok(Learned::Known) => continue,
                Ok(Learned::Diverged) => followed = Followed::Diverged,
                Ok(_) => {}
                Err(Error::Missing) => return Ok(Followed::StartAnew),
                Err(error) => return Err(error),
            }
            *rules.sequencer = None;
            self.cut_with = self.agreement.nodes.clone();
            let begins =
                self.agreement.holder == Some((self.me, self.boot)) && Some(cut.term) == last;
            if begins {
                *rules.sequencer = Sequencer::begin(&cut);
                // A node may have been removed since it has reported.
                if let Some((follows, reported)) = &self.proposed
                    && *follows == cut.follows
                    && self.broken != Some(Broken::RemovedCounts)
                {
                    self.cut_with.extend(reported);
                }
            }
            self.round = None;
            self.owed.clear();
            self.hello_at = None;
            if self.broken != Some(Broken::AskOnce) {
                self.asked = None;
            }
        }
        Ok(followed)
    }

    /// Takes a message of another node.
    pub fn receive(&mut self, rules: &mut Rules<'_>, message: Message, now: Moment) -> Vec<Effect> {
        let (from, boot) = (message.from, message.boot);
        if from == self.me || !self.agreement.nodes.contains(&from) {
            return self.done();
        }
        let heard = self.heard.entry(from).or_insert(Heard {
            at: now,
            boot,
            waits: None,
        });
        if boot < heard.boot {
            // Of an earlier start.
            return self.done();
        }
        if boot > heard.boot {
            heard.waits = None;
            // The earlier start's promise has ended with it.
            if let Some(round) = &mut self.round {
                round.reports.remove(&from);
            }
        }
        heard.at = now;
        heard.boot = boot;
        match message.content {
            Content::Hello { term, has, waits } => {
                heard.waits = waits.then_some(term);
                if let Some(sequencer) = rules.sequencer {
                    // A refusal is for a start or a term that is over: it says hello again.
                    let _ = sequencer.restarted(term, from, boot, &has);
                    self.announce(rules, now, false);
                }
            }
            Content::Ask(batch) => {
                if batch.node == from
                    && batch.boot == boot
                    && let Some(sequencer) = rules.sequencer
                {
                    let answer = sequencer.receive(&batch, true);
                    self.send(from, Content::Answer { to: boot, answer });
                    self.announce(rules, now, false);
                }
            }
            Content::Answer { to, answer } => {
                let holder = self.agreement.holder.map(|(node, _)| node);
                if to == self.boot && holder == Some(from) {
                    self.asked = None;
                    self.answered(rules, answer);
                }
            }
            Content::Announce(Announcement { term, ends }) => {
                rules.local.announced(term, &ends);
            }
            Content::Promise { follows, round } => {
                self.promise(rules, follows, from, Owed { boot, round });
            }
            Content::Report { to, round, report } => self.reported(from, to, round, report),
        }
        self.done()
    }

    /// Step 4: holds back all versioned writes until the next cut, and owes a report.
    fn promise(&mut self, rules: &mut Rules<'_>, follows: Term, to: NodeNumber, owed: Owed) {
        if rules.local.identity().2 != follows {
            // One of both has to learn what the group has agreed first.
            return;
        }
        if self.broken != Some(Broken::PromiseKeepsSequencer) {
            *rules.sequencer = None;
        }
        if self.broken != Some(Broken::PromiseHoldsNothing) {
            rules.local.promise(None);
        }
        self.owed.insert(to, owed);
    }

    /// Step 5: reports, if nothing is between its mark and its commit.
    fn report(&mut self, rules: &Rules<'_>) {
        if self.owed.is_empty() {
            return;
        }
        let report = match rules.local.report() {
            Ok(report) => report,
            Err(Error::Busy) => return,
            Err(_) => {
                self.owed.clear();
                return;
            }
        };
        for (to, Owed { boot, round }) in std::mem::take(&mut self.owed) {
            let report = report.clone();
            if to == self.me {
                self.reported(to, boot, round, report);
            } else {
                let to_boot = boot;
                self.send(
                    to,
                    Content::Report {
                        to: to_boot,
                        round,
                        report,
                    },
                );
            }
        }
    }

    fn reported(&mut self, from: NodeNumber, to: Boot, number: u64, report: Report) {
        if let Some(round) = &mut self.round
            && to == self.boot
            && round.number == number
            && round.follows == report.term
        {
            round.reports.insert(from, report);
        }
    }

    /// Brings requests and releases to the sequencer.
    pub fn exchange(&mut self, rules: &mut Rules<'_>, now: Moment) -> Vec<Effect> {
        let Some((holder, _)) = self.agreement.holder else {
            return self.done();
        };
        let Some(batch) = rules.local.batch() else {
            self.asked = None;
            return self.done();
        };
        if holder == self.me {
            if let Some(sequencer) = rules.sequencer {
                let answer = sequencer.receive(&batch, true);
                self.announce(rules, now, false);
                self.answered(rules, answer);
            }
            return self.done();
        }
        let again = self.broken != Some(Broken::AskOnce);
        let is_new = self.asked.as_ref().is_none_or(|(asked, at)| {
            again && (*asked != batch || now.is_past(*at, self.timing.again))
        });
        if is_new {
            self.send(holder, Content::Ask(batch.clone()));
            self.asked = Some((batch, now));
        }
        self.done()
    }

    fn answered(&mut self, rules: &mut Rules<'_>, answer: Answer) {
        for (number, refusal) in rules.local.answer(&answer) {
            match refusal {
                Refusal::TooMany | Refusal::Tables | Refusal::Window => {
                    self.effects.push(Effect::Refused(number, refusal));
                }
                Refusal::OtherBoot => self.hello_at = None,
                // Somebody has to learn a cut first; the request comes again.
                _ => {}
            }
        }
        self.effects.push(Effect::Answered(answer));
    }

    /// Tells all what is decided, if it is something new or `again`.
    fn announce(&mut self, rules: &mut Rules<'_>, now: Moment, again: bool) {
        let Some(sequencer) = rules.sequencer else {
            return;
        };
        let announcement = Announcement {
            term: sequencer.term(),
            ends: sequencer.ends(),
        };
        let is_known = self.announced.as_ref().is_some_and(|(last, at)| {
            *last == announcement && !(again && now.is_past(*at, self.timing.hello_every))
        });
        if is_known {
            return;
        }
        rules.local.announced(announcement.term, &announcement.ends);
        self.send_to_others(&Content::Announce(announcement.clone()));
        self.announced = Some((announcement, now));
    }

    /// Does all that is due by the clock. `candidate` is the node that is to give versions next, as
    /// far as this node knows; nothing depends on all nodes naming the same one.
    pub fn tick(
        &mut self,
        rules: &mut Rules<'_>,
        now: Moment,
        candidate: Option<NodeNumber>,
    ) -> Vec<Effect> {
        self.hello(rules, now);
        self.announce(rules, now, true);
        self.report(rules);
        self.begin_round(rules, now, candidate);
        self.report(rules);
        self.ask_for_promises(now);
        self.finish_round(now);
        self.prune(rules, now);
        self.done()
    }

    fn hello(&mut self, rules: &Rules<'_>, now: Moment) {
        if !now.is_due(self.hello_at, self.timing.hello_every) {
            return;
        }
        self.hello_at = Some(now);
        self.send_to_others(&Content::Hello {
            term: rules.local.identity().2,
            has: rules.local.has(),
            waits: rules.local.has_promised(),
        });
    }

    /// Whether the group has no sequencer, as far as this node knows.
    #[must_use]
    pub fn lacks_sequencer(&self, local: &Local, has_sequencer: bool) -> bool {
        let Some((holder, boot)) = self.agreement.holder else {
            return true;
        };
        let term = local.identity().2;
        let waits = |heard: &Heard| {
            let in_this = heard.waits == Some(term);
            in_this || (heard.waits.is_some() && self.broken == Some(Broken::RemovedWaits))
        };
        if local.has_promised() || self.heard.values().any(waits) {
            return true;
        }
        // What a node that is gone was granted is void by the next cut.
        if !self.cut_with.is_subset(&self.agreement.nodes) {
            return true;
        }
        if holder == self.me {
            return !has_sequencer;
        }
        let heard = self.heard.get(&holder);
        heard.is_some_and(|heard| heard.boot > boot)
    }

    /// Steps 1 and 2.
    fn begin_round(&mut self, rules: &mut Rules<'_>, now: Moment, candidate: Option<NodeNumber>) {
        let follows = rules.local.identity().2;
        if self
            .round
            .as_ref()
            .is_some_and(|round| round.follows != follows)
        {
            self.round = None;
        }
        let holder = self.agreement.holder.map(|(node, _)| node);
        let may = candidate == Some(self.me) || holder == Some(self.me);
        if self.round.is_some()
            || !may
            || !now.is_due(self.paused, self.timing.pause)
            || rules.local.is_diverged()
            || !self.lacks_sequencer(rules.local, rules.sequencer.is_some())
            || self.silent(now).next().is_some()
        {
            return;
        }
        self.last_round = self.last_round.saturating_add(1);
        let number = self.last_round;
        self.round = Some(Round {
            number,
            follows,
            reports: Reports::new(),
            sent: None,
        });
        let owed = Owed {
            boot: self.boot,
            round: number,
        };
        self.promise(rules, follows, self.me, owed);
    }

    fn ask_for_promises(&mut self, now: Moment) {
        let Some(round) = &mut self.round else {
            return;
        };
        if !now.is_due(round.sent, self.timing.again) {
            return;
        }
        round.sent = Some(now);
        let promise = Content::Promise {
            follows: round.follows,
            round: round.number,
        };
        let reported: BTreeSet<NodeNumber> = round.reports.keys().copied().collect();
        for node in self.others().filter(|node| !reported.contains(node)) {
            self.send(node, promise.clone());
        }
    }

    /// Step 6: proposes the cut, once all have reported.
    fn finish_round(&mut self, now: Moment) {
        let Some(round) = &self.round else {
            return;
        };
        let nodes = &self.agreement.nodes;
        let count = nodes.len();
        let is_complete = match self.broken {
            Some(Broken::MajorityReports) => crate::is_majority(round.reports.len(), count),
            Some(Broken::RemovedCounts) => {
                let has_reported = |node| round.reports.contains_key(node);
                round.reports.len() == count && nodes.iter().all(has_reported)
            }
            _ => round.reports.keys().eq(nodes),
        };
        if !is_complete {
            return;
        }
        let (follows, reports) = (round.follows, round.reports.clone());
        self.round = None;
        self.paused = Some(now);
        let Ok(cut) = Cut::new_sequencer(follows, count, &reports, true) else {
            return;
        };
        let reported = reports.into_keys();
        match &mut self.proposed {
            Some((term, nodes)) if *term == follows => nodes.extend(reported),
            proposed => *proposed = Some((follows, reported.collect())),
        }
        self.effects.push(Effect::Propose(cut));
    }

    fn prune(&mut self, rules: &Rules<'_>, now: Moment) {
        if now.is_past(self.pruned, self.timing.prune_every) && !rules.local.is_diverged() {
            self.pruned = now;
            self.effects.push(Effect::Prune);
        }
    }
}
