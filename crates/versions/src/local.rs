//! The versions of one node: its transactions that wait, and what it has reached.
//!
//! Shared memory holds one [`Local`] for each database, under one lock. Sessions and appliers call
//! it; a worker carries [`Batch`]es and [`Answer`]s between it and the sequencer. A session's
//! transaction goes through:
//!
//! 1. [`Local::ask`], then waits for the answer.
//! 2. [`Local::start`] until it says [`Start::Ready`]. With the lock still held it takes its
//!    snapshot and calls [`Local::started`]: so no write becomes visible in between.
//! 3. [`Local::commit`], right before the commit record; the record has to be written with it.
//! 4. [`Local::committed`] once the commit is visible, or [`Local::withdraw`] if it failed.
//!
//! An error before step 3 calls [`Local::abort`]. `applying.rs` has the appliers' side, `cuts` of
//! the group are learned in `joining.rs`.

use std::collections::{BTreeMap, BTreeSet};

use crate::broken::Broken;
use crate::cut::{Cut, Cuts, Scope};
use crate::grant::TABLES_LIMIT;
use crate::grant::{Access, Answer, Batch, Grant, Refusal, Release, Released, Request};
use crate::number::{Boot, NodeNumber, TableNumber, Term, Version};
use crate::progress::Tables;
use crate::record::{Record, Shipped};
use crate::vector::{Ends, Vector};

/// The most transactions of one node that wait or run at once.
pub const TRANSACTIONS_LIMIT: usize = 8_192;
/// The most requests and the most releases in one message.
pub const BATCH_LIMIT: usize = 1_024;

/// An error of a node's versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Error {
    /// No such transaction, or it is not at this step.
    #[error("the transaction is not at this step")]
    Step,
    /// The declaration names no table, or too many.
    #[error("a versioned transaction declares from 1 to 256 tables")]
    Tables,
    /// Too many transactions.
    #[error("too many versioned transactions wait on this node")]
    TooMany,
    /// The transaction's grant is of a term that is over.
    #[error("the group has another sequencer of table versions than when the transaction began")]
    OldTerm,
    /// The node has writes that the group has given up.
    #[error("this node has versioned writes that the group has given up")]
    Diverged,
    /// A cut before this one was not learned.
    #[error("an earlier decision of the group about table versions is missing")]
    Missing,
    /// A write is between its mark and its commit.
    #[error("a versioned write is being committed")]
    Busy,
}

/// A write that something waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    /// The table.
    pub table: TableNumber,
    /// The write of it.
    pub version: Version,
    /// The node that has it, if the sequencer knew that it was not committed.
    pub holder: Option<NodeNumber>,
}

/// Whether a transaction may take its snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// Yes, with the lock held.
    Ready,
    /// Not yet. Without edges: for the sequencer's answer.
    Wait(Vec<Edge>),
    /// A later write of a declared table is visible already: [`Local::ask_again`]. Happens only
    /// to transactions that do not write.
    Overtaken,
    /// The grant's term is over: an error for the client, or [`Local::ask_again`].
    OldTerm,
}

/// What is left to do for a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Commit {
    /// Nothing: the transaction has no write of its own.
    ReadOnly,
    /// Commit with this record, then [`Local::committed`].
    Record(Record),
    /// Not yet: a transaction of this node is about to take its snapshot, or a cut is awaited.
    Wait,
}

/// What came of an early release of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyRelease {
    /// The number of the table's write is void from now on.
    Released,
    /// There is nothing to release before the transaction ends. See [`Local::release`].
    AtEnd,
}

/// A transaction that waits, for users and error messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The number of its request.
    pub number: u64,
    /// The session, as the caller names it (a process id).
    pub owner: u64,
    /// Since when, in microseconds of the node's monotonic clock.
    pub since: u64,
    /// Until when.
    pub deadline: u64,
    /// What it waits for. Empty: for the sequencer.
    pub edges: Vec<Edge>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Stage {
    Asked,
    Granted(Grant),
    /// With what its snapshot saw.
    Running(Grant, Vector),
    Committing(Grant, Record),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Transaction {
    owner: u64,
    since: u64,
    deadline: u64,
    declared: BTreeMap<TableNumber, Access>,
    stage: Stage,
}

/// The versions of one node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Local {
    pub(crate) me: NodeNumber,
    pub(crate) boot: Boot,
    /// The last cut's term, and that of the last cut over everyone.
    pub(crate) term: Term,
    pub(crate) since: Term,
    /// What the last cut over everyone counts: no transaction of its term is seen before all this.
    pub(crate) base: Vector,
    pub(crate) cuts: Cuts,
    pub(crate) promised: BTreeMap<Option<NodeNumber>, Boot>,
    pub(crate) diverged: bool,
    pub(crate) tables: Tables,
    /// Writes between mark and publication, local and remote ones.
    pub(crate) under_way: BTreeSet<Record>,
    transactions: BTreeMap<u64, Transaction>,
    releases: BTreeMap<u64, Released>,
    last_number: u64,
    pub(crate) broken: Option<Broken>,
}

