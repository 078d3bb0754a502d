//! The sequencer: gives each transaction its versions of all tables at once.
//!
//! One of the group's nodes has it, by a lease. It keeps nothing durably: a new one begins with a
//! [`Cut`] that a majority's reports made. It remembers, within fixed limits:
//!
//! - by table, the last number and the numbers whose end it does not know;
//! - by grant that may write, the grant. A grant that only reads is forgotten at once;
//! - by node, which requests are done, within a window. So a repeated or late message takes effect
//!   once, and a release that overtakes its request cancels it.
//!
//! A number whose transaction did not commit is *void*. Transactions of all nodes may wait for it,
//! so void numbers are announced ([`Sequencer::ends`]). Three events make a number void: its node
//! says so, its node has started anew without it, or its node was fenced. Time does not: a node
//! that is cut off may have committed.

use std::collections::{BTreeMap, BTreeSet};

use crate::broken::Broken;
use crate::cut::{Cut, Scope, end_of, of_term};
use crate::grant::TABLES_LIMIT;
use crate::grant::{Access, Answer, Batch, Grant, Granted, Refusal, Release, Released, Request};
use crate::number::{Boot, GrantId, NUMBER_LIMIT, NodeNumber, TableNumber, Term, Version};
use crate::vector::{End, Ends, Reports, Vector, furthest};

/// The most grants that may write and have not ended.
pub const OUTSTANDING_LIMIT: usize = 65_536;
/// How far a request's number may be above the lowest that its node still needs.
pub const WINDOW: u64 = 16_384;

/// A number whose end is not known, or that waits for an earlier one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Slot {
    node: NodeNumber,
    committed: bool,
}

/// One table. Numbers above `settled` that are not in `open` are void.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Counter {
    last: Version,
    end: End,
    open: BTreeMap<Version, Slot>,
    /// Numbers of other tables, by transactions that have read this one: its next writer waits
    /// for them.
    readers: Vector,
}

impl Counter {
    /// The last number that is not known to be void.
    fn last_write(&self) -> Version {
        let open = self.open.last_key_value();
        open.map_or(self.end.committed, |(version, _)| *version)
    }

    fn close(&mut self, version: Version, committed: bool) {
        if committed {
            if let Some(slot) = self.open.get_mut(&version) {
                slot.committed = true;
            }
        } else {
            self.open.remove(&version);
        }
        while let Some(first) = self.open.first_entry() {
            if !first.get().committed {
                self.end.settled = first.key().before();
                return;
            }
            self.end.committed = *first.key();
            first.remove();
        }
        self.end.settled = self.last;
    }
}

/// What is known of a node's requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Session {
    boot: Boot,
    low: u64,
    /// Requests from `low` on that have ended.
    done: BTreeSet<u64>,
    fenced: bool,
}

/// The sequencer of a group, in one term.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sequencer {
    term: Term,
    /// The term in which this sequencer began.
    since: Term,
    tables: BTreeMap<TableNumber, Counter>,
    sessions: BTreeMap<NodeNumber, Session>,
    open: BTreeMap<GrantId, Grant>,
    pub(crate) broken: Option<Broken>,
}

impl Sequencer {
    /// Begins with an agreed cut over everyone. None for a cut over one node.
    #[must_use]
    pub fn begin(cut: &Cut) -> Option<Self> {
        let Scope::Everyone { ends } = &cut.scope else {
            return None;
        };
        let counter = |end: &End| Counter {
            last: end.settled,
            end: *end,
            ..Counter::default()
        };
        Some(Self {
            term: cut.term,
            since: cut.term,
            tables: ends
                .iter()
                .map(|(table, end)| (*table, counter(end)))
                .collect(),
            sessions: BTreeMap::new(),
            open: BTreeMap::new(),
            broken: None,
        })
    }

    /// The term of its grants.
    #[must_use]
    pub const fn term(&self) -> Term {
        self.term
    }

