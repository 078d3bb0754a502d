//! Row filters of publications, evaluated over a row that was taken apart.

use std::ffi::CString;

use braid_decoder::{Filter, Publishing};
use braid_postgres::compat;
use braid_postgres::relation::RelationRef;
use pgrx::pg_sys;

use super::row_slot::{Expression, RowSlot};
use super::tuple::Row;

/// The filters of one relation, compiled. All memory is in the relation's context, which goes with
/// it.
#[derive(Debug)]
pub(super) struct RowFilters {
    insert: Option<Expression>,
    update: Option<Expression>,
    delete: Option<Expression>,
    slot: RowSlot,
}

/// One of the three filters.
#[derive(Debug, Clone, Copy)]
pub(super) enum Of {
    Insert,
    Update,
    Delete,
}

impl RowFilters {
    /// Compile the filters of `publishing` over `relation`, the one under whose name changes are
    /// sent. `None` if every row passes. In a transaction with a snapshot for catalogs; the current
    /// memory context is the compiled relation's own.
    pub(super) fn new(
        publishing: &Publishing,
        relation: RelationRef<'_>,
        sources: impl FnOnce() -> Vec<Option<(usize, bool)>>,
    ) -> Option<Self> {
        let texts = |filter: &Filter| match filter {
            Filter::All => None,
            Filter::AnyOf(texts) => {
                let texts = texts.iter().map(|text| CString::new(text.as_str()));
                texts.collect::<Result<Vec<_>, _>>().ok()
            }
        };
        let [insert, update, delete] = [
            &publishing.insert_filter,
            &publishing.update_filter,
            &publishing.delete_filter,
        ]
        .map(texts);
        if insert.is_none() && update.is_none() && delete.is_none() {
            return None;
        }
        let slot = RowSlot::new(relation, sources());
        // Expressions, of which one must be true.
        let compile = |texts: Option<Vec<CString>>| {
            // SAFETY: the texts are those of pg_publication_rel.prqual, which PostgreSQL wrote.
            // Everything is allocated in the compiled relation's context.
            unsafe {
                let mut list = std::ptr::null_mut();
                for text in texts? {
                    let node = pg_sys::stringToNode(text.as_ptr()).cast::<pg_sys::Node>();
                    let node = compat::expand_generated_columns(node, relation.as_ptr());
                    list = pg_sys::lappend(list, node.cast());
                }
                Some(slot.compile(pg_sys::make_orclause(list).cast()))
            }
        };
        let [insert, update, delete] = [compile(insert), compile(update), compile(delete)];
        Some(Self {
            insert,
            update,
            delete,
            slot,
        })
    }

    /// Whether the filter for an operation is true for `row`. Where `row` lacks an unchanged TOAST
    /// value, `fallback` has it.
    pub(super) fn matches(&self, of: Of, row: Row<'_>, fallback: Option<Row<'_>>) -> bool {
        let filter = match of {
            Of::Insert => self.insert,
            Of::Update => self.update,
            Of::Delete => self.delete,
        };
        let Some(filter) = filter else {
            return true;
        };
        self.slot.put(row, fallback);
        self.slot.evaluate([filter], |[value]| {
            value.is_some_and(|value| value.value() != 0)
        })
    }
}