impl Local {
    /// A node that has no versioned write yet and knows no sequencer.
    #[must_use]
    pub fn new(me: NodeNumber, boot: Boot) -> Self {
        Self {
            me,
            boot,
            term: Term(0),
            since: Term(0),
            base: Vector::new(),
            cuts: Cuts::default(),
            promised: BTreeMap::new(),
            diverged: false,
            tables: Tables::default(),
            under_way: BTreeSet::new(),
            transactions: BTreeMap::new(),
            releases: BTreeMap::new(),
            last_number: 0,
            broken: None,
        }
    }

    /// Registers a transaction and its request. `now` and `deadline` are microseconds of the
    /// node's monotonic clock.
    ///
    /// # Errors
    ///
    /// [`Error::Tables`], [`Error::TooMany`], [`Error::Diverged`].
    pub fn ask(
        &mut self,
        owner: u64,
        declared: BTreeMap<TableNumber, Access>,
        now: u64,
        deadline: u64,
    ) -> Result<u64, Error> {
        if self.diverged {
            return Err(Error::Diverged);
        }
        if declared.is_empty() || declared.len() > TABLES_LIMIT {
            return Err(Error::Tables);
        }
        if self.transactions.len() >= TRANSACTIONS_LIMIT
            || self.releases.len() >= TRANSACTIONS_LIMIT
        {
            return Err(Error::TooMany);
        }
        self.last_number = self.last_number.saturating_add(1);
        let transaction = Transaction {
            owner,
            since: now,
            deadline,
            declared,
            stage: Stage::Asked,
        };
        self.transactions.insert(self.last_number, transaction);
        Ok(self.last_number)
    }

    /// Asks anew for a transaction that has not started; returns its new number.
    ///
    /// # Errors
    ///
    /// [`Error::Step`] if it has started or is not known.
    pub fn ask_again(&mut self, number: u64) -> Result<u64, Error> {
        let transaction = self.transactions.get(&number).ok_or(Error::Step)?;
        if !matches!(transaction.stage, Stage::Asked | Stage::Granted(_)) {
            return Err(Error::Step);
        }
        let mut transaction = transaction.clone();
        transaction.stage = Stage::Asked;
        self.abort(number);
        self.last_number = self.last_number.saturating_add(1);
        self.transactions.insert(self.last_number, transaction);
        Ok(self.last_number)
    }

    /// The message for the sequencer, if there is something to say. It is sent again until an
    /// [`Answer`] leaves nothing to say.
    #[must_use]
    pub fn batch(&self) -> Option<Batch> {
        let asked = |t: &&u64| {
            let transaction = self.transactions.get(t);
            transaction.is_some_and(|transaction| transaction.stage == Stage::Asked)
        };
        let request = |number: &u64| {
            let declared = &self.transactions.get(number)?.declared;
            Some(Request {
                number: *number,
                tables: declared.clone(),
            })
        };
        let numbers = self.transactions.keys().filter(asked);
        let requests: Vec<_> = numbers.filter_map(request).take(BATCH_LIMIT).collect();
        let release = |(number, released): (&u64, &Released)| Release {
            number: *number,
            released: released.clone(),
        };
        let releases: Vec<_> = self
            .releases
            .iter()
            .map(release)
            .take(BATCH_LIMIT)
            .collect();
        if requests.is_empty() && releases.is_empty() {
            return None;
        }
        let lowest = [self.transactions.keys().next(), self.releases.keys().next()];
        let next = self.last_number.saturating_add(1);
        Some(Batch {
            term: self.term,
            node: self.me,
            boot: self.boot,
            low: lowest.into_iter().flatten().min().copied().unwrap_or(next),
            requests,
            releases,
        })
    }

