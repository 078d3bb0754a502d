//! A group of nodes in memory, for tests: real [`Local`]s and a real [`Sequencer`], tables that
//! hold the last writer, streams, messages, crashes, a node that is cut off. Each step is an
//! [`Action`]; which ones are possible is computed, so that a test can take them at random and a
//! model checker can take them all. `history.rs` checks what came of it.

use std::collections::{BTreeMap, BTreeSet};

use crate::broken::Broken;
use crate::{
    Access, Answer, Batch, Boot, Commit, Confirmations, Cut, Ends, Learned, Local, NodeNumber,
    Record, Reports, Scope, Sequencer, Start, TableNumber, Term, Vector, Verdict,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Action {
    Begin(usize),
    /// A node and the sequencer exchange a batch and its answer. True: the answer is lost.
    Exchange(usize, bool),
    /// A node sends a batch.
    Send(usize),
    /// The message at this place arrives. True: and will arrive again.
    Deliver(usize, bool),
    Drop(usize),
    /// A node hears what the sequencer says is decided.
    Tell(usize),
    /// A node hears an earlier announcement.
    TellOld(usize, usize),
    Learn(usize),
    Hello(usize),
    Again(usize),
    Start(usize),
    Mark(usize),
    Show(usize),
    Publish(usize),
    Abort(usize),
    /// A node applies an entry of another one's stream: node, origin, position.
    Apply(usize, usize, usize),
    /// A node publishes what it has applied.
    Applied(usize, usize),
    Crash(usize),
    Isolate(usize),
    Heal,
    /// A node begins as sequencer, with the reports of these nodes (bits).
    Open(usize, u8),
    Fence(usize, u8),
    GiveUp(usize),
    /// A diverged node gets the tables of another one.
    Repair(usize, usize),
}

/// How many faults may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Budget {
    pub crashes: u8,
    pub isolations: u8,
    pub opens: u8,
    pub fences: u8,
    pub aborts: u8,
    pub losses: u8,
    pub repeats: u8,
}

