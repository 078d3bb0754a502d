//! A group of nodes in memory, for tests of rounds: a real [`Rounds`], [`Local`] and [`Sequencer`]
//! on each node, messages as bytes, the group's log, streams, crashes, a node that is cut off, a
//! node that is removed. Each step is a [`Step`]. `history.rs` judges what came of it.
//!
//! A transaction is acknowledged as soon as it is visible at its own node: all that a client may
//! have seen counts.

use std::collections::{BTreeMap, BTreeSet};

use super::{Agreement, Effect, Moment, Rounds, Rules, Timing};
use crate::broken::Broken;
use crate::cluster::{State, Transaction, number};
use crate::history::{Facts, Shown, cycle};
use crate::{
    Access, Boot, Bytes, Commit, Cut, Local, Message, NodeNumber, Record, Sequencer, Start,
    TableNumber, Term, Verdict,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Step {
    /// A node's process has its turn.
    Turn(usize),
    /// The message at this place arrives.
    Deliver(usize),
    /// The message at this place is lost.
    Lose(usize),
    /// The group takes the proposal at this place, or refuses it.
    Agree(usize),
    /// The proposal at this place is lost.
    Forget(usize),
    /// A node learns all that is agreed.
    Learn(usize),
    Begin(usize),
    /// A session may take its snapshot from now on.
    Ready(usize),
    /// The session takes its snapshot.
    Start(usize),
    Again(usize),
    Mark(usize),
    Show(usize),
    Publish(usize),
    Abort(usize),
    /// A node applies the next entry of another one's stream.
    Apply(usize, usize),
    /// A node publishes what it has applied.
    Applied(usize, usize),
    /// A node's process starts anew. True: its server does, and loses what it has not flushed.
    Crash(usize, bool),
    Isolate(usize),
    Heal,
    Remove(usize),
}

/// How much may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    pub rounds: u64,
    pub crashes: u8,
    pub isolations: u8,
    pub removals: u8,
    pub aborts: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Entry {
    Cut(Cut, NodeNumber, Boot),
    Removed(usize),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub local: Local,
    pub sequencer: Option<Sequencer>,
    pub rounds: Rounds,
    pub clock: Moment,
    pub rows: BTreeMap<TableNumber, usize>,
    pub visible: BTreeSet<usize>,
    /// The node's own commits, in their order.
    pub log: Vec<usize>,
    /// How many entries of each other node's log were applied or skipped.
    pub taken: Vec<usize>,
    /// Applied, visible and not published.
    pub pending: Vec<usize>,
    /// Applied since the last flush: origins.
    pub unflushed: Vec<usize>,
    /// How many entries of the group's log it knows.
    pub learned: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Group {
    pub nodes: Vec<Node>,
    pub transactions: Vec<Transaction>,
    /// Transactions that may take their snapshots.
    ready: BTreeSet<usize>,
    /// The group's log.
    pub log: Vec<Entry>,
    pub proposals: Vec<(usize, Boot, Cut)>,
    pub messages: Vec<(usize, Vec<u8>)>,
    pub isolated: Option<usize>,
    pub budget: Budget,
    /// A delivered message stays, and may arrive again.
    pub keeps_messages: bool,
    /// The nodes that want to be the next sequencer. None: the first member.
    pub candidates: Option<&'static [usize]>,
    pub timing: Timing,
    /// The start that has granted in a term.
    granted: BTreeMap<Term, (usize, Boot)>,
    pub broken: Option<Broken>,
    pub error: Option<String>,
}

/// Everything is due at every moment, and no node is ever silent.
pub(crate) const ALWAYS: Timing = Timing {
    hello_every: 0,
    again: 0,
    silent: u64::MAX,
    pause: 0,
    prune_every: u64::MAX,
};

impl Group {
    pub(crate) fn new(count: usize, timing: Timing, budget: Budget) -> Self {
        let mut group = Self {
            nodes: Vec::new(),
            transactions: Vec::new(),
            ready: BTreeSet::new(),
            log: Vec::new(),
            proposals: Vec::new(),
            messages: Vec::new(),
            isolated: None,
            budget,
            keeps_messages: false,
            candidates: None,
            timing,
            granted: BTreeMap::new(),
            broken: None,
            error: None,
        };
        let all = Agreement {
            nodes: (0..count).map(number).collect(),
            ..Agreement::default()
        };
        for node in 0..count {
            let (me, boot) = (number(node), Boot(1));
            group.nodes.push(Node {
                local: Local::new(me, boot),
                sequencer: None,
                rounds: Rounds::new(me, boot, timing, all.clone(), Moment(0)),
                clock: Moment(0),
                rows: BTreeMap::new(),
                visible: BTreeSet::new(),
                log: Vec::new(),
                taken: vec![0; count],
                pending: Vec::new(),
                unflushed: Vec::new(),
                learned: 0,
            });
        }
        group
    }

    /// Breaks a rule from now on.
    pub(crate) fn break_rule(&mut self, broken: Option<Broken>) {
        self.broken = broken;
        for node in &mut self.nodes {
            node.local.broken = broken;
            node.rounds.broken = broken;
        }
    }

    pub(crate) fn add(&mut self, node: usize, declared: &[(u32, Access)]) -> usize {
        let declared = declared.iter();
        self.transactions.push(Transaction {
            node,
            declared: declared.map(|(t, a)| (TableNumber(*t), *a)).collect(),
            state: State::New,
            shipped: None,
            record: None,
            read: BTreeMap::new(),
            acknowledged: false,
            after: BTreeSet::new(),
        });
        self.transactions.len() - 1
    }

    fn removed(&self, learned: usize) -> BTreeSet<usize> {
        let entries = self.log.iter().take(learned);
        let removed = entries.filter_map(|entry| match entry {
            Entry::Removed(node) => Some(*node),
            Entry::Cut(..) => None,
        });
        removed.collect()
    }

    pub(crate) fn members(&self) -> Vec<usize> {
        let removed = self.removed(self.log.len());
        let all = 0..self.nodes.len();
        all.filter(|node| !removed.contains(node)).collect()
    }

    pub(crate) fn cuts(&self) -> Vec<Cut> {
        self.agreement(self.log.len()).cuts
    }

    pub(crate) fn last_term(&self) -> Term {
        let cuts = self.log.iter().rev().find_map(|entry| match entry {
            Entry::Cut(cut, ..) => Some(cut.term),
            Entry::Removed(_) => None,
        });
        cuts.unwrap_or_default()
    }

    /// The agreement after so many entries.
    fn agreement(&self, learned: usize) -> Agreement {
        let removed = self.removed(learned);
        let all = 0..self.nodes.len();
        let nodes: BTreeSet<_> = all
            .filter(|node| !removed.contains(node))
            .map(number)
            .collect();
        let (mut cuts, mut holder) = (Vec::new(), None);
        for entry in self.log.iter().take(learned) {
            if let Entry::Cut(cut, node, boot) = entry {
                cuts.push(cut.clone());
                holder = Some((*node, *boot));
            }
        }
        Agreement {
            holder: holder.filter(|(node, _)| nodes.contains(node)),
            nodes,
            cuts,
        }
    }

    pub(crate) fn connected(&self, a: usize, b: usize) -> bool {
        a == b || (self.isolated != Some(a) && self.isolated != Some(b))
    }

    fn record(&self, transaction: usize) -> &Record {
        self.transactions[transaction].record.as_ref().unwrap()
    }

    fn fail(&mut self, error: String) {
        self.error.get_or_insert(error);
    }

    /// Has the rules of a node decide, and carries out what they ask for.
    fn with_rounds(
        &mut self,
        at: usize,
        decide: impl FnOnce(&mut Rounds, &mut Rules<'_>, Moment) -> Vec<Effect>,
    ) {
        let node = &mut self.nodes[at];
        let now = node.clock;
        let mut rules = Rules {
            local: &mut node.local,
            sequencer: &mut node.sequencer,
        };
        let effects = decide(&mut node.rounds, &mut rules, now);
        if let Some(sequencer) = &mut node.sequencer {
            sequencer.broken = self.broken;
        }
        let boot = node.local.identity().1;
        for effect in effects {
            match effect {
                Effect::Send(to, content) => {
                    if let crate::Content::Answer { answer, .. } = &content
                        && !answer.grants.is_empty()
                    {
                        self.has_granted(at, boot);
                    }
                    let message = Message {
                        from: number(at),
                        boot,
                        content,
                    };
                    let message = (usize::from(to.0) - 1, message.encode());
                    if let Err(place) = self.messages.binary_search(&message) {
                        self.messages.insert(place, message);
                    }
                }
                Effect::Propose(cut) => {
                    let proposal = (at, boot, cut);
                    if !self.proposals.contains(&proposal) {
                        self.proposals.push(proposal);
                    }
                }
                Effect::Answered(answer) => {
                    let is_own = self.nodes[at].sequencer.is_some();
                    if !answer.grants.is_empty() && is_own {
                        self.has_granted(at, boot);
                    }
                }
                Effect::Refused(number, refusal) => {
                    self.fail(format!("node {at}: {number} is refused: {refusal:?}"));
                }
                Effect::Prune => {}
            }
        }
    }

    /// No two starts grant in one term.
    fn has_granted(&mut self, at: usize, boot: Boot) {
        let Some(sequencer) = &self.nodes[at].sequencer else {
            return;
        };
        let term = sequencer.term();
        let first = *self.granted.entry(term).or_insert((at, boot));
        if first != (at, boot) {
            self.fail(format!("{first:?} and {:?} grant in {term:?}", (at, boot)));
        }
    }

    fn candidate(&self, node: usize) -> Option<NodeNumber> {
        match self.candidates {
            Some(nodes) => nodes.contains(&node).then(|| number(node)),
            None => {
                let known = self.agreement(self.nodes[node].learned).nodes;
                known.first().copied()
            }
        }
    }

    pub(crate) fn turn(&mut self, node: usize) {
        let candidate = self.candidate(node);
        let before = self.nodes[node].rounds.count();
        self.with_rounds(node, Rounds::exchange);
        self.with_rounds(node, |rounds, rules, now| {
            rounds.tick(rules, now, candidate)
        });
        let begun = self.nodes[node].rounds.count() - before;
        self.budget.rounds = self.budget.rounds.wrapping_sub(begun);
    }

    pub(crate) fn is_deliverable(&self, at: usize) -> bool {
        let (to, bytes) = &self.messages[at];
        let from = Message::decode(bytes).unwrap().from;
        self.connected(usize::from(from.0) - 1, *to)
    }

    fn deliver(&mut self, at: usize) {
        let (to, bytes) = self.messages[at].clone();
        if !self.keeps_messages {
            self.messages.remove(at);
        }
        let message = Message::decode(&bytes).unwrap();
        self.with_rounds(to, |rounds, rules, now| rounds.receive(rules, message, now));
    }

    fn agree(&mut self, at: usize) {
        let (node, boot, cut) = self.proposals.remove(at);
        let term = self.last_term();
        let again = self.broken == Some(Broken::TwoCuts) && cut.term == term;
        if (cut.follows != term && !again) || !self.members().contains(&node) {
            return;
        }
        for (origin, at) in self.nodes.iter().enumerate() {
            if !self.members().contains(&origin) {
                continue;
            }
            let given_up = at.log.iter().find(|transaction| {
                let record = self.record(**transaction);
                crate::history::is_given_up(record, std::slice::from_ref(&cut))
            });
            if let Some(given_up) = given_up {
                self.error = Some(format!("{cut:?} gives up {given_up}"));
            }
        }
        self.log.push(Entry::Cut(cut, number(node), boot));
    }

    /// Refuses the transactions of a node that may take their snapshots and have not.
    fn refuse_ready(&mut self, node: usize) {
        for at in std::mem::take(&mut self.ready) {
            let transaction = &mut self.transactions[at];
            match &transaction.state {
                State::Waiting(number) if transaction.node == node => {
                    self.nodes[node].local.abort(*number);
                    transaction.state = State::Lost;
                }
                _ => {
                    self.ready.insert(at);
                }
            }
        }
    }

    fn learn(&mut self, at: usize) {
        let agreement = self.agreement(self.log.len());
        let last = agreement.cuts.last().map(|cut| cut.term);
        if last > Some(self.nodes[at].local.identity().2)
            && self.broken != Some(Broken::ReadyOutlivesCut)
        {
            self.refuse_ready(at);
        }
        let node = &mut self.nodes[at];
        node.learned = self.log.len();
        if !agreement.nodes.contains(&number(at)) {
            return;
        }
        let mut rules = Rules {
            local: &mut node.local,
            sequencer: &mut node.sequencer,
        };
        let followed = node.rounds.learn(&mut rules, agreement);
        if followed != Ok(super::Followed::Current) {
            self.fail(format!("node {at}: {followed:?}"));
        }
    }

    pub(crate) fn step(&mut self, step: Step) {
        match step {
            Step::Turn(node) => self.turn(node),
            Step::Deliver(at) => self.deliver(at),
            Step::Lose(at) => {
                self.messages.remove(at);
            }
            Step::Agree(at) => self.agree(at),
            Step::Forget(at) => {
                self.proposals.remove(at);
            }
            Step::Learn(node) => self.learn(node),
            Step::Apply(node, origin) => self.apply(node, origin),
            Step::Applied(node, at) => {
                let transaction = self.nodes[node].pending.remove(at);
                let record = self.record(transaction).clone();
                self.nodes[node].local.applied(&record);
            }
            Step::Crash(node, loses) => {
                self.budget.crashes = self.budget.crashes.saturating_sub(1);
                self.crash(node, loses);
            }
            Step::Isolate(node) => {
                self.budget.isolations = self.budget.isolations.saturating_sub(1);
                self.isolated = Some(node);
                // Messages on their way to and from the node are lost.
                let all = std::mem::take(&mut self.messages);
                self.messages = all
                    .into_iter()
                    .filter(|(to, bytes)| {
                        let from = Message::decode(bytes).unwrap().from;
                        *to != node && from != number(node)
                    })
                    .collect();
            }
            Step::Heal => self.isolated = None,
            Step::Remove(node) => {
                self.budget.removals = self.budget.removals.saturating_sub(1);
                self.log.push(Entry::Removed(node));
                if self.isolated == Some(node) {
                    self.isolated = None;
                }
                // What others do not have is lost, and nobody asks it any more.
                for transaction in self.transactions.iter_mut().filter(|t| t.node == node) {
                    if !matches!(transaction.state, State::Done | State::Ended(_)) {
                        transaction.state = State::Lost;
                    }
                    transaction.acknowledged = false;
                }
            }
            other => self.step_of_transaction(other),
        }
    }

    fn step_of_transaction(&mut self, step: Step) {
        let (Step::Begin(at)
        | Step::Again(at)
        | Step::Ready(at)
        | Step::Start(at)
        | Step::Mark(at)
        | Step::Show(at)
        | Step::Publish(at)
        | Step::Abort(at)) = step
        else {
            return;
        };
        let node = self.transactions[at].node;
        let state = self.transactions[at].state.clone();
        let next = match (step, state) {
            (Step::Begin(_), _) => {
                let known = self.transactions.iter().enumerate();
                let known = known.filter(|(_, t)| t.acknowledged).map(|(at, _)| at);
                self.transactions[at].after = known.collect();
                let declared = self.transactions[at].declared.clone();
                match self.nodes[node].local.ask(1, declared, 0, 1) {
                    Ok(asked) => State::Waiting(asked),
                    Err(error) => {
                        self.fail(format!("{at} can't ask: {error}"));
                        State::Lost
                    }
                }
            }
            (Step::Again(_), State::Waiting(number)) => {
                State::Waiting(self.nodes[node].local.ask_again(number).unwrap())
            }
            (Step::Ready(_), State::Waiting(number)) => {
                let local = &self.nodes[node].local;
                self.transactions[at].shipped = local.shipped(number).unwrap();
                self.ready.insert(at);
                State::Waiting(number)
            }
            (Step::Start(_), State::Waiting(number)) => {
                self.ready.remove(&at);
                let started = self.nodes[node].local.started(number);
                if started == Ok(Start::Ready) {
                    let rows = &self.nodes[node].rows;
                    let transaction = &mut self.transactions[at];
                    let tables = transaction.declared.keys();
                    transaction.read = tables.map(|t| (*t, rows.get(t).copied())).collect();
                    State::Running(number)
                } else {
                    self.fail(format!("{at} takes its snapshot too late: {started:?}"));
                    self.nodes[node].local.abort(number);
                    State::Lost
                }
            }
            (Step::Mark(_), State::Running(number)) => self.mark(at, number),
            (Step::Show(_), State::Marked(number)) => {
                self.show_own(node, at);
                State::Visible(number)
            }
            (Step::Publish(_), State::Visible(number)) => {
                self.nodes[node].local.committed(number).unwrap();
                self.transactions[at].acknowledged = true;
                State::Done
            }
            (Step::Abort(_), State::Waiting(number) | State::Running(number)) => {
                self.budget.aborts = self.budget.aborts.saturating_sub(1);
                self.ready.remove(&at);
                self.nodes[node].local.abort(number);
                State::Lost
            }
            (step, state) => panic!("{step:?} in {state:?}"),
        };
        self.transactions[at].state = next;
    }

    fn mark(&mut self, at: usize, number: u64) -> State {
        let local = &mut self.nodes[self.transactions[at].node].local;
        let seen = local.seen(number).unwrap().clone();
        match local.commit(number) {
            Ok(Commit::ReadOnly) => {
                local.abort(number);
                self.transactions[at].acknowledged = true;
                State::Ended(seen)
            }
            Ok(Commit::Record(_)) => {
                let shipped = self.transactions[at].shipped.clone();
                self.transactions[at].record = shipped;
                State::Marked(number)
            }
            _ => {
                local.abort(number);
                State::Lost
            }
        }
    }

    fn show_own(&mut self, node: usize, at: usize) {
        let (last, term) = (self.last_term(), self.record(at).term);
        if term != last && self.members().contains(&node) {
            self.fail(format!(
                "{at} of {term:?} commits after the cut of {last:?}"
            ));
        }
        self.show(node, at);
        self.nodes[node].log.push(at);
        // Its commit is on disk before it is visible, and with it all before.
        self.nodes[node].unflushed.clear();
    }

    fn show(&mut self, node: usize, at: usize) {
        let tables: Vec<_> = self.record(at).writes().collect();
        for (table, _) in tables {
            self.nodes[node].rows.insert(table, at);
        }
        self.nodes[node].visible.insert(at);
    }

    /// The next entry of a stream that a node may take. Of a removed node others have all that one
    /// of them has.
    pub(crate) fn next_entry(&self, node: usize, origin: usize) -> Option<usize> {
        let members = self.members();
        let next = *self.nodes[origin].log.get(self.nodes[node].taken[origin])?;
        let is_there = |other: &usize| self.nodes[*other].visible.contains(&next);
        let is_left = members.contains(&origin) || members.iter().any(is_there);
        (is_left && (self.connected(node, origin) || !members.contains(&origin))).then_some(next)
    }

    fn apply(&mut self, node: usize, origin: usize) {
        let transaction = self.next_entry(node, origin).unwrap();
        let record = self.record(transaction).clone();
        let here = &mut self.nodes[node];
        here.taken[origin] += 1;
        here.unflushed.push(origin);
        match here.local.may_apply(&record) {
            Verdict::Apply => {
                here.local.apply(&record).unwrap();
                here.pending.push(transaction);
                self.show(node, transaction);
            }
            Verdict::Already if here.visible.contains(&transaction) => {}
            verdict => self.fail(format!("node {node}, {transaction}: {verdict:?}")),
        }
    }

    /// A start of a process begins with what is stored.
    fn crash(&mut self, at: usize, loses: bool) {
        self.refuse_ready(at);
        for transaction in self.transactions.iter_mut().filter(|t| t.node == at) {
            let next = match &transaction.state {
                State::Waiting(_) | State::Running(_) | State::Marked(_) => State::Lost,
                State::Visible(_) => State::Done,
                other => other.clone(),
            };
            if transaction.state != next && next == State::Lost {
                transaction.record = None;
            }
            transaction.state = next;
        }
        let agreement = self.agreement(self.nodes[at].learned);
        let node = &mut self.nodes[at];
        let lost = std::mem::take(&mut node.unflushed);
        node.pending.clear();
        if loses {
            for origin in lost.into_iter().rev() {
                let taken = self.nodes[at].taken[origin] - 1;
                self.nodes[at].taken[origin] = taken;
                let transaction = self.nodes[origin].log[taken];
                self.nodes[at].visible.remove(&transaction);
            }
            self.nodes[at].rows.clear();
        }
        let visible: Vec<usize> = self.nodes[at].visible.iter().copied().collect();
        let mut records: Vec<Record> = Vec::new();
        for transaction in visible {
            let record = self.record(transaction).clone();
            for (table, own) in record.writes() {
                let shown = self.nodes[at].rows.get(&table).copied();
                let last = shown.and_then(|shown| self.record(shown).tables.get(&table)?.own);
                if last.is_none_or(|last| own > last) {
                    self.nodes[at].rows.insert(table, transaction);
                }
            }
            records.push(record);
        }
        let (me, boot, _) = self.nodes[at].local.identity();
        let boot = Boot(boot.0 + 1);
        let node = &mut self.nodes[at];
        let stored = Local::stored(me, boot, &records, &agreement.cuts).unwrap();
        // Superseded records may have been pruned: that changes nothing.
        records.retain(|record| !stored.is_superseded(record, |_| true));
        node.local = Local::stored(me, boot, &records, &agreement.cuts).unwrap();
        assert_eq!(node.local, stored);
        node.local.broken = self.broken;
        node.sequencer = None;
        if self.broken == Some(Broken::BeginsWithStored)
            && agreement.holder.is_some_and(|(holder, _)| holder == me)
        {
            node.sequencer = agreement.cuts.last().and_then(Sequencer::begin);
        }
        node.rounds = Rounds::new(me, boot, self.timing, agreement, node.clock);
        node.rounds.broken = self.broken;
    }

    /// The next steps of a transaction.
    pub(crate) fn steps_of_transaction(&self, at: usize, steps: &mut Vec<Step>) {
        let transaction = &self.transactions[at];
        let local = &self.nodes[transaction.node].local;
        match &transaction.state {
            State::New => steps.push(Step::Begin(at)),
            State::Waiting(_) if self.ready.contains(&at) => steps.push(Step::Start(at)),
            State::Waiting(number) => match local.start(*number) {
                Ok(Start::Ready) => steps.push(Step::Ready(at)),
                Ok(Start::Overtaken | Start::OldTerm) => steps.push(Step::Again(at)),
                _ => {}
            },
            State::Running(number) if local.clone().commit(*number) != Ok(Commit::Wait) => {
                steps.push(Step::Mark(at));
            }
            State::Marked(_) => steps.push(Step::Show(at)),
            State::Visible(_) => steps.push(Step::Publish(at)),
            _ => {}
        }
        let open = matches!(transaction.state, State::Waiting(_) | State::Running(_));
        if open && self.budget.aborts > 0 {
            steps.push(Step::Abort(at));
        }
    }

    pub(crate) fn steps_of_stream(&self, node: usize, steps: &mut Vec<Step>) {
        let here = &self.nodes[node];
        for origin in (0..self.nodes.len()).filter(|origin| *origin != node) {
            let Some(next) = self.next_entry(node, origin) else {
                continue;
            };
            let verdict = here.local.may_apply(self.record(next));
            if !matches!(verdict, Verdict::Wait(_) | Verdict::Later) {
                steps.push(Step::Apply(node, origin));
            }
        }
        steps.extend((0..here.pending.len()).map(|at| Step::Applied(node, at)));
    }

    /// All that can happen now.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let members = self.members();
        let mut steps = Vec::new();
        for at in 0..self.transactions.len() {
            if members.contains(&self.transactions[at].node) {
                self.steps_of_transaction(at, &mut steps);
            }
        }
        for node in members.iter().copied() {
            steps.push(Step::Turn(node));
            if self.nodes[node].learned < self.log.len() && self.isolated != Some(node) {
                steps.push(Step::Learn(node));
            }
            self.steps_of_stream(node, &mut steps);
            if self.budget.crashes > 0 {
                steps.push(Step::Crash(node, false));
                if !self.nodes[node].unflushed.is_empty() {
                    steps.push(Step::Crash(node, true));
                }
            }
            if self.budget.isolations > 0 && self.isolated.is_none() {
                steps.push(Step::Isolate(node));
            }
            if self.budget.removals > 0 && members.len() > 2 {
                steps.push(Step::Remove(node));
            }
        }
        let messages = 0..self.messages.len();
        steps.extend(
            messages
                .filter(|at| self.is_deliverable(*at))
                .map(Step::Deliver),
        );
        steps.extend((0..self.proposals.len()).map(Step::Agree));
        if self.isolated.is_some() {
            steps.push(Step::Heal);
        }
        steps
    }

    /// Checks all that must be true at every moment.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let members = self.members();
        let mut holders: BTreeMap<Term, usize> = BTreeMap::new();
        for node in members.iter().copied() {
            if let Some(sequencer) = &self.nodes[node].sequencer
                && let Some(other) = holders.insert(sequencer.term(), node)
            {
                let term = sequencer.term();
                return Err(format!("{other} and {node} have a sequencer of {term:?}"));
            }
        }
        let cuts = self.cuts();
        let shown = |node: &usize| Shown {
            visible: &self.nodes[*node].visible,
            rows: &self.nodes[*node].rows,
            diverged: false,
        };
        let facts = Facts {
            transactions: &self.transactions,
            nodes: members.iter().map(shown).collect(),
            agreed: &cuts,
        };
        facts.check()?;
        self.check_waits()
    }

    /// No transaction waits for itself.
    fn check_waits(&self) -> Result<(), String> {
        let mut owners = BTreeMap::new();
        let key = |node: usize, number: u64| node * 1_000_000 + usize::try_from(number).unwrap();
        let members = self.members();
        for node in members.iter().copied() {
            let local = &self.nodes[node].local;
            for (of, table, own) in local.numbers() {
                owners.insert((local.identity().2, table, own), key(node, of));
            }
        }
        let mut edges: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for node in members {
            let local = &self.nodes[node].local;
            for waiting in local.waiting() {
                let owner = |edge: &crate::Edge| {
                    owners
                        .get(&(local.identity().2, edge.table, edge.version))
                        .copied()
                };
                let of = waiting.edges.iter().filter_map(owner);
                edges
                    .entry(key(node, waiting.number))
                    .or_default()
                    .extend(of);
            }
        }
        match cycle(&edges) {
            Some(cycle) => Err(format!("transactions wait in a circle: {cycle:?}")),
            None => Ok(()),
        }
    }

    /// Goes on in a fair way, without any more faults, until nothing changes or so many cycles are
    /// over. `pass` lets time go by.
    fn run_fairly(&mut self, cycles: usize, pass: u64) {
        for _ in 0..cycles {
            for node in self.members() {
                self.nodes[node].clock.0 += pass;
                if self.nodes[node].learned < self.log.len() {
                    self.learn(node);
                }
                self.turn(node);
            }
            while !self.messages.is_empty() {
                self.deliver(0);
            }
            while !self.proposals.is_empty() {
                self.agree(0);
            }
            for _ in 0..8 {
                let mut steps = Vec::new();
                for at in 0..self.transactions.len() {
                    if self.members().contains(&self.transactions[at].node) {
                        let before = steps.len();
                        self.steps_of_transaction(at, &mut steps);
                        steps.truncate(before + 1);
                        if let Some(step) = steps.pop() {
                            self.step(step);
                        }
                    }
                }
                for node in self.members() {
                    for _ in 0..2 {
                        self.steps_of_stream(node, &mut steps);
                        if let Some(step) = steps.first().copied() {
                            self.step(step);
                        }
                        steps.clear();
                    }
                }
            }
        }
    }

    /// Once all faults are over, all transactions end, each node gets grants, and no further
    /// sequencer begins.
    pub(crate) fn recovers(&self, loses_messages: bool, pass: u64) -> Result<(), String> {
        let mut group = self.clone();
        group.isolated = None;
        group.budget.aborts = 0;
        group.keeps_messages = false;
        group.candidates = None;
        if loses_messages {
            group.messages.clear();
            group.proposals.clear();
        }
        group.run_fairly(8, pass);
        for node in group.members() {
            let at = group.add(node, &[(1, Access::Write), (2, Access::Write)]);
            group.step(Step::Begin(at));
        }
        group.run_fairly(8, pass);
        let term = group.last_term();
        group.run_fairly(4, pass);
        group.check()?;
        for (at, transaction) in group.transactions.iter().enumerate() {
            let is_gone = !group.members().contains(&transaction.node);
            let is_new = at >= self.transactions.len();
            match transaction.state {
                State::Done => {}
                State::Ended(_) | State::Lost | State::New if !is_new || is_gone => {}
                _ if is_gone => {}
                ref state => {
                    let waits = group.nodes[transaction.node].local.waiting();
                    return Err(format!("{at} waits for ever: {state:?} {waits:?}"));
                }
            }
        }
        if term != group.last_term() {
            return Err(format!("another sequencer begins after {term:?}"));
        }
        let members = group.members();
        for node in &members {
            if group.nodes[*node].visible != group.nodes[members[0]].visible {
                return Err(format!("node {node} differs"));
            }
        }
        Ok(())
    }
}

impl Group {
    /// Has the first node begin as sequencer, and all know it.
    pub(crate) fn begin(&mut self) {
        let pass = if self.timing == ALWAYS { 0 } else { 100_000 };
        self.run_fairly(8, pass);
        assert_eq!(self.last_term(), Term(1));
        assert!(self.nodes[0].sequencer.is_some());
        self.messages.clear();
    }
}

impl Group {
    /// All messages from a node to another one arrive.
    pub(crate) fn bring(&mut self, from: usize, to: usize) {
        let is_of = |(other, bytes): &&(usize, Vec<u8>)| {
            *other == to && Message::decode(bytes).unwrap().from == number(from)
        };
        let messages: Vec<_> = self.messages.iter().filter(is_of).cloned().collect();
        for message in messages {
            if let Ok(at) = self.messages.binary_search(&message) {
                self.deliver(at);
            }
        }
    }
}

/// How far a node has come in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Phase {
    Idle,
    /// The node gives versions.
    Gives,
    /// The node collects reports.
    Asks,
    /// The node has promised.
    Promised,
    /// The node has proposed a cut.
    Proposed,
}

impl Group {
    pub(crate) fn phase(&self, at: usize) -> Phase {
        let node = &self.nodes[at];
        if node.sequencer.is_some() {
            Phase::Gives
        } else if node.rounds.round.is_some() {
            Phase::Asks
        } else if self.proposals.iter().any(|(proposer, ..)| *proposer == at) {
            Phase::Proposed
        } else if node.local.has_promised() {
            Phase::Promised
        } else {
            Phase::Idle
        }
    }
}
