//! How far each table has come on one node.

use std::collections::BTreeMap;

use crate::number::{TableNumber, Version};
use crate::vector::End;

/// One table on one node. `coming >= applied`, and `reached >= applied`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Progress {
    /// The last write that is visible or may become so at any moment. Set before the commit.
    pub coming: Version,
    /// The last write that is visible. Set after the commit.
    pub applied: Version,
    /// As `applied`, or a later number if the numbers up to it are void.
    pub reached: Version,
    /// What the sequencer has said.
    pub end: End,
    /// The highest number that the node has heard of.
    pub known: Version,
}

impl Progress {
    pub(crate) fn hear(&mut self, version: Version) {
        self.known = self.known.max(version);
    }

    pub(crate) fn announce(&mut self, end: End) {
        if end.settled > self.end.settled {
            self.end = end;
            self.hear(end.committed);
            self.raise();
        }
    }

    pub(crate) fn publish(&mut self, version: Version) {
        self.coming = self.coming.max(version);
        self.applied = self.applied.max(version);
        self.reached = self.reached.max(version);
        self.hear(version);
        self.raise();
    }

    /// Goes past void numbers.
    fn raise(&mut self) {
        if self.applied >= self.end.committed {
            self.reached = self.reached.max(self.end.settled);
        }
    }
}

/// All tables of one node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Tables(BTreeMap<TableNumber, Progress>);

impl Tables {
    pub(crate) fn get(&self, table: TableNumber) -> Progress {
        self.0.get(&table).copied().unwrap_or_default()
    }

    pub(crate) fn at(&mut self, table: TableNumber) -> &mut Progress {
        self.0.entry(table).or_default()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (TableNumber, &Progress)> {
        self.0.iter().map(|(table, progress)| (*table, progress))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (TableNumber, &mut Progress)> {
        self.0
            .iter_mut()
            .map(|(table, progress)| (*table, progress))
    }
}
