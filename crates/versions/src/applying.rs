//! The appliers' side of a node's versions: which record may be applied now.
//!
//! An applier asks [`Local::may_apply`] before a record's transaction starts to write, calls
//! [`Local::apply`] right before the commit, and [`Local::applied`] once it is visible. No circle
//! of waits is possible: whatever a record waits for was visible on its own node before its
//! transaction began.

use crate::broken::Broken;
use crate::local::{Edge, Error, Local};
use crate::number::{TableNumber, Version};
use crate::record::Record;

/// What an applier may do with a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Apply it.
    Apply,
    /// All of it is here already: skip it.
    Already,
    /// Wait for these writes.
    Wait(Vec<Edge>),
    /// Wait: the group is deciding over it, a cut has to be learned first, or a transaction of
    /// this node is about to take its snapshot.
    Later,
    /// Do not apply it: the group has given it up.
    Refused,
    /// Its numbers contradict what is here: an error that stops the stream.
    Contradiction,
}

impl Local {
    /// Says what to do with a record of another node.
    #[must_use]
    pub fn may_apply(&self, record: &Record) -> Verdict {
        if self.diverged || record.term > self.term || self.under_way.contains(record) {
            return Verdict::Later;
        }
        let accepts_old = self.broken == Some(Broken::OldTermAccepted);
        if self.cuts.refuse(record) && !accepts_old {
            return Verdict::Refused;
        }
        let reached = |table| self.tables.get(table).reached;
        let here = record
            .writes()
            .filter(|(table, own)| reached(*table) >= *own);
        match (here.count(), record.writes().count()) {
            (_, 0) => return Verdict::Contradiction,
            (0, _) => {}
            (some, all) if some == all => return Verdict::Already,
            _ => return Verdict::Contradiction,
        }
        if self.holds_back(record) {
            return Verdict::Later;
        }
        let mut edges = Vec::new();
        if record.term >= self.since {
            edges = self.base_edges();
        }
        for (table, shipped) in &record.tables {
            let unchecked = match self.broken {
                Some(Broken::ApplyWithoutSeen) => shipped.own.is_none(),
                Some(Broken::ApplyOutOfOrder) => shipped.own.is_some(),
                _ => false,
            };
            if reached(*table) < shipped.seen && !unchecked {
                edges.push(Edge {
                    table: *table,
                    version: shipped.seen,
                    holder: None,
                });
            }
        }
        if !edges.is_empty() {
            Verdict::Wait(edges)
        } else if self.reader_is_ready(record) {
            Verdict::Later
        } else {
            Verdict::Apply
        }
    }

    /// Marks a record's writes as coming, right before the commit.
    ///
    /// # Errors
    ///
    /// [`Error::Step`] if it may not be applied now.
    pub fn apply(&mut self, record: &Record) -> Result<(), Error> {
        if self.may_apply(record) != Verdict::Apply {
            return Err(Error::Step);
        }
        self.mark(record);
        Ok(())
    }

    /// Publishes the writes of a record that are visible now.
    pub fn applied(&mut self, record: &Record) {
        self.publish(record);
    }

    /// Takes a mark back: the applier's commit failed.
    pub fn apply_failed(&mut self, record: &Record) {
        self.unmark(record);
    }

    pub(crate) fn mark(&mut self, record: &Record) {
        for (table, own) in record.writes() {
            let progress = self.tables.at(table);
            progress.coming = progress.coming.max(own);
        }
        self.under_way.insert(record.clone());
    }

    pub(crate) fn unmark(&mut self, record: &Record) {
        self.under_way.remove(record);
        for (table, own) in record.writes() {
            let progress = self.tables.at(table);
            if progress.coming == own {
                progress.coming = progress.applied;
            }
        }
    }

    pub(crate) fn publish(&mut self, record: &Record) {
        self.under_way.remove(record);
        for (table, own) in record.writes() {
            self.tables.at(table).publish(own);
        }
    }

    /// The last published write of each table: what a node that has started anew says that it has.
    #[must_use]
    pub fn has(&self) -> std::collections::BTreeMap<TableNumber, Version> {
        let tables = self.tables.iter();
        tables
            .filter(|(_, progress)| progress.applied > Version(0))
            .map(|(table, progress)| (table, progress.applied))
            .collect()
    }

    /// Whether a stored record says nothing any more: all that its transaction wrote was written
    /// again since, or is in no versioned table.
    pub fn is_superseded(
        &self,
        record: &Record,
        is_versioned: impl Fn(TableNumber) -> bool,
    ) -> bool {
        let is_old = |(table, own)| !is_versioned(table) || self.tables.get(table).applied > own;
        record.writes().all(is_old)
    }
}