    /// Takes the sequencer's answer, in any order and any number of times. Returns the requests
    /// that were refused; they stay, to be sent again or aborted.
    pub fn answer(&mut self, answer: &Answer) -> Vec<(u64, Refusal)> {
        for release in &answer.confirmed {
            // Not if more was released meanwhile.
            if self.releases.get(&release.number) == Some(&release.released) {
                self.releases.remove(&release.number);
            }
        }
        for grant in &answer.grants {
            self.granted(grant);
        }
        let asked = |number: &u64| {
            let transaction = self.transactions.get(number);
            transaction.is_some_and(|transaction| transaction.stage == Stage::Asked)
        };
        let mut refused = answer.refused.clone();
        refused.retain(|(number, _)| asked(number));
        refused
    }

    fn granted(&mut self, grant: &Grant) {
        let id = grant.id;
        if id.node != self.me || id.boot != self.boot || !self.is_current(grant.term) {
            return;
        }
        let number = id.number;
        let Some(transaction) = self.transactions.get_mut(&number) else {
            // The transaction has ended before its grant came.
            if grant.writes() && number <= self.last_number {
                self.releases.entry(number).or_insert(Released::Void);
            }
            return;
        };
        if transaction.stage == Stage::Asked && fits(grant, &transaction.declared) {
            for (table, granted) in &grant.tables {
                self.tables.at(*table).hear(granted.seen);
            }
            transaction.stage = Stage::Granted(grant.clone());
        }
    }

    /// Whether grants of this term count.
    fn is_current(&self, term: Term) -> bool {
        self.since <= term && term <= self.term && term != Term(0)
    }

    /// Takes what the sequencer says is decided. False if the node has to learn a cut first.
    pub fn announced(&mut self, term: Term, ends: &Ends) -> bool {
        if term > self.term {
            return false;
        }
        if term == self.term {
            for (table, end) in ends {
                self.tables.at(*table).announce(*end);
            }
        }
        true
    }

    /// Says whether a transaction may take its snapshot now.
    ///
    /// # Errors
    ///
    /// [`Error::Step`], [`Error::Diverged`].
    pub fn start(&self, number: u64) -> Result<Start, Error> {
        if self.diverged {
            return Err(Error::Diverged);
        }
        let transaction = self.transactions.get(&number).ok_or(Error::Step)?;
        match &transaction.stage {
            Stage::Asked => Ok(Start::Wait(Vec::new())),
            Stage::Granted(grant) => Ok(self.start_of(grant)),
            _ => Err(Error::Step),
        }
    }

    fn start_of(&self, grant: &Grant) -> Start {
        if !self.is_current(grant.term) {
            return Start::OldTerm;
        }
        let later = |(table, granted): (&TableNumber, &crate::Granted)| {
            let progress = self.tables.get(*table);
            let last = match self.broken {
                Some(Broken::SeenFromReached) => progress.applied,
                Some(Broken::LaterIsSound) => Version(0),
                _ => progress.coming,
            };
            granted.declared && last > granted.seen
        };
        if grant.tables.iter().any(later) {
            return Start::Overtaken;
        }
        let mut edges = self.base_edges();
        for (table, granted) in &grant.tables {
            if self.tables.get(*table).reached < granted.seen {
                edges.push(Edge {
                    table: *table,
                    version: granted.seen,
                    holder: granted.holder,
                });
            }
        }
        if edges.is_empty() {
            Start::Ready
        } else {
            Start::Wait(edges)
        }
    }

    /// What this node lacks of the last cut over everyone.
    pub(crate) fn base_edges(&self) -> Vec<Edge> {
        let lacks = |(table, version): (&TableNumber, &Version)| {
            (self.tables.get(*table).reached < *version).then_some(Edge {
                table: *table,
                version: *version,
                holder: None,
            })
        };
        self.base.iter().filter_map(lacks).collect()
    }

    /// Notes that the transaction has taken its snapshot, with the lock held since
    /// [`Local::start`] said [`Start::Ready`]. A caller that can't keep the lock calls this right
    /// after the snapshot; anything but [`Start::Ready`] means that the snapshot must not be used.
    ///
    /// # Errors
    ///
    /// As [`Local::start`].
    pub fn started(&mut self, number: u64) -> Result<Start, Error> {
        let start = self.start(number)?;
        if start == Start::Ready
            && let Some(transaction) = self.transactions.get(&number)
            && let Stage::Granted(grant) = &transaction.stage
        {
            let grant = grant.clone();
            let seen = self.seen_by(&grant);
            if let Some(transaction) = self.transactions.get_mut(&number) {
                transaction.stage = Stage::Running(grant, seen);
            }
        }
        Ok(start)
    }

