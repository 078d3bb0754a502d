//! Versions over several nodes: the versions process's messages, and who gives versions. The
//! sequencer lives in one process of the group; each process has its own node's part of the rules.
//!
//! **A new sequencer.** A process that finds the group without one, and is to be it, starts a
//! round:
//!
//! 1. It waits until it has heard of all nodes with data within [`SILENT`].
//! 2. It asks all of them, itself included, to promise. A process that promises ends its own
//!    sequencer, and lets no versioned write commit any more.
//! 3. It collects a report of each: what that node has.
//! 4. It has the group agree on the cut that these reports make
//!    (`braid_group::Command::CutVersions`). All processes learn it from the log, and go on. The
//!    proposer begins with it.
//!
//! All nodes report, not a majority. So whatever is committed anywhere is in the reports of the
//! node that has committed it: no write is ever given up, and there is one sequencer at most,
//! without a lease. Example of what goes wrong with a majority and without more rules: A has the
//! sequencer and is cut off; B and C begin another one; A commits its own T1 meanwhile, and B
//! gives the same number to T2.
//!
//! The price: if one node with data is away, nobody begins. Transactions wait, and fail with 55P03
//! that names the node. If it does not come back, it has to be removed.
//!
//! | message | lost, repeated or late |
//! |---|---|
//! | hello | comes again each [`HELLO_EVERY`] |
//! | ask | comes again each [`AGAIN`], until the answer leaves nothing to ask |
//! | answer | the next ask repeats the request |
//! | announcement | comes again each [`HELLO_EVERY`] |
//! | promise, report | come again each [`AGAIN`] until the round ends |

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_group::{Command, MemberId, TableNumber};
use braid_node::registry::ManagerEntry;
use braid_node::subscription::{execute, rows};
use braid_node::versions::mailbox::Mailbox;
use braid_node::versions::{note, tables};
use braid_postgres::error::{self, PgError};
use braid_versions::{
    Announcement, Answer, Batch, Boot, Bytes, Content, Cut, Ends, Error, Learned, Local, Message,
    NodeNumber, Note, Refusal, Reports, Sequencer, Term,
};

use super::agreed::{self, Agreed};
use super::keeper::Keeper;
use super::suited;
use crate::group::links::{Links, Target, Way};
use crate::group::request;

/// How messages go to the other nodes.
const WAY: Way = Way {
    name: "braid versions",
    function: "braid.version_receive",
};
/// Each node says so often that it is there.
const HELLO_EVERY: Duration = Duration::from_secs(1);
/// A message without an answer is sent again after this.
const AGAIN: Duration = Duration::from_millis(300);
/// A node that was not heard of for so long is away.
const SILENT: Duration = Duration::from_secs(4);
/// After a round that has failed.
const PAUSE: Duration = Duration::from_secs(1);
/// How long the group is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks for notes that are not needed any more.
const PRUNE_EVERY: Duration = Duration::from_secs(30);
/// Between two attempts to drain tables.
const DRAIN_EVERY: Duration = Duration::from_millis(500);

/// The last sign of another node.
struct Heard {
    at: Instant,
    boot: Boot,
    /// The node has promised, and waits for a cut.
    waits: bool,
}

/// An attempt to begin as sequencer.
struct Round {
    number: u64,
    follows: Term,
    reports: Reports,
    sent: Option<Instant>,
}

/// A report that this node owes for its promise.
#[derive(Clone, Copy)]
struct Owed {
    to: NodeNumber,
    boot: Boot,
    round: u64,
}

/// The state of a process in a group of several nodes with data, beside [`Keeper`]'s.
pub(super) struct Shared {
    entry: &'static ManagerEntry,
    pub(super) boot: Boot,
    pub(super) agreed: Agreed,
    /// The number of the change of the tables as of which `agreed` is.
    change: u64,
    mailbox: Mailbox,
    links: Links,
    started: Instant,
    heard: BTreeMap<NodeNumber, Heard>,
    round: Option<Round>,
    rounds: u64,
    not_before: Instant,
    owed: Option<Owed>,
    /// The last message to the sequencer.
    asked: Option<(Batch, Instant)>,
    /// The last announcement.
    announced: Option<(Announcement, Instant)>,
    hello_at: Option<Instant>,
    /// The nodes when the last cut was learned: a sequencer knows grants of all of them.
    cut_with: Vec<NodeNumber>,
    drain_at: Instant,
    /// Tables that this node has said to have drained, and whether they end.
    drained: Vec<(u32, bool)>,
    prune_at: Instant,
    complained: Option<String>,
}

