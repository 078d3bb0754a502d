//! Tables of the extension whose changes are messages to the other nodes.

use braid_postgres::relation::RelationRef;
use braid_postgres::value::Value;
use braid_postgres::{plain, syscache};
use pgrx::pg_sys;

use super::format::Change;

/// One of these tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OwnTable {
    /// `braid.ddl_message`: its rows are statements for the nodes that receive from this one.
    DdlMessage,
    /// `braid.displacement`: deletions of its rows are those of rows of other tables.
    Displacement,
    /// `braid.rule_change`: its rows are messages to the nodes that receive from this one.
    RuleChange,
    /// `braid.unfound`: its rows are deletions of rows, and truncates, that found nothing on this
    /// node.
    Unfound,
    /// `braid.version_record`: its rows are the versions of the transactions that have written
    /// them.
    VersionRecord,
}

impl OwnTable {
    /// Finds out which of these tables a relation is. In a transaction with a historic snapshot.
    pub(super) fn of(relation: RelationRef<'_>) -> Option<Self> {
        let name = relation.raw_name();
        let table = if name == c"ddl_message" {
            Self::DdlMessage
        } else if name == c"displacement" {
            Self::Displacement
        } else if name == c"rule_change" {
            Self::RuleChange
        } else if name == c"unfound" {
            Self::Unfound
        } else if name == c"version_record" {
            Self::VersionRecord
        } else {
            return None;
        };
        is_own(relation).then_some(table)
    }
}

/// Whether a relation belongs to the extension. A user may have a schema of this name where the
/// extension is not created. In a transaction with a historic snapshot.
pub(super) fn is_own(relation: RelationRef<'_>) -> bool {
    Some(relation.namespace_oid()) == syscache::namespace(c"braid")
        && plain::getExtensionOfObject(pg_sys::RelationRelationId, relation.oid())
            != pg_sys::InvalidOid
}

/// The columns of a row of one of them, if that has so many.
pub(super) fn columns<const N: usize>(
    values: Option<Vec<Option<Value<'_>>>>,
) -> Option<[Option<Value<'_>>; N]> {
    values?.try_into().ok()
}

/// The text of a new row of a table with one column. Returns `None` if the table is not Braid's
/// after all. Copies are in the current memory context.
pub(super) fn message(change: &Change<'_>) -> Option<String> {
    let [text] = columns(change.new_values())?;
    text?.text()
}
