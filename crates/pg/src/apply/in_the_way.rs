//! Rows in the way of one that is about to be written: equal to it under a unique index other than that by which rows are found.
//! Run by the appliers.
//!
//! To look for them before every write would cost a look-up for each index. So a transaction is written as though there were none;
//! when that ends in a unique violation, it is applied once more, and then they are looked for. One that can't be applied twice (it
//! was too large to be held) looks for them at once.
//!
//! Whoever loses does so before the transaction is applied once more, and on all nodes: `eviction` sees to that.
//!
//! Not for deferrable constraints, where rows may be equal until the transaction ends, and exclusion constraints: those violations
//! stay errors.

use braid_bgworker::conflict::{Action, Decision, Kind, Local, decide_in_the_way};
use braid_bgworker::merge::Answer;
use braid_bgworker::resolution::Resolution;
use pgrx::pg_sys;

use super::change::{Key, Rows, refused, version};
use super::eviction::{Loser, to_leave_first};
use super::key_hash::key_hash;
use super::lookup::{Found, IndexLookup, writer};
use super::merge::Meeting;
use super::relation::RemoteRelation;
use super::table::OpenTable;
use super::version::Stamp;
use super::{Current, Session};
use crate::error::PgError;

/// SQLSTATE unique_violation.
pub const UNIQUE_VIOLATION: &str = "23505";
/// `INDEX_MAX_KEYS` of src/include/pg_config_manual.h.
const INDEX_MAX_KEYS: usize = 32;
/// `SK_ISNULL | SK_SEARCHNULL` of src/include/access/skey.h.
const SEARCH_NULL: i32 = 0x0001 | 0x0040;
/// `BTEqualStrategyNumber` of src/include/access/stratnum.h.
const EQUAL: i16 = 3;

/// What becomes of a row that is about to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// It can be written.
    Clear,
    /// It can't stay beside one that does: it is not written, and what stands under its key leaves too.
    Leave,
    /// It is not written, and that is all.
    Stay,
}

impl OpenTable {
    /// The rows in the way of the one in the new slot, which takes the place of the one at `own`: each in a slot of its own, locked.
    fn in_the_way(
        &mut self,
        own: Option<pg_sys::ItemPointerData>,
    ) -> Result<Vec<(*mut pg_sys::TupleTableSlot, Stamp)>, PgError> {
        let mut rows = Vec::new();
        // SAFETY: the table and its indexes are open; the arrays have as many members as there are indexes.
        unsafe {
            for position in 0..usize::try_from((*self.target).ri_NumIndices).unwrap_or(0) {
                let index = *(*self.target).ri_IndexRelationDescs.add(position);
                let info = *(*self.target).ri_IndexRelationInfo.add(position);
                let usable = (*info).ii_Unique
                    && (*info).ii_ReadyForInserts
                    && (*info).ii_ExclusionOps.is_null()
                    && (*(*index).rd_index).indimmediate
                    && (*(*index).rd_rel).relam == pg_sys::BTREE_AM_OID;
                if !usable {
                    continue;
                }
                let Some(keys) = self.keys_of_new(index, info) else {
                    continue;
                };
                let slot = pg_sys::MakeSingleTupleTableSlot(
                    (*self.relation).rd_att,
                    pg_sys::table_slot_callbacks(self.relation),
                );
                let mut lookup = IndexLookup::with_keys(self.relation, index, keys);
                let found = lookup.find_other(own, slot)?;
                lookup.end();
                let known = |tid: pg_sys::ItemPointerData| {
                    rows.iter()
                        .any(|(other, _): &(*mut pg_sys::TupleTableSlot, Stamp)| {
                            let there = (**other).tts_tid;
                            (there.ip_posid, there.ip_blkid.bi_hi, there.ip_blkid.bi_lo)
                                == (tid.ip_posid, tid.ip_blkid.bi_hi, tid.ip_blkid.bi_lo)
                        })
                };
                match found {
                    Some(stamp) if !known((*slot).tts_tid) => rows.push((slot, stamp)),
                    _ => pg_sys::ExecDropSingleTupleTableSlot(slot),
                }
            }
        }
        Ok(rows)
    }