impl Shared {
    pub(super) fn new(entry: &'static ManagerEntry, agreed: Agreed) -> Result<Self, PgError> {
        let boot = Boot(error::transaction(agreed::next_boot)?);
        let now = Instant::now();
        let mut shared = Self {
            entry,
            boot,
            change: entry.versioned_changes.load(Ordering::Acquire),
            mailbox: Mailbox::create(entry)?,
            links: Links::new(WAY),
            started: now,
            heard: BTreeMap::new(),
            round: None,
            rounds: 0,
            not_before: now,
            owed: None,
            asked: None,
            announced: None,
            hello_at: None,
            cut_with: agreed.nodes.keys().copied().collect(),
            agreed,
            drain_at: now,
            drained: Vec::new(),
            prune_at: now + PRUNE_EVERY,
            complained: None,
        };
        shared.keep_links();
        Ok(shared)
    }

    fn keep_links(&mut self) {
        let me = self.agreed.me;
        let others = self.agreed.nodes.iter().filter(|(node, _)| **node != me);
        let peers = others
            .filter_map(|(_, node)| {
                Some(Target {
                    id: MemberId::new(node.id)?,
                    name: node.name.clone(),
                    dsn: node.dsn.clone()?,
                })
            })
            .collect();
        self.links.keep(peers);
    }

    fn send(&mut self, to: NodeNumber, content: Content) {
        let Some(id) = self
            .agreed
            .nodes
            .get(&to)
            .and_then(|node| MemberId::new(node.id))
        else {
            return;
        };
        let message = Message {
            from: self.agreed.me,
            boot: self.boot,
            content,
        };
        self.links.send(id, message.encode());
    }

    fn send_to_others(&mut self, content: &Content) {
        let others: Vec<NodeNumber> = self.agreed.others().collect();
        for node in others {
            self.send(node, content.clone());
        }
    }

    /// The nodes that are away.
    fn silent(&self) -> Vec<NodeNumber> {
        let is_heard = |node: &NodeNumber| {
            let heard = self.heard.get(node);
            heard.is_some_and(|heard| heard.at.elapsed() < SILENT)
        };
        self.agreed
            .others()
            .filter(|node| !is_heard(node))
            .collect()
    }

    fn complain(&mut self, words: String) {
        if self.complained.as_ref() != Some(&words) {
            pgrx::log!("braid versions: {words}");
            self.complained = Some(words);
        }
    }
}

impl Keeper {
    /// Whether the process has to start anew: it is not in the group any more, or the group has
    /// another number of nodes with data than one.
    pub(super) fn is_out_of_date(&self, agreed: Option<&Agreed>) -> bool {
        match (agreed, &self.shared) {
            (None, shared) => shared.is_some(),
            (Some(agreed), Some(_)) => agreed.is_alone(),
            (Some(agreed), None) => !agreed.is_alone(),
        }
    }

