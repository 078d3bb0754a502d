//! Evaluates expressions over a row that was taken apart: row filters, and the expressions of a
//! routed table.

use braid_postgres::memory;
use braid_postgres::relation::RelationRef;
use pgrx::pg_sys;

use super::column;
use super::tuple::{Field, Row};

/// A compiled expression, in the memory context that was current when it was compiled.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expression(*mut pg_sys::ExprState);

/// Room for one row of a relation, and for its expressions. All memory is in the relation's
/// context, and is freed with it.
#[derive(Debug)]
pub(super) struct RowSlot {
    estate: *mut pg_sys::EState,
    econtext: *mut pg_sys::ExprContext,
    slot: *mut pg_sys::TupleTableSlot,
    /// For each attribute of the relation that is sent: the attribute of the changed relation, and
    /// whether it is by value.
    sources: Vec<Option<(usize, bool)>>,
}

impl RowSlot {
    /// For rows of `relation`, the one under whose name changes are sent. The current memory
    /// context is the compiled relation's own.
    pub(super) fn new(relation: RelationRef<'_>, sources: Vec<Option<(usize, bool)>>) -> Self {
        // SAFETY: the relation is open. Everything is allocated in the compiled relation's context.
        unsafe {
            let estate = pg_sys::CreateExecutorState();
            let descriptor = pg_sys::CreateTupleDescCopyConstr(relation.descriptor().as_ptr());
            Self {
                estate,
                econtext: pg_sys::MakePerTupleExprContext(estate),
                slot: pg_sys::MakeSingleTupleTableSlot(
                    descriptor,
                    &raw const pg_sys::TTSOpsVirtual,
                ),
                sources,
            }
        }
    }

    /// Compiles an expression over the relation's columns.
    ///
    /// # Safety
    /// `expression` is one, and lives as long as the current memory context.
    pub(super) unsafe fn compile(&self, expression: *mut pg_sys::Expr) -> Expression {
        // SAFETY: as promised; the state of the executor lives as long as this.
        Expression(unsafe { pg_sys::ExecPrepareExpr(expression, self.estate) })
    }

    /// Puts a row in. Where it lacks an unchanged TOAST value, `fallback` has it.
    pub(super) fn put(&self, row: Row<'_>, fallback: Option<Row<'_>>) {
        // SAFETY: slot and contexts live as long as the relation's context. The slot has a place
        // for every attribute of the descriptor, which are as many as `sources`. Expressions are
        // only evaluated while the row exists.
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
            (*self.econtext).ecxt_scantuple = self.slot;
        }
    }

    /// Evaluates expressions over the row that was put in; `use_values` gets their values, null as
    /// `None`, as long as they live.
    pub(super) fn evaluate<const N: usize, T>(
        &self,
        expressions: [Expression; N],
        use_values: impl FnOnce([Option<pg_sys::Datum>; N]) -> T,
    ) -> T {
        // SAFETY: as in `put`. The context is this one's alone, and reset once the values are used.
        unsafe {
            let econtext = &mut *self.econtext;
            let memory = econtext.ecxt_per_tuple_memory;
            let result = memory::within(memory, || {
                let values = expressions.map(|Expression(state)| {
                    let evaluate = (*state).evalfunc?;
                    let mut is_null = false;
                    let value = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                        evaluate(state, econtext, &raw mut is_null)
                    });
                    (!is_null).then_some(value)
                });
                use_values(values)
            });
            pg_sys::MemoryContextReset(memory);
            result
        }
    }
}