    /// The keys by which the row in the new slot is found in a unique index; `None` when the index has no room for it, or it equals
    /// nothing there.
    ///
    /// # Safety
    /// The index is this table's, open, a B-tree; `info` is its own.
    unsafe fn keys_of_new(
        &mut self,
        index: pg_sys::Relation,
        info: *mut pg_sys::IndexInfo,
    ) -> Option<Vec<pg_sys::ScanKeyData>> {
        let mut values = [pg_sys::Datum::null(); INDEX_MAX_KEYS];
        let mut nulls = [true; INDEX_MAX_KEYS];
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
            pg_sys::FormIndexDatum(
                info,
                self.new_slot,
                self.estate,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            let count = usize::try_from((*info).ii_NumIndexKeyAttrs).unwrap_or(0);
            let mut keys = Vec::with_capacity(count);
            for (position, (value, is_null)) in
                values.into_iter().zip(nulls).take(count).enumerate()
            {
                if is_null && !(*info).ii_NullsNotDistinct {
                    return None;
                }
                let input = *(*index).rd_opcintype.add(position);
                let family = *(*index).rd_opfamily.add(position);
                let operator = pg_sys::get_opfamily_member(family, input, input, EQUAL);
                let mut key = pg_sys::ScanKeyData::default();
                pg_sys::ScanKeyEntryInitialize(
                    &raw mut key,
                    if is_null { SEARCH_NULL } else { 0 },
                    i16::try_from(position + 1).unwrap_or(1),
                    EQUAL.cast_unsigned(),
                    pg_sys::InvalidOid,
                    *(*index).rd_indcollation.add(position),
                    if is_null {
                        pg_sys::InvalidOid
                    } else {
                        pg_sys::get_opcode(operator)
                    },
                    value,
                );
                keys.push(key);
            }
            Some(keys)
        }
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

impl Session {
    /// Rows that stand in the way are looked for before each write of the transaction that is begun next, or not.
    pub fn look_for_rows_in_the_way(&mut self, look: bool) {
        self.careful = look;
    }

    /// Make way for the row in the new slot, which takes the place of what was `found`, if it wins; record each conflict.
    pub(super) fn make_way(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        current: &Current,
        found: Found,
    ) -> Result<Way, PgError> {
        let table = self.open(key)?;
        let exists = matches!(found, Found::Row(_));
        // SAFETY: the local slot holds what was found.
        let own = exists.then(|| unsafe { (*table.local_slot()).tts_tid });
        let rows = table.in_the_way(own)?;
        let way = self.settle(key, remote, current, exists, &rows);
        for (slot, _) in rows {
            // SAFETY: made by `in_the_way`, and not used any more.
            unsafe { pg_sys::ExecDropSingleTupleTableSlot(slot) };
        }
        way
    }

    fn settle(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        current: &Current,
        exists: bool,
        rows: &[(*mut pg_sys::TupleTableSlot, Stamp)],
    ) -> Result<Way, PgError> {
        let kind = match (rows.len(), exists) {
            (0, _) => return Ok(Way::Clear),
            (1, false) => Kind::InsertExists,
            (1, true) => Kind::UpdateExists,
            _ => Kind::MultipleUniqueConflicts,
        };
        if self.is_asked(key, kind) {
            return self.ask_who_stays(key, remote, current, kind, rows);
        }
        let rules = self.target(key)?.plan.rules;
        let mut decisions: Vec<(*mut pg_sys::TupleTableSlot, Found, Decision)> = Vec::new();
        for (slot, stamp) in rows {
            // SAFETY: the slot holds a row of the table.
            let found = Found::Row(self.refined(key, *slot, *stamp)?);
            let local = self.local(found);
            if matches!(local, Local::Own | Local::OwnMerged(_)) {
                // This very transaction wrote it: the write says what is wrong.
                return Ok(Way::Clear);
            }
            let decision = decide_in_the_way(kind, local, version(current));
            let decision = rules
                .resolve(decision, local, version(current))
                .map_err(|kind| refused(kind, remote))?;
            decisions.push((*slot, found, decision));
        }
        // It takes the place of all of them, or of none.
        let kept = decisions
            .iter()
            .find(|(_, _, decision)| decision.action == Action::Keep)
            .map(|(_, _, decision)| *decision);
        let new_slot = self.open(key)?.new_slot();
        // What is told is a deletion, which the versions have to be left to judge.
        let told =
            self.remembers(key) && rules.of(Kind::UpdateDeleted) == Resolution::LastUpdateWins;
        let Some(kept) = kept else {
            let loser = if told { Loser::Here } else { Loser::HereAsOwn };
            for (slot, found, decision) in decisions {
                if let Found::Row(stamp) = found {
                    self.plan_eviction(key, current, (slot, stamp), decision, loser)?;
                }
            }
            return Err(to_leave_first());
        };
        let stays = rules.of(kind) == Resolution::KeepLocal;
        let told = told && !stays && !self.is_displaced(key, current);
        let mut first = true;
        for (slot, found, decision) in decisions {
            let decision = Decision {
                action: Action::Keep,
                reason: kept.reason,
                ..decision
            };
            if let (true, Found::Row(stamp)) = (told, found) {
                let loser = Loser::Incoming { first };
                self.plan_eviction(key, current, (slot, stamp), decision, loser)?;
                first = false;
            }
            let rows = Rows {
                local: Some(slot),
                remote: Some(new_slot),
                given: None,
            };
            self.record(key, remote, current, found, decision, rows)?;
        }
        Ok(if stays { Way::Stay } else { Way::Leave })
    }

    /// Ask the function whether the row in the new slot takes the place of those in its way.
    fn ask_who_stays(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        current: &Current,
        kind: Kind,
        rows: &[(*mut pg_sys::TupleTableSlot, Stamp)],
    ) -> Result<Way, PgError> {
        let mut found = Vec::with_capacity(rows.len());
        for (slot, stamp) in rows {
            let stamp = self.refined(key, *slot, *stamp)?;
            if matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
                // This very transaction wrote it: the write says what is wrong.
                return Ok(Way::Clear);
            }
            found.push((*slot, stamp));
        }
        let Some((first, stamp)) = found.first().copied() else {
            return Ok(Way::Clear);
        };
        let others: Vec<_> = found.iter().skip(1).map(|(slot, _)| *slot).collect();
        let new_slot = self.open(key)?.new_slot();
        let meeting = Meeting {
            found: Found::Row(stamp),
            kind,
            rows: Rows {
                local: Some(first),
                remote: Some(new_slot),
                given: None,
            },
            before: None,
            in_the_way: true,
            others: &others,
        };
        self.forget_calls();
        let asked = self.ask(key, remote, current, meeting)?;
        let leave = asked.answer == Answer::Remote;
        let decision = Decision {
            action: if leave { Action::Apply } else { Action::Keep },
            conflict: Some(kind),
            reason: if leave {
                "the function takes the remote row"
            } else {
                "the function keeps the local row"
            },
        };
        for (slot, stamp) in found {
            if leave {
                self.plan_eviction(key, current, (slot, stamp), decision, Loser::HereAsOwn)?;
                continue;
            }
            let rows = Rows {
                local: Some(slot),
                remote: Some(new_slot),
                given: None,
            };
            self.record(key, remote, current, Found::Row(stamp), decision, rows)?;
        }
        if leave {
            return Err(to_leave_first());
        }
        Ok(Way::Leave)
    }

    /// The version of a row in a slot, given that of the transaction that wrote it.
    pub(super) fn refined(
        &mut self,
        key: Key,
        slot: *mut pg_sys::TupleTableSlot,
        stamp: Stamp,
    ) -> Result<Stamp, PgError> {
        let Self {
            targets, batches, ..
        } = self;
        let Some(target) = targets.get(&key) else {
            return Ok(stamp);
        };
        // SAFETY: the slot holds a row of the table, which is open.
        unsafe { batches.refine(writer(slot), stamp, || key_hash(&target.plan, slot)) }
    }
}