    /// Begins with what is stored, once nothing of an earlier process may still commit.
    pub(super) fn begin_shared(&mut self) -> Result<(), PgError> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let records = error::transaction(agreed::records)?;
        let (me, boot) = (shared.agreed.me, shared.boot);
        self.local = Local::stored(me, boot, &records, &shared.agreed.cuts)
            .map_err(|error| super::keeper::internal(&error))?;
        if self.local.is_diverged() {
            pgrx::log!(
                "braid versions: this node has versioned writes that the group has given up"
            );
        }
        Ok(())
    }

    /// Learns what the group has agreed since. False if the process has to start anew.
    pub(super) fn follow_group(&mut self) -> Result<bool, PgError> {
        let Some(shared) = &mut self.shared else {
            return Ok(true);
        };
        let change = shared.entry.versioned_changes.load(Ordering::Acquire);
        if change == shared.change {
            return Ok(true);
        }
        let Some(agreed) = error::transaction(agreed::load)? else {
            return Ok(false);
        };
        shared.change = change;
        shared.agreed = agreed;
        shared.keep_links();
        let (cuts, holder, boot) = (
            shared.agreed.cuts.clone(),
            shared.agreed.holder(),
            shared.boot,
        );
        let me = shared.agreed.me;
        let last = cuts.last().map(|cut| cut.term);
        if last > Some(self.local.identity().2) {
            self.settle_ready();
        }
        for cut in &cuts {
            match self.local.learn(cut) {
                Ok(Learned::Known) => continue,
                Ok(Learned::Diverged) => {
                    pgrx::log!(
                        "braid versions: this node has versioned writes that the group has given up"
                    );
                }
                Ok(_) => {}
                // It was away for more decisions than are kept.
                Err(Error::Missing) => return Ok(false),
                Err(error) => return Err(super::keeper::internal(&error)),
            }
            self.sequencer = None;
            if Some(cut.term) == last && holder == Some((me, boot.0)) {
                self.sequencer = Sequencer::begin(cut);
            }
            if let Some(shared) = &mut self.shared {
                shared.cut_with = shared.agreed.nodes.keys().copied().collect();
                shared.round = None;
                shared.owed = None;
                shared.asked = None;
                shared.hello_at = None;
            }
        }
        Ok(true)
    }

    /// Takes messages of other nodes. True if there were any.
    pub(super) fn receive(&mut self) -> bool {
        let Some(shared) = &self.shared else {
            return false;
        };
        let messages = shared.mailbox.take();
        let any = !messages.is_empty();
        for bytes in messages {
            match Message::decode(&bytes) {
                Ok(message) => self.take(message),
                Err(error) => {
                    if let Some(shared) = &mut self.shared {
                        shared.complain(format!("a message cannot be read: {error}"));
                    }
                }
            }
        }
        any
    }

    fn take(&mut self, message: Message) {
        let Some(shared) = &mut self.shared else {
            return;
        };
        let (from, boot) = (message.from, message.boot);
        if from == shared.agreed.me || !shared.agreed.nodes.contains_key(&from) {
            return;
        }
        let now = Instant::now();
        let heard = shared.heard.entry(from).or_insert(Heard {
            at: now,
            boot,
            waits: false,
        });
        if boot < heard.boot {
            // Of an earlier start.
            return;
        }
        heard.at = now;
        heard.boot = boot;
        match message.content {
            Content::Hello { term, has, waits } => {
                heard.waits = waits;
                if let Some(sequencer) = &mut self.sequencer {
                    // A refusal is for a start or a term that is over: it says hello again.
                    let _ = sequencer.restarted(term, from, boot, &has);
                    self.announce(false);
                }
            }
            Content::Ask(batch) => {
                if batch.node == from
                    && batch.boot == boot
                    && let Some(sequencer) = &mut self.sequencer
                {
                    let answer = sequencer.receive(&batch, true);
                    shared.send(from, Content::Answer { to: boot, answer });
                    self.announce(false);
                }
            }
            Content::Answer { to, answer } => {
                let holder = shared.agreed.holder().map(|(node, _)| node);
                if to == shared.boot && holder == Some(from) {
                    shared.asked = None;
                    self.answered(&answer);
                }
            }
            Content::Announce(Announcement { term, ends }) => {
                self.local.announced(term, &ends);
            }
            Content::Promise { follows, round } => {
                self.promise(
                    follows,
                    Owed {
                        to: from,
                        boot,
                        round,
                    },
                );
            }
            Content::Report { to, round, report } => {
                if let Some(of) = &mut shared.round
                    && to == shared.boot
                    && of.number == round
                    && of.follows == report.term
                {
                    of.reports.insert(from, report);
                }
            }
        }
    }

    /// Holds back all versioned writes until the next cut, and owes a report.
    fn promise(&mut self, follows: Term, owed: Owed) {
        if self.local.identity().2 != follows {
            // One of both has to learn what the group has agreed first.
            return;
        }
        self.sequencer = None;
        self.local.promise(None);
        if let Some(shared) = &mut self.shared {
            shared.owed = Some(owed);
        }
    }

    /// Reports, if nothing is between its mark and its commit.
    fn report(&mut self) {
        let Some(shared) = &mut self.shared else {
            return;
        };
        let Some(owed) = shared.owed else {
            return;
        };
        let report = match self.local.report() {
            Ok(report) => report,
            Err(Error::Busy) => return,
            Err(_) => {
                shared.owed = None;
                return;
            }
        };
        shared.owed = None;
        if owed.to != shared.agreed.me {
            shared.send(
                owed.to,
                Content::Report {
                    to: owed.boot,
                    round: owed.round,
                    report,
                },
            );
        } else if let Some(round) = &mut shared.round
            && round.number == owed.round
            && round.follows == report.term
        {
            round.reports.insert(shared.agreed.me, report);
        }
    }

    /// Brings requests and releases to the sequencer. True if something has changed.
    pub(super) fn exchange_shared(&mut self) -> bool {
        let Some(shared) = &mut self.shared else {
            return false;
        };
        let Some((holder, _)) = shared.agreed.holder() else {
            return false;
        };
        let Some(batch) = self.local.batch() else {
            shared.asked = None;
            return false;
        };
        if holder == shared.agreed.me {
            let Some(sequencer) = &mut self.sequencer else {
                return false;
            };
            let answer = sequencer.receive(&batch, true);
            self.announce(false);
            return self.answered(&answer);
        }
        let is_new = shared
            .asked
            .as_ref()
            .is_none_or(|(asked, at)| *asked != batch || at.elapsed() >= AGAIN);
        if is_new {
            shared.send(holder, Content::Ask(batch.clone()));
            shared.asked = Some((batch, Instant::now()));
        }
        false
    }

    /// Takes the sequencer's answer. True if something has changed.
    fn answered(&mut self, answer: &Answer) -> bool {
        self.note_holders(answer);
        let mut changed = !answer.grants.is_empty() || !answer.confirmed.is_empty();
        for (number, refusal) in self.local.answer(answer) {
            match refusal {
                Refusal::TooMany | Refusal::Tables | Refusal::Window => {
                    changed |= self.refused(number, &refusal.to_string());
                }
                Refusal::OtherBoot => {
                    if let Some(shared) = &mut self.shared {
                        shared.hello_at = None;
                    }
                }
                // Somebody has to learn a cut first; the request comes again.
                _ => {}
            }
        }
        changed
    }

    /// Tells all what is decided, if it is something new or `again`.
    fn announce(&mut self, again: bool) {
        let (Some(sequencer), Some(shared)) = (&self.sequencer, &mut self.shared) else {
            return;
        };
        let ends: Ends = sequencer.ends();
        let announcement = Announcement {
            term: sequencer.term(),
            ends,
        };
        let is_known = shared.announced.as_ref().is_some_and(|(last, at)| {
            *last == announcement && !(again && at.elapsed() >= HELLO_EVERY)
        });
        if is_known {
            return;
        }
        self.local.announced(announcement.term, &announcement.ends);
        shared.send_to_others(&Content::Announce(announcement.clone()));
        shared.announced = Some((announcement, Instant::now()));
    }

    /// Does all that is due by the clock.
    pub(super) fn tick(&mut self) -> Result<(), PgError> {
        self.hello();
        self.announce(true);
        self.report();
        let lacks = self.lacks_sequencer();
        self.attempt(lacks)?;
        self.report();
        self.finish_round()?;
        self.drain()?;
        self.prune()?;
        let Some(shared) = &mut self.shared else {
            return Ok(());
        };
        let silent = if shared.started.elapsed() < SILENT {
            Vec::new()
        } else {
            shared.silent()
        };
        for (place, cell) in shared.entry.versions_missing.iter().enumerate() {
            let number = silent.get(place).map_or(0, |node| u32::from(node.0));
            cell.store(number, Ordering::Release);
        }
        shared.entry.versions_lack.store(lacks, Ordering::Release);
        Ok(())
    }

    fn hello(&mut self) {
        let Some(shared) = &mut self.shared else {
            return;
        };
        if shared.hello_at.is_some_and(|at| at.elapsed() < HELLO_EVERY) {
            return;
        }
        shared.hello_at = Some(Instant::now());
        let hello = Content::Hello {
            term: self.local.identity().2,
            has: self.local.has(),
            waits: self.local.has_promised(),
        };
        shared.send_to_others(&hello);
    }

    /// Whether the group has no sequencer, as far as this node knows.
    fn lacks_sequencer(&self) -> bool {
        let Some(shared) = &self.shared else {
            return false;
        };
        let Some((holder, boot)) = shared.agreed.holder() else {
            return true;
        };
        if self.local.has_promised() || shared.heard.values().any(|heard| heard.waits) {
            return true;
        }
        // What a node that is gone was granted is void by the next cut.
        let is_there = |node: &NodeNumber| shared.agreed.nodes.contains_key(node);
        if !shared.cut_with.iter().all(is_there) {
            return true;
        }
        if holder == shared.agreed.me {
            return self.sequencer.is_none();
        }
        let heard = shared.heard.get(&holder);
        heard.is_some_and(|heard| heard.boot.0 != boot)
    }

    /// Begins a round, or goes on with it.
    fn attempt(&mut self, lacks: bool) -> Result<(), PgError> {
        let term = self.local.identity().2;
        let Some(shared) = &mut self.shared else {
            return Ok(());
        };
        let me = shared.agreed.me;
        if shared
            .round
            .as_ref()
            .is_some_and(|round| round.follows != term)
        {
            shared.round = None;
        }
        if shared.round.is_none() {
            let may = shared.agreed.candidate() == Some(me)
                || shared
                    .agreed
                    .holder()
                    .is_some_and(|(holder, _)| holder == me);
            if !lacks
                || !may
                || Instant::now() < shared.not_before
                || self.local.is_diverged()
                || !shared.silent().is_empty()
            {
                return Ok(());
            }
            shared.rounds += 1;
            let number = shared.rounds;
            shared.round = Some(Round {
                number,
                follows: term,
                reports: Reports::new(),
                sent: None,
            });
            let boot = shared.boot;
            self.promise(
                term,
                Owed {
                    to: me,
                    boot,
                    round: number,
                },
            );
        }
        let Some(shared) = &mut self.shared else {
            return Ok(());
        };
        let others: Vec<NodeNumber> = shared.agreed.others().collect();
        let Some(round) = &mut shared.round else {
            return Ok(());
        };
        if round.sent.is_some_and(|at| at.elapsed() < AGAIN) {
            return Ok(());
        }
        round.sent = Some(Instant::now());
        let left = others
            .into_iter()
            .filter(|node| !round.reports.contains_key(node));
        let left: Vec<NodeNumber> = left.collect();
        let promise = Content::Promise {
            follows: round.follows,
            round: round.number,
        };
        for node in left {
            shared.send(node, promise.clone());
        }
        Ok(())
    }

    /// Has the group agree on the cut, once all have reported.
    fn finish_round(&mut self) -> Result<(), PgError> {
        let Some(shared) = &mut self.shared else {
            return Ok(());
        };
        let Some(round) = &shared.round else {
            return Ok(());
        };
        let has_reported = |node: &NodeNumber| round.reports.contains_key(node);
        let count = shared.agreed.nodes.len();
        if round.reports.len() != count || !shared.agreed.nodes.keys().all(has_reported) {
            return Ok(());
        }
        let cut = Cut::new_sequencer(round.follows, count, &round.reports, true);
        shared.round = None;
        shared.not_before = Instant::now() + PAUSE;
        let Ok(cut) = cut else {
            return Ok(());
        };
        let boot = shared.boot.0;
        match request::ask(Command::CutVersions { cut, boot }, PATIENCE) {
            Ok(_) => {}
            Err(failure) => shared.complain(format!("no agreement: {}", failure.message)),
        }
        Ok(())
    }

    /// Drains tables that are about to be versioned, or not to be any more.
    fn drain(&mut self) -> Result<(), PgError> {
        let Some(shared) = &mut self.shared else {
            return Ok(());
        };
        if Instant::now() < shared.drain_at {
            return Ok(());
        }
        shared.drain_at = Instant::now() + DRAIN_EVERY;
        let me = shared.agreed.me;
        let moving: Vec<_> = shared
            .agreed
            .tables
            .iter()
            .filter(|table| table.phase != tables::COUNTS)
            .copied()
            .collect();
        for table in moving {
            let ends = table.phase == tables::ENDS;
            if shared.drained.contains(&(table.number, ends)) {
                continue;
            }
            let mut here = error::transaction(|| agreed::drained(&table))?;
            if !here.contains(&me) {
                // Sessions that look from now on find it in this phase; all others have it locked.
                tables::changed(true);
                match error::transaction(|| say_drained(me, &table, ends)) {
                    Ok(()) => here.push(me),
                    Err(failure) => {
                        let words = failure.message.clone();
                        shared.complain(format!("a table cannot be drained yet: {words}"));
                        continue;
                    }
                }
            }
            if !shared.agreed.nodes.keys().all(|node| here.contains(node)) {
                continue;
            }
            let Some(member) = shared
                .agreed
                .nodes
                .get(&me)
                .and_then(|node| MemberId::new(node.id))
            else {
                continue;
            };
            let command = Command::DrainTable {
                table: TableNumber(table.number),
                member,
                ends,
            };
            match request::ask(command, PATIENCE) {
                Ok(_) => shared.drained.push((table.number, ends)),
                Err(failure) => shared.complain(format!("no agreement: {}", failure.message)),
            }
        }
        Ok(())
    }

    fn prune(&mut self) -> Result<(), PgError> {
        let Some(shared) = &mut self.shared else {
            return Ok(());
        };
        if Instant::now() < shared.prune_at || self.local.is_diverged() {
            return Ok(());
        }
        shared.prune_at = Instant::now() + PRUNE_EVERY;
        let (local, agreed) = (&self.local, &shared.agreed);
        error::transaction(|| agreed::prune(local, agreed))
    }

    /// Has connections go on.
    pub(super) fn tend_links(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.links.tend();
        }
    }

    /// Waits until there may be something to do.
    pub(super) fn wait(&self, longest: Duration) {
        let Some(shared) = &self.shared else {
            braid_postgres::latch::wait(Some(longest));
            return;
        };
        let sockets = shared.links.sockets();
        let is_busy = shared.round.is_some() || shared.asked.is_some() || shared.owed.is_some();
        let longest = if is_busy { AGAIN } else { DRAIN_EVERY };
        braid_postgres::latch::wait_for_any(&sockets, longest);
    }
}

/// Ends what writes a table, and says so to the nodes that receive from this one. In a transaction.
fn say_drained(me: NodeNumber, table: &tables::Table, ends: bool) -> Result<(), PgError> {
    let found = rows(
        "select pg_catalog.format('%I.%I', n.nspname, c.relname) from pg_catalog.pg_class c \
           join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.oid = $1",
        &[table.relation.into()],
    )?;
    let name = found
        .first()
        .and_then(|row| row.first().cloned().flatten())
        .ok_or_else(|| {
            PgError::new(
                braid_bgworker::sqlstate::SqlState::UndefinedTable,
                format!("this node does not have versioned table {}", table.number),
            )
        })?;
    // Nobody is held up: those that write it end, and no others begin.
    execute(
        &format!("lock table {name} in share row exclusive mode nowait"),
        &[],
    )?;
    if !ends {
        suited::check(table.relation)?;
    }
    let drained = Note::Drained {
        node: me,
        table: braid_versions::TableNumber(table.number),
        ends,
    };
    note::write(&drained.encode())
}
