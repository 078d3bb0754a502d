//! What no two rows of a table may share: unique indexes and exclusion constraints; and the rows that one of them keeps another row
//! from. Run by the appliers.
//!
//! Rows are looked for as `check_exclusion_or_unique_constraint` of src/backend/executor/execIndexing.c (15 to 18) does it: with the
//! constraint's own operators, in its own index; what a lossy index brings is compared again.
//!
//! A deferrable constraint is left to `deferred`: what it forbids may be so until the transaction ends. PostgreSQL's own triggers for
//! that do not fire for what is replicated.

use braid_postgres::error::PgError;
use pgrx::pg_sys;

use super::eviction::slot_for;
use super::lookup::{IndexLookup, LockedRows};
use super::table::OpenTable;

/// `INDEX_MAX_KEYS` of src/include/pg_config_manual.h.
const INDEX_MAX_KEYS: usize = 32;
/// `SK_ISNULL | SK_SEARCHNULL` of src/include/access/skey.h.
const SEARCH_NULL: i32 = 0x0001 | 0x0040;
/// `BTEqualStrategyNumber` of src/include/access/stratnum.h.
const EQUAL: i16 = 3;

/// When a constraint is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checked {
    /// After each write.
    AtOnce,
    /// When the transaction ends, whatever its own default is: an applied transaction is written row by row, and has no statements.
    AtTheEnd,
}

/// A row that met another one under a deferrable constraint when it was written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unchecked {
    pub(super) tid: pg_sys::ItemPointerData,
    /// It took the place of one that was here.
    pub(super) exists: bool,
}

/// One index of those that an open table has.
#[derive(Debug, Clone, Copy)]
struct Constraint {
    index: pg_sys::Relation,
    info: *mut pg_sys::IndexInfo,
}

impl Constraint {
    /// # Safety
    /// The index is open.
    unsafe fn excludes(self) -> bool {
        // SAFETY: as the caller says.
        unsafe { !(*self.info).ii_ExclusionOps.is_null() }
    }

    /// What to look for, column by column, with the values of a row; `None` if the row can't meet another one: a null does not.
    ///
    /// # Safety
    /// The index is open; these are its columns' values.
    unsafe fn keys(
        self,
        values: &[pg_sys::Datum],
        nulls: &[bool],
    ) -> Option<Vec<pg_sys::ScanKeyData>> {
        let Self { index, info } = self;
        let mut keys = Vec::with_capacity(values.len());
        for (position, (value, is_null)) in values.iter().zip(nulls).enumerate() {
            // SAFETY: as the caller says; there is a procedure, or an operator family, for each column.
            unsafe {
                if *is_null && !(*info).ii_NullsNotDistinct {
                    return None;
                }
                let (strategy, procedure) = if self.excludes() {
                    (
                        *(*info).ii_ExclusionStrats.add(position),
                        *(*info).ii_ExclusionProcs.add(position),
                    )
                } else {
                    let input = *(*index).rd_opcintype.add(position);
                    let family = *(*index).rd_opfamily.add(position);
                    let operator = pg_sys::get_opfamily_member(family, input, input, EQUAL);
                    (EQUAL.cast_unsigned(), pg_sys::get_opcode(operator))
                };
                let mut key = pg_sys::ScanKeyData::default();
                pg_sys::ScanKeyEntryInitialize(
                    &raw mut key,
                    if *is_null { SEARCH_NULL } else { 0 },
                    i16::try_from(position + 1).unwrap_or(1),
                    strategy,
                    pg_sys::InvalidOid,
                    *(*index).rd_indcollation.add(position),
                    if *is_null {
                        pg_sys::InvalidOid
                    } else {
                        procedure
                    },
                    *value,
                );
                keys.push(key);
            }
        }
        Some(keys)
    }
}

impl OpenTable {
    /// Whether one of the table's constraints may be deferred.
    ///
    /// # Safety
    /// `target` is that of an open table, its indexes opened.
    pub(super) unsafe fn has_deferrable(target: *mut pg_sys::ResultRelInfo) -> bool {
        // SAFETY: as the caller says.
        unsafe {
            constraints(target)
                .into_iter()
                .any(|one| !(*(*one.index).rd_index).indimmediate)
        }
    }

