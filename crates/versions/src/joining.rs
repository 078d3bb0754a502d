//! What a node does about cuts: promises, reports, and what it learns.

use crate::broken::Broken;
use crate::cut::{Cut, Scope, end_of};
use crate::local::{Error, Local};
use crate::number::{Boot, NodeNumber, Version};
use crate::record::Record;
use crate::vector::{End, Report, Vector};

/// What came of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learned {
    /// The node goes on.
    Current,
    /// The cut was known.
    Known,
    /// The present start of the node was fenced: the sequencer takes nothing of it any more. The
    /// node rolls back its versioned transactions and goes on with the next start
    /// ([`Local::restarted`]).
    Fenced,
    /// The node has writes that are void. It takes no part in versions until [`Local::repaired`].
    /// Readers that wait for their acknowledgement fail, and so do writers that are given up
    /// ([`Local::gives_up`]): the numbers that they wait for will be other writes'.
    Diverged,
}

impl Local {
    /// Promises, durably, to hold back writes over which the group is about to decide: one node's
    /// up to a start, or everyone's. The promise ends with the next cut of this scope.
    pub fn promise(&mut self, fenced: Option<(NodeNumber, Boot)>) {
        let (node, boot) = match fenced {
            Some((node, boot)) => (Some(node), boot),
            None => (None, Boot(u64::MAX)),
        };
        let promised = self.promised.entry(node).or_default();
        *promised = boot.max(*promised);
    }

    /// What the node has, once it has promised.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] while a write is between mark and publication: ask again.
    /// [`Error::Diverged`] if the node's word counts for nothing.
    pub fn report(&self) -> Result<Report, Error> {
        if self.diverged {
            return Err(Error::Diverged);
        }
        if !self.under_way.is_empty() && self.broken != Some(Broken::ReportsWhileBusy) {
            return Err(Error::Busy);
        }
        let end = |progress: &crate::progress::Progress| End {
            committed: progress.applied,
            settled: progress.reached,
        };
        Ok(Report {
            term: self.term,
            ends: self
                .tables
                .iter()
                .map(|(table, progress)| (table, end(progress)))
                .collect(),
        })
    }

    /// Whether the node has promised to hold back everyone's writes, and waits for the cut.
    #[must_use]
    pub fn has_promised(&self) -> bool {
        self.promised.contains_key(&None)
    }

    pub(crate) fn holds_back(&self, record: &Record) -> bool {
        let promised = |node| self.promised.get(&node);
        promised(None).is_some()
            || promised(Some(record.id.node)).is_some_and(|boot| record.id.boot <= *boot)
    }

    /// Learns an agreed cut. All nodes learn all cuts in their order.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if the cut before it was not learned.
    pub fn learn(&mut self, cut: &Cut) -> Result<Learned, Error> {
        if cut.term <= self.term {
            return Ok(Learned::Known);
        }
        if cut.follows != self.term {
            return Err(Error::Missing);
        }
        let diverged = match &cut.scope {
            Scope::Everyone { ends } => {
                let tables = self.tables.iter();
                tables
                    .filter(|(table, p)| p.coming > end_of(ends, *table).committed)
                    .count()
                    > 0
            }
            // No node has heard before this cut that these numbers are void. So if it is past one,
            // it has the write.
            Scope::Node { void, .. } => void.iter().any(|(table, version)| {
                let progress = self.tables.get(*table);
                progress.coming >= *version || progress.reached >= *version
            }),
        };
        self.term = cut.term;
        self.cuts.add(cut.clone());
        match &cut.scope {
            Scope::Everyone { ends } => {
                self.since = cut.term;
                if self.broken != Some(Broken::PromiseOutlivesCut) {
                    self.promised.clear();
                }
                self.forget_sequencer();
                self.base = Vector::new();
                // Numbers above the cut were an earlier sequencer's, void ones too. The new one
                // uses them again.
                for (table, progress) in self.tables.iter_mut() {
                    let settled = end_of(ends, table).settled;
                    progress.reached = progress.reached.min(settled).max(progress.applied);
                    progress.known = progress.applied;
                    progress.end = End::default();
                }
                for (table, end) in ends {
                    self.base.insert(*table, end.committed);
                    self.tables.at(*table).announce(*end);
                }
            }
            Scope::Node { node, .. } => {
                self.promised.remove(&Some(*node));
            }
        }
        if diverged {
            self.diverged = true;
        }
        let fenced = matches!(&cut.scope, Scope::Node { node, boot, .. }
            if *node == self.me && self.boot <= *boot);
        Ok(if self.diverged {
            Learned::Diverged
        } else if fenced {
            Learned::Fenced
        } else {
            Learned::Current
        })
    }

    /// Whether the group has given up a record's writes, as far as the node knows.
    #[must_use]
    pub fn gives_up(&self, record: &Record) -> bool {
        self.cuts.refuse(record)
    }

    /// Whether the node has writes that the group has given up.
    #[must_use]
    pub const fn is_diverged(&self) -> bool {
        self.diverged
    }

    /// Goes on after the node was given the contents of another one's tables, which had reached
    /// `has`. If it was fenced, the next start follows ([`Local::restarted`]).
    pub fn repaired(&mut self, has: &Vector) {
        for (table, progress) in self.tables.iter_mut() {
            let version = has.get(&table).copied().unwrap_or_default();
            progress.coming = version;
            progress.applied = version;
            progress.reached = version;
            progress.end = End::default();
            progress.known = Version(0);
        }
        for (table, version) in has {
            self.tables.at(*table).publish(*version);
        }
        self.under_way.clear();
        self.diverged = false;
    }
}