    /// How many grants that may write have not ended.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.open.len()
    }

    /// The last number of a table, and the last of which all up to it have ended.
    #[must_use]
    pub fn counter(&self, table: TableNumber) -> (Version, End) {
        let counter = self.tables.get(&table);
        counter.map_or_else(Default::default, |counter| (counter.last, counter.end))
    }

    /// What is decided of all tables: to be sent to all nodes, with the term, now and again.
    #[must_use]
    pub fn ends(&self) -> Ends {
        if self.broken == Some(Broken::VoidsUntold) {
            return Ends::new();
        }
        self.tables
            .iter()
            .map(|(table, counter)| (*table, counter.end))
            .collect()
    }

    /// Takes releases and requests of one node, in this order. `acting` says whether the lease
    /// runs at this moment; without it nothing is granted.
    pub fn receive(&mut self, batch: &Batch, acting: bool) -> Answer {
        let mut answer = Answer::default();
        if let Err(refusal) = self.admit(batch) {
            answer.refused = batch.requests.iter().map(|r| (r.number, refusal)).collect();
            return answer;
        }
        for release in &batch.releases {
            if self.release(batch.node, batch.boot, release) {
                answer.confirmed.push(release.clone());
            }
        }
        for request in &batch.requests {
            let id = GrantId {
                node: batch.node,
                boot: batch.boot,
                number: request.number,
            };
            match self.request(id, request, acting) {
                Ok(Some(grant)) => answer.grants.push(grant),
                Ok(None) => {}
                Err(refusal) => answer.refused.push((request.number, refusal)),
            }
        }
        answer
    }

    /// Whether the sender is the node's present start and knows this sequencer.
    fn admit(&mut self, batch: &Batch) -> Result<(), Refusal> {
        if batch.term < self.since || batch.term > self.term {
            return Err(Refusal::OtherTerm);
        }
        if let Some(session) = self.sessions.get(&batch.node) {
            if session.fenced && batch.boot <= session.boot {
                return Err(Refusal::Fenced);
            }
            if session.boot != batch.boot {
                return Err(Refusal::OtherBoot);
            }
        } else if self.sessions.len() >= usize::from(u16::MAX) {
            return Err(Refusal::TooMany);
        }
        let session = self.sessions.entry(batch.node).or_insert_with(|| Session {
            boot: batch.boot,
            ..Session::default()
        });
        if batch.low > session.low && batch.low < NUMBER_LIMIT {
            session.low = batch.low;
            session.done = session.done.split_off(&batch.low);
        }
        Ok(())
    }

    /// A grant; none for a request that has ended already.
    fn request(
        &mut self,
        id: GrantId,
        request: &Request,
        acting: bool,
    ) -> Result<Option<Grant>, Refusal> {
        let session = self.sessions.get(&id.node).ok_or(Refusal::OtherBoot)?;
        if id.number < session.low || session.done.contains(&id.number) {
            return Ok(None);
        }
        if id.number >= session.low.saturating_add(WINDOW) {
            return Err(Refusal::Window);
        }
        if let Some(grant) = self.open.get(&id)
            && self.broken != Some(Broken::RepeatsCount)
        {
            return Ok(Some(grant.clone()));
        }
        if !acting {
            return Err(Refusal::NotActing);
        }
        if request.tables.is_empty() || request.tables.len() > TABLES_LIMIT {
            return Err(Refusal::Tables);
        }
        let known = |table: &&TableNumber| self.tables.contains_key(table);
        let new = request.tables.keys().filter(|table| !known(table)).count();
        let full = self.open.len() >= OUTSTANDING_LIMIT;
        if full || self.tables.len().saturating_add(new) > TABLES_LIMIT {
            return Err(Refusal::TooMany);
        }
        let grant = self.grant(id, &request.tables);
        if grant.writes() {
            self.open.insert(id, grant.clone());
        }
        Ok(Some(grant))
    }

    /// Assigns versions of all tables.
    fn grant(&mut self, id: GrantId, declared: &BTreeMap<TableNumber, Access>) -> Grant {
        let mut tables: BTreeMap<TableNumber, Granted> = BTreeMap::new();
        let (mut own, mut earlier) = (Vector::new(), Vector::new());
        for (table, access) in declared {
            let counter = self.tables.entry(*table).or_default();
            let seen = counter.last_write();
            let granted = Granted {
                seen,
                own: (*access == Access::Write).then_some(counter.last.next()),
                declared: true,
                holder: counter.holder(seen),
            };
            tables.insert(*table, granted);
            if let Some(version) = granted.own {
                let slot = Slot {
                    node: id.node,
                    committed: false,
                };
                counter.last = version;
                counter.open.insert(version, slot);
                own.insert(*table, version);
                join(&mut earlier, &counter.readers);
            }
        }
        for (table, seen) in earlier {
            let holder = self.tables.get(&table).and_then(|c| c.holder(seen));
            tables.entry(table).or_insert(Granted {
                seen,
                own: None,
                declared: false,
                holder,
            });
        }
        for (table, access) in declared {
            if *access == Access::Read
                && let Some(counter) = self.tables.get_mut(table)
            {
                join(&mut counter.readers, &own);
            }
        }
        Grant {
            term: self.term,
            id,
            tables,
        }
    }

    /// Whether the release took effect, now or before.
    fn release(&mut self, node: NodeNumber, boot: Boot, release: &Release) -> bool {
        let Some(session) = self.sessions.get_mut(&node) else {
            return false;
        };
        let number = release.number;
        if number < session.low || session.done.contains(&number) {
            return true;
        }
        if number >= session.low.saturating_add(WINDOW) {
            return false;
        }
        let id = GrantId { node, boot, number };
        match &release.released {
            Released::Committed(written) => self.end(id, &|table| written.contains(&table)),
            Released::Void => self.end(id, &|_| false),
            Released::Unused(unused) => {
                let Some(grant) = self.open.get_mut(&id) else {
                    return true;
                };
                for table in unused {
                    let granted = grant.tables.get_mut(table);
                    let own = granted.and_then(|granted| granted.own.take());
                    if let (Some(own), Some(counter)) = (own, self.tables.get_mut(table)) {
                        counter.close(own, false);
                    }
                }
                if grant.writes() {
                    return true;
                }
                self.end(id, &|_| false);
            }
        }
        if let Some(session) = self.sessions.get_mut(&node) {
            session.done.insert(number);
        }
        true
    }

    /// Ends a grant. Later writers of a committed table wait for this write, so no longer for those
    /// that it has waited for.
    fn end(&mut self, id: GrantId, is_committed: &dyn Fn(TableNumber) -> bool) {
        let Some(grant) = self.open.remove(&id) else {
            return;
        };
        for (table, granted) in &grant.tables {
            let (Some(own), Some(counter)) = (granted.own, self.tables.get_mut(table)) else {
                continue;
            };
            let committed = is_committed(*table);
            counter.close(own, committed);
            if committed {
                let waited =
                    |table: &TableNumber| grant.tables.get(table).map(|granted| granted.seen);
                counter
                    .readers
                    .retain(|table, version| waited(table).is_none_or(|seen| seen < *version));
            }
        }
    }

    /// Takes note that a node has started anew, with what it has committed or applied so far. What
    /// it was granted before and has not committed is void. A repeat does nothing.
    ///
    /// # Errors
    ///
    /// [`Refusal::OtherBoot`] if a later start is known, [`Refusal::OtherTerm`] as for requests.
    pub fn restarted(
        &mut self,
        term: Term,
        node: NodeNumber,
        boot: Boot,
        has: &Vector,
    ) -> Result<(), Refusal> {
        if term < self.since || term > self.term {
            return Err(Refusal::OtherTerm);
        }
        let session = self.sessions.entry(node).or_default();
        if boot < session.boot {
            return Err(Refusal::OtherBoot);
        }
        if boot == session.boot {
            return Ok(());
        }
        // The group is deciding over what the earlier start had: its word comes too late.
        if session.fenced && self.open.keys().any(|id| id.node == node) {
            return Err(Refusal::Fenced);
        }
        *session = Session {
            boot,
            ..Session::default()
        };
        let reached = |table: TableNumber| has.get(&table).copied().unwrap_or_default();
        self.end_of_node(node, Boot(boot.0.saturating_sub(1)), &reached);
        Ok(())
    }

    /// Ends all grants of a node up to a start; those whose numbers are reached are committed.
    fn end_of_node(
        &mut self,
        node: NodeNumber,
        boot: Boot,
        reached: &dyn Fn(TableNumber) -> Version,
    ) {
        for grant in self.of_node(node, boot) {
            let committed = is_reached(&grant, reached);
            self.end(grant.id, &|_| committed);
        }
    }

    fn of_node(&self, node: NodeNumber, boot: Boot) -> Vec<Grant> {
        let grants = self.open.values();
        grants
            .filter(|grant| grant.id.node == node && grant.id.boot <= boot)
            .cloned()
            .collect()
    }

    /// Makes the cut that fences a node, and takes nothing more from these starts of it. All other
    /// members have promised to hold back the node's records and have reported.
    ///
    /// A majority is not enough. Example: B is fenced, D has not reported and has applied B's write
    /// W, which is void. A transaction of D that has read W may have committed, and its number is
    /// not void. If a member does not report, [`Cut::new_sequencer`] decides instead: it gives up
    /// what W's readers wrote, too.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotAll`] if another member has not reported under this term,
    /// [`Refusal::NoMajority`] if the others are no majority.
    pub fn fence(
        &mut self,
        node: NodeNumber,
        boot: Boot,
        members: &BTreeSet<NodeNumber>,
        reports: &Reports,
    ) -> Result<Cut, Refusal> {
        let reports = of_term(self.term, members.len(), reports)?;
        if members
            .iter()
            .any(|m| *m != node && !reports.contains_key(m))
        {
            return Err(Refusal::NotAll);
        }
        let ends = furthest(&reports);
        let session = self.sessions.entry(node).or_default();
        if session.boot <= boot {
            session.boot = boot;
            session.fenced = true;
        }
        let reached = |table: TableNumber| end_of(&ends, table).settled;
        let void = self
            .of_node(node, boot)
            .iter()
            .filter(|grant| !is_reached(grant, &reached))
            .flat_map(|grant| {
                let own = |(table, granted): (&TableNumber, &Granted)| Some((*table, granted.own?));
                grant.tables.iter().filter_map(own).collect::<Vec<_>>()
            })
            .collect();
        Ok(Cut {
            term: Term(self.term.0.saturating_add(1)),
            follows: self.term,
            scope: Scope::Node { node, boot, void },
        })
    }

    /// Takes the agreed cut into account. False if the sequencer is to end: another one begins, or
    /// a cut before this one is missing.
    #[must_use]
    pub fn learn(&mut self, cut: &Cut) -> bool {
        if cut.term <= self.term {
            return true;
        }
        let Scope::Node { node, boot, void } = &cut.scope else {
            return false;
        };
        if cut.follows != self.term {
            return false;
        }
        self.term = cut.term;
        for grant in self.of_node(*node, *boot) {
            let is_void = |(table, granted): (&TableNumber, &Granted)| {
                granted.own.is_some_and(|own| void.contains(&(*table, own)))
            };
            let committed = !grant.tables.iter().any(is_void);
            self.end(grant.id, &|_| committed);
        }
        true
    }

    /// Breaks a rule: what a node was granted is void because it is not heard of.
    #[cfg(test)]
    pub(crate) fn give_up(&mut self, node: NodeNumber) {
        self.end_of_node(node, Boot(u64::MAX), &|_| Version(0));
    }
}

impl Counter {
    fn holder(&self, version: Version) -> Option<NodeNumber> {
        let slot = self.open.get(&version)?;
        (!slot.committed).then_some(slot.node)
    }
}

/// Whether a grant's writes are reached. A transaction's writes become visible at once, so one
/// table says it for all.
fn is_reached(grant: &Grant, reached: &dyn Fn(TableNumber) -> Version) -> bool {
    grant
        .tables
        .iter()
        .any(|(table, granted)| granted.own.is_some_and(|own| reached(*table) >= own))
}

fn join(into: &mut Vector, from: &Vector) {
    for (table, version) in from {
        let at = into.entry(*table).or_default();
        *at = (*version).max(*at);
    }
}