    /// Those of a kind that keep rows out of the table.
    fn constraints(&self, checked: Checked) -> Vec<Constraint> {
        // SAFETY: the table and its indexes are open.
        let mut found = unsafe { constraints(self.target) };
        // SAFETY: as above.
        found.retain(|one| unsafe {
            (*(*one.index).rd_index).indimmediate == (checked == Checked::AtOnce)
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
        let mut rows = Vec::new();
        self.met.clear();
        for constraint in self.constraints(checked) {
            let before = rows.len();
            // SAFETY: the index is open, and so is the table while it is looked through.
            unsafe {
                let Some(keys) = self.keys_of_new(constraint) else {
                    continue;
                };
                let (table, estate) = (self.relation, self.estate);
                let mut wanted = keys.clone();
                let mut lookup = IndexLookup::with_keys(table, constraint.index, keys);
                let found = lookup.find_others(own, &mut rows, &mut |slot| {
                    meets(constraint, &mut wanted, estate, slot)
                });
                lookup.end();
                found?;
                let index = (*constraint.index).rd_id;
                let others = rows.iter().skip(before);
                self.met.extend(others.map(|(slot, _)| (*slot, index)));
            }
        }
        Ok(rows)
    }

    /// The row in the new slot was just written: remember it if it meets another one under a constraint that is to hold when the
    /// transaction ends. Who writes the other one meanwhile sees this one, or is seen here.
    pub(super) fn note_unchecked(&mut self, exists: bool) {
        if !self.deferrable {
            return;
        }
        // SAFETY: the slot is this table's; a trigger may have had the row not written at all.
        let own = unsafe { (*self.new_slot).tts_tid };
        if own.ip_posid == 0 {
            return;
        }
        for constraint in self.constraints(Checked::AtTheEnd) {
            // SAFETY: as for `in_the_way`.
            let met = unsafe {
                let Some(keys) = self.keys_of_new(constraint) else {
                    continue;
                };
                let (table, estate) = (self.relation, self.estate);
                let mut wanted = keys.clone();
                let mut lookup = IndexLookup::with_keys(table, constraint.index, keys);
                let met = lookup.has_other(own, &mut |slot| {
                    meets(constraint, &mut wanted, estate, slot)
                });
                lookup.end();
                met
            };
            if met {
                self.unchecked.push(Unchecked { tid: own, exists });
                return;
            }
        }
    }

    /// Take a row that this transaction has written into the new slot, and into one that is to be dropped; `None` if it is not there
    /// any more.
    pub(super) fn written_at(
        &mut self,
        tid: pg_sys::ItemPointerData,
    ) -> Option<*mut pg_sys::TupleTableSlot> {
        let mut tid = tid;
        let mut snapshot = pg_sys::SnapshotData {
            snapshot_type: pg_sys::SnapshotType::SNAPSHOT_SELF,
            ..Default::default()
        };
        let (relation, new_slot) = (self.relation, self.new_slot);
        let (tid, snapshot) = (&raw mut tid, &raw mut snapshot);
        // SAFETY: the table is open, and not truncated since; the slot is of its own kind, and is dropped if it has nothing.
        unsafe {
            super::clear_slot(new_slot);
            let slot = slot_for(self);
            let found = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let Some(fetch) = (*(*relation).rd_tableam).tuple_fetch_row_version else {
                    return false;
                };
                let found = fetch(relation, tid, snapshot, slot);
                if found && let Some(copy) = (*(*new_slot).tts_ops).copyslot {
                    copy(new_slot, slot);
                }
                found
            });
            if !found {
                pg_sys::ExecDropSingleTupleTableSlot(slot);
            }
            found.then_some(slot)
        }
    }