/// How fine the steps are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Style {
    /// Batches and answers are messages of their own, in any order.
    pub messages: bool,
    /// A request is answered at once, if the sequencer can be reached.
    pub joined: bool,
    /// Mark and visibility of a commit are two steps.
    pub fine: bool,
    /// Entries of one stream may be applied in another order.
    pub relaxed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum State {
    New,
    Waiting(u64),
    Running(u64),
    Marked(u64),
    Visible(u64),
    Done,
    /// A reader that has ended, with what it has seen.
    Ended(Vector),
    Lost,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Transaction {
    pub node: usize,
    pub declared: BTreeMap<TableNumber, Access>,
    pub state: State,
    /// The record, as it was written before the changes.
    pub shipped: Option<Record>,
    /// The record, once the transaction has committed.
    pub record: Option<Record>,
    /// What its snapshot had: the last writer of each declared table.
    pub read: BTreeMap<TableNumber, Option<usize>>,
    pub acknowledged: bool,
    /// Those that were acknowledged before this one began.
    pub after: BTreeSet<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub local: Local,
    pub rows: BTreeMap<TableNumber, usize>,
    pub visible: BTreeSet<usize>,
    /// Its own commits, in their order.
    pub log: Vec<usize>,
    /// Which entries of each other node's log were applied or skipped.
    pub taken: Vec<BTreeSet<usize>>,
    /// Applied, visible and not published.
    pub pending: Vec<usize>,
    pub learned: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Message {
    Batch(usize, Vec<u8>),
    Answer(usize, Vec<u8>),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub nodes: Vec<Node>,
    pub transactions: Vec<Transaction>,
    /// The group's log.
    pub agreed: Vec<Cut>,
    pub sequencer: Option<Sequencer>,
    pub holder: usize,
    pub messages: Vec<Message>,
    pub told: Vec<(Term, Ends)>,
    pub isolated: Option<usize>,
    pub budget: Budget,
    pub style: Style,
    pub broken: Option<Broken>,
    pub error: Option<String>,
}

pub(crate) fn number(node: usize) -> NodeNumber {
    NodeNumber(u16::try_from(node + 1).unwrap())
}

impl World {
    /// A group whose first node has the sequencer.
    pub(crate) fn new(count: usize, style: Style, budget: Budget, broken: Option<Broken>) -> Self {
        let local = |node| {
            let mut local = Local::new(number(node), Boot(1));
            local.broken = broken;
            local
        };
        let node = |node| Node {
            local: local(node),
            rows: BTreeMap::new(),
            visible: BTreeSet::new(),
            log: Vec::new(),
            taken: vec![BTreeSet::new(); count],
            pending: Vec::new(),
            learned: 0,
        };
        let mut world = Self {
            nodes: (0..count).map(node).collect(),
            transactions: Vec::new(),
            agreed: Vec::new(),
            sequencer: None,
            holder: 0,
            messages: Vec::new(),
            told: Vec::new(),
            isolated: None,
            budget,
            style,
            broken,
            error: None,
        };
        world.step(Action::Open(0, u8::MAX >> (8 - count)));
        for node in 0..count {
            world.step(Action::Learn(node));
        }
        world
    }

    pub(crate) fn add(&mut self, node: usize, declared: &[(u32, Access)]) {
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
    }

    fn connected(&self, a: usize, b: usize) -> bool {
        a == b || (self.isolated != Some(a) && self.isolated != Some(b))
    }

    fn local(&self, node: usize) -> &Local {
        &self.nodes[node].local
    }

    fn term(&self, node: usize) -> Term {
        self.local(node).identity().2
    }

    fn boot(&self, node: usize) -> Boot {
        self.local(node).identity().1
    }

    fn last_term(&self) -> Term {
        self.agreed.last().map_or(Term(0), |cut| cut.term)
    }

    fn record(&self, transaction: usize) -> &Record {
        self.transactions[transaction].record.as_ref().unwrap()
    }

    /// Whether one of these cuts refuses the transaction's writes. Not the crate's own judgement.
    pub(crate) fn given_up(&self, transaction: usize, cuts: &[Cut]) -> bool {
        let record = self.transactions[transaction].record.as_ref();
        record.is_some_and(|record| crate::history::is_given_up(record, cuts))
    }

    /// All that can happen now.
    pub(crate) fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for transaction in 0..self.transactions.len() {
            self.actions_of_transaction(transaction, &mut actions);
        }
        for node in 0..self.nodes.len() {
            self.actions_of_node(node, &mut actions);
            self.actions_of_stream(node, &mut actions);
        }
        for at in 0..self.messages.len() {
            if self.messages[..at].contains(&self.messages[at]) {
                continue;
            }
            if self.arrives(&self.messages[at]) {
                actions.push(Action::Deliver(at, false));
                if self.budget.repeats > 0 {
                    actions.push(Action::Deliver(at, true));
                }
            }
            if self.budget.losses > 0 {
                actions.push(Action::Drop(at));
            }
        }
        if self.isolated.is_some() {
            actions.push(Action::Heal);
        }
        actions
    }

    fn arrives(&self, message: &Message) -> bool {
        match message {
            Message::Batch(from, _) => self.connected(*from, self.holder),
            Message::Answer(to, _) => self.connected(self.holder, *to),
        }
    }

    fn actions_of_transaction(&self, at: usize, actions: &mut Vec<Action>) {
        let transaction = &self.transactions[at];
        let local = self.local(transaction.node);
        match &transaction.state {
            State::New if !local.is_diverged() => actions.push(Action::Begin(at)),
            State::Waiting(number) => match local.start(*number) {
                Ok(Start::Ready) => actions.push(Action::Start(at)),
                Ok(Start::Overtaken | Start::OldTerm) => actions.push(Action::Again(at)),
                _ => {}
            },
            State::Running(number) => {
                let mut local = local.clone();
                if local.commit(*number) != Ok(Commit::Wait) {
                    actions.push(Action::Mark(at));
                }
            }
            State::Marked(_) => actions.push(Action::Show(at)),
            State::Visible(_) => actions.push(Action::Publish(at)),
            _ => {}
        }
        let open = matches!(transaction.state, State::Waiting(_) | State::Running(_));
        if open && self.budget.aborts > 0 {
            actions.push(Action::Abort(at));
        }
    }

    /// Whether a client may hear of the transaction.
    fn is_covered(&self, at: usize, node: usize) -> bool {
        let vector: Vector = match &self.transactions[at].state {
            State::Done if self.local(node).gives_up(self.record(at)) => return false,
            State::Done => self.record(at).writes().collect(),
            State::Ended(seen) => seen.clone(),
            _ => return false,
        };
        if self.broken == Some(Broken::AcknowledgeAlone) {
            return true;
        }
        let mut confirmations = Confirmations::default();
        for other in 0..self.nodes.len() {
            let local = self.local(other);
            if !local.is_diverged() {
                let reached = |(table, version): (&TableNumber, &crate::Version)| {
                    local
                        .has_reached(*table, *version)
                        .then_some((*table, *version))
                };
                let reached = vector.iter().filter_map(reached).collect();
                confirmations.note(number(other), self.term(other), reached);
            }
        }
        !self.local(node).is_diverged()
            && confirmations.cover(self.term(node), &vector, self.nodes.len())
    }

    fn actions_of_node(&self, node: usize, actions: &mut Vec<Action>) {
        let here = &self.nodes[node];
        let local = &here.local;
        let batch = local.batch().filter(|_| !local.is_diverged());
        if let (Some(batch), Some(sequencer)) = (batch, &self.sequencer)
            && self.connected(node, self.holder)
        {
            if self.style.messages {
                let message = Message::Batch(node, crate::Bytes::encode(&batch));
                if !self.messages.contains(&message) && self.messages.len() < 40 {
                    actions.push(Action::Send(node));
                }
            } else {
                let (mut after, mut local) = (sequencer.clone(), local.clone());
                local.answer(&after.receive(&batch, true));
                if local != here.local {
                    actions.push(Action::Exchange(node, false));
                }
                if after != *sequencer && self.budget.losses > 0 {
                    actions.push(Action::Exchange(node, true));
                }
            }
        }
        if let Some(sequencer) = &self.sequencer
            && self.connected(node, self.holder)
        {
            let mut told = local.clone();
            if told.announced(sequencer.term(), &sequencer.ends()) && told != *local {
                actions.push(Action::Tell(node));
            }
            let mut after = sequencer.clone();
            let (term, boot) = (self.term(node), self.boot(node));
            let greeted = after.restarted(term, number(node), boot, &local.has());
            if boot > Boot(1) && greeted.is_ok() && after != *sequencer {
                actions.push(Action::Hello(node));
            }
        }
        if here.learned < self.agreed.len() && self.isolated != Some(node) {
            actions.push(Action::Learn(node));
        }
        if self.budget.crashes > 0 {
            actions.push(Action::Crash(node));
        }
        if self.budget.isolations > 0 && self.isolated.is_none() {
            actions.push(Action::Isolate(node));
        }
        self.actions_of_group(node, actions);
    }

    fn actions_of_group(&self, node: usize, actions: &mut Vec<Action>) {
        let count = self.nodes.len();
        if self.local(node).is_diverged() {
            let from = (0..count).find(|other| self.may_repair(node, *other));
            actions.extend(from.map(|other| Action::Repair(node, other)));
        }
        if self.sequencer.is_some() && self.budget.opens == 0 && self.budget.fences == 0 {
            self.actions_of_broken(node, actions);
            return;
        }
        for mask in 0..1_u8 << count {
            let needed = usize::from(self.budget.opens > 0 || self.sequencer.is_none());
            if needed == 1 && mask >> node & 1 == 1 && self.may_report(mask, node) {
                actions.push(Action::Open(node, mask));
            }
            if self.budget.fences > 0
                && self.isolated == Some(node)
                && self.sequencer.is_some()
                && mask == (u8::MAX >> (8 - count)) & !(1 << node)
                && self.may_report(mask, self.holder)
            {
                actions.push(Action::Fence(node, mask));
            }
        }
        self.actions_of_broken(node, actions);
    }

    fn actions_of_broken(&self, node: usize, actions: &mut Vec<Action>) {
        if self.broken == Some(Broken::VoidWithoutFencing) && self.isolated == Some(node) {
            let mut after = self.sequencer.clone();
            if let Some(sequencer) = &mut after {
                sequencer.give_up(number(node));
            }
            if after != self.sequencer {
                actions.push(Action::GiveUp(node));
            }
        }
    }

    /// Whether just these nodes, a majority, can report to one of them.
    fn may_report(&self, mask: u8, to: usize) -> bool {
        let members = |node: &usize| mask >> node & 1 == 1;
        let mut reporting = (0..self.nodes.len()).filter(members);
        mask.count_ones() as usize > self.nodes.len() / 2
            && reporting.all(|node| {
                self.connected(node, to)
                    && self.local(node).report().is_ok()
                    && self.term(node) == self.last_term()
            })
    }

    fn may_repair(&self, node: usize, from: usize) -> bool {
        let (broken, whole) = (&self.nodes[node], &self.nodes[from]);
        let committing = |transaction: &Transaction| {
            transaction.node == node
                && matches!(transaction.state, State::Marked(_) | State::Visible(_))
        };
        let survives = |at: &&usize| !self.given_up(**at, &self.agreed);
        self.connected(node, from)
            && !whole.local.is_diverged()
            && broken.learned == self.agreed.len()
            && whole.learned == self.agreed.len()
            && broken.pending.is_empty()
            && whole.local.report().is_ok()
            && !self.transactions.iter().any(committing)
            && broken
                .visible
                .iter()
                .filter(survives)
                .all(|at| whole.visible.contains(at))
    }

    fn actions_of_stream(&self, node: usize, actions: &mut Vec<Action>) {
        let here = &self.nodes[node];
        for origin in (0..self.nodes.len()).filter(|origin| *origin != node) {
            if !self.connected(node, origin) {
                continue;
            }
            let log = self.nodes[origin].log.iter().enumerate();
            let mut left = log.filter(|(at, _)| !here.taken[origin].contains(at));
            let may = |(at, transaction): (usize, &usize)| {
                let verdict = here.local.may_apply(self.record(*transaction));
                (!matches!(verdict, Verdict::Wait(_) | Verdict::Later)).then_some(at)
            };
            if self.style.relaxed {
                actions.extend(
                    left.filter_map(may)
                        .map(|at| Action::Apply(node, origin, at)),
                );
            } else {
                let next = left.next().and_then(may);
                actions.extend(next.map(|at| Action::Apply(node, origin, at)));
            }
        }
        actions.extend((0..here.pending.len()).map(|at| Action::Applied(node, at)));
    }

    pub(crate) fn step(&mut self, action: Action) {
        self.step_of_world(action);
        // As early as may be: that asks the most of the history.
        for at in 0..self.transactions.len() {
            if !self.transactions[at].acknowledged
                && self.is_covered(at, self.transactions[at].node)
            {
                self.transactions[at].acknowledged = true;
            }
        }
    }

    fn step_of_world(&mut self, action: Action) {
        match action {
            Action::Exchange(node, lost) => self.exchange(node, lost),
            Action::Send(node) => {
                let batch = self.local(node).batch().unwrap();
                self.messages
                    .push(Message::Batch(node, crate::Bytes::encode(&batch)));
                self.messages.sort();
            }
            Action::Deliver(at, again) => self.deliver(at, again),
            Action::Drop(at) => {
                self.budget.losses -= 1;
                self.messages.remove(at);
            }
            Action::Tell(node) => {
                let sequencer = self.sequencer.as_ref().unwrap();
                let (term, ends) = (sequencer.term(), sequencer.ends());
                self.nodes[node].local.announced(term, &ends);
                if self.style.messages {
                    self.told.push((term, ends));
                }
            }
            Action::TellOld(node, at) => {
                let (term, ends) = self.told[at].clone();
                self.nodes[node].local.announced(term, &ends);
            }
            Action::Learn(node) => self.learn(node),
            Action::Hello(node) => {
                let (term, boot) = (self.term(node), self.boot(node));
                let has = self.local(node).has();
                if let Some(sequencer) = &mut self.sequencer {
                    let _ = sequencer.restarted(term, number(node), boot, &has);
                }
            }
            Action::Apply(node, origin, at) => self.apply(node, origin, at),
            Action::Applied(node, at) => {
                let transaction = self.nodes[node].pending.remove(at);
                let record = self.record(transaction).clone();
                self.nodes[node].local.applied(&record);
            }
            Action::Crash(node) => {
                self.budget.crashes -= 1;
                self.restart(node);
            }
            Action::Isolate(node) => {
                self.budget.isolations -= 1;
                self.isolated = Some(node);
            }
            Action::Heal => self.isolated = None,
            Action::Open(node, mask) => self.open(node, mask),
            Action::Fence(node, mask) => self.fence(node, mask),
            Action::GiveUp(node) => {
                if let Some(sequencer) = &mut self.sequencer {
                    sequencer.give_up(number(node));
                }
            }
            Action::Repair(node, from) => self.repair(node, from),
            Action::Begin(at) => {
                self.step_of_transaction(action);
                let node = self.transactions[at].node;
                let begins = self.sequencer.is_some() && self.connected(node, self.holder);
                if self.style.joined && begins {
                    self.exchange(node, false);
                }
            }
            other => self.step_of_transaction(other),
        }
    }

    fn step_of_transaction(&mut self, action: Action) {
        let (Action::Begin(at)
        | Action::Again(at)
        | Action::Start(at)
        | Action::Mark(at)
        | Action::Show(at)
        | Action::Publish(at)
        | Action::Abort(at)) = action
        else {
            return;
        };
        let node = self.transactions[at].node;
        let local = &mut self.nodes[node].local;
        let state = self.transactions[at].state.clone();
        let next = match (action, state) {
            (Action::Begin(_), _) => {
                let known = self.transactions.iter().enumerate();
                let known = known.filter(|(_, t)| t.acknowledged).map(|(at, _)| at);
                let known = known.collect();
                self.transactions[at].after = known;
                let declared = self.transactions[at].declared.clone();
                State::Waiting(local.ask(1, declared, 0, 1).unwrap())
            }
            (Action::Again(_), State::Waiting(number)) => {
                let writes = self.transactions[at].declared.values();
                let writes = writes.copied().max() == Some(Access::Write);
                if writes && local.start(number) == Ok(Start::Overtaken) {
                    self.error = Some(format!("writer {at} is overtaken"));
                }
                State::Waiting(local.ask_again(number).unwrap())
            }
            (Action::Start(_), State::Waiting(number)) => {
                // As a session does: its record is written before its snapshot is used.
                let record = local.shipped(number).unwrap();
                assert_eq!(local.started(number), Ok(Start::Ready));
                assert_eq!(local.shipped(number), Ok(record.clone()));
                self.transactions[at].shipped = record;
                let rows = &self.nodes[node].rows;
                let transaction = &mut self.transactions[at];
                let tables = transaction.declared.keys();
                transaction.read = tables.map(|t| (*t, rows.get(t).copied())).collect();
                State::Running(number)
            }
            (Action::Mark(_), State::Running(number)) => self.mark(at, number),
            (Action::Show(_), State::Marked(number)) => {
                self.show(node, at);
                self.nodes[node].log.push(at);
                State::Visible(number)
            }
            (Action::Publish(_), State::Visible(number)) => {
                local.committed(number).unwrap();
                State::Done
            }
            (Action::Abort(_), State::Waiting(number) | State::Running(number)) => {
                self.budget.aborts -= 1;
                local.abort(number);
                State::Lost
            }
            (action, state) => panic!("{action:?} in {state:?}"),
        };
        self.transactions[at].state = next;
    }

    fn mark(&mut self, at: usize, number: u64) -> State {
        let node = self.transactions[at].node;
        let local = &mut self.nodes[node].local;
        let seen = local.seen(number).unwrap().clone();
        match local.commit(number) {
            Ok(Commit::ReadOnly) => {
                local.abort(number);
                State::Ended(seen)
            }
            Ok(Commit::Record(record)) => {
                let shipped = self.transactions[at].shipped.clone();
                // The term may be a later one by now; nothing else.
                let same = shipped.as_ref().is_some_and(|shipped| {
                    shipped.id == record.id && shipped.tables == record.tables
                });
                if !same {
                    self.error = Some(format!("{shipped:?} was shipped for {record:?}"));
                }
                self.transactions[at].record = shipped;
                if self.style.fine {
                    return State::Marked(number);
                }
                self.show(node, at);
                self.nodes[node].log.push(at);
                State::Visible(number)
            }
            _ => {
                local.abort(number);
                State::Lost
            }
        }
    }

    fn show(&mut self, node: usize, at: usize) {
        let tables: Vec<_> = self.record(at).writes().collect();
        for (table, _) in tables {
            self.nodes[node].rows.insert(table, at);
        }
        self.nodes[node].visible.insert(at);
    }

    fn exchange(&mut self, node: usize, lost: bool) {
        let batch = self.local(node).batch().unwrap();
        let answer = self.sequencer.as_mut().unwrap().receive(&batch, true);
        if lost {
            self.budget.losses -= 1;
        } else {
            self.nodes[node].local.answer(&answer);
        }
    }

    fn deliver(&mut self, at: usize, again: bool) {
        let message = if again {
            self.budget.repeats -= 1;
            self.messages[at].clone()
        } else {
            self.messages.remove(at)
        };
        match message {
            Message::Batch(from, bytes) => {
                let batch = <Batch as crate::Bytes>::decode(&bytes).unwrap();
                if let Some(sequencer) = &mut self.sequencer {
                    let answer = sequencer.receive(&batch, true);
                    let answer = Message::Answer(from, crate::Bytes::encode(&answer));
                    self.messages.push(answer);
                    self.messages.sort();
                }
            }
            Message::Answer(to, bytes) => {
                let answer = <Answer as crate::Bytes>::decode(&bytes).unwrap();
                self.nodes[to].local.answer(&answer);
            }
        }
    }

    fn learn(&mut self, node: usize) {
        let here = &mut self.nodes[node];
        let cut = &self.agreed[here.learned];
        here.learned += 1;
        let before = here.visible.clone();
        match here.local.learn(cut) {
            Ok(Learned::Fenced) => self.restart(node),
            Ok(Learned::Current) => {
                let lost = before.iter().find(|at| self.given_up(**at, &self.agreed));
                let learned = self.nodes[node].learned;
                if let Some(at) = lost
                    && self.given_up(*at, &self.agreed[..learned])
                {
                    self.error = Some(format!("node {node} goes on with {at}, given up"));
                }
            }
            Ok(Learned::Diverged) => {
                for transaction in self.transactions.iter_mut().filter(|t| t.node == node) {
                    let waits = matches!(transaction.state, State::Ended(_));
                    if waits && !transaction.acknowledged {
                        transaction.state = State::Lost;
                    }
                }
            }
            Ok(Learned::Known) => {}
            Err(error) => self.error = Some(format!("node {node}: {error}")),
        }
    }

    fn apply(&mut self, node: usize, origin: usize, at: usize) {
        let transaction = self.nodes[origin].log[at];
        let record = self.record(transaction).clone();
        let here = &mut self.nodes[node];
        here.taken[origin].insert(at);
        match here.local.may_apply(&record) {
            Verdict::Apply => {
                here.local.apply(&record).unwrap();
                here.pending.push(transaction);
                let learned = here.learned;
                if self.given_up(transaction, &self.agreed[..learned]) {
                    self.error = Some(format!("node {node} applies {transaction}, given up"));
                }
                self.show(node, transaction);
            }
            Verdict::Already if !here.visible.contains(&transaction) => {
                self.error = Some(format!("node {node} skips {transaction}"));
            }
            Verdict::Contradiction => {
                self.error = Some(format!("node {node}: {transaction} contradicts"));
            }
            _ => {}
        }
    }

    /// Begins the node's next start.
    fn restart(&mut self, node: usize) {
        let mut visible = Vec::new();
        for at in 0..self.transactions.len() {
            if self.transactions[at].node != node {
                continue;
            }
            let next = match &self.transactions[at].state {
                State::Waiting(_) | State::Running(_) | State::Marked(_) => State::Lost,
                State::Ended(_) if !self.transactions[at].acknowledged => State::Lost,
                State::Visible(_) => {
                    visible.push(self.record(at).clone());
                    State::Done
                }
                other => other.clone(),
            };
            self.transactions[at].state = next;
        }
        let pending = std::mem::take(&mut self.nodes[node].pending);
        visible.extend(pending.iter().map(|at| self.record(*at).clone()));
        let boot = Boot(self.boot(node).0 + 1);
        let here = &mut self.nodes[node];
        here.local = here.local.clone().restarted(boot, &visible);
        if self.holder == node {
            self.sequencer = None;
        }
    }

    fn reports(&mut self, mask: u8, fenced: Option<(NodeNumber, Boot)>) -> Reports {
        let mut reports = Reports::new();
        for node in (0..self.nodes.len()).filter(|node| mask >> node & 1 == 1) {
            self.nodes[node].local.promise(fenced);
            reports.insert(number(node), self.local(node).report().unwrap());
        }
        reports
    }

    fn open(&mut self, node: usize, mask: u8) {
        self.budget.opens -= u8::from(self.sequencer.is_some());
        let reports = self.reports(mask, None);
        let follows = self.last_term();
        let mut cut = Cut::new_sequencer(follows, self.nodes.len(), &reports, true).unwrap();
        if self.broken == Some(Broken::CountersTooLow) {
            let ends = reports[&number(node)].ends.clone();
            cut.scope = Scope::Everyone { ends };
        }
        let mut sequencer = Sequencer::begin(&cut).unwrap();
        sequencer.broken = self.broken;
        self.sequencer = Some(sequencer);
        self.holder = node;
        self.agreed.push(cut);
    }

    fn fence(&mut self, node: usize, mask: u8) {
        self.budget.fences -= 1;
        let fenced = (number(node), self.boot(node));
        let reports = self.reports(mask, Some(fenced));
        let members = (0..self.nodes.len()).map(number).collect();
        let sequencer = self.sequencer.as_mut().unwrap();
        let cut = sequencer.fence(fenced.0, fenced.1, &members, &reports);
        let cut = cut.unwrap();
        assert!(sequencer.learn(&cut));
        self.agreed.push(cut);
    }

    fn repair(&mut self, node: usize, from: usize) {
        let whole = self.nodes[from].clone();
        let here = &mut self.nodes[node];
        here.local.repaired(&whole.local.has());
        here.rows = whole.rows;
        here.visible = whole.visible;
        here.taken = whole.taken;
        here.taken[from] = (0..whole.log.len()).collect();
        self.restart(node);
    }
}
