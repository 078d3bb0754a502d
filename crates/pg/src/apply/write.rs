//! Writing rows through the executor's interfaces: triggers, generated columns, constraints, indexes. Run by the appliers.
//!
//! One executor state for each table that a transaction touches; it ends with the transaction.

use pgrx::pg_sys;

use super::lookup::{self, Found, IndexLookup};
use super::partition::Router;
use super::relation::LocalRelation;
use super::scan;
use crate::compat;
use crate::error::PgError;

/// A table, open for writing until the transaction ends.
#[derive(Debug)]
pub struct OpenTable {
    relation: pg_sys::Relation,
    estate: *mut pg_sys::EState,
    target: *mut pg_sys::ResultRelInfo,
    epq: Box<pg_sys::EPQState>,
    /// The row to be written.
    new_slot: *mut pg_sys::TupleTableSlot,
    /// The row that is there.
    local_slot: *mut pg_sys::TupleTableSlot,
    /// The key, as a row, for scans of the whole table.
    search_slot: *mut pg_sys::TupleTableSlot,
    lookup: Option<IndexLookup>,
    has_triggers: bool,
    router: Option<Router>,
    /// Default expressions of columns that the stream lacks: (column from 0, prepared expression).
    defaults: Option<Vec<(usize, *mut pg_sys::ExprState)>>,
}

/// Values for a row's columns: `None` leaves a column as it is (or to its default), `Some(None)` is null.
pub type RowValues = Vec<Option<Option<pg_sys::Datum>>>;

fn lock_mode(mode: u32) -> i32 {
    i32::try_from(mode).unwrap_or(3)
}

impl OpenTable {
    /// Prepare an open table for writing, and open its indexes. In a memory context that lives as long as the transaction.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    ///
    /// # Safety
    /// `relation` is open with RowExclusiveLock in this transaction; it is closed by [`OpenTable::close`].
    pub unsafe fn open(relation: pg_sys::Relation, local: &LocalRelation) -> Result<Self, PgError> {
        // SAFETY: everything is opened in this transaction and closed in `close`, or by the transaction's abort.
        unsafe {
            let estate = pg_sys::CreateExecutorState();
            let before = pg_sys::MemoryContextSwitchTo((*estate).es_query_cxt);
            let entry = make_node::<pg_sys::RangeTblEntry>(pg_sys::NodeTag::T_RangeTblEntry);
            (*entry).rtekind = pg_sys::RTEKind::RTE_RELATION;
            (*entry).relid = local.oid;
            (*entry).relkind = (*(*relation).rd_rel).relkind;
            (*entry).rellockmode = lock_mode(pg_sys::AccessShareLock);
            compat::init_range_table(estate, entry);
            let target = make_node::<pg_sys::ResultRelInfo>(pg_sys::NodeTag::T_ResultRelInfo);
            pg_sys::InitResultRelInfo(target, relation, 1, std::ptr::null_mut(), 0);
            (*estate).es_output_cid = pg_sys::GetCurrentCommandId(true);
            pg_sys::ExecOpenIndices(target, false);
            let descriptor = (*relation).rd_att;
            let new_slot = pg_sys::ExecInitExtraTupleSlot(
                estate,
                descriptor,
                &raw const pg_sys::TTSOpsVirtual,
            );
            let search_slot = pg_sys::ExecInitExtraTupleSlot(
                estate,
                descriptor,
                &raw const pg_sys::TTSOpsVirtual,
            );
            let local_slot = pg_sys::table_slot_create(relation, &raw mut (*estate).es_tupleTable);
            let mut epq: Box<pg_sys::EPQState> = Box::default();
            compat::eval_plan_qual_init(&raw mut *epq, estate);
            epq.origslot = new_slot;
            // A partitioned index has nothing to scan; rows are looked for in their partitions.
            let key = local.key.as_ref().filter(|_| !local.partitioned);
            let lookup = key.and_then(|key| {
                let count = usize::try_from((*target).ri_NumIndices).unwrap_or(0);
                (0..count)
                    .map(|position| *(*target).ri_IndexRelationDescs.add(position))
                    .find(|index| (**index).rd_id == key.index)
                    .map(|index| IndexLookup::new(relation, index, key))
            });
            let has_triggers = !(*target).ri_TrigDesc.is_null();
            pg_sys::MemoryContextSwitchTo(before);
            Ok(Self {
                relation,
                estate,
                target,
                epq,
                new_slot,
                local_slot,
                search_slot,
                lookup,
                has_triggers,
                router: None,
                defaults: None,
            })
        }
    }

    /// Close it. To be called before the transaction commits.
    pub fn close(mut self) {
        if let Some(lookup) = self.lookup.take() {
            lookup.end();
        }
        if let Some(router) = self.router.take() {
            router.end();
        }
        // SAFETY: the counterparts of `open`, in the order of PostgreSQL's own apply worker. The lock stays until commit.
        unsafe {
            pg_sys::EvalPlanQualEnd(&raw mut *self.epq);
            pg_sys::ExecCloseIndices(self.target);
            pg_sys::ExecResetTupleTable((*self.estate).es_tupleTable, false);
            pg_sys::FreeExecutorState(self.estate);
            pg_sys::relation_close(self.relation, lock_mode(pg_sys::NoLock));
        }
    }

