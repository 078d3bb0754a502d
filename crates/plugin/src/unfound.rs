//! Rows of `braid.unfound`: deletions and truncates that found nothing at this node, and are passed
//! on (`apply/unfound.rs`).

use braid_postgres::decoding::OwnTuple;
use pgrx::datum::FromDatum;
use pgrx::pg_sys;

use super::displacement::tuple_of;
use super::format::Change;
use super::own_table::columns;

/// A deletion or truncate that is passed on.
pub(super) enum Unfound {
    /// A row of a table was deleted. At least its key is known.
    Deletion(pg_sys::Oid, OwnTuple),
    /// Tables were truncated.
    Truncate {
        relations: Vec<pg_sys::Oid>,
        restart_identity: bool,
    },
}

/// Reads the new row. Returns `None` if the table is not Braid's after all. Copies are in the
/// current memory context.
pub(super) fn read(change: &Change<'_>) -> Option<Unfound> {
    let [relations, row, restart_identity] = columns(change.new_values())?;
    // SAFETY: the table's first column is of type oid[].
    let relations = unsafe { Vec::<pg_sys::Oid>::from_datum(relations?.datum(), false) }?;
    let Some(row) = row else {
        return Some(Unfound::Truncate {
            relations,
            restart_identity: restart_identity.is_some_and(|restart| restart.datum().value() != 0),
        });
    };
    Some(Unfound::Deletion(*relations.first()?, tuple_of(row)?))
}
