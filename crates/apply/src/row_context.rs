//! Table and transaction of a row, for the functions that find a row, decide about it and write it.

use braid_bgworker::conflict::Version;

use super::Current;
use super::change::version;
use super::relation::RemoteRelation;
use super::target::Key;

/// Context in which a row is found, decided about and written.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowContext<'a> {
    /// The open table.
    pub(super) key: Key,
    /// The stream's relation.
    pub(super) remote: &'a RemoteRelation,
    /// The source's transaction.
    pub(super) current: &'a Current,
}

impl<'a> RowContext<'a> {
    /// Returns the context of the row in another table: a partition.
    pub(super) fn at(self, key: Key) -> Self {
        Self { key, ..self }
    }

    /// Returns the version that the change gives to a row.
    pub(super) fn version(self) -> Version<'a> {
        version(self.current)
    }
}
