//! Unique indexes and exclusion constraints, and the rows that block another row under one of them.
//! Run by the appliers.
//!
//! Rows are looked up as in `check_exclusion_or_unique_constraint` of
//! src/backend/executor/execIndexing.c (15 to 18): with the constraint's own operators, in its own
//! index. Rows from a lossy index are compared again.
//!
//! Deferrable constraints are checked by `deferred`: rows may violate them until the transaction
//! ends. PostgreSQL's own triggers for them do not fire for replicated changes.

use braid_postgres::error::PgError;
use braid_postgres::memory::within;
use braid_postgres::slot::{Slot, Visible};
use braid_postgres::target::TargetIndex;
use pgrx::pg_sys;

use super::lookup::{IndexLookup, LockedRows};
use super::table::OpenTable;

/// `INDEX_MAX_KEYS` of src/include/pg_config_manual.h.
const INDEX_MAX_KEYS: usize = 32;
/// Time at which a constraint must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checked {
    /// After each write.
    AtOnce,
    /// When the transaction ends, whatever the constraint's own default is: a transaction is
    /// applied row by row, and has no statements.
    AtTheEnd,
}

/// A row that conflicted with another one under a deferrable constraint when it was written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unchecked {
    pub(super) tid: pg_sys::ItemPointerData,
    /// Whether it replaced a local row.
    pub(super) exists: bool,
}

impl OpenTable {
    /// Returns the constraints of a kind that keep rows out of the table.
    fn constraints(&self, checked: Checked) -> Vec<TargetIndex<'_>> {
        let mut found = self.indexes();
        found.retain(|one| {
            one.is_constraint() && one.is_immediate() == (checked == Checked::AtOnce)
        });
        found
    }

    /// Returns the rows that block the one in the new slot, which replaces the one at `own`.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises while it waits for the writer of a row.
    pub(super) fn in_the_way(
        &mut self,
        own: Option<pg_sys::ItemPointerData>,
        checked: Checked,
    ) -> Result<LockedRows, PgError> {
        let (mut rows, mut met) = (Vec::new(), Vec::new());
        self.met.clear();
        for constraint in self.constraints(checked) {
            let before = rows.len();
            let Some((mut lookup, mut looked_for)) = self.look_up(constraint) else {
                continue;
            };
            let found = lookup.find_others(own, &mut rows, &mut |slot| looked_for.meets(slot));
            lookup.end();
            found?;
            let index = constraint.index().oid();
            let others = rows.iter().skip(before);
            met.extend(others.map(|(slot, _)| (slot.as_ptr(), index)));
        }
        self.met = met;
        Ok(rows)
    }

    /// Notes the row in the new slot, which was just written, if it conflicts with another one
    /// under a deferrable constraint. If another session writes the other row at the same time, at
    /// least one of the two sees the other.
    pub(super) fn note_unchecked(&mut self, exists: bool) {
        if !self.deferrable {
            return;
        }
        // A trigger may have prevented the write.
        let own = self.new_slot.tid();
        if own.ip_posid == 0 {
            return;
        }
        for constraint in self.constraints(Checked::AtTheEnd) {
            let Some((mut lookup, mut looked_for)) = self.look_up(constraint) else {
                continue;
            };
            let met = lookup.has_other(own, &mut |slot| looked_for.meets(slot));
            lookup.end();
            if met {
                self.unchecked.push(Unchecked { tid: own, exists });
                return;
            }
        }
    }

    /// Reads a row that this transaction has written into the new slot, and into a second slot,
    /// which the caller drops. Returns `None` if the row is gone.
    pub(super) fn written_at(&mut self, tid: pg_sys::ItemPointerData) -> Option<Slot> {
        self.new_slot.clear();
        let slot = self.make_slot();
        // The table has not been truncated since.
        if !slot.fetch(self.relation(), tid, Visible::ToItself) {
            return None;
        }
        self.new_slot.copy_from(&slot);
        Some(slot)
    }

    /// Returns a look-up, in an index of this table, of rows that conflict with the one in the new
    /// slot; `None` if there can be none.
    fn look_up<'t>(&self, constraint: TargetIndex<'t>) -> Option<(IndexLookup, LookedFor<'t>)> {
        // SAFETY: the index is this table's. Both are open while it is looked through.
        unsafe {
            let keys = self.keys_of_new(constraint)?;
            let looked_for = LookedFor {
                constraint,
                keys: keys.clone(),
                estate: self.estate,
            };
            let index = constraint.index().as_ptr();
            Some((
                IndexLookup::with_keys(self.relation, index, keys),
                looked_for,
            ))
        }
    }

    /// Returns the scan keys of the row in the new slot for an index; `None` if the index's
    /// predicate excludes the row, or the row can't conflict.
    ///
    /// # Safety
    /// The index is this table's, and open.
    unsafe fn keys_of_new(&self, constraint: TargetIndex<'_>) -> Option<Vec<pg_sys::ScanKeyData>> {
        let info = constraint.info();
        // SAFETY: as the caller says; expressions are evaluated in the row context of this table's
        // executor state, which is there.
        unsafe {
            let context = (*self.estate).es_per_tuple_exprcontext;
            (*context).ecxt_scantuple = self.new_slot.as_ptr();
            if !(*info).ii_Predicate.is_null() {
                if (*info).ii_PredicateState.is_null() {
                    let before = pg_sys::MemoryContextSwitchTo((*self.estate).es_query_cxt);
                    (*info).ii_PredicateState =
                        pg_sys::ExecPrepareQual((*info).ii_Predicate, self.estate);
                    pg_sys::MemoryContextSwitchTo(before);
                }
                // `ExecQual` of src/include/executor/executor.h, 15 to 18; no state passes.
                let state = (*info).ii_PredicateState;
                if let Some(evaluate) = state.as_ref().and_then(|state| state.evalfunc) {
                    let mut is_null = false;
                    let value = within((*context).ecxt_per_tuple_memory, || {
                        pg_sys::ffi::pg_guard_ffi_boundary(|| {
                            evaluate(state, context, &raw mut is_null)
                        })
                    });
                    if is_null || value.value() == 0 {
                        return None;
                    }
                }
            }
            let (values, nulls) = values_of(constraint, self.estate, self.new_slot.as_ptr());
            constraint.keys(&values, &nulls)
        }
    }
}

