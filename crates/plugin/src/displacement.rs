//! Rows of `braid.displacement`: deletions of losing rows that this node announces to the others
//! (`apply/eviction.rs`), with versions of their own.

use braid_postgres::decoding::OwnTuple;
use braid_postgres::value::{Content, Value};
use pgrx::pg_sys;

use super::format::Change;
use super::own_table::columns;

/// An announced deletion of a losing row.
pub(super) struct Displacement {
    /// The table.
    pub(super) relation: pg_sys::Oid,
    /// The deletion's version: microseconds since 1970-01-01 UTC, and the node.
    pub(super) timestamp: i64,
    pub(super) origin: String,
    /// The row, with at least its key.
    pub(super) row: OwnTuple,
}

/// Reads the deleted row. Returns `None` if the table is not Braid's after all. Copies are in the
/// current memory context.
pub(super) fn read(change: &Change<'_>) -> Option<Displacement> {
    let [relation, timestamp, origin, row] = columns(change.old_values())?;
    Some(Displacement {
        relation: pg_sys::Oid::from(relation?.low()?),
        timestamp: (timestamp?.datum().value() as u64).cast_signed(),
        origin: origin?.text()?,
        row: tuple_of(row?)?,
    })
}

/// The heap tuple in a bytea; `None` if it is too short for one.
pub(super) fn tuple_of(bytes: Value<'_>) -> Option<OwnTuple> {
    bytes.read(|content| match content {
        Content::Bytes(bytes) => OwnTuple::new(bytes),
        Content::Word(_) => None,
    })
}
