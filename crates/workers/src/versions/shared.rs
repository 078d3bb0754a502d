//! Versions over several nodes: carries out what the rules of rounds ask for, on the versions
//! process's connections, tables and log. `braid_versions::Rounds` has the rules: who gives
//! versions, and what ends each wait.
//!
//! Each turn of the process:
//!
//! 1. It learns what the group has agreed since ([`Keeper::follow_group`]).
//! 2. It takes messages of other nodes ([`Keeper::receive`]).
//! 3. It brings its sessions' requests to the sequencer ([`Keeper::exchange_shared`]).
//! 4. It does all that is due by the clock ([`Keeper::tick`]).
//!
//! Not for: decisions about rounds.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_group::{Command, MemberId, TableNumber};
use braid_node::registry::ManagerEntry;
use braid_node::subscription::{execute, rows};
use braid_node::versions::mailbox::Mailbox;
use braid_node::versions::{note, tables};
use braid_postgres::error::{self, PgError};
use braid_versions::{
    Boot, Bytes, Content, Drains, Effect, Followed, Local, Message, Moment, NextDrain, NodeNumber,
    Note, Rounds, Rules, Timing,
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
/// How long the group is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest wait while something comes again soon, and otherwise.
const BUSY: Duration = Duration::from_millis(300);
const IDLE: Duration = Duration::from_millis(500);

/// The state of a process in a group of several nodes with data, beside [`Keeper`]'s.
pub(super) struct Shared {
    entry: &'static ManagerEntry,
    pub(super) boot: Boot,
    pub(super) agreed: Agreed,
    /// The number of the change of the tables as of which `agreed` is, or an earlier one.
    change: u64,
    mailbox: Mailbox,
    links: Links,
    started: Instant,
    rounds: Rounds,
    drains: Drains,
    complained: Option<String>,
}

impl Shared {
    /// `change` is the number of the last change from before `agreed` was read.
    pub(super) fn new(
        entry: &'static ManagerEntry,
        agreed: Agreed,
        change: u64,
    ) -> Result<Self, PgError> {
        let boot = Boot(error::transaction(agreed::next_boot)?);
        let agreement = agreed.agreement();
        let mut shared = Self {
            entry,
            boot,
            change,
            mailbox: Mailbox::create(entry)?,
            links: Links::new(WAY),
            started: Instant::now(),
            rounds: Rounds::new(
                agreed.me,
                boot,
                Timing::default(),
                agreement,
                Moment::default(),
            ),
            drains: Drains::default(),
            complained: None,
            agreed,
        };
        shared.keep_links();
        Ok(shared)
    }

    fn now(&self) -> Moment {
        let passed = self.started.elapsed().as_micros();
        Moment(u64::try_from(passed).unwrap_or(u64::MAX))
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

    fn member(&self, node: NodeNumber) -> Option<MemberId> {
        MemberId::new(self.agreed.nodes.get(&node)?.id)
    }

    fn send(&mut self, to: NodeNumber, content: Content) {
        let Some(id) = self.member(to) else {
            return;
        };
        let message = Message {
            from: self.agreed.me,
            boot: self.boot,
            content,
        };
        self.links.send(id, message.encode());
    }

    fn complain(&mut self, words: String) {
        if self.complained.as_ref() != Some(&words) {
            pgrx::log!("braid versions: {words}");
            self.complained = Some(words);
        }
    }

    /// Has the group agree, or logs why not.
    fn propose(&mut self, command: Command) -> bool {
        match request::ask(command, PATIENCE) {
            Ok(_) => true,
            Err(failure) => {
                self.complain(format!("no agreement: {}", failure.message));
                false
            }
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
            log_diverged();
        }
        Ok(())
    }

    /// Learns what the group has agreed since. False if the process has to start anew.
    pub(super) fn follow_group(&mut self) -> Result<bool, PgError> {
        let Some(shared) = &self.shared else {
            return Ok(true);
        };
        let change = shared.entry.versioned_changes.load(Ordering::Acquire);
        if change == shared.change {
            return Ok(true);
        }
        let Some(agreed) = error::transaction(agreed::load)? else {
            return Ok(false);
        };
        if agreed.cuts.last().map(|cut| cut.term) > Some(self.local.identity().2) {
            self.settle_ready();
        }
        let Some(shared) = &mut self.shared else {
            return Ok(true);
        };
        shared.change = change;
        let agreement = agreed.agreement();
        shared.agreed = agreed;
        shared.keep_links();
        let mut rules = Rules {
            local: &mut self.local,
            sequencer: &mut self.sequencer,
        };
        match shared.rounds.learn(&mut rules, agreement) {
            Ok(Followed::Current) => Ok(true),
            Ok(Followed::Diverged) => {
                log_diverged();
                Ok(true)
            }
            Ok(Followed::StartAnew) => Ok(false),
            Err(error) => Err(super::keeper::internal(&error)),
        }
    }

    /// Has the rules of rounds decide, and does what they ask for. True if sessions may go on.
    fn with_rounds(
        &mut self,
        decide: impl FnOnce(&mut Rounds, &mut Rules<'_>, Moment) -> Vec<Effect>,
    ) -> Result<bool, PgError> {
        let Some(shared) = &mut self.shared else {
            return Ok(false);
        };
        let now = shared.now();
        let mut rules = Rules {
            local: &mut self.local,
            sequencer: &mut self.sequencer,
        };
        let effects = decide(&mut shared.rounds, &mut rules, now);
        let mut changed = false;
        for effect in effects {
            changed |= self.carry_out(effect)?;
        }
        Ok(changed)
    }

    fn carry_out(&mut self, effect: Effect) -> Result<bool, PgError> {
        let Some(shared) = &mut self.shared else {
            return Ok(false);
        };
        match effect {
            Effect::Send(to, content) => shared.send(to, content),
            Effect::Propose(cut) => {
                let boot = shared.boot.0;
                shared.propose(Command::CutVersions { cut, boot });
            }
            Effect::Answered(answer) => {
                self.note_holders(&answer);
                return Ok(!answer.grants.is_empty() || !answer.confirmed.is_empty());
            }
            Effect::Refused(number, refusal) => {
                return Ok(self.refused(number, &refusal.to_string()));
            }
            Effect::Prune => {
                let (local, agreed) = (&self.local, &shared.agreed);
                error::transaction(|| agreed::prune(local, agreed))?;
            }
        }
        Ok(false)
    }

    /// Takes messages of other nodes. True if there were any.
    pub(super) fn receive(&mut self) -> Result<bool, PgError> {
        let Some(shared) = &self.shared else {
            return Ok(false);
        };
        let messages = shared.mailbox.take();
        let any = !messages.is_empty();
        for bytes in messages {
            match Message::decode(&bytes) {
                Ok(message) => {
                    self.with_rounds(|rounds, rules, now| rounds.receive(rules, message, now))?;
                }
                Err(error) => {
                    if let Some(shared) = &mut self.shared {
                        shared.complain(format!("a message cannot be read: {error}"));
                    }
                }
            }
        }
        Ok(any)
    }

    /// Brings requests and releases to the sequencer. True if something has changed.
    pub(super) fn exchange_shared(&mut self) -> Result<bool, PgError> {
        self.with_rounds(Rounds::exchange)
    }

    /// Does all that is due by the clock.
    pub(super) fn tick(&mut self) -> Result<(), PgError> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let candidate = shared.agreed.candidate();
        self.with_rounds(|rounds, rules, now| rounds.tick(rules, now, candidate))?;
        self.drain()?;
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let missing = shared.rounds.missing(shared.now());
        for (place, cell) in shared.entry.versions_missing.iter().enumerate() {
            let number = missing.get(place).map_or(0, |node| u32::from(node.0));
            cell.store(number, Ordering::Release);
        }
        let lacks = shared
            .rounds
            .lacks_sequencer(&self.local, self.sequencer.is_some());
        shared.entry.versions_lack.store(lacks, Ordering::Release);
        Ok(())
    }

    /// Drains tables that are about to be versioned, or not to be any more.
    fn drain(&mut self) -> Result<(), PgError> {
        let Some(shared) = &mut self.shared else {
            return Ok(());
        };
        let now = shared.now();
        let of = |table: &tables::Table| {
            let number = braid_versions::TableNumber(table.number);
            (number, table.phase == tables::ENDS)
        };
        let moving = shared.agreed.tables.iter();
        let moving = moving.filter(|table| table.phase != tables::COUNTS);
        let due = shared.drains.due(moving.map(of), now);
        for table in shared.agreed.tables.clone() {
            if due.contains(&of(&table)) {
                shared.drain_table(&table)?;
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Goes as far with one table as it can.
    fn drain_table(&mut self, table: &tables::Table) -> Result<(), PgError> {
        let me = self.agreed.me;
        let ends = table.phase == tables::ENDS;
        let nodes = self.agreed.agreement().nodes;
        let mut notes = error::transaction(|| agreed::drained(table))?;
        if self.drains.next(me, &nodes, &notes) == NextDrain::Note {
            // Sessions that look from now on find it in this phase; all others have it locked.
            tables::changed(true);
            if let Err(failure) = error::transaction(|| say_drained(me, table, ends)) {
                let words = failure.message.clone();
                self.complain(format!("a table cannot be drained yet: {words}"));
                return Ok(());
            }
            notes.insert(me);
        }
        if self.drains.next(me, &nodes, &notes) == NextDrain::Propose
            && let Some(member) = self.member(me)
        {
            let command = Command::DrainTable {
                table: TableNumber(table.number),
                member,
                ends,
            };
            if self.propose(command) {
                self.drains
                    .agreed(braid_versions::TableNumber(table.number), ends);
            }
        }
        Ok(())
    }
}

fn log_diverged() {
    pgrx::log!("braid versions: this node has versioned writes that the group has given up");
}

impl Keeper {
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
        let longest = if shared.rounds.is_busy() { BUSY } else { IDLE };
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