    /// The open relation.
    #[must_use]
    pub fn relation(&self) -> pg_sys::Relation {
        self.relation
    }

    /// The slot with the row that [`OpenTable::find`] found.
    #[must_use]
    pub fn local_slot(&self) -> *mut pg_sys::TupleTableSlot {
        self.local_slot
    }

    /// The slot with the row that is written.
    #[must_use]
    pub fn new_slot(&self) -> *mut pg_sys::TupleTableSlot {
        self.new_slot
    }

    /// Value of a column, from 0, of the row that was found; `None` for null.
    #[must_use]
    pub fn local_value(&self, column: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the slot holds a row; the arrays are filled up to `natts` below, and `column` is checked.
        unsafe {
            let natts = (*(*self.local_slot).tts_tupleDescriptor).natts;
            if column >= usize::try_from(natts).unwrap_or(0) {
                return None;
            }
            pg_sys::slot_getsomeattrs_int(self.local_slot, natts);
            let is_null = *(*self.local_slot).tts_isnull.add(column);
            (!is_null).then(|| *(*self.local_slot).tts_values.add(column))
        }
    }

    /// Whether rows are found by an index.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.lookup.is_some()
    }

    /// Find and lock the row with this key, in the order of the key's columns.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn find(&mut self, key: &[Option<pg_sys::Datum>]) -> Result<Found, PgError> {
        let slot = self.local_slot;
        match self.lookup.as_mut() {
            Some(lookup) => lookup.find(key, slot),
            None => Ok(Found::Missing(None)),
        }
    }

    /// Where the row in the local slot is: block (two halves) and item.
    #[must_use]
    pub fn found_at(&self) -> (u16, u16, u16) {
        // SAFETY: the slot is valid as long as the table is open.
        let tid = unsafe { (*self.local_slot).tts_tid };
        (tid.ip_blkid.bi_hi, tid.ip_blkid.bi_lo, tid.ip_posid)
    }

    /// Find and lock a row that has these very values, else one that equals them, by scans of the whole table.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn find_by_scan(&mut self, values: &RowValues) -> Result<Found, PgError> {
        // SAFETY: the search slot is a virtual one of the table's shape, the local slot one of its own kind;
        // RelationFindReplTupleSeq locks what it finds.
        unsafe {
            if let Some(stamp) = scan::find_identical(self.relation, self.local_slot, values)? {
                return Ok(Found::Row(stamp));
            }
            self.fill(self.search_slot, values);
            loop {
                let found = pg_sys::RelationFindReplTupleSeq(
                    self.relation,
                    pg_sys::LockTupleMode::LockTupleExclusive,
                    self.search_slot,
                    self.local_slot,
                );
                if !found {
                    return Ok(Found::Missing(None));
                }
                if let Some(stamp) = lookup::lock_row(self.relation, self.local_slot)? {
                    return Ok(Found::Row(stamp));
                }
            }
        }
    }

    /// The partition below this table that a row with these values belongs to.
    pub fn partition_for(&mut self, values: &RowValues) -> pg_sys::Oid {
        // SAFETY: the slot is this table's; routing ends before the executor state does.
        unsafe {
            self.fill(self.new_slot, values);
            let before = pg_sys::MemoryContextSwitchTo((*self.estate).es_query_cxt);
            let router = self
                .router
                .get_or_insert_with(|| Router::new(self.estate, self.target, self.relation));
            let oid = router.find(self.estate, self.new_slot);
            pg_sys::MemoryContextSwitchTo(before);
            oid
        }
    }

    /// Put values into a virtual slot; what is not given is null.
    ///
    /// # Safety
    /// `slot` is a virtual slot of this table's shape.
    unsafe fn fill(&self, slot: *mut pg_sys::TupleTableSlot, values: &RowValues) {
        // SAFETY: the arrays have as many places as the table has columns, and `values` has no more.
        unsafe {
            super::clear_slot(slot);
            let natts = usize::try_from((*(*slot).tts_tupleDescriptor).natts).unwrap_or(0);
            for position in 0..natts {
                let value = values.get(position).copied().flatten().flatten();
                *(*slot).tts_values.add(position) = value.unwrap_or_else(pg_sys::Datum::null);
                *(*slot).tts_isnull.add(position) = value.is_none();
            }
            pg_sys::ExecStoreVirtualTuple(slot);
        }
    }

    fn prepare_defaults(&mut self, local: &LocalRelation) {
        if self.defaults.is_some() {
            return;
        }
        let mut prepared = Vec::new();
        for position in &local.defaults {
            // SAFETY: the expression is built and prepared in the executor state's context, and lives as long as it.
            unsafe {
                let before = pg_sys::MemoryContextSwitchTo((*self.estate).es_query_cxt);
                let attribute = i32::try_from(position + 1).unwrap_or(1);
                let expression =
                    pg_sys::build_column_default(self.relation, attribute).cast::<pg_sys::Expr>();
                if !expression.is_null() {
                    let planned = pg_sys::expression_planner(expression);
                    prepared.push((
                        *position,
                        pg_sys::ExecInitExpr(planned, std::ptr::null_mut()),
                    ));
                }
                pg_sys::MemoryContextSwitchTo(before);
            }
        }
        self.defaults = Some(prepared);
    }

    /// Put a new row into the slot: what the stream gives, and defaults for what it lacks.
    pub fn prepare_insert(&mut self, local: &LocalRelation, values: &RowValues) {
        self.prepare_defaults(local);
        // SAFETY: the slot is this table's; expressions were prepared in this executor state.
        unsafe {
            self.fill(self.new_slot, values);
            let context = self.expression_context();
            for (position, state) in self.defaults.iter().flatten() {
                let Some(evaluate) = (**state).evalfunc else {
                    continue;
                };
                let mut is_null = false;
                let value = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    evaluate(*state, context, &raw mut is_null)
                });
                *(*self.new_slot).tts_values.add(*position) = value;
                *(*self.new_slot).tts_isnull.add(*position) = is_null;
            }
        }
    }

    /// Put the found row with new values into the slot.
    pub fn prepare_update(&mut self, values: &RowValues) {
        // SAFETY: both slots have the table's shape; the values of the local slot stay valid while it holds the row.
        unsafe {
            let natts = (*(*self.new_slot).tts_tupleDescriptor).natts;
            if i32::from((*self.local_slot).tts_nvalid) < natts {
                pg_sys::slot_getsomeattrs_int(self.local_slot, natts);
            }
            super::clear_slot(self.new_slot);
            for position in 0..usize::try_from(natts).unwrap_or(0) {
                let (value, is_null) = match values.get(position).copied().flatten() {
                    Some(Some(value)) => (value, false),
                    Some(None) => (pg_sys::Datum::null(), true),
                    None => (
                        *(*self.local_slot).tts_values.add(position),
                        *(*self.local_slot).tts_isnull.add(position),
                    ),
                };
                *(*self.new_slot).tts_values.add(position) = value;
                *(*self.new_slot).tts_isnull.add(position) = is_null;
            }
            pg_sys::ExecStoreVirtualTuple(self.new_slot);
        }
    }

    fn expression_context(&self) -> *mut pg_sys::ExprContext {
        // SAFETY: GetPerTupleExprContext of src/include/executor/executor.h.
        unsafe {
            if (*self.estate).es_per_tuple_exprcontext.is_null() {
                pg_sys::MakePerTupleExprContext(self.estate);
            }
            (*self.estate).es_per_tuple_exprcontext
        }
    }

    fn begin_write(&self) {
        // SAFETY: the executor state is this transaction's.
        unsafe {
            (*self.estate).es_output_cid = pg_sys::GetCurrentCommandId(true);
            if self.has_triggers {
                pg_sys::AfterTriggerBeginQuery();
            }
        }
    }

    fn end_write(&self) {
        // SAFETY: pairs with begin_write; then what was written becomes visible to what follows in this transaction.
        unsafe {
            if self.has_triggers {
                pg_sys::AfterTriggerEndQuery(self.estate);
            }
            let context = (*self.estate).es_per_tuple_exprcontext;
            if !context.is_null() {
                pg_sys::MemoryContextReset((*context).ecxt_per_tuple_memory);
            }
            pg_sys::CommandCounterIncrement();
            pg_sys::UpdateActiveSnapshotCommandId();
        }
    }

    /// Insert the row in the new slot.
    pub fn insert(&mut self) {
        self.begin_write();
        // SAFETY: target, state and slot belong together.
        unsafe { pg_sys::ExecSimpleRelationInsert(self.target, self.estate, self.new_slot) };
        self.end_write();
    }

    /// Replace the found row by the one in the new slot.
    pub fn update(&mut self) {
        self.begin_write();
        // SAFETY: as for `insert`; the local slot holds the locked row.
        unsafe {
            pg_sys::ExecSimpleRelationUpdate(
                self.target,
                self.estate,
                &raw mut *self.epq,
                self.local_slot,
                self.new_slot,
            );
        }
        self.end_write();
    }

    /// Delete the found row.
    pub fn delete(&mut self) {
        self.begin_write();
        // SAFETY: as for `update`.
        unsafe {
            pg_sys::ExecSimpleRelationDelete(
                self.target,
                self.estate,
                &raw mut *self.epq,
                self.local_slot,
            );
        }
        self.end_write();
    }
}

/// PostgreSQL's makeNode.
///
/// # Safety
/// `tag` is the tag of `T`, a node type that starts with it and for which zeros are a valid start.
pub unsafe fn make_node<T>(tag: pg_sys::NodeTag) -> *mut T {
    // SAFETY: fresh zeroed memory of T's size, which starts with a NodeTag.
    unsafe {
        let node = pg_sys::palloc0(size_of::<T>());
        node.cast::<pg_sys::NodeTag>().write(tag);
        node.cast()
    }
}