    /// What the snapshot of a running transaction has seen. A transaction without writes is
    /// acknowledged once a majority has reached all this ([`crate::Confirmations`]).
    #[must_use]
    pub fn seen(&self, number: u64) -> Option<&Vector> {
        match &self.transactions.get(&number)?.stage {
            Stage::Running(_, seen) => Some(seen),
            _ => None,
        }
    }

    /// Releases a table before the end: the transaction neither uses it from now on nor has used
    /// it, if `used` is false.
    ///
    /// The published algorithm releases a table after its last query, so that the next writer can
    /// go on before this transaction ends. Under PostgreSQL a write is not visible before its
    /// commit, so a written table can't be released. A table that was read can't be either, if the
    /// transaction writes another one: the next writer has to come after it on every node. What
    /// remains: a table that was declared as written and was not used, and all tables of a
    /// transaction that has written nothing (`wrote` is false) and will not.
    ///
    /// # Errors
    ///
    /// [`Error::Step`] if the transaction does not run.
    pub fn release(
        &mut self,
        number: u64,
        table: TableNumber,
        used: bool,
        only_reads: bool,
    ) -> Result<EarlyRelease, Error> {
        let transaction = self.transactions.get_mut(&number).ok_or(Error::Step)?;
        let Stage::Running(grant, _) = &mut transaction.stage else {
            return Err(Error::Step);
        };
        let mut unused = BTreeSet::new();
        if only_reads {
            let written = grant
                .tables
                .iter()
                .filter(|(_, granted)| granted.own.is_some());
            unused.extend(written.map(|(table, _)| *table));
        } else if !used && grant.tables.get(&table).is_some_and(|g| g.own.is_some()) {
            unused.insert(table);
        }
        if unused.is_empty() {
            return Ok(EarlyRelease::AtEnd);
        }
        for table in &unused {
            if let Some(granted) = grant.tables.get_mut(table) {
                granted.own = None;
            }
        }
        if let Released::Unused(tables) = self
            .releases
            .entry(number)
            .or_insert_with(|| Released::Unused(BTreeSet::new()))
        {
            tables.extend(unused);
        }
        Ok(EarlyRelease::Released)
    }

    /// Marks a transaction's writes as coming, right before its commit record is written.
    ///
    /// # Errors
    ///
    /// [`Error::OldTerm`] if its grant counts no more: the transaction has to roll back.
    /// [`Error::Step`], [`Error::Diverged`].
    pub fn commit(&mut self, number: u64) -> Result<Commit, Error> {
        let transaction = self.transactions.get(&number).ok_or(Error::Step)?;
        let Stage::Running(grant, seen) = &transaction.stage else {
            return Err(Error::Step);
        };
        if !grant.writes() {
            return Ok(Commit::ReadOnly);
        }
        if self.diverged {
            return Err(Error::Diverged);
        }
        let takes_old = self.broken == Some(Broken::OldGrantCommits);
        if !self.is_current(grant.term) && !takes_old {
            return Err(Error::OldTerm);
        }
        let record = self.record(grant, seen);
        let of_grant = Record {
            term: grant.term,
            ..record.clone()
        };
        if self.cuts.refuse(&of_grant) && !takes_old {
            return Err(Error::OldTerm);
        }
        if self.holds_back(&record) || self.reader_is_ready(&record) {
            return Ok(Commit::Wait);
        }
        let grant = grant.clone();
        if let Some(transaction) = self.transactions.get_mut(&number) {
            transaction.stage = Stage::Committing(grant, record.clone());
        }
        self.mark(&record);
        Ok(Commit::Record(record))
    }

    /// The record that travels before a transaction's changes, once it may take its snapshot.
    /// `None` if it does not write.
    ///
    /// Nothing in it can change before the commit, unless a table is released early:
    ///
    /// - The write before its own is reached already, and no later write of the table commits
    ///   before its own number has ended.
    /// - A cut over everyone makes the grant void ([`Local::commit`]). A cut over another node does
    ///   not concern the record, so the term at the start says as much as the one at the end.
    ///
    /// # Errors
    ///
    /// [`Error::Step`] if the transaction may not take its snapshot, and does not run.
    pub fn shipped(&self, number: u64) -> Result<Option<Record>, Error> {
        let transaction = self.transactions.get(&number).ok_or(Error::Step)?;
        let record = match &transaction.stage {
            Stage::Granted(grant) if self.start_of(grant) == Start::Ready => {
                self.record(grant, &self.seen_by(grant))
            }
            Stage::Running(grant, seen) => self.record(grant, seen),
            _ => return Err(Error::Step),
        };
        let writes = record.writes().next().is_some();
        Ok(writes.then_some(record))
    }

