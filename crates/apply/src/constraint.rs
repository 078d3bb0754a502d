//! What no two rows of a table may share: unique indexes and exclusion constraints; and the rows
//! that one of them keeps another row from. Run by the appliers.
//!
//! Rows are looked for as `check_exclusion_or_unique_constraint` of
//! src/backend/executor/execIndexing.c (15 to 18) does it: with the constraint's own operators, in
//! its own index; what a lossy index brings is compared again.
//!
//! A deferrable constraint is left to `deferred`: what it forbids may be so until the transaction
//! ends. PostgreSQL's own triggers for that do not fire for what is replicated.

use braid_postgres::error::PgError;
use braid_postgres::memory::within;
use braid_postgres::slot::{Slot, Visible};
use braid_postgres::target::TargetIndex;
use pgrx::pg_sys;

use super::lookup::{IndexLookup, LockedRows};
use super::table::OpenTable;

/// `INDEX_MAX_KEYS` of src/include/pg_config_manual.h.
const INDEX_MAX_KEYS: usize = 32;
/// When a constraint is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checked {
    /// After each write.
    AtOnce,
    /// When the transaction ends, whatever its own default is: an applied transaction is written
    /// row by row, and has no statements.
    AtTheEnd,
}

/// A row that met another one under a deferrable constraint when it was written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unchecked {
    pub(super) tid: pg_sys::ItemPointerData,
    /// It took the place of one that was here.
    pub(super) exists: bool,
}

impl OpenTable {
    /// The constraints of a kind that keep rows out of the table.
    fn constraints(&self, checked: Checked) -> Vec<TargetIndex<'_>> {
        let mut found = self.indexes();
        found.retain(|one| {
            one.is_constraint() && one.is_immediate() == (checked == Checked::AtOnce)
        });
        found
    }

    /// The rows in the way of the one in the new slot, which takes the place of the one at `own`.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises while it waits for who is writing one.
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

    /// The row in the new slot was just written: remember it if it meets another one under a
    /// constraint that is to hold when the transaction ends. Who writes the other one meanwhile
    /// sees this one, or is seen here.
    pub(super) fn note_unchecked(&mut self, exists: bool) {
        if !self.deferrable {
            return;
        }
        // A trigger may have had the row not written at all.
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

    /// Take a row that this transaction has written into the new slot, and into one that is to be
    /// dropped; `None` if it is not there any more.
    pub(super) fn written_at(&mut self, tid: pg_sys::ItemPointerData) -> Option<Slot> {
        self.new_slot.clear();
        let slot = self.make_slot();
        // The table is not truncated since.
        if !slot.fetch(self.relation(), tid, Visible::ToItself) {
            return None;
        }
        self.new_slot.copy_from(&slot);
        Some(slot)
    }

    /// A look-up, in an index of this table, of rows that the one in the new slot meets; `None` if
    /// it can meet none.
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

    /// What to look for in an index, as the row in the new slot has it; `None` when the index has
    /// no room for it, or it can meet nothing.
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

/// The values of an index's key columns for the row in a slot, and which are null.
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

/// Rows that are looked for in an index.
struct LookedFor<'t> {
    constraint: TargetIndex<'t>,
    keys: Vec<pg_sys::ScanKeyData>,
    /// Executor state of the table.
    estate: *mut pg_sys::EState,
}

impl LookedFor<'_> {
    /// Whether the row in a slot, which a lossy index brought, is one that was looked for:
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