    /// What to look for in an index, as the row in the new slot has it; `None` when the index has no room for it, or it can meet nothing.
    ///
    /// # Safety
    /// The index is this table's, and open.
    unsafe fn keys_of_new(&mut self, constraint: Constraint) -> Option<Vec<pg_sys::ScanKeyData>> {
        let info = constraint.info;
        // SAFETY: as the caller says; expressions are evaluated in the row context of this table's executor state, which is there.
        unsafe {
            let context = (*self.estate).es_per_tuple_exprcontext;
            (*context).ecxt_scantuple = self.new_slot;
            if !(*info).ii_Predicate.is_null() {
                if (*info).ii_PredicateState.is_null() {
                    let before = pg_sys::MemoryContextSwitchTo((*self.estate).es_query_cxt);
                    (*info).ii_PredicateState =
                        pg_sys::ExecPrepareQual((*info).ii_Predicate, self.estate);
                    pg_sys::MemoryContextSwitchTo(before);
                }
                if !passes((*info).ii_PredicateState, context) {
                    return None;
                }
            }
            let (values, nulls) = values_of(info, self.estate, self.new_slot);
            constraint.keys(&values, &nulls)
        }
    }
}

/// All constraints of a table.
///
/// # Safety
/// `target` is that of an open table, its indexes opened.
unsafe fn constraints(target: *mut pg_sys::ResultRelInfo) -> Vec<Constraint> {
    // SAFETY: as the caller says; the arrays have as many members as there are indexes.
    unsafe {
        (0..usize::try_from((*target).ri_NumIndices).unwrap_or(0))
            .map(|position| Constraint {
                index: *(*target).ri_IndexRelationDescs.add(position),
                info: *(*target).ri_IndexRelationInfo.add(position),
            })
            .filter(|one| {
                let is_tree = (*(*one.index).rd_rel).relam == pg_sys::BTREE_AM_OID;
                (*one.info).ii_ReadyForInserts
                    && (one.excludes() || ((*one.info).ii_Unique && is_tree))
            })
            .collect()
    }
}

/// The values of an index's key columns for the row in a slot, and which are null.
///
/// # Safety
/// The executor state is that of the table; its context for rows is there.
unsafe fn values_of(
    info: *mut pg_sys::IndexInfo,
    estate: *mut pg_sys::EState,
    slot: *mut pg_sys::TupleTableSlot,
) -> (Vec<pg_sys::Datum>, Vec<bool>) {
    let mut values = vec![pg_sys::Datum::null(); INDEX_MAX_KEYS];
    let mut nulls = vec![true; INDEX_MAX_KEYS];
    // SAFETY: as the caller says; an index has no more columns than there is room for.
    unsafe {
        (*(*estate).es_per_tuple_exprcontext).ecxt_scantuple = slot;
        pg_sys::FormIndexDatum(info, slot, estate, values.as_mut_ptr(), nulls.as_mut_ptr());
        let count = usize::try_from((*info).ii_NumIndexKeyAttrs).unwrap_or(0);
        values.truncate(count);
        nulls.truncate(count);
    }
    (values, nulls)
}

/// Whether the row in a slot, which a lossy index brought, is one that was looked for: `index_recheck_constraint` of
/// src/backend/executor/execIndexing.c, 15 to 18.
///
/// # Safety
/// The index is open, the executor state that of its table.
unsafe fn meets(
    constraint: Constraint,
    wanted: &mut [pg_sys::ScanKeyData],
    estate: *mut pg_sys::EState,
    slot: *mut pg_sys::TupleTableSlot,
) -> bool {
    // SAFETY: as the caller says; the keys are as many as the columns. Of a null none is asked.
    unsafe {
        let (values, nulls) = values_of(constraint.info, estate, slot);
        wanted
            .iter_mut()
            .zip(values.into_iter().zip(nulls))
            .all(|(key, (value, is_null))| {
                !is_null
                    && pg_sys::FunctionCall2Coll(
                        &raw mut key.sk_func,
                        key.sk_collation,
                        value,
                        key.sk_argument,
                    )
                    .value()
                        != 0
            })
    }
}

/// `ExecQual` of src/include/executor/executor.h, 15 to 18; no state passes.
///
/// # Safety
/// The state was prepared for the context, which has the row.
unsafe fn passes(state: *mut pg_sys::ExprState, context: *mut pg_sys::ExprContext) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        let Some(evaluate) = state.as_ref().and_then(|state| state.evalfunc) else {
            return true;
        };
        let mut is_null = false;
        let before = pg_sys::MemoryContextSwitchTo((*context).ecxt_per_tuple_memory);
        let value =
            pg_sys::ffi::pg_guard_ffi_boundary(|| evaluate(state, context, &raw mut is_null));
        pg_sys::MemoryContextSwitchTo(before);
        !is_null && value.value() != 0
    }
}