    /// The last writes that a snapshot of now may have seen, of the tables of a grant.
    fn seen_by(&self, grant: &Grant) -> Vector {
        let mut seen = Vector::new();
        for (table, granted) in &grant.tables {
            let progress = self.tables.get(*table);
            // Read after the snapshot: an upper bound of what the snapshot holds.
            let last = match self.broken {
                Some(Broken::SeenFromReached) => progress.applied,
                _ => progress.coming,
            };
            let last = if granted.declared {
                last
            } else {
                last.min(granted.seen)
            };
            seen.insert(*table, last);
        }
        seen
    }

    fn record(&self, grant: &Grant, seen: &Vector) -> Record {
        let shipped = |(table, granted): (&TableNumber, &crate::Granted)| {
            let seen = seen.get(table).copied().unwrap_or_default();
            let seen = if granted.own.is_some() {
                self.tables.get(*table).applied
            } else {
                seen
            };
            let own = granted.own;
            (*table, Shipped { seen, own })
        };
        Record {
            term: self.term,
            id: grant.id,
            tables: grant.tables.iter().map(shipped).collect(),
        }
    }

    /// Publishes the writes of a commit that is visible now, and releases its grant.
    ///
    /// # Errors
    ///
    /// [`Error::Step`] if [`Local::commit`] gave no record.
    pub fn committed(&mut self, number: u64) -> Result<(), Error> {
        let transaction = self.transactions.get(&number).ok_or(Error::Step)?;
        let Stage::Committing(_, record) = &transaction.stage else {
            return Err(Error::Step);
        };
        let record = record.clone();
        self.transactions.remove(&number);
        let written = record.writes().map(|(table, _)| table).collect();
        self.releases.insert(number, Released::Committed(written));
        self.publish(&record);
        Ok(())
    }

    /// Takes a mark back: the commit failed and nothing of it is visible.
    ///
    /// # Errors
    ///
    /// [`Error::Step`] if [`Local::commit`] gave no record.
    pub fn withdraw(&mut self, number: u64) -> Result<(), Error> {
        let transaction = self.transactions.get(&number).ok_or(Error::Step)?;
        let Stage::Committing(_, record) = &transaction.stage else {
            return Err(Error::Step);
        };
        let record = record.clone();
        self.unmark(&record);
        self.transactions.remove(&number);
        self.releases.insert(number, Released::Void);
        Ok(())
    }

    /// Ends a transaction that has no mark: its numbers, if it has or gets any, are void. Also the
    /// end of one that only reads.
    pub fn abort(&mut self, number: u64) {
        let Some(transaction) = self.transactions.get(&number) else {
            return;
        };
        let numbered = match &transaction.stage {
            Stage::Committing(..) => return,
            Stage::Asked => transaction.declared.values().any(|a| *a == Access::Write),
            Stage::Granted(grant) => grant.writes(),
            // Released tables are named once more: the whole grant ends.
            Stage::Running(grant, _) => grant.writes() || self.releases.contains_key(&number),
        };
        self.transactions.remove(&number);
        if numbered {
            self.releases.insert(number, Released::Void);
        }
    }

    /// The numbers of transactions that wait or run, with the tables and versions that they write.
    #[cfg(test)]
    pub(crate) fn numbers(&self) -> Vec<(u64, TableNumber, Version)> {
        let mut numbers = Vec::new();
        for (number, transaction) in &self.transactions {
            let (Stage::Granted(grant) | Stage::Running(grant, _) | Stage::Committing(grant, _)) =
                &transaction.stage
            else {
                continue;
            };
            if self.is_current(grant.term) {
                let own = grant.tables.iter().filter_map(|(t, g)| Some((*t, g.own?)));
                numbers.extend(own.map(|(table, own)| (*number, table, own)));
            }
        }
        numbers
    }

    /// Gives up all requests of earlier terms: the new sequencer knows none of them.
    pub(crate) fn forget_sequencer(&mut self) {
        self.releases.clear();
    }

