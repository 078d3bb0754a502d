//! Row filters of publications, evaluated over a row that was taken apart.

use std::ffi::CString;

use braid_decoder::{Filter, Publishing};
use braid_postgres::compat;
use braid_postgres::memory;
use braid_postgres::relation::RelationRef;
use pgrx::pg_sys;

use super::column;
use super::tuple::{Field, Row};

/// The filters of one relation, compiled. All memory is in the relation's context, which goes with it.
#[derive(Debug)]
pub(super) struct RowFilters {
    insert: Option<*mut pg_sys::ExprState>,
    update: Option<*mut pg_sys::ExprState>,
    delete: Option<*mut pg_sys::ExprState>,
    econtext: *mut pg_sys::ExprContext,
    slot: *mut pg_sys::TupleTableSlot,
    /// For each attribute of the relation that is sent: the attribute of the changed relation, and whether it is by value.
    sources: Vec<Option<(usize, bool)>>,
}

/// Which of the three filters.
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
        // SAFETY: the relation is open. Everything is allocated in the compiled relation's context.
        // The texts are those of pg_publication_rel.prqual, which PostgreSQL wrote.
        unsafe {
            let estate = pg_sys::CreateExecutorState();
            // Expressions, of which one must be true.
            let compile = |texts: Option<Vec<CString>>| {
                let mut list = std::ptr::null_mut();
                for text in texts? {
                    let node = pg_sys::stringToNode(text.as_ptr()).cast::<pg_sys::Node>();
                    let node = compat::expand_generated_columns(node, relation.as_ptr());
                    list = pg_sys::lappend(list, node.cast());
                }
                let condition = pg_sys::make_orclause(list);
                Some(pg_sys::ExecPrepareExpr(condition.cast(), estate))
            };
            let descriptor = pg_sys::CreateTupleDescCopyConstr(relation.descriptor().as_ptr());
            Some(Self {
                insert: compile(insert),
                update: compile(update),
                delete: compile(delete),
                econtext: pg_sys::MakePerTupleExprContext(estate),
                slot: pg_sys::MakeSingleTupleTableSlot(
                    descriptor,
                    &raw const pg_sys::TTSOpsVirtual,
                ),
                sources: sources(),
            })
        }
    }

    /// Whether the filter for an operation is true for `row`. Where `row` lacks an unchanged TOAST value, `fallback` has it.
    pub(super) fn matches(&self, of: Of, row: Row<'_>, fallback: Option<Row<'_>>) -> bool {
        let filter = match of {
            Of::Insert => self.insert,
            Of::Update => self.update,
            Of::Delete => self.delete,
        };
        let Some(filter) = filter else {
            return true;
        };
        // SAFETY: slot, expression and contexts live as long as the relation's context; the slot has a place for every
        // attribute of the descriptor, which are as many as `sources`. The expression is only evaluated while the row is.
        unsafe {
            let slot = &mut *self.slot;
            for (index, source) in self.sources.iter().enumerate() {
                let field = source.map(|(attribute, by_value)| {
                    let field = match (row.field(attribute), fallback) {
                        (Field::Unavailable, Some(fallback)) => fallback.field(attribute),
                        (field, _) => field,
                    };
                    (field, by_value)
                });
                let (value, is_null) = match field {
                    Some((Field::Stored(bytes), by_value)) => {
                        (column::to_datum(bytes, by_value), false)
                    }
                    _ => (pg_sys::Datum::from(0_usize), true),
                };
                *slot.tts_values.add(index) = value;
                *slot.tts_isnull.add(index) = is_null;
            }
            slot.tts_nvalid = i16::try_from(self.sources.len()).unwrap_or(i16::MAX);
            slot.tts_flags &= !u16::try_from(pg_sys::TTS_FLAG_EMPTY).unwrap_or_default();

            let econtext = &mut *self.econtext;
            econtext.ecxt_scantuple = self.slot;
            let memory = econtext.ecxt_per_tuple_memory;
            let Some(evaluate) = (*filter).evalfunc else {
                return false;
            };
            let mut is_null = false;
            let value = memory::within(memory, || {
                pg_sys::ffi::pg_guard_ffi_boundary(|| evaluate(filter, econtext, &raw mut is_null))
            });
            pg_sys::MemoryContextReset(memory);
            !is_null && value.value() != 0
        }
    }
}