/// Returns the values of an index's key columns for the row in a slot, and which are null.
///
/// # Safety
/// The executor state is that of the table; its context for rows is there.
unsafe fn values_of(
    index: TargetIndex<'_>,
    estate: *mut pg_sys::EState,
    slot: *mut pg_sys::TupleTableSlot,
) -> (Vec<pg_sys::Datum>, Vec<bool>) {
    let mut values = vec![pg_sys::Datum::null(); INDEX_MAX_KEYS];
    let mut nulls = vec![true; INDEX_MAX_KEYS];
    // SAFETY: as the caller says; an index has no more columns than there is room for.
    unsafe {
        (*(*estate).es_per_tuple_exprcontext).ecxt_scantuple = slot;
        let to = (values.as_mut_ptr(), nulls.as_mut_ptr());
        pg_sys::FormIndexDatum(index.info(), slot, estate, to.0, to.1);
    }
    values.truncate(index.key_length());
    nulls.truncate(index.key_length());
    (values, nulls)
}

/// Scan keys of rows that are looked for in an index.
struct LookedFor<'t> {
    constraint: TargetIndex<'t>,
    keys: Vec<pg_sys::ScanKeyData>,
    /// Executor state of the table.
    estate: *mut pg_sys::EState,
}

impl LookedFor<'_> {
    /// Whether the row in a slot, which came from a lossy index, is one that was looked for:
    /// `index_recheck_constraint` of src/backend/executor/execIndexing.c, 15 to 18.
    fn meets(&mut self, slot: &Slot) -> bool {
        // SAFETY: the index is open, and the executor state is that of its table. The keys are as
        // many as the columns. Of a null none is asked.
        unsafe {
            let (values, nulls) = values_of(self.constraint, self.estate, slot.as_ptr());
            self.keys.iter_mut().zip(values.into_iter().zip(nulls)).all(
                |(key, (value, is_null))| {
                    !is_null
                        && pg_sys::FunctionCall2Coll(
                            &raw mut key.sk_func,
                            key.sk_collation,
                            value,
                            key.sk_argument,
                        )
                        .value()
                            != 0
                },
            )
        }
    }
}