    /// The transactions that wait, and for what. One whose deadline is over is to be aborted.
    #[must_use]
    pub fn waiting(&self) -> Vec<Waiting> {
        let waiting = |(number, transaction): (&u64, &Transaction)| {
            let edges = match &transaction.stage {
                Stage::Asked => Vec::new(),
                Stage::Granted(grant) => match self.start_of(grant) {
                    Start::Wait(edges) => edges,
                    _ => return None,
                },
                _ => return None,
            };
            Some(Waiting {
                number: *number,
                owner: transaction.owner,
                since: transaction.since,
                deadline: transaction.deadline,
                edges,
            })
        };
        self.transactions.iter().filter_map(waiting).collect()
    }

    /// Whether a transaction that is about to take its snapshot must not see these writes. It
    /// waits for nothing any more, so this is short.
    pub(crate) fn reader_is_ready(&self, record: &Record) -> bool {
        self.transactions.values().any(|transaction| {
            let Stage::Granted(grant) = &transaction.stage else {
                return false;
            };
            let hides = |(table, own): (TableNumber, Version)| {
                let granted = grant.tables.get(&table);
                granted.is_some_and(|granted| granted.declared && own > granted.seen)
            };
            record.writes().any(hides) && self.start_of(grant) == Start::Ready
        })
    }

    /// The write that a single read of one table has to wait for: the last one that the node has
    /// heard of. A transaction that reads one table once needs no grant: it waits until
    /// [`Local::has_reached`] and then takes a snapshot. With two tables it would not be
    /// serializable.
    #[must_use]
    pub fn read_current(&self, table: TableNumber) -> Version {
        self.tables.get(table).known
    }

    /// The tables that the node has heard of: the highest number, and up to which one all are
    /// visible here or void.
    pub fn progress(&self) -> impl Iterator<Item = (TableNumber, Version, Version)> {
        let tables = self.tables.iter();
        tables.map(|(table, progress)| (table, progress.known, progress.reached))
    }

    /// Whether the node has reached a write.
    #[must_use]
    pub fn has_reached(&self, table: TableNumber, version: Version) -> bool {
        self.tables.get(table).reached >= version
    }

    /// The node's number, its start, and the last term that it knows.
    #[must_use]
    pub const fn identity(&self) -> (NodeNumber, Boot, Term) {
        (self.me, self.boot, self.term)
    }

    /// A node that starts anew with what it has stored: the records of its committed writes, its
    /// own and those that it has applied (superseded ones may be missing), and the agreed cuts, in
    /// their order.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if a cut is missing between two others.
    pub fn stored(
        me: NodeNumber,
        boot: Boot,
        records: &[Record],
        cuts: &[Cut],
    ) -> Result<Self, Error> {
        let mut local = Self::new(me, boot);
        for cut in cuts {
            if cut.follows != local.term && local.term != Term(0) {
                return Err(Error::Missing);
            }
            local.term = cut.term;
            local.cuts.add(cut.clone());
            if let Scope::Everyone { ends } = &cut.scope {
                local.since = cut.term;
                local.base = ends.iter().map(|(t, end)| (*t, end.committed)).collect();
            }
        }
        if let Some(first) = cuts.first() {
            local.cuts.forget_before(first.follows);
        }
        for record in records {
            // Older cuts than those that are kept were learned when the record was here already.
            local.diverged |= local.cuts.voids(record);
            for (table, own) in record.writes() {
                local.tables.at(table).publish(own);
            }
        }
        let last = cuts.iter().rev().find_map(|cut| match &cut.scope {
            Scope::Everyone { ends } => Some(ends),
            Scope::Node { .. } => None,
        });
        for (table, end) in last.into_iter().flatten() {
            local.tables.at(*table).announce(*end);
        }
        Ok(local)
    }

    /// The node after a crash, as its durable state has it. `visible` are the records of commits
    /// that were visible and not published.
    #[must_use]
    pub fn restarted(mut self, boot: Boot, visible: &[Record]) -> Self {
        self.transactions.clear();
        self.releases.clear();
        self.last_number = 0;
        for record in std::mem::take(&mut self.under_way) {
            if visible.contains(&record) {
                self.publish(&record);
            } else {
                self.unmark(&record);
            }
        }
        self.boot = boot;
        self
    }
}

/// Whether a grant is for what was declared.
fn fits(grant: &Grant, declared: &BTreeMap<TableNumber, Access>) -> bool {
    let own = |table, access: &Access| {
        grant.tables.get(table).is_some_and(|granted| {
            granted.declared && granted.own.is_some() == (*access == Access::Write)
        })
    };
    let asked = grant.tables.values().filter(|granted| granted.declared);
    asked.count() == declared.len() && declared.iter().all(|(table, access)| own(table, access))
}
